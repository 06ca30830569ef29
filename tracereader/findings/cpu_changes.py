"""Changes of the CPU's work: synchronizations, launches, Python, the DataLoader, the optimizer."""

import bisect
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from itertools import accumulate, chain
from operator import attrgetter
from typing import NamedTuple

from tracereader.figures.autograd import in_backward
from tracereader.figures.gpu_time import python_in
from tracereader.figures.gpu_work import launch_args
from tracereader.figures.pace import PAUSE_US
from tracereader.figures.steps import labels
from tracereader.figures.training import asking
from tracereader.findings.finding import counted, duration, how_often, listed
from tracereader.findings.gpu_changes import FOREACH, NEED_THE_SIZE, SELECTS, as_one_kernel_us
from tracereader.findings.opportunity import Case, Change, Proposal
from tracereader.findings.ops import NO_VALUES, is_of_a_library
from tracereader.replay import (
    Graph,
    fused,
    waits_of,
    with_cpu_time,
    with_durations,
    without_cpu_time,
    without_ops,
    without_waits,
)
from tracereader.replay.changes import spans_of
from tracereader.trace import Op, Step, Work
from tracereader.trace.intervals import clipped, length, length_between, union
from tracereader.trace.labels import AUTOGRAD, GIVES_GRADIENT, LOADER, OPTIMIZER, is_phase

# CPU time of an optimizer's step while the profiler records, in launches (Case.launch_us): a part for the step, and one
# for each tensor. A fused optimizer with 53 to 291 tensors takes 490 to 2,800 µs (the medians of 15 recordings), which
# is 0.8 to 1.7 times what these parts give. A foreach optimizer takes 0.8 to 1.6 launches for each tensor with SGD, and
# 5 to 8 with AdamW, which reads each tensor's count of steps. Others were not recorded, so 4 is in between.
OPTIMIZER_LAUNCHES, FUSED_TENSOR_LAUNCHES, FOREACH_TENSOR_LAUNCHES = 20, 1.4, 4
# A fused optimizer also calls its ops for each parameter group. On an H100's machine, 98 groups of one tensor each took
# 930 launches, and one group of them 150 to 190.
GROUP_LAUNCHES, MANY_GROUPS = 8, 8
# The same in µs if the number of tensors is not known.
FUSED_OPTIMIZER_US, FOREACH_OPTIMIZER_US = 900, 3000
# A foreach optimizer of a small model launches no more than this many kernels.
FEW_LAUNCHES = 4
# CPU time to take a batch that is ready. A loader whose workers keep up takes 74 to 81 µs on that machine.
READY_BATCH_US = 80
# The share of the step that it waits for the DataLoader's workers from which on they set its pace.
WORKERS_SET_THE_PACE = 0.1
# A pause from this length on is the program's own, and is as long without the profiler. In a DDP step of two and four
# H200s, a pause of 10 ms was. A shorter one may be time of the profiler.
LONG_PAUSE_US = 1000
# Ops of this length on average take as long without the profiler, which adds a few µs to each.
LONG_OP_US = 100
# The most ops that are named with their time.
OPS_NAMED = 3
# backward() makes the gradient of a loss with this op, and then calls autograd's engine.
FIRST_GRADIENT = "aten::ones_like"
# The most functions that are named, and the smallest share of the Python time that a named function has.
FUNCTIONS_NAMED, NAMED_SHARE = 3, 0.1
# Ops that only copy a value from the GPU.
READ_A_VALUE = ("aten::item", "aten::_local_scalar_dense", "aten::is_nonzero")
MANY_READS = 8  # so many values in a step are worth to be collected
# Ops that wait for the GPU only to report an error, and torch's variants that do not (torch.linalg's documentation).
CHECKS_ERRORS = {
    "aten::linalg_cholesky": "cholesky_ex",
    "aten::linalg_inv": "inv_ex",
    "aten::linalg_solve": "solve_ex",
    "aten::linalg_lu_factor": "lu_factor_ex",
    "aten::linalg_ldl_factor": "ldl_factor_ex",
}
# A tensor's norm, and what may follow it before the next tensor's.
NORM = "aten::linalg_vector_norm"
BETWEEN_NORMS = (
    "aten::item", "aten::pow", "aten::square", "aten::mul", "aten::add", "aten::add_", "aten::detach", "aten::alias",
    "aten::to",
)  # fmt: skip
# From so many norms in a row on, one call for all of them is worth a look. Its CPU time for each tensor, in launches:
# clip_grad_norm_() took 4.3 for each of 96 tensors on an H100's machine, and get_total_norm() 3.9 for each of 36.
MANY_NORMS, NORM_LAUNCHES = 16, 4
FUSED = "aten::_fused_"  # starts of fused optimizers' ops
# This optimizer reads the loss and the sizes of its steps on the CPU.
READS_THE_LOSS = f"{OPTIMIZER}LBFGS.step"


