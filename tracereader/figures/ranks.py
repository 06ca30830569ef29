"""The figures of several ranks of one run: their times, and their matched collectives."""

from array import array
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import median, median_high
from typing import NamedTuple

import msgspec

from tracereader.figures.rank import Call, Group, NotRead, Part, RankStep, RankTrace, Times, hidden, summed
from tracereader.figures.regime import Regime
from tracereader.trace import start_of
from tracereader.trace.grouped import grouped, totals
from tracereader.trace.intervals import Intervals, Lengths, both, length, minus, union

# Bytes on the bus per byte of the message: NCCL's definition (nccl-tests, doc/PERFORMANCE.md), for n ranks.
BUS_FACTOR = {
    "all-reduce": lambda n: 2 * (n - 1) / n, "all-gather": lambda n: (n - 1) / n,
    "reduce-scatter": lambda n: (n - 1) / n, "all-to-all": lambda n: (n - 1) / n,
    "broadcast": lambda n: 1.0, "reduce": lambda n: 1.0, "send": lambda n: 1.0,
}  # fmt: skip
# All ranks leave these collectives at nearly the same time, so they serve to align the clocks.
LEFT_TOGETHER = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "barrier")
# In an all-to-all and in a broadcast the size may differ between the ranks.
SAME_SIZE = ("all-reduce", "all-gather", "reduce-scatter", "send")
# ns: on two H200s of one host the ends of one collective are at most 24 µs apart.
FAR_APART = 100_000
# ns: if the clocks of two hosts are farther apart than this, the traces count as two runs.
CLOCKS_OFF = 60 * 10**9
LATE = 0.5  # the share of the longest waiting rank's time below which a rank of a process group counts as late


class MessageWaits(msgspec.Struct, frozen=True):
    """The exposed waits of one rank for the peers of its sends and receives, in µs over all steps.

    A wait lasts until the peer starts its side of the message. exposed_us: the exposed time in matched messages, with
    these waits. us: the waits. first_us, last_us: the parts in the first and the last receive of each step; a step's
    only receive counts as its first. messages: the number of matched ones. first_sends: the number of steps whose first
    matched message this rank sends.
    """

    exposed_us: float
    us: float
    first_us: float
    last_us: float
    messages: int
    first_sends: int


class RankFigures(msgspec.Struct, frozen=True):
    """The figures of one rank, compared with the others. Times in µs.

    total: the times of the rank's window.
    waited_for_others_us: the sum of the waits in matched collectives. A wait lasts from this rank's start to that
    of the last rank to arrive.
    waiting_us: the same, but waits that overlap are counted once.
    waited_exposed_us: the exposed part of the waits. together_exposed_us: the exposed time after the last rank arrived.
    exposed_in_last_us: the exposed time in the last collective of each step, without the wait.
    hidden: the number of collectives that overlap with compute for at least half of their time.
    others_waited_us: the sum of the other ranks' waits in collectives in which this rank was last.
    kernels: the number of kernels in the steps, without communication.
    launches: the number of calls in the steps that launch GPU work.
    between_launches_us: the CPU's mean time from a launch to the next one, without pauses; None without launches.
    """

    rank: int
    trace: str
    host: str | None
    total: Times
    waited_for_others_us: float
    waiting_us: float
    waited_exposed_us: float
    together_exposed_us: float
    exposed_in_last_us: float
    collectives: int
    hidden: int
    arrived_last: int
    others_waited_us: float
    unprofiled_step_us: float | None
    steps: tuple[RankStep, ...]
    message_waits: MessageWaits
    regime: Regime | None
    kernels: int
    launches: int
    between_launches_us: float | None


# What a RankTrace has under the same names.
KEPT = [name for name in RankFigures.__struct_fields__ if name in RankTrace.__struct_fields__]


