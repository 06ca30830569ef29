"""The input of a proposal: the trace, its measurements, its graph, and what proposals ask of them."""

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property

import msgspec

from tracereader.changes.opportunity import Unprofiled
from tracereader.figures import Summary
from tracereader.figures.attention import attention_calls, growing_keys, passes, recomputed_tokens
from tracereader.figures.avoidable import offloading
from tracereader.figures.gpu_work import GpuWork, numbered
from tracereader.figures.hardware import Peaks, common_peaks
from tracereader.figures.phases import in_backward
from tracereader.figures.steps import ids_inside, labels
from tracereader.figures.uncompiled_flex import uncompiled_flex
from tracereader.findings import recording
from tracereader.replay import Graph
from tracereader.replay.changes import cpu_factor, fused, launching_only, step_us_at, with_cpu_time, without_cpu_time
from tracereader.trace import Op, Step, Trace, Work, start_of
from tracereader.trace.grouped import T, grouped
from tracereader.trace.labels import INDUCTORS_CALL
from tracereader.trace.op_names import SOFTMAX

GPU_VARIES = 0.01  # the CPU does not limit a step that takes at most this share longer than the GPU's work
ROUGHLY = 0.03  # the ends of the estimate without the profiler are replayed to within this share
# Replayed with hardly any CPU time, 53 of 59 measured steps that the GPU limits took at most this share less.
ON_THE_GPU = 0.08
# A GPU activity: its slice, its measurements, and the op that launched it.
Entry = tuple[Work, GpuWork, Op | None]


