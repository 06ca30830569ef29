"""Seven programs as different teams write them: four that train and three that only compute outputs."""

import copy
import itertools
import math

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from setting import compiled, device, endless, gathered, graphed, size, use_tf32
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.data import DataLoader, Dataset

# ----------------------------------------------------------------------------------------------------------------------
# 1. Training: a transformer that tags particle jets and adds a learned function of particle pairs to the attention.
# ----------------------------------------------------------------------------------------------------------------------


def pair_features(a, b):
    """Return log distance, kT, momentum share and squared mass of pairs; a and b hold (pt, eta, phi, energy)."""
    pt_a, eta_a, phi_a, e_a = a.unbind(-1)
    pt_b, eta_b, phi_b, e_b = b.unbind(-1)
    dphi = torch.remainder(phi_a - phi_b + math.pi, 2 * math.pi) - math.pi
    delta = torch.sqrt((eta_a - eta_b) ** 2 + dphi**2).clamp(min=1e-6)
    lowest = torch.minimum(pt_a, pt_b)
    kt = (lowest * delta).clamp(min=1e-6)
    share = (lowest / (pt_a + pt_b).clamp(min=1e-6)).clamp(min=1e-6)
    px = pt_a * torch.cos(phi_a) + pt_b * torch.cos(phi_b)
    py = pt_a * torch.sin(phi_a) + pt_b * torch.sin(phi_b)
    pz = pt_a * torch.sinh(eta_a) + pt_b * torch.sinh(eta_b)
    mass2 = ((e_a + e_b) ** 2 - px**2 - py**2 - pz**2).clamp(min=1e-3)
    return torch.stack([torch.log(delta), torch.log(kt), torch.log(share), torch.log(mass2)], dim=-1)


class PairEmbedding(nn.Module):
    """Turns the features of each pair of particles into one attention bias per head."""

    def __init__(self, width, heads, triangle):
        super().__init__()
        self.heads = heads
        self.triangle = triangle
        self.mlp = nn.Sequential(
            nn.Linear(4, width),
            nn.GELU(),
            nn.Linear(width, width),
            nn.GELU(),
            nn.Linear(width, width),
            nn.GELU(),
            nn.Linear(width, heads),
        )

    def forward(self, p):
        if self.triangle:
            i, j = torch.triu_indices(p.shape[1], p.shape[1], device=p.device)
            with torch.no_grad():
                features = pair_features(p[:, i], p[:, j])
            values = self.mlp(features)
            bias = values.new_zeros(p.shape[0], p.shape[1], p.shape[1], self.heads)
            bias[:, i, j] = values
            bias[:, j, i] = values
        else:
            with torch.no_grad():
                features = pair_features(p[:, :, None], p[:, None, :])
            bias = self.mlp(features)
        return bias.permute(0, 3, 1, 2)


class JetBlock(nn.Module):
    """A transformer block whose attention takes a bias."""

    def __init__(self, dim, heads, sdpa):
        super().__init__()
        self.heads = heads
        self.sdpa = sdpa
        self.norm1 = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.LayerNorm(4 * dim), nn.Linear(4 * dim, dim))

    def forward(self, x, bias):
        b, n, d = x.shape
        q, k, v = self.qkv(self.norm1(x)).reshape(b, n, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        if self.sdpa:
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        else:
            scores = torch.matmul(q, k.transpose(-2, -1)) / math.sqrt(d // self.heads)
            y = torch.matmul(torch.softmax(scores + bias, dim=-1), v)
        x = x + self.proj(y.transpose(1, 2).reshape(b, n, d))
        return x + self.mlp(self.norm2(x))


class JetTransformer(nn.Module):
    """Particles in, jet classes out."""

    def __init__(self, dim, heads, depth, pair_width, classes, sdpa=False, triangle=False):
        super().__init__()
        self.sdpa = sdpa
        self.embed = nn.Sequential(
            nn.Linear(7, dim), nn.GELU(), nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim)
        )
        self.pairs = PairEmbedding(pair_width, heads, triangle)
        self.blocks = nn.ModuleList([JetBlock(dim, heads, sdpa) for _ in range(depth)])
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, classes)

    def forward(self, x, p, mask):
        bias = self.pairs(p).masked_fill(~mask[:, None, None, :], float("-inf"))
        if self.sdpa:
            bias = bias.contiguous()  # The memory-efficient kernel wants the last dimension to be dense.
        x = self.embed(x)
        for block in self.blocks:
            x = block(x, bias)
        x = self.norm(x) * mask[..., None]
        return self.head(x.sum(1) / mask.sum(1, keepdim=True))


