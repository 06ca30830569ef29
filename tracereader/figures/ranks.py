"""Several traces of one run: each rank's time, and its collectives matched with those of the others.

In two stages, so that many ranks can be read in processes of their own: of_rank() keeps of one trace what
joined() needs to set the ranks against each other.
"""

import bisect
import json
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from operator import attrgetter
from statistics import median

import msgspec

from tracereader.figures.gpu_time import Parts, gpu_parts, is_communication
from tracereader.figures.intervals import Intervals, Lengths, both, clipped, gaps, length, minus, union
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
# What the bus moves of each byte of the message: NCCL's definition (nccl-tests, doc/PERFORMANCE.md), for n ranks.
BUS_FACTOR = {
    "all-reduce": lambda n: 2 * (n - 1) / n, "all-gather": lambda n: (n - 1) / n,
    "reduce-scatter": lambda n: (n - 1) / n, "all-to-all": lambda n: (n - 1) / n,
    "broadcast": lambda n: 1.0, "reduce": lambda n: 1.0,
}  # fmt: skip
# All ranks leave these at nearly one time, so that clocks can be set by them.
LEFT_TOGETHER = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "barrier")
# Ranks of a group that are kept by number; of a larger group those that have a part in a collective are its members.
LISTED = 4096
# ns: on two H200s of one host the ends of one collective lie 24 µs apart at most.
FAR_APART = 100_000
# ns: clocks of two hosts that are farther apart than this are taken for two runs.
CLOCKS_OFF = 60 * 10**9
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


class RankFigures(msgspec.Struct, frozen=True):
    """One rank beside the others. Times in µs, over its window.

    waited_for_others_us: in matched collectives, from its own start to that of the last rank to arrive, summed;
    waiting_us: the same, counted once where several wait at a time. waited_exposed_us, together_exposed_us:
    exposed in these until then, and after. others_waited_us: the waits
    of all others together, where this rank was last. exposed_in_last_us: in the last collective of each step,
    not counting the wait. late_us: of its exposed communication, while its next kernel was not launched yet.
    hidden: collectives that had something computed beside them for half of their time or more.
    """

    rank: int
    trace: str
    host: str | None
    window_us: float
    compute_us: float
    communication_us: float
    exposed_communication_us: float
    exposed_copy_us: float
    idle_us: float
    idle_not_launched_us: float
    waited_for_others_us: float
    waiting_us: float
    waited_exposed_us: float
    together_exposed_us: float
    exposed_in_last_us: float
    late_us: float
    collectives: int
    hidden: int
    arrived_last: int
    others_waited_us: float
    steps: tuple[RankStep, ...]


class Collective(msgspec.Struct, frozen=True):
    """One collective over the ranks. starts_us, took_us, waits_us: by rank, in the order of `ranks`.

    starts_us: on the common clock, from the first rank's window on. took_us: the wait included. lead_us:
    between the last rank's arrival and the one before it. transfer_us: from the last arrival to its end, by
    the last rank's clock. bus_gb_s: None where the message's size or the kind's factor is not known.
    """

    group: str
    kind: str
    step: str
    bytes: int | None
    size: int
    ranks: tuple[int, ...]
    starts_us: tuple[float, ...]
    took_us: tuple[float, ...]
    waits_us: tuple[float, ...]
    last: int
    lead_us: float
    transfer_us: float
    bus_gb_s: float | None


class KindTimes(msgspec.Struct, frozen=True):
    """Matched collectives of one kind and message size: medians; longest_wait_us is of the rank that waited longest."""

    kind: str
    bytes: int | None
    size: int
    count: int
    longest_wait_us: float
    transfer_us: float
    bus_gb_s: float | None
    of_best: float | None  # of the best bus bandwidth of any collective here


class Clocks(msgspec.Struct, frozen=True):
    """How the ranks' stamps were set against each other.

    ahead_us: by rank, what was taken off its stamps; all zero on one host. apart_us: how far apart the ends of
    one collective still lie in nine of ten (of kinds that all ranks leave together): closer arrivals cannot be
    told apart. None without such collectives. not_aligned: ranks of hosts that share no collective with the
    first's; theirs are matched with nobody's. hosts: none where the traces do not name theirs.
    """

    hosts: tuple[str, ...]
    aligned: bool
    ahead_us: dict[int, float]
    apart_us: float | None
    not_aligned: tuple[int, ...]


