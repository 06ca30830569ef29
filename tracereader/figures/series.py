"""How the time of the same GPU activity varies over the steps."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from statistics import fmean, median

import msgspec

from tracereader.figures.gpu_work import numbered
from tracereader.figures.steps import self_us
from tracereader.trace import Step, Trace


class Series(msgspec.Struct, frozen=True):
    """us: its time in each step that has it, in order; steps: their names. nth: among those of its name in a step.

    other_calls: of an op, so many steps call it another number of times, and are not among them.

    ramp: the median of the last quarter over that of the first; None with fewer than eight steps.
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

    @property
    def slowest(self) -> str:
        """The step in which it took longest."""
        return self.steps[self.us.index(max(self.us))]


def series(trace: Trace, step: Step, left_out: Sequence[str] = ()) -> tuple[Series, ...]:
    """Of every GPU activity of the step, the costliest first; of a run on the CPU, of its ops' self time by name.

    left_out: steps that are left out for ops: a kernel does in them what it always does, an op does not. An
    op's time is that of all its calls: only of steps that make as many as `step`.
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
            own, calls = Counter(), Counter()
            for op in one.walk():
                if op.kind == "op":
                    own[op.name] += self_us(op)
                    calls[op.name] += 1
            for name, us in own.items():
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
    return Series(
        name=name,
        nth=nth,
        on_gpu=on_gpu,
        us=us,
        steps=list(times),
        other_calls=other_calls,
        median_us=median(us),
        mean_us=fmean(us),
        ramp=last / first if len(us) >= 8 and first else None,
    )
