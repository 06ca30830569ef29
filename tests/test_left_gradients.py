"""Gradients that each step adds to, because nothing clears them. If they come last, their backward is for nothing.

cpu_programs.py recorded the traces.
"""

import pytest
from raw_events import raw_steps
from references import ROOT
from test_graph_changes import in_step
from test_opportunities import priced_changes, raw_events

GIVES = "torch::autograd::AccumulateGrad"
NODE = "autograd::engine::evaluate_function: "
FOLDER = ROOT / "tests/traces/cpu/left_gradients"


def ops_of_each_step(file):
    events = raw_events(file)
    return [in_step(events, mark, "cpu_op") for mark in raw_steps(events)]


def inside(one, outer):
    return outer["ts"] <= one["ts"] < outer["ts"] + outer["dur"]


@pytest.mark.parametrize("program", ["head_alone", "teacher", "condition"])
def test_a_model_that_is_not_trained_needs_no_backward(program):
    file, spent = FOLDER / f"{program}.json.gz", []
    for events in ops_of_each_step(file):
        giving = [one for one in events if one["name"] == GIVES]
        adding = [node for node in giving if any(x["name"] == "aten::add_" and inside(x, node) for x in events)]
        new = max(one["ts"] for one in giving if one not in adding)
        later = [one for one in events if one["name"].startswith(NODE) and one["ts"] > new]
        spent.append(sum(one["dur"] for one in later))
    proposal = priced_changes(file)["no_autograd"]
    assert f"adds to {len(adding)} gradients that the step before left, in {len(later)} ops" in proposal.evidence
    assert "no_grad" in proposal.how
    assert proposal.saves_us >= 0.9 * min(spent) > 0  # the time between these ops, too
    assert "no_autograd" not in priced_changes(FOLDER / f"{program}_without.json.gz")


@pytest.mark.parametrize("program", ["loss_network", "accumulation", "shared_layer", "every_second_step"])
def test_gradients_that_are_used_are_not_called_left(program):
    """Raw events: each of these programs also adds to gradients, after new ones or before them."""
    file = FOLDER / f"{program}.json.gz"
    events = [one for step in ops_of_each_step(file) for one in step]
    giving = [one for one in events if one["name"] == GIVES]
    assert any(one["name"] == "aten::add_" and inside(one, node) for one in events for node in giving)
    assert "no_autograd" not in priced_changes(file)
