"""Ctrl-C, SIGTERM and SIGHUP end a program at any moment with one line on stderr and the status 130, 143 or 129.

A program of this project imports this first. From then on a signal ends it in the handler itself. An exception would
have to pass through the code that is running, and imports, the profiler and torch's C++ code do not all let it pass.
The handler first undoes what would be left behind.
"""

import _thread
import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import NoReturn

NAMES = ("SIGINT", "SIGTERM", "SIGHUP")  # a system may lack some
STATUSES = {number: 128 + number for name in NAMES if (number := getattr(signal, name, None)) is not None}
COMMANDS = ("read-trace", "record-trace", "try-changes")
_HERE = os.path.dirname(os.path.realpath(__file__))
# The functions that undo things before the program ends; the newest is called first.
_undo: list[Callable[[], None]] = []
# The thread that ends the program acquires this and never releases it.
_ending = threading.RLock()


class Ended(SystemExit):
    """Raised by SIGTERM or SIGHUP inside raised(), so that `finally` blocks clean up."""

    def __init__(self, number: int):
        super().__init__(128 + number)
        self.number = number


def program_name() -> str:
    return os.path.basename(sys.argv[0]).replace("__main__.py", "read-trace")  # python -m tracereader


def said_of(number: int) -> str:
    said = "interrupted" if number == signal.SIGINT else f"ended by {signal.Signals(number).name}"
    return said if program_name() in COMMANDS else f"{said}; files are written atomically"


def answer() -> None:
    """Take charge of the signals, and of streams that are closed, where one of this project's programs runs.

    Does nothing in another program that imports the reader, because its signals are its own.
    """
    if not _is_ours() or threading.current_thread() is not threading.main_thread():
        return
    for number in STATUSES:
        # A signal that is ignored stays ignored, as under nohup.
        if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
            signal.signal(number, _end)
    for stream in (0, 1, 2):  # or the next opened file would get this number and receive what is printed
        try:
            os.fstat(stream)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115  to the end


def _is_ours() -> bool:
    if not os.path.isfile(sys.argv[0]):  # python -c, or a prompt
        return False
    folder, name = os.path.split(os.path.realpath(sys.argv[0]))
    # A command of the package; python -m tracereader; a script.
    return name in COMMANDS or folder in (_HERE, os.path.dirname(_HERE))


def _end(number: int, frame: object) -> None:
    for every in STATUSES:  # a second one ends this at once
        signal.signal(every, signal.SIG_DFL)
    _put_right()
    with contextlib.suppress(Exception):
        sys.stdout.flush()
    end(said_of(number), STATUSES[number])


def end(said: str, status: int) -> NoReturn:
    """End the program with this line at once, from any thread."""
    _ending.acquire()
    _put_right()
    with contextlib.suppress(OSError):
        os.write(2, f"{program_name()}: {said}\n".encode())
    os._exit(status)


def _put_right() -> None:
    while _undo:
        with contextlib.suppress(Exception):
            _undo.pop()()


def all_is_done() -> None:
    """From here on the exit status is final. A signal during Python's own exit does not change it."""
    for number in STATUSES:
        if signal.getsignal(number) is _end:
            signal.signal(number, signal.SIG_IGN)


@contextlib.contextmanager
def undone_by(undo: Callable[[], None]) -> Iterator[None]:
    """Call `undo` before a signal or end() ends the program inside this context."""
    _undo.append(undo)
    try:
        yield
    finally:
        if undo in _undo:
            _undo.remove(undo)


def not_ending() -> contextlib.AbstractContextManager:
    """Make end() in another thread wait for this context. Once end() has begun, the context is not entered."""
    return _ending


@contextlib.contextmanager
def raised() -> Iterator[None]:
    """Make signals raise KeyboardInterrupt or Ended inside this context.

    Python drops an exception from a finalizer, a callback of the garbage collector or a hook of os.fork(). The signal
    is sent again then.
    """
    before, dropped = sys.unraisablehook, []

    def again(lost) -> None:
        if isinstance(lost.exc_value, (KeyboardInterrupt, Ended)):
            dropped.append(getattr(lost.exc_value, "number", signal.SIGINT))
            # Not a threading.Thread, because the code that was interrupted may hold the lock that starting one takes.
            _thread.start_new_thread(_send_soon, (dropped,))
        else:
            before(lost)

    with handled_by(_raise):
        if threading.current_thread() is threading.main_thread():
            sys.unraisablehook = again
        try:
            yield
            while dropped:  # it arrives in here
                time.sleep(0.01)
        finally:
            if sys.unraisablehook is again:
                sys.unraisablehook = before


def _send_soon(numbers: list[int]) -> None:
    time.sleep(0.01)
    if hasattr(signal, "pthread_kill"):  # which also ends a wait of the main thread
        signal.pthread_kill(threading.main_thread().ident, numbers[0])
    else:
        signal.raise_signal(numbers[0])
    numbers.pop(0)


@contextlib.contextmanager
def held() -> Iterator[None]:
    """Delay signals until this context ends."""
    came = []
    try:
        with handled_by(lambda number, frame: came.append(number)):
            yield
    finally:
        for number in came:
            signal.raise_signal(number)


def _raise(number: int, frame: object) -> None:
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    raise Ended(number)


@contextlib.contextmanager
def handled_by(handler: Callable, numbers: Iterable[int] = STATUSES) -> Iterator[None]:
    """Answer these signals with a handler inside this context. One that is ignored stays ignored."""
    before = {}
    if threading.current_thread() is threading.main_thread():  # no other may set handlers, or gets signals
        for number in numbers:
            if signal.getsignal(number) not in (signal.SIG_IGN, None):
                before[number] = signal.signal(number, handler)
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


answer()
