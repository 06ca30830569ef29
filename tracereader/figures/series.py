"""The variation of the same GPU activity's time over the steps."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from statistics import fmean, median

import msgspec

from tracereader.figures.gpu_work import numbered
from tracereader.figures.steps import self_us
from tracereader.trace import Step, Trace
from tracereader.trace.grouped import totals


class Series(msgspec.Struct, frozen=True):
    """us: the time in each step that has the activity, in order. steps: the names of these steps.

    nth: the number among the activities of this name in a step. other_calls: how many steps, which are excluded, call
    an op more or less often. ramp: the last quarter's median over the first's; None with fewer than eight steps.
    """

    name: str
    nth: int
    on_gpu: bool
    us: list[float]
    steps: list[str]
    other_calls: int
    median_us: float
    mean_us: float
    ramp: float | None


def series(trace: Trace, step: Step, left_out: Sequence[str] = ()) -> tuple[Series, ...]:
    """Return the series of every GPU activity of the step, the costliest first; of ops' self time in a run on the CPU.

    left_out: steps that are left out for ops, because cold-start cost changes ops and not kernels. An op's time
    includes all its calls, and only steps with as many calls as `step` count.
    """
    times: dict[tuple[str, int], dict[str, float]] = defaultdict(dict)
    others = Counter()
    usual = Counter(op.name for op in step.walk() if op.kind == "op")
    on_gpu = any(one.work for one in trace.steps)
    for one in trace.steps:
        if on_gpu:
            for key, work in numbered(one.work):
                times[key][one.name] = work.us
        elif one.name not in left_out:
            ops = [op for op in one.walk() if op.kind == "op"]
            calls = Counter(op.name for op in ops)
            for name, us in totals((op.name, self_us(op)) for op in ops).items():
                if calls[name] == usual[name]:
                    times[name, 0][one.name] = us
                else:
                    others[name] += 1
    found = [_series(name, nth, on_gpu, some, others[name]) for (name, nth), some in times.items() if step.name in some]
    return tuple(sorted(found, key=lambda one: -one.median_us))


def _series(name: str, nth: int, on_gpu: bool, times: dict[str, float], other_calls: int) -> Series:
    us = list(times.values())
    quarter = len(us) // 4
    first, last = median(us[:quarter] or [0.0]), median(us[-quarter:] or [0.0])
    ramp = last / first if len(us) >= 8 and first else None
    return Series(name, nth, on_gpu, us, list(times), other_calls, median(us), fmean(us), ramp)
