"""What the figures of several ranks mean: who waits for whom, why, and why communication is exposed."""

from collections.abc import Callable
from statistics import median

import msgspec

from tracereader.figures.rank import OUTSIDE_ANNOTATIONS, Times
from tracereader.figures.ranks import RankFigures, RanksSummary
from tracereader.findings.finding import counted, size

# Share of a rank's time in exposed waiting for other ranks that is worth naming. On two H200s: 31% in FSDP with a CPU
# that launches late, 8% with a rank that computes more, 0.5% in plain DDP.
MUCH_WAITED = 0.02
# Share of a step by which a rank, or the transfers of a group, must take longer to be named. What is shorter cannot
# make another rank wait for a share of its time that is worth naming.
MUCH_LONGER = MUCH_WAITED
# Share of all waiting that one rank must cause to be named. It caused all of it in the three runs above; where two
# ranks on two cores of a laptop took turns, 56%.
CAUSES_IT = 2 / 3
MOST = 0.5
# A reason is named if it explains at least this share of a rank's extra time.
A_REASON = 0.2
# A phase is named alone if it has at least this share of a reason's time.
NEARLY_ALL = 0.9
# Times the others' transfers of one message: on two H200s the same message takes up to 1.3 times the median.
MUCH_SLOWER = 2
# Arrivals closer than this multiple of the clocks' error are not ordered.
BEYOND_THE_CLOCKS = 2


class Reason(msgspec.Struct, frozen=True):
    """A part of a rank's step (a key of PARTS) that is longer than the others'; more_us: by how much per step.

    phase: has most of the extra time, phase_us of it; None if no phase has most.
    """

    part: str
    more_us: float
    phase: str | None
    phase_us: float | None


class Loss(msgspec.Struct, frozen=True):
    """Why a rank is slower than the others. own: without exposed communication; medians per step, in µs."""

    rank: int
    own_us: float
    others_us: float
    reasons: tuple[Reason, ...]  # the largest first


class SlowLink(msgspec.Struct, frozen=True):
    """A group of ranks whose transfers of one kind and size take longer than other groups'. Medians, in µs.

    more_us: what they take longer in all, in a step.
    """

    ranks: tuple[int, ...]
    kind: str
    bytes: int
    transfer_us: float
    others_us: float
    more_us: float


def share(one: RankFigures, us: float) -> float:
    """Of a rank's window."""
    return us / one.window_us if one.window_us else 0.0


def ms(us: float) -> str:
    """Always in ms, so that the ranks' figures can be compared with each other at a glance."""
    if 0 < us < 1:
        return "under 0.001 ms"
    return f"{us / 1e3:,.1f} ms" if us >= 50 or not us else f"{us / 1e3:.2g} ms"


def straggler(summary: RanksSummary) -> RankFigures | None:
    """The rank that the others wait for most, if the waiting costs them enough."""
    total = sum(one.others_waited_us for one in summary.ranks)
    if not total:
        return None
    slow = max(summary.ranks, key=lambda one: one.others_waited_us)
    others = [one for one in summary.ranks if one is not slow]
    costs = max((share(one, one.waited_exposed_us) for one in others), default=0.0)
    return slow if slow.others_waited_us > CAUSES_IT * total and costs > MUCH_WAITED and _told_apart(summary) else None


def _told_apart(summary: RanksSummary) -> bool:
    """Whether the clocks are accurate enough to decide which rank arrives last."""
    apart = summary.clocks.apart_us
    if apart is None or not (summary.on_gpu or summary.clocks.aligned):
        return True  # one CPU's clock
    return median(one.lead_us for one in summary.matched) > BEYOND_THE_CLOCKS * apart


def own(one: Times) -> float:
    """Time without exposed communication."""
    return one.us - one.exposed_communication_us


def _launching(one: Times) -> float:
    """Idle time before a launch that no DataLoader holds up."""
    return max(0.0, one.idle_not_launched_us - one.idle_loading_us)


PARTS: dict[str, Callable[[Times], float]] = {
    "computes": lambda one: one.compute_us,
    "copies": lambda one: one.exposed_copy_us,
    "launches late": _launching,
    "waits for data": lambda one: one.idle_loading_us,
    "idle": lambda one: one.idle_us - one.idle_loading_us - _launching(one),
}


def usual(summary: RanksSummary, rank: RankFigures, phase: str | None, figure: Callable[[Times], float]) -> float:
    """The median over the common steps of a figure, for one phase or for the whole step."""
    found = []
    for step in rank.steps:
        if step.name in summary.steps:
            some = [step] if phase is None else [one for one in step.phases if one.name == phase]
            found.append(sum(figure(one) for one in some))
    return median(found) if found else 0.0


def phases(summary: RanksSummary) -> list[str]:
    """The names of the steps' phases that all ranks have, in order."""
    names = [dict.fromkeys(one.name for step in rank.steps for one in step.phases) for rank in summary.ranks]
    return [name for name in names[0] if all(name in some for some in names)] if names else []


