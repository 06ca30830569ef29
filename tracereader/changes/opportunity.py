"""An opportunity: one change of the program, and the step's time after it."""

from collections.abc import Iterable, Sequence

import msgspec

from tracereader.figures.users_code import Function
from tracereader.findings.finding import WORTH_SHOWING
from tracereader.replay import Graph
from tracereader.replay.changes import cpu_factor, step_us_at
from tracereader.replay.recorded import TOLERANCE

# An estimated range reaches this share beyond the replayed savings at both ends of the estimate. Where the CPU limits,
# the step after the change may also take CPU_ERROR more or less, even if the step without the profiler is known, since
# that is one process. It is no bound: some measured savings lie outside (benchmarks/scoreboard.py counts them).
REPLAY_ERROR = 0.02
# What a program may not be able to do stands among the changes as if it saved this share of what it saves.
CONDITIONAL = 0.5
CLEARLY = 0.05  # what makes the recorded step longer has to save at least this share without the profiler


class Opportunity(msgspec.Struct, frozen=True, rename={"how": "try"}):
    """A change and the recorded step's time (µs) before and after it.

    unprofiled_*: the same times without the profiler, which makes the CPU's time longer; None if the run did not
    measure its step without the profiler. estimated_savings: the smallest and the largest share that the change may
    save without the profiler, which are no bounds; None if the CPU limits neither that step nor the recorded one, or
    if the estimate does not matter (Case.estimates_after). replayed_savings: the shares at both ends of the estimate of
    recording.py, which estimated_savings widens by their error. basis: `replay`
    if only times and dependencies of this trace are used, `bound` if a hardware limit or a typical rate is assumed.
    how: one line on how to try it. kernels: the names of the typical step's GPU activities that the change makes
    shorter or removes; empty if only CPU work changes. replayed: the replayed step divided by the recorded one, if they
    differ so much that the saving is uncertain; otherwise None. needs_other_ranks: whether the change makes collectives
    shorter in the trace of one rank of many, which does not show what that saves; only its other savings are counted.
    conditional: whether the trace does not show that the program can make the change. function: the user's own function
    around what changes, if the trace has stacks.
    """

    change: str
    title: str
    step_us: float
    step_us_after: float
    saves_us: float
    basis: str
    evidence: str
    how: str
    unprofiled_step_us: float | None = None
    unprofiled_step_us_after: float | None = None
    estimated_savings: tuple[float, float] | None = None
    replayed_savings: tuple[float, float] | None = None
    kernels: tuple[str, ...] = ()
    replayed: float | None = None
    needs_other_ranks: bool = False
    conditional: bool = False
    function: Function | None = None

    @property
    def knows_unprofiled(self) -> bool:
        """Return whether the times without the profiler are known."""
        return self.unprofiled_step_us is not None and self.unprofiled_step_us_after is not None

    @property
    def times_us(self) -> tuple[float, float]:
        """Return the step before and after the change without the profiler, or while recorded if that is unknown."""
        if self.knows_unprofiled:
            return self.unprofiled_step_us, self.unprofiled_step_us_after
        return self.step_us, self.step_us_after

    @property
    def likely_share(self) -> float:
        """Return one share for the saving: that of the known step without the profiler, or the middle of the range."""
        if self.estimated_savings is None or self.knows_unprofiled:
            return self.share
        # The printed range ends at 0, so that its middle is more than what is likely.
        return max(0.0, sum(self.replayed_savings or self.estimated_savings) / 2)

    @property
    def is_unknown(self) -> bool:
        """Return whether what is counted is too little to show, so that only the other ranks' traces show a saving."""
        return self.needs_other_ranks and not is_worth_showing(self)

    @property
    def share(self) -> float:
        """Return the share that the change saves of the step that times_us gives."""
        before, after = self.times_us
        return 1 - after / before


class Proposal(msgspec.Struct, frozen=True):
    """The graph after a change, the figures that are the reason for it, and how to try it.

    assumed: whether the graph contains a hardware limit or a typical rate. title: a title that is more specific than
    the change's. shared: the number of today's batches that the changed step serves; its time is given for one batch.
    unrecorded: whether the change removes CPU time in which nothing is recorded, which the profiler makes no longer.
    least_us: a time that the step takes at least after the change. conditional: whether the trace does not show that
    the program can make the change. most: the graph if the change saves as much as the trace leaves possible. error: of
    the step after the change, as a share of it, where the step depends on how the program is written then.
    """

    graph: Graph
    evidence: str
    how: str
    assumed: bool = False
    title: str | None = None
    shared: int = 1
    unrecorded: bool = False
    least_us: float = 0.0
    conditional: bool = False
    most: Graph | None = None
    error: float = 0.0


