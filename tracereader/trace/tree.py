"""A trace as data: steps, ops as a tree, launches, GPU work.

Times are whole nanoseconds inside, from the trace's first slice on; microseconds wherever a name ends in _us.
"""

import bisect
import contextlib
import decimal
import gc
import math
import re
import sys
from array import array
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from itertools import chain, compress, count, islice
from operator import attrgetter, eq
from pathlib import Path

import msgspec

from tracereader import progress
from tracereader.trace import marks as marked
from tracereader.trace.decoded import decoded, decoded_as
from tracereader.trace.document import (
    DEFAULT_LIMIT,
    KINDS,
    LARGEST,
    MISSING,
    NO_SLICES,
    Document,
    Event,
    TraceError,
    load,
)
from tracereader.trace.facts import RunFacts, of_other_steps
from tracereader.trace.labels import AUTOGRAD, LOADER, MODULE, OPTIMIZERS, PHASES, STEP, annotation_of
from tracereader.trace.marks import Marks, StepsBy
from tracereader.trace.types import Inputs, inputs_of

LATEST_NS = 2**62  # since 1970; the year 2116
WORK = ("kernel", "memcpy", "memset")
# From this id on, the flow events of torch's collector of CUDA activities ("cuspy") are edges between the nodes of a
# CUDA graph. Below it they tie launches to their work.
GRAPH_EDGE = 1 << 40
# In the names of a kernel's phases.
WAIT, REPETITION = "wait: ", re.compile(r" \d+$")
_start, _dur = attrgetter("start"), attrgetter("dur")


class _Slice(msgspec.Struct, eq=False):
    """One slice of a track: the common fields of Op and Work."""

    name: str
    kind: str
    start: int
    dur: int
    track: tuple
    raw: msgspec.Raw

    @property
    def end(self) -> int:
        return self.start + self.dur

    @property
    def us(self) -> float:
        return self.dur / 1e3

    @property
    def args(self) -> dict:
        """Return the slice's arguments. They are decoded from the file's text at each call."""
        args = decoded(self.raw)
        return args if isinstance(args, dict) else {}


class Op(_Slice, eq=False):
    """One slice of a CPU thread: an annotation, an op, a Python frame or a runtime call.

    children: the slices that start in it, without Python frames, which are in another tree.
    """

    parent: "Op | None" = None
    children: "Sequence[Op]" = ()
    work: "Sequence[Work]" = ()  # what this runtime call launched, in the order of the starts
    read_inputs: Inputs | None = None  # once they were asked for: see inputs

    @property
    def inputs(self) -> Inputs:
        """Return what torch recorded of the inputs, which is read faster than all arguments."""
        if self.read_inputs is None:
            self.read_inputs = inputs_of(self.raw)
        return self.read_inputs

    def walk(self) -> Iterator["Op"]:
        """Yield this op and all below it, in the order of their starts."""
        stack = [self]
        while stack:
            op = stack.pop()
            yield op
            if op.children:
                stack.extend(reversed(op.children))

    def above(self) -> Iterator["Op"]:
        """Yield the ops that enclose this one, innermost first."""
        op = self.parent
        while op is not None:
            yield op
            op = op.parent

    def outermost_call(self) -> "Op":
        """Return the outermost op or call around this one, or itself. Annotations do not count."""
        top = op = self
        while (op := op.parent) is not None:
            if op.kind != "label":
                top = op
        return top

    def outermost_of(self, wanted: Callable[[str], object]) -> "Op | None":
        """Return the outermost of the ops of wanted names that are right around this one; None without any."""
        found = None
        for op in self.above():
            if op.kind != "op" or not wanted(op.name):
                break
            found = op
        return found

    def work_below(self) -> "Iterator[Work]":
        """Yield the GPU work that this op and all calls below it launch."""
        return (one for call in self.walk() for one in call.work)


class Frame(msgspec.Struct, eq=False, gc=False):
    """A call of a Python function on a thread. The profiler records it with stacks."""

    name: str
    start: int
    end: int


def outermost(roots: Sequence[Op], wanted: Callable[[Op], object]) -> Iterator[Op]:
    """Yield the wanted slices that lie in no other wanted slice, in order."""
    pending = list(reversed(roots))
    while pending:
        one = pending.pop()
        if wanted(one):
            yield one
        elif one.children:
            pending.extend(reversed(one.children))


