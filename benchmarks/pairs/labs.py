"""Programs of labs: a recommender, speech, completions, BYOL, a surface and cross-validation."""

import copy
import itertools
import math

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from setting import compiled, device, endless, gathered, graphed, graphed_training, size, use_tf32
from torch.utils.data import DataLoader, Dataset, Sampler, TensorDataset

# ---------------------------------------------------------------------------------------------------------------------
# 1. Recommender: click, cart and purchase predicted by an MMoE over twelve embedding tables
# ---------------------------------------------------------------------------------------------------------------------


class Tables(nn.Module):
    """One embedding table for each categorical field."""

    def __init__(self, vocabularies, width, sparse):
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(n, width, sparse=sparse, device=device) for n in vocabularies)
        for table in self.tables:
            nn.init.normal_(table.weight, std=0.02)

    def forward(self, ids):
        return torch.cat([table(ids[:, i]) for i, table in enumerate(self.tables)], 1)


class OneTable(nn.Module):
    """The tables of all fields below each other in one table."""

    def __init__(self, tables):
        super().__init__()
        sizes = [table.num_embeddings for table in tables.tables]
        self.table = nn.Embedding.from_pretrained(torch.cat([t.weight.data for t in tables.tables]), freeze=False)
        self.register_buffer("offsets", torch.tensor([0, *np.cumsum(sizes)[:-1].tolist()], device=device))

    def forward(self, ids):
        return self.table(ids + self.offsets).flatten(1)


class Experts(nn.Module):
    def __init__(self, inputs, count, hidden, width):
        super().__init__()
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, width), nn.ReLU())
            for _ in range(count)
        )

    def forward(self, x):
        return torch.stack([expert(x) for expert in self.experts], 1)


class StackedExperts(nn.Module):
    """The same experts: the first layers as one wide product, the second layers as one batched product."""

    def __init__(self, experts):
        super().__init__()
        first, second = [e[0] for e in experts.experts], [e[2] for e in experts.experts]
        self.count = len(first)
        self.w1 = nn.Parameter(torch.cat([layer.weight.data for layer in first]))
        self.b1 = nn.Parameter(torch.cat([layer.bias.data for layer in first]))
        self.w2 = nn.Parameter(torch.stack([layer.weight.data.T for layer in second]))
        self.b2 = nn.Parameter(torch.stack([layer.bias.data for layer in second])[:, None])

    def forward(self, x):
        hidden = F.linear(x, self.w1, self.b1).relu().unflatten(1, (self.count, -1)).transpose(0, 1)
        return torch.baddbmm(self.b2, hidden, self.w2).relu().transpose(0, 1)


class MMoE(nn.Module):
    """Experts shared by the tasks; each task weighs them by its own gate and has its own tower."""

    def __init__(self, inputs, tasks, experts=6, hidden=256, width=128):
        super().__init__()
        self.experts = Experts(inputs, experts, hidden, width)
        self.gates = nn.ModuleList(nn.Linear(inputs, experts) for _ in range(tasks))
        self.towers = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 64), nn.ReLU(), nn.Linear(64, 1)) for _ in range(tasks)
        )

    def forward(self, x):
        experts = self.experts(x)
        logits = []
        for gate, tower in zip(self.gates, self.towers, strict=False):
            weights = gate(x).softmax(1)
            logits.append(tower((experts * weights[:, :, None]).sum(1))[:, 0])
        return torch.stack(logits, 1)


def auc_numpy(scores, labels):
    """Area under the ROC curve from the ranks of the positives."""
    ranks = np.empty(len(scores))
    ranks[np.argsort(scores)] = np.arange(1, len(scores) + 1)
    positives = labels.sum()
    return (ranks[labels > 0].sum() - positives * (positives + 1) / 2) / (positives * (len(labels) - positives) + 1e-9)


def auc_torch(scores, labels):
    """The same for all tasks at once, on the device, without waiting for it."""
    ranks = scores.argsort(0).argsort(0).double() + 1
    positives = labels.double().sum(0)
    above = (ranks * labels).sum(0) - positives * (positives + 1) / 2
    return above / (positives * (len(labels) - positives) + 1e-9)


