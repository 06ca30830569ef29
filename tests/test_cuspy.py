"""Traces with torch 2.15's additions are read. torch's own exporter writes them from events of recorded H200 traces."""

import gzip
import json
import re

import pytest
import torch  # noqa: F401  the exporter is torch's
from cuspy import CALLS, WORK, Recorded
from references import H200, ROOT

from tracereader import cli
from tracereader.figures import summarize
from tracereader.figures.places import by_label
from tracereader.replay import Graph, graph_of
from tracereader.replay.graph import NOBODY
from tracereader.trace import read

COPIES = H200 / "changes/copies/prefetched.json.gz"
GRAPH = H200 / "changes/decode/graph.json.gz"
SAME = (COPIES, GRAPH, ROOT / "tests/traces/streams.json.gz", H200 / "01_matmul_add/64_bf16_cold_eager.json.gz")


def seen(trace):
    """Return all GPU activities, with times of the file's clock."""
    zero = trace.zero_us * 1000
    return [
        (
            (one.name, one.kind, zero + one.start, one.dur, one.track),
            (one.launch.name, zero + one.launch.start) if one.launch else (),
        )
        for one in trace.work
    ]


@pytest.mark.parametrize("path", SAME, ids=lambda path: path.parent.name + path.stem)
def test_a_trace_written_by_torchs_new_exporter_reads_the_same(path, tmp_path, monkeypatch):
    """The exporter gives all copies one name, numbers kinds of memory, and writes no GPU annotations or occupancies."""
    before, after = read(path), read(Recorded(path).write(tmp_path / "trace.json", monkeypatch))
    assert sorted(seen(after)) == sorted(seen(before))
    assert [one.name for one in after.steps] == [one.name for one in before.steps]
    unlaunched = [sum(work.launch is None for work in trace.work) for trace in (before, after)]
    assert unlaunched[0] == unlaunched[1] and not after.not_known
    one, other = summarize(before), summarize(after)
    assert (one.waits_for, one.gpu, one.recorded_step_us) == (other.waits_for, other.gpu, other.recorded_step_us)
    assert [row.asked_by for row in one.gpu_work] == [row.asked_by for row in other.gpu_work]


@pytest.fixture
def graph_nodes(tmp_path, monkeypatch):
    """A recorded decode step that three launches of one graph replay, with all that torch 2.15 tells of its nodes.

    Odd nodes are shown on a lane. After node 9 a callback runs on the CPU, of which queued replays lose the
    correlation. Torch also draws an arrow for each dependency, which is not read.
    """
    recorded = Recorded(GRAPH)
    launches = sorted(
        row["correlation_id"] for row in recorded.rows["cuda_runtime"]
        if row["cbid"] == recorded.names["cuda_runtime"]["cudaGraphLaunch"]
    )  # fmt: skip
    rows = [row for kind in WORK for row in recorded.rows.get(kind, ())]
    for row in rows:
        row |= {"logical_lane": row["stream_id"], "lane_name": None}
    hosts = []
    for place, launch in enumerate(launches):
        replay = sorted((row for row in rows if row["correlation_id"] == launch), key=lambda row: row["start_ns"])
        for node, row in enumerate(replay, 1):
            row |= {"graph_id": 5, "graph_node_id": 5 << 32 | node}
            row["annotation"] = {"name": "first half" if node <= 100 else "second half", "layer": 3}
            if node % 2:
                row |= {"logical_lane": 100_001, "lane_name": "odd nodes"}
        tenth = replay[9]
        hosts.append({
            "start_ns": tenth["end_ns"], "end_ns": tenth["end_ns"] + 50, "device_id": 0, "context_id": 1,
            "stream_id": 7, "correlation_id": 0 if place else launch, "graph_id": 5,
            "graph_node_id": 5 << 32 | 1000, "annotation": None, "process_id": 1, "thread_id": 2,
        })  # fmt: skip
    recorded.rows["graph_host_node"] = hosts
    count = len(replay)
    edges = {5 << 32 | node: [5 << 32 | node - 1] for node in range(2, count + 1)}
    edges |= {5 << 32 | 1000: [5 << 32 | 10], 5 << 32 | 12: [5 << 32 | 11, 5 << 32 | 10]}
    recorded.window["graph_deps"] = edges
    path = recorded.write(tmp_path / "graph.json", monkeypatch)
    return read(path), json.loads(path.read_text()), launches, count


