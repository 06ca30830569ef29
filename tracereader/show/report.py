"""What one trace shows, from the file alone."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean

from rich.console import Console

from tracereader import expect
from tracereader.command import SECTIONS, BadInput
from tracereader.figures import Summary, summarize
from tracereader.figures.cpu_work import CpuWork, is_op
from tracereader.figures.gpu_time import BETWEEN_OPS
from tracereader.figures.layers import layer_names
from tracereader.figures.series import series
from tracereader.figures.starts import starts
from tracereader.figures.table import profiler_table
from tracereader.findings import cheatsheet, decoding, steps
from tracereader.findings.finding import counted, duration, family_in_words, size
from tracereader.findings.gpu_work import overlap
from tracereader.show import chain, lanes, predictions, repeats, training, work
from tracereader.show import series as series_of
from tracereader.show import starts as starts_of
from tracereader.show import table as table_of_torch
from tracereader.show.text import (
    Name,
    ascii_only,
    console,
    head,
    lines_of,
    paragraph,
    percent,
    plain,
    print_columns,
    print_whole,
    seconds,
    shown_path,
    us,
)
from tracereader.show.view import View, and_more
from tracereader.trace import STEP, Step, Trace, TraceError, read
from tracereader.trace.document import DEFAULT_LIMIT
from tracereader.trace.kernel_names import cut, labels, short
from tracereader.trace.labels import INDUCTORS_CALL

STEPS_SHOWN = 8
# A step with more pieces of GPU work is folded: by name, the costliest first.
SMALL = 40
ROWS_SHOWN = 5
LABELS_NAMED, OPS_NAMED, FUNCTIONS_NAMED, WORTH_NAMING = 4, 3, 3, 0.01
# Lines of a report that nobody asked all of; and how much of every table it shows: the first that fits.
LINES = 80
SHARES = (1.0, 0.6, 0.4, 0.2)
UNSHARED = ("lanes", "chain", "repeats")  # what looks alike whatever the share
# Left out, the first one first, where even the least of every table is too long.
LEFT_OUT_FIRST = ("series", "names", "cpu", "chain", "patterns", "repeats", "training", "work", "kernels")
OF_THE_GPU = ("gpu", "kernels", "work", "names", "starts", "repeats")
PATTERNS_SHOWN = 12
EXPLAINED = 12  # calls of a step up to which there is room for what each pattern means


def opened(path: Path, view: View, limit: int = DEFAULT_LIMIT) -> tuple[Trace, Summary]:
    """A trace, and the summary of it with the step that was asked for. Raises BadInput."""
    try:
        trace = read(path, limit)
    except TraceError as problem:
        raise BadInput(problem) from None
    return trace, summarize(trace, chosen_step(trace, view.step))


def chosen_step(trace: Trace, number: int | None) -> Step | None:
    """Step #number; None for a typical one. Raises BadInput where the trace does not hold it."""
    if number is None:
        return None
    for step in trace.steps:
        if step.name == f"{STEP}{number}":
            return step
    held = f"{trace.steps[0].name} to {trace.steps[-1].name}" if trace.has_steps else "no steps"
    raise BadInput(f"{trace.path.name}: --step {number}: the trace holds {held}; leave it out for a typical step")


def explain_file(path: Path, view: View) -> Summary:
    """Read a trace file and print all that it shows; its summary. Raises BadInput."""
    trace, summary = opened(path, view)
    explain(trace, summary, view)
    return summary


