"""Finds and reads traces behind URLs with fsspec. A download goes to a file without a name.

fsspec is an extra, and its import takes as long as reading a small trace, so it is imported when a URL is read.
"""

import errno
import re
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from http import HTTPStatus
from pathlib import Path
from typing import BinaryIO, TypeVar
from urllib.parse import urlsplit

from tracereader import progress
from tracereader.command import NONE_IN_FOLDER, MissingPackage, is_trace, printable

HTTP = re.compile("https?://", re.I)
CHUNK = 1 << 22  # bytes that a download holds in memory
# Pauses between the attempts of a request.
PAUSES_S = (0.5, 1.0, 2.0)
# The packages of these stores repeat a failed request themselves, gcsfs for more than half a minute.
REPEATED_BY_PACKAGE = ("s3", "s3a", "gs", "gcs", "az", "abfs", "abfss")
# The time limits for a silent server and for a connection. aiohttp's default limits the whole download.
SILENT_S, CONNECT_S = 60, 15
MOST_TRACES = 20_000  # of one URL: those of the largest jobs
# HTTP statuses from 400 to 499 after which another attempt may succeed.
TEMPORARY = (408, 425, 429)
# By a URL's protocol, the package that reads it and installs fsspec. fsspec knows more of them once it is installed.
PACKAGES = {
    "s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "hf": "huggingface_hub", "az": "adlfs", "abfs": "adlfs",
    "abfss": "adlfs",
}  # fmt: skip
WITH_HTTP = "fsspec[http]"
# The userinfo before a host. Azure puts a container there, but without a password.
_PASSWORD = r"[^/@:]*:(?!\d+/)[^@]*@"
_USERINFO = re.compile(rf"{_PASSWORD}|[^/@]*@")
_AZURE = re.compile("abfss?|az", re.I)
_URL = re.compile(r"([a-zA-Z][\w+.-]*)://(.*)", re.S)
# By a trace's name, which may be printed and stored: its URL as given, with its credentials.
_addresses: dict[str, str] = {}
# The servers that could not be reached in any attempt. They are asked once for the other ranks, perhaps a thousand.
_gone: set[str] = set()
T = TypeVar("T")


class _Refused(OSError):
    """A failure that another attempt would repeat. Its text is the reader's and contains no credentials."""


class Address(type(Path())):
    """The name of a trace behind a URL: the URL without credentials. pathlib writes only one of the two slashes."""

    def __str__(self) -> str:
        return re.sub(r"(^|::)([a-zA-Z][\w+.-]*):/", r"\1\2://", super().__str__())


def named(address: str) -> Path:
    """Return the name of the trace at a URL. URLs that differ only in their credentials have different names."""
    name = without_credentials(address)
    number, unique = 1, Address(name)
    while _addresses.setdefault(str(Path(unique)), address) != address:
        number += 1
        unique = Address(f"{name}#{number}")
    return unique


def address_of(path: Path) -> str:
    """Return the URL of a trace, with the credentials that its name does not contain."""
    return _addresses.get(str(Path(path)), str(Address(path)))


def without_credentials(address: str) -> str:
    """Return a URL without its user, password and query, because the query may be a signature."""
    return "::".join(map(_public, address.split("::")))


def _public(part: str) -> str:
    if not (found := _URL.fullmatch(part)):
        return part
    protocol, rest = found.groups()
    userinfo = re.compile(_PASSWORD) if _AZURE.fullmatch(protocol) else _USERINFO
    rest = rest[user.end() :] if (user := userinfo.match(rest)) else rest
    return f"{protocol}://{re.split(r'[?#]' if HTTP.match(part) else '[?]', rest)[0]}"


