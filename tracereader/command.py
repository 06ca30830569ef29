"""What every command of the project has in common: exit statuses, one-line refusals, whole numbers, view flags."""

from tracereader import interrupts  # first: it answers Ctrl-C while the rest is imported

# isort: split
import argparse
import contextlib
import functools
import logging
import os
import re
import signal
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import TextIO

SECTIONS = (
    "short", "try", "gpu", "predictions", "steps", "lanes", "training", "table", "repeats", "kernels", "cpu", "work",
    "names", "starts", "series", "chain", "patterns",
)  # fmt: skip
LONG_WORD = 40  # characters, of which a refusal repeats no more


class BadInput(Exception):
    """Something the user can mend. Printed as one line; exit status 2."""


class RunFailed(Exception):
    """The run finished but must not be trusted. Printed as one line; exit status 1."""


def command(
    main: Callable[[Sequence[str] | None], None], advice: Callable[[str], str | None] = lambda problem: None
) -> Callable[..., int]:
    """Make `main` return an exit status: 0, 1 (RunFailed), 2 (BadInput), 128 + a signal's number or 141 (closed pipe).

    advice: what to do about another error's text, where only the user can mend it: then it is a BadInput.
    """

    @functools.wraps(main)
    def guarded(argv: Sequence[str] | None = None) -> int:
        for stream in (sys.stdout, sys.stderr):
            if hasattr(stream, "reconfigure"):
                stream.reconfigure(errors="replace")  # a console without µ or … must not end a run
        # A reader can do nothing about a library's warnings, and they bury what the run says.
        # What they log as an error and survive (a candidate that max-autotune drops) is no news.
        before = logging.root.manager.disable
        logging.disable(logging.ERROR)
        with warnings.catch_warnings():
            if not sys.warnoptions:
                warnings.simplefilter("ignore")
            try:
                if sys.stdout is None:
                    raise BadInput("standard output is closed: there is nowhere to print to")
                main(argv)
                sys.stdout.flush()  # here, where a closed pipe is still an answer and no traceback
            except interrupts.Ended as ended:
                return _stop(interrupts.said_of(ended.number), ended.code)
            except SystemExit as stop:  # argparse: --help; rich, of a closed pipe
                if isinstance(stop.__context__, BrokenPipeError):
                    return 141
                if stop.code is None or isinstance(stop.code, int):
                    return stop.code or 0
                return _stop(stop.code, 1)  # a library that called sys.exit("why")
            except BadInput as problem:
                return _stop(problem, 2)
            except RunFailed as problem:
                return _stop(problem, 1)
            except KeyboardInterrupt:
                return _stop(interrupts.said_of(signal.SIGINT), 130)
            except BrokenPipeError:  # the reader of a pipe has seen enough
                _let_go_of(sys.stdout)
                return 141
            except Exception as problem:
                if told := advice(str(problem)):
                    return _stop(told, 2)
                if isinstance(problem, OSError):
                    return _stop(_told(problem), 2)
                raise
            finally:
                interrupts.all_is_done()
                logging.disable(before)
        return 0

    return guarded


def _stop(problem: object, status: int) -> int:
    try:
        print(f"{interrupts.program_name()}: {printable(' '.join(str(problem).split()))}", file=sys.stderr, flush=True)
    except OSError:  # nobody can be told: the status says it
        _let_go_of(sys.stderr)
    return status


def _told(problem: OSError) -> str:
    """What the system refused, and where."""
    why = problem.strerror or str(problem) or type(problem).__name__
    if problem.filename:
        return f"{problem.filename}: {why}"
    try:  # the stream itself has already forgotten what it could not write
        os.write(sys.stdout.fileno(), b"\n")
    except (OSError, ValueError):
        _let_go_of(sys.stdout)
        return f"cannot write to standard output: {why}"
    return why


def _let_go_of(stream: TextIO) -> None:
    """Send what the stream still holds nowhere: Python would try again as it ends, and complain."""
    with contextlib.suppress(OSError, ValueError):  # a test's stream is no file
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def printable(text: str) -> str:
    """The text without characters that would drive a terminal: names in a trace, and of files, are somebody else's."""
    return text if text.isprintable() else "".join(one if one.isprintable() else "\ufffd" for one in text)


class OneLineParser(argparse.ArgumentParser):
    """An ArgumentParser whose refusals are a BadInput; no abbreviated flags."""

    def __init__(self, *args, **kwargs):
        kwargs = {"formatter_class": argparse.RawDescriptionHelpFormatter, "allow_abbrev": False} | kwargs
        super().__init__(*args, **kwargs)

    def error(self, message: str):
        raise BadInput(f"{message} (--help lists the flags)")

    def parse_args(self, *args, **kwargs):
        parsed = super().parse_args(*args, **kwargs)
        if getattr(parsed, "lanes", False) and "lanes" not in (parsed.only or ("lanes",)):
            raise BadInput("--lanes with an --only that leaves them out: add lanes to it, or leave out --lanes")
        return parsed


def positive(text: str) -> int:
    """A whole number from 1 up."""
    return _whole(text, least=1)


def not_negative(text: str) -> int:
    """A whole number from 0 up."""
    return _whole(text, least=0)


def _whole(text: str, least: int) -> int:
    told = text if len(text) <= LONG_WORD else f"{text[:LONG_WORD]}…, of {len(text):,} characters,"
    digits = re.fullmatch(r"\s*([-+]?)0*(\d+)\s*", text)
    if digits and len(digits[2]) > LONG_WORD:  # Python converts at most 4,300 of them
        raise argparse.ArgumentTypeError(f"{told} is too {'small' if digits[1] == '-' else 'large'}")
    try:
        number = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{told!r} is not a whole number") from None
    if number < least:
        raise argparse.ArgumentTypeError(f"{told} is too small: {least} is the least")
    if number >= 2**63:
        raise argparse.ArgumentTypeError(f"{told} is too large")
    return number


def _section(text: str) -> str:
    """Sections with commas between them; checked here, so that a file's name after --only is not taken for one."""
    chosen = text.split(",")
    for name in chosen:
        if name not in SECTIONS:
            raise argparse.ArgumentTypeError(f"no section {name!r}; there are {', '.join(SECTIONS)}")
    return chosen


def add_view_flags(group) -> None:
    """What the numbered scripts and read-trace alike show, and where."""
    how_much = group.add_mutually_exclusive_group()
    how_much.add_argument(
        "--only",
        type=_section,
        metavar="SECTION,…",
        help=f"of the report, only these, with commas between them: {', '.join(SECTIONS)}",
    )
    how_much.add_argument("--all", action="store_true", help="show every section, and each row of it")
    group.add_argument("--step", type=not_negative, metavar="N", help="report on step #N (a typical one)")
    group.add_argument("--lanes", action="store_true", help="draw the lanes of that step even where no terminal is")
    group.add_argument(
        "--open", action="store_true", help="hand the trace to Perfetto in your browser (waits 10 minutes at most)"
    )
    group.add_argument("--html", metavar="FILE", help="write the whole report as one HTML file (-: standard output)")
    group.add_argument("--force", action="store_true", help="let --html overwrite a file that is not such a report")
