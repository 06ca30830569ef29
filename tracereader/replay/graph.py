"""The recorded steps as a graph of points in time, and the step's time that follows from it.

A node is a point of a CPU thread (a launch, a call that waits, its return, a step's start) or one GPU activity.
A node starts when the nodes that it depends on have ended, each with a lag:

    start = max(end of the node before it on its thread or stream + lag, end of `via` + delay, end of `wait` + wait_lag)
    end = start + dur

A node waited for the dependency that ended last, and the lag to that one is the recorded lag. The lags to the other
dependencies are the trace's typical lags, or shorter if shorter ones were recorded. So an unchanged node starts at its
recorded time. The exception is a node that started much later than all known causes allow (EXPLAINED_NS). Such a delay
is left out, and a trace whose step depends on it is refused.

What is modelled:
- A thread's CPU work: the time between two of its nodes. This includes Python between ops.
- Launches: an activity starts after its launch call and after the activity before it on its stream.
- A CUDA graph: one launch, many activities. Those on one stream follow each other.
- Waiting calls (cudaStreamSynchronize and similar calls, copies of pageable memory): a call returns after the activity
  that ended last before it returned. Its self time is at most that of a call that does not need to wait.
- A full launch queue: a launch call that takes long while hundreds of activities are queued returns after an activity
  has ended.
- Waits between streams: recorded synchronizations (CUPTI's) decide, if the trace has them. Otherwise the trace does not
  name the streams of cudaStreamWaitEvent. An activity whose launch follows such a call, or that started late for no
  other reason, waits for the activity of another stream that ended last.
- Threads that wait for each other (the main thread during backward): a thread has waited for another one if it pauses
  while the other one works, and continues when the other one has stopped.
- Collectives: their recorded time includes the wait for peers, and does not change.

What is not modelled:
- The profiler's self time: the replayed step includes it, as a recorded step does.
- The CPU's speed: after a wait for the GPU, and beside busy data loaders, the same op takes up to twice as long.
- Contention: overlapping kernels, clocks, the GIL. An activity's duration does not change.
- Memory allocation, other ranks, a launch queue that only the changed step would fill, and the order that the legacy
  default stream keeps with others.
- Programmatic dependent launch that only the changed step would use.
- A thread that waits for no other thread (a data loader's) keeps its own pace.
"""

import bisect
import math
import operator
from array import array
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import Enum
from functools import cached_property
from itertools import chain, islice
from statistics import median_low

import msgspec
from msgspec.structs import replace

from tracereader.figures.pace import on_busiest_stream, on_its_thread, pace, working_steps
from tracereader.figures.steps import typical
from tracereader.trace import Op, Step, Sync, Trace, Work, outermost
from tracereader.trace.grouped import grouped
from tracereader.trace.intervals import Intervals, length_between
from tracereader.trace.waits import MAY_WAIT, OF_THE_DEVICE, is_wait

# Defaults for traces with fewer than ENOUGH measurements: the launch latency on an idle GPU, and the gap between two
# activities of a stream. H200 traces show 6.0 to 10 µs and 1.0 to 1.6 µs.
LATENCY_NS, GAP_NS = 7_000, 1_200
ENOUGH = 10
# No known cause delays an activity longer than this once its launch call has returned and its stream is free.
EXPLAINED_NS = 100_000
# The clocks of CPU and GPU agree within this time.
SKEW_NS = 3_000
# The time of a waiting call if there is nothing to wait for.
WAIT_CALL_NS = 3_000
# A launch call this long while this many activities are launched and not ended waits for room in the queue of 1,024.
BLOCKED_NS, QUEUED = 50_000, 500
# A call's awaited activity is searched among this many activities that ended last.
AMONG_LAST = 64
# A thread waited for one of this many threads that stopped last. Programs run ops on fewer threads.
MOST_THREADS = 64
NOBODY = -1
COLUMNS = ("at", "dur", "before", "lag", "via", "delay", "wait", "wait_lag")
LAG_OF = {"via": "delay", "wait": "wait_lag"}
# What CUPTI calls the synchronizations that depend on one stream or event.
STREAM_WAITS, STREAM, EVENT = "Stream Wait Event", "Stream Sync", "Event Sync"


