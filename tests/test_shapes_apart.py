"""Shapes that record-trace records in other steps than those whose times it keeps."""

import gzip
import json

import pytest

from tracereader.run import flow, shapes


def trace_of(steps, dur, dims=None, threads=(1,)):
    """Return a trace: steps has the ops of each; dims the shape of each step's ops, if they are recorded."""
    events, ts = [], 100.0
    for number, names in enumerate(steps):
        length = dur + number
        events.append(event(f"ProfilerStep#{number}", "user_annotation", ts, length, threads[0]))
        events.append(event(f"ProfilerStep#{number}", "gpu_user_annotation", ts, length, 7))
        for place, name in enumerate(names):
            one = event(name, "cpu_op", ts + place, 1, threads[place % len(threads)])
            if dims is not None:
                one["args"] |= {"Input Dims": [[dims[number], place]], "Input type": ["float"], "Ev Idx": 5}
            events.append(one)
        ts += length + 1
    events.append(event("aten::outside", "cpu_op", ts + 5, 1, threads[0]))
    return {"unprofiled_step_us": 9.0, **({"record_shapes": 1} if dims else {}), "traceEvents": events}


def event(name, cat, ts, dur, tid):
    return {"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": tid, "ts": ts, "dur": dur, "args": {"External id": 1}}


ADDS = ["aten::linear", "aten::addmm"]


@pytest.mark.parametrize("name", ["a.json", "a.json.gz"])
@pytest.mark.parametrize("threads", [(1,), (4, 2)])
def test_the_shapes_of_equal_steps_are_given_to_the_recording_without_them(name, threads, tmp_path):
    trace = write(tmp_path / name, trace_of([ADDS, ["aten::relu"], ADDS], 10, threads=threads))
    other = tmp_path / "b.gz"
    write(other, trace_of([["aten::relu"], ADDS, ADDS], 30, (8, 3, 3), threads) | {"unprofiled_step_us": 1.0})
    flow.put_together([{"trace": str(trace), "with_shapes": str(other)}, {"trace": None, "with_shapes": None}])
    found = content(trace)
    assert (found["unprofiled_step_us"], found["record_shapes"]) == (9.0, 1)
    ops = [one for one in found["traceEvents"] if one["cat"] == "cpu_op"]
    assert [one["args"].get("Input Dims") for one in ops] == [[[3, 0]], [[3, 1]], [[8, 0]], [[3, 0]], [[3, 1]], None]
    assert all("Ev Idx" not in one["args"] for one in ops)
    assert [one["dur"] for one in found["traceEvents"] if one["cat"] == "user_annotation"] == [10, 11, 12]
    assert [path.name for path in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize(
    ("steps", "dur", "dims"),
    [
        ([ADDS, ADDS], 30, (3, 4)),  # batches of different lengths
        ([ADDS, [*ADDS, "aten::mul"]], 30, (3, 3)),  # a step whose ops the other recording does not have
        ([ADDS, ADDS], 10.5, (3, 3)),  # shapes made no step longer
    ],
)
def test_the_recording_with_shapes_is_kept_if_they_fit_no_other_steps_or_cost_nothing(steps, dur, dims, tmp_path):
    trace, other = write(tmp_path / "a.json", trace_of(steps, 10)), trace_of([ADDS, ADDS], dur, dims)
    shapes.put_into(trace, write(tmp_path / "b.gz", other))
    assert content(trace) == other


def write(path, trace):
    text = json.dumps(trace).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return path


def content(path):
    return json.loads(gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_text())
