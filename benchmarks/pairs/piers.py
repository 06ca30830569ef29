"""Training and design: slot attention, road traffic, sequences for protein backbones, and video upscaling."""

from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from setting import bf16, device, endless, graphed, graphed_training, size
from torch.utils.data import DataLoader, Dataset


class CrowdedScenes(Dataset):
    """Pictures of 240x320 with three to six coloured shapes each, cropped and scaled to 64x64 as CLEVR6 is."""

    def __init__(self, count, seed=0):
        rng = np.random.default_rng(seed)
        rows, columns = np.mgrid[0:240, 0:320].astype(np.float32)
        self.images = np.empty((count, 240, 320, 3), np.uint8)
        for image in self.images:
            image[:] = (110 + rows / 8)[..., None]
            for _ in range(rng.integers(3, 7)):
                y, x, radius = rng.uniform(40, 180), rng.uniform(70, 250), rng.uniform(12, 32)
                if rng.random() < 0.5:
                    inside = (rows - y) ** 2 + (columns - x) ** 2 < radius**2
                else:
                    inside = np.maximum(np.abs(rows - y), np.abs(columns - x)) < radius
                image[inside] = rng.integers(0, 256, 3)

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        image = torch.from_numpy(self.images[index]).permute(2, 0, 1)
        image = image[:, 29:221, 64:256].float() / 255.0
        image = F.interpolate(image[None], size=(64, 64), mode="bilinear", antialias=True)[0]
        return {"image": image * 2.0 - 1.0}


class SoftPositionEmbed(nn.Module):
    """Adds a linear projection of the four distances to the borders."""

    def __init__(self, hidden, resolution):
        super().__init__()
        self.embedding = nn.Linear(4, hidden)
        ys, xs = torch.meshgrid(torch.linspace(0, 1, resolution), torch.linspace(0, 1, resolution), indexing="ij")
        grid = torch.stack([ys, xs], dim=-1)
        self.register_buffer("grid", torch.cat([grid, 1.0 - grid], dim=-1)[None])

    def forward(self, inputs):
        return inputs + self.embedding(self.grid).permute(0, 3, 1, 2)


class SlotAttention(nn.Module):
    """Slots that compete for the features of the picture, in a few iterations with a GRU."""

    def __init__(self, num_slots, dim, iters=3, eps=1e-8):
        super().__init__()
        self.num_slots, self.iters, self.eps, self.scale = num_slots, iters, eps, dim**-0.5
        self.slots_mu = nn.Parameter(torch.randn(1, 1, dim))
        self.slots_log_sigma = nn.Parameter(torch.zeros(1, 1, dim))
        self.to_q, self.to_k, self.to_v = (nn.Linear(dim, dim, bias=False) for _ in range(3))
        self.gru = nn.GRUCell(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.ReLU(), nn.Linear(2 * dim, dim))
        self.norm_input, self.norm_slots, self.norm_mlp = (nn.LayerNorm(dim) for _ in range(3))

    def forward(self, inputs):
        batch, _, dim = inputs.shape
        noise = torch.randn(batch, self.num_slots, dim, device=inputs.device)
        slots = self.slots_mu + self.slots_log_sigma.exp() * noise
        inputs = self.norm_input(inputs)
        k, v = self.to_k(inputs), self.to_v(inputs)
        for _ in range(self.iters):
            slots_prev = slots
            q = self.to_q(self.norm_slots(slots))
            dots = torch.einsum("bid,bjd->bij", q, k) * self.scale
            attn = dots.softmax(dim=1) + self.eps
            attn = attn / attn.sum(dim=-1, keepdim=True)
            updates = torch.einsum("bjd,bij->bid", v, attn)
            slots = self.gru(updates.reshape(-1, dim), slots_prev.reshape(-1, dim)).reshape(batch, -1, dim)
            slots = slots + self.mlp(self.norm_mlp(slots))
        return slots


class SlotAutoEncoder(nn.Module):
    """CNN encoder, slot attention, and a decoder that paints every slot with its own mask."""

    def __init__(self, hidden, num_slots):
        super().__init__()
        self.num_slots = num_slots
        encoder, channels = [], 3
        for _ in range(4):
            encoder += [nn.Conv2d(channels, hidden, 5, padding=2), nn.ReLU()]
            channels = hidden
        self.encoder = nn.Sequential(*encoder)
        self.encoder_pos = SoftPositionEmbed(hidden, 64)
        self.norm = nn.LayerNorm(hidden)
        self.mlp = nn.Sequential(nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, hidden))
        self.slot_attention = SlotAttention(num_slots, hidden)
        self.decoder_pos = SoftPositionEmbed(hidden, 8)
        decoder = []
        for _ in range(3):
            decoder += [nn.ConvTranspose2d(hidden, hidden, 5, stride=2, padding=2, output_padding=1), nn.ReLU()]
        decoder += [nn.ConvTranspose2d(hidden, hidden, 5, padding=2), nn.ReLU()]
        self.decoder = nn.Sequential(*decoder, nn.ConvTranspose2d(hidden, 4, 3, padding=1))

    def forward(self, image):
        features = self.encoder_pos(self.encoder(image))
        features = self.mlp(self.norm(features.flatten(2).transpose(1, 2)))
        slots = self.slot_attention(features)
        grid = slots.reshape(-1, slots.shape[-1], 1, 1).repeat(1, 1, 8, 8)
        painted = self.decoder(self.decoder_pos(grid))
        painted = painted.reshape(image.shape[0], self.num_slots, 4, 64, 64)
        recons, masks = painted.split([3, 1], dim=2)
        masks = masks.softmax(dim=1)
        return (recons * masks).sum(dim=1), recons, masks, slots


