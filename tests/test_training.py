"""The parts of a training step are compared with the raw events of runs recorded here and on an H200."""

import gzip
import itertools
import json
import time

import pytest
import torch
from raw_events import event
from references import ROOT
from torch.profiler import ProfilerActivity, profile, record_function, schedule
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset

from tracereader import cli
from tracereader.figures import summarize
from tracereader.figures.places import _modules_around
from tracereader.findings import cheatsheet
from tracereader.trace import read

LAYERS = 3


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(16, 64), torch.nn.Linear(64, 16)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


class Slow(Dataset):
    def __len__(self):
        return 100

    def __getitem__(self, index):
        time.sleep(0.05)  # far more than the step takes
        return torch.ones(16)


def record(file, how=None, again=None, twice=False, loader=False, stacks=False):
    """Return three steps of a small model, trained with AdamW, as torch's profiler writes them."""
    torch.manual_seed(0)
    blocks = torch.nn.Sequential(*[Block() for _ in range(LAYERS)])
    optimizer = torch.optim.AdamW(blocks.parameters(), **{"foreach": False, **({how: True} if how else {})})
    batches = iter(DataLoader(Slow(), batch_size=1)) if loader else None

    def step():
        x = next(batches) if loader else torch.ones(8, 16)
        with record_function("forward"):
            x.requires_grad_()
            out = x
            for block in blocks:
                out = out + (checkpoint(block, out, use_reentrant=again == "reentrant") if again else block(out))
            loss = out.square().mean()
        with record_function("backward"):
            if twice:  # a gradient penalty: backward's own ops are recorded, and differentiated
                (slope,) = torch.autograd.grad(loss, x, create_graph=True)
                loss = loss + slope.square().sum()
            if twice != "in vain":
                loss.backward()
        with record_function("optimizer"):
            optimizer.step()
            optimizer.zero_grad()

    step()
    options = {"record_shapes": True, "profile_memory": True, "with_stack": stacks}
    plan = schedule(wait=0, warmup=1, active=2, repeat=1)
    with profile(activities=[ProfilerActivity.CPU], schedule=plan, **options) as prof:
        for _ in range(3):
            step()
            prof.step()
    prof.export_chrome_trace(str(file))
    return summarize(read(file)), json.loads(file.read_text())["traceEvents"]


def end(event):
    return event["ts"] + event["dur"]


def inside(events, outer):
    return [
        e for e in events
        if e is not outer and e.get("ph") == "X" and e["tid"] == outer["tid"] and outer["ts"] <= e["ts"] < end(outer)
    ]  # fmt: skip


def step_of(ours, events):
    return next(e for e in events if e["name"] == ours.typical_step and e.get("cat") == "user_annotation")


@pytest.mark.parametrize("again", ["reentrant", "by hooks"])
def test_recomputed_ops(tmp_path, again):
    ours, events = record(tmp_path / "a.json", again=again)
    (backward,) = [e for e in inside(events, step_of(ours, events)) if e["name"] == "backward"]
    linear = [e for e in inside(events, backward) if e["name"] == "aten::linear"]
    assert len(linear) == 2 * LAYERS
    found = ours.training.recomputed
    # In each block two linears, a relu and, where all of it runs again, an add.
    assert found.calls in (3 * LAYERS, 4 * LAYERS)
    assert found.cpu_us > sum(e["dur"] for e in linear)
    assert found.cpu_us < backward["dur"]
    assert any(one.name == "recomputation" for one, _ in cheatsheet.found(ours))


def test_recomputed_ops_belong_to_their_own_module(tmp_path):
    """They do not belong to the module of the backward op that needs them first."""
    record(tmp_path / "a.json", again="by hooks", stacks=True)
    trace = read(tmp_path / "a.json")
    linear = [op for op in trace.steps[0].walk() if op.name == "aten::linear"]
    assert len(linear) == 4 * LAYERS
    for op in linear:
        modules, backward = _modules_around(trace, op)
        assert modules[-1].name.startswith("nn.Module: Linear") and not backward
    backward = [op for op in trace.steps[0].walk() if op.name == "AddmmBackward0"]
    assert [_modules_around(trace, op.children[-1])[1] for op in backward] == [True] * 2 * LAYERS


