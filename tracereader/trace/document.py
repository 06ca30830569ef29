"""Reads the bytes of a trace file as event structs. Each event's arguments stay raw JSON until they are used.

A double represents the exact nanosecond of a µs stamp with three digits up to 2^43 µs; past that (stamps since
1970 are 1.7e15 µs) stamps are read from their text.
"""

import contextlib
import decimal
import gzip
import json
import math
import os
import re
import stat
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import BinaryIO, Generic, Literal

import msgspec

from tracereader import progress
from tracereader.command import NONE_IN_FOLDER, BadInput, MissingPackage, is_trace, is_url
from tracereader.machine import free_memory
from tracereader.trace import event_list, foreign, lenient, pftrace
from tracereader.trace.decoded import REPLACEMENT, T, decoded, printable_text
from tracereader.trace.facts import RunFacts, run_facts
from tracereader.trace.lenient import Defects
from tracereader.trace.types import SHAPES

DEFLATE_MOST = 1032  # to one, by the format
# What reading takes at most, per brace of the JSON (an event {} becomes 300 bytes; with json, 800) and per byte.
BYTES_PER_OBJECT, BYTES_PER_OBJECT_OF_JSON, BYTES_PER_BYTE = 300, 800, 2
SHORTEST_OBJECT = 3  # bytes: {} and a comma
REFUSED = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)  # what strict decoding raises
EXACT = 2.0**43  # µs
MISSING = -math.inf  # a value that JSON cannot contain
# What each category of Kineto's holds; the capitalized ones are what torch wrote before 2.0.
KINDS = {
    "user_annotation": "label",
    "cpu_op": "op", "Operator": "old op",  # annotations, too, before torch 1.11
    "python_function": "python",
    "cuda_runtime": "runtime", "cuda_driver": "runtime", "Runtime": "runtime", "hip_runtime": "runtime",
    "xpu_runtime": "runtime", "xpu_driver": "runtime",
    "kernel": "kernel", "gpu_memcpy": "memcpy", "gpu_memset": "memset",
    "Kernel": "kernel", "Memcpy": "memcpy", "Memset": "memset",
    "overhead": "overhead",
    "mtia_runtime": "runtime", "glow_runtime": "runtime", "hpu_op": "runtime", "privateuse1_runtime": "runtime",
    "privateuse1_driver": "runtime",
    "gpu_user_annotation": "span",  # on the kernels' own track: only good for finding crossings
    # On a device's tracks, and none of its work: who waits for which event, samples of hardware counters, and nodes of
    # a replayed CUDA graph that are callbacks on the CPU or recorded events.
    "cuda_sync": "sync", "cuda_event": "mark", "cuda_profiler_range": "mark", "xpu_sync": "mark",
    "hardware_counters": "mark", "graph_host_node": "mark", "graph_event_node": "mark",
    "inside_kernel": "inside",  # what a kernel recorded of itself; common/kernel_lanes.py writes them
}  # fmt: skip
# Categories of Kineto's events that are no slices of a device.
NO_SLICES = ("", "ac2g", "fwdbwd", "cpu_instant_event", "Trace")
# The phases of Chrome's events that the profiler and Perfetto write.
PHASES = ("X", "s", "t", "f", "M", "i", "I", "C", "B", "E", "b", "n", "e")
URL = re.compile(r"[a-zA-Z][\w+.-]+:/.+", re.S)  # Path writes one slash


class TraceError(BadInput):
    """The file is not a trace that can be read. The message says why in one line."""


class Event(msgspec.Struct, gc=False):
    """One event of the file."""

    ph: str = ""
    cat: str = ""
    name: str = ""
    pid: int | str | None = None
    tid: int | str | None = None
    ts: float = MISSING
    dur: float = MISSING
    args: msgspec.Raw = msgspec.Raw(b"{}")
    id: int | str | None = None


class _UsualEvent(Event, gc=False):
    """An event of known phase and category. All such events share these strings, a tenth of the memory."""

    ph: Literal[PHASES] = ""
    cat: Literal[(*KINDS, *NO_SLICES)] = ""


class ExactEvent(Event, gc=False):
    """An event whose time stamps are decimals as written."""

    ts: decimal.Decimal | None = None
    dur: decimal.Decimal | None = None


NULL = msgspec.Raw(b"null")