_start = attrgetter("start")


def _waits(case: Case) -> list[Op]:
    """Return the calls of the replayed steps that wait for the GPU, without the profiler's own synchronization."""
    last = max((one.launch.start for one in case.trace.work if one.launch is not None), default=0)
    found = (op for step in case.steps for op in waits_of(step))
    return [op for op in found if not ("DeviceSynchronize" in op.name and op.start > last)]


def copied(call: Op) -> list[Work]:
    """Return the copies that a call makes, or the ones that its op made just before."""
    return [one for some in copying(call).children for one in some.work] or list(call.work)


def copying(call: Op) -> Op:
    """Return the aten::copy_ around a call; the call itself without one.

    torch copies from pageable memory with cudaMemcpyAsync, and then waits for the stream in the same aten::copy_.
    """
    return call.parent if call.parent is not None and call.parent.name == "aten::copy_" else call


def remove_sync(case: Case) -> Proposal | None:
    if _waits_for_workers(case) or case.summary.waits_for == "turns":
        return None  # several GPUs would overlap only steps that do not depend on each other
    calls = [
        op
        for op in _waits(case)
        if not any("Pageable -> Device" in one.name for one in copied(op))
        and not any(above.name.startswith((*NEED_THE_SIZE, READS_THE_LOSS)) for above in op.above())
        and not (case.summary.debugging.checked_gradients and in_backward(op))
        and id(op) not in case.offloads
    ]
    if not calls:
        return None
    ids = {id(op) for op in calls}
    once = {id(copying(op)): waits_in(op) for op in waits_of(case.replayed) if id(op) in ids}
    names = Counter(once.values())
    each = listed(f"{name} {count} times" if count > 1 else name for name, count in names.most_common(3))
    # Ops that do nothing but wait: aten::item, or nonzero in mask indexing.
    around = (op.outermost_of(lambda name: name.startswith((*READ_A_VALUE, SELECTS))) for op in calls)
    read = {id(op): op for op in around if op is not None}.values()
    choose = any(op.name == SELECTS for op in read)
    by_program = [op for op in calls if waits_in(op) == op.name]
    how = ["drop torch.cuda.synchronize() and the synchronization of streams and events"] * bool(by_program)
    if choose:
        how.append("multiply by the mask or use torch.where instead of indexing with a mask")
    unchecked = dict.fromkeys(filter(None, (CHECKS_ERRORS.get(waits_in(op)) for op in calls)))
    how += [f"torch.linalg.{name}, which does not check for errors" for name in unchecked]
    others = [op for op in calls if waits_in(op) not in CHECKS_ERRORS]
    if not choose and len(by_program) < len(others):
        reads = sum(name in READ_A_VALUE for name in once.values())
        together = "collect the values on the GPU and read them at once (torch.stack), or read them some steps later"
        how.append(together if reads >= MANY_READS else "keep the value on the GPU, or read it some steps later")
    return Proposal(
        without_ops(without_waits(case.graph, calls), read),
        f"the CPU waits for the GPU in each step: {each}",
        "; ".join(how),
        assumed=choose,  # computing all elements instead of the selected ones takes longer
    )


def _waits_for_workers(case: Case) -> bool:
    """Return whether the DataLoader's workers set the pace: time saved elsewhere is then waited for them."""
    loading = case.summary.training.loading
    names = case.trace.op_names
    workers = any(name.startswith(LOADER) and "MultiProcessing" in name for name in names)
    return workers and loading is not None and loading.share > WORKERS_SET_THE_PACE


