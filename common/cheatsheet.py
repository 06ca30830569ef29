"""Patterns: what you see in a trace, what it usually means, and how to find it.

Each threshold carries the measurement that it came from. A pattern that costs nothing measurable
is not found. README's cheatsheet is made from PATTERNS, by markdown().
"""

import itertools
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from statistics import mean, median

from common import kernel_names, reading
from common.trace import Trace


@dataclass(frozen=True)
class Pattern:
    """find: the figure that a trace shows it by, or None where the trace does not show it."""

    where: str
    see: str
    means: str
    find: Callable[[Trace], str | None]


def _overhead_bound(trace):
    found = reading.regime(trace)
    return f"the GPU is busy {found.share:.0%} of the window" if found.name == "overhead-bound" else None


def _compute_bound(trace):
    found = reading.regime(trace)
    return f"the GPU is busy {found.share:.0%} of the window" if found.name == "compute-bound" else None


def _hotspot(trace):
    total = Counter()
    for row in reading.work_rows(trace):
        total[row.work.name] += row.us
    if len(total) < 2:
        return None
    name, us = total.most_common(1)[0]
    share = us / total.total() if total.total() else 0
    return f"{kernel_names.short(name)}: {share:.0%} of a step's GPU time" if share > 0.5 else None


def _many_calls(trace):
    # The busiest op of the rungs' MLP runs 9 times a step and is no bottleneck.
    name, calls = max(reading.op_counts(trace).items(), key=lambda item: item[1], default=("", 0))
    return f"{name}: {calls} calls a step" if calls > 30 else None


def _cost_in_children(trace):
    label = reading.label_of(reading.typical(trace))
    if label is None or not label.children or not label.dur:
        return None
    inside = sum(child.us for child in label.children)
    if inside <= label.us / 2:
        return None
    return f"{label.name}: {label.us:,.1f} µs in total, {label.us - inside:,.1f} of its own"


def _wide_first_step(trace):
    first = reading.step_facts(trace)[0]
    if first.ratio is None or not trace.has_steps:
        return None
    return f"{first.step.us:,.1f} µs, {first.ratio:,.1f} times the median" + (f": {first.cause}" if first.cause else "")


def _label_gap(trace):
    # 3 to 6 µs are the record_function itself on the H200's machine.
    facts = reading.step_facts(trace)
    gaps = [one.gap_us for one in facts if one.gap_us is not None]
    if len(gaps) < 2 or facts[0].gap_us is None or facts[0].gap_us - median(gaps[1:]) < 5:
        return None
    return f"{facts[0].gap_us:,.1f} µs in the first step, {median(gaps[1:]):,.1f} in the others"


def _occupancy_query(trace):
    asked = sorted({kernel_names.short(row.work.name) for row in reading.work_rows(trace) if row.queries})
    return f"before {', '.join(asked)}" if asked else None


def _final_sync(trace):
    sync = reading.final_sync(trace)
    busy = reading.regime(trace).busy_us
    # The shortest one seen on the H200 took 8.5 µs: the call itself.
    return f"{sync.us:,.1f} µs, over {busy:,.1f} µs of GPU work" if sync is not None and sync.us > 20 else None


def _buffer_request(trace):
    requests = reading.buffer_requests(trace)
    return f"{len(requests)}, {sum(one.us for one in requests):,.0f} µs in all" if requests else None


def _module_loading(trace):
    loads = [one for one in trace.overheads if "Loading" in one.name]
    return f"{len(loads)} loads, {sum(one.us for one in loads):,.0f} µs" if loads else None


def _queued(trace):
    # A launch reaches an idle GPU in 5 to 15 µs on the H200.
    waits = [one.offset_us for one in reading.step_facts(trace) if one.offset_us is not None]
    return f"up to {max(waits):,.0f} µs from launch to start" if waits and max(waits) > 30 else None


def _gaps(trace):
    step = reading.typical(trace)
    span, busy = reading.span_us(step.work), reading.busy_us(step.work)
    # Back-to-back kernels of one stream stand 1 to 2 µs apart.
    if len(step.work) < 2 or span - busy < 3 * len(step.work):
        return None
    return f"{span - busy:,.1f} of the {span:,.1f} µs from the first kernel's start to the last one's end"


