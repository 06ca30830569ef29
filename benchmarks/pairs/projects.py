"""Projects of teams: X-rays, image translation, BERT, demand, a graph of products, photos by text, PPO and videos."""

import itertools
import math

import numpy as np
import torch
import torch.nn.functional as F
from setting import compiled, device, endless, graphed, graphed_training, size, use_tf32
from torch import nn
from torch.distributions import Normal
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler

ON_GPU = device.type == "cuda"


def primed(loader):
    """Return an endless iterator whose workers have been started already (before the first use of CUDA)."""
    batches = endless(loader)
    first = next(batches)
    return itertools.chain([first], batches)


def loader_of(dataset, batch_size, workers, collate_fn=None):
    """Return a shuffling DataLoader with its own random order, so that the model's random numbers are its own."""
    order = RandomSampler(dataset, generator=torch.Generator().manual_seed(11))
    more = {"persistent_workers": True, "multiprocessing_context": "fork"} if workers else {}
    return DataLoader(
        dataset,
        batch_size=batch_size,
        sampler=order,
        drop_last=True,
        num_workers=workers,
        pin_memory=ON_GPU and workers > 0,
        collate_fn=collate_fn,
        **more,
    )


# 1. ViT fine-tuning on chest X-rays ---------------------------------------------------------------------------------

FINDINGS = 14


class ChestXrays(Dataset):
    """Greyscale films with 14 findings each, cropped, flipped and normalised."""

    def __init__(self, count, pixels):
        rng = np.random.default_rng(0)
        self.pixels = pixels
        self.films = rng.integers(0, 256, (count, pixels + pixels // 7, pixels + pixels // 7), dtype=np.uint8)
        self.labels = (rng.random((count, FINDINGS)) < 0.15).astype(np.float32)

    def __len__(self):
        return len(self.films)

    def __getitem__(self, i):
        rng = np.random.default_rng(i)
        top, left = rng.integers(0, self.pixels // 7, 2)
        film = self.films[i, top : top + self.pixels, left : left + self.pixels].astype(np.float32) / 255.0
        if rng.random() < 0.5:
            film = film[:, ::-1]
        film = (film - film.mean()) / (film.std() + 1e-6)
        return torch.from_numpy(np.ascontiguousarray(film)).unsqueeze(0), torch.from_numpy(self.labels[i])


class ViTAttention(nn.Module):
    def __init__(self, dim, heads, sdpa):
        super().__init__()
        self.heads, self.scale, self.sdpa = heads, (dim // heads) ** -0.5, sdpa
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x):
        b, n, c = x.shape
        q, k, v = self.qkv(x).reshape(b, n, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        if self.sdpa:
            x = F.scaled_dot_product_attention(q, k, v)
        else:
            attn = (q * self.scale) @ k.transpose(-2, -1)
            x = attn.softmax(dim=-1) @ v
        return self.proj(x.transpose(1, 2).reshape(b, n, c))


class ViTBlock(nn.Module):
    def __init__(self, dim, heads, sdpa):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attn = ViTAttention(dim, heads, sdpa)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class ViT(nn.Module):
    def __init__(self, pixels, patch, dim, depth, heads, sdpa):
        super().__init__()
        self.patch_embed = nn.Conv2d(1, dim, patch, patch)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, dim))
        self.pos_embed = nn.Parameter(torch.randn(1, (pixels // patch) ** 2 + 1, dim) * 0.02)
        self.blocks = nn.ModuleList(ViTBlock(dim, heads, sdpa) for _ in range(depth))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, FINDINGS)

    def forward(self, x):
        x = self.patch_embed(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], dim=1) + self.pos_embed
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)[:, 0])


def layer_decay_groups(model, lr, decay):
    """Return parameter groups whose learning rate falls from the head to the first layer."""
    depth = len(model.blocks)
    groups = {}
    for name, p in model.named_parameters():
        if name.startswith("blocks."):
            layer = int(name.split(".")[1]) + 1
        else:
            layer = depth + 1 if name.startswith(("head", "norm")) else 0
        weight_decay = 0.0 if p.ndim <= 1 else 0.05
        group = groups.setdefault(
            (layer, weight_decay), {"params": [], "lr": lr * decay ** (depth + 1 - layer), "weight_decay": weight_decay}
        )
        group["params"].append(p)
    return list(groups.values())


def xray_vit(change):
    """Fine-tunes a ViT-S/16 on chest X-rays with 14 findings and reports losses and per-finding metrics each step."""
    torch.manual_seed(0)
    if change == "tf32":
        use_tf32()
    batch, pixels, depth = size(16, 3), size(224, 32), size(12, 2)
    batches = primed(loader_of(ChestXrays(size(480, 12), pixels), batch, workers=size(4, 0)))
    dim = size(384, 32)
    model = ViT(pixels, size(16, 8), dim, depth, heads=dim // size(64, 8), sdpa=change == "sdpa").to(device)
    optimizer = torch.optim.AdamW(layer_decay_groups(model, 5e-4, 0.75))
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10_000)
    pos_weight = torch.full((FINDINGS,), 3.0, device=device)
    forward = compiled(model) if change == "compiled" else model
    running = {"bce": 0.0, "focal": 0.0, "accuracy": 0.0, "recall": 0.0}
    sums = torch.zeros(4, device=device)

    def metrics_on_device(logits, labels, bce, focal):
        hit = (logits > 0) == (labels > 0.5)
        positive = labels.sum(0).clamp(min=1)
        recall = ((logits > 0) * labels).sum(0) / positive
        sums.add_(torch.stack([bce, focal, hit.float().mean(), recall.mean()]))

    def metrics(logits, labels, bce, focal):
        running["bce"] += bce.item()
        running["focal"] += focal.item()
        predicted = (logits.sigmoid() > 0.5).float()
        accuracy, recall = [], []
        for c in range(FINDINGS):
            accuracy.append((predicted[:, c] == labels[:, c]).float().mean().item())
            positives = labels[:, c].sum().item()
            recall.append((predicted[:, c] * labels[:, c]).sum().item() / max(positives, 1))
        running["accuracy"] += np.mean(accuracy)
        running["recall"] += np.mean(recall)

    def step():
        model.train()
        films, labels = next(batches)
        films, labels = films.to(device, non_blocking=True), labels.to(device, non_blocking=True)
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=change == "bf16"):
            logits = forward(films)
        logits = logits.float()
        each = F.binary_cross_entropy_with_logits(logits, labels, reduction="none")
        bce = F.binary_cross_entropy_with_logits(logits, labels, pos_weight=pos_weight)
        focal = ((1 - torch.exp(-each)) ** 2 * each).mean()
        loss = 0.7 * bce + 0.3 * focal
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        record = metrics_on_device if change == "device_metrics" else metrics
        record(logits.detach(), labels, bce.detach(), focal.detach())
        return loss.detach()

    return step


