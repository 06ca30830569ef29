"""CPU activity in a step: the call tree, the times of its ops and runtime calls, the annotation around it."""

from collections import defaultdict

import msgspec

from tracereader.figures.cpu_work import CpuWork, cpu_work, op_threads, outside_ops
from tracereader.figures.inputs import inputs_of
from tracereader.figures.steps import label_of, self_us
from tracereader.trace import Step, Trace


class Call(msgspec.Struct, frozen=True):
    """One line of the step's call tree, parents first.

    launched: the names of the GPU activities that this call launched. reaches_gpu: whether this call or one below it
    launched any.
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


class Cpu(msgspec.Struct, frozen=True, rename={"work": "cpu_work"}):
    """The CPU's side of the reported step. work and outside_ops are set only if the steps have no GPU work.

    inputs: shapes of the ops' inputs, each with its number of calls; empty without recorded shapes. runtime: calls of
    the CUDA runtime API, including synchronizations. outside_ops: the share of the step in which nothing recorded is
    open on any thread.
    """

    label: Label | None
    chain: tuple[Call, ...]
    ops: dict[str, OpTimes]
    inputs: dict[str, dict[str, int]]
    runtime: dict[str, OpTimes]
    work: tuple[CpuWork, ...]
    outside_ops: float | None
    op_threads: int


def cpu(trace: Trace, step: Step, layers: dict[int, str]) -> Cpu:
    """Return the CPU's side of a step. layers: the model's layer of an op, by the op's id (see layers.py)."""
    chain, times = _calls(step, layers)
    label = label_of(step)
    cpu_only = not any(one.work for one in trace.steps)
    return Cpu(
        label=Label(label.name, label.us, self_us(label), len(label.children)) if label else None,
        chain=chain,
        ops=times.get("op", {}),
        inputs=inputs_of(step) if trace.has_shapes else {},
        runtime=times.get("runtime", {}),
        work=cpu_work(step, layers, trace.facts) if cpu_only else (),
        outside_ops=outside_ops(trace, step) if cpu_only else None,
        op_threads=op_threads(step),
    )


def _calls(step: Step, layers: dict[int, str]) -> tuple[tuple[Call, ...], dict[str, dict[str, OpTimes]]]:
    """Return all calls of a step, and their times by kind and by name."""
    below = set()  # the ids of calls that launched work, and of all calls around them
    for one in step.work:
        op = one.launch
        while op is not None and id(op) not in below:
            below.add(id(op))
            op = op.parent
    chain, nothing = [], []
    sums: dict[tuple[str, str], list] = defaultdict(lambda: [0, 0, 0, False])
    for op, depth in step.dispatch():
        key, name, kind, us = id(op), op.name, op.kind, op.dur / 1e3
        own = self_us(op) if op.children else us
        reaches_gpu = key in below
        launched = [one.name for one in op.work] if op.work else nothing
        chain.append(Call(name, kind, depth, us, own, layers.get(key), launched, reaches_gpu))
        of_name = sums[kind, name]
        of_name[0] += 1
        of_name[1] += us
        of_name[2] += own
        of_name[3] |= reaches_gpu
    times: dict[str, dict[str, OpTimes]] = defaultdict(dict)
    for (kind, name), of_name in sums.items():
        times[kind][name] = OpTimes(*of_name)
    return tuple(chain), times
