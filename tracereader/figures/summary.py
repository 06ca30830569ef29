"""Everything measured of one trace, in one object: report, findings, comparison and --json are made of it."""

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median

import msgspec

from tracereader.figures.autograd import by_phase
from tracereader.figures.avoidable import CastProducts, HiddenCopy, MaskMade, cast_products, hidden_copies, mask_made
from tracereader.figures.captures import Captures, captures, is_launch
from tracereader.figures.cpu_work import CpuWork, cpu_work, op_threads, outside_ops, roofs_of
from tracereader.figures.decoding import (
    Decoding,
    Unneeded,
    WeightReads,
    decoding,
    same_in_all_steps,
    unneeded,
    weight_reads,
)
from tracereader.figures.gpu_time import FamilyTime, GpuTime, families, gpu_time, idle_in
from tracereader.figures.gpu_work import GpuWork, KernelTimes, gpu_work, kernel_times
from tracereader.figures.inputs import inputs_of
from tracereader.figures.intervals import clipped, length, union
from tracereader.figures.layers import layer_names
from tracereader.figures.places import Place, by_label, by_module, by_module_class
from tracereader.figures.repeats import Repeat, repeats
from tracereader.figures.steps import (
    StepFacts,
    Uneven,
    first_start,
    label_of,
    self_us,
    spanned,
    step_facts,
    typical,
    uneven,
)
from tracereader.figures.training import Training, training
from tracereader.figures.unfused import Unfused, unfused
from tracereader.trace import Op, Step, Trace, kernel_names
from tracereader.trace.labels import COMPILED_AGAIN, GRAPH, LOOKUP

# A first step this many times the typical one would hide what the others are like: 700 to 1200 times on
# the H200 without warm-up, where it loads modules and makes handles; mere cold caches make it 3 times.
FAR_WIDER = 10


class Call(msgspec.Struct, frozen=True):
    """One line of the step's dispatch chain, parents first.

    launched: the names of the work that this call put on a GPU. reaches_gpu: it or a call below did.
    """

    name: str
    kind: str
    depth: int
    us: float
    self_us: float
    layer: str | None  # of the model: see layers.py
    launched: list[str]
    reaches_gpu: bool


class OpTimes(msgspec.Struct, frozen=True):
    """All calls of one op in the step. self_us: without what it calls."""

    calls: int
    total_us: float
    self_us: float
    reaches_gpu: bool


class Label(msgspec.Struct, frozen=True):
    """The step's own annotation."""

    name: str
    us: float
    self_us: float
    calls_inside: int


class BufferRequest(msgspec.Struct, frozen=True):
    """The profiler's own allocation of room for GPU records."""

    us: float
    before_first_work: bool


class Overhead(msgspec.Struct, frozen=True):
    """The profiler's or the driver's own slices of one name."""

    count: int
    us: float