def jet_transformer(change):
    """Train a jet tagger with pairwise features on numpy batches, with clipping, a schedule and logged accuracy."""
    rng = np.random.default_rng(0)
    batch, n = size(128, 4), size(64, 8)
    data = []
    for _ in range(size(8, 2)):
        pt = rng.exponential(20.0, (batch, n)).astype(np.float32) + 0.5
        eta = rng.normal(0, 0.4, (batch, n)).astype(np.float32)
        phi = rng.uniform(-np.pi, np.pi, (batch, n)).astype(np.float32)
        energy = pt * np.cosh(eta) * 1.01
        mask = np.arange(n)[None] < rng.integers(n // 2, n + 1, (batch, 1))
        p = np.stack([pt, eta, phi, energy], -1) * mask[..., None]
        logs = [np.log(pt), np.log(energy), np.log(pt / pt.sum(1, keepdims=True))]
        x = np.stack([*logs, eta, phi, np.hypot(eta, phi), np.ones_like(pt)], -1) * mask[..., None]
        data.append((x.astype(np.float32), p.astype(np.float32), mask, rng.integers(0, 10, batch)))
    if change == "tf32":
        use_tf32()
    model = JetTransformer(
        size(128, 16), size(8, 2), size(8, 2), size(64, 8), 10, sdpa=change == "sdpa", triangle=change == "triangle"
    ).to(device)
    net = compiled(model) if change == "compile" else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10000)
    batches = itertools.cycle(data)
    history = {"loss": [], "accuracy": []}

    def step():
        x, p, mask, label = (torch.from_numpy(a).to(device) for a in next(batches))
        optimizer.zero_grad()
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=change == "bf16"):
            logits = net(x, p, mask)
            loss = F.cross_entropy(logits, label)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        history["loss"].append(loss.item())
        history["accuracy"].append((logits.argmax(1) == label).float().mean().item())
        return loss.detach()

    return step


# ----------------------------------------------------------------------------------------------------------------------
# 2. Training: a graph attention network on a protein graph, written with scatter operations.
# ----------------------------------------------------------------------------------------------------------------------


def clean_edges(edges, nodes):
    """Remove self-loops from the list of edges and add one for each node."""
    edges = edges[:, edges[0] != edges[1]]
    loop = torch.arange(nodes, device=edges.device)
    return torch.cat([edges, torch.stack([loop, loop])], dim=1)


def take(x, index, select):
    """Return the rows of x that index names, by indexing or by index_select."""
    return x.index_select(0, index) if select else x[index]


def edge_softmax(scores, target, nodes, select):
    """Softmax of scores [edges, ...] over the edges that enter the same node."""
    index = target.reshape(-1, *[1] * (scores.dim() - 1)).expand_as(scores)
    top = scores.new_full((nodes, *scores.shape[1:]), float("-inf")).scatter_reduce(0, index, scores.detach(), "amax")
    e = torch.exp(scores - take(top, target, select))
    total = e.new_zeros(nodes, *scores.shape[1:]).index_add(0, target, e)
    return e / (take(total, target, select) + 1e-16)


