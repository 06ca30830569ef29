"""Equal runs of a step's GPU activities: a model's layers, by the kernels' names, and the replays of a CUDA graph."""

import re
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import accumulate, count, islice, pairwise
from operator import eq
from statistics import median

import msgspec

from tracereader.figures.gpu_work import GpuWork
from tracereader.trace import Work
from tracereader.trace.families import IN_EVERY_LAYER
from tracereader.trace.grouped import grouped

# Two repetitions may be chance, and a repeated unit needs more than one activity.
LEAST_TIMES, LEAST_PIECES = 3, 2
# Inductor names a kernel after all the ops that it fuses and adds a number. The ops differ from layer to layer
# (…_add_embedding_…_7, …_add_…_12) although the kernels are of one kind.
INDUCTOR = re.compile(r"^(triton_[a-z]+)_fused_.*$", re.S)
# Sequences of 1, 2, 4, … up to this number of activities are compared to find the distance to the next equal ones; and
# the number of most common distances that are tried. An activity that occurs once per layer gives the layer's length.
TOGETHER, TRIED = 16, 6
LEVELS = 6  # forward's layers, backward's, tokens, calls of generate: each level finds one kind


class Repeat(msgspec.Struct, frozen=True):
    """A sequence of `pieces` GPU activities that occurs `times` times. µs: summed GPU time of one occurrence.

    start: the first activity's position in the step's GPU work. inside: the repetition that fills most of one
    occurrence, such as the layers of a token; its positions are those in the first occurrence. replays: the positions
    of each replay's activities, in the first replay's order; empty for occurrences that follow each other directly.
    """

    start: int
    pieces: int
    times: int
    us: float  # the median occurrence's
    low_us: float
    high_us: float
    longest: int  # the number of the longest occurrence, counted from 1
    total_us: float
    cpu_us: float | None  # from one occurrence's first launch to the next one's, if each has its own launches
    inside: "Repeat | None" = None
    replays: tuple[tuple[int, ...], ...] = ()

    @property
    def places(self) -> Sequence[Sequence[int]]:
        """Return the positions of each occurrence's activities."""
        return self.replays or [range(at, at + self.pieces) for at in range(self.start, self.end, self.pieces)]

    @property
    def end(self) -> int:
        return self.start + self.pieces * self.times


class _Node(msgspec.Struct, frozen=True):
    """A GPU activity, or a run of equal sequences that counts as one."""

    kind: Hashable
    start: int
    end: int
    of_layer: bool
    repeat: Repeat | None = None


def repeats(work: Sequence[Work], measured: Sequence[GpuWork]) -> tuple[Repeat, ...]:
    """Return the repetitions in a step's GPU work, in order. measured: the same activities, measured over all steps."""
    nodes = [_Node(_kind(one), place, place + 1, one.family in IN_EVERY_LAYER) for place, one in enumerate(measured)]
    found = [node.repeat for node in _folded(nodes, work, measured) if node.repeat]
    for replayed in _replays(nodes, work, measured):
        # Each layer may be a graph, with other work between the graphs.
        if not any(2 * _shared(one, replayed) >= replayed.pieces * replayed.times for one in found):
            found = [*(one for one in found if not _shared(one, replayed)), replayed]
    return tuple(sorted(found, key=lambda one: one.start))


def _shared(one: Repeat, other: Repeat) -> int:
    """Return the number of GPU activities in both."""
    inside = {place for places in other.places for place in places}
    return sum(place in inside for places in one.places for place in places)


def _replays(nodes: list[_Node], work: Sequence[Work], measured: Sequence[GpuWork]) -> Iterator[Repeat]:
    """Yield the CUDA graphs that are launched more than once. Overlapping streams may change the order."""
    by_launch = grouped((id(one.launch), place) for place, one in enumerate(work) if one.from_graph)
    same = grouped(
        (frozenset(Counter(nodes[place].kind for place in places).items()), places) for places in by_launch.values()
    )
    for replays in same.values():
        first = replays[0]
        if len(replays) < 2 or len(first) < LEAST_PIECES:
            continue
        in_order = tuple(tuple(_in_first_order(nodes, first, places)) for places in replays)
        together = first[-1] - first[0] == len(first) - 1
        inner = _folded(nodes[first[0] : first[-1] + 1], work, measured) if together else []
        yield _costs(in_order, inner, work, measured, in_order)


def _in_first_order(nodes: list[_Node], first: list[int], places: list[int]) -> Iterator[int]:
    """Return a replay's positions in the first replay's order: the nth activity of each kind matches the nth."""
    of_kind = {kind: iter(some) for kind, some in grouped((nodes[place].kind, place) for place in places).items()}
    return (next(of_kind[nodes[place].kind]) for place in first)


def repeated_names(names: Sequence[str]) -> tuple[int, int, int] | None:
    """Return start, length and number of the repetitions, if they cover more than half of the names; else None."""
    runs = _runs(names, range(len(names) + 1), range(len(names) + 1))
    start, period, times = max(runs, key=lambda run: run[1] * run[2], default=(0, 0, 0))
    return (start, period, times) if 2 * period * times > len(names) else None


def _kind(one: GpuWork) -> Hashable:
    """Return the part of a name that two activities of one kind share. The rest depends on a tensor's position."""
    if one.family == "pointwise" and one.maker == "ATen" and "does" in one.name_says:
        return one.family, one.name_says["does"]  # vectorized if the tensor is aligned, else not
    return one.family, _without_ops(one.name)


