"""The figures of one rank's trace: the times of its steps, and its part in every collective.

A RankTrace holds only what joined() in ranks.py needs, because many ranks are read, each in its own process.
"""

import bisect
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise, zip_longest
from typing import Literal, NamedTuple

import msgspec

from tracereader.figures.gpu_time import Parts, busiest, is_communication, parts_by_device
from tracereader.figures.pace import PAUSE_US, window
from tracereader.figures.places import phases
from tracereader.figures.regime import Regime, regime_of
from tracereader.figures.steps import launches, typical
from tracereader.trace import STEP, Op, Rank, Step, Trace, Work, outermost, start_of
from tracereader.trace.decoded import decoded
from tracereader.trace.grouped import grouped
from tracereader.trace.intervals import Intervals, Lengths, both, clipped, joined, minus, union
from tracereader.trace.labels import C10D, DESCRIBES_COLLECTIVE, LOADER, asks_for_collective, collective_on_cpu
from tracereader.trace.types import Inputs, dtype_of

# torch's names of a send and of a receive.
SEND, RECEIVE = re.compile(r"i?send"), re.compile(r"i?recv")
# The annotation of a send or a receive, with the ranks in the group: "nccl:send 0->1", "nccl:recv 1<-0".
ARROW = re.compile(r"\w+:(?:send \d+->|recv \d+<-)(\d+)")
KINDS = (
    ("reducescatter", "reduce-scatter"), ("allreduce", "all-reduce"), ("allgather", "all-gather"),
    ("alltoall", "all-to-all"), ("broadcast", "broadcast"), ("barrier", "barrier"), ("gather", "gather"),
    ("scatter", "scatter"), ("reduce", "reduce"),
)  # fmt: skip
# A group's members are listed up to this number. The members of a larger group are the ranks that have a part in it.
LISTED = 4096


class Times(msgspec.Struct, frozen=True):
    """An interval of one rank's time. Compute, exposed communication, exposed copies and idle time add up to us.

    communication_us: hidden and exposed communication together. idle_not_launched_us: the idle time before the CPU
    launched the next kernel. idle_loading_us: the idle time while the CPU waited in the DataLoader.
    """

    name: str
    us: float
    compute_us: float
    communication_us: float
    exposed_communication_us: float
    exposed_copy_us: float
    idle_us: float
    idle_not_launched_us: float
    idle_loading_us: float = 0.0

    @property
    def hidden_us(self) -> float:
        """Return the communication while the rank computes or copies."""
        return self.communication_us - self.exposed_communication_us


class RankStep(Times, frozen=True):
    """One step where it is computed: on a GPU, from the step's first kernel to the next step's first kernel.

    If a step begins with a message, the wait for it belongs to that step. phases: the step's annotations, in order.
    Each lasts from its first kernel to the first kernel that is launched after it.
    """

    phases: tuple[Times, ...] = ()


class Group(msgspec.Struct, frozen=True):
    """A process group. name: torch's name with the list of ranks, which the trace truncates for large groups.

    description: torch's or the program's; "" if none is recorded. members: empty if the trace does not list them all.
    """

    name: str
    description: str
    size: int
    members: tuple[int, ...]


class Call(msgspec.Struct, frozen=True):
    """What equal collectives or messages of one step have in common on a rank. group: the index in the rank's groups.

    bytes: the message's size as NCCL counts it: the larger of input and result of an all-gather, a reduce-scatter, an
    all-to-all or a broadcast, the input of other collectives.
    pair: of a message (kind "send" on both of its ranks), the rank that sends it and the rank that receives it.
    tag: of a message of gloo, which orders only the messages of one tag. None if it is not recorded; NCCL has none.
    """

    group: int
    kind: str
    bytes: int | None
    step: str
    pair: tuple[int, int] | None = None
    tag: int | None = None


