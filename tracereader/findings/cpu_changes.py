"""Changes of what the CPU does: launches, waits, Python, the loader, the optimizer's loop."""

from collections import Counter

from tracereader.figures.training import asking
from tracereader.findings.finding import counted, duration, listed
from tracereader.findings.gpu_changes import BANDWIDTH
from tracereader.findings.opportunity import Case, Change, Proposal
from tracereader.replay import cuda_graph as as_cuda_graph
from tracereader.replay import (
    fused,
    is_wait,
    with_cpu_time,
    with_durations,
    without_cpu_time,
    without_ops,
    without_waits,
)
from tracereader.replay.changes import spans_of
from tracereader.trace import Op, Step
from tracereader.trace.labels import LOADER, OPTIMIZER

# While the profiler records, the step of a fused optimizer with 120 to 150 tensors takes the CPU 800 to 1,400 µs on
# an H200's machine.
FUSED_OPTIMIZER_US = 900
# The next batch of a loader with workers that keep up: 74 to 81 µs there.
READY_BATCH_US = 80
# PyTorch's own Python needs less than this between two ops (µs), also while the profiler records.
PAUSE_US = 500
# Ops that do nothing but bring a value from the GPU.
READS = ("aten::item", "aten::_local_scalar_dense", "aten::is_nonzero")
# Kernels of one op in a row that are alike.
MANY_ALIKE = 16
MOSTLY = 0.5  # of a step's GPU time
SLICES = ("aten::select", "aten::slice", "aten::unbind", "aten::split", "aten::chunk")
ONE_CALL_US = 50


def _waits(case: Case) -> list[Op]:
    """Calls that wait for the GPU within the steps, but for the last one of a step that launches nothing after it."""
    found = []
    for step in case.steps:
        found += [op for op in step.walk() if op.kind == "runtime" and is_wait(op)]
    return found


def cuda_graph(case: Case) -> Proposal | None:
    summary = case.summary
    if not summary.llm.same_in_all_steps or any("GraphLaunch" in one.launched_by for one in summary.gpu_work):
        return None
    waits = {id(op) for op in _waits(case)}
    for step in case.steps:
        last = max((one.launch.start for one in step.work if one.launch), default=0)
        if any(id(op) in waits and op.start < last for op in step.walk()):
            return None
    if summary.chosen.launches < 2:
        return None
    if not case.trains:
        return Proposal(
            as_cuda_graph(case.graph),
            f"{summary.chosen.launches:,} identical launches per step, no synchronization between them",
            'torch.compile(model, mode="reduce-overhead"), or torch.cuda.graph',
        )
    # An optimizer counts its steps on the CPU, and is not captured as it is.
    eager = (OPTIMIZER, LOADER)
    stays = [op for step in case.steps for op in step.walk() if op.kind == "label" and op.name.startswith(eager)]
    left_out = case.launched_in(*eager)
    captured = [one for one in case.step.work if id(one) not in left_out]
    return Proposal(
        as_cuda_graph(case.graph, stays),
        f"{len(captured):,} identical launches per step in forward and backward, no synchronization between them",
        'torch.compile(model, mode="reduce-overhead"), or torch.cuda.make_graphed_callables',
        title="replay forward and backward as CUDA graphs",
    )


def remove_sync(case: Case) -> Proposal | None:
    calls = [op for op in _waits(case) if not any("Pageable -> Device" in one.name for one in op.work)]
    if not calls:
        return None
    names = Counter(asking(op) for op in case.step.walk() if op in set(calls))
    each = listed(f"{name} {count} times" if count > 1 else name for name, count in names.most_common(3))
    read = [op for op in map(_reads_a_value, calls) if op is not None]
    return Proposal(
        without_ops(without_waits(case.graph, calls), read),
        f"the CPU waits for the GPU in each step: {each}",
        "keep the value on the GPU, or read it some steps later",
    )


def _reads_a_value(call: Op) -> Op | None:
    """The op, as aten::item, that a waiting call is all of; None where the op computes something, too."""
    found = None
    for op in call.above():
        if op.kind != "op" or not op.name.startswith(READS):
            break
        found = op
    return found


def fused_optimizer(case: Case) -> Proposal | None:
    loops = [one for one in case.summary.training.optimizers if one.how != "fused" and one.launches > 4]
    if not loops:
        return None
    groups, spans, added = [], [], []
    names = {f"{OPTIMIZER}{one.name}.step" for one in loops}
    for step in case.steps:
        for label in step.walk():
            if label.kind != "label" or label.name not in names:
                continue
            calls = {id(op) for op in label.walk()}
            work = [one for one in step.work if one.launch is not None and id(one.launch) in calls]
            if not work:
                continue
            by_op = Counter()
            for one in work:
                by_op[one.name] += one.us
            # The fused kernel reads and writes each tensor once; the costliest of the loop's kernels does no less.
            groups.append((work, 2 * by_op.most_common(1)[0][1]))
            spans.append(label)
            first = min((one.launch for one in work), key=lambda call: call.start)
            added.append((first.track, first.start, FUSED_OPTIMIZER_US))
    graph = with_cpu_time(without_cpu_time(fused(case.graph, groups), spans_of(spans)), added)
    one = loops[0]
    return Proposal(
        graph,
        f"{one.name} as a {one.how}: {counted(one.launches, 'launch', 'launches')}, {duration(one.cpu_us)} of CPU time",
        f"torch.optim.{one.name}(…, fused=True)",
        assumed=True,
        title=f"use the fused {one.name}",
    )


