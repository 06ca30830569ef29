"""Training: a deep equilibrium classifier, a replay agent, and a differentiable neural computer."""

import collections
import math

import numpy as np
import torch
import torch.nn.functional as F
from setting import bf16, device, endless, graphed_training, size
from torch import nn
from torch.utils.data import DataLoader, Dataset


class ShiftedImages(Dataset):
    """Small colour images in memory, randomly shifted and mirrored, normalized to floats."""

    mean = np.array([0.4914, 0.4822, 0.4465], dtype=np.float32)
    std = np.array([0.2470, 0.2435, 0.2616], dtype=np.float32)

    def __init__(self, count, side, classes):
        random = np.random.default_rng(0)
        self.labels = random.integers(0, classes, count)
        patterns = random.integers(0, 256, (classes, side, side, 3))
        noise = random.integers(0, 256, (count, side, side, 3), dtype=np.uint8)
        self.images = (0.4 * patterns[self.labels] + 0.6 * noise).astype(np.uint8)
        self.random = random

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        image = self.images[index]
        side = image.shape[0]
        padded = np.pad(image, ((4, 4), (4, 4), (0, 0)))
        top, left = self.random.integers(0, 9, 2)
        image = padded[top : top + side, left : left + side]
        if self.random.random() < 0.5:
            image = image[:, ::-1]
        image = (image.astype(np.float32) / 255.0 - self.mean) / self.std
        return torch.from_numpy(np.ascontiguousarray(image.transpose(2, 0, 1))), int(self.labels[index])


def images_on_device(dataset, batch_size):
    """Yield random batches of the dataset, which lies in the device's memory and is augmented there."""
    images = torch.from_numpy(dataset.images).to(device).permute(0, 3, 1, 2).contiguous()
    labels = torch.from_numpy(dataset.labels).to(device)
    mean = torch.from_numpy(dataset.mean).to(device).view(1, 3, 1, 1)
    std = torch.from_numpy(dataset.std).to(device).view(1, 3, 1, 1)
    side = images.shape[-1]
    steps = torch.arange(side, device=device)
    while True:
        for chosen in torch.randperm(len(labels), device=device).split(batch_size):
            padded = F.pad(images[chosen], (4, 4, 4, 4))
            rows = steps + torch.randint(0, 9, (len(chosen), 1), device=device)
            columns = steps + torch.randint(0, 9, (len(chosen), 1), device=device)
            mirrored = torch.rand(len(chosen), 1, device=device) < 0.5
            columns = torch.where(mirrored, columns.flip(1), columns)
            item = torch.arange(len(chosen), device=device).view(-1, 1, 1, 1)
            channel = torch.arange(3, device=device).view(1, -1, 1, 1)
            batch = padded[item, channel, rows[:, None, :, None], columns[:, None, None, :]]
            yield (batch.float() / 255.0 - mean) / std, labels[chosen]


