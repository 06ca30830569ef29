"""Programs of stages: a robot, populations, long series, drafts of texts, and scans of streets."""

import itertools
import math

import numpy as np
import torch
import torch.nn.functional as F
from setting import bf16, compiled, device, endless, graphed, size
from torch import nn
from torch.utils.data import DataLoader, Dataset


class PolicyConvBlock(nn.Module):
    """Convolution, group norm and Mish."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.block = nn.Sequential(nn.Conv1d(inputs, outputs, 5, padding=2), nn.GroupNorm(8, outputs), nn.Mish())

    def forward(self, x):
        return self.block(x)


class PolicyResidual(nn.Module):
    """Two convolution blocks, modulated (FiLM) by time and observation."""

    def __init__(self, inputs, outputs, condition):
        super().__init__()
        self.block1, self.block2 = PolicyConvBlock(inputs, outputs), PolicyConvBlock(outputs, outputs)
        self.film = nn.Sequential(nn.Mish(), nn.Linear(condition, 2 * outputs))
        self.shortcut = nn.Conv1d(inputs, outputs, 1) if inputs != outputs else nn.Identity()

    def forward(self, x, condition):
        scale, bias = self.film(condition).unsqueeze(-1).chunk(2, dim=1)
        return self.block2(scale * self.block1(x) + bias) + self.shortcut(x)


class PolicyUnet(nn.Module):
    """The conditional 1-D U-Net of diffusion policy."""

    def __init__(self, action_dim, condition_dim, widths, time_dim):
        super().__init__()
        self.time_dim = time_dim
        self.time = nn.Sequential(nn.Linear(time_dim, 4 * time_dim), nn.Mish(), nn.Linear(4 * time_dim, time_dim))
        cond, channels = time_dim + condition_dim, [action_dim, *widths]
        self.down, self.up = nn.ModuleList(), nn.ModuleList()
        for i, (a, b) in enumerate(itertools.pairwise(channels)):
            last = i == len(widths) - 1
            self.down.append(
                nn.ModuleList(
                    [
                        PolicyResidual(a, b, cond),
                        PolicyResidual(b, b, cond),
                        nn.Identity() if last else nn.Conv1d(b, b, 3, 2, 1),
                    ]
                )
            )
        self.middle = nn.ModuleList(PolicyResidual(widths[-1], widths[-1], cond) for _ in range(2))
        for a, b in reversed(list(itertools.pairwise(widths))):
            self.up.append(
                nn.ModuleList(
                    [PolicyResidual(2 * b, a, cond), PolicyResidual(a, a, cond), nn.ConvTranspose1d(a, a, 4, 2, 1)]
                )
            )
        self.final = nn.Sequential(PolicyConvBlock(widths[0], widths[0]), nn.Conv1d(widths[0], action_dim, 1))

    def forward(self, actions, t, condition):
        half = self.time_dim // 2
        frequencies = torch.exp(torch.arange(half, device=actions.device) * -(math.log(10000) / (half - 1)))
        angles = t.float()[:, None] * frequencies[None]
        condition = torch.cat([self.time(torch.cat([angles.sin(), angles.cos()], dim=-1)), condition], dim=-1)
        x, skips = actions.transpose(1, 2), []
        for first, second, sample in self.down:
            x = second(first(x, condition), condition)
            skips.append(x)
            x = sample(x)
        for block in self.middle:
            x = block(x, condition)
        for first, second, sample in self.up:
            x = torch.cat([x, skips.pop()], dim=1)
            x = sample(second(first(x, condition), condition))
        return self.final(x).transpose(1, 2)


class PolicyCamera(nn.Module):
    """Encodes the camera images and the joint positions of the observation history."""

    def __init__(self, frames, joints, width, outputs):
        super().__init__()
        layers, channels = [], 3
        for i in range(4):
            layers += [nn.Conv2d(channels, width * 2**i, 3, 2, 1), nn.GroupNorm(8, width * 2**i), nn.ReLU()]
            channels = width * 2**i
        self.network = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.out = nn.Linear(frames * (channels + joints), outputs)

    def forward(self, images, joints):
        features = self.network(images.flatten(0, 1)).view(images.shape[0], images.shape[1], -1)
        return self.out(torch.cat([features, joints], dim=-1).flatten(1))


class DdimScheduler:
    """Deterministic DDIM steps with a cosine schedule."""

    def __init__(self, training_steps, steps, where):
        x = torch.linspace(0, 1, training_steps + 1)
        bar = torch.cos((x + 0.008) / 1.008 * math.pi / 2) ** 2
        betas = (1 - bar[1:] / bar[:-1]).clamp(max=0.999)
        self.alphas_cumprod = torch.cumprod(1 - betas, dim=0)
        self.stride = training_steps // steps
        self.timesteps = (torch.arange(steps) * self.stride).flip(0).to(where)

    def step(self, noise, t, sample):
        previous = t - self.stride
        alpha = self.alphas_cumprod[t]
        alpha_previous = self.alphas_cumprod[previous] if previous >= 0 else torch.tensor(1.0)
        clean = ((sample - (1 - alpha) ** 0.5 * noise) / alpha**0.5).clamp(-1, 1)
        noise = (sample - alpha**0.5 * clean) / (1 - alpha) ** 0.5
        return alpha_previous**0.5 * clean + (1 - alpha_previous) ** 0.5 * noise


def diffusion_policy(change):
    """Serve a robot: two frames and a goal become 16 actions by 25 guided denoising steps of a 1-D U-Net."""
    horizon, action_dim, joints, frames = 16, 10, 14, 2
    pixels, goal_dim, obs_dim = size(128, 32), size(128, 16), size(256, 16)
    widths = [size(256, 16), size(512, 16), size(1024, 32)]
    camera = PolicyCamera(frames, joints, size(32, 8), obs_dim).to(device).eval()
    unet = PolicyUnet(action_dim, obs_dim + goal_dim, widths, size(256, 16)).to(device).eval()
    steps = size(25, 4)
    scheduler = DdimScheduler(100, steps, "cpu" if change == "host_schedule" else device)
    data = torch.Generator().manual_seed(0)
    observations = itertools.cycle(
        [
            (
                torch.rand(1, frames, 3, pixels, pixels, generator=data),
                torch.randn(1, frames, joints, generator=data),
                torch.randn(1, goal_dim, generator=data),
            )
            for _ in range(8)
        ]
    )
    predict_noise = compiled(unet) if change == "compile" else unet

    def guided_noise(actions, t, with_goal, without_goal):
        with bf16(change == "bf16"):
            if change == "batched_guidance":
                condition = torch.cat([with_goal, without_goal])
                guided, free = predict_noise(actions.repeat(2, 1, 1), t.repeat(2), condition).chunk(2)
            else:
                guided = predict_noise(actions, t, with_goal)
                free = predict_noise(actions, t, without_goal)
        return free.float() + 2.0 * (guided.float() - free.float())

    if change == "graph":
        static = [
            torch.zeros(1, horizon, action_dim, device=device),
            torch.zeros(1, dtype=torch.long, device=device),
            torch.zeros(1, obs_dim + goal_dim, device=device),
            torch.zeros(1, obs_dim + goal_dim, device=device),
        ]
        with torch.no_grad():
            replay = graphed(lambda: guided_noise(*static))

    def denoise(actions, t, with_goal, without_goal):
        if change != "graph":
            return guided_noise(actions, t, with_goal, without_goal)
        for buffer, value in zip(static, (actions, t, with_goal, without_goal), strict=True):
            buffer.copy_(value)
        return replay()

    @torch.no_grad()
    def step():
        images, positions, goal = (value.to(device) for value in next(observations))
        features = camera(images, positions)
        with_goal = torch.cat([features, goal], dim=-1)
        without_goal = torch.cat([features, torch.zeros_like(goal)], dim=-1)
        actions = torch.randn(1, horizon, action_dim, device=device)
        for t in scheduler.timesteps:
            time = torch.full((1,), int(t), device=device) if change == "host_schedule" else t.expand(1)
            noise = denoise(actions, time, with_goal, without_goal)
            actions = scheduler.step(noise, t, actions)
        return actions[:, frames - 1 : frames + 7].cpu()

    return step


class TwoPoleCart:
    """A cart on a track that swings up two poles; states are (members, episodes, 6): x, v, angles, rates."""

    gravity, cart_mass, limit, dt = 9.8, 1.0, 4.0, 0.02
    masses, lengths = (0.1, 0.05), (0.5, 0.25)

    def __init__(self, stacked):
        self.stacked = stacked
        self.mass, self.length = (torch.tensor(v, device=device) for v in (self.masses, self.lengths))

    def observe(self, state):
        angles = state[..., 2:4]
        return torch.cat([state[..., :2], angles.sin(), angles.cos(), state[..., 4:] / 5], dim=-1)

    def derivative(self, state, force):
        v, angles, rates = state[..., 1], state[..., 2:4], state[..., 4:6]
        if self.stacked:
            sin, cos = angles.sin(), angles.cos()
            effective = self.mass * (1 - 0.75 * cos**2)
            push = self.mass * self.length * rates**2 * sin + 0.75 * self.mass * cos * -self.gravity * sin
            acceleration = (force + push.sum(-1) - 0.1 * v) / (self.cart_mass + effective.sum(-1))
            rate_change = -0.75 / self.length * (acceleration[..., None] * cos - self.gravity * sin) - 0.1 * rates
            return torch.cat([v[..., None], acceleration[..., None], rates, rate_change], dim=-1)
        total_force, total_mass = force - 0.1 * v, self.cart_mass
        for i in range(2):
            sin, cos = torch.sin(angles[..., i]), torch.cos(angles[..., i])
            total_mass = total_mass + self.masses[i] * (1 - 0.75 * cos**2)
            total_force = total_force + self.masses[i] * self.lengths[i] * rates[..., i] ** 2 * sin
            total_force = total_force + 0.75 * self.masses[i] * cos * -self.gravity * sin
        acceleration = total_force / total_mass
        rate_changes = []
        for i in range(2):
            sin, cos = torch.sin(angles[..., i]), torch.cos(angles[..., i])
            pull = acceleration * cos - self.gravity * sin
            rate_changes.append(-0.75 / self.lengths[i] * pull - 0.1 * rates[..., i])
        return torch.stack([v, acceleration, rates[..., 0], rates[..., 1], *rate_changes], dim=-1)

    def step(self, state, action):
        force, h = 10 * action, self.dt
        k1 = self.derivative(state, force)
        k2 = self.derivative(state + 0.5 * h * k1, force)
        k3 = self.derivative(state + 0.5 * h * k2, force)
        k4 = self.derivative(state + h * k3, force)
        state = state + h / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
        reward = state[..., 2].cos() + state[..., 3].cos() - 0.01 * action**2
        return state, reward, state[..., 0].abs() > self.limit


def evolution_strategy(change):
    """Evolution strategies: one generation of 512 policies, each on 8 episodes of 150 steps of a two-pole cart."""
    pairs, episodes, steps, hidden = size(256, 4), size(8, 2), size(150, 10), size(64, 8)
    sigma, env = 0.1, TwoPoleCart(stacked=change == "stacked_poles")
    shapes = [(8, hidden), (1, hidden), (hidden, hidden), (1, hidden), (hidden, 1), (1, 1)]
    lengths = [a * b for a, b in shapes]
    theta = torch.cat([torch.randn(a * b) / math.sqrt(a) if a > 1 else torch.zeros(b) for a, b in shapes]).to(device)
    theta = nn.Parameter(theta)
    optimizer = torch.optim.Adam([theta], lr=0.02)

    def policy(layers, observation):
        w1, b1, w2, b2, w3, b3 = layers
        x = torch.tanh(torch.bmm(observation, w1) + b1)
        x = torch.tanh(torch.bmm(x, w2) + b2)
        return torch.tanh(torch.bmm(x, w3) + b3).squeeze(-1)

    def advance(state, total, alive, *layers):
        action = policy(layers, env.observe(state))
        state, reward, left = env.step(state, action)
        alive = alive & ~left
        return state, total + reward * alive, alive

    if change == "compile":
        advance = compiled(advance)
    early_exit = change not in ("graph", "no_exit")

    def rollout(population, state):
        layers = [w.view(-1, *shape) for w, shape in zip(population.split(lengths, dim=1), shapes, strict=True)]
        total = torch.zeros(state.shape[:2], device=device)
        alive = torch.ones(state.shape[:2], dtype=torch.bool, device=device)
        for _ in range(steps):
            state, total, alive = advance(state, total, alive, *layers)
            if early_exit and not alive.any():
                break
        return total.mean(dim=1)

    if change == "graph":
        static_population = theta.detach().repeat(2 * pairs, 1)
        static_state = torch.zeros(2 * pairs, episodes, 6, device=device)
        with torch.no_grad():
            replay = graphed(lambda: rollout(static_population, static_state))

    @torch.no_grad()
    def step():
        if change == "one_noise":
            noise = torch.randn(pairs, theta.numel(), device=device)
            population = torch.stack([theta + sigma * noise, theta - sigma * noise], dim=1).flatten(0, 1)
        else:
            noise, population = [], []
            for _ in range(pairs):
                epsilon = torch.randn_like(theta)
                noise.append(epsilon)
                population += [theta + sigma * epsilon, theta - sigma * epsilon]
            population = torch.stack(population)
        state = torch.randn(1, episodes, 6, device=device) * 0.1
        state[..., 2:4] += math.pi
        state = state.repeat(2 * pairs, 1, 1)
        if change == "graph":
            static_population.copy_(population)
            static_state.copy_(state)
            fitness = replay()
        else:
            fitness = rollout(population, state)
        scores = fitness.cpu().numpy()
        ranks = np.empty(len(scores), dtype=np.float32)
        ranks[scores.argsort()] = np.arange(len(scores))
        ranks = ranks / (len(scores) - 1) - 0.5
        weights = ranks[0::2] - ranks[1::2]
        if change == "one_noise":
            gradient = torch.from_numpy(weights).to(device) @ noise
        else:
            gradient = torch.zeros_like(theta)
            for weight, epsilon in zip(weights.tolist(), noise, strict=True):
                gradient += weight * epsilon
        theta.grad = -gradient / (2 * pairs * sigma) + 0.005 * theta
        optimizer.step()
        return fitness.mean()

    return step


class SlidingWindows(Dataset):
    """Windows of a multivariate series: past and future values with their time features."""

    def __init__(self, length, channels, past, future):
        time = np.arange(length)[:, None]
        rng = np.random.default_rng(0)
        period, phase = rng.uniform(20, 400, channels), rng.uniform(0, 6, channels)
        series = np.sin(2 * np.pi * time / period + phase) + 0.3 * rng.standard_normal((length, channels))
        self.series = ((series - series.mean(0)) / series.std(0)).astype(np.float32)
        marks = [time % 6 / 5, time // 6 % 24 / 23, time // 144 % 7 / 6, time // 144 % 365 / 364]
        self.marks = (np.concatenate(marks, 1) - 0.5).astype(np.float32)
        self.past, self.future = past, future

    def __len__(self):
        return len(self.series) - self.past - self.future + 1

    def __getitem__(self, index):
        middle, end = index + self.past, index + self.past + self.future
        return self.series[index:middle], self.series[middle:end], self.marks[index:middle], self.marks[middle:end]


class ForecasterLayer(nn.Module):
    """A post-norm transformer layer with batch norm, as in PatchTST."""

    def __init__(self, dim, heads, ff, dropout, fused):
        super().__init__()
        self.heads, self.dropout, self.fused = heads, dropout, fused
        self.q, self.k, self.v, self.out = (nn.Linear(dim, dim) for _ in range(4))
        self.norm1, self.norm2 = nn.BatchNorm1d(dim), nn.BatchNorm1d(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, ff), nn.GELU(), nn.Dropout(dropout), nn.Linear(ff, dim))

    def forward(self, x):
        b, n, d = x.shape
        q, k, v = (f(x).reshape(b, n, self.heads, d // self.heads).transpose(1, 2) for f in (self.q, self.k, self.v))
        if self.fused:
            out = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout if self.training else 0.0)
        else:
            scores = torch.matmul(q, k.transpose(-2, -1)) / math.sqrt(d // self.heads)
            out = F.dropout(scores.softmax(dim=-1), self.dropout, self.training) @ v
        x = x + F.dropout(self.out(out.transpose(1, 2).reshape(b, n, d)), self.dropout, self.training)
        x = self.norm1(x.reshape(b * n, d)).view(b, n, d)
        x = x + F.dropout(self.mlp(x), self.dropout, self.training)
        return self.norm2(x.reshape(b * n, d)).view(b, n, d)


class PatchForecaster(nn.Module):
    """Channel-independent forecasting from patches of the normalised series."""

    def __init__(self, channels, past, future, dim, heads, ff, layers, fused):
        super().__init__()
        self.patch, self.stride = 16, 8
        patches = (past - self.patch) // self.stride + 2
        self.scale, self.shift = nn.Parameter(torch.ones(channels)), nn.Parameter(torch.zeros(channels))
        self.embed = nn.Linear(self.patch, dim)
        self.pos = nn.Parameter(torch.empty(patches, dim).uniform_(-0.02, 0.02))
        self.layers = nn.ModuleList(ForecasterLayer(dim, heads, ff, 0.2, fused) for _ in range(layers))
        self.head = nn.Linear(patches * dim, future)

    def forward(self, x):
        mean = x.mean(1, keepdim=True).detach()
        std = torch.sqrt(x.var(1, keepdim=True, unbiased=False) + 1e-5).detach()
        x = (x - mean) / std * self.scale + self.shift
        x = F.pad(x.permute(0, 2, 1), (0, self.stride), mode="replicate")
        x = x.unfold(-1, self.patch, self.stride)
        b, c, n, _ = x.shape
        x = F.dropout((self.embed(x) + self.pos).reshape(b * c, n, -1), 0.2, self.training)
        for layer in self.layers:
            x = layer(x)
        x = self.head(x.reshape(b, c, -1)).permute(0, 2, 1)
        return (x - self.shift) / (self.scale + 1e-10) * std + mean


def patch_forecaster(change):
    """Train a PatchTST-like forecaster on windows of a series of 21 channels."""
    channels, past, future, batch = size(21, 3), size(336, 64), size(96, 16), size(128, 8)
    dataset = SlidingWindows(size(36000, 400), channels, past, future)
    batches = endless(DataLoader(dataset, batch, shuffle=True, drop_last=True))
    model = (
        PatchForecaster(
            channels, past, future, size(128, 16), size(16, 2), size(256, 32), size(3, 1), fused=change == "sdpa"
        )
        .to(device)
        .train()
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, fused=change == "fused_adam")
    criterion = nn.MSELoss()
    forward = compiled(model) if change == "compile" else model
    train_loss = []
    if change == "gpu_windows":
        series = torch.from_numpy(dataset.series).to(device)
        offsets = torch.arange(past + future, device=device)

    def step():
        if change == "gpu_windows":
            starts = torch.randint(len(dataset), (batch,), device=device)
            window = series[starts[:, None] + offsets]
            batch_x, batch_y = window[:, :past], window[:, past:]
        else:
            batch_x, batch_y, x_mark, y_mark = next(batches)
            batch_x, batch_y = batch_x.float().to(device), batch_y.float().to(device)
            x_mark, y_mark = x_mark.float().to(device), y_mark.float().to(device)
        optimizer.zero_grad()
        with bf16(change == "bf16"):
            outputs = forward(batch_x)
            loss = criterion(outputs.float(), batch_y)
        train_loss.append(loss.item())
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


class SpeculativeBlock(nn.Module):
    """A block of a GPT; its cache grows by concatenation, or is written in place where positions are given."""

    def __init__(self, dim, heads, fused):
        super().__init__()
        self.heads, self.fused = heads, fused
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.fc1, self.fc2 = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x, past, mask, positions=None):
        b, n, d = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, n, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        if positions is not None:
            past[0].index_copy_(2, positions, k)
            past[1].index_copy_(2, positions, v)
            k, v = past
        elif past is not None:
            k, v = torch.cat([past[0], k], dim=2), torch.cat([past[1], v], dim=2)
        if self.fused:
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        else:
            scores = q @ k.transpose(-2, -1) / math.sqrt(d // self.heads)
            out = scores.masked_fill(~mask, float("-inf")).softmax(dim=-1) @ v
        x = x + self.proj(out.transpose(1, 2).reshape(b, n, d))
        return x + self.fc2(F.gelu(self.fc1(self.norm2(x)))), (k, v)


class SpeculativeGpt(nn.Module):
    """A GPT that returns the logits of the given tokens and the caches of its blocks."""

    def __init__(self, vocabulary, context, dim, heads, layers, fused):
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, dim), nn.Embedding(context, dim)
        self.blocks = nn.ModuleList(SpeculativeBlock(dim, heads, fused) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, vocabulary, bias=False)

    def forward(self, tokens, caches=None):
        start = 0 if caches is None else caches[0][0].shape[2]
        places = torch.arange(start, start + tokens.shape[1], device=tokens.device)
        mask = torch.arange(start + tokens.shape[1], device=tokens.device)[None] <= places[:, None]
        x, new = self.tokens(tokens) + self.places(places), []
        for i, block in enumerate(self.blocks):
            x, cache = block(x, None if caches is None else caches[i], mask)
            new.append(cache)
        return self.head(self.norm(x)), new

    def forward_static(self, tokens, start, caches):
        places = start + torch.arange(tokens.shape[1], device=tokens.device)
        mask = torch.arange(caches[0][0].shape[2], device=tokens.device)[None] <= places[:, None]
        x = self.tokens(tokens) + self.places(places)
        for block, cache in zip(self.blocks, caches, strict=True):
            x, _ = block(x, cache, mask, places)
        return self.head(self.norm(x))


def speculative_decoding(change):
    """Generate 64 tokens greedily: a draft of 4 layers proposes, a GPT of 24 layers verifies."""
    vocabulary, dim, heads, k = size(32000, 100), size(1024, 32), size(16, 2), 4
    prompt, new = size(128, 8), size(64, 12)
    context = prompt + new + 2 * k + 2
    fused = change == "sdpa"
    with torch.device(device):
        target = SpeculativeGpt(vocabulary, context, dim, heads, size(24, 4), fused)
        draft = SpeculativeGpt(vocabulary, context, dim, heads, size(4, 1), fused)
    with torch.no_grad():  # Stands for a distilled draft: the target's later layers change its opinion a little.
        for block in target.blocks[len(draft.blocks) :]:
            block.proj.weight.mul_(0.1)
            block.fc2.weight.mul_(0.1)
            block.proj.bias.mul_(0.1)
            block.fc2.bias.mul_(0.1)
    shared = target.state_dict()
    draft.load_state_dict({name: shared[name] for name in draft.state_dict()})
    dtype = torch.bfloat16 if change == "bf16" else torch.float32
    target, draft = target.to(device, dtype).eval(), draft.to(device, dtype).eval()
    if change == "compile":
        for model in (target, draft):
            model.blocks = nn.ModuleList(compiled(block, dynamic=True) for block in model.blocks)
    data = torch.Generator().manual_seed(0)
    prompts = itertools.cycle([torch.randint(vocabulary, (1, prompt), generator=data) for _ in range(8)])

    def crop(caches, length):
        return [(keys[:, :, :length], values[:, :, :length]) for keys, values in caches]

    def count_accepted(proposed, verified):
        if change in ("tensor_accept", "graph"):
            return int((proposed == verified[:, :k]).long().cumprod(dim=1).sum())
        accepted = 0
        while accepted < k and proposed[0, accepted].item() == verified[0, accepted].item():
            accepted += 1
        return accepted

    @torch.no_grad()
    def step():
        tokens = next(prompts).to(device)
        logits, target_cache = target(tokens)
        _, draft_cache = draft(tokens)
        tokens = torch.cat([tokens, logits[:, -1:].argmax(dim=-1)], dim=1)
        while tokens.shape[1] < prompt + new:
            length = tokens.shape[1]
            candidate = tokens
            for _ in range(k):
                known = draft_cache[0][0].shape[2]
                logits, draft_cache = draft(candidate[:, known:], draft_cache)
                candidate = torch.cat([candidate, logits[:, -1:].argmax(dim=-1)], dim=1)
            logits, target_cache = target(candidate[:, length - 1 :], target_cache)
            verified = logits.argmax(dim=-1)
            accepted = count_accepted(candidate[:, length:], verified)
            tokens = torch.cat([tokens, verified[:, : accepted + 1]], dim=1)
            target_cache = crop(target_cache, tokens.shape[1] - 1)
            draft_cache = crop(draft_cache, tokens.shape[1] - 1)
        return tokens[:, : prompt + new]

    if change != "graph":
        return step

    def static_caches(model):
        shape = (1, heads, context, dim // heads)
        return [(torch.zeros(shape, device=device), torch.zeros(shape, device=device)) for _ in model.blocks]

    target_static, draft_static = static_caches(target), static_caches(draft)
    last_two = torch.zeros(1, 2, dtype=torch.long, device=device)
    last_place = torch.ones(1, dtype=torch.long, device=device)
    zero = torch.zeros(1, dtype=torch.long, device=device)

    def propose():
        proposed = [draft.forward_static(last_two, last_place - 1, draft_static)[:, -1:].argmax(dim=-1)]
        for i in range(1, k):
            logits = draft.forward_static(proposed[-1], last_place + i, draft_static)
            proposed.append(logits[:, -1:].argmax(dim=-1))
        return torch.cat(proposed, dim=1)

    with torch.no_grad():
        draft_replay = graphed(propose)
        to_verify = torch.zeros(1, k + 1, dtype=torch.long, device=device)
        target_replay = graphed(lambda: target.forward_static(to_verify, last_place, target_static).argmax(dim=-1))

    @torch.no_grad()
    def graph_step():
        tokens = next(prompts).to(device)
        logits = target.forward_static(tokens, zero, target_static)
        draft.forward_static(tokens, zero, draft_static)
        tokens = torch.cat([tokens, logits[:, -1:].argmax(dim=-1)], dim=1)
        while tokens.shape[1] < prompt + new:
            last_two.copy_(tokens[:, -2:])
            last_place.fill_(tokens.shape[1] - 1)
            proposed = draft_replay()
            to_verify.copy_(torch.cat([tokens[:, -1:], proposed], dim=1))
            verified = target_replay()
            accepted = count_accepted(proposed, verified)
            tokens = torch.cat([tokens, verified[:, : accepted + 1]], dim=1)
        return tokens[:, : prompt + new]

    return graph_step


class LidarScans(Dataset):
    """Scans of a rotating lidar; an item is projected to a range image in numpy unless raw."""

    def __init__(self, beams, columns, classes, raw):
        self.beams, self.columns, self.raw = beams, columns, raw
        self.up, self.down = math.radians(3.0), math.radians(-25.0)
        rng, self.scans = np.random.default_rng(0), []
        for _ in range(size(6, 2)):
            pitch = np.repeat(np.linspace(self.down, self.up, beams), size(1900, 100))
            yaw = np.tile(np.linspace(-np.pi, np.pi, size(1900, 100)), beams)
            pitch, yaw = pitch + rng.normal(0, 0.001, pitch.shape), yaw + rng.normal(0, 0.001, yaw.shape)
            depth = 12 + 8 * np.sin(3 * yaw) + 40 * (pitch - self.down) + rng.exponential(1.0, yaw.shape)
            points = np.stack([np.cos(pitch) * np.cos(yaw), np.cos(pitch) * np.sin(yaw), np.sin(pitch)], 1)
            points = np.concatenate([points * np.abs(depth + 1)[:, None], rng.uniform(0, 1, (len(yaw), 1))], 1)
            keep = rng.permutation(len(points))[: int(0.95 * len(points))]
            labels = rng.integers(0, classes, len(keep))
            self.scans.append((points[keep].astype(np.float32), labels))

    def __len__(self):
        return size(6000, 20)

    def __getitem__(self, index):
        points, labels = self.scans[index % len(self.scans)]
        if self.raw:
            return torch.from_numpy(points), torch.from_numpy(labels)
        depth = np.linalg.norm(points[:, :3], 2, axis=1)
        yaw = -np.arctan2(points[:, 1], points[:, 0])
        pitch = np.arcsin(points[:, 2] / depth)
        x = np.floor(0.5 * (yaw / np.pi + 1.0) * self.columns)
        y = np.floor((1.0 - (pitch - self.down) / (self.up - self.down)) * self.beams)
        x = np.clip(x, 0, self.columns - 1).astype(np.int64)
        y = np.clip(y, 0, self.beams - 1).astype(np.int64)
        order = np.argsort(depth)[::-1]
        image = np.full((5, self.beams, self.columns), -1, dtype=np.float32)
        image[0, y[order], x[order]] = depth[order]
        image[1:, y[order], x[order]] = points[order].T
        image = np.where(image[:1] > 0, (image - LIDAR_MEAN) / LIDAR_STD, 0).astype(np.float32)
        ranges = np.full((self.beams, self.columns), -1, dtype=np.float32)
        ranges[y[order], x[order]] = depth[order]
        return tuple(torch.from_numpy(value) for value in (image, ranges, depth, x, y, labels))


LIDAR_MEAN = np.array([12.12, 10.88, 0.23, -1.04, 0.21], dtype=np.float32)[:, None, None]
LIDAR_STD = np.array([12.32, 11.47, 6.91, 0.86, 0.16], dtype=np.float32)[:, None, None]


class LidarBlock(nn.Module):
    """A residual block with a dilated branch, as in SalsaNext."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1), nn.LeakyReLU())
        self.conv1 = nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1), nn.LeakyReLU(), nn.BatchNorm2d(outputs))
        self.conv2 = nn.Sequential(
            nn.Conv2d(outputs, outputs, 3, padding=2, dilation=2), nn.LeakyReLU(), nn.BatchNorm2d(outputs)
        )
        self.merge = nn.Sequential(nn.Conv2d(2 * outputs, outputs, 1), nn.LeakyReLU(), nn.BatchNorm2d(outputs))

    def forward(self, x):
        first = self.conv1(x)
        second = self.conv2(first)
        return self.shortcut(x) + self.merge(torch.cat([first, second], dim=1))


