"""Changes that give each launch more work: a larger batch, equal operations as one, and equal passes as one."""

import bisect
import math
import re
from collections import Counter, defaultdict
from collections.abc import Container, Iterator, Sequence

from tracereader.changes import prices
from tracereader.changes.change import Change
from tracereader.changes.context import Case, Entry
from tracereader.changes.opportunity import Proposal
from tracereader.changes.roofline import as_one_kernel_us, moving_us
from tracereader.changes.same_work import LEFT, products, same_flops
from tracereader.changes.vetoes import BATCH_NORM
from tracereader.changes.work_ahead import cpu_stretches, pauses
from tracereader.figures.gpu_work import GpuWork
from tracereader.figures.phases import backward_begins, in_backward
from tracereader.figures.repeats import repeated_names
from tracereader.figures.side import Side
from tracereader.figures.steps import labels
from tracereader.findings.finding import counted
from tracereader.replay import Graph, fused, with_durations, without_cpu_time
from tracereader.trace import Op, Step, Work
from tracereader.trace.labels import OPTIMIZER
from tracereader.trace.op_names import EMPTY, SLICES

# From this many equal kernels of one op in a row on, they can be batched.
MANY_ALIKE = 16
# The same for equal passes of forward and backward.
MANY_PASSES = 8
MOSTLY = 0.5  # of a step's GPU time
IS_INDEX = re.compile(r"\d{1,18}", re.ASCII).fullmatch
# Starts of ops that compute with images. A batch of samples with a height and a width, or a length and channels, has at
# least so many dimensions.
OF_IMAGES = ("aten::convolution", "aten::upsample", "aten::_upsample")
LEAST_DIMS = 3


def larger_batch(case: Case) -> Proposal | None:
    return _calls_as_one(case) or _passes_as_one(case) or _samples_as_one(case)


def double_batch(case: Case) -> Proposal | None:
    return _twice_the_rows(case) or _twice_for_each_launch(case)


def _twice_for_each_launch(case: Case) -> Proposal | None:
    """Return a proposal to double the batch where the GPU waits for launches for most of the time.

    The launches take the CPU as long for twice the batch. What the CPU computes itself grows with it, so that none of
    the step may be such work. Each activity on the GPU takes twice as long, except for the optimizer's and the
    collectives, whose sizes are those of the parameters.
    """
    summary = case.summary
    steady = summary.steady
    if summary.waits_for != "overhead" or steady is None or summary.training.loading or not case.trace.has_steps:
        return None
    if steady.idle_not_launched_us < MOSTLY * summary.steady_us:
        return None
    if any(cpu_stretches(step) or pauses(step) for step in case.steps):
        return None
    updates = case.launched_in(OPTIMIZER)
    as_long = {work for work, one, _ in case.activities if id(work) in updates or one.family == "communication"}
    share = steady.idle_not_launched_us / summary.steady_us
    return _doubled(
        case,
        as_long,
        f"the GPU waits for launches {share:.0%} of the time",
        "process twice as many samples in one step, with no more launches",
    )


def _twice_the_rows(case: Case) -> Proposal | None:
    """Return a proposal to double the batch in inference.

    Products of few rows that read weights take the same time for twice the batch.
    """
    if case.trace.trains or case.peaks is None:
        return None
    few = {one.rows for one in case.summary.llm.weight_reads if one.ridge_rows and 2 * one.rows <= one.ridge_rows}
    reads = {work for work, one, _ in case.activities if one.product and one.product.m in few}
    if not reads or sum(work.us for work in reads) < MOSTLY * case.summary.summed_us:
        return None
    return _doubled(
        case,
        reads,
        f"{counted(len(reads), 'product')} of {counted(min(few), 'row')} or more read weights for most of their time",
        "process twice as many sequences in one step",
    )


def _doubled(case: Case, as_long: Container[Work], evidence: str, how: str) -> Proposal:
    """Return the proposal to double the batch. as_long: the typical step's activities that it does not make longer."""
    longer = {work: 2 * one.us for work, one, _ in case.activities if work not in as_long}
    graph = with_durations(case.graph, case.in_all_steps(longer))
    evidence += "; the time after it is half a step of twice the batch"
    return Proposal(graph, evidence, how, assumed=True, shared=2)


