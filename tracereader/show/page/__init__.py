"""Writes a whole report as one HTML file, for --html. The file needs no server and no network."""

import sys
from collections.abc import Sequence
from pathlib import Path

from tracereader.changes import ranks as rank_changes
from tracereader.changes.catalogue import opportunities
from tracereader.command import printable
from tracereader.figures import Summary
from tracereader.figures.rank import RankTrace
from tracereader.figures.ranks import RanksSummary
from tracereader.findings.finding import Prediction, size
from tracereader.show import report
from tracereader.show.page import data, files, html, ranked, timeline
from tracereader.show.page.compared import Runs
from tracereader.show.predictions import predictions_of
from tracereader.show.view import View
from tracereader.trace import Trace

__all__ = ["Runs", "of_file", "of_ranks", "of_trace", "write"]

Page = tuple[str, list[str]]  # the HTML text, and descriptions of content that the user may not want to share


def of_trace(trace: Trace, summary: Summary, guesses: Sequence[Prediction], measured: dict | None = None) -> Page:
    """Return the page of one trace. measured: what try-changes measured (run.tried.Shown)."""
    slices, chunks = timeline.packed(trace, data.numbers_of_pieces(trace, summary))
    slices = data.described(slices, data.decoded_names(trace), data.pieces(summary), summary.chosen.number)
    held = data.holds([trace.host], slices)
    found = opportunities(trace, summary)
    told = report.as_text(trace, summary, View(), found)
    figures = {**data.figures(trace, summary, found, guesses), "report": told, "measured": measured, "holds": held}
    return html.assembled(figures, slices, chunks), held


def of_file(file: Path, view: View, measured: dict | None = None) -> Page:
    """Return the page of one trace file. measured: see of_trace(). Raises BadInput."""
    trace, summary = report.opened(file, view)
    return of_trace(trace, summary, predictions_of(trace), measured)


def of_ranks(summary: RanksSummary, traces: Sequence[RankTrace], limit: int) -> Page:
    """Return the page of one run's ranks. limit: the most bytes of JSON of a trace that is read again."""
    found = rank_changes.opportunities(summary, limit) if rank_changes.can_propose(summary) else None
    figures, slices, chunks = ranked.page(summary, traces, found)
    return html.assembled(figures, slices, chunks), figures["holds"]


def write(page: Page, target: str, force: bool, aside: bool = False) -> None:
    """Write the page, and print its size and the content that the user may not want to share. Raises BadInput.

    The text goes to stderr if stdout has the page itself or something else (aside).
    """
    text, held = page
    written = files.write(text, target, force)
    out = sys.stderr if aside or target == files.STDOUT else sys.stdout
    name = "the page" if target == files.STDOUT else printable(target)
    print(f"{name}: {size(written)}, one file without outside links", file=out)
    for one in held:
        print(f"the page holds {printable(one)}", file=out)
