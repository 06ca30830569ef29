"""Predicted against measured: what a report proposes, and the step that was recorded after that change.

docs/make.py makes the tables of docs/opportunities.md of this, from the reference traces and docs/recordings.json.
"""

import json
import re
import statistics
from collections import defaultdict
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from tracereader.changes import (
    catalogue,
)
from tracereader.changes import ranks as rank_changes
from tracereader.changes.catalogue import CHANGES, opportunities
from tracereader.changes.opportunity import Opportunity
from tracereader.command import DEFAULT_LIMIT
from tracereader.figures import summarize
from tracereader.findings.finding import in_one_unit
from tracereader.replay import Refused
from tracereader.show.ranks import opened
from tracereader.show.view import View
from tracereader.trace import read
from tracereader.two_runs import compare

ROOT = Path(__file__).resolve().parent.parent
REFERENCE = ROOT / "traces/reference"
CHANGED = "nvidia-h200/changes"
TRAINING = "../nvidia-h200-x2/06_training/4x1024x1024x16_bf16_warm_"  # beside the other rungs' folder
NAIVE = "04_a_naive_attention/8x16x1024x64_bf16_warm_eager_shapes"
SDPA = "04_c_sdpa_attention/8x16x1024x64_bf16_warm_eager"
# A prediction outside of this share of the measured step is off, and the page says why.
WITHIN = (0.7, 1.3)
# A share of the step. A saving that was promised so much too large or too small is off, too.
MISSED = 0.2