def waits_in(call: Op) -> str:
    """Return the op that waits in this call; the call's name if the program makes the call itself."""
    return asking(call) if any(above.kind == "op" for above in call.above()) else call.name


def fused_optimizer(case: Case) -> Proposal | None:
    loops = [one for one in case.summary.training.optimizers if one.launches > FEW_LAUNCHES and one.faster]
    if not loops:
        return None
    groups, updates, most_groups = [], [], 1
    fuses = {one.label: one.faster == "fused" for one in loops}
    for step in case.steps:
        updating = labels(step, tuple(fuses))  # none in a step that only adds to gradients
        took = [_optimizer_us(case, step, fused) for fused in (False, True)] if updating else []
        for label in updating:
            if label.name not in fuses:
                continue
            work = sorted(label.work_below(), key=lambda one: one.start)
            if not work:
                continue
            by_op = Counter()
            for one in work:
                by_op[one.name] += one.us
            # The fused kernel reads and writes each tensor once. The loop's slowest kernel does at least as much.
            groups.append((work, 2 * by_op.most_common(1)[0][1]))
            parameter_groups = _parameter_groups(label)
            most_groups = max(most_groups, parameter_groups)
            groups_us = (parameter_groups - 1) * GROUP_LAUNCHES * case.launch_us
            updates.append((label, took[fuses[label.name]] + groups_us))
    named = [f"{one.faster} {one.name}" for one in loops]
    return Proposal(
        _with_updates(case, groups, updates),
        "; ".join(
            f"{one.name} ({one.how}): {counted(one.launches, 'launch', 'launches')}, {duration(one.cpu_us)} of CPU time"
            for one in loops
        ),
        listed(f"torch.optim.{one.name}(…, {one.faster}=True)" for one in loops)
        + f"; put parameters with equal settings into one of its {most_groups} groups" * (most_groups >= MANY_GROUPS),
        assumed=True,
        title=f"use the {' and the '.join(named)}",
    )


def fewer_groups(case: Case) -> Proposal | None:
    """Return a proposal to merge parameter groups, each of which costs a foreach or fused optimizer its own calls."""
    merged, updates, most = [], [], {}
    for step in case.steps:
        if len(step.named(_is_on_lists)) < MANY_GROUPS:
            continue
        for update in labels(step, OPTIMIZER):
            by_name = defaultdict(list)
            for one in sorted(update.work_below(), key=_start):
                by_name[one.name].append(one)
            count = _parameter_groups(update)
            if count < MANY_GROUPS or not by_name:
                continue
            most[update.name] = max(most.get(update.name, 0), count)
            merged += [(some, _merged_us(case, some)) for some in by_name.values()]
            fuses = any(op.name.startswith(FUSED) for op in update.walk())
            updates.append((update, _optimizer_us(case, step, fuses)))
    if not most:
        return None
    us = sum(op.us for op in labels(case.replayed, tuple(most)))
    named = {name.removeprefix(OPTIMIZER).removesuffix(".step"): count for name, count in most.items()}
    return Proposal(
        _with_updates(case, merged, updates),
        f"{listed(f'{name} updates {count} groups of parameters' for name, count in named.items())} with calls of "
        f"their own: {duration(us)} of CPU time",
        "put all parameters with equal settings into one group",
        assumed=True,
    )


def norms_at_once(case: Case) -> Proposal | None:
    """Return a proposal to compute the norms of many tensors in one call, as clip_grad_norm_() does."""
    if not case.has(NORM.__eq__):
        return None
    runs, typical = case.in_each_step(_norms_in_a_row)
    if len(norms := [op for op in typical if op.name == NORM]) < MANY_NORMS:
        return None
    times, spans, added = {}, [], []
    for run in filter(None, runs):
        of_norms = [one for op in run if op.name == NORM for one in op.work_below()]
        times |= {one: sum(work.us for work in of_norms) for one in list(run[0].work_below())[-1:]}
        spans.append((run[0].track, run[0].end, run[-1].end))
        count = sum(op.name == NORM for op in run)
        added.append((run[0].track, run[-1].end, count * NORM_LAUNCHES * case.launch_us))
    graph = without_ops(without_cpu_time(case.graph, spans), [op for run in runs for op in run[1:]])
    reads = sum(op.name == "aten::item" for op in typical)
    return Proposal(
        with_cpu_time(with_durations(graph, times), added),
        f"the norms of {len(norms):,} tensors are computed one by one"
        + f"; between them the CPU waits {how_often(reads)}" * (reads > 0)
        + f"; this takes {duration((typical[-1].end - typical[0].start) / 1e3)}",
        "torch.nn.utils.get_total_norm(gradients), or clip_grad_norm_, which returns the norm of all gradients",
        assumed=True,
    )


