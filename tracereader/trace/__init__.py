"""The trace file: fast loading, ops as a tree, launches, GPU work; kernel names."""

from tracereader.trace.document import TraceError
from tracereader.trace.labels import MODULE, STEP
from tracereader.trace.tree import Frame, Op, Rank, Step, Trace, Work, outermost, read

__all__ = [
    "MODULE", "STEP", "Frame", "Op", "Rank", "Step", "Trace", "TraceError", "Work", "outermost", "read",
]  # fmt: skip
