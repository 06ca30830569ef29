"""Each figure of a report is of one step: the typical one in the sections, the median step's time in the first line.

The expected figures are computed from the raw events, of traces with two to six steps.
"""

import gzip
import json
import re
from collections import Counter
from statistics import median

import pytest
from conftest import ROOT
from raw_events import end, event, pace, raw_steps, raw_work

from tracereader import cli
from tracereader.changes.catalogue import opportunities
from tracereader.figures import summarize
from tracereader.findings.finding import duration
from tracereader.trace import read

H200 = ROOT / "traces" / "reference" / "nvidia-h200"
MODELS = ROOT / "tests" / "traces" / "models"
TWENTY = {
    "overhead": H200 / "01_matmul_add/64_bf16_cold_eager_wait0_schedwarmup0_active20.json.gz",
    "busy": H200 / "01_matmul_add/4096_bf16_cold_eager_wait0_schedwarmup0_active20.json.gz",
}
# Traces of two steps, of which the first or the second one is longer, and of three whose first one is left out.
TWO = [
    MODELS / "bert_modules.json.gz",
    MODELS / "qwen3_decode_compiled.json.gz",
    MODELS / "qwen3moe_generate_warm.json.gz",
    H200 / "05_llm/1x512_bf16_warm_eager_triton-overlap_active2.json.gz",
]
LEFT_OUT = MODELS / "bert_cold.json.gz"


def slices(path):
    raw = path.read_bytes()
    document = json.loads(gzip.decompress(raw) if path.suffix == ".gz" else raw)
    return [one for one in document["traceEvents"] if one.get("ph") == "X"]


def cut(path, tmp_path, first, count):
    """Return a trace with some of the steps of another one: the annotations of the others are dropped."""
    document = json.loads(gzip.decompress(path.read_bytes()))
    kept = {mark["ts"] for mark in raw_steps(document["traceEvents"])[first : first + count]}
    document["traceEvents"] = [
        one
        for one in document["traceEvents"]
        if not str(one.get("name")).startswith("ProfilerStep#") or one.get("ts") in kept
    ]
    file = tmp_path / f"{count}.json"
    file.write_text(json.dumps(document))
    return file


