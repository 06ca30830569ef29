"""The decoder's climbs: one run after the other, each with the line of its report that names the next change.

docs/make.py makes the tables of docs/05_llm.md from this list and the reference traces.
"""

import contextlib
import io
import re
from dataclasses import dataclass
from pathlib import Path

from tracereader import cli
from tracereader.figures import summarize
from tracereader.findings import decoding, ops
from tracereader.trace import read

FOLDER = Path(__file__).resolve().parent.parent / "traces/reference/nvidia-h200/05_llm"


@dataclass(frozen=True)
class Row:
    """flags: of the run; trace: its reference; names: an expression for the line of its report that names the change
    which the next row makes."""

    flags: str
    trace: str
    names: str


OVERHEAD = r"in short +overhead-bound.*"
IDLE, EXPANDED, LOOKUP = (
    rf"{re.escape(one.see)}: .*"
    for one in (decoding.graph_would_do, decoding.expanded_keys, ops.cache_lookup_in_every_step)
)
FAMILIES = r"of the GPU's busy time: .*"
ROOF = r"its roof is .*"

CLIMBS = {
    "climb-decode": (
        Row("", "1x512_bf16_warm_eager_active2_shapes", IDLE),
        Row("--graph", "1x512_bf16_warm_eager_graph", FAMILIES),
        Row("--compile", "1x512_bf16_warm_compile", IDLE),
        Row("--compile reduce-overhead", "1x512_bf16_warm_compile_reduce-overhead", EXPANDED),
        Row("… --attention gqa", "1x512_bf16_warm_compile_gqa_reduce-overhead", FAMILIES),
        Row("--compile max-autotune --attention gqa --tune", "1x512_bf16_warm_compile_gqa_tune_max-autotune",
            LOOKUP),
        Row("--compile max-autotune-no-cudagraphs --attention gqa --tune --graph",
            "1x512_bf16_warm_compile_gqa_tune_graph_max-autotune-no-cudagraphs", FAMILIES),
        Row("… --merge", "1x512_bf16_warm_compile_gqa_merge_tune_graph_max-autotune-no-cudagraphs", FAMILIES),
        Row("--triton overlap", "1x512_bf16_warm_eager_triton-overlap_active2", OVERHEAD),
        Row("--triton --graph", "1x512_bf16_warm_eager_triton-kernels_graph", ROOF),
        Row("--triton overlap --graph", "1x512_bf16_warm_eager_triton-overlap_graph", ROOF),
    ),
    "climb-tried": (
        Row("--compile reduce-overhead --attention gqa", "1x512_bf16_warm_compile_gqa_reduce-overhead", FAMILIES),
        Row("… --merge", "1x512_bf16_warm_compile_gqa_merge_reduce-overhead", FAMILIES),
        Row("--compile reduce-overhead --attention flex", "1x512_bf16_warm_compile_flex_reduce-overhead",
            LOOKUP),
    ),
    "climb-batch": (
        Row("--batch 32", "32x512_bf16_warm_eager_active1", OVERHEAD),
        Row("--batch 32 --graph", "32x512_bf16_warm_eager_graph", FAMILIES),
        Row("--batch 32 --compile reduce-overhead --attention gqa", "32x512_bf16_warm_compile_gqa_reduce-overhead",
            FAMILIES),
    ),
    "climb-prefill": (
        Row("--phase prefill", "1x512_bf16_warm_eager_prefill_active2", OVERHEAD),
        Row("… --cache dynamic --logits last --graph", "1x512_bf16_warm_eager_prefill_dynamic_last_graph", FAMILIES),
        Row("… --cache dynamic --logits last --compile", "1x512_bf16_warm_compile_prefill_dynamic_last", IDLE),
    ),
}  # fmt: skip

HEADS = (
    "`05_llm.py --warmup …`", "tokens a second, profiled", "by the GPU's work alone", "launches", "GPU activities",
    "share of the limit", "what its report says",
)  # fmt: skip


def table(name: str) -> str:
    """One climb as a table in Markdown. Raises SystemExit where a report no longer says what a row quotes."""
    lines = ["| " + " | ".join(HEADS) + " |", "|---" * len(HEADS) + "|"]
    for row in CLIMBS[name]:
        file = FOLDER / f"{row.trace}.json.gz"
        summary = summarize(read(file))
        found, step = summary.llm.decoding, summary.chosen
        share = f"{found.least_us / found.step_us:.0%}" if found.least_us and found.facts.phase == "decode" else "–"
        cells = (
            f"`{row.flags}`" if row.flags else "(eager)",
            f"{found.tokens_s:,.0f}",
            f"{found.facts.tokens / summary.gpu_us * 1e6:,.0f}",
            f"{step.launches:,}",
            f"{len(summary.gpu_work):,}",
            share,
            _said(file, row.names),
        )
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _said(file: Path, wanted: str) -> str:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        cli.main([str(file), "--only", "short"])
    found = [line.strip() for line in printed.getvalue().splitlines() if re.fullmatch(wanted, line.strip())]
    if len(found) != 1:
        raise SystemExit(f"docs/climb.py: the report of {file.name} has {len(found)} lines {wanted!r}")
    return re.sub(r"^in short +", "", found[0]).replace("|", "\\|")
