"""The CUDA graphs that a step captures. A launch call during a stream's capture runs nothing."""

from collections.abc import Iterable, Sequence

import msgspec

from tracereader.trace import Op
from tracereader.trace.capture import is_launch
from tracereader.trace.intervals import Lengths, length
from tracereader.trace.quality import CAPTURE_EDGE, capture_stretches


class Captures(msgspec.Struct, frozen=True):
    """The captures of some CPU slices: their number, the launch calls that they recorded, and their time (µs)."""

    graphs: int
    launches: int
    us: float


def captures(roots: Sequence[Op], names: Iterable[str]) -> Captures | None:
    """Return the captures in the slices below some roots; None if there are none. names: those of all slices there."""
    if not any(map(CAPTURE_EDGE.search, names)):
        return None
    ops = [op for root in roots for op in root.walk()]
    edges = [op for op in ops if op.kind == "runtime" and CAPTURE_EDGE.search(op.name)]
    if not edges:
        return None
    stretches, graphs = capture_stretches(edges, min(op.start for op in ops), max(op.end for op in ops))
    inside = Lengths(stretches)
    # A launch meanwhile on a stream that is not captured has GPU work in the trace.
    launches = sum(is_launch(op) and not op.work and inside.between(op.start, op.start + 1) > 0 for op in ops)
    return Captures(graphs, launches, length(stretches) / 1e3)
