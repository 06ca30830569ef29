"""Kernels of a replayed CUDA graph get their op, shapes and module from the graph's capture."""

import gzip
import json

import pytest
from raw_events import event
from references import H200, ROOT
from test_later_workloads import edited

from tracereader import cli
from tracereader.changes.catalogue import opportunities
from tracereader.figures import summarize
from tracereader.figures.places import by_module
from tracereader.replay import graph_of
from tracereader.show import warnings
from tracereader.trace import TraceError, read
from tracereader.trace.capture import read_with_captures

CHANGES, H100 = H200 / "changes", ROOT / "tests/traces/h100"
PAIRS = [("vit", "eager"), ("decode", "eager"), ("lstm", "cells"), ("images", "eager")]
GPU = ("kernel", "gpu_memcpy", "gpu_memset", "gpu_user_annotation", "ac2g")
WIDTH = "Input Dims"


@pytest.mark.parametrize(
    ("name", "without"),
    [PAIRS[0], *(pytest.param(*pair, marks=pytest.mark.exhaustive) for pair in PAIRS[1:])],
)
def test_a_trace_of_the_step_without_the_graph_names_the_ops_of_the_replay(name, without):
    """The order of the launches decides. The names of the recorded kernels in both traces show that it is right."""
    graph, eager = CHANGES / name / "graph.json.gz", CHANGES / name / f"{without}.json.gz"
    trace, other = read_with_captures(graph, [eager]), read(eager)
    asked = sorted(((one.launch.start, one) for one in other.steps[-1].work), key=lambda pair: pair[0])
    ops = [next(op.name for op in one.launch.above() if op.kind == "op") for _, one in asked]
    kernels = [one.name for _, one in asked]
    for step in trace.steps:
        replayed = [one for one in step.work if one.from_graph]
        assert len(replayed) == len(asked)
        for one, op, kernel in zip(replayed, ops, kernels, strict=True):
            assert one.name == kernel or {"memset", "Memset"} & {one.name[:6], kernel[:6]}
            assert next(above.name for above in one.asked.above() if above.kind == "op") == op
        assert not any(one.recorded for one in step.work if not one.from_graph)
    assert not [told for told in warnings.of(summarize(trace)) if "capture" in told]


def as_capture(source, target, size=None, modules=False, shapes=1):
    """The last step of an eager trace as its capture: the same calls between the edges of a capture, and no GPU work.

    size: of the annotation that vLLM puts around a capture. modules: a module around every outermost op. shapes:
    multiplies the first dimension of each shape, as another batch size would.
    """
    document = json.loads(gzip.decompress(source.read_bytes()))
    events = [one for one in document["traceEvents"] if one.get("cat") not in GPU]
    steps = [one for one in events if one["name"].startswith("ProfilerStep#") and one.get("cat") == "user_annotation"]
    last = max(steps, key=lambda one: one["ts"])
    start, end = last["ts"], last["ts"] + last["dur"]
    events = [
        one for one in events if start <= one.get("ts", 0) < end and one["name"] not in ("[memory]", last["name"])
    ]
    calls = [one for one in events if one.get("cat") in ("cuda_runtime", "cuda_driver")]
    first = min(calls, key=lambda one: one["ts"])
    edge = {**first, "dur": 0.5, "args": {"cbid": 1, "correlation": 10**8}}
    events += [
        edge | {"name": "cudaStreamBeginCapture", "ts": start},
        edge | {"name": "cudaStreamEndCapture", "ts": end},
    ]
    if size is not None:
        around = {**last, "name": f"capture_{size}_FULL", "ts": start - 1, "dur": last["dur"] + 2}
        events.append(around)
    if modules:
        ops = [one for one in events if one.get("cat") == "cpu_op" and one["ph"] == "X"]
        reached, number = 0, 0
        for op in sorted(ops, key=lambda one: one["ts"]):
            if op["ts"] >= reached:
                frame = {"name": f"nn.Module: Block_{number}", "cat": "python_function", "args": {}}
                events.append({**op, **frame})
                reached, number = op["ts"] + op["dur"], number + 1
    for one in events:
        dims = one.get("args", {}).get(WIDTH)
        if dims and shapes != 1:
            one["args"][WIDTH] = [
                [dim[0] * shapes, *dim[1:]] if dim and isinstance(dim[0], int) else dim for dim in dims
            ]
    document["traceEvents"] = events
    target.write_text(json.dumps(document))
    return target


