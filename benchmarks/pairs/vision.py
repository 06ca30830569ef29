"""Programs that read or make images."""

import itertools

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from setting import compiled, device, endless, graphed, size, use_tf32
from torch.utils.data import DataLoader, Dataset


def convnext_training(change):
    """ConvNeXt V2 of timm is trained in fp32 with AdamW, stochastic depth and label smoothing."""
    import timm

    if change == "tf32":
        use_tf32()
    model = timm.create_model("convnextv2_atto", num_classes=100, drop_path_rate=0.1).to(device)
    images = torch.randn(size(32, 2), 3, size(224, 64), size(224, 64), device=device)
    labels = torch.randint(0, 100, (len(images),), device=device)
    if change == "channels_last":
        model, images = (one.to(memory_format=torch.channels_last) for one in (model, images))
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, weight_decay=0.05, fused=change == "fused" or None)
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)

    def step():
        optimizer.zero_grad()
        with torch.autocast(device.type, torch.bfloat16, enabled=change == "bf16"):
            loss = criterion(model(images), labels)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss

    return step


def image_tagging(change):
    """A ViT of timm classifies images that come as uint8 from the CPU; gradients are left on."""
    import timm

    name = "vit_tiny_patch16_224" if size(0, 1) else "vit_small_patch16_224"
    model = timm.create_model(name, num_classes=500).to(device).eval()
    frames = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (size(64, 1), 224, 224, 3), dtype=np.uint8))
    if change == "pinned" and device.type == "cuda":
        frames = frames.pin_memory()
    mean, std = torch.tensor([0.5, 0.5, 0.5], device=device), torch.tensor([0.5, 0.5, 0.5], device=device)
    if change == "compile":
        model = compiled(model)

    def classify():
        images = frames.to(device, non_blocking=change == "pinned").float().div(255)
        images = ((images - mean) / std).permute(0, 3, 1, 2)
        with torch.autocast(device.type, torch.bfloat16, enabled=change == "bf16"):
            scores = model(images).softmax(-1)
        best = scores.topk(5)
        return best.values.detach().cpu()

    return torch.inference_mode()(classify) if change == "inference_mode" else classify


def photos_from_disk(change):
    """RegNet is trained on photos that a DataLoader augments one by one on the CPU."""
    import torchvision
    from torchvision.transforms import v2

    class Photos(Dataset):
        def __init__(self):
            self.photos = np.random.default_rng(0).integers(0, 256, (64, 256, 256, 3), dtype=np.uint8)
            self.augment = v2.Compose([
                v2.ToImage(), v2.RandomCrop(192), v2.RandomHorizontalFlip(), v2.ColorJitter(0.2, 0.2),
                v2.ToDtype(torch.float32, scale=True), v2.Normalize([0.5] * 3, [0.25] * 3),
            ])  # fmt: skip

        def __len__(self):
            return 4096

        def __getitem__(self, index):
            return self.augment(self.photos[index % 64]), index % 10

    workers = {"workers": size(12, 1), "two_workers": size(2, 1)}.get(change, 0)
    loader = DataLoader(
        Photos(),
        batch_size=size(48, 4),
        shuffle=True,
        drop_last=True,
        num_workers=workers,
        pin_memory=change == "pinned",
    )
    batches = endless(loader)
    model = torchvision.models.regnet_y_400mf(num_classes=10).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step():
        images, labels = next(batches)
        images, labels = (one.to(device, non_blocking=change == "pinned") for one in (images, labels))
        with torch.autocast(device.type, torch.bfloat16, enabled=change == "bf16"):
            loss = F.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return step


