"""Services and trainings: separated music, the perplexity of long texts, tables, a language model with adapters."""

import math
from itertools import cycle, pairwise

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from setting import bf16, device, graphed, graphed_training, size, use_tf32


class UnmixConvs(nn.Sequential):
    """Two 3x3 convolutions, each with batch normalization and GELU."""

    def __init__(self, inputs, outputs):
        super().__init__(
            nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.GELU(),
            nn.Conv2d(outputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.GELU(),
        )  # fmt: skip


class UnmixUNet(nn.Module):
    """U-Net over the complex stereo spectrogram that predicts a complex mask for each stem."""

    def __init__(self, audio_channels, stems, width, levels):
        super().__init__()
        self.stems, self.audio_channels = stems, audio_channels
        widths = [width * 2**level for level in range(levels)]
        self.first = UnmixConvs(2 * audio_channels, width)
        self.down = nn.ModuleList(nn.Conv2d(a, b, 2, stride=2) for a, b in pairwise(widths))
        self.encoders = nn.ModuleList(UnmixConvs(b, b) for b in widths[1:])
        self.up = nn.ModuleList(nn.ConvTranspose2d(b, a, 2, stride=2) for a, b in pairwise(widths))
        self.decoders = nn.ModuleList(UnmixConvs(2 * a, a) for a in widths[:-1])
        self.last = nn.Conv2d(width, stems * 2 * audio_channels, 1)

    def forward(self, x):
        skips = [self.first(x)]
        for down, encoder in zip(self.down, self.encoders, strict=False):
            skips.append(encoder(down(skips[-1])))
        x = skips.pop()
        for up, decoder in zip(reversed(self.up), reversed(self.decoders), strict=False):
            x = decoder(torch.cat([up(x), skips.pop()], dim=1))
        masks = torch.tanh(self.last(x))
        return masks.unflatten(1, (self.stems, self.audio_channels, 2))


class UnmixSeparator(nn.Module):
    """Waveform in, waveforms of the stems out: STFT, masks from the U-Net, inverse STFT."""

    def __init__(self, n_fft, hop, width, levels, half_precision):
        super().__init__()
        self.n_fft, self.hop, self.half_precision = n_fft, hop, half_precision
        self.unet = UnmixUNet(2, 4, width, levels)
        self.register_buffer("window", torch.hann_window(n_fft))

    def forward(self, audio):
        batch, channels, samples = audio.shape
        spec = torch.stft(
            audio.reshape(-1, samples), self.n_fft, self.hop, window=self.window, normalized=True, return_complex=True
        )
        spec = spec.view(batch, channels, *spec.shape[1:])[:, :, :-1]  # without the Nyquist bin
        features = torch.view_as_real(spec).permute(0, 1, 4, 2, 3).flatten(1, 2)
        with bf16(self.half_precision):
            masks = self.unet(features)
        masks = torch.view_as_complex(masks.float().permute(0, 1, 2, 4, 5, 3).contiguous())
        stems = F.pad(masks * spec.unsqueeze(1), (0, 0, 0, 1))
        waves = torch.istft(
            stems.flatten(0, 2), self.n_fft, self.hop, window=self.window, normalized=True, length=samples
        )
        return waves.view(batch, -1, channels, samples)


def synthetic_songs(count, length, rate):
    """Return stereo pieces made of decaying tones and noise."""
    seconds = torch.arange(length) / rate
    songs = []
    for number in range(count):
        song = 0.02 * torch.randn(2, length)
        for tone in range(6):
            wave = torch.sin(2 * math.pi * 55 * (tone + 1.3) * (number + 1) * seconds)
            song += 0.2 * torch.rand(2, 1) * wave * torch.exp(-((seconds * (tone + 1)) % 2.0))
        songs.append(song)
    return songs


def music_unmixing(change):
    """Serve requests for unmixing: a song is separated into 4 stems in overlapping windows; a step is one song."""
    torch.manual_seed(0)
    rate, hop = 44100, size(1024, 64)
    segment = hop * (size(256, 32) - 1)
    stride = int(0.75 * segment)
    songs = cycle(synthetic_songs(3, size(45 * rate, 10 * segment), rate))
    separator = UnmixSeparator(size(4096, 256), hop, size(32, 4), size(5, 3), change == "half_precision")
    separator = separator.to(device).eval()
    if change == "cudnn_benchmark":
        torch.backends.cudnn.benchmark = True

    place = device if change == "overlap_add_on_gpu" else torch.device("cpu")
    half = segment // 2
    weight = torch.cat([torch.arange(1, half + 1), torch.arange(segment - half, 0, -1)]) / half
    weight = weight.to(place)

    def windows(mix):
        for start in range(0, mix.shape[-1], stride):
            window = mix[:, start : start + segment]
            yield start, window.shape[-1], F.pad(window, (0, segment - window.shape[-1]))

    def estimates(mix):
        if change == "batched_windows":
            starts, lengths, inputs = zip(*windows(mix), strict=False)
            outputs = separator(torch.stack(inputs).to(device)).to(place)
            yield from zip(starts, lengths, outputs, strict=False)
            return
        for start, length, window in windows(mix):
            yield start, length, separator(window[None].to(device))[0].to(place)

    @torch.no_grad()
    def step():
        mix = next(songs).to(place)
        mono = mix.mean(dim=0)
        mean, std = mono.mean(), mono.std()
        mix = (mix - mean) / std
        total = torch.zeros(4, *mix.shape, device=place)
        weights = torch.zeros(mix.shape[-1], device=place)
        for start, length, estimate in estimates(mix):
            total[..., start : start + length] += weight[:length] * estimate[..., :length]
            weights[start : start + length] += weight[:length]
        stems = total / weights * std + mean
        pcm = (stems.clamp(-1, 1) * 32767).to(torch.int16).cpu()
        assert pcm.shape[-1] == mix.shape[-1]
        return stems.square().mean(dim=(1, 2)).sqrt()  # the loudness of each stem, for the reply

    return step


class ScoringNewGELU(nn.Module):
    """The GELU of GPT-2, written out."""

    def forward(self, x):
        return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


class ScoringAttention(nn.Module):
    """Causal self-attention of GPT-2."""

    def __init__(self, width, heads, context, sdpa):
        super().__init__()
        self.heads, self.sdpa = heads, sdpa
        self.c_attn = nn.Linear(width, 3 * width)
        self.c_proj = nn.Linear(width, width)
        causal = torch.ones(context, context, dtype=torch.bool).tril()
        self.register_buffer("bias", causal.view(1, 1, context, context), persistent=False)

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = self.c_attn(x).split(width, dim=2)
        q = q.view(batch, length, self.heads, -1).transpose(1, 2)
        k = k.view(batch, length, self.heads, -1).transpose(1, 2)
        v = v.view(batch, length, self.heads, -1).transpose(1, 2)
        if self.sdpa:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            scores = (q @ k.transpose(-2, -1)) / math.sqrt(q.shape[-1])
            scores = scores.masked_fill(~self.bias[:, :, :length, :length], torch.finfo(scores.dtype).min)
            y = F.softmax(scores, dim=-1) @ v
        return self.c_proj(y.transpose(1, 2).contiguous().view(batch, length, width))


class ScoringBlock(nn.Module):
    """Pre-norm transformer block."""

    def __init__(self, width, heads, context, sdpa):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = ScoringAttention(width, heads, context, sdpa)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), ScoringNewGELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class ScoringGPT(nn.Module):
    """GPT-2 with a loss as in Hugging Face: labels of -100 are ignored, and the loss is a mean."""

    def __init__(self, vocabulary, width, heads, layers, context, sdpa=False, scored_logits_only=False):
        super().__init__()
        self.scored_logits_only = scored_logits_only
        self.wte, self.wpe = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(ScoringBlock(width, heads, context, sdpa) for _ in range(layers))
        self.ln_f = nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, vocabulary, bias=False)
        self.apply(self.initialize)
        self.lm_head.weight = self.wte.weight

    @staticmethod
    def initialize(module):
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)

    def forward(self, input_ids, labels, scored=None):
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)
        x = self.wte(input_ids) + self.wpe(positions)
        for block in self.blocks:
            x = block(x)
        x = self.ln_f(x)
        if self.scored_logits_only:
            first = max(x.shape[1] - scored - 1, 0)
            x, labels = x[:, first:], labels[:, first:]
        logits = self.lm_head(x)
        shift_logits = logits[..., :-1, :].contiguous()
        shift_labels = labels[..., 1:].contiguous()
        return F.cross_entropy(shift_logits.view(-1, shift_logits.shape[-1]), shift_labels.view(-1), ignore_index=-100)


