"""Promises that came to nothing: what the rules say of such programs now, from raw events of benchmarks/pairs.

Without the profiler the steps took, before and after the change: character_model 29.2 and 29.1 ms (TF32), 25.2 ms
(fused attention), 25.2 ms (compiled); pair_representation 3.46 and 4.11 ms (fused attention), 2.71 ms (TF32).
"""

import gzip
import json
import math
import re
from statistics import median

import pytest
from conftest import ROOT
from raw_events import end, raw_steps
from references import recording
from test_later_workloads import edited, without_shapes
from test_opportunities import priced_changes, proposed, raw_events, recorded_us

from tracereader.changes import attention, copies, fusion, layout, precision, prices
from tracereader.changes.catalogue import opportunities
from tracereader.changes.context import Case
from tracereader.figures import summarize
from tracereader.figures.hardware import common_peaks
from tracereader.replay import graph_of
from tracereader.replay.changes import step_us_at
from tracereader.trace import read

PAIRS = ROOT / "benchmarks/pairs"
CHANGES = ROOT / "traces/reference/nvidia-h200/changes"
RESULTS = json.loads((PAIRS / "results.json").read_text())


def base(program):
    return PAIRS / program / "base.json.gz"


def case_of(file):
    trace = read(file)
    summary = summarize(trace)
    return Case(trace, summary, graph_of(trace, trace.steps[summary.typical_index], summary.recorded_step_us))


def measured_us(program, variant):
    return mean_us(RESULTS[program][variant]["runs"])


def mean_us(runs):
    return sum(run["median_us"] for run in runs) / len(runs)


def saved(program, variant):
    """Return the share that a variant saved of the base, or of the base of its own if it was measured later."""
    row = RESULTS[program][variant]
    return 1 - mean_us(row["runs"]) / mean_us(row.get("base_runs", RESULTS[program]["base"]["runs"]))


@pytest.mark.parametrize(("program", "variant", "change"), [
    ("character_model", "tf32", "tf32"), ("character_model", "sdpa", "fused_attention"),
    ("character_model", "compile", "fuse_pointwise"), ("pair_representation", "tf32", "tf32"),
])  # fmt: skip
def test_a_measured_step_that_the_gpu_limits_does_not_show_how_much_cpu_time_it_needs(program, variant, change):
    case = case_of(base(program))
    step = case.summary.unprofiled_step_us
    assert case.summary.waits_for == "overhead" and case.summary.gpu_us > 0.9 * step
    one = next(one for one in opportunities(case.trace, case.summary) if one.change == change)
    low, high = one.estimated_savings
    assert low <= 1 - measured_us(program, variant) / measured_us(program, "base") <= high
    assert one.unprofiled_step_us_after == pytest.approx(step * (1 - sum(one.replayed_savings) / 2))


def test_faster_products_save_nothing_if_the_cpu_needs_the_whole_step():
    case = case_of(base("character_model"))
    least, most = case.estimates_after(precision.tf32(case).graph)
    assert most.factor * case.graph.cpu_us == pytest.approx(case.summary.unprofiled_step_us)
    assert step_us_at(precision.tf32(case).graph, most.factor) > case.summary.unprofiled_step_us
    tf32 = next(one for one in opportunities(case.trace, case.summary) if one.change == "tf32")
    assert tf32.estimated_savings[0] == 0 < least.factor < most.factor


@pytest.mark.parametrize("program", ["contrastive_views", "diffusion_transformer", "wasserstein_gan"])
def test_a_step_that_waits_for_launches_shows_how_much_cpu_time_it_needs(program):
    case = case_of(base(program))
    assert case.summary.gpu_us < 0.66 * case.summary.unprofiled_step_us
    assert all(one.replayed_savings is None for one in opportunities(case.trace, case.summary))


