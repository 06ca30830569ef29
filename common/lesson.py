"""The command of a numbered script: read the flags, build the model, profile it, explain the trace."""

import contextlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from msgspec.structs import replace
from rich.cells import cell_len
from rich.markup import escape

from common import quiz
from common.distributed import place
from common.flags import advice
from common.harness import Run, prepare
from common.memory import build_unfilled, within_memory
from common.publish import out_refused, require_writable, run_of
from tracereader.command import command
from tracereader.findings.finding import counted, duration, size
from tracereader.show.text import console, paragraph, print_whole, seconds, shown_path
from tracereader.show.view import View


def lesson(
    flags: Callable,
    build: Callable,
    profiled: Callable,
    predictions: Callable[..., Iterable],
    processes: Callable[..., contextlib.AbstractContextManager] = contextlib.nullcontext,
) -> Callable:
    """Return the command of one numbered script: main(argv) -> exit status. The scripts show the four functions.

    processes: takes the flags; a context that yields the flags of one rank of several (common/distributed.py).
    """

    def main(argv: Sequence[str] | None = None) -> None:
        args = _ready(argv, flags, predictions)
        given = quiz.answers(args.predictions, args.device.type != "cpu") if args.asks else []
        run = _run(args, build, profiled, processes)
        if run.rank:
            return  # rank 0 prints the report for all

        from tracereader.show import report  # imported here, so that it does not change the profiled run

        _header(run)
        view = View.of(args, brief=True)
        # On two machines the other ranks write to another folder, and this one may hold their older traces.
        here = [file for file in run.ranks if run_of(file) == run.id]
        if len(here) > 1:
            _explain_ranks(run, here, view, args)
            return
        summary = report.explain_file(run.trace, view)
        if given:
            quiz.marked(summary, given)
        _files(run)
        if args.html is not None:
            from tracereader.show import page

            page.write(page.of_file(run.trace, view), args.html, args.force)
        if len(run.ranks) > 1:
            console().print("the other ranks' traces are not in this folder")
        if args.open:
            from tracereader.show import perfetto

            perfetto.hand_over(run.trace)

    return command(main, advice)


def run_once(script, argv: Sequence[str]) -> Run:
    """Profile what the script (a module) profiles, and return the run, without a report. Raises BadInput, RunFailed."""
    return _run(_ready(argv, script.flags, script.predictions), script.build, script.profiled)


def _ready(argv: Sequence[str] | None, flags: Callable, predictions: Callable):
    args = prepare(flags(argv), predictions)
    if not place():
        _require_folder(args)  # before a long run rather than after it
    return args


def _require_folder(args) -> None:
    with out_refused():
        require_writable(args.out / args.script)


def _run(args, build: Callable, profiled: Callable, processes: Callable = contextlib.nullcontext) -> Run:
    with processes(args) as args, within_memory(args.device):
        if args.ranks:
            _require_folder(args)  # here, so that the other ranks learn which rank failed
        build_unfilled(build, args)
        return profiled(args, *build(args))


def _header(run: Run) -> None:
    """Print what ran, how long the first call took, and whether the result is right."""
    out = console()
    matches = f"matches {run.against}: relative error {run.error or 0:.1e}"
    right = "this run's result is the reference for the compiled and other variants" if run.error is None else matches
    calls = f"warm run: {counted(run.warmup, 'warm-up call')}, the first" if run.warmup else "cold run: the first call"
    known = [f"{calls} took {seconds(run.first_call_s)}"]
    if run.peak_bytes is not None:
        known.append(f"peak device memory {size(run.peak_bytes)}")
    apart = "   " if len(run.title) + 3 + len(run.machine) <= out.width else "\n"
    out.print(f"[bold]{escape(run.title)}[/bold]{apart}{escape(run.machine)}")
    paragraph(out, escape(" · ".join([*known, right])))
    if run.smaller:
        taken = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in run.smaller.items())
        paragraph(out, f"This run is smaller because it is on a CPU: {taken}")
    threads = run.threads
    if threads and threads["used"] < threads["count"]:
        paragraph(
            out,
            f"A small operation takes {duration(threads['us'])} on {threads['count']} CPU threads and "
            f"{duration(threads['one_us'])} on one, probably because other programs use the cores. So this run uses "
            f"{threads['used']}; with OMP_NUM_THREADS={threads['count']} it would use {threads['count']}",
        )


def _explain_ranks(run: Run, here: Sequence[Path], view, args) -> None:
    """Print the report of all ranks whose traces are here, then the predictions against this rank's trace."""
    from tracereader.command import DEFAULT_LIMIT
    from tracereader.show import export, page, perfetto, ranks, report

    out = console()
    out.print()
    summary, traces = ranks.opened(here, view)
    ranks.explain(summary, traces, view)
    if view.shows("predictions"):
        out.print()
        report.explain_file(run.trace, replace(view, only=("predictions",)))
    _files(run)
    others = ", ".join(f"_rank{rank}" for rank, file in enumerate(run.ranks) if rank and file in here)
    out.print(f"of the other ranks beside them: {others}")
    if args.html is not None:
        page.write(page.of_ranks(summary, traces), args.html, args.force)
    if args.open:
        perfetto.hand_over(*export.merged(summary, DEFAULT_LIMIT))


def _files(run: Run) -> None:
    """Print the full path of each file that was written, so that it can be copied."""
    out = console()
    files = [
        (shown_path(run.trace), "the trace, for ui.perfetto.dev"),
        (shown_path(run.table), "torch's profiler table"),
    ]
    if run.code:
        files.append((shown_path(run.code), "Inductor's generated code"))
    longest = max(cell_len(path) for path, _ in files)
    beside = longest + 3 + max(cell_len(what) for _, what in files) <= out.width
    for path, what in files:
        print_whole(out, f"{path:{longest}}" if beside else path, what)
