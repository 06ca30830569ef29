"""Kernels of a replayed CUDA graph take op, shapes and module from the graph's capture."""

import gzip
import json

import pytest
from references import H200

from tracereader import cli
from tracereader.figures import summarize
from tracereader.figures.places import by_module
from tracereader.trace import TraceError, read
from tracereader.trace.capture import read_with_captures

CHANGES = H200 / "changes"
PAIRS = [("vit", "eager"), ("decode", "eager"), ("lstm", "cells"), ("images", "eager")]
GPU = ("kernel", "gpu_memcpy", "gpu_memset", "gpu_user_annotation", "ac2g")
WIDTH = "Input Dims"


@pytest.mark.parametrize(("name", "without"), PAIRS)
def test_a_trace_of_the_step_without_the_graph_names_the_ops_of_the_replay(name, without):
    """By the order of the launches. The recorded kernels say whether that is right: both traces name them."""
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
    assert not [told for told in summarize(trace).source.warnings if "capture" in told]


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
    found = by_module(trace, step)
    assert sum(one.pieces for one in found) == len(step.work)
    assert "no module" not in {one.name for one in found} and len(found) > 20
    assert by_module(read(graph), step=read(graph).steps[-1]) == ()


def test_of_several_captured_sizes_the_next_larger_one_ran(tmp_path):
    """As vLLM names the capture and the run. Without that, captures of different shapes are not told apart."""
    eager = CHANGES / "decode/eager.json.gz"
    folder = tmp_path / "capture_traces"
    folder.mkdir()
    for size in (1, 8, 16):
        as_capture(eager, folder / f"graph_capture_rank_0_{size}.json", size=size, shapes=size)
    (folder / "execution_details.json").write_text("[]")
    document = json.loads(gzip.decompress((CHANGES / "decode/graph.json.gz").read_bytes()))
    plain = tmp_path / "plain.json"
    plain.write_text(json.dumps(document))
    trace = read_with_captures(plain, [folder])
    assert not any(one.recorded for one in trace.work)
    (told,) = (one for one in summarize(trace).source.warnings if "capture" in one)
    assert told == f"3 of 3 CUDA graph launches fit no capture in {folder}, or several that differ"
    launches = [one for one in document["traceEvents"] if one["name"] == "cudaGraphLaunch" and one["ph"] == "X"]
    for launch in launches:
        name = "execute_5_context_0(sq0sk0sqsq0sqsk0)_generation_5(sq5sk5sqsq5sqsk5)"
        around = {"ts": launch["ts"] - 0.5, "dur": launch["dur"] + 1, "cat": "user_annotation", "name": name}
        document["traceEvents"].append({**launch, **around, "args": {}})
    (tmp_path / "named.json").write_text(json.dumps(document))
    trace = read_with_captures(tmp_path / "named.json", [folder])
    graphs = [one for one in trace.work if one.from_graph]
    assert graphs and {one.recorded.trace.path.name for one in graphs} == {"graph_capture_rank_0_8.json"}


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
    """A run that is recorded from its first call on holds both."""
    graph, eager = (CHANGES / "vit" / f"{name}.json.gz" for name in ("graph", "eager"))
    document = json.loads(gzip.decompress(graph.read_bytes()))
    captured = json.loads(as_capture(eager, tmp_path / "capture.json").read_text())["traceEvents"]
    begin = min(one["ts"] for one in document["traceEvents"] if one["ph"] == "X")
    shift = max(one["ts"] + one.get("dur", 0) for one in captured if one["ph"] == "X") - begin + 1000
    (one,) = {(event["pid"], event["tid"]) for event in document["traceEvents"] if event.get("cat") == "cuda_runtime"}
    for event in captured:
        event["ts"] -= round(shift)
        event["pid"], event["tid"] = one
        if event.get("args", {}).get("correlation"):
            event["args"]["correlation"] += 10**7
    document["traceEvents"] += [event for event in captured if event["ph"] == "X"]
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
    for bad in (empty, broken, tmp_path / "missing.json"):
        assert cli.main([graph, "--capture", str(bad)]) == 2
        told = capsys.readouterr()
        assert not told.out and len(told.err.splitlines()) == 1 and bad.name in told.err
    for more in ([eager], ["--against", "h200"], ["--ranks"]):
        assert cli.main([graph, *more, "--capture", eager]) == 2
        assert "--capture takes one trace" in capsys.readouterr().err
    with pytest.raises(TraceError):
        read_with_captures(CHANGES / "decode/graph.json.gz", [empty])
