"""Each piece of GPU work of a step: its time, who asked for it, what it multiplied or moved, and how fast."""

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from statistics import fmean, median
from typing import NamedTuple

import msgspec

from tracereader.figures.attention import Attention, attention, stored
from tracereader.figures.convolution import Convolution, convolution
from tracereader.figures.hardware import Peaks, peak_tflops, peaks_of
from tracereader.figures.occupancy import Occupancy, occupancy
from tracereader.trace import Lesson, Op, Step, Trace, Work, kernel_names
from tracereader.trace.kernel_names import KernelName

MATMULS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::_scaled_mm")
BYTES_OF = {
    "c10::BFloat16": 2,
    "c10::Half": 2,
    "float": 4,
    "double": 8,
    "int": 4,
    "long int": 8,
    "short int": 2,
    "signed char": 1,
    "unsigned char": 1,
    "bool": 1,
}

# Pointwise ops with the number of tensors that they read; each writes one of the largest one's size.
INPUTS = {
    "aten::add": 2, "aten::sub": 2, "aten::mul": 2, "aten::div": 2, "aten::gelu": 1, "aten::silu": 1, "aten::relu": 1,
    "aten::sigmoid": 1, "aten::tanh": 1, "aten::exp": 1, "aten::rsqrt": 1, "aten::neg": 1,
    "LigerGELUMulFunction": 2, "LigerSiLUMulFunction": 2,
}  # fmt: skip


class Tensor(NamedTuple):
    """An op's input. stored: its elements, those of an expanded dimension once. item: bytes each; None: not known."""

    shape: list[int]
    stored: int
    item: int | None


class Product(msgspec.Struct, frozen=True):
    """A matrix product: batch x [m, k] x [k, n]."""

    batch: int
    m: int
    k: int
    n: int

    @property
    def flops(self) -> int:
        return 2 * self.batch * self.m * self.k * self.n

    @property
    def elements(self) -> int:
        """Of both factors and the result."""
        return self.batch * (self.m * self.k + self.k * self.n + self.m * self.n)


class GpuWork(msgspec.Struct, frozen=True):
    """One kernel, copy or memset of the step spoken of, measured over all steps that have it.

    us: the median, low_us and high_us the extremes. None: the trace has nothing to tell it by.
    """

    name: str
    kind: str  # kernel, memcpy or memset
    asked_by: str  # the op around the launch
    us: float
    mean_us: float
    low_us: float
    high_us: float
    steps: int
    ran_alone: bool  # nothing else on its device at any moment of it, in no step
    launched_by: str
    launch_to_start_us: float | None  # in this step
    occupancy_queries: int
    family: str
    maker: str
    name_says: dict[str, str]
    product: Product | None
    attention: Attention | None
    convolution: Convolution | None
    flops: int | None
    tflops: float | None
    bytes_moved: int | None  # read and written, each input and output once
    gb_s: float | None
    roof: str | None  # compute or memory: which of the device's peaks it would meet first
    of_roof: float | None  # the share of that peak that it reaches
    registers: int | None  # per thread
    shared_memory: int | None  # bytes per block
    grid: list[int] | None
    block: list[int] | None
    occupancy: Occupancy | None
    layer: str | None = None  # of the model, where the run stored their names: see layers.py


class KernelTimes(msgspec.Struct, frozen=True):
    """All the work of one name over the steps. share: of the summed time of all."""

    name: str
    family: str
    count: int
    total_us: float
    share: float
    median_us: float
    mean_us: float
    low_us: float
    high_us: float


