"""Writes a trace, or the ranks of a run as one, as JSON (--export, and --open for ranks)."""

import gzip
import io
from pathlib import Path

import msgspec

from tracereader.command import BadInput
from tracereader.figures.ranks import RankFigures, RanksSummary
from tracereader.findings.finding import counted
from tracereader.show.atomic import replace, status_of
from tracereader.show.text import console, paragraph, plain, shown_path
from tracereader.trace import TraceError
from tracereader.trace.decoded import decoded, decoded_as
from tracereader.trace.document import json_of
from tracereader.trace.lenient import LARGEST

ENDINGS = (".json", ".json.gz")
# The distance between the process numbers of two ranks. Perfetto lists processes in this order.
APART = 1000
_MEMBERS = msgspec.json.Decoder(dict[str, msgspec.Raw])


def refuse_early(target: str, force: bool, traces: list[Path]) -> None:
    """Raise BadInput if the copy cannot be written there. This comes before a trace is read, which may take long."""
    status = status_of("--export", target, traces)
    name = Path(target).name
    if not name.endswith(ENDINGS) or name in ENDINGS:
        raise BadInput(f"--export {target}: the name has to end in .json or .json.gz")
    if status is not None and not force:
        raise BadInput(f"--export {target}: exists; --force overwrites it")


def write(trace: Path, target: str, force: bool, limit: int) -> None:
    """Write a trace's JSON. Raises BadInput."""
    content = json_of(trace, limit)
    if "traceEvents" not in (decoded_as(_MEMBERS, content) or {}):  # it builds no event: a trace may have millions
        raise TraceError(f"{trace}: cannot be copied (it is no JSON with events)")
    _put(content, target, force, [trace])
    paragraph(console(), f"{plain(shown_path(Path(target)))} is written")


def write_merged(content: bytes, target: str, force: bool, traces: list[Path], ranks: int) -> None:
    """Write the merged traces of a run's ranks. content: packed with gzip. ranks: their number. Raises BadInput."""
    _put(gzip.decompress(content), target, force, traces)
    paragraph(console(), f"{plain(shown_path(Path(target)))} is written: {counted(ranks, 'rank')} in one trace")


def _put(content: bytes, target: str, force: bool, traces: list[Path]) -> None:
    refuse_early(target, force, traces)  # again, because another program may have written the file meanwhile
    replace(Path(target), gzip.compress(content, compresslevel=1) if target.endswith(".gz") else content)


def merged(summary: RanksSummary, limit: int) -> tuple[Path, bytes]:
    """Return a name for the merged trace, and its bytes: a Chrome trace, packed with gzip. Raises TraceError.

    limit: the most bytes of JSON of one rank. The ranks are read one after the other, so that memory holds only one.
    """
    packed = io.BytesIO()
    bases = None
    with gzip.GzipFile(fileobj=packed, mode="wb", compresslevel=1) as file:
        file.write(b'{"displayTimeUnit": "ms", "traceEvents": [')
        for number, one in enumerate(summary.ranks):
            events, base = _read(Path(one.trace), limit)
            bases = base if bases is None else bases
            events = _of_rank(one, events, (base - bases) / 1e3 - summary.clocks.ahead_us[one.rank])
            file.write(b"," * bool(number) + msgspec.json.encode(events)[1:-1])
        file.write(b"]}")
    first = Path(summary.ranks[0].trace)
    return first.with_name(f"{len(summary.ranks)}_ranks_{first.name.removesuffix('.gz')}.gz"), packed.getvalue()


def _read(path: Path, limit: int) -> tuple[list[dict], int]:
    """Return a trace's events, and the time from which their stamps count (ns since 1970). Raises TraceError."""
    found = decoded(json_of(path, limit))
    events = found.get("traceEvents") if isinstance(found, dict) else None
    if not isinstance(events, list) or not all(isinstance(event, dict) for event in events):
        raise TraceError(f"{path}: cannot be merged with others (its events cannot be read as text)")
    base = found.get("baseTimeNanoseconds", 0)
    return events, base if type(base) is int else 0


def _of_rank(one: RankFigures, events: list[dict], shift_us: float) -> list[dict]:
    """Return a rank's events on the common clock, with process numbers and process names of its own."""
    for event in events:
        if not isinstance(event.get("pid"), (int, str)):
            event["pid"] = str(event.get("pid"))
    labels = {
        event["pid"]: event["args"].get("labels")
        for event in events
        if event.get("ph") == "M" and event.get("name") == "process_labels" and isinstance(event.get("args"), dict)
    }
    named = ("process_name", "process_labels", "process_sort_index")
    kept = [event for event in events if not (event.get("ph") == "M" and event.get("name") in named)]
    pids: dict[object, int] = {}
    used = [event.get("pid") for event in kept if event.get("ph") == "X"]
    for event in kept:
        pid = event.get("pid")
        event["pid"] = pids.setdefault(pid, one.rank * APART + len(pids) + 1)
        if isinstance(event.get("ts"), (int, float)) and abs(event["ts"]) < LARGEST and shift_us:
            event["ts"] = round(event["ts"] + shift_us, 3)
        if "id" in event:
            event["id"] = f"{one.rank}.{event['id']}"  # so that no flow connects two ranks
    names = []
    for pid in dict.fromkeys(used):
        told = labels.get(pid) or str(pid)
        place = {"pid": pids[pid], "tid": 0, "ph": "M", "ts": 0}
        order = one.rank * APART + (not str(told).startswith("CPU"))
        names.append(place | {"name": "process_name", "args": {"name": f"rank {one.rank} {told}"}})
        names.append(place | {"name": "process_sort_index", "args": {"sort_index": order}})
    return names + kept
