"""Programs that give one network several inputs of a kind, such as two cameras, or that leave parameters unfrozen."""

import torch
import torch.nn as nn
import torch.nn.functional as F
from setting import compiled, device, graphed, size, use_tf32


class Words(nn.Module):
    """A small encoder of tokens, with a head that gives each text some numbers."""

    def __init__(self, numbers, layers, causal=False):
        super().__init__()
        wide = size(512, 16)
        self.words, self.places = nn.Embedding(size(8000, 50), wide), nn.Embedding(size(128, 8), wide)
        layer = nn.TransformerEncoderLayer(wide, size(8, 2), 4 * wide, dropout=0.0, batch_first=True, norm_first=True)
        self.layers, self.causal = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False), causal
        self.head = nn.Linear(wide, numbers)

    def forward(self, tokens):
        length = tokens.shape[1]
        hidden = self.words(tokens) + self.places(torch.arange(length, device=tokens.device))
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=tokens.device) if self.causal else None
        return self.head(self.layers(hidden, mask=mask, is_causal=self.causal))


def tokens_of(count):
    return torch.randint(0, size(8000, 50), (count, size(128, 8)), device=device)


def reward_training(change):
    """A reward model learns from pairs of answers which one people preferred."""
    if change == "tf32":
        use_tf32()
    model = Words(1, size(6, 1)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=change == "fused" or None)
    chosen, rejected = tokens_of(size(8, 2)), tokens_of(size(8, 2))

    def step():
        if change == "at_once":
            better, worse = model(torch.cat([chosen, rejected]))[:, -1, 0].chunk(2)
        else:
            better = model(chosen)[:, -1, 0]
            worse = model(rejected)[:, -1, 0]
        loss = -F.logsigmoid(better - worse).mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        right = (better > worse).float().mean()
        return torch.stack([loss.detach(), right])

    return step


def preference_training(change):
    """DPO: a language model learns which answer is preferred, and a frozen copy of it says what it would have said."""
    if change == "tf32":
        use_tf32()
    policy = Words(size(8000, 50), size(4, 1), causal=True).to(device)
    reference = Words(size(8000, 50), size(4, 1), causal=True).to(device)
    reference.load_state_dict(policy.state_dict())
    if change == "frozen":
        reference.requires_grad_(False)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-6, fused=change == "fused" or None)
    chosen, rejected = tokens_of(size(4, 2)), tokens_of(size(4, 2))

    def likelihood(model, tokens):
        logits = model(tokens)[:, :-1]
        said = torch.gather(logits.log_softmax(-1), 2, tokens[:, 1:, None])
        return said.squeeze(2).sum(-1)

    def of_both(model):
        if change == "at_once":
            return likelihood(model, torch.cat([chosen, rejected])).chunk(2)
        return likelihood(model, chosen), likelihood(model, rejected)

    def step():
        better, worse = of_both(policy)
        with torch.no_grad():
            usual_better, usual_worse = of_both(reference)
        margin = (better - usual_better) - (worse - usual_worse)
        loss = -F.logsigmoid(0.1 * margin).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return torch.stack([loss.detach(), margin.detach().mean()])

    return step


def convolved(before, after, stride=1):
    return nn.Sequential(
        nn.Conv2d(before, after, 3, stride, 1, bias=False), nn.GroupNorm(8, after), nn.ReLU(inplace=True)
    )


class Stereo(nn.Module):
    """Both cameras' features are compared at each distance, and volumes of similarities become depth."""

    def __init__(self, change):
        super().__init__()
        self.change, self.distances = change, size(24, 4)
        steps = ((32, 2), (32, 1), (64, 2), (64, 1), (64, 1), (64, 1))
        before, layers = 3, []
        for after, stride in steps:
            layers.append(convolved(before, after, stride))
            before = after
        self.features = nn.Sequential(*layers, nn.Conv2d(64, 32, 1))
        self.volume = nn.Sequential(
            nn.Conv3d(32, 16, 3, padding=1), nn.ReLU(inplace=True),
            nn.Conv3d(16, 16, 3, padding=1), nn.ReLU(inplace=True), nn.Conv3d(16, 1, 3, padding=1),
        )  # fmt: skip

    def forward(self, left, right):
        if self.change == "at_once":
            left, right = self.features(torch.cat([left, right])).chunk(2)
        else:
            left, right = self.features(left), self.features(right)
        volume = left.new_zeros(len(left), left.shape[1], self.distances, *left.shape[2:])
        for distance in range(self.distances):
            if distance:
                volume[:, :, distance, :, distance:] = left[..., distance:] * right[..., :-distance]
            else:
                volume[:, :, 0] = left * right
        weights = self.volume(volume).squeeze(1).softmax(1)
        distances = torch.arange(self.distances, device=left.device, dtype=left.dtype)
        depth = (weights * distances.view(1, -1, 1, 1)).sum(1, keepdim=True)
        return F.interpolate(4 * depth, scale_factor=4, mode="bilinear", align_corners=False)


