"""Programs on graphs, tables, series, games and physics."""

import itertools

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from setting import compiled, device, endless, graphed, size, use_tf32
from torch.utils.data import DataLoader, Dataset, TensorDataset


def citation_network(change):
    """A graph attention network of torch_geometric is trained on a whole graph; accuracy is read in each step."""
    from torch_geometric.nn import GATConv

    class Network(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = GATConv(size(300, 16), 16, heads=8, dropout=0.0)
            self.second = GATConv(128, 16, heads=1, concat=False, dropout=0.0)

        def forward(self, x, edges):
            return self.second(F.elu(self.first(F.dropout(x, 0.2, self.training), edges)), edges)

    if change == "tf32":
        use_tf32()
    nodes = size(20_000, 100)
    x, y = torch.randn(nodes, size(300, 16), device=device), torch.randint(0, 16, (nodes,), device=device)
    edges = torch.randint(0, nodes, (2, size(200_000, 500)), device=device)
    train = torch.rand(nodes, device=device) < 0.5
    model = Network().to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3, weight_decay=5e-4, fused=change == "fused" or None)
    run = compiled(model) if change == "compile" else model
    history = []

    def step():
        model.train()
        optimizer.zero_grad()
        out = run(x, edges)
        loss = F.cross_entropy(out[train], y[train])
        loss.backward()
        optimizer.step()
        right = (out.argmax(-1) == y)[train].float().mean()
        history.append((loss.detach(), right) if change == "no_item" else (float(loss.detach()), float(right)))
        return loss

    return step


def molecules(change):
    """A GIN of torch_geometric is trained on batches of small graphs, which the main process puts together."""
    from torch_geometric.data import Data
    from torch_geometric.loader import DataLoader as GraphLoader
    from torch_geometric.nn import GINConv, global_add_pool

    chooser = torch.Generator().manual_seed(2)

    def molecule(number):
        atoms = 12 + number % 20
        edges = torch.randint(0, atoms, (2, 2 * atoms), generator=chooser)
        return Data(x=torch.randn(atoms, 32, generator=chooser), edge_index=edges, y=torch.tensor([float(number % 7)]))

    graphs = [molecule(number) for number in range(size(4096, 64))]
    workers = size(6, 1) if change == "workers" else 0
    batches = endless(GraphLoader(graphs, batch_size=size(256, 16), shuffle=True, drop_last=True, num_workers=workers))

    class GIN(nn.Module):
        def __init__(self, width=128):
            super().__init__()
            self.convs = nn.ModuleList(
                GINConv(
                    nn.Sequential(nn.Linear(before, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, width))
                )
                for before in (32, width, width, width)
            )
            self.out = nn.Linear(width, 1)

        def forward(self, batch):
            h = batch.x
            for conv in self.convs:
                h = conv(h, batch.edge_index).relu()
            return self.out(global_add_pool(h, batch.batch, batch.num_graphs)).squeeze(-1)

    model = GIN().to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=change == "fused" or None)
    kept = [batch.to(device) for _, batch in zip(range(8), batches, strict=False)] if change == "batches_kept" else []
    numbers = iter(range(10**9))
    losses = []

    def step():
        batch = kept[next(numbers) % len(kept)] if kept else next(batches).to(device)
        loss = F.l1_loss(model(batch), batch.y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach() if change == "no_item" else loss.item())
        return loss

    return step