def _norms_in_a_row(step: Step) -> list[Op]:
    """Return the ops from the first to the last of the most norms of whole tensors that follow each other."""
    longest, run = [], []
    for op in (*step.outermost, None):
        is_norm = op is not None and op.name == NORM and op.inputs.concrete[2:3] in ([""], ["[]"])
        if is_norm or (run and op is not None and op.name in BETWEEN_NORMS):
            run.append(op)
        elif run:
            while run[-1].name != NORM:
                run.pop()
            longest, run = max(longest, run, key=lambda some: sum(op.name == NORM for op in some)), []
    return longest


def _with_updates(case: Case, groups: Iterable[tuple[list[Work], float]], updates: Iterable[tuple[Op, float]]) -> Graph:
    """Return the graph in which each group is one activity, and these steps of optimizers take the given CPU times.

    groups and updates: each with its time (µs).
    """
    updates = list(updates)
    launches = [(min((one.launch for one in update.work_below()), key=_start), us) for update, us in updates]
    graph = without_cpu_time(fused(case.graph, groups), spans_of(update for update, _ in updates))
    return with_cpu_time(graph, [(first.track, first.start, us) for first, us in launches])


def _merged_us(case: Case, kernels: Sequence[Work]) -> float:
    blocks = sum(math.prod(launch_args(one).grid or [1]) for one in kernels)
    return as_one_kernel_us(case, [one.us for one in kernels], blocks)


def _parameter_groups(update: Op) -> int:
    """Return how many times an optimizer calls each of its foreach or fused ops, once for each parameter group.

    Each type of parameters counts as a group of its own. The result is 1 for a loop over single tensors.
    """
    return min(Counter(op.name for op in update.walk() if _is_on_lists(op.name)).values(), default=1)


def _is_on_lists(name: str) -> bool:
    return name.startswith(("aten::_foreach_", FUSED))


def _optimizer_us(case: Case, step: Step, fused: bool) -> float:
    """Return the CPU time (µs) of a fused or a foreach optimizer's step.

    If the step has several, each gets an equal share of the parameters. Their sum does not depend on who has how many.
    """
    tensors = _parameters_with_gradients(step)
    if not tensors or not case.launch_us:
        return FUSED_OPTIMIZER_US if fused else FOREACH_OPTIMIZER_US
    each = FUSED_TENSOR_LAUNCHES if fused else FOREACH_TENSOR_LAUNCHES
    return (OPTIMIZER_LAUNCHES + each * tensors / len(labels(step, OPTIMIZER))) * case.launch_us


def _parameters_with_gradients(step: Step) -> int:
    """Return the number of parameters that get a gradient in a step; 0 if the step does not show it.

    Only the step's first backward pass gives them new tensors, if the program sets gradients to None before it. Later
    passes add to these.
    """
    given = list(step.named(GIVES_GRADIENT.__eq__))
    new = [op for op in given if not any(below.name.startswith("aten::add") for below in op.children)]
    return len(new or given)


def data_loader(case: Case) -> Proposal | None:
    waits = [op for step in case.steps for op in labels(step, LOADER)]
    loading = case.summary.training.loading
    if not waits or loading is None:
        return None
    graph = with_cpu_time(
        without_cpu_time(case.graph, spans_of(waits)), [(op.track, op.end, READY_BATCH_US) for op in waits]
    )
    single = any("SingleProcess" in op.name for op in waits)
    options, if_idle, least_us = "num_workers=8, pin_memory=True", "", 0.0
    if not case.trace.work:
        # The workers share the cores with the model. One worker takes as long for a batch as the main process, and two
        # take at least half as long as one.
        options, if_idle = "num_workers=1 or more", " if cores are idle"
        least_us = loading.us if single else case.graph.recorded_us / 2
    how = f"DataLoader(…, {options}, persistent_workers=True){if_idle}"
    if not single:
        how = f"more workers{if_idle}, a larger prefetch_factor, or less work for each sample"
    return Proposal(
        graph,
        f"{'on average, ' * (case.summary.recording.mixed is not None)}the step waits {duration(loading.us)} for the "
        "DataLoader" + (", which has no workers" if single else ""),
        how,
        assumed=True,
        least_us=least_us,
    )


