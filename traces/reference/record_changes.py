"""Record steps before and after one change each, to check what read-trace predicts of the change.

Usage: record_changes.py FOLDER [NAME ...]

Each variant runs in its own process: the profiler slows a process for good. The process measures the step without the
profiler first, then records three steps in FOLDER/<workload>/<variant>.json.gz. The models are not the ladder's: they
stand for what users bring. A GPU is needed, and torchvision and transformers.
"""

import gzip
import json
import multiprocessing
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
import torchvision
import transformers
from torch.profiler import profile, schedule
from torch.utils.data import DataLoader, Dataset
from torchvision.transforms import v2

RECORDED = 3


def vit(variant):
    """One image through ViT-B/16: many small launches."""
    model = torchvision.models.vit_b_16().cuda().to(torch.bfloat16).eval()
    images = torch.randn(1, 3, 224, 224, device="cuda", dtype=torch.bfloat16)
    if variant == "compile":
        model = torch.compile(model)
    step = torch.no_grad()(lambda: model(images))
    return graphed(step) if variant == "graph" else step


def pointwise(variant):
    """Thirty pointwise operations in a row on 134 MB."""
    x = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)

    def chain(x):
        for number in range(10):
            x = torch.tanh(x * 1.01 + 0.1 * number)
        return x

    chain = torch.compile(chain) if variant == "compile" else chain
    return torch.no_grad()(lambda: chain(x))


def copies(variant):
    """A batch of images from memory that may be paged out, copied before each forward pass."""
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 64, 7, stride=4), torch.nn.ReLU(), torch.nn.Conv2d(64, 256, 3), torch.nn.ReLU(),
        torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(256, 1000),
    ).cuda()  # fmt: skip
    batches = [torch.randn(128, 3, 224, 224) for _ in range(2)]
    if variant == "blocking":
        number = iter(range(10**9))
        return torch.no_grad()(lambda: model(batches[next(number) % 2].cuda()))
    batches, side, ready = [one.pin_memory() for one in batches], torch.cuda.Stream(), []

    def fetch(number):
        with torch.cuda.stream(side):
            ready.append(batches[number % 2].cuda(non_blocking=True))

    fetch(0)
    number = iter(range(1, 10**9))

    def step():
        torch.cuda.current_stream().wait_stream(side)
        images = ready.pop()
        images.record_stream(torch.cuda.current_stream())
        fetch(next(number))
        return model(images)

    return torch.no_grad()(step)


def resnet(variant):
    """A training step of ResNet-50."""
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = variant == "tf32"
    torch.backends.cudnn.benchmark = True
    layout = torch.channels_last if "channels_last" in variant else torch.contiguous_format
    model = torchvision.models.resnet50().cuda().to(memory_format=layout)
    images = torch.randn(64, 3, 224, 224, device="cuda").to(memory_format=layout)
    labels = torch.randint(1000, (64,), device="cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    autocast = torch.autocast("cuda", torch.bfloat16, enabled=variant.startswith("bf16"))

    def step():
        optimizer.zero_grad()
        with autocast:
            loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()

    return step


def gpt2(variant):
    """A training step of a small GPT-2: fp32 weights, bf16 arithmetic."""
    config = transformers.GPT2Config(
        vocab_size=50264 if variant == "padded" else 50257, n_layer=6, n_embd=768, n_head=12, n_positions=512,
        attn_implementation="eager" if variant == "eager_attention" else "sdpa", use_cache=False,
    )  # fmt: skip
    model = transformers.GPT2LMHeadModel(config).cuda().to(torch.bfloat16)
    if variant == "recompute":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    tokens = torch.randint(50000, (16, 512), device="cuda")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step():
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def optimizer(variant):
    """A training step of a deep narrow MLP, whose optimizer is most of the launches."""
    model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(60))).cuda()
    x = torch.randn(512, 256, device="cuda")
    how = {
        "forloop": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True},
        "graph": {"foreach": True, "capturable": True},
    }[variant]  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, **how)

    def step():
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    return graphed(step) if variant == "graph" else step


