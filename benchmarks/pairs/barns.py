"""Programs of several fields as their users write them: speech, trajectories, splats and long documents."""

import math

import numpy as np
import torch
import torch.nn.functional as F
from setting import bf16, compiled, device, endless, graphed, graphed_training, size, use_tf32
from torch import nn
from torch.utils.data import DataLoader, Dataset

MELS, BLANK = 80, 0


def mel_filters(bins=257, rate=16000):
    """Return triangular mel filters as a (bins, MELS) matrix."""
    top = 2595 * math.log10(1 + rate / 2 / 700)
    edges = 700 * (10 ** (torch.linspace(0, top, MELS + 2) / 2595) - 1)
    frequencies = torch.linspace(0, rate / 2, bins)[:, None]
    rising = (frequencies - edges[:-2]) / (edges[1:-1] - edges[:-2])
    falling = (edges[2:] - frequencies) / (edges[2:] - edges[1:-1])
    return torch.minimum(rising, falling).clamp(min=0)


def log_mel(waves, window, filters):
    """Return log-mel features (..., frames, MELS) of waveforms in steps of 10 ms."""
    spectrum = torch.stft(waves, 512, 160, 400, window, center=False, return_complex=True).abs().square()
    return (spectrum.transpose(-2, -1) @ filters).clamp(min=1e-6).log()


