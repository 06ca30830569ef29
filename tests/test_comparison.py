"""Comparisons of traces: pace, reason, figures and predictions are checked against raw events."""

import gzip
import importlib.util
import json
import re
from collections import Counter, defaultdict
from functools import cache
from statistics import median

import pytest
from raw_events import end, event, pace, raw_steps, raw_work
from references import H200, PREDICTED, ROOT, measured, proposals, recording, small_first

from tracereader import cli
from tracereader.changes import catalogue
from tracereader.changes.catalogue import CHANGES
from tracereader.figures import summarize
from tracereader.replay import Refused
from tracereader.trace import read
from tracereader.two_runs import faster
from tracereader.two_runs.side import Side

LLM = H200 / "05_llm"
# Each row has steps before and after one change, and the change; None if the second run follows none of the proposals.
PAIRS = [
    *PREDICTED,
    ("syncs/item", "remove_sync", "syncs/none"),
    ("pinned/same_stream", "overlap_copies", "pinned/prefetched"),
    ("attention32/naive", None, "attention32/sdpa"),
    ("vit/eager", None, "vit/compile"),
    ("products/eager", None, "products/compile"),
    ("syncs/end", None, "syncs/none"),
    ("decode/eager", None, "decode/batch32"),
]


def slices(file):
    return [one for one in json.loads(gzip.decompress(file.read_bytes()))["traceEvents"] if one.get("ph") == "X"]


@cache
def raw_step_us(name):
    """Return the step's time from raw events: from one step's start to the next one's, on the CPU or on the GPU."""
    events = slices(recording(name))
    marks = raw_steps(events)
    busiest = Counter()
    for mark in marks:
        for one in raw_work(events, mark):
            busiest[one["tid"]] += one["dur"]
    stream = max(busiest, key=busiest.get)
    work = [[one for one in raw_work(events, mark) if one["tid"] == stream] for mark in marks]
    on_cpu = pace([mark["ts"] for mark in marks], marks[-1]["dur"])
    last = max(map(end, work[-1])) - work[-1][0]["ts"]
    return max(on_cpu, pace([some[0]["ts"] for some in work], last))


@cache
def run(name):
    found = proposals(recording(name))
    return Side(measured(recording(name))), () if isinstance(found, Refused) else found


def printed(capsys, *words):
    assert cli.main([*map(str, words)]) == 0
    return capsys.readouterr().out


def said(capsys, *words):
    return " ".join(printed(capsys, *words).split())


def files(*names):
    return [recording(name) for name in names]


@pytest.mark.parametrize(("before", "change", "after"), small_first(PAIRS))
def test_the_pace_equals_that_of_the_raw_events(before, change, after):
    us = [raw_step_us(name) for name in (before, after)]
    for name, raw_us in zip((before, after), us, strict=True):
        assert run(name)[0].summary.recorded_step_us == pytest.approx(raw_us, abs=0.01)
    told = faster.pace(*(faster.step_us(run(name)[0]) for name in (before, after)))
    now, unit, was = re.search(r"([\d.,]+) (µs|ms|s) per step instead of ([\d.,]+)$", told).groups()
    scale = {"µs": 1, "ms": 1e3, "s": 1e6}[unit]
    assert [float(one.replace(",", "")) * scale for one in (was, now)] == pytest.approx(us, rel=0.006)
    factor = re.search(r"(is|takes) ([\d.,]+) times as (fast|long)", told)
    if abs(us[0] - us[1]) <= faster.ALIKE * max(us):
        assert "is about as fast" in told
    else:
        assert factor[3] == ("fast" if us[0] > us[1] else "long")
        assert float(factor[2]) == pytest.approx(max(us) / min(us), rel=0.06)