def slot_scenes(change):
    """Trains Slot Attention on scenes of 64x64 with several objects."""
    torch.backends.cudnn.benchmark = change == "cudnn_benchmark"
    batch_size = size(32, 2)
    dataset = CrowdedScenes(size(512, 8))
    loader = DataLoader(dataset, batch_size=batch_size, shuffle=True, num_workers=0, drop_last=True)
    model = SlotAutoEncoder(hidden=size(64, 16), num_slots=7).to(device)
    if change == "channels_last":
        model = model.to(memory_format=torch.channels_last)
    optimizer = torch.optim.Adam(model.parameters(), lr=4e-4)
    batches = endless(loader)
    if change == "scenes_on_gpu":
        images = torch.from_numpy(dataset.images).to(device)
    history = []

    def load():
        if change == "scenes_on_gpu":
            chosen = torch.randint(len(images), (batch_size,), device=device)
            crops = images[:, 29:221, 64:256][chosen].permute(0, 3, 1, 2).float() / 255.0
            crops = F.interpolate(crops, size=(64, 64), mode="bilinear", antialias=True)
            return crops * 2.0 - 1.0
        return next(batches)["image"].to(device)

    def step():
        learning_rate = 4e-4 * min(1.0, (len(history) + 1) / 10000) * 0.5 ** (len(history) / 100000)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate
        image = load()
        if change == "channels_last":
            image = image.contiguous(memory_format=torch.channels_last)
        with bf16(change == "bf16"):
            recon, _, _, _ = model(image)
        loss = F.mse_loss(recon.float(), image)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        history.append(loss.item())
        return loss.detach()

    return step


class SparseDiffusion(torch.autograd.Function):
    """The product of a sparse matrix with a dense one; the backward pass uses the transpose that it is given."""

    @staticmethod
    def forward(ctx, support, transposed, x):
        ctx.transposed = transposed
        return torch.sparse.mm(support, x)

    @staticmethod
    def backward(ctx, grad):
        return None, None, torch.sparse.mm(ctx.transposed, grad.contiguous())


class DiffusionConv(nn.Module):
    """A graph convolution over random walks in both directions, of up to max_step steps."""

    def __init__(self, supports, in_dim, out_dim, max_step, bias_start, change):
        super().__init__()
        self.supports, self.max_step, self.change = supports, max_step, change
        self.num_matrices = 1 + 2 * max_step
        self.weight = nn.Parameter(torch.empty(in_dim * self.num_matrices, out_dim))
        self.bias = nn.Parameter(torch.full((out_dim,), bias_start))
        nn.init.xavier_normal_(self.weight)

    def walk(self, support, x):
        if self.change == "dense_supports":
            return support @ x
        if self.change == "transposed_supports":
            return SparseDiffusion.apply(*support, x)
        return torch.sparse.mm(support, x)

    def forward(self, inputs, state):
        x = torch.cat([inputs, state], dim=2)
        batch, nodes, dim = x.shape
        x0 = x.permute(1, 2, 0).reshape(nodes, dim * batch)
        if self.change == "stacked_diffusion":
            walked = torch.sparse.mm(self.supports[0], x0).reshape(-1, nodes, dim * batch)
            x = torch.cat([x0[None], walked])
        else:
            walks = [x0]
            for support in self.supports:
                x1 = self.walk(support, x0)
                walks.append(x1)
                previous = x0
                for _ in range(2, self.max_step + 1):
                    x2 = 2 * self.walk(support, x1) - previous
                    walks.append(x2)
                    previous, x1 = x1, x2
            x = torch.stack(walks, dim=0)
        x = x.reshape(self.num_matrices, nodes, dim, batch).permute(3, 1, 2, 0)
        x = x.reshape(batch * nodes, dim * self.num_matrices)
        return (torch.matmul(x, self.weight) + self.bias).reshape(batch, nodes, -1)


