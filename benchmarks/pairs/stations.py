"""Programs of stations: sensors, video depth, proteins, inpainting, slides, words and persons."""

import itertools
import math

import numpy as np
import torch
import torch.nn.functional as F
from setting import TINY, bf16, compiled, device, endless, graphed, graphed_training, size, use_tf32
from torch import nn
from torch.utils.data import DataLoader, Dataset

# ---- 1. Anomaly detection on sensors ------------------------------------------------------------------------------


class SensorWindows(Dataset):
    """Standardized sliding windows of all machines, machine after machine."""

    def __init__(self, series, width, stride, per_machine):
        self.series, self.width, self.stride, self.per_machine = series, width, stride, per_machine
        self.mean = [s.mean(0) for s in series]
        self.std = [s.std(0) + 1e-6 for s in series]

    def __len__(self):
        return len(self.series) * self.per_machine

    def __getitem__(self, index):
        machine, number = divmod(index, self.per_machine)
        begin = number * self.stride
        window = self.series[machine][begin : begin + self.width]
        return torch.from_numpy((window - self.mean[machine]) / self.std[machine])


class WindowAutoencoder(nn.Module):
    """A transformer that reconstructs a window of sensor values through a narrow code per time."""

    def __init__(self, channels, width, dim, layers):
        super().__init__()
        self.enter = nn.Linear(channels, dim)
        self.position = nn.Parameter(torch.randn(1, width, dim) * 0.02)
        layer = nn.TransformerEncoderLayer(dim, 4, 4 * dim, dropout=0.1, activation="gelu", batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.code = nn.Linear(dim, 8)
        self.decoder = nn.Sequential(nn.Linear(8, dim), nn.GELU(), nn.Linear(dim, channels))

    def forward(self, x):
        return self.decoder(self.code(self.encoder(self.enter(x) + self.position)))


def sensor_anomaly(change):
    """Score the windows of a fleet with a transformer autoencoder; one step is one machine with 2048 windows."""
    machines, width, stride = size(24, 2), size(96, 16), 4
    channels, per_machine, batch = 24, size(2048, 16), size(256, 8)
    if change == "big_batches":
        batch = per_machine
    rng = np.random.default_rng(1)
    length = (per_machine - 1) * stride + width
    time = np.arange(length, dtype=np.float32)[:, None]
    series = []
    for _ in range(machines):
        waves = np.sin(time * rng.uniform(0.01, 0.3, channels) + rng.uniform(0, 6, channels))
        values = waves * rng.uniform(1, 50, channels) + rng.standard_normal((length, channels)) * 2
        series.append(values.astype(np.float32))
    calibration = rng.gamma(3.0, 0.4, size(400_000, 1000)).astype(np.float32)  # scores of healthy machines
    dataset = SensorWindows(series, width, stride, per_machine)
    if change == "workers_pinned":
        loader = DataLoader(
            dataset,
            batch,
            num_workers=2,
            pin_memory=device.type == "cuda",
            prefetch_factor=8,
            persistent_workers=True,
            multiprocessing_context="fork",
        )
    else:
        loader = DataLoader(dataset, batch)
    batches = endless(loader)
    waiting = [next(batches)]  # The workers fork here, before CUDA starts.
    torch.manual_seed(1)
    model = WindowAutoencoder(channels, width, size(128, 16), size(3, 1)).to(device).eval()
    state = {"machine": 0, "threshold": None}

    def threshold():
        """The healthy scores' upper quantile."""
        if change != "cached_threshold":
            return np.quantile(calibration, 0.999)
        if state["threshold"] is None:
            state["threshold"] = np.quantile(calibration, 0.999)
        return state["threshold"]

    def windows(machine):
        """Yield one machine's windows in batches on the device."""
        if change == "windows_on_gpu":
            whole = torch.from_numpy(series[machine]).to(device)
            mean, std = (torch.from_numpy(a[machine]).to(device) for a in (dataset.mean, dataset.std))
            yield from ((whole - mean) / std).unfold(0, width, stride).transpose(1, 2).split(batch)
            return
        for _ in range(per_machine // batch):
            yield (waiting.pop() if waiting else next(batches)).to(device, non_blocking=True)

    @torch.no_grad()
    def step():
        machine = state["machine"]
        state["machine"] = (machine + 1) % machines
        scores = []
        for x in windows(machine):
            with bf16(change == "bf16_autocast"):
                reconstructed = model(x)
            error = (reconstructed.float() - x).square().mean(1).amax(1)  # the worst channel's error
            scores.append(error.cpu().numpy())
        scores = np.concatenate(scores)
        smooth = np.convolve(scores, np.ones(5, dtype=np.float32) / 5, mode="same")
        alarms = smooth > threshold()
        state["report"] = (machine, int(alarms.sum()), int(smooth.argmax()) * stride)
        return torch.from_numpy(smooth)

    return step


# ---- 2. Depth of a video with test-time augmentation ---------------------------------------------------------------


class BasicBlock(nn.Module):
    def __init__(self, inside, outside, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(inside, outside, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outside)
        self.conv2 = nn.Conv2d(outside, outside, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outside)
        self.shortcut = nn.Identity()
        if stride != 1 or inside != outside:
            self.shortcut = nn.Sequential(nn.Conv2d(inside, outside, 1, stride, bias=False), nn.BatchNorm2d(outside))

    def forward(self, x):
        out = F.relu(self.bn1(self.conv1(x)), inplace=True)
        return F.relu(self.bn2(self.conv2(out)) + self.shortcut(x), inplace=True)


class DepthNet(nn.Module):
    """ResNet-34 encoder and a U-shaped decoder that returns one positive inverse depth per pixel."""

    def __init__(self, width, blocks):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU(True))
        channels = [width, 2 * width, 4 * width, 8 * width]
        stages, inside = [], width
        for _number, (outside, count) in enumerate(zip(channels, blocks, strict=False)):
            layers = [BasicBlock(inside if i == 0 else outside, outside, 2 if i == 0 else 1) for i in range(count)]
            stages.append(nn.Sequential(*layers))
            inside = outside
        self.stages = nn.ModuleList(stages)
        steps = [(8 * width, 4 * width), (4 * width, 2 * width), (2 * width, width), (width, width)]
        skips = [4 * width, 2 * width, width, width]
        self.ups = nn.ModuleList(
            nn.Sequential(nn.Conv2d(a + s, b, 3, 1, 1), nn.ELU(), nn.Conv2d(b, b, 3, 1, 1), nn.ELU())
            for (a, b), s in zip(steps, skips, strict=False)
        )
        self.head = nn.Conv2d(width, 1, 3, 1, 1)

    def forward(self, x):
        features = [self.stem(x)]
        for stage in self.stages:
            features.append(stage(features[-1]))
        out = features.pop()
        for up in self.ups:
            skip = features.pop()
            out = F.interpolate(out, size=skip.shape[-2:], mode="bilinear", align_corners=False)
            out = up(torch.cat([out, skip], 1))
        return F.softplus(F.interpolate(self.head(out), scale_factor=2, mode="bilinear", align_corners=False))


def video_depth_tta(change):
    """Depth of a 480 x 640 video, averaged over two scales with flips, as a colored video; one step is one frame."""
    height, width, count = size(480, 64), size(640, 96), size(24, 4)
    rng = np.random.default_rng(2)
    coarse = torch.from_numpy(rng.random((count, 3, 15, 20), dtype=np.float32))
    smooth = F.interpolate(coarse, size=(height, width), mode="bicubic").clamp(0, 1)
    video = (smooth.permute(0, 2, 3, 1) * 255).to(torch.uint8).numpy().copy()
    colors = (rng.random((256, 3)) * 255).astype(np.uint8)
    result = np.zeros_like(video)
    mean = np.array([0.485, 0.456, 0.406], dtype=np.float32)
    std = np.array([0.229, 0.224, 0.225], dtype=np.float32)
    torch.manual_seed(2)
    model = DepthNet(size(64, 4), (1, 1, 1, 1) if TINY else (3, 4, 6, 3)).to(device).eval()
    if change == "compile_model":
        model = compiled(model, dynamic=False)
    mean_gpu, std_gpu = (torch.from_numpy(a).view(1, 3, 1, 1).to(device) for a in (mean, std))
    colors_gpu = torch.from_numpy(colors).to(device)
    sizes = [(max(32, round(height * s / 32) * 32), max(32, round(width * s / 32) * 32)) for s in (1.0, 0.8)]
    state = {"frame": 0, "range": None}

    def prepare(frame):
        """Return a frame as a normalized image on the device."""
        if change == "gpu_preprocess":
            image = torch.from_numpy(frame).to(device).permute(2, 0, 1)[None].float() / 255
            return ((image - mean_gpu) / std_gpu).contiguous()
        image = (frame.astype(np.float32) / 255 - mean) / std
        return torch.from_numpy(np.ascontiguousarray(image.transpose(2, 0, 1))[None]).to(device)

    def predict(image):
        """Return the mean of the depths at all scales, plain and flipped."""
        total = []
        for shape in sizes:
            scaled = F.interpolate(image, size=shape, mode="bilinear", align_corners=False)
            if change == "batch_flips":
                both = model(torch.cat([scaled, scaled.flip(-1)]))
                depths = [both[:1], both[1:].flip(-1)]
            else:
                depths = [model(scaled), model(scaled.flip(-1)).flip(-1)]
            for depth in depths:
                total.append(F.interpolate(depth.float(), size=(height, width), mode="bilinear"))
        return torch.stack(total).mean(0)[0, 0]

    def smooth_range(low, high):
        """Keep the range of the colors from flickering."""
        if state["range"] is None:
            state["range"] = (low, high)
        before = state["range"]
        state["range"] = (0.9 * before[0] + 0.1 * low, 0.9 * before[1] + 0.1 * high)
        return state["range"]

    quantiles = torch.tensor([0.02, 0.98], device=device)

    @torch.no_grad()
    def step():
        number = state["frame"] % count
        state["frame"] += 1
        with bf16(change == "bf16_autocast"):
            depth = predict(prepare(video[number]))
        if change == "gpu_postprocess":
            low, high = smooth_range(*torch.quantile(depth.flatten(), quantiles).unbind())
            shown = ((depth - low) / (high - low + 1e-6)).clamp(0, 1)
            result[number] = colors_gpu[(shown * 255).int()].cpu().numpy()
            return shown
        depth = depth.cpu().numpy()
        low, high = smooth_range(*np.percentile(depth, (2, 98)))
        shown = np.clip((depth - low) / (high - low + 1e-6), 0, 1)
        result[number] = colors[(shown * 255).astype(np.uint8)]
        return torch.from_numpy(shown)

    return step


# ---- 3. Embeddings of proteins ------------------------------------------------------------------------------------


def rotate(x, cos, sin):
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat([-b, a], -1) * sin


class ProteinLayer(nn.Module):
    """Pre-norm transformer layer with rotary positions, as in ESM-2."""

    def __init__(self, dim, heads, fast):
        super().__init__()
        self.heads, self.fast = heads, fast
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.q, self.k, self.v, self.out = (nn.Linear(dim, dim) for _ in range(4))
        self.fc1, self.fc2 = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x, padding, cos, sin):
        b, n, d = x.shape
        h = self.norm1(x)
        q, k, v = (f(h).view(b, n, self.heads, -1).transpose(1, 2) for f in (self.q, self.k, self.v))
        q, k = rotate(q, cos, sin).type_as(v), rotate(k, cos, sin).type_as(v)
        if self.fast:
            o = F.scaled_dot_product_attention(q, k, v, attn_mask=~padding[:, None, None, :])
        else:
            scores = torch.matmul(q * (d // self.heads) ** -0.5, k.transpose(-1, -2))
            scores = scores.masked_fill(padding[:, None, None, :], float("-inf"))
            o = torch.matmul(scores.softmax(-1), v)
        x = x + self.out(o.transpose(1, 2).reshape(b, n, d))
        return x + self.fc2(F.gelu(self.fc1(self.norm2(x))))


class ProteinModel(nn.Module):
    def __init__(self, dim, heads, layers, fast):
        super().__init__()
        self.embed = nn.Embedding(24, dim, padding_idx=0)
        self.layers = nn.ModuleList(ProteinLayer(dim, heads, fast) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)
        half = dim // heads // 2
        self.register_buffer("frequency", 10000 ** (-torch.arange(half) / half))

    def forward(self, tokens):
        padding = tokens == 0
        angle = torch.arange(tokens.shape[1], device=tokens.device)[:, None] * self.frequency
        angle = torch.cat([angle, angle], -1)
        x, cos, sin = self.embed(tokens), angle.cos(), angle.sin()
        for layer in self.layers:
            x = layer(x, padding, cos, sin)
        return self.norm(x)


def protein_embeddings(change):
    """Mean-pooled embeddings of proteins with an ESM-2-8M-like model; one step is a chunk of 64 as 4 batches."""
    chunk, batch, dim, chunks = size(64, 8), size(16, 2), size(320, 32), size(6, 3)
    rng = np.random.default_rng(3)
    letters = "ACDEFGHIKLMNPQRSTVWY"
    vocabulary = {letter: number + 3 for number, letter in enumerate(letters)}  # 0 padding, 1 begin, 2 end
    lengths = np.clip(rng.lognormal(math.log(size(220, 20)), 0.6, chunk * chunks), 10, size(1000, 60)).astype(int)
    sequences = ["".join(letters[i] for i in rng.integers(0, 20, n)) for n in lengths]
    torch.manual_seed(3)
    model = ProteinModel(dim, size(20, 4), size(6, 2), change == "sdpa").to(device).eval()
    if change == "tf32":
        use_tf32()
    store = np.zeros((len(sequences), dim), dtype=np.float32)
    state = {"chunk": 0}

    def convert(group):
        """Return a batch of sequences as tokens, padded to the longest."""
        rows = [[1] + [vocabulary[letter] for letter in sequence] + [2] for sequence in group]
        tokens = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.long)
        for i, row in enumerate(rows):
            tokens[i, : len(row)] = torch.tensor(row)
        return tokens

    @torch.no_grad()
    def step():
        begin = (state["chunk"] % chunks) * chunk
        state["chunk"] += 1
        order = list(range(begin, begin + chunk))
        if change == "sort_by_length":
            order.sort(key=lambda i: len(sequences[i]))
        for first in range(0, chunk, batch):
            which = order[first : first + batch]
            tokens = convert([sequences[i] for i in which]).to(device)
            with bf16(change == "bf16_autocast"):
                hidden = model(tokens)
            hidden = hidden.float()
            if change == "pool_on_gpu":
                real = (tokens > 2).unsqueeze(-1)
                store[which] = ((hidden * real).sum(1) / real.sum(1)).cpu().numpy()
                continue
            for row, i in enumerate(which):
                store[i] = hidden[row, 1 : len(sequences[i]) + 1].mean(0).cpu().numpy()
        return torch.from_numpy(store[begin : begin + chunk].copy())

    return step


# ---- 4. Inpainting with a latent diffusion model -------------------------------------------------------------------


class ResBlock(nn.Module):
    def __init__(self, inside, outside, time_dim=None):
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(8, inside), nn.Conv2d(inside, outside, 3, 1, 1)
        self.norm2, self.conv2 = nn.GroupNorm(8, outside), nn.Conv2d(outside, outside, 3, 1, 1)
        self.time = nn.Linear(time_dim, outside) if time_dim else None
        self.shortcut = nn.Conv2d(inside, outside, 1) if inside != outside else nn.Identity()

    def forward(self, x, time=None):
        h = self.conv1(F.silu(self.norm1(x)))
        if self.time is not None:
            h = h + self.time(F.silu(time))[:, :, None, None]
        return self.shortcut(x) + self.conv2(F.silu(self.norm2(h)))


class TextBlock(nn.Module):
    """Self-attention, cross-attention to the text and a feed-forward net on the pixels of a feature map."""

    def __init__(self, dim, text_dim, head=32):
        super().__init__()
        self.heads = max(1, dim // head)
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(3))
        self.qkv, self.out1 = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim)
        self.q, self.out2 = nn.Linear(dim, dim, bias=False), nn.Linear(dim, dim)
        self.k, self.v = nn.Linear(text_dim, dim, bias=False), nn.Linear(text_dim, dim, bias=False)
        self.feed = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def split(self, x):
        return x.view(*x.shape[:2], self.heads, -1).transpose(1, 2)

    def text_keys(self, text):
        return self.split(self.k(text)), self.split(self.v(text))

    def forward(self, x, keys_values):
        b, c, height, width = x.shape
        h = x.flatten(2).transpose(1, 2)
        q, k, v = map(self.split, self.qkv(self.norms[0](h)).chunk(3, -1))
        h = h + self.out1(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, -1, c))
        q = self.split(self.q(self.norms[1](h)))
        h = h + self.out2(F.scaled_dot_product_attention(q, *keys_values).transpose(1, 2).reshape(b, -1, c))
        h = h + self.feed(self.norms[2](h))
        return h.transpose(1, 2).reshape(b, c, height, width)


