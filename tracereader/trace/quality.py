"""What a recording can decide. Regime, figures, findings, proposals and --json ask it, and decide none of this again.

Established here: GPU activities whose records are missing, durations that cannot be right, calls that a program makes
only once (loading code, the first allocations, compilation, the capture of CUDA graphs), and GPU work from before the
recording for which the first step waited.
"""

import bisect
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from heapq import nlargest
from itertools import chain, count, pairwise

from msgspec.structs import replace

from tracereader.trace.grouped import grouped, totals
from tracereader.trace.intervals import Intervals, length_between, union
from tracereader.trace.labels import COMPILE_ID, COMPILING, REGION
from tracereader.trace.slices import Cold, Earlier, Mixed, Op, Quality, Step, Work, start_of
from tracereader.trace.waits import MAY_WAIT

CAPTURE_EDGE = re.compile(r"Stream(Begin|End)Capture")
# Calls that give the GPU a kernel or a graph, in CUDA's and HIP's names. The profiler records an activity for each, as
# it does in all of the 2.3 million such calls of this repository's own recordings. A memset of no bytes has none.
LAUNCH = re.compile(r"^(?:cuda|cu|hip)\w*(?:Launch\w*Kernel|ModuleLaunch|GraphLaunch|LaunchByPtr)")
# The profiler has recorded an activity for each of 15,471 such calls, too.
COPY = re.compile(r"^(?:cuda|cu)Memcpy\w*Async")
REPLAY = re.compile(r"^(?:cuda|cu|hip)GraphLaunch")
# A replay is compared with so many of the largest ones, so that a long trace takes no longer.
REPLAYS_COMPARED = 20
# An activity cannot end after a later one of its stream ends. The clocks of such records differ by less than this.
IN_ORDER_NS = 100_000
# Calls that load code, and what the driver adds to a launch that loads its kernel.
LOADS = re.compile(r"(?:Module|Library)Load|FatBinary|^cuInit$|^hipInit$")
LOADING = "Loading"
REGION_ID = re.compile(rf"{REGION}: (\d+/\d+)")
# Calls that start CUDA or its libraries if they take SLOW_NS, and calls that may load a kernel's code.
STARTS = re.compile(r"GetDevice(?:Properties|Count)|GetStreamPriorityRange|SetDevice|StreamCreate|StreamIsCapturing")
MAY_LOAD = re.compile(r"Launch|Func|Occupancy|KernelGet")
ALLOCATES = re.compile(r"^(?:cuda|hip)(?:Malloc|HostAlloc|MallocHost|HostMalloc)(?:Async)?$")
FREES = re.compile(r"^(?:cuda|hip)Free(?:Host)?$")
# Inductor's CUDA graph trees record a graph in this annotation.
RECORDS_A_GRAPH, INSTANTIATES = "CUDAGraphNode.record", "GraphInstantiate"
# A call that only starts CUDA or a library takes at least this long (ns).
SLOW_NS = 1_000_000
# The first launch of a kernel has loaded code if it takes this long (ns) from its op's start to the launch's return,
# this many times the lower quartile of all launches, and this many times the kernel's later ones. In a cold step on an
# H100, 12 of 131 launches took 1.7 to 147 ms each. Warm launches take 10 to 200 µs while the profiler records.
FIRST_LAUNCH_NS, FIRST_LAUNCH_TIMES, LATER_TIMES = 300_000, 10, 3
# So many of the longest ones count, so that a hostile trace takes no longer.
FIRST_LAUNCHES = 200
# Ops on lists of tensors, whose CPU time before the launch grows with the tensors.
ON_LISTS = re.compile(r"^aten::_(?:foreach|fused)_")
# Waits that are shorter than this share of the step, or this time (ns), do not change what is concluded.
LEAST_SHARE, LEAST_NS = 0.01, 100_000
KINDS = (CAPTURE_EDGE, LAUNCH, COPY, LOADS, STARTS, MAY_LOAD, ALLOCATES, FREES)
ASKED = re.compile("|".join(one.pattern for one in KINDS) + f"|{INSTANTIATES}")
# Steps are of two kinds if the shortest of the longer ones takes this many times the longest of the others. On the H200
# the steps after the first differ by up to 1.4.
APART = 1.5
# With fewer steps, a single longer one may come again.
ENOUGH_STEPS = 5


