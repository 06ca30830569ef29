"""Programs of makers: poses, summaries, games, speech, compression, pages of text, an ODE and links of a graph."""

import itertools
import math

import numpy as np
import torch
import torch.nn.functional as F
from setting import bf16, compiled, device, endless, graphed, graphed_training, size, use_tf32
from torch import nn
from torch.utils.data import DataLoader, Dataset


def started(dataset, batch_size, workers, pin=False, shuffle=True):
    """Return endless batches of a DataLoader whose workers already run (they fork before CUDA starts)."""
    loader = DataLoader(
        dataset,
        batch_size,
        shuffle=shuffle,
        drop_last=batch_size is not None,
        num_workers=workers,
        persistent_workers=workers > 0,
        pin_memory=pin and device.type == "cuda",
        multiprocessing_context="fork" if workers else None,
        generator=torch.Generator().manual_seed(0),
    )
    return itertools.chain(iter(loader), endless(loader))  # iter() starts the workers, which persist


# ---------------------------------------------------------------------------------------------------------------------
# 1. Human pose estimation


class PoseDataset(Dataset):
    """Cropped persons with 17 joints; flips, colour jitter and Gaussian heatmaps are made for each sample."""

    FLIPPED = np.array([0, 2, 1, 4, 3, 6, 5, 8, 7, 10, 9, 12, 11, 14, 13, 16, 15])
    MEAN = np.array([0.485, 0.456, 0.406], np.float32)
    STD = np.array([0.229, 0.224, 0.225], np.float32)

    def __init__(self, height, width, raw_images, raw_joints):
        rng = np.random.default_rng(0)
        self.height, self.width, self.raw_images, self.raw_joints = height, width, raw_images, raw_joints
        self.images = rng.integers(0, 256, (size(512, 8), height, width, 3), dtype=np.uint8)
        self.joints = rng.uniform(0, 1, (len(self.images), 17, 2)).astype(np.float32) * [width - 1, height - 1]
        self.visible = (rng.random((len(self.images), 17)) < 0.8).astype(np.float32)

    def __len__(self):
        return size(100_000, 64)

    def heatmaps(self, joints, visible, sigma=2):
        heat = np.zeros((17, self.height // 4, self.width // 4), np.float32)
        reach = 3 * sigma
        for j in range(17):
            x, y = int(joints[j, 0] / 4 + 0.5), int(joints[j, 1] / 4 + 0.5)
            left, top = max(0, x - reach), max(0, y - reach)
            right, bottom = min(x + reach + 1, heat.shape[2]), min(y + reach + 1, heat.shape[1])
            if visible[j] == 0 or right <= left or bottom <= top:
                continue
            xs, ys = np.arange(left, right), np.arange(top, bottom)[:, None]
            heat[j, top:bottom, left:right] = np.exp(-((xs - x) ** 2 + (ys - y) ** 2) / (2 * sigma**2))
        return heat

    def __getitem__(self, index):
        rng = np.random.default_rng(index)
        which = index % len(self.images)
        image, joints, visible = self.images[which], self.joints[which].copy(), self.visible[which]
        if rng.random() < 0.5:
            image = image[:, ::-1]
            joints[:, 0] = self.width - 1 - joints[:, 0]
            joints, visible = joints[self.FLIPPED], visible[self.FLIPPED]
        brightness, contrast = rng.uniform(0.7, 1.3, 2).astype(np.float32)
        if self.raw_images:
            image = np.ascontiguousarray(image.transpose(2, 0, 1))
        else:
            image = image.astype(np.float32) / 255.0
            image = np.clip(image * brightness, 0, 1)
            mean = image.mean()
            image = np.clip((image - mean) * contrast + mean, 0, 1)
            image = np.ascontiguousarray(((image - self.MEAN) / self.STD).transpose(2, 0, 1))
        target = joints.astype(np.float32) if self.raw_joints else self.heatmaps(joints, visible)
        return image, target, visible, np.array([brightness, contrast], np.float32)


class BasicBlock(nn.Module):
    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.down = None
        if stride > 1 or inputs != outputs:
            self.down = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x):
        y = self.bn2(self.conv2(torch.relu(self.bn1(self.conv1(x)))))
        return torch.relu(y + (x if self.down is None else self.down(x)))


class PoseNet(nn.Module):
    """ResNet-18 and three transposed convolutions ("simple baselines")."""

    def __init__(self):
        super().__init__()
        width, up = size(64, 8), size(256, 16)
        layers = [nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
        inputs = width
        for stage in range(4):
            for block in range(2):
                layers.append(BasicBlock(inputs, width << stage, 2 if stage and not block else 1))
                inputs = width << stage
        for _ in range(3):
            layers += [nn.ConvTranspose2d(inputs, up, 4, 2, 1, bias=False), nn.BatchNorm2d(up), nn.ReLU()]
            inputs = up
        self.layers = nn.Sequential(*layers, nn.Conv2d(up, 17, 1))

    def forward(self, x):
        return self.layers(x)


def pck_numpy(output, target, threshold=0.05):
    """Return the share of the joints whose heatmap maximum lies near the target's."""
    n, joints, h, w = output.shape
    places = []
    for heat in (output, target):
        flat = heat.reshape(n, joints, -1)
        index = flat.argmax(2)
        places.append(np.stack([index % w, index // w], -1).astype(np.float32))
    distance = np.linalg.norm((places[0] - places[1]) / [w, h], axis=-1)
    there = target.reshape(n, joints, -1).max(2) > 0
    return float((distance[there] < threshold).mean())


def pck_torch(output, target, threshold=0.05):
    """As pck_numpy, on the device and without waiting for it."""
    w, h = output.shape[3], output.shape[2]
    highest, wanted = target.flatten(2).max(2)
    found = output.flatten(2).argmax(2)
    distance = torch.hypot((found % w - wanted % w) / w, (found // w - wanted // w) / h)
    there = highest > 0
    return ((distance < threshold) & there).sum() / there.sum()


def pose_training(change):
    """Train a heatmap pose estimator: 64 persons of 256 x 192 a step."""
    height, width = size(256, 64), size(192, 64)
    raw_images, raw_joints = change == "uint8_to_gpu", change == "heatmaps_on_gpu"
    batches = started(PoseDataset(height, width, raw_images, raw_joints), size(64, 4), workers=2, pin=True)
    torch.manual_seed(0)
    model = PoseNet().to(device)
    if change == "channels_last":
        model = model.to(memory_format=torch.channels_last)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [90_000, 120_000])
    mean = torch.tensor(PoseDataset.MEAN, device=device).view(1, 3, 1, 1)
    std = torch.tensor(PoseDataset.STD, device=device).view(1, 3, 1, 1)
    xs = torch.arange(width // 4, device=device, dtype=torch.float32)
    ys = torch.arange(height // 4, device=device, dtype=torch.float32)
    log = {"loss": 0.0, "pck": 0.0}

    def jitter(image, factors):
        brightness, contrast = factors.view(-1, 2, 1, 1, 1).unbind(1)
        image = (image.float() / 255.0 * brightness).clamp(0, 1)
        average = image.mean((1, 2, 3), keepdim=True)
        return (((image - average) * contrast + average).clamp(0, 1) - mean) / std

    def draw(joints, visible, sigma=2):
        centre = (joints / 4 + 0.5).floor()
        dx = xs - centre[..., 0, None]
        dy = ys - centre[..., 1, None]
        row = torch.exp(-(dx**2) / (2 * sigma**2)) * (dx.abs() <= 3 * sigma)
        column = torch.exp(-(dy**2) / (2 * sigma**2)) * (dy.abs() <= 3 * sigma)
        return column[..., :, None] * row[..., None, :] * visible[..., None, None]

    def step():
        image, target, visible, factors = (t.to(device, non_blocking=True) for t in next(batches))
        if raw_images:
            image = jitter(image, factors)
        if raw_joints:
            target = draw(target, visible)
        if change == "channels_last":
            image = image.contiguous(memory_format=torch.channels_last)
        with bf16(change == "autocast_bf16"):
            output = model(image)
        output = output.float()
        loss = 0.0
        for j in range(17):
            weight = visible[:, j, None]
            loss = loss + 0.5 * F.mse_loss(output[:, j].flatten(1) * weight, target[:, j].flatten(1) * weight)
        loss = loss / 17
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        if change == "metric_on_gpu":
            pck = pck_torch(output.detach(), target).item()
        else:
            pck = pck_numpy(output.detach().cpu().numpy(), target.cpu().numpy())
        log["loss"] = 0.9 * log["loss"] + 0.1 * loss.item()
        log["pck"] = 0.9 * log["pck"] + 0.1 * pck
        return loss.detach()

    return step


# ---------------------------------------------------------------------------------------------------------------------
# 2. Summarization with an encoder-decoder


class Attention(nn.Module):
    def __init__(self, width, heads, fused):
        super().__init__()
        self.heads, self.fused = heads, fused
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x, memory, allowed):
        def split(y):
            return y.view(y.shape[0], y.shape[1], self.heads, -1).transpose(1, 2)

        q, k, v = split(self.q(x)), split(self.k(memory)), split(self.v(memory))
        if self.fused:
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed)
        else:
            scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
            scores = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min)
            y = torch.softmax(scores, -1) @ v
        return self.out(y.transpose(1, 2).reshape(x.shape))


class BartLayer(nn.Module):
    def __init__(self, width, heads, fused, cross):
        super().__init__()
        self.attention, self.norm1 = Attention(width, heads, fused), nn.LayerNorm(width)
        self.cross = Attention(width, heads, fused) if cross else None
        self.norm2 = nn.LayerNorm(width) if cross else None
        self.up, self.down, self.norm3 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width), nn.LayerNorm(width)

    def forward(self, x, allowed, memory=None, memory_allowed=None):
        x = self.norm1(x + self.attention(x, x, allowed))
        if self.cross is not None:
            x = self.norm2(x + self.cross(x, memory, memory_allowed))
        return self.norm3(x + self.down(F.gelu(self.up(x))))


class Bart(nn.Module):
    """Encoder-decoder of the size of BART-base. Fine-tuned without dropout, as results are compared."""

    def __init__(self, vocabulary, width, heads, layers, fused):
        super().__init__()
        self.embed, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(1024, width)
        nn.init.normal_(self.embed.weight, std=0.02)
        nn.init.normal_(self.positions.weight, std=0.02)
        self.norm = nn.LayerNorm(width)
        self.encoder = nn.ModuleList(BartLayer(width, heads, fused, False) for _ in range(layers))
        self.decoder = nn.ModuleList(BartLayer(width, heads, fused, True) for _ in range(layers))

    def embedded(self, ids):
        return self.norm(self.embed(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device)))

    def forward(self, source, source_mask, target):
        allowed = source_mask[:, None, None, :]
        memory = self.embedded(source)
        for layer in self.encoder:
            memory = layer(memory, allowed)
        causal = torch.ones(target.shape[1], target.shape[1], dtype=torch.bool, device=target.device).tril()
        x = self.embedded(target)
        for layer in self.decoder:
            x = layer(x, causal[None, None], memory, allowed)
        return x @ self.embed.weight.T


def smoothed_loss(logits, labels, smoothing=0.1):
    """Label smoothing as in fairseq; label -100 is padding."""
    log_probs = F.log_softmax(logits.float(), -1)
    padding = labels.eq(-100).unsqueeze(-1)
    nll = -log_probs.gather(-1, labels.clamp(min=0).unsqueeze(-1)).masked_fill(padding, 0.0)
    smooth = -log_probs.mean(-1, keepdim=True).masked_fill(padding, 0.0)
    count = (~padding).sum()
    return (1 - smoothing) * nll.sum() / count + smoothing * smooth.sum() / count


def summarization_finetuning(change):
    """Fine-tune a BART-base-like model on articles padded to 1024 tokens and summaries padded to 128."""
    torch.set_float32_matmul_precision("highest")
    if change == "use_tf32":
        use_tf32()
    vocabulary, longest, longest_target, batch = size(50265, 200), size(1024, 64), size(128, 16), size(8, 2)
    rng = np.random.default_rng(0)
    articles = [rng.integers(4, vocabulary, rng.integers(longest // 5, longest * 3 // 4)) for _ in range(size(800, 16))]
    summaries = [
        rng.integers(4, vocabulary, rng.integers(longest_target // 3, longest_target * 4 // 5)) for _ in articles
    ]

    def padded(rows, length, value):
        if change == "trim_padding":
            length = min(length, (max(map(len, rows)) + 7) // 8 * 8)
        out = np.full((len(rows), length), value, np.int64)
        for i, row in enumerate(rows):
            out[i, : len(row)] = row
        return torch.from_numpy(out)

    def collate(indices):
        source = padded([articles[i] for i in indices], longest, 1)
        labels = padded([summaries[i] for i in indices], longest_target, -100)
        start = torch.full((len(indices), 1), 2)
        target = torch.cat([start, labels[:, :-1].masked_fill(labels[:, :-1] == -100, 1)], 1)
        return {"source": source, "source_mask": source != 1, "target": target, "labels": labels}

    loader = DataLoader(
        range(len(articles)),
        batch,
        shuffle=True,
        collate_fn=collate,
        drop_last=True,
        generator=torch.Generator().manual_seed(0),
    )
    batches = endless(loader)
    torch.manual_seed(0)
    model = Bart(vocabulary, size(768, 32), size(12, 2), size(6, 2), fused=change == "sdpa").to(device)
    decay = [p for p in model.parameters() if p.ndim > 1]
    other = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": decay, "weight_decay": 0.01}, {"params": other, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=3e-5)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: min((i + 1) / 500, 1.0))
    losses = []

    def step():
        data = {name: value.to(device) for name, value in next(batches).items()}
        with bf16(change == "autocast_bf16"):
            logits = model(data["source"], data["source_mask"], data["target"])
        if change == "fused_loss":
            loss = F.cross_entropy(logits.float().flatten(0, 1), data["labels"].flatten(), label_smoothing=0.1)
        else:
            loss = smoothed_loss(logits, data["labels"])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        return loss.detach()

    return step


# ---------------------------------------------------------------------------------------------------------------------
# 3. AlphaZero-like self-play


class ConnectFour:
    """A position; +1 are the stones of the player to move."""

    def __init__(self, board=None):
        self.board = np.zeros((6, 7), np.int8) if board is None else board

    def legal(self):
        return self.board[0] == 0

    def play(self, column):
        """Return the next position and whether the mover has won."""
        board = self.board.copy()
        row = int((board[:, column] == 0).sum()) - 1
        board[row, column] = 1
        won = False
        for dr, dc in ((0, 1), (1, 0), (1, 1), (1, -1)):
            run = 1
            for sign in (1, -1):
                r, c = row + sign * dr, column + sign * dc
                while 0 <= r < 6 and 0 <= c < 7 and board[r, c] == 1:
                    run, r, c = run + 1, r + sign * dr, c + sign * dc
            won |= run >= 4
        return ConnectFour(-board), won

    def planes(self):
        return np.stack([self.board == 1, self.board == -1, np.ones_like(self.board)]).astype(np.float32)


class Node:
    __slots__ = ("children", "position", "prior", "result", "total", "visits")

    def __init__(self, position, prior, result=None):
        self.position, self.prior, self.result = position, prior, result
        self.visits, self.total, self.children = 0, 0.0, {}

    def expand(self, probs):
        for column in np.flatnonzero(self.position.legal()):
            after, won = self.position.play(column)
            result = -1.0 if won else (0.0 if not after.legal().any() else None)
            self.children[int(column)] = Node(after, float(probs[column]), result)

    def select(self):
        root = math.sqrt(self.visits)
        best, chosen = -1e9, None
        for child in self.children.values():
            q = -child.total / child.visits if child.visits else 0.0
            score = q + 1.5 * child.prior * root / (1 + child.visits)
            if score > best:
                best, chosen = score, child
        return chosen


class PolicyValueNet(nn.Module):
    def __init__(self):
        super().__init__()
        width, blocks = size(128, 8), size(8, 2)
        self.stem = nn.Sequential(nn.Conv2d(3, width, 3, 1, 1), nn.BatchNorm2d(width), nn.ReLU())
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(width, width, 3, 1, 1),
                nn.BatchNorm2d(width),
                nn.ReLU(),
                nn.Conv2d(width, width, 3, 1, 1),
                nn.BatchNorm2d(width),
            )
            for _ in range(blocks)
        )
        self.policy = nn.Sequential(
            nn.Conv2d(width, 2, 1), nn.BatchNorm2d(2), nn.ReLU(), nn.Flatten(), nn.Linear(84, 7)
        )
        self.value = nn.Sequential(
            nn.Conv2d(width, 1, 1),
            nn.BatchNorm2d(1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(42, 64),
            nn.ReLU(),
            nn.Linear(64, 1),
            nn.Tanh(),
        )

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = torch.relu(x + block(x))
        return self.policy(x), self.value(x)


def fold_batchnorm(model):
    """Fold each BatchNorm2d that follows a Conv2d in a Sequential into the convolution (for eval only)."""
    for part in [m for m in model.modules() if isinstance(m, nn.Sequential)]:
        for i in range(len(part) - 1):
            if isinstance(part[i], nn.Conv2d) and isinstance(part[i + 1], nn.BatchNorm2d):
                part[i] = nn.utils.fusion.fuse_conv_bn_eval(part[i], part[i + 1])
                part[i + 1] = nn.Identity()
    return model


def alphazero_selfplay(change):
    """One move of self-play at Connect Four: a tree search with 40 simulations and a network at the leaves.

    Variants round differently, and a search may then choose another leaf: on a GPU the visits can differ a little.
    """
    torch.manual_seed(0)
    net = PolicyValueNet().to(device).eval()
    if change == "fold_batchnorm":
        net = fold_batchnorm(net)
    simulations = size(40, 8)
    count = size(8, 3) if change == "parallel_games" else 1
    rngs = [np.random.default_rng(100 + i) for i in range(count)]
    games = [ConnectFour() for _ in range(count)]
    known = {}  # Positions of this game that the network has judged
    replay = None
    if change == "cuda_graph":
        static = torch.zeros(1, 3, 6, 7, device=device)
        with torch.no_grad():
            replay = graphed(lambda: net(static))

    @torch.no_grad()
    def judge(positions):
        """Return the policies and values of some positions."""
        x = torch.from_numpy(np.stack([p.planes() for p in positions])).to(device)
        if replay is not None:
            static.copy_(x)
            logits, value = replay()
        else:
            logits, value = net(x)
        legal = np.stack([p.legal() for p in positions])
        if change == "one_transfer":
            out = torch.cat([logits, value], 1).cpu().numpy()
            logits = np.where(legal, out[:, :7], -np.inf)
            probs = np.exp(logits - logits.max(1, keepdims=True))
            return probs / probs.sum(1, keepdims=True), out[:, 7].tolist()
        probs = torch.softmax(logits, 1) * torch.from_numpy(legal).float().to(device)
        probs = probs / probs.sum(1, keepdim=True)
        return probs.cpu().numpy(), [v.item() for v in value[:, 0]]

    def judge_cached(positions):
        key = positions[0].board.tobytes()
        if key not in known:
            known[key] = judge(positions)
        return known[key]

    evaluate = judge_cached if change == "cache_evaluations" else judge

    def search(positions):
        roots = [Node(position, 1.0) for position in positions]
        probs, _ = evaluate(positions)
        for i, root in enumerate(roots):
            root.expand(probs[i])
            noise = rngs[i].dirichlet([0.8] * len(root.children))
            for child, extra in zip(root.children.values(), noise, strict=False):
                child.prior = 0.75 * child.prior + 0.25 * float(extra)
            root.visits = 1
        for _ in range(simulations):
            paths = []
            for root in roots:
                path = [root]
                while path[-1].children:
                    path.append(path[-1].select())
                paths.append(path)
            open_paths = [path for path in paths if path[-1].result is None]
            if open_paths:
                probs, values = evaluate([path[-1].position for path in open_paths])
                for path, p in zip(open_paths, probs, strict=False):
                    path[-1].expand(p)
                judged = iter(values)
            for path in paths:
                value = path[-1].result if path[-1].result is not None else next(judged)
                for node in reversed(path):
                    node.visits += 1
                    node.total += value
                    value = -value
        return roots

    def step():
        roots = search(games)
        shares = []
        for i, root in enumerate(roots):
            visits = np.zeros(7)
            for column, child in root.children.items():
                visits[column] = child.visits
            shares.append(visits / visits.sum())
            child = root.children[int(rngs[i].choice(7, p=shares[i]))]
            games[i] = child.position
            if child.result is not None:
                games[i] = ConnectFour()
                known.clear()  # A new game is played with newly trained weights
        return torch.from_numpy(shares[0])

    return step


# ---------------------------------------------------------------------------------------------------------------------
# 4. FastSpeech-like text to speech


class FFTBlock(nn.Module):
    """Self-attention and a convolutional feed-forward network."""

    def __init__(self, width, filters, heads, fused):
        super().__init__()
        self.attention, self.norm1 = Attention(width, heads, fused), nn.LayerNorm(width)
        self.conv1, self.conv2 = nn.Conv1d(width, filters, 9, padding=4), nn.Conv1d(filters, width, 1)
        self.norm2, self.dropout = nn.LayerNorm(width), nn.Dropout(0.1)

    def forward(self, x, padding):
        x = self.norm1(x + self.dropout(self.attention(x, x, ~padding[:, None, None, :])))
        x = x.masked_fill(padding.unsqueeze(-1), 0)
        y = self.conv2(torch.relu(self.conv1(x.transpose(1, 2)))).transpose(1, 2)
        return self.norm2(x + self.dropout(y)).masked_fill(padding.unsqueeze(-1), 0)


class Predictor(nn.Module):
    """Predicts one number per phoneme."""

    def __init__(self, width):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv1d(width, width, 3, padding=1), nn.Conv1d(width, width, 3, padding=1)
        self.norm1, self.norm2, self.out = nn.LayerNorm(width), nn.LayerNorm(width), nn.Linear(width, 1)

    def forward(self, x, padding):
        x = self.norm1(torch.relu(self.conv1(x.transpose(1, 2))).transpose(1, 2))
        x = self.norm2(torch.relu(self.conv2(x.transpose(1, 2))).transpose(1, 2))
        return self.out(x).squeeze(-1).masked_fill(padding, 0)


def regulate_loop(x, durations, frames):
    """Repeat each phoneme's vector as often as its duration says."""
    rows = []
    for vectors, counts in zip(x, durations, strict=False):
        parts = [vector.expand(counts[i].item(), -1) for i, vector in enumerate(vectors)]
        rows.append(torch.cat(parts, 0))
    return nn.utils.rnn.pad_sequence([F.pad(r, (0, 0, 0, frames - len(r))) for r in rows], batch_first=True)


def regulate_gather(x, durations, frames):
    """As regulate_loop, with one gather."""
    ends = durations.cumsum(1)
    frame = torch.arange(frames, device=x.device).expand(len(x), -1).contiguous()
    index = torch.searchsorted(ends, frame, right=True).clamp(max=x.shape[1] - 1)
    out = x.gather(1, index.unsqueeze(-1).expand(-1, -1, x.shape[2]))
    return out * (frame < ends[:, -1:]).unsqueeze(-1)


class FastSpeech(nn.Module):
    def __init__(self, width, filters, layers, fused, regulate):
        super().__init__()
        self.regulate = regulate
        self.embed = nn.Embedding(100, width, padding_idx=0)
        self.encoder = nn.ModuleList(FFTBlock(width, filters, 2, fused) for _ in range(layers))
        self.decoder = nn.ModuleList(FFTBlock(width, filters, 2, fused) for _ in range(layers))
        self.duration, self.pitch, self.energy = Predictor(width), Predictor(width), Predictor(width)
        self.pitch_embed, self.energy_embed = nn.Embedding(256, width), nn.Embedding(256, width)
        self.register_buffer("bins", torch.linspace(-3, 3, 255))
        self.mel = nn.Linear(width, 80)
        self.postnet = nn.Sequential(
            nn.Conv1d(80, width, 5, padding=2), nn.BatchNorm1d(width), nn.Tanh(), nn.Conv1d(width, 80, 5, padding=2)
        )
        place = torch.arange(1500)[:, None] / 10000 ** (torch.arange(0, width, 2) / width)
        self.register_buffer("places", torch.stack([place.sin(), place.cos()], 2).flatten(1))

    def forward(self, text, text_padding, durations, pitch, energy, mel_padding):
        x = self.embed(text) + self.places[: text.shape[1]]
        for block in self.encoder:
            x = block(x, text_padding)
        log_duration = self.duration(x, text_padding)
        pitch_out = self.pitch(x, text_padding)
        x = x + self.pitch_embed(torch.bucketize(pitch, self.bins))
        energy_out = self.energy(x, text_padding)
        x = x + self.energy_embed(torch.bucketize(energy, self.bins))
        frames = mel_padding.shape[1]
        x = self.regulate(x, durations, frames) + self.places[:frames]
        for block in self.decoder:
            x = block(x, mel_padding)
        mel = self.mel(x)
        return mel, mel + self.postnet(mel.transpose(1, 2)).transpose(1, 2), log_duration, pitch_out, energy_out


def fastspeech_training(change):
    """Train a FastSpeech 2: 16 sentences a step, with the true durations, pitch and energy."""
    rng = np.random.default_rng(0)
    sentences = []
    for _ in range(size(256, 8)):
        n = int(rng.integers(size(40, 5), size(80, 10)))
        durations = rng.integers(1, size(16, 4), n)
        mel = rng.normal(size=(int(durations.sum()), 80)).astype(np.float32)
        pitch, energy = rng.normal(size=(2, n)).astype(np.float32)
        sentences.append((rng.integers(1, 100, n), durations, pitch, energy, mel))

    def padded(arrays):
        out = np.zeros((len(arrays), max(map(len, arrays)), *arrays[0].shape[1:]), arrays[0].dtype)
        for row, array in zip(out, arrays, strict=False):
            row[: len(array)] = array
        return torch.from_numpy(out)

    def collate(items):
        text, durations, pitch, energy, mel = (padded(part) for part in zip(*items, strict=False))
        lengths = torch.tensor([len(item[4]) for item in items])
        return text, durations, pitch, energy, mel, torch.arange(mel.shape[1]) >= lengths[:, None]

    batches = endless(
        DataLoader(
            sentences,
            size(16, 2),
            shuffle=True,
            drop_last=True,
            collate_fn=collate,
            generator=torch.Generator().manual_seed(0),
        )
    )
    torch.manual_seed(0)
    regulate = regulate_gather if change == "vectorised_regulator" else regulate_loop
    model = FastSpeech(size(256, 16), size(1024, 32), size(4, 1), change == "sdpa", regulate).to(device)
    fused = {"fused": True} if change == "fused_adam" else {}
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, betas=(0.9, 0.98), eps=1e-9, **fused)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: min((i + 1) / 4000, ((i + 1) / 4000) ** -0.5))
    log = []

    def masked_mean(error, padding):
        if change == "losses_without_sync":
            keep = (~padding).unsqueeze(-1) if error.ndim == 3 else ~padding
            return (error * keep).sum() / (keep.sum() * (error.shape[2] if error.ndim == 3 else 1))
        return error[~padding].mean()

    def step():
        text, durations, pitch, energy, mel, mel_padding = (t.to(device) for t in next(batches))
        text_padding = text == 0
        with bf16(change == "autocast_bf16"):
            outputs = model(text, text_padding, durations, pitch, energy, mel_padding)
        before, after, log_duration, pitch_out, energy_out = (t.float() for t in outputs)
        losses = {
            "mel": masked_mean((before - mel).abs(), mel_padding),
            "postnet": masked_mean((after - mel).abs(), mel_padding),
            "duration": masked_mean((log_duration - torch.log(durations.float() + 1)) ** 2, text_padding),
            "pitch": masked_mean((pitch_out - pitch) ** 2, text_padding),
            "energy": masked_mean((energy_out - energy) ** 2, text_padding),
        }
        loss = sum(losses.values())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        if change == "losses_without_sync":
            log.append(torch.stack(list(losses.values())).detach())  # Read by whoever prints them
        else:
            log.append({name: value.item() for name, value in losses.items()})
        return loss.detach()

    return step


# ---------------------------------------------------------------------------------------------------------------------
# 5. Learned image compression


class CropDataset(Dataset):
    """Random 256 x 256 crops of photographs, flipped and as floats."""

    def __init__(self, crop):
        rng = np.random.default_rng(0)
        self.crop = crop
        self.images = rng.integers(0, 256, (size(48, 4), size(512, 96), size(768, 96), 3), dtype=np.uint8)

    def __len__(self):
        return size(100_000, 64)

    def __getitem__(self, index):
        rng = np.random.default_rng(index)
        image = self.images[index % len(self.images)]
        top, left = rng.integers(0, image.shape[0] - self.crop), rng.integers(0, image.shape[1] - self.crop)
        image = image[top : top + self.crop, left : left + self.crop]
        if rng.random() < 0.5:
            image = image[:, ::-1]
        if rng.random() < 0.5:
            image = np.rot90(image)
        return torch.from_numpy(np.ascontiguousarray(image.transpose(2, 0, 1))).float().div(255)


class GDN(nn.Module):
    """Generalized divisive normalization, or its inverse."""

    def __init__(self, channels, inverse=False):
        super().__init__()
        self.inverse = inverse
        self.beta = nn.Parameter(torch.ones(channels))
        self.gamma = nn.Parameter(0.1 * torch.eye(channels) + 1e-4)

    def forward(self, x):
        gamma = self.gamma.clamp(min=0)[:, :, None, None]
        norm = F.conv2d(x * x, gamma, self.beta.clamp(min=1e-6))
        return x * (torch.sqrt(norm) if self.inverse else torch.rsqrt(norm))


class FactorizedPrior(nn.Module):
    """A learned cumulative distribution for each channel (Ballé et al. 2018)."""

    def __init__(self, channels, filters=(1, 3, 3, 3, 1)):
        super().__init__()
        self.matrices, self.biases, self.factors = nn.ParameterList(), nn.ParameterList(), nn.ParameterList()
        for a, b in itertools.pairwise(filters):
            self.matrices.append(nn.Parameter(torch.full((channels, b, a), math.log(math.expm1(0.56 / b)))))
            self.biases.append(nn.Parameter(torch.rand(channels, b, 1) - 0.5))
            self.factors.append(nn.Parameter(torch.zeros(channels, b, 1)))

    def cumulative(self, x):
        for i, (matrix, bias) in enumerate(zip(self.matrices, self.biases, strict=False)):
            x = F.softplus(matrix) @ x + bias
            if i < len(self.matrices) - 1:
                x = x + torch.tanh(self.factors[i]) * torch.tanh(x)
        return x

    def forward(self, z):
        flat = z.transpose(0, 1).reshape(z.shape[1], 1, -1)
        lower, upper = self.cumulative(flat - 0.5), self.cumulative(flat + 0.5)
        sign = -torch.sign(lower + upper).detach()
        return (torch.sigmoid(sign * upper) - torch.sigmoid(sign * lower)).abs().clamp(min=1e-9)


def gaussian_likelihood(y, scale, mean):
    distance = (y - mean).abs()
    scale = scale.clamp(min=0.11)

    def below(t):
        return 0.5 * torch.erfc(-t / math.sqrt(2))

    return (below((0.5 - distance) / scale) - below((-0.5 - distance) / scale)).clamp(min=1e-9)


class MeanScaleHyperprior(nn.Module):
    def __init__(self, n, m, half):
        super().__init__()
        self.half = half

        def down(a, b):
            return nn.Conv2d(a, b, 5, 2, 2)

        def up(a, b):
            return nn.ConvTranspose2d(a, b, 5, 2, 2, output_padding=1)

        self.analysis = nn.Sequential(down(3, n), GDN(n), down(n, n), GDN(n), down(n, n), GDN(n), down(n, m))
        self.synthesis = nn.Sequential(up(m, n), GDN(n, True), up(n, n), GDN(n, True), up(n, n), GDN(n, True), up(n, 3))
        self.hyper_analysis = nn.Sequential(
            nn.Conv2d(m, n, 3, 1, 1), nn.LeakyReLU(), down(n, n), nn.LeakyReLU(), down(n, n)
        )
        self.hyper_synthesis = nn.Sequential(
            up(n, m), nn.LeakyReLU(), up(m, m * 3 // 2), nn.LeakyReLU(), nn.Conv2d(m * 3 // 2, m * 2, 3, 1, 1)
        )
        self.prior = FactorizedPrior(n)

    def forward(self, x):
        with bf16(self.half):
            y = self.analysis(x)
            z = self.hyper_analysis(y)
        y, z = y.float(), z.float()
        z_noisy = z + (torch.rand_like(z) - 0.5)
        with bf16(self.half):
            scale, mean = self.hyper_synthesis(z_noisy).float().chunk(2, 1)
        y_noisy = y + (torch.rand_like(y) - 0.5)
        with bf16(self.half):
            decoded = self.synthesis(y_noisy)
        return decoded.float(), gaussian_likelihood(y_noisy, scale, mean), self.prior(z_noisy)


def compression_training(change):
    """Train a mean-scale hyperprior: 16 crops of 256 x 256 a step, rate plus distortion.

    With torch.compile on a GPU the quantization noise is another one, so that the loss agrees only about.
    """
    batches = started(
        CropDataset(size(256, 64)),
        size(16, 2),
        workers=2 if change == "two_workers" else 0,
        pin=change == "two_workers",
    )
    torch.manual_seed(0)
    model = MeanScaleHyperprior(size(128, 8), size(192, 12), half=change == "autocast_bf16").to(device)
    if change == "channels_last":
        model = model.to(memory_format=torch.channels_last)
    run = compiled(model) if change == "compile_model" else model
    fused = {"fused": True} if change == "fused_adam" else {}
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, **fused)
    meters = {"loss": 0.0, "bpp": 0.0, "psnr": 0.0}

    def step():
        x = next(batches).to(device, non_blocking=True)
        if change == "channels_last":
            x = x.contiguous(memory_format=torch.channels_last)
        optimizer.zero_grad()
        decoded, y_likelihood, z_likelihood = run(x)
        pixels = x.shape[0] * x.shape[2] * x.shape[3]
        bpp = -(torch.log2(y_likelihood).sum() + torch.log2(z_likelihood).sum()) / pixels
        mse = F.mse_loss(decoded, x)
        loss = 0.0130 * 255**2 * mse + bpp
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        for name, value in (("loss", loss), ("bpp", bpp), ("psnr", -10 * torch.log10(mse))):
            meters[name] = 0.98 * meters[name] + 0.02 * value.item()
        return loss.detach()

    return step


# ---------------------------------------------------------------------------------------------------------------------
# 6. OCR service


class CRNN(nn.Module):
    """Convolutions down to one row of pixels, two bidirectional LSTMs, and the characters' scores."""

    def __init__(self, classes):
        super().__init__()
        scale, hidden = size(64, 8), size(256, 16)
        widths, layers, inputs = [1, 2, 4, 4, 8, 8, 8], [], 1
        pools = {0: (2, 2), 1: (2, 2), 3: (2, 1), 5: (2, 1)}
        for i, factor in enumerate(widths):
            outputs = scale * factor
            kernel, padding = ((2, 1), 0) if i == 6 else (3, 1)
            layers += [nn.Conv2d(inputs, outputs, kernel, 1, padding), nn.BatchNorm2d(outputs), nn.ReLU()]
            if i in pools:
                layers.append(nn.MaxPool2d(pools[i], pools[i]))
            inputs = outputs
        self.cnn = nn.Sequential(*layers)
        self.rnn = nn.LSTM(inputs, hidden, num_layers=2, bidirectional=True, batch_first=True)
        self.out = nn.Linear(2 * hidden, classes)

    def forward(self, x):
        x = self.cnn(x).squeeze(2).transpose(1, 2)
        return self.out(self.rnn(x)[0])


def decode_steps(index, confidence):
    """Greedy CTC decoding of one line: drop repeated characters and blanks (0)."""
    characters, scores, previous = [], [], 0
    for t in range(len(index)):
        if index[t] != previous and index[t] != 0:
            characters.append(index[t].item())
            scores.append(confidence[t].item())
        previous = index[t]
    return characters, sum(scores) / len(scores) if scores else 0.0


def ocr_service(change):
    """Read one page of 12 lines of text, whose images are padded to multiples of 128 pixels."""
    torch.backends.cudnn.benchmark = change == "cudnn_benchmark"
    rng = np.random.default_rng(0)
    unit = size(128, 32)
    pages = [
        [rng.integers(0, 256, (32, int(rng.integers(unit // 2, 6 * unit))), dtype=np.uint8) for _ in range(size(12, 6))]
        for _ in range(8)
    ]
    torch.manual_seed(0)
    model = CRNN(classes=97).to(device).eval()
    dtype = torch.float32
    if change == "half_precision":
        dtype = torch.float16 if device.type == "cuda" else torch.bfloat16
        model = model.to(dtype)
    if change == "fold_batchnorm":
        model = fold_batchnorm(model)
    served = [0]

    def prepare(image):
        width = -(-image.shape[1] // unit) * unit
        out = np.full((1, 32, width), 255, np.float32)
        out[0, :, : image.shape[1]] = image
        return (out / 255 - 0.5) / 0.5

    def decode(probabilities):
        confidence, index = probabilities.max(-1)
        if change == "decode_on_cpu":
            both = torch.stack([confidence, index.float()]).cpu()
            confidence, index = both[0].tolist(), both[1].int().tolist()
            characters, scores, previous = [], [], 0
            for i, score in zip(index, confidence, strict=False):
                if i != previous and i != 0:
                    characters.append(i)
                    scores.append(score)
                previous = i
            return characters, sum(scores) / len(scores) if scores else 0.0
        return decode_steps(index, confidence)

    @torch.no_grad()
    def step():
        page = [prepare(image) for image in pages[served[0] % len(pages)]]
        served[0] += 1
        results = [None] * len(page)
        if change == "batch_same_width":
            groups = {}
            for i, image in enumerate(page):
                groups.setdefault(image.shape[2], []).append(i)
            groups = list(groups.values())
        else:
            groups = [[i] for i in range(len(page))]
        for group in groups:
            x = torch.from_numpy(np.stack([page[i] for i in group])).to(device, dtype)
            probabilities = torch.softmax(model(x).float(), -1)
            for row, i in enumerate(group):
                results[i] = decode(probabilities[row])
        return torch.tensor([confidence for _, confidence in results])

    return step


# ---------------------------------------------------------------------------------------------------------------------
# 7. Latent ODE


class Field(nn.Module):
    """The right-hand side of the differential equation."""

    def __init__(self, latent, hidden):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(latent, hidden), nn.Tanh(), nn.Linear(hidden, hidden), nn.Tanh(), nn.Linear(hidden, latent)
        )

    def forward(self, t, z):
        return self.net(z)


class LatentODE(nn.Module):
    """A GRU reads a series backwards; the latent state then follows an ODE, solved by Runge-Kutta of order 4."""

    def __init__(self, channels, latent, hidden, change):
        super().__init__()
        self.change = change
        self.cell = nn.GRUCell(channels + 1, hidden)
        self.to_latent = nn.Linear(hidden, 2 * latent)
        self.field = Field(latent, hidden)
        self.decoder = nn.Sequential(nn.Linear(latent, hidden), nn.ReLU(), nn.Linear(hidden, channels))
        self.rk4 = compiled(self.rk4_step) if change == "compile_rk4" else self.rk4_step

    def rk4_step(self, t, dt, z):
        k1 = self.field(t, z)
        k2 = self.field(t + dt / 2, z + dt / 2 * k1)
        k3 = self.field(t + dt / 2, z + dt / 2 * k2)
        k4 = self.field(t + dt, z + dt * k3)
        return z + dt / 6 * (k1 + 2 * k2 + 2 * k3 + k4)

    def encode(self, series, gaps):
        inputs = torch.cat([series, gaps[None, :, None].expand(len(series), -1, 1)], 2).flip(1)
        if self.change == "cudnn_gru":
            cell = self.cell
            start = inputs.new_zeros(1, len(inputs), cell.hidden_size)
            weights = [cell.weight_ih, cell.weight_hh, cell.bias_ih, cell.bias_hh]
            _, state = torch.gru(inputs, start, weights, True, 1, 0.0, True, False, True)
            return self.to_latent(state[0])
        state = inputs.new_zeros(len(inputs), self.cell.hidden_size)
        for i in range(inputs.shape[1]):
            state = self.cell(inputs[:, i], state)
        return self.to_latent(state)

    def solve(self, z, times):
        if self.change == "list_trajectory":
            trajectory = [z]
            for t, dt in zip(times[:-1], times[1:] - times[:-1], strict=False):
                trajectory.append(self.rk4(t, dt, trajectory[-1]))
            return torch.stack(trajectory, 1)
        trajectory = z.unsqueeze(1)
        for i in range(len(times) - 1):
            z = self.rk4(times[i], times[i + 1] - times[i], z)
            trajectory = torch.cat([trajectory, z.unsqueeze(1)], 1)
        return trajectory

    def forward(self, series, times):
        mean, log_variance = self.encode(series, F.pad(times[1:] - times[:-1], (1, 0))).chunk(2, 1)
        z = mean + torch.randn_like(mean) * torch.exp(0.5 * log_variance)
        decoded = self.decoder(self.solve(z, times))
        nll = 0.5 * ((decoded - series) / 0.1).square().sum((1, 2)).mean()
        kl = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum(1).mean()
        return nll + kl


def latent_ode_training(change):
    """Train a latent ODE on 256 noisy series with 60 irregular times. A captured graph draws other noise."""
    rng = np.random.default_rng(0)
    length, channels, batch = size(60, 8), 8, size(256, 8)
    times = np.sort(rng.uniform(0, 5, length)).astype(np.float32)
    phase, rate = rng.uniform(0, 6.28, (size(4096, 64), 1, channels)), rng.uniform(0.5, 2, (size(4096, 64), 1, 1))
    series = np.sin(rate * times[None, :, None] + phase) + 0.1 * rng.normal(size=(len(phase), length, channels))
    series = series.astype(np.float32)
    torch.manual_seed(0)
    model = LatentODE(channels, size(16, 4), size(128, 16), change).to(device)
    options = {}
    if change == "fused_adam":
        options = {"fused": True}
    elif change == "cuda_graph":
        options = {"capturable": device.type == "cuda"}
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, **options)
    grid = torch.from_numpy(times).to(device)
    inputs = torch.from_numpy(series[:batch].copy()).to(device)  # What a captured graph reads
    losses = []

    def train(x=inputs):
        optimizer.zero_grad()
        loss = model(x, grid)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 10.0)
        optimizer.step()
        return loss.detach()

    replay = graphed_training(train, [model], [optimizer]) if change == "cuda_graph" else None

    def step():
        x = torch.from_numpy(series[rng.integers(0, len(series), batch)]).to(device)
        if replay is not None:
            inputs.copy_(x)
            loss = replay()
        else:
            loss = train(x)
        losses.append(loss.item())
        return loss

    return step


# ---------------------------------------------------------------------------------------------------------------------
# 8. Link prediction with a GAT


class LinkBatches(Dataset):
    """Item i is a batch: positive and negative edges and the sampled neighbours of their ends, two hops."""

    def __init__(self, change, fanouts=(10, 5)):
        rng = np.random.default_rng(0)
        self.change, self.fanouts, self.nodes, self.batch = change, fanouts, size(200_000, 300), size(256, 8)
        degree = rng.lognormal(2.5, 0.8, self.nodes).clip(1, 300).astype(np.int64)
        self.offsets = np.concatenate([[0], np.cumsum(degree)])
        self.neighbours = rng.integers(0, self.nodes, self.offsets[-1])
        self.features = rng.normal(size=(self.nodes, size(128, 16))).astype(np.float32)

    def __len__(self):
        return 1_000_000

    def sample(self, nodes, fanout, rng):
        """Return `fanout` random neighbours of each node, drawn with replacement."""
        if self.change == "vectorised_sampling":
            first = self.offsets[nodes]
            picks = (rng.random((len(nodes), fanout)) * (self.offsets[nodes + 1] - first)[:, None]).astype(np.int64)
            return self.neighbours[first[:, None] + picks]
        rows = []
        for node in nodes:
            mine = self.neighbours[self.offsets[node] : self.offsets[node + 1]]
            rows.append(mine[(rng.random(fanout) * len(mine)).astype(np.int64)])
        return np.stack(rows)

    def __getitem__(self, index):
        rng = np.random.default_rng([7, index])
        source = rng.integers(0, self.nodes, self.batch)
        target = self.neighbours[self.offsets[source]]
        wrong = rng.integers(0, self.nodes, self.batch)
        ends = np.stack([np.concatenate([source, source]), np.concatenate([target, wrong])])
        nodes = np.unique(ends)
        local_ends = np.searchsorted(nodes, ends)
        hops = []
        for fanout in self.fanouts:
            found = self.sample(nodes, fanout, rng)
            wider = np.unique(np.concatenate([nodes, found.ravel()]))
            hops.append((np.searchsorted(wider, nodes), np.searchsorted(wider, found)))
            nodes = wider
        inputs = nodes if self.change == "features_on_gpu" else self.features[nodes]
        return inputs, hops[::-1], local_ends


class GATLayer(nn.Module):
    def __init__(self, inputs, width, heads, dense):
        super().__init__()
        self.heads, self.dense = heads, dense
        self.project = nn.Linear(inputs, width, bias=False)
        self.skip = nn.Linear(inputs, width)
        self.source = nn.Parameter(torch.randn(heads, width // heads) * 0.1)
        self.target = nn.Parameter(torch.randn(heads, width // heads) * 0.1)

    def forward(self, x, own, found):
        """Return new states of the nodes `own` from those of their neighbours `found` (nodes x fanout)."""
        h = self.project(x).view(len(x), self.heads, -1)
        from_source, from_target = (h * self.source).sum(-1), (h * self.target).sum(-1)
        n, fanout = found.shape
        if self.dense:
            scores = F.leaky_relu(from_source[found] + from_target[own][:, None], 0.2)
            out = (torch.softmax(scores, 1).unsqueeze(-1) * h[found]).sum(1)
        else:
            edge_source = found.flatten()
            edge_target = torch.arange(n, device=x.device).repeat_interleave(fanout)
            scores = F.leaky_relu(from_source[edge_source] + from_target[own][edge_target], 0.2)
            index = edge_target[:, None].expand(-1, self.heads)
            highest = torch.full((n, self.heads), -1e30, device=x.device)
            highest = highest.scatter_reduce(0, index, scores.detach(), "amax")
            weights = torch.exp(scores - highest[edge_target])
            total = torch.zeros(n, self.heads, device=x.device).index_add(0, edge_target, weights)
            weights = weights / total[edge_target]
            messages = weights.unsqueeze(-1) * h[edge_source]
            out = torch.zeros(n, *h.shape[1:], device=x.device).index_add(0, edge_target, messages)
        return F.elu(out.flatten(1) + self.skip(x[own]))


class LinkPredictor(nn.Module):
    def __init__(self, inputs, width, dense):
        super().__init__()
        self.layer1, self.layer2 = GATLayer(inputs, width, 4, dense), GATLayer(width, width, 4, dense)
        self.score = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1))

    def forward(self, x, hops, ends):
        x = self.layer1(x, *hops[0])
        x = self.layer2(x, *hops[1])
        return self.score(x[ends[0]] * x[ends[1]]).squeeze(-1)


def auc(scores, labels):
    """Area under the ROC curve from ranks."""
    rank = np.empty(len(scores))
    rank[np.argsort(scores)] = np.arange(1, len(scores) + 1)
    positive = labels.sum()
    return (rank[labels > 0].sum() - positive * (positive + 1) / 2) / (positive * (len(labels) - positive))


def gat_link_prediction(change):
    """Train a two-layer GAT: 256 edges and 256 wrong edges a step, with 10 and 5 sampled neighbours."""
    torch.set_float32_matmul_precision("highest")
    if change == "use_tf32":
        use_tf32()
    dataset = LinkBatches(change)
    workers = 2 if change == "two_workers" else 0
    batches = started(dataset, None, workers, shuffle=False)
    torch.manual_seed(0)
    model = LinkPredictor(dataset.features.shape[1], size(256, 16), dense=change == "dense_neighbors").to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, weight_decay=1e-5)
    table = torch.from_numpy(dataset.features).to(device) if change == "features_on_gpu" else None
    labels = np.repeat(np.array([1.0, 0.0], np.float32), dataset.batch)
    history = []

    def step():
        inputs, hops, ends = next(batches)
        x = inputs.to(device) if table is None else table[inputs.to(device)]
        hops = [(own.to(device), found.to(device)) for own, found in hops]
        scores = model(x, hops, ends.to(device))
        loss = F.binary_cross_entropy_with_logits(scores, torch.from_numpy(labels).to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        history.append((loss.item(), auc(scores.detach().cpu().numpy(), labels)))
        return loss.detach()

    return step


PROGRAMS = {
    pose_training: {"uint8_to_gpu": "data_loader", "metric_on_gpu": "python", "heatmaps_on_gpu": "data_loader",
                    "autocast_bf16": "half_precision", "channels_last": "channels_last"},
    summarization_finetuning: {"autocast_bf16": "half_precision", "use_tf32": "tf32", "trim_padding": "trim_padding",
                               "sdpa": "fused_attention", "fused_loss": ""},
    alphazero_selfplay: {"parallel_games": ("larger_batch", 8), "cache_evaluations": "", "cuda_graph": "cuda_graph",
                         "fold_batchnorm": "", "one_transfer": "remove_sync"},
    fastspeech_training: {"vectorised_regulator": "larger_batch", "autocast_bf16": "half_precision",
                          "losses_without_sync": "remove_sync", "sdpa": "fused_attention",
                          "fused_adam": "fused_optimizer"},
    compression_training: {"two_workers": "data_loader", "compile_model": "fuse_pointwise",
                           "autocast_bf16": "half_precision", "channels_last": "channels_last",
                           "fused_adam": "fused_optimizer"},
    ocr_service: {"decode_on_cpu": "remove_sync", "batch_same_width": "larger_batch",
                  "half_precision": "half_precision", "fold_batchnorm": "", "cudnn_benchmark": ""},
    latent_ode_training: {"cuda_graph": "cuda_graph", "compile_rk4": "fuse_pointwise", "cudnn_gru": "",
                          "list_trajectory": "", "fused_adam": "fused_optimizer"},
    gat_link_prediction: {"vectorised_sampling": "data_loader", "two_workers": "data_loader",
                          "features_on_gpu": "data_loader", "dense_neighbors": "", "use_tf32": "tf32"},
}  # fmt: skip
