"""What one trace shows, what a run was, what changed between several: all reports are printed here."""

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from common import cheatsheet, compare, facts, kernel_names, lanes, reading, trace
from common.cli import SECTIONS, BadInput
from common.guesses import NO_GPU
from common.text import columns, console, percent, print_table, rate, ratio, seconds, shown_path, size, us
from common.trace import STEP, Op, Step, Trace

if TYPE_CHECKING:
    from common.guesses import Guess
    from common.harness import Run
    from common.quiz import Question

STEPS_SHOWN = 8
TREE_LINES = 45


@dataclass(frozen=True)
class View:
    """How a report shows the lanes: drawn at a terminal or where asked for; step: None is the typical one."""

    lanes: bool = False
    step: int | None = None
    only: Sequence[str] | None = None

    @classmethod
    def of(cls, args) -> "View":
        return cls(args.lanes, args.step, args.only)


def run(done: "Run", view: View, guesses: "Sequence[Guess]", given: "Sequence[Question]" = ()) -> None:
    """All that a numbered script says of its run, read back from the file on disk."""
    header(done)
    recorded = trace.read(done.trace)
    explain(recorded, view)
    verdicts(guesses, recorded)
    if given:
        marked(given, recorded)


def header(run: "Run") -> None:
    """What ran, what it cost to get going, whether it computed the right thing, and its files."""
    out = console()
    known = [f"first call {seconds(run.first_call_s)}"]
    if run.peak_bytes is not None:
        known.append(f"peak device memory {size(run.peak_bytes)}")
    if run.error is None:
        known.append("eager: the reference itself")
    else:
        known.append(f"matches eager: relative error {run.error:.1e}")
    out.print(f"[bold]{escape(run.title)}[/bold]   {escape(run.device_name)} · torch {run.torch_version}")
    out.print(" · ".join(known))
    if run.device_type == "cpu":
        out.print("no accelerator in this run: the trace has a CPU lane and no GPU lane")
    out.print()
    files = columns()
    files.add_row(f"  {escape(shown_path(run.trace))}", "the trace: open it at ui.perfetto.dev")
    files.add_row(f"  {escape(shown_path(run.table))}", "the profiler table")
    print_table(out, files)
    out.print()
    for line in run.totals:
        out.print(line)


def explain(trace: Trace, view: View) -> None:
    """What one trace shows, from the file alone. Raises BadInput for a step that is not in it."""
    step = _chosen(trace, view.step)
    wanted = set(view.only or SECTIONS)
    if not (view.lanes or view.only or view.step is not None or sys.stdout.isatty()):
        wanted.discard("lanes")
    if not reading.has_gpu_work(trace):
        wanted -= {"work", "names"}
    sections = {
        "steps": lambda out: _steps(out, trace),
        "lanes": lambda out: _lanes(out, step),
        "work": lambda out: _gpu_work(out, trace),
        "names": lambda out: _names(out, trace),
        "chain": lambda out: _dispatch(out, trace),
        "regime": lambda out: _regime(out, trace),
        "patterns": lambda out: _patterns(out, trace),
    }
    out = console()
    out.print()
    for line in _recorded(trace):
        out.print(line)
    for name in SECTIONS:
        if name in wanted:
            out.print()
            sections[name](out)


def _chosen(trace: Trace, number: int | None) -> Step:
    if number is None:
        return reading.typical(trace)
    for step in trace.steps:
        if step.name == f"{STEP}{number}":
            return step
    held = f"{trace.steps[0].name} to {trace.steps[-1].name}" if trace.has_steps else "no steps"
    raise BadInput(f"--step {number}: the trace holds {held}")


def _lanes(out: Console, step: Step) -> None:
    plain = (
        out.is_dumb_terminal
        or not (out.encoding or "").lower().startswith("utf")
        or os.environ.get("LC_ALL") in ("C", "POSIX")  # Python itself would write UTF-8 then, too
    )
    drawn = lanes.draw(step, out.width, lanes.ASCII if plain else lanes.UNICODE)
    if drawn:
        out.print(f"[bold]lanes of step {_number(step.name)}[/bold]")
        for line in drawn:
            out.print(escape(line), style="green" if line.startswith("GPU") else None)


def _recorded(trace: Trace) -> list[str]:
    first, last = trace.steps[0], trace.steps[-1]
    steps = (
        f"{_steps_word(len(trace.steps))}, {_number(first.name)} to {_number(last.name)}"
        if trace.has_steps
        else "no profiler steps: the whole trace is read as one"
    )
    where = ", ".join(dict.fromkeys(trace.devices)) or "CPU only, no GPU work"
    if len(trace.devices) > 1:
        where += f" ({len(trace.devices)} GPUs)"
    window = reading.regime(trace).window_us
    shapes = "shapes recorded" if trace.has_shapes else "no shapes (--record-shapes adds sizes and TFLOP/s)"
    lines = [f"[bold]recorded[/bold]   {escape(where)} · {steps} · window {window:,.1f} µs · {shapes}"]
    return lines + [f"[yellow]warning[/yellow]    {escape(text)}" for text in facts.warnings(trace)]


