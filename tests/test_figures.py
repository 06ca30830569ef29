"""Every figure of the report is compared with one computed here from the raw events, on every real trace."""

import gzip
import itertools
import json
import re
from collections import Counter, defaultdict
from math import inf, prod
from statistics import mean, median

import msgspec
import pytest
import raw_events
import references
from raw_events import GPU, end, raw_steps, raw_work
from references import H200, OTHERS, REFERENCES, ROOT

from tracereader import cli, expect
from tracereader.figures import summarize
from tracereader.figures.convolution import convolution
from tracereader.figures.gpu_time import parts_by_device
from tracereader.figures.occupancy import occupancy
from tracereader.figures.steps import outermost_named
from tracereader.findings import steps
from tracereader.show.predictions import predictions_of
from tracereader.trace import Op, Work, families, outermost, read
from tracereader.trace.intervals import Lengths, length_between
from tracereader.trace.labels import is_phase
from tracereader.trace.types import Inputs
from tracereader.two_runs import compare, sentences


@pytest.fixture(scope="module", params=REFERENCES, ids=lambda path: f"{path.parents[1].name}/{path.stem}")
def both(request):
    """Return one trace's Summary, and its raw complete events."""
    raw = json.loads(gzip.decompress(request.param.read_bytes()))["traceEvents"]
    return references.measured(request.param), [event for event in raw if event.get("ph") == "X"]


@pytest.fixture(
    scope="module", params=[*REFERENCES[::3], *OTHERS], ids=lambda path: f"{path.parents[1].name}/{path.stem}"
)
def any_trace(request):
    raw = json.loads(gzip.decompress(request.param.read_bytes()))["traceEvents"]
    return references.measured(request.param), [event for event in raw if event.get("ph") == "X"]


def covered(spans):
    """Return the length of a union, counted between neighbouring edges."""
    change = Counter()
    for start, stop in spans:
        change[start] += 1
        change[stop] -= 1
    edges = sorted(change)
    inside = itertools.accumulate(change[edge] for edge in edges)
    return sum(right - left for (left, right), depth in zip(itertools.pairwise(edges), inside, strict=False) if depth)


@pytest.mark.parametrize("path", [*REFERENCES[::9], *OTHERS[::3]], ids=lambda path: path.stem)
def test_ops_of_a_name_keep_their_order(path):
    for step in read(path).steps:
        for wanted in (lambda name: name.startswith("aten::"), "aten::mm".__eq__, lambda name: False):
            assert step.named(wanted) == [op for op in step.walk() if wanted(op.name)]


@pytest.mark.parametrize("path", [*REFERENCES[::9], *OTHERS[::3]], ids=lambda path: path.stem)
def test_calls_of_a_name_that_lie_in_no_other_one(path):
    for step in read(path).steps:
        for part in ("aten::", "aten::_", "cuda", "Autograd", "a"):
            found = outermost_named(step, lambda name, part=part: part in name)
            assert found == list(outermost(step.roots, lambda op, part=part: part in op.name))


def test_the_parts_of_a_window_of_overlapping_activities():
    """Each nanosecond is decided on its own, for all arrangements of three short activities."""
    kinds = ("kernel", "elementwise_kernel"), ("kernel", "ncclDevKernel_AllReduce"), ("memcpy", "Memcpy DtoH")
    begin, end = 1, 6
    for number, spans in enumerate(itertools.product(itertools.product(range(8), range(4)), repeat=3)):
        if number % 7 or list(spans) != sorted(spans, key=lambda span: span[0]):
            continue
        work = []
        for place, (start, dur) in enumerate(spans):
            kind, name = kinds[(place + number) % 3]
            one = Work(name, kind, start, dur, (0, 7), msgspec.Raw(b"{}"))
            if (place + number) % 4:  # else the launch is not recorded
                one.launch = Op("cudaLaunchKernel", "runtime", max(0, start - 3), number % 3, (1, 1), msgspec.Raw())
                one.launch.work = (one,)
            work.append(one)
        expected = {name: set() for name in PARTS}
        inside = [one for one in work if one.start < end and one.start + one.dur > begin]
        for ns in range(begin, end) if inside else ():
            running = {families.says(one).family for one in inside if one.start <= ns < one.start + one.dur}
            following = next((one for one in work if one.start > ns and (one in inside or one.start >= end)), None)
            if running:
                name = "communication" if "communication" in running else "copy"
                expected["compute" if "pointwise" in running else f"exposed_{name}"].add(ns)
            elif following is not None and following.launch is None:
                expected["unknown"].add(ns)
            else:
                launched = following is not None and ns >= following.launch.start + following.launch.dur
                expected["launched" if launched else "not_launched"].add(ns)
        for parts in parts_by_device(work, begin, end):
            found = {name: {ns for left, right in getattr(parts, name) for ns in range(left, right)} for name in PARTS}
            assert found == expected, spans
        assert bool(inside) == bool(parts_by_device(work, begin, end))


PARTS = ("compute", "exposed_communication", "exposed_copy", "not_launched", "launched", "unknown")


def test_the_length_between_two_times_is_the_same_both_ways():
    intervals = [(0, 2), (5, 6), (6, 9), (20, 30)]
    for start, stop in itertools.combinations_with_replacement(range(-1, 33), 2):
        expected = sum(left <= time < right for time in range(start, stop) for left, right in intervals)
        assert length_between(intervals, start, stop) == Lengths(intervals).between(start, stop) == expected


def about(value):
    # Raw stamps are doubles of 4e12 µs: a few tenths of a nanosecond are lost in each sum.
    return pytest.approx(value, abs=0.02)


def runtime(events):
    return [e for e in events if e.get("cat") in ("cuda_runtime", "cuda_driver")]