@pytest.mark.parametrize("program", ["click_prediction", "detection_loss", "item_embeddings"])
def test_gradients_that_backward_fills_with_zeros_stay_in_float32(program):
    case = case_of(base(program))
    after = precision.half_precision(case).graph.dur
    fills = [(work, op) for work, _, op in case.activities if op is not None and op.name == "aten::fill_"]
    in_backward = [work for work, op in fills if any("autograd::engine" in above.name for above in op.above())]
    assert sum(work.us for work in in_backward) > 30
    for work, _ in fills:
        node = case.graph.activity[id(work)]
        assert after[node] == case.graph.dur[node]


FP32_ATTENTION = [
    (base("series_forecast"), 16), (base("image_tagging"), 64), (base("review_classifier"), 64),
    (base("diffusion_transformer"), 64), (CHANGES / "encoder/fp32.json.gz", 64),
    (CHANGES / "encoder/tf32.json.gz", 64), (CHANGES / "attention32/sdpa.json.gz", 64),
]  # fmt: skip


def test_attention_in_float32_takes_as_long_for_narrow_heads():
    """Input Dims are (batch, length, heads, head size). All of these recordings have as many queries as keys."""
    rates = {}
    for file, head in FP32_ATTENTION:
        events = raw_events(file)
        calls = [e for e in events if e["name"] == "aten::_efficient_attention_forward"]
        (dims,) = {tuple(e["args"]["Input Dims"][0]) for e in calls}
        assert dims[3] == head
        us = median(e["dur"] for e in events if e["name"].startswith("fmha_cutlassF_f32") and e.get("cat") == "kernel")
        rates[file] = dims[0] * dims[2] * dims[1] ** 2 / us / 1e3
    assert 64 < min(rates.values()) < max(rates.values()) < 130
    assert min(rates, key=rates.get) == FP32_ATTENTION[0][0]


def test_fused_attention_in_float32_is_priced_for_64_values_a_head():
    case = case_of(base("pair_representation"))
    proposal = attention.fused_attention(case)
    peaks = common_peaks(case.trace.devices)
    scores = 192 * 4 * 192 * 192  # rows x heads x queries x keys, four times in a step
    us = 4 * scores * prices.FP32_HEAD / (prices.ATTENTION * peaks.fp32) / 1e6
    assert "192 x 192" in proposal.evidence
    assert us in [pytest.approx(ns / 1e3, rel=1e-3) for ns in proposal.graph.dur]


@pytest.mark.parametrize(
    ("program", "scores", "part"),
    [
        ("protein_embeddings", [16, 20, 1002, 1002], 1),
        ("summarization_finetuning", [8, 12, 1024, 1024], 1),
        ("summarization_finetuning", [8, 12, 128, 128], 0.5),  # causal
    ],
)
def test_only_a_mask_of_queries_and_keys_halves_fused_attention(program, scores, part):
    """The mask of padding has one row for all queries. Its scores are copied first, but stay in fp32."""
    filled = [e for e in raw_events(base(program)) if e["name"] == "aten::masked_fill"]
    masks = [dims[1] for dims in (e["args"]["Input Dims"] for e in filled) if dims[0] == scores]
    assert masks and all((mask[-2] == 1) == (part == 1) for mask in masks)
    case = case_of(base(program))
    us = part * 4 * math.prod(scores) * prices.FP32_HEAD / (prices.ATTENTION * common_peaks(case.trace.devices).fp32)
    durations = attention.fused_attention(case).graph.dur
    assert us / 1e6 in [pytest.approx(ns / 1e3, rel=1e-3) for ns in durations]
    if program == "summarization_finetuning":
        assert priced_changes(base(program))["fused_attention"].share == pytest.approx(saved(program, "sdpa"), abs=0.03)


def test_a_bias_that_is_not_contiguous_keeps_fused_attention_out():
    events = raw_events(base("pair_representation"))
    added = [e for e in events if e["name"] == "aten::add" and e["args"]["Input Dims"][0] == [192, 4, 192, 192]]
    assert added and all(e["args"]["Input Strides"][1][-1] == 4 for e in added)
    assert ".contiguous() on the mask" in attention.fused_attention(case_of(base("pair_representation"))).how
    assert "contiguous" not in attention.fused_attention(case_of(base("character_model"))).how


