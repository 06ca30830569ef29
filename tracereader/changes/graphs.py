"""Changes that replay launches as CUDA graphs."""

from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, islice
from statistics import median_low

import msgspec

from tracereader.changes import prices
from tracereader.changes.change import change
from tracereader.changes.context import Case
from tracereader.changes.fusion import includes_the_loss
from tracereader.changes.host import (
    READS_A_TRUTH,
    copies_input,
    host,
    how_to_drop,
    reads_a_value,
    waits_before_a_launch,
    waits_in,
)
from tracereader.changes.opportunity import Proposal
from tracereader.changes.vetoes import has_batch_norms_of_volumes, has_ffts, has_rnns
from tracereader.figures.decoding import MANY_LAUNCHES, same_in_all_steps
from tracereader.figures.pace import PAUSE_US
from tracereader.figures.phases import (
    BACKWARD,
    FORWARD,
    added_gradients,
    backward_begins,
    backward_nodes,
    beside_backward,
    first_of_backward,
    forwards_of,
    in_backward,
    of_model,
    outside_model,
    work_beside_the_model,
)
from tracereader.figures.places import OUTSIDE_PHASES
from tracereader.figures.steps import labels
from tracereader.figures.training import TORCHS_OPTIMIZERS, OptimizerCost, asking
from tracereader.findings.device_words import CUDA_OR_HIP
from tracereader.findings.finding import WORTH_SHOWING, counted, duration, how_often, listed
from tracereader.replay.changes import (
    Run,
    launches_between_waits,
    with_cpu_time,
    with_durations,
    without_ops,
    without_waits,
)
from tracereader.replay.changes import cuda_graph as as_cuda_graph
from tracereader.trace import Op, Step, Work
from tracereader.trace.families import HEAVY, says
from tracereader.trace.intervals import Lengths
from tracereader.trace.labels import ACCUMULATES, LOADER, OPTIMIZER, OPTIMIZERS, REGION, ZEROES
from tracereader.trace.op_names import COPYING, MATMULS, OF_UNKNOWN_SIZE, READ_A_VALUE
from tracereader.two_runs.faster import ALMOST, graphs_launched, share_in_graphs, share_kept
from tracereader.two_runs.same_work import LEFT, compiled, same_products_as_long
from tracereader.two_runs.side import Side

