"""Judge what each tool advises by what was measured, and write the page README.md from the committed data.

The rules are applied to all tools alike. An advice is a text; MEANT says which measured changes it means. An advice is
right if one of the changes that it means saved PROMISED of the step or more, and false if some were measured and none
saved KEPT. Between the two it is neither.
"""

import json
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import msgspec

HERE = Path(__file__).resolve().parent
PAIRS = HERE.parent / "pairs"
sys.path[:0] = [str(HERE.parent.parent), str(HERE.parent)]

from pairs.record import step_us  # noqa: E402
from scoreboard import KEPT, PROMISED  # noqa: E402

GUIDE = "tuning guide"
LARGER = ("double_batch", "larger_batch")  # a larger batch, and a loop over samples computed as one batch
PER_SAMPLE = ("batches_kept", "windows_ahead")  # the samples are prepared once, and not in each step

# What a text means: a phrase of it, and the ids of the changes. The ids are those of read-trace's proposals; a change
# for which read-trace has no proposal has the name of its variant in benchmarks/pairs. Where a text is broad, all that
# it may mean is listed, in the tool's favour. Nothing is listed for advice that no measured change follows.
MEANT = {
    "gpu-idle": (
        ("Set num_workers=8 and pin_memory=True.", ("data_loader", "overlap_copies")),
        ("Worker processes are already in use", PER_SAMPLE),
        ("Reduce per-sample cost in the dataset", ("data_loader", "overlap_copies", *PER_SAMPLE)),
        ("Increase batch size until GPU memory is the limit", (*LARGER, "fuse_pointwise", "foreach", "cuda_graph")),
        ("Set pin_memory=True on the DataLoader", ("overlap_copies",)),
        ("Look for CPU work inside the training loop", ("remove_sync", "python")),
    ),
    "torch-tb-profiler": (
        ("You could try to set num_workers", ("data_loader",)),
        ("You could try to increase batch size", LARGER),
        ("You could enable Automatic Mixed Precision", ("half_precision",)),
        ("Device memory usage is at the limit", ()),
        ("use DistributedDataParallel instead of DataParallel", ()),
        ("Nccl backend is currently the fastest", ()),
        ("high time cost on communication", ()),
    ),
    "fournex": (
        ("Increase DataLoader workers", ("data_loader",)),
        ("Increase DataLoader prefetch factor", ("data_loader",)),  # needs workers
        ("Move CPU-heavy transforms off the critical path", PER_SAMPLE),
        ("Enable pinned memory", ("overlap_copies",)),
        ("Overlap H2D copies with compute", ("overlap_copies",)),
        ("Reduce host-to-device transfer volume", ("one_copy", "python", "batches_kept")),
        ("Remove .item() calls from the hot path", ("remove_sync",)),
        ("Batch and defer metric logging", ("remove_sync",)),
        ("Reduce explicit device synchronizations", ("remove_sync",)),
        ("Increase batch size to improve GPU occupancy", LARGER),
        ("Enable mixed precision", ("half_precision",)),
        ("Profile for small or fragmented kernel execution", ()),
        ("Enable torch.compile to reduce kernel launch overhead", ("fuse_pointwise", "cuda_graph")),
        ("Use CUDA Graphs", ("cuda_graph",)),
        ("Fuse small operations", ("fuse_pointwise", "foreach")),
        ("Bucket or pad inputs", ("trim_padding",)),
        ("Reduce dynamic shape overhead", ()),
        ("Reduce batch size or sequence length", ()),
        ("Enable gradient checkpointing", ()),
        ("Reduce allocation churn", ()),
        ("Verify telemetry collection hooks", ()),
        ("Enable profiler to collect", ()),
    ),
    # PyTorch's Performance Tuning Guide, section by section, as far as it concerns the GPU's time: the same for all.
    GUIDE: (
        ("Enable asynchronous data loading and augmentation", ("data_loader", "overlap_copies")),
        ("Disable gradient calculation for validation or inference", ("no_autograd",)),
        ("Fuse operations", ("fuse_pointwise",)),
        ("Enable channels_last memory format for computer vision models", ("channels_last",)),
        ("Enable Tensor cores (TF32)", ("tf32",)),
        ("Use CUDA Graphs", ("cuda_graph",)),
        ("Avoid unnecessary CPU-GPU synchronization", ("remove_sync",)),
        ("Use mixed precision and AMP", ("half_precision",)),
    ),
}
FOR = {
    "read-trace": "what limits a step of any PyTorch program, and what a change would save",
    "gpu-idle": "training loops with a DataLoader: one of four causes in a sentence, with thresholds from an A100",
    "torch-tb-profiler": "a view in TensorBoard to look at runs; its few recommendations are a by-product",
    "fournex": "recording a training run itself, with samples of nvidia-smi, which a trace alone lacks",
    "traceinsight": "HolisticTraceAnalysis: figures of distributed training for a person who knows what to do",
    GUIDE: "no tool: PyTorch's list of usual changes, given for every trace, as a baseline",
}


