"""Whether a second run follows a proposal of the first run's report, with the predicted and the measured step.

MADE has a judge for each change id that two traces can decide. A judge returns True only if the second trace shows the
change, the first one does not, and the traces show no other difference in the work. docs/opportunities.md shows the
judges' docstrings as the signs of a change.
"""

from collections import Counter
from collections.abc import Callable, Sequence

import msgspec

from tracereader.figures.attention import ATTENTION
from tracereader.figures.autograd import BACKWARD, FORWARD
from tracereader.figures.avoidable import CUDNN_ATTENTION, LARGEST_RANK, LOWER
from tracereader.figures.gpu_time import is_python
from tracereader.figures.gpu_work import GpuWork
from tracereader.figures.places import OUTSIDE_PHASES
from tracereader.figures.side import Side
from tracereader.figures.sizes import Product
from tracereader.figures.unfused import BATCHED
from tracereader.findings.avoidable_changes import COPIES_INPUTS, MANY_ZEROED
from tracereader.findings.cpu_changes import MANY_NORMS, NORM
from tracereader.findings.decoding import filled_part, head_of_all
from tracereader.findings.faster import (
    ALMOST,
    FUSABLE,
    graphs_launched,
    share_in_common,
    share_in_graphs,
    share_kept,
    step_us,
    synchronizations,
)
from tracereader.findings.gpu_changes import UNALIGNED
from tracereader.findings.opportunity import Opportunity
from tracereader.findings.ops import with_cpu_tensors
from tracereader.findings.training import MANY_NODES
from tracereader.trace.labels import AUTOGRAD, INDUCTORS_CALL, LOOKUP, REDUCERS_CALLS

# If at most this share remains, the work counts as gone.
LEFT = 0.5
# Matrix products and convolutions whose FLOPs differ by less than this share are the same work.
SAME_FLOPS = 0.05
# If the products run on other kernels, at least this share of the fusable kernels remains.
STAY = 0.7
TENSOR_CORES = ("TF32", "bf16", "fp16")
ALLOCATES = ("cudaMalloc", "cudaFree", "hipMalloc", "hipFree", "cuMem")
HEAVY = ("GEMM", "convolution", "attention", "communication")
PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm")
CONVOLUTIONS = ("aten::convolution", "aten::convolution_backward")


class Checked(msgspec.Struct, frozen=True):
    """The proposals of a report that another run follows together, and that run's measured step (µs).

    also_compiled: whether that run also compiles its kernels, which none of these predictions includes.
    """

    proposals: tuple[Opportunity, ...]
    measured_us: float
    also_compiled: bool = False


def checked(before: Side, proposed: Sequence[Opportunity], after: Side) -> Checked | None:
    """Return the proposals of the first run's report that the second run follows; None if it follows none.

    The result is also None if the runs used different devices or batches of a language model. If only the second one
    waits for a DataLoader, only work that a DataLoader does ahead counts.
    """
    first, second = before.summary, after.summary
    if first.source.devices != second.source.devices or first.source.world_size != second.source.world_size:
        return None
    model = [one and (one.facts.phase, one.facts.batch) for one in (first.llm.decoding, second.llm.decoding)]
    if None not in model and model[0] != model[1]:
        return None
    found = tuple(one for one in proposed if one.change in MADE and MADE[one.change](before, after))
    if second.training.loading and not first.training.loading:
        found = tuple(one for one in found if one.change == "cpu_tensors")
    if not found:
        return None
    also_compiled = _newly_compiled(before, after) and all(one.change == "cuda_graph" for one in found)
    return Checked(found, step_us(after), also_compiled)


def _cuda_graph(before: Side, after: Side) -> bool:
    """Graphs launch most of the second step without its optimizer: nearly all old kernels, or compiled ones."""
    of_optimizers = sum(one.launches for one in after.summary.training.optimizers)
    work = after.summary.gpu_work
    mostly = 2 * sum(one.from_graph for one in work) > len(work) - of_optimizers
    if graphs_launched(before) or not mostly or _update_graph(before, after):
        return False
    return (_compiled(after) and _same_products_as_long(before, after)) or share_kept(before, after) >= ALMOST