class DoubleConv(nn.Sequential):
    def __init__(self, before, after):
        super().__init__(
            nn.Conv2d(before, after, 3, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU(inplace=True),
            nn.Conv2d(after, after, 3, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU(inplace=True),
        )  # fmt: skip


class UNet(nn.Module):
    def __init__(self, width=32, classes=2):
        super().__init__()
        widths = [width * 2**level for level in range(4)]
        self.inlet = DoubleConv(3, widths[0])
        self.down = nn.ModuleList(DoubleConv(a, b) for a, b in itertools.pairwise(widths))
        self.up = nn.ModuleList(nn.ConvTranspose2d(b, a, 2, 2) for a, b in itertools.pairwise(widths))
        self.merge = nn.ModuleList(DoubleConv(2 * a, a) for a in widths[:-1])
        self.outlet = nn.Conv2d(width, classes, 1)

    def forward(self, x):
        skips = [self.inlet(x)]
        for block in self.down:
            skips.append(block(F.max_pool2d(skips[-1], 2)))
        x = skips.pop()
        for up, merge in zip(reversed(self.up), reversed(self.merge), strict=True):
            x = merge(torch.cat([skips.pop(), up(x)], 1))
        return self.outlet(x)


def segmentation(change):
    """A U-Net is trained with cross-entropy and a Dice loss; each step reads the loss for a progress bar."""
    model = UNet(size(32, 4)).to(device)
    images = torch.randn(size(8, 1), 3, size(256, 32), size(256, 32), device=device)
    masks = torch.randint(0, 2, (len(images), *images.shape[2:]), device=device)
    if change == "channels_last":
        model, images = (one.to(memory_format=torch.channels_last) for one in (model, images))
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-5, weight_decay=1e-8, momentum=0.999)
    if change == "compile":
        model = compiled(model)
    progress = []

    def step():
        with torch.autocast(device.type, torch.bfloat16, enabled=change == "bf16"):
            out = model(images)
        loss = F.cross_entropy(out.float(), masks)
        shares, truth = out.float().softmax(1), F.one_hot(masks, 2).permute(0, 3, 1, 2).float()
        overlap = (shares * truth).sum((2, 3))
        loss = loss + (1 - (2 * overlap + 1) / ((shares + truth).sum((2, 3)) + 1)).mean()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        progress.append(loss.detach() if change == "no_item" else loss.item())
        return loss

    return step


def detector(change):
    """SSDlite of torchvision is trained: matching boxes is a Python loop over the images."""
    import torchvision

    model = torchvision.models.detection.ssdlite320_mobilenet_v3_large(
        weights=None, weights_backbone=None, num_classes=21
    ).to(device)
    model.train()
    images = [torch.rand(3, 320, 320, device=device) for _ in range(size(16, 2))]
    targets = []
    for _ in images:
        corner = torch.rand(6, 2, device=device) * 200
        boxes = torch.cat([corner, corner + 20 + torch.rand(6, 2, device=device) * 90], 1)
        targets.append({"boxes": boxes, "labels": torch.randint(1, 21, (6,), device=device)})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.002, momentum=0.9, fused=change == "fused" or None)
    if change == "channels_last":
        model = model.to(memory_format=torch.channels_last)
    if change == "compile":
        model.backbone = compiled(model.backbone)

    def step():
        with torch.autocast(device.type, torch.bfloat16, enabled=change == "bf16"):
            losses = model(images, targets)
            loss = sum(losses.values())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return step


