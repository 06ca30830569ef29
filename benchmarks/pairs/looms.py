"""Training: parse trees, depth from driving, tours, gaps in sensors, a recommender's graph, tasks in turn, calls."""

import copy
import math

import numpy as np
import torch
import torch.nn.functional as F
from setting import bf16, device, endless, graphed_training, size
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset


class Tree:
    """A node of a dependency tree: the place of its word in the sentence, its children and its state."""

    def __init__(self, idx):
        self.idx, self.children, self.state = idx, [], None

    @property
    def num_children(self):
        return len(self.children)

    def nodes(self):
        for child in self.children:
            yield from child.nodes()
        yield self

    def height(self):
        return 1 + max((child.height() for child in self.children), default=-1)


def random_tree(words, random):
    """Return a tree over that many words, in which each word hangs on one of the few before it."""
    nodes = [Tree(int(idx)) for idx in random.permutation(words)]
    for number in range(1, words):
        nodes[random.integers(max(0, number - 4), number)].children.append(nodes[number])
    return nodes[0]


class SentencePairs(Dataset):
    """Pairs of parsed sentences, with a score from 1 to 5 of how near their meanings are."""

    def __init__(self, count, vocabulary, shortest, longest):
        random = np.random.default_rng(0)
        self.sentences, self.trees = [], []
        for _ in range(2 * count):
            words = int(random.integers(shortest, longest + 1))
            self.sentences.append(torch.from_numpy(random.integers(0, vocabulary, words)))
            self.trees.append(random_tree(words, random))
        self.scores = random.uniform(1, 5, count)

    def __len__(self):
        return len(self.scores)

    def __getitem__(self, index):
        left, right = 2 * index, 2 * index + 1
        return self.trees[left], self.sentences[left], self.trees[right], self.sentences[right], self.scores[index]


def map_label_to_target(label, num_classes):
    """Spread a score over the two classes next to it."""
    target = torch.zeros(1, num_classes)
    ceil, floor = math.ceil(label), math.floor(label)
    if ceil == floor:
        target[0, floor - 1] = 1
    else:
        target[0, floor - 1] = ceil - label
        target[0, ceil - 1] = label - floor
    return target


