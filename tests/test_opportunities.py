"""The proposals of a report are compared with steps that were recorded after the change."""

import gzip
import itertools
import json
import re
import statistics
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest
from conftest import ROOT
from msgspec.structs import replace
from raw_events import GPU, end, event, pace, raw_steps, raw_work
from references import CHANGES as CHANGED
from references import PREDICTED, measured, proposals, recording, sampled, small_first

from tracereader import cli
from tracereader.changes import fusion, prices
from tracereader.changes import ranks as rank_changes
from tracereader.changes.catalogue import CHANGES, each_priced, opportunities
from tracereader.changes.context import Case
from tracereader.changes.copies import overlap_copies
from tracereader.changes.fusion import fuse_pointwise
from tracereader.changes.graphs import cuda_graph
from tracereader.changes.opportunity import Opportunity, Proposal, priced, worth_showing
from tracereader.changes.waits import remove_sync
from tracereader.command import DEFAULT_LIMIT
from tracereader.figures import summarize
from tracereader.findings import ranks
from tracereader.replay import Refused, graph_of
from tracereader.replay import recorded as graph_module
from tracereader.show.ranks import opened
from tracereader.show.view import View
from tracereader.trace import read
from tracereader.trace.labels import ACCUMULATES

TESTS = Path(__file__).resolve().parent / "traces"
PAIRS = TESTS.parent.parent / "benchmarks/pairs"
SMALL_TRAIN = TESTS / "h100/small_train"  # training steps of small models, in separate processes
TWO_GPUS = CHANGED.parent.parent / "nvidia-h200-x2/06_training"

# Each row has a recorded step, a change that its report must propose, and the step recorded after that change.
MEASURED = [
    *PREDICTED,
    ("selection/chosen", "remove_sync", "selection/multiplied"),
    ("results/at_once", "overlap_copies", "results/a_step_later"),
]
# The first change of a report, for steps of which one recorded change was the best.
FIRST = [
    ("vit/eager", "cuda_graph"),
    ("decode/eager", "cuda_graph"),
    ("pointwise/eager", "fuse_pointwise"),
    ("copies/blocking", "overlap_copies"),
    ("resnet/fp32", "half_precision"),
    ("encoder/fp32", "half_precision"),
    ("encoder/tf32", "half_precision"),
    ("gpt2/sdpa", "align_shapes"),
    ("attention/naive", "fused_attention"),
    ("optimizer/forloop", "fused_optimizer"),
    ("loader/inline", "data_loader"),
    ("syncs/item", "remove_sync"),
    ("small/loop", "larger_batch"),
    ("python/loop", "python"),
    ("conv_layout/contiguous", "channels_last"),
    ("bert/eager", "cuda_graph"),
    ("lstm/cells", "cuda_graph"),
    ("images/eager", "cuda_graph"),
    ("unet/contiguous", "fuse_pointwise"),
    ("llama/sdpa", "fuse_pointwise"),
    ("trained/eager", "fuse_pointwise"),
    ("pinned/same_stream", "overlap_copies"),
    ("selection/chosen", "remove_sync"),
    ("odd_width/odd", "align_shapes"),
    ("experts/loop", "larger_batch"),
    ("augmented/main_process", "cpu_tensors"),
]
# Changes that saved nothing in a recording.
NOTHING_GAINED = [
    ("vit/eager", "fuse_pointwise"),  # the compiled step is slower: 6.2 ms instead of 5.8
    ("products/eager", "fuse_pointwise"),
    ("batch_norm/eager", "fuse_pointwise"),  # 28.1 ms instead of 20.8, and without the profiler 13.9 instead of 12.0
    ("syncs/end", "remove_sync"),  # one float() at the end of a step
    ("unet/contiguous", "channels_last"),  # 7.9 ms instead of 5.8, because of group normalization
    ("attention32/naive", "fused_attention"),  # 0.39 ms instead of 0.34 in fp32
]
# Traces of products without recorded shapes. The recorded fused kernels take 57 to 178 µs on the GPU.
WITHOUT_SHAPES = ["attention_naive", "attention_inplace", "attention_math"]


def proposed(name: str) -> dict:
    return of_a_committed_trace(recording(name))


def of_a_committed_trace(file: Path) -> dict:
    return by_change(proposals(file), file)


def priced_changes(file: Path) -> dict:
    trace = read(file)
    return by_change(opportunities(trace, summarize(trace)), file)


def by_change(found: Sequence[Opportunity] | Refused, file: Path) -> dict:
    assert not isinstance(found, Refused), f"{file}: {found}"
    return {one.change: one for one in found}


@cache
def recorded_us(name: str) -> float:
    """Return the step's time from raw events: from one step's start to the next one's, on the CPU or on the GPU.

    Of the last step it is its own length. Which activity is of which step follows from the launch's correlation.
    """
    return raw_us(recording(name))


def raw_us(file: Path) -> float:
    events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    steps = [(mark["ts"], end(mark)) for mark in raw_steps(events)]
    work = [raw_work(events, mark) for mark in raw_steps(events)]
    spans = [(some[0]["ts"], max(map(end, some))) for some in work]
    return max(pace([start for start, _ in lane], lane[-1][1] - lane[-1][0]) for lane in (steps, spans))


@pytest.mark.parametrize(("before", "change", "after"), small_first(MEASURED))
def test_a_proposal_predicts_the_step_recorded_after_the_change(before, change, after):
    one = proposed(before).get(change)
    assert one is not None, f"{change} is not proposed"
    assert one.step_us == pytest.approx(recorded_us(before), rel=0.03)
    ratio = one.step_us_after / recorded_us(after)
    low, high = {"replay": (0.7, 1.3), "bound": (0.5, 2.0)}[one.basis]
    high = 2.5 if before == "experts/loop" else high  # the last pass of the loop takes as long as one batched product
    assert low <= ratio <= high, f"{ratio:.2f}"


@pytest.mark.parametrize("name", WITHOUT_SHAPES)
def test_without_shapes_the_products_limit_fused_attention(name):
    one = of_a_committed_trace(TESTS / f"{name}.json.gz")["fused_attention"]
    fused = [raw_us(TESTS / f"attention_{backend}.json.gz") for backend in ("auto", "cudnn", "flash", "efficient")]
    assert one.basis == "bound"
    assert 0.5 * min(fused) < one.step_us_after < 2 * max(fused)
    assert "scores are written to memory" in one.evidence


def test_working_in_place_predicts_the_step_recorded_without_the_copy():
    one = of_a_committed_trace(TESTS / "attention_naive.json.gz")["in_place"]
    assert one.step_us_after == pytest.approx(raw_us(TESTS / "attention_inplace.json.gz"), rel=0.05)
    assert one.basis == "replay" and "masked_fill_" in one.how


def test_stacks_name_the_functions_of_python_between_ops(tmp_path):
    document = json.loads(gzip.decompress((CHANGED / "python/loop.json.gz").read_bytes()))
    without = proposed("python/loop")["python"]
    assert "count_words" not in without.evidence and "with_stack" in without.how
    events = document["traceEvents"]
    for mark in raw_steps(events):
        ops = [e["ts"] for e in events if e.get("cat") == "cpu_op" and mark["ts"] <= e["ts"]]
        thread = {"pid": mark["pid"], "tid": mark["tid"]}
        events.append(event("train.py(5): step", "python_function", mark["ts"] + 1, mark["dur"] - 2) | thread)
        inside = min(ops) - mark["ts"] - 20
        events.append(event("train.py(7): count_words", "python_function", mark["ts"] + 5, inside) | thread)
    file = tmp_path / "stacks.json"
    file.write_text(json.dumps(document))
    one = priced_changes(file)["python"]
    assert one.evidence.endswith("in count_words") and "with_stack" not in one.how
    assert one.saves_us == pytest.approx(without.saves_us, rel=0.01)


def paused(events, mark, starts, ms):
    """Move everything in a step that starts at a time or later by some ms, and make what encloses that time longer."""
    for one in events:
        if one is not mark and one.get("ph") == "X" and one["ts"] < starts < end(one) and one.get("cat") not in GPU:
            one["dur"] += 1e3 * ms
    mark["dur"] += 1e3 * ms
    for one in events:
        if one is not mark and one.get("ts", 0) >= starts:
            one["ts"] += 1e3 * ms


