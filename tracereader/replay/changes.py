"""Elementary changes of a step. Each function takes a Graph and returns the changed one, so changes compose.

A function copies only the lists that it edits. Change all recorded steps: the step's time is a median over them.
"""

import bisect
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import groupby, pairwise

from msgspec.structs import replace

from tracereader.figures.steps import lies_in
from tracereader.replay.graph import NOBODY, Graph
from tracereader.trace import Op, Step, Work, all_around, start_of
from tracereader.trace.grouped import grouped
from tracereader.trace.intervals import Intervals, Lengths, minus, union
from tracereader.trace.waits import waits_of

Spans = Iterable[tuple[tuple, int, int]]  # (a thread's track, from, to), in ns
Run = list[tuple[Op, list[Work]]]  # ops in the order of their starts, each with the work that it launches

FACTORS = 1024  # cpu_factor() decides between so many
# Recorded graph replays of decoders on an H200: the median gap between two activities of one CUDA graph is 0.42 to
# 0.45 µs, cudaGraphLaunch takes 0.7 to 2.2 µs for each activity in the graph, and the first activity starts when the
# call returns. Without the profiler, 31 programs as graphs of 143 to 16,680 kernels took 1.00 to 1.07 times as long as
# these kernels when they were launched one by one (the middle half). So neither gaps nor the call count then.
GRAPH_GAP_US, GRAPH_LAUNCH_US, GRAPH_LAUNCH_US_EACH = 0.45, 10.0, 1.5


def without_cpu_time(graph: Graph, spans: Spans) -> Graph:
    """Return the graph in which these spans of threads take no time. Launches in them happen at once.

    A call that lies completely in the spans does not wait any more. A wait for another thread stays.
    """
    lag, delay, via, wait = graph.lag[:], graph.delay[:], graph.via[:], graph.wait[:]
    returns = set(graph.returns.values())
    removed = dict(graph.gone)
    for track, some in grouped((track, (start, end)) for track, start, end in spans).items():
        nodes = graph.threads.get(track, ())
        earlier = removed.get(track, [])
        removed[track] = union([*earlier, *some])
        gone = minus(removed[track], earlier)  # no time is removed twice
        lengths, of_all = Lengths(gone), Lengths(removed[track])
        times = graph.times.get(track, ())
        for place, cut in _cuts(times, gone):
            node, time = nodes[place], times[place]
            if node in returns:
                since = times[place - 1]
                if of_all.between(since, time) == time - since:
                    via[node] = wait[node] = NOBODY
                    lag[node] = 0
            elif via[node] >= 0:  # it continued when another thread stopped
                delay[node] -= min(delay[node], lengths.between(time - delay[node], time))
            else:
                lag[node] = max(0, lag[node] - cut)
    return replace(graph, lag=lag, delay=delay, via=via, wait=wait, gone=removed)


def _cuts(times: Sequence[int], gone: Intervals) -> Iterator[tuple[int, int]]:
    """Yield the places of the times up to which some time is removed, and how much since the time before (ns)."""
    place = cut = 0
    for start, end in gone:
        if place < len(times) and times[place] < start:
            if cut:
                yield place, cut
            place, cut = bisect.bisect_left(times, start, place + 1), 0
        while place < len(times) and times[place] < end:
            yield place, cut + times[place] - start
            start, place, cut = times[place], place + 1, 0
        cut += end - start
    if cut and place < len(times):
        yield place, cut


def without_ops(graph: Graph, ops: Iterable[Op]) -> Graph:
    """Return the graph without these ops and calls and without the GPU work that they launch."""
    ops = list(ops)
    return _without_activities(without_cpu_time(graph, spans_of(ops)), [one for op in ops for one in op.work_below()])


def without_waits(graph: Graph, calls: Iterable[Op]) -> Graph:
    """Return the graph in which these runtime calls neither wait nor take time. The work that they launch stays."""
    return without_cpu_time(graph, spans_of(calls))


def spans_of(ops: Iterable[Op]) -> list[tuple[tuple, int, int]]:
    """Return the track, the start and the end (ns) of these ops."""
    return [(op.track, op.start, op.end) for op in ops]


