"""Changes after which less is computed: sparse gradients, no sort of all values, one gradient for indices, padding."""

import math
from collections import Counter
from collections.abc import Iterator, Sequence

from tracereader.changes import prices
from tracereader.changes.change import change
from tracereader.changes.context import Case
from tracereader.changes.equal_passes import IS_INDEX
from tracereader.changes.opportunity import Proposal
from tracereader.findings.device_words import CUDA
from tracereader.findings.finding import counted, duration, listed
from tracereader.replay.changes import fused, spans_of, with_cpu_time, with_durations, without_cpu_time, without_ops
from tracereader.trace import Op, Step, Work
from tracereader.trace.families import HEAVY
from tracereader.trace.grouped import grouped
from tracereader.trace.labels import AUTOGRAD, GIVES_GRADIENT, OPTIMIZER
from tracereader.trace.op_names import ADDS, SDPA, SOFTMAX
from tracereader.two_runs.same_work import halved, same_heavy, same_products

DENSE_BACKWARD = ("aten::embedding_dense_backward", "aten::_embedding_bag_dense_backward")
# Rows of a table for each row that a step looks up. The optimizer of a vocabulary of a language model gains little.
ROWS_FOR_EACH = 50
SORTS, LARGEST = "aten::sort", "aten::topk"
LEAST_SORTED = 16_384  # values in a row
HIDES = {SDPA, *ADDS, "aten::masked_fill", "aten::masked_fill_"}
INDEX_BACKWARD = "aten::select_backward"
MANY_PARTS = 4  # of one tensor that are taken by their indices
# What sorts indices to make the gradient of gathered rows, and how to gather them instead.
SORTS_INDICES = {
    "aten::_index_put_impl_": "x.index_select(dim, i.flatten()) instead of x[i], and gather instead of x[rows, i]",
    DENSE_BACKWARD[0]: "weight.index_select(0, i.flatten()).unflatten(0, i.shape) instead of nn.Embedding",
}
ADDS_BY_INDEX = ("aten::index_add_", "aten::scatter_add_")


@change(
    "give embeddings sparse gradients",
    "the optimizer's time is proportional to the number of gradients",
    followed=halved(lambda side: not side.summary.training.has_sparse_gradients, same_products),
)
def sparse_gradients(case: Case) -> Proposal | None:
    """Return a proposal to give large tables sparse gradients. The optimizer then updates only the rows in use."""
    in_steps, typical = case.in_each_step(_dense_gradients)
    if not typical or not case.summary.training.optimizers:
        return None
    gradients = [math.prod(op.inputs.dims[0]) for op in case.step.named(GIVES_GRADIENT.__eq__) if op.inputs.dims]
    tables = [elements for _, elements in typical]
    if not gradients or any(elements not in gradients for elements in tables):
        return None  # a table without its own gradient is shared with a layer, whose gradient is dense
    share = sum(tables) / sum(gradients)
    updates = case.launched_in(OPTIMIZER)
    shorter = {work: (1 - share) * one.us for work, one, _ in case.activities if id(work) in updates}
    before = sum(work.us for work in (*shorter, *(work for op, _ in typical for work in op.work_below())))
    adam = any("Adam" in one.name for one in case.summary.training.optimizers)
    each_us = (prices.SPARSE_ADAM_TABLE if adam else prices.SPARSE_TABLE) * case.launch_us
    dense = [op for some in in_steps for op, _ in some]
    shorter = case.in_all_steps(shorter)
    graph = without_ops(with_durations(case.graph, shorter), dense)
    # A table takes as many of the optimizer's launches as of its time.
    graph = without_cpu_time(graph, spans_of([work.launch for work in shorter][: round(share * len(shorter))]))
    return Proposal(
        with_cpu_time(graph, [(op.track, op.end, each_us) for op in dense]),
        f"dense gradients of {counted(len(tables), 'table')} of embeddings are {share:.0%} of all gradients: "
        f"{duration(before)} to make them and to update all rows",
        "nn.Embedding(…, sparse=True) for these with SparseAdam, SGD or Adagrad, if rows not looked up need no update",
        assumed=True,
    )


def _dense_gradients(step: Step) -> list[tuple[Op, int]]:
    """Return the ops that make a dense gradient of a table with few rows in use, and the table's number of elements."""
    found = []
    for op in step.named(DENSE_BACKWARD.__contains__):
        dims, rows = op.inputs.dims, next((int(one) for one in op.inputs.concrete if IS_INDEX(one)), None)
        if rows is not None and len(dims) > 1 and len(dims[0]) > 1 and rows >= ROWS_FOR_EACH * math.prod(dims[1]):
            found.append((op, rows * dims[0][-1]))
    return found


