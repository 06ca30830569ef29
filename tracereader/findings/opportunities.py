"""What to try first, and what it would save: every change that a trace gives reason to, the largest saving first."""

from tracereader.figures import Summary
from tracereader.findings.cpu_changes import CPU_CHANGES
from tracereader.findings.gpu_changes import GPU_CHANGES
from tracereader.findings.opportunity import WORTH_SHOWING, Case, Opportunity
from tracereader.replay import Graph, Refused, graph_of
from tracereader.trace import Trace

CHANGES = CPU_CHANGES + GPU_CHANGES


def opportunities(trace: Trace, summary: Summary) -> tuple[Opportunity, ...] | Refused:
    """The changes worth trying, each by itself; what several save together is not their sum."""
    graph = graph_of(trace)
    if isinstance(graph, Refused):
        return graph
    case = Case(trace, summary, graph)
    found = []
    for change in CHANGES:
        proposal = change.propose(case)
        if proposal is None:
            continue
        after = proposal.graph.step_us() / proposal.shared
        saves = graph.recorded_us - after
        if saves > WORTH_SHOWING * graph.recorded_us:
            found.append(
                Opportunity(
                    change=change.name,
                    title=proposal.title or change.title,
                    step_us=graph.recorded_us,
                    step_us_after=after,
                    saves_us=saves,
                    basis="bound" if proposal.assumed else "replay",
                    evidence=proposal.evidence,
                    how=proposal.how,
                    kernels=_changed(case, proposal.graph),
                )
            )
    return tuple(sorted(found, key=lambda one: -one.saves_us))


def _changed(case: Case, after: Graph) -> tuple[str, ...]:
    """The names of the typical step's GPU activities that take less time after a change."""
    before = case.graph
    shorter = (
        one.name
        for one in case.step.work
        if (node := before.activity.get(id(one))) is not None and after.dur[node] < before.dur[node]
    )
    return tuple(dict.fromkeys(shorter))