def _update_graph(before: Side, after: Side) -> bool:
    """CUDA graphs launch more of about the same kernels, and code after backward takes at most half the CPU time."""
    if share_in_graphs(after) <= share_in_graphs(before) or share_kept(before, after) < ALMOST:
        return False
    was, now = ({one.name: one for one in side.summary.places.by_phase} for side in (before, after))
    if not was.keys() & now.keys() >= {OUTSIDE_PHASES, FORWARD, BACKWARD}:
        return False
    # The two processes' CPU speeds may differ, and if the model is in a graph, too, its CPU time decreases.
    model = [side[FORWARD].cpu_us + side[BACKWARD].cpu_us for side in (was, now)]
    kept = now[OUTSIDE_PHASES].pieces >= ALMOST * was[OUTSIDE_PHASES].pieces
    return kept and now[OUTSIDE_PHASES].cpu_us * model[0] <= LEFT * was[OUTSIDE_PHASES].cpu_us * model[1]


def _static_cache(before: Side, after: Side) -> bool:
    """CUDA graphs launch most of the second step, and it has as many products and attention kernels."""
    return bool(not graphs_launched(before) and graphs_launched(after) and _same_products(before, after))


def _remove_sync(before: Side, after: Side) -> bool:
    """Both steps launch about the same kernels in the same way, and the second one has fewer synchronizations."""
    return synchronizations(after) < synchronizations(before) and _the_same_work(before, after)


def _fused_optimizer(before: Side, after: Side) -> bool:
    """An optimizer is fused or foreach now, whichever torch offers as faster, and the matrix products are the same."""
    offered = {one.name: one.faster for one in before.summary.training.optimizers}
    made = any(one.how and one.how == offered.get(one.name) for one in after.summary.training.optimizers)
    return made and _same_heavy(before, after)


def _fewer_groups(before: Side, after: Side) -> bool:
    """The same optimizer's ops are called at most half as often, and the number of products is the same."""
    was, now = (
        sum(count for name, count in side.ops.items() if name.startswith(("aten::_foreach_", "aten::_fused_")))
        for side in (before, after)
    )
    loops = [[(one.name, one.how) for one in side.summary.training.optimizers] for side in (before, after)]
    return 0 < now <= LEFT * was and loops[0] == loops[1] and _same_products(before, after)


def _norms_at_once(before: Side, after: Side) -> bool:
    """At most half as many norms of single tensors are computed, and the number of products is the same."""
    was, now = (side.ops[NORM] for side in (before, after))
    return was >= MANY_NORMS and now <= LEFT * was and _same_products(before, after) and _by_calls(before, after)


def _data_loader(before: Side, after: Side) -> bool:
    """The kernels are about the same, and at most half of the wait for the DataLoader remains."""
    was, now = (side.summary.training.loading for side in (before, after))
    return was is not None and (now.us if now else 0.0) <= LEFT * was.us and _same_heavy(before, after)


def _cpu_tensors(before: Side, after: Side) -> bool:
    """The kernels are about the same, and at most half of the GPU's idle time in ops on CPU tensors remains."""
    was, now = (_idle_in_ops_on_the_cpu(side) for side in (before, after))
    return now <= LEFT * was and was > 0 and _same_heavy(before, after) and _the_same_work(before, after)


def _idle_in_ops_on_the_cpu(side: Side) -> float:
    """Return the GPU's idle time (µs) in ops on CPU tensors."""
    ops = with_cpu_tensors(side.summary)
    return sum(us for name, us in side.summary.idle_in.items() if name in ops)


def _python(before: Side, after: Side) -> bool:
    """The kernels are about the same, and at most half of the GPU's idle time between ops remains."""
    was, now = (sum(us for name, us in side.summary.idle_in.items() if is_python(name)) for side in (before, after))
    return now <= LEFT * was and bool(was) and _same_heavy(before, after) and _the_same_work(before, after)


