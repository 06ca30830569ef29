"""Shows the progress of a long job in one line of a terminal."""

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator

from tracereader import interrupts

# Seconds before the first text and between texts. Shorter waits would flicker.
AFTER_S, EVERY_S = 1.5, 0.5
CLEAR_LINE = "\r\x1b[K"


def nowhere(text: str) -> None:
    """Show nothing: for a caller without a terminal's line."""


@contextlib.contextmanager
def shown() -> Iterator[Callable[[str], None]]:
    """Yield a function that shows a text at a terminal, in place of the text before. At the end the line is cleared.

    The function may be called often: it shows a text now and then. Outside the main thread it shows nothing, because
    several threads would write over each other.
    """
    if threading.current_thread() is not threading.main_thread() or not sys.stderr.isatty():
        yield nowhere
        return
    due, written = time.monotonic() + AFTER_S, False

    def show(text: str) -> None:
        nonlocal due, written
        if time.monotonic() >= due:
            due, written = time.monotonic() + EVERY_S, True
            print(f"{CLEAR_LINE}{text}", end="", file=sys.stderr, flush=True)

    try:
        with interrupts.undone_by(lambda: os.write(2, CLEAR_LINE.encode())):
            yield show
    finally:
        if written:
            print(CLEAR_LINE, end="", file=sys.stderr, flush=True)