def loss(summary: RanksSummary) -> Loss | None:
    """Why the rank that the others wait for is slower; None if no rank or no reason is clear."""
    slow = straggler(summary) or _most_often_last(summary)
    if slow is None:
        return None
    others = [one for one in summary.ranks if one is not slow]

    def more(phase: str | None, figure: Callable[[Times], float]) -> float:
        theirs = median(usual(summary, one, phase, figure) for one in others)
        return usual(summary, slow, phase, figure) - theirs

    longer = more(None, own)
    # Its extra time explains the waiting only if it is about as long.
    waited = max(one.waited_exposed_us for one in others) / max(1, len(summary.steps))
    if longer <= max(MOST * waited, MUCH_LONGER * usual(summary, slow, None, lambda one: one.us)):
        return None
    reasons = []
    for part, figure in PARTS.items():
        if (us := more(None, figure)) > A_REASON * longer:
            by_phase = {phase: more(phase, figure) for phase in phases(summary)}
            phase = max(by_phase, key=by_phase.get, default=None)
            named = phase is not None and by_phase[phase] > MOST * us
            reasons.append(Reason(part, us, phase if named else None, by_phase[phase] if named else None))
    return Loss(
        rank=slow.rank,
        own_us=usual(summary, slow, None, own),
        others_us=median(usual(summary, one, None, own) for one in others),
        reasons=tuple(sorted(reasons, key=lambda one: -max(one.more_us, one.phase_us or 0.0))),
    )


def _most_often_last(summary: RanksSummary) -> RankFigures | None:
    """The rank that is last in most collectives. The others may compute in the meantime."""
    if len(summary.ranks) < 2 or not summary.matched or not _told_apart(summary):
        return None
    often = max(summary.ranks, key=lambda one: one.arrived_last)
    taken_part = sum(often.rank in one.ranks for one in summary.matched)
    return often if often.arrived_last > CAUSES_IT * taken_part else None


def slow_link(summary: RanksSummary) -> SlowLink | None:
    """The group that loses most by transfers slower than the same messages of other groups; None without one."""
    same: dict[tuple, dict[tuple, list[float]]] = {}
    for one in summary.matched:
        if one.bytes:
            groups = same.setdefault((one.kind, one.bytes, one.size), {})
            groups.setdefault(one.ranks, []).append(one.transfer_us)
    found = []
    for (kind, message, _), groups in same.items():
        usual_us = {ranks: median(some) for ranks, some in groups.items()}
        for ranks, us in usual_us.items():
            others = [theirs for other, theirs in usual_us.items() if other != ranks]
            if others and us > MUCH_SLOWER * (theirs := median(others)):
                more = sum(one - theirs for one in groups[ranks]) / max(1, len(summary.steps))
                found.append(SlowLink(ranks, kind, message, us, theirs, more))
    worst = max(found, key=lambda one: one.more_us, default=None)
    if worst is None:
        return None
    window = max(one.window_us for one in summary.ranks if one.rank in worst.ranks) / max(1, len(summary.steps))
    return worst if worst.more_us > MUCH_LONGER * window else None


def sentences(summary: RanksSummary) -> list[str]:
    """The answer's sentences: who waits for whom, where time is lost, and what communication costs."""
    if not summary.matched:
        return [_nothing_matched(summary)]
    slow = straggler(summary)
    found = _who_waits(summary, slow)
    if why := loss(summary):
        found.insert(1, _why(why, summary))
    if link := slow_link(summary):
        found.append(_of_link(link))
    return [*found, *_exposed(summary)]


def _nothing_matched(summary: RanksSummary) -> str:
    if summary.unmatched or summary.unnamed:
        return "the collectives of these ranks cannot be matched, so it is not known who waits for whom"
    if len(summary.ranks) == 1:
        return f"only rank {summary.ranks[0].rank} could be read, so there is no rank to compare it with"
    if any(one.communication_us for one in summary.ranks):
        return "these ranks send and receive point to point in the steps, so it is not known who waits for whom"
    return "no collective in the steps, so no rank waits for another"


def _who_waits(summary: RanksSummary, slow: RankFigures | None) -> list[str]:
    often = slow or max(summary.ranks, key=lambda one: (one.arrived_last, one.others_waited_us))
    taken_part = sum(often.rank in one.ranks for one in summary.matched)
    read = " of those read" if summary.missing else ""
    last = f"it is last{read} in {often.arrived_last:,} of {counted(taken_part, 'collective')}"
    if not _told_apart(summary):
        return [
            "it is not known which rank arrives last: the last one is later than the one before it by a median of "
            f"{_us(median(one.lead_us for one in summary.matched))}, and the clocks may be off by "
            f"{_us(summary.clocks.apart_us)}"
        ]
    waiting = max((one for one in summary.ranks if one is not slow), key=lambda one: one.waited_exposed_us)
    cost = share(waiting, waiting.waited_exposed_us)
    waits = (
        f"rank {waiting.rank} waits {'longest: ' if len(summary.ranks) > 2 else ''}{ms(waiting.waiting_us)}, "
        f"{ms(waiting.waited_exposed_us).removesuffix(' ms')} of it exposed ({cost:.1%} of its time)"
    )
    if slow:
        of_all = slow.others_waited_us / sum(one.others_waited_us for one in summary.ranks)
        mostly = f", {of_all:.0%} of all waiting is for it" if slow.arrived_last < 0.9 * taken_part else ""
        return [f"rank {slow.rank} keeps the others waiting: {last}{mostly}", waits]
    if cost <= MUCH_WAITED:
        return [f"no rank loses much time by waiting: {waits}", f"rank {often.rank} {last.removeprefix('it ')}"]
    return [f"the ranks wait for each other: {waits}", f"rank {often.rank} {last.removeprefix('it ')}, the most often"]