def innermost(ops: Sequence[Op], time: int) -> list[Op]:
    """Return the ops that enclose a time on one thread, outermost first. ops: the thread's root ops, by start."""
    found = []
    while ops:
        index = bisect.bisect_right(ops, time, key=_start) - 1
        if index < 0 or ops[index].end <= time:
            break
        found.append(ops[index])
        ops = ops[index].children
    return found


class Work(_Slice, eq=False):
    """One kernel, copy or memset on a GPU."""

    device: int | str = 0
    launch: Op | None = None
    said: object = None  # a KernelName, once it was asked for: see families.says
    after: "Sequence[Work]" = ()  # in a CUDA graph whose edges are recorded, the nodes that it depends on
    recorded: "Recorded | None" = None  # of a replayed CUDA graph, where its capture is known: see figures/captures.py
    is_annotated: bool = False  # whether its arguments may contain a capture's annotation

    @property
    def asked(self) -> Op | None:
        """Return the runtime call with which the program requested this work.

        For work of a replayed graph it is the captured call, if that is known. Otherwise it is the launch.
        """
        return self.launch if self.recorded is None else self.recorded.call

    @property
    def from_graph(self) -> bool:
        """Return whether a CUDA graph's launch started it."""
        return self.launch is not None and "GraphLaunch" in self.launch.name

    @property
    def annotation(self) -> str | None:
        """Return the annotation that the capture gave to this node of a CUDA graph; None without one."""
        return annotation_of(self.args) if self.is_annotated and self.from_graph else None


def asking_ops(work: Sequence[Work]) -> list[Op | None]:
    """Return the innermost op around the call that asked for each activity; the call's annotation without an op."""
    found: dict[int, Op | None] = {}  # so that each path upwards is followed once
    asking = []
    for one in work:
        op = one.launch if one.recorded is None else one.asked
        if op is not None and op.kind == "runtime":
            above = op.parent
            op = above if above is None or above.kind != "runtime" else _above_calls(op, found)
        asking.append(op)
    return asking


def _above_calls(op: Op, found: dict[int, Op | None]) -> Op | None:
    """Return what encloses a call that lies in another call. found: the results so far, by the ids of calls."""
    way = []
    while op is not None and op.kind == "runtime":
        key = id(op)
        if key in found:
            op = found[key]
            break
        way.append(key)
        op = op.parent
    found.update(dict.fromkeys(way, op))
    return op


class Recorded(msgspec.Struct, eq=False):
    """The capture of a node of a CUDA graph: the recorded call, and the trace that contains it.

    together: the work of the node's replay whose calls belong to the same op.
    """

    call: Op
    trace: "Trace"
    together: Sequence[Work]


class Phase(_Slice, eq=False):
    """The time that one block of a kernel waited before a phase, or worked in it. track: the block's lane.

    "wait: NAME" names the wait. A number at the name's end counts repetitions of the phase, such as a model's layers.
    It is part of a kernel, so it counts neither as GPU work nor as a CPU slice.
    """

    @property
    def waits(self) -> bool:
        """Return whether the block waited."""
        return REPETITION.sub("", self.name) == "wait" or self.name.startswith(WAIT)

    @property
    def phase(self) -> str:
        """Return the phase's name: "qkv" of "wait: qkv 3"."""
        return REPETITION.sub("", self.name).removeprefix(WAIT)


class Memory(msgspec.Struct, eq=False):
    """An allocation, or a free (negative bytes), of a thread, and the total allocated after it."""

    time: int
    track: tuple
    bytes: int
    total: int
    device: int  # -1: the CPU


class Sync(msgspec.Struct, frozen=True):
    """A synchronization as CUPTI records it, with enable_cuda_sync_events.

    kind: "Stream Wait Event", "Event Sync", "Stream Sync" or "Context Sync". stream: the stream that waits, or is
    waited for; -1: all. call: the runtime call. record: of an event's wait, the call that recorded the event.
    awaited: the stream of that record; None where the trace does not name it.
    """

    kind: str
    device: int | str
    stream: int
    call: Op
    record: Op | None
    awaited: int | None


class Samples(msgspec.Struct, frozen=True):
    """The samples of a counter of a device in order: when each was taken or begun (ns), and its value."""

    times: list[int]
    values: list[float]