# 2. pix2pix ---------------------------------------------------------------------------------------------------------


class Facades(Dataset):
    """Side-by-side pairs (drawing, photo), with pix2pix's jitter: a random crop and a random flip of both."""

    def __init__(self, count, pixels):
        rng = np.random.default_rng(1)
        self.pixels, self.load = pixels, pixels + pixels // 8
        self.pairs = rng.integers(0, 256, (count, self.load, 2 * self.load, 3), dtype=np.uint8)

    def __len__(self):
        return len(self.pairs)

    def __getitem__(self, i):
        rng = np.random.default_rng(i)
        top, left = rng.integers(0, self.load - self.pixels, 2)
        flip = rng.random() < 0.5
        out = []
        for half in (self.pairs[i, :, : self.load], self.pairs[i, :, self.load :]):
            image = half[top : top + self.pixels, left : left + self.pixels].astype(np.float32) / 255.0
            if flip:
                image = image[:, ::-1]
            image = (image - 0.5) / 0.5
            out.append(torch.from_numpy(np.ascontiguousarray(image.transpose(2, 0, 1))))
        return {"A": out[0], "B": out[1]}


class UNetBlock(nn.Module):
    """One level of the U-Net, with the levels below it inside."""

    def __init__(self, outer, inner, below=None, outermost=False, dropout=False):
        super().__init__()
        self.outermost = outermost
        down = nn.Conv2d(3 if outermost else outer, inner, 4, 2, 1)
        up = nn.ConvTranspose2d(2 * inner if below else inner, outer, 4, 2, 1)
        if outermost:
            layers = [down, below, nn.ReLU(True), up, nn.Tanh()]
        elif below is None:
            layers = [nn.LeakyReLU(0.2, False), down, nn.ReLU(True), up, nn.InstanceNorm2d(outer)]
        else:
            layers = [
                nn.LeakyReLU(0.2, False),
                down,
                nn.InstanceNorm2d(inner),
                below,
                nn.ReLU(True),
                up,
                nn.InstanceNorm2d(outer),
            ]
        if dropout:
            layers.append(nn.Dropout(0.5))
        self.model = nn.Sequential(*layers)

    def forward(self, x):
        return self.model(x) if self.outermost else torch.cat([x, self.model(x)], 1)


def unet(width, downs):
    block = UNetBlock(8 * width, 8 * width)
    for _ in range(downs - 5):
        block = UNetBlock(8 * width, 8 * width, block, dropout=True)
    for outer, inner in ((4, 8), (2, 4), (1, 2)):
        block = UNetBlock(outer * width, inner * width, block)
    return UNetBlock(3, width, block, outermost=True)


def patch_discriminator(width):
    layers = [nn.Conv2d(6, width, 4, 2, 1), nn.LeakyReLU(0.2, True)]
    for outer, inner, stride in ((1, 2, 2), (2, 4, 2), (4, 8, 1)):
        layers += [
            nn.Conv2d(outer * width, inner * width, 4, stride, 1),
            nn.InstanceNorm2d(inner * width),
            nn.LeakyReLU(0.2, True),
        ]
    return nn.Sequential(*layers, nn.Conv2d(8 * width, 1, 4, 1, 1))


def init_weights(module):
    if isinstance(module, (nn.Conv2d, nn.ConvTranspose2d)):
        nn.init.normal_(module.weight, 0.0, 0.02)
        nn.init.zeros_(module.bias)


def pix2pix(change):
    """Trains pix2pix (a U-Net generator and a patch discriminator) on 256x256 facades with batches of 4."""
    torch.manual_seed(0)
    if change == "benchmark":
        torch.backends.cudnn.benchmark = True
    pixels, width = size(256, 64), size(64, 4)
    workers = size(4, 1) if change == "workers" else 0
    batches = primed(loader_of(Facades(size(160, 6), pixels), size(4, 2), workers))
    layout = torch.channels_last if change == "channels_last" else torch.contiguous_format
    net_g = unet(width, size(8, 6)).apply(init_weights).to(device, memory_format=layout)
    net_d = patch_discriminator(width).apply(init_weights).to(device, memory_format=layout)
    optimizer_g = torch.optim.Adam(net_g.parameters(), lr=2e-4, betas=(0.5, 0.999))
    optimizer_d = torch.optim.Adam(net_d.parameters(), lr=2e-4, betas=(0.5, 0.999))
    criterion_gan, criterion_l1 = nn.MSELoss(), nn.L1Loss()
    history = []

    def gan_loss(prediction, real):
        target = torch.tensor(1.0 if real else 0.0).to(device).expand_as(prediction)
        return criterion_gan(prediction.float(), target)

    def step():
        data = next(batches)
        real_a = data["A"].to(device, memory_format=layout)
        real_b = data["B"].to(device, memory_format=layout)
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=change == "bf16"):
            fake_b = net_g(real_a)

            if change == "frozen_d":
                net_d.requires_grad_(True)
            optimizer_d.zero_grad()
            loss_d_fake = gan_loss(net_d(torch.cat((real_a, fake_b.detach()), 1)), False)
            loss_d_real = gan_loss(net_d(torch.cat((real_a, real_b), 1)), True)
            loss_d = (loss_d_fake + loss_d_real) * 0.5
        loss_d.backward()
        optimizer_d.step()

        if change == "frozen_d":
            net_d.requires_grad_(False)
        optimizer_g.zero_grad()
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=change == "bf16"):
            loss_g_gan = gan_loss(net_d(torch.cat((real_a, fake_b), 1)), True)
            loss_g_l1 = criterion_l1(fake_b.float(), real_b)
        (loss_g_gan + 100.0 * loss_g_l1).backward()
        optimizer_g.step()
        history.append(
            {
                "G_GAN": loss_g_gan.item(),
                "G_L1": loss_g_l1.item(),
                "D_real": loss_d_real.item(),
                "D_fake": loss_d_fake.item(),
            }
        )
        return torch.stack([loss_g_gan, loss_g_l1, loss_d]).detach()

    return step


