"""The samples of the GPU while the steps ran: hardware counters, power, clocks and temperature.

torch 2.15 records them (PerformanceMetricsConfig, CuspyConfig.enable_environment_counters). A sample holds until
the next one. A counter counts the whole device, so other programs on the GPU at the same time count, too.
"""

import bisect
import re
from collections.abc import Sequence
from itertools import pairwise
from statistics import fmean, median

import msgspec

from tracereader.figures.gpu_work import GpuWork, numbered
from tracereader.figures.hardware import common_peaks
from tracereader.figures.steps import busy_us, spanned
from tracereader.trace import Samples, Step, Trace, Work
from tracereader.trace.grouped import grouped, totals

# The quantities of counters. torch's newer collector writes the first names, and Kineto writes CUPTI's names.
KINDS = (
    ("sm_active", re.compile(r"SM Active \(%\)|sm__cycles_active\.\w+\.pct_of_peak\w*")),
    ("dram", re.compile(r"(?:DRAM|HBM) BW \(%\)|(?:gpu__dram_throughput|dram__throughput)\.\w+\.pct_of_peak\w*")),
    ("power_w", re.compile(r"Power \(W\)")),
    ("sm_mhz", re.compile(r"SM Clock \(MHz\)")),
    ("memory_mhz", re.compile(r"Memory Clock \(MHz\)")),
)
OF_KERNELS = ("sm_active", "dram")  # those that are also given for single kernels
# This counter is computed from each kernel's duration and the median clock, so it is no measurement.
DERIVED = "Cycles (Current Kernel)"
# A sample holds for at most this many of its counter's usual intervals. After a longer gap, samples were lost.
LOST_AFTER = 1.5
# The share of an interval that samples must cover for their mean to stand for it.
COVERED = 0.5


class StepCounters(msgspec.Struct, frozen=True):
    """The time-weighted means of all counters from the start of a step's first GPU activity to the end of its last.

    A mean is None if too few samples lie there.
    """

    name: str
    gpu_busy_us: float
    activities: int
    means: dict[str, float | None]


class KernelCounters(msgspec.Struct, frozen=True):
    """A kernel of the reported step that is long enough to contain whole samples, over all steps.

    place: the index in the Summary's gpu_work. samples: the number of samples that lie completely in it.
    sm_active, dram: their means, as shares of the peak.
    dram_by_shapes: the bytes that the kernel has to move per unit of time, as a share of the data sheet's bandwidth.
    """

    place: int
    name: str
    us: float
    samples: int
    sm_active: float | None
    dram: float | None
    dram_by_shapes: float | None


class Counters(msgspec.Struct, frozen=True):
    """The samples of the device that is busiest in the steps.

    names: by kind (see KINDS), the counter that measures it. interval_us: by counter, the usual time between samples.
    dram_by_shapes: the bytes that the reported step's kernels have to move, divided by the span of its GPU activities,
    as a share of the data sheet's bandwidth. known: the share of its GPU time in kernels whose bytes are known.
    """

    device: int
    names: dict[str, str]
    interval_us: dict[str, float]
    steps: tuple[StepCounters, ...]
    kernels: tuple[KernelCounters, ...]
    dram_by_shapes: float | None
    known: float