def explain(trace: Trace, summary: Summary, view: View) -> None:
    """All that one trace shows: the answer first, the evidence below it."""
    predicted = predictions.predictions_of(trace)
    wanted = _wanted(summary, bool(predicted), view)
    step = trace.steps[summary.typical_index]
    found = cheatsheet.found(summary)
    over_steps = series(trace, step, summary.left_out) if "series" in wanted else []
    out = console()
    sections: dict[str, Callable[[View], None]] = {
        "short": lambda view: _in_short(out, summary, found, view),
        "table": lambda view: table_of_torch.show(out, profiler_table(trace), len(trace.steps), view.brief, view.all),
        "guesses": lambda view: predictions.show(out, predicted, summary, view),
        "steps": lambda view: _steps(out, summary, view),
        "lanes": lambda view: _lanes(out, trace, step, summary),
        "gpu": lambda view: _gpu_time(out, summary, view),
        "training": lambda view: training.show(out, summary, view.most(ROWS_SHOWN), ascii_only(out)),
        "repeats": lambda view: repeats.table(out, summary),
        "kernels": lambda view: _kernels(out, summary, view),
        "cpu": lambda view: _cpu(out, summary, view),
        "work": lambda view: work.show(out, summary, view),
        "names": lambda view: work.names(out, summary, view),
        "starts": lambda view: starts_of.show(out, starts(trace, step), summary.chosen.number, view.all),
        "series": lambda view: series_of.show(
            out, over_steps, bool(view.only or view.all), view.all, ascii_only(out), bool(summary.source.facts.script)
        ),
        "chain": lambda view: chain.show(out, summary, view),
        "patterns": lambda view: _patterns(out, summary, found, view),
    }

    same: dict[str, str] = {}

    def written(view: View) -> dict[str, str]:
        found = {}
        with out.capture() as top:
            _header(out, summary, view)
        for name in SECTIONS:
            if name in wanted and name not in same:
                with out.capture() as section:
                    if name != "short" or not view.brief:
                        out.print()
                    sections[name](view)
                found[name] = section.get()
                if name in UNSHARED:
                    same[name] = found[name]
            elif name in wanted:
                found[name] = same[name]
        return {"head": top.get(), **found}

    fitted = view.brief or view.all or view.only
    parts, left_out = (written(view), []) if fitted else _fitting(written, view, out.width)
    out.file.write("".join(parts.values()))
    if left_out:
        said = f"left out, to fit {LINES} lines: {', '.join(left_out)} (--only {','.join(left_out)}, or --all)"
        paragraph(out, said, rest="  ")
    absent = [name for name in view.only or () if not parts.get(name, "").strip()]
    if absent:
        out.print()
    for name in absent:
        why = " (no GPU work)" if name in OF_THE_GPU and not summary.has_gpu_work else ""
        out.print(f"{name}: nothing of it in this trace{why}")
    if view.brief and not (view.only or view.all):
        out.print()
        print_whole(out, f"uv run read-trace {shown_path(trace.path)}", "more:", first=False)


def _wanted(summary: Summary, predicted: bool, view: View) -> set[str]:
    """The sections that this view shows of this trace."""
    wanted = {name for name in SECTIONS if view.shows(name)}
    if not lanes_wanted(view):
        wanted.discard("lanes")
    if not summary.has_gpu_work:
        wanted -= {"kernels", "work", "names", "starts"}
    if not (view.only or view.all):
        wanted.discard("starts")
        if not view.brief:
            wanted.discard("table")  # what it sums up stands below, step by step
        if len(summary.steps) < series_of.ENOUGH:
            wanted.discard("series")
        # A small step is shown piece by piece, a large one by name and family.
        small = summary.has_gpu_work and len(summary.gpu_work) <= SMALL
        wanted -= {"kernels", "cpu"} if small else {"work", "names"}
    if summary.gpu is None:  # no work in the window, though there may be some outside
        wanted.discard("gpu")
    if not repeats.told(summary):
        wanted.discard("repeats")
    if not training.tells(summary):
        wanted.discard("training")
    if not predicted:
        wanted.discard("guesses")
    if view.brief and not view.only and {"guesses", "lanes"} <= wanted and len(summary.steps) <= STEPS_SHOWN:
        wanted.discard("steps")  # drawn; and a prediction speaks of the first one
    return wanted


def _fitting(written: Callable[[View], dict[str, str]], view: View, width: int) -> tuple[dict[str, str], list[str]]:
    """The report with as much of every table as fits into LINES, and the sections that had to be left out."""
    for share in SHARES:
        parts = written(replace(view, share=share))
        if sum(lines_of(part, width) for part in parts.values()) <= LINES:
            return parts, []
    left_out = []
    for name in LEFT_OUT_FIRST:
        if sum(lines_of(part, width) for part in parts.values()) <= LINES - 2:  # what is left out is said, too
            break
        if parts.pop(name, None):
            left_out.append(name)
    return parts, left_out


