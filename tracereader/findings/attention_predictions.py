"""Predictions of the attention scripts: the order of a step's GPU activities, a single kernel, peak memory."""

import math

from tracereader.figures import Summary
from tracereader.figures.gpu_work import GpuWork
from tracereader.findings import attention
from tracereader.findings.finding import Verdict, activities, counted, finding, listed
from tracereader.findings.ops import with_calls_below
from tracereader.trace.kernel_names import short
from tracereader.trace.types import dtype_of

# cuBLAS's workspace on the H200. The peak is expressed in matrices of scores only if one of them is larger than this.
WORKSPACE_BYTES = 32 * 2**20


def _word(one: GpuWork) -> str:
    if one.kind != "kernel":
        return "copy" if one.kind == "memcpy" else one.kind
    if one.family in ("GEMM", "attention"):
        return one.family
    return one.name_says.get("does", one.family).split(",")[0]


@finding(predicts=lambda *words: f"{activities(len(words))} per step: {', '.join(words)}", needs_gpu=True)
def gpu_does(summary: Summary, *words: str) -> Verdict:
    """Judge the order of a step's GPU activities.

    words: GEMM, copy, attention, or the operation in a kernel's name. Memsets are left out.
    """
    work = [one for one in summary.gpu_work if one.kind != "memset"]
    seen = listed(f"{_word(one)} {one.us:,.1f}" for one in work[: len(words) + 2])
    if len(work) > len(words) + 2:
        seen = f"{activities(len(work))}: {seen}, …"
    return Verdict([_word(one) for one in work] == list(words), f"{seen} (µs)")


@finding(predicts=lambda word, what: f"one kernel per step, {what}", needs_gpu=True)
def kernel_is(summary: Summary, word: str, what: str) -> Verdict:
    """Judge whether the step has one kernel. word: a part of its name. what: the kernel in words."""
    kernels = summary.kernels_of_step
    seen = listed(f"{short(one.name, 60)} {one.us:,.1f} µs" for one in kernels[:3])
    if len(kernels) > 3:
        seen = f"{counted(len(kernels), 'kernel')}: {seen}, …"
    return Verdict(len(kernels) == 1 and word in kernels[0].name, seen)


@finding(predicts="the kernel was written for this generation of GPU", needs_gpu=True, claims="49")
def written_for_this_gpu(summary: Summary) -> Verdict:
    older = attention.for_an_older_gpu.ask(summary)
    why_not = "older code runs on a newer GPU, without its newer instructions"
    return Verdict(None if older.holds is None else not older.holds, older.evidence, why_not)


@finding(predicts=lambda call: f"the kernel is launched with {call}", needs_gpu=True, claims="54")
def launched_by(summary: Summary, call: str) -> Verdict:
    calls = sorted({one.launched_by for one in summary.kernels_of_step})
    return Verdict(calls == [call], listed(calls))


@finding(
    predicts="the profiler reports 0% occupancy, but the kernel's registers and shared memory allow more",
    needs_gpu=True,
    claims="55",
)
def occupancy_not_estimated(summary: Summary) -> Verdict:
    kernels = summary.kernels_of_step
    one = kernels[0] if len(kernels) == 1 else None
    if one is None or one.occupancy is None:
        return Verdict(None, "the step is not one kernel with recorded registers and shared memory")
    shared = f"{one.shared_memory:,} B shared memory per block of {math.prod(one.block)} threads"
    seen = f"{one.registers} registers per thread and {shared}: at most {one.occupancy.limit:.0%}"
    seen += f", limited by {one.occupancy.limited_by}" if one.occupancy.limited_by else ""
    reported = one.occupancy.reported
    return Verdict(one.occupancy.not_estimated, seen, "" if reported is None else f"the profiler says {reported:.0%}")


@finding(predicts=lambda backend: f"by default SDPA chooses {backend}", claims="57")
def sdpa_runs_on(summary: Summary, backend: str) -> Verdict:
    found = attention.backends(summary)
    if not found:
        return Verdict(None, "no scaled_dot_product_attention in this trace")
    return Verdict(set(found) == {backend}, f"SDPA chose {listed(found)}")


@finding(
    predicts="_safe_softmax does more than softmax: a row with nothing to attend to becomes 0, not NaN", claims="48"
)
def safe_softmax(summary: Summary) -> Verdict:
    found = with_calls_below(summary, "aten::_safe_softmax")
    if not found:
        return Verdict(False, "no aten::_safe_softmax")
    softmax, inside = found[0]
    top = [call.name for call in inside if call.depth == softmax.depth + 1]
    launched = sum(len(call.launched) for call in inside)
    seen = listed(top) + (f"; {counted(launched, 'kernel')}, one of them softmax itself" if launched else "")
    return Verdict(len(set(top)) > 1, seen)


def _scores_held(at_least: int) -> str:
    if not at_least:
        return "the scores of all pairs of tokens are never in memory as a whole"
    times = {1: "once", 2: "twice"}.get(at_least, f"{at_least} times")
    return f"at its peak the step holds the scores of all pairs of tokens at least {times}"


@finding(predicts=_scores_held, needs_gpu=True)
def scores_in_memory(summary: Summary, at_least: int) -> Verdict:
    """Judge the peak memory.

    at_least: the number of matrices of [batch, heads, seq, seq] at the step's peak; 0 predicts that none is held.
    """
    facts = summary.source.facts
    sizes, dtype = facts.attention and facts.attention.sizes, dtype_of(facts.dtype)
    if sizes is None or facts.peak_bytes is None or dtype is None:
        return Verdict(None, "no peak memory in this trace")
    batch, heads, seq, head_dim = sizes
    one_side = batch * heads * seq * dtype.bytes
    scores, rest = one_side * seq, facts.peak_bytes - 4 * one_side * head_dim  # without inputs and result
    if scores <= WORKSPACE_BYTES:
        return Verdict(None, f"scores of {scores / 1e6:,.1f} MB are smaller than the memory that libraries keep")
    besides = f"{rest / 1e6:,.0f} MB at the peak besides query, key, value and result"
    seen = f"{besides}, {rest / scores:.1f} times the scores' {scores / 1e6:,.0f} MB"
    if at_least:
        return Verdict(rest >= at_least * scores, seen)
    # A larger rest need not be scores: the memory-efficient kernel keeps wide heads in fp32.
    return Verdict(True if rest < scores else False if summary.attention.unfused else None, seen)
