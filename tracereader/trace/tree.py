"""Builds a trace from the events of a file: ops as a tree, launches, GPU work, steps."""

import bisect
import decimal
import gc
import math
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import msgspec

from tracereader import progress
from tracereader.command import DEFAULT_LIMIT
from tracereader.trace import marks as marked
from tracereader.trace import processes, slices
from tracereader.trace.backends import backend_of, only_waits
from tracereader.trace.decoded import decoded_as, decoded_object
from tracereader.trace.document import KINDS, MISSING, NO_SLICES, Document, Event, TraceError, load
from tracereader.trace.facts import RunFacts, of_other_steps, usable
from tracereader.trace.grouped import grouped
from tracereader.trace.labels import AUTOGRAD, MODULE, OPTIMIZERS, PHASES, STEP
from tracereader.trace.lenient import LARGEST, is_time
from tracereader.trace.marks import StepsBy
from tracereader.trace.quality import clip, earlier_work, quality_of, steps_left_out
from tracereader.trace.slices import Frame, Op, Phase, Rank, Slice, Step, Sync, Trace, Work, start_of
from tracereader.trace.waits import OF_THE_DEVICE

LATEST_NS = 2**62  # since 1970; the year 2116
WORK = ("kernel", "memcpy", "memset")
NPU = b'"Ascend Hardware"'  # the name of a process
# No program nests its modules as deep. The paths of deeper ones would take time and memory without bound.
MODULES_DEEP = 100


def read(
    path: Path,
    limit: int = DEFAULT_LIMIT,
    show: Callable[[str], None] = progress.nowhere,
    steps_by: str | StepsBy = StepsBy.RECORDED,
    process: str | None = None,
) -> Trace:
    """Return the trace in a file. Raises TraceError.

    limit: the most bytes of unpacked JSON that are read. show: shows what is done next. steps_by: what marks the steps;
    a text names the annotation whose calls count as the steps, in place of the profiler's own marks. process: of a file
    that holds several, the one to read, by a part of its name; None for the one with the most GPU work.
    """
    # Nothing made while reading is garbage, and looking for it doubles the time.
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return _built(path, load(path, limit, show), show, steps_by, process)
    finally:
        if was_enabled:
            gc.enable()