def expected(path):
    """Return the mark of the typical step, the step's time (µs), and the GPU's busy time in a step, from raw events."""
    events = slices(path)
    marks = raw_steps(events)
    if len(marks) > 1 and marks[0]["dur"] > 10 * sorted(mark["dur"] for mark in marks)[(len(marks) - 1) // 2]:
        marks = marks[1:]
    work = [raw_work(events, mark) for mark in marks]
    us = Counter()
    for one in (one for some in work for one in some):
        us[one["tid"]] += one["dur"]
    lane = [[one for one in some if one["tid"] == max(us, key=us.get)] for some in work]
    on_cpu = pace([mark["ts"] for mark in marks], marks[-1]["dur"])
    on_gpu = pace([some[0]["ts"] for some in lane], max(map(end, lane[-1])) - lane[-1][0]["ts"])
    odd = len(marks) - (len(marks) % 2 == 0)
    usual = sorted(marks[:odd], key=lambda mark: mark["dur"])[odd // 2]
    return usual, max(on_cpu, on_gpu), median([covered(some) for some in work[:odd]])


def covered(work):
    """Return the time that some activities cover together; those that overlap count once."""
    us, reached = 0.0, 0.0
    for one in work:
        us += max(0.0, end(one) - max(one["ts"], reached))
        reached = max(reached, end(one))
    return us


def printed(capsys, *words):
    assert cli.main([*map(str, words)]) == 0
    return capsys.readouterr().out


def every_figure_is_of_one_step(path, capsys):
    usual, step_us, busy_us = expected(path)
    number = usual["name"].removeprefix("ProfilerStep")
    trace = read(path)
    ours = summarize(trace)
    assert ours.typical_step == usual["name"] and ours.cpu_us == ours.chosen.cpu_us
    assert ours.cpu_us == pytest.approx(usual["dur"], abs=0.01)
    assert ours.recorded_step_us == pytest.approx(step_us, abs=0.01)
    assert ours.gpu_us == pytest.approx(busy_us, abs=0.1)
    screen = printed(capsys, path, "--all")
    assert re.search(rf"steps of {re.escape(duration(step_us))}\b", screen)
    heads = (r"the GPU waits for (#\d+)", r"call tree of step (#\d+)", r"of one step \((#\d+)\)",
             r"repetitions in step (#\d+)", r"slowest path, step (#\d+)", r"^inside step (#\d+)")  # fmt: skip
    named = {found for head in heads for found in re.findall(head, screen, re.M)}
    assert named == {number}
    figures = json.loads(printed(capsys, path, "--json=all"))
    assert figures["typical_step"] == usual["name"]
    assert figures["recorded_step_us"] == pytest.approx(step_us, abs=0.01)
    changes = opportunities(trace, ours)
    assert {one.step_us for one in changes} <= {ours.recorded_step_us}
    return ours, screen


@pytest.mark.parametrize("count", [2, 3, 4, 5, 6])
@pytest.mark.parametrize("first", [0, 2, 9])
@pytest.mark.parametrize("name", TWENTY)
def test_every_figure_is_of_one_step(name, first, count, tmp_path, capsys):
    every_figure_is_of_one_step(cut(TWENTY[name], tmp_path, first, count), capsys)


@pytest.mark.parametrize("path", TWO, ids=lambda path: path.name.split(".")[0])
def test_with_two_steps_every_figure_is_of_the_first(path, capsys):
    """Its end on the GPU is known, so the parts of its time and the share of idle time are of it, too."""
    ours, screen = every_figure_is_of_one_step(path, capsys)
    first = raw_steps(slices(path))[0]
    number = first["name"].removeprefix("ProfilerStep")
    assert ours.typical_step == first["name"]
    assert re.search(rf"where the step goes: .* on the GPU, {number} ", screen)
    share = ours.steps[0].gpu_idle_share
    assert ours.idle_share == pytest.approx(share, abs=0.001)
    if ours.llm.decoding is not None:
        assert ours.llm.decoding.step_us == ours.recorded_step_us
        assert f"takes {duration(ours.recorded_step_us)} on the CPU lane" in " ".join(screen.split())


def test_without_a_far_longer_first_step_two_are_left_and_the_first_of_them_counts(capsys):
    ours, screen = every_figure_is_of_one_step(LEFT_OUT, capsys)
    assert ours.left_out == ["ProfilerStep#0"] and ours.typical_step == "ProfilerStep#1"
    assert re.search(r"where the step goes: .* on the GPU, #1 ", screen)


def test_a_comparison_of_traces_with_two_steps_is_of_the_first_steps(capsys):
    screen = printed(capsys, *TWO[:2])
    marks = [raw_steps(slices(path)) for path in TWO[:2]]
    for row, us in (
        ("step", [expected(path)[1] for path in TWO[:2]]),
        ("CPU time", [some[0]["dur"] for some in marks]),
        ("CPU, first step", [some[0]["dur"] for some in marks]),
    ):
        cells = re.search(rf"^{row}, ms +([\d.,]+) +([\d.,]+)$", screen, re.M).groups()
        assert [1e3 * float(one) for one in cells] == pytest.approx(us, abs=5.01), row


@pytest.mark.parametrize(("lengths", "typical"), [((300, 100), 0), ((100, 300), 0), ((5000, 100), 1)])
def test_of_two_steps_the_first_one_counts_unless_it_is_far_longer(tmp_path, lengths, typical):
    """A pause between the steps is part of the first step's time. The trace does not show one after the last."""
    pause, events, at = 50, [], 0
    for number, us in enumerate(lengths):
        events += [
            event(f"ProfilerStep#{number}", "user_annotation", at, us),
            event("cudaLaunchKernel", "cuda_runtime", at + 5, 5, correlation=number),
            event("k", "kernel", at + 15, 20, 7, correlation=number, device=0, stream=7),
        ]
        at += us + pause
    path = tmp_path / "two.json"
    path.write_text(json.dumps({"traceEvents": events}))
    ours = summarize(read(path))
    assert ours.typical_index == typical
    assert ours.recorded_step_us == (lengths[1] if typical else lengths[0] + pause)
    assert ours.cpu_us == lengths[typical]


def test_without_gpu_work_the_shorter_of_two_steps_counts(tmp_path):
    """Each step's end is known there."""
    events = [
        event("ProfilerStep#0", "user_annotation", 0, 300),
        event("aten::mm", "cpu_op", 5, 290),
        event("ProfilerStep#1", "user_annotation", 310, 100),
        event("aten::mm", "cpu_op", 315, 90),
    ]
    path = tmp_path / "cpu.json"
    path.write_text(json.dumps({"traceEvents": events}))
    ours = summarize(read(path))
    assert (ours.typical_index, ours.recorded_step_us) == (1, 100)