class Measured(msgspec.Struct, frozen=True):
    """A measured change: its id, the share of the step that it saved, and whether a rule was fitted to it."""

    change: str
    saved: float
    fitted: bool


class Judgement(msgspec.Struct, frozen=True):
    """What was measured of one advice: the variants that it means, the best first, and the largest saved share."""

    variants: tuple[str, ...]
    saved: float | None

    @property
    def is_right(self) -> bool:
        return self.saved is not None and self.saved >= PROMISED

    @property
    def is_false(self) -> bool:
        return self.saved is not None and self.saved < KEPT


def measured(rows: Mapping[str, dict]) -> dict[str, Measured]:
    """Return the measured changes of a program of benchmarks/pairs/results.json by the names of their variants."""
    base, found = step_us(rows["base"]), {}
    for variant, row in rows.items():
        us = step_us(row)
        if variant != "base" and us is not None:
            found[variant] = Measured(row["proposal"] or variant, 1 - us / base, bool(row.get("fitted")))
    return found


def meant(tool: str, advice: Mapping) -> tuple[str, ...]:
    """Return the ids of the changes that an advice means. Raise LookupError if MEANT does not say it exactly once."""
    if "change" in advice:  # read-trace's own
        return (advice["change"],)
    found = [changes for phrase, changes in MEANT[tool] if phrase in advice["says"]]
    if len(found) != 1:
        raise LookupError(f"{tool}: {len(found)} phrases match {advice['says']!r}")
    return found[0]


def judge(tool: str, advice: Mapping, rows: Mapping[str, dict]) -> Judgement:
    """Return what was measured of one advice about a program. rows: all of the program's variants."""
    ids, savings = meant(tool, advice), measured(rows)
    variants = [variant for variant, one in savings.items() if one.change in ids]
    variants.sort(key=lambda variant: -savings[variant].saved)
    return Judgement(tuple(variants), savings[variants[0]].saved if variants else None)


def advice_of(data: Mapping, tool: str, program: str) -> list[dict]:
    """Return the advice of a tool about a program, in its order. The tuning guide says the same about all."""
    if tool == GUIDE:
        return [{"says": phrase} for phrase, _ in MEANT[GUIDE]]
    return data["programs"][program][tool]["advice"]


COUNTED = ("programs", "advised", "with_saving", "right", "first", "first_of_measured")
COUNTED += ("advice", "judged", "right_advice", "false_advice")


def score(data: Mapping, pairs: Mapping, tool: str, programs: Iterable[str]) -> dict[str, int]:
    """Return how often a tool was right about some programs.

    with_saving: the programs with a measured saving of PROMISED or more. right: those of them for which some advice is
    right. first: those where the first advice means the largest saving. first_of_measured: the same without the advice
    of which nothing was measured. advice, judged, right_advice, false_advice: the numbers of single pieces of advice.
    """
    found = dict.fromkeys(COUNTED, 0)
    for program in programs:
        rows = pairs[program]
        judgements = [judge(tool, one, rows) for one in advice_of(data, tool, program)]
        known = [one for one in judgements if one.saved is not None]
        savings = measured(rows)
        best = max(savings, key=lambda variant: savings[variant].saved)
        found["programs"] += 1
        found["advised"] += bool(judgements)
        found["advice"] += len(judgements)
        found["judged"] += len(known)
        found["right_advice"] += sum(one.is_right for one in known)
        found["false_advice"] += sum(one.is_false for one in known)
        if savings[best].saved >= PROMISED:
            found["with_saving"] += 1
            found["right"] += any(one.is_right for one in known)
            found["first"] += best in (judgements[0].variants if judgements else ())
            found["first_of_measured"] += best in (known[0].variants if known else ())
    return found


def _table(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(str(cell) for cell in row)} |" for row in lines)


