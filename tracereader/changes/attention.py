"""Changes of attention: a fused kernel, shared keys, masks, plans."""

import math
from collections import Counter
from collections.abc import Container, Iterator, Sequence
from statistics import median

from tracereader.changes import prices
from tracereader.changes.change import change
from tracereader.changes.context import Case, Entry
from tracereader.changes.opportunity import Proposal
from tracereader.changes.roofline import TWO_BYTES, type_of
from tracereader.figures.avoidable import CUDNN_ATTENTION, planning, triangles
from tracereader.figures.gpu_work import GpuWork
from tracereader.figures.hardware import Peaks
from tracereader.figures.phases import backward_nodes, forwards_of, in_backward
from tracereader.figures.sizes import product
from tracereader.figures.steps import self_us
from tracereader.figures.unfused import on_the_cpu
from tracereader.findings.device_words import CUDA
from tracereader.findings.finding import counted, duration, listed
from tracereader.replay.changes import fused, spans_of, with_cpu_time, with_durations, without_cpu_time, without_ops
from tracereader.trace import Op, Step
from tracereader.trace.families import FUSABLE, HEAVY
from tracereader.trace.grouped import grouped, totals
from tracereader.trace.labels import FLEX_ATTENTION
from tracereader.trace.op_names import ADDS, BATCHED, MASKS, SDPA, SDPA_MATH, SOFTMAX, SOFTMAX_BACKWARD, aten
from tracereader.two_runs.faster import graphs_launched
from tracereader.two_runs.same_work import (
    by_calls,
    equal_single_products,
    halved,
    on_the_gpu,
    same_heavy,
    same_on_the_cpu,
    same_products,
)
from tracereader.two_runs.side import Side

# An op that only the math backend of scaled_dot_product_attention calls, in names of compiled kernels, too.
SAFE_SOFTMAX = "_safe_softmax"
# With fewer keys, the fused kernel is hardly faster: 3.9 and 3.8 ms with 64 keys, and 19 and 20 ms with 256 keys in
# training. With 256 keys it took 5.7 ms instead of 10.2, 5.9 instead of 8.4 and 11.7 instead of 16.5; with 1,024 keys
# 28 instead of 146, and 114 instead of 348 in training (the same machine).
LEAST_KEYS, LEAST_KEYS_IN_TRAINING = 256, 512
# Fused attention whose fourth input is a mask.
MASK_IS_FOURTH = aten(
    "_cudnn_attention_forward _efficient_attention_forward _scaled_dot_product_cudnn_attention "
    "_scaled_dot_product_efficient_attention"
)
DROPS = ("aten::native_dropout", "aten::bernoulli_")  # the fused kernel for CPUs refuses dropout


def _is_of_the_layer(op: Op) -> bool:
    """Return whether this product may be nn.MultiheadAttention's, which calls torch.bmm or torch.baddbmm itself."""
    calls = op.name in ("aten::bmm", "aten::baddbmm") and not in_backward(op)
    return calls and all(above.name not in ("aten::matmul", "aten::einsum", SDPA_MATH) for above in op.above())


def _follows_fused_attention(before: Side, after: Side) -> bool:
    """Softmaxes between batched products are gone, and fused attention of as many queries and keys is new."""
    gone = len(before.summary.attention.unfused) > len(after.summary.attention.unfused)
    if not on_the_gpu(before, after):
        return gone and same_on_the_cpu(before, after, fused=True)
    # Only kernels of attention have such sizes.
    were, fused = ([one.attention for one in side.summary.gpu_work if one.attention] for side in (before, after))
    scores = (one.scores for one in before.summary.attention.unfused if one.scores)
    sizes = {(one.batch * one.heads, one.queries, one.keys) for one in fused}
    same = any((one.batch, one.queries, one.keys) in sizes for one in scores) and equal_single_products(before, after)
    return gone and len(fused) > len(were) and same and not graphs_launched(after)