def mmoe_recommender(change):
    """Train a multi-task recommender with Adagrad on the embedding tables, logging losses and AUCs of each batch."""
    rng = np.random.default_rng(1)
    torch.manual_seed(1)
    big = [2_000_000, 1_000_000, 1_000_000, 500_000, 500_000, 200_000, 100_000, 50_000, 10_000, 1000, 200, 50]
    vocabularies = [size(n, min(n, 50)) for n in big]
    rows, batch, tasks = size(400_000, 400), size(16_384, 64), 3
    ids = np.stack([(rng.random(rows) ** 3 * n).astype(np.int64) for n in vocabularies], 1)
    numbers = rng.standard_normal((rows, 13)).astype(np.float32)
    labels = (rng.random((rows, tasks)) < np.array([0.3, 0.1, 0.03])).astype(np.float32)

    if change == "tf32":
        use_tf32()
    tables = Tables(vocabularies, 32, sparse=change == "sparse_gradients")
    if change == "index_select":
        gathered(tables)
    if change == "one_table":
        tables = OneTable(tables)
    model = MMoE(len(vocabularies) * 32 + 13, tasks).to(device)
    if change == "stacked_experts":
        model.experts = StackedExperts(model.experts)
    # Adagrad changes only rows with a gradient, so dense and sparse gradients train the same.
    for_tables = torch.optim.Adagrad(tables.parameters(), lr=0.02)
    for_model = torch.optim.Adam(model.parameters(), lr=1e-3)
    history = []

    def batches():
        while True:
            order = rng.permutation(rows)
            for i in range(0, rows - batch + 1, batch):
                chosen = order[i : i + batch]
                yield ids[chosen], numbers[chosen], labels[chosen]

    source = batches()

    def step():
        i, n, y = (torch.from_numpy(part).to(device) for part in next(source))
        logits = model(torch.cat([tables(i), n], 1))
        losses = F.binary_cross_entropy_with_logits(logits, y, reduction="none").mean(0)
        loss = losses.sum()
        for_tables.zero_grad()
        for_model.zero_grad()
        loss.backward()
        for_tables.step()
        for_model.step()
        scores = logits.detach()
        if change == "auc_on_device":
            auc = auc_torch(scores, y)
        else:
            scores, truth = scores.cpu().numpy(), y.cpu().numpy()
            auc = [auc_numpy(scores[:, t], truth[:, t]) for t in range(tasks)]
        history.append((loss.item(), auc))
        return losses.detach()

    return step


# ---------------------------------------------------------------------------------------------------------------------
# 2. Speech: Conformer encoder with log-mel features and SpecAugment on the fly, CTC loss
# ---------------------------------------------------------------------------------------------------------------------


def mel_filters(bins, mels, rate=16_000):
    """Triangular filters [bins, mels], equally wide on the mel scale."""
    points = torch.linspace(0, 2595 * math.log10(1 + rate / 2 / 700), mels + 2)
    hertz = 700 * (10 ** (points / 2595) - 1)
    frequency = torch.linspace(0, rate / 2, bins)[:, None]
    up = (frequency - hertz[:-2]) / (hertz[1:-1] - hertz[:-2])
    down = (hertz[2:] - frequency) / (hertz[2:] - hertz[1:-1])
    return torch.minimum(up, down).clamp(min=0)


