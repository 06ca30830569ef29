"""Exit statuses, one-line errors, whole numbers and URLs, which all commands of the project share."""

from tracereader import interrupts  # first, because it handles Ctrl-C during the other imports

# isort: split
import argparse
import contextlib
import functools
import logging
import os
import re
import shlex
import signal
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import TextIO

DEFAULT_LIMIT = 4 * 10**9  # bytes of JSON that are read
LONG_WORD = 40  # the number of characters of an argument that an error message repeats at most


class BadInput(Exception):
    """An error that the user can fix. Printed as one line; exit status 2."""


class MissingPackage(OSError):
    """A package that reads a file is missing. The text ends in the command that installs it, so nothing may follow."""

    def __init__(self, what: str, package: str):
        super().__init__(f"a package for {what} is missing; this command installs it: {install_command(package)}")


class RunFailed(Exception):
    """The run finished, but its result is not valid. Printed as one line; exit status 1."""


def command(
    main: Callable[[Sequence[str] | None], None], advice: Callable[[str], str | None] = lambda problem: None
) -> Callable[..., int]:
    """Make `main` return an exit status: 0, 1 (RunFailed), 2 (BadInput), 128 + a signal's number or 141 (closed pipe).

    advice: maps another error's text to what the user can do about it; such an error is handled as a BadInput.
    """

    @functools.wraps(main)
    def guarded(argv: Sequence[str] | None = None) -> int:
        for stream in (sys.stdout, sys.stderr):
            if hasattr(stream, "reconfigure"):
                stream.reconfigure(errors="replace")  # a console without µ or … must not end a run
        for size in ("COLUMNS", "LINES"):
            if not re.fullmatch(r"\d{0,6}", os.environ.get(size, ""), re.ASCII):
                del os.environ[size]  # rich would convert ² and a number of any length, and raise
        # The user can do nothing about a library's warnings, and they hide the output.
        # Errors that libraries log and recover from (a candidate that max-autotune drops) are hidden, too.
        before = logging.root.manager.disable
        logging.disable(logging.ERROR)
        with warnings.catch_warnings():
            if not sys.warnoptions:
                warnings.simplefilter("ignore")
            try:
                if sys.stdout is None:
                    raise BadInput("standard output is closed: there is nowhere to print to")
                main(argv)
                sys.stdout.flush()  # here, so that a closed pipe gives an exit status and no traceback
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
            except BrokenPipeError:  # the reader closed the pipe
                _discard_buffer(sys.stdout)
                return 141
            except Exception as problem:
                if line := advice(str(problem)):
                    return _stop(line, 2)
                if isinstance(problem, OSError):
                    return _stop(_system_error(problem), 2)
                raise
            finally:
                interrupts.all_is_done()
                logging.disable(before)
        return 0

    return guarded


def _stop(problem: object, status: int) -> int:
    try:
        print(f"{interrupts.program_name()}: {printable(' '.join(str(problem).split()))}", file=sys.stderr, flush=True)
    except OSError:  # stderr is closed, so the exit status is the only message
        _discard_buffer(sys.stderr)
    return status


def _system_error(problem: OSError) -> str:
    """Return a line with the operation that the system refused, and its file."""
    why = problem.strerror or str(problem) or type(problem).__name__
    if problem.filename:
        return f"{problem.filename}: {why}"
    try:  # the stream does not keep what it could not write, so writing is tried again
        os.write(sys.stdout.fileno(), b"\n")
    except (OSError, ValueError):
        _discard_buffer(sys.stdout)
        return f"cannot write to standard output: {why}"
    return why


def _discard_buffer(stream: TextIO) -> None:
    """Discard the stream's buffer. Otherwise Python would try to write it at exit and report an error."""
    with contextlib.suppress(OSError, ValueError):  # a test's stream may not be a file
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def printable(text: str) -> str:
    """Return the text without control characters. Names in a trace and names of files may contain any."""
    return text if text.isprintable() else "".join(one if one.isprintable() else "\ufffd" for one in text)


# Files that other tools write beside traces.
NO_TRACES = ("execution_details.json", "capture.json")
NONE_IN_FOLDER = "there is no trace in this folder (.json or .pftrace, or such a file with .gz)"


def is_trace(name: str) -> bool:
    """Return whether a file's name is that of a trace. A folder of traces may also contain the profiler's tables."""
    return name not in NO_TRACES and name.endswith((".json", ".json.gz", ".pftrace", ".pftrace.gz"))


def is_url(named: object) -> bool:
    """Return whether a trace's name is a URL and not a path."""
    return "://" in str(named)


def install_command(package: str) -> str:
    """Return the command that installs a package for the Python that runs this program, whatever set it up."""
    import importlib.util

    python = shlex.quote(sys.executable or "python3")
    has_pip = importlib.util.find_spec("pip") is not None  # uv's environments have none
    return f"{f'{python} -m pip install' if has_pip else f'uv pip install --python {python}'} {shlex.quote(package)}"


class OneLineParser(argparse.ArgumentParser):
    """An ArgumentParser that raises BadInput for wrong flags and accepts no abbreviated ones."""

    def __init__(self, *args, **kwargs):
        kwargs = {"formatter_class": argparse.RawDescriptionHelpFormatter, "allow_abbrev": False} | kwargs
        super().__init__(*args, **kwargs)

    def error(self, message: str):
        raise BadInput(f"{message} (--help lists the flags)")

    def _print_message(self, message: str, file: TextIO | None = None) -> None:
        # argparse ignores what the system says of a full disk, and would end with status 0.
        print(message or "", end="", file=file, flush=True)


def _whole(text: str, least: int) -> int:
    shown = text if len(text) <= LONG_WORD else f"{text[:LONG_WORD]}…, of {len(text):,} characters,"
    digits = re.fullmatch(r"\s*([-+]?)0*(\d+)\s*", text)
    if digits and len(digits[2]) > LONG_WORD:  # Python converts at most 4,300 of them
        raise argparse.ArgumentTypeError(f"{shown} is too {'small' if digits[1] == '-' else 'large'}")
    try:
        number = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{shown!r} is not a whole number") from None
    if number < least:
        raise argparse.ArgumentTypeError(f"{shown} is too small: {least} is the least")
    if number >= 2**63:
        raise argparse.ArgumentTypeError(f"{shown} is too large")
    return number


positive, not_negative = (functools.partial(_whole, least=least) for least in (1, 0))  # types of flags
