"""The types and sizes of the input tensors of a step's ops, as torch recorded them."""

from functools import lru_cache
from itertools import groupby

import msgspec

from tracereader.figures.moved import INPUTS
from tracereader.figures.steps import self_us
from tracereader.trace import Step
from tracereader.trace.grouped import totals
from tracereader.trace.types import Inputs, dtype_of

# The number of tensors that an op reads. Compiled code calls ops with out=, and the op writes the tensor after these.
READ = {**INPUTS, "aten::mm": 2, "aten::bmm": 2, "aten::addmm": 3, "aten::baddbmm": 3}


class OfInputs(msgspec.Struct):
    """The calls of an op with the same inputs, in µs. self_us: without the ops inside. gpu_us: of the GPU activities
    that the op launches itself; overlapping ones count in full."""

    name: str
    inputs: str
    calls: int = 0
    self_us: float = 0.0
    gpu_us: float = 0.0


def by_inputs(step: Step) -> list[OfInputs]:
    """Return a step's ops with recorded tensors by the description of their inputs, in the order of first calls."""
    launches = ((one.launch.above(), one.dur) for one in step.work if one.launch is not None)
    asking = ((next((op for op in above if op.kind == "op"), None), ns) for above, ns in launches)
    launched = totals((id(op), ns) for op, ns in asking)
    found = {}
    for op in step.walk():
        if op.kind == "op" and (words := _words(op.name, op.inputs)):
            row = found.setdefault((op.name, words), OfInputs(op.name, words))
            row.calls += 1
            row.self_us += self_us(op)
            row.gpu_us += launched[id(op)] / 1e3
    return list(found.values())


@lru_cache(4096)  # most ops of a step repeat the inputs of another one
def _words(op: str, inputs: Inputs) -> str:
    """Return the description of the tensors that an op reads, for example "fp32 [8, 64] [64, 64]"."""
    read = [one for one in inputs.tensors[: READ.get(op)] if one.type]
    by_type = groupby(read, key=lambda one: getattr(dtype_of(one.type), "name", one.type))
    return ", ".join(f"{name} {' '.join(str(one.shape) for one in some)}" for name, some in by_type)
