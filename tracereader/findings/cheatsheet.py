"""The cheatsheet: what one sees in a trace, what it usually means, and the finding that tells it.

The page docs/cheatsheet.md is made from PATTERNS, by markdown(). A pattern that costs nothing measurable is
not found.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from tracereader.figures import Summary
from tracereader.findings import attention, decoding, gpu_work, ops, steps, training
from tracereader.findings.finding import Finding, Verdict


@dataclass(frozen=True)
class Pattern:
    """where and what one sees; what it usually means; the finding by which a trace shows it.

    telling: worth naming first of a step that nothing known costs.
    """

    where: str
    see: str
    means: str
    finding: Finding
    telling: bool = False


TABLE, CPU, GPU, CHAIN, COMPILE = "profiler table", "CPU lane", "GPU lane", "dispatch chain", "torch.compile"

PATTERNS = (
    Pattern(TABLE, "the CPU's self total far above the GPU's", "Overhead-bound: the GPU waits for the CPU to launch. "
            "Give each launch more to do (larger or batched work), or fuse launches.",
            steps.cpu_total_far_above()),
    Pattern(TABLE, "the GPU's self total near the CPU's, or above it", "GPU-bound: the GPU is what you wait for. Only "
            "less or faster GPU work helps now.", steps.gpu_total_near_or_above()),
    Pattern(TABLE, "one row holds most of the GPU's time", "The hotspot: start there.", gpu_work.hotspot()),
    Pattern(TABLE, "a row with very many calls", "Cheap calls add up: can they be batched or fused?", ops.many_calls()),
    Pattern(TABLE, "a row's total far above its self time", "The cost is in what it calls: look inside it, not at it.",
            ops.cost_in_children()),
    Pattern(TABLE, "the label twice, with a percentage over 100", "The second row is the label's span on the GPU, idle "
            "gaps included. Read kernels, not that row.", ops.double_label()),
    Pattern(CPU, "the first step much wider than the others", "A cold start loads, allocates and chooses: warm up "
            "before the profiler starts. Calls that are slower alike come from the pause before the step, in which the "
            "profiler begins to record: read the other steps.", steps.wide_first_step()),
    Pattern(CPU, "a gap between the label's start and the first op in it", "A part of the same, before any op.",
            steps.label_gap()),
    Pattern(CPU, "an occupancy query before a launch", "A library asks how many blocks of a kernel fit on the chip: "
            "cuBLAS of a GEMM (on Hopper once in a process, then it remembers), cub of a sort or a scan.",
            gpu_work.occupancy_query()),
    Pattern(CPU, "cudaGraphLaunch", "A CUDA graph: one launch replays recorded work (torch.cuda.graph; torch.compile's "
            "reduce-overhead and max-autotune).", gpu_work.graph_replay()),
    Pattern(CPU, "one op's own time above all others'", "Its cost lies in a library that records no ops (cuDNN and "
            "cuBLAS choose and prepare kernels there): nothing below it shows.",
            attention.time_in_a_library(), telling=True),
    Pattern(CPU, "a long cudaDeviceSynchronize after the last step", "The profiler waits for the GPU to finish, then "
            "collects its records: long after little GPU work, it shows idleness; after much, only the queue.",
            steps.final_sync()),
    Pattern(CPU, "a synchronization inside a step, with the GPU idle", "The CPU waited for a result (.item(), nonzero, "
            "a blocking copy), and launched nothing meanwhile: drop it, or ask for the result later.",
            steps.synchronization()),
    Pattern(CPU, "module or function loading", "CUDA loads code when it is first used: part of a cold start.",
            steps.module_loading()),
    Pattern(CPU, "a step that waits for the DataLoader", "The next batch is not ready when the step wants it: more "
            "workers, less work for each sample, or batches prepared ahead.", training.starving()),
    Pattern(CPU, "an optimizer that launches for each parameter", "A for-loop over the parameters. foreach=True takes "
            "many of them in one launch, fused=True the whole update.", training.optimizer_for_loop()),
    Pattern(CPU, "forward ops inside backward", "Activation checkpointing: what was not kept is computed again, time "
            "for memory.", training.recomputation()),
    Pattern(GPU, "an Activity Buffer Request", "The profiler's own cost, once: it allocates room for GPU records. Not "
            "your program's.", steps.buffer_request()),
    Pattern(GPU, "kernels start long after their launch", "They queue behind earlier work: the CPU runs ahead, and "
            "the GPU is never starved.", steps.queued()),
    Pattern(GPU, "gaps between the kernels of one step", "The next kernel was not launched yet: the GPU waits for "
            "the CPU.", steps.gaps_between_kernels()),
    Pattern(GPU, "gaps between the kernels of a CUDA graph", "A graph spares the launches, but one kernel still ends "
            "before the next begins: fewer and larger kernels have fewer such gaps.", steps.gaps_in_a_graph()),
    Pattern(GPU, "one kernel with different times over the steps", "Where its data are the same: clocks, heat, "
            "neighbours. Trust the median, not the mean.", gpu_work.duration_varies()),
    Pattern(GPU, "a device-to-device copy before a GEMM", "addmm puts the bias into the output first, and the GEMM "
            "adds to it (beta = 1): no kernel was saved.", gpu_work.copy_before_gemm()),
    Pattern(CHAIN, "a softmax between two batched products", "As in attention that is not fused: the scores of "
            "all queries with all keys go through memory again and again. A fused kernel keeps them on the chip.",
            attention.unfused()),
    Pattern(GPU, "casts to fp32 before a product", "Factors of two bytes are made four: time for the cast, and the "
            "product leaves the fast tensor cores.", attention.cast_before_product()),
    Pattern(GPU, "sgemm, simt or ffma in a product's name", "fp32 on CUDA cores. Tensor cores take bf16 and fp16, and "
            "fp32 as TF32 (torch.set_float32_matmul_precision), each with fewer digits.", attention.on_cuda_cores()),
    Pattern(GPU, "a kernel written for an older generation of GPU", "It runs, without the newer instructions.",
            attention.for_an_older_gpu(), telling=True),
    Pattern(GPU, "low occupancy of the kernel that a step is about", "No fault by itself: products and attention hold "
            "their data in registers and shared memory, and need few warps. The duration and the rate tell. 0% of a "
            "block with more than 48 KB of shared memory is no estimate.", attention.low_occupancy(), telling=True),
    Pattern(CHAIN, "clone and copy_ inside another op", "It works out of place: it copies its input, then changes the "
            "copy. The op with _ does without, where nothing else needs the input.", attention.hidden_copy()),
    Pattern(CHAIN, "ones and tril in every step", "A mask of constants is made anew each time: make it once, outside.",
            attention.mask_remade()),
    Pattern(CHAIN, "scaled_dot_product_attention", "It chooses a backend by device, types and shapes; the op below it "
            "is the choice.", attention.sdpa_runs()),
    Pattern(GPU, "the same launches in every step, and the GPU waiting for them", "A CUDA graph replays them with one "
            "launch (torch.compile's reduce-overhead, torch.cuda.graph), as long as shapes, addresses and what the CPU "
            "hands over stay: what is left is the GPU's own time.", decoding.graph_would_do()),
    Pattern(GPU, "keys and values expanded in memory before attention", "Grouped-query attention by copies: each "
            "head's keys once for every query head. Attention can take them as they are (enable_gqa=True).",
            decoding.expanded_keys()),
    Pattern(GPU, "casts with a kernel of their own", "One type in, another out, and nothing else: compiled code casts "
            "in the kernels beside them; a weight that is cast in every step can be cast once.", decoding.casts()),
    Pattern(GPU, "attention over the empty rest of a static cache", "The mask hides it, and it is read all the same: a "
            "shorter cache, or attention that stops at the last key.", decoding.empty_cache()),
    Pattern(GPU, "in prefill, logits of every token", "The next token needs one row of each sequence "
            "(logits_to_keep=1).", decoding.logits_of_all()),
    Pattern(GPU, "matrix products of few rows, which do little but read weights", "Time is bytes over bandwidth, as in "
            "decoding: a larger batch reads them once for more tokens, smaller types read less.",
            decoding.reads_weights()),
    Pattern(CHAIN, "matmul or linear ending in mm, addmm or bmm", "The dispatcher's choice by the inputs' shapes; the "
            "last name is the one that launches.", ops.resolution()),
    Pattern(CHAIN, "t, view, reshape, … with no GPU work", "They rewrite shape and strides on the CPU; no data moves.",
            ops.views()),
    Pattern(CHAIN, "addmm and no add", "The GEMM's epilogue adds the bias as it writes the result.",
            gpu_work.epilogue()),
    Pattern(COMPILE, "TorchDynamo Cache Lookup in every step", "Guards are checked in each call. For one or two ops "
            "this costs more CPU time than it saves.", ops.dynamo()),
    Pattern(COMPILE, "the same graph hash in all steps", "The compiled graph is reused: cache hits.",
            ops.compiled_graphs()),
    Pattern(COMPILE, "Torch-Compiled Region n/1 or higher", "Compiled again: shapes, types or strides changed. Look at "
            "the first call's time, too.", ops.recompiled()),
    Pattern(COMPILE, "a triton_poi_fused_… kernel", "Several pointwise ops in one pass: what lay between them never "
            "went through memory.", gpu_work.fused()),
    Pattern(COMPILE, "copies before a cudaGraphLaunch", "A graph reads fixed addresses, so inputs are copied in. "
            "Large inputs can cost more than the launches saved.", gpu_work.graph_copies()),
)  # fmt: skip


Shown = tuple[Pattern, Verdict]


def found(summary: Summary) -> list[Shown]:
    """The patterns that a trace shows: those with a cost first, the costliest before the others."""
    verdicts = [(pattern, pattern.finding.ask(summary)) for pattern in PATTERNS]
    return sorted((one for one in verdicts if one[1].holds), key=lambda one: -(one[1].cost_us or 0))


# A finding that costs less of a step is not worth a line of the answer.
WORTH_TELLING = 0.05


def costliest(summary: Summary, shown: Sequence[Shown]) -> list[Shown]:
    """Of the patterns found the one or two that cost a step most."""
    step_us = max(summary.chosen.cpu_us, summary.chosen.gpu_busy_us)
    return [one for one in shown if (one[1].cost_us or 0) > WORTH_TELLING * step_us][:2]


def what_to_do(summary: Summary) -> str:
    """What the regime usually means: the first two patterns speak of it."""
    overhead, busy = PATTERNS[:2]
    means = {"overhead": overhead.means, **dict.fromkeys(("compute", "memory", "gpu"), busy.means)}
    return means.get(summary.waits_for, "")


def reveals(summary: Summary) -> list[str]:
    """What a trace shows most, a line each: the patterns that cost it most, else one that says something of it."""
    shown = found(summary)
    most = costliest(summary, shown) or [one for one in shown if one[0].telling][:1]
    return [f"{pattern.see}: {verdict.evidence}" for pattern, verdict in most]


def markdown() -> str:
    """The whole cheatsheet, as docs/cheatsheet.md holds it."""
    lines = ["| where | what you see | what it usually means |", "|---|---|---|"]
    lines += [f"| {one.where} | {one.see} | {one.means} |" for one in PATTERNS]
    return "\n".join(lines)
