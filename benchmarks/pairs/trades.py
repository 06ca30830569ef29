"""Seven programs from several trades, each with single changes that may make it faster."""

import math

import numpy as np
import torch
import torch.nn.functional as F
from setting import compiled, device, graphed, size, use_tf32
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler

# 1. Click prediction -------------------------------------------------------------------------------------------------


class Clicks(Dataset):
    """Impressions in a shop: 8 numbers, and 18 fields with up to 5 ids each (0 fills the unused places)."""

    def __init__(self, rows, fields, ids_per_field):
        rng = np.random.default_rng(0)
        self.numbers = rng.standard_normal((rows, 8)).astype(np.float32)
        self.ids = rng.integers(1, ids_per_field, (rows, fields, 5))
        counts = rng.integers(1, 6, (rows, fields, 1))
        self.ids[np.arange(5) >= counts] = 0
        self.clicked = rng.integers(0, 2, rows).astype(np.float32)

    def __len__(self):
        return len(self.clicked)

    def __getitem__(self, index):
        return {
            "numbers": torch.from_numpy(self.numbers[index]),
            "ids": torch.from_numpy(self.ids[index]),
            "clicked": torch.tensor(self.clicked[index]),
        }


class ClicksInBatches(Clicks):
    """The same, but it hands out a whole batch with one indexing."""

    def __getitem__(self, indices):
        return {
            "numbers": torch.from_numpy(self.numbers[indices]),
            "ids": torch.from_numpy(self.ids[indices]),
            "clicked": torch.from_numpy(self.clicked[indices]),
        }


class ClickModel(nn.Module):
    """Mean embedding of each field, products of all pairs of fields, and a small network on top."""

    def __init__(self, fields, ids_per_field, width, hidden, sparse, one_table, pairs_at_once):
        super().__init__()
        self.fields, self.one_table, self.pairs_at_once = fields, one_table, pairs_at_once
        self.tables = nn.ModuleList(
            [nn.Embedding(ids_per_field, width, padding_idx=0, sparse=sparse) for _ in range(fields)]
        )
        for table in self.tables:
            nn.init.normal_(table.weight, std=0.05)
        self.bottom = nn.Sequential(nn.Linear(8, hidden), nn.ReLU(), nn.Linear(hidden, width), nn.ReLU())
        pairs = (fields + 1) * fields // 2
        self.top = nn.Sequential(
            nn.Linear(pairs + width, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 1)
        )
        if one_table:
            self.table = nn.Embedding.from_pretrained(torch.cat([t.weight.detach() for t in self.tables]), freeze=False)
            del self.tables
            self.register_buffer("offsets", torch.arange(fields)[:, None] * ids_per_field)
        if pairs_at_once:
            first, second = torch.triu_indices(fields + 1, fields + 1, 1)
            self.register_buffer("first", first)
            self.register_buffer("second", second)

    def forward(self, numbers, ids):
        bottom = self.bottom(numbers)
        vectors = [bottom]
        if self.one_table:
            mask = (ids != 0).float().unsqueeze(-1)
            embedded = self.table(ids + self.offsets)
            means = (embedded * mask).sum(2) / mask.sum(2).clamp(min=1)
            vectors += list(means.unbind(1))
        else:
            for field in range(self.fields):
                field_ids = ids[:, field]
                mask = (field_ids != 0).float().unsqueeze(-1)
                embedded = self.tables[field](field_ids)
                vectors.append((embedded * mask).sum(1) / mask.sum(1).clamp(min=1))
        if self.pairs_at_once:
            stacked = torch.stack(vectors, 1)
            products = torch.bmm(stacked, stacked.transpose(1, 2))[:, self.first, self.second]
        else:
            products = []
            for i in range(len(vectors)):
                for j in range(i + 1, len(vectors)):
                    products.append((vectors[i] * vectors[j]).sum(1, keepdim=True))
            products = torch.cat(products, 1)
        return self.top(torch.cat([bottom, products], 1)).squeeze(1)


def field_pairs(change):
    """Train a recommender with multi-hot fields, from a DataLoader."""
    fields, ids_per_field, batch = size(18, 4), size(60000, 50), size(1024, 8)
    if change == "whole_batches":
        data = ClicksInBatches(size(60000, 80), fields, ids_per_field)
        order = RandomSampler(data, generator=torch.Generator().manual_seed(0))
        loader = DataLoader(data, sampler=BatchSampler(order, batch, drop_last=True), batch_size=None)
    else:
        data = Clicks(size(60000, 80), fields, ids_per_field)
        options = {}
        if change == "workers":
            options = {"num_workers": size(6, 2), "pin_memory": True, "persistent_workers": True}
        order = RandomSampler(data, generator=torch.Generator().manual_seed(0))
        loader = DataLoader(data, batch_size=batch, sampler=order, drop_last=True, **options)
    batches = iter(loader)
    next(batches)  # Starts the workers, if any, before the GPU is in use.

    model = ClickModel(
        fields,
        ids_per_field,
        size(64, 8),
        size(512, 16),
        sparse=change == "sparse_gradients",
        one_table=change == "one_table",
        pairs_at_once=change == "pairs_at_once",
    ).to(device)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.01)
    history = []

    def step():
        nonlocal batches
        try:
            rows = next(batches)
        except StopIteration:
            batches = iter(loader)
            rows = next(batches)
        numbers = rows["numbers"].to(device, non_blocking=change == "workers")
        ids = rows["ids"].to(device, non_blocking=change == "workers")
        clicked = rows["clicked"].to(device, non_blocking=change == "workers")
        optimizer.zero_grad()
        scores = model(numbers, ids)
        loss = F.binary_cross_entropy_with_logits(scores, clicked)
        loss.backward()
        optimizer.step()
        accuracy = ((scores > 0).float() == clicked).float().mean()
        history.append((loss.item(), accuracy.item()))
        return loss.detach()

    return step


