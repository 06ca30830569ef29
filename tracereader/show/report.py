"""What one trace shows, from the file alone."""

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from tracereader import expect
from tracereader.command import SECTIONS, BadInput
from tracereader.figures import Summary, summarize
from tracereader.figures.gpu_work import GpuWork
from tracereader.findings import cheatsheet, steps
from tracereader.findings.finding import NO_GPU, Finding
from tracereader.show import lanes
from tracereader.show.text import Name, console, percent, plain, print_columns, rate, size, us
from tracereader.trace import STEP, Step, Trace, TraceError, read
from tracereader.trace.document import DEFAULT_LIMIT
from tracereader.trace.kernel_names import KernelName, short

STEPS_SHOWN = 8
LINES_SHOWN = 45
MARKS = {True: "[green]yes[/green]", False: "[red]no [/red]", None: "[dim] – [/dim]"}


@dataclass(frozen=True)
class View:
    """What of a report is shown, and of which step. step: None is a typical one. only: None is all."""

    only: Sequence[str] | None = None
    step: int | None = None
    lanes: bool = False  # drawn at a terminal anyway

    @classmethod
    def of(cls, args) -> "View":
        return cls(args.only, args.step, args.lanes)

    def shows(self, section: str) -> bool:
        return self.only is None or section in self.only


def opened(path: Path, view: View, limit: int = DEFAULT_LIMIT) -> tuple[Trace, Step | None, Summary]:
    """A trace, the step of it that was asked for, and its summary. Raises BadInput."""
    try:
        trace = read(path, limit)
    except TraceError as problem:
        raise BadInput(problem) from None
    step = chosen_step(trace, view.step)
    return trace, step, summarize(trace, step)


def chosen_step(trace: Trace, number: int | None) -> Step | None:
    """Step #number; None for a typical one. Raises BadInput where the trace does not hold it."""
    if number is None:
        return None
    for step in trace.steps:
        if step.name == f"{STEP}{number}":
            return step
    held = f"{trace.steps[0].name} to {trace.steps[-1].name}" if trace.has_steps else "no steps"
    raise BadInput(f"--step {number}: the trace holds {held}")


def guesses_of(trace: Trace) -> list[Finding]:
    """What the numbered script that made this trace guessed, as far as this version can read it."""
    records = trace.lesson.guesses if trace.lesson else ()
    return [guess for record in records if (guess := expect.from_record(record))]


def explain_file(path: Path, view: View) -> None:
    """Read a trace file and print all that it shows. Raises BadInput."""
    trace, _, summary = opened(path, view)
    explain(trace, summary, view)


def explain(trace: Trace, summary: Summary, view: View) -> None:
    """All that one trace shows, section by section."""
    wanted = {name for name in SECTIONS if view.shows(name)}
    if not (view.lanes or view.only or view.step is not None or sys.stdout.isatty()):
        wanted.discard("lanes")
    if not summary.has_gpu_work:
        wanted -= {"work", "names"}
    guesses = guesses_of(trace)
    if not guesses:
        wanted.discard("guesses")
    sections: dict[str, Callable[[Console], None]] = {
        "steps": lambda out: _steps(out, summary),
        "lanes": lambda out: _lanes(out, trace, summary),
        "work": lambda out: _gpu_work(out, summary),
        "names": lambda out: _names(out, summary),
        "chain": lambda out: _chain(out, summary),
        "regime": lambda out: _regime(out, summary),
        "patterns": lambda out: _patterns(out, summary),
        "guesses": lambda out: _verdicts(out, guesses, summary),
    }
    out = console()
    out.print()
    _header(out, summary)
    for name in SECTIONS:
        if name in wanted:
            out.print()
            sections[name](out)


