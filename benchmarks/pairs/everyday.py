"""Training programs as people write them after tutorials, repositories of papers and notebooks."""

import copy
import itertools
import math

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from setting import compiled, device, endless, graphed, size, use_tf32
from torch.utils.data import DataLoader, Dataset


class Block(nn.Module):
    """A residual block of the U-Net, which adds what it knows of the time."""

    def __init__(self, before, after, of_time):
        super().__init__()
        self.time = nn.Sequential(nn.SiLU(), nn.Linear(of_time, after))
        self.first, self.first_norm = nn.Conv2d(before, after, 3, padding=1), nn.GroupNorm(8, after)
        self.second, self.second_norm = nn.Conv2d(after, after, 3, padding=1), nn.GroupNorm(8, after)
        self.around = nn.Conv2d(before, after, 1) if before != after else nn.Identity()

    def forward(self, x, time):
        hidden = F.silu(self.first_norm(self.first(x))) + self.time(time)[:, :, None, None]
        return F.silu(self.second_norm(self.second(hidden))) + self.around(x)


class Attention(nn.Module):
    """Each place of an image looks at all others."""

    def __init__(self, wide, heads=4):
        super().__init__()
        self.heads, self.norm = heads, nn.GroupNorm(1, wide)
        self.ask, self.tell = nn.Conv2d(wide, 3 * wide, 1, bias=False), nn.Conv2d(wide, wide, 1)

    def forward(self, x):
        batch, wide, high, across = x.shape
        q, k, v = self.ask(self.norm(x)).reshape(batch, 3, self.heads, wide // self.heads, high * across).unbind(1)
        similar = torch.einsum("bhdi,bhdj->bhij", q * q.shape[2] ** -0.5, k)
        similar = similar - similar.amax(dim=-1, keepdim=True).detach()
        out = torch.einsum("bhij,bhdj->bhid", similar.softmax(dim=-1), v)
        return x + self.tell(out.transpose(2, 3).reshape(batch, wide, high, across))


class Denoiser(nn.Module):
    """A U-Net that is told how noisy the image is."""

    def __init__(self, wide):
        super().__init__()
        of_time, widths = 4 * wide, (wide, wide, 2 * wide, 4 * wide)
        self.wide, self.start = wide, nn.Conv2d(3, wide, 7, padding=3)
        self.time = nn.Sequential(nn.Linear(wide, of_time), nn.GELU(), nn.Linear(of_time, of_time))
        self.down, self.up = nn.ModuleList(), nn.ModuleList()
        pairs = list(itertools.pairwise(widths))
        for place, (before, after) in enumerate(pairs):
            smaller = nn.Conv2d(before, after, 4, 2, 1) if place < 2 else nn.Conv2d(before, after, 3, 1, 1)
            look = Attention(before) if place else nn.Identity()
            blocks = Block(before, before, of_time), Block(before, before, of_time)
            self.down.append(nn.ModuleList([*blocks, look, smaller]))
        self.middle = nn.ModuleList([Block(4 * wide, 4 * wide, of_time), Block(4 * wide, 4 * wide, of_time)])
        self.look = Attention(4 * wide)
        for place, (before, after) in reversed(list(enumerate(pairs))):
            larger = nn.Conv2d(after, before, 3, padding=1)
            if place > 0:
                larger = nn.Sequential(larger, nn.Upsample(scale_factor=2))
            blocks = Block(after + before, after, of_time), Block(after + before, after, of_time)
            self.up.append(nn.ModuleList([*blocks, larger]))
        self.last = nn.Conv2d(wide, 3, 1)

    def forward(self, x, time):
        half = self.wide // 2
        waves = torch.exp(torch.arange(half, device=x.device) * -(math.log(10000) / (half - 1)))
        waves = time[:, None] * waves[None]
        time = self.time(torch.cat([waves.sin(), waves.cos()], dim=-1))
        x, kept = self.start(x), []
        for first, second, look, smaller in self.down:
            x = first(x, time)
            kept.append(x)
            x = look(second(x, time))
            kept.append(x)
            x = smaller(x)
        x = self.middle[1](self.look(self.middle[0](x, time)), time)
        for first, second, larger in self.up:
            x = first(torch.cat([x, kept.pop()], dim=1), time)
            x = larger(second(torch.cat([x, kept.pop()], dim=1), time))
        return self.last(x)


def image_diffusion(change):
    """A diffusion model learns to remove noise from small images, and a running average of its weights is kept."""
    model = Denoiser(size(64, 8)).to(device)
    average = copy.deepcopy(model)
    averaged = list(zip(average.parameters(), model.parameters(), strict=True))
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-4)
    predict = compiled(model) if change == "compile" else model
    betas = torch.linspace(0.0001, 0.02, 1000)
    products = torch.cumprod(1 - betas, dim=0)
    of_image, of_noise = products.sqrt(), (1 - products).sqrt()
    if change == "tables_on_gpu":
        of_image, of_noise = of_image.to(device), of_noise.to(device)
    images = torch.rand(size(64, 2), 3, size(32, 16), size(32, 16), device=device) * 2 - 1

    def at(table, time):
        if change == "tables_on_gpu":
            return table.gather(-1, time).reshape(-1, 1, 1, 1)
        return table.gather(-1, time.cpu()).reshape(-1, 1, 1, 1).to(time.device)

    def step():
        optimizer.zero_grad()
        time = torch.randint(0, 1000, (len(images),), device=device).long()
        noise = torch.randn_like(images)
        noisy = at(of_image, time) * images + at(of_noise, time) * noise
        with torch.autocast(device.type, torch.bfloat16, enabled=change == "bf16"):
            predicted = predict(noisy, time)
        loss = F.smooth_l1_loss(noise, predicted.float())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        with torch.no_grad():
            if change == "average_at_once":
                torch._foreach_lerp_([mine for mine, _ in averaged], [new for _, new in averaged], 0.005)
            else:
                for mine, new in averaged:
                    mine.data = mine.data * 0.995 + 0.005 * new.data
        return loss

    return step


