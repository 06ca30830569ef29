"""Changes that give each launch more work: a larger batch, and equal passes as one.

A loop makes such passes one after the other: one sample, expert, clip or environment each.
"""

import bisect
import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Container, Iterator, Sequence
from itertools import chain, groupby, pairwise
from operator import itemgetter
from statistics import median_high

import msgspec

from tracereader.changes import prices
from tracereader.changes.change import change
from tracereader.changes.context import Case
from tracereader.changes.host import host
from tracereader.changes.opportunity import Proposal
from tracereader.changes.roofline import TWO_BYTES, moving_us, multiplying_us
from tracereader.figures.attention import attention_calls, keys_grow_in_place
from tracereader.figures.data_flow import calls_with_flow, hand_on, parts_without_other_passes
from tracereader.figures.gpu_time import is_communication
from tracereader.figures.gpu_work import GpuWork
from tracereader.figures.phases import (
    added_gradients,
    backward_begins,
    backward_nodes,
    forwards_of,
    in_backward,
    kept_by_step,
    nodes_by_forward,
)
from tracereader.figures.places import NUMBER
from tracereader.figures.sizes import without_ones
from tracereader.figures.steps import outermost_named
from tracereader.findings.finding import counted, duration
from tracereader.findings.ops import NO_VALUES, VIEWS
from tracereader.replay import Graph
from tracereader.replay.changes import with_cpu_time, with_durations, without_cpu_time, without_work
from tracereader.trace import Op, Step, Trace, Work, start_of
from tracereader.trace.grouped import grouped
from tracereader.trace.intervals import Intervals, length_between, minus, union
from tracereader.trace.labels import ACCUMULATES, LOADER, OPTIMIZER, OPTIMIZERS
from tracereader.trace.op_names import ADDS, CUTS, SLICES, TAKES_A_PART
from tracereader.trace.slices import innermost
from tracereader.trace.types import Tensor
from tracereader.two_runs.same_work import halved, products, same_flops

MOSTLY = 0.5  # of a step's time
MANY_PASSES = 8  # fewer passes may be the heads or the stages of a model
ALIKE = 1.5  # times the launches of another pass
LONGEST_PASS = 200  # ops
ALL_PARTS = 4  # unless they take all parts of a tensor, as samples or tasks are
COMPARES = "aten::eq"
COPIES = ("aten::clone", "aten::copy_", "aten::to")
JOINS = ("aten::stack", "aten::cat")  # of the passes' results
FROM_THE_CPU = "computes with an input of its own from the CPU"
OWN_MODEL = "computes with a model of its own"  # of an ensemble, or of one customer or task each
AGAIN = "calls the same model, and takes no other call's result as far as shapes show"  # as Monte Carlo dropout does
OWN_INDICES = "calls the same model with tokens or other indices of its own"  # such as two answers
OWN_SIZE = "calls the same model with an input of another size, and takes no other call's result as far as shapes show"
ADDS_UP = "adds to the gradients of one model, before one update"  # a batch in parts
UNEQUAL = f"{ADDS_UP}, and most passes differ in their number of ops"  # as those of trees do
IN_PARTS = (ADDS_UP, UNEQUAL)
# Such as experts, or networks of variables.
JOINED = "takes no other pass's result as far as gradients or shapes show, and one op joins the results"
# By what each op reads and makes.
DECIDED = "takes no other pass's result"
OWN_CACHE = "decodes a token of a sequence with a KV cache of its own"  # such as one chat of several
TABLES, LOOKS_UP = "looks up an embedding", ("aten::embedding", "aten::embedding_bag")
AT_ONCE = (
    "if no pass needs another one's result and the memory allows, compute all at once, with a mask for unequal "
    "lengths; torch.func.vmap if each needs its own gradient"
)
HOW = {
    TABLES: "make one table with the rows of all and offsets for their indices, or one lookup if it is one table",
    OWN_MODEL: "if no model needs what another one learned: torch.func.stack_module_state, vmap, and one optimizer",
    JOINED: "if no pass needs another one's result and the memory allows, stack the inputs, and weights that differ: "
    "torch.bmm, a grouped convolution, or torch.func.vmap",
    OWN_CACHE: "if one model decodes all and no sequence needs another one's token: one batch, with a mask for lengths",
    DECIDED: "if the memory allows, stack the inputs, and weights that differ: torch.bmm, or torch.func.vmap",
    ADDS_UP: "if the memory allows, no pass needs another one's result, and the loss does not compare samples: give "
    "the model the whole batch in one pass",
    AGAIN: "if no call needs another one's result and the memory allows, give the model one batch with all inputs of a "
    "size",
}
HOW[OWN_INDICES] = HOW[AGAIN]
IS_LOSS = re.compile(r"Loss(_\d+)?$").search
# The first op of a model that takes its data beside weights, its last layer, and what passes a state on.
TAKES_DATA = re.compile(r"aten::(conv\w*|linear|matmul|mm|bmm|embedding\w*)$").match
LAYER, KEEPS_A_STATE = re.compile(r"aten::(conv\w*|linear)$").match, re.compile(r"aten::\w*(lstm|gru|rnn)").match
# What takes weights beside its data.
HAS_WEIGHTS = re.compile(
    r"aten::(conv\w*|linear|addmm|embedding\w*|\w*norm|prelu|_\w*attention|_transformer\w*)$"
).match
# What uses a tensor of its own call before that is joined with a newer one.
LAYER_OR_POOL = re.compile(r"aten::\w*(conv|linear|pool|upsample)").match
# Ops that make whole numbers. A model may make a mask, but picks no tokens.
PICKS = re.compile(r"aten::(arg\w+|sort|topk|multinomial)$").match
NUMBERS = re.compile(r"aten::(arg\w+|sort|topk|multinomial|max|min|to|nonzero|bucketize|where|copy_|masked\w+)$").match
# What may follow a lookup: what averages it and its marks, and conversions to the types of these numbers, all floats.
POOLS = re.compile(r"aten::(sum|mean|mul|div|ne|clamp|arange)$").match
TO_FLOATS = [("aten::to", [number]) for number in ("5", "6", "7", "15")]
BEGINS = 50  # ops of a pass, which tell models apart
FEW = 3  # such as the texts of a triplet. More calls may be steps that pass a state on
POOLING = ("aten::mean", "aten::sum", "aten::amax", "aten::amin")
WHOLE_NUMBERS = re.compile(r"-?\d+", re.ASCII).findall
IS_INDEX = re.compile(r"\d{1,18}", re.ASCII).fullmatch
# A loop over time takes parts, too, and each pass needs the one before it: cells, and the functions of their gates.
CELLS = re.compile(r"aten::(_thnn_fused_)?(lstm|gru|rnn_tanh|rnn_relu)_cell").fullmatch
GATES = ("aten::tanh", "aten::sigmoid")
# What may run between two calls of a model: it makes a tensor of the size that it takes.
KEEPS_ITS_SIZE = re.compile(r"aten::(flip|roll|\w*softmax|sigmoid|add|sub|mul|div|clamp|exp)_?$").match