def stereo_depth(change):
    """Two cameras of a robot give depth: one network computes features of both images."""
    kind = torch.half if change == "half" and device.type == "cuda" else torch.float
    model = Stereo(change).to(device, kind).eval()
    left, right = (torch.rand(1, 3, size(192, 32), size(320, 64), device=device) for _ in range(2))

    @torch.inference_mode()
    def one():
        return model(left.to(kind), right.to(kind)).float()

    return graphed(one) if change == "graph" else one


def view_averaging(change):
    """Cells are found in images of a microscope, and each image is also looked at upside down and mirrored."""
    if change == "channels_last":
        torch.backends.cudnn.benchmark_limit = 10
    widths, down, before = (size(32, 8), size(64, 8), size(128, 8)), [], 1
    for after in widths:
        down.append(nn.Sequential(convolved(before, after), convolved(after, after)))
        before = after
    up = [
        nn.Sequential(convolved(a + b, b), convolved(b, b)) for a, b in zip(widths[:0:-1], widths[-2::-1], strict=True)
    ]

    class Cells(nn.Module):
        def __init__(self):
            super().__init__()
            self.down, self.up, self.last = nn.ModuleList(down), nn.ModuleList(up), nn.Conv2d(widths[0], 4, 1)

        def forward(self, x):
            kept = []
            for layer in self.down:
                x = layer(x)
                kept.append(x)
                x = F.max_pool2d(x, 2) if layer is not self.down[-1] else x
            for layer, small in zip(self.up, kept[-2::-1], strict=True):
                x = layer(torch.cat([F.interpolate(x, scale_factor=2), small], 1))
            return self.last(x)

    model = Cells().to(device).eval()
    if change == "channels_last":
        model = model.to(memory_format=torch.channels_last)
    if change == "compile":
        model = compiled(model)
    images = torch.rand(2, 1, size(256, 32), size(256, 32), device=device)
    views = ((), (-1,), (-2,), (-1, -2))

    @torch.no_grad()
    def step():
        if change == "at_once":
            found = model(torch.cat([images.flip(dims) for dims in views])).softmax(1).chunk(len(views))
            total = sum(one.flip(dims) for one, dims in zip(found, views, strict=True))
        else:
            total = 0
            for dims in views:
                x = images.flip(dims) if dims else images
                if change == "channels_last":
                    x = x.contiguous(memory_format=torch.channels_last)
                y = model(x).softmax(1)
                total = total + (y.flip(dims) if dims else y)
        return (total / len(views)).argmax(1).float().mean((1, 2))

    return step


def signature_triplets(change):
    """A network learns to tell signatures apart: one of a person, another one of the same, and a forged one."""
    wide, layers, before = size(96, 8), [], 1
    for after, stride in ((wide // 2, 2), (wide, 1), (2 * wide, 2), (2 * wide, 1), (4 * wide, 2)):
        layers += [nn.Conv2d(before, after, 3, stride, 1), nn.PReLU(), nn.LocalResponseNorm(5)][
            : 3 if before == 1 else 2
        ]
        before = after
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(16 * before, size(128, 8))).to(
        device
    )
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-4, momentum=0.9, foreach=None)
    loss_of = nn.TripletMarginLoss(margin=1.0)
    shape = size(16, 2), 1, size(100, 32), size(160, 32)
    batch = [torch.rand(shape) for _ in range(3)]
    if change == "pinned" and device.type == "cuda":
        batch = [one.pin_memory() for one in batch]
    losses = []

    def step():
        anchor, same, other = (one.to(device, non_blocking=change == "pinned") for one in batch)
        optimizer.zero_grad()
        with torch.autocast(device.type, torch.bfloat16, enabled=change == "bf16"):
            if change == "at_once":
                a, p, n = model(torch.cat([anchor, same, other])).chunk(3)
            else:
                a = model(anchor)
                p = model(same)
                n = model(other)
            loss = loss_of(a.float(), p.float(), n.float())
        loss.backward()
        optimizer.step()
        losses.append(loss.detach() if change == "no_item" else loss.item())
        return loss

    return step


