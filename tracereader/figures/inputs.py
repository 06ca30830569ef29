"""The types and sizes of the input tensors of a step's ops, as torch recorded them."""

from collections import Counter, defaultdict
from itertools import groupby

from tracereader.figures.moved import INPUTS
from tracereader.trace import Step
from tracereader.trace.types import Inputs, Tensor, dtype_of

# The number of tensors that an op reads. Compiled code calls ops with out=, and the tensor after these is the one that
# the op writes.
READ = {**INPUTS, "aten::mm": 2, "aten::bmm": 2, "aten::addmm": 3, "aten::baddbmm": 3}


def inputs_of(step: Step) -> dict[str, dict[str, int]]:
    """Return the number of calls by op and by description of the inputs. Only calls with recorded tensors count."""
    found = defaultdict(Counter)
    # Most ops of a step repeat the inputs of another one.
    for (name, inputs), calls in Counter([(op.name, op.inputs) for op in step.walk() if op.kind == "op"]).items():
        if words := _words(name, inputs):
            found[name][words] += calls
    return {name: dict(calls) for name, calls in found.items()}


def _words(op: str, inputs: Inputs) -> str:
    """Return the description of the tensors that an op reads, for example "fp32 [8, 64] [64, 64]"."""
    read = [one for one in inputs.tensors[: READ.get(op)] if one.type]
    by_type = groupby(read, key=_type)
    return ", ".join(f"{name} {' '.join(str(one.shape) for one in some)}" for name, some in by_type)


def _type(tensor: Tensor) -> str:
    dtype = dtype_of(tensor.type)
    return dtype.name if dtype else tensor.type
