"""What most users run: a GPT, classifiers, segmentation, fine-tuning, speech, sampling, clicks and a physical model."""

import contextlib
import math
import random

import numpy as np
import torch
import torch.nn.functional as F
from setting import compiled, device, endless, graphed, size, use_tf32
from torch import nn
from torch.utils.data import DataLoader, Dataset

# ---------------------------------------------------------------------------------------------------------------------
# 1. A small GPT with a hand-written training loop
# ---------------------------------------------------------------------------------------------------------------------


class CausalSelfAttention(nn.Module):
    def __init__(self, dim, heads, context, sdpa):
        super().__init__()
        self.heads = heads
        self.sdpa = sdpa
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)
        self.register_buffer("mask", torch.tril(torch.ones(context, context)).view(1, 1, context, context))

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = self.qkv(x).split(C, dim=2)
        q = q.view(B, T, self.heads, C // self.heads).transpose(1, 2)
        k = k.view(B, T, self.heads, C // self.heads).transpose(1, 2)
        v = v.view(B, T, self.heads, C // self.heads).transpose(1, 2)
        if self.sdpa:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
            att = att.masked_fill(self.mask[:, :, :T, :T] == 0, float("-inf"))
            att = F.softmax(att, dim=-1)
            y = att @ v
        y = y.transpose(1, 2).contiguous().view(B, T, C)
        return self.proj(y)


class GPTBlock(nn.Module):
    def __init__(self, dim, heads, context, sdpa):
        super().__init__()
        self.ln1 = nn.LayerNorm(dim)
        self.attn = CausalSelfAttention(dim, heads, context, sdpa)
        self.ln2 = nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x):
        x = x + self.attn(self.ln1(x))
        x = x + self.mlp(self.ln2(x))
        return x


class StoryGPT(nn.Module):
    def __init__(self, vocab, dim, heads, layers, context, sdpa=False):
        super().__init__()
        self.tokens = nn.Embedding(vocab, dim)
        self.positions = nn.Embedding(context, dim)
        self.blocks = nn.ModuleList([GPTBlock(dim, heads, context, sdpa) for _ in range(layers)])
        self.ln = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocab, bias=False)
        self.apply(self._init_weights)

    def _init_weights(self, module):
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, mean=0.0, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(self, idx, targets):
        T = idx.shape[1]
        x = self.tokens(idx) + self.positions(torch.arange(T, device=idx.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.ln(x))
        return F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))


def novel_writer(change):
    """Language model training: a GPT of 8 layers with attention by hand, accumulation, clipping and AdamW."""
    torch.manual_seed(1337)
    np.random.seed(1337)
    if change == "tf32":
        use_tf32()
    vocab = size(16000, 64)
    context = size(512, 16)
    batch = size(8, 2)
    accumulation = 2

    corpus = np.random.randint(0, vocab, size=size(2_000_000, 2000)).astype(np.uint16)
    model = StoryGPT(vocab, size(512, 32), size(8, 2), size(8, 2), context, sdpa=change == "sdpa").to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1)
    if change == "compile":
        model = compiled(model)
    model.train()
    history = []

    def get_batch():
        ix = torch.randint(len(corpus) - context, (batch,))
        x = torch.stack([torch.from_numpy(corpus[i : i + context].astype(np.int64)) for i in ix])
        y = torch.stack([torch.from_numpy(corpus[i + 1 : i + 1 + context].astype(np.int64)) for i in ix])
        return x.to(device), y.to(device)

    def step():
        optimizer.zero_grad()
        running = 0.0
        for _ in range(accumulation):
            x, y = get_batch()
            with torch.autocast(device.type, dtype=torch.bfloat16, enabled=change == "bf16"):
                loss = model(x, y)
            loss = loss / accumulation
            loss.backward()
            if change == "no_item":
                running = running + loss.detach()
            else:
                running += loss.item()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        history.append((running, norm if change == "no_item" else norm.item()))
        del history[:-100]
        return torch.as_tensor(running)

    return step


# ---------------------------------------------------------------------------------------------------------------------
# 2. An image classifier with augmentation and mixup on the GPU
# ---------------------------------------------------------------------------------------------------------------------


class BasicBlock(nn.Module):
    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.shortcut = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x):
        out = F.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        return F.relu(out + self.shortcut(x))


class LeafNet(nn.Module):
    def __init__(self, width, classes):
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 7, stride=2, padding=3, bias=False), nn.BatchNorm2d(width), nn.ReLU()
        )
        layers = []
        inputs = width
        for outputs, stride in ((width, 1), (2 * width, 2), (4 * width, 2), (8 * width, 2)):
            layers += [BasicBlock(inputs, outputs, stride), BasicBlock(outputs, outputs, 1)]
            inputs = outputs
        self.layers = nn.Sequential(*layers)
        self.fc = nn.Linear(inputs, classes)

    def forward(self, x):
        x = self.layers(self.stem(x))
        x = F.adaptive_avg_pool2d(x, 1).flatten(1)
        return self.fc(x)


