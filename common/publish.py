"""Files that appear whole or not at all, and all of them or none."""

import contextlib
import json
import os
import secrets
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from tracereader.command import BadInput

# A trace's last keys lie within its last bytes: the longest is a path.
TAIL_BYTES = 64 * 1024


def require_writable(folder: Path) -> None:
    """Raise BadInput where no file can be made in the folder, which is made if it is not there."""
    with _refused(folder):
        folder.mkdir(parents=True, exist_ok=True)
    if not os.access(folder, os.W_OK | os.X_OK):
        raise BadInput(f"cannot write to {folder}: no permission")


@contextlib.contextmanager
def published(folder: Path, *names: str) -> Iterator[list[Path]]:
    """Paths to write to; at the end they become the files of these names, all of them or none.

    On an error, Ctrl-C, SIGTERM or SIGHUP the folder is left as it was. Raises BadInput.
    """
    scratch = folder / f".unfinished-{secrets.token_hex(8)}"  # in the same folder: a rename there is atomic
    with _refused(folder), _signals_go_to(_end):
        try:
            scratch.mkdir()
            files = [scratch / name for name in names]
            yield files
            for file in files:
                with file.open("rb") as written:
                    os.fsync(written.fileno())
            came = []
            with _signals_go_to(lambda number, frame: came.append(number)):
                _replace_all(files, folder)
            for number in came:
                signal.raise_signal(number)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)


def _replace_all(files: list[Path], folder: Path) -> None:
    done = []
    try:
        for file in files:
            target, before = folder / file.name, file.with_name(f"{file.name}.before")
            if target.exists():
                _keep(target, before)
            os.replace(file, target)
            done.append((target, before))
    except OSError:
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


@contextlib.contextmanager
def _signals_go_to(handler: Callable) -> Iterator[None]:
    """Let `handler` take the signals that would end the process; those that are ignored stay ignored."""
    before = {}
    if threading.current_thread() is threading.main_thread():  # no other may set handlers, or gets signals
        for name in ("SIGINT", "SIGTERM", "SIGHUP"):
            number = getattr(signal, name, None)
            if number and signal.getsignal(number) not in (signal.SIG_IGN, None):
                before[number] = signal.signal(number, handler)
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


def _end(number: int, frame: object) -> None:
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    raise SystemExit(128 + number)


def finish_trace(file: Path, **more: object) -> None:
    """Add top-level keys to a Chrome trace, and make its traceName a name instead of a path of this machine.

    Only the end is read and written: a trace can be large. Raises BadInput for a file that is not whole.
    """
    with contextlib.suppress(OSError, ValueError), file.open("r+b") as trace:
        start = max(0, trace.seek(0, os.SEEK_END) - TAIL_BYTES)
        trace.seek(start)
        tail = trace.read()
        at = tail.rindex(b'"traceName"')
        last_keys = json.loads(b"{" + tail[at:]) | {"traceName": file.name} | more
        trace.seek(start + at)
        trace.truncate()
        trace.write(json.dumps(last_keys).encode()[1:])
        trace.flush()
        return
    raise BadInput("the trace could not be written whole: is the disk full?")
