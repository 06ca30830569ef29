"""Changes that give each launch more work: a larger batch, equal operations as one, and equal passes as one."""

import bisect
from collections.abc import Container, Iterator, Sequence

from tracereader.changes import prices
from tracereader.changes.change import change
from tracereader.changes.context import Case, Entry
from tracereader.changes.equal_passes import loops, passes_at_once
from tracereader.changes.host import host
from tracereader.changes.opportunity import Proposal
from tracereader.changes.roofline import moving_us
from tracereader.findings.finding import counted
from tracereader.replay import with_durations
from tracereader.trace import Op, Step, Work
from tracereader.trace.labels import OPTIMIZER
from tracereader.trace.op_names import EMPTY, SLICES
from tracereader.two_runs.same_work import LEFT, products, same_flops
from tracereader.two_runs.side import Side

# From this many equal kernels of one op in a row on, they can be batched.
MANY_ALIKE = 16
MOSTLY = 0.5  # of a step's GPU time


def _follows_larger_batch(before: Side, after: Side) -> bool:
    """The matrix products have the same FLOPs in at most half as many kernels."""
    was, now = (products(side) for side in (before, after))
    return len(now) <= LEFT * len(was) and same_flops(was, now)


@change("give each launch more work", "no call or pass needs what another one computes", followed=_follows_larger_batch)
def larger_batch(case: Case) -> Proposal | None:
    return _calls_as_one(case) or passes_at_once(case)


@change("double the batch", "launches, and products of few rows that read weights, take as long for twice the batch")
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
    if any(host(step).computing or host(step).pauses for step in case.steps) or loops(case.trace, case.step):
        return None  # each sample of a loop has launches of its own
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
