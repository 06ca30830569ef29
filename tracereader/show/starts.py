"""The time before each GPU activity: the gap, and the parts of the wait from its launch."""

from collections.abc import Sequence

from rich.console import Console

from tracereader.figures.starts import Start
from tracereader.show.text import Name, kernel_labels, paragraph, plain, print_columns, us
from tracereader.show.view import View, others
from tracereader.trace.kernel_names import short

# A longer gap is explained: kernels of one stream that were launched in time are 1 to 2 µs apart on the H200.
LONG_ENOUGH_US = 5.0
CAUSES_SHOWN, NAMED = 3, 3


def show(out: Console, found: Sequence[Start], names: Sequence[str], number: str, view: View) -> None:
    """Print a line for each GPU activity of a step, and the launching thread's activity during its gaps."""
    shown, rest = view.parted(found)
    named = kernel_labels(names)
    own = any(one.own_us for one in shown)
    heads = [f"before the GPU activities of {number}, µs", "gap", "wait", "call", "queue", *["own"] * own, "way"]
    rows = [
        [
            Name(named[one.name]), us(one.gap_us), us(one.wait_us), us(one.call_us), us(one.queue_us),
            *[us(sum(one.own_us.values()) if one.wait_us is not None else None)] * own, us(one.way_us),
        ]
        for one in shown
    ]  # fmt: skip
    if rest:
        rows.append([f"{others(rest)}, in all", us(sum(one.gap_us or 0.0 for one in rest)), *[""] * (len(heads) - 2)])
    print_columns(out, heads, rows, section="starts")
    legend = "gap: the GPU's idle time before the activity. wait: from the launch call's start to the activity's start."
    parts = "call (the launch call), queue (behind earlier work of the stream), "
    parts += "own (slices of the profiler and the driver), " * own
    paragraph(out, f"{legend} The wait consists of {parts}and way (the rest).")
    for one in shown:
        if one.own_us:
            paragraph(out, f"own, before {plain(short(one.name, 40))}: {_named(one.own_us)}", rest="  ")
    explained = sorted(
        (one for one in found if (one.gap_us or 0) > LONG_ENOUGH_US and one.gap_in), key=lambda one: -one.gap_us
    )
    for one in explained[:CAUSES_SHOWN]:
        line = f"in the gap before {plain(short(one.name, 40))} the launching thread was in {_named(one.gap_in)}"
        paragraph(out, line, rest="  ")


def _named(times: dict[str, float]) -> str:
    return ", ".join(f"{plain(short(name, 40))} {us(time)}" for name, time in list(times.items())[:NAMED])
