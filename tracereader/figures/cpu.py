"""CPU activity in a step: the call tree, the times of its ops and runtime calls, the annotation around it."""

from collections.abc import Mapping
from functools import cached_property

import msgspec

from tracereader.figures.cpu_work import CpuWork, cpu_work, is_op, outside_ops
from tracereader.figures.inputs import OfInputs, by_inputs
from tracereader.figures.steps import label_of, self_ns, self_us
from tracereader.trace import Op, Step, Trace, all_around, outermost
from tracereader.trace.backends import shows_use
from tracereader.trace.grouped import grouped
from tracereader.trace.slices import dur_of


class Call(msgspec.Struct, frozen=True):
    """One line of the step's call tree, parents first.

    launched: the names of the GPU activities that this call launched. reaches_gpu: whether it or a call below did.
    """

    name: str
    kind: str
    depth: int
    us: float
    self_us: float
    layer: str | None  # of the model; see layers.py
    launched: list[str]
    reaches_gpu: bool


class OpTimes(msgspec.Struct, frozen=True):
    """All calls of one op in the step, in µs. total_us includes the calls below it; self_us excludes them."""

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


class Cpu:
    """The CPU's side of the reported step.

    Each figure is measured when it is asked for, because a report of a large step needs only some of them. Until
    then the step stays in memory; see keep(). work and outside_ops are set only if the steps have no GPU work.
    """

    # As --json names them.
    FIELDS = ("label", "chain", "ops", "inputs", "by_inputs", "runtime", "cpu_work", "outside_ops", "op_threads")

    def __init__(self, trace: Trace, step: Step, layers: Mapping[int, str]):
        """layers: the model's layer of an op, by the op's id (see layers.py)."""
        # None once everything is measured.
        self._trace: Trace | None = trace
        self._step, self._layers = step, layers
        self._no_gpu = not any(one.work for one in trace.steps)
        self.calls = step.size

    def keep(self) -> None:
        """Measure everything now, so that the trace can be freed."""
        if self._trace is not None:
            for name in (*self.FIELDS, "recorded_calls", "ops_and_launches", "recorded_us"):
                getattr(self, name)
            self.__dict__.pop("_reach_gpu", None)
            self._trace = self._step = self._layers = None

    @cached_property
    def label(self) -> Label | None:
        label = label_of(self._step)
        return Label(label.name, label.us, self_us(label), len(label.children)) if label else None

    @cached_property
    def chain(self) -> tuple[Call, ...]:
        """Return all calls of the step, parents first."""
        below, nothing, chain = self._reach_gpu, [], []
        for op, depth in self._step.dispatch():
            key, us = id(op), op.dur / 1e3
            own = self_us(op) if op.children else us
            launched = [one.name for one in op.work] if op.work else nothing
            chain.append(Call(op.name, op.kind, depth, us, own, self._layers.get(key), launched, key in below))
        return tuple(chain)

    @cached_property
    def ops(self) -> dict[str, OpTimes]:
        return self._times("op")

    @cached_property
    def recorded_calls(self) -> int:
        """Return the number of ops and runtime calls."""
        return self._step.size - len(self._step.labels)

    @cached_property
    def ops_and_launches(self) -> int:
        """Return the number of ops, and of runtime calls that launch GPU work."""
        return sum(1 for op in self._step.walk() if op.kind == "op" or op.work)

    @cached_property
    def recorded_us(self) -> float:
        """Return the sum of the self times (µs) of all ops and runtime calls."""
        return sum(self_ns(op) for op in self._step.walk() if op.kind != "label") / 1e3

    @cached_property
    def inputs(self) -> dict[str, dict[str, int]]:
        """Return the shapes of the ops' inputs, each with its number of calls; empty without recorded shapes."""
        by_name = grouped((one.name, one) for one in self._of_inputs)
        return {name: {one.inputs: one.calls for one in some} for name, some in by_name.items()}

    @cached_property
    def by_inputs(self) -> list[OfInputs]:
        """Return the times of the ops by the shapes of their inputs, the longest GPU time and then self time first.

        Empty without recorded shapes.
        """
        return sorted(self._of_inputs, key=lambda one: (-one.gpu_us, -one.self_us))

    @cached_property
    def _of_inputs(self) -> list[OfInputs]:
        return by_inputs(self._step) if self._trace.has_shapes else []

    @cached_property
    def runtime(self) -> dict[str, OpTimes]:
        """Return the calls of the CUDA runtime API, including synchronizations."""
        return self._times("runtime")

    @cached_property
    def cpu_work(self) -> tuple[CpuWork, ...]:
        if not self._no_gpu or shows_use(self._trace.backend):
            return ()  # an op's time is not that of its work, which a device does later
        return cpu_work(self._step, self._layers, self._trace.facts)

    @cached_property
    def outside_ops(self) -> float | None:
        """Return the share of the step in which nothing recorded is open on any thread."""
        return outside_ops(self._trace, self._step) if self._no_gpu else None

    @cached_property
    def op_threads(self) -> int:
        """Return the number of threads that ran ops."""
        return len({one.track for one in outermost(self._step.roots, is_op)})

    @cached_property
    def _reach_gpu(self) -> dict[int, Op]:
        """The calls that launched work and all calls around them, by their ids."""
        return all_around(one.launch for one in self._step.work)

    def _times(self, kind: str) -> dict[str, OpTimes]:
        """Return the times of all calls of one kind, by name."""
        calls = grouped((op.name, op) for op in self._step.walk() if op.kind == kind)
        launching = {op.name for op in self._reach_gpu.values() if op.kind == kind}
        return {
            name: OpTimes(len(same), sum(map(dur_of, same)) / 1e3, sum(map(self_ns, same)) / 1e3, name in launching)
            for name, same in calls.items()
        }
