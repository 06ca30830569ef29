"""Several runs side by side: the pace and its reason, the figures, the predictions, the changes."""

from collections.abc import Callable, Sequence
from functools import partial

from rich.console import Console

from tracereader.changes import catalogue
from tracereader.changes.catalogue import opportunities
from tracereader.changes.opportunity import Opportunity
from tracereader.figures import Summary
from tracereader.findings import gpu_work, steps
from tracereader.findings.finding import family_in_words, in_one_unit, size, tokens_s
from tracereader.replay import Refused
from tracereader.show import warnings
from tracereader.show.text import Name, console, paragraph, percent, plain, print_columns
from tracereader.show.view import View, others
from tracereader.trace import Trace
from tracereader.two_runs import compare, faster, sentences
from tracereader.two_runs.side import Side

SECTIONS = ("short", "steps", "gpu", "cpu", "work", "chain")
LIMITS = {"communication": "collectives", "neither": "CPU"}  # words that fit the table


def proposed_by(trace: Trace, summary: Summary) -> Sequence[Opportunity]:
    """Return the changes that a run's report proposes, without those whose saving one rank does not show."""
    found = opportunities(trace, summary)
    return () if isinstance(found, Refused) else [one for one in found if not one.is_unknown]


def side_by_side(
    summaries: Sequence[Summary], view: View, previous: bool = False, proposed: Sequence[Sequence[Opportunity]] = ()
) -> None:
    """Print several runs, each compared with the first, or with the one before it.

    The sections of a report stand for: short the pace and its reason, steps the figures, gpu the time by family, cpu
    the ops' self time, work the changes of the GPU work, chain those of the ops. proposed: the changes that each run's
    report proposes, if they are known, which are compared with the other runs. Raises BadInput.
    """
    wanted = view.shown_of(SECTIONS, "a comparison")
    on_gpu = any(one.has_gpu_work for one in summaries)
    if view.usual:
        wanted = ["short", "steps", "gpu" if on_gpu else "cpu"]
    if not on_gpu:
        wanted = [name for name in wanted if name != "gpu"]
    out = console()
    summaries = compare.with_like_families(summaries)
    sides = [Side(summary) for summary in summaries]
    names = compare.distinct_names(sides)
    bases = [sides[max(0, number - 1)] if previous else sides[0] for number in range(len(sides))]
    _runs(out, sides, names, view)
    sections = {
        "short": lambda: _in_short(out, sides, bases, view, proposed),
        "steps": lambda: _figures(out, sides, "per step" if view.step is None else f"step #{view.step}"),
        "gpu": lambda: _by_families(out, summaries, view),
        "cpu": lambda: _times(out, "CPU self time of a step", [_by_op(one) for one in summaries], view),
        "work": lambda: _differences(out, sides, names, bases, wanted),
        "chain": lambda: _differences(out, sides, names, bases, wanted),
    }
    for name in [name for name in wanted if name != "chain" or "work" not in wanted]:
        out.print()
        sections[name]()
    if "gpu" in (view.only or ()) and not on_gpu:
        out.print()
        out.print("gpu: not in these traces (no GPU work)")
    if view.usual:
        out.print()
        out.print("more: --all, or --only work,chain (kernels and ops that are gone or new)")


def _runs(out: Console, sides: Sequence[Side], names: Sequence[str], view: View) -> None:
    """Print the runs by number, with their devices if those differ."""
    devices = [compare.devices_of(side) for side in sides]
    differ = len(set(devices)) > 1
    for text in warnings.of_folder(view.left_out):
        paragraph(out, plain(text), warnings.MARK, " " * 8)
    out.print("[yellow]the devices differ[/yellow]" if differ else f"[bold]{plain(devices[0])}[/bold]")
    for number, (name, device, side) in enumerate(zip(names, devices, sides, strict=True), 1):
        text = name if not differ or name.endswith(f", {device}") else f"{name}, {device}"
        if some := side.summary.source.processes:
            text += f", process {some[0].name}"
        paragraph(out, plain(f"{text}{steps.by_calls(side.summary, ' step')}"), f"{number}  ", "   ")
        if busy := steps.busy_machine(side.summary):
            paragraph(out, plain(busy), f"   {warnings.MARK}", " " * 11)


