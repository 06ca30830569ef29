"""What to try first, and what it would save: every change that a trace gives reason to, the largest saving first."""

from tracereader.figures import Summary
from tracereader.findings.avoidable_changes import AVOIDABLE_CHANGES
from tracereader.findings.cpu_changes import CPU_CHANGES
from tracereader.findings.gpu_changes import GPU_CHANGES
from tracereader.findings.opportunity import Case, Opportunity, Unprofiled, priced, worth_showing
from tracereader.replay import Refused, graph_of
from tracereader.trace import Trace

CHANGES = CPU_CHANGES + GPU_CHANGES + AVOIDABLE_CHANGES


def opportunities(trace: Trace, summary: Summary) -> tuple[Opportunity, ...] | Refused:
    """The changes worth trying, each by itself; what several save together is not their sum."""
    graph = graph_of(trace)
    if isinstance(graph, Refused):
        return graph
    case = Case(trace, summary, graph)
    unprofiled = Unprofiled.of(graph, summary.unprofiled_step_us)
    return worth_showing(priced(change.name, change.title, change.propose(case), unprofiled) for change in CHANGES)
