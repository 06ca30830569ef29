"""Programs of several trades: music tokens, video masks, options, video quality, genomes, robustness, and qubits."""

import math
from collections import deque
from dataclasses import dataclass
from itertools import cycle, pairwise

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from setting import bf16, device, endless, graphed, graphed_training, size, use_tf32
from torch.utils.data import DataLoader, TensorDataset


class GrowingCache:
    """Keys and values of all earlier steps, to which each step is appended."""

    def __init__(self, states, layers):
        self.states, self.cross, self.layers, self.offset = states, {}, [None] * layers, 0

    def positions(self, length):
        positions = torch.arange(self.offset, self.offset + length, device=self.states.device)
        self.offset += length
        return positions

    def update(self, layer, k, v):
        if self.layers[layer] is not None:
            past_k, past_v = self.layers[layer]
            k, v = torch.cat([past_k, k], dim=2), torch.cat([past_v, v], dim=2)
        self.layers[layer] = k, v
        return k, v, None


class FixedCache:
    """Keys and values in buffers of a fixed length, with the position as a tensor."""

    def __init__(self, states, layers, heads, length, position):
        self.states, self.cross, self.position = states, {}, position
        shape = (states.shape[0], heads, length, states.shape[2] // heads)
        self.layers = [(states.new_zeros(shape), states.new_zeros(shape)) for _ in range(layers)]
        self.places = torch.arange(length, device=states.device)

    def positions(self, length):
        return self.places[:length] if length > 1 else self.position

    def update(self, layer, k, v):
        all_k, all_v = self.layers[layer]
        if k.shape[2] > 1:
            all_k[:, :, : k.shape[2]] = k
            all_v[:, :, : k.shape[2]] = v
            return k, v, None
        all_k.index_copy_(2, self.position, k)
        all_v.index_copy_(2, self.position, v)
        return all_k, all_v, (self.places <= self.position)[None, None, None]


class MusicLayer(nn.Module):
    """Pre-norm decoder layer: self-attention with a cache, cross-attention to the text, feed-forward."""

    def __init__(self, width, heads, index):
        super().__init__()
        self.heads, self.index = heads, index
        self.norm1, self.norm_cross, self.norm2 = (nn.LayerNorm(width) for _ in range(3))
        self.in_proj = nn.Linear(width, 3 * width, bias=False)
        self.out_proj = nn.Linear(width, width, bias=False)
        self.cross_q = nn.Linear(width, width, bias=False)
        self.cross_kv = nn.Linear(width, 2 * width, bias=False)
        self.cross_out = nn.Linear(width, width, bias=False)
        self.linear1 = nn.Linear(width, 4 * width, bias=False)
        self.linear2 = nn.Linear(4 * width, width, bias=False)

    def split_heads(self, x):
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def self_attention(self, x, cache):
        q, k, v = (self.split_heads(part) for part in self.in_proj(x).chunk(3, dim=-1))
        k, v, mask = cache.update(self.index, k, v)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=q.shape[2] > 1)
        return self.out_proj(y.transpose(1, 2).flatten(2))

    def text_keys(self, states):
        return [self.split_heads(part) for part in self.cross_kv(states).chunk(2, dim=-1)]

    def cross_attention(self, x, cache, keep):
        q = self.split_heads(self.cross_q(x))
        if keep and self.index not in cache.cross:
            cache.cross[self.index] = self.text_keys(cache.states)
        k, v = cache.cross[self.index] if keep else self.text_keys(cache.states)
        y = F.scaled_dot_product_attention(q, k, v)
        return self.cross_out(y.transpose(1, 2).flatten(2))

    def forward(self, x, cache, keep):
        x = x + self.self_attention(self.norm1(x), cache)
        x = x + self.cross_attention(self.norm_cross(x), cache, keep)
        return x + self.linear2(F.gelu(self.linear1(self.norm2(x))))


class MusicLM(nn.Module):
    """Decoder over the tokens of several codebooks, whose embeddings are added and which have a head each."""

    def __init__(self, card, codebooks, width, heads, layers, keep_text_keys=False):
        super().__init__()
        self.keep_text_keys = keep_text_keys
        self.emb = nn.ModuleList(nn.Embedding(card + 1, width) for _ in range(codebooks))
        self.layers = nn.ModuleList(MusicLayer(width, heads, index) for index in range(layers))
        self.out_norm = nn.LayerNorm(width)
        self.linears = nn.ModuleList(nn.Linear(width, card, bias=False) for _ in range(codebooks))
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.trunc_normal_(module.weight, std=width**-0.5)

    @staticmethod
    def sines(positions, width):
        half = width // 2
        steps = torch.arange(half, device=positions.device) / (half - 1)
        phase = positions[:, None] / 10000**steps
        return torch.cat([torch.cos(phase), torch.sin(phase)], dim=-1)

    def forward(self, sequence, cache):
        x = sum(emb(sequence[:, k]) for k, emb in enumerate(self.emb))
        x = x + self.sines(cache.positions(sequence.shape[-1]), x.shape[-1]).to(x.dtype)
        for layer in self.layers:
            x = layer(x, cache, self.keep_text_keys)
        x = self.out_norm(x[:, -1])
        return torch.stack([linear(x) for linear in self.linears], dim=1)


def sample_top_k(probs, k):
    """Draw one of the k most probable tokens."""
    top, _ = torch.topk(probs, k, dim=-1)
    probs = probs * (probs >= top[..., [-1]]).float()
    probs.div_(probs.sum(dim=-1, keepdim=True))
    return torch.multinomial(probs.flatten(0, 1), num_samples=1).view(probs.shape[:2])


def sample_top_k_unchecked(probs, k):
    """Draw one of the k most probable tokens, as torch.multinomial does, but without its checks."""
    top, _ = torch.topk(probs, k, dim=-1)
    probs = probs * (probs >= top[..., -1:]).float()
    probs.div_(probs.sum(dim=-1, keepdim=True))
    flat = probs.flatten(0, 1)
    return (flat / torch.empty_like(flat).exponential_(1)).argmax(dim=-1).view(probs.shape[:2])


