"""Attention that is not fused: a softmax between two batched products, and the cost of its scores."""

import math
from collections.abc import Sequence

import msgspec

from tracereader.figures.moved import BOOLEAN_RESULT
from tracereader.figures.sizes import product, without_ones
from tracereader.figures.steps import self_us
from tracereader.trace import Op, Step, Work
from tracereader.trace.families import says
from tracereader.trace.grouped import grouped
from tracereader.trace.op_names import ADDS, BATCHED, MATMULS, SDPA, SOFTMAX

# Families that may lie between the two products: scale, mask, cast, dropout, the softmax itself, and copies.
BETWEEN = ("pointwise", "copy", "reduction", "memset")
# Ops whose result has one element per row.
RESULT_PER_ROW = ("all", "any", "sum", "amax", "amin", "max", "argmax", "mean", "logsumexp")
DIVIDES = ("aten::div", "aten::div_")
# The number of arguments of ops that may be called with out=. One more argument is the output.
ARGUMENTS = {"where": 3, "add": 3, "sub": 3, "mul": 2, "div": 2, "_softmax": 3}


class Scores(msgspec.Struct, frozen=True):
    """The matrix [batch x heads, queries, keys], as recorded shapes describe it.

    written and read: how often the GPU activities from the first product to the second write and read it as a whole.
    moved: the bytes written and read. at_least: the bytes of query, key, value and result, which a fused kernel moves.
    """

    batch: int
    queries: int
    keys: int
    bytes: int  # as the first product writes it
    written: int
    read: int
    moved: int
    at_least: int


class Unfused(msgspec.Struct, frozen=True):
    """One attention that is not fused. us: GPU time between its two products (CPU time of the ops there, on a CPU).

    pieces: the number of GPU activities; 0 on a CPU. scores: only on a GPU with recorded shapes.
    """

    us: float
    pieces: int
    products_us: float
    scores: Scores | None


def unfused(step: Step) -> tuple[Unfused, ...]:
    """Return a step's attention that is not fused, in the order of the softmax."""
    if not step.work:
        return tuple(
            Unfused(sum(map(self_us, between)), 0, one.us + last.us, None) for one, between, last in on_the_cpu(step)
        )
    tracks = grouped((one.track, (one, op)) for one, op in zip(step.work, step.asking, strict=True))
    places = ((track, number, *entry) for track in tracks.values() for number, entry in enumerate(track))
    return tuple(filter(None, (_around(track, number) for track, number, *one in places if _is_softmax(*one))))


def on_the_cpu(step: Step) -> list[tuple[Op, list[Op], Op]]:
    """Return each attention that is not fused, for a step without GPU work: its two products and the ops between them.

    The order of the ops decides: a softmax whose nearest products on both sides are batched ones. The ops between them
    include those that they call.
    """
    found, product_before, between = [], None, []
    for op in step.walk():
        if op.kind != "op":
            continue
        if op.name in MATMULS:
            softmaxes = [one for one in between if one.name == SOFTMAX]
            beside = len(softmaxes) == 1 and op.name in BATCHED and op.track == product_before.track
            after = between[between.index(softmaxes[0]) + 1 :] if beside else []
            if beside and _may_attend(product_before, softmaxes[0], op, after):
                found.append((product_before, between, op))
            product_before, between = op if op.name in BATCHED else None, []
        elif product_before is not None and op.start >= product_before.end:
            between.append(op)
    return found


def _is_softmax(one: Work, op: Op | None) -> bool:
    if op is not None and op.name == SOFTMAX:
        return one.kind == "kernel"
    said = says(one).parts.get("fuses", "")
    return "softmax" in said and "log_softmax" not in said and "backward" not in said


def _around(track: Sequence[tuple[Work, Op | None]], softmax: int) -> Unfused | None:
    first, last = _product_beside(track, softmax, -1), _product_beside(track, softmax, 1)
    after = [op for _, op in track[softmax + 1 : last or 0] if op is not None]
    if first is None or last is None or not _may_attend(*(track[place][1] for place in (first, softmax, last)), after):
        return None
    between = [
        (one, op) for one, op in track[first + 1 : last] if one.kind != "memset" and not (op and op.name in BATCHED)
    ]
    products = [one for one, op in track[first : last + 1] if one.kind == "kernel" and op and op.name in BATCHED]
    return Unfused(
        us=sum(one.dur for one, _ in between) / 1e3,
        pieces=len(between),
        products_us=sum(one.dur for one in products) / 1e3,
        scores=_scores(track[first][1], track[last][1], between),
    )


