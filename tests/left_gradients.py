"""Programs whose backward computes gradients that nothing clears, or that only look so. Each returns its step.

    python tests/left_gradients.py

records three steps of each on a CPU with nothing else to do, into tests/traces/cpu/left_gradients.
"""

import gzip
import sys
from itertools import pairwise
from pathlib import Path

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, schedule
from torch.utils.checkpoint import checkpoint


def mlp(*sizes):
    return nn.Sequential(*[nn.Sequential(nn.Linear(*pair), nn.Tanh()) for pair in pairwise(sizes)])


def head_alone(learns):
    """Only a head is trained, and the model before it is not told so."""
    body, head, x = mlp(64, 256, 256, 64).requires_grad_(learns), nn.Linear(64, 4), torch.randn(32, 64)
    optimizer = torch.optim.AdamW(head.parameters())

    def step():
        head(body(x)).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def teacher(learns):
    """A student learns from a teacher of the same sizes."""
    student, old, x = mlp(64, 256, 64), mlp(64, 256, 64), torch.randn(32, 64)
    optimizer = torch.optim.SGD(student.parameters(), 0.01, momentum=0.9)

    def step():
        with torch.set_grad_enabled(learns):
            target = old(x)
        loss = (student(x) - target).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


def condition(learns):
    """An encoder that is not trained gives a model its condition."""
    encoder, model = mlp(64, 256, 256, 64).requires_grad_(learns), nn.Bilinear(64, 64, 8)
    optimizer, x = torch.optim.Adam(model.parameters()), torch.randn(32, 64)

    def step():
        c = encoder(x)
        model(torch.randn(32, 64), c).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def loss_network():
    """The gradient of what is trained comes through the network that is not."""
    model, judge, x = mlp(64, 64), mlp(64, 256, 64), torch.randn(32, 64)
    optimizer = torch.optim.Adam(model.parameters())

    def step():
        judge(model(x)).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def accumulation():
    model, x = mlp(64, 256, 64), torch.randn(32, 64)
    optimizer = torch.optim.Adam(model.parameters())

    def step():
        for _ in range(3):
            model(x).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def shared_layer():
    """A layer's later calls, each of which has a backward of its own, add to the gradient of its first one."""
    first, layer, x = nn.Linear(64, 64), mlp(64, 256, 64), torch.randn(32, 64)
    optimizer = torch.optim.Adam([*first.parameters(), *layer.parameters()])

    def step():
        h = first(x)
        for _ in range(4):
            h = checkpoint(layer, h, use_reentrant=True)
        h.pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def every_second_step():
    """Some parameters are updated with the gradients of two steps."""
    slow, fast, x, count = mlp(64, 256, 64), nn.Linear(64, 4), torch.randn(32, 64), 0
    optimizers = torch.optim.SGD(fast.parameters(), 0.01), torch.optim.SGD(slow.parameters(), 0.01)

    def step():
        nonlocal count
        count += 1
        fast(slow(x)).pow(2).mean().backward()
        for one in optimizers[: 1 + (count % 2 == 0)]:
            one.step()
            one.zero_grad()

    return step


# Their models without an optimizer learn or do not: see the argument of each.
UNUSED = (head_alone, teacher, condition)
USED = (loss_network, accumulation, shared_layer, every_second_step)


def record(step, file):
    """Write the trace of three warm steps."""
    with profile(
        activities=[ProfilerActivity.CPU],
        schedule=schedule(wait=3, warmup=1, active=3),
        record_shapes=True,
        on_trace_ready=lambda done: done.export_chrome_trace(str(file)),
    ) as profiler:
        for _ in range(7):
            step()
            profiler.step()
    file.with_suffix(".json.gz").write_bytes(gzip.compress(file.read_bytes(), mtime=0))
    file.unlink()


def main():
    folder = Path(__file__).parent / "traces/cpu/left_gradients"
    folder.mkdir(exist_ok=True)
    torch.set_num_threads(1)
    for program in UNUSED:
        record(program(True), folder / f"{program.__name__}.json")
        record(program(False), folder / f"{program.__name__}_without.json")
    for program in USED:
        record(program(), folder / f"{program.__name__}.json")


if __name__ == "__main__":
    sys.exit(main())