@pytest.mark.parametrize(
    ("before", "told"),
    [
        (["aten::ones_like"], r"in an op for 3\.\d ms between \S+ and aten::ones_like, in the annotation backward$"),
        (["autograd::engine::evaluate_function: MeanBackward0"], None),
        (["autograd::engine::evaluate_function: AddmmBackward0"], None),
        (["aten::ones_like", "aten::item"], r"for 7\.\d ms in 2 pauses, .* \(4\.\d ms\) between .* and aten::item$"),
    ],
)  # fmt: skip
def test_a_pause_in_autograds_engine_is_no_python(tmp_path, before, told):
    """Each step pauses for 3 ms before the last op of a name, and for 4 ms before that of a second one."""
    document = json.loads(gzip.decompress((TESTS / "train_item.json.gz").read_bytes()))
    events = document["traceEvents"]
    for mark in raw_steps(events):
        for ms, name in enumerate(before, 3):
            inside = (one["ts"] for one in events if one["name"] == name and mark["ts"] <= one.get("ts", 0) < end(mark))
            paused(events, mark, max(inside), ms)
    file = tmp_path / "paused.json"
    file.write_text(json.dumps(document))
    one = priced_changes(file).get("python")
    assert (one is None) is (told is None)
    if told:
        assert re.search(told, one.evidence)
        assert one.saves_us == pytest.approx(sum(range(3, 3 + len(before))) * 1e3, rel=0.1)


def test_a_pause_before_an_op_on_lists_is_torchs_own(tmp_path):
    """clip_grad_norm_ sorts the gradients in Python before it calls aten::_foreach_norm."""
    document = json.loads(gzip.decompress((TESTS / "train_item.json.gz").read_bytes()))
    events = document["traceEvents"]
    for mark in raw_steps(events):
        inside = [one for one in events if one["name"] == "aten::ones_like" and mark["ts"] <= one["ts"] < end(mark)]
        inside[-1]["name"] = "aten::_foreach_norm"
        paused(events, mark, inside[-1]["ts"], 3)
    file = tmp_path / "paused.json"
    file.write_text(json.dumps(document))
    assert "python" not in priced_changes(file)


@pytest.mark.parametrize("name", small_first(["trained/compile", "unet/compile", "encoder/bf16_compile"]))
def test_compiling_is_not_proposed_for_a_compiled_model(name):
    assert "fuse_pointwise" not in proposed(name)


@cache
def unprofiled_us(name: str) -> float:
    """Return the step's time without the profiler, as the run stored it in its trace."""
    return json.loads(gzip.decompress(recording(name).read_bytes()))["unprofiled_step_us"]


# One batched product takes 46 µs instead of 5.8 ms. The prediction keeps 0.1 ms of the Python around the loop.
# cuDNN's plans took 145 ms while they were recorded, and 159 ms without the profiler. Another recording of these two
# steps had a ratio of 1.26.
UNPROFILED_OFF = {("small/loop", "larger_batch"): (0.5, 4.0), ("lengths/cudnn", "attention_plans"): (0.7, 1.7)}


@pytest.mark.parametrize(("before", "change", "after"), small_first(MEASURED))
def test_the_step_without_the_profiler_is_predicted_too(before, change, after):
    one = proposed(before)[change]
    ratio = one.unprofiled_step_us_after / unprofiled_us(after)
    low, high = UNPROFILED_OFF.get((before, change)) or {"replay": (0.7, 1.3), "bound": (0.5, 2.0)}[one.basis]
    assert low <= ratio <= high, f"{ratio:.2f}"


@pytest.mark.parametrize(("before", "change"), small_first(FIRST))
def test_the_first_opportunity_is_the_best_of_those_recorded(before, change):
    assert next(iter(proposed(before))) == change


@pytest.mark.parametrize(("before", "change"), small_first(NOTHING_GAINED))
def test_a_change_that_saved_nothing_is_not_proposed(before, change):
    one = proposed(before).get(change)
    assert one is None or one.saves_us <= 0.05 * one.step_us


@pytest.mark.parametrize(
    "file", sampled(sorted(CHANGED.rglob("*.json.gz"))), ids=lambda file: f"{file.parent.name}/{file.name}"
)
def test_opportunities_are_sorted_and_make_no_step_longer(file):
    found = proposals(file)
    # All of these runs measured their step without the profiler, so the savings of that step decide the order.
    measured = json.loads(gzip.decompress(file.read_bytes()))["unprofiled_step_us"]
    assert all(one.unprofiled_step_us == pytest.approx(measured) for one in found), "as the report's first line says"
    saved = [1 - one.unprofiled_step_us_after / one.unprofiled_step_us for one in found]
    counted = [share / 2 if one.conditional else share for share, one in zip(saved, found, strict=True)]
    assert counted == sorted(counted, reverse=True)
    assert all(share > 0.02 for share in saved)
    for one in found:
        assert one.change in {change.name for change in CHANGES}
        assert one.saves_us == pytest.approx(one.step_us - one.step_us_after)
        assert 0 <= one.saves_us < one.step_us, "recording can hide a saving, but no change makes the step longer"
        assert one.evidence and one.how and one.title


def test_a_saving_that_recording_hides_is_shown():
    """While recorded, the step waits for the CPU and a fused chain saves nothing. Without the profiler it saves 16%."""
    one = proposed("resnet/tf32")["fuse_pointwise"]
    assert one.saves_us < 0.02 * one.step_us
    assert 0.05 * unprofiled_us("resnet/tf32") < one.unprofiled_step_us - one.unprofiled_step_us_after


@pytest.mark.parametrize("name", ["batch_norm/eager", "trained/eager", "syncs/item"])
def test_a_change_that_changes_nothing_saves_nothing(name):
    """The replay of the unchanged step may be off by 3%, and changes are shown from 2% on."""
    graph = graph_of(read(recording(name)))
    off = replace(graph, recorded_us=1.02 * graph.recorded_us)
    one = priced("none", "", Proposal(off, "", ""))
    assert one.step_us == pytest.approx(one.step_us_after, rel=1e-12)
    assert one.step_us == pytest.approx(1.02 * recorded_us(name), rel=0.01)


def test_the_ops_of_fused_kernels_set_no_memory_either(tmp_path):
    """A batch norm may set its workspace. If that stayed, so would the op's CPU time."""
    document = json.loads(gzip.decompress(recording("batch_norm/eager").read_bytes()))
    events = document["traceEvents"]
    ops = [one for one in events if one.get("name") == "aten::cudnn_batch_norm_backward"]
    work = {one["args"]["correlation"]: one for one in events if one.get("cat") == "kernel"}
    for number, op in enumerate(ops, 10**6):
        call = next(
            one for one in events
            if one.get("cat") == "cuda_runtime" and one["tid"] == op["tid"] and op["ts"] <= one["ts"] < end(op)
            and one["args"]["correlation"] in work
        )  # fmt: skip
        kernel = work[call["args"]["correlation"]]
        events += [
            call | {"name": "cudaMemsetAsync", "ts": call["ts"] - 1, "dur": 0.9, "args": {"correlation": number}},
            kernel | {"name": "Memset (Device)", "cat": "gpu_memset", "ts": kernel["ts"] - 0.9, "dur": 0.8,
                      "args": kernel["args"] | {"correlation": number}},
        ]  # fmt: skip
    file = tmp_path / "memsets.json"
    file.write_text(json.dumps(document))
    trace = read(file)
    case = Case(trace, summarize(trace), graph_of(trace))
    added = [one for one in trace.work if one.kind == "memset" and one.args["correlation"] >= 10**6]
    after = fusion.fuse_pointwise(case).graph
    left = [one for one in added if after.dur[after.activity[id(one)]]]
    assert len(added) == len(ops) == 108
    assert len(left) <= len(added) / 4, "those beside kernels that nothing is fused with"


ADDS = "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, x>(int)"


def of_kernels(file: Path, kernels: Sequence[tuple[str, str, str, str]]) -> Path:
    """Write four steps that the GPU limits. kernels: what encloses the op, its category, the op, and the kernel."""
    events = []
    for step in range(4):
        start, first = 3000.0 * step, len(kernels) * step
        events.append(event(f"ProfilerStep#{step}", "user_annotation", start, 3000.0))
        for number, (around, category, op, name) in enumerate(kernels):
            at, launch = start + 10 + 70 * number, first + number + 1
            on_gpu = {"correlation": launch, "device": 0, "stream": 7}
            events += [
                event(around, category, at, 60.0),
                event(op, "cpu_op", at + 5, 40.0, **{"Input Dims": [[4096, 4096]], "Input type": ["float"]}),
                event("cudaLaunchKernel", "cuda_runtime", at + 10, 5.0, correlation=launch),
                event(name, "kernel", 30 + 100.0 * (first + number), 99.0, 7, **on_gpu) | {"pid": 0},
            ]
    file.write_text(json.dumps({"traceEvents": events}))
    return file


