"""The flags that all rungs share, and what a wrong value gets."""

import argparse
import functools
import logging
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COMPILE_MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
DTYPES = ("bf16", "fp16", "fp32")
DEVICES = ("auto", "cuda", "xpu", "cpu")


class BadInput(Exception):
    """Something the user can mend. Printed as one line; exit status 2."""


class RunFailed(Exception):
    """The run finished but must not be trusted. Printed as one line; exit status 1."""


def command(main: Callable[[Sequence[str] | None], None]) -> Callable[..., int]:
    """Make `main` return an exit status: 0, 1 (RunFailed), 2 (BadInput) or 130 (Ctrl-C)."""

    @functools.wraps(main)
    def guarded(argv: Sequence[str] | None = None) -> int:
        for stream in (sys.stdout, sys.stderr):
            if hasattr(stream, "reconfigure"):
                stream.reconfigure(errors="replace")  # a console without µ or … must not end a run
        # A reader can do nothing about a library's warnings, and they bury what the run says.
        # What they log as an error and survive (a candidate that max-autotune drops) is no news.
        logging.disable(logging.ERROR)
        with warnings.catch_warnings():
            if not sys.warnoptions:
                warnings.simplefilter("ignore")
            try:
                main(argv)
            except SystemExit as stop:  # argparse: --help, or a flag that it refused
                return stop.code if isinstance(stop.code, int) else 0
            except BadInput as problem:
                return _stop(problem, 2)
            except RunFailed as problem:
                return _stop(problem, 1)
            except KeyboardInterrupt:
                return _stop("interrupted; files appear whole or not at all", 130)
            except BrokenPipeError:  # the reader of a pipe has seen enough
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
                return 141
            except RuntimeError as problem:
                if advice := _advice(str(problem)):
                    return _stop(advice, 2)
                raise
            finally:
                logging.disable(logging.NOTSET)
        return 0

    return guarded


def _stop(problem: object, status: int) -> int:
    from common import screen  # late: --help has no use for what it imports

    screen.error(problem)
    return status


def _advice(problem: str) -> str | None:
    """What to do about an error of torch's or Triton's that only the user can mend."""
    # By their texts: the CPU allocator and Triton raise no type of their own.
    if "CUDA out of memory" in problem or "XPU out of memory" in problem or "HIP out of memory" in problem:
        return "the device ran out of memory: make the shapes smaller"
    if "can't allocate memory" in problem or "not enough memory" in problem:
        return "the machine ran out of memory: make the shapes smaller"
    if "Failed to find C compiler" in problem:
        return "Triton needs a C compiler and found none: install gcc, or set CC"
    return None


class OneLineParser(argparse.ArgumentParser):
    def error(self, message: str):
        raise BadInput(f"{message} (--help lists the flags)")


def positive(text: str) -> int:
    """A whole number from 1 up."""
    return _whole(text, least=1)


def not_negative(text: str) -> int:
    """A whole number from 0 up."""
    return _whole(text, least=0)


def whole_list(text: str) -> list[int]:
    """Whole numbers from 1 up, with commas between them."""
    return [positive(part) for part in text.split(",")]


def _whole(text: str, least: int) -> int:
    try:
        number = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
    if number < least:
        raise argparse.ArgumentTypeError(f"{number} is too small: {least} is the least")
    if number >= 2**63:
        raise argparse.ArgumentTypeError(f"{text} is too large")
    return number


SECTIONS = ("steps", "lanes", "work", "names", "chain", "regime", "patterns")


def add_view_flags(group) -> None:
    """What the numbered scripts and read_trace.py alike show, and where."""
    group.add_argument(
        "--only", nargs="+", choices=SECTIONS, metavar="SECTION",
        help=f"of the report, only these: {', '.join(SECTIONS)}",
    )
    group.add_argument("--lanes", action="store_true", help="draw the lanes of a step even into a pipe")
    group.add_argument("--step", type=not_negative, metavar="N", help="draw those of step #N (a typical one)")
    group.add_argument("--open", action="store_true", help="hand the trace to Perfetto in your browser")


def lesson_parser(doc: str, file: str, examples: Sequence[str]):
    """The parser of one rung, and the group that takes the rung's own flags.

    doc: the script's docstring; its first line opens the help page. file: its __file__.
    examples: flags to show. The parsed result has the script's name as `script`.
    """
    script = Path(file)
    shown = "\n".join(f"  uv run {script.name} {flags}" for flags in examples)
    parser = OneLineParser(
        prog=script.name,
        usage="%(prog)s [flags]",
        description=doc.strip().splitlines()[0],
        epilog=f"examples:\n{shown}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(script=script.stem)
    lesson = parser.add_argument_group("what is profiled")
    how = parser.add_argument_group("how it runs")
    how.add_argument(
        "--compile", nargs="?", const="default", choices=COMPILE_MODES, metavar="MODE",
        help=f"torch.compile it; MODE is {', '.join(COMPILE_MODES)} (default when left out)",
    )
    how.add_argument(
        "--warmup", nargs="?", const=3, default=0, type=not_negative, metavar="N",
        help="call it N times before the profiler starts (3 when left out); without it: cold",
    )
    how.add_argument("--dtype", choices=DTYPES, default="bf16", help="element type (bf16)")
    how.add_argument(
        "--device", choices=DEVICES, default="auto",
        help="auto: the accelerator that is there, else the CPU; cuda includes ROCm (auto)",
    )
    how.add_argument("--guess", action="store_true", help="ask for your own guesses first, and mark them afterwards")
    how.add_argument("--seed", type=not_negative, default=0, metavar="N", help="of the random inputs (0)")

    schedule = parser.add_argument_group("the profiler's schedule, in steps")
    schedule.add_argument("--wait", type=not_negative, default=1, metavar="N", help="not profiled (1)")
    schedule.add_argument(
        "--schedule-warmup", type=not_negative, default=1, metavar="N",
        help="profiled, then thrown away (1)",
    )
    schedule.add_argument("--active", type=positive, default=3, metavar="N", help="recorded (3)")

    add_view_flags(parser.add_argument_group("how it is shown"))

    record = parser.add_argument_group("what is recorded besides, and where")
    record.add_argument("--record-shapes", action="store_true", help="the shapes of every op's inputs")
    record.add_argument("--with-stack", action="store_true", help="Python call stacks (and file paths)")
    record.add_argument("--profile-memory", action="store_true", help="allocations")
    record.add_argument(
        "--out", type=Path, default=ROOT / "traces", metavar="DIR",
        help="where the trace and the table go (traces/ beside the scripts)",
    )
    return parser, lesson
