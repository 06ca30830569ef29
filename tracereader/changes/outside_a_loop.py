"""Changes that take out of a loop over time what needs no other pass: layers before a state, and layers after it.

A layer whose backward computes no gradient of its input takes data, and the ops of one tensor behind it take its
result. The results of a layer stay apart if nothing else in a pass takes a tensor of their size. Loops that may hand
something on without a gradient are left out.
"""

import bisect
import math
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import chain, pairwise
from typing import NamedTuple

from tracereader.changes.change import change
from tracereader.changes.context import Case
from tracereader.changes.equal_passes import (
    FEWER_PRODUCTS,
    MANY_PASSES,
    Loop,
    after_a_cut,
    all_in_one,
    allowed,
    is_allowed,
    parts_in_turn,
)
from tracereader.changes.opportunity import Proposal
from tracereader.figures.phases import backward_begins, kept_by_step, nodes_by_forward
from tracereader.findings.finding import counted
from tracereader.trace import Op, Step, Trace, start_of
from tracereader.trace.grouped import grouped
from tracereader.trace.op_names import TAKES_A_PART

CAST_BACKWARD = "ToCopyBackward0"  # of a weight that autocast casts in the first pass alone
# What leaves autograd: whole numbers, draws from what was computed, numbers of Python, and what is written in place.
LEAVES = re.compile(
    r"aten::(arg\w+|sort|topk|multinomial|bernoulli|normal|poisson|binomial|item|detach|round|bucketize|nonzero|\w*[a-z]_)$"
).match
MAKES_ITS_OWN = re.compile(r"aten::((normal|uniform|exponential)_|(zeros|ones|full|rand|randn|arange)(_like)?)$").match
# Ops of one tensor beside weights: layers, what keeps the number of its elements, and what keeps its shape.
LINEAR, CONVOLVES = "aten::linear", re.compile(r"aten::conv(_transpose)?\dd$").match
LAYERS = re.compile(r"aten::(conv\w*|linear|\w*mm|matmul|einsum|\w*(rnn|lstm|gru)\w*)$").match
RESHAPES = re.compile(r"aten::(flatten|unflatten|view|reshape|squeeze|unsqueeze)$").match
SAME_SHAPE = re.compile(
    r"aten::(\w*[er]lu|gelu|silu|mish|tanh|sigmoid|softplus|dropout|exp|neg|log|sqrt|mul|div|add|sub|rsub|to|(layer|group|rms)_norm)$"
).match
MAKES_A_LOSS = re.compile(r"aten::(\w+_loss|broadcast_tensors)$").match
Nodes = Mapping[int, Sequence[Op]]  # of backward, by the start of their forward (ns)


class Passes(NamedTuple):
    """The ops of each pass of a loop, and the backward."""

    ops: list[list[Op]]
    nodes: Nodes

    def are_alike(self, place: int) -> bool:
        """Return whether the ops at this place of all passes have the same shapes and the same backward."""
        if any(len(one) <= place for one in self.ops):
            return False
        first, *others = [one[place] for one in self.ops]
        made = _backward(first, self.nodes)
        return all(
            (one.name, one.inputs.recorded) == (first.name, first.inputs.recorded)
            and _backward(one, self.nodes) == made
            for one in others
        )


@change("compute the inputs of a loop before it", "one call for all passes reaches good rates", followed=FEWER_PRODUCTS)
def loop_inputs(case: Case) -> Proposal | None:
    """Return a proposal to compute before a loop over time what its passes compute before they use a state."""
    how = "compute this for all passes before the loop, and take its results with unbind(dim)"
    return _outside(case, before_a_state, "computes layers that take only its part of a tensor", how)


@change("compute the outputs of a loop after it", "one call for all passes reaches good rates", followed=FEWER_PRODUCTS)
def loop_outputs(case: Case) -> Proposal | None:
    """Return a proposal to compute after a loop over time what its passes compute from a state, and no pass takes."""
    how = "collect the states in the loop (torch.stack), and compute this for all of them after it"
    return _outside(case, after_a_state, "computes layers whose results no other pass takes", how)