def test_a_compiled_model_beside_an_eager_optimizer_is_compiled(tmp_path):
    """Most of the time of pointwise kernels is the optimizer's, which torch.compile of the model does not compile."""
    eager = ("model", "user_annotation", "aten::add", ADDS)
    compiled = ("model", "user_annotation", "triton_poi_fused_add_0", "triton_poi_fused_add_0")
    optimizer = ("Optimizer.step#SGD.step", "user_annotation", "aten::_foreach_add_", ADDS)
    for kernels, is_proposed in (([eager] * 10 + [compiled] * 5, True), ([eager] * 5 + [compiled] * 10, False)):
        found = priced_changes(of_kernels(tmp_path / "trace.json", kernels + [optimizer] * 20))
        assert ("fuse_pointwise" in found) == is_proposed


def launch_quartile(events: Sequence[dict]) -> float:
    """Return the lower quartile (µs) of the calls that launch kernels."""
    kernels = {one["args"]["correlation"] for one in events if one.get("cat") == "kernel"}
    calls = (one for one in events if one.get("cat") in ("cuda_runtime", "cuda_driver"))
    return statistics.quantiles([one["dur"] for one in calls if one["args"].get("correlation") in kernels])[0]


def compiled_us(name: str) -> float:
    """Return the step that fuse_pointwise predicts, even if the change saves nothing."""
    trace = read(recording(name))
    summary = summarize(trace)
    case = Case(trace, summary, graph_of(trace, trace.steps[summary.typical_index], summary.recorded_step_us))
    return priced("fuse_pointwise", "", fuse_pointwise(case)).step_us_after


def test_a_compiled_batch_norm_counts_as_several_calls(monkeypatch):
    """The CPU limits this step, so each call of a batch norm makes the predicted step longer."""
    name = "resnet/tf32"
    monkeypatch.setattr(fusion, "MOSTLY_BATCH_NORM", 2)  # otherwise no CPU time is saved
    events = raw_events(name)
    ops = [one["name"] for one in events if re.fullmatch("aten::cudnn_batch_norm(_backward)?", one.get("name", ""))]
    in_a_step = len(ops) / len(raw_steps(events))
    assert in_a_step == 106 and ops.count("aten::cudnn_batch_norm") == len(ops) / 2
    after = compiled_us(name)
    for kernels in ("BATCH_NORM_KERNELS", "NORM_BACKWARD_KERNELS"):
        monkeypatch.setattr(prices, kernels, 1)
    with_one_call = compiled_us(name)
    more = (in_a_step / 2 * 2 + in_a_step / 2 * 3) * prices.CALL * launch_quartile(events)
    assert after - with_one_call == pytest.approx(more, rel=0.05)


def raw_events(name: str | Path) -> list[dict]:
    file = name if isinstance(name, Path) else recording(name)
    return json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]


@cache
def compiled_calls(name: str | Path) -> tuple[tuple[bool, float, float], ...]:
    """Return whether it is a Triton kernel, the time before it, and its own (µs) for each op in Inductor's code."""
    lanes, found = {}, []
    for one in raw_events(name):
        if one.get("cat") in ("cpu_op", "user_annotation"):
            lanes.setdefault(one["tid"], []).append(one)
    for lane in lanes.values():
        lane.sort(key=lambda one: (one["ts"], -one["dur"]))
        until, done = 0.0, None  # the end of Inductor's code, and of the last op in it
        for one in lane:
            if one["name"].startswith("## Call CompiledFxGraph"):
                until, done = end(one), None
            elif one["ts"] < until and (done is None or one["ts"] >= done):
                if done is not None:
                    found.append((one["name"].startswith("triton_"), one["ts"] - done, one["dur"]))
                done = end(one)
    return tuple(found)


COMPILED = ["trained", "batch_norm", "vit", "images", "unet", "llama", "encoder/bf16_compile"]
COMPILED = [name if "/" in name else f"{name}/compile" for name in COMPILED]
COMPILED += [SMALL_TRAIN / "mlp-compile.json.gz", SMALL_TRAIN / "encoder-compile.json.gz"]


def test_a_compiled_call_takes_at_most_about_as_many_launches_as_are_assumed():
    """The recordings' CPU speeds differ, and their times of a compiled call differ by two. Its launches do less."""
    launches, between = [], []
    for name in COMPILED:
        unit, calls = launch_quartile(raw_events(name)), compiled_calls(name)
        launches.append(statistics.fmean(before + own for triton, before, own in calls if triton) / unit)
        between.append(statistics.median(before for triton, before, _ in calls if not triton) / unit)
    assert min(launches) > 5
    assert max(launches) < prices.CALL < 1.2 * max(launches)
    assert min(between) > 0.9
    assert statistics.median(between) < prices.AROUND < max(between) < 3


def test_compiled_normalizations_have_about_as_many_kernels_as_are_assumed():
    names = [one["name"] for one in raw_events("batch_norm/compile") if one.get("cat") == "kernel"]
    eager = [one.get("name") for one in raw_events("batch_norm/eager")]
    backward = [name for name in names if "batch_norm_backward" in name]
    forward = [name for name in names if "batch_norm" in name and name not in set(backward)]
    for some, op, assumed in (
        (forward, "aten::cudnn_batch_norm", prices.BATCH_NORM_KERNELS),
        (backward, "aten::cudnn_batch_norm_backward", prices.NORM_BACKWARD_KERNELS),
    ):
        triton = sum(name.startswith("triton_") for name in some)
        assert triton / eager.count(op) == pytest.approx(assumed, rel=0.1)
    each = []
    for before, after in (
        (SMALL_TRAIN / "mlp-eager.json.gz", SMALL_TRAIN / "mlp-compile.json.gz"),
        (SMALL_TRAIN / "encoder-eager.json.gz", SMALL_TRAIN / "encoder-compile.json.gz"),
        ("encoder/bf16", "encoder/bf16_compile"),
        ("trained/eager", "trained/compile"),
    ):
        ops = sum(one.get("name") == "aten::native_layer_norm_backward" for one in raw_events(before))
        kernels = [one["name"] for one in raw_events(after) if one.get("cat") == "kernel"]
        triton = [name for name in kernels if name.startswith("triton_")]
        each.append(sum("layer_norm_backward" in name for name in triton) / ops)
    assert min(each) > 1.7
    assert max(each) == pytest.approx(prices.NORM_BACKWARD_KERNELS, rel=0.1)


def test_a_compiled_layer_norms_backward_counts_as_several_calls(monkeypatch):
    """The CPU limits this step. Nearly all of these ops launch two kernels in eager mode."""
    file = SMALL_TRAIN / "encoder-eager.json.gz"
    events = raw_events(file)
    (mark,) = (mark for mark in raw_steps(events) if mark["name"] == "ProfilerStep#2")
    inside = [one for one in events if one.get("ts") and mark["ts"] <= one["ts"] < end(mark)]
    ops = [one for one in inside if one["name"] == "aten::native_layer_norm_backward"]
    kernels = []
    for op in ops:
        below = [one for one in inside if op["ts"] < one["ts"] < end(op)]
        nested = [one for one in below if one["cat"] == "cpu_op"]  # ops count as calls of their own
        calls = [one["ts"] for one in below if one["name"] == "cudaLaunchKernel"]
        kernels.append(sum(not any(one["ts"] < ts < end(one) for one in nested) for ts in calls))
    after = of_a_committed_trace(file)["fuse_pointwise"].step_us_after
    monkeypatch.setattr(prices, "NORM_BACKWARD_KERNELS", 0)
    as_in_eager = priced_changes(file)["fuse_pointwise"].step_us_after
    more = sum(4 - count for count in kernels) * prices.CALL * launch_quartile(inside)
    assert kernels == [2] * 11 + [1]  # the input of the first normalization needs no gradient
    assert more > 1000
    assert after - as_in_eager == pytest.approx(more, rel=0.1)


def launches_of_a_compiled_call(file):
    """Return the CPU time of a compiled model's call and backward beside kernels, ops and parameters, in launches."""
    events = raw_events(file)
    unit, mark = launch_quartile(events), raw_steps(events)[1]
    ops = [
        one for one in events
        if one.get("cat") in ("cpu_op", "user_annotation", "cuda_runtime") and mark["ts"] < one["ts"] < end(mark)
    ]  # fmt: skip
    backward = [one for one in ops if one["name"] == "CompiledFunctionBackward"]
    calls = [one for one in ops if one["name"].startswith("Torch-Compiled Region")]
    took = sum(one["dur"] for one in calls + backward)
    for lookup in (one for one in ops if one["name"].startswith("TorchDynamo Cache Lookup")):
        took += end(lookup) - max(end(one) for one in ops if end(one) <= lookup["ts"] and one["tid"] == lookup["tid"])
    for code in (one for one in ops if one["name"].startswith("## Call CompiledFxGraph")):
        until = code["ts"]
        for one in sorted(ops, key=lambda one: (one["ts"], -one["dur"])):
            if one["tid"] == code["tid"] and until <= one["ts"] < end(code) and one is not code:
                until = end(one)
                is_triton = one["name"].startswith("triton_")
                took -= unit * prices.CALL if is_triton else one["dur"] + unit * prices.AROUND
    gradients = sum(one["name"] == "torch::autograd::AccumulateGrad" for one in ops)
    return (took / unit - gradients * prices.AROUND) / len(calls)


