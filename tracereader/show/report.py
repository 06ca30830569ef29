"""The report of one trace."""

import contextlib
import io
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import fmean, median

from rich.console import Console

from tracereader import progress
from tracereader.changes.catalogue import opportunities
from tracereader.changes.opportunity import Opportunity
from tracereader.command import DEFAULT_LIMIT, BadInput, printable
from tracereader.figures import Summary, summarize
from tracereader.figures.cpu_work import CpuWork, is_op
from tracereader.figures.gpu_time import NO_RECORDED_CALL, is_python
from tracereader.figures.layers import layer_names
from tracereader.figures.places import Place
from tracereader.figures.series import series
from tracereader.figures.starts import starts
from tracereader.figures.table import profiler_table
from tracereader.findings import cheatsheet, communication, decoding, recording, steps
from tracereader.findings.device_words import in_its_words
from tracereader.findings.finding import ROOFS, Prediction, counted, duration, family_in_words, size
from tracereader.findings.gpu_work import near_the_peaks, overlap
from tracereader.replay import Refused
from tracereader.show import chain, inside, lanes, predictions, repeats, training, warnings, work
from tracereader.show import communication as collectives
from tracereader.show import opportunities as try_first
from tracereader.show import series as series_of
from tracereader.show import starts as starts_of
from tracereader.show import table as table_of_torch
from tracereader.show import text as formats
from tracereader.show.sections import NEED_GPU, SECTIONS
from tracereader.show.text import Name, capitalized, head, paragraph, percent, plain, print_columns, unit_of
from tracereader.show.view import View, others, summed
from tracereader.trace import STEP, Step, Trace
from tracereader.trace.capture import read_with_captures
from tracereader.trace.grouped import grouped
from tracereader.trace.kernel_names import cut, labels
from tracereader.trace.labels import INDUCTORS_CALL

# A step with at most so many GPU activities is shown activity by activity; a larger one by kernel and family.
SMALL = 12
STEPS_SHOWN, RATES_SHOWN, FUNCTIONS_NAMED, LONGER_EXPLAINED = 8, 8, 3, 3
WIDE = 100  # columns; in fewer, a table of kernels has no room for the ops that launch them
ALWAYS = "always"  # in place of a section's name
LONG_US = 1e5
EXPLAINED = 12  # the largest number of calls in a step for which each pattern is explained


def opened(
    path: Path, view: View, limit: int = DEFAULT_LIMIT, captures: tuple[Path, ...] = ()
) -> tuple[Trace, Summary]:
    """Return a trace, and its summary with the chosen step. captures: see read_with_captures(). Raises BadInput."""
    with _progress_of(path) as show:
        trace = read_with_captures(path, captures, limit, show, view.steps_by, view.process)
        show(f"measuring {counted(len(trace.steps), 'step')}")
        return trace, summarize(trace, chosen_step(trace, view.step))


@contextlib.contextmanager
def _progress_of(path: Path) -> Iterator[Callable[[str], None]]:
    """Yield a function that shows at a terminal what is done with a trace."""
    with progress.shown() as show:
        yield lambda text: show(f"{printable(path.name)}: {text}")


def chosen_step(trace: Trace, number: int | None) -> Step | None:
    """Return step #number; None for a typical one. Raises BadInput if the trace does not contain it."""
    if number is None:
        return None
    for step in trace.steps:
        if step.name == f"{STEP}{number}":
            return step
    held = f"{trace.steps[0].name} to {trace.steps[-1].name}" if trace.has_steps else "no steps"
    raise BadInput(f"{trace.path.name}: --step {number}: the trace holds {held}; leave it out for a typical step")


def explain_file(path: Path, view: View) -> Summary:
    """Read a trace file, print its report, and return its summary. Raises BadInput."""
    trace, summary = opened(path, view)
    explain(trace, summary, view)
    return summary


