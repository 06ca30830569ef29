"""Programs behind products: a recommender, video matting, reading texts, tagging words, faces, and forecasts."""

import itertools
import math
import random

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from setting import device, gathered, graphed, size, use_tf32
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import weight_norm


def two_towers(change):
    """A recommender learns from clicks: each categorical feature has its own table, other items are the negatives."""
    if change == "tf32":
        use_tf32()
    rows, width, batch = size(200_000, 300), size(64, 8), size(4096, 16)
    user_side = ("user", "country", "city", "phone", "age", "last_item", "last_shop")
    item_side = ("item", "shop", "brand", "category", "price_range")

    class Tower(nn.Module):
        def __init__(self, names):
            super().__init__()
            self.names = names
            tables = {name: nn.Embedding(rows, width, sparse=change == "sparse", device=device) for name in names}
            if change == "one_table":
                together = torch.cat([one.weight.detach() for one in tables.values()])
                self.table = nn.Embedding.from_pretrained(together, freeze=False)
                self.register_buffer("offsets", rows * torch.arange(len(names)))
            else:
                self.tables = nn.ModuleDict(tables)
            self.layers = nn.Sequential(
                nn.Linear(len(names) * width, 8 * width), nn.ReLU(), nn.Linear(8 * width, 4 * width), nn.ReLU(),
                nn.Linear(4 * width, 2 * width),
            )  # fmt: skip

        def forward(self, features):
            if change == "one_table":
                found = self.table(torch.stack([features[name] for name in self.names], 1) + self.offsets).flatten(1)
            else:
                found = torch.cat([self.tables[name](features[name]) for name in self.names], -1)
            return F.normalize(self.layers(found), dim=-1)

    users, items = Tower(user_side).to(device), Tower(item_side).to(device)
    if change == "index_select":
        gathered(users, items)
    everything = dict(itertools.chain(users.named_parameters("users"), items.named_parameters("items")))
    if change == "sparse":
        tables = [one for name, one in everything.items() if "tables" in name]
        others = [one for name, one in everything.items() if "tables" not in name]
        optimizers = [torch.optim.SparseAdam(tables, lr=1e-3), torch.optim.Adam(others, lr=1e-3)]
    else:
        optimizers = [torch.optim.Adam(everything.values(), lr=1e-3, fused=change == "fused" or None)]
    chance = torch.Generator().manual_seed(1)
    clicks = {name: (torch.rand(batch, generator=chance) ** 3 * rows).long() for name in user_side + item_side}
    figures = {"loss": [], "first_place": []}

    def step():
        features = {name: ids.to(device) for name, ids in clicks.items()}
        scores = users(features) @ items(features).T / 0.05
        labels = torch.arange(batch, device=device)
        loss = F.cross_entropy(scores, labels)
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        figures["loss"].append(loss.item())
        figures["first_place"].append((scores.argmax(1) == labels).float().mean().item())
        return loss

    return step


def block(before, after, stride=1):
    return nn.Sequential(nn.Conv2d(before, after, 3, stride, 1, bias=False), nn.BatchNorm2d(after), nn.ReLU(True))


class Residual(nn.Sequential):
    def forward(self, x):
        return x + super().forward(x)


