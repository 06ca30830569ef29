"""Findings about a language model's steps: tokens per second, the roofline, and work that may be unnecessary."""

from collections import Counter

from tracereader.figures import Summary
from tracereader.figures.decoding import MANY_LAUNCHES, Asked, Decoding, ridge_rows
from tracereader.figures.gpu_time import is_python
from tracereader.figures.gpu_work import GpuWork
from tracereader.figures.hardware import common_peaks
from tracereader.findings.device_words import CUDA_OR_HIP
from tracereader.findings.finding import GPU, Verdict, counted, duration, finding, size, tokens_s
from tracereader.trace.waits import synchronizes

# Avoidable work is reported from this share of a step on, measured on the lane that limits the step. In the H200's
# traces, copies of keys and values take 3% of the CPU time of eager decoding, and 11% of the GPU time of compiled
# decoding.
SMALLEST_SHARE = 0.025
# Launch overhead is spread over a step's calls: on the H200, the call with the largest share of the GPU's waiting had
# 22 to 42% of it. A library that prepares kernels, or a slow loader, had 69 to 95%, and a CUDA graph shortens neither.
MOST_IN_ONE_CALL = 0.5
# If matrix products take this share of a step, their rate of reading weights is reported.
MUCH_READING = 0.2


def in_words(summary: Summary) -> list[str]:
    """Return sentences on tokens per second and the roofline; none if the run did not store what its step reads."""
    found = summary.llm.decoding
    if found is None:
        return []
    facts = found.facts
    sequences = "one sequence" if facts.batch == 1 else f"{facts.batch:,} sequences"
    lines = [
        f"{facts.phase} of {sequences}: a step of {counted(facts.tokens, 'token')} takes {duration(found.step_us)} on "
        f"the {found.lane} lane, which is {tokens_s(found.tokens_s)} tokens a second with the profiler"
    ]
    busy = summary.chosen.gpu_busy_us
    if found.lane == "CPU" and 0 < busy < found.step_us:
        lines[0] += f"; the GPU work alone would allow {tokens_s(facts.tokens / busy * 1e6)} tokens a second"
    if facts.phase == "prefill" and (rows := _rows(summary)):
        ridge = ridge_rows(common_peaks(summary.source.devices))
        if ridge and rows >= ridge:
            lines.append(
                f"its matrix products have {rows:,} rows; by the data sheet, products of {ridge} rows or more are "
                "limited by arithmetic"
            )
    # Prefill multiplies each weight by many tokens, so reading the weights does not limit it.
    if facts.phase == "decode" and found.least_us and found.least_us <= found.step_us:
        lines += [_roof(found), *_products(summary)]
    return lines


def _roof(found: Decoding) -> str:
    """Return the sentence on the roofline: the longer of reading and arithmetic, if the latter is known."""
    facts, least = found.facts, found.least_us
    read = f"reading the weights ({size(facts.weight_bytes)})"
    if facts.cache_bytes:
        read += f" and the cache ({size(facts.cache_bytes)})"
    rate = f"{found.gb_s / 1e3:.1f} TB/s"
    at = f"{rate}, the bandwidth that the run measured" if found.measured else f"the data sheet's {rate}"
    read += f" once takes {duration(found.read_us)} at {at}"
    reached = f"{least / found.step_us:.1%}"
    allows = f"allows {facts.tokens / least * 1e6:,.0f} tokens a second, and the step reaches {reached}"
    if found.multiply_us is None:
        return f"reading alone {allows} of that: {read}"
    if found.multiply_us <= found.read_us:
        return f"the roofline {allows} of that: {read}"
    return (
        f"the roofline {allows} of that: arithmetic is the limit, because 2 x {facts.weight_bytes / 2e6:,.1f} M "
        f"weights x {counted(facts.tokens, 'token')} = {found.flops / 1e9:,.1f} GFLOP take "
        f"{duration(found.multiply_us)} at the data sheet's {found.tflops:,.0f} TFLOP/s; {read}"
    )