def test_nodes_of_a_graph_run_on_their_stream_whatever_lane_shows_them(graph_nodes):
    trace, document, _, count = graph_nodes
    raw = [event["args"] for event in document["traceEvents"] if event.get("cat") == "kernel"]
    assert {args.get("original_stream") for args in raw} == {None, 7}
    assert {args["stream"] for args in raw} == {7, 100_001}
    assert {one.track for one in trace.work} == {(0, 7)}
    assert [len(step.work) for step in trace.steps] == [count] * 3


def test_a_callback_on_the_cpu_is_no_work_of_the_device(graph_nodes):
    trace, document, launches, _ = graph_nodes
    raw = [event for event in document["traceEvents"] if event.get("cat") == "graph_host_node"]
    assert sorted(event["args"]["correlation"] for event in raw) == [0, 0, launches[0]]
    names = {event["name"] for event in raw}
    assert not trace.not_known and names.isdisjoint(one.name for one in trace.work)
    assert isinstance(graph_of(trace), Graph)


def test_annotations_of_a_capture_divide_a_replay(graph_nodes):
    trace, document, _, _ = graph_nodes
    summary = summarize(trace)
    correlation = trace.steps[summary.typical_index].work[0].launch.args["correlation"]
    us = {}
    for event in document["traceEvents"]:
        if event.get("cat") in WORK and event["args"]["correlation"] == correlation:
            us[event["args"]["name"]] = us.get(event["args"]["name"], 0) + event["dur"]
    found = {one.name: one.gpu_us for one in by_label(trace.steps[summary.typical_index])}
    assert found == pytest.approx(us) and set(us) == {"first half", "second half"}
    assert {row.asked_by for row in summary.gpu_work} == set(us)


@pytest.mark.parametrize("form", ["cuspy", "kineto"])
def test_recorded_synchronizations_decide_which_stream_waits(form, tmp_path, monkeypatch):
    """In each step the main stream waits for the previous step's copy. Without records the copy seems to wait."""
    recorded = Recorded(COPIES)
    calls = {number: name for kind in CALLS for name, number in recorded.names[kind].items()}
    api = sorted(recorded.rows["cuda_runtime"], key=lambda row: row["start_ns"])
    records = [row for row in api if calls[row["cbid"]] == "cudaEventRecordWithFlags"]
    waits = [row for row in api if calls[row["cbid"]] == "cudaStreamWaitEvent"]
    assert len(records) == len(waits) == 3
    if form == "cuspy":
        recorded.rows["cuda_event"] = [
            {"cuda_event_sync_id": place, "correlation_id": row["correlation_id"], "device_id": 0, "context_id": 1}
            for place, row in enumerate(records, 1)
        ]
        recorded.rows["cuda_sync"] = [
            {"sync_type": 2, "start_ns": row["start_ns"], "end_ns": row["end_ns"], "context_id": 1, "stream_id": 7,
             "correlation_id": row["correlation_id"], "cuda_event_id": 9, "cuda_event_sync_id": place}
            for place, row in enumerate(waits, 1)
        ]  # fmt: skip
        path = recorded.write(tmp_path / "synced.json", monkeypatch)
    else:
        path = recorded.write(tmp_path / "plain.json", monkeypatch)
        document = json.loads(path.read_text())
        for record, wait in zip(records, waits, strict=True):
            args = {"cuda_sync_kind": "Stream Wait Event", "wait_on_stream": 13, "stream": 7, "device": 0, "context": 1,
                    "wait_on_cuda_event_record_corr_id": record["correlation_id"], "wait_on_cuda_event_id": 9,
                    "correlation": wait["correlation_id"]}  # fmt: skip
            ts = (wait["start_ns"] - recorded.base) / 1000
            event = {"ph": "X", "cat": "cuda_sync", "name": "Stream Wait Event", "pid": 0, "tid": 7, "ts": ts, "dur": 1}
            document["traceEvents"].append({**event, "args": args})
        path.write_text(json.dumps(document))
    trace = read(path)
    awaited = {"cuspy": None, "kineto": 13}[form]
    assert [(one.kind, one.stream, one.awaited, one.record.args["correlation"]) for one in trace.syncs] == [
        ("Stream Wait Event", 7, awaited, row["correlation_id"]) for row in records
    ]
    graph = graph_of(trace)
    assert isinstance(graph, Graph)
    node_of = {node: one for one in trace.work if (node := graph.activity[id(one)]) is not None}
    waited = {id(one): node_of.get(graph.wait[node]) for node, one in node_of.items()}
    copies = sorted((one for one in trace.work if one.track == (0, 13)), key=lambda one: one.start)
    assert all(waited[id(one)] is None for one in copies), "nothing recorded that a copy waits"
    for step, before in zip(trace.steps[1:], trace.steps, strict=False):
        first = min((one for one in step.work if one.track == (0, 7)), key=lambda one: one.start)
        (copy,) = (one for one in before.work if one.track == (0, 13))
        assert waited[id(first)] is copy
    inferred = graph_of(read(COPIES))
    guessed = {one.track for one in inferred.trace.work if inferred.wait[inferred.activity[id(one)]] != NOBODY}
    assert (0, 13) in guessed, "without records the copies seem to wait, so this trace shows what records add"


