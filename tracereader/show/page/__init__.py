"""--html: one file that holds a whole report, opens without a server or a network, and can be handed on."""

import sys
from collections.abc import Sequence
from pathlib import Path

from tracereader.command import printable
from tracereader.figures import Summary
from tracereader.figures.rank import RankTrace
from tracereader.figures.ranks import RanksSummary
from tracereader.findings import rank_changes
from tracereader.findings.finding import Prediction, size
from tracereader.findings.opportunities import opportunities
from tracereader.show import report
from tracereader.show.page import data, files, html, ranked, timeline
from tracereader.show.page.compared import Runs
from tracereader.show.predictions import predictions_of
from tracereader.show.view import View
from tracereader.trace import Trace

__all__ = ["Runs", "of_file", "of_ranks", "of_runs", "of_trace", "write"]

Page = tuple[str, list[str]]  # its text, and what it holds that somebody may not want to hand on


def of_trace(trace: Trace, summary: Summary, guesses: Sequence[Prediction]) -> Page:
    """The page of one trace."""
    slices, chunks = timeline.packed(trace, data.numbers_of_pieces(trace, summary))
    slices = data.described(slices, data.decoded_names(trace), data.pieces(summary), summary.chosen.number)
    held = data.holds([trace.host], slices)
    figures = data.figures(trace, summary, opportunities(trace, summary), guesses)
    return html.assembled({**figures, "holds": held}, slices, chunks), held


def of_file(file: Path, view: View) -> Page:
    """The page of one trace file. Raises BadInput."""
    trace, summary = report.opened(file, view)
    return of_trace(trace, summary, predictions_of(trace))


def of_runs(runs: Runs) -> Page:
    """The page of several runs, each set against the first."""
    figures, slices, chunks = runs.page()
    return html.assembled(figures, slices, chunks), figures["holds"]


def of_ranks(summary: RanksSummary, traces: Sequence[RankTrace], limit: int) -> Page:
    """The page of one run's ranks. limit: of a trace that is read again, in bytes."""
    found = rank_changes.opportunities(summary, limit) if summary.on_gpu and summary.matched else None
    figures, slices, chunks = ranked.page(summary, traces, found)
    return html.assembled(figures, slices, chunks), figures["holds"]


def write(page: Page, target: str, force: bool, aside: bool = False) -> None:
    """Write the page and say what it holds: on stderr where stdout is for something else (`aside`, or the page itself).

    Raises BadInput.
    """
    text, held = page
    written = files.write(text, target, force)
    out = sys.stderr if aside or target == files.STDOUT else sys.stdout
    name = "the page" if target == files.STDOUT else printable(target)
    print(f"{name}: {size(written)}, one file without outside links", file=out)
    for one in held:
        print(f"it holds {printable(one)}", file=out)