def test_the_idle_share_is_the_one_of_each_runs_own_report(capsys):
    """Overhead-bound steps with shares of 90% and 40% differ, although the words are the same."""
    screen = printed(capsys, *files("vit/eager", "vit/graph"))
    own = [re.search(r"idle (\d+%) of the time", said(capsys, file))[1] for file in files("vit/eager", "vit/graph")]
    assert re.search(rf"^GPU idle, mean share +{own[0]} +{own[1]}$", screen, re.M)
    events = slices(files("vit/eager")[0])
    steps = [raw_work(events, mark) for mark in raw_steps(events)]
    window = steps[0][0]["ts"], steps[-1][0]["ts"]
    busy, reached = 0.0, window[0]
    for one in sorted((e for work in steps for e in work), key=lambda e: e["ts"]):
        start, stop = max(reached, one["ts"]), min(window[1], end(one))
        busy, reached = busy + max(0.0, stop - start), max(reached, stop)
    assert own[0] == f"{1 - busy / (window[1] - window[0]):.0%}"


@pytest.mark.parametrize(("before", "change", "after"), small_first(PAIRS))
def test_the_comparison_shows_whether_the_second_run_follows_a_proposal(before, change, after):
    side, proposed = run(before)
    found = catalogue.checked(side, proposed, run(after)[0])
    assert (found and [one.change for one in found.proposals]) == ([change] if change else None)
    if found:
        assert found.measured_us == pytest.approx(raw_step_us(after), abs=0.01)
        assert catalogue.checked(run(after)[0], proposed, side) is None, "turned around, it was not done"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param(
            "1x512_bf16_warm_eager_active2_shapes",
            "1x512_bf16_warm_compile_reduce-overhead",
            marks=pytest.mark.exhaustive,
        ),
        ("32x512_bf16_warm_eager_graph", "32x512_bf16_warm_compile_gqa_reduce-overhead"),
    ],
)
def test_a_cuda_graph_of_compiled_kernels_follows_the_advice(capsys, before, after):
    """The advice is torch.compile's mode reduce-overhead, which also fuses kernels. A graph before it decides."""
    files = [LLM / f"{name}.json.gz" for name in (before, after)]
    names = [[one["name"] for one in slices(file)] for file in files]
    was_graph, is_graph = ("cudaGraphLaunch" in some for some in names)
    assert is_graph and not any("triton_" in name for name in names[0]) and any("triton_" in name for name in names[1])
    told = said(capsys, *files)
    assert ("(replay the step as a CUDA graph): predicted 4.93 ms, measured 2.45" in told) is not was_graph
    assert ("leaves out that this run also compiles its kernels" in told) is not was_graph
    turned = said(capsys, *reversed(files))
    assert "predicted" not in turned


@pytest.mark.parametrize(
    "pairs", [PAIRS[:3], pytest.param(PAIRS, marks=pytest.mark.exhaustive)], ids=lambda pairs: f"{len(pairs)}"
)
def test_a_run_of_another_program_follows_no_proposal(pairs):
    names = sorted({name for before, _, after in pairs for name in (before, after)})
    for before in names:
        for after in names:
            programs = {name.split("/")[0] for name in (before, after)}
            # gpt2 and trained are decoders of the same sizes, but the second one has a padded vocabulary.
            if len(programs) == 2 and programs != {"gpt2", "trained"}:
                side, proposed = run(before)
                assert catalogue.checked(side, proposed, run(after)[0]) is None, f"{before}, {after}"


def test_every_change_that_two_runs_can_show_has_a_judge():
    """Two recordings do not show whether the second one has less padding or shorter texts."""
    unjudged = {one.name for one in CHANGES if not (one.followed or one.jobs_followed)}
    assert unjudged == {"warm_up", "double_batch", "trim_padding", "compute_once"}


def test_a_replays_convolutions_are_those_of_the_run_with_ops(capsys):
    """Many of cuDNN's convolutions have names of matrix products, and a CUDA graph's replay has no ops."""
    before, after = (slices(file) for file in files("batch_norm/eager", "batch_norm/graph"))
    ops = [one for one in before if re.fullmatch("aten::(cudnn_convolution|convolution_backward)", one["name"])]
    calls = {
        one["args"]["correlation"] for one in before
        if one.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in one.get("args", {})
        and any(op["tid"] == one["tid"] and op["ts"] <= one["ts"] < end(op) for op in ops)
    }  # fmt: skip
    names = {
        one["name"] for one in before if one.get("cat") == "kernel" and one["args"]["correlation"] in calls
    }  # fmt: skip
    common = sum(one["dur"] for one in raw_work(after, raw_steps(after)[1]) if one["name"] in names) / 1e3
    screen = printed(capsys, *files("batch_norm/eager", "batch_norm/graph"))
    shown = float(re.search(r"^convolution +\S+ +(\S+)", screen, re.M)[1])
    assert common > 1
    assert shown == pytest.approx(common, rel=0.1), "kernels that the first run does not have keep their families"
    alone = printed(capsys, *files("batch_norm/graph"), "--only", "gpu")
    assert "matrix products" in alone


