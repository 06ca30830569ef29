"""Programs of laboratories and roads: images from scanners, keypoints, traffic, and control of diffusion."""

import copy
import itertools
import math

import numpy as np
import torch
import torch.nn.functional as F
from setting import bf16, compiled, device, endless, graphed, size
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset


class MriConvBlock(nn.Sequential):
    """Two 3x3 convolutions with instance normalization and leaky ReLU."""

    def __init__(self, before, after):
        super().__init__(
            nn.Conv2d(before, after, 3, padding=1, bias=False),
            nn.InstanceNorm2d(after),
            nn.LeakyReLU(0.2),
            nn.Conv2d(after, after, 3, padding=1, bias=False),
            nn.InstanceNorm2d(after),
            nn.LeakyReLU(0.2),
        )


class MriUnet(nn.Module):
    """U-Net over real and imaginary parts, with average pooling and transposed convolutions."""

    def __init__(self, channels, pools):
        super().__init__()
        widths = [channels * 2**i for i in range(pools + 1)]
        self.down = nn.ModuleList(MriConvBlock(a, b) for a, b in zip([2, *widths[:-2]], widths[:-1], strict=False))
        self.bottom = MriConvBlock(widths[-2], widths[-1])
        self.up = nn.ModuleList()
        self.merge = nn.ModuleList()
        for width in reversed(widths[:-1]):
            up = nn.ConvTranspose2d(2 * width, width, 2, stride=2, bias=False)
            self.up.append(nn.Sequential(up, nn.InstanceNorm2d(width), nn.LeakyReLU(0.2)))
            self.merge.append(MriConvBlock(2 * width, width))
        self.last = nn.Conv2d(channels, 2, 1)

    def forward(self, x):
        skips = []
        for block in self.down:
            x = block(x)
            skips.append(x)
            x = F.avg_pool2d(x, 2)
        x = self.bottom(x)
        for up, merge in zip(self.up, self.merge, strict=False):
            x = merge(torch.cat([up(x), skips.pop()], dim=1))
        return self.last(x)


class MriNormUnet(nn.Module):
    """U-Net for complex images [batch, coils, height, width], each normalized to mean 0 and deviation 1."""

    def __init__(self, channels, pools, change):
        super().__init__()
        self.unet = MriUnet(channels, pools)
        self.change = change
        if change == "channels_last":
            self.unet.to(memory_format=torch.channels_last)
        if change == "compile_unets":
            self.unet = compiled(self.unet)

    def forward(self, image):
        batch, coils, height, width = image.shape
        x = torch.view_as_real(image.reshape(batch * coils, height, width)).permute(0, 3, 1, 2).contiguous()
        mean, std = x.mean(dim=(2, 3), keepdim=True), x.std(dim=(2, 3), keepdim=True)
        x = (x - mean) / (std + 1e-11)
        if self.change == "channels_last":
            x = x.contiguous(memory_format=torch.channels_last)
        with bf16(self.change == "bf16_unets"):
            x = self.unet(x)
        x = x.float() * std + mean
        return torch.view_as_complex(x.permute(0, 2, 3, 1).contiguous()).view(batch, coils, height, width)


class VarNet(nn.Module):
    """Sensitivities estimated from the centre lines, then cascades of data consistency and a U-Net."""

    def __init__(self, cascades, channels, sens_channels, pools, change):
        super().__init__()
        self.sens_net = MriNormUnet(sens_channels, pools, change)
        self.regularizers = nn.ModuleList(MriNormUnet(channels, pools, change) for _ in range(cascades))
        self.dc_weights = nn.ParameterList(nn.Parameter(torch.ones(1)) for _ in range(cascades))
        self.shifted = change == "shift_once"

    def fft(self, x):
        if self.shifted:
            return torch.fft.fft2(x, norm="ortho")
        x = torch.fft.ifftshift(x, dim=(-2, -1))
        return torch.fft.fftshift(torch.fft.fft2(x, norm="ortho"), dim=(-2, -1))

    def ifft(self, x):
        if self.shifted:
            return torch.fft.ifft2(x, norm="ortho")
        x = torch.fft.ifftshift(x, dim=(-2, -1))
        return torch.fft.fftshift(torch.fft.ifft2(x, norm="ortho"), dim=(-2, -1))

    def centred(self, net, image):
        if not self.shifted:
            return net(image)
        return torch.fft.ifftshift(net(torch.fft.fftshift(image, dim=(-2, -1))), dim=(-2, -1))

    def sensitivities(self, kspace, centre):
        maps = self.centred(self.sens_net, self.ifft(kspace * centre))
        return maps / (maps.abs().square().sum(1, keepdim=True) + 1e-12).sqrt()

    def forward(self, masked, mask, centre):
        if self.shifted:
            masked, mask, centre = (torch.fft.ifftshift(x, dim=(-2, -1)) for x in (masked, mask, centre))
        sens = self.sensitivities(masked, centre)
        kspace = masked.clone()
        zero = torch.zeros(1, 1, 1, 1, dtype=kspace.dtype, device=kspace.device)
        for regularizer, weight in zip(self.regularizers, self.dc_weights, strict=False):
            consistency = torch.where(mask, kspace - masked, zero) * weight
            combined = (self.ifft(kspace) * sens.conj()).sum(1, keepdim=True)
            kspace = kspace - consistency - self.fft(self.centred(regularizer, combined) * sens)
        image = (self.ifft(kspace).abs().square().sum(1) + 1e-12).sqrt()
        return torch.fft.fftshift(image, dim=(-2, -1)) if self.shifted else image