def augment_one_by_one(images, offsets, flips, brightness, contrast, pad):
    """Random crop, flip, brightness and contrast of each image."""
    side = images.shape[-1]
    padded = F.pad(images, (pad, pad, pad, pad), mode="reflect")
    result = []
    for i in range(len(images)):
        top, left = int(offsets[i, 0]), int(offsets[i, 1])
        image = padded[i, :, top : top + side, left : left + side]
        if flips[i]:
            image = torch.flip(image, dims=[2])
        image = image * float(brightness[i])
        mean = image.mean()
        image = (image - mean) * float(contrast[i]) + mean
        result.append(image.clamp(0, 1))
    return torch.stack(result)


def augment_together(images, offsets, flips, brightness, contrast, pad):
    """The same for the whole batch with an index for each row and column."""
    side = images.shape[-1]
    padded = F.pad(images, (pad, pad, pad, pad), mode="reflect")
    offsets, flips = offsets.to(images.device), flips.to(images.device)
    brightness = brightness.to(images.device).view(-1, 1, 1, 1)
    contrast = contrast.to(images.device).view(-1, 1, 1, 1)
    pixels = torch.arange(side, device=images.device)
    rows = offsets[:, 0, None] + pixels
    columns = offsets[:, 1, None] + torch.where(flips[:, None], side - 1 - pixels, pixels)
    sample = torch.arange(len(images), device=images.device).view(-1, 1, 1, 1)
    channel = torch.arange(images.shape[1], device=images.device).view(1, -1, 1, 1)
    image = padded[sample, channel, rows[:, None, :, None], columns[:, None, None, :]]
    image = image * brightness
    mean = image.mean(dim=(1, 2, 3), keepdim=True)
    return ((image - mean) * contrast + mean).clamp(0, 1)


def leaf_sorter(change):
    """Image classification training: a small ResNet, augmentation and mixup on the GPU, accuracy of each class."""
    torch.manual_seed(0)
    np.random.seed(0)
    if change == "benchmark":
        torch.backends.cudnn.benchmark = True
    batch = size(128, 6)
    side = size(128, 16)
    pad = size(8, 2)
    classes = size(50, 5)

    # Batches as a loader gives them: uint8 images and labels in CPU memory.
    batches = [
        (torch.randint(0, 256, (batch, 3, side, side), dtype=torch.uint8), torch.randint(0, classes, (batch,)))
        for _ in range(4)
    ]
    mean = torch.tensor([0.485, 0.456, 0.406], device=device).view(1, 3, 1, 1)
    std = torch.tensor([0.229, 0.224, 0.225], device=device).view(1, 3, 1, 1)
    model = LeafNet(size(64, 8), classes).to(device)
    if change == "channels_last":
        model = model.to(memory_format=torch.channels_last)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
    augment = augment_together if change == "batch_augment" else augment_one_by_one
    correct = np.zeros(classes)
    seen = np.zeros(classes)
    model.train()
    state = {"step": 0, "accuracy": 0.0}

    def step():
        images, labels = batches[state["step"] % len(batches)]
        state["step"] += 1
        images = images.to(device).float() / 255.0
        labels = labels.to(device)
        offsets = torch.randint(0, 2 * pad + 1, (batch, 2))
        flips = torch.rand(batch) < 0.5
        brightness = 0.8 + 0.4 * torch.rand(batch)
        contrast = 0.8 + 0.4 * torch.rand(batch)
        images = augment(images, offsets, flips, brightness, contrast, pad)
        images = (images - mean) / std

        lam = np.random.beta(0.2, 0.2)
        index = torch.randperm(batch).to(device)
        mixed = lam * images + (1 - lam) * images[index]
        if change == "channels_last":
            mixed = mixed.contiguous(memory_format=torch.channels_last)

        optimizer.zero_grad()
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=change == "bf16"):
            outputs = model(mixed)
            loss = lam * criterion(outputs, labels) + (1 - lam) * criterion(outputs, labels[index])
        loss.backward()
        optimizer.step()

        predicted = outputs.argmax(dim=1)
        if change == "bincount":
            counts = torch.stack(
                [
                    torch.bincount(labels, (predicted == labels).float(), minlength=classes),
                    torch.bincount(labels, minlength=classes).float(),
                ]
            )
            right, total = counts.cpu().numpy()
            correct[:] += right
            seen[:] += total
        else:
            for c in range(classes):
                mask = labels == c
                correct[c] += (predicted[mask] == c).sum().item()
                seen[c] += mask.sum().item()
        state["accuracy"] = float(np.mean(correct / np.maximum(seen, 1)))
        return torch.stack([loss.detach(), torch.tensor(state["accuracy"], device=device)])

    return step


# ---------------------------------------------------------------------------------------------------------------------
# 3. Speech recognition of batches of recordings
# ---------------------------------------------------------------------------------------------------------------------

LABELS = ["-", "|", "E", "T", "A", "O", "N", "I", "H", "S", "R", "D", "L", "U", "M", "W"]
LABELS += ["C", "F", "G", "Y", "P", "B", "V", "K", "'", "X", "J", "Q", "Z", "<s>", "</s>", "<unk>"]