def _larger_batch(before: Side, after: Side) -> bool:
    """The matrix products have the same FLOPs in at most half as many kernels."""
    was, now = (_products(side) for side in (before, after))
    return len(now) <= LEFT * len(was) and _same_flops(was, now)


def _fuse_pointwise(before: Side, after: Side) -> bool:
    """Compiled kernels are new, the fusable kernels are fewer or shorter, and the number of products is the same."""
    rows = [[one for one in side.summary.gpu_work if one.family in FUSABLE] for side in (before, after)]
    fewer = len(rows[1]) < ALMOST * len(rows[0])
    shorter = sum(one.us for one in rows[1]) < ALMOST * sum(one.us for one in rows[0])
    attention = [any(one.family == "attention" for one in side.summary.gpu_work) for side in (before, after)]
    as_many = _same_products(before, after) and attention[0] == attention[1]
    as_many = as_many and (_usual_type(before) == _usual_type(after) or _tensor_cores(before, after))
    compiled = _newly_compiled(before, after)
    # A fused kernel moves the bytes of the longest one. Otherwise any small compiled program without products would do.
    as_large = sum(one.us for one in rows[1]) > 0.5 * max((one.us for one in rows[0]), default=0.0)
    return compiled and as_large and (fewer or shorter) and as_many and _by_calls(before, after)


def _fused_attention(before: Side, after: Side) -> bool:
    """Softmaxes between batched products are gone, and fused attention of as many queries and keys is new."""
    gone = len(before.summary.attention.unfused) > len(after.summary.attention.unfused)
    if not _on_the_gpu(before, after):
        return gone and _same_on_the_cpu(before, after, fused=True)
    were, fused = (
        [one for one in side.summary.gpu_work if one.family == "attention" and one.attention]
        for side in (before, after)
    )
    scores = {
        (one.scores.batch, one.scores.queries, one.scores.keys)
        for one in before.summary.attention.unfused
        if one.scores
    }
    sizes = {(one.attention.batch * one.attention.heads, one.attention.queries, one.attention.keys) for one in fused}
    same = bool(scores & sizes) and _equal_single_products(before, after)
    return gone and len(fused) > len(were) and same and not graphs_launched(after)


def _compile_flex(before: Side, after: Side) -> bool:
    """Kernels of flex_attention are new, fewer attentions are unfused, and other products and layers are the same."""
    was, now = (
        sum("flex_attention" in one.name and one.family == "attention" for one in side.summary.gpu_work)
        for side in (before, after)
    )
    gone = len(before.summary.attention.unfused) > len(after.summary.attention.unfused)
    # If the whole model is compiled, it calls the products of linear layers directly.
    linear = before.ops["aten::linear"] == after.ops["aten::linear"]
    return gone and now > was and linear and _equal_single_products(before, after)


def _tensor_cores(before: Side, after: Side) -> bool:
    """As many products and convolutions run in a shorter type: most move from CUDA to tensor cores, or from TF32."""
    moved = _moved(before, after, _on_cuda_cores_us, TENSOR_CORES) or _moved(
        before, after, lambda side: _in_types_us(side, TENSOR_CORES[:1]), TENSOR_CORES[1:]
    )
    kernels = [sum(one.family in FUSABLE for one in side.summary.gpu_work) for side in (before, after)]
    stay = _compiled(after) or kernels[1] >= STAY * kernels[0]
    return moved and stay and _same_products(before, after)


def _single_precision(before: Side, after: Side) -> bool:
    """As many products and convolutions run, and at most half of the time of float64 kernels is left."""
    was, now = (
        sum(one.us for one in side.summary.gpu_work if one.name_says.get("types") == "fp64") for side in (before, after)
    )
    return now <= LEFT * was and now < was and _same_products(before, after)


def _moved(before: Side, after: Side, slow_us: Callable[[Side], float], fast: Sequence[str]) -> bool:
    """Return whether at most half of the slow time is left, and products and convolutions of the fast types are new."""
    was, now = slow_us(before), slow_us(after)
    return was > 0 and now <= LEFT * was and _in_types_us(before, fast) < _in_types_us(after, fast)