class MriSlices(Dataset):
    """Slices of multi-coil k-space, under-sampled with a random mask of columns."""

    def __init__(self, slices, coils, height, width, mask_later):
        rng = np.random.default_rng(0)
        self.mask_later = mask_later
        ys, xs = np.mgrid[-1 : 1 : height * 1j, -1 : 1 : width * 1j]
        self.kspace, self.targets = [], []
        for _ in range(slices):
            image = np.zeros((height, width), np.float32)
            for _ in range(8):
                a, b, p, q = rng.uniform(0.1, 0.6, 4)
                image[((xs - p + 0.35) / a) ** 2 + ((ys - q + 0.35) / b) ** 2 < 1] += rng.uniform(0.2, 1)
            places = rng.uniform(-1, 1, (coils, 2))
            maps = np.stack([np.exp(-((xs - p) ** 2 + (ys - q) ** 2) + 1j * (p * xs + q * ys)) for p, q in places])
            coil_images = np.fft.ifftshift(image * maps, axes=(-2, -1)).astype(np.complex64)
            kspace = np.fft.fftshift(np.fft.fft2(coil_images, norm="ortho"), axes=(-2, -1)).astype(np.complex64)
            self.kspace.append(kspace)
            self.targets.append(np.sqrt((np.abs(image * maps) ** 2).sum(0)).astype(np.float32))

    def __len__(self):
        return len(self.kspace)

    def __getitem__(self, index):
        kspace, target = self.kspace[index], self.targets[index]
        width = kspace.shape[-1]
        rng = np.random.RandomState(index)
        low = round(width * 0.08)
        centre = np.zeros(width, bool)
        centre[(width - low) // 2 : (width - low) // 2 + low] = True
        mask = centre | (rng.uniform(size=width) < 0.2)
        item = {"mask": torch.from_numpy(mask[None, None]), "centre": torch.from_numpy(centre[None, None])}
        item["target"], item["max_value"] = torch.from_numpy(target), torch.tensor(target.max())
        if self.mask_later:
            item["kspace"] = torch.from_numpy(kspace)
        else:
            pairs = torch.from_numpy(np.stack((kspace.real, kspace.imag), axis=-1))
            item["kspace"] = pairs * item["mask"][..., None] + 0.0
        return item


def ssim_loss(x, y, data_range, window):
    """Return 1 - SSIM of two images with a uniform window of 7x7."""
    x, y, data_range = x[:, None], y[:, None], data_range[:, None, None, None]
    c1, c2, count = (0.01 * data_range) ** 2, (0.03 * data_range) ** 2, 49
    ux, uy = F.conv2d(x, window), F.conv2d(y, window)
    uxx, uyy, uxy = F.conv2d(x * x, window), F.conv2d(y * y, window), F.conv2d(x * y, window)
    norm = count / (count - 1)
    vx, vy, vxy = norm * (uxx - ux * ux), norm * (uyy - uy * uy), norm * (uxy - ux * uy)
    s = (2 * ux * uy + c1) * (2 * vxy + c2) / ((ux**2 + uy**2 + c1) * (vx + vy + c2))
    return 1 - s.mean()


def mri_reconstruction(change):
    """Train an end-to-end variational network on slices of 15 coils."""
    torch.manual_seed(0)
    mask_later = change == "mask_on_gpu"
    slices = MriSlices(size(4, 2), size(15, 2), size(640, 32), size(368, 32), mask_later)
    loader = DataLoader(slices, batch_size=1, shuffle=True, num_workers=0)
    batches = endless(loader)
    model = VarNet(size(8, 2), size(18, 4), size(8, 2), size(4, 2), change).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-4)
    window = torch.ones(1, 1, 7, 7, device=device) / 49
    history = []

    def step():
        batch = {name: value.to(device) for name, value in next(batches).items()}
        masked = batch["kspace"] * batch["mask"] if mask_later else torch.view_as_complex(batch["kspace"])
        output = model(masked, batch["mask"], batch["centre"])
        loss = ssim_loss(output, batch["target"], batch["max_value"], window)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        history.append(loss.item())
        return loss.detach()

    return step


class PointDetector(nn.Module):
    """SuperPoint: a VGG-like encoder with a head for the heat map and one for the descriptors."""

    def __init__(self, width):
        super().__init__()
        widths = [1, width, width, width, width, 2 * width, 2 * width, 2 * width, 2 * width]
        self.convs = nn.ModuleList(nn.Conv2d(a, b, 3, padding=1) for a, b in itertools.pairwise(widths))
        self.heat = nn.Sequential(nn.Conv2d(2 * width, 256, 3, padding=1), nn.ReLU(), nn.Conv2d(256, 65, 1))
        self.describe = nn.Sequential(nn.Conv2d(2 * width, 256, 3, padding=1), nn.ReLU(), nn.Conv2d(256, 256, 1))

    def forward(self, x):
        for i, conv in enumerate(self.convs):
            x = F.relu(conv(x))
            if i in (1, 3, 5):
                x = F.max_pool2d(x, 2)
        scores = F.softmax(self.heat(x), dim=1)[:, :-1]
        return F.pixel_shuffle(scores, 8)[:, 0], F.normalize(self.describe(x), dim=1)


