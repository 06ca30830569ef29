"""Generation that recomputes all tokens, and norms of many tensors. The traces are of an H100.

Without the profiler the steps took: generation of 6 tokens 19.1 ms (its step is limited by the CPU) and 15.8 with a
cache; norms of 36 tensors 9.4 to 10.7 one by one and 9.9 at once, which their noise hides. With 8 layers and 768 to 783
tokens, generation took 152.8 and 68.5 ms, and the norms of 96 tensors 20.0 and 15.7.
"""

import copy
import re
from itertools import pairwise

import pytest
from raw_events import end, raw_steps, raw_work
from test_cpu_only import file_of as cpu_only
from test_kept_promises import base
from test_later_workloads import case_of, edited, without_shapes
from test_loops import file_of, renamed_ops, typical_step
from test_opportunities import priced_changes, raw_events

from tracereader.changes import inference, waits
from tracereader.figures.attention import growing_keys
from tracereader.trace import read

AGAIN, EACH_STEP = "generation/recomputed", "generation/a_token_per_step"


def ops_of(events, mark, *names):
    found = [e for e in events if e.get("cat") == "cpu_op" and e["name"] in names and mark["ts"] <= e["ts"] < end(mark)]
    return sorted(found, key=lambda e: e["ts"])


def attention_of(events, mark):
    """Return the step's calls of attention by their numbers of queries and keys."""
    calls = ops_of(events, mark, "aten::scaled_dot_product_attention")
    return calls, [(e["args"]["Input Dims"][0][2], e["args"]["Input Dims"][1][2]) for e in calls]


def test_tokens_that_are_recomputed_are_told_to_use_a_static_cache():
    events, mark = typical_step(AGAIN)
    one = priced_changes(file_of(AGAIN))["static_cache"]
    least, most, launches = re.search(r"from (\d+) to (\d+); .* ([\d,]+) launches can", one.evidence).groups()
    assert (int(least), int(most)) == (768, 773)
    assert 0 < int(launches) <= len({e["args"]["correlation"] for e in raw_work(events, mark)})
    assert "cuda_graph" not in priced_changes(file_of(AGAIN)), "a graph is of one number of tokens"


def test_each_step_may_be_one_pass():
    lengths = []
    for mark in raw_steps(raw_events(file_of(EACH_STEP))):
        _, sizes = attention_of(raw_events(file_of(EACH_STEP)), mark)
        assert len(set(sizes)) == 1 and len(sizes) == 3
        lengths.append(sizes[0][0])
    assert all(after == before + 1 for before, after in pairwise(lengths))
    case = case_of(file_of(EACH_STEP))
    assert case.recomputed_tokens == (lengths[0], lengths[-1])


def of_lengths(length_of):
    """Return the function that gives each length another one, in all recorded sizes."""

    def edit(events):
        for e in events:
            if "Input Dims" in e.get("args", {}):
                e["args"]["Input Dims"] = [
                    [length_of(size) if 768 <= size <= 773 else size for size in dim]
                    if isinstance(dim, list) and all(isinstance(size, int) for size in dim) else dim
                    for dim in e["args"]["Input Dims"]
                ]  # fmt: skip

    return edit


def with_attention_to_an_encoder(events):
    """Each pass's second layer attends to 80 encoded inputs, and each step's first call is the encoder's."""
    for mark in raw_steps(events):
        calls = ops_of(events, mark, "aten::scaled_dot_product_attention")
        for e in calls[1::2]:
            e["args"]["Input Dims"][1][2] = e["args"]["Input Dims"][2][2] = 80
        add_an_encoder(events, calls[0])


def add_an_encoder(events, call):
    encoder = copy.deepcopy(call)
    for dims in encoder["args"]["Input Dims"][:3]:
        dims[2] = 80
    events.append(encoder | {"ts": call["ts"] - 0.05, "dur": 0.01})


