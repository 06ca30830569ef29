"""Modes for debugging that a program left on. The traces are of small GPTs on an H100, with the mode on and off.

Without the profiler the steps took: anomaly detection 16.7 to 21.4 ms, and 3.7 to 4.0 without it; blocking launches 6.8
to 8.5 ms, and 5.7 to 6.3 without them.
"""

from pathlib import Path

import pytest
from raw_events import end, raw_steps
from test_graph_changes import in_step
from test_later_workloads import case_of, edited
from test_opportunities import priced_changes, raw_events

from tracereader import cli
from tracereader.changes import waits
from tracereader.figures import summarize
from tracereader.trace import read

DEBUGGING = Path(__file__).resolve().parent / "traces/h100/debugging"


def file_of(name):
    return DEBUGGING / f"{name}.json.gz"


@pytest.mark.parametrize(("name", "change"), [("anomaly", "anomaly_detection"), ("blocking", "blocking")])
def test_the_mode_is_proposed_to_be_turned_off_and_the_comparison_sees_it(name, change, capsys):
    one = priced_changes(file_of(name))[change]
    after = summarize(read(file_of(f"{name}_off")))
    # The profiler's own time in a call is not counted.
    assert after.recorded_step_us < 1.05 * one.step_us_after
    assert change not in priced_changes(file_of(f"{name}_off"))
    assert cli.main([str(file_of(name)), str(file_of(f"{name}_off"))]) == 0
    assert f"proposed it ({one.title})" in " ".join(capsys.readouterr().out.split())


def test_the_measured_saving_of_anomaly_detection_is_in_its_range():
    low, high = priced_changes(file_of("anomaly"))["anomaly_detection"].estimated_savings
    assert low < 1 - 4.0 / 16.7 < 1 - 3.7 / 21.4 < high


def test_anomaly_detection_checks_each_gradient():
    events = raw_events(file_of("anomaly"))
    ops = in_step(events, raw_steps(events)[0], "cpu_op")
    nodes = [e for e in ops if e["name"].startswith("autograd::engine::evaluate_function")]
    checks = [e for e in ops if e["name"] == "aten::_is_any_true"]
    in_nodes = [e for e in checks if any(one["tid"] == e["tid"] and one["ts"] <= e["ts"] < end(one) for one in nodes)]
    summary = summarize(read(file_of("anomaly")))
    assert summary.debugging.checked_gradients == len(in_nodes) > 50
    assert f"checks {len(in_nodes)} gradients" in priced_changes(file_of("anomaly"))["anomaly_detection"].evidence
    assert summarize(read(file_of("anomaly_off"))).debugging.checked_gradients == 0


def test_the_waits_of_anomaly_detection_are_not_told_to_be_the_programs():
    events = raw_events(file_of("anomaly"))
    waits = [e for e in in_step(events, raw_steps(events)[0], "cuda_runtime") if "Synchronize" in e["name"]]
    assert len(waits) > 50
    assert not {"remove_sync", "cuda_graph", "fuse_pointwise"} & set(priced_changes(file_of("anomaly")))


def launches(events):
    """Return each call that launches a kernel, with the kernel."""
    kernels = {e["args"]["correlation"]: e for e in events if e.get("cat") == "kernel"}
    calls = [e for e in events if e.get("cat") in ("cuda_runtime", "cuda_driver") and "Launch" in e["name"]]
    return [(call, kernels[call["args"]["correlation"]]) for call in calls if call["args"]["correlation"] in kernels]


def test_a_blocking_launch_returns_after_its_kernel():
    blocking, usual = launches(raw_events(file_of("blocking"))), launches(raw_events(file_of("blocking_off")))
    assert all(end(kernel) <= end(call) for call, kernel in blocking)
    assert sum(end(kernel) <= end(call) for call, kernel in usual) < 0.1 * len(usual)
    count = summarize(read(file_of("blocking"))).debugging.blocking_launches
    assert count == len(blocking) / len(raw_steps(raw_events(file_of("blocking"))))
    assert summarize(read(file_of("blocking_off"))).debugging.blocking_launches == 0


def some_return_early(events):
    for call, kernel in launches(events)[::10]:
        call["dur"] = max(0.1, kernel["ts"] - call["ts"] - 1)


def few_launches(events):
    """Leave 15 launches of each step."""
    for mark in raw_steps(events):
        inside = [(call, kernel) for call, kernel in launches(events) if mark["ts"] <= call["ts"] < end(mark)]
        gone = [id(e) for pair in inside[15:] for e in pair]
        events[:] = [e for e in events if id(e) not in gone]


@pytest.mark.parametrize("edit", [some_return_early, few_launches])
def test_not_every_long_call_is_a_blocking_launch(tmp_path, edit):
    case = case_of(edited(file_of("blocking"), tmp_path, edit))
    assert case.summary.debugging.blocking_launches == 0 and waits.blocking(case) is None