def priced(
    name: str,
    title: str,
    proposal: Proposal,
    unprofiled: "Unprofiled | None" = None,
    estimates: "Sequence[Unprofiled]" = (),
    error: float = 0.0,
    unexplained_us: float = 0.0,
    gpu_bound: bool = False,
) -> Opportunity:
    """Return the opportunity of a proposal.

    name, title: the change's. estimates: the ends of the estimate without the profiler; see Case.estimates_after().
    error: of the step after the change, as a share of it. unexplained_us: see recording.py; all of it, or nothing, may
    lie in what the change removes. gpu_bound: see is_gpu_bound() there.
    """
    before, graph, error = proposal.graph.recorded_us, proposal.graph, max(error, proposal.error)
    # The replay of the unchanged step may be off by more than a small change saves, and is off by it after the change.
    after = max(before * (graph.step_us() / graph.replayed_us) / proposal.shared, proposal.least_us)
    if after > before and not (unprofiled or gpu_bound):
        estimates = ()  # such a change is not shown: see is_worth_showing()
    replayed = graph.replayed_us / before
    uncertain = f"; uncertain, because the replay of the unchanged step takes {replayed:.0%} of the recorded time"
    uncertain *= abs(replayed - 1) > TOLERANCE
    ends = [1 - _without_profiler(proposal, one, before - after) / one.step_us for one in estimates]
    without, spread = None, ends
    if unprofiled:
        without = _without_profiler(proposal, unprofiled, before - after)
        # A change that saves no CPU time saves nothing if the CPU needs the whole step.
        spread = ends = [max(0.0, one) for one in ends]
        if ends and not unprofiled.is_middle:
            without = unprofiled.step_us * (1 - sum(ends) / 2)
        elif unexplained_us:
            spread = [
                max(0.0, min(1.0, us / unprofiled.step_us)) for us in (before - after - unexplained_us, before - after)
            ]
            without = unprofiled.step_us * (1 - sum(spread) / 2)
        elif error and not ends:  # the measured step is one process's
            spread = [1 - without / unprofiled.step_us]
    if proposal.most is not None:
        best = msgspec.structs.replace(proposal, graph=proposal.most, most=None, least_us=0.0)
        most = priced(name, title, best, unprofiled, estimates, gpu_bound=gpu_bound)
        spread = [*(spread or [1 - (without or after) / most.times_us[0]]), *(most.replayed_savings or [most.share])]
        without = unprofiled and unprofiled.step_us * (1 - (min(spread) + max(spread)) / 2)
        after = (min(after, before) + most.step_us_after) / 2  # the program need not be made slower
    return Opportunity(
        change=name,
        title=proposal.title or title,
        step_us=before,
        step_us_after=after,
        saves_us=before - after,
        basis="bound" if proposal.assumed else "replay",
        evidence=proposal.evidence + uncertain,
        how=proposal.how,
        unprofiled_step_us=unprofiled.step_us if unprofiled else None,
        unprofiled_step_us_after=without,
        estimated_savings=_with_error(min(spread), max(0.0, *spread), error) if spread else None,
        replayed_savings=(min(spread), max(spread)) if ends else None,
        replayed=replayed if uncertain else None,
        conditional=proposal.conditional,
    )


def _with_error(least: float, most: float, error: float) -> tuple[float, float]:
    """Return the range of saved shares, also if the step after the change takes up to this share more or less."""
    low, high = 1 - (1 - least) * (1 + error), 1 - (1 - most) * (1 - error)
    return max(0.0, low - REPLAY_ERROR), min(1.0, high + REPLAY_ERROR)


def _without_profiler(proposal: Proposal, unprofiled: "Unprofiled", saves_us: float) -> float:
    """Return the step's time after a change without the profiler (µs). saves_us: of the recorded step."""
    factor = 0.0 if proposal.unrecorded else unprofiled.factor
    after = unprofiled.scale * step_us_at(proposal.graph, factor) / proposal.shared
    if proposal.unrecorded:
        after = max(after, unprofiled.step_us - saves_us)
    return max(after, proposal.least_us)


def is_worth_showing(one: Opportunity) -> bool:
    """Return whether a change saves enough.

    What makes the recorded step longer has to save CLEARLY without the profiler. Where that time is known and not
    estimated, the recorded step may become longer by WORTH_SHOWING in any case.
    """
    least = WORTH_SHOWING if one.replayed is None else abs(one.replayed - 1)  # the replay cannot show less
    longer = WORTH_SHOWING * one.step_us if one.knows_unprofiled and not one.replayed_savings else 0.0
    if one.saves_us < -longer:
        return bool(one.knows_unprofiled or one.replayed_savings) and one.likely_share > max(least, CLEARLY)
    most = one.replayed_savings[1] if one.replayed_savings and not one.knows_unprofiled else one.share
    return max(one.share, most) > least


def worth_showing(found: Iterable[Opportunity]) -> tuple[Opportunity, ...]:
    """Return the opportunities that save enough. The largest saving comes first.

    The step without the profiler decides both if it is known. Recording makes the CPU slower, and can hide a saving. If
    that time is only estimated, the middle of the estimated savings decides the order.
    """
    return largest_first(one for one in found if one.needs_other_ranks or is_worth_showing(one))


def largest_first(found: Iterable[Opportunity]) -> tuple[Opportunity, ...]:
    """Return the opportunities in the order of the time that they save, the largest first."""

    def likely_us(one: Opportunity) -> float:
        return one.times_us[0] * one.likely_share * (CONDITIONAL if one.conditional else 1)

    return tuple(sorted(found, key=lambda one: (-likely_us(one), -one.saves_us)))


class Unprofiled(msgspec.Struct, frozen=True):
    """A step's time without the profiler (µs), measured or estimated, and the share of the recorded CPU time it needs.

    factor: that share. scale: that time divided by the replayed time with that CPU time. It differs from 1 if the GPU's
    own times were different while recording. is_middle: whether the share is the middle of an estimate.
    """

    step_us: float
    factor: float
    scale: float
    is_middle: bool = False

    @classmethod
    def of(cls, graph: Graph, step_us: float | None, within: float = 0.0) -> "Unprofiled | None":
        """Return None if the run did not measure its step without the profiler. within: see cpu_factor()."""
        if not step_us:
            return None
        factor = cpu_factor(graph, step_us, within)
        # Both times come from the same replay, so effects that it does not model affect them in the same proportion.
        replayed = step_us_at(graph, factor)
        return cls(step_us, factor, step_us / replayed if replayed else 1.0)