class _File(msgspec.Struct, Generic[T]):
    events: list[T] = msgspec.field(name="traceEvents")
    device_properties: msgspec.Raw = msgspec.field(name="deviceProperties", default=NULL)
    lesson: msgspec.Raw = NULL
    unprofiled: msgspec.Raw = msgspec.field(name="unprofiled_step_us", default=NULL)
    on_cpu: msgspec.Raw = msgspec.field(name="unprofiled_cpu_us", default=NULL)
    distributed: msgspec.Raw = msgspec.field(name="distributedInfo", default=NULL)
    base: msgspec.Raw = msgspec.field(name="baseTimeNanoseconds", default=NULL)
    host: msgspec.Raw = msgspec.field(name="host_name", default=NULL)
    is_list: bool = False  # whether the file is only the list of the events


class Document(msgspec.Struct, frozen=True):
    """A whole trace file. exact: whether its stamps are decimals or None. If not, they are doubles below EXACT."""

    events: list[Event]
    exact: bool
    defects: Defects
    device_properties: object
    facts: RunFacts
    distributed: object
    base: object  # the time from which its stamps count, in ns since 1970
    host: object
    shapes_recorded: bool


def load(path: Path, limit: int, show: Callable[[str], None] = progress.nowhere) -> Document:
    """Return the file's events and its other members. show: shows what is done next. Raises TraceError."""
    show("reading the file")
    data = json_of(path, limit)
    show(f"decoding {len(data) / 1e6:,.0f} MB of JSON")
    _require_memory(path, data, BYTES_PER_OBJECT)
    defects = Defects()
    try:
        found, exact = _decoded(data)
    except REFUSED:
        found, exact, defects = _repaired(path, data)
    if found.is_list:
        _name_the_list(path, found, defects)
    return Document(
        events=found.events,
        exact=exact,
        defects=defects,
        device_properties=decoded(found.device_properties),
        facts=run_facts(*map(decoded, (found.lesson, found.unprofiled, found.on_cpu))),
        distributed=decoded(found.distributed),
        base=decoded(found.base),
        host=decoded(found.host),
        shapes_recorded=f'"{SHAPES}"'.encode() in data,
    )


def _decoded(data: bytes) -> tuple[_File, bool]:
    """Return the file's members, and whether its stamps are decimals. Raises the errors in REFUSED."""
    try:
        found = _strict(data, _UsualEvent)
    except msgspec.ValidationError:
        try:
            found = _strict(data, Event)
        except msgspec.ValidationError:  # stamps may be numbers in a text, which a Decimal is read from
            return _strict(data, ExactEvent), True
    latest = max([abs(event.ts) for event in found.events if event.ph == "X"], default=0.0)
    if latest >= EXACT:  # or MISSING somewhere
        return _strict(data, ExactEvent), True
    return found, False


def _repaired(path: Path, data: bytes) -> tuple[_File, bool, Defects]:
    """Return the members of a file that strict decoding refuses, as of _decoded(), and its defects."""
    _require_memory(path, data, BYTES_PER_OBJECT_OF_JSON)
    why: list[Exception] = []
    for text, defects in lenient.repairs(data):
        if defects != Defects():
            with contextlib.suppress(*REFUSED):
                return *_decoded(text.encode(errors="surrogatepass")), defects
        try:
            return _any_json(path, text, defects), True, defects
        except (ValueError, RecursionError) as problem:
            why.append(problem)
    # The second one is about the text with repaired strings.
    raise TraceError(f"{path}: {foreign.text(path, data) or _why_no_json(data, why[1])}") from None


def _strict(data: bytes, event: type[T]) -> _File[T]:
    """Return the members of a trace, or the events of one that is only their list. Raises msgspec's errors."""
    if data[:64].lstrip().startswith(b"["):
        return _File(events=msgspec.json.decode(data, type=list[event]), is_list=True)
    return msgspec.json.decode(data, type=_File[event])


def _name_the_list(path: Path, found: _File, defects: Defects) -> None:
    """Give the events of a list of prof.events() their categories. Raises TraceError for one that is not understood."""
    if not event_list.is_one(found.events):
        return
    categorized = event_list.categorized(found.events)
    if categorized is None:
        raise TraceError(
            f"{path}: a list of prof.events() in which GPU activities cannot be distinguished from ops; "
            "export the trace with prof.export_chrome_trace"
        )
    found.events, defects.gpu = categorized


