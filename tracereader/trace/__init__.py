"""The trace file: fast loading, ops as a tree, launches, GPU work; kernel names."""

from tracereader.trace.document import TraceError
from tracereader.trace.labels import MODULE, STEP
from tracereader.trace.marks import StepsBy
from tracereader.trace.slices import (
    Frame,
    Op,
    Phase,
    Rank,
    Step,
    Sync,
    Trace,
    Work,
    all_around,
    asking_ops,
    dur_of,
    innermost,
    outermost,
    start_of,
)
from tracereader.trace.tree import read

__all__ = [
    "MODULE", "STEP", "Frame", "Op", "Phase", "Rank", "Step", "StepsBy", "Sync", "Trace",
    "TraceError", "Work", "all_around", "asking_ops", "dur_of", "innermost", "outermost", "read", "start_of",
]  # fmt: skip
