"""The recorded steps as a graph of points in time, and the step's time that follows from it.

A node is a point of a CPU thread (a launch, a call that waits, its return, a step's start) or one GPU activity.
A node starts when the nodes that it depends on have ended, each with a lag:

    start = max(end of the node before it on its thread or stream + lag, end of `via` + delay, end of `wait` + wait_lag)
    end = start + dur

The lags are as recorded. Where two nodes it depends on ended, the lag to the later one is what was recorded, and the
lag to the earlier one is the trace's typical one, or less if less was recorded: no node can start later than it did.

What is modelled:
- A thread's CPU work: the time between two of its nodes. This includes Python between ops.
- Launches: an activity starts after its launch call and after the activity before it on its stream.
- A CUDA graph: one launch, many activities. Those on one stream follow each other.
- A call that waits (cudaStreamSynchronize and its kin, a copy of pageable memory): it returns after the activity
  that ended last before it returned. Its own time is what remains.
- A full launch queue: a launch call that takes long while hundreds of activities are queued returns after an activity.
- Waits between streams: the trace does not name the streams of cudaStreamWaitEvent. An activity whose launch follows
  such a call, or that started late for no other reason, waits for the activity of another stream that ended last.
- Threads that wait for each other (the main thread during backward): a thread that pauses while another one works,
  and goes on when that one has stopped, has waited for it.
- Collectives: their recorded time includes waiting for peers, and stays as recorded.

What is not modelled: the profiler's own time, contention (kernels that slow each other down, clocks, the GIL),
memory allocation, other ranks, the order in which the legacy default stream waits for others, a launch queue that
only the changed step would fill. A change of what runs beside what leaves each activity's own duration as it was.
"""

import bisect
from array import array
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import chain, pairwise
from statistics import median_high, median_low

from tracereader.figures.steps import typical
from tracereader.figures.summary import window
from tracereader.trace import Op, Step, Trace, Work, outermost

# The replay of an unchanged trace lies within this share of the recorded step, or it prices no change.
TOLERANCE = 0.03
# Without enough of a trace's own: from a launch call's start to the start of what it launched on an idle GPU,
# and from the end of one activity of a stream to the start of the next. H200 traces: 6.0 to 10 and 1.0 to 1.6 µs.
LATENCY_NS, GAP_NS = 7_000, 1_200
ENOUGH = 10
# No known cause delays an activity longer than this once its launch call has returned and its stream is free.
EXPLAINED_NS = 100_000
# The clocks of CPU and GPU agree this well.
SKEW_NS = 3_000
# What a call that waits takes when there is nothing to wait for.
WAIT_CALL_NS = 3_000
# A launch call this long, with so many activities launched and not ended, waits for room in the queue of 1,024.
BLOCKED_NS, QUEUED = 50_000, 500
NOBODY = -1


class Reason(Enum):
    """Why a trace's changes cannot be priced."""

    NO_GPU_WORK = "the trace has no GPU work"
    NO_LAUNCHES = "most of the GPU work has no launch call in the trace"
    NO_TIME = "the recorded step takes no time"
    NOT_REPRODUCED = "the replay of the unchanged trace does not give back the recorded step"


@dataclass(frozen=True, slots=True)
class Refused:
    """No graph, and why. off: the replayed step over the recorded one, where that is the reason."""

    reason: Reason
    off: float | None = None

    def __str__(self) -> str:
        return self.reason.value + (f" (it gives {self.off:.0%} of it)" if self.off is not None else "")