def anderson(f, x0, m=5, lam=1e-4, max_iter=25, tol=1e-2, beta=1.0, change="base"):
    """Find a fixed point of f with Anderson acceleration. Return it and the relative residuals."""
    bsz = x0.shape[0]
    X = torch.zeros(bsz, m, x0[0].numel(), dtype=x0.dtype, device=x0.device)
    Y = torch.zeros(bsz, m, x0[0].numel(), dtype=x0.dtype, device=x0.device)
    X[:, 0], Y[:, 0] = x0.reshape(bsz, -1), f(x0).reshape(bsz, -1)
    X[:, 1], Y[:, 1] = Y[:, 0], f(Y[:, 0].view_as(x0)).reshape(bsz, -1)
    H = torch.zeros(bsz, m + 1, m + 1, dtype=x0.dtype, device=x0.device)
    H[:, 0, 1:] = H[:, 1:, 0] = 1
    y = torch.zeros(bsz, m + 1, 1, dtype=x0.dtype, device=x0.device)
    y[:, 0] = 1
    if change == "cached_gram":
        G = torch.zeros_like(X)

    def renew(slot, known):
        G[:, slot] = Y[:, slot] - X[:, slot]
        products = torch.bmm(G[:, :known], G[:, slot, :, None])[:, :, 0]
        H[:, 1 : known + 1, slot + 1] = products
        H[:, slot + 1, 1 : known + 1] = products
        H[:, slot + 1, slot + 1] += lam

    if change == "cached_gram":
        renew(0, 1)
        renew(1, 2)
    residuals = []
    for k in range(2, max_iter):
        n = min(k, m)
        if change != "cached_gram":
            G = Y[:, :n] - X[:, :n]
            eye = torch.eye(n, dtype=x0.dtype, device=x0.device)[None]
            H[:, 1 : n + 1, 1 : n + 1] = torch.bmm(G, G.transpose(1, 2)) + lam * eye
        if change == "rare_checks":
            alpha = torch.linalg.solve_ex(H[:, : n + 1, : n + 1], y[:, : n + 1])[0][:, 1 : n + 1, 0]
        else:
            alpha = torch.linalg.solve(H[:, : n + 1, : n + 1], y[:, : n + 1])[:, 1 : n + 1, 0]
        X[:, k % m] = beta * (alpha[:, None] @ Y[:, :n])[:, 0] + (1 - beta) * (alpha[:, None] @ X[:, :n])[:, 0]
        Y[:, k % m] = f(X[:, k % m].view_as(x0)).reshape(bsz, -1)
        if change == "cached_gram":
            renew(k % m, min(k + 1, m))
        if change == "rare_checks" and k % 4 != 3 and k != max_iter - 1:
            continue
        residual = (Y[:, k % m] - X[:, k % m]).norm().item() / (1e-5 + Y[:, k % m].norm().item())
        residuals.append(residual)
        if residual < tol:
            break
    return X[:, k % m].view_as(x0), residuals


class EquilibriumCell(nn.Module):
    """A residual layer whose fixed point in z, given the injected x, is the network's depth."""

    def __init__(self, channels, inner, groups=8, half=False):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, inner, 3, padding=1, bias=False)
        self.conv2 = nn.Conv2d(inner, channels, 3, padding=1, bias=False)
        self.norm1 = nn.GroupNorm(groups, inner)
        self.norm2 = nn.GroupNorm(groups, channels)
        self.norm3 = nn.GroupNorm(groups, channels)
        self.conv1.weight.data.normal_(0, 0.01)
        self.conv2.weight.data.normal_(0, 0.01)
        self.half_precision = half

    def forward(self, z, x):
        with bf16(self.half_precision):
            y = self.norm1(F.relu(self.conv1(z)))
            return self.norm3(F.relu(z + self.norm2(x + self.conv2(y)))).float()


class EquilibriumLayer(nn.Module):
    """The cell's fixed point, differentiated implicitly: the backward pass solves for another fixed point."""

    def __init__(self, cell, solver, **options):
        super().__init__()
        self.cell, self.solver, self.options = cell, solver, options

    def forward(self, x):
        with torch.no_grad():
            z, self.forward_residuals = self.solver(lambda z: self.cell(z, x), torch.zeros_like(x), **self.options)
        z = self.cell(z, x)
        if not z.requires_grad:
            return z
        z0 = z.clone().detach().requires_grad_()
        f0 = self.cell(z0, x)

        def backward_hook(grad):
            solution, self.backward_residuals = self.solver(
                lambda y: torch.autograd.grad(f0, z0, y, retain_graph=True)[0] + grad, grad, **self.options
            )
            return solution

        z.register_hook(backward_hook)
        return z


