"""--html: one file that holds a whole report, opens without a server or a network, and can be handed on."""

import sys
from collections.abc import Sequence

from tracereader.command import printable
from tracereader.figures import Summary
from tracereader.findings.finding import Finding, size
from tracereader.findings.opportunities import opportunities
from tracereader.show.page import data, files, html, timeline
from tracereader.trace import Trace

__all__ = ["of_trace", "write"]


def of_trace(trace: Trace, summary: Summary, guesses: Sequence[Finding]) -> tuple[str, list[str]]:
    """The page of one trace, and what it holds that somebody may not want to hand on."""
    slices, chunks = timeline.packed(trace, data.numbers_of_pieces(trace, summary))
    slices = data.pieces(trace, summary, slices)
    held = data.holds(trace, slices)
    figures = data.figures(trace, summary, opportunities(trace, summary), guesses)
    return html.assembled({**figures, "holds": held}, slices, chunks), held


def write(page: str, held: Sequence[str], target: str, force: bool) -> None:
    """Write the page and say what it holds: on stderr where the page itself goes to stdout. Raises BadInput."""
    written = files.write(page, target, force)
    out = sys.stderr if target == files.STDOUT else sys.stdout
    name = "the page" if target == files.STDOUT else printable(target)
    print(f"{name}: {size(written)}, one file without outside links", file=out)
    for one in held:
        print(f"it holds {printable(one)}", file=out)
