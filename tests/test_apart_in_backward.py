"""Loops over dates or times in training: backward shows whether a pass takes another one's result.

crop_seasons encodes the images of 16 dates one after the other. Its step took 58 ms on an H200, and 22 ms with all
dates at once. cpu_programs.py recorded the other programs.
"""

import pytest
from conftest import ROOT
from raw_events import raw_steps
from test_kept_promises import base, saved
from test_later_workloads import edited
from test_opportunities import priced_changes, raw_events

DATES = [8, 128, 32, 32]  # the features of a date
INDICES, PARTS = ROOT / "tests/traces/cpu/indices", ROOT / "tests/traces/cpu/parts_in_training"


def in_last_step(program, name):
    """Return forward's ops of this name in the last recorded step, in order. Backward has a thread of its own."""
    events = raw_events(base(program))
    mark = max(raw_steps(events), key=lambda mark: mark["ts"])
    calls = (e for e in events if e.get("cat") == "cpu_op" and e["name"] == name and e["tid"] == mark["tid"])
    return sorted((e for e in calls if e["ts"] > mark["ts"]), key=lambda e: e["ts"])


def test_the_dates_of_a_season_are_computed_at_once():
    one = next(iter(priced_changes(base("crop_seasons")).values()))
    taken = [e["args"]["Concrete Inputs"][1:3] for e in in_last_step("crop_seasons", "aten::select")]
    of_dates = [place for place in taken if place[0] == "1"]
    assert of_dates == [["1", str(date)] for date in range(16)]
    assert one.change == "larger_batch"
    assert one.evidence.startswith("each of 16 passes computes with one of the 16 parts of a tensor")
    low, high = one.estimated_savings
    assert low - 0.1 <= saved("crop_seasons", "dates_together") <= high + 0.1


def renamed(events, name, pick, dims=None):
    """Give one call of this name in each step's backward another name. pick: which, in order."""
    marks = sorted(mark["ts"] for mark in raw_steps(events))
    of_backward = {e["tid"] for e in events if e["name"] == "torch::autograd::AccumulateGrad"}
    calls = [e for e in events if e.get("cat") == "cpu_op" and e["name"] == name and e["tid"] in of_backward]
    calls = [e for e in calls if dims is None or e["args"]["Input Dims"][:1] == [dims]]
    for start, end in zip(marks, [*marks[1:], float("inf")], strict=True):
        inside = sorted((e for e in calls if start < e["ts"] < end), key=lambda e: e["ts"])
        assert inside
        inside[pick]["name"] = "aten::other"


def without_a_gradient_of_the_first_date(events):
    """As for a state that begins with zeros. Backward reaches the first date last."""
    renamed(events, "aten::convolution_backward", -1)


def without_an_added_gradient_of_the_last_date(events):
    """As for a state that each date but the last one gives to the next."""
    renamed(events, "aten::add_", 0, DATES)


def without_an_added_gradient_of_the_first_date(events):
    renamed(events, "aten::add_", -1, DATES)


def without_an_added_gradient_of_a_weight_in_one_date(events):
    """As if this date's result did not depend on the weight."""
    renamed(events, "aten::add_", 3, [64, 10, 3, 3])


@pytest.mark.parametrize("edit", [
    without_a_gradient_of_the_first_date, without_an_added_gradient_of_the_last_date,
    without_an_added_gradient_of_the_first_date, without_an_added_gradient_of_a_weight_in_one_date,
])  # fmt: skip
def test_dates_stay_apart_if_backward_computes_something_else_for_one_of_them(tmp_path, edit):
    assert "larger_batch" not in priced_changes(edited(base("crop_seasons"), tmp_path, edit))


@pytest.mark.parametrize("program", ["recurrence", "scan"])
def test_time_steps_of_a_recurrence_stay_apart(program):
    """cpu_programs.py recorded them. Each pass takes a part of a tensor and the state of the pass before."""
    assert "larger_batch" not in priced_changes(INDICES / f"{program}.json.gz")


@pytest.mark.parametrize("program", ["times", "times_with_layers"])
def test_times_that_are_encoded_by_themselves_are_computed_at_once(program):
    evidence = priced_changes(PARTS / f"{program}.json.gz")["larger_batch"].evidence
    assert evidence.startswith("each of 12 passes computes with one of the 12 parts of a tensor")


@pytest.mark.parametrize("program", [
    "last_result_detached", "last_result_picked", "last_result_without_gradients", "state_of_an_encoder", "own_layers",
    "leaky",
])  # fmt: skip
def test_passes_that_hand_something_on_stay_apart(program):
    assert "larger_batch" not in priced_changes(PARTS / f"{program}.json.gz")