def _in_types_us(side: Side, types: Sequence[str]) -> float:
    return sum(one.us for one in _heavy(side) if one.name_says.get("types") in types)


def _align_shapes(before: Side, after: Side) -> bool:
    """As many products run, and at most half as many have a dimension that is not a multiple of 8."""
    was, now = (_single_products(side) for side in (before, after))
    odd = [sum(_is_odd(one) for one in some) for some in (was, now)]
    if not was and not now:  # without shapes, the kernels' names show the alignment
        odd = [sum(UNALIGNED.search(one.name) is not None for one in _heavy(side)) for side in (before, after)]
        return odd[1] <= LEFT * odd[0] and odd[1] < odd[0] and _same_products(before, after)
    return len(was) == len(now) and odd[1] <= LEFT * odd[0] and odd[1] < odd[0] and _same_flops(was, now)


def _channels_last(before: Side, after: Side) -> bool:
    """At most half of the layout conversions remain; the number and types of the convolutions are the same."""
    was, now = (
        sum("nchwToNhwc" in one.name or "nhwcToNchw" in one.name for one in side.summary.gpu_work)
        for side in (before, after)
    )
    types = [(_usual_type(side), _compiled(side)) for side in (before, after)]
    return now <= LEFT * was and now < was and types[0] == types[1] and _same_products(before, after)


def _layout_copies(before: Side, after: Side) -> bool:
    """At most half of the copy kernels remain, and the other kernels are the same."""
    others, copies = [], []
    for side in (before, after):
        rows = [one for one in side.summary.gpu_work if one.kind == "kernel" and one.family != "memset"]
        copies.append(sum(one.family == "copy" for one in rows))
        others.append(Counter(one.name for one in rows if one.family != "copy"))
    return copies[1] <= LEFT * copies[0] and copies[1] < copies[0] and others[0] == others[1]


def _in_place(before: Side, after: Side) -> bool:
    """The kernels are the same, and fewer ops out of place copy their input."""
    fewer = len(after.summary.attention.hidden_copies) < len(before.summary.attention.hidden_copies)
    return fewer and _by_calls(before, after) and share_in_common(before, after) == 1


def _mask_once(before: Side, after: Side) -> bool:
    """The step makes no mask any more, and the products and attention are the same."""
    return (
        before.summary.attention.mask_made is not None
        and after.summary.attention.mask_made is None
        and _same_heavy(before, after)
    )


def _shared_keys(before: Side, after: Side) -> bool:
    """Keys and values are not expanded any more, and the number of products is the same."""
    was, now = (side.summary.llm.unneeded.expanded for side in (before, after))
    return was is not None and now is None and _by_calls(before, after) and _same_products(before, after)


def _cast_weights(before: Side, after: Side) -> bool:
    """Weights are not cast in the steps any more, and the number and the usual type of the products are the same."""
    was, now = (side.summary.llm.unneeded.weight_casts for side in (before, after))
    same = _usual_type(before) == _usual_type(after) and _same_products(before, after)
    return was is not None and now is None and same and _by_calls(before, after)


def _last_logits(before: Side, after: Side) -> bool:
    """The product with the vocabulary makes only the needed rows, and the number of products is the same."""
    head, needed = head_of_all(before.summary)
    if head is None:
        return False
    shapes = [one.product for one in _single_products(after)]
    now = [one for one in shapes if (one.k, one.n) == (head.product.k, head.product.n)]
    return bool(now) and all(one.m <= needed for one in now) and _same_products(before, after)


def _kv_cache(before: Side, after: Side) -> bool:
    """Attention has as many calls, and fewer than half of the queries; the number of products is the same."""
    was, now = (
        sum(one.attention.queries for one in side.summary.gpu_work if one.attention) for side in (before, after)
    )
    return 0 < now <= LEFT * was and _by_calls(before, after) and _same_products(before, after)