def _scores(data: Mapping, pairs: Mapping, tools: Sequence[str], programs: Sequence[str]) -> str:
    rows = []
    for tool in tools:
        one = score(data, pairs, tool, programs)
        if not one["advice"]:
            rows.append([tool, "figures, no advice", *["–"] * 5])
            continue
        advised = f"{one['advised']} of {one['programs']}"
        right = [f"{one[name]} of {one['with_saving']}" for name in ("right", "first", "first_of_measured")]
        advice = [f"{one[name]} of {one['judged']}" for name in ("right_advice", "false_advice")]
        rows.append([tool, advised, *right, *advice])
    heads = ("tool", "gives advice", "right", "best first", "best first of those measured")
    return _table((*heads, "advice right", "advice false"), rows)


COSTS = (("wall_s", 1), ("cpu_s", 1), ("peak_mb", 0))


def _costs(data: Mapping, tools: Sequence[str]) -> str:
    rows = []
    for tool in tools:
        runs = [run[tool] for run in data["programs"].values()]
        good = [run for run in runs if run["status"] == 0]
        cells = ["–"] * 3
        if good:
            values = [([run[key] for run in good], digits) for key, digits in COSTS]
            cells = [f"{statistics.median(some):.{n}f} (at most {max(some):.{n}f})" for some, n in values]
        version = data["tools"][tool]["version"]
        rows.append([tool, version, f"{len(good)} of {len(runs)}", *cells, FOR[tool]])
    heads = ("tool", "version", "traces read", "time, s", "processor time, s", "memory, MB")
    return _table((*heads, "what it is for"), rows)


def _place(data: Mapping, pairs: Mapping, tool: str, program: str, variant: str) -> str:
    """Return the place of the first advice that means a variant, and the saving that read-trace predicts."""
    for place, one in enumerate(advice_of(data, tool, program), 1):
        if variant in judge(tool, one, pairs[program]).variants:
            return f"{place}, predicted {one['saves']:.0%}" if "saves" in one else str(place)
    return ""


def _changes(data: Mapping, pairs: Mapping, tools: Sequence[str]) -> str:
    rows = []
    for program in data["programs"]:
        savings = measured(pairs[program])
        for variant in sorted(savings, key=lambda variant: -savings[variant].saved):
            one = savings[variant]
            cells = [_place(data, pairs, tool, program, variant) for tool in tools]
            rows.append([f"{program}/{variant}", "yes" if one.fitted else "", f"{one.saved:.0%}", *cells])
    return _table(("change", "fitted", "measured", *tools), rows)


def page(data: Mapping, pairs: Mapping) -> str:
    """Return the page. data: results.json of this folder; pairs: that of benchmarks/pairs."""
    made, tools = data["made"], [tool for tool in FOR if tool in data["tools"]]
    talking = [tool for tool in tools if any(advice_of(data, tool, program) for program in data["programs"])]
    is_fitted = {name: any(one.fitted for one in measured(pairs[name]).values()) for name in data["programs"]}
    unfitted = [name for name, fitted in is_fitted.items() if not fitted]
    fitted = [name for name, fitted in is_fitted.items() if fitted]
    text = (HERE / "page.md").read_text()
    with_guide = [*tools, GUIDE]
    values = {
        "UNFITTED": _scores(data, pairs, with_guide, unfitted),
        "FITTED": _scores(data, pairs, with_guide, fitted),
        "COSTS": _costs(data, tools),
        "CHANGES": _changes(data, pairs, talking),
        "OTHER": f"`{data['other']['TraceLens']['version']}`, “{data['other']['TraceLens']['summary'].split(':')[0]}”",
        "WHERE": f"{made['machine']}, Python {made['python']}, {made['date']}",
        "MINUTES": f"{made['seconds'] / 60:.0f}",
        "LIMIT": f"{made['limit_s']:.0f}",
        "N_PROGRAMS": str(len(data["programs"])),
        "N_UNFITTED": str(len(unfitted)),
        "N_FITTED": str(len(fitted)),
        "N_CHANGES": str(sum(len(measured(pairs[name])) for name in data["programs"])),
        "N_GUIDE": str(len(MEANT[GUIDE])),
        "RIGHT": f"{PROMISED:.0%}",
        "FALSE": f"{KEPT:.0%}",
    }
    for name, value in values.items():
        text = text.replace(f"{{{name}}}", value)
    return text


def committed() -> tuple[dict, dict]:
    """Return the committed data: what the tools said, and what was measured."""
    return json.loads((HERE / "results.json").read_text()), json.loads((PAIRS / "results.json").read_text())
