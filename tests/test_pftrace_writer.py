"""A .pftrace file of torch's exporter gives the same report as the exporter's JSON of the same run."""

import collections
import gzip
import json

import pytest
import torch
from pftraces import GPU, as_far_as_pftrace_has_it, written
from references import H200, LARGE, MODELS, OTHERS, REFERENCES, ROOT

from tracereader import cli
from tracereader.trace.document import json_of

pytest.importorskip("torch.profiler._trace_validator", reason="torch 2.15 has it")
if not hasattr(torch._C._profiler, "_cuspy"):
    pytest.skip("torch 2.15 has the exporter of .pftrace", allow_module_level=True)

FEW = [
    H200 / "02_linear/1024x32x64_bf16_cold_eager.json.gz",
    H200 / "05_llm/1x512_bf16_warm_eager_triton-overlap_graph.json.gz",
    ROOT / "tests/traces/train_stack.json.gz",
    ROOT / "tests/traces/streams.json.gz",
    ROOT / "tests/traces/ranks/ddp_straggler_rank0.json.gz",
]
# torch does not write the phases inside of kernels, which a script adds to its own trace.
ALL = {*REFERENCES, *LARGE, *OTHERS, *MODELS, *ROOT.glob("traces/reference/*/changes/*/*.json.gz")}
# All 202 of them were the same when this was written; a few are enough to keep it so.
MORE = sorted(path for path in ALL - {*FEW} if "inside" not in path.name)[::20]


def reports(file, capsys):
    """Return the whole report and the JSON of a trace, without its name."""
    found = []
    for flag in ("--all", "--json=all"):
        assert cli.main([str(file), flag]) == 0
        found.append(capsys.readouterr().out.replace(file.name, "NAME"))
    return found


@pytest.mark.parametrize(
    "path",
    [*FEW, *(pytest.param(path, marks=pytest.mark.exhaustive) for path in MORE)],
    ids=lambda path: "/".join(path.parts[-2:]).removesuffix(".json.gz"),
)
def test_the_reports_of_both_formats_are_the_same(path, tmp_path, capsys):
    as_json, as_pftrace = written(path, tmp_path)
    assert reports(as_pftrace, capsys) == reports(as_far_as_pftrace_has_it(as_json), capsys)


