"""One rank's trace: what each of its steps takes, and its part in every collective.

What joined() in ranks.py needs to set the ranks against each other, and no more: many are read, each in a process.
"""

import bisect
import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from operator import attrgetter

import msgspec

from tracereader.figures.gpu_time import Parts, gpu_parts, is_communication, launched_by
from tracereader.figures.intervals import Intervals, Lengths, clipped, gaps, minus, union
from tracereader.figures.places import phases
from tracereader.figures.steps import typical
from tracereader.figures.summary import window
from tracereader.trace import STEP, Op, Step, Trace, Work

# A collective of a CPU backend: the slice of the thread that works on it.
ON_CPU = re.compile(r"(gloo|mpi):(\w+)")
KINDS = (
    ("reducescatter", "reduce-scatter"), ("allreduce", "all-reduce"), ("allgather", "all-gather"),
    ("alltoall", "all-to-all"), ("broadcast", "broadcast"), ("barrier", "barrier"), ("gather", "gather"),
    ("scatter", "scatter"), ("reduce", "reduce"),
)  # fmt: skip
# Ranks of a group that are kept by number; of a larger group those that have a part in a collective are its members.
LISTED = 4096
BYTES_OF = {
    "double": 8, "long": 8, "longint": 8, "complexfloat": 8, "float": 4, "int": 4, "bfloat16": 2, "half": 2,
    "short": 2, "char": 1, "signedchar": 1, "byte": 1, "unsignedchar": 1, "bool": 1,
}  # fmt: skip
_start = attrgetter("start")


class Times(msgspec.Struct, frozen=True):
    """A stretch of one rank's time: compute, exposed communication, exposed copies and idle add up to us.

    communication_us: all of it, computed beside or not. idle_not_launched_us: of idle.
    """

    name: str
    us: float
    compute_us: float
    communication_us: float
    exposed_communication_us: float
    exposed_copy_us: float
    idle_us: float
    idle_not_launched_us: float


class RankStep(Times, frozen=True):
    """One step on the lane that computes: on a GPU from its first kernel to the next step's first.

    phases: its labels, in order; each from its first kernel to the next label's.
    """

    phases: tuple[Times, ...] = ()


class Part(msgspec.Struct, frozen=True):
    """What one rank did in one collective. Times in ns since 1970, by its own clock."""

    group: str
    members: tuple[int, ...]  # of the group; none where the trace does not list them
    kind: str
    step: str
    seq: int | None
    bytes: int | None  # as NCCL counts: an all-gather's result, else what goes in
    size: int  # ranks in the group
    start: int
    end: int


class Lane(msgspec.Struct, frozen=True):
    """What is drawn of a rank's computing in one step: (start, end, phase), in ns since 1970."""

    step: str
    pieces: tuple[tuple[int, int, str], ...]


class RankTrace(msgspec.Struct, frozen=True):
    """What is kept of one trace. Times in ns since 1970, by its own clock."""

    path: str
    rank: int
    world_size: int
    host: str | None
    device: str
    on_gpu: bool
    start: int
    end: int
    total: Times
    steps: tuple[RankStep, ...]
    left_out: tuple[str, ...]  # steps so much wider that they would hide what the rest is like
    parts: tuple[Part, ...]
    exposed: tuple[tuple[int, int], ...]  # communicating with nothing computed beside it
    late: tuple[tuple[int, int], ...]  # of that, while the next kernel was not launched yet
    unnamed: int  # collectives' kernels of the steps that the trace does not describe
    lane: Lane | None


def of_rank(trace: Trace, step: int | None = None) -> RankTrace:
    """What is kept of one rank's trace, which has a `rank`. step: the number of the one that is drawn."""
    steps, start, end = window(trace, typical(trace))
    zero = trace.base_ns + trace.zero_us * 1000
    parts = gpu_parts(trace.work, start, end)
    on_gpu = parts is not None
    if parts is None:
        parts = _cpu_parts(steps, start, end)
        stretches = [(one, one.start, one.end) for one in steps]
    else:
        stretches = _on_gpu(steps, parts.device, end)
    lengths, starts = _Cut(parts), _kernels_by_launch(parts.device) if on_gpu else None
    done = list(_parts_on_gpu(steps, zero) if on_gpu else _parts_on_cpu(steps, zero, trace.rank))
    named = [one for one in done if one is not None]
    late = _late(parts.exposed_communication, steps) if on_gpu else []
    used = dict.fromkeys(trace.devices)
    return RankTrace(
        path=str(trace.path),
        rank=trace.rank.rank,
        world_size=trace.rank.world_size,
        host=trace.host,
        device=", ".join(used) if on_gpu else "CPU",
        on_gpu=on_gpu,
        start=zero + start,
        end=zero + end,
        total=lengths.times("", start, end),
        steps=tuple(_step(one, lengths, left, right, starts) for one, left, right in stretches),
        left_out=tuple(one.name for one in trace.steps[: len(trace.steps) - len(steps)]),
        parts=tuple(named),
        exposed=tuple((zero + left, zero + right) for left, right in parts.exposed_communication),
        late=tuple((zero + left, zero + right) for left, right in late),
        unnamed=len(done) - len(named),
        lane=_lane(stretches, step, zero, parts.compute, starts),
    )


