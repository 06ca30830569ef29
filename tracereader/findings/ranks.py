"""The findings about several ranks: which rank the others wait for, why, and why communication is exposed."""

import bisect
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from statistics import fmean, median

import msgspec

from tracereader.figures.rank import OUTSIDE_ANNOTATIONS, NotRead, Times, summed
from tracereader.figures.ranks import GroupTimes, PairTimes, RankFigures, RanksSummary, median_rate
from tracereader.findings import recording, steps
from tracereader.findings.finding import counted, size
from tracereader.trace import STEP
from tracereader.trace.grouped import grouped, totals

# The share of a rank's time in exposed waits for other ranks from which the wait is named. On two H200s it was 31% in
# FSDP with a CPU that launches late, 8% with a rank that computes more, and 0.5% in plain DDP.
MUCH_WAITED = 0.02
# The share of a step by which a rank, or the transfers of a group, must take longer to be named. A shorter delay cannot
# make another rank wait for a share of its time that is named.
MUCH_LONGER = MUCH_WAITED
# The share of all waiting that one rank must cause to be named. In the three runs above it caused all of it. When two
# ranks on two cores of a laptop took turns, one caused 56%.
CAUSES_IT = 2 / 3
MOST = 0.5
LITTLE = 0.25  # of the extra time of the step that has most of it
A_REASON = 0.2  # a reason is named if it explains at least this share of a rank's extra time
NEARLY_ALL = 0.9  # a phase is named alone if it has at least this share of a reason's time
# The share over the other ranks' median from which a rank's launches are said to be more, and the factor over their
# median time from launch to launch from which its CPU is said to be slower.
MORE_LAUNCHES, CPU_IS_SLOWER = 0.05, 1.1
# The factor over the other groups' transfers of one message from which a link is slow. On two H200s the same message
# takes up to 1.3 times the median.
MUCH_SLOWER = 2
# The order of arrivals that are closer than this multiple of the clocks' error is not decided.
BEYOND_THE_CLOCKS = 2
# The purpose of a process group, by the words of its description. A DeviceMesh's descriptions are mesh_tp and so on,
# Megatron's are TENSOR_MODEL_PARALLEL_GROUP and so on.
DIMENSIONS = {
    "tp": "tensor", "tensor": "tensor", "pp": "pipeline", "pipeline": "pipeline", "dp": "data", "ddp": "data",
    "fsdp": "data", "data": "data", "ep": "expert", "expert": "expert", "cp": "context", "context": "context",
    "sp": "sequence", "sequence": "sequence",
}  # fmt: skip


class Reason(msgspec.Struct, frozen=True):
    """A part of a rank's step (a key of PARTS) that takes longer than on the other ranks. Times in µs.

    more_us: the extra time per step. phase: the phase with most of the extra time; None if no phase has most.
    phase_us: the extra time in that phase.
    """

    part: str
    more_us: float
    phase: str | None
    phase_us: float | None


class Loss(msgspec.Struct, frozen=True):
    """Why a rank is slower than the others. Times are medians per step without exposed communication, in µs.

    steps: the steps in which it is slower, which the times are of. reasons: the largest first.
    """

    rank: int
    own_us: float
    others_us: float
    reasons: tuple[Reason, ...]
    steps: tuple[str, ...]


class SlowLink(msgspec.Struct, frozen=True):
    """A group of ranks whose transfers of one kind and size take longer than other groups'. Medians, in µs.

    bus_gb_s: None if the kind has no factor. more_us: the sum of the extra times per step.
    """

    ranks: tuple[int, ...]
    kind: str
    bytes: int
    transfer_us: float
    others_us: float
    more_us: float
    bus_gb_s: float | None
    others_gb_s: float | None


class Cost(msgspec.Struct, frozen=True):
    """A slow rank or a slow link, with the time that it costs per step (µs).

    more_us: for a rank, its time without exposed communication beyond the median of all ranks, spread over all steps.
    ranks: the slow rank, or those that the link connects. reasons: the rank's in each of `steps`, the largest first;
    empty for a link. steps: those in which the rank is slower; empty for a link.
    """

    ranks: tuple[int, ...]
    more_us: float
    reasons: tuple[Reason, ...]
    link: SlowLink | None
    steps: tuple[str, ...] = ()


class SlowHost(msgspec.Struct, frozen=True):
    """A host on which at least two ranks, and at least half, take longer than the median of all ranks.

    ranks: the host's ranks that were read. slow: those that take longer. more_us: the median of their extra times per
    step. part: the part (a key of PARTS) whose median extra time is largest; None if it explains too little.
    """

    host: str
    ranks: tuple[int, ...]
    slow: tuple[int, ...]
    more_us: float
    part: str | None


class SlowStage(msgspec.Struct, frozen=True):
    """The stage of pipelines that computes longest. Medians over its ranks of the compute time per step, in µs.

    stage: its place in the process groups, from 0. stages: the number of stages that were read. others_us: the median
    of the other stages. mean_us: of all stages.
    """

    stage: int
    stages: int
    ranks: tuple[int, ...]
    us: float
    others_us: float
    mean_us: float


class PairKind(msgspec.Struct, frozen=True):
    """The messages between the same places of equal process groups, such as from stage 0 to stage 1 of each pipeline.

    name: in words. receiver_waited_us, sender_waited_us, transfer_us: the averages per pair and step. worst: the pair
    with the most waiting.
    """

    name: str
    pairs: int
    messages: int
    bytes: int | None
    receiver_waited_us: float
    sender_waited_us: float
    transfer_us: float
    worst: PairTimes


