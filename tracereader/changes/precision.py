"""Changes of element types: TF32 or bf16 on tensor cores, float32 instead of float64, weights that are cast once."""

import re
from bisect import bisect
from collections.abc import Callable
from functools import lru_cache
from itertools import chain
from operator import itemgetter

from tracereader.changes import prices
from tracereader.changes.change import change
from tracereader.changes.context import Case
from tracereader.changes.layout import OF_FFTS, by_ffts, computed_by_ffts, norms_by_channel
from tracereader.changes.opportunity import Proposal
from tracereader.changes.roofline import SOLVES, TWO_BYTES, moving_us, multiplying_us, type_of
from tracereader.figures.decoding import weight_casts
from tracereader.figures.gpu_work import GpuWork
from tracereader.figures.hardware import Peaks
from tracereader.figures.phases import in_backward, place_in_forward
from tracereader.findings.device_words import CUDA_OR_HIP
from tracereader.findings.finding import counted, duration, listed
from tracereader.replay.changes import with_cpu_time, with_durations, without_cpu_time, without_ops
from tracereader.trace import Op, Work, outermost
from tracereader.trace.families import FUSABLE
from tracereader.trace.intervals import length, minus, union
from tracereader.trace.kernel_names import decode
from tracereader.trace.labels import AUTOGRAD, OPTIMIZER
from tracereader.trace.op_names import FILLS, FOREACH, aten
from tracereader.two_runs.same_work import by_calls, compiled, halved, same_products, same_type, us_of
from tracereader.two_runs.side import Side

# bf16 is worth proposing if its peak is this many times TF32's. PyTorch's attention kernels take 696 and 1,431 µs in
# fp32, forward and backward, and 107 and 162 µs in bf16, in one encoder on an H200.
MUCH_FASTER = 1.5
FP32_MAKERS = ("ffma", "sgemm", "simt", "f32f32_f32f32")
WORTH_NAMING = 0.02  # TF32, if it saves at least this share of the time in float64
# How the names of kernels give float64. cuBLAS writes d884gemm, dgemm and f64.
DOUBLE = re.compile(r"\bdouble\b|dgemm|d\d+gemm|f64")
IN_FLOAT32 = "model.float() and float32 data, if that is precise enough (NumPy's arrays are float64)"
LONG_OP_US = 10  # on a CPU. Most of a shorter op is the same in any type
# Families of products, and families whose kernels only move data: with half the bytes they take half the time.
MULTIPLY, MOVE = ("GEMM", "convolution"), (*FUSABLE, "optimizer")
LONG_FILTER = 64  # values
STAY = 0.7  # the share of the fusable kernels that remains at least if the products run on other kernels
# What torch.autocast computes in fp32, and what in two bytes, after PyTorch's list (aten/src/ATen/autocast_mode.h). Ops
# in neither list compute in the widest of their inputs' types. rms_norm is left out: not all versions of torch list it.
AUTOCAST_IN_FP32 = aten(
    "acos asin binary_cross_entropy_with_logits cdist cosh cosine_embedding_loss cosine_similarity cumprod cumsum "
    "dist erfinv exp expm1 frobenius_norm group_norm hinge_embedding_loss huber_loss kl_div l1_loss layer_norm "
    "linalg_matrix_norm linalg_matrix_sqrth linalg_vector_norm log log10 log1p log2 log_softmax logsumexp "
    "margin_ranking_loss mse_loss multi_margin_loss multilabel_margin_loss native_layer_norm nll_loss nll_loss2d norm "
    "nuclear_norm pdist poisson_nll_loss pow prod reciprocal renorm rsqrt sinh smooth_l1_loss soft_margin_loss "
    "softmax softplus sum tan triplet_margin_loss upsample_bicubic2d upsample_bilinear2d upsample_linear1d "
    "upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_trilinear3d _upsample_bicubic2d_aa "
    "_upsample_bilinear2d_aa _upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d"
)
AUTOCAST_IN_TWO_BYTES = aten(
    "_convolution _cudnn_rnn _scaled_dot_product_flash_attention _thnn_fused_gru_cell _thnn_fused_lstm_cell addbmm "
    "addmm addmv addr baddbmm bmm chain_matmul conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d "
    "conv_transpose3d convolution cudnn_convolution cudnn_convolution_transpose einsum gru_cell linalg_multi_dot "
    "linalg_vecdot linear lstm_cell matmul mm mv prelu rnn_relu_cell rnn_tanh_cell scaled_dot_product_attention"
)
FLOATING = ("", "fp32", *TWO_BYTES)  # what autocast decides about; "" if types were not recorded