@pytest.mark.parametrize("twice", [False, True, "in vain"])
def test_nothing_is_recomputed_without_checkpoints(tmp_path, twice):
    """The backward is recorded to be differentiated, as for a force from an energy, and never is."""
    ours, events = record(tmp_path / "a.json", twice=twice)
    (backward,) = [e for e in inside(events, step_of(ours, events)) if e["name"] == "backward"]
    within = [e for e in inside(events, backward) if e.get("cat") == "cpu_op"]
    nodes = [e for e in within if e["name"].startswith("autograd::engine::evaluate_function: Addmm")]
    recorded = [e for e in within if e["name"] == "aten::mm" and e["args"].get("Sequence number", -1) >= 0]
    assert nodes and bool(recorded) is bool(twice)
    assert not any(e["name"] == "aten::linear" for e in within)
    assert ours.training.recomputed is None


@pytest.mark.parametrize("how", [None, "foreach", "fused"])
def test_the_optimizer_and_its_implementation(tmp_path, how):
    ours, events = record(tmp_path / "a.json", how=how)
    (raw,) = [e for e in inside(events, step_of(ours, events)) if e["name"] == "Optimizer.step#AdamW.step"]
    (found,) = ours.training.optimizers
    assert (found.name, found.how, found.launches) == ("AdamW", how or "for-loop", 0)
    assert found.cpu_us == pytest.approx(raw["dur"])


