"""The bytes that an op has to move, by recorded shapes and types: each input read once, each output written once.

Source of inputs and outputs: torch's native_functions.yaml. No bytes if the record does not decide the result's size.
"""

import math
import re
from collections.abc import Sequence
from functools import lru_cache

from tracereader.trace.kernel_names import LOOKED_AT
from tracereader.trace.op_names import FILLS, aten
from tracereader.trace.types import BYTES_BY_CODE, Inputs, Tensor, dtype_of, is_shape

FLOATS = ("c10::BFloat16", "c10::Half", "float", "double")
# Pointwise ops by the number of leading arguments that may be tensors to read; a tensor after those is out=.
_OPERANDS = (
    (1, "abs neg exp exp2 expm1 log log2 log10 log1p sqrt rsqrt reciprocal sin cos tan asin acos atan sinh "
        "cosh tanh sigmoid relu relu6 silu mish selu gelu elu celu leaky_relu softplus hardtanh hardswish "
        "hardsigmoid log_sigmoid erf erfc erfinv floor ceil round trunc frac sign square threshold nan_to_num "
        "bitwise_not logical_not isnan isinf isfinite isneginf isposinf"),
    (2, "add sub rsub mul div true_divide floor_divide remainder fmod pow maximum minimum fmax fmin atan2 eq "
        "ne lt le gt ge logical_and logical_or logical_xor bitwise_and bitwise_or bitwise_xor clamp_min "
        "clamp_max gelu_backward silu_backward sigmoid_backward tanh_backward threshold_backward "
        "leaky_relu_backward hardtanh_backward hardswish_backward elu_backward softplus_backward "
        "native_dropout_backward"),
    (3, "where masked_fill addcmul addcdiv lerp clamp"),
)  # fmt: skip
OPERANDS = {name: number for number, names in _OPERANDS for name in aten(names)}
OPERANDS |= {"LigerGELUMulFunction": 2, "LigerSiLUMulFunction": 2}
# Ops that are measured on a CPU, where ops of one name call each other. Two runs are compared by their inputs.
_ON_CPU = aten("add sub mul div gelu silu relu sigmoid tanh exp rsqrt neg")
INPUTS = {name: OPERANDS[name] for name in (*_ON_CPU, "LigerGELUMulFunction", "LigerSiLUMulFunction")}
# Ops with a boolean result, which takes one byte per element.
BOOLEAN_RESULT = aten(
    "eq ne lt le gt ge logical_and logical_or logical_xor logical_not isnan isinf isfinite isneginf isposinf"
)
# Integer inputs give these ops an integer result. That of other ops also depends on arguments that are no tensors.
KEEP_INTEGERS = aten(
    "abs neg relu sign square add sub rsub mul maximum minimum where masked_fill bitwise_not bitwise_and bitwise_or "
    "bitwise_xor"
)
# Reductions: the positions of the dimensions and of the result's dtype among their arguments.
REDUCES = {
    "aten::sum": (1, 3), "aten::mean": (1, 3), "aten::amax": (1, None), "aten::amin": (1, None), "aten::all": (1, None),
    "aten::any": (1, None), "aten::argmax": (1, None), "aten::argmin": (1, None), "aten::linalg_vector_norm": (2, 4),
}  # fmt: skip


@lru_cache(4096)  # most ops of a step repeat the inputs of another one
def moved(name: str, recorded: Inputs, kernel: str) -> int | None:
    """Return the bytes that the only kernel of an op has to move; None if the record does not show them."""
    inputs, tensors = recorded.by_position, recorded.tensors
    if name == "aten::cat":
        return _cat(recorded.recorded, kernel)
    if not tensors or any(one.item is None for one in tensors):
        return None
    if name == kernel:  # Inductor's own row lists its outputs among its inputs
        return sum(one.bytes for one in tensors)
    if name == "aten::copy_":
        return sum(one.bytes for one in tensors) if len(tensors) == 2 else None  # a broadcast source is read once
    if name in FILLS:
        return inputs[0].bytes if inputs[0] else None
    for names, find in (
        (("aten::_softmax", "aten::_log_softmax"), _softmax),
        (("aten::_softmax_backward_data", "aten::_log_softmax_backward_data"), _softmax_backward),
        (("aten::native_layer_norm", "aten::_fused_rms_norm"), _norm),
        (("aten::native_dropout",), _dropout),
        (REDUCES, _reduction),
    ):
        if name in names:
            return find(name, inputs, recorded) if inputs[0] else None
    return pointwise_bytes(name, inputs)


def pointwise_bytes(op: str, inputs: Sequence[Tensor | None]) -> int | None:
    """Return the bytes of a pointwise op's operands and result, with the operands broadcast; None if unknown."""
    name = op.removesuffix("_")
    number = OPERANDS.get(name)
    if number is None or len(inputs) < number or any(one is not None and one.item is None for one in inputs):
        return None
    operands, out = inputs[:number], [one for one in inputs[number:] if one is not None]
    tensors = [one for one in operands if one is not None]
    if not tensors or len(out) > 1:
        return None
    read = sum(one.bytes for one in tensors)
    if out:
        return read + out[0].bytes
    if op.endswith("_"):  # in place
        return read + operands[0].bytes if operands[0] else None
    shape, item = _broadcast(tensors), _result_item(name, operands)
    return read + math.prod(shape) * item if shape is not None and item else None


