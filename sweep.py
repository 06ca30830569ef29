"""Run a numbered script over several sizes: when does the CPU not matter?

Profiles one run for each value, reads the traces, and compares the rates of
the kernels with the best rates that this machine reaches now. It prints a
table and writes a picture beside the traces.

  uv run sweep.py 01_matmul_add.py --size 64 256 1024 2048 4096 --warmup
  uv run sweep.py 03_simple_mlp.py --seq 16 64 256 1024 --compile --warmup
  uv run sweep.py 05_llm.py --batch 1 2 4 8 16 32 64 128 256 --graph
  uv run sweep.py 03_simple_mlp.py "03_simple_mlp.py --compile" --seq 64 256

Give several whole numbers to one of the script's flags. All other flags are
the script's own. Several scripts, each in quotes if it has flags of its own,
are drawn in one picture of time and memory.
"""

import gc
import itertools
import math
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.flags import advice, load_script, one_by_one
from common.publish import published
from tracereader.command import BadInput, OneLineParser, command
from tracereader.figures.regime import MUCH_IDLE

if TYPE_CHECKING:  # it imports torch, and the flags are read first
    from common.speed import Roof

FOR_ONE_RUN = ("--guess", "--open", "--lanes", "--step", "--only", "--all")


@dataclass(frozen=True)
class Point:
    """The figures of the run with one value of the flag. A figure that the trace does not decide is None."""

    value: int
    cpu_us: float  # of the typical step
    busy_us: float
    bound_by: str
    idle_share: float | None  # the GPU's idle time between steps included
    pointwise_share: float | None  # of a step's GPU time; on a CPU of the time in ops that compute
    tflops: float | None  # of all matrix products
    gb_s: float | None  # of all pointwise kernels
    peak_bytes: int | None = None  # peak device memory, inputs included
    compute_share: float | None = None  # on a CPU: the share of the step in ops that compute
    busy: str | None = None  # evidence that other programs used the cores
    decoding: Any = None  # tracereader.figures.decoding, if the run stored its model

    @classmethod
    def of(cls, value: int, trace: Path) -> "Point":
        from tracereader.figures import summarize
        from tracereader.figures.cpu_work import covered_us
        from tracereader.findings.steps import bound_by, busy_machine
        from tracereader.trace import read

        summary = summarize(read(trace))
        work = summary.gpu_work or summary.cpu.cpu_work
        total = sum(one.us for one in work)
        on_gpu = bool(summary.gpu_work)
        products = [one for one in work if one.family in ("GEMM", "matrix product")]
        return cls(
            value=value,
            cpu_us=summary.chosen.cpu_us,
            busy_us=summary.chosen.gpu_busy_us,
            bound_by=bound_by(summary),
            idle_share=summary.idle_share,
            pointwise_share=sum(one.us for one in work if one.family == "pointwise") / total if total else None,
            compute_share=None if on_gpu or not total else covered_us(summary.cpu.cpu_work) / summary.chosen.cpu_us,
            tflops=_per_us([(one.flops, one.us) for one in products], 1e6),
            gb_s=_per_us([(one.bytes_moved, one.us) for one in work if one.family == "pointwise"], 1e3),
            peak_bytes=summary.source.facts.peak_bytes,
            busy=busy_machine(summary),
            decoding=summary.llm.decoding,
        )

    @property
    def step_us(self) -> float:
        """The time of a step: GPU busy time, or CPU time in a run without a GPU."""
        return self.busy_us or self.cpu_us


@dataclass(frozen=True)
class Series:
    """One script with its own flags, over all values that could be run."""

    label: str
    points: list[Point]


def _per_us(amounts: Sequence[tuple[int | None, float]], unit: float) -> float | None:
    known = [(amount, us) for amount, us in amounts if amount and us]
    return sum(amount for amount, _ in known) / sum(us for _, us in known) / unit if known else None


def roofs(args, points: Sequence[Point], name: str) -> "tuple[Roof, Roof]":
    """Return the peaks in TFLOP/s and GB/s: the best of what is measured now and of the sweep, so none is higher."""
    from common.speed import Roof, measured_roofs

    compute, memory = measured_roofs(args.device, args.dtype)
    for point in points:
        here = f"this sweep at {name} {point.value}"
        compute = max(compute, Roof(point.tflops or 0.0, here), key=lambda roof: roof.rate)
        memory = max(memory, Roof(point.gb_s or 0.0, f"{here}, some of it from cache"), key=lambda roof: roof.rate)
    return compute, memory


