"""Changes of data parallel training: how often a rank gathers parameters and reduces gradients."""

import bisect
from collections.abc import Iterator, Sequence
from itertools import chain, takewhile

from tracereader.changes import prices
from tracereader.changes.change import change
from tracereader.changes.context import Case
from tracereader.changes.opportunity import Proposal
from tracereader.figures.gpu_time import is_communication
from tracereader.figures.steps import labels
from tracereader.findings.finding import counted, duration
from tracereader.replay.changes import with_durations, without_cpu_time, without_ops
from tracereader.trace import Op, Step, Work, start_of
from tracereader.trace.grouped import grouped
from tracereader.trace.intervals import Lengths, union
from tracereader.trace.labels import (
    ALL_REDUCE,
    AUTOGRAD,
    DDPS_COPIES,
    DDPS_FORWARD,
    DESCRIBES_COLLECTIVE,
    FSDPS_FORWARD,
    GATHERS,
    GATHERS_AGAIN,
    OLDER_FSDP,
    OPTIMIZER,
    REDUCES_A_BLOCK,
)
from tracereader.two_runs.same_jobs import gathers_less, reduces_less_often, sends_no_buffers

# DDP flattens the buffers of one type, sends them, and copies them back into the model's tensors.
BROADCAST, COPY = "c10d::broadcast_", "aten::copy_"
SENDS_BUFFERS = ("aten::flatten_dense_tensors", BROADCAST, DESCRIBES_COLLECTIVE, "aten::unflatten_dense_tensors", COPY)
FORWARDS = (DDPS_FORWARD, FSDPS_FORWARD, f"{OLDER_FSDP}forward")
REDUCE_SCATTER = "c10d::_reduce_scatter_base_"


@change("keep gathered parameters for backward", "all parameters fit into memory", jobs_followed=gathers_less)
def keep_parameters(case: Case) -> Proposal | None:
    """Return a proposal to keep the parameters that FSDP gathers for the forward pass until the backward pass."""
    if not (in_typical := _gathered_again(case.step)):
        return None
    work = [one for op in in_typical for one in op.work_below()]
    gathered = sum(op.name.startswith(GATHERS[0]) for op in in_typical)
    return Proposal(
        without_ops(case.graph, [op for step in case.steps for op in _gathered_again(step)]),
        f"the backward pass gathers the parameters of {counted(gathered, 'block')} again: "
        f"{duration(sum(one.us for one in work))} of GPU work, {duration(sum(op.us for op in in_typical))} of CPU time",
        "fully_shard(…, reshard_after_forward=False), as far as memory allows",
    )


def _gathered_again(step: Step) -> list[Op]:
    """Return FSDP's annotations of gathering a block's parameters for the backward pass."""
    return [op for op in labels(step, GATHERS) if _is_for_backward(op)]


@change(
    "reduce gradients once per optimizer step",
    "all passes are of one model; with FSDP, all parameters and gradients fit into memory",
    jobs_followed=reduces_less_often,
)
def reduce_once(case: Case) -> Proposal | None:
    """Return a proposal to reduce gradients in the last of several backward passes before an optimizer step only."""
    if not case.has(FORWARDS.__contains__):
        return None
    passes, repeated = _repeated(case.trace.steps)
    if not (in_typical := list(_between(repeated, case.step.start, case.step.end))):
        return None
    ops = [op for step in case.steps for op in _between(repeated, step.start, step.end)]
    work = [one for op in in_typical for one in op.work_below()]
    communication_us = sum(one.us for one in work if is_communication(one))
    others_us = sum(one.us for one in work) - communication_us
    others = f" and {duration(others_us)} of copies and scaling" if others_us else ""
    gathers, reduces = (any(op.name.startswith(GATHERS) is it for op in in_typical) for it in (True, False))
    does = " and ".join(["gathers the parameters"] * gathers + ["reduces the gradients"] * reduces)
    how = "model.no_sync() around all passes but the last"
    if any(op.name == REDUCE_SCATTER for op in in_typical):
        how += ", as far as memory allows"
    elif gathers:
        calls = ["model.set_requires_gradient_sync(False)"] * reduces + ["model.set_reshard_after_backward(False)"]
        how = f"{' and '.join(calls)} for all passes but the last, as far as memory allows"
    return Proposal(
        with_durations(without_ops(case.graph, ops), dict(_sped_up(case.steps, ops))),
        f"each of {passes} passes before an optimizer step {does}; the repetitions take "
        f"{duration(communication_us)} of communication{others}",
        how,
        assumed=True,
        title=None if reduces else "gather parameters once per optimizer step",
    )


