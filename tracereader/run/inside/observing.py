"""Writes what the ops of some steps read and make into a file, by the observer that torch has for it."""

import contextlib
import os
import sys
import types

STEP = "## step ##"  # the mark before each step
NUMBERS = "## numbers "  # the mark around a function of torch, with the numbers that Python gives it
# The first one is without a mode, with which torch may call other ops. A later one shows what one before has computed.
STEPS = 3


class Observer:
    """Observes steps from its creation on. begin_step() marks where each of them begins; end() writes the file.

    notes_numbers: from the second step on. torch.compile would compile a program again for that.
    """

    def __init__(self, torch, path, notes_numbers=True):
        self.notes_numbers = notes_numbers
        self.profiler, self.numbers = torch.profiler, _noting_numbers(torch)
        with _silent():
            self.observer = torch.profiler.ExecutionTraceObserver().register_callback(path)
            self.observer.start()
        self._mark()

    @staticmethod
    def is_known(torch):
        return hasattr(torch.profiler, "ExecutionTraceObserver")

    def begin_step(self):
        if self.numbers.ended and self.notes_numbers:
            self.numbers.begin()
        self._mark()

    def _mark(self):
        with self.profiler.record_function(STEP):
            pass

    def end(self):
        with contextlib.suppress(Exception):
            self.numbers.end()
        with _silent(), contextlib.suppress(Exception):
            self.observer.stop()
            self.observer.unregister_callback()


def _noting_numbers(torch):
    """Return a mode that marks each function of torch to which Python gives numbers beside tensors.

    Its op gets such a number as a tensor on the CPU, and the observer does not record what it contains. A function that
    is written in Python may have numbers of its own, so only methods of tensors are marked among these, as of 1 - x.
    """
    numbers = (bool, int, float, complex)
    known = (torch.Tensor, torch.dtype, str, type(None), *numbers)

    class Numbers(torch.overrides.TorchFunctionMode):
        ended = True

        def __torch_function__(self, function, _, args=(), kwargs=None):
            kwargs = kwargs or {}
            given = [*args, *kwargs.values()]
            in_python = isinstance(function, types.FunctionType) and function.__module__ != "torch._tensor"
            if self.ended or in_python or not all(isinstance(one, known) for one in given):
                return function(*args, **kwargs)
            tensors = [one for one in given if isinstance(one, torch.Tensor)]
            of_python = [one for one in given if isinstance(one, numbers)]
            if not tensors or not of_python or any(not one.dim() and one.device.type == "cpu" for one in tensors):
                return function(*args, **kwargs)
            with torch.profiler.record_function(f"{NUMBERS}{of_python}"):
                return function(*args, **kwargs)

        def begin(self):
            self.ended = False
            self.__enter__()

        def end(self):
            """Leave the mode, unless the program has entered another one since then."""
            self.ended = True
            if torch.overrides._get_current_function_mode() is self:
                self.__exit__(None, None, None)

    return Numbers()


@contextlib.contextmanager
def _silent():
    """Keep what C++ writes to stderr, such as that an observer starts, out of the program's output."""
    sys.stderr.flush()
    kept = os.dup(2)
    try:
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