def suppress(scores, radius):
    """Keep the points which are the maximum of their neighbourhood."""

    def max_pool(x):
        return F.max_pool2d(x[:, None], 2 * radius + 1, stride=1, padding=radius)[:, 0]

    zeros = torch.zeros_like(scores)
    max_mask = scores == max_pool(scores)
    for _ in range(2):
        near = max_pool(max_mask.float()) > 0
        rest = torch.where(near, zeros, scores)
        max_mask = max_mask | ((rest == max_pool(rest)) & ~near)
    return torch.where(max_mask, scores, zeros)


def find_keypoints(detector, images, count, border=4, threshold=0.005):
    """Return positions, scores and descriptors of each image's strongest keypoints."""
    heat, dense = detector(images)
    heat = suppress(heat, 4)
    height, width = heat.shape[1:]
    found = []
    for scores, descriptors in zip(heat, dense, strict=False):
        points = torch.nonzero(scores > threshold)
        values = scores[tuple(points.t())]
        inside = (points[:, 0] >= border) & (points[:, 0] < height - border)
        inside &= (points[:, 1] >= border) & (points[:, 1] < width - border)
        points, values = points[inside], values[inside]
        if count < len(points):
            values, order = torch.topk(values, count)
            points = points[order]
        points = torch.flip(points, [1]).float()
        grid = (points - 3.5) / torch.tensor([width - 4.5, height - 4.5], device=points.device) * 2 - 1
        sampled = F.grid_sample(descriptors[None], grid.view(1, 1, -1, 2), align_corners=True)
        found.append((points, values, F.normalize(sampled[0, :, 0], dim=0)))
    return found


def pointwise_mlp(widths):
    """Return 1x1 convolutions with batch normalization and ReLU between them."""
    layers = []
    for i in range(1, len(widths)):
        layers.append(nn.Conv1d(widths[i - 1], widths[i], 1))
        if i < len(widths) - 1:
            layers += [nn.BatchNorm1d(widths[i]), nn.ReLU()]
    return nn.Sequential(*layers)


