"""What rules a change out although the trace gives a reason for it, each with the recording that showed it."""

from collections.abc import Callable
from typing import NamedTuple

from tracereader.changes.context import Case
from tracereader.changes.layout import by_ffts
from tracereader.changes.precision import long_filters_in_groups
from tracereader.figures.phases import in_backward
from tracereader.figures.steps import ops_recorded
from tracereader.trace.op_names import FFTS, NEED_CONTIGUOUS, RNNS

BATCH_NORM = "batch_norm"  # in its ops' names


def has_rnns(case: Case) -> bool:
    """Return whether the trace has an RNN of cuDNN or MIOpen."""
    return not case.trace.op_names.isdisjoint(RNNS)


def has_ffts(case: Case) -> bool:
    """Return whether the trace has Fourier transforms."""
    return case.has(lambda name: name.startswith(FFTS))


def has_convolutions_of_volumes(case: Case) -> bool:
    """Return whether the typical step convolves volumes, such as clips of a video."""
    return any(len(op.inputs.dims_at(0) or ()) == 5 for op in case.step.named("aten::convolution".__eq__))


def has_batch_norms_of_volumes(case: Case) -> bool:
    """Return whether the typical step normalizes volumes over the batch, for which compiled code may be far slower.

    Instance normalization calls the same ops, and is not meant: a compiled 3-D U-Net with it saved 18%.
    """
    calls = case.step.named(lambda name: name.startswith("aten::") and BATCH_NORM in name)
    of_volumes = (op for op in calls if len(op.inputs.dims_at(0) or ()) == 5 and not in_backward(op))
    return any(all(above.name != "aten::instance_norm" for above in op.above()) for op in of_volumes)


class Veto(NamedTuple):
    """A change that is not proposed if a condition holds. recording: what was measured, or why it cannot be made."""

    change: str
    holds: Callable[[Case], bool]
    recording: str


VETOES = (
    Veto("fuse_pointwise", lambda case: not ops_recorded(case.step), "equal grids alone show too many chains"),
    Veto("fuse_pointwise", lambda case: case.summary.training.has_sparse_gradients,
         "a recommender with 26 sparse tables took 19.1 ms compiled instead of 18.0"),
    Veto("fuse_pointwise", lambda case: case.differentiates_twice, "torch.compile cannot do that"),
    Veto("fuse_pointwise", lambda case: case.summary.debugging.checked_gradients > 0, "anomaly_detection comes first"),
    Veto("double_batch", lambda case: case.summary.debugging.checked_gradients > 0, "anomaly_detection comes first"),
    Veto("fuse_pointwise", has_ffts, "a Fourier neural operator took 9.4 ms compiled instead of 6.8"),
    Veto("fuse_pointwise", lambda case: case.has("aten::_sparse_addmm".__eq__),
         "a graph network with torch.sparse.mm took 5.4 ms compiled instead of 3.9"),
    Veto("fuse_pointwise", lambda case: case.trace.trains and has_rnns(case),
         "a language model with an LSTM took 12.9 ms compiled instead of 10.7"),
    Veto("channels_last", lambda case: case.step.named(NEED_CONTIGUOUS.__contains__) and not by_ffts(case, "tf32"),
         "a U-Net with group norms took 7.9 ms instead of 5.8, one of volumes 50.6 instead of 42.3"),
    Veto("half_precision", lambda case: not case.trace.trains and has_convolutions_of_volumes(case),
         "a network for videos took 5.1 ms under autocast instead of 4.0"),
    Veto("half_precision", lambda case: not case.trace.trains and bool(long_filters_in_groups(case)),
         "a program with Wav2Vec2 took 29.1 ms instead of 27.4"),
    Veto("cuda_graph", lambda case: case.growing_keys is not None, "a graph is of one number of keys: static_cache"),
    Veto("cuda_graph", lambda case: case.recomputed_tokens is not None, "each pass has one token more: static_cache"),
    Veto("cuda_graph", lambda case: bool(case.in_flex), "each call copies from pageable memory: compile_flex"),
    Veto("cuda_graph", lambda case: case.has("aten::_pack_padded_sequence".__eq__),
         "what an RNN launches then depends on the lengths of the sequences"),
)  # fmt: skip
