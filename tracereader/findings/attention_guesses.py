"""What the attention rungs guess: the order of a step's GPU work, its one kernel, copies, footprints, memory."""

from tracereader.figures import Summary
from tracereader.figures.gpu_work import GpuWork
from tracereader.figures.summary import Call
from tracereader.findings import attention
from tracereader.findings.attention import LOW
from tracereader.findings.finding import Finding, Verdict, counted, listed, recordable
from tracereader.trace.kernel_names import short

BYTES_OF_FLAG = {"bf16": 2, "fp16": 2, "fp32": 4}
# cuBLAS's workspace on the H200; a peak is read as so many matrices of scores only where these are larger.
WORKSPACE_BYTES = 32 * 2**20


def _kernels(summary: Summary) -> list[GpuWork]:
    return [one for one in summary.gpu_work if one.kind == "kernel"]


def _word(one: GpuWork) -> str:
    """What a piece of GPU work is, in a word."""
    if one.kind != "kernel":
        return "copy" if one.kind == "memcpy" else one.kind
    if one.family in ("GEMM", "attention"):
        return one.family
    return one.name_says.get("does", one.family).split(",")[0]


@recordable
def gpu_does(*words: str) -> Finding:
    """words: GEMM, copy, attention, or what a kernel's name says it does; memsets are left out."""

    def judge(summary):
        work = [one for one in summary.gpu_work if one.kind != "memset"]
        seen = listed(f"{_word(one)} {one.us:,.1f}" for one in work[: len(words) + 2])
        if len(work) > len(words) + 2:
            seen = f"{counted(len(work), 'piece')}: {seen}, …"
        return Verdict([_word(one) for one in work] == list(words), f"{seen} (µs)")

    return Finding(f"{len(words)} things on the GPU: {', '.join(words)}", judge, needs_gpu=True)


def _below(chain: tuple[Call, ...], at: int) -> list[Call]:
    """The calls inside the one at this place."""
    end = next((n for n in range(at + 1, len(chain)) if chain[n].depth <= chain[at].depth), len(chain))
    return list(chain[at + 1 : end])


@recordable
def copies_first(op: str, in_place: str) -> Finding:
    def judge(summary):
        found = next((one for one in summary.hidden_copies if one.op == op), None)
        if found is None:
            return Verdict(False, f"no {op} with a copy in it")
        us = found.gpu_us if summary.has_gpu_work else found.cpu_us
        moved = f", {found.copied / 1e6:,.0f} MB moved" if found.copied else ""
        return Verdict(True, f"{op} clones first: {us:,.1f} µs{moved}")

    return Finding(f"{op} copies its input, then calls {in_place} on the copy", judge)


@recordable
def kernel_is(word: str, what: str) -> Finding:
    """One kernel a step, with this in its name."""

    def judge(summary):
        kernels = _kernels(summary)
        seen = listed(f"{short(one.name, 60)} {one.us:,.1f} µs" for one in kernels[:3])
        if len(kernels) > 3:
            seen = f"{counted(len(kernels), 'kernel')}: {seen}, …"
        return Verdict(len(kernels) == 1 and word in kernels[0].name, seen)

    return Finding(f"one kernel a step, {what}", judge, needs_gpu=True)


@recordable
def written_for_this_gpu() -> Finding:
    def judge(summary):
        older = attention.for_an_older_gpu().ask(summary)
        why_not = "older code runs on newer GPUs, without their newer instructions"
        return Verdict(None if older.holds is None else not older.holds, older.evidence, why_not)

    return Finding("the kernel was written for this generation of GPU", judge, needs_gpu=True)


@recordable
def launched_by(call: str) -> Finding:
    def judge(summary):
        calls = sorted({one.launched_by for one in _kernels(summary)})
        return Verdict(calls == [call], listed(calls))

    return Finding(f"launched with {call}", judge, needs_gpu=True)


def _only_footprint(summary: Summary) -> GpuWork | None:
    kernels = _kernels(summary)
    return kernels[0] if len(kernels) == 1 and kernels[0].occupancy else None


def _footprint(one: GpuWork) -> str:
    return (
        f"{one.registers} registers a thread, {one.shared_memory:,} B shared memory a block: "
        f"at most {one.occupancy.limit:.0%}, limited by {one.occupancy.limited_by}"
    )


@recordable
def occupancy_is_low() -> Finding:
    def judge(summary):
        one = _only_footprint(summary)
        if one is None:
            return Verdict(None, "not one kernel with its footprint")
        reported = one.occupancy.reported
        seen = _footprint(one) + ("" if reported is None else f"; the profiler's estimate is {reported:.0%}")
        return Verdict(one.occupancy.limit < LOW, seen)

    return Finding(f"the kernel's occupancy is low, below {LOW:.0%}, by its footprint", judge, needs_gpu=True)