def _header(out: Console, summary: Summary) -> None:
    first, last = summary.steps[0], summary.steps[-1]
    recorded = (
        f"{len(summary.steps)} step{'s' * (len(summary.steps) != 1)}, {plain(first.number)} to {plain(last.number)}"
        if summary.has_steps
        else "no profiler steps: the whole trace is read as one"
    )
    where = ", ".join(dict.fromkeys(summary.devices)) or "CPU only, no GPU work"
    if len(summary.devices) > 1:
        where += f" ({len(summary.devices)} GPUs)"
    shapes = "shapes recorded" if summary.shapes_recorded else "no shapes (--record-shapes adds sizes and TFLOP/s)"
    window = f"window {summary.window_us:,.1f} µs"
    out.print(f"[bold]recorded[/bold]   {plain(where)} · {recorded} · {window} · {shapes}")
    for text in summary.warnings:
        out.print(f"[yellow]warning[/yellow]    {plain(text)}")


def _steps(out: Console, summary: Summary) -> None:
    gpu = summary.has_gpu_work
    heads = ["step", "CPU µs", "label to first op µs"]
    if gpu:
        heads += ["launches", "GPU busy µs", "GPU span µs", "GPU idle", "launch to start µs"]
    found = summary.steps
    shown = found if len(found) <= STEPS_SHOWN else found[: STEPS_SHOWN - 3]
    rows = []
    for one in shown:
        row = [one.number + " *" * (one.times_the_median is not None), us(one.cpu_us), us(one.label_to_first_op_us)]
        if gpu:
            row += [str(one.launches), us(one.gpu_busy_us), us(one.gpu_span_us), percent(one.gpu_idle_share)]
            row += [us(one.launch_to_start_us)]
        rows.append(row)
    print_columns(out, heads, rows)
    if len(shown) < len(found):
        middle = steps.summary_us(summary)
        out.print(f"… and {len(found) - len(shown)} more; the median step took {us(middle)} µs")
    for one in [one for one in found if one.times_the_median is not None][:3]:
        why = steps.cause(summary, one)
        out.print(
            f"* {plain(one.number)} took {one.times_the_median:,.1f} times the median step"
            + (f": {plain(why)}" if why else "; the trace does not show why")
        )


def _lanes(out: Console, trace: Trace, summary: Summary) -> None:
    step = next(step for step in trace.steps if step.name == summary.typical_step)
    ascii_only = (
        out.is_dumb_terminal
        or not (out.encoding or "").lower().startswith("utf")
        or os.environ.get("LC_ALL") in ("C", "POSIX")  # Python itself would write UTF-8 then, too
    )
    drawn = lanes.draw(step, out.width, lanes.ASCII if ascii_only else lanes.UNICODE)
    if drawn:
        out.print(f"[bold]lanes of step {plain(step.number)}[/bold]")
        for line in drawn:
            out.print(plain(line), style="green" if line.startswith("GPU") else None)


def _gpu_work(out: Console, summary: Summary) -> None:
    rows = [
        (
            Name(short(one.name, 60)),
            Name(short(one.asked_by, 28)),
            us(one.us),
            f"{us(one.low_us)}–{us(one.high_us)}",
            one.launched_by + " after an occupancy query" * bool(one.occupancy_queries),
            _footprint(one),
        )
        for one in summary.gpu_work[:LINES_SHOWN]
    ]
    heads = (
        f"GPU work of one step ({summary.chosen.number})",
        "from",
        "µs",
        "range",
        "launched by",
        "regs, shared, grid x block",
    )
    print_columns(out, heads, rows, left=(0, 1, 3, 4, 5))
    if len(summary.gpu_work) > LINES_SHOWN:
        out.print(f"… and {len(summary.gpu_work) - LINES_SHOWN} more")


def _footprint(one: GpuWork) -> str:
    if one.kind != "kernel" or None in (one.registers, one.shared_memory, one.grid, one.block):
        return ""
    grid, block = ("·".join(str(n) for n in dim if n != 1) or "1" for dim in (one.grid, one.block))
    return f"{one.registers}, {one.shared_memory / 1024:.0f} KB, {grid} x {block}"


def _names(out: Console, summary: Summary) -> None:
    said: dict[str, list[GpuWork]] = {}
    for one in summary.gpu_work:
        said.setdefault(one.name, []).append(one)
    out.print("[bold]what the names say[/bold]")
    for name, same in said.items():
        says = KernelName(same[0].family, same[0].maker, same[0].name_says)
        out.print(f"  {plain(short(name, out.width - 4))}")
        out.print(f"      {plain('; '.join([str(says), *_measured(same)]))}")