class DCGRUCell(nn.Module):
    """A GRU cell whose matrix products are diffusion convolutions."""

    def __init__(self, supports, in_dim, units, max_step, change):
        super().__init__()
        self.units = units
        self.gates = DiffusionConv(supports, in_dim + units, 2 * units, max_step, 1.0, change)
        self.candidate = DiffusionConv(supports, in_dim + units, units, max_step, 0.0, change)

    def forward(self, inputs, hx):
        value = torch.sigmoid(self.gates(inputs, hx))
        r, u = torch.split(value, self.units, dim=-1)
        c = torch.tanh(self.candidate(inputs, r * hx))
        return u * hx + (1.0 - u) * c


class DCRNN(nn.Module):
    """Encoder and decoder of DCGRU cells, trained with scheduled sampling."""

    def __init__(self, supports, units, layers, horizon, max_step, change):
        super().__init__()
        self.units, self.horizon = units, horizon
        dims = [units] * (layers - 1)
        self.encoder = nn.ModuleList(DCGRUCell(supports, dim, units, max_step, change) for dim in [2, *dims])
        self.decoder = nn.ModuleList(DCGRUCell(supports, dim, units, max_step, change) for dim in [1, *dims])
        self.projection = nn.Linear(units, 1)

    def forward(self, inputs, labels, threshold):
        _, batch, nodes, _ = inputs.shape
        hidden = [torch.zeros(batch, nodes, self.units, device=inputs.device) for _ in self.encoder]
        for t in range(inputs.shape[0]):
            x = inputs[t]
            for i, cell in enumerate(self.encoder):
                hidden[i] = x = cell(x, hidden[i])
        x = torch.zeros(batch, nodes, 1, device=inputs.device)
        outputs = []
        for t in range(self.horizon):
            for i, cell in enumerate(self.decoder):
                hidden[i] = x = cell(x, hidden[i])
            x = self.projection(x)
            outputs.append(x)
            if self.training and np.random.uniform(0, 1) < threshold:
                x = labels[t]
        return torch.stack(outputs)


def masked_mae(prediction, truth):
    """Return the mean absolute error where the sensors reported something."""
    mask = (truth != 0).float()
    mask = mask / mask.mean()
    loss = torch.abs(prediction - truth) * mask
    return torch.where(torch.isnan(loss), torch.zeros_like(loss), loss).mean()


def road_supports(nodes, rng):
    """Return the transition matrices of the random walks along a road network and against its direction."""
    places = rng.uniform(0, 1, (nodes, 2))
    distance = np.linalg.norm(places[:, None] - places[None], axis=-1) * rng.uniform(1, 1.3, (nodes, nodes))
    near = np.sort(distance, axis=1)[:, min(9, nodes - 1)][:, None]
    adjacency = np.where(distance <= near, np.exp(-((distance / distance.std()) ** 2)), 0).astype(np.float32)
    walk = adjacency / adjacency.sum(1, keepdims=True)
    back = adjacency.T / adjacency.T.sum(1, keepdims=True)
    return torch.from_numpy(walk.T.copy()), torch.from_numpy(back.T.copy())


def sensor_traffic(change):
    """Trains DCRNN on the speeds that 207 sensors of a road network measure."""
    rng = np.random.default_rng(0)
    np.random.seed(0)
    nodes, window, batch_size, max_step = size(207, 12), size(12, 3), size(64, 4), 2
    count = size(1024, 16)
    times = np.arange(count + 2 * window)
    day = times[:, None] % 288 / 288
    speed = 60 - 20 * np.sin(6.28 * (day + rng.uniform(0, 1, nodes))) ** 2 + rng.normal(0, 3, (len(times), nodes))
    speed[rng.random(speed.shape) < 0.05] = 0
    mean, std = speed.mean(), speed.std()
    series = np.stack([speed, np.broadcast_to(day, speed.shape)], axis=-1)
    xs = np.stack([series[i : i + window] for i in range(count)])
    ys = np.stack([series[i + window : i + 2 * window] for i in range(count)])
    xs[..., 0] = (xs[..., 0] - mean) / std
    ys[..., 0] = (ys[..., 0] - mean) / std

    supports = [support.to(device) for support in road_supports(nodes, rng)]
    if change == "stacked_diffusion":
        eye = torch.eye(nodes, device=device)
        powers = [power for one in supports for power in (one, 2 * one @ one - eye)]
        supports = [torch.cat(powers).to_sparse().coalesce()]
    elif change == "transposed_supports":
        supports = [(one.to_sparse().coalesce(), one.t().to_sparse().coalesce()) for one in supports]
    elif change != "dense_supports":
        supports = [one.to_sparse().coalesce() for one in supports]
    model = DCRNN(supports, size(64, 8), 2, window, max_step, change).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, eps=1e-3)
    if change == "batches_on_gpu":
        xs, ys = (torch.from_numpy(part).float().to(device) for part in (xs, ys))

    def epochs():
        while True:
            order = np.random.permutation(count)
            if change == "batches_on_gpu":
                order = torch.from_numpy(order).to(device)
            for start in range(0, count - batch_size + 1, batch_size):
                chosen = order[start : start + batch_size]
                yield xs[chosen], ys[chosen]

    batches, losses = epochs(), []

    def step():
        x, y = next(batches)
        if change != "batches_on_gpu":
            x, y = torch.from_numpy(x).float().to(device), torch.from_numpy(y).float().to(device)
        x, y = x.permute(1, 0, 2, 3), y.permute(1, 0, 2, 3)[..., :1]
        threshold = 2000 / (2000 + np.exp(len(losses) / 2000))
        optimizer.zero_grad()
        output = model(x, y, threshold)
        truth = y * std + mean
        truth = torch.where(truth.abs() < 1e-3, torch.zeros_like(truth), truth)
        loss = masked_mae(output * std + mean, truth)
        losses.append(loss.item())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5)
        optimizer.step()
        return loss.detach()

    return step


