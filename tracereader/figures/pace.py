"""How long a step takes from its start to the next one's start, and the steps by which that is measured."""

from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from statistics import median_high

from tracereader.trace import Step, Trace, Work

# A first step this many times the typical one would hide what the others are like: 700 to 1200 times on
# the H200 without warm-up, where it loads modules and makes handles; mere cold caches make it 3 times.
FAR_WIDER = 10


def window(trace: Trace, usual: Step) -> tuple[tuple[Step, ...], int, int]:
    """The steps that are measured, and their first start and last end on both lanes (ns). usual: the typical step."""
    far_wider = len(trace.steps) > 1 and trace.steps[0].us > FAR_WIDER * usual.us
    spoken_of = trace.steps[far_wider:]
    ends = [one.end for one in spoken_of] + [one.end for step in spoken_of for one in step.work]
    return spoken_of, min(one.start for one in spoken_of), max(ends)


def pace(starts: Sequence[int], end: int) -> int:
    """From one step's start to the next one's, the upper median; of the last step its length counts, up to its end.

    The upper median is a measured time; the mean of the two middle ones need not be any step's time.
    """
    return median_high([*(after - before for before, after in pairwise(starts)), end - starts[-1]])


def recorded_step_us(trace: Trace, usual: Step) -> float:
    """The step's time while it was recorded: on the CPU or on the GPU, whichever is longer.

    The GPU's is that of the stream that is the busiest over all steps. Without GPU work in the steps it is the typical
    step's CPU time. usual: the typical step.
    """
    if not any(step.work for step in trace.steps):
        return usual.us
    steps = working_steps(trace, usual)
    marks = [on_its_thread(step) for step in steps]
    on_cpu = pace([start for _, start, _ in marks], marks[-1][2])
    work = on_busiest_stream(steps)
    on_gpu = pace([min(one.start for one in some) for some in work], max(one.end for one in work[-1]))
    return max(on_cpu, on_gpu) / 1e3


def working_steps(trace: Trace, usual: Step) -> list[Step]:
    """The steps that count. A far longer first step and the stub after the loop's last call are left out.

    usual: the typical step.
    """
    spoken_of, _, _ = window(trace, usual)
    working = [step for step in spoken_of if step.work] or [step for step in trace.steps if step.work]
    most = max(len(step.work) for step in working)
    return [step for step in working if 2 * len(step.work) >= most]


def on_busiest_stream(steps: Sequence[Step]) -> list[Sequence[Work]]:
    """By step, its work on the stream that is the busiest over all steps; all of its work, if a step has none there."""
    busy: dict[tuple, int] = defaultdict(int)
    for step in steps:
        for one in step.work:
            busy[one.track] += one.dur
    busiest = max(busy, key=busy.__getitem__)
    found = [[one for one in step.work if one.track == busiest] for step in steps]
    return found if all(found) else [step.work for step in steps]


def on_its_thread(step: Step) -> tuple[tuple, int, int]:
    """The thread that a step runs on, its start and its end there."""
    mark = next((op for op in step.roots if op.name == step.name and op.start == step.start), None)
    if mark is not None:
        return mark.track, step.start, step.end
    # A trace without steps: the profiler's last synchronization is not part of it.
    launched = max((one.launch.end for one in step.work if one.launch is not None), default=step.start)
    if not step.roots:
        return (), step.start, step.end
    own = [op for op in step.roots if not ("DeviceSynchronize" in op.name and op.start >= launched)] or step.roots
    return max(own, key=lambda op: op.end).track, min(op.start for op in own), max(op.end for op in own)