class KeypointAttention(nn.Module):
    """Multi-head attention of one image's keypoints to a source, and the MLP which takes the message."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.projections = nn.ModuleList(nn.Conv1d(width, width, 1) for _ in range(3))
        self.merge = nn.Conv1d(width, width, 1)
        self.mlp = pointwise_mlp([2 * width, 2 * width, width])

    def forward(self, x, source):
        batch, width, _ = x.shape
        query, key, value = (
            projection(y).view(batch, width // self.heads, self.heads, -1)
            for projection, y in zip(self.projections, (x, source, source), strict=False)
        )
        scores = torch.einsum("bdhn,bdhm->bhnm", query, key) / (width // self.heads) ** 0.5
        message = torch.einsum("bhnm,bdhm->bdhn", F.softmax(scores, dim=-1), value)
        return self.mlp(torch.cat([x, self.merge(message.contiguous().view(batch, width, -1))], dim=1))


def sinkhorn_iteration(z, u, v, log_mu, log_nu):
    """Return the next potentials of the rows and columns."""
    u = log_mu - torch.logsumexp(z + v[:, None], dim=2)
    v = log_nu - torch.logsumexp(z + u[:, :, None], dim=1)
    return u, v


class KeypointMatcher(nn.Module):
    """SuperGlue: keypoint encoder, alternating self- and cross-attention, optimal transport with a dustbin."""

    def __init__(self, height, width, features, heads, depth, iterations, change):
        super().__init__()
        self.register_buffer("centre", torch.tensor([width / 2, height / 2]))
        self.scaling, self.iterations, self.change = 0.7 * max(height, width), iterations, change
        self.encoder = pointwise_mlp([3, 32, 64, 128, features])
        self.layers = nn.ModuleList(KeypointAttention(features, heads) for _ in range(depth))
        self.final = nn.Conv1d(features, features, 1)
        self.bin_score = nn.Parameter(torch.tensor(1.0))
        self.iteration = compiled(sinkhorn_iteration) if change == "compile_sinkhorn" else sinkhorn_iteration

    def encode(self, points, values, descriptors):
        points = (points - self.centre) / self.scaling
        return descriptors + self.encoder(torch.cat([points.transpose(1, 2), values[:, None]], dim=1))

    def transport(self, scores):
        batch, m, n = scores.shape
        right = self.bin_score.expand(batch, m, 1)
        below = self.bin_score.expand(batch, 1, n + 1)
        z = torch.cat([torch.cat([scores, right], dim=2), below], dim=1)
        norm = -math.log(m + n)
        log_mu = torch.full((batch, m + 1), norm, device=z.device)
        log_nu = torch.full((batch, n + 1), norm, device=z.device)
        log_mu[:, -1], log_nu[:, -1] = math.log(n) + norm, math.log(m) + norm
        if self.change == "scaling_sinkhorn":
            highest = z.amax(dim=(1, 2), keepdim=True)
            kernel, mu, nu = (z - highest).exp(), log_mu.exp()[..., None], log_nu.exp()[..., None]
            columns = torch.ones_like(nu)
            for _ in range(self.iterations):
                rows = mu / (kernel @ columns)
                columns = nu / (kernel.transpose(1, 2) @ rows)
            return z - highest + rows.log() + columns.log().transpose(1, 2) - norm
        u, v = torch.zeros_like(log_mu), torch.zeros_like(log_nu)
        for _ in range(self.iterations):
            u, v = self.iteration(z, u, v, log_mu, log_nu)
        return z + u[:, :, None] + v[:, None] - norm

    def forward(self, points0, values0, descriptors0, points1, values1, descriptors1):
        with bf16(self.change == "bf16_matcher"):
            x0, x1 = self.encode(points0, values0, descriptors0), self.encode(points1, values1, descriptors1)
            for i, layer in enumerate(self.layers):
                source0, source1 = (x1, x0) if i % 2 else (x0, x1)
                delta0, delta1 = layer(x0, source0), layer(x1, source1)
                x0, x1 = x0 + delta0, x1 + delta1
            x0, x1 = self.final(x0), self.final(x1)
            scores = torch.einsum("bdn,bdm->bnm", x0, x1).float() / x0.shape[1] ** 0.5
        scores = self.transport(scores)
        max0, max1 = scores[:, :-1, :-1].max(2), scores[:, :-1, :-1].max(1)
        indices0, indices1 = max0.indices, max1.indices
        places = torch.arange(indices0.shape[1], device=scores.device)[None]
        mutual = places == indices1.gather(1, indices0)
        confidence = max0.values.exp().masked_fill(~mutual, 0.0)
        matches = indices0.masked_fill(~mutual | (confidence <= 1e-4), -1)
        return matches, confidence, max0.values.mean(1)


def keypoint_matching(change):
    """Match the keypoints of a short list of image pairs and read the matches back."""
    torch.manual_seed(0)
    height, width, pairs, count = size(480, 64), size(640, 64), size(4, 2), size(1024, 12)
    rng = np.random.default_rng(0)
    scene = rng.integers(0, 256, (height // 8 + 8, width // 8 + 8)).astype(np.uint8).repeat(8, 0).repeat(8, 1)
    firsts = [scene[3 * i : 3 * i + height, i : i + width].copy() for i in range(pairs)]
    seconds = [scene[3 * i + 5 : 3 * i + 5 + height, i + 11 : i + 11 + width].copy() for i in range(pairs)]
    detector = PointDetector(size(64, 8)).to(device).eval()
    features, depth, iterations = 256, size(18, 2), size(100, 10)
    matcher = KeypointMatcher(height, width, features, 4, depth, iterations, change).to(device).eval()

    def to_tensor(image):
        return torch.from_numpy(image / 255.0).float()[None, None].to(device)

    def stack(found):
        return [torch.stack(parts) for parts in zip(*found, strict=False)]

    match = matcher
    if change == "graph_matcher":
        with torch.no_grad():
            ends = [stack(find_keypoints(detector, to_tensor(image), count)) for image in (firsts[0], seconds[0])]
            fixed = [*ends[0], *ends[1]]
            replay = graphed(torch.no_grad()(lambda: matcher(*fixed)))

        def match(*inputs):
            for target, source in zip(fixed, inputs, strict=True):
                target.copy_(source)
            return replay()

    @torch.no_grad()
    def step():
        results, quality = [], []
        if change == "batch_pairs":
            images = torch.from_numpy(np.stack(firsts + seconds)).to(device)[:, None].float() / 255.0
            found = find_keypoints(detector, images, count)
            matches, confidence, score = match(*stack(found[:pairs]), *stack(found[pairs:]))
            matches, confidence = matches.cpu().numpy(), confidence.cpu().numpy()
            results = [(m[m >= 0], c[m >= 0]) for m, c in zip(matches, confidence, strict=False)]
            return score.clone()
        for first, second in zip(firsts, seconds, strict=False):
            ends = [stack(find_keypoints(detector, to_tensor(image), count)) for image in (first, second)]
            matches, confidence, score = match(*ends[0], *ends[1])
            matches, confidence = matches[0].cpu().numpy(), confidence[0].cpu().numpy()
            valid = matches > -1
            results.append((np.flatnonzero(valid), matches[valid], confidence[valid]))
            quality.append(score[0].clone())
        return torch.stack(quality)

    return step


class DrivingScenes(Dataset):
    """Scenes with different numbers of agents and lanes, turned into the frame of the first agent."""

    def __init__(self, scenes, most_agents, most_lanes, past, future, at_once):
        rng = np.random.default_rng(0)
        self.past, self.at_once, self.scenes = past, at_once, []
        for _ in range(scenes):
            agents, lanes = rng.integers(most_agents // 4, most_agents), rng.integers(most_lanes // 3, most_lanes)
            start, heading = rng.uniform(-60, 60, (agents, 1, 2)), rng.uniform(-np.pi, np.pi, (agents, 1))
            heading = heading + rng.normal(0, 0.02, (agents, 1)) * np.arange(past + future)
            speed = rng.uniform(0, 12, (agents, 1, 1))
            velocity = speed * np.stack([np.cos(heading), np.sin(heading)], axis=-1)
            tracks = np.concatenate([start + 0.1 * velocity.cumsum(1), velocity, heading[..., None]], axis=-1)
            ends = rng.uniform(-80, 80, (lanes, 1, 2))
            directions = rng.uniform(-1, 1, (lanes, 1, 2))
            points = ends + directions * 2 * np.arange(20)[:, None]
            kinds = rng.integers(0, 4, lanes)
            self.scenes.append((tracks.astype(np.float32), points.astype(np.float32), kinds.astype(np.float32)))

    def __len__(self):
        return len(self.scenes)

    def agent_vectors(self, tracks, origin, rotation):
        """Return the vectors of one agent's past (or of many agents' pasts) and its future."""
        xy, velocity = (tracks[..., :2] - origin) @ rotation, tracks[..., 2:4] @ rotation
        past, now = xy[..., : self.past, :], xy[..., self.past - 1 : self.past, :]
        heading = tracks[..., 1 : self.past, 4:5]
        time = np.broadcast_to(np.arange(1 - self.past, 0, dtype=np.float32)[:, None] * 0.1, heading.shape)
        parts = [past[..., :-1, :] * 0.05, past[..., 1:, :] * 0.05, velocity[..., 1 : self.past, :] * 0.1]
        vectors = np.concatenate([*parts, heading, time], axis=-1)
        return vectors, (xy[..., self.past :, :] - now) * 0.1

    def lane_vectors(self, points, kind, origin, rotation):
        """Return the vectors of one lane (or of many lanes)."""
        xy = (points - origin) @ rotation * 0.05
        start, end = xy[..., :-1, :], xy[..., 1:, :]
        length = np.linalg.norm(end - start, axis=-1, keepdims=True)
        kind = np.broadcast_to(np.asarray(kind)[..., None, None], length.shape)
        return np.concatenate([start, end, (end - start) / (length + 1e-6), length, kind], axis=-1)

    def __getitem__(self, index):
        tracks, lanes, kinds = self.scenes[index]
        origin, heading = tracks[0, self.past - 1, :2], tracks[0, self.past - 1, 4]
        rotation = np.array([[np.cos(heading), -np.sin(heading)], [np.sin(heading), np.cos(heading)]], dtype=np.float32)
        if self.at_once:
            agents, futures = self.agent_vectors(tracks, origin, rotation)
            lanes = self.lane_vectors(lanes, kinds, origin, rotation)
        else:
            agents, futures = zip(*(self.agent_vectors(track, origin, rotation) for track in tracks), strict=False)
            lanes = np.stack([self.lane_vectors(p, k, origin, rotation) for p, k in zip(lanes, kinds, strict=False)])
            agents, futures = np.stack(agents), np.stack(futures)
        return {"agents": agents.astype(np.float32), "lanes": lanes.astype(np.float32), "futures": futures}


def pad_scenes(scenes):
    """Collate scenes into arrays with as many agents and lanes as the largest scene has."""
    batch = {}
    for name in scenes[0]:
        most = max(len(scene[name]) for scene in scenes)
        batch[name] = np.zeros((len(scenes), most, *scenes[0][name].shape[1:]), np.float32)
        batch[name + "_valid"] = np.zeros((len(scenes), most), bool)
        for i, scene in enumerate(scenes):
            batch[name][i, : len(scene[name])] = scene[name]
            batch[name + "_valid"][i, : len(scene[name])] = True
    return batch


class PolylineEncoder(nn.Module):
    """VectorNet's subgraph: three layers, each joins a vector's features and the polyline's maximum."""

    def __init__(self, inputs, width):
        super().__init__()
        widths = [inputs, width, width]
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(w, width // 2), nn.LayerNorm(width // 2), nn.ReLU()) for w in widths
        )

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
            pooled = x.max(dim=-2, keepdim=True).values
            x = torch.cat([x, pooled.expand_as(x)], dim=-1)
        return x.max(dim=-2).values


