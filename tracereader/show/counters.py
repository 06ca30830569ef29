"""The section on sampled counters: over the steps, and for each kernel that is long enough for samples."""

from collections.abc import Sequence
from statistics import fmean

from rich.console import Console

from tracereader.figures import Summary
from tracereader.figures.counters import Counters
from tracereader.figures.regime import MUCH_KNOWN
from tracereader.findings.finding import duration
from tracereader.show.text import Name, kernel_labels, paragraph, percent, plain, print_columns, unit_of
from tracereader.show.view import View, others


def show(out: Console, summary: Summary, view: View) -> None:
    """Print the counters over the steps, those of long kernels and the needs of their shapes."""
    found = summary.counters
    if found is None:
        return
    _steps(out, summary, found)
    _kernels(out, found, [one.name for one in summary.kernels], view)


def _steps(out: Console, summary: Summary, found: Counters) -> None:
    rows = []
    for name, us in found.interval_us.items():
        by_step = {one.name: one.means[name] for one in found.steps if one.means[name] is not None}
        if by_step:
            values = by_step.values()
            figures = (by_step.get(summary.typical_step), fmean(values), min(values), max(values))
            rows.append((Name(name), *(_figure(value) for value in figures), duration(us)))
    if not rows:
        out.print("[bold]sampled counters[/bold]: no samples in the steps")
        return
    number = summary.chosen.number
    heads = ("sampled while the steps ran", number, "mean of steps", "lowest", "highest", "a sample each")
    print_columns(out, heads, rows, section="counters")
    if found.dram_by_shapes is not None and found.known > MUCH_KNOWN and "dram" in found.names:
        known = f"the kernels that take {found.known:.0%} of {number}'s GPU time have to move"
        paragraph(out, plain(f"by shapes, {known} bytes at {found.dram_by_shapes:.0%} of the peak DRAM throughput"))


def _figure(value: float | None) -> str:
    return "–" if value is None else f"{value:,.1f}" if abs(value) < 100 else f"{value:,.0f}"


def _kernels(out: Console, found: Counters, names: Sequence[str], view: View) -> None:
    kernels = sorted(found.kernels, key=lambda one: -one.us)
    if not kernels:
        if {"sm_active", "dram"} & set(found.names):
            paragraph(out, "no kernel that ran alone is long enough to hold a whole sample")
        return
    shown, rest = view.parted(kernels)
    named, unit = kernel_labels(names), unit_of([one.us for one in kernels])
    rows = [
        (Name(named[one.name]), unit(one.us), f"{one.samples:,}", percent(one.sm_active), percent(one.dram),
         percent(one.dram_by_shapes))
        for one in shown
    ]  # fmt: skip
    if rest:
        rows.append((others(rest), unit(sum(one.us for one in rest)), "", "", "", ""))
    out.print()
    heads = ("kernels that hold whole samples", unit.name, "samples", "SM active", "DRAM", "DRAM by shapes")
    print_columns(out, heads, rows)