def test_the_formats_of_a_run_on_this_cpu_are_the_same(tmp_path, capsys):
    """Without the new collector, torch writes JSON under any name, so the name does not decide the format."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profiler:
        x = torch.randn(16, 16, requires_grad=True)
        (x @ x).relu().sum().backward()
    named = tmp_path / "run.pftrace"
    profiler.export_chrome_trace(str(named))
    assert named.read_bytes().lstrip()[:1] == b"{"
    as_json, as_pftrace = written(named, tmp_path)
    assert reports(as_pftrace, capsys) == reports(as_far_as_pftrace_has_it(as_json), capsys)
    assert "aten::mm" in reports(named, capsys)[0]


def events_of(file, *phases):
    return [one for one in json.loads(json_of(file, 10**9))["traceEvents"] if one["ph"] in phases]


def test_synchronization_and_nodes_of_graphs_are_those_of_the_json_beside_counters(tmp_path):
    import numpy as np

    def more(base):
        def columns(start, end, **others):
            found = {"start_ns": base + np.array(start), "end_ns": base + np.array(end)}
            return found | {key: np.array(value) for key, value in others.items()}

        def of_gpu(**others):
            none = np.zeros(2, np.int64)
            usual = ("priority", "queued", "channel", "channel_type", "static_shared_memory", "dynamic_shared_memory")
            here = {"device_id": none, "context_id": none + 1, "graph_id": none + 5}
            return here | dict.fromkeys(usual, none) | {"registers_per_thread": none + 30} | others

        kernels = columns([9000, 20000], [11000, 26000]) | of_gpu(
            name=np.array(["first", "second"], dtype=object),
            correlation_id=np.array([8, 8]),
            stream_id=np.array([7, 13]),
            graph_node_id=np.array([(5 << 32) + 1, (5 << 32) + 2]),
            logical_lane=np.array([7, 40]),
            **{f"{what}_{axis}": np.array([2, 3]) for what in ("grid", "block") for axis in "xyz"},
            lane_name=np.array([None, "DP"], dtype=object),
            annotation=np.array([None, {"name": "marked", "number": 3}], dtype=object),
        )
        host = columns([12000, 28000], [13000, 29000]) | of_gpu(
            correlation_id=np.array([8, 0]),
            stream_id=np.array([7, 7]),
            graph_node_id=np.array([(5 << 32) + 3, (5 << 32) + 3]),
            annotation=np.array([None, None], dtype=object),
            process_id=np.array([1, 1]),
            thread_id=np.array([2, 2]),
            host_fn=np.array(["callback", None], dtype=object),
        )
        launch = columns([1000], [3000], correlation_id=[8], cbid=[1], process_id=[1], thread_id=[1])
        syncs = columns(
            [4000, 6000], [5000, 8000], sync_type=[3, 2], context_id=[1, 1], stream_id=[7, 0xFFFFFFFF],
            correlation_id=[11, 12], cuda_event_id=[0, 4], cuda_event_sync_id=[0, 9],
        )  # fmt: skip
        power = columns([5000, 15000], [5000, 15000], environment_kind=[3, 1], device_id=[0, 0],
                        data=np.array([450_125, (2619 << 32) | 1980], dtype=np.uint64))  # fmt: skip
        found = {
            "kernel": kernels, "graph_host_node": host, "cuda_runtime": launch, "cuda_sync": syncs,
            "environment": power,
        }  # fmt: skip
        return {"columns": found, "graph_deps": {(5 << 32) + 2: [(5 << 32) + 1], (5 << 32) + 3: [(5 << 32) + 2]}}

    op = {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 1, "tid": 1, "ts": 0, "dur": 4.0, "args": {}}
    call = op | {"cat": "cuda_runtime", "name": "cudaGraphLaunch", "ts": 1.0, "dur": 2.0}
    source = tmp_path / "made.json"
    source.write_text(json.dumps({"baseTimeNanoseconds": 10**18, "traceEvents": [op, call]}))
    as_json, as_pftrace = written(source, tmp_path, more)

    def slices(file):
        found = {}
        for event in events_of(file, "X"):
            if event["cat"] != "Trace":
                args = {key: value for key, value in event["args"].items() if value and key not in MISSING}
                place = event["cat"], event["name"], event["pid"], event["tid"], event["ts"], event["dur"]
                found[place] = {key: str(value) for key, value in args.items()}
        return found

    MISSING = ("host process", "host thread", "shared memory")
    theirs, ours = slices(as_json), slices(as_pftrace)
    for place in theirs:
        assert ours[place] == theirs[place]
    assert ours.keys() == theirs.keys()
    assert {place[0] for place in ours} >= {"kernel", "graph_host_node", "cuda_sync", "cuda_runtime", "cpu_op"}

    assert len(events_of(as_json, "C")) == 5 and not events_of(as_pftrace, "C")


def test_the_committed_file_is_what_the_exporter_writes(tmp_path):
    path = ROOT / "tests/traces/pftrace/linear.pftrace.gz"
    _, again = written(FEW[0], tmp_path)
    assert json_of(again, 10**9) == json_of(path, 10**9)


@pytest.mark.parametrize("path", FEW[:2], ids=lambda path: path.parent.name)
def test_every_kernel_is_read(path, tmp_path):
    _, as_pftrace = written(path, tmp_path)
    raw = [one for one in json.loads(gzip.decompress(path.read_bytes()))["traceEvents"] if one.get("cat") in GPU]
    read = [one for one in events_of(as_pftrace, "X") if one["cat"] in GPU]
    assert collections.Counter(one["name"] for one in read) == collections.Counter(one["name"] for one in raw)


def test_torchs_validator_finds_nothing_in_what_the_scripts_recorded_on_a_gpu():
    from torch.profiler._trace_validator import validate_trace

    paths = [path for path in (*REFERENCES, *LARGE) if "nvidia" in str(path)][::8]
    assert [(path.name, validate_trace(str(path))[1]) for path in paths if not validate_trace(str(path))[0]] == []


def test_torchs_validator_finds_nothing_in_what_a_script_writes_here(run, tmp_path):
    from torch.profiler._trace_validator import validate_trace

    assert run("01_matmul_add", "--size", "8", "--device", "cpu") == 0
    (file,) = tmp_path.rglob("*.json")
    assert validate_trace(str(file)) == (True, [])