class TextUNet(nn.Module):
    """A small U-Net on latents: three resolutions, text attention at the lower two."""

    def __init__(self, width, text_dim):
        super().__init__()
        c1, c2, c3, self.time_dim = width, 2 * width, 3 * width, 4 * width
        t = self.time_dim
        self.embed = nn.Sequential(nn.Linear(width, t), nn.SiLU(), nn.Linear(t, t))
        self.enter = nn.Conv2d(4, c1, 3, 1, 1)
        self.down = nn.ModuleList(
            [
                ResBlock(c1, c1, t),
                ResBlock(c1, c1, t),
                ResBlock(c1, c2, t),
                ResBlock(c2, c2, t),
                ResBlock(c2, c3, t),
                ResBlock(c3, c3, t),
            ]
        )
        self.pool1, self.pool2 = nn.Conv2d(c1, c1, 3, 2, 1), nn.Conv2d(c2, c2, 3, 2, 1)
        self.middle = nn.ModuleList([ResBlock(c3, c3, t), ResBlock(c3, c3, t)])
        self.up = nn.ModuleList(
            [
                ResBlock(2 * c3, c3, t),
                ResBlock(c3 + c2, c2, t),
                ResBlock(2 * c2, c2, t),
                ResBlock(c2 + c1, c1, t),
                ResBlock(2 * c1, c1, t),
            ]
        )
        dims = [c2, c2, c3, c3, c3, c3, c2, c2]
        self.texts = nn.ModuleList(TextBlock(d, text_dim) for d in dims)
        self.leave = nn.Sequential(nn.GroupNorm(8, c1), nn.SiLU(), nn.Conv2d(c1, 4, 3, 1, 1))

    def forward(self, x, t, text):
        """`text` is the encoded text, or a list of its keys and values for each text block."""
        kv = text if isinstance(text, list) else [block.text_keys(text) for block in self.texts]
        half = self.time_dim // 8
        angle = t[:, None] * torch.exp(-math.log(10000) * torch.arange(half, device=x.device) / half)
        time = self.embed(torch.cat([angle.cos(), angle.sin()], -1).to(x.dtype))
        d, a = self.down, self.texts
        h1 = d[1](d[0](self.enter(x), time), time)
        h2 = a[0](d[2](self.pool1(h1), time), kv[0])
        h3 = a[1](d[3](h2, time), kv[1])
        h4 = a[2](d[4](self.pool2(h3), time), kv[2])
        h5 = a[3](d[5](h4, time), kv[3])
        h = self.middle[1](a[4](self.middle[0](h5, time), kv[4]), time)
        h = a[5](self.up[0](torch.cat([h, h4], 1), time), kv[5])
        h = F.interpolate(h, scale_factor=2, mode="nearest")
        h = a[6](self.up[1](torch.cat([h, h3], 1), time), kv[6])
        h = a[7](self.up[2](torch.cat([h, h2], 1), time), kv[7])
        h = F.interpolate(h, scale_factor=2, mode="nearest")
        h = self.up[3](torch.cat([h, h1], 1), time)
        return self.leave(self.up[4](torch.cat([h, h1], 1), time))


