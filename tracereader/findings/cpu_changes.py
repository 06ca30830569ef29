"""Changes of the CPU's work: launches, synchronizations, Python, the DataLoader, the optimizer."""

import bisect
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence

from tracereader.figures.decoding import MANY_LAUNCHES
from tracereader.figures.gpu_time import python_in
from tracereader.figures.training import asking
from tracereader.findings.finding import counted, duration, listed
from tracereader.findings.gpu_changes import BANDWIDTH
from tracereader.findings.opportunity import Case, Change, Entry, Proposal
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
from tracereader.trace.labels import AUTOGRAD, LOADER, OPTIMIZER

# While the profiler records, the step of a fused optimizer with 75 to 180 tensors takes the CPU 470 to 1,500 µs on an
# H200's machine, the medians of seven recordings; that of a foreach optimizer with 160 tensors 1,400 (SGD) to 4,500
# (AdamW).
FUSED_OPTIMIZER_US, FOREACH_OPTIMIZER_US = 900, 3000
# Those of torch.optim that have fused=True.
FUSED_OPTIMIZERS = ("Adam", "AdamW", "SGD", "Adagrad")
SLOWER = ("for-loop", "foreach")
# A foreach optimizer of a small model launches no more than these.
FEW_LAUNCHES = 4
# The next batch of a loader with workers that keep up: 74 to 81 µs there.
READY_BATCH_US = 80
# PyTorch's own Python needs less than this between two ops (µs), also while the profiler records.
PAUSE_US = 500
# Of the functions in it so many are named, and only those with this share of their time.
FUNCTIONS_NAMED, A_SHARE = 3, 0.1
# Ops that only copy a value from the GPU.
READS = ("aten::item", "aten::_local_scalar_dense", "aten::is_nonzero")
# An index by a mask asks how many elements the mask chooses.
CHOOSES = "aten::nonzero"
# Ops whose result is as large as the values are different: nothing can take the place of the wait.
NEED_THE_SIZE = ("aten::unique", "aten::_unique")
# Kernels of one op in a row that are alike.
MANY_ALIKE = 16
ACCUMULATES = f"{AUTOGRAD}torch::autograd::AccumulateGrad"
MOSTLY = 0.5  # of a step's GPU time
SLICES = ("aten::select", "aten::slice", "aten::unbind", "aten::split", "aten::chunk")
# What a call of a few ops takes the CPU while the profiler records.
ONE_CALL_US = 50


def _waits(case: Case) -> list[Op]:
    """The calls of all steps that wait for the GPU."""
    return [op for step in case.steps for op in step.walk() if op.kind == "runtime" and is_wait(op)]


def cuda_graph(case: Case) -> Proposal | None:
    summary = case.summary
    if (
        not summary.llm.same_in_all_steps
        or summary.chosen.launches < 2
        or any("GraphLaunch" in one.launched_by or one.family == "communication" for one in summary.gpu_work)
        or len({work.device for work in case.step.work}) > 1
        or any(_launches_after_a_wait(step) for step in case.steps)
    ):
        return None
    if summary.chosen.launches < MANY_LAUNCHES:
        return None if case.trains else _small_graph(case)
    if not case.trains:
        return Proposal(
            as_cuda_graph(case.graph),
            f"{summary.chosen.launches:,} identical launches per step, no synchronization between them",
            'torch.compile(model, mode="reduce-overhead"), or torch.cuda.graph',
        )
    # An optimizer counts its steps on the CPU, and is not captured as it is. Gradients leave a graph through autograd,
    # which hands each one to its parameter.
    eager = (OPTIMIZER, LOADER)
    stays = [op for step in case.steps for op in step.walk() if op.kind == "label" and op.name.startswith(eager)]
    left_out = case.launched_in(*eager)
    captured = [one for one in case.step.work if id(one) not in left_out]
    accumulated = [
        (op.track, op.start, op.us)
        for step in case.steps
        for op in step.walk()
        if op.name == ACCUMULATES and not any(below.work for below in op.walk())
    ]
    return Proposal(
        with_cpu_time(as_cuda_graph(case.graph, stays), accumulated),
        f"{len(captured):,} identical launches per step in forward and backward, no synchronization between them",
        'torch.compile(model, mode="reduce-overhead"), or torch.cuda.make_graphed_callables',
        title="replay forward and backward as CUDA graphs",
    )


