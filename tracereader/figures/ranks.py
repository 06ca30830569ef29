"""Several traces of one run: the times of its ranks, and their matched collectives."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from operator import attrgetter
from statistics import median

import msgspec

from tracereader.figures.intervals import Lengths, both, length, minus, union
from tracereader.figures.rank import Part, RankStep, RankTrace

# Bytes on the bus per byte of the message: NCCL's definition (nccl-tests, doc/PERFORMANCE.md), for n ranks.
BUS_FACTOR = {
    "all-reduce": lambda n: 2 * (n - 1) / n, "all-gather": lambda n: (n - 1) / n,
    "reduce-scatter": lambda n: (n - 1) / n, "all-to-all": lambda n: (n - 1) / n,
    "broadcast": lambda n: 1.0, "reduce": lambda n: 1.0,
}  # fmt: skip
# All ranks leave these at nearly one time, so that clocks can be set by them.
LEFT_TOGETHER = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "barrier")
# ns: on two H200s of one host the ends of one collective lie 24 µs apart at most.
FAR_APART = 100_000
# ns: clocks of two hosts that are farther apart than this are taken for two runs.
CLOCKS_OFF = 60 * 10**9
_start = attrgetter("start")


class RankFigures(msgspec.Struct, frozen=True):
    """One rank beside the others. Times in µs, over its window.

    waited_for_others_us: in matched collectives, from its own start to that of the last rank to arrive, summed;
    waiting_us: the same, counted once where several wait at a time. waited_exposed_us, together_exposed_us:
    exposed in these until then, and after. others_waited_us: the waits
    of all others together, where this rank was last. exposed_in_last_us: in the last collective of each step,
    not counting the wait. late_us: the part of its exposed communication before the launch of its next kernel.
    hidden: collectives that overlap with compute for at least half of their time.
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
    """How the ranks' time stamps were aligned.

    ahead_us: by rank, what was taken off its stamps; all zero on one host. apart_us: how far apart the ends of
    one collective still lie in nine of ten (of kinds that all ranks leave together): closer arrivals cannot be
    distinguished. None without such collectives. not_aligned: ranks of hosts that share no collective with the
    first's; their collectives are not matched. hosts: empty where the traces do not name them.
    """

    hosts: tuple[str, ...]
    aligned: bool
    ahead_us: dict[int, float]
    apart_us: float | None
    not_aligned: tuple[int, ...]


class RanksSummary(msgspec.Struct, frozen=True):
    """Everything measured of several traces of one run.

    unmatched: collectives of a rank that some member of their group, read too, does not have. origin_ns: when the
    common clock starts, in ns since 1970.
    """

    world_size: int
    origin_ns: int
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


def joined(ranks: Sequence[RankTrace], not_read: dict[str, str] | None = None) -> RanksSummary:
    """The ranks of one run, compared. not_read: by path, why a trace could not be read.

    Traces of other runs are left out, with the reason: another world size, a rank that is already there, or a
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
        origin_ns=origin,
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
            not_read[one.path] = (
                f"from another run: rank {one.rank} of {one.world_size}, but the others have {size} ranks"
            )
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
            not_read[one.path] = (
                f"from another run: rank {one.rank} was recorded {apart:,.1f} s earlier or later than the others"
            )
    for one in sorted(largest, key=lambda one: one.rank):
        there = next((other for other in kept if other.rank == one.rank), None)
        if there:
            not_read[one.path] = f"another trace of rank {one.rank}: {there.path} is read instead"
        else:
            kept.append(one)
    return kept, not_read


def _at_one_time(one: RankTrace, other: RankTrace) -> bool:
    """By stamps of one clock, or of two hosts whose clocks are synchronized."""
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
        host = {one.rank: f"rank {one.rank}'s" for one in ranks}  # not recorded: not one clock
    hosts = list(dict.fromkeys(host.values()))
    ahead = {hosts[0]: 0}
    while len(ahead) < len(hosts):
        # The hosts with the most collectives in common with those that are set already, which mostly is all at
        # once: each round goes through every collective of every rank.
        apart: dict[str, list[int]] = defaultdict(list)
        for parts in together:
            ends = [part.end - ahead[host[rank]] for rank, part in parts.items() if host[rank] in ahead]
            for rank, part in parts.items():
                if ends and host[rank] not in ahead:
                    apart[host[rank]].append(part.end - round(median(ends)))
        if not apart:
            break
        most = max(map(len, apart.values()))
        ahead |= {name: round(median(some)) for name, some in apart.items() if len(some) == most}
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
    """Whether the time stamps show that they come from different clocks.

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
