"""Parts of a training step: backward by op, recomputation, optimizer, synchronizations, DataLoader, memory."""

import bisect
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from operator import itemgetter

import msgspec

from tracereader.figures.pace import on_its_thread
from tracereader.figures.phases import backward_nodes, in_backward
from tracereader.figures.places import Place
from tracereader.figures.steps import ids_inside, labels, loader_waits, outermost_named, spanned
from tracereader.trace import MODULE, STEP, Op, Step, Trace, Work, innermost, outermost, start_of
from tracereader.trace.decoded import decoded_as
from tracereader.trace.families import says
from tracereader.trace.grouped import grouped
from tracereader.trace.intervals import Intervals, Lengths, both, joined, length, minus, union
from tracereader.trace.labels import AUTOGRAD, OPTIMIZER, SPARSE_GRADIENT, is_phase
from tracereader.trace.op_names import aten
from tracereader.trace.waits import SYNCHRONIZES

# Ops that make a tensor without an input tensor. Autograd never numbers them, whether it records or not.
UNNUMBERED = tuple(aten("empty zeros ones full rand arange eye scalar_tensor to lift_fresh"))
# torch.optim's optimizers that have fused=True, and those that have only foreach=True. Muon, LBFGS and SparseAdam have
# neither. Two of them take sparse gradients, too: their fused form refuses these, and the foreach one loops over them.
FUSED_OPTIMIZERS = ("Adam", "AdamW", "SGD", "Adagrad")
FOREACH_OPTIMIZERS = ("ASGD", "Adadelta", "Adafactor", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop")
TORCHS_OPTIMIZERS = (*FUSED_OPTIMIZERS, *FOREACH_OPTIMIZERS, "Muon", "LBFGS", "SparseAdam")
TAKING_SPARSE = ("SGD", "Adagrad")
# An optimizer with complex parameters calls this op. Its fused form refuses them.
OF_COMPLEX_NUMBERS = "aten::view_as_real"
POINTS = 60  # the number of points of the memory curve over the step


class Recomputed(msgspec.Struct, frozen=True):
    """Forward ops that ran again inside backward (activation checkpointing). gpu_us: None without a GPU lane."""

    calls: int
    cpu_us: float
    gpu_us: float | None
    pieces: int


class OptimizerCost(msgspec.Struct, frozen=True):
    """One optimizer's steps within a step.

    how: fused, foreach, compiled or for-loop, by the ops that it calls and the kernels that they launch; "" if the
    trace does not show it, as for a library's optimizer without kernels. faster: the way, fused or foreach, that torch
    offers instead; "" if it offers none. forward_us and backward_us: the ops that run in them because the optimizer
    calls a closure; no other figure includes them. idle_us: GPU idle time in them, without the time that is charged to
    a synchronization.
    """

    name: str
    how: str
    faster: str
    cpu_us: float
    launches: int
    gpu_us: float
    idle_us: float | None
    forward_us: float
    backward_us: float

    @property
    def label(self) -> str:
        """Return the name of torch's annotation around its steps."""
        return f"{OPTIMIZER}{self.name}.step"


class Sync(msgspec.Struct, frozen=True):
    """Calls in which the CPU waited for the GPU, by the calling op, else its annotation, else Python.

    cpu_us: the time of the calls. idle_us: the GPU's idle time during each call and during the next launch call after
    it, on the same thread or on those that take turns with it in backward.
    """

    asked_by: str
    call: str
    calls: int
    cpu_us: float
    idle_us: float


class Loading(msgspec.Struct, frozen=True):
    """The step's wait for the DataLoader's next batch.

    idle_us: GPU idle time in it, without what is charged to a synchronization; None without a GPU lane.
    """

    us: float
    idle_us: float | None
    share: float  # of the step's time on the CPU


class MemoryCurve(msgspec.Struct, frozen=True):
    """Allocated memory over one step: on the GPU with the highest peak; on a CPU it counts from the recording's start.

    points: the maximum in each of as many equal intervals of the step. peak_at: the peak's position as a share of the
    step's time. phase, module, op: around the peak's allocation; None if nothing encloses it.
    """

    on_gpu: bool
    start_bytes: int
    peak_bytes: int
    end_bytes: int
    peak_at: float
    phase: str | None
    module: str | None
    op: str | None
    points: tuple[int, ...]


class Training(msgspec.Struct, frozen=True):
    """The training parts of the reported step.

    has_sparse_gradients: backward gives a parameter of the trace a sparse gradient. unused_nodes: the number of ops for
    which autograd records a node although no backward runs; see unused_nodes().
    """

    backward_of: tuple[Place, ...]  # GPU time of backward by the forward op that it belongs to, the largest first
    recomputed: Recomputed | None
    optimizers: tuple[OptimizerCost, ...]
    syncs: tuple[Sync, ...]
    loading: Loading | None
    memory: MemoryCurve | None
    has_sparse_gradients: bool
    unused_nodes: int


def training(trace: Trace, step: Step) -> Training:
    """Return the parts of the step besides forward."""
    ops = list(step.walk())
    idle = None if trace.quality.incomplete else _idle(trace.work, step)
    syncs, charged = _syncs(step, ops, idle)
    rest = None if idle is None else minus(idle, charged)  # so that no idle time is charged twice
    again = recomputed_ops(step)
    # Of steps of two kinds, perhaps only some wait for the DataLoader.
    loads = {step: rest} if trace.quality.mixed is None else {one: _idle(trace.work, one) for one in trace.steps}
    sparse = not trace.op_names.isdisjoint(SPARSE_GRADIENT)
    return Training(
        backward_of=_backward_of(trace, step, ops, again),
        recomputed=_recomputed(step, again),
        optimizers=tuple(_optimizers(step, rest, sparse)),
        syncs=syncs,
        loading=_loading(loads),
        memory=_memory(trace, step),
        has_sparse_gradients=sparse,
        unused_nodes=len(unused_nodes(trace, step)),
    )


def unused_nodes(trace: Trace, step: Step) -> list[Op]:
    """Return the ops for which autograd records a node that no backward uses; empty if the trace shows training.

    The profiler writes autograd's next number into each op while gradients are on. The op that records a node of
    backward is the innermost one with its number, and the next op has another number. The step's last number is left
    out, because nothing shows whether an op has used it. So are casts: autocast turns gradients on while it casts a
    weight, even if the program has turned them off.
    """
    if trace.trains:
        return []
    ops = [op for op in step.walk() if op.kind == "op"]
    # The first and the last call of each op show whether gradients are on. Decoding all arguments takes time.
    sampled = [*{op.name: op for op in reversed(ops)}.values(), *{op.name: op for op in ops}.values()]
    if not any(_numbers_of(op).number >= 0 for op in sampled):
        return []
    last = {_numbers_of(op).number: op for op in ops}
    return [op for number in sorted(last.keys() - {-1})[:-1] if (op := last[number]).name != "aten::_to_copy"]


def recording_ops(step: Step) -> list[Op]:
    """Return the ops of forward that record a node of backward, the innermost with each of autograd's numbers."""
    return list({_numbers_of(op).number: op for op in step.walk() if _is_recorded(op) and not in_backward(op)}.values())


def _idle(work: Sequence[Work], step: Step) -> Intervals | None:
    """Return when no GPU was busy, from the step's start to its end; None without a GPU lane."""
    if not work:
        return None
    near = work[: bisect.bisect_left(work, step.end, key=start_of)]
    busy = joined([(one.start, one.start + one.dur) for one in near if one.start + one.dur > step.start])
    return minus([(step.start, step.end)], busy)


def _backward_of(trace: Trace, step: Step, ops: Sequence[Op], again: Sequence[Op]) -> tuple[Place, ...]:
    if not trace.forward_of:
        return ()
    # If several ops start at one time, autograd keeps the number of the outermost one: aten::linear has none.
    begun = {start for _, start in trace.forward_of.values()}
    names = {(op.track, op.start): op.name for op in reversed(ops) if op.start in begun and op.kind == "op"}
    inside = ids_inside(again)  # another op's forward: the first backward recomputes everything that was dropped
    gpu = defaultdict(list)
    starts = {start for _, start in trace.forward_of}
    for one in step.work:
        for op in one.launch.above() if one.launch and id(one.launch) not in inside else ():
            forward = trace.forward_of.get((op.track, op.start)) if op.start in starts else None
            if forward is not None:
                if forward in names:
                    gpu[names[forward]].append(one.dur)
                break
    places = (Place(name, None, sum(ns) / 1e3, len(ns)) for name, ns in gpu.items())
    return tuple(sorted(places, key=lambda one: -one.gpu_us))


class _Numbers(msgspec.Struct):
    number: int = msgspec.field(name="Sequence number", default=-1)
    thread: int = msgspec.field(name="Fwd thread id", default=-1)


_numbers = msgspec.json.Decoder(_Numbers)


def _numbers_of(op: Op) -> _Numbers:
    return decoded_as(_numbers, op.raw) or _Numbers()


def recomputed_ops(step: Step) -> list[Op]:
    """Return ops that autograd records inside a backward that it does not record itself: forward ops that run again.

    A backward that is to be differentiated (create_graph) contributes none: autograd records all of its ops, and
    nothing shows which of them ran before.
    """
    found = []
    for op in outermost_named(step, lambda name: name.startswith(AUTOGRAD)):
        recorded = list(outermost(op.children, _is_recorded))
        if recorded and _runs_unrecorded(op, recorded):
            found.extend(recorded)
    return found


def _is_recorded(op: Op) -> bool:
    """Return whether an op runs with gradients on. Of the ops of backward, only such ones have no forward."""
    numbers = _numbers_of(op) if op.kind == "op" else None
    return bool(numbers and numbers.thread == 0 and numbers.number >= 0 and not op.name.startswith(AUTOGRAD))


def _runs_unrecorded(root: Op, recorded: Sequence[Op]) -> bool:
    """Return whether an op inside this op of backward runs with gradients off."""
    recorded_ids = ids_inside(recorded) | {id(above) for op in recorded for above in op.above()}
    return any(
        op.name.startswith("aten::")
        and not op.name.startswith(UNNUMBERED)
        and id(op) not in recorded_ids
        and not op.parent.name.startswith("aten::")
        for op in root.walk()
    )


def _recomputed(step: Step, found: Sequence[Op]) -> Recomputed | None:
    if not found:
        return None
    inside = ids_inside(found)
    work = [one for one in step.work if one.launch is not None and id(one.launch) in inside]
    cpu_us, gpu_us = sum(op.us for op in found), sum(one.us for one in work) if step.work else None
    return Recomputed(len(found), cpu_us, gpu_us, pieces=len(work))


def _optimizers(step: Step, idle: Intervals | None, sparse: bool) -> Iterator[OptimizerCost]:
    slices = grouped((op.name.removeprefix(OPTIMIZER).removesuffix(".step"), op) for op in labels(step, OPTIMIZER))
    idle_in = Lengths(idle or []) if slices else None
    for name, some in slices.items():
        closure, backward = _closure(some, step)
        both, backward = (union((op.start, op.end) for op in ones) for ones in (closure, backward))
        own = minus(union((one.start, one.end) for one in some), both)
        inside = ids_inside(some) - ids_inside(closure)
        names = {op.name for one in some for op in one.walk() if op.kind == "op" and id(op) in inside}
        work = [one for one in step.work if one.launch is not None and id(one.launch) in inside]
        how = _how(name, names, work)
        yield OptimizerCost(
            name=name,
            how=how,
            faster="" if sparse and name in TAKING_SPARSE else _faster(name, how, OF_COMPLEX_NUMBERS in names),
            cpu_us=length(own) / 1e3,
            launches=len({id(one.launch) for one in work}),
            gpu_us=sum(one.us for one in work),
            idle_us=None if idle is None else sum(idle_in.between(start, end) for start, end in own) / 1e3,
            forward_us=length(minus(both, backward)) / 1e3,
            backward_us=length(backward) / 1e3,
        )


def _how(name: str, ops: Collection[str], work: Sequence[Work]) -> str:
    if any("_fused_" in one for one in ops):
        return "fused"  # a fused optimizer counts its steps with a foreach op
    if any("_foreach_" in one for one in ops):
        return "foreach"
    # A library's optimizer calls no op of torch's. It is fused if its kernels take many parameters at once.
    kernels = [one for one in work if one.kind == "kernel"]
    of_many = [one for one in kernels if "multi_tensor_apply" in one.name]
    written = [one for one in kernels if says(one).maker.startswith("Inductor")]
    total = sum(one.dur for one in kernels)
    if 2 * sum(one.dur for one in of_many) > total:
        return "fused" if any(says(one).family == "optimizer" for one in of_many) else "foreach"
    if 2 * sum(one.dur for one in written) > total:
        return "compiled"
    if not kernels and name not in TORCHS_OPTIMIZERS:
        return ""  # its ops may only count its steps, beside kernels that the trace does not have
    return "for-loop" if ops or work else ""


def _faster(name: str, how: str, complex_numbers: bool) -> str:
    """Return how torch could run an optimizer with fewer launches: fused, foreach, or ""."""
    if how in ("for-loop", "foreach") and name in FUSED_OPTIMIZERS and not complex_numbers:
        return "fused"
    return "foreach" if how == "for-loop" and name in (*FUSED_OPTIMIZERS, *FOREACH_OPTIMIZERS) else ""


def _closure(slices: Sequence[Op], step: Step) -> tuple[list[Op], list[Op]]:
    """Return the ops of forward and backward that an optimizer's closure runs in its steps, and backward's alone.

    Forward's ops are found by their numbers, which backward's ops share. Backward may run on a thread of its own. An
    optimizer that backward itself calls, for each gradient that is ready, runs no closure.
    """
    calling = [one for one in slices if not in_backward(one)]
    steps = Lengths(union((one.start, one.end) for one in calling))
    backward = [op for op in backward_nodes(step) if steps.between(op.start, op.start + 1)]
    numbers = {_numbers_of(op).number for op in backward} - {-1}
    forward, pending = [], list(calling) if numbers else []
    while pending:
        op = pending.pop()
        mine = _numbers_of(op) if op.kind == "op" else None
        if mine and mine.thread == 0 and mine.number in numbers:
            forward.append(op)
        elif not op.name.startswith(AUTOGRAD):
            pending.extend(op.children)
    return forward + backward, backward


def _waiting(step: Step) -> list[Op]:
    """Return the runtime API calls that wait until the GPU is done, as a copy to unpinned memory does, by start."""
    found = step.named(lambda name: SYNCHRONIZES.search(name) or name in ("cudaMemcpy", "hipMemcpyWithStream"))
    launched = (one for one in step.work if one.launch is not None and one.end <= one.launch.end)
    found += [one.launch for one in launched if "Device -> Pageable" in one.name]
    return sorted({id(op): op for op in found if op.kind == "runtime"}.values(), key=start_of)


def _syncs(step: Step, ops: Sequence[Op], idle: Intervals | None) -> tuple[tuple[Sync, ...], Intervals]:
    """Return the step's synchronizations, and the intervals of idle time that are charged to them.

    The CPU's activity between a synchronization and the next launch call is not charged to the synchronization.
    """
    waiting = [] if idle is None else _waiting(step)
    if not waiting:
        return (), []
    # The gaps inside a running graph are there without a synchronization, too.
    graphs = {id(one.launch): one.launch for one in step.work if one.from_graph}.values()
    idle = minus(idle, union(spanned(call.work) for call in graphs))
    # Autograd's threads take turns with the one that runs the step. Other threads launch by themselves.
    in_turns = {root.track for root in step.roots if root.name.startswith(AUTOGRAD)} | {on_its_thread(step)[0]}
    launches = grouped((op.track in in_turns or op.track, (op.start, op.start + op.dur)) for op in ops if op.work)
    for some in launches.values():
        some.sort()
    found: dict[tuple, list[float]] = defaultdict(lambda: [0, 0.0, 0.0])
    waits, then = [], {}
    for call in waiting:
        sums = found[asking(call), call.name]
        sums[0] += 1
        sums[1] += call.us
        waits.append((call.start, call.end, sums))
        of_thread = launches[call.track in in_turns or call.track]
        following = bisect.bisect_left(of_thread, (call.end, 0))
        then |= {launch: sums for launch in of_thread[following : following + 1]}
    charged: Intervals = []
    idle_in, reached = Lengths(idle), step.start
    for start, end, sums in sorted([*waits, *((*launch, sums) for launch, sums in then.items())], key=itemgetter(0)):
        if end > reached:
            charged.append((max(start, reached), end))
            sums[2] += idle_in.between(*charged[-1]) / 1e3
            reached = end
    every = (Sync(asked, call, calls, cpu, idle) for (asked, call), (calls, cpu, idle) in found.items())
    return tuple(sorted(every, key=lambda one: -one.idle_us)), charged


def asking(call: Op) -> str:
    """Return the outermost of the aten ops right around a call, as aten::item; else the innermost op, or annotation."""
    name = label = None
    for op in call.above():
        if op.kind == "label":
            label = label or op.name
        elif op.kind == "op" and (name is None or (op.name.startswith("aten::") and name.startswith("aten::"))):
            name = op.name
        elif op.kind == "op":
            break
    return name or (label if label and not label.startswith(STEP) else "Python")


def _loading(idle: Mapping[Step, Intervals | None]) -> Loading | None:
    """Return the mean wait of some steps, each with the GPU's idle time that a wait may be charged with."""
    waits = {step: loader_waits(step) for step in idle}
    if not any(waits.values()):
        return None
    waited, us = sum(map(length, waits.values())) / 1e3, sum(step.us for step in idle)
    idle_us = [None if times is None else length(both(waits[step], times)) / 1e3 for step, times in idle.items()]
    mean_idle_us = None if None in idle_us else sum(idle_us) / len(idle)
    return Loading(waited / len(idle), mean_idle_us, share=waited / us if us else 0.0)


def _memory(trace: Trace, step: Step) -> MemoryCurve | None:
    during = [one for one in trace.memory if step.start <= one.time < step.end]
    if not during:
        return None
    on_gpu = any(one.device >= 0 for one in during)
    during = [one for one in during if (one.device >= 0) == on_gpu]
    peak = max(during, key=lambda one: one.total)
    during = [one for one in during if one.device == peak.device]
    before = during[0].total - during[0].bytes
    points, at = [], before
    times = [one.time for one in during]
    for point in range(POINTS):
        left, right = (step.start + (step.end - step.start) * edge // POINTS for edge in (point, point + 1))
        inside = during[bisect.bisect_left(times, left) : bisect.bisect_left(times, right)]
        points.append(max([at, *(one.total for one in inside)]))
        at = inside[-1].total if inside else at
    around = _around(step, peak.track, peak.time)
    modules = innermost(trace.modules.get(peak.track, ()), peak.time)
    # On backward's own thread: the annotation open on the step's thread then.
    main = next((root.track for root in step.roots if root.name == step.name), None)
    open_then = (op for op in (*around, *_around(step, main, peak.time)) if op.kind == "label")
    phase = next((op.name for op in open_then if is_phase(op.name)), None)
    ops = [op.name for op in around if op.kind == "op"]
    return MemoryCurve(
        on_gpu=on_gpu,
        start_bytes=before,
        peak_bytes=max(peak.total, before),
        end_bytes=during[-1].total,
        peak_at=(peak.time - step.start) / (step.end - step.start),
        phase=phase,
        module=modules[-1].name.removeprefix(MODULE) if modules else None,
        op=ops[-1] if ops else None,
        points=tuple(points),
    )


def _around(step: Step, track: tuple | None, time: int) -> list[Op]:
    """Return the calls that enclose a moment on one thread, outermost first."""
    return innermost([root for root in step.roots if root.track == track], time)