# Steps before and after a change, of the recorded pairs and of the ladder's climbs.
PAIRS = (
    *((f"{CHANGED}/{before}", f"{CHANGED}/{after}") for before, after in (
        ("vit/eager", "vit/graph"), ("vit/eager", "vit/compile"), ("decode/eager", "decode/graph"),
        ("decode/eager", "decode/batch32"), ("pointwise/eager", "pointwise/compile"),
        ("products/eager", "products/compile"), ("encoder/fp32", "encoder/tf32"), ("encoder/fp32", "encoder/bf16"),
        ("encoder/tf32", "encoder/bf16"),
        ("encoder/bf16", "encoder/bf16_compile"), ("resnet/fp32", "resnet/tf32"),
        ("resnet/fp32", "resnet/bf16_channels_last"), ("conv_layout/contiguous", "conv_layout/channels_last"),
        ("attention/naive", "attention/sdpa"), ("gpt2/eager_attention", "gpt2/sdpa"), ("gpt2/sdpa", "gpt2/padded"),
        ("gpt2/recompute", "gpt2/sdpa"), ("copies/blocking", "copies/prefetched"), ("loader/inline", "loader/workers"),
        ("optimizer/forloop", "optimizer/fused"), ("optimizer/foreach", "optimizer/fused"),
        ("python/loop", "python/ahead"), ("small/loop", "small/batched"), ("syncs/item", "syncs/none"),
        ("syncs/end", "syncs/none"), ("attention32/naive", "attention32/sdpa"), ("bert/eager", "bert/graph"),
        ("convnet/forloop", "convnet/fused"), ("experts/loop", "experts/batched"), ("images/eager", "images/graph"),
        ("images/eager", "images/compile"), ("llama/eager_attention", "llama/sdpa"), ("llama/sdpa", "llama/compile"),
        ("lstm/cells", "lstm/graph"), ("lstm/cells", "lstm/cudnn"), ("odd_width/odd", "odd_width/padded"),
        ("pinned/same_stream", "pinned/prefetched"), ("selection/chosen", "selection/multiplied"),
        ("trained/eager", "trained/compile"), ("unet/contiguous", "unet/channels_last"),
        ("unet/contiguous", "unet/compile"), ("autocast/each_step", "autocast/cast_once"),
        ("guards/compile", "guards/compile_skipped"),
        ("convnet/fused", "convnet/graph"),
        ("lengths/cudnn", "lengths/flash"), ("lengths/flash", "lengths/static"), ("lengths/cudnn", "lengths/static"),
        ("batch_norm/eager", "batch_norm/compile"), ("batch_norm/eager", "batch_norm/graph"),
        ("augmented/main_process", "augmented/workers"),
    )),
    *((f"nvidia-h200/{before}", f"nvidia-h200/{after}") for before, after in (
        ("01_matmul_add/4096_bf16_warm_eager", "01_matmul_add/4096_bf16_warm_compile"),
        ("01_matmul_add/64_bf16_warm_eager_pause10", "01_matmul_add/64_bf16_warm_eager"),
        ("02_linear/1024x32x64_bf16_warm_eager", "02_linear/1024x32x64_bf16_warm_compile"),
        ("03_simple_mlp/64x128x768x3072_bf16_warm_eager", "03_simple_mlp/64x128x768x3072_bf16_warm_compile"),
        (NAIVE, "04_a_naive_attention/8x16x1024x64_bf16_warm_compile"),
        (NAIVE, "04_b_inplace_ops_attention/8x16x1024x64_bf16_warm_eager"),
        *((NAIVE, f"{SDPA}_{backend}") for backend in ("efficient", "flash_shapes", "cudnn_shapes")),
        ("05_llm/1x512_bf16_warm_eager_active2_shapes", "05_llm/1x512_bf16_warm_eager_graph"),
        ("05_llm/1x512_bf16_warm_eager_active2_shapes", "05_llm/1x512_bf16_warm_compile_reduce-overhead"),
        ("05_llm/1x512_bf16_warm_eager_graph", "05_llm/1x512_bf16_warm_compile_reduce-overhead"),
        ("05_llm/1x512_bf16_warm_compile", "05_llm/1x512_bf16_warm_compile_reduce-overhead"),
        ("05_llm/1x512_bf16_warm_compile_reduce-overhead", "05_llm/1x512_bf16_warm_compile_gqa_reduce-overhead"),
        ("05_llm/1x512_bf16_warm_eager_triton-overlap_active2", "05_llm/1x512_bf16_warm_eager_triton-overlap_graph"),
        ("05_llm/32x512_bf16_warm_eager_active1", "05_llm/32x512_bf16_warm_eager_graph"),
        ("05_llm/32x512_bf16_warm_eager_graph", "05_llm/32x512_bf16_warm_compile_gqa_reduce-overhead"),
    )),
    *((f"nvidia-h200/{TRAINING}{before}", f"nvidia-h200/{TRAINING}{after}") for before, after in (
        ("eager", "compile"), ("eager_forloop", "eager_fused"), ("eager", "eager_fused"), ("eager_checkpoint", "eager"),
        ("eager_loader2_workers0", "eager"),
    )),
)  # fmt: skip

# The same of programs that use no GPU.
CPU_ONLY = "../../tests/traces/cpu"
CPU_ONLY_PAIRS = tuple(
    (f"{CPU_ONLY}/{before}", f"{CPU_ONLY}/{after}")
    for before, after in (
        ("attention_naive", "attention_sdpa"), ("attention_trained_naive", "attention_trained_sdpa"),
        ("adamw_forloop", "adamw_fused"), ("anomaly_on", "anomaly_off"), ("mask_each_step", "mask_once"),
        ("loader_inline", "loader_worker"),
        *((f"float64/{name}", f"float64/{name}_without") for name in ("products", "stencil", "kernel")),
        *((f"indices/{name}", f"indices/{name}_without") for name in ("recurrence", "scan", "heads")),
    )
)  # fmt: skip

