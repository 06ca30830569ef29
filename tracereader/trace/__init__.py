"""The trace file: fast loading, ops as a tree, launches, GPU work; kernel names."""

from tracereader.trace.document import TraceError
from tracereader.trace.labels import MODULE, STEP
from tracereader.trace.marks import StepsBy
from tracereader.trace.slices import Op, Rank, Step, Sync, Trace, Work, all_around, innermost, outermost, start_of
from tracereader.trace.tree import read

__all__ = [
    "MODULE", "STEP", "Op", "Rank", "Step", "StepsBy", "Sync", "Trace", "TraceError", "Work", "all_around",
    "innermost", "outermost", "read", "start_of",
]  # fmt: skip
