"""Explain one trace of PyTorch's profiler, or compare several."""

import tracereader.interrupts  # noqa: F401  first, so that Ctrl-C is answered from here on

# isort: split
import gc
import os
import sys
from collections.abc import Iterable
from functools import partial
from pathlib import Path

from tracereader import __version__
from tracereader.command import DEFAULT_LIMIT, BadInput, OneLineParser, command, is_url, not_negative, positive
from tracereader.show import sections

SCHEMA = Path(__file__).with_name("schema.json")  # docs/schema.py makes it


@command
def main(argv=None):
    parser = OneLineParser(
        prog="read-trace",
        description=__doc__,
        epilog="examples:\n  read-trace traces/01_matmul_add/64_bf16_cold_eager.json\n"
        "  read-trace EAGER.json COMPILED.json       the changes between two runs\n"
        "  read-trace RUN/                           the ranks of a job, and their waits\n"
        "  read-trace BEFORE/ AFTER/                 the changes between two such jobs",
    )
    parser.add_argument("--version", action="version", version=f"read-trace {__version__}")
    files = "a .json or .pftrace file, such a file with .gz, a folder, or a URL: of a file, a folder or *.json"
    parser.add_argument("traces", nargs="*", metavar="TRACE", help=files)
    option, switch = parser.add_argument, partial(parser.add_argument, action="store_true")
    option("--name", metavar="KERNEL", help="explain this kernel name; no trace is read")
    forms = "print a trace, or one run's ranks, as JSON in short; =all: all measurements; =schema: the form of both"
    option("--json", nargs="?", choices=("short", "all", "schema"), metavar="=all", help=forms)
    most = "read at most this many bytes of uncompressed JSON (default: 4 GB)"
    option("--limit", type=positive, default=DEFAULT_LIMIT, metavar="BYTES", help=most)
    captures = "the trace of the capture of its CUDA graphs, or a folder of such traces: names the ops and modules of "
    option("--capture", action="append", default=[], metavar="PATH", help=captures + "replayed kernels")
    by = "count each call of this annotation as a step, for a trace that was recorded without prof.step()"
    option("--steps", metavar="ANNOTATION", help=by)
    switch("--whole", help="count the whole recording as one step")
    one = "of a file that holds several processes, read this one (a part of its name is enough)"
    option("--process", metavar="NAME", help=one)
    switch("--ranks", help="read the traces as the ranks of one run, even if their files do not say so")
    option("--rank", type=not_negative, metavar="N", help="show one of several ranks in full")
    switch("--previous", help="compare each trace with the one before it, not with the first")
    reference = "compare with the same run's reference trace of that machine (h200, cpu)"
    option("--against", metavar="MACHINE", help=reference)
    switch("--markdown", help="print a comparison as Markdown, for a comment on a pull request")
    limits = 'exit with status 1 if a compared run crosses this limit: "step > 5%%", "launches > 0", "memory > 100 MB"'
    option("--fail-if", action="append", metavar="LIMIT", help=limits)
    copy = "write the trace, or one run's ranks, as JSON in which Perfetto shows every slice (.json or .json.gz)"
    option("--export", metavar="FILE", help=copy)
    sections.add_view_flags(parser)
    argv = sys.argv[1:] if argv is None else argv
    # The value of --json stands behind "=", because argparse would take the name of a trace for it.
    flags = len(argv) if "--" not in argv else argv.index("--")
    args = parser.parse_args(["--json=short" if word == "--json" else word for word in argv[:flags]] + argv[flags:])
    sections.refuse_conflicts(args)
    if args.whole and args.steps is not None:
        raise BadInput("--whole counts the whole recording as one step: leave out --steps")
    if args.json and args.open:
        raise BadInput("--json prints nothing but JSON: leave out --open")
    if (args.name is not None or args.json == "schema") == bool(args.traces):
        raise BadInput("name a trace, or a kernel with --name")
    if args.json == "schema":
        print(SCHEMA.read_text(encoding="utf-8"), end="")
        return
    if args.name is not None:
        from tracereader.show.text import console, paragraph, plain, printable
        from tracereader.trace.kernel_names import decode

        print(printable(args.name))
        paragraph(console(), plain(str(decode(args.name))), " " * 4, " " * 4)
        return
    jobs = [_located(one) for one in args.traces]
    args.left_out = _front_ends(args, jobs)
    args.traces = [path for paths in jobs for path in paths]
    # A folder of captures is looked into later.
    args.capture = [path for one in args.capture for path in (_located(one) if is_url(one) else [Path(one)])]
    limits = _limits(args)
    if args.html is not None:
        _refuse_beside_html(args)
    if args.export is not None:
        _refuse_beside_export(args)
    if args.ranks and (args.previous or args.against):
        raise BadInput("--ranks compares the ranks of one run: leave out --previous and --against")
    if args.ranks and args.capture:
        raise BadInput("--capture takes one trace: leave out --ranks")
    if len(jobs) > 1 and any(len(paths) > 1 for paths in jobs):
        _require(path for paths in jobs if len(paths) == 1 for path in paths)
        if not args.ranks and all(len(paths) > 1 for paths in jobs) and _as_jobs(args, jobs):
            return
    several = len(args.traces) > 1 and not args.capture and not args.previous and not args.against
    if (several or args.ranks) and not (args.markdown or args.fail_if) and _as_ranks(args):
        return
    if args.rank is not None:
        raise BadInput("--rank shows one of several ranks: name the traces of at least two, or add --ranks")
    if len(args.traces) > 1:
        _refuse(args, ("open", "json", "against", "capture", "export"), "--{} takes one trace")
    for refused, why in (
        (args.previous and len(args.traces) < 3, "--previous needs at least three traces"),
        (args.capture and args.against, "--capture takes one trace: leave out --against"),
        (args.json and args.against, "--json takes one trace: leave out --against"),
    ):
        if refused:
            raise BadInput(why)

    # Imported here, each only if it is used, so that --help and refusals are fast: a tenth of a second is a third of
    # the time to read a trace of 10 MB.
    from tracereader.show import report
    from tracereader.show.predictions import predictions_of
    from tracereader.show.view import View
    from tracereader.trace.marks import StepsBy

    by = StepsBy.NOTHING if args.whole else StepsBy.FOUND if args.steps is None else args.steps
    view = View.of(args, steps_by=by, process=args.process, left_out=args.left_out)
    if args.against:
        from tracereader.show import references

        args.traces.insert(0, references.named(args.traces[0], args.against, "--against"))
    first, *others = args.traces
    if args.export is not None:
        from tracereader.show import export

        export.write(first, args.export, args.force, args.limit)
        return
    # Before reading the first one, which may take long.
    _require([*others, *(one for one in args.capture if not one.is_dir())])
    trace, summary = report.opened(first, view, args.limit, tuple(args.capture))
    if others:
        one = [trace]
        del trace  # so that the comparison can free it before it reads the next one
        _compare(args, view, one, summary, limits)
    elif args.json:
        from tracereader.show.as_json import as_json

        print(as_json(trace, summary, predictions_of(trace), view, args.json == "short"))
    elif args.html is not None:
        from tracereader.show import page

        page.write(page.of_trace(trace, summary, predictions_of(trace)), args.html, args.force)
    else:
        report.explain(trace, summary, view)
    if args.open:
        from tracereader.show import perfetto

        perfetto.hand_over(args.traces[-1])