def _built(
    path: Path, document: Document, show: Callable[[str], None], steps_by: str | StepsBy, process: str | None
) -> Trace:
    ops, work, spans, overheads, modules, flows, memory, zeroed = [], [], [], [], [], [], [], 0
    unusable: list[int] = []  # the places of the events without usable times
    old_ops, syncs, inside = [], [], []
    # For each kind: what its slices become, and the list of them.
    made = {"label": (Op, ops), "op": (Op, ops), "runtime": (Op, ops), "overhead": (Op, overheads),
            "kernel": (Work, work), "memcpy": (Work, work), "memset": (Work, work), "span": (Work, spans),
            "python": (Op, modules), "inside": (Phase, inside),
            "old op": (Op, old_ops)}  # fmt: skip
    tracks: dict[tuple, tuple] = {}
    track = pid = tid = None
    intern = sys.intern  # otherwise the names of a trace take a quarter of its file's size
    frames = grouped(())
    events, exact = document.events, document.exact
    show(f"building {len(events):,} events")
    categories = {event.cat for event in events}
    kinds, not_known, taken = _kinds(events, categories)
    special = ("python", *WORK)  # their names decide, too
    made = {
        cat: (kind, made[kind][0], made[kind][1].append, kind not in special)
        for cat, kind in kinds.items()
        if kind in made
    }
    # Only of a usable event, because the others are near it: a difference of doubles far apart is not exact.
    zero = next((int(one.ts) for one in events if one.ph == "X" and is_time(one.ts) and _is_length(one.dur)), 0)
    for number, event in enumerate(events):
        if event.ph != "X":
            if event.cat == "fwdbwd":
                flows.append(event)
            elif event.name == "[memory]":
                memory.append(event)
            if event.ph in ("s", "f"):
                events[number] = None
            continue
        if (known := made.get(event.cat)) is None:
            if kinds.get(event.cat) == "sync":
                syncs.append(event)
            continue
        kind, make, into, is_plain = known
        ts, dur = event.ts, event.dur
        if not ts and (not dur or (not exact and dur == MISSING)):
            zeroed += 1  # nothing happens at time zero
            continue
        if not (0 <= dur < LARGEST if not exact else is_time(ts) and _is_length(dur)):
            unusable.append(number)
            continue
        # The difference of two doubles so near each other is exact: its product is off by less than half.
        start, length = round((ts - zero) * 1000), round(dur * 1000)
        if event.tid != tid or event.pid != pid:
            pid, tid = track = event.pid, event.tid
            track = tracks.setdefault(track, track)
        name = intern(event.name)
        if is_plain:
            into(make(name, kind, start, length, track, event.args))
        elif kind == "python" and not name.startswith(MODULE):
            frames[track].append(Frame(name, start, start + length))
        else:
            if make is Work:
                if _only_waits(event):
                    continue
                if name in ("Memcpy", "Memset"):
                    name = _copy_in_words(event)
            into(make(name, kind, start, length, track, event.args))
        events[number] = None  # so that the events and what is made of them never stand side by side
    document.defects.events += len(unusable)
    if left_out := document.defects.events:
        usable = zeroed + sum(map(len, (ops, old_ops, work, spans, overheads, modules, inside, *frames.values())))
        if left_out > usable:  # the rest would say little about the run
            first = f"; the first is {events[unusable[0]].name[:60]!r}" if unusable else ""
            raise TraceError(
                f"{path}: {left_out:,} of its {left_out + usable:,} slices have no usable duration or time stamp{first}"
            )
    for op in old_ops:
        op.kind = "label" if op.name.startswith((STEP, *PHASES)) else "op"
    ops += old_ops
    if not work and any(event is not None and event.ph == "M" and NPU in bytes(event.args) for event in events):
        raise TraceError(
            f"{path}: a trace of an Ascend NPU, as torch_npu writes it (trace_view.json), whose launches and kernels "
            "read-trace does not know; open it in MindStudio Insight"
        )
    if not ops and not work and not zeroed:
        if any(event is not None and event.name.startswith("PyTorch Profiler") for event in events):
            raise TraceError(
                f"{path}: PyTorch's profiler recorded no op and no GPU work in it. Either it was exported outside the "
                "schedule's active steps (on_trace_ready exports after them), or another thread did the work"
            )
        raise TraceError(f"{path}: a trace, but PyTorch's profiler did not write it (no op and no GPU work in it)")
    if not ops and not work:
        raise TraceError(f"{path}: all {zeroed} events have time stamp and duration zero (pytorch issue 188481)")
    if len(ops) + len(work) + zeroed < 2:
        raise TraceError(f"{path}: one event, too little to read")

    one = processes.picked(
        path, ops, [*frames, *dict.fromkeys(frame.track for frame in modules)], work, ties_of, events, process
    )
    facts, rank = document.facts, _rank(document.distributed)
    if one is not None:
        ops = [op for op in ops if op.track[0] == one.pid]
        work = one.work
        overheads, spans, modules, inside = (
            [slice for slice in some if one.owns(slice.track[0])] for some in (overheads, spans, modules, inside)
        )
        frames = {track: some for track, some in frames.items() if one.owns(track[0])}
        flows, memory, syncs = ([event for event in some if one.owns(event.pid)] for some in (flows, memory, syncs))
        if any(other.gpu_activities or other.has_steps for other in one.processes[1:]):
            facts, rank = RunFacts(), None  # the file's other members are those of any of several ranks

    show("building the call tree")
    marks = [op for op in ops if op.kind == "label" and op.name.startswith(STEP)]
    by = None
    if isinstance(steps_by, str):
        by = marked.named(ops, steps_by, path)
    elif steps_by is StepsBy.FOUND and not marks and facts == RunFacts():  # a run that stored facts knows its step
        by = marked.found(ops)
    if by is not None or steps_by is StepsBy.NOTHING:
        recorded, spans_of_steps = marks, by.spans if by is not None else ()
        marks = [
            Op(f"{STEP}{number}", "label", start, end - start, by.track, msgspec.Raw(b"{}"))
            for number, (start, end) in enumerate(spans_of_steps, 1)
        ]
        if recorded and len(recorded) != len(marks):
            facts = of_other_steps(facts)
        # The marks come first, so that a call as long as its step lies inside it.
        ops = marks + [op for op in ops if op.kind != "label" or not op.name.startswith(STEP)]
        spans = [one for one in spans if not one.name.startswith(STEP)]
    elif marks:
        _clip_at_the_stop(ops, max(marks, key=start_of))
    roots = _nest(ops)
    _nest(overheads)
    for some in (work, inside):
        some.sort(key=start_of)
    show("tying GPU work to its launches")
    calls = _calls(ops)
    _link(calls, work)
    properties = _properties(document.device_properties, {one.device for one in work})
    marks.sort(key=start_of)
    op_names = frozenset([op.name for op in ops])
    wait_names = {name for name in op_names if OF_THE_DEVICE in name}
    device_waits = [op for op in ops if op.name in wait_names] if wait_names else []
    clipped = clip(work, device_waits)
    earlier = set() if marks else set(map(id, earlier_work(device_waits, work)))
    own = [one for one in work if id(one) not in earlier] if earlier else work
    steps, outside = _steps(marks, roots, own)
    quality, kept = quality_of(steps, ops, op_names, work, overheads, clipped)
    if len(kept) < len(steps):
        others = (op for step in steps_left_out(steps, kept) for op in step.roots)
        steps, outside = kept, tuple(sorted([*outside, *others], key=start_of))
    devices = _devices(properties, work, "device" if taken else "GPU")
    asking = {name for name in op_names if "Occupancy" in name}
    called = {op.name for op in ops if op.kind == "runtime"}
    return Trace(
        path=path,
        zero_us=zero,
        base_ns=document.base if type(document.base) is int and abs(document.base) < LATEST_NS else 0,
        host=_host(document.host, path, ops),
        steps=steps,
        has_steps=steps[0].name.startswith(STEP),
        steps_by=None if by is None else by.name,
        steps_end_with_it=by is not None and by.ends_them,
        calls_in_a_step=1 if by is None else by.every,
        work=tuple(work),
        device_waits=tuple(device_waits),
        overheads=tuple(overheads),
        outside=outside,
        spans=tuple(spans),
        memory=tuple(sorted(_memory(memory, zero), key=lambda one: one.time)),
        queries=tuple([op for op in ops if op.name in asking and op.kind == "runtime"] if asking else ()),
        op_names=op_names,
        trains=any(name.startswith((AUTOGRAD, OPTIMIZERS)) for name in op_names),
        frames=dict(frames),
        modules=dict(grouped((root.track, root) for root in _nest(modules, MODULES_DEEP))),
        forward_of={backward: forward for forward, backward in _arrows(flows, zero)},
        devices=devices,
        backend=backend_of(devices, called, _names_of_processes(events), categories, op_names)
        or ("other" if taken else None),
        device_properties=properties,
        facts=facts,
        rank=rank,
        processes=one.processes if one is not None else (),
        of_no_process=one.unknown if one is not None else 0,
        has_shapes=document.shapes_recorded,
        zeroed=zeroed,
        defects=document.defects,
        not_known=not_known,
        taken=taken,
        syncs=tuple(sorted(_syncs(syncs, calls), key=lambda one: one.call.start)),
        inside=tuple(inside),
        quality=quality,
    )