def fused_attention_on_the_cpu(case: Case) -> Proposal | None:
    """Return a proposal to fuse attention. Then only its two products take time, and so it is in backward."""
    found, typical = case.in_each_step(lambda step: list(_large_attentions(case, step)))
    if not typical:
        return None
    forward = [op for some in found for _, between, _ in some for op in between]
    backward = _backward_of(case, forward)
    us = sum(self_us(op) for _, between, _ in typical for op in between)
    also = f", and {duration(sum(op.us for op in backward))} in backward" if backward else ""
    keys = {_keys(first) for first, _, _ in typical}
    of_keys = f" of {min(keys):,} keys" if len(keys) == 1 else ""
    math_calls = [above for first, _, _ in typical for above in first.above() if above.name == SDPA_MATH]
    return Proposal(
        without_cpu_time(case.graph, spans_of([*forward, *backward])),
        f"{counted(len(typical), 'softmax', 'softmaxes')}{of_keys} between batched products: the ops between the "
        f"products take {duration(us)}{also}"
        + ("; scaled_dot_product_attention falls back to them" if math_calls else ""),
        how_to_fuse(math_calls),
        assumed=True,
    )


@change(
    "use a fused attention kernel",
    "the rate of a good attention kernel; a mask is causal, and half of the work",
    followed=_follows_fused_attention,
    on_cpu=fused_attention_on_the_cpu,
    keys=("compile",),
)
def fused_attention(case: Case) -> Proposal | None:
    """Return a proposal to replace the scores' products and softmax by one kernel, and their backward by another."""
    if not case.summary.attention.unfused:
        return None
    scores = scores_of(case)
    runs = _runs_on_scores(case, scores) if scores else _runs_between_products(case)
    groups, before, forward, backward, math_calls = [], 0.0, 0, 0, []
    by_layer, falls_back, strided = False, False, False
    for run in ([entry for entry in some if id(entry[0].launch) not in case.in_flex] for some in runs):
        softmaxes = len({id(op) for _, one, op in run if _is_softmax(one, op, backward=False)})
        gradients = len({id(op) for _, one, op in run if _is_softmax(one, op, backward=True)})
        if not (softmaxes or gradients) or not _products(run):
            continue
        least_us = prices.SMALL_PRODUCT_US * (softmaxes + gradients)
        us = max(_fused_attention_us(case, run, softmaxes, gradients), least_us)
        spent = sum(one.us for _, one, _ in run)
        if us < spent:
            groups.append(([work for work, _, _ in run], us))
            before, forward, backward = before + spent, forward + softmaxes, backward + gradients
            around = (above for _, _, op in run if op is not None for above in op.above())
            math_calls += [above for above in around if above.name == SDPA_MATH]
            by_layer |= any(_is_of_the_layer(op) for _, _, op in run if op is not None)
            falls_back |= any(SAFE_SOFTMAX in one.name for _, one, _ in run)
            strided |= any(op.name in ADDS and _is_strided(op, 1) for _, _, op in run if op is not None)
    if not groups:
        return None
    backwards = " and their backward" if backward else ""
    return Proposal(
        case.condensed(groups, prices.ATTENTION_CALL_US),
        f"{counted(forward, 'softmax', 'softmaxes')} between batched products{backwards}: {duration(before)}; "
        f"the scores{_sizes_of_scores(case)} are written to memory and read again"
        + ("; scaled_dot_product_attention falls back to them" if math_calls or falls_back else ""),
        how_to_fuse(math_calls, falls_back)
        + ", with .contiguous() on the mask: a fused backend needs a stride of 1 in its last dimension" * strided
        + ", or nn.MultiheadAttention with need_weights=False" * (by_layer and not falls_back),
        assumed=True,
    )


def _sizes_of_scores(case: Case) -> str:
    """Return the queries and keys of the scores that take most time; "" without shapes."""
    known = [one for one in case.summary.attention.unfused if one.scores]
    us = totals(((one.scores.queries, one.scores.keys), one.us + one.products_us) for one in known)
    if not us:
        return ""
    (queries, keys), most = us.most_common(1)[0]
    share = f" ({most / us.total():.0%} of this time)" if len(us) > 1 and us.total() else ""
    return f"{', mostly' * bool(share)} of {queries:,} x {keys:,}{share}{',' * bool(share)}"