def _small_graph(case: Case) -> Proposal:
    """Of few launches the copies of the inputs count, too: they take at most twice the first op's time."""
    asking = [op for _, _, op in case.activities]
    first = [(work, one.us) for work, one, op in case.activities if op is asking[0]]
    copies = 2 * sum(us for _, us in first)
    graph = with_durations(as_cuda_graph(case.graph), case.in_all_steps({first[0][0]: first[0][1] + copies}))
    calls = [
        (one.launch.track, one.launch.start, ONE_CALL_US)
        for one in (step.work[0] for step in case.steps if step.work)
        if one.launch is not None
    ]
    return Proposal(
        with_cpu_time(graph, calls),
        f"{case.summary.chosen.launches:,} identical launches per step, no synchronization between them; copies of its "
        f"inputs, of at most {duration(copies)}, are counted",
        "torch.cuda.graph, with the inputs copied into the tensors that it reads",
        assumed=True,
    )


def _launches_after_a_wait(step: Step) -> bool:
    last = max((one.launch.start for one in step.work if one.launch), default=0)
    return any(op.kind == "runtime" and op.start < last and is_wait(op) for op in step.walk())


def remove_sync(case: Case) -> Proposal | None:
    calls = [
        op
        for op in _waits(case)
        if not any("Pageable -> Device" in one.name for one in op.work)
        and not any(above.name.startswith(NEED_THE_SIZE) for above in op.above())
    ]
    if not calls:
        return None
    ids = {id(op) for op in calls}
    names = Counter(asking(op) for op in case.step.walk() if id(op) in ids)
    each = listed(f"{name} {count} times" if count > 1 else name for name, count in names.most_common(3))
    read = {id(op): op for op in map(_waits_only, calls) if op is not None}.values()
    choose = any(op.name == CHOOSES for op in read)
    return Proposal(
        without_ops(without_waits(case.graph, calls), read),
        f"the CPU waits for the GPU in each step: {each}",
        "multiply by the mask or use torch.where, in place of indexing with a mask"
        if choose
        else "keep the value on the GPU, or read it some steps later",
        assumed=choose,  # what is computed for all elements in place of some takes longer
    )


def _waits_only(call: Op) -> Op | None:
    """The op that a waiting call is the purpose of: of aten::item, or the nonzero of an index by a mask."""
    found = None
    for op in call.above():
        if op.kind != "op" or not op.name.startswith((*READS, CHOOSES)):
            break
        found = op
    return found