class GreedyCTCDecoder(nn.Module):
    """The decoder of the torchaudio tutorial."""

    def __init__(self, labels, blank=0, tolist=False):
        super().__init__()
        self.labels = labels
        self.blank = blank
        self.tolist = tolist

    def forward(self, emission):
        indices = torch.argmax(emission, dim=-1)
        indices = torch.unique_consecutive(indices, dim=-1)
        if self.tolist:
            indices = indices.tolist()
        indices = [i for i in indices if i != self.blank]
        return "".join([self.labels[i] for i in indices])


def call_transcriber(change):
    """Speech inference: Wav2Vec2-base with CTC, recordings resampled one by one, decoded greedily."""
    from transformers import Wav2Vec2Config, Wav2Vec2ForCTC

    torch.manual_seed(0)
    batch = size(8, 2)
    longest = size(64000, 3200)  # 4 seconds of 16 kHz

    # 16-bit recordings of 48 kHz and of different lengths.
    rng = np.random.default_rng(0)
    calls = [
        [rng.integers(-9000, 9000, int(3 * longest * rng.uniform(0.5, 1.0)), dtype=np.int16) for _ in range(batch)]
        for _ in range(4)
    ]
    config = Wav2Vec2Config(
        vocab_size=len(LABELS),
        hidden_size=size(768, 32),
        num_hidden_layers=size(12, 2),
        num_attention_heads=size(12, 2),
        intermediate_size=size(3072, 64),
        conv_dim=(size(512, 16),) * 7,
        num_conv_pos_embeddings=size(128, 16),
        num_conv_pos_embedding_groups=size(16, 2),
    )
    model = Wav2Vec2ForCTC(config).to(device).eval()
    if change == "half":
        model = model.half()
    decoder = GreedyCTCDecoder(LABELS, tolist=change == "tolist")
    no_gradients = torch.inference_mode if change == "inference_mode" else torch.no_grad

    taps = torch.hann_window(61, periodic=False) * torch.sinc(torch.arange(-30, 31) / 3)
    taps = (taps / taps.sum()).view(1, 1, -1)
    where = device if change == "gpu_prep" else torch.device("cpu")
    taps = taps.to(where)

    def prepare(recordings):
        waves = []
        for recording in recordings:
            wave = torch.from_numpy(recording).to(where).float() / 32768.0
            wave = F.conv1d(wave.view(1, 1, -1), taps, stride=3, padding=30).view(-1)[:longest]  # to 16 kHz
            wave = torch.cat([wave[:1], wave[1:] - 0.97 * wave[:-1]])
            wave = (wave - wave.mean()) / torch.sqrt(wave.var() + 1e-7)
            waves.append(F.pad(wave, (0, longest - len(wave))))
        waves = torch.stack(waves)
        return waves.to(device)

    if change == "graph":
        static = torch.zeros(batch, longest, device=device)

        def forward():
            with torch.no_grad():
                return model(static).logits

        replay = graphed(forward)

        def predict(waves):
            static.copy_(waves)
            return replay()

    else:

        def predict(waves):
            return model(waves).logits

    state = {"step": 0, "texts": []}

    def step():
        recordings = calls[state["step"] % len(calls)]
        state["step"] += 1
        waves = prepare(recordings)
        if change == "half":
            waves = waves.half()
        with no_gradients():
            logits = predict(waves)
            emission = torch.log_softmax(logits.float(), dim=-1).cpu()
        state["texts"] = [decoder(e) for e in emission]
        confidence = emission.max(dim=-1).values.mean(dim=-1).exp()
        lengths = torch.tensor([len(text) / emission.shape[1] for text in state["texts"]])
        return torch.cat([confidence, lengths])

    return step


# ---------------------------------------------------------------------------------------------------------------------
# 4. A click predictor of the DLRM kind
# ---------------------------------------------------------------------------------------------------------------------


class ClickDataset(Dataset):
    def __init__(self, dense, categories, clicks):
        self.dense = dense
        self.categories = categories
        self.clicks = clicks

    def __len__(self):
        return len(self.clicks)

    def __getitem__(self, i):
        dense = torch.tensor(self.dense[i], dtype=torch.float32)
        categories = torch.tensor(self.categories[i], dtype=torch.long)
        click = torch.tensor(self.clicks[i], dtype=torch.float32)
        return dense, categories, click