def song_continuation(change):
    """Continue two songs by ten frames of four codebooks in a delay pattern, guided by a text in two passes."""
    card, codebooks, width = size(2048, 60), 4, size(1024, 32)
    heads, layers, top_k, guidance = size(16, 4), size(12, 2), size(250, 20), 3.0
    prompt, new, batch = size(50, 6), size(10, 3), 4 if change == "songs_x2" else 2
    length, special, unknown = 1 + prompt + new + codebooks - 1, card, -1
    with device:
        model = MusicLM(card, codebooks, width, heads, layers, keep_text_keys=change == "text_keys_once").eval()
    dtype = torch.bfloat16 if change == "bf16_weights" else torch.float32
    model = model.to(dtype)
    rng = np.random.default_rng(0)
    texts = torch.from_numpy(rng.standard_normal((16, size(24, 5), width)).astype(np.float32))
    songs = torch.from_numpy(rng.integers(0, card, (16, codebooks, prompt)))
    sample = sample_top_k_unchecked if change == "cuda_graph" else sample_top_k

    def delayed(codes):
        """Return the tokens with codebook k shifted by k steps, and -1 where they are to be generated."""
        sequence = torch.full((len(codes), codebooks, length), special)
        for k in range(codebooks):
            sequence[:, k, 1 + k : 1 + k + prompt] = codes[:, k]
            sequence[:, k, 1 + k + prompt : 1 + k + prompt + new] = unknown
        return sequence

    def guided_logits(current, caches):
        if change == "guidance_in_batch":
            cond, null = model(current.repeat(2, 1, 1), caches[0]).chunk(2)
        else:
            cond, null = (model(current, cache) for cache in caches)
        return (null + (cond - null) * guidance).float()

    def next_column(current, caches, known):
        probs = torch.softmax(guided_logits(current, caches), dim=-1)
        chosen = sample(probs, top_k)
        surprise = probs.gather(-1, chosen[..., None])[..., 0].log()
        wanted = known == unknown
        return torch.where(wanted, chosen, known), torch.where(wanted, surprise, 0.0).sum(dim=1)

    def new_caches(states):
        null = torch.zeros_like(states)
        if change == "guidance_in_batch":
            return [GrowingCache(torch.cat([states, null]), layers)]
        return [GrowingCache(states, layers), GrowingCache(null, layers)]

    def request(number):
        rows = torch.arange(number * batch, (number + 1) * batch) % len(songs)
        return delayed(songs[rows]).to(device), texts[rows].to(device, dtype)

    def undelayed(sequence):
        return torch.stack([sequence[:, k, 1 + k : 1 + k + prompt + new] for k in range(codebooks)], dim=1)

    requests = iter(range(10**9))
    if change == "cuda_graph":
        sequence, states = (tensor.clone() for tensor in request(0))
        position = torch.full((1,), prompt + 1, device=device)
        token = torch.zeros(batch, codebooks, 1, dtype=torch.long, device=device)
        total = torch.zeros(batch, device=device)
        caches = [FixedCache(s, layers, heads, length, position) for s in (states, torch.zeros_like(states))]

        def decode():
            known = sequence.index_select(2, position + 1)[..., 0]
            column, surprise = next_column(token, caches, known)
            sequence.index_copy_(2, position + 1, column[..., None])
            token.copy_(column[..., None])
            total.add_(surprise)
            position.add_(1)

        with torch.no_grad():
            decode = graphed(decode)

        @torch.no_grad()
        def step():
            for tensor, value in zip((sequence, states), request(next(requests)), strict=True):
                tensor.copy_(value)
            column, surprise = next_column(sequence[..., : prompt + 1], caches, sequence[..., prompt + 1])
            sequence[..., prompt + 1] = column
            token.copy_(column[..., None])
            total.copy_(surprise)
            position.fill_(prompt + 1)
            for _ in range(prompt + 2, length):
                decode()
            codes = undelayed(sequence).cpu()
            assert codes.min() >= 0
            return total / (codebooks * new)

        return step

    @torch.no_grad()
    def step():
        sequence, states = request(next(requests))
        caches = new_caches(states)
        total = torch.zeros(batch, device=device)
        previous = 0
        for offset in range(prompt + 1, length):
            column, surprise = next_column(sequence[..., previous:offset], caches, sequence[..., offset])
            sequence[..., offset] = column
            total = total + surprise
            previous = offset
        codes = undelayed(sequence).cpu()
        assert codes.min() >= 0
        return total / (codebooks * new)

    return step


class MaskResBlock(nn.Module):
    """Two convolutions beside a skip connection, which is a convolution where the width changes."""

    def __init__(self, indim, outdim):
        super().__init__()
        self.downsample = nn.Conv2d(indim, outdim, 3, padding=1) if indim != outdim else nn.Identity()
        self.conv1 = nn.Conv2d(indim, outdim, 3, padding=1)
        self.conv2 = nn.Conv2d(outdim, outdim, 3, padding=1)

    def forward(self, x):
        r = self.conv2(F.relu(self.conv1(F.relu(x))))
        return self.downsample(x) + r


class MaskBasicBlock(nn.Module):
    """The block of ResNet-18, whose branch starts as zero."""

    def __init__(self, inputs, planes, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, planes, 3, stride=stride, padding=1, bias=False)
        self.conv2 = nn.Conv2d(planes, planes, 3, padding=1, bias=False)
        self.bn1, self.bn2 = nn.BatchNorm2d(planes), nn.BatchNorm2d(planes)
        self.relu, self.downsample = nn.ReLU(inplace=True), nn.Identity()
        if stride != 1 or inputs != planes:
            conv = nn.Conv2d(inputs, planes, 1, stride=stride, bias=False)
            self.downsample = nn.Sequential(conv, nn.BatchNorm2d(planes))
        nn.init.zeros_(self.bn2.weight)

    def forward(self, x):
        out = self.relu(self.bn1(self.conv1(x)))
        return self.relu(self.bn2(self.conv2(out)) + self.downsample(x))