class Step(msgspec.Struct, frozen=True, eq=False, dict=True):
    """One recorded step, or the whole of a trace without steps."""

    name: str
    start: int
    end: int
    roots: tuple[Op, ...]  # on every thread
    work: tuple[Work, ...]  # launched in it, in the order of their starts

    @property
    def us(self) -> float:
        return (self.end - self.start) / 1e3

    @property
    def number(self) -> str:
        """Return the number of the step, for example #3 for ProfilerStep#3."""
        return self.name.removeprefix(STEP[:-1])

    @cached_property
    def asking(self) -> list[Op | None]:
        """Return for each activity what asked for it: see asking_ops()."""
        return asking_ops(self.work)

    def walk(self) -> Iterator[Op]:
        """Yield every op, parents first."""
        return iter(self._ops)

    @cached_property
    def _ops(self) -> tuple[Op, ...]:
        # Many figures go through all ops of a step, and an iterator over a tuple is the fastest way.
        found, stack = [], list(reversed(self.roots))
        while stack:
            op = stack.pop()
            found.append(op)
            if op.children:
                stack.extend(reversed(op.children))
        return tuple(found)

    @cached_property
    def labels(self) -> list[Op]:
        """Return the annotations, parents first."""
        return [op for op in self._ops if op.kind == "label"]

    @cached_property
    def outermost(self) -> list[Op]:
        """Return the outermost ops and calls of all threads, by start, with annotations of loaders and optimizers."""
        pending, found = list(self.roots), []
        while pending:
            op = pending.pop()
            if op.kind == "label" and not op.name.startswith((LOADER, OPTIMIZERS)):
                pending.extend(op.children)
            else:
                found.append(op)
        found.sort(key=_start)
        return found

    def named(self, wanted: Callable[[str], object]) -> list[Op]:
        """Return the ops and calls with a wanted name, parents first. Names are far fewer than ops."""
        places = sorted(chain.from_iterable(some for name, some in self._by_name.items() if wanted(name)))
        return [self._ops[place] for place in places]

    def by_name(self) -> Iterator[tuple[str, list[Op]]]:
        """Yield each name with the ops and calls of that name, parents first."""
        for name, places in self._by_name.items():
            yield name, list(map(self._ops.__getitem__, places))

    @property
    def size(self) -> int:
        """Return the number of all ops and calls."""
        return len(self._ops)

    @cached_property
    def _by_name(self) -> dict[str, array]:
        """The places of the ops of each name among all ops."""
        found: dict[str, array] = {}
        for place, op in enumerate(self._ops):
            name = op.name
            if name in found:
                found[name].append(place)
            else:
                found[name] = array("I", (place,))
        return found

    def dispatch(self) -> Iterator[tuple[Op, int]]:
        """Yield every op with its depth, parents first."""
        stack = [(root, 0) for root in reversed(self.roots)]
        while stack:
            op, depth = stack.pop()
            yield op, depth
            if op.children:
                stack.extend([(child, depth + 1) for child in reversed(op.children)])


class ProcessGroup(msgspec.Struct, frozen=True):
    """A process group that torch lists with the rank. ranks: empty if torch does not list them all."""

    name: str
    description: str
    size: int
    ranks: tuple[int, ...]


class Rank(msgspec.Struct, frozen=True):
    """The process of a distributed run that wrote the trace. groups: the process groups that it is in."""

    rank: int
    world_size: int
    groups: tuple[ProcessGroup, ...] = ()


