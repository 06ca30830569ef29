"""Programs that launch small work again and again, or compute more than they use."""

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from setting import device, gathered, size


def _overlaps(boxes, others):
    """Return the intersection over union of each box with each other one, of the last but one dimensions."""
    low = torch.maximum(boxes[..., :, None, :2], others[..., None, :, :2])
    high = torch.minimum(boxes[..., :, None, 2:], others[..., None, :, 2:])
    shared = (high - low).clamp(min=0).prod(-1)
    areas = [(one[..., 2:] - one[..., :2]).prod(-1) for one in (boxes, others)]
    return shared / (areas[0][..., :, None] + areas[1][..., None, :] - shared + 1e-6)


def detection_loss(change):
    """A detector's head is trained with a loss that is computed image by image, as many repositories do."""
    images, anchors, classes, most = size(12, 4), size(2000, 50), 20, 12
    chooser = torch.Generator().manual_seed(1)

    def boxes(*shape):
        corner = torch.rand(*shape, 2, generator=chooser)
        return torch.cat([corner, corner + 0.3 * torch.rand(*shape, 2, generator=chooser)], -1).to(device)

    fixed, truth = boxes(anchors), boxes(images, most)
    counts = torch.randint(3, most + 1, (images,), generator=chooser).tolist()
    kinds = torch.randint(0, classes, (images, most), generator=chooser).to(device)
    present = (torch.arange(most)[None] < torch.tensor(counts)[:, None]).to(device)
    features = torch.randn(images, anchors, 64, device=device)
    head = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4 + classes)).to(device)
    optimizer = torch.optim.SGD(head.parameters(), lr=0.01, foreach=True)

    def of_one_image(found, place):
        some, labels = truth[place, : counts[place]], kinds[place, : counts[place]]
        best, which = _overlaps(fixed, some).max(1)
        positive = best > 0.3
        wanted = F.one_hot(labels[which], classes).float() * positive[:, None]
        of_classes = F.binary_cross_entropy_with_logits(found[:, 4:], wanted, reduction="sum")
        of_places = F.smooth_l1_loss(found[positive, :4], (some[which] - fixed)[positive], reduction="sum")
        return (of_classes + of_places) / positive.sum().clamp(min=1)

    def of_all(found):
        best, which = _overlaps(fixed, truth).masked_fill(~present[:, None], -1.0).max(2)
        positive = (best > 0.3).float()
        wanted = F.one_hot(kinds.gather(1, which), classes).float() * positive[..., None]
        of_classes = F.binary_cross_entropy_with_logits(found[..., 4:], wanted, reduction="none").sum((1, 2))
        chosen = truth.gather(1, which[..., None].expand(-1, -1, 4)) - fixed
        of_places = (F.smooth_l1_loss(found[..., :4], chosen, reduction="none") * positive[..., None]).sum((1, 2))
        return ((of_classes + of_places) / positive.sum(1).clamp(min=1)).mean()

    def step():
        found = head(features)
        if change == "at_once":
            loss = of_all(found)
        else:
            loss = sum(of_one_image(found[place], place) for place in range(images)) / images
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return step


def acting_agent(change):
    """An agent's network chooses an action for one environment after the other, and reads each."""
    here = torch.device("cpu") if change == "on_cpu" else device
    environments = size(20, 4)
    policy = nn.Sequential(nn.Linear(24, 128), nn.Tanh(), nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, 6)).to(here)
    states = np.random.default_rng(0).standard_normal((environments, 24)).astype(np.float32)
    moves = np.random.default_rng(1).standard_normal((6, 24)).astype(np.float32)

    @torch.no_grad()
    def step():
        if change == "at_once":
            logits = policy(torch.from_numpy(states).to(here))
            actions = torch.distributions.Categorical(logits=logits).sample().cpu().numpy()
            states[:] = 0.9 * states + 0.1 * moves[actions]
            return logits.mean()
        for place in range(environments):
            logits = policy(torch.from_numpy(states[place]).to(here))
            action = torch.distributions.Categorical(logits=logits).sample().item()
            states[place] = 0.9 * states[place] + 0.1 * moves[action]
        return logits.mean()

    return step


class _Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x, **how):
        q, k, v = (
            one.view(*x.shape[:2], self.heads, -1).transpose(1, 2) for one in self.qkv(self.norm(x)).chunk(3, -1)
        )
        attended = F.scaled_dot_product_attention(q, k, v, **how)
        x = x + self.out(attended.transpose(1, 2).reshape(x.shape))
        return x + self.mlp(x)


