"""Findings about attention and hidden work of eager code around it: copies, masks, casts, old kernels."""

import re
from collections.abc import Sequence

import msgspec

from tracereader.figures import Summary
from tracereader.figures.gpu_work import GpuWork
from tracereader.findings import finding as words
from tracereader.findings.device_words import CUDA
from tracereader.findings.finding import CPU, GPU, TREE, Verdict, counted, duration, finding, listed, size
from tracereader.trace.grouped import totals
from tracereader.trace.kernel_names import CUDA_CORES, short

# The ops that scaled_dot_product_attention can call, and torch's name for each backend.
BACKENDS = {
    "aten::_scaled_dot_product_attention_math": "math",
    "aten::_scaled_dot_product_efficient_attention": "efficient",
    "aten::_scaled_dot_product_flash_attention": "flash",
    "aten::_scaled_dot_product_flash_attention_for_cpu": "flash",
    "aten::_scaled_dot_product_cudnn_attention": "cudnn",
    "aten::_scaled_dot_product_fused_attention_overrideable": "the device's own",
    "aten::_scaled_dot_product_attention_math_for_mps": "math",
}
# A smaller share of a step's GPU time is not reported. On the H200 the fp32 product of a rotary embedding takes 0.1% of
# eager prefill, and the math backend's two products take 36%.
SMALLEST_SHARE = 0.01
# A lower occupancy is called low. On the H200, FlashAttention's and flex_attention's kernels have 12.5%. nvjet's
# products have 19% and reach 83% of the arithmetic peak.
LOW = 0.15
# Share of the CPU self time of all ops and CUDA calls. cuDNN's attention takes 43%, and cuBLAS's products take 41 to
# 61% if they are most of the step; flash takes 18% and the memory-efficient kernel 23%.
MUCH_SELF_TIME = 0.4

# The libraries that choose and prepare kernels outside of ATen. cuBLAS contains CUTLASS kernels.
LIBRARY = re.compile("cuBLAS|cuDNN|CUTLASS|rocBLAS|MIOpen")


def _worth_a_line(summary: Summary, us: float) -> bool:
    return us > SMALLEST_SHARE * (summary.summed_us or summary.chosen.cpu_us)


@finding(
    TREE,
    "a softmax between two batched matrix products",
    predicts="softmax runs between two batched matrix products",
    claims="41",
    change="fused_attention",
)
def unfused(summary: Summary) -> Verdict:
    """This looks like unfused attention: the scores of all queries with all keys are written to memory and read back
    several times. A fused kernel keeps them on the chip."""
    found = summary.attention.unfused
    us = sum(one.us for one in found)
    if not found:
        return Verdict(False, "the step has no such softmax")
    if not _worth_a_line(summary, us):
        return Verdict(False, f"{duration(us)} between the two products")
    several = f"{len(found)} times per step: " if len(found) > 1 else ""
    pieces = sum(one.pieces for one in found)
    seen = f"{several}{duration(us)} between the two products" + (f", in {words.activities(pieces)}" if pieces else "")
    if all(one.scores for one in found):
        seen += f"; {_moved(found)}"
    return Verdict(True, seen)


def _moved(found: Sequence) -> str:
    """Return a sentence on the bytes that the matrices of scores cost, by the recorded shapes."""
    first = found[0].scores
    alike = len({msgspec.structs.replace(one.scores, moved=0, at_least=0) for one in found}) == 1
    matrix = f"the {first.batch} x {first.queries} x {first.keys} scores ({size(first.bytes)}) are written "
    passes = f"{matrix}{counted(first.written, 'time')} and read {counted(first.read, 'time')}: " if alike else ""
    moved, least = sum(one.scores.moved for one in found), sum(one.scores.at_least for one in found)
    return f"{passes}{size(moved)} moved; a fused kernel needs {size(least)}"