class Collective(msgspec.Struct, frozen=True):
    """One collective over the ranks, or one message (kind "send") from the first to the second of `ranks`.

    starts_us, took_us, waits_us: in the order of `ranks`.
    starts_us: on the common clock, counted from the earliest window's start. took_us: includes the wait.
    lead_us: the time between the arrivals of the last rank and of the one before it. transfer_us: from the last rank's
    arrival to its end, by its clock. bus_gb_s: None if the message's size or the kind's factor is not known.
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


class GroupTimes(msgspec.Struct, frozen=True):
    """The matched collectives of one process group. Times in µs, summed over all its collectives.

    description: torch's or the program's name for the group's purpose; "" if none is recorded.
    waited_us: the waits of all ranks. last: the rank that caused most of the waiting. for_last_us: the waiting that it
    caused. times_last: the number of collectives in which it was last. late: the ranks that wait less than LATE of the
    time that the longest waiting rank waits; empty if the ranks take turns.
    """

    description: str
    ranks: tuple[int, ...]
    size: int
    collectives: int
    waited_us: float
    last: int
    times_last: int
    for_last_us: float
    transfer_us: float
    late: tuple[int, ...]


class PairTimes(msgspec.Struct, frozen=True):
    """The matched messages from one rank to another. Times in µs, summed over all of them.

    description: of the process group, "" if none is recorded. places: both ranks' places in the group, which are the
    stages of a pipeline; None if its members are not known. bytes: the median message's; None if not recorded.
    receiver_waited_us, sender_waited_us: each one's exposed waits for the other. transfer_us: after both have started.
    """

    description: str
    source: int
    destination: int
    places: tuple[int, int] | None
    messages: int
    bytes: int | None
    receiver_waited_us: float
    sender_waited_us: float
    transfer_us: float


class KindTimes(msgspec.Struct, frozen=True):
    """Medians over the matched collectives of one kind and size. longest_wait_us: of the rank that waits longest."""

    kind: str
    bytes: int | None
    size: int
    count: int
    longest_wait_us: float
    transfer_us: float
    bus_gb_s: float | None
    of_best: float | None  # as a share of the best bus bandwidth of any collective in these traces


class Clocks(msgspec.Struct, frozen=True):
    """How the ranks' time stamps were aligned.

    ahead_us: by rank, the time subtracted from its stamps; all zero on one host.
    apart_us: the distance that nine of ten collectives' ends do not exceed after that, over the kinds that all ranks
    leave together. Closer arrivals cannot be distinguished. None without such collectives.
    lead_us: the median time between the last arrival in a collective and the arrival before it.
    not_aligned: the ranks of hosts that share no collective with the first host and exchange no messages with it in
    both directions. Their collectives are not matched.
    by_messages_us: how exactly messages align the hosts that share no collective; None if there are no such hosts.
    hosts: empty if the traces do not name them.
    """

    hosts: tuple[str, ...]
    aligned: bool
    ahead_us: dict[int, float]
    apart_us: float | None
    lead_us: float | None
    not_aligned: tuple[int, ...]
    by_messages_us: float | None = None


class RanksSummary(msgspec.Struct, frozen=True):
    """All measurements of several traces of one run.

    messages: the matched sends and receives, in the order of their starts.
    unmatched: the number of ranks' parts in collectives that have no counterpart on another rank of their group.
    unmatched_messages: the number of sends without their receive, and of receives without their send, where both ranks
    were read.
    unnamed: the number of communication kernels that the traces do not describe.
    origin_ns: the start of the common clock, in ns since 1970.
    """

    world_size: int
    origin_ns: int
    device: str
    on_gpu: bool
    ranks: tuple[RankFigures, ...]
    missing: tuple[int, ...]
    not_read: dict[str, NotRead]  # by path
    steps: tuple[str, ...]  # those of all ranks
    other_steps: dict[int, tuple[str, ...]]  # by rank, the steps that not all other ranks have
    matched: tuple[Collective, ...]
    unmatched: int
    unnamed: int
    groups: tuple[GroupTimes, ...]  # those with the most waiting first
    kinds: tuple[KindTimes, ...]
    clocks: Clocks
    messages: tuple[Collective, ...]
    unmatched_messages: int
    pairs: tuple[PairTimes, ...]  # those with the most waiting first


def joined(ranks: Sequence[RankTrace], not_read: dict[str, NotRead] | None = None) -> RanksSummary:
    """Return the summary of the ranks of one run. not_read: by path, why a trace could not be read.

    A trace is left out, with the reason, if its world size differs, if it is the second trace of a rank, if it was
    recorded at another time, or if it lacks the step that most others have. Of the others, only common steps count.
    """
    ranks, not_read = _of_one_run(ranks, dict(not_read or {}))
    ranks, not_read = _with_a_common_step(ranks, not_read)
    names = [[step.name for step in one.steps] for one in ranks]
    common = [name for name in names[0] if all(name in some for some in names)]
    if common:
        ranks = [_in_steps(one, common) for one in ranks]
    met, unmatched = _met(ranks)
    sent, unmatched_messages = _sent(ranks)
    clocks, shift = _clocks(ranks, met, sent)
    met, sent = (_without(some, set(clocks.not_aligned)) for some in (met, sent))
    sent.sort(key=lambda one: min(part.start - shift[rank] for rank, part in zip(one.ranks, one.parts, strict=True)))
    origin = min(one.start - shift[one.rank] for one in ranks)
    waits, apart = ({one.rank: _Waits() for one in ranks} for _ in range(2))
    matched, messages = _collectives(met, shift, origin, waits), _collectives(sent, shift, origin, apart)
    leads = [one.lead_us for one in matched]
    pairs = _pairs(sent, messages, {one.rank: Lengths(_exposed(one)) for one in ranks} if sent else {})
    clocks = msgspec.structs.replace(clocks, lead_us=median(leads) if leads else None)
    return RanksSummary(
        world_size=ranks[0].world_size,
        origin_ns=origin,
        device=", ".join(dict.fromkeys(one.device for one in ranks)),
        on_gpu=any(one.on_gpu for one in ranks),
        ranks=tuple(_figures(one, waits[one.rank], apart[one.rank]) for one in ranks),
        # At most a thousand, because a file may name any world size.
        missing=tuple(rank for rank in range(min(ranks[0].world_size, len(ranks) + 1000)) if rank not in shift),
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
        groups=tuple(sorted(_groups(met, matched), key=lambda one: -one.waited_us)),
        kinds=_kinds(matched),
        clocks=clocks,
        messages=tuple(messages),
        unmatched_messages=unmatched_messages,
        pairs=tuple(sorted(pairs, key=lambda one: -max(one.receiver_waited_us, one.sender_waited_us))),
    )


def _of_one_run(ranks: Sequence[RankTrace], not_read: dict[str, NotRead]) -> tuple[list[RankTrace], dict[str, NotRead]]:
    size, _ = Counter(one.world_size for one in ranks).most_common(1)[0]
    kept: list[RankTrace] = []
    rest = [one for one in ranks if one.world_size == size]
    others = (one for one in ranks if one.world_size != size)
    not_read |= {one.path: NotRead("other_world_size", "", one.rank, one.world_size, size) for one in others}
    # Traces recorded at different times are of different runs.
    clusters: list[list[RankTrace]] = []
    for one in sorted(rest, key=start_of):
        near = (some for some in clusters if any(_at_one_time(one, other) for other in some))
        if (some := next(near, None)) is None:
            clusters.append(some := [])
        some.append(one)
    largest = max(clusters, key=len)
    of_largest = {id(one) for one in largest}
    for one in rest:
        if id(one) not in of_largest:
            apart = min(abs(one.start - other.start) for other in largest) / 1e9
            not_read[one.path] = NotRead("other_time", rank=one.rank, seconds=apart)
    for one in sorted(largest, key=lambda one: one.rank):
        if kept and kept[-1].rank == one.rank:
            not_read[one.path] = NotRead("same_rank", kept[-1].path, rank=one.rank)
        else:
            kept.append(one)
    return kept, not_read


def _with_a_common_step(
    ranks: list[RankTrace], not_read: dict[str, NotRead]
) -> tuple[list[RankTrace], dict[str, NotRead]]:
    """Leave out the ranks without the step that most ranks have, if no step is common to all of them."""
    having = Counter(step.name for one in ranks for step in one.steps)
    name, most = max(having.items(), key=lambda item: item[1], default=("", 0))
    if not len(ranks) > most > len(ranks) / 2:
        return ranks, not_read
    parted = grouped((any(step.name == name for step in one.steps), one) for one in ranks)
    return parted[True], not_read | {one.path: NotRead("no_common_step", name, one.rank) for one in parted[False]}


def _in_steps(one: RankTrace, names: Sequence[str]) -> RankTrace:
    """Return a rank with only these of its steps, which all ranks have. Its kernels are divided equally."""
    steps = tuple(step for step in one.steps if step.name in names)
    if len(steps) == len(one.steps):
        return one
    parts, messages = (
        tuple(part for part in some if one.calls[part.call].step in names) for some in (one.parts, one.messages)
    )
    return msgspec.structs.replace(
        one,
        total=summed("", steps),
        steps=steps,
        parts=parts,
        messages=messages,
        hidden=hidden(parts, _exposed(one)),
        kernels=one.kernels * len(steps) // len(one.steps),
    )


def _at_one_time(one: RankTrace, other: RankTrace) -> bool:
    """Return whether two recordings overlap, with a tolerance of CLOCKS_OFF between two hosts."""
    off = CLOCKS_OFF if None not in (one.host, other.host) and one.host != other.host else 0
    return one.start < other.end + off and other.start < one.end + off


class _Met(NamedTuple):
    """A collective that was found on all its ranks. parts: in the order of `ranks`."""

    group: Group
    call: Call
    ranks: tuple[int, ...]
    parts: tuple[Part, ...]


class _Parts(NamedTuple):
    """One rank's parts in the collectives of one group, by their starts."""

    calls: Sequence[Call]
    parts: list[Part]