def _may_attend(first: Op, softmax: Op | None, last: Op, after: Sequence[Op]) -> bool:
    """Return whether the recorded shapes, if any, are those of attention. after: the ops between softmax and last.

    The second product takes the first one's result (queries x keys) and gives the queries' size; the softmax has as
    many elements as the scores.
    """
    scores, result = product(first.name, first.inputs.dims), product(last.name, last.inputs.dims)
    if scores is None or result is None:
        return True
    rows = scores.batch * scores.m
    # In compiled code the softmax is one of a kernel's ops, and its shape is not recorded.
    of = softmax.inputs.dims[:1] if softmax is not None and softmax.name == SOFTMAX else []
    # A learned sink (gpt-oss) adds one key, for the softmax only.
    if of and (math.prod(of[0]) not in (rows * scores.n, rows * (scores.n + 1)) or not _gives_weights(softmax, after)):
        return False
    return (scores.batch, scores.m, scores.n, scores.k) == (result.batch, result.m, result.k, result.n)


def _gives_weights(softmax: Op, after: Sequence[Op]) -> bool:
    """Return whether a softmax is over the keys, and the ops after it use its result as attention does.

    A fused kernel adds nothing to that result and divides it by no tensor, as slot attention does, and as a memory does
    that mixes several kinds of weights.
    """
    (dims, *_), over = softmax.inputs.dims, softmax.inputs.argument(1)
    changing = (op for op in after if op.name in ADDS or (op.name in DIVIDES and op.inputs.dims_at(1)))
    taken = [without_ones(one) for op in changing for one in op.inputs.dims]
    return over in (None, "", "-1", str(len(dims) - 1)) and without_ones(dims) not in taken


def _product_beside(track: Sequence[tuple[Work, Op | None]], softmax: int, way: int) -> int | None:
    """Return the position of the nearest batched product, if only families of BETWEEN lie before it; else None."""
    at = softmax + way
    while 0 <= at < len(track):
        one, op = track[at]
        family = says(one).family
        if family == "GEMM":
            return at if op is not None and op.name in BATCHED else None
        if family not in BETWEEN or _is_softmax(one, op):
            return None
        at += way
    return None


def _scores(first: Op, last: Op, between: Sequence[tuple[Work, Op | None]]) -> Scores | None:
    into, out_of = first.inputs.tensors, last.inputs.tensors
    scores = product(first.name, [one.shape for one in into])
    result = product(last.name, [one.shape for one in out_of])
    if not (scores and result and into[0].item and out_of[0].item):
        return None
    item, other = into[0].item, out_of[0].item
    elements = scores.batch * scores.m * scores.n
    written, read, moved = 1, 1, elements * (item + other)
    # By op, because several kernels of one op read its inputs once.
    for one, op in {id(op): (one, op) for one, op in reversed(between) if op is not None}.values():
        reads, writes = _passes(op, one.name, elements)
        written, read, moved = written + len(writes), read + len(reads), moved + elements * sum(reads + writes)
    least = _given(first)
    if least is None:
        inputs = scores.batch * (scores.m * scores.k + scores.k * scores.n + result.k * result.n + result.m * result.n)
        least = inputs * min(item, other)
    return Scores(scores.batch, scores.m, scores.n, elements * item, written, read, moved, least)


def _given(product: Op) -> int | None:
    """Return the bytes of query, key, value and result of the scaled_dot_product_attention around this product.

    Its math backend casts two bytes to four before it multiplies, and writes shared keys out for each head.
    """
    asked = next((op for op in product.above() if op.name == SDPA), None)
    given = asked.inputs.tensors[:3] if asked is not None else []
    if len(given) < 3 or any(one.item is None for one in given):
        return None
    query, _, value = given
    result = math.prod(query.shape[:-1]) * value.shape[-1] * query.item
    return result + sum(math.prod(one.shape) * one.item for one in given)


def _passes(op: Op, kernel: str, elements: int) -> tuple[list[int], list[int]]:
    """Return the bytes per element of each tensor of the scores' size that the op reads, and of each that it writes."""
    items = [one.item for one in op.inputs.tensors if one.stored == elements and one.item]
    name = op.name.removeprefix("aten::")
    if not items:
        return [], []
    if name == "copy_":
        return items[1:], items[:1]  # the source comes second
    if len(op.inputs.recorded) > ARGUMENTS.get(name, math.inf):
        return items[:-1], items[-1:]
    if op.name == kernel:  # Inductor's row lists its output among its inputs, unless it works in place
        return (items[:-1], items[-1:]) if len(items) > 1 else (items, items)
    if name in RESULT_PER_ROW:
        return items, []
    return items, [1] if op.name in BOOLEAN_RESULT or name == "bitwise_not" else [max(items)]