class Summary(msgspec.Struct, frozen=True):
    """All that is known of one trace. Times in µs, shares from 0 to 1; None: nothing to tell it by.

    typical_step: the name of the step that gpu_work, chain and ops speak of. gpu and families: over the
    window, from the first step spoken of (see left_out) to the end of the last
    step or of the last GPU work launched in the steps.
    """

    trace: str
    lesson: dict | None
    devices: list[str]
    compute_capability: str | None  # of an NVIDIA GPU, as in sm 90; None for several kinds of GPU
    rank: int | None
    world_size: int | None
    has_steps: bool
    shapes_recorded: bool
    peak_bytes: int | None  # the most memory allocated at once, by the profiler's events of memory
    warnings: list[str]
    steps: tuple[StepFacts, ...]
    uneven: Uneven | None  # steps of the same calls that differ by several times
    left_out: list[str]  # steps so much wider that they would hide what the rest is like
    typical_step: str
    typical_index: int  # its place among the trace's steps: a name may be there twice
    cpu_us: float  # of the typical step, whichever one is spoken of
    window_us: float
    gpu: GpuTime | None
    steady: GpuTime | None  # the same from one step's first GPU work to the last one's: see _steady()
    steady_us: float  # of its window
    after_first: bool  # whether that leaves out a first step that stands out
    families: tuple[FamilyTime, ...]
    captures: Captures | None  # of the step, into CUDA graphs; None of a step that captures nothing
    by_label: tuple[Place, ...]  # of the step; empty with fewer than two labels
    by_phase: tuple[Place, ...]  # of the step, by autograd's events; empty with labels of its own
    by_module: tuple[Place, ...]  # of the step; empty without stacks
    by_module_class: tuple[Place, ...]  # the same, equal modules in one
    training: Training
    gpu_work: tuple[GpuWork, ...]
    cpu_work: tuple[CpuWork, ...]  # of the step, of a trace without GPU work
    outside_ops: float | None  # of the step, in which nothing recorded is open on any thread; without GPU work
    op_threads: int
    repeats: tuple[Repeat, ...]  # in gpu_work, the layers of a model among them
    weight_reads: tuple[WeightReads, ...]
    unneeded: Unneeded
    same_in_all_steps: bool | None  # the GPU work; None of a single step, or of few launches
    decoding: Decoding | None  # where the run told what a language model's step reads
    kernels: tuple[KernelTimes, ...]
    unfused: tuple[Unfused, ...]  # attention of the step whose scores go through memory
    hidden_copies: tuple[HiddenCopy, ...]  # of the step
    mask_made: MaskMade | None
    cast_products: CastProducts | None
    label: Label | None
    chain: tuple[Call, ...]
    ops: dict[str, OpTimes]
    inputs: dict[str, dict[str, int]]  # of the ops, each with how often it came; empty without shapes
    runtime: dict[str, OpTimes]  # calls of the driver, synchronizations among them
    step_gpu: GpuTime | None  # of the step's own work, from its first start to its last end
    idle_in: dict[str, float]  # the step's GPU time idle for want of a launch, by what the launching thread was in
    first_wait_us: float | None  # of the first launched activity, with nothing recorded running
    idle_python: dict[str, float]  # of that, what lies in Python between ops, by function; empty without stacks
    buffer_requests: tuple[BufferRequest, ...]
    overheads: dict[str, Overhead]
    final_sync_us: float | None  # with which the profiler collects the GPU's records, after the last step
    compiled_graphs: list[str]  # hashes, over all steps
    graphs_of_steps: list[list[str]]  # the same, step by step; empty of a trace without any
    cache_lookups: list[int]  # of torch.compile, step by step; empty of a trace without any
    recompiled: list[str]  # regions of torch.compile that were compiled more than once

    @property
    def chosen(self) -> StepFacts:
        """The step spoken of: a typical one, or the one asked for."""
        return self.steps[self.typical_index]

    @property
    def has_gpu_work(self) -> bool:
        """GPU work in its steps: a run on the CPU, and one that recorded none, have only a CPU lane."""
        return any(step.launches for step in self.steps) or bool(self.gpu_work)

    @property
    def kernels_of_step(self) -> list[GpuWork]:
        """Of the GPU work of the step spoken of, what is no copy and no memset."""
        return [one for one in self.gpu_work if one.kind == "kernel"]

    @property
    def summed_us(self) -> float:
        """The times of that GPU work together, also where pieces ran beside each other."""
        return sum(one.us for one in self.gpu_work)

    @property
    def busy_share(self) -> float | None:
        """Of the window, GPU busy."""
        return self.gpu.busy_us / self.window_us if self.gpu and self.window_us else None

    @property
    def by_family(self) -> Counter:
        """The times of that GPU work by family."""
        times = Counter()
        for one in self.gpu_work:
            times[one.family] += one.us
        return times

    @property
    def gpu_us(self) -> float:
        """How long the GPU is busy in a step: the median of all."""
        return median(one.gpu_busy_us for one in self.steps)

    def count(self, kind: str) -> int:
        """Kernels, memcpys or memsets of the step spoken of."""
        return sum(one.kind == kind for one in self.gpu_work)


def window(trace: Trace, usual: Step) -> tuple[tuple[Step, ...], int, int]:
    """The steps spoken of, and from where to where they reach on both lanes (ns). usual: the typical step."""
    far_wider = len(trace.steps) > 1 and trace.steps[0].us > FAR_WIDER * usual.us
    spoken_of = trace.steps[far_wider:]
    ends = [one.end for one in spoken_of] + [one.end for step in spoken_of for one in step.work]
    return spoken_of, min(one.start for one in spoken_of), max(ends)


def _steady(steps: Sequence[Step]) -> tuple[int, int] | None:
    """From the first GPU work of the first step to that of the last one (ns): as many whole steps as there are.

    Before it the GPU waits for the recording's first launch, behind it nobody launches any more: of a few steps
    that is much. None of a single step.
    """
    firsts = [first for step in steps if (first := first_start(step)) is not None]
    return (firsts[0], firsts[-1]) if len(firsts) > 1 and firsts[0] < firsts[-1] else None


