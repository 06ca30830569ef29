"""The parts of a trace as data: ops as a tree, GPU work, steps.

Times are whole nanoseconds inside, from the trace's first slice on; microseconds wherever a name ends in _us.
"""

import bisect
import re
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from itertools import chain, compress, count, islice
from operator import attrgetter, eq
from pathlib import Path

import msgspec

from tracereader.trace.decoded import decoded_object
from tracereader.trace.facts import RunFacts
from tracereader.trace.labels import LOADER, OPTIMIZERS, STEP, annotation_of
from tracereader.trace.lenient import Defects
from tracereader.trace.types import Inputs, inputs_of

# In the names of a kernel's phases.
WAIT, REPETITION = "wait: ", re.compile(r" \d+$")
# The start and the length of a slice, or of anything else that has them: what lists are sorted and searched by.
start_of, dur_of = attrgetter("start"), attrgetter("dur")


class Slice(msgspec.Struct, eq=False):
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
        return decoded_object(self.raw)


class Op(Slice, eq=False):
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


def all_around(ops: Iterable[Op | None]) -> dict[int, Op]:
    """Return these ops and everything around them by id. A way upwards ends at what is known already."""
    found: dict[int, Op] = {}
    for op in ops:
        while op is not None and id(op) not in found:
            found[id(op)] = op
            op = op.parent
    return found


def outermost(roots: Sequence[Op], wanted: Callable[[Op], object]) -> Iterator[Op]:
    """Yield the wanted slices that lie in no other wanted slice, in order."""
    pending = list(reversed(roots))
    while pending:
        one = pending.pop()
        if wanted(one):
            yield one
        elif one.children:
            pending.extend(reversed(one.children))


def with_depths(roots: Sequence[Op]) -> Iterator[tuple[Op, int]]:
    """Yield these slices and all in them with their depths, parents first."""
    stack = [(root, 0) for root in reversed(roots)]
    while stack:
        op, depth = stack.pop()
        yield op, depth
        if op.children:
            stack.extend([(child, depth + 1) for child in reversed(op.children)])


def innermost(ops: Sequence[Op], time: int) -> list[Op]:
    """Return the ops that enclose a time on one thread, outermost first. ops: the thread's root ops, by start."""
    found = []
    while ops:
        index = bisect.bisect_right(ops, time, key=start_of) - 1
        if index < 0 or ops[index].end <= time:
            break
        found.append(ops[index])
        ops = ops[index].children
    return found


def sort_by_start(slices: list) -> None:
    """Sort slices by start, and the longer first where starts are equal.

    Files are nearly in the order of the starts and have few equal ones, so sorting by start alone takes little time.
    """
    slices.sort(key=start_of)
    starts = list(map(start_of, slices))
    reached = 0
    for place in compress(count(), map(eq, starts, islice(starts, 1, None))):
        if place < reached:
            continue
        start, reached = slices[place].start, place + 1
        while reached < len(slices) and slices[reached].start == start:
            reached += 1
        slices[place:reached] = sorted(slices[place:reached], key=dur_of, reverse=True)


class Work(Slice, eq=False):
    """One kernel, copy or memset on a GPU."""

    device: int | str = 0
    launch: Op | None = None
    said: object = None  # a KernelName, once it was asked for: see families.says
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


class Phase(Slice, eq=False):
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
        return tuple(chain.from_iterable(root.walk() for root in self.roots))

    @cached_property
    def labels(self) -> list[Op]:
        """Return the annotations, parents first."""
        return [op for op in self._ops if op.kind == "label"]

    @cached_property
    def outermost(self) -> list[Op]:
        """Return the outermost ops and calls of all threads, by start, with annotations of loaders and optimizers."""
        found = outermost(self.roots, lambda op: op.kind != "label" or op.name.startswith((LOADER, OPTIMIZERS)))
        return sorted(found, key=start_of)

    def named(self, wanted: Callable[[str], object]) -> list[Op]:
        """Return the ops and calls with a wanted name, parents first. Names are far fewer than ops."""
        places = sorted(chain.from_iterable(some for name, some in self._by_name.items() if wanted(name)))
        return [self._ops[place] for place in places]

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
        return with_depths(self.roots)


class ProcessGroup(msgspec.Struct, frozen=True):
    """A process group that torch lists with the rank. ranks: empty if torch does not list them all."""

    name: str
    description: str
    size: int
    ranks: tuple[int, ...]


class Process(msgspec.Struct, frozen=True):
    """One process of a file that holds several.

    name: as the file gives it. gpu_activities, gpu_us: what it ran on devices in the whole file, and the summed time.
    has_steps: whether it has the profiler's marks of steps.
    """

    name: str
    gpu_activities: int
    gpu_us: float
    has_steps: bool