def follows_tf32(before: Side, after: Side) -> bool:
    """As many products and convolutions run, and most of those in fp32 on CUDA cores are in TF32."""
    return _moved(before, after, _SLOW, _TF32)


def follows_half_precision(before: Side, after: Side) -> bool:
    """As many products and convolutions run, and most of those in fp32 or TF32 are in bf16 or fp16."""
    return _moved(before, after, _SLOW, _SHORT) or _moved(before, after, _TF32, _SHORT)


# Products and convolutions by the types in their names: in fp32 on CUDA cores, in TF32, and in two bytes.
_SLOW = us_of(lambda one: one.family in MULTIPLY and one.name_says.get("types") == "fp32" and one.name_says.get("on"))
_TF32 = us_of(lambda one: one.family in MULTIPLY and one.name_says.get("types") == "TF32")
_SHORT = us_of(lambda one: one.family in MULTIPLY and one.name_says.get("types") in ("bf16", "fp16"))


def _moved(before: Side, after: Side, wide: Callable[[Side], float], short: Callable[[Side], float]) -> bool:
    """Return whether most products of one type are of another one in the second run, and the other kernels stay."""
    kernels = [sum(one.family in FUSABLE for one in side.summary.gpu_work) for side in (before, after)]
    stay = compiled(after) or kernels[1] >= STAY * kernels[0]
    return halved(wide)(before, after) and short(before) < short(after) and stay and same_products(before, after)


@change(
    "use TF32 on tensor cores",
    "the rates of good products and convolutions in TF32",
    followed=follows_tf32,
    needs=CUDA_OR_HIP,
    keys=("tf32",),
)
def tf32(case: Case) -> Proposal | None:
    """Return a proposal to multiply in TF32 what CUDA cores multiply in fp32, unless the step shows TF32 is allowed."""
    if case.trace.backend != "cuda" or case.peaks is None or case.peaks.tf32 < 2 * case.peaks.fp32:
        return None
    times, spent, kinds = {}, 0.0, set()
    of_ffts = {work for some, _ in by_ffts(case, "tf32") for work in some}  # where TF32 is allowed, too
    products = [(work, one, op) for work, one, op in case.activities if one.family in MULTIPLY]
    allowed = {_by_cudnn(op) for _, one, op in products if op is not None and one.name_says.get("types") == "TF32"}
    for work, one, op in products:
        if work in of_ffts or OF_FFTS.search(one.name) or _by_cudnn(op) in allowed or not _on_cuda_cores(one, op):
            continue
        reach = prices.PRODUCT if one.family == "GEMM" else prices.CONVOLUTION
        flops = one.flops or one.us * prices.PRODUCT * case.peaks.fp32 * 1e6
        us = multiplying_us(flops, reach * case.peaks.tf32, one.bytes_moved or 0, case.peaks)
        if us < one.us:
            times[work], spent = us, spent + one.us
            kinds.add("matrix products" if one.family == "GEMM" else "convolutions")
    if not times:
        return None
    flags = {
        "matrix products": "torch.set_float32_matmul_precision('high')",
        "convolutions": "torch.backends.cudnn.allow_tf32 = True",
    }
    return Proposal(
        with_durations(case.graph, case.in_all_steps(times)),
        f"{' and '.join(sorted(kinds))} in fp32 run on CUDA cores: {counted(len(times), 'kernel')}, {duration(spent)}",
        "; ".join(flags[kind] for kind in sorted(kinds)),
        assumed=True,
    )