class Sessions(nn.Module):
    """GRU4Rec: what somebody looked at, one item after another, tells what comes next."""

    def __init__(self, items, wide, change):
        super().__init__()
        self.count, self.change = items, change
        self.items = nn.Parameter(torch.randn(items, wide) * 0.05)
        self.gru, self.dropout = nn.GRU(wide, wide, batch_first=True), nn.Dropout(0.1)
        self.scores = nn.Linear(wide, items)

    def forward(self, seen):
        if self.change == "look_up":
            x = F.embedding(seen, self.items)
        else:
            x = F.one_hot(seen, self.count).float() @ self.items
        hidden, _ = self.gru(x)
        return self.scores(self.dropout(hidden))


def session_recommendations(change):
    """A recurrent network learns from the sessions of a shop which item a visitor looks at next."""
    if change == "tf32":
        use_tf32()
    count, batch, length = size(20000, 60), size(128, 3), size(20, 6)
    model = Sessions(count, size(256, 8), change).to(device)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.05)
    sessions = torch.randint(1, count, (batch, length), device=device)
    lengths = torch.randint(3, length + 1, (batch, 1), device=device)
    sessions[torch.arange(length, device=device)[None] >= lengths] = 0
    history = []

    def step():
        seen, wanted = sessions[:, :-1], sessions[:, 1:].reshape(-1)
        scores = model(seen).reshape(-1, count)
        loss = F.cross_entropy(scores, wanted, ignore_index=0)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            counted = wanted != 0
            if change == "count_better":
                rank = (scores > scores.gather(1, wanted[:, None])).sum(1)
                found, turned = rank < 20, 1 / (rank + 1.0)
                recall = (found & counted).sum() / counted.sum()
                rank_value = (turned * found * counted).sum() / counted.sum()
            else:
                best = scores.topk(20, dim=1).indices
                hits = (best == wanted[:, None]) & counted[:, None]
                recall = hits.any(1).sum() / counted.sum()
                rank_value = (hits / torch.arange(1, 21, device=device)).sum() / counted.sum()
        now = loss.detach(), recall, rank_value
        history.append(now if change == "no_item" else tuple(one.item() for one in now))
        return torch.stack(now)

    return step