def data_loader(case: Case) -> Proposal | None:
    waits = [op for step in case.steps for op in step.walk() if op.kind == "label" and op.name.startswith(LOADER)]
    loading = case.summary.training.loading
    if not waits or loading is None:
        return None
    graph = with_cpu_time(
        without_cpu_time(case.graph, spans_of(waits)), [(op.track, op.end, READY_BATCH_US) for op in waits]
    )
    single = any("SingleProcess" in op.name for op in waits)
    return Proposal(
        graph,
        f"the step waits {duration(loading.us)} for the DataLoader" + (", which has no workers" if single else ""),
        "DataLoader(…, num_workers=8, pin_memory=True, persistent_workers=True)" if single
        else "more workers, a larger prefetch_factor, or less work for each sample",
        assumed=True,
    )  # fmt: skip


def python(case: Case) -> Proposal | None:
    spans, longest = [], (0, "", "")
    for step in case.steps:
        ops = sorted(_outside_annotations(step), key=lambda op: op.start)
        launching = {one.launch.track for one in step.work if one.launch is not None}
        reached, name = step.start, "the step's start"
        for op in ops:
            if op.start - reached > PAUSE_US * 1e3:
                spans += [(track, reached, op.start) for track in launching]
                longest = max(longest, (op.start - reached, name, op.name))
            if op.end > reached:
                reached, name = op.end, op.name
    if not spans:
        return None
    ns, before, after = longest
    return Proposal(
        without_cpu_time(case.graph, spans),
        f"no thread is in an op for {duration(ns / 1e3)} between {before} and {after}",
        "do this work ahead, on another thread, or less of it; with_stack=True names the functions",
    )


def _outside_annotations(step: Step) -> list[Op]:
    """The outermost ops and calls of all threads; a wait for the DataLoader is one of them."""
    pending, found = list(step.roots), []
    while pending:
        op = pending.pop()
        if op.kind == "label" and not op.name.startswith(LOADER):
            pending.extend(op.children)
        else:
            found.append(op)
    return found


def larger_batch(case: Case) -> Proposal | None:
    return _calls_as_one(case) or _twice_the_batch(case)


def _twice_the_batch(case: Case) -> Proposal | None:
    """Inference: launches, and products of few rows that read weights, take as long for a batch twice as large."""
    if case.trains or case.peaks is None:
        return None
    few = {one.rows for one in case.summary.llm.weight_reads if one.ridge_rows and 2 * one.rows <= one.ridge_rows}
    reads = {work for work, one, _ in case.activities if one.product and one.product.m in few}
    if sum(work.us for work in reads) < MOSTLY * case.summary.summed_us:
        return None
    longer = {work: 2 * one.us for work, one, _ in case.activities if work not in reads}
    rows = min(few)
    return Proposal(
        with_durations(case.graph, case.in_all_steps(longer)),
        f"{counted(len(reads), 'product')} of {counted(rows, 'row')} or more read weights for most of their time",
        "process twice as many sequences in one step; the times are for today's batch",
        assumed=True,
        title="double the batch",
        shared=2,
    )


def _calls_as_one(case: Case) -> Proposal | None:
    """Equal products of slices of one tensor become one batched product."""
    runs, run = [], []
    for entry in case.activities:
        _, one, op = entry
        same = (
            run
            and op is not None
            and one.name == run[-1][1].name
            and one.product == run[-1][1].product
            and (run[-1][2] is not None and run[-1][2].name == op.name)
        )
        if same:
            run.append(entry)
        else:
            run = [entry]
            runs.append(run)
    taken = sum(op.name in SLICES for op in case.step.walk() if op.kind == "op")
    # Slices of one tensor, taken call by call, need no other call's result; layers of a network do.
    runs = [run for run in runs if MANY_ALIKE <= len(run) <= taken and run[0][1].family == "GEMM"]
    if not runs:
        return None
    groups = []
    places = {id(work): place for place, (work, _, _) in enumerate(case.activities)}
    for run in runs:
        following = case.activities[places[id(run[-1][0])] + 1 :][:1]
        run += [entry for entry in following if entry[2] is not None and entry[2].name == "aten::cat"]
        us = sum(one.us for _, one, _ in run)
        moved = [one.bytes_moved for _, one, _ in run if one.product]
        if case.peaks and None not in moved:
            us = min(us, max(run[0][1].us, sum(moved) / (BANDWIDTH * case.peaks.gb_s) / 1e3))
        groups.append(([work for work, _, _ in run], us))
    longest = max(runs, key=len)
    return Proposal(
        case.condensed(groups, ONE_CALL_US),
        f"{len(longest)} calls of {longest[0][2].name} in a row, on slices of equal shape",
        "stack the inputs and call torch.bmm once, if no call needs another one's result",
        assumed=True,
        title="batch equal operations into one",
    )


CPU_CHANGES = (
    Change("cuda_graph", "replay the step as a CUDA graph", cuda_graph),
    Change("remove_sync", "drop or postpone synchronizations", remove_sync),
    Change("fused_optimizer", "use the fused optimizer", fused_optimizer),
    Change("data_loader", "prepare batches ahead", data_loader),
    Change("python", "move Python work out of the step", python),
    Change("larger_batch", "give each launch more work", larger_batch),
)