# 2. Fine-tuning with LoRA --------------------------------------------------------------------------------------------


class RMSNorm(nn.Module):
    """Root mean square norm, written by hand."""

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return wide.to(x.dtype) * self.weight


class LoRALinear(nn.Module):
    """A frozen linear layer with a trained correction of low rank."""

    def __init__(self, inputs, outputs, rank=8):
        super().__init__()
        self.base = nn.Linear(inputs, outputs, bias=False)
        self.base.weight.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(inputs, rank) / math.sqrt(inputs))
        self.up = nn.Parameter(torch.zeros(rank, outputs))
        self.scale = 16 / rank

    def forward(self, x):
        return self.base(x) + (x @ self.down @ self.up) * self.scale


def rotate(x, positions):
    """Turn queries or keys (batch, heads, time, width) by their positions (batch, time)."""
    half = x.shape[-1] // 2
    frequencies = 1.0 / (10000 ** (torch.arange(half, device=x.device).float() / half))
    angles = (positions.float()[..., None] * frequencies).unsqueeze(1)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


class TunedLayer(nn.Module):
    """A transformer layer whose queries, keys, values and outputs have LoRA corrections."""

    def __init__(self, width, heads, hidden, sdpa):
        super().__init__()
        self.heads, self.sdpa = heads, sdpa
        self.norm1, self.norm2 = RMSNorm(width), RMSNorm(width)
        self.q, self.k, self.v, self.o = [LoRALinear(width, width) for _ in range(4)]
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x, mask, positions):
        batch, time, width = x.shape
        y = self.norm1(x)
        q, k, v = [layer(y).view(batch, time, self.heads, -1).transpose(1, 2) for layer in (self.q, self.k, self.v)]
        q, k = rotate(q, positions), rotate(k, positions)
        if self.sdpa:
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        else:
            scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
            scores = scores.masked_fill(~mask, float("-inf"))
            y = torch.softmax(scores, -1) @ v
        x = x + self.o(y.transpose(1, 2).reshape(batch, time, width))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class TunedModel(nn.Module):
    """A language model of which only the LoRA corrections are trained."""

    def __init__(self, words, width, heads, hidden, layers, sdpa):
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.layers = nn.ModuleList([TunedLayer(width, heads, hidden, sdpa) for _ in range(layers)])
        self.norm = RMSNorm(width)
        self.head = nn.Linear(width, words, bias=False)
        for name, parameter in self.named_parameters():
            part = name.split(".")
            parameter.requires_grad_(part[-1] in ("down", "up") and part[-2] in ("q", "k", "v", "o"))

    def forward(self, tokens, present):
        batch, time = tokens.shape
        causal = torch.triu(torch.ones(time, time, device=tokens.device), diagonal=1) == 0
        mask = causal[None, None] & present[:, None, None, :]
        positions = torch.arange(time, device=tokens.device)[None].expand(batch, time)
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, mask, positions)
        return self.head(self.norm(x))


def lora_tuning(change):
    """Fine-tune a language model on questions and answers with hand-written LoRA."""
    words, longest, batch = size(32000, 100), size(512, 24), size(4, 2)
    if change == "tf32":
        use_tf32()
    rng = np.random.default_rng(0)
    texts = []
    for _ in range(size(800, 20)):
        length = int(rng.integers(longest // 5, longest * 3 // 5))
        tokens = rng.integers(1, words, length).tolist()
        texts.append({"tokens": tokens, "question": length // 3})
    with device:
        model = TunedModel(words, size(1024, 32), size(16, 2), size(2816, 48), size(6, 2), sdpa=change == "sdpa")
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=2e-4)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: min(1.0, (n + 1) / 100))
    network = compiled(model) if change == "compile" else model
    history = []
    turn = 0

    def step():
        nonlocal turn
        chosen = [texts[(turn * batch + i) % len(texts)] for i in range(batch)]
        turn += 1
        length = max(len(t["tokens"]) for t in chosen) if change == "pad_to_longest" else longest
        tokens, labels, present = [], [], []
        for text in chosen:
            own = text["tokens"]
            rest = length - len(own)
            tokens.append(own + [0] * rest)
            labels.append([-100] * text["question"] + own[text["question"] :] + [-100] * rest)
            present.append([True] * len(own) + [False] * rest)
        tokens = torch.tensor(tokens).to(device)
        labels = torch.tensor(labels).to(device)
        present = torch.tensor(present).to(device)
        optimizer.zero_grad()
        with torch.autocast(device.type, torch.bfloat16, enabled=change == "bf16"):
            logits = network(tokens, present)
            loss = F.cross_entropy(
                logits[:, :-1].reshape(-1, logits.shape[-1]).float(), labels[:, 1:].reshape(-1), ignore_index=-100
            )
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        schedule.step()
        history.append({"loss": loss.item(), "norm": norm.item(), "lr": schedule.get_last_lr()[0]})
        return loss.detach()

    return step


# 3. A bent plate -----------------------------------------------------------------------------------------------------


class PlateNet(nn.Module):
    """A network for the deflection of a plate at a point (x, y)."""

    def __init__(self, width, depth):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(2 if i == 0 else width, width) for i in range(depth)])
        self.last = nn.Linear(width, 1)

    def forward(self, x, y):
        h = torch.cat([x, y], 1)
        for layer in self.layers:
            h = torch.tanh(layer(h))
        return self.last(h)


