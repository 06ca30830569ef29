"""Each recorded step, measured on CPU and GPU, and the extra work of a long step."""

import bisect
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from heapq import nlargest
from itertools import accumulate, islice
from operator import itemgetter
from statistics import median
from typing import NamedTuple

import msgspec

from tracereader.figures.pace import PAUSE_US, is_far_wider, with_a_middle
from tracereader.trace import STEP, Op, Step, Trace, Work, outermost, start_of
from tracereader.trace.grouped import grouped, totals
from tracereader.trace.intervals import Intervals, Lengths, joined, length, union
from tracereader.trace.labels import COMPILE_ID, COMPILING, DESCRIBES_COLLECTIVE, LOADER, is_torchs_own
from tracereader.trace.quality import LAUNCH, usual_amount

# A step that took this many times the typical one is marked. On the H200 the first recorded step takes 1.7 to 3.4 times
# the others, and the others differ among each other by up to 1.4.
STANDS_OUT = 1.5
# A step whose GPU work took this many times the median step's is marked, too: kernels vary by 9% at most.
GPU_STANDS_OUT = 1.3
# Calls shorter than this in the typical step are too noisy to show how much all calls slowed down.
LONG_ENOUGH_US = 2.0
# With recorded ops, a sixth or more of the launches lie in an op. Python launches the others itself.
IN_OPS = 0.05
# Annotations of optimizers, loaders and sharded models inside more than this many others are left out.
MOST_NESTED = 10
# The name for a step's own self time, because "ProfilerStep#3" differs in each step.
OUTSIDE_CALLS = "outside every call"


class Excess(msgspec.Struct, frozen=True):
    """The extra time of a step compared with the typical step, by self time per name.

    first_calls: time in calls that the typical step does not make, by name. slower: the extra time by name, the largest
    first; less_us: the time that the other names saved, in total. times_low to times_high: the factor by which a call
    slowed down, for most names in both steps; None if too few are long enough. alike_us: the part of us in calls that
    took up to times_high times as long.
    """

    us: float
    first_calls: dict[str, float]
    overheads: dict[str, float]  # the profiler's and the driver's own slices that start in the step
    slower: dict[str, float]
    less_us: float
    times_low: float | None
    times_high: float | None
    alike_us: float


class Uneven(msgspec.Struct, frozen=True):
    """Two steps that make the same calls (_calls), one of which took much longer.

    short, long: indexes of the trace's steps. more_us: the extra self time by name, the largest first. python_us: the
    part of it outside all calls except annotations. overheads_us: the profiler's and the driver's own slices in the
    longer step.
    """

    short: int
    long: int
    more_us: dict[str, float]
    python_us: float
    overheads_us: float


class StepFacts(msgspec.Struct, frozen=True):
    """The measurements of one step. A field is None if the trace has nothing to measure."""

    name: str
    cpu_us: float
    label_to_first_op_us: float | None  # from the step's start, without an annotation
    launches: int
    gpu_busy_us: float
    gpu_span_us: float
    gpu_idle_share: float | None  # from its first GPU work to the next step's; the whole step if it is the only one
    launch_to_start_us: float | None  # from the first launch call to the start of the activity
    occupancy_queries: int
    compiled: list[str]  # torch.compile's compilations in it, as 0/1: frame 0, compiled once before
    compile_us: float
    times_the_typical: float | None  # its CPU time over the typical step's, if it stands out among three or more
    excess: Excess | None  # if its CPU time stands out
    gpu_times_the_median: float | None  # its GPU busy time over the median step's, if it stands out
    loading_us: float | None  # its wait for the DataLoader's next batch

    @property
    def number(self) -> str:
        return self.name.removeprefix(STEP[:-1])