def test_a_call_of_a_compiled_model_takes_about_as_many_launches_as_are_assumed():
    """With many kernels it takes less, because the assumed time of a kernel is near the most that was seen."""
    files = SMALL_TRAIN / "mlp-compile.json.gz", ROOT / "benchmarks/pairs/knowledge_graph/compile.json.gz"
    fewest, most = sorted(map(launches_of_a_compiled_call, files))
    assert 20 < fewest < prices.TRAINED_REGION < most < 150


@pytest.mark.parametrize(
    ("before", "after"), [("trained/eager", "trained/compile"), ("encoder/bf16", "encoder/bf16_compile")]
)
def test_a_compiled_training_step_is_predicted_within_a_tenth_without_the_profiler(before, after):
    one = proposed(before)["fuse_pointwise"]
    assert one.step_us_after == pytest.approx(recorded_us(after), rel=0.25)
    assert one.unprofiled_step_us_after == pytest.approx(unprofiled_us(after), rel=0.1)


@pytest.mark.parametrize("model", ["mlp", "encoder"])
def test_compiling_small_models_is_predicted_within_a_fifth(model):
    """The rule was not fitted to these recordings when it had other figures, and promised too much for the encoder."""
    after = of_a_committed_trace(SMALL_TRAIN / f"{model}-eager.json.gz")["fuse_pointwise"].step_us_after
    assert after == pytest.approx(raw_us(SMALL_TRAIN / f"{model}-compile.json.gz"), rel=0.2)


@pytest.mark.parametrize("model", ["mlp", "encoder"])
def test_graphs_of_a_small_models_forward_and_backward_promise_less_for_each_parameter(model, monkeypatch):
    """What replays the graphs takes CPU time for each pass and for each gradient, and so does the loss."""
    file, graphed = (SMALL_TRAIN / f"{model}-{how}.json.gz" for how in ("eager", "graphed"))
    after = of_a_committed_trace(file)["cuda_graph"].step_us_after
    for launches in ("AROUND", "PASS"):
        monkeypatch.setattr(prices, launches, 0)
    without = priced_changes(file)["cuda_graph"].step_us_after
    events, measured_us = raw_events(file), raw_us(graphed)
    more = (100 + 2 * gradients_in_a_step(events)) * launch_quartile(events)
    assert after - without == pytest.approx(more, rel=0.15)
    assert without < 0.7 * measured_us and after == pytest.approx(measured_us, rel=0.15)


