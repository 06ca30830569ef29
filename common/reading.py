"""Questions asked of a Trace: measures, and prints nothing. Times in microseconds."""

import bisect
import functools
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from common import kernel_names
from common.trace import STEP, Op, Step, Trace, Work

# A step that took this many times the median one is pointed at. On the H200 the first recorded
# step takes 1.7 to 3.4 times the others, and the others differ among each other by up to 1.4.
STANDS_OUT = 1.5
# A first step this many times the median one loaded modules and made handles: 700 to 1200 times on
# the H200 without warm-up, where mere cold caches make it 3 times.
FIRST_USE = 10
# Shares of the window in which the GPU does something. On the H200: 3% at 64 x 64, 70 to 85% at
# 4096 x 4096, where the first step's start is all that the GPU waits for.
OVERHEAD_BOUND, COMPUTE_BOUND = 0.35, 0.65

# Ops that only rewrite a tensor's shape and strides (reshape: where no copy is needed).
VIEWS = frozenset(
    {
        "aten::t", "aten::transpose", "aten::permute", "aten::reshape", "aten::view", "aten::as_strided",
        "aten::_unsafe_view", "aten::_reshape_alias", "aten::expand", "aten::squeeze", "aten::unsqueeze",
        "aten::select", "aten::slice", "aten::detach", "aten::alias", "aten::narrow", "aten::resolve_conj",
    }
)  # fmt: skip
MATMULS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::_scaled_mm")
BYTES_OF = {
    "c10::BFloat16": 2, "c10::Half": 2, "float": 4, "double": 8, "int": 4, "long int": 8, "signed char": 1,
    "unsigned char": 1, "bool": 1,
}  # fmt: skip


# A Trace never changes, and the same question is asked of it many times: by patterns, guesses, report.
once = functools.lru_cache(maxsize=8)


def union_us(intervals: Iterable[tuple[int, int]]) -> float:
    """The time that at least one of the intervals (ns) covers: never their sum."""
    covered, reached = 0, None
    for start, end in sorted(intervals):
        if reached is None or start > reached:
            covered += end - start
            reached = end
        elif end > reached:
            covered += end - reached
            reached = end
    return covered / 1e3


def busy_us(work: Iterable[Work]) -> float:
    """How long the GPU did something, over its streams; of several GPUs, the busiest."""
    by_device = defaultdict(list)
    for one in work:
        by_device[one.device if isinstance(one.device, int) else str(one.device)].append((one.start, one.end))
    return max((union_us(intervals) for intervals in by_device.values()), default=0.0)


def span_us(work: Sequence[Work]) -> float:
    """From the first start to the last end, gaps included."""
    return (max(one.end for one in work) - min(one.start for one in work)) / 1e3 if work else 0.0


@dataclass(frozen=True)
class StepFacts:
    """One step, measured. None where the trace has nothing to measure."""

    step: Step
    gap_us: float | None  # from the label (or the step) to the first op in it
    launches: int
    busy_us: float
    span_us: float
    idle: float | None  # share of the step, until its last GPU work ends, in which the GPU did nothing
    offset_us: float | None  # from the first launch call to the start of what it launched
    ratio: float | None  # CPU time over the median step's, where it stands out
    cause: str | None  # why it stands out, where the trace shows it


@once
def step_facts(trace: Trace) -> tuple[StepFacts, ...]:
    usual = typical(trace)
    gaps = [label_gap_us(step) for step in trace.steps]
    usual_gap = median([gap for gap in gaps if gap is not None] or [0.0])
    usual_self = _self_by_name(usual)
    covered = _Covered(trace.work)
    facts = []
    for step, gap in zip(trace.steps, gaps, strict=True):
        first = next((one for one in step.work if one.launch is not None), None)
        ratio = step.us / usual.us if usual.us and len(trace.steps) > 1 else 1.0
        stands_out = ratio >= STANDS_OUT
        facts.append(
            StepFacts(
                step=step,
                gap_us=gap,
                launches=launches(step),
                busy_us=busy_us(step.work),
                span_us=span_us(step.work),
                idle=covered.idle_share(step) if step.work else None,
                offset_us=(first.start - first.launch.start) / 1e3 if first else None,
                ratio=ratio if stands_out else None,
                cause=(
                    _cause(trace, step, step.us - usual.us, (gap or 0.0) - usual_gap, usual_self)
                    if stands_out else None
                ),
            )
        )
    return tuple(facts)


class _Covered:
    """When each GPU was busy, as disjoint intervals: asked once a step, so found by bisection."""

    def __init__(self, work: Sequence[Work]):
        self.merged: dict[object, tuple[list[int], list[int]]] = {}
        for one in work:  # in the order of their starts
            starts, ends = self.merged.setdefault(one.device, ([], []))
            if ends and one.start <= ends[-1]:
                ends[-1] = max(ends[-1], one.end)
            else:
                starts.append(one.start)
                ends.append(one.end)

    def idle_share(self, step: Step) -> float | None:
        """Of the time from the step's start to the end of its last GPU work, on its first GPU."""
        end = max(step.end, max(one.end for one in step.work))
        starts, ends = self.merged[step.work[0].device]
        first, last = bisect.bisect_right(ends, step.start), bisect.bisect_left(starts, end)
        busy = sum(min(ends[i], end) - max(starts[i], step.start) for i in range(first, last))
        return 1 - busy / (end - step.start) if end > step.start else None


