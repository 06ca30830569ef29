"""Progress that a run shows at a terminal."""

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator

from rich.console import Console

from tracereader import interrupts, progress

SHOW_CURSOR = "\x1b[?25h"


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
