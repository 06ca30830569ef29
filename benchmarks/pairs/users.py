"""Programs in the manner of well-known repositories of other fields: scenes, point clouds, tracking, codecs, fluids."""

import queue
import random
import threading

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from setting import compiled, device, endless, gathered, graphed, size, use_tf32


def radiance_field(change):
    """A NeRF learns a scene: rays of a random view, coarse and fine samples on each, and one network for both kinds."""
    if change == "tf32":
        use_tf32()
    side, rays, coarse, fine = size(400, 16), size(1024, 8), size(64, 8), size(64, 8)
    width, bands, view_bands = size(256, 16), 10, 4

    def encode(x, bands):
        if change == "encode_at_once":
            angles = x[..., None, :] * 2.0 ** torch.arange(bands, device=device)[:, None]
            return torch.cat([x, torch.stack([angles.sin(), angles.cos()], -2).flatten(-3)], -1)
        found = [x]
        for band in range(bands):
            for wave in (torch.sin, torch.cos):
                found.append(wave(x * 2.0**band))
        return torch.cat(found, -1)

    class Field(nn.Module):
        def __init__(self):
            super().__init__()
            before = 3 + 6 * bands
            wides = [before] + [width + before if place == 4 else width for place in range(7)]
            self.layers = nn.ModuleList(nn.Linear(wide, width) for wide in wides)
            self.density, self.feature = nn.Linear(width, 1), nn.Linear(width, width)
            self.view, self.color = nn.Linear(width + 3 + 6 * view_bands, width // 2), nn.Linear(width // 2, 3)

        def forward(self, points, views):
            x = h = encode(points, bands)
            for place, layer in enumerate(self.layers):
                h = F.relu(layer(h))
                if place == 4:
                    h = torch.cat([x, h], -1)
            views = encode(views[:, None].expand(points.shape), view_bands)
            density = self.density(h)
            h = F.relu(self.view(torch.cat([self.feature(h), views], -1)))
            return torch.cat([self.color(h), density], -1)

    rough, sharp = Field().to(device), Field().to(device)
    optimizer = torch.optim.Adam([*rough.parameters(), *sharp.parameters()], lr=5e-4)
    photos = torch.rand(4, side, side, 3, device=device)
    poses = torch.linalg.qr(torch.randn(4, 3, 3))[0].to(device)
    rows, columns = torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")
    coordinates = torch.stack([rows, columns], -1).reshape(-1, 2).to(device)
    chance = np.random.default_rng(0)
    figures = {"iteration": 0, "psnr": []}

    def render(raw, depths, directions):
        """Return the color of each ray, and how much each of its samples counts."""
        steps = depths[:, 1:] - depths[:, :-1]
        steps = torch.cat([steps, torch.full_like(steps[:, :1], 1e10)], -1) * directions.norm(dim=-1, keepdim=True)
        alpha = 1.0 - torch.exp(-F.relu(raw[..., 3]) * steps)
        passed = torch.cumprod(torch.cat([torch.ones_like(alpha[:, :1]), 1.0 - alpha + 1e-10], -1), -1)
        weights = alpha * passed[:, :-1]
        return (weights[..., None] * torch.sigmoid(raw[..., :3])).sum(-2), weights

    def resample(middles, weights):
        """Return depths that are drawn where the samples count most."""
        weights = weights + 1e-5
        cdf = torch.cumsum(weights / weights.sum(-1, keepdim=True), -1)
        cdf = torch.cat([torch.zeros_like(cdf[:, :1]), cdf], -1)
        drawn = torch.rand(len(cdf), fine, device=device)
        above = torch.searchsorted(cdf, drawn, right=True)
        ends = torch.stack([(above - 1).clamp(min=0), above.clamp(max=cdf.shape[-1] - 1)], -1)
        shape = [len(cdf), fine, cdf.shape[-1]]
        cdf = torch.gather(cdf.unsqueeze(1).expand(shape), 2, ends)
        middles = torch.gather(middles.unsqueeze(1).expand(shape), 2, ends)
        span = cdf[..., 1] - cdf[..., 0]
        span = torch.where(span < 1e-5, torch.ones_like(span), span)
        return middles[..., 0] + (drawn - cdf[..., 0]) / span * (middles[..., 1] - middles[..., 0])

    def step():
        photo = figures["iteration"] % len(photos)
        if change == "pixels_on_gpu":
            chosen = torch.randperm(side * side, device=device)[:rays]
        else:
            chosen = chance.choice(side * side, size=[rays], replace=False)
            chosen = torch.from_numpy(chosen).to(device)
        pixels = coordinates[chosen]
        wanted = photos[photo, pixels[:, 0], pixels[:, 1]]
        x, y = (pixels[:, 1] - side / 2) / side, (pixels[:, 0] - side / 2) / side
        directions = torch.stack([x, -y, -torch.ones_like(x)], -1) @ poses[photo].T
        origins = (poses[photo][:, 2] * 4.0).expand(directions.shape)
        views = directions / directions.norm(dim=-1, keepdim=True)

        depths = torch.linspace(2.0, 6.0, coarse, device=device).expand(rays, coarse)
        middles = 0.5 * (depths[:, 1:] + depths[:, :-1])
        upper, lower = torch.cat([middles, depths[:, -1:]], -1), torch.cat([depths[:, :1], middles], -1)
        depths = lower + (upper - lower) * torch.rand(depths.shape, device=device)
        with torch.autocast(device.type, torch.bfloat16, enabled=change == "bf16"):
            raw = rough(origins[:, None] + directions[:, None] * depths[..., None], views)
        first, weights = render(raw.float(), depths, directions)
        middles = 0.5 * (depths[:, 1:] + depths[:, :-1])
        depths = torch.cat([depths, resample(middles, weights[:, 1:-1]).detach()], -1).sort(-1)[0]
        with torch.autocast(device.type, torch.bfloat16, enabled=change == "bf16"):
            raw = sharp(origins[:, None] + directions[:, None] * depths[..., None], views)
        second, _ = render(raw.float(), depths, directions)

        optimizer.zero_grad()
        error = F.mse_loss(second, wanted)
        loss = error + F.mse_loss(first, wanted)
        psnr = -10.0 * torch.log10(error.detach())
        loss.backward()
        optimizer.step()
        figures["iteration"] += 1
        for group in optimizer.param_groups:
            group["lr"] = 5e-4 * 0.1 ** (figures["iteration"] / 250_000)
        figures["psnr"].append(psnr if change == "no_item" else psnr.item())
        return loss

    return step


def point_clouds(change):
    """PointNet++ classifies point clouds: it takes the farthest points in a Python loop, and groups their neighbors."""
    clouds, points = size(16, 2) * (2 if change == "batch_x2" else 1), size(1024, 32)

    def taken(values, rows):
        """Return values (clouds, points, channels) at rows, whose first dimension is that of the clouds."""
        every = torch.arange(len(values), dtype=torch.long).to(device).view([-1] + [1] * (rows.dim() - 1))
        return values[every.expand_as(rows), rows]

    def farthest(where, count):
        chosen = torch.zeros(len(where), count, dtype=torch.long).to(device)
        distance = torch.ones(where.shape[:2]).to(device) * 1e10
        last = torch.randint(0, where.shape[1], (len(where),), dtype=torch.long).to(device)
        every = torch.arange(len(where), dtype=torch.long).to(device)
        for place in range(count):
            chosen[:, place] = last
            center = where[every, last, :].view(len(where), 1, 3)
            found = torch.sum((where - center) ** 2, -1)
            if change == "minimum":
                distance = torch.minimum(distance, found)
            else:
                nearer = found < distance
                distance[nearer] = found[nearer]
            last = torch.max(distance, -1)[1]
        return chosen

    def neighbors(radius, count, where, centers):
        total = where.shape[1]
        squares = -2 * torch.matmul(centers, where.transpose(1, 2))
        squares = squares + (centers**2).sum(-1)[..., None] + (where**2).sum(-1)[:, None]
        rows = torch.arange(total, dtype=torch.long).to(device).repeat(*centers.shape[:2], 1)
        rows[squares > radius**2] = total
        rows = rows.topk(count, largest=False)[0] if change == "topk" else rows.sort(dim=-1)[0][:, :, :count]
        first = rows[:, :, :1].repeat(1, 1, count)
        missing = rows == total
        rows[missing] = first[missing]
        return rows

    class Level(nn.Module):
        def __init__(self, count, radius, near, before, widths):
            super().__init__()
            self.count, self.radius, self.near = count, radius, near
            layers = []
            for wide in widths:
                layers += [nn.Conv2d(before, wide, 1), nn.BatchNorm2d(wide), nn.ReLU()]
                before = wide
            self.layers = nn.Sequential(*layers)

        def forward(self, where, features):
            if self.count is None:
                centers, grouped = where[:, :1], where[:, None]
                near = features[:, None]
            else:
                centers = taken(where, farthest(where, self.count))
                rows = neighbors(self.radius, self.near, where, centers)
                grouped = taken(where, rows) - centers[:, :, None]
                near = None if features is None else taken(features, rows)
            h = grouped if near is None else torch.cat([grouped, near], -1)
            h = self.layers(h.permute(0, 3, 2, 1))
            return centers, h.max(2)[0].transpose(1, 2)

    class Network(nn.Module):
        def __init__(self):
            super().__init__()
            self.levels = nn.ModuleList([
                Level(size(128, 8), 0.4, size(32, 4), 3, (64, 64, 128)),
                Level(size(32, 4), 0.8, size(32, 4), 131, (128, 128, 256)),
                Level(None, None, None, 259, (256, 512, size(1024, 32))),
            ])  # fmt: skip
            self.head = nn.Sequential(
                nn.Linear(size(1024, 32), 512), nn.BatchNorm1d(512), nn.ReLU(), nn.Dropout(0.4),
                nn.Linear(512, 256), nn.BatchNorm1d(256), nn.ReLU(), nn.Dropout(0.4), nn.Linear(256, 40),
            )  # fmt: skip

        def forward(self, where):
            features = None
            for level in self.levels:
                where, features = level(where, features)
            return self.head(features.squeeze(1))

    model = Network().to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, weight_decay=1e-4, fused=change == "fused" or None)
    where = F.normalize(torch.randn(clouds, points, 3), dim=-1)
    labels = torch.randint(0, 40, (clouds,))
    right = []

    def step():
        x, y = where.to(device), labels.to(device)
        optimizer.zero_grad()
        with torch.autocast(device.type, torch.bfloat16, enabled=change == "bf16"):
            found = model(x)
        loss = F.nll_loss(F.log_softmax(found.float(), -1), y)
        right.append(found.max(1)[1].eq(y).cpu().sum().item() / clouds)
        loss.backward()
        optimizer.step()
        return loss

    return step