CHANGES_H200, LADDER = "nvidia-h200/changes/", "nvidia-h200/"
# Of the predictions that are off, what the two traces show.
WHY = {
    (f"{CHANGES_H200}{before}", f"{CHANGES_H200}{after}"): why for before, after, why in (
        ("small/loop", "small/batched",
         "the prediction keeps the CPU time of the Python around the loop."),
        ("experts/loop", "experts/batched",
         "the prediction keeps the CPU time of the Python around the loop."),
        ("unet/contiguous", "unet/channels_last",
         "the group normalizations read the contiguous layout: 24 copies of 3.2 ms in all are new. In this model, "
         "the change makes the step longer."),
        ("loader/inline", "loader/workers",
         "beside busy workers, the main process's ops take longer: `aten::_to_copy` 14.0 µs instead of 4.6."),
        ("syncs/item", "syncs/none",
         "the same ops take 1.2 to 1.9 times as long in the first recording."),
        ("autocast/each_step", "autocast/cast_once",
         "autocast also calls each `aten::linear` twice. The prediction removes only the casts."),
        *((f"lengths/{before}", "lengths/static",
           "attention gets a mask and the whole cache of 1,024 tokens, of which a tenth is filled.")
          for before in ("cudnn", "flash")),
        ("guards/compile", "guards/compile_skipped",
         "all calls are slower in the first recording, and the lookup falls by more than is assumed."),
    )
} | {
    (f"{LADDER}{before}", f"{LADDER}{after}"): why for before, after, why in (
        ("01_matmul_add/64_bf16_warm_eager_pause10", "01_matmul_add/64_bf16_warm_eager",
         "after a pause of 10 ms the CPU is slow."),
        (NAIVE, f"{SDPA}_flash_shapes",
         "the prediction keeps the CPU time of the views and the Python around the scores."),
        (f"{TRAINING}eager", f"{TRAINING}compile",
         "Inductor also fuses reductions with what they read."),
        ("05_llm/1x512_bf16_warm_eager_active2_shapes", "05_llm/1x512_bf16_warm_compile_reduce-overhead",
         "torch.compile also fuses 1,880 kernels to 565."),
        ("05_llm/1x512_bf16_warm_eager_graph", "05_llm/1x512_bf16_warm_compile_reduce-overhead",
         "the prediction keeps 995 of 1,880 kernels in the graph. The compiled graph has 565."),
        ("05_llm/1x512_bf16_warm_eager_triton-overlap_active2", "05_llm/1x512_bf16_warm_eager_triton-overlap_graph",
         "in the graph the kernels overlap by programmatic dependent launch, which the replay does not model."),
        ("05_llm/32x512_bf16_warm_eager_graph", "05_llm/32x512_bf16_warm_compile_gqa_reduce-overhead",
         "the second run also passes keys and values of fewer heads to attention: 9.7 ms of copies are gone."),
    )
}  # fmt: skip


ON_TWO = "tests/traces/h200-x2"
X4, X2 = "tests/traces/h200-x4", "traces/reference/nvidia-h200-x2/06_training/4x1024x1024x16_bf16_warm_eager"
# Runs of several ranks before and after a change, as patterns of their traces, and the change.
RANK_PAIRS = (
    (f"{X2}_ddp_slow1_x2_rank*", "balance_ranks", f"{X2}_ddp_x2_rank*"),
    (f"{X2}_ddp_bucket10000_x2_rank*", "", f"{X2}_ddp_x2_rank*"),  # no proposal stands for smaller buckets
    *((f"{ON_TWO}/{before}/*", change, f"{ON_TWO}/{after}/*") for before, change, after in (
        ("sharded_default", "keep_parameters", "sharded_keep"),
        ("accumulated_ddp_every", "reduce_once", "accumulated_ddp_once"),
        ("accumulated_fsdp_every", "reduce_once", "accumulated_fsdp_once"),
        ("accumulated_fsdp1_every", "reduce_once", "accumulated_fsdp1_once"),
        ("buffers_sent", "keep_buffers", "buffers_kept"),
        ("communicated_ddp_float32", "in_two_bytes", "communicated_ddp_bf16"),
        ("communicated_fsdp_float32", "in_two_bytes", "communicated_fsdp_bf16"),
    )),
    *((f"{X4}/{before}/*", change, f"{X4}/{after}/*") for before, change, after in (
        ("gradients_one_bucket", "", "gradients_buckets"),
        ("pipeline_few", "microbatches", "pipeline_many"), ("pipeline_uneven", "balance_stages", "pipeline_few"),
        ("experts_skewed", "balance_ranks", "experts_even"), ("launches_late", "balance_ranks", "launches_even"),
    )),
)  # fmt: skip