def test_steps(both):
    ours, events = both
    marks = raw_steps(events)
    assert [one.name for one in ours.steps] == [mark["name"] for mark in marks]
    all_work = [(e["ts"], end(e)) for e in events if e.get("cat") in GPU]
    usual = sorted(mark["dur"] for mark in marks)[(len(marks) - 1) // 2]
    for one, mark in zip(ours.steps, marks, strict=True):
        work = raw_work(events, mark)
        assert one.cpu_us == about(mark["dur"])
        assert one.launches == len({e["args"]["correlation"] for e in work})
        assert one.gpu_busy_us == about(covered([(e["ts"], end(e)) for e in work]))
        assert one.gpu_span_us == about(max(map(end, work)) - min(e["ts"] for e in work) if work else 0)
        assert (one.times_the_typical is not None) == (mark["dur"] >= 1.5 * usual)
        within = [e for e in events if mark["ts"] <= e["ts"] < end(mark)]
        assert one.occupancy_queries == sum("Occupancy" in e["name"] for e in runtime(within))
        label = min((e for e in within if e.get("cat") == "user_annotation" and e is not mark), key=lambda e: e["ts"])
        first_op = min(e["ts"] for e in events if e.get("cat") == "cpu_op" and label["ts"] <= e["ts"] < end(label))
        assert one.label_to_first_op_us == about(first_op - label["ts"])
        if not work:
            assert one.launch_to_start_us is None
            continue
        launch = {e["args"]["correlation"]: e["ts"] for e in runtime(events)}
        assert one.launch_to_start_us == about(work[0]["ts"] - launch[work[0]["args"]["correlation"]])
    works = [(one, mark, raw_work(events, mark)) for one, mark in zip(ours.steps, marks, strict=True)]
    working = [(one, mark, work[0]["ts"], max(map(end, work))) for one, mark, work in works if work]
    stretches = [(one, first, other[2]) for (one, _, first, _), other in itertools.pairwise(working)]
    if len(working) == 1:
        ((one, mark, _, last),) = working
        stretches = [(one, mark["ts"], max(end(mark), last))]
    for one, start, stop in stretches:
        inside = [(max(a, start), min(b, stop)) for a, b in all_work if a < stop and b > start]
        assert one.gpu_idle_share == pytest.approx(1 - covered(inside) / (stop - start), abs=1e-3)
    assert sum(one.gpu_idle_share is not None for one in ours.steps) == len(stretches)


def test_gpu_work_of_a_step(both):
    ours, events = both
    marks = raw_steps(events)
    typical = sorted(marks, key=lambda mark: mark["dur"])[(len(marks) - 1) // 2]
    assert ours.typical_step == typical["name"]
    works = [raw_work(events, mark) for mark in marks]
    expected = raw_work(events, typical)
    assert [one.name for one in ours.gpu_work] == [e["name"] for e in expected]
    for row, event in zip(ours.gpu_work, expected, strict=True):
        nth = [e["name"] for e in expected[: expected.index(event)]].count(event["name"])
        same = [[e for e in work if e["name"] == event["name"]] for work in works]
        durations = [group[nth]["dur"] for group in same if len(group) > nth]
        assert row.us == about(median(durations)) and row.mean_us == about(mean(durations))
        assert (row.low_us, row.high_us) == (about(min(durations)), about(max(durations)))
        call = next(e for e in runtime(events) if e["args"].get("correlation") == event["args"]["correlation"])
        assert row.launched_by == call["name"]
        around = [
            e for e in events if e.get("cat") in ("cpu_op", "user_annotation") and e["ts"] <= call["ts"] < end(e)
        ]  # fmt: skip
        assert row.asked_by == max(around, key=lambda e: e["ts"])["name"]
        # Kineto ties each kernel to its op by an id of its own: the two ways must agree.
        owner = next(e for e in events if e.get("cat") in ("cpu_op", "user_annotation")
                     and e["args"]["External id"] == event["args"]["External id"])  # fmt: skip
        assert row.asked_by == owner["name"]
        if row.tflops and row.attention is None:  # tests/test_attention.py has those
            first = 1 if owner["name"] == "aten::addmm" else 0  # behind the bias
            left, right = owner["args"]["Input Dims"][first : first + 2]
            assert row.flops == 2 * prod(left) * right[-1]
            assert row.tflops == pytest.approx(row.flops / event["dur"] / 1e6, rel=1e-4)
        if event["cat"] == "gpu_memcpy":
            assert row.bytes_moved == 2 * event["args"]["bytes"]
            assert row.gb_s is None or row.gb_s == pytest.approx(row.bytes_moved / event["dur"] / 1e3, rel=1e-3)
        if event["cat"] == "kernel":
            assert (row.grid, row.block) == (event["args"]["grid"], event["args"]["block"])


def test_ops_of_a_step(both):
    """Self time by the raw intervals is the time that no later slice inside on the same thread covers."""
    ours, events = both
    (mark,) = [e for e in raw_steps(events) if e["name"] == ours.typical_step]
    cats = ("cpu_op", "user_annotation", "cuda_runtime", "cuda_driver")
    inside = [e for e in events if e.get("cat") in cats and mark["ts"] <= e["ts"] < end(mark)]
    ops = [e for e in inside if e["cat"] == "cpu_op"]
    assert {name: op.calls for name, op in ours.cpu.ops.items()} == Counter(e["name"] for e in ops)
    for name, op in ours.cpu.ops.items():
        same = [e for e in ops if e["name"] == name]
        assert op.total_us == about(sum(e["dur"] for e in same))
        assert op.self_us == pytest.approx(sum(own_time(e, inside) for e in same), abs=0.1)
    assert len(ours.cpu.chain) == len(inside)
    calls = [e for e in inside if e["cat"] != "user_annotation"]
    assert ours.cpu.recorded_calls == len(calls)
    assert ours.cpu.recorded_us == pytest.approx(sum(own_time(e, inside) for e in calls), abs=1)
    launches = {e["args"]["correlation"] for e in raw_work(events, mark)}
    launching = [e for e in inside if e["args"].get("correlation") in launches]
    around = {
        e["name"] for e in ops for call in launching if e["tid"] == call["tid"] and e["ts"] <= call["ts"] < end(e)
    }
    assert ours.cpu.ops_and_launches == len(ops) + sum(e["cat"] != "cpu_op" for e in launching)
    assert {name for name, op in ours.cpu.ops.items() if op.reaches_gpu} == around & {e["name"] for e in ops}


def own_time(e, slices):
    below = [
        (o["ts"], end(o)) for o in slices
        if o is not e and o["tid"] == e["tid"] and e["ts"] <= o["ts"] and end(o) <= end(e) + 1e-3
        and o["dur"] <= e["dur"]
    ]  # fmt: skip
    return e["dur"] - covered(below)


def test_self_time_of_all_calls_beside_annotations_inside_ops_and_slices_that_overlap(tmp_path):
    """An annotation's own time is no call's. A slice that ends after the one around it counts there to the end."""
    one = raw_events.event
    slices = [
        one("ProfilerStep#1", "user_annotation", 0, 100), one("outer", "cpu_op", 10, 80),
        one("inside", "user_annotation", 20, 50), one("inner", "cpu_op", 30, 30),
        one("call", "cuda_runtime", 40, 10),
    ]  # fmt: skip
    crossing = one("crossing", "cpu_op", 85, 10)
    for name, events, expected in (("nested", slices, 80 - 50 + 30), ("overlaps", [*slices, crossing], 25 + 30 + 10)):
        file = tmp_path / f"{name}.json"
        file.write_text(json.dumps({"traceEvents": events}))
        cpu = summarize(read(file)).cpu
        assert cpu.recorded_us == expected and cpu.recorded_calls == len(events) - 2
        ops = dict(cpu.ops)
        assert cpu.ops_and_launches == sum(e["cat"] == "cpu_op" for e in events)  # no call launches
        cpu.keep()  # after it the trace is gone
        assert (cpu.recorded_us, cpu.recorded_calls) == (expected, len(events) - 2) and cpu.ops == ops


def spoken_of(marks):
    usual = sorted(mark["dur"] for mark in marks)[(len(marks) - 1) // 2]
    return marks[1:] if len(marks) > 1 and marks[0]["dur"] > 10 * usual else marks


def test_window_and_regime(both):
    ours, events = both
    marks = spoken_of(raw_steps(events))
    work = [e for mark in marks for e in raw_work(events, mark)]
    window = max([*map(end, marks), *map(end, work)]) - marks[0]["ts"]
    assert ours.window_us == about(window)
    assert len(ours.left_out) == len(raw_steps(events)) - len(marks)
    if not work:
        assert ours.waits_for == "cpu-only" and ours.gpu is None


def is_communication(event):
    return event["name"].startswith("nccl")


def idle_by_cause(events):
    """Return the µs of a gap by cause, cut at the return of the launch call, by (next activity, start of the gap)."""
    calls = {e["args"]["correlation"]: e for e in runtime(events)}
    first = {}
    for e in events:
        if e.get("cat") in GPU:
            correlation = e["args"]["correlation"]
            first[correlation] = min(first.get(correlation, e["ts"]), e["ts"])

    def cut(following, reached):
        gap, correlation = following["ts"] - reached, following["args"]["correlation"]
        if correlation not in calls:
            return {"unknown": gap}
        if first[correlation] < following["ts"]:
            return {"launched": gap}  # a later activity of a CUDA graph
        waited = min(max(0.0, end(calls[correlation]) - reached), gap)
        return {"not": waited, "launched": gap - waited}

    return cut


def test_gpu_time_adds_up_to_the_window(any_trace):
    ours, events = any_trace
    marks = spoken_of(raw_steps(events))
    launched = [e for mark in marks for e in raw_work(events, mark)]
    if not launched:
        return
    start, stop = marks[0]["ts"], max([*map(end, marks), *map(end, launched)])
    work = sorted((e for e in events if e.get("cat") in GPU and e["ts"] < stop and end(e) > start),
                  key=lambda e: e["ts"])  # fmt: skip
    spans = [(max(e["ts"], start), min(end(e), stop)) for e in work]
    kernels = [span for span, e in zip(spans, work, strict=True) if e["cat"] == "kernel"]
    assert not any(map(is_communication, work))
    assert ours.gpu.busy_us == about(covered(spans))
    assert ours.gpu.compute_us == about(covered(kernels))
    assert ours.gpu.exposed_copy_us == about(covered(spans) - covered(kernels))
    assert ours.gpu.busy_us + ours.gpu.idle_us == about(stop - start)
    cut, idle = idle_by_cause(events), Counter()
    reached = start
    for e in work:
        if e["ts"] > reached:
            idle.update(cut(e, reached))
        reached = max(reached, end(e))
    idle["not"] += max(0.0, stop - reached)
    assert ours.gpu.idle_launched_us == pytest.approx(idle["launched"], abs=0.1)
    assert ours.gpu.idle_unknown_us == pytest.approx(idle["unknown"], abs=0.1)
    assert ours.gpu.idle_not_launched_us == pytest.approx(idle["not"], abs=0.1)
    assert sum(one.us for one in ours.families) == pytest.approx(sum(b - a for a, b in spans), abs=0.1)
    assert sum(one.pieces for one in ours.families) == len(work)


def test_gaps_within_a_steps_own_work(any_trace):
    """The gaps have causes, from the first start to the last end; only those that the CPU caused are reported."""
    ours, events = any_trace
    (mark,) = [e for e in raw_steps(events) if e["name"] == ours.typical_step]
    work = sorted(raw_work(events, mark), key=lambda e: e["ts"])
    if not work:
        assert ours.step_gpu is None
        return
    cut, idle = idle_by_cause(events), Counter()
    reached = work[0]["ts"]
    for piece in work:
        if piece["ts"] > reached:
            idle.update(cut(piece, reached))
        reached = max(reached, end(piece))
    assert ours.step_gpu.idle_not_launched_us == pytest.approx(idle["not"], abs=0.1)
    assert ours.step_gpu.idle_launched_us == pytest.approx(idle["launched"], abs=0.1)


def test_work_by_annotation_and_module(any_trace):
    """Each activity counts for the annotation and the module that enclose its launch in time."""
    ours, events = any_trace
    (mark,) = [e for e in raw_steps(events) if e["name"] == ours.typical_step]
    calls = {e["args"]["correlation"]: e for e in runtime(events)}
    work = raw_work(events, mark)
    for place in ours.places.by_label:
        labels = [e for e in events if e.get("cat") == "user_annotation" and e["name"] == place.name]
        inside = [
            e for e in work
            if any(x["ts"] <= calls[e["args"]["correlation"]]["ts"] < end(x) for x in labels)
        ]  # fmt: skip
        if place.name != "outside them":
            assert place.pieces == len(inside)
            assert place.gpu_us == about(sum(e["dur"] for e in inside))
    assert not ours.places.by_label or sum(place.pieces for place in ours.places.by_label) == len(work)
    frames = [e for e in events if e.get("cat") == "python_function" and e["name"].startswith("nn.Module: ")]
    for place in ours.places.by_module:
        if place.name == "no module" or place.name.endswith(" backward"):
            continue
        pieces = 0
        for e in work:
            call = calls[e["args"]["correlation"]]
            around = [x for x in frames if x["tid"] == call["tid"] and x["ts"] <= call["ts"] < end(x)]
            innermost = max(around, key=lambda x: x["ts"], default=None)
            pieces += innermost is not None and innermost["name"] == f"nn.Module: {place.name}"
        assert place.pieces == pieces
    assert not ours.places.by_module or sum(place.pieces for place in ours.places.by_module) == len(work)


def threads_of_autograd(slices):
    """Return the threads whose outermost ops are all of autograd's engine."""
    outermost, reached = defaultdict(list), {}
    for op in sorted((e for e in slices if e["cat"] == "cpu_op"), key=lambda e: (e["ts"], -e["dur"])):
        if op["ts"] >= reached.get(op["tid"], -inf):
            outermost[op["tid"]].append(op["name"])
            reached[op["tid"]] = end(op)
    engine = "autograd::engine::evaluate_function: "
    return {tid for tid, names in outermost.items() if all(name.startswith(engine) for name in names)}


def test_the_launching_threads_activity_while_the_gpu_waited(any_trace):
    """Each gap is cut at every edge of a slice of the thread, and each part counts for the slice that started last."""
    ours, events = any_trace
    marks = raw_steps(events)
    index = [mark["name"] for mark in marks].index(ours.typical_step)
    calls = {e["args"]["correlation"]: e for e in runtime(events)}
    cats = ("cpu_op", "user_annotation", "cuda_runtime", "cuda_driver")
    slices = [e for e in events if e.get("cat") in cats]
    work = sorted((e for e in events if e.get("cat") in GPU), key=lambda e: e["ts"])
    mine = raw_work(events, marks[index])
    if not mine:
        assert not ours.idle_in
        return
    first, last = min(e["ts"] for e in mine), max(map(end, mine))
    cut, expected, in_python = idle_by_cause(events), Counter(), 0.0
    of_autograd = threads_of_autograd(slices)
    frames = [e for e in events if e.get("cat") == "python_function" and not e["name"].startswith("nn.Module: ")]
    start, before = marks[index]["ts"], [end(e) for e in work if e["ts"] < first]
    later = [found[0]["ts"] for mark in marks[index + 1 :] if (found := raw_work(events, mark))]
    if later:
        reached, last = max([*before, first]), max(last, later[0])
    else:
        reached = max(before + [start] * (index == 0), default=start)
    for piece in [e for e in work if first <= e["ts"] <= last]:
        waited = cut(piece, reached).get("not", 0.0) if piece["ts"] > reached else 0.0
        if waited:
            call, stop = calls[piece["args"]["correlation"]], reached + waited
            mine = [e for e in slices if e["tid"] == call["tid"] and e["ts"] < stop and end(e) > reached]
            inside = {edge for e in mine for edge in (e["ts"], end(e)) if reached < edge < stop}
            for left, right in itertools.pairwise(sorted({reached, stop, *inside})):
                around = [e for e in mine if e["ts"] <= left and end(e) >= right and e["cat"] != "user_annotation"]
                # The innermost annotation that marks a part of the step names the time outside all ops.
                on = [e for e in mine if e["ts"] <= left and end(e) >= right and e["cat"] == "user_annotation"]
                on = [e for e in sorted(on, key=lambda e: (e["ts"], -e["dur"])) if is_phase(e["name"])]
                where = f"Python in {on[-1]['name']}, between ops" if on else "Python, between ops"
                if on and on[-1]["name"].startswith("enumerate(DataLoader)#"):
                    where = on[-1]["name"]
                outside = "backward's thread, between ops" if call["tid"] in of_autograd else where
                name = max(around, key=lambda e: (e["ts"], -e["dur"]))["name"] if around else outside
                expected[name] += right - left
                if not around:
                    near = [e for e in frames if e["tid"] == call["tid"] and e["ts"] < right and end(e) > left]
                    in_python += covered({(max(e["ts"], left), min(end(e), right)) for e in near})
        reached = max(reached, end(piece))
    assert sum(ours.idle_in.values()) == pytest.approx(expected.total(), abs=0.1)
    for name, us in expected.items():
        assert ours.idle_in.get(name, 0.0) == pytest.approx(us, abs=0.2), name
    assert sum(ours.idle_python.values()) == pytest.approx(in_python, abs=0.2)
    assert set(ours.idle_python) <= {e["name"] for e in frames}


def test_backwards_work_goes_to_its_module():
    """In three linears and a norm, each Linear has two products in backward, which count for it."""
    ours = summarize(read(ROOT / "tests/traces/train_stack.json.gz"))
    named = {place.name: place.pieces for place in ours.places.by_module}
    assert {"Linear_0", "Linear_1", "GELU_0", "LayerNorm_0"} <= set(named)
    assert {"Linear_0 backward", "Linear_1 backward", "GELU_0 backward", "LayerNorm_0 backward"} <= set(named)
    assert [place.name for place in ours.places.by_label] == ["forward", "backward", "optimizer"]


@pytest.mark.parametrize(
    ("name", "waits"),
    [("train_item", "overhead"), ("memory_bound", "memory"), ("conv", "gpu"), ("blocking", "gpu")],
)
def test_the_regime_of_other_programs(name, waits):
    assert references.measured(ROOT / f"tests/traces/{name}.json.gz").waits_for == waits


def test_no_slice_crosses_and_all_work_has_its_launch(both):
    ours, _ = both
    assert not ours.source.warnings


# Kernels, copies, memsets and launches of a step, as shared/claims.md counts them on an H200.
COUNTS = {
    "01_matmul_add/64_bf16_cold_eager": (2, 0, 0, 2),
    "01_matmul_add/64_bf16_warm_eager_batch8": (2, 0, 0, 2),
    "01_matmul_add/4096_bf16_warm_eager": (2, 0, 1, 3),
    "01_matmul_add/4096_bf16_warm_compile": (1, 1, 1, 3),
    "01_matmul_add/4096_bf16_warm_eager_addmm": (1, 1, 1, 3),
    "01_matmul_add/4096_bf16_warm_compile_reduce-overhead": (5, 0, 1, 4),
    "02_linear/1024x32x64_bf16_cold_eager": (1, 0, 0, 1),
    "02_linear/1024x32x64_bf16_warm_compile": (1, 0, 0, 1),
    "03_simple_mlp/64x128x768x3072_bf16_warm_eager": (5, 0, 2, 7),
    "03_simple_mlp/64x128x768x3072_bf16_warm_compile": (4, 0, 2, 6),
    "03_kernels_mlp/64x128x768x3072_bf16_warm_eager": (4, 0, 2, 6),
}


@pytest.mark.parametrize("name", COUNTS)
def test_counts_of_the_claims(name):
    ours = measured(name)
    kinds = tuple(ours.count(kind) for kind in ("kernel", "memcpy", "memset"))
    assert (*kinds, ours.chosen.launches) == COUNTS[name]


def measured(name):
    return references.measured(H200 / f"{name}.json.gz")


def test_compare_reproduces_the_closing_table():
    eager, compiled, liger = (
        compare.Side(measured(f"03_{name}"))
        for name in (
            "simple_mlp/64x128x768x3072_bf16_warm_eager", "simple_mlp/64x128x768x3072_bf16_warm_compile",
            "kernels_mlp/64x128x768x3072_bf16_warm_eager",
        )
    )  # fmt: skip
    assert sentences.setup(eager) == "3 x GEMM, 2 x memset, 1 x gelu, 1 x mul"
    for side, kernel in ((compiled, "triton_poi_fused__unsafe_view_gelu_mul_0"), (liger, "_geglu_tanh_forward_kernel")):
        found = sentences.difference(eager, side)
        gone, new = (text for text in found.changed if text.startswith("GPU work "))
        assert "<mul, bf16" in gone and "<gelu, bf16" in gone and kernel[:20] in new
        gemms = next(text for text in found.same if "GEMMs" in text)
        assert gemms.startswith("3 of the GEMMs") and "2 x nvjet_sm90_tst_256x128" in gemms
    changed = " ".join(sentences.difference(eager, compiled).changed)
    assert "TorchDynamo" in changed and "aten::linear" in changed
    assert "TorchDynamo" not in " ".join(sentences.difference(eager, liger).changed)


def test_compare_of_linear_finds_the_same_kernel():
    eager, compiled = (measured(f"02_linear/1024x32x64_bf16_warm_{path}") for path in ("eager", "compile"))
    found = sentences.difference(compare.Side(eager), compare.Side(compiled))
    assert not any("GPU work" in text for text in found.changed)
    assert any(text.startswith("ops gone: ") and "aten::t" in text for text in found.changed)


def test_a_trace_equals_itself():
    side = compare.Side(measured("02_linear/1024x32x64_bf16_warm_eager"))
    assert sentences.difference(side, side).changed == ()


def verdicts(name):
    ours = read(H200 / f"{name}.json.gz")
    summary = summarize(ours)
    return {one.text: one.ask(summary) for one in predictions_of(ours)}


@pytest.mark.parametrize(
    ("name", "part", "holds", "says"),
    [
        ("01_matmul_add/64_bf16_cold_eager", "overhead-bound", True, "waiting for CPU launches"),
        ("01_matmul_add/64_bf16_cold_eager", "occupancy query", True, "none in steps #2 to #4"),
        ("01_matmul_add/64_bf16_cold_eager_wait0_schedwarmup0", "occupancy query", True, "in step #0"),
        ("01_matmul_add/64_bf16_cold_eager", "last cudaDeviceSynchronize", False, ""),
        ("01_matmul_add/4096_bf16_warm_eager", "GPU-bound", True, "of the busy time is matrix products"),
        ("01_matmul_add/4096_bf16_warm_eager_shapes", "compute-bound", True, "arithmetic peak"),
        ("01_matmul_add/4096_bf16_warm_eager", "many registers", True, "168 registers"),
        ("01_matmul_add/64_bf16_warm_eager", "in a warm run all steps", False, ""),
        ("01_matmul_add/64_bf16_cold_eager_wait0_schedwarmup0_active20", "buffer once", True, "takes 1.8 ms"),
        ("01_matmul_add/64_bf16_warm_eager_batch8", "resolves to aten::bmm", True, ""),
        ("01_matmul_add/4096_bf16_warm_compile", "copy of the bias", True, "33.6 MB"),
        ("01_matmul_add/4096_bf16_warm_compile", "Dynamo looks up", True, "1 graph hash in 3 steps"),
        ("01_matmul_add/4096_bf16_warm_compile_reduce-overhead", "CUDA graph replays", False, "3 more before it"),
        ("02_linear/1024x32x64_bf16_cold_eager", "epilogue adds the bias", True, "bias_TNT"),
        ("02_linear/1024x32x64_bf16_cold_eager", "read transposed", True, "TNT"),
        ("02_linear/1024x32x64_bf16_cold_eager", "aten::t launches no GPU work", True, ""),
        ("03_simple_mlp/64x128x768x3072_bf16_warm_eager", "5 kernels", True, "2 memsets"),
        ("03_simple_mlp/64x128x768x3072_bf16_warm_eager_shapes", "flatten to 8192 rows", True, "38.7 GFLOP"),
        ("03_simple_mlp/64x128x768x3072_bf16_warm_compile", "one kernel, written by Inductor", True, "triton_poi"),
        ("03_kernels_mlp/64x128x768x3072_bf16_warm_eager", "256 threads", True, "[8192, 1, 1]"),
    ],
)
def test_verdicts(name, part, holds, says):
    ((_, answer),) = [(text, answer) for text, answer in verdicts(name).items() if part in text]
    assert answer.holds is holds
    assert says in answer.evidence + answer.why_not


def test_a_prediction_can_be_wrong_and_can_be_out_of_reach():
    """The same predictions are checked on traces of another kind."""
    assert any(answer.holds is True for answer in verdicts("02_linear/1024x32x64_bf16_cold_eager").values())
    compiled = measured("02_linear/1024x32x64_bf16_warm_compile")
    assert expect.dispatches("aten::linear", "aten::addmm").ask(compiled).holds is False
    assert expect.launch_nothing("aten::t").ask(compiled).holds is None
    assert expect.kernels_are(5).ask(compiled).holds is False
    eager = measured("03_simple_mlp/64x128x768x3072_bf16_warm_eager")
    assert expect.compiled_rows().ask(eager).holds is False
    assert expect.no_compile_rows().ask(compiled).holds is False
    assert expect.product_sizes(8192, 768, 3072).ask(eager).holds is None
    assert expect.bias_in_the_epilogue().ask(eager).holds is False
    assert expect.pointwise_round_trip(8192, 3072, 2).ask(eager).holds is None
    shapes = measured("03_simple_mlp/64x128x768x3072_bf16_warm_eager_shapes")
    assert expect.pointwise_round_trip(8192, 3072, 2).ask(shapes).holds is True
    assert expect.pointwise_round_trip(8192, 3072, 4).ask(shapes).holds is False


def test_the_predictions_of_the_references_survive_being_written_down():
    for file in REFERENCES:
        for one in predictions_of(read(file)):
            record = json.loads(json.dumps(one.record))
            again = expect.from_record(record)
            assert (again.text, json.loads(json.dumps(again.record))) == (one.text, record)


@pytest.mark.parametrize(
    "record",
    [{}, {"guess": 3}, {"guess": "nothing"}, {"guess": "ops_are"}, {"guess": "ops_are", "count": "x", "name": "y"},
     {"guess": "records_steps", "first": 1, "count": [2]}, {"guess": "fused_into_one", "maker": "x", "words": "y"}],
)  # fmt: skip
def test_a_prediction_that_cannot_be_read_is_left_out(record):
    assert expect.from_record(record) is None


H200_LIMITS = {"warpSize": 32, "maxThreadsPerMultiprocessor": 2048, "regsPerMultiprocessor": 65536,
               "sharedMemPerMultiprocessor": 233472, "computeMajor": 9, "computeMinor": 0}  # fmt: skip


@pytest.mark.parametrize(
    ("registers", "shared", "block", "limit", "limited_by"),
    [
        (255, 49152, [128, 1, 1], 8 / 64, "registers"),  # flash: claim 51, 13%
        (168, 134144, [384, 1, 1], 12 / 64, "registers and shared memory"),  # cuDNN: claim 55, 19%
        (32, 0, [256, 1, 1], 1.0, ""),  # all of them fit: nothing limits them
        (32, 100_000, [256, 1, 1], 16 / 64, "shared memory"),
        (101, 0, [32, 1, 1], 16 / 64, "registers"),  # four warps on each of four parts, not nineteen in all
        (16, 0, [32, 1, 1], 32 / 64, "the number of blocks"),
    ],
)
def test_occupancy_limit(registers, shared, block, limit, limited_by):
    found = occupancy(H200_LIMITS, registers, shared, block, 13)
    assert (found.limit, found.limited_by, found.reported) == (limit, limited_by, 0.13)
    assert occupancy({}, registers, shared, block, 13) is None
    assert occupancy(H200_LIMITS | {"warpSize": 64}, registers, shared, block, 13) is None, "AMD's rules are others"


@pytest.mark.parametrize("major", [None, "9", [9], 9.0])
def test_an_odd_compute_capability_is_none(tmp_path, major):
    trace = ROOT / "traces/reference/nvidia-h200/01_matmul_add/64_bf16_warm_eager.json.gz"
    document = json.loads(gzip.decompress(trace.read_bytes()))
    document["deviceProperties"][0]["computeMajor"] = major
    (tmp_path / "odd.json").write_text(json.dumps(document))
    assert summarize(read(tmp_path / "odd.json")).source.compute_capability is None


TRAINED = "traces/reference/nvidia-h200-x2/06_training/4x1024x1024x16_bf16_warm_compile.json.gz"


def test_a_kernel_that_fills_the_device_reaches_its_limit():
    """The profiler's estimate is then the number of blocks that fit, which CUDA computes."""
    document = json.loads(gzip.decompress((ROOT / TRAINED).read_bytes()))
    (multiprocessors,) = {one["numSms"] for one in document["deviceProperties"]}
    filling = 0
    for one in summarize(read(ROOT / TRAINED)).gpu_work:
        if one.occupancy and one.occupancy.reported and one.grid and one.block:
            warps = -(-prod(one.block) // 32)
            if prod(one.grid) * warps >= one.occupancy.limit * 64 * multiprocessors:
                filling += 1
                assert one.occupancy.limit == pytest.approx(one.occupancy.reported, abs=0.011), one.name
    assert filling > 20


def test_the_profilers_estimate_never_passes_the_limit(any_trace):
    ours, _ = any_trace
    for one in ours.gpu_work:
        if one.occupancy and one.occupancy.reported:
            assert one.occupancy.reported <= one.occupancy.limit + 0.011, one.name


def test_convolutions_have_flops_forward_and_backward():
    trace = ROOT / "tests" / "traces" / "conv.json.gz"
    summary = summarize(read(trace))
    work = [one for one in summary.gpu_work if one.convolution]
    # Two layers: 3 -> 64 channels by 7 x 7 with stride 2, 64 -> 128 by 3 x 3, of 64 images of 224 x 224.
    first, second = 2 * 64 * 64 * 112 * 112 * (3 * 7 * 7), 2 * 64 * 128 * 56 * 56 * (64 * 3 * 3)
    told = [(one.asked_by, one.name_says.get("does"), one.flops) for one in work]
    assert told == [
        ("aten::cudnn_convolution", "forward", first),
        ("aten::cudnn_convolution", "forward", second),
        ("aten::convolution_backward", "gradient of the input", second),
        ("aten::convolution_backward", "gradient of the weight", second),
        ("aten::convolution_backward", "gradient of the weight", first),
    ]
    assert all(one.tflops == pytest.approx(one.flops / one.us / 1e6, rel=0.03) for one in work)
    assert [one for one in summary.gpu_work if one.name_says.get("does", "").startswith("adds the parts")]


ODD = (
    None, 7, "", [], ["", ""], ["", "", "[1]", "[1, 1]", "[1, 1]"], ["", "", "[0, 0]", "[0, 0]", "x"],
    ["(" * 9999] * 9,
)  # fmt: skip


@pytest.mark.parametrize("concrete", ODD, ids=range(len(ODD)))
@pytest.mark.parametrize("op", ["aten::cudnn_convolution", "aten::convolution_backward"])
def test_a_convolution_without_recorded_arguments(op, concrete):
    shapes = [[2, 3, 8, 8], [4, 3, 3, 3], [4, 3, 3, 3]]
    assert convolution(op, Inputs({"Input Dims": shapes, "Concrete Inputs": concrete})) is None


@pytest.mark.parametrize("expanded", [False, True])
def test_a_strided_copy_counts_both_sides_and_a_broadcast_source_once(tmp_path, expanded):
    shape, strides = [8, 1024, 16], [0, 16, 1] if expanded else [16, 8192, 1]
    op = {"Input Dims": [shape, shape, []], "Input type": ["float", "c10::BFloat16", "Scalar"],
          "Input Strides": [[16384, 16, 1], strides, []]}  # fmt: skip
    copy = "void at::native::elementwise_kernel<128, 4, at::native::direct_copy_kernel_cuda(at::TensorIteratorBase&)>"
    event = {"ph": "X", "pid": 1, "tid": 1}
    events = [
        {**event, "cat": "cpu_op", "name": "aten::copy_", "ts": 1, "dur": 9, "args": op},
        {**event, "cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": 2, "dur": 5, "args": {"correlation": 7}},
        {**event, "cat": "kernel", "name": copy, "ts": 20, "dur": 2, "pid": 0, "tid": 7,
         "args": {"correlation": 7, "device": 0}},
    ]  # fmt: skip
    file = tmp_path / "copy.json"
    file.write_text(json.dumps({"traceEvents": events}))
    (one,) = summarize(read(file)).gpu_work
    assert (one.family, one.bytes_moved) == ("copy", 8 * 1024 * 16 * 4 + 1024 * 16 * 2 * (1 if expanded else 8))


def test_overlapping_work_is_distinguished_from_work_alone(any_trace):
    summary, events = any_trace
    work = [e for e in events if e.get("cat") in GPU]
    names = Counter(one.name for one in summary.gpu_work)
    # By name where it stands once in the step: every piece of it, in every step, against all others.
    for one in [one for one in summary.gpu_work if names[one.name] == 1][:6]:
        marks = raw_steps(events) or [{"ts": min(e["ts"] for e in events), "dur": 1e12}]
        mine = [e for mark in marks for e in raw_work(events, mark) if e["name"] == one.name]
        beside = any(
            e["ts"] < end(other) and other["ts"] < end(e) and other is not e
            for e in mine for other in work if other["args"].get("device") == e["args"].get("device")
        )  # fmt: skip
        assert one.ran_alone is not beside


def test_the_regime_is_judged_from_step_to_step():
    """The wait for the first launch is a third of a few graph replays, and does not decide the regime."""
    trace = ROOT / "traces/reference/nvidia-h200/05_llm/1x512_bf16_warm_eager_graph.json.gz"
    events = [e for e in json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"] if e.get("ph") == "X"]
    work = [raw_work(events, mark) for mark in raw_steps(events)]
    start, stop = work[0][0]["ts"], work[-1][0]["ts"]
    busy = covered([(e["ts"], end(e)) for e in work[0] + work[1]])
    ours = references.measured(trace)
    assert ours.steady_us == about(stop - start) and ours.steady.busy_us == pytest.approx(busy, rel=1e-3)
    assert ours.waits_for == "gpu"


@pytest.mark.parametrize("name", ["02_linear/1024x32x64_bf16_warm_eager", "05_llm/1x512_bf16_warm_eager_graph"])
def test_the_gap_before_the_last_steps_first_activity_is_cut_by_that_activitys_launch(name):
    file = H200 / f"{name}.json.gz"
    events = [e for e in json.loads(gzip.decompress(file.read_bytes()))["traceEvents"] if e.get("ph") == "X"]
    ours = references.measured(file)
    firsts = [raw_work(events, mark)[0] for mark in raw_steps(events)[ours.after_first :]]
    cut, idle, reached = idle_by_cause(events), Counter(), firsts[0]["ts"]
    for e in sorted((e for e in events if e.get("cat") in GPU), key=lambda e: e["ts"]):
        if firsts[0]["ts"] <= e["ts"] <= firsts[-1]["ts"]:
            if e["ts"] > reached:
                idle.update(cut(e, reached))
            reached = max(reached, end(e))
    assert ours.steady.idle_launched_us == pytest.approx(idle["launched"], abs=0.2)
    assert ours.steady.idle_not_launched_us == pytest.approx(idle["not"], abs=0.2)


@pytest.mark.parametrize("name", ["copies/prefetched", "pinned/prefetched"])
def test_copies_that_run_a_step_ahead_do_not_set_the_pace(name):
    """The pace is from step to step on the busiest stream, and the GPU is busy no longer than that."""
    file = H200 / f"changes/{name}.json.gz"
    events = [e for e in json.loads(gzip.decompress(file.read_bytes()))["traceEvents"] if e.get("ph") == "X"]
    ours = summarize(read(file))
    kernels = [
        [e for e in raw_work(events, mark) if e["cat"] != "gpu_memcpy"]
        for mark in raw_steps(events)[ours.after_first :]
    ]
    start, stop = kernels[0][0]["ts"], kernels[-1][0]["ts"]
    spans = [
        (max(e["ts"], start), min(end(e), stop))
        for e in events if e.get("cat") in GPU and e["ts"] < stop and end(e) > start
    ]  # fmt: skip
    assert ours.steady_us == about(stop - start)
    assert ours.steady.busy_us == about(covered(spans))
    assert ours.gpu_us == pytest.approx(covered(spans) / (stop - start) * ours.recorded_step_us)
    assert ours.gpu_us < ours.recorded_step_us < ours.chosen.gpu_busy_us


def test_the_regime_names_the_largest_part_of_the_busy_time():
    """The copies overlap the kernels: they take 42% of the summed time, and 2% of the busy time."""
    ours = summarize(read(H200 / "changes/copies/prefetched.json.gz"))
    share = ours.steady.compute_by_family["convolution"] / ours.steady.busy_us
    assert steps.waiting(ours)[1].endswith(f"and {share:.0%} of the busy time is convolution kernels")
    ours = summarize(read(H200 / "changes/pinned/prefetched.json.gz"))
    products = [one.us for one in ours.gpu_work if one.family == "GEMM"]
    assert (
        f", and {sum(products) / ours.gpu_us:.0%} of the busy time is in kernels that reach" in steps.waiting(ours)[1]
    )


@pytest.mark.parametrize(
    ("name", "held"),
    [("changes/vit/eager", "mean of #2 and #3"), ("01_matmul_add/4096_bf16_cold_eager", "on the GPU, #3")],
)
def test_the_table_of_the_step_says_which_steps_it_is_of(name, held, capsys):
    assert cli.main([str(H200 / f"{name}.json.gz"), "--only", "gpu"]) == 0
    (head,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("where the step goes")]
    assert re.search(rf"{held}\s{{2,}}", head), head


def test_the_table_by_family_says_that_it_has_more_than_the_steps_launched(capsys):
    """Copies of the previous step run in the window, and have no launch in the trace."""
    file = H200 / "changes/copies/prefetched.json.gz"
    ours = summarize(read(file))
    in_steps, in_window = (sum(getattr(one, key) for one in some) for key, some in
                           (("count", ours.kernels), ("pieces", ours.families)))  # fmt: skip
    assert in_steps < in_window
    assert cli.main([str(file)]) == 0
    screen = capsys.readouterr().out
    assert "all in the window, by family (kernels overlap)" in screen and "all steps, by family" not in screen