def as_text(trace: Trace, summary: Summary, view: View, changes: Sequence[Opportunity] | Refused | None = None) -> str:
    """Return what explain() prints into a pipe."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        explain(trace, summary, view, changes)
    return out.getvalue()


def explain(trace: Trace, summary: Summary, view: View, changes: Sequence[Opportunity] | Refused | None = None) -> None:
    """Print the report of one trace: the answer, then the evidence. changes: those of opportunities(), if known."""
    predicted = predictions.predictions_of(trace)
    wanted = _wanted(summary, bool(predicted), view)
    step = trace.steps[summary.typical_index]
    with _progress_of(trace.path) as show:
        if changes is None:
            changes = opportunities(trace, summary, show) if {"try", "patterns"} & wanted else ()
    found = _patterns_of(summary, changes, view) if "patterns" in wanted else []
    limit = f"{near_the_peaks(summary)} {steps.of_turns(summary)}".strip()
    if not (summary.source.shapes_recorded or summary.source.facts.script) and summary.has_gpu_work:
        limit = f"The trace has no shapes; with record_shapes=True, more changes may be found. {limit}".strip()
    if not summary.source.has_steps:
        limit = f"The whole recording counts as the step; with --steps, more changes may be found. {limit}".strip()
    known = summary.unprofiled_step_us is not None
    names, by_script = [one.name for one in summary.kernels], bool(summary.source.facts.script)
    over_steps = series(trace, step, summary.left_out) if "series" in wanted else []
    out = formats.console()
    # The order of the report. A section that appears twice has its answer above and its evidence below.
    # Few changes are known for a program without a GPU, so it is no answer that there are none.
    proposes = changes and not isinstance(changes, Refused)
    tries = proposes or ((summary.has_gpu_work or view.only) and (changes or not view.brief))
    parts: list[tuple[str, Callable[[], None]]] = [
        ("short", lambda: _regime(out, summary, view)),
        ("try", lambda: tries and try_first.show(out, changes, not view.usual, limit, known)),
        ("gpu", lambda: _where_the_step_goes(out, summary, view)),
        ("cpu", lambda: _ops_of_the_step(out, summary, view)),
        ("short", lambda: [paragraph(out, plain(capitalized(one)), rest="  ") for one in decoding.in_words(summary)]),
        (ALWAYS, lambda: _notes(out, summary, view)),
        ("try", lambda: view.usual and not view.brief and try_first.show_others(out, changes)),
        ("predictions", lambda: predictions.show(out, predicted, summary, view)),
        ("steps", lambda: _steps(out, summary, view, predicted)),
        ("lanes", lambda: _lanes(out, trace, step)),
        ("gpu", lambda: _gpu_time(out, summary, view)),
        ("short", lambda: view.brief or collectives.show(out, summary, view)),
        ("training", lambda: training.show(out, summary, view, formats.ascii_only(out))),
        ("table", lambda: table_of_torch.show(out, profiler_table(trace), names, len(trace.steps), view)),
        ("repeats", lambda: repeats.table(out, summary)),
        ("kernels", lambda: _kernels(out, summary, view)),
        ("inside", lambda: inside.show(out, summary, view)),
        ("cpu", lambda: _cpu(out, summary, view)),
        ("work", lambda: work.show(out, summary, view)),
        ("names", lambda: work.names(out, summary, view)),
        ("starts", lambda: starts_of.show(out, starts(trace, step), names, summary.chosen.number, view)),
        ("series", lambda: series_of.show(out, over_steps, names, view, formats.ascii_only(out), by_script)),
        ("chain", lambda: chain.show(out, step, summary, layer_names(trace, step), view)),
        ("patterns", lambda: _patterns(out, summary, found, view)),
    ]
    printed = set()
    _header(out, summary, view)
    for name, part in parts:
        if name in wanted or name == ALWAYS:
            with out.capture() as section:
                part()
            if text := section.get():
                out.file.write(f"\n{text}")
                printed.add(name)
    absent = [name for name in view.only or () if name not in printed]
    if absent:
        out.print()
    for name in absent:
        why = " (no GPU activity)" if name in NEED_GPU and not summary.has_gpu_work else ""
        out.print(f"{name}: not in this trace{why}")
    if view.brief and view.usual:
        out.print()
        formats.print_whole(out, f"uv run read-trace {formats.shown_path(trace.path)}", "more:", first=False)
    elif view.usual:
        out.print()
        out.print("more: --all shows every section and row; --only patterns explains each pattern")


def _wanted(summary: Summary, predicted: bool, view: View) -> set[str]:
    """Return the sections that this view shows of this trace."""
    wanted = {name for name in SECTIONS if view.shows(name)}
    if not summary.has_gpu_work:
        # The section gpu also counts activities that no step launched.
        wanted -= {*NEED_GPU} - {"gpu"}
    if view.usual:
        wanted -= _redundant(summary)
    left_out = {
        "lanes": not lanes_wanted(view),
        "starts": view.usual,
        "table": view.usual and not view.brief,  # its rows are shown below, by step
        "series": view.usual and len(summary.steps) < series_of.ENOUGH,
        "gpu": summary.gpu is None,  # no work in the window, though there may be some outside
        "inside": not summary.inside,
        "repeats": not repeats.worth_showing(summary),
        "training": not training.has_content(summary),
        "predictions": not predicted,
    }
    wanted -= {name for name, is_left_out in left_out.items() if is_left_out}
    if view.brief and not view.only and {"predictions", "lanes"} <= wanted and len(summary.steps) <= STEPS_SHOWN:
        wanted.discard("steps")  # the lanes show them, and a prediction is about the first one
    return wanted


def _redundant(summary: Summary) -> set[str]:
    """Return the sections that a default report leaves out, because others say it or they do not matter here."""
    if not summary.has_gpu_work:
        return set()
    small = len(summary.gpu_work) <= SMALL
    gone = {"kernels"} if small else {"work"}
    if not (small or summary.source.facts.script):
        gone.add("names")
    if summary.waits_for not in ("overhead", None) and not (small or summary.source.facts.script):
        gone.add("chain")  # the CPU runs ahead of the GPU
    return gone | {"cpu"}  # if the GPU waits for the CPU, the table of those waits has the ops


def _header(out: Console, summary: Summary, view: View) -> None:
    """Print what was recorded: the device, the rank, the steps, and the number of kernels per step."""
    nothing = steps.without_activity(summary)
    if summary.waits_for == "capture":
        nothing = "no GPU activity"  # a capture runs nothing
    words = [", ".join(dict.fromkeys(summary.source.devices)) or nothing]
    if len(summary.source.devices) > 1:
        words[0] += f" ({len(summary.source.devices)} GPUs)"
    if summary.source.rank is not None:
        words.append(f"rank {summary.source.rank} of {summary.source.world_size}")
    step_us = duration(summary.recorded_step_us)
    if summary.source.has_steps:
        count = len(summary.steps)
        words.append(f"{count:,} steps of {step_us}" if count > 1 else f"one step of {step_us}")
        words[-1] += " on average" * (summary.recording.mixed is not None)
        if summary.waits_for == "incomplete":
            words[-1] = counted(count, "step")
        words[-1] += steps.by_calls(summary)
        words += filter(None, [steps.outside(summary)])
    else:
        words.append(f"no profiler steps: the recording of {step_us} counts as one step")
        if summary.waits_for == "incomplete":
            words[-1] = "no profiler steps"
        elif summary.recording.cold_us:
            words[-1] += f", and {duration(summary.chosen.cpu_us)} with its first calls"
        words[-1] += " (--steps NAME: the calls of an annotation are the steps)"
    if (known := summary.unprofiled_step_us) is not None:
        words[-1] += f" ({duration(known)} without the profiler)"
    if summary.has_gpu_work and summary.waits_for != "incomplete":
        words.append(f"{counted(summary.count('kernel'), 'kernel')} per step")
    if view.brief and len(summary.source.devices) < 2:
        del words[0]  # a numbered script prints the machine just before
    paragraph(out, f"[bold]{plain(words[0])}[/bold]{plain(''.join(f' · {word}' for word in words[1:]))}", rest="  ")
    if busy := steps.busy_machine(summary):  # before all figures, which it makes doubtful
        paragraph(out, plain(busy), warnings.MARK, " " * 8)


def _regime(out: Console, summary: Summary, view: View) -> None:
    """Print what limits the step, with the figures that decide it, and the step's time without the profiler."""
    word, figures = steps.waiting(summary)
    recorded = " while it is recorded" * recording.changes_the_regime(summary)
    sentences = [f"{head(capitalized(word), 'short')}{recorded}."]
    sentences += [f"{plain(capitalized(clause))}." for clause in figures.split("; ")]
    sentences.append(plain(recording.unprofiled(summary)))
    sentences += [f"{plain(capitalized(one))}." for one in communication.in_words(summary) if not view.brief]
    if view.brief and (means := cheatsheet.what_to_do(summary)):
        sentences.append(plain(capitalized(means.partition(": ")[2] or means)))
    paragraph(out, " ".join(filter(None, sentences)))