@lru_cache(4096)  # names are far fewer than activities
def _without_ops(kernel: str) -> str:
    return INDUCTOR.sub(r"\1", kernel)


def _folded(nodes: list[_Node], work: Sequence[Work], measured: Sequence[GpuWork]) -> list[_Node]:
    """Return the nodes with each run of equal sequences as one node, level by level."""
    for _ in range(LEVELS):
        of_layers = list(accumulate((node.of_layer for node in nodes), initial=0))
        starts = [node.start for node in nodes]
        runs = _runs([node.kind for node in nodes], of_layers, [*starts, *(node.end for node in nodes[-1:])])
        if not runs:
            break
        folded, reached = [], 0
        for start, period, times in runs:
            sequence = nodes[start : start + period]
            last = nodes[start + period * times - 1]
            first, pieces = sequence[0].start, sequence[-1].end - sequence[0].start
            places = [range(at, at + pieces) for at in range(first, first + pieces * times, pieces)]
            repeat = _costs(places, _folded(sequence, work, measured), work, measured)
            kind = (tuple(node.kind for node in sequence), times)
            folded += nodes[reached:start]
            folded.append(_Node(kind, sequence[0].start, last.end, True, repeat))
            reached = start + period * times
        nodes = folded + nodes[reached:]
    return nodes


def _costs(
    places: Sequence[Sequence[int]],
    inner: list[_Node],
    work: Sequence[Work],
    measured: Sequence[GpuWork],
    replays: tuple[tuple[int, ...], ...] = (),
) -> Repeat:
    """Return the measurements of equal sequences at these positions. inner: the nodes of the first one."""
    pieces, times = len(places[0]), len(places)
    costs = [sum(measured[place].us for place in sequence) for sequence in places]
    apart = [
        (after.start - before.start) / 1e3
        for before, after in pairwise([work[sequence[0]].launch for sequence in places])
        if before and after and before is not after and before.track == after.track
    ]
    inside = max((node.repeat for node in inner if node.repeat), key=lambda one: one.end - one.start, default=None)
    if inside and 2 * (inside.end - inside.start) <= pieces:
        inside = None
    return Repeat(
        start=places[0][0],
        pieces=pieces,
        times=times,
        us=median(costs),
        low_us=min(costs),
        high_us=max(costs),
        longest=max(range(times), key=costs.__getitem__) + 1,
        total_us=sum(costs),
        cpu_us=median(apart) if len(apart) == times - 1 else None,
        inside=inside,
        replays=replays,
    )


def _runs(names: Sequence[Hashable], of_layers: Sequence[int], starts: Sequence[int]) -> list[tuple[int, int, int]]:
    """Return the runs of one sequence length: first node, nodes per sequence, times.

    The smallest length that covers half of what the best one covers is chosen, so layers come before tokens. names:
    equal nodes have equal ones. of_layers: the number of nodes before each that belong to a layer. starts: each node's
    first activity, and the end of the last one.
    """
    if not names:
        return []
    kinds = _numbers_of(names)
    everything = starts[-1] - starts[0]
    found, most = [], 0  # found: activities covered, runs
    for period in _distances(kinds):
        runs, covered, reached = [], 0, 0
        for start, end in _periodic(kinds, period):
            start = max(start, reached)
            times = (end - start) // period
            pieces = starts[start + period] - starts[start]
            if times >= LEAST_TIMES and pieces >= LEAST_PIECES and of_layers[start + period] > of_layers[start]:
                runs.append((start, period, times))
                covered += pieces * times
                reached = start + period * times
        most = max(most, covered)
        found.append((covered, runs))
        if 2 * covered >= everything and all(2 * before < most for before, _ in found[:-1]):
            return runs  # whatever a larger length covers
    return next((runs for covered, runs in found if 2 * covered >= most), [])


def _numbers_of(names: Iterable[Hashable]) -> list[int]:
    """Return a number for each name. Equal names have equal numbers."""
    return list(map(defaultdict(count().__next__).__getitem__, names))


def _distances(kinds: Sequence[int]) -> list[int]:
    """Return the most common distances between equal nodes, which are the lengths to try."""
    found = set()
    groups, together = kinds, 1  # groups: a number for each sequence of `together` nodes
    while True:
        last, apart = [-1] * (max(groups, default=0) + 1), []
        for place, group in enumerate(groups):
            before = last[group]
            last[group] = place
            if before >= 0:
                apart.append(place - before)
        found.update(distance for distance, _ in Counter(apart).most_common(TRIED))
        if together == TOGETHER:
            return sorted(found)
        groups = _numbers_of(zip(groups, islice(groups, together, None), strict=False))
        together *= 2


def _periodic(kinds: Sequence[int], period: int) -> Iterator[tuple[int, int]]:
    """Yield start and end of each run whose nodes equal those one period later, for at least two periods in a row."""
    same = bytes(map(eq, kinds, islice(kinds, period, None)))
    start = same.find(1)
    while start >= 0:
        end = same.find(0, start)
        end = len(same) if end < 0 else end
        if end - start >= (LEAST_TIMES - 1) * period:
            yield start, end + period
        start = same.find(1, end)