def how_to_fuse(math_calls: Sequence[Op], falls_back: bool = False) -> str:
    """Return how to get fused attention.

    math_calls: those of scaled_dot_product_attention that use its math backend. falls_back: compiled code does so, too.
    """
    # torch/nn/attention and sdp_utils.cpp: the fused backends take (batch, heads, length, head size) only.
    if math_calls and all(op.inputs.dims and len(op.inputs.dims[0]) == 3 for op in math_calls):
        return "give it four dimensions (batch, heads, length, head size); its fused backends do not take three"
    if math_calls and all(any(_is_strided(op, place) for place in range(3)) for op in math_calls):
        return "call .contiguous() on q, k and v: its fused backends need a stride of 1 in the last dimension"
    if math_calls or falls_back:
        return "name a backend with torch.nn.attention.sdpa_kernel(…), which then says which input it does not take"
    return "torch.nn.functional.scaled_dot_product_attention(q, k, v, …)"


def _is_strided(op: Op, place: int) -> bool:
    """Return whether neighbors along the last dimension of an input are not neighbors in memory, as in transposes."""
    return op.inputs.last_stride_at(place) not in (None, 1)


def _follows_compile_flex(before: Side, after: Side) -> bool:
    """Kernels of flex_attention are new, fewer attentions are unfused, and other products and layers are the same."""
    was, now = (
        sum("flex_attention" in one.name and one.family == "attention" for one in side.summary.gpu_work)
        for side in (before, after)
    )
    gone = len(before.summary.attention.unfused) > len(after.summary.attention.unfused)
    # If the whole model is compiled, it calls the products of linear layers directly.
    linear = before.ops["aten::linear"] == after.ops["aten::linear"]
    return gone and now > was and linear and equal_single_products(before, after)


@change(
    "compile flex_attention",
    "the rate of a good attention kernel; no pair of a query and a key is masked",
    followed=_follows_compile_flex,
)
def compile_flex(case: Case) -> Proposal | None:
    """Return a proposal to compile flex_attention. Compiled, each of its calls is one call and one kernel.

    Else it computes all scores, also the masked ones. How many are masked is not recorded, so none are assumed to be.
    """
    runs = grouped((call, entry) for entry in case.activities if (call := case.in_flex.get(id(entry[0].launch))))
    groups, before, backward = [], 0.0, 0
    for call, run in runs.items():
        us = _fused_us(call, [one for one, _ in _products(run)], case.peaks)
        spent = sum(one.us for _, one, _ in run)
        if 0 < us < spent:
            groups.append(([work for work, _, _ in run], us))
            before, backward = before + spent, backward + _is_flex_backward(call)
    if not groups:
        return None
    groups_in_all_steps = case.groups_in_all_steps(groups)
    calls = {id(call): call for work, _ in groups_in_all_steps if (call := case.in_flex.get(id(work[0].launch)))}
    # A forward runs parts of autograd's engine to find its backward. Without that, the engine's thread waits in it.
    engines = {op.track for op in backward_nodes(case.step)}
    spans = [
        (track, call.start, call.end)
        for call in calls.values()
        for track in ({call.track} if _is_flex_backward(call) else {call.track, *engines})
    ]
    added = [(call.track, call.start, prices.ATTENTION_CALL_US) for call in calls.values()]
    forward = len(groups) - backward
    backwards = f" and {'its' if forward == 1 else 'their'} backward" if backward else ""
    return Proposal(
        with_cpu_time(without_cpu_time(fused(case.graph, groups_in_all_steps), spans), added),
        f"uncompiled flex_attention: {counted(forward, 'call')}{backwards}, {duration(before)}; the "
        "scores are written to memory and read again",
        "torch.compile(flex_attention)",
        assumed=True,
    )