@finding(
    TREE,
    "clone and copy_ inside another op",
    predicts="an op that works out of place copies its input",
    claims="42",
    change="in_place",
)
def hidden_copy(summary: Summary) -> Verdict:
    """The op works out of place: it copies its input and changes the copy. The in-place op, whose name ends in _, needs
    no copy. Use it where nothing else needs the input."""
    found = summary.attention.hidden_copies
    if not found:
        return Verdict(False, "no op of the step clones its input first")
    gpu_us, cpu_us = sum(one.gpu_us for one in found), sum(one.cpu_us for one in found)
    first = found[0]
    moved = f", {size(first.copied)} moved" if first.copied else ""
    each = first.gpu_us if summary.has_gpu_work else first.cpu_us
    calls = f" ({first.calls:,} times)" if first.calls > 1 else ""
    others = len(found) - 1
    more = f"; {counted(others, 'more op')} {'clones its' if others == 1 else 'clone their'} input" if others else ""
    seen = f"{first.op}{calls} clones its input first: {duration(each)}{moved}; {first.op}_ does not{more}"
    return Verdict(_worth_a_line(summary, gpu_us if summary.has_gpu_work else cpu_us), seen)


@finding(
    TREE,
    "ones and tril in every step",
    predicts="a triangular mask is built in every step",
    claims="47",
    change="mask_once",
)
def mask_remade(summary: Summary) -> Verdict:
    """A constant mask is built again in every step. Build it once, outside the step."""
    made = summary.attention.mask_made
    if made is None:
        return Verdict(False, "no tril or triu of constants in the step")
    if len(summary.steps) < 2:
        return Verdict(None, "the step makes a mask, but one step does not show whether every step does")
    gpu = f", {duration(made.gpu_us)} of GPU time in {words.activities(made.pieces)}" if made.pieces else ""
    names = listed(name.removeprefix("aten::") for name in made.ops)
    build = "builds" if len(made.ops) == 1 else "build"
    seen = f"{names} {build} it {words.how_often(made.times)} per step: {duration(made.cpu_us)} of CPU time{gpu}"
    return Verdict(made.steps == len(summary.steps), seen, f"in {made.steps} of {len(summary.steps)} steps")


@finding(
    GPU,
    "casts to fp32 before a matrix product",
    predicts="factors are cast to fp32 before a matrix product",
    needs_gpu=True,
    claims="46",
)
def cast_before_product(summary: Summary) -> Verdict:
    """Two-byte factors become four-byte ones. The cast takes time, and the product loses the bf16 and fp16 tensor
    cores."""
    found = summary.attention.cast_products
    if found is None:
        return Verdict(False, "no fp32 product whose factors were cast to fp32")
    products = f"{counted(found.products, 'fp32 product')} in {duration(found.products_us)}"
    seen = f"{counted(found.casts, 'cast')} in {duration(found.cast_us)}, before {products}"
    return Verdict(_worth_a_line(summary, found.cast_us), seen)


@finding(
    GPU,
    "sgemm, simt or ffma in a GEMM's name",
    predicts="fp32 matrix products run on CUDA cores",
    needs_gpu=True,
    claims="46",
    change="tf32",
    needs=CUDA,
)
def on_cuda_cores(summary: Summary) -> Verdict:
    """The product runs in fp32 on CUDA cores. Tensor cores take bf16, fp16, and fp32 as TF32
    (torch.set_float32_matmul_precision), each with fewer digits."""
    gemms = [one for one in summary.gpu_work if one.says.multiplies]
    mine = [one for one in gemms if one.name_says.get("on") == CUDA_CORES]
    if not gemms:
        return Verdict(None, "the step has no kernel that is known as a matrix product")
    if not mine:
        return Verdict(False, f"none of {counted(len(gemms), 'product')}, by the kernels' names")
    us = sum(one.us for one in mine)
    seen = f"{len(mine)} of {counted(len(gemms), 'product')}, {duration(us)}: {short(mine[0].name, 60)}"
    # Tensor cores support TF32 from compute capability 8.0 on.
    return Verdict(int(summary.source.compute_capability or 0) >= 80 and _worth_a_line(summary, us), seen)