def click_prediction(change):
    """A DLRM-like network: eight bags of embeddings, interactions, and batches in pageable memory."""
    rows, width, count = size(50_000, 100), size(64, 8), size(4096, 32)

    class Clicks(nn.Module):
        def __init__(self):
            super().__init__()
            self.tables = nn.ModuleList(nn.EmbeddingBag(rows, width, mode="sum") for _ in range(8))
            self.dense = nn.Sequential(nn.Linear(13, 256), nn.ReLU(), nn.Linear(256, width), nn.ReLU())
            self.top = nn.Sequential(
                nn.Linear(width + 36, 512), nn.ReLU(), nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, 1)
            )
            self.register_buffer("below", torch.tril_indices(9, 9, -1))

        def forward(self, numbers, bags):
            dense = self.dense(numbers)
            vectors = torch.stack([dense, *(table(bag) for table, bag in zip(self.tables, bags, strict=True))], 1)
            products = torch.bmm(vectors, vectors.transpose(1, 2))[:, self.below[0], self.below[1]]
            return self.top(torch.cat([dense, products], 1)).squeeze(1)

    model = Clicks().to(device)
    batches = [
        (torch.randn(count, 13), [torch.randint(0, rows, (count, 4)) for _ in range(8)], torch.rand(count).round())
        for _ in range(4)
    ]
    if change == "pinned" and device.type == "cuda":
        batches = [(a.pin_memory(), [one.pin_memory() for one in b], c.pin_memory()) for a, b, c in batches]
    wait = {"non_blocking": change == "pinned"}
    if change == "sgd":
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    else:
        optimizer = torch.optim.Adagrad(model.parameters(), lr=0.01, fused=change == "fused" or None)
    numbers = iter(range(10**9))
    run = compiled(model) if change == "compile" else model

    def step():
        dense, bags, clicked = batches[next(numbers) % 4]
        dense, clicked = dense.to(device, **wait), clicked.to(device, **wait)
        bags = list(torch.stack(bags).to(device)) if change == "one_copy" else [bag.to(device, **wait) for bag in bags]
        loss = F.binary_cross_entropy_with_logits(run(dense, bags), clicked)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return step


def game_player(change):
    """An actor plays 16 games on the CPU for 32 moves: observations go to the GPU, actions come back each time."""
    games, moves, seen = 16, size(32, 3), 64
    policy = nn.Sequential(nn.Linear(seen, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 6)).to(
        device
    )
    value = nn.Sequential(nn.Linear(seen, 256), nn.Tanh(), nn.Linear(256, 1)).to(device)
    random = np.random.default_rng(0)
    dynamics = random.standard_normal((seen, seen)).astype(np.float32) / 8
    state = [random.standard_normal((games, seen)).astype(np.float32)]
    run = compiled(policy) if change == "compile" else policy
    seen_now = torch.zeros(games, seen, device=device)

    def act_on(observations):
        chances = torch.distributions.Categorical(logits=run(observations), validate_args=change != "unvalidated")
        action = chances.sample()
        return action, chances.log_prob(action), value(observations).squeeze(-1)

    replayed = torch.no_grad()(lambda: act_on(seen_now))
    if change == "graph" and device.type == "cuda":
        replayed = graphed(torch.no_grad()(lambda: _sampled(policy(seen_now), value(seen_now))))

    def act(observations):
        if change != "graph":
            return act_on(observations)
        seen_now.copy_(observations)
        return replayed()

    def play():
        kept = []
        for _ in range(moves):
            observations = torch.from_numpy(state[0]).to(device)
            action, chance, worth = act(observations)
            chosen = action.cpu().numpy()
            kept.append((chance.detach().cpu().numpy(), worth.detach().cpu().numpy()))
            state[0] = np.tanh(state[0] @ dynamics + chosen[:, None] * 0.1).astype(np.float32)
        return torch.from_numpy(np.stack([worth for _, worth in kept]))

    return torch.no_grad()(play) if change == "no_grad" else play


def _sampled(logits, worth):
    """Return what a Categorical gives, without its checks, which read values and so cannot be in a CUDA graph."""
    logits = logits.log_softmax(-1)
    noise = -torch.empty_like(logits).exponential_().log()
    action = (logits + noise).argmax(-1)
    return action, logits.gather(-1, action[:, None]).squeeze(-1), worth.squeeze(-1)


