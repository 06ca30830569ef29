"""Printed sentences are checked against the raw events of traces for which they were once wrong."""

import ast
import gzip
import itertools
import json
import re
from collections import Counter

import pytest
from raw_events import end, pace, raw_steps, raw_work
from references import H200, MODELS, ROOT

from common import harness
from tracereader import cli
from tracereader.figures import summarize
from tracereader.findings import attention, training
from tracereader.trace import read
from tracereader.two_runs import compare, sentences

REFERENCE = ROOT / "traces/reference"
TWO = REFERENCE / "nvidia-h200-x2/06_training"
LLM = H200 / "05_llm"
TESTS = ROOT / "tests/traces"


VERBS = re.compile(r"\b(is|are|was|were|has|have|takes|took)\b")


def test_figures_hold_no_sentences():
    """figures/ measures; findings/ and show/ have the sentences."""
    told = []
    for file in sorted((ROOT / "tracereader/figures").glob("*.py")):
        tree = ast.parse(file.read_text())
        docstrings = {id(one.value) for one in ast.walk(tree) if isinstance(one, ast.Expr)}
        texts = (one for one in ast.walk(tree) if isinstance(one, ast.Constant) and isinstance(one.value, str))
        told += [(file.name, one.value) for one in texts if id(one) not in docstrings and VERBS.search(one.value)]
    assert not told


def document(path):
    return json.loads(gzip.decompress(path.read_bytes()))


def slices(path):
    return [e for e in document(path)["traceEvents"] if e.get("ph") == "X"]


def step_named(events, name):
    return next(mark for mark in raw_steps(events) if mark["name"] == name)


def covered(spans):
    total, reached = 0.0, float("-inf")
    for start, stop in sorted(spans):
        total += max(0.0, stop - max(start, reached))
        reached = max(reached, stop)
    return total


def printed(capsys, *words):
    assert cli.main([*map(str, words)]) == 0
    return capsys.readouterr().out


def written(tmp_path, name, found):
    file = tmp_path / name
    file.write_text(json.dumps(found))
    return file


def test_matrix_products_of_compiled_prefill_are_cublas_own(capsys):
    path = LLM / "1x512_bf16_warm_compile_prefill_dynamic_last.json.gz"
    work = [e for mark in raw_steps(slices(path)) for e in raw_work(slices(path), mark)]
    share = sum(e["dur"] for e in work if re.search("nvjet|gemm|gemv", e["name"])) / sum(e["dur"] for e in work)
    assert re.search(rf"matrix products +[\d.,]+ +{share:.1%}", printed(capsys, path, "--only", "gpu"))


def test_no_fusion_is_invented():
    """A kernel that adds does not replace kernels that multiply. A kernel that replaces others names them."""
    eager, fused = TWO / "4x1024x1024x16_bf16_warm_eager.json.gz", TWO / "4x1024x1024x16_bf16_warm_eager_fused.json.gz"
    found = sentences.difference(*(compare.Side(summarize(read(path))) for path in (eager, fused)))
    assert not any("one kernel" in text for text in found.changed)
    assert "<add, fp32> (1.6 µs)" in next(text for text in found.changed if text.startswith("GPU work new"))
    naive, product = TESTS / "attention_naive.json.gz", H200 / "01_matmul_add/64_bf16_warm_eager.json.gz"
    found = sentences.difference(*(compare.Side(summarize(read(path))) for path in (naive, product)))
    assert not any("one kernel" in text for text in found.changed)


def test_ops_are_compared_by_their_calls(tmp_path):
    path = H200 / "02_linear/1024x32x64_bf16_warm_eager.json.gz"
    once, twice = document(path), document(path)
    summary = summarize(read(path))
    mark = step_named(slices(path), summary.typical_step)
    product = next(
        e for e in once["traceEvents"] if e.get("name") == "aten::addmm" and mark["ts"] <= e["ts"] < end(mark)
    )
    again = {**product, "ts": end(mark) - 0.2, "dur": 0.1}
    twice["traceEvents"].append(again)
    sides = [compare.Side(summarize(read(written(tmp_path, name, found)), None)) for name, found in
             (("once.json", once), ("twice.json", twice))]  # fmt: skip
    assert sentences.difference(*sides).ops_changed == ("calls: aten::addmm 1 → 2",)
    assert not any("aten::addmm" in text for text in sentences.difference(*sides).ops_same)


