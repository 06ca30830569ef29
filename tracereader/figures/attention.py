"""Sizes, mask (if the trace shows it), FLOPs and minimum bytes of a fused attention kernel."""

import math
import re
from collections.abc import Iterable, Sequence
from itertools import groupby, pairwise
from typing import NamedTuple

import msgspec

from tracereader.trace import Op, Step, kernel_names, start_of
from tracereader.trace.facts import AttentionFacts
from tracereader.trace.op_names import BATCHED, MATMULS, SDPA, SOFTMAX
from tracereader.trace.types import Inputs

# Attention ops whose first three inputs are query, key and value: the positions of [batch, heads, sequence] in their
# shapes, and the position of the causal flag (or of the mask kind's number) among the op's arguments.
ATTENTION = {
    "aten::_flash_attention_forward": ((0, 2, 1), 8), "aten::_efficient_attention_forward": ((0, 2, 1), 9),
    "aten::_cudnn_attention_forward": ((0, 1, 2), 10), "aten::_scaled_dot_product_cudnn_attention": ((0, 1, 2), 6),
    "aten::_scaled_dot_product_flash_attention": ((0, 1, 2), 4),
    "aten::_scaled_dot_product_efficient_attention": ((0, 1, 2), 6),
    "aten::_scaled_dot_product_flash_attention_for_cpu": ((0, 1, 2), 4),
}  # fmt: skip
# flex_attention's forward kernel, an op of its own in compiled code. Its mask is code, so no argument shows it.
FLEX, FLEX_ORDER = re.compile(r"triton_tem_fused_(?!\w*backward)\w*flex_attention"), ((0, 1, 2), None)
MANY_PASSES = 3  # from so many passes on, a number of tokens that grows by one shows that each pass adds one
# The values in "Concrete Inputs": a flag, or 1 and 2 of the memory-efficient kernel's kinds of mask.
CAUSAL = {"True": True, "1": True, "2": True, "False": False, "0": False}


class Attention(msgspec.Struct, frozen=True):
    """softmax(q @ k.T) @ v. causal is None if the trace does not show it; FLOPs are then counted without a mask."""

    batch: int
    heads: int
    kv_heads: int  # fewer where several heads share keys and values
    queries: int
    keys: int
    head_size: int
    causal: bool | None

    @property
    def pairs(self) -> int:
        """Return the number of pairs of a query and a key that it attends to, per head."""
        return self.queries * (self.queries + 1) // 2 if self.causal else self.queries * self.keys

    @property
    def flops(self) -> int:
        return 4 * self.batch * self.heads * self.pairs * self.head_size

    @property
    def elements(self) -> int:
        """Return the number of elements of query, key, value and result. A fused kernel moves each once."""
        return 2 * self.batch * (self.heads * self.queries + self.kv_heads * self.keys) * self.head_size


def attention(op: str, inputs: Inputs, says: kernel_names.KernelName, facts: dict) -> Attention | None:
    """Return the attention that the op with these inputs computes; None if they do not show it.

    facts: the facts about its attention that a script stored in the trace.
    """
    dims = inputs.dims
    if len(dims) < 3 or any(len(dim) != 4 for dim in dims[:3]) or (order := _order(op, dims)) is None:
        return None
    (batch, heads, sequence), place = order
    query, key = dims[:2]
    causal = _causal(inputs.concrete, place, says, facts)
    if says.parts.get("window") or (causal and query[sequence] != key[sequence]):
        causal = None  # the record does not show which pairs are left
    if causal is None and order is FLEX_ORDER:
        return None  # flex_attention usually has a mask, which may leave few pairs
    return Attention(query[batch], query[heads], key[heads], query[sequence], key[sequence], query[3], causal)


