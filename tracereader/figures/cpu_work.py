"""What the ops of a step multiply and move, and how fast: of a run on the CPU, where no kernel tells it."""

from collections.abc import Iterator

import msgspec

from tracereader.figures.sizes import INPUTS, MATMULS, Product, sizes_of_op
from tracereader.trace import Op, Step

WRITTEN_BY_INDUCTOR = "cpp_fused"


class CpuWork(msgspec.Struct, frozen=True):
    """One op that computes, with all that it calls. None: no shapes in the trace, or not known of this op."""

    name: str
    family: str  # matrix product or pointwise
    layer: str | None
    us: float
    product: Product | None
    flops: int | None
    tflops: float | None
    bytes_moved: int | None
    gb_s: float | None


def cpu_work(step: Step, layers: dict[int, str]) -> tuple[CpuWork, ...]:
    """The matrix products and pointwise ops of a step, in order. layers: by an op's id, as layers.py has them."""
    return tuple(_measured(op, layers) for root in step.roots for op in _computing(root))


def _computing(root: Op) -> Iterator[Op]:
    """The outermost ops that compute."""
    pending = [root]
    while pending:
        op = pending.pop()
        if op.kind == "op" and (op.name in MATMULS or op.name in INPUTS or WRITTEN_BY_INDUCTOR in op.name):
            yield op
        else:
            pending.extend(reversed(op.children))


def _measured(op: Op, layers: dict[int, str]) -> CpuWork:
    product, moved = sizes_of_op(op)
    layer = next((layers[id(one)] for one in (op, *op.above()) if id(one) in layers), None)
    return CpuWork(
        name=op.name,
        family="matrix product" if op.name in MATMULS else "pointwise",
        layer=layer,
        us=op.us,
        product=product,
        flops=product.flops if product else None,
        tflops=product.flops / op.us / 1e6 if product and op.dur else None,
        bytes_moved=moved,
        gb_s=moved / op.us / 1e3 if moved and op.dur else None,
    )