def counters(trace: Trace, chosen: Step, measured: Sequence[GpuWork]) -> Counters | None:
    """Return the counters of the busiest device; None if the trace has none. measured: the chosen step's GPU work."""
    if not trace.counters:
        return None
    busy = totals((one.device, one.dur) for step in trace.steps for one in step.work)
    counted = {device for device, _ in trace.counters}
    device = max((one for one in busy if one in counted), key=busy.__getitem__, default=None)
    if device is None:
        return None
    samples = {
        name: some
        for (one, name), some in trace.counters.items()
        if one == device and name != DERIVED and len(some.times) > 1
    }
    if not samples:
        return None
    names = {kind: name for kind, pattern in KINDS for name in samples if pattern.fullmatch(name)}
    interval = {name: median(after - before for before, after in pairwise(one.times)) for name, one in samples.items()}
    sized = [one for one in measured if one.bytes_moved and one.kind == "kernel"]
    summed, peaks = sum(one.us for one in measured), common_peaks(trace.devices)
    of_kinds = {
        kind: (samples[names[kind]], LOST_AFTER * interval[names[kind]]) for kind in names if kind in OF_KERNELS
    }
    start, end = spanned(chosen.work) if chosen.work else (0, 0)
    by_shapes = sum(one.bytes_moved for one in sized) / (end - start) / peaks.gb_s if peaks and end > start else None
    return Counters(
        device=device,
        names=names,
        interval_us={name: ns / 1e3 for name, ns in interval.items()},
        steps=tuple(_of_step(step, device, samples, interval) for step in trace.steps if step.work),
        kernels=_of_kernels(trace, chosen, measured, device, of_kinds),
        dram_by_shapes=by_shapes if sized else None,
        known=sum(one.us for one in sized) / summed if summed else 0.0,
    )


def _of_step(step: Step, device: object, samples: dict[str, Samples], interval: dict[str, float]) -> StepCounters:
    work = [one for one in step.work if one.device == device]
    span = spanned(work) if work else (step.start, step.end)
    means = {name: _mean(some, *span, LOST_AFTER * interval[name]) for name, some in samples.items()}
    return StepCounters(step.name, busy_us(work), len(work), means)


def _mean(samples: Samples, start: int, end: int, longest: float) -> float | None:
    """Return the mean of a counter from start to end, weighted by the time for which each sample holds there."""
    first = max(0, bisect.bisect_right(samples.times, start) - 1)
    until = bisect.bisect_left(samples.times, end)
    covered, summed = 0.0, 0.0
    for place in range(first, until):
        begin = samples.times[place]
        stop = samples.times[place + 1] if place + 1 < len(samples.times) else begin + longest / LOST_AFTER
        held = min(stop, begin + longest, end) - max(begin, start)
        if held > 0:
            covered += held
            summed += held * samples.values[place]
    return summed / covered if covered and covered >= COVERED * (end - start) else None


def _of_kernels(
    trace: Trace, chosen: Step, measured: Sequence[GpuWork], device: object, kinds: dict[str, tuple[Samples, float]]
) -> tuple[KernelCounters, ...]:
    """Return the kernels with whole samples. kinds: the samples of each of OF_KERNELS, and how long one holds."""
    everything = (pair for step in (trace.steps if kinds else ()) for pair in numbered(step.work))
    same = grouped((key, one) for key, one in everything if one.device == device)
    peaks, found = common_peaks(trace.devices), []
    for place, ((key, _), one) in enumerate(zip(numbered(chosen.work), measured, strict=True)):
        inside = {kind: _inside(some, same[key], longest) for kind, (some, longest) in kinds.items()}
        count = max(map(len, inside.values()), default=0)
        if not count or not one.ran_alone or one.kind != "kernel":
            continue
        means = {kind: fmean(values) / 100 for kind, values in inside.items() if values}
        by_shapes = one.bytes_moved / one.us / 1e3 / peaks.gb_s if peaks and one.bytes_moved and one.us else None
        found.append(
            KernelCounters(place, one.name, one.us, count, means.get("sm_active"), means.get("dram"), by_shapes)
        )
    return tuple(found)


def _inside(samples: Samples, work: Sequence[Work], longest: float) -> list[float]:
    """Return the values of the samples that lie completely in some work, up to the next samples."""
    found = []
    for one in work:
        first = bisect.bisect_left(samples.times, one.start)
        until = bisect.bisect_right(samples.times, one.end) - 1
        found += [
            samples.values[place]
            for place in range(first, until)
            if samples.times[place + 1] - samples.times[place] <= longest
        ]
    return found
