"""The time from one step's start to the next one's, and the steps that are measured."""

from collections.abc import Sequence
from itertools import pairwise
from statistics import median

from tracereader.trace import Step, Trace, Work, start_of
from tracereader.trace.grouped import T, totals
from tracereader.trace.intervals import Intervals, length, length_between, union
from tracereader.trace.quality import usual_amount
from tracereader.trace.waits import OF_THE_DEVICE

# A first step this many times the typical one would hide the behavior of the others: it takes 700 to 1200 times as long
# on the H200 without warm-up, where it loads modules and creates handles; cold caches alone make it 3 times.
FAR_WIDER = 10
# PyTorch's own Python takes less than this between two ops (µs), even while the profiler records.
PAUSE_US = 500


def with_a_middle(some: Sequence[T]) -> Sequence[T]:
    """Return an odd number of steps, or of their times, so that the median is one step's.

    Of an even number, the last one is left out. A step ends when the next one starts, so the trace does not show how
    long the last one takes with the pause after it, nor how long the GPU is idle in it. Of two steps, the first counts.
    """
    return some if len(some) % 2 else some[:-1]


def window(trace: Trace, usual: Step) -> tuple[tuple[Step, ...], int, int]:
    """Return the measured steps, and their first start and last end on both lanes (ns). usual: the typical step."""
    counted = _measured(trace, usual)
    ends = [one.end for one in counted] + [one.start + one.dur for step in counted for one in step.work]
    return counted, min(one.start for one in counted), max(ends)


def _measured(trace: Trace, usual: Step) -> tuple[Step, ...]:
    first, mixed = trace.steps[0], trace.quality.mixed
    is_of_the_longer = mixed is not None and first.start in mixed.long  # of a recording with steps of two kinds
    return trace.steps[len(trace.steps) > 1 and is_far_wider(first, usual) and not is_of_the_longer :]


def is_far_wider(first: Step, usual: Step) -> bool:
    """Return whether a first step takes so much longer than the typical one that it is left out of the figures."""
    return first.us > FAR_WIDER * usual.us


def pace(starts: Sequence[int], end: int, mixed: bool = False) -> float:
    """Return the median (ns) of the times from one step's start to the next one's, or to the last one's end.

    It is one step's time, because the last step of an even number does not count; see with_a_middle(). mixed: the
    steps are of two kinds, so that the mean of all is returned.
    """
    if mixed:
        return (end - starts[0]) / len(starts)
    return median(with_a_middle([*(after - before for before, after in pairwise(starts)), end - starts[-1]]))


def lanes_us(trace: Trace, usual: Step) -> dict[str, float]:
    """Return the step's time (µs) while it was recorded, by lane. The longer one is the step's time.

    The GPU's time is that of the busiest stream over all steps. Without GPU work there is only the CPU's lane, with the
    typical step's time. usual: the typical step. What does not belong to a step does not count: the first step's wait
    for earlier work, and the typical step's calls that a warm one does not make.
    """
    mixed, cold = trace.quality.mixed is not None, cold_spans(trace, usual)
    if not any(step.work for step in trace.steps):
        mean = sum(step.us for step in trace.steps) / len(trace.steps)
        return {"CPU": (mean if mixed else usual.us) - length_between(cold, usual.start, usual.end) / 1e3}
    steps = working_steps(trace, usual)
    marks = [on_its_thread(step) for step in steps]
    starts = [start for _, start, _ in marks]
    if trace.quality.earlier is not None and steps[0] is trace.steps[0]:
        starts[0] += trace.quality.earlier.ns
    on_cpu = pace(starts, marks[-1][2], mixed) - length_between(cold, usual.start, usual.end)
    work = on_busiest_stream(steps)
    on_gpu = pace([some[0].start for some in work], max([one.start + one.dur for one in work[-1]]), mixed)
    if cold and usual.work:
        on_gpu -= length_between(cold, usual.work[0].start, usual.end)
    return {"CPU": max(0.0, on_cpu) / 1e3, "GPU": max(0.0, on_gpu) / 1e3}


LEAST_COLD = 0.02  # less cold time than this share of a step changes no figure that a report prints


def cold_spans(trace: Trace, usual: Step) -> Intervals:
    """Return when (ns) the typical step is in calls that a warm step does not make; empty if that is hardly ever.

    Only the threads that the step's launches come from count, or all of them without any.
    """
    found = trace.quality.cold_in(usual)
    if not found:
        return []
    threads = {one.launch.track for one in usual.work if one.launch is not None}
    spans = union((one.start, one.end) for one in found if not threads or one.track in threads)
    return spans if length(spans) >= LEAST_COLD * (usual.end - usual.start) else []


def working_steps(trace: Trace, usual: Step) -> list[Step]:
    """Return the steps that count, without a far longer first step and the stub after the loop's last call.

    A small step between others counts, because the time between their starts includes it. Without GPU work all steps
    count. usual: the typical step.
    """
    working = [step for step in _measured(trace, usual) if step.work] or [step for step in trace.steps if step.work]
    working = working or list(trace.steps)
    amounts = [len(step.work) for step in working]
    most = max(amounts) if trace.quality.mixed is None else usual_amount(amounts)
    large = [place for place, amount in enumerate(amounts) if 2 * amount >= most]
    return working[large[0] : large[-1] + 1]


def on_busiest_stream(steps: Sequence[Step]) -> list[Sequence[Work]]:
    """Return each step's work on the busiest stream of all steps, by start; all of its work if one has none there."""
    everything = [step.work for step in steps]
    if len({one.track for work in everything for one in work}) <= 1:
        return everything
    busy = totals((one.track, one.dur) for work in everything for one in work)
    busiest = max(busy, key=busy.__getitem__)
    found = [[one for one in step.work if one.track == busiest] for step in steps]
    return found if all(found) else everything


def on_its_thread(step: Step) -> tuple[tuple, int, int]:
    """Return the thread that a step runs on, and the step's start and end there (ns)."""
    mark = next((op for op in step.roots if op.start == step.start and op.name == step.name), None)
    if mark is not None:
        return mark.track, step.start, step.end
    # In a trace without steps the profiler's last synchronization does not count.
    launched = max([call.start + call.dur for one in step.work if (call := one.launch) is not None], default=step.start)
    if not step.roots:
        return (), step.start, step.end
    own = [op for op in step.roots if not (OF_THE_DEVICE in op.name and op.start >= launched)] or step.roots
    ends = [op.start + op.dur for op in own]
    end = max(ends)
    return own[ends.index(end)].track, min(map(start_of, own)), end