def _calls_as_one(case: Case) -> Proposal | None:
    """Return a proposal to replace equal products of independent tensors by one batched product."""
    taken = sum(op.kind == "op" for op in case.step.named(SLICES.__contains__))
    # Calls on slices of one tensor, and calls whose results are stacked, are independent of each other. Layers of a
    # network need the layer before.
    runs = [
        (count, run)
        for count, run in _repeated(case.activities)
        if count >= MANY_ALIKE and (count <= taken or _stacks(run[-1]))
    ]
    if not runs:
        return None
    groups = []
    for _, run in runs:
        us = sum(one.us for _, one, _ in run)
        products = [one for _, one, _ in run if one.product]
        moved = [one.bytes_moved for one in products]
        if case.peaks and moved and None not in moved:
            us = min(us, max(products[0].us, moving_us(sum(moved), case.peaks)))
        groups.append(([work for work, _, _ in run], us))
    count, longest = max(runs, key=lambda run: run[0])
    return Proposal(
        case.condensed(groups, prices.CALL_US, _WithSlices()),
        f"{count} calls of {longest[0][2].name} in a row, on tensors of equal shape",
        "stack the inputs and call torch.bmm once, if no call needs another one's result",
        assumed=True,
        title="batch equal operations into one",
    )


class _WithSlices:
    """Widens a span of calls to the whole loop: from its memory and its first slice to the next op after the calls."""

    def __init__(self):
        self.ops: dict[tuple, list[Op]] = {}  # by step and thread, in order

    def __call__(self, step: Step, track: tuple, start: int, end: int) -> tuple[int, int]:
        key = id(step), track
        if key not in self.ops:
            self.ops[key] = [op for op in step.outermost if op.track == track]
        ops = self.ops[key]
        place = bisect.bisect_left(ops, start, key=lambda op: op.start)
        while place and ops[place - 1].name in (*SLICES, *EMPTY):
            place -= 1
            start = ops[place].start
        following = bisect.bisect_left(ops, end, key=lambda op: op.start)
        return start, ops[following].start if following < len(ops) else end


def _repeated(activities: Sequence[Entry]) -> Iterator[tuple[int, list[Entry]]]:
    """Yield runs of equal products with only equal copies between them: the number of products, and all activities."""

    activities = [entry for entry in activities if entry[1].kind != "memset"]
    kinds: list[tuple | None] = [None] * len(activities)  # of the products and copies
    products = []
    for place, (_, one, op) in enumerate(activities):
        if one.family in ("GEMM", "copy") and op is not None:
            kinds[place] = one.name, one.product, op.name
            if one.family == "GEMM":
                products.append(place)
    end = 0
    for place in products:
        if place < end:
            continue
        count = period = 1
        for repeated in (1, 2, 3):
            reached = place + repeated
            while reached < len(kinds) and kinds[reached] is not None and kinds[reached] == kinds[reached - repeated]:
                reached += 1
            if (reached - place) // repeated > count:
                count, period = (reached - place) // repeated, repeated
        end = place + count * period
        if count > 1:
            following = [entry for entry in activities[end : end + 1] if _stacks(entry)]
            yield count, activities[place:end] + following


def _stacks(entry: Entry) -> bool:
    _, _, op = entry
    return op is not None and op.name == "aten::cat"


def _passes_as_one(case: Case) -> Proposal | None:
    """Return a proposal to compute equal passes of forward and backward, each on a slice of the batch, as one.

    The iterations of an attack, each of which needs the one before it, take no slices of their own. Whether a pass
    needs another one's state is not recorded. A batch norm computes other statistics of the whole batch.
    """
    begins = backward_begins(case.trace, case.step)
    if len(begins) < MANY_PASSES or case.summary.waits_for != "overhead" or not _take_slices(case.step, begins):
        return None
    if case.has(lambda name: BATCH_NORM in name):
        return None
    if any(one.start < begins[-1].start for one in labels(case.step, OPTIMIZER)):
        return None  # a pass needs the weights that the one before it updates
    repeat = next((one for one in case.summary.repeats if len(begins) - 1 <= one.times <= len(begins)), None)
    if repeat is None or repeat.replays or not _are_equal(repeat.places, case.summary.gpu_work):
        return None
    idle = 1 - case.summary.busy_share
    same = f"launch {counted(repeat.pieces, 'GPU activity', 'GPU activities')} each"
    if repeat.times < len(begins):
        same = f"{repeat.times} of them {same}"
    return Proposal(
        _at_once(case, repeat.places),
        f"{len(begins)} passes of forward and backward take a slice of a batch each; {same}; the GPU is idle for "
        f"{idle:.0%} of the time",
        "if no pass needs another one's result and all activations fit into memory, give the model the whole batch at "
        "once; if each sample's own gradient is needed, torch.func.vmap(grad(…))",
        assumed=True,
        title="compute equal passes at once",
    )


def _take_slices(step: Step, begins: Sequence[Op]) -> bool:
    """Return whether each pass takes a slice that no other pass takes. begins: the first node of each backward pass."""
    starts = [op.start for op in begins]
    taken: list[set[tuple]] = [set() for _ in begins]
    for op in step.named(SLICES.__contains__):
        place = bisect.bisect_right(starts, op.start)
        if place < len(taken) and op.inputs.concrete and not in_backward(op):
            taken[place].add((op.name, tuple(op.inputs.concrete)))
    passes = Counter(one for some in taken for one in some)
    return all(any(passes[one] == 1 for one in some) for some in taken)


