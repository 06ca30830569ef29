"""What torch.compile left in a trace: the graphs called, the lookups in its cache, what was compiled more than once."""

from collections import Counter
from collections.abc import Iterable

import msgspec

from tracereader.trace import Trace
from tracereader.trace.labels import COMPILED_AGAIN, GRAPH, LOOKUP


class Compiled(msgspec.Struct, frozen=True, rename={"graphs": "compiled_graphs"}):
    """Rows of torch.compile. The lists of steps are empty for a trace without any such row."""

    graphs: list[str]  # hashes, over all steps
    graphs_of_steps: list[list[str]]  # the same, step by step
    cache_lookups: list[int]  # step by step
    recompiled: list[str]  # regions that were compiled more than once


def compiled(trace: Trace) -> Compiled:
    """What torch.compile left in a trace's steps."""
    graphs = graphs_in(trace.op_names)
    looks = any(name.startswith(LOOKUP) for name in trace.op_names)
    calls = [Counter(op.name for op in one.walk()) for one in trace.steps] if graphs or looks else []
    return Compiled(
        graphs=graphs,
        graphs_of_steps=[graphs_in(names) for names in calls] if graphs else [],
        cache_lookups=[_lookups(names) for names in calls] if looks else [],
        recompiled=sorted({match[0] for name in trace.op_names if (match := COMPILED_AGAIN.match(name))}),
    )


def graphs_in(names: Iterable[str]) -> list[str]:
    """The hashes of the compiled graphs that are called under these names."""
    return sorted({match[1] for name in names if (match := GRAPH.search(name))})


def _lookups(calls: Counter) -> int:
    return sum(times for name, times in calls.items() if name.startswith(LOOKUP))