def _is_flex_backward(call: Op) -> bool:
    return call.name != FLEX_ATTENTION and call.name.startswith(FLEX_ATTENTION)


def _fused_us(call: Op, products: Sequence[GpuWork], peaks: Peaks | None) -> float:
    """Return the time (µs) of products in a kernel for the type of the queries. They are in fp32 if it is shorter."""
    of_op = [type_of(op) for op in call.walk() if op.name.startswith(FLEX_ATTENTION)]
    two_bytes = next(filter(None, of_op or map(type_of, call.walk())), "") in TWO_BYTES
    rate = prices.ATTENTION * (peaks.bf16 if two_bytes else peaks.fp32) * 1e6 if peaks is not None else 0
    return sum(one.us if one.product is None or not rate else one.product.flops / rate for one in products)


def _products(run: Sequence[Entry]) -> list[tuple[GpuWork, Op]]:
    return [(one, op) for _, one, op in run if one.family == "GEMM" and op is not None]


def _is_softmax(one: GpuWork, op: Op | None, backward: bool) -> bool:
    if op is not None and op.name in (SOFTMAX, SOFTMAX_BACKWARD):
        return (op.name == SOFTMAX_BACKWARD) == backward
    fuses = one.name_says.get("fuses", "")
    return "softmax" in fuses and "log_softmax" not in fuses and ("backward" in fuses) == backward


def scores_of(case: Case) -> set[int]:
    """Return the numbers of elements of the matrices of scores in attention that is not fused; needs shapes."""
    found = (one.scores for one in case.summary.attention.unfused if one.scores)
    return {one.batch * one.queries * one.keys for one in found}


def _runs_on_scores(case: Case, scores: Container[int]) -> list[list[Entry]]:
    """Return runs of activities that read or write matrices of so many elements, split at other heavy kernels."""
    runs: list[list[Entry]] = [[]]
    for entry in case.activities:
        _, one, op = entry
        if touches(one, op, scores):
            runs[-1].append(entry)
        elif one.family in HEAVY and runs[-1]:
            runs.append([])
    return runs


def _runs_between_products(case: Case) -> list[list[Entry]]:
    """Return runs from the first to the last batched product with no other heavy kernel between. It needs no shapes."""
    runs: list[list[Entry]] = [[]]
    for entry in case.activities:
        work, one, op = entry
        if one.family in HEAVY and (op is None or op.name not in BATCHED):
            runs.append([])
        elif work.kind != "memset" and (runs[-1] or one.family == "GEMM"):
            runs[-1].append(entry)
    for run in runs:
        while run and run[-1][1].family != "GEMM":
            run.pop()
    return runs


def _fused_attention_us(case: Case, run: Sequence[Entry], forward: int, backward: int) -> float:
    """Return the time (µs) of these forward and backward passes with one fused kernel each."""
    peaks, products = case.peaks, _products(run)
    one, op = products[0]
    masked = any(op is not None and op.name in MASKS and not _is_of_the_keys(op) for _, _, op in run)
    passes = (forward + prices.BACKWARD_FLOPS * backward) / (1 + masked)
    # SDPA's math backend multiplies bf16 in fp32, and backward does not name the call that it belongs to.
    calls = case.step.named(SDPA.__eq__) if in_backward(op) else [one for one in op.above() if one.name == SDPA]
    in_two_bytes = (type_of(calls[0] if calls else op) or one.name_says.get("types")) in TWO_BYTES or any(
        op is not None and op.name == "aten::copy_" and len({*op.inputs.types[:2]}) != 1 for _, _, op in run
    )
    rate = prices.ATTENTION * (peaks.bf16 if in_two_bytes else peaks.fp32) if peaks is not None else 0.0
    if one.product is not None and peaks is not None:
        sizes = min([item.product for item, _ in products if item.product], key=lambda size: size.flops)
        # Compiled code does not show in which type a call that falls back asks for attention.
        is_fp32 = not in_two_bytes and not any(SAFE_SOFTMAX in one.name for _, one, _ in run)
        wider = max(1.0, prices.FP32_HEAD / min(sizes.n, sizes.k)) if is_fp32 else 1.0
        return 2 * wider * sizes.flops / 1e6 / rate * passes
    # Without shapes or peaks: the fused kernel takes as long as the products, at the rate of its own type.
    us = sum(item.us for item, _ in products) / (forward + 2 * backward) * passes
    types = (one.name_says.get("types") or "").lower()
    if peaks is not None and types in ("tf32", "fp32"):
        us *= prices.PRODUCT * (peaks.tf32 if types == "tf32" else peaks.fp32) / rate
    return us