def gpu_work(trace: Trace, chosen: Step) -> tuple[GpuWork, ...]:
    """The GPU work of the step, in order."""
    durations = defaultdict(list)
    shared, beside = set(), _beside_others(trace.work)
    for step in trace.steps:
        for key, one in numbered(step.work):
            durations[key].append(one.dur)
            if id(one) in beside:
                shared.add(key)
    queries = _queries_before(chosen.work)
    peaks = peaks_of(trace.devices[0]) if len(set(trace.devices)) == 1 else None
    # What a script stored of its attention is of this kernel only where the step has no other.
    alone = sum(kernel_names.decode(one.name).family == "attention" for one in chosen.work) == 1
    lesson = trace.lesson if alone else None
    return tuple(
        _measured(
            one,
            op,
            [dur / 1e3 for dur in durations[key]],
            key not in shared,
            queries.get(id(one.launch), 0),
            peaks,
            trace.device_properties.get(one.device, {}),
            lesson,
        )
        for (key, one), op in zip(numbered(chosen.work), asking_ops(chosen.work), strict=True)
    )


def _measured(
    one: Work,
    op: Op | None,
    times: list[float],
    alone: bool,
    queries: int,
    peaks: Peaks | None,
    device: dict,
    lesson: Lesson | None,
) -> GpuWork:
    args, says = one.args, kernel_names.decode(one.name)
    # Sizes and rates come from this very piece of work: another step may have done another size here.
    shape, moved, types = _sizes_of(one, op, args, says, lesson)
    flops = shape.flops if shape else None
    tflops, gb_s = (
        amount / one.us * scale if amount and one.dur else None for amount, scale in ((flops, 1e-6), (moved, 1e-3))
    )
    # Attention of a mask that the trace does not tell has no share of a roof: a causal one halves its FLOPs.
    # Nor has a copy over the bus: it never meets the memory's bandwidth.
    not_told = isinstance(shape, Attention) and shape.causal is None
    over_the_bus = one.kind == "memcpy" and "DtoD" not in one.name
    reached = _reached(tflops, gb_s, says.parts.get("types") or types, None if not_told or over_the_bus else peaks)
    if max(reached.values(), default=0.0) > 1:
        # Faster than the device can be: it worked on less, or out of a cache. No rate is a fact then.
        tflops, gb_s, reached = None, None, {}
    roof = max(reached, key=reached.get, default=None)
    registers, shared = _count(args.get("registers per thread")), _count(args.get("shared memory"))
    block = _sizes(args.get("block"))
    return GpuWork(
        name=one.name,
        kind=one.kind,
        asked_by=op.name if op else "",
        us=median(times),
        mean_us=fmean(times),
        low_us=min(times),
        high_us=max(times),
        steps=len(times),
        ran_alone=alone,
        launched_by=one.launch.name if one.launch else "",
        launch_to_start_us=(one.start - one.launch.start) / 1e3 if one.launch else None,
        occupancy_queries=queries,
        family=says.family,
        maker=says.maker,
        name_says=says.parts,
        product=shape if isinstance(shape, Product) else None,
        attention=shape if isinstance(shape, Attention) else None,
        convolution=shape if isinstance(shape, Convolution) else None,
        flops=flops,
        tflops=tflops,
        bytes_moved=moved,
        gb_s=gb_s,
        roof=roof,
        of_roof=reached.get(roof),
        registers=registers,
        shared_memory=shared,
        grid=_sizes(args.get("grid")),
        block=block,
        occupancy=occupancy(device, registers, shared, block, args.get("est. achieved occupancy %")),
    )


def _beside_others(work: Sequence[Work]) -> set[int]:
    """The ids of the pieces at some moment of which another ran on the same device."""
    found, longest = set(), {}
    for one in sorted(work, key=lambda one: one.start):
        before = longest.get(one.device)
        if before is not None and one.start < before.end:
            # Whatever else is still running at this moment overlaps the one that ends last, and is marked.
            found |= {id(one), id(before)}
        if before is None or one.end > before.end:
            longest[one.device] = one
    return found


def _reached(tflops: float | None, gb_s: float | None, types: str, peaks: Peaks | None) -> dict[str, float]:
    """The share of each of the device's peaks."""
    reached = {}
    if peaks and gb_s:
        reached["memory"] = gb_s / peaks.gb_s
    if peaks and tflops and (peak := peak_tflops(peaks, types)):
        reached["compute"] = tflops / peak
    return reached