class Gather(torch.autograd.Function):
    """The product of a constant sparse matrix with features. Its transposed matrix is there for the gradient."""

    @staticmethod
    def forward(ctx, matrix, transposed, x):
        ctx.transposed = transposed
        return matrix @ x

    @staticmethod
    def backward(ctx, grad):
        return None, None, ctx.transposed @ grad.contiguous()


class Relations(nn.Module):
    """One layer of the network: each kind of node gets the mean of what its neighbors send, for each relation."""

    def __init__(self, kinds, relations, before, after, change):
        super().__init__()
        self.change, self.after = change, after
        self.own = nn.ModuleDict({kind: nn.Linear(before, after) for kind in kinds})
        self.send = nn.ModuleDict({"_".join(one): nn.Linear(before, after, bias=False) for one in relations})

    def forward(self, nodes, edges, known, wanted):
        found = {kind: self.own[kind](x) for kind, x in nodes.items() if kind in wanted}
        for relation, (start, end) in edges.items():
            source, _, goal = relation
            if goal not in wanted:
                continue
            linear, many = self.send["_".join(relation)], len(nodes[goal])
            if self.change == "sparse_product":
                found[goal] = found[goal] + linear(Gather.apply(*known[relation], nodes[source]))
                continue
            if self.change == "nodes_first":
                messages = linear(nodes[source])[start]
            elif self.change == "index_select":
                messages = linear(nodes[source].index_select(0, start))
            else:
                messages = linear(nodes[source][start])
            places = end.unsqueeze(-1).expand(-1, self.after)
            total = torch.zeros(many, self.after, device=messages.device).scatter_add(0, places, messages)
            if self.change == "degrees_once":
                degree = known[relation]
            else:
                degree = torch.zeros(many, device=messages.device)
                degree = degree.scatter_add(0, end, torch.ones_like(end, dtype=torch.float)).clamp(min=1)
            found[goal] = found[goal] + total / degree.unsqueeze(-1)
        return found


def shop_graph(change):
    """A network on a graph of users, items and tags learns to which of ten groups each user belongs."""
    counts = {"user": size(30000, 30), "item": size(10000, 20), "tag": size(500, 5)}
    many = {
        ("user", "buys", "item"): size(300000, 90), ("item", "of", "user"): 0,
        ("item", "has", "tag"): size(60000, 40), ("tag", "on", "item"): 0,
        ("user", "follows", "user"): size(150000, 60),
    }  # fmt: skip
    edges = {}
    for relation, count in many.items():
        if count:
            edges[relation] = [torch.randint(0, counts[relation[end]], (count,), device=device) for end in (0, 2)]
        else:
            edges[relation] = list(edges.values())[-1][::-1]
    wide = size(128, 8)
    nodes = {kind: torch.randn(count, wide, device=device) for kind, count in counts.items()}
    groups = torch.randint(0, 10, (counts["user"],), device=device)
    learned = torch.rand(counts["user"], device=device) < 0.5
    layers = nn.ModuleList([Relations(counts, edges, wide, wide, change) for _ in range(3)]).to(device)
    head = nn.Linear(wide, 10).to(device)
    optimizer = torch.optim.Adam([*layers.parameters(), *head.parameters()], lr=0.01, weight_decay=5e-4)

    known = {}
    for relation, (start, end) in edges.items():
        degree = torch.bincount(end, minlength=counts[relation[2]]).clamp(min=1).float()
        if change == "sparse_product":
            places, shape = torch.stack([end, start]), (counts[relation[2]], counts[relation[0]])
            matrix = torch.sparse_coo_tensor(places, 1 / degree[end], shape).coalesce()
            known[relation] = matrix.to_sparse_csr(), matrix.t().coalesce().to_sparse_csr()
        else:
            known[relation] = degree

    def step():
        x = nodes
        for number, layer in enumerate(layers):
            last = number == len(layers) - 1
            x = layer(x, edges, known, ["user"] if last and change == "users_only" else list(counts))
            x = {kind: F.dropout(F.relu(one), 0.0) for kind, one in x.items()}
        out = head(x["user"])
        loss = F.cross_entropy(out[learned], groups[learned])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return step