def test_sums_of_overlapping_kernels_are_marked(capsys):
    path = LLM / "1x512_bf16_warm_eager_triton-overlap_graph.json.gz"
    events = slices(path)
    work = raw_work(events, step_named(events, summarize(read(path)).typical_step))
    together, summed = covered((e["ts"], end(e)) for e in work), sum(e["dur"] for e in work)
    assert summed > 2 * together
    said = f"kernels overlap: the GPU is busy {together:,.1f} µs of the step"
    assert said in printed(capsys, path, "--only", "repeats")
    assert "summed by family (kernels overlap)" in printed(capsys, path, path, "--only", "gpu")
    assert "overlap" not in printed(capsys, LLM / "1x512_bf16_warm_compile.json.gz", "--only", "repeats")


def test_an_idle_gpu_has_no_lane(capsys):
    path = LLM / "1x512_bf16_warm_compile.json.gz"
    events = slices(path)
    marks = raw_steps(events)
    summary = summarize(read(path))
    apart = pace([mark["ts"] for mark in marks], marks[-1]["dur"])
    assert (summary.llm.decoding.lane, summary.llm.decoding.step_us) == ("CPU", pytest.approx(apart, abs=0.01))
    work = raw_work(events, step_named(events, summary.typical_step))
    alone = 1e6 / covered((e["ts"], end(e)) for e in work)
    assert f"the GPU work alone would allow {alone:,.0f} tokens a second" in printed(capsys, path, "--only", "short")


def enclosed(tmp_path, path):
    """Return the trace with one more annotation around everything in a step."""
    found = document(path)
    for mark in raw_steps([e for e in found["traceEvents"] if e.get("ph") == "X"]):
        found["traceEvents"].append(
            {**mark, "name": "train_step", "ts": mark["ts"] + 0.001, "dur": mark["dur"] - 0.002, "args": {}}
        )
    return written(tmp_path, path.name.removesuffix(".gz"), found)


def test_labels_inside_one_that_encloses_them(tmp_path, capsys):
    path = TESTS / "train_item.json.gz"
    plain = summarize(read(path)).places.by_label
    assert len(plain) > 2
    assert summarize(read(enclosed(tmp_path, path))).places.by_label == plain
    ranks = sorted((TESTS / "ranks").glob("fsdp_rank*.json.gz"))
    shown = printed(capsys, *ranks, "--only", "steps")
    assert "backward, rank 1" in shown
    assert printed(capsys, *(enclosed(tmp_path, one) for one in ranks), "--only", "steps") == shown


@pytest.mark.parametrize(("second", "holds"), [([[8, 32, 64], [8, 64, 16]], True), ([[8, 32, 64], [8, 64, 48]], False)])
def test_a_softmax_between_products_of_other_shapes_is_not_attention(tmp_path, second, holds):
    """Queries and attention's result have 16 elements each. Without shapes it is still reported, as probable."""
    found = document(TESTS / "attention_cpu_naive.json.gz")
    shapes = itertools.cycle(([[8, 32, 16], [8, 16, 64]], second))
    for event in sorted(found["traceEvents"], key=lambda event: event.get("ts", 0)):
        if event.get("name") == "aten::bmm" and event.get("ph") == "X":
            event["args"]["Input Dims"] = next(shapes)
        elif event.get("name") == "aten::_softmax":
            event["args"]["Input Dims"] = [[8, 32, 64], [], []]
    assert bool(summarize(read(written(tmp_path, "shapes.json", found))).attention.unfused) is holds