def video_matting(change):
    """A recurrent network finds the person in each frame: small frames first, and a refiner for the full size."""
    tall, wide, small, base = size(720, 32), size(1280, 64), (size(288, 16), size(512, 32)), size(32, 4)
    kind = torch.float16 if change == "half" else torch.float32

    class Memory(nn.Module):
        def __init__(self, wide):
            super().__init__()
            self.gates, self.new = nn.Conv2d(2 * wide, 2 * wide, 3, 1, 1), nn.Conv2d(2 * wide, wide, 3, 1, 1)
            self.state = None

        def forward(self, x):
            h = torch.zeros_like(x) if self.state is None else self.state
            reset, update = torch.sigmoid(self.gates(torch.cat([x, h], 1))).chunk(2, 1)
            new = torch.tanh(self.new(torch.cat([x, reset * h], 1)))
            self.state = (1 - update) * h + update * new
            return self.state

    wides = [3, base, 2 * base, 4 * base, 8 * base]
    stages = nn.ModuleList(block(before, after, 2) for before, after in itertools.pairwise(wides))
    for stage, wide_one in zip(stages, wides[1:], strict=True):
        stage.extend(Residual(block(wide_one, wide_one), block(wide_one, wide_one)) for _ in range(3))
    ups = nn.ModuleList(nn.Sequential(block(3 * one, one), Memory(one)) for one in wides[3:0:-1])
    refine = nn.Sequential(block(base + 3, base), block(base, base), nn.Conv2d(base, 1, 3, 1, 1))
    nn.ModuleList([stages, ups, refine]).to(device, kind).eval()
    clip = list(torch.randint(0, 256, (8, tall, wide, 3), dtype=torch.uint8))
    places = torch.empty(8, tall, wide)
    if change == "pinned" and device.type == "cuda":
        clip, places = [one.pin_memory() for one in clip], places.pin_memory()

    def prepared(frame):
        return frame.to(device, non_blocking=change == "pinned").permute(2, 0, 1)[None].to(kind) / 255

    def encode(frames):
        found = [F.interpolate(frames, size=small, mode="bilinear", align_corners=False)]
        for stage in stages:
            found.append(stage(found[-1]))
        return found[1:]

    @torch.no_grad()
    def step():
        masks, pairs = [], ((x, encode(x)) for x in map(prepared, clip))
        if change == "encode_at_once":
            frames = torch.cat([prepared(frame) for frame in clip])
            pairs = zip(frames.split(1), zip(*(one.split(1) for one in encode(frames)), strict=True), strict=True)
        for place, (x, (*others, h)) in enumerate(pairs):
            for up, level in zip(ups, others[::-1], strict=True):
                h = up(torch.cat([F.interpolate(h, scale_factor=2, mode="bilinear"), level], 1))
            h = F.interpolate(h, size=(tall, wide), mode="bilinear", align_corners=False)
            alpha = torch.sigmoid(refine(torch.cat([h, x], 1)))[0, 0].float()
            if change == "pinned":
                places[place].copy_(alpha, non_blocking=True)
            else:
                masks.append((alpha * 255).byte().cpu() if change == "bytes_on_gpu" else (alpha.cpu() * 255).byte())
        if change == "pinned":
            torch.cuda.synchronize() if device.type == "cuda" else None
            masks = [(one * 255).byte() for one in places]
        return torch.stack(masks)

    return step


