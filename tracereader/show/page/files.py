"""Writes a page atomically, and overwrites only reports."""

import sys
from collections.abc import Iterable
from pathlib import Path

from tracereader.command import BadInput
from tracereader.show.atomic import replace, status_of
from tracereader.show.page.html import MARK

STDOUT = "-"
ENDINGS = (".html", ".htm")


def refuse_early(target: str, force: bool, traces: Iterable[Path] = ()) -> None:
    """Raise BadInput if the page cannot be written there. This comes before a trace is read, which may take long."""
    if target == STDOUT:
        return
    status = status_of("--html", target, traces, "; --html - writes to standard output")
    if status is not None and status.st_size and not force:
        with open(target, "rb") as file:
            if file.read(len(MARK)) != MARK.encode():
                raise BadInput(f"--html {target}: exists and is not a report of read-trace; --force overwrites it")
    if Path(target).suffix.lower() not in ENDINGS and not force:
        raise BadInput(f"--html {target}: a browser opens a file that ends in .html; --force writes to this name")


def write(page: str, target: str, force: bool) -> int:
    """Write the page atomically, and return the number of its bytes. Raises BadInput."""
    data = page.encode()
    if target == STDOUT:
        sys.stdout.flush()
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()
        return len(data)
    refuse_early(target, force)  # again, because another program may have written the file meanwhile
    replace(Path(target), data)
    return len(data)
