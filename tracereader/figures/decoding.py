"""What a language model's step reads and how often: stored facts, weights, and work that may be unnecessary."""

import math
import re
from collections.abc import Iterator, Sequence
from itertools import islice, pairwise
from statistics import median

import msgspec

from tracereader.figures.attention import ATTENTION
from tracereader.figures.gpu_work import GpuWork, asking_ops
from tracereader.figures.hardware import Peaks, common_peaks, peak_tflops
from tracereader.figures.pace import pace
from tracereader.figures.steps import StepFacts, first_start
from tracereader.trace import Op, Step, Trace, Work
from tracereader.trace.facts import ModelFacts, RunFacts
from tracereader.trace.types import dims_at, shapes_as_recorded, types_of

# Ops that write an expanded tensor out, and those that are attention, or its first product.
WRITES_OUT = ("aten::reshape", "aten::contiguous", "aten::clone", "aten::flatten")
ATTENDS = ("aten::scaled_dot_product_attention", "aten::matmul", *ATTENTION)
# Inductor's kernel for the same: the name lists the ops that it fuses.
EXPANDS = re.compile(r"^triton_poi_fused_(?=.*clone)(?=.*expand)(?=.*(?:scaled_dot_product|sdpa|attention))", re.S)
# Of a step's time: with less the GPU waits for the CPU, however unevenly the steps begin. Of the H200's traces compiled
# decoding keeps it busy for 8%, eager for 12%, one graph a step for 89 to 99%.
MUCH_BUSY = 0.5
# Of a product's bytes the weight's share, from which on reading the weight is what it does.
MOSTLY_WEIGHT = 0.8
# A step with fewer launches may lose more than it gains by copying its inputs to where a graph reads them: on the H200
# reduce-overhead made a step of 2 slower (claim 19).
MANY_LAUNCHES = 50
COMPARED = 2  # steps whose shapes are compared with the first one's; by name all are
DEEPEST_CAST = 8  # calls from aten::to down to the copy_ that casts; torch makes three
# Of ops that take weights, where their input stands among the arguments, and where weight and bias stand.
TAKES_WEIGHTS = {
    "aten::linear": (0, (1, 2)),
    "aten::addmm": (1, (0, 2)),
    **dict.fromkeys(("aten::conv1d", "aten::conv2d", "aten::conv3d", "aten::convolution"), (0, (1, 2))),
}
CASTS = ("aten::to", "aten::_to_copy", "aten::copy_")
# Ops that take a part of a tensor.
TAKES_A_PART = ("aten::select", "aten::slice", "aten::index")
LOOKED_AT = 20_000  # activities of a step; a larger step's shapes are not compared with another step's


class Decoding(msgspec.Struct, frozen=True):
    """A language model's step compared with its minimum time.

    step_us: from one step to the next, on the CPU's lane where the GPU is mostly idle, else on the one that takes
    longer. gb_s: by which read_us, what reading weights and cache once takes, is reckoned; measured: by the run
    itself, else the data sheet's. flops: of the products with the weights; tflops: the data sheet's for the run's
    type, by which multiply_us is reckoned. None where the run does not record its type, or the data sheet is not known.
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
        """The minimum time of a step (µs), as far as it is known. Reading and arithmetic may overlap."""
        return max(self.read_us, self.multiply_us or 0.0) if self.read_us else None


class Asked(msgspec.Struct, frozen=True):
    """Some of a step's calls and the GPU work that they launch."""

    calls: int
    pieces: int
    gpu_us: float
    cpu_us: float


class WeightReads(msgspec.Struct, frozen=True):
    """Matrix products of `rows` rows (M) that do little but read their weights. ridge_rows: from where arithmetic is
    the limit, by the data sheet; None where the device is unknown."""

    rows: int
    products: int
    bytes: int
    us: float
    ridge_rows: int | None


class Unneeded(msgspec.Struct, frozen=True):
    """Work that a step may not need. A part is None if the step has none of it.

    weight_casts: those casts that convert a layer's weight or bias; with shapes only.
    expanded: keys and values written out once for each query head that shares them, before attention.
    key_heads: heads of the keys before that, or as attention gets them; with shapes only.
    logits_kept: rows that are kept of the last product's result, if only some of them are; with shapes only.
    """

    casts: Asked | None
    expanded: Asked | None
    key_heads: int | None
    weight_casts: Asked | None = None
    logits_kept: int | None = None