class RanksSummary(msgspec.Struct, frozen=True):
    """Everything measured of several traces of one run.

    unmatched: collectives of a rank that some member of their group, read too, does not have.
    """

    world_size: int
    device: str
    on_gpu: bool
    ranks: tuple[RankFigures, ...]
    missing: tuple[int, ...]
    not_read: dict[str, str]  # by path, why
    steps: tuple[str, ...]  # that all ranks have
    other_steps: dict[int, tuple[str, ...]]  # that a rank has and another has not
    matched: tuple[Collective, ...]
    unmatched: int
    unnamed: int
    kinds: tuple[KindTimes, ...]
    best_gb_s: float | None
    clocks: Clocks


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
    """Of exposed communication, what lies before the launch of the next kernel that computes."""
    kernels = (one for step in steps for one in step.work if one.kind == "kernel" and one.launch)
    computing = sorted((one.start, one.launch.start) for one in kernels if not is_communication(one))
    starts = [start for start, _ in computing]
    found = []
    for left, right in exposed:
        following = bisect.bisect_left(starts, right)
        launched = computing[following][1] if following < len(computing) else left
        if launched > left:
            found.append((left, min(right, launched)))
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


def joined(ranks: Sequence[RankTrace], not_read: dict[str, str] | None = None) -> RanksSummary:
    """The ranks of one run set against each other. not_read: by path, why one could not be.

    What is not of the same run is left out, and said: another world size, a rank that is there already, a
    recording at another time.
    """
    ranks, not_read = _of_one_run(ranks, dict(not_read or {}))
    names = [[step.name for step in one.steps] for one in ranks]
    common = [name for name in names[0] if all(name in some for some in names)]
    found, unmatched = _matched(ranks)
    clocks, shift = _clocks(ranks, found)
    found = [{rank: part for rank, part in parts.items() if rank not in clocks.not_aligned} for parts in found]
    found = [parts for parts in found if len(parts) > 1]
    origin = min(one.start - shift[one.rank] for one in ranks)
    matched = [_collective(parts, shift, origin) for parts in found]
    rates = [one.bus_gb_s for one in matched if one.bus_gb_s is not None]
    best = max(rates, default=None)
    return RanksSummary(
        world_size=ranks[0].world_size,
        device=", ".join(dict.fromkeys(one.device for one in ranks)),
        on_gpu=any(one.on_gpu for one in ranks),
        ranks=tuple(_figures(one, found, matched, shift) for one in ranks),
        missing=_missing(ranks),
        not_read=not_read,
        steps=tuple(common),
        other_steps={
            one.rank: tuple(name for name in some if name not in common)
            for one, some in zip(ranks, names, strict=True)
            if len(some) > len(common)
        },
        matched=tuple(matched),
        unmatched=unmatched,
        unnamed=sum(one.unnamed for one in ranks),
        kinds=_kinds(matched, best),
        best_gb_s=best,
        clocks=clocks,
    )


def _missing(ranks: Sequence[RankTrace]) -> tuple[int, ...]:
    """At most a thousand: a file may name any world size."""
    present = {one.rank for one in ranks}
    return tuple(rank for rank in range(min(ranks[0].world_size, len(ranks) + 1000)) if rank not in present)


def _of_one_run(ranks: Sequence[RankTrace], not_read: dict[str, str]) -> tuple[list[RankTrace], dict[str, str]]:
    size, _ = Counter(one.world_size for one in ranks).most_common(1)[0]
    kept: list[RankTrace] = []
    for one in ranks:
        if one.world_size != size:
            not_read[one.path] = f"of another run: rank {one.rank} of {one.world_size}, the others are of {size}"
    # What was not recorded at one time is not one run.
    rest = [one for one in ranks if one.path not in not_read]
    clusters: list[list[RankTrace]] = []
    for one in sorted(rest, key=_start):
        near = [some for some in clusters if any(_at_one_time(one, other) for other in some)]
        if near:
            near[0].append(one)
        else:
            clusters.append([one])
    largest = max(clusters, key=len)
    for one in rest:
        if one not in largest:
            apart = min(abs(one.start - other.start) for other in largest) / 1e9
            not_read[one.path] = f"of another run: rank {one.rank} was recorded {apart:,.1f} s apart from the others"
    for one in sorted(largest, key=lambda one: one.rank):
        there = next((other for other in kept if other.rank == one.rank), None)
        if there:
            not_read[one.path] = f"rank {one.rank} a second time: {there.path} is read"
        else:
            kept.append(one)
    return kept, not_read


def _at_one_time(one: RankTrace, other: RankTrace) -> bool:
    """By stamps of one clock, or of two hosts whose clocks somebody has set."""
    off = CLOCKS_OFF if None not in (one.host, other.host) and one.host != other.host else 0
    return one.start < other.end + off and other.start < one.end + off