def loader(variant):
    """A training step that waits for its DataLoader."""

    class Images(Dataset):
        def __len__(self):
            return 10**6

        def __getitem__(self, index):
            return torch.randn(3, 96, 96).sigmoid().sub(0.5), index % 10

    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 256, 3, stride=2), torch.nn.ReLU(), torch.nn.Conv2d(256, 512, 3, stride=2), torch.nn.ReLU(),
        torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(512, 10),
    ).cuda()  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    torch.set_num_threads(1)
    workers = 8 if variant == "workers" else 0
    batches = iter(DataLoader(Images(), 64, num_workers=workers, pin_memory=True, persistent_workers=workers > 0))

    def step():
        images, labels = next(batches)
        loss = F.cross_entropy(model(images.cuda(non_blocking=True)), labels.cuda(non_blocking=True))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def syncs(variant):
    """Forty layers, each of which looks at a value on the GPU (item), only the last (end), or none does."""
    layers = [torch.nn.Linear(2048, 2048).cuda().to(torch.bfloat16) for _ in range(40)]
    x = torch.randn(4096, 2048, device="cuda", dtype=torch.bfloat16)

    def step():
        h = x
        for layer in layers:
            h = layer(h).relu()
            if variant == "item" and h.abs().max().item() > 1e4:
                h = h / 2
            elif variant != "item":
                h.abs().max()
        return float(h.sum()) if variant == "end" else h.sum()

    return torch.no_grad()(step)