@finding(GPU, "a kernel written for an older GPU generation", needs_gpu=True)
def for_an_older_gpu(summary: Summary) -> Verdict:
    """It runs, but does not use this GPU's newer instructions."""
    own = summary.source.compute_capability or ""
    generations = [(one, _written_for(one)) for one in summary.gpu_work]
    if not own.isdigit() or not any(sm for _, sm in generations):
        return Verdict(None, "no kernel whose name gives the GPU generation")
    # Newer generations have faster instructions: wgmma and TMA on sm 90, fifth-generation tensor cores on sm 100.
    older = [one for one, sm in generations if sm and sm // 10 < int(own) // 10 and 90 <= int(own) < 120]
    us = sum(one.us for one in older)
    if us <= 0.1 * summary.summed_us:
        shown = listed(sorted({f"sm {sm}" for _, sm in generations if sm}))
        return Verdict(False, f"{shown}, run on sm {own}")
    by_name = totals((one.name, one.us) for one in older)
    first = short(by_name.most_common(1)[0][0], 50)
    which = f"{counted(len(older), 'kernel')}, the costliest {first}," if len(by_name) > 1 else first
    whole = duration(summary.summed_us)
    return Verdict(True, f"{which} on sm {own}: {duration(us)} of the {whole} of GPU work in a step")


def _written_for(one: GpuWork) -> int | None:
    """Return the architecture (90 for sm 90) in a product's or an attention kernel's name; None without one."""
    if one.family not in ("GEMM", "attention"):
        return None
    text = one.name_says.get("for") or one.maker.rpartition(", ")[2]
    number = text.removeprefix("sm ")
    return int(number) if text.startswith("sm ") and number.isdigit() else None


@finding(
    GPU,
    "low occupancy of the kernel that takes most of the step",
    predicts="occupancy is low: few warps run on a multiprocessor",
    needs_gpu=True,
    claims="51",
    teaches=True,
)
def low_occupancy(summary: Summary) -> Verdict:
    """Low occupancy alone is not a fault: GEMM and attention kernels keep their data in registers and shared memory and
    need few warps. Judge by the duration and the achieved rate. A reported 0% for a block with more than 48 KB of
    shared memory is not an estimate."""
    one = max(summary.gpu_work, key=lambda one: one.us, default=None)
    # Only for the kernel that takes most of the step.
    if one is None or one.occupancy is None or one.us < 0.5 * summary.summed_us:
        return Verdict(None, "no kernel with a known footprint that takes half of the step's GPU time")
    limit = f"{one.occupancy.limit:.1%}".replace(".0%", "%")
    by = f", limited by {one.occupancy.limited_by}" if one.occupancy.limited_by else ""
    seen = f"{short(one.name)}: at most {limit}{by}"
    if one.occupancy.not_estimated:
        seen += " (the profiler's 0% is no estimate)"
    if one.of_roof is not None:
        seen += f"; it reaches {one.of_roof:.0%} of the {words.ROOFS[one.roof][0]}"
    return Verdict(one.occupancy.limit < LOW, seen)


@finding(
    CPU,
    "one op's self time above all others'",
    predicts="one op's CPU self time is above all others'",
    needs_gpu=True,
    claims="56",
)
def time_in_a_library(summary: Summary) -> Verdict:
    """The time is spent in a library that records no ops: cuDNN and cuBLAS choose and prepare kernels there."""
    makers = {one.asked_by: one.maker.split(",")[0] for one in summary.gpu_work if LIBRARY.match(one.maker)}
    own = {name: one.self_us for name, one in summary.cpu.ops.items() if name in makers}
    total = summary.cpu.recorded_us
    name = max(own, key=own.get, default=None)
    if name is None or not total:
        return Verdict(None, "no op that launches a library's kernel")
    share = f"{words.part_of(own[name], total)} of CPU self time in ops and CUDA calls"
    seen = f"{name}: {share}; {makers[name].split()[0]} provides its kernel"
    return Verdict(own[name] >= MUCH_SELF_TIME * total, seen)


def backends(summary: Summary) -> dict[str, int]:
    """Return the number of calls in the step of each backend that scaled_dot_product_attention chose."""
    return totals((BACKENDS[name], one.calls) for name, one in summary.cpu.ops.items() if name in BACKENDS)


@finding(TREE, "scaled_dot_product_attention", teaches=True)
def sdpa_backend(summary: Summary) -> Verdict:
    """It chooses a backend by device, dtypes and shapes. The op below it shows the choice."""
    calls = backends(summary)
    if not calls:
        return Verdict(False, "no scaled_dot_product_attention in this trace")
    seen = listed(f"{backend} in {counted(number, 'call')}" for backend, number in calls.items())
    # torch ends some reasons with a period, and the sentences are joined by periods.
    against = [f"{name} refused: {'; '.join(why).rstrip('.')}" for name, why in refused(summary).items()]
    return Verdict(True, ". ".join([seen, *against]))


def refused(summary: Summary) -> dict[str, list[str]]:
    """Return torch's reasons against each other backend, as the run's script stored them; empty without them."""
    facts = summary.source.facts.attention
    return {name: [" ".join(one.split()) for one in why] for name, why in facts.refused.items() if why} if facts else {}