def _matched(ranks: Sequence[RankTrace]) -> tuple[list[dict[int, Part]], int]:
    """By collective, each rank's part in it; and how many parts lack a counterpart.

    By the sequence numbers that newer traces hold; else by their order within a step of one name, where all
    ranks have the same kinds and sizes in the same order: one that is missing would shift all others.
    """
    groups: dict[str, dict[int, list[Part]]] = defaultdict(dict)
    for one in ranks:
        for part in sorted(one.parts, key=_start):
            groups[part.group].setdefault(one.rank, []).append(part)
    present = {one.rank for one in ranks}
    found, unmatched = [], 0
    for by_rank in groups.values():
        some = next(iter(by_rank.values()))[0]
        members = [rank for rank in some.members if rank in present] or sorted(by_rank)
        if len(members) < 2:
            continue  # the others of its group were not read: said of them already
        in_sequence = all(part.seq is not None for parts in by_rank.values() for part in parts)
        keyed = {rank: _keyed(parts, in_sequence) for rank, parts in by_rank.items()}
        for key in dict.fromkeys(key for some in keyed.values() for key in some):
            parts = [keyed.get(rank, {}).get(key) for rank in members]
            if None in parts or len({tuple(one.kind for one in some) for some in parts}) > 1 or _sizes_differ(parts):
                unmatched += sum(len(some or ()) for some in parts)
                continue
            for same in zip(*parts, strict=True):
                found.append(dict(zip(members, same, strict=True)))
    return sorted(found, key=lambda parts: min(part.start for part in parts.values())), unmatched


def _keyed(parts: Sequence[Part], in_sequence: bool) -> dict[tuple, list[Part]]:
    keyed: dict[tuple, list[Part]] = {}
    for part in parts:
        keyed.setdefault((part.kind, part.seq) if in_sequence else (part.step,), []).append(part)
    return keyed


def _sizes_differ(parts: Sequence[Sequence[Part]]) -> bool:
    """An all-to-all may take another size on each rank, and a broadcast counts its root's only."""
    alike = ("all-reduce", "all-gather", "reduce-scatter")
    return len({tuple(one.bytes for one in some if one.kind in alike) for some in parts}) > 1


