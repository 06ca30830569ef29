"""Loops that index a tensor, whose backward makes a gradient of the whole tensor for each index.

tests/cpu_programs.py recorded the traces. Without the profiler, on the same machine, 14% was saved of the recurrence,
34% of the scan and 12% of the heads.
"""

import pytest
from raw_events import end
from references import ROOT
from test_cpu_only import NODE, middle_step
from test_later_workloads import edited
from test_opportunities import priced_changes, raw_events

from tracereader import cli

FOLDER = ROOT / "tests/traces/cpu/indices"
PROGRAMS = "recurrence", "scan", "heads"


def file_of(name):
    return FOLDER / f"{name}.json.gz"


def adding_nodes(ops):
    """Return the nodes of backward that index a tensor and add their gradient to another one."""
    adds = [one for one in ops if one["name"] in ("aten::add", "aten::add_")]
    nodes = [one for one in ops if one["name"] == f"{NODE}SelectBackward0"]
    return [node for node in nodes if any(node["ts"] <= one["ts"] and end(one) <= end(node) for one in adds)]


@pytest.mark.parametrize(
    ("program", "indices", "sizes"),
    [
        ("recurrence", 24 - 1, "16 x 24 x 128"),
        ("scan", 2 * (40 - 1), "4 x 40 x 32 x 4, 4 x 40 x 32 x 1"),
        ("heads", 3 * (8 - 1), "4 x 32 x 8 x 8"),
    ],
)
def test_the_gradients_of_whole_tensors_are_counted_but_for_the_first_of_each_tensor(program, indices, sizes):
    step, ops = middle_step(raw_events(file_of(program)))
    nodes = adding_nodes(ops)
    us = sum(one["dur"] for one in nodes)
    assert len(nodes) == indices
    one = priced_changes(file_of(program))["unbind"]
    time = f"{us / 1e3:.1f} ms" if us >= 1000 else f"{us:.1f} µs"
    assert one.evidence == (
        f"for each of {indices} indices, backward makes a gradient of the whole tensor ({sizes}) and adds it: "
        f"{time} of CPU time"
    )
    assert one.saves_us == pytest.approx(us, rel=0.02) and one.step_us == pytest.approx(step["dur"], rel=0.01)


@pytest.mark.parametrize("program", PROGRAMS)
def test_the_program_that_unbinds_its_tensor_is_faster_and_gets_no_proposal(program):
    without, ops = middle_step(raw_events(file_of(f"{program}_without")))
    one = priced_changes(file_of(program))["unbind"]
    assert without["dur"] < one.step_us and not adding_nodes(ops)
    assert "unbind" not in priced_changes(file_of(f"{program}_without"))


@pytest.mark.parametrize("program", PROGRAMS)
def test_the_comparison_sees_that_the_tensor_is_unbound(program, capsys):
    before, after = str(file_of(program)), str(file_of(f"{program}_without"))
    said = "proposed it (unbind the tensor that a loop indexes)"
    assert cli.main([before, after]) == 0
    assert said in " ".join(capsys.readouterr().out.split())
    assert cli.main([after, before]) == 0
    assert "proposed it" not in capsys.readouterr().out


def test_one_index_into_the_output_of_each_layer_is_no_loop():
    _, ops = middle_step(raw_events(file_of("first_tokens")))
    assert len(adding_nodes(ops)) > 4
    assert "unbind" not in priced_changes(file_of("first_tokens"))


def test_without_shapes_it_is_not_decided_which_tensor_an_index_is_of(tmp_path):
    def edit(events):
        for one in events:
            if one.get("name") == "aten::select_backward":
                del one["args"]["Concrete Inputs"]

    assert "unbind" not in priced_changes(edited(file_of("scan"), tmp_path, edit))