def _notes(out: Console, summary: Summary, view: View) -> None:
    """Print notes and warnings about the trace itself."""
    if summary.left_out:
        first, other = summary.steps[0], "typical" if len(summary.steps) > 2 else "other"
        first_use = ", which includes cold-start cost" * steps.paid_for_first_use(first)
        told = f"it took {first.cpu_us / summary.cpu_us:,.1f} times the {other} step{first_use}"
        paragraph(out, f"{plain(summary.left_out[0])} is left out of every figure over all steps: {told}", rest="  ")
    for text in steps.of_recording(summary):
        paragraph(out, plain(text), "[yellow]note[/yellow] ", " " * 5)
    for text in [*warnings.of_folder(view.left_out), *warnings.of(summary)]:
        paragraph(out, plain(text), warnings.MARK, " " * 8)


def _where_the_step_goes(out: Console, summary: Summary, view: View) -> None:
    """Print the GPU's time per step, as recorded, in rows that add up to it."""
    gpu, held = summary.steady, summary.steady_steps
    count = max(1, len(held))
    families = {family: family_in_words(family) for family in gpu.compute_by_family} | {"copy": "copy kernels"}
    rows = [(f"compute: {families[family]}", us) for family, us in gpu.compute_by_family.items()]
    rows += [(steps.PARTS[key], us) for key, us in steps.parts_besides_compute(gpu).items()]
    rows = sorted(((name, us / count) for name, us in rows if us), key=lambda row: -row[1])
    whole = sum(us for _, us in rows)
    shown, rest = view.parted(rows)
    unit = _unit_of_the_step(summary)
    parts = [*shown, *[(others(rest), sum(us for _, us in rest))] * bool(rest)]
    cells = [(name, unit(us), f"{us / whole:.1%}" if whole else "") for name, us in parts]
    whose = " on the busiest GPU" * (len(summary.source.devices) > 1)
    between = " and " if count == 2 else " to "
    of = f", mean of {held[0].number}{between}{held[-1].number}" if count > 1 else f", {held[0].number}" if held else ""
    title = f"where the step goes{whose}: {unit(whole)} {unit.name}{'' if whose else ' on the GPU'}{of}"
    # With uneven steps, or a single one, the mean of these steps is not the step's time of the header.
    is_step = abs(whole - summary.recorded_step_us) <= steps.SAME_TIME * summary.recorded_step_us
    share = "of the step" if is_step else f"of {unit(whole)} {unit.name}"
    print_columns(out, (title, unit.name, share), cells, section="gpu")