class Reason(Enum):
    """Why a trace's changes cannot be priced."""

    NO_GPU_WORK = "the trace has no GPU work"
    NO_LAUNCHES = "most of the GPU work has no launch call in the trace"
    NO_CPU_SLICES = "a step has no slice on the CPU"
    NO_TIME = "the recorded step takes no time"
    INCOMPLETE = "GPU records are missing"
    NOT_REPRODUCED = "the replay of the unchanged trace does not reproduce the recorded step"
    DISTURBED = "other programs probably used the CPU's cores while it was recorded"
    NOT_READ = "the trace of a rank cannot be read again on this machine"


class Refused(msgspec.Struct, frozen=True):
    """The reason why there is no graph. off: the replayed step divided by the recorded one, if that is the reason."""

    reason: Reason
    off: float | None = None

    def __str__(self) -> str:
        if self.off is None:
            return self.reason.value
        return f"{self.reason.value} (the replayed step takes {self.off:.0%} of the recorded time)"


class StepNodes(msgspec.Struct, frozen=True):
    """One step: the nodes of its start and its end on the CPU, and of the GPU activities that decide its pace."""

    start: int
    end: int
    work: tuple[int, ...]  # only of the busiest stream, because a stream of copies may run far ahead
    firsts: tuple[int, ...]  # of `work`, the first one of each of its streams: one of them starts first