def summarize(trace: Trace, step: Step | None = None) -> Summary:
    """Measure a trace. step: the one to speak of; a typical one where None."""
    usual = typical(trace)  # once: of a trace without GPU work it counts every op
    step = step or usual
    facts = step_facts(trace, usual)
    spoken_of, start, end = window(trace, usual)
    left_out = len(trace.steps) - len(spoken_of)
    wide_start = not left_out and facts[0].times_the_typical is not None
    gpu = gpu_time(trace.work, start, end)
    steady_start, steady_end = _steady(spoken_of[wide_start:]) or (spoken_of[wide_start].start, end)
    cpu_only = not any(one.work for one in trace.steps)
    layers = layer_names(trace, step)
    chain = _chain(step, layers)
    label = label_of(step)
    graphs, recompiled = _compiled(trace)
    looks = any(name.startswith(LOOKUP) for name in trace.op_names)
    calls = [Counter(op.name for op in one.walk()) for one in trace.steps] if graphs or looks else []
    lesson = _lesson(trace)
    waits_in, waits_in_python = idle_in(trace, step)
    measured = tuple(
        msgspec.structs.replace(row, layer=layers.get(id(one)))
        for row, one in zip(gpu_work(trace, step), step.work, strict=True)
    )
    return Summary(
        trace=str(trace.path),
        lesson=lesson,
        devices=list(trace.devices),
        compute_capability=_compute_capability(trace),
        rank=trace.rank.rank if trace.rank else None,
        world_size=trace.rank.world_size if trace.rank else None,
        has_steps=trace.has_steps,
        shapes_recorded=trace.has_shapes,
        peak_bytes=_peak_bytes(trace),
        warnings=_warnings(trace),
        steps=facts,
        uneven=uneven(trace),
        left_out=[one.name for one in trace.steps[:left_out]],
        typical_step=step.name,
        typical_index=next(place for place, one in enumerate(trace.steps) if one is step),
        cpu_us=usual.us,
        window_us=(end - start) / 1e3,
        gpu=gpu,
        steady=gpu_time(trace.work, steady_start, steady_end) or gpu,
        steady_us=(steady_end - steady_start) / 1e3,
        after_first=wide_start,
        families=families(trace.work, start, end),
        captures=captures(step.roots),
        by_label=by_label(step),
        by_phase=by_phase(trace, step),
        by_module=by_module(trace, step),
        by_module_class=by_module_class(trace, step),
        training=training(trace, step),
        gpu_work=measured,
        cpu_work=cpu_work(step, layers, roofs_of(trace.lesson)) if cpu_only else (),
        outside_ops=outside_ops(trace, step) if cpu_only else None,
        op_threads=op_threads(step),
        repeats=repeats(step.work, measured),
        weight_reads=weight_reads(trace, step, measured),
        unneeded=unneeded(step, measured),
        same_in_all_steps=same_in_all_steps(trace),
        decoding=decoding(trace, facts, lesson),
        kernels=kernel_times(trace),
        unfused=unfused(step),
        hidden_copies=hidden_copies(step),
        mask_made=mask_made(trace, step),
        cast_products=cast_products(step),
        label=Label(label.name, label.us, self_us(label), len(label.children)) if label else None,
        chain=chain,
        ops=_times(chain, "op"),
        inputs=inputs_of(step) if trace.has_shapes else {},
        runtime=_times(chain, "runtime"),
        step_gpu=gpu_time(step.work, *spanned(step.work)) if step.work else None,
        idle_in=waits_in,
        first_wait_us=_first_wait_us(trace, start),
        idle_python=waits_in_python,
        buffer_requests=_buffer_requests(trace),
        overheads=_overheads(trace),
        final_sync_us=_final_sync_us(trace),
        compiled_graphs=graphs,
        graphs_of_steps=[graphs_in(names) for names in calls] if graphs else [],
        cache_lookups=[_lookups(names) for names in calls] if looks else [],
        recompiled=recompiled,
    )


def _first_wait_us(trace: Trace, start: int) -> float | None:
    """How long the first activity with a launch waits after its launch call returned, with nothing recorded running.

    What the profiler itself does meanwhile is left out. None where the launch lies before the window.
    """
    first = next((one for one in trace.work if one.launch is not None), None)
    if first is None or first.launch.start < start:
        return None
    wait = first.launch.end, first.start
    meanwhile = union(clipped(((one.start, one.end) for one in [*trace.work, *trace.overheads]), *wait))
    return max(0, wait[1] - wait[0] - length(meanwhile)) / 1e3


def _launches(trace: Trace) -> bool:
    """Whether the driver was called to launch anything, besides what a graph's capture recorded."""
    if not any("Launch" in name for name in trace.op_names):
        return False
    roots = [*(root for step in trace.steps for root in step.roots), *trace.outside]
    found = captures(roots)
    return sum(is_launch(op) for root in roots for op in root.walk()) > (found.launches if found else 0)


def _compute_capability(trace: Trace) -> str | None:
    pairs = [(one.get("computeMajor"), one.get("computeMinor")) for one in trace.device_properties.values()]
    if not all(type(number) is int for pair in pairs for number in pair) or len(set(pairs)) != 1:
        return None
    return "{}{}".format(*pairs[0])


