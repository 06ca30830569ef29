"""What the ops of a step were called with: the types and sizes of their tensors, as torch recorded them."""

from collections import Counter, defaultdict
from itertools import groupby

from tracereader.trace import Step, kernel_names

TYPES = {**kernel_names.TYPES, "long int": "int64", "short int": "int16"}


def inputs_of(step: Step) -> dict[str, dict[str, int]]:
    """By op, how often it was called with which inputs, in words; only calls with tensors, and recorded shapes."""
    found = defaultdict(Counter)
    for op in step.walk():
        if op.kind == "op" and (words := _words(op.args)):
            found[op.name][words] += 1
    return {name: dict(calls) for name, calls in found.items()}


def _words(args: dict) -> str:
    """fp32 [8, 64] [64, 64] of two tensors of one type."""
    dims, types = args.get("Input Dims"), args.get("Input type")
    if not isinstance(dims, list) or not isinstance(types, list) or len(dims) != len(types):
        return ""
    tensors = [
        (TYPES.get(name, name), f"[{', '.join(map(str, shape))}]")
        for shape, name in zip(dims, types, strict=True)
        if isinstance(shape, list) and shape and all(type(size) is int for size in shape) and isinstance(name, str)
    ]
    by_type = groupby(tensors, key=lambda tensor: tensor[0])
    return ", ".join(f"{name} {' '.join(shape for _, shape in some)}" for name, some in by_type)