class LatentDecoder(nn.Module):
    """Decoder like that of a VAE: latents to an image of 8 times the size."""

    def __init__(self, width):
        super().__init__()
        self.enter = nn.Conv2d(4, 4 * width, 3, 1, 1)
        self.blocks = nn.ModuleList(
            [
                ResBlock(4 * width, 4 * width),
                ResBlock(4 * width, 2 * width),
                ResBlock(2 * width, width),
                ResBlock(width, width),
            ]
        )
        self.leave = nn.Sequential(nn.GroupNorm(8, width), nn.SiLU(), nn.Conv2d(width, 3, 3, 1, 1))

    def forward(self, z):
        h = self.blocks[0](self.enter(z))
        for block in self.blocks[1:]:
            h = block(F.interpolate(h, scale_factor=2, mode="nearest"))
        return self.leave(h)


def inpaint_guided(change):
    """Inpainting of 512 x 512 images by DDIM with classifier-free guidance; one step is one request, 15 evaluations."""
    side, text_dim, tokens, steps, scale = size(64, 16), size(768, 16), size(77, 5), size(15, 3), 5.0
    torch.manual_seed(4)
    unet = TextUNet(size(128, 16), text_dim).to(device).eval()
    decoder = LatentDecoder(size(64, 8)).to(device).eval()
    kind = torch.bfloat16 if change == "bf16_weights" else torch.float32
    unet = unet.to(kind)
    network = compiled(unet) if change == "compile_unet" else unet
    rng = np.random.default_rng(4)
    betas = np.linspace(0.00085**0.5, 0.012**0.5, 1000) ** 2
    alphas = np.cumprod(1 - betas)
    times = np.linspace(750, 0, steps).astype(int)  # strength 0.75
    empty_text = torch.from_numpy(rng.standard_normal((1, tokens, text_dim), dtype=np.float32)).to(device)

    def guided(x, t, text, no_text):
        """Return the guided noise estimate."""
        x = x.to(kind)
        if change == "batch_cfg":
            without, with_text = network(torch.cat([x, x]), t.expand(2), torch.cat([no_text, text])).float().chunk(2)
        else:
            with_text = network(x, t, text).float()
            without = network(x, t, no_text).float()
        return without + scale * (with_text - without)

    if change == "graph_guided":
        static_x = torch.zeros(1, 4, side, side, device=device)
        static_t = torch.zeros(1, device=device)
        static_text = torch.zeros_like(empty_text)
        with torch.no_grad():
            replay = graphed(lambda: guided(static_x, static_t, static_text, empty_text))

    def noise_estimate(x, t, text, no_text):
        if change != "graph_guided":
            return guided(x, t, text, no_text)
        static_x.copy_(x)
        static_t.copy_(t)
        return replay()

    def request():
        """An encoded image, a mask with a hole to fill, and an encoded text, as they come from the client."""
        known = rng.standard_normal((1, 4, side, side), dtype=np.float32)
        mask = np.zeros((1, 1, side, side), dtype=np.float32)
        top, left = rng.integers(0, side // 2, 2)
        mask[:, :, top : top + side // 2, left : left + side // 2] = 1
        text = rng.standard_normal((1, tokens, text_dim), dtype=np.float32)
        noise = rng.standard_normal((1, 4, side, side), dtype=np.float32)
        return [torch.from_numpy(a).to(device) for a in (known, mask, text, noise)]

    @torch.no_grad()
    def step():
        known, mask, text, noise = request()
        text, no_text = text.to(kind), empty_text.to(kind)
        if change == "graph_guided":
            static_text.copy_(text)
        if change == "cache_text_kv":
            text, no_text = ([block.text_keys(c) for block in unet.texts] for c in (text, no_text))
        first = float(alphas[times[0]])
        x = first**0.5 * known + (1 - first) ** 0.5 * noise
        for i, time in enumerate(times):
            t = torch.tensor([float(time)], device=device)
            eps = noise_estimate(x, t, text, no_text)
            alpha = float(alphas[time])
            after = float(alphas[times[i + 1]]) if i + 1 < len(times) else 1.0
            clean = ((x - (1 - alpha) ** 0.5 * eps) / alpha**0.5).clamp(-4, 4)
            x = after**0.5 * clean + (1 - after) ** 0.5 * eps
            x = mask * x + (1 - mask) * (after**0.5 * known + (1 - after) ** 0.5 * noise)
        image = (decoder(x) / 2 + 0.5).clamp(0, 1)
        image = (image * 255).round().to(torch.uint8).permute(0, 2, 3, 1).cpu().numpy()
        return torch.from_numpy(image).float()

    return step


# ---- 5. Multiple-instance learning --------------------------------------------------------------------------------


class SlideBags(Dataset):
    """Slides as bags of patch features (float16, as stored by the extractor), of which a random 80 % are used."""

    def __init__(self, bags, labels, kind):
        self.bags, self.labels, self.kind = bags, labels, kind

    def __len__(self):
        return len(self.bags)

    def __getitem__(self, index):
        bag = self.bags[index]
        rng = np.random.default_rng(index)
        keep = np.sort(rng.permutation(len(bag))[: max(1, int(0.8 * len(bag)))])
        if self.kind == "indices":
            return (index, torch.from_numpy(keep)), self.labels[index]
        chosen = bag[keep]
        if self.kind == "float32":
            chosen = chosen.astype(np.float32)
        return torch.from_numpy(chosen), self.labels[index]


def only_item(items):
    """Collate a batch of one bag."""
    features, label = items[0]
    return features, torch.tensor([label])


class GatedAttentionMil(nn.Module):
    """ABMIL: gated attention weighs the instances of a bag; the weighted mean is classified."""

    def __init__(self, inside, dim, attention, classes):
        super().__init__()
        self.project = nn.Sequential(nn.Linear(inside, dim), nn.ReLU())
        self.a, self.b = nn.Linear(dim, attention), nn.Linear(dim, attention)
        self.weight, self.classify = nn.Linear(attention, 1), nn.Linear(dim, classes)

    def instances(self, x):
        h = self.project(x)
        return h, self.weight(torch.tanh(self.a(h)) * torch.sigmoid(self.b(h)))

    def forward(self, x):
        h, score = self.instances(x)
        return self.classify(torch.mm(score.softmax(0).t(), h))

    def forward_packed(self, x, bag_of, bags):
        """Many bags, one after the other in `x`; `bag_of` tells to which bag an instance belongs."""
        h, score = self.instances(x)
        score = score.squeeze(1)
        top = torch.full((bags,), -math.inf, device=x.device).scatter_reduce(0, bag_of, score.detach(), "amax")
        weight = (score - top[bag_of]).exp()
        total = torch.zeros(bags, device=x.device).index_add(0, bag_of, weight)
        pooled = torch.zeros(bags, h.shape[1], device=x.device).index_add(0, bag_of, weight[:, None] * h)
        return self.classify(pooled / total[:, None])


def mil_slides(change):
    """Train attention MIL on bags of 1024-dim patch features; one step is one optimizer step over 8 bags."""
    count, dim, accumulate = size(96, 12), size(1024, 16), size(8, 3)
    rng = np.random.default_rng(5)
    labels = rng.integers(0, 2, count)
    bags = []
    for label in labels:
        n = int(np.clip(rng.lognormal(math.log(size(1200, 12)), 0.6), 4, size(4000, 40)))
        bag = rng.standard_normal((n, dim), dtype=np.float32)
        bag[: n // 10] += 0.3 * label
        bags.append(bag.astype(np.float16))
    kind = {"bags_on_gpu": "indices", "convert_on_gpu": "float16"}.get(change, "float32")
    options = {
        "batch_size": 1,
        "shuffle": True,
        "collate_fn": only_item,
        "drop_last": True,
        "generator": torch.Generator().manual_seed(5),
    }
    if change == "workers_pinned":
        options.update(
            num_workers=2,
            pin_memory=device.type == "cuda",
            persistent_workers=True,
            prefetch_factor=4,
            multiprocessing_context="fork",
        )
    batches = endless(DataLoader(SlideBags(bags, labels, kind), **options))
    waiting = [next(batches)]  # The workers fork here, before CUDA starts.
    torch.manual_seed(5)
    model = GatedAttentionMil(dim, size(512, 16), size(256, 8), 2).to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-4, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10_000)
    on_gpu = [torch.from_numpy(bag).to(device) for bag in bags] if change == "bags_on_gpu" else None
    log = []

    def load():
        """Return the next bag on the device, and its label."""
        features, label = waiting.pop() if waiting else next(batches)
        if change == "bags_on_gpu":
            index, keep = features
            features = on_gpu[index][keep.to(device)]
        return features.to(device, non_blocking=True).float(), label.to(device, non_blocking=True)

    def step_packed():
        """All bags of the step in one forward and backward pass."""
        features, targets = zip(*[load() for _ in range(accumulate)], strict=False)
        lengths = torch.tensor([len(f) for f in features])
        bag_of = torch.repeat_interleave(torch.arange(accumulate), lengths).to(device)
        logits = model.forward_packed(torch.cat(features), bag_of, accumulate)
        target = torch.cat(targets)
        loss = F.cross_entropy(logits, target)
        loss.backward()
        return loss.item(), (logits.argmax(1) == target).sum().item()

    def step():
        optimizer.zero_grad()
        total, right = 0.0, 0
        if change == "packed_bags":
            total, right = step_packed()
        else:
            for _ in range(accumulate):
                features, target = load()
                logits = model(features)
                loss = F.cross_entropy(logits, target) / accumulate
                loss.backward()
                if change == "log_on_gpu":
                    total = total + loss.detach()
                    right = right + (logits.argmax(1) == target).sum()
                else:
                    total += loss.item()
                    right += (logits.argmax(1) == target).sum().item()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        scheduler.step()
        if change == "log_on_gpu":
            total, right = torch.stack([total, right.float()]).tolist()
        log.append((total, right / accumulate))
        return torch.tensor(total)

    return step


# ---- 6. LSTM language model ---------------------------------------------------------------------------------------


class WordLstm(nn.Module):
    """Three LSTM layers as in AWD-LSTM, with locked dropout between them and the embedding tied to the output."""

    def __init__(self, words, embed, hidden):
        super().__init__()
        self.embedding = nn.Embedding(words, embed)
        nn.init.uniform_(self.embedding.weight, -0.1, 0.1)
        sizes = [embed, hidden, hidden, embed]
        self.layers = nn.ModuleList(nn.LSTM(a, b) for a, b in itertools.pairwise(sizes))
        self.bias = nn.Parameter(torch.zeros(words))

    def locked_dropout(self, x, p):
        """Drop the same units at all times."""
        keep = torch.rand(1, *x.shape[1:], device=x.device) > p
        return x * (keep / (1 - p))

    def forward(self, words, hidden):
        x = self.locked_dropout(self.embedding(words), 0.4)
        after = []
        for number, (layer, state) in enumerate(zip(self.layers, hidden, strict=False)):
            x, new = layer(x, state)
            after.append(new)
            x = self.locked_dropout(x, 0.25 if number < 2 else 0.4)
        return F.linear(x.flatten(0, 1), self.embedding.weight, self.bias), after

    def start(self, batch):
        return [
            tuple(torch.zeros(1, batch, layer.hidden_size, device=device) for _ in range(2)) for layer in self.layers
        ]


def lstm_words(change):
    """Train a word-level LSTM (WikiText-2 sizes) with truncated backpropagation; one step is 70 x 40 words."""
    words, batch, bptt = size(33278, 200), size(40, 4), size(70, 6)
    rng = np.random.default_rng(6)
    text = torch.from_numpy((words * rng.random(size(2_000_000, 2000)) ** 4).astype(np.int64))  # some words are common
    stream = text[: len(text) // batch * batch].view(batch, -1).t().contiguous()  # time x batch
    torch.manual_seed(6)
    model = WordLstm(words, size(400, 16), size(1150, 24)).to(device).train()
    graph = change == "graph_training"
    optimizer = torch.optim.Adam(
        model.parameters(),
        lr=1e-3,
        betas=(0.9, 0.99),
        weight_decay=1.2e-6,
        fused=True if change == "fused_adam" else None,
        capturable=graph and device.type == "cuda",
    )
    if change == "tf32":
        use_tf32()
    smoothing = 0.05

    def smooth_loss(logits, target):
        if change == "builtin_loss":
            return F.cross_entropy(logits, target, label_smoothing=smoothing)
        logp = F.log_softmax(logits, -1)
        nll = -logp.gather(1, target[:, None]).squeeze(1)
        return ((1 - smoothing) * nll - smoothing * logp.mean(-1)).mean()

    hidden = model.start(batch)
    state = {"place": 0, "hidden": hidden}
    log = []

    def train(source, target, before):
        optimizer.zero_grad(set_to_none=True)
        before = [(h.detach(), c.detach()) for h, c in before]
        with bf16(change == "bf16_autocast"):
            logits, after = model(source, before)
        loss = smooth_loss(logits.float(), target.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        optimizer.step()
        return loss.detach(), after

    if graph:
        static_source = torch.zeros(bptt, batch, dtype=torch.long, device=device)
        static_target = torch.zeros(bptt, batch, dtype=torch.long, device=device)

        def train_static():
            """As train(), with the words and the hidden state in memory that stays where it is."""
            loss, after = train(static_source, static_target, hidden)
            with torch.no_grad():
                for old, new in zip(hidden, after, strict=False):
                    old[0].copy_(new[0])
                    old[1].copy_(new[1])
            return loss

        replay = graphed_training(train_static, [model], [optimizer])
        for h, c in hidden:
            h.zero_()
            c.zero_()
    torch.manual_seed(60)  # After the graph's warm-up, so that the dropout begins alike.

    def step():
        if state["place"] + bptt + 1 > len(stream):
            state["place"] = 0
        place = state["place"]
        state["place"] += bptt
        source = stream[place : place + bptt].to(device)
        target = stream[place + 1 : place + 1 + bptt].to(device)
        if graph:
            static_source.copy_(source)
            static_target.copy_(target)
            loss = replay()
        else:
            loss, state["hidden"] = train(source, target, state["hidden"])
        log.append(loss.item())
        return loss.clone()

    return step


# ---- 7. Person re-identification ----------------------------------------------------------------------------------


class Bottleneck(nn.Module):
    def __init__(self, inside, middle, stride):
        super().__init__()
        outside = 4 * middle
        self.conv1, self.bn1 = nn.Conv2d(inside, middle, 1, bias=False), nn.BatchNorm2d(middle)
        self.conv2, self.bn2 = nn.Conv2d(middle, middle, 3, stride, 1, bias=False), nn.BatchNorm2d(middle)
        self.conv3, self.bn3 = nn.Conv2d(middle, outside, 1, bias=False), nn.BatchNorm2d(outside)
        self.shortcut = nn.Identity()
        if stride != 1 or inside != outside:
            self.shortcut = nn.Sequential(nn.Conv2d(inside, outside, 1, stride, bias=False), nn.BatchNorm2d(outside))

    def forward(self, x):
        h = F.relu(self.bn1(self.conv1(x)), inplace=True)
        h = F.relu(self.bn2(self.conv2(h)), inplace=True)
        return F.relu(self.bn3(self.conv3(h)) + self.shortcut(x), inplace=True)


class ReidNet(nn.Module):
    """ResNet-50 with last stride 1 and BNNeck: features for the triplet loss, logits for the identity loss."""

    def __init__(self, width, blocks, people):
        super().__init__()
        layers = [nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU(True), nn.MaxPool2d(3, 2, 1)]
        inside = width
        for number, count in enumerate(blocks):
            for i in range(count):
                layers.append(Bottleneck(inside, width * 2**number, 2 if i == 0 and number in (1, 2) else 1))
                inside = 4 * width * 2**number
        self.body = nn.Sequential(*layers)
        self.neck = nn.BatchNorm1d(inside)
        self.classify = nn.Linear(inside, people, bias=False)
        self.dim = inside

    def forward(self, x):
        features = self.body(x).mean((2, 3))
        normed = self.neck(features)
        return (features, self.classify(normed)) if self.training else F.normalize(normed.float(), dim=1)


class PeopleImages(Dataset):
    """Images with the usual augmentation: flip, pad and crop, random erasing. An item's key is (index, seed)."""

    def __init__(self, images, people):
        self.images, self.people = images, people

    def __getitem__(self, key):
        index, seed = key
        rng = np.random.default_rng(seed)
        image = self.images[index]
        height, width = image.shape[:2]
        if rng.random() < 0.5:
            image = image[:, ::-1]
        pad = np.pad(image, ((8, 8), (8, 8), (0, 0)))
        top, left = rng.integers(0, 17, 2)
        image = pad[top : top + height, left : left + width].astype(np.float32) / 127.5 - 1
        if rng.random() < 0.5:
            h, w = int(height * rng.uniform(0.1, 0.5)), int(width * rng.uniform(0.1, 0.5))
            y, x = rng.integers(0, height - h), rng.integers(0, width - w)
            image[y : y + h, x : x + w] = 0
        return torch.from_numpy(np.ascontiguousarray(image.transpose(2, 0, 1))), int(self.people[index])


class PeopleSampler:
    """Batches of P people with K images each, with a seed for each image's augmentation."""

    def __init__(self, people, p, k, batches):
        self.people, self.p, self.k, self.batches = people, p, k, batches
        self.places = [np.flatnonzero(people == person) for person in range(people.max() + 1)]

    def __len__(self):
        return self.batches

    def __iter__(self):
        rng = np.random.default_rng(70)
        for _ in range(self.batches):
            chosen = rng.choice(len(self.places), self.p, replace=False)
            indices = np.concatenate([rng.choice(self.places[c], self.k, replace=False) for c in chosen])
            yield [(int(i), int(rng.integers(1 << 30))) for i in indices]


def batch_hard(features, people, vectorized, margin=0.3):
    """Triplet loss with the farthest positive and the nearest negative of each image in the batch."""
    n = len(features)
    square = features.pow(2).sum(1, keepdim=True)
    distance = (square + square.t() - 2 * features @ features.t()).clamp(min=1e-12).sqrt()
    same = people[:, None] == people[None, :]
    if vectorized:
        far = distance.masked_fill(~same, -math.inf).amax(1)
        near = distance.masked_fill(same, math.inf).amin(1)
    else:
        far, near = [], []
        for i in range(n):
            far.append(distance[i][same[i]].max().unsqueeze(0))
            near.append(distance[i][same[i] == 0].min().unsqueeze(0))
        far, near = torch.cat(far), torch.cat(near)
    return F.margin_ranking_loss(near, far, torch.ones_like(near), margin=margin)


def rank_numpy(distance, people, cameras, gallery_people, gallery_cameras):
    """Return mAP and rank-1 as in Market-1501: the same camera's images of the same person do not count."""
    order = np.argsort(distance, axis=1)
    precisions, first = [], []
    for i in range(len(distance)):
        ranked = order[i]
        junk = (gallery_people[ranked] == people[i]) & (gallery_cameras[ranked] == cameras[i])
        hits = (gallery_people[ranked] == people[i])[~junk]
        if not hits.any():
            continue
        precision = hits.cumsum() / (np.arange(len(hits)) + 1.0)
        precisions.append((precision * hits).sum() / hits.sum())
        first.append(hits[0])
    return float(np.mean(precisions)), float(np.mean(first))


def rank_torch(distance, people, cameras, gallery_people, gallery_cameras):
    """As rank_numpy, for all queries at once on the device."""
    order = distance.argsort(1)
    match = gallery_people[order] == people[:, None]
    keep = ~(match & (gallery_cameras[order] == cameras[:, None]))
    hits, rank = match & keep, keep.cumsum(1)
    valid = hits.any(1).float()
    precision = torch.where(hits, hits.cumsum(1) / rank.clamp(min=1), 0.0).sum(1) / hits.sum(1).clamp(min=1)
    first = (hits & (rank == 1)).any(1).float()
    return torch.stack([(precision * valid).sum() / valid.sum(), (first * valid).sum() / valid.sum()]).tolist()


def reid_batch_hard(change):
    """Train re-identification on 16 x 4 images and rank 32 validation queries in a gallery; one step does both."""
    people, each, p, k = size(120, 6), size(12, 4), size(16, 4), size(4, 2)
    height, width, queries, gallery = size(256, 32), size(128, 16), size(32, 4), size(16000, 60)
    rng = np.random.default_rng(7)
    looks = rng.integers(0, 156, (people, height, width, 3), dtype=np.uint8)
    owner = np.repeat(np.arange(people), each)
    images = looks[owner] + rng.integers(0, 100, (people * each, height, width, 3), dtype=np.uint8)
    loader = DataLoader(
        PeopleImages(images, owner),
        batch_sampler=PeopleSampler(owner, p, k, size(200, 4)),
        num_workers=2,
        pin_memory=device.type == "cuda",
        persistent_workers=True,
        multiprocessing_context="fork",
    )
    batches = endless(loader)
    waiting = [next(batches)]  # The workers fork here, before CUDA starts.
    torch.manual_seed(7)
    model = ReidNet(size(64, 4), (1, 1, 1, 1) if TINY else (3, 4, 6, 3), people).to(device)
    if change == "channels_last":
        model = model.to(memory_format=torch.channels_last)
    optimizer = torch.optim.Adam(
        model.parameters(), lr=3.5e-4, weight_decay=5e-4, fused=True if change == "fused_adam" else None
    )
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: min(1.0, (n + 1) / 2000))
    query_owner = rng.integers(0, people, 8 * queries)
    query_images = looks[query_owner] + rng.integers(0, 100, (8 * queries, height, width, 3), dtype=np.uint8)
    query_cameras = rng.integers(0, 6, 8 * queries)
    # The gallery's features, as the last full validation left them.
    gallery_owner, gallery_cameras = rng.integers(0, people, gallery), rng.integers(0, 6, gallery)
    gallery_features = torch.from_numpy(rng.standard_normal((gallery, model.dim), dtype=np.float32)).to(device)
    gallery_features = F.normalize(gallery_features, dim=1)
    gallery_gpu = [torch.from_numpy(a).to(device) for a in (gallery_owner, gallery_cameras)]
    state, log = {"step": 0}, []

    def arrange(x):
        return x.contiguous(memory_format=torch.channels_last) if change == "channels_last" else x

    def train():
        x, target = waiting.pop() if waiting else next(batches)
        x, target = arrange(x.to(device, non_blocking=True)), target.to(device, non_blocking=True)
        model.train()
        with bf16(change == "bf16_autocast"):
            features, logits = model(x)
        loss = F.cross_entropy(logits.float(), target, label_smoothing=0.1)
        loss = loss + batch_hard(features.float(), target, change == "vectorized_mining")
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        log.append((loss.item(), (logits.argmax(1) == target).float().mean().item()))
        return loss.detach()

    @torch.no_grad()
    def validate(part):
        """Rank some of the queries in the gallery, for the running mAP and rank-1 of the log."""
        which = slice(part * queries, (part + 1) * queries)
        model.eval()
        x = torch.from_numpy(query_images[which]).to(device).permute(0, 3, 1, 2).float() / 127.5 - 1
        with bf16(change == "bf16_autocast"):
            features = model(arrange(x.contiguous()))
        distance = 2 - 2 * features @ gallery_features.t()
        if change == "gpu_ranking":
            owners, cameras = (torch.from_numpy(a[which]).to(device) for a in (query_owner, query_cameras))
            return rank_torch(distance, owners, cameras, *gallery_gpu)
        return rank_numpy(
            distance.cpu().numpy(), query_owner[which], query_cameras[which], gallery_owner, gallery_cameras
        )

    def step():
        loss = train()
        mean_precision, rank1 = validate(state["step"] % 8)
        state["step"] += 1
        return torch.tensor([loss.item(), mean_precision, rank1])

    return step


PROGRAMS = {
    sensor_anomaly: {"windows_on_gpu": "data_loader", "workers_pinned": "data_loader",
                     "bf16_autocast": "half_precision", "cached_threshold": "", "big_batches": "larger_batch"},
    video_depth_tta: {"gpu_postprocess": "python", "gpu_preprocess": "python", "batch_flips": "larger_batch",
                      "bf16_autocast": "half_precision", "compile_model": "fuse_pointwise"},
    protein_embeddings: {"sdpa": "fused_attention", "sort_by_length": "trim_padding", "bf16_autocast": "half_precision",
                         "tf32": "tf32", "pool_on_gpu": "remove_sync"},
    inpaint_guided: {"batch_cfg": "larger_batch", "graph_guided": "cuda_graph", "compile_unet": "fuse_pointwise",
                     "bf16_weights": "half_precision", "cache_text_kv": ""},
    mil_slides: {"bags_on_gpu": "data_loader", "workers_pinned": "data_loader", "convert_on_gpu": "data_loader",
                 "packed_bags": "larger_batch", "log_on_gpu": "remove_sync"},
    lstm_words: {"bf16_autocast": "half_precision", "tf32": "tf32", "builtin_loss": "",
                 "fused_adam": "fused_optimizer", "graph_training": "cuda_graph"},
    reid_batch_hard: {"vectorized_mining": "larger_batch", "bf16_autocast": "half_precision", "gpu_ranking": "python",
                      "channels_last": "channels_last", "fused_adam": "fused_optimizer"},
}  # fmt: skip