def _largest(sides: Sequence[_Parts], row: Sequence[Part]) -> Call:
    """Return the call of the first rank; of an all-to-all, that of the rank with most bytes."""
    first = sides[0].calls[row[0].call]
    if first.kind != "all-to-all":
        return first
    return max((one.calls[part.call] for one, part in zip(sides, row, strict=True)), key=lambda one: one.bytes or 0)


def _met(ranks: Sequence[RankTrace]) -> tuple[list[_Met], int]:
    """Return the collectives in the order of their starts, and the number of parts without a counterpart.

    They are matched by the sequence numbers of newer traces. Without these, they are matched by their order within a
    step, if all ranks have the same kinds and sizes in the same order, because a missing one would shift all others.
    """
    groups: dict[str, dict[int, _Parts]] = {}
    for one in ranks:
        mine = [groups.setdefault(group.name, {}).setdefault(one.rank, _Parts(one.calls, [])) for group in one.groups]
        of_call = [mine[call.group].parts for call in one.calls]
        for part in one.parts:
            of_call[part.call].append(part)
    by_rank = {one.rank: one for one in ranks}
    found, unmatched = [], 0
    for name, parts in groups.items():
        group = next(one for one in by_rank[next(iter(parts))].groups if one.name == name)
        members = tuple(rank for rank in group.members if rank in by_rank) or tuple(sorted(parts))
        if len(members) < 2:
            continue  # the other ranks of the group were not read, and the report already says so
        if len(members) > group.size:  # several groups have this name, and the traces do not list their ranks
            unmatched += sum(len(one.parts) for one in parts.values())
            continue
        sides = [parts.get(rank, _Parts((), [])) for rank in members]
        rows, alone = _rows(sides)
        found += [_Met(group, _largest(sides, row), members, row) for row in rows]
        unmatched += alone
    return sorted(found, key=lambda one: min(part.start for part in one.parts)), unmatched