class SceneLayer(nn.Module):
    """Pre-norm self-attention over a scene's polylines and a feed-forward network."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x, mask=None):
        batch, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(qkv[0], qkv[1], qkv[2], attn_mask=mask)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.norm2(x))


class MotionForecaster(nn.Module):
    """Polyline encoders, attention between polylines, and a decoder of several futures for each agent."""

    def __init__(self, width, heads, depth, modes, future):
        super().__init__()
        self.modes, self.future = modes, future
        self.agent_encoder, self.lane_encoder = PolylineEncoder(8, width), PolylineEncoder(8, width)
        self.layers = nn.ModuleList(SceneLayer(width, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.trajectory = nn.Sequential(nn.Linear(width, 512), nn.ReLU(), nn.Linear(512, modes * future * 2))
        self.confidence = nn.Sequential(nn.Linear(width, 128), nn.ReLU(), nn.Linear(128, modes))

    def attend(self, x, mask=None):
        for layer in self.layers:
            x = layer(x, mask)
        return self.norm(x)

    def decode(self, x):
        trajectories = self.trajectory(x).view(*x.shape[:-1], self.modes, self.future, 2)
        return trajectories.float(), self.confidence(x).float()

    def forward(self, agents, lanes):
        x = torch.cat([self.agent_encoder(agents), self.lane_encoder(lanes)])
        return self.decode(self.attend(x[None])[0, : len(agents)])


def winner_loss(trajectories, confidence, futures):
    """Return each agent's loss: only the mode whose end is nearest to the truth is trained."""
    distance = (trajectories[..., -1, :] - futures[:, None, -1]).norm(dim=-1)
    best = distance.argmin(dim=1)
    chosen = trajectories[torch.arange(len(best), device=best.device), best]
    regression = F.smooth_l1_loss(chosen, futures, reduction="none").mean(dim=(1, 2))
    return regression + F.cross_entropy(confidence, best, reduction="none")