class _Cut:
    """The parts of a window, ready to be asked about any stretch of it."""

    def __init__(self, parts: Parts):
        self.of = {
            name: Lengths(getattr(parts, name))
            for name in ("compute", "communication", "exposed_communication", "exposed_copy", "not_launched")
        }
        self.idle = Lengths(union([*parts.not_launched, *parts.launched, *parts.unknown]))

    def times(self, name: str, start: int, end: int) -> Times:
        us = {name: lengths.between(start, end) / 1e3 for name, lengths in self.of.items()}
        return Times(
            name=name,
            us=(end - start) / 1e3,
            compute_us=us["compute"],
            communication_us=us["communication"],
            exposed_communication_us=us["exposed_communication"],
            exposed_copy_us=us["exposed_copy"],
            idle_us=self.idle.between(start, end) / 1e3,
            idle_not_launched_us=us["not_launched"],
        )


def _cpu_parts(steps: Sequence[Step], start: int, end: int) -> Parts:
    """A window of a run on the CPU: ops on any thread, collectives on their backend's own threads.

    Handing a collective over, or waiting for one, is no computing.
    """
    computed, handed, communication = defaultdict(list), defaultdict(list), []
    for step in steps:
        pending = list(step.roots)
        while pending:
            op = pending.pop()
            if op.kind == "label" and ON_CPU.match(op.name):
                communication.append((op.start, op.end))
                continue  # what it does inside is the collective's own
            if op.kind == "op":
                hands_over = op.name.startswith(("c10d::", "_c10d_functional::", "record_param_comms"))
                (handed if hands_over else computed)[op.track].append((op.start, op.end))
            pending.extend(op.children)
    compute = union(one for track, some in computed.items() for one in minus(union(some), union(handed[track])))
    compute, communication = (union(clipped(some, start, end)) for some in (compute, communication))
    return Parts(
        compute=compute,
        communication=communication,
        exposed_communication=minus(communication, compute),
        exposed_copy=[],
        not_launched=[],
        launched=[],
        unknown=gaps(union([*compute, *communication]), start, end),
    )


def _computing(step: Step, device: object) -> list[Work]:
    return [one for one in step.work if one.device == device and one.kind == "kernel" and not is_communication(one)]


def _on_gpu(steps: Sequence[Step], device: object, end: int) -> list[tuple[Step, int, int]]:
    """Each step that computes something, with the stretch of GPU time that is its own."""
    found = []
    for step in steps:
        work = _computing(step, device)
        if work:
            found.append((step, max(work[0].start, found[-1][1] if found else work[0].start)))
    if not found:  # copies or collectives only
        return [(step, step.start, step.end) for step in steps]
    last = max((one.end for step in steps for one in step.work if one.device == device), default=end)
    bounds = [start for _, start in found] + [max(last, found[-1][1])]
    return [(step, left, right) for (step, _), (left, right) in zip(found, pairwise(bounds), strict=True)]


Starts = Callable[[Step], list[tuple[int, int]]]


def _kernels_by_launch(device: object) -> Starts:
    """For a step: when each of its kernels that compute was launched, and when it began."""
    return lambda step: sorted((one.launch.start, one.start) for one in _computing(step, device) if one.launch)


def _stretches(step: Step, start: int, end: int, starts: Starts | None) -> list[tuple[str, int, int]]:
    """A step's stretch cut at its labels; with `starts`, at the first kernel that each launched."""
    labels = phases(step)
    if starts is None:
        bounds = [edge for label in labels for edge in ((label.start, label.name), (label.end, OUTSIDE))]
    else:
        bounds, launched = [], starts(step)
        for label in labels:
            first = bisect.bisect_left(launched, (label.start, 0))
            if first < len(launched) and launched[first][0] < label.end:
                bounds.append((launched[first][1], label.name))
    found, at, name = [], start, OUTSIDE
    for bound, following in bounds:
        bound = min(max(bound, at), end)
        found.append((name, at, bound))
        at, name = bound, following
    return [one for one in [*found, (name, at, end)] if one[2] > one[1]]


def _step(step: Step, cut: _Cut, start: int, end: int, starts: Starts | None) -> RankStep:
    by_name: dict[str, list[Times]] = {}
    for name, left, right in _stretches(step, start, end, starts):
        by_name.setdefault(name, []).append(cut.times(name, left, right))
    phases = tuple(_summed(name, some) for name, some in by_name.items()) if set(by_name) != {OUTSIDE} else ()
    return RankStep(**msgspec.structs.asdict(cut.times(step.name, start, end)), phases=phases)


OUTSIDE = "outside the labels"


def _summed(name: str, some: Sequence[Times]) -> Times:
    fields = Times.__struct_fields__[1:]
    return Times(name, **{field: sum(getattr(one, field) for one in some) for field in fields})