def decoding(trace: Trace, steps: Sequence[StepFacts], run: RunFacts) -> Decoding | None:
    """The step as tokens per second and its minimum time, if the run stored what the step reads.

    steps: what was measured of the trace's.
    """
    facts = run.decoding
    if facts is None or not trace.has_steps:
        return None
    lanes = {"CPU": pace([step.start for step in trace.steps], trace.steps[-1].end) / 1e3}
    firsts = [first_start(step) for step in trace.steps]
    if None not in firsts:
        lanes["GPU"] = pace(firsts, max(one.end for one in trace.steps[-1].work)) / 1e3
    busy = median(one.gpu_busy_us for one in steps)
    lane = "CPU" if busy < MUCH_BUSY * lanes["CPU"] else max(lanes, key=lanes.get)
    if lanes[lane] <= 0:
        return None
    peaks = common_peaks(trace.devices)
    gb_s = facts.gb_s or (peaks.gb_s if peaks else None)
    read = (facts.weight_bytes or 0) + (facts.cache_bytes or 0)
    # One multiplication and addition per weight and token. Whether fp32 is multiplied as TF32 is not recorded.
    of_two_bytes = facts.weight_bytes and run.dtype in ("bf16", "fp16")
    flops = 2 * (facts.weight_bytes // 2) * facts.tokens if of_two_bytes else None
    tflops = peak_tflops(peaks, run.dtype) if peaks and flops else None
    return Decoding(
        facts=facts,
        step_us=lanes[lane],
        lane=lane,
        tokens_s=facts.tokens / lanes[lane] * 1e6,
        gb_s=gb_s,
        measured=facts.gb_s is not None,
        read_us=read / gb_s / 1e3 if gb_s and facts.weight_bytes else None,
        flops=flops,
        tflops=tflops,
        multiply_us=flops / tflops / 1e6 if tflops else None,
    )


def weight_reads(trace: Trace, step: Step, measured: Sequence[GpuWork]) -> tuple[WeightReads, ...]:
    """Matrix products that mostly read weights, by their rows, the longest first. Needs recorded shapes."""
    peaks = common_peaks(trace.devices)
    launched: dict[int, list[GpuWork]] = {}  # by the op: split K is two kernels, one product
    for op, one in zip(asking_ops(step.work), measured, strict=True):
        if op is not None:
            launched.setdefault(id(op), []).append(one)
    by_rows: dict[int, list[tuple[int, float, int]]] = {}
    for same in launched.values():
        products = [one for one in same if one.product and one.bytes_moved]
        if len(products) != 1 or products[0].product.batch != 1:
            continue
        shape, moved = products[0].product, products[0].bytes_moved
        if shape.k * shape.n >= MOSTLY_WEIGHT * shape.elements:
            us = sum(one.us for one in same)
            by_rows.setdefault(shape.m, []).append((moved, us, moved // shape.elements))
    found = []
    for rows, some in by_rows.items():
        ridge = ridge_rows(peaks) if {item for *_, item in some} == {2} else None
        found.append(WeightReads(rows, len(some), sum(one[0] for one in some), sum(one[1] for one in some), ridge))
    return tuple(sorted(found, key=lambda one: -one.us))


def ridge_rows(peaks: Peaks | None) -> int | None:
    """Rows of a product from which on arithmetic takes longer than reading a weight of two bytes."""
    # Each row multiplies and adds once a weight: 2 FLOPs for its two bytes.
    return math.ceil(peaks.bf16 * 1e3 / peaks.gb_s) if peaks else None


def same_in_all_steps(trace: Trace) -> bool | None:
    """Whether all steps do the same GPU work, by names; some of them by grids and the shapes of its ops, too.

    None of a single step, and of one without launches or with too many.
    """
    first, *others = trace.steps
    if not others or not 0 < len(first.work) <= LOOKED_AT:
        return None
    if any(len(step.work) != len(first.work) for step in others):
        return False
    names = [one.name for one in first.work]
    if any([one.name for one in step.work] != names for step in others):
        return False
    signature = _signature(first.work)
    return all(_signature(step.work) == signature for step in others[:: -(-len(others) // COMPARED)])


def _signature(work: Sequence[Work]) -> list:
    found = []
    for one, op in zip(work, asking_ops(work), strict=True):
        args = one.args
        found.append((args.get("grid"), args.get("bytes"), shapes_as_recorded(op.args) if op is not None else None))
    return found


def unneeded(step: Step, measured: Sequence[GpuWork]) -> Unneeded:
    """Casts, and keys and values expanded in memory, of a step."""
    us = {id(work): one.us for work, one in zip(step.work, measured, strict=True)}
    casts: dict[int, tuple[Op, list[Work]]] = {}
    for one, asked_by in zip(step.work, asking_ops(step.work), strict=True):
        if one.kind == "kernel" and asked_by is not None and (op := _cast(asked_by)):
            casts.setdefault(id(op), (op, []))[1].append(one)
    copies, key_heads = _expanded(step)
    return Unneeded(
        casts=_asked(list(casts.values()), us),
        expanded=_asked(copies, us) or _of_inductor([measured[place] for place in expanded_by_inductor(measured)]),
        key_heads=key_heads,
        weight_casts=_asked(weight_casts(step), us),
        logits_kept=_logits_kept(step, measured),
    )


def _asked(calls: Sequence[tuple[Op, list[Work]]], us: dict[int, float]) -> Asked | None:
    if not calls:
        return None
    pieces = [one for _, work in calls for one in work]
    return Asked(len(calls), len(pieces), sum(us[id(one)] for one in pieces), sum(op.us for op, _ in calls))


def _of_inductor(kernels: Sequence[GpuWork]) -> Asked | None:
    return Asked(len(kernels), len(kernels), sum(one.us for one in kernels), 0.0) if kernels else None


def _cast(asked_by: Op) -> Op | None:
    """The outermost aten::to whose cast is what this op launches."""
    found, casts = None, False
    for op in (asked_by, *islice(asked_by.above(), DEEPEST_CAST)):
        if op.name == "aten::_to_copy":
            casts = True
        elif op.name == "aten::copy_":
            types = types_of(op.args)
            if len(types) > 1 and types[0] == types[1]:
                return None  # another layout, or another device: no cast
        elif op.name == "aten::to" and casts:
            found = op
        else:
            break
    return found


def weight_casts(step: Step) -> list[tuple[Op, list[Work]]]:
    """The ops of a step that cast a layer's weight or bias to another type, and the work that each launches."""
    found, pending = [], []
    for op in step.walk():
        if op.name == "aten::to" and (work := _cast_below(op)):
            pending.append((op, work))
        elif pending and op.name in TAKES_WEIGHTS:
            of_input, of_weights = TAKES_WEIGHTS[op.name]
            weights = [dims_at(op.args, place) for place in of_weights]
            # A tensor of the input's shape may be the input.
            found += [cast for cast in pending if (dims := dims_at(cast[0].args, 0)) in weights
                      and dims and dims != dims_at(op.args, of_input)]  # fmt: skip
            pending = []
    return found


def _cast_below(op: Op) -> list[Work]:
    """What an aten::to launches to convert its input; nothing where it moves it to another device."""
    copies = [copy for child in op.children if child.name == "aten::_to_copy" for copy in child.children]
    types = [types_of(copy.args) for copy in copies if copy.name == "aten::copy_"]
    if not types or any(len(some) < 2 or some[0] == some[1] for some in types):
        return []
    return [one for one in _copies(op) if one.kind == "kernel"]


def _logits_kept(step: Step, measured: Sequence[GpuWork]) -> int | None:
    """The rows that are kept of the last product's result, where nothing but a cast reads all of them."""
    launched = zip(asking_ops(step.work), measured, strict=True)
    products = [(op, one.product) for op, one in launched if op is not None and one.product]
    if not products:
        return None
    last, shape = products[-1]
    taken, kept = False, None
    for op in step.walk():
        dims = dims_at(op.args, 0) if op.kind == "op" and op.start >= last.end else None
        if not dims or dims[-1] != shape.n:
            continue
        rows = math.prod(dims[:-1])
        if taken and rows < shape.m:
            kept = max(rows, kept or 0)
        elif rows == shape.m and op.name in TAKES_A_PART:
            taken = True
        elif rows == shape.m and op.name not in CASTS and any(call.work for call in op.children):
            return None
    return kept


def expanded(step: Step) -> list[tuple[Op, list[Work]]]:
    """The ops of a step that write keys and values out for each query head, and the copies that each launches."""
    return _expanded(step)[0]


def _expanded(step: Step) -> tuple[list[tuple[Op, list[Work]]], int | None]:
    """Pairs of copies of expanded tensors right before attention; the heads that the tensors had."""
    found, heads = [], None
    for siblings in _families(step):
        pending: list[tuple[Op, list[Work], Op]] = []
        expand = None
        for op in siblings:
            if op.name == "aten::expand":
                expand = op
            elif expand is not None:
                if op.name in WRITES_OUT and (copies := _copies(op)) and _adds_a_dimension(expand):
                    pending.append((op, copies, expand))
                expand = None
            if op.name in ATTENDS:
                if len(pending) == 2:
                    found += [(copy, work) for copy, work, _ in pending]
                    heads = heads or _second(pending[0][2])
                elif op.name == "aten::scaled_dot_product_attention":
                    heads = heads or _second(op, 1)
                pending = []
    return found, heads


def _families(step: Step) -> Iterator[Sequence[Op]]:
    yield step.roots
    for op in step.walk():
        if len(op.children) > 1 and op.name not in ATTENDS:
            yield op.children


def _copies(op: Op) -> list[Work]:
    """What its clone launched: aten::reshape, clone, copy_, the launch."""
    below = [op]
    for _ in range(3):
        below = [child for one in below for child in one.children]
    return [work for one in below for work in one.work if one.kind == "runtime"]


def _adds_a_dimension(expand: Op) -> bool:
    """Whether it is [batch, heads, 1, keys, size] that is expanded; so taken where no shapes are recorded."""
    dims = dims_at(expand.args, 0)
    return dims is None or (len(dims) == 5 and dims[2] == 1)


def _second(op: Op, which: int = 0) -> int | None:
    dims = dims_at(op.args, which)
    return dims[1] if dims and len(dims) > 3 else None


def expanded_by_inductor(measured: Sequence[GpuWork]) -> list[int]:
    """The same in compiled code: a kernel that expands and clones, run twice in a row before each attention kernel.

    Their places among the step's activities; none where some attention has no such pair.
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
