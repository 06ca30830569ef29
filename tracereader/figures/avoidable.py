"""Work that a step may not need: hidden copies, offloaded activations, masks, casts to fp32 before a product."""

import math
from collections import defaultdict
from collections.abc import Sequence

import msgspec

from tracereader.figures.gpu_work import launch_args
from tracereader.figures.phases import in_backward
from tracereader.figures.sizes import product
from tracereader.trace import Op, Step, Trace, Work
from tracereader.trace.families import says
from tracereader.trace.grouped import grouped
from tracereader.trace.op_names import COPYING, MATMULS, SDPA_MATH
from tracereader.trace.types import dtype_of

# Ops that make a tensor of constants.
MAKES = ("ones", "zeros", "full", "ones_like", "zeros_like", "full_like", "new_ones", "new_zeros", "new_full")
# Ops that accompany them when a mask is made.
MASK_OPS = ("empty", "fill_", "zero_", "to", "scalar_tensor", "where", "view", "unsqueeze", "expand", "as_strided")
# Ops around a product that only dispatch to it.
DISPATCHERS = ("aten::matmul", "aten::linear", "aten::einsum", "aten::to", "aten::_to_copy", *MATMULS)
# Activations of fewer bytes are not offloaded. Some ops copy small inputs to the CPU, such as the lengths of ctc_loss.
OFFLOADED_BYTES = 1 << 20
# cuDNN's attention builds a plan for each shape that is new to the process. Such a call takes the CPU 34 ms beside an
# H200, 73 ms beside an H100 and 440 ms beside a B200 (github.com/modelscope/FunASR, issue 3704). Any other call takes
# 0.05 to 0.2 ms while the profiler records, and does not reach this time (µs) even on a CPU that is much slower.
CUDNN_ATTENTION, PLAN_US = "_cudnn_attention", 5_000


class HiddenCopy(msgspec.Struct, frozen=True):
    """Copies that an op makes to preserve its input: it clones it and calls its own in-place variant on the clone.

    copied: bytes that the memcpys read and write. cpu_us: the CPU time of the clones.
    """

    op: str
    calls: int
    gpu_us: float
    cpu_us: float
    copied: int | None


class MaskMade(msgspec.Struct, frozen=True):
    """Triangular masks of constants that a step makes. ops: the ops that make them.

    times: the number of masks. pieces: the number of GPU activities. steps: the number of recorded steps that make one.
    """

    ops: tuple[str, ...]
    times: int
    pieces: int
    gpu_us: float
    cpu_us: float
    steps: int


class CastProducts(msgspec.Struct, frozen=True):
    """fp32 products whose factors were cast to fp32 just before. cast_us: the time of these casts."""

    products: int
    products_us: float
    casts: int
    cast_us: float


def hidden_copies(step: Step) -> tuple[HiddenCopy, ...]:
    """Return the hidden copies of a step by the op that makes them, the costliest first."""
    copies = []
    for name, clones in cloned_inputs(step).items():
        work = [one for clone in clones for one in clone.work_below()]
        sizes = [launch_args(one).bytes for one in work if one.kind == "memcpy"]
        gpu_us, cpu_us = sum(one.dur for one in work) / 1e3, sum(clone.us for clone in clones)
        copied = 2 * sum(sizes) if sizes and None not in sizes else None
        copies.append(HiddenCopy(op=name, calls=len(clones), gpu_us=gpu_us, cpu_us=cpu_us, copied=copied))
    return tuple(sorted(copies, key=lambda one: (-one.gpu_us, -one.cpu_us)))


def cloned_inputs(step: Step) -> dict[str, list[Op]]:
    """Return the clones that ops work on in place, by the name of the op that preserves its input."""
    clones = step.named("aten::clone".__eq__)
    cloning = {id(clone.parent): clone.parent.name for clone in clones if clone.parent is not None}
    ops = (op for op in step.named(set(cloning.values()).__contains__) if id(op) in cloning and op.kind == "op")
    return grouped((op.name, clone) for op in ops if (clone := _clone_of(op)))


def _clone_of(op: Op) -> Op | None:
    """Return the clone that an op works on in place, if it makes one."""
    clone = None
    for child in op.children:
        if child.name == "aten::clone":
            clone = child
        elif clone is not None and child.name == op.name + "_":
            # A result larger than the input cannot be written in place.
            given, made = op.inputs.dims[:1], child.inputs.dims[:1]
            return None if given and made and math.prod(made[0]) > math.prod(given[0]) else clone
    return None


def offloading(step: Step) -> list[Op]:
    """Return the ops that copy activations to the CPU in forward, and those that copy them back in backward.

    Hooks for saved tensors (torch.autograd.graph.save_on_cpu) run inside the ops that save the tensors, and inside
    backward's. A copy out counts if backward copies as many bytes back. The memory's allocation is among the ops.
    """
    out: list[tuple[Op, int]] = []
    back: dict[int, list[Op]] = defaultdict(list)
    for one in step.work:
        if one.kind != "memcpy" or one.launch is None:
            continue
        op, copied = one.launch.outermost_of(COPYING.__contains__), launch_args(one).bytes
        if not copied or op is None or op.parent is None or op.parent.kind != "op":
            continue
        if "HtoD" in one.name and in_backward(op):
            back[copied].append(op)
        elif "DtoH" in one.name and not in_backward(op):
            out.append((op, copied))
    found, total = [], 0
    for op, copied in out:
        if back[copied]:
            total += copied
            before = [one for one in op.parent.children if one.start < op.start][-1:]
            found += [one for one in before if one.name.startswith("aten::empty")] + [op, back[copied].pop()]
    return found if total >= OFFLOADED_BYTES else []


