"""Which part of a step something belongs to: forward, loss, backward, optimizer, or what is beside the model.

Autograd's events tell, for programs that do not annotate these parts.
"""

import bisect
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import wraps
from itertools import groupby, pairwise
from operator import itemgetter

from tracereader.figures.places import OUTSIDE_PHASES, Place, phases
from tracereader.figures.steps import outermost_named
from tracereader.trace import Op, Step, Trace, Work
from tracereader.trace.families import HEAVY, says
from tracereader.trace.grouped import T, grouped
from tracereader.trace.intervals import Intervals, Lengths, length, minus, union
from tracereader.trace.labels import ACCUMULATES, AUTOGRAD, GIVES_GRADIENT, LOADER, OPTIMIZERS, is_torchs_own
from tracereader.trace.op_names import CONVOLUTIONS, PRODUCTS

ZEROES_A_GRADIENT = ("aten::zero_", "aten::_foreach_zero_")
# A weight's own view may come between the op that computes its gradient and that gradient.
OF_A_VIEW = re.compile(r"\b(T|Transpose|Permute|View|UnsafeView)Backward\d*$").search
FORWARD, BACKWARD, OPTIMIZER, LOADING = "forward", "backward", "optimizer", "DataLoader"


def kept_by_step(function: Callable[..., T]) -> Callable[..., T]:
    """Return the function with its result kept by the step, its last argument. Several changes ask for it.

    The function's other argument may be the trace, because a step belongs to one trace.
    """

    @wraps(function)
    def kept(*trace_and_step: Trace | Step) -> T:
        results = vars(trace_and_step[-1])
        if function.__name__ not in results:
            results[function.__name__] = function(*trace_and_step)
        return results[function.__name__]

    return kept


def by_phase(trace: Trace, step: Step) -> tuple[Place, ...]:
    """Return the times of a step's forward, backward, optimizer and DataLoader. cpu_us add up to the step's time.

    Empty if the step has two annotations or more, or if autograd's events tie no backward to a forward. Torch's own
    annotations do not count.

    Forward reaches from the first op that the backward belongs to (with stacks: the model's frame) to the last one.
    """
    spans, labels = _spans(trace, step), {label.name for label in phases(step)}
    if not spans or (len(labels) > 1 and not all(map(is_torchs_own, labels))):
        return ()
    cpu = {name: length(some) / 1e3 for name, some in spans.items() if some}
    cpu[OUTSIDE_PHASES] = step.us - length(union(span for some in spans.values() for span in some)) / 1e3
    gpu = grouped((name, one.dur) for one, name in zip(step.work, _launched_in(step, spans), strict=True))
    return tuple(Place(name, us, sum(gpu[name]) / 1e3, len(gpu[name])) for name, us in cpu.items())


@kept_by_step
def outside_model(trace: Trace, step: Step) -> set[int]:
    """Return the ids of the GPU activities of a training step that neither forward nor backward launches.

    Examples are an average of the weights that a loop updates, and a policy that acts without gradients. Empty if
    autograd's events tie no backward to a forward.
    """
    inside = of_model(trace, step)
    if not inside:
        return set()
    launched = zip(step.work, _launched_in(step, {FORWARD: inside}), strict=True)
    return {id(one) for one, name in launched if name != FORWARD}


def of_model(trace: Trace, step: Step) -> Intervals:
    """Return the intervals of forward, backward and the time between; empty if events tie no backward to a forward."""
    spans = _spans(trace, step)
    if not spans:
        return []
    # Between forward and backward, backward() makes the gradient of the loss.
    ordered = sorted((span, name) for name, some in spans.items() for span in some)
    between = [(one[1], two[0]) for (one, was), (two, then) in pairwise(ordered) if (was, then) == (FORWARD, BACKWARD)]
    return union([*spans[FORWARD], *spans[BACKWARD], *between])


def backward_nodes(step: Step) -> list[Op]:
    """Return the engine's records of the nodes of backward, in the order of the ops: see Step.named()."""
    return step.named(lambda name: name.startswith(AUTOGRAD))


def forwards_of(trace: Trace, node: Op) -> Iterator[tuple]:
    """Yield the thread and start (ns) of each forward op that a node of backward belongs to.

    Only the node itself is tied to its op. A checkpoint's node contains a whole backward pass.
    """
    keys = ((op.track, op.start) for op in (node, *node.children))
    return (trace.forward_of[key] for key in keys if key in trace.forward_of)