class Trace(msgspec.Struct, frozen=True, eq=False):
    """The content of one trace file."""

    path: Path
    zero_us: int  # what its stamps count from
    base_ns: int  # what that counts from: with it, stamps of several traces of one clock are distinguished
    host: str | None  # where it was recorded, if it is known
    steps: tuple[Step, ...]
    has_steps: bool
    steps_by: str | None  # the annotation or op whose calls mark the steps, if the profiler's own marks do not
    steps_end_with_it: bool  # whether each step ends with such a call, instead of beginning with it
    work: tuple[Work, ...]  # all of it, in the order of the starts
    overheads: tuple[Op, ...]  # by their starts; the profiler's and the driver's own, on a track of their own
    outside: tuple[Op, ...]  # CPU slices in no step: the profiler's flush, mostly
    spans: tuple[Work, ...]  # of annotations on the GPU's side: from the first to the last kernel launched in them
    memory: tuple[Memory, ...]  # by time; only with profile_memory
    queries: tuple[Op, ...]  # the runtime calls that ask for a kernel's occupancy, by their starts
    op_names: frozenset[str]
    trains: bool  # autograd's backward or an optimizer runs in it; compiled autograd records no op for its backward
    frames: dict[tuple, list[Frame]]  # by thread, the Python functions without nn.Module's; only with stacks
    modules: dict[tuple, list[Op]]  # by thread, the frames of nn.Module as a tree; only with stacks
    forward_of: dict[tuple, tuple]  # (thread, start) of a backward op -> the same of its forward op
    devices: tuple[str, ...]
    device_properties: dict[object, dict]  # by the device's number, as the driver reported them to the profiler
    facts: RunFacts
    rank: Rank | None
    has_shapes: bool
    zeroed: int
    crossing: Counter  # slices that overlap another of their track without nesting, by name
    not_known: Counter  # slices on a device, of categories that this reader does not know, left out
    taken: Counter  # the same of a trace without any known work: taken for the device's work
    nodes: tuple[Work, ...]  # of replayed CUDA graphs, what is no work of the device, by start
    syncs: tuple[Sync, ...]  # by the start of their calls; only with enable_cuda_sync_events
    counters: dict[tuple[int, str], Samples]  # by device and name: sampled hardware counters, power, clocks
    inside: tuple[Phase, ...]  # by start: what kernels recorded of their phases
    captured: tuple[Path, ...] = ()  # the traces of its graphs' captures that were given beside it
    # Launches of its graphs that no capture describes, by the reason: see capture.tie.
    untied: Counter = msgspec.field(default_factory=Counter)


def read(
    path: Path,
    limit: int = DEFAULT_LIMIT,
    show: Callable[[str], None] = progress.nowhere,
    steps_by: str | StepsBy = StepsBy.RECORDED,
) -> Trace:
    """Return the trace in a file. Raises TraceError.

    limit: the most bytes of unpacked JSON that are read. show: shows what is done next. steps_by: what marks the steps;
    a text names the annotation whose calls count as the steps, in place of the profiler's own marks.
    """
    with _no_garbage_collection():
        return _built(path, load(path, limit, show), show, steps_by)


