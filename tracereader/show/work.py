"""The GPU work of one step, piece by piece, and what the kernels' names say."""

from collections.abc import Sequence

from rich.console import Console

from tracereader.figures import Summary
from tracereader.figures.attention import Attention
from tracereader.figures.gpu_work import GpuWork
from tracereader.figures.sizes import Product
from tracereader.findings.finding import size
from tracereader.show import repeats
from tracereader.show.text import Name, head, operations, paragraph, plain, print_columns, rate, us
from tracereader.show.view import View, and_more
from tracereader.trace.kernel_names import labels

LINES_SHOWN = 24
NAMES_SHOWN = 5


def show(out: Console, summary: Summary, view: View) -> None:
    """Piece by piece; what repeats is shown once unless all is asked for."""
    folded = not view.all and bool(repeats.told(summary))
    listed = repeats.in_order(summary) if folded else [repeats.Row(one) for one in summary.gpu_work]
    shown = listed if folded else listed[: view.most(LINES_SHOWN)]
    named = labels([one.work.name for one in shown if one.work], 60)
    asking = labels([one.work.asked_by for one in shown if one.work], 28)
    rows = []
    for row in shown:
        if one := row.work:
            rows.append(
                (
                    Name(f"{row.times} x " * (row.times > 1) + named[one.name]),
                    Name(f"{one.layer}, {one.asked_by}" if one.layer else asking[one.asked_by]),
                    us(one.us),
                    f"{us(one.low_us)}–{us(one.high_us)}",
                    one.launched_by + " after an occupancy query" * bool(one.occupancy_queries),
                    *_footprint(one),
                )
            )
        else:
            rows.append((f"… {row.left_out:,} more", *[""] * 7))
    heads = (
        f"GPU work of one step ({summary.chosen.number})",
        "from",
        "median µs" if len(summary.steps) > 1 else "µs",
        "range",
        "launched by",
        "regs",
        "shared",
        "grid x block",
    )
    print_columns(out, heads, rows, left=(0, 1, 3, 4, 7), section="work")
    and_more(out, len(listed), len(rows))


def _footprint(one: GpuWork) -> tuple[str, str, str]:
    if one.kind != "kernel" or None in (one.registers, one.shared_memory, one.grid, one.block):
        return "", "", ""
    grid, block = ("·".join(str(n) for n in dim if n != 1) or "1" for dim in (one.grid, one.block))
    return str(one.registers), f"{one.shared_memory / 1024:.0f} KB", f"{grid} x {block}"


def names(out: Console, summary: Summary, view: View) -> None:
    said: dict[tuple[str, str], list[GpuWork]] = {}
    for one in sorted(summary.gpu_work, key=lambda one: -one.us):
        said.setdefault((one.name, one.family), []).append(one)
    out.print(head("what the names say", "names"))
    shown = list(said.items())[: view.most(NAMES_SHOWN)]
    named = labels([name for (name, _), _ in shown], out.width - 4)
    for (name, _), same in shown:
        layers = list(dict.fromkeys(one.layer for one in same if one.layer))
        out.print(f"  {plain(named[name])}")
        told = "; ".join(
            [*[" and ".join(layers)] * bool(layers), str(same[0].says), *_measured(same), *_occupancy(same)]
        )
        paragraph(out, plain(told), " " * 6, " " * 6)
    and_more(out, len(said), view.most(NAMES_SHOWN) or len(said))


def _measured(same: Sequence[GpuWork]) -> list[str]:
    """Sizes and rates, where the trace has what they are made of; one entry for each distinct size."""
    found = {}
    for one in same:
        if shape := one.product:
            found[shape] = product_in_words(shape) + (
                f" at {rate(one.tflops)} TFLOP/s{_of_roof(one)}" if one.tflops else ""
            )
        elif heads := one.attention:
            found[heads] = (
                attention_in_words(heads)
                + (f" at {rate(one.tflops)} TFLOP/s{_of_roof(one)}" if one.tflops else "")
                + (f", {size(one.bytes_moved)} to move at least" if one.bytes_moved else "")
            )
        elif conv := one.convolution:
            found[(*conv.data, *conv.filter)] = (
                f"{' x '.join(map(str, conv.data))} with a filter of {' x '.join(map(str, conv.filter))}, "
                f"{operations(conv.flops)}" + (f" at {rate(one.tflops)} TFLOP/s{_of_roof(one)}" if one.tflops else "")
            )
        elif one.bytes_moved and one.gb_s:
            found[one.bytes_moved] = f"{size(one.bytes_moved)} moved at {one.gb_s:,.0f} GB/s{_of_roof(one)}"
    return list(found.values())


def product_in_words(shape: Product) -> str:
    batch = f"{shape.batch} x " if shape.batch > 1 else ""
    return f"{batch}M {shape.m} · K {shape.k} · N {shape.n}, {operations(shape.flops)}"


def attention_in_words(shape: Attention) -> str:
    shared = f", {shape.kv_heads} of keys and values" if shape.kv_heads != shape.heads else ""
    return (
        f"batch {shape.batch} · heads {shape.heads}{shared} · {shape.queries} queries · {shape.keys} keys · head size "
        f"{shape.head_size}, {operations(shape.flops)} {MASKS[shape.causal]}"
    )


# How attention's FLOPs are counted, by what is known of its mask.
MASKS = {True: "causal", False: "not causal", None: "without a mask"}


def _occupancy(same: Sequence[GpuWork]) -> list[str]:
    """Of one kernel's launches, whose blocks need not be alike."""
    found = [one.occupancy for one in same if one.occupancy]
    if not found:
        return []
    # A limit is a whole number of warps over 32, 48 or 64: one more digit tells 12.5% from the profiler's 13.
    limits = _range([one.limit for one in found], 1)
    by = {one.limited_by for one in found}
    reported = [one.reported for one in found if one.reported is not None and not one.not_estimated]
    told = f" ({_range(reported, 0)} by the profiler's estimate)" if reported else ""
    if all(one.not_estimated for one in found):
        told = " (the profiler's 0% is no estimate)"
    if by == {""}:
        return [f"occupancy not limited: all of a multiprocessor's warps fit{told}"]
    why = f", limited by {by.pop()}" if len(by) == 1 else ", depending on the launch"
    return [f"occupancy at most {limits}{why}{told}"]


def _range(shares: Sequence[float], digits: int) -> str:
    least, most = (f"{share:.{digits}%}".replace(".0%", "%") for share in (min(shares), max(shares)))
    return most if least == most else f"{least.rstrip('%')} to {most}"


def _of_roof(one: GpuWork) -> str:
    roofs = {"compute": "the data sheet's arithmetic peak", "memory": "the data sheet's memory bandwidth"}
    return f", {one.of_roof:.0%} of {roofs[one.roof]}" if one.roof else ""