@cache
def _run(name: str) -> tuple[compare.Side, tuple[Opportunity, ...]]:
    trace = read(REFERENCE / f"{name}.json.gz")
    summary = summarize(trace)
    found = opportunities(trace, summary)
    return compare.Side(summary), () if isinstance(found, Refused) else found


def shown(name: str) -> str:
    """A trace as the table names it: its folder and the run."""
    if name.startswith(CPU_ONLY):
        return name.removeprefix(f"{CPU_ONLY}/")
    folder, _, run = name.removeprefix(f"{CHANGED}/").partition("/") if name.startswith(CHANGED) else ("", "", "")
    if run:
        return f"{folder}/{run}"
    *_, script, tag = name.split("/")
    return f"{script[:4].rstrip('_') if script.startswith('04') else script[:2]}/{tag}"


def changes() -> str:
    """What a report proposes: each change, and the first thing that it assumes. Its declaration has the rest."""
    lines = ["| id in `--json` | change, and what it assumes first |", "|---|---|"]
    lines += [f"| `{one.name}` | {one.title} ({_first(one.assumes)}) |" for one in CHANGES]
    return "\n".join(lines) + "\n"


def _first(assumed: str) -> str:
    """Return the first of the things that a change assumes, without what stands in parentheses."""
    first = re.sub(r" \([^)]*\)", "", assumed).partition("; ")[0]
    return first if len(first.split()) <= 12 else first.partition(", ")[0]


def cpu_only_changes() -> str:
    """The changes that are also proposed for a program that uses no GPU, and their pairs' ratios."""
    ratios, _ = _ratios(CPU_ONLY_PAIRS)
    lines = ["| id in `--json` | predicted / measured step |", "|---|---|"]
    lines += [f"| `{one.name}` | {_range([ratio for ratio, _ in ratios[one.name]])} |" for one in CHANGES if one.on_cpu]
    return "\n".join(lines) + "\n"


def predictions() -> str:
    """Each change over its pairs, and the reasons of the predictions that are off by more than WITHIN."""
    ratios, off = _ratios(PAIRS)
    lines = ["| change | pairs | predicted / measured step | without the profiler |", "|---|---|---|---|"]
    for change in sorted(ratios, key=lambda change: (-len(ratios[change]), change)):
        recorded, unprofiled = zip(*ratios[change], strict=True)
        if len(recorded) > 1:
            kept = [ratio for ratio in unprofiled if ratio]
            lines.append(f"| `{change}` | {len(recorded)} | {_range(recorded)} | {_range(kept)} |")
    alone = ", ".join(f"`{change}` {ratios[change][0][0]:.2f}" for change in sorted(ratios) if len(ratios[change]) == 1)
    lines += ["", f"Changes with one pair, recorded steps: {alone}."]
    reasons = [f"- {'; '.join(pairs)}: {why}" for why, pairs in off.items()]
    return "\n".join([*lines, "", "Where a prediction is off by more than 30%:", "", *reasons]) + "\n"


