"""Which op takes what another one makes, if record-trace has recorded it: passes of a loop that need no other pass.

An op of a loop over time takes what its own pass before has made. So the number of passes behind it grows with each
pass, and so does the number of passes that follow from it. If only one of them grows, the op's part of the loop can be
computed for all passes at once, before the loop or after it.
"""

import bisect
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise
from statistics import median_high
from typing import NamedTuple

from tracereader.figures.phases import kept_by_step
from tracereader.trace import Op, Step
from tracereader.trace.grouped import grouped
from tracereader.trace.labels import AUTOGRAD, OPTIMIZERS
from tracereader.trace.op_names import ADDS, FOREACH, FROM_PYTHON, READ_A_VALUE
from tracereader.trace.types import Flow, flow_of

# What joins the results of passes in any order of the passes, or writes each in its place.
JOINING = (
    *ADDS, "aten::sub", "aten::sub_", "aten::cat", "aten::stack", "aten::maximum", "aten::minimum",
    "aten::logical_or", "aten::logical_and", "aten::copy_", "aten::fill_", "aten::zero_", "aten::index_put_",
    "aten::index_copy_", "aten::scatter_",
)  # fmt: skip
LAYER = re.compile(r"aten::(conv\w*|linear|matmul|mm|bmm|einsum|embedding\w*|\w*attention|lstm|gru)\b").match
WEIGHTED = re.compile(r"aten::(conv\w*|linear|matmul|mm|_weight_norm)\b").match
LEAST_OPS = 4  # of a pass, that compute
ALIKE = 1.5  # times the ops of another pass
TRIED = 40  # distances between equal ops, the ones with most ops first


class Called(NamedTuple):
    """An op that no other op of torch calls, what it reads and makes, and whether an optimizer calls it."""

    op: Op
    flow: Flow
    updates: bool


class PartOfPasses(NamedTuple):
    """For each pass of a loop, the ops that need no other pass. before: whether no op of a pass before feeds them.

    whole: whether these are all ops of the loop but for those that join the results.
    """

    ops: list[list[Op]]
    before: bool
    whole: bool


@kept_by_step
def calls_with_flow(step: Step) -> list[Called]:
    """Return the ops of forward and of updates, in the order of one thread; empty if their flow is not recorded."""
    found, pending = [], [(one, False) for one in reversed(step.outermost)]
    while pending:
        op, updates = pending.pop()
        if op.name.startswith(AUTOGRAD):
            continue
        if (flow := flow_of(op.raw)) is not None:
            found.append(Called(op, flow, updates))
        elif op.kind != "op" or not op.name.startswith("aten::"):
            updates |= op.name.startswith(OPTIMIZERS)
            pending.extend((one, updates) for one in reversed(op.children))
    tracks = Counter(one.op.track for one in found).most_common(1)
    return sorted((one for one in found if one.op.track == tracks[0][0]), key=lambda one: one.op.start)


@kept_by_step
def parts_without_other_passes(step: Step) -> list[PartOfPasses]:
    """Return what each pass of a step's loops computes without what another pass computes, the largest part first."""
    calls = calls_with_flow(step)
    keys: dict[tuple, int] = {}
    tokens = [keys.setdefault((one.op.name, str(one.op.inputs.recorded)), len(keys)) for one in calls]
    found = [part for run in _equal_passes(calls, tokens) for part in _parts(run)]
    alike = [run for run in _alike_passes(calls, tokens) if _computes(run)]
    found += [_whole(run) for run in alike if max(_behind_and_ahead(run)[0]) <= min(2, _few(run))]
    found.sort(key=lambda part: -sum(map(len, part.ops[1:])))
    kept: list[PartOfPasses] = []
    taken: set[int] = set()
    for part in found:
        ids = {id(op) for ops in part.ops for op in ops}
        if taken.isdisjoint(ids):
            kept.append(part)
            taken |= ids
    return kept


def _equal_passes(calls: Sequence[Called], tokens: Sequence[int]) -> Iterator[list[list[Called]]]:
    """Yield the passes of the longest stretches in which the same ops return at one distance, by name and shapes."""
    last: dict[int, int] = {}
    distances: Counter[int] = Counter()
    for place, token in enumerate(tokens):
        distances[place - last.get(token, place)] += 1
        last[token] = place
    del distances[0]
    for distance, _ in distances.most_common(TRIED):
        begin = 0
        for place in range(len(tokens) - distance + 1):
            if place == len(tokens) - distance or tokens[place] != tokens[place + distance]:
                count = (place + distance - begin) // distance
                if count >= 2:
                    ends = range(begin, begin + count * distance + 1, distance)
                    yield [calls[a:b] for a, b in pairwise(ends)]
                begin = place + 1


def _alike_passes(calls: Sequence[Called], tokens: Sequence[int]) -> Iterator[list[list[Called]]]:
    """Yield passes that begin with an op that returns at similar distances, the first op for each number of passes."""
    seen = set()
    for places in sorted(grouped((token, place) for place, token in enumerate(tokens)).values()):
        lengths = [two - one for one, two in pairwise(places)]
        if len(places) > 2 and len(places) not in seen and max(lengths) <= ALIKE * min(lengths):
            seen.add(len(places))
            ends = [*places, min(len(calls), places[-1] + median_high(lengths))]
            yield [list(calls[a:b]) for a, b in pairwise(ends)]