@pytest.mark.parametrize("own_thread", [False, True])
def test_an_optimizer_that_calls_a_closure(tmp_path, capsys, own_thread):
    """Its forward and backward, twice per step, are not the optimizer's time. On a GPU backward has its own thread."""
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2, max_eval=2, tolerance_grad=0, tolerance_change=0)

    def closure():
        optimizer.zero_grad()
        loss = model(torch.ones(8, 16)).square().mean()
        loss.backward()
        return loss

    with profile(activities=[ProfilerActivity.CPU], schedule=schedule(wait=0, warmup=1, active=2, repeat=1)) as prof:
        for _ in range(3):
            optimizer.step(closure)
            prof.step()
    file = tmp_path / "a.json"
    prof.export_chrome_trace(str(file))
    document = json.loads(file.read_text())
    events = [e for e in document["traceEvents"] if e.get("ph") == "X"]
    nodes = [e for e in events if e["name"].startswith("autograd::engine::evaluate_function")]
    if own_thread:
        for node in nodes:
            for event in [*inside(events, node), node]:
                event["tid"] = 7
        file.write_text(json.dumps(document))
    ours = summarize(read(file))
    (update,) = [e for e in inside(events, step_of(ours, events)) if e["name"] == "Optimizer.step#LBFGS.step"]
    called = [e for e in nodes if update["ts"] <= e["ts"] < end(update)]
    numbers = {e["args"]["Sequence number"] for e in called if "Sequence number" in e["args"]}
    ops = [
        e for e in events
        if e.get("cat") == "cpu_op" and e["args"].get("Sequence number") in numbers and e not in called
        and update["ts"] <= e["ts"] < end(update) and not any(e in inside(events, node) for node in called)
    ]  # fmt: skip
    outermost = [e for e in ops if not any(e in inside(events, other) for other in ops)]
    assert sum(e["name"] == "aten::linear" for e in outermost) == 4
    forward, backward = (sum(e["dur"] for e in some) for some in (outermost, called))
    (found,) = ours.training.optimizers
    assert found.forward_us == pytest.approx(forward, abs=0.1)
    assert found.backward_us == pytest.approx(backward, abs=0.1)
    assert found.cpu_us == pytest.approx(update["dur"] - forward - backward, abs=0.1)
    assert cli.main([str(file), "--only", "training"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "of backward that run in it" in shown and "of forward and" in shown


def test_an_optimizer_that_backward_calls_has_no_closure(tmp_path):
    """Backward calls one for each gradient that is ready, and other parameters' backward may run at the same time."""
    first, second = (torch.ones(8, requires_grad=True) for _ in range(2))
    for one in (first, second):
        update = torch.optim.SGD([one], lr=0.1)
        one.register_post_accumulate_grad_hook(lambda _, update=update: update.step())
    with profile(activities=[ProfilerActivity.CPU]) as prof:
        (first * second).sum().backward()
    file = tmp_path / "a.json"
    prof.export_chrome_trace(str(file))
    document = json.loads(file.read_text())
    events = [e for e in document["traceEvents"] if e.get("ph") == "X"]
    updates = [e for e in events if e["name"] == "Optimizer.step#SGD.step"]
    name = "autograd::engine::evaluate_function: MulBackward0"
    beside = {"ph": "X", "cat": "cpu_op", "name": name, "pid": updates[0]["pid"], "tid": 7, "args": {}}
    document["traceEvents"].append({**beside, "ts": updates[0]["ts"] + 1, "dur": 1})
    file.write_text(json.dumps(document))
    (found,) = summarize(read(file)).training.optimizers
    assert len(updates) == 2 and found.cpu_us == pytest.approx(sum(e["dur"] for e in updates), abs=0.1)
    assert (found.forward_us, found.backward_us) == (0, 0)


def test_the_wait_for_the_loader(tmp_path, capsys):
    ours, events = record(tmp_path / "a.json", loader=True)
    step = step_of(ours, events)
    waits = [e for e in inside(events, step) if e["name"].startswith("enumerate(DataLoader)#")]
    assert len(waits) == 1
    assert ours.training.loading.us == pytest.approx(waits[0]["dur"])
    assert ours.training.loading.share == pytest.approx(waits[0]["dur"] / step["dur"])
    assert cli.main([str(tmp_path / "a.json")]) == 0
    told = capsys.readouterr().out
    assert "prepare batches ahead" in told and "a step that waits for the DataLoader" not in told
    assert cli.main([str(tmp_path / "a.json"), "--only", "patterns"]) == 0
    assert "a step that waits for the DataLoader" in capsys.readouterr().out


def test_memory_and_where_its_peak_is(tmp_path, capsys):
    ours, events = record(tmp_path / "a.json")
    step = step_of(ours, events)
    raw = [e for e in events if e["name"] == "[memory]" and step["ts"] <= e["ts"] < end(step)]
    assert all(e["args"]["Device Id"] == -1 for e in raw)
    peak = max(raw, key=lambda e: e["args"]["Total Allocated"])
    found = ours.training.memory
    assert found.peak_bytes == peak["args"]["Total Allocated"] == max(found.points)
    assert found.end_bytes == raw[-1]["args"]["Total Allocated"]
    assert found.peak_at == pytest.approx((peak["ts"] - step["ts"]) / step["dur"], abs=1e-6)
    around = [e["name"] for e in inside(events, step) if e["ts"] <= peak["ts"] < end(e) and e["tid"] == peak["tid"]]
    assert found.phase in around and found.phase in ("forward", "backward", "optimizer")
    assert found.op in around
    for point, most in enumerate(found.points):
        left, right = (step["ts"] + step["dur"] * edge / len(found.points) for edge in (point, point + 1))
        totals = [e["args"]["Total Allocated"] for e in raw if left + 0.01 < e["ts"] < right - 0.01]
        assert most >= max(totals, default=0)
    assert cli.main([str(tmp_path / "a.json"), "--only", "training"]) == 0
    shown = capsys.readouterr().out
    assert f"at {found.peak_at:.0%} of the step, allocated in {found.phase}" in shown
    (curve,) = [line for line in shown.splitlines() if set(line.strip()) <= set("▁▂▃▄▅▆▇█") and line.strip()]
    assert len(curve.strip()) == len(found.points) and "█" in curve


def of_an_h200(name):
    path = ROOT / f"tests/traces/{name}.json.gz"
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    ours = summarize(read(path))
    calls = {
        e["args"]["correlation"]: e for e in events
        if e.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in e["args"]
    }  # fmt: skip
    step = step_of(ours, events)
    launched = [
        (calls[e["args"]["correlation"]], e) for e in events
        if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset") and e["args"]["correlation"] in calls
        and step["ts"] <= calls[e["args"]["correlation"]]["ts"] < end(step)
    ]  # fmt: skip
    return ours, events, step, launched


@pytest.mark.parametrize("name", ["train_item", "train_stack"])
def test_backward_by_forward_op_and_the_optimizers_launches(name):
    ours, events, step, launched = of_an_h200(name)
    flows = {(e["tid"], e["ts"]) for e in events if e.get("cat") == "fwdbwd" and e["ph"] == "f"}
    backward = [e for e in events if e.get("ph") == "X" and (e["tid"], e["ts"]) in flows]
    expected = sum(
        work["dur"] for call, work in launched
        if any(op["tid"] == call["tid"] and op["ts"] <= call["ts"] < end(op) for op in backward)
    )  # fmt: skip
    assert sum(one.gpu_us for one in ours.training.backward_of) == pytest.approx(expected, rel=1e-4)
    assert {"aten::addmm", "aten::native_layer_norm", "aten::gelu"} <= {one.name for one in ours.training.backward_of}
    (update,) = [e for e in inside(events, step) if e["name"] == "Optimizer.step#AdamW.step"]
    mine = [work for call, work in launched if any(e is call for e in inside(events, update))]
    (found,) = ours.training.optimizers
    assert (found.how, found.launches) == ("for-loop", len(mine))
    assert found.gpu_us == pytest.approx(sum(e["dur"] for e in mine), rel=1e-4)


@pytest.mark.parametrize(("name", "asking"), [("train_item", "aten::item"), ("blocking", "aten::to")])
def test_a_synchronization_and_what_it_costs(name, asking):
    ours, events, step, launched = of_an_h200(name)
    to_pageable = [launch for launch, work in launched if "Pageable" in work["name"]]  # these block, too
    assert len(to_pageable) == (1 if name == "blocking" else 0)
    calls = [e for e in inside(events, step) if e["cat"].startswith("cuda_")]
    raw = [e for e in calls if "Synchronize" in e["name"] or any(e is call for call in to_pageable)]
    assert sum(one.calls for one in ours.training.syncs) == len(raw)
    assert sum(one.cpu_us for one in ours.training.syncs) == pytest.approx(sum(e["dur"] for e in raw))
    assert ours.training.syncs[0].asked_by == asking
    busy = [(e["ts"], end(e)) for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    charged = [(e["ts"], end(e)) for e in raw]
    for call in raw:
        after = [launch for launch, _ in launched if launch["ts"] >= end(call)]
        charged += [(e["ts"], end(e)) for e in sorted(after, key=lambda e: e["ts"])[:1]]
    edges = sorted({edge for span in [*charged, *busy] for edge in span})
    idle = sum(
        right - left for left, right in itertools.pairwise(edges)
        if any(start <= left and right <= close for start, close in charged)
        and not any(start <= left and right <= close for start, close in busy)
    )  # fmt: skip
    assert sum(one.idle_us for one in ours.training.syncs) == pytest.approx(idle, abs=0.1)


def test_idle_time_is_charged_once(tmp_path):
    """Python prepares a batch for 2,000 µs after a short synchronization, and another waits inside the DataLoader."""
    events = [
        event("ProfilerStep#1", "user_annotation", 0, 3000),
        event("cudaDeviceSynchronize", "cuda_runtime", 100, 14),
        event("cudaLaunchKernel", "cuda_runtime", 2200, 6, correlation=1),
        event("k", "kernel", 2210, 90, 7, correlation=1, device=0, stream=7),
        event("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", "user_annotation", 2400, 500),
        event("cudaStreamSynchronize", "cuda_runtime", 2500, 30),
        event("cudaLaunchKernel", "cuda_runtime", 2950, 5, correlation=2),
        event("k", "kernel", 2960, 20, 7, correlation=2, device=0, stream=7),
    ]
    (tmp_path / "a.json").write_text(json.dumps({"traceEvents": events}))
    found = summarize(read(tmp_path / "a.json")).training
    assert {one.call: one.idle_us for one in found.syncs} == {
        "cudaDeviceSynchronize": 14 + 6, "cudaStreamSynchronize": 30 + 5,
    }  # fmt: skip
    assert (found.loading.us, found.loading.idle_us) == (500, 470)


def test_idle_time_between_ops_is_named_by_python_function(tmp_path):
    """A function of many short calls is named as a whole; a built-in function counts for the one that calls it."""
    python = "python_function"
    events = [
        event("ProfilerStep#1", "user_annotation", 0, 1000),
        event("train.py(9): main", python, 0, 1000), event("data.py(3): resize", python, 10, 600),
        *(event(f"data.py({n}): clip", python, 20 + 8 * n, 6) for n in range(60)),
        event("train.py(5): pause", python, 650, 200),
        event("<built-in function sleep>", python, 660, 180),
        event("aten::mm", "cpu_op", 900, 50),
        event("cudaLaunchKernel", "cuda_runtime", 920, 10, correlation=1),
        event("k", "kernel", 935, 20, 7, correlation=1, device=0, stream=7),
    ]  # fmt: skip
    (tmp_path / "a.json").write_text(json.dumps({"traceEvents": events}))
    ours = summarize(read(tmp_path / "a.json"))
    assert ours.idle_in == {"Python, between ops": 900, "aten::mm": 20, "cudaLaunchKernel": 10}
    assert ours.idle_python == {"data.py(3): resize": 600, "train.py(5): pause": 200, "train.py(9): main": 100}