@change(
    "take the largest values before sorting",
    "few values of each row are used; topk takes 0.3 of a sort's time",
    followed=halved(lambda side: side.ops[SORTS], same_products, lambda _, after: after.ops[LARGEST] > 0),
)
def largest_first(case: Case) -> Proposal | None:
    """Return a proposal to take a row's largest values with topk instead of sorting all of them.

    What works on whole rows from a sort to the next product or convolution then works on the few values.
    """
    if case.trace.trains or not case.has(SORTS.__eq__):
        return None
    row, longest, sorts, shorter = None, 0, 0, {}
    for work, one, op in case.activities:
        if one.family in HEAVY or op is None:
            row = None if op is not None else row
            continue
        dims = op.inputs.dims_at(0) or ()
        sorting = any(above.name == SORTS for above in (op, *op.above()))
        if sorting and dims and dims[-1] >= LEAST_SORTED and dims != row:
            row, longest, sorts = dims, max(longest, dims[-1]), sorts + 1
        if row is not None and sorting:
            shorter[work] = prices.TOPK * one.us
        elif row is not None and dims == row:
            shorter[work] = min(one.us, prices.LEAST_KERNEL_US)
    if not sorts:
        return None
    return Proposal(
        with_durations(case.graph, case.in_all_steps(shorter)),
        f"{counted(sorts, 'sort')} of rows of {longest:,} values, with what follows on the sorted rows: "
        f"{duration(sum(one.us for work, one, _ in case.activities if work in shorter))}",
        "if only the largest values matter (top-p, top-k), call torch.topk with a few hundred first",
        assumed=True,
    )


@change(
    "unbind the tensor that a loop indexes",
    "one op makes the whole gradient",
    followed=halved(
        lambda side: side.ops[INDEX_BACKWARD],
        same_heavy,
        lambda before, after: after.ops["aten::unbind"] > before.ops["aten::unbind"],
    ),
    on_cpu=True,
)
def unbind(case: Case) -> Proposal | None:
    """Return a proposal to take all parts of a tensor at once, whose backward is one op.

    The backward of each index makes a gradient of the whole tensor, which is zero but for one part, and adds it to the
    others'. The first one of each tensor stays in the place of that op.
    """
    in_steps, typical = case.in_each_step(_indexed)
    if not typical:
        return None
    whole = listed(dict.fromkeys(sizes.strip("[]").replace(", ", " x ") for _, sizes in typical))
    return Proposal(
        without_ops(case.graph, [op for some in in_steps for op, _ in some]),
        f"for each of {len(typical):,} indices, backward makes a gradient of the whole tensor ({whole}) and adds it: "
        f"{duration(sum(op.dur for op, _ in typical) / 1e3)} of CPU time",
        "for part in tensor.unbind(dim) instead of tensor[:, i] in the loop",
        assumed=True,
    )


def _indexed(step: Step) -> list[tuple[Op, str]]:
    """Return the backward of each index into a tensor of which many parts are taken so, and the tensor's sizes.

    The first of each tensor is left out: it adds its gradient to no other one.
    """
    found = []
    for op in step.named(INDEX_BACKWARD.__eq__):
        node = next((above for above in op.above() if above.name.startswith(AUTOGRAD)), None)
        if node is not None and len(op.inputs.concrete) > 3:
            _, sizes, dim, index = op.inputs.concrete[:4]
            found.append(((str(sizes), str(dim)), (index, node)))
    many = [(sizes, some) for (sizes, _), some in grouped(found).items() if len(dict(some)) >= MANY_PARTS]
    nodes = ((node, sizes) for sizes, some in many for _, node in some)
    return [(node, sizes) for node, sizes in nodes if any(op.name in ADDS for op in node.children)]


@change(
    "gather rows without sorting their indices",
    "backward adds 130 values in a nanosecond with atomic operations",
    followed=halved(
        lambda side: sum(side.ops[name] for name in SORTS_INDICES),
        same_products,
        lambda before, after: any(after.ops[name] > before.ops[name] for name in ADDS_BY_INDEX),
    ),
    needs=CUDA,
)
def index_select(case: Case) -> Proposal | None:
    """Return a proposal to add gradients to the rows of a tensor in one kernel, as index_select and gather do."""
    sorts = list(_sorted_rows(case.step))
    if not sorts:
        return None
    names = {op.name for op, *_ in sorts}
    return Proposal(
        fused(case.graph, case.groups_in_all_steps([(work, us) for _, work, us in sorts])),
        f"backward sorts the indices of {counted(len(sorts), 'gather')}: "
        f"{duration(sum(one.us for _, work, _ in sorts for one in work))} of GPU time, "
        f"{duration(sum(op.dur for op, *_ in sorts) / 1e3)} of CPU time",
        "; ".join([*(SORTS_INDICES[name] for name in SORTS_INDICES if name in names), "gradients add up in any order"]),
        assumed=True,
    )


