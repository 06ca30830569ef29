"""The collectives of the rank that wrote the trace: sizes, groups, times and bandwidth."""

from rich.console import Console

from tracereader.figures import Summary
from tracereader.findings.communication import beside_the_links, is_worth_saying
from tracereader.findings.finding import size
from tracereader.show.text import paragraph, print_columns, unit_of
from tracereader.show.view import View, others


def show(out: Console, summary: Summary, view: View) -> None:
    """Print each kind of collective with size, group, time and bandwidth, and the fastest beside the GPU's links."""
    if not is_worth_saying(summary):
        return
    found = summary.communication
    shown, rest = view.parted(found.collectives)
    unit, exposed = unit_of([one.us for one in shown]), unit_of([one.exposed_us for one in shown])
    grouped = len({one.group for one in found.collectives}) > 1
    cells = [
        (one.kind or "not described", *[one.group or "–"] * grouped, "–" if one.size is None else f"{one.size:,}",
         "–" if one.bytes is None else size(one.bytes), f"{one.per_step:,.3g}", unit(one.us), exposed(one.exposed_us),
         "–" if one.bus_gb_s is None else f"{one.bus_gb_s:,.1f}")
        for one in shown
    ]  # fmt: skip
    if rest:
        calls, us = sum(one.per_step for one in rest), sum(one.exposed_us for one in rest)
        cells.append((others(rest), *[""] * grouped, "", "", f"{calls:,.3g}", "", exposed(us), ""))
    least = ", at least" * found.is_one_of_many
    heads = (
        f"collectives (bus GB/s{least})", *["group"] * grouped, "ranks", "size", "calls", f"{unit.name} each",
        f"exposed {exposed.name}", "GB/s",
    )  # fmt: skip
    print_columns(out, heads, cells, left=(0, 1) if grouped else (0,))
    if links := beside_the_links(found):
        paragraph(out, links, "  ", "  ")