@dataclass(frozen=True, slots=True)
class StepNodes:
    """One step: the nodes of its start and its end on the CPU, and those of its GPU activities."""

    start: int
    end: int
    work: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Graph:
    """All recorded steps. Nodes are numbered in the order of their recorded starts; times are whole ns.

    A change returns another Graph (dataclasses.replace) and copies only the arrays that it edits. before, via and
    wait hold nodes of a lower number, or NOBODY. A node without any of them starts when it did.
    """

    at: array  # the recorded start
    dur: array  # of a GPU activity; a point of a thread has none
    before: array
    lag: array
    via: array  # an activity's launch; what a call or a thread waited for
    delay: array
    wait: array  # an activity of another stream
    wait_lag: array
    steps: tuple[StepNodes, ...]
    threads: dict[tuple, array]  # by track, its nodes in order
    streams: dict[tuple, array]
    activity: dict[int, int]  # id(Work) -> its node
    returns: dict[int, int]  # id(Op) of a call that waits -> the node of its return
    latency_ns: int  # typical, see above
    gap_ns: int
    recorded_us: float
    trace: Trace = field(repr=False)
    aside: frozenset[int] = frozenset()  # activities on a stream of their own: no step starts with them

    def times(self) -> tuple[array, array]:
        """When each node starts and ends (ns)."""
        starts, ends = array("q", self.at), array("q", self.at)
        columns = (self.at, self.dur, self.before, self.lag, self.via, self.delay, self.wait, self.wait_lag)
        for node, (at, dur, before, lag, via, delay, wait, wait_lag) in enumerate(zip(*columns, strict=True)):
            if before >= 0:
                start = ends[before] + lag
                if start < starts[before]:  # it overlaps the one before it, which has become shorter
                    start = starts[before]
                if via >= 0 and (other := ends[via] + delay) > start:
                    start = other
            else:
                start = ends[via] + delay if via >= 0 else at
            if wait >= 0 and (other := ends[wait] + wait_lag) > start:
                start = other
            starts[node] = start
            ends[node] = start + dur
        return starts, ends

    def step_us(self) -> float:
        """The step's time in the steady state: the pace of the CPU or of the GPU, whichever is slower."""
        starts, ends = self.times()
        return pace_us(self, starts, ends)


def pace_us(graph: Graph, starts: Sequence[int], ends: Sequence[int]) -> float:
    """From one step's start to the next one's (µs): the upper median, on the lane where it is longer.

    Of the last step its own length counts: on the CPU its annotation, on the GPU from its first activity's start to
    its last one's end. So a CPU that runs ahead does not make the step short, and the profiler's synchronization
    behind the last step does not make it long. figures/decoding.py measures the same.
    """
    lanes = [_pace([starts[step.start] for step in graph.steps], ends[graph.steps[-1].end])]
    firsts = [min(starts[node] for node in step.work if node not in graph.aside) for step in graph.steps]
    lanes.append(_pace(firsts, max(ends[node] for node in graph.steps[-1].work)))
    return max(lanes) / 1e3


def _pace(starts: Sequence[int], end: int) -> int:
    return median_high([*(after - before for before, after in pairwise(starts)), end - starts[-1]])


def graph_of(trace: Trace) -> Graph | Refused:
    """The graph of all recorded steps, or why there is none."""
    launched = sum(one.launch is not None for one in trace.work)
    if not any(step.work for step in trace.steps):
        return Refused(Reason.NO_GPU_WORK if not trace.work else Reason.NO_LAUNCHES)
    if 2 * launched < len(trace.work):
        return Refused(Reason.NO_LAUNCHES)
    graph = _Builder(trace).built()
    if graph.recorded_us <= 0:
        return Refused(Reason.NO_TIME)
    off = graph.step_us() / graph.recorded_us
    return graph if abs(off - 1) <= TOLERANCE else Refused(Reason.NOT_REPRODUCED, off)


def is_wait(call: Op) -> bool:
    """Whether a runtime call returns only when the GPU has done something."""
    if "Synchronize" in call.name:
        return True
    copies = [one for one in call.work if one.kind == "memcpy"]
    if not copies:
        return False
    # A small copy from pageable memory is staged: the call returns before the copy ends.
    blocking = "Async" not in call.name or any("Pageable" in one.name for one in copies)
    return blocking and all(one.end <= call.end + SKEW_NS for one in copies)


