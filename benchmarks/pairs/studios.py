"""Programs of studios: policies, photos, brain waves, grids of images, few labels, tags and equations."""

import copy
import itertools
import math

import numpy as np
import torch
import torch.nn.functional as F
from setting import bf16, compiled, device, endless, graphed_training, size, use_tf32
from torch import nn
from torch.utils.data import DataLoader, Dataset

ON_GPU = device.type == "cuda"


# ---- 1. GRPO-like update --------------------------------------------------------------------------------------------


class PolicyBlock(nn.Module):
    """A causal transformer block with the norms first."""

    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.feed = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(approximate="tanh"), nn.Linear(4 * dim, dim))

    def forward(self, x):
        batch, length, dim = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, dim))
        return x + self.feed(self.norm2(x))


class PolicyGPT(nn.Module):
    """A GPT of the size of GPT-2 small with tied embeddings."""

    def __init__(self, vocabulary, dim, heads, depth, longest):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, dim), nn.Embedding(longest, dim)
        self.blocks = nn.ModuleList(PolicyBlock(dim, heads) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)

    def hidden(self, ids):
        """Return the last hidden states."""
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.norm(x)

    def forward(self, ids, chosen=None):
        """Return logits of all positions, or of the chosen ones."""
        hidden = self.hidden(ids)
        return self.head(hidden if chosen is None else hidden[chosen])


def token_log_probs(model, ids, mask, answers_only):
    """Return log-probabilities of the tokens after the first one; those outside of the mask do not count."""
    if answers_only:
        chosen = F.pad(mask, (0, 1))
        logits = model(ids, chosen).float()
        found = torch.log_softmax(logits, dim=-1).gather(-1, ids[:, 1:][mask][:, None]).squeeze(-1)
        return torch.zeros(mask.shape, device=ids.device).masked_scatter(mask, found)
    logits = model(ids)[:, :-1].float()
    return torch.log_softmax(logits, dim=-1).gather(-1, ids[:, 1:, None]).squeeze(-1)


def group_policy_update(change):
    """Two epochs of GRPO on four prompts with six answers each: a GPT-2-small policy, a frozen reference."""
    vocabulary, longest = size(50257, 300), size(384, 64)
    reference = PolicyGPT(vocabulary, size(768, 32), size(12, 2), size(12, 2), longest).to(device).eval()
    policy = copy.deepcopy(reference).train()
    reference.requires_grad_(False)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-6, weight_decay=0.0)
    model = compiled(policy, dynamic=True) if change == "compile_policy" else policy
    rng = np.random.default_rng(1)
    groups, answers, micro_size = 4, 6, size(6, 3)

    def sample_rollout():
        """Return the sequences, the lengths of their prompts and the rewards of one rollout."""
        rows, starts = [], []
        for _ in range(groups):
            prompt = rng.integers(0, vocabulary, rng.integers(size(40, 5), size(80, 10)))
            for _ in range(answers):
                answer = rng.integers(0, vocabulary, rng.integers(size(32, 5), size(256, 30)))
                rows.append(torch.from_numpy(np.concatenate([prompt, answer])))
                starts.append(len(prompt))
        return rows, starts, torch.from_numpy(rng.random((groups, answers), dtype=np.float32))

    def padded(rows, starts):
        """Return token ids and the mask of the tokens of the answers (without the first position)."""
        ids = nn.utils.rnn.pad_sequence(rows, batch_first=True)
        mask = torch.zeros(len(rows), ids.shape[1] - 1, dtype=torch.bool)
        for number, (row, start) in enumerate(zip(rows, starts, strict=True)):
            mask[number, start - 1 : len(row) - 1] = True
        return ids, mask

    rollouts = []
    for _ in range(4):
        rows, starts, rewards = sample_rollout()
        ids, mask = padded(rows, starts)
        with torch.no_grad():
            old = torch.cat(
                [
                    token_log_probs(reference, some.to(device), those.to(device), False).cpu()
                    for some, those in zip(ids.split(micro_size), mask.split(micro_size), strict=True)
                ]
            )
        rollouts.append((rows, starts, rewards, ids, mask, old))
    turn = iter(range(10**9))
    answers_only = change == "answer_tokens_only"

    def step():
        rows, _starts, rewards, ids, mask, old = rollouts[next(turn) % len(rollouts)]
        advantages = ((rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)).flatten()
        order = torch.arange(len(rows))
        if change == "micro_batches_by_length":
            order = torch.tensor([len(row) for row in rows]).argsort()
        micros = order.split(micro_size)
        total = torch.zeros((), device=device)
        known = {}
        for _ in range(2):
            optimizer.zero_grad()
            for number, micro in enumerate(micros):
                length = ids.shape[1]
                if change == "micro_batches_by_length":
                    length = max(len(rows[row]) for row in micro.tolist())
                some = ids[micro, :length].to(device)
                inside = mask[micro, : length - 1].to(device)
                before = old[micro, : length - 1].to(device)
                gain = advantages[micro].to(device)[:, None]
                with bf16(change == "bf16_autocast"):
                    if number in known:
                        base = known[number]
                    else:
                        with torch.no_grad():
                            base = token_log_probs(reference, some, inside, answers_only)
                    if change == "reference_once":
                        known[number] = base
                    new = token_log_probs(model, some, inside, answers_only)
                ratio = torch.exp(torch.where(inside, new - before, 0.0))
                surrogate = torch.min(ratio * gain, ratio.clamp(0.8, 1.2) * gain)
                gap = torch.where(inside, base - new, 0.0)
                divergence = torch.exp(gap) - gap - 1
                per_token = (0.04 * divergence - surrogate) * inside
                loss = (per_token.sum(1) / inside.sum(1)).sum() / len(rows)
                loss.backward()
                total += loss.detach() + ((new.detach() * inside).sum(1) / inside.sum(1)).sum() / len(rows)
            nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
            optimizer.step()
        return total

    return step


