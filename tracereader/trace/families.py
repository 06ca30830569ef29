"""The family of a GPU activity: by its kernel's name, else by the op that launched it.

A library runs the same kernel for several ops. cuDNN and MIOpen compute a convolution as a matrix product, with
transpositions before and after it; cuBLASLt runs an epilogue as a kernel of its own; Triton and Composable Kernel have
names that say nothing. The op that launched the kernel, or one that encloses it, tells what the work is for.
"""

import functools
import itertools
import re
from collections.abc import Iterator

from tracereader.trace.kernel_names import EPILOGUE, JOBS, LOOKED_AT, UNKNOWN, KernelName, decode, job_of
from tracereader.trace.slices import Work

# Kernels of these makers are named for the very operation that they compute, whatever op launched them.
NAMED_FOR_THEIR_JOB = ("ATen", "Inductor", "Liger", "driver", "CUB", "Thrust", "PyTorch")
# Names of these families are of one purpose only.
ONE_PURPOSE = (
    "attention", "convolution", "normalization", "communication", "memset", "optimizer", "embedding", "sort and scan",
)  # fmt: skip
# A layer contains a matrix product, convolution or attention, unlike a run of copies or an optimizer's kernels.
IN_EVERY_LAYER = ("GEMM", "attention", "convolution")
# What torch.compile fuses, and what it leaves to libraries. How many of the latter a step has says most of its work.
FUSABLE = ("pointwise", "normalization", "reduction", "copy")
HEAVY = (*IN_EVERY_LAYER, "communication")
# Names of work without a family. The op gives no more information about it.
NO_FAMILY = tuple(does for _, family, does in JOBS if family == "other")
# Torch ops whose family JOBS does not give.
TORCHS = (
    (r"^aten::\w*conv(?!ert)|^\w*Conv\w*Backward\d*$|^\w*convolution\w*$", "convolution"),
    (r"^aten::\w*attention", "attention"),
    (r"^aten::(?:mm|bmm|addmm|baddbmm|addbmm|addmv|mv|dot|vdot|linear|matmul|einsum|tensordot|bilinear|_addmm_activation"
     r"|_(?:scaled|int|grouped|scaled_grouped)_mm|_weight_int\w+)_?$", "GEMM"),
    (r"^aten::\w*(?:batch|layer|group|instance|rms|weight)_norm", "normalization"),
    (r"^aten::(?:linalg_(?:vector_)?|_foreach_)?norm$", "reduction"),
    (r"^aten::_fused_(?:adam|sgd|adagrad)", "optimizer"),
    (r"^(?:c10d|nccl|_c10d_functional|symm_mem):|^record_param_comms", "communication"),
)  # fmt: skip
# Ops of whole layers launch work of several families.
WHOLE_LAYERS = re.compile(r"Linear|MLP|M[oO]E|moe_forward|Compiled|CUDAGraph|Checkpoint|Block|Module")
# Ops and annotations that are farther out than this around a kernel do not say what it computes.
MOST_AROUND = 100
AUTOGRADS = "autograd::engine::evaluate_function: "


def says(work: Work) -> KernelName:
    """What is known of a GPU activity: the content of its name, and the family by the ops around its launch."""
    if work.said is None:
        work.said = _says(work)
    return work.said


def _says(work: Work) -> KernelName:
    name, is_open = _by_name(work.name, work.kind)
    if is_open is None or work.asked is None:
        return name
    if found := (_of_an_open_name(name, work) if is_open else _of_a_library(name, work)):
        return _known_from(work.name, *found)
    return name


@functools.lru_cache(maxsize=100_000)
def _by_name(kernel: str, kind: str) -> tuple[KernelName, bool | None]:
    """The content of a name, and whether the family is open; None if no op can change the family."""
    name = decode(kernel)
    if kind != "kernel" and name.family == UNKNOWN:
        # Whatever the driver of another vendor calls it, the profiler says what it is.
        return KernelName("memset" if kind == "memset" else "copy", "driver", {}), None
    if kind != "kernel" or name.family in ONE_PURPOSE:
        return name, None
    is_open = name.family in ("other", UNKNOWN)
    return name, None if not is_open and name.maker.startswith(NAMED_FOR_THEIR_JOB) else is_open


@functools.lru_cache(maxsize=100_000)
def _known_from(kernel: str, family: str, op: str) -> KernelName:
    name = decode(kernel)
    return KernelName(family, name.maker, {**name.parts, "known from": op})


def _of_an_open_name(name: KernelName, work: Work) -> tuple[str, str] | None:
    """The family by the innermost op that gives one, and that op."""
    known = name.parts.get("does") in NO_FAMILY
    for op in _ops_around(work):
        family = of_op(op)
        if family and (not known or family == "convolution"):
            return family, op
    return None


def _of_a_library(name: KernelName, work: Work) -> tuple[str, str] | None:
    """The family by the enclosing op where a library's kernel name says less, and that op."""
    for op in _ops_around(work):
        family = of_op(op)
        says_more = family == "convolution" or (family == "GEMM" and name.parts.get("does") == EPILOGUE)
        if says_more or (family == "normalization" and name.maker in ("cuDNN", "MIOpen")):
            return family, op
        if not op.startswith("aten::"):
            break  # torch's own ops enclose each other; beyond them a layer begins
    return None


def _ops_around(work: Work) -> Iterator[str]:
    """The names of the ops that asked for it, innermost first."""
    return (op.name for op in itertools.islice(work.asked.above(), MOST_AROUND) if op.kind == "op")


@functools.lru_cache(maxsize=100_000)
def of_op(op: str) -> str:
    """The family of what an op of this name computes; "" if the name does not say."""
    op = op.removeprefix(AUTOGRADS)[:LOOKED_AT]
    family = next((family for pattern, family in TORCHS if re.search(pattern, op)), "")
    if family or WHOLE_LAYERS.search(op):
        return family
    family, _ = job_of(re.sub(r"(?<=[a-z\d])(?=[A-Z])", "_", op)) or ("", "")
    return "" if family == "other" else family