class ChildSumTreeLSTM(nn.Module):
    """An LSTM that goes up a tree and sums over the children of each node."""

    def __init__(self, in_dim, mem_dim, change):
        super().__init__()
        self.mem_dim, self.change = mem_dim, change
        self.ioux = nn.Linear(in_dim, 3 * mem_dim)
        self.iouh = nn.Linear(mem_dim, 3 * mem_dim)
        self.fx = nn.Linear(in_dim, mem_dim)
        self.fh = nn.Linear(mem_dim, mem_dim)

    def project(self, inputs):
        return self.ioux(inputs), self.fx(inputs)

    def node_forward(self, projected, child_c, child_h):
        child_h_sum = torch.sum(child_h, dim=0, keepdim=True)
        iou = projected[0] + self.iouh(child_h_sum)
        i, o, u = torch.split(iou, iou.size(1) // 3, dim=1)
        i, o, u = torch.sigmoid(i), torch.sigmoid(o), torch.tanh(u)
        f = torch.sigmoid(self.fh(child_h) + projected[1].repeat(len(child_h), 1))
        fc = torch.mul(f, child_c)
        c = torch.mul(i, u) + torch.sum(fc, dim=0, keepdim=True)
        h = torch.mul(o, torch.tanh(c))
        return c, h

    def visit(self, tree, inputs):
        for child in tree.children:
            self.visit(child, inputs)
        if tree.num_children == 0:
            child_c = torch.zeros(1, self.mem_dim, device=device)
            child_h = torch.zeros(1, self.mem_dim, device=device)
        else:
            child_c = torch.cat([child.state[0] for child in tree.children], dim=0)
            child_h = torch.cat([child.state[1] for child in tree.children], dim=0)
        if self.change == "words_first":
            projected = inputs[0][tree.idx], inputs[1][tree.idx]
        else:
            projected = self.project(inputs[tree.idx])
        tree.state = self.node_forward(projected, child_c, child_h)
        return tree.state

    def forward(self, tree, inputs):
        return self.visit(tree, self.project(inputs) if self.change == "words_first" else inputs)

    def forward_levels(self, trees, lengths, inputs):
        """Return the hidden states of the roots of several trees, computed for all nodes of a height at once."""
        levels, start = [], 0
        for tree, length in zip(trees, lengths, strict=True):
            for node in tree.nodes():
                height = node.height()
                levels.extend([] for _ in range(height + 1 - len(levels)))
                levels[height].append((node, start + node.idx))
            start += length
        place, numbers, counts = {}, [], []
        for level in levels:
            edges = [(place[id(child)], slot) for slot, (node, _) in enumerate(level) for child in node.children]
            place.update({id(node): len(place) + slot for slot, (node, _) in enumerate(level)})
            parts = [word for _, word in level], [child for child, _ in edges], [slot for _, slot in edges]
            for part in parts:
                numbers.extend(part)
                counts.append(len(part))
        numbers.extend(place[id(tree)] for tree in trees)
        *parts, roots = torch.tensor(numbers).to(device).split([*counts, len(trees)])
        c = h = torch.zeros(0, self.mem_dim, device=device)
        for words, children, slots in zip(parts[::3], parts[1::3], parts[2::3], strict=True):
            ioux, fx = self.project(inputs[words])
            zeros = torch.zeros(len(words), self.mem_dim, device=device)
            child_h = h[children]
            i, o, u = (ioux + self.iouh(zeros.index_add(0, slots, child_h))).chunk(3, dim=1)
            f = torch.sigmoid(self.fh(child_h) + fx[slots])
            new_c = torch.sigmoid(i) * torch.tanh(u) + zeros.index_add(0, slots, f * c[children])
            c, h = torch.cat([c, new_c]), torch.cat([h, torch.sigmoid(o) * torch.tanh(new_c)])
        return h[roots]


class TreeSimilarity(nn.Module):
    """Two sentences are read along their trees, and a small network compares what comes out."""

    def __init__(self, vocabulary, in_dim, mem_dim, hidden_dim, num_classes, change):
        super().__init__()
        self.emb = nn.Embedding(vocabulary, in_dim)
        self.emb.weight.requires_grad = False
        self.childsumtreelstm = ChildSumTreeLSTM(in_dim, mem_dim, change)
        self.wh = nn.Linear(2 * mem_dim, hidden_dim)
        self.wp = nn.Linear(hidden_dim, num_classes)

    def compare(self, lvec, rvec):
        mult_dist = torch.mul(lvec, rvec)
        abs_dist = torch.abs(torch.add(lvec, -rvec))
        out = torch.sigmoid(self.wh(torch.cat((mult_dist, abs_dist), 1)))
        return F.log_softmax(self.wp(out), dim=1)

    def forward(self, ltree, linputs, rtree, rinputs):
        _, lhidden = self.childsumtreelstm(ltree, self.emb(linputs))
        _, rhidden = self.childsumtreelstm(rtree, self.emb(rinputs))
        return self.compare(lhidden, rhidden)

    def forward_pairs(self, ltrees, lsentences, rtrees, rsentences):
        sentences = [*lsentences, *rsentences]
        inputs = self.emb(torch.cat(sentences).to(device))
        lengths = [len(sentence) for sentence in sentences]
        return self.compare(*self.childsumtreelstm.forward_levels([*ltrees, *rtrees], lengths, inputs).chunk(2))


def sentence_trees(change):
    """Train a child-sum Tree-LSTM that tells how near the meanings of two parsed sentences are."""
    batch_size, num_classes, vocabulary = size(10, 3), 5, size(2400, 50)
    dataset = SentencePairs(size(1000, 12), vocabulary, size(6, 3), size(14, 6))
    model = TreeSimilarity(vocabulary, size(300, 12), size(150, 8), size(50, 6), num_classes, change).to(device)
    criterion = nn.KLDivLoss(reduction="sum")
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.Adagrad(parameters, lr=0.01, weight_decay=1e-4)
    random = np.random.default_rng(0)
    indices, position = random.permutation(len(dataset)), 0

    def train_pairs(chosen):
        ltrees, lsentences, rtrees, rsentences, labels = zip(*[dataset[index] for index in chosen], strict=True)
        targets = torch.cat([map_label_to_target(label, num_classes) for label in labels]).to(device)
        loss = criterion(model.forward_pairs(ltrees, lsentences, rtrees, rsentences), targets)
        loss.backward()
        return loss.item()

    def step():
        nonlocal indices, position
        if position + batch_size > len(dataset):
            indices, position = random.permutation(len(dataset)), 0
        chosen = indices[position : position + batch_size]
        position += batch_size
        model.train()
        optimizer.zero_grad()
        total_loss = 0.0
        if change == "levels":
            total_loss = train_pairs(chosen)
        else:
            for index in chosen:
                ltree, linput, rtree, rinput, label = dataset[index]
                target = map_label_to_target(label, num_classes).to(device)
                output = model(ltree, linput.to(device), rtree, rinput.to(device))
                loss = criterion(output, target)
                if change == "one_backward":
                    total_loss = total_loss + loss
                    continue
                total_loss += loss.detach() if change == "no_item" else loss.item()
                loss.backward()
        if change == "one_backward":
            total_loss.backward()
            total_loss = total_loss.item()
        optimizer.step()
        return torch.as_tensor(total_loss / batch_size)

    return step


class DrivingSequences(Dataset):
    """Frames of a camera in a car with the ones before and after, mirrored, enlarged and cropped at random."""

    def __init__(self, count, height, width, raw):
        random = np.random.default_rng(0)
        coarse = random.integers(0, 224, (height // 8, width // 8 + count, 3), dtype=np.uint8)
        street = coarse.repeat(8, axis=0).repeat(8, axis=1)
        street += random.integers(0, 32, street.shape, dtype=np.uint8)
        self.frames = np.stack([street[:, 4 * number : 4 * number + width] for number in range(count)])
        focal = 0.58 * width
        self.intrinsics = np.array([[focal, 0, width / 2], [0, focal, height / 2], [0, 0, 1]], dtype=np.float32)
        self.random, self.raw = random, raw

    def __len__(self):
        return len(self.frames) - 2

    def draw(self, intrinsics):
        height, width = self.frames.shape[1:3]
        mirrored = bool(self.random.random() < 0.5)
        if mirrored:
            intrinsics[0, 2] = width - intrinsics[0, 2]
        y_scaling, x_scaling = self.random.uniform(1, 1.15, 2)
        scaled_height, scaled_width = int(height * y_scaling), int(width * x_scaling)
        intrinsics[0] *= x_scaling
        intrinsics[1] *= y_scaling
        top = int(self.random.integers(scaled_height - height + 1))
        left = int(self.random.integers(scaled_width - width + 1))
        intrinsics[0, 2] -= left
        intrinsics[1, 2] -= top
        return mirrored, scaled_height, scaled_width, top, left

    def __getitem__(self, index):
        images = torch.from_numpy(self.frames[index : index + 3])
        intrinsics = self.intrinsics.copy()
        drawn = self.draw(intrinsics)
        if self.raw:
            return images, drawn, intrinsics
        images = augment(images, drawn)
        return images[1], [images[0], images[2]], intrinsics


def augment(images, drawn):
    """Return bytes (frames, height, width, 3) as normalized images, mirrored, enlarged and cropped as was drawn."""
    mirrored, scaled_height, scaled_width, top, left = drawn
    height, width = images.shape[1:3]
    images = images.permute(0, 3, 1, 2).float() / 255
    if mirrored:
        images = images.flip(3)
    images = F.interpolate(images, size=(scaled_height, scaled_width), mode="bilinear", align_corners=False)
    return (images[:, :, top : top + height, left : left + width] - 0.5) / 0.5


def collate_raw(items):
    """Stack the bytes and the intrinsics of some items, and keep a list of what was drawn for each."""
    images, drawn, intrinsics = zip(*items, strict=True)
    return torch.stack(images), drawn, torch.from_numpy(np.stack(intrinsics))


def downsample_conv(in_planes, out_planes, kernel_size=3):
    padding = (kernel_size - 1) // 2
    return nn.Sequential(
        nn.Conv2d(in_planes, out_planes, kernel_size, stride=2, padding=padding),
        nn.ReLU(inplace=True),
        nn.Conv2d(out_planes, out_planes, kernel_size, padding=padding),
        nn.ReLU(inplace=True),
    )


def upconv(in_planes, out_planes):
    return nn.Sequential(
        nn.ConvTranspose2d(in_planes, out_planes, 3, stride=2, padding=1, output_padding=1), nn.ReLU(inplace=True)
    )


def crop_like(x, reference):
    return x[:, :, : reference.size(2), : reference.size(3)]


class DispNet(nn.Module):
    """An encoder and decoder that gives the disparity of an image in four sizes."""

    def __init__(self, width, alpha=10, beta=0.01):
        super().__init__()
        self.alpha, self.beta = alpha, beta
        down = [width, 2 * width, 4 * width, 8 * width, 16 * width, 16 * width, 16 * width]
        up = [16 * width, 16 * width, 8 * width, 4 * width, 2 * width, width, width // 2]
        kernels = [7, 5, 3, 3, 3, 3, 3]
        self.downs = nn.ModuleList(
            [downsample_conv(a, b, k) for a, b, k in zip([3, *down[:-1]], down, kernels, strict=True)]
        )
        self.ups = nn.ModuleList([upconv(a, b) for a, b in zip([down[-1], *up[:-1]], up, strict=True)])
        skips = [*down[-2::-1], 0]
        self.iconvs, self.predictions = nn.ModuleList(), nn.ModuleDict()
        for number, (planes, skip) in enumerate(zip(up, skips, strict=True)):
            inputs = planes + skip + (1 if number > 3 else 0)
            self.iconvs.append(nn.Sequential(nn.Conv2d(inputs, planes, 3, padding=1), nn.ReLU(inplace=True)))
            if number >= 3:
                self.predictions[str(number)] = nn.Conv2d(planes, 1, 3, padding=1)

    def forward(self, x):
        features = [x]
        for down in self.downs:
            features.append(down(features[-1]))
        out, disparity, disparities = features.pop(), None, []
        for number, (up, iconv) in enumerate(zip(self.ups, self.iconvs, strict=True)):
            skip = features.pop()
            parts = [crop_like(up(out), skip)]
            if features:
                parts.append(skip)
            if disparity is not None:
                larger = F.interpolate(disparity, scale_factor=2, mode="bilinear", align_corners=False)
                parts.append(crop_like(larger, skip))
            out = iconv(torch.cat(parts, 1))
            if number >= 3:
                disparity = self.alpha * torch.sigmoid(self.predictions[str(number)](out)) + self.beta
                disparities.append(disparity)
        return disparities[::-1]


class PoseNet(nn.Module):
    """A network that tells how the camera moved from an image to each of the two others."""

    def __init__(self, width):
        super().__init__()
        planes = [9, width, 2 * width, 4 * width, 8 * width, 16 * width, 16 * width, 16 * width]
        layers = []
        for a, b, k in zip(planes[:-1], planes[1:], [7, 5, 3, 3, 3, 3, 3], strict=True):
            layers += [nn.Conv2d(a, b, k, stride=2, padding=(k - 1) // 2), nn.ReLU(inplace=True)]
        self.convs = nn.Sequential(*layers)
        self.pose_pred = nn.Conv2d(planes[-1], 12, 1)

    def forward(self, target_image, ref_imgs):
        pose = self.pose_pred(self.convs(torch.cat([target_image, *ref_imgs], 1)))
        return 0.01 * pose.mean(3).mean(2).view(pose.size(0), 2, 6)


def euler2mat(angle):
    x, y, z = angle[:, 0], angle[:, 1], angle[:, 2]
    zeros = z.detach() * 0
    ones = zeros.detach() + 1
    cosz, sinz = torch.cos(z), torch.sin(z)
    zmat = torch.stack([cosz, -sinz, zeros, sinz, cosz, zeros, zeros, zeros, ones], dim=1).reshape(-1, 3, 3)
    cosy, siny = torch.cos(y), torch.sin(y)
    ymat = torch.stack([cosy, zeros, siny, zeros, ones, zeros, -siny, zeros, cosy], dim=1).reshape(-1, 3, 3)
    cosx, sinx = torch.cos(x), torch.sin(x)
    xmat = torch.stack([ones, zeros, zeros, zeros, cosx, -sinx, zeros, sinx, cosx], dim=1).reshape(-1, 3, 3)
    return xmat @ ymat @ zmat


def pixel_grid(depth):
    """Return the homogeneous coordinates of all pixels of a depth map."""
    height, width = depth.shape[1:]
    rows = torch.arange(0, height).view(1, height, 1).expand(1, height, width).type_as(depth)
    columns = torch.arange(0, width).view(1, 1, width).expand(1, height, width).type_as(depth)
    return torch.stack((columns, rows, torch.ones(1, height, width).type_as(depth)), dim=1)


def inverse_warp(img, depth, pose, intrinsics, pixels):
    """Look at a neighbouring image from the target's camera, whose depth is known."""
    b, h, w = depth.shape
    points = intrinsics.inverse() @ pixels.expand(b, 3, h, w).reshape(b, 3, -1)
    points = points.reshape(b, 3, h, w) * depth.unsqueeze(1)
    matrix = torch.cat([euler2mat(pose[:, 3:]), pose[:, :3].unsqueeze(-1)], dim=2)
    projection = intrinsics @ matrix
    seen = projection[:, :, :3] @ points.reshape(b, 3, -1) + projection[:, :, 3:]
    z = seen[:, 2].clamp(min=1e-3)
    x = 2 * (seen[:, 0] / z) / (w - 1) - 1
    y = 2 * (seen[:, 1] / z) / (h - 1) - 1
    coordinates = torch.stack([x, y], dim=2).reshape(b, h, w, 2)
    projected = F.grid_sample(img, coordinates, padding_mode="zeros", align_corners=True)
    return projected, coordinates.abs().max(dim=-1)[0] <= 1


def ssim(x, y):
    """Return how unlike two images are in each pixel, by their structure in windows of 3 x 3."""
    x, y = F.pad(x, (1, 1, 1, 1), mode="reflect"), F.pad(y, (1, 1, 1, 1), mode="reflect")
    mu_x, mu_y = F.avg_pool2d(x, 3, 1), F.avg_pool2d(y, 3, 1)
    sigma_x = F.avg_pool2d(x**2, 3, 1) - mu_x**2
    sigma_y = F.avg_pool2d(y**2, 3, 1) - mu_y**2
    sigma_xy = F.avg_pool2d(x * y, 3, 1) - mu_x * mu_y
    numerator = (2 * mu_x * mu_y + 0.01**2) * (2 * sigma_xy + 0.03**2)
    denominator = (mu_x**2 + mu_y**2 + 0.01**2) * (sigma_x + sigma_y + 0.03**2)
    return torch.clamp((1 - numerator / denominator) / 2, 0, 1)


def smooth_loss(pred_map):
    def gradient(pred):
        return pred[:, :, :, 1:] - pred[:, :, :, :-1], pred[:, :, 1:] - pred[:, :, :-1]

    loss, weight = 0, 1.0
    for scaled_map in pred_map:
        dx, dy = gradient(scaled_map)
        dx2, dxdy = gradient(dx)
        dydx, dy2 = gradient(dy)
        loss += (dx2.abs().mean() + dxdy.abs().mean() + dydx.abs().mean() + dy2.abs().mean()) * weight
        weight /= 2.3
    return loss


def driving_depth(change):
    """Train networks that learn depth and the car's motion from a video alone, by warping its neighbouring frames."""
    batch_size, height, width = size(4, 2), size(128, 64), size(416, 128)
    augmented_here = change == "augment_on_gpu"
    dataset = DrivingSequences(size(200, 12), height, width, raw=augmented_here)
    collate = collate_raw if augmented_here else None
    batches = endless(DataLoader(dataset, batch_size, shuffle=True, drop_last=True, collate_fn=collate))
    disp_net, pose_net = DispNet(size(32, 4)).to(device), PoseNet(size(16, 4)).to(device)
    optimizer = torch.optim.Adam([*disp_net.parameters(), *pose_net.parameters()], lr=2e-4, betas=(0.9, 0.999))
    grids, log = {}, []

    def pixels_of(depth):
        if change != "cached_grids":
            return pixel_grid(depth)
        if depth.shape[1:] not in grids:
            grids[depth.shape[1:]] = pixel_grid(depth)
        return grids[depth.shape[1:]]

    def compare(target, ref, depth, pose, intrinsics):
        warped, valid = inverse_warp(ref, depth, pose, intrinsics, pixels_of(depth))
        valid = valid.unsqueeze(1).float()
        loss = (0.15 * ((target - warped) * valid).abs() + 0.85 * ssim(target, warped) * valid).mean()
        if change != "no_nan_check":
            assert (loss == loss).item() == 1
        return loss

    def one_scale(tgt_img, ref_imgs, intrinsics, depth, pose):
        h, w = depth.shape[2:]
        downscale = tgt_img.size(2) / h
        tgt_scaled = F.interpolate(tgt_img, (h, w), mode="area")
        refs_scaled = [F.interpolate(ref_img, (h, w), mode="area") for ref_img in ref_imgs]
        intrinsics_scaled = torch.cat((intrinsics[:, 0:2] / downscale, intrinsics[:, 2:]), dim=1)
        if change == "refs_together":
            poses = pose.transpose(0, 1).reshape(-1, 6)
            return 2 * compare(
                tgt_scaled.repeat(2, 1, 1, 1),
                torch.cat(refs_scaled),
                depth[:, 0].repeat(2, 1, 1),
                poses,
                intrinsics_scaled.repeat(2, 1, 1),
            )
        loss = 0
        for i, ref_scaled in enumerate(refs_scaled):
            loss += compare(tgt_scaled, ref_scaled, depth[:, 0], pose[:, i], intrinsics_scaled)
        return loss

    def next_batch():
        if augmented_here:
            images, drawn, intrinsics = next(batches)
            images = torch.stack([augment(*one) for one in zip(images.to(device), drawn, strict=True)])
            return images[:, 1], [images[:, 0], images[:, 2]], intrinsics.to(device)
        tgt_img, ref_imgs, intrinsics = next(batches)
        return tgt_img.to(device), [img.to(device) for img in ref_imgs], intrinsics.to(device)

    def step():
        disp_net.train()
        pose_net.train()
        tgt_img, ref_imgs, intrinsics = next_batch()
        with bf16(change == "bf16"):
            disparities = [disparity.float() for disparity in disp_net(tgt_img)]
            pose = pose_net(tgt_img, ref_imgs).float()
        depths = [1 / disparity for disparity in disparities]
        loss_1 = sum(one_scale(tgt_img, ref_imgs, intrinsics, depth, pose) for depth in depths)
        loss_3 = smooth_loss(depths)
        loss = loss_1 + 0.1 * loss_3
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        log.append((loss_1.item(), loss_3.item(), loss.item()))
        return loss.detach()

    return step


class TourAttention(nn.Module):
    """Attention with several heads among the towns of a map."""

    def __init__(self, n_heads, dim, fused):
        super().__init__()
        self.n_heads, self.key_dim, self.fused = n_heads, dim // n_heads, fused
        bound = 1 / math.sqrt(dim)
        for name in ("W_query", "W_key", "W_val"):
            weight = torch.empty(n_heads, dim, self.key_dim).uniform_(-bound, bound)
            setattr(self, name, nn.Parameter(weight))
        self.W_out = nn.Parameter(torch.empty(n_heads, self.key_dim, dim).uniform_(-bound, bound))

    def forward(self, h):
        batch, n, dim = h.size()
        flat = h.contiguous().view(-1, dim)
        shape = (self.n_heads, batch, n, -1)
        Q = torch.matmul(flat, self.W_query).view(shape)
        K = torch.matmul(flat, self.W_key).view(shape)
        V = torch.matmul(flat, self.W_val).view(shape)
        if self.fused:
            heads = F.scaled_dot_product_attention(Q, K, V)
        else:
            compatibility = torch.matmul(Q, K.transpose(2, 3)) / math.sqrt(self.key_dim)
            heads = torch.matmul(torch.softmax(compatibility, dim=-1), V)
        heads = heads.permute(1, 2, 0, 3).contiguous().view(-1, dim)
        return torch.mm(heads, self.W_out.view(-1, dim)).view(batch, n, dim)


class TourEncoderLayer(nn.Module):
    """Attention and a feed-forward network, each with a batch norm over all towns."""

    def __init__(self, n_heads, dim, hidden, fused):
        super().__init__()
        self.attention = TourAttention(n_heads, dim, fused)
        self.feedforward = nn.Sequential(nn.Linear(dim, hidden), nn.ReLU(), nn.Linear(hidden, dim))
        self.norm1, self.norm2 = nn.BatchNorm1d(dim), nn.BatchNorm1d(dim)

    def forward(self, h):
        h = h + self.attention(h)
        h = self.norm1(h.view(-1, h.size(-1))).view(h.size())
        h = h + self.feedforward(h)
        return self.norm2(h.view(-1, h.size(-1))).view(h.size())


class TourState:
    """Where the travellers of a batch are, where each began, and which towns they have seen."""

    def __init__(self, loc):
        self.loc = loc
        self.first = self.previous = torch.zeros(len(loc), 1, dtype=torch.long, device=loc.device)
        self.visited = torch.zeros(len(loc), 1, loc.size(1), dtype=torch.bool, device=loc.device)
        self.i = torch.zeros(1, dtype=torch.int64, device=loc.device)
        self.count = 0

    def update(self, selected):
        self.previous = selected[:, None]
        if self.count == 0:
            self.first = self.previous
        self.visited = self.visited.scatter(-1, self.previous[:, :, None], True)
        self.i = self.i + 1
        self.count += 1

    def all_finished(self):
        return self.i.item() >= self.loc.size(-2)


class TourModel(nn.Module):
    """An attention model that visits town after town, in the manner of Kool and others."""

    def __init__(self, dim, hidden, n_heads, n_layers, change):
        super().__init__()
        self.n_heads, self.dim, self.greedy = n_heads, dim, False
        self.unchecked = change in ("no_checks", "graph")
        self.exponential = change in ("exponential_draw", "graph")
        self.init_embed = nn.Linear(2, dim)
        layers = [TourEncoderLayer(n_heads, dim, hidden, change == "sdpa") for _ in range(n_layers)]
        self.embedder = nn.Sequential(*layers)
        self.W_placeholder = nn.Parameter(torch.empty(2 * dim).uniform_(-1, 1))
        self.project_node_embeddings = nn.Linear(dim, 3 * dim, bias=False)
        self.project_fixed_context = nn.Linear(dim, dim, bias=False)
        self.project_step_context = nn.Linear(2 * dim, dim, bias=False)
        self.project_out = nn.Linear(dim, dim, bias=False)

    def make_heads(self, x):
        return x.view(x.size(0), x.size(1), self.n_heads, -1).permute(2, 0, 1, 3)

    def step_context(self, embeddings, state):
        batch = embeddings.size(0)
        if (state.count if self.unchecked else state.i.item()) == 0:
            return self.W_placeholder[None, None, :].expand(batch, 1, -1)
        ends = torch.cat((state.first, state.previous), 1)[:, :, None].expand(batch, 2, self.dim)
        return embeddings.gather(1, ends).view(batch, 1, -1)

    def get_log_p(self, embeddings, context, glimpse_K, glimpse_V, logit_K, state):
        mask = state.visited
        query = context + self.project_step_context(self.step_context(embeddings, state))
        compatibility = torch.matmul(self.make_heads(query), glimpse_K.transpose(-2, -1))
        compatibility = compatibility / math.sqrt(self.dim // self.n_heads)
        compatibility = compatibility.masked_fill(mask[None], -math.inf)
        heads = torch.matmul(torch.softmax(compatibility, dim=-1), glimpse_V)
        glimpse = self.project_out(heads.permute(1, 2, 0, 3).reshape(len(query), 1, -1))
        logits = torch.matmul(glimpse, logit_K.transpose(-2, -1)) / math.sqrt(self.dim)
        logits = (torch.tanh(logits) * 10.0).masked_fill(mask, -math.inf)
        log_p = torch.log_softmax(logits, dim=-1)
        if not self.unchecked:
            assert not torch.isnan(log_p).any()
        return log_p[:, 0]

    def select_node(self, probs, mask):
        if not self.unchecked:
            assert (probs == probs).all(), "Probs should not contain any nans"
        if self.greedy:
            selected = probs.max(1)[1]
            if not self.unchecked:
                assert not mask.gather(1, selected.unsqueeze(-1)).any(), "Decode greedy: infeasible action"
            return selected
        if self.exponential:
            return (probs / torch.empty_like(probs).exponential_()).argmax(1)
        selected = probs.multinomial(1).squeeze(1)
        while not self.unchecked and mask.gather(1, selected.unsqueeze(-1)).any():
            print("Sampled bad values, resampling!")
            selected = probs.multinomial(1).squeeze(1)
        return selected

    def costs(self, loc, tours):
        if not self.unchecked:
            expected = torch.arange(tours.size(1), device=tours.device).expand_as(tours)
            assert (expected == tours.sort(1)[0]).all(), "Invalid tour"
        path = loc.gather(1, tours.unsqueeze(-1).expand_as(loc))
        return (path[:, 1:] - path[:, :-1]).norm(p=2, dim=2).sum(1) + (path[:, 0] - path[:, -1]).norm(p=2, dim=1)

    def forward(self, loc):
        embeddings = self.embedder(self.init_embed(loc))
        context = self.project_fixed_context(embeddings.mean(1))[:, None, :]
        glimpse_K, glimpse_V, logit_K = self.project_node_embeddings(embeddings).chunk(3, dim=-1)
        glimpse_K, glimpse_V = self.make_heads(glimpse_K), self.make_heads(glimpse_V)
        outputs, sequences, state = [], [], TourState(loc)
        while not (state.count >= loc.size(1) if self.unchecked else state.all_finished()):
            log_p = self.get_log_p(embeddings, context, glimpse_K, glimpse_V, logit_K, state)
            selected = self.select_node(log_p.detach().exp(), state.visited[:, 0])
            state.update(selected)
            outputs.append(log_p)
            sequences.append(selected)
        log_p, tours = torch.stack(outputs, 1), torch.stack(sequences, 1)
        log_p = log_p.gather(2, tours.unsqueeze(-1)).squeeze(-1)
        if not self.unchecked:
            assert (log_p > -1000).all(), "Logprobs should not be -inf, check sampling procedure!"
        return self.costs(loc, tours), log_p.sum(1)


def tour_planner(change):
    """Train a network to plan short tours through towns by REINFORCE, against the greedy tours of an older copy."""
    towns, batch_size, dim = size(50, 6), size(512, 8), size(128, 16)
    dataset = [torch.FloatTensor(towns, 2).uniform_(0, 1) for _ in range(size(10240, 32))]
    batches = endless(DataLoader(dataset, batch_size, shuffle=True, drop_last=True))
    model = TourModel(dim, size(512, 32), size(8, 2), size(3, 2), change).to(device)
    baseline = copy.deepcopy(model).eval()
    model.train()
    baseline.greedy = True
    capturable = change == "graph" and device.type == "cuda"
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, capturable=capturable)
    number, log = 0, []

    def train(loc):
        with bf16(change == "bf16"):
            cost, log_likelihood = model(loc)
            with torch.no_grad():
                baseline_cost, _ = baseline(loc)
        loss = ((cost - baseline_cost) * log_likelihood).mean()
        optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.detach(), cost.detach().mean(), norm

    if change == "graph":
        fixed = torch.rand(batch_size, towns, 2, generator=torch.Generator().manual_seed(0)).to(device)
        replay = graphed_training(lambda: train(fixed), [model], [optimizer])

    def step():
        nonlocal number
        loc = next(batches).to(device)
        if change == "graph":
            fixed.copy_(loc)
            loss, cost, norm = replay()
        else:
            loss, cost, norm = train(loc)
        if number % 50 == 0:
            log.append((cost.item(), norm.item(), loss.item()))
        number += 1
        return loss

    return step


class PatchySeries(Dataset):
    """Windows of many sensors' readings, of which some are missing."""

    def __init__(self, length, sensors, eval_length):
        random = np.random.default_rng(0)
        time = np.arange(length)[:, None]
        waves = np.sin(2 * np.pi * (time / random.uniform(12, 96, sensors) + random.random(sensors)))
        data = 20 + 5 * waves + random.standard_normal((length, sensors))
        self.observed_masks = (random.random(data.shape) < 0.8).astype(np.float32)
        mean, std = data.mean(0), data.std(0)
        self.observed_data = ((data - mean) / std * self.observed_masks).astype(np.float32)
        self.eval_length = eval_length
        self.use_index = np.arange(length - eval_length + 1)

    def __len__(self):
        return len(self.use_index)

    def __getitem__(self, org_index):
        index = self.use_index[org_index]
        return {
            "observed_data": self.observed_data[index : index + self.eval_length],
            "observed_mask": self.observed_masks[index : index + self.eval_length],
            "timepoints": np.arange(self.eval_length) * 1.0,
        }


def conv1d_with_init(in_channels, out_channels, kernel_size):
    layer = nn.Conv1d(in_channels, out_channels, kernel_size)
    nn.init.kaiming_normal_(layer.weight)
    return layer


class DiffusionEmbedding(nn.Module):
    """An embedding of the step of diffusion: waves, then a small network."""

    def __init__(self, num_steps, embedding_dim):
        super().__init__()
        steps = torch.arange(num_steps).unsqueeze(1)
        frequencies = 10.0 ** (torch.arange(embedding_dim // 2) / (embedding_dim // 2 - 1) * 4.0).unsqueeze(0)
        table = steps * frequencies
        self.register_buffer("embedding", torch.cat([torch.sin(table), torch.cos(table)], dim=1), persistent=False)
        self.projection1 = nn.Linear(embedding_dim, embedding_dim)
        self.projection2 = nn.Linear(embedding_dim, embedding_dim)

    def forward(self, diffusion_step):
        x = self.embedding[diffusion_step]
        return F.silu(self.projection2(F.silu(self.projection1(x))))


class GapResidualBlock(nn.Module):
    """A residual block that attends along the time of each sensor, and then among the sensors of each time."""

    def __init__(self, side_dim, channels, diffusion_dim, nheads):
        super().__init__()
        self.diffusion_projection = nn.Linear(diffusion_dim, channels)
        self.cond_projection = conv1d_with_init(side_dim, 2 * channels, 1)
        self.mid_projection = conv1d_with_init(channels, 2 * channels, 1)
        self.output_projection = conv1d_with_init(channels, 2 * channels, 1)
        layer = nn.TransformerEncoderLayer(channels, nheads, dim_feedforward=channels, activation="gelu")
        self.time_layer = nn.TransformerEncoder(layer, num_layers=1, enable_nested_tensor=False)
        self.feature_layer = nn.TransformerEncoder(layer, num_layers=1, enable_nested_tensor=False)

    def forward_time(self, y, base_shape):
        B, channel, K, L = base_shape
        y = y.reshape(B, channel, K, L).permute(0, 2, 1, 3).reshape(B * K, channel, L)
        y = self.time_layer(y.permute(2, 0, 1)).permute(1, 2, 0)
        return y.reshape(B, K, channel, L).permute(0, 2, 1, 3).reshape(B, channel, K * L)

    def forward_feature(self, y, base_shape):
        B, channel, K, L = base_shape
        y = y.reshape(B, channel, K, L).permute(0, 3, 1, 2).reshape(B * L, channel, K)
        y = self.feature_layer(y.permute(2, 0, 1)).permute(1, 2, 0)
        return y.reshape(B, L, channel, K).permute(0, 2, 3, 1).reshape(B, channel, K * L)

    def forward(self, x, cond_info, diffusion_emb):
        B, channel, K, L = x.shape
        base_shape = x.shape
        x = x.reshape(B, channel, K * L)
        y = x + self.diffusion_projection(diffusion_emb).unsqueeze(-1)
        y = self.forward_time(y, base_shape)
        y = self.forward_feature(y, base_shape)
        y = self.mid_projection(y)
        y = y + self.cond_projection(cond_info.reshape(B, -1, K * L))
        gate, filtered = torch.chunk(y, 2, dim=1)
        y = self.output_projection(torch.sigmoid(gate) * torch.tanh(filtered))
        residual, skip = torch.chunk(y, 2, dim=1)
        x, residual, skip = x.reshape(base_shape), residual.reshape(base_shape), skip.reshape(base_shape)
        return (x + residual) / math.sqrt(2.0), skip


class GapDenoiser(nn.Module):
    """A network that guesses the noise in the readings that are to be filled in."""

    def __init__(self, num_steps, side_dim, channels, layers, nheads):
        super().__init__()
        self.diffusion_embedding = DiffusionEmbedding(num_steps, 2 * channels)
        self.input_projection = conv1d_with_init(2, channels, 1)
        self.output_projection1 = conv1d_with_init(channels, channels, 1)
        self.output_projection2 = conv1d_with_init(channels, 1, 1)
        nn.init.normal_(self.output_projection2.weight, std=0.01)
        blocks = [GapResidualBlock(side_dim, channels, 2 * channels, nheads) for _ in range(layers)]
        self.residual_layers = nn.ModuleList(blocks)

    def forward(self, x, cond_info, diffusion_step):
        B, inputdim, K, L = x.shape
        x = F.relu(self.input_projection(x.reshape(B, inputdim, K * L))).reshape(B, -1, K, L)
        diffusion_emb = self.diffusion_embedding(diffusion_step)
        skip = []
        for layer in self.residual_layers:
            x, skip_connection = layer(x, cond_info, diffusion_emb)
            skip.append(skip_connection)
        x = torch.sum(torch.stack(skip), dim=0) / math.sqrt(len(self.residual_layers))
        x = F.relu(self.output_projection1(x.reshape(B, -1, K * L)))
        return self.output_projection2(x).reshape(B, K, L)


class GapFiller(nn.Module):
    """Conditional score-based diffusion for imputation (CSDI): the loss of one batch."""

    def __init__(self, target_dim, channels, layers, nheads, change, num_steps=50, time_dim=128, feature_dim=16):
        super().__init__()
        self.target_dim, self.emb_time_dim, self.num_steps, self.change = target_dim, time_dim, num_steps, change
        self.embed_layer = nn.Embedding(target_dim, feature_dim)
        self.diffmodel = GapDenoiser(num_steps, time_dim + feature_dim + 1, channels, layers, nheads)
        beta = np.linspace(0.0001**0.5, 0.5**0.5, num_steps) ** 2
        self.alpha_torch = torch.tensor(np.cumprod(1 - beta)).float().to(device).unsqueeze(1).unsqueeze(1)
        self.random = np.random.default_rng(0)
        self.time_embed = None

    def time_embedding(self, pos, d_model):
        pe = torch.zeros(pos.shape[0], pos.shape[1], d_model).to(device)
        position = pos.unsqueeze(2)
        div_term = 1 / torch.pow(10000.0, torch.arange(0, d_model, 2).to(device) / d_model)
        pe[:, :, 0::2] = torch.sin(position * div_term)
        pe[:, :, 1::2] = torch.cos(position * div_term)
        return pe

    def get_randmask(self, observed_mask):
        rand_for_mask = torch.rand_like(observed_mask) * observed_mask
        rand_for_mask = rand_for_mask.reshape(len(rand_for_mask), -1)
        if self.change == "masks_at_once":
            ratios = torch.from_numpy(self.random.random(len(observed_mask))).to(device)
            num_masked = torch.round(observed_mask.sum(dim=(1, 2)).double() * ratios)
            order = rand_for_mask.argsort(dim=1, descending=True)
            places = torch.arange(order.shape[1], device=device).expand_as(order)
            ranks = torch.empty_like(order).scatter_(1, order, places)
            return ((rand_for_mask > 0) & (ranks >= num_masked[:, None])).reshape(observed_mask.shape).float()
        for i in range(len(observed_mask)):
            sample_ratio = self.random.random()
            num_observed = observed_mask[i].sum().item()
            num_masked = round(num_observed * sample_ratio)
            rand_for_mask[i][rand_for_mask[i].topk(num_masked).indices] = -1
        return (rand_for_mask > 0).reshape(observed_mask.shape).float()

    def get_side_info(self, observed_tp, cond_mask):
        B, K, L = cond_mask.shape
        if self.change == "time_once":
            if self.time_embed is None:
                self.time_embed = self.time_embedding(observed_tp, self.emb_time_dim)
            time_embed = self.time_embed
        else:
            time_embed = self.time_embedding(observed_tp, self.emb_time_dim)
        time_embed = time_embed.unsqueeze(2).expand(-1, -1, K, -1)
        feature_embed = self.embed_layer(torch.arange(self.target_dim).to(device))
        feature_embed = feature_embed.unsqueeze(0).unsqueeze(0).expand(B, L, -1, -1)
        side_info = torch.cat([time_embed, feature_embed], dim=-1).permute(0, 3, 2, 1)
        return torch.cat([side_info, cond_mask.unsqueeze(1)], dim=1)

    def forward(self, batch):
        observed_data = batch["observed_data"].to(device).float().permute(0, 2, 1)
        observed_mask = batch["observed_mask"].to(device).float().permute(0, 2, 1)
        observed_tp = batch["timepoints"].to(device).float()
        cond_mask = self.get_randmask(observed_mask)
        side_info = self.get_side_info(observed_tp, cond_mask)
        t = torch.randint(0, self.num_steps, [len(observed_data)]).to(device)
        current_alpha = self.alpha_torch[t]
        noise = torch.randn_like(observed_data)
        noisy_data = (current_alpha**0.5) * observed_data + (1.0 - current_alpha) ** 0.5 * noise
        cond_obs = (cond_mask * observed_data).unsqueeze(1)
        noisy_target = ((1 - cond_mask) * noisy_data).unsqueeze(1)
        with bf16(self.change == "bf16"):
            predicted = self.diffmodel(torch.cat([cond_obs, noisy_target], dim=1), side_info, t).float()
        target_mask = observed_mask - cond_mask
        residual = (noise - predicted) * target_mask
        num_eval = target_mask.sum()
        return (residual**2).sum() / (num_eval if num_eval > 0 else 1)


def sensor_gaps(change):
    """Train CSDI, a diffusion model that fills the gaps in the readings of many sensors."""
    sensors, length, batch_size = size(64, 6), size(72, 8), size(16, 3)
    dataset = PatchySeries(size(6000, 60), sensors, length)
    served = 2 if change == "batch_x2" else 1
    batches = endless(DataLoader(dataset, served * batch_size, shuffle=True, drop_last=True))
    model = GapFiller(sensors, size(64, 8), size(4, 2), size(8, 2), change).to(device).train()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, weight_decay=1e-6, fused=change == "fused_adam" or None)
    avg_loss = 0

    def step():
        nonlocal avg_loss
        optimizer.zero_grad()
        loss = model(next(batches))
        loss.backward()
        avg_loss += loss.item()
        optimizer.step()
        return loss.detach()

    return step


class SymmetricProduct(torch.autograd.Function):
    """A product with a sparse symmetric matrix, whose gradient needs no transposed copy."""

    @staticmethod
    def forward(ctx, matrix, dense):
        ctx.matrix = matrix
        return torch.sparse.mm(matrix, dense)

    @staticmethod
    def backward(ctx, gradient):
        return None, torch.sparse.mm(ctx.matrix, gradient)


class LightGCN(nn.Module):
    """Embeddings of users and items that are averaged over a few steps along the graph of purchases."""

    def __init__(self, num_users, num_items, latent_dim, n_layers, graph, change):
        super().__init__()
        self.num_users, self.num_items, self.n_layers, self.change = num_users, num_items, n_layers, change
        self.embedding_user = nn.Embedding(num_users, latent_dim)
        self.embedding_item = nn.Embedding(num_items, latent_dim)
        nn.init.normal_(self.embedding_user.weight, std=0.1)
        nn.init.normal_(self.embedding_item.weight, std=0.1)
        self.graph = graph.to_sparse_csr() if change == "csr" else graph

    def computer(self):
        all_emb = torch.cat([self.embedding_user.weight, self.embedding_item.weight])
        embs = [all_emb]
        for _ in range(self.n_layers):
            if self.change == "symmetric":
                all_emb = SymmetricProduct.apply(self.graph, all_emb)
            else:
                all_emb = torch.sparse.mm(self.graph, all_emb)
            embs.append(all_emb)
        stacked = self.change != "plain_sum"
        light_out = torch.mean(torch.stack(embs, dim=1), dim=1) if stacked else sum(embs) / len(embs)
        return torch.split(light_out, [self.num_users, self.num_items])

    def bpr_loss(self, users, pos, neg):
        all_users, all_items = self.computer()
        users_emb, pos_emb, neg_emb = all_users[users], all_items[pos], all_items[neg]
        user_ego, pos_ego, neg_ego = self.embedding_user(users), self.embedding_item(pos), self.embedding_item(neg)
        reg_loss = 0.5 * (user_ego.norm(2).pow(2) + pos_ego.norm(2).pow(2) + neg_ego.norm(2).pow(2)) / len(users)
        pos_scores = torch.sum(users_emb * pos_emb, dim=1)
        neg_scores = torch.sum(users_emb * neg_emb, dim=1)
        return torch.mean(F.softplus(neg_scores - pos_scores)), reg_loss


def purchase_graph(users, items, num_users, num_items):
    """Return the symmetrically normalized adjacency of users and items as a sparse tensor."""
    first = np.concatenate([users, items + num_users])
    second = np.concatenate([items + num_users, users])
    degree = np.maximum(np.bincount(first, minlength=num_users + num_items), 1).astype(np.float64)
    values = (degree[first] * degree[second]) ** -0.5
    nodes = num_users + num_items
    indices = torch.from_numpy(np.stack([first, second]))
    return torch.sparse_coo_tensor(indices, torch.from_numpy(values).float(), (nodes, nodes)).coalesce().to(device)


def light_recommender(change):
    """Train LightGCN on a shop's purchases by a Bayesian personalized ranking loss, with the whole graph in a step."""
    num_users, num_items, batch_size = size(30000, 60), size(40000, 80), size(2048, 16)
    random = np.random.default_rng(0)
    count = size(800000, 400)
    popularity = 1 / (np.arange(num_items) + 10.0)
    popular = random.choice(num_items, count, p=popularity / popularity.sum())
    pairs = np.unique(random.integers(0, num_users, count) * num_items + random.permutation(num_items)[popular])
    users, items = pairs // num_items, pairs % num_items
    graph = purchase_graph(users, items, num_users, num_items)
    model = LightGCN(num_users, num_items, size(64, 8), 3, graph, change).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=change == "fused_adam" or None)

    def sample_epoch():
        negatives = random.integers(0, num_items, len(pairs))
        while (wrong := np.isin(users * num_items + negatives, pairs)).any():
            negatives[wrong] = random.integers(0, num_items, wrong.sum())
        order = random.permutation(len(pairs))
        return [torch.from_numpy(part[order]).long().to(device) for part in (users, items, negatives)]

    epoch, position, aver_loss = sample_epoch(), 0, 0.0

    def step():
        nonlocal epoch, position, aver_loss
        if position + batch_size > len(pairs):
            epoch, position = sample_epoch(), 0
        batch_users, batch_pos, batch_neg = (part[position : position + batch_size] for part in epoch)
        position += batch_size
        loss, reg_loss = model.bpr_loss(batch_users, batch_pos, batch_neg)
        loss = loss + 1e-4 * reg_loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        aver_loss += loss.detach() if change == "no_item" else loss.cpu().item()
        return loss.detach()

    return step


class SlimBlock(nn.Module):
    """Two convolutions with batch norm and a shortcut."""

    def __init__(self, in_planes, planes, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(in_planes, planes, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(planes)
        self.conv2 = nn.Conv2d(planes, planes, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(planes)
        self.shortcut = nn.Sequential()
        if stride != 1 or in_planes != planes:
            self.shortcut = nn.Sequential(
                nn.Conv2d(in_planes, planes, 1, stride=stride, bias=False), nn.BatchNorm2d(planes)
            )

    def forward(self, x):
        out = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(out)) + self.shortcut(x))


class SlimResNet(nn.Module):
    """A narrow ResNet-18 for small images, as is usual in continual learning."""

    def __init__(self, nf, classes, blocks):
        super().__init__()
        self.conv1 = nn.Conv2d(3, nf, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(nf)
        layers, planes = [], nf
        for number, stride in enumerate((1, 2, 2, 2)):
            for block in range(blocks):
                layers.append(SlimBlock(planes, nf * 2**number, stride if block == 0 else 1))
                planes = nf * 2**number
        self.layers = nn.Sequential(*layers)
        self.linear = nn.Linear(planes, classes)

    def forward(self, x):
        out = self.layers(F.relu(self.bn1(self.conv1(x))))
        return self.linear(out.mean(dim=(2, 3)))


class ElasticWeights:
    """What elastic weight consolidation remembers of each task: its weights, and how much each of them matters."""

    def __init__(self, model, importance, change):
        self.model, self.importance, self.change = model, importance, change
        self.fisher, self.old = [], []
        self.offset = 0.0

    def named(self):
        return [(name, parameter) for name, parameter in self.model.named_parameters() if parameter.requires_grad]

    def consolidate(self, batches):
        fisher = {name: torch.zeros_like(parameter) for name, parameter in self.named()}
        self.model.eval()
        for images, labels in batches:
            self.model.zero_grad()
            F.cross_entropy(self.model(images.to(device)), labels.to(device)).backward()
            for name, parameter in self.named():
                fisher[name] += parameter.grad.detach() ** 2 / len(batches)
        self.fisher.append(fisher)
        self.old.append({name: parameter.detach().clone() for name, parameter in self.named()})

    def prepare(self):
        if self.change == "merged_tasks":  # The sum of the tasks' parabolas is one parabola and a constant.
            total, center = {}, {}
            for name, _ in self.named():
                fisher = torch.stack([task[name] for task in self.fisher]).double()
                old = torch.stack([task[name] for task in self.old]).double()
                middle = (fisher * old).sum(0) / fisher.sum(0).clamp(min=1e-30)
                self.offset += (fisher * (old - middle) ** 2).sum().item()
                total[name], center[name] = fisher.sum(0).float(), middle.float()
            self.fisher, self.old = [total], [center]
        if self.change == "flat_penalty":
            self.fisher = [torch.cat([task[name].flatten() for name, _ in self.named()]) for task in self.fisher]
            self.old = [torch.cat([task[name].flatten() for name, _ in self.named()]) for task in self.old]
        if self.change == "foreach_gradient":
            self.fisher = [[task[name] for name, _ in self.named()] for task in self.fisher]
            self.old = [[task[name] for name, _ in self.named()] for task in self.old]

    def penalty(self):
        loss = self.offset
        if self.change == "flat_penalty":
            flat = torch.cat([parameter.flatten() for _, parameter in self.named()])
            for fisher, old in zip(self.fisher, self.old, strict=True):
                loss = loss + (fisher * (flat - old) ** 2).sum()
        else:
            for fisher, old in zip(self.fisher, self.old, strict=True):
                for name, parameter in self.model.named_parameters():
                    if parameter.requires_grad:
                        loss = loss + (fisher[name] * (parameter - old[name]) ** 2).sum()
        return self.importance / 2 * loss

    @torch.no_grad()
    def add_gradient(self):
        """Add the penalty's gradient to the parameters' gradients, and return the penalty."""
        parameters = [parameter for _, parameter in self.named()]
        gradients = [parameter.grad for parameter in parameters]
        loss = 0.0
        for fisher, old in zip(self.fisher, self.old, strict=True):
            difference = torch._foreach_sub(parameters, old)
            weighted = torch._foreach_mul(difference, fisher)
            torch._foreach_add_(gradients, weighted, alpha=self.importance)
            torch._foreach_mul_(weighted, difference)
            loss = loss + torch.stack(torch._foreach_norm(weighted, 1)).sum()
        return self.importance / 2 * loss


def lifelong_classifier(change):
    """Train a classifier on its fifth task, while elastic weight consolidation keeps what it learned from four."""
    tasks, side, classes, batch_size = size(5, 3), size(32, 16), size(100, 12), size(64, 4)
    per_task = classes // tasks
    model = SlimResNet(size(20, 4), classes, size(2, 1)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9)
    ewc = ElasticWeights(model, 100.0, change)
    random = torch.Generator().manual_seed(0)

    def data_of(task, count):
        labels = torch.randint(task * per_task, (task + 1) * per_task, (count,), generator=random)
        patterns = torch.randn(classes, 3, side, side, generator=torch.Generator().manual_seed(1))
        images = 0.5 * patterns[labels] + torch.randn(count, 3, side, side, generator=random)
        return DataLoader(TensorDataset(images, labels), batch_size, shuffle=True, drop_last=True)

    def learn_earlier_task(task):
        batches = list(data_of(task, 4 * batch_size))
        model.train()
        for images, labels in batches:
            loss = F.cross_entropy(model(images.to(device)), labels.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        ewc.consolidate(batches)

    for task in range(tasks - 1):
        learn_earlier_task(task)
    ewc.prepare()
    optimizer.state.clear()
    batches = endless(data_of(tasks - 1, size(5000, 16)))
    model.train()
    log = []

    def train(images, labels):
        with bf16(change == "bf16"):
            logits = model(images).float()
        loss = F.cross_entropy(logits, labels)
        optimizer.zero_grad()
        if change == "foreach_gradient":
            loss.backward()
            penalty = ewc.add_gradient()
        else:
            penalty = ewc.penalty()
            (loss + penalty).backward()
        optimizer.step()
        correct = (logits.argmax(1) == labels).float().mean()
        return (loss + penalty).detach(), penalty.detach(), correct

    if change == "graph":
        fixed_images = torch.zeros(batch_size, 3, side, side, device=device)
        fixed_labels = torch.zeros(batch_size, dtype=torch.long, device=device)
        replay = graphed_training(lambda: train(fixed_images, fixed_labels), [model], [optimizer])

    def step():
        images, labels = next(batches)
        if change == "graph":
            fixed_images.copy_(images)
            fixed_labels.copy_(labels)
            loss, penalty, correct = replay()
        else:
            loss, penalty, correct = train(images.to(device), labels.to(device))
        log.append((loss.item(), penalty.item(), correct.item()))
        return loss

    return step


class NoisyCalls(Dataset):
    """Random pieces of clean speech and of noise, with a random loudness of the noise."""

    def __init__(self, seconds, rate, length):
        random = np.random.default_rng(0)
        time = np.arange(seconds * rate) / rate
        pitch = 120 + 40 * np.sin(2 * np.pi * 0.7 * time)
        voice = sum(np.sin(2 * np.pi * k * np.cumsum(pitch) / rate) / k for k in range(1, 6))
        self.clean = (0.1 * voice * (np.sin(2 * np.pi * 2.3 * time) > -0.3)).astype(np.float32)
        self.noise = (0.1 * random.standard_normal(seconds * rate)).astype(np.float32)
        self.random, self.length = random, length

    def __len__(self):
        return 20 * len(self.clean) // self.length

    def __getitem__(self, index):
        start = self.random.integers(0, len(self.clean) - self.length)
        clean = self.clean[start : start + self.length]
        start = self.random.integers(0, len(self.noise) - self.length)
        noise = self.noise[start : start + self.length]
        snr = self.random.uniform(0, 15)
        scale = np.sqrt(np.mean(clean**2) / (np.mean(noise**2) * 10 ** (snr / 10) + 1e-8))
        noise = (scale * noise).astype(np.float32)
        return torch.from_numpy(noise)[None], torch.from_numpy(clean)[None]


class Constants:
    """Where windows and filters come from: made anew on each call, or kept on the device."""

    def __init__(self, keep):
        self.keep, self.kept = keep, {}

    def get(self, make, number, like):
        if not self.keep:
            return make(number).to(like.device)
        if (make, number) not in self.kept:
            self.kept[make, number] = make(number).to(like.device)
        return self.kept[make, number]


def sinc_kernel(zeros):
    window = torch.hann_window(4 * zeros + 1, periodic=False)[1::2]
    t = torch.linspace(-zeros + 0.5, zeros - 0.5, 2 * zeros) * math.pi
    return (torch.sin(t) / t * window).view(1, 1, -1)


class WaveDenoiser(nn.Module):
    """Demucs on the waveform: strided convolutions, an LSTM, and transposed convolutions with skips."""

    def __init__(self, hidden, depth, constants, kernel_size=8, stride=4, resample=4, zeros=56):
        super().__init__()
        self.depth, self.kernel_size, self.stride, self.resample = depth, kernel_size, stride, resample
        self.constants, self.zeros = constants, zeros
        self.encoder, self.decoder = nn.ModuleList(), nn.ModuleList()
        chin = chout = 1
        for index in range(depth):
            self.encoder.append(
                nn.Sequential(
                    nn.Conv1d(chin, hidden, kernel_size, stride),
                    nn.ReLU(),
                    nn.Conv1d(hidden, hidden * 2, 1),
                    nn.GLU(1),
                )
            )
            decode = [
                nn.Conv1d(hidden, 2 * hidden, 1), nn.GLU(1),
                nn.ConvTranspose1d(hidden, chout, kernel_size, stride),
            ]  # fmt: skip
            if index > 0:
                decode.append(nn.ReLU())
            self.decoder.insert(0, nn.Sequential(*decode))
            chout = chin = hidden
            hidden = 2 * hidden
        self.lstm = nn.LSTM(chin, chin, num_layers=2)
        for layer in self.modules():
            if isinstance(layer, nn.Conv1d | nn.ConvTranspose1d):
                scale = (layer.weight.detach().std() / 0.1) ** 0.5
                layer.weight.data /= scale
                layer.bias.data /= scale

    def valid_length(self, length):
        length = math.ceil(length * self.resample)
        for _ in range(self.depth):
            length = max(math.ceil((length - self.kernel_size) / self.stride) + 1, 1)
        for _ in range(self.depth):
            length = (length - 1) * self.stride + self.kernel_size
        return math.ceil(length / self.resample)

    def upsample2(self, x):
        *other, time = x.shape
        kernel = self.constants.get(sinc_kernel, self.zeros, x)
        out = F.conv1d(x.reshape(-1, 1, time), kernel, padding=self.zeros)[..., 1:].view(*other, time)
        return torch.stack([x, out], dim=-1).view(*other, -1)

    def downsample2(self, x):
        if x.shape[-1] % 2 != 0:
            x = F.pad(x, (0, 1))
        even, odd = x[..., ::2], x[..., 1::2]
        *other, time = odd.shape
        kernel = self.constants.get(sinc_kernel, self.zeros, x)
        out = even + F.conv1d(odd.reshape(-1, 1, time), kernel, padding=self.zeros)[..., :-1].view(*other, time)
        return out.mul(0.5)

    def forward(self, mix):
        std = mix.std(dim=-1, keepdim=True) + 1e-3
        length = mix.shape[-1]
        x = F.pad(mix / std, (0, self.valid_length(length) - length))
        x = self.upsample2(self.upsample2(x))
        skips = []
        for encode in self.encoder:
            x = encode(x)
            skips.append(x)
        x = self.lstm(x.permute(2, 0, 1))[0].permute(1, 2, 0)
        for decode in self.decoder:
            skip = skips.pop()
            x = decode(x + skip[..., : x.shape[-1]])
        x = self.downsample2(self.downsample2(x))
        return std * x[..., :length]


class MultiResolutionSTFTLoss(nn.Module):
    """The mean over several resolutions of the spectral convergence and of the distance of logarithms."""

    def __init__(self, resolutions, constants, factor=0.5):
        super().__init__()
        self.resolutions, self.constants, self.factor = resolutions, constants, factor

    def stft(self, x, fft_size, hop_size, win_length):
        window = self.constants.get(torch.hann_window, win_length, x)
        spectrum = torch.stft(x, fft_size, hop_size, win_length, window, return_complex=True)
        return torch.sqrt(torch.clamp(spectrum.real**2 + spectrum.imag**2, min=1e-7)).transpose(2, 1)

    def forward(self, x, y):
        sc_loss, mag_loss = 0.0, 0.0
        for resolution in self.resolutions:
            x_mag, y_mag = self.stft(x, *resolution), self.stft(y, *resolution)
            sc_loss += torch.norm(y_mag - x_mag, p="fro") / torch.norm(y_mag, p="fro")
            mag_loss += F.l1_loss(torch.log(y_mag), torch.log(x_mag))
        return self.factor * (sc_loss + mag_loss) / len(self.resolutions)


def noisy_calls(change):
    """Train a waveform denoiser for phone calls with a loss on the samples and on spectra of three resolutions."""
    rate, batch_size = size(16000, 800), size(16, 2)
    length = 2 * rate
    dataset = NoisyCalls(60, rate, length)
    pinned = change == "pinned" and device.type == "cuda"
    loader = DataLoader(dataset, batch_size, shuffle=True, drop_last=True, pin_memory=pinned)
    batches = endless(loader)
    constants = Constants(keep=change == "constants_once")
    if change == "cudnn_benchmark":
        torch.backends.cudnn.benchmark = True
    model = WaveDenoiser(size(48, 4), size(5, 3), constants).to(device).train()
    resolutions = [(size(n, n // 8), size(hop, hop // 8), size(win, win // 8))
                   for n, hop, win in ((1024, 120, 600), (2048, 240, 1200), (512, 50, 240))]  # fmt: skip
    mrstft = MultiResolutionSTFTLoss(resolutions, constants).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-4, betas=(0.9, 0.999), fused=change == "fused_adam" or None)
    losses = []

    def remix(noise, clean):
        order = torch.argsort(torch.rand(len(noise), device=device), dim=0)
        return noise[order], clean

    def step():
        noise, clean = (part.to(device, non_blocking=pinned) for part in next(batches))
        noise, clean = remix(noise, clean)
        with bf16(change == "bf16"):
            estimate = model(noise + clean).float()
        loss = F.l1_loss(estimate, clean) + mrstft(estimate.squeeze(1), clean.squeeze(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        return loss.detach()

    return step


PROGRAMS = {
    sentence_trees: {
        "levels": "larger_batch",
        "words_first": "loop_inputs",
        "one_backward": "",
        "no_item": "remove_sync",
    },
    driving_depth: {
        "augment_on_gpu": "data_loader",
        "refs_together": "larger_batch",
        "bf16": "half_precision",
        "no_nan_check": "remove_sync",
        "cached_grids": "compute_once",
    },
    tour_planner: {
        "no_checks": "remove_sync",
        "exponential_draw": "",
        "graph": "cuda_graph",
        "sdpa": "fused_attention",
        "bf16": "half_precision",
    },
    sensor_gaps: {
        "masks_at_once": "remove_sync",
        "bf16": "half_precision",
        "fused_adam": "fused_optimizer",
        "time_once": "compute_once",
        "batch_x2": ("double_batch", 2),
    },
    light_recommender: {
        "symmetric": "",
        "csr": "",
        "fused_adam": "fused_optimizer",
        "plain_sum": "",
        "no_item": "remove_sync",
    },
    lifelong_classifier: {
        "flat_penalty": "larger_batch",
        "merged_tasks": "",
        "foreach_gradient": "",
        "graph": "cuda_graph",
        "bf16": "half_precision",
    },
    noisy_calls: {
        "bf16": "half_precision",
        "constants_once": "compute_once",
        "cudnn_benchmark": "",
        "fused_adam": "fused_optimizer",
        "pinned": "overlap_copies",
    },
}