# ---- 2. Upscaling of photos -----------------------------------------------------------------------------------------


class ResidualDenseBlock(nn.Module):
    """Five convolutions, each of which sees the outputs of all before it."""

    def __init__(self, width, growth):
        super().__init__()
        self.convs = nn.ModuleList(
            nn.Conv2d(width + i * growth, growth if i < 4 else width, 3, padding=1) for i in range(5)
        )
        for conv in self.convs:
            nn.init.kaiming_normal_(conv.weight)
            conv.weight.data *= 0.1
        self.act = nn.LeakyReLU(0.2, inplace=True)

    def forward(self, x):
        seen = [x]
        for conv in self.convs[:-1]:
            seen.append(self.act(conv(torch.cat(seen, 1))))
        return self.convs[-1](torch.cat(seen, 1)) * 0.2 + x


class ResidualInResidual(nn.Module):
    """Three dense blocks in a residual connection."""

    def __init__(self, width, growth):
        super().__init__()
        self.blocks = nn.Sequential(*(ResidualDenseBlock(width, growth) for _ in range(3)))

    def forward(self, x):
        return self.blocks(x) * 0.2 + x


class UpscalerRRDB(nn.Module):
    """The generator of ESRGAN, which enlarges four times."""

    def __init__(self, width, growth, depth):
        super().__init__()
        self.first = nn.Conv2d(3, width, 3, padding=1)
        self.body = nn.Sequential(*(ResidualInResidual(width, growth) for _ in range(depth)))
        self.after, self.up1, self.up2, self.fine = (nn.Conv2d(width, width, 3, padding=1) for _ in range(4))
        self.last = nn.Conv2d(width, 3, 3, padding=1)
        nn.init.constant_(self.last.bias, 0.5)
        self.act = nn.LeakyReLU(0.2, inplace=True)

    def forward(self, x):
        x = self.first(x)
        x = x + self.after(self.body(x))
        x = self.act(self.up1(F.interpolate(x, scale_factor=2, mode="nearest")))
        x = self.act(self.up2(F.interpolate(x, scale_factor=2, mode="nearest")))
        return self.last(self.act(self.fine(x)))


def photo_upscaler(change):
    """One photo of 256 x 384 pixels is enlarged four times in tiles of 128 pixels that overlap by 16 on each side."""
    model = UpscalerRRDB(size(64, 8), size(32, 4), size(23, 1)).to(device).eval()
    if change == "half_precision":
        model = model.half()
    if change == "channels_last":
        model = model.to(memory_format=torch.channels_last)
    if change == "compile_model":
        model = compiled(model)
    dtype = torch.float16 if change == "half_precision" else torch.float32
    tile, margin = size(128, 16), size(16, 4)
    height, width = 2 * tile, 3 * tile
    rng = np.random.default_rng(2)
    rows, columns = np.mgrid[:height, :width] / tile
    photos = []
    for number in range(4):
        waves = [np.sin(rows * (2 + number) + channel) * np.cos(columns * 3 + channel) for channel in range(3)]
        noisy = 128 + 80 * np.stack(waves, -1) + rng.normal(0, 10, (height, width, 3))
        photos.append(noisy.clip(0, 255).astype(np.uint8))
    turn = iter(range(10**9))

    def upscale(pieces):
        pieces = pieces.to(device, dtype)
        if change == "channels_last":
            pieces = pieces.to(memory_format=torch.channels_last)
        return model(pieces)

    def to_float(photo):
        if change == "pixels_on_gpu":
            return torch.from_numpy(photo).to(device).permute(2, 0, 1).float().unsqueeze(0) / 255
        return torch.from_numpy(np.transpose(photo.astype(np.float32) / 255.0, (2, 0, 1)).copy()).unsqueeze(0)

    @torch.no_grad()
    def step():
        image = F.pad(to_float(photos[next(turn) % len(photos)]), (margin,) * 4, mode="reflect")
        place = device if change == "pixels_on_gpu" else "cpu"
        canvas = torch.zeros(1, 3, 4 * height, 4 * width, device=place)
        corners = [(y, x) for y in range(0, height, tile) for x in range(0, width, tile)]
        pieces = [image[:, :, y : y + tile + 2 * margin, x : x + tile + 2 * margin] for y, x in corners]
        if change == "batch_tiles":
            results = upscale(torch.cat(pieces)).to(place).split(1)
        else:
            results = (upscale(piece).to(place) for piece in pieces)
        inner = slice(4 * margin, 4 * (margin + tile))
        for (y, x), result in zip(corners, results, strict=True):
            canvas[:, :, 4 * y : 4 * (y + tile), 4 * x : 4 * (x + tile)] = result[:, :, inner, inner].float()
        if change == "pixels_on_gpu":
            return (canvas[0].clamp(0, 1) * 255).round().to(torch.uint8).permute(1, 2, 0).contiguous().cpu()
        output = canvas.squeeze(0).clamp(0, 1).numpy()
        output = np.transpose(output, (1, 2, 0))
        return torch.from_numpy((output * 255.0).round().astype(np.uint8))

    return step