def with_attention_to_an_encoder_by_hand(events):
    """The same with the decoder's attention as softmaxes between batched products."""
    for mark in raw_steps(events):
        calls = ops_of(events, mark, "aten::scaled_dot_product_attention")
        add_an_encoder(events, calls[0])
        for place, e in enumerate(calls):
            for one in events:
                if "scaled_dot_product" in one["name"] and e["ts"] < one["ts"] < end(e):
                    one["name"] = "aten::other"
            batch, heads, tokens, _ = e["args"]["Input Dims"][0]
            keys = 80 if place % 2 else tokens
            e |= {"name": "aten::_softmax", "args": e["args"] | {"Input Dims": [[batch, heads, tokens, keys]]}}
            for time in (e["ts"] - 0.02, end(e) + 0.01):
                product = {"Input Dims": [[batch * heads, tokens, 64], [batch * heads, 64, keys]]}
                events.append(e | {"name": "aten::bmm", "ts": time, "dur": 0.01, "args": product})


@pytest.mark.parametrize(("edit", "first"), [
    (with_attention_to_an_encoder, 768),
    (with_attention_to_an_encoder_by_hand, 768),
    (of_lengths(lambda n: n - 767), 1),
])  # fmt: skip
def test_tokens_are_recomputed_beside_an_encoder_by_hand_and_from_the_first_token_on(tmp_path, edit, first):
    """A text-to-speech decoder of this kind took 180 ms on an H200, and 22 with a static cache and a graph."""
    case = case_of(edited(file_of(AGAIN), tmp_path, edit))
    assert case.recomputed_tokens == (first, first + 5)
    assert inference.static_cache(case) is not None


def with_other_keys(events):
    """As many queries as before, and more keys: attention to another sequence."""
    for e in events:
        if e["name"] == "aten::scaled_dot_product_attention":
            e["args"]["Input Dims"][1][2] = e["args"]["Input Dims"][2][2] = 1024


@pytest.mark.parametrize(
    "edit",
    [of_lengths(lambda n: 768 + 2 * (n - 768)), of_lengths(lambda n: 768), with_other_keys, without_shapes],
    ids=["by two", "the same", "other keys", "no shapes"],
)
def test_only_passes_that_each_have_one_token_more_recompute_tokens(tmp_path, edit):
    case = case_of(edited(file_of(AGAIN), tmp_path, edit))
    assert case.recomputed_tokens is None
    assert inference.static_cache(case) is None


def in_training(events):
    events.append(next(e for e in events if e["name"] == "aten::add") | {"name": "Optimizer.step#SGD.step"})


def test_a_growing_cache_and_training_recompute_no_tokens(tmp_path):
    assert case_of(file_of("generation/cached")).recomputed_tokens is None
    assert case_of(edited(file_of(AGAIN), tmp_path, in_training)).recomputed_tokens is None


@pytest.mark.parametrize(("left", "at_once"), [(8, True), (7, False)])
def test_many_values_are_told_to_be_read_at_once(tmp_path, left, at_once):
    """Only so many reads of a step are left; the others do not wait."""

    def of_fewer_reads(events):
        for mark in raw_steps(events):
            for op in ops_of(events, mark, "aten::item")[left:]:
                for e in events:
                    if e.get("cat") in ("cpu_op", "cuda_runtime") and op["ts"] <= e["ts"] < end(op):
                        e["name"] = "aten::other" if e["cat"] == "cpu_op" else "cudaEventRecord"

    file = edited(file_of("norms/one_by_one"), tmp_path, of_fewer_reads)
    one = waits.remove_sync(case_of(file))
    assert f"aten::item {left} times" in one.evidence
    assert ("torch.stack" in one.how) == at_once


