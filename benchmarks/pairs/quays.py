"""Trainings and a simulation: molecular dynamics, a fusion forecaster, molecules as graphs, a learned image codec."""

import math

import numpy as np
import torch
import torch.nn.functional as F
from setting import bf16, device, endless, graphed, graphed_training, size
from torch import nn
from torch.utils.data import DataLoader, Dataset


class FilterInteraction(nn.Module):
    """One continuous-filter convolution: messages from neighbors, weighted by a network of the distance."""

    def __init__(self, hidden, radial):
        super().__init__()
        self.filter = nn.Sequential(nn.Linear(radial, hidden), nn.SiLU(), nn.Linear(hidden, hidden))
        self.incoming = nn.Linear(hidden, hidden, bias=False)
        self.update = nn.Sequential(nn.Linear(hidden, hidden), nn.SiLU(), nn.Linear(hidden, hidden))

    def forward(self, features, source, target, radial, envelope):
        weights = self.filter(radial) * envelope[:, None]
        messages = self.incoming(features)[source] * weights
        gathered = torch.zeros_like(features).index_add(0, target, messages)
        return features + self.update(gathered)


class NeuralPotential(nn.Module):
    """A SchNet-like potential with a repulsive prior. It returns the energy of the whole system in eV."""

    def __init__(self, hidden, blocks, radial, cutoff):
        super().__init__()
        self.cutoff = cutoff
        self.embedding = nn.Embedding(10, hidden)
        self.blocks = nn.ModuleList([FilterInteraction(hidden, radial) for _ in range(blocks)])
        self.readout = nn.Sequential(nn.Linear(hidden, hidden // 2), nn.SiLU(), nn.Linear(hidden // 2, 1))
        self.register_buffer("centers", torch.linspace(0.5, cutoff, radial))
        self.width = (cutoff - 0.5) / radial

    def forward(self, species, positions, box, source, target):
        vectors = positions[target] - positions[source]
        vectors = vectors - box * torch.round(vectors / box)
        distances = vectors.norm(dim=-1)
        envelope = 0.5 * (torch.cos(math.pi * distances / self.cutoff) + 1.0) * (distances < self.cutoff)
        radial = torch.exp(-0.5 * ((distances[:, None] - self.centers) / self.width) ** 2)
        features = self.embedding(species)
        for block in self.blocks:
            features = block(features, source, target, radial, envelope)
        repulsion = 0.5 * (0.05 * (2.2 / distances) ** 12 * envelope).sum()
        return self.readout(features).sum() + repulsion


def neighbors_numpy(positions, box, cutoff):
    """Return the source and target atoms of all pairs within the cutoff in a periodic cube."""
    points = positions.cpu().numpy().astype(np.float64)
    difference = points[None, :, :] - points[:, None, :]
    difference -= box * np.round(difference / box)
    distance = np.sqrt((difference**2).sum(-1))
    np.fill_diagonal(distance, np.inf)
    target, source = np.nonzero(distance < cutoff)
    return torch.from_numpy(source).to(device), torch.from_numpy(target).to(device)


def squared_distances(positions, box):
    """Return the squared distances of all atoms to all others, infinite to themselves."""
    difference = positions[None, :, :] - positions[:, None, :]
    difference = difference - box * torch.round(difference / box)
    squares = (difference**2).sum(-1)
    return squares.masked_fill_(torch.eye(len(positions), dtype=torch.bool, device=positions.device), math.inf)


def neural_dynamics(change):
    """Langevin dynamics of a periodic box of atoms in a neural potential. A step is ten time steps."""
    side, spacing, cutoff, temperature, friction, timestep = size(7, 4), 2.6, size(50, 40) / 10, 0.02585, 0.01, 0.5
    time_steps, box, most_neighbors = size(10, 3), side * spacing, size(64, 48)
    to_acceleration = 9.6485e-3  # from eV / (Angstrom amu) to Angstrom / fs^2
    grid = torch.stack(torch.meshgrid(*[torch.arange(side)] * 3, indexing="ij"), -1).reshape(-1, 3)
    positions = ((grid + 0.5) * spacing + 0.05 * torch.randn(grid.shape)).to(device)
    species = torch.randint(0, 4, (len(grid),)).to(device)
    masses = torch.tensor([12.0, 14.0, 16.0, 28.0], device=device)[species][:, None]
    thermal = (temperature * to_acceleration / masses).sqrt()
    velocities = thermal * torch.randn(grid.shape).to(device)
    model = NeuralPotential(size(128, 16), 3, size(50, 8), cutoff).to(device).eval()
    if change == "frozen_weights":
        model.requires_grad_(False)
    keep = math.exp(-friction * timestep)
    kick = math.sqrt(1 - keep**2)
    pairs = None
    skin = 0.6 if change == "verlet_skin" else 0.0

    def find_neighbors(number):
        nonlocal pairs
        if change == "verlet_skin" and number > 0:
            return pairs
        if change == "gpu_neighbors":
            target, source = torch.nonzero(squared_distances(positions, box) < cutoff**2, as_tuple=True)
            pairs = source, target
        elif change == "cuda_graph":
            nearest = squared_distances(positions, box).topk(most_neighbors, largest=False, sorted=False).indices
            target = torch.arange(len(nearest), device=device)[:, None].expand_as(nearest)
            pairs = nearest.reshape(-1), target.reshape(-1)
        else:
            pairs = neighbors_numpy(positions, box, cutoff + skin)
        return pairs

    def compute_forces(number):
        source, target = find_neighbors(number)
        points = positions.detach().requires_grad_(True)
        energy = model(species, points, box, source, target)
        return -torch.autograd.grad(energy, points)[0], energy.detach()

    forces, _ = compute_forces(0)

    def advance():
        energies, temperatures = [], []
        for number in range(time_steps):
            velocities.add_(0.5 * timestep * to_acceleration * forces / masses)
            positions.add_(0.5 * timestep * velocities)
            velocities.mul_(keep).add_(kick * thermal * torch.randn_like(velocities))
            positions.add_(0.5 * timestep * velocities)
            new_forces, energy = compute_forces(number)
            forces.copy_(new_forces)
            velocities.add_(0.5 * timestep * to_acceleration * forces / masses)
            kinetic = 0.5 * (masses * velocities**2).sum() / to_acceleration
            temperature_now = 2 * kinetic / (3 * len(positions)) / 8.617e-5
            if change == "cuda_graph":
                energies.append(energy)
                temperatures.append(temperature_now)
            else:
                energies.append(energy.item())
                temperatures.append(temperature_now.item())
        if change == "cuda_graph":
            return torch.stack(energies), torch.stack(temperatures)
        return torch.tensor(energies), torch.tensor(temperatures)

    if change == "cuda_graph":
        before = [tensor.clone() for tensor in (positions, velocities, forces)]
        advance = graphed(advance)
        for tensor, saved in zip((positions, velocities, forces), before, strict=True):
            tensor.copy_(saved)
    trajectory = []

    def step():
        energies, temperatures = advance()
        trajectory.append((positions.cpu(), temperatures.cpu()))
        return energies / len(positions)

    return step


class GatedResidual(nn.Module):
    """The gated residual network of the Temporal Fusion Transformer, with an optional context."""

    def __init__(self, inputs, hidden, outputs, dropout=0.1, context=False):
        super().__init__()
        self.first = nn.Linear(inputs, hidden)
        self.context = nn.Linear(hidden, hidden, bias=False) if context else None
        self.second = nn.Linear(hidden, hidden)
        self.dropout = nn.Dropout(dropout)
        self.gate = nn.Linear(hidden, 2 * outputs)
        self.skip = nn.Linear(inputs, outputs) if inputs != outputs else nn.Identity()
        self.norm = nn.LayerNorm(outputs)

    def forward(self, x, context=None):
        hidden = self.first(x)
        if self.context is not None:
            hidden = hidden + self.context(context)
        hidden = self.second(F.elu(hidden))
        return self.norm(self.skip(x) + F.glu(self.gate(self.dropout(hidden)), dim=-1))


class StackedResiduals(nn.Module):
    """Several gated residual networks of the same shape, whose weights are stacked; the variables come first."""

    def __init__(self, networks):
        super().__init__()
        for name in ("first", "second", "gate"):
            layers = [getattr(network, name) for network in networks]
            weights = torch.stack([layer.weight.detach().t() for layer in layers]).contiguous()
            setattr(self, name + "_weight", nn.Parameter(weights))
            setattr(self, name + "_bias", nn.Parameter(torch.stack([layer.bias.detach() for layer in layers])[:, None]))
        self.norm_weight = nn.Parameter(torch.stack([network.norm.weight.detach() for network in networks])[:, None])
        self.norm_bias = nn.Parameter(torch.stack([network.norm.bias.detach() for network in networks])[:, None])
        self.dropout = nn.Dropout(networks[0].dropout.p)

    def forward(self, x):
        rows = x.flatten(1, -2)
        hidden = F.elu(torch.baddbmm(self.first_bias, rows, self.first_weight))
        hidden = self.dropout(torch.baddbmm(self.second_bias, hidden, self.second_weight))
        hidden = rows + F.glu(torch.baddbmm(self.gate_bias, hidden, self.gate_weight), dim=-1)
        return (F.layer_norm(hidden, hidden.shape[-1:]) * self.norm_weight + self.norm_bias).view(x.shape)


class VariableSelection(nn.Module):
    """Transform every variable by its own network, and sum them by weights that depend on all of them."""

    def __init__(self, variables, hidden, context=True, stacked=False):
        super().__init__()
        self.weighting = GatedResidual(variables * hidden, hidden, variables, context=context)
        self.networks = nn.ModuleList([GatedResidual(hidden, hidden, hidden) for _ in range(variables)])
        self.stacked = stacked
        if stacked:
            self.networks = StackedResiduals(list(self.networks))

    def forward(self, variables, context=None):
        weights = torch.softmax(self.weighting(torch.cat(variables, dim=-1), context), dim=-1)
        if self.stacked:
            transformed = self.networks(torch.stack(variables))
            return (transformed * weights.movedim(-1, 0)[..., None]).sum(0)
        transformed = [network(variable) for network, variable in zip(self.networks, variables, strict=False)]
        return (torch.stack(transformed, dim=-1) * weights[..., None, :]).sum(-1)


class FusionForecaster(nn.Module):
    """A Temporal Fusion Transformer: quantiles of the future from a history and known future inputs."""

    def __init__(self, numeric, known, categories, hidden, heads, horizon, quantiles, stacked=False):
        super().__init__()
        self.known, self.horizon, self.heads = known, horizon, heads
        self.static_embeddings = nn.ModuleList([nn.Embedding(40, hidden) for _ in range(4)])
        self.time_embeddings = nn.ModuleList([nn.Embedding(count, hidden) for count in categories])
        self.projections = nn.ModuleList([nn.Linear(1, hidden) for _ in range(numeric)])
        self.static_selection = VariableSelection(4, hidden, context=False, stacked=stacked)
        self.past_selection = VariableSelection(numeric + len(categories), hidden, stacked=stacked)
        self.future_selection = VariableSelection(known + len(categories), hidden, stacked=stacked)
        self.contexts = nn.ModuleList([GatedResidual(hidden, hidden, hidden) for _ in range(4)])
        self.encoder = nn.LSTM(hidden, hidden, batch_first=True)
        self.decoder = nn.LSTM(hidden, hidden, batch_first=True)
        self.lstm_gate, self.lstm_norm = nn.Linear(hidden, 2 * hidden), nn.LayerNorm(hidden)
        self.enrichment = GatedResidual(hidden, hidden, hidden, context=True)
        self.queries, self.keys = nn.Linear(hidden, hidden), nn.Linear(hidden, hidden)
        self.values, self.mix = nn.Linear(hidden, hidden // heads), nn.Linear(hidden // heads, hidden)
        self.attention_gate, self.attention_norm = nn.Linear(hidden, 2 * hidden), nn.LayerNorm(hidden)
        self.feedforward = GatedResidual(hidden, hidden, hidden)
        self.output_gate, self.output_norm = nn.Linear(hidden, 2 * hidden), nn.LayerNorm(hidden)
        self.output = nn.Linear(hidden, quantiles)

    def attend(self, x):
        """Return interpretable attention of the future to everything before, with one value for all heads."""
        batch, length, hidden = x.shape
        queries = self.queries(x[:, -self.horizon :]).view(batch, self.horizon, self.heads, -1).transpose(1, 2)
        keys = self.keys(x).view(batch, length, self.heads, -1).transpose(1, 2)
        scores = queries @ keys.transpose(-1, -2) / math.sqrt(hidden // self.heads)
        later = torch.ones(self.horizon, length, dtype=torch.bool, device=x.device)
        later = torch.triu(later, diagonal=length - self.horizon + 1)
        weights = torch.softmax(scores.masked_fill(later, -1e9), dim=-1)
        return self.mix((weights @ self.values(x)[:, None]).mean(1))

    def forward(self, static, numeric, categorical):
        past = numeric.shape[1] - self.horizon
        embedded = [embedding(static[:, i]) for i, embedding in enumerate(self.static_embeddings)]
        summary = self.static_selection(embedded)
        choose, hidden, cell, enrich = (context(summary) for context in self.contexts)
        times = [embedding(categorical[:, :, i]) for i, embedding in enumerate(self.time_embeddings)]
        history = [linear(numeric[:, :past, i : i + 1]) for i, linear in enumerate(self.projections)]
        future = [linear(numeric[:, past:, i : i + 1]) for i, linear in enumerate(self.projections[: self.known])]
        history = self.past_selection(history + [time[:, :past] for time in times], choose[:, None])
        future = self.future_selection(future + [time[:, past:] for time in times], choose[:, None])
        encoded, state = self.encoder(history, (hidden[None].contiguous(), cell[None].contiguous()))
        decoded, _ = self.decoder(future, state)
        local = F.glu(self.lstm_gate(torch.cat([encoded, decoded], dim=1)), dim=-1)
        local = self.lstm_norm(local + torch.cat([history, future], dim=1))
        enriched = self.enrichment(local, enrich[:, None])
        attended = F.glu(self.attention_gate(self.attend(enriched)), dim=-1)
        attended = self.attention_norm(attended + enriched[:, past:])
        result = F.glu(self.output_gate(self.feedforward(attended)), dim=-1)
        return self.output(self.output_norm(result + local[:, past:]))


class SeriesWindows(Dataset):
    """Windows of many series: static and time-varying inputs, and a target scaled by its own history."""

    def __init__(self, static, numeric, categorical, past, horizon):
        self.static, self.numeric, self.categorical = static, numeric, categorical
        self.past, self.length = past, past + horizon
        self.starts = numeric.shape[1] - self.length + 1

    def __len__(self):
        return len(self.numeric) * self.starts

    def __getitem__(self, index):
        series, start = divmod(index, self.starts)
        numeric = self.numeric[series, start : start + self.length].copy()
        target = numeric[:, -1]
        target = (target - target[: self.past].mean()) / (target[: self.past].std() + 1e-3)
        numeric[:, -1] = target
        return {
            "static": torch.from_numpy(self.static[series]),
            "numeric": torch.from_numpy(numeric),
            "categorical": torch.from_numpy(self.categorical[series, start : start + self.length]),
            "target": torch.from_numpy(target[self.past :]),
        }


def fusion_forecaster(change):
    """Train a Temporal Fusion Transformer on windows of synthetic hourly series with a quantile loss."""
    count, length, past, horizon = size(200, 8), size(1500, 80), size(96, 12), size(24, 4)
    numeric_count, known, categories, batch_size = size(20, 5), size(4, 2), (24, 7, 12, 2), size(256, 8)
    random = np.random.default_rng(0)
    hours = np.arange(length)
    calendar = np.stack([hours % 24, hours // 24 % 7, hours // 720 % 12, hours // 24 % 7 > 4], -1)
    categorical = np.broadcast_to(calendar, (count, length, 4)).astype(np.int64)
    numeric = random.standard_normal((count, length, numeric_count), dtype=np.float32)
    numeric[:, :, -1] += 3 * np.sin(hours * 2 * np.pi / 24 + random.uniform(0, 6, (count, 1)))
    static = random.integers(0, 40, (count, 4))
    windows = SeriesWindows(static, numeric, categorical, past, horizon)
    batches = iter(endless(DataLoader(windows, batch_size, shuffle=True, drop_last=True)))
    levels = torch.tensor([0.02, 0.1, 0.25, 0.5, 0.75, 0.9, 0.98], device=device)
    stacked = change == "stacked_networks"
    model = FusionForecaster(numeric_count, known, categories, size(64, 16), 4, horizon, len(levels), stacked)
    model = model.to(device).train()
    capturable = change == "cuda_graph" and device.type == "cuda"
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, capturable=capturable)
    if change == "windows_on_gpu":
        series_on_gpu = [torch.from_numpy(array).to(device) for array in (static, numeric, categorical)]
        offsets = torch.arange(past + horizon, device=device)

    def next_batch():
        if change == "windows_on_gpu":
            index = torch.randint(len(windows), (batch_size, 1), device=device)
            series, times = index // windows.starts, index % windows.starts + offsets
            values = series_on_gpu[1][series, times]
            target = values[:, :, -1]
            spread, mean = torch.std_mean(target[:, :past], dim=1, correction=0, keepdim=True)
            target = (target - mean) / (spread + 1e-3)
            values[:, :, -1] = target
            return {
                "static": series_on_gpu[0][series[:, 0]],
                "numeric": values,
                "categorical": series_on_gpu[2][series, times],
                "target": target[:, past:],
            }
        return {name: value.to(device) for name, value in next(batches).items()}

    def train(batch):
        # The future of the target is no input: only the first `known` numeric variables are read there.
        with bf16(change == "bf16"):
            predicted = model(batch["static"], batch["numeric"], batch["categorical"])
        error = batch["target"][..., None] - predicted.float()
        loss = torch.maximum(levels * error, (levels - 1) * error).sum(-1).mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        return loss.detach()

    if change == "cuda_graph":
        fixed = next_batch()
        replay = graphed_training(lambda: train(fixed), [model], [optimizer])

    history = []

    def step():
        batch = next_batch()
        if change == "cuda_graph":
            for name, value in batch.items():
                fixed[name].copy_(value)
            loss = replay()
        else:
            loss = train(batch)
        history.append(loss.item())
        return loss

    return step


class MoleculeSet(Dataset):
    """Random molecule-like graphs, as Graphormer reads them: atoms, degrees, bonds and shortest paths."""

    def __init__(self, count, smallest, largest, seed=0):
        random = np.random.default_rng(seed)
        self.molecules = []
        for _ in range(count):
            atoms = int(random.integers(smallest, largest + 1))
            parents = [max(0, i - int(random.integers(1, 4))) for i in range(1, atoms)]
            edges = list(zip(range(1, atoms), parents, strict=False))
            edges += [(i, i - 5) for i in range(5, atoms, 7)]
            kinds = random.integers(1, 5, len(edges))
            features = random.integers(0, 16, (atoms, 9)) + 16 * np.arange(9)
            label = np.float32(features[:, 0].mean() / 4 - 2 + 0.1 * random.standard_normal())
            self.molecules.append((features, np.array(edges), kinds, label))

    def __len__(self):
        return len(self.molecules)

    def __getitem__(self, index):
        features, edges, kinds, label = self.molecules[index]
        atoms = len(features)
        bonds = np.zeros((atoms, atoms), dtype=np.int64)
        bonds[edges[:, 0], edges[:, 1]] = kinds
        bonds[edges[:, 1], edges[:, 0]] = kinds
        paths = np.where(bonds > 0, 1, 510)
        np.fill_diagonal(paths, 0)
        for middle in range(atoms):
            paths = np.minimum(paths, paths[:, middle, None] + paths[None, middle, :])
        return {
            "features": torch.from_numpy(features),
            "degrees": torch.from_numpy((bonds > 0).sum(1)),
            "bonds": torch.from_numpy(bonds),
            "paths": torch.from_numpy(np.minimum(paths, 20)),
            "label": float(label),
        }


def collate_molecules(molecules):
    """Pad molecules to the largest one. Index 0 of each feature means padding."""
    most = max(len(molecule["features"]) for molecule in molecules)
    features = torch.zeros(len(molecules), most, 9, dtype=torch.long)
    degrees = torch.zeros(len(molecules), most, dtype=torch.long)
    bonds = torch.zeros(len(molecules), most, most, dtype=torch.long)
    paths = torch.zeros(len(molecules), most, most, dtype=torch.long)
    for i, molecule in enumerate(molecules):
        atoms = len(molecule["features"])
        features[i, :atoms] = molecule["features"] + 1
        degrees[i, :atoms] = molecule["degrees"] + 1
        bonds[i, :atoms, :atoms] = molecule["bonds"] + 1
        paths[i, :atoms, :atoms] = molecule["paths"] + 1
    labels = torch.tensor([molecule["label"] for molecule in molecules])
    return {"features": features, "degrees": degrees, "bonds": bonds, "paths": paths, "labels": labels}


class BiasedAttention(nn.Module):
    """Self-attention with a bias for every pair of atoms."""

    def __init__(self, hidden, heads, dropout, fused):
        super().__init__()
        self.heads, self.dropout, self.fused = heads, dropout, fused
        self.query, self.key = nn.Linear(hidden, hidden), nn.Linear(hidden, hidden)
        self.value, self.out = nn.Linear(hidden, hidden), nn.Linear(hidden, hidden)

    def forward(self, x, bias):
        batch, length, hidden = x.shape
        query = self.query(x).view(batch, length, self.heads, -1).transpose(1, 2)
        key = self.key(x).view(batch, length, self.heads, -1).transpose(1, 2)
        value = self.value(x).view(batch, length, self.heads, -1).transpose(1, 2)
        if self.fused:
            dropout = self.dropout if self.training else 0.0
            result = F.scaled_dot_product_attention(query, key, value, bias.to(query.dtype), dropout)
        else:
            scores = query @ key.transpose(-1, -2) / math.sqrt(hidden // self.heads) + bias
            weights = F.dropout(torch.softmax(scores, dim=-1), self.dropout, self.training)
            result = weights @ value
        return self.out(result.transpose(1, 2).reshape(batch, length, hidden))


class GraphormerLayer(nn.Module):
    """A pre-norm transformer layer with biased attention."""

    def __init__(self, hidden, heads, dropout, fused):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.attention = BiasedAttention(hidden, heads, dropout, fused)
        self.feedforward = nn.Sequential(nn.Linear(hidden, hidden), nn.GELU(), nn.Linear(hidden, hidden))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x, bias):
        x = x + self.dropout(self.attention(self.norm1(x), bias))
        return x + self.dropout(self.feedforward(self.norm2(x)))


class GraphormerRegressor(nn.Module):
    """Graphormer: a transformer over atoms and a graph token, biased by shortest paths and bonds."""

    def __init__(self, hidden, heads, layers, dropout=0.1, fused=False):
        super().__init__()
        self.heads = heads
        self.atoms = nn.Embedding(9 * 16 + 1, hidden, padding_idx=0)
        self.degrees = nn.Embedding(64, hidden, padding_idx=0)
        self.paths = nn.Embedding(22, heads, padding_idx=0)
        self.bonds = nn.Embedding(6, heads, padding_idx=0)
        self.graph_token, self.graph_distance = nn.Embedding(1, hidden), nn.Embedding(1, heads)
        self.layers = nn.ModuleList([GraphormerLayer(hidden, heads, dropout, fused) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(hidden), nn.Linear(hidden, 1)
        for module in self.modules():
            if isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, features, degrees, bonds, paths):
        batch, atoms = degrees.shape
        nodes = self.atoms(features).sum(dim=-2) + self.degrees(degrees)
        x = torch.cat([self.graph_token.weight.expand(batch, 1, -1), nodes], dim=1)
        padding = torch.cat([torch.zeros_like(degrees[:, :1], dtype=torch.bool), degrees == 0], dim=1)
        bias = torch.zeros(batch, self.heads, atoms + 1, atoms + 1, device=x.device)
        bias = bias.masked_fill(padding[:, None, None, :], float("-inf"))
        pair_bias = (self.paths(paths) + self.bonds(bonds)).permute(0, 3, 1, 2)
        bias[:, :, 1:, 1:] = bias[:, :, 1:, 1:] + pair_bias
        distance = self.graph_distance.weight.view(1, self.heads, 1)
        bias[:, :, 1:, 0] = bias[:, :, 1:, 0] + distance
        bias[:, :, 0, :] = bias[:, :, 0, :] + distance
        for layer in self.layers:
            x = layer(x, bias)
        return self.head(self.norm(x[:, 0])).squeeze(-1)


def molecule_graph_transformer(change):
    """Train Graphormer to regress a property of small molecules from padded batches."""
    molecules = MoleculeSet(size(4096, 24), size(14, 6), size(40, 10))
    if change == "cached_items":
        molecules = [molecules[i] for i in range(len(molecules))]
    batch_size = size(128, 4)
    loader = DataLoader(molecules, batch_size, shuffle=True, drop_last=True, collate_fn=collate_molecules)
    batches = iter(endless(loader))
    fused = change == "fused_attention"
    model = GraphormerRegressor(size(768, 32), size(32, 4), size(12, 2), fused=fused).to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-4, weight_decay=0.01)
    warmup = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda number: min(1.0, (number + 1) / 1000))
    total, seen = 0.0, 0

    def step():
        nonlocal total, seen
        batch = {name: value.to(device) for name, value in next(batches).items()}
        with bf16(change == "bf16"):
            predicted = model(batch["features"], batch["degrees"], batch["bonds"], batch["paths"])
        loss = F.l1_loss(predicted.float(), batch["labels"])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        warmup.step()
        if change == "loss_on_gpu":
            total = total + loss.detach() * batch_size
        else:
            total += loss.item() * batch_size
        seen += batch_size
        return loss.detach()

    return step


class LowerBoundFunction(torch.autograd.Function):
    """The maximum of x and a bound, whose gradient also passes where it would raise a value below the bound."""

    @staticmethod
    def forward(ctx, x, bound):
        ctx.save_for_backward(x, bound)
        return torch.max(x, bound)

    @staticmethod
    def backward(ctx, gradient):
        x, bound = ctx.saved_tensors
        return ((x >= bound) | (gradient < 0)) * gradient, None


class LowerBound(nn.Module):
    """LowerBoundFunction as a module."""

    def __init__(self, bound):
        super().__init__()
        self.register_buffer("bound", torch.tensor([float(bound)]))

    def forward(self, x):
        return LowerBoundFunction.apply(x, self.bound)


class DivisiveNorm(nn.Module):
    """Generalized divisive normalization, with non-negative reparametrized weights."""

    def __init__(self, channels, inverse=False, pedestal=2.0**-36):
        super().__init__()
        self.inverse, self.pedestal = inverse, pedestal
        self.beta = nn.Parameter((torch.ones(channels) + pedestal).sqrt())
        self.gamma = nn.Parameter((0.1 * torch.eye(channels) + pedestal).sqrt())
        self.beta_bound = LowerBound((1e-6 + pedestal) ** 0.5)
        self.gamma_bound = LowerBound(pedestal**0.5)

    def forward(self, x):
        beta = self.beta_bound(self.beta) ** 2 - self.pedestal
        gamma = self.gamma_bound(self.gamma) ** 2 - self.pedestal
        norm = F.conv2d(x**2, gamma[:, :, None, None], beta)
        norm = torch.sqrt(norm) if self.inverse else torch.rsqrt(norm)
        return x * norm


class FactorizedPrior(nn.Module):
    """The fully factorized density of the hyper-latents: small monotonic networks for every channel."""

    def __init__(self, channels, filters=(3, 3, 3, 3), scale=10.0):
        super().__init__()
        widths = (1, *filters, 1)
        step = scale ** (1 / (len(filters) + 1))
        self.matrices, self.biases, self.factors = nn.ParameterList(), nn.ParameterList(), nn.ParameterList()
        for i in range(len(filters) + 1):
            start = math.log(math.expm1(1 / step / widths[i + 1]))
            self.matrices.append(nn.Parameter(torch.full((channels, widths[i + 1], widths[i]), start)))
            self.biases.append(nn.Parameter(torch.rand(channels, widths[i + 1], 1) - 0.5))
            if i < len(filters):
                self.factors.append(nn.Parameter(torch.zeros(channels, widths[i + 1], 1)))
        self.quantiles = nn.Parameter(torch.tensor([-scale, 0.0, scale]).repeat(channels, 1, 1))
        bound = math.log(2 / 1e-9 - 1)
        self.register_buffer("targets", torch.tensor([-bound, 0.0, bound]))
        self.bound = LowerBound(1e-9)

    def cumulative(self, values, stop=False):
        logits = values
        for i, (matrix, bias) in enumerate(zip(self.matrices, self.biases, strict=False)):
            logits = F.softplus(matrix.detach() if stop else matrix) @ logits + (bias.detach() if stop else bias)
            if i < len(self.factors):
                factor = self.factors[i].detach() if stop else self.factors[i]
                logits = logits + torch.tanh(factor) * torch.tanh(logits)
        return logits

    def loss(self):
        return (self.cumulative(self.quantiles, stop=True) - self.targets).abs().sum()

    def forward(self, z):
        noisy = z + torch.empty_like(z).uniform_(-0.5, 0.5)
        values = noisy.permute(1, 0, 2, 3).reshape(z.shape[1], 1, -1)
        lower, upper = self.cumulative(values - 0.5), self.cumulative(values + 0.5)
        sign = -torch.sign(lower + upper).detach()
        likelihood = (torch.sigmoid(sign * upper) - torch.sigmoid(sign * lower)).abs()
        return noisy, self.bound(likelihood)


class HyperpriorCodec(nn.Module):
    """The mean-scale hyperprior model of learned image compression."""

    def __init__(self, width, latent):
        super().__init__()

        def down(a, b):
            return nn.Conv2d(a, b, 5, stride=2, padding=2)

        def up(a, b):
            return nn.ConvTranspose2d(a, b, 5, stride=2, padding=2, output_padding=1)

        def norm(inverse=False):
            return DivisiveNorm(width, inverse)

        self.analysis = nn.Sequential(
            down(3, width), norm(), down(width, width), norm(), down(width, width), norm(), down(width, latent)
        )
        self.synthesis = nn.Sequential(
            up(latent, width), norm(True), up(width, width), norm(True), up(width, width), norm(True), up(width, 3)
        )
        self.hyper_analysis = nn.Sequential(
            nn.Conv2d(latent, width, 3, padding=1),
            nn.LeakyReLU(),
            down(width, width),
            nn.LeakyReLU(),
            down(width, width),
        )
        self.hyper_synthesis = nn.Sequential(
            up(width, latent),
            nn.LeakyReLU(),
            up(latent, latent * 3 // 2),
            nn.LeakyReLU(),
            nn.Conv2d(latent * 3 // 2, latent * 2, 3, padding=1),
        )
        self.prior = FactorizedPrior(width)
        self.scale_bound, self.likelihood_bound = LowerBound(0.11), LowerBound(1e-9)

    def forward(self, images, low_precision=False):
        with bf16(low_precision):
            y = self.analysis(images)
            z = self.hyper_analysis(y).float()
        noisy_z, z_likelihoods = self.prior(z)
        with bf16(low_precision):
            scales, means = self.hyper_synthesis(noisy_z).float().chunk(2, 1)
        y = y.float()
        noisy_y = y + torch.empty_like(y).uniform_(-0.5, 0.5)
        scales, distance = self.scale_bound(scales), (noisy_y - means).abs()
        upper = 0.5 * torch.erfc(-(2**-0.5) * (0.5 - distance) / scales)
        lower = 0.5 * torch.erfc(-(2**-0.5) * (-0.5 - distance) / scales)
        with bf16(low_precision):
            reconstruction = self.synthesis(noisy_y).float()
        return reconstruction, self.likelihood_bound(upper - lower), z_likelihoods


class CropSet(Dataset):
    """Random flipped crops of pictures that are kept as uint8 arrays."""

    def __init__(self, pictures, crop):
        self.pictures, self.crop = pictures, crop

    def __len__(self):
        return len(self.pictures)

    def __getitem__(self, index):
        picture = self.pictures[index]
        top = int(torch.randint(0, picture.shape[0] - self.crop + 1, ()))
        left = int(torch.randint(0, picture.shape[1] - self.crop + 1, ()))
        picture = picture[top : top + self.crop, left : left + self.crop]
        if torch.rand(()) < 0.5:
            picture = picture[:, ::-1]
        picture = torch.from_numpy(np.ascontiguousarray(picture))
        return picture.permute(2, 0, 1).contiguous().float().div(255)


def learned_image_codec(change):
    """Train a hyperprior codec on random crops, with a second optimizer for the quantiles of the prior."""
    count, side, crop, batch_size = size(256, 8), size(384, 96), size(256, 64), size(16, 2)
    random = np.random.default_rng(0)
    coarse = random.integers(0, 224, (count, side // 8, side // 8, 3), dtype=np.uint8)
    pictures = coarse.repeat(8, axis=1).repeat(8, axis=2)
    pictures += random.integers(0, 32, pictures.shape, dtype=np.uint8)
    batches = iter(endless(DataLoader(CropSet(pictures, crop), batch_size, shuffle=True, drop_last=True)))
    model = HyperpriorCodec(size(128, 8), size(192, 12)).to(device).train()
    if change == "channels_last":
        model = model.to(memory_format=torch.channels_last)
    main = [parameter for name, parameter in model.named_parameters() if not name.endswith("quantiles")]
    capturable = change == "cuda_graph" and device.type == "cuda"
    optimizer = torch.optim.Adam(main, lr=1e-4, capturable=capturable)
    quantile_optimizer = torch.optim.Adam([model.prior.quantiles], lr=1e-3, capturable=capturable)
    weight, pixels = 0.0130 * 255**2, batch_size * crop * crop
    if change == "crops_on_gpu":
        pictures_on_gpu = torch.from_numpy(pictures).to(device)
        offsets = torch.arange(crop, device=device)

    def next_batch():
        if change == "crops_on_gpu":
            chosen = torch.randint(count, (batch_size, 1, 1), device=device)
            rows = torch.randint(side - crop + 1, (batch_size, 1), device=device) + offsets
            columns = torch.randint(side - crop + 1, (batch_size, 1), device=device) + offsets
            flipped = torch.rand(batch_size, 1, device=device) < 0.5
            columns = torch.where(flipped, columns.flip(1), columns)
            crops = pictures_on_gpu[chosen, rows[:, :, None], columns[:, None, :]]
            return crops.permute(0, 3, 1, 2).contiguous().float().div(255)
        images = next(batches).to(device)
        if change == "channels_last":
            images = images.contiguous(memory_format=torch.channels_last)
        return images

    def train(images):
        optimizer.zero_grad()
        quantile_optimizer.zero_grad()
        reconstruction, y_likelihoods, z_likelihoods = model(images, low_precision=change == "bf16")
        bits = sum(likelihoods.log().sum() for likelihoods in (y_likelihoods, z_likelihoods)) / (-math.log(2) * pixels)
        error = F.mse_loss(reconstruction, images)
        loss = weight * error + bits
        loss.backward()
        nn.utils.clip_grad_norm_(main, 1.0)
        optimizer.step()
        quantile_loss = model.prior.loss()
        quantile_loss.backward()
        quantile_optimizer.step()
        return loss.detach(), bits.detach(), error.detach(), quantile_loss.detach()

    if change == "cuda_graph":
        fixed = next_batch()
        replay = graphed_training(lambda: train(fixed), [model], [optimizer, quantile_optimizer])

    log = []

    def step():
        images = next_batch()
        if change == "cuda_graph":
            fixed.copy_(images)
            losses = replay()
        else:
            losses = train(images)
        log.append([value.item() for value in losses])
        return losses[0]

    return step


PROGRAMS = {
    neural_dynamics: {
        "gpu_neighbors": "python",
        "verlet_skin": "python",
        "cuda_graph": "cuda_graph",
        "frozen_weights": "",
    },
    fusion_forecaster: {
        "stacked_networks": "larger_batch",
        "cuda_graph": "cuda_graph",
        "windows_on_gpu": "data_loader",
        "bf16": "half_precision",
    },
    molecule_graph_transformer: {
        "cached_items": "data_loader",
        "loss_on_gpu": "remove_sync",
        "bf16": "half_precision",
        "fused_attention": "fused_attention",
    },
    learned_image_codec: {
        "crops_on_gpu": "data_loader",
        "bf16": "half_precision",
        "cuda_graph": "cuda_graph",
        "channels_last": "channels_last",
    },
}