def test_a_capture_without_gpu_work_names_ops_and_modules(tmp_path):
    graph, eager = (CHANGES / "vit" / f"{name}.json.gz" for name in ("graph", "eager"))
    capture = as_capture(eager, tmp_path / "capture.json.gz.json", modules=True)
    trace = read_with_captures(graph, [capture])
    step = trace.steps[-1]
    expected = read_with_captures(graph, [eager]).steps[-1]
    assert [one.asked.parent.name for one in step.work] == [one.asked.parent.name for one in expected.work]
    found, _ = by_module(trace, step)
    assert sum(one.pieces for one in found) == len(step.work)
    assert "no module" not in {one.name for one in found} and len(found) > 20
    assert by_module(read(graph), step=read(graph).steps[-1]) == ((), ())


VLLM = ("graph_capture_rank_0_{}.json", True, "execute_5_context_0(sq0sk0sqsq0sqsk0)_generation_5(sq5sk5sqsq5sqsk5)")
OLDER_VLLM = (*VLLM[:2], "execute_context_1(3)_generation_2(2)")
SGLANG = ("DecodeCudaGraphRunner_bs_{}_rank0.json", False, "step[DECODE bs=5 g_sqsq=5]")


@pytest.mark.parametrize(
    ("file", "in_annotation", "executed"),
    [VLLM, *(pytest.param(*one, marks=pytest.mark.exhaustive) for one in (OLDER_VLLM, SGLANG))],
)
def test_the_next_larger_captured_size_is_the_one_that_ran(file, in_annotation, executed, tmp_path):
    """The names of the capture and of the run give the size. Without it, captures of different shapes are not tied."""
    eager = CHANGES / "decode/eager.json.gz"
    folder = tmp_path / "capture_traces"
    folder.mkdir()
    for size in (1, 8, 16):
        as_capture(eager, folder / file.format(size), size=size if in_annotation else None, shapes=size)
    (folder / "execution_details.json").write_text("[]")
    document = json.loads(gzip.decompress((CHANGES / "decode/graph.json.gz").read_bytes()))
    plain = tmp_path / "plain.json"
    plain.write_text(json.dumps(document))
    trace = read_with_captures(plain, [folder])
    assert not any(one.recorded for one in trace.work)
    (told,) = (one for one in warnings.of(summarize(trace)) if "capture" in one)
    assert told == (
        f"3 CUDA graph launches fit several captures in {folder}, which differ in ops, shapes or modules; "
        "none of them is used"
    )
    launches = [one for one in document["traceEvents"] if one["name"] == "cudaGraphLaunch" and one["ph"] == "X"]
    for launch in launches:
        around = {"ts": launch["ts"] - 0.5, "dur": launch["dur"] + 1, "cat": "user_annotation", "name": executed}
        document["traceEvents"].append({**launch, **around, "args": {}})
    (tmp_path / "named.json").write_text(json.dumps(document))
    trace = read_with_captures(tmp_path / "named.json", [folder])
    graphs = [one for one in trace.work if one.from_graph]
    assert graphs and {one.recorded.trace.path.name for one in graphs} == {file.format(8)}


def graph_launched(at, correlation, *kernels):
    """Return a graph's launch, and its kernels as (name, stream, start, duration, arguments)."""
    yield event("cudaGraphLaunch", "cuda_runtime", at, 5, correlation=correlation)
    for name, stream, start, dur, args in kernels:
        tied = {"correlation": correlation, "device": 0, "stream": stream, **args}
        yield {**event(name, "kernel", start, dur, stream), "pid": 0, "args": tied}


def write(path, *events):
    path.write_text(json.dumps({"traceEvents": events}))
    return path