def clip(work: Sequence[Work], device_waits: Iterable[Op]) -> tuple[int, int]:
    """End each activity that ends after a later one of its stream when the next one starts: activities, and ns.

    A stream runs its activities in order, so such a duration is wrong: ROCm has recorded some that overflowed. A
    stream's last activity ends when a call that waited for the whole GPU has returned. Those of CUDA graphs are left as
    they are, because a graph's branches may share a stream's number. work: by start. device_waits: those calls.
    """
    # With several GPUs, the trace does not tell which of them a call waited for.
    alone = len({one.device for one in work}) == 1
    waits = sorted((op.start, op.start + op.dur) for op in device_waits) if alone else []
    found = taken = 0
    for some in grouped(((one.device, one.track), one) for one in work if not one.from_graph).values():
        last = some[-1]
        place = bisect.bisect_right(waits, (last.launch.start if last.launch is not None else math.inf, math.inf))
        least, following = math.inf, None
        if place < len(waits) and last.start < waits[place][1] < last.start + last.dur - IN_ORDER_NS:
            found, taken = found + 1, taken + last.start + last.dur - waits[place][1]
            last.dur = waits[place][1] - last.start
        for one in reversed(some):
            end = one.start + one.dur
            if end > least + IN_ORDER_NS:
                found, taken = found + 1, taken + end - following.start
                end = following.start
                one.dur = end - one.start
            least, following = min(least, end), one
    return found, taken


def earlier_work(device_waits: Iterable[Op], work: Sequence[Work]) -> list[Work]:
    """Return the GPU work that was launched before the recording: it has no launch, and its stream's launches follow.

    That work has ended when a recorded call has waited for the whole GPU. With several GPUs, the trace does not tell
    which of them a call waited for. work: by start. device_waits: those calls.
    """
    unlaunched = [one for one in work if one.launch is None]
    if not unlaunched or len(unlaunched) == len(work):
        return []
    first: dict[tuple, int] = {}  # by stream, the start of its first launched activity
    for one in work:
        if one.launch is not None:
            first.setdefault((one.device, one.track), one.start)
    ends = (op.end for op in device_waits)
    idle_since = min(ends, default=math.inf) if len({one.device for one in work}) == 1 else math.inf
    return [one for one in unlaunched if one.start <= min(first.get((one.device, one.track), -math.inf), idle_since)]


def capture_stretches(edges: Iterable[Op], first: int, last: int) -> tuple[Intervals, int]:
    """Return the merged intervals (ns) of captures, and the number of captures.

    edges: the calls that begin and end captures. first, last: where a capture that was cut off begins or ends.
    """
    begun: dict[tuple, int] = {}
    found = []
    for op in sorted(edges, key=start_of):
        if CAPTURE_EDGE.search(op.name)[1] == "Begin":
            begun[op.track] = op.start
        else:
            found.append((begun.pop(op.track, first), op.end))
    found += [(start, last) for start in begun.values()]
    return union(found), len(found)