def mesh_simulator(change):
    """A MeshGraphNet learns to simulate: messages along edges are summed by index_add, and inputs are normalized."""
    if change == "tf32":
        use_tf32()
    width, blocks, nodes, edges = size(128, 8), size(10, 2), size(6000, 24), size(40_000, 80)

    def perceptron(before, after, norm=True):
        layers = [nn.Linear(before, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, after)]
        return nn.Sequential(*layers, *([nn.LayerNorm(after)] if norm else []))

    class Normalizer(nn.Module):
        def __init__(self, wide):
            super().__init__()
            if change == "count_in_python":
                self.seen, self.runs = 0, 0
            else:
                self.register_buffer("seen", torch.tensor(0.0))
                self.register_buffer("runs", torch.tensor(0.0))
            self.register_buffer("sum", torch.zeros(1, wide))
            self.register_buffer("squares", torch.zeros(1, wide))

        def forward(self, x):
            if self.training and self.runs < 10**6:
                x = x.detach()
                self.seen += len(x)
                self.runs += 1
                self.sum += x.sum(0, keepdim=True)
                self.squares += (x**2).sum(0, keepdim=True)
            mean = self.sum / self.seen
            spread = torch.sqrt((self.squares / self.seen - mean**2).clamp(min=0.0))
            return (x - mean) / torch.maximum(spread, torch.full_like(spread, 1e-8))

    def rows(x, index):
        return x.index_select(0, index) if change == "index_select" else x[index]

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.of_edges, self.of_nodes = perceptron(3 * width, width), perceptron(2 * width, width)

        def forward(self, x, e, sender, receiver):
            if change == "split_product":  # the product of the first layer is computed before nodes are gathered
                first = self.of_edges[0]
                from_sender, from_receiver, from_edge = first.weight.split(width, 1)
                h = F.linear(x, from_sender)[sender] + F.linear(x, from_receiver)[receiver]
                sent = self.of_edges[1:](h + F.linear(e, from_edge, first.bias))
            else:
                sent = self.of_edges(torch.cat([rows(x, sender), rows(x, receiver), e], -1))
            got = torch.zeros(len(x), width, device=x.device, dtype=sent.dtype).index_add_(0, receiver, sent)
            return x + self.of_nodes(torch.cat([x, got], -1)), e + sent

    class Simulator(nn.Module):
        def __init__(self):
            super().__init__()
            self.normal_x, self.normal_e, self.normal_out = Normalizer(11), Normalizer(3), Normalizer(2)
            self.read_x, self.read_e = perceptron(11, width), perceptron(3, width)
            self.blocks = nn.ModuleList(Block() for _ in range(blocks))
            self.write = perceptron(width, 2, norm=False)

        def forward(self, speed, kind, place, sender, receiver):
            x = self.normal_x(torch.cat([speed, F.one_hot(kind, 9).float()], -1))
            apart = place[sender] - place[receiver]
            e = self.normal_e(torch.cat([apart, apart.norm(dim=-1, keepdim=True)], -1))
            x, e = self.read_x(x), self.read_e(e)
            for block in self.blocks:
                x, e = block(x, e, sender, receiver)
            return self.write(x)

    model = Simulator().to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, fused=change == "fused" or None)
    place, speed, after = torch.rand(3, nodes, 2, device=device)
    kind = torch.randint(0, 9, (nodes,), device=device)
    sender, receiver = torch.randint(0, nodes, (2, edges), device=device)

    def step():
        noisy = speed + 0.02 * torch.randn_like(speed)
        goal = model.normal_out(after - noisy)
        with torch.autocast(device.type, torch.bfloat16, enabled=change == "bf16"):
            found = model(noisy, kind, place, sender, receiver)
        inside = (kind == 0) | (kind == 5)
        loss = (((found.float() - goal) ** 2).sum(-1) * inside).sum() / inside.sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return step