def test_a_model_captured_in_pieces_is_tied_piece_by_piece(tmp_path):
    """All parts launch the same kernels. The order of the captures is that of the replays in a step."""
    captured = []
    for place, module in enumerate(("Layer_0", "Layer_1")):
        at = 100 * place
        captured += [
            event("cudaStreamBeginCapture", "cuda_runtime", at, 1, correlation=at + 1),
            event(f"nn.Module: {module}", "python_function", at + 10, 50),
            event("aten::mm", "cpu_op", at + 20, 30),
            event("cudaLaunchKernel", "cuda_runtime", at + 30, 5, correlation=at + 2),
            event("cudaStreamEndCapture", "cuda_runtime", at + 80, 1, correlation=at + 3),
        ]
    capture = write(tmp_path / "capture.json", *captured)
    replayed = []
    for step in range(2):
        at = 1000 * step
        replayed += [
            event(f"ProfilerStep#{step}", "user_annotation", at, 900),
            event("aten::copy_", "cpu_op", at + 1, 2),
        ]
        for place in range(2):
            kernel = ("gemm", 7, at + 100 * place + 20, 40, {})
            replayed += graph_launched(at + 100 * place + 10, 10 * step + place + 1, kernel)
    trace = read_with_captures(write(tmp_path / "graph.json", *replayed), [capture])
    for step in trace.steps:
        assert [(one.name, one.pieces) for one in by_module(trace, step)[0]] == [("Layer_0", 1), ("Layer_1", 1)]


STRANGE = (None, True, -1, 2**70, 1e300, "x", "", [], {}, [1], {"a": None})


@pytest.mark.parametrize("strange", STRANGE, ids=repr)
def test_strange_values_in_new_fields_leave_the_rest_readable(strange, tmp_path):
    """Files come from anywhere."""
    args = {"graph id": strange, "graph node id": strange, "original_stream": strange, "annotation": strange}
    events = [event("ProfilerStep#0", "user_annotation", 0, 900), event("aten::mm", "cpu_op", 1, 2)]
    events += graph_launched(10, 1, ("A", 7, 20, 100, args), ("B", 7, 130, 100, {**args, "name": strange}))
    on_gpu = {"ph": "X", "pid": 0, "tid": 7, "ts": 20, "dur": 1}
    sync = {name: strange for name in ("cuda_sync_kind", "stream", "device", "wait_on_stream", "correlation")}
    events += [
        on_gpu | {"cat": "graph_host_node", "name": "HostNode", "args": {**args, "correlation": strange}},
        on_gpu | {"cat": "cuda_sync", "name": "Stream Sync", "args": sync},
        on_gpu | {"cat": "cuda_sync", "name": "Stream Sync", "args": {**sync, "correlation": 1, "stream": 7}},
        on_gpu | {"cat": "gpu_memcpy", "name": "Memcpy", "args": {"copy kind": strange, "src kind": strange}},
        on_gpu | {"cat": "gpu_memset", "name": "Memset", "args": {"memory kind": strange}},
        {"ph": "C", "name": "SM Clock (MHz)", "pid": "GPU 0 Counters", "ts": 5, "args": {"": strange}},
        {"ph": "C", "name": "SM Clock (MHz)", "pid": "GPU 0 Counters", "ts": 6, "args": strange},
        {"ph": "C", "name": "Power (W)", "pid": strange, "ts": 5, "args": {"": 1}},
        {"ph": "C", "name": "Power (W)", "pid": 0, "ts": strange, "args": {"": 1}},
        {"ph": "s", "cat": "ac2g", "id": 1 << 40, "pid": 0, "tid": 7, "ts": 120},
        {"ph": "f", "cat": "ac2g", "id": 1 << 41, "pid": strange, "tid": strange, "ts": strange},
    ]
    path = write(tmp_path / "strange.json", *events)
    assert cli.main([str(path), "--all"]) == 0
    trace = read(path)
    assert [one.name for one in trace.work][:1] == ["A"]
    graph_of(trace)


def test_a_replay_of_another_length_or_of_several_streams_is_not_tied(tmp_path):
    graph, eager = (CHANGES / "vit" / f"{name}.json.gz" for name in ("graph", "eager"))
    capture = as_capture(eager, tmp_path / "capture.json")
    document = json.loads(gzip.decompress(graph.read_bytes()))
    kernels = [one for one in document["traceEvents"] if one.get("cat") == "kernel"]
    for kernel in kernels[::7]:
        kernel["tid"] = 99
    (tmp_path / "streams.json").write_text(json.dumps(document))
    assert not any(one.recorded for one in read_with_captures(tmp_path / "streams.json", [capture]).work)
    for number, kernel in enumerate(sorted(kernels, key=lambda one: one["ts"])):
        kernel["args"] |= {"graph id": 3, "graph node id": number + 1}
    for number, copy in enumerate(one for one in document["traceEvents"] if one.get("cat") in GPU[1:3]):
        copy["args"] |= {"graph id": 3, "graph node id": 10**6 + number}
    (tmp_path / "numbered.json").write_text(json.dumps(document))
    numbered = read_with_captures(tmp_path / "numbered.json", [eager])
    assert not any(one.recorded for one in numbered.work), "numbers that put the memsets last do not fit"
    other = as_capture(CHANGES / "decode/eager.json.gz", tmp_path / "other.json")
    assert not any(one.recorded for one in read_with_captures(graph, [other]).work)


