"""A model's layer names of its matrix products, if the run stored them in the trace."""

from collections import Counter

from tracereader.trace import Step, Trace
from tracereader.trace.families import says
from tracereader.trace.labels import HOLDS_MANY_LAYERS
from tracereader.trace.op_names import MATMULS
from tracereader.trace.slices import asking_ops


def layer_names(trace: Trace, step: Step) -> dict[int, str]:
    """Return the layer of each op and GPU activity of the step that has one, by its id.

    The run's fact "layers" names the matrix products of a step in the order of the forward pass. The outermost op that
    contains only one such product gets its name. Empty if the trace has no such fact, or another number of products.
    """
    names = trace.facts.layers
    if not names:
        return {}
    found: dict[int, str] = {}
    if any(one.work for one in trace.steps):
        products = [one for one in step.work if says(one).multiplies]
        ops = asking_ops(products)
        found = {id(one): name for one, name in zip(products, names, strict=False)}
    else:
        ops = [op for op in step.walk() if op.name in MATMULS]
    if len(ops) != len(names):
        return {}
    holds = Counter(id(one) for op in ops if op for one in (op, *op.above()))  # the number of products inside an op
    for op, name in zip(ops, names, strict=True):
        outermost = None
        for one in (op, *op.above()) if op else ():
            if one.kind != "op" or holds[id(one)] > 1 or one.name.startswith(HOLDS_MANY_LAYERS):
                break
            outermost = one
        if outermost is not None:
            found[id(outermost)] = name
    return found
