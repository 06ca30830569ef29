"""Ties the work of replayed CUDA graphs to the calls that were captured.

A replay's kernels have one launch, so the trace shows neither the op nor the module of each kernel. The trace of the
capture does. It may be in the same file or in another one. vLLM and SGLang write such files (capture_traces/), and a
trace of the same step without the graph serves as well.
"""

import bisect
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import msgspec

from tracereader import progress
from tracereader.command import DEFAULT_LIMIT
from tracereader.trace import families
from tracereader.trace.document import in_folder
from tracereader.trace.grouped import grouped
from tracereader.trace.kernel_names import decode
from tracereader.trace.marks import StepsBy
from tracereader.trace.quality import CAPTURE_EDGE
from tracereader.trace.slices import Op, Recorded, Trace, Work, innermost, start_of
from tracereader.trace.tree import read, ties_of

MEMSET_KERNEL = re.compile(r"memset\d+")
# The names in which vLLM and SGLang give the batch size that they capture or run. The graph of the next size up runs.
CAPTURED_SIZE = re.compile(r"(?:^|_)capture_(\d+)_|(?:^|_)bs_(\d+)_rank")
EXECUTED_SIZE = re.compile(r"^execute_(\d+)_|^step\[\w+ bs=(\d+)\b")
EXECUTED_TOKENS = re.compile(r"^execute_context_\d+\((\d+)\)_generation_\d+\((\d+)\)")


class _Recording(msgspec.Struct, eq=False):
    """The calls of one capture in order. names: the names of their kernels; None if the trace does not have them."""

    trace: Trace
    calls: list[Op]
    kinds: list[str]
    names: list[str | None]
    size: int | None


def is_launch(op: Op) -> bool:
    """Return whether it is a runtime call that launches. An annotation may have such a name, too."""
    return op.kind == "runtime" and "Launch" in op.name


def read_with_captures(
    path: Path,
    captures: Sequence[Path] = (),
    limit: int = DEFAULT_LIMIT,
    show: Callable[[str], None] = progress.nowhere,
    steps_by: str | StepsBy = StepsBy.RECORDED,
    process: str | None = None,
) -> Trace:
    """Return the trace in a file, with the work of its CUDA graphs tied to the captured calls. Raises TraceError.

    captures: files or folders with the captures' traces. show: shows what is done next. steps_by, process: see read().
    """
    files = files_of(captures)
    trace = msgspec.structs.replace(read(path, limit, show, steps_by, process), captured=tuple(captures))
    if any("GraphLaunch" in name for name in trace.op_names):
        own = [trace] if any(CAPTURE_EDGE.search(name) for name in trace.op_names) else []
        trace = msgspec.structs.replace(trace, untied=tie(trace, [*own, *(read(file, limit) for file in files)]))
    return trace


def files_of(captures: Sequence[Path]) -> list[Path]:
    """Return each trace of these files and folders once. Raises TraceError for a folder without traces."""
    return list(dict.fromkeys(file for one in captures for file in (in_folder(one) if one.is_dir() else [one])))


def tie(trace: Trace, captured: Sequence[Trace]) -> Counter:
    """Tie the work of each replayed graph to the capture with as many calls of the same kinds in the same order.

    Returns the number of launches that are not tied by the reason: no_order, if the order of the replay's nodes is not
    known; no_capture_fits; or captures_differ, if several captures fit that differ in their ops, shapes or modules.
    """
    untied: Counter = Counter()
    recordings = [one for other in captured for one in _recordings(other)]
    if not recordings:
        return untied
    for step in trace.steps:
        replays = grouped((id(one.launch), one) for one in step.work if one.from_graph)
        fitting = grouped(())  # the replays, by the captures that fit
        known: dict[tuple, tuple[list, list]] = {}  # what fits, by size and kernels: replays are often alike
        for some in replays.values():
            if (ordered := _in_order(some)) is None:
                untied["no_order"] += 1
                continue
            executed = _executed_size(some[0].launch)
            key = (executed, *((one.name, one.kind) for one in ordered))
            if key not in known:
                found = _of_size([fit for one in recordings for fit in _fits(one, ordered)], executed)
                known[key] = found, fitting[tuple(id(calls[0]) for _, calls in found)]
            known[key][1].append((ordered, known[key][0]))
        for same in fitting.values():
            candidates = same[0][1]
            if not candidates:
                untied["no_capture_fits"] += len(same)
                continue
            alike = len(candidates) == 1 or len({_described(*one) for one in candidates}) == 1
            # A model that is captured in parts has as many equal captures as replays, in the same order.
            pieces = not alike and len(same) == len(candidates) and len({id(one) for one, _ in candidates}) == len(same)
            if not alike and not pieces:
                untied["captures_differ"] += len(same)
                continue
            for place, (ordered, _) in enumerate(same):
                _tie(ordered, *candidates[place if pieces else 0])
    return untied


def _tie(work: Sequence[Work], recording: _Recording, calls: Sequence[Op]) -> None:
    together = grouped((id(call.parent), one) for one, call in zip(work, calls, strict=True))
    for one, call in zip(work, calls, strict=True):
        one.recorded = Recorded(call, recording.trace, together[id(call.parent)])
        one.said = None


