"""Programs of several fields: satellites, offline learning, weather on a mesh, hospitals, and videos."""

import copy
import math

import numpy
import torch
import torch.nn.functional as F
from setting import compiled, device, endless, graphed, size, use_tf32
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

# satellite images of one season, in training


def convolution(inside, outside, stride=1):
    """Return a convolution with its normalisation and activation."""
    return nn.Sequential(nn.Conv2d(inside, outside, 3, stride, 1), nn.GroupNorm(4, outside), nn.ReLU())


class DateEncoder(nn.Module):
    """Turn the image of one date into features at half the resolution."""

    def __init__(self, bands, width):
        super().__init__()
        self.stem = nn.Sequential(convolution(bands, width), convolution(width, width), convolution(width, width))
        self.down = convolution(width, 2 * width, stride=2)
        self.blocks = nn.ModuleList(
            [nn.Sequential(convolution(2 * width, 2 * width), convolution(2 * width, 2 * width)) for _ in range(2)]
        )

    def forward(self, image):
        features = self.down(self.stem(image))
        for block in self.blocks:
            features = features + block(features)
        return features


class SeasonAttention(nn.Module):
    """Weigh the dates of every pixel with one learned query for each head."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.query = nn.Parameter(torch.randn(heads, width // heads) * 0.2)
        self.key, self.value = nn.Linear(width, width), nn.Linear(width, width)
        self.day_embedding = nn.Embedding(366, width)

    def forward(self, features, days):
        samples, dates, width, high, wide = features.shape
        pixels = features.permute(0, 3, 4, 1, 2) + self.day_embedding(days)[:, None, None]
        keys = self.key(pixels).view(samples, high, wide, dates, self.heads, -1)
        values = self.value(pixels).view(samples, high, wide, dates, self.heads, -1)
        scores = (keys * self.query).sum(-1) / math.sqrt(width // self.heads)
        weights = scores.softmax(dim=3).unsqueeze(-1)
        return (weights * values).sum(3).reshape(samples, high, wide, width).permute(0, 3, 1, 2)


def crop_seasons(change):
    """Train a crop-type segmentation of Sentinel-2 time series: a CNN for each date, then attention over the dates."""
    fields, batch, dates = size(64, 4), size(8, 2), size(16, 3)
    bands, side, width, crops = 10, size(64, 8), size(64, 8), 12
    patches = torch.randint(0, 6000, (fields, dates, bands, side, side), dtype=torch.int16)
    days = torch.randint(0, 366, (fields, dates)).sort(1).values
    labels = torch.randint(0, crops, (fields, side, side))
    mean, deviation = torch.full((bands, 1, 1), 2900.0), torch.full((bands, 1, 1), 1700.0)
    encoder = DateEncoder(bands, width).to(device)
    attention = SeasonAttention(2 * width, 4).to(device)
    classifier = nn.Conv2d(2 * width, crops, 1).to(device)
    parts = nn.ModuleList([encoder, attention, classifier])
    if change == "channels_last":
        encoder.to(memory_format=torch.channels_last)
    if change == "scale_on_gpu":
        mean, deviation = mean.to(device), deviation.to(device)
    optimizer = torch.optim.SGD(parts.parameters(), lr=0.01, momentum=0.9, nesterov=True, weight_decay=1e-4)
    losses = []

    def encode(images):
        if change == "dates_together":
            return encoder(images.flatten(0, 1)).unflatten(0, (-1, dates))
        features = []
        for date in range(dates):
            image = images[:, date]
            if change == "channels_last":
                image = image.contiguous(memory_format=torch.channels_last)
            features.append(encoder(image))
        return torch.stack(features, 1)

    def step():
        chosen = torch.randint(0, fields, (batch,))
        if change == "scale_on_gpu":
            images = (patches[chosen].to(device).float() - mean) / deviation
        else:
            images = ((patches[chosen].float() - mean) / deviation).to(device)
        target, when = labels[chosen].to(device), days[chosen].to(device)
        with torch.autocast(device.type, torch.bfloat16, enabled=change == "autocast_bf16"):
            scores = classifier(attention(encode(images), when))
            scores = F.interpolate(scores, size=(side, side), mode="bilinear", align_corners=False)
            loss = F.cross_entropy(scores, target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach() if change == "loss_stays_on_gpu" else loss.item())
        return loss.detach()

    return step


# offline reinforcement learning


def layers(inside, hidden, outside):
    """Return a small network with two hidden layers."""
    return nn.Sequential(
        nn.Linear(inside, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, outside)
    )


class Policy(nn.Module):
    """A Gaussian policy squashed by tanh."""

    def __init__(self, sight, moves, hidden):
        super().__init__()
        self.trunk = layers(sight, hidden, 2 * moves)

    def forward(self, seen):
        mean, log_deviation = self.trunk(seen).chunk(2, -1)
        log_deviation = log_deviation.clamp(-5, 2)
        noise = torch.randn_like(mean)
        raw = mean + log_deviation.exp() * noise
        density = -0.5 * noise**2 - log_deviation - 0.5 * math.log(2 * math.pi)
        density = density - 2 * (math.log(2) - raw - F.softplus(-2 * raw))
        return torch.tanh(raw), density.sum(-1)


class TwinCritic(nn.Module):
    """Two value networks, one after the other."""

    def __init__(self, sight, moves, hidden):
        super().__init__()
        self.first, self.second = layers(sight + moves, hidden, 1), layers(sight + moves, hidden, 1)

    def forward(self, seen, move):
        both = torch.cat([seen, move], -1)
        return torch.stack([self.first(both).squeeze(-1), self.second(both).squeeze(-1)])


class PairedCritic(nn.Module):
    """The two value networks of a TwinCritic as one batched product for each layer."""

    def __init__(self, twin):
        super().__init__()
        pairs = [(one, two) for one, two in zip(twin.first, twin.second, strict=True) if isinstance(one, nn.Linear)]
        self.weights = nn.ParameterList([torch.stack([a.weight.detach().T, b.weight.detach().T]) for a, b in pairs])
        self.biases = nn.ParameterList([torch.stack([a.bias.detach(), b.bias.detach()])[:, None] for a, b in pairs])

    def forward(self, seen, move):
        hidden = torch.cat([seen, move], -1).expand(2, -1, -1)
        for number, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            hidden = torch.baddbmm(bias, hidden, weight)
            if number < len(self.weights) - 1:
                hidden = F.relu(hidden)
        return hidden.squeeze(-1)


def cautious_robot(change):
    """Train conservative Q-learning (CQL) on a stored data set of a walking robot, with small networks."""
    if change == "tf32":
        use_tf32()
    rows, batch, sight, moves, hidden, tries = size(200000, 500), size(256, 8), 17, 6, size(256, 16), size(10, 3)
    generator = numpy.random.default_rng(0)
    replay = {
        "seen": generator.standard_normal((rows, sight), dtype=numpy.float32),
        "move": generator.uniform(-1, 1, (rows, moves)).astype(numpy.float32),
        "reward": generator.standard_normal(rows, dtype=numpy.float32),
        "next_seen": generator.standard_normal((rows, sight), dtype=numpy.float32),
        "done": (generator.random(rows) < 0.01).astype(numpy.float32),
    }
    if change == "replay_on_gpu":
        replay = {name: torch.from_numpy(values).to(device) for name, values in replay.items()}
    policy, critic = Policy(sight, moves, hidden).to(device), TwinCritic(sight, moves, hidden).to(device)
    if change == "critics_together":
        critic = PairedCritic(critic)
    target = copy.deepcopy(critic).requires_grad_(False)
    log_alpha = torch.zeros((), device=device, requires_grad=True)
    options = {"fused": True} if change == "fused_adam" else {}
    if change == "whole_step_graph":
        options = {"capturable": device.type == "cuda"}
    policy_optimizer = torch.optim.Adam(policy.parameters(), lr=1e-4, **options)
    critic_optimizer = torch.optim.Adam(critic.parameters(), lr=3e-4, **options)
    alpha_optimizer = torch.optim.Adam([log_alpha], lr=1e-4, **options)

    def draw():
        if change == "replay_on_gpu":
            chosen = torch.randint(0, rows, (batch,), device=device)
            return {name: values[chosen] for name, values in replay.items()}
        chosen = generator.integers(0, rows, batch)
        return {name: torch.from_numpy(values[chosen]).to(device) for name, values in replay.items()}

    def update(data):
        seen, next_seen = data["seen"], data["next_seen"]
        move, density = policy(seen)
        alpha_loss = -(log_alpha * (density.detach() - moves)).mean()
        alpha_optimizer.zero_grad()
        alpha_loss.backward()
        alpha_optimizer.step()
        alpha = log_alpha.exp().detach()

        critic.requires_grad_(False)
        policy_loss = (alpha * density - critic(seen, move).min(0).values).mean()
        policy_optimizer.zero_grad()
        policy_loss.backward()
        policy_optimizer.step()
        critic.requires_grad_(True)

        with torch.no_grad():
            next_move, next_density = policy(next_seen)
            next_value = target(next_seen, next_move).min(0).values - alpha * next_density
            wanted = data["reward"] + 0.99 * (1 - data["done"]) * next_value
            many_seen = seen[:, None].expand(-1, tries, -1).reshape(-1, sight)
            many_next = next_seen[:, None].expand(-1, tries, -1).reshape(-1, sight)
            random_moves = torch.rand(batch * tries, moves, device=device) * 2 - 1
            own_moves, own_density = policy(many_seen)
            later_moves, later_density = policy(many_next)
        value = critic(seen, data["move"])
        bellman = ((value - wanted) ** 2).mean(1).sum()
        random_value = critic(many_seen, random_moves) - moves * math.log(0.5)
        own_value = critic(many_seen, own_moves) - own_density
        later_value = critic(many_seen, later_moves) - later_density
        candidates = torch.cat([part.view(2, batch, tries) for part in (random_value, own_value, later_value)], 2)
        caution = (candidates.logsumexp(2) - value).mean(1).sum()
        critic_loss = bellman + 5 * caution
        critic_optimizer.zero_grad()
        critic_loss.backward()
        critic_optimizer.step()

        with torch.no_grad():
            for slow, fast in zip(target.parameters(), critic.parameters(), strict=True):
                slow.mul_(0.995).add_(fast, alpha=0.005)
        parts = {"alpha": alpha, "policy": policy_loss, "bellman": bellman, "caution": caution, "critic": critic_loss}
        return {name: part.detach() for name, part in parts.items()}

    if change == "whole_step_graph":
        held = draw()
        repeat = graphed(lambda: update(held))
    history = []

    def step():
        data = draw()
        if change == "whole_step_graph":
            for name, values in data.items():
                held[name].copy_(values)
            report = repeat()
        else:
            report = update(data)
        history.append({name: part.item() for name, part in report.items()})
        return report["critic"]

    return step


# a weather emulator on a mesh, in training


class MeshLayer(nn.Module):
    """Update the edges from the nodes at their ends, then the nodes from the edges that they receive."""

    def __init__(self, width, change):
        super().__init__()
        self.change = change
        self.edge_first, self.edge_second = nn.Linear(3 * width, width), nn.Linear(width, width)
        self.node_first, self.node_second = nn.Linear(2 * width, width), nn.Linear(width, width)
        self.edge_norm, self.node_norm = nn.LayerNorm(width), nn.LayerNorm(width)

    def gather(self, nodes, chosen):
        return nodes.index_select(1, chosen) if self.change == "index_select" else nodes[:, chosen]

    def forward(self, nodes, edges, senders, receivers):
        if self.change == "split_first_layer":
            for_edges, for_senders, for_receivers = self.edge_first.weight.chunk(3, 1)
            sent, received = F.linear(nodes, for_senders), F.linear(nodes, for_receivers)
            hidden = F.linear(edges, for_edges, self.edge_first.bias)
            hidden = hidden + self.gather(sent, senders) + self.gather(received, receivers)
        else:
            ends = [self.gather(nodes, senders), self.gather(nodes, receivers)]
            hidden = self.edge_first(torch.cat([edges, *ends], -1))
        message = self.edge_norm(self.edge_second(F.silu(hidden)))
        summed = torch.zeros_like(nodes).index_add(1, receivers, message)
        hidden = F.silu(self.node_first(torch.cat([nodes, summed], -1)))
        return nodes + self.node_norm(self.node_second(hidden)), edges + message


class Emulator(nn.Module):
    """Encode the weather on the grid onto a mesh, pass messages there, and decode the change of the weather."""

    def __init__(self, variables, width, depth, near, change):
        super().__init__()
        self.change = change
        self.register_buffer("near", near)
        self.embed = nn.Sequential(nn.Linear(variables + 3, width), nn.SiLU(), nn.Linear(width, width))
        self.embed_edges = nn.Sequential(nn.Linear(4, width), nn.SiLU(), nn.LayerNorm(width))
        self.node_norm = nn.LayerNorm(width)
        self.layers = nn.ModuleList([MeshLayer(width, change) for _ in range(depth)])
        self.decode = nn.Sequential(nn.Linear(2 * width, width), nn.SiLU(), nn.Linear(width, variables))

    def forward(self, weather, points, mesh_size, edge_features, senders, receivers):
        grid = self.embed(torch.cat([weather, points.expand(len(weather), -1, -1)], -1))
        nodes = torch.zeros(len(weather), mesh_size, grid.shape[-1], device=grid.device, dtype=grid.dtype)
        nodes = self.node_norm(nodes.index_add(1, self.near, grid))
        edges = self.embed_edges(edge_features).expand(len(weather), -1, -1)
        for layer in self.layers:
            if self.change == "no_checkpoint":
                nodes, edges = layer(nodes, edges, senders, receivers)
            else:
                nodes, edges = checkpoint(layer, nodes, edges, senders, receivers, use_reentrant=False)
        return weather + self.decode(torch.cat([grid, nodes[:, self.near].to(grid.dtype)], -1))


def sphere(count):
    """Return points spread evenly over a sphere."""
    number = torch.arange(count) + 0.5
    height, turn = 1 - 2 * number / count, math.pi * (1 + 5**0.5) * number
    flat = (1 - height**2).sqrt()
    return torch.stack([flat * turn.cos(), flat * turn.sin(), height], 1)


def globe_mesh(change):
    """Train a graph-network weather emulator on a global mesh with a rollout of two steps and averaged weights."""
    variables, width, depth, neighbours, batch = size(40, 3), size(256, 16), size(6, 2), size(16, 3), 2
    points, mesh = sphere(size(4096, 40)), sphere(size(1280, 12))
    near = torch.cdist(points, mesh).argmin(1)
    senders = torch.cdist(mesh, mesh).topk(neighbours + 1, largest=False).indices[:, 1:].flatten()
    receivers = torch.arange(len(mesh)).repeat_interleave(neighbours)
    offsets = mesh[senders] - mesh[receivers]
    features = torch.cat([offsets, offsets.norm(dim=1, keepdim=True)], 1).to(device)
    senders, receivers, area = senders.to(device), receivers.to(device), (1 - points[:, 2] ** 2).sqrt().to(device)
    points = points.to(device)
    model = Emulator(variables, width, depth, near, change).to(device)
    average = copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100000)
    archive = torch.randn(size(32, 4), 3, len(points), variables)

    def step():
        truth = archive[torch.randint(0, len(archive), (batch,))].to(device)
        with torch.autocast(device.type, torch.bfloat16, enabled=change == "autocast_bf16"):
            weather, loss = truth[:, 0], 0.0
            for ahead in (1, 2):
                weather = model(weather, points, len(mesh), features, senders, receivers)
                errors = ((weather - truth[:, ahead]) ** 2).mean(-1)
                loss = loss + (errors * area).mean() / 2
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        with torch.no_grad():
            if change == "foreach_average":
                torch._foreach_lerp_(list(average.parameters()), list(model.parameters()), 0.001)
            else:
                for slow, fast in zip(average.parameters(), model.parameters(), strict=True):
                    slow.mul_(0.999).add_(fast, alpha=0.001)
        return loss.detach()

    return step


# hourly risk of hospital patients, in training


class DecayCell(nn.Module):
    """A GRU-D cell: measurements that are missing fade to their mean, and the memory fades with them."""

    def __init__(self, measures, hidden):
        super().__init__()
        self.fade_weight, self.fade_bias = nn.Parameter(torch.rand(measures)), nn.Parameter(torch.zeros(measures))
        self.fade_memory = nn.Linear(measures, hidden)
        self.input_update, self.memory_update = nn.Linear(2 * measures, hidden), nn.Linear(hidden, hidden, bias=False)
        self.input_reset, self.memory_reset = nn.Linear(2 * measures, hidden), nn.Linear(hidden, hidden, bias=False)
        self.input_new, self.memory_new = nn.Linear(2 * measures, hidden), nn.Linear(hidden, hidden, bias=False)

    def prepare(self, values, known, last, gaps):
        fade = torch.exp(-F.relu(gaps * self.fade_weight + self.fade_bias))
        filled = known * values + (1 - known) * fade * last  # The mean of each measure is 0.
        inputs = torch.cat([filled, known], -1)
        keep = torch.exp(-F.relu(self.fade_memory(gaps)))
        return keep, self.input_update(inputs), self.input_reset(inputs), self.input_new(inputs)

    def advance(self, memory, keep, update, reset, new):
        memory = keep * memory
        update = torch.sigmoid(update + self.memory_update(memory))
        reset = torch.sigmoid(reset + self.memory_reset(memory))
        new = torch.tanh(new + self.memory_new(reset * memory))
        return (1 - update) * memory + update * new

    def forward(self, memory, values, known, last, gaps):
        return self.advance(memory, *self.prepare(values, known, last, gaps))


def ward_risk(change):
    """Train a GRU-D model of the hourly risk that a patient in intensive care gets worse, from patchy measurements."""
    stays, batch, hours, measures, hidden = size(2000, 40), size(128, 8), size(48, 4), size(40, 5), size(128, 8)
    known = (torch.rand(stays, hours, measures) < 0.3).float()
    values = torch.randn(stays, hours, measures) * known
    last, gaps = torch.zeros_like(values), torch.zeros_like(values)
    for hour in range(1, hours):
        before = known[:, hour - 1]
        last[:, hour] = before * values[:, hour - 1] + (1 - before) * last[:, hour - 1]
        gaps[:, hour] = 1 + (1 - before) * gaps[:, hour - 1]
    labels = (torch.rand(stays, hours) < 0.1).float()
    tables = [values, known, last, gaps, labels]
    cell, head = DecayCell(measures, hidden).to(device), nn.Linear(hidden, 1).to(device)
    parameters = [*cell.parameters(), *head.parameters()]
    options = {"capturable": device.type == "cuda"} if change == "whole_step_graph" else {}
    optimizer = torch.optim.RMSprop(parameters, lr=1e-3, momentum=0.9, **options)
    run_cell = compiled(cell) if change == "compiled_cell" else cell
    if change == "table_on_gpu":
        tables = [table.to(device) for table in tables]
    else:
        loader = endless(DataLoader(TensorDataset(*tables), batch_size=batch, shuffle=True, drop_last=True))

    def draw():
        if change == "table_on_gpu":
            chosen = torch.randint(0, stays, (batch,), device=device)
            return [table[chosen] for table in tables]
        return [part.to(device) for part in next(loader)]

    def train(values, known, last, gaps, labels):
        memory, risks = torch.zeros(batch, hidden, device=device), []
        with torch.autocast(device.type, torch.bfloat16, enabled=change == "autocast_bf16"):
            if change == "inputs_first":
                prepared = [part.unbind(1) for part in cell.prepare(values, known, last, gaps)]
            for hour in range(hours):
                if change == "inputs_first":
                    memory = cell.advance(memory, *[part[hour] for part in prepared])
                else:
                    memory = run_cell(memory, values[:, hour], known[:, hour], last[:, hour], gaps[:, hour])
                risks.append(head(memory).squeeze(-1))
            risk = torch.stack(risks, 1).float()
        weight = (labels == 0).sum() / labels.sum().clamp(min=1)
        loss = F.binary_cross_entropy_with_logits(risk, labels, pos_weight=weight)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        return loss.detach()

    if change == "whole_step_graph":
        held = draw()
        replay = graphed(lambda: train(*held))
    average = 0.0

    def step():
        nonlocal average
        data = draw()
        if change == "whole_step_graph":
            for place, part in zip(held, data, strict=True):
                place.copy_(part)
            loss = replay()
        else:
            loss = train(*data)
        average = 0.99 * average + 0.01 * loss.item()
        return loss

    return step


# video diffusion, in inference


class HeadMixer(nn.Module):
    """Attention of one sequence to another, with a norm before and a residual after it."""

    def __init__(self, width, source, heads, fused):
        super().__init__()
        self.heads, self.fused, self.norm = heads, fused, nn.LayerNorm(width)
        self.to_q = nn.Linear(width, width, bias=False)
        self.to_k, self.to_v = nn.Linear(source, width, bias=False), nn.Linear(source, width, bias=False)
        self.to_out = nn.Linear(width, width)

    def forward(self, x, context=None):
        normed = self.norm(x)
        context = normed if context is None else context
        q, k, v = [
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in (self.to_q(normed), self.to_k(context), self.to_v(context))
        ]
        if self.fused:
            mixed = F.scaled_dot_product_attention(q, k, v)
        else:
            weights = torch.softmax(torch.einsum("bhid,bhjd->bhij", q, k) * q.shape[-1] ** -0.5, dim=-1)
            mixed = torch.einsum("bhij,bhjd->bhid", weights, v)
        return x + self.to_out(mixed.transpose(1, 2).flatten(2))


class VideoBlock(nn.Module):
    """A residual block of convolutions, then attention within frames, to the text and across frames."""

    def __init__(self, width, text_width, heads, fused):
        super().__init__()
        self.norm_in, self.norm_out = nn.GroupNorm(8, width), nn.GroupNorm(8, width)
        self.conv_in, self.conv_out = nn.Conv2d(width, width, 3, padding=1), nn.Conv2d(width, width, 3, padding=1)
        self.time = nn.Linear(width, width)
        self.within, self.text = HeadMixer(width, width, heads, fused), HeadMixer(width, text_width, heads, fused)
        self.across, self.norm_feed = HeadMixer(width, width, heads, fused), nn.LayerNorm(width)
        self.grow, self.shrink = nn.Linear(width, 8 * width), nn.Linear(4 * width, width)

    def forward(self, x, time, text):
        videos, frames, width, high, wide = x.shape
        x = x.flatten(0, 1)
        hidden = self.conv_in(F.silu(self.norm_in(x))) + self.time(F.silu(time))[:, :, None, None]
        x = x + self.conv_out(F.silu(self.norm_out(hidden)))
        tokens = x.flatten(2).transpose(1, 2)
        tokens = self.within(tokens)
        tokens = self.text(tokens, text.repeat_interleave(frames, 0))
        lines = tokens.view(videos, frames, high * wide, width).transpose(1, 2).flatten(0, 1)
        lines = self.across(lines)
        inner, gate = self.grow(self.norm_feed(lines)).chunk(2, -1)
        lines = lines + self.shrink(inner * F.gelu(gate))
        return lines.view(videos, high, wide, frames, width).permute(0, 3, 4, 1, 2)


class VideoDenoiser(nn.Module):
    """Predict the noise in the latent frames of a video."""

    def __init__(self, width, text_width, heads, depth, fused):
        super().__init__()
        self.width = width
        self.enter, self.leave = nn.Conv2d(4, width, 3, padding=1), nn.Conv2d(width, 4, 3, padding=1)
        self.time = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))
        self.blocks = nn.ModuleList([VideoBlock(width, text_width, heads, fused) for _ in range(depth)])

    def forward(self, latents, moment, text):
        rates = torch.exp(-math.log(10000) * torch.arange(self.width // 2, device=latents.device) / (self.width // 2))
        angles = moment[:, None].float() * rates
        time = self.time(torch.cat([angles.cos(), angles.sin()], -1).to(latents.dtype))
        x = self.enter(latents.flatten(0, 1)).unflatten(0, latents.shape[:2])
        for block in self.blocks:
            x = block(x, time, text)
        return self.leave(x.flatten(0, 1)).unflatten(0, latents.shape[:2])


def moving_pictures(change):
    """Make a short video with a latent diffusion model: a few DDIM steps with guidance by a text."""
    if change == "tf32":
        use_tf32()
    width, text_width, heads, frames, side = size(320, 16), size(768, 8), size(8, 2), size(8, 2), size(32, 4)
    model = VideoDenoiser(width, text_width, heads, size(4, 1), change == "fused_attention").to(device).eval()
    if change == "bf16_model":
        model.bfloat16()
    kind = model.enter.weight.dtype
    if change == "compiled":
        model = compiled(model)
    prompt, nothing = torch.randn(1, size(77, 5), text_width), torch.zeros(1, size(77, 5), text_width)
    start = torch.randn(1, frames, 4, side, side)
    kept = torch.cumprod(1 - torch.linspace(0.00085**0.5, 0.012**0.5, 1000) ** 2, 0)
    moments = [999, 749, 499, 249]

    @torch.no_grad()
    def step():
        latents = start.to(device)
        text, empty = prompt.to(device, kind), nothing.to(device, kind)
        for number, moment in enumerate(moments):
            when = torch.tensor([moment], device=device)
            if change == "guidance_together":
                both = model(torch.cat([latents, latents]).to(kind), when, torch.cat([text, empty]))
                guided, free = both.chunk(2)
            else:
                guided = model(latents.to(kind), when, text)
                free = model(latents.to(kind), when, empty)
            noise = (free + 7.5 * (guided - free)).float()
            now = kept[moment].item()
            later = kept[moments[number + 1]].item() if number + 1 < len(moments) else 1.0
            clean = (latents - math.sqrt(1 - now) * noise) / math.sqrt(now)
            latents = math.sqrt(later) * clean + math.sqrt(1 - later) * noise
        return latents

    return step


PROGRAMS = {
    crop_seasons: {"dates_together": "larger_batch", "scale_on_gpu": "python", "autocast_bf16": "half_precision",
                   "channels_last": "channels_last", "loss_stays_on_gpu": "remove_sync"},
    cautious_robot: {"replay_on_gpu": "", "critics_together": "larger_batch", "whole_step_graph": "cuda_graph",
                     "fused_adam": "fused_optimizer", "tf32": "tf32"},
    globe_mesh: {"no_checkpoint": "no_recompute", "autocast_bf16": "half_precision", "split_first_layer": "",
                 "index_select": "index_select", "foreach_average": "update_graph"},
    ward_risk: {"inputs_first": "loop_inputs", "whole_step_graph": "cuda_graph", "compiled_cell": "fuse_pointwise",
                "table_on_gpu": "data_loader", "autocast_bf16": "half_precision"},
    moving_pictures: {"guidance_together": "larger_batch", "fused_attention": "fused_attention",
                      "bf16_model": "half_precision", "tf32": "tf32", "compiled": "fuse_pointwise"},
}  # fmt: skip
