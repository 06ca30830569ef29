"""Forward, backward, optimizer and modules of a model of one's own on the CPU, against the raw events."""

import json
import re

import pytest
import torch
from raw_events import end, raw_steps
from torch import nn
from torch.profiler import ProfilerActivity, profile, schedule

from tracereader import cli
from tracereader.figures import summarize
from tracereader.trace import read

EVALUATED = "autograd::engine::evaluate_function: "


def recorded(file, with_stack, train=True):
    """Return three steps of a small convolutional network, written without annotations."""
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(8 * 12 * 12, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    images, targets = torch.randn(4, 3, 16, 16), torch.randint(0, 10, (4,))
    config = torch._C._profiler._ExperimentalConfig(verbose=True)
    with profile(
        activities=[ProfilerActivity.CPU],
        schedule=schedule(wait=0, warmup=1, active=3, repeat=1),
        with_stack=with_stack,
        experimental_config=config,
    ) as profiler:
        for _ in range(4):
            with torch.set_grad_enabled(train):
                loss = nn.functional.cross_entropy(model(images / images.std()), targets)
            if train:
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            loss.item()
            profiler.step()
    profiler.export_chrome_trace(str(file))
    return file


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "stacks"])
def own(request, tmp_path_factory):
    file = recorded(tmp_path_factory.mktemp("own") / "cnn.json", request.param)
    document = json.loads(file.read_text())
    summary = summarize(read(file))
    events = [e for e in document["traceEvents"] if e.get("ph") == "X"]
    (mark,) = [e for e in raw_steps(events) if e["name"] == summary.typical_step]
    mine = [e for e in events if mark["ts"] <= e["ts"] < end(mark)]
    flows = [e for e in document["traceEvents"] if e.get("cat") == "fwdbwd"]
    return request.param, summary, mark, mine, flows, file


def test_a_step_without_annotations_is_split_by_autograds_events(own):
    stacks, summary, mark, events, flows, _ = own
    found = {place.name: place.cpu_us for place in summary.places.by_phase}
    assert list(found) == ["forward", "backward", "optimizer", "outside them"]
    assert sum(found.values()) == pytest.approx(mark["dur"], abs=0.01)
    backward = [e for e in events if e["name"].startswith(EVALUATED)]
    assert found["backward"] == pytest.approx(max(map(end, backward)) - min(e["ts"] for e in backward), abs=0.01)
    labels = [e for e in events if e["name"].startswith("Optimizer.") and e["cat"] == "user_annotation"]
    assert found["optimizer"] == pytest.approx(sum(e["dur"] for e in labels), abs=0.01)
    begun = {(e["tid"], e["ts"]) for e in flows if e["ph"] == "s"}
    forward = [e for e in events if e["cat"] == "cpu_op" and (e["tid"], e["ts"]) in begun]
    # cross_entropy is the last of them; the model's own frame begins before the first.
    first = min(e["ts"] for e in forward)
    if stacks:
        first = min(e["ts"] for e in events if e["name"].startswith("nn.Module: Sequential"))
    assert found["forward"] == pytest.approx(max(map(end, forward)) - first, abs=0.01)


def test_the_split_is_printed(own, capsys):
    stacks, summary, *_, file = own
    assert cli.main([str(file)]) == 0
    printed = capsys.readouterr().out
    for place in summary.places.by_phase:
        rows = [line for line in printed.splitlines() if line.split()[:1] == place.name.split()[:1]]
        figures = [figure.replace(",", "") for row in rows for figure in re.findall(r"\d[\d,]*\.\d+", row)]
        # A busy machine takes longer, and a longer column has another unit: its last digit is rounded.
        assert any(abs(float(figure) - place.cpu_us / unit) <= 0.51 * 10.0 ** -len(figure.split(".")[1])
                   for figure in figures for unit in (1, 1e3, 1e6))  # fmt: skip
    assert "by phase, from autograd's events" in printed and ("ops by module" in printed) is stacks


def test_ops_go_to_the_module_that_called_them_and_backwards_ops_to_their_forward_ops(own):
    stacks, summary, _, events, _, _ = own
    if not stacks:
        assert not summary.places.by_module
        return
    ops = [e for e in events if e["cat"] == "cpu_op"]
    outermost = [
        e for e in ops
        if not any(o is not e and o["tid"] == e["tid"] and o["ts"] <= e["ts"] and end(e) <= end(o) for o in ops)
    ]  # fmt: skip
    assert sum(place.cpu_us for place in summary.places.by_module) == pytest.approx(
        sum(e["dur"] for e in outermost), abs=0.01
    )
    assert sum(place.pieces for place in summary.places.by_module) == len(outermost)
    found = {place.name: place for place in summary.places.by_module}
    frames = [e for e in events if e["name"].startswith("nn.Module: ") and "Sequential" not in e["name"]]
    for frame in frames:
        inside = [e for e in outermost if e["tid"] == frame["tid"] and frame["ts"] <= e["ts"] < end(frame)]
        place = found[frame["name"].removeprefix("nn.Module: ")]
        assert (place.pieces, place.cpu_us) == (len(inside), pytest.approx(sum(e["dur"] for e in inside), abs=0.01))
    assert {f"{name} backward" for name in ("Conv2d_0", "Conv2d_1", "Linear_0", "ReLU_0")} <= set(found)


def test_without_a_backward_there_are_no_phases(tmp_path):
    assert summarize(read(recorded(tmp_path / "eval.json", False, train=False))).places.by_phase == ()


@pytest.mark.parametrize(("names", "cut"), [(["my step"], True), (["one half", "the other"], False)])
def test_two_user_annotations_replace_autograds_phases(own, tmp_path, names, cut):
    """One annotation around the step does not show its phases."""
    *_, file = own
    document = json.loads(file.read_text())
    for mark in raw_steps([e for e in document["traceEvents"] if e.get("ph") == "X"]):
        edges = [mark["ts"] + 0.01 * at for at in range(len(names))]  # before any op
        ends = [*(edge + 0.005 for edge in edges[:-1]), end(mark) - 0.01]
        document["traceEvents"] += [
            {**mark, "name": name, "ts": start, "dur": round(stop - start, 3)}
            for name, start, stop in zip(names, edges, ends, strict=True)
        ]
    labelled = tmp_path / "labelled.json"
    labelled.write_text(json.dumps(document))
    assert bool(summarize(read(labelled)).places.by_phase) is cut