def sliding_perplexity(change):
    """Evaluate GPT-2 on long documents with a sliding window; a step gives the log-likelihoods of two documents."""
    torch.manual_seed(0)
    vocabulary, context, stride = size(50257, 500), size(1024, 64), size(512, 32)
    if change == "tf32":
        use_tf32()
    with device:
        model = ScoringGPT(
            vocabulary, size(768, 64), size(12, 4), size(12, 2), context,
            sdpa=change == "sdpa", scored_logits_only=change == "scored_logits_only",
        ).eval()  # fmt: skip
    rng = np.random.default_rng(0)
    lengths = [size(2600, 170), size(3200, 210)]
    corpus = cycle([
        [torch.from_numpy((vocabulary * rng.random(length) ** 3).astype(np.int64))[None] for length in lengths]
        for _ in range(4)
    ])  # fmt: skip

    def windows(encodings):
        """Yield each window's bounds and how many of its last tokens no earlier window has scored."""
        previous_end = 0
        for begin in range(0, encodings.shape[1], stride):
            end = min(begin + context, encodings.shape[1])
            yield begin, end, end - previous_end
            previous_end = end
            if end == encodings.shape[1]:
                break

    def log_likelihood(encodings):
        nll_sum = 0.0
        for begin, end, scored in windows(encodings):
            input_ids = encodings[:, begin:end].to(device)
            target_ids = input_ids.clone()
            target_ids[:, :-scored] = -100
            loss = model(input_ids, target_ids, scored)
            valid = (target_ids[:, 1:] != -100).sum().item()
            nll_sum += loss.item() * valid
        return -nll_sum

    def log_likelihood_batched(encodings):
        bounds = list(windows(encodings))
        input_ids = torch.zeros(len(bounds), context, dtype=torch.long)
        target_ids = torch.full_like(input_ids, -100)
        for row, (begin, end, scored) in enumerate(bounds):
            input_ids[row, : end - begin] = encodings[0, begin:end]
            target_ids[row, end - begin - scored : end - begin] = encodings[0, end - scored : end]
        valid = (target_ids[:, 1:] != -100).sum().item()
        nll_sum = model(input_ids.to(device), target_ids.to(device)).item() * valid
        return -nll_sum

    score = log_likelihood_batched if change == "batched_windows" else log_likelihood

    @torch.no_grad()
    def step():
        return torch.tensor([score(encodings) for encodings in next(corpus)])

    return step