def test_a_synchronization_of_one_stream_waits_for_that_stream_alone(tmp_path):
    """The call returns just after B of stream 8 ended; CUPTI says that it waited for A of stream 7."""
    on_cpu, on_gpu, events = {"ph": "X", "pid": 1, "tid": 1}, {"ph": "X", "pid": 0}, []
    call = on_cpu | {"cat": "cuda_runtime"}
    for step in range(3):
        at = 1000.0 * step
        events += [
            on_cpu | {"cat": "user_annotation", "name": f"ProfilerStep#{step}", "ts": at, "dur": 900},
            on_cpu | {"cat": "cpu_op", "name": "aten::mm", "ts": at + 1, "dur": 100},
        ]
        for number, (name, stream, start, dur) in enumerate([("A", 7, 30, 600), ("B", 8, 40, 595)]):
            args, launched = {"correlation": 10 * step + number + 1}, at + 10 + 5 * number
            events.append(call | {"name": "cudaLaunchKernel", "ts": launched, "dur": 4, "args": args})
            kernel = on_gpu | {"cat": "kernel", "name": name, "tid": stream, "ts": at + start, "dur": dur}
            events.append(kernel | {"args": args | {"device": 0, "stream": stream}})
        args, when = {"correlation": 10 * step + 9}, {"ts": at + 200, "dur": 440}
        events.append(call | when | {"name": "cudaStreamSynchronize", "args": args})
        args = args | {"cuda_sync_kind": "Stream Sync", "stream": 7, "device": 0}
        events.append(on_gpu | when | {"cat": "cuda_sync", "name": "Stream Sync", "tid": 7, "args": args})
    tied = {}
    for kept in ("without", "with"):
        some = [event for event in events if kept == "with" or event["cat"] != "cuda_sync"]
        (tmp_path / f"{kept}.json").write_text(json.dumps({"traceEvents": some}))
        trace = read(tmp_path / f"{kept}.json")
        graph = graph_of(trace)
        assert isinstance(graph, Graph), graph
        name_of = {graph.activity[id(one)]: one.name for one in trace.work}
        tied[kept] = [name_of[graph.via[node]] for node in graph.returns.values()]
    assert tied == {"without": ["B"] * 3, "with": ["A"] * 3}