@change(
    "use bf16 or fp16 on tensor cores",
    "the rates of good products and convolutions in two bytes",
    followed=follows_half_precision,
    needs=CUDA_OR_HIP,
    keys=("bf16",),
)
def half_precision(case: Case) -> Proposal | None:
    """Return a proposal to compute with bf16 or fp16 what is multiplied in fp32 or TF32."""
    if (peaks := case.peaks) is None or peaks.bf16 < MUCH_FASTER * peaks.tf32:
        return None
    times, converted, spent, kinds, narrow = {}, {}, 0.0, set(), 0
    ffts = by_ffts(case, "bf16")
    of_ffts = {work for some, _ in ffts for work in some}
    for work, one, op in case.activities:
        if work in of_ffts:
            continue
        if one.family in MULTIPLY and (one.name_says.get("types") or "").lower() in TWO_BYTES:
            narrow += 1
        if one.family == "attention" and one.name_says.get("types") == "fp32":
            us = max(one.us / prices.OF_A_GOOD_KERNEL, prices.SMALL_PRODUCT_US)
        elif one.family in MULTIPLY and (types := _wide_type(one, op)):
            reach = prices.PRODUCT if one.family == "GEMM" else prices.CONVOLUTION
            flops = one.flops or one.us * reach * (peaks.tf32 if types == "tf32" else peaks.fp32) * 1e6
            moved = one.bytes_moved or 0
            us = multiplying_us(flops, reach * peaks.bf16, moved / 2, peaks)
            converted[work] = min(one.us, us)
            if op is not None and one.family == "GEMM" and not in_backward(op):
                # The casts of its inputs read and write about as many bytes: a layer normalization's result is in fp32.
                us += moving_us(moved, peaks)
        else:
            continue
        if us < one.us:
            times[work], spent = us, spent + one.us
            kinds.add({"GEMM": "matrix products", "convolution": "convolutions"}.get(one.family, one.family))
    if not times and not ffts:
        return None
    products, found, also, halved = case.in_all_steps(times), len(times), "", {}
    if narrow < len(times):
        # What follows a product computes with its two bytes. Weights and their gradients, which backward fills with
        # zeros if only some rows are used, stay in fp32.
        updates = case.launched_in(OPTIMIZER)
        moving = {
            work: one
            for work, one, op in case.activities
            if one.family in (*FUSABLE, "sort and scan") and one.kind == "kernel" and id(work) not in updates
            and op is not None and type_of(op) == "fp32" and not op.name.startswith((*FOREACH, *FILLS))
            and work not in of_ffts
        }  # fmt: skip
        halved = {work: max(one.us / 2, min(one.us, prices.LEAST_KERNEL_US)) for work, one in moving.items()}
        follows = _follows_two_bytes(case)
        following = [work for work, one in moving.items() if one.family in ("pointwise", "copy") and follows(work)]
        times |= {work: halved[work] for work in following}
        spared = sum(moving[work].us for work in following)
        also = f"; other kernels move half of the bytes then: {duration(spared)}" * bool(following)
    dtype, how, most = "torch.bfloat16" if peaks.tf32 > peaks.fp32 else "torch.float16", "", None
    slower = _slower_in_bf16(case) if dtype == "torch.bfloat16" else {}
    if slower:
        now, then = (duration(sum(some)) for some in ((one.us for one in slower), slower.values()))
        also += f"; batch norms take longer in bf16 in this layout: {now}, then about {then}"
    if long_filters := long_filters_in_groups(case):
        slower |= long_filters
        then = duration(prices.LONG_FILTER_IN_GROUPS_US)
        also += f"; {counted(len(long_filters), 'convolution')} in groups with a long filter may take {then} each"
    graph = case.graph
    if ffts:
        graph, also = case.condensed(ffts, prices.CALL_US), f"{also}; {computed_by_ffts(ffts)}"
    # A converted model casts nothing in its steps, and all its kernels move half of the bytes.
    if not case.trace.trains:
        most = with_durations(graph, case.in_all_steps(halved | times | converted | slower))
        how = f"convert the model and its inputs once with .to({dtype}), or "
        all_us = sum(work.us for work in halved)
        also += f"; in a converted model, all that move data do: {duration(all_us)}" * bool(halved)
    calls = [one.launch for one in products if one.launch is not None and not one.from_graph]
    if found:
        also = f"; {listed(sorted(kinds))} in fp32 or TF32: {counted(found, 'kernel')}, {duration(spent)}{also}"
    graph = with_durations(graph, case.in_all_steps(times | slower))
    return Proposal(
        with_cpu_time(graph, [(call.track, call.start, prices.CALL_US) for call in calls]),
        also.removeprefix("; "),
        f"{how}torch.autocast('cuda', {dtype})",
        assumed=True,
        most=most,
    )