def label_of(step: Step) -> Op | None:
    """The step's own annotation: the outermost label in it, not counting the profiler's mark."""
    return next((op for op in step.walk() if op.kind == "label" and not op.name.startswith(STEP)), None)


def label_gap_us(step: Step) -> float | None:
    """From the label's start (the step's, without one) to the start of the first op in it."""
    label = label_of(step)
    ops = label.walk() if label else step.walk()
    first = next((op for op in ops if op.kind == "op"), None)
    return (first.start - (label.start if label else step.start)) / 1e3 if first else None


def _cause(trace: Trace, step: Step, excess: float, gap_excess: float, usual_self: Counter) -> str | None:
    """excess: what it took more than the median step; gap_excess: that, before its first op."""
    overheads = Counter()
    first, last = (
        bisect.bisect_left(trace.overheads, time, key=lambda one: one.start) for time in (step.start, step.end)
    )
    for one in trace.overheads[first:last]:
        overheads[one.name] += one.us
    told = ", ".join(f"{name} {us:,.0f} µs" for name, us in overheads.most_common(3))
    if gap_excess > excess / 3:
        return f"{gap_excess:,.0f} of its {excess:,.0f} µs more lie before its first op: a cold start"
    slower = _self_by_name(step)
    slower.subtract(usual_self)
    name, more = max(slower.items(), key=lambda item: item[1], default=("", 0.0))
    if more > excess / 3:
        return f"{more:,.0f} of its {excess:,.0f} µs more are {name}'s own, as on first use" + (
            f" (in the same step: {told})" if told else ""
        )
    if overheads.total() > excess / 4:
        return told
    if trace.has_steps and step is trace.steps[0]:
        return f"the first recorded step: its {excess:,.0f} µs more are spread over all its ops"
    return None


def _self_by_name(step: Step) -> Counter:
    times = Counter()
    for op in step.walk():
        # Numbered, so never the same in two steps.
        name = "the loop around the label" if op.name.startswith(STEP) else op.name
        times[name] += self_us(op)
    return times


def self_us(op: Op) -> float:
    """Its time less its children's."""
    return op.us - sum(child.us for child in op.children)


