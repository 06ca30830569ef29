"""What a change saves without the profiler, where only the recorded step is known."""

import gzip
import itertools
import json
import re
import types
from pathlib import Path

import msgspec
import pytest
from raw_events import event
from references import CHANGES, ROOT, opened, proposals, recording, small_first
from test_later_workloads import edited, without_tf32
from test_opportunities import unprofiled_us

from tracereader import cli
from tracereader.changes import precision
from tracereader.changes.catalogue import CHANGES as CHANGES_OF_ALL
from tracereader.changes.catalogue import opportunities
from tracereader.changes.context import Case
from tracereader.figures import summarize
from tracereader.findings import recording as recordings
from tracereader.replay import graph_of
from tracereader.replay.changes import step_us_at
from tracereader.show import opportunities as shown
from tracereader.show.text import console
from tracereader.trace import read

# Steps that the CPU limits while they are recorded, so that their time without the profiler is an estimate.
HIDDEN = [
    ("encoder/bf16", "fuse_pointwise", "encoder/bf16_compile"),
    ("gpt2/recompute", "no_recompute", "gpt2/sdpa"),
    ("vit/eager", "cuda_graph", "vit/graph"),
    ("bert/eager", "cuda_graph", "bert/graph"),
    ("lstm/cells", "cuda_graph", "lstm/graph"),
    ("batch_norm/eager", "cuda_graph", "batch_norm/graph"),
    ("convnet/forloop", "fused_optimizer", "convnet/fused"),
    ("convnet/fused", "cuda_graph", "convnet/graph"),
]


# Steps that the GPU limits while they are recorded. After the change, the recorded CPU limits them.
LIMITED_THEN = [
    ("attention/naive", "fused_attention", "attention/sdpa"),
    ("encoder/fp32", "tf32", "encoder/tf32"),
]

# Steps that the GPU limits while they are recorded, and that wait for launches for some of their time.
IDLE_LESS = [
    ("gpt2/sdpa", "align_shapes", "gpt2/padded"),
    ("llama/sdpa", "fuse_pointwise", "llama/compile"),
    ("trained/eager", "fuse_pointwise", "trained/compile"),
]


def without_the_measured_step(name):
    """Return a recording and its summary, as if the program had not timed its steps without the profiler."""
    trace, summary = opened(name if isinstance(name, Path) else recording(name))
    assert summary.unprofiled_step_us
    return trace, msgspec.structs.replace(summary, unprofiled_step_us=None)


def widened(least, most):
    """Return a range of savings if the step after the change takes 20% more or less; the replay is off by 2%."""
    return max(0, 1 - 1.2 * (1 - least) - 0.02), min(1, 1 - 0.8 * (1 - max(0, most)) + 0.02)


def found_by_estimate(name):
    return {one.change: one for one in opportunities(*without_the_measured_step(name))}


@pytest.mark.parametrize(("before", "change", "after"), small_first(HIDDEN))
def test_the_measured_saving_lies_in_the_estimated_range(before, change, after):
    one = found_by_estimate(before)[change]
    low, high = one.estimated_savings
    measured = 1 - unprofiled_us(after) / unprofiled_us(before)
    assert low <= measured <= high
    assert one.unprofiled_step_us is None


def test_the_estimated_range_is_no_bound():
    """Beside busy workers, the main process's own ops take longer than alone."""
    low, high = found_by_estimate("loader/inline")["data_loader"].estimated_savings
    measured = 1 - unprofiled_us("loader/workers") / unprofiled_us("loader/inline")
    assert low - 0.15 < measured < low < high


@pytest.mark.parametrize("name", ["encoder/bf16", "convnet/fused"])
def test_estimates_are_the_savings_at_both_ends_and_their_middle_decides_the_order(name):
    trace, summary = without_the_measured_step(name)
    ends = recordings.estimate_us(summary)
    at_ends = [opportunities(trace, msgspec.structs.replace(summary, unprofiled_step_us=us)) for us in ends]
    of_ends = [{one.change: one.share for one in some} for some in at_ends]
    # A step that the GPU limits at one end does not show there how much CPU time it needs.
    ranges = {one.change for some in at_ends for one in some if one.replayed_savings}
    found = opportunities(trace, summary)
    assert len(found) > len(ranges)
    for one in found:
        if one.change in ranges:
            continue
        both = [shares.get(one.change, 0.0) for shares in of_ends]  # a small saving is not in a report
        assert one.replayed_savings == pytest.approx((min(both), max(both)), abs=0.02)
        assert one.estimated_savings == pytest.approx(widened(*one.replayed_savings))
    middles = [sum(one.replayed_savings or one.estimated_savings) for one in found]
    assert all(before >= after for before, after in itertools.pairwise(middles))