def test_nodes_are_ordered_by_their_numbers_whatever_stream_runs_them(tmp_path):
    graph, eager = (CHANGES / "vit" / f"{name}.json.gz" for name in ("graph", "eager"))
    document = json.loads(gzip.decompress(graph.read_bytes()))
    by_launch = {}
    for one in sorted((one for one in document["traceEvents"] if one.get("cat") in GPU[:3]), key=lambda one: one["ts"]):
        by_launch.setdefault(one["args"]["correlation"], []).append(one)
    for replay in by_launch.values():
        for number, one in enumerate(replay, 1):
            one["args"] |= {"graph id": 3, "graph node id": 3 << 32 | number}
            one["tid"] = 7 + number % 3
    (tmp_path / "streams.json").write_text(json.dumps(document))
    trace = read_with_captures(tmp_path / "streams.json", [as_capture(eager, tmp_path / "capture.json")])
    expected = read_with_captures(graph, [eager])
    asked = [[one.asked.parent.name for one in each.steps[-1].work] for each in (trace, expected)]
    assert asked[0] == asked[1]


def test_capture_and_replay_in_one_file(tmp_path):
    """A run that is recorded from its first call contains both."""
    graph, eager = (CHANGES / "vit" / f"{name}.json.gz" for name in ("graph", "eager"))
    document = json.loads(gzip.decompress(graph.read_bytes()))
    captured = json.loads(as_capture(eager, tmp_path / "capture.json").read_text())["traceEvents"]
    begin = min(one["ts"] for one in document["traceEvents"] if one["ph"] == "X")
    shift = max(one["ts"] + one.get("dur", 0) for one in captured if one["ph"] == "X") - begin + 1000
    (one,) = {(call["pid"], call["tid"]) for call in document["traceEvents"] if call.get("cat") == "cuda_runtime"}
    for call in captured:
        call["ts"] -= round(shift)
        call["pid"], call["tid"] = one
        if call.get("args", {}).get("correlation"):
            call["args"]["correlation"] += 10**7
    document["traceEvents"] += [call for call in captured if call["ph"] == "X"]
    (tmp_path / "both.json").write_text(json.dumps(document))
    trace = read_with_captures(tmp_path / "both.json")
    graphs = [one for one in trace.work if one.from_graph]
    assert graphs and not [one.name for one in graphs if one.recorded is None]
    assert {one.recorded.trace.path for one in graphs} == {tmp_path / "both.json"}


def test_capture_from_the_command_line(capsys, tmp_path):
    graph, eager = (str(CHANGES / "decode" / f"{name}.json.gz") for name in ("graph", "eager"))
    assert cli.main([graph, "--capture", eager, "--only", "kernels"]) in (0, None)
    assert "aten::addmm" in capsys.readouterr().out
    assert cli.main([graph, "--only", "kernels"]) in (0, None)
    assert "aten::addmm" not in capsys.readouterr().out
    assert cli.main([eager, "--capture", eager]) in (0, None)
    assert "no step launches a CUDA graph, so the captures" in " ".join(capsys.readouterr().out.split())
    empty, broken = tmp_path / "empty", tmp_path / "broken.json"
    empty.mkdir()
    broken.write_text("{")
    missing = tmp_path / "missing.json"
    for trace, bad in ((graph, empty), (graph, broken), (graph, missing), (eager, missing)):
        assert cli.main([trace, "--capture", str(bad)]) == 2
        told = capsys.readouterr()
        assert not told.out and len(told.err.splitlines()) == 1 and bad.name in told.err
    for more in ([eager], ["--against", "h200"], ["--ranks"]):
        assert cli.main([graph, *more, "--capture", eager]) == 2
        assert "--capture takes one trace" in capsys.readouterr().err
    with pytest.raises(TraceError):
        read_with_captures(CHANGES / "decode/graph.json.gz", [empty])