def _merge_adapters(before: Side, after: Side) -> bool:
    """Products of a small rank are gone, and the number and sizes of all other products are the same."""
    some = [_single_products(side) if _on_the_gpu(before, after) else side.summary.cpu.work for side in (before, after)]
    was, now = (Counter(one.product for one in each if one.product and one.product.batch == 1) for each in some)
    of_rank, left = (sum(count for one, count in each.items() if _is_of_rank(one)) for each in (was, now))
    others = [{one: count for one, count in each.items() if not _is_of_rank(one)} for each in (was, now)]
    return left <= LEFT * of_rank and left < of_rank and others[0] == others[1]


def _is_of_rank(one: Product) -> bool:
    """Return whether a product has few rows of a weight or few columns, as those of a low-rank adapter have."""
    return min(one.k, one.n) <= LARGEST_RANK and LOWER * min(one.k, one.n) <= max(one.k, one.n)


def _shorter_cache(before: Side, after: Side) -> bool:
    """Attention has fewer keys and does not read an empty part of the cache; the number of products is the same."""
    was, now = (filled_part(side.summary)[0] for side in (before, after))
    keys = [max((one.attention.keys for one in side.summary.gpu_work if one.attention), default=0)
            for side in (before, after)]  # fmt: skip
    return was is not None and now is None and 0 < keys[1] < keys[0] and _same_products(before, after)


def _static_inputs(before: Side, after: Side) -> bool:
    """Both steps launch about the same kernels as CUDA graphs, and at most half of the copies of inputs remain."""
    was, now = (
        sum(one.us for one in side.summary.gpu_work if one.asked_by == COPIES_INPUTS) for side in (before, after)
    )
    graphs = all(any(one.from_graph for one in side.summary.gpu_work) for side in (before, after))
    return graphs and was > 0 and now <= LEFT * was and _same_heavy(before, after)


def _attention_plans(before: Side, after: Side) -> bool:
    """cuDNN's attention takes at most half of the CPU time, and the products are the same."""
    was, now = (
        sum(one.self_us for name, one in side.summary.cpu.ops.items() if CUDNN_ATTENTION in name)
        for side in (before, after)
    )
    return was > 0 and now <= LEFT * was and _same_products(before, after) and _by_calls(before, after)


def _skip_guards(before: Side, after: Side) -> bool:
    """The kernels are the same, and the cache lookups of torch.compile take at most half the time."""
    was, now = (
        sum(call.us for call in side.summary.cpu.chain if call.name.startswith(LOOKUP)) for side in (before, after)
    )
    same = share_in_common(before, after) == 1 and _same_heavy(before, after)
    return 0 < now <= LEFT * was and _by_calls(before, after) and same


def _allocator(before: Side, after: Side) -> bool:
    """The kernels are about the same, and at most half of the calls that allocate GPU memory remain."""
    was, now = (
        sum(one.calls for name, one in side.summary.cpu.runtime.items() if name.startswith(ALLOCATES))
        for side in (before, after)
    )
    return now <= LEFT * was and now < was and _the_same_work(before, after)


def _no_gradients(before: Side, after: Side) -> bool:
    """At most half of the kernels that set memory to a value remain, and the heavy kernels are the same."""
    was, now = (
        sum(one.asked_by in ("aten::fill_", "aten::zero_") for one in side.summary.gpu_work) for side in (before, after)
    )
    return now <= LEFT * was and was >= MANY_ZEROED and _same_heavy(before, after) and _by_calls(before, after)


def _no_autograd(before: Side, after: Side) -> bool:
    """Only in the first trace, autograd records ops without a backward. Products and convolutions are the same."""
    was, now = (side.summary.training.unused_nodes for side in (before, after))
    return was >= MANY_NODES and not now and _same_heavy(before, after) and _by_calls(before, after)


def _anomaly_detection(before: Side, after: Side) -> bool:
    """Backward checks gradients for NaN only in the first trace. Products, convolutions and attention are the same."""
    was, now = (side.summary.debugging.checked_gradients for side in (before, after))
    return was > 0 == now and _same_heavy(before, after) and _by_calls(before, after)