@contextlib.contextmanager
def _no_garbage_collection() -> Iterator[None]:
    # Nothing made while reading is garbage, and looking for it doubles the time.
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _built(path: Path, document: Document, show: Callable[[str], None], steps_by: str | StepsBy) -> Trace:
    ops, work, spans, overheads, modules, flows, memory, zeroed = [], [], [], [], [], [], [], 0
    old_ops, nodes, syncs, edges, counted, inside = [], [], [], [], [], []
    # For each kind: what its slices become, and the list of them.
    made = {"label": (Op, ops), "op": (Op, ops), "runtime": (Op, ops), "overhead": (Op, overheads),
            "kernel": (Work, work), "memcpy": (Work, work), "memset": (Work, work), "span": (Work, spans),
            "node": (Work, nodes), "python": (Op, modules), "inside": (Phase, inside),
            "old op": (Op, old_ops)}  # fmt: skip
    tracks: dict[tuple, tuple] = {}
    track = pid = tid = None
    intern = sys.intern  # otherwise the names of a trace take a quarter of its file's size
    frames: dict[tuple, list[Frame]] = defaultdict(list)
    events, exact = document.events, document.exact
    show(f"building {len(events):,} events")
    kinds, not_known, taken = _kinds(events)
    special = ("python", *WORK)  # their names decide, too
    made = {
        cat: (kind, made[kind][0], made[kind][1].append, kind not in special)
        for cat, kind in kinds.items()
        if kind in made
    }
    zero = next((int(event.ts) for event in events if event.ph == "X" and _is_time(event.ts)), 0)
    for number, event in enumerate(events):
        if event.ph != "X":
            if event.cat == "fwdbwd":
                flows.append(event)
            elif event.name == "[memory]":
                memory.append(event)
            elif event.ph == "C":
                counted.append(event)
            elif type(event.id) is int and event.id >= GRAPH_EDGE:
                edges.append(event)
            if event.ph in ("s", "f"):
                events[number] = None
            continue
        if (known := made.get(event.cat)) is None:
            if kinds.get(event.cat) == "sync":
                syncs.append(event)
            continue
        kind, make, into, is_plain = known
        ts, dur = event.ts, event.dur
        if not ts and (not dur or dur == MISSING):
            zeroed += 1  # nothing happens at time zero
            continue
        if (exact and not (_is_time(ts) and _is_time(dur))) or not 0 <= dur < LARGEST:
            what = "time stamp" if exact and not _is_time(ts) else "duration"
            raise TraceError(f"{path}: event {number + 1} ({event.name[:60]!r}) has no usable {what}")
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
            if make is Work and name in ("Memcpy", "Memset"):
                name = _copy_in_words(event)
            into(make(name, kind, start, length, track, event.args))
        events[number] = None  # so that the events and what is made of them never stand side by side
    for op in old_ops:
        op.kind = "label" if op.name.startswith((STEP, *PHASES)) else "op"
    ops += old_ops
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

    show("building the call tree")
    facts, marks = document.facts, [op for op in ops if op.kind == "label" and op.name.startswith(STEP)]
    by = None
    if isinstance(steps_by, str):
        by = marked.named(ops, steps_by, path)
    elif steps_by is StepsBy.FOUND and not marks and facts == RunFacts():  # a run that stored facts knows its step
        by = marked.found(ops)
    if by is not None or steps_by is StepsBy.NOTHING:
        recorded, marks = marks, _as_slices(by) if by is not None else []
        if recorded and len(recorded) != len(marks):
            facts = of_other_steps(facts)
        # The marks come first, so that a call as long as its step lies inside it.
        ops = marks + [op for op in ops if op.kind != "label" or not op.name.startswith(STEP)]
        spans = [one for one in spans if not one.name.startswith(STEP)]
    crossing = Counter()
    roots = _nest(ops, crossing)
    _nest([*work, *spans], crossing)
    _nest(overheads, crossing)
    module_roots: dict[tuple, list[Op]] = {}
    for root in _nest(modules, Counter()):
        module_roots.setdefault(root.track, []).append(root)
    work.sort(key=_start)
    nodes.sort(key=_start)
    inside.sort(key=_start)
    show("tying GPU work to its launches")
    calls = _calls(ops)
    if edges:
        _tie_nodes([*work, *nodes], edges, zero)
    _link(calls, work, nodes)
    properties = _properties(document.device_properties, {one.device for one in work})
    marks.sort(key=_start)
    if (processes := len({mark.track[0] for mark in marks})) > 1:
        # Their launches have the same ids, so it cannot be known which process launched what.
        raise TraceError(
            f"{path}: the steps of {processes} processes in one trace, as --export writes it for Perfetto; "
            "read the trace of each rank"
        )
    steps, outside = _steps(marks, roots, work)
    op_names = frozenset([op.name for op in ops])
    asking = {name for name in op_names if "Occupancy" in name}
    return Trace(
        path=path,
        zero_us=zero,
        base_ns=document.base if type(document.base) is int and abs(document.base) < LATEST_NS else 0,
        host=_host(document.host, path, ops),
        steps=steps,
        has_steps=steps[0].name.startswith(STEP),
        steps_by=None if by is None else by.name,
        steps_end_with_it=by is not None and by.ends_them,
        work=tuple(work),
        overheads=tuple(overheads),
        outside=outside,
        spans=tuple(spans),
        memory=_memory(memory, zero),
        queries=tuple([op for op in ops if op.name in asking and op.kind == "runtime"] if asking else ()),
        op_names=op_names,
        trains=any(name.startswith((AUTOGRAD, OPTIMIZERS)) for name in op_names),
        frames=dict(frames),
        modules=module_roots,
        forward_of=_forward_of(flows, zero),
        devices=_devices(properties, work, "device" if taken else "GPU"),
        device_properties=properties,
        facts=facts,
        rank=_rank(document.distributed),
        has_shapes=document.shapes_recorded,
        zeroed=zeroed,
        crossing=crossing,
        not_known=not_known,
        taken=taken,
        nodes=tuple(nodes),
        syncs=_syncs(syncs, calls),
        counters=_counters(counted, zero),
        inside=tuple(inside),
    )


def _kinds(events: list[Event]) -> tuple[dict[str, str], Counter, Counter]:
    """Return each category's kind, and counts of device slices of unknown categories: left out, and taken as work.

    An accelerator that Kineto supports by a plug-in has its own categories. If all slices on the devices are of such
    categories, they count as work. Among known kernels they may be anything, so they are left out.
    """
    unknown = {event.cat for event in events}.difference(KINDS, NO_SLICES)
    strange = [event for event in events if event.ph == "X" and event.cat in unknown] if unknown else ()
    if not strange:
        return KINDS, Counter(), Counter()
    devices = {
        event.pid
        for event in events
        if event.ph == "M" and event.name == "process_labels" and type(event.pid) is int and not _is_cpu(event)
    }
    found = Counter(event.cat for event in strange if event.pid in devices or b'"stream"' in bytes(event.args))
    if not found or any(KINDS.get(event.cat) in WORK for event in events if event.ph == "X"):
        return KINDS, found, Counter()
    return KINDS | dict.fromkeys(found, "kernel"), Counter(), found


