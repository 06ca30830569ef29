"""Sizes, mask (if the trace shows it), FLOPs and minimum bytes of a fused attention kernel."""

import re

import msgspec

from tracereader.trace import kernel_names
from tracereader.trace.facts import AttentionFacts
from tracereader.trace.types import concrete_of

# Attention ops whose first three inputs are query, key and value: the places of [batch, heads, sequence] in those, and
# of the flag (or the number of the mask's kind) that says causal among the op's arguments.
ATTENTION = {
    "aten::_flash_attention_forward": ((0, 2, 1), 8), "aten::_efficient_attention_forward": ((0, 2, 1), 9),
    "aten::_cudnn_attention_forward": ((0, 1, 2), 10), "aten::_scaled_dot_product_cudnn_attention": ((0, 1, 2), 6),
    "aten::_scaled_dot_product_flash_attention": ((0, 1, 2), 4),
    "aten::_scaled_dot_product_efficient_attention": ((0, 1, 2), 6),
    "aten::_scaled_dot_product_flash_attention_for_cpu": ((0, 1, 2), 4),
}  # fmt: skip
# flex_attention's kernel, in compiled code an op of its own, forward: its mask is code, and so none of the arguments.
FLEX, FLEX_ORDER = re.compile(r"triton_tem_fused_(?!\w*backward)\w*flex_attention"), ((0, 1, 2), None)
# As "Concrete Inputs" has them: a flag, or 1 and 2 of the memory-efficient kernel's kinds of mask.
CAUSAL = {"True": True, "1": True, "2": True, "False": False, "0": False}


class Attention(msgspec.Struct, frozen=True):
    """softmax(q @ k.T) @ v. causal: None where the trace does not show it; FLOPs are then counted without a mask."""

    batch: int
    heads: int
    kv_heads: int  # fewer where several heads share keys and values
    queries: int
    keys: int
    head_size: int
    causal: bool | None

    @property
    def pairs(self) -> int:
        """FLOPs for one query and one key that it attends to."""
        return self.queries * (self.queries + 1) // 2 if self.causal else self.queries * self.keys

    @property
    def flops(self) -> int:
        return 4 * self.batch * self.heads * self.pairs * self.head_size

    @property
    def elements(self) -> int:
        """Bytes of query, key, value and the result, each moved once: the minimum for a fused kernel."""
        return 2 * self.batch * (self.heads * self.queries + self.kv_heads * self.keys) * self.head_size


def attention(
    op: str, args: dict, dims: list[list[int]], says: kernel_names.KernelName, facts: dict
) -> Attention | None:
    """Of the op with these recorded args and shapes. facts: what a script stored of its run."""
    if len(dims) < 3 or any(len(dim) != 4 for dim in dims[:3]) or (order := _order(op, dims)) is None:
        return None
    (batch, heads, sequence), place = order
    query, key = dims[:2]
    causal = _causal(concrete_of(args), place, says, facts)
    if says.parts.get("window") or (causal and query[sequence] != key[sequence]):
        causal = None  # which pairs are left is not recorded
    if causal is None and order is FLEX_ORDER:
        return None  # nor here, where a mask is the rule: what it leaves may be a small part
    return Attention(query[batch], query[heads], key[heads], query[sequence], key[sequence], query[3], causal)


def _order(op: str, dims: list[list[int]]) -> tuple[tuple[int, int, int], int | None] | None:
    """The places of sizes and mask among the op's arguments."""
    if not FLEX.match(op):
        return ATTENTION.get(op)
    # The kernel is given buffers as they lie in memory, whatever views query, key and value are. Their order
    # is recognized by the next buffer, the softmax's sum: a number for each row of the query.
    query, key, value, *others = dims
    fits = others[:1] == [query[:3]] and key[:3] == value[:3] and (key[0], key[3]) == (query[0], query[3])
    return FLEX_ORDER if fits and key[1] and query[1] % key[1] == 0 else None


def stored(told: AttentionFacts | None, says: kernel_names.KernelName) -> Attention | None:
    """What a script stored about the only attention of its step."""
    if told is None or told.sizes is None:
        return None
    batch, heads, seq, head_size = told.sizes
    return Attention(batch, heads, heads, seq, seq, head_size, _causal([], None, says, told))


def _causal(inputs: list, place: int | None, says: kernel_names.KernelName, told: AttentionFacts | None) -> bool | None:
    """By the kernel's name, else by the op's recorded arguments, else as the script stored it."""
    if named := says.parts.get("causal"):
        return named == "yes"
    if place is not None and len(inputs) > place and inputs[place] in CAUSAL:
        return CAUSAL[inputs[place]]
    return told.causal if told else None