def _unit_of_the_step(summary: Summary) -> formats.Unit:
    """Return the unit that the tables of a step's time share."""
    return unit_of([summary.recorded_step_us], ms_from=1e3)


def _ops_of_the_step(out: Console, summary: Summary, view: View) -> None:
    """Print the time by op of a step without GPU activity, which adds up if one thread runs the ops."""
    if summary.has_gpu_work:
        return
    step_us, one_thread = summary.chosen.cpu_us, summary.cpu.op_threads <= 1
    ops = grouped(
        ("Inductor's graph" if call.name.startswith(INDUCTORS_CALL) else call.name, call)
        for call in filter(is_op, summary.cpu.chain)
    )
    unit = _unit_of_the_step(summary)
    times = [
        (name, sum(one.self_us for one in same), unit(sum(one.us for one in same)), len(same))
        for name, same in ops.items()
    ]
    rows = summed(view, sorted(times, key=lambda row: -row[1]), 50)
    outside_us = (summary.cpu.outside_ops or 0.0) * step_us
    waiting_us = step_us - outside_us - sum(own for _, own, *_ in times)
    if summary.training.loading and one_thread and waiting_us > 0:
        rows.append(("the DataLoader, outside its ops", waiting_us, None, None))
    if outside_us:
        rows.append(("in no recorded op", outside_us, None, None))
    cells = [
        (name, unit(own), f"{own / step_us:.1%}" if step_us else "", total or "",
         f"{calls:,}" if calls is not None else "")
        for name, own, total, calls in rows
    ]  # fmt: skip
    if not cells:
        return
    title = "where the step goes" if one_thread else f"where the step goes, over {summary.cpu.op_threads} threads"
    print_columns(out, (title, f"self {unit.name}", "share", f"total {unit.name}", "calls"), cells, section="cpu")


