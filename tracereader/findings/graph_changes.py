"""Changes that replay launches as CUDA graphs."""

from collections.abc import Collection, Container, Iterable, Iterator, Sequence
from itertools import chain

from tracereader.figures.attention import attention_calls, queries_and_keys
from tracereader.figures.decoding import MANY_LAUNCHES
from tracereader.findings.cpu_changes import ONE_CALL_US, copied, waits_in
from tracereader.findings.finding import counted, duration, listed
from tracereader.findings.gpu_changes import CALLING_LAUNCHES, OF_UNKNOWN_SIZE
from tracereader.findings.opportunity import Case, Change, Proposal, labels
from tracereader.replay import cuda_graph as as_cuda_graph
from tracereader.replay import is_wait, may_wait, waits_of, with_cpu_time, with_durations
from tracereader.replay.changes import Run, launches_between_waits
from tracereader.trace import Op, Step, Work, outermost
from tracereader.trace.labels import ACCUMULATES, AUTOGRAD, LOADER, OPTIMIZER, OPTIMIZERS

# At most this share of the launches of forward and backward is the loss's.
OF_THE_LOSS = 0.1
# What synchronizes between the launches of a graph.
NO_WAITS = ", no synchronization between them"
ONLY_COPIES = "; only copies of inputs synchronize between them"


def cuda_graph(case: Case) -> Proposal | None:
    summary = case.summary
    single = len(case.steps) == 1  # whether other steps make the same launches is not known
    if not (summary.llm.same_in_all_steps or single) or summary.chosen.launches < 2 or not _can_be_captured(case):
        return None
    if case.growing_keys is not None:
        return None  # a graph is of one number of keys: see static_cache
    if case.trace.trains:
        return None if summary.chosen.launches < MANY_LAUNCHES else _graphs_of_training(case, single)
    if waits := list(_waits_before_a_launch(case, case.trace.steps[len(summary.left_out) :])):
        return None if single else _graphs_between_reads(case, waits)
    if summary.chosen.launches < MANY_LAUNCHES:
        return None if single else _small_graph(case)
    runs = _runs(case)
    captured = _captured(runs, case.replayed)
    if not captured:
        return None
    copies = any(_copies_input(case, op) for op in _waits_between(case.replayed, captured))
    return Proposal(
        as_cuda_graph(case.graph, chain(*runs.values())),
        _launches(len(captured), single, between=ONLY_COPIES if copies else NO_WAITS),
        'torch.compile(model, mode="reduce-overhead"), or torch.cuda.graph',
        assumed=single,
    )


def _graphs_of_training(case: Case, single: bool) -> Proposal | None:
    """Return a proposal to replay forward and backward.

    Only copies of inputs, or the loss, may wait between their launches. An optimizer counts its steps on the CPU, so it
    cannot be captured without changes. Gradients leave a graph through autograd, which passes each one to its
    parameter. What follows backward, such as clipping, stays, too. None with sparse gradients: no recorded program
    shows that a graph can hold them.
    """
    if case.summary.training.has_sparse_gradients:
        return None
    stays, accumulated = [], []
    for step in case.steps:
        stays += [*labels(step, (OPTIMIZER, LOADER)), *_after_backward(step)]
        calls = step.named(ACCUMULATES.__eq__)
        given = [op for op in calls if not any(below.work for below in op.walk())]
        accumulated += [(op.track, op.start, op.us + CALLING_LAUNCHES * case.launch_us) for op in given]
    runs = _runs(case, stays)
    here = id(case.replayed)
    waits = {id(step): _waits_between(step, _captured(runs, step)) for step in case.steps}
    others = {key: [op for op in some if not _copies_input(case, op)] for key, some in waits.items()}
    how = 'torch.compile(model, mode="reduce-overhead"), or torch.cuda.make_graphed_callables'
    between = ONLY_COPIES if waits[here] else NO_WAITS
    if any(others.values()):
        runs = {id(step): _beside_the_loss(others[id(step)], runs[id(step)]) for step in case.steps}
        if not all(runs.values()):
            return None
        how = "torch.cuda.make_graphed_callables(model, …), with the loss outside"
        names = listed(dict.fromkeys(map(waits_in, others[here])))
        between = f"; the CPU waits only where forward ends, in {names}"
    if not (captured := _captured(runs, case.replayed)):
        return None
    return Proposal(
        with_cpu_time(as_cuda_graph(case.graph, chain(*runs.values())), accumulated),
        _launches(len(captured), single, " in forward and backward", between),
        how,
        assumed=single,
        title="replay forward and backward as CUDA graphs",
    )