class Volumes(nn.Module):
    """A U-Net of three dimensions."""

    def __init__(self, wide, classes):
        super().__init__()
        widths = [wide, 2 * wide, 4 * wide, 8 * wide]
        pairs = list(itertools.pairwise(widths))
        self.down = nn.ModuleList([self.twice(1, wide), *(self.twice(a, b) for a, b in pairs)])
        self.larger = nn.ModuleList([nn.ConvTranspose3d(b, a, 2, 2) for a, b in reversed(pairs)])
        self.up = nn.ModuleList([self.twice(2 * a, a) for a, _ in reversed(pairs)])
        self.last = nn.Conv3d(wide, classes, 1)

    @staticmethod
    def twice(before, after):
        return nn.Sequential(
            nn.Conv3d(before, after, 3, padding=1), nn.InstanceNorm3d(after, affine=True), nn.LeakyReLU(inplace=True),
            nn.Conv3d(after, after, 3, padding=1), nn.InstanceNorm3d(after, affine=True), nn.LeakyReLU(inplace=True),
        )  # fmt: skip

    def forward(self, x):
        kept = []
        for number, layer in enumerate(self.down):
            x = layer(F.max_pool3d(x, 2) if number else x)
            kept.append(x)
        for larger, layer, old in zip(self.larger, self.up, kept[-2::-1], strict=True):
            x = layer(torch.cat([larger(x), old], dim=1))
        return self.last(x)


def abdomen_segmentation(change):
    """A 3D U-Net learns to find organs in volumes of a scanner, and the loss is the overlap with each organ."""
    classes, side = 6, size(64, 32)
    model = Volumes(size(16, 4), classes).to(device)
    volumes = torch.randn(2, 1, side, side, side, device=device)
    labels = torch.randint(0, classes, (2, side, side, side), device=device)
    if change == "channels_last":
        model = model.to(memory_format=torch.channels_last_3d)
        volumes = volumes.contiguous(memory_format=torch.channels_last_3d)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.99, nesterov=True, weight_decay=3e-5)
    history = []

    def overlaps(out):
        """Return twice the shared part of each class, divided by what was found and what is there."""
        if change == "classes_at_once":
            found, there = out.softmax(1).flatten(2), F.one_hot(labels, classes).flatten(1, 3).transpose(1, 2).float()
            shared, total = (found * there).sum((0, 2)), found.sum((0, 2)) + there.sum((0, 2))
            return list((2 * shared + 1e-5) / (total + 1e-5))
        each = []
        for number in range(classes):
            found = F.softmax(out, dim=1)[:, number].contiguous().view(-1)
            there = (labels == number).float().view(-1)
            each.append((2 * (found * there).sum() + 1e-5) / (found.sum() + there.sum() + 1e-5))
        return each

    def step():
        optimizer.zero_grad()
        with torch.autocast(device.type, torch.bfloat16, enabled=change == "bf16"):
            out = model(volumes)
        out = out.float()
        each = overlaps(out)
        loss = F.cross_entropy(out, labels) + 1 - sum(each) / classes
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 12)
        optimizer.step()
        history.append([one.detach() if change == "no_item" else one.item() for one in each])
        return loss

    return step


def imitated(x, scale, zero, low, high):
    """Return x as integers would hold it, with the gradient of x."""
    whole = torch.clamp(torch.round(x / scale) + zero, low, high)
    return x + ((whole - zero) * scale - x).detach()


