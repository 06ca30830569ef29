"""The sizes of a convolution, by the shapes that torch recorded for its op."""

import math
from functools import lru_cache

import msgspec

from tracereader.trace.types import Inputs

# The positions of padding, stride and dilation among an op's arguments; the first two are the data and the filter.
# Source: torch's native_functions.yaml.
FORWARD = {"aten::cudnn_convolution": (2, 3, 4), "aten::miopen_convolution": (3, 4, 5)}


class Convolution(msgspec.Struct, frozen=True):
    """data [batch, channels, …] with a filter [channels out, channels in a group, …], in forward or backward."""

    data: list[int]
    filter: list[int]
    result: list[int]

    @property
    def flops(self) -> int:
        """Return the FLOPs of the direct sum, as vendors count them. Each gradient costs as much.

        Other algorithms need fewer FLOPs.
        """
        return 2 * math.prod(self.result) * math.prod(self.filter[1:])

    @property
    def elements(self) -> int:
        """Return the number of elements of data, filter and result. A kernel reads two of them and writes the third."""
        return math.prod(self.data) + math.prod(self.filter) + math.prod(self.result)


@lru_cache(4096)  # most ops of a step repeat the inputs of another one
def convolution(op: str, inputs: Inputs) -> Convolution | None:
    """Return the sizes, by the shapes of the op's tensors and its other arguments; None if these do not show them."""
    shapes = inputs.dims
    if op == "aten::convolution_backward" and len(shapes) >= 3:
        result, data, weight = shapes[:3]
        if inputs.argument(7) != "False":
            return None  # a transposed convolution, or perhaps one
    elif op in FORWARD and len(shapes) >= 2:
        data, weight = shapes[:2]
        numbers = [inputs.numbers_at(place) or [] for place in FORWARD[op]]
        if len(weight) != len(data) or any(len(some) != len(data) - 2 for some in numbers):
            return None
        sizes = [
            (size + 2 * pad - dilation * (tap - 1) - 1) // stride + 1 if stride else 0
            for size, tap, pad, stride, dilation in zip(data[2:], weight[2:], *numbers, strict=True)
        ]
        result = [data[0], weight[0], *sizes]
    else:
        return None
    fits = len(data) == len(weight) == len(result) >= 3 and min(result) > 0
    return Convolution(data, weight, result) if fits and (data[0], weight[0]) == tuple(result[:2]) else None