FEWER_PRODUCTS = halved(
    lambda side: len(products(side)), lambda before, after: same_flops(products(before), products(after))
)


class Loop(msgspec.Struct, frozen=True):
    """A loop whose passes may be computed at once, as far as the recording shows.

    starts: when each pass starts (ns). end: when the last one probably ends. what: what a pass does. ends: when the
    part of each pass ends that may be computed at once, if it is not the whole pass. parts: when the ops of that part
    run in each pass, if the recording shows which op takes what another one makes.
    """

    starts: tuple[int, ...]
    end: int
    what: str
    ends: tuple[int, ...] = ()
    parts: tuple[Intervals, ...] = ()

    @property
    def last(self) -> Intervals:
        """Return when the last pass runs (ns)."""
        return self.parts[-1] if self.parts else [(self.starts[-1], self.end)]

    @property
    def earlier(self) -> Intervals:
        """Return when all passes but the last one run (ns)."""
        if self.parts:
            return union(chain.from_iterable(self.parts[:-1]))
        return list(zip(self.starts[:-1], self.ends, strict=False)) or [(self.starts[0], self.starts[-1])]

    def overlaps(self, other: "Loop") -> bool:
        return self.starts[0] < other.end and other.starts[0] < self.end


def at_once_on_the_cpu(case: Case) -> Proposal | None:
    """Return a proposal to compute equal passes at once, with no GPU.

    The computation in all passes but the last one takes at most as long as now, and hardly any time if the tensors are
    small. The lower quartile of the ops' times is taken for the time of a call, which computes nothing.
    """
    in_steps, typical = case.in_each_step(lambda step: allowed(case.trace, step))
    if not typical:
        return None
    spans, kept = [], []
    for step, found in zip(case.steps, in_steps, strict=True):
        for loop in found:
            removed, nodes, _ = all_but_the_last(case, step, loop)
            spans += removed
            inside = (op for op in step.outermost if loop.starts[0] <= op.start < loop.starts[-1])
            forward = [op for op in inside if not in_backward(op)]
            for ops, until in ((forward, loop.starts[-1]), (nodes, nodes[-1].end if nodes else 0)):
                kept += [(ops[0].track, until, _computing_us(ops))] if ops else []
    best = without_cpu_time(case.graph, spans)
    return _proposed(with_cpu_time(best, kept), typical, HOW.get(typical[0].what, AT_ONCE), most=best)


