"""Programs of workshops: detection with a matcher, and two that learn from images without labels."""

import copy
import itertools
import math

import numpy as np
import torch
import torch.nn.functional as F
from setting import bf16, compiled, device, endless, size
from torch import nn
from torch.utils.data import DataLoader, Dataset

# ---- 1. Detection with a matcher ------------------------------------------------------------------------------------


class DetrResidual(nn.Module):
    """The basic residual block of a ResNet-18."""

    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.shortcut = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x):
        out = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(out)) + self.shortcut(x))


class DetrEncoderLayer(nn.Module):
    """Self-attention over the image features, positions added to queries and keys."""

    def __init__(self, dim, heads):
        super().__init__()
        self.attention = nn.MultiheadAttention(dim, heads, dropout=0.1, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(dim, 8 * dim), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8 * dim, dim))
        self.norm1, self.norm2, self.dropout = nn.LayerNorm(dim), nn.LayerNorm(dim), nn.Dropout(0.1)

    def forward(self, src, pos):
        q = k = src + pos
        src = self.norm1(src + self.dropout(self.attention(q, k, value=src)[0]))
        return self.norm2(src + self.dropout(self.mlp(src)))


class DetrDecoderLayer(nn.Module):
    """Self-attention of the object queries, then attention to the image features."""

    def __init__(self, dim, heads):
        super().__init__()
        self.self_attention = nn.MultiheadAttention(dim, heads, dropout=0.1, batch_first=True)
        self.cross_attention = nn.MultiheadAttention(dim, heads, dropout=0.1, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(dim, 8 * dim), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8 * dim, dim))
        self.norm1, self.norm2, self.norm3 = nn.LayerNorm(dim), nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.dropout = nn.Dropout(0.1)

    def forward(self, tgt, memory, pos, query_pos):
        q = k = tgt + query_pos
        tgt = self.norm1(tgt + self.dropout(self.self_attention(q, k, value=tgt)[0]))
        attended = self.cross_attention(tgt + query_pos, memory + pos, value=memory)[0]
        tgt = self.norm2(tgt + self.dropout(attended))
        return self.norm3(tgt + self.dropout(self.mlp(tgt)))