def _sorted_rows(step: Step) -> Iterator[tuple[Op, list[Work], float]]:
    """Yield the ops that sort indices to add gradients, the work that they launch, and the time (µs) without sorting.

    A mask is left out, which takes each row once, and so is what takes less time than adding without sorting. An
    embedding sorts more than 3,072 indices. Its rows for padding have no gradient, which it may also scale.
    """
    for op in step.named(SORTS_INDICES.__contains__):
        below = [part for part in op.children if part.name != "aten::zeros"]
        of_embedding = op.name == DENSE_BACKWARD[0]
        dims = op.inputs.dims_at(0 if of_embedding else 2)
        is_of_a_gather = any(one.name.startswith(("IndexBackward", "EmbeddingBackward")) for one in op.above())
        is_plain = not of_embedding or list(op.inputs.concrete[3:5]) == ["-1", "False"]
        if dims is None or not (is_of_a_gather and is_plain) or any(part.name == "aten::nonzero" for part in below):
            continue
        work = [one for part in below for one in part.work_below()]
        us = prices.LEAST_KERNEL_US + math.prod(dims) / prices.ATOMIC_ADDS
        if any("Sort" in one.name for one in work) and us < sum(one.us for one in work):
            yield op, work, us


@change("pad each batch less", "nothing to half of the positions are padding, which the recording does not show")
def trim_padding(case: Case) -> Proposal | None:
    """Return a proposal to compute no positions that a mask of each sample hides in the whole batch."""
    if not (hidden := _hidden_positions(case.step)):
        return None
    updates = case.launched_in(OPTIMIZER)
    gradients = {str(op.inputs.dims_at(0)) for op in case.step.named(GIVES_GRADIENT.__eq__)}
    shorter = {}
    for work, one, op in case.activities:
        shapes = [dims for dims in op.inputs.dims if str(dims) not in gradients] if op is not None else []
        times = max((_times_positions(dims, *sizes) for dims in shapes for sizes in hidden), default=0)
        if times and id(work) not in updates:
            shorter[work] = max(min(one.us, prices.LEAST_KERNEL_US), one.us / 2**times)
    samples, positions = (_from_to(numbers) for numbers in zip(*hidden, strict=True))
    before = sum(one.us for work, one, _ in case.activities if work in shorter)
    return Proposal(
        case.graph,
        f"in {counted(hidden.total(), 'call')} of attention, each of a batch's {samples} samples has a mask or bias of "
        f"its own, which may hide some of its {positions} positions; kernels whose time depends on that number take "
        f"{duration(before)}; the estimate goes from no padding to half of the positions",
        "if they hide padding: pad to the longest sample of a batch, and batch samples of similar lengths; the share "
        "of padding is about what this saves",
        assumed=True,
        conditional=True,
        most=with_durations(case.graph, case.in_all_steps(shorter)),
    )


def _from_to(numbers: Sequence[int]) -> str:
    least, most = min(numbers), max(numbers)
    return f"{most:,}" if least == most else f"{least:,} to {most:,}"


def _hidden_positions(step: Step) -> Counter[tuple[int, int]]:
    """Return the calls of self-attention with a mask of each sample, by their numbers of samples and positions."""
    found, scored = Counter(), {str(op.inputs.dims_at(0)) for op in step.named(SOFTMAX.__eq__)}
    for op in step.named(HIDES.__contains__):
        fused, inputs = op.name == SDPA, op.inputs
        scores, mask = inputs.dims_at(0) or (), inputs.dims_at(3 if fused else 1) or ()
        if not len(scores) == len(mask) == 4 or any(above.name in HIDES for above in op.above()):
            continue
        samples, _, queries, _ = scores
        keys = (inputs.dims_at(1) or scores)[2] if fused else scores[3]
        of_each = samples > 1 and mask[0] == samples and queries == keys == mask[3]
        if of_each and (fused or (mask[1] == 1 and str(scores) in scored)):
            found[samples, queries] += 1
    return found


def _times_positions(shape: Sequence[int], samples: int, positions: int) -> int:
    """Return how many of a tensor's sizes are a number of positions: two of the scores of attention."""
    if samples * positions in shape or list(shape[:2]) == [positions, samples]:
        return 1
    if len(shape) < 2 or shape[0] % samples:
        return 0
    return min(list(shape[1:]).count(positions), 1 if shape[0] == samples and len(shape) == 3 else 2)