def _is_of_the_keys(op: Op) -> bool:
    """Return whether a mask has one row for all queries, as one of padding has. A fused kernel skips none of the work.

    A mask of queries x keys is usually causal, and a fused kernel skips the hidden part.
    """
    mask = op.inputs.dims_at(op.name != "aten::where") or ()
    return len(mask) == len(op.inputs.dims_at(0) or ()) > 2 and mask[-2] == 1


def touches(one: GpuWork, op: Op | None, scores: Container[int]) -> bool:
    """Return whether an activity reads or writes a whole matrix of scores."""
    if op is None:
        return False
    if (product := one.product) is not None:
        sides = (product.m * product.n, product.m * product.k, product.k * product.n)
        return any(product.batch * side in scores for side in sides)
    return one.family in FUSABLE and any(math.prod(shape) in scores for shape in op.inputs.dims)


def _follows_no_mask_tensor(before: Side, after: Side) -> bool:
    """More calls of attention are causal without a mask, their sizes are the same, and so are the products."""
    was, now = ([one.attention for one in side.summary.gpu_work if one.attention] for side in (before, after))
    first, second = (Counter((one.batch, one.heads, one.queries, one.keys) for one in some) for some in (was, now))
    more = sum(one.causal is True for one in now) > sum(one.causal is True for one in was)
    return more and first == second and equal_single_products(before, after)


@change(
    "compute attention without a mask tensor",
    "the rate of a good attention kernel for the whole matrix of scores, or for half of it if the mask is causal",
    followed=_follows_no_mask_tensor,
)
def no_mask_tensor(case: Case) -> Proposal | None:
    """Return a proposal to compute fused attention without a mask that is a tensor of queries x keys.

    Without it, forward and backward take the time of a good kernel for the whole matrix of scores. If the mask is
    causal, which the trace does not show, half of the matrix is left.
    """
    if case.peaks is None or not case.has(MASK_IS_FOURTH.__contains__):
        return None
    shorter, made, good, masks = {}, {}, 0.0, Counter()
    computed, backward = set(), []
    for work, one, op in case.activities:
        if op is None:
            continue
        if one.family != "attention":
            # A mask of booleans becomes one of numbers in each call.
            if one.family == "pointwise" and any(above.name == SDPA for above in op.above()):
                made[work] = 0.0
        elif in_backward(op):
            backward.append((work, one.us, op))
        elif one.attention and op.name in MASK_IS_FOURTH and len(mask := op.inputs.dims_at(3) or ()) > 1:
            us = one.attention.flops / (prices.ATTENTION * case.peaks.bf16) / 1e6
            if 1 not in mask[-2:] and type_of(op) in TWO_BYTES and us < one.us:
                shorter[work] = us
                good += prices.BACKWARD_FLOPS * us
                masks[tuple(mask[-2:])] += one.us
                computed.add(tuple(op.inputs.dims[0]))
    backward = [(work, us) for work, us, op in backward if tuple(op.inputs.dims_at(0) or ()) in computed]
    takes = sum(us for _, us in backward)
    calls, before = len(shorter), sum(masks.values()) + takes
    if not calls:
        return None
    shorter |= {work: us * min(1.0, good / takes) for work, us in backward}
    whole, half = (case.in_all_steps({work: part * us for work, us in shorter.items()} | made) for part in (1, 0.5))
    queries, keys = masks.most_common(1)[0][0]
    also = " with their backward" if backward else ""
    return Proposal(
        with_durations(case.graph, whole),
        f"{counted(calls, 'call')} of fused attention{also} read a mask of {queries:,} x {keys:,} and take "
        f"{duration(before)}",
        "is_causal=True for a causal mask; a block mask of torch.nn.attention.flex_attention for another one; none if "
        "nothing is padded",
        assumed=True,
        most=with_durations(case.graph, half),
    )


