"""Every report has the answer in its first 25 lines, whole tables, and the field's words."""

import gzip
import itertools
import json
import re
import sys
from collections import defaultdict

import pytest
import words
from raw_events import end, raw_steps, raw_work
from references import H200, ROOT, measured, proposals, sampled, small_first
from rich.cells import cell_len

from tracereader import cli, progress
from tracereader.figures import summarize
from tracereader.findings import recording, steps
from tracereader.findings.finding import duration, part_of
from tracereader.show.text import sharing, unit_of
from tracereader.trace import read

TRACES = sorted([*ROOT.glob("traces/reference/**/*.json.gz"), *ROOT.glob("tests/traces/**/*.json.gz")])
OTHERS = ROOT / "tests/traces"
CHANGES = ROOT / "traces/reference/nvidia-h200/changes"
# Reports of one trace are held to more than all other output.
RETIRED = re.compile(
    rf"{words.RETIRED.pattern}|pieces?\b|own time|\bto start\b|its roof"
    r"|guess first|in short|\d+ more$|left out, to fit"
)


def printed(capsys, *words):
    assert cli.main([str(word) for word in words]) == 0
    return capsys.readouterr().out


@pytest.fixture(scope="module")
def reports():
    """Return a function that gives a committed trace's default report at 80 columns. Each report is made once."""
    found = {}

    def report(capsys, monkeypatch, trace):
        if trace not in found:
            monkeypatch.setenv("COLUMNS", "80")
            found[trace] = printed(capsys, trace).splitlines()
        return found[trace]

    return report


def tables(lines):
    """Return the rows of each table by its head."""
    found, head = defaultdict(list), None
    for line in lines:
        if not line:
            head = None
        elif head is None:
            head = line
        else:
            found[head].append(line)
    return found