def wasserstein_gan(change):
    """A WGAN with a gradient penalty: one update of the critic and one of the generator."""
    width = size(64, 4)
    generator = nn.Sequential(
        nn.ConvTranspose2d(100, 8 * width, 4), nn.BatchNorm2d(8 * width), nn.ReLU(),
        nn.ConvTranspose2d(8 * width, 4 * width, 4, 2, 1), nn.BatchNorm2d(4 * width), nn.ReLU(),
        nn.ConvTranspose2d(4 * width, 2 * width, 4, 2, 1), nn.BatchNorm2d(2 * width), nn.ReLU(),
        nn.ConvTranspose2d(2 * width, 3, 4, 2, 1), nn.Tanh(),
    ).to(device)  # fmt: skip
    critic = nn.Sequential(
        nn.Conv2d(3, 2 * width, 4, 2, 1), nn.LeakyReLU(0.2),
        nn.Conv2d(2 * width, 4 * width, 4, 2, 1), nn.InstanceNorm2d(4 * width, affine=True), nn.LeakyReLU(0.2),
        nn.Conv2d(4 * width, 8 * width, 4, 2, 1), nn.InstanceNorm2d(8 * width, affine=True), nn.LeakyReLU(0.2),
        nn.Conv2d(8 * width, 1, 4),
    ).to(device)  # fmt: skip
    fused = change == "fused" or None
    adam = {"lr": 1e-4, "betas": (0.0, 0.9), "fused": fused}
    of_critic = torch.optim.Adam(critic.parameters(), **adam)
    of_generator = torch.optim.Adam(generator.parameters(), **adam)
    real = torch.randn(size(128, 4), 3, 32, 32, device=device)
    history = []

    def step():
        autocast = torch.autocast(device.type, torch.bfloat16, enabled=change == "bf16")
        noise = torch.randn(len(real), 100, 1, 1, device=device)
        with autocast:
            fake = generator(noise)
            mix = torch.rand(len(real), 1, 1, 1, device=device)
            between = (mix * real + (1 - mix) * fake.detach()).requires_grad_()
            (gradient,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
            penalty = (gradient.float().flatten(1).norm(dim=1) - 1).square().mean()
            loss = critic(fake.detach()).mean() - critic(real).mean() + 10 * penalty
        of_critic.zero_grad()
        loss.backward()
        of_critic.step()
        with autocast:
            wanted = -critic(generator(noise)).mean()
        of_generator.zero_grad()
        wanted.backward()
        of_generator.step()
        history.append((loss.detach(), wanted.detach()) if change == "no_item" else (loss.item(), wanted.item()))
        return loss

    return step


def digits_vae(change):
    """A small variational autoencoder of digits, as in torch's examples, with the loss read in each step."""

    class VAE(nn.Module):
        def __init__(self):
            super().__init__()
            self.encode, self.mean, self.spread = nn.Linear(784, 400), nn.Linear(400, 20), nn.Linear(400, 20)
            self.decode, self.out = nn.Linear(20, 400), nn.Linear(400, 784)

        def forward(self, x):
            h = F.relu(self.encode(x.view(-1, 784)))
            mean, spread = self.mean(h), self.spread(h)
            z = mean + torch.randn_like(spread) * torch.exp(0.5 * spread)
            return torch.sigmoid(self.out(F.relu(self.decode(z)))), mean, spread

    model = VAE().to(device)
    digits = torch.rand(128 * (2 if change == "batch_x2" else 1), 1, 28, 28, device=device)
    optimizer = torch.optim.Adam(
        model.parameters(),
        lr=1e-3,
        fused=change == "fused" or None,
        capturable=change == "graph" and device.type == "cuda",
    )
    total = [0.0]

    def update():
        optimizer.zero_grad()
        again, mean, spread = model(digits)
        loss = F.binary_cross_entropy(again, digits.view(-1, 784), reduction="sum")
        loss = loss - 0.5 * torch.sum(1 + spread - mean.pow(2) - spread.exp())
        loss.backward()
        optimizer.step()
        return loss / len(digits)

    if change == "graph":
        update = graphed(update)

    def step():
        loss = update()
        total[0] += loss.detach() if change == "no_item" else loss.item()
        return loss

    return step


def super_resolution(change):
    """An EDSR-like network enlarges frames, without a gradient, in fp32."""

    class Block(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.first, self.second = nn.Conv2d(width, width, 3, padding=1), nn.Conv2d(width, width, 3, padding=1)

        def forward(self, x):
            return x + 0.1 * self.second(F.relu(self.first(x)))

    width = size(64, 8)
    model = nn.Sequential(
        nn.Conv2d(3, width, 3, padding=1), *(Block(width) for _ in range(size(12, 2))),
        nn.Conv2d(width, 4 * width, 3, padding=1), nn.PixelShuffle(2), nn.Conv2d(width, 3, 3, padding=1),
    ).to(device).eval()  # fmt: skip
    frame = torch.rand(1, 3, size(540, 32), size(960, 32), device=device)
    if change == "channels_last":
        model, frame = (one.to(memory_format=torch.channels_last) for one in (model, frame))
    if change == "compile":
        model = compiled(model)

    @torch.no_grad()
    def step():
        with torch.autocast(device.type, torch.bfloat16, enabled=change == "bf16"):
            return model(frame).float().clamp(0, 1).mul(255).to(torch.uint8)

    return step


class DiTBlock(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.first, self.second = (nn.LayerNorm(width, elementwise_affine=False) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width))
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width))

    def forward(self, x, condition):
        a, b, c, d, e, f = self.modulation(condition).unsqueeze(1).chunk(6, -1)
        h = self.first(x) * (1 + b) + a
        q, k, v = self.qkv(h).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        h = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = x + c * self.out(h)
        return x + f * self.mlp(self.second(x) * (1 + e) + d)


class DiT(nn.Module):
    def __init__(self, width, depth, heads):
        super().__init__()
        self.patch, self.time = nn.Conv2d(4, width, 2, 2), nn.Linear(256, width)
        self.label = nn.Embedding(1001, width)
        self.blocks = nn.ModuleList(DiTBlock(width, heads) for _ in range(depth))
        self.out = nn.Linear(width, 16)

    def forward(self, x, t, y):
        angles = t[:, None] * torch.exp(-torch.arange(128, device=x.device) / 128 * 9.2)
        condition = self.time(torch.cat([angles.cos(), angles.sin()], -1)) + self.label(y)
        h = self.patch(x).flatten(2).transpose(1, 2)
        for block in self.blocks:
            h = block(h, condition)
        return self.out(h)


