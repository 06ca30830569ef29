"""Progress that a run shows at a terminal, and its questions."""

import contextlib
import os
import sys
import textwrap
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence

from rich.console import Console
from rich.markup import escape

from tracereader import interrupts, progress
from tracereader.command import BadInput
from tracereader.findings import finding
from tracereader.show.text import console, paragraph

SHOW_CURSOR = "\x1b[?25h"
BOOKKEEPING = ("records_steps",)  # which steps a schedule records is nothing to guess


@contextlib.contextmanager
def status(text: str) -> Iterator[None]:
    """Show a status at a terminal once the body has taken longer than progress.AFTER_S."""
    if not sys.stderr.isatty():
        yield
        return
    spinner = Console(file=sys.stderr).status(text)
    timer = threading.Timer(progress.AFTER_S, spinner.start)
    timer.daemon = True
    timer.start()
    try:
        with interrupts.undone_by(_clear):
            yield
    finally:
        timer.cancel()
        timer.join()
        spinner.stop()


def _clear() -> None:
    os.write(sys.stderr.fileno(), (progress.CLEAR_LINE + SHOW_CURSOR).encode())


def counted(calls: Iterable[Callable], total: int, text: str) -> Iterator[Callable]:
    """Yield the calls. At a terminal, show how many were made once they take longer than progress.AFTER_S.

    The line is printed between two calls. A thread would compete with the measured code for the interpreter.
    """
    return _counted(calls, total, text) if sys.stderr.isatty() else iter(calls)


def _counted(calls: Iterable[Callable], total: int, text: str) -> Iterator[Callable]:
    with progress.shown() as show:
        for number, call in enumerate(calls):
            show(f"{text} {number:,} of {total:,}")
            yield call


def answers(predictions: Sequence[finding.Prediction]) -> list[tuple[dict, bool]]:
    """Return the record of each prediction that the user answered, and whether the answer was yes."""
    asked = [one for one in predictions if one.record["guess"] not in BOOKKEEPING]
    if asked:
        count = finding.counted(len(asked), "prediction")
        told = f"{count} about this run: answer y if you agree, else n; Enter alone skips the rest"
        paragraph(console(), told)
    given = []
    for one in asked:
        answer = ask(f"{one.text}?")
        if answer is None:
            break
        given.append((one.record, answer))
    return given


def ask(question: str) -> bool | None:
    """Return whether the answer that was typed at the terminal is yes; None for an empty one.

    Raises BadInput at the end of the input.
    """
    while True:
        out = console()
        shown = "\n".join(textwrap.wrap(question, max(20, out.width - len(" (y/n) y"))))
        out.print(f"[bold]{escape(shown)}[/bold] (y/n) ", end="")
        try:
            with interrupts.raised():  # so that the terminal's settings, which input() changes, are restored
                answer = input().strip().lower()
        except EOFError:
            raise BadInput("--guess: the answers ended before the questions") from None
        if not answer:
            return None
        if answer in ("y", "yes", "n", "no"):
            return answer.startswith("y")
        console().print("please answer y or n")