def soft_actor_critic(change):
    """SAC: an update of two critics, the policy and the temperature from a replay buffer in numpy."""
    seen, acts, width, count = 24, 6, 256, size(256, 8)

    def network(before, after):
        return nn.Sequential(
            nn.Linear(before, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, after)
        ).to(device)

    policy, critics = network(seen, 2 * acts), [network(seen + acts, 1) for _ in range(2)]
    targets = [network(seen + acts, 1).requires_grad_(False) for _ in range(2)]
    temperature = torch.zeros(1, device=device, requires_grad=True)
    adam = {"lr": 3e-4, "fused": change == "fused" or None}
    of_policy = torch.optim.Adam(policy.parameters(), **adam)
    of_critics = torch.optim.Adam([one for critic in critics for one in critic.parameters()], **adam)
    of_temperature = torch.optim.Adam([temperature], **adam)
    random = np.random.default_rng(0)
    buffer = [random.standard_normal((50_000, wide)).astype(np.float32) for wide in (seen, acts, 1, seen)]
    if change == "buffer_on_gpu":
        buffer = [torch.from_numpy(one).to(device) for one in buffer]
    log = []

    def sample():
        if change == "buffer_on_gpu":
            rows = torch.randint(0, 50_000, (count,), device=device)
            return [one[rows] for one in buffer]
        rows = random.integers(0, 50_000, count)
        return [torch.as_tensor(one[rows]).to(device) for one in buffer]

    def act(state):
        mean, spread = policy(state).chunk(2, -1)
        normal = torch.distributions.Normal(mean, spread.clamp(-5, 2).exp())
        raw = normal.rsample()
        action = torch.tanh(raw)
        return action, (normal.log_prob(raw) - torch.log(1 - action.pow(2) + 1e-6)).sum(-1, keepdim=True)

    def learn(state, action, reward, after):
        with torch.no_grad():
            next_action, chance = act(after)
            worth = torch.min(*(one(torch.cat([after, next_action], -1)) for one in targets))
            goal = reward + 0.99 * (worth - temperature.exp() * chance)
        both = torch.cat([state, action], -1)
        critic_loss = sum(F.mse_loss(critic(both), goal) for critic in critics)
        of_critics.zero_grad()
        critic_loss.backward()
        of_critics.step()
        chosen, chance = act(state)
        worth = torch.min(*(critic(torch.cat([state, chosen], -1)) for critic in critics))
        policy_loss = (temperature.exp().detach() * chance - worth).mean()
        of_policy.zero_grad()
        policy_loss.backward()
        of_policy.step()
        of_temperature.zero_grad()
        (-temperature * (chance.detach() - acts)).mean().backward()
        of_temperature.step()
        with torch.no_grad():
            for target, critic in zip(targets, critics, strict=True):
                for mine, its in zip(target.parameters(), critic.parameters(), strict=True):
                    mine.data.mul_(0.995).add_(0.005 * its.data)
        return critic_loss, policy_loss

    def step():
        losses = learn(*sample())
        log.append([one.detach() if change == "no_item" else one.item() for one in losses])
        return losses[0]

    return step


def normalizing_flow(change):
    """A RealNVP of eight couplings learns a density of tabular data."""
    width, count = size(64, 6), size(512, 16)
    if change == "tf32":
        use_tf32()

    class Coupling(nn.Module):
        def __init__(self, flip):
            super().__init__()
            self.flip, half, hidden = flip, width // 2, size(256, 8)
            self.net = nn.Sequential(
                nn.Linear(half, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 2 * half)
            )

        def forward(self, x):
            a, b = x.chunk(2, -1)
            if self.flip:
                a, b = b, a
            scale, shift = self.net(a).chunk(2, -1)
            scale = 2 * torch.tanh(scale / 2)
            b = b * scale.exp() + shift
            return torch.cat([b, a] if self.flip else [a, b], -1), scale.sum(-1)

    class Flow(nn.Module):
        def __init__(self):
            super().__init__()
            self.couplings = nn.ModuleList(Coupling(number % 2 == 1) for number in range(8))

        def forward(self, x):
            volume = 0
            for coupling in self.couplings:
                x, more = coupling(x)
                volume = volume + more
            return x, volume

    flow = Flow().to(device)
    optimizer = torch.optim.Adam(
        flow.parameters(),
        lr=1e-4,
        fused=change == "fused" or None,
        capturable=change == "graph" and device.type == "cuda",
    )
    x = torch.randn(count * (2 if change == "batch_x2" else 1), width, device=device)
    run = compiled(flow) if change == "compile" else flow
    prior = torch.distributions.Normal(
        torch.zeros((), device=device), torch.ones((), device=device), validate_args=False
    )

    def step():
        z, volume = run(x)
        loss = -(prior.log_prob(z).sum(-1) + volume).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return graphed(step) if change == "graph" else step


