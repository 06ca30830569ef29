"""FLOPs, bytes and rates of the ops of a CPU run."""

from collections.abc import Iterator, Sequence

import msgspec

from tracereader.figures.attention import ATTENTION, Attention
from tracereader.figures.hardware import roof_met
from tracereader.figures.moved import INPUTS
from tracereader.figures.sizes import Product, sizes_of_op
from tracereader.trace import Op, Step, Trace, all_around, outermost
from tracereader.trace.facts import Roofs, RunFacts
from tracereader.trace.intervals import clipped, length, union
from tracereader.trace.labels import COLLECTIVE, COMPILING, INDUCTORS_CALL, LOADER
from tracereader.trace.op_names import MATMULS
from tracereader.trace.types import dtype_of

MUCH_FASTER = 1.1  # if a rate exceeds the measured limit by this factor, the limit was not measured properly
# Bytes that a cache may hold. The rate of a smaller pointwise op says nothing about the memory.
CACHED = 2**25


class CpuWork(msgspec.Struct, frozen=True):
    """One op that computes, with all calls below it. A field is None if the trace does not show it."""

    name: str
    family: str  # matrix product, attention or pointwise
    layer: str | None
    type: str  # of its elements, as torch writes it
    start_us: float  # from the step's start
    us: float
    product: Product | None
    attention: Attention | None
    flops: int | None
    tflops: float | None
    bytes_moved: int | None
    least_bytes: int | None  # of factors and result, or the bytes moved
    gb_s: float | None
    roof: str | None = None  # compute or memory: the limit that it is closer to
    of_roof: float | None = None  # the achieved share of that limit


def outside_ops(trace: Trace, step: Step) -> float | None:
    """Return the share of a step in which no op is open on any thread, and no annotation in which torch works or waits.

    None for a step without an op.
    """
    near = [root for some in trace.steps if some.start < step.end for root in some.roots if root.end > step.start]
    roots = [*near, *(root for root in trace.outside if root.start < step.end and root.end > step.start)]
    covered = list(outermost(roots, lambda one: is_op(one) or (one.kind == "label" and _is_recorded(one.name))))
    if not any(one.kind == "op" for one in covered) or step.end <= step.start:
        return None
    inside = union(clipped(((one.start, one.end) for one in covered), step.start, step.end))
    return 1 - length(inside) / (step.end - step.start)


def _is_recorded(label: str) -> bool:
    """Return whether torch works or waits in this annotation of its own: a collective, or a DataLoader's next batch."""
    return label.startswith(LOADER) or COLLECTIVE.match(label) is not None


def is_op(call: Op) -> bool:
    """Return whether the call is an op, or runs Inductor's code, which torch 2.15 records as an annotation."""
    return call.kind == "op" or call.name.startswith(INDUCTORS_CALL)


def cpu_work(step: Step, layers: dict[int, str], run: RunFacts) -> tuple[CpuWork, ...]:
    """Return the matrix products, attention and pointwise ops of a step, in order.

    layers: the model's layers by an op's id, see layers.py. run: holds the best rates that the run measured on its
    machine, if it measured any.
    """
    # Another op does their work, or they do none (meta device), or they use only some elements.
    inner = (op for op in step.walk() if op.name in MATMULS or "sparse" in op.name or op.name == "aten::new_empty")
    made = set(all_around(op.parent for op in inner))
    computing = outermost(
        step.roots, lambda op: op.name.endswith(COMPILING) or (op.kind == "op" and _family(op) and id(op) not in made)
    )
    # Ops that a compilation traces compute nothing. An op that calls the CUDA runtime computes on a GPU, whose records
    # may be missing, and returns before the work is done.
    found = [
        _measured(op, step.start, layers)
        for op in computing
        if not op.name.endswith(COMPILING) and all(one.kind != "runtime" for one in op.walk())
    ]
    return tuple(_against(found, run.roofs, run.dtype) if run.roofs else found)


def covered_us(work: Sequence[CpuWork]) -> float:
    """Return the time (µs) in which at least one of these ops ran. Concurrent threads count once."""
    return length(union((one.start_us, one.start_us + one.us) for one in work))


def _family(op: Op) -> str | None:
    for names, family in ((MATMULS, "matrix product"), (ATTENTION, "attention"), (INPUTS, "pointwise")):
        if op.name in names:
            return family
    return "pointwise" if "cpp_fused" in op.name else None  # Inductor wrote it


def _measured(op: Op, step_start: int, layers: dict[int, str]) -> CpuWork:
    first = next(iter(op.inputs.tensors), None)
    given = first.type if first and first.item else ""  # only elements of known size
    shape, moved = sizes_of_op(op) if given else (None, None)  # a product of complex numbers has more FLOPs
    flops = shape.flops if shape else None
    return CpuWork(
        name=op.name,
        family=_family(op),
        layer=next((layers[id(one)] for one in (op, *op.above()) if id(one) in layers), None),
        type=given,
        start_us=(op.start - step_start) / 1e3,
        us=op.us,
        product=shape if isinstance(shape, Product) else None,
        attention=shape if isinstance(shape, Attention) else None,
        flops=flops,
        tflops=flops / op.us / 1e6 if flops and op.dur else None,
        bytes_moved=moved,
        least_bytes=shape.elements * first.item if shape else moved,
        gb_s=moved / op.us / 1e3 if moved and op.dur else None,
    )


def _against(found: Sequence[CpuWork], roofs: Roofs, dtype: str) -> Iterator[CpuWork]:
    """Yield the same ops with their shares of the limit that applies: memory below the ridge point, else arithmetic."""
    of_type = [one.tflops for one in found if one.tflops and _is_of(one.type, dtype)]
    # If the run exceeds a measured limit, something else ran during that measurement.
    holds = max(of_type, default=0.0) <= MUCH_FASTER * roofs.tflops
    # If a cache cannot hold all factors together, each is read from memory in every step, however small it is.
    large = sum(one.least_bytes or 0 for one in found if one.flops) > CACHED
    for one in found:
        known = _is_of(one.type, dtype) and not (one.attention and one.attention.causal is None)
        least_gb_s = one.least_bytes / one.us / 1e3 if one.least_bytes and one.us else None
        roof, share = roof_met(one.tflops, least_gb_s, roofs.tflops, roofs.gb_s) or (None, None)
        reliable = roof == "compute" and known and holds
        if roof == "memory":  # a higher rate than memory's comes out of a cache
            reliable = share <= 1 and (one.least_bytes > CACHED if one.flops is None else known and large)
        yield msgspec.structs.replace(one, roof=roof, of_roof=min(share, 1.0)) if reliable else one


def _is_of(written: str, name: str) -> bool:
    dtype = dtype_of(written)
    return dtype is not None and dtype.name == name