# 3. BERT-style pretraining ------------------------------------------------------------------------------------------

PAD, CLS, SEP, MASK = 0, 1, 2, 3


class Notes(Dataset):
    """Tokenised clinical notes of very different lengths, padded to the model's longest input."""

    def __init__(self, count, longest, vocabulary):
        rng = np.random.default_rng(2)
        lengths = np.clip(rng.lognormal(math.log(longest * 0.28), 0.5, count), 8, longest).astype(int)
        self.texts = [[CLS, *rng.integers(4, vocabulary, n - 2).tolist(), SEP] for n in lengths]
        self.longest = longest

    def __len__(self):
        return len(self.texts)

    def __getitem__(self, i):
        ids = self.texts[i]
        padding = self.longest - len(ids)
        return {"input_ids": ids + [PAD] * padding, "attention_mask": [1] * len(ids) + [0] * padding}


class MaskingCollator:
    """Masks 15 % of the tokens: 80 % become [MASK], 10 % a random token, 10 % stay."""

    def __init__(self, vocabulary):
        self.vocabulary = vocabulary
        self.rng = torch.Generator().manual_seed(5)

    def __call__(self, items):
        ids = torch.tensor([item["input_ids"] for item in items])
        attention_mask = torch.tensor([item["attention_mask"] for item in items])
        labels = ids.clone()
        chosen = (torch.rand(ids.shape, generator=self.rng) < 0.15) & (ids > MASK)
        labels[~chosen] = -100
        kind = torch.rand(ids.shape, generator=self.rng)
        words = torch.randint(4, self.vocabulary, ids.shape, generator=self.rng)
        ids = torch.where(chosen & (kind < 0.8), torch.full_like(ids, MASK), ids)
        ids = torch.where(chosen & (kind >= 0.8) & (kind < 0.9), words, ids)
        return ids, attention_mask, labels


class BertLayer(nn.Module):
    def __init__(self, dim, heads, sdpa):
        super().__init__()
        self.heads, self.head_dim, self.sdpa = heads, dim // heads, sdpa
        self.query, self.key, self.value = nn.Linear(dim, dim), nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.output = nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)
        self.norm1, self.norm2 = nn.LayerNorm(dim, eps=1e-12), nn.LayerNorm(dim, eps=1e-12)

    def split(self, x):
        return x.view(*x.shape[:2], self.heads, self.head_dim).permute(0, 2, 1, 3)

    def forward(self, x, mask):
        q, k, v = self.split(self.query(x)), self.split(self.key(x)), self.split(self.value(x))
        if self.sdpa:
            context = F.scaled_dot_product_attention(q, k, v, attn_mask=mask.to(q.dtype))
        else:
            scores = torch.matmul(q, k.transpose(-1, -2)) / math.sqrt(self.head_dim)
            context = torch.matmul(torch.softmax(scores + mask, dim=-1), v)
        context = context.permute(0, 2, 1, 3).contiguous().view(x.shape)
        x = self.norm1(x + self.output(context))
        return self.norm2(x + self.down(F.gelu(self.up(x))))


class BertForMLM(nn.Module):
    def __init__(self, vocabulary, dim, depth, heads, longest, sdpa):
        super().__init__()
        self.words = nn.Embedding(vocabulary, dim, padding_idx=PAD)
        self.positions = nn.Embedding(longest, dim)
        self.norm = nn.LayerNorm(dim, eps=1e-12)
        self.layers = nn.ModuleList(BertLayer(dim, heads, sdpa) for _ in range(depth))
        self.transform = nn.Sequential(nn.Linear(dim, dim), nn.GELU(), nn.LayerNorm(dim, eps=1e-12))
        self.decoder = nn.Linear(dim, vocabulary)
        nn.init.normal_(self.words.weight, std=0.02)
        self.decoder.weight = self.words.weight

    def forward(self, ids, attention_mask, places=None):
        mask = (1.0 - attention_mask[:, None, None, :].float()) * -10000.0
        position = torch.arange(ids.shape[1], device=ids.device).unsqueeze(0)
        x = self.norm(self.words(ids) + self.positions(position))
        for layer in self.layers:
            x = layer(x, mask)
        if places is not None:
            x = x.flatten(0, 1)[places]
        return self.decoder(self.transform(x))


def bert_mlm(change):
    """Pretrains a small BERT on clinical notes by masked language modelling, each note padded to 256 tokens."""
    torch.manual_seed(0)
    vocabulary, longest, dim = size(16000, 120), size(256, 32), size(512, 32)
    collate = MaskingCollator(vocabulary)
    batches = primed(loader_of(Notes(size(4000, 16), longest, vocabulary), size(8, 4), 0, collate))
    model = BertForMLM(vocabulary, dim, size(6, 2), size(8, 2), longest, change == "sdpa").to(device)
    decay = [p for p in model.parameters() if p.ndim > 1]
    no_decay = [p for p in model.parameters() if p.ndim <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": decay, "weight_decay": 0.01}, {"params": no_decay, "weight_decay": 0.0}], lr=1e-4, eps=1e-6
    )
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: min(1.0, (i + 1) / 1000))
    forward = compiled(model) if change == "compiled" else model
    log = {"loss": 0.0, "steps": 0}

    def step():
        ids, attention_mask, labels = next(batches)
        places = None
        if change == "trim":
            longest_here = int(attention_mask.sum(1).max())
            ids, attention_mask, labels = (t[:, :longest_here] for t in (ids, attention_mask, labels))
        if change == "masked_head":
            places = (labels.flatten() != -100).nonzero().squeeze(1)
            labels = labels.flatten()[places]
            places = places.to(device)
        ids, attention_mask, labels = ids.to(device), attention_mask.to(device), labels.to(device)
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=change == "bf16"):
            logits = forward(ids, attention_mask, places)
            loss = F.cross_entropy(logits.view(-1, vocabulary), labels.reshape(-1), ignore_index=-100)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        log["loss"] += loss.item()
        log["steps"] += 1
        return loss.detach()

    return step


# 4. Energy demand forecaster ----------------------------------------------------------------------------------------