def _in_short(
    out: Console, sides: Sequence[Side], bases: Sequence[Side], view: View, proposed: Sequence[Sequence[Opportunity]]
) -> None:
    """Print how much faster each run is than its base, why, and the base report's predictions for it."""
    two = len(sides) == 2
    for number, (side, base) in enumerate(zip(sides[1:], bases[1:], strict=True), 2):
        against = sides.index(base)
        who, whose = ("the second", "the first's") if two else (f"run {number}", f"run {against + 1}'s")
        of_one_step = view.step is not None
        than = "" if two else f"run {against + 1}"
        paragraph(out, plain(faster.sentence(who, base, side, than, of_one_step)), rest="    ")
        by_step = not of_one_step and compare.compare_by_step(base, side)
        known = proposed[against] if against < len(proposed) and by_step else ()
        for text in filter(None, [*_beside(base, side, known, whose), sentences.flags(base, side)]):
            paragraph(out, plain(text), "  · ", "    ")


def _beside(base: Side, side: Side, proposed: Sequence[Opportunity], whose: str) -> list[str]:
    """Return the pace without the profiler, and the predictions for this run."""
    found = []
    unprofiled = [one.summary.unprofiled_step_us for one in (base, side)]
    if None not in unprofiled and not compare.only_one_has_gpu_work(base, side):
        found.append(f"without the profiler it {faster.pace(*unprofiled)}")
    checked = catalogue.checked(base, proposed, side) if proposed else None
    if checked is None:
        return found
    times = (base.summary.recorded_step_us, checked.measured_us)
    if len(checked.proposals) > 1:
        unit, (_, measured, *after) = in_one_unit([*times, *(one.step_us_after for one in checked.proposals)])
        predicted = zip(checked.proposals, after, strict=True)
        each = "; ".join(f"{one.title}: {us} {unit}{_assumed(one)}" for one, us in predicted)
        several = f"{whose} report proposed several of its changes. Predicted for each by itself: {each}"
        return [*found, f"{several}. Measured together: {measured} {unit}"]
    (one,) = checked.proposals
    told = prediction(one, whose, times, unprofiled[1], faster.why_missed(base, side, one.step_us_after, times[1]))
    if checked.also_compiled:
        told += "; the prediction leaves out that this run also compiles its kernels"
    return [*found, told]


def prediction(
    one: Opportunity, whose: str, times_us: Sequence[float], unprofiled_us: float | None, why: str = ""
) -> str:
    """Return a sentence on what a report predicted of a change, and what was measured after it.

    whose: the report's run. times_us: times that the sentence's unit has to fit, of which the last one was measured.
    unprofiled_us: the step measured without the profiler, if it is known. why: why the prediction was wrong, if known.
    """
    unit, (*_, measured, after) = in_one_unit([*times_us, one.step_us_after])
    told = f"{whose} report proposed it ({one.title}): predicted {after} {unit}{_assumed(one)}, measured {measured}"
    told += f", because {why}" if why else ""
    if one.unprofiled_step_us_after is not None and unprofiled_us:
        unit, (expected, took) = in_one_unit([one.unprofiled_step_us_after, unprofiled_us])
        told += f"; without the profiler, predicted {expected} {unit}, measured {took}"
    return told


def _assumed(one: Opportunity) -> str:
    return " (estimated with peak or typical rates)" if one.basis == "bound" else ""


def _figures(out: Console, sides: Sequence[Side], title: str) -> None:
    """Print times, counts and memory: a measure is a row, a run a column."""
    some = [side.summary for side in sides]
    rows: list[tuple[str, ...]] = []
    times = partial(add_times, rows)

    def gpu(figure: Callable[[Side], float]) -> list[float | None]:
        return [figure(side) if side.summary.has_gpu_work else None for side in sides]

    def counts(name: str, values: Sequence[int | None]) -> None:
        if any(values):
            rows.append((name, *("–" if one is None else f"{one:,}" for one in values)))

    if title == "per step":
        times("step", [one.recorded_step_us for one in some])
        times("without profiler", [one.unprofiled_step_us for one in some])
    times("CPU time", [one.chosen.cpu_us for one in some])
    times("CPU, first step", [one.steps[0].cpu_us for one in some])
    if any(one.has_gpu_work for one in some):
        one_step = title != "per step"
        times("GPU busy", gpu(lambda side: side.summary.chosen.gpu_busy_us if one_step else side.summary.gpu_us))
        if not one_step:
            times("GPU idle", gpu(lambda side: max(0.0, side.summary.recorded_step_us - side.summary.gpu_us)))
            rows.append(("GPU idle, mean share", *map(percent, gpu(lambda side: side.summary.idle_share))))
        rows.append(("limited by", *(LIMITS.get(found := steps.bound_by(one), found) for one in some)))
        counts("launches", gpu(lambda side: side.summary.chosen.launches))
        for name, kind in (("kernels", "kernel"), ("copies", "memcpy"), ("memsets", "memset")):
            counts(name, gpu(lambda side, kind=kind: side.summary.count(kind)))
        counts("synchronizations", gpu(faster.synchronizations))
    decoding = [one.llm.decoding for one in some]
    if any(decoding):
        rows.append(("tokens/s", *(tokens_s(one.tokens_s) if one else "–" for one in decoding)))
    if any(side.peak_bytes for side in sides):
        rows.append(("memory, peak", *(size(side.peak_bytes) if side.peak_bytes else "–" for side in sides)))
    print_columns(out, (title, *(f"run {number}" for number in range(1, len(sides) + 1))), rows)