# At most this share of the launches of forward and backward is the loss's. In a small model, cross entropy of logits
# that a mask selects launches 15%.
OF_THE_LOSS = 0.25
# Two calls of a graphed model and then one backward gave wrong gradients on an H100: the second call had overwritten
# what the first one keeps for backward.
CALLED_ONCE = "torch.cuda.make_graphed_callables if backward follows each call"
# make_graphed_callables returns the same tensors as gradients in each replay, and a parameter without a gradient keeps
# them: the next replay overwrites them. On an H100, two backward passes and zero_grad(set_to_none=False) gave wrong
# gradients; torch.compile raised an error. Both were right with zero gradients that were made before.
OWN_GRADIENTS = (
    "; gradients add up here: first set each .grad to zeros_like(parameter), with zero_grad(set_to_none=False) "
    "(pytorch issue 181723)"
)
# One backward pass has right gradients if they are None before.
NO_GRADIENTS = "; use zero_grad(set_to_none=True), or the gradients are wrong (pytorch issue 181723)"
# torch.optim's optimizers that a graph can hold, and how.
CAPTURABLE = ("ASGD", "Adadelta", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD")
TORCHS_STEPS = (ZEROES, *(f"{OPTIMIZER}{name}.step" for name in TORCHS_OPTIMIZERS if name != "Muon"))
IF_CONSTANT = "if no number of Python that it uses changes, such as a learning rate"
# What synchronizes between the launches of a graph.
NO_WAITS = ", no synchronization between them"


def _follows_cuda_graph(before: Side, after: Side) -> bool:
    """Graphs launch most of the second step without its optimizer: nearly all old kernels, or compiled ones."""
    of_optimizers = sum(one.launches for one in after.summary.training.optimizers)
    work = after.summary.gpu_work
    mostly = 2 * sum(one.from_graph for one in work) > len(work) - of_optimizers
    if graphs_launched(before) or not mostly or _follows_update_graph(before, after):
        return False
    return (compiled(after) and same_products_as_long(before, after)) or share_kept(before, after) >= ALMOST


@change(
    "replay the step as a CUDA graph",
    "a value that the step reads does not change what follows",
    followed=_follows_cuda_graph,
    needs=CUDA_OR_HIP,
    keys=("compile_reduce_overhead", "compile_max_autotune"),
)
def cuda_graph(case: Case) -> Proposal | None:
    """Return a proposal of the graphs that the program can make now, or of those that it could make without obstacles.

    The condition is worth naming where nothing can be replayed now, or where its graphs save more than twice as much.
    """
    now, step_us = graph_as_it_is(case), case.graph.step_us()
    saved = step_us - now.graph.step_us() if now is not None else 0.0
    if now is not None and 2 * saved >= step_us - case.summary.chosen.gpu_busy_us:
        return now  # graphs save no more than the time in which the GPU is idle
    then = _without_obstacles(case)
    if now is None or then is None:
        return now or then
    if step_us - then.graph.step_us() <= 2 * saved:
        return now
    also = f"; the graphs that are possible now save {saved / step_us:.0%} of the recorded step"
    return msgspec.structs.replace(then, evidence=then.evidence + also * (saved > WORTH_SHOWING * step_us))


def _without_obstacles(case: Case) -> Proposal | None:
    """Return a proposal to remove what keeps CUDA graphs out of an overhead-bound step, as a bound of what that saves.

    These are waits between the launches, launches that differ from step to step, and sparse gradients. The trace does
    not show whether the program can do without them.
    """
    summary, trains = case.summary, case.trace.trains
    if summary.waits_for != "overhead" or summary.chosen.launches < MANY_LAUNCHES or not can_be_captured(case):
        return None
    optimizers = summary.training.optimizers
    # Each check of gradients waits: see anomaly_detection. No graph can hold a model that an optimizer calls.
    if summary.debugging.checked_gradients or any(one.backward_us for one in optimizers):
        return None
    updates = {tuple(op.name for op in labels(step, OPTIMIZERS)) for step in _counted_steps(case)}
    can_hold_updates = len(updates) == 1 and all(one.name in CAPTURABLE for one in optimizers)
    # Graphs of a model cannot hold gradients of gradients. One of the whole step can, and updates between passes, too.
    whole = not trains or case.differentiates_twice or (can_hold_updates and _updates_between_passes(case))
    if whole and not can_hold_updates:
        return None
    stays = {}
    for step in case.steps if trains else ():
        beside = [] if whole else [*labels(step, OPTIMIZERS), *_beside_the_model(case, step)]
        stays[id(step)] = [*labels(step, LOADER), *beside]
    kept = {id(op) for some in stays.values() for op in some}
    waits = [op for op in waits_before_a_launch(case, case.steps) if kept.isdisjoint(map(id, op.above()))]
    without = Case(case.trace, summary, without_waits(case.graph, waits))
    runs = {key: list(filter(_is_long, some)) for key, some in _runs(without, stays).items()}
    captured = len(_captured(runs, case.replayed))
    if 2 * captured < summary.chosen.launches:
        return None
    obstacles = [_counted_waits(case, waits)] if waits else []
    obstacles += ["the launches differ from step to step"] * (not (summary.llm.same_in_all_steps or case.is_single))
    obstacles += ["gradients are sparse"] * (trains and summary.training.has_sparse_gradients)
    if not obstacles:
        return None
    graph = as_cuda_graph(without.graph, chain(*runs.values()))
    return Proposal(
        graph if whole else with_cpu_time(graph, _beside_graphs(case)),
        f"{'; '.join(obstacles)}: without that, {captured:,} of {summary.chosen.launches:,} launches could be replayed",
        "torch.where instead of if, fixed shapes, no values read between launches; then "
        + (_whole_step(optimizers) if trains and whole else f"{_compiled(case)}torch.cuda.graph")
        + _prepared_gradients(case) * (not whole),
        assumed=True,
        conditional=True,
        title="remove what keeps CUDA graphs out",
    )


def _updates_between_passes(case: Case) -> bool:
    """Return whether the replayed step, which is one of several, runs a backward between two updates."""
    starts = [op.start for op in labels(case.replayed, OPTIMIZER)]
    begins = backward_begins(case.trace, case.replayed) if starts and not case.is_single else ()
    return any(starts[0] < op.start < starts[-1] for op in begins)


def graph_as_it_is(case: Case) -> Proposal | None:
    """Return a proposal of CUDA graphs that the program can make without removing what its results may need."""
    summary = case.summary
    single = case.is_single  # whether other steps make the same launches is not known
    if summary.chosen.launches < 2 or not can_be_captured(case):
        return None
    many = summary.chosen.launches >= MANY_LAUNCHES
    if not (summary.llm.same_in_all_steps or single):
        if case.differentiates_twice:
            return None
        return (_graphs_of_the_same_model(case) or _with_fixed_shapes(case)) if many else None
    if case.trace.trains:
        if not many:
            return None
        return _graph_of_training_step(case) or (None if case.differentiates_twice else _graphs_of_training(case))
    if waits := list(waits_before_a_launch(case, _counted_steps(case))):
        if single:
            return None
        if found := _graphs_between_reads(case, waits):
            return found
        here = list(waits_before_a_launch(case, case.steps))
        in_regions = (any(one.name.startswith(REGION) for one in op.above()) for op in filter(reads_a_value, here))
        if not many or not all(in_regions):
            return None  # what an eager program reads may be its result
        return _without_waits(case, here, _graph_of_step)
    if many:
        return _graph_of_step(case)
    return None if single else _small_graph(case)


def _graph_of_step(case: Case) -> Proposal | None:
    """Return a proposal to replay all launches of a step."""
    runs = _runs(case)
    if not (captured := _captured(runs, case.replayed)):
        return None
    copies = any(copies_input(case, op) for op in _waits_between(case, case.replayed, captured))
    return Proposal(
        as_cuda_graph(case.graph, chain(*runs.values())),
        _launches(len(captured), case.is_single, between=_between(case, copies)),
        _compiled(case) + "torch.cuda.graph",
        assumed=case.is_single,
    )


def _graph_of_training_step(case: Case) -> Proposal | None:
    """Return a proposal to replay a whole training step; None if the CPU waits within it.

    Only such a graph can hold gradients of gradients (a step with second derivatives took 1.17 ms instead of 5.8 on an
    H100), several updates (four took 1.25 ms instead of 9.3 on an H200), and a step without torch's optimizers.
    """
    training = case.summary.training
    if not case.differentiates_twice and len(labels(case.replayed, OPTIMIZER)) == 1:
        return None
    capturable = all(one.name in CAPTURABLE and not one.backward_us for one in training.optimizers)
    if training.has_sparse_gradients or not capturable or case.is_single:
        return None
    if next(waits_before_a_launch(case, case.steps), None) is not None:
        return None
    proposal = _graph_of_step(case)
    return proposal and msgspec.structs.replace(proposal, how=_whole_step(training.optimizers))


def _whole_step(optimizers: Sequence[OptimizerCost]) -> str:
    """Return how a graph holds a whole training step. SGD has no argument capturable."""
    capturable = ", with capturable=True in the optimizer" * any(one.name != "SGD" for one in optimizers)
    step = "forward, backward and the optimizer's step" if optimizers else "the whole step"
    return f"torch.cuda.graph around {step}{capturable}, {IF_CONSTANT}"


def _graphs_of_the_same_model(case: Case) -> Proposal | None:
    """Return a proposal to replay forward and backward if only these are the same in all steps."""
    if not case.trace.trains:
        return None
    of_model = []
    for step in _counted_steps(case):
        outside = outside_model(case.trace, step)
        of_model.append(msgspec.structs.replace(step, work=tuple(one for one in step.work if id(one) not in outside)))
    return _graphs_of_training(case, only_model=True) if same_in_all_steps(of_model) else None


def _with_fixed_shapes(case: Case) -> Proposal | None:
    """Return a proposal to pad inputs, and then to use CUDA graphs, for steps that differ only in recorded shapes.

    Padded steps take at least as long as the GPU is busy in the longest one. None if shapes may depend on results.
    """
    step, *others = _counted_steps(case)
    if any(op.kind == "op" for op in step.named(lambda name: name.startswith(OF_UNKNOWN_SIZE))):
        return None
    waits = [op for one in case.steps for op in _in_the_model(case, one, host(one).waits) if not copies_input(case, op)]
    if any(reads_a_value(op) and not asking(op).startswith(READS_A_TRUTH) for op in waits):
        return None  # the number may be a size
    ops, shapes = _ops_and_shapes(step)
    found = [_ops_and_shapes(other) for other in others]
    if any(other != ops for other, _ in found) or all(other == shapes for _, other in found):
        return None
    if not case.trace.trains and next(waits_before_a_launch(case, case.steps), None):
        return None
    proposal = _graphs_of_training(case) if case.trace.trains else _graph_of_step(case)
    if proposal is None:
        return None
    return msgspec.structs.replace(
        proposal,
        evidence="all steps call the same ops, with different shapes"
        + (f"; {_counted_waits(case, waits)}" if waits else ""),
        how=f"pad inputs to one shape or to a few (pad_to_multiple_of); then {proposal.how}",
        assumed=True,
        title="pad to fixed shapes, then use CUDA graphs",
        least_us=max(one.gpu_busy_us for one in case.summary.steps[len(case.summary.left_out) :]),
    )


def _counted_steps(case: Case) -> Sequence[Step]:
    """Return all steps of the trace that count, also those that are not replayed."""
    return case.trace.steps[len(case.summary.left_out) :]


def _in_the_model(case: Case, step: Step, calls: Iterable[Op]) -> list[Op]:
    """Return the calls in forward, in backward, or between the two; none where these are not known."""
    inside = Lengths(of_model(case.trace, step))
    return [op for op in calls if inside.between(op.start, op.start + 1)]


def _ops_and_shapes(step: Step) -> tuple[Counter[str], Counter[str]]:
    """Return how often a step calls each op, and each matrix product with its recorded shapes."""
    ops = [op for op in step.walk() if op.kind == "op"]
    shapes = Counter(f"{op.name} {op.inputs.recorded}" for op in ops if op.name in MATMULS)
    return Counter(op.name for op in ops), shapes


def _compiled(case: Case) -> str:
    """Return how torch.compile makes graphs of a model, as the first of two ways; "" if it does not."""
    # It leaves much of such a model as it is, or makes it slower.
    if has_batch_norms_of_volumes(case) or has_rnns(case) or has_ffts(case):
        return ""
    if includes_the_loss(case):
        return 'torch.compile the model and the loss with mode="reduce-overhead", or '
    return 'torch.compile(model, mode="reduce-overhead"), or '


def _graphs_of_training(case: Case, only_model: bool = False) -> Proposal | None:
    """Return a proposal to replay forward and backward. only_model: what is launched before forward stays as it is.

    Only copies of inputs, the loss, and what lies outside forward and backward may wait between their launches. The
    proposal drops other waits if it can. An optimizer counts its steps on the CPU, so it cannot be captured without
    changes. Gradients leave a graph through autograd, which passes each one to its parameter. What follows backward,
    such as clipping, stays, too. None with sparse gradients: no recorded program shows that a graph can hold them. None
    if an optimizer calls the model itself.
    """
    training = case.summary.training
    if training.has_sparse_gradients or any(one.backward_us for one in training.optimizers):
        return None
    single, stays = case.is_single, {}
    for step in case.steps:
        beside = outside_model(case.trace, step) if only_model else set()
        calls = [one.launch for one in step.work if id(one) in beside and one.launch is not None]
        stays[id(step)] = [*labels(step, (OPTIMIZER, LOADER)), *_beside_the_model(case, step), *calls]
    runs = _runs(case, stays)
    here = id(case.replayed)
    waits = {id(step): _waits_between(case, step, _captured(runs, step)) for step in case.steps}
    others = {key: [op for op in some if not copies_input(case, op)] for key, some in waits.items()}
    inside = {id(step): _inside_the_model(case, step, others[id(step)]) for step in case.steps}
    how = _compiled(case) + CALLED_ONCE
    copies = len(others[here]) < len(waits[here])
    between = _between(case, copies)
    if any(inside.values()):
        runs = {id(step): _beside_the_loss(case, step, inside[id(step)], runs[id(step)]) for step in case.steps}
        if not single and not all(runs.values()):
            if any(_in_the_model(case, step, inside[id(step)]) != inside[id(step)] for step in case.steps):
                return None
            proposed = partial(_graphs_of_training, only_model=only_model)
            return _without_waits(case, list(chain(*inside.values())), proposed)
        how = "if backward follows each call, torch.cuda.make_graphed_callables without the loss"
    if any(len(inside[key]) < len(some) for key, some in others.items()):
        runs = {key: list(filter(_is_long, some)) for key, some in runs.items()}
    if not all(runs.values()):
        return None
    if any(others.values()) and not case.graph.gone:
        shown = next(key for key in (here, *others) if others[key])
        places = ["around the loss"] if inside[shown] else []
        places += ["outside forward and backward"] if len(inside[shown]) < len(others[shown]) else []
        names = listed(dict.fromkeys(map(waits_in, others[shown])))
        but = "apart from copies to the GPU, " if copies else ""
        between = f"; {but}the CPU waits only {' and '.join(places)}, in {names}"
    if not (captured := _captured(runs, case.replayed)):
        return None
    return Proposal(
        with_cpu_time(as_cuda_graph(case.graph, chain(*runs.values())), _beside_graphs(case)),
        _launches(len(captured), single, " in forward and backward", between),
        how + _prepared_gradients(case),
        assumed=single,
        title="replay forward and backward as CUDA graphs",
    )


def _inside_the_model(case: Case, step: Step, waits: Sequence[Op]) -> list[Op]:
    """Return the calls that wait in forward, in backward, or between the two; all where these are not known.

    Before the first backward that is not known, because forward may begin with parts that need no gradients.
    """
    since, inside = first_of_backward(step), Lengths(of_model(case.trace, step))
    return [op for op in waits if not inside.ends or op.start < since or inside.between(op.start, op.start + 1)]


def _prepared_gradients(case: Case) -> str:
    """Return how the gradients have to be prepared if backward adds to existing ones; "" if it does not."""
    if not any(map(added_gradients, case.steps)):
        return ""
    return OWN_GRADIENTS if any(len(backward_begins(case.trace, step)) > 1 for step in case.steps) else NO_GRADIENTS


def _beside_graphs(case: Case) -> Iterator[tuple[tuple, int, float]]:
    """Yield track, start (ns) and CPU time (µs) of what remains beside the graphs of forward and backward.

    Among it are autograd's calls that give parameters their gradients. If some of them add to existing gradients, each
    counts as if it did: see OWN_GRADIENTS.
    """
    for step in case.steps:
        for op in backward_begins(case.trace, step):
            # Not at its start, at which the thread may have waited for another one.
            yield op.track, op.start + 1, prices.PASS * case.launch_us
        adding = [next(op for op in add.above() if op.name == ACCUMULATES) for add in added_gradients(step)]
        usual = median_low([op.us for op in adding]) if adding else 0.0
        for op in step.named(ACCUMULATES.__eq__):
            yield op.track, op.start, max(op.us, usual) + prices.AROUND * case.launch_us


def _beside_the_loss(case: Case, step: Step, waits: Sequence[Op], runs: Sequence[Run]) -> list[Run]:
    """Return these runs without what the loss launches, if the calls wait in its forward or backward; else none.

    The loss is where forward ends and backward begins. It launches little, and no matrix product or convolution.
    """
    if not waits:
        return []
    last = max(op.end for op in waits)
    nodes = [node for node in backward_nodes(step) if node.start < last]
    first = min([op.start for op in waits] + [start for node in nodes for _, start in forwards_of(case.trace, node)])
    launched = (one for one in step.work if one.launch is not None and first <= one.launch.start <= last)
    of_the_loss, found, launches = {id(one): one for one in launched}, [], 0
    for run in runs:
        kept = []
        for op, work in run:
            launches += len(work)
            if op.start < first or (op.start > last and in_backward(op)):
                kept.append((op, work))
            else:
                of_the_loss |= {id(one): one for one in work}
        if kept:
            found.append(kept)
    small = len(of_the_loss) <= OF_THE_LOSS * launches
    return found if small and not any(says(one).family in HEAVY for one in of_the_loss.values()) else []


def _is_long(run: Run) -> bool:
    """Return whether a graph of these launches is worth its own launch."""
    return sum(len(work) for _, work in run) >= MANY_LAUNCHES


def _follows_update_graph(before: Side, after: Side) -> bool:
    """CUDA graphs launch more of about the same kernels, and code after backward takes at most half the CPU time."""
    if share_in_graphs(after) <= share_in_graphs(before) or share_kept(before, after) < ALMOST:
        return False
    was, now = ({one.name: one for one in side.summary.places.by_phase} for side in (before, after))
    if not was.keys() & now.keys() >= {OUTSIDE_PHASES, FORWARD, BACKWARD}:
        return False
    # The two processes' CPU speeds may differ, and if the model is in a graph, too, its CPU time decreases.
    model = [side[FORWARD].cpu_us + side[BACKWARD].cpu_us for side in (was, now)]
    kept = now[OUTSIDE_PHASES].pieces >= ALMOST * was[OUTSIDE_PHASES].pieces
    return kept and now[OUTSIDE_PHASES].cpu_us * model[0] <= LEFT * was[OUTSIDE_PHASES].cpu_us * model[1]


@change(
    "replay what follows backward as a CUDA graph",
    "the code computes with no numbers of Python that change",
    followed=_follows_update_graph,
    needs=CUDA_OR_HIP,
)
def update_graph(case: Case) -> Proposal | None:
    """Return a proposal to replay what the program launches after backward, outside torch's optimizers.

    Such code is a program's own optimizer, as Muon may be, or an average of the weights. The trace does not show
    whether it computes with numbers of Python that change, such as a learning rate.
    """
    trace = case.trace
    if not (trace.trains and trace.forward_of and case.summary.llm.same_in_all_steps and _computes_alone(case)):
        return None
    found: dict[int, list[Run]] = {id(step): [] for step in case.steps}
    for step in case.steps:
        if not _launch_many(beside_backward(step, TORCHS_STEPS)):
            continue
        own = {id(one) for one in work_beside_the_model(trace, step)}
        since = first_of_backward(step)
        sizes = step.named(lambda name: name.startswith(OF_UNKNOWN_SIZE))
        if any(op.start >= since and not in_backward(op) for op in sizes):
            return None
        for run in launches_between_waits(case.graph, step, labels(step, (*TORCHS_STEPS, LOADER))):
            found[id(step)] += filter(_is_long, _without_pauses(run, own))
    if not (launches := len(_captured(found, case.replayed))):
        return None
    us = sum(part[-1][0].end - part[0][0].start for part in found[id(case.replayed)]) / 1e3
    return Proposal(
        as_cuda_graph(case.graph, chain(*found.values())),
        f"{launches:,} identical launches per step after backward, outside torch's optimizers, in {duration(us)} of "
        "CPU time",
        "torch.cuda.graph around them, with numbers that change in tensors and, if they read gradients, "
        "zero_grad(set_to_none=False); or, in a loop over tensors, torch._foreach_ ops",
        assumed=True,
    )


def _without_pauses(run: Run, own: Container[int]) -> Iterator[Run]:
    """Yield the parts of a run that launch only this work, and no graph, copy nothing to the GPU, and do not pause.

    own: ids of activities.
    """
    part: Run = []
    for op, work in run:
        stays = any(id(one) not in own or one.from_graph or "HtoD" in one.name for one in work)
        if part and (stays or op.start - part[-1][0].end > PAUSE_US * 1e3):
            yield part
            part = []
        if not stays:
            part.append((op, work))
    if part:
        yield part


def _runs(case: Case, stays: Mapping[int, Sequence[Op]] | None = None) -> dict[int, list[Run]]:
    """Return by the id of each replayed step its runs of launches between waits.

    stays: ops or annotations that stay as they are, by the id of the step.
    """
    stays = stays or {}
    return {id(step): list(launches_between_waits(case.graph, step, stays.get(id(step), ()))) for step in case.steps}


def _captured(runs: dict[int, list[Run]], step: Step) -> list[Work]:
    """Return a step's activities that CUDA graphs would launch."""
    return [one for run in runs[id(step)] for _, work in run for one in work]


def _waits_between(case: Case, step: Step, captured: Iterable[Work]) -> list[Op]:
    """Return the calls of a step that wait between the launches of these activities, if they are not dropped."""
    launches = [one.launch.start for one in captured if one.launch is not None] or [step.end]
    first, last = min(launches), max(launches)
    return [op for op in host(step).waits if first < op.start < last and not case.graph.is_gone(op)]


def _beside_the_model(case: Case, step: Step) -> list[Op]:
    """Return ops or calls that launch work of neither forward nor backward, from the first backward on.

    If autograd's events tie no backward to a forward, these are the outermost ops and calls after the last backward.
    """
    end = max((node.end for node in backward_nodes(step)), default=step.end)
    beside = beside_backward(step)
    if not case.trace.forward_of or (not _launch_many(beside) and all(op.start >= end for op in beside)):
        return [op for op in beside if op.start >= end]
    return [one.launch for one in work_beside_the_model(case.trace, step)]


def _launch_many(ops: Sequence[Op]) -> bool:
    return next(islice((one for op in ops for one in op.work_below()), MANY_LAUNCHES - 1, None), None) is not None


def can_be_captured(case: Case) -> bool:
    """Return whether the step launches no CUDA graph, does not communicate, and uses one device."""
    return not case.summary.launches_graphs and _computes_alone(case)


def _computes_alone(case: Case) -> bool:
    """Return whether the step uses one device and does not communicate."""
    return len({work.device for work in case.step.work}) <= 1 and all(
        one.family != "communication" for one in case.summary.gpu_work
    )


def long_runs(case: Case, around: Container[int] | None = None) -> tuple[list[Run], int, int]:
    """Return the runs that are worth a graph, and the number of launches and of graphs of a replayed step.

    Each run of launches between two waits is a graph. The ops of a run with few launches stay. around: the ids of ops;
    the ops of a run without any of them stay, too.
    """

    def is_wanted(run: Run) -> bool:
        return _is_long(run) and (around is None or any(id(op) in around for op, _ in run))

    runs = {key: list(filter(is_wanted, some)) for key, some in _runs(case).items()}
    return list(chain(*runs.values())), len(_captured(runs, case.replayed)), len(runs[id(case.replayed)])


def _between(case: Case, copies: bool) -> str:
    """Return what synchronizes between the launches of a graph.

    Nothing is said if other waits are dropped, or if the launches wait for their kernels themselves. copies: whether
    inputs are copied there.
    """
    if case.graph.gone or (case.summary.debugging.blocking_launches and not copies):
        return ""
    return "; only copies of inputs synchronize between them" if copies else NO_WAITS


def _launches(launches: int, single: bool = False, where: str = "", between: str = NO_WAITS) -> str:
    """Return the evidence for a graph. between: what synchronizes between the launches."""
    if single:
        unknown = "the trace has one step, so it does not show whether each step makes the same launches"
        return f"{launches:,} launches{where}{between}; {unknown}"
    return f"{launches:,} identical launches per step{where}{between}"


def _small_graph(case: Case) -> Proposal:
    """Return a proposal for a step of few launches, where the copies of the inputs matter.

    The copies take at most twice the time of the first op that is not itself a copy of an input to the GPU.
    """
    computing = [entry for entry in case.activities if "HtoD" not in entry[1].name]
    if not computing or any(copies_input(case, op) for op in host(case.step).waits):
        return None
    first = [(work, one.us) for work, one, op in computing if op is computing[0][2]]
    copies = 2 * sum(us for _, us in first)
    graph = with_durations(as_cuda_graph(case.graph), case.in_all_steps({first[0][0]: first[0][1] + copies}))
    launched = [step.work[0].launch for step in case.steps if step.work]
    return Proposal(
        with_cpu_time(graph, [(call.track, call.start, prices.CALL_US) for call in launched if call is not None]),
        f"{_launches(case.summary.chosen.launches)}; the copies of its inputs (at most {duration(copies)}) are "
        "included",
        "torch.cuda.graph, with the inputs copied into the tensors that it reads",
        assumed=True,
    )


def _without_waits(case: Case, waits: Sequence[Op], proposed: Callable[[Case], Proposal | None]) -> Proposal | None:
    """Return a proposal to drop these waits of the replayed steps, and then to use CUDA graphs.

    None if the trace does not show how the program can drop each of them. What a value decides is not recorded.
    proposed: returns the proposal for the case without these waits.
    """
    ways = {id(op): how_to_drop(op) for op in waits}
    if not all(ways.values()) or any(map(case.graph.is_gone, waits)):
        return None
    copies = filter(None, (op.outermost_of(lambda name: name.startswith((*READ_A_VALUE, *COPYING))) for op in waits))
    found = proposed(Case(case.trace, case.summary, without_ops(without_waits(case.graph, waits), copies)))
    if found is None:
        return None
    return msgspec.structs.replace(
        found,
        evidence=f"between {found.evidence}, {_counted_waits(case, waits)}",
        how=f"{listed(dict.fromkeys(ways.values()))}; then {found.how}",
        assumed=True,
        title="drop synchronizations, then use CUDA graphs",
    )


def _counted_waits(case: Case, waits: Sequence[Op]) -> str:
    """Return where the CPU waits in these calls of the replayed steps, and how often in one of these steps."""
    by_step = [[op for op in waits if step.start <= op.start < step.end] for step in (case.replayed, *case.steps)]
    names = Counter(
        waits_in(op.outermost_of(lambda name: name.startswith(COPYING)) or op) for op in next(filter(None, by_step))
    )
    times = sum(map(bool, by_step[1:]))
    seldom = f" in {times} of {len(case.steps)} steps" if times < len(case.steps) else ""
    return f"the CPU waits in {listed(f'{name} {how_often(count)}' for name, count in names.most_common(3))}{seldom}"


def _graphs_between_reads(case: Case, waits: Sequence[Op]) -> Proposal | None:
    """Return a proposal to replay the launches between these waits, if none of them is a wait for a result's size.

    Launches after such a wait may have sizes that differ. Few launches between two waits stay.
    """
    if any(above.name.startswith(OF_UNKNOWN_SIZE) for op in waits for above in op.above()):
        return None
    runs, captured, graphs = long_runs(case)
    if not graphs:
        return None
    return Proposal(
        as_cuda_graph(case.graph, runs),
        f"{captured:,} of {case.summary.chosen.launches:,} launches are identical in every step, in "
        f"{counted(graphs, 'group')} between the synchronizations of {listed(dict.fromkeys(map(waits_in, waits)))}",
        "torch.cuda.graph for each group",
        title="use CUDA graphs between synchronizations",
    )