def typical(trace: Trace) -> Step:
    """Return the step with the median CPU time of those that did work, without a far longer first step.

    With GPU work, the last step of an even number does not count, as in pace.py: the trace does not show when its time
    on the GPU ends. Without GPU work each step's end is known: of an even number, the lower middle one.
    """
    # The stub after the last call of a loop is a step by name only.
    on_gpu = any(step.work for step in trace.steps)
    if on_gpu:
        amounts = [len(step.work) for step in trace.steps]
        most = max(amounts) if trace.quality.mixed is None else usual_amount(amounts)
    else:
        amounts = [sum(1 for _ in step.walk()) for step in trace.steps]
        # A step that compiles makes many times the others' calls. Of two steps, nothing shows which one does.
        most = sorted(amounts)[(len(amounts) - 1) // 2] if len(amounts) > 2 else max(amounts)
    working = [step for step, amount in zip(trace.steps, amounts, strict=True) if 2 * amount >= most]
    working = [step for step in working if step.us] or working
    usual = _lower_middle(working)
    if not on_gpu:
        return usual
    if working[0] is trace.steps[0] and is_far_wider(working[0], usual):
        working = working[1:]
    return _lower_middle(with_a_middle(working))


def _lower_middle(steps: Sequence[Step]) -> Step:
    """Return the step with the median CPU time; of an even number, the lower middle one."""
    return sorted(steps, key=lambda step: step.us)[(len(steps) - 1) // 2]


def ops_recorded(step: Step) -> bool:
    """Return whether the profiler recorded the step's ops: whether some of its launches lie in ops.

    The slice that describes a collective does not count, because it is recorded without the other ops, too. Nothing
    follows from launches of CUDA graphs, which lie in no op. A step without other launches counts as recorded.
    """
    calls = {id(one.launch): one.launch for one in step.work if one.launch is not None}
    calls = [call for call in calls.values() if "GraphLaunch" not in call.name]
    known: dict[int, bool] = {}
    inside = (
        None for call in calls if lies_in(call, lambda op: op.kind == "op" and op.name != DESCRIBES_COLLECTIVE, known)
    )
    enough = math.ceil(IN_OPS * len(calls))  # most launches lie in ops, so few of them decide
    return len(list(islice(inside, enough))) == enough


def lies_in(call: Op, wanted: Callable[[Op], bool], known: dict[int, bool]) -> bool:
    """Return whether a wanted slice encloses the call.

    known: an empty dict at first, and the same one for all calls, so that each path upwards is followed once.
    """
    path, found = [], False
    for op in call.above():
        if id(op) in known:
            found = known[id(op)]
            break
        path.append(op)
        if wanted(op):
            found = True
            break
    known.update((id(op), found) for op in path)
    return found


def busy_us(work: Iterable[Work]) -> float:
    """Return how long (µs) the GPU was busy with work (by start), over its streams; of several, the busiest GPU's."""
    return max((length(busy) / 1e3 for busy in _busy_by_device(work).values()), default=0.0)


def spanned(work: Sequence[Work]) -> tuple[int, int]:
    """Return the first start and the last end (ns) of some work, which is in the order of the starts."""
    return work[0].start, max([one.start + one.dur for one in work])


def outermost_named(step: Step, wanted: Callable[[str], object]) -> list[Op]:
    """Return the ops and calls with a wanted name that lie in no other one, in order."""
    named, known = step.named(wanted), {}
    ids = set(map(id, named))
    return [op for op in named if not lies_in(op, lambda above: id(above) in ids, known)]


def loader_waits(step: Step) -> Intervals:
    """Return the intervals in which a step waits for the DataLoader's next batch."""
    return union((op.start, min(op.end, step.end)) for op in labels(step, LOADER))


def labels(step: Step, starts: str | tuple[str, ...]) -> list[Op]:
    """Return the annotations of a step whose names start so, without those inside one of the same name.

    Those inside MOST_NESTED others are left out, too: no program has them, and looking through each takes long.
    """
    found, around = [], defaultdict(list)
    for op in step.named(lambda name: name.startswith(starts)):
        outer = around[op.track]
        while outer and not outer[-1].start <= op.start < outer[-1].end:
            outer.pop()
        if op.kind == "label" and len(outer) < MOST_NESTED and all(one.name != op.name for one in outer):
            found.append(op)
            outer.append(op)
    return found


def ids_inside(ops: Iterable[Op]) -> set[int]:
    """Return the ids of these ops and of all ops and calls inside them. An op may lie in an earlier one of them."""
    found: set[int] = set()
    for op in ops:
        if id(op) not in found:
            found.update(map(id, op.walk()))
    return found


def label_of(step: Step) -> Op | None:
    """Return the step's own annotation: the outermost annotation in it that torch itself did not set."""
    return next((op for op in step.labels if not is_torchs_own(op.name)), None)


def self_us(op: Op) -> float:
    """Return the self time (µs) of a call."""
    return self_ns(op) / 1e3


def self_ns(op: Op) -> int:
    """Return the self time (ns) of a call. A child that ends after the call counts only up to the call's end."""
    if not op.children:
        return op.dur
    own = op.dur - sum([child.dur for child in op.children])
    last, end = op.children[-1], op.start + op.dur
    if last.start + last.dur > end:
        own += sum(max(0, child.end - end) for child in op.children)
    return max(0, own)


def launches(step: Step) -> int:
    """Return the number of the step's calls that launched GPU work."""
    return len({id(one.launch) for one in step.work if one.launch is not None})


def usual_busy_us(steps: Sequence[StepFacts]) -> float:
    """Return the median time (µs) that the GPU is busy with a step's work. steps: without those that are left out.

    The stub after the loop's last call, and a step that the recording cut off, do not count.
    """
    most = max((one.launches for one in steps), default=0)
    return median(with_a_middle([one.gpu_busy_us for one in steps if 2 * one.launches >= most]))


def _ratio(trace: Trace, step: Step, usual: Step) -> float:
    return step.us / usual.us if usual.us and len(trace.steps) > 1 else 1.0


def stands_out(trace: Trace, step: Step, usual: Step) -> bool:
    """Return whether a step takes far longer on the CPU than the typical one. Of two steps, neither is the outlier."""
    return len(trace.steps) > 2 and _ratio(trace, step, usual) >= STANDS_OUT


def step_facts(trace: Trace, usual: Step) -> Iterator[StepFacts]:
    """Yield the measurements of every step, compared with the typical one."""
    when_busy = {device: Lengths(busy) for device, busy in _busy_by_device(trace.work).items()}
    compiles = any(name.endswith(COMPILING) for name in trace.op_names)
    stretches = _gpu_stretches(trace)
    busy = [busy_us(step.work) for step in trace.steps]
    usual_busy = median(with_a_middle([us for us in busy if us]) or [0.0])
    asked = [one.start for one in trace.queries]
    lost = trace.quality.incomplete
    usual_self = None
    for step, gpu_us, stretch in zip(trace.steps, busy, stretches, strict=True):
        has_launch = [(one.launch.start, one.start) for one in step.work if one.launch is not None]
        launched, started = min(has_launch, default=(None, None))
        ratio = _ratio(trace, step, usual)
        wide = ratio >= STANDS_OUT
        compiled, compile_us = _compiled(step) if compiles else ([], 0.0)
        start, end = spanned(step.work) if step.work else (0, 0)
        if wide and usual_self is None:
            usual_self = _self_by_name(usual)
        slow_on_gpu = len(trace.steps) > 2 and 0 < GPU_STANDS_OUT * usual_busy <= gpu_us
        yield StepFacts(
            name=step.name,
            cpu_us=step.us,
            label_to_first_op_us=_label_gap_us(step),
            launches=sum(op.kind == "runtime" for op in step.named(LAUNCH.match)) if lost else launches(step),
            gpu_busy_us=gpu_us,
            gpu_span_us=(end - start) / 1e3,
            gpu_idle_share=_idle_share(when_busy, step, *stretch) if stretch and not lost else None,
            launch_to_start_us=(started - launched) / 1e3 if has_launch and not lost else None,
            occupancy_queries=bisect.bisect_left(asked, step.end) - bisect.bisect_left(asked, step.start),
            compiled=compiled,
            compile_us=compile_us,
            times_the_typical=ratio if stands_out(trace, step, usual) else None,
            excess=_excess(trace, step, usual, usual_self) if wide else None,
            gpu_times_the_median=gpu_us / usual_busy if slow_on_gpu else None,
            loading_us=length(waits) / 1e3 if (waits := loader_waits(step)) else None,
        )


# A step that took this many times an earlier one with the same calls. Steps on the H200 and on two idle cores differ by
# up to 1.4, except for steps in which a cold start still shows: 2.6 to 8.3 times a later one.
SEVERAL, BEYOND_A_COLD_START = 3, 10


def uneven(trace: Trace) -> Uneven | None:
    """Return the pair of steps with the same calls whose times differ most, if they differ by several times; else None.

    The first step is never the longer one, because it may be long for being the first.
    """
    steps = [place for place, step in enumerate(trace.steps if trace.has_steps else ()) if step.us]
    if not _far_apart(trace, steps):
        return None
    alike = grouped((_calls(trace.steps[place]), place) for place in steps)
    pairs = [pair for calls, places in alike.items() if calls for pair in _far_apart(trace, places)]
    if not pairs:
        return None
    _, short, long = max(pairs)
    less, own = (_self_by_name(trace.steps[place]) for place in (short, long))
    more = Counter({name: one.us - (less[name].us if name in less else 0.0) for name, one in own.items()})
    return Uneven(
        short=short,
        long=long,
        more_us={name: us for name, us in more.most_common() if us > 0},
        python_us=sum(us for name, us in more.items() if us > 0 and own[name].kinds == {"label"}),
        overheads_us=sum(one.us for one in _within(trace.overheads, trace.steps[long])),
    )


def _far_apart(trace: Trace, places: Sequence[int]) -> list[tuple[float, int, int]]:
    """Return pairs of steps that differ by several times: the ratio, and the indexes of the short and the long step."""
    us = {place: trace.steps[place].us for place in places}

    def shortest(some: Iterable[int]) -> list[int]:
        return list(accumulate(some, lambda one, other: other if us[other] < us[one] else one))

    # The shortest step before each, and the shortest one after each.
    pairs = [(short, long, SEVERAL) for short, long in zip(shortest(places), places[1:], strict=False)]
    later = shortest(reversed(places))[::-1]
    pairs += [(short, long, BEYOND_A_COLD_START) for short, long in zip(later[1:], places, strict=False)]
    return [
        (us[long] / us[short], short, long) for short, long, least in pairs if long and us[long] >= least * us[short]
    ]


def _calls(step: Step) -> frozenset[tuple]:
    """Return the step's ops, each with its inputs' sizes if they are recorded, and how often the step calls it so."""
    return frozenset(Counter((op.name, str(op.inputs.recorded)) for op in step.walk() if op.kind == "op").items())


def _busy_by_device(work: Iterable[Work]) -> dict[object, Intervals]:
    """Return when each GPU was busy. work: sorted by start, so that one pass gives the union."""
    by_device = grouped((one.device, (one.start, one.start + one.dur)) for one in work)
    return {device: joined(some) for device, some in by_device.items()}


def _idle_share(busy: dict[object, Lengths], step: Step, start: int, end: int) -> float | None:
    """Return the idle share of an interval on the step's busiest GPU."""
    most = max(busy[device].between(start, end) for device in {one.device for one in step.work})
    return 1 - most / (end - start) if end > start else None


def _gpu_stretches(trace: Trace) -> list[tuple[int, int] | None]:
    """Return the interval from each step's first GPU work to that of the next step with any.

    The intervals do not overlap. The last step has none, because nothing shows its end. The only step with work has all
    of its time on both lanes; a recording without steps has the time from its first GPU activity to its last one.
    """
    steps = trace.steps
    working = [step for step in steps if step.work]
    if working and not trace.has_steps:
        return [spanned(steps[0].work)]
    if len(working) == 1:
        (only,) = working
        return [(only.start, max(only.end, spanned(only.work)[1])) if step is only else None for step in steps]
    found, following = [], None
    for step in reversed(steps):
        first = step.work[0].start if step.work else None
        found.append((first, following) if first is not None and following is not None else None)
        following = following if first is None else first
    return found[::-1]


def _compiled(step: Step) -> tuple[list[str], float]:
    """Return torch.compile's compilations in a step, and the time (µs) of its outermost slices."""
    ids = {COMPILE_ID.search(op.name)[1] for op in step.named(COMPILE_ID.search)}
    return sorted(ids), sum(op.us for op in compilations(step))


def compilations(step: Step) -> list[Op]:
    """Return the outermost slices of torch.compile's compilations in a step."""
    return outermost_named(step, lambda name: name.endswith(COMPILING))


def _label_gap_us(step: Step) -> float | None:
    """Return the time (µs) from the annotation's start (or the step's) to the start of the first op in it."""
    label = label_of(step)
    first = next(outermost([label] if label else step.roots, lambda op: op.kind == "op"), None)
    return (first.start - (label.start if label else step.start)) / 1e3 if first else None


def _excess(trace: Trace, step: Step, usual: Step, usual_self: dict[str, "_Own"]) -> Excess:
    own = _self_by_name(step)
    both = {name: (mine, usual_self[name]) for name, mine in own.items() if name in usual_self}
    # A long pause between ops, in an annotation or outside of all, is the program's own or the DataLoader's.
    of_calls = [pair for pair in both.values() if pair[0].kinds != {"label"} or pair[0].us - pair[1].us < PAUSE_US]
    first_calls = {name: mine.us for name, mine in own.items() if name not in usual_self}
    slower = first_calls | {name: mine.us - theirs.us for name, (mine, theirs) in both.items()}
    gone = sum(theirs.us for name, theirs in usual_self.items() if name not in own)
    times = sorted(
        mine.us / mine.calls * theirs.calls / theirs.us for mine, theirs in of_calls if theirs.us >= LONG_ENOUGH_US
    )
    spared = (len(times) - 1) // 4  # left out at each end, so that more than half remain
    high = times[-1 - spared] if len(times) >= 3 else None
    alike = [(mine.us - theirs.us, theirs.us) for mine, theirs in of_calls if mine.calls == theirs.calls]
    return Excess(
        us=step.us - usual.us,
        first_calls=_largest(first_calls),
        overheads=_largest(totals((one.name, one.us) for one in _within(trace.overheads, step))),
        slower=_largest({name: us for name, us in slower.items() if us > 0}),
        less_us=gone + sum(max(0.0, theirs.us - mine.us) for mine, theirs in both.values()),
        times_low=times[spared] if high is not None else None,
        times_high=high,
        alike_us=0.0 if high is None else sum(max(0.0, min(more, (high - 1) * before)) for more, before in alike),
    )


def _largest(us: dict[str, float]) -> dict[str, float]:
    return dict(nlargest(8, us.items(), key=itemgetter(1)))


def _within(slices: Sequence[Op], step: Step) -> Sequence[Op]:
    """Return the slices that start in the step, in the order of their starts."""
    first, last = (bisect.bisect_left(slices, time, key=start_of) for time in (step.start, step.end))
    return slices[first:last]


class _Own(NamedTuple):
    """All calls of one name in a step: their self time (µs), their number and their kinds."""

    us: float
    calls: int
    kinds: set[str]


def _self_by_name(step: Step) -> dict[str, _Own]:
    named = [(OUTSIDE_CALLS if op.name.startswith(STEP) else op.name, op) for op in step.walk()]
    us, kinds = totals((name, self_us(op)) for name, op in named), grouped((name, op.kind) for name, op in named)
    return {name: _Own(us[name], len(some), set(some)) for name, some in kinds.items()}
