"""Replaces a file atomically."""

import os
import secrets
import stat
from pathlib import Path

from tracereader import interrupts


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