# ---- 3. EEG classification ------------------------------------------------------------------------------------------

EEG_RATE = 250
EEG_BANDS = ((1, 4), (4, 8), (8, 13), (13, 30), (30, 45))


def eeg_features(window):
    """Return the window filtered to 4-40 Hz and standardized, and the logarithms of its power in five bands."""
    samples = window.shape[-1]
    frequencies = np.fft.rfftfreq(samples, 1 / EEG_RATE)
    spectrum = np.fft.rfft(window, axis=-1)
    filtered = np.fft.irfft(spectrum * ((frequencies >= 4) & (frequencies <= 40)), n=samples, axis=-1)
    filtered = (filtered - filtered.mean(-1, keepdims=True)) / (filtered.std(-1, keepdims=True) + 1e-6)
    power = np.abs(np.fft.rfft(window * np.hanning(samples), axis=-1)) ** 2
    bands = [power[:, (frequencies >= low) & (frequencies < high)].mean(-1) for low, high in EEG_BANDS]
    return filtered.astype(np.float32), np.log(np.stack(bands, -1) + 1e-6).astype(np.float32)


def eeg_features_of_batch(windows):
    """Return what eeg_features returns, for a batch of windows on the device."""
    samples = windows.shape[-1]
    frequencies = torch.fft.rfftfreq(samples, 1 / EEG_RATE, device=windows.device)
    spectrum = torch.fft.rfft(windows)
    filtered = torch.fft.irfft(spectrum * ((frequencies >= 4) & (frequencies <= 40)), n=samples)
    filtered = filtered - filtered.mean(-1, keepdim=True)
    filtered = filtered / (filtered.std(-1, keepdim=True, correction=0) + 1e-6)
    hann = torch.hann_window(samples, periodic=False, device=windows.device)
    power = torch.fft.rfft(windows * hann).abs() ** 2
    inside = torch.stack([(frequencies >= low) & (frequencies < high) for low, high in EEG_BANDS], 1).float()
    return filtered, torch.log(power @ (inside / inside.sum(0)) + 1e-6)


class EEGWindows(Dataset):
    """Windows of a recording with a label each."""

    def __init__(self, windows, labels, crop, prepare):
        self.windows, self.labels, self.crop = windows, labels, crop
        self.raw = prepare == "features_on_gpu"
        self.cache = None
        if prepare == "features_cached":
            self.cache = [eeg_features(window) for window in windows]

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        start = torch.randint(self.windows.shape[-1] - self.crop + 1, ()).item()
        if self.raw:
            return torch.from_numpy(self.windows[index]), start, self.labels[index]
        filtered, bands = self.cache[index] if self.cache else eeg_features(self.windows[index])
        cut = filtered[:, start : start + self.crop]
        return torch.from_numpy(cut), torch.from_numpy(bands), self.labels[index]


class EEGConformer(nn.Module):
    """Temporal and spatial convolution, a small transformer, and a head that also sees the powers of the bands."""

    def __init__(self, channels, crop, classes, merged, width=40):
        super().__init__()
        self.merged = merged
        self.temporal, self.spatial = nn.Conv2d(1, width, (1, 25)), nn.Conv2d(width, width, (channels, 1))
        self.norm, self.pool = nn.BatchNorm2d(width), nn.AvgPool2d((1, 75), (1, 15))
        layer = nn.TransformerEncoderLayer(width, 10, 4 * width, 0.5, "gelu", batch_first=True, norm_first=True)
        self.project, self.dropout = nn.Conv2d(width, width, 1), nn.Dropout(0.5)
        self.encoder = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)
        tokens = (crop - 24 - 75) // 15 + 1
        self.bands = nn.Sequential(nn.Linear(5 * channels, 128), nn.ELU())
        self.head = nn.Sequential(
            nn.Linear(tokens * width + 128, 256), nn.ELU(), nn.Dropout(0.5), nn.Linear(256, classes)
        )

    def forward(self, x, bands):
        if self.merged:
            kernel = torch.einsum("ofc,ft->oct", self.spatial.weight[..., 0], self.temporal.weight[:, 0, 0])
            bias = self.spatial.bias + self.spatial.weight.sum((2, 3)) @ self.temporal.bias
            x = F.conv1d(x, kernel, bias).unsqueeze(2)
        else:
            x = self.spatial(self.temporal(x.unsqueeze(1)))
        x = self.project(self.dropout(self.pool(F.elu(self.norm(x)))))
        x = self.encoder(x.squeeze(2).transpose(1, 2))
        return self.head(torch.cat([x.flatten(1), self.bands(bands.flatten(1))], dim=1))