def _measured(same: Sequence[GpuWork]) -> list[str]:
    """Sizes and rates, where the trace has what they are made of; one entry for each distinct size."""
    found = {}
    for one in same:
        if shape := one.product:
            batch = f"{shape.batch} x " if shape.batch > 1 else ""
            found[shape] = (
                f"{batch}M {shape.m} · K {shape.k} · N {shape.n}, {shape.flops / 1e9:,.1f} GFLOP"
                f" at {rate(one.tflops)} TFLOP/s"
            )
        elif one.bytes_moved and one.gb_s:
            found[one.bytes_moved] = f"{size(one.bytes_moved)} moved at {one.gb_s:,.0f} GB/s"
    return list(found.values())


def _chain(out: Console, summary: Summary) -> None:
    out.print(f"[bold]dispatch chain of {'step ' * summary.has_steps}{plain(summary.chosen.number)}[/bold]")
    gpu = summary.has_gpu_work
    for call in summary.chain[:LINES_SHOWN]:
        line = "  " * (call.depth + 1) + f"{plain(short(call.name, 70))}  [dim]{us(call.us)} µs[/dim]"
        if call.launched:
            names = " + ".join(short(name, 48) for name in call.launched[:4])
            more = f" + {len(call.launched) - 4} more" if len(call.launched) > 4 else ""
            line += f"  → {plain(names)}{more}"
        elif gpu and call.kind == "op" and not call.reaches_gpu:
            line += "  · no GPU work"
        out.print(line)
    if len(summary.chain) > LINES_SHOWN:
        out.print("  …")


def _regime(out: Console, summary: Summary) -> None:
    if summary.busy_share is None:
        out.print("[bold]regime[/bold]   CPU only: no GPU work to set against the CPU's time")
    else:
        out.print(
            f"[bold]regime[/bold]   {steps.regime(summary)}: the GPU is busy {summary.busy_share:.0%} of the window "
            f"({us(summary.gpu_busy_us)} of {us(summary.window_us)} µs)"
        )


def _patterns(out: Console, summary: Summary) -> None:
    out.print("[bold]patterns from the cheatsheet in this trace[/bold]")
    for pattern, evidence in cheatsheet.found(summary):
        out.print(f"  {pattern.where}: {plain(pattern.see)} [dim]({plain(evidence)})[/dim]")
        out.print(f"      {plain(pattern.means)}")


def _verdicts(out: Console, guesses: Sequence[Finding], summary: Summary) -> None:
    """Each guess, whether the trace bears it out, and what was seen."""
    out.print("[bold]guess first, then look[/bold]")
    answers = [(guess, guess.ask(summary)) for guess in guesses]
    out_of_reach = False
    for guess, verdict in sorted(answers, key=lambda pair: pair[1].evidence == NO_GPU):
        out.print(f"  {MARKS[verdict.holds]}  {plain(guess.text)}")
        if verdict.evidence == NO_GPU:
            out_of_reach = True
        else:
            out.print(f"       [dim]{plain(verdict.evidence)}[/dim]")
        if verdict.why_not and not verdict.holds:
            out.print(f"       {plain(verdict.why_not)}")
    if out_of_reach:
        out.print(f"       [dim]{NO_GPU}; traces/reference has a GPU's traces to read[/dim]")


def marked(path: Path, given: Sequence[tuple[dict, bool]]) -> None:
    """The reader's own guesses: the record of each, and whether they said yes."""
    _, _, summary = opened(path, View())
    out = console()
    out.print()
    out.print("[bold]your guesses[/bold]")
    words = {True: "yes", False: "no", None: "cannot tell"}
    for record, said in given:
        guess = expect.from_record(record)
        verdict = guess.ask(summary)
        right = None if verdict.holds is None else verdict.holds == said
        out.print(f"  {MARKS[right]}  {plain(guess.text)}")
        out.print(f"       you: {words[said]}; the trace: {words[verdict.holds]}, {plain(verdict.evidence)}")