def _broadcast(tensors: Sequence[Tensor]) -> list[int] | None:
    """Return the shape of the result; None if the shapes cannot be broadcast."""
    shape: list[int] = []
    for place in range(1, max(len(one.shape) for one in tensors) + 1):
        sizes = {one.shape[-place] for one in tensors if len(one.shape) >= place} - {1}
        if len(sizes) > 1:
            return None
        shape.insert(0, sizes.pop() if sizes else 1)
    return shape


def _result_item(op: str, operands: Sequence[Tensor | None]) -> int | None:
    """Return the bytes per element of the result by torch's type promotion. Plain numbers do not change the type."""
    if op in BOOLEAN_RESULT:
        return 1
    if op == "aten::masked_fill":
        return operands[0].item if operands[0] else None
    valued = operands[1:] if op == "aten::where" else operands
    types = {one.type for one in valued if one is not None}
    if floats := types & {*FLOATS}:
        if len(floats) > 1 and floats <= {"c10::BFloat16", "c10::Half"}:
            return 4
        return max(dtype_of(one).bytes for one in floats)
    # An integer tensor gives a floating-point result if one of the plain numbers is a fraction.
    return dtype_of(types.pop()).bytes if len(types) == 1 and op in KEEP_INTEGERS and None not in valued else None


def _softmax(name: str, inputs: Sequence[Tensor | None], recorded: Inputs) -> int | None:
    given = inputs[0]
    if len(inputs) > 3 and inputs[3]:
        return given.bytes + inputs[3].bytes
    widened = recorded.argument(2)
    if widened is None and given.item == 2:
        return None  # half_to_float is not recorded
    return given.bytes + math.prod(given.shape) * (4 if widened == "True" else given.item)


def _softmax_backward(name: str, inputs: Sequence[Tensor | None], recorded: Inputs) -> int | None:
    tensors = [one for one in inputs if one is not None]
    item = BYTES_BY_CODE.get(recorded.argument(3) or "")
    if len(tensors) != 2 or not item:
        return None
    return sum(one.bytes for one in tensors) + math.prod(tensors[0].shape) * item


def _norm(name: str, inputs: Sequence[Tensor | None], recorded: Inputs) -> int | None:
    given, *weights = [one for one in inputs if one is not None]
    over = weights[0].shape if weights else recorded.numbers_at(1)
    if not over or len(over) > len(given.shape) or given.shape[len(given.shape) - len(over) :] != over:
        return None
    rows = math.prod(given.shape[: len(given.shape) - len(over)])
    # Backward also needs the mean and the reciprocal deviation of each row, in fp32 at least.
    kept = 1 if name == "aten::_fused_rms_norm" else 2
    moved = given.bytes + sum(one.bytes for one in weights) + math.prod(given.shape) * given.item
    return moved + kept * rows * max(given.item, 4)


def _dropout(name: str, inputs: Sequence[Tensor | None], recorded: Inputs) -> int | None:
    given, elements = inputs[0], math.prod(inputs[0].shape)
    return given.bytes + elements * (given.item + 1) if recorded.argument(2) == "True" else None


def _reduction(name: str, inputs: Sequence[Tensor | None], recorded: Inputs) -> int | None:
    given = inputs[0]
    place, dtype_place = REDUCES[name]
    tensors = [one for one in inputs[1:] if one is not None]
    if tensors:
        return given.bytes + tensors[0].bytes if len(tensors) == 1 and len(inputs) > place + 2 else None  # out=
    everything = len(inputs) <= place + 1 and dtype_place != 4  # without dimensions, a dtype takes their position
    over = [] if everything or recorded.argument(place) == "" else recorded.numbers_at(place)
    if over is None or any(not -len(given.shape) <= one < len(given.shape) for one in over):
        return None
    gone = {one % len(given.shape) for one in over}
    left = 1 if not gone else math.prod(size for at, size in enumerate(given.shape) if at not in gone)
    item = given.item
    if name in ("aten::all", "aten::any"):
        item = 1
    elif name in ("aten::argmax", "aten::argmin"):
        item = 8
    elif dtype_place is not None:
        asked = recorded.argument(1 if everything else dtype_place)
        if asked is None or (asked and asked not in BYTES_BY_CODE):
            return None
        # Without a type, integers add up to int64.
        item = BYTES_BY_CODE[asked] if asked else item if given.type in FLOATS else 8
    return given.bytes + left * item


def _cat(dims: list, kernel: str) -> int | None:
    """Return the bytes that a cat has to move: the record has the shapes, and the kernel's name gives the type."""
    shapes = dims[0] if dims and isinstance(dims[0], list) else []
    if not shapes or not all(one and is_shape(one) for one in shapes):
        return None
    kernel = kernel[:LOOKED_AT]
    opaque = re.search(r"OpaqueType<(\d{1,2})u?>", kernel)
    named = re.search(r"CatArrayBatchedCopy\w*<((?:unsigned )?[\w:]+(?:<\w+>)?)[,>]", kernel)
    dtype = dtype_of(named[1]) if named else None
    item = int(opaque[1]) if opaque else dtype.bytes if dtype else None
    return 2 * sum(map(math.prod, shapes)) * item if item else None