def _follows_two_bytes(case: Case) -> Callable[[Work], bool]:
    """Return a function that says whether a kernel follows an op that autocast computes in two bytes.

    It asks for the last op before the kernel that autocast decides about. A kernel of backward counts where its forward
    op stands. All that follows a norm is in fp32, such as a loss on normalized embeddings. Compiled code does not show
    what follows what.
    """
    decided, trace = AUTOCAST_IN_FP32 | AUTOCAST_IN_TWO_BYTES, case.trace

    def decides(op: Op) -> bool:
        return op.name.startswith(AUTOGRAD) or (op.name in decided and type_of(op) in FLOATING)

    forward = (op for op in outermost(case.step.roots, decides) if op.name in decided)
    types = sorted((op.start, op.name in AUTOCAST_IN_TWO_BYTES) for op in forward)

    def follows(work: Work) -> bool:
        if work.launch is None or work.name.startswith("triton_"):
            return True
        begun = place_in_forward(trace, work.launch)[1]
        if begun == work.launch.start and in_backward(work.launch):
            return not trace.forward_of  # otherwise it adds to the gradient of a parameter
        place = bisect(types, begun, key=itemgetter(0))
        return place > 0 and types[place - 1][1]

    return follows


def _slower_in_bf16(case: Case) -> dict[Work, float]:
    """Return the time (µs) in bf16 of cuDNN's batch norms in fp32, which PyTorch computes with its own kernels then."""
    norms = norms_by_channel(case)
    return {work: prices.BATCH_NORM_IN_BF16[way] * work.us for work, way, kind, _ in norms if kind == "float"}


def long_filters_in_groups(case: Case) -> dict[Work, float]:
    """Return the time (µs) in two bytes of convolutions of sequences in groups with long filters, as Wav2Vec2 has."""
    found = {}
    for op in case.step.named("aten::convolution".__eq__):
        sizes, kernels = op.inputs.dims_at(1) or (), list(op.work_below())
        in_groups = op.inputs.argument(6) == "False" and op.inputs.argument(8) != "1"
        if kernels and in_groups and len(sizes) == 3 and sizes[2] >= LONG_FILTER and type_of(op) == "fp32":
            found[max(kernels, key=lambda one: one.dur)] = prices.LONG_FILTER_IN_GROUPS_US
    return found


def _wide_type(one: GpuWork, op: Op | None) -> str:
    """Return tf32 or fp32 if a kernel multiplies fp32 values; "" if it does not, or if the trace does not show it."""
    if (one.name_says.get("types") or "").lower() == "tf32":
        return "tf32"
    return "fp32" if _on_cuda_cores(one, op) else ""


def _by_cudnn(op: Op | None) -> bool | None:
    """Return whether cuDNN computes an op, and so follows a TF32 setting of its own; None if the op is not recorded."""
    return None if op is None else "conv" in op.name or "cudnn" in op.name


def _on_cuda_cores(one: GpuWork, op: Op | None) -> bool:
    """Return whether a kernel multiplies fp32 without tensor cores, by its name, otherwise by its inputs' type."""
    known = _multiplies_fp32(one.name, one.name_says.get("types") or "")
    return known if known is not None else op is not None and type_of(op) == "fp32"


@lru_cache(4096)  # of each name there are many kernels
def _multiplies_fp32(name: str, types: str) -> bool | None:
    """Return what a kernel's name says of fp32 without tensor cores; None if nothing. types: those of the name."""
    if decode(name).family not in ("GEMM", "convolution", "unknown") or "tensorop" in name or "tf32" in name:
        return False
    if types:
        return types.lower() == "fp32"
    return True if any(word in name for word in FP32_MAKERS) else None


