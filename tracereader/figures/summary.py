"""All measurements of one trace, in one object. Report, findings, comparison and --json use it."""

import bisect
from collections import Counter
from collections.abc import Sequence

import msgspec

from tracereader.figures.avoidable import CastProducts, HiddenCopy, MaskMade, cast_products, hidden_copies, mask_made
from tracereader.figures.captures import Captures, captures
from tracereader.figures.communication import Communication, communication
from tracereader.figures.compiled import Compiled, compiled
from tracereader.figures.cpu import Cpu
from tracereader.figures.debugging import Debugging, debugging
from tracereader.figures.decoding import LanguageModel, decoding, same_in_all_steps, weight_casts
from tracereader.figures.gpu_time import FamilyTime, GpuTime, Parts, families, gpu_time, idle_in, parts_by_device
from tracereader.figures.gpu_work import GpuWork, KernelTimes, gpu_work, kernel_times
from tracereader.figures.inside import InsideKernel, inside
from tracereader.figures.layers import layer_names
from tracereader.figures.pace import lanes_us, window
from tracereader.figures.phases import by_phase
from tracereader.figures.places import Place, by_label, by_module
from tracereader.figures.recording import Profiler, Recording, profiler, recording_of
from tracereader.figures.regime import regime_of, waits_for_gpus
from tracereader.figures.repeats import Repeat, repeats
from tracereader.figures.source import Source, source
from tracereader.figures.steps import StepFacts, Uneven, spanned, step_facts, typical, uneven, usual_busy_us
from tracereader.figures.training import Training, training
from tracereader.figures.unfused import Unfused, unfused
from tracereader.trace import Step, Trace, start_of
from tracereader.trace.grouped import totals
from tracereader.trace.intervals import clipped, length, union


class Places(msgspec.Struct, frozen=True):
    """The step's time by place in the program.

    by_phase: by autograd's events; empty if the user annotated the step. by_label: empty with fewer than two
    annotations. by_module: empty without stacks. by_module_class: by_module with equal modules in one row.
    """

    by_label: tuple[Place, ...]
    by_phase: tuple[Place, ...]
    by_module: tuple[Place, ...]
    by_module_class: tuple[Place, ...]


class Attention(msgspec.Struct, frozen=True):
    """The step's attention. unfused: attention whose scores go through memory."""

    unfused: tuple[Unfused, ...]
    hidden_copies: tuple[HiddenCopy, ...]
    mask_made: MaskMade | None
    cast_products: CastProducts | None


class Summary(msgspec.Struct, frozen=True):
    """All measurements of one trace: times in µs, shares from 0 to 1. A field is None if the trace does not show it.

    typical_step: the name of the step that gpu_work, cpu, places and attention describe. gpu and families: over the
    window, from the first step that counts (see left_out) to the end of the last step or of the steps' last GPU work.
    """

    source: Source
    recording: Recording
    steps: tuple[StepFacts, ...]
    uneven: Uneven | None  # steps with the same calls that differ by several times
    left_out: list[str]  # far longer steps, which would hide the behavior of the rest
    typical_step: str
    typical_index: int  # its index in the trace's steps, because a name may occur twice
    cpu_us: float  # of the typical step, whichever step is reported
    window_us: float
    recorded_step_us: float  # the step's time while it was recorded; see pace.py
    unprofiled_step_us: float | None  # the same without the profiler, if the run measured it
    unprofiled_cpu_us: float | None  # the CPU's time for it when the GPU is idle at its beginning, with waits in it
    gpu: GpuTime | None
    steady: GpuTime | None  # the same from one step's first GPU work to the last one's; see regime.py
    steady_us: float  # the length of its window
    after_first: bool  # whether that leaves out a first step that stands out
    busy_by_device: dict[str, float]  # of a process with several GPUs, the share of the steady window; see regime.py
    waits_for: str | None  # the regime: what limits the steps; see regime.py
    families: tuple[FamilyTime, ...]
    captures: Captures | None  # of the step, into CUDA graphs; None if a step captures nothing
    gpu_work: tuple[GpuWork, ...]
    kernels: tuple[KernelTimes, ...]
    repeats: tuple[Repeat, ...]  # in gpu_work, including the layers of a model
    step_gpu: GpuTime | None  # of the step's own work, from its first start to its last end
    idle_in: dict[str, float]  # the step's GPU idle time before launches, by the launching thread's activity
    first_wait_us: float | None  # of the first launched activity, with nothing recorded running
    idle_python: dict[str, float]  # the part of it outside ops and calls, by Python function; empty without stacks
    cpu: Cpu
    places: Places
    training: Training
    communication: Communication | None  # of the rank that wrote the trace; None if it has none
    debugging: Debugging
    attention: Attention
    llm: LanguageModel
    compiled: Compiled
    profiler: Profiler
    inside: tuple[InsideKernel, ...]  # the phases that kernels recorded; empty for most traces

    @property
    def chosen(self) -> StepFacts:
        """Return the reported step: a typical one, or the one asked for."""
        return self.steps[self.typical_index]

    @property
    def has_gpu_work(self) -> bool:
        """Return whether the steps have GPU work. Without it, as in a run on the CPU, there is only a CPU lane."""
        return any(step.launches for step in self.steps) or bool(self.gpu_work)

    @property
    def kernels_of_step(self) -> list[GpuWork]:
        """Return the kernels of the reported step, without copies and memsets."""
        return [one for one in self.gpu_work if one.kind == "kernel"]

    @property
    def summed_us(self) -> float:
        """Return the summed times (µs) of that GPU work; overlapping activities count in full."""
        return sum([one.us for one in self.gpu_work])

    @property
    def launches_graphs(self) -> bool:
        """Return whether the reported step launches CUDA graphs."""
        return any(one.from_graph for one in self.gpu_work)

    @property
    def graph_launches(self) -> int:
        """Return how many CUDA graphs the reported step launches."""
        return sum(one.calls for name, one in self.cpu.runtime.items() if "GraphLaunch" in name)

    @property
    def busy_share(self) -> float | None:
        """Return the share of the steady window in which the GPU is busy."""
        return None if self.idle_share is None else 1 - self.idle_share

    @property
    def idle_share(self) -> float | None:
        """Return the share of the steady window in which the GPU is idle, by which the regime is decided."""
        return self.steady.idle_us / self.steady_us if self.steady and self.steady_us else None

    @property
    def steady_steps(self) -> Sequence[StepFacts]:
        """Return the steps of the steady window: from one step's first GPU activity to the last step's."""
        working = [one for one in self.steps[len(self.left_out) + self.after_first :] if one.gpu_busy_us]
        if self.recording.mixed is not None:
            return working
        return [one for one in working[:-1] if one.name != self.recording.outlier]

    @property
    def by_family(self) -> Counter:
        """Return the times of that GPU work by family."""
        return totals((one.family, one.us) for one in self.gpu_work)

    @property
    def gpu_us(self) -> float:
        """Return the median time (µs) that the GPU is busy in a step, over the steps of which the step's time is one.

        If a step's work runs beside the next step's, it is the GPU's share of the time from step to step.
        """
        us = usual_busy_us(self.steps[len(self.left_out) :])
        if us <= self.recorded_step_us or self.steady is None or not self.steady_us:
            return us
        return self.recorded_step_us * self.steady.busy_us / self.steady_us

    def count(self, kind: str) -> int:
        """Return the number of kernels, memcpys or memsets of the reported step."""
        return sum(one.kind == kind for one in self.gpu_work)


