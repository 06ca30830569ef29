"""Passes whose results one op joins, as those of experts, of agents and of the networks of variables are.

tests/cpu_programs.py recorded the programs on a CPU. On an H200, fusion_forecaster's step took 59 ms instead of 104
with the networks of its variables stacked, agents_in_traffic's 71 instead of 113 with stacked actors, and
adapters_service's 42 instead of 57 with stacked adapters.
"""

import re

import pytest
from raw_events import end
from references import ROOT
from test_graph_changes import in_step
from test_kept_promises import base, saved
from test_later_workloads import edited
from test_opportunities import priced_changes, raw_events
from test_small_work import typical

FOLDER = ROOT / "tests/traces/cpu/joined_passes"
JOINS = ("aten::stack", "aten::cat")
WHAT = "takes no other pass's result as far as gradients or shapes show, and one op joins the results"


def file_of(program):
    return FOLDER / f"{program}.json.gz"


def joined(ops):
    """Return how many tensors each op of the program joins, if they are four or more."""
    joins = [e for e in ops if e["name"] in JOINS]
    own = [e for e in joins if not any(one["ts"] < e["ts"] < end(one) for one in joins)]
    return [count for count in (len(e["args"]["Input Dims"][0]) for e in own) if count > 3]


@pytest.mark.parametrize("program", ["experts", "experts_before_their_gate", "networks_of_variables", "actors"])
def test_passes_that_take_no_other_ones_result_are_computed_at_once(program):
    events = raw_events(file_of(program))
    steps = sum(e["name"].startswith("ProfilerStep#") for e in events if e.get("cat") == "user_annotation")
    counts = joined([e for e in events if e.get("cat") == "cpu_op"])
    passes, loops = sum(counts) // steps, len(counts) // steps
    each = f" in {loops} loops" if loops > 1 else ""
    one = priced_changes(file_of(program))["larger_batch"]
    assert one.evidence.startswith(f"each of {passes} passes{each} {WHAT}")


@pytest.mark.parametrize(
    "program",
    [
        "hidden_states", "cascade", "own_head_of_each_state", "skip_over_all", "state_after_each_forecast",
        "running_mean", "greedy_layers", "layers_without_gradients", "exits_in_training", "another_list",
        "features_and_others", "one_actor", "layers_in_turn", "exits",
    ],
)  # fmt: skip
def test_passes_that_may_take_the_result_before_are_left_as_they_are(program):
    assert joined([e for e in raw_events(file_of(program)) if e.get("cat") == "cpu_op"])
    assert "larger_batch" not in priced_changes(file_of(program))


@pytest.mark.parametrize(
    ("program", "variant"),
    [
        ("fusion_forecaster", "stacked_networks"),
        ("agents_in_traffic", "stacked_actors"),
        ("mmoe_recommender", "stacked_experts"),
        ("adapters_service", "batched_adapters"),
    ],
)
def test_what_one_pass_saved_is_in_the_range(program, variant):
    low, high = priced_changes(base(program))["larger_batch"].estimated_savings
    assert low <= saved(program, variant) <= high


def test_a_decoders_loops_over_requests_within_a_token_are_counted():
    """Each layer adds the adapter of each request to its queries and values, and a token needs the one before it."""
    events, mark = typical("adapters_service")
    taken = [
        e["args"]["Concrete Inputs"][2]
        for e in in_step(events, mark, "cpu_op")
        if e["name"] == "aten::select" and e["args"]["Input Dims"][0][0] == 4
    ]
    most = taken.count("3") // 2  # each pass takes a part of the input and one of the result
    one = priced_changes(base("adapters_service"))["larger_batch"]
    passes, loops = map(
        int, re.search(r"^each of (\d+) passes in (\d+) loops computes with one of the 4", one.evidence).groups()
    )
    assert passes == 4 * loops and most / 2 < loops <= most


def test_two_passes_of_a_token_are_computed_at_once_if_the_recording_decides_that_none_needs_the_other():
    """A generator of music asks for each token with the text and without it. As a batch, both saved 54% on an H200."""
    events, mark = typical("song_continuation")
    picked = sum(e["name"] == "aten::multinomial" for e in in_step(events, mark, "cpu_op"))
    assert picked > 10, "each token is drawn once"
    one = priced_changes(base("song_continuation"))["larger_batch"]
    assert one.evidence.startswith(f"each of {2 * picked} passes in {picked} loops takes no other pass's result")
    low, high = one.estimated_savings
    assert low <= saved("song_continuation", "guidance_in_batch") <= high


def test_without_the_modules_passes_without_gradients_may_be_steps_of_one_network(tmp_path):
    def without_modules(events):
        events[:] = [e for e in events if e.get("cat") != "python_function"]

    assert "larger_batch" not in priced_changes(edited(file_of("actors"), tmp_path, without_modules))


def test_the_work_of_the_cpu_for_each_pass_stays():
    """A service adds up the windows of a song on the CPU. As one batch, they took 171 ms instead of 148 on an H200."""
    low, high = priced_changes(base("music_unmixing"))["larger_batch"].estimated_savings
    assert low == 0 and high < 0.6


def test_a_join_that_each_pass_has_is_no_join_of_all():
    """A DETR's loss of each layer of the decoder stacks four coordinates of the boxes."""
    assert "larger_batch" not in priced_changes(base("detr_training"))