def test_cuda_graphs_of_a_part_of_the_step_are_recognized(capsys):
    screen = said(capsys, *files("batch_norm/eager", "batch_norm/graph_kept"))
    events = slices(recording("batch_norm/graph_kept"))
    launched = Counter(
        one["name"] for one in events
        if one.get("cat") in ("cuda_runtime", "cuda_driver") and one["args"]["correlation"] in {
            work["args"]["correlation"] for work in raw_work(events, raw_steps(events)[1])
        }
    )  # fmt: skip
    graphs = launched["cudaGraphLaunch"]
    assert graphs == 2
    assert f"launched as 2 CUDA graphs and {launched.total() - graphs} other calls instead of" in screen
    assert "the first's report proposed it (replay forward and backward as CUDA graphs)" in screen


def self_times(name):
    """Return the number and the self time (µs) of the middle step's ops and calls by name, from raw events."""
    events = slices(recording(name))
    mark = sorted(raw_steps(events), key=lambda one: one["dur"])[1]
    inside = [
        one for one in events
        if one.get("cat") in ("cpu_op", "cuda_runtime", "cuda_driver") and mark["ts"] <= one["ts"] < end(mark)
    ]  # fmt: skip
    calls, us, stacks = Counter(), Counter(), {}
    for one in sorted(inside, key=lambda one: (one["ts"], -one["dur"])):
        stack = stacks.setdefault(one["tid"], [])
        while stack and end(stack[-1]) <= one["ts"]:
            stack.pop()
        calls[one["name"]] += 1
        us[one["name"]] += one["dur"]
        if stack:
            us[stack[-1]["name"]] -= one["dur"]
        stack.append(one)
    return calls, us


def test_a_faster_cpu_is_a_reason(capsys):
    (was, was_us), (now, now_us) = (self_times(f"syncs/{name}") for name in ("item", "none"))
    same = [name for name in was if was[name] == now[name]]
    before, after = (sum(us[name] for name in same) / 1e3 for us in (was_us, now_us))
    screen = said(capsys, *files("syncs/item", "syncs/none"))
    shown = re.search(r"the same ops and calls take the CPU (\S+) ms instead of (\S+);", screen)
    assert float(shown[1]) == pytest.approx(after, rel=0.01)
    assert float(shown[2]) == pytest.approx(before, rel=0.01)


def test_the_first_lines_are_the_pace_and_the_reason(capsys):
    screen = said(capsys, *files("vit/eager", "vit/graph"))
    events = [slices(file) for file in files("vit/eager", "vit/graph")]
    kernels, calls = [], []
    for some in events:
        work = raw_work(some, raw_steps(some)[1])
        kernels.append(Counter(one["name"] for one in work if one["cat"] == "kernel"))
        calls.append(len({one["args"]["correlation"] for one in work}))
    counts = [one.total() for one in kernels]
    assert calls == [143, 1] and counts == [129, 131]  # two kernels of the graph set memory
    shared = (kernels[0] & kernels[1]).total()
    eager, graph = (raw_step_us(name) / 1e3 for name in ("vit/eager", "vit/graph"))
    told = (
        f"the second is {eager / graph:.1f} times as fast: {graph:.3f} ms per step instead of {eager:.2f}; "
        f"almost the same kernels ({shared} of {max(counts)} by name), launched as one CUDA graph instead of "
        f"{calls[0]} calls"
    )
    assert f"NVIDIA H200 1 eager 2 graph {told}" in screen
    (predicted,) = [one.step_us_after for one in run("vit/eager")[1] if one.change == "cuda_graph"]
    assert f"predicted {predicted / 1e3:.3f} ms, measured {graph:.3f}" in screen
    without = [json.loads(gzip.decompress(file.read_bytes()))["unprofiled_step_us"]
               for file in files("vit/eager", "vit/graph")]  # fmt: skip
    assert f"without the profiler it is {without[0] / without[1]:.1f} times as fast" in screen