class GroupKind(msgspec.Struct, frozen=True):
    """Process groups with one description and size.

    name: in words, with the description. waited_us: the average per rank and step. transfer_us: the average per group
    and step. collectives: the most of any group. worst: the group with the most waiting.
    """

    name: str
    groups: int
    size: int
    collectives: int
    waited_us: float
    transfer_us: float
    worst: GroupTimes


def share(one: RankFigures, us: float) -> float:
    """Return a time (µs) as a share of a rank's window."""
    return us / one.total.us if one.total.us else 0.0


def share_of_steps(one: RankFigures, us: float) -> float:
    """Return a time (µs) as a share of a rank's steps. Its window may also have work of earlier steps."""
    steps = sum(step.us for step in one.steps)
    return us / steps if steps else share(one, us)


def ms(us: float) -> str:
    """Return a time in ms. All figures of ranks have this unit, so that they can be compared at a glance."""
    if 0 < us < 1:
        return "under 0.001 ms"
    return f"{us / 1e3:,.1f} ms" if us >= 50 or not us else f"{us / 1e3:.2g} ms"


def in_steps(one: RankFigures) -> Times:
    """Return the times of a rank's steps together. Its window may also have communication of earlier steps."""
    return summed("", one.steps) if one.steps else one.total


def per_step(one: RankFigures, us: float) -> float:
    """Return the average over a rank's steps of a time that is summed over its window (µs)."""
    return us / max(1, len(one.steps))


def straggler(summary: RanksSummary) -> RankFigures | None:
    """Return the rank that the others wait for most; None if the waiting costs them too little.

    If other groups wait for one process group, it is the rank that this group waits for.
    """
    total = sum(one.others_waited_us for one in summary.ranks)
    if not total:
        return None
    slow = max(summary.ranks, key=lambda one: one.others_waited_us)
    if slow.others_waited_us <= CAUSES_IT * total:
        slow = _late_in_its_group(summary, total)
    if slow is None or not _costs_others(summary, {slow.rank}):
        return None
    late = [one for one in summary.matched if one.last == slow.rank]
    # If others arrive just before it, they would be waited for in its place.
    alone = sum(one.lead_us for one in late) > MOST * sum(max(one.waits_us) for one in late)
    return slow if alone and _told_apart(summary, median(one.lead_us for one in late)) else None


def pace_setter(summary: RanksSummary) -> RankFigures:
    """Return the rank that sets the pace: the straggler, or without one the rank that waits least for others.

    Exposed communication that is not matched may be a wait, so it counts as one. The peer may not have been read.
    """

    def waits(one: RankFigures) -> float:
        return share_of_steps(one, one.waited_exposed_us + one.message_waits.us + _not_matched_us(one))

    return straggler(summary) or min(summary.ranks, key=waits)


def _not_matched_us(one: RankFigures) -> float:
    """Return the exposed time of a rank's steps in communication that is not matched with another rank's (µs)."""
    matched = one.waited_exposed_us + one.together_exposed_us + one.message_waits.exposed_us
    return max(0.0, in_steps(one).exposed_communication_us - matched)


def regime(summary: RanksSummary) -> tuple[str, str] | None:
    """Return the regime of the job, and sentences with the figures that decide it; None without GPU work.

    It is the regime of the rank that sets the pace, because the waits for this rank hide those of the others.
    """
    one = pace_setter(summary)
    found = one.regime
    if found is None or found.steady is None:
        return None
    told = steps.of_the_gpu(found.waits_for, found.steady, found.steady_us)
    waiting, exposed = one.waited_exposed_us + one.message_waits.us, one.total.exposed_communication_us
    if found.waits_for == "communication" and waiting > MOST * exposed:
        told += f", {waiting / exposed:.0%} of it waiting for other ranks"
    if len(summary.ranks) > 1:
        whose = "'s"
        stage = slowest_stage(summary)
        if straggler(summary) is one or (stage is not None and one.rank in stage.ranks):
            whose = " sets the pace: its"
        elif _waits_are_known(summary):
            whose = f" waits least for {'the ranks that were read' if summary.missing else 'others'}: its"
        told = f"rank {one.rank}{whose}{told.removeprefix('the')}"
    if found.waits_for == "overhead" and one.unprofiled_step_us is not None:
        busy = usual(summary, one, None, lambda step: step.us - step.idle_us)
        told += f"; {recording.measured(busy, one.unprofiled_step_us).removesuffix('.')}"
    return steps.WORDS[found.waits_for], told


def _waits_are_known(summary: RanksSummary) -> bool:
    """Return whether the report can compare the ranks' waits: their communication is matched, and its order known."""
    if not summary.matched:
        return bool(summary.messages) or not any(one.total.communication_us for one in summary.ranks)
    return not _costs_others(summary) or _last_is_known(summary)


def _last_is_known(summary: RanksSummary) -> bool:
    """Return whether the clocks show who arrives last, or that slow ranks do, or those behind a slow link.

    Which of several slow ranks is the last one need not be known, nor which of those behind a slow link.
    """
    if _told_apart(summary, summary.clocks.lead_us):
        return True
    longest_us = fmean(max(one.waits_us) for one in summary.matched)
    return bool(_beyond(summary) or slow_link(summary)) and _told_apart(summary, longest_us)


def launch_waits(summary: RanksSummary) -> str:
    """Return a sentence on the most that faster launching can save; "" if the run is not overhead-bound."""
    one = pace_setter(summary)
    if one.regime is None or one.regime.waits_for != "overhead":
        return ""
    late, step = (usual(summary, one, None, figure) for figure in (_launching, lambda step: step.us))
    waits = f"The GPU of rank {one.rank} waits {ms(late)} of a step of {ms(step)} for launches"
    return f"{waits}. A faster CPU saves at most this time"