def neighbor_rows(nodes, neighbors):
    """Gather the features of nodes [B,N,C] at the neighbours [B,L,K]: [B,L,K,C]."""
    flat = neighbors.reshape(neighbors.shape[0], -1, 1).expand(-1, -1, nodes.shape[2])
    return torch.gather(nodes, 1, flat).view(*neighbors.shape, nodes.shape[2])


def cat_neighbors(nodes, edges, neighbors):
    """Append the neighbours' node features to those of the edges."""
    return torch.cat([edges, neighbor_rows(nodes, neighbors)], -1)


class BackboneFeatures(nn.Module):
    """Edges to the nearest residues with distances of all pairs of backbone atoms and the offset in the chain."""

    def __init__(self, hidden, top_k, num_rbf=16):
        super().__init__()
        self.top_k, self.num_rbf = top_k, num_rbf
        self.positions = nn.Linear(66, 16)
        self.edge_embedding = nn.Linear(16 + 25 * num_rbf, hidden, bias=False)
        self.norm_edges = nn.LayerNorm(hidden)

    def rbf(self, a, b, neighbors):
        distance = torch.sqrt(((a[:, :, None] - b[:, None]) ** 2).sum(-1) + 1e-6)
        distance = torch.gather(distance, 2, neighbors)
        centers = torch.linspace(2.0, 22.0, self.num_rbf, device=a.device).view(1, 1, 1, -1)
        return torch.exp(-(((distance[..., None] - centers) / (20.0 / self.num_rbf)) ** 2))

    def forward(self, coords, residue_idx):
        n, ca, c, o = coords.unbind(2)
        b, e = ca - n, c - ca
        cb = -0.58273431 * torch.cross(b, e, dim=-1) + 0.56802827 * b - 0.54067466 * e + ca
        distance = torch.sqrt(((ca[:, :, None] - ca[:, None]) ** 2).sum(-1) + 1e-6)
        neighbors = torch.topk(distance, min(self.top_k, ca.shape[1]), dim=-1, largest=False)[1]
        atoms = [n, ca, c, o, cb]
        rbf = torch.cat([self.rbf(one, other, neighbors) for one in atoms for other in atoms], dim=-1)
        offset = torch.gather(residue_idx[:, :, None] - residue_idx[:, None], 2, neighbors)
        position = self.positions(F.one_hot((offset + 32).clamp(0, 64), 66).float())
        return self.norm_edges(self.edge_embedding(torch.cat([position, rbf], -1))), neighbors


class MPNNLayer(nn.Module):
    """One layer of messages from the edges to the nodes; in the encoder the edges are renewed too."""

    def __init__(self, hidden, in_dim, renew_edges):
        super().__init__()
        self.renew_edges = renew_edges
        self.W1, self.W2, self.W3 = nn.Linear(hidden + in_dim, hidden), *(nn.Linear(hidden, hidden) for _ in "23")
        if renew_edges:
            self.W11, self.W12 = nn.Linear(hidden + in_dim, hidden), nn.Linear(hidden, hidden)
            self.W13, self.norm3 = nn.Linear(hidden, hidden), nn.LayerNorm(hidden)
        self.norm1, self.norm2, self.dropout = nn.LayerNorm(hidden), nn.LayerNorm(hidden), nn.Dropout(0.1)
        self.dense = nn.Sequential(nn.Linear(hidden, 4 * hidden), nn.GELU(), nn.Linear(4 * hidden, hidden))

    def forward(self, h_V, h_E, neighbors=None):
        edges = cat_neighbors(h_V, h_E, neighbors) if self.renew_edges else h_E
        expanded = h_V.unsqueeze(-2).expand(-1, -1, edges.size(-2), -1)
        message = self.W3(F.gelu(self.W2(F.gelu(self.W1(torch.cat([expanded, edges], -1))))))
        h_V = self.norm1(h_V + self.dropout(message.sum(-2) / 30))
        h_V = self.norm2(h_V + self.dropout(self.dense(h_V)))
        if not self.renew_edges:
            return h_V
        edges = torch.cat([expanded, cat_neighbors(h_V, h_E, neighbors)], -1)
        message = self.W13(F.gelu(self.W12(F.gelu(self.W11(edges)))))
        return h_V, self.norm3(h_E + self.dropout(message))