def _chain(step: Step, layers: dict[int, str]) -> tuple[Call, ...]:
    below = set()  # the ids of what launched work, and of all that encloses it
    for one in step.work:
        op = one.launch
        while op is not None and id(op) not in below:
            below.add(id(op))
            op = op.parent
    return tuple(
        Call(
            name=op.name,
            kind=op.kind,
            depth=depth,
            us=op.us,
            self_us=self_us(op),
            layer=layers.get(id(op)),
            launched=[one.name for one in op.work],
            reaches_gpu=id(op) in below,
        )
        for op, depth in step.dispatch()
    )


def _times(chain: tuple[Call, ...], kind: str) -> dict[str, OpTimes]:
    calls, total, own, reaches = Counter(), Counter(), Counter(), set()
    for call in chain:
        if call.kind == kind:
            calls[call.name] += 1
            total[call.name] += call.us
            own[call.name] += call.self_us
            if call.reaches_gpu:
                reaches.add(call.name)
    return {name: OpTimes(calls[name], total[name], own[name], name in reaches) for name in calls}


def _buffer_requests(trace: Trace) -> tuple[BufferRequest, ...]:
    first = min((one.start for step in trace.steps for one in step.work), default=0)
    return tuple(
        BufferRequest(one.us, one.start < first) for one in trace.overheads if one.name == "Activity Buffer Request"
    )


def _overheads(trace: Trace) -> dict[str, Overhead]:
    count, us = Counter(), Counter()
    for one in trace.overheads:
        count[one.name] += 1
        us[one.name] += one.us
    return {name: Overhead(count[name], us[name]) for name in count}


def _final_sync_us(trace: Trace) -> float | None:
    end = max(step.end for step in trace.steps)
    sync: Op | None = next((op for op in trace.outside if "DeviceSynchronize" in op.name and op.start >= end), None)
    return sync.us if sync else None


def _peak_bytes(trace: Trace) -> int | None:
    """The most that was allocated at once, of a GPU where one worked; only with memory profiling."""
    return max((one.total for one in trace.memory if one.device >= 0 or not trace.work), default=0) or None


def _lesson(trace: Trace) -> dict | None:
    found = trace.lesson
    return {"script": found.script, "flags": found.flags, "facts": found.facts} if found else None


def _compiled(trace: Trace) -> tuple[list[str], list[str]]:
    regions = {match[0] for name in trace.op_names if (match := COMPILED_AGAIN.match(name))}
    return graphs_in(trace.op_names), sorted(regions)


def graphs_in(names: Iterable[str]) -> list[str]:
    """The hashes of the compiled graphs that are called under these names."""
    return sorted({match[1] for name in names if (match := GRAPH.search(name))})


def _lookups(calls: Counter) -> int:
    return sum(times for name, times in calls.items() if name.startswith(LOOKUP))


def _warnings(trace: Trace) -> list[str]:
    """What is wrong with the trace itself."""
    found = []
    if trace.zeroed:
        found.append(f"{trace.zeroed} events have time stamp and duration zero (pytorch issue 188481): left out")
    if trace.crossing:
        names = ", ".join(kernel_names.short(name) for name, _ in trace.crossing.most_common(3))
        found.append(
            f"{trace.crossing.total()} slices cross another of their track instead of nesting, and Perfetto drops "
            f"such slices: {names}"
        )
    if other := _table_of_another_run(trace):
        found.append(f"{other.name} beside it is the profiler table of another run")
    for some, what in ((trace.not_known, "left out"), (trace.taken, "taken for its work")):
        for category, count in some.most_common(3):
            slices = f"{count:,} slices" if count > 1 else "1 slice"
            found.append(f"{slices} on a device of a category not known here, {category}: {what}")
    if not trace.work and _launches(trace):
        found.append(
            "there are launches on the CPU lane and no GPU work: the GPU's records are missing from this trace"
        )
    if trace.unlaunched:
        pieces = (
            f"{trace.unlaunched:,} pieces of GPU work have" if trace.unlaunched > 1 else "one piece of GPU work has"
        )
        found.append(f"{pieces} no launch in the trace: in no step, tied to no op")
    return found


def _table_of_another_run(trace: Trace) -> Path | None:
    """The .txt beside a numbered script's trace, where its first line names another run."""
    if not trace.lesson or not trace.lesson.run:
        return None
    table = trace.path.with_name(trace.path.name.removesuffix(".gz").removesuffix(".json") + ".txt")
    try:
        with table.open(errors="replace") as file:
            words = file.readline(200).split()
    except OSError:
        return None
    return table if words[:1] == ["run"] and words[1:] != [trace.lesson.run] else None