def _ratios(pairs: Sequence[tuple[str, str]]) -> tuple[dict[str, list], dict[str, list[str]]]:
    """Return the predicted step divided by the measured one, and the reasons of the predictions that are off.

    Of each change there is a list with the ratio of each pair, recorded and without the profiler; None where a run did
    not measure its step so. Of each reason there is a list of pairs, as the page names them.
    """
    ratios, off = defaultdict(list), defaultdict(list)
    for before, after in pairs:
        side, proposed = _run(before)
        summary = _run(after)[0].summary
        found = catalogue.checked(side, proposed, _run(after)[0])
        if found is None or len(found.proposals) != 1:
            continue
        (one,) = found.proposals
        ratio = one.step_us_after / summary.recorded_step_us
        measured, predicted = summary.unprofiled_step_us, one.unprofiled_step_us_after
        ratios[one.change].append((ratio, predicted / measured if predicted is not None and measured else None))
        if not WITHIN[0] <= ratio <= WITHIN[1]:
            why = WHY.get((before, after), "no reason is known yet.")
            off[why].append(f"{shown(before)} → {shown(after)} ({ratio:.2f})")
    return ratios, off


def _range(ratios: Sequence[float]) -> str:
    """Return up to two ratios, or the lowest, the median and the highest of more."""
    if len(ratios) > 2:
        low, middle, high = min(ratios), statistics.median(ratios), max(ratios)
        return f"{low:.2f} to {high:.2f}, median {middle:.2f}"
    return ", ".join(f"{ratio:.2f}" for ratio in sorted(ratios)) or "–"


def recordings() -> str:
    """The recordings of docs/recordings.json whose promised saving is off by more than MISSED, for a known reason."""
    lines = ["| program | change | promised, ms | measured, ms | what it shows |", "|---|---|---|---|---|"]
    for one in json.loads((ROOT / "docs/recordings.json").read_text()):
        before, after = one.get("unprofiled_ms") or (one["recorded_ms"], one["recorded_after_ms"])
        if not one["taught"] or "predicted_ms" not in one or isinstance(after, list):
            continue
        if abs(one["predicted_ms"] / one["recorded_ms"] - after / before) > MISSED:
            promised = f"{one['recorded_ms']:g} to {one['predicted_ms']:g}"
            cells = (one["program"], f"`{one['change']}`", promised, f"{before:g} to {after:g}", one["taught"])
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def rank_predictions() -> str:
    """Every pair of runs of several ranks: the step, the predicted one and the measured one."""
    lines = ["| before → after | proposed | step | predicted | measured | ratio |", "|---|---|---|---|---|---|"]
    for before, change, after in RANK_PAIRS:
        summary, _ = opened(_traces(before), View())
        proposed = {one.change: one for one in rank_changes.opportunities(summary, DEFAULT_LIMIT)}
        now = _slowest_us(after)
        names = [_ranks_in(pattern) for pattern in (before, after)]
        if (one := proposed.get(change)) is None:
            unit, (recorded, measured) = in_one_unit((_slowest_us(before), now))
            lines.append(f"| {' → '.join(names)} | – | {recorded} {unit} | – | {measured} {unit} | – |")
            continue
        step, predicted = one.times_us
        unit, cells = in_one_unit((step, predicted, now))
        basis = " (bound)" * (one.basis == "bound")
        lines.append(
            f"| {' → '.join(names)} | `{change}`{basis} | {' | '.join(f'{us} {unit}' for us in cells)} | "
            f"{predicted / now:.2f} |"
        )
    return "\n".join(lines) + "\n"


def _slowest_us(pattern: str) -> float:
    """Return the step of the slowest rank, for which the others wait; without the profiler if that was measured."""
    summaries = (summarize(read(path)) for path in _traces(pattern))
    return max(one.unprofiled_step_us or one.recorded_step_us for one in summaries)


def _traces(pattern: str) -> list[Path]:
    return sorted(ROOT.glob(f"{pattern}.json.gz"))


def _ranks_in(pattern: str) -> str:
    """Return a run of several ranks as the table names it."""
    if pattern.startswith((X4, ON_TWO)):
        return f"{pattern.split('/')[-2].replace('_', '/', 1)} ({4 if pattern.startswith(X4) else 2})"
    return f"{pattern.removeprefix(f'{X2}_').removesuffix('_x2_rank*')} (2)"
