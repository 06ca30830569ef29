"""The committed traces of the rungs, and of other programs on an H200."""

import functools
from collections.abc import Sequence
from pathlib import Path

import pytest

from tracereader.figures import Summary, summarize
from tracereader.trace import read

ROOT = Path(__file__).resolve().parent.parent
REFERENCES = sorted(ROOT.glob("traces/reference/*/0[1-4]_*/*.json.gz"))
# A whole model's steps have hundreds of pieces: what takes long on them leaves them out.
LARGE = sorted(ROOT.glob("traces/reference/*/0[56]_*/*.json.gz"))
H200 = ROOT / "traces/reference/nvidia-h200"
OTHERS = sorted(ROOT.glob("tests/traces/*.json.gz"))
MODELS = sorted(ROOT.glob("tests/traces/models/*.json.gz"))  # large, too


def sampled(paths: Sequence[Path]) -> list:
    """Return the traces as parameters: the first one of each folder, and the others marked as exhaustive."""
    first = {path.parent: path for path in reversed(paths)}
    return [path if first[path.parent] == path else pytest.param(path, marks=pytest.mark.exhaustive) for path in paths]


@functools.cache
def measured(path: Path) -> Summary:
    """Return the summary of a committed trace, which is read once in a run of tests."""
    return summarize(read(path))


CHANGES = H200 / "changes"
# A recorded step, the change that its report has to propose, and the step that was recorded after that change. From
# bert on they were recorded after the rules had been written.
PREDICTED = [
    ("vit/eager", "cuda_graph", "vit/graph"),
    ("decode/eager", "cuda_graph", "decode/graph"),
    ("pointwise/eager", "fuse_pointwise", "pointwise/compile"),
    ("encoder/bf16", "fuse_pointwise", "encoder/bf16_compile"),
    ("copies/blocking", "overlap_copies", "copies/prefetched"),
    ("resnet/fp32", "tensor_cores", "resnet/tf32"),
    ("encoder/fp32", "tensor_cores", "encoder/tf32"),
    ("encoder/tf32", "tensor_cores", "encoder/bf16"),
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
    ("unet/contiguous", "fuse_pointwise", "unet/compile"),
    ("llama/sdpa", "fuse_pointwise", "llama/compile"),
    ("trained/eager", "fuse_pointwise", "trained/compile"),
    ("llama/eager_attention", "fused_attention", "llama/sdpa"),
    ("convnet/forloop", "fused_optimizer", "convnet/fused"),
    ("odd_width/odd", "align_shapes", "odd_width/padded"),
    ("experts/loop", "larger_batch", "experts/batched"),
    ("logits/all", "last_logits", "logits/last"),
    ("guards/compile", "skip_guards", "guards/compile_skipped"),
]