class TableResidual(nn.Module):
    """Layer of the generator: its input is appended to its output."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.fc, self.bn = nn.Linear(inputs, outputs), nn.BatchNorm1d(outputs)

    def forward(self, x):
        return torch.cat([torch.relu(self.bn(self.fc(x))), x], dim=1)


class TableGenerator(nn.Sequential):
    """Generator of CTGAN."""

    def __init__(self, inputs, hidden, outputs):
        layers = []
        for width in hidden:
            layers.append(TableResidual(inputs, width))
            inputs += width
        super().__init__(*layers, nn.Linear(inputs, outputs))


class TableDiscriminator(nn.Module):
    """Discriminator of CTGAN, which judges packs of rows."""

    def __init__(self, inputs, hidden, pac):
        super().__init__()
        self.pac, self.width = pac, inputs * pac
        layers, inputs = [], inputs * pac
        for width in hidden:
            layers += [nn.Linear(inputs, width), nn.LeakyReLU(0.2), nn.Dropout(0.5)]
            inputs = width
        self.seq = nn.Sequential(*layers, nn.Linear(inputs, 1))

    def forward(self, x):
        return self.seq(x.view(-1, self.width))

    def gradient_penalty(self, real, fake, strength=10):
        alpha = torch.rand(real.shape[0] // self.pac, 1, 1, device=real.device)
        alpha = alpha.repeat(1, self.pac, real.shape[1]).view(-1, real.shape[1])
        between = alpha * real + (1 - alpha) * fake
        verdict = self(between)
        (gradients,) = torch.autograd.grad(verdict, between, torch.ones_like(verdict), create_graph=True)
        return ((gradients.view(-1, self.width).norm(2, dim=1) - 1) ** 2).mean() * strength


class TableActivations:
    """Tanh for the numbers and Gumbel-softmax for the modes and the categories of each column."""

    def __init__(self, spans, batched_columns, check):
        self.spans, self.batched_columns, self.check = spans, batched_columns, check
        starts = np.cumsum([0] + [width for width, _ in spans])
        total, softmaxes = int(starts[-1]), [i for i, (_, kind) in enumerate(spans) if kind == "softmax"]
        widest = max(spans[i][0] for i in softmaxes)
        spread, back = torch.full((len(softmaxes), widest), total), torch.zeros(total, dtype=torch.long)
        for row, i in enumerate(softmaxes):
            steps = torch.arange(spans[i][0])
            spread[row, : len(steps)] = int(starts[i]) + steps
            back[int(starts[i]) + steps] = row * widest + steps
        is_number = torch.ones(total, dtype=torch.bool)
        is_number[spread[spread < total]] = False
        self.spread, self.back, self.is_number = spread.to(device), back.to(device), is_number.to(device)

    def gumbel_softmax(self, logits, tau=0.2):
        for _ in range(10):
            transformed = F.gumbel_softmax(logits, tau=tau, dim=-1)
            if not self.check or not torch.isnan(transformed).any():
                return transformed
        raise ValueError("gumbel_softmax returning NaN.")

    def __call__(self, data):
        if self.batched_columns:
            padded = F.pad(data, (0, 1), value=-torch.inf).index_select(1, self.spread.flatten())
            picked = self.gumbel_softmax(padded.view(-1, *self.spread.shape))
            return torch.where(self.is_number, torch.tanh(data), picked.flatten(1).index_select(1, self.back))
        parts, start = [], 0
        for width, kind in self.spans:
            part = data[:, start : start + width]
            parts.append(torch.tanh(part) if kind == "tanh" else self.gumbel_softmax(part))
            start += width
        return torch.cat(parts, dim=1)


class TableSampler:
    """Draws conditions by the logarithm of their frequency, and rows which fulfil them."""

    def __init__(self, data, first, sizes, vectorized):
        self.data, self.sizes, self.vectorized = data, sizes, vectorized
        self.offsets = np.cumsum([0, *sizes[:-1]])
        self.probabilities = np.zeros((len(sizes), max(sizes)))
        self.rows = []
        for column, (offset, width) in enumerate(zip(self.offsets, sizes, strict=False)):
            onehot = data[:, first + offset : first + offset + width]
            self.rows.append([np.nonzero(onehot[:, option])[0] for option in range(width)])
            frequency = np.log(onehot.sum(axis=0) + 1)
            self.probabilities[column, :width] = frequency / frequency.sum()
        flat = [rows for column in self.rows for rows in column]
        self.counts = np.array([len(rows) for rows in flat])
        self.begins, self.flat = np.cumsum([0, *self.counts[:-1]]), np.concatenate(flat)

    def conditions(self, batch):
        """Return the conditional vectors, the masks of the columns, and the columns and options themselves."""
        column = np.random.choice(np.arange(len(self.sizes)), batch)
        draws = np.random.rand(batch, 1)
        option = (self.probabilities[column].cumsum(axis=1) > draws).argmax(axis=1)
        vector = np.zeros((batch, sum(self.sizes)), dtype="float32")
        mask = np.zeros((batch, len(self.sizes)), dtype="float32")
        vector[np.arange(batch), self.offsets[column] + option] = 1
        mask[np.arange(batch), column] = 1
        return vector, mask, column, option

    def real_rows(self, column, option):
        if self.vectorized:
            category = self.offsets[column] + option
            within = (np.random.rand(len(column)) * self.counts[category]).astype(np.int64)
            return self.data[self.flat[self.begins[category] + within]]
        index = []
        for c, o in zip(column, option, strict=False):
            index.append(np.random.choice(self.rows[c][o]))
        return self.data[index]


def tabular_gan(change):
    """Train a CTGAN on a table with 8 numbers and 12 categories; a step updates the discriminator and the generator."""
    torch.manual_seed(0)
    np.random.seed(0)
    batch, pac, noise_width, hidden = size(500, 60), 10, 128, (size(256, 64),) * 2
    n_rows, modes, sizes = size(50_000, 1500), 10, [2, 2, 3, 5, 6, 7, 9, 14, 15, 16, 24, 41]
    spans = [(1, "tanh"), (modes, "softmax")] * 8 + [(width, "softmax") for width in sizes]
    parts = []
    for width, kind in spans:
        if kind == "tanh":
            parts.append(np.random.uniform(-1, 1, (n_rows, 1)))
        else:
            popularity = 1 / np.arange(1, width + 1)
            parts.append(np.eye(width)[np.random.choice(width, n_rows, p=popularity / popularity.sum())])
    table = np.concatenate(parts, axis=1).astype("float32")
    graph = change == "cuda_graph"
    sampler = TableSampler(table, 8 * (1 + modes), sizes, change == "vectorized_sampling")
    activate = TableActivations(spans, change == "batched_columns", check=not graph)
    generator = TableGenerator(noise_width + sum(sizes), hidden, table.shape[1]).to(device)
    discriminator = TableDiscriminator(table.shape[1] + sum(sizes), hidden, pac).to(device)
    options = {"lr": 2e-4, "betas": (0.5, 0.9), "weight_decay": 1e-6}
    if change == "fused_adam":
        options["fused"] = True
    if graph and device.type == "cuda":
        options["capturable"] = True
    optimizer_g = torch.optim.Adam(generator.parameters(), **options)
    optimizer_d = torch.optim.Adam(discriminator.parameters(), **options)

    def condition_loss(data, condition, mask):
        losses, start, start_c = [], 8 * (1 + modes), 0
        for width in sizes:
            target = condition[:, start_c : start_c + width].argmax(dim=1)
            losses.append(F.cross_entropy(data[:, start : start + width], target, reduction="none"))
            start, start_c = start + width, start_c + width
        return (torch.stack(losses, dim=1) * mask).sum() / data.shape[0]

    def sample():
        """Return the host's part of a step: real rows, their conditions, and conditions for both fake batches."""
        condition_d, _, column, option = sampler.conditions(batch)
        order = np.random.permutation(batch)
        real = sampler.real_rows(column[order], option[order])
        condition_g, mask, _, _ = sampler.conditions(batch)
        return [torch.from_numpy(a) for a in (real, condition_d[order], condition_d, condition_g, mask)]

    def train(real, condition_real, condition_d, condition_g, mask):
        noise = torch.cat([torch.randn(batch, noise_width, device=device), condition_d], dim=1)
        fake = torch.cat([activate(generator(noise)), condition_d], dim=1)
        real = torch.cat([real, condition_real], dim=1)
        y_fake, y_real = discriminator(fake), discriminator(real)
        penalty = discriminator.gradient_penalty(real, fake)
        loss_d = -(y_real.mean() - y_fake.mean())
        optimizer_d.zero_grad(set_to_none=False)
        penalty.backward(retain_graph=True)
        loss_d.backward()
        optimizer_d.step()

        noise = torch.cat([torch.randn(batch, noise_width, device=device), condition_g], dim=1)
        raw = generator(noise)
        y_fake = discriminator(torch.cat([activate(raw), condition_g], dim=1))
        loss_g = -y_fake.mean() + condition_loss(raw, condition_g, mask)
        optimizer_g.zero_grad(set_to_none=False)
        loss_g.backward()
        optimizer_g.step()
        return torch.stack([loss_d, loss_g, penalty]).detach()

    if graph:
        static = [tensor.to(device) for tensor in sample()]
        replay = graphed_training(lambda: train(*static), [generator, discriminator], [optimizer_g, optimizer_d])

        def step():
            for tensor, new in zip(static, sample(), strict=False):
                tensor.copy_(new)
            return replay()

        return step

    return lambda: train(*(tensor.to(device) for tensor in sample()))