def _computes(passes: Sequence[Sequence[Called]]) -> bool:
    """Return whether passes make tensors, update no weights, and give Python nothing from which it makes tensors."""
    making = [one.op.name for one in passes[0] if one.flow.makes]
    computes = len(making) >= LEAST_OPS and any(map(LAYER, making))  # an average of weights has none
    return computes and not any(one.updates for calls in passes for one in calls) and not _reads_and_takes(passes)


def _whole(passes: Sequence[Sequence[Called]]) -> PartOfPasses:
    return PartOfPasses([[one.op for one in calls] for calls in passes], True, True)


def _parts(passes: Sequence[list[Called]]) -> Iterator[PartOfPasses]:
    """Yield the parts of passes that need no other pass: what feeds the passes, what they feed, or all of them."""
    if not _computes(passes):
        return
    behind, ahead = _behind_and_ahead(passes)
    width, few = len(passes[0]), _few(passes)
    follows, feeds = [one > few for one in behind[-width:]], [one > few for one in ahead[:width]]
    if not any(a and b for a, b in zip(follows, feeds, strict=True)):
        yield _whole(passes)
        return
    weights = [[one.flow.reads[1:2] for one in calls if WEIGHTED(one.op.name)] for calls in passes[:2]]
    if any(a != b and max(a + b) < 0 for a, b in zip(*weights, strict=True)):
        return  # a layer with weights of its own, from outside the step: one call cannot compute what all do
    for before, apart in ((True, follows), (False, feeds)):
        wanted = [place for place in range(width) if not apart[place] and (before or follows[place])]
        if any(passes[0][place].flow.makes for place in wanted):
            yield PartOfPasses([[calls[place].op for place in wanted] for calls in passes], before, False)


def _few(passes: Sequence[Sequence[Called]]) -> int:
    """Return how many passes may lie behind an op that needs none: a loop's first op may be counted as the last one."""
    return (len(passes) - 1) // 2


def _behind_and_ahead(passes: Sequence[Sequence[Called]]) -> tuple[list[int], list[int]]:
    """Return how many passes lie behind each op, from which it follows, and ahead of it, which follow from it.

    What only joins the passes' results is not counted, as a sum of their losses.
    """
    ops = [(number, one) for number, calls in enumerate(passes) for one in calls]
    made = {version: index for index, (_, one) in enumerate(ops) for version in one.flow.makes}
    edges = [
        (made[version], index)
        for index, (_, one) in enumerate(ops)
        for version in dict.fromkeys(one.flow.reads)
        if one.flow.makes and made.get(version, index) < index  # not of views
    ]
    joins = [one.op.name in JOINING for _, one in ops]
    for source, index in reversed(edges):
        joins[source] &= joins[index]
    behind, ahead = [0] * len(ops), [0] * len(ops)
    counted = [(a, b, ops[b][0] > ops[a][0]) for a, b in edges if not (joins[a] and joins[b] and ops[b][0] > ops[a][0])]
    for source, index, further in counted:
        behind[index] = max(behind[index], behind[source] + further)
    for source, index, further in reversed(counted):
        ahead[source] = max(ahead[source], ahead[index] + further)
    return behind, ahead


def hand_on(step: Step, starts: Sequence[int], end: int) -> bool:
    """Return whether passes that start at these times (ns) take what passes before have made, as far as recorded."""
    passes: list[list[Called]] = [[] for _ in starts]
    for one in calls_with_flow(step):
        if starts[0] <= one.op.start < end:
            passes[bisect.bisect(starts, one.op.start) - 1].append(one)
    return len(passes) > 2 and max(_behind_and_ahead(passes)[0], default=0) > _few(passes)


def computed_again(step: Step) -> list[Op]:
    """Return the ops that compute what an earlier op has computed from the same tensors.

    What only a step before has computed counts if this step gets tensors from Python: otherwise its data may be the
    same, too. A tensor that is written afterwards has to be made again.
    """
    calls = calls_with_flow(step)
    takes_data = any(one.op.name == FROM_PYTHON for one in calls)
    written = {
        version
        for one in calls
        if one.op.name.endswith("_")
        for version in (one.flow.reads if one.op.name.startswith(FOREACH) else one.flow.reads[:1])
    }
    return [
        one.op
        for one in calls
        if one.flow.again
        and not one.updates
        and written.isdisjoint(one.flow.makes)
        and (takes_data or min(one.flow.again) > 0)
    ]


def _reads_and_takes(passes: Sequence[list[Called]]) -> bool:
    """Return whether Python reads results in the passes and gives them tensors, which may follow from these."""
    names = {one.op.name for calls in passes for one in calls}
    reads = not names.isdisjoint(READ_A_VALUE)
    reads |= any("DtoH" in work.name for calls in passes[:-1] for one in calls for work in one.op.work_below())
    return reads and FROM_PYTHON in names