def quality_of(
    steps: tuple[Step, ...],
    ops: Sequence[Op],
    op_names: Iterable[str],
    work: Sequence[Work],
    overheads: Sequence[Op],
    clipped: tuple[int, int],
) -> tuple[Quality, tuple[Step, ...]]:
    """Return what a recording can decide, and the steps that count.

    If some steps have all records of what they launched, the longest run of such steps counts; otherwise all steps do.
    clipped: the result of clip().
    """
    wanted = {name for name in op_names if name == RECORDS_A_GRAPH or name.endswith(COMPILING) or ASKED.search(name)}
    names = grouped((op.name, op) for op in ops if op.name in wanted) if wanted else {}
    edges = [op for name, some in names.items() if CAPTURE_EDGE.search(name) for op in some if op.kind == "runtime"]
    captures = []
    if edges:
        captures, _ = capture_stretches(edges, min(map(start_of, ops)), max(op.end for op in ops))
    calls, lost = _lost(names, captures)
    partly = _partly_lost((op for name, some in names.items() if REPLAY.search(name) for op in some if op.work), steps)
    kept, all_lost = _kept(steps, [*lost, *partly])
    by_name = Counter(op.name for op in lost)
    quality = Quality(
        launches=sum(number for name, number in calls.items() if LAUNCH.match(name)),
        lost=sum(number for name, number in by_name.items() if LAUNCH.match(name)),
        lost_calls={name: (number, calls[name]) for name, number in by_name.most_common()},
        partly_lost=len(partly),
        left_out=tuple(step.name for step in steps_left_out(steps, kept)),
        incomplete=all_lost,
        clipped=clipped[0],
        clipped_us=clipped[1] / 1e3,
        cold=_cold(kept, names, work, overheads, captures, edges, lost),
    )
    if all_lost:
        return quality, kept
    mixed, outlier = _kinds(kept, quality)
    return replace(quality, earlier=_earlier(kept, work), mixed=mixed, outlier=outlier), kept


def _lost(names: dict[str, list[Op]], captures: Sequence[tuple[int, int]]) -> tuple[Counter, list[Op]]:
    """Return the number of calls that launch or copy by name, and those without a record of GPU work."""
    calls, lost = Counter(), []
    for name, some in names.items():
        if not LAUNCH.match(name) and not COPY.match(name):
            continue
        for op in some:
            if op.kind != "runtime" or (op.parent is not None and LAUNCH.match(op.parent.name)):
                continue
            has_work = op.work or any(child.work for child in op.children)
            if has_work or not length_between(captures, op.start, op.start + 1):
                calls[name] += 1
                if not has_work:
                    lost.append(op)
    return calls, lost


def _partly_lost(replays: Iterable[Op], steps: Sequence[Step]) -> list[Op]:
    """Return the launches of CUDA graphs with fewer records than another launch of the same graph.

    Recordings do not name the graph. Launches at the same place in steps or annotations that launch as many graphs are
    compared; they launch the same graph if another one has all kernels of theirs, with the same grids. That holds for
    all 290 such launches of this repository's recordings.
    """
    starts, groups, places = [step.start for step in steps], defaultdict(list), defaultdict(list)
    for op in sorted(replays, key=start_of):
        label = op
        while len(steps) == 1 and label.parent is not None:
            label = label.parent
        if len(steps) > 1:
            groups["", bisect.bisect_right(starts, op.start)].append(op)
        elif label.kind == "label":
            groups[label.name, label.start].append(op)
    for (name, _), some in groups.items():
        for place, op in enumerate(some):
            places[name, len(some), place].append(op)
    found = []
    for some in places.values():
        if len({len(op.work) for op in some}) > 1:
            counts = [Counter((one.name, str(one.args.get("grid"))) for one in op.work) for op in some]
            largest = nlargest(REPLAYS_COMPARED, counts, key=Counter.total)
            found += [op for op, mine in zip(some, counts, strict=True) if any(_lacks(mine, one) for one in largest)]
    return found


def _lacks(mine: Counter, other: Counter) -> bool:
    """Return whether the other one has all that this one has some of, and more of something."""
    return mine.keys() <= other.keys() and any(mine[what] < number for what, number in other.items())


def _kept(steps: tuple[Step, ...], lost: Sequence[Op]) -> tuple[tuple[Step, ...], bool]:
    """Return the longest run of steps without lost records, and whether every step that launches has lost some."""
    if not lost:
        return steps, False
    starts = sorted(op.start for op in lost)
    runs: list[list[Step]] = [[]]
    for step in steps:
        if any(step.start <= start < step.end for start in starts[bisect.bisect_left(starts, step.start) :][:1]):
            runs.append([])
        else:
            runs[-1].append(step)
    longest = max(runs, key=lambda run: sum(bool(step.work) for step in run))
    return (tuple(longest), False) if any(step.work for step in longest) else (steps, True)


def steps_left_out(steps: Sequence[Step], kept: Sequence[Step]) -> Iterable[Step]:
    """Yield the steps that are not among those that are kept."""
    known = set(map(id, kept))
    return (step for step in steps if id(step) not in known)