def summarize(trace: Trace, step: Step | None = None) -> Summary:
    """Return the measurements of a trace. step: the step to report; None for a typical one."""
    usual = typical(trace)  # only once, because it counts every op of a trace without GPU work
    step = step or usual
    facts = tuple(step_facts(trace, usual))
    counted, start, end = window(trace, usual)
    left_out = len(trace.steps) - len(counted)
    parts = parts_by_device(trace.work, start, end, waits_for_gpus(trace) if len(trace.devices) > 1 else None)
    layers = layer_names(trace, step)
    incomplete = trace.quality.incomplete
    waits_in, waits_in_python = ({}, {}) if incomplete else idle_in(trace, step)
    measured = tuple(gpu_work(trace, step, layers))
    regime = regime_of(trace, usual, step, parts, measured)
    lanes = lanes_us(trace, usual)
    return Summary(
        source=source(trace),
        recording=recording_of(trace, usual),
        steps=facts,
        uneven=uneven(trace),
        left_out=[one.name for one in trace.steps[:left_out]],
        typical_step=step.name,
        typical_index=next(place for place, one in enumerate(trace.steps) if one is step),
        cpu_us=usual.us,
        window_us=(end - start) / 1e3,
        recorded_step_us=max(lanes.values()),
        unprofiled_step_us=trace.facts.unprofiled_step_us,
        unprofiled_cpu_us=trace.facts.unprofiled_cpu_us,
        gpu=None if incomplete else gpu_time(parts, [(start, end)]),
        **msgspec.structs.asdict(regime),
        families=families(trace.work, start, end),
        captures=captures(step.roots, trace.op_names),
        gpu_work=measured,
        repeats=repeats(step.work, measured),
        kernels=kernel_times(trace),
        step_gpu=_alone(trace, step, parts, start, end) if step.work and not incomplete else None,
        idle_in=waits_in,
        first_wait_us=None if incomplete else _first_wait_us(trace, start),
        idle_python=waits_in_python,
        cpu=Cpu(trace, step, layers),
        places=Places(by_label(step), by_phase(trace, step), *by_module(trace, step)),
        training=training(trace, step),
        communication=communication(trace, counted, parts, start, end, regime.steady),
        debugging=debugging(trace, step),
        attention=Attention(unfused(step), hidden_copies(step), mask_made(trace, step), cast_products(step)),
        llm=LanguageModel(
            decoding=decoding(trace, lanes, usual_busy_us(facts[left_out:])),
            weight_casts=sum(len(work) for _, work in weight_casts(step)),
            same_in_all_steps=same_in_all_steps(counted),
        ),
        compiled=compiled(trace),
        profiler=profiler(trace),
        inside=inside(trace),
    )


def _alone(trace: Trace, step: Step, parts: Sequence[Parts], left: int, right: int) -> GpuTime | None:
    """Return the time of a step's work alone, from its first start to its last end. None if it takes no time.

    parts: those of the window from left to right, which are used if no other work runs while the step's does.
    """
    start, end = spanned(step.work)
    first, until = (bisect.bisect_left(trace.work, time, key=start_of) for time in (start, end))
    only_its = until - first == len(step.work) and all([one.start + one.dur <= start for one in trace.work[:first]])
    if not (only_its and left <= start and end <= right):
        parts = parts_by_device(step.work, start, end)
    return gpu_time(parts, [(start, end)])


def _first_wait_us(trace: Trace, start: int) -> float | None:
    """Return the wait (µs) of the first launched activity after its launch call, with nothing recorded running.

    The profiler's own slices meanwhile do not count. None if the launch lies before the window.
    """
    place = next((place for place, one in enumerate(trace.work) if one.launch is not None), None)
    if place is None or trace.work[place].launch.start < start:
        return None
    wait = trace.work[place].launch.end, trace.work[place].start
    before = [*trace.work[:place], *trace.overheads]
    meanwhile = union(clipped(((one.start, one.end) for one in before), *wait))
    return max(0, wait[1] - wait[0] - length(meanwhile)) / 1e3