def without_work(graph: Graph, work: Iterable[Work]) -> Graph:
    """Return the graph without this GPU work and without the ops that launch nothing else."""
    work = list(work)
    return _without_activities(without_cpu_time(graph, spans_of(next(launching_only(graph, [work])))), work)


def with_smaller_graphs(graph: Graph, work: Iterable[Work]) -> Graph:
    """Return the graph without this work of CUDA graphs, whose launches take less time in proportion to their work.

    While the profiler records, two decoders' launches took 1.4 and 2.2 µs for each of 1,148 and 1,882 kernels. Compiled
    to a third of the kernels, they took a quarter of the second time.
    """
    work = list(work)
    nodes = Counter(id(one.launch) for one in work)
    spans, lag, delay = [], graph.lag[:], graph.delay[:]
    for call in {id(one.launch): one.launch for one in work}.values():
        less = call.dur * nodes[id(call)] // len(call.work)
        spans.append((call.track, call.end - less, call.end))
        for place, one in enumerate(call.work):
            node = graph.activity[id(one)]
            delay[node] = max(0, delay[node] - less)
            if not place:  # it starts when the call returns
                lag[node] = min(lag[node], max(0, lag[node] - less))
    return _without_activities(without_cpu_time(replace(graph, lag=lag, delay=delay), spans), work)


def _without_activities(graph: Graph, work: Iterable[Work]) -> Graph:
    dur, lag, via, wait = graph.dur[:], graph.lag[:], graph.via[:], graph.wait[:]
    for one in work:
        node = graph.activity[id(one)]
        # The next activity on its stream still follows the activity before it.
        dur[node] = 0
        if graph.before[node] >= 0:
            lag[node], via[node] = 0, NOBODY
    return replace(graph, dur=dur, lag=lag, via=via, wait=wait)


def launching_only(graph: Graph, groups: Sequence[Collection[Work]]) -> Iterator[list[Op]]:
    """Yield for each group of work the outermost ops and calls that launch only work of the group.

    An activity is in one group at most. Only ops around the work's calls that no annotation separates from them are
    looked at, and what lies in these ops.
    """
    launched, outermost_of = graph.launched
    of_groups = [{id(one.launch): one.launch for one in group if one.launch is not None} for group in groups]
    # A call outside of the replayed steps stays as it is.
    roots = {outermost_of[key] for calls in of_groups for key in calls if key in outermost_of}
    for group, calls in zip(groups, of_groups, strict=True):
        # id(Op) -> the group's activities in the call and in whole ops below
        below = Counter(id(one.launch) for one in group)
        whole: dict[int, Op] = {}  # what launches only activities of the group
        for key, op in calls.items():
            while key not in whole and below[key] == launched[key]:
                whole[key] = op
                if op.parent is None:
                    break
                op = op.parent
                below[id(op)] += launched[key]
                key = id(op)
        yield [
            op
            for key, op in whole.items()
            if key in roots or (id(op.parent) not in whole and any(id(above) in roots for above in op.above()))
        ]


def with_durations(graph: Graph, us: Mapping[Work, float]) -> Graph:
    """Return the graph in which this GPU work takes the given times (µs)."""
    dur = graph.dur[:]
    for one, time in us.items():
        dur[graph.activity[id(one)]] = round(time * 1e3)
    return replace(graph, dur=dur)


def fused(graph: Graph, groups: Iterable[tuple[Collection[Work], float]]) -> Graph:
    """Return the graph in which only the first activity of each group is left, with the given time (µs).

    The ops that launch the other activities are removed. The CPU time between two of these ops, for example a loop's
    Python, is also removed if nothing else is launched in it.
    """
    times, gone, spans = {}, [], []
    launches = sorted({id(one.launch): one.launch.start for one in graph.trace.work if one.launch is not None}.values())
    for work, us in groups:
        first, *rest = sorted(work, key=start_of)
        times[first] = us
        gone += rest
        calls = sorted({id(one.launch): one.launch for one in work if one.launch is not None}.values(), key=start_of)
        for call, following in pairwise(calls):
            beside = bisect.bisect_left(launches, following.start) - bisect.bisect_right(launches, call.start)
            if call.track == following.track and not beside:
                spans.append((call.track, call.end, following.end))
    return with_durations(without_cpu_time(without_work(graph, gone), spans), times)


