"""What recording costs: a recorded step takes longer than the same step without the profiler."""

from tracereader.figures import Summary
from tracereader.figures.regime import MUCH_IDLE
from tracereader.findings.finding import duration
from tracereader.findings.steps import WORDS

# What the profiler adds to an overhead-bound step for each op and runtime call of it (µs), and how many times as long
# the step takes: 28 overhead-bound steps of more than 50 such calls, measured on an H200's machine with and without
# the profiler (traces/reference/nvidia-h200/changes). There 1.83 to 7.84 µs, and 1.2 to 3.4 times.
EACH_CALL_US = (1.8, 7.9)
MOST_TIMES = 3.5


def estimate_us(summary: Summary) -> tuple[float, float]:
    """From how much to how much the step takes without the profiler (µs), by what recording a call costs."""
    recorded, busy = summary.recorded_step_us, summary.gpu_us
    calls = sum(one.calls for one in (*summary.cpu.ops.values(), *summary.cpu.runtime.values()))
    least, most = (cost * calls for cost in EACH_CALL_US)
    return max(busy, recorded - most, recorded / MOST_TIMES), max(busy, recorded - least)


def unprofiled(summary: Summary) -> str:
    """What a step that is overhead-bound while it is recorded is without the profiler, as far as that is known.

    An estimate only where it could change the regime; "" where there is nothing to say.
    """
    if summary.waits_for != "overhead":
        return ""
    busy, known = summary.gpu_us, summary.unprofiled_step_us
    if known is not None:
        found = WORDS["overhead" if _much_idle(busy, known) else "gpu"]
        too = "still " if found == WORDS["overhead"] else ""
        without = f"Without the profiler the step takes {duration(known)}, of which the GPU is busy {duration(busy)}"
        return f"{without}: {too}{found}."
    low, high = estimate_us(summary)
    if _much_idle(busy, low):
        return ""
    may = "it may be GPU-bound then" if _much_idle(busy, high) else "it is probably GPU-bound then"
    took = _range(low, high)
    return (
        f"Recording makes such a step longer. Without the profiler it takes an estimated {took}, of which the GPU is "
        f"busy {duration(busy)}: {may}."
    )


def _range(low_us: float, high_us: float) -> str:
    """Both times with the unit that they share, or each with its own."""
    low, high = duration(low_us), duration(high_us)
    if low == high:
        return low
    return f"{low.rpartition(' ')[0] if low.rpartition(' ')[2] == high.rpartition(' ')[2] else low} to {high}"


def changes_the_regime(summary: Summary) -> bool:
    """Whether a step that is overhead-bound while it is recorded is known not to be so without the profiler."""
    known = summary.unprofiled_step_us
    return summary.waits_for == "overhead" and known is not None and not _much_idle(summary.gpu_us, known)


def _much_idle(busy_us: float, step_us: float) -> bool:
    return busy_us < (1 - MUCH_IDLE) * step_us
