"""Programs in which several of one kind take turns: texts, tasks, and the columns of a table."""

import copy

import torch
import torch.nn as nn
import torch.nn.functional as F
from setting import device, gathered, graphed, size


class Block(nn.Module):
    """A layer of GPT-2."""

    def __init__(self, wide, heads):
        super().__init__()
        self.first, self.second, self.heads = nn.LayerNorm(wide), nn.LayerNorm(wide), heads
        self.three, self.out = nn.Linear(wide, 3 * wide), nn.Linear(wide, wide)
        self.up, self.down = nn.Linear(wide, 4 * wide), nn.Linear(4 * wide, wide)

    def forward(self, x, keep):
        query, key, value = (
            one.unflatten(-1, (self.heads, -1)).transpose(1, 2) for one in self.three(self.first(x)).chunk(3, -1)
        )
        key, value, mask = keep(key, value)
        found = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        x = x + self.out(found.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.second(x)), approximate="tanh"))


def story_writers(change):
    """Five stories are written at the same time, one word of each after the other, and each has a cache of its own."""
    words, wide, heads, layers, room = size(30000, 50), size(768, 16), size(12, 2), size(8, 2), size(320, 40)
    stories = size(5, 3)
    word, place = nn.Embedding(words, wide).to(device), nn.Embedding(room, wide).to(device)
    blocks = nn.ModuleList(Block(wide, heads) for _ in range(layers)).to(device)
    last, head = nn.LayerNorm(wide).to(device), nn.Linear(wide, words, bias=False).to(device)
    lengths = [room // 8 + room // 16 * number for number in range(stories)]
    begun = [
        [tuple(torch.randn(1, heads, length, wide // heads, device=device) for _ in range(2)) for _ in blocks]
        for length in lengths
    ]
    told = [list(range(1, length + 1)) for length in lengths]
    caches = [list(cache) for cache in begun]
    fixed = [[torch.zeros(stories, heads, room, wide // heads, device=device) for _ in range(2)] for _ in blocks]
    for number, cache in enumerate(begun):
        for layer, pair in zip(fixed, cache, strict=True):
            for whole, part in zip(layer, pair, strict=True):
                whole[number, :, : part.shape[2]] = part[0]
    rows, places = torch.arange(stories, device=device), torch.arange(room, device=device)

    def growing(cache, layer):
        def keep(key, value):
            cache[layer] = tuple(torch.cat(pair, 2) for pair in zip(cache[layer], (key, value), strict=True))
            return *cache[layer], None

        return keep

    def of_all(layer, now):
        def keep(key, value):
            for whole, part in zip(fixed[layer], (key, value), strict=True):
                whole[rows, :, now] = part[:, :, 0]
            return *fixed[layer], (places <= now[:, None])[:, None, None]

        return keep

    def next_words(tokens, now, keeps):
        x = word(tokens) + place(now)
        for block, keep in zip(blocks, keeps, strict=True):
            x = block(x, keep)
        return head(last(x[:, -1])).argmax(-1)

    @torch.no_grad()
    def step():
        if len(told[-1]) + 1 >= room:  # the stories begin again
            for number, cache in enumerate(begun):
                caches[number], told[number] = list(cache), told[number][: lengths[number]]
        if change == "together":
            now = torch.tensor([len(one) for one in told], device=device)
            tokens = torch.tensor([one[-1:] for one in told], device=device)
            found = next_words(tokens, now[:, None], [of_all(layer, now) for layer in range(layers)]).tolist()
        else:
            found = []
            for one, cache in zip(told, caches, strict=True):
                tokens, now = (torch.tensor([[value]], device=device) for value in (one[-1], len(one)))
                found.append(next_words(tokens, now, [growing(cache, layer) for layer in range(layers)]).item())
        for one, token in zip(told, found, strict=True):
            one.append(token)
        return torch.tensor(float(sum(found)))

    return step


def curves_of_tasks(change):
    """A network learns to learn, as in Reptile: copies of it fit six curves, and it moves toward their mean."""
    tasks, points, wide, inner = size(6, 3), size(64, 8), size(256, 8), 4
    network = nn.Sequential(
        nn.Linear(1, wide), nn.Tanh(), nn.Linear(wide, wide), nn.Tanh(), nn.Linear(wide, wide), nn.Tanh(),
        nn.Linear(wide, 1),
    ).to(device)  # fmt: skip
    x = torch.rand(tasks, points, 1, device=device) * 10 - 5
    heights, shifts = torch.rand(2, tasks, 1, 1, device=device)
    y = heights * torch.sin(x + shifts)

    def of_one(weights, x, y):
        return F.mse_loss(torch.func.functional_call(network, weights, x), y)

    gradients = torch.func.vmap(torch.func.grad(of_one))

    def step():
        if change == "at_once":
            weights = {name: one.detach().expand(tasks, *one.shape) for name, one in network.named_parameters()}
            for _ in range(inner):
                slopes = gradients(weights, x, y)
                weights = {name: one - 0.02 * slopes[name] for name, one in weights.items()}
            means = [one.mean(0) for one in weights.values()]
        else:
            fits = []
            for task in range(tasks):
                fit = copy.deepcopy(network)
                optimizer = torch.optim.SGD(fit.parameters(), lr=0.02)
                for _ in range(inner):
                    optimizer.zero_grad()
                    F.mse_loss(fit(x[task]), y[task]).backward()
                    optimizer.step()
                fits.append([one.detach() for one in fit.parameters()])
            means = [torch.stack(some).mean(0) for some in zip(*fits, strict=True)]
        with torch.no_grad():
            for one, mean in zip(network.parameters(), means, strict=True):
                one.lerp_(mean, 0.1)
            return F.mse_loss(network(x), y)

    return graphed(step) if change == "graph" else step


def guest_profiles(change):
    """A hotel predicts what a guest books from fourteen columns of a few codes each, whose embeddings it averages."""
    columns, guests, codes, many, wide = size(14, 4), size(2048, 8), 3, size(5000, 20), size(32, 4)
    one_table = change == "one_table"
    tables = nn.ModuleList(
        [nn.Embedding(columns * many, wide)] if one_table else [nn.Embedding(many, wide) for _ in range(columns)]
    ).to(device)
    if change == "index_select":
        gathered(tables)
    with torch.no_grad():
        for table in tables:
            table.weight.normal_(0, 0.1)
    head = nn.Sequential(
        nn.Linear(columns * wide, size(256, 8)), nn.ReLU(), nn.Dropout(0.0), nn.Linear(size(256, 8), 3)
    ).to(device)
    optimizer = torch.optim.Adam([*tables.parameters(), *head.parameters()], fused=change == "fused" or None)
    seen = [torch.randint(0, many, (guests, codes), device=device) for _ in range(columns)]
    booked = torch.randint(0, 3, (guests,), device=device)
    first_rows = many * torch.arange(columns, device=device)[:, None, None]

    def step():
        if one_table:
            x = tables[0](torch.stack(seen) + first_rows).mean(2).transpose(0, 1).flatten(1)
        else:
            x = torch.cat([table(some).mean(1) for table, some in zip(tables, seen, strict=True)], 1)
        loss = F.cross_entropy(head(x), booked)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


PROGRAMS = {
    story_writers: {"together": "larger_batch"},
    curves_of_tasks: {"at_once": "larger_batch", "graph": "cuda_graph"},
    guest_profiles: {"index_select": "index_select", "one_table": "larger_batch", "fused": "fused_optimizer"},
}