def _computing_us(calls: Sequence[Op]) -> float:
    """Return the self time (µs) of ops that compute, without what each of them takes at least."""
    below = (op for call in calls for op in call.walk())
    computing = (op for op in below if op.name.startswith("aten::") and op.name not in NO_VALUES)
    own = sorted(op.dur - sum(one.dur for one in op.children) for op in computing)
    least = own[len(own) // 4] if own else 0
    return sum(max(0, ns - least) for ns in own) / 1e3


def _proposed(graph: Graph, found: Sequence[Loop], how: str, more: str = "", most: Graph | None = None) -> Proposal:
    same = [one for one in found if one.what == found[0].what]
    each = f" in {len(same)} loops" if len(same) > 1 else ""
    more = f"; the saving includes {counted(len(found) - len(same), 'other loop')}" * (len(same) < len(found)) + more
    return Proposal(
        graph,
        f"each of {sum(len(one.starts) for one in same)} passes{each} {same[0].what}{more}",
        how,
        assumed=True,
        title="" if found[0].ends and found[0].what not in IN_PARTS else "compute equal passes at once",
        most=most,
    )


@change(
    "give each launch more work",
    "no pass needs what another one computes",
    followed=FEWER_PRODUCTS,
    on_cpu=at_once_on_the_cpu,
)
def larger_batch(case: Case) -> Proposal | None:
    """Return a proposal to compute equal passes at once. Whether a pass needs another one's result is not recorded."""
    grows = case.growing_keys is not None and not _in_turn(case.trace, case.step)
    decodes = grows or case.recomputed_tokens is not None
    in_steps, typical = case.in_each_step(
        lambda step: _within_a_token(case.trace, step) if decodes else allowed(case.trace, step)
    )
    return all_in_one(case, in_steps, typical, HOW.get(typical[0].what, AT_ONCE)) if typical else None


def _within_a_token(trace: Trace, step: Step) -> list[Loop]:
    """Return the loops that may be computed at once in a step that decodes: each token needs the one before it.

    A token calls attention, so the passes of these loops do not if the recording does not decide what they need.
    """
    calls = sorted(op.start for op in attention_calls(step))
    within = [
        one for one in all_loops(trace, step) if bisect.bisect(calls, one.starts[0]) == bisect.bisect(calls, one.end)
    ]
    return _decided_or_allowed(trace, step, _without_overlaps(within))


def all_in_one(case: Case, in_steps: Sequence[Sequence[Loop]], typical: Sequence[Loop], how: str) -> Proposal:
    """Return a proposal to compute all passes of the loops at once.

    What the CPU does in all passes but the last one is removed, and so is what these launch, with its backward, and
    what joins their results. The kernels of the last pass do the work of all.
    """
    spans, gone = [], []
    for step, found in zip(case.steps, in_steps, strict=True):
        for loop in found:
            removed, _, work = all_but_the_last(case, step, loop)
            spans += removed
            gone += work
            place = bisect.bisect_left(step.outermost, loop.end, key=start_of)
            join, *following = step.outermost[place : place + 2] or [None]
            if join is not None and join.name in JOINS:
                spans.append((join.track, loop.end, following[0].start if following else join.end))
                gone += join.work_below()
    us, on_cpu = {}, ""
    measured = dict(zip(case.step.work, case.summary.gpu_work, strict=True))
    for loop in typical:
        _, work = _launched_from(case.trace, case.step, loop.last)
        on_cpu = _on_the_cpu(work) if loop.what == FROM_THE_CPU else ""
        us |= {one: _batched_us(case, measured[one], len(loop.starts)) for one in work}
    idle = f"; the GPU is idle for {1 - case.summary.busy_share:.0%} of the time"
    idle *= case.summary.waits_for == "overhead"
    at_once = with_durations(without_work(without_cpu_time(case.graph, spans), gone), case.in_all_steps(us))
    return msgspec.structs.replace(_proposed(at_once, typical, how + on_cpu, idle), error=prices.ONE_PASS_ERROR)


def _on_the_cpu(work: Sequence[Work]) -> str:
    """Return what else may help a pass that the CPU waits for, if its kernels take hardly longer than empty ones."""
    if not any("DtoH" in one.name for one in work):
        return ""
    each_us = sum(one.dur for one in work) / 1e3 / len(work)
    if each_us > 2 * prices.LEAST_KERNEL_US:
        return ""
    launching_us = sum(one.launch.dur for one in work if one.launch is not None) / 1e3
    return (
        f"; or try this model on the CPU: a pass's {len(work)} kernels and copies take {duration(each_us)} each on "
        f"average, little more than empty ones, and the CPU takes {duration(launching_us)} to launch them"
    )


def _batched_us(case: Case, one: GpuWork, count: int) -> float:
    """Return the time (µs) of one kernel for as much work as so many of these kernels.

    Each SM computes one block at a time. A product takes no longer than a good one. A copy takes the time of its bytes.
    """
    sms, blocks, peaks = case.summary.source.sms, count * math.prod(one.grid or [0]), case.peaks
    together = one.us * max(1.0, blocks / sms) if sms and blocks else count * one.us
    moved = count * (one.bytes_moved or 0)
    if "DtoD" in one.name and moved and peaks:
        together = one.us
    elif one.product and one.flops and peaks:
        peak = peaks.bf16 if (one.name_says.get("types") or "").lower() in TWO_BYTES else peaks.fp32
        together = min(together, max(one.us, multiplying_us(count * one.flops, prices.PRODUCT * peak, moved, peaks)))
    return min(count * one.us, max(together, moving_us(moved, peaks) if peaks else 0.0, prices.LEAST_KERNEL_US))


def _launched_from(trace: Trace, step: Step, spans: Intervals) -> tuple[list[Op], list[Work]]:
    """Return backward's nodes whose forward lies in these times, and all work that is launched in them and by these."""
    found, launched = nodes_by_forward(trace, step), _launched(step)
    nodes, work = (
        {id(one): one for a, b in spans for _, one in some[_place(some, a) : _place(some, b)]}
        for some in (found, launched)
    )
    work |= {id(one): one for node in nodes.values() for one in node.work_below()}
    return sorted(nodes.values(), key=start_of), list(work.values())


def _place(timed: Sequence[tuple[int, object]], time: int) -> int:
    return bisect.bisect_left(timed, time, key=itemgetter(0))


@kept_by_step
def _launched(step: Step) -> list[tuple[int, Work]]:
    """Return when each activity of the step was launched (ns), and the activity, in this order."""
    return sorted(((one.launch.start, one) for one in step.work if one.launch is not None), key=itemgetter(0))


def all_but_the_last(case: Case, step: Step, loop: Loop) -> tuple[list[tuple[tuple, int, int]], list[Op], list[Work]]:
    """Return when all passes but the last one take CPU time, their nodes of backward, and the work of both.

    The time between nodes that follow each other is theirs, too.
    """
    nodes, work = _launched_from(case.trace, step, loop.earlier)
    wanted = {id(node) for node in nodes}
    runs = groupby(sorted(backward_nodes(step), key=start_of), lambda node: (id(node) in wanted, node.track))
    in_turn = [list(run) for (is_wanted, _), run in runs if is_wanted]
    stays = outermost_named(step, lambda name: name.startswith(LOADER))  # each pass still gets its samples
    # and what the CPU computes for them, as an environment does
    stays += [*host(step).pauses, *(host(step).computing if case.trace.work else [])]
    passes = minus(loop.earlier, union((one.start, one.end) for one in stays))
    spans = [(track, start, end) for track in case.graph.threads for start, end in passes]
    return spans + [(run[0].track, run[0].start, run[-1].end) for run in in_turn], nodes, work


@kept_by_step
def allowed(trace: Trace, step: Step) -> list[Loop]:
    """Return the loops of a step whose passes may be computed at once, as far as the trace shows."""
    return _decided_or_allowed(trace, step, loops(trace, step))


def _decided_or_allowed(trace: Trace, step: Step, found: Sequence[Loop]) -> list[Loop]:
    decided = [one for one in by_flow(step, whole=True) if is_allowed(trace, step, one)]
    guessed = [one for one in found if not any(map(one.overlaps, decided))]
    return sorted([*decided, *_allowed(trace, step, guessed)], key=lambda one: one.starts)


def by_flow(step: Step, whole: bool, before: bool = True) -> list[Loop]:
    """Return the parts of loops that the recording decides: whole passes, or what can be computed before or after."""
    found = []
    for part in (one for one in parts_without_other_passes(step) if (one.whole, one.before) == (whole, before)):
        parts, what = [times_of(step, ops) for ops in part.ops], DECIDED
        if not part.whole:
            layer = next(filter(TAKES_DATA, (op.name for op in part.ops[0])), "")
            place = "independent of earlier passes" if part.before else "without effect on later passes"
            what = f"has {counted(len(part.ops[0]), 'op')} {place}{', such as ' * bool(layer)}{layer}"
        starts, ends = tuple(one[0].start for one in part.ops), tuple(one[-1][1] for one in parts)
        found.append(Loop(starts, ends[-1], what, () if part.whole else ends, tuple(parts)))
    return found


def times_of(step: Step, ops: Sequence[Op]) -> list[tuple[int, int]]:
    """Return when ops with data flow run (ns): each until the next one starts, if that is one of them."""
    ids, following = {id(op) for op in ops}, _following(step)
    return union((op.start, two.start if id(two := following.get(id(op))) in ids else op.end) for op in ops)


@kept_by_step
def _following(step: Step) -> dict[int, Op]:
    return {id(one.op): two.op for one, two in pairwise(calls_with_flow(step))}


def _allowed(trace: Trace, step: Step, found: Sequence[Loop]) -> list[Loop]:
    return [
        loop
        for loop in found
        if is_allowed(trace, step, loop)
        and (loop.what == UNEQUAL or not _recurs(step, loop))
        and not hand_on(step, loop.starts, loop.end)
    ]


def is_allowed(trace: Trace, step: Step, loop: Loop) -> bool:
    """Return whether neither communication nor an update, a loader or a batch norm makes its passes depend.

    A batch norm in training computes other statistics of the whole batch. Models of their own have updates and loaders
    of their own. No update lies between parts of a batch.
    """
    work = _launched_from(trace, step, loop.last)[1]
    names = () if loop.what in (OWN_MODEL, *IN_PARTS) else (LOADER, OPTIMIZERS)
    apart = outermost_named(step, lambda name: name.startswith(names))
    apart += [op for op in step.named("aten::batch_norm".__eq__) if op.inputs.concrete[5:6] != ["False"]]
    is_between = any(loop.starts[0] <= op.start < loop.starts[-1] for op in apart)
    return bool(work or not trace.work) and not any(map(is_communication, work)) and not is_between


def _recurs(step: Step, loop: Loop) -> bool:
    """Return whether a pass computes a cell of a recurrent network, or both functions of its gates."""
    calls = step.named(lambda name: name in GATES or CELLS(name))
    inside = {op.name for op in calls if loop.starts[0] <= op.start < loop.starts[1]}
    return inside.issuperset(GATES) or any(map(CELLS, inside))


@kept_by_step
def all_loops(trace: Trace, step: Step) -> list[Loop]:
    """Return the loops of a step whose passes have inputs of their own; of loops in each other, all."""
    found = [*_over_parts(trace, step), *_over_all_parts(step), *_over_tables(step), *_over_models(trace, step)]
    found += _over_joined(trace, step)
    if trace.trains:
        return [*found, *_over_a_batch(trace, step)]
    return [*found, *_over_copies(step), *_loop(_in_turn(trace, step), OWN_CACHE, 2)]


@kept_by_step
def loops(trace: Trace, step: Step) -> list[Loop]:
    """Return the loops of a step whose passes have inputs of their own, in order, without loops inside other loops."""
    return _without_overlaps(all_loops(trace, step))


def _without_overlaps(found: Sequence[Loop]) -> list[Loop]:
    # The loop with most passes is the innermost one; of equal ones the first to start has the whole pass.
    order = sorted(found, key=lambda one: (-len(one.starts), one.what != OWN_MODEL, one.starts))
    batch, others = ([one for one in order if (one.what in IN_PARTS) is wanted] for wanted in (True, False))
    times = union((one.starts[0], one.end) for one in others)
    # A batch in parts comes first, unless other loops take most of its time.
    is_last = any(2 * length_between(times, one.starts[0], one.end) > one.end - one.starts[0] for one in batch)
    kept: list[Loop] = []
    for loop in [*others, *batch] if is_last else [*batch, *others]:
        if not any(map(loop.overlaps, kept)):
            kept.append(loop)
    return sorted(kept, key=lambda one: one.starts)


def _over_parts(trace: Trace, step: Step) -> Iterator[Loop]:
    """Yield the loops that take one part of a tensor after the other.

    The parts are those of the first dimension, as samples are. Other ones, such as times, count if each pass has a
    backward of its own.
    """
    begins = [op.start for op in backward_begins(trace, step)]
    for name, dim, dims, run in parts_in_turn(step):
        own = all(bisect.bisect(begins, one.start) < bisect.bisect(begins, two.start) for one, two in pairwise(run))
        if dim == 0 or (begins and own):
            if name == COMPARES:
                yield from _loop(run, "computes with what equals one of several values")
            else:
                least = ALL_PARTS if len(run) == dims[dim] >= ALL_PARTS else MANY_PASSES
                yield from _loop(run, f"computes with one of the {dims[dim]:,} parts of a tensor", least)


def parts_in_turn(step: Step) -> Iterator[tuple[str, int, tuple, list[Op]]]:
    """Yield the calls that take one part of a tensor after the other, after their name, the dimension and the shape."""
    taken: dict[tuple, list[tuple[int, Op]]] = defaultdict(list)
    for op in step.named((*TAKES_A_PART, COMPARES).__contains__):
        dim, place = _part(op)
        if place is not None and (op.parent is None or op.parent.kind != "op") and not in_backward(op):
            taken[op.track, op.name, dim, tuple(op.inputs.dims[0])].append((place, op))
    for (_, name, dim, dims), calls in taken.items():
        for run in _taken_in_turn(calls):
            yield name, dim, dims, run


def _over_tables(step: Step) -> Iterator[Loop]:
    """Yield the lookups of embeddings of one width, as those of columns are, with only pooling between them."""
    others = (
        op
        for op in step.outermost
        if not (op.name in VIEWS or POOLS(op.name) or (op.name, op.inputs.concrete[1:2]) in TO_FLOATS)
    )
    for key, some in groupby(
        others, lambda op: op.name in LOOKS_UP and (op.name, op.track, *(op.inputs.dims_at(0) or [])[1:])
    ):
        if key and key[2:]:
            yield from _loop(list(some), TABLES, ALL_PARTS)


def _over_all_parts(step: Step) -> Iterator[Loop]:
    """Yield the loops over the parts of the first dimension into which one op cuts a tensor.

    The passes launch about as much as each other.
    """
    done = set()
    for cut, dim, run in after_a_cut(step):
        launched = _launches(step, [(one.start, two.start) for one, two in pairwise(run)])
        if dim == 0 and cut.start not in done and min(launched) > 0 and max(launched) <= ALIKE * min(launched):
            done.add(cut.start)
            yield from _loop(run, f"computes with one of the {len(run):,} parts of a tensor")


def after_a_cut(step: Step) -> Iterator[tuple[Op, int, list[Op]]]:
    """Yield the ops that cut a tensor into parts, along which dimension, and what begins a pass for each of the parts.

    That is the op that is called first afterwards, or only those of its calls that have its shapes: texts have other
    lengths, and other ops of this name may follow the loop.
    """
    cuts = list(step.named((*CUTS, "aten::split_with_sizes").__contains__))
    for op in cuts:
        taken = {_part(below) for below in op.walk() if below.name in TAKES_A_PART}
        dims, parts = {dim for dim, _ in taken}, sum(place is not None for _, place in taken)
        if parts < MANY_PASSES or len(dims) > 1 or in_backward(op):
            continue
        again = (one.start for one in cuts if one.start > op.start and one.inputs.dims == op.inputs.dims)
        until = min(again, default=step.end)
        after = (one for one in step.outermost if one.track == op.track and op.end <= one.start < until)
        after = [one for one in after if one.name not in CUTS]
        alike = [one for one in after if one.name == after[0].name]
        for firsts in (alike, [one for one in alike if one.inputs.dims == alike[0].inputs.dims]):
            if firsts and len(firsts) % parts == 0:
                yield op, *dims, firsts[:: len(firsts) // parts]


def _over_joined(trace: Trace, step: Step) -> Iterator[Loop]:
    """Yield the loops of equal ops whose results one op joins, if no pass takes another one's result."""
    ops, nodes = [op for op in step.outermost if op.kind == "op"], nodes_by_forward(trace, step)
    calls = [f"{op.track} {op.name} {op.inputs.recorded}" for op in ops]
    given = set()  # how many tensors of a shape an op before has joined
    for place in [place for place, op in enumerate(ops) if op.name in JOINS]:
        results = (ops[place].inputs.recorded or [[]])[0] or [[]]
        count = len(results)
        for size in range(1, min(place // count, LONGEST_PASS) + 1 if count >= ALL_PARTS else 1):
            first = place - count * size
            same = calls[place - 1 - size] == calls[place - 1]
            if same and calls[first : place - size] == calls[first + size : place]:
                passes = [ops[begin : begin + size] for begin in range(first, place, size)]
                has_inputs = (count, str(passes[0][0].inputs.dims_at(0))) in given
                # A join that each pass has, too, is of tensors of one pass.
                is_of_all = calls[place] not in calls[first:place] and all(one == results[0] for one in results)
                if is_of_all and _are_independent(trace, passes, nodes, results[0], has_inputs):
                    yield Loop(tuple(one[0].start for one in passes), ops[place].start, JOINED)
                break
        given.add((count, str(results[0])))


def _are_independent(
    trace: Trace, passes: Sequence[Sequence[Op]], nodes: Sequence[tuple[int, Op]], result: list, has_inputs: bool
) -> bool:
    """Return whether no pass takes another one's result, of which one op joins all. nodes: from nodes_by_forward().

    That is so if each pass has modules of its own, and takes neither results nor its input again. Gradients show it,
    too: backward adds those of what several ops take, in all but one of them. A result or state that the next pass
    takes is taken by the join or a head as well. So no pass adds any, or only the first op of all passes but the last
    one does, when all take one tensor, or each adds as many, and an op before has joined their inputs (has_inputs).
    What the last pass makes for a next one has no backward.
    """
    first, *following = passes[0]
    if any(op.name == "aten::detach" or (op.name.endswith("_") and op.name != "aten::relu_") for op in passes[0]):
        return False
    roots, added, made = trace.modules.get(first.track, ()), [], []
    layers = [[op for op in one if HAS_WEIGHTS(op.name)] for one in passes]
    own = [{call.name for op in some for call in innermost(roots, op.start)[-1:]} for some in layers]
    # What takes one tensor after the last layer is a function of the result.
    end = max((op.start for op in layers[0]), default=0)
    others = [op for op in passes[0] if op.start <= end or len(op.inputs.tensors) != 1]
    taken, again = ([dims for op in some for dims in _shapes(op.inputs.recorded)] for some in (others, following))
    apart = all(own) and len(set().union(*own)) == sum(map(len, own))
    apart = apart and result not in taken and first.inputs.dims_at(0) not in again
    for one, some in zip(passes, layers, strict=True):
        of_all, of_first, *of_layers = (
            [node for _, node in nodes[_place(nodes, begin) : _place(nodes, end)]]
            for begin, end in ((one[0].start, one[-1].end), *((op.start, op.end) for op in (one[0], *some)))
        )
        if not of_all:
            return apart
        if not all(of_layers) or result not in [child.inputs.dims_at(0) for child in of_all[-1].children]:
            return False
        made.append(len(of_all))
        adds = [sum(op.name in ADDS for node in found for op in node.walk()) for found in (of_first, of_all)]
        added.append((adds[0], adds[1] - adds[0]))
    (at_first, later), last = added[0], added[-1]
    if apart or len(set(added[:-1])) > 1 or made[-1] < min(made[:-1]):
        return apart
    return added[0] == last if has_inputs else not later and (not at_first or last[0] < at_first)


def _over_copies(step: Step) -> Iterator[Loop]:
    """Yield the loops that copy an equal input from the CPU in each pass, and launch something with it.

    Texts and images may have other sizes. A text that grows with each pass is what the passes before it made. Few
    passes count, and those with several copies, if they begin alike and the CPU reads a result of each: a copy may be
    of a constant.
    """
    copies: dict[tuple, list[Op]] = defaultdict(list)
    for one in step.work:
        if "HtoD" in one.name and one.launch is not None:
            op = one.launch.outermost_call()
            one_number = math.prod([2] if (dims := op.inputs.dims_at(0)) is None else dims) == 1  # such as a time
            for sizes in ([dims[:-1] or dims for dims in op.inputs.dims], [len(dims) for dims in op.inputs.dims]):
                calls = copies[op.track, op.name, str(sizes)]
                if op.kind == "op" and op not in calls[-1:] and not one_number:
                    calls.append(op)
    given = Counter(_size(one.launch) for one in step.work if "HtoD" in one.name and one.launch is not None)
    reads = [one.launch for one in step.work if "DtoH" in one.name and one.launch is not None]
    reads = [one for one in reads if one.outermost_call().name in COPIES and _size(one)]  # no checks, and no losses
    times, results = sorted(map(start_of, reads)), set(map(_size, reads))
    for calls in copies.values():
        calls.sort(key=lambda op: op.start)
        for each in range(1, len(calls) // 2 + 1):  # how many inputs a pass copies
            passes = calls[::each]
            launched = _launches(step, [(one.end, two.start) for one, two in pairwise(passes)])
            if len(calls) % each or min(launched) < 2 or max(launched) > 2 * min(launched):
                continue
            lengths = [[dims[-1:] for dims in op.inputs.dims] for op in passes]
            grows = lengths[:1] != lengths[-1:] and lengths == sorted(lengths)
            # The CPU reads a result of each pass. None has the shape of its input, or of a state that is given once.
            are_read = all(one < two for one, two in pairwise(bisect.bisect(times, op.start) for op in passes))
            handed = results & {*map(_size, passes), *(size for size, n in given.items() if n < len(passes))}
            answers = are_read and not handed and _begin_alike(step, passes)
            if not grows and (each == 1 or answers):
                yield from _loop(passes, FROM_THE_CPU, FEW if answers else MANY_PASSES)
            break


def _size(call: Op) -> str:
    """Return the first shape of the outermost op around a call, without dimensions of one; "" for one number."""
    found = without_ones(call.outermost_call().inputs.dims_at(0) or ())
    return str(found) if found else ""


def _begin_alike(step: Step, passes: Sequence[Op]) -> bool:
    """Return whether the same ops begin each pass, as they do if all call one model."""
    places = [bisect.bisect_left(step.outermost, op.start, key=start_of) for op in passes]
    count = min(BEGINS, *(two - one for one, two in pairwise(places)))
    return len({tuple(op.name for op in step.outermost[place : place + count]) for place in places}) == 1


def _in_turn(trace: Trace, step: Step) -> list[Op]:
    """Return each sequence's first call of attention, if several get a token each, which begins with its lookup.

    Each has a KV cache of its own, which has one more key in the next step, and as many calls as the others.
    """
    last, looked = max(2, bisect.bisect(trace.steps, step.start, key=start_of)), step.named(LOOKS_UP.__contains__)
    if not looked or not keys_grow_in_place(trace.steps[last - 2 : last]):
        return []
    begins = sorted(op.start for op in looked if op.inputs.dims == looked[0].inputs.dims)
    of_each = grouped((bisect.bisect(begins, op.start), op) for op in attention_calls(step)).values()
    return [some[0] for some in of_each] if len({len(some) for some in of_each}) == 1 < len(of_each) else []


def _over_models(trace: Trace, step: Step) -> Iterator[Loop]:
    """Yield the loops that call one model after the other, or a module again, as far as no call has another's result.

    In training, each model has a backward and modules of its own, except for losses. Models inside other ones do not
    count, because the layers of a model need each other's results.
    """
    begins = [op.start for op in backward_begins(trace, step)]
    yield from _over_own_copies(trace, step, begins)
    for track, modules in trace.modules.items():
        ops = [op for op in step.outermost if op.kind == "op" and op.track == track]
        roots = [one for one in modules if step.start <= one.start < step.end]
        for run in grouped((NUMBER.sub("", root.name), root) for root in roots).values():
            if len(run) < ALL_PARTS or len({call.name for call in run}) < len(run):
                continue
            before = [*(bisect.bisect(begins, call.start) for call in run), len(begins)]
            own = all(one < two for one, two in pairwise(before)) and not _shared(roots, run)
            apart = own and begins and _results_stay(ops, run[0], begins)
            if apart or (not begins and any(calls == run for calls, _ in _apart(step, ops, run, begins, True))):
                yield from _loop(run, OWN_MODEL, ALL_PARTS)
        for some in (roots, *(one.children for root in roots for one in root.walk())):
            for run in grouped((one.name, one) for one in some).values():
                if _of_own_sizes(step, ops, run, begins):
                    yield from _loop(run, OWN_SIZE, ALL_PARTS)
                for calls, what in _apart(step, ops, run, begins, some is roots):
                    later = (one.start for one in some if one.start > calls[-1].start)
                    yield from _loop(calls, what, len(calls), min(later, default=step.end))


def _over_own_copies(trace: Trace, step: Step, begins: Sequence[int]) -> Iterator[Loop]:
    """Yield the loops whose passes each train a copy of the same weights, as copy.deepcopy() makes one.

    No model is called in most passes, though a copy may have the name of one that was freed. Nothing else computes with
    a tensor of a weight's shape: that could be an update of the original, of which the next copy is made.
    """
    ops = [op for op in step.outermost if op.name != "aten::detach"]
    runs = (list(run) for is_copy, run in groupby(ops, lambda op: op.name == "aten::clone") if is_copy)
    for some in grouped(((run[0].track, str([op.inputs.dims for op in run])), run) for run in runs).values():
        starts, weights = [run[0].start for run in some], [dim for op in some[0] for dim in op.inputs.dims if dim[1:]]
        places = [*(bisect.bisect(begins, start) for start in starts), len(begins)]
        if len(some) < ALL_PARTS or any(one >= two for one, two in pairwise(places)):
            continue
        roots = (one for one in trace.modules.get(some[0][0].track, ()) if starts[0] <= one.start < step.end)
        calls = {(bisect.bisect(starts, one.start), one.name) for one in roots if not IS_LOSS(one.name)}
        most = max(Counter(name for _, name in calls).values(), default=len(some))
        inside = (op for op in ops if starts[0] <= op.start < starts[-1] and op.name not in COPIES)
        taken = (
            dims for op in inside for dims in _shapes(op.inputs.recorded[:1]) if dims in weights and _computes(step, op)
        )
        if 2 * most <= len(some) + 1 and next(taken, None) is None:
            yield from _loop([run[0] for run in some], OWN_MODEL, ALL_PARTS)


def _over_a_batch(trace: Trace, step: Step) -> Iterator[Loop]:
    """Yield the loop whose passes add to all gradients of the step's first pass, as those over parts of a batch do.

    Each forward begins, with the same op and shapes, after the backward before it. Between the two, nothing computes
    with a tensor of a gradient's shape, as an update or an attack on the input does, or picks numbers. No pass calls a
    recurrent network of torch.
    """
    begins, ops = [op.start for op in backward_begins(trace, step)], step.outermost
    alone = (op for op in added_gradients(step) if len(op.parent.children) == 1)  # with no op of a hook
    adding = {id(node) for op in alone for node in op.above() if node.name == ACCUMULATES}
    if len(begins) < 2 or not adding or any(step.named(KEEPS_A_STATE)):
        return
    passes = grouped((bisect.bisect(begins, node.start), node) for node in backward_nodes(step))
    shapes, run = set(), []  # run: the place of forward's first op, and when backward ends
    for _, nodes in sorted(passes.items()):
        begun = (time for node in nodes for _, time in forwards_of(trace, node))
        taking = [node for node in nodes if node.name == ACCUMULATES]
        place = max(0, bisect.bisect(ops, min(begun, default=step.start), key=start_of) - 1)
        alike = (
            ops[place].name,
            ops[place].inputs.dims,
            sorted(str(dims) for node in taking for op in node.children for dims in op.inputs.dims[:1]),
        )
        if run:
            before = bisect.bisect_left(ops, run[-1][1], key=start_of)
            if place < before or any(_uses(step, op, shapes) for op in ops[before:place]):
                return
        else:
            first, shapes = alike, {*alike[2]}
        if alike != first or not shapes or sum(id(node) in adding for node in taking) != (len(taking) if run else 0):
            return
        run.append((place, max(node.end for node in nodes)))
    places, ends = zip(*run, strict=True)
    starts = tuple(ops[place].start for place in places)
    updates = outermost_named(step, lambda name: name.startswith(OPTIMIZERS))
    if not any(starts[0] <= op.start < starts[-1] for op in updates):
        lengths = {two - one for one, two in pairwise(places)}  # parts of a sequence are of one or two
        yield Loop(starts, ends[-1], UNEQUAL if 2 * len(lengths) > len(places) > 3 else ADDS_UP, ends[:-1])


def _uses(step: Step, op: Op, shapes: Container[str]) -> bool:
    """Return whether an op computes with a tensor of one of these shapes or with several tensors, or picks numbers."""
    if PICKS(op.name) or op.name.startswith(("aten::_foreach", "aten::_fused", "aten::_amp")):
        return True
    return _computes(step, op) and any(str(dims) in shapes for dims in _shapes(op.inputs.recorded))


def _shapes(inputs: Sequence) -> list:
    """Return the recorded shapes of some inputs, with those of the tensors in lists."""
    return [*inputs, *(dims for some in inputs if some and isinstance(some[0], list) for dims in some)]


def _apart(
    step: Step, ops: Sequence[Op], run: Sequence[Op], begins: Sequence[int], are_roots: bool
) -> Iterator[tuple[Sequence[Op], str]]:
    """Yield the calls that follow each other and take no other call's result, and what such a pass does.

    Each launches as much, and keeps no state. Between the calls nothing is computed, except from inputs, as a flip is,
    and from results of another size, and their last layer makes vectors of a size that the input does not have. Calls
    that take whole numbers are few, with little between them, and nothing makes such numbers. The next op takes the
    result, or all results together, as a sampler with guidance does.
    """
    if len(run) < 2 or IS_LOSS(run[0].name):
        return
    places = [tuple(bisect.bisect_left(ops, time, key=start_of) for time in (one.start, one.end)) for one in run]
    data, inside = [_data(ops[begin:end]) for begin, end in places], ops[slice(*places[0])]
    parts = [[call for _, call in some] for _, some in groupby(zip(data, run, strict=True), lambda one: one[0])]
    if len(parts) > 1:
        for part in parts:
            yield from _apart(step, ops, part, begins, are_roots)
        return
    last = next((op for op in reversed(inside) if LAYER(op.name)), None)
    layer = last.inputs.tensors if last is not None else ()
    if data[0] is None or len(layer) < 2 or any(KEEPS_A_STATE(op.name) or op.name == "aten::copy_" for op in inside):
        return
    of_numbers, cuts = "int" in data[0].type, [0]
    viewed = any(op.name in VIEWS for (_, end), (begin, _) in pairwise(places) for op in ops[end:begin])
    size = math.prod if viewed and not of_numbers else tuple  # a view has the size of a result
    of_samples = data[0].shape[0] > 1 and not any(map(_makes_one_of_all, inside))
    # What takes one tensor after the last layer is a function of the result.
    inside = [op for op in inside if op.start <= last.start or len(op.inputs.tensors) != 1]
    taken, hides = _taken(inside, size, of_samples)
    hides |= of_numbers and any(PICKS(op.name) for op in inside)
    channels = data[0].shape[1 if len(layer[1].shape) > 2 else -1]
    is_new = not hides and (of_numbers or layer[1].shape[0] != channels) and not _begins_with_zeros(ops, run[0], inside)
    made_now = [one.shape for op in ops[places[-1][1] :][:1] for one in op.inputs.tensors[:1]]
    stays = is_new and all(size(one) not in taken for one in made_now)
    two_sizes = {math.prod(one) for one in (data[0].shape, *made_now) if stays}
    for place, ((_, end), (begin, _)) in enumerate(pairwise(places), 1):
        (one, two), between = run[place - 1 : place + 1], ops[end:begin]
        if of_numbers:
            made = two.start - one.end > one.dur or any(NUMBERS(op.name) for op in between)
        else:
            made = any(_computes(step, op) and not _of_one_size(op, two_sizes) for op in between)
            # A part of a result may have the input's size.
            sliced = [one for op in between if op.name in SLICES for one in op.inputs.tensors[:1]]
            made |= any(math.prod(one.shape) == math.prod(dims) for one in sliced for dims in made_now)
        if made or bisect.bisect(begins, one.end) < bisect.bisect(begins, two.start):
            cuts.append(place)
    for begin, end in pairwise([*cuts, len(run)]):
        calls, following = run[begin:end], ops[places[end - 1][1] :][:1]
        results = [size(one.shape) for op in following for one in op.inputs.tensors]
        launched = set(_launches(step, [(call.start, call.end) for call in calls]))
        if len(calls) < 2 or len(launched) > 1 or launched == {0} or not results or (of_numbers and len(calls) > FEW):
            continue
        joins = next((op for op in ops[places[end - 1][1] :] if _computes(step, op)), following[0]).inputs.tensors
        alike = [one for one in joins if size(one.shape) == results[0]]
        together = are_roots and not (begins or of_numbers) and len(alike) >= len(calls)
        shown = of_numbers or following[0].name in ("aten::detach", "aten::to") or _computes(step, following[0])
        if shown and (together or (is_new and results[0] not in taken)):
            yield calls, OWN_INDICES if of_numbers else AGAIN


def _of_own_sizes(step: Step, ops: Sequence[Op], run: Sequence[Op], begins: Sequence[int]) -> bool:
    """Return whether calls of a model in one forward have inputs of different sizes, as scenes or graphs have.

    They call the same ops, and few have all sizes in common, as the steps of a layer do. Each input comes from the CPU,
    or nothing is computed before it. Up to a pooling, each op that computes takes tensors of such sizes, and weights at
    most, so that none takes a state; a class token looks like one. No size grows or shrinks from call to call, as the
    keys of a text and the levels of a pyramid do.
    """
    if len(run) < ALL_PARTS or bisect.bisect(begins, run[0].start) < bisect.bisect(begins, run[-1].start):
        return False
    places = [[bisect.bisect_left(ops, time, key=start_of) for time in (one.start, one.end)] for one in run]
    calls = [ops[begin:end] for begin, end in places]
    sizes = {str([op.inputs.recorded for op in call]) for call in calls}
    if 2 * len(sizes) <= len(calls) or len({tuple(op.name for op in call) for call in calls}) > 1:
        return False
    given = [one and list(one.shape) for one in map(_data, calls)]
    if None in given:
        return False
    for (_, end), (begin, _), data in zip(places, places[1:], given[1:], strict=False):
        computing = [op for op in ops[end:begin] if _computes(step, op)]
        copies = [op for op in computing if any("HtoD" in one.name for one in op.work_below())]
        others = [(op.name, op.inputs.dims_at(0) or []) for op in computing if op not in copies]
        is_made = any(dims == data or (name.endswith("_") and math.prod(dims) > 1) for name, dims in others)
        if computing and (is_made or all(op.inputs.dims_at(0) != data for op in copies)):
            return False
    before = [next((one for one in first if one not in data), None) for first, data in pairwise(given)]
    pooled = False
    for same in reversed(list(zip(*calls, strict=True))):
        op, inputs = same[0], [_shapes(one.inputs.recorded) for one in same]
        if len(set(map(len, inputs))) > 1:
            return False
        changing, kept = [], []
        for column in zip(*inputs, strict=True):
            (changing if any(one != column[0] for one in column) else kept).append(column)
        kept = [one for one, *_ in kept if one and isinstance(one[0], int) and math.prod(one) > 1]
        pooled |= bool(changing)
        state = (
            kept and not (changing and HAS_WEIGHTS(op.name)) if pooled else len(kept) > 1 and not HAS_WEIGHTS(op.name)
        )
        handed = any(all(n in (None, *dims) for n, dims in zip(before, one[1:], strict=True)) for one in changing)
        if any(map(_in_order, changing)) or ((state or handed) and _computes(step, op)):
            return False
    return pooled


def _in_order(shapes: Sequence[list]) -> bool:
    """Return whether a dimension of these shapes grows or shrinks from each to the next, or stays."""
    columns = zip(*(one for one in shapes if one and isinstance(one[0], int)), strict=False)
    return any(len(set(one)) > 1 and list(one) in (sorted(one), sorted(one, reverse=True)) for one in columns)


def _taken(ops: Sequence[Op], size: Callable, of_samples: bool) -> tuple[set, bool]:
    """Return the sizes of the tensors that a call's ops take, and whether those in lists may be of another call.

    Layers have used a call's own tensors before, all but the one that was just made. They have used no state.
    of_samples: whether a call has several samples and makes none of them, so that a tensor of one is a weight, as a
    class token is before it is expanded.
    """
    taken, used, hides, expanded = set(), set(), False, Counter()
    for op in ops:
        joined = _shapes(op.inputs.recorded[:1])[1:]
        unused = Counter(str(dims) for dims in joined if size(dims) not in used) - expanded
        weights = of_samples and all(dims[:1] == [1] for dims in joined)
        hides |= op.name in JOINS and (not joined or (unused.total() > 1 and not weights))
        if of_samples and op.name == "aten::expand":
            expanded.update(_expanded(op))
        sizes = {size(one.shape) for one in op.inputs.tensors}
        taken |= sizes | {*map(size, joined)}
        used |= sizes if LAYER_OR_POOL(op.name) else set()
    return taken, hides


def _makes_one_of_all(op: Op) -> bool:
    """Return whether an op makes one sample of several, as a mean over them or as one of them."""
    along = op.inputs.concrete[1:2]
    return (op.name in POOLING and along == ["[0]"]) or (op.name in TAKES_A_PART and along == ["0"])


def _expanded(op: Op) -> Iterator[str]:
    """Yield the shape to which aten::expand repeats a tensor of one sample."""
    dims = op.inputs.dims_at(0) or []
    wanted = [int(one) for text in op.inputs.concrete[1:2] for one in WHOLE_NUMBERS(text)]
    if dims[:1] == [1] and len(wanted) == len(dims):
        yield str([one if one >= 0 else dim for one, dim in zip(wanted, dims, strict=True)])


def _begins_with_zeros(ops: Sequence[Op], call: Op, inside: Sequence[Op]) -> bool:
    """Return whether ops inside a call take a tensor of a shape of zeros that are made before it, as a state is."""
    zeros = (op for op in ops if op.start < call.start and "zeros" in op.name)
    begun = {str(one) for op in zeros for one in (op.inputs.dims if "like" in op.name else op.inputs.concrete[:2])}
    return any(str(one.shape) in begun for op in inside for one in op.inputs.tensors)


def _of_one_size(op: Op, sizes: Collection[int]) -> bool:
    """Return whether all tensors that an op takes are of one of two sizes, and so is what it makes."""
    found = {math.prod(one.shape) for one in op.inputs.tensors if one.shape}
    return len(sizes) == 2 and len(found) == 1 and found < sizes and bool(KEEPS_ITS_SIZE(op.name))


def _data(ops: Sequence[Op]) -> Tensor | None:
    """Return the first tensor that a model's ops compute with beside weights; None if the trace does not show it."""
    first = next((op for op in ops if TAKES_DATA(op.name)), None)
    return next(iter(first.inputs.tensors[first.name in LOOKS_UP :]), None) if first is not None else None


def _results_stay(ops: Sequence[Op], call: Op, begins: Sequence[int]) -> bool:
    """Return whether a call takes no tensor of the shape of its result, so that no call takes another's result.

    The result is one of the tensors that are taken until its backward begins. Shapes in lists are not recorded.
    """
    until = next((time for time in begins if time > call.end), call.end)
    begin, end, last = (bisect.bisect_left(ops, time, key=start_of) for time in (call.start, call.end, until))
    taken, results = (
        {tuple(dims) for op in some for one in op.walk() for dims in one.inputs.dims}
        for some in (ops[begin:end], ops[end : max(last, end + 1)])
    )
    joins = any(one.name in JOINS for op in ops[begin:end] for one in op.walk())
    return bool(taken and results) and taken.isdisjoint(results) and not joins


def _shared(roots: Sequence[Op], calls: Sequence[Op]) -> bool:
    """Return whether a module other than a loss runs in several of the passes that begin with these calls."""
    starts, passes = [call.start for call in calls], defaultdict(set)
    for root in roots:
        for one in root.walk() if starts[0] <= root.start else ():
            passes[one.name].add(bisect.bisect(starts, root.start))
    return any(len(some) > 1 for name, some in passes.items() if not NUMBER.sub("", name).endswith("Loss"))


def _computes(step: Step, op: Op) -> bool:
    """Return whether an op launches more than copies to the CPU, or in a step without a GPU is more than a view."""
    if step.work:
        return any("DtoH" not in one.name for one in op.work_below())
    return op.name not in (*NO_VALUES, *VIEWS)


def _launches(step: Step, spans: Sequence[tuple[int, int]]) -> list[int]:
    """Return how many activities are launched in each of these spans (ns); of a step without them, how many ops."""
    timed, key = (_launched(step), itemgetter(0)) if step.work else (step.outermost, start_of)
    return [bisect.bisect(timed, end, key=key) - bisect.bisect(timed, start, key=key) for start, end in spans]


def _loop(run: Sequence[Op], what: str, least: int = MANY_PASSES, until: float = math.inf) -> Iterator[Loop]:
    if len(run) >= least:
        starts = tuple(op.start for op in run)
        yield Loop(starts, min(starts[-1] + median_high([two - one for one, two in pairwise(starts)]), until), what)


def _part(op: Op) -> tuple[int, int | None]:
    """Return the dimension along which an op takes a part of a tensor, and which; None if that is not recorded.

    Parts that are numbers are not meant, such as the times of a diffusion model's iterations.
    """
    dims, (dim, place) = op.inputs.dims_at(0) or (), (*op.inputs.concrete[1:3], "", "")[:2]
    if op.name == COMPARES:  # which expert a token goes to, for example
        return 0, int(dim) if dims and IS_INDEX(dim) else None
    if len(dims) < 2 or not IS_INDEX(dim) or not IS_INDEX(place) or int(dim) >= len(dims):
        return 0, None
    return int(dim), int(place)


def _taken_in_turn(calls: Sequence[tuple[int, Op]]) -> Iterator[list[Op]]:
    """Yield the calls that take other parts than the ones before them, from the first part to the last one.

    If no part is taken twice, their order does not matter: samples are drawn in a random one.
    """
    if len({place for place, _ in calls}) == len(calls):
        yield [op for _, op in calls]
        return
    run, last = [], -1
    for place, op in calls:
        if place < last:
            yield run
            run, last = [], -1
        if place > last:
            run.append(op)
            last = place
    yield run


@change("double the batch", "launches take as long for twice the batch")
def double_batch(case: Case) -> Proposal | None:
    """Return a proposal to double the batch where the GPU waits for launches for most of the time.

    The launches take the CPU as long for twice the batch, except for those of loops over samples. What the CPU computes
    itself, or in Python between ops, takes twice as long. So does each activity on the GPU, except for the optimizer's
    and the collectives, whose sizes are those of the parameters.
    """
    summary, steady = case.summary, case.summary.steady
    if summary.waits_for != "overhead" or steady is None or summary.training.loading or not case.trace.has_steps:
        return None
    if steady.idle_not_launched_us < MOSTLY * summary.steady_us:
        return None
    own, turns = [], 0
    for step in case.steps:
        launches = sorted([one.launch for one in step.work if one.launch is not None], key=start_of)
        spans = [(one.start, one.end) for one in (*host(step).computing, *host(step).pauses)]
        # Each sample of a loop has launches of its own, in backward, too, unless each pass has a model of its own.
        alike = [one for one in loops(case.trace, step) if one.what in HOW and one.what != OWN_CACHE]
        looped = [one for one in all_loops(case.trace, step) if not any(map(one.overlaps, alike))]
        nodes = [_launched_from(case.trace, step, [(one.starts[0], one.end)])[0] for one in looped]
        own += [(node.track, node.start, node.us) for node in {id(node): node for node in chain(*nodes)}.values()]
        spans += [(one.starts[0], one.end) for one in looped]
        turns += len(looped)
        for start, end in union(spans):
            follows = launches[bisect.bisect_left(launches, start, key=start_of) :][:1]
            own += [(call.track, call.start, (end - start) / 1e3) for call in follows]
    spent = sum(us for *_, us in own) / len(case.steps)
    if spent > MOSTLY * case.graph.recorded_us or (own and summary.communication is not None):
        return None  # a pause may be a wait for other ranks
    updates = case.launched_in(OPTIMIZER)
    as_long = {work for work, one, _ in case.activities if id(work) in updates or one.family == "communication"}
    longer = {work: 2 * one.us for work, one, _ in case.activities if work not in as_long}
    return Proposal(
        with_cpu_time(with_durations(case.graph, case.in_all_steps(longer)), own),
        f"the GPU waits for launches {steady.idle_not_launched_us / summary.steady_us:.0%} of the time; the time after "
        f"it is half a step of twice the batch{', in which loops over samples take twice as long' * bool(turns)}",
        "process twice as many samples in one step" + ", with no more launches" * (not turns),
        assumed=True,
        shared=2,
    )