def place_in_forward(trace: Trace, launch: Op) -> tuple:
    """Return the thread and start (ns) of the forward op that a launch of backward belongs to, or its own.

    The engine adds up gradients in its record of the node that takes their sum.
    """
    for op in (launch, *launch.above()):
        if (op.track, op.start) in trace.forward_of:
            return trace.forward_of[op.track, op.start]
        if op.name.startswith(AUTOGRAD) and (found := next(forwards_of(trace, op), None)):
            return found
    return launch.track, launch.start


@kept_by_step
def nodes_by_forward(trace: Trace, step: Step) -> list[tuple[int, Op]]:
    """Return the start (ns) of each node's forward in this step, and the node, in this order."""
    pairs = ((begun, node) for node in backward_nodes(step) for _, begun in forwards_of(trace, node))
    return sorted((pair for pair in pairs if pair[0] >= step.start), key=itemgetter(0))


@kept_by_step
def backward_begins(trace: Trace, step: Step) -> list[Op]:
    """Return the first node of each backward pass of a step.

    The program's thread runs an op between two passes, at least the one that makes a loss's gradient. If autograd's
    events tie no backward to a forward, only one node is returned, because they show which threads are the program's.
    """
    if not _is_tied(trace, step):
        return sorted(backward_nodes(step), key=lambda op: op.start)[:1]
    threads = {track for track, _ in trace.forward_of.values()}
    found, is_running = [], False
    for op in step.outermost:
        if op.name.startswith(AUTOGRAD):
            found += [] if is_running else [op]
            is_running = True
        elif op.kind == "op" and op.track in threads:
            is_running = False
    return found


def added_gradients(step: Step) -> list[Op]:
    """Return the ops that add a gradient to an existing one, in order. An optimizer in a hook is not meant."""
    nodes = (op for call in step.named(ACCUMULATES.__eq__) for op in call.children if op.name == GIVES_GRADIENT)
    return sorted((op for node in nodes for op in node.children if op.name == "aten::add_"), key=lambda op: op.start)


@kept_by_step
def left_gradients(trace: Trace, step: Step) -> tuple[list[Op], list[Op], list[Op]] | None:
    """Return the nodes of backward that add to gradients which the step before left; None without such nodes.

    With them come the nodes after the last new gradient, and the products that compute a needed gradient beside one
    that was left. Where some gradients are new, the program has cleared these; one that is added to was there before.
    Passes after a step's first one, or inside it, add to its gradients: the result is None then, or if it is unknown.
    """
    nodes = sorted(backward_nodes(step), key=lambda op: (op.track, op.start))
    is_nested = any(one.track == after.track and after.start < one.end for one, after in pairwise(nodes))
    if is_nested or not _is_tied(trace, step) or len(backward_begins(trace, step)) != 1:
        return None
    zeroed = (op for op in step.named(ZEROES_A_GRADIENT.__contains__) if op.parent is None or op.parent.kind != "op")
    adding = {id(node): node for op in added_gradients(step) for node in op.above() if node.name == ACCUMULATES}
    new = [node.start for node in nodes if node.name == ACCUMULATES and id(node) not in adding]
    if not new or not adding or any(zeroed) or not outermost_named(step, lambda name: name.startswith(OPTIMIZERS)):
        return None
    last, maker, is_weight = max(new), None, False
    spared: dict[int, bool] = {}  # by the id of a product's node, whether its weight's gradient was left
    for node in nodes:
        names = {op.name for op in node.walk()}
        if node.name == ACCUMULATES:
            # A bias has no view of its own. Without its gradient alone, a node has the same products.
            if maker is not None and (is_weight or id(node) not in adding):
                spared[id(maker)] = spared.get(id(maker), True) and id(node) in adding
        elif OF_A_VIEW(node.name):
            is_weight = True
        else:
            maker = None if names.isdisjoint((*PRODUCTS, *CONVOLUTIONS)) else node
            is_weight = not names.isdisjoint(CONVOLUTIONS)
    later = [node for node in nodes if node.start > last]
    return list(adding.values()), later, [node for node in nodes if node.start < last and spared.get(id(node))]


def in_backward(op: Op) -> bool:
    """Return whether autograd's engine calls this op, or whether it is the engine's own record of a node."""
    return op.name.startswith(AUTOGRAD) or any(above.name.startswith(AUTOGRAD) for above in op.above())


def _is_tied(trace: Trace, step: Step) -> bool:
    """Return whether the step has a backward, and the trace ties backwards to their forwards."""
    return bool(trace.forward_of and backward_nodes(step))


def _launched_in(step: Step, spans: dict[str, Intervals]) -> Iterator[str]:
    """Yield the phase in which each activity of the step was launched."""
    ordered = sorted((left, right, name) for name, some in spans.items() for left, right in some)
    starts = [left for left, _, _ in ordered]
    for one in step.work:
        name = OUTSIDE_PHASES
        if one.launch is not None and (after := bisect.bisect_right(starts, one.launch.start)):
            _, right, phase = ordered[after - 1]
            name = phase if one.launch.start < right else OUTSIDE_PHASES
        yield name


