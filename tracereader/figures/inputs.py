"""The types and sizes of the tensors that the ops of a step were called with, as torch recorded them."""

from collections import Counter, defaultdict
from itertools import groupby

from tracereader.figures.moved import INPUTS
from tracereader.trace import Step
from tracereader.trace.types import Tensor, dtype_of, shapes_as_recorded, tensors_of, types_of

# Tensors that an op reads: behind them, called with out= as compiled code does, stands the one that it writes.
READ = {**INPUTS, "aten::mm": 2, "aten::bmm": 2, "aten::addmm": 3, "aten::baddbmm": 3}


def inputs_of(step: Step) -> dict[str, dict[str, int]]:
    """By op, how often it was called with which inputs, in words; only calls with tensors, and recorded shapes."""
    found = defaultdict(Counter)
    known: dict[tuple, str] = {}  # most ops of a step repeat the inputs of another one
    for op in step.walk():
        if op.kind != "op":
            continue
        args = op.args
        key = op.name, str(shapes_as_recorded(args)), str(types_of(args))
        if (words := known.get(key)) is None:
            words = known[key] = _words(op.name, args)
        if words:
            found[op.name][words] += 1
    return {name: dict(calls) for name, calls in found.items()}


def _words(op: str, args: dict) -> str:
    """fp32 [8, 64] [64, 64] of two tensors of one type."""
    read = [one for one in tensors_of(args)[: READ.get(op)] if one.type]
    by_type = groupby(read, key=_type)
    return ", ".join(f"{name} {' '.join(str(one.shape) for one in some)}" for name, some in by_type)


def _type(tensor: Tensor) -> str:
    dtype = dtype_of(tensor.type)
    return dtype.name if dtype else tensor.type
