"""The cost of recording: a recorded step takes longer than the same step without the profiler."""

from tracereader.figures import Summary
from tracereader.figures.regime import MUCH_IDLE
from tracereader.findings.finding import duration
from tracereader.findings.ops import with_cpu_tensors
from tracereader.findings.steps import WORDS

# The time that the profiler adds to an overhead-bound step for each op and runtime call (µs), and the largest ratio of
# the recorded step to the step without the profiler. On an H200's machine, 28 overhead-bound steps of more than 50 such
# calls (traces/reference/nvidia-h200/changes) showed 1.83 to 7.84 µs, and 1.2 to 3.4 times. 11 others, recorded later
# on an H100's machine, showed 1.09 to 7.04 µs. Runtime calls that launch nothing can be much shorter than that, and a
# recurrent network of cuDNN makes three of them for each launch (its step took 10 to 25 ms longer, with 31,000 calls in
# all). The least cost is therefore that of ops and launches only.
EACH_CALL_US = (1.0, 7.9)
MOST_TIMES = 3.5
SLOWED = 1.5  # a step on the CPU that takes this many times as long while it is recorded is much slower
COMPUTES_MUCH = 0.25  # the share of a step on the CPU from which on it computes much with CPU tensors itself
# Recording matters to a step that is not overhead-bound from these shares of its time on: what recording adds on the
# CPU, and the GPU's wait for launches.
SOME_IDLE = 0.03
# What takes this share of a step limits it. Of 25 programs on an H200, the CPU needed up to 69%, or 94% and more.
NEEDS_ALL = 0.9
CPU_ERROR = 0.2  # the share that is allowed for the CPU times of two processes, which differ by up to 30%
IDLE_LESS = "Without the profiler, launches are faster and the GPU is probably idle for less time."


def estimate_us(summary: Summary) -> tuple[float, float]:
    """Return the estimated range (µs) of the step without the profiler, from the cost of recording a call.

    CUPTI records each activity of a CUDA graph, which makes the graph's launch call longer. The trace does not show by
    how much, so the shortest step is the one without these calls. If much of the step is work on CPU tensors, the
    longest step is the recorded one: the time of this work varies by more than recording costs.
    """
    recorded, busy = summary.recorded_step_us, summary.gpu_us
    launching = sum(one.total_us for name, one in summary.cpu.runtime.items() if "GraphLaunch" in name)
    least, most = _costs_us(summary)
    return max(busy, recorded - most - launching, recorded / MOST_TIMES), max(busy, recorded - least)


def _costs_us(summary: Summary) -> tuple[float, float]:
    """Return the least and the most CPU time (µs) that recording adds to a step."""
    on_cpu = sum(one.self_us for one in with_cpu_tensors(summary).values())
    least = 0.0 if on_cpu > COMPUTES_MUCH * summary.chosen.cpu_us else EACH_CALL_US[0] * summary.cpu.ops_and_launches
    return least, EACH_CALL_US[1] * summary.cpu.recorded_calls


def is_idle_less(summary: Summary) -> bool:
    """Return whether recording makes the GPU wait for launches in a step that is limited by the GPU's work.

    False where the run measured the step without the profiler, and for CUDA graphs: the trace does not show by how much
    recording makes their launches longer.
    """
    return may_lengthen(summary) and summary.steady.idle_not_launched_us >= SOME_IDLE * summary.steady_us > 0


def may_lengthen(summary: Summary) -> bool:
    """Return whether recording can lengthen the CPU's time of a step that is limited by the GPU's work.

    False if the run measured the step without the profiler, and if the calls are so few that recording costs little.
    """
    if summary.waits_for not in ("compute", "memory", "gpu") or summary.unprofiled_step_us is not None:
        return False
    adds = _costs_us(summary)[1] >= SOME_IDLE * summary.recorded_step_us
    return summary.steady is not None and adds and not summary.launches_graphs


def recording_matters(summary: Summary) -> bool:
    """Return whether recording may lengthen a step that is limited by the GPU's work.

    The GPU waits for launches, or the CPU takes longer for a step than the GPU, which is busy with earlier steps.
    """
    steps = len(summary.steady_steps)
    is_longer = steps > 0 and summary.recorded_step_us >= (1 + SOME_IDLE) * summary.steady_us / steps
    return is_idle_less(summary) or (is_longer and may_lengthen(summary))


def cpu_shares(summary: Summary, cpu_us: float) -> tuple[float, float]:
    """Return the estimated range of the share of a step's CPU time that is needed without the profiler.

    cpu_us: the step's CPU time while it is recorded, without waits for the GPU. If the run measured the CPU time of a
    step that the GPU limits, the range is CPU_ERROR around it.
    """
    if limit_without(summary) == "gpu":
        return tuple(summary.unprofiled_cpu_us / cpu_us * (1 + error) for error in (-CPU_ERROR, CPU_ERROR))
    least, most = _costs_us(summary)
    return max(1 / MOST_TIMES, 1 - most / cpu_us), max(1 / MOST_TIMES, 1 - least / cpu_us)


