"""Calls of flex_attention that is not compiled, which runs ops for the scores of all queries with all keys."""

from collections import Counter, defaultdict

from tracereader.trace import Op, Step
from tracereader.trace.labels import FLEX_ATTENTION, INDUCTORS_CALL, REGION
from tracereader.trace.op_names import LOGSUMEXP, MATMULS, SAFE_SOFTMAX


def uncompiled_flex(step: Step) -> dict[int, Op]:
    """Return for each op inside an uncompiled flex_attention, by id(Op), the call that it belongs to.

    A call is an op that autograd names: flex_attention's forward or its backward. The forward calls torch.compile with
    a backend that runs the ops as they are. If a region of torch.compile holds one forward and no other product, the
    whole region is the call. Under inference_mode only this region is recorded.
    """
    if not step.named(lambda name: name.startswith((FLEX_ATTENTION, SAFE_SOFTMAX))):
        return {}
    region: dict[int, Op] = {}  # id(Op) -> the innermost region of torch.compile around it, or itself
    names: dict[int, Counter] = defaultdict(Counter)  # id of a region -> its ops' names, without regions inside it
    for op in step.walk():
        here = op if op.name.startswith(REGION) else region.get(id(op.parent))
        if here is not None:
            region[id(op)] = here
            names[id(here)][op.name] += 1
    found: dict[int, Op] = {}
    for op in step.walk():
        if (call := found.get(id(op.parent))) is not None:
            found[id(op)] = call
        elif (op.kind == "op" and op.name.startswith(FLEX_ATTENTION)) or (
            region.get(id(op)) is op and _is_one_forward(names[id(op)])
        ):
            found[id(op)] = op
    return found


def _is_one_forward(names: Counter) -> bool:
    """Return whether a region with ops of these names is one uncompiled forward of flex_attention."""
    compiled = any(name.startswith(INDUCTORS_CALL) for name in names)
    forwards = names[FLEX_ATTENTION] or (names[SAFE_SOFTMAX] if names[LOGSUMEXP] else 0)
    return forwards == 1 and not compiled and sum(names[name] for name in MATMULS) == 2