def _varying(trace):
    widest = max(
        (row for row in reading.work_rows(trace) if row.steps > 2 and row.us >= 5 and row.low_us),
        key=lambda row: row.high_us / row.low_us,
        default=None,
    )
    # On the H200 most kernels stay within 3%, and the second of two equal GEMMs varies by 9.
    if widest is None or widest.high_us < 1.05 * widest.low_us:
        return None
    times = reading.kernel_us(trace, widest.work.name)
    return (
        f"{kernel_names.short(widest.work.name)}: {min(times):,.1f} to {max(times):,.1f} µs, "
        f"median {median(times):,.1f}, mean {mean(times):,.1f}"
    )


def _bias_copy(trace):
    rows = [row for row in reading.work_rows(trace) if row.work.kind != "memset"]
    for copy, after in itertools.pairwise(rows):
        if copy.says.family == "copy" and after.says.family == "GEMM" and copy.us >= 1:
            return f"{copy.us:.1f} µs before {kernel_names.short(after.work.name)}"
    return None


def _views(trace):
    if not trace.work:
        return None
    counts = Counter(
        op.name for op in reading.typical(trace).walk() if op.name in reading.VIEWS and reading.launches_nothing(op)
    )
    return f"{counts.total()} calls a step: {', '.join(sorted(counts)[:6])}" if counts else None


def _resolution(trace):
    for op in reading.typical(trace).walk():
        if op.name in ("aten::matmul", "aten::linear"):
            target = next((below.name for below in op.walk() if below.name in reading.MATMULS), None)
            if target:
                return f"{op.name} ends in {target}"
    return None


def _epilogue(trace):
    for row in reading.work_rows(trace):
        if row.asked_by == "aten::addmm" and row.says.family == "GEMM" and "aten::add" not in reading.op_counts(trace):
            return kernel_names.short(row.work.name, 60)
    return None


def _dynamo(trace):
    step = reading.typical(trace)

    def total(start: str) -> float:
        return sum(op.us for op in step.walk() if op.name.startswith(start))

    lookup = total("TorchDynamo Cache Lookup")
    # The region less the graph that it calls: what torch.compile itself takes on the way there.
    around = lookup + total("Torch-Compiled Region") - total("## Call CompiledFxGraph")
    return f"{around:,.1f} of the step's {step.us:,.1f} µs, around the compiled graph" if lookup else None


def _graphs(trace):
    seen = reading.graph_hashes(trace)
    return f"{len(seen)} in {len(trace.steps)} steps" if seen else None


def _recompiled(trace):
    regions = {
        match[0] for step in trace.steps for op in step.walk()
        if (match := re.search(r"Torch-Compiled Region: (\d+)/[1-9]\d*", op.name))
    }  # fmt: skip
    return ", ".join(sorted(regions)) or None


def _fused(trace):
    rows = [row for row in reading.work_rows(trace) if "fuses" in row.says.parts and row.says.parts["fuses"].count(",")]
    return f"{kernel_names.short(rows[0].work.name, 60)}, {rows[0].us:.1f} µs" if rows else None


def _graph_replay(trace):
    rows = [row for row in reading.work_rows(trace) if "GraphLaunch" in row.launched_by]
    return f"{len(rows)} pieces of GPU work from one launch" if rows else None


def _graph_copies(trace):
    rows = reading.work_rows(trace)
    copies = [row for row in rows if row.asked_by == "aten::_foreach_copy_"]
    if not copies or not any("GraphLaunch" in row.launched_by for row in rows):
        return None
    us = sum(row.us for row in copies)
    return f"{us:,.1f} of {sum(row.us for row in rows):,.1f} µs of GPU work a step"


def _double_label(trace):
    label = reading.label_of(reading.typical(trace))
    step = reading.typical(trace)
    span, busy = reading.span_us(step.work), reading.busy_us(step.work)
    if label is None or not busy or span < 1.2 * busy:
        return None
    return f"{label.name}: a span of {span:,.1f} µs over {busy:,.1f} µs of work"


TABLE, CPU, GPU, CHAIN, COMPILE = "profiler table", "CPU lane", "GPU lane", "dispatch chain", "torch.compile"