class Case(msgspec.Struct, frozen=True, dict=True):
    """The input of a proposal: the trace, its measurements, and its graph."""

    trace: Trace
    summary: Summary
    graph: Graph

    @property
    def steps(self) -> tuple[Step, ...]:
        """Return the replayed steps, which are all of a short trace. The typical one may not be among them."""
        return self.graph.trace.steps

    @property
    def is_single(self) -> bool:
        """Return whether the trace has one step only, so that nothing can be compared from step to step."""
        return len(self.trace.steps) == 1

    @cached_property
    def step(self) -> Step:
        """Return the typical step. The summary's GPU work belongs to it."""
        return self.trace.steps[self.summary.typical_index]

    @cached_property
    def compared(self) -> tuple[Step, ...]:
        """Return the replayed steps; of a single one three with it, to see what differs from step to step."""
        if len(self.steps) > 1:
            return self.steps
        steps = self.trace.steps
        first = max(0, min(steps.index(self.replayed) - 1, len(steps) - 3))
        return steps[first : first + 3]

    @cached_property
    def growing_keys(self) -> tuple[int, int] | None:
        """Return the fewest and the most keys of a growing KV cache: see growing_keys()."""
        in_training = attention_calls(self.step) if self.trace.trains else ()  # by hand, a decoder may be unrolled
        return None if any(op.name == SOFTMAX for op in in_training) else growing_keys(self.compared)

    @cached_property
    def recomputed_tokens(self) -> tuple[int, int] | None:
        """Return the fewest and the most tokens that a pass recomputes: see recomputed_tokens()."""
        return None if self.trace.trains else recomputed_tokens(passes(self.compared))

    @cached_property
    def replayed(self) -> Step:
        """Return the typical step, or a replayed one if it is not replayed."""
        return self.step if self.step in self.steps else self.steps[-1]

    @cached_property
    def estimates(self) -> tuple[Unprofiled, ...]:
        """Return the shortest and the longest step that the estimate without the profiler allows, if it matters.

        It does if that time is not known, and if the CPU limits the step or the GPU may wait less for launches then. A
        recording without steps is left out: its replays take long.
        """
        if not self.trace.has_steps or self.summary.unprofiled_step_us:
            return ()
        if recording.recording_matters(self.summary):
            return self._with_less_cpu_time
        if self.summary.waits_for != "overhead":
            return ()
        return tuple(Unprofiled.of(self.graph, us, ROUGHLY) for us in recording.estimate_us(self.summary))

    @cached_property
    def unprofiled(self) -> Unprofiled | None:
        """Return the step without the profiler; None if the run did not measure it.

        Where the GPU's work limits the step, that time does not show how much CPU time it needs. That is the middle of
        the estimate then, if it is less: see cpu_shares().
        """
        known, limit = self._measured, recording.limit_without(self.summary)
        if known is None or limit == "overhead" or not (limit or self._hides_cpu_time):
            return known
        middle = min(self._most_share, sum(recording.cpu_shares(self.summary, self.graph.cpu_us)) / 2)
        return msgspec.structs.replace(self._measured_with(middle), is_middle=True)

    @cached_property
    def _measured(self) -> Unprofiled | None:
        return Unprofiled.of(self.graph, self.summary.unprofiled_step_us)

    @cached_property
    def _most_share(self) -> float:
        """Return the most of the recorded CPU time that the measured step may need.

        A measured step that is shorter than the recorded GPU work alone does not show it.
        """
        return self._measured.factor or cpu_factor(self.graph, (1 + GPU_VARIES) * step_us_at(self.graph, 0.0))

    @property
    def _hides_cpu_time(self) -> bool:
        return self.summary.waits_for in ("compute", "memory", "gpu")

    def _measured_with(self, share: float) -> Unprofiled:
        """Return the measured step if it needs this share of the recorded CPU time."""
        us = self._measured.step_us
        return Unprofiled(us, share, us / step_us_at(self.graph, share))

    @cached_property
    def _of_any_cpu_time(self) -> tuple[Unprofiled, ...]:
        """Return the measured step with the least and the most CPU time that it may need, if it shows neither.

        That is a step which the GPU limits, or which the CPU limits only while it is recorded: with little CPU time it
        would take as long.
        """
        known, limit = self._measured, recording.limit_without(self.summary)
        shows_neither = self._hides_cpu_time or recording.changes_the_regime(self.summary)
        if known is None or limit == "overhead" or not shows_neither:
            return ()
        least_us = (1 - ON_THE_GPU) * known.step_us
        if limit is None and known.scale * step_us_at(self.graph, 1 / recording.MOST_TIMES) < least_us:
            return ()
        least, most = recording.cpu_shares(self.summary, self.graph.cpu_us)
        if limit or self._hides_cpu_time:
            return tuple(self._measured_with(min(share, self._most_share)) for share in (least, most))
        if known.factor and known.scale * step_us_at(self.graph, least) > (1 + ROUGHLY) * known.step_us:
            return ()  # the CPU needs less than the least of the estimate
        most = min(most, known.step_us / self.graph.cpu_us)
        return tuple(Unprofiled(known.step_us, share, known.scale) for share in (min(least, most), most))

    def estimates_after(self, graph: Graph) -> tuple[Unprofiled, ...]:
        """Return the ends of the estimate that matters to a change with this graph.

        Besides `estimates`, it matters if the GPU limits the recorded step and the CPU the changed one, or if the
        measured step does not show how much CPU time it needs.
        """
        if open_ends := self._of_any_cpu_time:
            least, most = (step_us_at(graph, one.factor) for one in open_ends)
            return open_ends if most - least > ROUGHLY * most else ()
        if self.estimates or not (self.trace.has_steps and recording.may_lengthen(self.summary)):
            return self.estimates
        on_cpu, on_gpu = graph.lanes_us
        return self._with_less_cpu_time if on_cpu > on_gpu else ()

    @cached_property
    def _with_less_cpu_time(self) -> tuple[Unprofiled, ...]:
        graph, scale = self.graph, self.graph.recorded_us / self.graph.replayed_us
        shares = recording.cpu_shares(self.summary, graph.cpu_us)
        return tuple(Unprofiled(scale * step_us_at(graph, share), share, scale) for share in shares)

    @cached_property
    def launch_us(self) -> float:
        """Return the lower quartile of the CPU time (µs) of the typical step's calls that launch kernels.

        It is a unit for the CPU's speed, which differs between machines and processes. The lower quartile leaves out
        calls that wait for room in the launch queue. It is 0 without such calls.
        """
        us = sorted([one.launch.us for one in self.step.work if one.launch is not None and one.kind == "kernel"])
        return us[len(us) // 4] if us else 0.0

    @cached_property
    def activities(self) -> list[Entry]:
        """Return the GPU activities of the typical step."""
        return list(zip(self.step.work, self.summary.gpu_work, self.step.asking, strict=True))

    @cached_property
    def calls_inductor(self) -> bool:
        """Return whether the trace has calls of Inductor's code."""
        return self.has(lambda name: name.startswith(INDUCTORS_CALL))

    @cached_property
    def in_flex(self) -> dict[int, Op]:
        """Return for each op inside an uncompiled flex_attention, by id(Op), that call: see uncompiled_flex()."""
        found: dict[int, Op] = {}
        for step in {self.step, *self.steps}:
            found |= uncompiled_flex(step)
        return found

    @cached_property
    def differentiates_twice(self) -> bool:
        """Return whether gradients of gradients are computed. torch.compile and graphed callables cannot do that."""
        return self.has(lambda name: "BackwardBackward" in name)

    def is_internal(self, op: Op) -> bool:
        """Return whether backward, or flex_attention that is not compiled, calls this op."""
        return id(op) in self.in_flex or in_backward(op)

    @cached_property
    def offloads(self) -> set[int]:
        """Return the ids of the ops and calls that offload activations in the typical step and the replayed ones."""
        if not self.named(lambda name: "DtoH" in name):
            return set()
        return ids_inside(op for step in {self.step, *self.steps} for op in offloading(step))

    def named(self, wanted: Callable[[str], object]) -> list[Entry]:
        """Return the GPU activities of the typical step with a wanted name. Names are far fewer than activities."""
        names = set(filter(wanted, {one.name for one in self.summary.gpu_work}))
        return [entry for entry in self.activities if entry[1].name in names] if names else []

    def has(self, wanted: Callable[[str], object]) -> bool:
        """Return whether the trace has an op or call with a wanted name. Names are far fewer than calls."""
        return any(map(wanted, self.trace.op_names))

    @cached_property
    def peaks(self) -> Peaks | None:
        return common_peaks(self.trace.devices)

    def launched_in(self, *starts: str) -> set[int]:
        """Return the ids of the typical step's activities that are launched inside annotations with these prefixes."""
        calls = ids_inside(labels(self.step, starts))
        return {id(one) for one in self.step.work if one.launch is not None and id(one.launch) in calls}

    @cached_property
    def counterparts(self) -> list[dict[Work, Work]]:
        """Return for each replayed step its activities by the typical step's activities that they correspond to."""
        typical = dict(numbered(self.step.work)) if self.steps != (self.step,) else {}
        return [
            dict(zip(step.work, step.work, strict=True))
            if step is self.step
            else {typical[key]: one for key, one in numbered(step.work) if key in typical}
            for step in self.steps
        ]

    def in_each_step(self, find: Callable[[Step], T]) -> tuple[list[T], T]:
        """Return what a function finds in each replayed step, and what it finds in the typical step."""
        found = [find(step) for step in self.steps]
        return found, found[self.steps.index(self.step)] if self.step in self.steps else find(self.step)

    def in_all_steps(self, us: Mapping[Work, float]) -> dict[Work, float]:
        """Return these times (µs) of the typical step's activities for the same activities of every step."""
        return {here[one]: time for here in self.counterparts for one, time in us.items() if one in here}

    def groups_in_all_steps(self, groups: Sequence[tuple[list[Work], float]]) -> list[tuple[list[Work], float]]:
        """Return these groups of the typical step's activities for every step that has the same activities."""
        return [
            ([here[one] for one in group], us)
            for here in self.counterparts
            for group, us in groups
            if all(one in here for one in group)
        ]

    def condensed(self, groups: Sequence[tuple[list[Work], float]], cpu_us: float) -> Graph:
        """Return the graph in which each group of activities is one activity of the given time (µs) and one call.

        The call takes `cpu_us` of CPU time. It replaces everything that a thread does from the first to the last op
        that launches only activities of the group.
        """
        groups = self.groups_in_all_steps(groups)
        spans, added = [], []
        for (work, _), calls in zip(groups, launching_only(self.graph, [work for work, _ in groups]), strict=True):
            for track, ops in grouped((op.track, op) for op in calls).items():
                spans.append((track, min(op.start for op in ops), max(op.end for op in ops)))
            first = min((one.launch for one in work if one.launch is not None), key=start_of, default=None)
            if first is not None:
                added.append((first.track, first.start, cpu_us))
        return with_cpu_time(without_cpu_time(fused(self.graph, groups), spans), added)
