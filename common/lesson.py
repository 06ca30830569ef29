"""What every numbered script does around its own part: read the flags, build, profile, explain."""

import contextlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from rich.markup import escape

from common import screen
from common.distributed import place
from common.flags import advice
from common.harness import Run, prepare
from common.memory import build_unfilled, within_memory
from common.publish import require_writable, run_of
from tracereader.command import BadInput, command
from tracereader.findings.finding import counted, size
from tracereader.show.text import console, paragraph, print_whole, seconds, shown_path
from tracereader.show.view import View


def lesson(
    flags: Callable,
    build: Callable,
    profiled: Callable,
    what_we_guess: Callable[..., Iterable],
    processes: Callable[..., contextlib.AbstractContextManager] = contextlib.nullcontext,
) -> Callable:
    """The command of one numbered script: main(argv) -> exit status. See the scripts for the four functions.

    processes: given the flags, a context that makes them those of one rank of several (common/distributed.py).
    """

    def main(argv: Sequence[str] | None = None) -> None:
        args = _ready(argv, flags, what_we_guess)
        given = _answers(_asked(args))
        run = _run(args, build, profiled, processes)
        if run.rank:
            return  # rank 0 speaks for all

        from tracereader.show import report  # here, so that nothing of it weighs on the run

        _header(run)
        view = View.of(args, brief=True)
        # Where the others write to another folder, as on two machines, this one may hold older traces of theirs.
        here = [file for file in run.ranks if run_of(file) == run.id]
        if len(here) > 1:
            _explain_ranks(run, here, view, args)
            return
        summary = report.explain_file(run.trace, view)
        if given:
            report.marked(summary, given)
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
    """Profile as the script (its module) does, without a report. Raises BadInput and RunFailed."""
    return _run(_ready(argv, script.flags, script.what_we_guess), script.build, script.profiled)


def _ready(argv: Sequence[str] | None, flags: Callable, what_we_guess: Callable):
    args = prepare(flags(argv), what_we_guess)
    if not place():
        _require_folder(args)  # now, and not after a long run
    return args


def _require_folder(args) -> None:
    try:
        require_writable(args.out / args.script)
    except BadInput as problem:
        raise BadInput(f"{problem}; --out names another folder") from None


def _run(args, build: Callable, profiled: Callable, processes: Callable = contextlib.nullcontext) -> Run:
    with processes(args) as args, within_memory(args.device):
        if args.ranks:
            _require_folder(args)  # here, so that the others are told which rank cannot
        build_unfilled(build, args)
        return profiled(args, *build(args))


def _asked(args) -> list:
    if not args.guess:
        return []
    guesses = [guess for guess in args.guesses if args.device.type != "cpu" or not guess.needs_gpu]
    if not guesses:
        raise BadInput("--guess: a run on the CPU can tell none of this script's guesses; leave it out")
    return guesses


def _answers(guesses: list) -> list[tuple[dict, bool]]:
    """What the reader expects: the record of each guess, and whether they said yes."""
    if guesses:
        console().print(f"{counted(len(guesses), 'guess', 'guesses')} about this run; answer y or n")
    return [(guess.record, screen.ask(f"{guess.text}?")) for guess in guesses]


def _header(run: Run) -> None:
    """What ran, what it cost to get going, and whether it computed the right thing."""
    out = console()
    matches = f"matches {run.against}: relative error {run.error or 0:.1e}"
    right = "unchecked: eager is what the others are checked against" if run.error is None else matches
    known = [f"first call {seconds(run.first_call_s)}"]
    if run.peak_bytes is not None:
        known.append(f"peak device memory {size(run.peak_bytes)}")
    apart = "   " if len(run.title) + 3 + len(run.machine) <= out.width else "\n"
    out.print(f"[bold]{escape(run.title)}[/bold]{apart}{escape(run.machine)}")
    paragraph(out, escape(" · ".join([*known, right])))
    if run.smaller:
        taken = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in run.smaller.items())
        paragraph(out, f"smaller than on a GPU, because this run is on a CPU: {taken}")


def _explain_ranks(run: Run, here: Sequence[Path], view, args) -> None:
    """What the ranks show together whose traces are here, then what this one's says to our guesses."""
    from tracereader.show import merged, page, perfetto, ranks, report
    from tracereader.trace.document import DEFAULT_LIMIT

    out = console()
    out.print()
    summary, traces = ranks.opened(here, view)
    ranks.explain(summary, traces, view)
    if view.shows("guesses"):
        out.print()
        report.explain_file(run.trace, replace(view, only=("guesses",)))
    _files(run)
    others = ", ".join(f"_rank{rank}" for rank, file in enumerate(run.ranks) if rank and file in here)
    out.print(f"of the other ranks beside them: {others}")
    if args.html is not None:
        page.write(page.of_ranks(summary, traces), args.html, args.force)
    if args.open:
        perfetto.hand_over(*merged.merged(summary, DEFAULT_LIMIT))


def _files(run: Run) -> None:
    """Both by their whole names, to be copied."""
    out = console()
    print_whole(out, shown_path(run.trace), "the trace, for ui.perfetto.dev")
    print_whole(out, shown_path(run.table), " torch's profiler table")
    if run.code:
        print_whole(out, shown_path(run.code), "  Inductor's generated code")
