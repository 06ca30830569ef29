"""Programs of repositories: DeepLab, GPT, a TCN, text search, RetinaNet, VQ-VAE, SAC and SchNet."""

import copy
import itertools
import math

import numpy as np
import torch
import torch.nn.functional as F
from setting import TINY, bf16, compiled, device, endless, graphed, size, use_tf32
from torch import nn
from torch.distributions import Normal
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.data import DataLoader, Dataset

ON_CUDA = device.type == "cuda"


# ---------------------------------------------------------------------------------------------------------------------
# 1. Semantic segmentation


class Crops(Dataset):
    """Images with label maps; an item is a random crop, flipped at random and normalised."""

    mean = np.array([0.485, 0.456, 0.406], dtype=np.float32)
    std = np.array([0.229, 0.224, 0.225], dtype=np.float32)

    def __init__(self, count, side, crop, classes):
        rng = np.random.default_rng(1)
        self.images = rng.integers(0, 256, (count, side, side, 3), dtype=np.uint8)
        blocks = rng.integers(0, classes, (count, side // 16, side // 16), dtype=np.uint8)
        self.labels = blocks.repeat(16, axis=1).repeat(16, axis=2)
        self.labels[:, :, :4] = 255  # ignored
        self.crop = crop

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        room = self.images.shape[1] - self.crop + 1
        top, left, flip = (int(torch.randint(n, ())) for n in (room, room, 2))
        image = self.images[index, top : top + self.crop, left : left + self.crop]
        label = self.labels[index, top : top + self.crop, left : left + self.crop]
        if flip:
            image, label = image[:, ::-1], label[:, ::-1]
        image = (image.astype(np.float32) / 255.0 - self.mean) / self.std
        image = np.ascontiguousarray(image.transpose(2, 0, 1))
        return torch.from_numpy(image), torch.from_numpy(label.astype(np.int64))


def conv_bn(cin, cout, kernel, stride=1, dilation=1, relu=True):
    layers = [
        nn.Conv2d(cin, cout, kernel, stride, dilation * (kernel // 2), dilation, bias=False),
        nn.BatchNorm2d(cout),
    ]
    return nn.Sequential(*layers, nn.ReLU(inplace=True)) if relu else nn.Sequential(*layers)


class Bottleneck(nn.Module):
    def __init__(self, cin, width, stride=1, dilation=1):
        super().__init__()
        self.body = nn.Sequential(
            conv_bn(cin, width, 1), conv_bn(width, width, 3, stride, dilation), conv_bn(width, width * 4, 1, relu=False)
        )
        same = stride == 1 and cin == width * 4
        self.shortcut = nn.Identity() if same else conv_bn(cin, width * 4, 1, stride, relu=False)

    def forward(self, x):
        return F.relu(self.body(x) + self.shortcut(x))


class DeepLab(nn.Module):
    """ResNet-50 with output stride 16, atrous spatial pyramid pooling and a decoder with low-level features."""

    def __init__(self, classes, width, depths):
        super().__init__()
        self.stem = nn.Sequential(conv_bn(3, width, 7, 2), nn.MaxPool2d(3, 2, 1))
        cin, stages = width, []
        for i, (depth, stride, dilation) in enumerate(zip(depths, (1, 2, 2, 1), (1, 1, 1, 2), strict=False)):
            blocks = []
            for j in range(depth):
                blocks.append(Bottleneck(cin, width * 2**i, stride if j == 0 else 1, dilation))
                cin = width * 2**i * 4
            stages.append(nn.Sequential(*blocks))
        self.stages = nn.ModuleList(stages)
        out = width * 4
        self.pyramid = nn.ModuleList([conv_bn(cin, out, 1)] + [conv_bn(cin, out, 3, 1, d) for d in (6, 12, 18)])
        self.pool = nn.Sequential(nn.AdaptiveAvgPool2d(1), conv_bn(cin, out, 1))
        self.project = conv_bn(out * 5, out, 1)
        self.low = conv_bn(width * 4, 48, 1)
        self.head = nn.Sequential(conv_bn(out + 48, out, 3), conv_bn(out, out, 3), nn.Conv2d(out, classes, 1))

    def forward(self, x):
        low = self.stages[0](self.stem(x))
        high = low
        for stage in self.stages[1:]:
            high = stage(high)
        parts = [branch(high) for branch in self.pyramid]
        parts.append(F.interpolate(self.pool(high), size=high.shape[2:], mode="nearest"))
        high = self.project(torch.cat(parts, dim=1))
        high = F.interpolate(high, size=low.shape[2:], mode="bilinear", align_corners=False)
        logits = self.head(torch.cat([high, self.low(low)], dim=1))
        return F.interpolate(logits, size=x.shape[2:], mode="bilinear", align_corners=False)


def deeplab_train(change):
    """Train a DeepLab v3+ with cross-entropy and Dice, and keep the training IoU of each class."""
    torch.manual_seed(0)
    classes, batch = 21, size(8, 2)
    data = Crops(size(64, 8), size(512, 80), size(384, 64), classes)
    loader = DataLoader(
        data,
        batch,
        shuffle=True,
        drop_last=True,
        num_workers=2,
        pin_memory=ON_CUDA,
        persistent_workers=True,
        multiprocessing_context="fork",
        generator=torch.Generator().manual_seed(3),
    )
    batches = endless(loader)
    next(batches)  # The workers must start before CUDA does.

    torch.backends.cudnn.benchmark = change == "cudnn_benchmark"
    model = DeepLab(classes, size(64, 8), (1, 1, 1, 1) if TINY else (3, 4, 6, 3)).to(device)
    if change == "channels_last":
        model = model.to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.PolynomialLR(optimizer, total_iters=10000, power=0.9)
    inter, union = np.zeros(classes), np.zeros(classes)
    confusion = torch.zeros(classes * classes, dtype=torch.int64, device=device)
    history = []

    def dice_loss(logits, target):
        valid = (target != 255).unsqueeze(1)
        target = torch.where(target == 255, 0, target)
        if change == "one_hot_scatter":
            hot = torch.zeros_like(logits, requires_grad=False).scatter_(1, target.unsqueeze(1), 1.0)
        else:
            hot = F.one_hot(target, classes).permute(0, 3, 1, 2).float()
        prob = logits.softmax(dim=1) * valid
        hot = hot * valid
        both = (prob * hot).sum(dim=(0, 2, 3))
        return 1 - ((2 * both + 1) / (prob.sum(dim=(0, 2, 3)) + hot.sum(dim=(0, 2, 3)) + 1)).mean()

    @torch.no_grad()
    def update_iou(logits, target):
        pred = logits.argmax(dim=1)
        if change == "iou_confusion_matrix":
            # Ignored pixels have weight 0. Counts stay on the GPU until the end of the epoch.
            valid = target != 255
            pair = torch.where(valid, target, 0) * classes + pred
            confusion.scatter_add_(0, pair.flatten(), valid.flatten().long())
            return
        pred = pred[target != 255]
        target = target[target != 255]
        for c in range(classes):
            p, t = pred == c, target == c
            inter[c] += (p & t).sum().item()
            union[c] += (p | t).sum().item()

    def step():
        images, target = next(batches)
        images, target = images.to(device, non_blocking=True), target.to(device, non_blocking=True)
        if change == "channels_last":
            images = images.contiguous(memory_format=torch.channels_last)
        optimizer.zero_grad()
        with bf16(change == "bf16_autocast"):
            logits = model(images)
        logits = logits.float()
        loss = F.cross_entropy(logits, target, ignore_index=255) + dice_loss(logits, target)
        loss.backward()
        optimizer.step()
        scheduler.step()
        update_iou(logits, target)
        history.append(loss.item())
        return loss

    return step


# ---------------------------------------------------------------------------------------------------------------------
# 2. GPT pretraining


class Attention(nn.Module):
    def __init__(self, dim, heads, context, sdpa):
        super().__init__()
        self.heads, self.sdpa = heads, sdpa
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)
        self.register_buffer("mask", torch.tril(torch.ones(context, context, dtype=torch.bool)))

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.qkv(x).split(d, dim=2)
        q, k, v = (y.view(b, t, self.heads, d // self.heads).transpose(1, 2) for y in (q, k, v))
        if self.sdpa:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            scores = (q @ k.transpose(-2, -1)) / math.sqrt(d // self.heads)
            scores = scores.masked_fill(~self.mask[:t, :t], float("-inf"))
            y = F.softmax(scores, dim=-1) @ v
        return self.out(y.transpose(1, 2).contiguous().view(b, t, d))


class GPT(nn.Module):
    """Decoder-only transformer with learned positions; the output layer shares the token embedding."""

    def __init__(self, vocab, context, dim, layers, heads, sdpa):
        super().__init__()
        self.tokens = nn.Embedding(vocab, dim)
        self.positions = nn.Embedding(context, dim)
        self.blocks = nn.ModuleList()
        for _ in range(layers):
            self.blocks.append(
                nn.ModuleDict(
                    {
                        "norm1": nn.LayerNorm(dim),
                        "attention": Attention(dim, heads, context, sdpa),
                        "norm2": nn.LayerNorm(dim),
                        "mlp": nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim)),
                    }
                )
            )
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocab, bias=False)
        self.apply(self.init)
        self.head.weight = self.tokens.weight

    @staticmethod
    def init(module):
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(self, ids, targets):
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = x + block["attention"](block["norm1"](x))
            x = x + block["mlp"](block["norm2"](x))
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.view(-1))


def gpt_pretraining(change):
    """Pretrain a GPT of 67 M parameters; a step is one update from four micro-batches."""
    torch.manual_seed(0)
    use_tf32()
    vocab, context, micro, accumulate = size(32000, 101), size(512, 32), size(4, 2), size(4, 2)
    corpus = np.random.default_rng(2).integers(0, vocab, size(4_000_000, 5000)).astype(np.uint16)
    pick = np.random.default_rng(3)
    model = GPT(vocab, context, size(768, 32), size(6, 2), size(12, 2), change == "sdpa").to(device)
    decay = [p for p in model.parameters() if p.dim() >= 2]
    other = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": other, "weight_decay": 0.0}]
    options = {"fused": True} if change == "fused_adamw" else {}
    optimizer = torch.optim.AdamW(groups, lr=3e-4, betas=(0.9, 0.95), **options)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20000, eta_min=3e-5)
    parameters = list(model.parameters())
    run = compiled(model) if change == "compile_model" else model
    log = []

    def get_batch():
        starts = pick.integers(0, len(corpus) - context - 1, micro)
        x = torch.stack([torch.from_numpy(corpus[i : i + context].astype(np.int64)) for i in starts])
        y = torch.stack([torch.from_numpy(corpus[i + 1 : i + 1 + context].astype(np.int64)) for i in starts])
        return x, y

    def step():
        optimizer.zero_grad(set_to_none=True)
        batches = [get_batch() for _ in range(accumulate)]
        if change == "one_large_batch":
            batches = [tuple(torch.cat(part) for part in zip(*batches, strict=False))]
        total = 0.0
        for x, y in batches:
            with bf16(change == "bf16_autocast"):
                loss = run(x.to(device), y.to(device)) / len(batches)
            loss.backward()
            total += loss.item()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        scheduler.step()
        log.append(total)
        return torch.tensor(total)

    return step


# ---------------------------------------------------------------------------------------------------------------------
# 3. Temporal convolutional network


class Windows(Dataset):
    """Windows of a multivariate series, normalised by the mean and deviation of their past, with time features."""

    def __init__(self, series, past, future):
        self.series, self.past, self.future = series, past, future

    def __len__(self):
        return len(self.series) - self.past - self.future + 1

    def __getitem__(self, start):
        x = self.series[start : start + self.past]
        y = self.series[start + self.past : start + self.past + self.future]
        mean, std = x.mean(axis=0), x.std(axis=0) + 1e-5
        angle = 2 * np.pi * (np.arange(start, start + self.past) % 24) / 24
        clock = np.stack([np.sin(angle), np.cos(angle)], axis=1).astype(np.float32)
        x = np.concatenate([(x - mean) / std, clock], axis=1)
        return torch.from_numpy(x.T.copy()), torch.from_numpy(((y - mean) / std).T.copy())


class Chomp(nn.Module):
    """Cut the end that a convolution padded on both sides has too much, so that it is causal."""

    def __init__(self, extra):
        super().__init__()
        self.extra = extra

    def forward(self, x):
        return x[:, :, : -self.extra].contiguous()


class TemporalBlock(nn.Module):
    def __init__(self, cin, cout, kernel, dilation):
        super().__init__()
        pad = (kernel - 1) * dilation
        layers = []
        for c in (cin, cout):
            conv = nn.Conv1d(c, cout, kernel, padding=pad, dilation=dilation)
            layers += [weight_norm(conv), Chomp(pad), nn.ReLU()]
        self.net = nn.Sequential(*layers)
        self.shortcut = nn.Conv1d(cin, cout, 1) if cin != cout else nn.Identity()

    def forward(self, x):
        return F.relu(self.net(x) + self.shortcut(x))


class TCN(nn.Module):
    """Stack of dilated causal blocks; the features of the last time step give all of the horizon."""

    def __init__(self, variables, hidden, levels, future):
        super().__init__()
        widths = [variables + 2] + [hidden] * levels
        self.blocks = nn.Sequential(*[TemporalBlock(widths[i], hidden, 3, 2**i) for i in range(levels)])
        self.head = nn.Linear(hidden, variables * future)
        self.variables = variables

    def forward(self, x):
        last = self.blocks(x)[:, :, -1]
        return self.head(last).view(len(x), self.variables, -1)


def tcn_forecast(change):
    """Train a TCN on windows of a series of 32 variables, with a learning-rate schedule and gradient clipping."""
    torch.manual_seed(0)
    variables, past, future, batch = size(32, 4), size(336, 40), size(96, 8), size(128, 4)
    length = size(20000, 200)
    rng = np.random.default_rng(4)
    wave = np.sin(2 * np.pi * np.arange(length)[:, None] / rng.uniform(12, 200, variables))
    series = (wave + 0.3 * rng.standard_normal((length, variables))).astype(np.float32)
    data = Windows(series, past, future)
    order = np.random.default_rng(5).permutation(len(data)).tolist()
    workers = change == "loader_workers"
    extra = (
        dict(num_workers=2, persistent_workers=True, multiprocessing_context="fork", pin_memory=ON_CUDA)
        if workers
        else {}
    )
    batches = endless(DataLoader(data, batch, sampler=order, drop_last=True, **extra))
    next(batches)  # The workers must start before CUDA does.

    model = TCN(variables, size(128, 8), size(8, 3), future).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=change == "fused_adamw")
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-3, total_steps=100000)
    run = compiled(model) if change == "compile_model" else model
    history = {"loss": [], "mae": []}

    def gpu_batches():
        """Cut the same windows as the loader from the series on the GPU, a batch at once."""
        on_gpu = torch.from_numpy(series).to(device)
        starts = torch.tensor(order, device=device)
        offsets = torch.arange(past + future, device=device)
        first = 1  # The base threw its first batch away.
        while True:
            for i in range(first, len(starts) // batch):
                where = starts[i * batch : (i + 1) * batch, None] + offsets
                window = on_gpu[where]
                x, y = window[:, :past], window[:, past:]
                mean, std = x.mean(dim=1, keepdim=True), x.std(dim=1, correction=0, keepdim=True) + 1e-5
                angle = 2 * math.pi * (where[:, :past] % 24).float() / 24
                clock = torch.stack([angle.sin(), angle.cos()], dim=2)
                x = torch.cat([(x - mean) / std, clock], dim=2)
                yield x.transpose(1, 2).contiguous(), ((y - mean) / std).transpose(1, 2).contiguous()
            first = 0

    if change == "windows_on_gpu":
        batches = gpu_batches()

    def step():
        x, y = next(batches)
        x, y = x.to(device, non_blocking=workers), y.to(device, non_blocking=workers)
        optimizer.zero_grad()
        with bf16(change == "bf16_autocast"):
            pred = run(x)
        loss = F.mse_loss(pred.float(), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        history["loss"].append(loss.item())
        history["mae"].append((pred - y).abs().mean().item())
        return loss

    return step


# ---------------------------------------------------------------------------------------------------------------------
# 4. Sentence embeddings and search


def embedding_search(change):
    """Serve a request: embed 128 texts of mixed length, find for each the ten nearest of a corpus by cosine."""
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    if change == "tf32":
        use_tf32()
    hidden, longest, texts, batch = size(384, 32), size(256, 32), size(128, 8), size(32, 4)
    config = BertConfig(
        vocab_size=size(30522, 200),
        hidden_size=hidden,
        num_hidden_layers=size(6, 2),
        num_attention_heads=size(12, 2),
        intermediate_size=4 * hidden,
        max_position_embeddings=size(512, 64),
    )
    model = BertModel(config, add_pooling_layer=False).to(device).eval()
    if change == "bf16_model":
        model = model.bfloat16()
    generator = torch.Generator().manual_seed(6)
    corpus = torch.randn(size(250_000, 500), hidden, generator=generator).to(device)
    if change == "corpus_normalized_once":
        corpus = F.normalize(corpus, dim=1)

    rng = np.random.default_rng(7)
    requests = []  # Token ids, as the tokenizer gives them: most texts short, a few as long as the limit
    for _ in range(16):
        lengths = np.clip(rng.lognormal(math.log(longest / 6), 0.8, texts), 4, longest).astype(int)
        requests.append([rng.integers(1, config.vocab_size, n).tolist() for n in lengths])
    served = 0

    def collate(token_lists):
        """Pad to the longest of the batch."""
        width = max(len(ids) for ids in token_lists)
        ids = torch.zeros(len(token_lists), width, dtype=torch.long)
        mask = torch.zeros(len(token_lists), width, dtype=torch.long)
        for row, tokens in enumerate(token_lists):
            ids[row, : len(tokens)] = torch.tensor(tokens)
            mask[row, : len(tokens)] = 1
        return ids.to(device), mask.to(device)

    def encode(token_lists):
        order = list(range(len(token_lists)))
        if change == "sort_by_length":
            order.sort(key=lambda i: -len(token_lists[i]))
        vectors = []
        for first in range(0, len(order), batch):
            ids, mask = collate([token_lists[i] for i in order[first : first + batch]])
            states = model(input_ids=ids, attention_mask=mask).last_hidden_state.float()
            weight = mask.unsqueeze(-1).expand(states.size()).float()
            pooled = (states * weight).sum(dim=1) / weight.sum(dim=1).clamp(min=1e-9)
            vectors.append(pooled.cpu().numpy())
        vectors = np.concatenate(vectors)
        if change == "sort_by_length":
            vectors = vectors[np.argsort(order)]
        return vectors

    def cosine(queries, documents):
        if change != "corpus_normalized_once":
            documents = F.normalize(documents, dim=1)
        return F.normalize(queries, dim=1) @ documents.T

    @torch.no_grad()
    def step():
        nonlocal served
        request = requests[served % len(requests)]
        served += 1
        queries = torch.from_numpy(encode(request)).to(device)
        scores = cosine(queries, corpus)
        if change == "topk_not_sort":
            values, where = scores.topk(10, dim=1)
        else:
            values, where = torch.sort(scores, dim=1, descending=True)
            values, where = values[:, :10], where[:, :10]
        answer = list(zip(values.tolist(), where.tolist(), strict=False))
        return torch.tensor([best for best, _ in answer])

    return step


# ---------------------------------------------------------------------------------------------------------------------
# 5. Object detection


class BasicBlock(nn.Module):
    def __init__(self, cin, cout, stride):
        super().__init__()
        self.body = nn.Sequential(conv_bn(cin, cout, 3, stride), conv_bn(cout, cout, 3, relu=False))
        same = stride == 1 and cin == cout
        self.shortcut = nn.Identity() if same else conv_bn(cin, cout, 1, stride, relu=False)

    def forward(self, x):
        return F.relu(self.body(x) + self.shortcut(x))


class RetinaNet(nn.Module):
    """ResNet-18 with a feature pyramid and heads that give classes and boxes for nine anchors a place."""

    def __init__(self, classes, width, channels):
        super().__init__()
        self.stem = nn.Sequential(conv_bn(3, width, 7, 2), nn.MaxPool2d(3, 2, 1))
        widths = [width, width, width * 2, width * 4, width * 8]
        self.stages = nn.ModuleList(
            nn.Sequential(
                BasicBlock(widths[i], widths[i + 1], 1 if i == 0 else 2), BasicBlock(widths[i + 1], widths[i + 1], 1)
            )
            for i in range(4)
        )
        self.lateral = nn.ModuleList(nn.Conv2d(w, channels, 1) for w in widths[2:])
        self.smooth = nn.ModuleList(nn.Conv2d(channels, channels, 3, padding=1) for _ in range(3))
        self.p6 = nn.Conv2d(widths[4], channels, 3, 2, 1)
        self.p7 = nn.Conv2d(channels, channels, 3, 2, 1)
        self.classes = classes
        self.class_head, self.box_head = self.head(channels, 9 * classes), self.head(channels, 36)
        nn.init.constant_(self.class_head[-1].bias, -4.6)

    @staticmethod
    def head(channels, outputs):
        layers = []
        for _ in range(4):
            layers += [nn.Conv2d(channels, channels, 3, padding=1), nn.ReLU(inplace=True)]
            nn.init.kaiming_normal_(layers[-2].weight, nonlinearity="relu")
        return nn.Sequential(*layers, nn.Conv2d(channels, outputs, 3, padding=1))

    def forward(self, x):
        x = self.stages[0](self.stem(x))
        c3 = self.stages[1](x)
        c4 = self.stages[2](c3)
        c5 = self.stages[3](c4)
        p5 = self.lateral[2](c5)
        p4 = self.lateral[1](c4) + F.interpolate(p5, scale_factor=2.0)
        p3 = self.lateral[0](c3) + F.interpolate(p4, scale_factor=2.0)
        levels = [smooth(p) for smooth, p in zip(self.smooth, (p3, p4, p5), strict=False)]
        levels.append(self.p6(c5))
        levels.append(self.p7(F.relu(levels[-1])))
        logits, deltas = [], []
        for p in levels:
            n = len(p)
            logits.append(self.class_head(p).permute(0, 2, 3, 1).reshape(n, -1, self.classes))
            deltas.append(self.box_head(p).permute(0, 2, 3, 1).reshape(n, -1, 4))
        return logits, deltas


def make_anchors(side):
    """Return the anchors (x1, y1, x2, y2) of each level of the pyramid."""
    levels = []
    for stride in (8, 16, 32, 64, 128):
        shapes = []
        for scale in (1.0, 2 ** (1 / 3), 2 ** (2 / 3)):
            for ratio in (0.5, 1.0, 2.0):
                w, h = 4 * stride * scale / math.sqrt(ratio), 4 * stride * scale * math.sqrt(ratio)
                shapes.append([-w / 2, -h / 2, w / 2, h / 2])
        centers = (torch.arange(math.ceil(side / stride), device=device) + 0.5) * stride
        y, x = torch.meshgrid(centers, centers, indexing="ij")
        places = torch.stack([x, y, x, y], dim=-1).view(-1, 1, 4)
        levels.append((places + torch.tensor(shapes, device=device)).view(-1, 4))
    return levels


def decode(deltas, anchors, side):
    """Apply deltas to anchors and clip the boxes to the image."""
    wh = anchors[:, 2:] - anchors[:, :2]
    center = (anchors[:, :2] + anchors[:, 2:]) / 2 + deltas[:, :2] * wh
    wh = wh * deltas[:, 2:].clamp(max=4.0).exp()
    return torch.cat([center - wh / 2, center + wh / 2], dim=1).clamp(0, side)


def iou(a, b):
    """Return the overlaps of boxes a (n, 4) with boxes b (m, 4)."""
    low, high = torch.max(a[:, None, :2], b[None, :, :2]), torch.min(a[:, None, 2:], b[None, :, 2:])
    both = (high - low).clamp(min=0).prod(dim=2)
    area_a, area_b = ((x[:, 2:] - x[:, :2]).prod(dim=1) for x in (a, b))
    return both / (area_a[:, None] + area_b[None, :] - both + 1e-6)


def nms(boxes, scores, limit, threshold=0.5):
    """Keep greedily the best box and drop what overlaps it."""
    order = scores.argsort(descending=True)
    keep = []
    while order.numel() > 0 and len(keep) < limit:
        best, order = order[:1], order[1:]
        keep.append(best)
        order = order[iou(boxes[best], boxes[order])[0] <= threshold]
    return torch.cat(keep)


def nms_matrix(boxes, scores, limit, threshold=0.5):
    """Like nms, with all overlaps computed at once and the greedy choice made by NumPy on the CPU."""
    order = scores.argsort(descending=True)
    overlap = (iou(boxes[order], boxes[order]) > threshold).cpu().numpy()
    dropped, keep = np.zeros(len(overlap), dtype=bool), []
    for i in range(len(overlap)):
        if not dropped[i]:
            keep.append(i)
            if len(keep) == limit:
                break
            dropped |= overlap[i]
    return order[torch.tensor(keep, device=order.device)]


def retina_detection(change):
    """Detect objects in four images: network, decoding by image and level, and non-maximum suppression."""
    torch.manual_seed(0)
    images, side, classes, candidates, limit = size(4, 2), size(640, 128), size(80, 5), size(200, 20), size(100, 10)
    blocks = np.random.default_rng(8).integers(0, 256, (16, images, 3, side // 16, side // 16), dtype=np.uint8)
    pixels = blocks.repeat(16, axis=3).repeat(16, axis=4)
    model = RetinaNet(classes, size(64, 8), size(256, 16)).to(device)
    with torch.no_grad():  # In place of trained weights: bring the outputs to the usual range.
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.momentum = None
        first = torch.from_numpy(pixels[0]).to(device).float() / 255
        model(first)
        model.eval()
        logits, deltas = model(first)
        model.class_head[-1].weight.mul_(0.8 / torch.cat(logits, dim=1).std())
        model.box_head[-1].weight.mul_(0.2 / torch.cat(deltas, dim=1).std())
    static = torch.zeros(images, 3, side, side, device=device)
    cached = make_anchors(side) if change == "anchors_cached" else None
    served = 0

    @torch.no_grad()
    def network(x):
        with bf16(change == "bf16_autocast"):
            logits, deltas = model(x)
        return [x.float() for x in logits], [x.float() for x in deltas]

    captured = graphed(lambda: network(static)) if change == "cuda_graph_network" else None

    def find(logits, deltas, anchors):
        """Return boxes, scores and classes of one image."""
        boxes, scores, labels = [], [], []
        for level_logits, level_deltas, level_anchors in zip(logits, deltas, anchors, strict=False):
            prob = level_logits.sigmoid().flatten()
            where = torch.where(prob > 0.05)[0]
            prob, best = prob[where].topk(min(candidates, len(where)))
            where = where[best]
            anchor = where // classes
            boxes.append(decode(level_deltas[anchor], level_anchors[anchor], side))
            scores.append(prob)
            labels.append(where % classes)
        boxes, scores, labels = torch.cat(boxes), torch.cat(scores), torch.cat(labels)
        apart = boxes + labels[:, None] * (2.0 * side)  # Boxes of different classes never overlap.
        if change == "nms_on_cpu":
            keep = nms(apart.cpu(), scores.cpu(), limit).to(device)
        elif change == "nms_iou_matrix":
            keep = nms_matrix(apart, scores, limit)
        else:
            keep = nms(apart, scores, limit)
        return boxes[keep], scores[keep], labels[keep]

    @torch.no_grad()
    def step():
        nonlocal served
        x = torch.from_numpy(pixels[served % len(pixels)]).to(device).float() / 255
        served += 1
        if captured is not None:
            static.copy_(x)
            logits, deltas = captured()
        else:
            logits, deltas = network(x)
        anchors = cached if cached is not None else make_anchors(side)
        found = torch.zeros(images, limit)
        results = []
        for i in range(images):
            boxes, scores, labels = find([x[i] for x in logits], [x[i] for x in deltas], anchors)
            results.append({"boxes": boxes.cpu().numpy(), "labels": labels.cpu().numpy()})
            found[i, : len(scores)] = scores.cpu()
        return found

    return step


# ---------------------------------------------------------------------------------------------------------------------
# 6. VQ-VAE


class Residual(nn.Module):
    def __init__(self, channels, hidden):
        super().__init__()
        self.body = nn.Sequential(
            nn.ReLU(),
            nn.Conv2d(channels, hidden, 3, padding=1, bias=False),
            nn.ReLU(),
            nn.Conv2d(hidden, channels, 1, bias=False),
        )

    def forward(self, x):
        return x + self.body(x)


class Quantizer(nn.Module):
    """Nearest codes of a codebook, which follows the encoder by moving averages."""

    def __init__(self, codes, dim, by_index, decay=0.99):
        super().__init__()
        self.codes, self.by_index, self.decay = codes, by_index, decay
        self.register_buffer("codebook", torch.randn(codes, dim))
        self.register_buffer("count", torch.ones(codes))
        self.register_buffer("total", self.codebook.clone())

    def forward(self, z):
        z = z.float().permute(0, 2, 3, 1).contiguous()
        flat = z.view(-1, z.shape[-1])
        with torch.no_grad():
            distances = (
                flat.pow(2).sum(dim=1, keepdim=True) + self.codebook.pow(2).sum(dim=1) - 2 * flat @ self.codebook.t()
            )
            index = distances.argmin(dim=1)
            if self.by_index:
                quantized = F.embedding(index, self.codebook)
                used = torch.zeros_like(self.count).index_add_(0, index, torch.ones_like(flat[:, 0]))
                sums = torch.zeros_like(self.total).index_add_(0, index, flat)
            else:
                encodings = torch.zeros(len(flat), self.codes, device=flat.device)
                encodings.scatter_(1, index.unsqueeze(1), 1)
                quantized = encodings @ self.codebook
                used = encodings.sum(dim=0)
                sums = encodings.t() @ flat
            share = used / len(flat)
            perplexity = torch.exp(-(share * torch.log(share + 1e-10)).sum())
            self.count.mul_(self.decay).add_(used, alpha=1 - self.decay)
            self.total.mul_(self.decay).add_(sums, alpha=1 - self.decay)
            n = self.count.sum()
            smooth = (self.count + 1e-5) / (n + self.codes * 1e-5) * n
            self.codebook.copy_(self.total / smooth.unsqueeze(1))
        quantized = quantized.view(z.shape)
        commitment = F.mse_loss(z, quantized)
        quantized = z + (quantized - z).detach()
        return quantized.permute(0, 3, 1, 2).contiguous(), commitment, perplexity


class VQVAE(nn.Module):
    def __init__(self, hidden, dim, codes, by_index):
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(3, hidden // 2, 4, 2, 1),
            nn.ReLU(),
            nn.Conv2d(hidden // 2, hidden, 4, 2, 1),
            nn.ReLU(),
            nn.Conv2d(hidden, hidden, 3, padding=1),
            Residual(hidden, hidden // 2),
            Residual(hidden, hidden // 2),
            nn.ReLU(),
            nn.Conv2d(hidden, dim, 1),
        )
        self.quantizer = Quantizer(codes, dim, by_index)
        self.decoder = nn.Sequential(
            nn.Conv2d(dim, hidden, 3, padding=1),
            Residual(hidden, hidden // 2),
            Residual(hidden, hidden // 2),
            nn.ReLU(),
            nn.ConvTranspose2d(hidden, hidden // 2, 4, 2, 1),
            nn.ReLU(),
            nn.ConvTranspose2d(hidden // 2, 3, 4, 2, 1),
        )

    def forward(self, x):
        z = self.encoder(x)
        with torch.autocast(x.device.type, enabled=False):
            quantized, commitment, perplexity = self.quantizer(z)
        return self.decoder(quantized), commitment, perplexity


def vqvae_train(change):
    """Train a VQ-VAE on images of 128 x 128 from a NumPy array, flipped and normalised on the CPU."""
    torch.manual_seed(0)
    side, batch, count = size(128, 16), size(64, 4), size(1024, 32)
    rng = np.random.default_rng(9)
    coarse = rng.integers(0, 256, (count, side // 8, side // 8, 3), dtype=np.uint8)
    images = coarse.repeat(8, axis=1).repeat(8, axis=2)
    order = np.random.default_rng(10)
    model = VQVAE(size(128, 16), size(64, 8), size(1024, 16), change == "codes_by_index").to(device)
    if change == "channels_last":
        model = model.to(memory_format=torch.channels_last)
    with torch.no_grad():  # The codebook starts with codes of the first images, so that it does not collapse.
        x = torch.from_numpy(images[:batch]).to(device).permute(0, 3, 1, 2).float() / 255 * 2 - 1
        z = model.encoder(x).permute(0, 2, 3, 1).flatten(0, 2)
        codebook = model.quantizer.codebook
        codebook.copy_(z[torch.from_numpy(order.permutation(len(z))[: len(codebook)]).to(device)])
        model.quantizer.total.copy_(codebook)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-4)
    run = compiled(model) if change == "compile_model" else model
    log = {"loss": [], "reconstruction": [], "perplexity": []}

    def load():
        index = order.choice(count, batch, replace=False)
        flip = order.random(batch) < 0.5
        if change == "uint8_to_gpu":
            x = torch.from_numpy(images[index]).to(device).permute(0, 3, 1, 2)
            x = x.to(torch.float32, memory_format=torch.contiguous_format) / 255 * 2 - 1
            return torch.where(torch.from_numpy(flip).to(device).view(-1, 1, 1, 1), x.flip(3), x)
        x = images[index].astype(np.float32) / 255 * 2 - 1
        for i in range(batch):
            if flip[i]:
                x[i] = x[i, :, ::-1].copy()
        x = np.ascontiguousarray(x.transpose(0, 3, 1, 2))
        return torch.from_numpy(x).to(device)

    def step():
        x = load()
        if change == "channels_last":
            x = x.contiguous(memory_format=torch.channels_last)
        optimizer.zero_grad()
        with bf16(change == "bf16_autocast"):
            y, commitment, perplexity = run(x)
        reconstruction = F.mse_loss(y.float(), x)
        loss = reconstruction + 0.25 * commitment
        loss.backward()
        optimizer.step()
        log["loss"].append(loss.item())
        log["reconstruction"].append(reconstruction.item())
        log["perplexity"].append(perplexity.item())
        return loss

    return step


# ---------------------------------------------------------------------------------------------------------------------
# 7. Soft actor-critic


def mlp(*widths):
    layers = []
    for a, b in itertools.pairwise(widths):
        layers += [nn.Linear(a, b), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class Actor(nn.Module):
    def __init__(self, obs, act, hidden):
        super().__init__()
        self.body = nn.Sequential(mlp(obs, hidden, hidden), nn.ReLU())
        self.mean, self.log_std = nn.Linear(hidden, act), nn.Linear(hidden, act)

    def forward(self, obs):
        h = self.body(obs)
        return self.mean(h), self.log_std(h).clamp(-5, 2)


class Critic(nn.Module):
    """Two Q functions."""

    def __init__(self, obs, act, hidden):
        super().__init__()
        self.q1, self.q2 = mlp(obs + act, hidden, hidden, 1), mlp(obs + act, hidden, hidden, 1)

    def forward(self, obs, act):
        x = torch.cat([obs, act], dim=1)
        return self.q1(x), self.q2(x)


def sac_agent(change):
    """Soft actor-critic: a step acts once in a small simulated environment and makes one update from the replay."""
    torch.manual_seed(0)
    obs_dim, act_dim, hidden, batch = size(111, 6), size(8, 2), size(256, 16), size(256, 8)
    capacity, gamma, tau = size(200_000, 100), 0.99, 0.005
    rng = np.random.default_rng(11)
    replay = {
        name: rng.standard_normal((capacity, dim), dtype=np.float32)
        for name, dim in (("obs", obs_dim), ("act", act_dim), ("rew", 1), ("next", obs_dim))
    }
    replay["act"] = np.tanh(replay["act"])
    replay["done"] = (rng.random((capacity, 1)) < 0.01).astype(np.float32)
    dynamics = rng.standard_normal((obs_dim + act_dim, obs_dim)).astype(np.float32) / math.sqrt(obs_dim)
    if change == "replay_on_gpu":
        replay = {name: torch.from_numpy(array).to(device) for name, array in replay.items()}

    actor, critic = Actor(obs_dim, act_dim, hidden).to(device), Critic(obs_dim, act_dim, hidden).to(device)
    target = copy.deepcopy(critic)
    log_alpha = torch.zeros(1, device=device, requires_grad=True)
    options = {}
    if change == "fused_adam":
        options = {"fused": True}
    if change == "cuda_graph_update":
        options = {"capturable": ON_CUDA}
    actor_opt, critic_opt, alpha_opt = (
        torch.optim.Adam(p, lr=3e-4, **options) for p in (actor.parameters(), critic.parameters(), [log_alpha])
    )
    run_actor, run_critic, run_target = actor, critic, target
    if change == "compile_networks":
        run_actor, run_critic, run_target = compiled(actor), compiled(critic), compiled(target)
    log = {"critic": [], "actor": [], "alpha": []}
    # The checks of distributions look at values, which a capture forbids.
    check = {"validate_args": False} if change == "cuda_graph_update" else {}

    def sample(network, obs):
        """Return an action squashed by tanh, and its log-probability."""
        mean, log_std = network(obs)
        dist = Normal(mean, log_std.exp(), **check)
        raw = dist.rsample()
        action = torch.tanh(raw)
        log_prob = dist.log_prob(raw) - torch.log(1 - action.pow(2) + 1e-6)
        return action, log_prob.sum(dim=1, keepdim=True)

    def update(data):
        alpha = log_alpha.exp().detach()
        with torch.no_grad():
            next_act, next_log_prob = sample(run_actor, data["next"])
            q1, q2 = run_target(data["next"], next_act)
            wanted = data["rew"] + gamma * (1 - data["done"]) * (torch.min(q1, q2) - alpha * next_log_prob)
        q1, q2 = run_critic(data["obs"], data["act"])
        critic_loss = F.mse_loss(q1, wanted) + F.mse_loss(q2, wanted)
        critic_opt.zero_grad()
        critic_loss.backward()
        critic_opt.step()

        act, log_prob = sample(run_actor, data["obs"])
        q1, q2 = run_critic(data["obs"], act)
        actor_loss = (alpha * log_prob - torch.min(q1, q2)).mean()
        actor_opt.zero_grad()
        actor_loss.backward()
        actor_opt.step()

        alpha_loss = -(log_alpha.exp() * (log_prob.detach() - act_dim)).mean()
        alpha_opt.zero_grad()
        alpha_loss.backward()
        alpha_opt.step()

        with torch.no_grad():
            if change == "polyak_foreach":
                torch._foreach_lerp_(list(target.parameters()), list(critic.parameters()), tau)
            else:
                for p, t in zip(critic.parameters(), target.parameters(), strict=False):
                    t.copy_(tau * p + (1 - tau) * t)
        return critic_loss.detach(), actor_loss.detach()

    def draw():
        """Return a batch of the replay on the device."""
        index = rng.integers(0, capacity, batch)
        if change == "replay_on_gpu":
            index = torch.from_numpy(index).to(device)
            return {name: array[index] for name, array in replay.items()}
        return {name: torch.from_numpy(array[index]).to(device) for name, array in replay.items()}

    static, captured = None, None
    if change == "cuda_graph_update":
        static = {name: torch.zeros(batch, array.shape[1], device=device) for name, array in replay.items()}
        for name, array in replay.items():
            static[name].copy_(torch.from_numpy(array[:batch]))  # The warm-up of the capture trains on this.
        captured = graphed(lambda: update(static))
    obs, place = rng.standard_normal(obs_dim, dtype=np.float32), 0

    def step():
        nonlocal obs, place
        with torch.no_grad():
            action, _ = sample(actor, torch.as_tensor(obs, device=device).unsqueeze(0))
        action = action[0].cpu().numpy()
        following = np.tanh(np.concatenate([obs, action]) @ dynamics)
        reward = float(following[0] - 0.1 * np.square(action).sum())
        for name, value in (("obs", obs), ("act", action), ("rew", reward), ("next", following), ("done", 0.0)):
            replay[name][place] = torch.as_tensor(value) if change == "replay_on_gpu" else value
        obs, place = following, (place + 1) % capacity
        data = draw()
        if captured is not None:
            for name, value in data.items():
                static[name].copy_(value)
            critic_loss, actor_loss = captured()
        else:
            critic_loss, actor_loss = update(data)
        log["critic"].append(critic_loss.item())
        log["actor"].append(actor_loss.item())
        log["alpha"].append(log_alpha.exp().item())
        return critic_loss

    return step


# ---------------------------------------------------------------------------------------------------------------------
# 8. Molecules


def neighbours(positions, cutoff=5.0):
    """Return the pairs of atoms nearer than the cutoff."""
    distance = np.linalg.norm(positions[:, None] - positions[None], axis=-1)
    np.fill_diagonal(distance, np.inf)
    return np.stack(np.nonzero(distance < cutoff))


class SchNet(nn.Module):
    """Continuous-filter convolutions over pairs of near atoms; the energy is the sum over the atoms."""

    def __init__(self, dim, layers, gaussians, select, cutoff=5.0):
        super().__init__()
        self.select, self.cutoff = select, cutoff
        self.embedding = nn.Embedding(20, dim)
        self.register_buffer("centers", torch.linspace(0, cutoff, gaussians))
        self.gamma = 0.5 / (cutoff / gaussians) ** 2
        self.filters = nn.ModuleList(
            nn.Sequential(nn.Linear(gaussians, dim), nn.Softplus(), nn.Linear(dim, dim)) for _ in range(layers)
        )
        self.inputs = nn.ModuleList(nn.Linear(dim, dim, bias=False) for _ in range(layers))
        self.outputs = nn.ModuleList(
            nn.Sequential(nn.Linear(dim, dim), nn.Softplus(), nn.Linear(dim, dim)) for _ in range(layers)
        )
        self.head = nn.Sequential(nn.Linear(dim, dim // 2), nn.Softplus(), nn.Linear(dim // 2, 1))

    def take(self, x, index):
        return x.index_select(0, index) if self.select else x[index]

    def forward(self, kinds, positions, source, target):
        length = (self.take(positions, source) - self.take(positions, target)).norm(dim=1, keepdim=True)
        radial = torch.exp(-self.gamma * (length - self.centers) ** 2)
        envelope = 0.5 * (torch.cos(length * (math.pi / self.cutoff)) + 1)
        h = self.embedding(kinds)
        for filters, inputs, outputs in zip(self.filters, self.inputs, self.outputs, strict=False):
            message = self.take(inputs(h), source) * (filters(radial) * envelope)
            h = h + outputs(torch.zeros_like(h).index_add(0, target, message))
        return self.head(h).squeeze(1)


def schnet_forces(change):
    """Train a SchNet on energies and forces of molecules of different sizes, with moving averages of the weights."""
    torch.manual_seed(0)
    molecules, batch, dim = size(1024, 16), size(64, 4), size(128, 16)
    rng = np.random.default_rng(12)
    data = []
    for _ in range(molecules):
        n = int(rng.integers(8, 30))
        grid = np.stack(np.meshgrid(*[np.arange(4)] * 3), axis=-1).reshape(-1, 3)
        positions = 1.6 * rng.permutation(grid)[:n] + 0.1 * rng.standard_normal((n, 3))
        data.append(
            {
                "kinds": rng.integers(1, 10, n),
                "positions": positions.astype(np.float32),
                "energy": np.float32(rng.standard_normal()),
                "forces": rng.standard_normal((n, 3)).astype(np.float32),
            }
        )
    if change == "edges_cached":
        for item in data:
            item["edges"] = neighbours(item["positions"])
    epoch = rng.permutation(molecules).reshape(-1, batch)
    padded = change == "padded_cuda_graph"

    def collate(items):
        """Join molecules to one graph in NumPy."""
        sizes = [len(item["kinds"]) for item in items]
        starts = np.cumsum([0, *sizes[:-1]])
        edges = [
            (item["edges"] if "edges" in item else neighbours(item["positions"])) + start
            for item, start in zip(items, starts, strict=False)
        ]
        edges = np.concatenate(edges, axis=1)
        return {
            "kinds": np.concatenate([item["kinds"] for item in items]),
            "positions": np.concatenate([item["positions"] for item in items]),
            "forces": np.concatenate([item["forces"] for item in items]),
            "energy": np.array([item["energy"] for item in items]),
            "molecule": np.repeat(np.arange(len(items)), sizes),
            "real": np.ones(sum(sizes), dtype=np.float32),
            "source": edges[0],
            "target": edges[1],
        }, sizes

    def pad(graph, atoms, pairs):
        """Add atoms that belong to a molecule of their own and pairs between them, up to the given numbers."""
        n, m = len(graph["kinds"]), len(graph["source"])
        extra, more = atoms - n, np.arange(pairs - m)
        line = np.zeros((extra, 3), dtype=np.float32)
        line[:, 0] = np.arange(extra)
        fill = {
            "kinds": np.zeros(extra, dtype=np.int64),
            "positions": line,
            "molecule": np.full(extra, batch),
            "forces": np.zeros((extra, 3), dtype=np.float32),
            "real": np.zeros(extra, dtype=np.float32),
            "source": n + more % extra,
            "target": n + (more + 1) % extra,
        }
        return {name: np.concatenate([value, fill[name]]) if name in fill else value for name, value in graph.items()}

    model = SchNet(dim, size(5, 2), size(50, 8), change == "index_select").to(device)
    average = copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-4, capturable=padded and ON_CUDA)
    log = {"loss": [], "energy": [], "force": []}

    def train(graph, sizes):
        positions = graph["positions"].detach().requires_grad_()
        atom_energy = model(graph["kinds"], positions, graph["source"], graph["target"])
        if padded or change == "energy_index_add":
            energy = atom_energy.new_zeros(batch + 1).index_add(0, graph["molecule"], atom_energy)[:batch]
        else:
            energy = torch.stack([part.sum() for part in atom_energy.split(sizes)])
        forces = -torch.autograd.grad(energy.sum(), positions, create_graph=True)[0]
        energy_loss = F.mse_loss(energy, graph["energy"])
        error = (forces - graph["forces"]) * graph["real"].unsqueeze(1)
        force_loss = error.square().sum() / (3 * graph["real"].sum())
        loss = 0.05 * energy_loss + force_loss
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 10.0)
        optimizer.step()
        with torch.no_grad():
            if change == "ema_foreach":
                torch._foreach_lerp_(list(average.parameters()), list(model.parameters()), 0.001)
            else:
                for a, p in zip(average.parameters(), model.parameters(), strict=False):
                    a.mul_(0.999).add_(p, alpha=0.001)
        return loss.detach(), energy_loss.detach(), force_loss.detach()

    static, captured, done = None, None, 0
    if padded:
        graphs = [collate([data[i] for i in row])[0] for row in epoch]
        atoms = max(len(graph["kinds"]) for graph in graphs) + 16
        pairs = max(len(graph["source"]) for graph in graphs) + 16
        static = {name: torch.from_numpy(value).to(device) for name, value in pad(graphs[0], atoms, pairs).items()}
        captured = graphed(lambda: train(static, None))

    def step():
        nonlocal done
        graph, sizes = collate([data[i] for i in epoch[done % len(epoch)]])
        done += 1
        if captured is not None:
            for name, value in pad(graph, atoms, pairs).items():
                static[name].copy_(torch.from_numpy(value))
            results = captured()
        else:
            results = train({name: torch.from_numpy(value).to(device) for name, value in graph.items()}, sizes)
        for name, value in zip(log, results, strict=False):
            log[name].append(value.item())
        return results[0]

    return step


PROGRAMS = {
    deeplab_train: {"bf16_autocast": "half_precision", "channels_last": "channels_last", "one_hot_scatter": "",
                    "iou_confusion_matrix": "remove_sync", "cudnn_benchmark": ""},
    gpt_pretraining: {"bf16_autocast": "half_precision", "compile_model": "fuse_pointwise", "sdpa": "fused_attention",
                      "one_large_batch": "larger_batch", "fused_adamw": "fused_optimizer"},
    tcn_forecast: {"windows_on_gpu": "data_loader", "loader_workers": "data_loader", "compile_model": "fuse_pointwise",
                   "bf16_autocast": "half_precision", "fused_adamw": "fused_optimizer"},
    embedding_search: {"topk_not_sort": "largest_first", "bf16_model": "half_precision", "tf32": "tf32",
                       "sort_by_length": "trim_padding", "corpus_normalized_once": ""},
    retina_detection: {"nms_iou_matrix": "larger_batch", "nms_on_cpu": "", "cuda_graph_network": "cuda_graph",
                       "bf16_autocast": "half_precision", "anchors_cached": ""},
    vqvae_train: {"uint8_to_gpu": "python", "codes_by_index": "", "bf16_autocast": "half_precision",
                  "compile_model": "fuse_pointwise", "channels_last": "channels_last"},
    sac_agent: {"cuda_graph_update": "cuda_graph", "compile_networks": "fuse_pointwise", "replay_on_gpu": "python",
                "polyak_foreach": "update_graph", "fused_adam": "fused_optimizer"},
    schnet_forces: {"padded_cuda_graph": "cuda_graph", "edges_cached": "python", "energy_index_add": "larger_batch",
                    "index_select": "index_select", "ema_foreach": "update_graph"},
}  # fmt: skip