def _repeated(steps: Sequence[Step]) -> tuple[int, list[Op]]:
    """Return the most backward passes before an optimizer step, and what all but one of them repeat, by start.

    This is the reduction of gradients in all passes but the last, and with FSDP the gathering of parameters in all
    forward passes but the first. Passes may be in several steps. Without any optimizer step the result is empty. Passes
    that may belong to several models are left out: those that reduce different numbers of buckets or blocks, unless
    only the last one reduces any after each of them ran backward, and those that as many optimizer steps follow.
    """
    forwards = (op for step in steps for op in labels(step, FORWARDS))
    # The older FSDP annotates the forward pass of each block, too.
    begins = sorted(op.start for op in forwards if not any(above.name in FORWARDS for above in op.above()))
    updates = sorted(op.start for step in steps for op in labels(step, OPTIMIZER))
    if len(begins) < 2 or not updates:
        return 0, []
    # The reductions by the number of the forward pass before them, and the numbers of these passes by optimizer step.
    reductions = grouped((bisect.bisect_right(begins, op.start) - 1, op) for op in _reductions(steps))
    of_update = grouped((bisect.bisect_right(updates, begin), number) for number, begin in enumerate(begins))
    copies = [op for step in steps for op in step.named(lambda name: name.startswith(DDPS_COPIES))]
    gathers = [op for step in steps for op in labels(step, GATHERS) if not _is_for_backward(op)]
    backward = [op for step in steps for op in labels(step, GATHERS_AGAIN)]
    most, found = 0, []
    for update, numbers in of_update.items():
        *early, last = numbers
        needed, following = len(reductions[last]), begins[last + 1] if last + 1 < len(begins) else steps[-1].end
        of_early = {len(reductions[number]) for number in early}
        reduces_once = of_early == {0} and all(any(_between(backward, *begins[one : one + 2])) for one in early)
        if not needed or not (of_early == {needed} or reduces_once):
            continue
        if bisect.bisect_left(updates, following) - update >= len(numbers):
            continue
        most = max(most, len(numbers))
        found += [op for number in early for op in reductions[number]]
        found += _between(copies, begins[early[0]], begins[last])
        found += _between(gathers, begins[numbers[1]], updates[update] if update < len(updates) else steps[-1].end)
    return most, sorted(found, key=start_of)


def _reductions(steps: Sequence[Step]) -> Iterator[Op]:
    """Yield the calls with which DDP and the older FSDP reduce gradients, and fully_shard()'s annotations of them."""
    for step in steps:
        yield from labels(step, REDUCES_A_BLOCK)
        for op in step.named(lambda name: name in (ALL_REDUCE, REDUCE_SCATTER)):
            above = [one.name for one in op.above()]
            # A call outside backward is the program's own, such as the loss's. Those of fully_shard() are annotated.
            annotated = any(one.startswith(REDUCES_A_BLOCK) for one in above)
            if any(one.startswith(AUTOGRAD) for one in above) and not annotated:
                yield op


def _between(ops: Sequence[Op], start: int, end: int) -> Iterator[Op]:
    return (op for op in ops if start <= op.start < end)


def _sped_up(steps: Sequence[Step], gone: Sequence[Op]) -> Iterator[tuple[Work, float]]:
    """Yield the kernels beside collectives that are gone, each with its shorter time (µs)."""
    removed = {id(one): one for op in gone for one in op.work_below()}
    beside = Lengths(union((one.start, one.end) for one in removed.values() if is_communication(one)))
    for step in steps:
        for one in step.work:
            if one.kind != "kernel" or id(one) in removed or is_communication(one):
                continue
            if together := beside.between(one.start, one.end):
                yield one, one.us - prices.BESIDE_A_COLLECTIVE * together / 1e3


def _is_for_backward(op: Op) -> bool:
    return any(above.name.startswith(GATHERS_AGAIN) for above in op.above())


@change(
    "keep each rank's own buffers",
    "batch norms in training read no buffers",
    jobs_followed=sends_no_buffers,
    keys=("ddp_no_buffers",),
)
def keep_buffers(case: Case) -> Proposal | None:
    """Return a proposal not to send the model's buffers, such as a batch norm's, to all ranks in each forward pass."""
    in_typical = [op for some in _broadcasts(case.step) for op in some]
    if not in_typical:
        return None
    stretches = [some for step in case.steps for some in _broadcasts(step)]
    spans = [(some[0].track, some[0].start, some[-1].end) for some in stretches]
    copied = sum(op.name == COPY for op in in_typical)
    return Proposal(
        without_ops(without_cpu_time(case.graph, spans), chain.from_iterable(stretches)),
        f"DistributedDataParallel sends {counted(copied, 'buffer')} of rank 0 to all ranks before each forward pass: "
        f"{duration(sum(op.us for op in in_typical))} of CPU time",
        "DistributedDataParallel(…, broadcast_buffers=False), if only rank 0 evaluates and saves the model",
    )


def _broadcasts(step: Step) -> Iterator[list[Op]]:
    """Yield the ops with which each forward pass of DDP begins by sending buffers, if it does."""
    for forward in labels(step, DDPS_FORWARD):
        leading = list(takewhile(lambda op: op.name in SENDS_BUFFERS, forward.children))
        while leading and leading[-1].name != COPY:
            del leading[-1]
        if any(op.name == BROADCAST for op in leading):
            yield leading
