"""Changes for a model that is not trained: KV caches, and adapters that are merged with their layers."""

from bisect import bisect_left

from tracereader.figures.attention import Pass, attention_calls, passes, queries_and_keys
from tracereader.figures.avoidable import adapters
from tracereader.figures.decoding import growing_appends
from tracereader.figures.gpu_work import GpuWork
from tracereader.findings.device_words import CUDA_OR_HIP
from tracereader.findings.finding import counted, duration
from tracereader.findings.gpu_changes import LEAST_KERNEL_US, SMALL_PRODUCT_US, moving_us
from tracereader.findings.graph_changes import can_be_captured, long_runs
from tracereader.findings.opportunity import Case, Change, Proposal
from tracereader.replay import cuda_graph as as_cuda_graph
from tracereader.replay import with_cpu_time, with_durations, without_cpu_time, without_ops
from tracereader.trace import Op, Work

# A cache of one layer appends a key and a value with a launch each.
APPENDS = 2
STATIC = 'a StaticCache and torch.compile(model, mode="reduce-overhead")'


def kv_cache(case: Case) -> Proposal | None:
    """Propose to keep keys and values where each pass through the model recomputes all tokens for a new one."""
    if case.recomputed_tokens is None:
        return None
    appended = [(op.track, op.start, APPENDS * case.launch_us) for op in _calls_with_a_cache(case)]
    times = _of_new_tokens(case)
    return Proposal(
        with_cpu_time(with_durations(case.graph, case.in_all_steps(times)), appended),
        f"{_recomputes(case.recomputed_tokens)}: {duration(sum(work.us for work in times))} of GPU work",
        "keep the keys and values of earlier tokens and pass only the new one (use_cache=True in transformers)",
        assumed=True,
    )


def static_cache(case: Case) -> Proposal | None:
    """Return a proposal to decode with a KV cache of fixed size: then the tokens can be replayed as CUDA graphs."""
    if case.trace.trains or not can_be_captured(case):
        return None
    how = f'generate(…, cache_implementation="static"), or {STATIC}'
    if keys := case.growing_keys:
        attending = (op for step in case.steps for op in attention_calls(step))
        calls, graph = [op for op in attending if queries_and_keys(op)[0] == 1], case.graph
        seen = (
            f"attention's keys grow by one with each token, here from {keys[0]:,} to {keys[1]:,}, so the shapes change "
            "with each token"
        )
    elif not case.trace.has_shapes and (appends := growing_appends(case.compared)):
        calls, graph = [op for step in case.steps for op in attention_calls(step)], case.graph
        seen = (
            f"the {appends:,} kernels of aten::cat in a step have more blocks from step to step, as where a KV cache "
            "grows; record_shapes=True shows its keys"
        )
    elif case.recomputed_tokens:
        calls, graph = _calls_with_a_cache(case), with_durations(case.graph, case.in_all_steps(_of_new_tokens(case)))
        seen, how = _recomputes(case.recomputed_tokens), f"pass only the new token, with {STATIC}"
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


def _recomputes(tokens: tuple[int, int]) -> str:
    least, most = tokens
    return f"each pass through the model recomputes all tokens and has one more, here from {least:,} to {most:,}"


def _calls_with_a_cache(case: Case) -> list[Op]:
    """Return the replayed steps' calls of attention in passes that a cache makes shorter."""
    return [op for step in case.steps for one in _with_a_cache(passes((step,))) for op in one.calls]


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
        for of in reversed(
            here[max(0, place - 1) : place + 1]
        ):  # the next one first: tokens may be as many as features
            if not sizes.isdisjoint((of.tokens, of.tokens * of.batch)):
                if id(of) in shorter:
                    found[work] = _of_one_us(case, one, of.tokens)
                break
    return found


def _of_one_us(case: Case, one: GpuWork, tokens: int) -> float:
    """Return the time (µs) of an activity for one of the tokens. A product still reads its weight."""
    least = LEAST_KERNEL_US
    if shape := one.product:
        least = SMALL_PRODUCT_US
        if one.bytes_moved and case.peaks:
            least = max(least, moving_us(one.bytes_moved * shape.k * shape.n / shape.elements, case.peaks))
    return min(one.us, max(one.us / tokens, least))


def merge_adapters(case: Case) -> Proposal | None:
    """Propose to add the weights of low-rank adapters to those of their layers."""
    if case.trace.trains:
        return None
    merged, typical = case.in_each_step(adapters)
    if not typical:
        return None
    found = [one for some in merged for one in some]
    spans = [(layer.track, layer.end, ops[-1].end) for layer, ops in found]
    spans += [(layer.track, ops[0].start, layer.start) for layer, ops in found if ops[0].start < layer.start]
    spared = [op for _, ops in typical for op in ops]
    if case.trace.work:
        spent = f"{duration(sum(one.us for op in spared for one in op.work_below()))} of GPU work"
    else:
        spent = f"{duration(sum(op.us for op in spared))} of the step"
    return Proposal(
        without_ops(without_cpu_time(case.graph, spans), [op for _, ops in found for op in ops]),
        f"{counted(len(typical), 'layer has', 'layers have')} a low-rank adapter beside the weight: {spent}",
        "merge the adapters once before the steps: merge_and_unload() in peft, or weight += scale * b @ a",
    )


INFERENCE_CHANGES = (
    Change("kv_cache", "keep keys and values in a KV cache", kv_cache),
    Change("static_cache", "use a static KV cache and CUDA graphs", static_cache, CUDA_OR_HIP),
    Change("merge_adapters", "merge the adapters' weights", merge_adapters),
)