class Part(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One rank's part in one collective or message. Times in ns since 1970, by the rank's own clock.

    call: the index in the rank's calls. A job has millions of parts, so a part holds only numbers.
    """

    call: int
    seq: int | None
    start: int
    end: int


class Lane(msgspec.Struct, frozen=True):
    """A rank's compute in one step, for drawing: (start, end, phase), in ns since 1970."""

    step: str
    pieces: tuple[tuple[int, int, str], ...]


class NotRead(msgspec.Struct, frozen=True):
    """Why the trace of a rank is left out.

    detail: the reader's message (unreadable), an exception's text (failed), the path of the trace that is kept
    (same_rank), or the name of a step that most others have (no_common_step). rank, world_size: of this trace.
    other_world_size: of the other traces. seconds: between this recording and the others (other_time), or without an
    answer (no_answer).
    """

    reason: Literal[
        "unreadable", "no_rank", "other_world_size", "other_time", "same_rank", "no_answer", "killed", "failed",
        "no_common_step", "front_end",
    ]  # fmt: skip
    detail: str = ""
    rank: int = 0
    world_size: int = 0
    other_world_size: int = 0
    seconds: float = 0.0


class RankTrace(msgspec.Struct, frozen=True):
    """The data kept of one trace. Times in ns since 1970, by the rank's own clock."""

    path: str
    rank: int
    world_size: int
    host: str | None
    device: str
    on_gpu: bool
    start: int  # of the steps, on a GPU not before its first recorded activity
    end: int
    total: Times
    steps: tuple[RankStep, ...]
    left_out: tuple[str, ...]  # steps that take so much longer that they would distort the figures
    groups: tuple[Group, ...]
    calls: tuple[Call, ...]
    parts: tuple[Part, ...]  # in collectives, in the order of their starts
    exposed: tuple[int, ...]  # intervals of exposed communication: start, end, start, end and so on
    hidden: int  # collectives that overlap with compute for at least half of their time
    unnamed: int  # communication kernels of the steps that the trace does not describe
    unprofiled_step_us: float | None  # a step's time without the profiler, if the run measured it
    lane: Lane | None
    messages: tuple[Part, ...] = ()  # sends and receives, in the order of their starts
    regime: Regime | None = None  # None without GPU work
    kernels: int = 0  # of the steps, without communication
    launches: int = 0  # of the steps: calls that launch GPU work
    between_launches_us: float | None = None  # the CPU's mean time from a launch to the next one, without pauses


def of_rank(trace: Trace, step: int | None = None) -> RankTrace:
    """Return the data kept of a rank's trace. The trace must record its rank. step: the number of the step to draw."""
    usual = typical(trace)
    steps, start, end = window(trace, usual)
    zero = trace.base_ns + trace.zero_us * 1000
    by_device = parts_by_device(trace.work, start, end)
    parts = busiest(by_device)
    on_gpu = parts is not None
    if parts is None:
        parts = cpu_parts(steps, start, end)
        stretches = [(one, one.start, one.end) for one in steps]
    else:
        stretches = _on_gpu(steps, parts.device, end)
        # The trace does not show what the GPU did before its first recorded activity, which may be of earlier steps.
        on_device = (one.start for one in trace.work if one.device == parts.device and one.end > start)
        start = max(start, next(on_device, start))
    cut, device = _cut(parts, _loading(trace, steps)), parts.device if on_gpu else None
    calls = Calls(trace.rank)
    done = list(_parts_on_gpu(steps, zero, calls) if on_gpu else _parts_on_cpu(steps, zero, calls))
    described = sorted((one for one in done if one is not None), key=start_of)
    of_call = list(calls.found)
    named = [one for one in described if of_call[one.call].pair is None]
    exposed = [(zero + left, zero + right) for left, right in parts.exposed_communication]
    return RankTrace(
        path=str(trace.path),
        rank=trace.rank.rank,
        world_size=trace.rank.world_size,
        host=trace.host,
        device=", ".join(dict.fromkeys(trace.devices)) if on_gpu else "CPU",
        on_gpu=on_gpu,
        start=zero + start,
        end=zero + end,
        total=cut("", start, end),
        steps=tuple(_step(one, cut, left, right, device) for one, left, right in stretches),
        left_out=tuple(one.name for one in trace.steps[: len(trace.steps) - len(steps)]),
        groups=tuple(calls.groups.values()),
        calls=tuple(of_call),
        parts=tuple(named),
        exposed=tuple(edge for one in exposed for edge in one),
        hidden=hidden(named, exposed),
        unnamed=len(done) - len(described),
        unprofiled_step_us=trace.facts.unprofiled_step_us,
        lane=_lane(stretches, step, zero, parts.compute, device),
        messages=tuple(one for one in described if of_call[one.call].pair is not None),
        regime=regime_of(trace, usual, usual, by_device) if on_gpu else None,
        kernels=sum(len(_computing(one, device)) for one in steps) if on_gpu else 0,
        launches=sum(map(launches, steps)),
        between_launches_us=_between_launches_us(steps),
    )


Cut = Callable[[str, int, int], Times]


def _cut(parts: Parts, loading: Intervals) -> Cut:
    """Return a function that gives, for a name, a start and an end in a window with these parts, the Times."""
    idle = union([*parts.not_launched, *parts.launched, *parts.unknown])
    every = {
        "compute_us": parts.compute, "communication_us": parts.communication,
        "exposed_communication_us": parts.exposed_communication, "exposed_copy_us": parts.exposed_copy,
        "idle_us": idle, "idle_not_launched_us": parts.not_launched, "idle_loading_us": both(idle, loading),
    }  # fmt: skip
    of = {name: Lengths(one) for name, one in every.items()}
    return lambda name, start, end: Times(
        name, (end - start) / 1e3, **{field: one.between(start, end) / 1e3 for field, one in of.items()}
    )


def hidden(parts: Iterable[Part], exposed: Intervals) -> int:
    """Return the number of parts that are not in exposed communication for at least half of their time."""
    beside = Lengths(exposed)
    return sum(2 * beside.between(one.start, one.end) <= one.end - one.start for one in parts)


def _loads(op: Op) -> bool:
    return op.kind == "label" and op.name.startswith(LOADER)


def _loading(trace: Trace, steps: Sequence[Step]) -> Intervals:
    """Return the intervals in which the CPU waited for the DataLoader's next batch."""
    if not any(name.startswith(LOADER) for name in trace.op_names):
        return []
    roots = [root for step in steps for root in step.roots]
    return union((op.start, op.end) for op in outermost([*roots, *trace.outside], _loads))


def cpu_parts(steps: Sequence[Step], start: int, end: int) -> Parts:
    """Return the parts of a window of a run on the CPU. Collectives run on threads of their backend.

    Ops on all threads count as compute, except starting a collective, waiting for it and loading the next batch. The
    slice of a send or a receive lasts until the program has waited for it, and the program may compute meanwhile.
    """
    computed, handed, communication = defaultdict(list), defaultdict(list), []
    for step in steps:
        pending = list(step.roots)
        while pending:
            op = pending.pop()
            if op.kind == "label" and (call := collective_on_cpu(op.name)):
                communication.append((_asking(op).start, op.end))
                if not _is_message(call[1]):
                    continue  # slices inside it belong to the collective
            if _loads(op):
                continue
            if op.kind == "op":
                hands_over = C10D.match(op.name) or op.name == DESCRIBES_COLLECTIVE
                (handed if hands_over else computed)[op.track].append((op.start, op.end))
            pending.extend(op.children)
    compute = union(one for track, some in computed.items() for one in minus(union(some), union(handed[track])))
    compute, communication = (union(clipped(some, start, end)) for some in (compute, communication))
    return Parts(
        compute=compute,
        communication=communication,
        exposed_communication=minus(communication, compute),
        unknown=minus([(start, end)], union([*compute, *communication])),
    )


def _computing(step: Step, device: object) -> list[Work]:
    return [one for one in step.work if one.device == device and one.kind == "kernel" and not is_communication(one)]


def _on_gpu(steps: Sequence[Step], device: object, end: int) -> list[tuple[Step, int, int]]:
    """Return each step with kernels, and the start and end of its GPU time.

    If a step begins with communication, its time begins when the steps before it have computed.
    """
    found: list[tuple[Step, int]] = []
    computed = 0
    for step in steps:
        kernels = [one for one in step.work if one.device == device and one.kind == "kernel"]
        if kernels:
            computing = _computing(step, device)
            first = min(max(kernels[0].start, computed), computing[0].start if computing else kernels[0].start)
            found.append((step, max(first, found[-1][1] if found else first)))
            computed = max((one.end for one in computing), default=computed)
    if not found:  # the steps have only copies
        return [(step, step.start, step.end) for step in steps]
    last = max((one.end for step in steps for one in step.work if one.device == device), default=end)
    bounds = [start for _, start in found] + [max(last, found[-1][1])]
    return [(step, left, right) for (step, _), (left, right) in zip(found, pairwise(bounds), strict=True)]


def _stretches(step: Step, start: int, end: int, device: object) -> list[tuple[str, int, int]]:
    """Return a step's interval cut at its annotations.

    On a device, it is cut at each annotation's first compute kernel, and at the first one that is launched after it.
    """
    labels = phases(step)
    if device is None:
        bounds = [edge for label in labels for edge in ((label.start, label.name), (label.end, OUTSIDE_ANNOTATIONS))]
    else:
        bounds = []
        launched = sorted((one.launch.start, one.start) for one in _computing(step, device) if one.launch)
        for label, following in zip_longest(labels, labels[1:]):
            first, after = (bisect.bisect_left(launched, (at, 0)) for at in (label.start, label.end))
            if first < after:
                bounds.append((launched[first][1], label.name))
                # The next kernel is launched outside of the annotations, or by the next annotation.
                if after < len(launched) and not (following and following.start <= launched[after][0]):
                    bounds.append((launched[after][1], OUTSIDE_ANNOTATIONS))
    found, at, name = [], start, OUTSIDE_ANNOTATIONS
    for bound, following in bounds:
        bound = min(max(bound, at), end)
        found.append((name, at, bound))
        at, name = bound, following
    return [one for one in [*found, (name, at, end)] if one[2] > one[1]]


def _step(step: Step, cut: Cut, start: int, end: int, device: object) -> RankStep:
    by_name = grouped((name, cut(name, left, right)) for name, left, right in _stretches(step, start, end, device))
    found = () if set(by_name) == {OUTSIDE_ANNOTATIONS} else (summed(name, some) for name, some in by_name.items())
    return RankStep(**msgspec.structs.asdict(cut(step.name, start, end)), phases=tuple(found))


OUTSIDE_ANNOTATIONS = "outside the annotations"


def summed(name: str, some: Sequence[Times]) -> Times:
    """Return the sum of some times, under this name."""
    return Times(name, **{field: sum(getattr(one, field) for one in some) for field in Times.__struct_fields__[1:]})


class Calls:
    """The groups and calls of one rank, without duplicates."""

    def __init__(self, rank: Rank):
        self.rank = rank
        self.groups: dict[tuple, Group] = {}
        self.found: dict[Call, int] = {}
        self._index: dict[tuple, int] = {}

    def call(self, group: Group, *told: object) -> int:
        """Return the number of a call. told: the fields of the Call after its group."""
        key = (group.name, group.size)
        index = self._index.setdefault(key, len(self._index))
        self.groups.setdefault(key, group)
        return self.found.setdefault(Call(index, *told), len(self.found))

    def message(self, name: str, args: dict, step: str) -> int | None:
        """Return the call of a send or a receive, by torch's name of it; None if its peer is not known."""
        group = self.group(args)
        pair = _pair(SEND.match(name) is not None, args, group, self.rank) if group is not None else None
        return None if pair is None else self.call(group, "send", _bytes("send", args), step, pair)

    def group(self, args: dict) -> Group | None:
        """Return the process group that a kernel's arguments name; None if its size is not known."""
        size, told = args.get("Group size"), args.get("Process Group Ranks")
        whole = not _is_size(size) and _is_one_group(self.rank)
        size = self.rank.world_size if whole else size
        if not _is_size(size):
            return None
        called = str(args.get("Process Group Name", ""))
        listed = next((one for one in self.rank.groups if one.name == called and one.size == size), None)
        # Several groups may have one name, such as all tensor-parallel groups of some frameworks.
        name = f"{called} {told or (list(listed.ranks) if listed and listed.ranks else '')}".strip()
        if (name, size) in self.groups:
            return self.groups[name, size]
        said = args.get("Process Group Description") or (listed.description if listed else "")
        members = _everyone(self.rank) if whole else _members(told) or (listed.ranks if listed else ())
        return Group(name, str(said), size, members if len(members) <= LISTED else ())


def _between_launches_us(steps: Sequence[Step]) -> float | None:
    """Return the mean time between two launches of a thread that follow each other without a pause; None without any.

    It shows how fast the CPU is. Pauses show what the program does between its launches.
    """
    calls = {id(one.launch): one.launch for step in steps for one in step.work if one.launch is not None}
    by_track = grouped((one.track, one.start) for one in calls.values())
    apart = [after - before for starts in by_track.values() for before, after in pairwise(sorted(starts))]
    short = [one for one in apart if one <= PAUSE_US * 1e3]
    return sum(short) / len(short) / 1e3 if short else None


def _parts_on_gpu(steps: Sequence[Step], zero: int, calls: Calls) -> Iterator[Part | None]:
    """Yield the trace's description of each collective and message; None for a kernel without one."""
    for one, found in described_on_gpu(steps, calls):
        # A kernel counts as not described if one of its messages is not.
        for call, seq in [(None, None)] if (None, None) in found else found:
            yield None if call is None else Part(call, seq, zero + one.start, zero + one.end)


def described_on_gpu(steps: Sequence[Step], calls: Calls) -> Iterator[tuple[Work, list[tuple[int | None, int | None]]]]:
    """Yield each communication kernel with the calls that it runs, and the sequence number of each collective.

    None is among the calls if one of them is not described. One kernel may run several calls that were coalesced.
    torch's sequence numbers of messages are not used, because each rank counts its own.
    """
    for step in steps:
        batched = None
        for one in step.work:
            if not is_communication(one):
                continue
            asked = [_described(one)]
            if kind_of(asked[0][0]) is None and not _is_message(asked[0][0]):
                batched = _batched(step) if batched is None else batched
                asked = batched.get(id(one.launch), ())
            found: list[tuple[int | None, int | None]] = []
            for name, args in asked:
                kind, seq = kind_of(name), args.get("Seq")
                if kind is None:
                    found.append((calls.message(name, args, step.name), None))
                elif (group := calls.group(args)) is None:
                    found.append((None, None))
                else:
                    call = calls.call(group, kind, _bytes(kind, args), step.name)
                    found.append((call, seq if type(seq) is int and 0 <= seq < 2**53 else None))
            yield one, found or [(None, None)]


def _batched(step: Step) -> dict[int, list[tuple[str, dict]]]:
    """Return by the id of a launch the coalesced calls that it starts, such as batch_isend_irecv's, as name and args.

    torch describes each of them before the one launch of them all, and the description encloses no launch.
    """
    waiting: dict[tuple, list[tuple[str, dict]]] = defaultdict(list)
    found: dict[int, list[tuple[str, dict]]] = {}
    for op in step.walk():
        if op.name == DESCRIBES_COLLECTIVE and not any(below.work for below in op.walk()):
            args = op.args
            if _is_message(name := str(args.get("Collective name"))) or kind_of(name):
                waiting[op.track].append((name, args))
        elif op.work and any(map(is_communication, op.work)):
            found[id(op)] = waiting.pop(op.track, [])
    return found


def _is_message(name: str) -> bool:
    """Return whether torch's name of a communication is that of a send or a receive."""
    return SEND.match(name) is not None or RECEIVE.match(name) is not None


def _described(one: Work) -> tuple[str, dict]:
    """Return torch's name of a kernel's communication, and the arguments that describe it.

    The arguments are the kernel's own, or those of the ops around its launch. The kernel's name does not decide,
    because an older NCCL calls the kernels of all collectives SendRecv.
    """
    args, name, peer = one.args, "", None
    for op in one.launch.above() if one.launch and "Collective name" not in args else ():
        if op.name == DESCRIBES_COLLECTIVE:
            args = op.args
        elif not kind_of(name) and (asked := asks_for_collective(op.name)):
            name, peer = asked, ARROW.match(op.name) or peer
        if "Collective name" in args:
            break
    if peer is not None and "Rank" not in args:
        args = args | {"Rank": int(peer[1])}
    return str(args.get("Collective name") or name), args


def _pair(sends: bool, args: dict, group: Group, rank: Rank) -> tuple[int, int] | None:
    """Return the ranks that send and receive a message, from its description on one of them; None if not known.

    args: "Dst Rank" or "Src Rank" is the peer. Older versions of torch have only its number in the group, as "Rank".
    """
    peer, number = args.get("Dst Rank" if sends else "Src Rank"), args.get("Rank")
    if not _is_size(peer):
        others = [one for one in group.members if one != rank.rank]
        in_group = group.members[number] if _is_size(number) and number < len(group.members) else None
        peer = others[0] if len(others) == 1 else in_group
    if peer is None or peer == rank.rank:
        return None
    return (rank.rank, peer) if sends else (peer, rank.rank)


def _is_size(found: object) -> bool:
    """Return whether the value can be a number of ranks or a rank's number."""
    return type(found) is int and 0 <= found < 2**31


def _is_one_group(rank: Rank) -> bool:
    """Return whether every group of the run has all ranks. With more than two ranks the trace must list its groups."""
    return rank.world_size == 2 or (bool(rank.groups) and all(one.size == rank.world_size for one in rank.groups))


def _everyone(rank: Rank) -> tuple[int, ...]:
    return tuple(range(rank.world_size)) if rank.world_size <= LISTED else ()


def _parts_on_cpu(steps: Sequence[Step], zero: int, calls: Calls) -> Iterator[Part | None]:
    rank = calls.rank
    members = _everyone(rank)
    for step in steps:
        for op, found in described_on_cpu(step, rank):
            group, pair, tag = Group(found.backend, "", rank.world_size, members), None, None
            if found.kind == "send":
                peer, tag = _peer_and_tag(_asking(op))
                pair = _pair(SEND.match(collective_on_cpu(op.name)[1]) is not None, {"Rank": peer}, group, rank)
            if found.kind is None or found.size is None or (pair is None and found.kind == "send"):
                yield None
            else:
                called = calls.call(group, found.kind, found.bytes, step.name, pair, tag)
                yield Part(called, None, zero + found.start, zero + op.end)


class OnCpu(NamedTuple):
    """What the trace says of a collective or message on a CPU backend. size: of its group, None if it is not known."""

    backend: str
    kind: str | None
    start: int
    size: int | None
    bytes: int | None


def described_on_cpu(step: Step, rank: Rank) -> Iterator[tuple[Op, OnCpu]]:
    """Yield the slices of collectives and messages on a CPU backend, by start."""
    size = rank.world_size if _is_one_group(rank) else None  # a collective's slice does not record its group
    for op in sorted((op for op in step.walk() if op.kind == "label" and collective_on_cpu(op.name)), key=start_of):
        backend, name = collective_on_cpu(op.name)
        kind, start = kind_of(name), op.start
        if _is_message(name):
            kind, start = "send", _asking(op).start  # the message may leave before its own slice begins
        yield op, OnCpu(backend, kind, start, size, _bytes_on_cpu(kind, op.inputs, size))


def _asking(op: Op) -> Op:
    """Return the op that started a collective or message on a CPU; its own slice if that is on a backend's thread."""
    return next((one for one in op.above() if C10D.match(one.name)), op)


def _peer_and_tag(asked: Op) -> tuple[int | None, int | None]:
    """Return the peer's number in the group and the tag of a message on a CPU, from the inputs of its op.

    The inputs are the tensors, the group, the peer and the tag. Both are None if they are not recorded.
    """
    inputs = asked.inputs.concrete
    told = inputs[2:] if len(inputs) == 4 else ()
    numbers = [int(one) if isinstance(one, str) and re.fullmatch(r"\d{1,9}", one) else None for one in told]
    return tuple(numbers) or (None, None)


def kind_of(name: str) -> str | None:
    """Return the kind of collective that torch's or a backend's name means; None for a send, a receive or no name."""
    return next((kind for part, kind in KINDS if part in name.lower().replace("_", "")), None)


def _members(told: object) -> tuple[int, ...]:
    found = decoded(told) if isinstance(told, str) else told  # long lists are truncated with dots and cannot be parsed
    return tuple(found) if isinstance(found, list) and all(map(_is_size, found)) else ()


def _bytes(kind: str, args: dict) -> int | None:
    dtype = dtype_of(args.get("dtype"))
    counts = [args.get("In msg nelems"), args.get("Out msg nelems")]
    if dtype is None or any(type(one) is not int or not 0 < one < 2**50 for one in counts):
        return None
    # Of an uneven all-to-all, a rank sends more than it receives, or less.
    larger = kind in ("broadcast", "all-to-all", "all-gather", "reduce-scatter")
    return dtype.bytes * (max(counts) if larger else counts[0])


def _bytes_on_cpu(kind: str | None, inputs: Inputs, size: int | None) -> int | None:
    if len(inputs.recorded) != 1 or len(inputs.types) != 1 or (size is None and kind == "all-gather"):
        return None
    dims, dtype = inputs.dims_at(0), dtype_of(inputs.types[0])
    if dims is None or dtype is None or not 0 < (count := math.prod(dims)) < 2**50:
        return None
    return dtype.bytes * count * (size if kind == "all-gather" else 1)


def _lane(
    stretches: Sequence[tuple[Step, int, int]], number: int | None, zero: int, compute: Intervals, device: object
) -> Lane | None:
    """Return the compute of step `number`, or of the middle step, cut at its phases; None if there is no such step."""
    chosen = [one for one in stretches if one[0].name == f"{STEP}{number}"]
    if number is None:
        chosen = stretches[len(stretches) // 2 :]
    if not chosen:
        return None
    step, start, end = chosen[0]
    pieces, narrow = [], (end - start) // 200  # a gap that is narrower than a column of the drawing
    for name, left, right in _stretches(step, start, end, device):
        merged = joined((begin, stop + narrow) for begin, stop in clipped(compute, left, right))
        pieces += [(zero + begin, zero + stop - narrow, name) for begin, stop in merged]
    return Lane(step.name, tuple(pieces))