def _late_in_its_group(summary: RanksSummary, total: float) -> RankFigures | None:
    """Return the rank that one group waits for, if most of all waiting is for the ranks of this group."""
    by_rank = {one.rank: one for one in summary.ranks}

    def has_most(group: GroupTimes) -> bool:
        caused = sum(by_rank[rank].others_waited_us for rank in group.ranks)
        each = group.for_last_us / (len(group.ranks) - 1)
        by_one = group.for_last_us > CAUSES_IT * group.waited_us and share(by_rank[group.last], each) > MUCH_WAITED
        return by_one and len(group.ranks) < len(summary.ranks) and caused > CAUSES_IT * total

    found = [(len(group.ranks), group.last) for group in summary.groups if has_most(group)]
    return by_rank[min(found)[1]] if found else None


def _costs_others(summary: RanksSummary, but: Collection[int] = ()) -> bool:
    """Return whether any rank loses much time by waiting. but: the ranks that do not count."""
    costs = (share(one, one.waited_exposed_us) for one in summary.ranks if one.rank not in but)
    return max(costs, default=0.0) > MUCH_WAITED


def _told_apart(summary: RanksSummary, lead_us: float | None) -> bool:
    """Return whether the clocks decide which rank arrives last. lead_us: its time after the arrival before it."""
    apart = summary.clocks.apart_us
    if apart is None or lead_us is None or not (summary.on_gpu or summary.clocks.aligned):
        return True  # all stamps are of one CPU's clock
    return lead_us > BEYOND_THE_CLOCKS * apart


def own(one: Times) -> float:
    """Return the time without exposed communication (µs)."""
    return one.us - one.exposed_communication_us


def _launching(one: Times) -> float:
    """Return the idle time before a launch that did not wait for the DataLoader (µs)."""
    return max(0.0, one.idle_not_launched_us - one.idle_loading_us)


Figure = Callable[[Times], float]
PARTS: dict[str, Figure] = {
    "computes": lambda one: one.compute_us,
    "copies": lambda one: one.exposed_copy_us,
    "launches late": _launching,
    "waits for data": lambda one: one.idle_loading_us,
    "idle": lambda one: one.idle_us - one.idle_loading_us - _launching(one),
}


def usual(
    summary: RanksSummary, rank: RankFigures, phase: str | None, figure: Figure, steps: Sequence[str] | None = None
) -> float:
    """Return the median of a figure over the common steps or some of them, for one phase or for the whole step."""
    wanted = [step for step in rank.steps if step.name in (summary.steps if steps is None else steps)]
    times = ([step] if phase is None else [one for one in step.phases if one.name == phase] for step in wanted)
    return median(sum(map(figure, some)) for some in times) if wanted else 0.0


def step_us(summary: RanksSummary) -> float:
    """Return the median step of the rank whose steps take longest (µs)."""
    return max((usual(summary, one, None, lambda step: step.us) for one in summary.ranks), default=0.0)


def unprofiled_us(summary: RanksSummary) -> float | None:
    """Return the longest of the ranks' steps without the profiler (µs); None if a rank did not measure it."""
    found = [one.unprofiled_step_us for one in summary.ranks]
    return None if None in found else max(found, default=None)


def phases(summary: RanksSummary) -> list[str]:
    """Return the names of the phases that all ranks have, in order. One rank may have time outside its annotations."""
    names = [dict.fromkeys(one.name for step in rank.steps for one in step.phases) for rank in summary.ranks]
    shared = [name for name in names[0] if all(name in some for some in names)] if names else []
    outside = any(OUTSIDE_ANNOTATIONS in some for some in names) and OUTSIDE_ANNOTATIONS not in shared
    return [*shared, *([OUTSIDE_ANNOTATIONS] if outside and shared else [])]


class _Usual:
    """Medians over all steps, or over some, of each rank's figures, each computed once."""

    def __init__(self, summary: RanksSummary, steps: Sequence[str] | None = None):
        self.summary, self.found, self.steps = summary, {}, summary.steps if steps is None else steps

    def of(self, phase: str | None, part: str) -> dict[int, float]:
        """Return the median by rank. part: a key of PARTS, or one of `own` and `us`."""
        if (phase, part) not in self.found:
            figure = {"own": own, "us": lambda one: one.us}.get(part) or PARTS[part]
            self.found[phase, part] = {
                one.rank: usual(self.summary, one, phase, figure, self.steps) for one in self.summary.ranks
            }
        return self.found[phase, part]

    def share(self) -> float:
        """Return these steps as a share of all."""
        return len(self.steps) / max(1, len(self.summary.steps))

    def more(self, rank: int, phase: str | None, part: str) -> float:
        """Return a rank's figure minus the median of the other ranks."""
        found = self.of(phase, part)
        return found[rank] - median(us for other, us in found.items() if other != rank)

    def reasons(self, rank: int, longer: float) -> tuple[Reason, ...]:
        """Return the reasons why a rank takes longer, the largest first. longer: its extra time per step (µs)."""
        reasons = []
        for part in PARTS:
            if (us := self.more(rank, None, part)) > A_REASON * longer:
                # Steps last from kernel to kernel: the wait for a batch or for a first launch ends the step before.
                named = phases(self.summary) if part != "waits for data" else []
                if part == "launches late":
                    named = [phase for phase in named if phase != OUTSIDE_ANNOTATIONS][:-1]
                by_phase = {phase: self.more(rank, phase, part) for phase in named}
                phase = max(by_phase, key=by_phase.get, default=None)
                named = phase is not None and by_phase[phase] > MOST * us
                reasons.append(Reason(part, us, phase if named else None, by_phase[phase] if named else None))
        return tuple(sorted(reasons, key=lambda one: -max(one.more_us, one.phase_us or 0.0)))


