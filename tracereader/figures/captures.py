"""The CUDA graphs that a step captures. A launch call during a stream's capture runs nothing."""

from collections.abc import Iterable, Sequence
from operator import attrgetter

import msgspec

from tracereader.figures.intervals import Intervals, Lengths, length, union
from tracereader.trace import Op
from tracereader.trace.capture import EDGE, is_launch


class Captures(msgspec.Struct, frozen=True):
    """The captures of some CPU slices: their number, the launch calls that they recorded, and their time (µs)."""

    graphs: int
    launches: int
    us: float


def captures(roots: Sequence[Op], names: Iterable[str]) -> Captures | None:
    """Return the captures in the slices below some roots; None if there are none. names: those of all slices there."""
    if not any(map(EDGE.search, names)):
        return None
    ops = [op for root in roots for op in root.walk()]
    edges = [op for op in ops if op.kind == "runtime" and EDGE.search(op.name)]
    if not edges:
        return None
    stretches, graphs = _stretches(edges, min(op.start for op in ops), max(op.end for op in ops))
    inside = Lengths(stretches)
    # A launch meanwhile on a stream that is not captured has GPU work in the trace.
    launches = sum(is_launch(op) and not op.work and inside.between(op.start, op.start + 1) > 0 for op in ops)
    return Captures(graphs, launches, length(stretches) / 1e3)


def _stretches(edges: Iterable[Op], first: int, last: int) -> tuple[Intervals, int]:
    """Return the merged intervals of the captures, and their number. A capture may be cut off at either end."""
    begun: dict[tuple, int] = {}
    found = []
    for op in sorted(edges, key=attrgetter("start")):
        if EDGE.search(op.name)[1] == "Begin":
            begun[op.track] = op.start
        else:
            found.append((begun.pop(op.track, first), op.end))
    found += [(start, last) for start in begun.values()]
    return union(found), len(found)