def _order(op: str, dims: list[list[int]]) -> tuple[tuple[int, int, int], int | None] | None:
    """Return the positions of sizes and mask among the op's arguments; None if the op is no known attention."""
    if not FLEX.match(op):
        return ATTENTION.get(op)
    # The kernel gets buffers in their memory layout, whatever views query, key and value are. The next buffer
    # identifies the order: the softmax's sum has one number for each row of the query.
    query, key, value, *others = dims
    fits = others[:1] == [query[:3]] and key[:3] == value[:3] and (key[0], key[3]) == (query[0], query[3])
    return FLEX_ORDER if fits and key[1] and query[1] % key[1] == 0 else None


def attention_calls(step: Step) -> list[Op]:
    """Return the step's calls of attention: those of scaled_dot_product_attention, or of the backends without these.

    Its fallback, for a mask with a gradient, for example, is no op of ATTENTION. Attention that is written by hand
    counts, too, by its softmaxes between batched products: (batch, heads, queries, keys).
    """
    calls = step.named(SDPA.__eq__) or step.named(ATTENTION.__contains__)
    fused = set(map(id, calls))
    near = [op for op in step.named((*MATMULS, SOFTMAX).__contains__) if fused.isdisjoint(map(id, op.above()))]
    between = (op for one, op, two in zip(near, near[1:], near[2:], strict=False) if {one.name, two.name} <= {*BATCHED})
    by_hand = (op for op in between if op.name == SOFTMAX and len(op.inputs.dims_at(0) or ()) == 4)
    return sorted([*calls, *by_hand], key=start_of)


def queries_and_keys(op: Op) -> tuple[int, int] | None:
    """Return the numbers of queries and keys of a call of attention_calls(); None without recorded shapes.

    The heads of one query that share their keys may be recorded as several queries: transformers packs them so from
    5.24 on, if there is a mask. The mask then has a single row.
    """
    sizes, mask = op.inputs.dims[:2], op.inputs.dims[3:4]
    if op.name == SOFTMAX:
        return tuple(sizes[0][2:])
    sequence = 2 if op.name == SDPA else ATTENTION[op.name][0][2]
    if len(sizes) < 2 or any(len(size) != 4 for size in sizes):
        return None
    queries, keys = sizes[0][sequence], sizes[1][sequence]
    is_packed = op.name == SDPA and sizes[0][1] == sizes[1][1] and queries < keys and mask and mask[0][-2:-1] == [1]
    return 1 if is_packed else queries, keys


class Pass(NamedTuple):
    """Calls of self-attention of one pass through a model. tokens: in each sequence of the batch."""

    tokens: int
    batch: int
    calls: list[Op]


def passes(steps: Iterable[Step]) -> list[Pass]:
    """Return the passes through a model by their calls of self-attention, which have as many queries as keys.

    A pass ends where the number of tokens changes. A decoder's attention to its encoder, always with as many keys, is
    left out, and so is the encoder's. No passes if any other call has other numbers of queries than of keys, or if its
    shapes were not recorded.
    """
    calls = [(op, queries_and_keys(op)) for step in steps for op in attention_calls(step)]
    encoded = {sizes and sizes[1] for _, sizes in calls if sizes is None or sizes[0] != sizes[1]}
    if None in encoded or len(encoded) > 1:
        return []
    calls = [(op, sizes) for op, sizes in calls if sizes[1] not in encoded]
    alike = groupby(calls, key=lambda call: (call[1][0], call[0].inputs.dims[0][0]))
    return [Pass(tokens, batch, [op for op, _ in some]) for (tokens, batch), some in alike]


def recomputed_tokens(some: Sequence[Pass]) -> tuple[int, int] | None:
    """Return the fewest and the most tokens of a pass, if each pass recomputes all tokens and has one more.

    A pass with no more tokens than the first one starts a new sequence. The first and the last pass may have fewer
    calls, because the recording may begin or end inside them. None for fewer than MANY_PASSES passes.
    """
    first, tokens = some[0].tokens if some else 0, [one.tokens for one in some]
    each = {len(one.calls) for one in some[1:-1]}
    if len(some) < MANY_PASSES or len({one.batch for one in some}) > 1 or len(each) > 1:
        return None
    grows = all(after == before + 1 or after <= first < before for before, after in pairwise(tokens))
    return (min(tokens), max(tokens)) if grows else None