def _us(us: float) -> str:
    return f"{us:,.1f} µs" if us < 1000 else ms(us)


def _why(why: Loss, summary: RanksSummary) -> str:
    others = [one.rank for one in summary.ranks if one.rank != why.rank]
    them = f"rank {others[0]}" if len(others) == 1 else "the other ranks' median"
    if not why.reasons:
        figures = f"{ms(why.own_us)} a step against {ms(why.others_us)}"
        return f"rank {why.rank} is slower than {them}: {figures} without exposed communication"
    says = {
        "computes": "it computes {} longer per step",
        "copies": "its copies take {} longer per step",
        "launches late": "its CPU launches late: the GPU waits {} longer per step for launches",
        "waits for data": "it waits {} longer per step for the DataLoader",
        "idle": "its GPU is idle {} longer per step for another reason"
        if summary.on_gpu
        else "it runs no op for {} longer per step",
    }
    told = []
    for one in why.reasons:
        place = one.phase if one.phase in (OUTSIDE_ANNOTATIONS, None) else f"in {one.phase}"
        if place is None:
            told.append(says[one.part].format(ms(one.more_us)))
        elif one.phase_us > NEARLY_ALL * one.more_us:  # more than all of it, where other phases are shorter
            told.append(f"{says[one.part].format(ms(one.phase_us))} {place}")
        else:
            told.append(f"{says[one.part].format(ms(one.more_us))}, {ms(one.phase_us)} of it {place}")
    return f"rank {why.rank} is slower than {them} because {'; and because '.join(told)}"


def _of_link(link: SlowLink) -> str:
    ranks = f"{', '.join(map(str, link.ranks[:-1][:8]))} and {link.ranks[-1]}"
    return (
        f"ranks {ranks} are probably connected by a slow link: {link.kind} of {size(link.bytes)} takes them "
        f"{_us(link.transfer_us)} after the last one arrives, other groups {_us(link.others_us)}; this costs them "
        f"{ms(link.more_us)} a step"
    )


def _exposed(summary: RanksSummary) -> list[str]:
    """The cost of exposed communication on the rank with the most of it, and why it is exposed."""
    worst = max(summary.ranks, key=lambda one: share(one, one.exposed_communication_us))
    exposed = worst.exposed_communication_us
    if not worst.communication_us:
        return []
    together = worst.together_exposed_us
    lines = [
        f"communication: rank {worst.rank} {ms(worst.communication_us)}, "
        f"{1 - exposed / worst.communication_us:.0%} of it hidden behind compute; {ms(exposed)} exposed "
        f"({share(worst, exposed):.1%})"
    ]
    why = []
    if worst.waited_exposed_us > 0.05 * exposed:
        why.append(f"{ms(worst.waited_exposed_us)} waiting for others")
    if together > 0.05 * exposed:
        last = ""
        if one_bucket(summary, worst):
            last = " (one all-reduce per step, while nothing is computed)"
        elif worst.exposed_in_last_us > MOST * together:
            last = f" ({ms(worst.exposed_in_last_us)} in the last collective of each step)"
        why.append(f"{ms(together)} after the last rank arrived{last}")
    if (rest := exposed - worst.waited_exposed_us - together) > 0.05 * exposed:
        known = not (summary.unmatched or summary.unnamed or summary.clocks.not_aligned)
        why.append(
            f"{ms(rest)} in "
            + ("collectives launched outside the steps" if known else "collectives that are not matched")
        )
    if worst.late_us > MOST * exposed:
        why.append(f"for {ms(worst.late_us)} of it the CPU had not launched the next kernel")
    if why:
        lines.append("exposed: " + "; ".join(why))
    return lines


def one_bucket(summary: RanksSummary, one: RankFigures) -> bool:
    """Whether each step has one exposed all-reduce, which begins when the last gradient is ready."""
    mine = [each for each in summary.matched if one.rank in each.ranks]
    return (
        len(mine) == len(summary.steps) == len({each.step for each in mine})
        and {each.kind for each in mine} == {"all-reduce"}
        and one.hidden == 0
        and one.exposed_communication_us > 0.9 * one.communication_us
    )