def crossing(points: Sequence[Point]) -> float | None:
    """Return the value at which a step's GPU time begins to exceed its CPU time, interpolated, or None."""
    for before, after in itertools.pairwise(points):
        if before.value and 0 < before.busy_us < before.cpu_us and after.busy_us >= after.cpu_us:
            # Both grow by powers of the size, so the line between them is straight in logarithms.
            one, two = (math.log(point.busy_us / point.cpu_us) for point in (before, after))
            return math.exp(math.log(before.value) + math.log(after.value / before.value) * -one / (two - one))
    return None


def show(name: str, points: Sequence[Point], compute: "Roof", memory: "Roof") -> None:
    """Print a line for each value, the peaks, and the value at which the regime changes."""
    from tracereader.findings.finding import size
    from tracereader.show.text import console, paragraph, percent, plain, print_columns, rate, us

    out = console()
    out.print()
    gpu = any(one.busy_us for one in points)
    unit, scale = ("TFLOP/s", 1) if gpu else ("GFLOP/s", 1e3)
    # A column without values is left out. A replayed CUDA graph has no shapes in the trace, and so no rates.
    columns = {
        name: ("", [str(one.value) for one in points]),
        "CPU µs": ("", [us(one.cpu_us) for one in points]),
        "GPU µs": ("busy, of a step", [us(one.busy_us) if gpu else "–" for one in points]),
        "idle": ("", [percent(one.idle_share) for one in points]),
        "computing": ("share of the step in ops that compute", [percent(one.compute_share) for one in points]),
        "pointwise": (
            "share of the GPU's time in pointwise kernels" if gpu else "share of the ops' time in pointwise ops",
            [percent(one.pointwise_share) for one in points],
        ),
        unit: ("of matrix products", [rate(one.tflops and one.tflops * scale) for one in points]),
        "GB/s": ("of pointwise work", [rate(one.gb_s) for one in points]),
        "memory": ("the peak", [size(one.peak_bytes) if one.peak_bytes else "–" for one in points]),
        "bound by": ("", [one.bound_by for one in points]),
    }
    shown = {head: column for head, column in columns.items() if set(column[1]) != {"–"}}
    rows = list(zip(*(cells for _, cells in shown.values()), strict=True))
    print_columns(out, tuple(shown), rows, left=(len(shown) - 1,))
    legend = [f"{head}: {says}" for head, (says, _) in shown.items() if says]
    bound = {row[-1] for row in rows}
    if not gpu and "overhead" in bound:
        legend.append(f"overhead: more than {MUCH_IDLE:.0%} of the step is in no op")
    if "neither" in bound:
        legend.append("neither: far from both measured peaks")
    paragraph(out, "; ".join(legend))
    for one in points:
        if one.busy:
            paragraph(out, f"{name} {one.value}: {plain(one.busy)}", "[yellow]warning[/yellow] ", " " * 8)
    out.print()
    paragraph(out, f"{rate(compute.rate * scale)} {unit} ({compute.reached_by}),", "peaks of this machine: ", " " * 23)
    paragraph(out, f"{rate(memory.rate)} GB/s ({memory.reached_by})", " " * 23, " " * 23)
    if at := crossing(points):
        out.print(f"a step's GPU work outgrows its CPU time at about {name} {at:,.0f}")


def least_us(facts, compute: "Roof", memory: "Roof") -> tuple[float, float]:
    """Return the least µs of a decode step: to read weights and cache once, and to multiply by the weights."""
    read = (facts.weight_bytes + (facts.cache_bytes or 0)) / memory.rate / 1e3
    return read, 2 * facts.parameters * facts.tokens / compute.rate / 1e6


def decodes(points: Sequence[Point]) -> bool:
    """Return whether each run stored what its decode step reads."""
    found = [point.decoding and point.decoding.facts for point in points]
    return all(one and one.phase == "decode" and one.weight_bytes and one.parameters for one in found)