def _compare(args, view, first: list, summary, limits) -> None:
    """Print the differences between the first trace and the others. Raises RunFailed for --fail-if.

    first: a list with the first trace, which is removed from it, so that no two traces are in memory at a time.
    """
    from tracereader.show import comparison, report

    runs = None
    if args.html is not None:
        from tracereader.show import page

        runs = page.Runs()
        runs.add(first[0], summary)
    trace = first.pop()
    summaries, proposed = [summary], []
    for path in args.traces[1:]:
        if runs is None and not args.markdown and (args.previous or not proposed):
            proposed.append(comparison.proposed_by(trace, summary) if view.shows("short") else ())
        summary.cpu.keep()
        del trace
        gc.collect()  # frees the trace: parents and children refer to each other
        trace, summary = report.opened(path, view, args.limit)
        summaries.append(summary)
        if runs is not None:
            runs.add(trace, summary)
    if runs is not None:
        page.write(runs.page(), args.html, args.force, aside=args.markdown)
    if args.markdown:
        from tracereader.show import markdown

        print(markdown.side_by_side(summaries))
    elif runs is None:
        comparison.side_by_side(summaries, view, args.previous, proposed)
    if limits:
        from tracereader.command import RunFailed
        from tracereader.show.limits import crossed

        if crossings := list(crossed(summaries, limits)):
            raise RunFailed("; ".join(crossings))


def _located(named: str) -> list[Path]:
    """Return the traces that an argument names. Raises BadInput."""
    if not is_url(named) and not os.path.isdir(named):
        return [Path(named)]
    from tracereader.trace.document import located

    return located(named)


def _front_ends(args, jobs: list[list[Path]]) -> list[Path]:
    """Take the front ends of servers out of the traces that folders hold, and return them."""
    if not any(len(paths) > 1 for paths in jobs):
        return []
    from tracereader.figures.reading import front_ends

    found = []
    for paths in jobs:
        gone = front_ends(paths, args.limit)
        paths[:] = [path for path in paths if path not in gone]
        found += gone
    return found