class ConformerBlock(nn.Module):
    def __init__(self, width, heads, kernel, sdpa):
        super().__init__()
        self.heads, self.sdpa = heads, sdpa

        def feed_forward():
            return nn.Sequential(
                nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.SiLU(), nn.Linear(4 * width, width)
            )

        self.before, self.after = feed_forward(), feed_forward()
        self.norm_attention, self.norm_conv, self.norm = (nn.LayerNorm(width) for _ in range(3))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.gate = nn.Linear(width, 2 * width)
        self.depthwise = nn.Conv1d(width, width, kernel, padding=kernel // 2, groups=width)
        self.norm_inner = nn.LayerNorm(width)
        self.pointwise = nn.Linear(width, width)

    def attention(self, x, mask):
        q, k, v = self.qkv(x).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mask = mask[:, None, None]
        if self.sdpa:
            mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        else:
            scores = q @ k.transpose(2, 3) / math.sqrt(q.shape[3])
            mixed = scores.masked_fill(~mask, float("-inf")).softmax(3) @ v
        return self.out(mixed.transpose(1, 2).flatten(2))

    def convolution(self, x, mask):
        x = F.glu(self.gate(x), 2) * mask[:, :, None]
        x = self.depthwise(x.transpose(1, 2)).transpose(1, 2)
        return self.pointwise(F.silu(self.norm_inner(x)))

    def forward(self, x, mask):
        x = x + 0.5 * self.before(x)
        x = x + self.attention(self.norm_attention(x), mask)
        x = x + self.convolution(self.norm_conv(x), mask)
        return self.norm(x + 0.5 * self.after(x))


class Conformer(nn.Module):
    def __init__(self, mels, width, layers, heads, letters, sdpa):
        super().__init__()
        self.conv1 = nn.Conv2d(1, width // 2, 3, 2, 1)
        self.conv2 = nn.Conv2d(width // 2, width // 2, 3, 2, 1)
        self.project = nn.Linear(width // 2 * (mels // 4), width)
        self.blocks = nn.ModuleList(ConformerBlock(width, heads, 15, sdpa) for _ in range(layers))
        self.head = nn.Linear(width, letters)

    def forward(self, features, lengths):
        """Log-probabilities [time / 4, batch, letters]; what lies beyond an utterance's length never counts."""
        x = self.conv1(features[:, None]).relu()
        lengths = (lengths + 1) // 2
        x = x * (torch.arange(x.shape[2], device=x.device) < lengths[:, None])[:, None, :, None]
        x = self.conv2(x).relu()
        lengths = (lengths + 1) // 2
        mask = torch.arange(x.shape[2], device=x.device) < lengths[:, None]
        x = self.project(x.transpose(1, 2).flatten(2))
        for block in self.blocks:
            x = block(x, mask)
        return self.head(x).log_softmax(2).transpose(0, 1)


def conformer_ctc(change):
    """Train a Conformer on utterances of 4 to 14 s that are all padded to 20 s."""
    rng = np.random.default_rng(2)
    torch.manual_seed(2)
    rate, mels, letters, batch = 16_000, size(80, 16), 29, size(16, 3)
    longest = size(20 * rate, 6400)
    samples = rng.integers(int(longest * 0.2), int(longest * 0.7), size(192, 12))
    waves = [rng.standard_normal(n).astype(np.float32) * 0.1 for n in samples]
    texts = [rng.integers(1, letters, max(1, n * 10 // rate)) for n in samples]

    if change == "tf32":
        use_tf32()
    model = Conformer(mels, size(384, 16), size(8, 2), size(6, 2), letters, change == "sdpa").to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: min((n + 1) / 1000, (1000 / (n + 1)) ** 0.5))
    window, filters = torch.hann_window(400, device=device), mel_filters(201, mels).to(device)
    log = []

    def draw_masks(frames):
        """SpecAugment: from and to of two frequency masks and two time masks, [batch, 2, 2] each."""
        low = rng.integers(0, mels - mels // 5, (len(frames), 2))
        first = (rng.random((len(frames), 2)) * 0.9 * frames[:, None]).astype(np.int64)
        high = low + rng.integers(0, mels // 5, low.shape)
        last = first + (rng.random(first.shape) * 0.1 * frames[:, None]).astype(np.int64)
        return np.stack([low, high], 2), np.stack([first, last], 2)

    def features_one_by_one(audio, frames, total):
        by_frequency, by_time = draw_masks(frames)
        features = torch.zeros(len(audio), total, mels, device=device)
        for i, n in enumerate(frames.tolist()):
            wave = audio[i, : 400 + 160 * (n - 1)]
            power = torch.stft(wave, 400, 160, window=window, center=False, return_complex=True).abs() ** 2
            x = torch.log(power.T @ filters + 1e-6)
            x = (x - x.mean(0)) / (x.std(0) + 1e-5)
            for low, high in by_frequency[i].tolist():
                x[:, low:high] = 0
            for first, last in by_time[i].tolist():
                x[first:last] = 0
            features[i, :n] = x
        return features

    def features_batched(audio, frames, total):
        spans = [torch.from_numpy(m).to(device)[:, :, :, None] for m in draw_masks(frames)]
        hidden = []
        for span, n in zip(spans, (mels, total), strict=False):
            index = torch.arange(n, device=device)
            hidden.append(((index >= span[:, :, 0]) & (index < span[:, :, 1])).any(1))
        n = torch.from_numpy(frames).to(device)[:, None, None]
        valid = (torch.arange(total, device=device)[:, None] < n).float()
        power = torch.stft(audio, 400, 160, window=window, center=False, return_complex=True).abs() ** 2
        x = torch.log(power.transpose(1, 2) @ filters + 1e-6)
        x = (x - (x * valid).sum(1, keepdim=True) / n) * valid
        x = x / (((x * x).sum(1, keepdim=True) / (n - 1)).sqrt() + 1e-5)
        return x.masked_fill(hidden[0][:, None] | hidden[1][:, :, None], 0)

    features_of = features_batched if change == "batched_features" else features_one_by_one
    source = endless([np.arange(i, i + batch) for i in range(0, len(waves), batch)])

    def step():
        chosen = next(source)
        padded = max(len(waves[i]) for i in chosen) if change == "trim_padding" else longest
        audio = np.zeros((batch, padded), np.float32)
        targets = torch.zeros(batch, max(len(texts[i]) for i in chosen), dtype=torch.long)
        for row, i in enumerate(chosen):
            audio[row, : len(waves[i])] = waves[i]
            targets[row, : len(texts[i])] = torch.from_numpy(texts[i])
        frames = (samples[chosen] - 400) // 160 + 1
        features = features_of(torch.from_numpy(audio).to(device), frames, (padded - 400) // 160 + 1)
        with torch.autocast(device.type, torch.bfloat16, enabled=change == "bf16_autocast"):
            scores = model(features, torch.from_numpy(frames).to(device))
        lengths = torch.from_numpy(((frames + 1) // 2 + 1) // 2)
        loss = F.ctc_loss(
            scores.float(),
            targets.to(device),
            lengths,
            torch.tensor([len(texts[i]) for i in chosen]),
            zero_infinity=True,
        )
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        schedule.step()
        log.append(loss.item())
        return loss.detach()

    return step


# ---------------------------------------------------------------------------------------------------------------------
# 3. Text generation with an own decoder: bf16, grouped-query attention, KV cache, sampling with top-k
# ---------------------------------------------------------------------------------------------------------------------


class RMSNorm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        y = x.float()
        return (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype) * self.weight


def rotate(x, cos, sin):
    """Rotary position embedding."""
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class DecoderBlock(nn.Module):
    """Attention with its cache of keys and values, then SwiGLU."""

    def __init__(self, width, heads, groups, batch, length, sdpa, fused):
        super().__init__()
        self.heads, self.groups, self.sdpa, self.fused = heads, groups, sdpa, fused
        head, hidden = width // heads, width * 3
        self.norm1, self.norm2 = RMSNorm(width), RMSNorm(width)
        self.q = nn.Linear(width, heads * head, bias=False)
        self.k = nn.Linear(width, groups * head, bias=False)
        self.v = nn.Linear(width, groups * head, bias=False)
        self.o = nn.Linear(heads * head, width, bias=False)
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)
        if fused:
            self.qkv_weight = nn.Parameter(torch.cat([self.q.weight.data, self.k.weight.data, self.v.weight.data]))
            self.gate_up_weight = nn.Parameter(torch.cat([self.gate.weight.data, self.up.weight.data]))
        self.register_buffer("keys", torch.zeros(batch, groups, length, head))
        self.register_buffer("values", torch.zeros(batch, groups, length, head))

    def forward(self, x, positions, end, cos, sin, mask):
        y = self.norm1(x)
        if self.fused:
            parts = [m.out_features for m in (self.q, self.k, self.v)]
            q, k, v = F.linear(y, self.qkv_weight).split(parts, -1)
        else:
            q, k, v = self.q(y), self.k(y), self.v(y)
        q = rotate(q.unflatten(2, (self.heads, -1)).transpose(1, 2), cos, sin)
        k = rotate(k.unflatten(2, (self.groups, -1)).transpose(1, 2), cos, sin)
        v = v.unflatten(2, (self.groups, -1)).transpose(1, 2)
        self.keys.index_copy_(2, positions, k)
        self.values.index_copy_(2, positions, v)
        k, v = self.keys[:, :, :end], self.values[:, :, :end]
        if self.sdpa:
            # Either the whole prompt, or one token that sees all of the cache.
            y = F.scaled_dot_product_attention(q, k, v, is_causal=q.shape[2] > 1, enable_gqa=True)
        else:
            k = k.repeat_interleave(self.heads // self.groups, 1)
            v = v.repeat_interleave(self.heads // self.groups, 1)
            scores = (q @ k.transpose(2, 3)) / math.sqrt(q.shape[3])
            y = scores.float().masked_fill(~mask, float("-inf")).softmax(3).to(v.dtype) @ v
        x = x + self.o(y.transpose(1, 2).flatten(2))
        y = self.norm2(x)
        gate, up = F.linear(y, self.gate_up_weight).chunk(2, -1) if self.fused else (self.gate(y), self.up(y))
        return x + self.down(F.silu(gate) * up)


class Decoder(nn.Module):
    def __init__(self, words, width, layers, heads, groups, batch, length, sdpa, fused):
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(
            DecoderBlock(width, heads, groups, batch, length, sdpa, fused) for _ in range(layers)
        )
        self.norm, self.head = RMSNorm(width), nn.Linear(width, words, bias=False)
        half = width // heads // 2
        angles = torch.arange(length)[:, None] * 10_000 ** (-torch.arange(half) / half)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def forward(self, tokens, positions, end):
        """Logits after the last of `tokens`, which stand at `positions`; attention sees the cache up to `end`."""
        cos, sin = self.cos[positions], self.sin[positions]
        mask = torch.arange(end, device=tokens.device) <= positions[:, None]
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, positions, end, cos, sin, mask)
        return self.head(self.norm(x[:, -1])).float()


def prompt_completions(change):
    """Answer a batch of prompts: read the prompts, then sample token by token."""
    torch.manual_seed(3)
    batch, prompt, new, words = size(16, 2), size(128, 6), size(24, 4), size(32_000, 50)
    length, eos, temperature, top_k = prompt + new, 2, 0.8, size(50, 5)
    model = Decoder(
        words,
        size(1024, 16),
        size(12, 2),
        size(16, 4),
        size(4, 2),
        batch,
        length,
        change == "sdpa_gqa",
        change == "fused_projections",
    )
    model = model.to(device, torch.bfloat16 if device.type == "cuda" else torch.float32).eval()
    rng = np.random.default_rng(3)
    prompts = rng.integers(3, words, (32, batch, prompt))
    # Drawn once and used for each request, so that the variants sample the same (in bf16: until a rounding tips one).
    noise = torch.empty(new, batch, words, device=device).exponential_()
    decoder = compiled(model, dynamic=False) if change == "compile_decode" else model
    static = change in ("cuda_graph", "compile_decode")  # both need the same shapes at each position
    token = torch.zeros(batch, dtype=torch.long, device=device)
    position = torch.full((1,), prompt, device=device)
    number = itertools.count()

    def sample(logits, noise):
        """Sample by temperature and top-k; return also the mean log-probability of what was sampled."""
        logits = logits / temperature
        worst = logits.topk(top_k).values[:, -1:]
        chances = logits.masked_fill(logits < worst, float("-inf")).softmax(1)
        chosen = (chances / noise).argmax(1)
        return chosen, chances.gather(1, chosen[:, None]).log().mean()

    @torch.no_grad()
    def decode(end=length):
        """Sample the next token after `token`, which is replaced by it."""
        logits = decoder(token[:, None], position, end)
        chosen, surprise = sample(logits, noise.index_select(0, position - (prompt - 1))[0])
        token.copy_(chosen)
        position.add_(1)
        return surprise

    if change == "cuda_graph":
        decode = graphed(decode)

    @torch.no_grad()
    def step():
        tokens = torch.from_numpy(prompts[next(number) % len(prompts)]).to(device)
        chosen, surprise = sample(model(tokens, torch.arange(prompt, device=device), prompt), noise[0])
        token.copy_(chosen)
        position.fill_(prompt)
        surprises, answers, kept = [surprise], [token.tolist()], []
        finished = token == eos
        for i in range(1, new):
            surprise = decode() if static else decode(prompt + i)
            surprises.append(surprise.clone())
            finished = finished | (token == eos)
            if change == "late_tokens":
                kept.append(token.clone())
                continue
            answers.append(token.tolist())
            if finished.all():
                break
        if kept:
            answers += torch.stack(kept).tolist()
        return torch.stack(surprises)

    return step


# ---------------------------------------------------------------------------------------------------------------------
# 4. Self-supervised images: BYOL with a ResNet-18
# ---------------------------------------------------------------------------------------------------------------------


def augment(images, chance, crop):
    """Two-view augmentation of images [n, 3, h, w] in 0..1 with random numbers [n, 10] in 0..1: crop and resize,
    flip, brightness, contrast, saturation, greyscale, blur, normalise."""
    r = chance[:, :, None, None, None]
    scale = 0.3 + 0.7 * chance[:, 0]
    affine = torch.zeros(len(images), 2, 3, device=images.device)
    affine[:, 0, 0] = torch.where(chance[:, 1] < 0.5, -scale, scale)
    affine[:, 1, 1] = scale
    affine[:, 0, 2] = (2 * chance[:, 2] - 1) * (1 - scale)
    affine[:, 1, 2] = (2 * chance[:, 3] - 1) * (1 - scale)
    grid = F.affine_grid(affine, (len(images), 3, crop, crop), align_corners=False)
    x = F.grid_sample(images, grid, align_corners=False)
    x = x * (0.6 + 0.8 * r[:, 4])
    mean = x.mean((1, 2, 3), keepdim=True)
    x = mean + (x - mean) * (0.6 + 0.8 * r[:, 5])
    grey = (x * torch.tensor([0.299, 0.587, 0.114], device=x.device)[:, None, None]).sum(1, keepdim=True)
    x = grey + (x - grey) * (0.6 + 0.8 * r[:, 6])
    x = torch.where(r[:, 7] < 0.2, grey, x)
    taps = torch.arange(-4, 5, device=x.device)
    kernel = torch.exp(-0.5 * (taps / (0.1 + 1.9 * chance[:, 8:9])) ** 2)
    kernel = (kernel / kernel.sum(1, keepdim=True)).repeat_interleave(3, 0)
    y = x.flatten(0, 1)[None]
    y = F.conv2d(y, kernel[:, None, None], padding=(0, 4), groups=y.shape[1])
    y = F.conv2d(y, kernel[:, None, :, None], padding=(4, 0), groups=y.shape[1])
    x = torch.where(r[:, 9] < 0.5, y[0].unflatten(0, (-1, 3)), x)
    return (x.clamp(0, 1) - 0.45) / 0.25


class Views(Dataset):
    """Two augmented views of each image, or the image and the random numbers for both."""

    def __init__(self, images, crop, raw):
        self.images, self.crop, self.raw = images, crop, raw

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        # The random numbers depend on the image only, so that workers and the main process augment the same.
        chance = torch.from_numpy(np.random.default_rng(index).random((2, 10), np.float32))
        image = torch.from_numpy(self.images[index]).permute(2, 0, 1)
        if self.raw:
            return image, chance
        image = image.float()[None] / 255
        return [augment(image, chance[i : i + 1], self.crop)[0] for i in range(2)]


class BasicBlock(nn.Module):
    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(outputs), nn.BatchNorm2d(outputs)
        self.skip = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.skip = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x):
        y = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        return F.relu(y + self.skip(x))


def projector(inputs, hidden, outputs):
    return nn.Sequential(nn.Linear(inputs, hidden), nn.BatchNorm1d(hidden), nn.ReLU(), nn.Linear(hidden, outputs))


def resnet18(width, hidden, outputs):
    layers = [nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    inputs = width
    for stage in range(4):
        for block in range(2):
            outputs_here = width * 2**stage
            layers.append(BasicBlock(inputs, outputs_here, 2 if stage and not block else 1))
            inputs = outputs_here
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), projector(inputs, hidden, outputs))


def byol_images(change):
    """Train BYOL; the images are augmented where the DataLoader loads them."""
    torch.manual_seed(4)
    rng = np.random.default_rng(4)
    side, crop, batch = size(96, 40), size(64, 32), size(32, 4)
    images = rng.integers(0, 256, (size(2048, 16), side, side, 3), dtype=np.uint8)
    workers = 2 if change == "two_workers" else 0
    loader = DataLoader(
        Views(images, crop, change == "augment_on_device"),
        batch,
        drop_last=True,
        num_workers=workers,
        persistent_workers=workers > 0,
        multiprocessing_context="fork" if workers else None,
    )
    batches = endless(loader)
    batches = itertools.chain([next(batches)], batches)  # starts the workers before CUDA

    torch.manual_seed(4)
    online = resnet18(size(64, 8), size(2048, 16), size(256, 8)).to(device)
    predictor = projector(size(256, 8), size(2048, 16), size(256, 8)).to(device)
    if change == "channels_last":
        online = online.to(memory_format=torch.channels_last)
    target = copy.deepcopy(online).requires_grad_(False)
    weights = [*online.parameters(), *predictor.parameters()]
    optimizer = torch.optim.SGD(weights, lr=0.05, momentum=0.9, weight_decay=1e-4)
    log, number = [], itertools.count()

    def views_of(loaded):
        if change != "augment_on_device":
            return [view.to(device) for view in loaded]
        raw, chance = loaded[0].to(device).float() / 255, loaded[1].to(device)
        return [augment(raw, chance[:, i], crop) for i in range(2)]

    def distance(predicted, wanted):
        return 2 - 2 * F.cosine_similarity(predicted.float(), wanted.float(), dim=1).mean()

    @torch.no_grad()
    def update_target(momentum):
        if change == "foreach_ema":
            torch._foreach_lerp_(list(target.parameters()), list(online.parameters()), 1 - momentum)
            return
        for old, new in zip(target.parameters(), online.parameters(), strict=False):
            old.data = old.data * momentum + new.data * (1 - momentum)

    def step():
        first, second = views_of(next(batches))
        if change == "channels_last":
            first, second = (view.contiguous(memory_format=torch.channels_last) for view in (first, second))
        with torch.autocast(device.type, torch.bfloat16, enabled=change == "bf16_autocast"):
            with torch.no_grad():
                wanted1, wanted2 = target(first), target(second)
            loss = distance(predictor(online(first)), wanted2) + distance(predictor(online(second)), wanted1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        update_target(1 - 0.004 * (math.cos(math.pi * next(number) / 10_000) + 1) / 2)
        log.append(loss.item())
        return loss.detach()

    return step


# ---------------------------------------------------------------------------------------------------------------------
# 5. Neural surface: signed distance and colour networks fitted to images by volume rendering
# ---------------------------------------------------------------------------------------------------------------------


def encode(x, octaves):
    """Sines and cosines of the coordinates in several frequencies."""
    parts = [x]
    for i in range(octaves):
        parts += [torch.sin(x * 2**i), torch.cos(x * 2**i)]
    return torch.cat(parts, -1)


class Surface(nn.Module):
    """Signed distance by an MLP with a skip connection, colour by a second MLP, density as in VolSDF."""

    def __init__(self, width):
        super().__init__()
        inputs = 3 * (1 + 2 * 6)
        self.layers = nn.ModuleList(
            nn.Linear(inputs if i == 0 else width + inputs if i == 4 else width, width) for i in range(8)
        )
        self.distance = nn.Linear(width, 1 + width)
        self.colour = nn.Sequential(
            nn.Linear(width + 3 + 3 * 9 + 3, width),
            nn.ReLU(),
            nn.Linear(width, width),
            nn.ReLU(),
            nn.Linear(width, width),
            nn.ReLU(),
            nn.Linear(width, 3),
            nn.Sigmoid(),
        )
        self.sharpness = nn.Parameter(torch.tensor(0.1))

    def geometry(self, points):
        inputs = encode(points, 6)
        x = inputs
        for i, layer in enumerate(self.layers):
            x = F.softplus(layer(torch.cat([x, inputs], -1) if i == 4 else x), beta=100)
        x = self.distance(x)
        return x[:, :1] + points.norm(dim=-1, keepdim=True) - 0.5, x[:, 1:]

    def forward(self, origins, directions, jitter):
        """Colours of rays and the gradients of the distance at their samples."""
        rays, samples = jitter.shape
        depth = 0.5 + 3.0 * (torch.arange(samples, device=jitter.device) + jitter) / samples
        points = (origins[:, None] + depth[:, :, None] * directions[:, None]).flatten(0, 1).requires_grad_()
        distance, features = self.geometry(points)
        (normals,) = torch.autograd.grad(distance, points, torch.ones_like(distance), create_graph=True)
        views = directions[:, None].expand(rays, samples, 3).flatten(0, 1)
        colours = self.colour(torch.cat([points, encode(views, 4), normals, features], -1))
        beta = self.sharpness.abs() + 1e-3
        signed = distance.view(rays, samples)
        density = (0.5 - 0.5 * signed.sign() * (1 - torch.exp(-signed.abs() / beta))) / beta
        alpha = 1 - torch.exp(-density * 3.0 / samples)
        through = torch.cumprod(torch.cat([torch.ones_like(alpha[:, :1]), 1 - alpha + 1e-7], 1), 1)[:, :-1]
        return ((alpha * through)[:, :, None] * colours.view(rays, samples, 3)).sum(1), normals


def surface_rendering(change):
    """Fit a surface to photos: in each step random pixels of one photo, colour loss and eikonal loss."""
    torch.manual_seed(5)
    rng = np.random.default_rng(5)
    np.random.seed(5)
    photos, side, rays, samples = size(12, 3), size(800, 20), size(1024, 16), size(64, 8)
    images = rng.random((photos, side, side, 3), np.float32)
    poses = []
    for angle in np.linspace(0, 2 * np.pi, photos, endpoint=False):
        c, s = np.cos(angle), np.sin(angle)
        poses.append(np.array([[c, 0, s, 2 * s], [0, 1, 0, 0], [-s, 0, c, 2 * c]], np.float32))

    if change == "tf32":
        use_tf32()
    model = Surface(size(256, 16)).to(device)
    graph = change == "cuda_graph" and device.type == "cuda"
    fused = change == "fused_adam"
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-4, capturable=graph, fused=fused or None)
    log = []

    def get_rays(i, j, pose):
        """Origins and directions of the rays through pixels in row i and column j."""
        focal = side * 1.2
        local = torch.stack([(j - side / 2) / focal, -(i - side / 2) / focal, -torch.ones_like(i)], -1)
        directions = F.normalize((local[..., None, :] * pose[:, :3]).sum(-1), dim=-1)
        return pose[:, 3].expand(directions.shape), directions

    def choose():
        if change == "cheap_choice":
            # Draws other pixels than base: np.random.choice without replacement shuffles all pixels of the photo.
            return np.random.randint(0, side * side, rays)
        return np.random.choice(side * side, rays, replace=False)

    def batch():
        photo = int(rng.integers(photos))
        pose = torch.from_numpy(poses[photo]).to(device)
        chosen = choose()
        if change == "rays_of_pixels":
            i, j = (torch.from_numpy(k.astype(np.float32)).to(device) for k in np.divmod(chosen, side))
            origins, directions = get_rays(i, j, pose)
            return origins, directions, torch.from_numpy(images[photo].reshape(-1, 3)[chosen]).to(device)
        line = torch.arange(side, dtype=torch.float32, device=device)
        origins, directions = get_rays(*torch.meshgrid(line, line, indexing="ij"), pose)
        picture = torch.from_numpy(images[photo]).to(device)
        chosen = torch.from_numpy(chosen).to(device)
        return [x.reshape(-1, 3)[chosen] for x in (origins, directions, picture)]

    def train(origins, directions, wanted, jitter):
        rendered, normals = model(origins, directions, jitter)
        loss = F.l1_loss(rendered, wanted) + 0.1 * ((normals.norm(dim=-1) - 1) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    if change == "cuda_graph":
        held = [torch.rand(rays, 3, device=device) for _ in range(3)] + [torch.rand(rays, samples, device=device)]
        replay = graphed_training(lambda: train(*held), [model], [optimizer])
    torch.manual_seed(55)

    def step():
        data = [*batch(), torch.rand(rays, samples, device=device)]
        if change == "cuda_graph":
            for old, new in zip(held, data, strict=False):
                old.copy_(new)
            loss = replay().clone()
        else:
            loss = train(*data)
        log.append(loss.item())
        return loss

    return step


# ---------------------------------------------------------------------------------------------------------------------
# 6. Tabular: cross-validation of small MLPs over five folds and three learning rates
# ---------------------------------------------------------------------------------------------------------------------


class FoldSampler(Sampler):
    """Shuffles the training rows of one fold in each epoch."""

    def __init__(self, rows, seed):
        self.rows, self.rng = rows, np.random.default_rng(seed)

    def __len__(self):
        return len(self.rows)

    def __iter__(self):
        return iter(self.rng.permutation(self.rows).tolist())


class StackedMLPs:
    """MLPs of the same shape trained together: each layer a batched product, clipping and AdamW per model."""

    def __init__(self, models, rates, decay):
        layers = [[m for m in model if isinstance(m, nn.Linear)] for model in models]
        self.weights = []
        for same in zip(*layers, strict=False):
            self.weights.append(torch.stack([layer.weight.detach().T for layer in same]).requires_grad_())
            self.weights.append(torch.stack([layer.bias.detach() for layer in same])[:, None].requires_grad_())
        self.rates, self.decay, self.steps = torch.tensor(rates, device=device)[:, None, None], decay, 0
        self.means = [torch.zeros_like(w) for w in self.weights]
        self.squares = [torch.zeros_like(w) for w in self.weights]

    def train(self, x, y):
        for i in range(0, len(self.weights), 2):
            x = torch.baddbmm(self.weights[i + 1], x, self.weights[i])
            x = F.silu(x) if i < len(self.weights) - 2 else x
        losses = ((x[:, :, 0] - y) ** 2).mean(1)
        grads = torch.autograd.grad(losses.sum(), self.weights)
        with torch.no_grad():
            norm = torch.stack([(g * g).sum((1, 2)) for g in grads]).sum(0).sqrt()
            scale = (1.0 / (norm + 1e-6)).clamp(max=1)[:, None, None]
            grads = [g * scale for g in grads]
            self.steps += 1
            torch._foreach_lerp_(self.means, grads, 0.1)
            torch._foreach_mul_(self.squares, 0.999)
            torch._foreach_addcmul_(self.squares, grads, grads, 0.001)
            roots = torch._foreach_sqrt(self.squares)
            torch._foreach_div_(roots, math.sqrt(1 - 0.999**self.steps))
            torch._foreach_add_(roots, 1e-8)
            moves = torch._foreach_div(self.means, roots)
            rate, keep = self.rates / (1 - 0.9**self.steps), 1 - self.rates * self.decay
            for weight, move in zip(self.weights, moves, strict=False):
                weight.mul_(keep).sub_(move * rate)
        return losses.detach()


def cross_validation(change):
    """One minibatch for each of 15 models: five folds, three learning rates."""
    torch.manual_seed(6)
    rng = np.random.default_rng(6)
    rows, columns, batch, width, folds = size(40_000, 200), size(60, 6), size(256, 8), size(192, 8), 5
    rates, decay = [3e-4, 1e-3, 3e-3], 1e-2
    x = torch.from_numpy(rng.standard_normal((rows, columns)).astype(np.float32))
    y = torch.sin(x[:, 0]) + x[:, 1] * x[:, 2] + 0.1 * torch.from_numpy(rng.standard_normal(rows).astype(np.float32))
    fold_of = rng.integers(0, folds, rows)
    samplers = [FoldSampler(np.flatnonzero(fold_of != f), f) for f in range(folds)]

    def mlp():
        return nn.Sequential(
            nn.Linear(columns, width),
            nn.SiLU(),
            nn.Linear(width, width),
            nn.SiLU(),
            nn.Linear(width, width),
            nn.SiLU(),
            nn.Linear(width, 1),
        ).to(device)

    models = [[mlp() for _ in rates] for _ in range(folds)]
    flat = [model for of_fold in models for model in of_fold]
    capturable = change == "cuda_graph" and device.type == "cuda"
    optimizers = [
        [
            torch.optim.AdamW(
                model.parameters(),
                lr=rate,
                weight_decay=decay,
                capturable=capturable,
                fused=True if change == "fused_adamw" else None,
            )
            for model, rate in zip(of_fold, rates, strict=False)
        ]
        for of_fold in models
    ]
    if change == "indexed_batches":
        x_there, y_there = x.to(device), y.to(device)

        def fold_batches(sampler):
            while True:
                order = torch.tensor(list(sampler), device=device)
                for chosen in order[: len(order) // batch * batch].split(batch):
                    yield x_there[chosen], y_there[chosen]

        loaders = [fold_batches(sampler) for sampler in samplers]
    else:
        data = TensorDataset(x, y)
        loaders = [endless(DataLoader(data, batch, sampler=sampler, drop_last=True)) for sampler in samplers]
    history = []

    def train_one(model, optimizer, features, wanted):
        loss = F.mse_loss(model(features)[:, 0], wanted)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.detach()

    def step():
        losses, logged = [], []
        for loader, of_fold, theirs in zip(loaders, models, optimizers, strict=False):
            features, wanted = (part.to(device) for part in next(loader))
            for model, optimizer in zip(of_fold, theirs, strict=False):
                loss = train_one(model, optimizer, features, wanted)
                losses.append(loss)
                if change != "late_item":
                    logged.append(loss.item())
        losses = torch.stack(losses)
        history.append(losses.tolist() if change == "late_item" else logged)
        return losses

    held = [(torch.zeros(batch, columns, device=device), torch.zeros(batch, device=device)) for _ in range(folds)]

    def train_all():
        return torch.stack(
            [
                train_one(model, optimizer, *held[f])
                for f in range(folds)
                for model, optimizer in zip(models[f], optimizers[f], strict=False)
            ]
        )

    if change == "cuda_graph":
        replay = graphed_training(train_all, flat, [o for theirs in optimizers for o in theirs])

    def step_graph():
        for loader, buffers in zip(loaders, held, strict=False):
            for old, new in zip(buffers, next(loader), strict=False):
                old.copy_(new)
        losses = replay().clone()
        history.append(losses.tolist())
        return losses

    if change == "stacked_models":
        stack = StackedMLPs(flat, rates * folds, decay)

    def step_stacked():
        loaded = [next(loader) for loader in loaders]
        features, wanted = (
            torch.stack(parts).to(device).repeat_interleave(len(rates), 0) for parts in zip(*loaded, strict=False)
        )
        losses = stack.train(features, wanted)
        history.append(losses.tolist())
        return losses

    return {"cuda_graph": step_graph, "stacked_models": step_stacked}.get(change, step)


PROGRAMS = {
    mmoe_recommender: {"index_select": "index_select", "sparse_gradients": "sparse_gradients",
                       "one_table": "larger_batch", "tf32": "tf32",
                       "stacked_experts": "larger_batch", "auc_on_device": "python"},
    conformer_ctc: {"bf16_autocast": "half_precision", "trim_padding": "trim_padding", "tf32": "tf32",
                    "sdpa": "fused_attention", "batched_features": "larger_batch"},
    prompt_completions: {"cuda_graph": "static_cache", "compile_decode": "fuse_pointwise", "late_tokens": "remove_sync",
                         "sdpa_gqa": "fused_attention", "fused_projections": ""},
    byol_images: {"augment_on_device": "data_loader", "two_workers": "data_loader", "bf16_autocast": "half_precision",
                  "channels_last": "channels_last", "foreach_ema": "update_graph"},
    surface_rendering: {"cheap_choice": "python", "tf32": "tf32", "rays_of_pixels": "", "cuda_graph": "cuda_graph",
                        "fused_adam": "fused_optimizer"},
    cross_validation: {"stacked_models": "larger_batch", "cuda_graph": "cuda_graph", "indexed_batches": "data_loader",
                       "fused_adamw": "fused_optimizer", "late_item": "remove_sync"},
}  # fmt: skip
