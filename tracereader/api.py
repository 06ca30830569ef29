"""The reader from Python. What is public is what `tracereader` exports: read, read_ranks, compare, Run, TraceError.

Times are in µs and shares run from 0 to 1. A value is None if the trace does not show it.
"""

import contextlib
import html
import io
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path

import msgspec

from tracereader.changes.catalogue import opportunities
from tracereader.changes.opportunity import Opportunity
from tracereader.figures import Summary, summarize
from tracereader.figures.gpu_work import KernelTimes
from tracereader.figures.ranks import RanksSummary
from tracereader.figures.steps import StepFacts
from tracereader.replay import Refused
from tracereader.show import comparison, ranks, report
from tracereader.show import page as pages
from tracereader.show.predictions import predictions_of
from tracereader.show.view import View
from tracereader.trace import Trace, TraceError
from tracereader.trace.capture import read_with_captures
from tracereader.trace.document import in_folder
from tracereader.trace.marks import StepsBy

__all__ = ["Run", "TraceError", "compare", "read", "read_ranks"]


class OpRow(msgspec.Struct, frozen=True):
    """All calls of one op in the typical step, on the CPU. total_us includes the calls below it; self_us does not."""

    name: str
    calls: int
    total_us: float
    self_us: float


class Run:
    """One trace and its measurements. read() makes it."""

    def __init__(self, trace: Trace, summary: Summary):
        self.trace, self.summary = trace, summary

    @property
    def step_us(self) -> float | None:
        """Return the step's time while it was recorded; None if records are missing."""
        return None if self.summary.recording.incomplete else self.summary.recorded_step_us

    @property
    def unprofiled_step_us(self) -> float | None:
        """Return the step's time without the profiler, if the run stored it."""
        return self.summary.unprofiled_step_us

    @property
    def regime(self) -> str | None:
        """Return what limits the steps, as --json names it: overhead, compute, memory, gpu and others."""
        return self.summary.waits_for

    @property
    def steps(self) -> tuple[StepFacts, ...]:
        """Return the recorded steps, in order."""
        return self.summary.steps

    @property
    def kernels(self) -> tuple[KernelTimes, ...]:
        """Return the GPU activities of all steps by name, the longest time first."""
        return self.summary.kernels

    @cached_property
    def ops(self) -> tuple[OpRow, ...]:
        """Return the ops of the typical step, the longest self time first."""
        found = (OpRow(name, one.calls, one.total_us, one.self_us) for name, one in self.summary.cpu.ops.items())
        return tuple(sorted(found, key=lambda one: -one.self_us))

    @cached_property
    def opportunities(self) -> tuple[Opportunity, ...]:
        """Return the changes worth trying, the most worthwhile first; empty if no saving can be computed."""
        found = opportunities(self.trace, self.summary)
        return () if isinstance(found, Refused) else found

    def report(self, everything: bool = False) -> str:
        """Return the text of `read-trace`. everything: as with --all."""
        return report.as_text(self.trace, self.summary, View(all=everything))

    def page(self, file: str | Path, force: bool = False) -> None:
        """Write the page of `read-trace --html`. Raises BadInput, as that does."""
        with contextlib.redirect_stdout(io.StringIO()):
            pages.write(self._page(), str(file), force)

    def rows(self, table: str = "kernels") -> list[dict]:
        """Return kernels, ops, steps or opportunities as rows, which pandas and others take. Raises ValueError."""
        if table not in TABLES:
            raise ValueError(f"no table {table!r}; there are {', '.join(TABLES)}")
        return [
            {name: value for name, value in msgspec.to_builtins(one).items() if not isinstance(value, list | dict)}
            for one in getattr(self, table)
        ]

    def _page(self) -> pages.Page:
        return pages.of_trace(self.trace, self.summary, predictions_of(self.trace))

    def _repr_html_(self) -> str:
        text, _ = self._page()
        return f'<iframe srcdoc="{html.escape(text)}" style="width: 100%; height: 700px; border: 0"></iframe>'

    def __repr__(self) -> str:
        return f"<tracereader.Run {self.trace.path.name}: {self.regime}, {len(self.steps)} steps>"


TABLES = ("kernels", "ops", "steps", "opportunities")


def read(file: str | Path, *, steps: str | None = None, whole: bool = False, captures: tuple = ()) -> Run:
    """Return the measurements of a trace: .json or .pftrace, or such a file with .gz.

    steps: an annotation whose calls are the steps. whole: the recording counts as one step. captures: traces of the
    captures of its CUDA graphs. Raises TraceError if the file is no such trace, and OSError if it cannot be read.
    """
    by = StepsBy.NOTHING if whole else steps or StepsBy.FOUND
    trace = read_with_captures(Path(file), tuple(map(Path, captures)), steps_by=by)
    return Run(trace, summarize(trace))


def read_ranks(files: str | Path | Iterable[str | Path]) -> RanksSummary:
    """Return the measurements of one run's ranks, read together: a folder with their traces, or the traces.

    Raises BadInput: TraceError if a folder has no traces, and otherwise if none of them is one of a rank.
    """
    paths = in_folder(Path(files)) if isinstance(files, str | Path) else list(map(Path, files))
    summary, _ = ranks.opened(paths, View())
    return summary


def compare(before: Run, after: Run) -> str:
    """Return the text of `read-trace BEFORE AFTER`: what changed from the first run to the second one."""
    proposed = comparison.proposed_by(before.trace, before.summary)
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        comparison.side_by_side([before.summary, after.summary], View(), False, [proposed])
    return out.getvalue()
