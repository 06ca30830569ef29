"""Measure what changes of a PyTorch program save, without an edit of its code."""

import tracereader.interrupts  # noqa: F401  first, so that Ctrl-C is answered from here on

# isort: split
import argparse
import contextlib
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path

from tracereader import interrupts
from tracereader.command import BadInput, OneLineParser, RunFailed, command, printable
from tracereader.run.program import refuse, say, split

DESCRIPTION = """Measure what changes of a PyTorch program save, without an edit of its code.

  try-changes -- python train.py
  try-changes --minutes 5 --only tf32,fused_optimizer -- python train.py --epochs 1
  try-changes --list

The program is run again and again, as it is and with a change in turn. Each run ends after a few steps. What the
program writes, it writes in each run: --env and --cwd can send it elsewhere."""


SOCKETS = 64  # the path of a folder for sockets, whose own paths have 108 characters at most


@command
def main(argv=None):
    own, program = split(argv)
    args = _flags(own)
    from tracereader.run.candidates import all_candidates

    known = {one.key: one for one in all_candidates()}
    args.only, args.without = _keys("--only", args.only, known), _keys("--without", args.without, known)
    if args.list:
        from tracereader.run import tried

        tried.show_list(list(known.values()))
        return
    _refuse_page(args)
    refuse(program, _environment(args).get("PATH"))
    _try(args, program)


def _flags(own: Sequence[str]) -> argparse.Namespace:
    parser = OneLineParser(prog="try-changes", description=DESCRIPTION, usage="try-changes [flags] -- COMMAND")
    parser.add_argument(
        "--minutes", type=_minutes, default=10.0, help="the time that all runs take at most (default 10)"
    )
    parser.add_argument("--only", metavar="KEYS", help="try these changes, separated by commas (--list names them)")
    parser.add_argument("--without", metavar="KEYS", help="leave these changes out")
    parser.add_argument("--list", action="store_true", help="list the changes that can be tried, and run nothing")
    parser.add_argument("--json", action="store_true", help="print everything that was measured as JSON")
    parser.add_argument(
        "--html", metavar="FILE", help="write the recording's page (read-trace --html) with what was measured"
    )
    parser.add_argument("--force", action="store_true", help="let --html overwrite a file that is not such a page")
    parser.add_argument("--env", metavar="NAME=VALUE", action="append", default=[], help="set a variable in each run")
    parser.add_argument("--cwd", metavar="FOLDER", help="run the program in this folder")
    parser.add_argument("--step-at", metavar="NAME", help="what ends a step: an annotation, or a function module:name")
    parser.add_argument("--output", action="store_true", help="show what the program prints, on stderr")
    args = parser.parse_args(own)
    if args.cwd is not None and not Path(args.cwd).is_dir():
        raise BadInput(f"--cwd {printable(args.cwd)}: no such folder")
    for one in args.env:
        if not one.partition("=")[0] or "=" not in one:
            raise BadInput(f"--env {printable(one)}: write NAME=VALUE")
    return args


def _minutes(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = float("nan")
    if not 0.1 <= number <= 24 * 60:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a number of minutes from 0.1 to 1440")
    return number


def _keys(flag: str, text: str | None, known: Iterable[str]) -> tuple[str, ...]:
    found = tuple(one.strip() for one in (text or "").split(",") if one.strip())
    for one in found:
        if one not in known:
            raise BadInput(f"{flag} {printable(one)}: no such change (--list names them)")
    return found


def _refuse_page(args: argparse.Namespace) -> None:
    """Raise BadInput for a page that cannot be written, before anything runs."""
    if args.html is None:
        return
    if args.html == "-" and args.json:
        raise BadInput("--json and --html - both print: name a file for --html")
    from tracereader.show.page import files

    files.refuse_early(args.html, args.force)


def _environment(args: argparse.Namespace) -> dict[str, str]:
    return {**os.environ, **dict(one.split("=", 1) for one in args.env)}


def _try(args: argparse.Namespace, program: Sequence[str]) -> None:
    from tracereader.run import runs
    from tracereader.run.search import Session, search

    tell = partial(say, "try-changes")
    folder = Path(tempfile.mkdtemp(prefix="try-changes-"))
    runs.adopt_orphans()

    def clean_up() -> None:
        runs.end_all()
        shutil.rmtree(folder, ignore_errors=True)

    with interrupts.undone_by(clean_up):
        try:
            tell(
                f"runs the program again and again for at most {args.minutes:g} min, as it is and with changes in "
                "turn. Each run ends after a few steps. Nothing is edited. What it writes, it writes each time."
            )
            session = Session(
                program,
                _variables(args, folder),
                folder,
                time.monotonic() + 60 * args.minutes,
                tell,
                cwd=args.cwd,
                show=args.output,
                step_at=args.step_at,
            )
            stopped = None
            with interrupts.raised():
                try:
                    search(session, args.only, args.without)
                except (KeyboardInterrupt, interrupts.Ended) as signal:
                    stopped = signal
            if session.as_it_is:
                _tell(session, args, program)
            if stopped is not None:
                raise stopped
            if not session.as_it_is:
                raise RunFailed(_failed(session, folder))
        finally:
            clean_up()


def _tell(session, args: argparse.Namespace, program: Sequence[str]) -> None:
    """Print what was measured, and write the page."""
    from tracereader.run import tried

    if args.json:
        print(tried.as_json(session, program))
    elif args.html != "-":
        tried.show(session)
    if args.html is not None:
        from tracereader.show import page

        page.write(tried.page(session), args.html, args.force, aside=args.json)


def _variables(args: argparse.Namespace, folder: Path) -> dict[str, str]:
    """Return the environment of each run. Compiled code is kept for the next run, and not among the user's files."""
    environment = _environment(args)
    own = folder / "tmp"
    if len(str(own)) < SOCKETS:
        own.mkdir()
        if not any(one.startswith("TMPDIR=") for one in args.env):  # what a program forgets there goes with the folder
            environment["TMPDIR"] = str(own)
    for name, value in (
        ("TORCHINDUCTOR_CACHE_DIR", str(folder / "inductor")),
        ("TRITON_CACHE_DIR", str(folder / "triton")),
        ("TORCHINDUCTOR_FX_GRAPH_CACHE", "1"),
        ("PYTHONHASHSEED", "0"),
    ):
        environment.setdefault(name, value)
    return environment


def _failed(session, folder: Path) -> str:
    """Return why the program as it is could not be measured, and keep its output."""
    log = folder / "run" / "log"
    kept = ""
    with contextlib.suppress(OSError):
        if log.stat().st_size:
            handle, name = tempfile.mkstemp(prefix="try-changes-", suffix=".log")
            with open(handle, "wb") as copy:
                copy.write(log.read_bytes())
            kept = f"; its output is in {name}"
    return f"the program as it is could not be measured: {session.failure}{kept}"


def entry() -> int:
    """Run the command try-changes and return its exit status."""
    return main()


if __name__ == "__main__":
    sys.exit(entry())
