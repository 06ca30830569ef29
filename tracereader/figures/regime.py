"""The regime: what limits the steps. Only this file decides it; findings/steps.py has the sentences."""

import bisect
from collections.abc import Sequence

import msgspec

from tracereader.figures.captures import captures
from tracereader.figures.gpu_time import GpuTime, Parts, gpu_time
from tracereader.figures.gpu_work import GpuWork, gpu_work
from tracereader.figures.pace import cold_spans, on_busiest_stream, window
from tracereader.figures.steps import launches, spanned, stands_out
from tracereader.trace import Step, Trace, start_of
from tracereader.trace.grouped import totals
from tracereader.trace.intervals import Intervals, length, minus, union
from tracereader.trace.waits import SYNCHRONIZES

# Idle share of the time from step to step. On the H200 it is 96 to 98% at 64 x 64, 2% at 4096 x 4096; 92% in eager
# decoding, 15 to 20% between the kernels of the same as a CUDA graph, 2 to 3% in training on one GPU.
MUCH_IDLE = 0.35
MOST = 0.5  # more than this share of a step's time is most of it
# Exposed communication of the busy time: 1% in DDP on two H200s, 12% with a slow rank, 34% in FSDP of a small model.
MUCH_EXPOSED = 0.3
# Share of the data sheet's peak from which on a kernel is near it: the H200's large bf16 products reach 70 to 83%, its
# pointwise kernels 70 to 93%; a matrix-vector product of eager decoding 20 to 40.
NEAR_THE_ROOF = 0.5
# The regime is compute- or memory-bound only if kernels that are known to be near that peak take more than this share
# of the step. Idle time counts against it.
MUCH_KNOWN = 0.5


class Regime(msgspec.Struct, frozen=True):
    """The regime and the figures that decide it.

    waits_for: the name of what limits the steps, as waits_for() returns it. steady, steady_us: the GPU's time from one
    step's first work to the last one's, and its length. after_first: whether that leaves out a first step that stands
    out. busy_by_device: of a process with several GPUs, the share of that time in which each is busy.
    """

    waits_for: str | None
    steady: GpuTime | None
    steady_us: float
    after_first: bool
    busy_by_device: dict[str, float] = {}


def regime_of(
    trace: Trace, usual: Step, step: Step, parts: Sequence[Parts], measured: Sequence[GpuWork] | None = None
) -> Regime:
    """Return the regime of a trace.

    usual: the typical step. step: the step to report. parts: the GPU's time by device in the window of the steps.
    measured: the step's GPU work if it is measured already.
    """
    counted, start, end = window(trace, usual)
    if trace.quality.incomplete:
        return Regime("incomplete", None, 0.0, False)
    mixed = trace.quality.mixed is not None
    wide_start = not mixed and len(counted) == len(trace.steps) and stands_out(trace, trace.steps[0], usual)
    steps = counted[wide_start:]
    begin, stop = (start, end) if mixed else _steady(steps) or _alone(trace, steps[0], end)
    # A cold step's first calls, and a single long pause, are not the steps' own.
    outlier = [(step.start, step.end) for step in trace.steps if step.start == trace.quality.outlier]
    windows = minus([(begin, stop)], union([*cold_spans(trace, usual), *outlier]))
    steady, us = gpu_time(parts, windows), length(windows) / 1e3
    if steady is not None and not steady.busy_us:  # only the step that is left out has GPU work
        steady = gpu_time(parts, [(start, end)])
    several = parts if len(parts) > 1 and us else ()
    busy = {str(one.device): gpu_time([one], windows).busy_us / us for one in several}
    return Regime(_waits_for(trace, steady, us, step, measured), steady, us, wide_start, busy)


def _steady(steps: Sequence[Step]) -> tuple[int, int] | None:
    """Return the interval (ns) from the first GPU work of the first step to that of the last one, which is whole steps.

    Before it the GPU waits for the recording's first launch, and after it no more launches follow. With few steps these
    idle times are a large share. With several streams the busiest one counts, because copies on another stream may run
    a step ahead. None for a single step.
    """
    working = [step for step in steps if step.work]
    firsts = [work[0].start for work in on_busiest_stream(working)] if working else []
    return (firsts[0], firsts[-1]) if len(firsts) > 1 and firsts[0] < firsts[-1] else None


def _alone(trace: Trace, step: Step, end: int) -> tuple[int, int]:
    """Return the interval (ns) of the only step that counts.

    A step begins when the GPU has ended earlier work. A recording without steps begins and ends at any time, so the
    busiest stream's first and last activity are its ends.
    """
    if not step.work:
        return step.start, end
    (own,) = on_busiest_stream([step])
    if not trace.has_steps:
        return spanned(own)
    if trace.quality.earlier is not None and step is trace.steps[0]:
        return max(step.start, min(trace.quality.earlier.until, step.work[0].start)), end
    first = own[0]
    before = trace.work[: bisect.bisect_left(trace.work, first.start, key=start_of)]
    mine = {id(one) for one in step.work} if before else ()
    ends = [one.end for one in before if one.device == first.device and id(one) not in mine]
    return max(step.start, min(first.start, max(ends, default=step.start))), end


def _waits_for(
    trace: Trace, steady: GpuTime | None, steady_us: float, step: Step, measured: Sequence[GpuWork] | None
) -> str | None:
    """Return the name of what limits the steps; None if the GPU is idle and no launch shows why.

    "overhead", "gpu-side", "turns", "communication", "compute", "memory", "gpu", "capture", "cpu-only" or "incomplete".
    It is decided from step to step, without a first step that stands out, which would hide the behavior of the others.
    """
    idle = steady is None or steady.idle_us > MUCH_IDLE * steady_us
    # Most of the step's launch calls, or of its time, belong to the capture of CUDA graphs.
    capturing = captures(step.roots, trace.op_names) if idle else None
    if capturing and (capturing.launches > launches(step) or capturing.us > MOST * step.us):
        return "capture"
    if steady is None:
        return "cpu-only"
    if idle:
        causes = idle_by_cause(steady)
        return max(causes, key=causes.get)
    if steady.exposed_communication_us > MUCH_EXPOSED * steady.busy_us:
        return "communication"
    measured = tuple(gpu_work(trace, step, {})) if measured is None else measured
    # The kernels near that peak have to take most of the step. Idle time counts against it.
    near = totals((one.roof, one.us) for one in measured if one.of_roof is not None and one.of_roof >= NEAR_THE_ROOF)
    busy, most = 1 - steady.idle_us / steady_us if steady_us else 0.0, MUCH_KNOWN * sum(one.us for one in measured)
    return next((roof for roof, us in near.most_common(1) if us * busy > most), "gpu")


def waits_for_gpus(trace: Trace) -> Intervals:
    """Return when (ns) the CPU waits for a GPU in the steps."""
    calls = (op for step in trace.steps for op in step.named(SYNCHRONIZES.search))
    return union((op.start, op.start + op.dur) for op in calls if op.kind == "runtime")


def idle_by_cause(gpu: GpuTime) -> dict[str | None, float]:
    """Return the GPU's idle time (µs) by cause; the key None means unknown."""
    return {
        "overhead": gpu.idle_not_launched_us,
        "gpu-side": gpu.idle_launched_us,
        "turns": gpu.idle_elsewhere_us,
        None: gpu.idle_unknown_us,
    }