class GraphAttention(nn.Module):
    """One layer of graph attention with several heads, which are joined or averaged."""

    def __init__(self, inputs, outputs, heads, join=True, together=False, clean=True, sizes=None, select=False):
        super().__init__()
        self.heads, self.outputs, self.join = heads, outputs, join
        self.together, self.clean, self.sizes, self.select = together, clean, sizes, select
        self.linears = nn.ModuleList([nn.Linear(inputs, outputs, bias=False) for _ in range(heads)])
        self.source = nn.Parameter(torch.randn(heads, outputs) * 0.1)
        self.target = nn.Parameter(torch.randn(heads, outputs) * 0.1)
        self.skip = nn.Linear(inputs, outputs * heads if join else outputs)

    def aggregate(self, messages, target, nodes):
        """Sum the messages that enter each node."""
        if self.sizes is not None:
            return torch.segment_reduce(messages, "sum", lengths=self.sizes, axis=0, unsafe=True)
        return messages.new_zeros(nodes, *messages.shape[1:]).index_add(0, target, messages)

    def forward(self, x, edges):
        nodes = x.shape[0]
        if self.clean:
            edges = clean_edges(edges, nodes)
        source, target = edges[0], edges[1]
        if self.together:
            weight = torch.cat([linear.weight for linear in self.linears])
            h = F.linear(x, weight).view(nodes, self.heads, self.outputs)
            scores = take((h * self.source).sum(-1), source, self.select)
            scores = scores + take((h * self.target).sum(-1), target, self.select)
            attention = edge_softmax(F.leaky_relu(scores, 0.2), target, nodes, self.select)
            out = self.aggregate(take(h, source, self.select) * attention[..., None], target, nodes)
            out = out.flatten(1) if self.join else out.mean(1)
        else:
            outs = []
            for head in range(self.heads):
                h = self.linears[head](x)
                scores = take((h * self.source[head]).sum(-1), source, self.select)
                scores = scores + take((h * self.target[head]).sum(-1), target, self.select)
                attention = edge_softmax(F.leaky_relu(scores, 0.2), target, nodes, self.select)
                outs.append(self.aggregate(take(h, source, self.select) * attention[:, None], target, nodes))
            out = torch.cat(outs, dim=1) if self.join else torch.stack(outs).mean(0)
        return out + self.skip(x)


class ProteinGAT(nn.Module):
    """Three layers of graph attention."""

    def __init__(self, inputs, hidden, classes, **options):
        super().__init__()
        self.layer1 = GraphAttention(inputs, hidden, 4, **options)
        self.layer2 = GraphAttention(4 * hidden, hidden, 4, **options)
        self.layer3 = GraphAttention(4 * hidden, classes, 6, join=False, **options)

    def forward(self, x, edges):
        x = F.elu(self.layer1(x, edges))
        x = F.elu(self.layer2(x, edges))
        return self.layer3(x, edges)


def protein_gat(change):
    """Train a graph attention network on the whole graph with 121 yes/no labels per node, and log F1."""
    rng = np.random.default_rng(1)
    nodes, count = size(8000, 40), size(120000, 160)
    edges = torch.from_numpy(rng.integers(0, nodes, (2, count))).to(device)
    x = torch.from_numpy(rng.standard_normal((nodes, 50), dtype=np.float32)).to(device)
    classes = size(121, 5)
    y = torch.from_numpy((rng.random((nodes, classes)) < 0.3).astype(np.float32)).to(device)
    options = {}
    if change == "edges_once":
        edges = clean_edges(edges, nodes)
        options = {"clean": False}
    if change == "index_select":
        options = {"select": True}
    if change == "segments":  # Sorting by the target node once lets each sum run over neighbouring rows.
        edges = clean_edges(edges, nodes)
        edges = edges[:, torch.argsort(edges[1], stable=True)].contiguous()
        options = {"clean": False, "sizes": torch.bincount(edges[1], minlength=nodes)}
    model = ProteinGAT(50, size(128, 8), classes, together=change == "heads_together", **options).to(device)
    net = compiled(model) if change == "compile" else model
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    criterion = nn.BCEWithLogitsLoss()
    log = []

    def step():
        model.train()
        optimizer.zero_grad()
        out = net(x, edges)
        loss = criterion(out, y)
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            pred = (out > 0).float()
            hits = (pred * y).sum()
            f1 = 2 * hits / (pred.sum() + y.sum() + 1e-8)
        log.append((loss.item(), f1.item()))
        return loss.detach()

    return step


# ----------------------------------------------------------------------------------------------------------------------
# 3. Training: a click predictor (DLRM) with 26 embedding tables and a Dataset that gives one row at a time.
# ----------------------------------------------------------------------------------------------------------------------


class Clicks(Dataset):
    """Rows of a click log in numpy arrays."""

    def __init__(self, rows, tables):
        rng = np.random.default_rng(2)
        self.dense = rng.exponential(3.0, (rows, 13)).astype(np.float32)
        self.category = np.stack([(rng.random(rows) ** 3 * n).astype(np.int64) for n in tables], 1)
        self.label = (rng.random(rows) < 0.25).astype(np.float32)

    def __len__(self):
        return len(self.label)

    def __getitem__(self, i):
        dense = torch.log1p(torch.from_numpy(self.dense[i]))
        return dense, torch.from_numpy(self.category[i]), torch.tensor(self.label[i])