@once
def typical(trace: Trace) -> Step:
    """The step with the median CPU time; of an even number, the lower middle one."""
    return sorted(trace.steps, key=lambda step: step.us)[(len(trace.steps) - 1) // 2]


def occupancy_queries(work: Work) -> int:
    """Occupancy queries on the launching thread between the previous launch and this one's."""
    if work.launch is None or work.launch.parent is None:
        return 0
    queries = 0
    for call in work.launch.parent.children:
        if call is work.launch:
            return queries
        if "OccupancyMaxActiveBlocks" in call.name:
            queries += 1
        elif call.work:
            queries = 0
    return queries


@dataclass(frozen=True)
class WorkRow:
    """One kernel, copy or memset of the typical step, measured over all steps that have it."""

    work: Work
    us: float  # median
    low_us: float
    high_us: float
    steps: int
    asked_by: str  # the op around the launch
    launched_by: str
    queries: int
    says: kernel_names.KernelName
    shape: "Product | None"
    moved: int | None  # bytes read and written, where known

    @property
    def tflops(self) -> float | None:
        return self.shape.flops / self.us / 1e6 if self.shape and self.us else None

    @property
    def gb_s(self) -> float | None:
        return self.moved / self.us / 1e3 if self.moved and self.us else None


@once
def work_rows(trace: Trace) -> tuple[WorkRow, ...]:
    """The GPU work of the typical step, in order."""
    durations = defaultdict(list)
    for step in trace.steps:
        for key, one in _numbered(step.work):
            durations[key].append(one.us)
    rows = []
    for key, one in _numbered(typical(trace).work):
        op = one.op
        rows.append(
            WorkRow(
                work=one,
                us=median(durations[key]),
                low_us=min(durations[key]),
                high_us=max(durations[key]),
                steps=len(durations[key]),
                asked_by=op.name if op else "",
                launched_by=one.launch.name if one.launch else "",
                queries=occupancy_queries(one),
                says=kernel_names.decode(one.name),
                shape=product(one),
                moved=moved_bytes(one),
            )
        )
    return tuple(rows)


def _numbered(work: Sequence[Work]) -> Iterator[tuple[tuple[str, int], Work]]:
    """Each with its name and its number among those of that name: its identity across steps."""
    seen = Counter()
    for one in work:
        yield (one.name, seen[one.name]), one
        seen[one.name] += 1


@dataclass(frozen=True)
class Product:
    """A matrix product: batch x [M, K] x [K, N]."""

    batch: int
    m: int
    k: int
    n: int

    @property
    def flops(self) -> int:
        return 2 * self.batch * self.m * self.k * self.n


def product(work: Work) -> Product | None:
    """What a GEMM kernel multiplied, where shapes were recorded."""
    op = work.op
    if op is None or op.name not in MATMULS or kernel_names.decode(work.name).family != "GEMM":
        return None
    # Behind the two factors, compiled code names its output; before them, addmm names its bias.
    first = 1 if op.name in ("aten::addmm", "aten::baddbmm") else 0
    factors = _dims(op)[first : first + 2]
    if len(factors) < 2 or any(len(dim) < 2 for dim in factors) or factors[0][-1] != factors[1][-2]:
        return None
    *batch, m, k = factors[0]
    return Product(math.prod(batch), m, k, factors[1][-1])


def _dims(op: Op) -> list[list[int]]:
    """The shapes of an op's tensor inputs; none unless recorded as torch records them."""
    dims = op.args.get("Input Dims")
    if not isinstance(dims, list):
        return []
    return [
        dim for dim in dims
        if isinstance(dim, list) and dim and all(type(size) is int and 0 <= size < 2**63 for size in dim)
    ]  # fmt: skip


def moved_bytes(work: Work) -> int | None:
    """Bytes read and written by a copy or by a pointwise kernel of ATen's whose inputs are known."""
    if work.kind == "memcpy":
        size = work.args.get("bytes")
        within = "DtoD" in work.name
        return size * (2 if within else 1) if type(size) is int and 0 < size < 2**63 else None
    op = work.op
    if op is None or op.name not in ("aten::add", "aten::mul", "aten::gelu", "aten::silu", "aten::relu"):
        return None
    types = op.args.get("Input type")
    dims = _dims(op)
    if not dims or not isinstance(types, list) or not types or not isinstance(types[0], str):
        return None
    sizes = [math.prod(dim) for dim in dims]
    item = BYTES_OF.get(types[0])
    return (sum(sizes) + max(sizes)) * item if item else None


@dataclass(frozen=True)
class Regime:
    """name: overhead-bound, compute-bound, in between, or CPU only. share: of the window, GPU busy."""

    name: str
    share: float | None
    busy_us: float
    window_us: float


@once
def regime(trace: Trace) -> Regime:
    """What the recorded steps wait for, from the share of the window in which the GPU is busy.

    The window: from the first step's start to the end of the last step or of the last GPU work. A
    first step that paid for first use is left out: it would hide what the rest is like.
    """
    steps = trace.steps
    if len(steps) > 1 and steps[0].us > FIRST_USE * typical(trace).us:
        steps = steps[1:]
    work = [one for step in steps for one in step.work]
    start = min(step.start for step in steps)
    end = max([step.end for step in steps] + [one.end for one in work])
    window, busy = (end - start) / 1e3, busy_us(work)
    if not work or not window:
        return Regime("CPU only", None, 0.0, window)
    share = busy / window
    name = (
        "overhead-bound" if share < OVERHEAD_BOUND else "compute-bound" if share > COMPUTE_BOUND else "in between"
    )
    return Regime(name, share, busy, window)


def has_gpu_work(trace: Trace) -> bool:
    """GPU work in its steps: a run on the CPU, and one that recorded none, have only a CPU lane."""
    return any(step.work for step in trace.steps)


def launches(step: Step) -> int:
    """Calls that put work on a GPU: one for a whole CUDA graph."""
    return sum(1 for op in step.walk() if op.work)


def kernel_us(trace: Trace, name: str) -> list[float]:
    """How long each kernel of that name took, over all steps."""
    return [one.us for step in trace.steps for one in step.work if one.name == name]


def buffer_requests(trace: Trace) -> list[Op]:
    """The profiler's own allocations of room for GPU records."""
    return [one for one in trace.overheads if one.name == "Activity Buffer Request"]


def count_per_step(trace: Trace, kind: str) -> int:
    """Kernels, memcpys or memsets of the typical step."""
    return sum(one.kind == kind for one in typical(trace).work)


@once
def op_counts(trace: Trace) -> Counter:
    """How often each op runs in the typical step."""
    return Counter(op.name for op in typical(trace).walk() if op.kind == "op")


def launches_nothing(op: Op) -> bool:
    """No GPU work below this op, in a trace that has some."""
    return not any(below.work for below in op.walk())


def final_sync(trace: Trace) -> Op | None:
    """The synchronization with which the profiler collects the GPU's records, after the last step."""
    end = max(step.end for step in trace.steps)
    return next((op for op in trace.outside if "DeviceSynchronize" in op.name and op.start >= end), None)


def graph_hashes(trace: Trace) -> set[str]:
    """The compiled graphs that its steps called."""
    return {
        match[1] for step in trace.steps for op in step.walk()
        if (match := re.search(r"CompiledFxGraph (\w+)", op.name))
    }  # fmt: skip