class Quantized(nn.Module):
    """A convolution that imitates integers of 8 bits, for its weights and for what it gets."""

    def __init__(self, before, after, stride, change, imitate):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(before, after, 3, stride, 1, bias=False), nn.BatchNorm2d(after)
        self.change, self.imitate = change, imitate
        self.register_buffer("low", torch.tensor(0.0))
        self.register_buffer("high", torch.tensor(1e-4))

    def forward(self, x):
        low, high = x.detach().min(), x.detach().max()
        if self.change == "no_if":
            torch.minimum(self.low, low, out=self.low)
            torch.maximum(self.high, high, out=self.high)
        else:
            if low < self.low:
                self.low.copy_(low)
            if high > self.high:
                self.high.copy_(high)
        weight = self.conv.weight
        scale = (self.high - self.low) / 255
        zero = torch.round(-self.low / scale)
        of_weight = weight.detach().abs().amax((1, 2, 3), keepdim=True).clamp(min=1e-8) / 127
        if self.change == "built_in":
            x = torch.fake_quantize_per_tensor_affine(x, scale, zero.to(torch.int32), 0, 255)
            zeros = torch.zeros(len(weight), dtype=torch.int32, device=weight.device)
            weight = torch.fake_quantize_per_channel_affine(weight, of_weight.flatten(), zeros, 0, -127, 127)
        else:
            x = self.imitate(x, scale, zero, 0, 255)
            weight = self.imitate(weight, of_weight, 0, -127, 127)
        return self.norm(F.conv2d(x, weight, None, self.conv.stride, self.conv.padding))


def quantization_aware(change):
    """A network for small images is trained so that it may use integers of 8 bits later."""
    imitate = imitated
    if change == "compile":
        torch._dynamo.config.recompile_limit = 32
        imitate = compiled(imitated, dynamic=True)
    wide = size(48, 8)

    class Pair(nn.Module):
        def __init__(self, before, after, stride):
            super().__init__()
            self.first = Quantized(before, after, stride, change, imitate)
            self.second = Quantized(after, after, 1, change, imitate)
            self.around = nn.Conv2d(before, after, 1, stride) if stride > 1 else nn.Identity()

        def forward(self, x):
            return F.relu(self.second(F.relu(self.first(x))) + self.around(x))

    plan = [(wide, wide, 1)] * 2 + [(wide, 2 * wide, 2), (2 * wide, 2 * wide, 1)]
    plan += [(2 * wide, 4 * wide, 2), (4 * wide, 4 * wide, 1)]
    model = nn.Sequential(
        nn.Conv2d(3, wide, 3, 1, 1), nn.BatchNorm2d(wide), nn.ReLU(), *(Pair(*one) for one in plan),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4 * wide, 100),
    ).to(device)  # fmt: skip
    images = torch.randn(size(128, 4), 3, size(32, 16), size(32, 16), device=device)
    if change == "channels_last":
        model = model.to(memory_format=torch.channels_last)
        images = images.contiguous(memory_format=torch.channels_last)
    labels = torch.randint(0, 100, (len(images),), device=device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4)

    def step():
        loss = F.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return step