def _gpu_time(out: Console, summary: Summary, view: View) -> None:
    """Print the parts of the GPU's time: the CPU's activity while the GPU waited, phases, modules, families."""
    tables = []
    waits = {name: us for name, us in summary.idle_in.items() if us}
    idle = sum(waits.values())
    if idle > steps.SOME_IDLE * summary.recorded_step_us or (waits and not view.usual):
        shown, _ = view.parted(list(waits.items()))
        times = summed(view, list(waits.items()), 50)
        unit = unit_of([us for _, us in times])
        rows = [(name, unit(us), percent(us / idle)) for name, us in times]
        # All rows outside ops share the functions.
        outside = [place for place, (name, _) in enumerate(shown) if is_python(name) or name.endswith(NO_RECORDED_CALL)]
        of_all = "all time between ops" if len(outside) > 1 else "this time"
        largest = list(summary.idle_python.items())[:FUNCTIONS_NAMED]
        in_them = ", ".join(f"{duration(value)} in {cut(name, 80)}" for name, value in largest)
        functions = {place: f"of {of_all}, {in_them}" for place in outside[-1:] if largest}
        of = f" for {plain(summary.chosen.number)}" * summary.source.has_steps
        if summary.recording.mixed is not None:
            of = " in a step, on average of all,"
        # The share is of the wait in the head: that is of one step, the row of the step above a mean of several.
        heads = (f"the GPU waits{of} while the launching thread is in", unit.name, f"of {unit(idle)} {unit.name}")
        tables.append((heads, rows, functions))
    for title, places in (
        ("GPU time of a step, by phase (from autograd)", summary.places.by_phase),
        ("GPU time of a step, summed by annotation", () if summary.places.by_phase else summary.places.by_label),
        ("GPU time of a step, by module", summary.places.by_module_class),
    ):
        if places:
            tables.append((*_places(title, places, view), {}))
    if overlap(summary) or not view.usual:
        families = [(family_in_words(one.family), one.us, one.share, one.pieces) for one in summary.families]
        unit = unit_of([one.us for one in summary.families])
        rows = [(name, unit(us), f"{share:.1%}", f"{count:,}") for name, us, share, count in summed(view, families, 50)]
        # The window includes activities of earlier steps, and those without a launch, which the table by name lacks.
        title = f"all in the window, by family{' (kernels overlap)' * overlap(summary)}"
        tables.append(((title, unit.name, "of GPU work", "activities"), rows, {}))
    for number, (heads, rows, below) in enumerate(tables):
        if number:
            out.print()
        print_columns(out, heads, rows, below=below)


def _places(title: str, places: Sequence[Place], view: View) -> tuple[Sequence[str], list[tuple]]:
    """Return the heads and the rows of a table of places in the program."""
    shown, rest = view.parted(places)
    gpu_us = [*(one.gpu_us for one in shown), sum(one.gpu_us for one in rest)]
    cpu_us = [one.cpu_us for one in shown]
    gpu, cpu = formats.sharing(unit_of([*gpu_us, *cpu_us]).name, (gpu_us, cpu_us))
    on_cpu = any(one.cpu_us is not None for one in places)
    named = labels([one.name for one in shown], 50)
    rows = [(Name(named[one.name]), gpu(one.gpu_us), f"{one.pieces:,}", *[cpu(one.cpu_us)] * on_cpu) for one in shown]
    if rest:
        rows.append((others(rest), gpu(gpu_us[-1]), f"{sum(one.pieces for one in rest):,}", *[""] * on_cpu))
    return (title, f"GPU {gpu.name}", "activities", *[f"CPU {cpu.name}"] * on_cpu), rows


