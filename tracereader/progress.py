"""One line on a terminal that says how far a long job is."""

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator

from tracereader import interrupts

# Shorter waits would only flicker.
AFTER_S, EVERY_S = 1.5, 0.5
CLEAR_LINE = "\r\x1b[K"


@contextlib.contextmanager
def shown() -> Iterator[Callable[[str], None]]:
    """A function that shows a text in place of the one before, where stderr is a terminal; the line is cleared at last.

    It may be called as often as one likes. In a thread that does not answer Ctrl-C it shows nothing, because several
    of them would write over each other.
    """
    if threading.current_thread() is not threading.main_thread() or not sys.stderr.isatty():
        yield lambda text: None
        return
    due, written = time.monotonic() + AFTER_S, False

    def show(text: str) -> None:
        nonlocal due, written
        if time.monotonic() >= due:
            due, written = time.monotonic() + EVERY_S, True
            print(f"{CLEAR_LINE}{text}", end="", file=sys.stderr, flush=True)

    def clear() -> None:
        if written:
            os.write(sys.stderr.fileno(), CLEAR_LINE.encode())

    try:
        with interrupts.undone_by(clear):
            yield show
    finally:
        clear()