class Detr(nn.Module):
    """ResNet-18 and a transformer; returns class logits and boxes of every decoder layer."""

    def __init__(self, classes, queries, dim, layers, side):
        super().__init__()
        widths = [size(64, 8), size(128, 8), size(256, 16), size(512, 16)]
        blocks = [nn.Conv2d(3, widths[0], 7, 2, 3, bias=False), nn.BatchNorm2d(widths[0]), nn.ReLU()]
        blocks.append(nn.MaxPool2d(3, 2, 1))
        for i, width in enumerate(widths):
            blocks.append(DetrResidual(widths[max(i - 1, 0)], width, 1 if i == 0 else 2))
            blocks.append(DetrResidual(width, width, 1))
        self.backbone = nn.Sequential(*blocks)
        self.project = nn.Conv2d(widths[-1], dim, 1)
        self.row = nn.Parameter(torch.randn(side, dim // 2))
        self.column = nn.Parameter(torch.randn(side, dim // 2))
        self.queries = nn.Embedding(queries, dim)
        self.encoder = nn.ModuleList(DetrEncoderLayer(dim, 8) for _ in range(layers))
        self.decoder = nn.ModuleList(DetrDecoderLayer(dim, 8) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)
        self.classify = nn.Linear(dim, classes + 1)
        self.locate = nn.Sequential(nn.Linear(dim, dim), nn.ReLU(), nn.Linear(dim, dim), nn.ReLU(), nn.Linear(dim, 4))

    def forward(self, images):
        features = self.project(self.backbone(images))
        batch, _, h, w = features.shape
        pos = torch.cat([self.column[:w].unsqueeze(0).repeat(h, 1, 1), self.row[:h].unsqueeze(1).repeat(1, w, 1)], -1)
        pos = pos.flatten(0, 1).unsqueeze(0)
        memory = features.flatten(2).transpose(1, 2)
        for layer in self.encoder:
            memory = layer(memory, pos)
        query_pos = self.queries.weight.unsqueeze(0).repeat(batch, 1, 1)
        tgt, states = torch.zeros_like(query_pos), []
        for layer in self.decoder:
            tgt = layer(tgt, memory, pos, query_pos)
            states.append(self.norm(tgt))
        states = torch.stack(states)
        return self.classify(states), self.locate(states).sigmoid()


def corners(boxes):
    """Convert (cx, cy, w, h) to (x0, y0, x1, y1)."""
    cx, cy, w, h = boxes.unbind(-1)
    return torch.stack([cx - 0.5 * w, cy - 0.5 * h, cx + 0.5 * w, cy + 0.5 * h], dim=-1)


def generalized_iou(a, b):
    """Generalized IoU of boxes that broadcast against each other."""
    area_a = (a[..., 2] - a[..., 0]) * (a[..., 3] - a[..., 1])
    area_b = (b[..., 2] - b[..., 0]) * (b[..., 3] - b[..., 1])
    inner = (torch.min(a[..., 2:], b[..., 2:]) - torch.max(a[..., :2], b[..., :2])).clamp(min=0).prod(-1)
    outer = (torch.max(a[..., 2:], b[..., 2:]) - torch.min(a[..., :2], b[..., :2])).clamp(min=0).prod(-1)
    union = area_a + area_b - inner
    return inner / union - (outer - union) / outer


def hungarian(cost):
    """Return for every row of a (rows <= columns) cost matrix its column in the cheapest assignment."""
    rows, columns = cost.shape
    u, v = np.zeros(rows + 1), np.zeros(columns + 1)
    match, way = np.zeros(columns + 1, dtype=int), np.zeros(columns + 1, dtype=int)
    for i in range(1, rows + 1):
        match[0], j = i, 0
        best, used = np.full(columns + 1, np.inf), np.zeros(columns + 1, dtype=bool)
        while True:
            used[j] = True
            reduced = cost[match[j] - 1] - u[match[j]] - v[1:]
            better = ~used[1:] & (reduced < best[1:])
            best[1:][better] = reduced[better]
            way[1:][better] = j
            following = np.where(used[1:], np.inf, best[1:]).argmin() + 1
            delta = best[following]
            u[match[used]] += delta
            v[used] -= delta
            best[~used] -= delta
            j = following
            if match[j] == 0:
                break
        while j:
            match[j] = match[way[j]]
            j = way[j]
    result = np.zeros(rows, dtype=int)
    for j in range(1, columns + 1):
        if match[j]:
            result[match[j] - 1] = j - 1
    return result


@torch.no_grad()
def detr_match(logits, boxes, targets):
    """Match queries and targets for (layers, batch, queries, ...): indices of layer, image, query and target."""
    layers, batch, queries, _ = logits.shape
    labels = torch.cat([t["labels"] for t in targets])
    wanted = torch.cat([t["boxes"] for t in targets])
    prob = logits.flatten(0, 2).softmax(-1)
    found = boxes.flatten(0, 2)
    giou = generalized_iou(corners(found)[:, None], corners(wanted)[None])
    cost = 5 * torch.cdist(found, wanted, p=1) - prob[:, labels] - 2 * giou
    cost = cost.view(layers, batch, queries, -1).cpu().numpy()
    indices = []
    for layer in range(layers):
        start = 0
        for image, target in enumerate(targets):
            count = len(target["labels"])
            columns = hungarian(cost[layer, image, :, start : start + count].T.astype(np.float64))
            indices += [(layer, image, query, start + i) for i, query in enumerate(columns)]
            start += count
    return torch.as_tensor(np.array(indices)).to(device).unbind(1)


def detr_loss(logits, boxes, targets, class_weight):
    """Sum the losses of the decoder layers in (layers, batch, queries, ...)."""
    layer, image, query, target = detr_match(logits, boxes, targets)
    labels = torch.cat([t["labels"] for t in targets])
    wanted = torch.cat([t["boxes"] for t in targets])[target]
    classes = torch.full(logits.shape[:3], logits.shape[-1] - 1, dtype=torch.long, device=device)
    classes[layer, image, query] = labels[target]
    found = boxes[layer, image, query]
    loss = F.cross_entropy(logits.flatten(0, 2), classes.flatten(), class_weight) * logits.shape[0]
    loss = loss + 5 * F.l1_loss(found, wanted, reduction="sum") / len(labels)
    return loss + 2 * (1 - generalized_iou(corners(found), corners(wanted))).sum() / len(labels)


def detr_training(change):
    """Train a DETR-like detector with a Hungarian matcher and auxiliary losses of all decoder layers."""
    batch, pixels, classes = size(8, 2), size(512, 64), size(80, 5)
    rng = np.random.default_rng(0)
    dataset = []
    for _ in range(4):
        images = torch.from_numpy(rng.standard_normal((batch, 3, pixels, pixels), dtype=np.float32))
        targets = []
        for _ in range(batch):
            count = int(rng.integers(4, size(14, 6)))
            center, extent = rng.uniform(0.2, 0.8, (count, 2)), rng.uniform(0.05, 0.35, (count, 2))
            boxes = torch.from_numpy(np.concatenate([center, extent], 1)).float()
            targets.append({"labels": torch.from_numpy(rng.integers(0, classes, count)), "boxes": boxes})
        dataset.append((images, targets))
    batches = itertools.cycle(dataset)

    model = Detr(classes, size(100, 10), size(256, 32), size(6, 2), pixels // 32).to(device).train()
    if change == "channels_last":
        model = model.to(memory_format=torch.channels_last)
    backbone = [p for name, p in model.named_parameters() if name.startswith("backbone")]
    others = [p for name, p in model.named_parameters() if not name.startswith("backbone")]
    optimizer = torch.optim.AdamW([{"params": backbone, "lr": 1e-5}, {"params": others}], lr=1e-4, weight_decay=1e-4)
    class_weight = torch.ones(classes + 1, device=device)
    class_weight[-1] = 0.1
    forward = model
    if change == "compile":
        forward = compiled(model)
    if change == "graph_model" and device.type == "cuda":
        forward = torch.cuda.make_graphed_callables(model, (torch.randn(batch, 3, pixels, pixels, device=device),))

    def step():
        images, targets = next(batches)
        images = images.to(device)
        targets = [{key: value.to(device) for key, value in target.items()} for target in targets]
        if change == "channels_last":
            images = images.contiguous(memory_format=torch.channels_last)
        with bf16(change == "bf16"):
            logits, boxes = forward(images)
        logits, boxes = logits.float(), boxes.float()
        if change == "stacked_layers":
            loss = detr_loss(logits, boxes, targets, class_weight)
        else:
            loss = sum(detr_loss(a[None], b[None], targets, class_weight) for a, b in zip(logits, boxes, strict=True))
        if not math.isfinite(loss.item()):
            raise RuntimeError("the loss is not finite")
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        return loss.detach()

    return step


# ---- 2. Masked autoencoder ------------------------------------------------------------------------------------------


class MaeBlock(nn.Module):
    """A pre-norm transformer block with the attention written out."""

    def __init__(self, dim, heads, fused):
        super().__init__()
        self.heads, self.fused = heads, fused
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x):
        b, n, d = x.shape
        qkv = self.qkv(self.norm1(x)).reshape(b, n, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        if self.fused:
            out = F.scaled_dot_product_attention(q, k, v)
        else:
            weights = (q @ k.transpose(-2, -1)) * (d // self.heads) ** -0.5
            out = weights.softmax(dim=-1) @ v
        x = x + self.proj(out.transpose(1, 2).reshape(b, n, d))
        return x + self.mlp(self.norm2(x))


class MaskedAutoencoder(nn.Module):
    """MAE: the encoder sees a quarter of the patches, the decoder reconstructs the others."""

    def __init__(self, pixels, patch, dim, depth, heads, decoder_dim, decoder_depth, decoder_heads, fused):
        super().__init__()
        self.patch, patches = patch, (pixels // patch) ** 2
        self.embed = nn.Conv2d(3, dim, patch, patch)
        self.cls = nn.Parameter(torch.randn(1, 1, dim) * 0.02)
        self.pos = nn.Parameter(torch.randn(1, patches + 1, dim) * 0.02, requires_grad=False)
        self.blocks = nn.ModuleList(MaeBlock(dim, heads, fused) for _ in range(depth))
        self.norm = nn.LayerNorm(dim)
        self.decoder_embed = nn.Linear(dim, decoder_dim)
        self.mask_token = nn.Parameter(torch.randn(1, 1, decoder_dim) * 0.02)
        self.decoder_pos = nn.Parameter(torch.randn(1, patches + 1, decoder_dim) * 0.02, requires_grad=False)
        self.decoder = nn.ModuleList(MaeBlock(decoder_dim, decoder_heads, fused) for _ in range(decoder_depth))
        self.decoder_norm = nn.LayerNorm(decoder_dim)
        self.predict = nn.Linear(decoder_dim, patch * patch * 3)

    def random_masking(self, x, ratio):
        b, n, d = x.shape
        keep = int(n * (1 - ratio))
        shuffle = torch.argsort(torch.rand(b, n, device=x.device), dim=1)
        restore = torch.argsort(shuffle, dim=1)
        visible = torch.gather(x, 1, shuffle[:, :keep].unsqueeze(-1).repeat(1, 1, d))
        mask = torch.ones(b, n, device=x.device)
        mask[:, :keep] = 0
        return visible, torch.gather(mask, 1, restore), restore

    def forward(self, images):
        x = self.embed(images).flatten(2).transpose(1, 2) + self.pos[:, 1:]
        x, mask, restore = self.random_masking(x, 0.75)
        x = torch.cat([(self.cls + self.pos[:, :1]).expand(len(x), -1, -1), x], dim=1)
        for block in self.blocks:
            x = block(x)
        x = self.decoder_embed(self.norm(x))
        hidden = self.mask_token.repeat(len(x), restore.shape[1] + 1 - x.shape[1], 1).to(x.dtype)
        full = torch.cat([x[:, 1:], hidden], dim=1)
        full = torch.gather(full, 1, restore.unsqueeze(-1).repeat(1, 1, x.shape[2]))
        x = torch.cat([x[:, :1], full], dim=1) + self.decoder_pos
        for block in self.decoder:
            x = block(x)
        pred = self.predict(self.decoder_norm(x))[:, 1:].float()
        b, c, h, w = images.shape
        p = self.patch
        target = images.reshape(b, c, h // p, p, w // p, p).permute(0, 2, 4, 3, 5, 1).reshape(b, -1, p * p * c)
        mean, var = target.mean(-1, keepdim=True), target.var(-1, keepdim=True)
        loss = ((pred - (target - mean) / (var + 1e-6) ** 0.5) ** 2).mean(-1)
        return (loss * mask).sum() / mask.sum()


class AugmentedImages(Dataset):
    """Images in memory; an item is a random resized crop, perhaps flipped, normalised."""

    mean = np.array([0.485, 0.456, 0.406], dtype=np.float32)
    std = np.array([0.229, 0.224, 0.225], dtype=np.float32)

    def __init__(self, pixels, raw):
        source = pixels + pixels // 7
        self.images = np.random.default_rng(0).integers(0, 256, (size(256, 16), source, source, 3), dtype=np.uint8)
        self.pixels, self.raw = pixels, raw

    def __len__(self):
        return size(16384, 64)

    def coordinates(self, length, image_length):
        """Source coordinates of one axis of a random crop of this length."""
        start = np.random.uniform(0, image_length - length)
        where = start + (np.arange(self.pixels, dtype=np.float32) + 0.5) * (length / self.pixels) - 0.5
        return np.clip(where, 0, image_length - 1).astype(np.float32)

    def __getitem__(self, index):
        image = self.images[index % len(self.images)]
        area, ratio = np.random.uniform(0.2, 0.9), np.exp(np.random.uniform(np.log(0.85), np.log(1.18)))
        height = min(np.sqrt(area / ratio), 1) * image.shape[0]
        width = min(np.sqrt(area * ratio), 1) * image.shape[1]
        ys, xs = self.coordinates(height, image.shape[0]), self.coordinates(width, image.shape[1])
        if np.random.rand() < 0.5:
            xs = xs[::-1].copy()
        if self.raw:
            return torch.from_numpy(image), torch.from_numpy(ys), torch.from_numpy(xs)
        image = image.astype(np.float32) / 255
        y0, x0 = np.floor(ys).astype(int), np.floor(xs).astype(int)
        y1, x1 = np.minimum(y0 + 1, image.shape[0] - 1), np.minimum(x0 + 1, image.shape[1] - 1)
        wy, wx = (ys - y0).astype(np.float32)[:, None, None], (xs - x0).astype(np.float32)[None, :, None]
        rows = image[y0] * (1 - wy) + image[y1] * wy
        crop = rows[:, x0] * (1 - wx) + rows[:, x1] * wx
        crop = (crop - self.mean) / self.std
        return torch.from_numpy(np.ascontiguousarray(crop.transpose(2, 0, 1)))


def masked_autoencoder(change):
    """Pretrain a ViT-B as a masked autoencoder; the images come from a DataLoader with numpy augmentation."""
    pixels, batch = size(224, 32), size(64, 4)
    dataset = AugmentedImages(pixels, raw=change == "gpu_augment")
    workers = size(12, 2) if change == "workers" else size(2, 0)
    context = "fork" if workers else None
    loader = DataLoader(
        dataset,
        batch,
        shuffle=True,
        num_workers=workers,
        multiprocessing_context=context,
        persistent_workers=workers > 0,
        drop_last=True,
    )
    batches = endless(loader)
    batches = itertools.chain([next(batches)], batches)

    model = MaskedAutoencoder(
        pixels,
        size(16, 8),
        size(768, 32),
        size(12, 2),
        size(12, 2),
        size(512, 32),
        size(8, 1),
        size(16, 2),
        fused=change == "sdpa",
    ).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.5e-4, betas=(0.9, 0.95), weight_decay=0.05)
    forward = compiled(model) if change == "compile" else model
    mean = torch.tensor(dataset.mean, device=device).view(1, 3, 1, 1)
    std = torch.tensor(dataset.std, device=device).view(1, 3, 1, 1)

    def crops(images, ys, xs):
        """Do on the device what AugmentedImages does with one image."""
        images = images.to(device).permute(0, 3, 1, 2).float() / 255
        ys = (2 * ys.to(device) + 1) / images.shape[2] - 1
        xs = (2 * xs.to(device) + 1) / images.shape[3] - 1
        n = ys.shape[1]
        grid = torch.stack([xs[:, None, :].expand(-1, n, n), ys[:, :, None].expand(-1, n, n)], dim=-1)
        return (F.grid_sample(images, grid, padding_mode="border", align_corners=False) - mean) / std

    def step():
        images = next(batches)
        images = crops(*images) if change == "gpu_augment" else images.to(device)
        with bf16(change == "bf16"):
            loss = forward(images)
        if not math.isfinite(loss.item()):
            raise RuntimeError("the loss is not finite")
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


# ---- 3. Self-distillation with crops --------------------------------------------------------------------------------


class DinoBlock(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(dim, eps=1e-6), nn.LayerNorm(dim, eps=1e-6)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.fc1, self.fc2 = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x):
        b, n, d = x.shape
        q, k, v = self.qkv(self.norm1(x)).reshape(b, n, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, n, d)
        x = x + self.proj(out)
        return x + self.fc2(F.gelu(self.fc1(self.norm2(x))))


class DinoVit(nn.Module):
    """A ViT for crops of any size with the projection head of DINO."""

    def __init__(self, pixels, patch, dim, depth, heads, hidden, bottleneck, prototypes):
        super().__init__()
        self.grid = pixels // patch
        self.embed = nn.Conv2d(3, dim, patch, patch)
        self.cls = nn.Parameter(torch.randn(1, 1, dim) * 0.02)
        self.pos = nn.Parameter(torch.randn(1, self.grid**2 + 1, dim) * 0.02)
        self.blocks = nn.ModuleList(DinoBlock(dim, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(dim, eps=1e-6)
        self.head = nn.Sequential(
            nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, hidden), nn.GELU(), nn.Linear(hidden, bottleneck)
        )
        self.prototypes = nn.Parameter(torch.randn(prototypes, bottleneck))

    def positions(self, h, w):
        if h == self.grid and w == self.grid:
            return self.pos
        grid = self.pos[:, 1:].reshape(1, self.grid, self.grid, -1).permute(0, 3, 1, 2)
        grid = F.interpolate(grid, size=(h, w), mode="bicubic")
        return torch.cat([self.pos[:, :1], grid.permute(0, 2, 3, 1).reshape(1, h * w, -1)], dim=1)

    def forward(self, images):
        x = self.embed(images)
        h, w = x.shape[2:]
        x = x.flatten(2).transpose(1, 2)
        x = torch.cat([self.cls.expand(len(x), -1, -1), x], dim=1) + self.positions(h, w)
        for block in self.blocks:
            x = block(x)
        x = F.normalize(self.head(self.norm(x)[:, 0]), dim=-1)
        return F.linear(x, F.normalize(self.prototypes, dim=-1))


def multi_crop_distillation(change):
    """Train a ViT-S by self-distillation: a student sees all crops, its averaged teacher the global ones."""
    pixels, local_pixels, local_crops = size(224, 32), size(96, 16), size(8, 2)
    batch, prototypes = size(32, 2), size(16384, 64)
    shapes = [pixels] * 2 + [local_pixels] * local_crops
    data = torch.Generator().manual_seed(0)
    dataset = [[torch.randn(batch, 3, n, n, generator=data) for n in shapes] for _ in range(3)]
    batches = itertools.cycle(dataset)

    student = DinoVit(
        pixels, size(16, 8), size(384, 32), size(12, 2), size(6, 2), size(2048, 32), size(256, 16), prototypes
    ).to(device)
    teacher = copy.deepcopy(student)
    for p in teacher.parameters():
        p.requires_grad = False
    optimizer = torch.optim.AdamW(student.parameters(), lr=5e-4, weight_decay=0.04)
    center = torch.zeros(1, prototypes, device=device)
    student_forward, teacher_forward = student, teacher
    if change == "compile":
        student_forward, teacher_forward = compiled(student, dynamic=False), compiled(teacher, dynamic=False)

    def outputs(model, crops):
        if change == "grouped_crops":
            groups = [torch.cat(list(group)) for _, group in itertools.groupby(crops, key=lambda crop: crop.shape[-1])]
            return [out for group in groups for out in model(group).split(batch)]
        return [model(crop) for crop in crops]

    def clip_gradients(limit):
        if change == "foreach_clip":
            grads = [p.grad for p in student.parameters() if p.grad is not None]
            factors = [(limit / (norm + 1e-6)).clamp(max=1) for norm in torch._foreach_norm(grads)]
            torch._foreach_mul_(grads, factors)
            return
        norms = []
        for p in student.parameters():
            if p.grad is not None:
                norm = p.grad.data.norm(2)
                norms.append(norm.item())
                factor = limit / (norm + 1e-6)
                if factor < 1:
                    p.grad.data.mul_(factor)

    def step():
        crops = [crop.to(device) for crop in next(batches)]
        with bf16(change == "bf16"):
            with torch.no_grad():
                taught = outputs(teacher_forward, crops[:2])
            learned = outputs(student_forward, crops)
        loss, terms = 0, 0
        for i, t in enumerate(taught):
            target = F.softmax((t.float() - center) / 0.04, dim=-1)
            for j, s in enumerate(learned):
                if i != j:
                    loss = loss + torch.sum(-target * F.log_softmax(s.float() / 0.1, dim=-1), dim=-1).mean()
                    terms += 1
        loss = loss / terms
        if not math.isfinite(loss.item()):
            raise RuntimeError("the loss is not finite")
        optimizer.zero_grad()
        loss.backward()
        clip_gradients(3.0)
        optimizer.step()
        with torch.no_grad():
            center.mul_(0.9).add_(torch.cat(taught).float().mean(dim=0, keepdim=True), alpha=0.1)
            if change == "foreach_ema":
                torch._foreach_lerp_(list(teacher.parameters()), list(student.parameters()), 1 - 0.996)
            else:
                for p, q in zip(student.parameters(), teacher.parameters(), strict=True):
                    q.data.mul_(0.996).add_((1 - 0.996) * p.detach().data)
        return loss.detach()

    return step


PROGRAMS = {
    detr_training: {"bf16": "half_precision", "compile": "fuse_pointwise", "stacked_layers": "larger_batch",
                    "graph_model": "cuda_graph", "channels_last": "channels_last"},
    masked_autoencoder: {"bf16": "half_precision", "workers": "data_loader", "gpu_augment": "data_loader",
                         "sdpa": "fused_attention", "compile": "fuse_pointwise"},
    multi_crop_distillation: {"grouped_crops": "larger_batch", "bf16": "half_precision", "compile": "fuse_pointwise",
                              "foreach_clip": "remove_sync", "foreach_ema": ""},
}  # fmt: skip