def _blocking(before: Side, after: Side) -> bool:
    """Launches wait for their kernels only in the first trace, and the kernels are about the same."""
    was, now = (side.summary.debugging.blocking_launches for side in (before, after))
    return was > 0 == now and _the_same_work(before, after)


def _filled_memory(before: Side, after: Side) -> bool:
    """New tensors are filled only in the first trace. Products, convolutions and attention are the same."""
    was, now = (side.summary.debugging.filled_tensors for side in (before, after))
    return was > 0 == now and _same_heavy(before, after) and _by_calls(before, after)


def _recompile(before: Side, after: Side) -> bool:
    """torch.compile compiles in the first trace's steps and does not compile in the second one's."""
    was, now = (sum(len(one.compiled) for one in side.summary.steps) for side in (before, after))
    return bool(was) and not now and share_in_common(before, after) >= ALMOST and _same_heavy(before, after)


def _no_recompute(before: Side, after: Side) -> bool:
    """Backward recomputes at most half as many forward ops, and no product or attention kernel is new."""
    was, now = (side.summary.training.recomputed for side in (before, after))
    first, second = (
        Counter(one.name for one in side.summary.gpu_work if one.family in HEAVY) for side in (before, after)
    )
    fewer = was is not None and (now.calls if now else 0) <= LEFT * was.calls
    rest = set(second) <= set(first) and LEFT * first.total() < second.total() <= first.total()
    return fewer and rest and _compiled(before) == _compiled(after)


def _keep_parameters(before: Side, after: Side) -> bool:
    """FSDP gathers parameters at most two thirds as often, and the number of products is the same."""
    was, now = (side.ops["fsdp::all_gather_copy_in"] for side in (before, after))
    return 0 < now <= 2 / 3 * was and _same_products(before, after)


def _keep_buffers(before: Side, after: Side) -> bool:
    """No tensor is sent to all ranks, and the number of products and convolutions is the same."""
    was, now = (side.ops["c10d::broadcast_"] for side in (before, after))
    return was > now == 0 and _same_heavy(before, after)


def _reduce_once(before: Side, after: Side) -> bool:
    """DDP or FSDP reduces gradients at most two thirds as often, and the number of products is the same."""
    was, now = (
        sum(count for name, count in side.ops.items() if name.startswith((REDUCERS_CALLS, "c10d::_reduce_scatter_")))
        for side in (before, after)
    )
    return 0 < now <= 2 / 3 * was and _same_products(before, after)


def _overlap_copies(before: Side, after: Side) -> bool:
    """As many bytes are copied to and from the GPU, and at most half of the time of exposed copies remains."""
    was, now = (
        sum(one.bytes_moved or 0 for one in side.summary.gpu_work if "HtoD" in one.name or "DtoH" in one.name)
        for side in (before, after)
    )
    shares = [
        side.summary.steady.exposed_copy_us / side.summary.steady_us
        if side.summary.steady and side.summary.steady_us
        else 0.0
        for side in (before, after)
    ]
    gone = shares[1] * step_us(after) <= LEFT * shares[0] * step_us(before)
    return 0 < was == now and gone and _same_heavy(before, after)


def _one_copy(before: Side, after: Side) -> bool:
    """As many bytes are copied to the GPU in at most half as many copies, and the number of products is the same."""
    was, now = (
        [one.bytes_moved or 0 for one in side.summary.gpu_work if "HtoD" in one.name] for side in (before, after)
    )
    return 0 < len(now) <= LEFT * len(was) and sum(was) == sum(now) and _same_products(before, after)


def _keep_activations(before: Side, after: Side) -> bool:
    """At most half of the bytes are copied from the GPU, and to it, and the number of products is the same."""
    for way in ("DtoH", "HtoD"):
        was, now = (
            sum(one.bytes_moved or 0 for one in side.summary.gpu_work if way in one.name) for side in (before, after)
        )
        if now > LEFT * was or not was:
            return False
    return _same_products(before, after)


