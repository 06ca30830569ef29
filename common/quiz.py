"""--guess: the reader's own guesses, asked before the run and marked after it."""

import difflib
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from common import kernel_names, reading, screen
from common.cli import BadInput
from common.trace import Trace

REGIMES = ("overhead-bound", "compute-bound", "in between")


@dataclass(frozen=True)
class Question:
    """given: the reader's answer. mark: right or not, and what the trace says."""

    text: str
    mark_with: Callable[[str, Trace], tuple[bool, str]]
    given: str = ""

    def mark(self, trace: Trace) -> tuple[bool, str]:
        return self.mark_with(self.given, trace)


def ask(args, device) -> list[Question]:
    """The questions with the reader's answers; none without --guess. Raises BadInput."""
    if not args.guess:
        return []
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise BadInput("--guess asks you questions, and this is no terminal: leave it out, or run it by hand")
    asked = CPU_QUESTIONS if device.type == "cpu" else GPU_QUESTIONS
    try:
        return [Question(one.text, one.mark_with, screen.ask(one.text)) for one in asked]
    except EOFError:
        raise BadInput("--guess: the answers ended before the questions") from None


def _kernels(given: str, trace: Trace) -> tuple[bool, str]:
    count = reading.count_per_step(trace, "kernel")
    return given == str(count), str(count)


def _busiest(given: str, times: Counter) -> tuple[bool, str]:
    name, us = max(times.items(), key=lambda item: item[1], default=("nothing", 0.0))
    plain = name.removeprefix("aten::").lower()
    typed = given.removeprefix("aten::").lower()
    return bool(typed) and difflib.SequenceMatcher(None, typed, plain).ratio() > 0.8, f"{name}, {us:,.1f} µs"


def _gpu_op(given: str, trace: Trace) -> tuple[bool, str]:
    times = Counter()
    for row in reading.work_rows(trace):
        times[kernel_names.short(row.asked_by)] += row.us
    return _busiest(given, times)


def _cpu_op(given: str, trace: Trace) -> tuple[bool, str]:
    times = Counter()
    for op in reading.typical(trace).walk():
        if op.kind == "op":
            times[op.name] += reading.self_us(op)
    return _busiest(given, times)


def _regime(given: str, trace: Trace) -> tuple[bool, str]:
    name = reading.regime(trace).name
    return bool(given) and name.startswith(given.lower()), name


GPU_QUESTIONS = (
    Question("How many kernels will one step launch?", _kernels),
    Question("Which op takes the most GPU time (mm, add, gelu, …)?", _gpu_op),
    Question(f"Which regime: {', '.join(REGIMES)}?", _regime),
)
CPU_QUESTIONS = (Question("Which op takes the most CPU time of its own (mm, add, gelu, …)?", _cpu_op),)