def located(address: str) -> list[Path]:
    """Return the traces of a URL by name: those in a folder, or those that match wildcards. Raises OSError."""
    is_http = HTTP.match(address)  # in HTTP a "?" begins a query
    bare = re.split(r"[?#]", address)[0] if is_http else address
    wildcards = re.search(r"[*\[]" if is_http else r"[*?\[]", bare)
    folder = bare.endswith("/")
    if not (wildcards or folder) and (is_http or _is_trace(bare)):
        return [named(address)]

    def names() -> list[str] | None:
        files, path = _filesystem(address)
        files.invalidate_cache()
        if not (wildcards or folder or files.isdir(path)):
            return None
        look = files.glob if wildcards else files.ls
        # Over HTTP, details need a request for each name.
        found = look(path, detail=not is_http)
        if not is_http:
            found = found.values() if wildcards else found
            found = [one["name"] for one in found if one["type"] == "file"]
        return sorted(files.unstrip_protocol(one) for one in found if wildcards or _is_trace(one))

    found = _tried(address, names)
    if found is None:
        return [named(address)]
    if not found:
        raise OSError("no file there matches" if wildcards else NONE_IN_FOLDER)
    if len(found) > MOST_TRACES:
        raise OSError(f"it names {len(found):,} traces, more than {MOST_TRACES:,}: name fewer with wildcards")
    return [named(one) for one in found if not one.endswith("/")]


def _is_trace(address: str) -> bool:
    return is_trace(address.split("?")[0].rpartition("/")[2])


def size_of(address: str) -> int | None:
    """Return a file's size in bytes; None if the server does not say. Raises OSError."""

    def size() -> int | None:
        with closing(_opened(address)) as source:
            return _announced(source)

    return _tried(address, size)


def fetched(address: str, most: int, whole: bool) -> BinaryIO:
    """Return the downloaded file of a URL. Raises OSError.

    The file has no name, so nothing of it remains after this process ends. most: the most bytes to download. A larger
    file is refused, or cut off if `whole` is false.
    """
    into = tempfile.TemporaryFile()  # noqa: SIM115  the caller closes it
    try:
        with progress.shown() as show:
            _tried(address, lambda: _copied(address, into, most, whole, show))
    except BaseException:
        into.close()
        raise
    into.seek(0)
    return into


def _copied(address: str, into: BinaryIO, most: int, whole: bool, show: Callable[[str], None]) -> None:
    name = printable(without_credentials(address).rpartition("/")[2])[:60]
    into.seek(0)
    into.truncate()
    with closing(_opened(address)) as source:
        size = _announced(source)
        of = f" of {size / 1e6:,.1f}" if size else ""
        too_large = _Refused(f"it has more than {most:,} bytes; --limit raises the limit")
        if whole and size is not None and size > most:
            raise too_large
        done = 0
        while chunk := source.read(min(CHUNK, most - done + whole)):
            done += len(chunk)
            if done > most:
                raise too_large
            into.write(chunk)
            show(f"downloading {name}: {done / 1e6:,.1f}{of} MB")
        if size is not None and done < min(size, most) and not HTTP.match(address):  # aiohttp checks the size itself
            raise OSError(f"the download ended after {done:,} of {size:,} bytes")


def _opened(address: str) -> BinaryIO:
    files, path = _filesystem(address)
    if HTTP.match(address):
        # Read one stream. Ranges need a server that supports them, and a request for the size.
        return files.open(path, "rb", block_size=0, size=1)
    return files.open(path, "rb", block_size=CHUNK, cache_type="none")


def _announced(source: BinaryIO) -> int | None:
    """Return a file's size in bytes; None if it is unknown. A compressed answer's length is not that of the file."""
    size, answer = getattr(source, "size", None), getattr(source, "r", None)
    if size is not None or answer is None:
        return size
    return None if "Content-Encoding" in answer.headers else answer.content_length