def text_reader(change):
    """A CRNN learns to read words in pictures, and reads each picture of the batch to log how many are right."""
    letters, blank = "-abcdefghijklmnopqrstuvwxyz0123456789", 0
    batch, base = size(64, 4) * (2 if change == "batch_x2" else 1), size(64, 4)

    layers, before = [], 1
    halved, flat = nn.MaxPool2d(2, 2), nn.MaxPool2d((2, 2), (2, 1), (0, 1))
    for place, wide in enumerate((1, 2, 4, 4, 8, 8, 8)):
        layers.append(nn.Conv2d(before, wide * base, 2 if place == 6 else 3, 1, 0 if place == 6 else 1))
        layers += [nn.BatchNorm2d(wide * base)] if place in (2, 4, 6) else []
        layers += [nn.ReLU(True), {0: halved, 1: halved, 3: flat, 5: flat}.get(place, nn.Identity())]
        before = wide * base
    eyes, between = nn.Sequential(*layers), nn.Linear(8 * base, 4 * base)
    first, second = (nn.LSTM(wide * base, 4 * base, bidirectional=True) for wide in (8, 4))
    head = nn.Linear(8 * base, len(letters))
    model = nn.ModuleList([eyes, first, between, second, head]).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, betas=(0.5, 0.999), fused=change == "fused" or None)
    lost = nn.CTCLoss(blank=blank, zero_infinity=True)
    chance = random.Random(3)
    words = ["".join(chance.choices(letters[1:], k=chance.randint(4, 10))) for _ in range(batch)]
    numbers = [torch.tensor([letters.index(one) for one in word]) for word in words]
    targets = nn.utils.rnn.pad_sequence(numbers, batch_first=True).to(device)
    lengths = torch.tensor([len(word) for word in words])
    counts = lengths.to(device)
    pictures = torch.randn(batch, 1, 32, size(128, 96), generator=torch.Generator().manual_seed(3))
    right = []

    def read(scores):
        indices = torch.unique_consecutive(scores.argmax(-1))
        return "".join(letters[one] for one in indices if one != blank)

    def accuracy(scores):
        if change == "decode_at_once":
            best, room = scores.argmax(-1), scores.shape[1]
            kept = best != blank
            kept[:, 1:] &= best[:, 1:] != best[:, :-1]
            places = torch.where(kept, kept.cumsum(1) - 1, room)
            found = torch.zeros(batch, room + 1, dtype=torch.long, device=device).scatter(1, places, best)
            same = (found[:, : targets.shape[1]] == targets).all(1) & (kept.sum(1) == counts)
            return same.float().mean().item()
        if change == "decode_on_cpu":
            best = scores.argmax(-1).tolist()
            found = ["".join(letters[one] for one, _ in itertools.groupby(row) if one != blank) for row in best]
        else:
            found = [read(scores[place]) for place in range(batch)]
        return sum(one == word for one, word in zip(found, words, strict=True)) / batch

    def step():
        seen = eyes(pictures.to(device)).squeeze(2).permute(2, 0, 1)
        scores = head(second(between(first(seen)[0]))[0])
        times = torch.full((batch,), len(scores), dtype=torch.long)
        loss = lost(scores.log_softmax(2), targets, times, lengths)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        right.append((loss.item(), accuracy(scores.detach().transpose(0, 1))))
        return loss

    return step


def chain_product(steps):
    """Return the product of matrices of logarithms: products of pairs, of pairs of these products, and so on."""
    while len(steps) > 1:
        pairs = len(steps) // 2
        both = steps[0 : 2 * pairs : 2, ..., None] + steps[1 : 2 * pairs : 2, :, None]
        steps = torch.cat([torch.logsumexp(both, -2), steps[2 * pairs :]])
    return steps[0]


def crf_tagger(change):
    """A transformer and a linear-chain CRF learn to tag words. Its normalizer goes through the sentences in a loop."""
    words, width, batch, length, tags = size(20_000, 50), size(256, 16), size(32, 4), size(64, 8), size(17, 5)

    begin, end, moves = (
        nn.Parameter(torch.rand(shape, device=device) * 0.2 - 0.1) for shape in (tags, tags, (tags, tags))
    )

    def score_of(emissions, labels, mask):
        every, kept = torch.arange(batch, device=device), mask.float()
        score = begin[labels[0]] + end[labels[mask.long().sum(0) - 1, every]]
        if change == "score_at_once":
            score = score + (emissions.gather(2, labels[:, :, None])[:, :, 0] * kept).sum(0)
            return score + (moves[labels[:-1], labels[1:]] * kept[1:]).sum(0)
        score = score + emissions[0, every, labels[0]]
        for place in range(1, length):
            score = score + moves[labels[place - 1], labels[place]] * kept[place]
            score = score + emissions[place, every, labels[place]] * kept[place]
        return score

    def normalizer(emissions, mask):
        score = begin + emissions[0]
        if change == "tree":
            still = torch.full((tags, tags), -1e4, device=device).fill_diagonal_(0.0)
            steps = torch.where(mask[1:, :, None, None], moves + emissions[1:, :, None], still)
            return torch.logsumexp(torch.logsumexp(score[:, :, None] + chain_product(steps), 1) + end, 1)
        if change == "unbind":
            emissions, mask = emissions.unbind(0), mask.unbind(0)
        for place in range(1, length):
            found = torch.logsumexp(score[:, :, None] + moves + emissions[place][:, None], 1)
            score = torch.where(mask[place][:, None], found, score)
        return torch.logsumexp(score + end, 1)

    layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.1, batch_first=True)
    body = nn.ModuleDict({
        "words": nn.Embedding(words, width), "places": nn.Embedding(length, width),
        "encoder": nn.TransformerEncoder(layer, 4, enable_nested_tensor=False), "head": nn.Linear(width, tags),
    }).to(device)  # fmt: skip
    parameters = [*body.parameters(), begin, end, moves]
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, capturable=change == "graph" and device.type == "cuda")
    chance = torch.Generator().manual_seed(4)
    sentences = torch.randint(0, words, (batch, length), generator=chance).to(device)
    labels = torch.randint(0, tags, (batch, length), generator=chance).to(device)
    mask = (torch.arange(length) < torch.randint(length // 3, length + 1, (batch, 1), generator=chance)).to(device)

    def update():
        x = body["words"](sentences) + body["places"](torch.arange(length, device=device))
        emissions = body["head"](body["encoder"](x, src_key_padding_mask=~mask)).transpose(0, 1)
        loss = (normalizer(emissions, mask.T) - score_of(emissions, labels.T, mask.T)).mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        return loss

    losses, updated = [], graphed(update) if change == "graph" else update

    def step():
        loss = updated()
        losses.append(loss.item())
        return loss

    return step


class FaceBlock(nn.Module):
    def __init__(self, before, after, stride):
        super().__init__()
        self.layers = nn.Sequential(
            nn.BatchNorm2d(before), nn.Conv2d(before, after, 3, 1, 1, bias=False), nn.BatchNorm2d(after),
            nn.PReLU(after), nn.Conv2d(after, after, 3, stride, 1, bias=False), nn.BatchNorm2d(after),
        )  # fmt: skip
        self.short = nn.Identity()
        if stride != 1:
            self.short = nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after))

    def forward(self, x):
        return self.layers(x) + self.short(x)