def with_packed_heads(rows):
    """Return the function that packs pairs of heads into two queries, with a mask of so many rows."""

    def edit(events):
        for e in events:
            if e["name"] == "aten::scaled_dot_product_attention" and e["args"]["Input Dims"][0][2] == 1:
                query, key, _, *others = e["args"]["Input Dims"]
                batch, heads, _, features = query
                shared = [batch, heads // 2, key[2], features]
                mask = [batch, 1, rows, key[2]]
                e["args"]["Input Dims"] = [[batch, heads // 2, 2, features], shared, shared, mask, *others[1:]]

    return edit


@pytest.mark.parametrize(("rows", "grows"), [(1, True), (2, False)])
def test_heads_that_share_keys_may_be_recorded_as_queries(tmp_path, rows, grows):
    """transformers 5.24 packs them if there is a mask. A mask of several rows is for several tokens."""
    usual = case_of(file_of("generation/cached")).growing_keys
    packed = case_of(edited(file_of("generation/cached"), tmp_path, with_packed_heads(rows)))
    assert usual is not None and packed.growing_keys == (usual if grows else None)


def test_a_text_that_is_generated_in_a_training_step_has_a_growing_cache(tmp_path):
    """So does reinforcement learning. Compiled code would see other shapes with each token."""
    file = file_of("generation/cached")
    usual = case_of(file).growing_keys
    with_backward = case_of(edited(file, tmp_path, with_a_backward_pass)).growing_keys
    assert usual is not None and with_backward == usual


def test_packed_heads_of_transformers_are_one_query():
    """The trace is of a Qwen3 of transformers 5.24 with padded prompts: two heads share their keys."""
    file, keys = cpu_only("packed_heads"), []
    for mark in raw_steps(raw_events(file)):
        calls, sizes = attention_of(raw_events(file), mark)
        assert {queries for queries, _ in sizes} == {2} and len({keys for _, keys in sizes}) == 1
        assert all(e["args"]["Input Dims"][3] == [3, 1, 1, sizes[0][1]] for e in calls)
        keys.append(sizes[0][1])
    assert growing_keys(read(file).steps) == (keys[0], keys[-1]) == (9, 12)


def heads_as_a_batch(events):
    """Join the batch and the heads of the scores. The number of queries is not known then."""
    for e in events:
        if e["name"] == "aten::_softmax":
            (batch, heads, *sizes), *others = e["args"]["Input Dims"]
            e["args"]["Input Dims"] = [[batch * heads, *sizes], *others]


def with_a_backward_pass(events):
    for mark in raw_steps(events):
        op = next(e for e in events if e.get("cat") == "cpu_op" and mark["ts"] < e["ts"])
        events.append(op | {"name": "autograd::engine::evaluate_function: MulBackward0", "ts": end(mark) - 2, "dur": 1})


def test_attention_that_is_written_by_hand_may_have_a_growing_cache(tmp_path):
    """Its softmaxes show the keys. With a cache of fixed size and a graph, dictation took 15 ms instead of 64."""
    file = base("dictation")
    case = case_of(file)
    mark = next(mark for mark in raw_steps(raw_events(file)) if mark["name"] == case.step.name)
    sizes = [e["args"]["Input Dims"][0] for e in ops_of(raw_events(file), mark, "aten::_softmax")]
    keys = [keys for _, _, queries, keys in sizes if queries == 1]
    own = keys[::2]  # the other calls are to the recorded sound
    assert len(set(keys[1::2])) == 1 < len(own) and own == sorted(own)
    grows = case.growing_keys
    assert grows == (own[0], own[-1])
    found = priced_changes(file)
    assert next(iter(found)) == "static_cache" and "larger_batch" not in found
    assert f"here from {own[0]} to {own[-1]}" in found["static_cache"].evidence
    # Gates, scores of other dimensions, and a decoder that is unrolled in training.
    for edit in (renamed_ops("aten::bmm", "aten::mul"), heads_as_a_batch, with_a_backward_pass):
        grows = case_of(edited(file, tmp_path, edit)).growing_keys
        assert grows is None
