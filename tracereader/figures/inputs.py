"""What the ops of a step were called with: the types and sizes of their tensors, as torch recorded them."""

from collections import Counter, defaultdict
from itertools import groupby

from tracereader.figures.sizes import tensors_of
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
    tensors = [(TYPES.get(one.type, one.type), str(one.shape)) for one in tensors_of(args) if one.type]
    by_type = groupby(tensors, key=lambda tensor: tensor[0])
    return ", ".join(f"{name} {' '.join(shape for _, shape in some)}" for name, some in by_type)