def _the_same_work(before: Side, after: Side) -> bool:
    """Return whether both steps run about the same kernels, launched one by one in both or as CUDA graphs in both."""
    return _by_calls(before, after) and share_in_common(before, after) >= ALMOST


def _by_calls(before: Side, after: Side) -> bool:
    """Return whether both steps launch their kernels one by one, or both as CUDA graphs."""
    return bool(graphs_launched(before)) == bool(graphs_launched(after))


def _heavy(side: Side) -> list[GpuWork]:
    return [one for one in side.summary.gpu_work if one.family in ("GEMM", "convolution")]


def _same_heavy(before: Side, after: Side) -> bool:
    """Return whether kernels of the same names have most of the time of matrix products and other heavy work.

    Heavy work is products, convolutions, attention and communication. The result is False if Inductor wrote kernels of
    only one of the two steps. Without GPU work the ops are compared.
    """
    if not _on_the_gpu(before, after):
        return _same_on_the_cpu(before, after)
    times = []
    for side in (before, after):
        times.append(Counter())
        for one in side.summary.gpu_work:
            if one.family in HEAVY:
                times[-1][one.name] += one.us
    shared = [sum(us for name, us in times[here].items() if name in times[1 - here]) for here in (0, 1)]
    same = all(us >= ALMOST * some.total() for us, some in zip(shared, times, strict=True))
    kernels = [sum(one.family in HEAVY for one in side.summary.gpu_work) for side in (before, after)]
    return same and min(kernels) >= ALMOST * max(kernels) and _compiled(before) == _compiled(after)


def _on_the_gpu(before: Side, after: Side) -> bool:
    return before.summary.has_gpu_work or after.summary.has_gpu_work


def _same_on_the_cpu(before: Side, after: Side, fused: bool = False) -> bool:
    """Return whether two steps without GPU work compute equally large products and attention by as many ops.

    The sizes are compared if they are recorded. fused: whether fused attention replaces the batched products of a
    softmax's scores. A backward pass, or Inductor's code, in only one of the steps is a difference.
    """
    names = (*PRODUCTS, *CONVOLUTIONS, *ATTENTION)
    calls = [Counter({name: side.ops[name] for name in names}) for side in (before, after)]
    sizes = [Counter((one.product, one.attention) for one in side.summary.cpu.work if one.product or one.attention)
             for side in (before, after)]  # fmt: skip
    parts = [[any(name.startswith(part) for name in side.ops) for part in (AUTOGRAD, INDUCTORS_CALL)]
             for side in (before, after)]  # fmt: skip
    if parts[0] != parts[1]:
        return False
    if not fused:
        return calls[0] == calls[1] and sizes[0] == sizes[1]
    scores = {(one.batch, one.m, one.n) for one, _ in sizes[0] - sizes[1] if one}
    attends = {(one.batch * one.heads, one.queries, one.keys) for _, one in sizes[1] - sizes[0] if one}
    gone, new = +(calls[0] - calls[1]), +(calls[1] - calls[0])
    return bool(new) and gone.keys() <= {*BATCHED} and new.keys() <= {*ATTENTION} and attends <= scores


def _same_products(before: Side, after: Side) -> bool:
    """Return whether equally many ops launch products and convolutions.

    If only one of the steps is mostly CUDA graphs, whose replay has no ops, or one of them has no such op, kernels of
    products and other heavy work are counted.
    """
    calls = [[sum(side.ops[name] for name in names) for names in (PRODUCTS, CONVOLUTIONS)] for side in (before, after)]
    if all(map(any, calls)) and _by_calls(before, after):
        return calls[0] == calls[1]
    kernels = [[sum(one.family == name for one in side.summary.gpu_work) for name in HEAVY] for side in (before, after)]
    return kernels[0] == kernels[1]


def _same_products_as_long(before: Side, after: Side) -> bool:
    """Return whether products, convolutions and attention are equally many, and take about as long in both steps."""
    us = [sum(side.summary.by_family[name] for name in HEAVY) for side in (before, after)]
    return 0 < max(us) <= 2 * min(us) and _same_products(before, after)