def _single_on_the_cpu(case: Case) -> Proposal | None:
    """Return the same proposal for a program that uses no GPU: what its longer ops compute themselves halves."""
    found = []
    for op in case.step.walk():
        if op.kind == "op" and op.us >= LONG_OP_US and type_of(op) == "fp64":
            own = minus([(op.start, op.end)], union((one.start, one.end) for one in op.children))
            if length(own) >= LONG_OP_US * 1e3:
                found.append([(op.track, start, (start + end) // 2) for start, end in own])
    if not found:
        return None
    spent = 2 * sum(end - start for own in found for _, start, end in own) / 1e3
    return Proposal(
        without_cpu_time(case.graph, chain(*found)),
        f"{counted(len(found), 'op')} of {LONG_OP_US} µs and more compute in float64 for {duration(spent)}; half of it "
        "in float32",
        IN_FLOAT32,
        assumed=True,
    )


def _us_in_float64(side: Side) -> float:
    """Return the time (µs) of a step's GPU activities in float64, or of its ops without a GPU."""
    on_gpu = sum(one.us for one in side.summary.gpu_work if one.name_says.get("types") == "fp64")
    return on_gpu + sum(one.us for one in side.summary.cpu.cpu_work if one.type == "double")


@change(
    "compute in float32 instead of float64",
    "the rates of good products in float32; kernels that move data take half the time",
    followed=halved(_us_in_float64, same_products),
    on_cpu=_single_on_the_cpu,
    keys=("tf32",),
)
def single_precision(case: Case) -> Proposal | None:
    """Return a proposal to compute in float32, with TF32 where the device has it, what is computed in float64."""
    if not case.named(DOUBLE.search):
        return None
    times, spent, without_tf32 = {}, 0.0, 0.0
    for work, one, op in case.activities:
        if _in_float64(one, op):
            times[work] = _in_four_bytes_us(one, case.peaks, tf32=True)
            spent, without_tf32 = spent + one.us, without_tf32 + _in_four_bytes_us(one, case.peaks, tf32=False)
    after = sum(times.values())
    if after >= spent:
        return None
    with_tf32 = without_tf32 - after > WORTH_NAMING * spent
    return Proposal(
        with_durations(case.graph, case.in_all_steps(times)),
        f"float64 in {counted(len(times), 'kernel')}, {duration(spent)}; in float32 about {duration(after)}"
        + f", without TF32 about {duration(without_tf32)}" * with_tf32,
        IN_FLOAT32 + "; and torch.set_float32_matmul_precision('high') for TF32" * with_tf32,
        assumed=True,
    )


def _in_float64(one: GpuWork, op: Op | None) -> bool:
    """Return whether a kernel computes in float64: by its name's types, its op's first tensor, or its parameters."""
    if one.kind != "kernel" or one.family not in (*MULTIPLY, *MOVE):
        return False
    types = one.name_says.get("types") or (type_of(op) if op is not None else "")
    # Only cuDNN's kernels leave the types out: the functions of torch's kernels in float32 may have double parameters.
    return types == "fp64" or (not types and one.maker == "cuDNN" and DOUBLE.search(one.name) is not None)


def _in_four_bytes_us(one: GpuWork, peaks: Peaks | None, tf32: bool) -> float:
    """Return a float64 kernel's time (µs) in float32. tf32: whether products may use it; convolutions do by default.

    Without shapes, a product has at most the FLOPs that the device's peak allows. Without peaks it keeps its time, and
    so does the solution of a triangular system.
    """
    if one.family in MOVE:
        return min(one.us, max(one.us / 2, prices.LEAST_KERNEL_US))
    if peaks is None or SOLVES.search(one.name):
        return one.us
    if one.family == "convolution":
        rate = prices.CONVOLUTION * peaks.tf32
    else:
        rate = max(prices.PRODUCT * peaks.fp32, prices.PRODUCT * peaks.tf32 if tf32 else 0.0)
    flops = one.flops or one.us * peaks.fp64 * 1e6
    return min(one.us, multiplying_us(flops, rate, (one.bytes_moved or 0) / 2, peaks))


@change(
    "cast the weights once",
    "the weights do not change between the steps",
    followed=halved(lambda side: side.summary.llm.weight_casts > 0, same_type, same_products, by_calls),
)
def cast_weights(case: Case) -> Proposal | None:
    """Return a proposal to cast the weights once, in inference only, because training changes them in every step."""
    if case.trace.trains or not case.summary.llm.weight_casts:
        return None
    casts, typical = case.in_each_step(weight_casts)
    if not typical:
        return None
    gpu_us = sum(work.us for _, some in typical for work in some)
    return Proposal(
        without_ops(case.graph, [op for some in casts for op, _ in some]),
        f"{counted(len(typical), 'cast')} of weights and biases: {duration(gpu_us)} of GPU time, "
        f"{duration(sum(op.us for op, _ in typical))} of CPU time",
        "convert the model once before the steps, model.to(torch.bfloat16), instead of torch.autocast",
    )
