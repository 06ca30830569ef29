"""Notes which nn.Module runs when, while the profiler records, and writes that into the trace.

The notes become the slices that the profiler writes with stacks ("nn.Module: Linear_3"). They are no annotations:
they add no event to the profiler's recording and nothing to the GPU's tracks, and cost less than any of its own.
"""

import json
import re
import threading
import time

SLACK_NS = 100_000  # between our clock and the trace's, which is the same clock
FIELDS = 5  # of a note
TAIL = 4096  # bytes at the end of a trace, for what follows its events
MARK = re.compile(
    rb'"cat":\s*"user_annotation",\s*"name":\s*"ProfilerStep#\d+",\s*"pid":\s*(\d+),\s*"tid":\s*(\d+),\s*'
    rb'"ts":\s*(\d+)(?:\.(\d{1,3}))?'
)
BASE = re.compile(rb'"baseTimeNanoseconds":\s*(\d+)')
EVENTS = re.compile(rb'"traceEvents":\s*\[')


class Notes:
    """Notes the calls of modules from start() to stop(). step_began() tells it about the profiler's marks."""

    def __init__(self, torch, is_compiling, patched):
        self.torch, self.is_compiling, self.patched = torch, is_compiling, patched
        self.undo = None
        self.calls = []  # class, id, beginning and end in ns, thread; one after another, so that there is no garbage
        self.marks = []  # the profiler's last marks of a step: the ns between which each began, and the thread

    def start(self):
        """Note each call of Module.__call__ from now on, and return what does that in its place."""
        kind = self.torch.nn.Module
        call, note, is_compiling = kind.__call__, self.calls.extend, self.is_compiling
        now, thread = time.time_ns, threading.get_native_id

        def __call__(module, *args, **kwargs):
            if is_compiling():  # the compiled code must not hold the notes
                return call(module, *args, **kwargs)
            compiled = _is_compiled(module)
            if compiled:  # its code may hold for the usual __call__ only, and calls no module that could be noted
                kind.__call__ = call
            began = now()
            try:
                return call(module, *args, **kwargs)
            finally:
                note((type(module), id(module), began, now(), thread()))
                if compiled and self.undo is not None and kind.__call__ is call:
                    kind.__call__ = __call__

        __call__.__wrapped__ = call
        self.undo = self.patched(kind, "__call__", __call__)
        return __call__

    def stop(self):
        if self.undo is not None:
            self.undo()
            self.undo = None

    def clear(self):
        """Forget the calls so far: the profiler did not record them."""
        self.calls.clear()
        self.marks.clear()

    def step_began(self, after_ns):
        """Take note that the profiler has marked the beginning of a step between this time and now."""
        self.marks.append((after_ns, time.time_ns(), threading.get_native_id()))

    def insertion(self, trace):
        """Return where the slices belong in the bytes of a trace, and their JSON; None if its clock is not ours."""
        events = EVENTS.search(trace)
        mark = events and MARK.search(trace, events.end())
        if not mark:
            return None
        # torch 2.4 has it behind the events, later ones before them. torch before 2.4 writes µs since 1970.
        base = BASE.search(trace, 0, events.start()) or BASE.search(trace, max(events.end(), len(trace) - TAIL))
        zero = int(base[1]) if base else 0
        began = int(mark[3]) * 1000 + int((mark[4] or b"").ljust(3, b"0")) + zero
        if not any(
            low - SLACK_NS <= began <= high + SLACK_NS and thread == int(mark[2]) for low, high, thread in self.marks
        ):
            return None
        return events.end(), self._slices(int(mark[1]), zero)

    def _slices(self, process, zero):
        numbers, slices, first = {}, [], self.marks[0][0]
        calls = zip(*[iter(self.calls)] * FIELDS, strict=True)
        for kind, identity, began, ended, thread in sorted(calls, key=lambda one: one[2]):
            if ended < first:
                continue
            of_kind = numbers.setdefault(kind.__name__, {})
            number = of_kind.setdefault(identity, len(of_kind))
            name = json.dumps(f"nn.Module: {kind.__name__}_{number}")
            slices.append(
                f'{{"ph": "X", "cat": "python_function", "name": {name}, "pid": {process}, "tid": {thread}, '
                f'"ts": {_us(began - zero)}, "dur": {_us(ended - began)}, "args": {{"Python module id": {number}}}}},\n'
            )
        return "".join(slices).encode()


def _is_compiled(module):
    """Return whether torch.compile made this module, or its call."""
    own = module.__dict__
    return own.get("_compiled_call_impl") is not None or "_orig_mod" in own.get("_modules", ())


def _us(ns):
    return f"{ns // 1000}.{ns % 1000:03d}"