def _kernels(out: Console, summary: Summary, view: View) -> None:
    shown, rest = view.parted(summary.kernels)
    room = out.width >= WIDE or not view.usual  # without room, names matter more than the ops that launch them
    named = formats.kernel_labels(one.name for one in summary.kernels)
    asking = labels([one.asked_by for one in shown], 28)
    total = unit_of([*(one.total_us for one in shown), sum(one.total_us for one in rest)])
    each = unit_of([one.mean_us for one in shown])
    rows = [
        (Name(named[one.name]), *[Name(asking[one.asked_by])] * room, f"{one.count:,}", total(one.total_us),
         each(one.median_us), each(one.mean_us), f"{one.share:.1%}")
        for one in shown
    ]  # fmt: skip
    if rest:
        count, us, share = (sum(getattr(one, key) for one in rest) for key in ("count", "total_us", "share"))
        rows.append((others(rest), *[""] * room, f"{count:,}", total(us), "", "", f"{share:.1%}"))
    heads = (
        "all steps, by name", *["from"] * room, "times", f"total {total.name}", f"median {each.name}",
        f"mean {each.name}", "of GPU work",
    )  # fmt: skip
    print_columns(out, heads, rows, left=(0, 1) if room else (0,), section="kernels")


def _cpu(out: Console, summary: Summary, view: View) -> None:
    """Print the ops and the runtime's calls by self time; the latter apart, because many of them wait."""
    calls = in_its_words("CUDA runtime API calls, one step", summary.source.backend)
    tables = [(calls, summary.cpu.runtime)]
    if summary.has_gpu_work:  # without it the table of the ops is above
        tables.insert(0, ("CPU ops by self time, one step", summary.cpu.ops))
    for title, table in tables:
        shown, rest = view.parted(sorted(table.items(), key=lambda item: -item[1].self_us))
        named = labels([name for name, _ in shown], 60)
        unit = unit_of([*(one.total_us for _, one in shown), sum(one.self_us for _, one in rest)])
        rows = [(Name(named[name]), unit(one.self_us), unit(one.total_us), f"{one.calls:,}") for name, one in shown]
        if rest:
            own, calls = sum(one.self_us for _, one in rest), sum(one.calls for _, one in rest)
            rows.append((others(rest), unit(own), "", f"{calls:,}"))
        if rows:
            if title is not tables[0][0]:
                out.print()
            print_columns(out, (title, f"self {unit.name}", f"total {unit.name}", "calls"), rows, section="cpu")
    same = grouped(
        ((one.layer, one.name, one.type, one.product, one.attention, one.bytes_moved), one)
        for one in summary.cpu.cpu_work
        if one.flops or one.bytes_moved
    )
    shown = sorted(same.values(), key=lambda calls: -sum(one.us for one in calls))[: view.most(RATES_SHOWN)]
    if shown:
        out.print("[bold]sizes and rates of the costliest products, attention and pointwise ops[/bold]")
    types = len({one.type for one in summary.cpu.cpu_work if one.type}) > 1
    for calls in shown:
        paragraph(out, plain(_rates(calls, types)), "  ", "    ")


def _rates(calls: Sequence[CpuWork], types: bool) -> str:
    """Return the sizes and the rate of equal calls of an op on the CPU. types: include the elements' type."""
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
    # The best rate that the run measured stands for a data sheet's peak.
    roof, *other_roofs = {call.roof for call in calls}
    known = roof is not None and not other_roofs
    of_best = f", {steps.reached(calls):.0%} of this machine's {ROOFS[roof][1]}" if known else ""
    return f"{name}{times}: {reached}{of_best}"