class ClicksInBatches(Clicks):
    """The same rows, taken a batch at a time."""

    def __getitems__(self, rows):
        dense = torch.log1p(torch.from_numpy(self.dense[rows]))
        return dense, torch.from_numpy(self.category[rows]), torch.from_numpy(self.label[rows])


def as_it_is(batch):
    """Return a batch which the Dataset has put together already."""
    return batch


def perceptron(*widths):
    """Linear layers with ReLU between them."""
    layers = []
    for a, b in itertools.pairwise(widths):
        layers += [nn.Linear(a, b), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class DLRM(nn.Module):
    """Embeddings and dense features, their pairwise dot products, and a perceptron on top."""

    def __init__(self, tables, dim, one_table):
        super().__init__()
        self.tables = nn.ModuleList([nn.Embedding(n, dim) for n in tables])
        for table in self.tables:
            nn.init.uniform_(table.weight, -0.05, 0.05)
        self.bottom = perceptron(13, size(512, 16), size(256, 16), dim)
        count = len(tables) + 1
        self.top = perceptron(dim + count * (count - 1) // 2, size(512, 16), size(256, 16), 1)
        i, j = torch.tril_indices(count, count, offset=-1)
        self.register_buffer("i", i)
        self.register_buffer("j", j)
        self.one_table = one_table
        if one_table:
            weight = torch.cat([table.weight.detach() for table in self.tables])
            self.table = nn.Embedding.from_pretrained(weight, freeze=False)
            self.register_buffer("starts", torch.tensor([0, *np.cumsum(tables)[:-1].tolist()]))
            del self.tables

    def forward(self, dense, category):
        d = self.bottom(dense)
        if self.one_table:
            vectors = torch.cat([d[:, None], self.table(category + self.starts)], dim=1)
        else:
            embedded = [table(category[:, t]) for t, table in enumerate(self.tables)]
            vectors = torch.stack([d.to(embedded[0].dtype), *embedded], dim=1)
        products = torch.bmm(vectors, vectors.transpose(1, 2))[:, self.i, self.j]
        return self.top(torch.cat([d, products], dim=1)).squeeze(1)


def click_model(change):
    """Train a DLRM with Adam on rows from a DataLoader, and log the loss of each batch."""
    sizes = [200000, 150000, 120000, 90000, 60000, 30000, 12000, 10000, 5000, 5000, 3000, 2000, 1500]
    sizes += [1000, 600, 500, 300, 200, 100, 60, 30, 25, 15, 10, 4, 3]
    tables = [max(3, n // size(1, 1000)) for n in sizes]
    batch = size(1024, 8)
    rows = (ClicksInBatches if change == "batch_fetch" else Clicks)(batch * size(100, 8), tables)
    options = {"collate_fn": as_it_is} if change == "batch_fetch" else {}
    if change == "workers":
        options = {"num_workers": size(6, 2), "persistent_workers": True}
    batches = endless(DataLoader(rows, batch_size=batch, drop_last=True, **options))
    next(batches)  # Workers, if any, start here, before CUDA does.
    model = DLRM(tables, size(32, 4), change == "one_table").to(device)
    if change == "index_select":
        gathered(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True if change == "fused_adam" else None)
    losses = []

    def step():
        dense, category, label = next(batches)
        dense, category, label = dense.to(device), category.to(device), label.to(device)
        optimizer.zero_grad()
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=change == "bf16"):
            loss = F.binary_cross_entropy_with_logits(model(dense, category), label)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        return loss.detach()

    return step


# ----------------------------------------------------------------------------------------------------------------------
# 4. Training: one round of federated averaging with ten clients that train in turn.
# ----------------------------------------------------------------------------------------------------------------------


class LetterNet(nn.Module):
    """The small network for handwritten letters that papers on federated averaging use."""

    def __init__(self, width, hidden):
        super().__init__()
        self.conv1 = nn.Conv2d(1, width, 5, padding=2)
        self.conv2 = nn.Conv2d(width, 2 * width, 5, padding=2)
        self.fc1 = nn.Linear(2 * width * 49, hidden)
        self.fc2 = nn.Linear(hidden, 62)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        return self.fc2(F.relu(self.fc1(x.flatten(1))))


def average_weights(weights):
    """Return the average of several state_dicts."""
    average = copy.deepcopy(weights[0])
    for key in average:
        for other in weights[1:]:
            average[key] += other[key]
        average[key] = torch.div(average[key], len(weights))
    return average


def federated_round(change):
    """Let ten clients train copies of a network for three batches each, and average their weights."""
    rng = np.random.default_rng(3)
    clients, local, batch, lr = size(10, 3), 3, size(32, 4), 0.03
    where = device if change == "data_on_gpu" else torch.device("cpu")
    data = []
    for _ in range(clients):
        images = torch.from_numpy(rng.random((4 * local, batch, 1, 28, 28), dtype=np.float32)).to(where)
        labels = torch.from_numpy(rng.integers(0, 62, (4 * local, batch))).to(where)
        data.append((images, labels))
    server = LetterNet(size(32, 4), size(512, 16)).to(device)
    rounds = itertools.count()

    if change == "clients_at_once":

        def loss_of(weights, x, y):
            return F.cross_entropy(torch.func.functional_call(server, weights, (x,)), y)

        train_all = torch.func.vmap(torch.func.grad_and_value(loss_of))

        def step():
            start = next(rounds) * local % (4 * local)
            weights = {k: v.detach().expand(clients, *v.shape) for k, v in server.named_parameters()}
            losses = []
            for b in range(start, start + local):
                x = torch.stack([images[b] for images, _ in data]).to(device)
                y = torch.stack([labels[b] for _, labels in data]).to(device)
                grads, loss = train_all(weights, x, y)
                weights = {k: v - lr * grads[k] for k, v in weights.items()}
                losses += loss.tolist()
            server.load_state_dict({k: v.mean(0) for k, v in weights.items()})
            return torch.tensor(sum(losses) / len(losses))

        return step

    if change == "graph":
        net = copy.deepcopy(server)
        optimizer = torch.optim.SGD(net.parameters(), lr=lr)
        x_in = torch.zeros(batch, 1, 28, 28, device=device)
        y_in = torch.zeros(batch, dtype=torch.long, device=device)

        def local_step():
            optimizer.zero_grad()
            loss = F.cross_entropy(net(x_in), y_in)
            loss.backward()
            optimizer.step()
            return loss.detach()

        train_graphed = graphed(local_step)

    def train_client(images, labels, start):
        """Return a client's weights and losses after its local batches."""
        losses = []
        if change == "graph":
            net.load_state_dict(server.state_dict())
            for b in range(start, start + local):
                x_in.copy_(images[b])
                y_in.copy_(labels[b])
                losses.append(train_graphed().item())
            return copy.deepcopy(net.state_dict()), losses
        client = copy.deepcopy(server)
        client.train()
        sgd = torch.optim.SGD(client.parameters(), lr=lr, fused=True if change == "fused_sgd" else None)
        for b in range(start, start + local):
            x, y = images[b].to(device), labels[b].to(device)
            sgd.zero_grad()
            loss = F.cross_entropy(client(x), y)
            loss.backward()
            sgd.step()
            losses.append(loss.detach() if change == "losses_at_end" else loss.item())
        return copy.deepcopy(client.state_dict()), losses

    def step():
        start = next(rounds) * local % (4 * local)
        weights, losses = [], []
        for images, labels in data:
            state, client_losses = train_client(images, labels, start)
            weights.append(state)
            losses += client_losses
        server.load_state_dict(average_weights(weights))
        if change == "losses_at_end":
            losses = torch.stack(losses).tolist()
        return torch.tensor(sum(losses) / len(losses))

    return step


# ----------------------------------------------------------------------------------------------------------------------
# 5. Inference: a vocoder that turns the mel spectrogram of a sentence into sound.
# ----------------------------------------------------------------------------------------------------------------------


class ResidualBlock(nn.Module):
    """Dilated convolutions with skip connections, as in HiFi-GAN."""

    def __init__(self, channels, kernel):
        super().__init__()
        self.first = nn.ModuleList(
            [
                weight_norm(nn.Conv1d(channels, channels, kernel, dilation=d, padding=d * (kernel - 1) // 2))
                for d in (1, 3, 5)
            ]
        )
        self.second = nn.ModuleList(
            [weight_norm(nn.Conv1d(channels, channels, kernel, padding=(kernel - 1) // 2)) for _ in range(3)]
        )

    def forward(self, x):
        for a, b in zip(self.first, self.second, strict=False):
            x = x + b(F.leaky_relu(a(F.leaky_relu(x, 0.1)), 0.1))
        return x


class Vocoder(nn.Module):
    """The generator of HiFi-GAN."""

    def __init__(self, channels):
        super().__init__()
        self.pre = weight_norm(nn.Conv1d(80, channels, 7, padding=3))
        self.ups, self.blocks = nn.ModuleList(), nn.ModuleList()
        for rate in (8, 8, 2, 2):
            self.ups.append(weight_norm(nn.ConvTranspose1d(channels, channels // 2, 2 * rate, rate, padding=rate // 2)))
            channels //= 2
            self.blocks.append(nn.ModuleList([ResidualBlock(channels, k) for k in (3, 7, 11)]))
        self.post = weight_norm(nn.Conv1d(channels, 1, 7, padding=3))

    def forward(self, mel):
        x = self.pre(mel)
        for up, blocks in zip(self.ups, self.blocks, strict=False):
            x = up(F.leaky_relu(x, 0.1))
            total = None
            for block in blocks:
                total = block(x) if total is None else total + block(x)
            x = total / len(blocks)
        return torch.tanh(self.post(F.leaky_relu(x)))


def speech_vocoder(change):
    """Turn one sentence's spectrogram into 16-bit sound, with the weight norm of training still in place."""
    rng = np.random.default_rng(4)
    frames = size(120, 8)
    sentences = [rng.normal(-4, 2, (80, frames)).astype(np.float32) for _ in range(16)]
    model = Vocoder(size(512, 32)).to(device).eval()
    if change == "plain_weights":
        for module in list(model.modules()):
            if parametrize.is_parametrized(module, "weight"):
                parametrize.remove_parametrizations(module, "weight")
    if change == "compile":
        model = compiled(model)
    at_once = 2 if change == "two_sentences" else 1
    queue = itertools.cycle([sentences[i : i + at_once] for i in range(0, 16, at_once)])
    if change == "graph":
        mel_in = torch.zeros(1, 80, frames, device=device)
        with torch.no_grad():
            replay = graphed(lambda: model(mel_in))

    def speak(mel):
        """Return the sound of a batch of spectrograms."""
        if change == "graph":
            mel_in.copy_(mel)
            return replay()
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=change == "bf16"):
            return model(mel)

    def step():
        mel = torch.from_numpy(np.stack(next(queue))).to(device)
        with torch.no_grad():
            audio = speak(mel).float().squeeze(1)
            audio = audio / audio.abs().amax(dim=1, keepdim=True).clamp(min=1e-5)
        pcm = (audio.cpu().numpy() * 32767).astype(np.int16)
        return torch.tensor(float(np.abs(pcm.astype(np.float32)).mean()))

    return step


# ----------------------------------------------------------------------------------------------------------------------
# 6. Inference: a U-Net restores a large microscope picture tile by tile.
# ----------------------------------------------------------------------------------------------------------------------


class TwoConvs(nn.Sequential):
    """Two convolutions with batch norm and ReLU."""

    def __init__(self, a, b):
        super().__init__(
            nn.Conv2d(a, b, 3, padding=1, bias=False),
            nn.BatchNorm2d(b),
            nn.ReLU(inplace=True),
            nn.Conv2d(b, b, 3, padding=1, bias=False),
            nn.BatchNorm2d(b),
            nn.ReLU(inplace=True),
        )


class UNet(nn.Module):
    """A U-Net with four levels that predicts the noise of a picture."""

    def __init__(self, width):
        super().__init__()
        widths = [width, 2 * width, 4 * width, 8 * width]
        self.down = nn.ModuleList([TwoConvs(a, b) for a, b in zip([3, *widths[:-1]], widths, strict=False)])
        self.pool = nn.MaxPool2d(2)
        self.up = nn.ModuleList([nn.ConvTranspose2d(2 * w, w, 2, stride=2) for w in widths[-2::-1]])
        self.merge = nn.ModuleList([TwoConvs(2 * w, w) for w in widths[-2::-1]])
        self.out = nn.Conv2d(width, 3, 1)

    def forward(self, x):
        y, skips = x, []
        for i, block in enumerate(self.down):
            y = block(y if i == 0 else self.pool(y))
            skips.append(y)
        skips.pop()
        for up, merge in zip(self.up, self.merge, strict=False):
            y = merge(torch.cat([skips.pop(), up(y)], dim=1))
        return x - self.out(y)


def tiled_restoration(change):
    """Restore a picture in 30 overlapping tiles, one at a time, and blend them in numpy with a smooth window."""
    rng = np.random.default_rng(5)
    tile, overlap = size(128, 16), size(32, 8)
    stride = tile - overlap
    rows, columns = size(5, 2), size(6, 2)
    height, width = stride * rows + overlap, stride * columns + overlap
    pictures = itertools.cycle([rng.random((3, height, width), dtype=np.float32) for _ in range(4)])
    ramp = np.hanning(tile + 2)[1:-1].astype(np.float32)
    window = np.outer(ramp, ramp)
    corners = [(r * stride, c * stride) for r in range(rows) for c in range(columns)]
    net = UNet(size(32, 4)).to(device).eval()
    if change == "channels_last":
        net = net.to(memory_format=torch.channels_last)
    if change == "compile":
        net = compiled(net)
    if change == "graph":
        tile_in = torch.zeros(1, 3, tile, tile, device=device)
        with torch.no_grad():
            replay = graphed(lambda: net(tile_in))

    def restore(x):
        """Return restored tiles on the GPU."""
        if change == "graph":
            tile_in.copy_(x)
            return replay()
        if change == "channels_last":
            x = x.to(device).contiguous(memory_format=torch.channels_last)
        return net(x.to(device))

    if change == "blend_on_gpu":
        gpu_window = torch.from_numpy(window).to(device)

        def step():
            picture = torch.from_numpy(next(pictures)).to(device)
            result = torch.zeros_like(picture)
            weight = torch.zeros(height, width, device=device)
            with torch.no_grad():
                for r, c in corners:
                    out = net(picture[None, :, r : r + tile, c : c + tile])[0]
                    result[:, r : r + tile, c : c + tile] += out * gpu_window
                    weight[r : r + tile, c : c + tile] += gpu_window
            restored = (result / weight).clamp(0, 1).cpu().numpy()
            return torch.tensor(float(restored.mean()))

        return step

    def step():
        picture = next(pictures)
        result = np.zeros_like(picture)
        weight = np.zeros((height, width), dtype=np.float32)
        with torch.no_grad():
            if change == "tiles_at_once":
                tiles = np.stack([picture[:, r : r + tile, c : c + tile] for r, c in corners])
                outs = restore(torch.from_numpy(tiles)).cpu().numpy()
            else:
                outs = None
            for i, (r, c) in enumerate(corners):
                if outs is None:
                    x = torch.from_numpy(picture[:, r : r + tile, c : c + tile].copy()).unsqueeze(0)
                    out = restore(x).squeeze(0).cpu().numpy()
                else:
                    out = outs[i]
                result[:, r : r + tile, c : c + tile] += out * window
                weight[r : r + tile, c : c + tile] += window
        restored = np.clip(result / weight, 0, 1)
        return torch.tensor(float(restored.mean()))

    return step


# ----------------------------------------------------------------------------------------------------------------------
# 7. Inference: a Kalman filter over many radar tracks in double precision.
# ----------------------------------------------------------------------------------------------------------------------


def kalman_tracks(change):
    """Filter the positions of thousands of tracks in time and return their mean log-likelihood."""
    rng = np.random.default_rng(6)
    dtype = torch.float32 if change == "float32" else torch.float64
    tracks = size(4096, 16) * (2 if change == "tracks_x2" else 1)
    times, dt = size(30, 5), 0.1
    speeds = rng.normal(0, 1, (6, tracks, 1, 2))
    clock = (np.arange(times) * dt)[None, None, :, None]
    measured = speeds * clock + rng.normal(0, 0.3, (6, tracks, times, 2))
    scans = itertools.cycle(list(measured))

    move = torch.eye(6, dtype=dtype, device=device)
    for a in range(4):
        move[a, a + 2] = dt
    move[0, 4] = move[1, 5] = dt * dt / 2
    see = torch.zeros(2, 6, dtype=dtype, device=device)
    see[0, 0] = see[1, 1] = 1.0
    shake = 0.01 * torch.eye(6, dtype=dtype, device=device)
    noise = 0.09 * torch.eye(2, dtype=dtype, device=device)
    start = 10.0 * torch.eye(6, dtype=dtype, device=device)
    identity = torch.eye(6, dtype=dtype, device=device)
    log2pi = 2 * math.log(2 * math.pi)

    def inverse_and_logdet(s):
        """Return the inverse of 2 by 2 matrices and the logarithm of their determinant."""
        if change != "closed_form":
            return torch.linalg.inv(s), torch.logdet(s)
        a, b, c, d = s[..., 0, 0], s[..., 0, 1], s[..., 1, 0], s[..., 1, 1]
        det = a * d - b * c
        adjugate = torch.stack([torch.stack([d, -b], -1), torch.stack([-c, a], -1)], -2)
        return adjugate / det[..., None, None], torch.log(det)

    def covariance_step(p):
        """Return the next covariance, the gain, and the inverse and log-determinant of the innovation's covariance."""
        p = move @ p @ move.T + shake
        inverse, logdet = inverse_and_logdet(see @ p @ see.T + noise)
        gain = p @ see.T @ inverse
        rest = identity - gain @ see
        p = rest @ p @ rest.transpose(-2, -1) + gain @ noise @ gain.transpose(-2, -1)
        return p, gain, inverse, logdet

    def state_step(x, z, gain, inverse, logdet):
        """Return the state after a measurement, and the measurement's log-likelihood."""
        x = (move @ x[..., None])[..., 0]
        innovation = z - x @ see.T
        x = x + (gain @ innovation[..., None])[..., 0]
        distance = (innovation[:, None, :] @ inverse @ innovation[:, :, None])[:, 0, 0]
        return x, -0.5 * (distance + logdet + log2pi)

    def update(x, p, z):
        """Predict and correct all tracks by one measurement each."""
        p, gain, inverse, logdet = covariance_step(p)
        x, likelihood = state_step(x, z, gain, inverse, logdet)
        return x, p, likelihood

    if change == "compile":
        update = compiled(update)
    if change == "gains_ahead":  # All tracks start alike and none misses a measurement, so the gains are constants.
        gains, p = [], start
        for _ in range(times):
            p, gain, inverse, logdet = covariance_step(p)
            gains.append((gain, inverse, logdet))

    @torch.no_grad()
    def step():
        scan = torch.from_numpy(next(scans)).to(device=device, dtype=dtype)
        x = torch.zeros(tracks, 6, dtype=dtype, device=device)
        p = start.repeat(tracks, 1, 1)
        total = torch.zeros(tracks, dtype=dtype, device=device)
        states = []
        for t in range(times):
            if change == "gains_ahead":
                x, likelihood = state_step(x, scan[:, t], *gains[t])
            else:
                x, p, likelihood = update(x, p, scan[:, t])
            if torch.isnan(x).any():
                raise RuntimeError(f"the filter diverged at time {t}")
            total = total + likelihood
            states.append(x)
        filtered = torch.stack(states, dim=1).cpu().numpy()
        assert filtered.shape[1] == times
        return total.mean()

    return step


PROGRAMS = {
    jet_transformer: {"tf32": "tf32", "bf16": "half_precision", "sdpa": "fused_attention", "compile": "fuse_pointwise",
                      "triangle": ""},
    protein_gat: {"heads_together": "larger_batch", "edges_once": "", "index_select": "index_select", "segments": "",
                  "compile": "fuse_pointwise"},
    click_model: {"index_select": "index_select", "batch_fetch": "", "workers": "data_loader",
                  "one_table": "larger_batch",
                  "fused_adam": "fused_optimizer", "bf16": "half_precision"},
    federated_round: {"clients_at_once": "larger_batch", "graph": "cuda_graph", "losses_at_end": "remove_sync",
                      "fused_sgd": "fused_optimizer", "data_on_gpu": ""},
    speech_vocoder: {"plain_weights": "compute_once", "graph": "cuda_graph", "compile": "fuse_pointwise",
                     "bf16": "half_precision", "two_sentences": ("double_batch", 2)},
    tiled_restoration: {"tiles_at_once": "larger_batch", "graph": "cuda_graph", "compile": "fuse_pointwise",
                        "blend_on_gpu": "python", "channels_last": "channels_last"},
    kalman_tracks: {"gains_ahead": "compute_once", "closed_form": "", "compile": "fuse_pointwise",
                    "float32": "single_precision", "tracks_x2": ("double_batch", 2)},
}  # fmt: skip
