"""Programs of several institutions: captions, contracts, rain, a robot, a bank, slides of tissue, and courts."""

import itertools
import math

import numpy
import torch
import torch.nn.functional as F
from setting import compiled, device, graphed, size, use_tf32
from torch import nn
from torch.distributions import Normal, kl_divergence

# Contrastive training of images and captions


class PairBlock(nn.Module):
    """A transformer layer with attention written out, for patches (not causal) or words (causal)."""

    def __init__(self, width, heads, causal, fused):
        super().__init__()
        self.heads, self.causal, self.fused = heads, causal, fused
        self.first_norm, self.second_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query_key_value, self.output = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def attend(self, x):
        batch, length, width = x.shape
        q, k, v = self.query_key_value(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        if self.fused:
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        else:
            scores = q @ k.transpose(-2, -1) * (width // self.heads) ** -0.5
            if self.causal:
                future = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
                scores = scores.masked_fill(future, float("-inf"))
            mixed = scores.softmax(dim=-1) @ v
        return self.output(mixed.transpose(1, 2).reshape(batch, length, width))

    def forward(self, x):
        x = x + self.attend(self.first_norm(x))
        return x + self.feed(self.second_norm(x))


class PhotoAndCaption(nn.Module):
    """A vision transformer and a text transformer that meet in one space."""

    def __init__(self, side, context, words, fused):
        super().__init__()
        wide, narrow, depth = size(512, 32), size(384, 32), size(8, 2)
        self.patches = nn.Conv2d(3, wide, 16, stride=16)
        self.class_token = nn.Parameter(torch.randn(1, 1, wide) * 0.02)
        self.image_positions = nn.Parameter(torch.randn(1, (side // 16) ** 2 + 1, wide) * 0.02)
        self.image_blocks = nn.Sequential(*[PairBlock(wide, wide // 64 or 2, False, fused) for _ in range(depth)])
        self.image_head = nn.Sequential(nn.LayerNorm(wide), nn.Linear(wide, 256, bias=False))
        self.words = nn.Embedding(words, narrow)
        self.word_positions = nn.Parameter(torch.randn(1, context, narrow) * 0.02)
        self.text_blocks = nn.Sequential(*[PairBlock(narrow, narrow // 64 or 2, True, fused) for _ in range(depth)])
        self.text_head = nn.Sequential(nn.LayerNorm(narrow), nn.Linear(narrow, 256, bias=False))
        self.scale = nn.Parameter(torch.tensor(math.log(1 / 0.07)))

    def forward(self, images, captions):
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.class_token.expand(len(x), -1, -1), x], dim=1) + self.image_positions
        image = F.normalize(self.image_head(self.image_blocks(x)[:, 0]), dim=-1)
        x = self.text_blocks(self.words(captions) + self.word_positions[:, : captions.shape[1]])
        ends = captions.argmax(dim=1)  # The end-of-text token has the largest number.
        text = F.normalize(self.text_head(x[torch.arange(len(x), device=x.device), ends]), dim=-1)
        return self.scale.exp() * image @ text.t()


def photo_captions(change):
    """Train an image encoder and a text encoder on pairs of photos and captions with a contrastive loss."""
    batch, side, context, words = size(128, 4), size(160, 32), size(77, 12), size(30000, 100)
    if change == "tf32":
        use_tf32()
    model = PhotoAndCaption(side, context, words, fused=change == "fused_attention").to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.2, fused=change == "fused_adamw")
    mean = torch.tensor([0.481, 0.458, 0.408], device=device).view(1, 3, 1, 1)
    spread = torch.tensor([0.269, 0.261, 0.276], device=device).view(1, 3, 1, 1)

    batches = []
    for _ in range(4):
        photos = torch.randint(0, 256, (batch, 3, side, side), dtype=torch.uint8)
        captions = torch.randint(1, words - 1, (batch, context))
        lengths = torch.randint(4, size(32, 8), (batch,))
        captions[torch.arange(batch), lengths] = words - 1
        captions[torch.arange(context) > lengths[:, None]] = 0
        batches.append((photos, captions))
    stream = itertools.cycle(batches)

    def step():
        photos, captions = next(stream)
        if change == "short_captions":
            captions = captions[:, : int(captions.argmax(dim=1).max()) + 1]
        photos, captions = photos.to(device), captions.to(device)
        photos = (photos.float() / 255 - mean) / spread
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=change == "bf16"):
            logits = model(photos, captions)
            target = torch.arange(len(logits), device=device)
            loss = (F.cross_entropy(logits, target) + F.cross_entropy(logits.t(), target)) / 2
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            model.scale.clamp_(0, math.log(100))
        return loss.detach()

    return step


# Reranking of documents


class CrossEncoderLayer(nn.Module):
    """A BERT layer (norm after the sum) that ignores padding."""

    def __init__(self, width, heads, fused):
        super().__init__()
        self.heads, self.fused = heads, fused
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.output = nn.Linear(width, width)
        self.inner, self.outer = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.attention_norm, self.feed_norm = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, x, real):
        batch, length, width = x.shape
        q, k, v = (
            layer(x).view(batch, length, self.heads, -1).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        if self.fused:
            mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=real[:, None, None, :])
        else:
            scores = torch.matmul(q, k.transpose(-1, -2)) / math.sqrt(width // self.heads)
            scores = scores + (1.0 - real[:, None, None, :].to(scores.dtype)) * -10000.0
            mixed = torch.matmul(torch.softmax(scores, dim=-1), v)
        x = self.attention_norm(x + self.output(mixed.transpose(1, 2).reshape(batch, length, width)))
        return self.feed_norm(x + self.outer(F.gelu(self.inner(x))))


class CrossEncoder(nn.Module):
    """Give a pair of a query and a passage, written one after the other, one score."""

    def __init__(self, words, width, heads, depth, longest, fused):
        super().__init__()
        self.words, self.positions = nn.Embedding(words, width), nn.Embedding(longest, width)
        self.norm = nn.LayerNorm(width)
        self.layers = nn.ModuleList([CrossEncoderLayer(width, heads, fused) for _ in range(depth)])
        self.pooler, self.score = nn.Linear(width, width), nn.Linear(width, 1)

    def forward(self, ids, real):
        x = self.norm(self.words(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device)))
        for layer in self.layers:
            x = layer(x, real)
        return self.score(torch.tanh(self.pooler(x[:, 0]))).squeeze(-1)


def clause_reranker(change):
    """Answer a search request over contracts: score the passages that were found, with a cross encoder."""
    words, longest, found = size(30522, 100), size(512, 32), size(64, 6)
    if change == "tf32":
        use_tf32()
    model = CrossEncoder(words, size(768, 32), size(12, 2), size(6, 2), longest, fused=change == "fused_attention")
    model = model.to(device).eval()
    if change == "bf16_model":
        model = model.bfloat16()
    chance = numpy.random.default_rng(5)
    requests = []
    for _ in range(4):
        query = chance.integers(1, words, size(14, 4)).tolist()
        lengths = numpy.minimum(chance.gamma(2.0, size(110, 6), found).astype(int) + 8, longest - len(query))
        requests.append([query + chance.integers(1, words, length).tolist() for length in lengths])
    stream = itertools.cycle(requests)
    batch_size = size(8, 2)

    def rerank(pairs):
        order = list(range(len(pairs)))
        if change == "sorted_by_length":
            order.sort(key=lambda number: len(pairs[number]))
        scores = torch.zeros(len(pairs))
        for start in range(0, len(pairs), batch_size):
            chosen = order[start : start + batch_size]
            ids = nn.utils.rnn.pad_sequence([torch.tensor(pairs[number]) for number in chosen], batch_first=True)
            ids = ids.to(device)
            scores[chosen] = model(ids, ids != 0).float().cpu()
        return scores

    def step():
        with torch.inference_mode() if change == "inference_mode" else torch.no_grad():
            return rerank(next(stream))

    return step


# Hamiltonian Monte Carlo


def rainfall_chains(change):
    """Sample a hierarchical model of rain at weather stations with Hamiltonian Monte Carlo in several chains."""
    days, features, stations = size(20000, 200), size(40, 5), size(60, 4)
    chains, leaps, pace = size(4, 2), size(16, 3), 0.004
    weather = torch.randn(days, features, device=device)
    station = torch.randint(0, stations, (days,), device=device)
    rain = (weather[:, 0] - 0.5 * weather[:, 1] + torch.randn(days, device=device) > 0.3).float()
    positions = 0.1 * torch.randn(chains, 2 + stations + features, device=device)
    design = torch.cat([weather, F.one_hot(station, stations).float()], dim=1)

    def log_posterior(position):
        mean, log_spread = position[..., :1], position[..., 1:2]
        raw_offsets, weights = position[..., 2 : 2 + stations], position[..., 2 + stations :]
        offsets = mean + log_spread.exp() * raw_offsets
        if change == "one_design_matrix":
            logits = torch.cat([weights, offsets], dim=-1) @ design.t()
        else:
            logits = weights @ weather.t() + offsets.index_select(-1, station)
        likelihood = -F.binary_cross_entropy_with_logits(logits, rain.expand_as(logits), reduction="none").sum(dim=-1)
        prior = -0.5 * (mean.square() + log_spread.square()).squeeze(-1)
        prior = prior - 0.5 * raw_offsets.square().sum(dim=-1) - 0.5 * weights.square().sum(dim=-1)
        return likelihood + prior

    density = compiled(log_posterior) if change == "compiled" else log_posterior
    checked = change not in ("no_checks", "graph")

    def density_and_gradient(position):
        position = position.detach().requires_grad_()
        value = density(position)
        (gradient,) = torch.autograd.grad(value.sum(), position)
        return value.detach(), gradient

    def transition(position, momentum, threshold):
        value, gradient = density_and_gradient(position)
        before = value - 0.5 * momentum.square().sum(dim=-1)
        proposed = position
        for _ in range(leaps):
            momentum = momentum + 0.5 * pace * gradient
            proposed = proposed + pace * momentum
            new_value, gradient = density_and_gradient(proposed)
            momentum = momentum + 0.5 * pace * gradient
            if checked and not torch.isfinite(new_value).any():  # The trajectory has diverged.
                break
        after = new_value - 0.5 * momentum.square().sum(dim=-1)
        accepted = threshold < after - before  # Not a number is never accepted.
        if checked and accepted.dim() == 0:
            return (proposed, new_value) if accepted else (position, value)
        return torch.where(accepted.unsqueeze(-1), proposed, position), torch.where(accepted, new_value, value)

    def step():
        momenta = torch.randn_like(positions)
        thresholds = torch.rand(chains, device=device).log()
        if change == "all_chains_together":
            moved, values = transition(positions, momenta, thresholds)
        else:
            moved, values = zip(
                *[transition(positions[chain], momenta[chain], thresholds[chain]) for chain in range(chains)],
                strict=True,
            )
            moved, values = torch.stack(moved), torch.stack(values)
        positions.copy_(moved)
        return values

    return graphed(step) if change == "graph" else step


# A world model with imagination


def small_net(inputs, hidden, outputs):
    """Return a network with one hidden layer."""
    return nn.Sequential(nn.Linear(inputs, hidden), nn.ELU(), nn.Linear(hidden, outputs))


class WorldModel(nn.Module):
    """A recurrent state-space model of camera images: what the robot will see, and the reward it will get."""

    def __init__(self, actions, memory, latent, hidden):
        super().__init__()
        c = size(32, 4)
        self.encoder = nn.Sequential(
            nn.Conv2d(3, c, 4, 2),
            nn.ReLU(),
            nn.Conv2d(c, 2 * c, 4, 2),
            nn.ReLU(),
            nn.Conv2d(2 * c, 4 * c, 4, 2),
            nn.ReLU(),
            nn.Conv2d(4 * c, 8 * c, 4, 2),
            nn.ReLU(),
            nn.Flatten(),
        )
        self.inputs = nn.Sequential(nn.Linear(latent + actions, hidden), nn.ELU())
        self.cell = nn.GRUCell(hidden, memory)
        self.prior = small_net(memory, hidden, 2 * latent)
        self.posterior = small_net(memory + 32 * c, hidden, 2 * latent)
        self.decoder = nn.Sequential(
            nn.Linear(memory + latent, 32 * c),
            nn.Unflatten(1, (32 * c, 1, 1)),
            nn.ConvTranspose2d(32 * c, 4 * c, 5, 2),
            nn.ReLU(),
            nn.ConvTranspose2d(4 * c, 2 * c, 5, 2),
            nn.ReLU(),
            nn.ConvTranspose2d(2 * c, c, 6, 2),
            nn.ReLU(),
            nn.ConvTranspose2d(c, 3, 6, 2),
        )
        self.reward = small_net(memory + latent, hidden, 1)

    def transition(self, state, action, memory):
        memory = self.cell(self.inputs(torch.cat([state, action], dim=-1)), memory)
        return memory, self.prior(memory)


def robot_imagination(change):
    """Train a robot's world model on recorded camera images, and its policy in imagined futures (like Dreamer)."""
    batch, length, horizon, recorded = size(16, 2), size(32, 3), size(12, 2), size(4000, 20)
    actions, memory_size, latent, hidden, discount, mix = 6, size(256, 16), size(32, 8), size(256, 16), 0.99, 0.95
    world = WorldModel(actions, memory_size, latent, hidden).to(device)
    actor = small_net(memory_size + latent, hidden, 2 * actions).to(device)
    critic = small_net(memory_size + latent, hidden, 1).to(device)
    capturable = change == "graph" and device.type == "cuda"
    world_optimizer, actor_optimizer, critic_optimizer = (
        torch.optim.Adam(part.parameters(), lr=rate, eps=1e-5, capturable=capturable)
        for part, rate in ((world, 6e-4), (actor, 8e-5), (critic, 8e-5))
    )
    frames = torch.randint(0, 256, (recorded, 3, 64, 64), dtype=torch.uint8, device=device)
    moves = torch.rand(recorded, actions, device=device) * 2 - 1
    rewards = torch.rand(recorded, device=device)
    offsets = torch.arange(length, device=device)
    transition = compiled(world.transition, dynamic=False) if change == "compiled_cell" else world.transition
    validate = False if change in ("no_validation", "graph") else None

    def normal(outputs):
        mean, spread = outputs.chunk(2, dim=-1)
        return Normal(mean, F.softplus(spread) + 0.1, validate_args=validate)

    def observe(images, action):
        memory = torch.zeros(batch, memory_size, device=device)
        state = torch.zeros(batch, latent, device=device)
        if change == "encoded_together":
            embedded = world.encoder(images.flatten(0, 1)).view(batch, length, -1)
        features, divergence = [], 0.0
        for time in range(length):
            seen = embedded[:, time] if change == "encoded_together" else world.encoder(images[:, time])
            memory, prior = transition(state, action[:, time], memory)
            posterior = normal(world.posterior(torch.cat([memory, seen], dim=-1)))
            state = posterior.rsample()
            divergence = divergence + kl_divergence(posterior, normal(prior)).sum(dim=-1).mean() / length
            features.append(torch.cat([memory, state], dim=-1))
        return torch.stack(features, dim=1).flatten(0, 1), divergence

    def imagine(features):
        imagined = [features]
        for _ in range(horizon):
            memory, state = imagined[-1].split([memory_size, latent], dim=-1)
            action = torch.tanh(normal(actor(imagined[-1].detach())).rsample())
            memory, prior = transition(state, action, memory)
            imagined.append(torch.cat([memory, normal(prior).rsample()], dim=-1))
        return torch.stack(imagined)

    def update(optimizer, part, loss):
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(part.parameters(), 100.0)
        optimizer.step()

    def step():
        for optimizer in (world_optimizer, actor_optimizer, critic_optimizer):
            optimizer.zero_grad()
        window = torch.randint(0, recorded - length, (batch, 1), device=device) + offsets
        images = frames[window].float() / 255 - 0.5
        features, divergence = observe(images, moves[window])
        image_loss = (world.decoder(features) - images.flatten(0, 1)).square().sum(dim=(1, 2, 3)).mean() / 2
        reward_loss = F.mse_loss(world.reward(features).squeeze(-1), rewards[window].flatten())
        world_loss = image_loss + reward_loss + divergence.clamp(min=1.0)
        update(world_optimizer, world, world_loss)

        world.requires_grad_(change != "frozen_model")
        critic.requires_grad_(change != "frozen_model")
        imagined = imagine(features.detach())
        reward, value = world.reward(imagined).squeeze(-1), critic(imagined).squeeze(-1)
        goal, goals = value[-1], []
        for time in reversed(range(horizon)):
            goal = reward[time + 1] + discount * ((1 - mix) * value[time + 1] + mix * goal)
            goals.append(goal)
        goals = torch.stack(goals[::-1])
        actor_loss = -goals.mean()
        update(actor_optimizer, actor, actor_loss)
        world.requires_grad_(True)
        critic.requires_grad_(True)

        critic_loss = F.mse_loss(critic(imagined[:-1].detach()).squeeze(-1), goals.detach())
        update(critic_optimizer, critic, critic_loss)
        return (world_loss + actor_loss + critic_loss).detach()

    return graphed(step) if change == "graph" else step


# A GAN for tables


class RowGenerator(nn.Module):
    """Make rows of a table from noise: numbers through tanh, each categorical column through a Gumbel softmax."""

    def __init__(self, noise, width, numbers, categories, together):
        super().__init__()
        self.numbers, self.categories, self.together = numbers, categories, together
        self.first = nn.Sequential(nn.Linear(noise, width), nn.BatchNorm1d(width), nn.ReLU())
        self.second = nn.Sequential(nn.Linear(noise + width, width), nn.BatchNorm1d(width), nn.ReLU())
        self.last = nn.Linear(noise + 2 * width, numbers + sum(categories))
        starts = torch.tensor([0, *categories[:-1]]).cumsum(0)
        places = torch.arange(max(categories))
        exists = places < torch.tensor(categories)[:, None]
        self.register_buffer("sources", ((starts[:, None] + places) * exists).flatten())
        self.register_buffer("missing", ~exists)
        self.register_buffer("kept", exists.flatten().nonzero().squeeze(1))

    def forward(self, noise):
        x = torch.cat([self.first(noise), noise], dim=1)
        x = self.last(torch.cat([self.second(x), x], dim=1))
        if self.together:
            padded = x[:, self.numbers :].index_select(1, self.sources).view(len(x), *self.missing.shape)
            chosen = F.gumbel_softmax(padded.masked_fill(self.missing, -1e9), tau=0.2, dim=-1)
            chosen = chosen.flatten(1).index_select(1, self.kept)
            return torch.cat([torch.tanh(x[:, : self.numbers]), chosen], dim=1)
        columns = []
        for column in range(self.numbers):
            columns.append(torch.tanh(x[:, column : column + 1]))
        start = self.numbers
        for count in self.categories:
            columns.append(F.gumbel_softmax(x[:, start : start + count], tau=0.2, dim=-1))
            start += count
        return torch.cat(columns, dim=1)


def ledger_generator(change):
    """Train a Wasserstein GAN with gradient penalty, and a fraud classifier beside it, to invent bank transactions."""
    batch, rows, noise_size, width, rounds = size(500, 16), size(40000, 100), 128, size(256, 16), 3
    if change == "batch_of_four":
        batch = 4 * batch
    numbers, categories = size(10, 2), [2, 3, 5, 8, 12, 20][: size(6, 2)] * size(4, 2) + [2]
    chance = numpy.random.default_rng(7)
    table = [numpy.tanh(chance.standard_normal((rows, numbers)))]
    table += [numpy.eye(count)[chance.integers(0, count, rows)] for count in categories]
    table = numpy.concatenate(table, axis=1).astype(numpy.float32)
    on_gpu = change in ("table_on_gpu", "graph")
    stored = torch.from_numpy(table).to(device) if on_gpu else None

    generator = RowGenerator(noise_size, width, numbers, categories, change == "columns_together").to(device)
    critic = nn.Sequential(
        nn.Linear(table.shape[1], width),
        nn.LeakyReLU(0.2),
        nn.Dropout(0.5),
        nn.Linear(width, width),
        nn.LeakyReLU(0.2),
        nn.Dropout(0.5),
        nn.Linear(width, 1),
    ).to(device)
    classifier = nn.Sequential(nn.Linear(table.shape[1] - 2, width), nn.ReLU(), nn.Linear(width, 2)).to(device)
    capturable = change == "graph" and device.type == "cuda"
    generator_optimizer, critic_optimizer, classifier_optimizer = (
        torch.optim.Adam(part.parameters(), lr=2e-4, betas=(0.5, 0.9), weight_decay=1e-6, capturable=capturable)
        for part in (generator, critic, classifier)
    )

    def real_rows():
        if on_gpu:
            return stored[torch.randint(0, rows, (batch,), device=device)]
        return torch.from_numpy(table[chance.integers(0, rows, batch)]).to(device)

    def gradient_penalty(real, fake):
        share = torch.rand(len(real), 1, device=device)
        mixed = (share * real + (1 - share) * fake).requires_grad_()
        (gradient,) = torch.autograd.grad(critic(mixed).sum(), mixed, create_graph=True)
        return 10 * (gradient.norm(2, dim=1) - 1).square().mean()

    def step():
        for _ in range(rounds):
            real = real_rows()
            fake = generator(torch.randn(batch, noise_size, device=device)).detach()
            critic_loss = critic(fake).mean() - critic(real).mean() + gradient_penalty(real, fake)
            critic_optimizer.zero_grad()
            critic_loss.backward()
            critic_optimizer.step()

        classifier_loss = F.cross_entropy(classifier(real[:, :-2]), real[:, -2:].argmax(dim=1))
        classifier_optimizer.zero_grad()
        classifier_loss.backward()
        classifier_optimizer.step()

        if change == "frozen_critic":
            critic.requires_grad_(False)
            classifier.requires_grad_(False)
        fake = generator(torch.randn(batch, noise_size, device=device))
        agreement = F.cross_entropy(classifier(fake[:, :-2]), fake[:, -2:].argmax(dim=1))
        generator_loss = agreement - critic(fake).mean()
        generator_optimizer.zero_grad()
        generator_loss.backward()
        generator_optimizer.step()
        if change == "frozen_critic":
            critic.requires_grad_(True)
            classifier.requires_grad_(True)
        return (critic_loss + classifier_loss + generator_loss).detach()

    return graphed(step) if change == "graph" else step


# Segmentation of microscope slides


def two_convolutions(inputs, outputs):
    """Return two convolutions with batch norm."""
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(),
        nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(),
    )


class TissueNet(nn.Module):
    """A U-Net with four levels."""

    def __init__(self, width, classes):
        super().__init__()
        widths = [width, 2 * width, 4 * width, 8 * width]
        self.down = nn.ModuleList([two_convolutions(a, b) for a, b in zip([3, *widths[:-1]], widths, strict=True)])
        self.raise_size = nn.ModuleList([nn.ConvTranspose2d(2 * w, w, 2, stride=2) for w in widths[-2::-1]])
        self.up = nn.ModuleList([two_convolutions(2 * w, w) for w in widths[-2::-1]])
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, x):
        kept = []
        for level, block in enumerate(self.down):
            x = block(F.max_pool2d(x, 2) if level else x)
            kept.append(x)
        kept.pop()
        for larger, block in zip(self.raise_size, self.up, strict=True):
            x = block(torch.cat([larger(x), kept.pop()], dim=1))
        return self.head(x)


def nuclei_slides(change):
    """Find and count cell nuclei in the tiles of a microscope slide with a U-Net and connected components."""
    tiles, side, together, longest_path = size(12, 4), size(512, 32), size(6, 2), size(48, 10)
    net = TissueNet(size(32, 4), 3).to(device).eval()
    if change == "channels_last":
        net = net.to(memory_format=torch.channels_last)
    run_net = compiled(net) if change == "compiled" else net
    smooth = F.interpolate(torch.rand(tiles, 3, side // 16, side // 16), size=(side, side), mode="bicubic")
    smooth = (smooth + 0.1 * torch.rand_like(smooth)).clamp(0, 1) * 255
    slide = smooth.byte().permute(0, 2, 3, 1).contiguous().numpy()
    ends = torch.tensor([0.01, 0.99], device=device)
    own_label = torch.arange(1, side * side + 1, device=device, dtype=torch.float32).view(1, 1, side, side)

    def load(tile):
        if change == "bytes_moved":
            image = torch.from_numpy(tile).to(device).permute(2, 0, 1).contiguous().float() / 255
        else:
            image = (torch.from_numpy(tile).permute(2, 0, 1).contiguous().float() / 255).to(device)
        low, high = torch.quantile(image.flatten(1), ends, dim=1)  # Slides are stained more or less strongly.
        return (image - low[:, None, None]) / (high - low + 1e-3)[:, None, None]

    def nucleus_probability(images):
        if change == "channels_last":
            images = images.contiguous(memory_format=torch.channels_last)
        total = 0.0
        for turned in ((), (2,), (3,), (2, 3)):
            with torch.autocast(device.type, dtype=torch.bfloat16, enabled=change == "bf16"):
                logits = run_net(images.flip(turned) if turned else images).float()
            probability = logits.softmax(dim=1)[:, 1:2]
            total = total + (probability.flip(turned) if turned else probability)
        return total / 4

    def measure(probability):
        mask = (probability > probability.mean(dim=(1, 2, 3), keepdim=True)).float()
        eroded = -F.max_pool2d(-mask, 3, stride=1, padding=1)
        mask = F.max_pool2d(eroded, 3, stride=1, padding=1)
        labels = own_label * mask
        for _ in range(longest_path):  # Each pixel takes the largest label of its neighbours until nothing changes.
            spread = F.max_pool2d(labels, 3, stride=1, padding=1) * mask
            if torch.equal(spread, labels):
                break
            labels = spread
        roots = ((labels == own_label) & (mask > 0)).sum(dim=(1, 2, 3))
        return torch.stack([roots.float(), mask.sum(dim=(1, 2, 3))], dim=1)

    @torch.no_grad()
    def step():
        images = torch.stack([load(tile) for tile in slide])
        probability = torch.cat([nucleus_probability(part) for part in images.split(together)])
        if change == "labelled_together":
            return measure(probability)
        return torch.cat([measure(tile[None]) for tile in probability])

    return step


# Fine-tuning of a language model


def rotated(x):
    """Turn queries or keys by their positions (rotary position embeddings)."""
    length, width = x.shape[-2:]
    rates = 10000.0 ** (-torch.arange(0, width, 2, device=x.device).float() / width)
    angles = (torch.arange(length, device=x.device).float()[:, None] * rates).repeat(1, 2)
    first, second = x.chunk(2, dim=-1)
    return (x * angles.cos() + torch.cat([-second, first], dim=-1) * angles.sin()).to(x.dtype)


class DecoderBlock(nn.Module):
    """A decoder layer with rotary positions, grouped keys and values, and a gated feed-forward part."""

    def __init__(self, width, heads, groups, inner, fused):
        super().__init__()
        self.heads, self.groups, self.head_width, self.fused = heads, groups, width // heads, fused
        self.norm_1, self.norm_2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv_proj = nn.Linear(width, (heads + 2 * groups) * self.head_width, bias=False)
        self.o_proj = nn.Linear(width, width, bias=False)
        self.gate, self.up = nn.Linear(width, inner, bias=False), nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def attend(self, x):
        batch, length, width = x.shape
        heads = self.qkv_proj(x).view(batch, length, -1, self.head_width).transpose(1, 2)
        q, k, v = heads.split([self.heads, self.groups, self.groups], dim=1)
        q, k = rotated(q), rotated(k)
        k = k.repeat_interleave(self.heads // self.groups, dim=1)
        v = v.repeat_interleave(self.heads // self.groups, dim=1)
        if self.fused:
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            scores = q @ k.transpose(2, 3) / math.sqrt(self.head_width)
            mask = torch.full((length, length), float("-inf"), device=x.device).triu(1)
            mixed = F.softmax(scores + mask, dim=-1, dtype=torch.float32).to(v.dtype) @ v
        return self.o_proj(mixed.transpose(1, 2).reshape(batch, length, width))

    def forward(self, x):
        x = x + self.attend(self.norm_1(x))
        normal = self.norm_2(x)
        return x + self.down(F.silu(self.gate(normal)) * self.up(normal))


@torch.no_grad()
def lion(parameters, momenta, rate, decay, together):
    """Do a step of the Lion optimizer: of fixed length, along the sign of a momentum."""
    if together:
        gradients = [parameter.grad for parameter in parameters]
        updates = torch._foreach_lerp(momenta, gradients, 0.1)
        torch._foreach_sign_(updates)
        torch._foreach_mul_(parameters, 1 - rate * decay)
        torch._foreach_add_(parameters, updates, alpha=-rate)
        torch._foreach_lerp_(momenta, gradients, 0.01)
        return
    for parameter, momentum in zip(parameters, momenta, strict=True):
        parameter.mul_(1 - rate * decay)
        update = momentum * 0.9 + parameter.grad * 0.1
        parameter.add_(torch.sign(update), alpha=-rate)
        momentum.mul_(0.99).add_(parameter.grad, alpha=0.01)


def court_summaries(change):
    """Fine-tune a decoder to summarise court decisions, with smoothed labels on the summary's tokens only."""
    words, width, length, examples, parts = size(16384, 64), size(1024, 32), size(512, 16), size(4, 2), size(4, 2)
    heads, groups, inner, depth = size(8, 4), 2, size(2816, 64), size(8, 2)
    blocks = [DecoderBlock(width, heads, groups, inner, change == "fused_attention") for _ in range(depth)]
    model = nn.ModuleDict(
        {
            "embedding": nn.Embedding(words, width),
            "blocks": nn.ModuleList(blocks),
            "norm": nn.RMSNorm(width),
            "head": nn.Linear(width, words, bias=False),
        }
    ).to(device)
    if change == "compiled":
        blocks = [compiled(block) for block in blocks]
    parameters = list(model.parameters())
    momenta = [torch.zeros_like(parameter) for parameter in parameters]

    tokens = torch.randint(0, words, (parts, examples, length + 1))
    summary_starts = torch.randint(length * 5 // 8, length * 7 // 8, (parts, examples, 1))
    asked = torch.arange(length) >= summary_starts
    if change == "whole_batch":
        tokens, asked, parts = tokens.flatten(0, 1)[None], asked.flatten(0, 1)[None], 1
    pinned = change == "pinned_batches"
    if pinned and device.type == "cuda":
        tokens = tokens.pin_memory()

    def smoothed_loss(logits, target):
        logits = logits.float()
        log_total = torch.logsumexp(logits, dim=-1)
        log_chances = F.log_softmax(logits, dim=-1)
        wrong = -log_chances.gather(-1, target.unsqueeze(-1)).squeeze(-1)
        return 0.9 * wrong - 0.1 * log_chances.mean(dim=-1) + 1e-4 * log_total.square()

    def part_loss(part, mask):
        weight = mask / mask.sum(dim=1, keepdim=True) / len(mask)  # Each example counts the same.
        where = mask.flatten().nonzero().squeeze(1).to(device) if change == "summary_only" else None
        part, weight = part.to(device, non_blocking=pinned), weight.to(device, non_blocking=pinned)
        x, target = model["embedding"](part[:, :-1]), part[:, 1:]
        for block in blocks:
            x = block(x)
        if where is not None:
            x, target, weight = x.flatten(0, 1)[where], target.flatten()[where], weight.flatten()[where]
        logits = model["head"](model["norm"](x))
        return (smoothed_loss(logits, target) * weight).sum()

    def step():
        model.zero_grad()
        total = torch.zeros((), device=device)
        for part, mask in zip(tokens, asked, strict=True):
            with torch.autocast(device.type, dtype=torch.bfloat16):
                loss = part_loss(part, mask) / parts
            loss.backward()
            total += loss.detach()
        norm = nn.utils.clip_grad_norm_(parameters, 1.0)
        if torch.isfinite(norm):  # A bad batch is skipped.
            lion(parameters, momenta, rate=1e-5, decay=0.1, together=change == "lion_foreach")
        return total

    return step


PROGRAMS = {
    photo_captions: {"bf16": "half_precision", "tf32": "tf32", "short_captions": "trim_padding",
                     "fused_attention": "fused_attention",
                     "fused_adamw": "fused_optimizer"},
    clause_reranker: {"bf16_model": "half_precision", "tf32": "tf32", "sorted_by_length": "trim_padding",
                      "fused_attention": "fused_attention", "inference_mode": "no_autograd"},
    rainfall_chains: {"all_chains_together": "larger_batch", "graph": "cuda_graph", "no_checks": "remove_sync",
                      "compiled": "fuse_pointwise", "one_design_matrix": ""},
    robot_imagination: {"graph": "cuda_graph", "encoded_together": "loop_inputs", "no_validation": "remove_sync",
                        "compiled_cell": "fuse_pointwise", "frozen_model": "no_autograd"},
    ledger_generator: {"graph": "cuda_graph", "columns_together": "larger_batch", "batch_of_four": ("", 4),
                       "table_on_gpu": "", "frozen_critic": "no_autograd"},
    nuclei_slides: {"labelled_together": "larger_batch", "bf16": "half_precision", "channels_last": "channels_last",
                    "bytes_moved": "", "compiled": "fuse_pointwise"},
    court_summaries: {"fused_attention": "fused_attention", "summary_only": "",
                      "lion_foreach": "update_graph",
                      "compiled": "fuse_pointwise", "pinned_batches": "overlap_copies", "whole_batch": "larger_batch"},
}  # fmt: skip
