"""Changes of copies and memory: copies ahead, and activations that are not recomputed."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, pairwise

from tracereader.changes import prices
from tracereader.changes.change import change
from tracereader.changes.context import Case
from tracereader.changes.opportunity import Proposal
from tracereader.figures.gpu_work import GpuWork
from tracereader.figures.phases import backward_nodes
from tracereader.figures.training import recomputed_ops
from tracereader.findings.device_words import CUDA_OR_HIP
from tracereader.findings.finding import counted, duration, size
from tracereader.replay.changes import overlapped, with_durations, without_cpu_time, without_ops, without_waits
from tracereader.trace import Op, Step
from tracereader.trace.families import HEAVY
from tracereader.trace.grouped import grouped
from tracereader.trace.waits import is_wait
from tracereader.two_runs.faster import step_us
from tracereader.two_runs.same_work import LEFT, as_compiled, halved, same_heavy
from tracereader.two_runs.side import Side

WAITS_LONGER = 2  # times as long as the copies: from there on, the wait in their calls is what is saved
# CUDA stages a copy of up to 64 KB between the GPU and pageable memory. A result of this size takes a few µs to copy,
# so the time that it costs is the CPU's wait for it (remove_sync).
STAGED_BYTES = 64 * 1024
KEEPS_INPUTS = "_NoopSaveInputs"  # torch.utils.checkpoint, with use_reentrant=False


def _no_new_heavy_work(before: Side, after: Side) -> bool:
    """Return whether no product or attention kernel is new, and more than half of them are left."""
    was, now = (Counter(one.name for one in side.summary.gpu_work if one.family in HEAVY) for side in (before, after))
    return set(now) <= set(was) and LEFT * was.total() < now.total() <= was.total()


@change(
    "keep activations instead of recomputing them",
    "the activations fit into memory",
    followed=halved(
        lambda side: one.calls if (one := side.summary.training.recomputed) else 0, _no_new_heavy_work, as_compiled
    ),
    keys=("no_checkpoint",),
)
def no_recompute(case: Case) -> Proposal | None:
    if (recomputed := case.summary.training.recomputed) is None:
        return None
    ops = [op for step in case.steps for op in recomputed_ops(step)]
    spans = [*_stretches(ops), *(span for step in case.steps for span in chain(_entering(step), _unpacking(step)))]
    return Proposal(
        without_cpu_time(without_ops(case.graph, ops), spans),
        f"{counted(recomputed.calls, 'forward op')} run again in backward: "
        f"{duration(recomputed.gpu_us or 0.0)} of GPU time",
        "checkpoint fewer blocks, as far as memory allows",
    )


def _stretches(ops: Sequence[Op]) -> Iterator[tuple[tuple, int, int]]:
    """Yield the spans of these ops within each parent op of the backward.

    A span has the checkpoint's own calls: from the parent's start, until its next op begins or it ends.
    """
    for some in grouped((id(op.parent), op) for op in ops).values():
        parent, last = some[0].parent, max(op.end for op in some)
        end = min((op.start for op in parent.children if op.start >= last), default=parent.end)
        yield some[0].track, parent.start, end


def _entering(step: Step) -> list[tuple[tuple, int, int]]:
    """Return the spans in which forward enters a checkpoint: Python that also keeps the state of the random numbers.

    They end with the op that keeps the inputs. Checkpoints with use_reentrant=True call none.
    """
    ops = [op for op in step.outermost if op.kind == "op" and op.name != "aten::empty"]
    entered = (pair for pair in pairwise(ops) if pair[1].name == KEEPS_INPUTS and pair[0].track == pair[1].track)
    return [(op.track, before.end, op.end) for before, op in entered]


def _unpacking(step: Step) -> list[tuple[tuple, int, int]]:
    """Return the spans in which the checkpoint's hooks give backward's nodes the recomputed tensors.

    That is Python before a node's first op. The lower quartile is the time of a node that asks for no such tensor. In
    "gpt2/recompute" the others take 2 to 7 launches there, and below 1 without checkpoints ("gpt2/sdpa").
    """
    nodes = [node for node in backward_nodes(step) if node.children and node.children[0].children]
    begun = [(node, node.children[0].children[0].start) for node in nodes]
    usual = sorted(first - node.start for node, first in begun)[len(begun) // 4] if begun else 0
    return [(node.track, min(node.start + usual, first), first) for node, first in begun]


def _follows_overlap_copies(before: Side, after: Side) -> bool:
    """As many bytes are copied to and from the GPU, and at most half of the time of exposed copies remains."""
    was, now = (
        sum(one.bytes_moved or 0 for way in ("HtoD", "DtoH") for one in side.summary.gpu_work if way in one.name)
        for side in (before, after)
    )
    steady = [(side.summary.steady, side.summary.steady_us) for side in (before, after)]
    shares = [gpu.exposed_copy_us / us if gpu and us else 0.0 for gpu, us in steady]
    gone = shares[1] * step_us(after) <= LEFT * shares[0] * step_us(before)
    return 0 < was == now and gone and same_heavy(before, after)


@change(
    "copy the next batch while this one is computed",
    "a copy beside kernels slows neither; the CPU reads a result one step later",
    followed=_follows_overlap_copies,
    needs=CUDA_OR_HIP,
    keys=("pin_memory", "non_blocking"),
)
def overlap_copies(case: Case) -> Proposal | None:
    """Return a proposal to copy batches and large results on a stream of their own, from and to pinned memory."""
    copied = [one for one in case.activities if one[0].kind == "memcpy" and id(one[0].launch) not in case.offloads]
    batches = [(work, one) for work, one, op in copied if "HtoD" in one.name and not (op and case.is_internal(op))]
    results = [(work, one) for work, one, _ in copied if "DtoH" in one.name and (one.bytes_moved or 0) > STAGED_BYTES]
    if not (copies := batches + results):
        return None
    pageable = [(work, one) for work, one in copies if "Pageable" in one.name]
    times = {work: min(one.us, (one.bytes_moved or 0) / prices.PINNED_GB_S / 1e3) for work, one in pageable}
    graph = with_durations(case.graph, case.in_all_steps(times))
    moved = case.in_all_steps(dict.fromkeys((work for work, _ in copies), 0.0))
    pinned = {id(work) for work, _ in pageable}
    batch = "pin the batches (pin_memory=True), copy with non_blocking=True on a stream of its own, a step ahead"
    if not any(id(work) in pinned for work, _ in batches):
        batch = "copy the next batch with non_blocking=True on a stream of its own while this one is computed"
    if small := all((one.bytes_moved or 0) <= STAGED_BYTES for _, one in batches):
        batch = 'make these small tensors on the GPU (device="cuda"), or copy them once before the steps'
    pinned_copy = "copy results with non_blocking=True into tensors made with pin_memory=True"
    result = f"{pinned_copy}, on a stream of its own, and read them a step later"
    evidence = [
        f"{_amount([one for _, one in some])} {way} the GPU"
        + (f" {end} pageable memory" if any(id(work) in pinned for work, _ in some) else "")
        + f": {duration(sum(one.us for _, one in some))}"
        for some, way, end in ((batches, "to", "from"), (results, "from", "to"))
        if some
    ]
    waits_us = sum(one.us for one in _waiting_with(work.launch for work, _ in copies if work.launch))
    if waits_us > WAITS_LONGER * sum(one.us for _, one in copies):
        evidence.append(f"the CPU waits for the GPU in these calls for {duration(waits_us)}, and then it would not")
    return Proposal(
        overlapped(without_waits(graph, _waiting_with(work.launch for work in moved if work.launch)), moved),
        "; ".join(evidence),
        "; ".join([batch] * bool(batches) + [result] * bool(results)),
        assumed=bool(pageable),
        title="overlap the copies with computation" if batches and results
        else "copy results while the next step is computed" if results
        else "make small tensors on the GPU" if small else None,
    )  # fmt: skip


def _amount(copies: Sequence[GpuWork]) -> str:
    """Return how many copies these are, and of how much."""
    total = size(sum(one.bytes_moved or 0 for one in copies))
    return f"1 copy of {total}" if len(copies) == 1 else f"{len(copies):,} copies ({total} in total)"


def _waiting_with(copies: Iterable[Op]) -> list[Op]:
    """Return these calls of copies, and the calls of the same ops after them, which wait for the copies."""
    calls = sorted(copies, key=lambda call: call.start)
    found = {id(call): call for call in calls}
    for first, *_ in grouped((id(call.parent), call) for call in calls).values():
        if (op := first.parent) is not None and op.kind == "op":
            found |= {id(one): one for one in op.children if one.start > first.start and is_wait(one)}
    return list(found.values())
