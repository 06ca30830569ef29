"""Each recorded step measured on both lanes, and what a wide one did that the others did not."""

import bisect
import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from statistics import median

import msgspec

from tracereader.figures.intervals import length, union
from tracereader.trace import STEP, Op, Step, Trace, Work

# A step that took this many times the median one is pointed at. On the H200 the first recorded
# step takes 1.7 to 3.4 times the others, and the others differ among each other by up to 1.4.
STANDS_OUT = 1.5
# A step whose GPU work took this many times the median step's is marked, too: kernels vary by 9% at most.
GPU_STANDS_OUT = 1.3
# Calls shorter than this in the median step say nothing about what all calls became.
TELLING_US = 2.0


class Excess(msgspec.Struct, frozen=True):
    """Where a step's time over the median step's went, by the names' own (self) time.

    before_first_op_us: what its way from the label to the first op took more. first_calls: time in
    calls that the median step does not make, by name. slower: what each name took more, the largest
    first; slowest_times: how many times as long that first one took. times_low to times_high: the same
    of all names common to both (the middle half of them); None where too few are long enough to tell.
    """

    us: float
    before_first_op_us: float
    first_calls: dict[str, float]
    overheads: dict[str, float]  # the profiler's and the driver's own slices that start in it
    slower: dict[str, float]
    slowest_times: float | None
    times_low: float | None
    times_high: float | None


class StepFacts(msgspec.Struct, frozen=True):
    """One step, measured. None where the trace has nothing to measure."""

    name: str
    cpu_us: float
    label_to_first_op_us: float | None  # from the step's start, without a label
    launches: int
    gpu_busy_us: float
    gpu_span_us: float
    gpu_idle_share: float | None  # of the step, until its last GPU work ends
    launch_to_start_us: float | None  # from the first launch call to the start of what it launched
    occupancy_queries: int
    idle_before_us: float | None  # between the end of the step before it and its own start
    times_the_median: float | None  # its CPU time over the median step's, where it stands out
    excess: Excess | None  # where it stands out
    gpu_times_the_median: float | None  # the same of its GPU busy time, where that stands out

    @property
    def number(self) -> str:
        return self.name.removeprefix(STEP[:-1])


