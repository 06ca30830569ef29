"""Few passes that can be one, and steps whose launches do not show what the CPU needs, from raw events.

Without the profiler the steps took on an H200: multi_crop_distillation (two and eight crops of two sizes) 223 ms, and
154 with each size as one batch; group_policy_update 454 and 229 with autocast. As a CUDA graph: bent_plate 52.8 and
9.5, cavity_flow 28.6 and 11.1, robot_imagination 161 and 24.3.
"""

from collections import Counter

import pytest
import torch
from cpu_programs import record
from raw_events import raw_steps, raw_work
from test_graph_changes import in_step
from test_kept_promises import base, measured_us, saved
from test_opportunities import priced_changes, raw_events
from torch import nn

from tracereader.changes import prices
from tracereader.changes.equal_passes import AGAIN, loops
from tracereader.replay import graph_of
from tracereader.replay.changes import cuda_graph, with_cpu_speed
from tracereader.trace import read

REPLAYED = 0.02  # the error of the replay, by which each printed range is wider


def first_step(program):
    events = raw_events(base(program))
    return events, raw_steps(events)[1]


def calls_of(events, mark):
    """Return the calls of modules that lie in no other module, in order."""
    calls = sorted(in_step(events, mark, "python_function"), key=lambda e: (e["ts"], -e["dur"]))
    found, until = [], 0
    for e in calls:
        if e["name"].startswith("nn.Module") and e["ts"] >= until:
            found.append(e)
            until = e["ts"] + e["dur"]
    return found


def test_crops_of_one_size_are_one_batch_although_the_model_joins_a_class_token():
    events, mark = first_step("multi_crop_distillation")
    calls = Counter(e["name"] for e in calls_of(events, mark))
    shapes = Counter(
        str(e["args"]["Input Dims"][0]) for e in in_step(events, mark, "cpu_op") if e["name"] == "aten::conv2d"
    )
    (student, count), few = calls.most_common()[0], min(shapes.values())
    assert count == max(shapes.values()) + 2, f"two of {student} are larger, as those of the teacher are"
    one = priced_changes(base("multi_crop_distillation"))["larger_batch"]
    passes = max(shapes.values()) + few // 2
    assert one.evidence.startswith(f"each of {passes} passes in 2 loops calls the same model")
    assert one.share == pytest.approx(saved("multi_crop_distillation", "grouped_crops"), abs=0.08)


class Tokens(nn.Module):
    """A part of a vision transformer, which joins a class token with the image's, or the memory of another call."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 6, 2, 2), nn.Linear(6, 5)
        self.token, self.mix = nn.Parameter(torch.randn(1, 1, 6)), nn.Linear(6, 6)
        self.places = nn.Parameter(torch.randn(1, 17, 6))

    def forward(self, x, memory=None, has_token=True):
        x = self.first(x).flatten(2).transpose(1, 2)
        tokens = [self.token.expand(len(x), -1, -1)] if has_token else []
        x = torch.cat([*tokens, *([] if memory is None else [memory]), x], 1)
        if memory is None:
            x = x + torch.cat([self.places[:, :1], self.places[:, 1:]], 1)
        x = self.mix(x).tanh()
        return self.last(x[:, 0]) if memory is None else (self.last(x[:, 0]), self.mix(x)[:, 1:2])


class InTime(nn.Module):
    """A model of sequences whose first dimension is time; it joins memory with the sequence."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 6), nn.Linear(6, 5)

    def forward(self, x, memory):
        x = torch.cat([memory, self.first(x)], 0).tanh()
        return self.last(x[1:]), x[:1]


class Nodes(nn.Module):
    """A model of nodes with a state of the whole graph, which it joins with each of them."""

    def __init__(self):
        super().__init__()
        self.first, self.mix, self.last = nn.Linear(4, 6), nn.Linear(12, 6), nn.Linear(6, 5)

    def forward(self, x, state, of=lambda x: x.mean(0, keepdim=True)):
        x = self.mix(torch.cat([state.expand(len(x), -1), self.first(x)], 1)).tanh()
        return self.last(x), of(x)


