"""Programs that answer requests, that simulate nature, or that learn in a way which few frameworks provide."""

import math

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from setting import compiled, device, graphed, size, use_tf32


class Attention(nn.Module):
    """Attention as in many repositories: a product, a softmax and a product."""

    def __init__(self, wide, heads, sdpa=False):
        super().__init__()
        self.query, self.key = nn.Linear(wide, wide), nn.Linear(wide, wide, bias=False)
        self.value, self.out = nn.Linear(wide, wide), nn.Linear(wide, wide)
        self.heads, self.sdpa = heads, sdpa

    def split(self, x):
        return x.view(*x.shape[:2], self.heads, -1).transpose(1, 2)

    def keys_values(self, x):
        return self.split(self.key(x)), self.split(self.value(x))

    def forward(self, x, keys, values, mask=None):
        query = self.split(self.query(x))
        if self.sdpa:
            found = F.scaled_dot_product_attention(query, keys, values, attn_mask=mask)
        else:
            weights = query @ keys.transpose(2, 3) / math.sqrt(query.shape[-1])
            if mask is not None:
                weights = weights + mask
            found = weights.softmax(-1) @ values
        return self.out(found.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """A layer of a transformer that sees all places."""

    def __init__(self, wide, heads, sdpa=False):
        super().__init__()
        self.before, self.own, self.between = nn.LayerNorm(wide), Attention(wide, heads, sdpa), nn.LayerNorm(wide)
        self.wider = nn.Sequential(nn.Linear(wide, 4 * wide), nn.GELU(), nn.Linear(4 * wide, wide))

    def forward(self, x):
        y = self.before(x)
        x = x + self.own(y, *self.own.keys_values(y))
        return x + self.wider(self.between(x))


class DecoderBlock(Block):
    """A layer of a decoder: it sees what was said before, and the sound."""

    def __init__(self, wide, heads):
        super().__init__(wide, heads)
        self.middle, self.other = nn.LayerNorm(wide), Attention(wide, heads)

    def forward(self, x, own, sound, mask=None):
        y = self.before(x)
        keys, values = own(*self.own.keys_values(y))
        x = x + self.own(y, keys, values, mask)
        if torch.is_tensor(sound):
            sound = self.other.keys_values(sound)
        x = x + self.other(self.middle(x), *sound)
        return x + self.wider(self.between(x))


def dictation(change):
    """A service writes down half a minute of speech: it encodes the sound and then picks one word after the other."""
    wide, heads, layers, words = size(512, 16), size(8, 2), size(4, 2), size(20000, 40)
    bands, samples, most, end = size(80, 8), size(480000, 6400), size(32, 5), -1  # random weights never end
    kind = torch.bfloat16 if change == "bf16" else torch.float

    class Recognizer(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Conv1d(bands, wide, 3, 1, 1), nn.Conv1d(wide, wide, 3, 2, 1)
            self.encoder = nn.Sequential(*(Block(wide, heads) for _ in range(layers)), nn.LayerNorm(wide))
            self.words, self.places = nn.Embedding(words, wide), nn.Embedding(448, wide)
            self.decoder = nn.ModuleList(DecoderBlock(wide, heads) for _ in range(layers))
            self.last, self.head = nn.LayerNorm(wide), nn.Linear(wide, words, bias=False)

        def encode(self, x):
            x = F.gelu(self.second(F.gelu(self.first(x)))).transpose(1, 2)
            times = torch.arange(x.shape[1], device=x.device)[:, None] * torch.arange(1, wide + 1, device=x.device)
            return self.encoder(x + (times / 1000).sin().to(x.dtype))

    model = Recognizer().to(device, kind).eval()
    to_bands = torch.rand(bands, 201, device=device) / 201
    audio = np.random.default_rng(0).standard_normal(samples).astype(np.float32)

    def growing(cache):
        """Return how a layer's keys and values are kept: those of the new word go to the end."""

        def own(keys, values):
            if cache:
                keys, values = torch.cat([cache["keys"], keys], 2), torch.cat([cache["values"], values], 2)
            cache["keys"], cache["values"] = keys, values
            return keys, values

        return own

    def logits_of(token, place, owns, sounds, mask=None):
        x = model.words(token)[:, None] + model.places(place)
        for layer, own, sound in zip(model.decoder, owns, sounds, strict=True):
            x = layer(x, own, sound, mask)
        return model.head(model.last(x[:, -1]))

    def hear():
        sound = torch.from_numpy(audio).to(device)
        spectrum = torch.stft(sound, 400, 160, window=torch.hann_window(400, device=device), return_complex=True)
        mel = (to_bands @ spectrum[..., :-1].abs().square()).clamp(min=1e-10).log10()
        mel = torch.maximum(mel, mel.max() - 8.0)
        return model.encode(((mel + 4) / 4)[None].to(kind))

    @torch.inference_mode()
    def step():
        heard = hear()
        sounds = [layer.other.keys_values(heard) if change == "cross_once" else heard for layer in model.decoder]
        owns = [growing({}) for _ in model.decoder]
        token, said = torch.ones(1, dtype=torch.long, device=device), []
        for place in range(most):
            token = logits_of(token, torch.tensor([place], device=device), owns, sounds).argmax(-1)
            said.append(token)
            if (change != "seldom_ask" or place % 8 == 7) and token.item() == end:
                break
        return torch.cat(said)

    if change != "static_graph":
        return step

    high = wide // heads
    with torch.inference_mode():
        kept = [[torch.zeros(1, heads, most, high, device=device) for _ in range(2)] for _ in model.decoder]
        sounds = [[one.clone() for one in layer.other.keys_values(hear())] for layer in model.decoder]
        token, place = torch.ones(1, dtype=torch.long, device=device), torch.zeros(1, dtype=torch.long, device=device)
        said, places = torch.zeros(most, dtype=torch.long, device=device), torch.arange(most, device=device)

    def static(buffers):
        def own(*new):
            for buffer, one in zip(buffers, new, strict=True):
                buffer.index_copy_(2, place, one)
            return buffers

        return own

    owns = [static(buffers) for buffers in kept]

    @torch.inference_mode()
    def next_word():
        mask = torch.zeros(most, device=device).masked_fill(places > place, -torch.inf)
        token.copy_(logits_of(token, place, owns, sounds, mask).argmax(-1))
        said.index_copy_(0, place, token)
        place.add_(1)
        return token

    replay = graphed(next_word)

    @torch.inference_mode()
    def step_static():
        heard = hear()
        for buffers, layer in zip(sounds, model.decoder, strict=True):
            for buffer, one in zip(buffers, layer.other.keys_values(heard), strict=True):
                buffer.copy_(one)
        token.fill_(1)
        place.zero_()
        for _ in range(most):
            if replay().item() == end:
                break
        return said.clone()

    return step_static


def form_reader(change):
    """A service reads the lines of a scanned form: a convolutional and recurrent network names the letters of each."""
    kind = torch.half if change == "half" and device.type == "cuda" else torch.float
    height, width, letters = 32, size(320, 32), size(97, 12)
    widths = [size(one, 8) for one in (64, 128, 256, 256, 512)]

    class Reader(nn.Module):
        def __init__(self):
            super().__init__()
            layers, before = [], 1
            for after, pool in zip(widths, (2, 2, (2, 1), (2, 1), (2, 1)), strict=True):
                layers += [nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU(), nn.MaxPool2d(pool)]
                before = after
            self.see = nn.Sequential(*layers)
            self.read = nn.LSTM(before, size(256, 8), 2, bidirectional=True, batch_first=True)
            self.head = nn.Linear(2 * size(256, 8), letters)

        def forward(self, x):
            x = self.see(x).squeeze(2).transpose(1, 2)
            return self.head(self.read(x)[0])

    model = Reader().to(device, kind).eval()
    random = np.random.default_rng(0)
    lines = [random.integers(0, 255, (random.integers(28, 60), random.integers(200, 600)), np.uint8)
             for _ in range(size(24, 3))]  # fmt: skip
    images = [torch.from_numpy(line) for line in lines]
    if change == "pinned" and device.type == "cuda":
        images = [image.pin_memory() for image in images]

    def prepared(image):
        x = image.to(device, non_blocking=change == "pinned").float()[None, None] / 255
        x = F.interpolate(x, (height, width), mode="bilinear", align_corners=False, antialias=True)
        return ((x - 0.5) / 0.5).to(kind)

    def collapse(best):
        """Drop repeated letters and blanks, as CTC demands."""
        text, last = [], 0
        for letter in best:
            if letter != last and letter != 0:
                text.append(letter)
            last = letter
        return text

    held = torch.zeros(1, 1, height, width, device=device, dtype=kind)

    @torch.inference_mode()
    def of_held():
        return model(held)

    replay = graphed(of_held) if change == "graph" else None

    def logits_of(image):
        if replay is None:
            return model(prepared(image))
        held.copy_(prepared(image))
        return replay()

    @torch.inference_mode()
    def step():
        texts, sure = [], []
        if change == "one_batch":
            all_of_them = model(torch.cat([prepared(image) for image in images])).float().softmax(-1)
            highest, best = all_of_them.max(-1)
            texts = [collapse(one) for one in best.tolist()]
            sure = highest.mean(-1).tolist()
        else:
            for image in images:
                highest, best = logits_of(image).float().softmax(-1).max(-1)
                texts.append(collapse(best[0].cpu().tolist()))
                sure.append(highest.mean().item())
        return torch.tensor([[len(text), one] for text, one in zip(texts, sure, strict=True)])

    return step


def article_search(change):
    """A service finds the articles that are nearest to a question: it encodes the question and compares it with all."""
    from transformers import BertConfig, BertModel

    wide, articles, length = size(384, 16), size(2_000_000, 200), size(24, 6)
    config = BertConfig(
        vocab_size=size(30000, 60), hidden_size=wide, num_hidden_layers=size(12, 2), num_attention_heads=size(12, 2),
        intermediate_size=4 * wide, max_position_embeddings=size(512, 16),
    )  # fmt: skip
    model = BertModel(config, add_pooling_layer=False).to(device).eval()
    index = torch.randn(articles, wide, device=device)
    if change == "normalized_once":
        index.div_(index.norm(dim=1, keepdim=True))
    if change == "half_index":
        index = index.to(torch.half if device.type == "cuda" else torch.bfloat16)
    topics = torch.randint(0, 20, (articles,), device=device)
    question = torch.randint(0, size(30000, 60), (1, length)).tolist()

    def encode():
        tokens = torch.tensor(question, device=device)
        mask = torch.ones_like(tokens)
        hidden = model(input_ids=tokens, attention_mask=mask).last_hidden_state
        pooled = (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        return F.normalize(pooled, dim=1)

    def step():
        with torch.set_grad_enabled(change != "no_grad"):
            asked = encode()
            vectors = index if change == "normalized_once" else F.normalize(index, dim=1)
            scores = (vectors @ asked.to(vectors.dtype).t()).squeeze(1)
            scores = scores.masked_fill(topics == 7, -1.0)  # what this user must not see
            if change == "topk":
                best, which = scores.topk(10)
            else:
                best, which = torch.sort(scores, descending=True)
                best, which = best[:10], which[:10]
        found = list(zip(which.tolist(), best.tolist(), strict=True))
        return torch.tensor([score for _, score in found])

    return step


def street_service(change):
    """A service labels each pixel of a street camera's image, and reports how much of it is road, cars and so on."""
    kind = torch.half if change == "half" and device.type == "cuda" else torch.float
    high, wide, classes = size(512, 64), size(768, 96), 19

    def inverted(before, after, stride):
        middle = 4 * before
        return nn.Sequential(
            nn.Conv2d(before, middle, 1, bias=False), nn.BatchNorm2d(middle), nn.Hardswish(),
            nn.Conv2d(middle, middle, 3, stride, 1, groups=middle, bias=False), nn.BatchNorm2d(middle), nn.Hardswish(),
            nn.Conv2d(middle, after, 1, bias=False), nn.BatchNorm2d(after),
        )  # fmt: skip

    class Street(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Sequential(nn.Conv2d(3, 24, 3, 2, 1, bias=False), nn.BatchNorm2d(24), nn.Hardswish())
            self.fine = nn.Sequential(inverted(24, 32, 2), inverted(32, 32, 1), inverted(32, 48, 2))
            self.coarse = nn.Sequential(inverted(48, 96, 2), *(inverted(96, 96, 1) for _ in range(size(6, 1))))
            self.from_coarse = nn.Sequential(nn.BatchNorm2d(96), nn.Conv2d(96, classes, 1))
            self.from_fine = nn.Sequential(nn.BatchNorm2d(48), nn.Conv2d(48, classes, 1))

        def forward(self, x):
            fine = self.fine(self.first(x))
            coarse = self.from_coarse(self.coarse(fine))
            found = F.interpolate(coarse, fine.shape[2:], mode="bilinear") + self.from_fine(fine)
            return F.interpolate(found, x.shape[2:], mode="bilinear")

    model = Street().to(device)
    image = F.interpolate(torch.rand(1, 3, high // 16, wide // 16), (high, wide), mode="bicubic").clamp(0, 1)
    image = (255 * image[0].permute(1, 2, 0)).byte().contiguous()
    with torch.no_grad():
        for part in model.modules():
            if isinstance(part, nn.BatchNorm2d):
                part.momentum = 1.0
        model((4 * (image / 255 - 0.5)).permute(2, 0, 1)[None].to(device))  # random weights get statistics that fit
    model = model.to(kind).eval()
    mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    if change == "normalize_on_gpu":
        mean, std = mean.to(device), std.to(device)

    @torch.inference_mode()
    def step():
        pixels = image.to(device) if change == "normalize_on_gpu" else image
        x = ((pixels.float() / 255 - mean) / std).permute(2, 0, 1).unsqueeze(0).contiguous()
        if change == "pinned" and device.type == "cuda":
            x = x.pin_memory()
        logits = model(x.to(device, kind, non_blocking=change == "pinned"))
        if change == "labels_on_gpu":
            sure, labels = logits.float().softmax(1).max(1)
            counts = torch.bincount(labels.flatten(), minlength=classes)
            total = torch.bincount(labels.flatten(), weights=sure.flatten(), minlength=classes)
            areas, trust = torch.stack([counts / labels.numel(), total / counts.clamp(min=1)]).cpu()
        else:
            likely = logits.softmax(1).float().cpu()
            sure, labels = likely.max(1)
            areas, trust = torch.zeros(classes), torch.zeros(classes)
            for one in range(classes):
                here = labels == one
                areas[one] = here.float().mean()
                trust[one] = sure[here].mean().item() if here.any() else 0.0
        return torch.stack([areas, trust])

    return step


def argon_box(change):
    """Atoms of argon move in a periodic box: autograd gives the forces of their pairwise energy."""
    kind = torch.float32 if change == "float32" else torch.float64
    side, apart = size(12, 3), 1.2
    atoms, length, cutoff, dt = side**3, apart * side, min(2.5, apart * side / 2), 0.002
    line = torch.arange(side, dtype=torch.float64) * apart
    places = torch.cartesian_prod(line, line, line) + 0.05 * torch.randn(atoms, 3, dtype=torch.float64)
    places = places.to(device, kind)
    speeds = torch.randn(atoms, 3, dtype=torch.float64).to(device, kind)
    energies, temperatures = [], []

    def energy_of(places):
        between = places[:, None, :] - places[None, :, :]
        between = between - length * torch.round(between / length)
        same = torch.eye(atoms, device=device, dtype=kind)
        distance = ((between**2).sum(-1) + same).sqrt()
        ratio = 1.0 / distance
        pairs = 4.0 * (ratio**12 - ratio**6)
        near = (distance < cutoff) & (same == 0)
        return 0.5 * torch.where(near, pairs, torch.zeros_like(pairs)).sum()

    energy = compiled(energy_of) if change == "compile" else energy_of

    @torch.no_grad()
    def by_formula(places):
        between = places[:, None, :] - places[None, :, :]
        between -= length * torch.round(between / length)
        squared = between.square().sum(-1)
        near = (squared < cutoff * cutoff) & (squared > 0)
        sixth = torch.where(near, squared, torch.inf).pow_(-3)
        strength = (48 * sixth * sixth - 24 * sixth) / torch.where(near, squared, 1.0)
        return (2 * (sixth * sixth - sixth)).sum(), torch.einsum("ij,ijk->ik", strength, between)

    def forces_of(places):
        if change == "formula":
            return by_formula(places)
        places = places.detach().requires_grad_(True)
        total = energy(places)
        return total.detach(), -torch.autograd.grad(total, places)[0]

    forces = forces_of(places)[1]

    def step():
        nonlocal places, speeds, forces
        for _ in range(size(5, 2)):
            speeds = speeds + 0.5 * dt * forces
            places = (places + dt * speeds) % length
            total, forces = forces_of(places)
            speeds = speeds + 0.5 * dt * forces
            temperature = (speeds**2).sum() / (3 * atoms)
            if change == "no_item":
                energies.append(total)
                temperatures.append(temperature)
            else:
                energies.append(total.item())
                temperatures.append(temperature.item())
        return torch.stack([total, temperature])

    return step


def weather_forecast(change):
    """A transformer forecasts the world's weather of one day in steps of six hours, each from the one before."""
    if change == "tf32":
        use_tf32()
    kind = torch.bfloat16 if change == "bf16" else torch.float
    variables, high, across, patch = size(69, 5), size(180, 12), size(360, 24), 6
    wide, heads, layers = size(768, 16), size(12, 2), size(8, 2)
    tokens = (high // patch) * (across // patch)

    class Weather(nn.Module):
        def __init__(self):
            super().__init__()
            self.into = nn.Conv2d(variables + 5, wide, patch, patch)
            self.places = nn.Parameter(0.02 * torch.randn(1, tokens, wide))
            self.layers = nn.ModuleList(Block(wide, heads, change == "sdpa") for _ in range(layers))
            self.last, self.out = nn.LayerNorm(wide), nn.Linear(wide, variables * patch * patch)

        def forward(self, x):
            x = self.into(x).flatten(2).transpose(1, 2) + self.places
            for layer in self.layers:
                x = layer(x)
            x = self.out(self.last(x)).transpose(1, 2)
            return F.pixel_shuffle(x.reshape(1, -1, high // patch, across // patch), patch)

    model = Weather().to(device, kind).eval()
    random = np.random.default_rng(0)
    mean, std = random.standard_normal((variables, 1, 1)), random.uniform(0.5, 2.0, (variables, 1, 1))
    ground = random.uniform(0, 1, (2, high, across))  # land and height
    now = random.standard_normal((variables, high, across)).astype(np.float32)
    latitude = np.deg2rad(np.linspace(90, -90, high))[:, None]
    longitude = np.deg2rad(np.arange(across) * 360 / across)[None]

    def forcing(hour):
        """Return the sun's height and what is constant, as the training's data set has it."""
        declination = np.deg2rad(23.45) * np.sin(2 * np.pi * (284 + hour / 24) / 365)
        angle = 2 * np.pi * (hour / 24 - 0.5) + longitude
        sun = np.sin(latitude) * np.sin(declination) + np.cos(latitude) * np.cos(declination) * np.cos(angle)
        constant = np.broadcast_to(np.sin(latitude), sun.shape), np.broadcast_to(np.cos(longitude), sun.shape)
        return torch.from_numpy(np.stack([np.maximum(sun, 0), *constant, *ground]).astype(np.float32)).to(device)

    def statistics():
        return (torch.from_numpy(one).float().to(device) for one in (mean, std))

    hours = range(0, size(24, 12), 6)
    known = [forcing(hour) for hour in hours] if change == "constants_once" else None
    known_statistics = tuple(statistics()) if change == "constants_once" else None

    @torch.no_grad()
    def step():
        state, saved = torch.from_numpy(now).to(device), []
        for number, hour in enumerate(hours):
            middle, spread = known_statistics or statistics()
            x = torch.cat([(state - middle) / spread, known[number] if known else forcing(hour)])[None]
            state = state + 0.1 * spread * model(x.to(kind))[0].float()
            saved.append(state.cpu().numpy())
        return torch.from_numpy(np.stack(saved)).mean((2, 3))

    return step


def pendulum_evolution(change):
    """An evolution strategy teaches a network to swing a pendulum up: each member of a population tries it alone."""
    if change == "tf32":
        use_tf32()
    members, starts, wide, moments = size(32, 4), size(256, 4), size(128, 8), size(10, 3)
    policy = nn.Sequential(nn.Linear(3, wide), nn.Tanh(), nn.Linear(wide, wide), nn.Tanh(), nn.Linear(wide, 1))
    policy = policy.to(device).requires_grad_(False)
    mean = nn.utils.parameters_to_vector(policy.parameters()).clone()
    shapes = [one.shape for one in policy.parameters()]
    sigma, rate, losses = 0.05, 0.02, []
    first_angle = (torch.rand(starts, 1, device=device) * 2 - 1) * math.pi
    first_speed = torch.rand(starts, 1, device=device) * 2 - 1

    def reward_of(act, angle, speed):
        """Return what a pendulum earns in an episode, as the mean of all starts."""
        total = torch.zeros_like(angle)
        for _ in range(moments):
            seen = torch.cat([angle.cos(), angle.sin(), speed], -1)
            push = 2 * act(seen).tanh()
            wrapped = torch.remainder(angle + math.pi, 2 * math.pi) - math.pi
            total = total - (wrapped**2 + 0.1 * speed**2 + 0.001 * push**2)
            speed = (speed + (15 * angle.sin() + 3 * push) * 0.05).clamp(-8, 8)
            angle = angle + speed * 0.05
        return total.mean((-2, -1))

    def together(vectors):
        parts, count = [], len(vectors)
        for part, shape in zip(vectors.split([shape.numel() for shape in shapes], 1), shapes, strict=True):
            parts.append(part.reshape(count, *shape))

        def act(x):
            for number in range(0, len(parts), 2):
                x = torch.baddbmm(parts[number + 1][:, None], x, parts[number].transpose(1, 2))
                x = x.tanh() if number + 2 < len(parts) else x
            return x

        return reward_of(act, first_angle.expand(count, -1, -1), first_speed.expand(count, -1, -1))

    if change == "graph":
        held, begin = mean.clone(), 0
        for one in policy.parameters():
            one.data = held[begin : begin + one.numel()].view(one.shape)
            begin += one.numel()
        replay = graphed(lambda: reward_of(policy, first_angle, first_speed))

    def rewards_of(vectors):
        if change == "together":
            return together(vectors)
        rewards = []
        for vector in vectors:
            if change == "graph":
                held.copy_(vector)
                reward = replay()
            else:
                nn.utils.vector_to_parameters(vector, policy.parameters())
                reward = reward_of(policy, first_angle, first_speed)
            rewards.append(reward if change == "no_item" else reward.item())
        return torch.stack(rewards) if change == "no_item" else torch.tensor(rewards, device=device)

    @torch.no_grad()
    def step():
        noise = torch.randn(members // 2, len(mean), device=device)
        noise = torch.cat([noise, -noise])
        rewards = rewards_of(mean + sigma * noise)
        ranks = rewards.argsort().argsort().float() / (members - 1) - 0.5
        mean.add_(rate / (members * sigma) * (ranks @ noise))
        losses.append(-rewards.mean() if change == "no_item" else -rewards.mean().item())
        return rewards.sort().values

    return step


def scan_registration(change):
    """A scan of a brain is bent until it fits another one: the field of displacements is optimized for one pair."""
    side, coarse, window = size(96, 12), size(48, 6), size(9, 3)
    fixed, moving = (F.interpolate(torch.rand(1, 1, coarse // 2, coarse // 2, coarse // 2, device=device),
                                   (side, side, side), mode="trilinear") for _ in range(2))  # fmt: skip
    field = nn.Parameter(torch.zeros(1, 3, coarse, coarse, coarse, device=device))
    options = {"fused": True} if change == "fused" else {"capturable": True} if change == "graph" else {}
    if device.type == "cpu":
        options.pop("capturable", None)
    optimizer = torch.optim.Adam([field], lr=0.01, **options)
    history, volume = [], window**3

    def sums(image):
        """Return the sum of each place's neighbourhood."""
        if change == "separable":
            for axis in range(3):
                shape, around = [1, 1, 1, 1, 1], [0, 0, 0]
                shape[2 + axis], around[axis] = window, window // 2
                image = F.conv3d(image, torch.ones(shape, device=device), padding=around)
            return image
        return F.conv3d(image, torch.ones(1, 1, window, window, window, device=device), padding=window // 2)

    def of_one(image):
        total = sums(image)
        return total, sums(image * image) - total * total / volume

    once = of_one(fixed) if change == "fixed_once" else None

    def correlation(warped):
        """Return the local normalized cross-correlation of the warped scan and the fixed one."""
        total, spread = of_one(warped)
        total_fixed, spread_fixed = once or of_one(fixed)
        both = sums(warped * fixed) - total * total_fixed / volume
        return (both * both / (spread * spread_fixed + 1e-3)).mean()

    def step():
        optimizer.zero_grad()
        identity = torch.eye(3, 4, device=device)[None]
        grid = F.affine_grid(identity, [1, 1, side, side, side], align_corners=False)
        moved = F.interpolate(field, (side, side, side), mode="trilinear", align_corners=False)
        warped = F.grid_sample(moving, grid + moved.permute(0, 2, 3, 4, 1), padding_mode="border", align_corners=False)
        rough = sum(field.diff(dim=dim).square().mean() for dim in (2, 3, 4))
        loss = rough - correlation(warped)
        loss.backward()
        optimizer.step()
        if change != "graph":
            history.append(loss.item())  # the progress bar shows it
        return loss.detach()

    return graphed(step) if change == "graph" else step


PROGRAMS = {
    dictation: {"static_graph": "static_cache", "cross_once": "compute_once", "bf16": "half_precision",
                "seldom_ask": "remove_sync"},
    form_reader: {"one_batch": "larger_batch", "half": "half_precision", "graph": "cuda_graph",
                  "pinned": "overlap_copies"},
    article_search: {"normalized_once": "compute_once", "topk": "largest_first", "half_index": "half_precision",
                     "no_grad": "no_autograd"},
    street_service: {"labels_on_gpu": "cpu_tensors", "normalize_on_gpu": "", "half": "half_precision",
                     "pinned": ""},
    argon_box: {"compile": "fuse_pointwise", "formula": "", "float32": "single_precision", "no_item": "remove_sync"},
    weather_forecast: {"bf16": "half_precision", "tf32": "tf32", "sdpa": "fused_attention", "constants_once": ""},
    pendulum_evolution: {"together": "larger_batch", "graph": "cuda_graph", "no_item": "remove_sync", "tf32": "tf32"},
    scan_registration: {"separable": "", "fixed_once": "compute_once", "graph": "cuda_graph",
                        "fused": "fused_optimizer"},
}  # fmt: skip