def _slow_steps(summary: RanksSummary) -> dict[int, dict[str, float]]:
    """Return by rank the steps in which it takes much longer than the other ranks' median, with the extra time (µs).

    Exposed communication does not count. The median over all steps would hide a rank that is slow in few of them. Steps
    with little of the extra time would hide the others, too, so they are left out.
    """
    found: dict[int, dict[str, float]] = {one.rank: {} for one in summary.ranks}
    for name in summary.steps if len(summary.ranks) > 1 else ():
        of_step = {one.rank: step for one in summary.ranks for step in one.steps if step.name == name}
        ordered = sorted(map(own, of_step.values()))
        least = MUCH_LONGER * median(step.us for step in of_step.values())
        for rank, step in of_step.items():
            if (more := own(step) - _median_without(ordered, own(step))) > least:
                found[rank][name] = more
    most = {rank: max(slow.values(), default=0.0) for rank, slow in found.items()}
    return {
        rank: {name: more for name, more in slow.items() if more >= LITTLE * most[rank]} for rank, slow in found.items()
    }


def _where_slow(summary: RanksSummary, rank: int) -> _Usual:
    """Return the medians over the steps in which a rank is slower; over all steps if there are none."""
    return _Usual(summary, tuple(_slow_steps(summary)[rank]) or None)


def loss(summary: RanksSummary) -> Loss | None:
    """Return why the rank that the others wait for is slower; None if no rank or no reason is clear."""
    slow = straggler(summary) or _most_often_last(summary)
    if slow is None:
        return None
    figures = _where_slow(summary, slow.rank)
    longer = figures.more(slow.rank, None, "own")
    # The rank's extra time explains the waiting only if both are about equally long.
    waited = max(one.waited_exposed_us for one in summary.ranks if one is not slow) / max(1, len(summary.steps))
    if longer * figures.share() <= max(MOST * waited, MUCH_LONGER * figures.of(None, "us")[slow.rank]):
        return None
    mine = figures.of(None, "own")[slow.rank]
    return Loss(slow.rank, mine, mine - longer, figures.reasons(slow.rank, longer), tuple(figures.steps))


def _most_often_last(summary: RanksSummary) -> RankFigures | None:
    """Return the rank that is last in most collectives. The other ranks may compute meanwhile."""
    if len(summary.ranks) < 2 or not summary.matched or not _told_apart(summary, summary.clocks.lead_us):
        return None
    often = max(summary.ranks, key=lambda one: one.arrived_last)
    return often if often.arrived_last > CAUSES_IT * sum(often.rank in one.ranks for one in summary.matched) else None


def _beyond(summary: RanksSummary) -> dict[int, tuple[float, tuple[str, ...]]]:
    """Return by rank the extra time per step over the median of all ranks, and the steps that have it.

    Exposed communication and small amounts do not count. The result is empty if no rank loses much time by waiting.
    """
    if len(summary.ranks) < 3 or not summary.steps or not _costs_others(summary):
        return {}
    figures, found = _Usual(summary), {}
    mine, least = figures.of(None, "own"), MUCH_LONGER * median(figures.of(None, "us").values())
    middle = median(mine.values())
    for rank, slow in _slow_steps(summary).items():
        in_some = 0 < len(slow) < len(summary.steps)
        us = sum(slow.values()) / len(summary.steps) if in_some else mine[rank] - middle
        if us > least:
            found[rank] = us, tuple(slow) if in_some else summary.steps
    return found


def costs(summary: RanksSummary, most: int | None = None, hosts: Sequence[SlowHost] = ()) -> tuple[Cost, ...]:
    """Return the slow ranks and links, the costliest first. Among fewer than three ranks none is called slow.

    hosts: slow hosts, of which only the costliest rank is returned.
    """
    beyond = _beyond(summary)
    left_out = {rank for one in hosts for rank in one.slow} - {max(one.slow, key=beyond.get) for one in hosts}
    found = [Cost(link.ranks, link.more_us, (), link) for link in slow_links(summary)]
    found += [Cost((rank,), us, (), None, steps) for rank, (us, steps) in beyond.items() if rank not in left_out]
    found = sorted(found, key=lambda one: -one.more_us)[:most]
    figures = {steps: _Usual(summary, steps) for steps in {one.steps for one in found}}
    for place, one in enumerate(found):
        if not one.link:
            of = figures[one.steps]
            found[place] = msgspec.structs.replace(one, reasons=of.reasons(one.ranks[0], one.more_us / of.share()))
    return tuple(found)


def slow_hosts(summary: RanksSummary) -> tuple[SlowHost, ...]:
    """Return the hosts with several slow ranks, the slowest first; none if there is only one host."""
    beyond, found = _beyond(summary), []
    figures = {steps: _Usual(summary, steps) for _, steps in beyond.values()}
    on = grouped((one.host, one.rank) for one in summary.ranks if one.host is not None)
    for host, ranks in on.items() if len(on) > 1 else ():
        slow = [rank for rank in ranks if rank in beyond]
        if len(slow) < 2 or 2 * len(slow) < len(ranks):
            continue
        if (len(beyond) - len(slow)) / max(1, len(summary.ranks) - len(ranks)) > MOST * len(slow) / len(ranks):
            continue  # slow ranks are about as frequent on all other hosts
        of = {rank: figures[beyond[rank][1]] for rank in slow}
        more = {part: median(of[rank].more(rank, None, part) * of[rank].share() for rank in slow) for part in PARTS}
        us, part = median(beyond[rank][0] for rank in slow), max(more, key=more.get)
        found.append(SlowHost(host, tuple(ranks), tuple(slow), us, part if more[part] > A_REASON * us else None))
    return tuple(sorted(found, key=lambda one: -one.more_us))