def _beside_the_loss(waits: Sequence[Op], runs: Sequence[Run]) -> list[Run]:
    """Return the runs before and after these waits, if they are those of a loss, and none otherwise.

    The loss is where forward ends and backward begins, and launches little.
    """
    if not waits:
        return []
    first, last = min(op.start for op in waits), max(op.end for op in waits)
    launches, of_the_loss, found = 0, 0, []
    for run in runs:
        for op, work in run:
            before = [one.launch.start < first for one in work]
            after = [one.launch.start > last for one in work]
            in_place = after if op.name.startswith(AUTOGRAD) else before
            launches, of_the_loss = launches + len(work), of_the_loss + in_place.count(False)
        if any(one.launch.start < first or one.launch.start > last for _, work in run for one in work):
            found.append(run)
    return found if of_the_loss <= OF_THE_LOSS * launches else []


def _is_long(run: Run) -> bool:
    """Return whether a graph of these launches is worth its own launch."""
    return sum(len(work) for _, work in run) >= MANY_LAUNCHES


def update_graph(case: Case) -> Proposal | None:
    """Return a proposal to replay what the program launches after backward, outside optimizers' steps.

    Such code is a hand-written optimizer, or an average of the weights. The trace does not show whether it computes
    with numbers of Python that change, such as a learning rate.
    """
    if not case.trace.trains or not case.summary.llm.same_in_all_steps or not _computes_alone(case):
        return None
    found, launches, us = [], 0, 0.0
    for step in case.steps:
        end = _end_of_backward(step)
        if any(op.start >= end for op in step.named(lambda name: name.startswith(OF_UNKNOWN_SIZE))):
            return None
        for run in launches_between_waits(case.graph, step, labels(step, (OPTIMIZERS, LOADER))):
            own = [(op, work) for op, work in run if op.start >= end]
            if not _is_long(own) or any(one.from_graph for _, work in own for one in work):
                continue
            found.append(own)
            if step is case.replayed:
                launches += sum(len(work) for _, work in own)
                us += (max(op.end for op, _ in own) - own[0][0].start) / 1e3
    if not launches:
        return None
    return Proposal(
        as_cuda_graph(case.graph, found),
        f"{launches:,} identical launches per step after backward, outside optimizers' steps, in {duration(us)} of CPU "
        "time",
        "torch.cuda.graph around them (keep changing numbers in tensors, and gradients in their memory with "
        "zero_grad(set_to_none=False)); or torch._foreach_ ops on lists of tensors",
        assumed=True,
    )


def _runs(case: Case, stays: Collection[Op] = ()) -> dict[int, list[Run]]:
    """Return by the id of each replayed step its runs of launches between waits.

    stays: ops or annotations that stay as they are.
    """
    return {id(step): list(launches_between_waits(case.graph, step, stays)) for step in case.steps}


def _captured(runs: dict[int, list[Run]], step: Step) -> list[Work]:
    """Return a step's activities that CUDA graphs would launch."""
    return [one for run in runs[id(step)] for _, work in run for one in work]


def _waits_between(step: Step, captured: Iterable[Work]) -> list[Op]:
    """Return the calls of a step that wait between the launches of these activities."""
    launches = [one.launch.start for one in captured if one.launch is not None] or [step.end]
    first, last = min(launches), max(launches)
    return [op for op in waits_of(step) if first < op.start < last]


def _after_backward(step: Step) -> list[Op]:
    """Return the outermost ops and calls that begin after the last op of backward; none without backward."""
    end = _end_of_backward(step)
    return [op for op in outermost(step.roots, lambda op: op.kind != "label") if op.start >= end]


def _end_of_backward(step: Step) -> int:
    """Return the end (ns) of the last op of backward; the step's end without backward."""
    return max((op.end for op in step.named(lambda name: name.startswith(AUTOGRAD))), default=step.end)


def _can_be_captured(case: Case) -> bool:
    """Return whether the step launches no CUDA graph, does not communicate, and uses one device."""
    return not case.summary.launches_graphs and _computes_alone(case)


def _computes_alone(case: Case) -> bool:
    """Return whether the step uses one device and does not communicate."""
    return len({work.device for work in case.step.work}) <= 1 and "communication" not in case.us_by_family