def _header(out: Console, summary: Summary, view: View) -> None:
    """What was recorded: device, rank, steps, and how much work a step is."""
    nothing = "no GPU work recorded" if any("Launch" in name for name in summary.cpu.runtime) else "CPU only"
    if summary.waits_for == "capture":
        nothing = "no GPU work"  # a capture runs nothing
    words = [", ".join(dict.fromkeys(summary.source.devices)) or nothing]
    if len(summary.source.devices) > 1:
        words[0] += f" ({len(summary.source.devices)} GPUs)"
    if summary.source.rank is not None:
        words.append(f"rank {summary.source.rank} of {summary.source.world_size}")
    if summary.source.has_steps:
        count, first, last = len(summary.steps), summary.steps[0].number, summary.steps[-1].number
        words.append(
            f"{count} steps, median {_step_time(summary)}, {first} to {last}"
            if count > 1
            else f"one step of {_step_time(summary)}, {first}"
        )
    else:
        words.append(f"no profiler steps: {duration(summary.cpu_us)}, read as one")
    if summary.has_gpu_work:
        words.append(f"{counted(len(summary.gpu_work), 'piece')} of GPU work a step")
    took = summary.source.facts.first_call_s
    if took is not None and not view.brief:  # a script has said it already
        words.append(f"first call {seconds(took)}")
    paragraph(out, f"[bold]{plain(words[0])}[/bold] · {plain(' · '.join(words[1:]))}", rest="  ")
    if summary.left_out:
        first = plain(summary.left_out[0])
        paragraph(out, f"{first} is left out of every figure over all steps: {_left_out_for(summary)}", rest="  ")
    busy = steps.busy_machine(summary)
    for text in [*summary.source.warnings, *([busy] if busy else [])]:
        paragraph(out, plain(text), "[yellow]warning[/yellow] ", " " * 8)


def _left_out_for(summary: Summary) -> str:
    first = summary.steps[0]
    other = "typical" if len(summary.steps) > 2 else "other"
    first_use = ", and paid for first use" * steps.paid_for_first_use(first)
    return f"it took {first.cpu_us / summary.cpu_us:,.1f} times the {other} step{first_use}"


def _step_time(summary: Summary) -> str:
    """The typical step's: where the CPU runs ahead, a step lasts as long as its GPU work."""
    on_gpu, on_cpu = summary.gpu_us, duration(summary.cpu_us)
    return f"{duration(on_gpu)} on the GPU, {on_cpu} on the CPU" if on_gpu > summary.cpu_us else on_cpu


def _in_short(out: Console, summary: Summary, found: Sequence[cheatsheet.Shown], view: View) -> None:
    word, figures = steps.waiting(summary)
    lines = [f"[bold]{word}[/bold]: {figures}"]
    if summary.has_gpu_work:
        step = summary.chosen
        waits = sum(
            one.self_us for name, one in summary.cpu.runtime.items() if "Synchronize" in name or "Memcpy" in name
        )
        loading = summary.training.loading.us if summary.training.loading else 0.0
        each = f", one for every {duration(step.cpu_us / step.launches)} of CPU time" if step.launches else ""
        if step.launches == 1:
            each = f", {duration(step.cpu_us)} of CPU time"
        if max(waits, loading) > 0.1 * step.cpu_us:  # the CPU's time is not what launching takes
            what = "waiting for the DataLoader" if loading > waits else "in synchronizations and copies"
            each = f"; {duration(max(waits, loading))} of its CPU time {what}"
        busiest = f" on the busiest of {len(summary.source.devices)} GPUs" if len(summary.source.devices) > 1 else ""
        lines.append(
            f"{counted(step.launches, 'launch', 'launches')} a step{each}; "
            f"the work itself takes {duration(summary.gpu_us)} a step{busiest}"
        )
        shares = [
            f"{one.share:.0%} {family_in_words(one.family)}" for one in summary.families[:4] if one.share >= 0.005
        ]
        if not view.brief:
            summed = "the kernels' time, summed since they overlap" if overlap(summary) else "the GPU's busy time"
            lines.append(f"of {summed}: {', '.join(shares)}")
    else:
        lines += _cpu_in_short(summary)
    lines += [plain(line) for line in decoding.in_words(summary)]
    lines += [f"{plain(one.see)}: {plain(said.evidence)}" for one, said in cheatsheet.costliest(summary, found)]
    if view.brief and (means := cheatsheet.what_to_do(summary)):
        lines.append(plain(means.partition(": ")[2] or means))
    for number, line in enumerate(lines):
        paragraph(out, line, f"{' ' * 8 if number else head('in short', 'short')}   ", " " * 11)