def slow_link(summary: RanksSummary) -> SlowLink | None:
    """Return the group that loses most by slow transfers; None if there is none."""
    return next(iter(slow_links(summary)), None)


def slow_links(summary: RanksSummary) -> list[SlowLink]:
    """Return the groups with slower transfers than other groups' equal messages, each with its costliest message."""
    whole = (one for one in summary.matched if one.bytes and len(one.ranks) == one.size)  # others may be late
    found: dict[tuple, SlowLink] = {}
    for (kind, message, _), same in grouped(((one.kind, one.bytes, one.size), one) for one in whole).items():
        groups = grouped((one.ranks, one) for one in same)
        usual_us = {ranks: median(one.transfer_us for one in some) for ranks, some in groups.items()}
        ordered = sorted(usual_us.values())
        for ranks, us in usual_us.items() if len(groups) > 1 else ():
            theirs = _median_without(ordered, us)
            if us <= MUCH_SLOWER * theirs:
                continue
            more = sum(one.transfer_us - theirs for one in groups[ranks]) / max(1, len(summary.steps))
            if ranks not in found or more > found[ranks].more_us:
                others = (each for other, some in groups.items() if other != ranks for each in some)
                rates = median_rate(groups[ranks]), median_rate(others)
                found[ranks] = SlowLink(ranks, kind, message, us, theirs, more, *rates)
    step = {one.rank: one.total.us / max(1, len(summary.steps)) for one in summary.ranks}
    worth = (one for one in found.values() if one.more_us > MUCH_LONGER * max(map(step.get, one.ranks)))
    return sorted(worth, key=lambda one: -one.more_us)