class Graph(msgspec.Struct, frozen=True, eq=False, dict=True):
    """The replayed steps. Nodes are numbered in the order of their recorded starts; times are whole ns.

    A change returns another Graph (msgspec.structs.replace) and copies only the lists that it edits. before, via and
    wait hold nodes of a lower number, or NOBODY. A node without dependencies starts at its recorded time. Lists are
    replayed a quarter faster than arrays.
    """

    at: list[int]  # the recorded start
    dur: list[int]  # of a GPU activity; a point of a thread has none
    before: list[int]
    lag: list[int]
    via: list[int]  # an activity's launch, or the node that a call or a thread waited for
    delay: list[int]
    wait: list[int]  # an activity of another stream
    wait_lag: list[int]
    steps: tuple[StepNodes, ...]
    threads: dict[tuple, array]  # by track, its nodes in order
    times: dict[tuple, array]  # by track, the recorded starts of its nodes
    on_cpu: bytes  # for each node, whether it is a point of a thread
    streams: dict[tuple, array]
    activity: dict[int, int]  # id(Work) -> its node
    returns: dict[int, int]  # id(Op) of a call that waits -> the node of its return
    latency_ns: int  # the trace's typical launch latency
    gap_ns: int  # the trace's typical gap between two activities of a stream
    recorded_us: float  # over all recorded steps
    trace: Trace  # with the replayed steps only
    mixed: bool = False  # whether the steps are of two kinds, so that a step's time is the mean of all
    repeats: bool = False  # whether steps like the single one of this graph follow it
    replayed_us: float = 0.0  # the step's time in the replay of the unchanged graph
    aside: frozenset[int] = frozenset()  # activities moved to a stream of their own; no step starts with them
    gone: Mapping[tuple, Intervals] = {}  # by track, the CPU time that changes have removed
    of_recording: Mapping[int, int] = {}  # by node, the part of its lag that only recording a CUDA graph takes

    @cached_property
    def launched(self) -> tuple[dict[int, int], dict[int, int]]:
        """Return how many GPU activities each op, call and annotation launches, and each launching call's outermost op.

        Both are by id(Op). The outermost op is given as its id, and no annotation separates it from the call.
        """
        calls = {id(one.launch): one.launch for step in self.trace.steps for one in step.work if one.launch is not None}
        counts: dict[int, int] = defaultdict(int)
        outermost_of: dict[int, int] = {}
        for key, op in calls.items():
            launched, top = len(op.work), key
            counts[key] += launched
            while (op := op.parent) is not None and op.kind != "label":
                top = id(op)
                counts[top] += launched
            outermost_of[key] = top
            while op is not None:
                counts[id(op)] += launched
                op = op.parent
        return counts, outermost_of

    @cached_property
    def at_cpu_speed(self) -> dict[float, float]:
        """The steps' times (µs) by the factor of the CPU time, for step_us_at()."""
        return {}

    @property
    def cpu_us(self) -> float:
        """Return the time (µs) that a step's threads work, the mean of the steps. Waits for the GPU do not count."""
        return sum([self.lag[node] for nodes in self.threads.values() for node in nodes]) / 1e3 / len(self.steps)

    def is_gone(self, op: Op) -> bool:
        """Return whether changes have removed the CPU time in which this op or call starts."""
        return length_between(self.gone.get(op.track, []), op.start, op.start + 1) > 0

    def ends(self) -> list[int]:
        """Return the end of each node (ns). Its start is its end minus its `dur`."""
        ends: list[int] = []
        add, at, durations = ends.append, self.at, self.dur
        columns = (getattr(self, name) for name in COLUMNS if name != "at")
        for dur, before, lag, via, delay, wait, wait_lag in zip(*columns, strict=True):
            if before >= 0:
                start = ends[before] + lag
                if lag < 0:  # it overlaps the node before it, which may have become shorter
                    start = max(start, ends[before] - durations[before])
                if via >= 0 and (other := ends[via] + delay) > start:
                    start = other
            else:
                start = ends[via] + delay if via >= 0 else at[len(ends)]
            if wait >= 0 and (other := ends[wait] + wait_lag) > start:
                start = other
            add(start + dur if dur else start)  # one number where both are the same
        return ends

    def step_us(self) -> float:
        """Return the step's time in the steady state (µs), the median of the times from step to step; see pace().

        The result is the longer of the CPU's and the GPU's time. If the last step counts, it has its own length, which
        is its annotation on the CPU, and on the GPU the time from its first activity's start to its last one's end on
        the stream that is the busiest over all steps. So a CPU or a stream of copies that runs ahead does not make the
        step short, and the profiler's synchronization after the last step does not make it long.
        """
        return max(self.lanes_us)

    @cached_property
    def lanes_us(self) -> tuple[float, float]:
        """Return the step's time on the CPU and on the GPU, which is 0 without GPU work; see step_us()."""
        ends, dur, steps, aside = self.ends(), self.dur, self.steps, self.aside
        # Points of a thread take no time.
        on_cpu = pace([ends[step.start] for step in steps], ends[steps[-1].end], self.mixed)
        if not self.activity:
            return on_cpu / 1e3, 0.0
        if self.repeats and (again := self._ends_of_the_next(ends)):
            # The CPU starts the next step when it ends this one.
            start, end, last = steps[0].start, steps[0].end, max(steps[0].work, key=ends.__getitem__)
            to_the_next = ends[end] - ends[start] + again[last] - ends[last]
            return (again[end] - again[start]) / 1e3, to_the_next / 1e3
        works = [set(step.work) - aside or step.work if aside else step.firsts for step in steps]
        firsts = [min([ends[node] - dur[node] for node in work]) for work in works]
        return on_cpu / 1e3, pace(firsts, max(map(ends.__getitem__, steps[-1].work)), self.mixed) / 1e3

    def _ends_of_the_next(self, ends: list[int]) -> list[int] | None:
        """Return the end of each node (ns) in a next step like this one, as if both steps started at the same time.

        Each stream is busy until it has ended this step's work. None if that is before the next step needs it.
        """
        (step,) = self.steps
        start, period = ends[step.start], ends[step.end] - ends[step.start]
        latest = max(map(ends.__getitem__, step.work)) - period
        waits = [node for node in self.returns.values() if NOBODY < self.via[node] <= step.start < node]
        if latest <= min([ends[node] - self.dur[node] for node in (*step.firsts, *waits)]):
            return None
        before, lag, wait, wait_lag = (list(getattr(self, name)) for name in ("before", "lag", "wait", "wait_lag"))
        for nodes in self.streams.values():
            after = nodes[bisect.bisect_right(nodes, step.start) :]  # without activities of earlier steps
            for some in ([node for node in after if (node in self.aside) is moved] for moved in (False, True)):
                if some:
                    before[some[0]], lag[some[0]] = step.start, ends[some[-1]] - period + self.gap_ns - start
        for node in waits:  # for the work of earlier steps
            wait[node], wait_lag[node] = step.start, latest - start
        return replace(self, before=before, lag=lag, wait=wait, wait_lag=wait_lag).ends()


