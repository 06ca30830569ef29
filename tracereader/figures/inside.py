"""The phases that a kernel recorded of itself: how long its blocks wait before each phase, and how long they work."""

import bisect
import math
from collections.abc import Sequence
from statistics import median

import msgspec

from tracereader.figures.gpu_work import launch_args
from tracereader.trace import Trace, Work, start_of
from tracereader.trace.grouped import grouped
from tracereader.trace.slices import Phase


class PhaseTimes(msgspec.Struct, frozen=True):
    """A phase over all recorded blocks, launches and repetitions. Times in µs; None without a wait, or without work.

    waits, works: how many slices of each there are. The fields that end in _per_block_us are of one block and launch.
    """

    name: str
    waits: int
    works: int
    waiting_us: float  # in total
    working_us: float
    waiting_per_block_us: float
    working_per_block_us: float
    median_wait_us: float | None
    median_work_us: float | None


class InsideKernel(msgspec.Struct, frozen=True):
    """What a kernel's blocks recorded.

    lanes: the largest number of blocks that recorded a launch. blocks: of the grid; None if it is unknown, or differs.
    waiting_share: of the recorded time, from 0 to 1; None for no time.
    """

    kernel: str
    steps: list[str]  # that launched it; empty for a launch outside the steps
    launches: int  # whose phases are recorded
    lanes: int
    blocks: int | None
    waiting_share: float | None
    phases: list[PhaseTimes]  # the longest first


def inside(trace: Trace) -> tuple[InsideKernel, ...]:
    """Return the recorded phases of each kernel, by the kernel's name. Lanes outside any kernel are left out."""
    by_process = grouped((one.track[0], one) for one in trace.inside)
    held: dict[str, list[tuple[Work, Phase]]] = {}
    kernels = [one for one in trace.work if one.kind == "kernel"] if by_process else []
    for phases in by_process.values():
        first = next((one for one in reversed(kernels) if one.start <= phases[0].start < one.end), None)
        if first is None:
            continue
        # Another kernel may run meanwhile, and the last phase may end after the kernel: the two clocks differ.
        same = [one for one in kernels if one.name == first.name]
        held.setdefault(first.name, []).extend(
            (same[bisect.bisect_right(same, one.start, key=start_of) - 1], one) for one in phases
        )
    return tuple(_of_kernel(trace, name, some) for name, some in sorted(held.items()))


def _of_kernel(trace: Trace, name: str, some: Sequence[tuple[Work, Phase]]) -> InsideKernel:
    """Return the figures of one kernel, from its phases with the launch that each belongs to."""
    launches = {id(work): work for work, _ in some}
    lanes = {(id(work), one.track) for work, one in some}
    by_name = grouped((one.phase, one) for _, one in some)
    phases = [_times(phase, slices, len(lanes)) for phase, slices in by_name.items()]
    waiting = sum(one.waiting_us for one in phases)
    whole = waiting + sum(one.working_us for one in phases)
    grids = {math.prod(launch_args(work).grid or [0]) for work in launches.values()}
    return InsideKernel(
        kernel=name,
        steps=[step.name for step in trace.steps if any(id(work) in launches for work in step.work)],
        launches=len(launches),
        lanes=max(sum(launch == one for launch, _ in lanes) for one in launches),
        blocks=(min(grids) or None) if len(grids) == 1 else None,
        waiting_share=waiting / whole if whole else None,
        phases=sorted(phases, key=lambda one: -one.waiting_us - one.working_us),
    )


def _times(name: str, slices: Sequence[Phase], lanes: int) -> PhaseTimes:
    """Return one phase's times. lanes: the recorded blocks, over all launches."""
    both = [[one.us for one in slices if one.waits is waiting] for waiting in (True, False)]
    (waits, works), (waiting_us, working_us) = map(len, both), map(sum, both)
    medians = (median(some) if some else None for some in both)
    return PhaseTimes(name, waits, works, waiting_us, working_us, waiting_us / lanes, working_us / lanes, *medians)