def derivative(u, x, order=1):
    """Return the derivative of u by x."""
    for _ in range(order):
        u = torch.autograd.grad(u, x, torch.ones_like(u), create_graph=True)[0]
    return u


def fourth_order_terms(net, x, y):
    """Return u and u_xxxx + 2 u_xxyy + u_yyyy, from Taylor series along four directions, in one forward pass."""
    directions = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0], [1.0, -1.0]], device=x.device)
    points = torch.cat([x, y], 1)
    zero = torch.zeros(4, *points.shape, device=x.device)
    series = torch.stack([points.expand(4, -1, -1), directions[:, None].expand_as(zero), zero, zero, zero])
    for layer in net.layers:
        first = F.linear(series[:1], layer.weight, layer.bias)
        a = torch.cat([first, F.linear(series[1:], layer.weight)]).unbind(0)
        out = [torch.tanh(a[0])]
        slope = [1 - out[0] ** 2]
        for k in range(1, 5):
            out.append(sum(i * a[i] * slope[k - i] for i in range(1, k + 1)) / k)
            slope.append(-sum(out[i] * out[k - i] for i in range(k + 1)))
        series = torch.stack(out)
    u = net.last(series[0, 0])
    fourth = 24 * F.linear(series[4], net.last.weight)
    mixed = (fourth[2] + fourth[3] - 2 * fourth[0] - 2 * fourth[1]) / 12
    return u, fourth[0] + 2 * mixed + fourth[1]


def bent_plate(change):
    """Train a physics-informed network for the plate equation, which has fourth derivatives."""
    if change == "tf32":
        use_tf32()
    points, edge = size(4096, 16), size(512, 4)
    net = PlateNet(size(128, 8), size(3, 2)).to(device)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3, capturable=change == "cuda_graph" and device.type == "cuda")
    history = []

    def plate_loss():
        x = torch.rand(points, 1, device=device, requires_grad=True)
        y = torch.rand(points, 1, device=device, requires_grad=True)
        load = torch.sin(math.pi * x) * torch.sin(math.pi * y)
        if change == "taylor_series":
            u, bending = fourth_order_terms(net, x.detach(), y.detach())
        elif change == "laplace_twice":
            u = net(x, y)
            laplace = derivative(u, x, 2) + derivative(u, y, 2)
            bending = derivative(laplace, x, 2) + derivative(laplace, y, 2)
        elif change == "shared_derivatives":
            u = net(x, y)
            u_xx = derivative(u, x, 2)
            u_yyyy = derivative(u, y, 4)
            bending = derivative(u_xx, x, 2) + 2 * derivative(u_xx, y, 2) + u_yyyy
        else:
            u = net(x, y)
            u_xxxx = derivative(u, x, 4)
            u_yyyy = derivative(u, y, 4)
            u_xxyy = derivative(derivative(u, x, 2), y, 2)
            bending = u_xxxx + 2 * u_xxyy + u_yyyy
        inside = ((bending / (4 * math.pi**4) - load) ** 2).mean()

        border = 0
        for side in range(4):
            t = torch.rand(edge, 1, device=device, requires_grad=True)
            fixed = torch.full_like(t, float(side % 2)).detach().requires_grad_(True)
            bx, by = (fixed, t) if side < 2 else (t, fixed)
            u = net(bx, by)
            across = derivative(u, fixed, 2)
            border = border + (u**2).mean() + (across**2).mean()
        return inside + 10 * border

    def update():
        optimizer.zero_grad()
        loss = plate_loss()
        loss.backward()
        optimizer.step()
        return loss.detach()

    run = graphed(update) if change == "cuda_graph" else update

    def step():
        loss = run()
        history.append(loss.item())
        return loss

    return step


# 4. Learning from few examples ---------------------------------------------------------------------------------------


def letter_net(images, weights):
    """Classify images with the given weights: four convolutions with batch norm, then a linear layer."""
    h = images
    for i in range(4):
        h = F.conv2d(h, weights[f"conv{i}"], weights[f"bias{i}"], stride=2, padding=1)
        mean = h.mean((0, 2, 3), keepdim=True)
        variance = ((h - mean) ** 2).mean((0, 2, 3), keepdim=True)
        h = (h - mean) / torch.sqrt(variance + 1e-5)
        h = F.relu(h * weights[f"gamma{i}"][:, None, None] + weights[f"beta{i}"][:, None, None])
    return F.linear(h.flatten(1), weights["linear"], weights["linear_bias"])