class _Builder:
    """Collects nodes in any order, then numbers them by time."""

    def __init__(self, trace: Trace):
        self.trace = trace
        self.at, self.dur = [], []
        self.before, self.lag = [], []
        self.via, self.delay = [], []
        self.wait, self.wait_lag = [], []
        self.order = []  # what to sort by: no node may come before what it depends on
        self.work = trace.work
        self.by_end = sorted(trace.work, key=lambda one: one.end)
        self.ends = [one.end for one in self.by_end]
        self.launches = sorted(one.launch.start for one in trace.work if one.launch is not None)

    def built(self) -> Graph:
        trace = self.trace
        steps = _working(trace)
        roots = defaultdict(list)
        for root in chain(*(step.roots for step in trace.steps), trace.outside):
            roots[root.track].append(root)
        for some in roots.values():
            some.sort(key=lambda op: op.start)
        points: dict[tuple, list] = defaultdict(list)  # by thread: (time, rank among equal times, what, key)
        waits_between = defaultdict(list)  # by thread, when it called cudaStreamWaitEvent
        calls = {}
        usual = self._usual_call_ns(roots)
        for track, some in roots.items():
            for root in some:
                for op in root.walk():
                    if op.kind != "runtime":
                        continue
                    if "StreamWaitEvent" in op.name:
                        waits_between[track].append(op.start)
                        continue
                    waits = is_wait(op)
                    blocked = not waits and self._is_blocked(op, usual)
                    if op.work or waits:
                        points[track].append((op.start, 1, "call", op))
                        if waits or blocked:
                            calls[id(op)] = op
                            points[track].append((op.end, 0, "return", op))
        for number, step in enumerate(steps):
            track, start, end = _lane(step, trace)
            points[track].append((start, 1, "start", number))
            points[track].append((end, 0, "end", number))
        handoffs = list(_handoffs(_segments(roots)))
        for place, (one, stopped, other, went_on) in enumerate(handoffs):
            points[one].append((stopped, 0, "stop", place))
            points[other].append((went_on, 0, "go on", place))

        nodes: dict[tuple, int] = {}
        threads: dict[tuple, list[int]] = {}
        for track, some in points.items():
            some.sort(key=lambda point: point[:2])
            mine = threads[track] = []
            for time, _, what, key in some:
                node = self._node(time, 0, mine[-1] if mine else NOBODY)
                nodes[what, id(key) if isinstance(key, Op) else key] = node
                mine.append(node)
        for place, (_, stopped, _, went_on) in enumerate(handoffs):
            node, source = nodes["go on", place], nodes["stop", place]
            self.lag[node], self.via[node], self.delay[node] = 0, source, went_on - stopped

        activity, streams, latency, gap = self._activities(nodes, calls, waits_between)
        returns = {}
        for call in calls.values():
            node = returns[id(call)] = nodes["return", id(call)]
            self._awaited(call, node, activity, usual)
        step_nodes = [
            StepNodes(nodes["start", n], nodes["end", n], tuple(activity[id(one)] for one in step.work))
            for n, step in enumerate(steps)
        ]
        return self._numbered(step_nodes, threads, streams, activity, returns, latency, gap)

    def _node(self, time: int, dur: int, before: int) -> int:
        self.at.append(time)
        self.dur.append(dur)
        self.before.append(before)
        self.lag.append(time - self.at[before] - self.dur[before] if before >= 0 else 0)
        for column in (self.via, self.wait):
            column.append(NOBODY)
        for column in (self.delay, self.wait_lag):
            column.append(0)
        self.order.append(time if before < 0 else max(time, self.order[before]))
        return len(self.at) - 1

    def _usual_call_ns(self, roots: dict[tuple, list[Op]]) -> dict[str, int]:
        times = defaultdict(list)
        for one in self.work:
            if one.launch is not None:
                times[one.launch.name].append(one.launch.dur)
        return {name: median_low(some) for name, some in times.items()}

    def _is_blocked(self, call: Op, usual: dict[str, int]) -> bool:
        """Whether a launch call waited for room in the launch queue."""
        if not call.work or call.dur < max(BLOCKED_NS, 5 * usual[call.name]):
            return False
        launched = bisect.bisect_left(self.launches, call.start) + len(self.work) - len(self.launches)
        return launched - bisect.bisect_right(self.ends, call.start) >= QUEUED

    def _activities(self, nodes: dict, calls: dict, waits_between: dict) -> tuple[dict, dict, int, int]:
        """A node for each activity; the nodes by stream; the typical latency and gap."""
        latency, gap = self._typical()
        activity: dict[int, int] = {}
        streams: dict[tuple, list[int]] = {}
        last: dict[tuple, Work] = {}
        before_that: dict[tuple, Work | None] = {}
        last_launch: dict[tuple, int] = {}
        for one in self.work:
            lane = one.track
            previous = last.get(lane)
            node = self._node(one.start, one.dur, activity[id(previous)] if previous else NOBODY)
            call = one.launch
            came = one.start if previous is None else previous.end
            limits = []
            if previous is not None:
                self.lag[node] = min(one.start - previous.end, gap)
                limits.append((previous.end, self.lag))
            returned = None
            if call is not None:
                launch = nodes.get(("call", id(call)))
                if ("return", id(call)) in nodes and not is_wait(call):
                    launch = nodes["return", id(call)]
                if launch is not None:
                    self.via[node] = launch
                    self.delay[node] = min(one.start - self.at[launch], latency)
                    self.order[node] = max(self.order[node], self.order[launch])
                    limits.append((self.at[launch], self.delay))
                    returned = call.end
            started = max([time + column[node] for time, column in limits], default=one.start)
            late = one.start - started
            if len(last) > (lane in last):
                since = last_launch.get(lane, -(1 << 62))
                told = call is not None and _any_between(waits_between.get(call.track, ()), since, call.start)
                if told or late > SKEW_NS:
                    other = self._other_stream(one, last, before_that)
                    if other is not None and (told or one.start - other.end < EXPLAINED_NS):
                        self.wait[node] = activity[id(other)]
                        self.wait_lag[node] = min(one.start - other.end, gap)
                        limits.append((other.end, self.wait_lag))
            if late > 0 and limits:
                time, column = max(limits, key=lambda limit: limit[0])
                full = one.start - time
                explained = one.start - max(time, returned or 0) <= EXPLAINED_NS
                if explained:
                    column[node] = full
            activity[id(one)] = node
            streams.setdefault(lane, []).append(node)
            before_that[lane], last[lane] = previous, one
            if call is not None:
                last_launch[lane] = call.start
        return activity, streams, latency, gap

    @staticmethod
    def _other_stream(one: Work, last: dict, before_that: dict) -> Work | None:
        """The activity of another stream of its GPU, launched before it, that ended last before it started."""
        best = None
        for lane, latest in last.items():
            if lane == one.track or latest.device != one.device:
                continue
            for other in (latest, before_that[lane]):
                if other is not None and other.end <= one.start + SKEW_NS:
                    if one.launch is not None and other.launch is not None and other.launch.start > one.launch.start:
                        continue
                    if best is None or other.end > best.end:
                        best = other
                    break
        return best

    def _typical(self) -> tuple[int, int]:
        """The median latency of launches on an idle GPU, and the median gap between activities that wait in line."""
        latencies, gaps = [], []
        last: dict[tuple, Work] = {}
        for one in self.work:
            previous, last[one.track] = last.get(one.track), one
            if one.launch is None:
                continue
            if previous is None or previous.end <= one.launch.start:
                latencies.append(one.start - one.launch.start)
            elif previous.launch is not one.launch and one.launch.end <= previous.end:
                gaps.append(one.start - previous.end)
        return (
            median_low(latencies) if len(latencies) >= ENOUGH else LATENCY_NS,
            median_low(gaps) if len(gaps) >= ENOUGH else GAP_NS,
        )

    def _awaited(self, call: Op, node: int, activity: dict[int, int], usual: dict[str, int]) -> None:
        """Tie the return of a call that waits to the activity that it waited for."""
        awaited = None
        if call.work and "Synchronize" not in call.name and is_wait(call):
            awaited = max(call.work, key=lambda one: one.end)
        else:
            index = bisect.bisect_right(self.ends, call.end + SKEW_NS)
            for one in reversed(self.by_end[max(0, index - 64) : index]):
                if one.launch is None or one.launch.start < call.start:
                    awaited = one
                    break
        if awaited is None:
            return
        other = activity[id(awaited)]
        if self.order[other] >= self.order[node]:
            return
        self.via[node] = other
        if awaited.end > call.start:
            own = min(call.dur, WAIT_CALL_NS, call.end - call.start)
            self.lag[node] = min(self.lag[node], own)
            self.delay[node] = call.end - awaited.end
        # Else there was nothing to wait for: it may become the later one, after a change.

    def _numbered(self, steps, threads, streams, activity, returns, latency, gap) -> Graph:
        order = sorted(range(len(self.at)), key=self.order.__getitem__)
        number = array("q", bytes(8 * len(order)))
        for place, old in enumerate(order):
            number[old] = place

        def sorted_column(column: list[int]) -> array:
            return array("q", [column[old] for old in order])

        def targets(column: list[int]) -> array:
            return array("q", [number[column[old]] if column[old] >= 0 else NOBODY for old in order])

        graph = Graph(
            at=sorted_column(self.at),
            dur=sorted_column(self.dur),
            before=targets(self.before),
            lag=sorted_column(self.lag),
            via=targets(self.via),
            delay=sorted_column(self.delay),
            wait=targets(self.wait),
            wait_lag=sorted_column(self.wait_lag),
            steps=tuple(
                StepNodes(number[one.start], number[one.end], tuple(number[node] for node in one.work))
                for one in steps
            ),
            threads={track: array("q", [number[node] for node in some]) for track, some in threads.items()},
            streams={track: array("q", [number[node] for node in some]) for track, some in streams.items()},
            activity={key: number[node] for key, node in activity.items()},
            returns={key: number[node] for key, node in returns.items()},
            latency_ns=latency,
            gap_ns=gap,
            recorded_us=0.0,
            trace=self.trace,
        )
        recorded = pace_us(graph, graph.at, [at + dur for at, dur in zip(graph.at, graph.dur, strict=True)])
        object.__setattr__(graph, "recorded_us", recorded)
        return graph


