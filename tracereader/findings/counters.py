"""Findings about sampled counters: memory traffic compared with the shapes, and clocks that explain slow steps."""

from statistics import median

from tracereader.figures import Summary
from tracereader.figures.counters import KernelCounters, StepCounters
from tracereader.findings.finding import GPU, Verdict, counted, duration, finding
from tracereader.trace import STEP
from tracereader.trace.kernel_names import short

# The factor from which a difference between the sampled DRAM throughput and that of the shapes is reported. It was not
# measured on a GPU. It allows for a data sheet's peak that differs from the peak that CUPTI divides by.
DISAGREES = 1.25
# If both figures are below this share of the peak, they are too small to compare.
LEAST = 0.05
# On an H200 the same kernels vary by 9% between steps, and a clock that is not limited varies by 1 or 2%. The latter
# was not measured with these counters.
SLOWER, CLOCK_FELL = 1.1, 0.97


def disagreement(one: KernelCounters) -> float | None:
    """Return the sampled DRAM throughput divided by that of the shapes; None if they are close or not known."""
    if one.dram is None or one.dram_by_shapes is None or max(one.dram, one.dram_by_shapes) < LEAST:
        return None
    times = one.dram / one.dram_by_shapes
    return times if times > DISAGREES or times < 1 / DISAGREES else None


def compared(one: KernelCounters) -> str:
    """Return the sampled throughput and the one that the shapes need, with the reason for the difference."""
    more = one.dram > one.dram_by_shapes
    repeated = "bytes move more than once, or other bytes move, too"
    why = repeated if more else "a cache served the rest, or the rest was not used"
    return (
        f"sampled DRAM throughput is {one.dram:.0%} of the peak, and its inputs and outputs, once each, need "
        f"{one.dram_by_shapes:.0%}: {why}"
    )


@finding(GPU, "sampled DRAM throughput that differs from what shapes need", needs_gpu=True)
def dram_disagrees(summary: Summary) -> Verdict:
    """Less than the shapes need: data came from the L2 cache, or was not used. More: the kernel reads inputs again,
    spills registers, or works on more data than its op shows."""
    if summary.counters is None:
        return Verdict(None, "no sampled counters")
    found = [one for one in summary.counters.kernels if disagreement(one) is not None]
    if not found:
        return Verdict(False, "no long kernel whose sampled throughput differs from what its shapes need")
    longest = max(found, key=lambda one: one.us)
    others = f"; so do {counted(len(found) - 1, 'more kernel')}" if len(found) > 1 else ""
    return Verdict(True, f"{short(longest.name, 60)}: {compared(longest)}{others}")


def slower_at_a_lower_clock(summary: Summary) -> tuple[StepCounters, StepCounters] | None:
    """Return the steps with the median and the longest GPU time if the second one is slower at a lower SM clock.

    Both have the same work. None without such steps.
    """
    if summary.counters is None or (name := summary.counters.names.get("sm_mhz")) is None:
        return None
    steps = [one for one in summary.counters.steps if one.means[name] is not None]
    usual_count = median([one.activities for one in steps] or [0])
    alike = sorted((one for one in steps if one.activities == usual_count), key=lambda one: one.gpu_busy_us)
    if len(alike) < 2:
        return None
    middle, slowest = alike[(len(alike) - 1) // 2], alike[-1]
    slower = slowest.gpu_busy_us > SLOWER * middle.gpu_busy_us
    fell = slowest.means[name] < CLOCK_FELL * middle.means[name]
    return (middle, slowest) if slower and fell else None


@finding(GPU, "a step's GPU time rose while the SM clock fell", needs_gpu=True)
def clock_fell(summary: Summary) -> Verdict:
    """The same kernels take longer at a lower clock. A GPU lowers its clock at its limit of power or of temperature.
    Compare runs at the same clock."""
    if summary.counters is None or "sm_mhz" not in summary.counters.names:
        return Verdict(None, "no sampled SM clock")
    found = slower_at_a_lower_clock(summary)
    if found is None:
        return Verdict(False, "no step whose GPU time rose while the SM clock fell")
    middle, slowest = found
    clock = summary.counters.names["sm_mhz"]
    evidence = (
        f"{_number(slowest)}'s GPU busy time is {duration(slowest.gpu_busy_us)} at {slowest.means[clock]:,.0f} MHz, "
        f"{_number(middle)}'s {duration(middle.gpu_busy_us)} at {middle.means[clock]:,.0f} MHz"
    )
    power = summary.counters.names.get("power_w")
    drawn = [one.means[power] for one in (slowest, middle)] if power else [None]
    if None not in drawn:
        evidence += f"; power {drawn[0]:,.0f} W and {drawn[1]:,.0f} W"
    return Verdict(True, evidence)


def _number(step: StepCounters) -> str:
    return step.name.removeprefix(STEP[:-1])