def _recordings(trace: Trace) -> Iterator[_Recording]:
    """Yield each capture of a trace; for a trace without captures its last step."""
    calls = sorted((op for root in trace.roots for op in root.walk() if op.kind == "runtime"), key=start_of)
    spans = list(_spans(calls))
    if not spans:
        yield _recording(trace, [call for call in calls if call.work and trace.steps[-1].start <= call.start])
        return
    recorded = [call for call in calls if not call.work]
    starts = [call.start for call in recorded]
    several = len({track for track, _, _ in spans}) > 1  # threads; the captures of one do not overlap
    for track, start, end in spans:
        inside = recorded[bisect.bisect_left(starts, start) : bisect.bisect_left(starts, end)]
        if several and any(other != track and begin < end and start < stop for other, begin, stop in spans):
            inside = [call for call in inside if call.track == track]
        yield _recording(trace, inside)


def _spans(calls: Iterable[Op]) -> Iterator[tuple[tuple, int, int]]:
    """Yield each capture's thread, begin and end."""
    begun: dict[tuple, int] = {}
    for call in calls:
        edge = CAPTURE_EDGE.search(call.name)
        if edge and edge[1] == "Begin":
            begun[call.track] = call.end
        elif edge and call.track in begun:
            yield call.track, begun.pop(call.track), call.start


def _recording(trace: Trace, calls: Iterable[Op]) -> _Recording:
    found = [(call, kind) for call in calls if (kind := _kind(call))]
    calls, kinds = [call for call, _ in found], [kind for _, kind in found]
    around = [op.name for call in calls[:1] for op in call.above()]
    sizes = [match for name in (*around, trace.path.name) if (match := CAPTURED_SIZE.search(name))]
    size = int(sizes[0][1] or sizes[0][2]) if sizes else None
    return _Recording(trace, calls, kinds, list(map(_kernel_of, calls)), size)


def _kind(call: Op) -> str | None:
    """Return the kind of node that a call adds to a graph: kernel, memcpy or memset; None without one."""
    if len(call.work) > 1 or "Graph" in call.name or "HostFunc" in call.name:
        return None
    if call.work:
        return _kind_of(call.work[0])
    if is_launch(call):
        return "kernel"
    return next((kind for kind in ("memcpy", "memset") if kind in call.name.lower()), None)


def _kernel_of(call: Op) -> str | None:
    if call.work:
        return call.work[0].name
    name = call.args.get("kernel")  # on AMD's GPUs
    return name if isinstance(name, str) else None


def _in_order(work: Sequence[Work]) -> list[Work] | None:
    """Return the work of a replay in the order of its capture; None if the trace does not show that order.

    Nodes are numbered in the order of their creation. Without numbers, work on a single stream has this order.
    """
    nodes = [ties.node for ties in ties_of(work)]
    if all(nodes) and len(set(nodes)) == len(nodes):
        return [one for _, one in sorted(zip(nodes, work, strict=True), key=lambda pair: pair[0])]
    return sorted(work, key=start_of) if len({one.track for one in work}) == 1 else None


def _kind_of(one: Work) -> str:
    """Return the kind of graph node that ran as this work. A memset may run as a kernel."""
    return "memset" if MEMSET_KERNEL.fullmatch(one.name) else one.kind


def _fits(recording: _Recording, work: Sequence[Work]) -> Iterator[tuple[_Recording, list[Op]]]:
    """Yield the calls of a recording that fit this work. If kernels are named, the work may fit a part of the calls."""
    kinds = [_kind_of(one) for one in work]
    told = zip(recording.names, recording.kinds, strict=True)
    named = all(name is not None for name, kind in told if kind == "kernel")
    last = len(recording.calls) - len(work)
    for first in range(last + 1) if named else (0,) if last == 0 else ():
        until = first + len(work)
        if recording.kinds[first:until] != kinds:
            continue
        told = zip(recording.names[first:until], work, kinds, strict=True)
        calls = recording.calls[first:until]
        same = all(name in (None, one.name) for name, one, kind in told if kind == "kernel")
        if same and all(map(_plausible, calls, work)):
            yield recording, calls


def _plausible(call: Op, one: Work) -> bool:
    """Return whether the op around a call may have launched a kernel of this name."""
    op = _op_of(call)
    if op is None or _kind_of(one) != "kernel":
        return True
    if op.name.startswith("triton_"):
        return one.name.startswith(op.name)
    wanted, found = families.of_op(op.name), decode(one.name).family
    return not (wanted in families.ONE_PURPOSE and found in families.ONE_PURPOSE and wanted != found)


def _op_of(call: Op) -> Op | None:
    return next((op for op in call.above() if op.kind == "op"), None)


def _executed_size(launch: Op) -> int | None:
    """Return the batch size in the names of the annotations around a launch; None without one."""
    for op in launch.above():
        if match := EXECUTED_SIZE.search(op.name):
            return int(match[1] or match[2])
        if match := EXECUTED_TOKENS.search(op.name):
            return int(match[1]) + int(match[2])
    return None


def _of_size(found: list[tuple[_Recording, list[Op]]], executed: int | None) -> list[tuple[_Recording, list[Op]]]:
    """Return the fits of the smallest captured size that is at least the executed one; all if a size is not known."""
    sizes = {one.size for one, _ in found}
    if executed is None or None in sizes:
        return found
    size = min((size for size in sizes if size >= executed), default=None)
    return [one for one in found if one[0].size == size]


def _described(recording: _Recording, calls: Sequence[Op]) -> str:
    """Return each call's op, shapes and modules as text, so that captures can be compared."""
    told = []
    for call in calls:
        op = _op_of(call)
        shapes = op.inputs.recorded if op else None
        modules = innermost(recording.trace.modules.get(call.track, ()), call.start)
        told.append((op.name if op else None, shapes, [module.name for module in modules]))
    return json.dumps(told)