def diffusion_transformer(change):
    """A DiT learns to denoise latents; an average of its weights follows in a Python loop."""
    width, depth = size(384, 32), size(6, 2)
    if change == "tf32":
        use_tf32()
    model = DiT(width, depth, size(6, 2)).to(device)
    average = DiT(width, depth, size(6, 2)).to(device).requires_grad_(False)
    average.load_state_dict(model.state_dict())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0, fused=change == "fused" or None)
    latents = torch.randn(size(32, 2), 4, 32, 32, device=device)
    labels = torch.randint(0, 1000, (len(latents),), device=device)
    run = compiled(model) if change == "compile" else model

    def step():
        t = torch.rand(len(latents), device=device)
        noise = torch.randn_like(latents)
        noisy = (1 - t.view(-1, 1, 1, 1)) * latents + t.view(-1, 1, 1, 1) * noise
        with torch.autocast(device.type, torch.bfloat16, enabled=change == "bf16"):
            out = run(noisy, 1000 * t, labels)
        goal = F.pixel_unshuffle(noise - latents, 2).flatten(2).transpose(1, 2)
        loss = F.mse_loss(out.float(), goal)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            if change == "foreach_average":
                torch._foreach_lerp_(list(average.parameters()), list(model.parameters()), 1e-4)
            else:
                for mine, its in zip(average.parameters(), model.parameters(), strict=True):
                    mine.mul_(0.9999).add_(its.detach(), alpha=1e-4)
        return loss

    return step


def contrastive_views(change):
    """SimCLR: two augmented views of each image, made one by one on the GPU, and a contrastive loss."""
    import timm

    model = timm.create_model("resnet10t", num_classes=128).to(device)
    images = torch.rand(size(64, 4), 3, 128, 128, device=device)
    if change == "channels_last":
        model = model.to(memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=change == "fused" or None)

    def augmented(image):
        flipped = image.flip(-1)
        bright = flipped * (0.8 + 0.4 * torch.rand(1, device=device))
        return (bright + 0.05 * torch.randn_like(bright)).clamp(0, 1)

    def views():
        if change != "batched":
            return torch.stack([augmented(image) for image in images])
        bright = images.flip(-1) * (0.8 + 0.4 * torch.rand(len(images), 1, 1, 1, device=device))
        return (bright + 0.05 * torch.randn_like(bright)).clamp(0, 1)

    def step():
        both = torch.cat([views(), views()])
        if change == "channels_last":
            both = both.contiguous(memory_format=torch.channels_last)
        with torch.autocast(device.type, torch.bfloat16, enabled=change == "bf16"):
            z = F.normalize(model(both).float(), dim=-1)
        scores = z @ z.T / 0.1
        scores = scores.masked_fill(torch.eye(len(z), dtype=torch.bool, device=device), float("-inf"))
        partner = torch.arange(len(z), device=device).roll(len(images))
        loss = F.cross_entropy(scores, partner)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return step


def video_scoring(change):
    """R3D-18 of torchvision scores short clips; the program forgot no_grad()."""
    import torchvision

    model = torchvision.models.video.r3d_18(num_classes=400).to(device).eval()
    clips = torch.rand(size(4, 1), 3, size(16, 4), size(112, 32), size(112, 32), device=device)
    if change == "compile":
        model = compiled(model)
    if change == "channels_last":
        model, clips = (one.to(memory_format=torch.channels_last_3d) for one in (model, clips))

    def step():
        with torch.autocast(device.type, torch.bfloat16, enabled=change == "bf16"):
            return model(clips).float().softmax(-1).cpu()

    return torch.no_grad()(step) if change == "no_grad" else step


PROGRAMS = {
    convnext_training: {"tf32": "tf32", "bf16": "half_precision", "fused": "fused_optimizer",
                        "channels_last": "channels_last"},
    image_tagging: {"bf16": "half_precision", "inference_mode": "no_autograd", "pinned": "overlap_copies"},
    photos_from_disk: {"workers": "data_loader", "two_workers": "", "pinned": "overlap_copies",
                       "bf16": "half_precision"},
    segmentation: {"no_item": "remove_sync", "bf16": "half_precision", "channels_last": "channels_last",
                   "compile": "fuse_pointwise"},
    detector: {"fused": "fused_optimizer", "bf16": "half_precision", "channels_last": "channels_last"},
    wasserstein_gan: {"fused": "fused_optimizer", "no_item": "remove_sync", "bf16": "half_precision"},
    digits_vae: {"fused": "fused_optimizer", "no_item": "remove_sync", "graph": "cuda_graph",
                 "batch_x2": ("double_batch", 2)},
    super_resolution: {"channels_last": "channels_last", "bf16": "half_precision", "compile": "fuse_pointwise"},
    diffusion_transformer: {"tf32": "tf32", "bf16": "half_precision", "foreach_average": "update_graph",
                            "fused": "fused_optimizer", "compile": "fuse_pointwise"},
    contrastive_views: {"batched": "larger_batch", "bf16": "half_precision", "fused": "fused_optimizer"},
    video_scoring: {"no_grad": "no_autograd", "bf16": "half_precision", "channels_last": "channels_last",
                    "compile": "fuse_pointwise"},
}  # fmt: skip
