"""Changes that take out of a loop what needs no other pass, and compute once what does not change.

record-trace records what each op reads and makes. Other traces do not show whether a pass needs another one.
"""

from tracereader.changes.change import change
from tracereader.changes.context import Case
from tracereader.changes.equal_passes import (
    FEWER_PRODUCTS,
    Loop,
    all_but_the_last,
    all_in_one,
    by_flow,
    is_allowed,
    times_of,
)
from tracereader.changes.opportunity import Proposal
from tracereader.figures.data_flow import computed_again
from tracereader.findings.finding import counted, duration, listed
from tracereader.replay.changes import without_cpu_time, without_work
from tracereader.trace.grouped import totals


@change("compute the inputs of a loop before it", "one call for all passes reaches good rates", followed=FEWER_PRODUCTS)
def loop_inputs(case: Case) -> Proposal | None:
    """Return a proposal to compute before a loop over time what its passes compute before they use a state."""
    return _outside(case, True, "compute this for all passes before the loop, and take its results with unbind(dim)")


@change("compute the outputs of a loop after it", "one call for all passes reaches good rates", followed=FEWER_PRODUCTS)
def loop_outputs(case: Case) -> Proposal | None:
    """Return a proposal to compute after a loop over time what its passes compute from a state, and no pass takes."""
    how = "collect the states in the loop (torch.stack), and compute this for all of them after it"
    return _outside(case, False, how)


def _outside(case: Case, before: bool, how: str) -> Proposal | None:
    in_steps, typical = case.in_each_step(
        lambda step: [one for one in by_flow(step, whole=False, before=before) if is_allowed(case.trace, step, one)]
    )
    return all_in_one(case, in_steps, typical, how) if typical else None


@change(
    "compute once what does not change", "the weights and inputs that it is computed from stay the same", on_cpu=True
)
def compute_once(case: Case) -> Proposal | None:
    """Return a proposal to keep what ops compute from the same tensors again, if the trace has the ops' data flow."""
    in_steps, typical = case.in_each_step(computed_again)
    if not typical:
        return None
    spans, gone = [], []
    for step, ops in zip(case.steps, in_steps, strict=True):
        loop = Loop((step.start,), step.end, "", parts=(times_of(step, ops), []))
        removed, _, work = all_but_the_last(case, step, loop)
        spans += removed
        gone += work
    us = totals((op.name, sum(work.us for work in op.work_below()) if case.trace.work else op.us) for op in typical)
    on_gpu = f"{duration(sum(work.us for op in typical for work in op.work_below()))} of GPU time and "
    return Proposal(
        without_work(without_cpu_time(case.graph, spans), gone),
        f"{counted(len(typical), 'op')} compute what was computed before from the same tensors, mostly "
        f"{listed([name for name, _ in us.most_common(3)])}: {on_gpu * bool(case.trace.work)}"
        f"{duration(sum(op.us for op in typical))} of CPU time in forward",
        "compute it once, before the loop or before the steps, and keep it while its weights and inputs do not change",
    )
