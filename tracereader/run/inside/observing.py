"""Writes what the ops of some steps read and make into a file, by the observer that torch has for it."""

import contextlib
import os
import sys

STEP = "## step ##"  # the mark before each step
STEPS = 2  # the second one shows what the first one has computed already


class Observer:
    """Observes steps from its creation on. begin_step() marks where each of them begins; end() writes the file."""

    def __init__(self, torch, path):
        self.profiler = torch.profiler
        with _silent():
            self.observer = torch.profiler.ExecutionTraceObserver().register_callback(path)
            self.observer.start()
        self.begin_step()

    @staticmethod
    def is_known(torch):
        return hasattr(torch.profiler, "ExecutionTraceObserver")

    def begin_step(self):
        with self.profiler.record_function(STEP):
            pass

    def end(self):
        with _silent(), contextlib.suppress(Exception):
            self.observer.stop()
            self.observer.unregister_callback()


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