def _steps(out: Console, summary: Summary, view: View, predicted: Sequence[Prediction]) -> None:
    """Print each step on both lanes; the last ones share medians. Reasons among the predictions are not repeated."""
    verdicts = [one.ask(summary) for one in predicted if view.brief]
    above = "\n".join(f"{one.evidence}\n{one.why_not}" for one in verdicts if one.holds is False)
    found = summary.steps
    shown, rest = view.parted(found, STEPS_SHOWN)
    columns = {"CPU": "cpu_us", "to first op": "label_to_first_op_us"}
    if summary.has_gpu_work:
        columns |= {"launches": "launches", "GPU busy": "gpu_busy_us", "span": "gpu_span_us"}
        columns |= {"idle": "gpu_idle_share", "latency": "launch_to_start_us"}
    times = {key: [getattr(one, key) for one in found] for key in columns.values() if key.endswith("_us")}
    unit_name = _unit_of_the_step(summary).name
    # A step far longer than the others is shown in ms, although the others would fit µs.
    stands_out = max(us for column in times.values() for us in column if us is not None) >= LONG_US
    name = "ms" if stands_out and unit_name == "µs" else unit_name
    form = dict(zip(times, formats.sharing(name, list(times.values())), strict=True))
    form |= {"launches": lambda count: "–" if count is None else f"{count:,.0f}", "gpu_idle_share": percent}

    def median_of(key: str) -> float | None:
        return median([value for one in rest if (value := getattr(one, key)) is not None] or [None])

    def marked(one) -> str:
        return one.number + " *" * (one.times_the_typical is not None or one.gpu_times_the_median is not None)

    rows = [(marked(one), *(form[key](getattr(one, key)) for key in columns.values())) for one in shown]
    if rest:
        rows.append((f"{others(rest)}, median", *(form[key](median_of(key)) for key in columns.values())))
    print_columns(out, (f"step, in {name}", *columns), rows, section="steps")
    if overlap := steps.overlap_of_steps(summary):
        paragraph(out, plain(overlap))
    for one in [one for one in found if one.gpu_times_the_median is not None][:3]:
        out.print(f"* {plain(one.number)}'s GPU busy time is {one.gpu_times_the_median:,.1f} times the median step's")
    longer = sorted((one for one in found if one.times_the_typical is not None), key=lambda one: -one.times_the_typical)
    for one in longer[:LONGER_EXPLAINED]:
        why = steps.cause(summary, one)
        told = f": {plain(why)}" if why else "; the trace does not show why"
        told = ", for the reason above" if why and why in above else told
        line = f"* {plain(one.number)} took {one.times_the_typical:,.1f} times the typical step{told}"
        paragraph(out, line, rest="  ")
    if len(longer) > LONGER_EXPLAINED:
        out.print(f"* {counted(len(longer) - LONGER_EXPLAINED, 'other step')} took longer than the typical step, too")
    if view.brief:
        legend = "to first op: from the start of the step's annotation to its first op"
        if summary.has_gpu_work:
            legend += "; span: from the first GPU activity's start to the last one's end; "
            legend += "latency: from the first launch to the start of its kernel"
        paragraph(out, legend)


def lane_glyphs(out: Console) -> lanes.Glyphs:
    """Return the characters that draw lanes on this terminal."""
    return lanes.ASCII if formats.ascii_only(out) else lanes.UNICODE


def lanes_wanted(view: View) -> bool:
    """Return whether lanes are drawn: at a terminal, or if they were asked for."""
    return bool(view.only or view.lanes or view.step is not None or sys.stdout.isatty())


def _lanes(out: Console, trace: Trace, step: Step) -> None:
    if drawn := lanes.draw(step, out.width, lane_glyphs(out), layer_names(trace, step)):
        out.print(head(f"lanes of step {plain(step.number)}", "lanes"))
        for line in drawn:
            out.print(plain(line), style="green" if line.startswith("GPU") else None)


def _patterns_of(summary: Summary, changes: Sequence[Opportunity] | Refused, view: View) -> list[cheatsheet.Shown]:
    """Return the patterns to show: all if they were asked for, else those that the answer does not give already.

    Patterns that only teach are left out of the report of a trace that no numbered script made.
    """
    if not view.usual:
        return cheatsheet.found(summary)
    proposed = set() if isinstance(changes, Refused) else {one.change for one in changes}
    others = [one for one in cheatsheet.CHEATSHEET if not one.said_above and one.change not in proposed]
    return cheatsheet.found(summary, [one for one in others if summary.source.facts.script or not one.teaches])


def _patterns(out: Console, summary: Summary, found: Sequence[cheatsheet.Shown], view: View) -> None:
    """Print the patterns. A small trace's are explained; a large trace's are not, because its report is long."""
    if not found and view.usual:
        return
    explained = not view.usual or (summary.cpu.calls <= EXPLAINED and not summary.source.facts.script)
    out.print(f"{head('patterns from the cheatsheet in this trace', 'patterns')}{'' if found else ': none'}")
    for pattern, verdict in found:
        seen = f" [dim]({plain(verdict.evidence)})[/dim]" if verdict.evidence else ""
        paragraph(out, f"{pattern.where}: {plain(pattern.see)}{seen}", "  ", " " * 4)
        if explained:
            paragraph(out, plain(pattern.means), " " * 6, " " * 6)