def attention(variant):
    """Attention written out, forward and backward, or fused."""
    q, k, v = (torch.randn(8, 16, 2048, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in "qkv")
    mask = torch.ones(2048, 2048, dtype=torch.bool, device="cuda").triu(1)

    def step():
        if variant == "sdpa":
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            scores = (q @ k.transpose(-2, -1)) * 0.125
            out = scores.masked_fill(mask, float("-inf")).softmax(-1) @ v
        out.sum().backward()
        q.grad = k.grad = v.grad = None

    return step


def encoder(variant):
    """A transformer encoder's forward pass, or its training step in fp32."""
    layer = torch.nn.TransformerEncoderLayer(1024, 16, 4096, batch_first=True, norm_first=True, dropout=0.1)
    model = torch.nn.TransformerEncoder(layer, 8, enable_nested_tensor=False).cuda()
    torch.backends.cuda.matmul.allow_tf32 = variant == "tf32"
    x = torch.randn(16, 512, 1024, device="cuda")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    run = torch.compile(model) if variant == "bf16_compile" else model

    def step():
        with torch.autocast("cuda", torch.bfloat16, enabled=variant.startswith("bf16")):
            loss = run(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def decode(variant):
    """One token of a small decoder with a static cache; 32 sequences in place of one, or a CUDA graph."""
    batch = 32 if variant == "batch32" else 1
    layer = torch.nn.TransformerEncoderLayer(1024, 16, 4096, batch_first=True, norm_first=True, dropout=0.0)
    model = torch.nn.TransformerEncoder(layer, 24, enable_nested_tensor=False).cuda().to(torch.bfloat16).train()
    head = torch.nn.Linear(1024, 32000).cuda().to(torch.bfloat16)
    x = torch.randn(batch, 1, 1024, device="cuda", dtype=torch.bfloat16)
    step = torch.no_grad()(lambda: head(model(x)).argmax(-1))
    return graphed(step) if variant == "graph" else step


def small(variant):
    """Two hundred small products one after the other, or one batched product."""
    a, b = torch.randn(2, 200, 256, 256, device="cuda", dtype=torch.bfloat16)

    def loop():
        return torch.stack([a[number] @ b[number] for number in range(200)]).sum()

    return torch.no_grad()(loop if variant == "loop" else lambda: torch.bmm(a, b).sum())


def python(variant):
    """Tokens counted in Python between GPU work, or ahead of it."""
    layer = torch.nn.Linear(4096, 4096).cuda().to(torch.bfloat16)
    x = torch.randn(8192, 4096, device="cuda", dtype=torch.bfloat16)

    def count_words():
        counts = {}
        for number in range(60_000):
            counts[number % 97] = counts.get(number % 97, 0) + 1
        return counts

    def step():
        if variant == "loop":
            count_words()
        h = x
        for _ in range(4):
            h = layer(h)
        return h.sum().item()

    return torch.no_grad()(step)


def products(variant):
    """Large products in bf16: there is nothing to gain."""
    x, w = torch.randn(2, 8192, 8192, device="cuda", dtype=torch.bfloat16)

    def step():
        h = x
        for _ in range(8):
            h = h @ w
        return h

    step = torch.no_grad()(step)
    return torch.compile(step) if variant == "compile" else step


def conv_layout(variant):
    """Convolutions in bf16, whose images are laid out by channel or with the channels last."""
    layout = torch.channels_last if variant == "channels_last" else torch.contiguous_format
    torch.backends.cudnn.benchmark = True
    convs = [torch.nn.Conv2d(256, 256, 3, padding=1) for _ in range(12)]
    model = torch.nn.Sequential(*convs).cuda().to(torch.bfloat16).to(memory_format=layout)
    images = torch.randn(32, 256, 56, 56, device="cuda", dtype=torch.bfloat16).to(memory_format=layout)
    return torch.no_grad()(lambda: model(images))


def bert(variant):
    """BERT-base reads four short texts."""
    config = transformers.BertConfig(attn_implementation="sdpa")
    model = transformers.BertModel(config, add_pooling_layer=False).cuda().to(torch.bfloat16).eval()
    tokens = torch.randint(30000, (4, 64), device="cuda")
    mask = torch.zeros(4, 1, 64, 64, device="cuda", dtype=torch.bfloat16)
    step = torch.no_grad()(lambda: model(input_ids=tokens, attention_mask=mask).last_hidden_state)
    return graphed(step) if variant == "graph" else step


def batch_norm(variant):
    """A training step of a small ResNet with few images: many small launches, batch norms among them.

    graph_kept keeps the gradients' memory, sets it to zero and adds to it.
    """
    model = torchvision.models.resnet34().cuda()
    images, labels = torch.randn(8, 3, 224, 224, device="cuda"), torch.randint(1000, (8,), device="cuda")
    if variant.startswith("graph"):
        model = torch.cuda.make_graphed_callables(model, (images,))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    if variant == "compile":
        model = torch.compile(model)

    def step():
        optimizer.zero_grad(set_to_none=variant != "graph_kept")
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()

    return step


def unet(variant):
    """Residual blocks of a diffusion model: group normalization, SiLU and convolutions in bf16."""

    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.norms = torch.nn.ModuleList(torch.nn.GroupNorm(32, 320) for _ in range(2))
            self.convs = torch.nn.ModuleList(torch.nn.Conv2d(320, 320, 3, padding=1) for _ in range(2))

        def forward(self, x):
            h = x
            for norm, conv in zip(self.norms, self.convs, strict=True):
                h = conv(F.silu(norm(h)))
            return x + h

    torch.backends.cudnn.benchmark = True
    layout = torch.channels_last if variant == "channels_last" else torch.contiguous_format
    model = torch.nn.Sequential(*(Block() for _ in range(6))).cuda().to(torch.bfloat16).to(memory_format=layout)
    x = torch.randn(16, 320, 64, 64, device="cuda", dtype=torch.bfloat16).to(memory_format=layout)
    model = torch.compile(model) if variant == "compile" else model
    return torch.no_grad()(lambda: model(x))


def lstm(variant):
    """An LSTM, cell by cell; as one call of cuDNN; or as a CUDA graph."""
    x = torch.randn(100, 32, 512, device="cuda")
    cell, whole = torch.nn.LSTMCell(512, 512).cuda(), torch.nn.LSTM(512, 512).cuda()

    def cells():
        h = c = torch.zeros(32, 512, device="cuda")
        for one in x:
            h, c = cell(one, (h, c))
        return h

    if variant == "cudnn":
        return torch.no_grad()(lambda: whole(x)[0])
    step = torch.no_grad()(cells)
    return graphed(step) if variant == "graph" else step


def llama(variant):
    """Prefill of a small Llama."""
    attention = "eager" if variant == "eager_attention" else "sdpa"
    config = transformers.LlamaConfig(
        vocab_size=32000, hidden_size=2048, intermediate_size=5632, num_hidden_layers=6, num_attention_heads=16,
        num_key_value_heads=16, attn_implementation=attention, use_cache=False,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).cuda().to(torch.bfloat16).eval()
    tokens = torch.randint(30000, (8, 1024), device="cuda")
    run = torch.compile(model) if variant == "compile" else model
    return torch.no_grad()(lambda: run(input_ids=tokens, logits_to_keep=1).logits)


def convnet(variant):
    """A training step of a ConvNeXt in fp32, whose optimizer goes through the parameters one by one."""
    model = torchvision.models.convnext_tiny().cuda()
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = True
    images, labels = torch.randn(8, 3, 224, 224, device="cuda"), torch.randint(1000, (8,), device="cuda")
    how = {
        "forloop": {"foreach": False}, "fused": {"fused": True}, "graph": {"fused": True, "capturable": True}
    }[variant]  # fmt: skip
    optimizer = torch.optim.Adam(model.parameters(), **how)

    def step():
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()

    return graphed(step) if variant == "graph" else step


def selection(variant):
    """Rows chosen by a mask: each choice waits for the number of rows, or a multiplication takes its place."""
    x = torch.randn(4096, 1024, device="cuda", dtype=torch.bfloat16)
    layers = [torch.nn.Linear(1024, 1024).cuda().to(torch.bfloat16) for _ in range(20)]

    def step():
        h = x
        for layer in layers:
            h = layer(h)
            keep = h[:, 0] > 0
            if variant == "chosen":
                h[keep] = h[keep].tanh()
            else:
                h = torch.where(keep[:, None], h.tanh(), h)
        return h

    return torch.no_grad()(step)


def pinned(variant):
    """A pinned batch is copied on the stream that computes, or a step ahead on another one."""
    weights = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    batches = [torch.randn(8192, 4096).to(torch.bfloat16).pin_memory() for _ in range(2)]
    side, ready = torch.cuda.Stream(), []

    def compute(x):
        for _ in range(6):
            x = x @ weights
        return x

    if variant == "same_stream":
        number = iter(range(10**9))
        return torch.no_grad()(lambda: compute(batches[next(number) % 2].cuda(non_blocking=True)))

    def fetch(number):
        with torch.cuda.stream(side):
            ready.append(batches[number % 2].cuda(non_blocking=True))

    fetch(0)
    number = iter(range(1, 10**9))

    def step():
        torch.cuda.current_stream().wait_stream(side)
        x = ready.pop()
        x.record_stream(torch.cuda.current_stream())
        fetch(next(number))
        return compute(x)

    return torch.no_grad()(step)


def attention32(variant):
    """Attention in fp32 with TF32 products, forward only, written out or fused."""
    torch.backends.cuda.matmul.allow_tf32 = True
    q, k, v = (torch.randn(4, 12, 1024, 64, device="cuda") for _ in "qkv")

    def step():
        if variant == "sdpa":
            return F.scaled_dot_product_attention(q, k, v)
        return ((q @ k.transpose(-2, -1)) / 8).softmax(-1) @ v

    return torch.no_grad()(step)


def odd_width(variant):
    """An MLP in bf16 whose hidden width is no multiple of 8, forward and backward."""
    width = 5456 if variant == "padded" else 5461
    up, down = (torch.nn.Linear(*size).cuda().to(torch.bfloat16) for size in ((2048, width), (width, 2048)))
    x = torch.randn(8192, 2048, device="cuda", dtype=torch.bfloat16)

    def step():
        down(F.gelu(up(x))).sum().backward()
        for layer in (up, down):
            layer.weight.grad = layer.bias.grad = None

    return step


def experts(variant):
    """Sixty-four experts, one product after the other or one batched product."""
    weights = torch.randn(64, 1024, 1024, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(64, 128, 1024, device="cuda", dtype=torch.bfloat16)

    def loop():
        out = torch.empty_like(x)
        for expert in range(64):
            out[expert] = x[expert] @ weights[expert]
        return out

    return torch.no_grad()(loop if variant == "loop" else lambda: torch.bmm(x, weights))


def trained(variant):
    """A training step of a GPT-2 whose vocabulary is a multiple of 8, eager or compiled."""
    config = transformers.GPT2Config(
        vocab_size=50304, n_layer=6, n_embd=768, n_head=12, n_positions=512, attn_implementation="sdpa", use_cache=False
    )
    model = transformers.GPT2LMHeadModel(config).cuda().to(torch.bfloat16).train()
    tokens = torch.randint(50000, (16, 512), device="cuda")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    run = torch.compile(model) if variant == "compile" else model

    def step():
        run(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def images(variant):
    """ResNet-50 reads one image in bf16."""
    model = torchvision.models.resnet50().cuda().to(torch.bfloat16).to(memory_format=torch.channels_last).eval()
    x = torch.randn(1, 3, 224, 224, device="cuda", dtype=torch.bfloat16).to(memory_format=torch.channels_last)
    if variant == "compile":
        model = torch.compile(model)
    step = torch.no_grad()(lambda: model(x))
    return graphed(step) if variant == "graph" else step


def autocast(variant):
    """An MLP in inference: autocast casts its fp32 weights in each step, or they are cast once before."""
    layers = [torch.nn.Linear(4096, 4096) for _ in range(12)]
    model = torch.nn.Sequential(*layers).cuda().eval()
    x = torch.randn(512, 4096, device="cuda")
    if variant == "cast_once":
        model, x = model.to(torch.bfloat16), x.to(torch.bfloat16)
    return torch.no_grad()(torch.autocast("cuda", torch.bfloat16, enabled=variant == "each_step")(lambda: model(x)))


def logits(variant):
    """Prefill of a Llama with a large vocabulary: the logits of all tokens, of which the last are used."""
    config = transformers.LlamaConfig(
        vocab_size=128256, hidden_size=1024, intermediate_size=3072, num_hidden_layers=8, num_attention_heads=16,
        num_key_value_heads=8,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).cuda().to(torch.bfloat16).eval()
    tokens = torch.randint(128256, (4, 1024), device="cuda")
    return torch.no_grad()(lambda: model(tokens, use_cache=False).logits[:, -1].argmax(-1))


def guards(variant):
    """A compiled function of few small kernels and many guards, with its guards or without."""
    parameters = [torch.randn(64, device="cuda") for _ in range(100)]

    def total(x):
        for one in parameters:
            x = x + one
        return x

    options = {"guard_filter_fn": torch.compiler.skip_all_guards_unsafe} if variant == "compile_skipped" else {}
    fn = torch.compile(total, options=options)
    x = torch.randn(64, device="cuda")
    return torch.no_grad()(lambda: fn(x))


def results(variant):
    """A model whose large result the CPU reads in each step, at once or one step later."""
    layers = torch.nn.Sequential(*(torch.nn.Linear(4096, 4096) for _ in range(4))).cuda().to(torch.bfloat16)
    x = torch.randn(16384, 4096, device="cuda", dtype=torch.bfloat16)
    if variant == "at_once":
        return torch.no_grad()(lambda: layers(x).cpu())
    side, current = torch.cuda.Stream(), torch.cuda.current_stream()
    buffers = [torch.empty(16384, 4096, dtype=torch.bfloat16, pin_memory=True) for _ in range(2)]
    number, copied = iter(range(10**9)), []

    def step():
        out = layers(x)
        side.wait_stream(current)
        with torch.cuda.stream(side):
            buffers[next(number) % 2].copy_(out, non_blocking=True)
            copied.append(side.record_event())
        out.record_stream(side)
        if len(copied) > 1:
            copied.pop(0).synchronize()

    return torch.no_grad()(step)


def augmented(variant):
    """Training on images that are cropped and scaled on the CPU: between the steps, or by a DataLoader's workers."""
    crop = v2.Compose(
        [
            v2.RandomResizedCrop(224, antialias=True),
            v2.RandomHorizontalFlip(),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize([0.5] * 3, [0.2] * 3),
        ]
    )
    data, targets = torch.randint(0, 256, (64, 3, 256, 256), dtype=torch.uint8), torch.randint(0, 1000, (64,))

    class Images(Dataset):
        def __len__(self):
            return 10**6

        def __getitem__(self, index):
            return crop(data[index % 64]), targets[index % 64]

    model = torchvision.models.resnet18().cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if variant == "workers":
        batches = iter(DataLoader(Images(), 32, num_workers=12, pin_memory=True, prefetch_factor=4))
    number = iter(range(0, 10**9, 32))

    def batch():
        if variant == "workers":
            return next(batches)
        first = next(number)
        images, labels = zip(*(Images()[index] for index in range(first, first + 32)), strict=True)
        return torch.stack(images), torch.stack(labels)

    def step():
        images, labels = batch()
        loss = F.cross_entropy(model(images.cuda(non_blocking=True)), labels.cuda(non_blocking=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


def lengths(variant):
    """Four tokens of a small Llama whose cache grows, so that attention has a new length for each token.

    static: a cache of fixed size, and each token is the replay of a CUDA graph.
    """
    torch.backends.cuda.enable_cudnn_sdp(variant == "cudnn")
    config = transformers.LlamaConfig(
        vocab_size=32000, hidden_size=1024, intermediate_size=2816, num_hidden_layers=8, num_attention_heads=16,
        num_key_value_heads=16, max_position_embeddings=4096,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).cuda().to(torch.bfloat16).eval()
    is_static = variant == "static"
    cache = (
        transformers.StaticCache(config=config, max_cache_len=1024)
        if is_static
        else transformers.DynamicCache(config=config)
    )
    token = torch.ones(1, 1, dtype=torch.long, device="cuda")

    @torch.no_grad()
    def one_token():
        token.copy_(model(input_ids=token, past_key_values=cache).logits.argmax(-1))

    one = graphed(one_token) if is_static else one_token
    return lambda: [one() for _ in range(4)]


WORKLOADS = {
    vit: ("eager", "graph", "compile"),
    pointwise: ("eager", "compile"),
    copies: ("blocking", "prefetched"),
    resnet: ("fp32", "tf32", "bf16_channels_last"),
    gpt2: ("sdpa", "padded", "eager_attention", "recompute"),
    optimizer: ("forloop", "foreach", "fused", "graph"),
    loader: ("inline", "workers"),
    syncs: ("item", "none", "end"),
    attention: ("naive", "sdpa"),
    encoder: ("fp32", "tf32", "bf16", "bf16_compile"),
    decode: ("eager", "graph", "batch32"),
    small: ("loop", "batched"),
    python: ("loop", "ahead"),
    products: ("eager", "compile"),
    conv_layout: ("contiguous", "channels_last"),
    # Recorded after the predictions had been written, to check them on what they were not fitted to.
    bert: ("eager", "graph"),
    unet: ("contiguous", "channels_last", "compile"),
    lstm: ("cells", "graph", "cudnn"),
    llama: ("sdpa", "eager_attention", "compile"),
    convnet: ("forloop", "fused", "graph"),
    selection: ("chosen", "multiplied"),
    pinned: ("same_stream", "prefetched"),
    attention32: ("naive", "sdpa"),
    odd_width: ("odd", "padded"),
    experts: ("loop", "batched"),
    trained: ("eager", "compile"),
    images: ("eager", "graph", "compile"),
    # Of changes that were written later; the predictions came first here, too.
    autocast: ("each_step", "cast_once"),
    logits: ("all",),
    guards: ("compile", "compile_skipped"),
    results: ("at_once", "a_step_later"),
    lengths: ("cudnn", "flash", "static"),
    augmented: ("main_process", "workers"),
    batch_norm: ("eager", "compile", "graph", "graph_kept"),
}


def graphed(step):
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def unprofiled_us(step):
    """The median step of several blocks of steps, each block with one synchronization at its end."""
    torch.cuda.synchronize()
    begin = time.perf_counter()
    step()
    torch.cuda.synchronize()
    steps = max(3, min(50, round(0.1 / (time.perf_counter() - begin))))
    times = []
    for _ in range(5):
        begin = time.perf_counter()
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - begin) / steps * 1e6)
    return statistics.median(times)


def record(make, variant, path):
    torch.manual_seed(0)
    step = make(variant)
    for _ in range(8 if "compile" in variant else 5):
        step()
    us = unprofiled_us(step)
    with profile(schedule=schedule(wait=1, warmup=1, active=RECORDED), record_shapes=True) as prof:
        for number in range(2 + RECORDED):
            step()
            if number == 2:  # torch takes metadata only while it records
                prof.add_metadata_json("unprofiled_step_us", json.dumps(us))
            prof.step()
    plain = path.with_suffix("")
    prof.export_chrome_trace(str(plain))
    path.write_bytes(gzip.compress(plain.read_bytes(), 9, mtime=0))
    plain.unlink()
    print(f"{make.__name__} {variant}: {us:,.1f} us without the profiler, {path.stat().st_size:,} B", flush=True)


def main(folder, *names):
    for make, variants in WORKLOADS.items():
        for variant in variants:
            if names and make.__name__ not in names:
                continue
            path = Path(folder) / make.__name__ / f"{variant}.json.gz"
            path.parent.mkdir(parents=True, exist_ok=True)
            # A fork shares the imports, which take longer than the runs; CUDA starts in the child alone.
            child = multiprocessing.get_context("fork").Process(target=record, args=(make, variant, path))
            child.start()
            child.join()
            if child.exitcode:
                print(f"{make.__name__} {variant}: failed", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
