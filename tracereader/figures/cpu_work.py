"""What the ops of a step multiply and move, and how fast: of a run on the CPU, where no kernel tells it."""

import math
from collections.abc import Iterator

import msgspec

from tracereader.figures.attention import ATTENTION, Attention
from tracereader.figures.sizes import BYTES_OF, INPUTS, MATMULS, Product, sizes_of_op
from tracereader.trace import Lesson, Op, Step

# Bytes that a cache may hold: what a pointwise op moves at which rate then says nothing of the memory.
CACHED = 2**25
WRITTEN_BY_INDUCTOR = "cpp_fused"


ITEM = {"bf16": "c10::BFloat16", "fp16": "c10::Half", "fp32": "float"}


class Roofs(msgspec.Struct, frozen=True):
    """TFLOP/s and GB/s, the best that a run measured on its machine; the first for elements of this type alone."""

    tflops: float
    gb_s: float
    type: str


def roofs_of(lesson: Lesson | None) -> Roofs | None:
    """What a numbered script stored of its machine; None where it did not, or not usably."""
    found = lesson.facts.get("roofs") if lesson else None
    rates = [found.get(name) for name in ("tflops", "gb_s")] if isinstance(found, dict) else []
    if not rates or not all(type(one) in (int, float) and math.isfinite(one) and one > 0 for one in rates):
        return None
    return Roofs(*rates, ITEM.get(str(lesson.flags.get("dtype")), ""))


class CpuWork(msgspec.Struct, frozen=True):
    """One op that computes, with all that it calls. None: no shapes in the trace, or not known of this op."""

    name: str
    family: str  # matrix product, attention or pointwise
    layer: str | None
    us: float
    product: Product | None
    attention: Attention | None
    flops: int | None
    tflops: float | None
    bytes_moved: int | None
    gb_s: float | None
    roof: str | None  # compute or memory: the one that it is nearer to
    of_roof: float | None  # the share of it that it reaches


def cpu_work(step: Step, layers: dict[int, str], roofs: Roofs | None) -> tuple[CpuWork, ...]:
    """The matrix products and pointwise ops of a step, in order. layers: by an op's id, as layers.py has them."""
    return tuple(_measured(op, layers, roofs) for root in step.roots for op in _computing(root))


def _computing(root: Op) -> Iterator[Op]:
    """The outermost ops that compute."""
    pending = [root]
    while pending:
        op = pending.pop()
        if op.kind == "op" and _family(op):
            yield op
        else:
            pending.extend(reversed(op.children))


def _family(op: Op) -> str | None:
    for names, family in ((MATMULS, "matrix product"), (ATTENTION, "attention"), (INPUTS, "pointwise")):
        if op.name in names:
            return family
    return "pointwise" if WRITTEN_BY_INDUCTOR in op.name else None


def _measured(op: Op, layers: dict[int, str], roofs: Roofs | None) -> CpuWork:
    shape, moved = sizes_of_op(op)
    flops = shape.flops if shape else None
    layer = next((layers[id(one)] for one in (op, *op.above()) if id(one) in layers), None)
    tflops = flops / op.us / 1e6 if flops and op.dur else None
    gb_s = moved / op.us / 1e3 if moved and op.dur else None
    reached = _reached(op, shape, moved, tflops, roofs) if roofs and op.dur else {}
    roof = max(reached, key=reached.get, default=None)
    return CpuWork(
        name=op.name,
        family=_family(op),
        layer=layer,
        us=op.us,
        product=shape if isinstance(shape, Product) else None,
        attention=shape if isinstance(shape, Attention) else None,
        flops=flops,
        tflops=tflops,
        bytes_moved=moved,
        gb_s=gb_s,
        roof=roof,
        of_roof=reached.get(roof),
    )


def _reached(
    op: Op, shape: Product | Attention | None, moved: int | None, tflops: float | None, roofs: Roofs
) -> dict[str, float]:
    """The share of each roof, as far as it is known."""
    reached, given = {}, _type_of(op)
    not_told = isinstance(shape, Attention) and shape.causal is None  # a causal mask halves its FLOPs
    if tflops and given == roofs.type and not not_told:
        reached["compute"] = min(tflops / roofs.tflops, 1.0)  # where it is the best itself
    least = moved or (shape.elements * BYTES_OF.get(given, 0) if shape else 0)
    share = least / op.us / 1e3 / roofs.gb_s
    if least > CACHED and share <= 1:  # what is faster than memory comes out of a cache, too
        reached["memory"] = share
    return reached


def _type_of(op: Op) -> str:
    """Of its first input that is a tensor, as torch writes it."""
    types = op.args.get("Input type")
    named = [one for one in types if isinstance(one, str)] if isinstance(types, list) else []
    return next((one for one in named if one in BYTES_OF), "")