def _sent(ranks: Sequence[RankTrace]) -> tuple[list[_Met], int]:
    """Return the messages by pair, and the number of parts without the other rank's part.

    NCCL delivers the messages of one pair in the order in which they are sent, and gloo those of one tag.
    """
    pairs: dict[tuple, dict[int, list[Part]]] = {}
    for one in ranks:
        of_call = [
            pairs.setdefault((one.groups[call.group].name, call.pair), {}).setdefault(one.rank, [])
            if call.pair is not None else None
            for call in one.calls
        ]  # fmt: skip
        for part in one.messages:
            of_call[part.call].append(part)
    by_rank = {one.rank: one for one in ranks}
    found, unmatched = [], 0
    for (name, pair), parts in pairs.items():
        if not all(rank in by_rank for rank in pair):
            continue  # the peer was not read, and the report already says so
        source = by_rank[pair[0]]
        for sides in _by_tag([_Parts(by_rank[rank].calls, parts.get(rank, [])) for rank in pair]):
            rows, alone = _rows(sides)
            unmatched += alone
            if rows:
                group = next(one for one in source.groups if one.name == name)
                found += [_Met(group, source.calls[row[0].call], pair, row) for row in rows]
    return found, unmatched


def _by_tag(sides: Sequence[_Parts]) -> list[Sequence[_Parts]]:
    """Return both sides of the messages of each tag; of all messages if a tag is not known."""
    tags = dict.fromkeys(calls[part.call].tag for calls, parts in sides for part in parts)
    if len(tags) < 2 or None in tags:
        return [sides]
    return [
        [_Parts(calls, [part for part in parts if calls[part.call].tag == tag]) for calls, parts in sides]
        for tag in tags
    ]