def show_decoding(name: str, points: Sequence[Point], compute: "Roof", memory: "Roof") -> None:
    """Print tokens per second beside both limits, and the batch at which arithmetic becomes the lower limit."""
    from tracereader.findings.finding import size
    from tracereader.show.text import console, paragraph, print_columns, us

    out, rows = console(), []
    for point in points:
        facts = point.decoding.facts
        read, multiply = (facts.tokens / one * 1e6 for one in least_us(facts, compute, memory))
        rows.append((str(point.value), *(f"{one:,.1f}" for one in (point.decoding.tokens_s, read, multiply))))
    out.print()
    print_columns(out, (name, "tokens a second", "reading allows", "arithmetic allows"), rows)
    if name != "batch":  # with another flag, the size of the cache may differ between the values
        return
    facts = points[0].decoding.facts
    _, multiply = (one / facts.batch for one in least_us(facts, compute, memory))
    cache = (facts.cache_bytes or 0) / facts.batch
    fetch, weights = cache / memory.rate / 1e3, facts.weight_bytes / memory.rate / 1e3
    out.print()
    paragraph(
        out,
        f"a step reads {size(facts.weight_bytes)} of weights once, {us(weights)} µs; each sequence of it brings "
        f"{size(int(cache))} of keys and values, {us(fetch)} µs, and {us(multiply)} µs of arithmetic:",
    )
    if multiply > fetch:
        turns = weights / (multiply - fetch)
        out.print(f"  memory-bound up to a batch of about {turns:,.0f}, compute-bound from there")
    else:
        out.print("  memory-bound at any batch, since a sequence's cache takes longer than its arithmetic")


def _draw_decoding(axis, name: str, points: Sequence[Point], compute: "Roof", memory: "Roof") -> None:
    values = [point.value for point in points]
    facts = [point.decoding.facts for point in points]
    roofs = zip(*(least_us(one, compute, memory) for one in facts), strict=True)
    axis.set(xscale=_scale(values), yscale="log", xlabel=name, ylabel="tokens a second", title="decoding")
    axis.plot(values, [point.decoding.tokens_s for point in points], "o-", color="tab:blue", label="while profiled")
    for label, us, style in zip(("reading allows", "arithmetic allows"), roofs, ("--", ":"), strict=True):
        rates = [one.tokens / least * 1e6 for one, least in zip(facts, us, strict=True)]
        axis.plot(values, rates, style, color="black", label=label)
    axis.legend(loc="lower right")