def _cpu_in_short(summary: Summary) -> list[str]:
    """Where a step's time is on the CPU: in which labels and ops, and how much of it in none."""
    step_us = summary.chosen.cpu_us
    own: dict[str, float] = {}
    for call in summary.cpu.chain:
        if is_op(call):
            name = _by_its_kind(call.name)
            own[name] = own.get(name, 0.0) + call.self_us
    if not own or not step_us:
        return []
    lines = []
    places = summary.places.by_phase or summary.places.by_label
    phases = {_by_its_kind(one.name): one.cpu_us / step_us for one in places if one.cpu_us}
    if told := _shares(phases, sorted(phases, key=phases.get)[-LABELS_NAMED:]):
        lines.append(f"by {'phase' if summary.places.by_phase else 'label'}, of a step: {told}")
    largest = sorted(own, key=own.get, reverse=True)[:OPS_NAMED]
    if told := _shares({name: own[name] / step_us for name in largest}, largest):
        summed = f", summed over {summary.cpu.op_threads} threads" if summary.cpu.op_threads > 1 else ""
        lines.append(f"ops by their own time{summed}, of a step: {told}")
    outside = summary.cpu.outside_ops
    if outside is not None and 0.05 < outside <= steps.MUCH_IDLE:  # more of it stands in the first line
        lines.append(f"{outside:.0%} of the step is in no recorded op")
    return lines


def _by_its_kind(name: str) -> str:
    return "Inductor's graph" if name.startswith(INDUCTORS_CALL) else short(name, 40)


def _shares(shares: dict[str, float], chosen: Sequence[str]) -> str:
    """The chosen ones in their order, of 1% and more."""
    told = [name for name, share in shares.items() if name in chosen and share >= WORTH_NAMING]
    return ", ".join(f"{plain(name)} {shares[name]:.0%}" for name in told)


def _gpu_time(out: Console, summary: Summary, view: View) -> None:
    """The window's time, adding up; then the same by family of kernel."""
    gpu, window = summary.gpu, summary.window_us
    rows = [
        ("compute", gpu.compute_us), ("communication, nothing beside it", gpu.exposed_communication_us),
        ("copies and memsets, nothing beside them", gpu.exposed_copy_us),
        ("idle: waiting for CPU launches", gpu.idle_not_launched_us),
        ("idle: next activity launched, not started", gpu.idle_launched_us),
        ("idle: next activity's launch not in the trace", gpu.idle_unknown_us),
    ]  # fmt: skip
    shown = [(name, us(value), f"{value / window:.1%}") for name, value in rows if value]
    reaches = "the wide first step included" if summary.after_first else "from the first step's start on"
    shown.append((f"the whole window, {reaches}", us(window), "100%"))
    title = "time of the busiest GPU" if len(summary.source.devices) > 1 else "time of the GPU"
    print_columns(out, (title, "µs", "of the window"), shown, section="gpu")
    for name, value in list(summary.idle_in.items())[:3]:
        if value > 0.1 * sum(summary.idle_in.values()):
            waits = f"a step's GPU waits while the launching thread is in {plain(short(name, 50))}: {us(value)} µs"
            if name == BETWEEN_OPS and summary.idle_python:
                waits += f", of that {_functions(summary.idle_python)}"
            paragraph(out, waits, "  ", "    ")
    for title, places in (
        ("GPU work of a step, by phase (from autograd)", summary.places.by_phase),
        ("GPU work of a step, summed by label", () if summary.places.by_phase else summary.places.by_label),
        ("by module", summary.places.by_module_class),
    ):
        shown = places[: view.most(ROWS_SHOWN)]
        if shown:
            named = labels([one.name for one in shown], 50)
            rows = [(Name(named[one.name]), us(one.gpu_us), f"{one.pieces:,}", us(one.cpu_us)) for one in shown]
            print_columns(out, (title, "GPU µs", "pieces", "CPU µs"), rows)
            and_more(out, len(places), len(rows))
    if len(summary.gpu_work) <= SMALL and not (view.only or view.all):
        return  # the answer has the families already
    out.print()
    families = [
        (family_in_words(one.family), us(one.us), f"{one.share:.1%}", f"{one.pieces:,}")
        for one in summary.families[: view.most(ROWS_SHOWN)]
    ]
    title = "summed by family (kernels overlap)" if overlap(summary) else "by family"
    print_columns(out, (title, "µs", "of GPU work", "pieces"), families)
    and_more(out, len(summary.families), len(families))