def test_changes_of_the_gpus_work_are_named_although_they_do_not_shorten_the_recorded_step():
    """The pointwise kernels and the matrix products limit this step only without the profiler."""
    file = ROOT / "tests/traces/h100/strides/transposed.json.gz"
    _, summary = opened(file)
    hidden = [one for one in proposals(file) if one.share < 0.02]
    assert hidden and all(one.estimated_savings[1] > 0.04 for one in hidden)
    assert summary.waits_for == "overhead"


def test_a_step_of_little_more_than_the_gpus_time_does_not_show_how_much_cpu_time_it_needs():
    """Replays with little and with much CPU time explain such a step: lora_tuning's, too, which TF32 made 31% shorter.

    The range matters to changes of the GPU's work only. A step of far more than the GPU's time shows its CPU time.
    """
    found = {one.change: one for one in proposals(CHANGES / "encoder/bf16.json.gz")}
    low, high = found.pop("fuse_pointwise").estimated_savings
    assert low < 1 - unprofiled_us("encoder/bf16_compile") / unprofiled_us("encoder/bf16") < high
    assert found and all(one.estimated_savings is None for one in found.values())
    found = proposals(ROOT / "benchmarks/pairs/convnext_training/base.json.gz")
    assert found and all(one.estimated_savings is None for one in found)


@pytest.mark.parametrize("name", small_first(["vit/eager", "convnet/forloop"]))
def test_where_the_cpu_limits_the_measured_step_two_processes_differ(name):
    found = proposals(CHANGES / f"{name}.json.gz")
    assert len(found) > 1
    for one in found:
        saved = 1 - one.unprofiled_step_us_after / one.unprofiled_step_us
        assert one.unprofiled_step_us == pytest.approx(unprofiled_us(name)) and one.replayed_savings is None
        assert one.estimated_savings == pytest.approx(widened(saved, saved))


def test_a_step_that_the_gpu_limits_does_not_show_its_cpu_time():
    """In two bytes, the CPU may limit this step. How much time it needs then is a range, and so is the saving."""
    trace, summary = opened(recording("resnet/fp32"))
    graph = graph_of(trace, trace.steps[summary.typical_index], summary.recorded_step_us)
    changed = precision.half_precision(Case(trace, summary, graph)).graph
    least, most = recordings.cpu_shares(summary, graph.cpu_us)
    one = next(one for one in opportunities(trace, summary) if one.change == "half_precision")
    after = [step_us_at(changed, share) / step_us_at(graph, share) for share in (least, most)]
    assert summary.waits_for in ("gpu", "compute", "memory") and after[0] < after[1]
    assert one.replayed_savings == pytest.approx((1 - after[1], 1 - after[0]), abs=0.01)


@pytest.mark.parametrize(
    ("program", "change", "saved"),
    [("nucleus_sampling", "largest_first", 0.554), ("item_embeddings", "sparse_gradients", 0.522)],
)
def test_where_the_run_measured_the_cpus_time_the_range_of_a_saving_is_narrower(program, change, saved):
    """These programs of benchmarks/pairs ran on an H200, before and after the change, each in two processes."""
    file = ROOT / f"tests/traces/h200/cpu_time/{program}.json.gz"
    trace, summary = opened(file)
    stored = json.loads(gzip.decompress(file.read_bytes()))
    assert summary.unprofiled_cpu_us == stored["unprofiled_cpu_us"] < 0.5 * stored["unprofiled_step_us"]
    one = next(one for one in opportunities(trace, summary) if one.change == change)
    low, high = one.estimated_savings
    assert round(low, 2) <= round(saved, 2) <= round(high, 2) and one.share == pytest.approx(saved, abs=0.06)
    unknown = msgspec.structs.replace(summary, unprofiled_cpu_us=None)
    least, most = next(one for one in opportunities(trace, unknown) if one.change == change).estimated_savings
    assert high - low < 0.6 * (most - least)
    graph = graph_of(trace, trace.steps[summary.typical_index], summary.recorded_step_us)
    share = summary.unprofiled_cpu_us / graph.cpu_us
    assert recordings.cpu_shares(summary, graph.cpu_us) == pytest.approx((0.8 * share, 1.2 * share))


