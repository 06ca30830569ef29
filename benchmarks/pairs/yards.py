"""Programs of several fields as their users write them: retrieval, language models, automata, sound and traffic."""

import math

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from setting import bf16, compiled, device, endless, graphed, graphed_training, size
from torch.distributions import Categorical
from torch.utils.data import DataLoader, Dataset


class TripleDataset(Dataset):
    """Queries with one relevant passage and hard negatives, as lists of token numbers."""

    def __init__(self, count, negatives, vocabulary, query_length, longest):
        rng = np.random.default_rng(0)
        self.items = []
        for _ in range(count):
            query = rng.integers(10, vocabulary, query_length)
            lengths = np.clip(rng.lognormal(math.log(longest / 3), 0.35, 1 + negatives), 8, longest).astype(int)
            passages = [rng.integers(10, vocabulary, length) for length in lengths]
            shared = min(len(passages[0]), query_length) // 2
            passages[0][:shared] = query[:shared]
            self.items.append((query, passages))

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        return self.items[index]


class BertLayer(nn.Module):
    """A post-norm transformer layer with attention written out."""

    def __init__(self, width, heads, dropout, use_sdpa):
        super().__init__()
        self.heads, self.use_sdpa = heads, use_sdpa
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.output = nn.Linear(width, width)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x, mask):
        batch, length, width = x.shape
        q, k, v = (
            layer(x).view(batch, length, self.heads, -1).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        if self.use_sdpa:
            dropout = self.dropout.p if self.training else 0.0
            context = F.scaled_dot_product_attention(q, k, v, mask[:, None, None, :], dropout_p=dropout)
        else:
            scores = q @ k.transpose(-1, -2) / math.sqrt(width // self.heads)
            scores = scores + (1.0 - mask[:, None, None, :].float()) * -10000.0
            context = self.dropout(torch.softmax(scores, dim=-1)) @ v
        context = context.transpose(1, 2).reshape(batch, length, width)
        x = self.norm1(x + self.dropout(self.output(context)))
        return self.norm2(x + self.dropout(self.down(F.gelu(self.up(x)))))


class LateEncoder(nn.Module):
    """A small BERT with a projection to normalized token embeddings."""

    def __init__(self, vocabulary, width, layers, heads, out, use_sdpa):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(512, width)
        self.norm = nn.LayerNorm(width)
        self.layers = nn.ModuleList(BertLayer(width, heads, 0.1, use_sdpa) for _ in range(layers))
        self.project = nn.Linear(width, out, bias=False)

    def forward(self, ids, mask):
        x = self.norm(self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device)))
        for layer in self.layers:
            x = layer(x, mask)
        return F.normalize(self.project(x), dim=-1) * mask.unsqueeze(-1)


def late_interaction(change):
    """Train a ColBERT-like retriever with in-batch and hard negatives."""
    vocabulary, query_length, longest = size(30522, 200), size(32, 6), size(220, 20)
    batch_size, negatives = size(32, 4), 3
    data = TripleDataset(batch_size * size(24, 3), negatives, vocabulary, query_length, int(longest * 0.8))

    def collate(items):
        queries = torch.stack([torch.from_numpy(query) for query, _ in items])
        passages = [passage for _, group in items for passage in group]
        length = longest
        if change == "pad_to_longest":
            length = -(-max(len(passage) for passage in passages) // 8) * 8
        ids = torch.zeros(len(passages), length, dtype=torch.long)
        mask = torch.zeros(len(passages), length, dtype=torch.bool)
        for row, passage in enumerate(passages):
            ids[row, : len(passage)] = torch.from_numpy(passage)
            mask[row, : len(passage)] = True
        return queries, ids, mask

    batches = endless(DataLoader(data, batch_size, shuffle=True, collate_fn=collate, drop_last=True))
    model = LateEncoder(
        vocabulary, size(384, 32), size(6, 2), size(12, 2), size(128, 16), use_sdpa=change == "sdpa"
    ).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda done: min(1.0, (done + 1) / 100))
    history = []

    def maxsim(queries, passages, mask):
        if change == "all_pairs_at_once":
            similarity = torch.einsum("qid,pjd->qpij", queries, passages)
            similarity = similarity.masked_fill(~mask[None, :, None, :], -1e4)
            return similarity.max(dim=-1).values.sum(dim=-1)
        rows = []
        for query in queries:
            similarity = passages @ query.T
            similarity = similarity.masked_fill(~mask.unsqueeze(-1), -1e4)
            rows.append(similarity.max(dim=1).values.sum(dim=-1))
        return torch.stack(rows)

    def step():
        queries, passages, mask = (tensor.to(device) for tensor in next(batches))
        optimizer.zero_grad()
        with bf16(change == "bf16"):
            query_vectors = model(queries, torch.ones_like(queries, dtype=torch.bool))
            passage_vectors = model(passages, mask)
            scores = maxsim(query_vectors, passage_vectors, mask)
            labels = torch.arange(len(queries), device=device) * (1 + negatives)
            loss = F.cross_entropy(scores.float(), labels)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        accuracy = (scores.argmax(dim=1) == labels).float().mean()
        if change == "log_on_device":
            history.append(torch.stack((loss.detach(), accuracy, norm)))
        else:
            history.append((loss.item(), accuracy.item(), norm.item()))
        del history[:-100]
        return loss.detach()

    return step