def cuda_graph(graph: Graph, runs: Iterable[Run] | None = None, launch_us: float | None = None) -> Graph:
    """Return the graph in which the launches between two waits of a step are one launch of a CUDA graph.

    On each thread, the time from the first to the last launching op is removed. Calls that wait stay, and so do ops
    that contain one. runs: the only launches that change, from launches_between_waits(); None means all of them.
    launch_us: the time of the graph's launch; None derives it from the number of activities.
    """
    if runs is None:
        runs = (run for step in graph.trace.steps for run in launches_between_waits(graph, step))
    spans, added, before, wait, activity = [], [], graph.before, graph.wait, graph.activity
    lag, wait_lag, of_recording = graph.lag[:], graph.wait_lag[:], Counter(graph.of_recording)
    gap_ns = round(GRAPH_GAP_US * 1e3)
    for run in runs:
        work = [one for _, launched in run for one in launched]
        for track, some in grouped((op.track, op) for op, _ in run).items():
            spans.append((track, some[0].start, max([op.start + op.dur for op in some])))
        recording_us = GRAPH_LAUNCH_US_EACH * len(work) if launch_us is None else 0.0
        us = GRAPH_LAUNCH_US + recording_us if launch_us is None else launch_us
        added.append((run[0][0].track, min([one.launch.start for one in work]), us))
        if recording_us and (node := _node_at(graph, *added[-1][:2])) != NOBODY:
            of_recording[node] += round(recording_us * 1e3)
        nodes = {activity[id(one)] for one in work}
        for node in nodes:
            if lag[node] > 0 and before[node] in nodes:
                lag[node] = of_recording[node] = min(lag[node], gap_ns)
            if wait_lag[node] > gap_ns and wait[node] in nodes:
                wait_lag[node] = gap_ns
    edited = replace(graph, lag=lag, wait_lag=wait_lag, of_recording=dict(of_recording))
    return with_cpu_time(without_cpu_time(edited, spans), added)


def launches_between_waits(graph: Graph, step: Step, left_out: Collection[Op] = ()) -> Iterator[Run]:
    """Yield runs of the outermost ops that launch and do not wait, each with the work that it launches.

    A run ends where a call of any thread waits. left_out: the step's ops or annotations that stay and end a run, too.
    """
    stays = {id(op): op for op in left_out}
    waits = [*stays.values(), *(op for op in waits_of(step) if graph.via[graph.returns[id(op)]] >= 0)]
    waiting = all_around(waits)
    known: dict[int, bool] = {}
    lying = (key for key, op in waiting.items() if lies_in(op, lambda above: id(above) in stays, known))
    inside = {*stays, *lying}  # by id(Op), what stays or lies in an op that does
    launching: Run = []
    # By id(Op), the outermost op around it and what that launches; None if there is no such op.
    tops: dict[int, tuple[Op, list[Work]] | None] = dict.fromkeys(waiting)
    for one in step.work:
        path, op = [], one.launch
        while op is not None and id(op) not in tops:
            path.append(op)
            op = op.parent
        top = tops[id(op)] if op is not None else None
        stays_inside = op is not None and id(op) in inside
        for op in reversed(path):
            # The waiting op of item() also launches the copy that it waits for, so a call below such an op stays.
            outer = op.kind == "op" or (op.kind == "runtime" and (op.parent is None or op.parent.kind == "label"))
            if top is None and not stays_inside and outer:
                top = op, []
                launching.append(top)
            tops[id(op)] = top
            if stays_inside:
                inside.add(id(op))
        if top is not None:
            top[1].append(one)
    in_order = sorted([*launching, *((op, []) for op in waits)], key=lambda entry: entry[0].start)
    for launches, run in groupby(in_order, key=lambda entry: bool(entry[1])):
        if launches:
            yield list(run)


def with_cpu_time(graph: Graph, added: Iterable[tuple[tuple, int, float]]) -> Graph:
    """Return the graph with more CPU time.

    added: (a thread's track, a time in ns, the additional µs), which pass before its first node at or after that time.
    """
    lag = graph.lag[:]
    for track, time, us in added:
        if (node := _node_at(graph, track, time)) != NOBODY:
            lag[node] += round(us * 1e3)
    return replace(graph, lag=lag)