@pytest.mark.parametrize(
    ("before", "after", "reason"),
    small_first(
        [
            ("syncs/item", "syncs/none", "no synchronization per step instead of 40"),
            ("gpt2/recompute", "gpt2/sdpa", "no forward op run again in backward instead of 210"),
            ("encoder/fp32", "encoder/tf32", "(TF32 instead of fp32)"),
            ("pointwise/eager", "pointwise/compile", "of pointwise kernels instead of 1.95 (1 instead of 30)"),
            ("gpt2/sdpa", "gpt2/padded", "(75 by other kernels)"),
            ("optimizer/forloop", "optimizer/fused", "AdamW as fused instead of for-loop"),
            ("loader/inline", "loader/workers", "of waiting for the DataLoader instead of"),
            (
                "attention/naive",
                "attention/sdpa",
                "fused attention kernels instead of 1 softmax between batched products",
            ),
            ("python/loop", "python/ahead", "the same 5 kernels; the GPU is idle for"),
            ("decode/eager", "decode/graph", "the same 266 kernels, launched as one CUDA graph"),
            ("llama/eager_attention", "llama/sdpa", "of copies and copy kernels instead of 6.72 (47 instead of 84)"),
            (
                "copies/blocking",
                "copies/prefetched",
                "of copies instead of 9.79 (Memcpy HtoD (Pinned -> Device) instead of",
            ),
        ]
    ),
)
def test_the_reason_follows_from_the_traces(before, after, reason):
    assert reason in "; ".join(faster.reasons(run(before)[0], run(after)[0]))


def raw_self_us(events, mark):
    """Return the self time (µs) and the number of calls of a step's ops and runtime calls, by name."""
    inside = [e for e in events if e.get("cat") in ("cpu_op", "cuda_runtime") and mark["ts"] <= e["ts"] < end(mark)]
    times, calls, around = Counter(), Counter(), defaultdict(list)
    for one in sorted(inside, key=lambda e: (e["ts"], -e["dur"])):
        opened = around[one["pid"], one["tid"]]
        while opened and end(opened[-1]) <= one["ts"]:
            opened.pop()
        if opened:
            times[opened[-1]["name"]] -= one["dur"]
        times[one["name"]] += one["dur"]
        calls[one["name"]] += 1
        opened.append(one)
    return times, calls


def same_calls_us(*paths):
    """Return the self times (µs) of the ops and calls that the typical steps of two traces call equally often."""
    steps = []
    for path in paths:
        events, name = slices(path), measured(path).typical_step
        steps.append(raw_self_us(events, next(mark for mark in raw_steps(events) if mark["name"] == name)))
    (was, before), (now, after) = steps
    same = [name for name in was if before[name] == after[name]]
    return [sum(times[name] for name in same) for times in (was, now)]


@pytest.mark.parametrize(("before", "after"), [("syncs/item", "syncs/none"), ("loader/inline", "loader/workers")])
def test_a_missed_prediction_is_explained_by_the_same_calls(capsys, before, after):
    was, now = same_calls_us(*files(before, after))
    (predicted,) = catalogue.checked(run(before)[0], run(before)[1], run(after)[0]).proposals
    missed = raw_step_us(after) - predicted.step_us_after
    assert abs(missed) > 0.3 * raw_step_us(after) and 0.5 <= (now - was) / missed <= 2
    told = re.search(r"because the same ops and calls take the CPU ([\d.]+) (ms|µs) instead of ([\d.]+)",
                     said(capsys, *files(before, after), "--only", "short"))  # fmt: skip
    scale = {"ms": 1e3, "µs": 1}[told[2]]
    assert [float(told[1]) * scale, float(told[3]) * scale] == pytest.approx([now, was], rel=0.02)