class _Tracks:
    """Tracks of boxes with a Kalman filter for each, as in SORT. together: one filter predicts for all at once."""

    def __init__(self, together):
        self.together, self.means, self.spreads, self.missed = together, [], [], []
        self.move, self.see = np.eye(7), np.eye(4, 7)
        self.move[[0, 1, 2], [4, 5, 6]] = 1.0
        self.noise, self.error = np.diag([1.0, 1, 1, 1, 0.01, 0.01, 1e-4]), np.diag([1.0, 1, 10, 10])

    def follow(self, boxes):
        """Move all tracks to the next frame, match its boxes (center, width, height), and return how many there are."""
        self._predict()
        overlaps = self._overlaps(boxes)
        used, matched = set(), {}
        for pair in np.argsort(-overlaps, axis=None):
            track, box = divmod(int(pair), max(1, len(boxes)))
            if overlaps[track, box] < 0.3:
                break
            if track not in matched and box not in used:
                matched[track] = box
                used.add(box)
        self._correct(matched, boxes)
        for track in range(len(self.means)):
            self.missed[track] = 0 if track in matched else self.missed[track] + 1
        kept = [track for track in range(len(self.means)) if self.missed[track] < 2]
        for mine in (self.means, self.spreads, self.missed):
            mine[:] = [mine[track] for track in kept]
        for box in range(len(boxes)):
            if box not in used:
                x, y, w, h = boxes[box]
                self.means.append(np.array([x, y, w * h, w / h, 0.0, 0.0, 0.0]))
                self.spreads.append(np.diag([10.0, 10, 10, 10, 1e4, 1e4, 1e4]))
                self.missed.append(0)
        return len(self.means)

    def _predict(self):
        if self.together and self.means:
            self.means = list(np.stack(self.means) @ self.move.T)
            self.spreads = list(self.move @ np.stack(self.spreads) @ self.move.T + self.noise)
            return
        for track in range(len(self.means)):
            self.means[track] = self.move @ self.means[track]
            self.spreads[track] = self.move @ self.spreads[track] @ self.move.T + self.noise

    def _overlaps(self, boxes):
        tracks = np.array(self.means).reshape(-1, 7)
        area = tracks[:, 2].clip(1.0)
        wide = np.sqrt(area * np.abs(tracks[:, 3]).clip(1e-3))
        mine = np.stack([tracks[:, 0], tracks[:, 1], wide, area / wide], -1)[:, None]
        boxes = np.array(boxes).reshape(1, -1, 4)
        low = np.maximum(mine[..., :2] - mine[..., 2:] / 2, boxes[..., :2] - boxes[..., 2:] / 2)
        high = np.minimum(mine[..., :2] + mine[..., 2:] / 2, boxes[..., :2] + boxes[..., 2:] / 2)
        both = (high - low).clip(0).prod(-1)
        return both / (mine[..., 2:].prod(-1) + boxes[..., 2:].prod(-1) - both)

    def _correct(self, matched, boxes):
        if not matched:
            return
        tracks = list(matched)
        seen = [np.array([x, y, w * h, w / h]) for x, y, w, h in (boxes[matched[track]] for track in tracks)]
        if self.together:
            means, spreads = (np.stack([every[track] for track in tracks]) for every in (self.means, self.spreads))
            gain = spreads @ self.see.T @ np.linalg.inv(self.see @ spreads @ self.see.T + self.error)
            means = means + (gain @ (np.stack(seen) - means @ self.see.T)[..., None])[..., 0]
            spreads = (np.eye(7) - gain @ self.see) @ spreads
            for track, mean, spread in zip(tracks, means, spreads, strict=True):
                self.means[track], self.spreads[track] = mean, spread
            return
        for track, one in zip(tracks, seen, strict=True):
            spread = self.spreads[track]
            gain = spread @ self.see.T @ np.linalg.inv(self.see @ spread @ self.see.T + self.error)
            self.means[track] = self.means[track] + gain @ (one - self.see @ self.means[track])
            self.spreads[track] = (np.eye(7) - gain @ self.see) @ spread