class Dense(nn.Module):
    """A block that joins the results of all its layers, or a state with two of them."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(3 + 2 * i, 2, 3, padding=1) for i in range(3))
        self.last, self.other = nn.Linear(9, 5), nn.Linear(6, 5)

    def forward(self, x, state=None):
        first = self.layers[0](x)
        if state is not None:
            x = torch.cat([state, first], 1)
            return self.other(x.mean((2, 3))), x[:, :4]
        for layer in (lambda x: first, *self.layers[1:]):
            x = torch.cat([x, layer(x)], 1)
        return self.last(x.mean((2, 3)))


def each_alone(model, x):
    return [model(x) for _ in range(4)]


def handed_on(*state, **flags):
    def step(model, x):
        handed, results = x.new_ones(state), []
        for _ in range(4):
            result, handed = model(x, handed, **flags)
            results.append(result)
        return results

    return step


IMAGES, ROWS = (2, 3, 8, 8), (3, 2, 4)


@pytest.mark.parametrize(
    ("model", "shape", "step", "found"),
    [
        (Tokens, IMAGES, each_alone, [4]),
        (Tokens, IMAGES, handed_on(2, 1, 6), []),
        (Tokens, IMAGES, handed_on(2, 1, 6, has_token=False), []),
        (InTime, ROWS, handed_on(1, 2, 6), []),
        (Nodes, ROWS[:1] + ROWS[2:], handed_on(1, 6), []),
        (Nodes, ROWS[:1] + ROWS[2:], handed_on(1, 6, of=lambda x: x[:1]), []),
        (Dense, IMAGES, each_alone, [4]),
        (Dense, IMAGES, handed_on(2, 4, 8, 8), []),
        (Dense, (1, *IMAGES[1:]), handed_on(1, 4, 8, 8), []),
    ],
    ids=["class token", "token and memory", "memory", "in time", "of a graph", "one node", "dense", "state", "of one"],
)
def test_what_a_model_joins_is_its_own_or_another_calls(tmp_path, model, shape, step, found):
    model, x = model().eval(), torch.randn(shape)

    def without_gradients():
        with torch.no_grad():
            torch.stack([one.softmax(-1) for one in step(model, x)])

    record(without_gradients, tmp_path / "trace.json", with_modules=True)
    trace = read(tmp_path / "trace.json.gz")
    assert [len(one.starts) for one in loops(trace, trace.steps[-1]) if one.what == AGAIN] == found


@pytest.mark.parametrize("program", ["spectrogram_tagger", "story_writers", "multi_crop_distillation"])
def test_what_equal_passes_save_at_once_is_printed_as_a_wide_range(program):
    """The same result can be computed with few kernels or many: 80% of 66 pairs were within 40%."""
    one = priced_changes(base(program))["larger_batch"]
    low, high = one.estimated_savings
    assert low == pytest.approx(max(0, 1 - (1 + prices.ONE_PASS_ERROR) * (1 - one.share) - REPLAYED), abs=1e-6)
    assert high == pytest.approx(1 - (1 - prices.ONE_PASS_ERROR) * (1 - one.share) + REPLAYED, abs=1e-6)


@pytest.mark.parametrize("program", ["bent_plate", "cavity_flow", "robot_imagination"])
def test_a_graph_takes_as_long_as_its_kernels_without_the_profiler(program):
    """While it is recorded, its launch takes longer for each kernel, and the kernels have pauses between them."""
    events, mark = first_step(program)
    on_gpu_us = sum(e["dur"] for e in raw_work(events, mark))
    one = priced_changes(base(program))["cuda_graph"]
    variant = "cuda_graph" if program == "bent_plate" else "graph"
    assert one.unprofiled_step_us_after == pytest.approx(on_gpu_us, rel=0.05)
    assert measured_us(program, variant) == pytest.approx(on_gpu_us, rel=0.05)
    assert one.step_us_after > 1.05 * one.unprofiled_step_us_after, "a recorded graph's step"


def test_what_recording_a_graph_takes_is_left_out_once():
    trace = read(base("value_learning"))
    graph = cuda_graph(graph_of(trace))
    once = with_cpu_speed(graph, 1.0)
    assert once.step_us() < graph.step_us() and with_cpu_speed(once, 1.0).lag == once.lag


def test_a_step_that_is_shorter_than_the_recorded_gpu_work_does_not_show_that_the_cpu_needs_nothing():
    events, mark = first_step("group_policy_update")
    assert measured_us("group_policy_update", "base") < sum(e["dur"] for e in raw_work(events, mark))
    one = priced_changes(base("group_policy_update"))["half_precision"]
    low, high = one.estimated_savings
    assert low <= saved("group_policy_update", "bf16_autocast") <= high