def cpu_tensors(case: Case) -> Proposal | None:
    """Return a proposal to do ahead what a step computes on CPU tensors, for example the images of the next batch."""
    stretches, typical = case.in_each_step(_cpu_stretches)
    spans = _on_launching_threads(case, stretches)
    if not spans or not typical:
        return None
    longest = max(typical, key=lambda one: one.end - one.start)
    us = [(one.end - one.start) / 1e3 for one in typical]
    ns = Counter()
    for op in chain.from_iterable(one.ops for one in typical):
        ns[op.name] += op.dur
    between = sum(us) - sum(length(union((op.start, op.end) for op in one.ops)) for one in typical) / 1e3
    named = ns.most_common(OPS_NAMED)
    parts = [f"{name} {duration(time / 1e3)}" for name, time in named]
    if len(ns) > len(named):
        parts.append(f"other ops {duration((ns.total() - sum(time for _, time in named)) / 1e3)}")
    several = f" in {len(us)} stretches, the longest" if len(us) > 1 else ""
    functions = _functions_in(case, spans)
    inside = f", in {listed(functions)}" if functions else ""
    return Proposal(
        without_cpu_time(case.graph, spans),
        f"the CPU works for {duration(sum(us))}{several} between {longest.before} and {longest.after}{inside}, and "
        f"launches nothing for the GPU: {', '.join(parts)}, Python between the ops {duration(between)}",
        "prepare the next batch ahead, in a DataLoader with num_workers, or do this work on the GPU",
        unrecorded=ns.total() >= LONG_OP_US * 1e3 * sum(len(one.ops) for one in typical),
    )


class _Stretch(NamedTuple):
    """Time (ns) of a step in which the CPU computes with its own tensors, and the names before and after it."""

    start: int
    end: int
    before: str
    after: str
    ops: list[Op]


def _cpu_stretches(step: Step) -> list[_Stretch]:
    """Return the stretches of a step in which the CPU only runs ops that use no GPU and do not communicate.

    An op that uses the GPU contains a runtime call. The ops of a stretch take longer than a pause together.
    """
    calls = sorted([(op.start, op.start + op.dur) for op in step.walk() if op.kind == "runtime"])
    quiet, reached = [], step.start
    for start, end in (*calls, (step.end, step.end)):
        if start - reached > PAUSE_US * 1e3:
            quiet.append((reached, start))
        if end > reached:
            reached = end
    if not calls or not quiet:
        return []
    ops, found = step.outermost, []
    starts, ends = [op.start for op in ops], [op.start + op.dur for op in ops]
    ends = list(accumulate(ends, max, initial=step.start))  # of all ops before one
    for start, end in quiet:
        first, last = bisect.bisect_left(starts, start), bisect.bisect_left(starts, end)
        some: list[Op] = []
        for place in range(first, last + 1):
            op = ops[place] if place < len(ops) else None
            if place < last and op.end <= end and op.kind == "op" and is_of_a_library(op.name):
                some.append(op)
                continue
            reached, until = ends[place - len(some)], step.end if op is None else op.start
            computing = ((one.start, one.end) for one in some if one.name not in NO_VALUES)
            if some and length(union(clipped(computing, reached, until))) > PAUSE_US * 1e3:
                before = next((one.name for one in ops[:place] if one.end == reached), "the step's start")
                found.append(_Stretch(reached, until, before, op.name if op else "the step's end", some))
            some = []
    return found


def _on_launching_threads(case: Case, found: Sequence[Sequence[tuple]]) -> list[tuple[tuple, int, int]]:
    """Return the spans of what was found in each replayed step, on each thread that launches the step's work.

    found: tuples that begin with a start and an end (ns).
    """
    spans = []
    for step, some in zip(case.steps, found, strict=True):
        launching = {one.launch.track for one in step.work if one.launch is not None}
        spans += [(track, start, end) for start, end, *_ in some for track in launching]
    return spans