def _cold(
    steps: Sequence[Step],
    names: dict[str, list[Op]],
    work: Sequence[Work],
    overheads: Sequence[Op],
    captures: Sequence[tuple[int, int]],
    edges: Sequence[Op],
    lost: Sequence[Op],
) -> tuple[Cold, ...]:
    """Return the time in calls that a program makes only once, in the steps, without overlaps on a thread."""
    found = []

    def add(ops: Iterable[Op], what: str) -> None:
        found.extend(Cold(op.track, op.start, op.start + op.dur, what) for op in ops)

    for name, some in names.items():
        some = [op for op in some if op.kind == "runtime"] if ASKED.search(name) else some
        if LOADS.search(name):
            add(some, "loading code")
        elif STARTS.search(name):
            add((op for op in some if op.dur >= SLOW_NS), "starting CUDA")
        elif name == RECORDS_A_GRAPH or INSTANTIATES in name:
            add(some, "capturing CUDA graphs")
    phases = [op for name, some in names.items() if name.endswith(COMPILING) for op in some]
    add(_first_compilations(phases, steps) if phases else (), "compilation")
    found += [Cold(edges[0].track if edges else (), start, end, "capturing CUDA graphs") for start, end in captures]
    add(_loading_calls(names, overheads), "loading code")
    found += _first_launches(work, steps, lost)
    allocations = [op for name, some in names.items() if ALLOCATES.match(name) for op in some if op.kind == "runtime"]
    frees = any(FREES.match(name) for name in names) and not any(one.start < steps[0].end for one in found)
    # Memory that is freed and allocated again in a warm step is a finding of its own.
    if not frees and all(op.start < steps[0].end for op in allocations):
        add(allocations, "first allocations")
    return tuple(_only_once(list(_without_overlaps(found, steps)), steps))


def _only_once(found: Sequence[Cold], steps: Sequence[Step]) -> Iterable[Cold]:
    """Yield what the program does only once: a step's time of a kind, if no other step has about as much of it."""
    starts = [step.start for step in steps]
    places = [bisect.bisect_right(starts, one.start) for one in found]
    sums = totals(((place, one.what), one.end - one.start) for place, one in zip(places, found, strict=True))
    alike = {what: sorted(some) for what, some in grouped((what, ns) for (_, what), ns in sums.items()).items()}
    for place, one in zip(places, found, strict=True):
        ns, some = sums[place, one.what], alike[one.what]
        if bisect.bisect_right(some, LATER_TIMES * ns) - bisect.bisect_left(some, ns / LATER_TIMES) == 1:
            yield one


def _first_compilations(phases: Sequence[Op], steps: Sequence[Step]) -> list[Op]:
    """Return torch.compile's phases in a step that compiles frames for the first time, and none of them again."""
    cold = []
    for step in steps:
        names = {op.name for op in step.walk()}
        ids = [found for name in names if (found := COMPILE_ID.search(name) or REGION_ID.search(name))]
        if all(one[1].endswith("/0") for one in ids) and (ids or step is steps[0]):
            cold.append((step.start, step.end))
    return [op for op in phases if length_between(cold, op.start, op.start + 1)]


def _loading_calls(names: dict[str, list[Op]], overheads: Sequence[Op]) -> Iterable[Op]:
    """Yield the calls during which the driver is recorded to load code."""
    loading = sorted(one.start for one in overheads if LOADING in one.name)
    for name, some in names.items() if loading else ():
        for op in some if MAY_LOAD.search(name) else ():
            place = bisect.bisect_left(loading, op.start)
            if op.kind == "runtime" and place < len(loading) and loading[place] < op.start + op.dur:
                yield op


