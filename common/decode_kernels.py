"""One token through Qwen3's layers in six hand-written Triton kernels each, for one sequence.

At batch 1 every product is a matrix times a vector: nothing is used twice, so what counts is how little
time passes in which no weights are read. Fewer kernels mean fewer ends to wait for; and with programmatic
dependent launch a kernel reads its weights while the one before it still computes.
"""

import torch
import triton
import triton.language as tl

# Measured on an H200 (the decoder's page): programs that share one head's cache, and how many tokens each takes at a
# time; of each matrix, the rows that a program takes, and its warps.
SPLITS, TOKENS = 64, 16
TILES = {"qkv": (8, 8), "o": (8, 4), "gate_up": (4, 4), "down": (4, 8), "head": (8, 4)}


@triton.jit
def matvec_kernel(
    x, weight, out, norm, residual, best, best_at, rows, eps,
    K: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
    NORM: tl.constexpr, GATED: tl.constexpr, ADD: tl.constexpr, BEST: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """out = weight @ x, and what stands around it: RMSNorm before; SiLU gate, residual or running argmax after."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    inside = (column < K)[None, :]
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
    tile = weight + row[:, None] * K + column[None, :]
    w = tl.load(tile, mask=inside, other=0.0, eviction_policy="evict_first")
    if GATED:
        up = tl.load(tile + rows * K, mask=inside, other=0.0, eviction_policy="evict_first")
    if OVERLAP:  # weights need not wait for the kernel before; its result has to
        tl.extra.cuda.gdc_wait()
    v = tl.load(x + column, mask=column < K, other=0.0).to(tl.float32)
    if NORM:
        v = (v * tl.rsqrt(tl.sum(v * v) / K + eps)).to(tl.bfloat16).to(tl.float32)
        v = (v * tl.load(norm + column, mask=column < K, other=0.0).to(tl.float32)).to(tl.bfloat16).to(tl.float32)
    y = tl.sum(w.to(tl.float32) * v[None, :], axis=1)
    if GATED:
        y = y * tl.sigmoid(y) * tl.sum(up.to(tl.float32) * v[None, :], axis=1)
    if ADD:
        y += tl.load(residual + row).to(tl.float32)
    y = y.to(tl.bfloat16)
    tl.store(out + row, y)
    if BEST:
        y = y.to(tl.float32)
        tl.store(best + tl.program_id(0), tl.max(y))
        tl.store(best_at + tl.program_id(0), tl.program_id(0) * ROWS + tl.argmax(y, axis=0))


@triton.jit
def rotate_kernel(
    qkv, q_norm, k_norm, cos, sin, keys, values, position, cache_len, eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """RMSNorm and rotary embedding of one head's query in place, or of its key into the cache, with its value."""
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    head = tl.program_id(0)
    at = tl.load(position)
    d = tl.arange(0, DIM)
    across = (d + DIM // 2) % DIM
    x = tl.load(qkv + head * DIM + d).to(tl.float32)
    y = tl.load(qkv + head * DIM + across).to(tl.float32)
    if head < HEADS:
        scale, scale_across = tl.load(q_norm + d), tl.load(q_norm + across)
    else:
        scale, scale_across = tl.load(k_norm + d), tl.load(k_norm + across)
    over = tl.rsqrt(tl.sum(x * x) / DIM + eps)
    x = (x * over).to(tl.bfloat16).to(tl.float32) * scale.to(tl.float32)
    y = (y * over).to(tl.bfloat16).to(tl.float32) * scale_across.to(tl.float32)
    y = tl.where(d < DIM // 2, -y, y)
    turned = x * tl.load(cos + at * DIM + d).to(tl.float32) + y * tl.load(sin + at * DIM + d).to(tl.float32)
    tl.debug_barrier()  # every thread has read the query that is overwritten
    if head < HEADS:
        tl.store(qkv + head * DIM + d, turned.to(tl.bfloat16))
    else:
        slot = (head - HEADS) * cache_len * DIM + at * DIM + d
        tl.store(keys + slot, turned.to(tl.bfloat16))
        tl.store(values + slot, tl.load(qkv + (head + KV_HEADS) * DIM + d))


@triton.jit
def attend_kernel(
    q, keys, values, out, partial, peaks, sums, arrived, position, cache_len, scale,
    GROUP: tl.constexpr, DIM: tl.constexpr, SPLITS: tl.constexpr, TOKENS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Attention of one token over the filled part of the cache: a program reads every SPLITS-th block of one
    key-value head for all query heads that share it, and the last of them to arrive adds the parts up."""
    head, split = tl.program_id(0), tl.program_id(1)
    g, d, t = tl.arange(0, GROUP), tl.arange(0, DIM), tl.arange(0, TOKENS)
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    filled = tl.load(position) + 1
    active = tl.minimum(tl.cdiv(filled, TOKENS), SPLITS)
    if split >= active:
        return
    query = tl.load(q + (head * GROUP + g[:, None]) * DIM + d[None, :]).to(tl.float32) * scale
    peak = tl.full([GROUP], float("-inf"), tl.float32)
    total = tl.zeros([GROUP], tl.float32)
    acc = tl.zeros([GROUP, DIM], tl.float32)
    for start in range(split * TOKENS, filled, SPLITS * TOKENS):
        token = start + t
        tile = head.to(tl.int64) * cache_len * DIM + token[:, None] * DIM + d[None, :]
        there = (token < filled)[:, None]
        k = tl.load(keys + tile, mask=there, other=0.0).to(tl.float32)
        v = tl.load(values + tile, mask=there, other=0.0).to(tl.float32)
        score = tl.sum(query[:, None, :] * k[None, :, :], axis=2)
        score = tl.where((token < filled)[None, :], score, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(score, axis=1))
        weight = tl.exp(score - new_peak[:, None])
        shrink = tl.exp(peak - new_peak)
        total = total * shrink + tl.sum(weight, axis=1)
        acc = acc * shrink[:, None] + tl.sum(weight[:, :, None] * v[None, :, :], axis=1)
        peak = new_peak
    part = (head * SPLITS + split) * GROUP + g
    tl.store(partial + part[:, None] * DIM + d[None, :], acc)
    tl.store(peaks + part, peak)
    tl.store(sums + part, total)
    tl.debug_barrier()  # all threads have written, before one says so
    if tl.atomic_add(arrived + head, 1, sem="acq_rel") == active - 1:
        s = tl.arange(0, SPLITS)
        parts = (head * SPLITS + s[:, None]) * GROUP + g[None, :]
        known = (s < active)[:, None]
        peak_of = tl.load(peaks + parts, mask=known, other=float("-inf"), cache_modifier=".cg")
        share = tl.exp(peak_of - tl.max(peak_of, axis=0)[None, :])
        sum_of = tl.sum(share * tl.load(sums + parts, mask=known, other=0.0, cache_modifier=".cg"), axis=0)
        acc_of = partial + parts[:, :, None] * DIM + d[None, None, :]
        whole = tl.load(acc_of, mask=known[:, :, None], other=0.0, cache_modifier=".cg") * share[:, :, None]
        attended = (tl.sum(whole, axis=0) / sum_of[:, None]).to(tl.bfloat16)
        tl.store(out + (head * GROUP + g[:, None]) * DIM + d[None, :], attended)
        tl.store(arrived + head, 0)  # as it was, for the next call


@triton.jit
def choose_kernel(
    best, best_at, count, text, position, embedding, x,
    BLOCK: tl.constexpr, WIDTH: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """The most likely token: appended to the text, and its embedding is the next step's input."""
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    i = tl.arange(0, BLOCK)
    found = tl.load(best + i, mask=i < count, other=float("-inf"))
    token = tl.load(best_at + tl.argmax(found, axis=0))
    at = tl.load(position) + 1
    tl.store(text + at, token)
    tl.store(position, at)
    w = tl.arange(0, WIDTH)
    tl.store(x + w, tl.load(embedding + token.to(tl.int64) * WIDTH + w))


def _launch(overlap: bool) -> dict:
    return {"launch_pdl": True} if overlap else {}


class Matvec:
    """weight @ x with what stands around it, as matvec_kernel does it; weight is [rows, K], twice that if gated."""

    def __init__(self, weight, rows_each: int, warps: int, overlap: bool, *, norm=None, gated=False, best=False):
        self.weight, self.norm, self.gated = weight, norm, gated
        self.rows, self.k = weight.shape[0] // (2 if gated else 1), weight.shape[1]
        self.rows_each, self.options = rows_each, {"num_warps": warps, **_launch(overlap)}
        self.out = torch.empty(self.rows, device=weight.device, dtype=weight.dtype)
        self.programs, self.overlap, self.wants_best = self.rows // rows_each, overlap, best
        if best:
            self.best = torch.empty(self.programs, device=weight.device)
            self.best_at = torch.empty(self.programs, device=weight.device, dtype=torch.int32)

    def __call__(self, x, add=None):
        best = (self.best, self.best_at) if self.wants_best else (None, None)
        norm, eps = (None, 0.0) if self.norm is None else (self.norm.weight, self.norm.variance_epsilon)
        matvec_kernel[(self.programs,)](
            x, self.weight, self.out, norm, add, *best, self.rows, eps,
            self.k, triton.next_power_of_2(self.k), self.rows_each,
            norm is not None, self.gated, add is not None, self.wants_best, self.overlap, **self.options,
        )  # fmt: skip
        return self.out


def fits(config) -> bool:
    """Whether the kernels' tiles cover a model of these sizes: Triton's ranges are powers of two, tiles are whole."""
    powers = (config.hidden_size, config.head_dim, config.num_attention_heads // config.num_key_value_heads)
    rows = (config.hidden_size, config.intermediate_size, config.vocab_size)
    return all(n & (n - 1) == 0 for n in powers) and all(n % 8 == 0 for n in rows)


def decoding(model, cache, text, position, overlap: bool):
    """The step that decodes one token of one sequence: () -> logits, [1, vocabulary].

    text: [1, room] token ids; the one at position is the input, and the chosen one is written behind it;
    cache: static, filled to position. Both are advanced in place.
    """
    config, layers = model.config, []
    device = text.device
    head_dim, heads, kv_heads = config.head_dim, config.num_attention_heads, config.num_key_value_heads
    for layer, kept in zip(model.model.layers, cache.layers, strict=True):
        attention, mlp = layer.self_attn, layer.mlp
        qkv = torch.cat([attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight])
        gate_up = torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight])
        layers.append((
            Matvec(qkv, *TILES["qkv"], overlap, norm=layer.input_layernorm), attention, kept,
            Matvec(attention.o_proj.weight, *TILES["o"], overlap),
            Matvec(gate_up, *TILES["gate_up"], overlap, norm=layer.post_attention_layernorm, gated=True),
            Matvec(mlp.down_proj.weight, *TILES["down"], overlap),
        ))  # fmt: skip
    head = Matvec(model.lm_head.weight, *TILES["head"], overlap, norm=model.model.norm, best=True)
    everywhere = torch.arange(cache.layers[0].max_cache_len, device=device)[None]
    angles = model.model.rotary_emb(torch.empty(0, device=device, dtype=model.dtype), everywhere)
    cos, sin = (one[0].contiguous() for one in angles)
    arrived = torch.zeros(kv_heads, device=device, dtype=torch.int32)
    parts = torch.empty(heads * SPLITS * (head_dim + 2), device=device)
    parts = parts.split([heads * SPLITS * n for n in (head_dim, 1, 1)])  # weighted values, score's peak, weights' sum
    attended = torch.empty(heads * head_dim, device=device, dtype=model.dtype)
    x = model.model.embed_tokens(text[0, position]).flatten()

    def step():
        hidden = x
        for qkv, attention, kept, o, gate_up, down in layers:
            projected = qkv(hidden)
            rotate_kernel[(heads + kv_heads,)](
                projected, attention.q_norm.weight, attention.k_norm.weight, cos, sin, kept.keys, kept.values, position,
                kept.max_cache_len, attention.q_norm.variance_epsilon, heads, kv_heads, head_dim, overlap,
                num_warps=1, **_launch(overlap),
            )  # fmt: skip
            attend_kernel[(kv_heads, SPLITS)](
                projected, kept.keys, kept.values, attended, *parts, arrived, position, kept.max_cache_len,
                attention.scaling, heads // kv_heads, head_dim, SPLITS, TOKENS, overlap, **_launch(overlap),
            )  # fmt: skip
            hidden = o(attended, add=hidden)
            hidden = down(gate_up(hidden), add=hidden)
        logits = head(hidden)
        choose_kernel[(1,)](
            head.best, head.best_at, head.programs, text, position, model.model.embed_tokens.weight, x,
            triton.next_power_of_2(head.programs), x.shape[0], overlap, num_warps=16, **_launch(overlap),
        )  # fmt: skip
        return logits[None]

    return step