def _steps_word(count: int) -> str:
    return f"{count} step{'s' * (count != 1)}"


def _number(name: str) -> str:
    return name.removeprefix(STEP[:-1])


def _steps(out: Console, trace: Trace) -> None:
    found = reading.step_facts(trace)
    gpu = reading.has_gpu_work(trace)
    heads = ["CPU µs", "label to first op µs"]
    if gpu:
        heads += ["launches", "GPU busy µs", "GPU span µs", "GPU idle", "launch to start µs"]
    table = columns("[bold]step[/bold]", *heads, numbers_from=1)
    shown = found if len(found) <= STEPS_SHOWN else found[: STEPS_SHOWN - 3]
    for one in shown:
        mark = " *" if one.ratio else ""
        row = [f"{_number(one.step.name)}{mark}", us(one.step.us), us(one.gap_us)]
        if gpu:
            row += [str(one.launches), us(one.busy_us), us(one.span_us), percent(one.idle), us(one.offset_us)]
        table.add_row(*row)
    print_table(out, table)
    if len(shown) < len(found):
        middle = reading.typical(trace)
        out.print(f"… and {len(found) - len(shown)} more; the median step took {us(middle.us)} µs")
    wide = [one for one in found if one.ratio]
    for one in wide[:3]:
        out.print(
            f"* {_number(one.step.name)} took {one.ratio:,.1f} times the median step"
            + (f": {escape(one.cause)}" if one.cause else "; the trace does not show why")
        )


def _gpu_work(out: Console, trace: Trace) -> None:
    rows = reading.work_rows(trace)
    step = reading.typical(trace)
    name_width = 44 if out.width >= 120 else 28
    table = columns(f"[bold]GPU work of one step ({_number(step.name)})[/bold]", "from", "µs", "range", "launched by",
                     "regs, shared, grid x block", numbers_from=None)  # fmt: skip
    table.columns[2].justify = "right"
    for row in rows[:TREE_LINES]:
        launched = row.launched_by + (" after an occupancy query" if row.queries else "")
        table.add_row(
            escape(kernel_names.short(row.work.name, name_width)), escape(kernel_names.short(row.asked_by, 28)),
            us(row.us), f"{us(row.low_us)}–{us(row.high_us)}", launched, _footprint(row),
        )  # fmt: skip
    print_table(out, table)
    if len(rows) > TREE_LINES:
        out.print(f"… and {len(rows) - TREE_LINES} more")


def _names(out: Console, trace: Trace) -> None:
    said = {}
    for row in reading.work_rows(trace):
        said.setdefault(row.work.name, []).append(row)
    out.print("[bold]what the names say[/bold]")
    for name, same in said.items():
        out.print(f"  {escape(kernel_names.short(name, out.width - 4))}")
        out.print(f"      {escape('; '.join([str(same[0].says), *_measured(same)]))}")


def _footprint(row: reading.WorkRow) -> str:
    if row.work.kind != "kernel":
        return ""
    args = row.work.args
    values = [args.get("registers per thread"), args.get("shared memory")]
    dims = [args.get("grid"), args.get("block")]
    if not all(type(value) is int for value in values) or not all(isinstance(dim, list) for dim in dims):
        return ""
    grid, block = ("·".join(str(n) for n in dim if n != 1) or "1" for dim in dims)
    return f"{values[0]}, {values[1] / 1024:.0f} KB, {grid} x {block}"


def _measured(rows: Sequence[reading.WorkRow]) -> list[str]:
    """Sizes and rates, where the trace has what they are made of; one entry for each distinct size."""
    found = {}
    for row in rows:
        if row.shape:
            batch = f"{row.shape.batch} x " if row.shape.batch > 1 else ""
            found[row.shape] = (
                f"{batch}M {row.shape.m} · K {row.shape.k} · N {row.shape.n}, {row.shape.flops / 1e9:,.1f} GFLOP"
                f" at {rate(row.tflops)} TFLOP/s"
            )
        elif row.moved and row.gb_s:
            found[row.moved] = f"{size(row.moved)} moved at {row.gb_s:,.0f} GB/s"
    return list(found.values())