def face_verification(change):
    """An IResNet-50 learns to tell faces apart: ArcFace with very many persons, mixed precision and a GradScaler."""
    if change == "benchmark":
        torch.backends.cudnn.benchmark = True
    batch, base, persons, wide = size(128, 4), size(64, 4), size(100_000, 50), size(512, 16)
    kind = torch.float16 if device.type == "cuda" else torch.bfloat16

    person = nn.Parameter(nn.init.xavier_uniform_(torch.empty(persons, wide, device=device)))
    scale, margin = 30.0, 0.5

    def turned(cosine):
        sine = torch.sqrt((1.0 - torch.pow(cosine, 2)).clamp(0, 1))
        phi = cosine * math.cos(margin) - sine * math.sin(margin)
        return torch.where(cosine > math.cos(math.pi - margin), phi, cosine - math.sin(math.pi - margin) * margin)

    def arc_face(faces):
        cosine = F.linear(F.normalize(faces), F.normalize(person))
        if change == "margin_of_target":
            target = turned(cosine.gather(1, labels[:, None]))
            return cosine.float().scatter(1, labels[:, None], target.float()) * scale
        one_hot = torch.zeros(cosine.shape, device=device)
        one_hot.scatter_(1, labels.view(-1, 1).long(), 1)
        return (one_hot * turned(cosine) + (1.0 - one_hot) * cosine) * scale

    layers, before = [nn.Conv2d(3, base, 3, 1, 1, bias=False), nn.BatchNorm2d(base), nn.PReLU(base)], base
    for after, count in ((base, 3), (2 * base, 4), (4 * base, 14), (8 * base, 3)):
        for place in range(size(count, 1)):
            layers.append(FaceBlock(before, after, 2 if place == 0 else 1))
            before = after
    layers += [nn.BatchNorm2d(before), nn.Flatten(), nn.Linear(before * 49, wide), nn.BatchNorm1d(wide)]
    backbone = nn.Sequential(*layers).to(device)
    images = torch.randn(batch, 3, 112, 112, generator=torch.Generator().manual_seed(5))
    labels = torch.randint(0, persons, (batch,), generator=torch.Generator().manual_seed(5)).to(device)
    images = images.pin_memory() if device.type == "cuda" else images
    if change == "channels_last":
        backbone = backbone.to(memory_format=torch.channels_last)
    parameters = [*backbone.parameters(), person]
    fused = change == "fused" or None
    optimizer = torch.optim.SGD(parameters, lr=0.02, momentum=0.9, weight_decay=5e-4, fused=fused)
    scaler = torch.amp.GradScaler(device.type, enabled=device.type == "cuda")
    losses = []

    def step():
        x = images.to(device, non_blocking=True)
        if change == "channels_last":
            x = x.contiguous(memory_format=torch.channels_last)
        optimizer.zero_grad()
        with torch.autocast(device.type, kind):
            loss = F.cross_entropy(arc_face(backbone(x)), labels)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
        return loss

    return step


