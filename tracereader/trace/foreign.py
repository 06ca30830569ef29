"""Names files that are no traces by their first bytes: what each file is, and what to open instead."""

import contextlib
import re
import zlib
from pathlib import Path

HEAD = 4096  # bytes: what a file is named by
MOST_LOOKED_AT = 100  # files of a folder without traces
PACKED = "compressed with {}, and only gzip can be read; uncompress it first: {} {{path}}"
ANOTHER = "read-trace reads the file that torch.profiler's export_chrome_trace writes"
TRACES = (".json", ".json.gz", ".pt.trace.json", ".pt.trace.json.gz", ".pftrace", ".pftrace.gz")
# Files that are no traces: a regular expression for their first bytes (as Latin-1), and a sentence on them, in which
# "{path}" is the file. These formats begin with bytes that no trace begins with.
BINARY = [
    (r"\x28\xb5\x2f\xfd", PACKED.format("zstd", "zstd -d")),
    (r"PK\x03\x04.{0,99}?(?:data\.pkl|/version|/byteorder)", f"a file of torch.save; {ANOTHER}"),
    (r"PK\x03\x04", PACKED.format("zip", "unzip")),
    (r"\xfd7zX", PACKED.format("xz", "xz -d")),
    (r"BZh", PACKED.format("bzip2", "bzip2 -d")),
    (r".{257}ustar", "a tar archive; extract it first (tar -xf {path}) and name the traces in it"),
    (r"\x80[\x02-\x05].{0,40}(?:segments|device_traces)",
     "a snapshot of PyTorch's memory; open it at https://pytorch.org/memory_viz"),
    (r"\x80[\x02-\x05]", f"a Python pickle; {ANOTHER}"),
    (r"SQLite format 3\x00",
     "an SQLite database, such as nsys export and rocprofv3 write; an .nsys-rep beside it opens in Nsight Systems "
     "(nsys-ui)"),
    (r"NVR\x00", "a report of Nsight Compute; open it in ncu-ui, or print it with ncu --import {path}"),
    (r"\x0a[\x80-\xff]{0,9}[\x00-\x7f](?:\x08[\x80-\xff]{0,9}[\x00-\x7f])?\x12[\x01-\x7f]"
     r"(?:/host:|/device:|Task Environment|#Chip)",
     "a profile of JAX or TensorFlow (xplane.pb); open it in TensorBoard's profile plugin (xprof)"),
    (r"version https://git-lfs\.github\.com/spec/",
     "a pointer of Git LFS, not the file itself; git lfs pull downloads the file"),
    (r"\s*<html>\s*<head><meta charset=\"utf-8\" /><title>GPU Memory Timeline",
     "the memory timeline of export_memory_timeline; open it in a browser"),
    (r"<!doctype html><!-- a report of read-trace", "a report page of read-trace; open it in a browser"),
    (r"(?:\s|\xef\xbb\xbf)*<(?:!doctype\s+html|!--|html|head|body)",
     "an HTML page, not a trace; a server may have answered with its sign-in or error page: download the file "
     "again"),
    (r"(?:\s|\xef\xbb\xbf)*<(?:\?xml|Error)",
     "an XML document, not a trace; a server may have answered with an error: download the file again"),
    (r"[^\n]{0,80}\n?-{5,}(?:  -{5,})+\s*\n\s+Name\s",
     "the profiler's table of sums over ops, not single events; export the trace with prof.export_chrome_trace"),
]  # fmt: skip
# These begin with JSON or text that a trace could begin with, so they are asked only where no trace could be read.
TEXT = [
    (r"\s*$", "the file is empty"),
    (r'\s*\{"data":\s?\[|.*"(?:CudaEvent|TraceProcessEvent|NvtxEvent|GlobalVid)"',
     "an export of Nsight Systems (nsys); open its .nsys-rep in nsys-ui"),
    (r"\s*\[\s*\[\s*[-\d\[]",
     "the data of export_memory_timeline, not single ops; export the trace with prof.export_chrome_trace"),
    (r'\s*\{\s*"schema":\s?"[^"]*chakra|\s*\{\s*"schema":.*"nodes":',
     "an execution trace (ExecutionTraceObserver), which has no times; record one with torch.profiler, too"),
    (r'\s*\{\s*"rocprofiler-sdk-tool"', f"the JSON of rocprofv3; {ANOTHER}"),
    (r'\s*\{.*"\$schema":\s?"https://www\.speedscope\.app', "a profile for speedscope; open it at speedscope.app"),
    (r"run \S+\s*\n", "a table of a numbered script of this project, not the trace of its run"),
    (r"[^\n;]+(?:;[^\n;]+)+ \d+\n", "stacks as export_stacks writes them; open them with flamegraph.pl"),
]  # fmt: skip
# By the ends of names, for formats whose first bytes are not known.
NAMED = {
    (".nsys-rep", ".qdrep", ".qdstrm"):
        "a report of Nsight Systems (nsys); open it in nsys-ui, or print sums with nsys stats {path}",
    (".ncu-rep",): "a report of Nsight Compute; open it in ncu-ui, or print it with ncu --import {path}",
    (".xplane.pb",): "a profile of JAX or TensorFlow; open it in TensorBoard's profile plugin (xprof)",
}  # fmt: skip
_BINARY, _TEXT = (
    [(re.compile(begins.encode("latin-1"), re.DOTALL | re.IGNORECASE), says) for begins, says in kinds]
    for kinds in (BINARY, TEXT)
)


def binary(path: Path, head: bytes) -> str | None:
    """Return a sentence on a file whose name or first bytes no trace has; None for any other file."""
    named = next((says for ends, says in NAMED.items() if path.name.lower().endswith(ends)), None)
    return _sentence(path, named or _kind(_BINARY, head))


def text(path: Path, data: bytes) -> str | None:
    """Return a sentence on unpacked text that could not be read as a trace; None where its kind is not known."""
    return _sentence(path, _kind(_TEXT, data[:HEAD]))


def in_folder(folder: Path) -> str:
    """Return words on a file of a known kind in a folder without traces; "" without one."""
    for path in sorted(folder.iterdir())[:MOST_LOOKED_AT]:
        if path.is_file() and (said := binary(path, _head(path))):
            return f"; {path.name} is {said}"
    return ""


def _kind(kinds: list[tuple[re.Pattern[bytes], str]], head: bytes) -> str | None:
    if head.startswith(b"\x1f\x8b"):
        with contextlib.suppress(zlib.error):
            head = zlib.decompressobj(31).decompress(head, HEAD)
    return next((says for begins, says in kinds if begins.match(head)), None)


def _sentence(path: Path, says: str | None) -> str | None:
    return None if says is None else says.replace("{path}", str(path)) + _beside(path)


def _beside(path: Path) -> str:
    """Return words that name the trace beside a file, which has its name with another ending; "" without one."""
    stem = Path(path.name.removesuffix(".gz")).stem
    for one in (path.with_name(stem + end) for end in TRACES):
        if one != path and one.is_file() and not (_kind(_BINARY, _head(one)) or _kind(_TEXT, _head(one))):
            return f"; the trace is the {one.name.removeprefix(stem)} beside it, {one}"
    return ""


def _head(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(HEAD)
    except OSError:
        return b""