def _trained(blocks, x, how):
    """Return a step that trains these blocks in bf16. how: what their attention is given."""
    optimizer = torch.optim.AdamW(blocks.parameters(), lr=1e-4, fused=True)

    def step():
        y = x
        for block in blocks:
            y = block(y, **how)
        loss = y.float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def masked_decoder(change):
    """A decoder is trained in bf16 with a causal mask that is a tensor of numbers."""
    length, width = size(2048, 32), size(1024, 64)
    blocks = nn.ModuleList(_Block(width, size(16, 4)) for _ in range(size(6, 1))).to(device, torch.bfloat16)
    x = torch.randn(size(4, 1), length, width, device=device, dtype=torch.bfloat16)
    mask = torch.full((length, length), float("-inf"), device=device, dtype=torch.bfloat16).triu(1)
    return _trained(blocks, x, {"is_causal": True} if change == "is_causal" else {"attn_mask": mask})


def padded_encoder(change):
    """An encoder reads texts of unequal lengths, with a mask of booleans for each text, in bf16."""
    length, width, texts = size(1024, 32), size(768, 64), size(16, 2)
    blocks = nn.ModuleList(_Block(width, size(12, 4)) for _ in range(size(8, 1))).to(device, torch.bfloat16).eval()
    x = torch.randn(texts, length, width, device=device, dtype=torch.bfloat16)
    chooser = torch.Generator().manual_seed(1)
    lengths = torch.randint(length // 2, length + 1, (texts,), generator=chooser)
    mask = (torch.arange(length)[None] < lengths[:, None])[:, None, None].to(device)
    rows = mask.expand(-1, 1, length, -1).contiguous()

    @torch.no_grad()
    def step():
        y = x
        for block in blocks:
            y = block(y) if change == "no_mask" else block(y, attn_mask=rows)
        return y

    return step


def nucleus_sampling(change):
    """The next token is drawn from the most probable ones, which a sort of the whole vocabulary finds."""
    words, width, texts = size(128_256, 500), size(2048, 32), size(32, 2)
    head = nn.Linear(width, words, bias=False).to(device, torch.bfloat16)
    x = torch.randn(texts, width, device=device, dtype=torch.bfloat16) * 3

    @torch.no_grad()
    def step():
        logits = head(x).float() / 0.7
        if change == "topk":
            ordered, places = logits.topk(min(256, words), dim=-1)
        else:
            ordered, places = logits.sort(dim=-1, descending=True)
        shares = ordered.softmax(-1)
        shares = shares.masked_fill(shares.cumsum(-1) - shares > 0.9, 0.0)
        drawn = torch.multinomial(shares, 1)
        return places.gather(-1, drawn)

    return step


def item_embeddings(change):
    """A recommender learns large tables of embeddings, whose gradients are dense."""
    items, width, samples = size(2_000_000, 1000), 64, size(4096, 8)
    sparse = change == "sparse"
    tables = nn.ModuleList(nn.Embedding(items, width, sparse=sparse) for _ in range(2)).to(device)
    head = nn.Sequential(nn.Linear(2 * width, 256), nn.ReLU(), nn.Linear(256, 1)).to(device)
    if sparse:
        optimizers = [torch.optim.SparseAdam(tables.parameters()), torch.optim.Adam(head.parameters())]
    else:
        fused = change == "fused" or None
        optimizers = [torch.optim.Adam([*tables.parameters(), *head.parameters()], fused=fused)]
    chosen = torch.randint(items, (2, samples), device=device)
    wanted = torch.rand(samples, device=device)

    def step():
        found = head(torch.cat([table(some) for table, some in zip(tables, chosen, strict=True)], -1)).squeeze(-1)
        loss = F.binary_cross_entropy_with_logits(found, wanted)
        for one in optimizers:
            one.zero_grad()
        loss.backward()
        for one in optimizers:
            one.step()
        return loss

    return step


def loop_optimizer(change):
    """A transformer is trained with an optimizer that is written as a loop over the parameters."""
    width = size(256, 32)
    blocks = nn.ModuleList(_Block(width, 4) for _ in range(size(6, 2))).to(device)
    parameters = list(blocks.parameters())
    averages = [torch.zeros_like(one) for one in parameters]
    x = torch.randn(size(16, 2), size(64, 8), width, device=device)

    @torch.no_grad()
    def update():
        if change == "foreach":
            gradients = [one.grad for one in parameters]
            signs = torch._foreach_mul(averages, 0.9)
            torch._foreach_add_(signs, gradients, alpha=0.1)
            torch._foreach_sign_(signs)
            torch._foreach_mul_(parameters, 1 - 1e-5)
            torch._foreach_add_(parameters, signs, alpha=-1e-4)
            torch._foreach_mul_(averages, 0.99)
            torch._foreach_add_(averages, gradients, alpha=0.01)
            return
        for one, average in zip(parameters, averages, strict=True):
            one.mul_(1 - 1e-5)
            one.add_((average * 0.9).add(one.grad, alpha=0.1).sign_(), alpha=-1e-4)
            average.mul_(0.99).add_(one.grad, alpha=0.01)

    def step():
        y = x
        for block in blocks:
            y = block(y, is_causal=True)
        loss = y.square().mean()
        loss.backward()
        update()
        for one in parameters:
            one.grad = None
        return loss

    return step


def clip_tagger(change):
    """A network scores clips of a video one by one. The label of each is read before the next one starts."""
    network = nn.Sequential(
        nn.Conv3d(3, 32, (3, 7, 7), (1, 2, 2), (1, 3, 3)), nn.ReLU(), nn.Conv3d(32, 64, 3, 2, 1), nn.ReLU(),
        nn.Conv3d(64, 128, 3, 2, 1), nn.ReLU(), nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(128, 50),
    ).to(device).eval()  # fmt: skip
    clips = [torch.randn(1, 3, size(8, 4), size(112, 16), size(112, 16)).pin_memory()
             if device.type == "cuda" else torch.randn(1, 3, 4, 16, 16) for _ in range(size(16, 2))]  # fmt: skip

    @torch.no_grad()
    def step():
        found = []
        for clip in clips:
            scores = network(clip.to(device, non_blocking=True)).softmax(-1)
            found.append(scores.argmax(-1) if change == "read_later" else scores.argmax(-1).item())
        return torch.cat(found).float() if change == "read_later" else torch.tensor(found).float()

    return step


def pooled_texts(change):
    """Each text's tokens are averaged in a loop over the batch, and its best three are kept, before a small head."""
    texts, length, width = size(48, 4), size(512, 16), size(384, 32)
    chooser = torch.Generator().manual_seed(1)
    lengths = torch.randint(length // 2, length + 1, (texts,), generator=chooser)
    counts, x = lengths.tolist(), torch.randn(texts, length, width, device=device)
    present = (torch.arange(length)[None] < lengths[:, None]).to(device)
    score, head = nn.Linear(width, 1).to(device), nn.Linear(4 * width, 8).to(device)

    @torch.no_grad()
    def step():
        if change == "at_once":
            mean = (x * present[..., None]).sum(1) / present.sum(1, keepdim=True)
            best = score(x).squeeze(-1).masked_fill(~present, float("-inf")).topk(3, dim=1).indices
            kept = x.gather(1, best[..., None].expand(-1, -1, width)).flatten(1)
            return head(torch.cat([mean, kept], -1))
        rows = []
        for place in range(texts):
            one = x[place, : counts[place]]
            best = score(one).squeeze(-1).topk(3).indices
            rows.append(torch.cat([one.mean(0), one[best].flatten()]))
        return head(torch.stack(rows))

    return step


def expert_layers(change):
    """A layer sends each token to one of sixteen small experts, in a loop over the experts."""
    experts, tokens, width = size(16, 4), size(2048, 32), 256
    gate = nn.Linear(width, experts).to(device)
    first = nn.Parameter(torch.randn(experts, width, 2 * width, device=device) / 16)
    second = nn.Parameter(torch.randn(experts, 2 * width, width, device=device) / 23)
    optimizer = torch.optim.SGD([*gate.parameters(), first, second], lr=0.01, foreach=True)
    x = torch.randn(tokens, width, device=device)

    def step():
        shares, chosen = gate(x).softmax(-1).max(-1)
        if change == "at_once":
            of_all = torch.bmm(F.gelu(torch.bmm(x.expand(experts, -1, -1), first)), second)
            y = of_all[chosen, torch.arange(tokens, device=device)] * shares[:, None]
        else:
            y = torch.zeros_like(x)
            for number in range(experts):
                places = (chosen == number).nonzero().squeeze(-1)
                found = F.gelu(x[places] @ first[number]) @ second[number]
                share = shares.index_select(0, places)[:, None] if change == "index_select" else shares[places, None]
                y = y.index_add(0, places, found * share)
        loss = (y - x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return step


def image_patches(change):
    """A network looks at the patches of a large image one after the other."""
    network = nn.Sequential(
        nn.Conv2d(3, 32, 3, 2, 1), nn.ReLU(), nn.Conv2d(32, 64, 3, 2, 1), nn.ReLU(), nn.Conv2d(64, 64, 3, 2, 1),
        nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10),
    ).to(device).eval()  # fmt: skip
    patches = torch.randn(size(36, 4), 3, size(128, 16), size(128, 16), device=device)

    @torch.no_grad()
    def step():
        if change == "at_once":
            return network(patches).softmax(-1)
        return torch.cat([network(patch.unsqueeze(0)).softmax(-1) for patch in patches])

    return step


def word_vectors(change):
    """Word vectors are learned by skip-grams with negative samples and plain SGD."""
    words, width, pairs = size(1_000_000, 500), 128, size(2048, 16)
    sparse = change == "sparse"
    here, there = (nn.Embedding(words, width, sparse=sparse).to(device) for _ in range(2))
    if change == "index_select":
        gathered(here, there)
    parameters = [*here.parameters(), *there.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.05, fused=True if change == "fused" else None)
    centers = torch.randint(words, (pairs,), device=device)
    others = torch.randint(words, (pairs, 6), device=device)
    wanted = torch.zeros(pairs, 6, device=device)
    wanted[:, 0] = 1

    def step():
        scores = torch.bmm(there(others), here(centers)[..., None]).squeeze(-1)
        loss = F.binary_cross_entropy_with_logits(scores, wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return step


def ranked_items(change):
    """Each user gets the twenty items with the largest scores, out of 200,000 that are sorted."""
    users, items, width = size(64, 4), size(200_000, 300), 128
    all_users, all_items = torch.randn(users, width, device=device), torch.randn(items, width, device=device)
    seen = torch.rand(users, items, device=device) < 0.01

    @torch.no_grad()
    def step():
        scores = (all_users @ all_items.t()).masked_fill(seen, float("-inf"))
        if change == "topk":
            return scores.topk(20, dim=-1).values
        return scores.sort(dim=-1, descending=True).values[:, :20]

    return step


def top_p_filter(change):
    """A filter keeps the most probable tokens, by a sort of the vocabulary that it scatters back."""
    words, width, texts = size(50_257, 400), size(1280, 32), size(8, 2)
    head = nn.Linear(width, words, bias=False).to(device, torch.float16)
    x = torch.randn(texts, width, device=device, dtype=torch.float16) * 3

    @torch.no_grad()
    def step():
        logits = head(x).float()
        if change == "topk":
            kept, places = logits.topk(min(200, words), dim=-1)
            shares = kept.softmax(-1)
            kept = kept.masked_fill(shares.cumsum(-1) - shares > 0.95, float("-inf"))
            return places.gather(-1, torch.multinomial(kept.softmax(-1), 1))
        ordered, places = logits.sort(dim=-1, descending=False)
        removed = ordered.softmax(-1).cumsum(-1) <= 0.05
        removed = removed.scatter(-1, places, removed)
        return torch.multinomial(logits.masked_fill(removed, float("-inf")).softmax(-1), 1)

    return step


def windowed_texts(change):
    """A model of long texts attends to a window before each token, with a mask of booleans in bf16."""
    length, width = size(4096, 32), size(768, 64)
    blocks = nn.ModuleList(_Block(width, size(12, 4)) for _ in range(size(6, 1))).to(device, torch.bfloat16)
    x = torch.randn(size(2, 1), length, width, device=device, dtype=torch.bfloat16)
    places = torch.arange(length, device=device)
    ahead = places[:, None] - places[None]
    mask = (ahead >= 0) & (ahead < size(512, 8))
    return _trained(blocks, x, {"is_causal": True} if change == "is_causal" else {"attn_mask": mask})


PROGRAMS = {
    detection_loss: {"at_once": "larger_batch"},
    acting_agent: {"at_once": "larger_batch", "on_cpu": ""},
    masked_decoder: {"is_causal": "no_mask_tensor"},
    padded_encoder: {"no_mask": "no_mask_tensor"},
    nucleus_sampling: {"topk": "largest_first"},
    item_embeddings: {"sparse": "sparse_gradients", "fused": "fused_optimizer"},
    loop_optimizer: {"foreach": "update_graph"},
    clip_tagger: {"read_later": "remove_sync"},
    pooled_texts: {"at_once": "larger_batch"},
    expert_layers: {"at_once": "larger_batch", "index_select": "index_select"},
    image_patches: {"at_once": "larger_batch"},
    word_vectors: {"index_select": "index_select", "sparse": "sparse_gradients", "fused": "fused_optimizer"},
    ranked_items: {"topk": "largest_first"},
    top_p_filter: {"topk": "largest_first"},
    windowed_texts: {"is_causal": "no_mask_tensor"},
}