@recordable
def occupancy_not_reported() -> Finding:
    def judge(summary):
        one = _only_footprint(summary)
        if one is None:
            return Verdict(None, "not one kernel with its footprint")
        if one.occupancy.reported is not None:
            return Verdict(False, f"{one.occupancy.reported:.0%}; {_footprint(one)}")
        return Verdict(one.occupancy.not_estimated, f"none or 0% in the trace; {_footprint(one)}")

    text = "the profiler has no occupancy for blocks of more than 48 KB of shared memory: the footprint tells"
    return Finding(text, judge, needs_gpu=True)


@recordable
def sdpa_runs_on(backend: str) -> Finding:
    def judge(summary):
        found = attention.backends(summary)
        if not found:
            return Verdict(None, "no scaled_dot_product_attention in this trace")
        return Verdict(list(found) == [backend], attention.sdpa_runs().ask(summary).evidence)

    return Finding(f"left to itself, SDPA takes {backend}", judge)


@recordable
def builds_its_mask() -> Finding:
    return Finding("the causal mask is built anew in every call", attention.mask_remade().judge)


@recordable
def gemms_on_cuda_cores() -> Finding:
    text = "inputs go up to fp32, and the products run on CUDA cores: sgemm or ffma"

    def judge(summary):
        cast, cores = attention.cast_before_product().ask(summary), attention.on_cuda_cores().ask(summary)
        return Verdict(cast.holds and cores.holds, f"{cast.evidence}; {cores.evidence}")

    return Finding(text, judge, needs_gpu=True)


@recordable
def safe_softmax() -> Finding:
    def judge(summary):
        at = next((n for n, call in enumerate(summary.chain) if call.name == "aten::_safe_softmax"), None)
        if at is None:
            return Verdict(False, "no aten::_safe_softmax")
        inside = _below(summary.chain, at)
        top = [call.name for call in inside if call.depth == summary.chain[at].depth + 1]
        launched = sum(len(call.launched) for call in inside)
        seen = listed(top) + (f"; {counted(launched, 'kernel')}, softmax itself is one of them" if launched else "")
        return Verdict(len(set(top)) > 1, seen)

    return Finding("_safe_softmax does more than softmax: a row with nothing to attend to gives 0, not NaN", judge)


@recordable
def most_cpu_time_of_its_own(op: str) -> Finding:
    def judge(summary):
        own = {name: times.self_us for name, times in summary.ops.items() if times.self_us}
        if op not in own:
            return Verdict(None, f"no {op} in this trace")
        largest = max(own, key=own.get)
        seen = f"{op} {own[op]:,.1f} of the step's {summary.chosen.cpu_us:,.1f} µs" + (
            "" if largest == op else f"; {largest} {own[largest]:,.1f}"
        )
        return Verdict(largest == op, seen)

    return Finding(f"no op takes more CPU time of its own than {op}: the work is in a library below it", judge)


@recordable
def scores_in_memory(at_least: int) -> Finding:
    """at_least: matrices of [batch, heads, seq, seq] at the step's peak; 0: not even one."""

    def judge(summary):
        known = _scores_and_peak(summary)
        if known is None:
            return Verdict(None, "no peak memory in this trace")
        scores, rest = known
        if scores <= WORKSPACE_BYTES:
            return Verdict(None, f"scores of {scores / 1e6:,.1f} MB are lost in what libraries keep")
        seen = (
            f"{rest / 1e6:,.0f} MB at the peak besides query, key, value and result, {rest / scores:.1f} times "
            f"the scores' {scores / 1e6:,.0f} MB"
        )
        return Verdict(rest >= at_least * scores if at_least else rest < scores, seen)

    if at_least:
        text = f"at its peak the step holds the scores of all pairs of tokens {at_least} times"
        return Finding(text, judge, needs_gpu=True)
    return Finding("the scores of all pairs of tokens are never in memory as a whole", judge, needs_gpu=True)


def _scores_and_peak(summary: Summary) -> tuple[int, int] | None:
    """Bytes of the scores, and of the peak less the inputs and the result; None where the run's facts do not tell."""
    lesson = summary.lesson or {}
    facts = lesson.get("facts", {})
    known, peak = facts.get("attention"), facts.get("peak_bytes")
    itemsize = BYTES_OF_FLAG.get(str(lesson.get("flags", {}).get("dtype")))
    if not isinstance(known, dict) or type(peak) is not int or itemsize is None:
        return None
    sizes = [known.get(name) for name in ("batch", "heads", "seq", "head_dim")]
    if not all(type(one) is int and one > 0 for one in sizes):
        return None
    batch, heads, seq, head_dim = sizes
    one_side = batch * heads * seq * itemsize
    return one_side * seq, peak - 4 * one_side * head_dim