def test_a_comparison_on_a_narrow_screen(capsys, monkeypatch):
    """Names are whole, so that they can be searched for; two machines have different names; no block is empty."""
    monkeypatch.setenv("COLUMNS", "80")
    paths = [H200 / f"01_matmul_add/4096_bf16_warm_{how}.json.gz" for how in ("eager", "compile")]
    screen = printed(capsys, *paths, "--all")
    kernel = "nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_NNT"
    for name in ("4096_bf16_warm_eager", "4096_bf16_warm_compile", "aten::as_strided", kernel):
        assert any(name in line for line in screen.splitlines())
    assert max(map(len, screen.splitlines())) <= 80
    machines = [REFERENCE / f"{one}/01_matmul_add/64_bf16_cold_eager.json.gz" for one in ("cpu", "nvidia-h200")]
    lines = printed(capsys, *machines).splitlines()
    assert lines[1] == "1  01_matmul_add 64_bf16_cold_eager, CPU only"
    assert lines[2] == "2  01_matmul_add 64_bf16_cold_eager, NVIDIA H200"
    screen = printed(capsys, machines[0], machines[0], "--all")
    assert "the second is about as fast:" in screen and "no GPU work" not in screen


def test_a_ranks_window_holds_earlier_steps_work(capsys):
    told = []
    paths = sorted((TESTS / "ranks").glob("ddp_straggler_rank*.json.gz"))
    for path in paths:
        events = slices(path)
        first = raw_steps(events)[0]
        begin = min(e["ts"] for e in raw_work(events, first))
        computing = [e for e in events if e["cat"] == "kernel" and "nccl" not in e["name"]]
        us = covered((max(e["ts"], first["ts"]), min(end(e), begin)) for e in computing
                     if e["ts"] < begin and end(e) > first["ts"])  # fmt: skip
        told.append(f"rank {len(told)} {us / 1e3:,.1f} ms")
    assert f"which is not part of these steps: {', '.join(told)}" in printed(capsys, *paths, "--only", "gpu")


def test_time_in_a_library_is_the_ops_self_time(capsys):
    path = next(one for one in MODELS if one.name.startswith("qwen3moe_generate."))
    summary = summarize(read(path))
    events = slices(path)
    mark = step_named(events, summary.typical_step)
    ops = [e for e in events if e.get("cat") in ("cpu_op", "cuda_runtime", "cuda_driver")
           and e["tid"] == mark["tid"] and mark["ts"] <= e["ts"] < end(mark)]  # fmt: skip
    own = 0.0
    for op in (e for e in ops if e["name"] == "aten::_cudnn_attention_forward"):
        below = [(e["ts"], end(e)) for e in ops if e is not op and op["ts"] <= e["ts"] and end(e) <= end(op)]
        own += op["dur"] - covered(below)
    assert f"aten::_cudnn_attention_forward: {own / 1e3:.1f} of the" in printed(capsys, path, "--only", "patterns")


def test_a_broken_prediction_has_its_figure():
    summary = summarize(read(TESTS / "train_item.json.gz"))
    for guess in (training.starving(), training.recomputation(), attention.hidden_copy(), attention.unfused()):
        verdict = guess.ask(summary)
        assert verdict.holds or verdict.evidence
    none = summarize(read(H200 / "02_linear/1024x32x64_bf16_warm_eager.json.gz"))
    assert training.starving().ask(none).evidence == "no DataLoader in the trace"


def test_one_thread(monkeypatch):
    for threads, said in ((1, "CPU, 1 thread"), (2, "CPU, 2 threads")):
        monkeypatch.setattr(harness.torch, "get_num_threads", lambda threads=threads: threads)
        assert harness.device_name(harness.torch.device("cpu")) == said


def test_a_comparison_counts_the_kernels_that_are_gone(capsys):
    """For a name that runs less often, the number of missing calls is given; its time is the time of all calls."""
    naive, in_place = (TESTS / f"attention_{name}.json.gz" for name in ("naive", "math"))
    sides = [compare.Side(summarize(read(path))) for path in (naive, in_place)]
    counts = [Counter(e["name"] for e in raw_work(slices(p), step_named(slices(p), s.summary.typical_step)))
              for p, s in zip((naive, in_place), sides, strict=True)]  # fmt: skip
    assert [side.work for side in sides] == counts
    new = next(text for text in sentences.difference(*sides).changed if text.startswith("GPU work new"))
    some = [name for name in counts[1] - counts[0] if counts[0][name]]
    assert len(re.findall(r"\(of \d+ in ", new)) == len(some)
