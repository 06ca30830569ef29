"""The time before a GPU activity, and its variation over the steps, recomputed from the raw events."""

import gzip
import itertools
import json
import random
from collections import Counter
from statistics import fmean, median

import pytest
from raw_events import end, event
from references import H200, OTHERS, REFERENCES

from tracereader import cli
from tracereader.figures.gpu_time import cut_up
from tracereader.figures.series import series
from tracereader.figures.starts import starts
from tracereader.show.series import ASCII_BARS, BARS, spark
from tracereader.trace import read

GPU = ("kernel", "gpu_memcpy", "gpu_memset")
LONG = H200 / "01_matmul_add/4096_bf16_cold_eager_wait0_schedwarmup0_active20.json.gz"
TRACES = [*REFERENCES[::4], *OTHERS[::2], LONG]


def raw_of(path):
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    return [event for event in events if event.get("ph") == "X"]


def about(value):
    return pytest.approx(value, abs=0.02)


def overlap(start, end, *others):
    """Return the µs of a window that at least one slice covers, counted between neighbouring edges."""
    edges = sorted({start, end, *(min(max(edge, start), end) for other in others for edge in other)})
    pairs = itertools.pairwise(edges)
    return sum(b - a for a, b in pairs if any(left <= a and b <= right for left, right in others))


@pytest.mark.parametrize("path", TRACES, ids=lambda path: f"{path.parents[1].name}/{path.stem}")
def test_a_wait_and_its_parts(path):
    trace, raw = read(path), raw_of(path)
    work = sorted((e for e in raw if e.get("cat") in GPU), key=lambda e: e["ts"])
    calls = {e["args"]["correlation"]: e for e in raw if e.get("cat") in ("cuda_runtime", "cuda_driver")}
    own = [(e["ts"], e["ts"] + e["dur"], e["name"]) for e in raw if e.get("cat") == "overhead"]
    step = trace.steps[0]
    found = starts(trace, step)
    assert [one.name for one in found] == [one.name for one in step.work]
    for one, ours in zip(found[:30], step.work, strict=False):
        correlation = ours.args["correlation"]
        event = next(e for e in work if e["args"]["correlation"] == correlation and e["name"] == ours.name)
        earlier = [e for e in work if e["ts"] < event["ts"] and e["args"]["device"] == event["args"]["device"]]
        if earlier:
            assert one.gap_us == about(max(0, event["ts"] - max(e["ts"] + e["dur"] for e in earlier)))
        else:
            assert one.gap_us is None
        if correlation not in calls:
            assert one.wait_us is None
            continue
        start = calls[correlation]["ts"]
        assert one.wait_us == about(event["ts"] - start)
        parts = [*one.own_us.values(), one.queue_us, one.call_us, one.way_us]
        assert sum(parts) == about(one.wait_us) and min(parts) >= 0
        slices = [(left, right) for left, right, _ in own]
        assert sum(one.own_us.values()) == about(overlap(start, event["ts"], *slices))
        stream = [
            (e["ts"], e["ts"] + e["dur"]) for e in earlier if e["args"]["stream"] == event["args"]["stream"]
        ]  # fmt: skip
        if not own and stream:
            assert one.queue_us == about(max(0, min(max(right for _, right in stream), event["ts"]) - start))


@pytest.mark.parametrize("seed", range(20))
def test_a_wait_is_cut_up_moment_by_moment(tmp_path, seed):
    """If slices of the profiler overlap, a moment counts once, for the earlier one."""
    lot = random.Random(seed)
    own = [event(lot.choice("abc"), "overhead", lot.randrange(100), lot.randrange(40), 9) for _ in range(8)]
    calls = [event("cudaLaunchKernel", "cuda_runtime", 10 * k, 9, correlation=k) for k in range(6)]
    work = [
        event("k", "kernel", 10 * k + lot.randrange(5, 60), lot.randrange(1, 30), 7, correlation=k, device=0, stream=7)
        for k in range(6)
    ]
    (tmp_path / "a.json").write_text(json.dumps({"traceEvents": [*own, *calls, *work]}))
    trace = read(tmp_path / "a.json")
    own.sort(key=lambda e: (e["ts"], -e["dur"]))
    (step,) = trace.steps
    free = 0
    for found, one in zip(starts(trace, step), step.work, strict=True):
        correlation = one.args["correlation"]
        call, piece = calls[correlation], work[correlation]
        spent = Counter()
        for moment in range(call["ts"], piece["ts"]):
            whose = next((e["name"] for e in own if e["ts"] <= moment < end(e)), None)
            spent[whose or ("queue" if moment < free else "call" if moment < end(call) else "way")] += 1
        assert found.own_us == {name: spent[name] for name in "abc" if spent[name]}
        assert (found.queue_us, found.call_us, found.way_us) == (spent["queue"], spent["call"], spent["way"])
        free = max(free, end(piece))