def trajectory_forecast(change):
    """Train a motion forecaster with batches of 32 scenes."""
    torch.manual_seed(0)
    past, future = 20, size(60, 8)
    scenes = DrivingScenes(
        size(512, 8), size(48, 8), size(160, 12), past, future, at_once=change == "vectorized_transform"
    )
    padded = change == "padded_batch"
    options = dict(batch_size=size(32, 4), shuffle=True, drop_last=True, collate_fn=pad_scenes if padded else list)
    if change == "workers":
        options.update(num_workers=size(4, 1), multiprocessing_context="fork", persistent_workers=True)
    batches = endless(DataLoader(scenes, **options))
    first = next(batches)
    torch.manual_seed(1)
    model = MotionForecaster(size(256, 32), 8, size(4, 2), 6, future).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.01)
    losses = []

    def to_device(array):
        return torch.from_numpy(array).to(device)

    def scene_by_scene(scenes):
        total, count = 0.0, 0
        for scene in scenes:
            agents, lanes, futures = (to_device(scene[name]) for name in ("agents", "lanes", "futures"))
            trajectories, confidence = model(agents, lanes)
            total = total + winner_loss(trajectories, confidence, futures).sum()
            count += len(agents)
        return total / count

    def joint(scenes):
        agents, lanes, futures = (
            to_device(np.concatenate([scene[name] for scene in scenes])) for name in ("agents", "lanes", "futures")
        )
        counts = [len(scene["agents"]) for scene in scenes]
        agents = model.agent_encoder(agents).split(counts)
        lanes = model.lane_encoder(lanes).split([len(scene["lanes"]) for scene in scenes])
        attended = [model.attend(torch.cat([a, b])[None])[0, : len(a)] for a, b in zip(agents, lanes, strict=False)]
        trajectories, confidence = model.decode(torch.cat(attended))
        return winner_loss(trajectories, confidence, futures).mean()

    def all_scenes(batch):
        batch = {name: to_device(array) for name, array in batch.items()}
        valid = torch.cat([batch["agents_valid"], batch["lanes_valid"]], dim=1)
        x = torch.cat([model.agent_encoder(batch["agents"]), model.lane_encoder(batch["lanes"])], dim=1)
        x = model.attend(x, valid[:, None, None])[:, : batch["agents"].shape[1]]
        trajectories, confidence = model.decode(x)
        each = winner_loss(trajectories.flatten(0, 1), confidence.flatten(0, 1), batch["futures"].flatten(0, 1))
        weight = batch["agents_valid"].flatten().float()
        return (each * weight).sum() / weight.sum()

    forward = {"padded_batch": all_scenes, "joint_polylines": joint}.get(change, scene_by_scene)

    def step():
        nonlocal first
        batch, first = (next(batches) if first is None else first), None
        optimizer.zero_grad()
        with bf16(change == "bf16_autocast"):
            loss = forward(batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
        return loss.detach()

    return step


class LatentResBlock(nn.Module):
    """Residual block with group normalization and, where there is one, the embedding of the time."""

    def __init__(self, before, after, time_width=None):
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(32, before), nn.GroupNorm(32, after)
        self.conv1, self.conv2 = nn.Conv2d(before, after, 3, padding=1), nn.Conv2d(after, after, 3, padding=1)
        self.time = nn.Linear(time_width, after) if time_width else None
        self.skip = nn.Conv2d(before, after, 1) if before != after else nn.Identity()

    def forward(self, x, time=None):
        h = self.conv1(F.silu(self.norm1(x)))
        if self.time is not None:
            h = h + self.time(F.silu(time))[:, :, None, None]
        return self.skip(x) + self.conv2(F.silu(self.norm2(h)))


class LatentAttention(nn.Module):
    """Multi-head attention to the image's own positions or to a text's states."""

    def __init__(self, width, context_width, heads):
        super().__init__()
        self.heads = heads
        self.to_q, self.to_k = nn.Linear(width, width, bias=False), nn.Linear(context_width, width, bias=False)
        self.to_v, self.to_out = nn.Linear(context_width, width, bias=False), nn.Linear(width, width)

    def forward(self, x, context):
        q, k, v = (
            y.view(y.shape[0], y.shape[1], self.heads, -1).transpose(1, 2)
            for y in (self.to_q(x), self.to_k(context), self.to_v(context))
        )
        return self.to_out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class LatentBlock(nn.Module):
    """Residual block and, at the lower resolutions, a transformer block."""

    def __init__(self, before, after, time_width, text_width, attention):
        super().__init__()
        self.res = LatentResBlock(before, after, time_width)
        self.attention = attention
        if attention:
            self.norm = nn.GroupNorm(32, after)
            self.norms = nn.ModuleList(nn.LayerNorm(after) for _ in range(3))
            self.itself, self.cross = LatentAttention(after, after, 8), LatentAttention(after, text_width, 8)
            self.gate, self.last = nn.Linear(after, 8 * after), nn.Linear(4 * after, after)

    def forward(self, x, time, text):
        x = self.res(x, time)
        if not self.attention:
            return x
        h = self.norm(x).flatten(2).transpose(1, 2)
        y = self.norms[0](h)
        h = h + self.itself(y, y)
        h = h + self.cross(self.norms[1](h), text)
        a, gate = self.gate(self.norms[2](h)).chunk(2, dim=-1)
        h = h + self.last(a * F.gelu(gate))
        return x + h.transpose(1, 2).reshape(x.shape)


class LatentTrunk(nn.Module):
    """The UNet's half from the latents to the middle block; a control branch is a copy of it."""

    def __init__(self, widths, text_width, checkpointing):
        super().__init__()
        self.checkpointing, self.base, time_width = checkpointing, widths[0], 4 * widths[0]
        self.time = nn.Sequential(nn.Linear(widths[0], time_width), nn.SiLU(), nn.Linear(time_width, time_width))
        self.conv_in = nn.Conv2d(4, widths[0], 3, padding=1)
        self.blocks, self.skip_widths, current = nn.ModuleList(), [widths[0]], widths[0]
        for level, width in enumerate(widths):
            for _ in range(2):
                self.blocks.append(LatentBlock(current, width, time_width, text_width, level > 0))
                current = width
                self.skip_widths.append(width)
            if level < len(widths) - 1:
                self.blocks.append(nn.Conv2d(width, width, 3, stride=2, padding=1))
                self.skip_widths.append(width)
        self.middle = LatentBlock(current, current, time_width, text_width, True)

    def run(self, block, *inputs):
        if self.checkpointing and torch.is_grad_enabled():
            return checkpoint(block, *inputs, use_reentrant=False)
        return block(*inputs)

    def embed(self, times):
        frequencies = torch.exp(torch.arange(self.base // 2, device=times.device) * (-math.log(10000) * 2 / self.base))
        angles = times[:, None].float() * frequencies
        return self.time(torch.cat([angles.cos(), angles.sin()], dim=1))

    def forward(self, x, times, text, hint=None):
        time = self.embed(times)
        x = self.conv_in(x)
        x = x if hint is None else x + hint
        skips = [x]
        for block in self.blocks:
            x = self.run(block, x, time, text) if isinstance(block, LatentBlock) else block(x)
            skips.append(x)
        return self.run(self.middle, x, time, text), skips, time


class LatentUnet(nn.Module):
    """Denoising UNet of latents which adds a control branch's outputs to its skip connections."""

    def __init__(self, widths, text_width, checkpointing):
        super().__init__()
        self.trunk = LatentTrunk(widths, text_width, checkpointing)
        skip_widths, current, time_width = list(self.trunk.skip_widths), widths[-1], 4 * widths[0]
        self.blocks = nn.ModuleList()
        for level, width in reversed(list(enumerate(widths))):
            for _ in range(3):
                block = LatentBlock(current + skip_widths.pop(), width, time_width, text_width, level > 0)
                self.blocks.append(block)
                current = width
            if level > 0:
                up = nn.Sequential(nn.Upsample(scale_factor=2), nn.Conv2d(width, width, 3, padding=1))
                self.blocks.append(up)
        self.out = nn.Sequential(nn.GroupNorm(32, current), nn.SiLU(), nn.Conv2d(current, 4, 3, padding=1))

    def forward(self, x, times, text, control):
        x, skips, time = self.trunk(x, times, text)
        x = x + control[-1]
        skips = [skip + extra for skip, extra in zip(skips, control[:-1], strict=False)]
        for block in self.blocks:
            if isinstance(block, LatentBlock):
                x = self.trunk.run(block, torch.cat([x, skips.pop()], dim=1), time, text)
            else:
                x = block(x)
        return self.out(x)


class ControlBranch(nn.Module):
    """Copy of a UNet's trunk which sees a hint image, with a zero convolution for each skip connection."""

    def __init__(self, trunk):
        super().__init__()
        self.trunk = copy.deepcopy(trunk)
        layers, widths = [], [3, 16, 32, 96]
        for before, after in itertools.pairwise(widths):
            layers += [nn.Conv2d(before, after, 3, stride=2, padding=1), nn.SiLU()]
        self.hint = nn.Sequential(*layers, self.zero(96, trunk.skip_widths[0]))
        widths = [*trunk.skip_widths, trunk.skip_widths[-1]]
        self.zeros = nn.ModuleList(self.zero(width, width) for width in widths)

    @staticmethod
    def zero(before, after):
        conv = nn.Conv2d(before, after, 1)
        nn.init.zeros_(conv.weight)
        nn.init.zeros_(conv.bias)
        return conv

    def forward(self, x, times, text, hint):
        middle, skips, _ = self.trunk(x, times, text, self.hint(hint))
        return [zero(y) for zero, y in zip(self.zeros, [*skips, middle], strict=False)]


class ImageEncoder(nn.Module):
    """VAE's encoder: from images to mean and log-variance of latents at an eighth of the resolution."""

    def __init__(self, width):
        super().__init__()
        widths = [width, 2 * width, 4 * width, 4 * width]
        layers, current = [nn.Conv2d(3, width, 3, padding=1)], width
        for level, after in enumerate(widths):
            layers += [LatentResBlock(current, after), LatentResBlock(after, after)]
            current = after
            if level < 3:
                layers.append(nn.Conv2d(after, after, 3, stride=2, padding=1))
        layers += [LatentResBlock(current, current), LatentResBlock(current, current)]
        layers += [nn.GroupNorm(32, current), nn.SiLU(), nn.Conv2d(current, 8, 3, padding=1)]
        self.layers = nn.Sequential(*layers)

    def forward(self, x):
        return self.layers(x).float().chunk(2, dim=1)


class HintImages(Dataset):
    """Images, their edge maps as hints, and the states of their captions."""

    def __init__(self, count, side, text_width):
        rng = np.random.default_rng(0)
        coarse = rng.integers(0, 256, (count, side // 16, side // 16, 3), dtype=np.uint8)
        self.images = coarse.repeat(16, 1).repeat(16, 2)
        grey = self.images.mean(-1)
        edges = (np.abs(np.diff(grey, axis=1, append=0)) + np.abs(np.diff(grey, axis=2, append=0))) > 60
        self.hints = (edges[..., None] * np.full(3, 255)).astype(np.uint8)
        self.texts = rng.standard_normal((count, 77, text_width)).astype(np.float32)
        self.with_image = True

    def __len__(self):
        return len(self.images)

    def image(self, index):
        return torch.from_numpy(self.images[index].astype(np.float32) / 127.5 - 1.0).permute(2, 0, 1)

    def __getitem__(self, index):
        hint = torch.from_numpy(self.hints[index].astype(np.float32) / 255.0).permute(2, 0, 1)
        item = {"hint": hint, "text": torch.from_numpy(self.texts[index]), "index": index}
        if self.with_image:
            item["image"] = self.image(index)
        return item


def controlnet_training(change):
    """Train a control branch beside a frozen UNet, with images of 512x512 and a frozen VAE encoder."""
    torch.manual_seed(0)
    text_width = size(768, 32)
    images = HintImages(size(24, 4), size(512, 64), text_width)
    vae = ImageEncoder(size(128, 32)).to(device).eval().requires_grad_(False)
    widths = (size(192, 32), size(384, 32), size(768, 64))
    unet = LatentUnet(widths, text_width, checkpointing=change != "no_checkpointing").to(device)
    control = ControlBranch(unet.trunk).to(device)
    unet.requires_grad_(False).eval()
    control.train()
    optimizer = torch.optim.AdamW(control.parameters(), lr=1e-5, weight_decay=1e-2, fused=change == "fused_adamw")
    alphas = torch.cumprod(1 - torch.linspace(0.00085**0.5, 0.012**0.5, 1000) ** 2, dim=0).to(device)
    predict, branch = unet, control
    if change == "compile_unets":
        predict, branch = compiled(unet), compiled(control)
    if change == "cached_latents":
        with torch.no_grad():
            moments = [vae(images.image(index)[None].to(device)) for index in range(len(images))]
        means, log_variances = (torch.cat(parts) for parts in zip(*moments, strict=False))
        images.with_image = False
    batches = endless(DataLoader(images, batch_size=size(4, 2), shuffle=True, drop_last=True))
    logs = []

    def step():
        batch = {name: value.to(device) for name, value in next(batches).items()}
        with bf16(change == "bf16_autocast"):
            with torch.no_grad():
                if change == "cached_latents":
                    mean, log_variance = means[batch["index"]], log_variances[batch["index"]]
                else:
                    mean, log_variance = vae(batch["image"])
                latents = mean + torch.exp(0.5 * log_variance.clamp(-30, 20)) * torch.randn_like(mean)
                latents = latents * 0.18215
            noise = torch.randn_like(latents)
            times = torch.randint(0, 1000, (len(latents),), device=device)
            alpha = alphas[times].view(-1, 1, 1, 1)
            noisy = alpha.sqrt() * latents + (1 - alpha).sqrt() * noise
            prediction = predict(noisy, times, batch["text"], branch(noisy, times, batch["text"], batch["hint"]))
        loss = F.mse_loss(prediction.float(), noise)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(control.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        logs.append(loss.detach().item())
        return loss.detach()

    return step


PROGRAMS = {
    mri_reconstruction: {
        "mask_on_gpu": "data_loader",
        "bf16_unets": "half_precision",
        "compile_unets": "fuse_pointwise",
        "shift_once": "",
        "channels_last": "channels_last",
    },
    keypoint_matching: {
        "graph_matcher": "cuda_graph",
        "batch_pairs": "larger_batch",
        "scaling_sinkhorn": "",
        "compile_sinkhorn": "fuse_pointwise",
        "bf16_matcher": "half_precision",
    },
    trajectory_forecast: {
        "padded_batch": "larger_batch",
        "joint_polylines": "larger_batch",
        "vectorized_transform": "data_loader",
        "workers": "data_loader",
        "bf16_autocast": "half_precision",
    },
    controlnet_training: {
        "bf16_autocast": "half_precision",
        "cached_latents": "",
        "no_checkpointing": "no_recompute",
        "compile_unets": "fuse_pointwise",
        "fused_adamw": "fused_optimizer",
    },
}
