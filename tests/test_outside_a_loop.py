"""Loops over time in training: what their passes compute before a state, and from one.

recurrent_policy encodes 48 observations for a GRUCell, and calls an actor and a critic with each state. Its step took
102 ms on an H200, 64 with the encoder before the loop, and 60 with actor and critic after it. cpu_programs.py recorded
the small programs.
"""

import pytest
from conftest import ROOT
from raw_events import end, raw_steps
from test_kept_promises import base, saved
from test_later_workloads import edited
from test_opportunities import priced_changes, raw_events

from tracereader.changes.outside_a_loop import after_a_state, all_passes, before_a_state
from tracereader.trace import read

STATES, PARTS, INDICES = (
    ROOT / "tests/traces/cpu" / name for name in ("around_a_state", "parts_in_training", "indices")
)


def names_of(find, file):
    """Return the names of the ops that each loop of the last step computes outside a state."""
    trace = read(file)
    found = ((passes, find(passes)) for passes in all_passes(trace, trace.steps[-1]))
    return [
        " ".join(op.name.removeprefix("aten::") for op in passes.ops[1][slice(*places)])
        for passes, places in found
        if places
    ]


@pytest.mark.parametrize(("file", "before", "after"), [
    (STATES / "layers_around_a_cell", "linear relu linear", "linear tanh linear tanh"),
    (STATES / "layers_under_autocast", "select linear tanh linear tanh", "linear"),
    (STATES / "losses_in_each_pass", "select linear relu", "linear select broadcast_tensors mse_loss add"),
    (PARTS / "times", "select conv2d relu conv2d relu", ""),
    (PARTS / "times_with_layers", "select linear tanh linear tanh", ""),
    (PARTS / "state_of_an_encoder", "select conv2d relu conv2d relu", ""),  # the state's flatten follows
    (base("intensive_care"), "mul add relu neg exp linear relu neg exp", "linear relu linear"),
    (base("robot_imagination"), "select" + 4 * " conv2d relu", ""),
], ids=str)  # fmt: skip
def test_layers_around_a_state_are_found(file, before, after):
    file = file if file.name.endswith(".gz") else file.with_name(f"{file.name}.json.gz")
    assert names_of(before_a_state, file) == [before] * bool(before)
    assert names_of(after_a_state, file) == [after] * bool(after)


@pytest.mark.parametrize(("program", "before"), [
    ("result_fed_back", ""),
    ("image_fed_back", "select conv2d relu"),  # and not the layer of the last image, nor what both make
    ("average_of_features", "select linear"),
    ("state_first", ""),
    ("detached_state_first", ""),
    ("frozen_state_first", ""),
    ("centered_inputs", ""),
    ("part_fed_back", ""),
    ("fast_weights", ""),
    ("update_in_each_pass", ""),
])  # fmt: skip
def test_what_takes_a_state_or_is_fed_back_stays_in_the_loop(program, before):
    file = STATES / f"{program}.json.gz"
    assert names_of(before_a_state, file) == [before] * bool(before)
    assert names_of(after_a_state, file) == []


def test_of_two_layers_in_a_row_the_second_may_take_a_state():
    assert names_of(before_a_state, STATES / "state_without_its_history.json.gz") == ["select linear"]


@pytest.mark.parametrize("file", [
    *(PARTS / f"{name}.json.gz" for name in (
        "last_result_detached", "last_result_picked", "last_result_without_gradients", "own_layers", "leaky",
    )),
    *(INDICES / f"{name}.json.gz" for name in ("recurrence", "scan")),
], ids=lambda file: file.name)  # fmt: skip
def test_passes_that_hand_something_on_without_a_gradient_or_have_no_own_layers_stay_as_they_are(file):
    assert names_of(before_a_state, file) == names_of(after_a_state, file) == []
    assert not {"larger_batch", "loop_inputs", "loop_outputs"} & set(priced_changes(file))


