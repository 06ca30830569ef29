"""What the ops of a step were called with: the types and sizes of their tensors, as torch recorded them."""

from collections import Counter, defaultdict
from itertools import groupby

from tracereader.figures.moved import INPUTS
from tracereader.figures.sizes import tensors_of
from tracereader.trace import Step, kernel_names

TYPES = {**kernel_names.TYPES, "long int": "int64", "short int": "int16"}
# Tensors that an op reads: behind them, called with out= as compiled code does, stands the one that it writes.
READ = {**INPUTS, "aten::mm": 2, "aten::bmm": 2, "aten::addmm": 3, "aten::baddbmm": 3}


def inputs_of(step: Step) -> dict[str, dict[str, int]]:
    """By op, how often it was called with which inputs, in words; only calls with tensors, and recorded shapes."""
    found = defaultdict(Counter)
    for op in step.walk():
        if op.kind == "op" and (words := _words(op.name, op.args)):
            found[op.name][words] += 1
    return {name: dict(calls) for name, calls in found.items()}


def _words(op: str, args: dict) -> str:
    """fp32 [8, 64] [64, 64] of two tensors of one type."""
    read = [one for one in tensors_of(args)[: READ.get(op)] if one.type]
    by_type = groupby(read, key=lambda tensor: TYPES.get(tensor.type, tensor.type))
    return ", ".join(f"{name} {' '.join(str(one.shape) for one in some)}" for name, some in by_type)