class ProteinDesigner(nn.Module):
    """ProteinMPNN: an encoder of backbones and a decoder that chooses the residues in a random order."""

    def __init__(self, hidden, top_k, letters=21):
        super().__init__()
        self.hidden = hidden
        self.features = BackboneFeatures(hidden, top_k)
        self.W_e, self.W_s = nn.Linear(hidden, hidden), nn.Embedding(letters, hidden)
        self.W_out = nn.Linear(hidden, letters)
        self.encoder = nn.ModuleList(MPNNLayer(hidden, 2 * hidden, True) for _ in range(3))
        self.decoder = nn.ModuleList(MPNNLayer(hidden, 3 * hidden, False) for _ in range(3))

    def encode(self, coords, residue_idx):
        h_E, neighbors = self.features(coords, residue_idx)
        h_E = self.W_e(h_E)
        h_V = torch.zeros(*h_E.shape[:2], self.hidden, device=h_E.device)
        for layer in self.encoder:
            h_V, h_E = layer(h_V, h_E, neighbors)
        return h_V, h_E, neighbors


def at_residue(x, t):
    """Gather the entries of x [B,N,...] at the residues t [B]."""
    index = t.view(-1, *[1] * (x.dim() - 1)).repeat(1, 1, *x.shape[2:])
    return torch.gather(x, 1, index)


def put_residue(x, t, value):
    """Write the value [B,1,...] into x [B,N,...] at the residues t [B]."""
    x.scatter_(1, t.view(-1, *[1] * (x.dim() - 1)).repeat(1, 1, *x.shape[2:]), value)