# Kinds of memory, which a memset of torch's collector of CUDA activities has as a number.
MEMORY_KINDS = ("Unknown", "Pageable", "Pinned", "Device", "Array", "Managed", "Device Static", "Managed Static")


def _copy_in_words(event: Event) -> str:
    """Return Kineto's name of a copy or a memset, for example "Memcpy HtoD (Pinned -> Device)".

    torch's collector of CUDA activities gives all of them the same name, and puts the rest into the arguments.
    """
    args = decoded(event.args)
    if not isinstance(args, dict):
        return event.name
    if event.name == "Memset":
        kind = args.get("memory kind")
        return f"Memset ({MEMORY_KINDS[kind]})" if type(kind) is int and 0 <= kind < len(MEMORY_KINDS) else event.name
    way, *kinds = (args.get(name) for name in ("copy kind", "src kind", "dst kind"))
    if not all(isinstance(one, str) for one in (way, *kinds)):
        return event.name
    source, target = (one.replace("_", " ").title() for one in kinds)
    return f"Memcpy {way} ({source} -> {target})"


def _is_cpu(event: Event) -> bool:
    args = decoded(event.args)
    return not isinstance(args, dict) or str(args.get("labels", "CPU")).startswith("CPU")


def _is_time(us: float | decimal.Decimal | None) -> bool:
    return us is not None and math.isfinite(us) and abs(us) < LARGEST


def _nest(slices: list, crossing: Counter) -> list[Op]:
    """Tie each slice to the innermost slice of its track in which it starts. Return the roots, by start.

    A slice crosses another one if it starts in it and ends after it. Perfetto drops such slices.
    """
    _sort_by_start(slices)
    by_track = defaultdict(list)
    for one in slices:
        by_track[one.track].append(one)
    roots = []
    for track in by_track.values():
        stack, ends, last = [], [], -math.inf  # last: the end of the innermost open slice
        for one in track:
            start = one.start
            while last <= start and ends:
                del stack[-1], ends[-1]
                last = ends[-1] if ends else -math.inf
            end = start + one.dur
            if end > last and ends:
                if one.name.startswith(STEP):
                    # The annotation still open around prof.step() crosses, not the step that begins in it.
                    while ends and ends[-1] < end:
                        del stack[-1], ends[-1]
                else:
                    crossing[one.name] += 1
            if type(one) is Op:
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
    roots.sort(key=_start)
    return roots


def _sort_by_start(slices: list) -> None:
    """Sort slices by start, and the longer first where starts are equal.

    Files are nearly in the order of the starts and have few equal ones, so sorting by start alone takes little time.
    """
    slices.sort(key=_start)
    starts = list(map(_start, slices))
    reached = 0
    for place in compress(count(), map(eq, starts, islice(starts, 1, None))):
        if place < reached:
            continue
        start, reached = slices[place].start, place + 1
        while reached < len(slices) and slices[reached].start == start:
            reached += 1
        slices[place:reached] = sorted(slices[place:reached], key=_dur, reverse=True)


class _Ties(msgspec.Struct):
    """The ids that tie GPU work to its launch, its stream and its CUDA graph, and the annotation of a graph's capture.

    The annotation is read here, because a replayed graph has many nodes and reading the arguments twice takes time.
    """

    correlation: int | None = None
    device: int | str | None = None
    stream: int | None = msgspec.field(name="original_stream", default=None)
    graph: int | None = msgspec.field(name="graph id", default=None)
    node: int | None = msgspec.field(name="graph node id", default=None)
    name: object = None
    annotation: object = None


_ties = msgspec.json.Decoder(_Ties)


def ties_of(slices: Iterable[_Slice]) -> Iterator[_Ties]:
    """Yield the ids in the slices' arguments."""
    decode = _ties.decode
    for one in slices:
        try:
            yield decode(one.raw)
        except (ValueError, RecursionError):  # as in decoded_as(), whose call takes as long as the decoding
            yield _ties_in(one.args)


