"""All changes that a trace suggests and what each would save, sorted by saving."""

from collections.abc import Callable

import msgspec

from tracereader import progress
from tracereader.figures import Summary
from tracereader.findings.avoidable_changes import AVOIDABLE_CHANGES
from tracereader.findings.cpu_changes import CPU_CHANGES
from tracereader.findings.gpu_changes import GPU_CHANGES
from tracereader.findings.opportunity import Case, Opportunity, Unprofiled, priced, worth_showing
from tracereader.replay import Graph, Refused, graph_of
from tracereader.trace import Trace

CHANGES = CPU_CHANGES + GPU_CHANGES + AVOIDABLE_CHANGES


def opportunities(
    trace: Trace, summary: Summary, show: Callable[[str], None] = progress.nowhere
) -> tuple[Opportunity, ...] | Refused:
    """Return the changes worth trying, or the reason why the trace cannot be replayed.

    Each change is priced by itself. Several changes together do not save the sum. show: shows what is done next.
    """
    show("replaying the steps")
    graph = graph_of(trace)
    if isinstance(graph, Refused):
        return graph
    case = Case(trace, summary, graph)
    unprofiled = Unprofiled.of(graph, summary.unprofiled_step_us)
    found = []
    for number, change in enumerate(CHANGES, 1):
        show(f"replaying the steps with changes: {number} of {len(CHANGES)}")
        proposal = change.propose(case)
        one = priced(change.name, change.title, proposal, unprofiled)
        found.append(one and msgspec.structs.replace(one, kernels=_changed(case, proposal.graph)))
    return worth_showing(found)


def _changed(case: Case, after: Graph) -> tuple[str, ...]:
    """Return the names of the typical step's GPU activities that take less time after a change."""
    before = case.graph
    nodes = ((one, before.activity.get(id(one)), after.activity.get(id(one))) for one in case.step.work)
    shorter = (
        one.name for one, was, now in nodes if was is not None and (now is None or after.dur[now] < before.dur[was])
    )
    return tuple(dict.fromkeys(shorter))