def sequence_for_backbone(change):
    """Designs several sequences for the backbone of a protein with ProteinMPNN; some residues are fixed."""
    alphabet, rng = "ACDEFGHIKLMNPQRSTVWYX", np.random.default_rng(0)
    length, designs, temperature = size(32, 10), size(3, 2), 0.1
    model = ProteinDesigner(hidden=size(128, 16), top_k=size(48, 5)).to(device).eval()
    omit = torch.tensor([letter == "X" for letter in alphabet], device=device).float()
    backbones = []
    for _ in range(8):
        ca = np.cumsum(rng.normal(0, 1, (length, 3)) * 2.2, axis=0)
        coords = ca[:, None] + rng.normal(0, 0.9, (length, 4, 3))
        sequence = "".join(rng.choice(list(alphabet[:20]), length))
        backbones.append({"coords": coords.tolist(), "sequence": sequence, "fixed": list(range(length // 10))})
    take, put = at_residue, put_residue
    if change == "decode_in_order":
        take = lambda x, t: x[:, t : t + 1]  # noqa: E731

        def put(x, t, value):
            x[:, t : t + 1] = value

    def featurize(backbone, copies):
        coords = torch.tensor([backbone["coords"]] * copies, dtype=torch.float32, device=device)
        letters = [[alphabet.index(letter) for letter in backbone["sequence"]]] * copies
        chain_mask = torch.ones(copies, length, device=device)
        chain_mask[:, backbone["fixed"]] = 0.0
        residue_idx = torch.arange(length, device=device)[None].repeat(copies, 1)
        mask = torch.isfinite(coords.sum(dim=(2, 3))).float()
        return coords, residue_idx, torch.tensor(letters, device=device), chain_mask, mask

    def prepare(h_V, h_E, neighbors, S_true, chain_mask, mask):
        noise = torch.randn(chain_mask.shape, device=device)
        order = torch.argsort((chain_mask + 0.0001) * noise.abs())
        chosen = order
        if change == "decode_in_order":
            back = torch.argsort(order)
            neighbors = torch.gather(back[:, None].expand(-1, length, -1), 2, neighbors)
            neighbors = torch.gather(neighbors, 1, order[..., None].expand_as(neighbors))
            h_V = torch.gather(h_V, 1, order[..., None].expand_as(h_V))
            h_E = torch.gather(h_E, 1, order[..., None, None].expand_as(h_E))
            S_true, chain_mask, mask = (torch.gather(x, 1, order) for x in (S_true, chain_mask, mask))
            order = torch.arange(length, device=device)[None].expand_as(order)
        permutation = F.one_hot(order, length).float()
        earlier = 1 - torch.triu(torch.ones(length, length, device=device))
        backward_mask = torch.einsum("ij,biq,bjp->bqp", earlier, permutation, permutation)
        mask_bw = torch.gather(backward_mask, 2, neighbors).unsqueeze(-1)
        h_S = torch.zeros_like(h_V)
        h_EXV = cat_neighbors(h_V, cat_neighbors(h_S, h_E, neighbors), neighbors)
        log_probs = torch.zeros(*h_V.shape[:2], len(alphabet), device=device)
        h_V_stack = [h_V.clone()] + [torch.zeros_like(h_V) for _ in model.decoder]
        return SimpleNamespace(
            order=order, chosen=chosen, neighbors=neighbors, h_E=h_E, h_EXV=(1.0 - mask_bw) * h_EXV, mask_bw=mask_bw,
            S_true=S_true, chain_mask=chain_mask, h_S=h_S, h_V_stack=h_V_stack, log_probs=log_probs,
            S=torch.zeros_like(S_true), mask=mask,
        )  # fmt: skip

    def decode_residue(s, t):
        designed, S_true_t = take(s.chain_mask, t), take(s.S_true, t)
        if change != "cuda_graph" and (take(s.mask, t) == 0).all():  # Residues without coordinates keep their letter.
            put(s.h_S, t, model.W_s(S_true_t))
            put(s.S, t, S_true_t)
            return
        neighbors_t = take(s.neighbors, t)
        h_ES_t = cat_neighbors(s.h_S, take(s.h_E, t), neighbors_t)
        h_EXV_t = take(s.h_EXV, t)
        for i, layer in enumerate(model.decoder):
            h_ESV_t = cat_neighbors(s.h_V_stack[i], h_ES_t, neighbors_t)
            h_ESV_t = take(s.mask_bw, t) * h_ESV_t + h_EXV_t
            put(s.h_V_stack[i + 1], t, layer(take(s.h_V_stack[i], t), h_ESV_t))
        logits = model.W_out(take(s.h_V_stack[-1], t).squeeze(1))
        probs = F.softmax(logits / temperature - omit * 1e8, dim=-1)
        if change == "cuda_graph":
            S_t = (probs / torch.empty_like(probs).exponential_()).argmax(-1, keepdim=True)
        else:
            S_t = torch.multinomial(probs, 1)
        S_t = (S_t * designed + S_true_t * (1.0 - designed)).long()
        put(s.log_probs, t, F.log_softmax(logits, dim=-1)[:, None])
        put(s.h_S, t, model.W_s(S_t))
        put(s.S, t, S_t)

    if change == "cuda_graph":
        with torch.no_grad():
            coords, residue_idx, *chain = featurize(backbones[0], 1)
            static = prepare(*model.encode(coords, residue_idx), *chain)
            position = torch.zeros(1, dtype=torch.long, device=device)

            def next_residue():
                decode_residue(static, static.order.index_select(1, position).squeeze(1))
                position.add_(1)

            replay = graphed(next_residue)

    def sample(encoded, chain):
        s = prepare(*encoded, *chain)
        if change == "cuda_graph":
            for name, value in vars(s).items():
                pairs = (
                    zip(getattr(static, name), value, strict=True)
                    if name == "h_V_stack"
                    else [(getattr(static, name), value)]
                )
                for buffer, fresh in pairs:
                    buffer.copy_(fresh)
            position.zero_()
            for _ in range(length):
                replay()
            s = static
        else:
            for i in range(length):
                decode_residue(s, i if change == "decode_in_order" else s.order[:, i])
        log_probs = torch.gather(s.log_probs, 2, s.S[..., None]).squeeze(-1)
        scores = -(log_probs * s.chain_mask).sum(1) / s.chain_mask.sum(1)
        S = s.S
        if change == "decode_in_order":
            S = torch.zeros_like(S).scatter(1, s.chosen, S)
        return S, scores

    served = []

    @torch.no_grad()
    def step():
        backbone = backbones[len(served) % len(backbones)]
        copies = designs if change == "designs_in_batch" else 1
        sequences, scores, encoded = [], [], None
        for _ in range(designs // copies):
            coords, residue_idx, *chain = featurize(backbone, copies)
            if encoded is None or change != "encode_once":
                encoded = model.encode(coords, residue_idx)
            S, score = sample(encoded, chain)
            scores.append(score)
            for row in S.cpu().tolist():
                sequences.append("".join(alphabet[letter] for letter in row))
        served.append(sequences)
        return torch.cat(scores)

    return step


class MovingClips(Dataset):
    """Clips of seven frames in memory, in low and fourfold resolution, from which patches are cut at random."""

    def __init__(self, count, frames, patch, scale=4):
        self.patch, self.scale = patch, scale
        height, width = patch * scale, patch * scale * 7 // 4
        self.clips = []
        for _ in range(count):
            scene = F.interpolate(torch.rand(1, 3, 40, 64), size=(height + 64, width + 64), mode="bilinear")
            scene = (scene + 0.1 * torch.rand(scene.shape)).clamp(0, 1)
            dy, dx = np.random.randint(0, 64 // frames, 2)
            high = torch.cat([scene[..., i * dy :, i * dx :][..., :height, :width] for i in range(frames)])
            low = F.interpolate(high, scale_factor=1 / scale, mode="bicubic", antialias=True).clamp(0, 1)
            self.clips.append([(x * 255).byte().permute(0, 2, 3, 1).contiguous().numpy() for x in (low, high)])

    def __len__(self):
        return len(self.clips)

    def __getitem__(self, index):
        low, high = self.clips[index]
        p, s = self.patch, self.scale
        y, x = np.random.randint(0, low.shape[1] - p + 1), np.random.randint(0, low.shape[2] - p + 1)
        flip, turn = np.random.random() < 0.5, np.random.random() < 0.5
        pair = []
        for clip, k in ((low, 1), (high, s)):
            frames = []
            for frame in clip:
                frame = frame[y * k : (y + p) * k, x * k : (x + p) * k].astype(np.float32) / 255.0
                frame = frame[:, ::-1] if flip else frame
                frame = frame.transpose(1, 0, 2) if turn else frame
                frames.append(torch.from_numpy(np.ascontiguousarray(frame.transpose(2, 0, 1))))
            pair.append(torch.stack(frames))
        return {"lq": pair[0], "gt": pair[1]}


def flow_warp(x, flow, padding_mode="zeros"):
    """Warp the features x [B,C,H,W] by the flow [B,H,W,2]."""
    _, _, h, w = x.shape
    grid_y, grid_x = torch.meshgrid(
        torch.arange(h, device=x.device, dtype=flow.dtype),
        torch.arange(w, device=x.device, dtype=flow.dtype),
        indexing="ij",
    )
    grid = torch.stack((grid_x, grid_y), 2) + flow
    grid_x = 2.0 * grid[..., 0] / max(w - 1, 1) - 1.0
    grid_y = 2.0 * grid[..., 1] / max(h - 1, 1) - 1.0
    grid = torch.stack((grid_x, grid_y), dim=3)
    return F.grid_sample(x, grid, mode="bilinear", padding_mode=padding_mode, align_corners=True)


class SmallSpyNet(nn.Module):
    """Optical flow from coarse to fine with a small network on each level of the pyramid."""

    def __init__(self, levels):
        super().__init__()
        dims = [8, 32, 64, 32, 16, 2]
        self.levels = nn.ModuleList()
        for _ in range(levels):
            layers = []
            for before, after in pairwise(dims):
                layers += [nn.Conv2d(before, after, 7, padding=3), nn.ReLU()]
            self.levels.append(nn.Sequential(*layers[:-1]))
        self.register_buffer("mean", torch.tensor([0.485, 0.456, 0.406]).view(1, 3, 1, 1))
        self.register_buffer("std", torch.tensor([0.229, 0.224, 0.225]).view(1, 3, 1, 1))

    def forward(self, ref, supp):
        ref, supp = [(ref - self.mean) / self.std], [(supp - self.mean) / self.std]
        for _ in range(len(self.levels) - 1):
            ref.insert(0, F.avg_pool2d(ref[0], 2, 2, count_include_pad=False))
            supp.insert(0, F.avg_pool2d(supp[0], 2, 2, count_include_pad=False))
        flow = ref[0].new_zeros(ref[0].size(0), 2, *ref[0].shape[2:])
        for i, level in enumerate(self.levels):
            if i > 0:
                flow = F.interpolate(flow, scale_factor=2, mode="bilinear", align_corners=True) * 2.0
            warped = flow_warp(supp[i], flow.permute(0, 2, 3, 1), padding_mode="border")
            flow = flow + level(torch.cat([ref[i], warped, flow], 1))
        return flow


class ResidualBlockNoBN(nn.Module):
    """Two convolutions and a skip connection."""

    def __init__(self, channels):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(channels, channels, 3, 1, 1), nn.Conv2d(channels, channels, 3, 1, 1)
        self.relu = nn.ReLU(inplace=True)
        for conv in (self.conv1, self.conv2):
            nn.init.kaiming_normal_(conv.weight)
            conv.weight.data *= 0.1

    def forward(self, x):
        return x + self.conv2(self.relu(self.conv1(x)))


class BasicVSR(nn.Module):
    """Recurrent super-resolution with propagation of aligned features in both directions."""

    def __init__(self, channels, blocks, levels, half=False, together=False):
        super().__init__()
        self.channels, self.half, self.together = channels, half, together
        self.spynet = SmallSpyNet(levels)
        self.backward_trunk, self.forward_trunk = (
            nn.Sequential(
                nn.Conv2d(channels + 3, channels, 3, 1, 1),
                nn.LeakyReLU(0.1, inplace=True),
                *(ResidualBlockNoBN(channels) for _ in range(blocks)),
            )
            for _ in range(2)
        )
        self.fusion = nn.Conv2d(2 * channels, channels, 1)
        self.upconv1, self.upconv2 = (nn.Conv2d(channels, 4 * channels, 3, 1, 1) for _ in range(2))
        self.conv_hr, self.conv_last = nn.Conv2d(channels, channels, 3, 1, 1), nn.Conv2d(channels, 3, 3, 1, 1)
        self.pixel_shuffle, self.lrelu = nn.PixelShuffle(2), nn.LeakyReLU(0.1, inplace=True)

    def get_flow(self, x):
        b, n, c, h, w = x.shape
        x_1, x_2 = x[:, :-1].reshape(-1, c, h, w), x[:, 1:].reshape(-1, c, h, w)
        backward = self.spynet(x_1, x_2).view(b, n - 1, 2, h, w)
        return self.spynet(x_2, x_1).view(b, n - 1, 2, h, w), backward

    def reconstruct(self, features, frame):
        out = self.lrelu(self.fusion(features))
        out = self.lrelu(self.pixel_shuffle(self.upconv1(out)))
        out = self.lrelu(self.pixel_shuffle(self.upconv2(out)))
        out = self.conv_last(self.lrelu(self.conv_hr(out)))
        return out + F.interpolate(frame, scale_factor=4, mode="bilinear", align_corners=False)

    def propagate(self, x, flows_forward, flows_backward):
        b, n, _, h, w = x.shape
        out = []
        feat = x.new_zeros(b, self.channels, h, w)
        for i in range(n - 1, -1, -1):
            if i < n - 1:
                feat = flow_warp(feat, flows_backward[:, i].permute(0, 2, 3, 1))
            feat = self.backward_trunk(torch.cat([x[:, i], feat], dim=1))
            out.insert(0, feat)
        feat = torch.zeros_like(feat)
        for i in range(n):
            if i > 0:
                feat = flow_warp(feat, flows_forward[:, i - 1].permute(0, 2, 3, 1))
            feat = self.forward_trunk(torch.cat([x[:, i], feat], dim=1))
            out[i] = torch.cat([out[i], feat], dim=1)
            if not self.together:
                out[i] = self.reconstruct(out[i], x[:, i])
        out = torch.stack(out, dim=1)
        if self.together:
            out = self.reconstruct(out.flatten(0, 1), x.flatten(0, 1)).unflatten(0, (b, n))
        return out

    def forward(self, x):
        flows = self.get_flow(x)
        with bf16(self.half):
            return self.propagate(x, *flows)


def video_upscaler(change):
    """Trains BasicVSR for fourfold super-resolution on septuplets of frames."""
    np.random.seed(0)
    batch_size, frames, patch = size(4, 1), size(7, 3), size(64, 16)
    dataset = MovingClips(size(48, 4), frames, patch)
    options = {"num_workers": 0}
    if change == "loader_workers":
        options = {"num_workers": size(4, 1), "multiprocessing_context": "fork", "persistent_workers": True}
        options["pin_memory"] = device.type == "cuda"
    loader = DataLoader(dataset, batch_size=batch_size, shuffle=True, drop_last=True, **options)
    batches = endless(loader)
    first = next(batches)
    model = BasicVSR(
        size(64, 8), size(10, 2), size(6, 3), half=change == "bf16", together=change == "frames_in_batch"
    ).to(device)
    flow = list(model.spynet.parameters())
    rest = [parameter for name, parameter in model.named_parameters() if not name.startswith("spynet")]
    groups = [{"params": rest, "lr": 2e-4}, {"params": flow, "lr": 2.5e-5}]
    optimizer = torch.optim.Adam(groups, betas=(0.9, 0.99), capturable=change == "cuda_graph" and device.type == "cuda")
    log = []

    def train(lq, gt):
        optimizer.zero_grad()
        output = model(lq)
        loss = torch.sqrt((output.float() - gt) ** 2 + 1e-12).mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    if change == "cuda_graph":
        lq, gt = first["lq"].to(device), first["gt"].to(device)
        replay = graphed_training(lambda: train(lq, gt), [model], [optimizer])

    def step():
        data = next(batches)
        if change == "cuda_graph":
            lq.copy_(data["lq"])
            gt.copy_(data["gt"])
            loss = replay()
        else:
            pinned = change == "loader_workers"
            loss = train(data["lq"].to(device, non_blocking=pinned), data["gt"].to(device, non_blocking=pinned))
        log.append({"l_pix": loss.item()})
        return loss.clone()

    return step


PROGRAMS = {
    slot_scenes: {
        "bf16": "half_precision",
        "channels_last": "channels_last",
        "scenes_on_gpu": "data_loader",
        "cudnn_benchmark": "",
    },
    sensor_traffic: {
        "dense_supports": "",
        "stacked_diffusion": "",
        "transposed_supports": "",
        "batches_on_gpu": "python",
    },
    sequence_for_backbone: {
        "designs_in_batch": "larger_batch",
        "cuda_graph": "cuda_graph",
        "decode_in_order": "",
        "encode_once": "",
    },
    video_upscaler: {
        "loader_workers": "data_loader",
        "cuda_graph": "cuda_graph",
        "bf16": "half_precision",
        "frames_in_batch": "loop_outputs",
    },
}