def _dispatch(out: Console, trace: Trace) -> None:
    step = reading.typical(trace)
    out.print(f"[bold]dispatch chain of {'step ' * trace.has_steps}{_number(step.name)}[/bold]")
    has_gpu = bool(trace.work)
    for line, (op, depth) in enumerate(step.dispatch()):
        if line == TREE_LINES:
            out.print("  …")
            break
        out.print("  " * (depth + 1) + _chain_line(op, has_gpu))


def _chain_line(op: Op, has_gpu: bool) -> str:
    line = f"{escape(kernel_names.short(op.name, 70))}  [dim]{us(op.us)} µs[/dim]"
    if op.work:
        names = " + ".join(kernel_names.short(one.name, 48) for one in op.work[:4])
        more = f" + {len(op.work) - 4} more" if len(op.work) > 4 else ""
        return f"{line}  → {escape(names)}{more}"
    if has_gpu and op.kind == "op" and reading.launches_nothing(op):
        return f"{line}  · no GPU work"
    return line


def _regime(out: Console, trace: Trace) -> None:
    found = reading.regime(trace)
    if found.share is None:
        out.print("[bold]regime[/bold]   CPU only: no GPU work to set against the CPU's time")
    else:
        out.print(
            f"[bold]regime[/bold]   {found.name}: the GPU is busy {found.share:.0%} of the window "
            f"({us(found.busy_us)} of {us(found.window_us)} µs)"
        )


def _patterns(out: Console, trace: Trace) -> None:
    out.print("[bold]patterns from the cheatsheet in this trace[/bold]")
    for pattern, figure in cheatsheet.found(trace):
        out.print(f"  {pattern.where}: {escape(pattern.see)} [dim]({escape(figure)})[/dim]")
        out.print(f"      {escape(pattern.means)}")


def verdicts(guesses: "Sequence[Guess]", trace: Trace) -> None:
    """Each guess, whether the trace bears it out, and what was seen."""
    out = console()
    out.print()
    out.print("[bold]guess first, then look[/bold]")
    words = {True: "[green]yes[/green]", False: "[red]no [/red]", None: "[dim] – [/dim]"}
    answers = [(guess, guess.ask(trace)) for guess in guesses]
    for guess, answer in sorted(answers, key=lambda pair: pair[1].seen == NO_GPU):
        out.print(f"  {words[answer.holds]}  {escape(guess.text)}")
        if answer.seen != NO_GPU:
            out.print(f"       [dim]{escape(answer.seen)}[/dim]")
        if answer.because and not answer.holds:
            out.print(f"       {escape(answer.because)}")
    if any(answer.seen == NO_GPU for _, answer in answers):
        out.print(f"       [dim]{NO_GPU}; traces/reference has a GPU's traces to read[/dim]")


def marked(given: "Sequence[Question]", recorded: Trace) -> None:
    """The reader's own guesses, and what the trace says."""
    out = console()
    out.print()
    out.print("[bold]your guesses[/bold]")
    for question in given:
        right, seen = question.mark(recorded)
        out.print(f"  {'[green]yes[/green]' if right else '[red]no [/red]'}  {escape(question.text)}")
        out.print(f"       you: {escape(question.given)}; the trace: {escape(seen)}")


def side_by_side(traces: Sequence[Trace]) -> None:
    """Several runs: their figures with the ratio to the first, then what changed and what did not."""
    out = console()
    sides = [compare.Side(trace) for trace in traces]
    first = sides[0]
    table = columns("[bold]typical step[/bold]", "CPU µs", "", "GPU busy µs", "", "launches", "kernels", "copies",
                     "memsets", numbers_from=1)  # fmt: skip
    for side in sides:
        table.add_row(
            escape(side.name), us(side.cpu_us), ratio(side.cpu_us, first.cpu_us), us(side.busy_us),
            ratio(side.busy_us, first.busy_us), str(side.launches),
            *(str(side.count(kind)) for kind in ("kernel", "memcpy", "memset")),
        )  # fmt: skip
    print_table(out, table)
    out.print()
    table = Table(box=None, pad_edge=False, padding=(0, 2, 1, 0), header_style="bold")
    for title, share in (("setup", 2), ("what changed", 5), ("what stayed the same", 4)):
        table.add_column(title, ratio=share, overflow="fold")
    table.add_row(escape(first.name), escape(compare.setup(first)), "(the first: what the others are set against)")
    for side in sides[1:]:
        found = compare.difference(first, side)
        cells = ("\n".join(f"· {text}" for text in texts) or "nothing" for texts in (found.changed, found.same))
        table.add_row(escape(side.name), *(escape(cell) for cell in cells))
    # Wrapped in columns here, so no soft wrapping.
    print_table(Console(highlight=False, width=out.width), table)


def as_json(facts: dict) -> None:
    print(json.dumps(facts, indent=1))
