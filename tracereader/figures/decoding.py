"""A language model's step: the bytes that it reads, its stored facts, and work that may be unnecessary."""

import math
import re
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from operator import attrgetter

import msgspec

from tracereader.figures.attention import ATTENTION
from tracereader.figures.gpu_work import GpuWork, launch_args
from tracereader.figures.hardware import common_peaks, peak_tflops
from tracereader.trace import Op, Step, Trace, Work
from tracereader.trace.facts import ModelFacts
from tracereader.trace.grouped import grouped
from tracereader.trace.op_names import COPYING, SDPA
from tracereader.trace.types import dtype_of

# Ops that write an expanded tensor out, and ops that are attention or its first product.
WRITES_OUT = ("aten::reshape", "aten::contiguous", "aten::clone", "aten::flatten")
ATTENDS = frozenset((SDPA, "aten::matmul", *ATTENTION))
# Inductor's kernel that writes an expanded tensor out. Its name lists the ops that it fuses.
EXPANDS = re.compile(r"^triton_poi_fused_(?=.*clone)(?=.*expand)(?=.*(?:scaled_dot_product|sdpa|attention))", re.S)
# Share of a step's time in which the GPU is busy. Below it the GPU waits for the CPU, however unevenly the steps begin.
# In the H200's traces, compiled decoding keeps the GPU busy for 8%, eager for 12%, one graph per step for 89 to 99%.
MUCH_BUSY = 0.5
# A step with fewer launches may lose more than it gains, because a graph needs its inputs copied to fixed addresses: on
# the H200 reduce-overhead made a step of 2 slower (claim 19).
MANY_LAUNCHES = 50
COMPARED = 2  # steps whose shapes are compared with those of the first step; names are compared in all steps
# For ops that take weights, the position of the input, and the positions of weight and bias, among the arguments.
TAKES_WEIGHTS = {
    "aten::linear": (0, (1, 2)),
    "aten::addmm": (1, (0, 2)),
    **dict.fromkeys(("aten::conv1d", "aten::conv2d", "aten::conv3d", "aten::convolution"), (0, (1, 2))),
}
# The types of weights that are not quantized.
FLOATS = ("bf16", "fp16", "fp32", "fp64")
# Ops that take a part of a tensor.
TAKES_A_PART = ("aten::select", "aten::slice", "aten::index")
_name = attrgetter("name")
LOOKED_AT = 20_000  # activities of a step; shapes of a larger step are not compared


class Decoding(msgspec.Struct, frozen=True):
    """A language model's step compared with its minimum time. A field is None if type or peaks are unknown.

    step_us: the step's time while it was recorded; see pace.py. lane: the one that limits the step, which is the CPU if
    the GPU is mostly idle.
    read_us: the time to read weights and cache once at gb_s. measured: whether the run measured gb_s itself; it is the
    data sheet's value otherwise.
    multiply_us: the time of the products with the weights: `flops` at `tflops`, the data sheet's peak for the run's
    type.
    """

    facts: ModelFacts
    step_us: float
    lane: str  # CPU or GPU
    tokens_s: float
    gb_s: float | None
    measured: bool
    read_us: float | None
    flops: int | None = None
    tflops: float | None = None
    multiply_us: float | None = None

    @property
    def least_us(self) -> float | None:
        """Return the minimum time of a step (µs), as far as it is known. Reading and arithmetic may overlap."""
        return max(self.read_us, self.multiply_us or 0.0) if self.read_us else None


class LanguageModel(msgspec.Struct, frozen=True):
    """The reads and repetitions of a language model's step, and work that it may not need.

    decoding: None if the run did not store what a step reads. expanded: the number of copies that write keys and values
    out for each query head that shares them, before attention. weight_casts: the number of casts of a layer's weight or
    bias; needs recorded shapes. logits_kept: the number of rows kept of the last product's result, if not all of them
    are; needs recorded shapes. same_in_all_steps: see same_in_all_steps().
    """

    decoding: Decoding | None
    expanded: int
    weight_casts: int
    logits_kept: int | None
    same_in_all_steps: bool | None