def _kinds(events: list[Event], categories: set[str]) -> tuple[dict[str, str], Counter, Counter]:
    """Return each category's kind, and counts of device slices of unknown categories: left out, and taken as work.

    An accelerator that Kineto supports by a plug-in has its own categories. If all slices on the devices are of such
    categories, they count as work. Among known kernels they may be anything, so they are left out.
    """
    unknown = categories.difference(KINDS, NO_SLICES)
    # Kineto's plug-ins name theirs alike: gcu_runtime, musa_driver, gcu_sync.
    calls = {one: "runtime" for one in unknown if one.endswith(("_runtime", "_driver"))}
    known = KINDS | calls | {one: "mark" for one in unknown if one.endswith("_sync")}
    unknown.difference_update(known)
    strange = [event for event in events if event.ph == "X" and event.cat in unknown and not _only_waits(event)]
    if not strange:
        return known, Counter(), Counter()
    devices = {
        event.pid
        for event in events
        if event.ph == "M" and event.name == "process_labels" and type(event.pid) is int
        if not str(decoded_object(event.args).get("labels", "CPU")).startswith("CPU")
    }
    found = Counter(event.cat for event in strange if event.pid in devices or b'"stream"' in bytes(event.args))
    if not found or any(KINDS.get(event.cat) in WORK for event in events if event.ph == "X"):
        return known, found, Counter()
    return known | dict.fromkeys(found, "kernel"), Counter(), found


