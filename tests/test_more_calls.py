"""The names that a long step calls more often, by the category of the call in the trace."""

import json

import pytest
from raw_events import event

from tracereader import cli


def made(tmp_path, calls):
    """Return three steps with these calls of 10 µs (name, category), and a fourth that makes each one 20 times."""
    events, start = [], 0
    for number, times in enumerate((1, 1, 1, 20)):
        inside = [call for call in calls for _ in range(times)]
        length = 12 * len(inside) + 10
        events.append(event(f"ProfilerStep#{number}", "user_annotation", start, length))
        events += [event(name, cat, start + 5 + 12 * at, 10) for at, (name, cat) in enumerate(inside)]
        start += length + 5
    (tmp_path / "made.json").write_text(json.dumps({"traceEvents": events}))
    return tmp_path / "made.json"


@pytest.mark.parametrize(
    ("name", "cat", "whose"),
    [
        ("cumulate", "user_annotation", ""),
        ("custom::scan", "cpu_op", ""),
        ("cudaLaunchKernel", "user_annotation", ""),
        ("cudaLaunchKernel", "cuda_runtime", "the runtime call "),
        ("cuLaunchKernel", "cuda_driver", "the runtime call "),
        ("hipLaunchKernel", "hip_runtime", "the runtime call "),
    ],
)
def test_a_cuda_api_call_is_recognized_by_its_category(tmp_path, capsys, name, cat, whose):
    file = made(tmp_path, [("aten::mm", "cpu_op"), (name, cat)])
    assert cli.main([str(file), "--only", "steps"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert f"20 of {whose}{name} instead of 1" in said or f"20 calls of {whose}{name} instead of" in said


def test_a_name_of_two_kinds_belongs_to_neither(tmp_path, capsys):
    file = made(tmp_path, [("cuddle", "cuda_runtime"), ("cuddle", "user_annotation")])
    assert cli.main([str(file), "--only", "steps"]) == 0
    assert "it makes 40 calls of cuddle instead of the typical step's 2" in " ".join(capsys.readouterr().out.split())
