"""Each GPU activity of a step: its time, the op that launched it, its sizes, and its rates."""

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from statistics import fmean, median
from typing import NamedTuple

import msgspec

from tracereader.figures.attention import Attention
from tracereader.figures.convolution import Convolution
from tracereader.figures.hardware import Peaks, common_peaks, peak_tflops, roof_met
from tracereader.figures.occupancy import Occupancy, occupancy
from tracereader.figures.sizes import Product, does_it_alone, sizes_of
from tracereader.trace import STEP, Op, Step, Trace, Work, families, kernel_names
from tracereader.trace.decoded import decoded_as
from tracereader.trace.facts import Bytes, RunFacts, usable
from tracereader.trace.grouped import grouped
from tracereader.trace.kernel_names import KernelName


class GpuWork(msgspec.Struct, frozen=True):
    """One kernel, copy or memset of the reported step, measured over all steps that have it.

    us is the median, low_us and high_us are the extremes. A field is None if the trace does not show it.
    """

    name: str
    kind: str  # kernel, memcpy or memset
    asked_by: str  # the op around the launch, or around the call that a CUDA graph captured
    us: float
    mean_us: float
    low_us: float
    high_us: float
    steps: int
    ran_alone: bool  # whether no other activity overlapped it on its device, in any step
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
    roof: str | None  # compute or memory: the peak of the device that it is closer to
    of_roof: float | None  # the achieved share of that peak
    registers: int | None  # per thread
    shared_memory: int | None  # bytes per block
    grid: list[int] | None
    block: list[int] | None
    occupancy: Occupancy | None
    layer: str | None  # of the model, if the run stored its layers' names; see layers.py

    @property
    def from_graph(self) -> bool:
        """Return whether a CUDA graph's launch started it."""
        return "GraphLaunch" in self.launched_by

    @property
    def says(self) -> KernelName:
        """Return the name's information as one struct."""
        return KernelName(self.family, self.maker, self.name_says)

    @property
    def is_compiled(self) -> bool:
        """Return whether Inductor wrote the kernel."""
        return self.maker.startswith("Inductor")


class KernelTimes(msgspec.Struct, frozen=True):
    """All activities of one name over the steps. share: of the summed time of all names.

    family and asked_by have more than half of its time; asked_by is "several ops" if no op has that much.
    """

    name: str
    family: str
    asked_by: str
    count: int
    total_us: float
    share: float
    median_us: float
    mean_us: float
    low_us: float
    high_us: float


class LaunchArgs(msgspec.Struct, frozen=True, gc=False):
    """The arguments of a GPU activity that its launch determines. One that is no such number is None.

    bytes: those that a copy copies. reported: the occupancy (%) that the profiler reports.
    """

    registers: Bytes | None = msgspec.field(name="registers per thread", default=None)
    shared: Bytes | None = msgspec.field(name="shared memory", default=None)
    bytes: Bytes | None = None
    reported: float | int | None = msgspec.field(name="est. achieved occupancy %", default=None)
    grid: tuple[Bytes, ...] | None = None
    block: tuple[Bytes, ...] | None = None


_launch_args = msgspec.json.Decoder(LaunchArgs)


def launch_args(one: Work) -> LaunchArgs:
    """Return the arguments of a GPU activity's launch."""
    found = decoded_as(_launch_args, one.raw)
    return usable(LaunchArgs, one.args) if found is None else found


def gpu_work(trace: Trace, chosen: Step, layers: Mapping[int, str]) -> Iterator[GpuWork]:
    """Yield the GPU work of the step, in order. layers: the model's layer by an activity's id (see layers.py)."""
    overlapping = _overlapping(trace.work)
    queries = _queries_before(trace.queries)
    peaks = common_peaks(trace.devices)
    # A script's facts about its attention describe a kernel only if no other one is attention.
    facts = trace.facts if sum(families.says(one).family == "attention" for one in chosen.work) == 1 else RunFacts()
    alike: dict[tuple, tuple] = {}  # what activities with equal names, launches and inputs have in common
    counts: dict[tuple, int] = {}  # see does_it_alone()
    for one, op, same in zip(chosen.work, chosen.asking, _in_all_steps(trace, chosen), strict=True):
        says, launch, call = families.says(one), launch_args(one), one.launch
        alone = does_it_alone(one, op, says, counts)
        asked = (None, None) if op is None else (op.name, id(op.inputs))  # ops with equal inputs share one object
        key = (one.name, one.kind, one.device, id(says), launch, alone, *asked)
        if key not in alike:
            device = trace.device_properties.get(one.device, {})
            grid, block = (None if some is None else list(some) for some in (launch.grid, launch.block))
            occupied = occupancy(device, launch.registers, launch.shared, block, launch.reported)
            footprint = launch.registers, launch.shared, grid, block, occupied
            alike[key] = _sizes(one, op, launch, says, alone, peaks, facts), footprint
        sizes, footprint = alike[key]
        shape, times = sizes.shape, [each.dur / 1e3 for each in same]
        # By position, because keywords take several times as long.
        yield GpuWork(
            one.name,
            one.kind,
            _asking(one, op),
            *(of(times) for of in (median, fmean, min, max)),
            len(same),
            not overlapping or overlapping.isdisjoint(map(id, same)),
            "" if call is None else call.name,
            None if call is None else (one.start - call.start) / 1e3,
            queries.get(id(call), 0) if queries else 0,
            *msgspec.structs.astuple(says),
            *(shape if isinstance(shape, kind) else None for kind in (Product, Attention, Convolution)),
            *_rates(sizes, one.dur),
            *footprint,
            layers.get(id(one)) if layers else None,
        )