def _late(exposed: Intervals, steps: Sequence[Step]) -> Intervals:
    """Of exposed communication, what lies before the return of the launch call of the next kernel that computes."""
    kernels = (one for step in steps for one in step.work if one.kind == "kernel" and one.launch)
    computing = sorted((one for one in kernels if not is_communication(one)), key=_start)
    starts = [one.start for one in computing]
    found = []
    for left, right in exposed:
        following = bisect.bisect_left(starts, right)
        launched = launched_by(computing[following], left, right) if following < len(computing) else left
        if launched > left:
            found.append((left, launched))
    return found


def _parts_on_gpu(steps: Sequence[Step], zero: int) -> Iterator[Part | None]:
    """What the trace tells of each collective's kernel; None of one that it does not describe."""
    for step in steps:
        for one in step.work:
            if not is_communication(one):
                continue
            args = one.args
            if "Collective name" not in args and one.launch is not None:
                args = next((op.args for op in one.launch.above() if op.name == "record_param_comms"), {})
            name, size = str(args.get("Collective name", "")), args.get("Group size")
            kind = kind_of(name)
            if kind is None and ("SendRecv" in one.name or re.match("send|recv", name)):
                continue  # between two ranks only: no collective
            if kind is None or type(size) is not int:
                yield None
                continue
            told = args.get("Process Group Ranks")
            yield Part(
                group=f"{args.get('Process Group Name', '')} {told or ''}".strip(),
                members=_members(told),
                kind=kind,
                step=step.name,
                seq=args["Seq"] if type(args.get("Seq")) is int and args["Seq"] >= 0 else None,
                bytes=_bytes(kind, args),
                size=size,
                start=zero + one.start,
                end=zero + one.end,
            )


def _parts_on_cpu(steps: Sequence[Step], zero: int, rank) -> Iterator[Part | None]:
    # Such a slice does not tell its group: only where all groups are the whole world is it known.
    known = all(size == rank.world_size for size in rank.groups)
    members = tuple(range(rank.world_size)) if rank.world_size <= LISTED else ()
    for step in steps:
        for op in sorted(_collectives_on_cpu(step), key=_start):
            backend, name = ON_CPU.match(op.name).groups()
            kind = kind_of(name)
            if kind is None or not known:
                yield None
                continue
            yield Part(
                group=backend,
                members=members,
                kind=kind,
                step=step.name,
                seq=None,
                bytes=_bytes_on_cpu(kind, op.args, rank.world_size),
                size=rank.world_size,
                start=zero + op.start,
                end=zero + op.end,
            )


def _collectives_on_cpu(step: Step) -> Iterator[Op]:
    return (op for op in step.walk() if op.kind == "label" and ON_CPU.match(op.name))


def kind_of(name: str) -> str | None:
    """The collective that a name of torch's or a backend's speaks of; None of a send, a receive or no name."""
    plain = name.lower().replace("_", "")
    return next((kind for part, kind in KINDS if part in plain), None)


def _members(told: object) -> tuple[int, ...]:
    try:
        found = json.loads(told) if isinstance(told, str) else told
    except ValueError:  # long lists are cut with dots
        return ()
    return tuple(found) if isinstance(found, list) and all(type(one) is int for one in found) else ()


def _bytes(kind: str, args: dict) -> int | None:
    item = BYTES_OF.get(str(args.get("dtype")).lower())
    counts = [args.get("In msg nelems"), args.get("Out msg nelems")]
    if item is None or any(type(one) is not int or not 0 < one < 2**50 for one in counts):
        return None
    return item * (counts[1] if kind == "all-gather" else max(counts) if kind == "broadcast" else counts[0])


def _bytes_on_cpu(kind: str, args: dict, size: int) -> int | None:
    dims, types = args.get("Input Dims"), args.get("Input type")
    if not (isinstance(dims, list) and len(dims) == 1 and isinstance(types, list) and len(types) == 1):
        return None
    item, count = BYTES_OF.get(str(types[0]).removeprefix("c10::").replace(" ", "").lower()), 1
    for one in dims[0] if isinstance(dims[0], list) else [None]:
        if type(one) is not int or not 0 < one < 2**50:
            return None
        count *= one
    return item and item * count * (size if kind == "all-gather" else 1)


def _lane(
    stretches: Sequence[tuple[Step, int, int]], number: int | None, zero: int, compute: Intervals, starts: Starts
) -> Lane | None:
    """One step's computing, cut at its phases: of the step asked for, or the middle one."""
    chosen = [one for one in stretches if one[0].name == f"{STEP}{number}"]
    if number is None:
        chosen = stretches[len(stretches) // 2 :]
    if not chosen:
        return None
    step, start, end = chosen[0]
    pieces = []
    for name, left, right in _stretches(step, start, end, starts):
        merged: list[list[int]] = []
        for begin, stop in clipped(compute, left, right):
            if merged and begin - merged[-1][1] < (end - start) / 200:  # narrower than any column
                merged[-1][1] = stop
            else:
                merged.append([begin, stop])
        pieces += [(zero + begin, zero + stop, name) for begin, stop in merged]
    return Lane(step.name, tuple(pieces))