class PackedBlock(nn.Module):
    """A pre-norm GPT block; attention is a function of queries, keys, values and a mask."""

    def __init__(self, width, heads, attend):
        super().__init__()
        self.heads, self.attend = heads, attend
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x, mask):
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).split(width, dim=2)
        q, k, v = (part.view(batch, length, self.heads, -1).transpose(1, 2) for part in (q, k, v))
        y = self.attend(q, k, v, mask).transpose(1, 2).reshape(batch, length, width)
        x = x + self.out(y)
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class PackedGPT(nn.Module):
    """A GPT with learned positions and tied embeddings which returns the loss of each token."""

    def __init__(self, vocabulary, width, layers, heads, length, attend):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(PackedBlock(width, heads, attend) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        self.apply(self._init)

    def _init(self, module):
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)

    def forward(self, tokens, positions, mask, targets):
        x = self.tokens(tokens) + self.positions(positions)
        for block in self.blocks:
            x = block(x, mask)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.float().view(-1, logits.shape[-1]), targets.reshape(-1), reduction="none")


def masked_sdpa(q, k, v, mask):
    """Return attention with a boolean mask."""
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def masks_and_positions(tokens, end_of_text, with_mask=True):
    """Return the causal mask inside of each document, and positions that begin again after each end of text."""
    batch, length = tokens.shape
    mask = None
    if with_mask:
        mask = torch.tril(torch.ones((batch, length, length), device=tokens.device)).view(batch, 1, length, length)
    positions = torch.arange(length, device=tokens.device).unsqueeze(0).expand_as(tokens).clone()
    for b in range(batch):
        ends = positions[b, tokens[b] == end_of_text].clone()
        previous = 0
        for end in ends:
            if with_mask:
                mask[b, 0, (end + 1) :, : (end + 1)] = 0
            positions[b, (end + 1) :] -= end + 1 - previous
            previous = end + 1
    return (mask > 0.5 if with_mask else None), positions


def document_ids(tokens, end_of_text):
    """Return for each token the number of its document within the sequence."""
    ends = (tokens == end_of_text).long()
    return ends.cumsum(dim=1) - ends


def packed_pretraining(change):
    """Pretrain a GPT on packed documents with gradient accumulation."""
    vocabulary, length = size(32768, 128), size(1024, 64)
    micro, accumulate = size(4, 2), size(4, 2)
    end_of_text = 0
    if change == "larger_microbatches":
        micro, accumulate = micro * accumulate, 1
    rng = np.random.default_rng(0)
    stream = rng.integers(1, vocabulary, length * 2000).astype(np.uint16)
    ends = np.cumsum(np.maximum(8, rng.exponential(length / 5, 12000)).astype(int))
    stream[ends[ends < len(stream)]] = end_of_text

    def batch():
        starts = rng.integers(0, len(stream) - length - 1, micro)
        rows = torch.stack([torch.from_numpy(stream[start : start + length + 1].astype(np.int64)) for start in starts])
        rows = rows.to(device)
        return rows[:, :-1], rows[:, 1:]

    attend = masked_sdpa
    use_flex = change == "compile_flex_attention" and device.type == "cuda"
    if use_flex:
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        flex = compiled(flex_attention)

        def attend(q, k, v, mask):
            return flex(q, k, v, block_mask=mask)

    model = PackedGPT(vocabulary, size(768, 32), size(12, 2), size(12, 2), length, attend).to(device)
    network = compiled(model) if change == "compile_model" else model
    decay = [p for p in model.parameters() if p.dim() >= 2]
    other = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": other, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=3e-4, betas=(0.9, 0.95), fused=True if change == "fused_adamw" else None)

    def inputs(tokens):
        if use_flex:
            documents = document_ids(tokens, end_of_text)

            def inside(b, h, q, kv):
                return (q >= kv) & (documents[b, q] == documents[b, kv])

            mask = create_block_mask(inside, len(tokens), None, length, length, device=device)
            return mask, masks_and_positions(tokens, end_of_text, with_mask=False)[1]
        if change == "vectorized_masks":
            documents = document_ids(tokens, end_of_text)
            order = torch.arange(length, device=device)
            mask = (documents[:, :, None] == documents[:, None, :]) & (order[:, None] >= order[None, :])
            begins = F.pad(documents[:, 1:] != documents[:, :-1], (1, 0))
            return mask.unsqueeze(1), order - (begins * order).cummax(dim=1).values
        return masks_and_positions(tokens, end_of_text)

    def step():
        total = torch.zeros((), device=device)
        optimizer.zero_grad(set_to_none=True)
        for _ in range(accumulate):
            tokens, targets = batch()
            mask, positions = inputs(tokens)
            with bf16(True):
                losses = network(tokens, positions, mask, targets)
            weights = (tokens != end_of_text).float().view(-1)
            loss = (losses * weights).sum() / weights.sum() / accumulate
            loss.backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return total

    return step


