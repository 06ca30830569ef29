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
    how = {"forloop": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}[variant]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, **how)

    def step():
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


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


WORKLOADS = {
    vit: ("eager", "graph", "compile"),
    pointwise: ("eager", "compile"),
    copies: ("blocking", "prefetched"),
    resnet: ("fp32", "tf32", "bf16_channels_last"),
    gpt2: ("sdpa", "padded", "eager_attention", "recompute"),
    optimizer: ("forloop", "foreach", "fused"),
    loader: ("inline", "workers"),
    syncs: ("item", "none", "end"),
    attention: ("naive", "sdpa"),
    encoder: ("fp32", "tf32", "bf16", "bf16_compile"),
    decode: ("eager", "graph", "batch32"),
    small: ("loop", "batched"),
    python: ("loop", "ahead"),
    products: ("eager", "compile"),
    conv_layout: ("contiguous", "channels_last"),
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
