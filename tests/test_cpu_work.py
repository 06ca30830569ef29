"""FLOPs and rates of ops on a CPU, recomputed from the raw events; a step's time outside all ops."""

import gzip
import json
import math
import re
from collections import Counter

import pytest
from raw_events import event
from references import H200, ROOT

from tracereader import cli
from tracereader.figures import summarize
from tracereader.figures.cpu_work import covered_us
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
    assert [one.name for one in summary.cpu.cpu_work] == [e["name"] for e in expected]
    for one, call in zip(summary.cpu.cpu_work, expected, strict=True):
        left, right = (call["args"]["Input Dims"] + [[]])[:2]
        if one.name == "aten::mm":
            flops = 2 * left[0] * left[1] * right[1]
            assert flops == 2 * 8192 * 768 * 3072 and one.product.flops == flops
            assert one.tflops == pytest.approx(flops / call["dur"] / 1e6, rel=1e-4)
        else:
            read_ = math.prod(left) + (math.prod(right) if one.name == "aten::mul" else 0)
            assert one.bytes_moved == 2 * (read_ + math.prod(left))
            assert one.gb_s == pytest.approx(one.bytes_moved / call["dur"] / 1e3, rel=1e-4)
    assert [one.layer for one in summary.cpu.cpu_work if one.product] == ["gate_proj", "up_proj", "down_proj"]