def _only_waits(event: Event) -> bool:
    """Return whether a slice of a device's lane is a wait for an event, or its record."""
    return only_waits(event.name) and b'"grid"' not in bytes(event.args)


# Kinds of memory, which a memset of torch's collector of CUDA activities has as a number.
MEMORY_KINDS = ("Unknown", "Pageable", "Pinned", "Device", "Array", "Managed", "Device Static", "Managed Static")


def _copy_in_words(event: Event) -> str:
    """Return Kineto's name of a copy or a memset, for example "Memcpy HtoD (Pinned -> Device)".

    torch's collector of CUDA activities gives all of them the same name, and puts the rest into the arguments.
    """
    args = decoded_object(event.args)
    if event.name == "Memset":
        kind = args.get("memory kind")
        return f"Memset ({MEMORY_KINDS[kind]})" if type(kind) is int and 0 <= kind < len(MEMORY_KINDS) else event.name
    way, *kinds = (args.get(name) for name in ("copy kind", "src kind", "dst kind"))
    if not all(isinstance(one, str) for one in (way, *kinds)):
        return event.name
    source, target = (one.replace("_", " ").title() for one in kinds)
    return f"Memcpy {way} ({source} -> {target})"


def _is_length(us: float | decimal.Decimal | None) -> bool:
    return is_time(us) and us >= 0


def _nest(all_slices: list, deepest: float = math.inf) -> list[Op]:
    """Tie each slice to the innermost slice of its track in which it starts. Return the roots, by start.

    deepest: slices inside so many others are left out.
    """
    slices.sort_by_start(all_slices)
    roots = []
    for track in grouped((one.track, one) for one in all_slices).values():
        stack, ends, last = [], [], -math.inf  # last: the end of the innermost open slice
        for one in track:
            start = one.start
            while last <= start and ends:
                del stack[-1], ends[-1]
                last = ends[-1] if ends else -math.inf
            end = start + one.dur
            if ends and one.name.startswith(STEP):
                # The annotation still open around prof.step() crosses, not the step that begins in it. It also does if
                # it began in a step that has ended.
                while ends and (ends[-1] < end or min(ends) <= start):
                    del stack[-1], ends[-1]
            if type(one) is Op and len(stack) < deepest:
                if stack:
                    above = one.parent = stack[-1]
                    if above.children:
                        above.children.append(one)
                    else:
                        above.children = [one]
                else:
                    roots.append(one)
            stack.append(one)
            ends.append(end)
            last = end
    roots.sort(key=start_of)
    return roots


class _Ties(msgspec.Struct):
    """The ids that tie GPU work to its launch, its stream and its CUDA graph, and the annotation of a graph's capture.

    The annotation is read here, because a replayed graph has many nodes and reading the arguments twice takes time.
    """

    correlation: int | None = None
    device: int | str | None = None
    stream: int | None = msgspec.field(name="original_stream", default=None)
    node: int | None = msgspec.field(name="graph node id", default=None)
    name: object = None
    annotation: object = None


