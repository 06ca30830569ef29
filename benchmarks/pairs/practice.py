"""What teams run: a chat model and its fine-tuning, detection, diffusion, recommendation, points, speech and tables."""

import copy
import math
from itertools import permutations

import numpy as np
import torch
import torch.nn.functional as F
from setting import TINY, bf16, compiled, device, endless, graphed, graphed_training, size, use_tf32
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset


def loader_of(dataset, batch_size, workers, seed=0, **options):
    """Return a shuffling DataLoader whose order does not depend on the other random numbers."""
    if workers:
        options["persistent_workers"] = True
    order = torch.Generator().manual_seed(seed)
    return DataLoader(
        dataset, batch_size, shuffle=True, drop_last=True, num_workers=workers, generator=order, **options
    )


# ---------------------------------------------------------------------------------------------- LLM, shared parts


class RMSNorm(nn.Module):
    def __init__(self, dim, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x):
        dtype = x.dtype
        x = x.float()
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * x.to(dtype)


class SwiGLU(nn.Module):
    def __init__(self, dim, hidden):
        super().__init__()
        self.gate_proj = nn.Linear(dim, hidden, bias=False)
        self.up_proj = nn.Linear(dim, hidden, bias=False)
        self.down_proj = nn.Linear(hidden, dim, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


def rotary_table(length, head_dim, theta=10000.0):
    freqs = 1.0 / theta ** (torch.arange(0, head_dim, 2, device=device).float() / head_dim)
    angles = torch.outer(torch.arange(length, device=device).float(), freqs)
    angles = torch.cat([angles, angles], -1)
    return angles.cos(), angles.sin()


def rotate_half(x):
    a, b = x.chunk(2, -1)
    return torch.cat([-b, a], -1)


def apply_rotary(x, cos, sin):
    return x * cos.to(x.dtype) + rotate_half(x) * sin.to(x.dtype)


def init_weights(module):
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=0.02)


# ------------------------------------------------------------------------------------- 1. LLM generation, KV cache