class MaskBottleneck(nn.Module):
    """The block of ResNet-50, whose branch starts as zero."""

    def __init__(self, inputs, planes, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, planes, 1, bias=False)
        self.conv2 = nn.Conv2d(planes, planes, 3, stride=stride, padding=1, bias=False)
        self.conv3 = nn.Conv2d(planes, 4 * planes, 1, bias=False)
        self.bn1, self.bn2, self.bn3 = nn.BatchNorm2d(planes), nn.BatchNorm2d(planes), nn.BatchNorm2d(4 * planes)
        self.relu, self.downsample = nn.ReLU(inplace=True), nn.Identity()
        if stride != 1 or inputs != 4 * planes:
            conv = nn.Conv2d(inputs, 4 * planes, 1, stride=stride, bias=False)
            self.downsample = nn.Sequential(conv, nn.BatchNorm2d(4 * planes))
        nn.init.zeros_(self.bn3.weight)

    def forward(self, x):
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        return self.relu(self.bn3(self.conv3(out)) + self.downsample(x))


class MaskStages(nn.Module):
    """The first stages of a ResNet, whose outputs are 4, 8 and 16 times smaller than the image."""

    def __init__(self, inputs, block, expansion, blocks):
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(inputs, 64, 7, stride=2, padding=3, bias=False),
            nn.BatchNorm2d(64),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, stride=2, padding=1),
        )
        layers, width = [], 64
        for stage, count in enumerate(blocks):
            layer = []
            for number in range(count):
                layer.append(block(width, 64 * 2**stage, 2 if stage > 0 and number == 0 else 1))
                width = 64 * 2**stage * expansion
            layers.append(nn.Sequential(*layer))
        self.layer1, self.layer2, self.layer3 = layers

    def forward(self, x):
        f4 = self.layer1(self.stem(x))
        f8 = self.layer2(f4)
        return self.layer3(f8), f8, f4


class MaskUpsample(nn.Module):
    """Adds the features of a skip connection to enlarged ones."""

    def __init__(self, skip, up, out):
        super().__init__()
        self.skip_conv = nn.Conv2d(skip, up, 3, padding=1)
        self.out_conv = MaskResBlock(up, out)

    def forward(self, skip_f, up_f):
        x = self.skip_conv(skip_f)
        return self.out_conv(x + F.interpolate(up_f, scale_factor=2, mode="bilinear", align_corners=False))