def numbered(work: Sequence[Work]) -> Iterator[tuple[tuple[str, int], Work]]:
    """Each with its name and its number among those of that name: its identity across steps."""
    seen = Counter()
    for one in work:
        yield (one.name, seen[one.name]), one
        seen[one.name] += 1


def kernel_times(trace: Trace) -> tuple[KernelTimes, ...]:
    """The work of all steps by name, the costliest first."""
    times = defaultdict(list)
    for step in trace.steps:
        for one in step.work:
            times[one.name].append(one.dur)
    total = sum(map(sum, times.values()))
    found = []
    for name, durations in times.items():
        found.append(
            KernelTimes(
                name=name,
                family=kernel_names.decode(name).family,
                count=len(durations),
                total_us=sum(durations) / 1e3,
                share=sum(durations) / total if total else 0.0,
                median_us=median(durations) / 1e3,
                mean_us=fmean(durations) / 1e3,
                low_us=min(durations) / 1e3,
                high_us=max(durations) / 1e3,
            )
        )
    return tuple(sorted(found, key=lambda one: -one.total_us))


def asking_ops(work: Sequence[Work]) -> list[Op | None]:
    """For each piece the innermost op around its launch; the launch's label where there is no op."""
    found: dict[int, Op | None] = {}  # by a call's id, each way up taken once
    asking = []
    for one in work:
        way, op = [], one.launch
        while op is not None and op.kind == "runtime" and id(op) not in found:
            way.append(op)
            op = op.parent
        answer = found[id(op)] if op is not None and op.kind == "runtime" else op
        found.update((id(passed), answer) for passed in way)
        asking.append(answer)
    return asking


def _queries_before(work: Sequence[Work]) -> dict[int, int]:
    """By a launch's id: occupancy queries on its thread between the previous launch and it."""
    parents = {id(one.launch.parent): one.launch.parent for one in work if one.launch and one.launch.parent}
    before = {}
    for parent in parents.values():
        queries = 0
        for call in parent.children:
            if call.work:
                before[id(call)] = queries
                queries = 0
            elif "Occupancy" in call.name:
                queries += 1
    return before


def _sizes_of(
    work: Work, op: Op | None, args: dict, says: KernelName, lesson: Lesson | None
) -> tuple[Product | Attention | Convolution | None, int | None, str]:
    """What a GEMM, an attention kernel or a convolution computed, the bytes that it has to move, its type."""
    if work.kind == "memcpy":
        size = _count(args.get("bytes"))
        return None, size and size * (2 if "DtoD" in work.name else 1), ""
    if op is None or says.family not in ("GEMM", "attention", "convolution", "pointwise", "copy"):
        return None, None, ""
    tensors = _tensors(op.args)
    if says.family == "pointwise":
        return None, _pointwise_bytes(op.name, work.name, tensors), ""
    if says.family == "copy":
        return None, _copied_bytes(op.name, tensors), ""
    shapes, given = [one.shape for one in tensors], op.args.get("Input type")
    first = given[0] if isinstance(given, list) and given and isinstance(given[0], str) else ""
    item = BYTES_OF.get(first)
    # Of fp32 inputs only the name tells whether they are multiplied as TF32.
    found, types = None, {"c10::BFloat16": "bf16", "c10::Half": "fp16"}.get(first, "")
    if says.family == "GEMM":
        found = product(op.name, shapes)
    elif says.family == "convolution":
        if _alone(work, op, says):
            found = convolution(op.name, shapes, op.args.get("Concrete Inputs"))
    elif says.parts.get("does", "forward") != "forward":
        pass  # it only puts parts together, or goes backward: other arithmetic
    elif shapes:
        found = attention(op.name, op.args, shapes, says, lesson.facts if lesson else {})
    elif lesson and (found := stored(lesson.facts, says)):
        types = {"bf16": "bf16", "fp16": "fp16"}.get(str(lesson.flags.get("dtype")), "")
        item = 2 if types else None
    return found, found.elements * item if found and item else None, types