@pytest.mark.parametrize(
    ("of_cpu", "of_gpu", "waits", "limit", "said"),
    [
        (0.6, 0.95, True, "gpu", "950.0 µs (95%) and the CPU needs 600.0 µs: GPU-bound."),
        (0.95, 0.7, False, "overhead", "700.0 µs (70%) and the CPU needs nearly all: still overhead-bound."),
        (0.95, 0.7, True, None, "700.0 µs (70%): GPU-bound."),  # it may wait for the GPU
        (0.95, 0.95, False, None, "950.0 µs (95%): GPU-bound."),
        (0.6, 0.7, False, None, "700.0 µs (70%): GPU-bound."),
        (None, 0.7, False, None, "700.0 µs (70%): GPU-bound."),
    ],
)
def test_what_takes_nearly_all_of_a_step_limits_it_without_the_profiler(of_cpu, of_gpu, waits, limit, said):
    """Where both do, or neither, the one that is busy may have been faster or slower for a moment."""
    training = types.SimpleNamespace(syncs=("aten::item",) * waits)
    summary = types.SimpleNamespace(
        waits_for="overhead", gpu_us=1000.0 * of_gpu, unprofiled_step_us=1000.0, training=training,
        unprofiled_cpu_us=of_cpu and 1000.0 * of_cpu, recorded_step_us=1400.0, steady=None,
    )  # fmt: skip
    assert recordings.limit_without(summary) == limit
    assert recordings.changes_the_regime(summary) == (limit != "overhead")
    told = f"Without the profiler the step takes 1.0 ms, of which the GPU is busy {said}"
    assert recordings.unprofiled(summary) == told


@pytest.mark.parametrize(("times", "shows_it"), [(1.04, False), (1.15, True)])
def test_a_step_that_takes_hardly_longer_than_its_work_on_the_gpu_does_not_show_its_cpu_time(tmp_path, times, shows_it):
    """BERT in fp32 took 36.4 ms on an H200, and 35.2 replayed with hardly any CPU time. TF32 was not proposed."""
    trace, summary = opened(edited(ROOT / "benchmarks/pairs/segmentation/base.json.gz", tmp_path, without_tf32))
    graph = graph_of(trace, trace.steps[summary.typical_index], summary.recorded_step_us)
    known = times * step_us_at(graph, 1 / recordings.MOST_TIMES)
    found = {
        one.change: one for one in opportunities(trace, msgspec.structs.replace(summary, unprofiled_step_us=known))
    }
    assert ("tf32" in found) == (not shows_it) == (found["channels_last"].replayed_savings is not None)


def test_there_is_no_estimate_where_recording_hides_nothing():
    """Without the profiler this step is certainly GPU-bound, as it is with it. A compiled one may not be."""
    found = found_by_estimate("unet/contiguous")
    assert [name for name, one in found.items() if one.estimated_savings is not None] == ["fuse_pointwise"]
    low, high = found["fuse_pointwise"].estimated_savings
    assert low <= 1 - unprofiled_us("unet/compile") / unprofiled_us("unet/contiguous") <= high


@pytest.mark.parametrize(("before", "change", "after"), small_first(IDLE_LESS))
def test_a_step_that_the_gpu_limits_is_idle_for_less_time_without_the_profiler(before, change, after):
    """Recording makes launches take longer, so it hides savings on the GPU, and shows savings of launches."""
    _, summary = without_the_measured_step(before)
    one = found_by_estimate(before)[change]
    measured = 1 - unprofiled_us(after) / unprofiled_us(before)
    low, high = one.estimated_savings
    assert low <= measured <= high
    assert summary.waits_for in ("gpu", "compute", "memory") and recordings.is_idle_less(summary)
    assert recordings.unprofiled(summary) == recordings.IDLE_LESS
    assert not recordings.unprofiled(opened(recording(before))[1]), "that step is measured"


@pytest.mark.parametrize(("before", "change", "after"), small_first(LIMITED_THEN))
def test_a_change_after_which_the_cpu_limits_the_step_saves_more_without_the_profiler(before, change, after):
    trace, summary = without_the_measured_step(before)
    assert not recordings.recording_matters(summary)
    found = found_by_estimate(before)
    measured = 1 - unprofiled_us(after) / unprofiled_us(before)
    low, high = found[change].estimated_savings
    assert low <= measured <= high and found[change].share < measured
    case = Case(trace, summary, graph_of(trace, trace.steps[summary.typical_index]))
    for one in (change for change in CHANGES_OF_ALL if change.propose):
        if (proposal := one.propose(case)) is not None and one.name in found:
            on_cpu, on_gpu = proposal.graph.lanes_us
            assert (found[one.name].estimated_savings is not None) == (on_cpu > on_gpu)


@pytest.mark.parametrize("launches", [5, 500])
def test_a_pause_of_the_program_is_as_long_without_the_profiler(tmp_path, launches):
    """The GPU is idle for 12 ms of a step. Recording adds 40 µs at most to a step of five launches."""
    events, correlation = [], itertools.count()
    for number in range(4):
        begin = 1_000 + 112_000 * number
        events.append(event(f"ProfilerStep#{number}", "user_annotation", begin, 112_000))
        for place in range(launches):
            at, number_of_one, us = begin + 12_000 + 20 * place, next(correlation), 100_000 / launches
            events.append(event("aten::mm", "cpu_op", at, 15))
            events.append(event("cudaLaunchKernel", "cuda_runtime", at + 2, 8, correlation=number_of_one))
            start = begin + 12_020 + us * place
            events.append(event("gemm", "kernel", start, us, 7, device=0, stream=7, correlation=number_of_one))
        events.append(event("cudaDeviceSynchronize", "cuda_runtime", begin + 12_000 + 20 * launches, 0))
        events[-1]["dur"] = begin + 112_000 - events[-1]["ts"]
    file = tmp_path / "pause.json"
    file.write_text(json.dumps({"traceEvents": events}))
    summary = summarize(read(file))
    assert summary.waits_for == "gpu" and 0.1 < summary.idle_share < 0.12
    assert recordings.is_idle_less(summary) == (launches * 2 * 7.9 > 0.03 * 112_000)


