"""Every figure of the report against one worked out here from the raw events, on every real trace."""

import gzip
import itertools
import json
from argparse import Namespace
from statistics import median

import pytest
from conftest import REAL_TRACES, ROOT, load_script

from common import compare, facts, guesses, reading, trace

GPU = ("kernel", "gpu_memcpy", "gpu_memset")


@pytest.fixture(scope="module", params=REAL_TRACES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def both(request):
    """One trace as we read it, and its raw complete events."""
    raw = json.loads(gzip.decompress(request.param.read_bytes()))["traceEvents"]
    return trace.read(request.param), [event for event in raw if event.get("ph") == "X"]


def end(event):
    return event["ts"] + event["dur"]


def raw_steps(events):
    marks = [e for e in events if e.get("cat") == "user_annotation" and e["name"].startswith("ProfilerStep#")]
    return sorted(marks, key=lambda e: e["ts"])


def raw_work(events, mark):
    """The GPU work launched in a step: by correlation, whatever the annotations say."""
    calls = {
        e["args"]["correlation"] for e in events
        if e.get("cat") in ("cuda_runtime", "cuda_driver") and mark["ts"] <= e["ts"] < end(mark)
    }  # fmt: skip
    work = (e for e in events if e.get("cat") in GPU and e["args"]["correlation"] in calls)
    return sorted(work, key=lambda e: e["ts"])


def covered(spans):
    """Length of a union, counted between neighbouring edges."""
    edges = sorted({edge for span in spans for edge in span})
    return sum(
        right - left for left, right in itertools.pairwise(edges)
        if any(start <= left and right <= stop for start, stop in spans)
    )  # fmt: skip


def about(value):
    # Raw stamps are doubles of 4e12 µs: a few tenths of a nanosecond are lost in each sum.
    return pytest.approx(value, abs=0.02)


def test_steps(both):
    ours, events = both
    found = reading.step_facts(ours)
    marks = raw_steps(events)
    assert [one.step.name for one in found] == [mark["name"] for mark in marks]
    all_work = [(e["ts"], end(e)) for e in events if e.get("cat") in GPU]
    usual = sorted(mark["dur"] for mark in marks)[(len(marks) - 1) // 2]
    for one, mark in zip(found, marks, strict=True):
        work = raw_work(events, mark)
        assert one.step.us == about(mark["dur"])
        assert [w.name for w in one.step.work] == [e["name"] for e in work]
        assert one.launches == len({e["args"]["correlation"] for e in work})
        assert one.busy_us == about(covered([(e["ts"], end(e)) for e in work]))
        assert one.span_us == about(max(map(end, work)) - min(e["ts"] for e in work) if work else 0)
        assert (one.ratio is not None) == (mark["dur"] >= 1.5 * usual)
        label = min(
            (e for e in events if e.get("cat") == "user_annotation" and e is not mark
             and mark["ts"] <= e["ts"] < end(mark)), key=lambda e: e["ts"],
        )  # fmt: skip
        first_op = min(e["ts"] for e in events if e.get("cat") == "cpu_op" and label["ts"] <= e["ts"] < end(label))
        assert one.gap_us == about(first_op - label["ts"])
        if not work:
            assert one.idle is None and one.offset_us is None
            continue
        launch = {e["args"]["correlation"]: e["ts"] for e in events if e.get("cat") in ("cuda_runtime", "cuda_driver")}
        assert one.offset_us == about(work[0]["ts"] - launch[work[0]["args"]["correlation"]])
        stop = max([end(mark), *map(end, work)])
        inside = [(max(a, mark["ts"]), min(b, stop)) for a, b in all_work if a < stop and b > mark["ts"]]
        assert one.idle == pytest.approx(1 - covered(inside) / (stop - mark["ts"]), abs=1e-3)


def test_gpu_work_of_a_step(both):
    ours, events = both
    marks = raw_steps(events)
    typical = sorted(marks, key=lambda mark: mark["dur"])[(len(marks) - 1) // 2]
    works = [raw_work(events, mark) for mark in marks]
    rows = reading.work_rows(ours)
    expected = raw_work(events, typical)
    assert [row.work.name for row in rows] == [e["name"] for e in expected]
    for row, event in zip(rows, expected, strict=True):
        nth = [e["name"] for e in expected[: expected.index(event)]].count(event["name"])
        same = [[e for e in work if e["name"] == event["name"]] for work in works]
        durations = [group[nth]["dur"] for group in same if len(group) > nth]
        assert row.us == about(median(durations))
        assert (row.low_us, row.high_us) == (about(min(durations)), about(max(durations)))
        call = next(
            e for e in events if e.get("cat") in ("cuda_runtime", "cuda_driver")
            and e["args"].get("correlation") == event["args"]["correlation"]
        )  # fmt: skip
        assert row.launched_by == call["name"]
        around = [
            e for e in events if e.get("cat") in ("cpu_op", "user_annotation") and e["ts"] <= call["ts"] < end(e)
        ]  # fmt: skip
        assert row.asked_by == max(around, key=lambda e: e["ts"])["name"]
        # Kineto ties each kernel to its op by an id of its own: the two ways must agree.
        owner = next(e for e in events if e.get("cat") in ("cpu_op", "user_annotation")
                     and e["args"]["External id"] == event["args"]["External id"])  # fmt: skip
        assert row.asked_by == owner["name"]
        if row.tflops:
            first = 1 if owner["name"] == "aten::addmm" else 0  # behind the bias
            left, right = owner["args"]["Input Dims"][first : first + 2]
            assert row.shape.flops == 2 * left[0] * left[1] * right[1]
            assert row.tflops == pytest.approx(row.shape.flops / row.us / 1e6)
        if event["cat"] == "gpu_memcpy":
            assert row.gb_s == pytest.approx(2 * event["args"]["bytes"] / row.us / 1e3)


def test_window_and_regime(both):
    ours, events = both
    marks = raw_steps(events)
    usual = sorted(mark["dur"] for mark in marks)[(len(marks) - 1) // 2]
    if marks[0]["dur"] > 10 * usual:
        marks = marks[1:]
    work = [e for mark in marks for e in raw_work(events, mark)]
    found = reading.regime(ours)
    window = max([*map(end, marks), *map(end, work)]) - marks[0]["ts"]
    assert found.window_us == about(window)
    if work:
        assert found.share == pytest.approx(covered([(e["ts"], end(e)) for e in work]) / window, abs=1e-4)
    else:
        assert found.name == "CPU only"


def test_no_slice_crosses_and_all_work_has_its_launch(both):
    ours, _ = both
    assert not ours.crossing and ours.unlaunched == 0 and ours.zeroed == 0
    assert facts.warnings(ours) == []


def test_facts_are_json(both):
    ours, _ = both
    assert json.loads(json.dumps(facts.facts(ours)))["typical_step"] == reading.typical(ours).name


H200 = ROOT / "traces/reference/nvidia-h200"
# Kernels, copies, memsets and launches of a step, as shared/claims.md counts them on an H200.
COUNTS = {
    "01_matmul_add/64_bf16_cold_eager": (2, 0, 0, 2),
    "01_matmul_add/64_bf16_warm_eager_batch8": (2, 0, 0, 2),
    "01_matmul_add/4096_bf16_warm_eager": (2, 0, 1, 3),
    "01_matmul_add/4096_bf16_warm_compile": (1, 1, 1, 3),
    "01_matmul_add/4096_bf16_warm_eager_addmm": (1, 1, 1, 3),
    "01_matmul_add/4096_bf16_warm_compile_reduce-overhead": (5, 0, 1, 4),
    "02_linear/1024x32x64_bf16_cold_eager": (1, 0, 0, 1),
    "02_linear/1024x32x64_bf16_warm_compile": (1, 0, 0, 1),
    "03_simple_mlp/64x128x768x3072_bf16_warm_eager": (5, 0, 2, 7),
    "03_simple_mlp/64x128x768x3072_bf16_warm_compile": (4, 0, 2, 6),
    "03_kernels_mlp/64x128x768x3072_bf16_warm_eager": (4, 0, 2, 6),
}


@pytest.mark.parametrize("name", COUNTS)
def test_counts_of_the_claims(name):
    ours = trace.read(H200 / f"{name}.json.gz")
    kinds = tuple(reading.count_per_step(ours, kind) for kind in ("kernel", "memcpy", "memset"))
    middle = next(one for one in reading.step_facts(ours) if one.step is reading.typical(ours))
    assert (*kinds, middle.launches) == COUNTS[name]


def read(name):
    return trace.read(H200 / f"{name}.json.gz")


def test_compare_reproduces_the_closing_table():
    eager, compiled, liger = (
        compare.Side(read(f"03_{name}"))
        for name in (
            "simple_mlp/64x128x768x3072_bf16_warm_eager", "simple_mlp/64x128x768x3072_bf16_warm_compile",
            "kernels_mlp/64x128x768x3072_bf16_warm_eager",
        )
    )  # fmt: skip
    assert compare.setup(eager) == "3 x GEMM, 2 x memset, 1 x gelu, 1 x mul"
    for side, kernel in ((compiled, "triton_poi_fused__unsafe_view_gelu_mul_0"), (liger, "_geglu_tanh_forward_kernel")):
        found = compare.difference(eager, side)
        assert any(text.startswith("gelu ") and kernel in text for text in found.changed)
        gemms = next(text for text in found.same if "GEMMs" in text)
        assert gemms.startswith("3 of the GEMMs") and "2 x nvjet_sm90_tst_256x128" in gemms
    changed = " ".join(compare.difference(eager, compiled).changed)
    assert "TorchDynamo" in changed and "aten::linear" in changed
    assert "TorchDynamo" not in " ".join(compare.difference(eager, liger).changed)


def test_compare_names_the_epilogue():
    eager, compiled = (read(f"01_matmul_add/4096_bf16_warm_{path}") for path in ("eager", "compile"))
    found = compare.difference(compare.Side(eager), compare.Side(compiled))
    assert any("same tile and layout, epilogue beta zero → beta adds" in text for text in found.changed)
    assert any("Memcpy DtoD" in text for text in found.changed)


def test_compare_of_linear_finds_the_same_kernel():
    eager, compiled = (read(f"02_linear/1024x32x64_bf16_warm_{path}") for path in ("eager", "compile"))
    found = compare.difference(compare.Side(eager), compare.Side(compiled))
    assert not any("GPU work" in text for text in found.changed)
    assert any(text.startswith("ops gone: ") and "aten::t" in text for text in found.changed)


def test_a_trace_equals_itself():
    side = compare.Side(read("02_linear/1024x32x64_bf16_warm_eager"))
    assert compare.difference(side, side).changed == ()


def verdicts(name):
    ours = read(name)
    script = load_script(ours.lesson["script"])
    return {guess.text: guess.ask(ours) for guess in script.what_we_guess(Namespace(**ours.lesson["flags"]))}


@pytest.mark.parametrize(
    ("name", "part", "holds", "says"),
    [
        ("01_matmul_add/64_bf16_cold_eager", "overhead-bound", True, "overhead-bound"),
        ("01_matmul_add/64_bf16_cold_eager", "occupancy query", False, "nvjet"),
        ("01_matmul_add/64_bf16_cold_eager", "closing cudaDeviceSynchronize", False, ""),
        ("01_matmul_add/4096_bf16_warm_eager", "compute-bound", True, "busy 8"),
        ("01_matmul_add/4096_bf16_warm_eager", "footprint", True, "168 registers"),
        ("01_matmul_add/64_bf16_warm_eager", "warm: the steps", False, ""),
        ("01_matmul_add/64_bf16_cold_eager_wait0_schedwarmup0_active20", "buffer once", True, "1,"),
        ("01_matmul_add/64_bf16_warm_eager_batch8", "resolves to aten::bmm", True, ""),
        ("01_matmul_add/4096_bf16_warm_compile", "copy of the bias", True, "33.6 MB"),
        ("01_matmul_add/4096_bf16_warm_compile", "Dynamo looks up", True, "1 graph hash in 3 steps"),
        ("01_matmul_add/4096_bf16_warm_compile_reduce-overhead", "CUDA graph replays", False, "3 more before it"),
        ("02_linear/1024x32x64_bf16_cold_eager", "bias is added in the GEMM", True, "bias_TNT"),
        ("02_linear/1024x32x64_bf16_cold_eager", "read transposed", True, "TNT"),
        ("02_linear/1024x32x64_bf16_cold_eager", "aten::t: no GPU work", True, ""),
        ("03_simple_mlp/64x128x768x3072_bf16_warm_eager", "5 kernels", True, "2 memsets"),
        ("03_simple_mlp/64x128x768x3072_bf16_warm_eager_shapes", "flatten to 8192 rows", True, "38.7 GFLOP"),
        ("03_simple_mlp/64x128x768x3072_bf16_warm_compile", "one kernel, written by Inductor", True, "triton_poi"),
        ("03_kernels_mlp/64x128x768x3072_bf16_warm_eager", "256 threads", True, "[8192, 1, 1]"),
    ],
)
def test_verdicts(name, part, holds, says):
    ((_, answer),) = [(text, answer) for text, answer in verdicts(name).items() if part in text]
    assert answer.holds is holds
    assert says in answer.seen + answer.because


def test_a_guess_can_break_and_can_be_out_of_reach():
    """The same questions, put to traces of another kind."""
    eager_guesses = {**verdicts("02_linear/1024x32x64_bf16_cold_eager")}
    assert any(answer.holds is True for answer in eager_guesses.values())
    compiled = read("02_linear/1024x32x64_bf16_warm_compile")
    assert guesses.dispatches("aten::linear", "aten::addmm").ask(compiled).holds is False
    assert guesses.launch_nothing("aten::t").ask(compiled).holds is None
    assert guesses.kernels_are(5, "27").ask(compiled).holds is False
    eager = read("03_simple_mlp/64x128x768x3072_bf16_warm_eager")
    assert guesses.compiled_rows().ask(eager).holds is False
    assert guesses.no_compile_rows().ask(compiled).holds is False
    assert guesses.product_sizes(8192, 768, 3072).ask(eager).holds is None
    assert guesses.bias_in_the_epilogue().ask(eager).holds is False


def test_the_scripts_guesses_cover_the_claims():
    """All of 02 to 37 that a single run can bear out or break; the rest need two runs or a call after."""
    covered_claims = set()
    for file in H200.rglob("*.gz"):
        ours = trace.read(file)
        script = load_script(ours.lesson["script"])
        for guess in script.what_we_guess(Namespace(**ours.lesson["flags"])):
            covered_claims |= set(guess.claims.split())
    needs_more_than_one_run = {"26", "35", "36"}
    assert covered_claims == {f"{n:02}" for n in range(2, 38)} - needs_more_than_one_run