def _compiled(side: Side) -> bool:
    """Return whether Inductor wrote some of the step's kernels."""
    return any(one.maker.startswith("Inductor") for one in side.summary.gpu_work)


def _newly_compiled(before: Side, after: Side) -> bool:
    return _compiled(after) and not _compiled(before)


def _on_cuda_cores_us(side: Side) -> float:
    return sum(one.us for one in _heavy(side) if one.name_says.get("types") == "fp32" and one.name_says.get("on"))


def _usual_type(side: Side) -> str | None:
    """Return the types with most of the time of products and convolutions, among kernels whose names give types."""
    times = Counter()
    for one in _heavy(side):
        if said := one.name_says.get("types"):
            times[said] += one.us
    return max(times, key=times.__getitem__, default=None)


def _products(side: Side) -> list[GpuWork]:
    return [one for one in side.summary.gpu_work if one.family == "GEMM" and one.product]


def _equal_single_products(before: Side, after: Side) -> bool:
    """Return whether both steps have as many products outside attention, and, with shapes, equal FLOPs."""
    return len(_single_products(before)) == len(_single_products(after)) and _may_be_same_flops(before, after)


def _single_products(side: Side) -> list[GpuWork]:
    """Return the products that are not batched. This leaves out attention's own products."""
    return [one for one in _products(side) if one.product.batch == 1]


def _may_be_same_flops(before: Side, after: Side) -> bool:
    """Return whether products that are not batched have the same FLOPs in both steps; True without shapes."""
    was, now = (_single_products(side) for side in (before, after))
    return not was or not now or _same_flops(was, now)


def _is_odd(one: GpuWork) -> bool:
    return any(size % 8 and size > 64 for size in (one.product.m, one.product.k, one.product.n))


def _same_flops(was: Sequence[GpuWork], now: Sequence[GpuWork]) -> bool:
    old, new = (sum(one.flops or 0 for one in some) for some in (was, now))
    return old > 0 and abs(old - new) <= SAME_FLOPS * max(old, new)


MADE: dict[str, Callable[[Side, Side], bool]] = {
    "cuda_graph": _cuda_graph,
    "update_graph": _update_graph,
    "static_cache": _static_cache,
    "remove_sync": _remove_sync,
    "fused_optimizer": _fused_optimizer,
    "fewer_groups": _fewer_groups,
    "norms_at_once": _norms_at_once,
    "data_loader": _data_loader,
    "cpu_tensors": _cpu_tensors,
    "python": _python,
    "larger_batch": _larger_batch,
    "fuse_pointwise": _fuse_pointwise,
    "fused_attention": _fused_attention,
    "compile_flex": _compile_flex,
    "tensor_cores": _tensor_cores,
    "single_precision": _single_precision,
    "align_shapes": _align_shapes,
    "channels_last": _channels_last,
    "layout_copies": _layout_copies,
    "in_place": _in_place,
    "mask_once": _mask_once,
    "shared_keys": _shared_keys,
    "cast_weights": _cast_weights,
    "last_logits": _last_logits,
    "kv_cache": _kv_cache,
    "merge_adapters": _merge_adapters,
    "shorter_cache": _shorter_cache,
    "static_inputs": _static_inputs,
    "attention_plans": _attention_plans,
    "skip_guards": _skip_guards,
    "allocator": _allocator,
    "recompile": _recompile,
    "no_gradients": _no_gradients,
    "no_autograd": _no_autograd,
    "anomaly_detection": _anomaly_detection,
    "blocking": _blocking,
    "filled_memory": _filled_memory,
    "keep_parameters": _keep_parameters,
    "keep_buffers": _keep_buffers,
    "reduce_once": _reduce_once,
    "no_recompute": _no_recompute,
    "overlap_copies": _overlap_copies,
    "one_copy": _one_copy,
    "keep_activations": _keep_activations,
}