def nested(lot, left, right, depth=4):
    """Yield slices that nest in a stretch of time, some of which begin or end with the slice around them."""
    while depth and left < right:
        start = left + lot.randrange(3)
        stop = min(right, start + lot.randrange(1, 20))
        if start < stop:
            cat = lot.choice(("cpu_op", "cpu_op", "user_annotation"))
            yield event(lot.choice("abcd"), cat, start, stop - start)
            yield from nested(lot, start, stop, depth - 1)
        left = stop


@pytest.mark.parametrize("seed", range(20))
def test_each_moment_of_several_gaps_is_the_innermost_ops(tmp_path, seed):
    lot = random.Random(seed)
    slices = list(nested(lot, 5, 95))
    (tmp_path / "a.json").write_text(json.dumps({"traceEvents": slices}))
    trace = read(tmp_path / "a.json")
    edges = sorted(lot.sample(range(100), 12))
    gaps = list(zip(edges[::2], edges[1::2], strict=True))
    idle, between = Counter(), []
    zero = slices[0]["ts"]
    in_ns = [(1000 * (left - zero), 1000 * (right - zero)) for left, right in gaps]
    cut_up(trace.steps[0].roots, in_ns, idle, "outside", between)
    expected, outside = Counter(), []
    for left, right in gaps:
        for moment in range(left, right):
            # The slices are in the order in which they nest. An annotation counts for the op around it.
            ops = [e["name"] for e in slices if e["ts"] <= moment < end(e) and e["cat"] == "cpu_op"]
            expected[ops[-1] if ops else "outside"] += 1
            outside += [] if ops else [moment]
    assert {name: ns / 1000 for name, ns in idle.items() if ns} == dict(expected)
    stretches = [(left // 1000 + zero, right // 1000 + zero) for left, right in between]
    assert [moment for left, right in stretches for moment in range(left, right)] == outside


@pytest.mark.parametrize("path", TRACES, ids=lambda path: f"{path.parents[1].name}/{path.stem}")
def test_a_series(path):
    trace, raw = read(path), raw_of(path)
    step = trace.steps[len(trace.steps) // 2]
    found = series(trace, step)
    if not any(one.work for one in trace.steps):
        assert not any(one.on_gpu for one in found)
        return
    assert {(one.name, one.nth) for one in found} >= {(one.name, 0) for one in step.work}
    durations = {(e["name"], e["args"]["correlation"]): e["dur"] for e in raw if e.get("cat") in GPU}
    for one in found:
        expected = []
        for other in trace.steps:
            same = [work for work in other.work if work.name == one.name]
            if len(same) > one.nth:
                expected.append(durations[one.name, same[one.nth].args["correlation"]])
        assert one.us == about(expected)
        assert (one.median_us, one.mean_us) == (about(median(expected)), about(fmean(expected)))
        if len(expected) >= 8:
            quarter = len(expected) // 4
            assert one.ramp == pytest.approx(median(expected[-quarter:]) / median(expected[:quarter]), rel=1e-3)
        else:
            assert one.ramp is None


def test_a_line_of_bars():
    assert spark([10, 10, 10]) == BARS[0] * 3
    assert spark([10, 20]) == BARS[0] + BARS[-1]
    assert spark([100, 101], True) == ASCII_BARS[0] + ASCII_BARS[1], "a hundredth is not the whole height"
    assert len(spark(range(1, 1000))) <= 20


def test_the_gap_before_the_first_add_is_spent_in_the_op(capsys):
    """Figure 10, on the H200: the gap is not a buffer of the profiler, but aten::add's work in its first call."""
    trace = H200 / "01_matmul_add/64_bf16_cold_eager_wait0_schedwarmup0.json.gz"
    assert cli.main([str(trace), "--only", "starts", "--step", "0"]) == 0
    assert "the launching thread was in aten::add 8,1" in " ".join(capsys.readouterr().out.split())