def python(case: Case) -> Proposal | None:
    if not case.ops_recorded:
        return None  # the time outside recorded calls may be that of ops
    in_steps, typical = case.in_each_step(_pauses)
    spans = _on_launching_threads(case, in_steps)
    if not spans:
        return None
    pauses = typical or max(in_steps, key=_longest)
    us = [(end - start) / 1e3 for start, end, *_ in pauses]
    start, end, before, after = pauses[us.index(max(us))]
    having = sum(map(bool, in_steps))
    some = f" in {having:,} of {len(in_steps):,} steps" if having < len(in_steps) else ""
    label = _covering([one for step in (case.step, *case.steps) for one in step.labels], start, end)
    covered = f", in the annotation {label}" if label else ""
    several = f" in {len(us)} pauses, the longest ({duration(max(us))})" if len(us) > 1 else ""
    functions = _functions_in(case, spans)
    inside = f", in {listed(functions)}" if functions else ""
    return Proposal(
        without_cpu_time(case.graph, spans),
        f"no thread is in an op for {duration(sum(us))}{some}{several} between {before} and {after}{covered}{inside}",
        "do this work ahead, on another thread, or less of it"
        + ("" if functions else "; with_stack=True names the functions"),
        unrecorded=max(map(_longest, in_steps)) >= LONG_PAUSE_US * 1e3,
    )


def _pauses(step: Step) -> list[tuple[int, int, str, str]]:
    """Return the long pauses in which no thread is in an op: start and end (ns), and the names before and after it.

    A pause before or between autograd's calls is left out: the engine prepares and continues backward in C++. So is one
    before an op on a list of tensors: torch itself sorts the tensors by device and type, as in clip_grad_norm_. Pauses
    between ops on CPU tensors belong to cpu_tensors().
    """
    found, reached, name = [], step.start, "the step's start"
    for op in step.outermost:
        start, end = op.start, op.start + op.dur
        if start - reached > PAUSE_US * 1e3:
            in_engine = op.name.startswith(AUTOGRAD) and name.startswith((AUTOGRAD, FIRST_GRADIENT))
            if not in_engine and not op.name.startswith(FOREACH):
                found.append((reached, start, name, op.name))
        if end > reached:
            reached, name = end, op.name
    on_cpu = [(one.start, one.end) for one in _cpu_stretches(step)] if found else []
    return [one for one in found if not length_between(on_cpu, *one[:2])]


def _covering(labels: Iterable[Op], start: int, end: int) -> str:
    """Return the shortest annotation of the user that covers most of an interval (ns); "" without one."""
    most = [op for op in labels if 2 * (min(op.end, end) - max(op.start, start)) > end - start and is_phase(op.name)]
    return min(most, key=lambda op: op.dur).name if most else ""


def _longest(pauses: Sequence[tuple[int, int, str, str]]) -> int:
    return max((end - start for start, end, *_ in pauses), default=0)


def _functions_in(case: Case, spans: Iterable[tuple[tuple, int, int]]) -> list[str]:
    """Return the Python functions with most of the time in these spans, without their files; none without stacks."""
    by_track = defaultdict(list)
    for track, start, end in spans:
        by_track[track].append((start, end))
    ns = Counter()
    for name, time in python_in(case.trace.frames, by_track).items():
        ns[name.rpartition("): ")[2]] += time
    return [name for name, time in ns.most_common(FUNCTIONS_NAMED) if name and time > NAMED_SHARE * ns.total()]


CPU_CHANGES = (
    Change("remove_sync", "drop or postpone synchronizations", remove_sync),
    Change("fused_optimizer", "use the fused optimizer", fused_optimizer),
    Change("fewer_groups", "merge parameter groups of the optimizer", fewer_groups),
    Change("norms_at_once", "compute all norms at once", norms_at_once),
    Change("data_loader", "prepare batches ahead", data_loader),
    Change("cpu_tensors", "move work on CPU tensors out of the step", cpu_tensors),
    Change("python", "move Python work out of the step", python),
)