class Builder:
    """Collects the nodes thread by thread and stream by stream, then numbers them by time."""

    def __init__(self, trace: Trace, recorded_us: float, repeats: bool):
        self.trace, self.recorded_us, self.repeats = trace, recorded_us, repeats
        self.columns = {name: array("q") for name in COLUMNS}
        self.order = array("q")  # sort keys for numbering; no node may come before one that it depends on
        self.threads: dict[tuple, range] = {}
        self.streams: dict[tuple, list[int]] = defaultdict(list)
        self.launched_at: dict[int, int] = {}  # id(call) -> the node after which its work can start
        self.calls: dict[int, tuple[Op, int]] = {}  # id(Op) of a waiting call -> the call and the node of its return
        self.activity: dict[int, int] = {}
        self.between_streams: dict[tuple, list[int]] = defaultdict(list)  # track -> its cudaStreamWaitEvent calls
        self.by_end = sorted(trace.work, key=lambda one: one.start + one.dur)
        self.ends = [one.start + one.dur for one in self.by_end]
        self.launches = sorted([one.launch.start for one in trace.work if one.launch is not None])
        self.latency_ns, self.gap_ns = _typical(trace.work)
        self.recorded = _Recorded(trace)

    def built(self) -> Graph:
        steps = working_steps(self.trace, typical(self.trace))
        marks = self._add_threads(steps)
        self._add_activities()
        for call, node in self.calls.values():
            self._tie_return(call, node)
            if self.repeats and self.columns["via"][node] == NOBODY:  # it waits for the work of earlier steps
                self._tie(node, "via", marks[0][0], 0)
        return self._numbered(steps, marks)

    def _tie(self, node: int, to: str, other: int, lag: int) -> None:
        """Add a dependency on another node. to: via or wait."""
        self.columns[to][node] = other
        self.columns[LAG_OF[to]][node] = lag

    def _add_threads(self, steps: Sequence[Step]) -> list[tuple[int, int]]:
        """Add a node for each point of a thread, and return the nodes of the starts and ends of the steps."""
        roots = grouped((root.track, root) for root in self.trace.roots)
        marks = [on_its_thread(step) for step in steps]
        # First, because it needs as much memory as the points.
        handoffs = list(_handoffs(_boundaries(roots, [(end, track) for track, _, end in marks])))
        points: dict[tuple, list[tuple]] = {track: [] for track in roots}
        self._add_calls(points)
        for times in self.between_streams.values():
            times.sort()
        for number, (track, start, end) in enumerate(marks):
            points[track] += [(start, 1, "start", number), (end, 0, "end", number)]
        for number, (one, stopped, other, went_on) in enumerate(handoffs):
            points[one].append((stopped, 0, "stop", number))
            points[other].append((went_on, -1, "go on", number))  # before a step's end at the same time
        nodes = sum(map(len, points.values())) + len(self.trace.work)
        for to, lag_of_it in LAG_OF.items():  # few nodes have one, and _tie() sets it
            self.columns[to], self.columns[lag_of_it] = array("q", (NOBODY,)) * nodes, array("q", (0,)) * nodes
        at, previous, lag = (self.columns[name] for name in ("at", "before", "lag"))
        order, launched_at = self.order, self.launched_at
        found = {}
        for track in list(points):
            some = points.pop(track)  # as large as the trace's calls, and needed once
            some.sort(key=_first_two)
            times, first = array("q", [point[0] for point in some]), len(order)
            at.extend(times)
            order.extend(times)
            lag.extend(map(operator.sub, times, times[:1] + times))
            previous.extend(range(first - 1, first - 1 + len(some)))
            if some:
                previous[first] = NOBODY
            self.threads[track] = range(first, len(order))
            for node, (_, _, what, one) in enumerate(some, first):
                if what == "call":
                    launched_at[id(one)] = node
                elif what == "return":
                    self.calls[id(one)] = one, node
                    if not is_wait(one):  # it waited for room in the queue and then launched
                        launched_at[id(one)] = node
                else:
                    found[what, one] = node
        self.columns["dur"] = array("q", (0,)) * len(order)
        for number, (_, stopped, _, went_on) in enumerate(handoffs):
            node = found["go on", number]
            self.columns["lag"][node] = 0
            self._tie(node, "via", found["stop", number], went_on - stopped)
        # Other threads start after the first step's start, so that time can be removed between the two.
        start = found["start", 0]
        for nodes in self.threads.values():
            if nodes and at[nodes[0]] > at[start] and self.columns["via"][nodes[0]] == NOBODY:
                self._tie(nodes[0], "via", start, at[nodes[0]] - at[start])
        return [(found["start", number], found["end", number]) for number in range(len(steps))]

    def _add_calls(self, points: dict[tuple, list[tuple]]) -> None:
        """Add the points of each runtime call that launches or waits: (time, rank there, meaning, call)."""
        launching = {one.launch.name for one in self.trace.work if one.launch is not None}
        may = set(filter(MAY_WAIT.search, self.trace.op_names))
        between_streams = {name for name in self.trace.op_names if "StreamWaitEvent" in name}
        wanted = (launching | may | between_streams).__contains__
        outside = (op for root in self.trace.outside for op in root.walk() if wanted(op.name))
        for op in chain(*(step.named(wanted) for step in self.trace.steps), outside):
            if op.kind != "runtime":
                continue
            if op.name in between_streams:
                self.between_streams[op.track].append(op.start)
                continue
            waits = op.name in may and is_wait(op)
            if op.work or waits:
                on_thread = points[op.track]
                on_thread.append((op.start, 1, "call", op))
                if waits or (op.dur >= BLOCKED_NS and self._is_blocked(op)):
                    on_thread.append((op.start + op.dur, 0, "return", op))

    def _is_blocked(self, call: Op) -> bool:
        """Return whether a launch call that takes BLOCKED_NS waited for room in the launch queue."""
        if "Graph" in call.name:
            return False  # it takes long if the graph is large
        launched = bisect.bisect_left(self.launches, call.start) + len(self.ends) - len(self.launches)
        return launched - bisect.bisect_right(self.ends, call.start) >= QUEUED

    def _add_activities(self) -> None:
        at, dur, previous, lag, via, delay, wait, wait_lag = (self.columns[name] for name in COLUMNS)
        order, activity, launched_at, gap_ns = self.order, self.activity, self.launched_at, self.gap_ns
        latest: dict[tuple, list[Work]] = {}  # track -> the last two activities of the stream
        for node, one in enumerate(self.trace.work, len(order)):
            if one.track not in latest:
                latest[one.track] = []
            recent, on_stream = latest[one.track], self.streams[one.track]
            before = recent[-1] if recent else None
            launch = launched_at.get(id(one.launch), NOBODY)
            start = key = one.start
            is_late, behind, least, end = before is not None or launch >= 0, NOBODY, 0, None
            if before is not None:
                behind, end = on_stream[-1], before.start + before.dur
                least = start - end
                if least > gap_ns:
                    least = gap_ns
                else:
                    is_late = False
                if order[behind] > key:
                    key = order[behind]
            activity[id(one)] = node
            on_stream.append(node)
            at.append(start)
            dur.append(one.dur)
            previous.append(behind)
            lag.append(least)
            if launch >= 0:
                latency = start - at[launch]
                if latency > self.latency_ns:
                    latency = self.latency_ns
                else:
                    is_late = False
                via[node], delay[node] = launch, latency
                if order[launch] > key:
                    key = order[launch]
            order.append(key)
            other = self._awaited(one, latest, before, is_late) if len(latest) > 1 else None
            if other is not None:
                awaited = activity[id(other)]
                wait[node], wait_lag[node] = awaited, min(start - other.end, gap_ns)
                order[node] = max(key, order[awaited])
            if is_late:
                # It waited for the dependency that ended last, and the lag is the recorded one.
                time, column = (end, lag) if before is not None else (at[launch], delay)
                if launch >= 0 and at[launch] > time:
                    time, column = at[launch], delay
                if other is not None and other.end > time:
                    time, column = other.end, wait_lag
                returned = one.launch.end if one.launch is not None else start  # launched before the recording
                if start - max(time, returned) <= EXPLAINED_NS:
                    column[node] = start - time
            recent.append(one)
            if len(recent) > 2:
                del recent[0]

    def _awaited(self, one: Work, latest: dict[tuple, list[Work]], before: Work | None, is_late: bool) -> Work | None:
        """Return the activity of another stream that this one waited for: the last one to end before it started.

        Recorded waits decide, if the trace says what each of them waited for. Otherwise an activity waited if
        cudaStreamWaitEvent was called after the launch before it on this stream, or if it started late and directly
        after the other activity. If neither holds, the result is None.
        """
        since = before.launch.start if before is not None and before.launch is not None else self.trace.steps[0].start
        if self.recorded.has_waits and one.launch is not None and not one.from_graph:
            return max(self.recorded.awaited(one, since), key=lambda other: other.end, default=None)
        has_event = False
        if one.launch is not None:
            if self.recorded.waits:
                called = self.recorded.called.get((one.device, one.track[1]), ())
            else:
                called = self.between_streams.get(one.launch.track, ())
            has_event = bisect.bisect_right(called, since) < bisect.bisect_left(called, one.launch.start)
        if not has_event and not is_late:
            return None
        found = None
        for track, recent in latest.items():
            # A copy between GPUs, or an event, makes an activity wait for another GPU's. Only its late start shows it.
            if track == one.track or (recent[-1].device != one.device and (has_event or not is_late)):
                continue
            for other in reversed(recent):
                if other.end <= one.start + SKEW_NS and _launched_before(other, one.launch):
                    found = other if found is None or other.end > found.end else found
                    break
        return found if found is not None and (has_event or one.start - found.end <= EXPLAINED_NS) else None

    def _tie_return(self, call: Op, node: int) -> None:
        """Make the return of a waiting call depend on the activity that ended last before the call returned.

        If the trace has the record of its synchronization, the call waits for that stream or event only.
        """
        if call.work and is_wait(call):
            ended = sorted(call.work, key=lambda one: one.end, reverse=True)
        else:
            until = bisect.bisect_right(self.ends, call.end + SKEW_NS)
            last = reversed(self.by_end[max(0, until - AMONG_LAST) : until])
            ended = [one for one in last if _launched_before(one, call) and self.recorded.may_await(call, one)]
        ended = [one for one in ended if self.order[self.activity[id(one)]] < self.order[node]]
        if not ended:
            return
        awaited = ended[0]
        waited = awaited.end > call.start
        self._tie(node, "via", self.activity[id(awaited)], call.end - awaited.end if waited else 0)
        if waited:
            self.columns["lag"][node] = min(call.dur, WAIT_CALL_NS)
        # It waits for all streams, and after a change another stream may end last.
        beside = next((one for one in ended if one.track != awaited.track), None)
        if OF_THE_DEVICE in call.name and beside is not None:
            self._tie(node, "wait", self.activity[id(beside)], 0)

    def _numbered(self, steps: Sequence[Step], marks: Sequence[tuple[int, int]]) -> Graph:
        order = sorted(range(len(self.order)), key=self.order.__getitem__)
        number = [NOBODY] * (len(order) + 1)  # the last one is the number of NOBODY
        for place, old in enumerate(order):
            number[old] = place
        between_streams = max(self.columns["wait"]) >= 0  # rare; without any, two columns stay as they are
        columns = {}
        for name, column in self.columns.items():
            if not between_streams and name in ("wait", "wait_lag"):
                columns[name] = column.tolist()
                continue
            sorted_column = [column[old] for old in order]
            if name in ("before", "via", "wait"):
                nodes = enumerate(sorted_column)
                sorted_column = [new if (new := number[old]) < place else NOBODY for place, old in nodes]
            columns[name] = sorted_column

        def renumbered(nodes: dict) -> dict:
            return {key: array("q", [number[node] for node in some]) for key, some in nodes.items()}

        step_nodes, before = [], columns["before"]
        for work, (start, end) in zip(on_busiest_stream(steps), marks, strict=True):
            nodes = [number[self.activity[id(one)]] for one in work]
            inside = set(nodes)
            firsts = tuple([node for node in nodes if before[node] not in inside])
            step_nodes.append(StepNodes(number[start], number[end], tuple(nodes), firsts))
        at, threads = columns["at"], renumbered(self.threads)
        on_threads = len(order) - len(self.activity)  # the points of threads come first
        return Graph(
            **columns,
            steps=tuple(step_nodes),
            threads=threads,
            times={track: array("q", map(at.__getitem__, nodes)) for track, nodes in threads.items()},
            on_cpu=bytes([old < on_threads for old in order]),
            streams=renumbered(self.streams),
            activity={key: number[node] for key, node in self.activity.items()},
            returns={key: number[node] for key, (_, node) in self.calls.items()},
            latency_ns=self.latency_ns,
            gap_ns=self.gap_ns,
            recorded_us=self.recorded_us,
            trace=self.trace,
            mixed=self.trace.quality.mixed is not None,
            repeats=self.repeats,
        )


