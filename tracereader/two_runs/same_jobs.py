"""Whether a job of several ranks makes a change of another one: what the judges of these changes ask."""

from collections import Counter
from collections.abc import Callable

from tracereader.figures.ranks import RankFigures, RanksSummary
from tracereader.findings.ranks import per_step, slowest_stage

SHARDED = ("all-gather", "reduce-scatter")
# The share by which the number of kernels or bytes of two jobs may differ if one job makes a change of the other, and
# the factor for the kernels' times. DDP's buckets made compute 1.2 times as long on four H200s.
SAME_WORK, SAME_TIME = 0.1, 1.5


def _per_step(summary: RanksSummary, figure: Callable[[RankFigures], float]) -> list[float]:
    """Return a figure of each rank's window, per step."""
    return [per_step(one, figure(one)) for one in summary.ranks]


def _same_work(before: RanksSummary, after: RanksSummary) -> bool:
    """Return whether the ranks of two jobs together launch about as many kernels per step, which take about as long."""
    counts = [sum(_per_step(one, lambda rank: rank.kernels)) for one in (before, after)]
    times = [sum(_per_step(one, lambda rank: rank.total.compute_us)) for one in (before, after)]
    return max(counts) <= (1 + SAME_WORK) * min(counts) and max(times) <= SAME_TIME * min(times)


def evens_out(before: RanksSummary, after: RanksSummary) -> bool:
    """Return whether the ranks of a job wait for late ranks at most half as long as those of another."""
    waited, later = (max(_per_step(one, lambda rank: rank.waited_exposed_us)) for one in (before, after))
    return _same_work(before, after) and later < waited / 2


def splits_more(before: RanksSummary, after: RanksSummary) -> bool:
    """Return whether a job sends as many bytes per step as another in at least 1.5 times as many messages."""
    counts = [len(one.messages) / max(1, len(one.steps)) for one in (before, after)]
    sent = [sum(each.bytes or 0 for each in one.messages) / max(1, len(one.steps)) for one in (before, after)]
    return counts[1] >= 1.5 * counts[0] > 0 and max(sent) <= (1 + SAME_WORK) * min(sent)


def evens_out_stages(before: RanksSummary, after: RanksSummary) -> bool:
    """Return whether at most half remains of what a pipeline's slowest stage computes beyond the mean stage."""
    beyond = [(slow.us / slow.mean_us - 1 if slow else 0.0) for slow in map(slowest_stage, (before, after))]
    return _same_work(before, after) and beyond[1] < beyond[0] / 2


def _kinds(summary: RanksSummary) -> Counter:
    """Return the number of collectives of each kind per step."""
    steps = max(1, len(summary.steps))
    return Counter({kind: count / steps for kind, count in Counter(one.kind for one in summary.matched).items()})


def gathers_less(before: RanksSummary, after: RanksSummary) -> bool:
    """Return whether a job gathers at most two thirds as often as another, and scatters as often."""
    was, now = map(_kinds, (before, after))
    gathers, scatters = SHARDED
    return 0 < now[gathers] <= 2 / 3 * was[gathers] and was[scatters] == now[scatters]


def _reductions(summary: RanksSummary) -> tuple[float, float]:
    """Return the number of collectives that reduce gradients per step, and their bytes together."""
    reduced = [one.bytes or 0 for one in summary.matched if one.kind in ("all-reduce", "reduce-scatter")]
    steps = max(1, len(summary.steps))
    return len(reduced) / steps, sum(reduced) / steps


def reduces_less_often(before: RanksSummary, after: RanksSummary) -> bool:
    """Return whether a job has at most two thirds of the reductions of another, of the same mean size."""
    (was, of), (now, later) = _reductions(before), _reductions(after)
    return 0 < now <= 2 / 3 * was and of > 0 and abs(later / now / (of / was) - 1) <= SAME_WORK


def sends_no_buffers(before: RanksSummary, after: RanksSummary) -> bool:
    """Return whether a job has no broadcasts where another has some, and otherwise the same collectives."""
    was, now = map(_kinds, (before, after))
    return was.pop("broadcast", 0) > 0 and "broadcast" not in now and was == now


def sends_half(before: RanksSummary, after: RanksSummary) -> bool:
    """Return whether a job has as many reductions as another, of about half the size."""
    (was, of), (now, later) = _reductions(before), _reductions(after)
    return 0 < was == now and of > 0 and abs(2 * later / of - 1) <= SAME_WORK
