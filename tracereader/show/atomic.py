"""Replaces a file atomically, and protects the traces that are read from being replaced."""

import os
import secrets
import stat
from collections.abc import Iterable
from pathlib import Path

from tracereader import interrupts
from tracereader.command import BadInput


def refuse(flag: str, target: str, traces: Iterable[Path]) -> None:
    """Raise BadInput if the target is a URL or one of the traces that are read.

    The message does not repeat a URL, because it may contain credentials.
    """
    if "://" in target:
        raise BadInput(f"{flag} writes a file on this machine and takes no URL")
    path = Path(target)
    if path.exists() and any(one.exists() and path.samefile(one) for one in traces):
        raise BadInput(f"{flag} {target}: that is the trace itself, which stays as it is; name another file")


def replace(path: Path, data: bytes) -> None:
    """Write a file atomically: its path has either the old file or the whole new one."""
    path = path.resolve()
    scratch = path.with_name(f".{path.name[:80]}.{secrets.token_hex(6)}.tmp")
    with interrupts.undone_by(lambda: scratch.unlink(missing_ok=True)):
        try:
            with scratch.open("xb") as file:
                file.write(data)
            if path.exists():
                scratch.chmod(stat.S_IMODE(path.stat().st_mode))
            os.replace(scratch, path)
        finally:
            scratch.unlink(missing_ok=True)