class _Recorded:
    """What the trace itself records of waits: CUPTI's synchronizations."""

    def __init__(self, trace: Trace):
        self.of_call = {id(one.call): one for one in trace.syncs if one.kind != STREAM_WAITS}
        waits = [one for one in trace.syncs if one.kind == STREAM_WAITS]
        self.waits = grouped(((one.device, one.stream), one) for one in waits)  # by the stream that waits
        # torch 2.11 on CUDA 13 does not record which event a stream waited for.
        self.has_waits = bool(waits) and all(one.record is not None for one in waits)
        self.called = {stream: [one.call.start for one in some] for stream, some in self.waits.items()}
        launched = [one for one in trace.work if one.launch is not None] if trace.syncs else []
        self.launched = grouped(((one.device, one.track[1]), one) for one in launched)  # by stream, in its order
        for some in self.launched.values():
            some.sort(key=lambda one: one.launch.start)

    def awaited(self, one: Work, since: int) -> Iterator[Work]:
        """The activities of other streams that it depends on. since: when the one before it was launched."""
        waits = self.waits[one.device, one.track[1]]
        for wait in waits[bisect.bisect_left(waits, since, key=operator.attrgetter("call.start")) :]:
            if wait.call.start >= one.launch.start:
                return
            other = self._before_record(wait)
            if other is not None and other.end <= one.start + SKEW_NS:
                yield other

    def _before_record(self, wait: Sync) -> Work | None:
        """The last activity that was launched on the awaited stream before its event was recorded.

        Where the trace does not name that stream: on any other one, by the thread that recorded the event.
        """
        if wait.record is None:
            return None
        found = None
        for (device, stream), some in self.launched.items():
            if device != wait.device or stream == wait.stream or wait.awaited not in (None, stream):
                continue
            last = bisect.bisect_left(some, wait.record.start, key=operator.attrgetter("launch.start")) - 1
            if last < 0 or (wait.awaited is None and some[last].launch.track != wait.record.track):
                continue
            if found is None or some[last].launch.start > found.launch.start:
                found = some[last]
        return found

    def may_await(self, call: Op, one: Work) -> bool:
        """Whether a call that waits may have waited for an activity."""
        sync = self.of_call.get(id(call))
        if sync is None:
            return True
        if one.device != sync.device:
            return False
        stream = {STREAM: sync.stream, EVENT: sync.awaited}.get(sync.kind)
        if stream is not None and stream >= 0 and one.track[1] != stream:
            return False
        return sync.kind != EVENT or sync.record is None or _launched_before(one, sync.record)