def object_tracker(change):
    """Objects are tracked in a video: a network finds boxes in each frame, and numpy matches them with the tracks."""
    high, wide, most, frames = size(384, 32), size(640, 32), size(40, 6), size(4, 2)
    layers, before = [], 3
    for after, stride in ((32, 2), (64, 2), (64, 1), (128, 2), (128, 1), (128, 1)):
        layers += [nn.Conv2d(before, after, 3, stride, 1, bias=False), nn.BatchNorm2d(after), nn.ReLU(inplace=True)]
        before = after
    backbone = nn.Sequential(*layers, nn.Upsample(scale_factor=2), nn.Conv2d(128, 64, 3, 1, 1), nn.ReLU(inplace=True))
    backbone, heat, shape = (one.to(device).eval() for one in (backbone, nn.Conv2d(64, 1, 1), nn.Conv2d(64, 4, 1)))
    dtype = torch.half if change == "half" and device.type == "cuda" else torch.float
    for one in (backbone, heat, shape):
        one.to(dtype)
    frame = torch.randint(0, 256, (high, wide, 3), dtype=torch.uint8).numpy()
    video = [np.ascontiguousarray(np.roll(frame, 8 * (2 - abs(2 - place)), 1)) for place in range(frames)]
    tracks = _Tracks(together=change == "filters_at_once")

    @torch.no_grad()
    def found(images):
        """Return the scores of some boxes in each image, and the boxes."""
        images = torch.stack([torch.from_numpy(one) for one in images]).to(device)
        h = backbone((images.permute(0, 3, 1, 2).to(dtype) / 255 - 0.45) / 0.225)
        scores = torch.sigmoid(heat(h)).float()
        scores = scores * (F.max_pool2d(scores, 3, 1, 1) == scores)
        scores, places = scores.flatten(1).topk(most)
        values = shape(h).float().flatten(2).gather(2, places[:, None].expand(-1, 4, -1)).transpose(1, 2)
        centers = torch.stack([places % (wide // 4), places // (wide // 4)], -1) + torch.sigmoid(values[..., :2])
        return scores, torch.cat([centers * 4, torch.exp(values[..., 2:]) * 24], -1)

    def read(scores, boxes):
        if change == "read_once":
            kept = np.concatenate([scores[:, None].cpu().numpy(), boxes.cpu().numpy()], 1)
            return [one[1:] for one in kept if one[0] > 0.1]
        return [boxes[place].cpu().numpy() for place in range(most) if scores[place] > 0.1]

    def results():
        if change == "at_once":
            yield from zip(*found(video), strict=True)
        else:
            for frame in video:
                scores, boxes = found([frame])
                yield scores[0], boxes[0]

    def step():
        counts, sums = [], []
        if change == "thread":
            waiting = queue.SimpleQueue()

            def follow():
                for _ in video:
                    counts.append(tracks.follow(waiting.get()))

            worker = threading.Thread(target=follow)
            worker.start()
            for scores, boxes in results():
                waiting.put(read(scores, boxes))
                sums.append(scores.sum())
            worker.join()
        else:
            for scores, boxes in results():
                counts.append(tracks.follow(read(scores, boxes)))
                sums.append(scores.sum())
        return torch.stack([*torch.tensor(counts).float().div(1000), *(one.cpu() for one in sums)])

    return step


def chosen_answers(change):
    """A language model is evaluated: the log-likelihood of each of four answers to a question, one after the other."""
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=size(32_000, 100), hidden_size=size(768, 32), intermediate_size=size(2048, 64),
        num_hidden_layers=size(6, 2), num_attention_heads=size(12, 2), num_key_value_heads=size(4, 2),
        max_position_embeddings=1024,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).to(torch.bfloat16).to(device).eval()
    chance = random.Random(0)

    def text(length):
        return [chance.randrange(3, config.vocab_size) for _ in range(length)]

    questions = [
        (text(length), [text(chance.randint(3, 12)) for _ in range(4)]) for length in (size(230, 7), size(170, 9))
    ]
    right = []

    def likelihood(logits, answer):
        """Return the sum of an answer's log-probabilities, from the logits that predict its tokens and those before."""
        chances = F.log_softmax(logits.float(), -1)[-len(answer) :]
        return chances.gather(-1, torch.tensor(answer, device=device)[:, None]).sum()

    def one_by_one(question, answers):
        for answer in answers:
            tokens = torch.tensor([(question + answer)[:-1]], device=device)
            how = {"logits_to_keep": len(answer)} if change == "answer_logits" else {}
            found = likelihood(model(tokens, use_cache=False, **how).logits[0], answer)
            yield found if change == "no_item" else found.item()

    def at_once(question, answers):
        texts = [(question + answer)[:-1] for answer in answers]
        longest = max(map(len, texts))
        tokens = torch.tensor([one + [0] * (longest - len(one)) for one in texts], device=device)
        mask = torch.tensor([[1] * len(one) + [0] * (longest - len(one)) for one in texts], device=device)
        logits = model(tokens, attention_mask=mask, use_cache=False).logits
        for row, one, answer in zip(logits, texts, answers, strict=True):
            yield likelihood(row[: len(one)], answer).item()

    def question_once(question, answers):
        cache = transformers.DynamicCache()
        before = model(torch.tensor([question], device=device), past_key_values=cache, logits_to_keep=1).logits[0]
        for answer in answers:
            logits = before
            if len(answer) > 1:
                tokens = torch.tensor([answer[:-1]], device=device)
                logits = torch.cat([before, model(tokens, past_key_values=cache).logits[0]])
                cache.crop(1 - len(answer))  # forget this answer
            yield likelihood(logits, answer).item()

    way = {"at_once": at_once, "question_once": question_once}.get(change, one_by_one)

    def step():
        every = []
        with torch.no_grad():
            for question, answers in questions:
                found = list(way(question, answers))
                if change == "no_item":
                    found = torch.stack(found).tolist()
                right.append(int(np.argmax([one / len(answer) for one, answer in zip(found, answers, strict=True)])))
                every += found
        return torch.tensor(every)

    return step


def deep_ensemble(change):
    """Ten small networks with their own optimizers learn a mean and a variance, one after the other, as an ensemble."""
    from torch.func import functional_call, stack_module_state, vmap

    members, count, inputs, width = size(10, 3), size(256, 8), 24, size(128, 8)
    models = [
        nn.Sequential(
            nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 2)
        ).to(device)
        for _ in range(members)
    ]  # fmt: skip
    adam = {"lr": 1e-3, "fused": change == "fused" or None, "capturable": change == "graph" and device.type == "cuda"}
    optimizers = [torch.optim.Adam(model.parameters(), **adam) for model in models]
    if change == "at_once":
        weights, _ = stack_module_state(models)
        optimizers = [torch.optim.Adam(weights.values(), **adam)]
    if change == "one_optimizer":
        optimizers = [torch.optim.Adam([one for model in models for one in model.parameters()], **adam)]
    x = torch.randn(2000, inputs, device=device)
    y = x[:, :1].sin() + 0.1 * torch.randn(2000, 1, device=device)
    rows = torch.randint(0, 2000, (members, count), device=device)  # each member has a sample of its own
    log = []

    def error(found, y):
        mean, raw = found.chunk(2, -1)
        variance = F.softplus(raw) + 1e-6
        return (0.5 * variance.log() + 0.5 * (y - mean) ** 2 / variance).mean()

    def of_one(weights, x, y):
        return error(functional_call(models[0], weights, (x,)), y)

    def update():
        if change == "at_once":
            losses = vmap(of_one)(weights, x[rows], y[rows])
            optimizers[0].zero_grad()
            losses.sum().backward()
            optimizers[0].step()
            return losses.detach().mean()
        losses = []
        if change == "one_optimizer":
            optimizers[0].zero_grad()
        for member, model in enumerate(models):
            loss = error(model(x[rows[member]]), y[rows[member]])
            if change == "one_optimizer":
                loss.backward()
            else:
                optimizers[member].zero_grad()
                loss.backward()
                optimizers[member].step()
            losses.append(loss.detach())
        if change == "one_optimizer":
            optimizers[0].step()
        return torch.stack(losses).mean()

    update = graphed(update) if change == "graph" else update

    def step():
        loss = update()
        log.append(loss.clone() if change == "no_item" else loss.item())
        return loss

    return step


def conflicting_tasks(change):
    """Three tasks on images share a network; PCGrad projects each task's gradient if it conflicts with another one."""
    width, count, high, wide = size(64, 8), size(8, 2), size(96, 16), size(128, 16)

    class Layer(nn.Sequential):
        def __init__(self, before, after, stride=1):
            super().__init__(nn.Conv2d(before, after, 3, stride, 1), nn.BatchNorm2d(after), nn.ReLU(inplace=True))

    trunk = nn.Sequential(
        Layer(3, width), Layer(width, width), Layer(width, 2 * width, 2), Layer(2 * width, 2 * width),
        Layer(2 * width, 4 * width, 2), Layer(4 * width, 4 * width), Layer(4 * width, 4 * width),
    )  # fmt: skip
    heads = nn.ModuleList(
        nn.Sequential(Layer(4 * width, width), nn.Upsample(scale_factor=4), nn.Conv2d(width, outs, 1))
        for outs in (13, 1, 3)
    )
    model = nn.ModuleList([trunk, heads]).to(device)
    images = torch.randn(count, 3, high, wide, device=device)
    if change == "channels_last":
        model, images = model.to(memory_format=torch.channels_last), images.to(memory_format=torch.channels_last)
    labels = torch.randint(0, 13, (count, high, wide), device=device)
    depth = torch.rand(count, 1, high, wide, device=device)
    normals = F.normalize(torch.randn(count, 3, high, wide, device=device), dim=1)
    parameters = list(model.parameters())
    optimizer = torch.optim.Adam(parameters, lr=1e-4, fused=change == "fused" or None)
    chance = random.Random(0)

    def errors():
        with torch.autocast(device.type, torch.bfloat16, enabled=change == "bf16"):
            h = trunk(images)
            classes, far, facing = (head(h).float() for head in heads)
        cosine = (F.normalize(facing, dim=1) * normals).sum(1)
        return [F.cross_entropy(classes, labels), (far - depth).abs().mean(), 1 - cosine.mean()]

    def gradients(losses):
        """Return the gradient of each task, flat, with zeros where a task does not depend on a parameter."""
        if change == "backward_at_once":
            every = torch.autograd.grad(
                torch.stack(losses), parameters, torch.eye(len(losses), device=device), is_grads_batched=True
            )
            return list(torch.cat([one.flatten(1) for one in every], 1))
        found = []
        for loss in losses:
            optimizer.zero_grad(set_to_none=True)
            loss.backward(retain_graph=True)
            grads = [torch.zeros_like(one) if one.grad is None else one.grad.clone() for one in parameters]
            found.append(torch.cat([one.flatten() for one in grads]))
        return found

    def projected(found):
        changed = [one.clone() for one in found]
        for mine in changed:
            chance.shuffle(found)
            for other in found:
                dot = torch.dot(mine, other)
                if change == "no_branch":
                    mine -= dot.clamp(max=0) * other / other.norm() ** 2
                elif dot < 0:
                    mine -= dot * other / (other.norm() ** 2)
        return torch.stack(changed).sum(0)

    def step():
        losses = errors()
        total = projected(gradients(losses))
        optimizer.zero_grad(set_to_none=True)
        start = 0
        for one in parameters:
            one.grad = total[start : start + one.numel()].view_as(one).clone()
            start += one.numel()
        optimizer.step()
        return sum(losses)

    return step


def sound_codec(change):
    """A codec of sound with residual vector quantization is trained; its author looked for a NaN and left that on."""
    if change == "tf32":
        use_tf32()
    width, codes, books, wide = size(32, 4), size(1024, 16), size(8, 2), size(128, 8)
    clips, length = size(8, 2), size(24_000, 1280)

    def conv(before, after, kernel, **how):
        return nn.utils.parametrizations.weight_norm(nn.Conv1d(before, after, kernel, **how))

    class Residual(nn.Module):
        def __init__(self, wide, dilation):
            super().__init__()
            self.layers = nn.Sequential(
                nn.ELU(),
                conv(wide, wide // 2, 3, dilation=dilation, padding=dilation),
                nn.ELU(),
                conv(wide // 2, wide, 1),
            )

        def forward(self, x):
            return x + self.layers(x)

    def encoder():
        layers, now = [conv(1, width, 7, padding=3)], width
        for stride in (2, 4, 5, 8):
            layers += [Residual(now, 1), nn.ELU(), conv(now, 2 * now, 2 * stride, stride=stride, padding=stride // 2)]
            now *= 2
        return nn.Sequential(*layers, nn.ELU(), conv(now, wide, 3, padding=1))

    def decoder():
        layers, now = [conv(wide, 16 * width, 3, padding=1)], 16 * width
        for stride in (8, 5, 4, 2):
            up = nn.ConvTranspose1d(now, now // 2, 2 * stride, stride, padding=stride // 2)
            layers += [nn.ELU(), nn.utils.parametrizations.weight_norm(up), Residual(now // 2, 1)]
            now //= 2
        return nn.Sequential(*layers, nn.ELU(), conv(now, 1, 7, padding=3))

    class Codebook(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("words", torch.randn(codes, wide) * 0.1)
            self.register_buffer("sums", self.words.clone())
            self.register_buffer("counts", torch.ones(codes))

        def forward(self, x):
            flat = x.reshape(-1, wide)
            far = (
                flat.pow(2).sum(1, keepdim=True)
                - 2 * flat @ self.words.t()
                + self.words.t().pow(2).sum(0, keepdim=True)
            )
            chosen = far.argmin(-1)
            found = F.embedding(chosen, self.words).view_as(x)
            self.learn(flat, chosen)
            return x + (found - x).detach(), F.mse_loss(x, found.detach())

        @torch.no_grad()
        def learn(self, flat, chosen):
            if change == "index_add":
                counts = torch.zeros_like(self.counts).index_add_(0, chosen, torch.ones_like(flat[:, 0]))
                sums = torch.zeros_like(self.sums).index_add_(0, chosen, flat)
            else:
                one_hot = F.one_hot(chosen, codes).type(flat.dtype)
                counts, sums = one_hot.sum(0), one_hot.t() @ flat
            self.counts.mul_(0.99).add_(counts, alpha=0.01)
            self.sums.mul_(0.99).add_(sums, alpha=0.01)
            smooth = (self.counts + 1e-5) / (self.counts.sum() + codes * 1e-5) * self.counts.sum()
            self.words.copy_(self.sums / smooth.unsqueeze(1))
            unused = self.counts < 0.5
            if change == "no_check" or torch.any(unused):
                drawn = flat[torch.randint(0, len(flat), (codes,), device=device)]
                self.words.copy_(torch.where(unused[:, None], drawn, self.words))
                self.sums.copy_(torch.where(unused[:, None], drawn, self.sums))
                self.counts.masked_fill_(unused, 1.0)

    encode, decode = encoder().to(device), decoder().to(device)
    quantizers = nn.ModuleList(Codebook() for _ in range(books)).to(device)
    optimizer = torch.optim.Adam(
        [*encode.parameters(), *decode.parameters()], lr=3e-4, betas=(0.5, 0.9), fused=change == "fused" or None
    )
    windows = [torch.hann_window(2**power, device=device) for power in range(6, 11)]
    sound = torch.randn(clips, 1, length, device=device) * 0.1

    def spectrum(x, window):
        reach = len(window)
        return torch.stft(x.squeeze(1), reach, reach // 4, window=window, normalized=True, return_complex=True).abs()

    def step():
        with torch.autograd.set_detect_anomaly(change != "no_anomaly_detection"):
            h = encode(sound).transpose(1, 2)
            total, rest, commitment = 0.0, h, 0.0
            for quantizer in quantizers:
                found, loss = quantizer(rest)
                rest, total, commitment = rest - found.detach(), total + found, commitment + loss
            made = decode(total.transpose(1, 2))
            loss = F.l1_loss(made, sound[..., : made.shape[-1]]) + 0.25 * commitment / books
            for window in windows:
                mine, its = spectrum(made, window), spectrum(sound[..., : made.shape[-1]], window)
                loss = loss + F.l1_loss(mine, its) + F.mse_loss((mine + 1e-5).log(), (its + 1e-5).log())
            optimizer.zero_grad()
            loss.backward()
        optimizer.step()
        return loss

    return step


def knowledge_graph(change):
    """RotatE learns embeddings of a knowledge graph, with negative samples that the data set filters one by one."""
    entities, relations, wide, negatives = size(60_000, 100), size(500, 5), size(200, 4), size(128, 4)
    margin = 12.0
    chance = np.random.default_rng(0)
    triples = np.stack([chance.integers(0, many, size(40_000, 64)) for many in (entities, relations, entities)], 1)
    known = {}
    for head, relation, tail in triples.tolist():
        known.setdefault((head, relation), []).append(tail)
    known = {pair: np.array(tails) for pair, tails in known.items()}

    class Samples(torch.utils.data.Dataset):
        def __len__(self):
            return len(triples)

        def __getitem__(self, index):
            head, relation, tail = triples[index]
            found, count = [], 0
            while count < negatives:
                drawn = np.random.randint(entities, size=2 * negatives)
                drawn = drawn[np.isin(drawn, known[(int(head), int(relation))], invert=True)]
                found.append(drawn)
                count += drawn.size
            wrong = np.concatenate(found)[:negatives]
            return torch.LongTensor([int(head), int(relation), int(tail)]), torch.from_numpy(wrong)

    np.random.seed(0)
    workers = {"num_workers": size(4, 1), "persistent_workers": True} if change == "workers" else {}
    batches = endless(
        torch.utils.data.DataLoader(Samples(), batch_size=size(256, 8), shuffle=True, drop_last=True, **workers)
    )  # fmt: skip
    sparse = change == "sparse"
    of_entities = nn.Embedding(entities, 2 * wide, sparse=sparse).to(device)
    of_relations = nn.Embedding(relations, wide, sparse=sparse).to(device)
    if change == "index_select":
        gathered(of_entities, of_relations)
    reach = (margin + 2.0) / wide
    for one in (of_entities, of_relations):
        nn.init.uniform_(one.weight, -reach, reach)
    optimizer = torch.optim.Adagrad([*of_entities.parameters(), *of_relations.parameters()], lr=0.01)
    log = []

    def score(head, relation, tail):
        """Return the scores of triples; head and relation are (batch, 1, width), tail is (batch, samples, width)."""
        head_real, head_imaginary = head.chunk(2, -1)
        tail_real, tail_imaginary = tail.chunk(2, -1)
        phase = relation / (reach / torch.pi)
        real, imaginary = phase.cos(), phase.sin()
        real, imaginary = (
            head_real * real - head_imaginary * imaginary - tail_real,
            head_real * imaginary + head_imaginary * real - tail_imaginary,
        )
        return margin - torch.stack([real, imaginary]).norm(dim=0).sum(-1)

    score = compiled(score) if change == "compile" else score

    def step():
        right, wrong = next(batches)
        right, wrong = right.to(device), wrong.to(device)
        head, relation = of_entities(right[:, :1]), of_relations(right[:, 1:2])
        good, bad = score(head, relation, of_entities(right[:, 2:])), score(head, relation, of_entities(wrong))
        bad = (F.softmax(bad, 1).detach() * F.logsigmoid(-bad)).sum(1)
        good_loss, bad_loss = -F.logsigmoid(good).squeeze(1).mean(), -bad.mean()
        loss = (good_loss + bad_loss) / 2
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        figures = [good_loss.detach(), bad_loss.detach(), loss.detach()]
        log.append(figures if change == "no_item" else [one.item() for one in figures])
        return loss

    return step


def smoke_solver(change):
    """Smoke is simulated in float64: grid_sample moves it on a grid, and Jacobi steps find its pressure."""
    dtype = torch.float32 if change == "float32" else torch.float64
    side, most, time = size(256, 16), size(60, 6), 0.2
    scenes = 2 if change == "scenes_x2" else 1
    axis = torch.linspace(-1, 1, side, dtype=dtype, device=device)
    grid = torch.stack(torch.meshgrid(axis, axis, indexing="xy"), -1)[None]
    smoke = torch.zeros(scenes, 1, side, side, dtype=dtype, device=device)
    source = torch.exp(-(grid[..., 0] ** 2 + (grid[..., 1] - 0.7) ** 2) / 0.01)[:, None]
    state = {"smoke": smoke, "speed": torch.zeros(scenes, 2, side, side, dtype=dtype, device=device)}
    stencil = torch.tensor([[0.0, 1, 0], [1, 0, 1], [0, 1, 0]], dtype=dtype, device=device)[None, None]

    def around(x):
        """Return the sum of the four neighbors of each cell; the grid is periodic."""
        if change == "convolution":
            return F.conv2d(F.pad(x, (1, 1, 1, 1), mode="circular"), stencil)
        return torch.roll(x, 1, 2) + torch.roll(x, -1, 2) + torch.roll(x, 1, 3) + torch.roll(x, -1, 3)

    def iterated(pressure, spread):
        following = (around(pressure) - spread) / 4
        return following, (following - pressure).abs().max()

    iterated = compiled(iterated) if change == "compile" else iterated

    def advect(x, speed):
        back = grid - speed.permute(0, 2, 3, 1) * (2 * time / side)
        return F.grid_sample(x, back, mode="bilinear", padding_mode="border", align_corners=True)

    def slope(x, dim):
        return (torch.roll(x, -1, dim) - torch.roll(x, 1, dim)) / 2

    @torch.no_grad()
    def step():
        speed = state["speed"]
        smoke = (advect(state["smoke"], speed) + 0.1 * source).clamp(max=1.0)
        speed = 0.99 * advect(speed, speed)
        speed[:, 1:] -= 0.5 * smoke * time
        spread = slope(speed[:, :1], 3) + slope(speed[:, 1:], 2)
        pressure = torch.zeros_like(spread)
        for iteration in range(most):
            pressure, moved = iterated(pressure, spread)
            if (change != "check_rarely" or iteration % 10 == 9) and moved.item() < 1e-8:
                break
        state["smoke"] = smoke
        state["speed"] = speed - torch.cat([slope(pressure, 3), slope(pressure, 2)], 1)
        return smoke[0, 0].sum(1)

    return step


def passage_ranker(change):
    """A BERT in fp32 scores ten passages for a question, one after the other, and the best one is kept."""
    import transformers

    config = transformers.BertConfig(
        vocab_size=size(30_000, 100), hidden_size=size(384, 16), num_hidden_layers=size(6, 1),
        num_attention_heads=size(6, 2), intermediate_size=size(1536, 32), num_labels=1,
    )  # fmt: skip
    model = transformers.BertForSequenceClassification(config).to(device).eval()
    chance = random.Random(1)
    texts = [
        [chance.randrange(5, config.vocab_size) for _ in range(chance.randint(size(60, 5), size(220, 9)))]
        for _ in range(size(10, 8))
    ]

    @torch.no_grad()
    def step():
        if change == "at_once":
            longest = max(map(len, texts))
            tokens = torch.tensor([one + [0] * (longest - len(one)) for one in texts], device=device)
            mask = torch.tensor([[1] * len(one) + [0] * (longest - len(one)) for one in texts], device=device)
            scores = model(tokens, attention_mask=mask).logits[:, 0].tolist()
        else:
            found = (model(torch.tensor([one], device=device)).logits[0, 0] for one in texts)
            scores = torch.stack(list(found)).tolist() if change == "read_later" else [one.item() for one in found]
        return torch.tensor(max(scores))

    if change == "tf32":
        use_tf32()
    return step


def spoken_words(change):
    """Clips of different lengths are classified one after the other by convolutions and a small transformer."""
    width = size(192, 16)
    ears = nn.Sequential(nn.Conv1d(1, width, 400, 160), nn.GELU(), nn.Conv1d(width, width, 3, 2), nn.GELU()).to(device)
    layer = nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False).to(device).eval()
    head = nn.Linear(width, 35).to(device)
    chance = random.Random(2)
    clips = [torch.randn(1, chance.randint(size(16_000, 2000), size(48_000, 4000))) for _ in range(size(12, 8))]
    if change == "pinned":
        clips = [one.pin_memory() if device.type == "cuda" else one for one in clips]

    def classes(clips, hidden):
        heard = encoder(ears(clips[:, None]).transpose(1, 2), src_key_padding_mask=hidden)
        if hidden is None:
            return head(heard.mean(1)).log_softmax(-1)
        kept = (~hidden)[..., None]
        return head((heard * kept).sum(1) / kept.sum(1)).log_softmax(-1)

    @torch.no_grad()
    def step():
        if change == "at_once":
            padded = nn.utils.rnn.pad_sequence([one[0] for one in clips], batch_first=True)
            frames = torch.tensor([((one.shape[1] - 400) // 160 + 1 - 3) // 2 + 1 for one in clips])
            hidden = torch.arange(int(frames.max()))[None] >= frames[:, None]
            return classes(padded.to(device), hidden.to(device)).max(-1).values.cpu()
        found = [classes(one.to(device, non_blocking=change == "pinned"), None)[0].max() for one in clips]
        if change == "read_later":
            return torch.stack(found).cpu()
        return torch.tensor([one.item() for one in found])

    if change == "tf32":
        use_tf32()
    return step


PROGRAMS = {
    radiance_field: {"tf32": "tf32", "bf16": "half_precision", "pixels_on_gpu": "python", "no_item": "remove_sync",
                     "encode_at_once": "larger_batch"},
    point_clouds: {"minimum": "remove_sync", "topk": "largest_first", "batch_x2": ("double_batch", 2),
                   "bf16": "half_precision", "fused": "fused_optimizer"},
    mesh_simulator: {"tf32": "tf32", "bf16": "half_precision", "split_product": "", "fused": "fused_optimizer",
                     "count_in_python": "remove_sync", "index_select": "index_select"},
    object_tracker: {"read_once": "remove_sync", "at_once": "larger_batch", "filters_at_once": "",
                     "thread": "python", "half": "half_precision"},
    chosen_answers: {"at_once": "larger_batch", "question_once": "", "answer_logits": "",
                     "no_item": "remove_sync"},
    deep_ensemble: {"at_once": "larger_batch", "one_optimizer": "", "fused": "fused_optimizer", "graph": "cuda_graph",
                    "no_item": "remove_sync"},
    conflicting_tasks: {"no_branch": "remove_sync", "backward_at_once": "larger_batch", "bf16": "half_precision",
                        "channels_last": "channels_last", "fused": "fused_optimizer"},
    sound_codec: {"no_anomaly_detection": "anomaly_detection", "no_check": "remove_sync", "index_add": "",
                  "tf32": "tf32", "fused": "fused_optimizer"},
    knowledge_graph: {"index_select": "index_select", "workers": "data_loader", "sparse": "sparse_gradients",
                      "compile": "fuse_pointwise",
                      "no_item": "remove_sync"},
    smoke_solver: {"check_rarely": "remove_sync", "float32": "single_precision", "convolution": "",
                   "compile": "fuse_pointwise", "scenes_x2": ("double_batch", 2)},
    passage_ranker: {"at_once": "larger_batch", "read_later": "remove_sync", "tf32": "tf32"},
    spoken_words: {"at_once": "larger_batch", "pinned": "overlap_copies", "read_later": "remove_sync", "tf32": "tf32"},
}  # fmt: skip