def _any_between(times: Sequence[int], after: int, until: int) -> bool:
    index = bisect.bisect_right(times, after)
    return index < len(times) and times[index] < until


def _working(trace: Trace) -> list[Step]:
    """The steps that the pace is taken of: a first one far wider, and stubs behind the last call, are left out."""
    spoken_of, _, _ = window(trace, typical(trace))
    most = max(len(step.work) for step in trace.steps)
    return [step for step in spoken_of if 2 * len(step.work) >= most]


def _lane(step: Step, trace: Trace) -> tuple[tuple, int, int]:
    """The thread that a step runs on, its start and its end there."""
    mark = next((op for op in step.roots if op.name == step.name and op.start == step.start), None)
    if mark is not None:
        return mark.track, step.start, step.end
    # A trace without steps: the profiler's last synchronization is none of it.
    launches = max((one.launch.end for one in step.work if one.launch is not None), default=step.start)
    own = [op for op in step.roots if not ("DeviceSynchronize" in op.name and op.start >= launches)] or step.roots
    first, last = min(own, key=lambda op: op.start), max(own, key=lambda op: op.end)
    return last.track, first.start, last.end


def _segments(roots: dict[tuple, list[Op]]) -> Iterator[tuple[int, int, tuple]]:
    """When the threads that run ops were in an op or a call: a time, 0 for an end and 1 for a start, the thread."""
    boundaries = []
    for track, some in roots.items():
        own = list(outermost(some, lambda op: op.kind != "label"))
        if any(op.kind == "op" for op in own):
            for op in own:
                boundaries.append((op.start, 1, track))
                boundaries.append((op.end, 0, track))
    boundaries.sort(key=lambda one: one[:2])
    return iter(boundaries)


def _handoffs(boundaries: Iterable[tuple[int, int, tuple]]) -> Iterator[tuple[tuple, int, tuple, int]]:
    """One thread stopped and another, which had paused since before the first one began, went on."""
    open_in: dict[tuple, int] = defaultdict(int)
    stopped: dict[tuple, int] = {}
    beside: dict[tuple, set] = {}  # the threads that were in an op when this one stopped
    for time, starts, track in boundaries:
        if not starts:
            open_in[track] -= 1
            if not open_in[track]:
                stopped[track] = time
                beside[track] = {other for other, count in open_in.items() if count}
            continue
        if not open_in[track]:
            paused = stopped.get(track, -(1 << 62))
            others = [
                other
                for other, when in stopped.items()
                if other != track and when > paused and not open_in[other] and other not in beside.get(track, ())
            ]
            if others:
                other = max(others, key=stopped.__getitem__)
                yield other, stopped[other], track, time
        open_in[track] += 1