def recorded(name):
    return json.loads(gzip.decompress((H100 / f"{name}.json.gz").read_bytes()))["traceEvents"]


def launched_ops(events):
    """The name of each GPU activity of the last step and of the innermost op around its launch, by the launches."""
    steps = [one for one in events if one["name"].startswith("ProfilerStep#") and one["cat"] == "user_annotation"]
    last = max(steps, key=lambda one: one["ts"])
    ops = [one for one in events if one.get("cat") == "cpu_op"]
    found = []
    calls = [one for one in events if one.get("cat") in ("cuda_runtime", "cuda_driver")]
    work = {one["args"]["correlation"]: one for one in events if one.get("cat") in GPU[:3]}
    for call in sorted(calls, key=lambda one: one["ts"]):
        if call["args"]["correlation"] in work and last["ts"] <= call["ts"] < last["ts"] + last["dur"]:
            around = [one for one in ops if one["ts"] <= call["ts"] < one["ts"] + one["dur"]]
            found.append((work[call["args"]["correlation"]], max(around, key=lambda one: one["ts"])["name"]))
    return found


@pytest.mark.parametrize("capture", ["eager", "capture_with_stack"])
def test_a_capture_recorded_on_a_gpu_names_the_ops_of_its_replays(capture):
    expected = launched_ops(recorded("eager"))
    assert len(expected) == 44
    trace = read_with_captures(H100 / "replays.json.gz", [H100 / f"{capture}.json.gz"])
    for step in trace.steps:
        seen = sorted(step.work, key=lambda one: one.start)
        assert [one.asked.parent.name for one in seen] == [op for _, op in expected]
        for one, (work, _) in zip(seen, expected, strict=True):
            assert one.name == work["name"] or (one.kind == "memset" and work["cat"] == "gpu_memset")
    assert not trace.untied and not [told for told in warnings.of(summarize(trace)) if "capture" in told]


def test_ops_on_lists_of_tensors_are_not_the_models_in_a_replay_either(tmp_path):
    """The ops of a graph belong to its capture's trace."""
    capture = H100 / "capture_with_stack.json.gz"

    def on_lists(events):
        for one in events:
            if one.get("name") in ("aten::add", "aten::gelu"):
                one["name"] = "aten::_foreach_add_"

    of_lists = edited(capture, tmp_path, on_lists)
    for given, proposed in ((capture, ["fuse_pointwise"]), (of_lists, [])):
        trace = read_with_captures(H100 / "replays.json.gz", [given])
        assert [one.change for one in opportunities(trace, summarize(trace))] == proposed


def test_a_capture_with_stacks_names_the_modules_of_its_replays():
    trace = read_with_captures(H100 / "replays.json.gz", [H100 / "capture_with_stack.json.gz"])
    _, by_class = by_module(trace, trace.steps[-1])
    # Each of the four blocks has two layer norms, four linear layers of one kernel, and five activities of its own.
    named = ["16 x Linear in Block", "4 x Block in Sequential", "8 x LayerNorm in Block"]
    assert sorted((one.name, one.pieces) for one in by_class) == list(zip(named, (16, 20, 8), strict=True))


def test_a_recording_of_capture_and_replays_needs_no_other_file():
    trace = read_with_captures(H100 / "capture_and_replays.json.gz")
    replayed = [one for one in trace.work if one.from_graph]
    assert len(replayed) == 3 * 44
    expected = [op for _, op in launched_ops(recorded("eager"))]
    assert [one.asked.parent.name for one in sorted(replayed, key=lambda one: one.start)] == 3 * expected


@pytest.mark.parametrize(
    ("replays", "capture", "reason", "said"),
    [
        ("replays", "captures", "captures_differ", "fit several captures in"),
        ("replays", "syncs", "no_capture_fits", "fit no capture in"),
        ("replays_two_streams", "capture_two_streams", "no_order", "run on several streams, and the trace does not"),
    ],
)
def test_the_reason_why_no_capture_is_used_is_said(replays, capture, reason, said):
    trace = read_with_captures(H100 / f"{replays}.json.gz", [H100 / f"{capture}.json.gz"])
    assert trace.untied == {reason: 4} and not any(one.recorded for one in trace.work)
    (told,) = (one for one in warnings.of(summarize(trace)) if "CUDA graph launches" in one)
    assert told.startswith(f"4 CUDA graph launches {said}")