def _node_at(graph: Graph, track: tuple, time: int) -> int:
    """Return a thread's first node at or after a time (ns); NOBODY without one."""
    place = bisect.bisect_left(graph.times[track], time)
    return graph.threads[track][place] if place < len(graph.threads[track]) else NOBODY


def overlapped(graph: Graph, work: Iterable[Work]) -> Graph:
    """Return the graph in which this GPU work runs on a stream of its own, and waits for it end one step later.

    This models a prefetched copy or a hidden collective. The step does not become shorter than this work.
    """
    moved = frozenset(graph.activity[id(one)] for one in work)
    before, lag, via, wait = graph.before[:], graph.lag[:], graph.via[:], graph.wait[:]
    for nodes in graph.streams.values():
        here = there = NOBODY
        for node in nodes:
            if node in graph.aside:
                continue  # on a stream of its own already
            if node in moved:
                before[node], there = there, node
            else:
                before[node], here = here, node
            if node in moved or graph.before[node] in moved:
                lag[node] = min(max(lag[node], 0), graph.gap_ns)
    for column in (via, wait):
        for node, other in enumerate(column):
            if other in moved:
                column[node] = NOBODY
    for previous, step in pairwise(graph.steps):
        behind = max((node for node in previous.work if node in moved), default=NOBODY)
        first = min((node for node in step.work if node not in moved), default=NOBODY)
        if NOBODY < behind < first and wait[first] == NOBODY:
            wait[first] = behind
    return replace(graph, before=before, lag=lag, via=via, wait=wait, aside=graph.aside | moved)


def with_cpu_speed(graph: Graph, factor: float) -> Graph:
    """Return the graph without the profiler, in which all CPU time is multiplied by `factor`.

    GPU times and launch latencies stay. What only recording a CUDA graph takes is left out.
    """
    lag = graph.lag
    if graph.of_recording:
        lag = lag[:]
        for node, time in graph.of_recording.items():
            lag[node] = max(min(0, lag[node]), lag[node] - time)
    lags = zip(lag, graph.on_cpu, strict=True)
    parts = round(factor * 65_536)  # shifting takes half as long as rounding each product, and changes it by 0.001%
    return replace(graph, lag=[time * parts >> 16 if on_cpu else time for time, on_cpu in lags], of_recording={})


def step_us_at(graph: Graph, factor: float) -> float:
    """Return the step's time (µs) if all CPU time is multiplied by `factor`. Each factor is replayed once."""
    if factor not in graph.at_cpu_speed:
        graph.at_cpu_speed[factor] = with_cpu_speed(graph, factor).step_us()
    return graph.at_cpu_speed[factor]


def cpu_factor(graph: Graph, step_us: float, within: float = 0.0) -> float:
    """Return the factor (0 to 1) for `with_cpu_speed` with which the step takes step_us.

    Recording takes CPU time in every op and call. The step's time without the profiler therefore shows how much shorter
    the CPU time is without it. The factor is 1 if step_us is not below the recorded time, and 0 if the GPU alone takes
    longer than step_us. within: the search ends at a step that differs from step_us by at most this share.
    """
    low, high = 0, FACTORS
    times = {low: step_us_at(graph, 0.0), high: graph.step_us()}
    if step_us >= times[high]:
        return 1.0
    if step_us <= times[low]:
        return 0.0
    while high - low > 1:
        # If the CPU alone limits the step, its time is proportional to the factor. Otherwise it is nearly linear. Where
        # it is not, every third guess halves the interval.
        if len(times) == 2:
            middle = round(step_us / times[high] * high)
        else:
            share = (step_us - times[low]) / (times[high] - times[low]) if len(times) % 3 else 0.5
            middle = low + round(share * (high - low))
        middle = min(max(middle, low + 1), high - 1)
        times[middle] = step_us_at(graph, middle / FACTORS)
        if abs(times[middle] - step_us) <= within * step_us:
            return middle / FACTORS
        low, high = (middle, high) if times[middle] < step_us else (low, middle)
    return (low + high) / 2 / FACTORS if low else 0.0