class Rank(msgspec.Struct, frozen=True):
    """The process of a distributed run that wrote the trace. groups: the process groups that it is in."""

    rank: int
    world_size: int
    groups: tuple[ProcessGroup, ...] = ()


class Cold(msgspec.Struct, frozen=True):
    """The time that a thread spends in a call that a warm step does not make. what: how a report names its kind."""

    track: tuple
    start: int
    end: int
    what: str


class Earlier(msgspec.Struct, frozen=True):
    """The first step's wait for GPU work from before the recording, or from before the step.

    until: when that work had ended (ns). ns: by how much the wait makes the step longer. calls: the runtime calls that
    waited, before the step launched anything.
    """

    until: int
    ns: int
    calls: tuple[Op, ...]


class Mixed(msgspec.Struct, frozen=True):
    """Steps of two kinds, one of which takes longer. long: the starts (ns) of the longer steps, at least two."""

    long: frozenset[int]


class Records(msgspec.Struct, frozen=True, kw_only=True):
    """What a recording lacks.

    launches, lost: the calls that launch kernels or CUDA graphs, and those of them that have no record of GPU work; a
    CUDA graph's capture does not count. lost_calls: the same by name: lost and all, and of calls that copy.
    partly_lost: the launches of CUDA graphs with fewer records than another launch of the same graph. left_out: the
    names of the steps that were left out because launches of theirs have no records. incomplete: whether that is true
    of every step that launches, so that none was left out. clipped, clipped_us: activities that were recorded as ending
    after a later one of their stream, and the time that was taken off them.
    """

    launches: int = 0
    lost: int = 0
    lost_calls: dict[str, tuple[int, int]] = {}
    partly_lost: int = 0
    left_out: tuple[str, ...] = ()
    incomplete: bool = False
    clipped: int = 0
    clipped_us: float = 0.0


class Quality(Records, frozen=True, kw_only=True):
    """What a recording lacks, and what in it does not belong to a step.

    cold: by start. earlier: None if the first step waits for no earlier work. mixed: None if the steps are of one kind;
    otherwise a step's time is the mean of all. outlier: the start (ns) of the only step that takes far longer than all
    others and is not the first.
    """

    cold: tuple[Cold, ...] = ()
    earlier: Earlier | None = None
    mixed: Mixed | None = None
    outlier: int | None = None

    def cold_in(self, step: Step) -> list[Cold]:
        """Return the time in calls of a step that a warm step does not make, clipped to the step."""
        return [
            msgspec.structs.replace(one, start=max(one.start, step.start), end=min(one.end, step.end))
            for one in self.cold
            if one.start < step.end and one.end > step.start
        ]


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
    calls_in_a_step: int  # of those that end steps: 2 if each second call does
    work: tuple[Work, ...]  # all of it, in the order of the starts
    device_waits: tuple[Op, ...]  # the runtime calls that wait until the whole GPU is idle
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
    backend: str | None  # the kind of its devices, as in backends.py; None where nothing shows it
    device_properties: dict[object, dict]  # by the device's number, as the driver reported them to the profiler
    facts: RunFacts
    rank: Rank | None
    has_shapes: bool
    zeroed: int
    defects: Defects  # of the file: what is left out or replaced
    not_known: Counter  # slices on a device, of categories that this reader does not know, left out
    taken: Counter  # the same of a trace without any known work: taken for the device's work
    syncs: tuple[Sync, ...]  # by the start of their calls; only with enable_cuda_sync_events
    inside: tuple[Phase, ...]  # by start: what kernels recorded of their phases
    quality: Quality = msgspec.field(default_factory=Quality)  # what the recording can decide
    processes: tuple[Process, ...] = ()  # of a file that holds several: this one, and then the others
    of_no_process: int = 0  # activities that belong to none of them, left out
    captured: tuple[Path, ...] = ()  # the traces of its graphs' captures that were given beside it
    # Launches of its graphs that no capture describes, by the reason: see capture.tie.
    untied: Counter = msgspec.field(default_factory=Counter)

    @property
    def roots(self) -> list[Op]:
        """Return the outermost slices of the steps, and then those outside of the steps, on every thread."""
        return [*chain.from_iterable(step.roots for step in self.steps), *self.outside]

    @property
    def tops(self) -> list[Op]:
        """Return the outermost slices of every thread, with the annotations around several steps."""
        found = {}
        for top in self.roots:
            while top.parent is not None:
                top = top.parent
            found[id(top)] = top
        return list(found.values())