class ServedAttention(nn.Module):
    """Attention of LLaMA with a cache, and with each request's LoRA at the queries and values."""

    def __init__(self, width, heads, batch, context, scale):
        super().__init__()
        self.heads, self.scale = heads, scale
        self.wqkv = nn.Linear(width, 3 * width, bias=False)
        self.wo = nn.Linear(width, width, bias=False)
        for name in ("cache_k", "cache_v"):
            self.register_buffer(name, torch.zeros(batch, context, heads, width // heads), persistent=False)

    def add_lora(self, y, x, adapters, layer, which):
        if isinstance(adapters, dict):
            y.add_(torch.bmm(torch.bmm(x, adapters[layer, which, "a"]), adapters[layer, which, "b"]), alpha=self.scale)
            return
        for row, adapter in enumerate(adapters):
            y[row].add_(x[row] @ adapter[layer, which, "a"] @ adapter[layer, which, "b"], alpha=self.scale)

    @staticmethod
    def rotate(x, turns):
        pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * turns).flatten(3).type_as(x)

    def forward(self, x, start, turns, mask, adapters, layer):
        batch, length, width = x.shape
        q, k, v = self.wqkv(x).split(width, dim=-1)
        self.add_lora(q, x, adapters, layer, "q")
        self.add_lora(v, x, adapters, layer, "v")
        q, k, v = (t.reshape(batch, length, self.heads, -1) for t in (q, k, v))
        q, k = self.rotate(q, turns), self.rotate(k, turns)
        if torch.is_tensor(start):
            self.cache_k.index_copy_(1, start, k)
            self.cache_v.index_copy_(1, start, v)
            keys, values = self.cache_k, self.cache_v
        else:
            self.cache_k[:, start : start + length] = k
            self.cache_v[:, start : start + length] = v
            keys, values = self.cache_k[:, : start + length], self.cache_v[:, : start + length]
        y = F.scaled_dot_product_attention(
            q.transpose(1, 2), keys.transpose(1, 2), values.transpose(1, 2), attn_mask=mask, is_causal=length > 1
        )
        return self.wo(y.transpose(1, 2).reshape(batch, length, width))


class ServedBlock(nn.Module):
    """LLaMA's block: attention and SwiGLU, each behind an RMSNorm."""

    def __init__(self, width, heads, hidden, batch, context, scale):
        super().__init__()
        self.attention = ServedAttention(width, heads, batch, context, scale)
        self.w1, self.w3 = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False)
        self.w2 = nn.Linear(hidden, width, bias=False)
        self.attention_norm, self.ffn_norm = nn.RMSNorm(width, eps=1e-5), nn.RMSNorm(width, eps=1e-5)

    def forward(self, x, *rest):
        x = x + self.attention(self.attention_norm(x), *rest)
        h = self.ffn_norm(x)
        return x + self.w2(F.silu(self.w1(h)) * self.w3(h))