def unprofiled(summary: Summary) -> str:
    """Return a sentence on the step without the profiler, if recording makes it longer.

    For a step that is overhead-bound while it is recorded it says which regime that step has. A measured time is used
    if the run stored one. An estimate is given only if it could change the regime. Otherwise the text is "".
    """
    if is_idle_less(summary):
        return IDLE_LESS
    if lost := unexplained_us(summary):
        times = summary.recorded_step_us / summary.unprofiled_step_us
        far = "so shares of the recorded step may be far off"
        if lost < 0:
            timed = "The timed steps may have been colder, or have waited for data"
            return f"Without the profiler a step took {1 / times:.1f} times as long. {timed}, {far}."
        without = " A recording without shapes may be closer." * summary.source.shapes_recorded
        longer = f"Recording makes the step {times:.1f} times as long, which the profiler's own work does not explain"
        return f"{longer}, {far}.{without}"
    if summary.waits_for != "overhead":
        return ""
    busy, known = summary.gpu_us, summary.unprofiled_step_us
    if known is not None:
        return measured(busy, known, limit_without(summary), summary.unprofiled_cpu_us)
    low, high = estimate_us(summary)
    if _much_idle(busy, low):
        return ""  # the regime is the same then
    may = "it is probably GPU-bound then" if is_gpu_bound(summary) else "it may be GPU-bound then"
    estimate = f"an estimated {_range(low, high)}, of which the GPU is busy {duration(busy)}"
    return f"Recording makes such a step longer. Without the profiler it takes {estimate}: {may}."


def unexplained_us(summary: Summary) -> float:
    """Return how much longer (µs) recording made a step on the CPU, if the cost of recorded calls does not explain it.

    It may lie in any op. A profiler that records shapes keeps a small part of each tensor, which can keep glibc from
    using a freed tensor's memory again: each large tensor then has new memory, and takes four times as long to fill. It
    is negative if the recorded step is far shorter, with a GPU as well: the profiler makes no step shorter.
    """
    known, recorded = summary.unprofiled_step_us, summary.recorded_step_us
    if known is None or SLOWED * recorded > known > recorded / SLOWED:
        return 0.0
    longer = recorded - known
    return longer if longer < 0 or (longer > _costs_us(summary)[1] and not summary.gpu_us) else 0.0


def limit_without(summary: Summary) -> str | None:
    """Return what is measured to limit the step without the profiler, "gpu" or "overhead"; None if that is not known.

    The CPU's time includes its waits for the GPU, so it decides nothing in a step with synchronizations.
    """
    if not summary.unprofiled_step_us or summary.unprofiled_cpu_us is None:
        return None
    most = NEEDS_ALL * summary.unprofiled_step_us
    on_cpu, on_gpu = summary.unprofiled_cpu_us >= most, summary.gpu_us >= most
    undecided = on_cpu == on_gpu or (on_cpu and summary.training.syncs)
    return None if undecided else "overhead" if on_cpu else "gpu"


def measured(busy_us: float, step_us: float, limit: str | None = None, cpu_us: float | None = None) -> str:
    """Return a sentence on the measured step without the profiler. busy_us, cpu_us: the GPU's and the CPU's time in it.

    limit: see limit_without(). If it is None, the GPU's time alone decides the word.
    """
    word = f"still {WORDS['overhead']}" if _much_idle(busy_us, step_us, limit) else WORDS["gpu"]
    needs = f" and the CPU needs {'nearly all' if limit == 'overhead' else duration(cpu_us)}" if limit else ""
    busy = f"{duration(busy_us)} ({busy_us / step_us:.0%}){needs}"
    return f"Without the profiler the step takes {duration(step_us)}, of which the GPU is busy {busy}: {word}."


def _range(low_us: float, high_us: float) -> str:
    """Return a range of times with one unit, or with two if the units differ."""
    low, high = duration(low_us), duration(high_us)
    if low == high:
        return low
    return f"{low.rpartition(' ')[0] if low.rpartition(' ')[2] == high.rpartition(' ')[2] else low} to {high}"


def changes_the_regime(summary: Summary) -> bool:
    """Return whether a step is overhead-bound while it is recorded and is known not to be without the profiler."""
    known, busy = summary.unprofiled_step_us, summary.gpu_us
    return summary.waits_for == "overhead" and bool(known) and not _much_idle(busy, known, limit_without(summary))


def is_gpu_bound(summary: Summary) -> bool:
    """Return whether launches do not limit the step without the profiler, if it is as long as the estimate allows."""
    return summary.waits_for != "overhead" or not _much_idle(summary.gpu_us, estimate_us(summary)[1])


def _much_idle(busy_us: float, step_us: float, limit: str | None = None) -> bool:
    return limit == "overhead" if limit else busy_us < (1 - MUCH_IDLE) * step_us