def _median_without(ordered: Sequence[float], one: float) -> float:
    """Return the median of sorted values without one of them. A new sort would be slow with hundreds of groups."""
    at, count = bisect.bisect_left(ordered, one), len(ordered) - 1
    return median(ordered[index + (index >= at)] for index in {(count - 1) // 2, count // 2})


def group_kinds(summary: RanksSummary) -> tuple[GroupKind, ...]:
    """Return the kinds of process groups, those with the most waiting first."""
    steps, found = max(1, len(summary.steps)), []
    for (description, members), some in grouped(((one.description, one.size), one) for one in summary.groups).items():
        told = " and ".join(_purposes(description))
        name = f"{told} parallel ({description})" if told else f"{description or 'groups'} of {members:,} ranks"
        if not told and members == summary.world_size:
            name = "all ranks"
        collectives = max(one.collectives for one in some)
        waited = sum(one.waited_us for one in some) / sum(len(one.ranks) for one in some) / steps
        transfer, worst = fmean(one.transfer_us for one in some) / steps, max(some, key=lambda one: one.waited_us)
        found.append(GroupKind(name, len(some), members, collectives, waited, transfer, worst))
    return tuple(sorted(found, key=lambda one: -one.waited_us))


def waits_much(summary: RanksSummary, group: GroupTimes) -> bool:
    """Return whether the ranks of a group that wait for others lose much time by it."""
    one = next(one for one in summary.ranks if one.rank == group.last)
    return share(one, group.waited_us / (len(group.ranks) - 1)) > MUCH_WAITED


def _purposes(description: str) -> list[str]:
    words = re.split(r"[^a-z]+", description.lower())
    return list(dict.fromkeys(DIMENSIONS[word] for word in words if word in DIMENSIONS))


def is_pipeline(summary: RanksSummary) -> bool:
    """Return whether the ranks that exchange messages are the stages of pipelines.

    The descriptions of their groups decide. Without a known purpose the ranks that exchange messages, directly or
    through others, have to form a chain, closed or not, and only one of them, at an end, begins its steps with a send.
    """
    purposes = {purpose for one in summary.pairs for purpose in _purposes(one.description)}
    if purposes or not summary.pairs:
        return "pipeline" in purposes
    connected: dict[int, set[int]] = {}
    peers: dict[int, set[int]] = defaultdict(set)
    for one in summary.pairs:
        peers[one.source].add(one.destination)
        peers[one.destination].add(one.source)
        both = connected.get(one.source, {one.source}) | connected.get(one.destination, {one.destination})
        connected |= dict.fromkeys(both, both)
    begins = {one.rank for one in summary.ranks if 2 * one.message_waits.first_sends > len(one.steps)}

    def is_chain(ranks: set[int]) -> bool:
        first, most = ranks & begins, max(len(peers[rank]) for rank in ranks)
        at_an_end = len(first) == 1 and len(peers[next(iter(first))]) == min(len(peers[rank]) for rank in ranks)
        return at_an_end and most <= 2

    return all(map(is_chain, connected.values()))


def _of_messages(summary: RanksSummary) -> list[str]:
    """Return sentences on the waits for messages: who loses most, and for whom it waits."""
    taking_part = [one for one in summary.ranks if one.message_waits.messages]
    if not taking_part:
        return []
    worst = max(taking_part, key=lambda one: share_of_steps(one, one.message_waits.us))
    waits, pipeline = worst.message_waits, is_pipeline(summary)
    nothing = f"{_each_step(worst, waits.us)} per step ({share_of_steps(worst, waits.us):.1%} of it)"
    if share(worst, waits.us) <= MUCH_WAITED:
        return [f"no rank loses much time by waiting for messages: rank {worst.rank} waits {nothing}"]
    bubble = f"rank {worst.rank} computes nothing for {nothing} while it waits for messages"
    for us, which in ((waits.first_us, "first"), (waits.last_us, "last")):
        if us > A_REASON * waits.us:
            bubble += f", {_each_step(worst, us)} of it in the {which} receive of a step"
    middle = median(share_of_steps(one, one.message_waits.us) for one in taking_part)
    others = f"; the median of the stages is {middle:.1%}" if pipeline and len(taking_part) > 2 else ""
    longest = f"the longest wait for one other rank: {waiting_of(summary.pairs[0], len(summary.steps))}"
    found = [f"{'pipeline bubble: ' * pipeline}{bubble}{others}", longest]
    if slow := slowest_stage(summary):
        read = " of the stages that were read" if summary.missing else ""
        them = "the other stage" if slow.stages == 2 else "the median of the other stages"
        longest = f"{stage_in_words(slow)} computes longest{read}: {ms(slow.us)} per step, {them} {ms(slow.others_us)}"
        found.append(f"{longest}; the slowest stage sets the pace of a pipeline")
    return found


def waiting_of(pair: PairTimes, steps: int) -> str:
    """Return a sentence on which of two ranks waits for the other, and how long. steps: the number of steps."""
    here, there = f"rank {pair.destination}", f"rank {pair.source}"
    receiver, sender = (f"{ms(us / max(1, steps))} per step" for us in (pair.receiver_waited_us, pair.sender_waited_us))
    if pair.receiver_waited_us >= pair.sender_waited_us:
        return f"{here} waits {receiver} until {there} sends"
    return f"{there} waits {sender} until {here} receives"


def slowest_stage(summary: RanksSummary) -> SlowStage | None:
    """Return the stage of the pipelines that computes longest; None if it does not compute much longer than others.

    Most of its ranks have to compute longer, because one slow rank makes no slow stage.
    """
    pairs = [one for one in summary.pairs if one.places] if is_pipeline(summary) else []
    stage = {rank: at for one in pairs for rank, at in zip((one.source, one.destination), one.places, strict=True)}
    ranks, figures = grouped((at, rank) for rank, at in stage.items()), _Usual(summary)
    computes, least = figures.of(None, "computes"), MUCH_LONGER * median(figures.of(None, "us").values())
    by_stage = {at: median(computes[rank] for rank in some) for at, some in ranks.items()}
    if len(by_stage) < 2 or not summary.steps:
        return None
    slow = max(by_stage, key=by_stage.get)
    others = [us for at, us in by_stage.items() if at != slow]
    beyond = [computes[rank] - median(others) for rank in ranks[slow]]
    if sum(us > max(least, MOST * max(beyond)) for us in beyond) <= len(beyond) / 2:
        return None
    mean = fmean(by_stage.values())
    return SlowStage(slow, len(by_stage), tuple(sorted(ranks[slow])), by_stage[slow], median(others), mean)


def stage_in_words(slow: SlowStage) -> str:
    """Return the name of a stage: its only rank, or its number with its ranks."""
    if len(slow.ranks) == 1:
        return f"rank {slow.ranks[0]}"
    return f"stage {slow.stage} (ranks {listed(slow.ranks, most=3)})"


def pair_kinds(summary: RanksSummary) -> tuple[PairKind, ...]:
    """Return the kinds of pairs of ranks that exchange messages, those with the most waiting first."""
    places = (((one.description, one.places or (one.source, one.destination)), one) for one in summary.pairs)
    steps, found = max(1, len(summary.steps)), []
    what = "stage" if is_pipeline(summary) else "member"
    several = len({one.description for one in summary.pairs}) > 1
    for (description, (source, destination)), some in grouped(places).items():
        worst, times = some[0], ("receiver_waited_us", "sender_waited_us", "transfer_us")  # the worst one comes first
        named = f"{what} {source} to {destination}" if len(some) > 1 else f"rank {worst.source} to {worst.destination}"
        named += f" ({description})" if description and several else ""
        means = {time: fmean(getattr(one, time) for one in some) / steps for time in times}
        found.append(PairKind(named, len(some), max(one.messages for one in some), worst.bytes, **means, worst=worst))
    return tuple(sorted(found, key=lambda one: -max(one.receiver_waited_us, one.sender_waited_us)))


def sentences(summary: RanksSummary) -> list[str]:
    """Return the sentences of "in short": who waits for whom, why time is lost, and the cost of communication."""
    messages = _of_messages(summary)
    if not summary.matched:
        return [*messages, *_exposed(summary)] if messages else [_nothing_matched(summary)]
    found = _who_waits(summary, straggler(summary))
    if why := loss(summary):
        found.insert(1, _why(why, summary))
    for_messages = max(share(one, one.message_waits.us) for one in summary.ranks)
    messages_first = for_messages > max(share(one, one.waited_exposed_us) for one in summary.ranks)
    return [*(messages + found if messages_first else found + messages), *_exposed(summary)]


def _nothing_matched(summary: RanksSummary) -> str:
    if len(summary.ranks) == 1:
        return f"only rank {summary.ranks[0].rank} could be read, so there is no rank to compare it with"
    if any(one.total.communication_us for one in summary.ranks):
        return "the communication of these ranks cannot be matched, so it is not known who waits for whom"
    return "no collective in the steps, so no rank waits for another"


def _who_waits(summary: RanksSummary, slow: RankFigures | None) -> list[str]:
    often = slow or max(summary.ranks, key=lambda one: (one.arrived_last, one.others_waited_us))
    taken_part = sum(often.rank in one.ranks for one in summary.matched)
    read = " of those read" if summary.missing else ""
    last = f"is last{read} in {often.arrived_last:,} of {counted(taken_part, 'collective')}"
    waiting = max((one for one in summary.ranks if one is not slow), key=lambda one: one.waited_exposed_us)
    us, exposed = (_each_step(waiting, us) for us in (waiting.waiting_us, waiting.waited_exposed_us))
    nothing = "computes nothing meanwhile" if us == exposed else f"computes nothing for {exposed} of that"
    longest = "longest, " if len(summary.ranks) > 2 else ""
    waits = f"rank {waiting.rank} waits {longest}{us} per step, and {nothing} {_of_step(waiting)}"
    if slow:
        of_all = slow.others_waited_us / sum(one.others_waited_us for one in summary.ranks)
        seldom = slow.arrived_last < 0.9 * taken_part
        mostly = f", {of_all:.0%} of all waiting is for it" if seldom or of_all <= CAUSES_IT else ""
        if of_all <= CAUSES_IT:
            mostly += ", and most of the rest is for ranks of its group, which wait for it first"
        return [f"rank {slow.rank} keeps the others waiting: it {last}{mostly}", waits]
    told_apart = _told_apart(summary, summary.clocks.lead_us)
    if share(waiting, waiting.waited_exposed_us) <= MUCH_WAITED:
        whom = " for a rank that was read" if summary.missing else ""
        return [f"no rank loses much time by waiting{whom}: {waits}", *[f"rank {often.rank} {last}"] * told_apart]
    slowest = sorted(((us, rank) for rank, (us, _) in _beyond(summary).items()), key=lambda one: -one[0])
    if not _last_is_known(summary):
        later = f"the last one is later than the one before it by a median of {_us(summary.clocks.lead_us)}"
        off = f"the clocks may be off by {_us(summary.clocks.apart_us)}"
        return [f"it is not known which rank arrives last: {later}, and {off}"]
    first = f"the ranks wait for each other: {waits}"
    if len(slowest) > 1:
        told = listed([f"rank {rank} by {ms(us)}" for us, rank in slowest], most=3)
        return [first, f"{len(slowest):,} ranks take longer per step than the median of all: {told}"]
    for us, only in slowest:
        if (why := loss(summary)) and why.rank == only:
            return [first]  # the reason is a sentence of its own
        return [first, f"rank {only} takes {ms(us)} longer per step than the median of all ranks"]
    return [first, *[f"rank {often.rank} {last}, the most often"] * told_apart]


HOST_SAYS = {
    "computes": "they compute longer", "copies": "their copies take longer", "launches late": "their CPUs launch late",
    "waits for data": "they wait for the DataLoader", "idle": "they are idle for another reason",
}  # fmt: skip


def listed(some: Sequence, most: int = 8) -> str:
    """Return the first names, and the number of the others."""
    if len(some) > most:
        return f"{', '.join(map(str, some[:most]))} and {len(some) - most:,} more"
    return " and ".join(filter(None, (", ".join(map(str, some[:-1])), str(some[-1]))))


NOT_READ = {
    "unreadable": "{0.detail}", "failed": "{0.detail}",
    "killed": "the process that read it was killed",
    "front_end": "it has no launch and no GPU work, as the front end of a server",
    "no_rank": "it does not record its rank (distributedInfo)",
    "other_world_size":
        "from another run: rank {0.rank} of {0.world_size}, but the others have {0.other_world_size} ranks",
    "other_time": "from another run, or by a clock that is off: rank {0.rank} was recorded {0.seconds:,.1f} s "
        "earlier or later than the others",
    "no_common_step": "rank {0.rank} has no step {step}, which most others have",
    "same_rank": "another trace of rank {0.rank}: {0.detail} is read instead",
    "no_answer": "the process that reads it did not answer: nothing has arrived for {0.seconds:,.0f} s",
}  # fmt: skip


def why_not_read(one: NotRead) -> str:
    """Return why a rank's trace is left out, in words."""
    return NOT_READ[one.reason].format(one, step=one.detail.removeprefix(STEP[:-1]))


def _us(us: float) -> str:
    return f"{us:,.1f} µs" if us < 1000 else ms(us)


def _why(why: Loss, summary: RanksSummary) -> str:
    others = [one.rank for one in summary.ranks if one.rank != why.rank]
    them = f"rank {others[0]}" if len(others) == 1 else "the other ranks' median"
    slower = f"{in_some_steps(summary, why.steps)}rank {why.rank} is slower than {them}"
    if not why.reasons:
        figures = f"{ms(why.own_us)} a step against {ms(why.others_us)}"
        return f"{slower}: {figures} without exposed communication"
    told = in_words(why.reasons, summary.on_gpu)
    late = _of_a_late_cpu(summary, why.rank) if any(one.part == "launches late" for one in why.reasons) else []
    return f"{slower} because {'; '.join(['; and because '.join(told), *late])}"


def _of_a_late_cpu(summary: RanksSummary, rank: int) -> Iterator[str]:
    """Yield what a rank's CPU does more than the others' medians: launches, and time from launch to launch."""
    (mine,) = (one for one in summary.ranks if one.rank == rank)
    others = [one for one in summary.ranks if one is not mine]
    launches, usual_launches = per_step(mine, mine.launches), median(per_step(one, one.launches) for one in others)
    if usual_launches and launches > (1 + MORE_LAUNCHES) * usual_launches:
        yield f"it launches {launches:,.0f} times per step instead of {usual_launches:,.0f}"
    speeds = [one.between_launches_us for one in others if one.between_launches_us]
    times = mine.between_launches_us / median(speeds) if speeds and mine.between_launches_us else 1.0
    if times >= CPU_IS_SLOWER:
        yield f"from launch to launch its CPU takes {times:.2g} times as long"


def in_some_steps(summary: RanksSummary, steps: Sequence[str]) -> str:
    """Return the beginning of a sentence on these steps; "" if they are all."""
    if len(steps) == len(summary.steps):
        return ""
    names = listed([name.removeprefix(STEP[:-1]) for name in steps], most=4)
    return f"in {len(steps)} of {counted(len(summary.steps), 'step')} ({names}), "


def in_words(reasons: Sequence[Reason], on_gpu: bool) -> Iterator[str]:
    """Yield each reason as a sentence about the rank."""
    idle = "its GPU is idle {} longer per step for another reason" if on_gpu else "it runs no op for {} longer per step"
    says = {
        "computes": "it computes {} longer per step",
        "copies": "its copies take {} longer per step",
        "launches late": "its CPU launches late: the GPU waits {} longer per step for launches",
        "waits for data": "it waits {} longer per step for the DataLoader",
        "idle": idle,
    }
    for one in reasons:
        us, place = one.more_us, ""
        if one.phase is not None:
            place = f" {one.phase}" if one.phase == OUTSIDE_ANNOTATIONS else f" in {one.phase}"
            if one.phase_us > NEARLY_ALL * us:  # it exceeds the whole if other phases are shorter
                us = one.phase_us
            else:
                place = f", {ms(one.phase_us)} of it{place}"
        yield says[one.part].format(ms(us)) + place


def link_in_words(link: SlowLink) -> str:
    """Return a slow link in words, by its message and bandwidth."""
    reached = f"{_us(link.transfer_us)}, other groups {_us(link.others_us)}"
    if None not in (link.bus_gb_s, link.others_gb_s):
        reached = f"{link.bus_gb_s:,.3g} GB/s, other groups {link.others_gb_s:,.3g} GB/s"
    return f"probably a slow link: {link.kind} of {size(link.bytes)} at {reached}"


def of_one(summary: RanksSummary, rank: int) -> list[str]:
    """Return sentences on one rank: whether it is slower and why, its waits, and the others' waits for it."""
    one = next(each for each in summary.ranks if each.rank == rank)
    found = []
    if len(summary.ranks) > 1 and summary.steps:
        figures = _where_slow(summary, rank)
        more, step = figures.more(rank, None, "own"), figures.of(None, "us")[rank]
        others = "the other ranks' median" if len(summary.ranks) > 2 else "the other rank"
        if more > MUCH_LONGER * step:
            why = "; and because ".join(in_words(figures.reasons(rank, more), summary.on_gpu))
            told = f"{in_some_steps(summary, figures.steps)}rank {rank} takes {ms(more)} longer per step than {others}"
            found.append(f"{told} because {why}" if why else f"{told}, for no single reason")
        else:
            found.append(f"rank {rank} is not slower than {others} without exposed communication")
    mine = [each for each in summary.matched if rank in each.ranks]
    waits = totals((each.last, each.waits_us[each.ranks.index(rank)]) for each in mine)
    for whom, most in waits.most_common(1):
        exposed = f"{_each_step(one, one.waited_exposed_us).removesuffix(' ms')} of it exposed"
        found += [
            f"it waits {_each_step(one, one.waiting_us)} per step for others, {exposed} {_of_step(one)}"
            + (f", {most / sum(waits.values()):.0%} of it for rank {whom}" if most else ""),
            f"it is last in {one.arrived_last:,} of {counted(len(mine), 'collective')}; all others together wait "
            f"{_each_step(one, one.others_waited_us)} per step for it",
        ]
    if one.message_waits.messages:
        waited = f"{_each_step(one, one.message_waits.us)} per step for the other side of its messages"
        found.append(f"it waits {waited} while it computes nothing {_of_step(one, one.message_waits.us)}")
    return found or [_nothing_matched(summary)]


def _each_step(one: RankFigures, us: float) -> str:
    return ms(per_step(one, us))


def _of_step(one: RankFigures, us: float | None = None) -> str:
    """Return a time (µs) as a share of a rank's step in words; without a time, its exposed waits in collectives."""
    return f"({share_of_steps(one, one.waited_exposed_us if us is None else us):.1%} of the step)"


def _exposed(summary: RanksSummary) -> list[str]:
    """Return sentences on the rank with the most exposed communication: the cost per step, and why it is exposed."""
    worst = max(summary.ranks, key=lambda one: share_of_steps(one, in_steps(one).exposed_communication_us))
    communication, exposed = in_steps(worst).communication_us, in_steps(worst).exposed_communication_us
    if not communication:
        return []
    together, told = worst.together_exposed_us, lambda us: _each_step(worst, us)
    behind = f"{1 - exposed / communication:.0%} of it hidden behind compute"
    line = f"communication: rank {worst.rank} {told(communication)} per step, {behind}; "
    line += f"{told(exposed)} exposed {_of_step(worst, exposed)}"
    last = ""
    if worst.exposed_in_last_us > MOST * together:
        last = f" ({told(worst.exposed_in_last_us)} in the last collective of each step)"
    lacks = (
        summary.unmatched, summary.unmatched_messages, summary.unnamed, summary.clocks.not_aligned, summary.missing
    )  # fmt: skip
    where = {
        "waiting for others": worst.waited_exposed_us,
        f"after the last rank {'that was read ' * bool(summary.missing)}arrived{last}": together,
        "in sends and receives": worst.message_waits.exposed_us,
        f"in communication {'that is not matched' if any(lacks) else 'launched outside the steps'}":
            _not_matched_us(worst),
    }  # fmt: skip
    why = [f"{told(us)} {words}" for words, us in where.items() if us > 0.05 * exposed]
    return [line, *(["exposed: " + "; ".join(why)] if why else [])]
