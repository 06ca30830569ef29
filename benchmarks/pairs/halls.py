"""Programs of halls: learning from speech without texts, and masks for the clicks of many users."""

import math

import numpy as np
import torch
import torch.nn.functional as F
from setting import bf16, compiled, device, endless, graphed, size, use_tf32
from torch import nn
from torch.utils.data import DataLoader


class WaveEncoder(nn.Module):
    """The strided convolutions that turn 16 kHz samples into frames of 20 ms."""

    def __init__(self, width):
        super().__init__()
        self.shape = [(10, 5), (3, 2), (3, 2), (3, 2), (3, 2), (2, 2), (2, 2)]
        layers, channels = [], 1
        for number, (kernel, stride) in enumerate(self.shape):
            layers.append(nn.Conv1d(channels, width, kernel, stride, bias=False))
            if number == 0:
                layers.append(nn.GroupNorm(width, width))
            layers.append(nn.GELU())
            channels = width
        self.layers = nn.Sequential(*layers)

    def frames(self, samples):
        """Return the number of frames of a recording."""
        for kernel, stride in self.shape:
            samples = (samples - kernel) // stride + 1
        return samples

    def forward(self, waves):
        return self.layers(waves.unsqueeze(1)).transpose(1, 2)


class SpeechAttention(nn.Module):
    """Self-attention over all frames."""

    def __init__(self, dim, heads, use_sdpa):
        super().__init__()
        self.heads, self.use_sdpa = heads, use_sdpa
        self.query, self.key, self.value, self.out = (nn.Linear(dim, dim) for _ in range(4))
        self.dropout = nn.Dropout(0.1)

    def forward(self, x):
        batch, frames, dim = x.shape
        q, k, v = (
            layer(x).view(batch, frames, self.heads, dim // self.heads).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        if self.use_sdpa:
            mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=0.1 if self.training else 0.0)
        else:
            scores = torch.matmul(q, k.transpose(-1, -2)) / math.sqrt(dim // self.heads)
            mixed = torch.matmul(self.dropout(torch.softmax(scores, dim=-1)), v)
        return self.out(mixed.transpose(1, 2).reshape(batch, frames, dim))


class SpeechLayer(nn.Module):
    """A transformer layer with the norms after the sums."""

    def __init__(self, dim, heads, use_sdpa):
        super().__init__()
        self.attention = SpeechAttention(dim, heads, use_sdpa)
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.feed = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Dropout(0.1), nn.Linear(4 * dim, dim))
        self.dropout = nn.Dropout(0.1)

    def forward(self, x):
        x = self.norm1(x + self.dropout(self.attention(x)))
        return self.norm2(x + self.dropout(self.feed(x)))


class SpeechTransformer(nn.Module):
    """Convolutional positions and the transformer layers."""

    def __init__(self, dim, heads, depth, use_sdpa):
        super().__init__()
        position = nn.Conv1d(dim, dim, 128, padding=64, groups=16)
        self.position = nn.utils.parametrizations.weight_norm(position, dim=2)
        self.norm = nn.LayerNorm(dim)
        self.layers = nn.ModuleList(SpeechLayer(dim, heads, use_sdpa) for _ in range(depth))

    def forward(self, x):
        x = self.norm(x + F.gelu(self.position(x.transpose(1, 2))[..., :-1]).transpose(1, 2))
        for layer in self.layers:
            x = layer(x)
        return x


class GumbelQuantizer(nn.Module):
    """Product quantization: one of `codes` vectors of each of two groups."""

    def __init__(self, dim_in, dim_out, groups=2, codes=320):
        super().__init__()
        self.groups, self.codes = groups, codes
        self.logits = nn.Linear(dim_in, groups * codes)
        self.vectors = nn.Parameter(torch.rand(1, groups * codes, dim_out // groups))

    def forward(self, x):
        batch, frames, _ = x.shape
        logits = self.logits(x).float().view(batch * frames * self.groups, self.codes)
        chosen = F.gumbel_softmax(logits, tau=2.0, hard=True)
        probabilities = torch.softmax(logits.view(batch * frames, self.groups, self.codes), dim=-1)
        product = chosen.view(batch * frames, -1).unsqueeze(-1) * self.vectors
        quantized = product.view(batch * frames, self.groups, self.codes, -1).sum(-2).view(batch, frames, -1)
        return quantized, chosen.argmax(-1).view(batch, frames, self.groups), probabilities


class SpeechPretrainer(nn.Module):
    """Encoder, transformer and quantizer, with the contrastive loss."""

    def __init__(self, width, dim, heads, depth, code_dim, change):
        super().__init__()
        self.change = change
        self.encoder = WaveEncoder(width)
        self.norm, self.project_in = nn.LayerNorm(width), nn.Linear(width, dim)
        self.mask_vector = nn.Parameter(torch.rand(dim))
        self.transformer = SpeechTransformer(dim, heads, depth, change == "attention_sdpa")
        self.quantizer = GumbelQuantizer(width, code_dim)
        self.project_context, self.project_codes = nn.Linear(dim, code_dim), nn.Linear(code_dim, code_dim)

    def forward(self, waves, mask, negatives):
        features = self.norm(self.encoder(waves))
        hidden = self.project_in(features)
        hidden[mask] = self.mask_vector.to(hidden.dtype)
        context = self.project_context(self.transformer(hidden))
        quantized, codes, probabilities = self.quantizer(features)
        quantized = self.project_codes(quantized)
        if self.change == "negatives_by_matmul":
            logits = self.all_pairs(context.float(), quantized.float(), codes, negatives)
        else:
            logits = self.sampled_pairs(context.float(), quantized.float(), negatives)
        targets = torch.where(mask, 0, -100).flatten()
        contrastive = F.cross_entropy(logits.float(), targets, reduction="sum") / mask.sum()
        average = probabilities[mask.flatten()].mean(0)
        perplexity = torch.exp(-(average * torch.log(average + 1e-7)).sum(-1)).sum()
        total = self.quantizer.groups * self.quantizer.codes
        return contrastive + 0.1 * (total - perplexity) / total

    def sampled_pairs(self, context, quantized, negatives):
        """Return logits of the true code and the sampled negatives: (frames of all recordings, 1 + negatives)."""
        batch, frames, dim = quantized.shape
        offsets = torch.arange(batch, device=negatives.device)[:, None, None] * frames
        chosen, codes = (negatives + offsets).view(-1), quantized.view(-1, dim)
        others = codes.index_select(0, chosen) if self.change == "index_select" else codes[chosen]
        others = others.view(batch, frames, -1, dim).permute(2, 0, 1, 3)
        same = (quantized == others).all(-1)
        candidates = torch.cat([quantized[None], others], dim=0)
        logits = torch.cosine_similarity(context[None], candidates, dim=-1) / 0.1
        logits[1:][same] = float("-inf")
        return logits.permute(1, 2, 0).reshape(batch * frames, -1)

    def all_pairs(self, context, quantized, codes, negatives):
        """Return the same logits, from the similarities of all pairs of frames of a recording."""
        batch, frames, _ = quantized.shape
        similar = F.normalize(context, dim=-1) @ F.normalize(quantized, dim=-1).transpose(1, 2) / 0.1
        number = codes[..., 0] * self.quantizer.codes + codes[..., 1]
        other = number.gather(1, negatives.view(batch, -1)).view_as(negatives)
        wrong = similar.gather(2, negatives).masked_fill(other == number[..., None], float("-inf"))
        right = similar.diagonal(dim1=1, dim2=2)[..., None]
        return torch.cat([right, wrong], dim=-1).view(batch * frames, -1)


def mask_and_negatives(frames, count, rng):
    """Return a mask of spans of ten frames, and for each masked frame other masked frames of the recording."""
    mask = np.zeros(frames, dtype=bool)
    spans = max(1, int(0.65 * frames / 10))
    for start in rng.choice(frames - 10, spans, replace=False):
        mask[start : start + 10] = True
    masked = np.flatnonzero(mask)
    drawn = rng.integers(0, len(masked) - 1, size=(len(masked), count))
    drawn[drawn >= np.arange(len(masked))[:, None]] += 1
    negatives = np.zeros((frames, count), dtype=np.int64)
    negatives[masked] = masked[drawn]
    return mask, negatives


def speech_pretraining(change):
    """A wav2vec-2.0-like model of the base size is pre-trained on eight recordings of ten seconds per step."""
    if change == "tf32_matmul":
        use_tf32()
    rng = np.random.default_rng(0)
    samples, batch = size(160_000, 16_000), size(8, 2)
    recordings = [
        torch.from_numpy(rng.standard_normal(samples, dtype=np.float32)) * 0.1 + 0.02 for _ in range(size(64, 4))
    ]
    model = SpeechPretrainer(size(512, 32), size(768, 32), size(12, 2), size(12, 2), size(256, 16), change)
    frames = model.encoder.frames(samples)

    def collate(waves):
        waves = torch.stack([(wave - wave.mean()) / torch.sqrt(wave.var() + 1e-7) for wave in waves])
        masks, negatives = zip(*(mask_and_negatives(frames, size(100, 10), rng) for _ in waves), strict=True)
        return waves, torch.from_numpy(np.stack(masks)), torch.from_numpy(np.stack(negatives))

    batches = endless(DataLoader(recordings, batch_size=batch, shuffle=True, drop_last=True, collate_fn=collate))
    model.to(device).train()
    if change == "compile_transformer":
        model.transformer = compiled(model.transformer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-5, betas=(0.9, 0.98), weight_decay=0.01)
    history = []

    def step():
        waves, mask, negatives = (part.to(device) for part in next(batches))
        optimizer.zero_grad()
        with bf16(change == "bf16_autocast"):
            loss = model(waves, mask, negatives)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        history.append(loss.item())
        return loss.detach()

    return step


class WindowAttention(nn.Module):
    """Self-attention over a grid of tokens with decomposed relative positions."""

    def __init__(self, dim, heads, side):
        super().__init__()
        self.heads, self.scale = heads, (dim // heads) ** -0.5
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)
        self.rel_h = nn.Parameter(torch.randn(2 * side - 1, dim // heads) * 0.02)
        self.rel_w = nn.Parameter(torch.randn(2 * side - 1, dim // heads) * 0.02)

    @staticmethod
    def relative(table, side):
        places = torch.arange(side, device=table.device)
        return table[places[:, None] - places[None, :] + side - 1]

    def forward(self, x):
        batch, height, width, dim = x.shape
        qkv = self.qkv(x).reshape(batch, height * width, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.reshape(3, batch * self.heads, height * width, -1).unbind(0)
        scores = (q * self.scale) @ k.transpose(-2, -1)
        grid = q.reshape(-1, height, width, dim // self.heads)
        rel_h = torch.einsum("bhwc,hkc->bhwk", grid, self.relative(self.rel_h, height))
        rel_w = torch.einsum("bhwc,wkc->bhwk", grid, self.relative(self.rel_w, width))
        scores = scores.view(-1, height, width, height, width)
        scores = (scores + rel_h[..., :, None] + rel_w[..., None, :]).view(-1, height * width, height * width)
        x = (scores.softmax(dim=-1) @ v).view(batch, self.heads, height, width, -1)
        return self.out(x.permute(0, 2, 3, 1, 4).reshape(batch, height, width, dim))


class ViTBlock(nn.Module):
    """A transformer block that attends within windows, or over the whole grid if window is 0."""

    def __init__(self, dim, heads, grid, window):
        super().__init__()
        self.window = window
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attention = WindowAttention(dim, heads, window or grid)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x):
        shortcut, x = x, self.norm1(x)
        if self.window:
            batch, height, width, dim = x.shape
            pad = -height % self.window
            x = F.pad(x, (0, 0, 0, pad, 0, pad))
            count = (height + pad) // self.window
            x = x.view(batch, count, self.window, count, self.window, dim).transpose(2, 3)
            x = self.attention(x.reshape(-1, self.window, self.window, dim))
            x = x.view(batch, count, count, self.window, self.window, dim).transpose(2, 3)
            x = x.reshape(batch, height + pad, width + pad, dim)[:, :height, :width]
        else:
            x = self.attention(x)
        x = shortcut + x
        return x + self.mlp(self.norm2(x))


class LayerNorm2d(nn.LayerNorm):
    """Layer norm over the channels of NCHW images."""

    def forward(self, x):
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class SegmentEncoder(nn.Module):
    """ViT image encoder with a convolutional neck."""

    def __init__(self, grid, dim, depth, heads, window):
        super().__init__()
        self.patches = nn.Conv2d(3, dim, 16, stride=16)
        self.position = nn.Parameter(torch.randn(1, grid, grid, dim) * 0.02)
        every = max(depth // 4, 1)
        self.blocks = nn.ModuleList(
            ViTBlock(dim, heads, grid, 0 if (i + 1) % every == 0 else window) for i in range(depth)
        )
        self.neck = nn.Sequential(
            nn.Conv2d(dim, 256, 1, bias=False), LayerNorm2d(256),
            nn.Conv2d(256, 256, 3, padding=1, bias=False), LayerNorm2d(256),
        )  # fmt: skip

    def forward(self, image):
        x = self.patches(image).permute(0, 2, 3, 1) + self.position
        for block in self.blocks:
            x = block(x)
        return self.neck(x.permute(0, 3, 1, 2))


class PromptAttention(nn.Module):
    """Multi-head attention whose inner width may be smaller."""

    def __init__(self, dim, inner, heads=8):
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v = nn.Linear(dim, inner), nn.Linear(dim, inner), nn.Linear(dim, inner)
        self.out = nn.Linear(inner, dim)

    def forward(self, q, k, v):
        q, k, v = (
            layer(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for layer, x in ((self.q, q), (self.k, k), (self.v, v))
        )
        weights = (q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])).softmax(dim=-1)
        return self.out((weights @ v).transpose(1, 2).flatten(2))


class TwoWayBlock(nn.Module):
    """Lets the prompt's tokens look at the image and the image look at the tokens."""

    def __init__(self, dim):
        super().__init__()
        self.self_attention = PromptAttention(dim, dim)
        self.to_image, self.to_tokens = PromptAttention(dim, dim // 2), PromptAttention(dim, dim // 2)
        self.mlp = nn.Sequential(nn.Linear(dim, 8 * dim), nn.ReLU(), nn.Linear(8 * dim, dim))
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(4))

    def forward(self, tokens, image, token_position, image_position):
        q = tokens + token_position
        tokens = self.norms[0](tokens + self.self_attention(q, q, tokens))
        q, k = tokens + token_position, image + image_position
        tokens = self.norms[1](tokens + self.to_image(q, k, image))
        tokens = self.norms[2](tokens + self.mlp(tokens))
        q = tokens + token_position
        return tokens, self.norms[3](image + self.to_tokens(k, q, tokens))


class MaskDecoder(nn.Module):
    """Encodes labelled points (-1 none, 0/1 clicks, 2/3 corners of a box) and decodes three masks for them."""

    def __init__(self, side, dim=256, masks=4):
        super().__init__()
        self.side, self.masks = side, masks
        self.register_buffer("gaussian", torch.randn(2, dim // 2))
        self.labels = nn.Embedding(5, dim)
        self.no_mask = nn.Embedding(1, dim)
        self.output_tokens = nn.Embedding(1 + masks, dim)
        self.blocks = nn.ModuleList(TwoWayBlock(dim) for _ in range(2))
        self.final, self.norm = PromptAttention(dim, dim // 2), nn.LayerNorm(dim)
        self.upscaling = nn.Sequential(
            nn.ConvTranspose2d(dim, dim // 4, 2, stride=2), LayerNorm2d(dim // 4), nn.GELU(),
            nn.ConvTranspose2d(dim // 4, dim // 8, 2, stride=2), nn.GELU(),
        )  # fmt: skip
        self.hyper = nn.ModuleList(self.head(dim, dim // 8) for _ in range(masks))
        self.quality = self.head(dim, masks)

    @staticmethod
    def head(dim, out):
        return nn.Sequential(nn.Linear(dim, dim), nn.ReLU(), nn.Linear(dim, dim), nn.ReLU(), nn.Linear(dim, out))

    def encode_position(self, coordinates):
        angles = 2 * math.pi * ((2 * coordinates - 1) @ self.gaussian)
        return torch.cat([angles.sin(), angles.cos()], dim=-1)

    def image_position(self, height, width):
        ones = torch.ones(height, width, device=self.gaussian.device)
        y, x = (ones.cumsum(0) - 0.5) / height, (ones.cumsum(1) - 0.5) / width
        return self.encode_position(torch.stack([x, y], dim=-1)).flatten(0, 1)[None]

    def forward(self, embedding, points, labels):
        points = self.encode_position((points + 0.5) / self.side) * (labels >= 0)[..., None]
        prompts = points + self.labels(labels + 1)
        tokens = torch.cat([self.output_tokens.weight.expand(len(prompts), -1, -1), prompts], dim=1)
        batch, (height, width) = len(tokens), embedding.shape[-2:]
        image = torch.repeat_interleave(embedding, batch, dim=0) + self.no_mask.weight.reshape(1, -1, 1, 1)
        image, position = image.flatten(2).transpose(1, 2), self.image_position(height, width)
        queries = tokens
        for block in self.blocks:
            queries, image = block(queries, image, tokens, position)
        queries = self.norm(queries + self.final(queries + tokens, image + position, image))
        upscaled = self.upscaling(image.transpose(1, 2).view(batch, -1, height, width))
        weights = torch.stack([head(queries[:, 1 + i]) for i, head in enumerate(self.hyper)], dim=1)
        masks = (weights @ upscaled.flatten(2)).view(batch, self.masks, *upscaled.shape[-2:])
        return masks[:, 1:], self.quality(queries[:, 0])[:, 1:]


def click_segmentation(change):
    """A server that segments what users click on or frame in an image, and answers with run lengths and boxes."""
    grid = size(64, 6)
    side, height, width = 16 * grid, 12 * grid, 16 * grid
    torch.manual_seed(0)
    encoder = SegmentEncoder(grid, size(768, 48), size(12, 2), size(12, 4), size(14, 4)).eval().to(device)
    decoder = MaskDecoder(side).eval().to(device)
    if change == "channels_last":
        encoder.to(memory_format=torch.channels_last)
        decoder.to(memory_format=torch.channels_last)
    rng = np.random.default_rng(0)
    images = [rng.integers(0, 256, (height, width, 3), dtype=np.uint8) for _ in range(4)]
    mean = torch.tensor([123.675, 116.28, 103.53], device=device).view(-1, 1, 1)
    std = torch.tensor([58.395, 57.12, 57.375], device=device).view(-1, 1, 1)

    def draw_prompt(number):
        """Return four labelled points: a box's corners or up to three clicks, filled up with label -1."""
        count = 2 if number % 3 == 0 else 1 + number % 3
        points = np.zeros((4, 2), np.float32)
        points[:count] = np.sort(rng.uniform(0, height, (count, 2)), axis=0)
        labels = np.full(4, -1)
        labels[:count] = [2, 3] if number % 3 == 0 else rng.integers(0, 2, count)
        return points, labels

    requests = [(image, [draw_prompt(i) for i in range(size(12, 4))]) for image in images]

    def preprocess(image):
        image = torch.as_tensor(image, device=device).permute(2, 0, 1)[None].float()
        image = F.pad((image - mean) / std, (0, 0, 0, side - height))
        return image.contiguous(memory_format=torch.channels_last) if change == "channels_last" else image

    def stability(masks, offset=1.0):
        sure = (masks > offset).sum(dim=(-2, -1))
        possible = (masks > -offset).sum(dim=(-2, -1))
        return sure / possible.clamp(min=1)

    def describe(mask):
        """Return area, box and run lengths (column by column) of one mask."""
        if change == "gpu_postprocessing":
            edges = torch.stack([x.nonzero()[[0, -1], 0] if x.any() else x.new_zeros(2, dtype=torch.int64)
                                 for x in (mask.any(dim=0), mask.any(dim=1))])  # fmt: skip
            flat = mask.T.reshape(-1)
            runs = (flat[1:] != flat[:-1]).nonzero()[:, 0].cpu().numpy()
            return int(mask.sum()), edges.T.reshape(-1).tolist(), np.diff(runs, prepend=-1, append=mask.numel() - 1)
        mask = mask.cpu().numpy()
        columns, rows = np.flatnonzero(mask.any(axis=0)), np.flatnonzero(mask.any(axis=1))
        box = [columns[0], rows[0], columns[-1], rows[-1]] if len(rows) else [0, 0, 0, 0]
        flat = mask.T.reshape(-1)
        runs = np.flatnonzero(flat[1:] != flat[:-1])
        return int(mask.sum()), box, np.diff(runs, prepend=-1, append=mask.size - 1)

    def decode(embedding, points, labels):
        masks, quality = decoder(embedding, points, labels)
        return F.interpolate(masks, (side, side), mode="bilinear", align_corners=False), quality

    if change == "graph_decoder":
        static = (
            torch.zeros(1, 256, grid, grid, device=device),
            torch.zeros(1, 4, 2, device=device),
            torch.zeros(1, 4, dtype=torch.int64, device=device),
        )
        with torch.no_grad():
            replay = graphed(lambda: decode(*static))

    def predict(embedding, points, labels):
        """Return for each prompt its best mask's description and scores."""
        points, labels = torch.as_tensor(points, device=device), torch.as_tensor(labels, device=device)
        if change == "graph_decoder":
            for buffer, value in zip(static, (embedding, points, labels), strict=True):
                buffer.copy_(value)
            masks, quality = replay()
        else:
            masks, quality = decode(embedding, points, labels)
        masks = masks[..., :height, :width]
        stable = stability(masks)
        answers = []
        for i in range(len(masks)):
            best = int(quality[i].argmax())
            area, box, runs = describe(masks[i, best] > 0)
            scores = [float(quality[i, best]), float(stable[i, best]), area / (height * width)]
            answers.append({"box": box, "counts": runs, "scores": scores})
        return answers

    queue = endless(requests)

    def step():
        image, prompts = next(queue)
        with torch.no_grad(), bf16(change == "bf16_encoder"):
            embedding = encoder(preprocess(image))
        embedding = embedding.float()
        answers = []
        with torch.no_grad():
            if change == "batched_prompts":
                answers = predict(embedding, np.stack([p for p, _ in prompts]), np.stack([q for _, q in prompts]))
            else:
                for points, labels in prompts:
                    answers.extend(predict(embedding, points[None], labels[None]))
        return torch.tensor([answer["scores"] for answer in answers])

    return step


PROGRAMS = {
    speech_pretraining: {
        "index_select": "index_select",
        "bf16_autocast": "half_precision",
        "tf32_matmul": "tf32",
        "negatives_by_matmul": "",
        "compile_transformer": "fuse_pointwise",
        "attention_sdpa": "fused_attention",
    },
    click_segmentation: {
        "batched_prompts": "larger_batch",
        "bf16_encoder": "half_precision",
        "gpu_postprocessing": "python",
        "graph_decoder": "cuda_graph",
        "channels_last": "channels_last",
    },
}
