"""What a run says while it goes on, and what it asks."""

import contextlib
import sys
import threading
from collections.abc import Iterator

from rich.console import Console
from rich.markup import escape

from tracereader.command import BadInput
from tracereader.show.text import console

# Shorter waits would only flicker.
STATUS_AFTER_S = 1.5


@contextlib.contextmanager
def status(text: str) -> Iterator[None]:
    """Say what is going on, at a terminal, while it lasts longer than STATUS_AFTER_S."""
    if not sys.stderr.isatty():
        yield
        return
    spinner = Console(file=sys.stderr).status(text)
    timer = threading.Timer(STATUS_AFTER_S, spinner.start)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
        spinner.stop()


def ask(question: str) -> bool:
    """A yes or a no, typed at the terminal."""
    while True:
        console().print(f"[bold]{escape(question)}[/bold] (y/n) ", end="")
        try:
            answer = input().strip().lower()
        except EOFError:
            raise BadInput("--guess: the answers ended before the questions") from None
        if answer in ("y", "yes", "n", "no"):
            return answer.startswith("y")