def test_the_page_explains_a_missed_prediction(tmp_path):
    before, after = files("syncs/item", "syncs/none")
    page = tmp_path / "page.html"
    assert cli.main([str(before), str(after), "--html", str(page)]) == 0
    figures = json.loads(re.search(r'id="figures">(.*?)</script>', page.read_text(), re.S)[1])
    (row,) = [one for one in figures["predicted"] if one["change"] == "remove_sync"]
    was, now = same_calls_us(before, after)
    (missed,) = row["missed"]
    told = re.fullmatch(r"In run 2, the same ops and calls take the CPU ([\d.]+) ms instead of ([\d.]+)\.", missed)
    assert [1e3 * float(one) for one in told.groups()] == pytest.approx([now, was], rel=0.02)


def test_a_missed_prediction_is_explained_by_the_gpus_work(capsys):
    """The prediction of a static cache did not include that attention reads all of it."""
    before, after = files("lengths/flash", "lengths/static")
    busy = []
    for file in (before, after):
        events = slices(file)
        busy.append([sum(e["dur"] for e in raw_work(events, mark)) / 1e3 for mark in raw_steps(events)])
    told = re.search(r"predicted ([\d.]+) ms.*?, measured [\d.]+, because the GPU works for ([\d.]+) ms of the step "
                     r"instead of ([\d.]+): [\d.]+ ms of attention kernels",
                     said(capsys, before, after, "--only", "short"))  # fmt: skip
    assert float(told[1]) < min(busy[1])
    assert [float(told[2]), float(told[3])] == pytest.approx([median(busy[1]), median(busy[0])], rel=0.02)


@pytest.mark.parametrize("before", ["decode/eager", "small/loop", "experts/loop"])
def test_without_a_cause_in_the_traces_nothing_is_said(before):
    """The first prediction is right, and what was wrong about the others is the Python code around the ops."""
    after = next(after for one, _, after in PAIRS if one == before)
    side, proposed = run(before)
    (predicted,) = catalogue.checked(side, proposed, run(after)[0]).proposals
    assert not faster.why_missed(side, run(after)[0], predicted.step_us_after, raw_step_us(after))


def test_a_reason_needs_the_same_device():
    gpu = Side(summarize(read(H200 / "01_matmul_add/64_bf16_cold_eager.json.gz")))
    cpu = Side(summarize(read(H200.parent / "cpu/01_matmul_add/64_bf16_cold_eager.json.gz")))
    assert faster.reasons(gpu, cpu) == faster.reasons(cpu, gpu) == []


DECODING = ("eager_active2_shapes", "eager_graph", "compile", "compile_reduce-overhead", "compile_gqa_reduce-overhead")


@pytest.mark.parametrize(
    "paths",
    [
        pytest.param([LLM / f"1x512_bf16_warm_{tag}.json.gz" for tag in DECODING], marks=pytest.mark.exhaustive),
        files("vit/eager", "vit/graph", "vit/compile", "unet/contiguous", "unet/compile"),
    ],
    ids=["decoding", "vit and unet"],
)
def test_five_runs_fit_80_columns_as_a_table(capsys, monkeypatch, paths):
    """Measures are rows and runs are columns. The times of a row have one unit and equal the raw events."""
    monkeypatch.setenv("COLUMNS", "80")
    lines = printed(capsys, *paths, "--previous").splitlines()
    assert max(map(len, lines)) <= 80
    head = next(number for number, line in enumerate(lines) if line.startswith("per step "))
    assert lines[head].split() == ["per", "step", *("run", "1", "run", "2", "run", "3", "run", "4", "run", "5")]
    rows = {line[:22].strip(): line[22:].split() for line in lines[head + 1 : lines.index("", head)]}
    events = [slices(path) for path in paths]
    typical = [measured(path).typical_step for path in paths]
    works = [
        raw_work(some, next(mark for mark in raw_steps(some) if mark["name"] == name))
        for some, name in zip(events, typical, strict=True)
    ]
    assert rows["kernels"] == [f"{sum(one['cat'] == 'kernel' for one in work):,}" for work in works]
    assert rows["launches"] == [f"{len({one['args']['correlation'] for one in work}):,}" for work in works]
    spans = [next(mark["dur"] for mark in raw_steps(some) if mark["name"] == name) / 1e3
             for some, name in zip(events, typical, strict=True)]  # fmt: skip
    assert [float(ms) for ms in rows["CPU time, ms"]] == pytest.approx(spans, abs=0.005)
    assert len({len(ms.partition(".")[2]) for ms in rows["CPU time, ms"]}) == 1
    told = " ".join(" ".join(lines).split())
    for number in range(2, 6):
        assert f"run {number} " in told and f" as run {number - 1}: " in told
    assert "ops gone" not in told and "ops gone" in said(capsys, *paths[:2], "--all")