@pytest.mark.parametrize("name", ["resnet/tf32", "gpt2/eager_attention", *(row[0] for row in IDLE_LESS)])
def test_the_measured_step_is_one_that_the_estimate_allows(name):
    """Without the profiler the CPU needs less time for each call, by as much as other steps have shown."""
    trace, summary = without_the_measured_step(name)
    graph = graph_of(trace, trace.steps[summary.typical_index], summary.recorded_step_us)
    shortest, longest = (one.step_us for one in Case(trace, summary, graph).estimates)
    assert 0.98 * shortest <= unprofiled_us(name) <= 1.02 * longest < 1.02 * summary.recorded_step_us
    assert shortest < longest and summary.gpu_us <= 1.01 * shortest


def test_a_cpu_that_falls_behind_makes_savings_of_launches_uncertain_although_the_gpu_is_never_idle():
    """The GPU still has work of earlier steps, so the step's time while it is recorded is the CPU's."""
    _, summary = without_the_measured_step("trained/eager")
    busy = msgspec.structs.replace(
        summary.steady, idle_not_launched_us=0.0, busy_us=summary.steady_us, idle_us=0.0, idle_launched_us=0.0
    )
    gpu_us = summary.steady_us / len(summary.steady_steps)
    for longer, matters in ((1.0, False), (1.02, False), (1.04, True)):
        one = msgspec.structs.replace(summary, steady=busy, recorded_step_us=longer * gpu_us)
        assert recordings.recording_matters(one) is matters and not recordings.is_idle_less(one)


def test_the_answer_says_why_savings_are_estimated(capsys, tmp_path):
    document = json.loads(gzip.decompress(recording("gpt2/sdpa").read_bytes()))
    del document["unprofiled_step_us"]
    file = tmp_path / "not_measured.json"
    file.write_text(json.dumps(document))
    assert cli.main([str(file), "--only", "short,try"]) == 0
    said = capsys.readouterr().out
    assert recordings.IDLE_LESS in " ".join(said.split()) and re.search("^try first .*est. saving$", said, re.M)


def test_the_replay_of_cuda_graphs_has_no_such_estimate():
    """Recording makes the launch of a graph longer, too, and the trace does not show by how much."""
    _, summary = without_the_measured_step("batch_norm/graph")
    gpu = summary.steady
    assert summary.waits_for == "gpu" and gpu.idle_not_launched_us > 0.03 * summary.steady_us
    assert not recordings.is_idle_less(summary)


def test_the_table_shows_the_range_and_the_reason_what_is_saved_while_recorded(capsys):
    trace, summary = without_the_measured_step("convnet/fused")
    found = opportunities(trace, summary)
    shown.show(console(), found, everything=True)
    said = capsys.readouterr().out
    assert "est. saving" in said.splitlines()[0] and "unprofiled" not in said
    one = next(one for one in found if one.change == "cuda_graph")
    low, high = (f"{share:.0%}" for share in one.estimated_savings)
    assert f"{low.removesuffix('%')} to {high}" in said
    assert f"While recorded it saves {one.saves_us / one.step_us:.0%}." in " ".join(said.split())


def test_json_has_the_range(capsys):
    path = ROOT / "tests/traces/h100/small_train/mlp-graphed.json.gz"
    assert cli.main([str(path), "--json", "--only", "try"]) == 0
    found = json.loads(capsys.readouterr().out)["opportunities"]
    assert any(one["estimated_savings"] for one in found)


def test_a_table_with_recorded_and_estimated_savings_marks_the_estimated_ones(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    found = opportunities(*without_the_measured_step("encoder/fp32"))
    found = [next(one for one in found if (one.estimated_savings is None) is known) for known in (False, True)]
    shown.show(console(), found, everything=False)
    first, *rows = capsys.readouterr().out.splitlines()
    low, high = (f"{share:.0%}" for share in found[0].estimated_savings)
    assert re.search(r" saves$", first) and rows[0].endswith(f" est. {low.removesuffix('%')} to {high}")
    assert rows[-1].endswith(f" about {found[1].share:.0%}") and max(map(len, [first, *rows])) <= 80