class Demand(Dataset):
    """Windows over the hourly demand of many substations: a week of history, then the hours to forecast."""

    def __init__(self, stations, hours, history, horizon):
        rng = np.random.default_rng(4)
        t = np.arange(hours)
        level = rng.uniform(0.5, 2.0, (stations, 1))
        daily = np.sin(2 * np.pi * t / 24 + rng.uniform(0, 1, (stations, 1)))
        self.load = (level * (1 + 0.3 * daily) + 0.1 * rng.standard_normal((stations, hours))).astype(np.float32)
        self.weather = rng.standard_normal((stations, hours, 4)).astype(np.float32)
        self.calendar = np.stack(
            [
                np.sin(2 * np.pi * t / 24),
                np.cos(2 * np.pi * t / 24),
                np.sin(2 * np.pi * t / 168),
                np.cos(2 * np.pi * t / 168),
                t // 24 % 7 >= 5,
            ],
            1,
        ).astype(np.float32)
        self.mean, self.std = self.load.mean(1, keepdims=True), self.load.std(1, keepdims=True)
        self.history, self.horizon = history, horizon
        self.starts = hours - history - horizon

    def __len__(self):
        return len(self.load) * self.starts

    def __getitem__(self, i):
        station, start = divmod(i, self.starts)
        _now, end = start + self.history, start + self.history + self.horizon
        load = (self.load[station, start:end] - self.mean[station]) / self.std[station]
        known = np.concatenate([self.weather[station, start:end], self.calendar[start:end]], 1)
        past = np.concatenate([load[: self.history, None], known[: self.history]], 1)
        future = known[self.history :]
        return torch.from_numpy(past), torch.from_numpy(future), torch.from_numpy(load[self.history - 1 :])


class Forecaster(nn.Module):
    """An LSTM encoder and an LSTM decoder whose output attends to the encoder's (Luong, general score)."""

    def __init__(self, hidden, way):
        super().__init__()
        self.way = way
        self.encoder = nn.LSTM(10, hidden, num_layers=2, batch_first=True)
        self.decoder = nn.LSTM(10, hidden, num_layers=2, batch_first=True)
        self.attn = nn.Linear(hidden, hidden, bias=False)
        self.combine = nn.Linear(2 * hidden, hidden)
        self.out = nn.Linear(hidden, 1)

    def forward(self, past, future, target):
        encoded, state = self.encoder(past)
        if self.way == "parallel":  # All inputs are known under teacher forcing, and attention feeds nothing back.
            output, _ = self.decoder(torch.cat([target[:, :-1, None], future], 2), state)
            weights = torch.softmax(torch.bmm(output, self.attn(encoded).transpose(1, 2)), dim=2)
            context = torch.bmm(weights, encoded)
            return self.out(torch.tanh(self.combine(torch.cat([output, context], 2)))).squeeze(2)
        keys = self.attn(encoded) if self.way == "hoisted" else None
        outputs = []
        for t in range(future.shape[1]):
            step_input = torch.cat([target[:, t : t + 1], future[:, t]], dim=1).unsqueeze(1)  # teacher forcing
            output, state = self.decoder(step_input, state)
            query = output.squeeze(1)
            energy = torch.bmm(self.attn(encoded) if keys is None else keys, query.unsqueeze(2)).squeeze(2)
            weights = torch.softmax(energy, dim=1)
            context = torch.bmm(weights.unsqueeze(1), encoded).squeeze(1)
            attended = torch.tanh(self.combine(torch.cat([query, context], dim=1)))
            outputs.append(self.out(attended))
        return torch.cat(outputs, dim=1)


def demand_forecast(change):
    """Trains an LSTM encoder-decoder with attention that forecasts 48 hours of demand from a week of history."""
    history, horizon, batch = size(168, 12), size(48, 5), size(128, 4)
    data = Demand(size(40, 3), size(8760, 100), history, horizon)
    order = BatchSampler(RandomSampler(data, generator=torch.Generator().manual_seed(7)), batch, drop_last=True)
    workers = size(4, 1) if change == "workers" else 0
    more = {"persistent_workers": True, "multiprocessing_context": "fork"} if workers else {}
    if change == "gpu_data":
        batches = endless(order)
        load = torch.from_numpy((data.load - data.mean) / data.std).to(device)
        weather, calendar = torch.from_numpy(data.weather).to(device), torch.from_numpy(data.calendar).to(device)
        offsets = torch.arange(history + horizon, device=device)
    else:
        batches = primed(DataLoader(data, batch_sampler=order, num_workers=workers, **more))
    torch.manual_seed(0)
    model = Forecaster(size(192, 16), change).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, capturable=ON_GPU and change == "graph")
    criterion = nn.MSELoss()

    def windows():
        which = torch.tensor(next(batches), device=device)
        station, hour = which // data.starts, (which % data.starts)[:, None] + offsets
        values, known = load[station[:, None], hour], torch.cat([weather[station[:, None], hour], calendar[hour]], 2)
        past = torch.cat([values[:, :history, None], known[:, :history]], 2)
        return past, known[:, history:], values[:, history - 1 :]

    def train(past, future, target):
        optimizer.zero_grad()
        loss = criterion(model(past, future, target), target[:, 1:])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.detach()

    if change == "graph":
        first = next(batches)
        batches = itertools.chain([first], batches)
        static = [t.to(device) for t in first]
        replay = graphed_training(lambda: train(*static), [model], [optimizer])
    epoch = {"loss": 0.0}

    def step():
        if change == "graph":
            for buffer, new in zip(static, next(batches), strict=False):
                buffer.copy_(new)
            loss = replay().clone()
        elif change == "gpu_data":
            loss = train(*windows())
        else:
            loss = train(*(t.to(device) for t in next(batches)))
        epoch["loss"] += loss.item()
        return loss

    return step


# 5. GraphSAGE -------------------------------------------------------------------------------------------------------


class SageLayer(nn.Module):
    def __init__(self, inputs, outputs, dense):
        super().__init__()
        self.own, self.neighbours = nn.Linear(inputs, outputs), nn.Linear(inputs, outputs, bias=False)
        self.dense = dense

    def forward(self, x, own, source, target):
        if self.dense:  # Each node has as many sampled neighbours as any other, one after the other.
            mean = x[source].view(len(own), -1, x.shape[1]).mean(1)
        else:
            total = torch.zeros(len(own), x.shape[1], device=x.device).index_add_(0, target, x[source])
            count = torch.zeros(len(own), device=x.device).index_add_(0, target, torch.ones_like(target).float())
            mean = total / count.clamp(min=1).unsqueeze(1)
        return self.own(x[own]) + self.neighbours(mean)