def newton_schulz(matrices, steps=5):
    """Return nearly orthogonal matrices, for one matrix or for a stack of them."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = matrices / (matrices.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    for _ in range(steps):
        product = x @ x.mT
        x = a * x + (b * product + c * (product @ product)) @ x
    return x.mT if tall else x


class Muon(torch.optim.Optimizer):
    """Momentum whose updates are made orthogonal."""

    def __init__(self, params, change, lr=0.02, momentum=0.95):
        super().__init__(list(params), {"lr": lr, "momentum": momentum})
        self.change = change

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            shapes = {}
            for p in group["params"]:
                state = self.state[p]
                if "momentum" not in state:
                    state["momentum"] = torch.zeros_like(p.grad)
                state["momentum"].lerp_(p.grad, 1 - group["momentum"])
                update = p.grad.lerp(state["momentum"], group["momentum"])
                if self.change == "shapes_at_once":
                    shapes.setdefault(p.shape, []).append((p, update))
                    continue
                update = newton_schulz(update)
                p.add_(update, alpha=-group["lr"] * max(1, p.shape[0] / p.shape[1]) ** 0.5)
            for shape, pairs in shapes.items():
                updates = newton_schulz(torch.stack([update for _, update in pairs])).unbind()
                rate = -group["lr"] * max(1, shape[0] / shape[1]) ** 0.5
                torch._foreach_add_([p for p, _ in pairs], updates, alpha=rate)


class Writer(nn.Module):
    """A layer of a language model, whose attention is written by hand and knows how far words are apart."""

    def __init__(self, wide, heads, length, change):
        super().__init__()
        self.heads, self.change = heads, change
        self.norm, self.other_norm = nn.LayerNorm(wide), nn.LayerNorm(wide)
        self.ask, self.tell = nn.Linear(wide, 3 * wide, bias=False), nn.Linear(wide, wide, bias=False)
        self.more, self.less = nn.Linear(wide, 4 * wide, bias=False), nn.Linear(4 * wide, wide, bias=False)
        slopes = 2.0 ** (-8 * (torch.arange(heads) + 1) / heads)
        away = torch.arange(length)[None] - torch.arange(length)[:, None]
        self.register_buffer("slopes", slopes[:, None, None])
        self.register_buffer("away", away.float())
        self.register_buffer("seen", torch.tril(torch.ones(length, length))[None, None])

    def forward(self, x):
        batch, length, wide = x.shape
        q, k, v = self.ask(self.norm(x)).split(wide, dim=2)
        q, k, v = (one.view(batch, length, self.heads, wide // self.heads).transpose(1, 2) for one in (q, k, v))
        if self.change == "sdpa":
            added = (self.slopes * self.away)[None].masked_fill(self.seen == 0, -torch.inf)
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=added)
        else:
            weights = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
            weights = weights + self.slopes * self.away
            weights = weights.masked_fill(self.seen[:, :, :length, :length] == 0, float("-inf"))
            y = F.softmax(weights, dim=-1) @ v
        x = x + self.tell(y.transpose(1, 2).contiguous().view(batch, length, wide))
        return x + self.less(F.gelu(self.more(self.other_norm(x))))


def muon_writer(change):
    """A small language model is trained with Muon: each matrix's update is made orthogonal by products of matrices."""
    if change == "tf32":
        use_tf32()
    wide, length, words = size(512, 16), size(256, 8), size(8000, 50)
    layers = nn.Sequential(*(Writer(wide, size(8, 2), length, change) for _ in range(size(8, 2)))).to(device)
    embedding, head = nn.Embedding(words, wide).to(device), nn.Linear(wide, words, bias=False).to(device)
    matrices = [p for p in layers.parameters() if p.ndim == 2]
    rest = [p for p in layers.parameters() if p.ndim < 2] + [embedding.weight, head.weight]
    muon = Muon(matrices, change)
    adam = torch.optim.AdamW(rest, lr=3e-4, fused=change == "fused" or None)
    tokens = torch.randint(0, words, (size(8, 2), length + 1), device=device)

    def step():
        out = head(layers(embedding(tokens[:, :-1])))
        loss = F.cross_entropy(out.reshape(-1, words), tokens[:, 1:].reshape(-1))
        muon.zero_grad()
        adam.zero_grad()
        loss.backward()
        muon.step()
        adam.step()
        return loss

    return step


