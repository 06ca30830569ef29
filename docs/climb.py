"""The decoder's climbs: one run after the other, each with what its report says to try first.

docs/make.py makes the tables of docs/05_llm.md from this list and the reference traces.
"""

from dataclasses import dataclass
from pathlib import Path

from tracereader.changes.catalogue import opportunities
from tracereader.figures import Summary, summarize
from tracereader.findings.steps import regime
from tracereader.replay import Refused
from tracereader.trace import Trace, read

FOLDER = Path(__file__).resolve().parent.parent / "traces/reference/nvidia-h200/05_llm"


@dataclass(frozen=True)
class Row:
    """flags: of the run; trace: its reference."""

    flags: str
    trace: str


CLIMBS = {
    "climb-decode": (
        Row("", "1x512_bf16_warm_eager_active2_shapes"),
        Row("--graph", "1x512_bf16_warm_eager_graph"),
        Row("--compile", "1x512_bf16_warm_compile"),
        Row("--compile reduce-overhead", "1x512_bf16_warm_compile_reduce-overhead"),
        Row("… --attention gqa", "1x512_bf16_warm_compile_gqa_reduce-overhead"),
        Row("--compile max-autotune --attention gqa --tune", "1x512_bf16_warm_compile_gqa_tune_max-autotune"),
        Row("--compile max-autotune-no-cudagraphs --attention gqa --tune --graph",
            "1x512_bf16_warm_compile_gqa_tune_graph_max-autotune-no-cudagraphs"),
        Row("… --merge", "1x512_bf16_warm_compile_gqa_merge_tune_graph_max-autotune-no-cudagraphs"),
        Row("--triton overlap", "1x512_bf16_warm_eager_triton-overlap_active2"),
        Row("--triton --graph", "1x512_bf16_warm_eager_triton-kernels_graph"),
        Row("--triton overlap --graph", "1x512_bf16_warm_eager_triton-overlap_graph"),
        Row("--persistent", "1x512_bf16_warm_eager_persistent-kernel"),
        Row("--persistent inside", "1x512_bf16_warm_eager_persistent-inside"),
    ),
    "climb-batch": (
        Row("--batch 32", "32x512_bf16_warm_eager_active1"),
        Row("--batch 32 --graph", "32x512_bf16_warm_eager_graph"),
        Row("--batch 32 --compile reduce-overhead --attention gqa", "32x512_bf16_warm_compile_gqa_reduce-overhead"),
    ),
    "climb-prefill": (
        Row("--phase prefill", "1x512_bf16_warm_eager_prefill_active2"),
        Row("… --cache dynamic --logits last --graph", "1x512_bf16_warm_eager_prefill_dynamic_last_graph"),
        Row("… --cache dynamic --logits last --compile", "1x512_bf16_warm_compile_prefill_dynamic_last"),
    ),
}  # fmt: skip

HEADS = (
    "`05_llm.py --warmup …`", "tokens a second, profiled", "by the GPU's work alone", "launches", "GPU activities",
    "share of the limit", "what its report says to try first",
)  # fmt: skip


def table(name: str) -> str:
    """One climb as a table in Markdown."""
    lines = ["| " + " | ".join(HEADS) + " |", "|---" * len(HEADS) + "|"]
    for row in CLIMBS[name]:
        file = FOLDER / f"{row.trace}.json.gz"
        trace = read(file)
        summary = summarize(trace)
        found, step = summary.llm.decoding, summary.chosen
        share = f"{found.least_us / found.step_us:.0%}" if found.least_us and found.facts.phase == "decode" else "–"
        cells = (
            f"`{row.flags}`" if row.flags else "(eager)",
            f"{found.tokens_s:,.0f}",
            f"{found.facts.tokens / summary.gpu_us * 1e6:,.0f}",
            f"{step.launches:,}",
            f"{len(summary.gpu_work):,}",
            share,
            _said(trace, summary),
        )
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _said(trace: Trace, summary: Summary) -> str:
    """The first opportunity of a report with the times that the report's table has; the regime where there is none."""
    found = opportunities(trace, summary)
    if isinstance(found, Refused) or not found:
        return "nothing; " + regime(summary)
    first = found[0]
    about = "about " * (first.basis == "bound")
    before, after = first.times_us
    return f"{first.title}: {before / 1e3:.2f} -> {after / 1e3:.2f} ms, {about}{first.share:.0%}"