def _ties_in(args: dict) -> _Ties:
    """Return the ids in arguments of which some have other types than torch's."""
    device, *numbers = (args.get(name) for name in ("device", "correlation", "original_stream", "graph id"))
    correlation, stream, graph = (number if type(number) is int else None for number in numbers)
    device = device if type(device) in (int, str, type(None)) else str(device)
    return _Ties(correlation, device, stream, graph, None, args.get("name"), args.get("annotation"))


def _calls(ops: list[Op]) -> dict[int, Op]:
    """Return the runtime calls by their correlation ids."""
    found = {}
    calls = [op for op in ops if op.kind == "runtime"]
    for op, ties in zip(calls, ties_of(calls), strict=True):
        if ties.correlation is not None:
            found.setdefault(ties.correlation, op)
    return found


def _link(calls: dict[int, Op], work: list[Work], nodes: list[Work]) -> None:
    """Tie GPU work and graph nodes to the runtime calls that launched them.

    If torch assigned a lane to a graph's node, the stream on which the node ran replaces it.
    """
    queued: dict[tuple, list[Work]] = {}  # by graph and node
    replays: dict[int, dict[int, Op]] = {}  # by graph, its launches by id
    everything = [*work, *nodes]
    for one, ties in zip(everything, ties_of(everything), strict=True):
        one.device = one.track[0] if ties.device is None else ties.device
        if ties.stream is not None:
            one.track = (one.track[0], ties.stream)
        one.launch = calls.get(ties.correlation)
        one.is_annotated = bool(ties.name or ties.annotation)
        if ties.graph and one.launch is not None:
            replays.setdefault(ties.graph, {})[id(one.launch)] = one.launch
        if ties.graph and ties.node and one.kind == "node":
            queued.setdefault((ties.graph, ties.node), []).append(one)
    for (graph, _), some in queued.items():
        # Of a replay that is queued behind another one CUPTI records the correlation 0 for host nodes. Each replay
        # runs each node once, so the order tells whose it is, where no replay is cut off.
        launches = sorted(replays.get(graph, {}).values(), key=_start)
        known = [one.launch in (None, launch) for one, launch in zip(some, launches, strict=False)]
        if len(some) == len(launches) and all(known):
            for one, launch in zip(some, launches, strict=True):
                one.launch = launch
    for one in work:
        launch = one.launch
        if launch is None:
            continue
        if launch.work:
            launch.work.append(one)
        else:
            launch.work = [one]


def _tie_nodes(work: list[Work], edges: list[Event], zero: int) -> None:
    """Tie the nodes of CUDA graphs to those that they depend on, by the flow events between them.

    An edge leads from a node's end on its lane in the file to the start of another node. If several nodes end there at
    the same time, all count.
    """
    begins, ends = {}, {}
    for one in work:
        begins.setdefault((*one.track, one.start), []).append(one)
        ends.setdefault((*one.track, one.end), []).append(one)
    sides: dict[str, dict] = {"s": {}, "f": {}}
    for edge in edges:
        if edge.ph in sides and _is_time(edge.ts):
            sides[edge.ph][edge.id] = (edge.pid, edge.tid, round((edge.ts - zero) * 1000))
    for number, at in sides["f"].items():
        before = ends.get(sides["s"].get(number), ())
        for one in begins.get(at, ()):
            one.after = (*one.after, *(other for other in before if other is not one))


class _SyncArgs(msgspec.Struct):
    kind: str = msgspec.field(name="cuda_sync_kind", default="")
    correlation: int | None = None
    device: int | str | None = None
    stream: int = -1
    awaited: int = msgspec.field(name="wait_on_stream", default=-1)
    record: int = msgspec.field(name="wait_on_cuda_event_record_corr_id", default=-1)


_sync_args = msgspec.json.Decoder(_SyncArgs)


def _syncs(events: list[Event], calls: dict[int, Op]) -> tuple[Sync, ...]:
    found = []
    for event in events:
        args = decoded_as(_sync_args, event.args)
        call = calls.get(args.correlation) if args else None
        if call is not None:
            device = event.pid if args.device is None else args.device
            awaited = args.awaited if args.awaited >= 0 else None
            found.append(Sync(args.kind, device, args.stream, call, calls.get(args.record), awaited))
    return tuple(sorted(found, key=lambda one: one.call.start))


COUNTED_DEVICE = re.compile(r"GPU (\d+) Counters")


