"""Each piece of GPU work of a step: its time, who asked for it, what it multiplied or moved, and how fast."""

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from statistics import fmean, median

import msgspec

from tracereader.trace import Op, Step, Trace, Work, kernel_names

MATMULS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::_scaled_mm")
BYTES_OF = {
    "c10::BFloat16": 2,
    "c10::Half": 2,
    "float": 4,
    "double": 8,
    "int": 4,
    "long int": 8,
    "signed char": 1,
    "unsigned char": 1,
    "bool": 1,
}


class Product(msgspec.Struct, frozen=True):
    """A matrix product: batch x [m, k] x [k, n]."""

    batch: int
    m: int
    k: int
    n: int

    @property
    def flops(self) -> int:
        return 2 * self.batch * self.m * self.k * self.n


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
    launched_by: str
    occupancy_queries: int
    family: str
    maker: str
    name_says: dict[str, str]
    product: Product | None
    flops: int | None
    tflops: float | None
    bytes_moved: int | None  # read and written
    gb_s: float | None
    registers: int | None  # per thread
    shared_memory: int | None  # bytes per block
    grid: list[int] | None
    block: list[int] | None


class KernelTimes(msgspec.Struct, frozen=True):
    """All the work of one name over the steps."""

    name: str
    count: int
    total_us: float
    median_us: float
    mean_us: float
    low_us: float
    high_us: float


def gpu_work(trace: Trace, chosen: Step) -> tuple[GpuWork, ...]:
    """The GPU work of the step, in order."""
    durations = defaultdict(list)
    for step in trace.steps:
        for key, one in _numbered(step.work):
            durations[key].append(one.dur)
    return tuple(_measured(one, [dur / 1e3 for dur in durations[key]]) for key, one in _numbered(chosen.work))


def _measured(one: Work, times: list[float]) -> GpuWork:
    op, args, says = one.op, one.args, kernel_names.decode(one.name)
    us = median(times)
    shape = _product(one, op, says.family)
    flops = shape.flops if shape else None
    moved = _moved_bytes(one, op, args)
    return GpuWork(
        name=one.name,
        kind=one.kind,
        asked_by=op.name if op else "",
        us=us,
        mean_us=fmean(times),
        low_us=min(times),
        high_us=max(times),
        steps=len(times),
        launched_by=one.launch.name if one.launch else "",
        occupancy_queries=_queries_before(one),
        family=says.family,
        maker=says.maker,
        name_says=says.parts,
        product=shape,
        flops=flops,
        tflops=flops / us / 1e6 if flops and us else None,
        bytes_moved=moved,
        gb_s=moved / us / 1e3 if moved and us else None,
        registers=_count(args.get("registers per thread")),
        shared_memory=_count(args.get("shared memory")),
        grid=_sizes(args.get("grid")),
        block=_sizes(args.get("block")),
    )


def _numbered(work: Sequence[Work]) -> Iterator[tuple[tuple[str, int], Work]]:
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
    found = []
    for name, durations in times.items():
        found.append(
            KernelTimes(
                name=name,
                count=len(durations),
                total_us=sum(durations) / 1e3,
                median_us=median(durations) / 1e3,
                mean_us=fmean(durations) / 1e3,
                low_us=min(durations) / 1e3,
                high_us=max(durations) / 1e3,
            )
        )
    return tuple(sorted(found, key=lambda one: -one.total_us))


def _queries_before(work: Work) -> int:
    """Occupancy queries on the launching thread between the previous launch and this one's."""
    if work.launch is None or work.launch.parent is None:
        return 0
    queries = 0
    for call in work.launch.parent.children:
        if call is work.launch:
            return queries
        if "Occupancy" in call.name:
            queries += 1
        elif call.work:
            queries = 0
    return queries


def _product(work: Work, op: Op | None, family: str) -> Product | None:
    """What a GEMM kernel multiplied, where shapes were recorded."""
    if op is None or op.name not in MATMULS or family != "GEMM":
        return None
    # Behind the two factors, compiled code names its output; before them, addmm names its bias.
    first = 1 if op.name in ("aten::addmm", "aten::baddbmm") else 0
    factors = _dims(op.args)[first : first + 2]
    if len(factors) < 2 or any(len(dim) < 2 for dim in factors) or factors[0][-1] != factors[1][-2]:
        return None
    *batch, m, k = factors[0]
    return Product(math.prod(batch), m, k, factors[1][-1])


def _dims(args: dict) -> list[list[int]]:
    """The shapes of an op's tensor inputs; none unless recorded as torch records them."""
    dims = args.get("Input Dims")
    if not isinstance(dims, list):
        return []
    return [
        dim
        for dim in dims
        if isinstance(dim, list) and dim and all(type(size) is int and 0 <= size < 2**40 for size in dim)
    ]


def _moved_bytes(work: Work, op: Op | None, args: dict) -> int | None:
    """Bytes read and written by a copy or by a pointwise kernel of ATen's whose inputs are known."""
    if work.kind == "memcpy":
        size = _count(args.get("bytes"))
        return size and size * (2 if "DtoD" in work.name else 1)
    if op is None or op.name not in ("aten::add", "aten::mul", "aten::gelu", "aten::silu", "aten::relu"):
        return None
    asked = op.args
    types, dims = asked.get("Input type"), _dims(asked)
    if not dims or not isinstance(types, list) or not types or not isinstance(types[0], str):
        return None
    sizes = [math.prod(dim) for dim in dims]
    item = BYTES_OF.get(types[0])
    return (sum(sizes) + max(sizes)) * item if item else None


def _count(value: object) -> int | None:
    return value if type(value) is int and 0 <= value < 2**53 else None


def _sizes(value: object) -> list[int] | None:
    return value if isinstance(value, list) and all(_count(one) is not None for one in value) else None