_first_two = operator.itemgetter(0, 1)


def _typical(work: Iterable[Work]) -> tuple[int, int]:
    """Return the median launch latency on an idle stream and the median gap between launched activities (ns)."""
    latencies, gaps = [], []
    last: dict[tuple, tuple[Op | None, float]] = {}  # by stream, the launch and the end of the activity before
    for one in work:
        start, launch, track = one.start, one.launch, one.track
        before, ended = last.get(track, (None, -math.inf))
        last[track] = launch, start + one.dur
        if launch is None:
            continue
        if ended <= launch.start:
            latencies.append(start - launch.start)
        elif before is not launch and launch.start + launch.dur <= ended:
            gaps.append(start - ended)
    return (
        median_low(latencies) if len(latencies) >= ENOUGH else LATENCY_NS,
        median_low(gaps) if len(gaps) >= ENOUGH else GAP_NS,
    )


def _launched_before(one: Work, call: Op | None) -> bool:
    return one.launch is None or call is None or one.launch is call or one.launch.start < call.start


LEAVES, ENTERS, ENDS_STEP = range(3)  # in this order at the same time


def _boundaries(roots: dict[tuple, list[Op]], ends: Iterable[tuple[int, tuple]]) -> list[tuple[int, int, tuple]]:
    """Return the times at which threads that run ops leave and enter an outermost op or call, in order.

    ends: the steps' ends with their threads, which are among them. A step may end with the wait for another thread.
    Empty if a single thread runs ops, because it waits for no other one.
    """
    by_track = {track: list(outermost(some, lambda op: op.kind != "label")) for track, some in roots.items()}
    by_track = {track: own for track, own in by_track.items() if any(op.kind == "op" for op in own)}
    if len(by_track) < 2:
        return []
    found = []
    for track, own in by_track.items():
        for op in own:
            found += (op.start, ENTERS, track), (op.start + op.dur, LEAVES, track)
        found += [(time, ENDS_STEP, thread) for time, thread in ends if thread == track]
    return sorted(found, key=_first_two)