def picture(file: Path, title: str, name: str, points: Sequence[Point], compute: "Roof", memory: "Roof") -> None:
    """Draw time, rates and memory over the values. Raises ImportError without matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    values = [point.value for point in points]
    gpu = any(point.busy_us for point in points)
    rates = gpu and any(point.tflops or point.gb_s for point in points)  # a replayed CUDA graph has none
    panels = [7, *([5] if rates else []), *([5] if decodes(points) else []), *([4] if points[0].peak_bytes else [])]
    figure, axes = plt.subplots(
        1, len(panels), figsize=(sum(panels), 4.6), width_ratios=panels, squeeze=False, layout="constrained"
    )
    times = axes[0][0]
    times.set(xscale=_scale(values), yscale="log", xlabel=name, ylabel="µs", title="time of one step")
    times.plot(values, [point.cpu_us for point in points], "o-", color="tab:blue", label="CPU, one step")
    if gpu:
        times.plot(values, [point.busy_us for point in points], "s-", color="tab:red", label="GPU busy, one step")
        _mark_crossing(times, name, values, crossing(points))
    if rates:
        _draw_rates(axes[0][1], name, points, compute, memory)
    if decodes(points):
        _draw_decoding(axes[0][1 + rates], name, points, compute, memory)
    if points[0].peak_bytes:
        axes[0][-1].set(xscale=_scale(values), yscale="log", xlabel=name, ylabel="MB", title="peak device memory")
        axes[0][-1].plot(values, [(point.peak_bytes or 0) / 1e6 for point in points], "o-", color="tab:purple")
    times.margins(y=0.15)  # room for the words above the curves
    times.legend(loc="upper left", bbox_to_anchor=(0, 0.92))
    for axis in axes[0]:
        axis.set_xticks(values, [str(value) for value in values], rotation=30)
        axis.xaxis.minorticks_off()
        axis.grid(alpha=0.25)
    _save(figure, title, file)


def _scale(values: Sequence[int]) -> str:
    return "log" if all(values) else "symlog"


def _save(figure, title: str, file: Path) -> None:
    """Write the picture atomically, and close it."""
    import matplotlib.pyplot as plt

    figure.suptitle(title)
    try:
        with published(file.parent, file.name) as (unfinished,):
            figure.savefig(unfinished, dpi=110, format="png")
    finally:
        plt.close(figure)


def _mark_crossing(axis, name: str, values: Sequence[int], at: float | None) -> None:
    if at is None:
        return
    axis.axvline(at, color="gray", linestyle="--", linewidth=1)
    axis.axvspan(values[0], at, color="tab:blue", alpha=0.06)
    axis.axvspan(at, values[-1], color="tab:red", alpha=0.06)
    for side, text, align in ((values[0], "overhead-bound", "left"), (values[-1], "GPU-bound", "right")):
        axis.text(side, 0.93, f" {text} ", transform=axis.get_xaxis_transform(), ha=align, color="dimgray")
    axis.annotate(f" {name} {at:,.0f}", (at, 0.03), xycoords=axis.get_xaxis_transform(), color="dimgray")


def _draw_rates(axis, name: str, points: Sequence[Point], compute: "Roof", memory: "Roof") -> None:
    for values, roof, color, what, unit in (
        ([point.tflops for point in points], compute, "tab:red", "matrix product", "TFLOP/s"),
        ([point.gb_s for point in points], memory, "tab:green", "pointwise", "GB/s"),
    ):
        known = [(point.value, value / roof.rate) for point, value in zip(points, values, strict=True) if value]
        if known:
            axis.plot(*zip(*known, strict=True), "o-", color=color, label=f"{what}, of {roof.rate:,.0f} {unit}")
    axis.axhline(1, color="black", linewidth=1)
    peak_text = "peak: the best rate that this machine reached in the same run"
    axis.text(points[0].value, 1.02, peak_text, va="bottom", fontsize="small")
    scale = _scale([point.value for point in points])
    axis.set(xscale=scale, xlabel=name, ylabel="share of the peak", title="rate of the kernels", ylim=(0, 1.12))
    axis.legend(loc="lower right")


def show_together(name: str, series: Sequence[Series]) -> None:
    """Print time and memory of each series by value, and how each grows between the two largest values."""
    from tracereader.findings.finding import size
    from tracereader.show.text import Name, console, print_columns, us

    out = console()
    values = sorted({point.value for one in series for point in one.points})
    gpu = any(point.busy_us for one in series for point in one.points)
    for what, of, written in (
        ("GPU busy, µs a step" if gpu else "µs a step", lambda point: point.step_us, us),
        ("peak device memory", lambda point: point.peak_bytes, size),
    ):
        rows = []
        for one in series:
            known = {point.value: of(point) for point in one.points if of(point)}
            if known:
                cells = [written(known[value]) if value in known else "–" for value in values]
                rows.append((Name(one.label), *cells, _growth(name, known)))
        if rows:
            out.print()
            print_columns(out, (f"{what}, by {name}", *map(str, values), "grows as"), rows)
    out.print(f"grows as: the power of {name}, between the two largest")


def _growth(name: str, known: dict[int, float]) -> str:
    """Return the power of the flag with which a figure grew between its two largest values."""
    (one, before), (two, after) = ([(0, 0.0)] * 2 + sorted(known.items()))[-2:]
    if not one:
        return "–"
    return f"{name}^{math.log(after / before) / math.log(two / one):.1f}"


def picture_together(file: Path, title: str, name: str, series: Sequence[Series]) -> None:
    """Draw all series' time and memory over the values. Raises ImportError without matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    gpu = any(point.busy_us for one in series for point in one.points)
    panels = [("GPU busy, one step" if gpu else "time of one step", "µs", lambda point: point.step_us)]
    if any(point.peak_bytes for one in series for point in one.points):
        panels.append(("peak device memory", "MB", lambda point: (point.peak_bytes or 0) / 1e6))
    figure, axes = plt.subplots(1, len(panels), figsize=(7 * len(panels), 5), squeeze=False, layout="constrained")
    values = sorted({point.value for one in series for point in one.points})
    for axis, (what, unit, of) in zip(axes[0], panels, strict=True):
        for one, marker in zip((one for one in series if one.points), itertools.cycle("os^vDPX*")):
            axis.plot([point.value for point in one.points], [of(point) for point in one.points], marker=marker,
                      label=one.label, alpha=0.8)  # fmt: skip
        axis.set(xscale=_scale(values), yscale="log", xlabel=name, ylabel=unit, title=what)
        axis.set_xticks(values, [str(value) for value in values], rotation=30)
        axis.xaxis.minorticks_off()
        axis.grid(alpha=0.25)
    axes[0][0].legend(fontsize="small")
    _save(figure, title, file)


