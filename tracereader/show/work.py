"""The GPU activities of one step in order, and details from the kernels' names."""

from collections.abc import Sequence

from rich.console import Console

from tracereader.figures import Summary
from tracereader.figures.attention import Attention
from tracereader.figures.gpu_work import GpuWork
from tracereader.figures.sizes import Product
from tracereader.findings.finding import ROOFS, duration, size
from tracereader.show import repeats
from tracereader.show import text as formats
from tracereader.show.text import Name, paragraph, plain, print_columns, rate
from tracereader.show.view import View, others
from tracereader.trace.grouped import grouped
from tracereader.trace.kernel_names import labels

LINES_SHOWN = 24
SEVERAL = 8  # names


def show(out: Console, summary: Summary, view: View) -> None:
    """Print a row for each activity. Repetitions are shown once unless all is asked for."""
    folded = not view.all and bool(repeats.worth_showing(summary))
    listed = repeats.in_order(summary) if folded else [repeats.Row(one) for one in summary.gpu_work]
    shown, rest = (listed, ()) if folded else view.parted(listed, LINES_SHOWN)
    times = [row.work.us for row in listed if row.work]
    (unit,) = formats.sharing(formats.unit_of(times).name, [times])
    named = formats.kernel_labels(one.name for one in summary.kernels)
    asking = labels([one.work.asked_by for one in shown if one.work], 28)
    rows = []
    for row in shown:
        if one := row.work:
            name = Name(f"{row.times} x " * (row.times > 1) + named[one.name])
            asked_by = Name(f"{one.layer}, {one.asked_by}" if one.layer else asking[one.asked_by])
            launched_by = one.launched_by + " after an occupancy query" * bool(one.occupancy_queries)
            times = unit(one.us), unit.range(one.low_us, one.high_us)
            rows.append((name, asked_by, *times, launched_by, *_footprint(one)))
        else:
            rows.append(_summed(f"{row.left_out:,} others", row.left_out_us))
    if rest:
        rows.append(_summed(others(rest), sum(row.work.us for row in rest)))
    title, median = f"GPU activities of one step ({summary.chosen.number})", "median " * (len(summary.steps) > 1)
    times = median + unit.name, f"range {unit.name}"
    heads = (title, "from", *times, "launched by", "regs", "shared", "grid x block")
    print_columns(out, heads, rows, left=(0, 1, 3, 4, 7), section="work")


def _summed(name: str, us: float) -> tuple[str, ...]:
    """Return a row for several activities. Their sum is part of the name, because the other rows have medians."""
    return (f"{name}, {duration(us)} in total", *[""] * 7)


def _footprint(one: GpuWork) -> tuple[str, str, str]:
    if one.kind != "kernel" or None in (one.registers, one.shared_memory, one.grid, one.block):
        return "", "", ""
    grid, block = ("·".join(str(n) for n in dim if n != 1) or "1" for dim in (one.grid, one.block))
    return str(one.registers), f"{one.shared_memory / 1024:.0f} KB", f"{grid} x {block}"


def names(out: Console, summary: Summary, view: View) -> None:
    """Print details from the names of the costliest kernels and copies, with known sizes, rates and occupancy."""
    by_time = sorted(summary.gpu_work, key=lambda one: -one.us)
    # The name of a memset says nothing more.
    said = grouped(((one.name, one.family), one) for one in by_time if view.all or one.kind != "memset")
    if not said:
        return
    # One size of each, and no occupancy.
    brief = view.usual and (len(said) > SEVERAL or not summary.source.facts.script)
    out.print(formats.head("details from the kernels' names", "names"))
    shown, rest = view.parted(sorted(said.items(), key=lambda item: -sum(one.us for one in item[1])))
    named = formats.kernel_labels((one.name for one in summary.kernels), out.width - 4)
    for (name, _), same in shown:
        layers = list(dict.fromkeys(one.layer for one in same if one.layer))
        out.print(f"  {plain(named[name])}")
        measured = _measured(same)[: 1 if brief else None]
        occupancy = [] if brief else _occupancy(same)
        details = "; ".join([*[" and ".join(layers)] * bool(layers), str(same[0].says), *measured, *occupancy])
        paragraph(out, plain(details), " " * 6, " " * 6)
    if rest:
        took = duration(sum(one.us for _, same in rest for one in same))
        out.print(f"  {others(rest)} take {took} of GPU time together")


