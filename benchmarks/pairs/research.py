"""Programs in the manner of well-known research repositories: speech, contrasts, flow, policies, forces, experts."""

import math
import random

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from setting import compiled, device, graphed, size


def speech_decoder(change):
    """A decoder in the manner of Tacotron 2 learns speech frame by frame, and is given each true frame before."""
    batch, letters, frames = size(32, 2), size(80, 6), size(50, 4)
    text_width, width, mels, inner = size(512, 16), size(1024, 16), 80, size(128, 8)

    class Decoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.before = nn.ModuleList([nn.Linear(mels, width // 4), nn.Linear(width // 4, width // 4)])
            self.listener = nn.LSTMCell(width // 4 + text_width, width)
            self.speaker = nn.LSTMCell(width + text_width, width)
            self.query, self.key = nn.Linear(width, inner, bias=False), nn.Linear(text_width, inner, bias=False)
            self.place = nn.Conv1d(2, 32, 31, padding=15, bias=False)
            self.place_key, self.score = nn.Linear(32, inner, bias=False), nn.Linear(inner, 1, bias=False)
            self.frame, self.stop = nn.Linear(width + text_width, mels), nn.Linear(width + text_width, 1)

        def prenet(self, x):
            for layer in self.before:
                x = F.dropout(F.relu(layer(x)), 0.5, training=True)
            return x

        def attend(self, hidden, text, keys, weights, total, absent):
            place = self.place(torch.stack([weights, total], 1)).transpose(1, 2)
            keys = self.key(text) if keys is None else keys
            scores = self.score(torch.tanh(self.query(hidden)[:, None] + self.place_key(place) + keys)).squeeze(-1)
            weights = scores.masked_fill(absent, float("-inf")).softmax(-1)
            return torch.bmm(weights[:, None], text).squeeze(1), weights

        def forward(self, text, wanted, absent):
            h, c, h2, c2 = (torch.zeros(batch, width, device=device) for _ in range(4))
            weights, total = (torch.zeros(batch, letters, device=device) for _ in range(2))
            context = torch.zeros(batch, text_width, device=device)
            shown = torch.cat([torch.zeros(1, batch, mels, device=device), wanted.transpose(0, 1)[:-1]])
            heard = self.prenet(shown) if change == "at_once" else None
            keys = self.key(text) if change == "keys_once" else None
            spoken, stops = [], []
            for now in range(frames):
                entry = self.prenet(shown[now]) if heard is None else heard[now]
                h, c = self.listener(torch.cat([entry, context], -1), (h, c))
                h = F.dropout(h, 0.1, self.training)
                context, weights = self.attend(h, text, keys, weights, total, absent)
                total = total + weights
                h2, c2 = self.speaker(torch.cat([h, context], -1), (h2, c2))
                h2 = F.dropout(h2, 0.1, self.training)
                found = torch.cat([h2, context], -1)
                spoken.append(found if change == "at_once" else self.frame(found))
                stops.append(found if change == "at_once" else self.stop(found))
            spoken, stops = torch.stack(spoken, 1), torch.stack(stops, 1)
            if change == "at_once":
                spoken, stops = self.frame(spoken), self.stop(stops)
            return spoken, stops.squeeze(-1)

    model = Decoder().to(device)
    if change == "compile":
        model.attend, model.prenet = compiled(model.attend), compiled(model.prenet)
    optimizer = torch.optim.Adam(
        model.parameters(), lr=1e-3, weight_decay=1e-6, capturable=change == "graph" and device.type == "cuda"
    )
    batches = [torch.randn(batch, letters, text_width), torch.randn(batch, frames, mels), torch.zeros(batch, frames)]
    batches[2][:, -1] = 1.0
    lengths = torch.randint(letters // 2, letters + 1, (batch, 1))
    batches.append(torch.arange(letters) >= lengths)
    fixed = [one.to(device) for one in batches]
    log = []

    def update():
        text, wanted, ends, absent = fixed
        optimizer.zero_grad()
        spoken, stops = model(text, wanted, absent)
        loss = F.mse_loss(spoken, wanted) + F.binary_cross_entropy_with_logits(stops, ends)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.detach(), norm

    update = graphed(update) if change == "graph" else update

    def step():
        for place, new in zip(fixed, batches, strict=True):
            place.copy_(new)
        loss, norm = update()
        log.append((loss.item(), norm.item()))
        return loss

    return step


def momentum_contrast(change):
    """MoCo: two views of each image, an encoder that follows slowly, and a queue of negatives."""
    batch, side, crop, wide, queued = size(128, 4), 96, 64, size(64, 4), size(4096, 8)
    chance = random.Random(0)

    class Block(nn.Module):
        def __init__(self, before, after, stride):
            super().__init__()
            self.first = nn.Conv2d(before, after, 3, stride, 1, bias=False)
            self.second = nn.Conv2d(after, after, 3, 1, 1, bias=False)
            self.norms = nn.ModuleList([nn.BatchNorm2d(after), nn.BatchNorm2d(after)])
            self.short = nn.Identity()
            if stride != 1 or before != after:
                self.short = nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after))

        def forward(self, x):
            h = F.relu(self.norms[0](self.first(x)))
            return F.relu(self.norms[1](self.second(h)) + self.short(x))

    def encoder():
        layers, before = [nn.Conv2d(3, wide, 3, 1, 1, bias=False), nn.BatchNorm2d(wide), nn.ReLU()], wide
        for level in range(4):
            for place in range(2):
                layers.append(Block(before, wide * 2**level, 2 if level and not place else 1))
                before = wide * 2**level
        return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, 128))

    model, slow = encoder().to(device), encoder().to(device)
    slow.load_state_dict(model.state_dict())
    slow.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9, weight_decay=1e-4)
    photos = torch.randint(0, 256, (batch, 3, side, side), dtype=torch.uint8)
    queue = F.normalize(torch.randn(128, queued, device=device), dim=0)
    pointer = torch.zeros(1, dtype=torch.long, device=device)
    luma = torch.tensor([0.299, 0.587, 0.114], device=device).view(3, 1, 1)
    mean = torch.tensor([0.485, 0.456, 0.406], device=device).view(3, 1, 1)
    deviation = torch.tensor([0.229, 0.224, 0.225], device=device).view(3, 1, 1)
    fixed = [torch.zeros(batch, 3, crop, crop, device=device) for _ in range(2)]
    log = []

    def draw():
        """Return a crop's top, left, height and width, whether to flip, brightness, contrast, whether it is gray."""
        area, ratio = side * side * chance.uniform(0.2, 1.0), math.exp(chance.uniform(-0.28, 0.28))
        across, down = (min(side, round(math.sqrt(area * one))) for one in (ratio, 1 / ratio))
        top, left = chance.randint(0, side - down), chance.randint(0, side - across)
        light, contrast = chance.uniform(0.6, 1.4), chance.uniform(0.6, 1.4)
        return top, left, down, across, chance.random() < 0.5, light, contrast, chance.random() < 0.2

    def view(image):
        top, left, down, across, flip, light, contrast, gray = draw()
        image = image[None, :, top : top + down, left : left + across]
        image = F.interpolate(image, (crop, crop), mode="bilinear", align_corners=False)[0]
        if flip:
            image = image.flip(-1)
        image = (image * light).clamp(0, 1)
        middle = image.mean()
        image = (middle + (image - middle) * contrast).clamp(0, 1)
        if gray:
            image = (image * luma).sum(0, keepdim=True).expand(3, -1, -1)
        return (image - mean) / deviation

    def views(images):
        if change != "augment_at_once":
            return torch.stack([view(image) for image in images])
        drawn = torch.tensor([draw() for _ in images], dtype=torch.float32).to(device)
        top, left, down, across, flip, light, contrast, gray = drawn.T[..., None]
        places = (torch.arange(crop, device=device) + 0.5) / crop
        rows = top + (places * down - 0.5).clamp(min=0).minimum(down - 1)
        columns = torch.where(flip.bool(), 1 - places, places)
        columns = left + (columns * across - 0.5).clamp(min=0).minimum(across - 1)
        grid = torch.stack([columns[:, None].expand(-1, crop, -1), rows[..., None].expand(-1, -1, crop)], -1)
        images = F.grid_sample(images, (grid * 2 + 1) / side - 1, mode="bilinear", align_corners=False)
        images = (images * light[..., None, None]).clamp(0, 1)
        middle = images.mean((1, 2, 3), keepdim=True)
        images = (middle + (images - middle) * contrast[..., None, None]).clamp(0, 1)
        images = torch.where(gray.bool()[..., None, None], (images * luma).sum(1, keepdim=True), images)
        return (images - mean) / deviation

    def update():
        with torch.autocast(device.type, torch.bfloat16, enabled=change == "bf16"):
            queries = model(fixed[0])
        queries = F.normalize(queries.float(), dim=1)
        with torch.no_grad():
            if change == "foreach_average":
                torch._foreach_lerp_(list(slow.parameters()), list(model.parameters()), 0.001)
            else:
                for behind, ahead in zip(slow.parameters(), model.parameters(), strict=True):
                    behind.data = behind.data * 0.999 + ahead.data * 0.001
            with torch.autocast(device.type, torch.bfloat16, enabled=change == "bf16"):
                keys = slow(fixed[1])
            keys = F.normalize(keys.float(), dim=1)
        alike = torch.einsum("nc,nc->n", [queries, keys])[:, None]
        different = torch.einsum("nc,ck->nk", [queries, queue.clone().detach()])
        logits = torch.cat([alike, different], 1) / 0.2
        loss = F.cross_entropy(logits, torch.zeros(batch, dtype=torch.long, device=device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach(), keys

    def in_place():
        """Run update() so that it can be captured: the slow encoder's parameters keep their memory."""
        homes = [one.data for one in slow.parameters()]
        found = update()
        for home, behind in zip(homes, slow.parameters(), strict=True):
            home.copy_(behind.data)
            behind.data = home
        return found

    update_now = graphed(in_place) if change == "graph" else update

    def step():
        images = photos.to(device).float() / 255
        if change == "graph":
            for place in fixed:
                place.copy_(views(images))
        else:
            fixed[:] = [views(images), views(images)]
        loss, keys = update_now()
        at = int(pointer)
        queue[:, at : at + batch] = keys.T
        pointer[0] = (at + batch) % queued
        log.append(loss.item())
        return loss

    return step


def optical_flow(change):
    """RAFT learns optical flow: all pairs of features are compared, and a ConvGRU improves the flow eight times."""
    batch, high, wide = size(4, 1), size(368, 128), size(496, 128)
    width, hidden, radius, levels, rounds = size(256, 128), size(128, 64), 4, 4, size(8, 3)

    def norm(kind, channels):
        return nn.InstanceNorm2d(channels) if kind == "instance" else nn.BatchNorm2d(channels)

    class Block(nn.Module):
        def __init__(self, before, after, stride, kind):
            super().__init__()
            self.first, self.second = nn.Conv2d(before, after, 3, stride, 1), nn.Conv2d(after, after, 3, 1, 1)
            self.norms = nn.ModuleList([norm(kind, after), norm(kind, after)])
            self.short = None
            if stride != 1:
                self.short = nn.Sequential(nn.Conv2d(before, after, 1, stride), norm(kind, after))

        def forward(self, x):
            h = F.relu(self.norms[0](self.first(x)))
            h = F.relu(self.norms[1](self.second(h)))
            return F.relu(h + (x if self.short is None else self.short(x)))

    def encoder(kind):
        small, middle = width // 4, width // 8 * 3
        return nn.Sequential(
            nn.Conv2d(3, small, 7, 2, 3), norm(kind, small), nn.ReLU(),
            Block(small, small, 1, kind), Block(small, small, 1, kind),
            Block(small, middle, 2, kind), Block(middle, middle, 1, kind),
            Block(middle, width // 2, 2, kind), Block(width // 2, width // 2, 1, kind), nn.Conv2d(width // 2, width, 1),
        )  # fmt: skip

    class Update(nn.Module):
        def __init__(self):
            super().__init__()
            found = levels * (2 * radius + 1) ** 2
            self.alike = nn.Sequential(nn.Conv2d(found, width, 1), nn.ReLU(), nn.Conv2d(width, 192, 3, 1, 1), nn.ReLU())
            self.moved = nn.Sequential(nn.Conv2d(2, 128, 7, 1, 3), nn.ReLU(), nn.Conv2d(128, 64, 3, 1, 1), nn.ReLU())
            self.both = nn.Conv2d(192 + 64, 126, 3, 1, 1)
            shapes = [((1, 5), (0, 2)), ((5, 1), (2, 0))]
            entry = width + 128
            self.gates = nn.ModuleList(nn.Conv2d(entry, hidden, *one[:1], 1, one[1]) for one in shapes for _ in "zrq")
            self.flow = nn.Sequential(nn.Conv2d(hidden, 256, 3, 1, 1), nn.ReLU(), nn.Conv2d(256, 2, 3, 1, 1))
            self.mask = nn.Sequential(nn.Conv2d(hidden, 256, 3, 1, 1), nn.ReLU(), nn.Conv2d(256, 64 * 9, 1))

        def forward(self, h, context, alike, flow):
            motion = F.relu(self.both(torch.cat([self.alike(alike), self.moved(flow)], 1)))
            x = torch.cat([context, motion, flow], 1)
            for at in (0, 3):
                hx = torch.cat([h, x], 1)
                z, r = torch.sigmoid(self.gates[at](hx)), torch.sigmoid(self.gates[at + 1](hx))
                q = torch.tanh(self.gates[at + 2](torch.cat([r * h, x], 1)))
                h = (1 - z) * h + z * q
            return h, 0.25 * self.mask(h), self.flow(h)

    class Raft(nn.Module):
        def __init__(self):
            super().__init__()
            self.features, self.context, self.update = encoder("instance"), encoder("batch"), Update()

        def pyramid(self, first, second):
            n, c, h, w = first.shape
            volume = torch.matmul(first.view(n, c, h * w).transpose(1, 2), second.view(n, c, h * w)) / math.sqrt(c)
            found = [volume.view(n * h * w, 1, h, w)]
            for _ in range(levels - 1):
                found.append(F.avg_pool2d(found[-1], 2, 2))
            return found

        def look_up(self, pyramid, where):
            n, _, h, w = where.shape
            where = where.permute(0, 2, 3, 1).reshape(n * h * w, 1, 1, 2)
            found = []
            for level, volume in enumerate(pyramid):
                near = torch.linspace(-radius, radius, 2 * radius + 1, device=device)
                window = torch.stack(torch.meshgrid(near, near, indexing="ij"), -1)[None]
                x, y = (where / 2**level + window).split(1, -1)
                x, y = 2 * x / (volume.shape[-1] - 1) - 1, 2 * y / (volume.shape[-2] - 1) - 1
                found.append(F.grid_sample(volume, torch.cat([x, y], -1), align_corners=True).view(n, h, w, -1))
            return torch.cat(found, -1).permute(0, 3, 1, 2).contiguous()

        def upsample(self, flow, mask):
            n, _, h, w = flow.shape
            mask = mask.view(n, 1, 9, 8, 8, h, w).softmax(2)
            near = F.unfold(8 * flow, 3, padding=1).view(n, 2, 9, 1, 1, h, w)
            return (mask * near).sum(2).permute(0, 1, 4, 2, 5, 3).reshape(n, 2, 8 * h, 8 * w)

        def forward(self, first, second):
            first, second = 2 * (first / 255.0) - 1.0, 2 * (second / 255.0) - 1.0
            with torch.autocast(device.type, torch.bfloat16, enabled=change == "bf16"):
                one, two = self.features(torch.cat([first, second])).chunk(2)
                h, context = self.context(first).split([hidden, width - hidden], 1)
                h, context = torch.tanh(h), F.relu(context)
            pyramid = self.pyramid(one.float().contiguous(), two.float().contiguous())
            sides = [torch.arange(one.shape[at], device=device) for at in (2, 3)]
            rows, columns = torch.meshgrid(*sides, indexing="ij")
            start = torch.stack([columns, rows]).float()[None].repeat(len(one), 1, 1, 1)
            where, flows = start.clone(), []
            for _ in range(rounds):
                where = where.detach()
                alike = self.look_up(pyramid, where)
                with torch.autocast(device.type, torch.bfloat16, enabled=change == "bf16"):
                    h, mask, moved = self.update(h, context, alike, where - start)
                where = where + moved.float()
                flows.append(self.upsample(where - start, mask.float().contiguous()))
            return flows

    model = Raft().to(device)
    if change == "channels_last":
        model = model.to(memory_format=torch.channels_last)
    if change == "compile":
        model.update = compiled(model.update)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-4, weight_decay=1e-4, eps=1e-8)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-4, 100_100, pct_start=0.05, anneal_strategy="linear")
    photos = [torch.randint(0, 256, (batch, 3, high, wide)).float() for _ in range(2)]
    truth, known = 5 * torch.randn(batch, 2, high, wide), (torch.rand(batch, high, wide) < 0.9).float()
    log = []

    def sequence_loss(flows, truth, known):
        known = (known >= 0.5) & (truth.pow(2).sum(1).sqrt() < 400)
        loss = 0.0
        for at, flow in enumerate(flows):
            loss = loss + 0.8 ** (len(flows) - at - 1) * (known[:, None] * (flow - truth).abs()).mean()
        error = (flows[-1].detach() - truth).pow(2).sum(1).sqrt()
        if change == "no_item":
            count = known.sum()
            log.append([(error * known).sum() / count, *(((error < most) & known).sum() / count for most in (1, 3, 5))])
            return loss
        error = error.view(-1)[known.view(-1)]
        log.append([error.mean().item(), *((error < most).float().mean().item() for most in (1, 3, 5))])
        return loss

    def step():
        optimizer.zero_grad()
        first, second, wanted, valid = (one.to(device) for one in (*photos, truth, known))
        if change == "channels_last":
            first, second = (one.contiguous(memory_format=torch.channels_last) for one in (first, second))
        loss = sequence_loss(model(first, second), wanted, valid)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        return loss

    return step


def vector_ppo(change):
    """PPO in one file: 32 steps of 64 carts with poles in numpy, then four epochs of minibatches with their figures."""
    carts, horizon, epochs, parts, width = size(64, 4), size(32, 4), size(4, 1), 4, size(64, 8)
    chance = np.random.default_rng(0)
    state = {"cart": chance.uniform(-0.05, 0.05, (carts, 4)), "age": np.zeros(carts, int)}

    def act(action):
        """Move all carts. Those whose pole has fallen start again."""
        x, dx, angle, turn = state["cart"].T
        push = np.where(action == 1, 10.0, -10.0)
        sine, cosine = np.sin(angle), np.cos(angle)
        pull = (push + 0.05 * turn**2 * sine) / 1.1
        faster = (9.8 * sine - cosine * pull) / (0.5 * (4 / 3 - 0.1 * cosine**2 / 1.1))
        speed = dx + 0.02 * (pull - 0.05 * faster * cosine / 1.1)
        moved = [x + 0.02 * dx, speed, angle + 0.02 * turn, turn + 0.02 * faster]
        state["cart"], state["age"] = np.stack(moved, 1), state["age"] + 1
        over = (np.abs(moved[0]) > 2.4) | (np.abs(moved[2]) > 0.21) | (state["age"] >= 500)
        state["cart"][over] = chance.uniform(-0.05, 0.05, (over.sum(), 4))
        state["age"][over] = 0
        return state["cart"].astype(np.float32), np.ones(carts, np.float32), over

    def network(after, gain):
        layers = [nn.Linear(4, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, after)]
        for layer, one in zip(layers[::2], (math.sqrt(2), math.sqrt(2), gain), strict=True):
            nn.init.orthogonal_(layer.weight, one)
            nn.init.zeros_(layer.bias)
        return nn.Sequential(*layers)

    actor, critic = network(2, 0.01).to(device), network(1, 1.0).to(device)
    weights = [*actor.parameters(), *critic.parameters()]
    captured = change == "graph_update" and device.type == "cuda"
    optimizer = torch.optim.Adam(weights, lr=2.5e-4, eps=1e-5, fused=change == "fused" or None, capturable=captured)
    checks = None if change not in ("no_checks", "graph_update") else False

    def policy(seen, action=None):
        choice = torch.distributions.Categorical(logits=actor(seen), validate_args=checks)
        action = choice.sample() if action is None else action
        return action, choice.log_prob(action), choice.entropy(), critic(seen)

    def update(seen, action, before, gain, wanted, value):
        _, now, entropy, found = policy(seen, action)
        ratio = (now - before).exp()
        with torch.no_grad():
            shift = ((ratio - 1) - (now - before)).mean()
            cut = ((ratio - 1.0).abs() > 0.2).float().mean()
        gain = (gain - gain.mean()) / (gain.std() + 1e-8)
        policy_loss = torch.max(-gain * ratio, -gain * ratio.clamp(0.8, 1.2)).mean()
        found = found.view(-1)
        clipped = value + (found - value).clamp(-0.2, 0.2)
        value_loss = 0.5 * torch.max((found - wanted) ** 2, (clipped - wanted) ** 2).mean()
        loss = policy_loss - 0.01 * entropy.mean() + 0.5 * value_loss
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(weights, 0.5)
        optimizer.step()
        return loss.detach(), policy_loss.detach(), value_loss.detach(), entropy.mean().detach(), shift, cut

    if change == "graph_update":
        part = carts * horizon // parts
        fixed = [torch.zeros(part, 4, device=device), torch.zeros(part, dtype=torch.long, device=device)]
        fixed += [torch.zeros(part, device=device) for _ in range(4)]
        replay = graphed(lambda: update(*fixed))

        def update_now(*batch):
            for place, new in zip(fixed, batch, strict=True):
                place.copy_(new)
            return replay()
    else:
        update_now = update

    seen = torch.zeros(horizon, carts, 4, device=device)
    actions = torch.zeros(horizon, carts, dtype=torch.long, device=device)
    chances, rewards, ends, values = (torch.zeros(horizon, carts, device=device) for _ in range(4))
    current = {"seen": torch.Tensor(state["cart"]).to(device), "over": torch.zeros(carts, device=device)}
    log = []

    def step():
        for at in range(horizon):
            seen[at], ends[at] = current["seen"], current["over"]
            with torch.no_grad():
                action, logprob, _, value = policy(current["seen"])
                values[at] = value.flatten()
            actions[at], chances[at] = action, logprob
            found, reward, over = act(action.cpu().numpy())
            rewards[at] = torch.tensor(reward).to(device).view(-1)
            current.update(seen=torch.Tensor(found).to(device), over=torch.Tensor(over).to(device))
        with torch.no_grad():
            following, going, last = critic(current["seen"]).flatten(), 1.0 - current["over"], 0
            gains = torch.zeros_like(rewards).to(device)
            for at in reversed(range(horizon)):
                delta = rewards[at] + 0.99 * following * going - values[at]
                gains[at] = last = delta + 0.99 * 0.95 * going * last
                following, going = values[at], 1.0 - ends[at]
            wanted = gains + values
        batch = [seen.view(-1, 4), *(one.view(-1) for one in (actions, chances, gains, wanted, values))]
        order = np.arange(carts * horizon)
        figures = []
        for _ in range(epochs):
            chance.shuffle(order)
            for rows in np.split(order, parts):
                found = update_now(*(one[rows] for one in batch))
                figures.append(torch.stack(found) if change == "no_item" else [one.item() for one in found])
        log.append(torch.stack(figures).tolist() if change == "no_item" else figures)
        return found[0]

    return step


def molecular_forces(change):
    """A SchNet learns energies of molecules, and their forces as a gradient that is differentiated once more."""
    molecules, atoms, cutoff = size(32, 3), size(21, 6), 5.0
    width, blocks, waves = size(128, 8), size(6, 2), size(50, 8)

    class Interaction(nn.Module):
        def __init__(self):
            super().__init__()
            self.filter = nn.ModuleList([nn.Linear(waves, width), nn.Linear(width, width)])
            self.before = nn.Linear(width, width, bias=False)
            self.after = nn.ModuleList([nn.Linear(width, width), nn.Linear(width, width)])

        def forward(self, x, i, j, spread, fade):
            kernel = self.filter[1](soft(self.filter[0](spread))) * fade
            h = self.before(x)
            near = h.index_select(0, j) if change == "index_select" else h[j]
            total = torch.zeros_like(x).index_add(0, i, near * kernel)
            return x + self.after[1](soft(self.after[0](total)))

    def soft(x):
        return F.softplus(x) - math.log(2.0)

    class Network(nn.Module):
        def __init__(self):
            super().__init__()
            self.kinds, self.blocks = nn.Embedding(100, width), nn.ModuleList(Interaction() for _ in range(blocks))
            self.head = nn.ModuleList([nn.Linear(width, width // 2), nn.Linear(width // 2, 1)])
            self.register_buffer("centers", torch.linspace(0.0, cutoff, waves))

        def forward(self, kinds, where, i, j, owner):
            if change == "index_select":
                distance = (where.index_select(0, i) - where.index_select(0, j)).norm(dim=-1, keepdim=True)
            else:
                distance = (where[i] - where[j]).norm(dim=-1, keepdim=True)
            spread = torch.exp(-0.5 * ((distance - self.centers) / (cutoff / (waves - 1))) ** 2)
            fade = 0.5 * (torch.cos(distance * math.pi / cutoff) + 1.0) * (distance < cutoff).float()
            x = self.kinds(kinds)
            for block in self.blocks:
                x = block(x, i, j, spread, fade)
            found = self.head[1](soft(self.head[0](x))).squeeze(-1)
            return torch.zeros(molecules, device=device).index_add(0, owner, found)

    model = Network().to(device)
    optimizer = torch.optim.Adam(
        model.parameters(), lr=5e-4, fused=change == "fused" or None,
        capturable=change == "graph" and device.type == "cuda",
    )  # fmt: skip
    lattice = torch.cartesian_prod(*(torch.arange(3.0),) * 3)[:atoms] * 1.8
    where = (lattice + 0.2 * torch.randn(molecules, atoms, 3)).view(-1, 3)
    batch = [torch.randint(1, 10, (molecules * atoms,)), where, torch.arange(molecules).repeat_interleave(atoms)]
    batch += [torch.randn(molecules), torch.randn(molecules * atoms, 3)]
    fixed = [one.to(device) for one in batch]
    sizes = [atoms] * molecules
    log = []

    # Atoms that are too far have no effect, because fade is zero: a captured step has all pairs of each molecule.
    one = torch.tensor([(i, j) for i in range(atoms) for j in range(atoms) if i != j])
    pairs = (one + atoms * torch.arange(molecules)[:, None, None]).view(-1, 2).T.contiguous().to(device)

    def edges(where):
        if change == "graph":
            return pairs
        if change == "edges_at_once":
            clouds = where.view(molecules, atoms, 3)
            near = (torch.cdist(clouds, clouds) < cutoff) & ~torch.eye(atoms, dtype=torch.bool, device=device)
            owner, i, j = near.nonzero().T
            return torch.stack([i, j]) + owner * atoms
        found, start = [], 0
        for count in sizes:
            cloud = where[start : start + count]
            near = (torch.cdist(cloud, cloud) < cutoff) & ~torch.eye(count, dtype=torch.bool, device=device)
            found.append(near.nonzero().t() + start)
            start += count
        return torch.cat(found, 1)

    def update(kinds, where, owner, energies, forces):
        where = where.detach().requires_grad_()
        i, j = edges(where.detach())
        optimizer.zero_grad()
        energy = model(kinds, where, i, j, owner)
        force = -torch.autograd.grad(energy.sum(), where, create_graph=True, retain_graph=True)[0]
        loss = 0.01 * F.mse_loss(energy, energies) + 0.99 * F.mse_loss(force, forces)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 10.0)
        optimizer.step()
        return loss.detach(), (energy - energies).abs().mean().detach(), (force - forces).abs().mean().detach()

    replay = graphed(lambda: update(*fixed)) if change == "graph" else None

    def step():
        if replay:
            for place, new in zip(fixed, batch, strict=True):
                place.copy_(new)
            found = replay()
        else:
            found = update(*(one.to(device) for one in batch))
        log.append([one.item() for one in found])
        return found[0]

    return step


def mixture_language_model(change):
    """A small GPT whose layers each have eight experts, two of them for a token; two micro-batches for each update."""
    batch, length, width, heads = size(16, 2), size(512, 16), size(768, 16), size(12, 2)
    layers, experts, chosen, words, micro = 4, size(8, 4), 2, size(50_304, 64), 2

    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
            self.register_buffer("mask", torch.tril(torch.ones(length, length)).view(1, 1, length, length))

        def forward(self, x):
            n, t, _ = x.shape
            q, k, v = (one.view(n, t, heads, -1).transpose(1, 2) for one in self.qkv(x).split(width, -1))
            if change == "sdpa":
                y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            else:
                scores = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.shape[-1]))
                scores = scores.masked_fill(self.mask[:, :, :t, :t] == 0, float("-inf"))
                y = F.softmax(scores, -1) @ v
            return self.out(y.transpose(1, 2).contiguous().view(n, t, width))

    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate = nn.Linear(width, experts, bias=False)
            self.wide = nn.ModuleList(nn.Linear(width, 4 * width, bias=False) for _ in range(experts))
            self.back = nn.ModuleList(nn.Linear(4 * width, width, bias=False) for _ in range(experts))
            if change == "grouped":
                for name, several in {"wide": self.wide, "back": self.back}.items():
                    delattr(self, name)
                    setattr(self, name, nn.Parameter(torch.stack([one.weight.detach() for one in several])))

        def forward(self, x):
            shape, x = x.shape, x.view(-1, width)
            weights, picked = self.gate(x).float().softmax(-1).topk(chosen, -1)
            weights = weights / weights.sum(-1, keepdim=True)
            out = torch.zeros_like(x)
            if change in ("sort_tokens", "grouped"):
                order = picked.flatten().argsort(stable=True)
                counts = (picked.flatten()[:, None] == torch.arange(experts, device=device)).sum(0)
                tokens = order // chosen
                found = self.sorted_tokens(x[tokens], counts) * weights.flatten()[order, None]
                return out.index_add(0, tokens, found.to(x.dtype)).view(shape)
            for expert in range(experts):
                token, place = torch.where(picked == expert)
                found = self.back[expert](F.gelu(self.wide[expert](x[token]))) * weights[token, place, None]
                out.index_add_(0, token, found.to(x.dtype))
            return out.view(shape)

        def sorted_tokens(self, x, counts):
            if change == "grouped":
                ends = counts.cumsum(0).to(torch.int32)
                h = F.grouped_mm(x.bfloat16(), self.wide.bfloat16().transpose(1, 2), offs=ends)
                return F.grouped_mm(F.gelu(h), self.back.bfloat16().transpose(1, 2), offs=ends)
            parts = zip(x.split(counts.tolist()), self.wide, self.back, strict=True)
            return torch.cat([back(F.gelu(wide(part))) for part, wide, back in parts])

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
            self.attention, self.experts = Attention(), Experts()

        def forward(self, x):
            x = x + self.attention(self.norms[0](x))
            return x + self.experts(self.norms[1](x))

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.places = nn.Embedding(words, width), nn.Embedding(length, width)
            self.blocks, self.norm = nn.ModuleList(Block() for _ in range(layers)), nn.LayerNorm(width)
            self.head = nn.Linear(width, words, bias=False)
            self.head.weight = self.words.weight
            nn.init.normal_(self.head.weight, std=0.02)

        def forward(self, text, following):
            x = self.words(text) + self.places(torch.arange(text.shape[1], device=device))
            for block in self.blocks:
                x = block(x)
            logits = self.head(self.norm(x))
            return F.cross_entropy(logits.view(-1, words), following.view(-1))

    model = Model().to(device)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=6e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=change == "fused" or None
    )
    corpus = np.random.default_rng(0).integers(0, words, 1_000_000).astype(np.uint16)
    chance = np.random.default_rng(1)
    log = []

    def get_batch():
        starts = chance.integers(0, len(corpus) - length - 1, batch)
        text = torch.stack([torch.from_numpy(corpus[at : at + length].astype(np.int64)) for at in starts])
        following = torch.stack([torch.from_numpy(corpus[at + 1 : at + 1 + length].astype(np.int64)) for at in starts])
        return text.to(device), following.to(device)

    def step():
        total = 0.0
        for _ in range(micro):
            text, following = get_batch()
            with torch.autocast(device.type, torch.bfloat16):
                loss = model(text, following) / micro
            loss.backward()
            total += loss.item()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        log.append((total, norm.item()))
        return loss

    return step


PROGRAMS = {
    speech_decoder: {"at_once": "loop_inputs", "keys_once": "compute_once", "compile": "fuse_pointwise",
                     "graph": "cuda_graph"},
    momentum_contrast: {"augment_at_once": "larger_batch", "foreach_average": "update_graph", "graph": "cuda_graph",
                        "bf16": "half_precision"},
    optical_flow: {"bf16": "half_precision", "channels_last": "channels_last", "compile": "fuse_pointwise",
                   "no_item": "remove_sync"},
    vector_ppo: {"graph_update": "cuda_graph", "no_checks": "remove_sync", "fused": "fused_optimizer",
                 "no_item": "remove_sync"},
    molecular_forces: {"edges_at_once": "larger_batch", "graph": "cuda_graph", "index_select": "index_select",
                       "fused": "fused_optimizer"},
    mixture_language_model: {"sdpa": "fused_attention", "sort_tokens": "remove_sync", "grouped": "larger_batch",
                             "fused": "fused_optimizer"},
}  # fmt: skip
