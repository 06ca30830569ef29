"""The trace file: fast loading, ops as a tree, launches, GPU work; kernel names."""

from tracereader.trace.document import TraceError
from tracereader.trace.tree import MODULE, STEP, Frame, Lesson, Op, Step, Trace, Work, outermost, read

__all__ = ["MODULE", "STEP", "Frame", "Lesson", "Op", "Step", "Trace", "TraceError", "Work", "outermost", "read"]
