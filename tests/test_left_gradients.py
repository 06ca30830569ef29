"""Gradients that each step adds to, because nothing clears them. If they come last, their backward is for nothing."""

import json
from itertools import pairwise

import pytest
import torch
from test_opportunities import priced_changes
from torch import nn
from torch.profiler import ProfilerActivity, profile, schedule
from torch.utils.checkpoint import checkpoint

GIVES = "torch::autograd::AccumulateGrad"
NODE = "autograd::engine::evaluate_function: "


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


def recorded(step, file):
    """Record three steps, and return the events of each."""
    with profile(
        activities=[ProfilerActivity.CPU],
        schedule=schedule(wait=3, warmup=1, active=3),
        record_shapes=True,
        on_trace_ready=lambda done: done.export_chrome_trace(str(file)),
    ) as profiler:
        for _ in range(7):
            step()
            profiler.step()
    events = [one for one in json.loads(file.read_text())["traceEvents"] if one.get("ph") == "X"]
    steps = [one for one in events if one["name"].startswith("ProfilerStep#")]
    return [[one for one in events if inside(one, step)] for step in steps]


def inside(one, outer):
    return outer["ts"] <= one["ts"] < outer["ts"] + outer["dur"]


@pytest.mark.parametrize("program", [head_alone, teacher, condition])
def test_a_model_that_is_not_trained_needs_no_backward(program, tmp_path):
    spent = []
    for events in recorded(program(True), tmp_path / "with.json"):
        giving = [one for one in events if one["name"] == GIVES]
        adding = [node for node in giving if any(x["name"] == "aten::add_" and inside(x, node) for x in events)]
        new = max(one["ts"] for one in giving if one not in adding)
        later = [one for one in events if one["name"].startswith(NODE) and one["ts"] > new]
        spent.append(sum(one["dur"] for one in later))
    proposal = priced_changes(tmp_path / "with.json")["no_autograd"]
    assert f"adds to {len(adding)} gradients that the step before left, in {len(later)} ops" in proposal.evidence
    assert "no_grad" in proposal.how
    assert proposal.saves_us >= 0.9 * min(spent) > 0  # the time between these ops, too
    recorded(program(False), tmp_path / "without.json")
    assert "no_autograd" not in priced_changes(tmp_path / "without.json")


@pytest.mark.parametrize("program", [loss_network, accumulation, shared_layer, every_second_step])
def test_gradients_that_are_used_are_not_called_left(program, tmp_path):
    recorded(program(), tmp_path / "trace.json")
    assert "no_autograd" not in priced_changes(tmp_path / "trace.json")
