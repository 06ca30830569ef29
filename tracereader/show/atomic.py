"""Replaces a file atomically, and protects the traces that are read from being replaced."""

import os
import secrets
import stat
from collections.abc import Iterable
from pathlib import Path

from tracereader import interrupts
from tracereader.command import BadInput, is_url


def status_of(flag: str, target: str, traces: Iterable[Path], instead: str = "") -> os.stat_result | None:
    """Return the status of the plain file that a flag writes; None if there is none, but its folder exists.

    Raises BadInput for a URL, for one of the traces that are read, for a folder or a device, and for a path that the
    system refuses. The message does not repeat a URL, because it may contain credentials. instead: added for a device.
    """
    if is_url(target):
        raise BadInput(f"{flag} writes a file on this machine and takes no URL")
    if os.path.basename(target) in ("", "."):  # pathlib would drop it
        raise BadInput(f"{flag} {target}: a folder; name a file in it")
    try:
        status = Path(target).stat()
    except FileNotFoundError:
        if not Path(target).resolve().parent.is_dir():
            raise BadInput(f"{flag} {target}: no such folder: {Path(target).parent}") from None
        return None
    except OSError as problem:  # a loop of links, which Path.resolve() reports as a RuntimeError, or too long a name
        raise BadInput(f"{flag} {target}: {problem.strerror}") from None
    if any(one.exists() and os.path.samestat(status, one.stat()) for one in traces):
        raise BadInput(f"{flag} {target}: that is the trace itself, which stays as it is; name another file")
    if stat.S_ISDIR(status.st_mode):
        raise BadInput(f"{flag} {target}: a folder; name a file in it")
    if not stat.S_ISREG(status.st_mode):
        raise BadInput(f"{flag} {target}: not a plain file{instead}")
    return status


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
