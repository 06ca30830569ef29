"""Which of the user's own functions a proposal means, in traces with stacks. Lines are those of raw events."""

import gzip
import json

import pytest
from conftest import ROOT
from raw_events import end, raw_steps
from test_opportunities import priced_changes, raw_events

from tracereader import cli
from tracereader.figures.users_code import Function, users_function

TRACES = ROOT / "tests/traces"
TRAINING, CAPTURE = TRACES / "train_stack.json.gz", TRACES / "h100/capture_with_stack.json.gz"
BERT = TRACES / "models/bert_modules.json.gz"


def own_frames(events, script):
    return [e for e in events if e.get("cat") == "python_function" and e["name"].startswith(script)]


def innermost(frames, slice_):
    """Return the name of the shortest frame around a slice of the same thread."""
    around = [
        one for one in frames if one["tid"] == slice_["tid"] and one["ts"] <= slice_["ts"] and end(slice_) <= end(one)
    ]
    return min(around, key=lambda one: one["dur"])["name"]


def written(function):
    return f"{function.file}({function.line}): {function.name}"


@pytest.mark.parametrize(("name", "function"), [
    ("train.py(12): train", Function("train.py", 12, "train")),
    ("models/blocks.py(7): forward", Function("models/blocks.py", 7, "forward")),
    ("test.py(3): <module>", Function("test.py", 3, "<module>")),
    (r"src\train.py(30): <lambda>", Function("src/train.py", 30, "<lambda>")),
    ("<ipython-input-4-0a1b>(2): step", Function("<ipython-input-4-0a1b>", 2, "step")),
    ("/tmp/ipykernel_7/12.py(1): step", Function("/tmp/ipykernel_7/12.py", 1, "step")),
    *[(name, None) for name in (
        "torch/nn/modules/linear.py(130): forward", "typing.py(392): inner", "logging/__init__.py(1517): debug",
        "<frozen os>(779): getenv", "<string>(2): __init__", "<built-in method linear of type object at 0x7f>",
        "transformers/modeling_layers.py(80): __call__", "nn.Module: Linear_0",
        "/venv/lib/python3.12/site-packages/einops/einops.py(5): rearrange", "/usr/lib/python3.12/abc.py(117): check",
    )],
])  # fmt: skip
def test_a_frame_is_the_users_if_no_library_wrote_it(name, function):
    assert users_function(name) == function


def test_a_change_of_the_optimizer_names_the_function_that_calls_it():
    events = raw_events(TRAINING)
    updates = [e for e in events if e["name"] == "Optimizer.step#AdamW.step" and e["cat"] == "user_annotation"]
    (called_in,) = {innermost(own_frames(events, "extra.py"), one) for one in updates}
    assert written(priced_changes(TRAINING)["fused_optimizer"].function) == called_in == "extra.py(17): train"


@pytest.mark.parametrize("change", ["cuda_graph", "fuse_pointwise"])
def test_a_change_of_the_model_names_the_function_that_calls_it(change):
    events = raw_events(TRAINING)
    forward = [e for e in events if e["name"] == "aten::linear" and e.get("cat") == "cpu_op"]
    (called_in,) = {innermost(own_frames(events, "extra.py"), one) for one in forward}
    assert written(priced_changes(TRAINING)[change].function) == called_in


def test_a_librarys_model_is_called_in_the_users_script():
    """Most frames of this trace are transformers' own. Only one function is the user's."""
    events = raw_events(BERT)
    (mine,) = {e["name"] for e in own_frames(events, "exp.py")}
    assert sum(e["name"].startswith("transformers/") for e in events if e.get("cat") == "python_function") > 500
    found = [one.function for one in priced_changes(BERT).values() if one.function]
    assert found and {written(one) for one in found} == {mine}


def test_a_trace_without_stacks_names_no_function(tmp_path):
    document = json.loads(gzip.decompress(TRAINING.read_bytes()))
    document["traceEvents"] = [e for e in document["traceEvents"] if e.get("cat") != "python_function"]
    assert raw_steps(document["traceEvents"])
    file = tmp_path / "without.json"
    file.write_text(json.dumps(document))
    assert all(one.function is None for one in priced_changes(file).values())


def test_a_report_names_file_and_line_and_a_long_path_is_in_json_only(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("COLUMNS", "80")
    assert cli.main([str(TRAINING), "--only", "try"]) == 0
    said = capsys.readouterr().out
    assert "This is in extra.py:17, train" in " ".join(said.split()) and max(map(len, said.splitlines())) <= 80
    document = json.loads(gzip.decompress(TRAINING.read_bytes()))
    for e in document["traceEvents"]:
        e["name"] = e["name"].replace("extra.py", "/home/somebody/projects/a_long_name/experiments/extra.py")
    file = tmp_path / "long.json"
    file.write_text(json.dumps(document))
    assert cli.main([str(file), "--only", "try"]) == 0
    assert "extra.py" not in capsys.readouterr().out
    assert cli.main([str(file), "--only", "try", "--json"]) == 0
    functions = [one["function"] for one in json.loads(capsys.readouterr().out)["opportunities"]]
    assert {
        "file": "/home/somebody/projects/a_long_name/experiments/extra.py",
        "line": 17,
        "name": "train",
    } in functions