class Spike(torch.autograd.Function):
    """A step function whose gradient is that of an arc tangent."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return (x > 0).float()

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad / (1 + (math.pi * x).pow(2)) / math.pi


class Neurons(nn.Module):
    """Neurons that leak, and that fire and lose a charge of 1 when they hold more than that."""

    def forward(self, current, charge):
        reset = (charge > 1.0).float().detach()
        charge = 0.9 * charge + current - reset
        return Spike.apply(charge - 1.0), charge


class Spiking(nn.Module):
    """A convolutional network of spiking neurons, which looks at one image for several time steps."""

    def __init__(self, times, change):
        super().__init__()
        few, more, side = size(24, 4), size(48, 6), size(28, 16) // 4
        self.times, self.change, self.neurons = times, change, Neurons()
        self.first, self.second = nn.Conv2d(1, few, 5, padding=2), nn.Conv2d(few, more, 5, padding=2)
        self.third, self.flat = nn.Linear(more * side * side, 10), more * side * side

    def forward(self, x):
        if self.change == "layer_by_layer":
            return self.by_layer(x)
        charges, spikes, ends = [0, 0, 0], [], []
        charges = [torch.zeros((), device=x.device)] * 3
        once = F.max_pool2d(self.first(x), 2) if self.change == "first_once" else None
        for _ in range(self.times):
            current = F.max_pool2d(self.first(x), 2) if once is None else once
            spike, charges[0] = self.neurons(current, charges[0])
            spike, charges[1] = self.neurons(F.max_pool2d(self.second(spike), 2), charges[1])
            spike, charges[2] = self.neurons(self.third(spike.view(-1, self.flat)), charges[2])
            spikes.append(spike)
            ends.append(charges[2])
        return torch.stack(spikes), torch.stack(ends)

    def over_time(self, currents):
        charge, spikes, ends = torch.zeros((), device=currents.device), [], []
        for current in currents.chunk(self.times):
            spike, charge = self.neurons(current, charge)
            spikes.append(spike)
            ends.append(charge)
        return torch.cat(spikes), torch.stack(ends)

    def by_layer(self, x):
        spikes, _ = self.over_time(F.max_pool2d(self.first(x.repeat(self.times, 1, 1, 1)), 2))
        spikes, _ = self.over_time(F.max_pool2d(self.second(spikes), 2))
        spikes, ends = self.over_time(self.third(spikes.view(-1, self.flat)))
        return spikes.view(self.times, -1, 10), ends


def spiking_digits(change):
    """A network of spiking neurons learns digits: each image is shown for 25 time steps in a Python loop."""
    times, batch = size(25, 4), size(128, 3)
    model = Spiking(times, change).to(device)
    capturable = change == "graph" and device.type == "cuda"
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-4, betas=(0.9, 0.999), capturable=capturable)
    images = torch.rand(batch, 1, size(28, 16), size(28, 16), device=device)
    labels = torch.randint(0, 10, (batch,), device=device)
    history = []

    def train():
        spikes, charges = model(images)
        if change == "loss_at_once":
            loss = F.cross_entropy(charges.flatten(0, 1), labels.repeat(times)) * times
        else:
            loss = torch.zeros(1, device=device)
            for number in range(times):
                loss = loss + F.cross_entropy(charges[number], labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        right = (spikes.sum(0).argmax(1) == labels).float().mean()
        return torch.stack([loss.detach().reshape(()), right])

    one = graphed(train) if change == "graph" else train

    def step():
        found = one()
        history.append((found[0].item(), found[1].item()))
        return found

    return step


class Faces(Dataset):
    """Photographs of faces in the main memory, which are cropped, mirrored and normalized one by one."""

    def __init__(self, change):
        self.change, self.side = change, size(128, 32)
        numbers = np.random.default_rng(0)
        self.images = numbers.integers(0, 256, (size(2048, 16), self.side, self.side, 3), dtype=np.uint8)
        self.ages, self.kinds = numbers.integers(1, 90, len(self.images)), numbers.integers(0, 5, len(self.images))
        self.mean = np.array([0.485, 0.456, 0.406], dtype=np.float32)
        self.deviation = np.array([0.229, 0.224, 0.225], dtype=np.float32)

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        image, cropped = self.images[index], self.side * 7 // 8
        top, left, mirrored = torch.randint(0, self.side - cropped + 1, (3,)).tolist()
        image = image[top : top + cropped, left : left + cropped]
        if mirrored % 2:
            image = image[:, ::-1]
        if self.change == "normalize_on_gpu":
            image = torch.from_numpy(np.ascontiguousarray(image))
        else:
            image = (image.astype(np.float32) / 255.0 - self.mean) / self.deviation
            image = torch.from_numpy(np.ascontiguousarray(image.transpose(2, 0, 1)))
        age, kind = int(self.ages[index]), int(self.kinds[index])
        return image, torch.tensor(age / 90, dtype=torch.float32), torch.tensor(age % 2), torch.tensor(kind)


class Residual(nn.Module):
    """Two convolutions, and a way around them."""

    def __init__(self, before, after, stride):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(before, after, 3, stride, 1, bias=False), nn.BatchNorm2d(after), nn.ReLU(inplace=True),
            nn.Conv2d(after, after, 3, 1, 1, bias=False), nn.BatchNorm2d(after),
        )  # fmt: skip
        self.around = nn.Conv2d(before, after, 1, stride, bias=False)

    def forward(self, x):
        return F.relu(self.layers(x) + self.around(x))


def face_attributes(change):
    """One network learns a face's age, sex and group at once, from photographs that a DataLoader prepares."""
    faces, wide = Faces(change), size(64, 8)
    workers = size(6, 1) if change == "workers" else 0
    loader = DataLoader(
        faces, batch_size=size(64, 4), shuffle=True, drop_last=True, num_workers=workers,
        persistent_workers=workers > 0,
    )  # fmt: skip
    body = nn.Sequential(
        nn.Conv2d(3, wide, 7, 2, 3, bias=False), nn.BatchNorm2d(wide), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1),
        Residual(wide, wide, 1), Residual(wide, 2 * wide, 2), Residual(2 * wide, 4 * wide, 2),
        Residual(4 * wide, 4 * wide, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
    ).to(device)  # fmt: skip
    heads = nn.ModuleDict(
        {name: nn.Sequential(nn.Linear(4 * wide, wide), nn.ReLU(), nn.Linear(wide, outputs))
         for name, outputs in (("age", 1), ("sex", 2), ("kind", 5))}
    ).to(device)  # fmt: skip
    optimizer = torch.optim.Adam([*body.parameters(), *heads.parameters()], lr=1e-4)
    mean, deviation = (torch.from_numpy(one).view(1, 3, 1, 1).to(device) for one in (faces.mean, faces.deviation))
    batches, running = endless(loader), {"age": 0.0, "sex": 0.0, "kind": 0.0, "all": 0.0, "right": 0}

    def step():
        images, age, sex, kind = (one.to(device) for one in next(batches))
        if change == "normalize_on_gpu":
            images = (images.permute(0, 3, 1, 2).float() / 255.0 - mean) / deviation
        optimizer.zero_grad()
        with torch.autocast(device.type, torch.bfloat16, enabled=change == "bf16"):
            hidden = body(images)
            out = {name: head(hidden) for name, head in heads.items()}
        losses = {
            "age": F.l1_loss(out["age"].float().squeeze(1), age), "sex": F.cross_entropy(out["sex"].float(), sex),
            "kind": F.cross_entropy(out["kind"].float(), kind),
        }  # fmt: skip
        losses["all"] = losses["age"] + losses["sex"] + losses["kind"]
        losses["all"].backward()
        optimizer.step()
        right = (out["sex"].argmax(1) == sex).sum()
        for name, value in (*losses.items(), ("right", right)):
            running[name] += value.detach() if change == "no_item" else value.item()
        return losses["all"]

    return step


PROGRAMS = {
    image_diffusion: {"compile": "fuse_pointwise", "average_at_once": "", "tables_on_gpu": "remove_sync",
                      "bf16": "half_precision"},
    session_recommendations: {"look_up": "", "count_better": "", "tf32": "tf32", "no_item": "remove_sync"},
    shop_graph: {"sparse_product": "", "nodes_first": "", "users_only": "", "degrees_once": "",
                 "index_select": "index_select"},
    abdomen_segmentation: {"bf16": "half_precision", "channels_last": "channels_last",
                           "classes_at_once": "larger_batch", "no_item": "remove_sync"},
    quantization_aware: {"built_in": "", "compile": "fuse_pointwise", "no_if": "remove_sync",
                         "channels_last": "channels_last"},
    muon_writer: {"shapes_at_once": "larger_batch", "tf32": "tf32", "sdpa": "fused_attention",
                  "fused": "fused_optimizer"},
    spiking_digits: {"graph": "cuda_graph", "layer_by_layer": "", "first_once": "", "loss_at_once": "larger_batch"},
    face_attributes: {"workers": "data_loader", "normalize_on_gpu": "", "no_item": "remove_sync",
                      "bf16": "half_precision"},
}  # fmt: skip