_ties = msgspec.json.Decoder(_Ties)


def ties_of(some: Iterable[Slice]) -> Iterator[_Ties]:
    """Yield the ids in the slices' arguments."""
    decode = _ties.decode
    for one in some:
        try:
            yield decode(one.raw)
        except (ValueError, RecursionError):  # as in decoded_as(), whose call takes as long as the decoding
            yield usable(_Ties, one.args)  # some have other types than torch's


def _calls(ops: list[Op]) -> dict[int, Op]:
    """Return the runtime calls by their correlation ids."""
    calls = [op for op in ops if op.kind == "runtime"]
    tied = [(ties.correlation, op) for op, ties in zip(calls, ties_of(calls), strict=True)]
    return {correlation: op for correlation, op in reversed(tied) if correlation is not None}  # the first of an id


def _link(calls: dict[int, Op], work: list[Work]) -> None:
    """Tie GPU work to the runtime calls that launched them.

    If torch assigned a lane to a graph's node, the stream on which the node ran replaces it.
    """
    for one, ties in zip(work, ties_of(work), strict=True):
        one.device = one.track[0] if ties.device is None else ties.device
        if ties.stream is not None:
            one.track = (one.track[0], ties.stream)
        one.launch = launch = calls.get(ties.correlation)
        one.is_annotated = bool(ties.name or ties.annotation)
        if launch is not None and launch.work:
            launch.work.append(one)
        elif launch is not None:
            launch.work = [one]


def _arrows(events: list[Event], zero: int) -> Iterator[tuple[tuple, tuple]]:
    """Yield the two ends of each flow, each by thread and time."""
    sides: dict[str, dict] = {"s": {}, "f": {}}
    for event in events:
        if event.ph in sides and event.id is not None and is_time(event.ts):
            sides[event.ph][event.id] = (event.pid, event.tid), _ns(event, zero)
    return ((sides["s"][id], target) for id, target in sides["f"].items() if id in sides["s"])


def _ns(event: Event, zero: int) -> int:
    return round((event.ts - zero) * 1000)


class _SyncArgs(msgspec.Struct):
    kind: str = msgspec.field(name="cuda_sync_kind", default="")
    correlation: int | None = None
    device: int | str | None = None
    stream: int = -1
    awaited: int = msgspec.field(name="wait_on_stream", default=-1)
    record: int = msgspec.field(name="wait_on_cuda_event_record_corr_id", default=-1)


_sync_args = msgspec.json.Decoder(_SyncArgs)


def _syncs(events: list[Event], calls: dict[int, Op]) -> Iterator[Sync]:
    for event in events:
        args = decoded_as(_sync_args, event.args)
        call = calls.get(args.correlation) if args else None
        if call is not None:
            device = event.pid if args.device is None else args.device
            awaited = args.awaited if args.awaited >= 0 else None
            yield Sync(args.kind, device, args.stream, call, calls.get(args.record), awaited)


def _memory(events: list[Event], zero: int) -> Iterator[slices.Memory]:
    for event in events:
        args = decoded_object(event.args)
        size, total, device = (args.get(name) for name in ("Bytes", "Total Allocated", "Device Id"))
        if is_time(event.ts) and type(size) is type(total) is type(device) is int and abs(total) < 2**60:
            yield slices.Memory(_ns(event, zero), (event.pid, event.tid), size, total, device)