def int8_linear(x, weight, scale):
    """Return x times the dequantized weight."""
    return F.linear(x, weight.to(x.dtype) * scale)


class Int8Linear(nn.Module):
    """A linear layer with int8 weights and one scale for each output."""

    def __init__(self, inputs, outputs, change, function):
        super().__init__()
        weight = torch.randn(outputs, inputs, device=device) / math.sqrt(inputs)
        scale = weight.abs().amax(dim=1, keepdim=True) / 127
        self.register_buffer("weight", (weight / scale).round().to(torch.int8))
        self.register_buffer("scale", scale.to(torch.bfloat16))
        self.change, self.function = change, function
        if change == "dequantize_once":
            self.full = self.weight.to(torch.bfloat16) * self.scale

    def forward(self, x):
        if self.change == "dequantize_once":
            return F.linear(x, self.full)
        if self.change == "scale_outputs":
            return F.linear(x, self.weight.to(x.dtype)) * self.scale.view(-1)
        return self.function(x, self.weight, self.scale)


class GrowingCache:
    """Keys and values of all layers, concatenated at each token."""

    def __init__(self, layers):
        self.keys, self.values = [None] * layers, [None] * layers

    def update(self, layer, k, v, positions):
        if self.keys[layer] is not None:
            k, v = torch.cat((self.keys[layer], k), dim=2), torch.cat((self.values[layer], v), dim=2)
        self.keys[layer], self.values[layer] = k, v
        return k, v

    def mask(self, positions):
        return None


class FixedCache:
    """Keys and values of all layers in memory of a fixed size, written at the tokens' positions."""

    def __init__(self, layers, batch, heads, length, head_width):
        shape = (layers, 2, batch, heads, length, head_width)
        self.memory = torch.zeros(shape, dtype=torch.bfloat16, device=device)
        self.order = torch.arange(length, device=device)

    def update(self, layer, k, v, positions):
        keys, values = self.memory[layer]
        return keys.index_copy_(2, positions, k), values.index_copy_(2, positions, v)

    def mask(self, positions):
        return self.order[None, :] <= positions[:, None]


class Int8Block(nn.Module):
    """A Llama block with int8 linear layers and grouped key/value heads."""

    def __init__(self, width, heads, kv_heads, hidden, change, function):
        super().__init__()
        self.heads, self.kv_heads, self.head_width = heads, kv_heads, width // heads
        kv_width = kv_heads * self.head_width

        def linear(inputs, outputs):
            return Int8Linear(inputs, outputs, change, function)

        self.q, self.k, self.v = linear(width, width), linear(width, kv_width), linear(width, kv_width)
        self.o = linear(width, width)
        self.gate, self.up, self.down = linear(width, hidden), linear(width, hidden), linear(hidden, width)
        self.norm1 = nn.RMSNorm(width, device=device, dtype=torch.bfloat16)
        self.norm2 = nn.RMSNorm(width, device=device, dtype=torch.bfloat16)

    def repeat(self, x, groups):
        batch, heads, length, width = x.shape
        return x[:, :, None].expand(-1, -1, groups, -1, -1).reshape(batch, heads * groups, length, width)

    def rotate(self, x, cos, sin):
        first, second = x.chunk(2, dim=-1)
        return x * cos + torch.cat((-second, first), dim=-1) * sin

    def forward(self, x, cos, sin, positions, cache, layer, mask):
        batch, length, width = x.shape
        h = self.norm1(x)
        q = self.q(h).view(batch, length, self.heads, self.head_width).transpose(1, 2)
        k = self.k(h).view(batch, length, self.kv_heads, self.head_width).transpose(1, 2)
        v = self.v(h).view(batch, length, self.kv_heads, self.head_width).transpose(1, 2)
        q, k = self.rotate(q, cos, sin), self.rotate(k, cos, sin)
        k, v = cache.update(layer, k, v, positions)
        groups = self.heads // self.kv_heads
        k, v = self.repeat(k, groups), self.repeat(v, groups)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None and length > 1)
        x = x + self.o(y.transpose(1, 2).reshape(batch, length, width))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Int8Llama(nn.Module):
    """A Llama-like language model with int8 weights."""

    def __init__(self, vocabulary, width, layers, heads, kv_heads, hidden, change, function):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width, device=device, dtype=torch.bfloat16)
        self.blocks = nn.ModuleList(Int8Block(width, heads, kv_heads, hidden, change, function) for _ in range(layers))
        self.norm = nn.RMSNorm(width, device=device, dtype=torch.bfloat16)
        half = width // heads // 2
        self.register_buffer("frequencies", 10000 ** (-torch.arange(half, device=device) / half))

    def forward(self, tokens, positions, cache):
        angles = positions[:, None].float() * self.frequencies
        angles = torch.cat((angles, angles), dim=-1)
        cos, sin = angles.cos().to(torch.bfloat16), angles.sin().to(torch.bfloat16)
        mask = cache.mask(positions)
        x = self.embedding(tokens)
        for layer, block in enumerate(self.blocks):
            x = block(x, cos, sin, positions, cache, layer, mask)
        return F.linear(self.norm(x[:, -1]), self.embedding.weight).float() / math.sqrt(x.shape[-1])