def static_cache(case: Case) -> Proposal | None:
    """Return a proposal to decode with a KV cache of fixed size: then the tokens can be replayed as CUDA graphs."""
    if case.trace.trains or not _can_be_captured(case) or (keys := case.growing_keys) is None:
        return None
    attending = (op for step in case.steps for op in attention_calls(step))
    decodes = {id(op) for call in attending if queries_and_keys(call)[0] == 1 for op in (call, *call.above())}
    runs, captured, _ = _long_runs(case, decodes)
    if not captured:
        return None
    return Proposal(
        as_cuda_graph(case.graph, runs),
        f"attention's keys grow by one with each token, here from {keys[0]:,} to {keys[1]:,}, so the shapes change "
        f"with each token; with a KV cache of fixed size, {captured:,} launches can be replayed as CUDA graphs",
        'generate(…, cache_implementation="static"), or a StaticCache and torch.compile(model, mode="reduce-overhead")',
        assumed=True,  # attention also reads the empty part of the cache
    )


def _long_runs(case: Case, around: Container[int] | None = None) -> tuple[list[Run], int, int]:
    """Return the runs that are worth a graph, and the number of launches and of graphs of a replayed step.

    Each run of launches between two waits is a graph. The ops of a run with few launches stay. around: the ids of ops;
    the ops of a run without any of them stay, too.
    """
    found, captured, graphs = [], 0, 0
    for step in case.steps:
        for run in launches_between_waits(case.graph, step):
            if not _is_long(run) or not (around is None or any(id(op) in around for op, _ in run)):
                continue
            found.append(run)
            if step is case.replayed:
                captured, graphs = captured + sum(len(work) for _, work in run), graphs + 1
    return found, captured, graphs


def _launches(launches: int, single: bool = False, where: str = "", between: str = NO_WAITS) -> str:
    """Return the evidence for a graph. between: what synchronizes between the launches."""
    if single:
        return (
            f"{launches:,} launches{where}{between}; the trace has one step, so it does not show whether each step "
            "makes the same launches"
        )
    return f"{launches:,} identical launches per step{where}{between}"


def _small_graph(case: Case) -> Proposal:
    """Return a proposal for a step of few launches, where the copies of the inputs matter.

    The copies take at most twice the time of the first op that is not itself a copy of an input to the GPU.
    """
    computing = [entry for entry in case.activities if "HtoD" not in entry[1].name]
    if not computing or any(_copies_input(case, op) for op in waits_of(case.step)):
        return None
    first = [(work, one.us) for work, one, op in computing if op is computing[0][2]]
    copies = 2 * sum(us for _, us in first)
    graph = with_durations(as_cuda_graph(case.graph), case.in_all_steps({first[0][0]: first[0][1] + copies}))
    calls = [
        (one.launch.track, one.launch.start, ONE_CALL_US)
        for one in (step.work[0] for step in case.steps if step.work)
        if one.launch is not None
    ]
    return Proposal(
        with_cpu_time(graph, calls),
        f"{_launches(case.summary.chosen.launches)}; the copies of its inputs (at most {duration(copies)}) are "
        "included",
        "torch.cuda.graph, with the inputs copied into the tensors that it reads",
        assumed=True,
    )


def _waits_before_a_launch(case: Case, steps: Sequence[Step]) -> Iterator[Op]:
    """Yield the calls that wait before a later launch, without copies of inputs. A graph can start after those."""
    names = frozenset(filter(may_wait, case.trace.op_names))
    for step in steps if names else ():
        last = max([one.launch.start for one in step.work if one.launch], default=0)
        calls = [op for op in step.walk() if op.name in names and op.kind == "runtime" and op.start < last]
        yield from (op for op in calls if is_wait(op) and not _copies_input(case, op))


def _copies_input(case: Case, call: Op) -> bool:
    """Return whether a call waits for a copy of the program's to the GPU."""
    return is_wait(call) and not case.is_internal(call) and any("HtoD" in one.name for one in copied(call))


def _graphs_between_reads(case: Case, waits: Sequence[Op]) -> Proposal | None:
    """Return a proposal to replay the launches between these waits, if none of them is a wait for a result's size.

    Launches after such a wait may have sizes that differ. Few launches between two waits stay.
    """
    if any(above.name.startswith(OF_UNKNOWN_SIZE) for op in waits for above in op.above()):
        return None
    runs, captured, graphs = _long_runs(case)
    if not graphs:
        return None
    names = listed(dict.fromkeys(map(waits_in, waits)))
    return Proposal(
        as_cuda_graph(case.graph, runs),
        f"{captured:,} of {case.summary.chosen.launches:,} launches are identical in every step, in "
        f"{counted(graphs, 'group')} between the synchronizations of {names}",
        "torch.cuda.graph for each group",
        title="use CUDA graphs between synchronizations",
    )


GRAPH_CHANGES = (
    Change("cuda_graph", "replay the step as a CUDA graph", cuda_graph),
    Change("update_graph", "replay the code after backward as a CUDA graph", update_graph),
    Change("static_cache", "use a static KV cache and CUDA graphs", static_cache),
)