def sweep(argv: Sequence[str] | None = None) -> None:
    parser = OneLineParser(
        prog="sweep.py",
        usage="%(prog)s SCRIPT [SCRIPT …] --FLAG N N … [the scripts' flags]",
        description=(__doc__ or "").strip(),
    )
    parser.add_argument(
        "scripts", metavar="SCRIPT", nargs="+", help='a numbered script; "SCRIPT --its flags" for flags of its own'
    )
    parsed, flags = parser.parse_known_args(argv)
    flag, points_argv = one_by_one(flags)
    name = flag.removeprefix("--")
    todo = []
    for typed in parsed.scripts:
        file, *own = _words(typed)
        for word in (*flags, *own):
            if word.split("=")[0] in FOR_ONE_RUN:
                raise BadInput(f"{word} is for one run, and this makes {len(points_argv) * len(parsed.scripts)}")
        # Rates need recorded shapes.
        words = {value: [*some, *own, "--record-shapes"] for value, some in sorted(points_argv.items())}
        script = load_script(Path(file), next(iter(words.values())))
        for some in words.values():
            script.flags(some)  # checks all values first, so that a typing error ends the sweep
        todo.append((" ".join([Path(file).stem, *own]), script, words))

    from common.harness import prepare
    from tracereader.show.text import console, print_whole, shown_path

    series, run = [], None
    for label, script, words in todo:
        points, last = _points(name, label if len(todo) > 1 else "", script, words)
        series.append(Series(label, points))
        run = last or run
    if run is None:
        raise BadInput("none of them could be run")
    script, words = todo[-1][1:]
    args = prepare(script.flags(next(iter(words.values()))), script.predictions)
    if len(series) == 1:
        points = series[0].points
        compute, memory = roofs(args, points, name)
        show(name, points, compute, memory)
        if decodes(points):
            show_decoding(name, points, compute, memory)
        file = run.trace.with_name(f"sweep_{name}_{points[0].value}_to_{run.trace.stem}.png")
        draw = [picture, file, f"{run.trace.parent.name} · {run.machine}", name, points, compute, memory]
    else:
        show_together(name, series)
        values = sorted(words)
        what = "_".join(_short(one.label) for one in series)
        file = args.out / f"sweep_{name}_{values[0]}_to_{run.trace.stem}_{what}.png"
        draw = [picture_together, file, run.machine, name, series]
    try:
        draw[0](*draw[1:])
    except ImportError:
        console().print("no picture without matplotlib: uv run --extra plot … draws it")
    else:
        print_whole(console(), shown_path(file), "picture:", first=False)


def _words(typed: str) -> list[str]:
    """Return the script and its own flags. A path that contains blanks is one word."""
    if Path(typed).is_file():
        return [typed]
    try:
        return shlex.split(typed) or [typed]
    except ValueError:
        raise BadInput(f"{typed}: a quotation mark is not closed") from None


def _short(label: str) -> str:
    """Return a series' part of a file's name: the script's number and its own flags."""
    script, *own = label.split()
    number = re.match(r"\d+(_[a-z](?=_))?", script)
    return "-".join([number[0] if number else script, *(re.sub(r"[^\w.]", "", word) for word in own)])


def _points(name: str, label: str, script, words: dict[int, list[str]]):
    """Profile once for each value; return the points and the last run. What does not fit is reported and skipped."""
    import torch

    from common.lesson import run_once
    from tracereader.show.text import console, paragraph, plain, print_whole, shown_path

    points, run = [], None
    refused = None
    for value, some in words.items():
        torch.compiler.reset()  # or the second size would be compiled for every size
        gc.collect()  # so that memory of an earlier run does not count in this one's peak
        if torch.cuda.is_initialized():
            torch._C._cuda_clearCublasWorkspaces()  # 34 MB on the H200 that a later run may not need
        where = f"{label} {name} {value}".strip()
        try:
            run = run_once(script, some)
        except BadInput as problem:
            refused = problem
            paragraph(console(), plain(f"{where}   not run: {problem}"))
            continue
        points.append(Point.of(value, run.trace))
        print_whole(console(), shown_path(run.trace), f"{where}  ", first=False)
    if run is None and refused and not label:
        raise refused
    return points, run


main = command(sweep, advice)
if __name__ == "__main__":
    sys.exit(main())