def _in_all_steps(trace: Trace, chosen: Step) -> list[list[Work]]:
    """Return each activity of the step with those of the other steps that are numbered alike: see numbered()."""
    if len(trace.steps) == 1:
        return [[one] for one in chosen.work]
    of_each = (grouped((one.name, one) for one in step.work) for step in trace.steps)
    by_name = grouped(pair for of_step in of_each for pair in of_step.items())
    same = {name: zip_longest(*of_steps) for name, of_steps in by_name.items()}
    return [[each for each in next(same[one.name]) if each is not None] for one in chosen.work]


class _Sizes(NamedTuple):
    """The sizes of an activity, and the peaks (TFLOP/s, GB/s) that its rates are compared with.

    The peak of arithmetic is None if the element type is unknown; peaks is None if the rates are compared with none.
    """

    shape: Product | Attention | Convolution | None
    flops: int | None
    moved: int | None
    peaks: tuple[float | None, float] | None


def _sizes(
    one: Work, op: Op | None, launch: LaunchArgs, says: KernelName, alone: bool, peaks: Peaks | None, facts: RunFacts
) -> _Sizes:
    # The sizes are those of this activity. Another step may have another size here.
    shape, moved, types = sizes_of(one, op, launch.bytes, says, alone, facts)
    # Attention with an unrecorded mask gets no share of a peak, because a causal mask halves its FLOPs. A copy over the
    # bus gets none either, because it is never limited by the GPU's memory bandwidth.
    mask_unknown = isinstance(shape, Attention) and shape.causal is None
    over_the_bus = one.kind == "memcpy" and says.parts.get("does") != kernel_names.COPIES["DtoD"]
    compared = None
    if peaks and not mask_unknown and not over_the_bus:
        compared = peak_tflops(peaks, says.parts.get("types") or types), peaks.gb_s
    return _Sizes(shape, shape.flops if shape else None, moved, compared)


def _rates(
    sizes: _Sizes, ns: int
) -> tuple[int | None, float | None, int | None, float | None, str | None, float | None]:
    """Return the FLOPs, TFLOP/s, bytes and GB/s of an activity of this time, the peak that is closer, and its share."""
    us, flops, moved = ns / 1e3, sizes.flops, sizes.moved
    tflops, gb_s = flops / us * 1e-6 if flops and us else None, moved / us * 1e-3 if moved and us else None
    met = roof_met(tflops, gb_s, *sizes.peaks) if sizes.peaks else None
    if met is None:
        return flops, tflops, moved, gb_s, None, None
    # A rate above the device's peak means less data, or data in a cache. No rate is reported then.
    return (flops, None, moved, None, None, None) if met[1] > 1 else (flops, tflops, moved, gb_s, *met)


def _overlapping(work: Sequence[Work]) -> set[int]:
    """Return the ids of activities that overlap with another one on the same device. work: by start."""
    found, longest = set(), {}
    for one in work:
        start, device = one.start, one.device
        before, until = longest.get(device, (one, -math.inf))
        if start < until:
            # Every other activity that still runs at this moment overlaps the one that ends last, and is marked.
            found |= {id(one), id(before)}
        if start + one.dur > until:
            longest[device] = one, start + one.dur
    return found


def numbered(work: Sequence[Work]) -> Iterator[tuple[tuple[str, int], Work]]:
    """Yield each activity with its name and its number among those of that name, which identify it across steps."""
    seen: dict[str, int] = {}
    for one in work:
        name = one.name
        nth = seen.get(name, 0)
        seen[name] = nth + 1
        yield (name, nth), one


def kernel_times(trace: Trace) -> tuple[KernelTimes, ...]:
    """Return the work of all steps by name, the costliest first."""
    alike = grouped(
        ((one.name, families.says(one).family, _asking(one, op)), one.dur)
        for step in trace.steps
        for one, op in zip(step.work, step.asking, strict=True)
    )
    times, by_family, by_op = defaultdict(list), defaultdict(Counter), defaultdict(Counter)
    for (name, family, op), durations in alike.items():
        times[name] += durations
        by_family[name][family] += sum(durations)
        by_op[name][op] += sum(durations)
    total = sum(map(sum, times.values()))
    found = (
        KernelTimes(
            name=name,
            family=by_family[name].most_common(1)[0][0],
            asked_by=mostly(by_op[name]),
            count=len(durations),
            total_us=sum(durations) / 1e3,
            share=sum(durations) / total if total else 0.0,
            median_us=median(durations) / 1e3,
            mean_us=fmean(durations) / 1e3,
            low_us=min(durations) / 1e3,
            high_us=max(durations) / 1e3,
        )
        for name, durations in times.items()
    )
    return tuple(sorted(found, key=lambda one: -one.total_us))


def mostly(by_op: Counter) -> str:
    """Return the op with more than half of the counts; "several ops" if no op has that many."""
    ((op, most),) = by_op.most_common(1)
    return op if len(by_op) == 1 or 2 * most > by_op.total() else "several ops"


def _asking(one: Work, op: Op | None) -> str:
    """The name of what asked for an activity: the op; of a CUDA graph whose capture is not known, the annotation that
    the capture gave to it. "" for a launch in no op and no annotation. The profiler's mark of a step asks for nothing.
    """
    launch, name = one.launch, "" if op is None or op.name.startswith(STEP) else op.name
    if one.recorded is None and launch is not None and "GraphLaunch" in launch.name:
        return one.annotation or name
    return name


def _queries_before(queries: Sequence[Op]) -> dict[int, int]:
    """Return the number of occupancy queries between a launch and the previous one on its thread, by launch id.

    queries: all queries of the trace. Launches without one may be left out.
    """
    parents = {id(query.parent): query.parent for query in queries if query.parent is not None}
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