class SpeechSet(Dataset):
    """Utterances of 6 to 8.5 seconds in memory with their word pieces."""

    def __init__(self, count, seconds, pieces, vocabulary, as_waves):
        rng = np.random.default_rng(0)
        self.as_waves, self.window, self.filters = as_waves, torch.hann_window(400), mel_filters()
        lengths = (rng.uniform(0.7, 1.0, count) * seconds * 16000).astype(int)
        self.waves = [torch.from_numpy(rng.standard_normal(n, dtype=np.float32) * 0.1) for n in lengths]
        self.labels = [torch.from_numpy(rng.integers(1, vocabulary, rng.integers(pieces // 2, pieces + 1)))
                       for _ in range(count)]  # fmt: skip

    def __len__(self):
        return len(self.waves)

    def __getitem__(self, i):
        wave = self.waves[i]
        return (wave if self.as_waves else log_mel(wave, self.window, self.filters)), self.labels[i]


def collate_speech(samples):
    """Pad sounds and labels to the longest and return them with their lengths."""
    sounds, labels = zip(*samples, strict=True)
    pad = nn.utils.rnn.pad_sequence
    return (
        pad(sounds, batch_first=True), torch.tensor([len(x) for x in sounds]),
        pad(labels, batch_first=True), torch.tensor([len(x) for x in labels]),
    )  # fmt: skip


class ConformerLayer(nn.Module):
    """Half feed-forward, self-attention, convolution, half feed-forward."""

    def __init__(self, dim, heads, kernel=15, dropout=0.1):
        super().__init__()
        self.heads, self.dropout = heads, nn.Dropout(dropout)
        self.first, self.second = self.feed_forward(dim, dropout), self.feed_forward(dim, dropout)
        self.attention_norm, self.qkv, self.out = nn.LayerNorm(dim), nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.conv_norm, self.widen = nn.LayerNorm(dim), nn.Linear(dim, 2 * dim)
        self.depthwise = nn.Conv1d(dim, dim, kernel, padding=kernel // 2, groups=dim)
        self.middle_norm, self.narrow, self.final_norm = nn.LayerNorm(dim), nn.Linear(dim, dim), nn.LayerNorm(dim)

    @staticmethod
    def feed_forward(dim, dropout):
        return nn.Sequential(
            nn.LayerNorm(dim), nn.Linear(dim, 4 * dim), nn.SiLU(), nn.Dropout(dropout),
            nn.Linear(4 * dim, dim), nn.Dropout(dropout),
        )  # fmt: skip

    def forward(self, x, valid):
        x = x + 0.5 * self.first(x)
        q, k, v = self.qkv(self.attention_norm(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=valid[:, None, None])
        x = x + self.dropout(self.out(attended.transpose(1, 2).flatten(2)))
        y = F.glu(self.widen(self.conv_norm(x)), dim=-1).masked_fill(~valid[..., None], 0)
        y = self.depthwise(y.transpose(1, 2)).transpose(1, 2)
        x = x + self.dropout(self.narrow(F.silu(self.middle_norm(y))))
        return self.final_norm(x + 0.5 * self.second(x))


class Transducer(nn.Module):
    """Conformer encoder, LSTM prediction network and joint network."""

    def __init__(self, dim, layers, heads, joint, vocabulary):
        super().__init__()
        self.subsampling = nn.Sequential(nn.Conv2d(1, dim, 3, 2), nn.ReLU(), nn.Conv2d(dim, dim, 3, 2), nn.ReLU())
        self.project = nn.Linear(dim * (((MELS - 1) // 2 - 1) // 2), dim)
        self.layers = nn.ModuleList(ConformerLayer(dim, heads) for _ in range(layers))
        self.embedding, self.lstm = nn.Embedding(vocabulary, joint), nn.LSTM(joint, joint, batch_first=True)
        self.from_sound, self.from_text = nn.Linear(dim, joint), nn.Linear(joint, joint)
        self.output = nn.Linear(joint, vocabulary)

    @staticmethod
    def positions(length, dim):
        steps = torch.arange(length, device=device)[:, None]
        rates = torch.exp(torch.arange(0, dim, 2, device=device) * (-math.log(10000.0) / dim))
        return torch.cat([(steps * rates).sin(), (steps * rates).cos()], dim=-1)

    def forward(self, features, lengths, labels):
        x = self.project(self.subsampling(features[:, None]).transpose(1, 2).flatten(2))
        lengths = ((lengths - 1) // 2 - 1) // 2
        valid = torch.arange(x.shape[1], device=x.device)[None] < lengths[:, None]
        x = x + self.positions(*x.shape[1:])
        for layer in self.layers:
            x = layer(x, valid)
        text, _ = self.lstm(self.embedding(F.pad(labels, (1, 0), value=BLANK)))
        joint = torch.tanh(self.from_sound(x)[:, :, None] + self.from_text(text)[:, None])
        return self.output(joint), lengths


def transducer_loss(logits, labels, frames, pieces, by_label):
    """Return the mean negative log-likelihood of the labels, summed over all paths through the lattice."""
    batch, times, places, _ = logits.shape
    log_probs = logits.log_softmax(dim=-1)
    blank = log_probs[..., BLANK]
    index = labels[:, None, :, None].expand(-1, times, -1, -1)
    emit = log_probs[:, :, :-1].gather(-1, index).squeeze(-1)
    rows = torch.arange(batch, device=logits.device)
    if by_label:
        stay = F.pad(blank.cumsum(dim=1), (0, 0, 1, 0))[:, :-1].transpose(1, 2).contiguous()
        emit = emit.transpose(1, 2).contiguous()
        alphas = [stay[:, 0]]
        for u in range(1, places):
            entered = alphas[-1] + emit[:, u - 1]
            alphas.append(stay[:, u] + torch.logcumsumexp(entered - stay[:, u], dim=-1))
        final = torch.stack(alphas)[pieces, rows, frames - 1]
    else:
        diagonals = times + places - 1
        u = torch.arange(places, device=logits.device)
        t = torch.arange(diagonals, device=logits.device)[:, None] - u
        outside = (t < 0) | (t >= times)
        t = t.clamp(0, times - 1)
        blanks = blank[:, t, u].masked_fill(outside, -1e30)
        emits = F.pad(emit, (0, 1), value=-1e30)[:, t, u].masked_fill(outside, -1e30)
        alpha = F.pad(torch.zeros(batch, 1, device=logits.device), (0, places - 1), value=-1e30)
        alphas = [alpha]
        for n in range(1, diagonals):
            moved = F.pad((alpha + emits[:, n - 1])[:, :-1], (1, 0), value=-1e30)
            alpha = torch.logaddexp(alpha + blanks[:, n - 1], moved)
            alphas.append(alpha)
        final = torch.stack(alphas)[frames - 1 + pieces, rows, pieces]
    return -(final + blank[rows, frames - 1, pieces]).mean()


def transducer_training(change):
    """Training of an RNN-T speech recognizer; the loss sums over the lattice's paths in torch."""
    vocabulary, longest, seconds = size(512, 40), size(40, 6), size(17, 2) / 2
    data = SpeechSet(size(96, 8), seconds, longest, vocabulary, change == "gpu_features")
    loader = DataLoader(data, size(16, 2), shuffle=True, drop_last=True, collate_fn=collate_speech)
    batches = endless(loader)
    torch.manual_seed(0)
    model = Transducer(size(256, 32), size(8, 2), 4, size(512, 32), vocabulary).to(device).train()
    if change == "fused_adamw":
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=1e-3, fused=True)
    else:
        capturable = change == "graph_step" and device.type == "cuda"
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=1e-3, capturable=capturable)
    window, filters = torch.hann_window(400, device=device), mel_filters().to(device)

    def train(features, lengths, labels, pieces):
        optimizer.zero_grad()
        with bf16(change == "bf16"):
            logits, frames = model(features, lengths, labels)
        loss = transducer_loss(logits.float(), labels, frames, pieces, change == "label_scan")
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        return loss.detach()

    if change == "graph_step":
        static = (
            torch.zeros(size(16, 2), int(seconds * 16000 - 512) // 160 + 1, MELS, device=device),
            torch.full((size(16, 2),), 60, device=device),
            torch.ones(size(16, 2), longest, dtype=torch.int64, device=device),
            torch.full((size(16, 2),), 2, device=device),
        )
        replay = graphed_training(lambda: train(*static), [model], [optimizer])

    def step():
        features, lengths, labels, pieces = (x.to(device) for x in next(batches))
        if change == "gpu_features":
            lengths = (lengths - 512) // 160 + 1
            features = log_mel(features, window, filters)
            padding = torch.arange(features.shape[1], device=device)[None] >= lengths[:, None]
            features = features.masked_fill(padding[..., None], 0)
        if change == "graph_step":
            for buffer, value in zip(static, (features, lengths, labels, pieces), strict=True):
                if value.ndim > 1:
                    buffer.zero_()
                    buffer = buffer[:, : value.shape[1]]
                buffer.copy_(value)
            return replay()
        return train(features, lengths, labels, pieces)

    return step


class CausalBlock(nn.Module):
    """A GPT block with masked self-attention."""

    def __init__(self, dim, heads, dropout):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.query, self.key, self.value = nn.Linear(dim, dim), nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.attention_dropout, self.dropout = nn.Dropout(dropout), nn.Dropout(dropout)
        self.out = nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim), nn.Dropout(dropout))

    def forward(self, x, allowed):
        y = self.norm1(x)
        q, k, v = (f(y).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.query, self.key, self.value))
        scores = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.shape[-1]))
        weights = self.attention_dropout(F.softmax(scores.masked_fill(~allowed, -1e9), dim=-1))
        x = x + self.dropout(self.out((weights @ v).transpose(1, 2).flatten(2)))
        return x + self.mlp(self.norm2(x))


class DecisionTransformer(nn.Module):
    """Predicts actions from a sequence of returns-to-go, states and actions."""

    def __init__(self, state_dim, action_dim, dim, layers, heads, longest, dropout=0.1):
        super().__init__()
        self.time = nn.Embedding(longest, dim)
        self.embed_return, self.embed_state = nn.Linear(1, dim), nn.Linear(state_dim, dim)
        self.embed_action, self.norm = nn.Linear(action_dim, dim), nn.LayerNorm(dim)
        self.blocks = nn.ModuleList(CausalBlock(dim, heads, dropout) for _ in range(layers))
        self.predict_action = nn.Sequential(nn.Linear(dim, action_dim), nn.Tanh())

    def forward(self, states, actions, returns, timesteps, mask):
        batch, length = mask.shape
        time = self.time(timesteps)
        parts = (self.embed_return(returns), self.embed_state(states), self.embed_action(actions))
        x = self.norm(torch.stack([part + time for part in parts], dim=2).flatten(1, 2))
        causal = torch.ones(3 * length, 3 * length, dtype=torch.bool, device=x.device).tril()
        allowed = causal & mask.bool().repeat_interleave(3, dim=1)[:, None, None]
        for block in self.blocks:
            x = block(x, allowed)
        return self.predict_action(x.view(batch, length, 3, -1)[:, :, 1])


def discount_cumsum(rewards, gamma):
    """Return for each time step the discounted sum of the rewards from there on."""
    sums = np.zeros_like(rewards)
    sums[-1] = rewards[-1]
    for t in reversed(range(len(rewards) - 1)):
        sums[t] = rewards[t] + gamma * sums[t + 1]
    return sums


def decision_transformer(change):
    """Training on random windows of stored trajectories, with the trainer's usual metrics."""
    state_dim, action_dim, horizon, scale = 17, 6, size(1000, 60), 1000.0
    length, batch_size = size(50, 8), size(64, 4)
    rng = np.random.default_rng(0)
    trajectories = []
    for _ in range(size(300, 10)):
        steps = int(rng.integers(horizon // 3, horizon + 1))
        trajectories.append({
            "observations": rng.standard_normal((steps, state_dim)).cumsum(axis=0) * 0.1,
            "actions": np.tanh(rng.standard_normal((steps, action_dim))),
            "rewards": rng.standard_normal(steps) + 3.0,
        })  # fmt: skip
    everything = np.concatenate([x["observations"] for x in trajectories])
    state_mean, state_std = everything.mean(axis=0), everything.std(axis=0) + 1e-6
    lengths = np.array([len(x["rewards"]) for x in trajectories])
    chances = lengths / lengths.sum()
    if change == "precomputed_returns":
        for trajectory in trajectories:
            trajectory["returns"] = discount_cumsum(trajectory["rewards"], 1.0)

    def get_batch():
        chosen = rng.choice(len(trajectories), size=batch_size, replace=True, p=chances)
        columns = [[] for _ in range(5)]
        for i in chosen:
            trajectory = trajectories[i]
            start = rng.integers(0, lengths[i])
            states = trajectory["observations"][start : start + length]
            count = len(states)
            if change == "precomputed_returns":
                returns = trajectory["returns"][start : start + length, None]
            else:
                returns = discount_cumsum(trajectory["rewards"][start:], 1.0)[:length, None]
            pad = length - count
            states = (np.concatenate([np.zeros((pad, state_dim)), states]) - state_mean) / state_std
            actions = np.concatenate([np.ones((pad, action_dim)) * -10.0, trajectory["actions"][start : start + count]])
            returns = np.concatenate([np.zeros((pad, 1)), returns]) / scale
            times = np.concatenate([np.zeros(pad), np.arange(start, start + count)])
            mask = np.concatenate([np.zeros(pad), np.ones(count)])
            for column, value in zip(columns, (states, actions, returns, times, mask), strict=True):
                column.append(value)
        batch = []
        for column, dtype in zip(columns, (*[torch.float32] * 3, torch.int64, torch.float32), strict=True):
            column = torch.from_numpy(np.stack(column)).to(dtype)
            if change == "pinned_batches" and device.type == "cuda":
                batch.append(column.pin_memory().to(device, non_blocking=True))
            else:
                batch.append(column.to(device))
        return batch

    if change == "gpu_sampler":
        fields = {
            "states": [(x["observations"] - state_mean) / state_std for x in trajectories],
            "actions": [x["actions"] for x in trajectories],
            "returns": [discount_cumsum(x["rewards"], 1.0)[:, None] / scale for x in trajectories],
        }
        stored = {k: torch.tensor(np.concatenate(v), dtype=torch.float32, device=device) for k, v in fields.items()}
        offsets = torch.tensor(np.cumsum(lengths) - lengths, device=device)
        all_lengths, all_chances = torch.tensor(lengths, device=device), torch.tensor(chances, device=device)
        empty_state = torch.tensor(-state_mean / state_std, dtype=torch.float32, device=device)

        def get_batch():
            chosen = torch.multinomial(all_chances, batch_size, replacement=True)
            starts = (torch.rand(batch_size, device=device) * all_lengths[chosen]).long()
            counts = (all_lengths[chosen] - starts).clamp(max=length)
            places = torch.arange(length, device=device) - (length - counts)[:, None]
            real = places >= 0
            times = torch.where(real, starts[:, None] + places, 0)
            index = offsets[chosen][:, None] + times
            states = torch.where(real[..., None], stored["states"][index], empty_state)
            actions = stored["actions"][index].masked_fill(~real[..., None], -10.0)
            returns = stored["returns"][index].masked_fill(~real[..., None], 0.0)
            return states, actions, returns, times, real.float()

    torch.manual_seed(0)
    model = DecisionTransformer(state_dim, action_dim, size(256, 32), size(6, 2), size(8, 2), horizon).to(device)
    capturable = change == "graph_step" and device.type == "cuda"
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=1e-4, capturable=capturable)

    def train(states, actions, returns, times, mask):
        predicted = model(states, actions, returns, times, mask)
        squared = (predicted - actions) ** 2 * mask[..., None]
        errors = squared.sum(dim=(0, 1)) / mask.sum()
        loss = errors.mean()
        optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        optimizer.step()
        return loss.detach(), errors.detach(), norm

    if change == "graph_step":
        static = [x.clone() for x in get_batch()]
        replay = graphed_training(lambda: train(*static), [model], [optimizer])
    history = {"training/loss": [], "training/grad_norm": []}
    history |= {f"training/action_error_{i}": [] for i in range(action_dim)}
    waiting = []

    def step():
        batch = get_batch()
        if change == "graph_step":
            for buffer, value in zip(static, batch, strict=True):
                buffer.copy_(value)
            loss, errors, norm = replay()
        else:
            loss, errors, norm = train(*batch)
        if change == "deferred_metrics":
            waiting.append(torch.cat([loss[None], norm[None], errors]))
            if len(waiting) == 20:
                for values, row in zip(history.values(), torch.stack(waiting).T.tolist(), strict=True):
                    values.extend(row)
                waiting.clear()
        else:
            history["training/loss"].append(loss.item())
            history["training/grad_norm"].append(norm.item())
            for i in range(action_dim):
                history[f"training/action_error_{i}"].append(errors[i].item())
        return loss

    return step


def gaussian_alphas(pixels, means, conics, opacities):
    """Return the alphas (..., Gaussians, pixels); those under 1/255 are 0."""
    dx = pixels[..., None, :, 0] - means[..., :, None, 0]
    dy = pixels[..., None, :, 1] - means[..., :, None, 1]
    a, b, c = conics[..., None].unbind(dim=-2)
    power = -0.5 * (a * dx * dx + c * dy * dy) - b * dx * dy
    alphas = (opacities[..., None] * torch.exp(power)).clamp(max=0.99)
    return torch.where(alphas < 1 / 255, 0.0, alphas)


def quadratic_alphas(pixels, means, conics, opacities):
    """Return gaussian_alphas with the exponents as a product of pixel monomials and coefficients."""
    x, y = pixels.unbind(dim=-1)
    monomials = torch.stack([x * x, x * y, y * y, x, y, torch.ones_like(x)])
    (a, b, c), (mx, my) = conics.unbind(dim=-1), means.unbind(dim=-1)
    constant = -0.5 * (a * mx * mx + c * my * my) - b * mx * my
    power = torch.stack([-0.5 * a, -b, -0.5 * c, a * mx + b * my, c * my + b * mx, constant], dim=-1) @ monomials
    alphas = (opacities[..., None] * torch.exp(power)).clamp(max=0.99)
    return torch.where(alphas < 1 / 255, 0.0, alphas)


def structural_similarity(image, target, window=11):
    """Return the mean SSIM of two (3, height, width) images."""
    mean = lambda x: F.avg_pool2d(x[None], window, stride=1, padding=window // 2)  # noqa: E731
    mx, my = mean(image), mean(target)
    vx, vy, cov = mean(image**2) - mx**2, mean(target**2) - my**2, mean(image * target) - mx * my
    return ((2 * mx * my + 1e-4) * (2 * cov + 9e-4) / ((mx**2 + my**2 + 1e-4) * (vx + vy + 9e-4))).mean()


class SplatScene(nn.Module):
    """Anisotropic Gaussians in the plane with colours, opacities and a fixed depth."""

    def __init__(self, count, side):
        super().__init__()
        self.means = nn.Parameter(torch.rand(count, 2) * 2 - 1)
        self.log_scales = nn.Parameter(torch.log(torch.rand(count, 2) * 6 / side + 4 / side))
        self.angles = nn.Parameter(torch.rand(count) * math.pi)
        self.colours = nn.Parameter(torch.randn(count, 3) * 0.5)
        self.opacities = nn.Parameter(torch.zeros(count))
        self.register_buffer("depths", torch.rand(count))

    def forward(self):
        """Return means, conics, opacities, colours and half extents from front to back."""
        order = torch.argsort(self.depths)
        cos, sin = torch.cos(self.angles), torch.sin(self.angles)
        s1, s2 = torch.exp(2 * self.log_scales).unbind(dim=-1)
        conics = torch.stack(
            [cos**2 / s1 + sin**2 / s2, cos * sin * (1 / s1 - 1 / s2), sin**2 / s1 + cos**2 / s2], dim=-1
        )
        extents = 3.34 * torch.stack([cos**2 * s1 + sin**2 * s2, sin**2 * s1 + cos**2 * s2], dim=-1).detach().sqrt()
        values = (self.means, conics, torch.sigmoid(self.opacities), torch.sigmoid(self.colours), extents)
        return [value[order] for value in values]


def gaussian_splats(change):
    """Fitting of an image by 2-D Gaussians, composited from front to back; faint ones are moved now and then."""
    side, count, chunk, tile = size(256, 32), size(2048, 48), size(128, 16), size(32, 8)
    torch.manual_seed(0)
    if change == "tf32":
        use_tf32()
    axis = (torch.arange(side, device=device) + 0.5) / side * 2 - 1
    y, x = torch.meshgrid(axis, axis, indexing="ij")
    waves = torch.stack([torch.sin(5 * x + 3 * y), torch.cos(7 * y - 2 * x), torch.sin(9 * x * y)])
    target = 0.5 + 0.3 * waves + 0.2 * ((x - 0.2) ** 2 + (y + 0.1) ** 2 < 0.2)
    pixels = torch.stack([x, y], dim=-1).reshape(-1, 2)
    scene = SplatScene(count, side).to(device)
    rates = {"means": 1e-3, "log_scales": 5e-3, "angles": 5e-3, "colours": 1e-2, "opacities": 2e-2}
    optimizer = torch.optim.Adam([{"params": [getattr(scene, k)], "lr": v} for k, v in rates.items()], eps=1e-15)
    alphas_of = quadratic_alphas if change == "matmul_exponents" else gaussian_alphas
    if change == "compile_alphas":
        alphas_of = compiled(gaussian_alphas)

    def transmittances(alphas, dim):
        """Return the light that reaches each Gaussian, and the light that is left behind all of them."""
        if change == "log_transmittance":
            logs = torch.log1p(-alphas).cumsum(dim)
            passed = torch.exp(logs)
        else:
            passed = torch.cumprod(1 - alphas, dim)
        rest = passed.narrow(dim, -1 + passed.shape[dim], 1)
        before = passed.narrow(dim, 0, passed.shape[dim] - 1)
        return torch.cat([torch.ones_like(rest), before], dim), rest.squeeze(dim)

    def render():
        means, conics, opacities, colours, _ = scene()
        image = torch.zeros(side * side, 3, device=device)
        light = torch.ones(side * side, device=device)
        for start in range(0, count, chunk):
            part = slice(start, start + chunk)
            alphas = alphas_of(pixels, means[part], conics[part], opacities[part])
            reach, rest = transmittances(alphas, 0)
            weights = alphas * reach * light
            image = image + torch.einsum("gp,gc->pc", weights, colours[part])
            light = light * rest
        return image.T.reshape(3, side, side)

    tiles = side // tile
    tiled_pixels = pixels.view(tiles, tile, tiles, tile, 2).transpose(1, 2).reshape(tiles * tiles, tile * tile, 2)

    def render_tiles():
        means, conics, opacities, colours, extents = scene()
        with torch.no_grad():
            low, high = tiled_pixels.amin(dim=1)[:, None], tiled_pixels.amax(dim=1)[:, None]
            hit = ((means + extents >= low) & (means - extents <= high)).all(dim=-1)
            most = max(int(hit.sum(dim=1).max()), 1)
            chosen = torch.argsort((~hit).byte(), dim=1, stable=True)[:, :most]
            hit = hit.gather(1, chosen)
        alphas = alphas_of(tiled_pixels, means[chosen], conics[chosen], opacities[chosen] * hit)
        reach, _ = transmittances(alphas, 1)
        image = torch.einsum("tgp,tgc->ctp", alphas * reach, colours[chosen])
        return image.view(3, tiles, tiles, tile, tile).transpose(2, 3).reshape(3, side, side)

    @torch.no_grad()
    def move_faint(image):
        faint = (torch.sigmoid(scene.opacities) < 0.02).nonzero()[:, 0]
        if len(faint) == 0:
            return
        error = (image - target).abs().mean(dim=0).flatten()
        places = torch.multinomial(error, len(faint))
        scene.means[faint] = pixels[places]
        scene.colours[faint] = torch.logit(target.flatten(1).T[places].clamp(0.02, 0.98))
        scene.opacities[faint] = 0.0
        for parameter in (scene.means, scene.colours, scene.opacities):
            for name in ("exp_avg", "exp_avg_sq"):
                optimizer.state[parameter][name][faint] = 0

    history = []

    def step():
        image = render_tiles() if change == "tiles" else render()
        loss = 0.8 * (image - target).abs().mean() + 0.2 * (1 - structural_similarity(image, target))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        image = image.detach()
        history.append(-10 * math.log10(F.mse_loss(image, target).item()))
        if len(history) % 25 == 0:
            move_faint(image)
        return loss.detach()

    return step


class BertLayer(nn.Module):
    """A BERT layer: attention and feed-forward, each followed by a layer norm."""

    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value = nn.Linear(dim, dim), nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.out, self.norm1 = nn.Linear(dim, dim), nn.LayerNorm(dim, eps=1e-12)
        self.up, self.down, self.norm2 = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim), nn.LayerNorm(dim, eps=1e-12)

    def forward(self, x, mask):
        q, k, v = (f(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.query, self.key, self.value))
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = self.norm1(x + self.out(attended.transpose(1, 2).flatten(2)))
        return self.norm2(x + self.down(F.gelu(self.up(x))))


class BertEncoder(nn.Module):
    """Returns one vector for each chunk of tokens: the mean over its real tokens."""

    def __init__(self, vocabulary, dim, layers, heads, longest):
        super().__init__()
        self.words, self.places = nn.Embedding(vocabulary, dim), nn.Embedding(longest, dim)
        self.types, self.norm = nn.Embedding(2, dim), nn.LayerNorm(dim, eps=1e-12)
        self.layers = nn.ModuleList(BertLayer(dim, heads) for _ in range(layers))
        for table in (self.words, self.places, self.types):
            nn.init.normal_(table.weight, std=0.02)

    def forward(self, ids, mask):
        places = torch.arange(ids.shape[1], device=ids.device)
        x = self.norm(self.words(ids) + self.places(places) + self.types(torch.zeros_like(ids)))
        for layer in self.layers:
            x = layer(x, mask[:, None, None].bool())
        real = mask[..., None].float()
        return (x.float() * real).sum(dim=1) / real.sum(dim=1)


def long_document_embedder(change):
    """A worker that embeds a queue of long documents by overlapping chunks, pools them and scores them by a query."""
    longest, stride, vocabulary, at_once = size(512, 32), size(384, 24), size(30522, 500), 16
    rng = np.random.default_rng(0)
    lengths = np.exp(rng.normal(math.log(size(700, 40)), 0.9, size(24, 6))).astype(int)
    lengths = lengths.clip(longest // 8, 12 * longest)
    queues = [[rng.integers(1000 % vocabulary, vocabulary, n).tolist() for n in rng.permutation(lengths)]
              for _ in range(4)]  # fmt: skip
    torch.manual_seed(0)
    model = BertEncoder(vocabulary, size(768, 48), size(12, 2), size(12, 4), longest).eval().to(device)
    if change == "bf16_weights":
        model.to(torch.bfloat16)
    forward = compiled(model) if change == "compile_model" else model
    without_grad = torch.inference_mode if change == "inference_mode" else torch.no_grad

    def split(tokens):
        """Return the document's overlapping chunks."""
        chunks = [tokens[:longest]]
        for start in range(stride, len(tokens) - (longest - stride), stride):
            chunks.append(tokens[start : start + longest])
        return chunks

    def to_batch(chunks, width):
        """Return the chunks' ids, padded to a width, and their mask."""
        ids = torch.tensor([chunk + [0] * (width - len(chunk)) for chunk in chunks])
        mask = torch.tensor([[1] * len(chunk) + [0] * (width - len(chunk)) for chunk in chunks])
        return ids.to(device), mask.to(device)

    if change == "graph_by_chunks":
        graphs = {}
        for count in sorted({min(len(split(document)), at_once) for document in queues[0]}):
            static = tuple(torch.ones(count, longest, dtype=torch.int64, device=device) for _ in range(2))
            with torch.no_grad():
                graphs[count] = static, graphed(lambda static=static: model(*static))

    def encode(ids, mask):
        if change != "graph_by_chunks" or len(ids) not in graphs:
            return forward(ids, mask)
        static, replay = graphs[len(ids)]
        static[0].copy_(ids)
        static[1].copy_(mask)
        return replay().clone()

    def embed(document):
        chunks = split(document)
        parts = [encode(*to_batch(chunks[i : i + at_once], longest)) for i in range(0, len(chunks), at_once)]
        return F.normalize(torch.cat(parts).mean(dim=0), dim=-1).cpu()

    def embed_sorted(documents):
        """Embed the chunks of all documents in batches of similar length, then average them by document."""
        pairs = [(chunk, owner) for owner, document in enumerate(documents) for chunk in split(document)]
        pairs.sort(key=lambda pair: len(pair[0]))
        parts = []
        for i in range(0, len(pairs), at_once):
            chunks = [chunk for chunk, _ in pairs[i : i + at_once]]
            parts.append(encode(*to_batch(chunks, len(chunks[-1]))))
        parts = torch.cat(parts)
        owners = torch.tensor([owner for _, owner in pairs], device=device)
        sums = torch.zeros(len(documents), parts.shape[1], device=device).index_add_(0, owners, parts)
        return F.normalize(sums, dim=-1).cpu()

    queue = endless(queues)
    query = torch.randn(size(768, 48))

    def step():
        documents = next(queue)
        with without_grad():
            if change == "sorted_batches":
                embeddings = embed_sorted(documents)
            else:
                embeddings = torch.stack([embed(document) for document in documents])
            return embeddings @ query

    return step


PROGRAMS = {
    transducer_training: {
        "bf16": "half_precision",
        "label_scan": "",
        "graph_step": "cuda_graph",
        "gpu_features": "data_loader",
        "fused_adamw": "fused_optimizer",
    },
    decision_transformer: {
        "precomputed_returns": "data_loader",
        "gpu_sampler": "cpu_tensors",
        "graph_step": "cuda_graph",
        "deferred_metrics": "remove_sync",
        "pinned_batches": "overlap_copies",
    },
    gaussian_splats: {
        "compile_alphas": "fuse_pointwise",
        "tiles": "",
        "log_transmittance": "remove_sync",
        "matmul_exponents": "",
        "tf32": "tf32",
    },
    long_document_embedder: {
        "bf16_weights": "half_precision",
        "sorted_batches": "larger_batch",
        "compile_model": "fuse_pointwise",
        "graph_by_chunks": "cuda_graph",
        "inference_mode": "no_autograd",
    },
}