def few_examples(change):
    """Train MAML: learn weights that one gradient step adapts to new letters."""
    ways, shots, queries, tasks, channels = 5, 1, size(10, 2), size(4, 2), size(64, 4)
    rng = np.random.default_rng(0)
    letters = rng.random((size(800, 12), 20, 1, 28, 28), dtype=np.float32)
    weights = {}
    for i in range(4):
        inputs = 1 if i == 0 else channels
        weights[f"conv{i}"] = torch.randn(channels, inputs, 3, 3) * math.sqrt(2 / (9 * inputs))
        weights[f"bias{i}"] = torch.zeros(channels)
        weights[f"gamma{i}"] = torch.ones(channels)
        weights[f"beta{i}"] = torch.zeros(channels)
    weights["linear"] = torch.randn(ways, channels * 4) * 0.05
    weights["linear_bias"] = torch.zeros(ways)
    weights = {name: w.to(device).requires_grad_(True) for name, w in weights.items()}
    optimizer = torch.optim.Adam(weights.values(), lr=1e-3, capturable=change == "cuda_graph" and device.type == "cuda")
    history = []
    letters_there = torch.from_numpy(letters).to(device) if change == "data_on_gpu" else None

    def choose_task():
        classes = rng.choice(len(letters), ways, replace=False)
        examples = [rng.choice(20, shots + queries, replace=False) for _ in classes]
        return classes, examples

    def make_task():
        """Return the images and labels to adapt to, and those to test with."""
        classes, examples = choose_task()
        if letters_there is not None:
            rows = torch.from_numpy(np.stack(examples)).to(device)
            images = letters_there[torch.from_numpy(classes).to(device)[:, None], rows]
            labels = torch.arange(ways, device=device)
            return (
                images[:, :shots].flatten(0, 1),
                labels.repeat_interleave(shots),
                images[:, shots:].flatten(0, 1),
                labels.repeat_interleave(queries),
            )
        near, near_labels, far, far_labels = [], [], [], []
        for label, (letter, rows) in enumerate(zip(classes, examples, strict=False)):
            for n, row in enumerate(rows):
                image = torch.tensor(letters[letter, row]).to(device)
                if n < shots:
                    near.append(image)
                    near_labels.append(label)
                else:
                    far.append(image)
                    far_labels.append(label)
        near_labels, far_labels = torch.tensor(near_labels).to(device), torch.tensor(far_labels).to(device)
        return torch.stack(near), near_labels, torch.stack(far), far_labels

    def task_loss(near, near_labels, far, far_labels):
        """Adapt the weights to one task and return the loss with them."""
        own = dict(weights)
        for _ in range(1):
            loss = F.cross_entropy(letter_net(near, own), near_labels)
            gradients = torch.autograd.grad(loss, list(own.values()), create_graph=True)
            own = {name: w - 0.4 * g for (name, w), g in zip(own.items(), gradients, strict=False)}
        return F.cross_entropy(letter_net(far, own), far_labels)

    def task_loss_of(shared, near, near_labels, far, far_labels):
        """The same as a pure function of the shared weights."""

        def near_loss(own):
            return F.cross_entropy(letter_net(near, own), near_labels)

        own = shared
        for _ in range(1):
            gradients = torch.func.grad(near_loss)(own)
            own = {name: w - 0.4 * gradients[name] for name, w in own.items()}
        return F.cross_entropy(letter_net(far, own), far_labels)

    def update(made):
        optimizer.zero_grad()
        with torch.autocast(device.type, torch.bfloat16, enabled=change == "bf16"):
            if change == "vmap_tasks":
                stacked = [torch.stack(part) for part in zip(*made, strict=False)]
                loss = torch.func.vmap(task_loss_of, in_dims=(None, 0, 0, 0, 0))(weights, *stacked).mean()
            else:
                losses = []
                for task in made:
                    losses.append(task_loss(*task))
                loss = torch.stack(losses).mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    if change == "cuda_graph":
        state = rng.bit_generator.state
        kept = [make_task() for _ in range(tasks)]
        rng.bit_generator.state = state
        replay = graphed(lambda: update(kept))

    def step():
        made = [make_task() for _ in range(tasks)]
        if change == "cuda_graph":
            for old, new in zip(kept, made, strict=False):
                for to, source in zip(old, new, strict=False):
                    to.copy_(source)
            loss = replay()
        else:
            loss = update(made)
        history.append(loss.item())
        return loss

    return step


# 5. Views of a room --------------------------------------------------------------------------------------------------


def waves(x, count):
    """Return x with sines and cosines of it at `count` frequencies."""
    parts = [x]
    for i in range(count):
        parts.append(torch.sin(2.0**i * x))
        parts.append(torch.cos(2.0**i * x))
    return torch.cat(parts, -1)


