"""The same GPU activity over the steps, as a line of characters, with its median, mean and ramp."""

from collections.abc import Sequence
from statistics import median

from rich.console import Console

from tracereader.figures.series import Series
from tracereader.findings.finding import counted
from tracereader.findings.gpu_work import VARIES
from tracereader.show.text import Name, kernel_labels, paragraph, plain, print_columns, sharing, unit_of
from tracereader.show.view import ROWS, View
from tracereader.trace import STEP
from tracereader.trace.kernel_names import short

ENOUGH = 8  # steps; in fewer, one outlier is more than a tenth of them
COLUMNS = 20
BARS, ASCII_BARS = "▁▂▃▄▅▆▇█", "_.-=+*#@"
# With a mean this far above the median, one or two slow steps determine the mean.
MEAN_MISLEADS = 1.02


def show(
    out: Console, found: Sequence[Series], names: Sequence[str], view: View, ascii_only: bool, numbered_script: bool
) -> None:
    """Print a line for each of the costliest activities; if asked for, explain the first one.

    names: those of all kernels of the report. numbered_script: whether one made the trace, so that its flags are known.
    """
    shown = found[: view.most(ROWS)]
    if not shown:
        out.print("[bold]the same activities over the steps[/bold]: none in every step")
        return
    named = kernel_labels([*names, *(one.name for one in found)])
    times = [us for one in shown for us in one.us]
    (unit,) = sharing(unit_of(times).name, [times])
    steps = max(len(one.us) for one in shown)
    rows = [
        [
            Name(named[one.name] + f" ({one.nth + 1})" * bool(one.nth)), spark(one.us, ascii_only), unit(one.median_us),
            unit(one.mean_us), unit.range(min(one.us), max(one.us)), "–" if one.ramp is None else f"x {one.ramp:.2f}",
        ]
        for one in shown
    ]  # fmt: skip
    kind = "GPU activities" if shown[0].on_gpu else "ops by self time"
    if len(shown) < len(found):
        kind = f"the {len(shown)} costliest {kind}"
    heads = (f"{kind} over {counted(steps, 'step')}, {unit.name}", "", "median", "mean", "range", "ramp")
    print_columns(out, heads, rows, left=(0, 1), section="series")
    uneven = [one for one in shown if one.other_calls]
    if uneven:
        whose = " and similar ops are" if len(uneven) > 1 else " is"
        told = f"called a different number of times in {counted(uneven[0].other_calls, 'step')}"
        paragraph(out, f"{plain(short(uneven[0].name, 50))}{whose} {told}, which the line leaves out")
    if steps < ENOUGH:
        few = "1 step is" if steps == 1 else f"{steps} steps are"
        advice = "record with --active 20" if numbered_script else "record 20"
        paragraph(out, f"{few} too few to distinguish an outlier from a trend: {advice}")
        return
    if view.usual or len(shown[0].us) < ENOUGH:
        return
    paragraph(out, "ramp: the last quarter's median over the first's. A line's lowest bar is its fastest step")
    one = shown[0]
    if max(one.us) < VARIES * min(one.us):
        said = f"varies by up to {max(one.us) / min(one.us) - 1:.0%}"
    else:
        step = one.steps[one.us.index(max(one.us))].removeprefix(STEP[:-1])
        said = f"is slowest in {plain(step)}: {max(one.us) / one.median_us:.2f} times its median"
        if one.mean_us > MEAN_MISLEADS * one.median_us:
            said += f", so the mean is {one.mean_us / one.median_us - 1:.0%} above the median: quote the median"
    paragraph(out, f"{plain(short(one.name, 50))} {said}")


def spark(times: Sequence[float], ascii_only: bool = False) -> str:
    """Return one character per step, or per median of some. A full bar is at least VARIES times the fastest."""
    bars = ASCII_BARS if ascii_only else BARS
    each = -(-len(times) // COLUMNS)
    heights = [median(times[at : at + each]) for at in range(0, len(times), each)]
    low = min(heights)
    room = max(max(heights), VARIES * low) - low
    if not room:
        return bars[0] * len(heights)
    return "".join(bars[min(len(bars) - 1, int((one - low) / room * len(bars)))] for one in heights)
