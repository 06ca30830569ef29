"""torch.compile's records in a trace: the graphs called, the lookups in its cache, repeated compilations."""

from collections import Counter
from collections.abc import Iterable

import msgspec

from tracereader.trace import Trace
from tracereader.trace.labels import COMPILED_AGAIN, GRAPH, LOOKUP


class Compiled(msgspec.Struct, frozen=True, rename={"graphs": "compiled_graphs"}):
    """torch.compile's records in a trace. The lists by step are empty for a trace without such records."""

    graphs: list[str]  # hashes, over all steps
    graphs_of_steps: list[list[str]]  # in each step
    cache_lookups: list[int]  # in each step
    recompiled: list[str]  # regions that were compiled more than once


def compiled(trace: Trace) -> Compiled:
    """Return torch.compile's records in a trace's steps."""
    graphs = graphs_in(trace.op_names)
    looks = any(name.startswith(LOOKUP) for name in trace.op_names)
    counted = {name for name in trace.op_names if name.startswith(LOOKUP) or GRAPH.search(name)}
    calls = [Counter([op.name for op in one.walk() if op.name in counted]) for one in trace.steps] if counted else []
    lookups = [sum(times for name, times in names.items() if name.startswith(LOOKUP)) for names in calls if looks]
    return Compiled(
        graphs=graphs,
        graphs_of_steps=[graphs_in(names) for names in calls] if graphs else [],
        cache_lookups=lookups,
        recompiled=sorted({match[0] for name in trace.op_names if (match := COMPILED_AGAIN.match(name))}),
    )


def graphs_in(names: Iterable[str]) -> list[str]:
    """Return the hashes of the compiled graphs that are called under these names."""
    return sorted({match[1] for name in names if (match := GRAPH.search(name))})
