"""The committed traces of the rungs, and of other programs on an H200."""

import functools
from collections.abc import Sequence
from pathlib import Path

import pytest

from tracereader.changes.catalogue import opportunities
from tracereader.changes.opportunity import Opportunity
from tracereader.figures import Summary, summarize
from tracereader.replay import Refused
from tracereader.trace import Trace, read

ROOT = Path(__file__).resolve().parent.parent
REFERENCES = sorted(ROOT.glob("traces/reference/*/0[1-4]_*/*.json.gz"))
# A whole model's steps have hundreds of pieces: what takes long on them leaves them out.
LARGE = sorted(ROOT.glob("traces/reference/*/0[56]_*/*.json.gz"))
H200 = ROOT / "traces/reference/nvidia-h200"
CHANGES = H200 / "changes"
OTHERS = sorted(ROOT.glob("tests/traces/*.json.gz"))
MODELS = sorted(ROOT.glob("tests/traces/models/*.json.gz"))  # large, too


def sampled(paths: Sequence[Path]) -> list:
    """Return the traces as parameters: the smallest one of each folder, and the others marked as exhaustive."""
    chosen = {min(some, key=lambda path: path.stat().st_size) for some in _by_folder(paths).values()}
    return [path if path in chosen else pytest.param(path, marks=pytest.mark.exhaustive) for path in paths]


def _by_folder(paths: Sequence[Path]) -> dict[Path, list[Path]]:
    found = {}
    for path in paths:
        found.setdefault(path.parent, []).append(path)
    return found


LARGE_FILE = 120_000  # bytes; reading, measuring and replaying such a trace takes a third of a second or more


def small_first(rows: Sequence) -> list:
    """Return rows as parameters, and those that name a large trace marked as exhaustive.

    rows: each is the path of a trace, the name of a recording in CHANGES, or a tuple of such names and other things.
    """

    def is_large(row: tuple) -> bool:
        files = [one if isinstance(one, Path) else recording(one) for one in row]
        return any(file.stat().st_size > LARGE_FILE for file in files if file.exists())

    rows = [row if isinstance(row, tuple) else (row,) for row in rows]
    return [pytest.param(*row, marks=pytest.mark.exhaustive if is_large(row) else ()) for row in rows]


def recording(name: object) -> Path:
    """Return the trace of a recording in CHANGES."""
    return CHANGES / f"{name}.json.gz"


_summaries: dict[Path, Summary] = {}
_proposals: dict[Path, tuple[Opportunity, ...] | Refused] = {}


@functools.lru_cache(maxsize=4)
def opened(path: Path) -> tuple[Trace, Summary]:
    """Return a committed trace and its summary. The last few are kept, because tests ask for one trace in a row."""
    trace = read(path)
    _summaries[path] = summarize(trace)
    return trace, _summaries[path]


def measured(path: Path) -> Summary:
    """Return the summary of a committed trace, which is measured once in a run of tests."""
    if path not in _summaries:
        opened(path)
    return _summaries[path]


def proposals(path: Path) -> tuple[Opportunity, ...] | Refused:
    """Return what a committed trace's report proposes, which is replayed once in a run of tests."""
    return _proposals[path] if path in _proposals else proposals_of(*opened(path))


def proposals_of(trace: Trace, summary: Summary, *show: object) -> tuple[Opportunity, ...] | Refused:
    """Return what a trace's report proposes. What opened() returned is replayed once in a run of tests."""
    if summary is not _summaries.get(trace.path):
        return opportunities(trace, summary, *show)
    if trace.path not in _proposals:
        _proposals[trace.path] = opportunities(trace, summary)
    return _proposals[trace.path]


# A recorded step, the change that its report has to propose, and the step that was recorded after that change. From
# bert on they were recorded after the rules had been written.
PREDICTED = [
    ("vit/eager", "cuda_graph", "vit/graph"),
    ("decode/eager", "cuda_graph", "decode/graph"),
    ("pointwise/eager", "fuse_pointwise", "pointwise/compile"),
    ("encoder/bf16", "fuse_pointwise", "encoder/bf16_compile"),
    ("copies/blocking", "overlap_copies", "copies/prefetched"),
    ("resnet/fp32", "tf32", "resnet/tf32"),
    ("encoder/fp32", "tf32", "encoder/tf32"),
    ("encoder/fp32", "half_precision", "encoder/bf16"),
    ("encoder/tf32", "half_precision", "encoder/bf16"),
    ("gpt2/sdpa", "align_shapes", "gpt2/padded"),
    ("gpt2/eager_attention", "fused_attention", "gpt2/sdpa"),
    ("attention/naive", "fused_attention", "attention/sdpa"),
    ("gpt2/recompute", "no_recompute", "gpt2/sdpa"),
    ("optimizer/forloop", "fused_optimizer", "optimizer/fused"),
    ("optimizer/foreach", "fused_optimizer", "optimizer/fused"),
    ("loader/inline", "data_loader", "loader/workers"),
    ("python/loop", "python", "python/ahead"),
    ("conv_layout/contiguous", "channels_last", "conv_layout/channels_last"),
    ("small/loop", "larger_batch", "small/batched"),
    ("bert/eager", "cuda_graph", "bert/graph"),
    ("lstm/cells", "cuda_graph", "lstm/graph"),
    ("images/eager", "cuda_graph", "images/graph"),
    ("images/eager", "fuse_pointwise", "images/compile"),
    ("unet/contiguous", "fuse_pointwise", "unet/compile"),
    ("llama/sdpa", "fuse_pointwise", "llama/compile"),
    ("trained/eager", "fuse_pointwise", "trained/compile"),
    ("batch_norm/eager", "cuda_graph", "batch_norm/graph"),
    ("llama/eager_attention", "fused_attention", "llama/sdpa"),
    ("convnet/forloop", "fused_optimizer", "convnet/fused"),
    ("convnet/fused", "cuda_graph", "convnet/graph"),
    ("odd_width/odd", "align_shapes", "odd_width/padded"),
    ("experts/loop", "larger_batch", "experts/batched"),
    ("guards/compile", "skip_guards", "guards/compile_skipped"),
    ("lengths/cudnn", "attention_plans", "lengths/flash"),
    ("lengths/flash", "static_cache", "lengths/static"),
    ("augmented/main_process", "cpu_tensors", "augmented/workers"),
]