def _outside(case: Case, part: Callable[[Passes], tuple[int, int] | None], what: str, how: str) -> Proposal | None:
    if case.summary.waits_for != "overhead" or not case.trace.trains:
        return None

    def found(step: Step) -> list[Loop]:
        kept: list[Loop] = []
        for passes in () if allowed(case.trace, step) else all_passes(case.trace, step):
            if places := part(passes):
                ends = tuple(one[places[1] - 1].end for one in passes.ops)
                ops = passes.ops[1][slice(*places)]
                layer = next(filter(_is_layer, ops))
                sizes = " x ".join(f"{size:,}" for size in _shapes(layer)[0])
                which = f"{what} ({counted(len(ops), 'op')}; the first layer is {layer.name} with an input of {sizes})"
                loop = Loop(tuple(one[places[0]].start for one in passes.ops), ends[-1], which, ends)
                if is_allowed(case.trace, step, loop) and not any(map(loop.overlaps, kept)):
                    kept.append(loop)
        return kept

    in_steps, typical = case.in_each_step(found)
    return all_in_one(case, in_steps, typical, how) if typical else None


@kept_by_step
def all_passes(trace: Trace, step: Step) -> list[Passes]:
    """Return the passes of the loops that take a part of a tensor each, and hand on only what needs a gradient."""
    in_order, begins = nodes_by_forward(trace, step), backward_begins(trace, step)
    nodes = grouped((begun, node) for begun, node in in_order if not node.name.endswith(CAST_BACKWARD))
    found, runs = [], chain((run for *_, run in parts_in_turn(step)), (run for *_, run in after_a_cut(step)))
    for run in {run[0].start: run for run in runs}.values():
        if len(run) < MANY_PASSES or not nodes or any(run[0].start < one.start < run[-1].start for one in begins):
            continue
        ops = [op for op in step.outermost if op.kind == "op" and op.track == run[0].track and op.name != "aten::to"]
        places = [bisect.bisect_left(ops, op.start, key=start_of) for op in run]
        passes = [ops[begin:end] for begin, end in pairwise([*places, 2 * places[-1] - places[-2]])]
        if all(_stays(op, nodes) for one in passes[1:-1] for op in one):
            found.append(Passes(passes, nodes))
    return found


def _backward(op: Op, nodes: Nodes) -> list[tuple[str, object]]:
    """Return what the backward of an op does, and for which inputs, without the sums of gradients."""
    below = chain.from_iterable(node.walk() for one in op.walk() for node in nodes.get(one.start, ()))
    ops = (one for one in below if one.kind == "op" and one.name.rstrip("_") != "aten::add")
    return [(one.name, one.inputs.concrete[-1:] if one.name.endswith("_backward") else None) for one in ops]


def _stays(op: Op, nodes: Nodes) -> bool:
    """Return whether an op may not hand a state on without a gradient, as one that leaves autograd or is frozen may."""
    return bool(MAKES_ITS_OWN(op.name)) if LEAVES(op.name) else _has_backward(op, nodes) or not LAYERS(op.name)


def _is_layer(op: Op) -> bool:
    return op.name == LINEAR or bool(CONVOLVES(op.name))


def _has_backward(op: Op, nodes: Nodes) -> bool:
    return any(one.start in nodes for one in op.walk())


def _takes_data(op: Op, nodes: Nodes) -> bool:
    """Return whether a layer's backward computes the gradient of its weight, and none of its input."""
    made = _backward(op, nodes)
    if op.name == LINEAR:
        return sum(name == "aten::mm" for name, _ in made) == 1
    return any(name == "aten::convolution_backward" and str(last).startswith("['[False") for name, last in made)


def _shapes(op: Op) -> list[tuple[int, ...]]:
    """Return the shapes of the tensors that an op takes, those in lists, too, without weights and biases."""
    found: list[tuple[int, ...]] = []
    for one in op.inputs.recorded:
        found += map(tuple, one if one and isinstance(one[0], list) else [one] * bool(one))
    if op.name == LINEAR or CONVOLVES(op.name) or op.name.endswith("_norm"):
        return found[:1]
    return [shape for shape in found if len(shape) > 1 or max(map(len, found)) < 2]


def _follows(op: Op, before: Op | None) -> bool:
    """Return whether an op of one tensor may take the result of the op before it, as far as shapes tell."""
    shapes, given = _shapes(op), _shapes(before) if before is not None else []
    if len(shapes) != 1 or not given:
        return False
    if RESHAPES(before.name):
        return math.prod(shapes[0]) == math.prod(given[0])
    result = _result(before)
    return shapes[0][: len(result)] == result and (len(result) == len(shapes[0]) or len(given[0]) == len(shapes[0]))