def _require(paths: Iterable[Path]) -> None:
    """Raise BadInput for a file that is no trace, as far as its first bytes tell."""
    from tracereader.trace.document import refuse_at_once

    for path in paths:
        refuse_at_once(path)


def _limits(args) -> list:
    """Return the limits of --fail-if. Raises BadInput for an unreadable limit, and for flags that exclude it."""
    if not (args.markdown or args.fail_if):
        return []
    flag = "--markdown" if args.markdown else "--fail-if"
    if args.ranks or len(args.traces) + bool(args.against) < 2:
        raise BadInput(f"{flag} is for a comparison: name two traces")
    if args.previous or args.json:
        raise BadInput(f"{flag} compares each trace with the first: leave out --{'json' if args.json else 'previous'}")
    if args.markdown and args.html == "-":
        raise BadInput("--markdown and --html - both print: name a file for --html")
    from tracereader.show.limits import limit_of

    return [limit_of(text) for text in args.fail_if or ()]


def _refuse_beside_html(args) -> None:
    """Raise BadInput for flags that --html excludes, and for a file that cannot be written."""
    from tracereader.show.page import files

    others = ("json", "open", "only", "all", "lanes", "previous", "rank")
    _refuse(args, others, "--html writes the whole report to a file: leave out --{}")
    captures = []
    if args.capture:
        from tracereader.trace.capture import files_of

        captures = files_of(args.capture)
    files.refuse_early(args.html, args.force, [*args.traces, *captures])


def _refuse(args, flags: Iterable[str], why: str) -> None:
    """Raise BadInput if one of these flags was given; why has its name in place of {}. The number 0 is a value."""
    for flag in flags:
        value = getattr(args, flag)
        if value is not None and value is not False and value != []:
            raise BadInput(why.format(flag.replace("_", "-")))


def _refuse_beside_export(args) -> None:
    """Raise BadInput for flags that --export excludes, and for a file that cannot be written."""
    from tracereader.show import export

    others = ("json", "open", "only", "all", "lanes", "previous", "against", "markdown", "fail_if",
              "html", "step", "steps", "whole", "process", "capture", "rank")  # fmt: skip
    _refuse(args, others, "--export writes a trace and prints no report: leave out --{}")
    export.refuse_early(args.export, args.force, args.traces)


def _as_jobs(args, jobs: list[list[Path]]) -> bool:
    """Print a comparison of jobs. Return False if the folders do not hold the ranks of one run each."""
    from tracereader.figures import reading

    if not all(map(reading.are_ranks, jobs)):
        return False
    # --ranks reads all traces as one job.
    others = ("json", "html", "open", "export", "markdown", "fail_if", "previous", "against", "capture", "rank",
              "process", "steps", "whole")  # fmt: skip
    _refuse(args, others, "--{} is not for a comparison of jobs: name the ranks of one job")
    from tracereader.show import jobs as shown
    from tracereader.show.view import View

    shown.explain(jobs, View.of(args, left_out=args.left_out), args.limit)
    return True


def _as_ranks(args) -> bool:
    """Print the report on the ranks of one run. Return False if these are other traces, which are to be compared."""
    from tracereader.figures import reading

    if not args.ranks and not reading.are_ranks(args.traces):
        return False
    why = "--{} is for traces of one process: leave it out, or name the trace of one rank"
    _refuse(args, ("whole", "steps", "process"), why)
    from tracereader.show import export, perfetto, ranks
    from tracereader.show.view import View

    view = View.of(args, rank=args.rank, left_out=args.left_out)
    found = ranks.opened(args.traces, view, args.limit, args.ranks)
    if found is None:
        return False
    summary, traces = found
    if args.json:
        print(ranks.as_json(summary, view, args.limit, args.json == "short"))
    elif args.html is not None:
        from tracereader.show import page

        page.write(page.of_ranks(summary, traces, args.limit), args.html, args.force)
    elif args.export is None:
        ranks.explain(summary, traces, view, args.limit)
    if args.open or args.export is not None:
        name, content = export.merged(summary, args.limit)
        if args.open:
            perfetto.hand_over(name, content)
        else:
            export.write_merged(content, args.export, args.force, args.traces, len(summary.ranks))
    return True


def entry() -> int:
    """Run the command read-trace and return its exit status."""
    gc.disable()  # all objects live to the end, and garbage collection of a large trace takes seconds
    try:
        return main()
    finally:
        gc.freeze()  # Python collects at its end, too
