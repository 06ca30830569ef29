"""Gradients that each step adds to, because nothing clears them. If they come last, their backward is for nothing.

cpu_programs.py recorded the traces.
"""

import pytest
from raw_events import raw_steps
from references import ROOT
from test_graph_changes import in_step
from test_kept_promises import base, measured_us
from test_later_workloads import edited
from test_opportunities import priced_changes, raw_events

from tracereader.figures.phases import left_gradients
from tracereader.trace import read

GIVES = "torch::autograd::AccumulateGrad"
NODE = "autograd::engine::evaluate_function: "
PRODUCTS = "aten::mm", "aten::addmm"
FOLDER = ROOT / "tests/traces/cpu/left_gradients"


def ops_of_each_step(file):
    events = raw_events(file)
    return [in_step(events, mark, "cpu_op") for mark in raw_steps(events)]


def inside(one, outer):
    return outer["ts"] <= one["ts"] < outer["ts"] + outer["dur"]


def given_and_added_to(events):
    """Return the calls that give parameters their gradients, and those of them that add to a gradient."""
    giving = [one for one in events if one["name"] == GIVES]
    return giving, [node for node in giving if any(x["name"] == "aten::add_" and inside(x, node) for x in events)]


@pytest.mark.parametrize("program", ["head_alone", "teacher", "condition"])
def test_a_model_that_is_not_trained_needs_no_backward(program):
    file, spent = FOLDER / f"{program}.json.gz", []
    for events in ops_of_each_step(file):
        giving, adding = given_and_added_to(events)
        new = max(one["ts"] for one in giving if one not in adding)
        later = [one for one in events if one["name"].startswith(NODE) and one["ts"] > new]
        spent.append(sum(one["dur"] for one in later))
    proposal = priced_changes(file)["no_autograd"]
    assert f"adds to {len(adding)} gradients that the step before left, in {len(later)} ops" in proposal.evidence
    assert "no_grad" in proposal.how
    assert proposal.saves_us >= 0.9 * min(spent) > 0  # the time between these ops, too
    assert "no_autograd" not in priced_changes(FOLDER / f"{program}_without.json.gz")


@pytest.mark.parametrize(
    "program",
    ["accumulation", "shared_layer", "every_second_step", "biases_alone", "zeroed_by_hand", "inputs_with_gradients"],
)
def test_gradients_that_are_used_are_not_called_left(program):
    """Raw events: each of these programs also adds to gradients, after new ones or before them."""
    file = FOLDER / f"{program}.json.gz"
    events = [one for step in ops_of_each_step(file) for one in step]
    assert given_and_added_to(events)[1]
    assert "no_autograd" not in priced_changes(file)


def products_of(events, node):
    return [one for one in events if one["name"] in PRODUCTS and inside(one, node)]


def test_a_network_that_gives_gradients_on_needs_none_of_its_own():
    """Its parameters frozen, a step of this program took 206 µs instead of 255 on two cores of an EPYC."""
    spent, file = [], FOLDER / "loss_network.json.gz"
    for events in ops_of_each_step(file):
        giving, adding = given_and_added_to(events)
        nodes = [one for one in events if one["name"].startswith(NODE)]
        both = [node for node in nodes if len(products_of(events, node)) == 2]  # of an input and of a weight
        assert len(both) == 2 and len(adding) == 4 and max(one["ts"] for one in giving) not in [n["ts"] for n in adding]
        spent.append(sum(one["dur"] for one in adding) + sum(one["dur"] for one in both) / 2)
    proposal = priced_changes(file)["no_autograd"]
    assert "adds to 4 gradients that the step before left: no zero_grad()" in proposal.evidence
    assert proposal.saves_us == pytest.approx(sum(spent) / 3, rel=0.3)
    assert "requires_grad_(False)" in proposal.how


@pytest.mark.parametrize("program", ["style_transfer", "patch_attack", "prompt_tuning"])
def test_parameters_that_nobody_froze_cost_their_gradients(program):
    """On an H200, requires_grad_(False) saved 21, 37 and 13%."""
    events = ops_of_each_step(base(program))[1]
    _, adding = given_and_added_to(events)
    proposal = priced_changes(base(program))["no_autograd"]
    assert f"adds to {len(adding)} gradients that the step before left" in proposal.evidence
    assert proposal.title == "freeze what is not trained"
    saved = 1 - measured_us(program, "frozen") / measured_us(program, "base")
    low, high = proposal.estimated_savings or (proposal.share, proposal.share)
    assert low <= saved <= high + 0.15 and proposal.share <= saved + 0.02


def test_one_step_does_not_show_that_no_step_clears_its_gradients(tmp_path):
    def the_second_step_alone(events):
        kept = raw_steps(events)[1]["name"]
        events[:] = [e for e in events if not str(e.get("name")).startswith("ProfilerStep") or e["name"] == kept]

    assert "no_autograd" in priced_changes(base("patch_attack"))
    assert "no_autograd" not in priced_changes(edited(base("patch_attack"), tmp_path, the_second_step_alone))


def test_a_step_without_an_optimizer_may_leave_its_gradients_to_a_later_one(tmp_path):
    def without_the_optimizer(events):
        events[:] = [e for e in events if not str(e.get("name")).startswith("Optimizer.")]

    assert "no_autograd" not in priced_changes(edited(base("patch_attack"), tmp_path, without_the_optimizer))


@pytest.mark.parametrize(("program", "spared"), [("biases_alone", 0), ("loss_network", 2)])
def test_a_biases_gradient_alone_needs_no_product(program, spared):
    """A model of 512 values took 15.6 ms without the gradients of its biases, and 15.8 with them."""
    trace = read(FOLDER / f"{program}.json.gz")
    for step, events in zip(trace.steps, ops_of_each_step(FOLDER / f"{program}.json.gz"), strict=True):
        _, adding = given_and_added_to(events)
        left, _, products = left_gradients(trace, step)
        assert len(left) == len(adding) > 1 and len(products) == spared


def test_a_weight_that_is_computed_gets_its_gradient_elsewhere(tmp_path):
    """Only the first layer's weight is a parameter. Those of the others are computed, as with weight norm."""

    def computed_weights(events):
        for mark in raw_steps(events):
            ops = sorted(in_step(events, mark, "cpu_op"), key=lambda e: e["ts"])
            views = [e for e in ops if e["name"].startswith(NODE) and e["name"].endswith("TBackward0")]
            assert len(views) == 3
            for view in views[:-1]:
                given = next(e for e in ops if e["ts"] > view["ts"] and e["name"] == NODE + GIVES)
                gone = [e for e in ops if inside(e, view) or inside(e, given)]
                events[:] = [e for e in events if not any(e is one for one in gone)]

    trace = read(edited(FOLDER / "biases_alone.json.gz", tmp_path, computed_weights))
    assert [len(left_gradients(trace, step)[2]) for step in trace.steps] == [0, 0, 0]