class ServedLlama(nn.Module):
    """LLaMA-like model. `start` is the number of cached tokens: an int, or a tensor of shape (1,) for one token."""

    def __init__(self, vocabulary, width, heads, layers, hidden, batch, context, scale):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(ServedBlock(width, heads, hidden, batch, context, scale) for _ in range(layers))
        self.norm = nn.RMSNorm(width, eps=1e-5)
        self.output = nn.Linear(width, vocabulary, bias=False)
        frequencies = 10000.0 ** (-torch.arange(0, width // heads, 2, device=device) / (width // heads))
        angles = torch.outer(torch.arange(context, device=device), frequencies)
        self.turns, self.places = torch.polar(torch.ones_like(angles), angles), torch.arange(context, device=device)

    def forward(self, tokens, start, adapters):
        x = self.embedding(tokens)
        mask = None
        if torch.is_tensor(start):
            turns = self.turns.index_select(0, start)
            mask = torch.zeros_like(self.places, dtype=x.dtype).masked_fill(self.places > start, -torch.inf)
            mask = mask.expand(tokens.shape[0], 1, 1, -1)
        else:
            turns = self.turns[start : start + tokens.shape[1]]
        for number, layer in enumerate(self.layers):
            x = layer(x, start, turns[:, None], mask, adapters, number)
        return self.output(self.norm(x[:, -1]))


def adapters_service(change):
    """Serve requests for a LLaMA with LoRA adapters; a step generates 12 tokens for 4 requests with own adapters."""
    torch.manual_seed(0)
    width, layers, rank, batch = size(2048, 64), size(6, 2), 16, 4
    prompt_length, new_tokens, vocabulary, eos = size(64, 12), 12, size(32000, 300), 2
    context = prompt_length + 16
    dtype = torch.bfloat16 if change == "bf16_weights" else torch.float32
    with device:
        model = ServedLlama(vocabulary, width, size(16, 4), layers, size(5632, 128), batch, context, scale=2.0)
    model = model.to(dtype).eval()
    names = [(layer, which, part) for layer in range(layers) for which in "qv" for part in "ab"]
    store = []  # all customers' adapters, in the host's memory
    for _ in range(size(32, 8)):
        shapes = {"a": (width, rank), "b": (rank, width)}
        store.append({name: (0.02 * torch.randn(shapes[name[2]])).to(dtype) for name in names})
    if change == "resident_adapters":
        store = [{name: tensor.to(device) for name, tensor in adapter.items()} for adapter in store]
    rng = np.random.default_rng(0)

    def requests():
        """Return the prompts, cut to their last tokens by the gateway, and the adapters that they ask for."""
        prompts = torch.from_numpy(rng.integers(3, vocabulary, (batch, prompt_length)))
        return prompts, rng.choice(len(store), batch, replace=False)

    def choose(logits):
        scores, chosen = torch.log_softmax(logits.float(), dim=-1).max(dim=-1)
        return scores, chosen[:, None]

    if change == "cuda_graph":
        loaded = [{name: tensor.to(device, copy=True) for name, tensor in adapter.items()} for adapter in store[:batch]]
        token = torch.zeros(batch, 1, dtype=torch.long, device=device)
        position = torch.full((1,), prompt_length, device=device)

        def decode():
            scores, chosen = choose(model(token, position, loaded))
            token.copy_(chosen)
            position.add_(1)
            return scores

        with torch.no_grad():
            decode = graphed(decode)

    def load(wanted):
        if change == "cuda_graph":
            for adapter, number in zip(loaded, wanted, strict=False):
                for name, tensor in adapter.items():
                    tensor.copy_(store[number][name])
            return loaded
        adapters = [{name: store[number][name].to(device) for name in names} for number in wanted]
        if change == "batched_adapters":
            return {name: torch.stack([adapter[name] for adapter in adapters]) for name in names}
        return adapters

    @torch.no_grad()
    def step():
        prompts, wanted = requests()
        adapters = load(wanted)
        scores, tokens = choose(model(prompts.to(device), 0, adapters))
        all_scores, all_tokens = [scores], [tokens]
        if change == "cuda_graph":
            token.copy_(tokens)
            position.fill_(prompt_length)
        for start in range(prompt_length, prompt_length + new_tokens - 1):
            if (tokens == eos).all():
                break
            if change == "cuda_graph":
                scores, tokens = decode().clone(), token.clone()
            else:
                scores, tokens = choose(model(tokens, start, adapters))
            all_scores.append(scores)
            all_tokens.append(tokens)
        replies = torch.cat(all_tokens, dim=1).tolist()
        assert len(replies) == batch
        return torch.stack(all_scores, dim=1).mean(dim=1)

    return step


PROGRAMS = {
    music_unmixing: {
        "overlap_add_on_gpu": "cpu_tensors",
        "half_precision": "half_precision",
        "batched_windows": "larger_batch",
        "cudnn_benchmark": "",
    },
    sliding_perplexity: {
        "tf32": "tf32",
        "scored_logits_only": "",
        "sdpa": "fused_attention",
        "batched_windows": "larger_batch",
    },
    tabular_gan: {
        "cuda_graph": "cuda_graph",
        "batched_columns": "larger_batch",
        "vectorized_sampling": "python",
        "fused_adam": "fused_optimizer",
    },
    adapters_service: {
        "cuda_graph": "static_cache",
        "batched_adapters": "larger_batch",
        "resident_adapters": "",
        "bf16_weights": "half_precision",
    },
}