def style_transfer(change):
    """An image gets the style of another one: a frozen network sees the image, the style and the content each time."""
    places, layers, before = [], [], 3
    for number, after in enumerate((64, 64, "pool", 128, 128, "pool", 256, 256)):
        if after == "pool":
            layers.append(nn.AvgPool2d(2))
            continue
        layers += [nn.Conv2d(before, size(after, 8), 3, 1, 1), nn.ReLU()]
        before = size(after, 8)
        places += [len(layers)] if number in (0, 3, 6, 7) else []

    class Features(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(layers)

        def forward(self, x):
            found = []
            for place, layer in enumerate(self.layers, 1):
                x = layer(x)
                found += [x] if place in places else []
            return found

    features = Features().to(device).eval()
    if change == "frozen":
        features.requires_grad_(False)
    content, style = (torch.rand(1, 3, size(256, 32), size(256, 32), device=device) for _ in range(2))
    if change == "channels_last":
        features = features.to(memory_format=torch.channels_last)
        content, style = (one.contiguous(memory_format=torch.channels_last) for one in (content, style))
    image = nn.Parameter(content.clone())
    optimizer = torch.optim.Adam([image], lr=0.02)

    def gram(one):
        batch, width, high, wide = one.shape
        flat = one.reshape(batch, width, high * wide)
        return flat @ flat.transpose(1, 2) / (width * high * wide)

    def targets():
        with torch.no_grad():
            return features(content), features(style)

    kept = targets() if change == "targets_once" else None

    def step():
        of_content, of_style = kept or targets()
        now = features(image)
        loss = F.mse_loss(now[-1], of_content[-1])
        for mine, theirs in zip(now, of_style, strict=True):
            loss = loss + 1000 * F.mse_loss(gram(mine), gram(theirs))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return step


def value_learning(change):
    """A critic learns from transitions: what it says of a state and of the one after should fit the reward."""
    wide, batch = size(256, 16), size(512, 8)
    critic = nn.Sequential(
        nn.Linear(size(64, 4), wide), nn.LayerNorm(wide), nn.ELU(), nn.Linear(wide, wide), nn.LayerNorm(wide), nn.ELU(),
        nn.Linear(wide, wide), nn.LayerNorm(wide), nn.ELU(), nn.Linear(wide, 1),
    ).to(device)  # fmt: skip
    optimizer = torch.optim.Adam(
        critic.parameters(), lr=3e-4, fused=change == "fused" or None,
        capturable=change == "graph" and device.type == "cuda",
    )  # fmt: skip
    states, later = (torch.randn(batch, size(64, 4), device=device) for _ in range(2))
    rewards, ended = torch.randn(batch, device=device), torch.rand(batch, device=device) < 0.1

    def step():
        if change == "at_once":
            now, then = critic(torch.cat([states, later])).squeeze(1).chunk(2)
        else:
            now, then = critic(states).squeeze(1), critic(later).squeeze(1)
        wanted = rewards + 0.99 * then.detach() * ~ended
        loss = F.smooth_l1_loss(now, wanted)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(critic.parameters(), 0.5)
        optimizer.step()
        return loss

    def epoch():  # several minibatches before the next rollout
        return torch.stack([step().detach() for _ in range(4)])

    return graphed(epoch) if change == "graph" else epoch


def patch_attack(change):
    """A patch is learned that misleads a classifier, whose parameters nobody froze."""
    import torchvision

    classifier = torchvision.models.resnet18(num_classes=100).to(device).eval()
    if change == "frozen":
        classifier.requires_grad_(False)
    if change == "channels_last":
        classifier = classifier.to(memory_format=torch.channels_last)
    images = torch.rand(size(32, 2), 3, size(224, 64), size(224, 64), device=device)
    patch = torch.rand(3, size(48, 16), size(48, 16), device=device, requires_grad=True)
    optimizer = torch.optim.Adam([patch], lr=0.01)
    wanted = torch.full((len(images),), 7, device=device)

    def step():
        x = images.clone()
        x[:, :, 20 : 20 + patch.shape[1], 20 : 20 + patch.shape[2]] = patch
        if change == "channels_last":
            x = x.contiguous(memory_format=torch.channels_last)
        loss = F.cross_entropy(classifier(x), wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            patch.clamp_(0, 1)
        return loss

    return step


def prompt_tuning(change):
    """A few vectors before each text are learned. The language model stays as it is, although it gets gradients."""
    if change == "tf32":
        use_tf32()
    model = Words(size(8000, 50), size(6, 1), causal=True).to(device)
    if change == "frozen":
        model.requires_grad_(False)
    prompt = nn.Parameter(torch.randn(size(16, 2), size(512, 16), device=device) * 0.02)
    optimizer = torch.optim.AdamW([prompt], lr=1e-3)
    tokens = tokens_of(size(4, 2))

    def step():
        hidden = torch.cat([prompt.expand(len(tokens), -1, -1), model.words(tokens)], 1)[:, : tokens.shape[1]]
        mask = nn.Transformer.generate_square_subsequent_mask(hidden.shape[1], device=device)
        logits = model.head(model.layers(hidden, mask=mask, is_causal=True))
        loss = F.cross_entropy(logits[:, len(prompt) : -1].flatten(0, 1), tokens[:, 1 : 1 - len(prompt) - 1].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return step


def self_conditioning(change):
    """A diffusion model of vectors guesses the result first, and then sees its guess beside the noisy vectors."""
    wide, batch = size(512, 16), size(256, 4)
    into, body = nn.Linear(2 * size(128, 8), wide), nn.ModuleList(nn.Linear(wide, wide) for _ in range(6))

    class Denoiser(nn.Module):
        def __init__(self):
            super().__init__()
            self.into, self.body, self.out = into, body, nn.Linear(wide, size(128, 8))

        def forward(self, x, guess, time):
            h = self.into(torch.cat([x, guess], -1)) + time[:, None]
            for layer in self.body:
                h = h + F.silu(layer(h))
            return self.out(h)

    model = Denoiser().to(device)
    if change == "compile":
        model = compiled(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=change == "fused" or None)
    vectors = torch.randn(batch, size(128, 8), device=device)

    def step():
        time = torch.rand(batch, device=device)
        noise = torch.randn_like(vectors)
        noisy = (1 - time[:, None]) * vectors + time[:, None] * noise
        with torch.no_grad():
            guess = model(noisy, torch.zeros_like(noisy), time)
        loss = F.mse_loss(model(noisy, guess, time), vectors)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return step


def low_rank_tuning(change):
    """Low-rank adapters are trained beside a language model's weights, which nobody froze."""
    wide = size(512, 16)

    class Adapted(nn.Module):
        def __init__(self, a, b):
            super().__init__()
            self.base = nn.Linear(a, b)
            self.down, self.up = nn.Linear(a, 8, bias=False), nn.Linear(8, b, bias=False)
            nn.init.zeros_(self.up.weight)

        def forward(self, x):
            return self.base(x) + self.up(self.down(x))

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.n1, self.n2 = nn.LayerNorm(wide), nn.LayerNorm(wide)
            self.qkv, self.out = Adapted(wide, 3 * wide), Adapted(wide, wide)
            self.a, self.b = Adapted(wide, 4 * wide), Adapted(4 * wide, wide)

        def forward(self, x):
            b, t, c = x.shape
            q, k, v = self.qkv(self.n1(x)).view(b, t, 3, 8 if c >= 64 else 2, -1).permute(2, 0, 3, 1, 4)
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.out(y.transpose(1, 2).reshape(b, t, c))
            return x + self.b(F.gelu(self.a(self.n2(x))))

    blocks = [Block() for _ in range(size(8, 1))]
    model = nn.Sequential(nn.Embedding(8000, wide), *blocks, nn.LayerNorm(wide), nn.Linear(wide, 8000)).to(device)
    trained = [p for n, p in model.named_parameters() if "down" in n or "up" in n]
    if change == "frozen":
        for p in model.parameters():
            p.requires_grad_(any(p is q for q in trained))
    optimizer = torch.optim.AdamW(trained, lr=1e-4)
    tokens = torch.randint(0, 8000, (size(8, 2), size(256, 8)), device=device)

    def step():
        logits = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return step


def sentence_pairs(change):
    """Two sentences of a pair should be near each other, and those of other pairs far."""
    wide = size(384, 16)
    layer = nn.TransformerEncoderLayer(wide, size(12, 2), 4 * wide, dropout=0.0, batch_first=True, activation="gelu")

    class Encoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.words = nn.Embedding(8000, wide)
            self.layers = nn.TransformerEncoder(layer, size(6, 1), enable_nested_tensor=False)

        def forward(self, tokens):
            return self.layers(self.words(tokens)).mean(1)

    model = Encoder().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5, fused=change == "fused" or None)
    one, two = (torch.randint(0, 8000, (size(32, 2), size(64, 8)), device=device) for _ in range(2))

    def step():
        if change == "at_once":
            a, b = F.normalize(model(torch.cat([one, two])), dim=-1).chunk(2)
        else:
            a = F.normalize(model(one), dim=-1)
            b = F.normalize(model(two), dim=-1)
        loss = F.cross_entropy(20 * a @ b.T, torch.arange(len(a), device=device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return step


def change_detection(change):
    """Two photographs of one place are compared: features of both, and where they differ."""
    import torchvision

    net = torchvision.models.resnet18(num_classes=10)
    features = nn.Sequential(*list(net.children())[:-2]).to(device).eval()
    head = nn.Conv2d(512, 1, 1).to(device).eval()
    before, after = (torch.rand(2, 3, size(256, 64), size(256, 64), device=device) for _ in range(2))

    @torch.inference_mode()
    def step():
        if change == "at_once":
            a, b = features(torch.cat([before, after])).chunk(2)
        else:
            a, b = features(before), features(after)
        return F.interpolate(head((a - b).abs()), scale_factor=32.0, mode="bilinear").sigmoid()

    return step


def deep_dream(change):
    """An image is changed so that a layer of a network is excited."""
    import torchvision

    net = torchvision.models.vgg16().features[:20].to(device).eval()
    if change == "frozen":
        net.requires_grad_(False)
    image = torch.rand(1, 3, size(224, 64), size(224, 64), device=device, requires_grad=True)
    optimizer = torch.optim.Adam([image], lr=0.01, maximize=True)

    def step():
        optimizer.zero_grad()
        loss = net(image).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    return step


PROGRAMS = {
    reward_training: {"at_once": "larger_batch", "fused": "fused_optimizer", "tf32": "tf32"},
    preference_training: {"at_once": "larger_batch", "fused": "fused_optimizer", "tf32": "tf32"},
    stereo_depth: {"at_once": "larger_batch", "half": "half_precision", "graph": "cuda_graph"},
    view_averaging: {"at_once": "larger_batch", "channels_last": "channels_last", "compile": "fuse_pointwise"},
    signature_triplets: {"at_once": "larger_batch", "pinned": "overlap_copies", "no_item": "remove_sync",
                         "bf16": "half_precision"},
    style_transfer: {"targets_once": "compute_once", "frozen": "no_autograd", "channels_last": "channels_last"},
    value_learning: {"at_once": "larger_batch", "fused": "fused_optimizer", "graph": "cuda_graph"},
    patch_attack: {"frozen": "no_autograd", "channels_last": "channels_last"},
    prompt_tuning: {"frozen": "no_autograd", "tf32": "tf32"},
    low_rank_tuning: {"frozen": "no_autograd"},
    sentence_pairs: {"at_once": "larger_batch", "fused": "fused_optimizer"},
    change_detection: {"at_once": "larger_batch"},
    deep_dream: {"frozen": "no_autograd"},
    self_conditioning: {"compile": "fuse_pointwise", "fused": "fused_optimizer"},
}  # fmt: skip