@pytest.mark.exhaustive
def test_long_tables_have_a_row_for_the_rest(capsys):
    screen = printed(capsys, *files("gpt2/sdpa", "gpt2/padded"), "--only", "cpu")
    rows = screen[screen.index("CPU self time") :].splitlines()[1:]
    assert len(rows) == 9 and re.match(r"\d+ others +[\d.]+ +[\d.]+$", rows[-1])
    sums = [sum(float(row.split()[-column].replace(",", "")) for row in rows if row.split()[-column] != "–")
            for column in (2, 1)]  # fmt: skip
    own = [
        sum(one.self_us for one in run(name)[0].summary.cpu.ops.values()) / 1e3 for name in ("gpt2/sdpa", "gpt2/padded")
    ]
    assert sums == pytest.approx(own, abs=0.2)


def test_control_characters_and_markup_in_names_are_escaped(capsys, tmp_path):
    """The names of files, ops, kernels, flags and devices come from the trace and may hold anything."""
    bad = "\x1b[31m[bold]x[/nothing]\x07"
    paths = []
    for number, us in enumerate((40, 20)):
        events = [event(f"ProfilerStep#{step}", "user_annotation", 1000 * step, 900) for step in range(3)]
        for step in range(3):
            start = 1000 * step + 10
            events.append(event(bad, "cpu_op", start, 30))
            events.append(event("cudaLaunchKernel", "cuda_runtime", start + 1, 5, correlation=step + 1))
            kernel = event(f"{bad}{number}", "kernel", start + 20, us * 10, 7, correlation=step + 1, device=0)
            events.append(kernel)
        flags = {"flag": f"{bad}{number}", bad: number}
        found = {"traceEvents": events, "lesson": {"script": bad, "flags": flags}}
        found["deviceProperties"] = [{"id": 0, "name": bad}]
        file = tmp_path / f"[red]{number}.json"
        file.write_text(json.dumps(found))
        paths.append(file)
    for flags in ((), ("--all",), ("--only", "short,steps,gpu,cpu,work,chain")):
        screen = printed(capsys, *paths, *flags)
        assert "\x1b" not in screen and "\x07" not in screen and "[bold]x" in screen
        assert "[red]0" in screen


@pytest.mark.parametrize("value", ["NaN", "-1", "0", "1e400", '"2"', "true", "null", "[1]", "{}"])
def test_an_invalid_time_without_the_profiler_is_dropped(tmp_path, value):
    mark = json.dumps([event("ProfilerStep#0", "user_annotation", 0, 900), event("aten::add", "cpu_op", 5, 9)])
    file = tmp_path / "trace.json"
    for name in ("unprofiled_step_us", "unprofiled_cpu_us"):
        file.write_text(f'{{"{name}": {value}, "traceEvents": {mark}}}')
        assert getattr(summarize(read(file)), name) is None
        file.write_text(f'{{"{name}": 812.5, "traceEvents": {mark}}}')
        assert getattr(summarize(read(file)), name) == 812.5


@pytest.mark.exhaustive
def test_the_page_explains_every_wrong_prediction():
    spec = importlib.util.spec_from_file_location("opportunities_of_the_page", ROOT / "docs/opportunities.py")
    page = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(page)
    assert "no reason is known yet" not in page.predictions()


def test_a_chosen_step_has_its_own_busy_time(capsys):
    pair = files("copies/blocking", "copies/prefetched")
    screen = said(capsys, *pair, "--step", "4")
    busy = []
    for some in map(slices, pair):
        work = raw_work(some, raw_steps(some)[2])
        spans = sorted((one["ts"], end(one)) for one in work)
        reached, us = 0.0, 0.0
        for left, right in spans:
            us += max(0.0, right - max(left, reached))
            reached = max(reached, right)
        busy.append(us / 1e3)
    assert f"GPU busy, ms {busy[0]:.2f} {busy[1]:.2f}" in screen