@pytest.mark.parametrize(("program", "variant", "change"), [
    ("recurrent_policy", "inputs_first", "loop_inputs"), ("recurrent_policy", "heads_last", "loop_outputs"),
    ("world_model", "inputs_first", "loop_inputs"), ("world_model", "heads_last", "loop_outputs"),
    ("intensive_care", "heads_last", "loop_outputs"), ("robot_imagination", "encoded_together", "loop_inputs"),
    ("speech_decoder", "at_once", "loop_inputs"),
])  # fmt: skip
def test_what_moving_layers_out_of_the_loop_saved_is_in_the_range(program, variant, change):
    low, high = priced_changes(base(program))[change].estimated_savings
    assert low <= saved(program, variant) <= high


def in_last_step(program):
    """Return forward's ops in the last recorded step, in order. Backward has a thread of its own."""
    events = raw_events(base(program))
    mark = max(raw_steps(events), key=lambda mark: mark["ts"])
    calls = (e for e in events if e.get("cat") == "cpu_op" and e["tid"] == mark["tid"] and e["ts"] > mark["ts"])
    return sorted(calls, key=lambda e: e["ts"])


def test_the_cpu_time_of_all_encoders_but_the_last_one_is_saved():
    ops = in_last_step("recurrent_policy")
    cells = [e["ts"] for e in ops if e["name"] == "aten::gru_cell"]
    of_encoder = [e for e in ops if e["name"] in ("aten::linear", "aten::relu", "aten::layer_norm")]
    of_encoder = [e for e in of_encoder if e["args"]["Input Dims"][0] == [256, 512] and e["ts"] < cells[-1]]
    of_encoder = [e for e in of_encoder if e["args"]["Input Dims"][1:2] != [[256, 512]]]  # these are actor and critic
    assert len(of_encoder) == 48 * 7
    forward_us = sum(e["dur"] for e in of_encoder if end(e) < cells[-2])
    one = priced_changes(base("recurrent_policy"))["loop_inputs"]
    assert one.evidence.startswith(f"each of {len(cells)} passes computes layers that take only its part of a tensor")
    assert "(7 ops; the first layer is aten::linear with an input of 256 x 512)" in one.evidence
    assert one.saves_us > forward_us > 0  # and backward


def with_state_and_mask_of_one_size(events):
    """Let the critic's result have the size of what is added to each state."""
    for e in events:
        if e["name"] == "aten::mul" and e.get("args", {}).get("Input Dims", [])[:2] == [[256, 512], [256, 1]]:
            e["name"] = "aten::add"


def test_layers_stay_in_the_loop_if_a_pass_may_take_their_results(tmp_path):
    file = edited(base("recurrent_policy"), tmp_path, with_state_and_mask_of_one_size)
    assert "loop_outputs" not in priced_changes(file)


def with_other_functions_in_one_pass(events):
    """Change the encoder's first function and the actor's, which is the first of two, in the first pass."""
    for mark in raw_steps(events):
        inside = [e for e in events if mark["ts"] < e["ts"] < end(mark)]
        for name in ("aten::relu", "aten::tanh"):
            min((e for e in inside if e["name"] == name), key=lambda e: e["ts"])["name"] = "aten::exp"


def test_only_what_all_passes_do_is_computed_at_once(tmp_path):
    file = edited(base("recurrent_policy"), tmp_path, with_other_functions_in_one_pass)
    assert names_of(before_a_state, file) == ["linear"]
    assert names_of(after_a_state, file) == ["linear"]  # the last one: the actor computes with as many elements


def test_a_decoder_behind_a_view_is_found_once():
    """Its loop has a part of the images and a part of the actions in each pass. The passes begin with either."""
    decoder = "linear unflatten conv_transpose2d elu conv_transpose2d elu conv_transpose2d"
    assert decoder in names_of(after_a_state, base("world_model"))
    assert priced_changes(base("world_model"))["loop_outputs"].evidence.startswith("each of 20 passes computes layers")