@pytest.mark.parametrize("file", [base("checkpointed_llama"), CHANGES / "gpt2/recompute.json.gz"])
def test_the_checkpoints_hooks_in_backward_go_with_the_recomputed_ops(file):
    """The hooks run in Python, before the first op of a node that asks for a recomputed tensor."""
    case = case_of(file)
    marks = raw_steps(raw_events(file))
    calls = [e for e in raw_events(file) if e.get("cat") in ("cpu_op", "cuda_runtime", "cuda_driver")]
    for step, mark in zip(case.trace.steps, marks, strict=True):
        waits = []
        inside = [e for e in calls if mark["ts"] <= e["ts"] < end(mark)]
        for tid in {e["tid"] for e in inside}:
            of_thread = sorted((e for e in inside if e["tid"] == tid), key=lambda e: (e["ts"], -e["dur"]))
            for node, inner, first in zip(of_thread, of_thread[1:], of_thread[2:], strict=False):
                if node["name"].startswith("autograd::engine::evaluate_function") and first["ts"] < end(inner):
                    waits.append(first["ts"] - node["ts"])
        usual = sorted(waits)[len(waits) // 4]
        spans = copies._unpacking(step)
        assert sum(last - begin for _, begin, last in spans) / 1e3 == pytest.approx(
            sum(max(0, wait - usual) for wait in waits), rel=0.01
        )


@pytest.mark.parametrize("program", ["checkpointed_llama", "llama_finetune", "globe_mesh"])
def test_what_enters_a_checkpoint_in_forward_goes_with_the_recomputed_ops(program):
    """It is Python that keeps the state of the random numbers, an op without a size among it, and the inputs."""
    events = raw_events(base(program))
    mark = raw_steps(events)[1]
    ops = [e for e in events if e.get("cat") == "cpu_op" and mark["ts"] <= e["ts"] < end(mark)]
    kept = [e for e in ops if e["name"] == "_NoopSaveInputs"]
    us = 0.0
    for one in kept:
        before = [e for e in ops if e["tid"] == one["tid"] and end(e) <= one["ts"] and e["name"] != "aten::empty"]
        us += end(one) - max(map(end, before))
    case = case_of(base(program))
    spans = copies._entering(case.trace.steps[1])
    assert len(spans) == len(kept) >= 3
    assert sum(last - begin for _, begin, last in spans) / 1e3 == pytest.approx(us, rel=0.01)
    without = copies.no_recompute(case).graph
    assert all(
        any(begin <= start <= last <= stop for begin, stop in without.gone[track])
        for step in case.steps
        for track, start, last in copies._entering(step)
    )
    one = priced_changes(base(program))["no_recompute"]
    low, high = one.estimated_savings or (one.share, one.share)
    (variant,) = (name for name, row in RESULTS[program].items() if row["proposal"] == "no_recompute")
    assert low <= saved(program, variant) <= high + 0.1


def test_checkpoints_without_hooks_have_nothing_to_unpack():
    """Nodes that need nothing of a checkpoint start their first op after less than a launch."""
    shares = []
    for name in ("gpt2/recompute", "gpt2/sdpa"):
        case = case_of(CHANGES / f"{name}.json.gz")
        spans = copies._unpacking(case.replayed)
        shares.append(sum(stop - start for _, start, stop in spans) / 1e3 / case.launch_us)
    assert shares[0] > 4 * shares[1]


@pytest.mark.parametrize("softmax", ["aten::_softmax", "aten::sigmoid"])
def test_tokens_are_not_padded_for_attention_that_is_to_be_fused(tmp_path, softmax):
    """The edited products have 510 tokens, kernels for unaligned rows and a faster device, so padding them pays."""
    document = json.loads(gzip.decompress((CHANGES / "gpt2/eager_attention.json.gz").read_bytes()))
    for one in document["deviceProperties"]:
        one["name"] = "NVIDIA B200"
    for one in document["traceEvents"]:
        one["name"] = one["name"].replace("nvjet", "gemm_align2").replace("aten::_softmax", softmax)
        if "Input Dims" in one.get("args", {}):
            one["args"]["Input Dims"] = json.loads(json.dumps(one["args"]["Input Dims"]).replace("512", "510"))
    file = tmp_path / "odd.json"
    file.write_text(json.dumps(document))
    case = case_of(file)
    fused, padded = attention.fused_attention(case), layout.align_shapes(case)
    assert (fused is not None) == (softmax == "aten::_softmax")
    assert ("510 to 512" in padded.title) == (fused is None) and "50,257 to 50,264" in padded.title


@pytest.mark.parametrize(("program", "error"), [("pair_representation", 0.05), ("smoke_solver", 0.12)])
def test_compiled_inference_makes_fewer_calls_that_take_cpu_time(program, error):
    case = case_of(base(program))
    assert not case.trace.trains and case.summary.waits_for == "overhead"
    one = next(one for one in opportunities(case.trace, case.summary) if one.change == "fuse_pointwise")
    saved = 1 - measured_us(program, "compile") / measured_us(program, "base")
    assert "less CPU time" in one.evidence
    assert 1 - one.unprofiled_step_us_after / one.unprofiled_step_us == pytest.approx(saved, abs=error)


def test_each_call_of_a_model_in_training_costs_a_call_of_compiled_code(monkeypatch):
    """The step calls its model twice. If self_conditioning is compiled, which does so, too, it takes 16% longer."""
    case = case_of(base("reward_training"))
    events = raw_events(base("reward_training"))
    modules = [one for one in events if str(one.get("name")).startswith("nn.Module: Words")]
    calls = len(modules) / len(raw_steps(events))
    with_calls = fusion.fuse_pointwise(case).graph.cpu_us
    monkeypatch.setattr(prices, "TRAINED_REGION", 0)
    more = with_calls - fusion.fuse_pointwise(case).graph.cpu_us
    assert calls == 2 and more == pytest.approx(calls * 60 * case.launch_us, rel=0.01)


def as_losses(events):
    for one in events:
        one["name"] = str(one.get("name")).replace("nn.Module: Words", "nn.Module: MSELoss")


def recomputed_in_backward(events):
    """Let backward call modules, as checkpoints do."""
    module = next(one for one in events if str(one.get("name")).startswith("nn.Module: Words"))
    nodes = [one for one in events if str(one.get("name")).startswith("autograd::engine::evaluate_function")]
    again = ({"ts": one["ts"], "dur": one["dur"], "tid": one["tid"]} for one in nodes)
    events += [module | where | {"name": f"nn.Module: Block_{number}"} for number, where in enumerate(again)]


@pytest.mark.parametrize(("edit", "calls"), [(as_losses, 1), (recomputed_in_backward, 2)])
def test_losses_and_recomputed_blocks_are_no_calls_of_a_compiled_model(tmp_path, edit, calls, monkeypatch):
    case = case_of(edited(base("reward_training"), tmp_path, edit))
    with_calls = fusion.fuse_pointwise(case).graph.cpu_us
    monkeypatch.setattr(prices, "TRAINED_REGION", 0)
    more = with_calls - fusion.fuse_pointwise(case).graph.cpu_us
    assert more == pytest.approx(calls * 60 * case.launch_us, rel=0.01)


@pytest.mark.parametrize("program", ["smoke_solver", "object_tracker"])
def test_each_wait_in_a_compiled_model_costs_a_call_of_compiled_code(program, monkeypatch):
    """The first program reads a value in each of 60 passes. In the second one, a copy may make two calls that wait."""
    case = case_of(base(program))
    with_calls = fusion.fuse_pointwise(case).graph.cpu_us
    monkeypatch.setattr(prices, "REGION", 0)
    more = with_calls - fusion.fuse_pointwise(case).graph.cpu_us
    events = raw_events(base(program))
    (mark,) = (mark for mark in raw_steps(events) if mark["name"] == case.step.name)
    calls = sorted(
        (one["ts"], one["name"]) for one in events
        if one.get("cat") in ("cuda_runtime", "cuda_driver") and mark["ts"] <= one["ts"] < end(mark)
    )  # fmt: skip
    order = "".join(
        "w" if name == "cudaStreamSynchronize" else "k" for _, name in calls
        if name == "cudaStreamSynchronize" or "Launch" in name
    )  # fmt: skip
    waits = len(re.findall("kw+(?=k)", order))
    assert waits >= 60
    assert more == pytest.approx(15 * (1 + waits) * case.launch_us, rel=0.05)


def test_pytorchs_own_encoder_layers_do_the_work_of_many_ops(tmp_path):
    """The vision transformer took 2.97 ms without the profiler, and 3.04 compiled."""

    def of_many_ops(events):
        for one in events:
            if one.get("name") in ("aten::_native_multi_head_attention", "aten::_transformer_encoder_layer_fwd"):
                one["name"] = "aten::scaled_dot_product_attention"

    assert "fuse_pointwise" not in proposed("vit/eager")
    assert "fuse_pointwise" in priced_changes(edited(recording("vit/eager"), tmp_path, of_many_ops))


def test_what_an_op_of_a_chain_calls_takes_no_cpu_time():
    """Each batch norm of this model launches two kernels, and copies to an output that compiled code does not write."""
    case = case_of(recording("images/eager"))
    after = proposed("images/eager")["fuse_pointwise"].step_us_after
    assert after == pytest.approx(recorded_us("images/compile"), rel=0.3)
    copies = [op for _, _, op in case.activities if op is not None and op.name == "aten::copy_"]
    assert len(copies) == 53 and all(op.parent.name == "aten::native_batch_norm" for op in copies)


@pytest.mark.parametrize("shapes", [True, False])
@pytest.mark.parametrize("name", ["generation/cached", "generation/recomputed"])
def test_compiled_code_saves_no_calls_while_the_keys_grow(name, shapes, tmp_path):
    """Without recorded shapes nothing shows that they do not grow."""
    file = ROOT / f"tests/traces/h100/{name}.json.gz"
    case = case_of(file if shapes else edited(file, tmp_path, without_shapes))
    proposal = fusion.fuse_pointwise(case)
    assert proposal is None or "CPU time" not in proposal.evidence


def test_a_converted_model_is_proposed_though_autocast_would_make_the_recorded_step_longer():
    """A denoiser of videos took 86 ms on an H200, 54 in TF32 and 47 converted to bf16."""
    case, found = case_of(base("moving_pictures")), priced_changes(base("moving_pictures"))
    proposal, one = precision.half_precision.propose(case), found["half_precision"]
    autocast_us, now_us, converted_us = (graph.step_us() for graph in (proposal.graph, case.graph, proposal.most))
    assert converted_us <= now_us < autocast_us
    low, high = one.estimated_savings
    assert low - 0.1 <= saved("moving_pictures", "bf16_model") <= high
    assert next(iter(found)) == "half_precision" and one.likely_share > found["tf32"].likely_share


def test_videos_are_not_told_to_be_convolved_in_bf16():
    """video_scoring took 4.0 ms on an H100, and 5.1 under autocast."""
    events = raw_events(base("video_scoring"))
    of_volumes = [e for e in events if e["name"] == "aten::convolution" and len(e["args"]["Input Dims"][0]) == 5]
    assert len(of_volumes) >= 3 and saved("video_scoring", "bf16") < 0
    could_be_priced = precision.half_precision.propose(case_of(base("video_scoring"))) is not None
    assert could_be_priced, "the veto decides"
    assert "half_precision" not in priced_changes(base("video_scoring"))


def test_a_change_that_makes_the_recorded_step_hardly_longer_is_shown_if_it_saves_time_without_the_profiler():
    """Compiling a U-Net in a step of which the CPU needs most while it is recorded: 119 ms on an H200, and 84."""
    one = priced_changes(base("nuclei_slides"))["fuse_pointwise"]
    assert -0.02 * one.step_us <= one.saves_us < 0
    assert one.share == pytest.approx(saved("nuclei_slides", "compiled"), abs=0.1)