@change(
    "make the mask once",
    "the mask is the same in each step",
    followed=halved(lambda side: side.summary.attention.mask_made is not None, same_heavy),
    on_cpu=True,
)
def mask_once(case: Case) -> Proposal | None:
    made, typical = case.in_each_step(lambda step: [op for group in triangles(step, in_sdpa=False) for op in group])
    if len(case.trace.steps) < 2 or not all(triangles(step, in_sdpa=False) for step in case.trace.steps):
        return None
    return Proposal(
        without_ops(case.graph, [op for some in made for op in some]),
        f"every step makes a triangular mask with {listed(dict.fromkeys(op.name for op in typical))}: "
        f"{duration(sum(op.us for op in typical))} of CPU time",
        "make the mask once (register_buffer), or pass is_causal=True",
    )


@change(
    "avoid cuDNN's plans for new attention shapes",
    "another backend takes as long on the GPU",
    followed=halved(
        lambda side: sum(one.self_us for name, one in side.summary.cpu.ops.items() if CUDNN_ATTENTION in name),
        same_products,
        by_calls,
    ),
    needs=CUDA,
    keys=("attention_flash", "attention_cudnn", "attention_mem_efficient"),
)
def attention_plans(case: Case) -> Proposal | None:
    """Return a proposal to build no plans in the steps. One plan for each op may be the cost of a first call."""
    step = case.replayed
    recurring = {name: calls for name, calls in planning(case.compared).items() if len(calls[0]) > 1}
    spans, each = [], []
    for name, (plans, others) in recurring.items():
        usual_us = median(op.us for op in others) if others else prices.ATTENTION_CALL_US
        spans += [(op.track, op.start + round(usual_us * 1e3), op.end) for op in plans]
        here, usual = ([op for op in some if step.start <= op.start < step.end] for some in (plans, others))
        if here:
            each.append(
                f"{len(here)} of {counted(len(here) + len(usual), 'call')} of {name} take "
                f"{duration(sum(op.us for op in here) / len(here))} of CPU time each"
                + (f", and the others {duration(usual_us)}" if usual else "")
            )
    if not each:
        return None
    return Proposal(
        without_cpu_time(case.graph, spans),
        f"{listed(each)}: cuDNN builds a plan for each shape that is new to the process",
        "torch.backends.cuda.enable_cudnn_sdp(False), so that another backend computes attention; or pad to a few "
        "lengths",
        unrecorded=True,
    )


def _large_attentions(case: Case, step: Step) -> Iterator[tuple[Op, list[Op], Op]]:
    """Yield the products of each attention that is large enough to gain, and the ops that end between them."""
    least = LEAST_KEYS_IN_TRAINING if case.trace.trains else LEAST_KEYS
    for first, between, last in on_the_cpu(step):
        if _keys(first) >= least and not any(op.name in DROPS for op in between) and id(first) not in case.in_flex:
            yield first, [op for op in between if op.end <= last.start], last


def _keys(product_of_scores: Op) -> int:
    shape = product(product_of_scores.name, product_of_scores.inputs.dims)
    return shape.n if shape is not None else 0


def _backward_of(case: Case, forward: Sequence[Op]) -> list[Op]:
    """Return the calls of autograd's engine that compute the gradients of these ops."""
    begun = {(op.track, op.start) for op in forward}
    nodes = (node for step in case.steps for node in backward_nodes(step))
    return [node for node in nodes if not begun.isdisjoint(forwards_of(case.trace, node))]