def int8_decoder(change):
    """Generate greedily for a batch of prompts with a model whose weights are int8."""
    vocabulary, width, layers, heads, kv_heads = size(32000, 100), size(2048, 32), size(16, 2), size(32, 4), size(8, 2)
    batch, prompt, new, end_of_text = 4, size(96, 8), size(32, 4), 2
    function = compiled(int8_linear) if change == "compile_dequantization" else int8_linear
    model = Int8Llama(vocabulary, width, layers, heads, kv_heads, size(5632, 64), change, function).eval()
    generator = torch.Generator().manual_seed(0)

    token = torch.zeros(batch, 1, dtype=torch.long, device=device)
    position = torch.full((1,), prompt, device=device)
    decode = None
    if change == "cuda_graph":
        fixed = FixedCache(layers, batch, kv_heads, prompt + new, width // heads)
        with torch.no_grad():
            decode = graphed(lambda: model(token, position, fixed))

    @torch.no_grad()
    def step():
        tokens = torch.randint(3, vocabulary, (batch, prompt), generator=generator).to(device)
        cache = fixed if change == "cuda_graph" else GrowingCache(layers)
        logits = model(tokens, torch.arange(prompt, device=device), cache)
        finished = torch.zeros(batch, dtype=torch.bool, device=device)
        scores = torch.zeros(batch, device=device)
        for done in range(new):
            chosen = logits.argmax(dim=-1, keepdim=True)
            scores += torch.log_softmax(logits, dim=-1).gather(1, chosen).squeeze(1) * ~finished
            finished |= chosen.squeeze(1) == end_of_text
            tokens = torch.cat((tokens, chosen), dim=1)
            if change == "check_end_rarely":
                if done % 16 == 15 and finished.all():
                    break
            elif finished.all():
                break
            if done == new - 1:
                break
            if decode is not None:
                token.copy_(chosen)
                position.fill_(prompt + done)
                logits = decode()
            else:
                logits = model(chosen, torch.tensor([prompt + done], device=device), cache)
        return scores

    return step


class AutomatonRule(nn.Module):
    """The update rule of a growing neural cellular automaton."""

    def __init__(self, channels, hidden):
        super().__init__()
        self.channels = channels
        identity = torch.tensor([[0.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 0.0]])
        sobel = torch.tensor([[-1.0, 0.0, 1.0], [-2.0, 0.0, 2.0], [-1.0, 0.0, 1.0]]) / 8
        self.register_buffer("filters", torch.stack((identity, sobel, sobel.T)).unsqueeze(1))
        self.hidden = nn.Conv2d(3 * channels, hidden, 1)
        self.out = nn.Conv2d(hidden, channels, 1, bias=False)
        nn.init.normal_(self.out.weight, std=1e-3)

    def alive(self, x):
        return F.max_pool2d(x[:, 3:4], 3, stride=1, padding=1) > 0.1

    def forward(self, x, fire):
        before = self.alive(x)
        perceived = F.conv2d(x, self.filters.repeat(self.channels, 1, 1, 1), padding=1, groups=self.channels)
        update = self.out(F.relu(self.hidden(perceived)))
        x = x + update * fire
        return x * (before & self.alive(x)).float()


def neural_automaton(change):
    """Train a growing neural cellular automaton with a pool of states."""
    channels, side, batch_size, steps, pool_size = 16, size(72, 16), 8, size(64, 4), size(1024, 32)
    rng = np.random.default_rng(0)
    rows, columns = np.mgrid[:side, :side] / side - 0.5
    shape = (np.hypot(rows, columns) < 0.25 + 0.1 * np.sin(5 * np.arctan2(rows, columns))).astype(np.float32)
    image = np.stack((shape * (rows + 0.5), shape * (columns + 0.5), shape * 0.5, shape)).astype(np.float32)
    target = torch.from_numpy(image).to(device)
    seed = np.zeros((channels, side, side), dtype=np.float32)
    seed[3:, side // 2, side // 2] = 1.0
    pool = np.repeat(seed[None], pool_size, axis=0)
    if change == "pool_on_device":
        pool = torch.from_numpy(pool).to(device)
        seed = torch.from_numpy(seed).to(device)

    rule = AutomatonRule(channels, size(128, 32)).to(device)
    update = compiled(rule) if change == "compile_update" else rule
    capturable = change == "cuda_graph" and device.type == "cuda"
    optimizer = torch.optim.Adam(rule.parameters(), lr=2e-3, capturable=capturable)
    states = torch.zeros(batch_size, channels, side, side, device=device)

    def draw_mask(rate=0.5):
        if change in ("mask_on_device", "cuda_graph"):
            return (torch.rand(batch_size, 1, side, side, device=device) < rate).float()
        return (torch.rand(batch_size, 1, side, side) < rate).float().to(device)

    def train(x):
        optimizer.zero_grad()
        with bf16(change == "bf16"):
            for _ in range(steps):
                x = update(x, draw_mask())
        losses = (x[:, :4].float() - target).square().mean(dim=(1, 2, 3))
        loss = losses.mean()
        loss.backward()
        for parameter in rule.parameters():
            parameter.grad.div_(parameter.grad.norm() + 1e-8)
        optimizer.step()
        return loss.detach(), x.detach().float()

    if change == "cuda_graph":
        states.copy_(torch.from_numpy(seed))
        replay = graphed_training(lambda: train(states), [rule], [optimizer])

    def step():
        chosen = rng.choice(pool_size, batch_size, replace=False)
        if change == "pool_on_device":
            chosen = torch.from_numpy(chosen).to(device)
            x = pool[chosen]
            worst = (x[:, :4] - target).square().mean(dim=(1, 2, 3)).argmax()
            x.index_copy_(0, worst.view(1), seed.unsqueeze(0))
        else:
            x = torch.from_numpy(pool[chosen]).to(device)
            worst = (x[:, :4] - target).square().mean(dim=(1, 2, 3)).argmax().item()
            x[worst] = torch.from_numpy(seed).to(device)
        if change == "cuda_graph":
            states.copy_(x)
            loss, x = replay()
        else:
            loss, x = train(x)
        pool[chosen] = x if change == "pool_on_device" else x.cpu().numpy()
        return loss

    return step


class FrameMasker(nn.Module):
    """Causal convolutions over the frequencies, a GRU over time, and a decoder of a complex mask, frame by frame."""

    def __init__(self, bins, channels, hidden):
        super().__init__()
        self.channels = (2, *channels)
        pairs = list(zip(self.channels[:-1], self.channels[1:], strict=True))
        self.sizes = [bins]
        for _ in pairs:
            self.sizes.append((self.sizes[-1] - 1) // 2 + 1)
        self.encoder = nn.ModuleList(nn.Conv2d(a, b, (2, 5), stride=(1, 2), padding=(0, 2)) for a, b in pairs)
        self.encoder_norms = nn.ModuleList(nn.BatchNorm2d(b) for _, b in pairs)
        self.gru = nn.GRU(channels[-1] * self.sizes[-1], hidden, num_layers=2, batch_first=True)
        self.expand = nn.Linear(hidden, channels[-1] * self.sizes[-1])
        self.decoder = nn.ModuleList(
            nn.ConvTranspose2d(2 * b, a, (1, 5), stride=(1, 2), padding=(0, 2)) for a, b in reversed(pairs)
        )
        self.decoder_norms = nn.ModuleList(nn.BatchNorm2d(a) for a, _ in reversed(pairs[1:]))

    def initial(self, streams):
        states = [
            torch.zeros(streams, channels, 1, bins, device=device)
            for channels, bins in zip(self.channels[:-1], self.sizes[:-1], strict=True)
        ]
        return [*states, torch.zeros(2, streams, self.gru.hidden_size, device=device)]

    def forward(self, spectrum, states):
        *previous, memory = states
        x = torch.view_as_real(spectrum).permute(0, 2, 1).unsqueeze(2)
        kept, skips = [], []
        for conv, norm, before in zip(self.encoder, self.encoder_norms, previous, strict=True):
            kept.append(x)
            x = F.elu(norm(conv(torch.cat((before.to(x.dtype), x), dim=2))))
            skips.append(x)
        y, memory = self.gru(x.flatten(1).unsqueeze(1), memory)
        x = self.expand(y).view(x.shape)
        for index, conv in enumerate(self.decoder):
            x = conv(torch.cat((x, skips.pop()), dim=1))
            if index < len(self.decoder_norms):
                x = F.elu(self.decoder_norms[index](x))
        mask = torch.tanh(x.float()).squeeze(2).permute(0, 2, 1).contiguous()
        return spectrum * torch.view_as_complex(mask), [*kept, memory]


class StreamDenoiser(nn.Module):
    """Short-time Fourier analysis and synthesis around the masker; all states are passed in and out."""

    def __init__(self, masker, frame, hop):
        super().__init__()
        self.masker, self.frame, self.hop = masker, frame, hop
        self.register_buffer("window", torch.hann_window(frame).sqrt())

    def initial(self, streams):
        return [torch.zeros(streams, self.frame, device=device) for _ in range(2)] + self.masker.initial(streams)

    def forward(self, samples, states):
        heard, overlap, *states = states
        heard = torch.cat((heard[:, self.hop :], samples), dim=1)
        spectrum = torch.fft.rfft(heard * self.window)
        spectrum, states = self.masker(spectrum, states)
        frame = torch.fft.irfft(spectrum, n=self.frame) * self.window
        overlap = F.pad(overlap[:, self.hop :], (0, self.hop)) + frame
        return overlap[:, : self.hop], [heard, overlap, *states]


def denoise_stream(change):
    """Denoise several streams of audio frame by frame."""
    frame, hop, streams, frames = size(512, 64), size(256, 32), 4, size(80, 4)
    channels = (size(16, 4), size(32, 4), size(64, 8))
    model = StreamDenoiser(FrameMasker(frame // 2 + 1, channels, size(256, 16)), frame, hop).to(device).eval()
    rng = np.random.default_rng(0)
    time = np.arange(frames * hop) / 16000
    clean = np.stack([np.sin(2 * np.pi * (220 + 40 * stream) * time) for stream in range(streams)])

    together = streams if change == "streams_together" else 1
    network = compiled(model) if change == "compile_frame" else model
    if change == "cuda_graph":
        chunk, states = torch.zeros(1, hop, device=device), model.initial(1)

        def advance():
            output, new = model(chunk, states)
            for state, value in zip(states, new, strict=True):
                state.copy_(value)
            return output

        with torch.no_grad():
            replay = graphed(advance)

    def enhance(audio):
        """Return the enhanced audio [streams, samples]."""
        if change == "cuda_graph":
            for state in states:
                state.zero_()
        else:
            current = model.initial(len(audio))
        outputs = []
        for index in range(frames):
            samples = torch.from_numpy(audio[:, index * hop : (index + 1) * hop])
            if change == "cuda_graph":
                chunk.copy_(samples)
                output = replay()
            else:
                with bf16(change == "bf16"):
                    output, current = network(samples.to(device), current)
            if change == "outputs_on_device":
                outputs.append(output)
            else:
                outputs.append(output.cpu().numpy())
        if change == "outputs_on_device":
            return torch.cat(outputs, dim=1).cpu().numpy()
        return np.concatenate(outputs, axis=1)

    @torch.no_grad()
    def step():
        noisy = (0.3 * clean + 0.1 * rng.standard_normal(clean.shape)).astype(np.float32)
        results = [enhance(noisy[first : first + together]) for first in range(0, streams, together)]
        return torch.from_numpy(np.concatenate(results)).square().mean(dim=1)

    return step


class TrafficWorld:
    """Cars on a plane that drive to their goals and must not collide; many worlds at once."""

    def __init__(self, worlds, agents, where):
        self.worlds, self.agents, self.where = worlds, agents, where
        moves = [[0.0, 0.0], [1.0, 0.0], [-1.0, 0.0], [0.0, 1.0], [0.0, -1.0]]
        self.moves = torch.tensor(moves, device=where)
        self.place = torch.rand(worlds, agents, 2, device=where) * 2 - 1
        self.goal = torch.rand(worlds, agents, 2, device=where) * 2 - 1
        self.speed = torch.zeros(worlds, agents, 2, device=where)
        self.width = 4 + 2 * agents

    def observe(self):
        others = (self.place[:, None, :, :] - self.place[:, :, None, :]).flatten(2)
        return torch.cat((self.speed, self.goal - self.place, others), dim=2)

    def step(self, actions):
        self.speed = 0.8 * self.speed + 0.05 * self.moves[actions]
        self.place = (self.place + self.speed).clamp(-1.5, 1.5)
        distance = (self.goal - self.place).norm(dim=2)
        gaps = (self.place[:, None] - self.place[:, :, None]).norm(dim=3) + torch.eye(self.agents, device=self.where)
        reward = -distance - (gaps < 0.1).float().sum(dim=2)
        done = torch.rand(self.worlds, device=self.where) < 0.02
        again = done[:, None, None].expand_as(self.place)
        self.place = torch.where(again, torch.rand_like(self.place) * 2 - 1, self.place)
        self.goal = torch.where(again, torch.rand_like(self.goal) * 2 - 1, self.goal)
        self.speed = torch.where(again, torch.zeros_like(self.speed), self.speed)
        return self.observe(), reward, done.float()


def traffic_net(inputs, hidden, outputs):
    """Return a network of two hidden layers."""
    return nn.Sequential(
        nn.Linear(inputs, hidden), nn.Tanh(), nn.Linear(hidden, hidden), nn.Tanh(), nn.Linear(hidden, outputs)
    )


class SeparateActors(nn.Module):
    """One network for each agent: observations [batch, agents, width] give logits [batch, agents, actions]."""

    def __init__(self, agents, inputs, hidden, actions):
        super().__init__()
        self.actors = nn.ModuleList(traffic_net(inputs, hidden, actions) for _ in range(agents))

    def forward(self, observations):
        return torch.stack([actor(observations[:, i]) for i, actor in enumerate(self.actors)], dim=1)

    def clip(self, limit):
        for actor in self.actors:
            nn.utils.clip_grad_norm_(actor.parameters(), limit)


class StackedActors(nn.Module):
    """The networks of SeparateActors with weights stacked over the agents."""

    def __init__(self, separate):
        super().__init__()
        self.weights, self.biases = nn.ParameterList(), nn.ParameterList()
        for layer in (0, 2, 4):
            weights = torch.stack([actor[layer].weight.detach().T for actor in separate.actors])
            self.weights.append(nn.Parameter(weights.contiguous()))
            self.biases.append(nn.Parameter(torch.stack([actor[layer].bias.detach() for actor in separate.actors])))

    def forward(self, observations):
        x = observations.transpose(0, 1)
        for index, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            x = torch.baddbmm(bias.unsqueeze(1), x, weight)
            x = torch.tanh(x) if index < 2 else x
        return x.transpose(0, 1)

    def clip(self, limit):
        grads = [parameter.grad for parameter in self.parameters()]
        norms = torch.stack([grad.flatten(1).norm(dim=1) for grad in grads]).norm(dim=0)
        scale = (limit / (norms + 1e-6)).clamp(max=1.0)
        for grad in grads:
            grad.mul_(scale.view(-1, *[1] * (grad.dim() - 1)))


def agents_in_traffic(change):
    """Train several agents with PPO: own actors and a common critic of the whole state."""
    worlds, agents, horizon, epochs, parts = size(128, 8), 5, size(16, 4), 4, size(4, 2)
    hidden, actions, gamma, trace = size(128, 16), 5, 0.99, 0.95
    where = device if change == "world_on_device" else torch.device("cpu")
    check = False if change in ("no_validation", "cuda_graph_update") else None
    world = TrafficWorld(worlds, agents, where)
    actors = SeparateActors(agents, world.width, hidden, actions)
    if change == "stacked_actors":
        actors = StackedActors(actors)
    actors = actors.to(device)
    critic = traffic_net(agents * world.width, 2 * hidden, agents).to(device)
    options = {"lr": 3e-4, "eps": 1e-5}
    if change == "cuda_graph_update":
        options["capturable"] = device.type == "cuda"
    if change == "fused_adam":
        options["fused"] = True
    actor_optimizer = torch.optim.Adam(actors.parameters(), **options)
    critic_optimizer = torch.optim.Adam(critic.parameters(), **options)
    observations = world.observe()
    rows = worlds * horizon // parts

    def update(seen, taken, old, advantages, returns):
        advantages = (advantages - advantages.mean(dim=0)) / (advantages.std(dim=0) + 1e-8)
        policy = Categorical(logits=actors(seen), validate_args=check)
        ratio = (policy.log_prob(taken) - old).exp()
        surrogate = torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
        actor_loss = -surrogate.mean(dim=0).sum() - 0.01 * policy.entropy().mean(dim=0).sum()
        actor_optimizer.zero_grad()
        actor_loss.backward()
        actors.clip(0.5)
        actor_optimizer.step()
        critic_loss = F.huber_loss(critic(seen.flatten(1)), returns)
        critic_optimizer.zero_grad()
        critic_loss.backward()
        nn.utils.clip_grad_norm_(critic.parameters(), 0.5)
        critic_optimizer.step()
        return actor_loss.detach() + critic_loss.detach()

    if change == "cuda_graph_update":
        static = [torch.zeros(rows, agents, world.width, device=device)]
        static.append(torch.zeros(rows, agents, dtype=torch.long, device=device))
        static += [torch.zeros(rows, agents, device=device) for _ in range(3)]
        replay = graphed_training(lambda: update(*static), [actors, critic], [actor_optimizer, critic_optimizer])

    @torch.no_grad()
    def collect():
        nonlocal observations
        kept = [[] for _ in range(6)]
        for _ in range(horizon):
            seen = observations.to(device)
            policy = Categorical(logits=actors(seen), validate_args=check)
            chosen = policy.sample()
            values = critic(seen.flatten(1))
            observations, reward, done = world.step(chosen.to(where))
            row = (seen, chosen, policy.log_prob(chosen), values, reward.to(device), done.to(device))
            for column, value in zip(kept, row, strict=True):
                column.append(value)
        seen, chosen, old, values, rewards, dones = (torch.stack(column) for column in kept)
        following = critic(observations.to(device).flatten(1))
        advantages, running = torch.zeros_like(rewards), torch.zeros_like(following)
        for t in reversed(range(horizon)):
            alive = (1 - dones[t]).unsqueeze(1)
            running = rewards[t] + gamma * following * alive - values[t] + gamma * trace * alive * running
            advantages[t], following = running, values[t]
        batch = (seen, chosen, old, advantages, advantages + values)
        return [tensor.flatten(0, 1) for tensor in batch]

    def step():
        batch = collect()
        losses = []
        for _ in range(epochs):
            order = torch.randperm(worlds * horizon).to(device)
            for indices in order.split(rows):
                part = [tensor[indices] for tensor in batch]
                if change == "cuda_graph_update":
                    for memory, tensor in zip(static, part, strict=True):
                        memory.copy_(tensor)
                    losses.append(replay().clone())
                else:
                    losses.append(update(*part))
        return torch.stack(losses).mean()

    return step


class ScoringBlock(nn.Module):
    """A GPT-2 block that takes and returns keys and values."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x, past, mask):
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        if past is not None:
            k = torch.cat((past[0].expand(batch, -1, -1, -1), k), dim=2)
            v = torch.cat((past[1].expand(batch, -1, -1, -1), v), dim=2)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh")), (k, v)


class ScoringGPT(nn.Module):
    """A GPT-2 that returns its last hidden states and the keys and values."""

    def __init__(self, vocabulary, width, layers, heads):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(1024, width)
        self.blocks = nn.ModuleList(ScoringBlock(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens, pasts=None):
        length, known, mask = tokens.shape[1], 0, None
        if pasts is not None:
            known = pasts[0][0].shape[2]
            mask = torch.ones(length, known + length, dtype=torch.bool, device=tokens.device).tril(known)
        x = self.tokens(tokens) + self.positions(torch.arange(known, known + length, device=tokens.device))
        cache = []
        for index, block in enumerate(self.blocks):
            x, pair = block(x, None if pasts is None else pasts[index], mask)
            cache.append(pair)
        return self.norm(x), cache


def multiple_choice_scores(change):
    """Score the choices of a few questions by the log-probability of each continuation."""
    vocabulary, questions, choices, batch_size = size(50257, 100), size(8, 2), 4, 1
    shortest, longest = size(250, 10), size(400, 20)
    with torch.device(device):
        model = ScoringGPT(vocabulary, size(1024, 32), size(24, 2), size(16, 2)).eval()
    if change == "bf16":
        model = model.to(torch.bfloat16)
    network = compiled(model, dynamic=True) if change == "compile_model" else model
    if change == "batches_of_16":
        batch_size = 16
    rng = np.random.default_rng(0)

    def make_questions():
        made = []
        for _ in range(questions):
            context = rng.integers(0, vocabulary, rng.integers(shortest, longest)).tolist()
            made.append((context, [rng.integers(0, vocabulary, rng.integers(2, 9)).tolist() for _ in range(choices)]))
        return made

    def padded(rows):
        length = max(len(row) for row in rows)
        return torch.tensor([row + [0] * (length - len(row)) for row in rows], device=device)

    def score(log_probs, continuation):
        """Return the sum of a continuation's log-probabilities, and whether greedy decoding gives it."""
        targets = torch.tensor(continuation, device=device)
        greedy = (log_probs.argmax(dim=-1) == targets).all()
        return log_probs.gather(1, targets.unsqueeze(1)).sum().item(), bool(greedy)

    def score_with_shared_contexts(asked):
        results = {}
        for number, (context, options) in enumerate(asked):
            _, cache = network(padded([context[:-1]]))
            hidden, _ = network(padded([context[-1:] + option[:-1] for option in options]), cache)
            log_probs = F.log_softmax(model.head(hidden).float(), dim=-1)
            for index, option in enumerate(options):
                results[number, index] = score(log_probs[index, : len(option)], option)
        return results

    def score_requests(asked):
        requests = [
            ((number, index), context, option)
            for number, (context, options) in enumerate(asked)
            for index, option in enumerate(options)
        ]
        requests.sort(key=lambda request: -len(request[1]) - len(request[2]))
        results = {}
        for first in range(0, len(requests), batch_size):
            group = requests[first : first + batch_size]
            hidden, _ = network(padded([(context + option)[:-1] for _, context, option in group]))
            if change != "head_on_continuations":
                all_log_probs = F.log_softmax(model.head(hidden).float(), dim=-1)
            for row, (key, context, option) in enumerate(group):
                begin, end = len(context) - 1, len(context) + len(option) - 1
                if change == "head_on_continuations":
                    log_probs = F.log_softmax(model.head(hidden[row, begin:end]).float(), dim=-1)
                else:
                    log_probs = all_log_probs[row, begin:end]
                results[key] = score(log_probs, option)
        return results

    @torch.no_grad()
    def step():
        asked = make_questions()
        results = score_with_shared_contexts(asked) if change == "shared_contexts" else score_requests(asked)
        return torch.tensor([[results[n, i][0] for i in range(choices)] for n in range(questions)])

    return step


PROGRAMS = {
    late_interaction: {
        "bf16": "half_precision",
        "sdpa": "fused_attention",
        "pad_to_longest": "trim_padding",
        "all_pairs_at_once": "larger_batch",
        "log_on_device": "remove_sync",
    },
    packed_pretraining: {
        "vectorized_masks": "larger_batch",
        "larger_microbatches": "larger_batch",
        "compile_model": "fuse_pointwise",
        "compile_flex_attention": "flex_attention",
        "fused_adamw": "fused_optimizer",
    },
    int8_decoder: {
        "cuda_graph": "static_cache",
        "dequantize_once": "",
        "compile_dequantization": "fuse_pointwise",
        "scale_outputs": "",
        "check_end_rarely": "remove_sync",
    },
    neural_automaton: {
        "mask_on_device": "cpu_tensors",
        "compile_update": "fuse_pointwise",
        "cuda_graph": "cuda_graph",
        "pool_on_device": "data_loader",
        "bf16": "half_precision",
    },
    denoise_stream: {
        "cuda_graph": "cuda_graph",
        "streams_together": "larger_batch",
        "compile_frame": "fuse_pointwise",
        "outputs_on_device": "remove_sync",
        "bf16": "half_precision",
    },
    agents_in_traffic: {
        "cuda_graph_update": "cuda_graph",
        "stacked_actors": "larger_batch",
        "world_on_device": "cpu_tensors",
        "no_validation": "remove_sync",
        "fused_adam": "fused_optimizer",
    },
    multiple_choice_scores: {
        "shared_contexts": "",
        "bf16": "half_precision",
        "batches_of_16": "larger_batch",
        "head_on_continuations": "",
        "compile_model": "fuse_pointwise",
    },
}