def typical(trace: Trace) -> Step:
    """The step with the median CPU time of those that did work; of an even number, the lower middle one."""
    # The stub after the last call of a loop is a step by name only.
    if any(step.work for step in trace.steps):
        amounts = [len(step.work) for step in trace.steps]
        most = max(amounts)
    else:
        amounts = [sum(1 for _ in step.walk()) for step in trace.steps]
        # A step that compiles makes many times the others' calls; of two, nothing tells which one is odd.
        most = sorted(amounts)[(len(amounts) - 1) // 2] if len(amounts) > 2 else max(amounts)
    working = [step for step, amount in zip(trace.steps, amounts, strict=True) if 2 * amount >= most]
    return sorted(working, key=lambda step: step.us)[(len(working) - 1) // 2]


def busy_us(work: Iterable[Work]) -> float:
    """How long the GPU did something, over its streams; of several GPUs, the busiest."""
    by_device = defaultdict(list)
    for one in work:
        by_device[one.device].append((one.start, one.end))
    return max((length(union(intervals)) / 1e3 for intervals in by_device.values()), default=0.0)


def span_us(work: Sequence[Work]) -> float:
    """From the first start to the last end, gaps included."""
    return (max(one.end for one in work) - min(one.start for one in work)) / 1e3 if work else 0.0


def label_of(step: Step) -> Op | None:
    """The step's own annotation: the outermost label in it, not counting the profiler's mark."""
    return next((op for op in step.walk() if op.kind == "label" and not op.name.startswith(STEP)), None)


def self_us(op: Op) -> float:
    """Its time less its children's."""
    return (op.dur - sum([child.dur for child in op.children])) / 1e3


def step_facts(trace: Trace, usual: Step) -> tuple[StepFacts, ...]:
    """Every step, measured against the typical one."""
    gaps = [_label_gap_us(step) for step in trace.steps]
    usual_gap = median([gap for gap in gaps if gap is not None] or [0.0])
    usual_self = _self_by_name(usual)
    covered = _Covered(trace.work)
    busy = [busy_us(step.work) for step in trace.steps]
    usual_busy = median([us for us in busy if us] or [0.0])
    facts = []
    before = None
    for step, gap, gpu_us in zip(trace.steps, gaps, busy, strict=True):
        first = next((one for one in step.work if one.launch is not None), None)
        ratio = step.us / usual.us if usual.us and len(trace.steps) > 1 else 1.0
        wide = ratio >= STANDS_OUT
        slow_on_gpu = len(trace.steps) > 2 and 0 < GPU_STANDS_OUT * usual_busy <= gpu_us
        facts.append(
            StepFacts(
                name=step.name,
                cpu_us=step.us,
                label_to_first_op_us=gap,
                launches=len({id(one.launch) for one in step.work if one.launch is not None}),
                gpu_busy_us=gpu_us,
                gpu_span_us=span_us(step.work),
                gpu_idle_share=covered.idle_share(step) if step.work else None,
                launch_to_start_us=(first.start - first.launch.start) / 1e3 if first else None,
                occupancy_queries=len(_within(trace.queries, step)),
                idle_before_us=(step.start - before.end) / 1e3 if before else None,
                times_the_median=ratio if wide else None,
                excess=_excess(trace, step, usual, (gap or 0.0) - usual_gap, usual_self) if wide else None,
                gpu_times_the_median=gpu_us / usual_busy if slow_on_gpu else None,
            )
        )
        before = step
    return tuple(facts)


class _Covered:
    """When each GPU was busy: disjoint intervals with their running sum, so that a question costs a bisection."""

    def __init__(self, work: Sequence[Work]):
        by_device = defaultdict(list)
        for one in work:
            by_device[one.device].append((one.start, one.end))
        self.busy = {}
        for device, some in by_device.items():
            starts, ends = zip(*union(some), strict=True)
            before = list(itertools.accumulate((b - a for a, b in zip(starts, ends, strict=True)), initial=0))
            self.busy[device] = starts, ends, before

    def _until(self, device: object, time: int) -> int:
        starts, ends, before = self.busy[device]
        index = bisect.bisect_right(starts, time)
        return before[index] - max(0, ends[index - 1] - time) if index else 0

    def idle_share(self, step: Step) -> float | None:
        """Of the time from the step's start to the end of its last GPU work, on its busiest GPU."""
        end = max(step.end, max([one.end for one in step.work]))
        devices = {one.device for one in step.work}
        busy = max(self._until(device, end) - self._until(device, step.start) for device in devices)
        return 1 - busy / (end - step.start) if end > step.start else None


def _label_gap_us(step: Step) -> float | None:
    """From the label's start (the step's, without one) to the start of the first op in it."""
    label = label_of(step)
    ops = label.walk() if label else step.walk()
    first = next((op for op in ops if op.kind == "op"), None)
    return (first.start - (label.start if label else step.start)) / 1e3 if first else None


def _excess(trace: Trace, step: Step, usual: Step, gap_excess: float, usual_self: Counter) -> Excess:
    overheads = Counter()
    for one in _within(trace.overheads, step):
        overheads[one.name] += one.us
    own = _self_by_name(step)
    slower = Counter({name: us - usual_self[name] for name, us in own.items() if us > usual_self[name]})
    slowest = max(slower, key=slower.get, default=None)
    times = sorted(own[name] / us for name, us in usual_self.items() if us >= TELLING_US and name in own)
    quarter = len(times) // 4
    return Excess(
        us=step.us - usual.us,
        before_first_op_us=gap_excess,
        first_calls=dict(Counter({name: us for name, us in own.items() if name not in usual_self}).most_common(8)),
        overheads=dict(overheads.most_common(8)),
        slower=dict(slower.most_common(8)),
        slowest_times=own[slowest] / usual_self[slowest] if usual_self[slowest] else None,
        times_low=times[quarter] if len(times) >= 3 else None,
        times_high=times[-1 - quarter] if len(times) >= 3 else None,
    )


def _within(slices: Sequence[Op], step: Step) -> Sequence[Op]:
    """Those, in the order of their starts, that start in the step."""
    first, last = (bisect.bisect_left(slices, time, key=lambda one: one.start) for time in (step.start, step.end))
    return slices[first:last]


def _self_by_name(step: Step) -> Counter:
    times = Counter()
    for op in step.walk():
        # Numbered, so never the same in two steps.
        name = "the loop around the label" if op.name.startswith(STEP) else op.name
        times[name] += self_us(op)
    return times