class ClickModel(nn.Module):
    def __init__(self, rows, dim, dense_features, hidden, one_table=False):
        super().__init__()
        tables = [nn.Embedding(r, dim) for r in rows]
        for table in tables:
            nn.init.normal_(table.weight, std=0.05)
        if one_table:
            weight = torch.cat([table.weight.detach() for table in tables])
            self.table = nn.Embedding.from_pretrained(weight, freeze=False)
            self.register_buffer("starts", torch.tensor(np.cumsum([0, *rows[:-1]])))
        else:
            self.tables = nn.ModuleList(tables)
        self.one_table = one_table
        self.bottom = nn.Sequential(nn.Linear(dense_features, hidden), nn.ReLU(), nn.Linear(hidden, dim), nn.ReLU())
        vectors = len(rows) + 1
        pairs = torch.triu_indices(vectors, vectors, offset=1)
        self.register_buffer("first", pairs[0])
        self.register_buffer("second", pairs[1])
        self.top = nn.Sequential(
            nn.Linear(dim + pairs.shape[1], hidden),
            nn.ReLU(),
            nn.Linear(hidden, hidden),
            nn.ReLU(),
            nn.Linear(hidden, 1),
        )

    def forward(self, dense, categories):
        x = self.bottom(dense)
        if self.one_table:
            embedded = self.table(categories + self.starts)
        else:
            embedded = []
            for i, table in enumerate(self.tables):
                embedded.append(table(categories[:, i]))
            embedded = torch.stack(embedded, dim=1)
        vectors = torch.cat([x.unsqueeze(1), embedded], dim=1)
        products = torch.bmm(vectors, vectors.transpose(1, 2))
        interactions = products[:, self.first, self.second]
        return self.top(torch.cat([x, interactions], dim=1)).squeeze(1)