PATTERNS = (
    Pattern(TABLE, "the CPU's self total far above the GPU's", "Overhead-bound: the GPU waits for the CPU to launch. "
            "Give each launch more to do (larger or batched work), or fuse launches.", _overhead_bound),
    Pattern(TABLE, "the two self totals of one size", "Compute-bound: the GPU is what you wait for, as it should be. "
            "Only less or faster GPU work helps now.", _compute_bound),
    Pattern(TABLE, "one row holds most of the GPU's time", "The hotspot: start there.", _hotspot),
    Pattern(TABLE, "a row with very many calls", "Cheap calls add up: can they be batched or fused?", _many_calls),
    Pattern(TABLE, "a row's total far above its self time", "The cost is in what it calls: look inside it, not at it.",
            _cost_in_children),
    Pattern(TABLE, "the label twice, with a percentage over 100", "The second row is the label's span on the GPU, idle "
            "gaps included. Read kernels, not that row.", _double_label),
    Pattern(CPU, "the first step much wider than the others", "First-use cost: loading modules, choosing kernels, "
            "cold caches. Warm up before the profiler starts.", _wide_first_step),
    Pattern(CPU, "a gap between the label's start and the first op in it", "The same cost, before the first dispatch.",
            _label_gap),
    Pattern(CPU, "an occupancy query before a launch", "A heavy kernel whose launch is fitted to the chip: a GEMM, "
            "mostly. Pointwise kernels launch without.", _occupancy_query),
    Pattern(CPU, "a long cudaDeviceSynchronize after the last step", "The profiler waits for the GPU to finish, then "
            "collects its records: long after little GPU work, it shows idleness; after much, only the queue.",
            _final_sync),
    Pattern(CPU, "module or function loading", "CUDA loads code when it is first used: part of a cold start.",
            _module_loading),
    Pattern(GPU, "an Activity Buffer Request", "The profiler's own cost, once: it allocates room for GPU records. Not "
            "your program's.", _buffer_request),
    Pattern(GPU, "kernels start long after their launch", "They queue behind earlier work: the CPU runs ahead, and "
            "the GPU is never starved.", _queued),
    Pattern(GPU, "gaps between the kernels of one step", "The GPU waits for the next launch: each gap is CPU time.",
            _gaps),
    Pattern(GPU, "one kernel with different times on the same data", "Clocks, heat, neighbours. Trust the median, "
            "not the mean.", _varying),
    Pattern(GPU, "a device-to-device copy before a GEMM", "addmm puts the bias into the output first, and the GEMM "
            "adds to it (beta = 1): no kernel was saved.", _bias_copy),
    Pattern(CHAIN, "matmul or linear ending in mm, addmm or bmm", "The dispatcher's choice by the inputs' shapes; the "
            "last name is the one that launches.", _resolution),
    Pattern(CHAIN, "t, view, reshape, … with no GPU work", "They rewrite shape and strides on the CPU; no data moves.",
            _views),
    Pattern(CHAIN, "addmm and no add", "The GEMM's epilogue adds the bias as it writes the result.", _epilogue),
    Pattern(COMPILE, "TorchDynamo Cache Lookup in every step", "Guards are checked in each call. For one or two ops "
            "this costs more CPU time than it saves.", _dynamo),
    Pattern(COMPILE, "the same graph hash in all steps", "The compiled graph is reused: cache hits.", _graphs),
    Pattern(COMPILE, "Torch-Compiled Region n/1 or higher", "Compiled again: shapes, types or strides changed. Look at "
            "the first call's time, too.", _recompiled),
    Pattern(COMPILE, "a triton_poi_fused_… kernel", "Several pointwise ops in one pass: what lay between them never "
            "went through memory.", _fused),
    Pattern(COMPILE, "cudaGraphLaunch", "reduce-overhead: one launch replays recorded work.", _graph_replay),
    Pattern(COMPILE, "copies before a cudaGraphLaunch", "A graph reads fixed addresses, so inputs are copied in. "
            "Large inputs can cost more than the launches saved.", _graph_copies),
)  # fmt: skip


def found(trace: Trace) -> list[tuple[Pattern, str]]:
    """The patterns that a trace shows, each with its figure."""
    return [(pattern, figure) for pattern in PATTERNS if (figure := pattern.find(trace))]


def markdown() -> str:
    """The whole cheatsheet, as README holds it."""
    lines = ["| where | what you see | what it usually means |", "|---|---|---|"]
    lines += [f"| {one.where} | {one.see} | {one.means} |" for one in PATTERNS]
    return "\n".join(lines)
