"""Files that appear whole or not at all, and all of them or none."""

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

# A trace's last keys lie within its last bytes: the longest is a path.
TAIL_BYTES = 64 * 1024
UNFINISHED = ".unfinished-"
# In each unfinished folder, locked for as long as its process lives: a process id would not do,
# since containers share folders and count their processes each for itself.
ALIVE = "alive"


def require_writable(folder: Path) -> None:
    """Raise BadInput where no file can be made in the folder, which is made if it is not there.

    Clears what runs that were killed have left in it.
    """
    with _refused(folder):
        folder.mkdir(parents=True, exist_ok=True)
        for scratch in folder.glob(f"{UNFINISHED}*"):
            _clear_if_dead(scratch)
    if not os.access(folder, os.W_OK | os.X_OK):
        raise BadInput(f"cannot write to {folder}: no permission")


@contextlib.contextmanager
def published(folder: Path, *names: str) -> Iterator[list[Path]]:
    """Paths to write to; at the end they become the files of these names, all of them or none.

    On an error, Ctrl-C, SIGTERM or SIGHUP the folder is left as it was. Raises BadInput.
    """
    with _refused(folder), interrupts.raised(), _scratch(folder) as scratch:
        files = [scratch / name for name in names]
        for file in files:
            file.touch()  # what cannot even be made is refused here: Kineto would report it in its own way
        yield files
        for file in files:
            with file.open("rb") as written:
                os.fsync(written.fileno())  # some file systems say only here that they are full
        with interrupts.held():
            _replace_all(files, folder)


@contextlib.contextmanager
def _scratch(folder: Path) -> Iterator[Path]:
    """A folder inside, since only there a rename is atomic; gone at the end."""
    scratch = folder / f"{UNFINISHED}{secrets.token_hex(8)}"
    clear, alive = functools.partial(_clear, scratch), None
    with interrupts.undone_by(clear):
        try:
            with interrupts.not_ending():  # or it is made after all was undone, and stays
                while alive is None:  # until none who clears up was faster than its lock
                    scratch.mkdir(exist_ok=True)
                    alive = _locked(scratch / ALIVE, wait=True)
            yield scratch
        finally:
            with interrupts.held(), interrupts.not_ending():  # or the program ends in the middle of it
                if alive is not None:
                    os.close(alive)
                clear()


def _clear(scratch: Path) -> None:
    gone = scratch.with_name(f"{scratch.name}-gone")
    try:
        os.replace(scratch, gone)  # another thread may be writing: from here it makes no more files in it
    except OSError:  # there is none; or Windows, where a file in it is open
        gone = scratch
    shutil.rmtree(gone, ignore_errors=True)


def _clear_if_dead(scratch: Path) -> None:
    if fcntl is None or scratch.is_symlink() or not scratch.is_dir():
        return
    with contextlib.suppress(OSError):  # somebody else's folder, or a file system without locks
        alive = _locked(scratch / ALIVE, wait=False)
        if alive is not None:
            # While it is held: one that has just been made waits for its lock, and then sees that it is gone.
            shutil.rmtree(scratch, ignore_errors=True)
            os.close(alive)


def _locked(file: Path, wait: bool) -> int | None:
    """The file, made if it is not there, open and locked; None where another has it, or has removed it."""
    try:
        opened = os.open(file, os.O_CREAT | os.O_RDWR)
    except FileNotFoundError:
        return None
    if fcntl is not None:
        try:
            fcntl.flock(opened, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except OSError as problem:
            if wait and not isinstance(problem, BlockingIOError):
                return opened  # a file system without locks: none there is ever cleared
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
    """Add top-level keys to a Chrome trace, and make its traceName a name instead of a path of this machine.

    Only the end is read and written: a trace can be large. Raises BadInput for a file that is not whole:
    Kineto, which wrote it, reports no error.
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
    """The id of the run that wrote this trace; None where there is no such file, or no run of ours wrote it."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError), file.open("rb") as trace:
        return _last_keys(trace)[1]["lesson"]["run"]
    return None


def _last_keys(trace: BinaryIO) -> tuple[int, dict]:
    """Where the top-level keys behind a Chrome trace's events begin, and these. Raises OSError and ValueError."""
    start = max(0, trace.seek(0, os.SEEK_END) - TAIL_BYTES)
    trace.seek(start)
    tail = trace.read()
    at = tail.rindex(b'"traceName"')
    return start + at, json.loads(b"{" + tail[at:])