def _functions(times: dict[str, float]) -> str:
    """The Python functions in which most of some time went."""
    largest = list(times.items())[:FUNCTIONS_NAMED]
    return ", ".join(f"{us(value)} in {plain(cut(name, 80))}" for name, value in largest)


def _kernels(out: Console, summary: Summary, view: View) -> None:
    shown = summary.kernels[: view.most(ROWS_SHOWN)]
    named = labels([one.name for one in shown], 60)
    asking = labels([one.asked_by for one in shown], 28)
    rows = [
        (
            Name(named[one.name]),
            Name(asking[one.asked_by]),
            f"{one.count:,}",
            us(one.total_us),
            us(one.median_us),
            us(one.mean_us),
            f"{one.share:.1%}",
        )
        for one in shown
    ]
    heads = ("GPU work by name, all steps", "from", "times", "total µs", "median", "mean", "of GPU work")
    print_columns(out, heads, rows, left=(0, 1), section="kernels")
    and_more(out, len(summary.kernels), len(rows))


def _cpu(out: Console, summary: Summary, view: View) -> None:
    """The ops' own time; calls of the driver apart, since many of them wait."""
    for title, table in (
        ("CPU ops by self time, one step", summary.cpu.ops),
        ("calls of the driver", summary.cpu.runtime),
    ):
        ordered = sorted(table.items(), key=lambda item: -item[1].self_us)
        shown = ordered[: view.most(ROWS_SHOWN)]
        named = labels([name for name, _ in shown], 60)
        rows = [(Name(named[name]), us(one.self_us), us(one.total_us), f"{one.calls:,}") for name, one in shown]
        if rows:
            print_columns(out, (title, "self µs", "total µs", "calls"), rows, section="cpu")
            and_more(out, len(ordered), len(rows))
    same: dict[tuple, list[CpuWork]] = {}
    for one in summary.cpu.work:
        if one.flops or one.bytes_moved:
            key = (one.layer, one.name, one.type, one.product, one.attention, one.bytes_moved)
            same.setdefault(key, []).append(one)
    costliest = sorted(same.values(), key=lambda calls: -sum(one.us for one in calls))
    shown = costliest[: view.most(ROWS_SHOWN)]
    types = len({one.type for one in summary.cpu.work if one.type}) > 1
    for calls in shown:
        paragraph(out, plain(_rates(calls, types)), rest="  ")
    and_more(out, len(costliest), len(shown))


def _rates(calls: Sequence[CpuWork], types: bool) -> str:
    """What calls of an op on the CPU computed, equal ones, and how fast. types: with that of their elements."""
    one, us_each = calls[0], fmean(call.us for call in calls)
    name = f"{one.layer}, {one.name}" if one.layer else one.name
    if types:
        name += f" of {one.type.removeprefix('c10::')}"
    times = f", {len(calls)} times" if len(calls) > 1 else ""
    if one.flops:
        computed = work.product_in_words(one.product) if one.product else work.attention_in_words(one.attention)
        reached = f"{computed} at {one.flops / us_each / 1e3:,.1f} GFLOP/s" if us_each else computed
    else:
        moved = f"{size(one.bytes_moved)} moved"
        reached = f"{moved} at {one.bytes_moved / us_each / 1e3:,.1f} GB/s" if us_each else moved
    return f"{name}{times}: {reached}{_of_best(calls)}"


def _of_best(calls: Sequence[CpuWork]) -> str:
    """As a share of what the run measured at best, which stands for a data sheet's peak."""
    roof, *others = {one.roof for one in calls}
    if roof is None or others:
        return ""
    rates = {"compute": "this machine's best arithmetic rate", "memory": "this machine's best memory rate"}
    return f", {steps.reached(calls):.0%} of {rates[roof]}"