def _first_launches(work: Sequence[Work], steps: Sequence[Step], lost: Sequence[Op]) -> Iterable[Cold]:
    """Yield the time from an op's start to the return of its launch, where it is long for the first of a kernel.

    A library's start (cuBLAS creates its handle in the first product) and lazily loaded code are in that time, and the
    GPU is idle. It is busy where a launch waits for room in the queue. If another step's call of the same op takes as
    long, the program makes such calls in each step. lost: calls without a record.
    """
    found, seen = [], set()
    reached, busy_until = {}, -math.inf
    for one in work:
        op, name = one.launch, one.name
        if op is not None:
            if name not in seen and "Graph" not in op.name:
                start, end = max(op.outermost_call().start, reached.get(op.track, -math.inf)), op.start + op.dur
                if end - start >= FIRST_LAUNCH_NS and busy_until <= (start + end) // 2:
                    found.append((name, op, start))
            seen.add(name)
            reached[op.track] = op.start + op.dur
        if one.start + one.dur > busy_until:
            busy_until = one.start + one.dur
    if not found:
        return
    times, by_op = _until_launched(work, lost)
    everything = sorted(chain.from_iterable(times.values()))
    usual = max(FIRST_LAUNCH_NS, FIRST_LAUNCH_TIMES * everything[len(everything) // 4])
    found = nlargest(FIRST_LAUNCHES, found, key=lambda one: one[1].start + one[1].dur - one[2])
    for name, op, start in found:
        end, later = op.start + op.dur, sorted(times[name][1:])
        least = max([usual, *(LATER_TIMES * time for time in later[len(later) // 2 :][:1])])
        if end - start < least:
            continue
        below = list(op.outermost_call().walk())
        waits = (one.start + one.dur for one in below if MAY_WAIT.search(one.name))
        start = max([start, *(time for time in waits if time <= op.start)])
        step = next((step for step in steps if step.start <= op.start < step.end), None)
        comes_again = step is not None and any(
            not step.start <= begin < step.end and LATER_TIMES * (until - begin) >= end - start
            for begin, until in by_op[below[0].name]
        )
        if end - start >= least and not comes_again and not any(ON_LISTS.search(one.name) for one in below):
            yield Cold(op.track, start, end, "loading code")


def _until_launched(
    work: Sequence[Work], lost: Sequence[Op]
) -> tuple[dict[str, list[int]], dict[str, list[tuple[int, int]]]]:
    """Return the times (ns) from an op's start to its launch's return by kernel, and their ends by outermost op.

    The latter has lost launches, too.
    """
    times, reached = defaultdict(list), {}
    outermost_of_lost = ((op.outermost_call(), op) for op in lost)
    by_op = grouped((outermost.name, (outermost.start, op.start + op.dur)) for outermost, op in outermost_of_lost)
    for one in work:
        op = one.launch
        if op is not None and op.work[0] is one and "Graph" not in op.name:
            outermost, end = op.outermost_call(), op.start + op.dur
            start = max(outermost.start, reached.get(op.track, -math.inf))
            reached[op.track] = end
            times[one.name].append(end - start)
            by_op[outermost.name].append((start, end))
    return times, by_op


def _without_overlaps(found: Iterable[Cold], steps: Sequence[Step]) -> Iterator[Cold]:
    """Yield the parts in the steps by start. Of several that overlap on a thread, the first one counts."""
    reached: dict[tuple, int] = {}
    first, last = steps[0].start, steps[-1].end
    for one in sorted(found, key=start_of):
        start, end = max(one.start, reached.get(one.track, first)), min(one.end, last)
        if start < end:
            yield Cold(one.track, start, end, one.what)
            reached[one.track] = end


def _earlier(steps: Sequence[Step], work: Sequence[Work]) -> Earlier | None:
    """Return the first step's wait for earlier GPU work: see Earlier.

    It makes the step longer than others by what the GPU still had to do when the step began, less what it still has to
    do when the step ends: in a loop in which the CPU runs ahead of the GPU, each step waits like that. So does a
    program that waits at the start of each step.
    """
    step = steps[0]
    launched = [one for one in step.work if one.launch is not None]
    if not launched:
        return None
    first = min(launched, key=start_of)
    own = {id(one) for one in step.work}
    before = [one for one in work if one.start < first.start and id(one) not in own]
    ended = max((one.start + one.dur for one in before), default=step.start)
    waits = _first_waits(step, min(ended, first.start))
    # The GPU was busy with work that is not in the trace while a call waited for it, or after a launch had returned.
    delay = first.start - max(first.launch.end, ended, step.start)
    hidden = delay if delay > LEAST_NS and first.launch.start >= step.start else 0
    pending = max(0, max(one.start + one.dur for one in step.work) - step.end)
    ns = sum(min(op.end, first.start) - max(op.start, step.start) for op in waits) + hidden - pending
    if ns < (least := max(LEAST_NS, LEAST_SHARE * (step.end - step.start))):
        return None
    # The steps after it wait for the work of the step before each.
    usual = []
    for previous, one in pairwise(steps):
        if previous.work and one.work:
            begun = one.work[0].start
            behind = _first_waits(one, min(begun, max(work.start + work.dur for work in previous.work)))
            usual.append(sum(min(op.end, begun) - max(op.start, one.start) for op in behind))
    ns -= sorted(usual)[len(usual) // 2] if usual else 0
    if ns < least:
        return None
    until = min(first.start, max(ended, *(op.end for op in waits))) if waits and not hidden else first.start
    return Earlier(until, ns, tuple(waits))


def _first_waits(step: Step, ended: int) -> list[Op]:
    """Return a step's calls that wait for the GPU before the step has launched anything, or before earlier work ended.

    The copy of a tensor to the CPU waits for earlier work, and so does the call after it. ended: when that was (ns).
    """
    launch = min((one.launch.start for one in step.work if one.launch is not None), default=step.start)
    calls = step.named(MAY_WAIT.search)
    calls = [op for op in calls if op.kind == "runtime" and op.start < max(launch, ended)]
    return [op for op in calls if not op.work or op.end > ended > op.start]


def _kinds(steps: Sequence[Step], quality: Quality) -> tuple[Mixed | None, int | None]:
    """Return whether the steps are of two kinds, and the start of the only step that is far longer than all others.

    Where the CPU runs ahead of the GPU, only steps that are longer on both lanes are longer.
    """
    on_gpu = any(step.work for step in steps)
    amounts = [len(step.work) if on_gpu else step.size for step in steps]
    least = usual_amount(amounts) / 2
    working = [step for step, amount in zip(steps, amounts, strict=True) if amount >= least and step.us]
    if len(working) < ENOUGH_STEPS - 1:
        return None, None
    long = _longer({step.start: step.end - step.start for step in working})
    if on_gpu and long:
        firsts = {step.start: step.work[0].start for step in working}
        # A delay on the GPU is before a step's first activity, or from it to the next step's (last step: to its end).
        pairs, last = list(pairwise(working)), working[-1]
        times = {after.start: firsts[after.start] - firsts[before.start] for before, after in pairs}
        longer = _longer(times)
        delayed = longer | {before.start for before, after in pairs if after.start in longer}
        least = APART * max((ns for start, ns in times.items() if start not in longer), default=0)
        if max(last.end, *(one.start + one.dur for one in last.work)) - firsts[last.start] >= least:
            delayed.add(last.start)
        long = {start for start in long if start in delayed or start == working[0].start}
    first = working[0]
    others = long - {first.start}
    longest = max((step.us for step in working if step.start in others), default=0.0)
    if len(others) < 2 or quality.cold_in(first) or first.us > APART * longest:
        long = others  # it is longer for being the first
    if len(long) >= 2:
        return Mixed(frozenset(long)), None
    return None, min(long) if long and len(working) >= ENOUGH_STEPS else None


def usual_amount(amounts: Iterable[int]) -> int:
    """Return the median of the steps' amounts of work, without those of none. Stubs do less than half of it."""
    some = sorted(amount for amount in amounts if amount)
    return some[len(some) // 2] if some else 0


def _longer(times: dict[int, int]) -> set[int]:
    """Return the keys of the times above the widest gap between them; none if all times are alike."""
    in_order = sorted(times, key=times.__getitem__)
    ratios = [times[after] / max(1, times[before]) for before, after in pairwise(in_order)]
    widest, place = max(zip(ratios, count(1), strict=False), default=(0.0, 0))
    return set(in_order[place:]) if widest >= APART else set()