def add_times(rows: list[tuple[str, ...]], name: str, values: Sequence[float | None]) -> None:
    """Add the row of a measure (µs) with its unit, if any run has it."""
    if any(values):
        unit, cells = in_columns(values)
        rows.append((f"{name}, {unit}", *cells))


def in_columns(values: Sequence[float | None]) -> tuple[str, list[str]]:
    """Return the unit that fits the largest time (µs), and the times in it with equal decimals; a dash for None."""
    unit, _ = in_one_unit([one for one in values if one is not None])
    scale = {"s": 1e6, "ms": 1e3, "µs": 1.0}[unit]
    largest = max((one for one in values if one is not None), default=0.0) / scale
    digits = 1 if largest >= 100 else 2 if largest >= 10 else 3
    return unit, ["–" if one is None else f"{one / scale:,.{digits}f}" for one in values]


def _by_op(summary: Summary) -> dict[str, float]:
    return {name: one.self_us for name, one in summary.cpu.ops.items()}


def _by_families(out: Console, summaries: Sequence[Summary], view: View) -> None:
    times = [{family_in_words(family): us for family, us in one.by_family.items()} for one in summaries]
    _times(out, "GPU time of a step", times, view)
    if any(map(gpu_work.overlap, summaries)):
        out.print("summed by family (kernels overlap)")


def _times(out: Console, title: str, times: Sequence[dict[str, float]], view: View) -> None:
    """Print a row per name and a column per run. The largest differences come first; the rest is one row."""

    def spread(name: str) -> float:
        values = [one.get(name, 0.0) for one in times]
        return max(values) - min(values)

    ordered = sorted({name for one in times for name in one}, key=lambda name: (-spread(name), name))
    shown, rest = view.parted(ordered)
    values = [[one.get(name) for one in times] for name in shown]
    if rest:
        values.append([sum(one.get(name, 0.0) for name in rest) or None for one in times])
    unit, cells = in_columns([us for row in values for us in row])
    columns = len(times)
    rows = [
        (Name(name), *cells[columns * row : columns * (row + 1)])
        for row, name in enumerate([*shown, *[others(rest)] * bool(rest)])
    ]
    heads = (f"{title}, {unit}", *(f"run {number}" for number in range(1, columns + 1)))
    print_columns(out, heads, rows or [(Name("none"), *("–" for _ in times))])


def _differences(
    out: Console, sides: Sequence[Side], names: Sequence[str], bases: Sequence[Side], wanted: Sequence[str]
) -> None:
    """Print what changed and what stayed the same, a sentence a line. wanted: the sections that are shown."""
    first, work, ops = sides[0], "work" in wanted, "chain" in wanted
    if work:
        setup = sentences.setup(first) if any(side.summary.has_gpu_work for side in sides) else ""
    else:
        setup = ", ".join(sorted(first.ops))
    previous = any(base is not first for base in bases)
    out.print(f"[bold]{plain(names[0])}[/bold]")
    out.print(f"  (the others are compared with {'the run before each' if previous else 'this run'})")
    paragraph(out, plain(setup), "  ", "  ")
    for name, side, base in zip(names[1:], sides[1:], bases[1:], strict=True):
        found = sentences.difference(base, side)
        changed = found.flags_changed + found.work_changed * work + found.ops_changed * ops
        same = found.work_same * work + found.ops_same * ops
        out.print(f"[bold]{plain(name)}[/bold]")
        for title, texts in (("changed:", changed or ("nothing",)), ("the same:", same)):
            if texts:
                out.print(f"  {title}")
            for text in texts:
                paragraph(out, plain(text), "  · ", "    ")