def neural_ode(change):
    """A neural ODE is solved by Runge-Kutta steps in a Python loop and trained through the solver."""
    count, width = size(256, 8), size(128, 8)

    class Field(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(
                nn.Linear(9, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 8)
            )

        def forward(self, t, y):
            return self.net(torch.cat([y, t.expand(len(y), 1)], -1))

    field = Field().to(device)
    optimizer = torch.optim.Adam(
        field.parameters(),
        lr=1e-3,
        fused=change == "fused" or None,
        capturable=change == "graph" and device.type == "cuda",
    )
    start, goal = torch.randn(2, count * (2 if change == "batch_x2" else 1), 8, device=device)
    run = compiled(field) if change == "compile" else field
    times = torch.linspace(0, 1, size(13, 3), device=device)

    def step():
        y = start
        for t, after in itertools.pairwise(times):
            h = after - t
            k1 = run(t, y)
            k2 = run(t + h / 2, y + h / 2 * k1)
            k3 = run(t + h / 2, y + h / 2 * k2)
            k4 = run(after, y + h * k3)
            y = y + h / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
        loss = F.mse_loss(y, goal)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return graphed(step) if change == "graph" else step


def series_forecast(change):
    """A transformer of PyTorch's layers forecasts series that a DataLoader collects item by item."""
    width, length, count = size(128, 16), size(96, 8), size(256, 8)

    class Series(Dataset):
        def __init__(self):
            self.values = torch.randn(20_000, 7)

        def __len__(self):
            return len(self.values) - 2 * length

        def __getitem__(self, index):
            window = self.values[index : index + 2 * length]
            return window[:length], window[length:, 0]

    class Forecaster(nn.Module):
        def __init__(self):
            super().__init__()
            self.inlet, self.places = nn.Linear(7, width), nn.Parameter(torch.zeros(length, width))
            layer = nn.TransformerEncoderLayer(width, size(8, 2), 4 * width, dropout=0.1, batch_first=True)
            self.body, self.outlet = nn.TransformerEncoder(layer, size(3, 1)), nn.Linear(width, 1)

        def forward(self, x):
            return self.outlet(self.body(self.inlet(x) + self.places)).squeeze(-1)

    data = Series()
    if change == "windows_ahead":
        data = TensorDataset(
            *(torch.stack(one) for one in zip(*(data[index] for index in range(4 * count)), strict=True))
        )
    loader = DataLoader(
        data, batch_size=count, shuffle=True, drop_last=True, num_workers=size(6, 1) if change == "workers" else 0,
        persistent_workers=change == "workers",
    )  # fmt: skip
    batches = endless(loader)
    model = Forecaster().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=change == "fused" or None)

    def step():
        x, y = next(batches)
        x, y = x.to(device), y.to(device)
        loss = F.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return step


def gaussian_process(change):
    """Exact Gaussian process regression in float64: the marginal likelihood is maximized with Adam."""
    dtype = torch.float32 if change == "float32" else torch.float64
    count = size(1500, 60)
    x, y = torch.randn(count, 8, device=device).to(dtype), torch.randn(count, device=device).to(dtype)
    scale, noise = (torch.zeros(n, device=device, dtype=dtype, requires_grad=True) for n in (8, 1))
    optimizer = torch.optim.Adam([scale, noise], lr=0.05)
    eye = torch.eye(count, device=device, dtype=dtype)
    history = []

    def step():
        scaled = x * torch.exp(-scale)
        distance = (scaled[:, None] - scaled[None]).square().sum(-1) if change != "products" else (
            scaled.square().sum(-1)[:, None] + scaled.square().sum(-1)[None] - 2 * scaled @ scaled.T
        ).clamp(min=0)  # fmt: skip
        covariance = torch.exp(-0.5 * distance) + (F.softplus(noise) + 1e-2) * eye
        root = torch.linalg.cholesky_ex(covariance)[0] if change == "no_sync" else torch.linalg.cholesky(covariance)
        white = torch.cholesky_solve(y[:, None], root)
        loss = (0.5 * (y[:, None] * white).sum() + root.diagonal().log().sum()) / count
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        history.append(loss.detach() if change == "no_sync" else loss.item())
        return loss

    return step


def neighbor_search(change):
    """The ten nearest of many vectors are found for batches of queries by cdist and topk, which go to the CPU."""
    if change == "tf32":
        use_tf32()
    dtype = torch.bfloat16 if change == "half" else torch.float32
    stored = torch.randn(size(100_000, 500), 128, device=device).to(dtype)
    queries = torch.randn(8, size(128, 4), 128)

    def search(batch):
        scores = 2 * batch @ stored.T - stored.square().sum(-1)
        return scores.topk(10).indices

    run = compiled(search) if change == "compile" else search

    @torch.no_grad()
    def step():
        if change == "at_once":
            found = run(queries.flatten(0, 1).to(device, dtype)).cpu()
        else:
            found = torch.cat([run(batch.to(device, dtype)).cpu() for batch in queries])
        return found.float()

    return step