def _measured(same: Sequence[GpuWork]) -> list[str]:
    """Return sizes and rates, if the trace has what they need; one entry for each distinct size."""
    found = {}
    for one in same:
        at = f" at {rate(one.tflops)} TFLOP/s{_of_roof(one)}" if one.tflops else ""
        if shape := one.product:
            found[shape] = product_in_words(shape) + at
        elif heads := one.attention:
            least = f", {size(one.bytes_moved)} to move at least" if one.bytes_moved else ""
            found[heads] = attention_in_words(heads) + at + least
        elif conv := one.convolution:
            data, kernel = (" x ".join(map(str, dims)) for dims in (conv.data, conv.filter))
            sizes = f"{data} with a filter of {kernel}, {formats.operations(conv.flops)}"
            found[(*conv.data, *conv.filter)] = sizes + at
        elif one.bytes_moved and one.gb_s:
            # A few bytes have no speed: their time is not that of the transfer.
            speed = f" at {one.gb_s:,.0f} GB/s{_of_roof(one)}" if one.gb_s >= 0.5 else ""
            found[one.bytes_moved] = f"{size(one.bytes_moved)} moved{speed}"
    return list(found.values())


def product_in_words(shape: Product) -> str:
    batch = f"{shape.batch} x " if shape.batch > 1 else ""
    return f"{batch}M {shape.m} · K {shape.k} · N {shape.n}, {formats.operations(shape.flops)}"


def attention_in_words(shape: Attention) -> str:
    shared = f", {shape.kv_heads} of keys and values" if shape.kv_heads != shape.heads else ""
    sizes = f"{shape.queries} queries · {shape.keys} keys · head size {shape.head_size}"
    operations = f"{formats.operations(shape.flops)} {MASKS[shape.causal]}"
    return f"batch {shape.batch} · heads {shape.heads}{shared} · {sizes}, {operations}"


# The mask by which attention's FLOPs are counted.
MASKS = {True: "causal", False: "not causal", None: "without a mask"}


def _occupancy(same: Sequence[GpuWork]) -> list[str]:
    """Return the occupancy of one kernel's launches, whose blocks may differ."""
    found = [one.occupancy for one in same if one.occupancy]
    if not found:
        return []
    # A limit is a whole number of warps over 32, 48 or 64. One more digit distinguishes 12.5% from the profiler's 13.
    limits = _range([one.limit for one in found], 1)
    by = {one.limited_by for one in found}
    reported = [one.reported for one in found if one.reported is not None and not one.not_estimated]
    estimate = f" ({_range(reported, 0)} by the profiler's estimate)" if reported else ""
    if all(one.not_estimated for one in found):
        estimate = " (the profiler's 0% is no estimate)"
    if by == {""}:
        return [f"occupancy not limited: all of a multiprocessor's warps fit{estimate}"]
    why = f", limited by {by.pop()}" if len(by) == 1 else ", depending on the launch"
    return [f"occupancy at most {limits}{why}{estimate}"]


def _range(shares: Sequence[float], digits: int) -> str:
    least, most = (f"{share:.{digits}%}".replace(".0%", "%") for share in (min(shares), max(shares)))
    return most if least == most else f"{least.rstrip('%')} to {most}"


def _of_roof(one: GpuWork) -> str:
    if not one.roof:
        return ""
    share = f"{one.of_roof:.0%}" if one.of_roof >= 0.005 else "under 1%"
    return f", {share} of the data sheet's {ROOFS[one.roof][0]}"