class RadianceField(nn.Module):
    """Color and density at a point seen from a direction (NeRF)."""

    def __init__(self, width):
        super().__init__()
        self.layers = nn.ModuleList()
        for i in range(8):
            self.layers.append(nn.Linear(63 if i == 0 else width + 63 if i == 5 else width, width))
        self.density = nn.Linear(width, 1)
        self.feature = nn.Linear(width, width)
        self.side = nn.Linear(width + 27, width // 2)
        self.color = nn.Linear(width // 2, 3)

    def forward(self, points, directions):
        p, d = waves(points, 10), waves(directions, 4)
        h = p
        for i, layer in enumerate(self.layers):
            if i == 5:
                h = torch.cat([h, p], -1)
            h = F.relu(layer(h))
        density = F.softplus(self.density(h))
        h = F.relu(self.side(torch.cat([self.feature(h), d], -1)))
        return torch.sigmoid(self.color(h)), density.squeeze(-1)


def blend(colors, density, depths):
    """Return the color of each ray and the weights of its points."""
    gaps = depths[:, 1:] - depths[:, :-1]
    gaps = torch.cat([gaps, torch.full_like(gaps[:, :1], 1e10)], -1)
    alpha = 1.0 - torch.exp(-density * gaps)
    clear = torch.cumprod(torch.cat([torch.ones_like(alpha[:, :1]), 1.0 - alpha + 1e-10], -1), -1)[:, :-1]
    weights = alpha * clear
    return (weights[..., None] * colors).sum(1), weights


def finer_depths(depths, weights, count):
    """Return `count` more depths, where the weights are large."""
    middles = 0.5 * (depths[:, 1:] + depths[:, :-1])
    density = weights[:, 1:-1] + 1e-5
    density = density / density.sum(-1, keepdim=True)
    total = torch.cat([torch.zeros_like(density[:, :1]), torch.cumsum(density, -1)], -1)
    u = torch.linspace(0.0, 1.0, count, device=depths.device).expand(len(depths), count).contiguous()
    above = torch.searchsorted(total, u, right=True)
    below = (above - 1).clamp(min=0)
    above = above.clamp(max=total.shape[-1] - 1)
    t0, t1 = total.gather(1, below), total.gather(1, above)
    m0, m1 = middles.gather(1, below), middles.gather(1, above)
    span = torch.where(t1 - t0 < 1e-5, torch.ones_like(t0), t1 - t0)
    return m0 + (u - t0) / span * (m1 - m0)


def room_views(change):
    """Render views of a room with a NeRF, chunk by chunk."""
    if change == "tf32":
        use_tf32()
    wide, high, samples = size(80, 8), size(60, 6), size(64, 8)
    chunk = size(1600, 24) if change == "larger_chunks" else size(400, 16)
    coarse, fine = RadianceField(size(256, 16)).to(device), RadianceField(size(256, 16)).to(device)
    coarse.eval()
    fine.eval()
    if change == "compile":
        coarse, fine = compiled(coarse), compiled(fine)
    view = 0

    def colors_at(network, starts, directions, depths):
        points = starts[:, None] + directions[:, None] * depths[..., None]
        looks = directions / directions.norm(dim=-1, keepdim=True)
        looks = looks[:, None].expand_as(points)
        with torch.autocast(device.type, torch.bfloat16, enabled=change == "bf16"):
            colors, density = network(points.reshape(-1, 3), looks.reshape(-1, 3))
        return colors.float().view(*depths.shape, 3), density.float().view(depths.shape)

    def render(starts, directions):
        depths = torch.linspace(2.0, 6.0, samples, device=device).expand(len(starts), samples)
        colors, density = colors_at(coarse, starts, directions, depths)
        _, weights = blend(colors, density, depths)
        more = finer_depths(depths, weights, samples)
        depths, _ = torch.sort(torch.cat([depths, more], -1), -1)
        colors, density = colors_at(fine, starts, directions, depths)
        return blend(colors, density, depths)[0]

    def step():
        nonlocal view
        angle = 2 * math.pi * view / 60
        view += 1
        columns, rows = np.meshgrid(np.arange(wide), np.arange(high))
        local = np.stack([(columns - wide / 2) / wide, -(rows - high / 2) / wide, -np.ones_like(columns)], -1)
        c, s = math.cos(angle), math.sin(angle)
        turn = np.array([[c, 0, s], [0, 1, 0], [-s, 0, c]])
        directions = torch.tensor((local @ turn.T).reshape(-1, 3), dtype=torch.float32).to(device)
        starts = torch.tensor(turn @ np.array([0, 0, 4.0]), dtype=torch.float32).to(device).expand(len(directions), 3)
        picture = []
        with torch.inference_mode(change == "inference_mode"):
            for i in range(0, len(directions), chunk):
                colors = render(starts[i : i + chunk], directions[i : i + chunk])
                picture.append(colors.detach().cpu().numpy())
        picture = (np.concatenate(picture).reshape(high, wide, 3) * 255).clip(0, 255)
        return torch.tensor(picture.mean())

    return step


# 6. A chat service ---------------------------------------------------------------------------------------------------


class ChatLayer(nn.Module):
    """A transformer layer with a cache of keys and values, written by hand."""

    def __init__(self, width, heads, groups, hidden):
        super().__init__()
        self.heads, self.groups, self.part = heads, groups, width // heads
        self.norm1, self.norm2 = RMSNorm(width), RMSNorm(width)
        self.q = nn.Linear(width, width, bias=False)
        self.k = nn.Linear(width, groups * self.part, bias=False)
        self.v = nn.Linear(width, groups * self.part, bias=False)
        self.o = nn.Linear(width, width, bias=False)
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x, turn, keep):
        """`turn` turns queries and keys by position; `keep` puts keys and values in the cache and returns all."""
        batch, time, width = x.shape
        y = self.norm1(x)
        q = turn(self.q(y).view(batch, time, self.heads, self.part).transpose(1, 2))
        k = turn(self.k(y).view(batch, time, self.groups, self.part).transpose(1, 2))
        v = self.v(y).view(batch, time, self.groups, self.part).transpose(1, 2)
        k, v, mask = keep(k, v)
        k = k.repeat_interleave(self.heads // self.groups, 1)
        v = v.repeat_interleave(self.heads // self.groups, 1)
        scores = (q @ k.transpose(-2, -1)).float() / math.sqrt(self.part)
        if mask is not None:
            scores = scores.masked_fill(~mask, float("-inf"))
        y = torch.softmax(scores, -1).to(x.dtype) @ v
        x = x + self.o(y.transpose(1, 2).reshape(batch, time, width))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class ChatModel(nn.Module):
    """A small language model."""

    def __init__(self, words, width, heads, groups, hidden, layers):
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.layers = nn.ModuleList([ChatLayer(width, heads, groups, hidden) for _ in range(layers)])
        self.norm = RMSNorm(width)
        self.head = nn.Linear(width, words, bias=False)

    def forward(self, tokens, turn, keepers):
        x = self.embed(tokens)
        for layer, keep in zip(self.layers, keepers, strict=False):
            x = layer(x, turn, keep)
        return self.head(self.norm(x[:, -1]))


def chat_service(change):
    """Answer six chats at once, one token for each in a step."""
    words, chats, layers, room = size(32000, 60), size(6, 3), size(10, 2), size(512, 64)
    heads, groups, width = size(16, 4), size(4, 2), size(1024, 32)
    kind = torch.bfloat16 if device.type == "cuda" else torch.float32
    with device:
        model = ChatModel(words, width, heads, groups, size(2816, 48), layers).to(kind).eval()
    rng = np.random.default_rng(0)

    half = width // heads // 2
    frequencies = 1.0 / (10000 ** (torch.arange(half, device=device).float() / half))
    angles = torch.arange(room, device=device).float()[:, None] * frequencies
    cos_table, sin_table = angles.cos().to(kind), angles.sin().to(kind)

    def turner(positions):
        """Return the function that turns by these positions (batch, time)."""
        if change != "rotation_table":
            return lambda x: rotate(x, positions)
        cos, sin = cos_table[positions].unsqueeze(1), sin_table[positions].unsqueeze(1)

        def turn(x):
            a, b = x[..., :half], x[..., half:]
            return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)

        return turn

    def growing(tokens, cache):
        """Run the model on the new tokens of one chat, with a cache that grows by concatenation."""
        past = 0 if cache is None else cache[0][0].shape[2]
        time = tokens.shape[1]
        new, mask = [], None
        if time > 1:
            mask = torch.ones(time, time, device=device).tril().bool()

        def keeper(i):
            def keep(k, v):
                if cache is not None:
                    k, v = torch.cat([cache[i][0], k], 2), torch.cat([cache[i][1], v], 2)
                new.append((k, v))
                return k, v, mask

            return keep

        positions = torch.arange(past, past + time, device=device)[None]
        return model(tokens, turner(positions), [keeper(i) for i in range(layers)]), new

    fixed = [
        [torch.zeros(chats, groups, room, width // heads, dtype=kind, device=device) for _ in range(2)]
        for _ in range(layers)
    ]
    chat_list = []
    with torch.no_grad():
        for n in range(chats):
            prompt = rng.integers(0, words, int(rng.integers(room // 5, room // 2))).tolist()
            logits, cache = growing(torch.tensor([prompt], device=device), None)
            first = int(logits.argmax(-1))
            for i in range(layers):
                for to, source in zip(fixed[i], cache[i], strict=False):
                    to[n, :, : len(prompt)] = source[0]
            chat_list.append(
                {
                    "prompt": prompt,
                    "prompt_cache": cache,
                    "cache": cache,
                    "first": first,
                    "answer": [first],
                    "limit": room // 8 + room // 32 * n,
                }
            )

    def in_place(tokens, chat, n):
        """Run the model on one token of one chat, with a cache of fixed size."""
        place = len(chat["prompt"]) + len(chat["answer"]) - 1

        def keeper(i):
            def keep(k, v):
                keys, values = fixed[i]
                keys[n : n + 1, :, place : place + 1] = k
                values[n : n + 1, :, place : place + 1] = v
                return keys[n : n + 1, :, : place + 1], values[n : n + 1, :, : place + 1], None

            return keep

        positions = torch.arange(place, place + 1, device=device)[None]
        return model(tokens, turner(positions), [keeper(i) for i in range(layers)])

    spaces = torch.arange(room, device=device)
    rows = torch.arange(chats, device=device)

    def together(tokens, places, start, end):
        """Run the model on a token of each of some chats, with a cache of fixed size and a mask of its used part."""
        mask = (spaces <= places[:, None])[:, None, None]
        own = rows[: end - start]

        def keeper(i):
            def keep(k, v):
                keys, values = fixed[i][0][start:end], fixed[i][1][start:end]
                keys[own, :, places] = k[:, :, 0]
                values[own, :, places] = v[:, :, 0]
                return keys, values, mask

            return keep

        return model(tokens, turner(places[:, None]), [keeper(i) for i in range(layers)])

    def start_again(chat):
        """The user asks for another answer to the same prompt."""
        chat["cache"] = chat["prompt_cache"]
        chat["answer"] = [chat["first"]]

    def last_places():
        return [len(chat["prompt"]) + len(chat["answer"]) - 1 for chat in chat_list]

    tokens_there = torch.tensor([[chat["first"]] for chat in chat_list], device=device)
    places_there = torch.tensor(last_places(), device=device)

    @torch.no_grad()
    def all_chats():
        """One token for each chat in turn, as what a CUDA graph can hold."""
        best, chosen = [], []
        for n in range(chats):
            logits = together(tokens_there[n : n + 1], places_there[n : n + 1], n, n + 1)
            top, token = logits.float().max(-1)
            best.append(top)
            chosen.append(token)
        return torch.cat(best), torch.cat(chosen)

    replay = graphed(all_chats) if change == "cuda_graph" else None

    @torch.no_grad()
    def step():
        if change in ("cuda_graph", "batched"):
            tokens = torch.tensor([[chat["answer"][-1]] for chat in chat_list])
            places = torch.tensor(last_places())
            if change == "batched":
                best, chosen = together(tokens.to(device), places.to(device), 0, chats).float().max(-1)
            else:
                tokens_there.copy_(tokens)
                places_there.copy_(places)
                best, chosen = replay()
            for chat, token in zip(chat_list, chosen.tolist(), strict=False):
                chat["answer"].append(token)
            total = best.sum().item()
        elif change == "one_sync":
            best, chosen = [], []
            tokens_now = torch.tensor([[chat["answer"][-1]] for chat in chat_list]).to(device)
            for n, chat in enumerate(chat_list):
                logits, chat["cache"] = growing(tokens_now[n : n + 1], chat["cache"])
                top, token = logits.float().max(-1)
                best.append(top)
                chosen.append(token)
            for chat, token in zip(chat_list, torch.cat(chosen).tolist(), strict=False):
                chat["answer"].append(token)
            total = torch.cat(best).sum().item()
        else:
            total = 0.0
            for n, chat in enumerate(chat_list):
                tokens = torch.tensor([[chat["answer"][-1]]]).to(device)
                if change == "fixed_cache":
                    logits = in_place(tokens, chat, n)
                else:
                    logits, chat["cache"] = growing(tokens, chat["cache"])
                top, token = logits.float().max(-1)
                chat["answer"].append(token.item())
                total += top.item()
        for chat in chat_list:
            if len(chat["answer"]) >= chat["limit"]:
                start_again(chat)
        return torch.tensor(total / chats)

    return step


# 7. Restored photos --------------------------------------------------------------------------------------------------


class ChannelNorm(nn.Module):
    """Layer norm over the channels of an image, written by hand."""

    def __init__(self, channels):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))

    def forward(self, x):
        mean = x.mean(1, keepdim=True)
        variance = (x - mean).pow(2).mean(1, keepdim=True)
        y = (x - mean) / (variance + 1e-6).sqrt()
        return self.weight.view(1, -1, 1, 1) * y + self.bias.view(1, -1, 1, 1)


def gate(x):
    """Multiply one half of the channels with the other."""
    a, b = x.chunk(2, 1)
    return a * b


class RestoreBlock(nn.Module):
    """A block of NAFNet."""

    def __init__(self, c):
        super().__init__()
        self.norm1, self.norm2 = ChannelNorm(c), ChannelNorm(c)
        self.expand = nn.Conv2d(c, 2 * c, 1)
        self.depthwise = nn.Conv2d(2 * c, 2 * c, 3, padding=1, groups=2 * c)
        self.attention = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(c, c, 1))
        self.project = nn.Conv2d(c, c, 1)
        self.expand2 = nn.Conv2d(c, 2 * c, 1)
        self.project2 = nn.Conv2d(c, c, 1)
        self.beta = nn.Parameter(torch.full((1, c, 1, 1), 0.1))
        self.gamma = nn.Parameter(torch.full((1, c, 1, 1), 0.1))

    def forward(self, x):
        y = gate(self.depthwise(self.expand(self.norm1(x))))
        y = self.project(y * self.attention(y))
        x = x + y * self.beta
        y = self.project2(gate(self.expand2(self.norm2(x))))
        return x + y * self.gamma


class RestoreNet(nn.Module):
    """A U-shaped network of such blocks that takes noise and blur out of an image."""

    def __init__(self, c, blocks):
        super().__init__()
        self.first = nn.Conv2d(3, c, 3, padding=1)
        self.last = nn.Conv2d(c, 3, 3, padding=1)
        self.encoders, self.downs, self.ups, self.decoders = [nn.ModuleList() for _ in range(4)]
        for _ in range(3):
            self.encoders.append(nn.Sequential(*[RestoreBlock(c) for _ in range(blocks)]))
            self.downs.append(nn.Conv2d(c, 2 * c, 2, stride=2))
            c *= 2
        self.middle = nn.Sequential(*[RestoreBlock(c) for _ in range(blocks)])
        for _ in range(3):
            self.ups.append(nn.Sequential(nn.Conv2d(c, 2 * c, 1, bias=False), nn.PixelShuffle(2)))
            c //= 2
            self.decoders.append(nn.Sequential(*[RestoreBlock(c) for _ in range(blocks)]))

    def forward(self, image):
        x = self.first(image)
        kept = []
        for encoder, down in zip(self.encoders, self.downs, strict=False):
            x = encoder(x)
            kept.append(x)
            x = down(x)
        x = self.middle(x)
        for up, decoder in zip(self.ups, self.decoders, strict=False):
            x = decoder(up(x) + kept.pop())
        return image + self.last(x)


def restored_photos(change):
    """Restore photos tile by tile, and blend the tiles where they overlap."""
    edge, tile, stride = size(640, 40), size(256, 16), size(192, 12)
    rng = np.random.default_rng(0)
    photos = [rng.integers(0, 256, (edge, edge, 3), dtype=np.uint8) for _ in range(4)]
    model = RestoreNet(size(32, 4), size(2, 1)).to(device).eval()
    if change == "channels_last":
        model = model.to(memory_format=torch.channels_last)
    if change == "compile":
        model = compiled(model)
    places = [(top, left) for top in range(0, edge - tile + 1, stride) for left in range(0, edge - tile + 1, stride)]
    turn = 0

    def window():
        """Return the weights of a tile's pixels, which fall towards its border."""
        slope = np.minimum(np.arange(1, tile + 1), np.arange(tile, 0, -1)).astype(np.float32)
        return np.minimum.outer(slope, slope)[None] / tile

    def restore(tiles):
        if change == "channels_last":
            tiles = tiles.contiguous(memory_format=torch.channels_last)
        with torch.autocast(device.type, torch.bfloat16, enabled=change == "bf16"):
            return model(tiles).float()

    @torch.inference_mode()
    def step():
        nonlocal turn
        photo = photos[turn % len(photos)].astype(np.float32).transpose(2, 0, 1) / 255
        turn += 1
        if change == "blend_on_gpu":
            there = torch.from_numpy(photo).to(device)
            weights = torch.from_numpy(window()).to(device)
            total, weight = torch.zeros_like(there), torch.zeros(1, edge, edge, device=device)
            for top, left in places:
                area = (slice(None), slice(top, top + tile), slice(left, left + tile))
                total[area] += restore(there[area][None])[0] * weights
                weight[area] += weights
            picture = (total / weight * 255).clamp(0, 255).to(torch.uint8).cpu().numpy()
        else:
            total, weight = np.zeros_like(photo), np.zeros((1, edge, edge), np.float32)
            if change == "tiles_together":
                tiles = np.stack([photo[:, top : top + tile, left : left + tile] for top, left in places])
                restored = restore(torch.from_numpy(tiles).to(device)).cpu().numpy()
            for n, (top, left) in enumerate(places):
                if change == "tiles_together":
                    result = restored[n]
                else:
                    part = photo[:, top : top + tile, left : left + tile].copy()
                    result = restore(torch.from_numpy(part)[None].to(device))[0].cpu().numpy()
                weights = window()
                total[:, top : top + tile, left : left + tile] += result * weights
                weight[:, top : top + tile, left : left + tile] += weights
            picture = (total / weight * 255).clip(0, 255).astype(np.uint8)
        return torch.tensor(picture.mean())

    return step


PROGRAMS = {
    field_pairs: {"one_table": "larger_batch", "pairs_at_once": "larger_batch", "workers": "data_loader",
                  "whole_batches": "", "sparse_gradients": "sparse_gradients"},
    lora_tuning: {"tf32": "tf32", "bf16": "half_precision", "sdpa": "fused_attention", "compile": "fuse_pointwise",
                  "pad_to_longest": "trim_padding"},
    bent_plate: {"cuda_graph": "cuda_graph", "taylor_series": "", "laplace_twice": "", "tf32": "tf32"},
    few_examples: {"vmap_tasks": "larger_batch", "cuda_graph": "cuda_graph", "data_on_gpu": "",
                   "bf16": "half_precision"},
    room_views: {"inference_mode": "no_autograd", "tf32": "tf32", "bf16": "half_precision",
                 "compile": "fuse_pointwise", "larger_chunks": "larger_batch"},
    chat_service: {"batched": "larger_batch", "cuda_graph": "static_cache", "fixed_cache": "",
                   "one_sync": "remove_sync", "rotation_table": "compute_once"},
    restored_photos: {"tiles_together": "larger_batch", "blend_on_gpu": "python",
                      "channels_last": "channels_last", "bf16": "half_precision", "compile": "fuse_pointwise"},
}  # fmt: skip