def in_folder(folder: Path) -> list[Path]:
    """Return the traces in a folder, in the order of their names. Raises TraceError if it has none."""
    with _refusals(folder):
        found = sorted(one for one in folder.iterdir() if is_trace(one.name) and not one.is_dir())
    if not found:
        below = any(is_trace(one.name) for one in folder.glob("*/*"))
        hint = "; its folders have some: name these, with --ranks if they are of one job" if below else ""
        raise TraceError(f"{folder}: {NONE_IN_FOLDER}{hint or foreign.in_folder(folder)}")
    return found


def located(text: str) -> list[Path]:
    """Return the traces that an argument names: itself, or those of a folder or wildcards. Raises TraceError."""
    if not is_url(text):
        return in_folder(Path(text)) if os.path.isdir(text) else [Path(text)]
    if local := re.fullmatch("(?:file|local)://(/.*)", text, re.I | re.S):
        return located(local[1])
    with _refusals(_remote().named(text)):
        return _remote().located(text)


def _remote() -> ModuleType:
    from tracereader.trace import remote  # only for a URL: fsspec is an extra

    return remote


def address_of(path: Path) -> str:
    """Return an address that is also valid in another process: an absolute path, or the URL with its credentials."""
    return _remote().address_of(path) if is_url(path) else os.path.abspath(path)


def path_of(address: str) -> Path:
    """Return the path of an address that address_of() returned."""
    return _remote().named(address) if is_url(address) else Path(address)


def size_of(path: Path) -> tuple[int | None, bool]:
    """Return a file's size in bytes, and whether it is packed. 0: it cannot be read. None: the server does not say."""
    try:
        if is_url(path):
            return _remote().size_of(address_of(path)), path.name.endswith(".gz")
        with opened(path, 2, whole=False) as file:
            return os.fstat(file.fileno()).st_size, file.read(2) == b"\x1f\x8b"
    except OSError:
        return 0, False


def refuse_at_once(path: Path) -> None:
    """Raise TraceError if the file's name or first bytes show that it cannot be read."""
    with _refusals(path), _opened_plain(path, foreign.HEAD, whole=False):
        pass