class MaskNetwork(nn.Module):
    """Space-time correspondence network: keys of frames, values of objects, and a decoder of masks."""

    def __init__(self, width):
        super().__init__()
        self.key_encoder = MaskStages(3, MaskBottleneck, 4, (3, 4, 6))
        self.value_encoder = MaskStages(5, MaskBasicBlock, 1, (2, 2, 2))
        self.fuser = MaskResBlock(1024 + 256, width)
        self.key_proj = nn.Conv2d(1024, 64, 3, padding=1)
        self.key_comp = nn.Conv2d(1024, width, 3, padding=1)
        self.compress = MaskResBlock(2 * width, width)
        self.up_16_8 = MaskUpsample(512, width, width // 2)
        self.up_8_4 = MaskUpsample(256, width // 2, width // 2)
        self.pred = nn.Conv2d(width // 2, 1, 3, padding=1)

    def encode_key(self, frame):
        f16, f8, f4 = self.key_encoder(frame)
        return self.key_proj(f16), self.key_comp(f16), f16, f8, f4

    def encode_value(self, frame, f16, mask, others):
        features, _, _ = self.value_encoder(torch.cat([frame, mask, others], dim=1))
        return self.fuser(torch.cat([features, f16], dim=1))

    def decode(self, readout, thin, f8, f4):
        x = self.compress(torch.cat([readout, thin], dim=1))
        x = self.up_8_4(f4, self.up_16_8(f8, x))
        x = self.pred(F.relu(x))
        return torch.sigmoid(F.interpolate(x.float(), scale_factor=4, mode="bilinear", align_corners=False))


class MaskMemory:
    """Keys and values of the first frame and of the last few memorized ones."""

    def __init__(self, capacity, top_k, memory_last):
        self.first, self.recent = None, deque(maxlen=capacity - 1)
        self.top_k, self.memory_last = top_k, memory_last

    def add(self, key, value):
        pair = key.flatten(2), value.flatten(2)
        if self.first is None:
            self.first = pair
        else:
            self.recent.append(pair)
        frames = [self.first, *self.recent]
        self.keys = torch.cat([k for k, _ in frames], dim=2)  # 1, 64, memory
        self.values = torch.cat([v for _, v in frames], dim=2)  # objects, width, memory

    def affinity(self, query):
        """Return the weights (1, memory, query), zero but for the most similar places of the memory."""
        with torch.autocast(device.type, enabled=False):
            mk, qk = self.keys.float(), query.flatten(2).float()
            if self.memory_last:
                similarity = (2 * (qk.transpose(1, 2) @ mk) - mk.pow(2).sum(1)[:, None]) / math.sqrt(mk.shape[1])
                values, indices = torch.topk(similarity, k=self.top_k, dim=2)
                weights = torch.zeros_like(similarity).scatter_(2, indices, values.softmax(dim=2))
                return weights.transpose(1, 2)
            similarity = (2 * (mk.transpose(1, 2) @ qk) - mk.pow(2).sum(1)[:, :, None]) / math.sqrt(mk.shape[1])
            values, indices = torch.topk(similarity, k=self.top_k, dim=1)
            x_exp = torch.exp(values - values[:, :1])
            x_exp = x_exp / x_exp.sum(dim=1, keepdim=True)
            return torch.zeros_like(similarity).scatter_(1, indices, x_exp)


def mask_propagation(change):
    """Follow three objects through a video with a memory of earlier frames; a step is five frames."""
    objects, height, width, every = size(3, 2), size(480, 64), size(864, 96), 5
    capacity, top_k = size(6, 3), size(20, 4)
    net = MaskNetwork(size(512, 32)).to(device).eval()
    if change == "channels_last":
        net = net.to(memory_format=torch.channels_last)
    rng = np.random.default_rng(0)
    ys, xs = np.mgrid[0:height, 0:width]
    colors = rng.integers(0, 256, (objects, 3))

    def draw(time):
        frame = np.stack([ys * 255 / height, xs * 255 / width, (ys + xs) % 256], axis=-1).astype(np.uint8)
        masks = np.zeros((objects, height, width), np.float32)
        for i in range(objects):
            y = height * (0.3 + 0.2 * i + 0.1 * np.sin(0.2 * time + i))
            x = width * (0.2 + 0.25 * i + 0.1 * np.cos(0.15 * time))
            inside = (ys - y) ** 2 + (1 + i) * (xs - x) ** 2 < (height / 6) ** 2
            frame[inside], masks[i, inside] = colors[i], 1
        return frame, masks

    video = [draw(time) for time in range(20)]
    mean, std = torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1), torch.tensor([0.229, 0.224, 0.225]).view(3, 1, 1)
    if change == "bytes_to_gpu":
        mean, std = mean.to(device), std.to(device)

    def load(frame):
        image = torch.from_numpy(frame)
        if change == "bytes_to_gpu":
            image = image.to(device)
        image = image.permute(2, 0, 1).contiguous().float() / 255
        return ((image - mean) / std)[None].to(device)

    memory = MaskMemory(capacity, top_k, change == "memory_last")

    def memorize(image, key, f16, masks):
        if change == "objects_in_batch":
            others = masks.sum(dim=0, keepdim=True) - masks
            value = net.encode_value(image.expand(objects, -1, -1, -1), f16.expand(objects, -1, -1, -1), masks, others)
        else:
            values = []
            for i in range(objects):
                others = sum(masks[j : j + 1] for j in range(objects) if j != i)
                values.append(net.encode_value(image, f16, masks[i : i + 1], others))
            value = torch.cat(values)
        memory.add(key, value)

    def segment(key, thin, f8, f4):
        affinity = memory.affinity(key)
        if change == "objects_in_batch":
            readout = torch.bmm(memory.values, affinity.expand(objects, -1, -1))
            readout = readout.unflatten(2, key.shape[2:])
            return net.decode(readout, *(x.expand(objects, -1, -1, -1) for x in (thin, f8, f4)))
        probs = []
        for i in range(objects):
            readout = torch.bmm(memory.values[i : i + 1], affinity).unflatten(2, key.shape[2:])
            probs.append(net.decode(readout, thin, f8, f4))
        return torch.cat(probs)

    def aggregate(prob):
        """Return the probabilities of the background and of each object, which add up to one."""
        all_prob = torch.cat([torch.prod(1 - prob, dim=0, keepdim=True), prob]).clamp(1e-7, 1 - 1e-7)
        return torch.softmax(torch.log(all_prob / (1 - all_prob)), dim=0)

    with torch.no_grad(), bf16(change == "bf16"):
        for frame, masks in video[:capacity]:
            image = load(frame)
            key, _, f16, _, _ = net.encode_key(image)
            memorize(image, key, f16, torch.from_numpy(masks)[:, None].to(device))
    frames = cycle(frame for frame, _ in video)

    @torch.no_grad()
    def step():
        areas, saved = [], []
        for i in range(every):
            with bf16(change == "bf16"):
                image = load(next(frames))
                key, thin, f16, f8, f4 = net.encode_key(image)
                prob = aggregate(segment(key, thin, f8, f4))
                if i == every - 1:
                    memorize(image, key, f16, prob[1:])
            areas.append(prob.mean(dim=(1, 2, 3)))
            saved.append(prob.argmax(dim=0)[0].byte().cpu().numpy())
        assert len(saved) == every
        return torch.stack(areas).mean(dim=0)

    return step


@dataclass
class MaxCall:
    """Bermudan call on the maximum of several assets."""

    spot: float
    strike: float = 100.0
    rate: float = 0.05
    dividend: float = 0.10
    volatility: float = 0.20
    maturity: float = 3.0
    dates: int = 9


def bermudan_price(change):
    """Price a Bermudan max-call on five assets by Longstaff-Schwartz; a step is one contract of the book."""
    paths, assets = size(131072, 512), 5
    dtype = torch.float32 if change == "float32" else torch.float64
    correlation = torch.full((assets, assets), 0.2, dtype=dtype).fill_diagonal_(1.0)
    cholesky = torch.linalg.cholesky(correlation).to(device)
    book = cycle([MaxCall(spot) for spot in (90.0, 100.0, 110.0)])

    def simulate(option):
        """Return the prices of the assets on each date of exercise."""
        dt = option.maturity / option.dates
        drift = (option.rate - option.dividend - 0.5 * option.volatility**2) * dt
        if change == "increments_at_once":
            noise = torch.randn(option.dates, paths, assets, dtype=dtype, device=device) @ cholesky.T
            growth = drift + option.volatility * math.sqrt(dt) * noise
            return list(option.spot * torch.exp(growth.cumsum(dim=0)))
        prices = torch.full((paths, assets), option.spot, dtype=dtype, device=device)
        history = []
        for _ in range(option.dates):
            noise = torch.randn(paths, assets, dtype=dtype, device=device) @ cholesky.T
            prices = prices * torch.exp(drift + option.volatility * math.sqrt(dt) * noise)
            history.append(prices)
        return history

    def payoff(option, prices):
        return torch.clamp(prices.max(dim=1).values - option.strike, min=0.0)

    def basis(option, prices):
        s = torch.sort(prices / option.strike, dim=1, descending=True).values
        a, b, c = s[:, 0], s[:, 1], s[:, 2]
        columns = [torch.ones_like(a), a, a**2, a**3, b, b**2, a * b, c, b * c, s[:, 3], s[:, 4], s.prod(dim=1)]
        return torch.stack(columns, dim=1)

    def regress(x, y):
        if change == "normal_equations":
            return torch.linalg.solve(x.T @ x, x.T @ y)
        return torch.linalg.lstsq(x, y[:, None]).solution[:, 0]

    def fit(option, history, discount):
        """Go back from the last date, and return the value with hindsight and the coefficients of each date."""
        cash = payoff(option, history[-1])
        coefficients = [None] * option.dates
        for t in range(option.dates - 2, -1, -1):
            cash = cash * discount
            exercise = payoff(option, history[t])
            in_the_money = exercise > 0
            if change == "where_instead_of_masks":
                x = basis(option, history[t]) * in_the_money[:, None]
                coefficients[t] = regress(x, cash * in_the_money)
                now = in_the_money & (exercise > x @ coefficients[t])
                cash = torch.where(now, exercise, cash)
                continue
            if change != "no_item" and in_the_money.sum().item() < 50:
                continue
            x = basis(option, history[t][in_the_money])
            coefficients[t] = regress(x, cash[in_the_money])
            now = exercise[in_the_money] > x @ coefficients[t]
            rows = torch.where(in_the_money)[0][now]
            cash[rows] = exercise[rows]
        return cash.mean() * discount, coefficients

    def lower_bound(option, history, discount, coefficients):
        """Follow the fitted rule of exercise on other paths, and return what each of them pays."""
        alive = torch.ones(paths, dtype=torch.bool, device=device)
        value = torch.zeros(paths, dtype=dtype, device=device)
        for t, prices in enumerate(history):
            exercise = payoff(option, prices)
            stop = alive & (exercise > 0)
            if coefficients[t] is not None:
                stop = stop & (exercise > basis(option, prices) @ coefficients[t])
            value = torch.where(stop, exercise * discount ** (t + 1), value)
            alive = alive & ~stop
        return value

    report = []

    @torch.no_grad()
    def step():
        option = next(book)
        discount = math.exp(-option.rate * option.maturity / option.dates)
        hindsight, coefficients = fit(option, simulate(option), discount)
        value = lower_bound(option, simulate(option), discount, coefficients)
        price, error = value.mean(), value.std() / math.sqrt(paths)
        report.append((option.spot, price.item(), error.item(), hindsight.item()))
        return torch.stack([price, hindsight])

    return step


def gaussian_window(taps, sigma):
    """Return the normalized weights of a Gaussian filter with one dimension."""
    places = torch.arange(taps, dtype=torch.float32) - taps // 2
    window = torch.exp(-(places**2) / (2 * sigma**2))
    return window / window.sum()


def structural_similarity(x, y, window, separable):
    """Return SSIM and its part for contrast and structure, for each image."""
    if separable:

        def smooth(image):
            return F.conv2d(F.conv2d(image, window.view(1, 1, -1, 1)), window.view(1, 1, 1, -1))
    else:
        square = torch.outer(window, window)[None, None]

        def smooth(image):
            return F.conv2d(image, square)

    c1, c2 = 0.01**2, 0.03**2
    mu1, mu2 = smooth(x), smooth(y)
    mu1_sq, mu2_sq, mu1_mu2 = mu1.pow(2), mu2.pow(2), mu1 * mu2
    sigma1_sq = smooth(x * x) - mu1_sq
    sigma2_sq = smooth(y * y) - mu2_sq
    sigma12 = smooth(x * y) - mu1_mu2
    cs_map = (2 * sigma12 + c2) / (sigma1_sq + sigma2_sq + c2)
    ssim_map = ((2 * mu1_mu2 + c1) / (mu1_sq + mu2_sq + c1)) * cs_map
    return ssim_map.mean(dim=(1, 2, 3)), cs_map.mean(dim=(1, 2, 3))


def multi_scale_similarity(x, y, separable):
    """Return MS-SSIM of each pair of images."""
    weights = torch.tensor([0.0448, 0.2856, 0.3001, 0.2363, 0.1333], device=x.device)
    window = gaussian_window(11, 1.5).to(x.device)
    parts = []
    for level in range(len(weights)):
        ssim, cs = structural_similarity(x, y, window, separable)
        if level < len(weights) - 1:
            parts.append(torch.relu(cs))
            x, y = F.avg_pool2d(x, 2), F.avg_pool2d(y, 2)
    parts.append(torch.relu(ssim))
    return torch.prod(torch.stack(parts) ** weights[:, None], dim=0)


def encoding_quality(change):
    """Compare an encoded video with its source by PSNR and MS-SSIM of the luma; a step is eight frames of 1080p."""
    height, width, count, chunk = size(1080, 192), size(1920, 224), size(24, 6), size(8, 2)
    rng = np.random.default_rng(0)
    ys, xs = np.mgrid[0:height, 0:width].astype(np.float32)
    grain = rng.normal(0, 4, (height, width)).astype(np.float32)
    source = np.empty((count, height, width), np.uint8)
    for time in range(count):
        picture = 128 + 60 * np.sin((xs + 9 * time) / 37) * np.cos(ys / 53) + np.roll(grain, 31 * time, axis=1)
        source[time] = picture.clip(0, 255)
    encoded = (source // 12 * 12 + 6).astype(np.uint8)  # coarse quantization bands the picture
    starts = cycle(range(0, count, chunk))
    separable = change == "separable_window"

    def load(luma):
        frame = torch.from_numpy(luma)
        if change == "bytes_to_gpu":
            frame = frame.to(device)
        frame = (frame.float() / 255.0).unsqueeze(-3)
        if change == "pinned_copies" and device.type == "cuda":
            return frame.pin_memory().to(device, non_blocking=True)
        return frame.to(device)

    def compare(reference, distorted):
        psnr = 10 * torch.log10(1.0 / (reference - distorted).square().mean(dim=(1, 2, 3)))
        return psnr, multi_scale_similarity(reference, distorted, separable)

    @torch.no_grad()
    def step():
        start = next(starts)
        if change == "frames_in_batch":
            psnr, similarity = compare(load(source[start : start + chunk]), load(encoded[start : start + chunk]))
            scores = torch.stack([psnr, similarity], dim=1).tolist()
        else:
            scores = []
            for t in range(start, start + chunk):
                psnr, similarity = compare(load(source[t])[None], load(encoded[t])[None])
                if change == "scores_read_once":
                    scores.append(torch.cat([psnr, similarity]))
                else:
                    scores.append((psnr.item(), similarity.item()))
            if change == "scores_read_once":
                scores = torch.stack(scores).tolist()
        worst = min(scores, key=lambda score: score[1])
        assert worst[1] <= 1.0001
        return torch.tensor(scores)

    return step


class GenomeGELU(nn.Module):
    """The GELU of Enformer, by a sigmoid."""

    def forward(self, x):
        return torch.sigmoid(1.702 * x) * x


class GenomeResidual(nn.Module):
    """Adds the input to what a module makes of it."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, x):
        return x + self.module(x)


class GenomePool(nn.Module):
    """Halves the length by a weighted mean of neighbours, whose weights are learned."""

    def __init__(self, dim):
        super().__init__()
        self.to_attn_logits = nn.Conv2d(dim, dim, 1, bias=False)
        nn.init.dirac_(self.to_attn_logits.weight)

    def forward(self, x):
        x = x.unflatten(2, (-1, 2))
        return (x * self.to_attn_logits(x).softmax(dim=-1)).sum(dim=-1)


class GenomeConv(nn.Sequential):
    """Normalization, GELU and a convolution."""

    def __init__(self, inputs, outputs, kernel):
        super().__init__(nn.BatchNorm1d(inputs), GenomeGELU(), nn.Conv1d(inputs, outputs, kernel, padding=kernel // 2))


class GenomeAttention(nn.Module):
    """Attention with learned weights on functions of the relative distance."""

    def __init__(self, dim, heads, dim_key, positions, cache_positions):
        super().__init__()
        self.heads, self.scale, self.positions = heads, dim_key**-0.5, positions
        self.cache_positions, self.cached = cache_positions, None
        self.to_q, self.to_k = nn.Linear(dim, heads * dim_key, bias=False), nn.Linear(dim, heads * dim_key, bias=False)
        self.to_v, self.to_out = nn.Linear(dim, dim, bias=False), nn.Linear(dim, dim)
        self.to_rel_k = nn.Linear(positions, heads * dim_key, bias=False)
        self.rel_content_bias = nn.Parameter(torch.randn(1, heads, 1, dim_key))
        self.rel_pos_bias = nn.Parameter(torch.randn(1, heads, 1, dim_key))

    def relative_features(self, n, like):
        """Return exponentials, steps and gamma densities of all distances, and these with the sign."""
        distances = torch.arange(-n + 1, n, device=like.device)
        far, third = distances.abs().float()[:, None], self.positions // 6
        half_life = 2.0 ** torch.linspace(3.0, math.log2(n), third, device=like.device)
        exponential = torch.exp(-math.log(2.0) / half_life * far)
        widths = 2.0 ** torch.arange(1, third + 1, device=like.device) - 1
        central = (widths > far).float()
        mean = torch.linspace(n / third, n, third, device=like.device)
        concentration, rate = (mean / (n / (2 * third))) ** 2, mean / (n / (2 * third)) ** 2
        log_density = torch.xlogy(concentration - 1.0, far) - rate * far
        log_density = log_density - (torch.lgamma(concentration) - concentration * torch.log(rate))
        gamma = torch.exp(log_density) + 1e-8
        gamma = gamma / gamma.amax(dim=0, keepdim=True)
        features = torch.cat([exponential, central, gamma], dim=-1)
        return torch.cat([features, torch.sign(distances)[:, None] * features], dim=-1)

    def relative_keys(self, n, x):
        if self.cached is None or not self.cache_positions:
            self.cached = self.to_rel_k(self.relative_features(n, x)).unflatten(-1, (self.heads, -1)).transpose(0, 1)
        return self.cached

    def forward(self, x):
        n = x.shape[1]
        q, k, v = self.to_q(x), self.to_k(x), self.to_v(x)
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in (q, k, v))
        q = q * self.scale
        content = torch.einsum("bhid,bhjd->bhij", q + self.rel_content_bias, k)
        relative = torch.einsum("bhid,hjd->bhij", q + self.rel_pos_bias, self.relative_keys(n, x))
        relative = F.pad(relative, (1, 0))  # Transformer-XL's shift
        b, h, i, j = relative.shape
        relative = relative.reshape(b, h, j, i)[:, :, 1:].reshape(b, h, i, j - 1)[..., :n]
        attn = (content + relative).softmax(dim=-1)
        return self.to_out((attn @ v).transpose(1, 2).flatten(2))


class GenomeNetwork(nn.Module):
    """Tracks of activity along a DNA sequence, by convolutions and a transformer over bins of 128 bases."""

    def __init__(self, dim, layers, levels, tracks, crop, cache_positions):
        super().__init__()
        self.crop = crop
        half = dim // 2
        self.stem = nn.Sequential(
            nn.Conv1d(4, half, 15, padding=7), GenomeResidual(GenomeConv(half, half, 1)), GenomePool(half)
        )
        widths = [half] + [half + (dim - half) * level // (levels - 1) // 8 * 8 for level in range(levels - 1)] + [dim]
        tower = []
        for inputs, outputs in pairwise(widths[1:]):
            conv = GenomeResidual(GenomeConv(outputs, outputs, 1))
            tower.append(nn.Sequential(GenomeConv(inputs, outputs, 5), conv, GenomePool(outputs)))
        self.tower = nn.Sequential(*tower)
        heads = 8
        self.transformer = nn.Sequential(*(
            nn.Sequential(
                GenomeResidual(nn.Sequential(
                    nn.LayerNorm(dim), GenomeAttention(dim, heads, 64, dim // heads // 6 * 6, cache_positions)
                )),
                GenomeResidual(nn.Sequential(
                    nn.LayerNorm(dim), nn.Linear(dim, 2 * dim), nn.ReLU(), nn.Linear(2 * dim, dim)
                )),
            )
            for _ in range(layers)
        ))  # fmt: skip
        self.final = nn.Sequential(GenomeConv(dim, 2 * dim, 1), GenomeGELU())
        self.head = nn.Sequential(nn.Linear(2 * dim, tracks), nn.Softplus())
        for module in self.modules():
            if isinstance(module, nn.Conv1d):
                nn.init.kaiming_normal_(module.weight)

    def forward(self, one_hot):
        x = self.tower(self.stem(one_hot.transpose(1, 2)))
        x = self.transformer(x.transpose(1, 2))
        x = x[:, self.crop : -self.crop]
        return self.head(self.final(x.transpose(1, 2)).transpose(1, 2))


def variant_effects(change):
    """Score three variants near a gene: both alleles are read on both strands; a step is one gene."""
    if change == "tf32":
        use_tf32()
    bins, levels, variants = size(384, 8), size(7, 3), size(3, 2)
    length = bins * 2**levels
    net = GenomeNetwork(
        size(768, 96), size(6, 2), levels, size(1024, 12), size(32, 2), cache_positions=change == "positions_once"
    ).to(device)
    net.eval()
    rng = np.random.default_rng(0)
    chromosome = rng.integers(0, 4, size(2_000_000, 4 * length)).astype(np.uint8)  # A, C, G, T
    genes = cycle(rng.integers(0, len(chromosome) - length, 16).tolist())
    table = np.eye(4, dtype=np.float32)

    def predict(sequence):
        """Return the mean prediction of both strands."""
        one_hot = torch.from_numpy(table[sequence])[None].to(device)
        reverse = one_hot.flip(dims=(1, 2))  # A is T's complement, C is G's
        with bf16(change == "bf16"):
            if change == "strands_in_batch":
                forward, backward = net(torch.cat([one_hot, reverse])).float().split(1)
            else:
                forward, backward = net(one_hot).float(), net(reverse).float()
        return (forward + backward.flip(dims=(1,)))[0] / 2

    @torch.no_grad()
    def step():
        start = next(genes)
        reference = chromosome[start : start + length]
        if change == "reference_once":
            ref_tracks = predict(reference)
        levels_seen, rows = [], []
        for number in range(variants):
            place = length // 2 + size(97, 5) * (number - 1)
            alternative = reference.copy()
            alternative[place] = (alternative[place] + 1 + number) % 4
            if change != "reference_once":
                ref_tracks = predict(reference)
            alt_tracks = predict(alternative)
            score = (torch.log2(alt_tracks + 1) - torch.log2(ref_tracks + 1)).abs().sum(dim=0)
            levels_seen.append(alt_tracks.mean())
            strongest = score.topk(5)
            rows.append((place, strongest.indices.tolist(), strongest.values.tolist()))
        assert len(rows) == variants
        return torch.cat([torch.stack(levels_seen), ref_tracks.mean(dim=0)[:4]])

    return step


class RobustBlock(nn.Module):
    """Pre-activation version of the basic block."""

    def __init__(self, in_planes, planes, stride):
        super().__init__()
        self.bn1, self.bn2 = nn.BatchNorm2d(in_planes), nn.BatchNorm2d(planes)
        self.conv1 = nn.Conv2d(in_planes, planes, 3, stride=stride, padding=1, bias=False)
        self.conv2 = nn.Conv2d(planes, planes, 3, padding=1, bias=False)
        self.shortcut = None
        if stride != 1 or in_planes != planes:
            self.shortcut = nn.Conv2d(in_planes, planes, 1, stride=stride, bias=False)

    def forward(self, x):
        out = F.relu(self.bn1(x))
        shortcut = x if self.shortcut is None else self.shortcut(out)
        out = self.conv1(out)
        out = self.conv2(F.relu(self.bn2(out)))
        return out + shortcut


class RobustResNet(nn.Module):
    """Pre-activation ResNet-18 for images of 32 x 32."""

    def __init__(self, width, num_classes=10):
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 3, padding=1, bias=False)
        blocks, planes = [], width
        for stage, stride in enumerate((1, 2, 2, 2)):
            for each in (stride, 1):
                blocks.append(RobustBlock(planes, width * 2**stage, each))
                planes = width * 2**stage
        self.blocks = nn.Sequential(*blocks)
        self.bn = nn.BatchNorm2d(planes)
        self.linear = nn.Linear(planes, num_classes)
        self.register_buffer("mean", torch.tensor([0.4914, 0.4822, 0.4465]).view(3, 1, 1))
        self.register_buffer("std", torch.tensor([0.2471, 0.2435, 0.2616]).view(3, 1, 1))

    def forward(self, x):
        out = self.blocks(self.conv1((x - self.mean) / self.std))
        out = F.relu(self.bn(out))
        return self.linear(F.adaptive_avg_pool2d(out, 1).flatten(1))


def robust_classifier(change):
    """Train a classifier against attacks: each batch is perturbed by five steps of PGD before it is learned."""
    batch_size, width, attack_iters = size(128, 4), size(64, 8), size(5, 2)
    epsilon, alpha = 8 / 255, 2 / 255
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 10, size(2048, 16))
    means = rng.uniform(60, 200, (10, 3, 1, 1))
    images = (means[labels] + rng.normal(0, 40, (len(labels), 3, 32, 32))).clip(0, 255).astype(np.uint8)
    dataset = TensorDataset(torch.from_numpy(images).float() / 255, torch.from_numpy(labels))
    loader = DataLoader(dataset, batch_size=batch_size, shuffle=True, drop_last=True)
    batches = endless(loader)
    model = RobustResNet(width).to(device).train()
    if change == "channels_last":
        model = model.to(memory_format=torch.channels_last)
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
    criterion = nn.CrossEntropyLoss()
    history = {"loss": 0.0, "correct": 0, "n": 0}

    def clamp(x, lower, upper):
        return torch.max(torch.min(x, upper), lower)

    def forward(x):
        if change == "channels_last":
            x = x.contiguous(memory_format=torch.channels_last)
        with bf16(change == "bf16"):
            return model(x).float()

    def attack_pgd(x, y):
        delta = torch.zeros_like(x).uniform_(-epsilon, epsilon)
        delta.data = clamp(delta, 0.0 - x, 1.0 - x)
        delta.requires_grad = True
        for _ in range(attack_iters):
            loss = F.cross_entropy(forward(x + delta), y)
            if change == "input_gradient_only":
                (grad,) = torch.autograd.grad(loss, delta)
            else:
                loss.backward()
                grad = delta.grad.detach()
            stepped = torch.clamp(delta.detach() + alpha * torch.sign(grad), min=-epsilon, max=epsilon)
            delta.data = clamp(stepped, 0.0 - x, 1.0 - x)
            delta.grad = None
        return delta.detach()

    def train(x, y):
        delta = attack_pgd(x, y)
        output = forward(torch.clamp(x + delta, min=0, max=1))
        loss = criterion(output, y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        return loss.detach(), (output.max(1)[1] == y).sum()

    if change == "cuda_graph":
        static_x, static_y = (tensor.clone().to(device) for tensor in dataset[:batch_size])

        def train_static():
            opt.zero_grad()  # the attack must not add to gradients that lie outside of the graph's memory
            return train(static_x, static_y)

        replay = graphed_training(train_static, [model], [opt])
    if change == "no_item":
        totals = torch.zeros(2, device=device)

    def step():
        x, y = next(batches)
        if change == "cuda_graph":
            static_x.copy_(x)
            static_y.copy_(y)
            loss, correct = (tensor.clone() for tensor in replay())
        else:
            loss, correct = train(x.to(device), y.to(device))
        if change == "no_item":
            totals.add_(torch.stack([loss * len(y), correct.float()]))
        else:
            history["loss"] += loss.item() * len(y)
            history["correct"] += correct.item()
        history["n"] += len(y)
        return loss

    return step


def apply_gate(state, gate, wires):
    """Return the state after a gate of shape (2, ..., 2) on some of its qubits."""
    k = len(wires)
    state = torch.tensordot(gate, state, dims=(list(range(k, 2 * k)), list(wires)))
    return torch.movedim(state, list(range(k)), list(wires))


def rotation_y(theta):
    """Return the gate that turns a qubit about the y axis."""
    c, s = torch.cos(theta / 2), torch.sin(theta / 2)
    return torch.stack([torch.stack([c, -s]), torch.stack([s, c])]).to(torch.complex64)


def rotation_z(theta):
    """Return the gate that turns a qubit about the z axis."""
    phase = torch.exp(-0.5j * theta)
    return torch.diag(torch.stack([phase, phase.conj()]))


class VariationalCircuit(nn.Module):
    """Layers of rotations of each qubit and of controlled-Z gates between neighbours on a ring."""

    def __init__(self, qubits, layers, merged_rotations=False, signs_once=False):
        super().__init__()
        self.qubits, self.merged_rotations, self.signs_once = qubits, merged_rotations, signs_once
        self.theta = nn.Parameter(0.3 * torch.randn(layers, qubits, 2))
        cz = torch.diag(torch.tensor([1, 1, 1, -1], dtype=torch.complex64)).reshape(2, 2, 2, 2)
        self.register_buffer("cz", cz)
        if signs_once:
            signs = torch.ones([2] * qubits, dtype=torch.complex64)
            for q in range(qubits):
                signs = apply_gate(signs, cz, (q, (q + 1) % qubits))
            self.register_buffer("signs", signs.contiguous())

    def forward(self):
        state = torch.zeros(2**self.qubits, dtype=torch.complex64, device=self.theta.device)
        state[0] = 1
        state = state.reshape([2] * self.qubits)
        for angles in self.theta:
            for q in range(self.qubits):
                if self.merged_rotations:
                    state = apply_gate(state, rotation_z(angles[q, 1]) @ rotation_y(angles[q, 0]), (q,))
                else:
                    state = apply_gate(state, rotation_y(angles[q, 0]), (q,))
                    state = apply_gate(state, rotation_z(angles[q, 1]), (q,))
            if self.signs_once:
                state = state * self.signs
            else:
                for q in range(self.qubits):
                    state = apply_gate(state, self.cz, (q, (q + 1) % self.qubits))
        return state


class IsingChain(nn.Module):
    """Energy of a ring of spins in a transverse field, as the sum of the expectations of its Pauli terms."""

    def __init__(self, qubits, coupling, field, diagonal_once=False):
        super().__init__()
        self.diagonal_once = diagonal_once
        self.register_buffer("x", torch.tensor([[0, 1], [1, 0]], dtype=torch.complex64))
        self.register_buffer("z", torch.tensor([[1, 0], [0, -1]], dtype=torch.complex64))
        bonds = [(-coupling, [("z", q), ("z", (q + 1) % qubits)]) for q in range(qubits)]
        self.terms = [(-field, [("x", q)]) for q in range(qubits)]
        if diagonal_once:
            diagonal = torch.zeros([2] * qubits)
            for coefficient, string in bonds:
                ones = torch.ones([2] * qubits, dtype=torch.complex64)
                diagonal += coefficient * self.transformed(ones, string).real
            self.register_buffer("diagonal", diagonal.contiguous())
        else:
            self.terms = bonds + self.terms

    def transformed(self, state, string):
        for pauli, q in string:
            state = apply_gate(state, getattr(self, pauli), (q,))
        return state

    def forward(self, state):
        energy = 0.0
        if self.diagonal_once:
            energy = (self.diagonal * (state.real**2 + state.imag**2)).sum()
        for coefficient, string in self.terms:
            energy = energy + coefficient * (state.conj() * self.transformed(state, string)).sum().real
        return energy


def ground_state(change):
    """Search the ground state of a ring of twelve spins with a variational quantum circuit and Adam."""
    qubits = size(12, 4)
    circuit = VariationalCircuit(
        qubits, size(3, 2), merged_rotations=change == "merged_rotations", signs_once=change == "signs_once"
    ).to(device)
    hamiltonian = IsingChain(qubits, 1.0, 0.8, diagonal_once=change == "diagonal_once").to(device)
    options = {"fused": True} if change == "fused_adam" else {}
    optimizer = torch.optim.Adam(circuit.parameters(), lr=0.02, **options)
    energies = []

    def train():
        optimizer.zero_grad()
        energy = hamiltonian(circuit())
        energy.backward()
        optimizer.step()
        return energy.detach()

    def step():
        energy = train()
        energies.append(energy.item())
        return energy.clone()

    return step


PROGRAMS = {
    song_continuation: {
        "guidance_in_batch": "larger_batch",
        "cuda_graph": "static_cache",
        "text_keys_once": "compute_once",
        "bf16_weights": "half_precision",
        "songs_x2": ("double_batch", 2),
    },
    mask_propagation: {
        "objects_in_batch": "larger_batch",
        "bf16": "half_precision",
        "channels_last": "channels_last",
        "bytes_to_gpu": "cpu_tensors",
        "memory_last": "",
    },
    bermudan_price: {
        "where_instead_of_masks": "remove_sync",
        "normal_equations": "",
        "increments_at_once": "loop_inputs",
        "float32": "single_precision",
        "no_item": "remove_sync",
    },
    encoding_quality: {
        "bytes_to_gpu": "cpu_tensors",
        "pinned_copies": "overlap_copies",
        "scores_read_once": "remove_sync",
        "separable_window": "",
        "frames_in_batch": "larger_batch",
    },
    variant_effects: {
        "bf16": "half_precision",
        "reference_once": "compute_once",
        "strands_in_batch": "larger_batch",
        "positions_once": "compute_once",
        "tf32": "tf32",
    },
    robust_classifier: {
        "input_gradient_only": "no_autograd",
        "bf16": "half_precision",
        "channels_last": "channels_last",
        "cuda_graph": "cuda_graph",
        "no_item": "remove_sync",
    },
    ground_state: {
        "merged_rotations": "",
        "signs_once": "compute_once",
        "diagonal_once": "compute_once",
        "fused_adam": "fused_optimizer",
    },
}