def _steps(marks: list[Op], roots: list[Op], work: list[Work]) -> tuple[tuple[Step, ...], tuple[Op, ...]]:
    if not marks:
        everything = [*roots, *work]
        start, end = min(one.start for one in everything), max(one.end for one in everything)
        return (Step("whole trace", start, end, tuple(roots), tuple(work)),), ()
    starts, ends = [mark.start for mark in marks], [mark.end for mark in marks]

    def number(time: int) -> int | None:
        index = bisect.bisect_right(starts, time) - 1
        return index if index >= 0 and time < ends[index] else None

    in_step, outside = grouped(()), []
    for root in roots:
        # What encloses a step (an annotation around the loop) starts before it: look inside.
        tops = [root]
        while tops:
            top = tops.pop()
            index = number(top.start)
            if index is not None:
                in_step[index].append(top)
            elif top.kind == "label" and top.end > starts[0]:
                tops.extend(reversed(top.children))
            else:
                outside.append(top)
    launched = grouped((number(one.launch.start), one) for one in work if one.launch is not None)
    steps = (
        Step(mark.name, mark.start, mark.end, tuple(in_step[place]), tuple(launched[place]))
        for place, mark in enumerate(marks)
    )
    return tuple(steps), tuple(outside)


def _properties(found: object, used: set) -> dict[object, dict]:
    """Return the driver's report on each device, by number; for devices with work also by the number in their events.

    A process that sees only one of a machine's devices counts from 0, but its events may have the machine's number.
    """
    listed = [one for one in found if isinstance(one, dict)] if isinstance(found, list) else []
    by_number = {one["id"]: one for one in listed if type(one.get("id")) is int}
    alike = len(listed) == 1 or (listed and len({str(one.get("name")) for one in listed}) == 1)
    return by_number | {device: listed[0] for device in used if alike and device not in by_number}


def _devices(properties: dict[object, dict], work: list[Work], what: str) -> tuple[str, ...]:
    """Return the names of the devices with work; their numbers if the trace does not name them."""
    used = sorted({one.device for one in work}, key=lambda device: (isinstance(device, str), device))
    return tuple(str(properties.get(device, {}).get("name") or "").strip() or f"{what} {device}" for device in used)


def _clip_at_the_stop(ops: list[Op], last: Op) -> None:
    """End the annotations that the last step leaves open at its end, if nothing follows: the profiler stops in them."""
    here = [op for op in ops if op.track == last.track and op is not last]
    if all(op.start < last.end for op in here):
        for op in here:
            if op.kind == "label" and last.start <= op.start and last.end < op.end:
                op.dur = last.end - op.start


def _names_of_processes(events: list[Event | None]) -> Iterator[str]:
    """Yield the names and labels that the file gives to processes, among which profilers list devices."""
    for event in events:
        if event is not None and event.ph == "M" and event.name in ("process_name", "process_labels"):
            yield from map(str, decoded_object(event.args).values())


# The name that torch.profiler.tensorboard_trace_handler gives a file if the program does not name it.
HANDLERS_NAME = re.compile(r"(?P<host>.+)_(?P<process>\d{1,9})\.\d+\.pt\.trace\.json(?:\.gz)?")


def _host(recorded: object, path: Path, ops: list[Op]) -> str | None:
    """Return the recorded name of the host, or the one in the file's name; None without either.

    torch 2.15 records it, torch 2.11 does not. A name like rank_3 has this form, so the number has to be the process's.
    """
    if isinstance(recorded, str) and recorded:
        return recorded
    named = HANDLERS_NAME.fullmatch(path.name)
    of_process = named is not None and any(op.track[0] == int(named["process"]) for op in ops)
    return named["host"] if of_process else None


def _rank(found: object) -> Rank | None:
    if not isinstance(found, dict):
        return None
    rank, size, groups = found.get("rank"), found.get("world_size"), found.get("pg_config")
    if not (type(rank) is type(size) is int and 0 <= rank < size < 2**31):
        return None
    listed = [one for one in groups if isinstance(one, dict)] if isinstance(groups, list) else []
    return Rank(rank, size, tuple(_process_group(one) for one in listed if type(one.get("pg_size")) is int))


def _process_group(found: dict) -> slices.ProcessGroup:
    size, ranks = found["pg_size"], found.get("ranks")
    listed = ranks if isinstance(ranks, list) and len(ranks) == size else ()
    known = all(type(one) is int and 0 <= one < 2**31 for one in listed)
    name, description = (str(found.get(key, "")) for key in ("pg_name", "pg_desc"))
    return slices.ProcessGroup(name, description, size, tuple(listed) if known else ())
