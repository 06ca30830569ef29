"""What a piece of GPU work computed and moved at least, by the shapes that torch recorded of its op."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from tracereader.figures.attention import ATTENTION, Attention, attention, stored
from tracereader.figures.convolution import Convolution, convolution
from tracereader.trace import Lesson, Op, Work, kernel_names
from tracereader.trace.kernel_names import KernelName

MATMULS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::_scaled_mm")

BYTES_OF = {
    "c10::BFloat16": 2,
    "c10::Half": 2,
    "float": 4,
    "double": 8,
    "int": 4,
    "long int": 8,
    "short int": 2,
    "signed char": 1,
    "unsigned char": 1,
    "bool": 1,
}

# Pointwise ops with the number of tensors that they read; each writes one of the largest one's size.
INPUTS = {
    "aten::add": 2, "aten::sub": 2, "aten::mul": 2, "aten::div": 2, "aten::gelu": 1, "aten::silu": 1, "aten::relu": 1,
    "aten::sigmoid": 1, "aten::tanh": 1, "aten::exp": 1, "aten::rsqrt": 1, "aten::neg": 1,
    "LigerGELUMulFunction": 2, "LigerSiLUMulFunction": 2,
}  # fmt: skip


class Tensor(NamedTuple):
    """An op's input. stored: its elements, those of an expanded dimension once. item: bytes each; None: not known.

    type: as torch writes it; "" where it was not recorded.
    """

    shape: list[int]
    stored: int
    item: int | None
    type: str


class Product(msgspec.Struct, frozen=True):
    """A matrix product: batch x [m, k] x [k, n]."""

    batch: int
    m: int
    k: int
    n: int

    @property
    def flops(self) -> int:
        return 2 * self.batch * self.m * self.k * self.n

    @property
    def elements(self) -> int:
        """Of both factors and the result."""
        return self.batch * (self.m * self.k + self.k * self.n + self.m * self.n)


def sizes_of(
    work: Work, op: Op | None, args: dict, says: KernelName, lesson: Lesson | None
) -> tuple[Product | Attention | Convolution | None, int | None, str]:
    """What a GEMM, an attention kernel or a convolution computed, the bytes that it has to move, its type."""
    if work.kind == "memcpy":
        size = count_of(args.get("bytes"))
        return None, size and size * (2 if "DtoD" in work.name else 1), ""
    if op is None or says.family not in ("GEMM", "attention", "convolution", "pointwise", "copy"):
        return None, None, ""
    tensors = tensors_of(op.args)
    if says.family == "pointwise":
        return None, _pointwise_bytes(op.name, work.name, tensors), ""
    if says.family == "copy":
        return None, _copied_bytes(op.name, tensors), ""
    shapes, given = [one.shape for one in tensors], op.args.get("Input type")
    first = given[0] if isinstance(given, list) and given and isinstance(given[0], str) else ""
    item = BYTES_OF.get(first)
    # Of fp32 inputs only the name tells whether they are multiplied as TF32.
    found, types = None, {"c10::BFloat16": "bf16", "c10::Half": "fp16"}.get(first, "")
    if says.family == "GEMM":
        found = product(op.name, shapes)
    elif says.family == "convolution":
        if _alone(work, op, says):
            found = convolution(op.name, shapes, op.args.get("Concrete Inputs"))
    elif says.parts.get("does", "forward") != "forward":
        pass  # it only puts parts together, or goes backward: other arithmetic
    elif shapes:
        found = attention(op.name, op.args, shapes, says, lesson.facts if lesson else {})
    elif lesson and (found := stored(lesson.facts, says)):
        types = {"bf16": "bf16", "fp16": "fp16"}.get(str(lesson.flags.get("dtype")), "")
        item = 2 if types else None
    return found, found.elements * item if found and item else None, types


def _alone(work: Work, op: Op, says: KernelName) -> bool:
    # Forward, towards the data or towards the weights: an op that starts two kernels of one kind has
    # split the work between them, and the trace does not tell how.
    does = says.parts.get("does", "")
    if does.startswith(kernel_names.SPLIT_K):
        return False
    decoded = [kernel_names.decode(one.name) for call in op.children for one in call.work if one is not work]
    return not any(one.family == "convolution" and one.parts.get("does") == does for one in decoded)


def product(op: str, dims: list[list[int]]) -> Product | None:
    """What a matrix product's op computed, by its inputs' shapes."""
    # Behind the two factors, compiled code names its output; before them, addmm names its bias.
    first = 1 if op in ("aten::addmm", "aten::baddbmm") else 0
    factors = dims[first : first + 2]
    if op not in MATMULS or len(factors) < 2 or any(len(dim) < 2 for dim in factors):
        return None
    *batch, m, k = factors[0]
    return Product(math.prod(batch), m, k, factors[1][-1]) if k == factors[1][-2] else None


def _pointwise_bytes(op: str, kernel: str, tensors: Sequence[Tensor]) -> int | None:
    if not tensors or any(one.item is None for one in tensors):
        return None
    read = sum(one.stored * one.item for one in tensors)
    if op == kernel:  # Inductor's own row names its outputs with its inputs
        return read
    inputs = INPUTS.get(op)
    if inputs is None or not inputs <= len(tensors) <= inputs + 1:
        return None
    written = max(math.prod(one.shape) for one in tensors) * max(one.item for one in tensors)
    return read + (0 if len(tensors) > inputs else written)  # with out= it is among them


def _copied_bytes(op: str, tensors: Sequence[Tensor]) -> int | None:
    if op != "aten::copy_" or len(tensors) != 2 or any(one.item is None for one in tensors):
        return None
    to, source = tensors
    # Read where it is broadcast from: once.
    return to.stored * to.item + source.stored * source.item


def sizes_of_op(op: Op) -> tuple[Product | Attention | None, int | None]:
    """What a product multiplies or attention computes, or the bytes that a pointwise op moves, by recorded shapes."""
    tensors = tensors_of(op.args)
    shapes = [one.shape for one in tensors]
    if op.name in MATMULS:
        return product(op.name, shapes), None
    if op.name in ATTENTION:
        return attention(op.name, op.args, shapes, kernel_names.decode(""), {}), None
    return None, _pointwise_bytes(op.name, "", tensors)


def dims_of(args: dict) -> list[list[int]]:
    """The shapes of an op's tensor inputs; none unless recorded as torch records them."""
    return [one.shape for one in tensors_of(args)]


def tensors_of(args: dict) -> list[Tensor]:
    """An op's tensor inputs, as far as they were recorded."""
    dims, types, strides = (args.get(key) for key in ("Input Dims", "Input type", "Input Strides"))
    if not isinstance(dims, list):
        return []
    types = types if isinstance(types, list) and len(types) == len(dims) else [None] * len(dims)
    strides = strides if isinstance(strides, list) and len(strides) == len(dims) else [None] * len(dims)
    found = []
    for shape, type_name, stride in zip(dims, types, strides, strict=True):
        if isinstance(shape, list) and shape and all(type(size) is int and 0 <= size < 2**40 for size in shape):
            same = isinstance(stride, list) and len(stride) == len(shape)
            distinct = [size for size, step in zip(shape, stride, strict=True) if step != 0] if same else shape
            given = type_name if isinstance(type_name, str) else ""
            found.append(Tensor(shape, math.prod(distinct), BYTES_OF.get(given), given))
    return found


def count_of(value: object) -> int | None:
    """A number of things, as somebody's file has it; None if it is none."""
    return value if type(value) is int and 0 <= value < 2**53 else None