class CachedAttention(nn.Module):
    def __init__(self, dim, heads, sdpa):
        super().__init__()
        self.heads, self.head_dim, self.sdpa = heads, dim // heads, sdpa
        self.q_proj = nn.Linear(dim, dim, bias=False)
        self.k_proj = nn.Linear(dim, dim, bias=False)
        self.v_proj = nn.Linear(dim, dim, bias=False)
        self.o_proj = nn.Linear(dim, dim, bias=False)

    def forward(self, x, cos, sin, mask, past, position=None):
        b, t, _ = x.shape
        q, k, v = (
            p(x).view(b, t, self.heads, self.head_dim).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = apply_rotary(q, cos, sin), apply_rotary(k, cos, sin)
        if position is not None:  # past has room for all tokens
            k = past[0].index_copy_(2, position, k)
            v = past[1].index_copy_(2, position, v)
        elif past is not None:
            k = torch.cat([past[0], k], dim=2)
            v = torch.cat([past[1], v], dim=2)
        if self.sdpa:
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        else:
            scores = q @ k.transpose(-1, -2) / math.sqrt(self.head_dim)
            if mask is not None:
                scores = scores.masked_fill(~mask, float("-inf"))
            out = scores.float().softmax(-1).to(v.dtype) @ v
        return self.o_proj(out.transpose(1, 2).reshape(b, t, -1)), (k, v)


class CachedBlock(nn.Module):
    def __init__(self, dim, heads, hidden, sdpa):
        super().__init__()
        self.norm1, self.norm2 = RMSNorm(dim), RMSNorm(dim)
        self.attn = CachedAttention(dim, heads, sdpa)
        self.mlp = SwiGLU(dim, hidden)

    def forward(self, x, cos, sin, mask, past, position=None):
        out, past = self.attn(self.norm1(x), cos, sin, mask, past, position)
        x = x + out
        return x + self.mlp(self.norm2(x)), past


class CachedLM(nn.Module):
    def __init__(self, vocab, dim, heads, layers, hidden, max_len, sdpa):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.blocks = nn.ModuleList(CachedBlock(dim, heads, hidden, sdpa) for _ in range(layers))
        self.norm = RMSNorm(dim)
        self.lm_head = nn.Linear(dim, vocab, bias=False)
        self.apply(init_weights)
        self.lm_head.weight = self.embed.weight
        self.cos, self.sin = rotary_table(max_len, dim // heads)

    def forward(self, tokens, past=None, last_only=False):
        start = past[0][0].shape[2] if past is not None else 0
        t = tokens.shape[1]
        cos, sin = self.cos[start : start + t], self.sin[start : start + t]
        mask = torch.ones(t, t, dtype=torch.bool, device=tokens.device).tril() if t > 1 else None
        x = self.embed(tokens)
        present = []
        for i, block in enumerate(self.blocks):
            x, kv = block(x, cos, sin, mask, past[i] if past is not None else None)
            present.append(kv)
        if last_only:
            x = x[:, -1:]
        return self.lm_head(self.norm(x)), present

    def decode(self, token, past, position):
        cos, sin = self.cos[position], self.sin[position]
        mask = (torch.arange(past[0][0].shape[2], device=token.device) <= position).view(1, 1, 1, -1)
        x = self.embed(token)
        for block, kv in zip(self.blocks, past, strict=False):
            x, _ = block(x, cos, sin, mask, kv, position)
        return self.lm_head(self.norm(x))


class PromptDataset(Dataset):
    """Prompts, cut to the last `length` tokens."""

    def __init__(self, count, vocab, length):
        rng = np.random.default_rng(11)
        self.prompts = [rng.integers(3, vocab, rng.integers(length, 2 * length)).tolist() for _ in range(count)]
        self.length = length

    def __len__(self):
        return len(self.prompts)

    def __getitem__(self, i):
        return torch.tensor(self.prompts[i][-self.length :])


def llm_generate(change):
    """Greedy generation of a few tokens for batches of prompts by a decoder-only LLM with a KV cache."""
    torch.manual_seed(1)
    vocab, dim, layers = size(32000, 101), size(1024, 32), size(12, 2)
    prompt, new_tokens, batch, eos = size(128, 6), size(16, 4), size(16, 3), 2
    heads, total = size(16, 4), prompt + new_tokens
    with torch.device(device):
        model = CachedLM(vocab, dim, heads, layers, size(2752, 48), total, change == "sdpa")
    model.eval()
    if change == "half":
        model.to(torch.bfloat16)
    batches = endless(loader_of(PromptDataset(size(512, 12), vocab, prompt), batch, 0, seed=1))

    if change == "static_graph":
        dtype = model.embed.weight.dtype
        shape = (batch, heads, total, dim // heads)
        static_past = [
            (torch.zeros(shape, device=device, dtype=dtype), torch.zeros(shape, device=device, dtype=dtype))
            for _ in range(layers)
        ]
        static_token = torch.zeros(batch, 1, dtype=torch.long, device=device)
        static_position = torch.full((1,), prompt, dtype=torch.long, device=device)

        @torch.no_grad()
        def decode_one():
            return model.decode(static_token, static_past, static_position)

        decode_graph = graphed(decode_one)

    @torch.no_grad()
    def generate(tokens):
        finished = torch.zeros(batch, dtype=torch.bool, device=device)
        score = torch.zeros(batch, device=device)
        past, inputs = None, tokens
        for i in range(new_tokens):
            if change == "static_graph" and i > 0:
                static_token.copy_(inputs)
                static_position.fill_(prompt + i - 1)
                logits = decode_graph()
            else:
                logits, past = model(inputs, past, last_only=change == "last_logits")
                if change == "static_graph":
                    for (k, v), (k_now, v_now) in zip(static_past, past, strict=False):
                        k[:, :, :prompt] = k_now
                        v[:, :, :prompt] = v_now
            log_probs = F.log_softmax(logits[:, -1].float(), -1)
            best, chosen = log_probs.max(-1)
            score = score + best.masked_fill(finished, 0.0)
            chosen = chosen.masked_fill(finished, eos)
            finished = finished | (chosen == eos)
            inputs = chosen[:, None]
            tokens = torch.cat([tokens, inputs], dim=1)
            if change != "no_eos_sync" and finished.all():
                break
        return tokens, score

    def step():
        tokens, score = generate(next(batches).to(device))
        tokens[:, prompt:].tolist()  # for the tokenizer
        return score / new_tokens

    return step


# ------------------------------------------------------------------------------------ 2. Llama-style fine-tuning


class GroupedAttention(nn.Module):
    def __init__(self, dim, heads, kv_heads):
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, dim // heads
        self.q_proj = nn.Linear(dim, dim, bias=False)
        self.k_proj = nn.Linear(dim, kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(dim, kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(dim, dim, bias=False)

    def forward(self, x, cos, sin, mask):
        b, t, _ = x.shape
        q = self.q_proj(x).view(b, t, self.heads, self.head_dim).transpose(1, 2)
        k = self.k_proj(x).view(b, t, self.kv_heads, self.head_dim).transpose(1, 2)
        v = self.v_proj(x).view(b, t, self.kv_heads, self.head_dim).transpose(1, 2)
        q, k = apply_rotary(q, cos, sin), apply_rotary(k, cos, sin)
        groups = self.heads // self.kv_heads
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        return self.o_proj(out.transpose(1, 2).reshape(b, t, -1))


class LlamaBlock(nn.Module):
    def __init__(self, dim, heads, kv_heads, hidden):
        super().__init__()
        self.input_norm, self.post_norm = RMSNorm(dim), RMSNorm(dim)
        self.attn = GroupedAttention(dim, heads, kv_heads)
        self.mlp = SwiGLU(dim, hidden)

    def forward(self, x, cos, sin, mask):
        x = x + self.attn(self.input_norm(x), cos, sin, mask)
        return x + self.mlp(self.post_norm(x))


class Llama(nn.Module):
    def __init__(self, vocab, dim, layers, heads, kv_heads, hidden, max_len, checkpointing):
        super().__init__()
        self.checkpointing = checkpointing
        self.embed = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList(LlamaBlock(dim, heads, kv_heads, hidden) for _ in range(layers))
        self.norm = RMSNorm(dim)
        self.lm_head = nn.Linear(dim, vocab, bias=False)
        self.apply(init_weights)
        self.cos, self.sin = rotary_table(max_len, dim // heads)

    def forward(self, tokens, attention_mask=None, rows=None):
        _b, t = tokens.shape
        cos, sin = self.cos[:t], self.sin[:t]
        mask = None
        if attention_mask is not None:
            mask = torch.ones(t, t, dtype=torch.bool, device=tokens.device).tril()[None, None]
            mask = mask & attention_mask[:, None, None, :]
        x = self.embed(tokens)
        for layer in self.layers:
            if self.checkpointing:
                x = checkpoint(layer, x, cos, sin, mask, use_reentrant=False)
            else:
                x = layer(x, cos, sin, mask)
        if rows is not None:
            x = x.flatten(0, 1)[rows]
        return self.lm_head(self.norm(x))


class InstructionDataset(Dataset):
    """Instruction and answer tokens; the loss is on the answer only."""

    def __init__(self, count, vocab, max_len):
        rng = np.random.default_rng(5)
        self.rows = []
        for _ in range(count):
            prompt = int(np.clip(rng.lognormal(math.log(max_len / 8), 0.5), 4, max_len // 2))
            answer = int(np.clip(rng.lognormal(math.log(max_len / 5), 0.7), 2, max_len - prompt))
            ids = rng.integers(3, vocab, prompt + answer)
            self.rows.append((ids, prompt))
        self.max_len = max_len

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        ids, prompt = self.rows[i]
        labels = ids.copy()
        labels[:prompt] = -100
        pad = self.max_len - len(ids)
        return {
            "input_ids": torch.from_numpy(np.pad(ids, (0, pad))),
            "labels": torch.from_numpy(np.pad(labels, (0, pad), constant_values=-100)),
            "attention_mask": torch.from_numpy(np.arange(self.max_len) < len(ids)),
        }


def collate_longest(rows):
    longest = max(int(row["attention_mask"].sum()) for row in rows)
    return {key: torch.stack([row[key][:longest] for row in rows]) for key in rows[0]}


def llama_finetune(change):
    """Instruction fine-tuning of a small Llama-style model in bf16 with gradient checkpointing, padded to max_len."""
    torch.manual_seed(2)
    vocab, dim, max_len = size(16000, 97), size(768, 32), size(512, 24)
    with torch.device(device):
        model = Llama(
            vocab, dim, size(8, 2), size(12, 4), size(4, 2), size(2048, 48), max_len, change != "no_checkpoint"
        )
    model.to(torch.float32 if TINY else torch.bfloat16)
    decay = [p for p in model.parameters() if p.dim() > 1]
    no_decay = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": no_decay, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=2e-5, betas=(0.9, 0.95))
    warmup = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: min(1.0, (i + 1) / 100))
    dataset = InstructionDataset(size(512, 16), vocab, max_len)
    batches = endless(
        loader_of(
            dataset,
            4,
            2,
            seed=2,
            pin_memory=device.type == "cuda",
            collate_fn=collate_longest if change == "pad_longest" else None,
        )
    )
    forward = compiled(model) if change == "compile" else model
    history = []

    def step():
        batch = next(batches)
        labels = batch["labels"][:, 1:]
        tokens = batch["input_ids"].to(device, non_blocking=True)
        attention_mask = batch["attention_mask"].to(device, non_blocking=True)
        if change == "causal":  # padding is on the right, so no real token sees it
            attention_mask = None
        if change == "answers_only":
            shifted = F.pad(labels, (0, 1), value=-100).flatten()
            rows = (shifted != -100).nonzero()[:, 0]
            logits = forward(tokens, attention_mask, rows.to(device))
            loss = F.cross_entropy(logits.float(), shifted[rows].to(device))
        else:
            logits = forward(tokens, attention_mask)[:, :-1].float()
            loss = F.cross_entropy(logits.reshape(-1, vocab), labels.to(device).reshape(-1), ignore_index=-100)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        warmup.step()
        optimizer.zero_grad()
        history.append(loss.item())
        return loss.detach()

    return step


# ------------------------------------------------------------------------------------------- 3. one-stage detector


class ConvBNAct(nn.Sequential):
    def __init__(self, cin, cout, k=3, s=1):
        super().__init__(nn.Conv2d(cin, cout, k, s, k // 2, bias=False), nn.BatchNorm2d(cout), nn.SiLU())


class CSPLayer(nn.Module):
    def __init__(self, cin, cout, n, shortcut=True):
        super().__init__()
        mid = cout // 2
        self.a, self.b = ConvBNAct(cin, mid, 1), ConvBNAct(cin, mid, 1)
        self.m = nn.ModuleList(nn.Sequential(ConvBNAct(mid, mid, 1), ConvBNAct(mid, mid, 3)) for _ in range(n))
        self.out = ConvBNAct(2 * mid, cout, 1)
        self.shortcut = shortcut

    def forward(self, x):
        y = self.a(x)
        for m in self.m:
            y = y + m(y) if self.shortcut else m(y)
        return self.out(torch.cat([y, self.b(x)], 1))


class Detector(nn.Module):
    strides = (8, 16, 32)

    def __init__(self, width, depth, classes):
        super().__init__()
        w = width
        self.stem = nn.Sequential(ConvBNAct(3, w, 3, 2), ConvBNAct(w, 2 * w, 3, 2), CSPLayer(2 * w, 2 * w, depth))
        self.c3 = nn.Sequential(ConvBNAct(2 * w, 4 * w, 3, 2), CSPLayer(4 * w, 4 * w, 2 * depth))
        self.c4 = nn.Sequential(ConvBNAct(4 * w, 8 * w, 3, 2), CSPLayer(8 * w, 8 * w, 2 * depth))
        self.c5 = nn.Sequential(ConvBNAct(8 * w, 16 * w, 3, 2), CSPLayer(16 * w, 16 * w, depth))
        self.lat5, self.lat4 = ConvBNAct(16 * w, 8 * w, 1), ConvBNAct(8 * w, 4 * w, 1)
        self.p4 = CSPLayer(16 * w, 8 * w, depth, False)
        self.p3 = CSPLayer(8 * w, 4 * w, depth, False)
        self.down3, self.n4 = ConvBNAct(4 * w, 4 * w, 3, 2), CSPLayer(8 * w, 8 * w, depth, False)
        self.down4, self.n5 = ConvBNAct(8 * w, 8 * w, 3, 2), CSPLayer(16 * w, 16 * w, depth, False)
        self.heads = nn.ModuleList()
        for c in (4 * w, 8 * w, 16 * w):
            self.heads.append(
                nn.ModuleDict(
                    {
                        "stem": ConvBNAct(c, 4 * w, 1),
                        "cls": nn.Sequential(ConvBNAct(4 * w, 4 * w), nn.Conv2d(4 * w, classes, 1)),
                        "reg": nn.Sequential(ConvBNAct(4 * w, 4 * w), nn.Conv2d(4 * w, 5, 1)),
                    }
                )
            )
        for head in self.heads:
            nn.init.constant_(head["cls"][-1].bias, -4.0)
            nn.init.constant_(head["reg"][-1].bias[:4], 0.0)
            nn.init.constant_(head["reg"][-1].bias[4:], -4.0)

    def forward(self, x):
        c3 = self.c3(self.stem(x))
        c4 = self.c4(c3)
        c5 = self.c5(c4)
        top = self.lat5(c5)
        p4 = self.p4(torch.cat([F.interpolate(top, scale_factor=2), c4], 1))
        mid = self.lat4(p4)
        p3 = self.p3(torch.cat([F.interpolate(mid, scale_factor=2), c3], 1))
        n4 = self.n4(torch.cat([self.down3(p3), mid], 1))
        n5 = self.n5(torch.cat([self.down4(n4), top], 1))
        outputs = []
        for head, feature in zip(self.heads, (p3, n4, n5), strict=False):
            y = head["stem"](feature)
            outputs.append(torch.cat([head["reg"](y), head["cls"](y)], 1))
        return outputs


class BoxDataset(Dataset):
    """Photographs with boxes (label, cx, cy, w, h in pixels), flipped for every second one."""

    mean = np.array([0.485, 0.456, 0.406], dtype=np.float32)
    std = np.array([0.229, 0.224, 0.225], dtype=np.float32)

    def __init__(self, count, side, classes, raw):
        rng = np.random.default_rng(7)
        self.raw, self.items = raw, []
        for _ in range(count):
            image = rng.integers(0, 256, (side, side, 3), dtype=np.uint8)
            n = int(rng.integers(1, 13))
            wh = rng.uniform(0.08, 0.5, (n, 2)) * side
            center = wh / 2 + rng.random((n, 2)) * (side - wh)
            for (cx, cy), (w, h) in zip(center, wh, strict=False):
                image[int(cy - h / 2) : int(cy + h / 2), int(cx - w / 2) : int(cx + w / 2)] //= 2
            label = rng.integers(0, classes, (n, 1))
            self.items.append((image, np.concatenate([label, center, wh], 1).astype(np.float32)))

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        image, boxes = self.items[i]
        boxes = boxes.copy()
        if i % 2:
            image = image[:, ::-1]
            boxes[:, 1] = image.shape[1] - boxes[:, 1]
        if not self.raw:
            image = (image.astype(np.float32) / 255.0 - self.mean) / self.std
        return torch.from_numpy(np.ascontiguousarray(image.transpose(2, 0, 1))), torch.from_numpy(boxes)


def collate_boxes(items):
    return torch.stack([image for image, _ in items]), [boxes for _, boxes in items]


def corners(box):
    return torch.cat([box[..., :2] - box[..., 2:] / 2, box[..., :2] + box[..., 2:] / 2], -1)


def box_iou(a, b):
    """IoU of boxes given by their corners; leading dimensions broadcast."""
    overlap = (torch.minimum(a[..., 2:], b[..., 2:]) - torch.maximum(a[..., :2], b[..., :2])).clamp(min=0).prod(-1)
    area_a = (a[..., 2:] - a[..., :2]).prod(-1)
    area_b = (b[..., 2:] - b[..., :2]).prod(-1)
    return overlap / (area_a + area_b - overlap + 1e-9)


@torch.no_grad()
def assign_image(points, strides, boxes, obj, cls, truth):
    """SimOTA for one image: return which points are foreground, their object's number, and the IoU."""
    gt_label, gt_box = truth[:, 0].long(), truth[:, 1:]
    n, gt_corner = len(truth), corners(truth[:, 1:])
    in_box = ((points > gt_corner[:, None, :2]) & (points < gt_corner[:, None, 2:])).all(-1)
    in_center = ((points - gt_box[:, None, :2]).abs() < 2.5 * strides[:, None]).all(-1)
    candidate = (in_box | in_center).any(0)
    in_both = (in_box & in_center)[:, candidate]
    iou = box_iou(gt_corner[:, None], corners(boxes[candidate])[None])
    score = (cls[candidate].sigmoid() * obj[candidate].sigmoid()[:, None]).sqrt()
    onehot = F.one_hot(gt_label, cls.shape[1]).float()[:, None].expand(-1, score.shape[0], -1)
    cls_cost = F.binary_cross_entropy(score[None].expand(n, -1, -1), onehot, reduction="none").sum(-1)
    cost = cls_cost + 3.0 * -torch.log(iou + 1e-8) + 1e5 * ~in_both
    matching = torch.zeros_like(cost)
    k = min(10, iou.shape[1])
    dynamic_ks = torch.topk(iou, k, dim=1).values.sum(1).int().clamp(min=1)
    for g in range(n):
        _, chosen = torch.topk(cost[g], k=dynamic_ks[g].item(), largest=False)
        matching[g][chosen] = 1.0
    several = matching.sum(0) > 1
    if several.sum() > 0:
        best = cost[:, several].argmin(0)
        matching[:, several] = 0.0
        matching[best, several] = 1.0
    matched = matching.sum(0) > 0
    foreground = candidate.clone()
    foreground[candidate] = matched
    number = matching[:, matched].argmax(0)
    return foreground, number, (matching * iou).sum(0)[matched]


@torch.no_grad()
def assign_batch(points, strides, boxes, obj, cls, truth, valid):
    """SimOTA for all images at once; truth is padded to the most objects of an image."""
    gt_label, gt_box = truth[..., 0].long(), truth[..., 1:]
    gt_corner = corners(gt_box)
    in_box = ((points > gt_corner[:, :, None, :2]) & (points < gt_corner[:, :, None, 2:])).all(-1)
    in_center = ((points - gt_box[:, :, None, :2]).abs() < 2.5 * strides[:, None]).all(-1)
    in_box, in_center = in_box & valid[..., None], in_center & valid[..., None]
    candidate = (in_box | in_center).any(1)
    possible = candidate[:, None] & valid[..., None]
    iou = box_iou(gt_corner[:, :, None], corners(boxes)[:, None]) * possible
    score = (cls.sigmoid() * obj.sigmoid()[..., None]).sqrt()
    no = -torch.log1p(-score).clamp(min=-100)
    yes = -torch.log(score).clamp(min=-100)
    index = gt_label[:, :, None].expand(-1, -1, score.shape[1])
    cls_cost = no.sum(-1)[:, None] + (yes - no).transpose(1, 2).gather(1, index)
    cost = cls_cost + 3.0 * -torch.log(iou + 1e-8) + 1e5 * ~(in_box & in_center)
    cost = cost.masked_fill(~possible, float("inf"))
    dynamic_ks = torch.topk(iou, 10, dim=2).values.sum(2).int().clamp(min=1)
    value, chosen = torch.topk(cost, 10, dim=2, largest=False)
    keep = (torch.arange(10, device=cost.device) < dynamic_ks[..., None]) & value.isfinite()
    matching = torch.zeros_like(cost).scatter_(2, chosen, keep.float())
    several = matching.sum(1, keepdim=True) > 1
    best = torch.zeros_like(matching).scatter_(1, cost.argmin(1, keepdim=True), 1.0)
    matching = torch.where(several, best, matching)
    foreground = matching.sum(1) > 0
    return foreground, matching.argmax(1), (matching * iou).sum(1)


def yolo_train(change):
    """Training of an anchor-free YOLO with three scales, SimOTA assignment image by image, and IoU and BCE losses."""
    torch.manual_seed(3)
    side, batch_size, classes = size(320, 64), size(16, 3), size(20, 5)
    model = Detector(size(32, 8), 1, classes).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, nesterov=True, weight_decay=5e-4)
    dataset = BoxDataset(size(96, 9), side, classes, change == "gpu_normalise")
    batches = endless(
        loader_of(dataset, batch_size, 4, seed=3, collate_fn=collate_boxes, pin_memory=device.type == "cuda")
    )
    if change == "channels_last":
        model.to(memory_format=torch.channels_last)
    forward = compiled(model) if change == "compile" else model
    mean = torch.tensor(BoxDataset.mean, device=device).view(1, 3, 1, 1)
    std = torch.tensor(BoxDataset.std, device=device).view(1, 3, 1, 1)

    def decode(outputs):
        points, strides, flat = [], [], []
        for stride, out in zip(Detector.strides, outputs, strict=False):
            h, w = out.shape[-2:]
            y, x = torch.meshgrid(torch.arange(h), torch.arange(w), indexing="ij")
            points.append(torch.stack([x, y], -1).view(-1, 2).float().to(device) * stride + stride / 2)
            strides.append(torch.full((h * w,), float(stride), device=device))
            flat.append(out.float().flatten(2).transpose(1, 2))
        points, strides, flat = torch.cat(points), torch.cat(strides), torch.cat(flat, 1)
        center = flat[..., :2] * strides[:, None] + points
        extent = flat[..., 2:4].clamp(max=6).exp() * strides[:, None] * 2
        return points, strides, torch.cat([center, extent], -1), flat[..., 4], flat[..., 5:]

    def compute_loss(outputs, targets):
        points, strides, boxes, obj, cls = decode(outputs)
        if change == "batched_assign":
            most = max(len(t) for t in targets)
            truth = torch.stack([F.pad(t, (0, 0, 0, most - len(t))) for t in targets])
            valid = torch.stack([torch.arange(most) < len(t) for t in targets]).to(device, non_blocking=True)
            truth = truth.to(device, non_blocking=True)
            foreground, number, iou = assign_batch(points, strides, boxes, obj, cls, truth, valid)
            image, point = foreground.nonzero(as_tuple=True)
            matched, target_iou = truth[image, number[image, point]], iou[image, point]
        else:
            foregrounds, matched, target_iou = [], [], []
            for i, truth in enumerate(targets):
                truth = truth.to(device)
                foreground, number, iou = assign_image(points, strides, boxes[i], obj[i], cls[i], truth)
                foregrounds.append(foreground)
                matched.append(truth[number])
                target_iou.append(iou)
            foreground, matched, target_iou = torch.stack(foregrounds), torch.cat(matched), torch.cat(target_iou)
        count = max(len(matched), 1)
        iou = box_iou(corners(boxes[foreground]), corners(matched[:, 1:]))
        cls_target = F.one_hot(matched[:, 0].long(), classes) * target_iou[:, None]
        box_loss = (1 - iou**2).sum() / count
        obj_loss = F.binary_cross_entropy_with_logits(obj, foreground.float(), reduction="sum") / count
        cls_loss = F.binary_cross_entropy_with_logits(cls[foreground], cls_target, reduction="sum") / count
        return 5.0 * box_loss + obj_loss + cls_loss, (box_loss, obj_loss, cls_loss)

    def step():
        images, targets = next(batches)
        images = images.to(device, non_blocking=True)
        if change == "gpu_normalise":
            images = (images.float() / 255.0 - mean) / std
        if change == "channels_last":
            images = images.to(memory_format=torch.channels_last)
        with bf16(change == "bf16"):
            outputs = forward(images)
        loss, parts = compute_loss(outputs, targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        "box {:.3f} obj {:.3f} cls {:.3f}".format(*(part.item() for part in parts))  # shown by the progress bar
        return loss.detach()

    return step


# --------------------------------------------------------------------------------------------------- 4. DDPM U-Net


class TimeEmbedding(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.dim = dim
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.SiLU(), nn.Linear(4 * dim, 4 * dim))

    def forward(self, t):
        half = self.dim // 2
        freqs = torch.exp(torch.arange(half, device=t.device) * -(math.log(10000) / (half - 1)))
        angles = t[:, None].float() * freqs[None]
        return self.mlp(torch.cat([angles.sin(), angles.cos()], -1))


class ResBlock(nn.Module):
    def __init__(self, cin, cout, time_dim, groups=8):
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(groups, cin), nn.Conv2d(cin, cout, 3, padding=1)
        self.time = nn.Linear(time_dim, cout)
        self.norm2, self.conv2 = nn.GroupNorm(groups, cout), nn.Conv2d(cout, cout, 3, padding=1)
        self.skip = nn.Conv2d(cin, cout, 1) if cin != cout else nn.Identity()

    def forward(self, x, emb):
        h = self.conv1(F.silu(self.norm1(x)))
        h = h + self.time(F.silu(emb))[:, :, None, None]
        return self.skip(x) + self.conv2(F.silu(self.norm2(h)))


class ImageAttention(nn.Module):
    def __init__(self, dim, heads=4):
        super().__init__()
        self.heads = heads
        self.norm, self.qkv, self.out = nn.GroupNorm(8, dim), nn.Conv2d(dim, 3 * dim, 1), nn.Conv2d(dim, dim, 1)

    def forward(self, x):
        b, c, h, w = x.shape
        q, k, v = self.qkv(self.norm(x)).reshape(b, 3, self.heads, c // self.heads, h * w).unbind(1)
        sim = torch.einsum("bhdi,bhdj->bhij", q * (c // self.heads) ** -0.5, k)
        out = torch.einsum("bhij,bhdj->bhdi", sim.softmax(-1), v)
        return x + self.out(out.reshape(b, c, h, w))


class UNet(nn.Module):
    def __init__(self, dim, mults=(1, 2, 2, 4)):
        super().__init__()
        time_dim = 4 * dim
        self.time, self.first = TimeEmbedding(dim), nn.Conv2d(3, dim, 3, padding=1)
        channels, c = [dim], dim
        self.downs, self.ups = nn.ModuleList(), nn.ModuleList()
        for level, mult in enumerate(mults):
            last = level == len(mults) - 1
            for _ in range(2):
                attention = ImageAttention(dim * mult) if level == 1 else nn.Identity()
                self.downs.append(nn.ModuleList([ResBlock(c, dim * mult, time_dim), attention]))
                c = dim * mult
                channels.append(c)
            if not last:
                self.downs.append(nn.Conv2d(c, c, 3, stride=2, padding=1))
                channels.append(c)
        self.mid1, self.mid_attention = ResBlock(c, c, time_dim), ImageAttention(c)
        self.mid2 = ResBlock(c, c, time_dim)
        for level, mult in reversed(list(enumerate(mults))):
            for _i in range(3):
                attention = ImageAttention(dim * mult) if level == 1 else nn.Identity()
                self.ups.append(nn.ModuleList([ResBlock(c + channels.pop(), dim * mult, time_dim), attention]))
                c = dim * mult
            if level:
                self.ups.append(nn.Sequential(nn.Upsample(scale_factor=2), nn.Conv2d(c, c, 3, padding=1)))
        self.norm, self.last = nn.GroupNorm(8, c), nn.Conv2d(c, 3, 3, padding=1)

    def forward(self, x, t):
        emb = self.time(t)
        x = self.first(x)
        skips = [x]
        for down in self.downs:
            x = down[1](down[0](x, emb)) if isinstance(down, nn.ModuleList) else down(x)
            skips.append(x)
        x = self.mid2(self.mid_attention(self.mid1(x, emb)), emb)
        for up in self.ups:
            x = up[1](up[0](torch.cat([x, skips.pop()], 1), emb)) if isinstance(up, nn.ModuleList) else up(x)
        return self.last(F.silu(self.norm(x)))


class SmallImages(Dataset):
    """32 x 32 images as CIFAR has them, scaled to [-1, 1]."""

    def __init__(self, count, side):
        self.images = np.random.default_rng(13).integers(0, 256, (count, side, side, 3), dtype=np.uint8)

    def __len__(self):
        return len(self.images)

    def __getitem__(self, i):
        image = torch.from_numpy(self.images[i]).permute(2, 0, 1).float().div(255)
        return image.flip(-1) * 2 - 1 if i % 2 else image * 2 - 1


class EMA:
    def __init__(self, model, decay=0.9999):
        self.decay, self.model = decay, copy.deepcopy(model).requires_grad_(False)

    @torch.no_grad()
    def update(self, model, foreach):
        if foreach:
            ours, theirs = list(self.model.parameters()), list(model.parameters())
            torch._foreach_lerp_(ours, theirs, 1 - self.decay)
            return
        current = dict(model.named_parameters())
        for name, param in self.model.named_parameters():
            param.copy_(param * self.decay + current[name] * (1 - self.decay))


def extract(values, t, shape):
    out = values.gather(-1, t.cpu())
    return out.reshape(t.shape[0], *((1,) * (len(shape) - 1))).to(t.device)


def ddpm_train(change):
    """DDPM training of a U-Net on small images with an EMA of the weights."""
    torch.manual_seed(4)
    side, batch_size, steps = size(32, 16), size(48, 4), 1000
    model = UNet(size(64, 16)).to(device)
    ema = EMA(model, 0.995)
    graph = change == "graph"
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-4, capturable=graph and device.type == "cuda")
    betas = torch.linspace(1e-4, 0.02, steps)
    cumprod = (1 - betas).cumprod(0)
    root, root_rest = cumprod.sqrt(), (1 - cumprod).sqrt()
    batches = endless(
        loader_of(SmallImages(size(4096, 16), side), batch_size, 2, seed=4, pin_memory=device.type == "cuda")
    )
    on_gpu = change in ("graph", "gpu_schedule")
    if on_gpu:
        root, root_rest = root.to(device), root_rest.to(device)
    if change == "channels_last":
        model.to(memory_format=torch.channels_last)
    losses = []

    def train(x):
        if on_gpu:
            t = torch.randint(0, steps, (batch_size,), device=device)
            noise = torch.randn_like(x)
            noisy = root[t].view(-1, 1, 1, 1) * x + root_rest[t].view(-1, 1, 1, 1) * noise
        else:
            t = torch.randint(0, steps, (batch_size,)).long().to(device)
            noise = torch.randn_like(x)
            noisy = extract(root, t, x.shape) * x + extract(root_rest, t, x.shape) * noise
        if change == "channels_last":
            noisy = noisy.contiguous(memory_format=torch.channels_last)
        with bf16(change == "bf16"):
            predicted = model(noisy, t)
        loss = F.mse_loss(predicted.float(), noise)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        ema.update(model, change == "foreach_ema")
        return loss.detach()

    if graph:
        static = torch.zeros(batch_size, 3, side, side, device=device)
        replay = graphed_training(lambda: train(static), [model], [optimizer])
        ema.model.load_state_dict(model.state_dict())

    def step():
        x = next(batches)
        if graph:
            static.copy_(x, non_blocking=True)
            loss = replay().clone()
        else:
            loss = train(x.to(device, non_blocking=True))
        losses.append(loss.item())
        return loss

    return step


# ------------------------------------------------------------------------------------------------------- 5. SASRec


class Histories(Dataset):
    """Users' item sequences: inputs, next items, a negative for each, and the held-out item (0 is padding)."""

    def __init__(self, users, items, max_len, vectorised):
        rng = np.random.default_rng(17)
        self.items, self.max_len, self.vectorised = items, max_len, vectorised
        popularity = 1.0 / np.arange(1, items + 1) ** 0.8
        cumulative = np.cumsum(popularity / popularity.sum())
        self.histories = []
        for _ in range(users):
            length = int(rng.integers(max_len // 4, 3 * max_len // 2)) + 3
            picks = np.searchsorted(cumulative, rng.random(length)).clip(0, items - 1) + 1
            self.histories.append(picks.tolist())

    def __len__(self):
        return len(self.histories)

    def __getitem__(self, user):
        history, held_out = self.histories[user][:-1], self.histories[user][-1]
        seq = np.zeros(self.max_len, dtype=np.int64)
        pos = np.zeros(self.max_len, dtype=np.int64)
        neg = np.zeros(self.max_len, dtype=np.int64)
        rng = np.random.default_rng(user)
        seen = set(history)
        if self.vectorised:
            n = min(len(history) - 1, self.max_len)
            seq[-n:], pos[-n:] = history[-n - 1 : -1], history[-n:]
            draws = rng.integers(1, self.items + 1, 4 * self.max_len)
            neg[-n:] = draws[~np.isin(draws, history)][:n][::-1]
            return seq, pos, neg, held_out
        following, idx = history[-1], self.max_len - 1
        for item in reversed(history[:-1]):
            seq[idx], pos[idx] = item, following
            negative = rng.integers(1, self.items + 1)
            while negative in seen:
                negative = rng.integers(1, self.items + 1)
            neg[idx] = negative
            following = item
            idx -= 1
            if idx == -1:
                break
        return seq, pos, neg, held_out


class SASRec(nn.Module):
    def __init__(self, items, max_len, dim, blocks, heads, dropout, need_weights):
        super().__init__()
        self.need_weights = need_weights
        self.item_emb = nn.Embedding(items + 1, dim, padding_idx=0)
        self.pos_emb = nn.Embedding(max_len, dim)
        self.dropout = nn.Dropout(dropout)
        self.attn_norms, self.attns, self.ff_norms, self.ffs = (nn.ModuleList() for _ in range(4))
        for _ in range(blocks):
            self.attn_norms.append(nn.LayerNorm(dim, eps=1e-8))
            self.attns.append(nn.MultiheadAttention(dim, heads, batch_first=True))
            self.ff_norms.append(nn.LayerNorm(dim, eps=1e-8))
            self.ffs.append(nn.Sequential(nn.Linear(dim, dim), nn.ReLU(), nn.Dropout(dropout), nn.Linear(dim, dim)))
        self.norm = nn.LayerNorm(dim, eps=1e-8)
        for emb in (self.item_emb, self.pos_emb):
            nn.init.normal_(emb.weight, std=0.02)

    def forward(self, seq):
        length = seq.shape[1]
        x = self.item_emb(seq) * self.item_emb.embedding_dim**0.5
        x = self.dropout(x + self.pos_emb(torch.arange(length, device=seq.device)))
        real = (seq != 0).unsqueeze(-1)
        x = x * real
        mask = ~torch.tril(torch.ones((length, length), dtype=torch.bool, device=seq.device))
        for attn_norm, attn, ff_norm, ff in zip(self.attn_norms, self.attns, self.ff_norms, self.ffs, strict=False):
            q = attn_norm(x)
            out, _ = attn(q, x, x, attn_mask=mask, need_weights=self.need_weights)
            x = q + out
            x = ff_norm(x)
            x = (x + ff(x)) * real
        return self.norm(x)


def sasrec_train(change):
    """SASRec training with one sampled negative per position, and the hit rate of held-out items among all items."""
    torch.manual_seed(5)
    items, max_len, batch_size = size(50000, 60), size(100, 10), size(128, 6)
    model = SASRec(items, max_len, size(64, 16), 2, 2, 0.2, change != "no_weights").to(device)
    optimizer = torch.optim.Adam(
        model.parameters(), lr=1e-3, betas=(0.9, 0.98), fused=True if change == "fused_adam" else None
    )
    dataset = Histories(size(6000, 24), items, max_len, change == "vectorised_negatives")
    batches = endless(loader_of(dataset, batch_size, 4 if change == "workers" else 0, seed=5))
    log = []

    def step():
        model.train()
        seq, pos, neg, held_out = (x.to(device) for x in next(batches))
        features = model(seq)
        pos_logits = (features * model.item_emb(pos)).sum(-1)
        neg_logits = (features * model.item_emb(neg)).sum(-1)
        index = torch.where(pos != 0)
        loss = F.binary_cross_entropy_with_logits(pos_logits[index], torch.ones_like(pos_logits[index]))
        loss = loss + F.binary_cross_entropy_with_logits(neg_logits[index], torch.zeros_like(neg_logits[index]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            scores = features[:, -1].detach() @ model.item_emb.weight.T
            target = held_out[:, None]
            if change == "rank_by_count":
                rank = (scores > scores.gather(1, target)).sum(1)
            else:
                rank = (-scores).argsort(1).argsort(1).gather(1, target)[:, 0]
            hit = (rank < 10).float().mean()
            ndcg = torch.where(rank < 10, 1 / torch.log2(rank.float() + 2), 0.0).mean()
        log.append((loss.item(), hit.item(), ndcg.item()))
        return torch.stack([loss.detach(), hit, ndcg])

    return step


# --------------------------------------------------------------------------------------------------- 6. PointNet++


def square_distance(a, b):
    dist = -2 * torch.matmul(a, b.transpose(1, 2))
    dist += (a**2).sum(-1)[:, :, None]
    dist += (b**2).sum(-1)[:, None, :]
    return dist


def index_points(points, idx):
    view = [points.shape[0]] + [1] * (idx.dim() - 1)
    batch = torch.arange(points.shape[0], device=points.device).view(view).expand_as(idx)
    return points[batch, idx, :]


def farthest_point_sample(xyz, count, masked):
    b, n, _ = xyz.shape
    centroids = torch.zeros(b, count, dtype=torch.long, device=xyz.device)
    distance = torch.ones(b, n, device=xyz.device) * 1e10
    farthest = torch.zeros(b, dtype=torch.long, device=xyz.device)
    batch = torch.arange(b, dtype=torch.long, device=xyz.device)
    for i in range(count):
        centroids[:, i] = farthest
        centroid = xyz[batch, farthest, :].view(b, 1, 3)
        dist = torch.sum((xyz - centroid) ** 2, -1)
        if masked:
            mask = dist < distance
            distance[mask] = dist[mask]
        else:
            distance = torch.minimum(distance, dist)
        farthest = torch.max(distance, -1)[1]
    return centroids


def query_ball(radius, count, xyz, centers, topk):
    b, n, _ = xyz.shape
    s = centers.shape[1]
    idx = torch.arange(n, dtype=torch.long, device=xyz.device).view(1, 1, n).repeat(b, s, 1)
    idx = torch.where(square_distance(centers, xyz) > radius**2, n, idx)
    idx = idx.topk(count, dim=-1, largest=False, sorted=True)[0] if topk else idx.sort(dim=-1)[0][:, :, :count]
    first = idx[:, :, :1].expand(-1, -1, count)
    return torch.where(idx == n, first, idx)


class SetAbstraction(nn.Module):
    def __init__(self, cin, widths):
        super().__init__()
        self.convs, self.norms = nn.ModuleList(), nn.ModuleList()
        for width in widths:
            self.convs.append(nn.Conv2d(cin, width, 1))
            self.norms.append(nn.BatchNorm2d(width))
            cin = width

    def forward(self, x):
        x = x.permute(0, 3, 2, 1)
        for conv, norm in zip(self.convs, self.norms, strict=False):
            x = F.relu(norm(conv(x)))
        return x.max(2)[0].transpose(1, 2)


class PointNet2(nn.Module):
    def __init__(self, classes, w):
        super().__init__()
        self.sa1 = SetAbstraction(3, [w, w, 2 * w])
        self.sa2 = SetAbstraction(2 * w + 3, [2 * w, 2 * w, 4 * w])
        self.sa3 = SetAbstraction(4 * w + 3, [4 * w, 8 * w, 16 * w])
        self.fc1, self.bn1 = nn.Linear(16 * w, 8 * w), nn.BatchNorm1d(8 * w)
        self.fc2, self.bn2 = nn.Linear(8 * w, 4 * w), nn.BatchNorm1d(4 * w)
        self.fc3 = nn.Linear(4 * w, classes)

    def forward(self, xyz, geometry):
        fps1, ball1, fps2, ball2 = geometry
        xyz1 = index_points(xyz, fps1)
        grouped = index_points(xyz, ball1) - xyz1[:, :, None]
        features = self.sa1(grouped)
        xyz2 = index_points(xyz1, fps2)
        grouped = torch.cat([index_points(xyz1, ball2) - xyz2[:, :, None], index_points(features, ball2)], -1)
        features = self.sa2(grouped)
        x = self.sa3(torch.cat([xyz2, features], -1)[:, None])[:, 0]
        x = F.relu(self.bn1(self.fc1(x)))
        x = F.relu(self.bn2(self.fc2(x)))
        return F.log_softmax(self.fc3(x), -1)


class Clouds(Dataset):
    """Points on deformed spheres and boxes, normalised to the unit ball."""

    def __init__(self, count, points, classes):
        rng = np.random.default_rng(19)
        self.points, self.labels = [], rng.integers(0, classes, count)
        for label in self.labels:
            p = rng.standard_normal((2 * points, 3)).astype(np.float32)
            p /= np.abs(p).max(1, keepdims=True) if label % 2 else np.linalg.norm(p, axis=1, keepdims=True)
            self.points.append(p * (1 + 0.1 * (label % 7) * np.sin(3 * p[:, ::-1])).astype(np.float32))
        self.count = points

    def __len__(self):
        return len(self.points)

    def __getitem__(self, i):
        points = self.points[i][: self.count]
        points = points - points.mean(0)
        points = points / np.sqrt((points**2).sum(1)).max()
        return points, self.labels[i]


def pointnet2_train(change):
    """Training of a PointNet++ classifier whose farthest point sampling and ball query are in Python."""
    torch.manual_seed(6)
    np.random.seed(6)
    points, batch_size, classes = size(1024, 64), size(16, 6), size(40, 5)
    centers1, centers2, near1, near2 = size(256, 16), size(64, 6), size(32, 8), size(64, 6)
    model = PointNet2(classes, size(64, 8)).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, weight_decay=1e-4)
    batches = endless(loader_of(Clouds(size(1024, 24), points, classes), batch_size, 2, seed=6))
    masked, topk = change not in ("minimum", "graph_sampling"), change == "topk_ball"
    forward = compiled(model) if change == "compile" else model

    @torch.no_grad()
    def sample(xyz):
        fps1 = farthest_point_sample(xyz, centers1, masked)
        xyz1 = index_points(xyz, fps1)
        ball1 = query_ball(0.2 if not TINY else 0.5, near1, xyz, xyz1, topk)
        fps2 = farthest_point_sample(xyz1, centers2, masked)
        ball2 = query_ball(0.4 if not TINY else 0.9, near2, xyz1, index_points(xyz1, fps2), topk)
        return fps1, ball1, fps2, ball2

    if change == "graph_sampling":
        static = torch.rand(batch_size, points, 3, device=device)
        replay = graphed(lambda: sample(static))

    def step():
        model.train()
        cloud, label = next(batches)
        cloud = cloud.numpy()
        cloud = cloud * np.random.uniform(0.8, 1.25, (batch_size, 1, 1)).astype(np.float32)
        cloud = cloud + np.random.uniform(-0.1, 0.1, (batch_size, 1, 3)).astype(np.float32)
        xyz, label = torch.from_numpy(cloud).to(device), label.to(device)
        if change == "graph_sampling":
            static.copy_(xyz)
            geometry = replay()
        else:
            geometry = sample(xyz)
        optimizer.zero_grad()
        with bf16(change == "bf16"):
            output = forward(xyz, geometry)
        loss = F.nll_loss(output.float(), label)
        loss.backward()
        optimizer.step()
        output.argmax(1).eq(label).sum().item()
        return loss.detach()

    return step


# --------------------------------------------------------------------------------------------- 7. speech separation


class GlobalNorm(nn.Module):
    def __init__(self, channels, var_mean):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(channels)), nn.Parameter(torch.zeros(channels))
        self.var_mean = var_mean

    def forward(self, x):
        if not self.var_mean:
            return F.group_norm(x, 1, self.weight, self.bias, 1e-8)
        var, mean = torch.var_mean(x, (1, 2), correction=0, keepdim=True)
        scale = torch.rsqrt(var + 1e-8)
        return torch.addcmul(self.bias[:, None], (x - mean) * scale, self.weight[:, None])


class TCNBlock(nn.Module):
    def __init__(self, channels, hidden, dilation, var_mean):
        super().__init__()
        self.inner = nn.Sequential(
            nn.Conv1d(channels, hidden, 1),
            nn.PReLU(),
            GlobalNorm(hidden, var_mean),
            nn.Conv1d(hidden, hidden, 3, padding=dilation, dilation=dilation, groups=hidden),
            nn.PReLU(),
            GlobalNorm(hidden, var_mean),
        )
        self.residual, self.skip = nn.Conv1d(hidden, channels, 1), nn.Conv1d(hidden, channels, 1)

    def forward(self, x):
        y = self.inner(x)
        return x + self.residual(y), self.skip(y)


class Masker(nn.Module):
    def __init__(self, bins, channels, hidden, blocks, repeats, speakers, var_mean):
        super().__init__()
        self.speakers = speakers
        self.encoder = nn.Sequential(
            nn.Conv1d(bins, channels, 3, padding=1),
            nn.ReLU(),
            GlobalNorm(channels, var_mean),
            nn.Conv1d(channels, channels, 1),
        )
        self.blocks = nn.ModuleList(
            TCNBlock(channels, hidden, 2**i, var_mean) for _ in range(repeats) for i in range(blocks)
        )
        self.out = nn.Sequential(nn.PReLU(), nn.Conv1d(channels, speakers * bins, 1), nn.Sigmoid())

    def forward(self, magnitude):
        x = self.encoder(torch.log1p(magnitude))
        total = 0
        for block in self.blocks:
            x, skip = block(x)
            total = total + skip
        b, bins, frames = magnitude.shape
        return self.out(total).view(b, self.speakers, bins, frames)


class Separator(nn.Module):
    def __init__(self, masker, n_fft, hop, own_istft):
        super().__init__()
        self.masker, self.n_fft, self.hop, self.own_istft = masker, n_fft, hop, own_istft
        self.register_buffer("window", torch.hann_window(n_fft))

    def overlap_add(self, frames, length):
        total = self.hop * (frames.shape[-1] - 1) + self.n_fft
        out = F.fold(frames, (1, total), (1, self.n_fft), stride=(1, self.hop))[:, 0, 0]
        return out[:, self.n_fft // 2 : self.n_fft // 2 + length]

    def inverse(self, spectrum, length):
        if not self.own_istft:
            return torch.istft(spectrum, self.n_fft, self.hop, window=self.window, length=length)
        frames = torch.fft.irfft(spectrum, self.n_fft, dim=1) * self.window[:, None]
        weight = (self.window**2)[None, :, None].expand(1, -1, frames.shape[-1])
        return self.overlap_add(frames, length) / self.overlap_add(weight, length)

    def forward(self, wave, masker):
        spectrum = torch.stft(wave, self.n_fft, self.hop, window=self.window, return_complex=True)
        mask = masker(spectrum.abs()).float()
        separated = (mask * spectrum[:, None]).flatten(0, 1)
        return self.inverse(separated, wave.shape[-1]).view(wave.shape[0], -1, wave.shape[-1])


def si_snr(estimate, target, eps=1e-8):
    estimate = estimate - estimate.mean(-1, keepdim=True)
    target = target - target.mean(-1, keepdim=True)
    along = (estimate * target).sum(-1, keepdim=True) * target / (target.pow(2).sum(-1, keepdim=True) + eps)
    noise = estimate - along
    return 10 * torch.log10(along.pow(2).sum(-1) / (noise.pow(2).sum(-1) + eps) + eps)


def pit_loss(estimate, sources):
    """The negative SI-SNR of the best assignment of the estimates to the speakers."""
    scores = []
    for order in permutations(range(sources.shape[1])):
        scores.append(torch.stack([si_snr(estimate[:, i], sources[:, j]) for i, j in enumerate(order)]).mean(0))
    return -torch.stack(scores).max(0)[0].mean()


class Mixtures(Dataset):
    """Two speakers mixed at a random level, from harmonic tones with noise."""

    def __init__(self, count, length, rate=8000):
        rng = np.random.default_rng(23)
        self.count, self.clips = count, []
        time = np.arange(length) / rate
        for _ in range(32):
            pitch = rng.uniform(90, 250) * (1 + 0.05 * np.sin(2 * np.pi * rng.uniform(1, 5) * time))
            phase = 2 * np.pi * np.cumsum(pitch) / rate
            voice = sum(rng.uniform(0.1, 1) / k * np.sin(k * phase) for k in range(1, 9))
            level = np.clip(np.sin(2 * np.pi * rng.uniform(1, 3) * time + rng.uniform(0, 6)), 0, 1)
            self.clips.append((voice * level + 0.02 * rng.standard_normal(length)).astype(np.float32))

    def __len__(self):
        return self.count

    def __getitem__(self, i):
        rng = np.random.default_rng(i)
        a, b = (self.clips[k] for k in rng.choice(len(self.clips), 2, replace=False))
        gain = 10 ** (rng.uniform(-5, 5) / 20)
        b = b * np.float32(gain * np.std(a) / (np.std(b) + 1e-8))
        sources = np.stack([a, b])
        sources /= np.abs(sources.sum(0)).max() + 1e-8
        return torch.from_numpy(sources.sum(0)), torch.from_numpy(sources)


def separation_train(change):
    """Training of a Conv-TasNet-like speaker separation on STFT masks with permutation-invariant SI-SNR."""
    torch.manual_seed(7)
    length, batch_size, n_fft, hop = size(32000, 1600), size(8, 2), size(512, 64), size(64, 16)
    masker = Masker(n_fft // 2 + 1, size(128, 12), size(384, 16), size(8, 3), size(2, 1), 2, change == "var_mean_norm")
    graph = change == "graph"  # torch.istft looks at a value on the CPU, so a graph needs another inverse
    model = Separator(masker, n_fft, hop, graph).to(device)
    options = {"fused": True} if change == "fused_adam" else {"capturable": graph and device.type == "cuda"}
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, **options)
    batches = endless(
        loader_of(Mixtures(size(2000, 8), length), batch_size, 2, seed=7, pin_memory=device.type == "cuda")
    )
    run_masker = compiled(masker) if change == "compile" else masker

    def masks(magnitude):
        with bf16(change == "bf16"):
            return run_masker(magnitude)

    def train(mixture, sources):
        optimizer.zero_grad()
        loss = pit_loss(model(mixture, masks), sources)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        return loss.detach()

    if graph:
        static = torch.rand(batch_size, length, device=device), torch.rand(batch_size, 2, length, device=device)
        replay = graphed_training(lambda: train(*static), [model], [optimizer])

    def step():
        batch = next(batches)
        if graph:
            for buffer, values in zip(static, batch, strict=False):
                buffer.copy_(values, non_blocking=True)
            return replay().clone()
        mixture, sources = (x.to(device, non_blocking=True) for x in batch)
        return train(mixture, sources)

    return step


# ------------------------------------------------------------------- 8. FT-Transformer, uncertainty by MC dropout


class TabularBlock(nn.Module):
    def __init__(self, dim, heads, dropout):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.ff1, self.ff2 = nn.Linear(dim, 2 * dim * 4 // 3), nn.Linear(dim * 4 // 3, dim)
        self.dropout = nn.Dropout(dropout) if dropout else nn.Identity()

    def forward(self, x, sdpa):
        b, t, c = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        if sdpa:
            y = F.scaled_dot_product_attention(q, k, v)
        else:
            y = torch.softmax(q @ k.transpose(-1, -2) / math.sqrt(c // self.heads), -1) @ v
        x = x + self.dropout(self.out(y.transpose(1, 2).reshape(b, t, c)))
        gate, value = self.ff1(self.norm2(x)).chunk(2, -1)
        return x + self.ff2(self.dropout(F.relu(gate) * value))


class FTTransformer(nn.Module):
    def __init__(self, numeric, cardinalities, dim, blocks, heads, classes, dropout, sdpa):
        super().__init__()
        self.sdpa = sdpa
        self.weight = nn.Parameter(torch.randn(numeric, dim) * 0.3)
        self.bias = nn.Parameter(torch.randn(numeric, dim) * 0.1)
        self.embeddings = nn.ModuleList(nn.Embedding(n, dim) for n in cardinalities)
        self.cls = nn.Parameter(torch.randn(1, 1, dim) * 0.3)
        # Dropout in the last block and the head only, as it was trained.
        self.blocks = nn.ModuleList(TabularBlock(dim, heads, dropout * (i == blocks - 1)) for i in range(blocks))
        self.head = nn.Sequential(nn.LayerNorm(dim), nn.ReLU(), nn.Dropout(dropout), nn.Linear(dim, classes))

    def trunk(self, numbers, categories):
        tokens = [self.cls.expand(len(numbers), -1, -1), numbers[..., None] * self.weight + self.bias]
        for i, embedding in enumerate(self.embeddings):
            tokens.append(embedding(categories[:, i]).unsqueeze(1))
        x = torch.cat(tokens, 1)
        for block in self.blocks[:-1]:
            x = block(x, self.sdpa)
        return x

    def tail(self, x):
        return self.head(self.blocks[-1](x, self.sdpa)[:, 0])

    def forward(self, numbers, categories):
        return self.tail(self.trunk(numbers, categories))


class Table(Dataset):
    """A table with scaled numbers and encoded categories."""

    def __init__(self, rows, numeric, cardinalities):
        rng = np.random.default_rng(29)
        values = rng.lognormal(0, 1, (rows, numeric))
        self.numbers = ((values - values.mean(0)) / values.std(0)).astype(np.float32)
        self.categories = np.stack([rng.integers(0, n, rows) for n in cardinalities], 1)

    def __len__(self):
        return len(self.numbers)

    def __getitem__(self, i):
        return self.numbers[i], self.categories[i]


def mc_dropout_table(change):
    """Uncertainty of an FT-Transformer's predictions for table rows by many passes with dropout."""
    torch.manual_seed(8)
    numeric, cardinalities = size(32, 5), [3, 7, 12, 31, 50, 100, 365, 1000][: size(8, 3)]
    batch_size, passes, classes = size(512, 6), size(20, 4), size(10, 4)
    model = FTTransformer(
        numeric, cardinalities, size(192, 24), size(4, 2), size(8, 3), classes, 0.1, change == "sdpa"
    ).to(device)
    model.eval()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.train()
    if change == "tf32":
        use_tf32()
    rows = DataLoader(
        Table(size(16384, 24), numeric, cardinalities),
        batch_size,
        num_workers=2,
        drop_last=True,
        persistent_workers=True,
    )
    batches = endless(rows)
    means, entropies, informations = [], [], []

    @torch.no_grad()
    def predict(numbers, categories):
        with bf16(change == "bf16"):
            return model(numbers, categories).float().softmax(-1)

    if change == "graph":
        static = (
            torch.zeros(batch_size, numeric, device=device),
            torch.zeros(batch_size, len(cardinalities), dtype=torch.long, device=device),
        )
        replay = graphed(lambda: predict(*static))

    def step():
        numbers, categories = (x.to(device) for x in next(batches))
        if change == "graph":
            static[0].copy_(numbers)
            static[1].copy_(categories)
        if change == "trunk_once":
            with torch.no_grad():
                hidden = model.trunk(numbers, categories)
        samples = []
        for _ in range(passes):
            if change == "trunk_once":
                with torch.no_grad():
                    probs = model.tail(hidden).softmax(-1)
            else:
                probs = replay() if change == "graph" else predict(numbers, categories)
            samples.append(probs if change == "keep_on_gpu" else probs.cpu().numpy())
        samples = torch.stack(samples).cpu().numpy() if change == "keep_on_gpu" else np.stack(samples)
        mean = samples.mean(0)
        entropy = -(mean * np.log(mean + 1e-12)).sum(-1)
        expected = -(samples * np.log(samples + 1e-12)).sum(-1).mean(0)
        means.append(mean)
        entropies.extend(entropy.tolist())
        informations.extend((entropy - expected).tolist())
        return torch.from_numpy(np.concatenate([mean.ravel(), entropy]))

    return step


PROGRAMS = {
    llm_generate: {"static_graph": "static_cache", "half": "half_precision", "sdpa": "fused_attention",
                   "last_logits": "", "no_eos_sync": "remove_sync"},
    llama_finetune: {"no_checkpoint": "no_recompute", "compile": "fuse_pointwise", "pad_longest": "",
                     "causal": "no_mask_tensor", "answers_only": ""},
    yolo_train: {"batched_assign": "larger_batch", "channels_last": "channels_last", "bf16": "half_precision",
                 "gpu_normalise": "data_loader", "compile": "fuse_pointwise"},
    ddpm_train: {"graph": "cuda_graph", "bf16": "half_precision", "channels_last": "channels_last",
                 "foreach_ema": "update_graph", "gpu_schedule": "cpu_tensors"},
    sasrec_train: {"vectorised_negatives": "data_loader", "workers": "data_loader", "rank_by_count": "largest_first",
                   "no_weights": "fused_attention", "fused_adam": "fused_optimizer"},
    pointnet2_train: {"graph_sampling": "cuda_graph", "minimum": "remove_sync", "topk_ball": "largest_first",
                      "bf16": "half_precision", "compile": "fuse_pointwise"},
    separation_train: {"var_mean_norm": "", "graph": "cuda_graph", "compile": "fuse_pointwise",
                       "bf16": "half_precision", "fused_adam": "fused_optimizer"},
    mc_dropout_table: {"trunk_once": "compute_once", "graph": "cuda_graph", "bf16": "half_precision", "tf32": "tf32",
                       "keep_on_gpu": "remove_sync"},
}  # fmt: skip
