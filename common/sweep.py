"""One rung over several sizes: where the CPU stops being what a step waits for."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from common import reading, screen, trace

if TYPE_CHECKING:
    from common.harness import Run
    from common.measure import Roofs


@dataclass(frozen=True)
class Point:
    """One size, as its trace shows it. None where the trace has nothing to measure it by."""

    size: int
    file: Path
    device: str
    cpu_us: float  # of the median step
    busy_us: float
    regime: reading.Regime
    pointwise_share: float | None  # of the GPU's time in a step
    tflops: float | None  # of the matrix products together
    gb_s: float | None  # of the pointwise kernels together

    @classmethod
    def of(cls, size: int, run: "Run") -> "Point":
        read = trace.read(run.trace)
        rows = reading.work_rows(read)
        gemms = [row for row in rows if row.shape]
        pointwise = [row for row in rows if row.says.family == "pointwise"]
        measured = [row for row in pointwise if row.moved]
        step = reading.typical(read)
        total = sum(row.us for row in rows)
        gemm_us, moving_us = (sum(row.us for row in some) for some in (gemms, measured))
        return cls(
            size=size,
            file=run.trace,
            device=run.device_name,
            cpu_us=step.us,
            busy_us=reading.busy_us(step.work),
            regime=reading.regime(read),
            pointwise_share=sum(row.us for row in pointwise) / total if total else None,
            tflops=sum(row.shape.flops for row in gemms) / gemm_us / 1e6 if gemm_us else None,
            gb_s=sum(row.moved for row in measured) / moving_us / 1e3 if moving_us else None,
        )


def crossing(points: Sequence[Point]) -> float | None:
    """The size at which a step's GPU work begins to take longer than its CPU time, between two points."""
    for before, after in itertools.pairwise(points):
        if 0 < before.busy_us < before.cpu_us and after.busy_us >= after.cpu_us:
            # Both grow by powers of the size, so the line between them is straight in logarithms.
            one, two = (math.log(point.busy_us / point.cpu_us) for point in (before, after))
            return math.exp(math.log(before.size) + math.log(after.size / before.size) * -one / (two - one))
    return None


def picture(over: str, points: Sequence[Point], roofs: "Roofs") -> None:
    """Save the picture beside the traces; without matplotlib, say how to get it."""
    try:
        import matplotlib
    except ImportError:
        screen.no_picture()
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    first, last = points[0], points[-1]
    script = last.file.parent.name
    file = last.file.parent / f"sweep_{over}_{first.size}_to_{last.file.stem}.png"
    sizes = [point.size for point in points]
    gpu = any(point.busy_us for point in points)
    panels, wide = (2, 12) if gpu else (1, 7)
    figure, axes = plt.subplots(1, panels, figsize=(wide, 4.6), squeeze=False, layout="constrained")
    time = axes[0][0]
    time.set(xscale="log", yscale="log", xlabel=over, ylabel="µs", title="time of one step")
    time.plot(sizes, [point.cpu_us for point in points], "o-", color="tab:blue", label="CPU, one step")
    if gpu:
        time.plot(sizes, [point.busy_us for point in points], "s-", color="tab:red", label="GPU busy, one step")
        if at := crossing(points):
            time.axvline(at, color="gray", linestyle="--", linewidth=1)
            time.axvspan(sizes[0], at, color="tab:blue", alpha=0.06)
            time.axvspan(at, sizes[-1], color="tab:red", alpha=0.06)
            for side, text, align in ((sizes[0], "overhead-bound", "left"), (sizes[-1], "compute-bound", "right")):
                time.text(side, 0.93, f" {text} ", transform=time.get_xaxis_transform(), ha=align, color="dimgray")
            time.annotate(f" {over} {at:,.0f}", (at, 0.03), xycoords=time.get_xaxis_transform(), color="dimgray")
    time.legend(loc="upper left", bbox_to_anchor=(0, 0.92))
    if gpu:
        rate = axes[0][1]
        for values, roof, color, what, unit in (
            ([point.tflops for point in points], roofs.tflops, "tab:red", "matrix product", "TFLOP/s"),
            ([point.gb_s for point in points], roofs.gb_s, "tab:green", "pointwise", "GB/s"),
        ):
            known = [(size, value / roof) for size, value in zip(sizes, values, strict=True) if value]
            if known:
                rate.plot(*zip(*known, strict=True), "o-", color=color, label=f"{what}, of {roof:,.0f} {unit}")
        rate.axhline(1, color="black", linewidth=1)
        rate.text(sizes[0], 1.02, "roof: what this machine reached in the same run", va="bottom", fontsize="small")
        rate.margins(y=0.1)
        rate.set(xscale="log", xlabel=over, ylabel="share of the measured roof", title="rate of the kernels")
        rate.set_ylim(bottom=0)
        rate.legend(loc="lower right")
    for axis in axes[0]:
        axis.set_xticks(sizes, [str(size) for size in sizes], rotation=30)
        axis.minorticks_off()
        axis.grid(alpha=0.25)
    figure.suptitle(f"{script} · {last.device}")
    figure.savefig(file, dpi=110)
    plt.close(figure)
    screen.saved_picture(file)