def _samples_as_one(case: Case) -> Proposal | None:
    """Return a proposal to compute a loop over the samples of a batch at once, in a step without backward.

    A recurrent loop over time also takes parts of a tensor, and each pass needs the one before it. So the passes have
    to compute with images, or with slices of length one that keep the dimension of the batch.
    """
    if case.trace.trains or case.summary.waits_for != "overhead":
        return None
    samples, keeps = _samples(case.step)
    if samples < MANY_PASSES or not (keeps or case.has(lambda name: name.startswith(OF_IMAGES))):
        return None
    if any(op.inputs.concrete[5:6] != ["False"] for op in case.step.named("aten::batch_norm".__eq__)):
        return None  # in training, a batch norm computes other statistics of the whole batch
    found = repeated_names([one.name for one in case.step.work])
    if found is None or not samples - 1 <= found[2] <= samples:
        return None
    start, pieces, times = found
    places = [range(at, at + pieces) for at in range(start, start + pieces * times, pieces)]
    if not _are_equal(places, case.summary.gpu_work):
        return None
    return Proposal(
        _at_once(case, places),
        f"{samples} passes compute with one sample of a batch each, and launch "
        f"{counted(pieces, 'GPU activity', 'GPU activities')} each; the GPU is idle for "
        f"{1 - case.summary.busy_share:.0%} of the time",
        "if no pass needs another one's result and the memory allows, compute the whole batch at once",
        assumed=True,
        title="compute equal passes at once",
    )


def _samples(step: Step) -> tuple[int, bool]:
    """Return how many parts of one tensor a step takes along its first dimension, and whether these keep the dimension.

    The largest number of parts counts. Numbers are no samples, such as the times of a diffusion model's iterations.
    """
    taken: dict[tuple, set[str]] = defaultdict(set)
    for op in step.named(("aten::select", "aten::slice").__contains__):
        dims, (dim, *place) = op.inputs.dims[:1], op.inputs.concrete[1:4] or [""]
        keeps = op.name == "aten::slice"
        if dim != "0" or not dims or len(dims[0]) < LEAST_DIMS - keeps or not place:
            continue
        if not keeps or _is_of_one(place):
            taken[op.name, tuple(dims[0])].add(place[0])
    (name, _), parts = max(taken.items(), key=lambda entry: len(entry[1]), default=(("", ()), set()))
    return len(parts), name == "aten::slice"


def _is_of_one(place: Sequence[str]) -> bool:
    return len(place) == 2 and all(map(IS_INDEX, place)) and int(place[1]) - int(place[0]) == 1


def _at_once(case: Case, passes: Sequence[Sequence[int]]) -> Graph:
    """Return the graph in which these passes are one. passes: the positions of each one's activities in the step."""
    groups = []
    for places in zip(*passes, strict=True):
        one = case.summary.gpu_work[places[0]]
        groups.append(([case.step.work[place] for place in places], _batched_us(case, one, len(places))))
    spans = []
    for here in case.counterparts:
        first, *_, last = [[here.get(case.step.work[place]) for place in places] for places in passes]
        if None not in (*first, *last):
            calls = [[one.launch.outermost_call() for one in some if one.launch is not None] for some in (first, last)]
            ends = [max(op.end for op in ops) for ops in calls]
            spans += [(track, *ends) for track in case.graph.threads]
    return without_cpu_time(fused(case.graph, case.groups_in_all_steps(groups)), spans)


def _are_equal(passes: Sequence[Sequence[int]], work: Sequence[GpuWork]) -> bool:
    """Return whether the activities of all passes have the same grids, and none communicates."""
    return all(
        work[first].family != "communication" and all(work[place].grid == work[first].grid for place in others)
        for first, *others in zip(*passes, strict=True)
    )


def _batched_us(case: Case, one: GpuWork, count: int) -> float:
    """Return the time (µs) of one kernel for as much work as so many of these kernels."""
    together = as_one_kernel_us(case, [one.us] * count, count * math.prod(one.grid or [0]))
    least = moving_us(count * (one.bytes_moved or 0), case.peaks) if case.peaks else 0.0
    return min(count * one.us, max(together, least, prices.LEAST_KERNEL_US))


def _follows_larger_batch(before: Side, after: Side) -> bool:
    """The matrix products have the same FLOPs in at most half as many kernels."""
    was, now = (products(side) for side in (before, after))
    return len(now) <= LEFT * len(was) and same_flops(was, now)


CHANGES = (
    Change(
        "larger_batch",
        "give each launch more work",
        "no call or pass needs what another one computes",
        larger_batch,
        _follows_larger_batch,
    ),
    Change(
        "double_batch",
        "double the batch",
        "launches, and products of few rows that read weights, take as long for twice the batch",
        double_batch,
    ),
)