def _clocks(ranks: Sequence[RankTrace], found: Sequence[dict[int, Part]]) -> tuple[Clocks, dict[int, int]]:
    """What to take off each rank's stamps (ns), by the ends of the collectives that hosts have in common."""
    together = [parts for parts in found if next(iter(parts.values())).kind in LEFT_TOGETHER]
    host = {one.rank: one.host for one in ranks}
    if None in host.values() and _of_two_clocks(together, all(one.on_gpu for one in ranks)):
        host = {one.rank: f"rank {one.rank}'s" for one in ranks}  # it does not tell, and cannot be one clock
    hosts = list(dict.fromkeys(host.values()))
    ahead = {hosts[0]: 0}
    waiting = hosts[1:]
    while waiting:
        # The host with the most collectives in common with those that are set already.
        apart: dict[str, list[int]] = defaultdict(list)
        for parts in together:
            ends = [part.end - ahead[host[rank]] for rank, part in parts.items() if host[rank] in ahead]
            for rank, part in parts.items():
                if ends and host[rank] not in ahead:
                    apart[host[rank]].append(part.end - round(median(ends)))
        if not apart:
            break
        name = max(apart, key=lambda name: len(apart[name]))
        ahead[name] = round(median(apart[name]))
        waiting.remove(name)
    shift = {rank: ahead.get(name, 0) for rank, name in host.items()}
    spread = sorted(
        max(ends) - min(ends)
        for parts in together
        for ends in ([part.end - shift[rank] for rank, part in parts.items() if host[rank] in ahead],)
        if len(ends) > 1
    )
    clocks = Clocks(
        hosts=tuple(dict.fromkeys(one.host for one in ranks if one.host is not None)),
        aligned=any(ahead.values()),
        ahead_us={rank: ns / 1e3 for rank, ns in shift.items()},
        apart_us=spread[len(spread) * 9 // 10] / 1e3 if spread else None,
        not_aligned=tuple(rank for rank, name in host.items() if name not in ahead),
    )
    return clocks, shift


def _of_two_clocks(together: Sequence[dict[int, Part]], on_gpu: bool) -> bool:
    """Whether the stamps themselves show that they are not of one clock.

    In most collectives a rank is done before another begins; or, on GPUs, where all leave one together, a
    rank's ends are off by far more than on one host.
    """
    impossible = sum(min(part.end for part in parts.values()) < max(map(_start, parts.values())) for parts in together)
    if impossible > len(together) / 2:
        return True
    off: dict[int, list[int]] = defaultdict(list)
    for parts in together if on_gpu else ():
        middle = median(part.end for part in parts.values())
        for rank, part in parts.items():
            off[rank].append(part.end - middle)
    return any(abs(median(some)) > FAR_APART for some in off.values())


def _collective(parts: dict[int, Part], shift: dict[int, int], origin: int) -> Collective:
    arrived = {rank: part.start - shift[rank] for rank, part in parts.items()}
    *_, before, last = sorted(arrived, key=arrived.get)
    some = parts[last]
    size, transfer = some.bytes, some.end - some.start
    factor = BUS_FACTOR.get(some.kind)
    return Collective(
        group=some.group,
        kind=some.kind,
        step=some.step,
        bytes=size,
        size=some.size,
        ranks=tuple(parts),
        starts_us=tuple((arrived[rank] - origin) / 1e3 for rank in parts),
        took_us=tuple((part.end - part.start) / 1e3 for part in parts.values()),
        waits_us=tuple((_waited(parts[rank], arrived[last] + shift[rank])) / 1e3 for rank in parts),
        last=last,
        lead_us=(arrived[last] - arrived[before]) / 1e3,
        transfer_us=transfer / 1e3,
        bus_gb_s=size / transfer * factor(some.size) if size and transfer and factor and some.size > 1 else None,
    )


def _waited(part: Part, last: int) -> int:
    """How long a part waited for the last arrival, by its own clock."""
    return max(0, min(last, part.end) - part.start)


def _figures(
    one: RankTrace, found: Sequence[dict[int, Part]], matched: Sequence[Collective], shift: dict[int, int]
) -> RankFigures:
    waits, mine, caused, last = [], [], 0.0, 0
    for parts, collective in zip(found, matched, strict=True):
        if one.rank not in parts:
            continue
        mine.append((parts[one.rank].start, parts[one.rank].end))
        if collective.last == one.rank:
            last += 1
            caused += sum(collective.waits_us)
            continue
        part, arrival = parts[one.rank], parts[collective.last].start - shift[collective.last] + shift[one.rank]
        waits.append((part.start, part.start + _waited(part, arrival)))
    exposed = list(one.exposed)
    waiting = union(span for span in waits if span[1] > span[0])
    ends: dict[str, Part] = {}
    for part in one.parts:
        if part.step not in ends or part.end > ends[part.step].end:
            ends[part.step] = part
    in_last = union((part.start, part.end) for part in ends.values())
    beside = Lengths(exposed)
    total = one.total
    return RankFigures(
        rank=one.rank,
        trace=one.path,
        host=one.host,
        window_us=total.us,
        compute_us=total.compute_us,
        communication_us=total.communication_us,
        exposed_communication_us=total.exposed_communication_us,
        exposed_copy_us=total.exposed_copy_us,
        idle_us=total.idle_us,
        idle_not_launched_us=total.idle_not_launched_us,
        waited_for_others_us=sum(right - left for left, right in waits) / 1e3,
        waiting_us=length(waiting) / 1e3,
        waited_exposed_us=length(both(waiting, exposed)) / 1e3,
        together_exposed_us=length(both(minus(union(mine), waiting), exposed)) / 1e3,
        exposed_in_last_us=length(both(minus(in_last, waiting), exposed)) / 1e3,
        late_us=length(one.late) / 1e3,
        collectives=len(one.parts),
        hidden=sum(2 * beside.between(part.start, part.end) <= part.end - part.start for part in one.parts),
        arrived_last=last,
        others_waited_us=caused,
        steps=one.steps,
    )


def _kinds(matched: Sequence[Collective], best: float | None) -> tuple[KindTimes, ...]:
    same: dict[tuple, list[Collective]] = defaultdict(list)
    for one in matched:
        same[one.kind, one.bytes, one.size].append(one)
    found = []
    for (kind, size, ranks), some in same.items():
        rates = [one.bus_gb_s for one in some if one.bus_gb_s is not None]
        rate = median(rates) if rates else None
        found.append(
            KindTimes(
                kind=kind,
                bytes=size,
                size=ranks,
                count=len(some),
                longest_wait_us=median(max(one.waits_us) for one in some),
                transfer_us=median(one.transfer_us for one in some),
                bus_gb_s=rate,
                of_best=rate / best if rate and best else None,
            )
        )
    return tuple(sorted(found, key=lambda one: -one.count * (one.transfer_us + one.longest_wait_us)))
