"""Files that are written atomically: all files of a run are replaced together, or none is."""

import contextlib
import functools
import json
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

from tracereader import interrupts
from tracereader.command import BadInput

# The last keys of a trace lie within this many bytes of its end. The longest of them is a path.
TAIL_BYTES = 64 * 1024
UNFINISHED = ".unfinished-"
# This file in each unfinished folder is locked while its process lives. A process id would not do, because
# containers share folders and each numbers its own processes.
ALIVE = "alive"


def require_writable(folder: Path) -> None:
    """Create the folder if it does not exist. Raise BadInput if no file can be created in it.

    Also removes the unfinished files of runs that were killed.
    """
    with _refused(folder):
        folder.mkdir(parents=True, exist_ok=True)
        for scratch in folder.glob(f"{UNFINISHED}*"):
            _clear_if_dead(scratch)
    if not os.access(folder, os.W_OK | os.X_OK):
        raise BadInput(f"cannot write to {folder}: no permission")


def refuse_early(folder: Path) -> None:
    """Raise BadInput if the folder cannot be created or written, as far as this shows without creating it."""
    with _refused(folder):
        there = next(one for one in (folder, *folder.parents) if _exists(one))
    if not os.access(there, os.W_OK | os.X_OK):
        raise BadInput(f"cannot write to {folder}: no permission")


def _exists(path: Path) -> bool:
    """Return whether there is something at the path. Raises OSError for a loop of links, and below a file."""
    try:
        os.stat(path)
    except FileNotFoundError:
        return False
    return True


@contextlib.contextmanager
def out_refused() -> Iterator[None]:
    """Add the flag that names another folder to a refusal of the folder."""
    try:
        yield
    except BadInput as problem:
        raise BadInput(f"{problem}; --out names another folder") from None


@contextlib.contextmanager
def published(folder: Path, *names: str) -> Iterator[list[Path]]:
    """Yield temporary paths to write to. At the end they replace the files of these names, all of them or none.

    After an error, Ctrl-C, SIGTERM or SIGHUP the folder is as it was before. Raises BadInput.
    """
    with _refused(folder), interrupts.raised(), _scratch(folder) as scratch:
        files = [scratch / name for name in names]
        for file in files:
            file.touch()  # a file that cannot be created is refused here, because Kineto reports that only on stderr
        yield files
        for file in files:
            with file.open("rb") as written:
                os.fsync(written.fileno())  # some file systems say only here that they are full
        with interrupts.held():
            _replace_all(files, folder)


@contextlib.contextmanager
def _scratch(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder inside this one, where a rename is atomic; it is removed at the end."""
    scratch = folder / f"{UNFINISHED}{secrets.token_hex(8)}"
    clear, alive = functools.partial(_clear, scratch), None
    with interrupts.undone_by(clear):
        try:
            with interrupts.not_ending():  # or it would be created after the cleaning, and stay
                while alive is None:  # another process may remove it before it is locked
                    scratch.mkdir(exist_ok=True)
                    alive = _locked(scratch / ALIVE, wait=True)
            yield scratch
        finally:
            with interrupts.held(), interrupts.not_ending():  # so that the program does not end in the middle of it
                if alive is not None:
                    os.close(alive)
                clear()


def _clear(scratch: Path) -> None:
    gone = scratch.with_name(f"{scratch.name}-gone")
    try:
        os.replace(scratch, gone)  # so that another thread that is writing creates no more files in it
    except OSError:  # the folder does not exist; or, on Windows, a file in it is open
        gone = scratch
    shutil.rmtree(gone, ignore_errors=True)


def _clear_if_dead(scratch: Path) -> None:
    if fcntl is None or scratch.is_symlink() or not scratch.is_dir():
        return
    with contextlib.suppress(OSError):  # another user's folder, or a file system without locks
        alive = _locked(scratch / ALIVE, wait=False)
        if alive is not None:
            # The lock is held meanwhile. A process that has just created the folder waits for the lock, and then
            # sees that the folder is gone.
            shutil.rmtree(scratch, ignore_errors=True)
            os.close(alive)


def _locked(file: Path, wait: bool) -> int | None:
    """Return the locked file's descriptor, creating the file; None if another process holds or has removed it."""
    try:
        opened = os.open(file, os.O_CREAT | os.O_RDWR)
    except FileNotFoundError:
        return None
    if fcntl is not None:
        try:
            fcntl.flock(opened, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except OSError as problem:
            if wait and not isinstance(problem, BlockingIOError):
                return opened  # a file system without locks; nothing is ever cleaned up there
            os.close(opened)
            if isinstance(problem, BlockingIOError):
                return None
            raise
    if not file.exists():
        os.close(opened)
        return None
    return opened


def _replace_all(files: list[Path], folder: Path) -> None:
    done = []
    try:
        for file in files:
            target, before = folder / file.name, file.with_name(f"{file.name}.before")
            if target.exists():
                _keep(target, before)
            os.replace(file, target)
            done.append((target, before))
    except BaseException:
        for target, before in done:
            if before.exists():
                os.replace(before, target)
            else:
                target.unlink()
        raise


def _keep(file: Path, other_name: Path) -> None:
    try:
        os.link(file, other_name)
    except OSError:  # some file systems have no links
        shutil.copy2(file, other_name)


@contextlib.contextmanager
def _refused(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as problem:
        raise BadInput(f"cannot write to {folder}: {problem.strerror or problem}") from None


def finish_trace(file: Path, **more: object) -> None:
    """Add top-level keys to a Chrome trace, and replace the path in its traceName by the file's name.

    Only the end is read and written, because a trace can be large. Raises BadInput for a file that is incomplete,
    because Kineto, which wrote it, reports no error.
    """
    with contextlib.suppress(OSError, ValueError), file.open("r+b") as trace:
        at, last_keys = _last_keys(trace)
        end = json.dumps(last_keys | {"traceName": file.name} | more).encode()[1:]
        trace.seek(at)
        trace.truncate()
        trace.write(end)
        trace.flush()
        os.fsync(trace.fileno())
        if os.fstat(trace.fileno()).st_size == at + len(end):
            return
    raise BadInput("the trace could not be written whole: is the disk full?")


def run_of(file: Path) -> str | None:
    """Return the id of the run that wrote this trace; None if no numbered script wrote it, or it does not exist."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError), file.open("rb") as trace:
        return _last_keys(trace)[1]["lesson"]["run"]
    return None


def _last_keys(trace: BinaryIO) -> tuple[int, dict]:
    """Return the top-level keys after a Chrome trace's events, and their offset. Raises OSError and ValueError."""
    start = max(0, trace.seek(0, os.SEEK_END) - TAIL_BYTES)
    trace.seek(start)
    tail = trace.read()
    at = tail.rindex(b'"traceName"')
    return start + at, json.loads(b"{" + tail[at:])
