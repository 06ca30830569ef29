"""The communication of the rank that wrote the trace: its share of the step, and the bandwidth of its collectives."""

from rich.console import Console

from tracereader.figures import Summary
from tracereader.findings import communication
from tracereader.findings.finding import size
from tracereader.show.text import capitalized, paragraph, plain, print_columns, unit_of
from tracereader.show.view import View

SHOWN = 4


def show(out: Console, summary: Summary, view: View) -> None:
    """Print the exposed share of the step, and each kind of collective with its size, group, time and bandwidth."""
    told = communication.in_words(summary)
    if not told:
        return
    paragraph(out, plain(" ".join(f"{capitalized(one)}." for one in told)), rest="  ")
    some = summary.communication.collectives
    shown = some[: view.most(SHOWN)]
    unit = unit_of([one.us for one in shown])
    cells = [
        (
            one.kind or "not described",
            "–" if one.bytes is None else size(one.bytes),
            "–" if one.size is None else f"{one.size:,}",
            f"{one.per_step:,.3g}",
            unit(one.us),
            "–" if one.bus_gb_s is None else f"{one.bus_gb_s:,.1f}",
        )
        for one in shown
    ]
    more = f" (the {len(shown)} longest of {len(some)})" * (len(shown) < len(some))
    least = ", at least" * summary.communication.is_one_of_many
    heads = (f"collectives{more}", "size", "ranks", "per step", f"median {unit.name}", f"bus GB/s{least}")
    print_columns(out, heads, cells)