def language_model(
    limits: Decoding | None, counted: Sequence[Step], step: Step, measured: Sequence[GpuWork]
) -> LanguageModel:
    """Return the figures of the reported step. counted: all measured steps. measured: the step's GPU work."""
    return LanguageModel(
        decoding=limits,
        expanded=sum(len(work) for _, work in expanded(step)) or len(expanded_by_inductor(measured)),
        weight_casts=sum(len(work) for _, work in weight_casts(step)),
        logits_kept=_logits_kept(step, measured),
        same_in_all_steps=same_in_all_steps(counted),
    )


def decoding(trace: Trace, lanes_us: Mapping[str, float], busy_us: float) -> Decoding | None:
    """Return the step as tokens per second and its minimum time; None if the run did not store what a step reads.

    lanes_us: the step's time (µs) by lane; the longer one is the step's time. busy_us: the GPU's busy time in a step.
    """
    facts, step_us = trace.facts.decoding, max(lanes_us.values())
    if facts is None or not trace.has_steps or step_us <= 0:
        return None
    lane = "CPU" if busy_us < MUCH_BUSY * lanes_us["CPU"] else max(lanes_us, key=lanes_us.get)
    peaks = common_peaks(trace.devices)
    gb_s = facts.gb_s or (peaks.gb_s if peaks else None)
    read = (facts.weight_bytes or 0) + (facts.cache_bytes or 0)
    # Each weight and token take one multiplication and one addition. The record does not show whether fp32 uses TF32.
    of_two_bytes = facts.weight_bytes and trace.facts.dtype in ("bf16", "fp16")
    flops = 2 * (facts.weight_bytes // 2) * facts.tokens if of_two_bytes else None
    tflops = peak_tflops(peaks, trace.facts.dtype) if peaks and flops else None
    return Decoding(
        facts=facts,
        step_us=step_us,
        lane=lane,
        tokens_s=facts.tokens / step_us * 1e6,
        gb_s=gb_s,
        measured=facts.gb_s is not None,
        read_us=read / gb_s / 1e3 if gb_s and facts.weight_bytes else None,
        flops=flops,
        tflops=tflops,
        multiply_us=flops / tflops / 1e6 if tflops else None,
    )


def same_in_all_steps(steps: Sequence[Step]) -> bool | None:
    """Return whether these steps have the same GPU work by names, and some of them by grids and input shapes.

    None for a single step, and for a step without launches or with too many.
    """
    first, *others = steps
    if not others or not 0 < len(first.work) <= LOOKED_AT:
        return None
    if any(len(step.work) != len(first.work) for step in others):
        return False
    names = _by_stream(first, map(_name, first.work))
    if any(_by_stream(step, map(_name, step.work)) != names for step in others):
        return False
    signature = _signature(first)
    return all(_signature(step) == signature for step in others[:: -(-len(others) // COMPARED)])


def _by_stream(step: Step, values: Iterable[Hashable]) -> Counter[tuple]:
    """Return the values of each stream's GPU activities, and how many streams have these values in this order.

    The order of work on different streams differs by chance, and so may the streams that a step uses.
    """
    by_stream = grouped((one.track, value) for one, value in zip(step.work, values, strict=True))
    return Counter(map(tuple, by_stream.values()))


def _signature(step: Step) -> Counter[tuple]:
    found, shapes = [], {}  # the shapes as text, which can be hashed; ops with equal inputs share one object
    for one, op in zip(step.work, step.asking, strict=True):
        args, inputs = launch_args(one), op.inputs if op is not None else None
        if id(inputs) not in shapes:
            shapes[id(inputs)] = repr(inputs.recorded) if inputs is not None else None
        found.append((tuple(args.grid or ()), args.bytes, shapes[id(inputs)]))
    return _by_stream(step, found)


def weight_casts(step: Step) -> list[tuple[Op, list[Work]]]:
    """Return the ops of a step that cast a layer's weight or bias to another type, with the work that each launches."""
    found, pending = [], []
    for op in step.named(lambda name: name == "aten::to" or name in TAKES_WEIGHTS):
        if op.name == "aten::to":
            if op.children and (work := _cast_below(op)):
                pending.append((op, work))
        elif pending:
            of_input, of_weights = TAKES_WEIGHTS[op.name]
            weights = [op.inputs.dims_at(place) for place in of_weights]
            # A tensor of the input's shape may be the input.
            found += [cast for cast in pending if (dims := cast[0].inputs.dims_at(0)) in weights
                      and dims and dims != op.inputs.dims_at(of_input)]  # fmt: skip
            pending = []
    return found


def _cast_below(op: Op) -> list[Work]:
    """Return the work that an aten::to launches to convert its input to another floating-point type.

    Empty if it moves the input to another device. Quantized weights are left out: they are stored in few bytes.
    """
    copies = [copy for child in op.children if child.name == "aten::_to_copy" for copy in child.children]
    types = [copy.inputs.types for copy in copies if copy.name == "aten::copy_"]
    if not types or any(len(some) < 2 or some[0] == some[1] for some in types):
        return []
    sources = [dtype_of(some[1]) for some in types]
    if any(source is not None and source.name not in FLOATS for source in sources):
        return []
    return [one for one in _copies(op) if one.kind == "kernel"]


def _logits_kept(step: Step, measured: Sequence[GpuWork]) -> int | None:
    """Return the number of rows kept of the last product's result, if nothing but a cast reads all of them."""
    asked = zip(step.asking, measured, strict=True)
    products = [(op, one.product) for op, one in asked if one.product and op is not None]
    if not products:
        return None
    last, shape = products[-1]
    taken, kept, end = False, None, last.end
    for op in [op for op in step.walk() if op.start >= end and op.kind == "op"]:
        dims = op.inputs.dims_at(0)
        if not dims or dims[-1] != shape.n:
            continue
        rows = math.prod(dims[:-1])
        if taken and rows < shape.m:
            kept = max(rows, kept or 0)
        elif rows == shape.m and op.name in TAKES_A_PART:
            taken = True
        elif rows == shape.m and op.name not in COPYING and any(call.work for call in op.children):
            return None
    return kept


def expanded(step: Step) -> list[tuple[Op, list[Work]]]:
    """Return the ops of a step that write keys and values out for each query head, with the copies that each makes."""
    found = []
    for siblings in _around_attention(step):
        pending: list[tuple[Op, list[Work]]] = []
        expand = None
        for op in siblings:
            name = op.name
            if name == "aten::expand":
                expand = op
            elif expand is not None:
                dims = expand.inputs.dims_at(0)
                # [batch, heads, 1, keys, size], as far as shapes were recorded.
                shares = dims is None or (len(dims) == 5 and dims[2] == 1)
                if name in WRITES_OUT and shares and (copies := _copies(op)):
                    pending.append((op, copies))
                expand = None
            if name in ATTENDS:
                found += pending if len(pending) == 2 else []
                pending = []
    return found


def _around_attention(step: Step) -> Iterator[Sequence[Op]]:
    """Yield the calls beside each attention, in the order of the calls that make them."""
    attends = step.named(ATTENDS.__contains__)
    if attends:
        yield step.roots
    parents = {id(op.parent): op.parent.name for op in attends if op.parent is not None}
    for op in step.named(set(parents.values()).__contains__):
        if id(op) in parents and len(op.children) > 1 and op.name not in ATTENDS:
            yield op.children


def _copies(op: Op) -> list[Work]:
    """Return the copies that the op's clone launched: aten::reshape, clone, copy_, the launch."""
    below = [op]
    for _ in range(3):
        below = [child for one in below for child in one.children]
    return [work for one in below for work in one.work if one.kind == "runtime"]


def expanded_by_inductor(measured: Sequence[GpuWork]) -> list[int]:
    """Return the positions of Inductor's kernels that write out expanded keys and values.

    Such a kernel expands and clones, and runs twice in a row before each attention kernel. Empty if some attention has
    no such pair.
    """
    found: list[int] = []
    pair: tuple[int, ...] = ()
    for place, (before, one) in enumerate(pairwise(measured), 1):
        if EXPANDS.match(one.name) and before.name == one.name and before.grid == one.grid:
            pair = (place - 1, place)
        elif one.family == "attention" != before.family:
            if not pair:
                return []
            found += pair
            pair = ()
    return found