def planning(steps: Sequence[Step]) -> dict[str, tuple[list[Op], list[Op]]]:
    """Return the calls of cuDNN's attention in these steps that build a plan, and the others, by the op's name.

    Only the time outside of CUDA calls decides, because a launch call may wait for room in the launch queue. A call
    with the same recorded inputs as an earlier one of its thread has its plan. Ops that build no plan are left out.
    """
    found: dict[str, tuple[list[Op], list[Op]]] = {}
    planned = set()  # by thread, as cuDNN's plans are in torch
    for step in steps:
        for op in step.named(lambda name: CUDNN_ATTENTION in name):
            if op.kind == "op" and not any(CUDNN_ATTENTION in above.name for above in op.above()):
                inputs = (op.track, op.name, id(op.inputs))  # ops with equal inputs share one object
                in_calls = sum(call.us for call in op.walk() if call.kind == "runtime") if op.us > PLAN_US else 0.0
                plans = op.us - in_calls > PLAN_US and inputs not in planned
                if op.inputs.dims:
                    planned.add(inputs)
                found.setdefault(op.name, ([], []))[not plans].append(op)
    return {name: calls for name, calls in found.items() if calls[0]}


def mask_made(trace: Trace, step: Step) -> MaskMade | None:
    """Return the triangular masks that a step makes; None if it makes no such mask."""
    made = triangles(step)
    if not made:
        return None
    ops = [op for group in made for op in group]
    work = [one for op in ops for one in op.work_below()]
    return MaskMade(
        ops=tuple(dict.fromkeys(op.name for op in ops)),
        times=len(made),
        pieces=len(work),
        gpu_us=sum(one.dur for one in work) / 1e3,
        cpu_us=sum(op.us for op in ops),
        steps=sum(bool(triangles(one)) for one in trace.steps),
    )


def triangles(step: Step, in_sdpa: bool = True) -> list[list[Op]]:
    """Return the ops that make each triangular mask: the constants, tril or triu, and what SDPA's math makes of it.

    in_sdpa: include the masks that SDPA's math backend makes itself.
    """
    found, places = [], {}
    for op in step.named(("aten::tril", "aten::triu").__contains__):
        in_math = op.parent is not None and op.parent.name == SDPA_MATH
        if op.kind != "op" or (in_math and not in_sdpa):
            continue
        siblings = op.parent.children if op.parent else step.roots
        if id(siblings) not in places:
            places[id(siblings)] = {id(one): number for number, one in enumerate(siblings)}
        first = at = places[id(siblings)][id(op)]
        while first and _named(siblings[first - 1], (*MAKES, *MASK_OPS)):
            first -= 1
        makers = [number for number in range(first, at) if _named(siblings[number], MAKES)]
        if not makers:
            continue  # the matrix is not a constant
        last = at + 1
        if in_math:
            # The math backend turns the triangle into -inf and 0. Elsewhere a where may belong to the scores.
            while last < len(siblings) and _named(siblings[last], MASK_OPS):
                last += 1
        found.append([one for one in siblings[makers[0] : last] if one.kind == "op"])
    return found


def _named(op: Op, names: Sequence[str]) -> bool:
    return op.kind == "op" and op.name.removeprefix("aten::") in names


def cast_products(step: Step) -> CastProducts | None:
    """Return the fp32 products in a step whose factors were cast to fp32 before; None if there are no such products.

    An op around both decides (a library's own casts), or recorded types and the number of elements.
    """
    products, casts = [], {}
    in_library: dict[int, list[Work]] = {}  # casts by the op around them
    waiting: list[tuple[Work, Op]] = []  # casts since the previous product
    for one, op in zip(step.work, step.asking, strict=True):
        if op is None:
            continue
        if op.name == "aten::copy_" and _casts_to_fp32(one, op):
            waiting.append((one, op))
            if (around := _library_op(op)) is not None:
                in_library.setdefault(id(around), []).append(one)
        elif op.name in MATMULS and says(one).multiplies:
            if says(one).parts.get("types") in ("fp32", "TF32"):
                mine = in_library.get(id(_library_op(op)), []) + [cast for cast, its in waiting if _fits(its, op)]
                products += [one] if mine else []
                casts.update((id(cast), cast) for cast in mine)
            waiting = []
    if not products:
        return None
    return CastProducts(
        len(products), sum(one.dur for one in products) / 1e3, len(casts), sum(one.dur for one in casts.values()) / 1e3
    )


def _casts_to_fp32(one: Work, op: Op) -> bool:
    types = op.inputs.types
    if len(types) > 1:
        to, source = dtype_of(types[0]), dtype_of(types[1])
        return bool(to and source) and to.name == "fp32" and source.bytes == 2
    # LoadWithCast reads another type than it computes with and writes.
    parts = says(one).parts
    return parts.get("does") == "copy" and parts.get("types") == "fp32" and "LoadWithCast" in one.name


def _fits(cast: Op, matmul: Op) -> bool:
    """Return whether recorded shapes show that the cast made as many elements as a factor has."""
    made, found = cast.inputs.dims[:1], product(matmul.name, matmul.inputs.dims)
    if not made or found is None:
        return False
    return math.prod(made[0]) in (found.batch * found.m * found.k, found.batch * found.k * found.n)


def _library_op(op: Op) -> Op | None:
    """Return the calling op, without ops that only dispatch to the product; None if a program made the call itself."""
    return next((one for one in op.above() if one.kind == "op" and one.name not in DISPATCHERS), None)