def test_a_pause_of_the_program_in_the_model_stays_when_it_is_compiled(tmp_path):
    """Each step pauses for 3 ms in its forward pass, in Python between two ops."""
    document = json.loads(gzip.decompress(recording("encoder/bf16").read_bytes()))
    events = document["traceEvents"]
    for mark in raw_steps(events):
        inside = [one["ts"] for one in events if one["name"] == "aten::linear" and mark["ts"] <= one["ts"] < end(mark)]
        paused(events, mark, sorted(inside)[len(inside) // 2], 3)
    file = tmp_path / "paused.json"
    file.write_text(json.dumps(document))
    before, after = (found["fuse_pointwise"] for found in (proposed("encoder/bf16"), priced_changes(file)))
    assert after.step_us_after - before.step_us_after == pytest.approx(3000, rel=0.1)


def test_a_part_of_the_model_that_is_compiled_already_stays_as_it_is(tmp_path):
    """Half of each forward pass is marked as Inductor's call, so its CPU time stays."""
    document = json.loads(gzip.decompress(recording("encoder/bf16").read_bytes()))
    events, marked = document["traceEvents"], []
    for mark in raw_steps(events):
        inside = [one for one in events if one["name"] == "aten::linear" and mark["ts"] <= one["ts"] < end(mark)]
        inside.sort(key=lambda one: one["ts"])
        first, last = inside[len(inside) // 4], inside[3 * len(inside) // 4]
        us = first["ts"] - 1, end(last) + 1
        marked.append(first | {"name": "## Call CompiledFxGraph x ##", "ts": us[0], "dur": us[1] - us[0], "args": {}})
    file = tmp_path / "marked.json"
    file.write_text(json.dumps(document | {"traceEvents": marked + events}))
    whole, half = (found["fuse_pointwise"].step_us_after for found in (proposed("encoder/bf16"), priced_changes(file)))
    longest, stays = max(one["dur"] for one in marked), statistics.median(one["dur"] for one in marked)
    assert stays > 5000
    # The rule takes the half's 5 ms and more for a third of its time at least, and never for more than all of it.
    assert stays / 3 < half - whole < longest


def test_a_slower_machines_compiled_calls_take_longer(tmp_path):
    """If everything takes twice as long, so does the predicted step."""
    document = json.loads(gzip.decompress(recording("encoder/bf16").read_bytes()))
    for one in document["traceEvents"]:
        if "ts" in one:
            one |= {"ts": 2 * one["ts"], "dur": 2 * one.get("dur", 0)}
    file = tmp_path / "slower.json"
    file.write_text(json.dumps(document))
    once, twice = (found["fuse_pointwise"].step_us_after for found in (proposed("encoder/bf16"), priced_changes(file)))
    assert twice == pytest.approx(2 * once, rel=0.02)


def test_torch_compile_of_a_model_fuses_no_gradients_that_are_added_or_zeroed(tmp_path):
    """Pointwise kernels in a row on equal tensors are a chain in the model, but not in the code around it."""
    for around, category, is_proposed in (
        ("aten::mish", "cpu_op", True),
        (ACCUMULATES, "cpu_op", False),
        ("Optimizer.zero_grad#SGD.zero_grad", "user_annotation", False),
    ):
        kernels = [(around, category, "aten::add_", ADDS)] * 40
        found = priced_changes(of_kernels(tmp_path / "trace.json", kernels))
        assert ("fuse_pointwise" in found) == is_proposed


def in_hip(event):
    return event | {"name": event["name"].replace("cuda", "hip")} if event.get("cat") == "cuda_runtime" else event


def is_mark(event):
    return str(event.get("name", "")).startswith("ProfilerStep")


ODD = {
    "no steps": lambda one: [e for e in one if not is_mark(e)],
    "steps of no length": lambda one: [e | {"dur": 0} if is_mark(e) else e for e in one],
    "kernels of no length": lambda one: [e | {"dur": 0} if e.get("cat") in GPU else e for e in one],
    "cut": lambda one: sorted(one, key=lambda e: e.get("ts", 0))[: len(one) * 2 // 3],
    "no shapes": lambda one: list(map(without_shapes, one)),
    "HIP": lambda one: list(map(in_hip, one)),
    "two GPUs": lambda one: [
        e | {"tid": 9, "args": e["args"] | {"device": 1}} if e.get("cat") in GPU and number % 2 else e
        for number, e in enumerate(one)
    ],
    "few launches": lambda one: [e for number, e in enumerate(one) if e.get("cat") != "cuda_runtime" or number % 3],
}


@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize(
    "name",
    [
        *("attention/naive", "copies/blocking", "decode/graph"),
        *(pytest.param(name, marks=pytest.mark.exhaustive) for name in ("selection/chosen", "small/loop")),
    ],
)
def test_changes_of_odd_traces_neither_fail_nor_make_the_step_longer(tmp_path, name, odd):
    document = json.loads(gzip.decompress(recording(name).read_bytes()))
    file = tmp_path / "odd.json"
    file.write_text(json.dumps(document | {"traceEvents": ODD[odd](document["traceEvents"])}))
    trace = read(file)
    graph = graph_of(trace)
    if isinstance(graph, Refused):
        return
    case = Case(trace, summarize(trace), graph)
    for change in (one for one in CHANGES if one.propose):
        proposal = change.propose(case)
        if proposal is not None:
            assert min(proposal.graph.dur) >= 0, change.name
            assert 0 <= proposal.graph.step_us() / proposal.shared <= 1.001 * graph.recorded_us, change.name


@pytest.fixture
def edited(tmp_path):
    """Return a function that gives the proposals for a recorded trace after a change of each event."""

    def priced(name, change):
        document = json.loads(gzip.decompress(recording(name).read_bytes()))
        file = tmp_path / "edited.json"
        file.write_text(json.dumps(document | {"traceEvents": list(map(change, document["traceEvents"]))}))
        return priced_changes(file)

    return priced


def renamed(old, new):
    return lambda one: one | {"name": one["name"].replace(old, new)} if old in str(one.get("name", "")) else one


def test_a_wait_for_the_number_of_different_values_cannot_be_dropped(edited):
    assert "remove_sync" in edited("selection/chosen", lambda one: one)
    assert "remove_sync" not in edited("selection/chosen", renamed("aten::nonzero", "aten::_unique2"))


@pytest.mark.exhaustive
def test_two_bytes_are_proposed_for_tf32_and_for_fp32_without_tf32(tmp_path):
    """A V100 has no TF32 and no bf16. The recorded fp32 and TF32 steps have the same 96 products."""
    assert "TF32" in proposed("encoder/tf32")["half_precision"].evidence
    assert "bfloat16" in proposed("encoder/tf32")["half_precision"].how
    assert not {"tf32", "half_precision"} & set(proposed("encoder/bf16"))
    # PyTorch's default is TF32 in convolutions alone. The one small product in fp32 does not decide.
    events = json.loads(gzip.decompress((CHANGED / "copies/prefetched.json.gz").read_bytes()))["traceEvents"]
    assert any("sgemm" in one["name"] or "f32f32_f32f32" in one["name"] for one in events if one.get("cat") == "kernel")
    assert (
        "convolutions" in (one := proposed("copies/prefetched")["half_precision"]).evidence and "TF32" in one.evidence
    )
    document = json.loads(gzip.decompress((CHANGED / "encoder/fp32.json.gz").read_bytes()))
    for device in document["deviceProperties"]:
        device["name"] = "Tesla V100-SXM2-16GB"
    file = tmp_path / "v100.json"
    file.write_text(json.dumps(document))
    one = priced_changes(file)["half_precision"]
    assert "float16" in one.how and "bfloat16" not in one.how
    assert "tf32" not in priced_changes(file)


def test_convolutions_that_a_library_computes_in_fp32_are_not_told_to_use_tf32_where_it_is_allowed(tmp_path):
    """Most of the Conformer's convolutions use TF32. Its matrix products, with a setting of their own, do not."""
    file = PAIRS / "conformer_ctc/base.json.gz"
    document = json.loads(gzip.decompress(file.read_bytes()))
    named = [one for one in document["traceEvents"] if one.get("cat") == "kernel" and "tf32" in one["name"]]
    assert named
    assert priced_changes(file)["tf32"].evidence.startswith("matrix products in fp32 run on CUDA cores: 262 kernels")
    other = tmp_path / "other.json"
    of_kernels = [one for one in document["traceEvents"] if one.get("cat") != "cpu_op"]  # as of a replayed graph
    other.write_text(json.dumps(document | {"traceEvents": of_kernels}))
    assert priced_changes(other)["tf32"].evidence.startswith("matrix products in fp32")
    for one in named:
        one["name"] = one["name"].replace("tf32", "f32")
    other.write_text(json.dumps(document))
    assert priced_changes(other)["tf32"].evidence.startswith("convolutions and matrix products in fp32")


def without_shapes(event):
    return event | {"args": {key: value for key, value in event.get("args", {}).items() if "Input" not in key}}


def test_rows_of_activations_and_kernels_for_aligned_rows_need_no_padding(edited):
    """The model's 5,461 features are odd. In the edited traces the features are even and the 8,191 rows are odd."""

    def swapped(one):
        dims = one.get("args", {}).get("Input Dims")
        if dims is None:
            return one
        sizes = {5461: 5464, 8192: 8191}
        other = [[sizes.get(size, size) for size in shape] if isinstance(shape, list) else shape for shape in dims]
        return one | {"args": one["args"] | {"Input Dims": other}}

    assert "align_shapes" not in edited("odd_width/odd", swapped)
    aligned = renamed("_align1", "_align8")
    assert "align_shapes" not in edited("odd_width/odd", aligned)


def conversions_us(file: Path | str) -> list[float]:
    """Return the time (µs) of cuDNN's conversions of layouts in each recorded step but the first."""
    events = raw_events(file)
    steps = [raw_work(events, mark) for mark in raw_steps(events)[1:]]
    return [sum(e["dur"] for e in work if re.search("nchwToNhwc|nhwcToNchw", e["name"])) for work in steps]


def test_compiled_convolutions_of_images_convert_no_layout(tmp_path):
    """The compiled recording has no conversion. In training, Inductor changes no layout where channels become few."""
    assert all(conversions_us("unet/contiguous")) and not any(conversions_us("unet/compile"))
    for file in (recording("unet/contiguous"), PAIRS / "super_resolution/base.json.gz"):
        told = of_a_committed_trace(file)["fuse_pointwise"].evidence
        time, unit = re.search(r"images stay in channels_last, which saves ([\d.]+) (ms|µs) of", told).groups()
        us = float(time) * {"ms": 1000, "µs": 1}[unit]
        assert min(conversions_us(file)) - 50 <= us <= max(conversions_us(file)) + 50

    few = PAIRS / "segmentation/base.json.gz"
    assert any(conversions_us(few)) and "channels_last" not in priced_changes(few)["fuse_pointwise"].evidence
    document = json.loads(gzip.decompress(few.read_bytes()))
    for one in document["traceEvents"]:
        if one.get("name") == "aten::convolution":
            out, into, *_ = one["args"]["Input Dims"][1]
            if 2 * out <= into:
                one["args"]["Input Dims"][1][1] = out  # as many channels as come out of it
    several = tmp_path / "several.json"
    several.write_text(json.dumps(document))
    assert "images stay in channels_last" in priced_changes(several)["fuse_pointwise"].evidence


def gradients_in_a_step(events: Sequence[dict]) -> float:
    given = sum(one.get("name") == "torch::autograd::AccumulateGrad" for one in events)
    return given / len(raw_steps(events))


@pytest.mark.parametrize(
    "name",
    small_first(
        [
            *("optimizer/fused", "convnet/fused", "trained/eager", "trained/compile", "gpt2/sdpa", "gpt2/padded"),
            *("gpt2/recompute", "encoder/bf16", "encoder/bf16_compile", "encoder/tf32"),
        ]
    ),
)
def test_a_fused_optimizers_step_takes_about_as_many_launches_as_are_assumed(name):
    events = raw_events(name)
    steps = [one["dur"] for one in events if one.get("name", "").startswith("Optimizer.step#")
             and one["cat"] == "user_annotation"]  # fmt: skip
    launches = prices.FUSED_STEP + prices.FUSED_TENSOR * gradients_in_a_step(events)
    assert 0.7 < statistics.median(steps) / (launches * launch_quartile(events)) < 1.7


@pytest.mark.exhaustive
def test_a_fused_optimizers_cpu_time_follows_the_number_of_gradients(edited):
    """The CPU limits this step. Backward gives each parameter its gradient by detaching it, or adds to an earlier one.

    If every second gradient is added to, the step has another backward pass, and half as many parameters.
    """
    name = "optimizer/forloop"
    events = raw_events(name)
    gradients, launch_us = gradients_in_a_step(events), launch_quartile(events)
    assert gradients == sum(one.get("name") == "aten::detach" for one in events) / len(raw_steps(events)) == 120
    numbers, add = itertools.count(), renamed("aten::detach", "aten::add_")

    def with_added_gradients(one):
        return add(one) if one.get("name") == "aten::detach" and next(numbers) % 2 else one

    without_gradients = renamed("torch::autograd::AccumulateGrad", "other")
    after = proposed(name)["fused_optimizer"].step_us_after
    half = edited(name, with_added_gradients)["fused_optimizer"].step_us_after
    unknown = edited(name, without_gradients)["fused_optimizer"].step_us_after
    assumed = (prices.CALL + prices.FUSED_TENSOR * gradients) * launch_us
    assert after - half == pytest.approx(prices.FUSED_TENSOR * gradients / 2 * launch_us, rel=0.1)
    assert after - unknown == pytest.approx(
        assumed - (prices.CALL + prices.FUSED_TENSOR * prices.PARAMETERS) * launch_us, rel=0.2
    )


@pytest.mark.exhaustive
def test_foreach_is_proposed_for_an_optimizer_without_a_fused_form(edited):
    assert "foreach=True" in edited("optimizer/forloop", renamed("AdamW.step", "RMSprop.step"))["fused_optimizer"].how
    assert "fused_optimizer" not in edited("optimizer/foreach", renamed("AdamW.step", "RMSprop.step"))


def test_no_cuda_graph_is_proposed_for_two_devices_or_collectives(edited):
    kernels = itertools.count()

    def on_two_devices(one):
        second = one.get("cat") == "kernel" and next(kernels) % 2
        return one | {"args": one["args"] | {"device": 1}} if second else one

    assert "cuda_graph" in edited("bert/eager", lambda one: one)
    collective = renamed("vectorized_layer_norm_kernel", "ncclDevKernel_AllReduce_Sum")
    assert "cuda_graph" not in edited("bert/eager", collective)
    assert "cuda_graph" not in edited("bert/eager", on_two_devices)


def ranks_of(run: str) -> list[Path]:
    return sorted(TWO_GPUS.glob(f"*_{run}_x2_rank*.json.gz"))


def proposed_to_ranks(run: str, alone: bool = False) -> dict:
    """Return the changes of all ranks; with `alone`, those that one rank's trace suggests by itself."""
    summary, _ = opened(ranks_of(run), View())
    of_ranks = {one.name for one in rank_changes.RANK_CHANGES}
    found = rank_changes.opportunities(summary, DEFAULT_LIMIT)
    return {one.change: one for one in found if (one.change not in of_ranks) == alone}


def test_a_proposal_for_all_ranks_predicts_the_step_recorded_after_the_change():
    found = proposed_to_ranks("ddp_slow1")
    assert next(iter(found)) == "balance_ranks"
    assert found["balance_ranks"].step_us == pytest.approx(max(map(raw_us, ranks_of("ddp_slow1"))), rel=0.01)
    # DistributedDataParallel with its default buckets runs on two ranks that compute the same.
    assert found["balance_ranks"].step_us_after == pytest.approx(max(map(raw_us, ranks_of("ddp"))), rel=0.05)


def test_fusing_the_kernels_of_a_cuda_graph_is_proposed():
    trace = read(CHANGED.parent / "05_llm/1x512_bf16_warm_eager_graph.json.gz")
    case = Case(trace, summarize(trace), graph_of(trace))
    assert case.summary.launches_graphs
    assert fuse_pointwise(case) is not None


@pytest.mark.exhaustive
def test_communication_that_saves_little_if_it_is_hidden_is_not_proposed():
    """Two GPUs reduce all gradients after the backward pass, and DDP's buckets save 1.7% of the step."""
    one_bucket, buckets = (max(map(raw_us, ranks_of(run))) for run in ("ddp_bucket10000", "ddp"))
    assert 0.98 < buckets / one_bucket < 1
    assert proposed_to_ranks("ddp_bucket10000") == {}


def test_ranks_that_lose_little_time_get_no_proposal():
    assert proposed_to_ranks("ddp") == {}


@pytest.mark.parametrize(
    "run", ["ddp", *(pytest.param(one, marks=pytest.mark.exhaustive) for one in ("fsdp", "ddp_slow1"))]
)
def test_the_rank_that_sets_the_pace_gets_the_proposals_of_its_own_trace(run):
    """No proposal makes the step shorter than the other rank's work, less what the change saves on both."""
    summary, _ = opened(ranks_of(run), View())
    pace = ranks.pace_setter(summary)
    (other,) = (one for one in summary.ranks if one is not pace)
    trace = read(Path(pace.trace))
    own = {one.change: (one, shorter) for one, shorter in each_priced(Case(trace, summarize(trace), graph_of(trace)))}
    found = proposed_to_ranks(run, alone=True)
    assert found and found.keys() <= own.keys()
    work = sorted(step.us - step.idle_not_launched_us for step in other.steps)[len(other.steps) // 2]
    work -= other.waited_exposed_us / len(other.steps)
    for name, one in found.items():
        before, shorter = own[name]
        assert one.step_us_after == pytest.approx(max(before.step_us_after, work - shorter))
        assert one.saves_us == one.step_us - one.step_us_after and one.evidence.startswith(f"rank {pace.rank}: ")


@pytest.mark.exhaustive
def test_ranks_are_priced_without_the_profiler_if_the_run_measured_it(tmp_path):
    """The time is that of the runs' own harness: a step that takes three quarters of the recorded one."""
    paths = []
    for path in ranks_of("ddp_slow1"):
        events = json.loads(gzip.decompress(path.read_bytes()))
        events["unprofiled_step_us"] = 0.75 * raw_us(path)
        paths.append(tmp_path / path.name.removesuffix(".gz"))
        paths[-1].write_text(json.dumps(events))
    summary, _ = opened(paths, View())
    found = {one.change: one for one in rank_changes.opportunities(summary, DEFAULT_LIMIT)}
    one = found["balance_ranks"]
    assert one.unprofiled_step_us == max(rank.unprofiled_step_us for rank in summary.ranks)
    assert one.unprofiled_step_us_after < one.unprofiled_step_us
    assert all(each.knows_unprofiled for each in found.values())


@pytest.mark.exhaustive
def test_balancing_is_proposed_for_ranks_with_a_slow_cpu():
    found = proposed_to_ranks("fsdp")
    assert set(found) == {"balance_ranks"} and proposed_to_ranks("fsdp", alone=True)["fused_optimizer"].saves_us > 3e3
    # A typical rate is assumed for compute beside the waits.
    assert "CPU" in found["balance_ranks"].how and found["balance_ranks"].basis == "bound"


def test_the_ranks_report_and_its_json_hold_the_opportunities(capsys):
    files = [str(file) for file in ranks_of("ddp_slow1")]
    assert cli.main([*files, "--json=all"]) == 0
    one, *_ = json.loads(capsys.readouterr().out)["opportunities"]
    assert {"change", "step_us", "step_us_after", "saves_us", "basis", "evidence", "try"} <= set(one)
    assert cli.main(files) == 0
    shown = capsys.readouterr().out
    assert shown.index("in short") < shown.index("try first") < shown.index("window, ms")
    assert "1 let rank 1 keep up with the others" in shown


@pytest.mark.parametrize("name", ["fsdp_rank0", "fsdp_rank1", "ddp_straggler_rank0"])
def test_without_recorded_ops_no_time_counts_as_python_and_no_chain_is_fused(name):
    file = TESTS / f"ranks/{name}.json.gz"
    events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    assert {one["name"] for one in events if one.get("cat") == "cpu_op"} == {"record_param_comms"}
    assert not {"python", "fuse_pointwise"} & set(of_a_committed_trace(file))
    waits = measured(file).idle_in
    assert "Python, between ops" not in waits
    unknown = sum(us for where, us in waits.items() if where.endswith("no recorded op or call"))
    assert name != "fsdp_rank0" or unknown == pytest.approx(24_420, rel=0.01)


def test_without_its_ops_a_trace_loses_the_proposals_that_need_them(edited):
    assert "python" in proposed("python/loop") and "fuse_pointwise" in proposed("pointwise/eager")
    for name, change in (("python/loop", "python"), ("pointwise/eager", "fuse_pointwise")):
        without_ops = edited(name, lambda one: one | {"ph": "M"} if one.get("cat") == "cpu_op" else one)
        assert change not in without_ops


@pytest.mark.exhaustive
def test_no_product_is_priced_below_the_shortest_one_recorded():
    """The LSTM's 400 products take 3.8 to 7 µs in fp32. TF32 products of a few MFLOP take 3.8 µs or more."""
    shortest = min(
        one["dur"]
        for file in (CHANGED / "convnet").glob("*.json.gz")
        for one in json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
        if one.get("cat") == "kernel" and ("s1688gemm" in one["name"] or "gemm_f32f32_tf32" in one["name"])
    )
    proposal = proposed("lstm/graph")["tf32"]
    assert proposal.step_us_after > 400 * shortest
    assert proposal.saves_us < 0.25 * proposal.step_us


def test_a_step_left_out_of_every_figure_does_not_veto_a_cuda_graph():
    file = TESTS / "models/bert_cold.json.gz"
    events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    launched = [len(raw_work(events, mark)) for mark in raw_steps(events)]
    assert launched == [168, 166, 166]
    assert measured(file).left_out == ["ProfilerStep#0"]
    cold, warm = (
        of_a_committed_trace(TESTS / f"models/bert_{name}.json.gz")["cuda_graph"] for name in ("cold", "warm")
    )
    assert "166 identical launches" in cold.evidence
    assert cold.step_us_after == pytest.approx(warm.step_us_after, rel=0.1)


@pytest.mark.parametrize("name", ["pinned/prefetched", "copies/prefetched"])
def test_a_cuda_graphs_inputs_are_not_priced_by_their_copy_to_the_gpu(name):
    file = recording(name)
    events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    shortest = min(one["dur"] for one in events if "HtoD" in one["name"] and one.get("cat") == "gpu_memcpy")
    trace = read(file)
    proposal = cuda_graph(Case(trace, summarize(trace), graph_of(trace)))
    # Three times the copy's time would be added to the busy time. Two times the first product's time is less.
    assert proposal.graph.step_us() - proposal.graph.recorded_us < shortest


def test_fusion_removes_no_cpu_time_of_a_training_step_with_outputs_of_unknown_size():
    file = TESTS / "misc.json.gz"
    names = {one["name"] for one in json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]}
    assert {"aten::nonzero", "aten::_unique2", "aten::embedding_dense_backward"} <= names
    assert "fuse_pointwise" not in of_a_committed_trace(file)  # the three chains take 4.6 µs of 2.1 ms too long
    assert "fuse_pointwise" in of_a_committed_trace(TESTS / "models/gpt2_train.json.gz")  # it only reads the loss


@pytest.mark.exhaustive
def test_launches_after_a_read_value_are_replayed_as_a_cuda_graph():
    file = CHANGED.parent / "05_llm/1x512_bf16_warm_eager_prefill_active2.json.gz"
    events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    mark = raw_steps(events)[-1]
    (read_value,) = (
        one for one in events if one.get("name") == "aten::is_nonzero" and mark["ts"] <= one["ts"] < end(mark)
    )
    calls = {
        one["args"]["correlation"]: one["ts"]
        for one in events
        if one.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in one.get("args", {})
    }
    launched = [calls[one["args"]["correlation"]] for one in raw_work(events, mark)]
    after = sum(start > end(read_value) for start in launched)
    one = of_a_committed_trace(file)["cuda_graph"]
    assert f"{after:,} of {len(launched):,} launches" in one.evidence and "aten::is_nonzero" in one.evidence
    assert one.step_us_after < one.step_us / 5
    assert one.step_us_after > sum(work["dur"] for work in raw_work(events, mark))


@pytest.mark.parametrize(("name", "op"), [("syncs/item", "aten::item"), ("selection/chosen", "aten::index")])
def test_a_wait_for_a_size_and_reads_between_few_launches_keep_cuda_graphs_out(name, op):
    """The trace does not show whether the program can do without them, so what graphs would save is conditional."""
    one = proposed(name)["cuda_graph"]
    events = raw_events(recording(name))
    marks = raw_steps(events)
    launched = len(raw_work(events, marks[len(marks) // 2]))
    assert one.conditional and one.evidence.startswith(f"the CPU waits in {op} ")
    captured, launches = re.search(r"([\d,]+) of ([\d,]+) launches could be replayed", one.evidence).groups()
    assert int(captured) <= int(launches) == launched
    kernels = sum(e["dur"] for e in raw_work(events, marks[len(marks) // 2]))
    assert kernels < one.step_us_after < one.step_us / 2


@pytest.mark.parametrize("name", ["bert/eager", "syncs/item"])
def test_a_step_of_twice_the_batch_takes_the_cpu_as_long(name):
    """The GPU waits for launches for most of these steps, so twice the work on the GPU hardly makes them longer."""
    one = proposed(name)["double_batch"]
    events = raw_events(recording(name))
    kernels = statistics.median(sum(e["dur"] for e in raw_work(events, mark)) for mark in raw_steps(events))
    assert one.basis == "bound"
    assert one.step_us / 2 <= one.step_us_after + 1 < one.step_us / 2 + kernels
    assert "double_batch" not in proposed("gpt2/sdpa"), "the GPU limits this step"
    assert "double_batch" not in proposed("python/loop"), "Python between the ops grows with the batch"


def test_a_blocking_copy_of_a_result_is_copied_to_pinned_memory_beside_the_next_step():
    file = TESTS / "blocking.json.gz"
    events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    work = raw_work(events, raw_steps(events)[1])
    (batch,) = (one for one in work if "HtoD" in one["name"])
    result, scalar = sorted((one for one in work if "DtoH" in one["name"]), key=lambda one: -one["dur"])
    assert "Pageable" in result["name"] and scalar["args"]["bytes"] == 4
    one = of_a_committed_trace(file)["overlap_copies"]
    assert one.basis == "bound" and "pin_memory=True" in one.how and "non_blocking=True" in one.how
    assert "1 copy of 67.1 MB from the GPU to pageable memory: 39.2 ms" in one.evidence
    # Both copies run one after the other beside the kernels: the batch as recorded, the result at the rate of pinned
    # memory.
    copies = batch["dur"] + result["args"]["bytes"] / 50e3
    assert one.step_us_after == pytest.approx(copies, rel=0.01)


def test_a_small_result_is_a_wait_and_no_copy_to_overlap(tmp_path):
    """The program reads one value in each step. A copy of 1 MB in its place could be overlapped."""
    document = json.loads(gzip.decompress((CHANGED / "syncs/end.json.gz").read_bytes()))
    results = [one for one in document["traceEvents"] if one.get("cat") == "gpu_memcpy" and "DtoH" in one["name"]]
    assert {one["args"]["bytes"] for one in results} == {2}, "a value in bf16"
    for size, overlaps in ((2, False), (2**20, True)):
        for one in results:
            one["args"]["bytes"] = size
        file = tmp_path / "copies.json"
        file.write_text(json.dumps(document))
        trace = read(file)
        assert (overlap_copies(Case(trace, summarize(trace), graph_of(trace))) is not None) is overlaps


@pytest.mark.exhaustive
def test_a_single_overhead_bound_step_without_synchronization_may_be_a_cuda_graph():
    """One step does not show that its launches repeat. The same program was recorded as a graph, too."""
    files = [CHANGED.parent / f"05_llm/32x512_bf16_warm_eager_{name}.json.gz" for name in ("active1", "graph")]
    events = json.loads(gzip.decompress(files[0].read_bytes()))["traceEvents"]
    (mark,) = raw_steps(events)
    one = of_a_committed_trace(files[0])["cuda_graph"]
    assert one.basis == "bound" and "identical" not in one.evidence
    assert f"{len(raw_work(events, mark)):,} launches" in one.evidence and "the trace has one step" in one.evidence
    assert one.step_us_after == pytest.approx(raw_us(files[1]), rel=0.3)


@pytest.mark.exhaustive
def test_a_single_step_with_a_wait_is_no_cuda_graph():
    file = TESTS / "models/qwen3_prefill_logits.json.gz"
    trace = read(file)
    (step,) = trace.steps
    assert any(op.name == "aten::is_nonzero" for op in step.walk())
    assert of_a_committed_trace(file)["cuda_graph"].conditional


def waits_in_every_step(name, op, copy, at, folder):
    """Write a recorded trace in which every step waits 300 µs for a copy, after a part (0 to 1) of its launches.

    op: the name of the op around the copy. copy: the name of the copy. As in torch, aten::copy_ makes the copy and then
    waits for the stream.
    """
    document = json.loads(gzip.decompress((CHANGED / f"{name}.json.gz").read_bytes()))
    events = document["traceEvents"]
    for number, mark in enumerate(raw_steps(events)):
        calls = sorted(
            one["ts"]
            for one in events
            if one.get("cat") == "cuda_runtime"
            and one["name"] == "cudaLaunchKernel"
            and mark["ts"] <= one["ts"] < end(mark)
        )
        ops = [one for one in events if one.get("cat") == "cpu_op" and mark["ts"] <= one["ts"] < end(mark)]
        outer, reached = [], 0
        for one in sorted(ops, key=lambda one: one["ts"]):
            if end(one) > reached:
                outer.append(one)
                reached = end(one)
        time = min(one["ts"] for one in outer if one["ts"] >= calls[int(at * (len(calls) - 1))] - 1e3 * (at == 0)) - 2
        for one in events:
            if one.get("ts", 0) > time:
                one["ts"] += 400
        mark["dur"] += 400
        thread = {"pid": mark["pid"], "tid": mark["tid"]}
        work = next(one for one in events if one.get("cat") == "kernel")
        correlation = 10**8 + number
        events += [
            event(op, "cpu_op", time + 5, 330) | thread,
            event("aten::copy_", "cpu_op", time + 6, 328) | thread,
            event("cudaMemcpyAsync", "cuda_runtime", time + 10, 310, correlation=correlation) | thread,
            event("cudaStreamSynchronize", "cuda_runtime", time + 325, 4, correlation=correlation + 5 * 10**7) | thread,
            event(copy, "gpu_memcpy", time + 15, 300, correlation=correlation, bytes=2_400_000, device=0)
            | {key: work[key] for key in ("pid", "tid")},
        ]
        events[-1]["args"]["stream"] = work["args"]["stream"]
    file = folder / "waits.json"
    file.write_text(json.dumps(document))
    return file


@pytest.mark.parametrize(
    ("op", "copy", "at", "captured"),
    [
        ("aten::to", "Memcpy HtoD (Pageable -> Device)", 0, "143 identical launches per step, no synchronization"),
        ("aten::to", "Memcpy HtoD (Pageable -> Device)", 0.5, "143 identical launches per step; only copies of inputs"),
        ("aten::to", "Memcpy DtoH (Device -> Pageable)", 0.5, " in 2 groups between the synchronizations of aten::to"),
        ("aten::nonzero", "Memcpy DtoH (Device -> Pageable)", 0.5, None),
    ],
)
def test_a_cuda_graph_stands_beside_copies_and_not_beside_waits_for_a_size(tmp_path, op, copy, at, captured):
    found = priced_changes(waits_in_every_step("vit/eager", op, copy, at, tmp_path))["cuda_graph"]
    assert found.conditional == (captured is None)
    if captured:
        assert captured in found.evidence
        graph = proposed("vit/eager")["cuda_graph"]
        assert graph.step_us_after + 300 < found.step_us_after < graph.step_us_after + 800, "the copy remains"


@pytest.mark.parametrize("copy", ["Memcpy DtoH (Device -> Pageable)", "Memcpy HtoD (Pageable -> Device)"])
def test_the_two_waiting_calls_of_one_copy_are_one_wait_for_a_result(tmp_path, copy):
    """The same calls for an input are no reason to keep a value on the GPU: overlap_copies has their advice."""
    trace = read(waits_in_every_step("vit/eager", "aten::to", copy, 0.5, tmp_path))
    case = Case(trace, summarize(trace), graph_of(trace))
    found = remove_sync(case)
    if "DtoH" in copy:
        assert found.evidence == "the CPU waits for the GPU in each step: aten::to"
    else:
        assert found is None and "pin_memory=True" in overlap_copies(case).how


@pytest.mark.parametrize("name", ["train_item", "misc"])
def test_a_cuda_graph_of_training_ends_with_backward(name):
    """Clipping, the optimizer and reads of values after backward stay outside of the graphs."""
    file = TESTS / f"{name}.json.gz"
    events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    calls = {one["args"]["correlation"]: one for one in events if one.get("cat") in ("cuda_runtime", "cuda_driver")}
    found, remains = priced_changes(file)["cuda_graph"], []
    for mark in raw_steps(events):
        inside = (one for one in events if one.get("cat") == "cpu_op" and mark["ts"] <= one["ts"] < end(mark))
        backward = max(end(one) for one in inside if one["name"].startswith("autograd::engine"))
        launches = [calls[one["args"]["correlation"]]["ts"] for one in raw_work(events, mark)]
        captured = sum(launch < backward for launch in launches)
        assert captured < len(launches)
        assert f"{captured} identical launches per step in forward and backward" in found.evidence
        remains.append(end(mark) - backward)
    assert found.step_us_after > min(remains), "the CPU's work after backward"


@pytest.mark.parametrize(
    ("before", "captured", "between"),
    [
        ("aten::linear", 22, ", no synchronization between them"),
        ("aten::layer_norm", 22, ", the CPU waits in cudaDeviceSynchronize once"),
        ("aten::ones_like", 21, "; the CPU waits only around the loss, in cudaDeviceSynchronize"),
        ("aten::item", 22, ", no synchronization between them"),
    ],
)
def test_only_a_wait_inside_forward_or_backward_is_dropped_for_the_graphs(tmp_path, before, captured, between):
    """Each step calls torch.cuda.synchronize() before forward, in it, before backward, or after the optimizer."""
    document = json.loads(gzip.decompress((TESTS / "train_item.json.gz").read_bytes()))
    events = document["traceEvents"]
    for number, mark in enumerate(raw_steps(events)):
        ops = [one for one in events if one.get("cat") == "cpu_op" and mark["ts"] <= one["ts"] < end(mark)]
        starts = [one["ts"] for one in ops if one["name"] == before]
        time = max(starts) if before == "aten::item" else min(starts)
        paused(events, mark, time, 1)
        call = event("cudaDeviceSynchronize", "cuda_runtime", time + 50, 900, correlation=10**8 + number)
        events.append(call | {"pid": mark["pid"], "tid": mark["tid"]})
    file = tmp_path / "waits.json"
    file.write_text(json.dumps(document))
    found = priced_changes(file)["cuda_graph"]
    assert found.title.startswith("drop synchronizations") is (before == "aten::layer_norm")
    assert f"{captured} identical launches per step in forward and backward{between}" in found.evidence


def test_an_op_that_launches_everything_and_then_waits_is_no_cuda_graph(tmp_path):
    """A library's op launches its kernels itself and synchronizes at its end, so it cannot be captured."""
    events = []
    for step in range(3):
        start = 1000 * step
        events += [
            event(f"ProfilerStep#{step}", "user_annotation", start, 990),
            event("library::step", "cpu_op", start, 980),
        ]
        for number in range(60):
            launch, link = start + 10 * number, {"correlation": 100 * step + number}
            events += [
                event("cudaLaunchKernel", "cuda_runtime", launch, 5, **link),
                event("kernel", "kernel", launch + 8, 2, 7, device=0, stream=7, **link),
            ]
        events.append(event("cudaStreamSynchronize", "cuda_runtime", start + 600, 5, correlation=100 * step + 60))
    file = tmp_path / "library.json"
    file.write_text(json.dumps({"traceEvents": events}))
    assert "cuda_graph" not in priced_changes(file)


@pytest.mark.parametrize("inside", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
def test_a_programs_own_synchronization_is_named_by_its_call(tmp_path, inside):
    """The copy of waits_in_every_step becomes a call of torch.cuda.synchronize(), which no op contains."""
    file = waits_in_every_step("vit/eager", "aten::to", "Memcpy DtoH (Device -> Pageable)", 0.5, tmp_path)
    if not inside:
        document = json.loads(file.read_bytes())
        ours = {one["args"]["correlation"] for one in document["traceEvents"] if one["name"] == "cudaMemcpyAsync"}
        added = {("aten::to", 330), ("aten::copy_", 328), ("cudaStreamSynchronize", 4)}
        document["traceEvents"] = [
            one | {"name": "cudaDeviceSynchronize"} if one["name"] == "cudaMemcpyAsync" else one
            for one in document["traceEvents"]
            if (one["name"], one.get("dur")) not in added
            and not (one.get("cat") == "gpu_memcpy" and one["args"]["correlation"] in ours)
        ]
        file.write_text(json.dumps(document))
    one = priced_changes(file)["remove_sync"]
    assert ("cudaDeviceSynchronize" in one.evidence and "drop torch.cuda.synchronize()" in one.how) is not inside
    assert ("aten::to" in one.evidence and "keep the value on the GPU" in one.how) is inside
    assert one.saves_us == pytest.approx(310, rel=0.1)


def test_the_cpu_time_that_compiled_code_saves_is_said():
    """Nearly all of this change's saving is CPU time, which the kernels' times do not show."""
    eager, compiled = recording("encoder/bf16"), recording("encoder/bf16_compile")
    one = priced_changes(eager)["fuse_pointwise"]
    saved_ms = float(re.search(r"; compiled code takes ([\d.]+) ms less CPU time$", one.evidence)[1])
    assert saved_ms * 1e3 == pytest.approx(one.saves_us, rel=0.02), "the CPU limits the step before and after"
    # On the thread that launches forward, the time in which no call waits for the GPU.
    worked = []
    for path in (eager, compiled):
        events = raw_events(path)
        marks = raw_steps(events)
        waits = [e for e in events if "Synchronize" in str(e.get("name")) and e.get("cat") == "cuda_runtime"]
        waited = [sum(e["dur"] for e in waits if mark["ts"] <= e["ts"] < end(mark)) for mark in marks]
        worked.append(statistics.median(mark["dur"] - us for mark, us in zip(marks, waited, strict=True)) / 1e3)
    assert 0.5 * (worked[0] - worked[1]) < saved_ms < 1.5 * (worked[0] - worked[1])


@pytest.mark.parametrize(
    "name", ["vit/eager", "decode/eager", "batch_norm/eager", "optimizer/forloop", "experts/loop", "syncs/item"]
)
def test_a_single_large_step_is_replayed_like_several(name, monkeypatch):
    trace, path = read(recording(name)), recording(name)
    of_several = {one.change: one.share for one in proposals(path)}
    monkeypatch.setattr(graph_module, "SINGLE", 1)
    summary = summarize(trace)
    graph = graph_of(trace, trace.steps[summary.typical_index])
    assert len(graph.trace.steps) == 1 < len(trace.steps)
    of_one = {one.change: one.share for one in opportunities(trace, summary)}
    assert of_one == pytest.approx(of_several, abs=0.02) and of_one


def test_the_likely_share_is_that_of_the_known_step_or_the_middle_of_the_range():
    one = Opportunity("x", "X", 100.0, 60.0, 40.0, "replay", "", "")
    assert one.likely_share == pytest.approx(0.4)
    estimated = replace(one, estimated_savings=(0.1, 0.3))
    assert estimated.likely_share == pytest.approx(0.2)
    known = replace(estimated, unprofiled_step_us=50.0, unprofiled_step_us_after=45.0)
    assert known.likely_share == pytest.approx(0.1)
    # The changes are in the order of these shares; what a program may not be able to do counts half.
    perhaps = replace(one, change="y", conditional=True, step_us_after=70.0, saves_us=30.0)
    assert worth_showing([perhaps, one, estimated]) == (one, estimated, perhaps)