def _products(summary: Summary) -> list[str]:
    """Return a sentence on how fast matrix products read the weights, if reading limits the step.

    There is none if some of them overlap, because their times do not add up then.
    """
    found, products = summary.llm.decoding, [one for one in summary.gpu_work if one.family == "GEMM"]
    us, read = sum(one.us for one in products), found.facts.weight_bytes
    if found.least_us > found.read_us or not all(one.ran_alone for one in products):
        return []
    if us <= MUCH_READING * found.step_us or read > us * found.gb_s * 1e3:
        return []
    return [
        f"matrix products take {duration(us)} of a step and read the weights at {read / us / 1e6:.2f} TB/s, "
        f"{read / us / 1e3 / found.gb_s:.0%} of that bandwidth"
    ]


def _rows(summary: Summary) -> int | None:
    """Return the row count with the most time in products of two-byte elements; None if no shapes are recorded."""
    time: Counter = Counter()
    for one in summary.gpu_work:
        if one.product and one.product.batch == 1 and one.bytes_moved == 2 * one.product.elements:
            time[one.product.m] += one.us
    return time.most_common(1)[0][0] if time else None


@finding(
    GPU,
    "identical launches in every step, and the GPU waits for them",
    needs_gpu=True,
    change="cuda_graph",
    needs=CUDA_OR_HIP,
)
def graph_would_do(summary: Summary) -> Verdict:
    """A CUDA graph replays them with one launch (torch.cuda.graph, or torch.compile with reduce-overhead), as long as
    shapes, addresses and CPU-side arguments stay the same. The GPU's busy time remains."""
    step = summary.chosen
    graphs = any(one.from_graph for one in summary.gpu_work)
    peers = any(one.family == "communication" for one in summary.gpu_work)
    waits = Counter()
    for name, us in summary.idle_in.items():
        waits["Python" if is_python(name) else name] += us
    if (
        summary.waits_for != "overhead"
        or not summary.llm.same_in_all_steps
        or step.launches < MANY_LAUNCHES
        or max(waits.values(), default=0.0) > MOST_IN_ONE_CALL * sum(summary.idle_in.values())
        or graphs or peers or _launches_after_a_wait(summary)
    ):  # fmt: skip
        return Verdict(False, "")
    steps = len(summary.steps) - len(summary.left_out)
    return Verdict(
        True,
        f"{step.launches:,} launches in each of {steps} steps, none of them after a "
        f"synchronization; the GPU is busy for {duration(step.gpu_busy_us)} of {duration(step.cpu_us)}",
    )


def _launches_after_a_wait(summary: Summary) -> bool:
    """Return whether the step launches anything after it has waited for a result, which no CUDA graph can contain."""
    waited = False
    for call in summary.cpu.chain:
        if waited and call.launched:
            return True
        waited = waited or synchronizes(call.name) or any("Pageable" in name for name in call.launched)
    return False


@finding(GPU, "keys and values expanded in memory before attention", needs_gpu=True, change="shared_keys")
def expanded_keys(summary: Summary) -> Verdict:
    """Grouped-query attention copies each key head once per query head. Attention can take the keys and values without
    copies (enable_gqa=True)."""
    found = summary.llm.unneeded.expanded
    if found is None:
        return Verdict(False, "")
    heads = summary.llm.unneeded.key_heads
    of = f" of {heads} heads" if heads and found.cpu_us else ""
    return _verdict(summary, found, f"{counted(found.pieces, 'copy', 'copies')}{of}, two before each attention")


@finding(GPU, "casts with a kernel of their own", needs_gpu=True, change="fuse_pointwise")
def casts_alone(summary: Summary) -> Verdict:
    """Each of these kernels only converts one dtype to another. Compiled code casts inside the neighbouring kernels."""
    found = summary.llm.unneeded.casts
    return _verdict(summary, found, f"{counted(found.pieces, 'cast')}") if found else Verdict(False, "")