def json_of(path: Path, limit: int) -> bytes:
    """Return the file's JSON, unpacked. A trace in Perfetto's format is converted to JSON. Raises TraceError."""
    with _refusals(path):
        data = _unpacked(path, limit)
        if not pftrace.is_one(data):
            return lenient.as_utf8(data)
        # While the events are joined, their JSON is in memory twice.
        return pftrace.as_json(data, min(limit, (free_memory() or 2 * limit) // 2))


@contextlib.contextmanager
def _refusals(path: Path) -> Iterator[None]:
    """Turn the system's errors into a TraceError."""
    try:
        yield
    except FileNotFoundError:
        raise TraceError(f"{path}: no such file") from None
    except IsADirectoryError:
        raise TraceError(f"{path}: a folder, not a trace; name the .json file in it") from None
    except (EOFError, zlib.error, gzip.BadGzipFile) as problem:
        raise TraceError(f"{path}: broken gzip ({problem})") from None
    except MissingPackage as problem:
        raise TraceError(f"{path}: {problem}") from None
    except (OSError, ValueError) as problem:
        raise TraceError(f"{path}: cannot be read ({getattr(problem, 'strerror', None) or problem})") from None


def _require_memory(path: Path, data: bytes, per_object: int) -> None:
    free, needed = free_memory(), (per_object // SHORTEST_OBJECT + BYTES_PER_BYTE) * len(data)
    if free is None or needed < free:
        return  # counting would take a tenth of the time of decoding
    needed = per_object * data.count(b"{") + BYTES_PER_BYTE * len(data)
    if needed > free:
        raise TraceError(
            f"{path}: reading it may take {needed / 1e9:.1f} GB of memory, and {free / 1e9:.1f} GB are free"
        )


def opened(path: Path, most: int, whole: bool = True) -> BinaryIO:
    """Return the opened file. A FIFO is opened without waiting for its other end. Raises OSError.

    most: for a URL, the most bytes to download. A larger file is refused, or cut off if `whole` is false.
    """
    try:
        return open(path, "rb", opener=lambda name, flags: os.open(name, flags | getattr(os, "O_NONBLOCK", 0)))
    except OSError:
        if not URL.fullmatch(str(path)):
            raise
    return _remote().fetched(_remote().address_of(path), most, whole)


@contextlib.contextmanager
def _opened_plain(path: Path, most: int, whole: bool = True) -> Iterator[tuple[BinaryIO, int, bool]]:
    """Yield a regular file, its size, and whether it is packed with gzip. Raises TraceError for other formats."""
    with opened(path, most, whole) as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise TraceError(f"{path}: not a regular file")
        begins = file.read(foreign.HEAD)
        if said := foreign.binary(path, begins):
            raise TraceError(f"{path}: {said}")
        file.seek(0)
        yield file, status.st_size, begins.startswith(b"\x1f\x8b")


def _unpacked(path: Path, limit: int) -> bytes:
    too_long = TraceError(f"{path}: more than {limit} bytes of JSON; --limit raises the limit")
    with _opened_plain(path, limit) as (file, size, packed):
        if not packed:
            if size > limit:
                raise too_long
            return file.read(size or -1)  # without a size, what was read before is copied
        unzipped = gzip.GzipFile(fileobj=file)
        free = free_memory()
        if free is not None and limit > free:
            limit, too_long = free, TraceError(f"{path}: holds more JSON than the {free / 1e9:.1f} GB of free memory")
        if size * DEFLATE_MOST > limit:
            # It may be a gzip bomb, so its size is counted before any of it is kept.
            held = 0
            while chunk := unzipped.read(1 << 20):
                held += len(chunk)
                if held > limit:
                    raise too_long
            unzipped.seek(0)
        return unzipped.read()


def _any_json(path: Path, text: str, defects: Defects) -> _File:
    """Return events that strict decoding refuses: with NaN, or a name that is no string. Adds the events left out.

    Raises ValueError, RecursionError for what is no JSON, and TraceError.
    """
    found = lenient.values(text)
    is_list = isinstance(found, list)
    found = {"traceEvents": found} if is_list else found
    kind = foreign.text(path, text[: foreign.HEAD].encode(errors="replace"))
    if not isinstance(found, dict) or not isinstance(found.get("traceEvents"), list):
        why = "JSON, but not a trace of PyTorch's profiler (it has no traceEvents)"
        raise TraceError(f"{path}: {kind or why}")
    events = []
    for event in found["traceEvents"]:
        if not isinstance(event, dict):
            defects.events += 1
            continue
        told = {name: _text(event.get(name)) for name in ("ph", "cat")} | {"name": _text(event.get("name", ""))}
        plain = {name: _plain(event.get(name)) for name in ("pid", "tid", "id")}
        times = {name: lenient.number(event.get(name)) for name in ("ts", "dur")}
        events.append(ExactEvent(**told, **plain, **times, args=_raw(event.get("args"))))
    fields = (field for field in msgspec.structs.fields(_File) if field.type is msgspec.Raw)
    beside = {field.name: _raw(found.get(field.encode_name)) for field in fields}
    if found["traceEvents"] and not events:
        raise TraceError(f"{path}: {kind or 'JSON, but its events are no objects'}")
    return _File(events=events, is_list=is_list, **beside)


def _why_no_json(data: bytes, problem: Exception) -> str:
    """Return why bytes that no format begins with are no JSON either."""
    if isinstance(problem, RecursionError):
        return "its JSON is nested too deeply"
    text = data.decode(errors="replace")
    if not text.lstrip().startswith(("{", "[")):
        return "not text, so not a Chrome trace" if REPLACEMENT in text else f"not JSON ({problem})"
    at_its_end = isinstance(problem, json.JSONDecodeError) and problem.pos >= len(problem.doc.rstrip())
    if at_its_end or "Unterminated string" in str(problem):
        return "the file is cut short: its JSON ends in the middle, as where a program was killed while it wrote"
    return f"not JSON ({problem})"


def _raw(value: object) -> msgspec.Raw:
    try:
        return msgspec.Raw(json.dumps(value, default=float).encode())
    except RecursionError:
        return NULL


def _text(value: object) -> str:
    return printable_text(value if isinstance(value, str) else str(value)[:200])


def _plain(value: object) -> int | str:
    return value if type(value) is int else _text(value)