def _rows(ranks: Sequence[_Parts]) -> tuple[list[tuple[Part, ...]], int]:
    """Return a group's collectives as the parts of all ranks, and the number of parts without a counterpart."""
    in_sequence = all(part.seq is not None for one in ranks for part in one.parts)
    keys, alike = [], True
    for one in ranks:
        what = [(call.kind, call.bytes if call.kind in SAME_SIZE else None) for call in one.calls]
        where = [call.kind if in_sequence else call.step for call in one.calls]
        of_call = list(zip(where, what, strict=True))
        keys.append([(of_call[part.call], part.seq if in_sequence else None) for part in one.parts])
        alike = alike and keys[-1] == keys[0]
        if alike:
            keys[-1] = keys[0]  # all ranks share one list, because there may be a thousand ranks
    if alike:
        return list(zip(*(one.parts for one in ranks), strict=True)), 0
    found, alone = [], 0
    by_key = [
        grouped(((where, seq), (what, part)) for ((where, what), seq), part in zip(told, one.parts, strict=True))
        for one, told in zip(ranks, keys, strict=True)
    ]
    for key in dict.fromkeys(key for mine in by_key for key in mine):
        some = [mine.get(key) for mine in by_key]
        if None in some or len({tuple(what for what, _ in parts) for parts in some}) > 1:
            alone += sum(len(parts or ()) for parts in some)
            continue
        found += zip(*([part for _, part in parts] for parts in some), strict=True)
    return found, alone


def _without(met: Sequence[_Met], ranks: set[int]) -> list[_Met]:
    """Return the collectives without these ranks. A collective with fewer than two ranks left is dropped."""
    found = []
    for one in met if ranks else ():
        kept = [at for at, rank in enumerate(one.ranks) if rank not in ranks]
        if len(kept) > 1:
            there, parts = (tuple(some[at] for at in kept) for some in (one.ranks, one.parts))
            found.append(one._replace(ranks=there, parts=parts))
    return found if ranks else list(met)


def _clocks(ranks: Sequence[RankTrace], met: Sequence[_Met], sent: Sequence[_Met]) -> tuple[Clocks, dict[int, int]]:
    """Return the clocks, and the ns to subtract from each rank's stamps.

    The ends of common collectives decide. Hosts without any are aligned by their messages.
    """
    common = [one for one in met if one.call.kind in LEFT_TOGETHER]
    together = grouped((one.ranks, one) for one in common)
    host = {one.rank: one.host for one in ranks}
    if None in host.values() and _of_two_clocks(common, all(one.on_gpu for one in ranks)):
        host = {one.rank: f"rank {one.rank}'s" for one in ranks}  # no host is recorded
    ahead, by_messages, spread = _aligned(host, together, sent)
    if spread and _high(spread) > FAR_APART and all(one.on_gpu for one in ranks):
        # Ranks with one host's name may be in containers of one name, or their profilers' clocks may differ.
        for name in set(host.values()):
            if _of_two_clocks(_without(common, {rank for rank, its in host.items() if its != name}), True):
                host |= {rank: f"rank {rank}'s" for rank, its in host.items() if its == name}
        ahead, by_messages, spread = _aligned(host, together, sent)
    shift = {rank: ahead.get(name, 0) for rank, name in host.items()}
    clocks = Clocks(
        hosts=tuple(dict.fromkeys(one.host for one in ranks if one.host is not None)),
        aligned=any(ahead.values()),
        ahead_us={rank: ns / 1e3 for rank, ns in shift.items()},
        apart_us=_high(spread) / 1e3 if spread else None,
        lead_us=None,
        not_aligned=tuple(rank for rank, name in host.items() if name not in ahead),
        by_messages_us=max(by_messages) / 1e3 if by_messages else None,
    )
    return clocks, shift