@finding(GPU, "weights cast in every step", needs_gpu=True, change="cast_weights")
def weights_cast(summary: Summary) -> Verdict:
    """torch.autocast casts each weight once per step. In inference, convert the model once instead. In training the
    weights change in every step, and the casts are needed."""
    found = summary.llm.unneeded.weight_casts
    if found is None:
        return Verdict(False, "")
    return _verdict(summary, found, f"{counted(found.pieces, 'cast')} of weights and biases")


def _verdict(summary: Summary, found: Asked, what: str) -> Verdict:
    """Return a verdict that holds if the cost is large enough on the lane that limits the step."""
    step, total = summary.chosen, summary.summed_us
    on_cpu = summary.waits_for == "overhead" and found.cpu_us
    much, whole = (found.cpu_us, step.cpu_us) if on_cpu else (found.gpu_us, total)
    seen = f"{what}: {duration(found.gpu_us)} of {duration(total)} of GPU work"
    if found.cpu_us:
        seen += f", {duration(found.cpu_us)} of {duration(step.cpu_us)} on the CPU"
    return Verdict(much > SMALLEST_SHARE * whole, seen)


@finding(GPU, "logits of every token in prefill", needs_gpu=True, change="last_logits")
def logits_of_all(summary: Summary) -> Verdict:
    """Generation needs one row of logits per sequence, that of the last token (logits_to_keep=1)."""
    head, _ = head_of_all(summary)
    if head is None:
        return Verdict(False, "")
    shape = head.product
    seen = f"M {shape.m:,} · K {shape.k:,} · N {shape.n:,}: {duration(head.us)} for {shape.m:,} rows of logits"
    return Verdict(True, seen)


def head_of_all(summary: Summary) -> tuple[GpuWork | None, int]:
    """Return the product that makes the logits of all tokens, and the number of rows that the step needs.

    The product is None if the step has none. A prefill needs the logits of each sequence's last token. In other steps
    the ops after the product show which rows are kept.
    """
    facts = summary.llm.decoding and summary.llm.decoding.facts
    phase = facts.phase if facts else (summary.cpu.label.name if summary.cpu.label else "")
    needed = (facts.batch if facts else 1) if phase == "prefill" else summary.llm.unneeded.logits_kept
    products = [one for one in summary.gpu_work if one.product and one.product.batch == 1]
    if not needed or len(products) < 3:
        return None, 0
    head = max(products, key=lambda one: one.product.n)
    rows = [one.product.m for one in products if one is not head]
    # The head has as many rows as the layers, one for each token. One row for each sequence would be enough.
    if head is not products[-1] or head.product.m != max(rows) or head.product.m <= needed:
        return None, 0
    return head, needed


@finding(GPU, "matrix products of few rows, which mostly read weights", needs_gpu=True, change="larger_batch")
def reads_weights(summary: Summary) -> Verdict:
    """Their time is the bytes divided by the bandwidth, as in decoding. A larger batch reads the weights once for more
    tokens, and smaller dtypes read fewer bytes."""
    found = next(iter(summary.llm.weight_reads), None)
    total = summary.summed_us
    if found is None or found.us <= MUCH_READING * total:
        return Verdict(False, "")
    if found.ridge_rows and found.rows >= found.ridge_rows:
        return Verdict(False, "")
    gb_s, peaks = found.bytes / found.us / 1e3, common_peaks(summary.source.devices)
    if peaks and gb_s > peaks.gb_s:
        return Verdict(False, "")  # the weights came from a cache
    seen = (
        f"{counted(found.products, 'product')} of {counted(found.rows, 'row')} read {size(found.bytes)} in "
        f"{duration(found.us)}: {gb_s / 1e3:.2f} TB/s"
    )
    if peaks:
        seen += f", {gb_s / peaks.gb_s:.0%} of the data sheet's bandwidth"
    if found.ridge_rows:
        seen += f"; with {found.ridge_rows} rows or more, arithmetic would be the limit"
    return Verdict(True, seen)
