"""What ops compute on a CPU, and how fast, recomputed from the raw events; a step's time outside of all ops."""

import gzip
import json
import math
import re

import pytest
from references import H200, ROOT

from tracereader import cli
from tracereader.figures import summarize
from tracereader.trace import read

CPU = ROOT / "traces/reference/cpu"
MLP = CPU / "03_simple_mlp/64x128x768x3072_bf16_warm_eager_shapes.json.gz"


def raw_step(path, name):
    events = [e for e in json.loads(gzip.decompress(path.read_bytes()))["traceEvents"] if e.get("ph") == "X"]
    mark = next(e for e in events if e["name"] == name)
    return mark, [e for e in events if mark["ts"] <= e["ts"] < mark["ts"] + mark["dur"]]


def test_products_and_pointwise_ops_with_their_rates():
    summary = summarize(read(MLP))
    _, events = raw_step(MLP, summary.typical_step)
    ops = {"aten::mm", "aten::gelu", "aten::mul"}
    expected = sorted((e for e in events if e["name"] in ops), key=lambda e: e["ts"])
    assert [one.name for one in summary.cpu_work] == [e["name"] for e in expected]
    for one, event in zip(summary.cpu_work, expected, strict=True):
        left, right = (event["args"]["Input Dims"] + [[]])[:2]
        if one.name == "aten::mm":
            flops = 2 * left[0] * left[1] * right[1]
            assert flops == 2 * 8192 * 768 * 3072 and one.product.flops == flops
            assert one.tflops == pytest.approx(flops / event["dur"] / 1e6, rel=1e-4)
        else:
            read_ = math.prod(left) + (math.prod(right) if one.name == "aten::mul" else 0)
            assert one.bytes_moved == 2 * (read_ + math.prod(left))
            assert one.gb_s == pytest.approx(one.bytes_moved / event["dur"] / 1e3, rel=1e-4)
    assert [one.layer for one in summary.cpu_work if one.product] == ["gate_proj", "up_proj", "down_proj"]


def test_what_inductor_wrote_stands_there_by_name(capsys):
    trace = CPU / "03_simple_mlp/64x128x768x3072_bf16_warm_compile.json.gz"
    names = [one.name for one in summarize(read(trace)).cpu_work]
    assert [name for name in names if "cpp_fused" in name] == ["graph_0_cpp_fused__unsafe_view_gelu_mul_0"]
    assert names.count("aten::mm") == 3
    assert cli.main([str(trace), "--only", "guesses"]) == 0
    assert "yes  gelu and mul are one kernel, written by Inductor" in capsys.readouterr().out


def test_the_time_in_no_op(capsys):
    trace = CPU / "01_matmul_add/64_bf16_warm_eager.json.gz"
    summary = summarize(read(trace))
    mark, events = raw_step(trace, summary.typical_step)
    ops = sorted((e["ts"], e["ts"] + e["dur"]) for e in events if e.get("cat") == "cpu_op")
    covered, reached = 0.0, 0.0
    for start, end in ops:
        covered += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    assert cli.main([str(trace), "--only", "short"]) == 0
    (share,) = re.findall(r"(\d+)% of the step is in no recorded op", capsys.readouterr().out)
    assert int(share) == pytest.approx(100 * (1 - covered / mark["dur"]), abs=1)


def test_what_inductors_code_takes_is_no_time_in_no_op(tmp_path, capsys):
    """torch 2.15 records the call of a compiled graph as a label, and its C++ kernels not at all."""
    slices = [
        ("ProfilerStep#1", "user_annotation", 0, 100), ("Torch-Compiled Region: 0/0", "cpu_op", 10, 85),
        ("## Call CompiledFxGraph fa7vxxm ##", "user_annotation", 12, 80), ("aten::mm", "cpu_op", 20, 30),
        ("aten::empty", "cpu_op", 60, 0.5),
    ]  # fmt: skip
    events = [
        {"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": 1, "ts": ts, "dur": dur, "args": {}}
        for name, cat, ts, dur in slices
    ]
    (tmp_path / "made.json").write_text(json.dumps({"traceEvents": events}))
    assert cli.main([str(tmp_path / "made.json"), "--only", "short,gpu"]) == 0
    said = capsys.readouterr().out
    assert "Inductor's graph 50%, aten::mm 30%, Torch-Compiled Region: 0/0 5%" in said  # 80 - 30 - 0.5 of 100
    assert "15% of the step is in no recorded op" in said  # 100 - 85
    assert "gpu: nothing of it in this trace (no GPU work)" in said


def test_a_trace_with_a_gpu_has_none_of_it():
    assert summarize(read(H200 / "01_matmul_add/64_bf16_warm_eager.json.gz")).cpu_work == ()


def test_a_guard_failure_is_a_compilation_in_the_middle(capsys):
    """Four calls: compiled, called, compiled again for other strides, called."""
    trace = ROOT / "traces/reference/guard-failure.json.gz"
    summary = summarize(read(trace))
    compiling = [one.name for one in summary.steps if one.cpu_us > 5 * summary.cpu_us]
    assert len(summary.steps) == 4 and summary.steps[0].name in compiling and summary.steps[2].name in compiling
    assert summary.typical_step not in compiling, "the calls that compile are the odd ones"
    assert cli.main([str(trace), "--only", "patterns"]) == 0
    patterns = capsys.readouterr().out
    assert "Torch-Compiled Region n/1 or higher" in patterns
    assert "the same graph hash in all steps" not in patterns, "there are two graphs"