def eeg_classifier(change):
    """A conv-transformer is trained on batches of 64 windows of 64 channels, filtered and cropped while loading."""
    rng = np.random.default_rng(3)
    channels, length, crop, classes = size(64, 8), size(1125, 300), size(1000, 250), 4
    count, batch = size(512, 16), size(64, 8)
    labels = rng.integers(0, classes, count)
    windows = rng.standard_normal((count, channels, length), dtype=np.float32) * 10
    waves = np.sin(2 * np.pi * (6 + 6 * labels)[:, None] * np.arange(length) / EEG_RATE)
    windows += 3 * waves[:, None].astype(np.float32)
    data = EEGWindows(windows, labels, crop, change)
    options = {}
    if change == "loader_workers":
        options = dict(num_workers=size(8, 2), persistent_workers=True, multiprocessing_context="fork")
    batches = endless(DataLoader(data, batch_size=batch, shuffle=True, drop_last=True, **options))
    next(batches)
    model = EEGConformer(channels, crop, classes, change == "merged_convolutions").to(device).train()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-4, betas=(0.5, 0.999))
    criterion = nn.CrossEntropyLoss()
    correct = []

    def step():
        first, second, targets = (part.to(device) for part in next(batches))
        if change == "features_on_gpu":
            filtered, bands = eeg_features_of_batch(first)
            places = second[:, None, None] + torch.arange(crop, device=device)
            signals = filtered.gather(2, places.expand(-1, channels, -1))
        else:
            signals, bands = first, second
        with bf16(change == "bf16_autocast"):
            outputs = model(signals, bands)
            loss = criterion(outputs, targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        correct.append((outputs.argmax(1) == targets).float().mean().item())
        return loss.detach()

    return step


# ---- 4. Hash grid ---------------------------------------------------------------------------------------------------


class HashGrid(nn.Module):
    """The multiresolution hash encoding of points of the unit square."""

    def __init__(self, levels, log2_rows, coarsest, finest, change):
        super().__init__()
        self.change, self.rows = change, 2**log2_rows
        growth = math.exp((math.log(finest) - math.log(coarsest)) / (levels - 1))
        self.resolutions = [int(coarsest * growth**level + 1e-6) for level in range(levels)]
        counts = [min((resolution + 1) ** 2, self.rows) for resolution in self.resolutions]
        tables = [torch.empty(count, 2).uniform_(-1e-1, 1e-1) for count in counts]
        if change == "levels_at_once":
            self.table = nn.Parameter(torch.cat(tables))
            self.register_buffer("scale", torch.tensor(self.resolutions))
            self.register_buffer("offset", torch.tensor([0, *np.cumsum(counts)[:-1].tolist()]))
            self.register_buffer("corners", torch.tensor([[0, 0], [0, 1], [1, 0], [1, 1]]))
        else:
            self.tables = nn.ParameterList(tables)

    def lookup(self, table, index):
        """Return rows of a table."""
        if self.change == "index_select_lookup":
            return table.index_select(0, index)
        return table[index]

    def row(self, x, y, resolution):
        """Return the row of a grid point: its own in coarse grids, a hash in fine ones."""
        if (resolution + 1) ** 2 <= self.rows:
            return x * (resolution + 1) + y
        return (x ^ (y * 2654435761)) % self.rows

    def all_levels(self, points):
        """Return the encoding with one look-up for all levels and corners."""
        scaled = points[:, None] * self.scale[:, None]
        low = scaled.floor()
        part = (scaled - low)[:, :, None]
        x, y = (low.long()[:, :, None] + self.corners).unbind(-1)
        wide = (self.scale + 1)[:, None]
        index = torch.where(wide**2 <= self.rows, x * wide + y, (x ^ (y * 2654435761)) % self.rows)
        found = self.table[index + self.offset[:, None]]
        weight = torch.where(self.corners == 1, part, 1 - part).prod(-1, keepdim=True)
        return (found * weight).sum(2).flatten(1)

    def forward(self, points):
        if self.change == "levels_at_once":
            return self.all_levels(points)
        encoded = []
        for table, resolution in zip(self.tables, self.resolutions, strict=True):
            scaled = points * resolution
            low = scaled.floor()
            part = scaled - low
            x, y = low.long().unbind(-1)
            px, py = part[:, :1], part[:, 1:]
            value = self.lookup(table, self.row(x, y, resolution)) * (1 - px) * (1 - py)
            value = value + self.lookup(table, self.row(x, y + 1, resolution)) * (1 - px) * py
            value = value + self.lookup(table, self.row(x + 1, y, resolution)) * px * (1 - py)
            value = value + self.lookup(table, self.row(x + 1, y + 1, resolution)) * px * py
            encoded.append(value)
        return torch.cat(encoded, dim=-1)


class GridPainter(nn.Module):
    """Hash grid and a small network that returns the colour of points."""

    def __init__(self, levels, log2_rows, finest, change):
        super().__init__()
        self.grid = HashGrid(levels, log2_rows, 16, finest, change)
        self.layers = nn.Sequential(
            nn.Linear(2 * levels, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3), nn.Sigmoid()
        )

    def forward(self, points):
        return self.layers(self.grid(points))


def hash_grid_image(change):
    """A hash grid with 16 levels and a small network learn the colours of an image of 4096 x 4096 pixels."""
    side, batch = size(4096, 128), size(2**18, 512)
    ticks = torch.linspace(0, 40, side)
    image = torch.stack(
        [
            (torch.sin(ticks[:, None] * (1 + channel)) * torch.cos(ticks[None] * 2 + channel * ticks[:, None] / 9))
            for channel in range(3)
        ],
        -1,
    )
    image = ((image * 0.5 + 0.5) * 255).to(torch.uint8).to(device)
    painter = GridPainter(size(16, 4), size(19, 10), size(2048, 64), change).to(device)
    model = compiled(painter) if change == "compile_model" else painter
    capturable = change == "cuda_graph" and ON_GPU
    optimizer = torch.optim.Adam(painter.parameters(), lr=1e-2, betas=(0.9, 0.99), eps=1e-15, capturable=capturable)

    def train():
        rows = torch.randint(side, (batch,), device=device)
        columns = torch.randint(side, (batch,), device=device)
        points = (torch.stack([rows, columns], -1).float() + 0.5) / side
        colours = image[rows, columns].float() / 255
        with bf16(change == "bf16_autocast"):
            predicted = model(points)
        error = (predicted.float() - colours) ** 2
        loss = (error / (predicted.detach().float() ** 2 + 0.01)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return graphed_training(train, [painter], [optimizer]) if change == "cuda_graph" else train


# ---- 5. Semi-supervised training ------------------------------------------------------------------------------------


def weak_view(image, rng):
    """Return an image, mirrored half of the time, and shifted by up to four pixels."""
    if rng.random() < 0.5:
        image = image[:, :, ::-1]
    grown = np.pad(image, ((0, 0), (4, 4), (4, 4)), mode="reflect")
    y, x = rng.integers(0, 9, 2)
    return grown[:, y : y + image.shape[1], x : x + image.shape[2]].astype(np.float32) / 255


def change_colours(image, kind, strength):
    """Return the image after one of six changes of its colours."""
    if kind == 0:
        image = image * (0.2 + 1.6 * strength)
    elif kind == 1:
        average = image.mean()
        image = average + (image - average) * (0.2 + 1.6 * strength)
    elif kind == 2:
        grey = image.mean(0, keepdims=True)
        image = grey + (image - grey) * (0.2 + 1.6 * strength)
    elif kind == 3:
        image = np.where(image < strength, image, 1 - image)
    elif kind == 4:
        steps = 2.0 ** (4 + int(strength * 4))
        image = np.floor(image * steps) / steps
    return np.clip(image, 0, 1)


def strong_view(image, rng):
    """Return the weak view after two changes of the colours, with a grey square."""
    image = weak_view(image, rng)
    for _ in range(2):
        image = change_colours(image, rng.integers(6), rng.random())
    side = image.shape[1]
    y, x = rng.integers(0, side, 2)
    image = image.copy()
    image[:, max(0, y - side // 4) : y + side // 4, max(0, x - side // 4) : x + side // 4] = 0.5
    return image


def weak_views(images):
    """Return weak views of a batch of 8-bit images on the device."""
    count, _, side, _ = images.shape
    images = images.float() / 255
    mirrored = torch.rand(count, 1, 1, 1, device=images.device) < 0.5
    grown = F.pad(torch.where(mirrored, images.flip(-1), images), (4, 4, 4, 4), mode="reflect")
    y, x = (
        torch.randint(9, (count, 1), device=images.device) + torch.arange(side, device=images.device) for _ in range(2)
    )
    number = torch.arange(count, device=images.device)[:, None, None, None]
    channel = torch.arange(3, device=images.device)[None, :, None, None]
    return grown[number, channel, y[:, None, :, None], x[:, None, None, :]]


def strong_views(images):
    """Return strong views of a batch of 8-bit images on the device."""
    count, _, side, _ = images.shape
    images = weak_views(images)
    for _ in range(2):
        kind = torch.randint(6, (count, 1, 1, 1), device=images.device)
        strength = torch.rand(count, 1, 1, 1, device=images.device)
        factor = 0.2 + 1.6 * strength
        average, grey = images.mean((1, 2, 3), keepdim=True), images.mean(1, keepdim=True)
        steps = 2.0 ** (4 + (strength * 4).floor())
        images = torch.where(kind == 0, images * factor, images)
        images = torch.where(kind == 1, average + (images - average) * factor, images)
        images = torch.where(kind == 2, grey + (images - grey) * factor, images)
        images = torch.where((kind == 3) & (images >= strength), 1 - images, images)
        images = torch.where(kind == 4, (images * steps).floor() / steps, images).clamp(0, 1)
    places = torch.arange(side, device=images.device)
    y, x = (torch.randint(side, (count, 1), device=images.device) for _ in range(2))
    inside_y, inside_x = ((places >= at - side // 4) & (places < at + side // 4) for at in (y, x))
    return images.masked_fill((inside_y[:, :, None] & inside_x[:, None])[:, None], 0.5)


class FixMatchImages(Dataset):
    """Small images with the views that training needs: weak for labelled ones, weak and strong for the others."""

    def __init__(self, images, labels, raw):
        self.images, self.labels, self.raw = images, labels, raw

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        image = self.images[index]
        if self.raw:
            return (torch.from_numpy(image), self.labels[index]) if self.labels is not None else torch.from_numpy(image)
        rng = np.random.default_rng(torch.randint(2**31, ()).item())
        weak = torch.from_numpy(weak_view(image, rng))
        if self.labels is not None:
            return weak, self.labels[index]
        return weak, torch.from_numpy(strong_view(image, rng))


class WideBlock(nn.Module):
    """A pre-activation residual block."""

    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.norm1, self.norm2 = nn.BatchNorm2d(inputs), nn.BatchNorm2d(outputs)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.short = nn.Conv2d(inputs, outputs, 1, stride, bias=False) if inputs != outputs else nn.Identity()
        self.act = nn.LeakyReLU(0.1, inplace=True)

    def forward(self, x):
        out = self.conv1(self.act(self.norm1(x)))
        return self.conv2(self.act(self.norm2(out))) + self.short(x)


class WideResNet(nn.Module):
    """WRN-28-2 for ten classes."""

    def __init__(self, depth, widths):
        super().__init__()
        layers, inputs = [nn.Conv2d(3, 16, 3, padding=1, bias=False)], 16
        for number, width in enumerate(widths):
            for block in range(depth):
                layers.append(WideBlock(inputs, width, 2 if number and not block else 1))
                inputs = width
        self.layers = nn.Sequential(*layers, nn.BatchNorm2d(inputs), nn.LeakyReLU(0.1))
        self.head = nn.Linear(inputs, 10)

    def forward(self, x):
        return self.head(self.layers(x).mean((2, 3)))


def semi_supervised(change):
    """FixMatch with a WRN-28-2: 64 labelled and 448 unlabelled images of 32 x 32 pixels per step, and an EMA model."""
    rng = np.random.default_rng(4)
    batch, ratio = size(64, 4), size(7, 2)
    images = rng.integers(0, 256, (size(10_000, 64), 3, 32, 32), dtype=np.uint8)
    labels = rng.integers(0, 10, size(2_000, 32))
    raw = change == "augment_on_gpu"
    labelled = FixMatchImages(images[: len(labels)], labels, raw)
    unlabelled = FixMatchImages(images[len(labels) :], None, raw)
    workers = size(8, 2) if change == "loader_workers" else size(2, 1)
    labelled_loader = endless(DataLoader(labelled, batch, shuffle=True, drop_last=True))
    unlabelled_loader = endless(
        DataLoader(
            unlabelled,
            batch * ratio,
            shuffle=True,
            drop_last=True,
            num_workers=workers,
            persistent_workers=True,
            multiprocessing_context="fork",
        )
    )
    next(unlabelled_loader)
    network = WideResNet(size(4, 1), [size(width, width // 4) for width in (32, 64, 128)]).to(device)
    average = copy.deepcopy(network).requires_grad_(False).eval()
    model = compiled(network) if change == "compile_model" else network
    optimizer = torch.optim.SGD(network.parameters(), lr=0.03, momentum=0.9, weight_decay=5e-4, nesterov=True)
    pairs = list(zip(average.parameters(), network.parameters(), strict=True))
    buffers = list(zip(average.buffers(), network.buffers(), strict=True))
    meters = {"loss": [], "mask": []}

    @torch.no_grad()
    def update_average():
        if change == "ema_foreach":
            torch._foreach_lerp_([pair[0] for pair in pairs], [pair[1] for pair in pairs], 0.001)
            torch._foreach_copy_([pair[0] for pair in buffers], [pair[1] for pair in buffers])
            return
        weights, saved = network.state_dict(), average.state_dict()
        for name, _ in network.named_parameters():
            saved[name].copy_(saved[name] * 0.999 + (1 - 0.999) * weights[name])
        for name, _ in network.named_buffers():
            saved[name].copy_(weights[name])

    def step():
        known, targets = next(labelled_loader)
        known, targets = known.to(device), targets.to(device)
        if raw:
            others = next(unlabelled_loader).to(device)
            known, weak, strong = weak_views(known), weak_views(others), strong_views(others)
        else:
            weak, strong = (part.to(device) for part in next(unlabelled_loader))
        inputs = (torch.cat([known, weak, strong]) - 0.5) / 0.25
        with bf16(change == "bf16_autocast"):
            logits = model(inputs).float()
        logits_known, logits_weak, logits_strong = logits.split([batch, batch * ratio, batch * ratio])
        loss_known = F.cross_entropy(logits_known, targets)
        confidence, pseudo = torch.softmax(logits_weak.detach(), dim=-1).max(-1)
        mask = confidence.ge(0.95).float()
        loss = loss_known + (F.cross_entropy(logits_strong, pseudo, reduction="none") * mask).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        update_average()
        meters["loss"].append(loss.item())
        meters["mask"].append(mask.mean().item())
        return loss.detach()

    return step


# ---- 6. Tagging of entities -----------------------------------------------------------------------------------------

TAGS = ["O", "B-PER", "I-PER", "B-ORG", "I-ORG", "B-LOC", "I-LOC", "B-MISC", "I-MISC"]


def read_spans(tags, scores):
    """Return (kind, first word, last word, mean score) of the entities of a sentence with tags B-, I- and O."""
    spans, kind, begin = [], None, 0
    for place, tag in enumerate([*tags, "O"]):
        if kind is not None and tag != f"I-{kind}":
            spans.append((kind, begin, place - 1, sum(scores[begin:place]) / (place - begin)))
            kind = None
        if tag != "O" and kind is None:
            kind, begin = tag[2:], place
    return spans


def entity_tagger(change):
    """A BERT-base tagger answers a request of 64 sentences of 8 to 128 tokens with the entities in them."""
    from transformers import BertConfig, BertForTokenClassification

    if change == "tf32_matmul":
        use_tf32()
    config = BertConfig(
        vocab_size=size(28996, 500),
        hidden_size=size(768, 32),
        num_hidden_layers=size(12, 2),
        num_attention_heads=size(12, 2),
        intermediate_size=size(3072, 64),
        num_labels=len(TAGS),
    )
    tagger = BertForTokenClassification(config).to(device).eval()
    with torch.no_grad():
        tagger.classifier.bias[0] += 1.0
    if change == "half_precision":
        tagger = tagger.half()
    model = compiled(tagger, dynamic=True) if change == "compile_model" else tagger
    rng = np.random.default_rng(5)
    count, batch = size(64, 8), size(16, 4)

    def sentence():
        """Return the ids of a sentence's word pieces, and the places where words begin."""
        length = int(np.clip(rng.lognormal(3.4, 0.6), 8, size(128, 24)))
        begins = [1, *(place for place in range(2, length - 1) if rng.random() < 0.8)]
        return [101 % config.vocab_size, *rng.integers(110, config.vocab_size, length - 2).tolist(), 102], begins

    requests = [[sentence() for _ in range(count)] for _ in range(4)]
    turn = iter(range(10**9))

    @torch.no_grad()
    def step():
        request = requests[next(turn) % len(requests)]
        order = list(range(len(request)))
        if change == "sort_by_length":
            order.sort(key=lambda number: len(request[number][0]))
        answers, means = [None] * len(request), [0.0] * len(request)
        for start in range(0, len(order), batch):
            numbers = order[start : start + batch]
            longest = max(len(request[number][0]) for number in numbers)
            ids = torch.zeros(len(numbers), longest, dtype=torch.long)
            mask = torch.zeros(len(numbers), longest, dtype=torch.long)
            for row, number in enumerate(numbers):
                pieces = request[number][0]
                ids[row, : len(pieces)] = torch.tensor(pieces)
                mask[row, : len(pieces)] = 1
            logits = model(input_ids=ids.to(device), attention_mask=mask.to(device)).logits
            scores, labels = torch.softmax(logits.float(), dim=-1).max(dim=-1)
            if change == "labels_to_cpu_once":
                scores, labels = scores.cpu(), labels.cpu()
            for row, number in enumerate(numbers):
                tags, sure = [], []
                for place in request[number][1]:
                    tags.append(TAGS[labels[row, place].item()])
                    sure.append(scores[row, place].item())
                answers[number] = read_spans(tags, sure)
                means[number] = sum(sure) / len(sure)
        return torch.tensor(means)

    return step


# ---- 7. Burgers' equation -------------------------------------------------------------------------------------------


class BurgersNet(nn.Module):
    """A network with tanh between its layers for u(x, t)."""

    def __init__(self, width, depth):
        super().__init__()
        widths = [2, *[width] * depth, 1]
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(widths))
        for layer in self.layers:
            nn.init.xavier_normal_(layer.weight)
            nn.init.zeros_(layer.bias)

    def forward(self, x, t):
        h = torch.cat([x, t], dim=1)
        for layer in self.layers[:-1]:
            h = torch.tanh(layer(h))
        return self.layers[-1](h)

    def with_derivatives(self, x, t):
        """Return u, u_x, u_t and u_xx, which are carried from layer to layer."""
        h = torch.cat([x, t], dim=1)
        hx, ht = torch.zeros_like(h), torch.zeros_like(h)
        hx[:, 0], ht[:, 1] = 1, 1
        hxx = torch.zeros_like(h)
        for layer in self.layers[:-1]:
            a, (ax, at, axx) = layer(h), (part @ layer.weight.T for part in (hx, ht, hxx))
            h = torch.tanh(a)
            slope = 1 - h * h
            hx, ht, hxx = slope * ax, slope * at, slope * axx - 2 * h * slope * ax * ax
        last = self.layers[-1]
        return last(h), *(part @ last.weight.T for part in (hx, ht, hxx))


def burgers_residual(change):
    """A physics-informed network learns Burgers' equation from 20000 new collocation points per step."""
    if change == "tf32_matmul":
        use_tf32()
    inside, edge, viscosity = size(20_000, 200), size(500, 20), 0.01 / math.pi
    net = BurgersNet(size(128, 16), size(7, 2)).to(device)
    capturable = change == "cuda_graph" and ON_GPU
    fused = True if change == "fused_adam" else None
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3, capturable=capturable, fused=fused)
    rng = np.random.default_rng(6)
    history = []

    def gradient(outputs, inputs):
        return torch.autograd.grad(outputs, inputs, torch.ones_like(outputs), create_graph=True)

    def sample():
        points = rng.random((inside, 2)) * [2, 1] - [1, 0]
        edges = rng.random((edge, 2)) * [2, 1] - [1, 0]
        return (torch.tensor(part, dtype=torch.float32).to(device) for part in (points, edges))

    def train(points, edges):
        x, t = points[:, :1].clone().requires_grad_(), points[:, 1:].clone().requires_grad_()
        if change == "derivatives_forward":
            u, u_x, u_t, u_xx = net.with_derivatives(x.detach(), t.detach())
        else:
            u = net(x, t)
            if change == "one_gradient_call":
                u_x, u_t = gradient(u, (x, t))
            else:
                u_x, u_t = gradient(u, x)[0], gradient(u, t)[0]
            u_xx = gradient(u_x, x)[0]
        residual = u_t + u * u_x - viscosity * u_xx
        x0, tb = edges[:, :1], edges[:, 1:]
        initial = net(x0, torch.zeros_like(x0)) + torch.sin(math.pi * x0)
        left, right = net(-torch.ones_like(tb), tb), net(torch.ones_like(tb), tb)
        parts = [(residual**2).mean(), (initial**2).mean(), (left**2).mean() + (right**2).mean()]
        loss = sum(parts)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return torch.stack([loss.detach(), *(part.detach() for part in parts)])

    if change == "cuda_graph":
        static = [torch.zeros(inside, 2, device=device), torch.zeros(edge, 2, device=device)]
        replay = graphed_training(lambda: train(*static), [net], [optimizer])

    def step():
        new = sample()
        if change == "cuda_graph":
            for kept, part in zip(static, new, strict=True):
                kept.copy_(part)
            losses = replay()
        else:
            losses = train(*new)
        history.append([value.item() for value in losses])
        return losses[0]

    return step


PROGRAMS = {
    group_policy_update: {"bf16_autocast": "half_precision", "reference_once": "", "answer_tokens_only": "",
                          "micro_batches_by_length": "trim_padding", "compile_policy": "fuse_pointwise"},
    photo_upscaler: {"half_precision": "half_precision", "channels_last": "channels_last",
                     "batch_tiles": "larger_batch", "pixels_on_gpu": "cpu_tensors", "compile_model": "fuse_pointwise"},
    eeg_classifier: {"features_on_gpu": "data_loader", "features_cached": "data_loader",
                     "loader_workers": "data_loader", "merged_convolutions": "", "bf16_autocast": "half_precision"},
    hash_grid_image: {"index_select_lookup": "index_select", "levels_at_once": "larger_batch",
                      "compile_model": "fuse_pointwise",
                      "cuda_graph": "cuda_graph", "bf16_autocast": "half_precision"},
    semi_supervised: {"augment_on_gpu": "data_loader", "loader_workers": "data_loader",
                      "bf16_autocast": "half_precision", "compile_model": "fuse_pointwise", "ema_foreach": ""},
    entity_tagger: {"half_precision": "half_precision", "tf32_matmul": "tf32", "sort_by_length": "trim_padding",
                    "labels_to_cpu_once": "remove_sync", "compile_model": "fuse_pointwise"},
    burgers_residual: {"cuda_graph": "cuda_graph", "derivatives_forward": "", "one_gradient_call": "",
                       "tf32_matmul": "tf32", "fused_adam": "fused_optimizer"},
}  # fmt: skip