def sales_forecast(change):
    """A temporal convolutional network forecasts the sales of shops, with dropout in 30 passes for an uncertainty."""
    shops, days, inputs, width, ahead, passes = 50, size(180, 40), 6, size(64, 8), 28, 30

    class Level(nn.Module):
        def __init__(self, before, apart):
            super().__init__()
            self.apart = 2 * apart
            self.first = weight_norm(nn.Conv1d(before, width, 3, padding=2 * apart, dilation=apart))
            self.second = weight_norm(nn.Conv1d(width, width, 3, padding=2 * apart, dilation=apart))
            self.drop_first, self.drop_second = nn.Dropout(0.2), nn.Dropout(0.2)
            self.short = nn.Conv1d(before, width, 1) if before != width else None

        def forward(self, x):
            h = self.drop_first(F.relu(self.first(x)[:, :, : -self.apart].contiguous()))
            h = self.drop_second(F.relu(self.second(h)[:, :, : -self.apart].contiguous()))
            return F.relu(h + (x if self.short is None else self.short(x)))

    class Forecaster(nn.Module):
        def __init__(self):
            super().__init__()
            self.levels = nn.Sequential(*(Level(width if place else inputs, 2**place) for place in range(4)))
            self.head = nn.Linear(width, ahead)

        def forward(self, x):
            return self.head(self.levels(x)[:, :, -1])

    model = Forecaster().to(device)
    if change == "fold_weights":
        for level in model.levels:
            for layer in (level.first, level.second):
                parametrize.remove_parametrizations(layer, "weight")
    sales = np.random.default_rng(6).gamma(2.0, 50.0, (shops, inputs, days)).astype(np.float32)
    middle, spread = sales[:, :1].mean(2), sales[:, :1].std(2)
    past = torch.from_numpy((sales - sales.mean(2, keepdims=True)) / sales.std(2, keepdims=True)).to(device)

    def one_pass():
        return model(past)

    model.train()  # dropout stays on
    forecast = graphed(one_pass) if change == "graph" else one_pass

    def step():
        with torch.set_grad_enabled(change != "no_grad"):
            if change == "at_once":
                found = model(past.repeat(passes, 1, 1)).view(passes, shops, ahead).detach().cpu().numpy()
                samples = found * spread + middle
            else:
                samples = []
                for _ in range(passes):
                    samples.append(forecast().detach().cpu().numpy() * spread + middle)
        samples = np.stack(samples)
        return torch.from_numpy(np.stack([samples.mean(0), samples.var(0)]))

    return step


PROGRAMS = {
    two_towers: {"index_select": "index_select", "fused": "fused_optimizer", "one_table": "larger_batch",
                 "sparse": "sparse_gradients", "tf32": "tf32"},
    video_matting: {"half": "half_precision", "encode_at_once": "loop_inputs", "bytes_on_gpu": "python",
                    "pinned": "overlap_copies"},
    text_reader: {"decode_on_cpu": "remove_sync", "decode_at_once": "larger_batch", "batch_x2": ("double_batch", 2),
                  "fused": "fused_optimizer"},
    crf_tagger: {"score_at_once": "larger_batch", "unbind": "unbind", "graph": "cuda_graph", "tree": ""},
    face_verification: {"channels_last": "channels_last", "fused": "fused_optimizer", "margin_of_target": "",
                        "benchmark": ""},
    sales_forecast: {"at_once": "larger_batch", "no_grad": "no_autograd", "fold_weights": "compute_once",
                     "graph": "cuda_graph"},
}  # fmt: skip