def equilibrium_classifier(change):
    """Training of a deep equilibrium model, which classifies small images."""
    channels, side, classes = size(48, 16), size(32, 16), 10
    batch_size = size(128, 4)
    dataset = ShiftedImages(size(10000, 64), side, classes)
    loader = DataLoader(dataset, batch_size=batch_size, shuffle=True, drop_last=True)
    batches = images_on_device(dataset, batch_size) if change == "device_data" else endless(loader)
    torch.manual_seed(0)
    cell = EquilibriumCell(channels, size(64, 16), half=change == "bf16")
    model = nn.Sequential(
        nn.Conv2d(3, channels, 3, padding=1),
        nn.BatchNorm2d(channels),
        EquilibriumLayer(cell, anderson, tol=1e-2, max_iter=25, m=5, change=change),
        nn.BatchNorm2d(channels),
        nn.AvgPool2d(8, 8),
        nn.Flatten(),
        nn.Linear(channels * (side // 8) ** 2, classes),
    ).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    history = collections.deque(maxlen=100)

    def step():
        model.train()
        images, labels = next(batches)
        images, labels = images.to(device), labels.to(device)
        logits = model(images)
        loss = F.cross_entropy(logits, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        history.append((loss.item(), (logits.argmax(dim=1) == labels).float().mean().item()))
        return loss.detach()

    return step


class FallingThings:
    """Many games at once: catch what is good and dodge what is bad. Observations are four stacked frames."""

    actions = 3

    def __init__(self, games, cells, scale, seed=0):
        self.random = np.random.default_rng(seed)
        self.games, self.cells, self.scale, self.things = games, cells, scale, 6
        self.player = np.full(games, cells // 2)
        self.x = self.random.integers(0, cells, (games, self.things))
        self.y = self.random.integers(0, cells, (games, self.things))
        self.good = self.random.random((games, self.things)) < 0.6
        self.lives = np.full(games, 3)
        self.stack = np.zeros((games, 4, cells * scale, cells * scale), dtype=np.uint8)
        self.stack[:] = self.render()[:, None]

    def render(self):
        grid = np.zeros((self.games, self.cells, self.cells), dtype=np.uint8)
        game = np.arange(self.games)
        grid[game[:, None], self.y, self.x] = np.where(self.good, 120, 200)
        for shift in (-1, 0, 1):
            grid[game, -1, np.clip(self.player + shift, 0, self.cells - 1)] = 255
        return grid.repeat(self.scale, axis=1).repeat(self.scale, axis=2)

    def step(self, actions):
        self.player = np.clip(self.player + actions - 1, 0, self.cells - 1)
        self.y = self.y + 1
        landed = self.y >= self.cells - 1
        caught = landed & (np.abs(self.x - self.player[:, None]) <= 1)
        reward = (caught & self.good).sum(1) - (caught & ~self.good).sum(1)
        self.lives = self.lives - (caught & ~self.good).any(1)
        done = self.lives <= 0
        self.x = np.where(landed, self.random.integers(0, self.cells, self.x.shape), self.x)
        self.good = np.where(landed, self.random.random(self.x.shape) < 0.6, self.good)
        self.y = np.where(landed, 0, self.y)
        self.lives[done] = 3
        frame = self.render()
        self.stack = np.concatenate([self.stack[:, 1:], frame[:, None]], axis=1)
        self.stack[done] = frame[done][:, None]
        return self.stack, reward.astype(np.float32), done.astype(np.float32)


class SumTree:
    """A binary tree of sums over priorities."""

    def __init__(self, capacity):
        self.capacity = capacity
        self.tree = np.zeros(2 * capacity - 1)

    def total(self):
        return self.tree[0]

    def update(self, index, priority):
        node = index + self.capacity - 1
        delta = priority - self.tree[node]
        self.tree[node] = priority
        while node != 0:
            node = (node - 1) // 2
            self.tree[node] += delta

    def get(self, value):
        node = 0
        while node < self.capacity - 1:
            left = 2 * node + 1
            if value <= self.tree[left]:
                node = left
            else:
                value -= self.tree[left]
                node = left + 1
        return node - (self.capacity - 1), self.tree[node]

    def update_all(self, indices, priorities):
        nodes = indices + self.capacity - 1
        self.tree[nodes] = priorities
        while nodes[0] != 0:
            nodes = np.unique((nodes - 1) // 2)
            self.tree[nodes] = self.tree[2 * nodes + 1] + self.tree[2 * nodes + 2]

    def get_all(self, values):
        nodes = np.zeros(len(values), dtype=np.int64)
        while nodes[0] < self.capacity - 1:
            left = 2 * nodes + 1
            right = values > self.tree[left]
            values = np.where(right, values - self.tree[left], values)
            nodes = left + right
        return nodes - (self.capacity - 1), self.tree[nodes]


class PrioritizedReplay:
    """Transitions over n steps, drawn in proportion to their priorities."""

    def __init__(self, capacity, shape, change, alpha=0.5, beta=0.4):
        self.capacity, self.change, self.alpha, self.beta = capacity, change, alpha, beta
        self.tree = SumTree(capacity)
        if change == "device_replay":
            self.states = torch.zeros((capacity, *shape), dtype=torch.uint8, device=device)
            self.next_states = torch.zeros((capacity, *shape), dtype=torch.uint8, device=device)
        else:
            self.states = np.zeros((capacity, *shape), dtype=np.uint8)
            self.next_states = np.zeros((capacity, *shape), dtype=np.uint8)
        self.actions = np.zeros(capacity, dtype=np.int64)
        self.rewards = np.zeros(capacity, dtype=np.float32)
        self.dones = np.zeros(capacity, dtype=np.float32)
        self.position, self.count, self.highest = 0, 0, 1.0
        self.random = np.random.default_rng(0)

    def add(self, states, actions, rewards, next_states, dones):
        where = (self.position + np.arange(len(actions))) % self.capacity
        if self.change == "device_replay":
            rows = torch.from_numpy(where).to(device)
            self.states[rows] = torch.from_numpy(states).to(device)
            self.next_states[rows] = torch.from_numpy(next_states).to(device)
        else:
            self.states[where], self.next_states[where] = states, next_states
        self.actions[where], self.rewards[where], self.dones[where] = actions, rewards, dones
        self.set_priorities(where, np.full(len(where), self.highest**self.alpha))
        self.position = (self.position + len(actions)) % self.capacity
        self.count = min(self.count + len(actions), self.capacity)

    def set_priorities(self, indices, priorities):
        if self.change == "vectorized_tree":
            self.tree.update_all(indices, priorities)
        else:
            for index, priority in zip(indices, priorities, strict=True):
                self.tree.update(index, priority)

    def sample(self, batch_size):
        segment = self.tree.total() / batch_size
        if self.change == "vectorized_tree":
            values = (np.arange(batch_size) + self.random.random(batch_size)) * segment
            indices, priorities = self.tree.get_all(values)
        else:
            indices, priorities = np.zeros(batch_size, dtype=np.int64), np.zeros(batch_size)
            for i in range(batch_size):
                value = self.random.uniform(segment * i, segment * (i + 1))
                indices[i], priorities[i] = self.tree.get(value)
        weights = (self.count * priorities / self.tree.total()) ** -self.beta
        weights = (weights / weights.max()).astype(np.float32)
        rows = torch.from_numpy(indices).to(device) if self.change == "device_replay" else indices
        batch = self.states[rows], self.actions[indices], self.rewards[indices], self.next_states[rows]
        return indices, weights, *batch, self.dones[indices]

    def update(self, indices, errors):
        self.highest = max(self.highest, errors.max())
        self.set_priorities(indices, errors**self.alpha)


class DuelingNetwork(nn.Module):
    """The usual convolutions over frames, then a value and advantages."""

    def __init__(self, side, actions, hidden):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(4, 32, 8, stride=4), nn.ReLU(),
            nn.Conv2d(32, 64, 4, stride=2), nn.ReLU(),
            nn.Conv2d(64, 64, 3, stride=1), nn.ReLU(), nn.Flatten(),
        )  # fmt: skip
        width = self.features(torch.zeros(1, 4, side, side)).shape[1]
        self.value = nn.Sequential(nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, 1))
        self.advantage = nn.Sequential(nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, actions))

    def forward(self, frames):
        features = self.features(frames)
        advantage = self.advantage(features)
        return self.value(features) + advantage - advantage.mean(dim=1, keepdim=True)


def replay_player(change):
    """A Rainbow-like agent learns a game: four moves in each of many games, with an update after each."""
    games, cells, scale, n_steps, gamma = size(16, 4), size(21, 11), 4, 3, 0.99
    batch_size = size(128, 8)
    env = FallingThings(games, cells, scale)
    torch.manual_seed(0)
    online = DuelingNetwork(cells * scale, env.actions, size(512, 32)).to(device)
    target = DuelingNetwork(cells * scale, env.actions, size(512, 32)).to(device)
    target.load_state_dict(online.state_dict())
    optimizer = torch.optim.Adam(online.parameters(), lr=6.25e-5, eps=1.5e-4)
    replay = PrioritizedReplay(size(16384, 256), env.stack.shape[1:], change)
    window = collections.deque(maxlen=n_steps)
    random = np.random.default_rng(1)
    updates = 0

    def to_input(states):
        if torch.is_tensor(states):
            return states.float() / 255.0
        if change == "uint8_transfer":
            return torch.from_numpy(states).to(device).float() / 255.0
        return torch.tensor(states, dtype=torch.float32, device=device) / 255.0

    def act(states, epsilon):
        with torch.no_grad():
            actions = online(to_input(states)).argmax(dim=1).cpu().numpy()
        explore = random.random(games) < epsilon
        return np.where(explore, random.integers(0, env.actions, games), actions)

    def remember(states, actions):
        next_states, rewards, dones = env.step(actions)
        window.append((states, actions, rewards, dones))
        if len(window) == n_steps:
            total, ended = np.zeros(games, dtype=np.float32), np.zeros(games, dtype=np.float32)
            for i, (_, _, reward, done) in enumerate(window):
                total += gamma**i * reward * (1 - ended)
                ended = np.maximum(ended, done)
            replay.add(window[0][0], window[0][1], total, next_states, ended)
        return next_states

    def learn():
        indices, weights, states, actions, rewards, next_states, dones = replay.sample(batch_size)
        states, next_states = to_input(states), to_input(next_states)
        actions = torch.tensor(actions, device=device).unsqueeze(1)
        rewards = torch.tensor(rewards, device=device)
        dones = torch.tensor(dones, device=device)
        weights = torch.tensor(weights, device=device)
        with bf16(change == "bf16"):
            q = online(states).gather(1, actions).squeeze(1).float()
        with torch.no_grad(), bf16(change == "bf16"):
            best = online(next_states).argmax(dim=1, keepdim=True)
            future = target(next_states).gather(1, best).squeeze(1).float()
        expected = rewards + gamma**n_steps * (1 - dones) * future
        loss = (weights * F.smooth_l1_loss(q, expected, reduction="none")).mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(online.parameters(), 10.0)
        optimizer.step()
        replay.update(indices, (q - expected).abs().detach().cpu().numpy().astype(np.float64) + 1e-6)
        return loss.detach()

    states = env.stack
    for _ in range(size(4096, 128) // games):
        states = remember(states, random.integers(0, env.actions, games))

    def step():
        nonlocal states, updates
        losses = []
        for _ in range(4):
            states = remember(states, act(states, epsilon=0.1))
            losses.append(learn())
            updates += 1
            if updates % 500 == 0:
                target.load_state_dict(online.state_dict())
        return torch.stack(losses)

    return step


class MemoryMachine(nn.Module):
    """A differentiable neural computer: an LSTM that writes to and reads from a memory of vectors."""

    def __init__(self, inputs, outputs, hidden, slots, width, heads, change):
        super().__init__()
        self.hidden, self.slots, self.width, self.heads, self.change = hidden, slots, width, heads, change
        self.controller = nn.LSTMCell(inputs + heads * width, hidden)
        sizes = {
            "read_keys": heads * width, "read_strengths": heads, "write_key": width, "write_strength": 1,
            "erase": width, "write": width, "free_gates": heads, "allocation_gate": 1, "write_gate": 1,
            "read_modes": 3 * heads,
        }  # fmt: skip
        self.interface = nn.ModuleDict({name: nn.Linear(hidden, number) for name, number in sizes.items()})
        self.output = nn.Linear(hidden + heads * width, outputs)
        if change == "one_interface":
            layers = list(self.interface.values())
            self.interface = nn.Linear(hidden, sum(sizes.values()))
            self.interface.weight.data = torch.cat([layer.weight.data for layer in layers])
            self.interface.bias.data = torch.cat([layer.bias.data for layer in layers])
        self.sizes = sizes

    def initial(self, batch):
        def zeros(*shape):
            return torch.zeros(batch, *shape, device=device)

        return {
            "hidden": (zeros(self.hidden), zeros(self.hidden)), "memory": zeros(self.slots, self.width) + 1e-6,
            "usage": zeros(self.slots), "precedence": zeros(self.slots), "link": zeros(self.slots, self.slots),
            "write": zeros(self.slots), "reads": zeros(self.heads, self.slots),
            "vectors": zeros(self.heads, self.width),
        }  # fmt: skip

    def content(self, memory, keys, strengths):
        """Return weights over the slots for keys (batch, heads, width)."""
        memory = memory / (memory.norm(dim=2, keepdim=True) + 1e-6)
        keys = keys / (keys.norm(dim=2, keepdim=True) + 1e-6)
        return torch.softmax(torch.bmm(keys, memory.transpose(1, 2)) * strengths.unsqueeze(2), dim=2)

    def allocation(self, usage):
        usage = 1e-6 + (1 - 1e-6) * usage
        ascending, order = torch.sort(usage, dim=1)
        if self.change == "graph":  # The backward passes of cumprod and prod ask the CPU whether there are zeros.
            products = torch.exp(torch.cumsum(torch.log(ascending), dim=1))
        else:
            products = torch.cumprod(ascending, dim=1)
        before = torch.cat([torch.ones_like(products[:, :1]), products[:, :-1]], dim=1)
        return torch.zeros_like(usage).scatter(1, order, ((1 - ascending) * before).to(usage.dtype))

    def tick(self, x, s):
        batch = x.shape[0]
        hidden = self.controller(torch.cat([x, s["vectors"].flatten(1)], dim=1), s["hidden"])
        h = hidden[0]
        if self.change == "one_interface":
            p = dict(zip(self.sizes, self.interface(h).split(list(self.sizes.values()), dim=1), strict=True))
        else:
            p = {name: layer(h) for name, layer in self.interface.items()}
        read_keys = p["read_keys"].view(batch, self.heads, self.width)
        read_strengths = 1 + F.softplus(p["read_strengths"])
        write_strength = 1 + F.softplus(p["write_strength"])
        modes = torch.softmax(p["read_modes"].view(batch, self.heads, 3), dim=2)
        free = torch.sigmoid(p["free_gates"])

        kept = 1 - free.unsqueeze(2) * s["reads"]
        retention = math.prod(kept.unbind(dim=1)) if self.change == "graph" else torch.prod(kept, dim=1)
        usage = (s["usage"] + s["write"] - s["usage"] * s["write"]) * retention
        allocated = self.allocation(usage)
        similar = self.content(s["memory"], p["write_key"].unsqueeze(1), write_strength).squeeze(1)
        gate = torch.sigmoid(p["allocation_gate"])
        write = torch.sigmoid(p["write_gate"]) * (gate * allocated + (1 - gate) * similar)
        erase, vector = torch.sigmoid(p["erase"]), torch.tanh(p["write"])
        memory = s["memory"] * (1 - write.unsqueeze(2) * erase.unsqueeze(1)) + write.unsqueeze(2) * vector.unsqueeze(1)

        link = (1 - write.unsqueeze(2) - write.unsqueeze(1)) * s["link"]
        link = link + write.unsqueeze(2) * s["precedence"].unsqueeze(1)
        link = link * (1 - torch.eye(self.slots, device=device))
        precedence = (1 - write.sum(dim=1, keepdim=True)) * s["precedence"] + write

        if self.change == "batched_heads":
            forward = torch.bmm(s["reads"], link.transpose(1, 2))
            backward = torch.bmm(s["reads"], link)
            found = self.content(memory, read_keys, read_strengths)
            reads = modes[:, :, 0:1] * backward + modes[:, :, 1:2] * found + modes[:, :, 2:3] * forward
            vectors = torch.bmm(reads, memory)
        else:
            reads, vectors = [], []
            for i in range(self.heads):
                previous = s["reads"][:, i].unsqueeze(1)
                forward = torch.bmm(previous, link.transpose(1, 2)).squeeze(1)
                backward = torch.bmm(previous, link).squeeze(1)
                found = self.content(memory, read_keys[:, i : i + 1], read_strengths[:, i : i + 1]).squeeze(1)
                mode = modes[:, i]
                weights = mode[:, 0:1] * backward + mode[:, 1:2] * found + mode[:, 2:3] * forward
                reads.append(weights)
                vectors.append(torch.bmm(weights.unsqueeze(1), memory).squeeze(1))
            reads, vectors = torch.stack(reads, dim=1), torch.stack(vectors, dim=1)
        y = self.output(torch.cat([h, vectors.flatten(1).to(h.dtype)], dim=1))
        return y, {
            "hidden": hidden, "memory": memory, "usage": usage, "precedence": precedence, "link": link,
            "write": write, "reads": reads, "vectors": vectors,
        }  # fmt: skip

    def forward(self, sequence):
        state = self.initial(sequence.shape[1])
        outputs = []
        for x in sequence:
            y, state = self.tick(x, state)
            outputs.append(y)
        return torch.stack(outputs)


def memory_machine(change):
    """Training of a differentiable neural computer to copy sequences of bits."""
    batch, bits, length = size(32, 4), 8, size(19, 3)
    torch.manual_seed(0)
    model = MemoryMachine(bits + 2, bits, size(256, 16), size(128, 8), size(32, 4), size(4, 2), change).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, capturable=change == "graph" and device.type == "cuda")
    random = torch.Generator().manual_seed(0)

    def copy_task():
        pattern = torch.randint(0, 2, (length, batch, bits), generator=random).float()
        inputs = torch.zeros(2 * length + 2, batch, bits + 2)
        inputs[0, :, bits] = 1
        inputs[1 : length + 1, :, :bits] = pattern
        inputs[length + 1, :, bits + 1] = 1
        return inputs, pattern

    def train(inputs, pattern):
        optimizer.zero_grad()
        with bf16(change == "bf16"):
            outputs = model(inputs)[length + 2 :]
        loss = F.binary_cross_entropy_with_logits(outputs.float(), pattern)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 10.0)
        optimizer.step()
        return loss.detach()

    if change == "graph":
        inputs, pattern = (tensor.to(device) for tensor in copy_task())
        random.manual_seed(0)
        replay = graphed_training(lambda: train(inputs, pattern), [model], [optimizer])

        def graphed_step():
            new_inputs, new_pattern = copy_task()
            inputs.copy_(new_inputs)
            pattern.copy_(new_pattern)
            return replay()

        return graphed_step

    def step():
        inputs, pattern = copy_task()
        return train(inputs.to(device), pattern.to(device))

    return step


PROGRAMS = {
    equilibrium_classifier: {
        "cached_gram": "",
        "device_data": "data_loader",
        "bf16": "half_precision",
        "rare_checks": "remove_sync",
    },
    replay_player: {
        "device_replay": "python",
        "vectorized_tree": "python",
        "uint8_transfer": "cpu_tensors",
        "bf16": "half_precision",
    },
    memory_machine: {
        "graph": "cuda_graph",
        "batched_heads": "larger_batch",
        "one_interface": "",
        "bf16": "half_precision",
    },
}
