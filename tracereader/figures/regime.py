"""The regime: what limits the steps. Only this file decides it; findings/steps.py has the sentences."""

from collections import Counter
from collections.abc import Sequence

from tracereader.figures.captures import Captures
from tracereader.figures.gpu_time import GpuTime
from tracereader.figures.gpu_work import GpuWork
from tracereader.figures.steps import StepFacts

# Idle share of the time from step to step. On the H200 it is 96 to 98% at 64 x 64, 2% at 4096 x 4096; 92% in eager
# decoding, 15 to 20% between the kernels of the same as a CUDA graph, 2 to 3% in training on one GPU.
MUCH_IDLE = 0.35
# More than this share of a step's time is most of it.
MOST = 0.5
# Exposed communication as a share of the busy time: 1% in DDP on two H200s, 12% with a slow rank, 34% in FSDP of a
# model too small for it.
MUCH_EXPOSED = 0.3
# Share of the data sheet's peak from which on a kernel is near it: the H200's large bf16 products reach 70 to 83%, its
# pointwise kernels 70 to 93%; a matrix-vector product of eager decoding 20 to 40.
NEAR_THE_ROOF = 0.5
# The regime is compute- or memory-bound only if kernels that are known to be near that peak take more than this share
# of the step. Idle time counts against it.
MUCH_KNOWN = 0.5


def waits_for(
    steady: GpuTime | None, steady_us: float, captures: Captures | None, step: StepFacts, work: Sequence[GpuWork]
) -> str | None:
    """Return the name of what limits the steps; None if the GPU is idle and no launch shows why.

    "overhead", "gpu-side", "communication", "compute", "memory", "gpu", "capture" or "cpu-only". It is decided from
    step to step, without a first step that stands out, which would hide the behavior of the others. steady, steady_us:
    the GPU's time over that window, and its length. step, work: of the reported step.
    """
    idle = steady is None or steady.idle_us > MUCH_IDLE * steady_us
    if idle and _captures(captures, step):
        return "capture"
    if steady is None:
        return "cpu-only"
    if idle:
        causes = idle_by_cause(steady)
        return max(causes, key=causes.get)
    if steady.exposed_communication_us > MUCH_EXPOSED * steady.busy_us:
        return "communication"
    return _roof_met(work, 1 - steady.idle_us / steady_us if steady_us else 0.0)


def _captures(found: Captures | None, step: StepFacts) -> bool:
    """Return whether most of the step's launch calls, or of its time, belong to the capture of CUDA graphs."""
    return found is not None and (found.launches > step.launches or found.us > MOST * step.cpu_us)


def idle_by_cause(gpu: GpuTime) -> dict[str | None, float]:
    """Return the GPU's idle time (µs) by cause; the key None means unknown."""
    return {"overhead": gpu.idle_not_launched_us, "gpu-side": gpu.idle_launched_us, None: gpu.idle_unknown_us}


def _roof_met(work: Sequence[GpuWork], busy: float) -> str:
    """Return compute or memory if the GPU is near that peak for most of the step, else gpu.

    busy: the share of the step in which the GPU is busy.
    """
    near = Counter()
    for one in work:
        if one.of_roof is not None and one.of_roof >= NEAR_THE_ROOF:
            near[one.roof] += one.us
    roof, us = max(near.items(), key=lambda item: item[1], default=("gpu", 0.0))
    return roof if us * busy > MUCH_KNOWN * sum(one.us for one in work) else "gpu"