@kept_by_step
def _spans(trace: Trace, step: Step) -> dict[str, Intervals]:
    """Return the time intervals of each phase, in order. They do not overlap.

    Empty without a forward or a backward, or if autograd's events tie no backward to a forward.
    """
    if not _is_tied(trace, step):
        return {}
    backward = outermost_named(step, lambda name: name.startswith(AUTOGRAD))
    named = outermost_named(step, lambda name: name.startswith((OPTIMIZERS, LOADER)))
    labels = [op for op in named if op.kind == "label"]
    marks = [(op.start, op.end, BACKWARD) for op in backward]
    marks += [(op.start, op.end, LOADING if op.name.startswith(LOADER) else OPTIMIZER) for op in labels]
    marks += [(op.start, op.end, FORWARD) for op in _forward(trace, step, backward)]
    # Python between two ops of one phase belongs to the phase, so a phase lasts until another one begins.
    runs: dict[str, list[tuple[int, int]]] = {name: [] for name in (LOADING, FORWARD, BACKWARD, OPTIMIZER)}
    for name, some in groupby(sorted(marks), key=itemgetter(2)):
        starts, ends, _ = zip(*some, strict=True)
        runs[name].append((starts[0], max(ends)))
    # An optimizer's closure contains a forward and a backward, and a forward may wait for the loader.
    found, taken = {}, []
    for name in (BACKWARD, LOADING, FORWARD, OPTIMIZER):
        some = union((max(left, step.start), min(right, step.end)) for left, right in runs[name] if left < step.end)
        found[name] = minus(some, taken)
        taken = union([*taken, *some])
    return {name: found[name] for name in runs} if found[BACKWARD] and found[FORWARD] else {}


def _forward(trace: Trace, step: Step, backward: Sequence[Op]) -> Iterator[Op]:
    """Yield the ops that the backward belongs to, and the frames of models around them, without recomputed ops."""
    by_track = grouped((op.track, (op.start, op.end)) for op in backward)
    inside = {track: Lengths(union(some)) for track, some in by_track.items()}

    def rerun(op: Op) -> bool:
        return op.track in inside and inside[op.track].between(op.start, op.start + 1) > 0

    begun = set(trace.forward_of.values())
    times = {time for _, time in begun}
    starts = defaultdict(list)
    for op in step.walk():
        if op.start in times and op.kind == "op" and (op.track, op.start) in begun and not rerun(op):
            starts[op.track].append(op.start)
            yield op
    for track, some in starts.items():
        some.sort()
        for frame in trace.modules.get(track, ()):
            following = bisect.bisect_left(some, frame.start)
            if following < len(some) and some[following] < frame.end and frame.start >= step.start and not rerun(frame):
                yield frame


@kept_by_step
def of_the_loss(trace: Trace, step: Step) -> list[list[Work]]:
    """Return what a step launches between two heavy activities if a backward pass begins between the two."""
    begins = backward_begins(trace, step)
    launched = sorted([one for one in step.work if one.launch is not None], key=lambda one: one.launch.start)
    starts = [one.launch.start for one in launched]
    heavy = [start for start, one in zip(starts, launched, strict=True) if says(one).family in HEAVY]
    found: list[list[Work]] = []
    for place in {bisect.bisect_left(heavy, begin.start) for begin in begins}:
        if 0 < place < len(heavy):
            first, last = heavy[place - 1 : place + 1]
            part = launched[bisect.bisect_right(starts, first) : bisect.bisect_left(starts, last)]
            found += [part] if part else []
    return found


def beside_backward(step: Step, optimizers: Sequence[str] = (OPTIMIZERS,)) -> list[Op]:
    """Return the outermost ops and calls after backward's first op, without backward's, optimizers' and loaders'."""
    since = first_of_backward(step)
    left_out = (AUTOGRAD, LOADER, *optimizers)
    return [op for op in step.outermost if op.start >= since and not op.name.startswith(left_out)]


def work_beside_the_model(trace: Trace, step: Step) -> list[Work]:
    """Return the activities that are launched after a backward has begun, by neither forward nor backward."""
    since, outside = first_of_backward(step), outside_model(trace, step)
    return [one for one in step.work if id(one) in outside and one.launch is not None and one.launch.start >= since]


def first_of_backward(step: Step) -> int:
    """Return the start (ns) of the first op of backward; the step's end without backward."""
    return min((node.start for node in backward_nodes(step)), default=step.end)