def click_guesser(change):
    """Recommender training: a DLRM with 26 embedding tables, Adam, a DataLoader over rows of numpy arrays."""
    torch.manual_seed(7)
    batch = size(2048, 16)
    samples = size(400_000, 128)
    fields = size(26, 4)
    dense_features = 13
    rows = [size(100_000, 50) // (1 + i % 3) for i in range(fields)]

    rng = np.random.default_rng(7)
    dense = rng.standard_normal((samples, dense_features)).astype(np.float32)
    categories = np.stack([rng.integers(0, r, samples) for r in rows], axis=1)
    clicks = (rng.random(samples) < 0.25).astype(np.float32)

    if change == "gpu_data":
        # The loader only shuffles numbers of rows; the rows themselves are on the GPU.
        loader = DataLoader(range(samples), batch_size=batch, shuffle=True, drop_last=True)
    else:
        options = {}
        if change == "workers":
            options = {"num_workers": size(4, 2), "persistent_workers": True}
        if change == "pinned":
            options = {"pin_memory": device.type == "cuda"}
        dataset = ClickDataset(dense, categories, clicks)
        loader = DataLoader(dataset, batch_size=batch, shuffle=True, drop_last=True, **options)
    batches = endless(loader)
    next(batches)  # Starts the workers, if any, before CUDA.

    if change == "gpu_data":
        dense, categories, clicks = (torch.from_numpy(a).to(device) for a in (dense, categories, clicks))
    model = ClickModel(rows, size(32, 8), dense_features, size(512, 16), one_table=change == "one_table").to(device)
    if change == "fused":
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
    else:
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    criterion = nn.BCEWithLogitsLoss()
    model.train()
    losses = []

    def step():
        if change == "gpu_data":
            index = next(batches).to(device)
            x, c, y = dense[index], categories[index], clicks[index]
        else:
            x, c, y = next(batches)
            if change == "pinned":
                x = x.to(device, non_blocking=True)
                c = c.to(device, non_blocking=True)
                y = y.to(device, non_blocking=True)
            else:
                x, c, y = x.to(device), c.to(device), y.to(device)
        optimizer.zero_grad()
        output = model(x, c)
        loss = criterion(output, y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        del losses[:-100]
        return loss.detach()

    return step


# ---------------------------------------------------------------- segmentation of satellite images


class DoubleConv(nn.Module):
    """(conv => BN => ReLU) * 2"""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.double_conv = nn.Sequential(
            nn.Conv2d(in_channels, out_channels, kernel_size=3, padding=1),
            nn.BatchNorm2d(out_channels),
            nn.ReLU(inplace=True),
            nn.Conv2d(out_channels, out_channels, kernel_size=3, padding=1),
            nn.BatchNorm2d(out_channels),
            nn.ReLU(inplace=True),
        )

    def forward(self, x):
        return self.double_conv(x)


class UNet(nn.Module):
    def __init__(self, in_channels, num_classes, features):
        super().__init__()
        self.downs = nn.ModuleList()
        self.ups = nn.ModuleList()
        self.pool = nn.MaxPool2d(2)
        for feature in features:
            self.downs.append(DoubleConv(in_channels, feature))
            in_channels = feature
        self.bottleneck = DoubleConv(features[-1], features[-1] * 2)
        for feature in reversed(features):
            self.ups.append(nn.ConvTranspose2d(feature * 2, feature, kernel_size=2, stride=2))
            self.ups.append(DoubleConv(feature * 2, feature))
        self.final_conv = nn.Conv2d(features[0], num_classes, kernel_size=1)

    def forward(self, x):
        skips = []
        for down in self.downs:
            x = down(x)
            skips.append(x)
            x = self.pool(x)
        x = self.bottleneck(x)
        for i in range(0, len(self.ups), 2):
            x = self.ups[i](x)
            x = torch.cat([skips.pop(), x], dim=1)
            x = self.ups[i + 1](x)
        return self.final_conv(x)


def dice_loss(logits, masks, num_classes, smooth=1.0):
    probs = torch.softmax(logits, dim=1)
    loss = 0.0
    for c in range(num_classes):
        pred = probs[:, c]
        target = (masks == c).float()
        intersection = (pred * target).sum()
        loss = loss + 1 - (2 * intersection + smooth) / (pred.sum() + target.sum() + smooth)
    return loss / num_classes


def dice_loss_vectorized(logits, masks, num_classes, smooth=1.0):
    probs = torch.softmax(logits, dim=1)
    target = F.one_hot(masks, num_classes).permute(0, 3, 1, 2).to(probs.dtype)
    intersection = (probs * target).sum(dim=(0, 2, 3))
    total = probs.sum(dim=(0, 2, 3)) + target.sum(dim=(0, 2, 3))
    return (1 - (2 * intersection + smooth) / (total + smooth)).mean()


def parcel_segmentation(change):
    """Training: U-Net on 4-band satellite tiles with cross entropy, dice loss per class and IoU metrics, fp32."""
    num_classes = 7
    batch_size = size(16, 2)
    tile = size(256, 32)
    num_tiles = batch_size * 8
    rng = np.random.default_rng(int(torch.randint(0, 2**31, ())))
    images = rng.integers(0, 10000, (num_tiles, 4, tile, tile), dtype=np.int16)
    masks = rng.integers(0, num_classes, (num_tiles, tile, tile), dtype=np.uint8)
    mean = np.array([1354.0, 1118.0, 1042.0, 2265.0], dtype=np.float32).reshape(1, 4, 1, 1)
    std = np.array([245.0, 333.0, 395.0, 867.0], dtype=np.float32).reshape(1, 4, 1, 1)
    mean_gpu = torch.from_numpy(mean).to(device)
    std_gpu = torch.from_numpy(std).to(device)

    width = size(32, 4)
    model = UNet(4, num_classes, [width, width * 2, width * 4, width * 8]).to(device)
    if change == "channels_last":
        model = model.to(memory_format=torch.channels_last)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    criterion = nn.CrossEntropyLoss()
    dice = dice_loss_vectorized if change == "vector_dice" else dice_loss
    autocast = contextlib.nullcontext()
    if change == "bf16":
        autocast = torch.autocast(device.type, dtype=torch.bfloat16)

    state = {"index": 0, "loss": 0.0, "iou": 0.0}
    if change == "no_item":
        state["loss"] = torch.zeros((), device=device)
        state["iou"] = torch.zeros((), device=device)
    model.train()

    def load_batch():
        start = state["index"] * batch_size % num_tiles
        state["index"] += 1
        x = images[start : start + batch_size]
        y = masks[start : start + batch_size]
        if change == "gpu_normalize":
            x = torch.from_numpy(x).to(device)
            y = torch.from_numpy(y).to(device)
            return (x.float() - mean_gpu) / std_gpu, y.long()
        x = (x.astype(np.float32) - mean) / std
        return torch.from_numpy(x).to(device), torch.from_numpy(y).long().to(device)

    def step():
        x, y = load_batch()
        if change == "channels_last":
            x = x.to(memory_format=torch.channels_last)
        optimizer.zero_grad()
        with autocast:
            logits = model(x)
        logits = logits.float()
        loss = criterion(logits, y) + dice(logits, y, num_classes)
        loss.backward()
        optimizer.step()

        # metrics
        preds = logits.argmax(dim=1)
        ious = []
        for c in range(num_classes):
            intersection = ((preds == c) & (y == c)).sum()
            union = ((preds == c) | (y == c)).sum()
            if change == "no_item":
                ious.append(intersection / (union + 1e-6))
            else:
                ious.append(intersection.item() / (union.item() + 1e-6))
        state["iou"] += sum(ious) / num_classes
        state["loss"] += loss.detach() if change == "no_item" else loss.item()
        return loss.detach()

    step.state = state
    return step


# ---------------------------------------------------------------- fine-tuning of a seq2seq model


def summary_finetuning(change):
    """Training: fine-tuning T5-small for summaries with padding to max_length, a linear schedule and accuracy, fp32."""
    from transformers import T5Config, T5ForConditionalGeneration, get_linear_schedule_with_warmup

    if change == "tf32":
        use_tf32()
    vocab_size = size(32128, 100)
    max_source_length = size(512, 24)
    max_target_length = size(128, 12)
    batch_size = size(16, 2)
    config = T5Config(
        vocab_size=vocab_size,
        d_model=size(512, 32),
        d_kv=size(64, 8),
        d_ff=size(2048, 64),
        num_layers=size(6, 1),
        num_heads=size(8, 4),
        dropout_rate=0.1 * size(1, 0),
        decoder_start_token_id=0,
        use_cache=False,
    )
    model = T5ForConditionalGeneration(config).to(device)
    model.train()
    if change == "compile":
        model = compiled(model)

    # a tokenized dataset: most articles are much shorter than max_length
    rng = random.Random(int(torch.randint(0, 2**31, ())))
    dataset = []
    for _ in range(batch_size * 16):
        source_length = rng.randint(max_source_length // 8, max_source_length * 5 // 8)
        target_length = rng.randint(max_target_length // 8, max_target_length * 5 // 8)
        dataset.append(
            {
                "input_ids": [rng.randrange(2, vocab_size) for _ in range(source_length - 1)] + [1],
                "labels": [rng.randrange(2, vocab_size) for _ in range(target_length - 1)] + [1],
            }
        )

    def collate(examples):
        source_length, target_length = max_source_length, max_target_length
        if change == "dynamic_padding":
            source_length = max(len(example["input_ids"]) for example in examples)
            target_length = max(len(example["labels"]) for example in examples)
        input_ids, attention_mask, labels = [], [], []
        for example in examples:
            missing = source_length - len(example["input_ids"])
            input_ids.append(example["input_ids"] + [0] * missing)
            attention_mask.append([1] * len(example["input_ids"]) + [0] * missing)
            labels.append(example["labels"] + [-100] * (target_length - len(example["labels"])))
        return {
            "input_ids": torch.tensor(input_ids),
            "attention_mask": torch.tensor(attention_mask),
            "labels": torch.tensor(labels),
        }

    if change == "fused":
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.01, fused=True)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.01)
    scheduler = get_linear_schedule_with_warmup(optimizer, num_warmup_steps=100, num_training_steps=10000)
    autocast = contextlib.nullcontext()
    if change == "bf16":
        autocast = torch.autocast(device.type, dtype=torch.bfloat16)
    state = {"index": 0, "loss": 0.0, "correct": 0, "total": 0}

    def step():
        start = state["index"] * batch_size % len(dataset)
        state["index"] += 1
        batch = collate(dataset[start : start + batch_size])
        batch = {key: value.to(device) for key, value in batch.items()}
        with autocast:
            outputs = model(**batch)
        loss = outputs.loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()

        predictions = outputs.logits.argmax(dim=-1)
        mask = batch["labels"] != -100
        state["correct"] += (predictions[mask] == batch["labels"][mask]).sum().item()
        state["total"] += mask.sum().item()
        state["loss"] += loss.item()
        return loss.detach()

    step.state = state
    return step


# ---------------------------------------------------------------- a diffusion sampler


def modulate(x, shift, scale):
    return x * (1 + scale.unsqueeze(1)) + shift.unsqueeze(1)


def timestep_embedding(t, dim, max_period=10000):
    half = dim // 2
    freqs = torch.exp(-math.log(max_period) * torch.arange(half, dtype=torch.float32, device=t.device) / half)
    args = t[:, None].float() * freqs[None]
    return torch.cat([torch.cos(args), torch.sin(args)], dim=-1)


class SelfAttention(nn.Module):
    def __init__(self, dim, num_heads, sdpa):
        super().__init__()
        self.num_heads = num_heads
        self.scale = (dim // num_heads) ** -0.5
        self.sdpa = sdpa
        self.qkv = nn.Linear(dim, dim * 3)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x):
        B, N, C = x.shape
        qkv = self.qkv(x).reshape(B, N, 3, self.num_heads, C // self.num_heads).permute(2, 0, 3, 1, 4)
        q, k, v = qkv[0], qkv[1], qkv[2]
        if self.sdpa:
            x = F.scaled_dot_product_attention(q, k, v)
        else:
            attn = (q @ k.transpose(-2, -1)) * self.scale
            attn = attn.softmax(dim=-1)
            x = attn @ v
        x = x.transpose(1, 2).reshape(B, N, C)
        return self.proj(x)


class DiTBlock(nn.Module):
    def __init__(self, dim, num_heads, sdpa):
        super().__init__()
        self.norm1 = nn.LayerNorm(dim, elementwise_affine=False, eps=1e-6)
        self.attn = SelfAttention(dim, num_heads, sdpa)
        self.norm2 = nn.LayerNorm(dim, elementwise_affine=False, eps=1e-6)
        self.mlp = nn.Sequential(nn.Linear(dim, dim * 4), nn.GELU(approximate="tanh"), nn.Linear(dim * 4, dim))
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(dim, 6 * dim))

    def forward(self, x, c):
        shift1, scale1, gate1, shift2, scale2, gate2 = self.adaLN_modulation(c).chunk(6, dim=1)
        x = x + gate1.unsqueeze(1) * self.attn(modulate(self.norm1(x), shift1, scale1))
        x = x + gate2.unsqueeze(1) * self.mlp(modulate(self.norm2(x), shift2, scale2))
        return x


class DiT(nn.Module):
    def __init__(self, input_size, patch_size, channels, dim, depth, num_heads, num_classes, sdpa):
        super().__init__()
        self.patch_size = patch_size
        self.channels = channels
        self.grid = input_size // patch_size
        self.dim = dim
        self.x_embed = nn.Conv2d(channels, dim, kernel_size=patch_size, stride=patch_size)
        self.pos_embed = nn.Parameter(torch.randn(1, self.grid**2, dim) * 0.02)
        self.t_embed = nn.Sequential(nn.Linear(256, dim), nn.SiLU(), nn.Linear(dim, dim))
        self.y_embed = nn.Embedding(num_classes + 1, dim)
        self.blocks = nn.ModuleList([DiTBlock(dim, num_heads, sdpa) for _ in range(depth)])
        self.norm = nn.LayerNorm(dim, elementwise_affine=False, eps=1e-6)
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(dim, 2 * dim))
        self.final = nn.Linear(dim, patch_size * patch_size * channels)

    def forward(self, x, t, y):
        x = self.x_embed(x).flatten(2).transpose(1, 2) + self.pos_embed
        c = self.t_embed(timestep_embedding(t, 256)) + self.y_embed(y)
        for block in self.blocks:
            x = block(x, c)
        shift, scale = self.adaLN_modulation(c).chunk(2, dim=1)
        x = self.final(modulate(self.norm(x), shift, scale))
        p, g = self.patch_size, self.grid
        x = x.reshape(x.shape[0], g, g, p, p, self.channels)
        x = torch.einsum("nhwpqc->nchpwq", x)
        return x.reshape(x.shape[0], self.channels, g * p, g * p)


def latent_sampler(change):
    """Inference: class-conditional DDIM sampling of a DiT-S/2 with classifier-free guidance, 4 images, fp32."""
    if change == "tf32":
        use_tf32()
    num_images = size(4, 2)
    latent_size = size(32, 8)
    num_classes = size(1000, 10)
    num_steps = size(10, 3)
    guidance_scale = 4.0
    model = DiT(
        input_size=latent_size,
        patch_size=2,
        channels=4,
        dim=size(384, 32),
        depth=size(12, 2),
        num_heads=size(6, 2),
        num_classes=num_classes,
        sdpa=change == "sdpa",
    ).to(device)
    model.eval()

    betas = torch.linspace(1e-4, 0.02, 1000, device=device)
    alphas_cumprod = torch.cumprod(1 - betas, dim=0)
    timesteps = list(range(999, -1, -(1000 // num_steps)))[:num_steps]
    labels = torch.randint(0, num_classes, (num_images,), device=device)
    null_labels = torch.full_like(labels, num_classes)
    no_gradients = torch.inference_mode if change == "inference_mode" else torch.no_grad

    @no_gradients()
    def sample():
        x = torch.randn(num_images, 4, latent_size, latent_size, device=device)
        for i, timestep in enumerate(timesteps):
            t = torch.full((num_images,), timestep, device=device, dtype=torch.long)
            if change == "batched_cfg":
                both = model(torch.cat([x, x]), torch.cat([t, t]), torch.cat([labels, null_labels]))
                cond, uncond = both.chunk(2)
            else:
                cond = model(x, t, labels)
                uncond = model(x, t, null_labels)
            eps = uncond + guidance_scale * (cond - uncond)

            alpha = alphas_cumprod[timestep]
            alpha_prev = alphas_cumprod[timesteps[i + 1]] if i + 1 < len(timesteps) else torch.ones_like(alpha)
            x0 = (x - torch.sqrt(1 - alpha) * eps) / torch.sqrt(alpha)
            x0 = x0.clamp(-1, 1)
            x = torch.sqrt(alpha_prev) * x0 + torch.sqrt(1 - alpha_prev) * eps
        return x

    if change == "graph":
        sample = graphed(sample)
    saved = {}

    def step():
        x = sample()
        images = ((x + 1) * 127.5).clamp(0, 255).to(torch.uint8)
        saved["images"] = images.permute(0, 2, 3, 1).cpu().numpy()
        return x.mean(dim=(1, 2, 3)).detach()

    step.state = saved
    return step


# ---------------------------------------------------------------- a physics-informed network


class PINN(nn.Module):
    def __init__(self, width, depth):
        super().__init__()
        layers = [nn.Linear(3, width), nn.Tanh()]
        for _ in range(depth - 1):
            layers += [nn.Linear(width, width), nn.Tanh()]
        layers.append(nn.Linear(width, 3))
        self.net = nn.Sequential(*layers)

    def forward(self, x, y, t):
        out = self.net(torch.cat([x, y, t], dim=1))
        return out[:, 0:1], out[:, 1:2], out[:, 2:3]


def gradient(output, variable):
    return torch.autograd.grad(output, variable, grad_outputs=torch.ones_like(output), create_graph=True)[0]


def gradients(output, variables):
    return torch.autograd.grad(output, variables, grad_outputs=torch.ones_like(output), create_graph=True)


def cavity_flow(change):
    """Training: physics-informed network for the unsteady Navier-Stokes equations in a lid-driven cavity, fp32."""
    if change == "tf32":
        use_tf32()
    num_points = size(10000, 64)
    num_walls = size(2000, 16)
    viscosity = 0.01
    model = PINN(width=size(128, 16), depth=size(8, 3)).to(device)
    if change == "graph":
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, capturable=device.type == "cuda")
    elif change == "fused":
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
    else:
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    # fixed points on the walls (the lid moves with u = 1) and at the start, where everything rests
    side = torch.arange(num_walls) % 4
    along = torch.rand(num_walls)
    wall_x = torch.where(side == 0, 0.0, torch.where(side == 1, 1.0, along))[:, None].to(device)
    wall_y = torch.where(side == 2, 0.0, torch.where(side == 3, 1.0, along))[:, None].to(device)
    wall_t = torch.rand(num_walls, 1).to(device)
    wall_u = (side == 3).float()[:, None].to(device)
    start_x = torch.rand(num_walls, 1).to(device)
    start_y = torch.rand(num_walls, 1).to(device)
    start_t = torch.zeros(num_walls, 1).to(device)

    def draw():
        """New collocation points, on the CPU in the base."""
        where = device if change == "gpu_points" else "cpu"
        x = torch.rand(num_points, 1, device=where)
        y = torch.rand(num_points, 1, device=where)
        t = torch.rand(num_points, 1, device=where)
        return x, y, t

    def residuals(x, y, t):
        u, v, p = model(x, y, t)
        if change == "joint_grad":
            u_x, u_y, u_t = gradients(u, (x, y, t))
            v_x, v_y, v_t = gradients(v, (x, y, t))
            p_x, p_y = gradients(p, (x, y))
        else:
            u_x, u_y, u_t = gradient(u, x), gradient(u, y), gradient(u, t)
            v_x, v_y, v_t = gradient(v, x), gradient(v, y), gradient(v, t)
            p_x, p_y = gradient(p, x), gradient(p, y)
        u_xx, u_yy = gradient(u_x, x), gradient(u_y, y)
        v_xx, v_yy = gradient(v_x, x), gradient(v_y, y)
        continuity = u_x + v_y
        momentum_x = u_t + u * u_x + v * u_y + p_x - viscosity * (u_xx + u_yy)
        momentum_y = v_t + u * v_x + v * v_y + p_y - viscosity * (v_xx + v_yy)
        return continuity, momentum_x, momentum_y

    def train(x, y, t):
        x, y, t = (part.detach().requires_grad_() for part in (x, y, t))
        optimizer.zero_grad()
        continuity, momentum_x, momentum_y = residuals(x, y, t)
        loss_pde = (continuity**2).mean() + (momentum_x**2).mean() + (momentum_y**2).mean()
        u, v, _ = model(wall_x, wall_y, wall_t)
        loss_walls = ((u - wall_u) ** 2).mean() + (v**2).mean()
        u, v, _ = model(start_x, start_y, start_t)
        loss_start = (u**2).mean() + (v**2).mean()
        loss = loss_pde + 10 * loss_walls + 10 * loss_start
        loss.backward()
        optimizer.step()
        return loss.detach(), loss_pde.detach(), loss_walls.detach(), loss_start.detach()

    state = {"history": []}
    if change == "graph":
        points = [torch.rand(num_points, 1, device=device) for _ in range(3)]
        replay = graphed(lambda: train(*points))

    def step():
        if change == "graph":
            for held, new in zip(points, draw(), strict=True):
                held.copy_(new)
            loss, loss_pde, loss_walls, loss_start = replay()
        else:
            x, y, t = draw()
            loss, loss_pde, loss_walls, loss_start = train(x.to(device), y.to(device), t.to(device))
        state["history"].append((loss_pde.item(), loss_walls.item(), loss_start.item()))
        return loss

    step.state = state
    return step


PROGRAMS = {
    novel_writer: {"tf32": "tf32", "bf16": "half_precision", "sdpa": "fused_attention", "compile": "fuse_pointwise",
                   "no_item": "remove_sync"},
    leaf_sorter: {"channels_last": "channels_last", "bf16": "half_precision", "batch_augment": "larger_batch",
                  "bincount": "remove_sync", "benchmark": ""},
    call_transcriber: {"half": "half_precision", "inference_mode": "no_autograd", "graph": "cuda_graph",
                       "gpu_prep": "cpu_tensors", "tolist": "cpu_tensors"},
    click_guesser: {"workers": "data_loader", "gpu_data": "data_loader", "pinned": "overlap_copies",
                    "fused": "fused_optimizer", "one_table": "larger_batch"},
    parcel_segmentation: {"channels_last": "channels_last", "bf16": "half_precision", "no_item": "remove_sync",
                          "vector_dice": "larger_batch", "gpu_normalize": "python"},
    summary_finetuning: {"tf32": "tf32", "bf16": "half_precision", "fused": "fused_optimizer",
                         "dynamic_padding": "trim_padding", "compile": "fuse_pointwise"},
    latent_sampler: {"graph": "cuda_graph", "batched_cfg": "larger_batch", "sdpa": "fused_attention", "tf32": "tf32",
                     "inference_mode": "no_autograd"},
    cavity_flow: {"graph": "cuda_graph", "joint_grad": "", "fused": "fused_optimizer", "tf32": "tf32",
                  "gpu_points": "cpu_tensors"},
}  # fmt: skip