class LidarNetwork(nn.Module):
    """A U-Net over range images."""

    def __init__(self, width, classes):
        super().__init__()
        widths = [width, 2 * width, 4 * width, 8 * width, 8 * width]
        self.stem = nn.Sequential(LidarBlock(5, width), LidarBlock(width, width))
        self.down = nn.ModuleList(LidarBlock(a, b) for a, b in itertools.pairwise(widths))
        self.pool = nn.AvgPool2d(3, 2, 1)
        ups = list(itertools.pairwise(reversed(widths)))
        self.up = nn.ModuleList(LidarBlock(a + b, b) for a, b in ups)
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, x):
        x, skips = self.stem(x), []
        for block in self.down:
            skips.append(x)
            x = block(self.pool(x))
        for block in self.up:
            skip = skips.pop()
            x = block(torch.cat([F.interpolate(x, size=skip.shape[2:], mode="bilinear"), skip], dim=1))
        return self.head(x)


class RangeKnn(nn.Module):
    """Labels points by a vote of the nearest of the pixels around theirs."""

    def __init__(self, classes, search=5, neighbours=5, sigma=1.0, cutoff=1.0):
        super().__init__()
        self.classes, self.search, self.neighbours, self.cutoff = classes, search, neighbours, cutoff
        axis = torch.arange(search) - search // 2
        gauss = torch.exp(-(axis[:, None] ** 2 + axis[None] ** 2) / (2 * sigma**2))
        self.register_buffer("distance_weight", (1 - gauss / gauss.sum()).view(1, -1, 1))

    def forward(self, image_range, point_range, image_labels, x, y):
        width = image_range.shape[1]
        pad, index = self.search // 2, y * width + x
        around = F.unfold(image_range[None, None], self.search, padding=pad)[:, :, index]
        around[around < 0] = float("inf")
        around[:, self.search**2 // 2] = point_range
        distance = (around - point_range).abs() * self.distance_weight
        nearest = distance.topk(self.neighbours, dim=1, largest=False).indices
        labels = F.unfold(image_labels[None, None].float(), self.search, padding=pad)[:, :, index]
        labels = labels.gather(1, nearest).long()
        labels[distance.gather(1, nearest) > self.cutoff] = self.classes
        votes = torch.zeros(1, self.classes + 1, len(index), device=index.device)
        votes = votes.scatter_add_(1, labels, torch.ones_like(labels, dtype=votes.dtype))
        return votes[0, : self.classes].argmax(dim=0)


def lidar_segmentation(change):
    """Evaluate a range-image network scan by scan: projection, network, kNN post-processing, IoU per class."""
    beams, columns, classes = size(64, 16), size(2048, 64), size(20, 5)
    dataset = LidarScans(beams, columns, classes, raw=change == "gpu_projection")
    workers = size(4, 1) if change == "workers" else 0
    loader = DataLoader(
        dataset,
        batch_size=1,
        num_workers=workers,
        persistent_workers=workers > 0,
        multiprocessing_context="fork" if workers else None,
    )
    batches = endless(loader)
    batches = itertools.chain([next(batches)], batches)
    model = LidarNetwork(size(32, 8), classes).to(device).eval()
    forward = compiled(model) if change == "compile" else model
    knn = RangeKnn(classes).to(device)
    matrix = torch.zeros(classes, classes, dtype=torch.long, device=device)
    intersection, union = np.zeros(classes), np.zeros(classes)
    mean, std = torch.from_numpy(LIDAR_MEAN).to(device), torch.from_numpy(LIDAR_STD).to(device)

    def project(points):
        """Do on the device what LidarScans does with one scan."""
        depth = points[:, :3].norm(dim=1)
        yaw, pitch = -torch.atan2(points[:, 1], points[:, 0]), torch.asin(points[:, 2] / depth)
        x = (0.5 * (yaw / math.pi + 1.0) * columns).floor().clamp(0, columns - 1).long()
        y = (1.0 - (pitch - dataset.down) / (dataset.up - dataset.down)) * beams
        y = y.floor().clamp(0, beams - 1).long()
        pixel = y * columns + x
        nearest = torch.full((beams * columns,), float("inf"), device=device)
        nearest.scatter_reduce_(0, pixel, depth, "amin")
        pixel_or_none = torch.where(depth == nearest[pixel], pixel, beams * columns)
        values = torch.full((beams * columns + 1, 5), -1.0, device=device)
        values[pixel_or_none] = torch.cat([depth[:, None], points], dim=1)
        image = values[:-1].T.reshape(5, beams, columns)
        normal = torch.where(image[:1] > 0, (image - mean) / std, torch.zeros_like(image))
        return normal[None], image[0], depth, x, y

    @torch.no_grad()
    def step():
        if change == "gpu_projection":
            points, labels = (value.to(device) for value in next(batches))
            image, image_range, point_range, x, y = project(points[0])
            labels = labels[0]
        else:
            image, *others = (value.to(device) for value in next(batches))
            image_range, point_range, x, y, labels = (value[0] for value in others)
        with bf16(change == "bf16"):
            logits = forward(image)
        predicted = knn(image_range, point_range, logits[0].argmax(dim=0), x, y)
        if change == "confusion_matrix":
            matrix.add_(torch.bincount(labels * classes + predicted, minlength=classes**2).view(classes, classes))
            hits = matrix.diagonal()
            return (hits / (matrix.sum(0) + matrix.sum(1) - hits).clamp(min=1)).mean()
        for c in range(classes):
            in_prediction, in_label = predicted == c, labels == c
            intersection[c] += (in_prediction & in_label).sum().item()
            union[c] += (in_prediction | in_label).sum().item()
        return torch.tensor((intersection / np.maximum(union, 1)).mean())

    return step


PROGRAMS = {
    diffusion_policy: {
        "graph": "cuda_graph",
        "compile": "fuse_pointwise",
        "batched_guidance": "larger_batch",
        "bf16": "half_precision",
        "host_schedule": "remove_sync",
    },
    evolution_strategy: {
        "graph": "cuda_graph",
        "compile": "fuse_pointwise",
        "stacked_poles": "larger_batch",
        "one_noise": "larger_batch",
        "no_exit": "remove_sync",
    },
    patch_forecaster: {
        "gpu_windows": "data_loader",
        "bf16": "half_precision",
        "compile": "fuse_pointwise",
        "sdpa": "fused_attention",
        "fused_adam": "fused_optimizer",
    },
    speculative_decoding: {
        "graph": "static_cache",
        "compile": "fuse_pointwise",
        "sdpa": "fused_attention",
        "tensor_accept": "remove_sync",
        "bf16": "half_precision",
    },
    lidar_segmentation: {
        "gpu_projection": "data_loader",
        "workers": "data_loader",
        "confusion_matrix": "remove_sync",
        "compile": "fuse_pointwise",
        "bf16": "half_precision",
    },
}