def keys_grow_in_place(steps: Sequence[Step]) -> bool:
    """Return whether each call of attention has one query, and one key more than the call at its place a step before.

    So it is if a sequence, or several in turn, get one token in each step. Needs recorded shapes.
    """
    sizes = [[queries_and_keys(op) for op in attention_calls(step)] for step in steps]
    if len(sizes) < 2 or not sizes[0] or any(one is None or one[0] != 1 for some in sizes for one in some):
        return False
    return all([(1, keys + 1) for _, keys in before] == after for before, after in pairwise(sizes))


def growing_keys(steps: Sequence[Step]) -> tuple[int, int] | None:
    """Return the fewest and the most keys of one query, if each token has one key more, as in a growing KV cache.

    A call with more queries, as for a prompt, starts a new sequence. If a sequence has grown, so does a call that has
    no more keys than any call before it. None if any other call has other keys, if all have the same, or if the batch
    or the number of calls is not the same for each token, unless several sequences get a token each in a step. The
    first and the last token may have fewer calls, because the recording may begin or end inside them. A decoder's
    attention to its encoder is left out. Needs recorded shapes.
    """
    # first: the keys at the beginning of the sequence. least and most: of all calls.
    calls, batches, last, first, least, most = [], set(), None, 0, math.inf, 0
    attending = [(op, queries_and_keys(op)) for step in steps for op in attention_calls(step)]
    if any(sizes is None for _, sizes in attending):
        return None
    if keys_grow_in_place(steps):
        return min(keys for _, (_, keys) in attending), max(keys for _, (_, keys) in attending)
    for op, (queries, keys) in _without_cross_attention(attending):
        if queries == 1:
            starts_anew = last is None or (first < last and keys <= least)
            if not starts_anew and keys not in (last, last + 1):
                return None
            first = keys if starts_anew else first
            if keys != last:
                calls.append(0)
            calls[-1] += 1
            least, most = min(least, keys), max(most, keys)
            batches.add(op.inputs.dims[0][0])
        last = keys if queries == 1 else None
    each = set(calls[1:-1] or calls)
    alike = len(batches) == 1 and len(each) == 1 and max(calls) in each
    return (least, most) if least < most and alike else None


def _without_cross_attention(calls: list[tuple[Op, tuple[int, int]]]) -> list[tuple[Op, tuple[int, int]]]:
    """Return calls of attention without each second call of one query, if these have the same keys and others do not.

    So a decoder's layers attend to its own tokens and to the encoder's in turn.
    """
    of_one = [place for place, (_, (queries, _)) in enumerate(calls) if queries == 1]
    for turn in (0, 1):
        here, beside = of_one[turn::2], of_one[1 - turn :: 2]
        same, other = ({calls[place][1][1] for place in some} for some in (here, beside))
        if len(here) > 1 and len(same) == 1 < len(other) and not same & other:
            left_out = set(here)
            return [call for place, call in enumerate(calls) if place not in left_out]
    return calls


def stored(facts: AttentionFacts | None, says: kernel_names.KernelName) -> Attention | None:
    """Return the attention that a script stored as the only one of its step."""
    if facts is None or facts.sizes is None:
        return None
    batch, heads, seq, head_size = facts.sizes
    return Attention(batch, heads, heads, seq, seq, head_size, _causal([], None, says, facts))


def _causal(
    inputs: list, place: int | None, says: kernel_names.KernelName, facts: AttentionFacts | None
) -> bool | None:
    """Return whether the mask is causal, by the kernel's name, else the op's recorded arguments, else the script."""
    if named := says.parts.get("causal"):
        return named == "yes"
    if place is not None and len(inputs) > place and inputs[place] in CAUSAL:
        return CAUSAL[inputs[place]]
    return facts.causal if facts else None