def _filesystem(address: str) -> tuple[object, str]:
    """Return fsspec's file system for a URL, and the path in that file system. Raises OSError."""
    protocol = _protocol(address)
    try:
        from fsspec.core import url_to_fs
        from fsspec.registry import known_implementations
    except ImportError:
        raise MissingPackage(f"{protocol}://", PACKAGES.get(protocol, WITH_HTTP)) from None
    is_http, options = HTTP.match(address), {}
    try:
        address = re.sub(r"^[a-zA-Z][\w+.-]*(?=://)", lambda one: one[0].lower(), address)
        if is_http:
            urlsplit(address)
            import aiohttp

            timeout = aiohttp.ClientTimeout(total=None, connect=CONNECT_S, sock_connect=CONNECT_S, sock_read=SILENT_S)
            # An encoded URL stays as it is, because a signature may depend on it.
            options = {"client_kwargs": {"timeout": timeout}, "encoded": "%" in address}
        return url_to_fs(address, **options)
    except ImportError as problem:
        package = known_implementations.get(protocol, {}).get("class", "fsspec").partition(".")[0]
        package = WITH_HTTP if is_http else PACKAGES.get(protocol, package.replace("_", "-"))
        if package == "fsspec":
            raise _Refused(f"a package for {protocol}:// is missing: {problem}") from problem
        raise MissingPackage(f"{protocol}://", package) from problem
    except ValueError as problem:
        if is_http:
            raise _Refused(f"not a valid URL: {problem}") from None
        if protocol in known_implementations:
            raise
        raise _Refused(f"fsspec knows no protocol {protocol}://") from problem


def _protocol(address: str) -> str:
    return address.partition("://")[0].rpartition("::")[2].lower()


def _tried(address: str, ask: Callable[[], T]) -> T:
    """Return the result of `ask`. It is repeated after temporary failures. Raises OSError, without credentials."""
    server = "/".join(address.split("/")[:3])
    pauses = () if _protocol(address) in REPEATED_BY_PACKAGE or server in _gone else PAUSES_S
    for pause in (*pauses, None):
        try:
            found = ask()
            _gone.discard(server)
            return found
        except (FileNotFoundError, IsADirectoryError) as problem:
            raise type(problem)(without_credentials(address)) from None
        except (_Refused, MissingPackage):
            raise
        except Exception as problem:
            if pause is None or _is_final(problem):
                kind = type(problem).__name__
                if "Connect" in kind and "Reset" not in kind:
                    _gone.add(server)
                raise OSError(_told(problem, address)) from None
        time.sleep(pause)
    raise AssertionError("the last try returns or raises")


def _is_final(problem: Exception) -> bool:
    """Return whether another attempt would fail in the same way."""
    status = _status(problem)
    if status is not None:
        return 400 <= status < 500 and status not in TEMPORARY
    final = (PermissionError, ValueError, TypeError, NotImplementedError, ImportError)
    return isinstance(problem, final) or getattr(problem, "errno", None) == errno.ENOSPC


def _status(problem: Exception) -> int | None:
    """Return the HTTP status of a failure, under the name that its library uses; None without one."""
    response = getattr(problem, "response", None)
    status = getattr(problem, "status", getattr(response, "status_code", None))
    return status if type(status) is int else None


def _told(problem: Exception, address: str) -> str:
    """Return why a request failed, in one line without credentials. A library's message may contain the URL."""
    status = _status(problem)
    if status is not None:
        known = {one.value: one.phrase for one in HTTPStatus}
        return f"the server answered {status} {known.get(status, '')}".strip()
    if isinstance(problem, PermissionError):
        return "access is denied"
    if isinstance(problem, TimeoutError) or "Timeout" in type(problem).__name__:
        return "the server did not answer in time"
    if "Payload" in type(problem).__name__:
        return "the server ended its answer too early"
    said = " ".join((getattr(problem, "strerror", None) or str(problem)).split())
    said = re.sub(r"[a-zA-Z][\w+.-]*://[^\s\"']*", lambda url: without_credentials(url[0]), said)
    pieces = re.split(r"[:/@?&=#]+", address)
    hidden = [one for one in pieces if len(one) > 3 and one not in without_credentials(address)]
    if not said or any(one in said for one in hidden):
        return type(problem).__name__
    return said if len(said) < 200 else f"{said[:200]}…"
