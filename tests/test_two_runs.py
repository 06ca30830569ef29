"""Two runs with the same ops are compared by the flags and the ops' inputs in their traces."""

import json

import pytest
from raw_events import event
from references import ROOT

from tracereader import cli
from tracereader.figures import summarize
from tracereader.trace import read
from tracereader.two_runs import compare, sentences

BF16, FP32 = "c10::BFloat16", "float"


def product(type_name, m, k, n):
    return "aten::mm", {"Input Dims": [[m, k], [k, n], []], "Input type": [type_name, type_name, "Scalar"]}


def made(tmp_path, name, calls, flags=None):
    """Return three steps with these calls in each: name and args."""
    events = []
    for number in range(3):
        start = 1000 * number
        events.append(event(f"ProfilerStep#{number}", "user_annotation", start, 990))
        events += [event(op, "cpu_op", start + 5 + 20 * at, 15, **args) for at, (op, args) in enumerate(calls)]
    found = {"traceEvents": events}
    if flags is not None:
        found["lesson"] = {"script": "01_matmul_add", "flags": flags}
    file = tmp_path / f"{name}.json"
    file.write_text(json.dumps(found))
    return file


def changed(*files):
    return sentences.difference(*(compare.Side(summarize(read(file))) for file in files)).changed


def printed(capsys, *words):
    assert cli.main([*map(str, words)]) == 0
    return " ".join(capsys.readouterr().out.split())


def test_the_same_ops_of_another_type(tmp_path, capsys):
    flags = {"size": 64, "dtype": "bf16", "compile": None, "fused": False, "seed": 0, "older": 1}
    first = made(tmp_path, "bf16", [product(BF16, 64, 32, 16)], flags)
    other = made(tmp_path, "fp32", [product(FP32, 64, 32, 16)], {**flags, "dtype": "fp32", "newer": 2})
    of_flags, of_inputs = (
        "flags: --dtype bf16 → --dtype fp32",
        "inputs: aten::mm bf16 [64, 32] [32, 16], then fp32 [64, 32] [32, 16]",
    )
    assert changed(first, other) == (of_flags, of_inputs)
    assert changed(first, first) == ()
    for section in ("short", "work", "chain"):
        assert of_flags in printed(capsys, first, other, "--only", section)


@pytest.mark.parametrize(
    ("before", "after", "says"),
    [
        ({"compile": None}, {"compile": "default"}, "flags: without --compile → --compile default"),
        ({"fused": True}, {"fused": False}, "flags: --fused → without --fused"),
        (
            {"size": 64, "dtype": "bf16"},
            {"size": 32, "dtype": "fp32"},
            "flags: --size 64 → --size 32; --dtype bf16 → --dtype fp32",
        ),
        ({"size": 64}, {"size": 64}, None),
        ({"size": 64}, {}, None),
        ({"size": 64}, None, None),
    ],
)
def test_shared_flags_with_different_values(tmp_path, before, after, says):
    files = [made(tmp_path, str(number), [("aten::add", {})], one) for number, one in enumerate((before, after))]
    assert changed(*files) == ((says,) if says else ())


def test_inputs_are_compared_call_by_call(tmp_path):
    small, large, wide = (product(FP32, 8, 4, n) for n in (2, 16, 32))
    first = made(tmp_path, "first", [small, small, large])
    assert changed(first, made(tmp_path, "turned", [large, small, small])) == ()
    (said,) = changed(first, made(tmp_path, "second", [small, large, large]))
    assert said == "inputs: aten::mm fp32 [8, 4] [4, 2], then fp32 [8, 4] [4, 16]"
    (said,) = changed(first, made(tmp_path, "third", [large, large, wide]))
    assert said == "inputs: aten::mm fp32 [8, 4] [4, 2], then fp32 [8, 4] [4, 16] and 1 more"
    gathers = [("aten::index", {"Input Dims": [[8, 4], [3]], "Input type": [FP32, one]}) for one in ("long int", "int")]
    (said,) = changed(*(made(tmp_path, str(number), [one]) for number, one in enumerate(gathers)))
    assert said == "inputs: aten::index fp32 [8, 4], int64 [3], then fp32 [8, 4], int32 [3]"


def test_an_ops_output_is_not_its_input(tmp_path):
    """Compiled code calls a product with out=, and torch records that tensor after the inputs."""
    factors, written = [[128, 64, 32], [128, 32, 64]], [128, 64, 64]
    calls = [("aten::bmm", {"Input Dims": dims, "Input type": [BF16] * len(dims)})
             for dims in (factors, [*factors, written], [factors[0], factors[0], written])]  # fmt: skip
    eager, compiled, others = (made(tmp_path, str(number), [one]) for number, one in enumerate(calls))
    assert changed(eager, compiled) == ()
    (said,) = changed(compiled, others)
    assert said == "inputs: aten::bmm bf16 [128, 64, 32] [128, 32, 64], then bf16 [128, 64, 32] [128, 64, 32]"


@pytest.mark.parametrize(
    "args",
    [{}, {"Input Dims": [[8]]}, {"Input Dims": [[8]], "Input type": []}, {"Input Dims": 3, "Input type": 3},
     {"Input Dims": [[[8], [8]]], "Input type": ["TensorList"]}, {"Input Dims": [[True]], "Input type": [FP32]},
     {"Input Dims": [[8]], "Input type": [3]}],
)  # fmt: skip
def test_inputs_that_were_not_recorded_do_not_differ(tmp_path, args):
    first = made(tmp_path, "first", [product(BF16, 64, 32, 16)])
    other = made(tmp_path, "other", [("aten::mm", args)])
    assert changed(first, other) == changed(other, first) == ()


def test_comparing_a_gpu_with_a_cpu_reports_no_gpu_work_as_gone_or_new(capsys):
    """The CPU's trace has no GPU lane, which does not show what a GPU would run."""
    name = "01_matmul_add/64_bf16_cold_eager.json.gz"
    files = [str(ROOT / "traces/reference" / machine / name) for machine in ("nvidia-h200", "cpu")]
    for order in (files, files[::-1]):
        assert cli.main([*order, "--only", "steps,short,work"]) == 0
        screen = capsys.readouterr().out
        assert screen.count("only one of the two has GPU work") == 1
        assert "1 x GEMM (" not in screen and "GPU work gone" not in screen and "GPU work new" not in screen
        rows = [line.split() for line in screen.splitlines() if line.startswith(("GPU busy", "launches", "kernels"))]
        assert len(rows) == 3 and all(row.count("–") == 1 for row in rows), "no GPU time, no launches of the CPU's run"