def fused_optimizer(case: Case) -> Proposal | None:
    loops = [
        one
        for one in case.summary.training.optimizers
        if one.launches > FEW_LAUNCHES and one.how in (SLOWER if one.name in FUSED_OPTIMIZERS else SLOWER[:1])
    ]
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
            fuses = label.name.removeprefix(OPTIMIZER).removesuffix(".step") in FUSED_OPTIMIZERS
            added.append((first.track, first.start, FUSED_OPTIMIZER_US if fuses else FOREACH_OPTIMIZER_US))
    graph = with_cpu_time(without_cpu_time(fused(case.graph, groups), spans_of(spans)), added)
    one = loops[0]
    better = "fused" if one.name in FUSED_OPTIMIZERS else "foreach"
    return Proposal(
        graph,
        f"{one.name} ({one.how}): {counted(one.launches, 'launch', 'launches')}, {duration(one.cpu_us)} of CPU time",
        f"torch.optim.{one.name}(…, {better}=True)",
        assumed=True,
        title=f"use the {better} {one.name}",
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
    functions = _functions_in(case, spans)
    told = f", in {listed(functions)}" if functions else ""
    return Proposal(
        without_cpu_time(case.graph, spans),
        f"no thread is in an op for {duration(ns / 1e3)} between {before} and {after}{told}",
        "do this work ahead, on another thread, or less of it"
        + ("" if functions else "; with_stack=True names the functions"),
    )


def _functions_in(case: Case, spans: Iterable[tuple[tuple, int, int]]) -> list[str]:
    """The Python functions that most of these stretches went to, without their files; none without stacks."""
    by_track = defaultdict(list)
    for track, start, end in spans:
        by_track[track].append((start, end))
    ns = Counter()
    for name, time in python_in(case.trace.frames, by_track).items():
        ns[name.rpartition("): ")[2]] += time
    return [name for name, time in ns.most_common(FUNCTIONS_NAMED) if name and time > A_SHARE * ns.total()]


def _outside_annotations(step: Step) -> list[Op]:
    """The outermost ops and calls of all threads. A wait for the DataLoader and an optimizer's step are such, too."""
    pending, found = list(step.roots), []
    while pending:
        op = pending.pop()
        if op.kind == "label" and not op.name.startswith((LOADER, OPTIMIZER)):
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
    if not reads or sum(work.us for work in reads) < MOSTLY * case.summary.summed_us:
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
    taken = sum(op.name in SLICES for op in case.step.walk() if op.kind == "op")
    # Slices of one tensor, taken call by call, need no other call's result; layers of a network do.
    runs = [(count, run) for count, run in _repeated(case.activities) if MANY_ALIKE <= count <= taken]
    if not runs:
        return None
    groups = []
    for _, run in runs:
        us = sum(one.us for _, one, _ in run)
        products = [one for _, one, _ in run if one.product]
        moved = [one.bytes_moved for one in products]
        if case.peaks and moved and None not in moved:
            us = min(us, max(products[0].us, sum(moved) / (BANDWIDTH * case.peaks.gb_s) / 1e3))
        groups.append(([work for work, _, _ in run], us))
    count, longest = max(runs, key=lambda run: run[0])
    return Proposal(
        case.condensed(groups, ONE_CALL_US, _WithSlices()),
        f"{count} calls of {longest[0][2].name} in a row, on slices of equal shape",
        "stack the inputs and call torch.bmm once, if no call needs another one's result",
        assumed=True,
        title="batch equal operations into one",
    )


class _WithSlices:
    """Widens a stretch of calls to the whole loop: from the first slice that is taken for them to the next op."""

    def __init__(self):
        self.ops: dict[tuple, list[Op]] = {}  # by step and thread, in order

    def __call__(self, step: Step, track: tuple, start: int, end: int) -> tuple[int, int]:
        key = id(step), track
        if key not in self.ops:
            found = (op for op in _outside_annotations(step) if op.track == track)
            self.ops[key] = sorted(found, key=lambda op: op.start)
        ops = self.ops[key]
        place = bisect.bisect_left(ops, start, key=lambda op: op.start)
        while place and ops[place - 1].name in SLICES:
            place -= 1
            start = ops[place].start
        following = bisect.bisect_left(ops, end, key=lambda op: op.start)
        return start, ops[following].start if following < len(ops) else end


def _repeated(activities: Sequence[Entry]) -> Iterator[tuple[int, list[Entry]]]:
    """Equal products one after the other, with nothing but equal copies between them; how many, and all of it."""

    def what(entry: Entry) -> tuple | None:
        _, one, op = entry
        return (one.name, one.product, op.name) if op is not None and one.family in ("GEMM", "copy") else None

    activities = [entry for entry in activities if entry[0].kind != "memset"]
    kinds = [what(entry) for entry in activities]
    place = 0
    while place < len(activities):
        count = period = 1
        for length in (1, 2, 3) if kinds[place] and activities[place][1].family == "GEMM" else ():
            reached = place + length
            while reached < len(kinds) and kinds[reached] is not None and kinds[reached] == kinds[reached - length]:
                reached += 1
            if (reached - place) // length > count:
                count, period = (reached - place) // length, length
        end = place + count * period
        if count > 1:
            following = [entry for entry in activities[end : end + 1] if entry[2] and entry[2].name == "aten::cat"]
            yield count, activities[place:end] + following
        place = end


CPU_CHANGES = (
    Change("cuda_graph", "replay the step as a CUDA graph", cuda_graph),
    Change("remove_sync", "drop or postpone synchronizations", remove_sync),
    Change("fused_optimizer", "use the fused optimizer", fused_optimizer),
    Change("data_loader", "prepare batches ahead", data_loader),
    Change("python", "move Python work out of the step", python),
    Change("larger_batch", "give each launch more work", larger_batch),
)