def _steps(out: Console, summary: Summary, view: View) -> None:
    gpu = summary.has_gpu_work
    heads = ["step, in µs", "CPU", "to first op"]  # from its label
    if gpu:
        heads += ["launches", "GPU busy", "span", "idle", "to start"]  # from the first launch
    found = summary.steps
    most = view.most(STEPS_SHOWN)
    shown = found if most is None or len(found) <= max(3, most) else found[: max(3, most - 3)]
    rows = []
    for one in shown:
        row = [
            one.number + " *" * (one.times_the_typical is not None or one.gpu_times_the_median is not None),
            us(one.cpu_us),
            us(one.label_to_first_op_us),
        ]
        if gpu:
            row += [str(one.launches), us(one.gpu_busy_us), us(one.gpu_span_us), percent(one.gpu_idle_share)]
            row += [us(one.launch_to_start_us)]
        rows.append(row)
    print_columns(out, heads, rows, section="steps")
    if len(shown) < len(found):
        out.print(f"… and {len(found) - len(shown)} more; the typical step took {us(summary.cpu_us)} µs")
    for one in [one for one in found if one.gpu_times_the_median is not None][:3]:
        out.print(f"* {plain(one.number)}'s GPU work took {one.gpu_times_the_median:,.1f} times the median step's")
    for one in [one for one in found if one.times_the_typical is not None][:3]:
        why = steps.cause(summary, one)
        paragraph(
            out,
            f"* {plain(one.number)} took {one.times_the_typical:,.1f} times the typical step"
            + (f": {plain(why)}" if why else "; the trace does not show why"),
            rest="  ",
        )


def lane_glyphs(out: Console) -> lanes.Glyphs:
    """What lanes are drawn with on this terminal."""
    return lanes.ASCII if ascii_only(out) else lanes.UNICODE


def lanes_wanted(view: View) -> bool:
    """Whether lanes are drawn: at a terminal, or where something asks for them."""
    return bool(view.lanes or view.only or view.step is not None or sys.stdout.isatty())


def _lanes(out: Console, trace: Trace, step: Step, summary: Summary) -> None:
    named = layer_names(trace, step)
    drawn = lanes.draw(step, out.width, lane_glyphs(out), repeats.marks(step, summary), named)
    if drawn:
        out.print(head(f"lanes of step {plain(step.number)}", "lanes"))
        for line in drawn:
            out.print(plain(line), style="green" if line.startswith("GPU") else None)


def _patterns(out: Console, summary: Summary, found: Sequence[cheatsheet.Shown], view: View) -> None:
    """What a small trace shows is explained; of a large one the rest of the report has to fit, too."""
    roomy = len(summary.cpu.chain) <= EXPLAINED and not summary.source.facts.script and view.share == 1
    explained = view.all or view.only or roomy
    out.print(f"{head('patterns from the cheatsheet in this trace', 'patterns')}{'' if found else ': none'}")
    shown = found[: view.most(PATTERNS_SHOWN)]
    for pattern, verdict in shown:
        seen = f" [dim]({plain(verdict.evidence)})[/dim]" if verdict.evidence else ""
        paragraph(out, f"{pattern.where}: {plain(pattern.see)}{seen}", "  ", " " * 4)
        if explained:
            paragraph(out, plain(pattern.means), " " * 6, " " * 6)
    and_more(out, len(found), len(shown))


def marked(summary: Summary, given: Sequence[tuple[dict, bool]]) -> None:
    """The reader's own predictions: the record of each, and whether they said yes."""
    out = console()
    out.print()
    out.print("[bold]your guesses[/bold]")
    words = {True: "yes", False: "no", None: "cannot tell"}
    for record, said in given:
        prediction = expect.from_record(record)
        verdict = prediction.ask(summary)
        right = None if verdict.holds is None else verdict.holds == said
        seen = ", ".join(word for word in (words[verdict.holds], plain(verdict.evidence)) if word)
        paragraph(out, plain(prediction.text), f"  {predictions.READERS_MARKS[right]}  ", " " * 9)
        paragraph(out, f"you: {words[said]}; the trace: {seen}", " " * 9, " " * 9)