@pytest.mark.parametrize("trace", sampled(TRACES), ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_a_report_answers_in_its_first_25_lines(reports, capsys, monkeypatch, trace):
    lines = reports(capsys, monkeypatch, trace)
    first = lines[:25]
    summary = measured(trace)
    word = steps.waiting(summary)[0]
    assert any(line.startswith(word[:1].upper() + word[1:]) for line in first)
    changes = proposals(trace) if summary.has_gpu_work else ()
    if isinstance(changes, tuple) and changes:
        (row,) = [line for line in first if line.startswith(f"1 {changes[0].title}")]
        before, after = changes[0].step_us, changes[0].step_us_after
        if summary.unprofiled_step_us is not None:
            before, after = changes[0].unprofiled_step_us, changes[0].unprofiled_step_us_after
        low, high = (f"{share:.0%}" for share in changes[0].estimated_savings or (1 - after / before,) * 2)
        shown = f" {high}" if low == high else f" {low.removesuffix('%')} to {high}"
        assert row.endswith(" not known from one rank" if changes[0].is_unknown else shown)
    if summary.gpu is not None or not summary.has_gpu_work:
        where = next(number for number, line in enumerate(first) if line.startswith("where the step goes"))
        assert all(where < number < 25 for number in range(where + 1, lines.index("", where)))
    wide = [line for line in lines if cell_len(line) > 80 and "traces/" not in line]
    assert not wide, "it fits 80 columns"
    # A numbered script's report also has names and the call tree, and one rank's has its collectives; that of a step
    # which compiles has the call tree of the compilation.
    assert len(lines) <= (180 if summary.source.facts.script else 140 + 20 * bool(summary.recording.cold_us))


@pytest.mark.parametrize("name", small_first(["loader/inline", "convnet/forloop"]))
def test_the_table_of_changes_has_the_times_that_sort_it(capsys, monkeypatch, name):
    """The run measured its step without the profiler. Its recorded step is in the line below the first row."""
    monkeypatch.setenv("COLUMNS", "80")
    trace = CHANGES / f"{name}.json.gz"
    document = json.loads(gzip.decompress(trace.read_bytes()))
    lines = printed(capsys, trace, "--only", "try").splitlines()
    at = next(number for number, line in enumerate(lines) if line.startswith("try first"))
    assert "unprofiled step, ms" in lines[at]
    rows = [row for line in lines[at + 1 :] if (row := re.match(r"\d .* ([\d.]+) -> ([\d.]+) +(\d+) to (\d+)%$", line))]
    assert len(rows) > 1
    assert {row[1] for row in rows} == {f"{document['unprofiled_step_us'] / 1e3:.2f}"}
    after = [float(row[2]) for row in rows]
    assert after == sorted(after), "the change that saves most is first"
    for row in rows:
        left = 100 * float(row[2]) / float(row[1])
        within = max(0, 98 - 1.2 * left), min(100, 102 - 0.8 * left)  # two processes differ, and so do replays
        assert (int(row[3]), int(row[4])) == pytest.approx(within, abs=0.7)
    told = " ".join(" ".join(lines).split())
    recorded, _, *others = json.loads(printed(capsys, trace, "--json=all"))["opportunities"]
    whole = " ".join(printed(capsys, trace).split())
    for one in others:
        then = f"{one['unprofiled_step_us_after'] / 1e3:.2f} ms then, est. saving"
        assert f"{one['title']}: the step without the profiler takes {then}" in whole
    assert f"While recorded it saves {recorded['saves_us'] / recorded['step_us']:.0%}" in told.replace("about ", "")
    assert "at most" not in told


@pytest.mark.parametrize("known", [True, False])
def test_a_report_without_changes_names_the_step_that_was_filtered(tmp_path, capsys, known):
    document = json.loads(gzip.decompress((H200 / "01_matmul_add/4096_bf16_warm_eager.json.gz").read_bytes()))
    summary = summarize(read(H200 / "01_matmul_add/4096_bf16_warm_eager.json.gz"))
    document.get("lesson", {}).get("facts", {}).pop("unprofiled_step_us", None)
    document.pop("unprofiled_step_us", None)
    if known:
        document["unprofiled_step_us"] = summary.recorded_step_us
    trace = tmp_path / "a.json"
    trace.write_text(json.dumps(document))
    told = " ".join(printed(capsys, trace, "--only", "try").split())
    assert f"more than 2% of the {'step without the profiler' if known else 'recorded step'}" in told


@pytest.mark.parametrize("name", ["resnet/fp32", "unet/compile"])
def test_the_repetitions_fit_80_columns(capsys, monkeypatch, name):
    monkeypatch.setenv("COLUMNS", "80")
    lines = printed(capsys, CHANGES / f"{name}.json.gz", "--only", "repeats").splitlines()
    assert any(re.match(r"repetitions in step #3 .* share$", line) for line in lines), "a row is one line"
    assert any(re.match(r"  the same \d+ GPU activities \d+ times, from no. \d+ of the step", line) for line in lines)
    assert max(map(cell_len, lines)) <= 80


@pytest.mark.exhaustive
def test_the_warning_about_activities_without_a_launch_gives_their_time(capsys):
    trace = CHANGES / "resnet/fp32.json.gz"
    events = [e for e in json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"] if e.get("ph") == "X"]
    launches = {e["args"]["correlation"] for e in events if e.get("cat") in ("cuda_runtime", "cuda_driver")}
    work = [e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    lost = [e["dur"] for e in work if e["args"]["correlation"] not in launches]
    assert lost
    for stream in {e["args"]["stream"] for e in work if e["args"]["correlation"] not in launches}:
        has_launch = [e["args"]["correlation"] in launches for e in sorted(work, key=lambda e: e["ts"])
                      if e["args"]["stream"] == stream]  # fmt: skip
        assert any(has_launch) and has_launch == sorted(has_launch), "those without a launch come first"
    told = f"{len(lost)} GPU activities ({sum(lost) / 1e3:.1f} ms) were launched before the recording began"
    assert told in " ".join(printed(capsys, trace).split())


def test_the_call_tree_says_that_the_calls_below_a_sum_are_those_of_one_call(capsys):
    trace = OTHERS / "blocking.json.gz"
    events = [e for e in json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"] if e.get("ph") == "X"]
    mark = raw_steps(events)[1]
    inside = [e for e in events if e.get("cat") == "cpu_op" and mark["ts"] <= e["ts"] < end(mark)]
    times = [e["dur"] for e in inside if e["name"] == "aten::to"]
    lines = printed(capsys, trace, "--only", "chain").splitlines()
    (at,) = [number for number, line in enumerate(lines) if line.endswith("in total; the slowest call:")]
    assert f"{len(times)} calls of aten::to  {sum(times) / 1e3:,.1f} ms in total" in lines[at]
    below = max(e["dur"] for e in inside if e["name"] == "aten::_to_copy")
    assert lines[at + 1].strip() == f"aten::_to_copy  {below / 1e3:,.1f} ms"


def test_a_default_report_ends_with_what_more_there_is(capsys):
    trace = CHANGES / "resnet/fp32.json.gz"
    assert printed(capsys, trace).splitlines()[-1].startswith("more: --all")
    assert "more: --all" not in printed(capsys, trace, "--only", "repeats")


@pytest.mark.parametrize("trace", sampled(TRACES), ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_no_table_is_cut_below_eight_rows(reports, capsys, monkeypatch, trace):
    for head, rows in tables(reports(capsys, monkeypatch, trace)).items():
        for number, row in enumerate(rows):
            if re.match(r"\d[\d,]* others\b", row):
                assert number >= 8, (head, row)


@pytest.mark.parametrize("trace", sampled(TRACES), ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_no_report_has_a_retired_word(reports, capsys, monkeypatch, trace):
    text = " ".join(" ".join(reports(capsys, monkeypatch, trace)).split())
    assert [text[found.start() - 60 : found.end() + 20] for found in RETIRED.finditer(text)] == []


@pytest.mark.parametrize("name", small_first(["vit/eager", "resnet/fp32", "copies/blocking", "gpt2/sdpa"]))
def test_where_the_step_goes_adds_up(capsys, monkeypatch, name):
    """The rows add up to the time from one step's first GPU activity to the next one's in the raw events."""
    monkeypatch.setenv("COLUMNS", "120")
    trace = CHANGES / f"{name}.json.gz"
    lines = printed(capsys, trace, "--only", "gpu").splitlines()
    at = next(number for number, line in enumerate(lines) if line.startswith("where the step goes"))
    rows = lines[at + 1 : lines.index("", at)]
    times = [float(row.split()[-2].replace(",", "").replace("<", "")) for row in rows]
    events = [e for e in json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"] if e.get("ph") == "X"]
    marks = raw_steps(events)
    firsts = [min(e["ts"] for e in raw_work(events, mark)) for mark in marks]
    wide = int(measured(trace).after_first)
    apart = (firsts[-1] - firsts[wide]) / (len(firsts) - 1 - wide)
    unit = 1e3 if re.search(r"\bms\b", lines[at]) else 1.0
    whole = float(re.search(r"goes: ([\d.,]+) ", lines[at])[1].replace(",", ""))
    assert whole == pytest.approx(apart / unit, abs=0.01)
    assert sum(times) == pytest.approx(whole, abs=0.01 * len(times))
    assert sum(float(row.split()[-1].rstrip("%")) for row in rows) == pytest.approx(100, abs=0.1 * len(rows))


@pytest.mark.parametrize("name", small_first(["encoder/bf16", "syncs/none"]))
def test_the_report_says_if_only_recording_makes_the_step_overhead_bound(capsys, monkeypatch, name):
    """The program measured its step without the profiler, and the GPU is busy for most of that time."""
    trace = CHANGES / f"{name}.json.gz"
    document = json.loads(gzip.decompress(trace.read_bytes()))
    told = " ".join(printed(capsys, trace).split())
    without = document["unprofiled_step_us"] / 1e3
    assert f"({without:,.1f} ms without the profiler)" in told
    assert "Overhead-bound while it is recorded." in told
    assert re.search(rf"Without the profiler the step takes {without:,.1f} ms, .* GPU-bound\.", told)


def test_the_busy_share_without_the_profiler_stands_beside_the_regime():
    """Saved CPU time makes this step shorter (the replay says by how much), so the GPU alone does not set its pace."""
    file = CHANGES / "gpt2/recompute.json.gz"
    document = json.loads(gzip.decompress(file.read_bytes()))
    events = document["traceEvents"]
    busy = []
    for mark in raw_steps(events):
        work = raw_work(events, mark)
        assert all(one["ts"] + one["dur"] <= other["ts"] + 1 for one, other in itertools.pairwise(work)), "one stream"
        busy.append(sum(one["dur"] for one in work))
    share = sorted(busy)[1] / document["unprofiled_step_us"]
    assert 0.65 < share < 0.9
    assert recording.unprofiled(measured(file)).endswith(f" ms ({share:.0%}): GPU-bound.")


@pytest.mark.parametrize(("name", "overlaps"), [("pinned/prefetched", True), ("pinned/same_stream", False)])
def test_a_busy_time_longer_than_the_step_is_explained(capsys, monkeypatch, name, overlaps):
    """The copy of the next step's batch runs beside this step's products, and belongs to the step that launched it."""
    events = json.loads(gzip.decompress((CHANGES / f"{name}.json.gz").read_bytes()))["traceEvents"]
    _, middle, last = [raw_work(events, mark) for mark in raw_steps(events)]
    assert (last[0]["ts"] < max(one["ts"] + one["dur"] for one in middle)) is overlaps
    told = " ".join(printed(capsys, CHANGES / f"{name}.json.gz").split())
    assert ("activities of different steps overlap on the GPU" in told) is overlaps


@pytest.mark.parametrize(
    ("name", "said"),
    small_first([("encoder/bf16", True), ("syncs/none", True), ("decode/eager", False), ("loader/inline", False)]),
)
def test_the_cost_of_recording_is_estimated_if_it_could_change_the_regime(tmp_path, capsys, name, said):
    document = json.loads(gzip.decompress((CHANGES / f"{name}.json.gz").read_bytes()))
    known = document.pop("unprofiled_step_us")
    trace = tmp_path / "trace.json"
    trace.write_text(json.dumps(document))
    told = " ".join(printed(capsys, trace).split())
    assert ("takes an estimated" in told) is said
    low, high = recording.estimate_us(summarize(read(trace)))
    assert low <= known <= high


# Most of this step is cuDNN's plans, which took 145 ms while recorded, and 159 ms without the profiler.
PLANS = CHANGES / "lengths/cudnn.json.gz"


@pytest.mark.parametrize(
    "file",
    sampled(sorted(file for file in CHANGES.glob("*/*.json.gz") if file != PLANS)),
    ids=lambda path: f"{path.parent.name}/{path.stem}",
)
def test_the_estimated_cost_of_recording_holds_for_all_recordings(file):
    """It was measured on the overhead-bound steps of more than 50 calls."""
    summary = measured(file)
    calls = sum(one.calls for one in (*summary.cpu.ops.values(), *summary.cpu.runtime.values()))
    if summary.waits_for != "overhead" or calls <= 50:
        pytest.skip("no overhead-bound step, or too few calls")
    low, high = recording.estimate_us(summary)
    assert low <= summary.unprofiled_step_us <= high


def test_the_launch_of_a_cuda_graph_may_be_shorter_without_the_profiler(capsys):
    """The GPU waits for this graph's launch, which takes longer because each activity of the graph is recorded."""
    file = H200 / "05_llm/1x512_bf16_warm_compile_gqa_tune_max-autotune.json.gz"
    summary = measured(file)
    events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    (mark,) = (one for one in raw_steps(events) if one["name"] == f"ProfilerStep{summary.chosen.number}")
    calls = [
        one
        for one in events
        if one.get("cat") in ("cpu_op", "cuda_runtime", "cuda_driver") and mark["ts"] <= one["ts"] < end(mark)
    ]
    (launch,) = (one for one in calls if one["name"] == "cudaGraphLaunch")
    low, high = recording.estimate_us(summary)
    assert low == pytest.approx(summary.recorded_step_us - launch["dur"] - 7.9 * len(calls), abs=0.1)
    work = {one["args"]["correlation"] for one in events if one.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")}
    launching = [one for one in calls if one["cat"] == "cpu_op" or one["args"].get("correlation") in work]
    assert high == pytest.approx(summary.recorded_step_us - 1.0 * len(launching), abs=0.1)
    assert summary.gpu_us < low
    told = " ".join(printed(capsys, file, "--only", "short").split())
    assert "it may be GPU-bound then" in told


def test_the_call_tree_does_not_follow_the_many_calls_that_take_little_time(capsys):
    """One thread polls events all the time. That is not the slowest path."""
    file = OTHERS / "h200-x2/sharded_default/rank1.json.gz"
    events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    (mark,) = (one for one in raw_steps(events) if one["name"] == f"ProfilerStep{measured(file).chosen.number}")
    polls = [one for one in events if one["name"] == "cudaEventQuery" and mark["ts"] <= one["ts"] < end(mark)]
    assert len(polls) > 100 and sum(one["dur"] for one in polls) < 0.02 * mark["dur"]
    told = printed(capsys, file, "--only", "chain")
    assert "cudaEventQuery" not in told
    assert f"{mark['name']}  {duration(mark['dur'])}" in told and "calls of aten::linear" in told


def test_json_has_the_opportunities(capsys):
    trace = CHANGES / "vit/eager.json.gz"
    found = json.loads(printed(capsys, trace, "--json=all"))["opportunities"]
    assert found and set(found[0]) >= {
        "change", "title", "step_us", "step_us_after", "saves_us", "basis", "evidence", "try"
    }  # fmt: skip
    assert [one["saves_us"] for one in found] == sorted((one["saves_us"] for one in found), reverse=True)
    only = json.loads(printed(capsys, trace, "--json", "--only", "try"))
    assert only["opportunities"] == found and only["opportunities_refused"] is None and "chain" not in only
    cpu = json.loads(printed(capsys, next((ROOT / "traces/reference/cpu/02_linear").glob("*.gz")), "--json=all"))
    assert cpu["opportunities"] == [] and cpu["opportunities_refused"] is None


def test_patterns_that_teach_appear_only_for_numbered_scripts(capsys):
    ours, theirs = ROOT / "traces/reference/nvidia-h200/05_llm", CHANGES / "vit/eager.json.gz"
    teaches = "without GPU work ("
    assert teaches in " ".join(printed(capsys, next(ours.glob("*triton-overlap_active2.json.gz"))).split())
    assert teaches not in " ".join(printed(capsys, theirs).split())
    assert teaches in " ".join(printed(capsys, theirs, "--only", "patterns").split())


@pytest.mark.parametrize(
    ("times", "unit", "told"),
    [([1.94, 832.4], "µs", "832.4"), ([3.0, 832_411.0], "ms", "832.4"), ([11_900.0], "ms", "11.90"),
     ([6.1e7, 20.0], "s", "61.00"), ([None, 0.02], "µs", "<0.1"), ([], "µs", None)],
)  # fmt: skip
def test_a_column_has_one_unit(times, unit, told):
    found = unit_of(times)
    assert found.name == unit
    assert told is None or told in [found(one) for one in times]


@pytest.mark.parametrize(
    ("trace", "unit"),
    [
        (CHANGES / "loader/inline.json.gz", "ms"),  # a span of 3.4 ms, an idle time of 91% and latencies of 26 µs
        (OTHERS / "models/bert_cold.json.gz", "ms"),  # a first step of 958 ms
        (H200 / "01_matmul_add/64_bf16_cold_eager.json.gz", "µs"),
    ],
    ids=["loader", "a slow first step", "small"],
)
def test_a_steps_tables_share_their_unit(trace, unit, capsys):
    text = printed(capsys, trace, "--only", "gpu,steps")
    assert re.search(
        rf"^where the step goes: [\d.,]+ {unit} on the GPU.* {unit}  of (?:the step|[\d.,]+ {unit})$", text, re.M
    )
    title, *rows = re.search(r"^step, in .*\n(?:#.*\n)+", text, re.M)[0].splitlines()
    assert re.split(r" {2,}", title) == [f"step, in {unit}", "CPU", "to first op", "launches", "GPU busy", "span",
                                         "idle", "latency"]  # fmt: skip
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    length = {"ms": 1e3, "µs": 1.0}[unit]
    for row, step in zip(rows, raw_steps([e for e in events if e.get("ph") == "X"]), strict=True):
        cells = row.replace(" *", "").split()
        assert float(cells[1].replace(",", "")) * length == pytest.approx(step["dur"], rel=1e-3)
        assert all(float(cell.replace(",", "")) > 0 for cell in (*cells[1:6], cells[7]))


@pytest.mark.parametrize(
    ("unit", "times", "shown"),
    [
        ("ms", [47_700.0, 4_270.0], ["47.700", "4.270"]),
        ("ms", [957_924.0, 20_000.0], ["957.92", "20.00"]),
        ("ms", [2.8, 9.0], ["0.0028", "0.0090"]),
        ("ms", [0.7, 20_112.2], ["0.001", "20.112"]),
        ("ms", [22.0], ["0.022"]),
        ("µs", [2.84, 0.02], ["2.8", "<0.1"]),
        ("s", [12_345_678.0], ["12.35"]),
        ("s", [41.0], ["0.000041"]),
        ("ms", [None, 0.0], ["–", "0.000"]),
    ],
)
def test_columns_that_share_a_unit_keep_their_digits(unit, times, shown):
    (found,) = sharing(unit, [times])
    assert [found(one) for one in times] == shown


@pytest.mark.parametrize(
    ("us", "said"),
    [(0.04, "0.0 µs"), (832.4, "832.4 µs"), (832_411.0, "832.4 ms"), (9.9e6, "9,900.0 ms"), (61_230_000.0, "61.2 s")],
)
def test_a_time_in_a_sentence_has_a_unit_that_fits(us, said):
    assert duration(us) == said


@pytest.mark.parametrize(
    ("us", "said"),
    [
        ((106.4, 219.6), "106 of the 220 µs"),
        ((37_766.0, 44_450.0), "37.8 of the 44.5 ms"),
        ((89.2, 6_137.3), "89.2 µs of the 6.1 ms"),
        ((83_990.0, 61.0), "84.0 ms of the 61.0 µs"),
        ((0.0, 12_345_678.0), "0.0 µs of the 12.3 s"),
    ],
)
def test_times_that_are_compared_share_a_unit_unless_they_are_far_apart(us, said):
    assert part_of(*us) == said


def test_a_new_kind_of_kernels_has_none_before(capsys):
    text = printed(capsys, OTHERS / "memory_bound.json.gz", OTHERS / "conv.json.gz", "--only", "short")
    assert re.search(r"; [\d.]+ ms of convolution kernels \(22\) instead of none", text)
    assert not re.search(r"instead of 0\b(?!\.)", text)


def test_one_figure_stands_for_a_range_whose_ends_look_the_same(capsys):
    text = printed(capsys, H200 / "01_matmul_add/64_bf16_cold_eager.json.gz", "--only", "work")
    assert not re.search(r"(?<![\d.,–])([\d.,]+)–\1(?![\d.,])", text)
    assert printed(capsys, OTHERS / "attention_naive.json.gz", "--only", "work").count("–") > 2


def test_a_stacked_table_has_the_unit_after_the_figure(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    text = printed(capsys, OTHERS / "attention_naive.json.gz", "--only", "work")
    assert "median 84.7 µs · range 84.3–85.8 µs" in text and "µs 84.7" not in text


def test_the_table_of_waits_has_their_sum(capsys):
    text = printed(capsys, CHANGES / "guards/compile.json.gz", "--only", "gpu")
    head, rows = re.search(r"^the GPU waits for #3 while .* +µs  of ([\d.]+) µs\n((?:.+\n)+)", text, re.M).groups()
    shown = [float(row.split()[-2].replace(",", "")) for row in rows.splitlines()]
    assert len(shown) == 7 and sum(shown) == pytest.approx(float(head), abs=0.05 * len(shown) + 0.05)
    events = json.loads(gzip.decompress((CHANGES / "guards/compile.json.gz").read_bytes()))["traceEvents"]
    work = [raw_work([e for e in events if e.get("ph") == "X"], mark) for mark in raw_steps(events)]
    launches = {e["args"]["correlation"]: end(e) for e in events if e.get("cat") in ("cuda_runtime", "cuda_driver")}
    _, (one,), (after,) = work
    returned = launches[after["args"]["correlation"]]
    assert float(head) == pytest.approx(min(returned, after["ts"]) - end(one), abs=0.1)
    # The parts of the step above are of the same step here, because the slow first one is left out of them.
    assert re.search(r"^where the step goes: .* on the GPU, #3 ", text, re.M)
    assert re.search(rf"^idle, waiting for CPU launches +{re.escape(head)} ", text, re.M)


def test_the_time_of_left_out_activities_is_a_sum(capsys):
    text = printed(capsys, OTHERS / "models/bert_cold.json.gz", "--only", "work")
    assert re.search(r"^3 others, 5\.8 µs in total$", text, re.M)


def test_a_few_bytes_have_no_rate(capsys):
    """A copy of 4 bytes takes as long as its start-up."""
    text = printed(capsys, OTHERS / "blocking.json.gz", "--only", "names")
    assert "4 B moved" in text and " 0 GB/s" not in text and "67.1 MB moved at 2 GB/s" in text
    assert "under 1% of the data sheet" in printed(capsys, CHANGES / "guards/compile.json.gz", "--only", "names")


def test_steps_without_a_slice_on_the_cpu_are_not_priced(tmp_path, capsys):
    """The trace has a step and GPU work launched in it, but no slice on any thread."""
    document = json.loads(gzip.decompress((CHANGES / "pointwise/eager.json.gz").read_bytes()))
    marks = raw_steps([e for e in document["traceEvents"] if e.get("ph") == "X"])
    first = marks[0]
    document["traceEvents"] = [
        e for e in document["traceEvents"]
        if not (e.get("ph") == "X" and e.get("cat") in ("cpu_op", "user_annotation") and e is not first
                and first["ts"] <= e.get("ts", 0) < end(first))
    ]  # fmt: skip
    trace = tmp_path / "a.json"
    trace.write_text(json.dumps(document))
    assert "where the step goes" in printed(capsys, trace)


def test_a_terminal_shows_what_is_done_with_a_trace(tmp_path, monkeypatch, capsys):
    trace = tmp_path / "a\x1b.json"
    trace.write_bytes(
        gzip.decompress((H200 / "03_simple_mlp/64x128x768x3072_bf16_warm_eager_shapes.json.gz").read_bytes())
    )
    assert cli.main([str(trace)]) == 0
    printed, said = capsys.readouterr()
    assert said == "", "no terminal"
    monkeypatch.setattr(progress, "AFTER_S", 0)
    monkeypatch.setattr(progress, "EVERY_S", 0)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    assert cli.main([str(trace)]) == 0
    again, said = capsys.readouterr()
    assert again == printed
    done = ["decoding", "building", "tying", "measuring", "replaying the steps with changes: 1 of"]
    shown = said.split(progress.CLEAR_LINE)
    assert sorted(done, key=lambda one: next(n for n, text in enumerate(shown) if one in text)) == done
    assert said.endswith(progress.CLEAR_LINE)
    assert all(text == "" or text.startswith("a\ufffd.json: ") for text in shown)


def test_a_step_that_no_change_makes_shorter_is_compared_with_the_hardware(capsys):
    """The product of two 4096 x 4096 matrices at the H200's 989 TFLOP/s, and the sum of two at its 4.8 TB/s."""
    path = H200 / "01_matmul_add/4096_bf16_warm_eager_shapes.json.gz"
    assert cli.main([str(path), "--only", "short,try"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    step = float(re.search(r"steps of ([\d.]+) µs", said)[1])
    least = 2 * 4096**3 / 989e6 + 3 * 2 * 4096**2 / 4.8e6
    assert "the kernels of known sizes (100% of the GPU time)" in said
    share = int(re.search(r"would take (\d+)% of the step, mostly at the arithmetic peak", said)[1])
    assert share == pytest.approx(100 * least / step, abs=1)
