"""Changes of a model that is not trained: KV caches, no autograd."""

from bisect import bisect_left
from itertools import chain

from tracereader.changes import prices
from tracereader.changes.change import change
from tracereader.changes.context import Case
from tracereader.changes.graphs import can_be_captured, long_runs
from tracereader.changes.opportunity import Proposal
from tracereader.changes.roofline import moving_us
from tracereader.figures.attention import Pass, attention_calls, passes, queries_and_keys
from tracereader.figures.gpu_work import GpuWork
from tracereader.figures.phases import backward_nodes, left_gradients
from tracereader.figures.training import unused_nodes
from tracereader.findings.device_words import CUDA_OR_HIP
from tracereader.findings.finding import counted
from tracereader.replay.changes import cuda_graph as as_cuda_graph
from tracereader.replay.changes import with_durations, without_cpu_time, without_ops
from tracereader.trace import Work
from tracereader.two_runs.faster import graphs_launched
from tracereader.two_runs.same_work import by_calls, halved, same_heavy, same_products

MANY_NODES = 16  # from so many ops on that autograd records for no backward, switching it off is worth a look
STATIC = 'a cache of fixed size, such as StaticCache, and torch.compile(model, mode="reduce-overhead")'


def _without_left_gradients(case: Case) -> Proposal | None:
    """Propose to compute no gradients that stay from step to step: those of what is not trained."""
    # In a step after one that has used and cleared the gradients, these are new.
    if case.is_single or not all(left_gradients(case.trace, step) for step in case.trace.steps if backward_nodes(step)):
        return None
    in_steps, typical = case.in_each_step(lambda step: left_gradients(case.trace, step))
    if typical is None:
        return None
    adding, last, beside = (list(chain.from_iterable(some)) for some in zip(*filter(None, in_steps), strict=True))
    spans = [(some[0].track, some[0].start, some[-1].end) for _, some, _ in filter(None, in_steps) if some]
    # A node with two gradients takes as long for each.
    spans += [(node.track, node.start, (node.start + node.end) // 2) for node in beside]
    graph = with_durations(case.graph, {work: work.us / 2 for node in beside for work in node.work_below()})
    where = f", in {counted(len(typical[1]), 'op')} after all other gradients" * bool(typical[1])
    return Proposal(
        without_ops(without_cpu_time(graph, spans), [*last, *adding]),
        f"backward adds to {counted(len(typical[0]), 'gradient')} that the step before left{where}: no zero_grad() "
        "clears them",
        "requires_grad_(False) for the parameters that are not trained, if no later step uses their gradients; or "
        "torch.no_grad() around a model through which no needed gradient goes",
        title="freeze what is not trained",
        assumed=bool(beside),
    )


@change(
    "run the model without autograd",
    "no backward follows outside the trace, and no later step uses the gradients that each step adds to",
    followed=halved(lambda side: side.summary.training.unused_nodes, same_heavy, by_calls),
    on_cpu=_without_left_gradients,
    keys=("inference_mode", "frozen_parameters"),
)
def no_autograd(case: Case) -> Proposal | None:
    """Propose to run a model without autograd, if it records many ops and no backward follows, or one for nothing."""
    if case.trace.trains:
        return _without_left_gradients(case)
    if case.summary.training.unused_nodes < MANY_NODES:
        return None
    found, typical = case.in_each_step(lambda step: unused_nodes(case.trace, step))
    spans = []
    for op in chain.from_iterable(found):
        until = op.children[0].start if op.children else op.end
        spans.append((op.track, op.start, min(until, op.start + round(case.launch_us * 1e3))))
    return Proposal(
        without_cpu_time(case.graph, spans),
        f"autograd records {counted(len(typical), 'op')} of a step, and the trace has no backward pass",
        "torch.inference_mode() or torch.no_grad() around the model, if no backward follows",
        assumed=True,
    )


@change(
    "use a static KV cache and CUDA graphs",
    "attention takes as long on the cache of fixed size, which has an empty part",
    followed=halved(lambda side: not graphs_launched(side), same_products),
    needs=CUDA_OR_HIP,
    keys=("static_cache",),
)
def static_cache(case: Case) -> Proposal | None:
    """Return a proposal to decode with a KV cache of fixed size: then the tokens can be replayed as CUDA graphs."""
    if case.trace.trains or not can_be_captured(case):
        return None
    how = f'generate(…, cache_implementation="static"), or {STATIC}'
    if keys := case.growing_keys:
        attending = (op for step in case.steps for op in attention_calls(step))
        calls, graph = [op for op in attending if queries_and_keys(op)[0] == 1], case.graph
        here = f"here from {keys[0]:,} to {keys[1]:,}"
        seen = f"attention's keys grow by one with each token, {here}, so the shapes change with each token"
    elif case.recomputed_tokens:
        calls = [op for step in case.steps for one in _with_a_cache(passes((step,))) for op in one.calls]
        graph = with_durations(case.graph, case.in_all_steps(_of_new_tokens(case)))
        how = f"pass only the new token, with {STATIC}"
        least, most = case.recomputed_tokens
        seen = f"each pass through the model recomputes all tokens and has one more, here from {least:,} to {most:,}"
    else:
        return None
    runs, captured, _ = long_runs(case, {id(op) for call in calls for op in (call, *call.above())})
    if not captured:
        return None
    return Proposal(
        as_cuda_graph(graph, runs),
        f"{seen}; with a KV cache of fixed size, {captured:,} launches can be replayed as CUDA graphs",
        how,
        assumed=True,  # attention also reads the empty part of the cache
    )


def _with_a_cache(of_step: list[Pass]) -> list[Pass]:
    """Return a step's passes that a cache makes shorter: not a sequence's first one, if the step has several passes."""
    if len(of_step) < 2:
        return of_step
    return [one for place, one in enumerate(of_step) if place and one.tokens > of_step[place - 1].tokens]


def _of_new_tokens(case: Case) -> dict[Work, float]:
    """Return the times (µs) of the typical step's activities whose sizes grow with the tokens, for the new token only.

    An activity after a pass's last call of attention may belong to that pass or to the next one, which its sizes show.
    """
    here, found = passes((case.step,)), {}
    shorter, ends = {id(one) for one in _with_a_cache(here)}, [one.calls[-1].end for one in here]
    for work, one, op in case.activities:
        if op is None or work.launch is None:
            continue
        place, sizes = bisect_left(ends, work.launch.start), {size for dim in op.inputs.dims for size in dim}
        # The next one comes first: tokens may be as many as features.
        for of in reversed(here[max(0, place - 1) : place + 1]):
            if not sizes.isdisjoint((of.tokens, of.tokens * of.batch)):
                if id(of) in shorter:
                    found[work] = _of_one_us(case, one, of.tokens)
                break
    return found


def _of_one_us(case: Case, one: GpuWork, tokens: int) -> float:
    """Return the time (µs) of an activity for one of the tokens. A product still reads its weight."""
    least = prices.LEAST_KERNEL_US
    if shape := one.product:
        least = prices.SMALL_PRODUCT_US
        if one.bytes_moved and case.peaks:
            least = max(least, moving_us(one.bytes_moved * shape.k * shape.n / shape.elements, case.peaks))
    return min(one.us, max(one.us / tokens, least))