def test_a_recorded_wait_whose_event_is_not_known_ties_its_own_stream():
    """torch 2.11 on CUDA 13 records which stream waits, and -1 for the stream and the record that it waits for."""
    path = ROOT / "tests/traces/h100/syncs.json.gz"
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    waits = [one for one in events if one["name"] == "Stream Wait Event"]
    assert [one["args"]["stream"] for one in waits] == [7] * 4
    assert {one["args"][f"wait_on_{what}"] for one in waits for what in ("stream", "cuda_event_record_corr_id")} == {-1}
    launched = {one["args"]["correlation"]: one["ts"] for one in events if one.get("cat") in CALLS}
    work = sorted(
        (one for one in events if one.get("cat") in WORK), key=lambda one: launched[one["args"]["correlation"]]
    )
    expected = []
    for wait in waits:
        at = launched[wait["args"]["correlation"]]
        after = next(one for one in work if one["tid"] == 7 and launched[one["args"]["correlation"]] > at)
        before = max((one for one in work if one["tid"] != 7 and one["ts"] < after["ts"]), key=lambda one: one["ts"])
        expected.append((after["ts"], before["ts"]))
    trace = read(path)
    graph = graph_of(trace)
    assert isinstance(graph, Graph)
    at = {graph.activity[id(one)]: one.start / 1e3 + trace.zero_us for one in trace.work}
    found = [(at[node], at[other]) for node, other in enumerate(graph.wait) if node in at and other != NOBODY]
    assert found == [pytest.approx(pair, abs=0.002) for pair in expected]


@pytest.mark.parametrize("form", ["cuspy", "kineto"])
def test_sampled_counters_change_nothing_in_the_report(form, tmp_path, monkeypatch, capsys):
    path = H200 / "03_simple_mlp/64x128x768x3072_bf16_warm_eager_shapes.json.gz"
    recorded = Recorded(path)
    plain, sampled = tmp_path / "plain/run.json", tmp_path / "sampled/run.json"
    for file in (plain, sampled):
        file.parent.mkdir()
    recorded.write(plain, monkeypatch)
    work = [row for kind in WORK for row in recorded.rows.get(kind, ())]
    times = range(min(row["start_ns"] for row in work), max(row["end_ns"] for row in work), 10_000)
    names = (
        "sm__cycles_active.avg.pct_of_peak_sustained_elapsed",
        "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed",
    )
    if form == "cuspy":
        recorded.rows["pm_sampling"] = [
            {"start_ns": time, "device_id": 0, names[0]: 40.0, names[1]: 7.0} for time in times
        ]
        recorded.rows["environment"] = [
            {"start_ns": time, "device_id": 0, "environment_kind": kind, "data": data}
            for time in times[::10] for kind, data in ((1, 2619 << 32 | 1980), (3, 698_000), (2, 51))
        ]  # fmt: skip
        recorded.write(sampled, monkeypatch)
    else:
        document = json.loads(plain.read_text())
        document["traceEvents"] += [
            {"ph": "C", "cat": "hardware_counters", "name": "CUPTI PM Sampling", "pid": 0, "tid": 0,
             "ts": (time - recorded.base) / 1000, "args": dict.fromkeys(names, 40.0)}
            for time in times
        ]  # fmt: skip
        sampled.write_text(json.dumps(document))
    assert sum(one["ph"] == "C" for one in json.loads(sampled.read_text())["traceEvents"]) >= len(times)
    reports = []
    for file in (plain, sampled):
        assert cli.main([str(file), "--all"]) == 0
        reports.append(capsys.readouterr())
    assert reports[0] == reports[1]


def test_torchs_exporter_still_writes_the_names_that_the_reader_uses():
    """torch's code contains the names on which the reader depends."""
    import torch.profiler as profiler

    source = (ROOT.__class__(profiler.__file__).parent / "_cuspy/trace.py").read_text()
    for name in ("original_stream", "graph node id", "wait_on_cuda_event_record_corr_id"):
        assert name in source
    assert re.search(r"_GRAPH_DEP_FLOW_ID_BASE = \(\s*1 << 40", source)
