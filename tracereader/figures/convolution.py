"""What a convolution computed, by the shapes that torch recorded of its op."""

import ast
import math
from collections.abc import Sequence

import msgspec

# Where an op's arguments hold padding, stride and dilation; the first two are the data and the filter.
# Sources: torch's native_functions.yaml.
FORWARD = {"aten::cudnn_convolution": (2, 3, 4), "aten::miopen_convolution": (3, 4, 5)}


class Convolution(msgspec.Struct, frozen=True):
    """data [batch, channels, …] with a filter [channels out, channels in a group, …], as forward or backward."""

    data: list[int]
    filter: list[int]
    result: list[int]

    @property
    def flops(self) -> int:
        """FLOPs of the direct sum, as vendors count them. Other algorithms need fewer. Each gradient costs as much."""
        return 2 * math.prod(self.result) * math.prod(self.filter[1:])

    @property
    def elements(self) -> int:
        """Bytes of data, filter and result. Two of them are read, and the third is written."""
        return math.prod(self.data) + math.prod(self.filter) + math.prod(self.result)


def convolution(op: str, shapes: Sequence[list[int]], concrete: list) -> Convolution | None:
    """By the op's tensor shapes and its other arguments as text; None where these do not show it."""
    if op == "aten::convolution_backward" and len(shapes) >= 3:
        result, data, weight = shapes[:3]
        if _flag(concrete, 7):
            return None  # of a transposed one
    elif op in FORWARD and len(shapes) >= 2:
        data, weight = shapes[:2]
        numbers = [_numbers(concrete, place) for place in FORWARD[op]]
        spatial = len(data) - 2
        if len(weight) != len(data) or any(len(some) != spatial for some in numbers):
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


def _numbers(concrete: object, place: int) -> list[int]:
    """The list of numbers that was passed as that argument."""
    try:
        found = ast.literal_eval(concrete[place])
    except (TypeError, IndexError, ValueError, SyntaxError, MemoryError, RecursionError):
        return []
    return found if isinstance(found, list) and all(type(one) is int for one in found) else []


def _flag(concrete: object, place: int) -> bool:
    # If it was not recorded, assume transposed, which claims less.
    return not (len(concrete) > place and concrete[place] == "False")