def _handoffs(boundaries: Iterable[tuple[int, int, tuple]]) -> Iterator[tuple[tuple, int, tuple, int]]:
    """Yield the places where a thread waited for another one: (the other thread, its stop, the thread, its start).

    The thread pauses while the other one works. The other thread does not count if it was already at work when the
    pause began, or if it is still at work.
    """
    depth: dict[tuple, int] = defaultdict(int)
    # Of each thread the time of its last stop, and the number of the boundary there; the last one to stop is last.
    stopped: OrderedDict[tuple, tuple[int, int]] = OrderedDict()
    changes: dict[tuple, list[int]] = defaultdict(list)  # the boundaries at which a thread starts or stops, in turn
    for number, (time, what, track) in enumerate(boundaries):
        if what != LEAVES and not depth[track]:
            paused, pause = stopped.get(track, (-math.inf, -1))
            for other, (when, _) in islice(reversed(stopped.items()), MOST_THREADS):
                if when <= paused:
                    break
                was_at_work = bisect.bisect_right(changes[other], pause) % 2
                if when < time and not depth[other] and not was_at_work:
                    yield other, when, track, time
                    break
        before = depth[track]
        if what != ENDS_STEP:
            depth[track] += 1 if what == ENTERS else -1
        if (before == 0) != (depth[track] == 0):
            changes[track].append(number)
        if what != ENTERS and not depth[track]:
            stopped[track] = time, number
            stopped.move_to_end(track)