def _alone(work: Work, op: Op, says: KernelName) -> bool:
    # Forward, towards the data or towards the weights: an op that starts two kernels of one kind has
    # split the work between them, and the trace does not tell how.
    does = says.parts.get("does", "")
    if does.startswith(kernel_names.SPLIT_K):
        return False
    decoded = [kernel_names.decode(one.name) for call in op.children for one in call.work if one is not work]
    return not any(one.family == "convolution" and one.parts.get("does") == does for one in decoded)


def product(op: str, dims: list[list[int]]) -> Product | None:
    """What a matrix product's op computed, by its inputs' shapes."""
    # Behind the two factors, compiled code names its output; before them, addmm names its bias.
    first = 1 if op in ("aten::addmm", "aten::baddbmm") else 0
    factors = dims[first : first + 2]
    if op not in MATMULS or len(factors) < 2 or any(len(dim) < 2 for dim in factors):
        return None
    *batch, m, k = factors[0]
    return Product(math.prod(batch), m, k, factors[1][-1]) if k == factors[1][-2] else None


def _pointwise_bytes(op: str, kernel: str, tensors: Sequence[Tensor]) -> int | None:
    if not tensors or any(one.item is None for one in tensors):
        return None
    read = sum(one.stored * one.item for one in tensors)
    if op == kernel:  # Inductor's own row names its outputs with its inputs
        return read
    inputs = INPUTS.get(op)
    if inputs is None or not inputs <= len(tensors) <= inputs + 1:
        return None
    written = max(math.prod(one.shape) for one in tensors) * max(one.item for one in tensors)
    return read + (0 if len(tensors) > inputs else written)  # with out= it is among them


def _copied_bytes(op: str, tensors: Sequence[Tensor]) -> int | None:
    if op != "aten::copy_" or len(tensors) != 2 or any(one.item is None for one in tensors):
        return None
    to, source = tensors
    # Read where it is broadcast from: once.
    return to.stored * to.item + source.stored * source.item


def dims_of(args: dict) -> list[list[int]]:
    """The shapes of an op's tensor inputs; none unless recorded as torch records them."""
    return [one.shape for one in _tensors(args)]


def _tensors(args: dict) -> list[Tensor]:
    dims, types, strides = (args.get(key) for key in ("Input Dims", "Input type", "Input Strides"))
    if not isinstance(dims, list):
        return []
    types = types if isinstance(types, list) and len(types) == len(dims) else [None] * len(dims)
    strides = strides if isinstance(strides, list) and len(strides) == len(dims) else [None] * len(dims)
    found = []
    for shape, type_name, stride in zip(dims, types, strides, strict=True):
        if isinstance(shape, list) and shape and all(type(size) is int and 0 <= size < 2**40 for size in shape):
            same = isinstance(stride, list) and len(stride) == len(shape)
            distinct = [size for size, step in zip(shape, stride, strict=True) if step != 0] if same else shape
            item = BYTES_OF.get(type_name) if isinstance(type_name, str) else None
            found.append(Tensor(shape, math.prod(distinct), item))
    return found


def _count(value: object) -> int | None:
    return value if type(value) is int and 0 <= value < 2**53 else None


def _sizes(value: object) -> list[int] | None:
    return value if isinstance(value, list) and all(_count(one) is not None for one in value) else None


def sizes_of_op(op: Op) -> tuple[Product | None, int | None]:
    """What a matrix product multiplies, or the bytes that a pointwise op moves, by recorded shapes."""
    tensors = _tensors(op.args)
    if op.name in MATMULS:
        return product(op.name, [one.shape for one in tensors]), None
    return None, _pointwise_bytes(op.name, "", tensors)