def _result(op: Op) -> tuple[int, ...]:
    """Return the shape of the result of an op of one tensor; of a convolution, its first two sizes."""
    given, weight = _shapes(op)[0], op.inputs.dims_at(1) or [0, 0]
    if op.name == LINEAR:
        return (*given[:-1], weight[0])
    return (given[0], weight["transpose" in op.name]) if CONVOLVES(op.name) else given


def before_a_state(passes: Passes) -> tuple[int, int] | None:
    """Return the places of the first op and the one after the last of those that take only a part of a tensor.

    A layer whose input needs no gradient takes data. What follows takes its result, if the shapes allow it.
    """
    ops, last, end = passes.ops[1], None, 0
    for place, op in enumerate(ops):
        is_layer, is_part = _is_layer(op), op.name in TAKES_A_PART
        is_known = is_layer or is_part or SAME_SHAPE(op.name) or RESHAPES(op.name)
        # Layers in a row have inputs of their own, as a cell's product of its input and that of its state.
        in_a_row = is_layer and place > 0 and _is_layer(ops[place - 1])
        if not is_known or in_a_row or len(_shapes(op)) != 1 or not passes.are_alike(place):
            break
        follows = last is not None and _follows(op, last) and _has_backward(op, passes.nodes)
        if not (follows or is_part or (_takes_data(op, passes.nodes) if is_layer else last is None)):
            break
        if is_layer or (last is not None and not is_part):
            last, end = op, end if RESHAPES(op.name) else place + 1
    weights = {tuple(op.inputs.dims_at(1) or ()) for op in ops[:end] if _is_layer(op)}
    others = {shape for op in ops if not LAYERS(op.name) for shape in _shapes(op)}
    return (0, end) if end and weights.isdisjoint(others) else None


def after_a_state(passes: Passes) -> tuple[int, int] | None:
    """Return the places of a layer, and the op after the last of those that take its result, if no other op does."""
    ops = passes.ops[1]
    since = (before_a_state(passes) or (0, 0))[1]  # what comes before takes no result
    for begin in range(since, len(ops)):
        end, last, made = begin, None, set()
        while end < len(ops) and passes.are_alike(end):
            op, shapes = ops[end], _shapes(ops[end])
            of_data = last is not None and op.name in TAKES_A_PART and math.prod(shapes[0]) not in made
            if not (_is_layer(op) or of_data or (last is not None and (not shapes or _takes_result(op, last)))):
                break
            end += 1
            if not of_data:
                last = op
                made |= {math.prod(_result(op))} if shapes else set()
        if end > begin and _is_apart(ops[begin:end], ops[since:begin] + ops[end:], passes.nodes):
            return begin, end
    return None


def _takes_result(op: Op, last: Op) -> bool:
    """Return whether an op changes the result of the one before it, and nothing else, or makes a loss of it."""
    if MAKES_A_LOSS(op.name):
        return bool(_shapes(last)) and _result(last) in _shapes(op)
    return bool(SAME_SHAPE(op.name) or RESHAPES(op.name)) and _follows(op, last)


def _is_apart(part: Sequence[Op], rest: Sequence[Op], nodes: Nodes) -> bool:
    """Return whether no op of the rest takes a tensor of as many elements as a result of the part has.

    A smaller factor may have: if it were a result, its gradient would be a sum.
    """
    others = []
    for op in rest:
        shapes = _shapes(op)
        most = max(map(math.prod, shapes), default=0)
        is_factor = op.name == "aten::mul" and not any(name == "aten::sum" for name, _ in _backward(op, nodes))
        others += [shape for shape in shapes if not is_factor or math.prod(shape) == most]
    sizes = {math.prod(shape) for shape in others}
    starts = {(len(shape), shape[:2]) for shape in others}
    return not any(
        (len(_shapes(op)[0]), _result(op)) in starts if CONVOLVES(op.name) else math.prod(_result(op)) in sizes
        for op in part
        if _shapes(op) and not MAKES_A_LOSS(op.name) and op.name not in TAKES_A_PART
    )