def _high(ordered: Sequence[int]) -> int:
    """Return the value that nine of ten sorted values do not exceed."""
    return ordered[len(ordered) * 9 // 10]


def _aligned(
    host: Mapping[int, str | None], together: Mapping[tuple[int, ...], Sequence[_Met]], sent: Sequence[_Met]
) -> tuple[dict[str | None, int], list[float], list[int]]:
    """Return how far each host's clock is ahead, by how much those of messages may be off, and the ends' distances.

    A host that nothing aligns is missing. The distances are sorted. Times in ns.
    """
    hosts = list(dict.fromkeys(host.values()))
    ahead, by_messages = {hosts[0]: 0}, []
    while len(ahead) < len(hosts):
        # Align the hosts that share most collectives with the aligned hosts. Usually these are all hosts at once, and
        # a round goes through every collective of every group that has both kinds of hosts.
        apart: dict[str, list[int]] = defaultdict(list)
        for members, some in together.items():
            known = [at for at, rank in enumerate(members) if host[rank] in ahead]
            new = [(at, host[rank]) for at, rank in enumerate(members) if host[rank] not in ahead]
            if not known or not new:
                continue
            for one in some:
                middle = round(median(one.parts[at].end - ahead[host[members[at]]] for at in known))
                for at, name in new:
                    apart[name].append(one.parts[at].end - middle)
        if not apart:
            if (found := _by_messages(sent, host, ahead)) is None:
                break
            name, ahead[name], off_by = found
            by_messages.append(off_by)
            continue
        most = max(map(len, apart.values()))
        ahead |= {name: round(median(some)) for name, some in apart.items() if len(some) == most}
    spread = []
    for members, some in together.items():
        known = [(at, ahead[host[rank]]) for at, rank in enumerate(members) if host[rank] in ahead]
        if len(known) > 1:
            ends = ([one.parts[at].end - off for at, off in known] for one in some)
            spread += [max(each) - min(each) for each in ends]
    return ahead, by_messages, sorted(spread)


def _by_messages(
    sent: Sequence[_Met], host: Mapping[int, str | None], ahead: Mapping[str | None, int]
) -> tuple[str | None, int, float] | None:
    """Return a host that is not aligned, how far its clock is ahead, and by how much that may be off (ns); or None.

    No message arrives before it is sent, so messages in one direction limit the distance from above and those in the
    other direction from below. The middle is taken, as in NTP.
    """
    most: dict[str | None, int] = {}
    least: dict[str | None, int] = {}
    for one in sent:
        source, destination = (host[rank] for rank in one.ranks)
        took = one.parts[1].end - one.parts[0].start
        if source in ahead and destination not in ahead:
            most[destination] = min(most.get(destination, took + ahead[source]), took + ahead[source])
        elif destination in ahead and source not in ahead:
            least[source] = max(least.get(source, ahead[destination] - took), ahead[destination] - took)
    known = [name for name in most if name in least]
    if not known:
        return None
    name = min(known, key=lambda name: most[name] - least[name])
    return name, round((most[name] + least[name]) / 2), abs(most[name] - least[name]) / 2


def _of_two_clocks(common: Sequence[_Met], on_gpu: bool) -> bool:
    """Return whether the time stamps show that they come from different clocks.

    They do if in most collectives one rank ends before another begins. On GPUs, where all ranks leave a collective
    together, they also do if a rank's ends differ from the others' by far more than on one host.
    """
    impossible = sum(min(part.end for part in one.parts) < max(part.start for part in one.parts) for one in common)
    if impossible > len(common) / 2:
        return True
    ends = ((one, median(part.end for part in one.parts)) for one in common if on_gpu)
    off = grouped((rank, part.end - end) for one, end in ends for rank, part in zip(one.ranks, one.parts, strict=True))
    return any(abs(median(some)) > FAR_APART for some in off.values())


def _collective(one: _Met, shift: Mapping[int, int], origin: int) -> Collective:
    arrived = [part.start - shift[rank] for rank, part in zip(one.ranks, one.parts, strict=True)]
    *_, before, at = sorted(range(len(arrived)), key=arrived.__getitem__)
    last, latest = one.ranks[at], arrived[at]
    size, transfer = one.call.bytes, one.parts[at].end - one.parts[at].start
    factor = BUS_FACTOR.get(one.call.kind)
    took = [part.end - part.start for part in one.parts]
    waited = [max(0, min(latest - start, us)) for start, us in zip(arrived, took, strict=True)]  # each by its own clock
    if one.call.kind == "send":
        ends = [start + us for start, us in zip(arrived, took, strict=True)]
        # The program may wait for one side much later than the message arrives.
        transfer = max(0, min(ends) - latest)
        if ends[0] <= latest:  # a small message leaves before its receiver is ready
            waited[0] = 0
    has_rate = size and transfer and factor and one.group.size > 1
    return Collective(
        group=one.group.name,
        kind=one.call.kind,
        step=one.call.step,
        bytes=size,
        size=one.group.size,
        ranks=one.ranks,
        starts_us=tuple((start - origin) / 1e3 for start in arrived),
        took_us=tuple(us / 1e3 for us in took),
        waits_us=tuple(us / 1e3 for us in waited),
        last=last,
        lead_us=(latest - arrived[before]) / 1e3,
        transfer_us=transfer / 1e3,
        bus_gb_s=size / transfer * factor(one.group.size) if has_rate else None,
    )


class _Waits:
    """One rank's parts in the matched collectives, in arrays, because a job has millions of them."""

    def __init__(self):
        self.starts, self.ends = array("q"), array("q")
        self.until = array("q")  # the last rank's arrival; this rank's start if it is the last
        self.steps: list[str] = []
        self.sends = bytearray()  # of messages: whether this rank sends it
        self.arrived_last, self.others_us = 0, 0.0


def _collectives(
    some: Sequence[_Met], shift: Mapping[int, int], origin: int, waits: Mapping[int, _Waits]
) -> list[Collective]:
    """Return the collectives or messages on the common clock, and add the waits in them to those of each rank."""
    found = []
    for met in some:
        found.append(one := _collective(met, shift, origin))
        for rank, part, us in zip(met.ranks, met.parts, one.waits_us, strict=True):
            mine = waits[rank]
            mine.starts.append(part.start)
            mine.ends.append(part.end)
            mine.until.append(part.start + (round(us * 1e3) if rank != one.last else 0))
            mine.steps.append(one.step)
            mine.sends.append(rank == one.ranks[0])
        waits[one.last].arrived_last += 1
        waits[one.last].others_us += sum(one.waits_us)
    return found


def _exposed(one: RankTrace) -> Intervals:
    """Return a rank's exposed communication, by its own clock."""
    return list(zip(one.exposed[::2], one.exposed[1::2], strict=True))


def _figures(one: RankTrace, waits: _Waits, messages: _Waits) -> RankFigures:
    spans = zip(waits.starts, waits.until, waits.steps, strict=True)
    by_step = grouped((step, (start, until)) for start, until, step in spans if until > start)
    exposed = _exposed(one)
    waiting = union(span for some in by_step.values() for span in some)
    parts = grouped((one.calls[part.call].step, part) for part in one.parts)
    ends = [max(some, key=lambda part: part.end) for some in parts.values()]
    in_last = union((part.start, part.end) for part in ends)
    mine = union(zip(waits.starts, waits.ends, strict=True))
    return RankFigures(
        trace=one.path,
        **{name: getattr(one, name) for name in KEPT},
        waited_for_others_us=sum(map(length, by_step.values())) / 1e3,
        waiting_us=length(waiting) / 1e3,
        waited_exposed_us=length(both(waiting, exposed)) / 1e3,
        together_exposed_us=length(both(minus(mine, waiting), exposed)) / 1e3,
        exposed_in_last_us=length(both(minus(in_last, waiting), exposed)) / 1e3,
        collectives=len(one.parts),
        arrived_last=waits.arrived_last,
        others_waited_us=waits.others_us,
        message_waits=_message_waits(messages, exposed),
    )


def _message_waits(waits: _Waits, exposed: Intervals) -> MessageWaits:
    """Return a rank's waits in its messages. exposed: the rank's exposed communication."""
    spans = list(zip(waits.starts, waits.ends, waits.until, strict=True))
    first, last, sends = [], [], 0
    for some in grouped((step, at) for at, step in enumerate(waits.steps)).values():
        earliest = min(spans[at][0] for at in some)
        sends += any(waits.sends[at] and spans[at][0] == earliest for at in some)
        received = sorted((at for at in some if not waits.sends[at]), key=lambda at: spans[at][0])
        first += received[:1]
        last += received[1:][-1:]

    def waited(some: Iterable[int]) -> float:
        return length(both(union((spans[at][0], spans[at][2]) for at in some), exposed)) / 1e3

    return MessageWaits(
        exposed_us=length(both(union((start, end) for start, end, _ in spans), exposed)) / 1e3,
        us=waited(range(len(spans))),
        first_us=waited(first),
        last_us=waited(last),
        messages=len(spans),
        first_sends=sends,
    )


def _groups(met: Sequence[_Met], matched: Sequence[Collective]) -> Iterator[GroupTimes]:
    of_group = (((one.group.description, one.ranks, one.group.size), it) for one, it in zip(met, matched, strict=True))
    for key, some in grouped(of_group).items():
        waited = totals((one.last, sum(one.waits_us)) for one in some)
        last = max(waited, key=waited.get)
        of_rank = [sum(each) for each in zip(*(one.waits_us for one in some), strict=True)]
        yield GroupTimes(
            *key,
            collectives=len(some),
            waited_us=sum(waited.values()),
            last=last,
            times_last=sum(one.last == last for one in some),
            for_last_us=waited[last],
            transfer_us=sum(one.transfer_us for one in some),
            late=tuple(rank for rank, us in zip(key[1], of_rank, strict=True) if us < LATE * max(of_rank)),
        )


def _pairs(met: Sequence[_Met], messages: Sequence[Collective], exposed: Mapping[int, Lengths]) -> Iterator[PairTimes]:
    """exposed: each rank's exposed communication, by its own clock."""
    of_pair = (((one[0].group.description, one[0].ranks), one) for one in zip(met, messages, strict=True))
    for (description, (source, destination)), some in grouped(of_pair).items():
        place = {rank: at for at, rank in enumerate(some[0][0].group.members)}
        sizes = [message.bytes for _, message in some if message.bytes is not None]
        waited = []
        for side, rank in enumerate((source, destination)):
            starts = [(one.parts[side].start, round(message.waits_us[side] * 1e3)) for one, message in some]
            spans = union((start, start + ns) for start, ns in starts)  # several sends may wait at a time
            waited.append(sum(exposed[rank].between(*span) for span in spans))
        places = (place[source], place[destination]) if {source, destination} <= place.keys() else None
        of_all = {"messages": len(some), "bytes": median_high(sizes) if sizes else None}
        waits = {"receiver_waited_us": waited[1] / 1e3, "sender_waited_us": waited[0] / 1e3}
        transfer = sum(message.transfer_us for _, message in some)
        yield PairTimes(description, source, destination, places, **of_all, **waits, transfer_us=transfer)


def _kinds(matched: Sequence[Collective]) -> tuple[KindTimes, ...]:
    found, best = [], max((one.bus_gb_s for one in matched if one.bus_gb_s is not None), default=None)
    for key, some in grouped(((one.kind, one.bytes, one.size), one) for one in matched).items():
        wait, transfer = median(max(one.waits_us) for one in some), median(one.transfer_us for one in some)
        rate = median_rate(some)
        found.append(KindTimes(*key, len(some), wait, transfer, rate, rate / best if rate and best else None))
    return tuple(sorted(found, key=lambda one: -one.count * (one.transfer_us + one.longest_wait_us)))


def median_rate(some: Iterable[Collective]) -> float | None:
    """Return the median bus bandwidth (GB/s) of collectives; None if that of none is known."""
    rates = [one.bus_gb_s for one in some if one.bus_gb_s is not None]
    return median(rates) if rates else None