def test_rates_are_shares_of_the_runs_measured_peaks(capsys):
    summary = summarize(read(MLP))
    document = json.loads(gzip.decompress(MLP.read_bytes()))
    roofs = document["lesson"]["facts"]["roofs"]
    mark, events = raw_step(MLP, summary.typical_step)
    products = [e for e in events if e["name"] == "aten::mm"]
    best = [min(1, 2 * 8192 * 768 * 3072 / e["dur"] / 1e6 / roofs["tflops"]) for e in products]
    assert [one.of_roof for one in summary.cpu.cpu_work if one.product] == pytest.approx(best, rel=1e-4)
    assert {one.roof for one in summary.cpu.cpu_work if one.product} == {"compute"}
    for one in summary.cpu.cpu_work:
        if one.bytes_moved:
            assert one.roof == "memory" and one.of_roof == pytest.approx(one.gb_s / roofs["gb_s"])
    took = [e["dur"] for e in products]
    reached = sum(share * us for share, us in zip(best, took, strict=True)) / sum(took)
    assert cli.main([str(MLP), "--only", "short"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert min(best) > 0.5 and f"Compute-bound, on the CPU. {sum(took) / mark['dur']:.0%} of the step" in said
    assert f"that reach {reached:.0%} of the best arithmetic rate that this run measured" in said


def flags_and_roofs(tmp_path, roofs, trace=MLP, dtype="bf16"):
    """Return a trace with the measured peaks of another machine."""
    document = json.loads(gzip.decompress(trace.read_bytes()))
    document["lesson"]["facts"]["roofs"] = roofs
    document["lesson"]["flags"]["dtype"] = dtype
    (tmp_path / "made.json").write_text(json.dumps(document))
    return summarize(read(tmp_path / "made.json"))


@pytest.mark.parametrize(
    "roofs",
    [None, 3, [], {}, {"tflops": 1.0}, {"tflops": "1", "gb_s": 1.0}, {"tflops": -1.0, "gb_s": 1.0},
     {"tflops": True, "gb_s": 1.0}, {"tflops": 10**400, "gb_s": 1.0}],
)  # fmt: skip
def test_unmeasured_peaks_are_none(tmp_path, roofs):
    assert {one.roof for one in flags_and_roofs(tmp_path, roofs).cpu.cpu_work} == {None}


def test_a_peak_applies_to_its_type_and_to_memory_traffic(tmp_path):
    found = flags_and_roofs(tmp_path, {"tflops": 1.0, "gb_s": 50.0}, dtype="fp32").cpu.cpu_work
    assert {one.roof for one in found if one.product} == {None}, "bf16 products, fp32 roof"
    found = flags_and_roofs(tmp_path, {"tflops": 1.0, "gb_s": 1.0}).cpu.cpu_work
    assert {one.roof for one in found if one.bytes_moved} == {None}, "faster than memory: out of a cache"
    small = CPU / "05_llm/1x512_bf16_warm_eager_layers4_shapes.json.gz"
    found = flags_and_roofs(tmp_path, {"tflops": 1.0, "gb_s": 1e6}, small).cpu.cpu_work
    large = [one for one in found if one.roof == "memory" or (one.product and one.product.elements * 2 > 2**25)]
    assert len(large) == 1 and large[0].product.n == 151_936, "a few kB are in a cache"


def test_work_far_from_both_peaks_is_not_bound_by_them(capsys):
    trace = CPU / "04_c_sdpa_attention/8x16x1024x64_bf16_warm_eager_flash_shapes.json.gz"
    (one,) = summarize(read(trace)).cpu.cpu_work
    _, events = raw_step(trace, summarize(read(trace)).typical_step)
    (event,) = [e for e in events if e["name"] == "aten::_scaled_dot_product_flash_attention_for_cpu"]
    assert event["args"]["Concrete Inputs"][4] == "True"
    assert one.flops == 4 * 8 * 16 * (1024 * 1025 // 2) * 64, "causal"
    assert one.tflops == pytest.approx(one.flops / event["dur"] / 1e6, rel=1e-4)
    assert cli.main([str(trace), "--only", "short"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert f"CPU only. 100% of the step is in ops that reach {one.of_roof:.0%} of the best arithmetic rate" in said


def test_without_peaks_the_costliest_op_is_named(capsys):
    trace = ROOT / "tests/traces/attention_cpu_naive.json.gz"
    step, events = raw_step(trace, summarize(read(trace)).typical_step)
    own = Counter()
    ops = [e for e in events if e.get("cat") == "cpu_op"]
    for one in ops:
        covered, reached = 0.0, one["ts"]
        for below in sorted((e for e in ops if one["ts"] <= e["ts"] and e is not one), key=lambda e: e["ts"]):
            stop = below["ts"] + below["dur"]
            if stop <= one["ts"] + one["dur"]:
                covered += max(0.0, stop - max(reached, below["ts"]))
                reached = max(reached, stop)
        own[one["name"]] += one["dur"] - covered
    (name, us), *_ = own.most_common()
    assert cli.main([str(trace), "--only", "short"]) == 0
    said = capsys.readouterr().out
    assert f"CPU only. {us / step['dur']:.0%} of the step is self time of {name}.\n" in said


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
    assert len(same) == 8
    assert f"aten::mm of BFloat16, 8 times: M 1 · K 1024 · N 3072, 6.3 MFLOP at {rate:,.1f} GFLOP/s" in said


def test_inductors_kernels_are_named(capsys):
    trace = CPU / "03_simple_mlp/64x128x768x3072_bf16_warm_compile.json.gz"
    names = [one.name for one in summarize(read(trace)).cpu.cpu_work]
    assert [name for name in names if "cpp_fused" in name] == ["graph_0_cpp_fused__unsafe_view_gelu_mul_0"]
    assert names.count("aten::mm") == 3
    assert cli.main([str(trace), "--only", "predictions"]) == 0
    assert "yes  gelu and mul are one kernel, written by Inductor" in capsys.readouterr().out


def test_the_time_outside_ops(capsys):
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


def test_inductors_code_is_not_time_outside_ops(tmp_path, capsys):
    """torch 2.15 records the call of a compiled graph as an annotation, and does not record its C++ kernels."""
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
    assert cli.main([str(tmp_path / "made.json"), "--only", "cpu,gpu"]) == 0
    said = capsys.readouterr().out
    shares = {"Inductor's graph": "49.5", "aten::mm": "30.0", "Torch-Compiled Region: 0/0": "5.0"}  # 80 - 30 - 0.5
    for name, share in (shares | {"in no recorded op": "15.0"}).items():  # 100 - 85
        assert re.search(rf"^{re.escape(name)} +{share} +{share}%", said, re.M), name
    assert "gpu: not in this trace (no GPU activity)" in said


def test_a_trace_with_gpu_work_has_no_cpu_work():
    assert summarize(read(H200 / "01_matmul_add/64_bf16_warm_eager.json.gz")).cpu.cpu_work == ()


def test_a_guard_failure_is_a_compilation_in_the_middle(capsys):
    """There are four calls: compiled, called, compiled again for other strides, called."""
    trace = ROOT / "traces/reference/guard-failure.json.gz"
    summary = summarize(read(trace))
    compiling = [one.name for one in summary.steps if one.cpu_us > 5 * summary.cpu_us]
    assert len(summary.steps) == 4 and summary.steps[0].name in compiling and summary.steps[2].name in compiling
    assert summary.typical_step not in compiling, "the calls that compile are the odd ones"
    assert cli.main([str(trace), "--only", "patterns"]) == 0
    patterns = capsys.readouterr().out
    assert "Torch-Compiled Region n/1 or higher" in patterns
    assert "the same graph hash in all steps" not in patterns, "there are two graphs"


def made(tmp_path, slices, name="made.json"):
    """Return a trace of slices: name, category, start, duration (µs), and optionally thread and args."""
    events = [
        event(name, cat, ts, dur, (*rest, 1)[0], **(rest[1] if len(rest) > 1 else {}))
        for name, cat, ts, dur, *rest in slices
    ]
    (tmp_path / name).write_text(json.dumps({"traceEvents": events}))
    return tmp_path / name


def test_the_time_outside_ops_considers_all_threads(tmp_path):
    """Time in another thread, a collective or a DataLoader's wait is inside; so is an annotation in an op."""
    one_step = ("ProfilerStep#1", "user_annotation", 0, 100)
    label_in_op = made(
        tmp_path, [one_step, ("Mine", "cpu_op", 10, 80), ("a label", "user_annotation", 12, 70)], "a.json"
    )
    assert summarize(read(label_in_op)).cpu.outside_ops == pytest.approx(0.2)
    threads = made(tmp_path, [one_step, ("aten::mm", "cpu_op", 0, 40), ("aten::tanh", "cpu_op", 30, 30, 2)], "b.json")
    summary = summarize(read(threads))
    assert summary.cpu.outside_ops == pytest.approx(0.4) and summary.cpu.op_threads == 2
    waits = [
        one_step, ("aten::mm", "cpu_op", 0, 10), ("enumerate(DataLoader)#_Iter.__next__", "user_annotation", 10, 30),
        ("gloo:all_reduce", "user_annotation", 40, 20, 2), ("aten::copy_", "cpu_op", 95, 20, 2),
    ]  # fmt: skip
    assert summarize(read(made(tmp_path, waits, "c.json"))).cpu.outside_ops == pytest.approx(0.35), (
        "cut off at the step"
    )
    reaches_in = [
        ("ProfilerStep#0", "user_annotation", -50, 50), ("aten::mm", "cpu_op", -20, 60, 2), one_step,
        ("aten::add", "cpu_op", 90, 10), ("ProfilerStep#2", "user_annotation", 100, 90),
        ("aten::add", "cpu_op", 100, 10),
    ]  # fmt: skip
    trace = read(made(tmp_path, reaches_in, "d.json"))
    assert summarize(trace, trace.steps[1]).cpu.outside_ops == pytest.approx(0.5)
    assert summarize(read(made(tmp_path, [one_step, ("a", "user_annotation", 1, 2)], "e.json"))).cpu.outside_ops is None


def test_an_annotation_around_prof_step_takes_no_ops_from_a_step(tmp_path, capsys):
    """In `with record_function(…): work(); prof.step()` the annotation ends in the next step."""
    slices = []
    for number in range(3):
        start = 100 * number
        slices += [
            (f"ProfilerStep#{number}", "user_annotation", start, 100),
            ("iteration", "user_annotation", start + 5, 97), ("aten::mm", "cpu_op", start + 10, 60 + number),
        ]  # fmt: skip
    trace = read(made(tmp_path, slices))
    for number, step in enumerate(trace.steps):
        ops = [op for op in step.walk() if op.kind == "op"]
        assert [(op.name, op.us) for op in ops] == [("aten::mm", 60 + number)]
    for step in trace.steps:
        summary = summarize(trace, step)
        assert (
            sum(call.self_us for call in summary.cpu.chain if call.kind == "op") == summary.cpu.ops["aten::mm"].self_us
        )
        assert all(call.self_us >= 0 for call in summary.cpu.chain)
    assert cli.main([str(trace.path), "--only", "cpu,steps"]) == 0
    said = capsys.readouterr().out
    assert re.search(r"^aten::mm +61\.0 +61\.0%", said, re.M) and "crosses" not in said.split("iteration")[0]


FP32, BF16 = "float", "c10::BFloat16"


def recorded(shapes, types):
    return {"Input Dims": shapes, "Input type": types}


def test_computing_ops_count_once_and_by_type(tmp_path, capsys):
    square = [[64, 64], [64, 64]]
    slices = [
        ("ProfilerStep#1", "user_annotation", 0, 1000),
        ("aten::mm", "cpu_op", 0, 100, 1, recorded([[8, 8], [8, 8]], [FP32, FP32])),  # vmap's: a bmm does its work
        ("aten::bmm", "cpu_op", 10, 80, 1, recorded([[4, 8, 8], [4, 8, 8]], [FP32, FP32])),
        ("aten::mm", "cpu_op", 100, 50, 1, recorded(square, [FP32, FP32])),
        ("aten::mm", "cpu_op", 150, 20, 1, recorded(square, [BF16, BF16])),
        ("aten::mm", "cpu_op", 170, 60, 1, recorded(square, ["c10::complex<float>"] * 2)),
        ("aten::mm", "cpu_op", 230, 3, 1, recorded(square, [FP32, FP32])), ("aten::new_empty", "cpu_op", 231, 1),
        ("aten::mm", "cpu_op", 240, 9, 1, recorded(square, [FP32, FP32])), ("aten::_sparse_mm", "cpu_op", 241, 5),
        ("aten::mul", "cpu_op", 260, 9, 1, recorded([[], [64, 64], [64, 64]], ["double", FP32, FP32])),
        ("compile_inner (dynamo_timed)", "cpu_op", 300, 90),
        ("aten::mm", "cpu_op", 310, 5, 1, recorded(square, [FP32, FP32])),
    ]  # fmt: skip
    trace = made(tmp_path, slices)
    found = [(one.name, one.type, one.flops) for one in summarize(read(trace)).cpu.cpu_work]
    assert found == [
        ("aten::bmm", FP32, 2 * 4 * 8**3), ("aten::mm", FP32, 2 * 64**3), ("aten::mm", BF16, 2 * 64**3),
        ("aten::mm", "", None), ("aten::mul", FP32, None),
    ]  # fmt: skip
    assert cli.main([str(trace), "--only", "cpu"]) == 0
    said = capsys.readouterr().out
    assert "aten::mm of float: M 64" in said and "aten::mm of BFloat16: M 64" in said


def test_products_below_the_ridge_point_are_memory_bound(capsys):
    """The products are one token's: each weight is read once, and all weights together exceed a cache."""
    trace = CPU / "05_llm/1x512_bf16_warm_eager_layers4_shapes.json.gz"
    summary = summarize(read(trace))
    roofs = json.loads(gzip.decompress(trace.read_bytes()))["lesson"]["facts"]["roofs"]
    mark, events = raw_step(trace, summary.typical_step)
    took, moved = 0.0, 0.0
    for e in events:
        if e["name"] == "aten::mm":
            (m, k), (_, n) = e["args"]["Input Dims"][:2]
            took, moved = took + e["dur"], moved + 2 * (m * k + k * n + m * n)
    assert moved > 2**25
    assert cli.main([str(trace), "--only", "short"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    reached = moved / took / 1e3 / roofs["gb_s"]
    assert f"Memory-bound, on the CPU. {took / mark['dur']:.0%} of the step is in ops that reach {reached:.0%}" in said


def test_a_peak_that_the_run_exceeds_is_none(tmp_path):
    best = max(one.tflops for one in summarize(read(MLP)).cpu.cpu_work if one.product)
    found = flags_and_roofs(tmp_path, {"tflops": best / 1.05, "gb_s": 50.0}).cpu.cpu_work
    assert max(one.of_roof for one in found if one.product) == 1.0, "a little above: it is the best itself"
    found = flags_and_roofs(tmp_path, {"tflops": best / 1.2, "gb_s": 50.0}).cpu.cpu_work
    assert {one.roof for one in found if one.product} == {None}


def test_an_op_is_bound_by_the_peak_on_its_side_of_the_ridge_point(tmp_path):
    """Products of one inner size are memory-bound below the ridge point. An op without duration has no share."""
    tflops, gb_s = 1.0, 100.0
    shapes = [([8192, size], [size, 8192]) for size in (4, 8, 16, 24, 64, 512)]
    calls = [event("ProfilerStep#1", "user_annotation", 0, 10**8)]
    for at, (left, right) in enumerate([*shapes, ([2**24], [2**24])]):
        name, dur = ("aten::mm", 10**7) if len(left) == 2 else ("aten::mul", 0)
        args = {"Input Dims": [left, right], "Input type": [FP32, FP32]}
        calls.append(event(name, "cpu_op", 10 + at * (10**7 + 10), dur, **args))
    facts = {"roofs": {"tflops": tflops, "gb_s": gb_s}}
    lesson = {"script": "x", "flags": {"dtype": "fp32"}, "guesses": [], "facts": facts}
    (tmp_path / "made.json").write_text(json.dumps({"traceEvents": calls, "lesson": lesson}))
    found = summarize(read(tmp_path / "made.json")).cpu.cpu_work
    for one, ((m, k), (_, n)) in zip(found, shapes, strict=False):
        flops, moved = 2 * m * k * n, 4 * (m * k + k * n + m * n)
        below = flops / moved < tflops * 1e3 / gb_s
        assert one.roof == ("memory" if below else "compute")
        rate = moved / 10**7 / 1e3 / gb_s if below else flops / 10**7 / 1e6 / tflops
        assert one.of_roof == pytest.approx(rate)
    assert {one.roof for one in found} == {"memory", "compute", None}
    assert (found[-1].name, found[-1].roof, found[-1].of_roof) == ("aten::mul", None, None)


def test_concurrent_threads_count_once(tmp_path, capsys):
    """Three threads multiply at once for 80% of the step, which is 80% and not 240%. For 20% there is no bound."""
    shapes = {"Input Dims": [[1024, 1024], [1024, 1024]], "Input type": ["float", "float"]}
    for name, us, word in (("most", 80_000, "Compute-bound"), ("little", 20_000, "CPU only")):
        slices = []
        for step in range(3):
            start = 100_000 * step
            slices.append(event(f"ProfilerStep#{step}", "user_annotation", start, 100_000))
            slices += [event("aten::mm", "cpu_op", start + 100, us, tid=tid, **shapes) for tid in (1, 2, 3)]
        rate = 2 * 1024**3 / us / 1e6  # TFLOP/s of each
        facts = {"roofs": {"tflops": rate, "gb_s": 1000}}
        lesson = {"script": "any", "flags": {"dtype": "fp32"}, "guesses": [], "facts": facts}
        file = tmp_path / f"{name}.json"
        file.write_text(json.dumps({"traceEvents": slices, "lesson": lesson}))
        assert cli.main([str(file), "--only", "short"]) == 0
        screen = capsys.readouterr().out
        assert word in screen
        assert ("80% of the step is in ops that reach 100%" in screen) == (word == "Compute-bound")
        assert covered_us(summarize(read(file)).cpu.cpu_work) == us


def test_work_far_below_every_peak_is_small_or_on_a_shared_machine(tmp_path, capsys):
    shapes = {"Input Dims": [[64, 64], [64, 64]], "Input type": ["float", "float"]}
    marks = [event(f"ProfilerStep#{step}", "user_annotation", 1000 * step, 1000) for step in range(3)]
    ops = [event("aten::mm", "cpu_op", 1000 * step + 10, 900, **shapes) for step in range(3)]
    lesson = {
        "script": "any",
        "flags": {"dtype": "fp32"},
        "guesses": [],
        "facts": {"roofs": {"tflops": 1, "gb_s": 1000}},
    }
    file = tmp_path / "t.json"
    file.write_text(json.dumps({"traceEvents": marks + ops, "lesson": lesson}))
    assert cli.main([str(file), "--only", "short"]) == 0
    screen = capsys.readouterr().out
    assert (
        "90% of the step is in ops that reach 0% of the best arithmetic rate that this run measured: the ops are small"
        in screen
    )
