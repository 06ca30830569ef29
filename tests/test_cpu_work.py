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


def test_rates_are_set_against_what_the_run_measured(capsys):
    summary = summarize(read(MLP))
    document = json.loads(gzip.decompress(MLP.read_bytes()))
    roofs = document["lesson"]["facts"]["roofs"]
    mark, events = raw_step(MLP, summary.typical_step)
    products = [e for e in events if e["name"] == "aten::mm"]
    best = [min(1, 2 * 8192 * 768 * 3072 / e["dur"] / 1e6 / roofs["tflops"]) for e in products]
    assert [one.of_roof for one in summary.cpu_work if one.product] == pytest.approx(best, rel=1e-4)
    assert {one.roof for one in summary.cpu_work if one.product} == {"compute"}
    for one in summary.cpu_work:
        if one.bytes_moved:
            assert one.roof == "memory" and one.of_roof == pytest.approx(one.gb_s / roofs["gb_s"])
    took = [e["dur"] for e in products]
    reached = sum(share * us for share, us in zip(best, took, strict=True)) / sum(took)
    assert cli.main([str(MLP), "--only", "short"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert min(best) > 0.5 and f"compute-bound, on the CPU: {sum(took) / mark['dur']:.0%} of the step" in said
    assert f"at {reached:.0%} of the best rate of arithmetic that this run measured" in said


def flags_and_roofs(tmp_path, roofs, trace=MLP, dtype="bf16"):
    """A trace with other roofs, as somebody's machine may have them."""
    document = json.loads(gzip.decompress(trace.read_bytes()))
    document["lesson"]["facts"]["roofs"] = roofs
    document["lesson"]["flags"]["dtype"] = dtype
    (tmp_path / "made.json").write_text(json.dumps(document))
    return summarize(read(tmp_path / "made.json"))


@pytest.mark.parametrize(
    "roofs",
    [None, 3, [], {}, {"tflops": 1.0}, {"tflops": "1", "gb_s": 1.0}, {"tflops": -1.0, "gb_s": 1.0},
     {"tflops": True, "gb_s": 1.0}],
)  # fmt: skip
def test_roofs_that_nobody_measured_are_none(tmp_path, roofs):
    assert {one.roof for one in flags_and_roofs(tmp_path, roofs).cpu_work} == {None}


def test_a_roof_is_one_for_its_type_and_for_what_comes_from_memory(tmp_path):
    found = flags_and_roofs(tmp_path, {"tflops": 1.0, "gb_s": 50.0}, dtype="fp32").cpu_work
    assert {one.roof for one in found} == {"memory"}, "bf16 products, fp32 roof"
    found = flags_and_roofs(tmp_path, {"tflops": 1.0, "gb_s": 1.0}).cpu_work
    assert {one.roof for one in found if one.bytes_moved} == {None}, "faster than memory: out of a cache"
    small = CPU / "05_llm/1x512_bf16_warm_eager_layers4_shapes.json.gz"
    found = flags_and_roofs(tmp_path, {"tflops": 1.0, "gb_s": 1e6}, small).cpu_work
    large = [one for one in found if one.roof == "memory" or (one.product and one.product.elements * 2 > 2**25)]
    assert len(large) == 1 and large[0].product.n == 151_936, "a few kB are in a cache"


def test_far_from_both_roofs_neither_bounds_it(capsys):
    trace = CPU / "04_c_sdpa_attention/8x16x1024x64_bf16_warm_eager_flash_shapes.json.gz"
    (one,) = summarize(read(trace)).cpu_work
    _, events = raw_step(trace, summarize(read(trace)).typical_step)
    (event,) = [e for e in events if e["name"] == "aten::_scaled_dot_product_flash_attention_for_cpu"]
    assert event["args"]["Concrete Inputs"][4] == "True"
    assert one.flops == 4 * 8 * 16 * (1024 * 1025 // 2) * 64, "causal"
    assert one.tflops == pytest.approx(one.flops / event["dur"] / 1e6, rel=1e-4)
    assert cli.main([str(trace), "--only", "short"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert f"CPU only: 100% of the step is in ops at {one.of_roof:.0%} of the best rate of arithmetic" in said


def test_calls_of_one_size_are_one_line(capsys):
    trace = CPU / "05_llm/1x512_bf16_warm_eager_layers4_shapes.json.gz"
    summary = summarize(read(trace))
    _, events = raw_step(trace, summary.typical_step)
    same = [
        e["dur"] for e in events
        if e["name"] == "aten::mm" and e["args"]["Input Dims"][:2] == [[1, 1024], [1024, 3072]]
    ]  # fmt: skip
    assert cli.main([str(trace), "--only", "cpu"]) == 0
    rate = len(same) * 2 * 1024 * 3072 / sum(same) / 1e3
    said = " ".join(capsys.readouterr().out.split())
    assert len(same) == 8 and f"aten::mm, 8 times: M 1 · K 1024 · N 3072, 6.3 MFLOP at {rate:,.1f} GFLOP/s" in said


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
    (share,) = re.findall(r"(\d+)% of the step is in no recorded op", " ".join(capsys.readouterr().out.split()))
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