def request_server(change):
    """A server answers one request after another: a small transformer reads a row of numbers and sends back scores."""
    layer = nn.TransformerEncoderLayer(256, 8, 1024, dropout=0.0, batch_first=True, norm_first=True)
    body = nn.TransformerEncoder(layer, size(6, 1), enable_nested_tensor=False)
    model = nn.Sequential(nn.Linear(16, 256), body, nn.Linear(256, 10)).to(device)
    model.eval()
    rows = np.random.default_rng(0).standard_normal((2 if change == "batch_x2" else 1, 32, 16)).astype(np.float32)
    if change == "compile":
        model = compiled(model, mode="reduce-overhead")
    fixed = torch.zeros(rows.shape, device=device)
    replayed = graphed(torch.no_grad()(lambda: model(fixed))) if change == "graph" else None

    @torch.no_grad()
    def answer():
        x = torch.from_numpy(rows).to(device)
        if replayed:
            fixed.copy_(x)
            out = replayed()
        else:
            out = model(x)
        return out.float().mean(1).softmax(-1).detach().cpu()

    return answer


def pair_representation(change):
    """Row attention with a bias over a pair representation, written with einsum as in models of proteins, in fp32."""
    if change == "tf32":
        use_tf32()
    length, width, heads = size(192, 8), size(128, 16), 4

    class RowAttention(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.qkv = nn.LayerNorm(width), nn.Linear(width, 3 * width, bias=False)
            self.bias, self.gate, self.out = nn.Linear(width, heads), nn.Linear(width, width), nn.Linear(width, width)

        def forward(self, pair):
            x = self.norm(pair)
            q, k, v = self.qkv(x).unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4)
            bias = self.bias(x).permute(2, 0, 1)[None]
            if change == "sdpa":
                mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=bias.expand(len(q), -1, -1, -1)).transpose(
                    1, 2
                )
            else:
                scores = torch.einsum("rhqc,rhkc->rhqk", q, k) * q.shape[-1] ** -0.5 + bias
                mixed = torch.einsum("rhqk,rhkc->rqhc", scores.softmax(-1), v)
            return pair + self.out(torch.sigmoid(self.gate(x)) * mixed.flatten(2))

    model = nn.Sequential(*(RowAttention() for _ in range(size(4, 1)))).to(device).eval()
    pair = torch.randn(length, length, width, device=device)
    run = compiled(model) if change == "compile" else model

    @torch.no_grad()
    def step():
        with torch.autocast(device.type, torch.bfloat16, enabled=change == "bf16"):
            return run(pair)

    return step


PROGRAMS = {
    citation_network: {"no_item": "remove_sync", "fused": "fused_optimizer", "tf32": "tf32",
                       "compile": "fuse_pointwise"},
    molecules: {"workers": "data_loader", "batches_kept": "", "fused": "fused_optimizer",
                "no_item": "remove_sync"},
    click_prediction: {"pinned": "overlap_copies", "one_copy": "", "sgd": "", "compile": "fuse_pointwise"},
    game_player: {"no_grad": "no_autograd", "unvalidated": "remove_sync", "graph": "cuda_graph",
                  "compile": "fuse_pointwise"},
    soft_actor_critic: {"buffer_on_gpu": "python", "fused": "fused_optimizer", "no_item": "remove_sync"},
    normalizing_flow: {"fused": "fused_optimizer", "graph": "cuda_graph", "compile": "fuse_pointwise",
                       "batch_x2": ("double_batch", 2)},
    neural_ode: {"graph": "cuda_graph", "compile": "fuse_pointwise", "batch_x2": ("double_batch", 2)},
    series_forecast: {"workers": "data_loader", "windows_ahead": "", "fused": "fused_optimizer"},
    gaussian_process: {"float32": "single_precision", "products": "", "no_sync": "remove_sync"},
    neighbor_search: {"tf32": "tf32", "half": "half_precision", "at_once": "larger_batch",
                      "compile": "fuse_pointwise"},
    request_server: {"graph": "cuda_graph", "compile": "cuda_graph",
                     "batch_x2": ("double_batch", 2)},
    pair_representation: {"tf32": "tf32", "bf16": "half_precision", "sdpa": "fused_attention",
                          "compile": "fuse_pointwise"},
}  # fmt: skip
