"""Programs of kinds that the other modules lack, such as physics, meta learning, sound, volumes and clusters."""

import itertools
import math

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from setting import compiled, device, graphed, size, use_tf32


def beam_search(change):
    """A small GPT-2 of Hugging Face continues prompts of different lengths by generate() with four beams."""
    import transformers

    config = transformers.GPT2Config(
        vocab_size=size(16_000, 100), n_positions=128, n_embd=size(512, 32), n_layer=size(3, 1), n_head=size(8, 2),
        bos_token_id=1, eos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    model = transformers.GPT2LMHeadModel(config).to(device).eval()
    if change == "half":
        model = model.to(torch.bfloat16)
    length, count = size(48, 6), size(5, 3)
    tokens = torch.randint(2, config.vocab_size, (size(4, 2) * (2 if change == "texts_x2" else 1), length))
    first = torch.arange(len(tokens)) * 2 % (length // 2)  # prompts are padded on the left
    mask = (torch.arange(length) >= first[:, None]).long()
    tokens = (tokens * mask).to(device)
    how = {"max_new_tokens": count, "min_new_tokens": count, "num_beams": 4, "do_sample": False}
    if change == "static_cache":
        how["cache_implementation"] = "static"

    def step():
        found = model.generate(
            tokens, attention_mask=mask.to(device), return_dict_in_generate=True, output_scores=True, **how
        )
        return found.sequences[:, length:].cpu()

    return step


def heat_equation(change):
    """A physics-informed network learns the heat equation, whose second derivative comes from autograd.grad."""
    if change == "tf32":
        use_tf32()
    width = size(128, 8)
    hidden = [layer for _ in range(3) for layer in (nn.Linear(width, width), nn.Tanh())]
    network = nn.Sequential(nn.Linear(2, width), nn.Tanh(), *hidden, nn.Linear(width, 1)).to(device)
    optimizer = torch.optim.Adam(
        network.parameters(), lr=1e-3, capturable=change == "graph" and device.type == "cuda"
    )  # fmt: skip
    inside = torch.rand(size(10_000, 32), 2, device=device)
    start, left, right = (torch.rand(size(1000, 8), 2, device=device) for _ in range(3))
    start[:, 1], left[:, 0], right[:, 0] = 0.0, 0.0, 1.0
    wanted = torch.sin(math.pi * start[:, :1])

    def derivative(of, by):
        return torch.autograd.grad(of, by, torch.ones_like(of), create_graph=True)

    def residual():
        x, t = (one.clone().requires_grad_() for one in inside.split(1, 1))
        u = network(torch.cat([x, t], 1))
        if change == "one_gradient":
            u_t, u_x = derivative(u, (t, x))
        else:
            u_t, u_x = derivative(u, t)[0], derivative(u, x)[0]
        return u_t - 0.1 * derivative(u_x, x)[0]

    def update():
        optimizer.zero_grad()
        loss = residual().square().mean()
        if change == "at_once":
            values = network(torch.cat([start, left, right])).chunk(3)
        else:
            values = network(start), network(left), network(right)
        loss = loss + F.mse_loss(values[0], wanted) + values[1].square().mean() + values[2].square().mean()
        loss.backward()
        optimizer.step()
        return loss

    return graphed(update) if change == "graph" else update


def state_space_scan(change):
    """A block of Mamba is trained with its recurrence as a Python loop over the tokens, as without Mamba's kernels."""
    width, state, length, texts = size(512, 8), 16, size(40, 6), size(4, 2)

    class Mixer(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.inlet = nn.LayerNorm(width), nn.Linear(width, 2 * width, bias=False)
            self.conv = nn.Conv1d(width, width, 4, padding=3, groups=width)
            self.mix, self.rate = nn.Linear(width, 32 + 2 * state, bias=False), nn.Linear(32, width)
            self.log_a = nn.Parameter(torch.log(torch.arange(1, state + 1).float()).repeat(width, 1))
            self.skip, self.out = nn.Parameter(torch.ones(width)), nn.Linear(width, width, bias=False)

        def forward(self, x):
            h, gate = self.inlet(self.norm(x)).transpose(1, 2).chunk(2, 1)
            h = F.silu(self.conv(h)[..., :length])
            rate, b, c = self.mix(h.transpose(1, 2)).split([32, state, state], -1)
            rate = F.softplus(self.rate(rate)).transpose(1, 2)
            decay = torch.exp(-self.log_a.exp()[None, :, None] * rate[..., None])
            y = self.scan(decay, rate[..., None] * b[:, None] * h[..., None], c)
            return x + self.out(((y + h * self.skip[:, None]) * F.silu(gate)).transpose(1, 2))

        def scan(self, decay, added, c):
            """Return what the states give: (texts, width, length). decay, added: (texts, width, length, state)."""
            if change == "doubling":
                reach = 1
                while reach < length:
                    more = decay[:, :, reach:] * added[:, :, :-reach]
                    added = added + F.pad(more, (0, 0, reach, 0))
                    decay = decay * F.pad(decay[:, :, :-reach], (0, 0, reach, 0), value=1.0)
                    reach *= 2
                return (added * c[:, None]).sum(-1)
            now, found = torch.zeros_like(added[:, :, 0]), []
            if change == "unbind":
                for a, b, one in zip(decay.unbind(2), added.unbind(2), c.unsqueeze(-1).unbind(1), strict=True):
                    now = a * now + b
                    found.append(torch.matmul(now, one)[:, :, 0])
            else:
                for place in range(length):
                    now = decay[:, :, place] * now + added[:, :, place]
                    found.append(torch.matmul(now, c[:, place].unsqueeze(-1))[:, :, 0])
            return torch.stack(found, -1)

    mixer = Mixer().to(device)
    optimizer = torch.optim.AdamW(
        mixer.parameters(), lr=1e-3, capturable=change == "graph" and device.type == "cuda"
    )  # fmt: skip
    x, goal = torch.randn(2, texts, length, width, device=device)

    def update():
        with torch.autocast(device.type, torch.bfloat16, enabled=change == "bf16"):
            out = mixer(x)
        loss = F.mse_loss(out.float(), goal)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return graphed(update) if change == "graph" else update


def few_shot_sines(change):
    """MAML: a network adapts to each task by two steps of gradient descent, and learns through them, task by task."""
    from torch.func import functional_call, grad, vmap

    model = nn.Sequential(nn.Linear(1, 40), nn.ReLU(), nn.Linear(40, 40), nn.ReLU(), nn.Linear(40, 1)).to(device)
    optimizer = torch.optim.Adam(
        model.parameters(), lr=1e-3, fused=change == "fused" or None,
        capturable=change == "graph" and device.type == "cuda",
    )  # fmt: skip
    tasks, shots = size(5, 2), 10
    height, phase = torch.rand(2, tasks, 1, 1, device=device) * 3 + 0.5
    x = torch.rand(tasks, 2 * shots, 1, device=device) * 10 - 5
    y = height * torch.sin(x - phase)

    def error(weights, x, y):
        return F.mse_loss(functional_call(model, weights, (x,)), y)

    def of_one_task(x, y):
        weights = dict(model.named_parameters())
        for _ in range(2):
            loss = error(weights, x[:shots], y[:shots])
            slopes = torch.autograd.grad(loss, tuple(weights.values()), create_graph=change != "first_order")
            weights = {name: one - 0.01 * slope for (name, one), slope in zip(weights.items(), slopes, strict=True)}
        return error(weights, x[shots:], y[shots:])

    def of_any_task(weights, x, y):
        for _ in range(2):
            slopes = grad(error)(weights, x[:shots], y[:shots])
            weights = {name: one - 0.01 * slopes[name] for name, one in weights.items()}
        return error(weights, x[shots:], y[shots:])

    def update():
        if change == "at_once":
            loss = vmap(of_any_task, in_dims=(None, 0, 0))(dict(model.named_parameters()), x, y).mean()
        else:
            loss = sum(of_one_task(x[task], y[task]) for task in range(tasks)) / tasks
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return graphed(update) if change == "graph" else update


def distilled_student(change):
    """A small BERT learns from a larger one. The teacher is in eval(), but its gradients are computed as well."""
    import transformers

    if change == "tf32":
        use_tf32()

    def bert(width, depth):
        return transformers.BertForSequenceClassification(transformers.BertConfig(
            vocab_size=size(30_522, 100), hidden_size=width, intermediate_size=4 * width, num_hidden_layers=depth,
            num_attention_heads=size(8, 2), max_position_embeddings=size(128, 16), num_labels=4,
            hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        )).to(device)  # fmt: skip

    teacher, student = bert(size(512, 32), size(6, 2)).eval(), bert(size(256, 16), size(3, 1)).train()
    optimizer = torch.optim.AdamW(student.parameters(), lr=5e-5, fused=change == "fused" or None)
    tokens = torch.randint(1, student.config.vocab_size, (size(24, 2), size(96, 12)), device=device)
    batch = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    labels = torch.randint(0, 4, (len(tokens),), device=device)
    answer = torch.no_grad()(teacher.forward) if change == "no_grad" else teacher.forward

    def step():
        with torch.autocast(device.type, torch.bfloat16, enabled=change == "bf16"):
            taught = answer(**batch).logits.float()
            found = student(**batch).logits.float()
        soft = F.kl_div(F.log_softmax(found / 2, -1), F.softmax(taught / 2, -1), reduction="batchmean") * 4
        loss = 0.7 * soft + 0.3 * F.cross_entropy(found, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return step


def policy_update(change):
    """A PPO update of a language model: log-probabilities over the whole vocabulary, for two micro-batches."""
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=size(32_000, 100), hidden_size=size(512, 32), intermediate_size=size(1408, 64),
        num_hidden_layers=2, num_attention_heads=size(8, 2), num_key_value_heads=size(8, 2), use_cache=False,
    )  # fmt: skip
    policy, reference = (
        transformers.LlamaForCausalLM(config).to(torch.bfloat16).to(device) for _ in range(2)
    )  # fmt: skip
    reference.eval().requires_grad_(False)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-6)
    prompt, length = size(96, 6), size(256, 16)
    batches = [torch.randint(0, config.vocab_size, (size(8, 2), length), device=device) for _ in range(2)]
    written = (torch.arange(1, length, device=device) >= prompt).float().expand(len(batches[0]), -1)
    before = torch.full_like(written, -math.log(config.vocab_size))
    advantages = torch.randn(written.shape, device=device)
    log = []

    def chances(logits, tokens):
        """Return the log-probability of each token, and the entropy of the distribution that it is drawn from."""
        logits = logits[:, :-1].float()
        chosen = tokens[:, -logits.shape[1] :, None]
        if change == "logsumexp":
            total = logits.logsumexp(-1)
            with torch.no_grad():
                entropy = total - (logits.softmax(-1) * logits).sum(-1)
            return logits.gather(-1, chosen).squeeze(-1) - total, entropy
        every = F.log_softmax(logits, -1)
        with torch.no_grad():
            entropy = -(every.exp() * every).sum(-1)
        return every.gather(-1, chosen).squeeze(-1), entropy

    chances = compiled(chances) if change == "compile" else chances
    kept = {"logits_to_keep": length - prompt + 1} if change == "response_only" else {}

    def mean(values):
        return (values * written[:, -values.shape[1] :]).sum() / written.sum()

    def step():
        total = 0.0
        for tokens in batches:
            with torch.no_grad():
                theirs, _ = chances(reference(input_ids=tokens, **kept).logits, tokens)
            ours, entropy = chances(policy(input_ids=tokens, **kept).logits, tokens)
            count = ours.shape[1]
            ratio = (ours - before[:, -count:]).exp()
            gained = advantages[:, -count:] * ratio
            clipped = advantages[:, -count:] * ratio.clamp(0.8, 1.2)
            kl = (theirs - ours).exp() - (theirs - ours) - 1
            loss = mean(0.05 * kl - torch.minimum(gained, clipped)) / len(batches)
            loss.backward()
            figures = loss.detach(), mean(kl.detach()), mean(entropy), mean((ratio.detach() - 1).abs() > 0.2)
            log.append(figures if change == "no_item" else [one.item() for one in figures])
            total = total + loss.detach()
        nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return total

    return step


def tabular_transformer(change):
    """A transformer reads rows of a table. Each of 20 categories has its own embedding, each of 10 numbers a layer."""
    width, count = size(64, 8), size(512, 8) * (2 if change == "batch_x2" else 1)
    kinds = [3 + 17 * place % 97 for place in range(20)]

    class Separate(nn.Module):
        def __init__(self):
            super().__init__()
            self.tables = nn.ModuleList(nn.Embedding(one, width) for one in kinds)
            self.scales = nn.ModuleList(nn.Linear(1, width) for _ in range(10))

        def forward(self, categories, numbers):
            words = [table(categories[:, place]) for place, table in enumerate(self.tables)]
            words += [scale(numbers[:, place : place + 1]) for place, scale in enumerate(self.scales)]
            return torch.stack(words, 1)

    class Together(nn.Module):
        def __init__(self, separate):
            super().__init__()
            self.table = nn.Parameter(torch.cat([one.weight.detach() for one in separate.tables]))
            self.scale = nn.Parameter(torch.stack([one.weight.detach()[:, 0] for one in separate.scales]))
            self.shift = nn.Parameter(torch.stack([one.bias.detach() for one in separate.scales]))
            self.register_buffer("starts", torch.tensor([0, *itertools.accumulate(kinds)][:-1]))

        def forward(self, categories, numbers):
            words = F.embedding(categories + self.starts, self.table)
            return torch.cat([words, numbers[..., None] * self.scale + self.shift], 1)

    class Table(nn.Module):
        def __init__(self):
            super().__init__()
            self.words = Separate()
            self.summary = nn.Parameter(torch.zeros(1, 1, width))
            layer = nn.TransformerEncoderLayer(width, size(8, 2), 2 * width, 0.0, batch_first=True, norm_first=True)
            self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
            self.out = nn.Linear(width, 1)
            if change == "one_table":
                self.words = Together(self.words)

        def forward(self, categories, numbers):
            words = self.words(categories, numbers)
            x = torch.cat([self.summary.expand(len(words), -1, -1), words], 1)
            return self.out(self.body(x)[:, 0]).squeeze(-1)

    model = Table().to(device)
    run = compiled(model) if change == "compile" else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=change == "fused" or None)
    categories = torch.stack([torch.randint(0, one, (count,)) for one in kinds], 1).to(device)
    numbers, clicked = torch.randn(count, 10, device=device), torch.rand(count, device=device).round()

    def step():
        loss = F.binary_cross_entropy_with_logits(run(categories, numbers), clicked)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss

    return step


def spectrogram_tagger(change):
    """A network tags sounds: a mel spectrogram of each clip is made and masked on the GPU, then convolutions follow."""
    clips, samples, points, bands = size(24, 2), size(32_000, 4000), 512, size(64, 16)
    sounds = torch.randn(clips, samples, device=device)
    labels = torch.randint(0, 20, (clips,), device=device)
    centers = torch.linspace(0, points // 2, bands + 2)
    rising = (torch.arange(points // 2 + 1)[:, None] - centers[:-2]) / (centers[1:-1] - centers[:-2])
    falling = (centers[2:] - torch.arange(points // 2 + 1)[:, None]) / (centers[2:] - centers[1:-1])
    filters = torch.minimum(rising, falling).clamp(min=0).to(device)
    before, layers = 1, []
    for width in (size(32, 4), size(64, 4), size(128, 8), size(256, 8)):
        layers += [nn.Conv2d(before, width, 3, 2, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
        before = width
    network = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, 20)).to(device)
    if change == "channels_last":
        network = network.to(memory_format=torch.channels_last)
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-3)
    chooser = torch.Generator().manual_seed(1)
    kept = torch.hann_window(points).to(device)
    right = []

    def spectrogram(some):
        """Return the mel spectrogram of one clip or of several ones: (..., bands, frames)."""
        window = kept if change == "window_once" else torch.hann_window(points).to(device)
        power = torch.stft(some, points, size(160, 256), window=window, return_complex=True).abs().square()
        mel = torch.log(power.transpose(-1, -2) @ filters + 1e-6).transpose(-1, -2)
        flat = mel.flatten(-2)
        return (mel - flat.mean(-1)[..., None, None]) / (flat.std(-1)[..., None, None] + 1e-5)

    def masks():
        return torch.randint(0, bands // 2, (clips, 2), generator=chooser).tolist()

    def prepared():
        if change == "at_once":
            mels = spectrogram(sounds)
            starts = torch.tensor(masks()).to(device)[..., None]
            ahead = torch.arange(max(mels.shape[1:]), device=device)
            hidden = (ahead >= starts) & (ahead < starts + 8)
            masked = hidden[:, 0, : mels.shape[1], None] | hidden[:, 1, None, : mels.shape[2]]
            return mels.masked_fill(masked, 0.0)
        found = []
        for sound, (band, frame) in zip(sounds, masks(), strict=True):
            mel = spectrogram(sound)
            mel[band : band + 8] = 0.0
            mel[:, frame : frame + 8] = 0.0
            found.append(mel)
        return torch.stack(found)

    def step():
        images = prepared()[:, None]
        if change == "channels_last":
            images = images.to(memory_format=torch.channels_last)
        scores = network(images)
        loss = F.cross_entropy(scores, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if change == "numpy_later":
            right.append((scores.detach().argmax(-1), labels))
        else:
            found, wanted = scores.detach().argmax(-1).cpu().numpy(), labels.cpu().numpy()
            right.append(np.mean(found == wanted))
        return loss

    return step


def triplet_miner(change):
    """Embeddings are learned with all triplets of a batch, whose distances come from broadcast differences."""
    count, width = size(384, 12), size(256, 8)
    network = nn.Sequential(nn.Linear(size(1024, 16), 512), nn.ReLU(), nn.Linear(512, width)).to(device)
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-4, fused=change == "fused" or None)
    x = torch.randn(count, size(1024, 16), device=device)
    labels = torch.arange(count, device=device) % (count // 4)

    def of_triplets(z):
        if change == "products":
            squares = z.square().sum(-1)
            distances = squares[:, None] + squares[None] - 2 * z @ z.T
        else:
            distances = (z[:, None] - z[None]).square().sum(-1)
        distances = distances.clamp(min=1e-6).sqrt()
        same = labels[:, None] == labels[None]
        positive = same & ~torch.eye(count, dtype=torch.bool, device=device)
        mask = positive[:, :, None] & ~same[:, None, :]
        losses = F.relu(distances[:, :, None] - distances[:, None, :] + 0.2) * mask.float()
        return losses.sum() / ((losses > 1e-16).sum() + 1e-16)

    run = compiled(of_triplets) if change == "compile" else of_triplets

    def step():
        with torch.autocast(device.type, torch.bfloat16, enabled=change == "bf16"):
            z = network(x)
        loss = run(F.normalize(z.float(), dim=-1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return step


class _Residual(nn.Module):
    def __init__(self, before, after, width):
        super().__init__()
        self.first, self.second = nn.GroupNorm(4, before), nn.GroupNorm(4, after)
        self.inner, self.outer = nn.Conv2d(before, after, 3, 1, 1), nn.Conv2d(after, after, 3, 1, 1)
        self.shift = nn.Linear(width, after)
        self.skip = nn.Conv2d(before, after, 1) if before != after else nn.Identity()

    def forward(self, x, condition):
        h = self.inner(F.silu(self.first(x))) + self.shift(condition)[:, :, None, None]
        return self.skip(x) + self.outer(F.silu(self.second(h)))


class _Denoiser(nn.Module):
    """A U-Net of two levels with a condition, which is a class and a time."""

    def __init__(self, width):
        super().__init__()
        self.classes, self.time = nn.Embedding(11, width), nn.Linear(64, width)
        self.inlet, self.outlet = nn.Conv2d(4, width, 3, 1, 1), nn.Conv2d(width, 4, 3, 1, 1)
        self.high, self.low = _Residual(width, width, width), _Residual(width, 2 * width, width)
        self.down, self.up = nn.Conv2d(width, width, 3, 2, 1), nn.Conv2d(2 * width, width, 3, 1, 1)
        self.norm, self.attention = (
            nn.LayerNorm(2 * width), nn.MultiheadAttention(2 * width, 4, batch_first=True),
        )  # fmt: skip
        self.middle, self.last = _Residual(2 * width, 2 * width, width), _Residual(2 * width, width, width)

    def forward(self, x, times, classes):
        angles = times[:, None] * torch.exp(-torch.arange(32, device=x.device) / 32 * 9.2)
        waves = torch.cat([angles.cos(), angles.sin()], -1)
        condition = F.silu(self.time(waves) + self.classes(classes))
        high = self.high(self.inlet(x), condition)
        h = self.low(self.down(high), condition)
        words = self.norm(h.flatten(2).transpose(1, 2))
        words = self.attention(words, words, words, need_weights=False)[0]
        h = self.middle(h + words.transpose(1, 2).reshape(h.shape), condition)
        h = self.up(F.interpolate(h, scale_factor=2.0, mode="nearest"))
        return self.outlet(self.last(torch.cat([h, high], 1), condition))


def guided_sampler(change):
    """A sampler with classifier-free guidance runs its network twice a step; its scheduler's table is on the CPU."""
    model = _Denoiser(size(128, 8)).to(device).eval()
    if change == "channels_last":
        model = model.to(memory_format=torch.channels_last)
    model = compiled(model) if change == "compile" else model
    images, side, steps = 2, size(64, 8), size(6, 2)
    noise = torch.randn(images, 4, side, side, device=device)
    if change == "channels_last":
        noise = noise.to(memory_format=torch.channels_last)
    classes, none = torch.randint(0, 10, (images,), device=device), torch.full((images,), 10, device=device)
    kept = torch.cumprod(1 - torch.linspace(1e-4, 0.02, 1000), 0)
    times = torch.linspace(999, 0, steps + 1).long()
    if change != "times_on_cpu":
        times = times.to(device)

    def guided(x, time):
        each = time.to(device).expand(images)
        if change == "at_once":
            both = model(torch.cat([x, x]), torch.cat([each, each]), torch.cat([classes, none]))
            with_class, without = both.chunk(2)
        else:
            with_class, without = model(x, each, classes), model(x, each, none)
        return without + 4.0 * (with_class - without)

    here, now = noise.clone(), torch.zeros((), device=device, dtype=torch.long)
    replayed = graphed(torch.no_grad()(lambda: guided(here, now))) if change == "graph" else None

    def predicted(x, time):
        if change != "graph":
            return guided(x, time)
        here.copy_(x)
        now.copy_(time)
        return replayed()

    @torch.no_grad()
    def step():
        x = noise
        for time, after in itertools.pairwise(times):
            found = predicted(x, time)
            a, b = kept[time], kept[after]
            clean = ((x - (1 - a).sqrt() * found) / a.sqrt()).clamp(-3, 3)
            x = b.sqrt() * clean + (1 - b).sqrt() * found
        return x

    return step


def fourier_operator(change):
    """A Fourier neural operator learns a flow on a grid by FFTs, products of complex modes, and small convolutions."""
    width, modes, side, count = size(32, 4), size(12, 2), size(64, 8), size(16, 2)

    class Spectral(nn.Module):
        def __init__(self):
            super().__init__()
            scale = 1 / width**2
            self.low, self.high = (
                nn.Parameter(scale * torch.rand(width, width, modes, modes, 2)) for _ in range(2)
            )  # fmt: skip

        def forward(self, x):
            found = torch.fft.rfft2(x)
            out = torch.zeros(len(x), width, side, side // 2 + 1, dtype=torch.cfloat, device=x.device)
            for weight, rows in ((self.low, slice(modes)), (self.high, slice(-modes, None))):
                some, weight = found[:, :, rows, :modes], torch.view_as_complex(weight)
                if change == "bmm":
                    product = torch.bmm(
                        some.permute(2, 3, 0, 1).flatten(0, 1), weight.permute(2, 3, 0, 1).flatten(0, 1)
                    )
                    out[:, :, rows, :modes] = product.unflatten(0, (modes, modes)).permute(2, 3, 0, 1)
                else:
                    out[:, :, rows, :modes] = torch.einsum("bixy,ioxy->boxy", some, weight)
            return torch.fft.irfft2(out, s=(side, side))

    class Operator(nn.Module):
        def __init__(self):
            super().__init__()
            self.inlet, self.first, self.last = nn.Linear(3, width), nn.Linear(width, 128), nn.Linear(128, 1)
            self.spectral = nn.ModuleList(Spectral() for _ in range(4))
            self.local = nn.ModuleList(nn.Conv2d(width, width, 1) for _ in range(4))

        def forward(self, x):
            places = torch.linspace(0, 1, side, device=x.device)
            grid = torch.stack(torch.meshgrid(places, places, indexing="ij"), -1).expand(len(x), -1, -1, -1)
            h = self.inlet(torch.cat([x[..., None], grid], -1)).permute(0, 3, 1, 2)
            for spectral, local in zip(self.spectral, self.local, strict=True):
                h = F.gelu(spectral(h.float()) + local(h))
            return self.last(F.gelu(self.first(h.permute(0, 2, 3, 1)))).squeeze(-1)

    model = Operator().to(device)
    run = compiled(model) if change == "compile" else model
    optimizer = torch.optim.Adam(
        model.parameters(), lr=1e-3, weight_decay=1e-4, capturable=change == "graph" and device.type == "cuda"
    )  # fmt: skip
    x, y = torch.randn(2, count, side, side, device=device)

    def update():
        with torch.autocast(device.type, torch.bfloat16, enabled=change == "bf16"):
            found = run(x)
        loss = ((found.float() - y).flatten(1).norm(dim=1) / y.flatten(1).norm(dim=1)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return graphed(update) if change == "graph" else update


def organ_segmentation(change):
    """A 3D U-Net with instance norm is trained in mixed precision; its Dice loss goes through the classes."""
    widths, side, classes = (size(24, 2), size(48, 4), size(96, 4), size(160, 4)), size(64, 16), 5

    def block(before, after):
        return nn.Sequential(
            nn.Conv3d(before, after, 3, 1, 1), nn.InstanceNorm3d(after, affine=True), nn.LeakyReLU(0.01, True),
            nn.Conv3d(after, after, 3, 1, 1), nn.InstanceNorm3d(after, affine=True), nn.LeakyReLU(0.01, True),
        )  # fmt: skip

    class Volumes(nn.Module):
        def __init__(self):
            super().__init__()
            self.down = nn.ModuleList(block(a, b) for a, b in itertools.pairwise((1, *widths)))
            pairs = [*itertools.pairwise(widths)][::-1]
            self.up = nn.ModuleList(nn.ConvTranspose3d(b, a, 2, 2) for a, b in pairs)
            self.merge = nn.ModuleList(block(2 * a, a) for a, _ in pairs)
            self.out = nn.ModuleList(nn.Conv3d(a, classes, 1) for a, _ in pairs[1:])

        def forward(self, x):
            skips = []
            for level, part in enumerate(self.down):
                x = part(F.max_pool3d(x, 2) if level else x)
                skips.append(x)
            x, found = skips.pop(), []
            for level, (up, merge) in enumerate(zip(self.up, self.merge, strict=True)):
                x = merge(torch.cat([up(x), skips.pop()], 1))
                if level:
                    found.append(self.out[level - 1](x))
            return found  # of half the resolution, and of the whole one

    model = Volumes().to(device)
    volumes = torch.randn(2, 1, side, side, side, device=device)
    organs = torch.randint(0, classes - 1, (2, side, side, side), device=device)  # the last class is absent
    if change == "channels_last":
        model, volumes = (one.to(memory_format=torch.channels_last_3d) for one in (model, volumes))
    fast = torch.float16 if device.type == "cuda" else torch.bfloat16
    scaler = torch.amp.GradScaler(device.type, enabled=device.type == "cuda")
    optimizer = torch.optim.SGD(
        model.parameters(), lr=1e-2, momentum=0.99, nesterov=True, weight_decay=3e-5, fused=change == "fused" or None
    )

    def dice(scores, wanted):
        shares, total, present = scores.softmax(1), 0.0, 0
        for number in range(1, classes):
            mine = (wanted == number).float()
            if change == "no_check":
                is_here = (mine.sum() > 0).float()
            elif mine.sum() == 0:
                continue
            else:
                is_here = 1
            overlap = (shares[:, number] * mine).sum()
            total = total + is_here * (2 * overlap + 1e-5) / (shares[:, number].sum() + mine.sum() + 1e-5)
            present = present + is_here
        return 1 - total / present

    def step():
        with torch.autocast(device.type, fast):
            found = model(volumes)
        loss = 0.0
        for scores, share in zip(found, (1 / 3, 2 / 3), strict=True):
            scores = scores.float()
            wanted = F.interpolate(organs[:, None].float(), scores.shape[2:], mode="nearest")[:, 0].long()
            loss = loss + share * (F.cross_entropy(scores, wanted) + dice(scores, wanted))
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 12.0)
        scaler.step(optimizer)
        scaler.update()
        return loss

    return step


def private_training(change):
    """DP-SGD by hand: each sample's gradient is computed, clipped by its norm and added, then noise is added."""
    from torch.func import functional_call, grad_and_value, vmap

    model = nn.Sequential(
        nn.Conv2d(1, 16, 8, 2, 3), nn.ReLU(), nn.MaxPool2d(2, 1), nn.Conv2d(16, 32, 4, 2), nn.ReLU(),
        nn.MaxPool2d(2, 1), nn.Flatten(), nn.Linear(32 * 16, 32), nn.ReLU(), nn.Linear(32, 10),
    ).to(device)  # fmt: skip
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9, fused=change == "fused" or None)
    count, limit = size(14, 3), 1.0
    images, labels = torch.randn(count, 1, 28, 28, device=device), torch.randint(0, 10, (count,), device=device)

    def error(weights, image, label):
        return F.cross_entropy(functional_call(model, weights, (image[None],)), label[None])

    def summed_at_once():
        weights = {name: one.detach() for name, one in model.named_parameters()}
        every, losses = vmap(
            grad_and_value(error), in_dims=(None, 0, 0)
        )(weights, images, labels)  # fmt: skip
        norms = torch.stack([one.flatten(1).norm(dim=1) for one in every.values()]).norm(dim=0)
        factors = (limit / (norms + 1e-6)).clamp(max=1.0)
        return [torch.einsum("s,s...->...", factors, one) for one in every.values()], losses.sum()

    def summed():
        total, loss = [torch.zeros_like(one) for one in parameters], 0.0
        for image, label in zip(images, labels, strict=True):
            model.zero_grad()
            one_loss = F.cross_entropy(model(image[None]), label[None])
            one_loss.backward()
            norm = torch.stack([one.grad.norm() for one in parameters]).norm()
            if change == "no_item":
                factor = (limit / (norm + 1e-6)).clamp(max=1.0)
            else:
                factor = min(1.0, limit / (norm.item() + 1e-6))
            if change == "foreach":
                torch._foreach_add_(total, torch._foreach_mul([one.grad for one in parameters], factor))
            else:
                for mine, one in zip(total, parameters, strict=True):
                    mine += one.grad * factor
            loss = loss + one_loss.detach()
        return total, loss

    def step():
        total, loss = summed_at_once() if change == "at_once" else summed()
        for one, gradient in zip(parameters, total, strict=True):
            one.grad = (gradient + 0.5 * limit * torch.randn_like(gradient)) / count
        optimizer.step()
        return loss / count

    return step


def color_clusters(change):
    """k-means in fp32: each cluster's points are selected by a mask, and the shift of the centers is read each time."""
    if change == "tf32":
        use_tf32()
    points, number = torch.randn(size(200_000, 300), 32, device=device), size(24, 4)
    start = points[:number].clone()

    def moved(nearest, centers):
        if change == "at_once":
            totals = torch.zeros_like(centers).index_add_(0, nearest, points)
            counts = torch.bincount(nearest, minlength=number)[:, None]
            return torch.where(counts > 0, totals / counts.clamp(min=1), centers)
        after = centers.clone()
        for cluster in range(number):
            mine = nearest == cluster
            if change == "weighted":
                weights = mine.float()
                after[cluster] = torch.where(mine.any(), weights @ points / weights.sum(), centers[cluster])
            elif mine.any():
                after[cluster] = points[mine].mean(0)
        return after

    @torch.no_grad()
    def step():
        centers = start
        for _ in range(3):
            nearest = torch.cdist(points, centers).argmin(1)
            after = moved(nearest, centers)
            shift = (after - centers).norm()
            centers = after
            if shift.item() < 1e-4:
                break
        return centers

    return step


PROGRAMS = {
    beam_search: {"half": "half_precision", "texts_x2": ("double_batch", 2), "static_cache": ""},
    heat_equation: {"one_gradient": "", "at_once": "larger_batch", "graph": "cuda_graph", "tf32": "tf32"},
    state_space_scan: {"unbind": "unbind", "doubling": "", "graph": "cuda_graph", "bf16": "half_precision"},
    few_shot_sines: {"at_once": "larger_batch", "first_order": "", "fused": "fused_optimizer", "graph": "cuda_graph"},
    distilled_student: {"no_grad": "no_autograd", "tf32": "tf32", "bf16": "half_precision",
                        "fused": "fused_optimizer"},
    policy_update: {"no_item": "remove_sync", "logsumexp": "", "response_only": "", "compile": ""},
    tabular_transformer: {"one_table": "larger_batch", "fused": "fused_optimizer", "compile": "fuse_pointwise",
                          "batch_x2": ("double_batch", 2)},
    spectrogram_tagger: {"at_once": "larger_batch", "window_once": "cpu_tensors", "channels_last": "channels_last",
                         "numpy_later": "remove_sync"},
    triplet_miner: {"products": "", "compile": "fuse_pointwise", "bf16": "half_precision", "fused": "fused_optimizer"},
    guided_sampler: {"at_once": "larger_batch", "times_on_cpu": "remove_sync", "graph": "cuda_graph",
                     "channels_last": "channels_last", "compile": "fuse_pointwise"},
    fourier_operator: {"bmm": "", "bf16": "half_precision", "compile": "fuse_pointwise", "graph": "cuda_graph"},
    organ_segmentation: {"no_check": "remove_sync", "channels_last": "channels_last", "fused": "fused_optimizer"},
    private_training: {"at_once": "larger_batch", "no_item": "remove_sync", "foreach": "", "fused": "fused_optimizer"},
    color_clusters: {"at_once": "larger_batch", "weighted": "remove_sync", "tf32": "tf32"},
}  # fmt: skip
