"""Calls of one model with inputs of different sizes, such as scenes, from raw events and recorded programs.

On an H200, trajectory_forecast took 492 ms for 32 scenes one by one, and 129 for all at once with a mask.
"""

import re

import pytest
import torch
from cpu_programs import record
from raw_events import raw_steps
from test_few_passes import calls_of
from test_graph_changes import in_step
from test_kept_promises import base, case_of, saved
from test_later_workloads import edited
from test_opportunities import priced_changes, raw_events
from torch import nn

from tracereader.changes.equal_passes import OWN_SIZE, _of_own_sizes, all_loops, allowed
from tracereader.trace import read

SIZES = (5, 9, 3, 7, 8, 4)
MODEL = re.compile(r"nn.Module: MotionForecaster_\d+$")


def test_scenes_of_different_sizes_are_one_batch():
    events, case = raw_events(base("trajectory_forecast")), case_of(base("trajectory_forecast"))
    mark = next(e for e in raw_steps(events) if e["name"] == case.step.name)
    scenes = [e for e in calls_of(events, mark) if MODEL.match(e["name"])]
    ops = [e for e in in_step(events, mark, "cpu_op") if e["name"] == "aten::linear"]
    firsts = [next(op for op in sorted(ops, key=lambda e: e["ts"]) if op["ts"] >= one["ts"]) for one in scenes]
    assert len({str(op["args"]["Input Dims"][0]) for op in firsts}) > len(scenes) / 2
    one = priced_changes(base("trajectory_forecast"))["larger_batch"]
    assert one.evidence.startswith(f"each of {len(scenes)} passes calls the same model with an input of another size")
    assert "a mask for unequal lengths" in one.how
    low, high = one.estimated_savings
    assert low <= saved("trajectory_forecast", "padded_batch") <= high
    assert (
        next(iter(sorted(priced_changes(base("trajectory_forecast")).values(), key=lambda x: -x.likely_share))) == one
    )


def of_gap(events):
    """Return the ops between the second and the third scene of each step, and the third scene's first input."""
    for mark in raw_steps(events):
        scenes = [e for e in calls_of(events, mark) if MODEL.match(e["name"])]
        until, begin = scenes[1]["ts"] + scenes[1]["dur"], scenes[2]["ts"]
        ops = sorted((e for e in in_step(events, mark, "cpu_op") if e["ts"] > until), key=lambda e: e["ts"])
        data = next(e for e in ops if e["name"] == "aten::linear" and e["ts"] > begin)["args"]["Input Dims"][0]
        yield [e for e in ops if e["ts"] < begin], data


def copied_otherwise(events):
    for ops, data in of_gap(events):
        for e in ops:
            if e["name"] == "aten::to" and e["args"]["Input Dims"][0] == data:
                e["args"]["Input Dims"][0] = [data[0] + 1, *data[1:]]


def made_of_a_result(events):
    for ops, data in of_gap(events):
        next(e for e in ops if e["name"] == "aten::sub")["args"]["Input Dims"][0] = data


def in_place(events):
    for ops, _ in of_gap(events):
        next(e for e in ops if e["name"] == "aten::sub")["name"] = "aten::sub_"


@pytest.mark.parametrize("edit", [copied_otherwise, made_of_a_result, in_place])
def test_an_input_that_may_be_made_of_results_does_not_look_so(tmp_path, edit):
    trace = read(edited(base("trajectory_forecast"), tmp_path, edit))
    assert all(one.what != OWN_SIZE for step in trace.steps for one in all_loops(trace, step))


def test_calls_with_a_backward_between_them_are_not_of_one_forward():
    case = case_of(base("trajectory_forecast"))
    ((track, modules),) = case.trace.modules.items()
    run = [one for one in modules if MODEL.match(one.name) and case.step.start <= one.start < case.step.end]
    ops = [op for op in case.step.outermost if op.kind == "op" and op.track == track]
    assert _of_own_sizes(case.step, ops, run, [run[-1].end])
    assert not _of_own_sizes(case.step, ops, run, [run[2].end, run[-1].end])


class Bag(nn.Module):
    """A model of a bag of rows with places, which may take a state or other rows beside them."""

    def __init__(self, pools=True):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 16), nn.LayerNorm(16), nn.Linear(16, 16)
        self.score, self.read, self.pools = nn.Linear(16, 1), nn.Linear(16, 16), pools
        self.places = nn.Parameter(torch.randn(16, 4))

    def forward(self, rows, state=None, more=None, pooled=None, others=None):
        x = self.norm(self.first(rows + self.places[: len(rows)])).relu()
        if others is not None:
            x = nn.functional.scaled_dot_product_attention(x[None], others[None], others[None])[0]
        if more is not None:
            x = torch.cat([more, x])
        if state is not None:
            x = x + self.read(state)
        if not self.pools:
            return self.last(x)
        x = (self.score(x).softmax(0) * x).sum(0, keepdim=True)
        return self.last(x if pooled is None else x + pooled)


def alone(model, bags):
    return [model(bag) for bag in bags]


def handed_on(name, first):
    def step(model, bags):
        results = [first]
        for bag in bags:
            results.append(model(bag, **{name: results[-1]}))
        return results[1:]

    return step


as_state, after_pooling, attended = (
    handed_on(name, torch.ones(size, 16)) for name, size in (("state", 1), ("pooled", 1), ("others", 2))
)


def growing(model, bags):
    text = torch.cat(bags)
    return [model(text[:size]) for size in range(3, 9)]


def kept(model, bags):
    rows, results = torch.zeros(2, 16), []
    for bag in bags:
        results.append(model(bag, more=rows))
        rows = torch.cat([results[-1]] * 2)
    return results


def one_after_the_other(model, bags):
    rows, results = bags[0], []
    for size in range(4, 10):
        results.append(model(rows))
        rows = torch.cat([results[-1][:, :4]] * 3)[:size]
    return results


def in_layers(model, bags):
    return [model(bags[i % 2]) for i in range(6)]


def with_an_update(model, bags):
    results = []
    for bag in bags:
        results.append(model(bag))
        results[-1].sum().backward()
    return [one.detach().requires_grad_() for one in results]


FOUND = {(alone, True): 6, (alone, False): 6}
OTHERS = [
    (as_state, True),
    (after_pooling, True),
    (attended, False),
    (growing, True),
    (kept, True),
    (one_after_the_other, False),
    (in_layers, True),
]
CASES = [(*case, trains) for case in [*FOUND, *OTHERS] for trains in (True, False)]


@pytest.mark.parametrize(("step", "pools", "trains"), [*CASES, (with_an_update, True, True)])
def test_a_state_or_the_rows_of_another_call_do_not_look_so(tmp_path, step, pools, trains):
    torch.manual_seed(0)
    model, bags = Bag(pools), [torch.randn(size, 4) for size in SIZES]
    optimizer = torch.optim.SGD(model.parameters(), 0.01)

    def one():
        with torch.set_grad_enabled(trains):
            loss = sum(result.square().mean() for result in step(model, bags))
        if trains:
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    record(one, tmp_path / "trace.json", with_modules=True)
    trace = read(tmp_path / "trace.json.gz")
    loops = [one for one in all_loops(trace, trace.steps[-1]) if one.what == OWN_SIZE]
    found = FOUND.get((step, pools))
    assert [len(one.starts) for one in loops] == [found] * bool(found)
    assert not found or any(one.what == OWN_SIZE for one in allowed(trace, trace.steps[-1]))