def _counters(events: list[Event], zero: int) -> dict[tuple[int, str], Samples]:
    """Return the samples of each counter. Kineto names counters in arguments, the newer collector by events."""
    taken: dict[tuple[int, str], list[tuple[int, float]]] = {}
    for event in events:
        named = COUNTED_DEVICE.fullmatch(event.pid) if isinstance(event.pid, str) else None
        device = int(named[1]) if named else event.pid
        args = decoded(event.args)
        if type(device) is not int or not isinstance(args, dict) or not _is_time(event.ts):
            continue
        time = round((event.ts - zero) * 1000)
        for name, value in args.items():
            if type(value) in (int, float) and math.isfinite(value):
                taken.setdefault((device, name or event.name), []).append((time, float(value)))
    found = {}
    for key, samples in taken.items():
        samples.sort()
        found[key] = Samples([time for time, _ in samples], [value for _, value in samples])
    return found


def _memory(events: list[Event], zero: int) -> tuple[Memory, ...]:
    found = []
    for event in events:
        args = decoded(event.args)
        if not isinstance(args, dict) or not _is_time(event.ts):
            continue
        size, total, device = (args.get(name) for name in ("Bytes", "Total Allocated", "Device Id"))
        if type(size) is type(total) is type(device) is int and abs(total) < 2**60:
            time = round((event.ts - zero) * 1000)
            found.append(Memory(time, (event.pid, event.tid), size, total, device))
    return tuple(sorted(found, key=lambda one: one.time))


def _forward_of(flows: list[Event], zero: int) -> dict[tuple, tuple]:
    """Return the forward op of each backward op, both by thread and start, from autograd's flow events."""
    ends: dict[str, dict] = {"s": {}, "f": {}}
    for flow in flows:
        if flow.ph in ends and flow.id is not None and _is_time(flow.ts):
            ends[flow.ph][flow.id] = (flow.pid, flow.tid), round((flow.ts - zero) * 1000)
    return {backward: ends["s"][id] for id, backward in ends["f"].items() if id in ends["s"]}


def _as_slices(marks: Marks) -> list[Op]:
    """Return the slice of each step that an annotation's calls mark, like the profiler's own marks."""
    return [
        Op(f"{STEP}{number}", "label", start, end - start, marks.track, msgspec.Raw(b"{}"))
        for number, (start, end) in enumerate(marks.spans, 1)
    ]


def _steps(marks: list[Op], roots: list[Op], work: list[Work]) -> tuple[tuple[Step, ...], tuple[Op, ...]]:
    if not marks:
        everything = [*roots, *work]
        start, end = min(one.start for one in everything), max(one.end for one in everything)
        return (Step("whole trace", start, end, tuple(roots), tuple(work)),), ()
    starts, ends = [mark.start for mark in marks], [mark.end for mark in marks]

    def number(time: int) -> int | None:
        index = bisect.bisect_right(starts, time) - 1
        return index if index >= 0 and time < ends[index] else None

    in_step: list[list[Op]] = [[] for _ in marks]
    outside = []
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
    launched: list[list[Work]] = [[] for _ in marks]
    for one in work:
        index = number(one.launch.start) if one.launch is not None else None
        if index is not None:
            launched[index].append(one)
    steps = (
        Step(mark.name, mark.start, mark.end, tuple(inside), tuple(done))
        for mark, inside, done in zip(marks, in_step, launched, strict=True)
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


# The name that torch.profiler.tensorboard_trace_handler gives a file if the program does not name it.
HANDLERS_NAME = re.compile(r"(?P<host>.+)_(?P<process>\d{1,9})\.\d+\.pt\.trace\.json(?:\.gz)?")


def _host(recorded: object, path: Path, ops: list[Op]) -> str | None:
    """Return the recorded name of the host, or the one in the file's name; None without either.

    torch 2.15 records it, torch 2.11 does not. A name such as rank_3 has the same form, so the number has to be that of
    the trace's process.
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


def _process_group(found: dict) -> ProcessGroup:
    size, ranks = found["pg_size"], found.get("ranks")
    known = (
        isinstance(ranks, list) and len(ranks) == size and all(type(one) is int and 0 <= one < 2**31 for one in ranks)
    )
    return ProcessGroup(
        name=str(found.get("pg_name", "")),
        description=str(found.get("pg_desc", "")),
        size=size,
        ranks=tuple(ranks) if known else (),
    )