def sage_nodes(change):
    """Trains a two-layer GraphSAGE that classifies products in a co-purchase graph from sampled neighbourhoods."""
    torch.manual_seed(0)
    rng = np.random.default_rng(6)
    nodes, dim, classes, fanouts = size(200_000, 300), size(128, 8), size(47, 5), (size(10, 3), size(10, 4))
    degree = np.clip(rng.pareto(1.5, nodes) * 8 + 1, 1, 2000).astype(np.int64)
    indptr = np.concatenate([[0], np.cumsum(degree)])
    indices = rng.integers(0, nodes, indptr[-1])
    features = torch.from_numpy(rng.standard_normal((nodes, dim), dtype=np.float32))
    labels = torch.from_numpy(rng.integers(0, classes, nodes))
    train_nodes = torch.from_numpy(rng.permutation(nodes)[: nodes // 5])

    def neighbours_of(frontier, fanout, rng):
        if change == "vectorised":
            start = indptr[frontier]
            pick = rng.random((len(frontier), fanout)) * (indptr[frontier + 1] - start)[:, None]
            return indices[start[:, None] + pick.astype(np.int64)].reshape(-1)
        picked = []
        for node in frontier:
            neighbours = indices[indptr[node] : indptr[node + 1]]
            picked.append(neighbours[(rng.random(fanout) * len(neighbours)).astype(np.int64)])
        return np.concatenate(picked)

    def sample(items):
        seeds = torch.stack(items)
        frontier = seeds.numpy()
        rng = np.random.default_rng(frontier[0])
        blocks = []
        for fanout in fanouts:
            source = neighbours_of(frontier, fanout, rng)
            target = np.repeat(np.arange(len(frontier)), fanout)
            unique, inverse = np.unique(np.concatenate([frontier, source]), return_inverse=True)
            own, source = inverse[: len(frontier)], inverse[len(frontier) :]
            blocks.insert(0, [torch.from_numpy(a) for a in (own, source, target)])
            frontier = unique
        frontier = torch.from_numpy(frontier)
        return (frontier if change == "gpu_features" else features[frontier]), blocks, labels[seeds]

    workers = size(4, 1) if change == "workers" else 0
    collate = torch.stack if change == "gpu_sampling" else sample
    batches = primed(loader_of(train_nodes, size(512, 6), workers, collate))
    if change == "gpu_sampling":
        gpu_indptr, gpu_indices = torch.from_numpy(indptr).to(device), torch.from_numpy(indices).to(device)
        gpu_labels = labels.to(device)
    if change in ("gpu_features", "gpu_sampling"):
        gpu_features = features.to(device)

    def sample_on_gpu(seeds):
        rng = np.random.default_rng(int(seeds[0]))
        seeds = frontier = seeds.to(device)
        blocks = []
        for fanout in fanouts:
            start = gpu_indptr[frontier]
            draws = torch.from_numpy(rng.random((len(frontier), fanout))).to(device)
            pick = (draws * (gpu_indptr[frontier + 1] - start)[:, None]).long()
            source = gpu_indices[start[:, None] + pick].view(-1)
            target = torch.arange(len(frontier), device=device).repeat_interleave(fanout)
            unique, inverse = torch.unique(torch.cat([frontier, source]), return_inverse=True)
            blocks.insert(0, [inverse[: len(frontier)], inverse[len(frontier) :], target])
            frontier = unique
        return gpu_features[frontier], blocks, gpu_labels[seeds]

    hidden = size(256, 16)
    dense = change == "dense_mean"
    layers = nn.ModuleList([SageLayer(dim, hidden, dense), SageLayer(hidden, classes, dense)]).to(device)
    optimizer = torch.optim.Adam(layers.parameters(), lr=3e-3, weight_decay=5e-4)
    total = {"loss": 0.0, "correct": 0}

    def step():
        if change == "gpu_sampling":
            x, blocks, y = sample_on_gpu(next(batches))
        else:
            x, blocks, y = next(batches)
            x, y = x.to(device), y.to(device)
            if change == "gpu_features":
                x = gpu_features[x]
            blocks = [[t.to(device) for t in block] for block in blocks]
        for i, (layer, block) in enumerate(zip(layers, blocks, strict=False)):
            x = layer(x, *block)
            if i == 0:
                x = F.normalize(F.relu(x), dim=1)
        loss = F.cross_entropy(x, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total["loss"] += loss.item()
        total["correct"] += (x.argmax(1) == y).sum().item()
        return loss.detach()

    return step


# 6. Text-to-image retrieval -----------------------------------------------------------------------------------------

WORDS = [
    "red",
    "blue",
    "green",
    "white",
    "black",
    "small",
    "large",
    "old",
    "wooden",
    "leather",
    "cotton",
    "summer",
    "winter",
    "running",
    "shoe",
    "boots",
    "dress",
    "shirt",
    "jacket",
    "chair",
    "table",
    "lamp",
    "sofa",
    "bag",
    "watch",
    "ring",
    "hat",
    "scarf",
    "phone",
    "case",
    "cup",
    "plate",
    "bottle",
    "for",
    "women",
    "men",
    "kids",
    "with",
    "and",
    "in",
    "of",
    "a",
    "the",
    "striped",
    "floral",
    "vintage",
    "modern",
    "minimalist",
]


class QuickGELU(nn.Module):
    def forward(self, x):
        return x * torch.sigmoid(1.702 * x)


class ClipBlock(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attn = nn.MultiheadAttention(dim, heads, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), QuickGELU(), nn.Linear(4 * dim, dim))

    def forward(self, x, mask):
        y = self.ln_1(x)
        x = x + self.attn(y, y, y, need_weights=False, attn_mask=mask)[0]
        return x + self.mlp(self.ln_2(x))


class TextEncoder(nn.Module):
    def __init__(self, vocabulary, context, dim, depth, heads):
        super().__init__()
        self.token_embedding = nn.Embedding(vocabulary, dim)
        self.positional_embedding = nn.Parameter(torch.randn(context, dim) * 0.01)
        self.blocks = nn.ModuleList(ClipBlock(dim, heads) for _ in range(depth))
        self.ln_final = nn.LayerNorm(dim)
        self.text_projection = nn.Parameter(torch.randn(dim, dim) * dim**-0.5)
        self.register_buffer("mask", torch.full((context, context), float("-inf")).triu_(1), persistent=False)

    def forward(self, tokens):
        n = tokens.shape[1]
        x = self.token_embedding(tokens) + self.positional_embedding[:n]
        for block in self.blocks:
            x = block(x, self.mask[:n, :n])
        x = self.ln_final(x)[torch.arange(len(x), device=x.device), tokens.argmax(dim=-1)]
        return x @ self.text_projection


class ImageEncoder(nn.Module):
    def __init__(self, pixels, patch, width, depth, heads, dim):
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, patch, patch, bias=False)
        self.class_embedding = nn.Parameter(torch.randn(width) * width**-0.5)
        self.positional_embedding = nn.Parameter(torch.randn((pixels // patch) ** 2 + 1, width) * width**-0.5)
        self.ln_pre, self.ln_post = nn.LayerNorm(width), nn.LayerNorm(width)
        self.blocks = nn.ModuleList(ClipBlock(width, heads) for _ in range(depth))
        self.proj = nn.Parameter(torch.randn(width, dim) * width**-0.5)

    def forward(self, images):
        x = self.conv1(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.class_embedding.expand(len(x), 1, -1), x], dim=1) + self.positional_embedding
        x = self.ln_pre(x)
        for block in self.blocks:
            x = block(x, None)
        return self.ln_post(x[:, 0]) @ self.proj


def clip_search(change):
    """Serves a shop's search: adds new product photos to a gallery and answers 64 text queries with CLIP and top-k."""
    torch.manual_seed(0)
    if change == "tf32":
        use_tf32()
    rng = np.random.default_rng(8)
    dim, depth, context, pixels = size(512, 32), size(12, 2), size(77, 24), size(224, 32)
    vocabulary, width, k = size(49408, 500), size(768, 48), size(10, 3)
    text_encoder = TextEncoder(vocabulary, context, dim, depth, size(8, 2)).to(device).eval()
    image_encoder = ImageEncoder(pixels, size(32, 16), width, depth, size(12, 3), dim).to(device).eval()
    dtype = torch.float32
    if change == "half":
        dtype = torch.float16
        text_encoder, image_encoder = text_encoder.half(), image_encoder.half()
    gallery = F.normalize(torch.randn(size(100_000, 200), dim), dim=1).to(device)
    photos = rng.integers(0, 256, (size(96, 6), pixels + pixels // 8, pixels + pixels // 8, 3), dtype=np.uint8)
    ids = {word: int(i) for word, i in zip(WORDS, rng.permutation(vocabulary - 2)[: len(WORDS)], strict=False)}
    mean = np.array([0.48145466, 0.4578275, 0.40821073], dtype=np.float32)
    std = np.array([0.26862954, 0.26130258, 0.27577711], dtype=np.float32)
    if change == "gpu_preprocess":
        mean, std = (torch.from_numpy(a).view(3, 1, 1).to(device) for a in (mean, std))
    incoming, queries_per_step = size(16, 2), size(64, 3)
    position = 0

    def tokenize(texts):
        result = torch.zeros(len(texts), context, dtype=torch.long)
        for i, text in enumerate(texts):
            tokens = [vocabulary - 2, *[ids[word] for word in text.split()][: context - 2], vocabulary - 1]
            result[i, : len(tokens)] = torch.tensor(tokens)
        return result

    def preprocess(photo):
        margin = (photo.shape[0] - pixels) // 2
        image = photo[margin : margin + pixels, margin : margin + pixels].astype(np.float32) / 255.0
        return torch.from_numpy(((image - mean) / std).transpose(2, 0, 1))

    def load(batch):
        if change == "gpu_preprocess":
            margin = (batch.shape[1] - pixels) // 2
            images = torch.from_numpy(batch).to(device)[:, margin : margin + pixels, margin : margin + pixels]
            return (images.permute(0, 3, 1, 2).float() / 255 - mean) / std
        return torch.stack([preprocess(photo) for photo in batch]).to(device)

    @torch.no_grad()
    def step():
        nonlocal position
        new = [(position + i) % len(photos) for i in range(incoming)]
        features = image_encoder(load(photos[new]).to(dtype)).float()
        features = features / features.norm(dim=-1, keepdim=True)
        gallery[position % len(gallery) : position % len(gallery) + incoming] = features
        position = (position + incoming) % (len(gallery) - incoming)

        texts = [" ".join(rng.choice(WORDS, rng.integers(3, 16))) for _ in range(queries_per_step)]
        tokens = tokenize(texts)
        if change == "trim_text":
            tokens = tokens[:, : int(tokens.argmax(1).max()) + 1]
        queries = text_encoder(tokens.to(device)).float()
        queries = queries / queries.norm(dim=-1, keepdim=True)
        if change == "batched_search":
            scores, found = (queries @ gallery.T).topk(k, dim=1)
            found = found.tolist()
            return scores
        scores, found = [], []
        for query in queries:
            best = (gallery @ query).topk(k)
            scores.append(best.values)
            found.append(best.indices.tolist())
        return torch.stack(scores)

    return step


# 7. PPO -------------------------------------------------------------------------------------------------------------


class Pendulums:
    """Many pendulums to swing up, simulated together."""

    def __init__(self, count, longest):
        self.count, self.longest = count, longest
        self.angle, self.speed = self.fresh()
        self.age = torch.arange(count, device=device) % longest

    def fresh(self):
        draws = torch.rand(2, self.count, device=device) * 2 - 1
        return draws[0] * math.pi, draws[1]

    def observe(self):
        return torch.stack([torch.cos(self.angle), torch.sin(self.angle), self.speed / 8], dim=1)

    def step(self, action):
        torque = torch.clamp(action.squeeze(1), -2.0, 2.0)
        error = torch.remainder(self.angle + math.pi, 2 * math.pi) - math.pi
        reward = -(error**2 + 0.1 * self.speed**2 + 0.001 * torque**2)
        speed = torch.clamp(self.speed + (15.0 * torch.sin(self.angle) + 3.0 * torque) * 0.05, -8.0, 8.0)
        angle = self.angle + speed * 0.05
        age = self.age + 1
        done = age >= self.longest
        new_angle, new_speed = self.fresh()
        self.angle = torch.where(done, new_angle, angle)
        self.speed = torch.where(done, new_speed, speed)
        self.age = torch.where(done, torch.zeros_like(age), age)
        return self.observe(), reward, done.float()


class ActorCritic(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.actor = nn.Sequential(
            nn.Linear(3, hidden), nn.Tanh(), nn.Linear(hidden, hidden), nn.Tanh(), nn.Linear(hidden, 1)
        )
        self.critic = nn.Sequential(
            nn.Linear(3, hidden), nn.Tanh(), nn.Linear(hidden, hidden), nn.Tanh(), nn.Linear(hidden, 1)
        )
        self.log_std = nn.Parameter(torch.zeros(1))

    def forward(self, obs, validate=None):
        mean = self.actor(obs)
        return Normal(mean, self.log_std.exp().expand_as(mean), validate_args=validate), self.critic(obs).squeeze(1)


def ppo_pendulum(change):
    """Trains PPO on 2048 pendulums simulated on the GPU: 32 steps of play, then 4 epochs of 8 minibatches."""
    torch.manual_seed(0)
    count, length, epochs, parts = size(2048, 8), size(32, 5), 4, size(8, 2)
    gamma, lam, clip = 0.99, 0.95, 0.2
    env = Pendulums(count, 200)
    agent = ActorCritic(size(256, 16)).to(device)
    optimizer = torch.optim.Adam(
        agent.parameters(),
        lr=3e-4,
        eps=1e-5,
        capturable=ON_GPU and change == "graph_update",
        fused=True if change == "fused" else None,
    )
    total = count * length
    validate = False if change in ("no_validation", "no_waits", "graph_update", "graph_rollout") else None

    @torch.no_grad()
    def rollout():
        obs = env.observe()
        kept = []
        for _ in range(length):
            policy, value = agent(obs, validate)
            if change in ("graph_rollout", "no_waits"):  # Normal.sample looks at the deviations on the CPU.
                action = policy.loc + policy.scale * torch.randn_like(policy.loc)
            else:
                action = policy.sample()
            log_prob = policy.log_prob(action).sum(1)
            next_obs, reward, done = env.step(action)
            kept.append((obs, action, log_prob, value, reward, done))
            obs = next_obs
        _, last_value = agent(obs, validate)
        obs, action, log_prob, value, reward, done = (torch.stack(tensors) for tensors in zip(*kept, strict=False))
        advantage = torch.zeros_like(reward)
        running = torch.zeros(count, device=device)
        for t in reversed(range(length)):
            next_value = last_value if t == length - 1 else value[t + 1]
            alive = 1.0 - done[t]
            delta = reward[t] * 0.1 + gamma * next_value * alive - value[t]
            running = delta + gamma * lam * alive * running
            advantage[t] = running
        flat = [t.reshape(total, *t.shape[2:]) for t in (obs, action, log_prob, advantage, advantage + value)]
        return flat, reward.mean()

    def rollout_in_place():
        before = env.angle, env.speed, env.age
        result = rollout()
        for old, new in zip(before, (env.angle, env.speed, env.age), strict=False):
            old.copy_(new)
        env.angle, env.speed, env.age = before
        return result

    def update(obs, action, old_log_prob, advantage, returns, index):
        policy, value = agent(obs[index], validate)
        ratio_log = policy.log_prob(action[index]).sum(1) - old_log_prob[index]
        ratio = ratio_log.exp()
        adv = advantage[index]
        adv = (adv - adv.mean()) / (adv.std() + 1e-8)
        policy_loss = torch.max(-adv * ratio, -adv * torch.clamp(ratio, 1 - clip, 1 + clip)).mean()
        value_loss = 0.5 * (value - returns[index]).pow(2).mean()
        entropy = policy.entropy().sum(1).mean()
        loss = policy_loss + 0.5 * value_loss - 0.001 * entropy
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
        optimizer.step()
        approx_kl = ((ratio - 1) - ratio_log).mean()
        return torch.stack([policy_loss, value_loss, entropy, approx_kl]).detach()

    play = graphed(rollout_in_place) if change == "graph_rollout" else rollout
    learn = update
    if change == "graph_update":
        static = [torch.randn(total, 3, device=device), torch.randn(total, 1, device=device)]
        static += [torch.randn(total, device=device).abs() for _ in range(3)]
        static_index = torch.zeros(total // parts, dtype=torch.long, device=device)
        torch.manual_seed(1)
        replay = graphed_training(lambda: update(*static, static_index), [agent], [optimizer])

        def learn(*data):
            static_index.copy_(data[-1])
            return replay()

    torch.manual_seed(1)

    def step():
        data, reward = play()
        if change == "graph_update":
            for buffer, new in zip(static, data, strict=False):
                buffer.copy_(new)
        on_gpu = change in ("no_item", "no_waits")
        sums = torch.zeros(4, device=device) if on_gpu else [0.0] * 4
        for _ in range(epochs):
            permutation = torch.randperm(total, device=device)
            for index in permutation.chunk(parts):
                stats = learn(*data, index)
                if on_gpu:
                    sums += stats
                else:
                    sums = [a + b.item() for a, b in zip(sums, stats, strict=False)]
        if not on_gpu:
            sums = torch.tensor(sums, device=device)
        return torch.cat([reward.view(1), sums / (epochs * parts)])

    return step


# 8. Video action recognition ----------------------------------------------------------------------------------------


class Clips(Dataset):
    """Eight frames of each video, cropped, flipped and normalised frame by frame."""

    def __init__(self, count, frames, pixels, on_gpu):
        rng = np.random.default_rng(9)
        self.frames, self.pixels, self.on_gpu = frames, pixels, on_gpu
        self.videos = rng.integers(0, 256, (count, 3 * frames, pixels + 16, pixels + 59, 3), dtype=np.uint8)
        self.labels = rng.integers(0, 101, count)

    def __len__(self):
        return len(self.videos)

    def __getitem__(self, i):
        rng = np.random.default_rng(i)
        video = self.videos[i]
        start = rng.integers(0, self.frames)
        top, left = rng.integers(0, video.shape[1] - self.pixels), rng.integers(0, video.shape[2] - self.pixels)
        flip = rng.random() < 0.5
        frames = []
        for t in range(start, start + 2 * self.frames, 2):
            frame = video[t, top : top + self.pixels, left : left + self.pixels]
            if flip:
                frame = frame[:, ::-1]
            if not self.on_gpu:
                frame = (frame.astype(np.float32) / 255.0 - VIDEO_MEAN) / VIDEO_STD
            frames.append(torch.from_numpy(np.ascontiguousarray(frame)).permute(2, 0, 1))
        return torch.stack(frames, dim=1), int(self.labels[i])


VIDEO_MEAN = np.array([0.43216, 0.394666, 0.37645], dtype=np.float32)
VIDEO_STD = np.array([0.22803, 0.22145, 0.216989], dtype=np.float32)


class Conv2Plus1D(nn.Module):
    """A spatial convolution, then one over time; `folded` computes both as two-dimensional ones."""

    def __init__(self, inputs, outputs, stride, folded):
        super().__init__()
        middle = inputs * outputs * 27 // (inputs * 9 + 3 * outputs)
        self.spatial = nn.Conv3d(inputs, middle, (1, 3, 3), (1, stride, stride), (0, 1, 1), bias=False)
        self.norm = nn.BatchNorm3d(middle)
        self.temporal = nn.Conv3d(middle, outputs, (3, 1, 1), (stride, 1, 1), (1, 0, 0), bias=False)
        self.stride, self.folded = stride, folded

    def forward(self, x):
        if not self.folded:
            return self.temporal(F.relu(self.norm(self.spatial(x)), inplace=True))
        b, _, t, _, _ = x.shape
        y = x.transpose(1, 2).flatten(0, 1)
        y = F.conv2d(y, self.spatial.weight.squeeze(2), None, self.stride, 1)
        y = y.unflatten(0, (b, t)).transpose(1, 2).contiguous()
        y = F.relu(self.norm(y), inplace=True)
        shape = y.shape[3:]
        y = F.conv2d(y.flatten(3), self.temporal.weight.squeeze(4), None, (self.stride, 1), (1, 0))
        return y.unflatten(3, shape)


class VideoBlock(nn.Module):
    def __init__(self, inputs, outputs, stride, folded):
        super().__init__()
        self.conv1, self.bn1 = Conv2Plus1D(inputs, outputs, stride, folded), nn.BatchNorm3d(outputs)
        self.conv2, self.bn2 = Conv2Plus1D(outputs, outputs, 1, folded), nn.BatchNorm3d(outputs)
        self.shortcut = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv3d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm3d(outputs))

    def forward(self, x):
        y = F.relu(self.bn1(self.conv1(x)), inplace=True)
        return F.relu(self.bn2(self.conv2(y)) + self.shortcut(x), inplace=True)


def r2plus1d(width, blocks, classes, folded):
    layers = [
        nn.Conv3d(3, 45, (1, 7, 7), (1, 2, 2), (0, 3, 3), bias=False),
        nn.BatchNorm3d(45),
        nn.ReLU(True),
        nn.Conv3d(45, width, (3, 1, 1), 1, (1, 0, 0), bias=False),
        nn.BatchNorm3d(width),
        nn.ReLU(True),
    ]
    inputs = width
    for stage, count in enumerate(blocks):
        for i in range(count):
            layers.append(VideoBlock(inputs, width << stage, 2 if stage and i == 0 else 1, folded))
            inputs = width << stage
    return nn.Sequential(*layers, nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(inputs, classes))


def video_actions(change):
    """Trains an R(2+1)D network of half width on clips of 8 frames for action recognition."""
    torch.manual_seed(0)
    if change == "benchmark":
        torch.backends.cudnn.benchmark = True
    gpu_normalise = change == "gpu_normalise"
    data = Clips(size(64, 8), 8, size(112, 32), gpu_normalise)
    batches = primed(loader_of(data, size(8, 4), workers=size(3, 0)))
    layout = torch.channels_last_3d if change == "channels_last" else torch.contiguous_format
    blocks = size(2, 1)
    model = r2plus1d(size(32, 8), [blocks] * size(4, 2), 101, change == "folded").to(device, memory_format=layout)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4)
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    mean, std = (torch.from_numpy(a).view(3, 1, 1, 1).to(device) for a in (VIDEO_MEAN, VIDEO_STD))
    meter = {"loss": [], "top1": [], "top5": []}

    def step():
        model.train()
        clips, labels = next(batches)
        clips, labels = clips.to(device, non_blocking=True), labels.to(device, non_blocking=True)
        if gpu_normalise:
            clips = (clips.float() / 255.0 - mean) / std
        clips = clips.contiguous(memory_format=layout)
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=change == "bf16"):
            logits = model(clips)
            loss = criterion(logits, labels)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        hits = logits.detach().topk(5, dim=1).indices == labels[:, None]
        meter["loss"].append(loss.item())
        meter["top1"].append(hits[:, 0].float().mean().item())
        meter["top5"].append(hits.any(1).float().mean().item())
        return loss.detach()

    return step


PROGRAMS = {
    xray_vit: {"tf32": "tf32", "bf16": "half_precision", "sdpa": "fused_attention", "device_metrics": "remove_sync",
               "compiled": "fuse_pointwise"},
    pix2pix: {"bf16": "half_precision", "channels_last": "channels_last", "benchmark": "", "frozen_d": "",
              "workers": "data_loader"},
    bert_mlm: {"trim": "", "masked_head": "", "sdpa": "fused_attention", "bf16": "half_precision",
               "compiled": "fuse_pointwise"},
    demand_forecast: {"parallel": "loop_outputs", "hoisted": "", "graph": "cuda_graph", "gpu_data": "data_loader",
                      "workers": "data_loader"},
    sage_nodes: {"vectorised": "data_loader", "gpu_sampling": "data_loader", "gpu_features": "cpu_tensors",
                 "workers": "data_loader", "dense_mean": ""},
    clip_search: {"batched_search": "larger_batch", "trim_text": "trim_padding", "half": "half_precision",
                  "tf32": "tf32", "gpu_preprocess": "cpu_tensors"},
    # Two variants drop some of the waits, and no_waits drops all.
    ppo_pendulum: {"graph_update": "cuda_graph", "graph_rollout": "cuda_graph", "no_item": "", "no_validation": "",
                   "no_waits": "remove_sync", "fused": "fused_optimizer"},
    video_actions: {"bf16": "half_precision", "channels_last": "channels_last", "benchmark": "", "folded": "",
                    "gpu_normalise": "data_loader"},
}  # fmt: skip
