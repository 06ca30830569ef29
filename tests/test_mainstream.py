"""What programs showed that most users write: batch norms, checks, and changes that make the recorded step longer.

On an H200, leaf_sorter took 40.4 ms and 30.7 with channels_last, parcel_segmentation 45.1 and 32.8, segmentation 15.9
and 10.5; lora_tuning 36.6 and 26.9 in bf16, novel_writer 59.5 and 32.8; call_transcriber 27.4 and 29.1 in fp16.
"""

import math

import msgspec
import pytest
from conftest import ROOT
from raw_events import end, raw_steps, raw_work
from test_estimated_savings import found_by_estimate, without_the_measured_step
from test_kept_promises import RESULTS, base, case_of, saved
from test_later_workloads import edited
from test_opportunities import priced_changes, raw_events

import tracereader.cli
from tracereader.changes import layout, optimizer, precision, waits
from tracereader.changes.opportunity import is_worth_showing, priced
from tracereader.findings.recording import estimate_us, is_gpu_bound
from tracereader.replay.changes import step_us_at

GB_S = {"NVIDIA H200": 4800, "NVIDIA H100 80GB HBM3": 3350}  # NVIDIA's data sheets


def of_a_step(events, wanted):
    """Return the kernels with a wanted name that the last but one step launches, each with the op that asked for it."""
    ops = {e["args"]["External id"]: e for e in events if e.get("cat") == "cpu_op"}
    work = raw_work(events, raw_steps(events)[-2])
    return [(e, ops[e["args"]["External id"]]) for e in work if e["cat"] == "kernel" and wanted(e["name"])]


def by_channel(name):
    return "::bn_" in name and "1C11" in name


@pytest.mark.parametrize("program", ["leaf_sorter", "parcel_segmentation", "segmentation"])
def test_batch_norms_of_few_channels_take_the_time_of_their_data_with_the_channels_last(program):
    norms = of_a_step(raw_events(base(program)), by_channel)
    gb_s = GB_S[RESULTS[program]["base"]["runs"][0]["device"]]
    passes = {"aten::cudnn_batch_norm": 3, "aten::cudnn_batch_norm_backward": 5}
    times = [
        (kernel["dur"], passes[op["name"]] * 4 * math.prod(op["args"]["Input Dims"][0]) / (0.85e3 * gb_s))
        for kernel, op in norms
    ]
    slower = [after for now, after in times if after < now]
    case = case_of(base(program))
    found = layout._with_channels_last(case)
    assert len(norms) >= 28 and len(found) == len(slower)
    assert sum(found.values()) == pytest.approx(sum(slower), rel=0.02)
    evidence = layout.channels_last(case).evidence
    assert f"{len(found)} batch norms with one block for each channel" in evidence
    one = priced_changes(base(program))["channels_last"]
    low, high = one.estimated_savings or (one.share, one.share)
    assert low - 0.1 <= saved(program, "channels_last") <= high + 0.1


def test_batch_norms_of_volumes_and_of_unknown_type_keep_their_time(tmp_path):
    def of_volumes(events):
        for e in events:
            if "cudnn_batch_norm" in e["name"]:
                e["args"]["Input Dims"][0] = [*e["args"]["Input Dims"][0], 1]

    def untyped(events):
        for e in events:
            if "cudnn_batch_norm" in e["name"]:
                e["args"].pop("Input type")

    for edit in (of_volumes, untyped):
        assert not layout._with_channels_last(case_of(edited(base("segmentation"), tmp_path, edit)))


def test_batch_norms_of_images_beside_volumes_keep_their_time(tmp_path):
    """The volumes' layout is another one, and is the one that is proposed."""

    def some_of_volumes(events):
        for e in [e for e in events if e["name"] == "aten::convolution"][::10]:
            e["args"]["Input Dims"][0] = [*e["args"]["Input Dims"][0], 1]

    proposal = layout.channels_last(case_of(edited(base("segmentation"), tmp_path, some_of_volumes)))
    evidence, how = proposal.evidence, proposal.how
    assert "channels_last_3d" in how and "batch norm" not in evidence


@pytest.mark.parametrize("program", ["leaf_sorter", "parcel_segmentation", "segmentation"])
def test_batch_norms_take_longer_in_bf16_if_the_channels_are_not_last(program):
    """Their kernels took 1.49 to 1.82 times as long in forward, and 1.15 to 1.20 in backward."""
    norms = of_a_step(raw_events(base(program)), by_channel)
    us = sum(kernel["dur"] * (1.2 if "backward" in op["name"] else 1.6) for kernel, op in norms)
    case = case_of(base(program))
    slower = precision._slower_in_bf16(case)
    assert len(slower) == len(norms) and sum(slower.values()) == pytest.approx(us, rel=0.05)
    proposal = precision.half_precision(case)
    evidence = proposal.evidence
    assert "batch norms take longer in bf16 in this layout" in evidence
    nodes = [case.graph.activity[id(work)] for work in case.replayed.work if by_channel(work.name)]
    times = [(case.graph.dur[node], proposal.graph.dur[node]) for node in nodes]
    assert times and all(after > 1.1 * now for now, after in times)


def test_what_autocast_computes_in_fp32_keeps_its_time():
    """A loss on normalized embeddings is in fp32, although it follows products. bf16 saved 1% of triplet_miner."""
    case = case_of(base("triplet_miner"))
    follows = precision._follows_two_bytes(case)
    shapes = {"hidden layer": [384, 512], "loss": [384, 384, 384]}
    kernels = of_a_step(raw_events(base("triplet_miner")), lambda name: "elementwise" in name)
    expected, found = {}, {}
    for which, shape in shapes.items():
        found[which] = [
            follows(work)
            for work, one, op in case.activities
            if "elementwise" in one.name and shape in [list(dims or ()) for dims in op.inputs.dims]
        ]
        expected[which] = [which == "hidden layer" for _, op in kernels if shape in op["args"]["Input Dims"]]
    assert {which: len(some) for which, some in expected.items()} == {"hidden layer": 2, "loss": 9}
    assert found == expected
    assert "half_precision" not in priced_changes(base("triplet_miner"))


def as_bool(events):
    for e in events:
        if e.get("name") in precision.AUTOCAST_IN_FP32:
            e["args"]["Input type"] = ["bool" for _ in e["args"]["Input type"]]


def test_ops_of_whole_numbers_decide_nothing(tmp_path):
    case = case_of(edited(base("triplet_miner"), tmp_path, as_bool))
    follows = precision._follows_two_bytes(case)
    losses = [
        work for work, _, op in case.activities if [384, 384, 384] in [list(dims or ()) for dims in op.inputs.dims]
    ]
    assert len(losses) >= 9 and all(map(follows, losses))


@pytest.mark.parametrize(("program", "name", "around"), [
    ("speech_decoder", "aten::add_", "autograd::engine::evaluate_function: TBackward0"),
    ("summary_finetuning", "aten::native_dropout", "aten::_scaled_dot_product_attention_math"),
])  # fmt: skip
def test_sums_of_gradients_and_what_attention_calls_are_in_the_type_of_their_op(program, name, around):
    """The engine adds up the gradients that a layer gets from several passes. Attention is one op for autocast."""
    events = raw_events(base(program))
    mark = raw_steps(events)[1]
    ops = [e for e in events if e.get("cat") == "cpu_op" and mark["ts"] <= e["ts"] < end(mark)]
    spans = [(e["tid"], e["ts"], end(e)) for e in ops if e["name"] == around]
    inside = [
        e for e in ops if e["name"] == name and any(e["tid"] == a and b <= e["ts"] and end(e) <= c for a, b, c in spans)
    ]
    case = case_of(base(program))
    follows = precision._follows_two_bytes(case)
    launched = [
        (work, op)
        for work, _, op in case.activities
        if op.name == name and around in [above.name for above in op.above()]
    ]
    assert len(launched) == len(inside) >= 3 and all(follows(work) for work, _ in launched)


def test_what_adds_to_the_gradients_of_parameters_is_in_fp32():
    case = case_of(base("novel_writer"))
    follows = precision._follows_two_bytes(case)
    adds = "torch::autograd::AccumulateGrad"
    added = [work for work, _, op in case.activities if adds in [above.name for above in op.above()]]
    events = raw_events(base("novel_writer"))
    mark = raw_steps(events)[1]
    nodes = [e for e in events if e.get("name") == adds and mark["ts"] <= e["ts"] < end(mark)]
    assert len(added) == len(nodes) // 2 > 50, "each second pass adds to the gradients of the first one"
    assert not any(map(follows, added))


def test_compiled_code_does_not_show_what_follows_what():
    case = case_of(ROOT / "tests/traces/h100/batch_norms/video_compile.json.gz")
    follows = precision._follows_two_bytes(case)
    compiled = [work for work, _, _ in case.activities if work.name.startswith("triton_")]
    assert len(compiled) > 40 and all(map(follows, compiled))


def test_the_types_of_autocast_are_pytorchs():
    """Autocast has a kernel of its own for each op whose type it decides."""
    torch = pytest.importorskip("torch")
    fake = pytest.importorskip("torch._subclasses.fake_tensor")
    functional = torch.nn.functional
    ops = torch._C._dispatch_get_all_op_names()
    own = {name.split(".")[0] for name in ops if torch._C._dispatch_has_kernel_for_dispatch_key(name, "AutocastCUDA")}
    widest = {"addcdiv", "addcmul", "atan2", "bilinear", "cross", "dot", "grid_sampler", "index_put", "scatter_add",
              "tensordot", "vdot"}  # fmt: skip
    refused = {"binary_cross_entropy"}
    others = own - precision.AUTOCAST_IN_FP32 - precision.AUTOCAST_IN_TWO_BYTES
    assert others - {"aten::rms_norm"} == {f"aten::{name}" for name in widest | refused}  # see the comment there
    before = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_dtype("cuda", torch.bfloat16)
    try:
        with fake.FakeTensorMode():  # needs no GPU
            short = torch.empty(8, 8, device="cuda", dtype=torch.bfloat16)
            wide = short.float()
            in_fp32 = {
                "exp": short.exp(), "pow": short.pow(2), "sum": short.sum(), "softmax": short.softmax(-1),
                "mse_loss": functional.mse_loss(short, short), "linalg_vector_norm": torch.linalg.vector_norm(short),
                "layer_norm": functional.layer_norm(short, (8,)),
                "upsample_nearest2d": functional.interpolate(short[None, None], scale_factor=2),
            }  # fmt: skip
            in_two_bytes = {"linear": functional.linear(wide, wide), "bmm": torch.bmm(wide[None], wide[None])}
    finally:
        torch.set_autocast_enabled("cuda", before[0])
        torch.set_autocast_dtype("cuda", before[1])
    assert {one.dtype for one in in_fp32.values()} == {torch.float32}
    assert {one.dtype for one in in_two_bytes.values()} == {torch.bfloat16}
    assert {f"aten::{name}" for name in in_fp32} <= precision.AUTOCAST_IN_FP32
    assert {f"aten::{name}" for name in in_two_bytes} <= precision.AUTOCAST_IN_TWO_BYTES


def test_an_instance_norm_is_no_batch_norm():
    """It calls cuDNN's batch norm for a single image with more channels."""
    norms = of_a_step(raw_events(base("wasserstein_gan")), by_channel)
    single = [op for _, op in norms if op["args"]["Input Dims"][0][0] == 1]
    slower = precision._slower_in_bf16(case_of(base("wasserstein_gan")))
    assert single and len(slower) == len(norms) - len(single)


def test_batch_norms_in_fp16_are_cudnns_also_after_the_change():
    norms = of_a_step(raw_events(base("face_verification")), by_channel)
    assert norms and all("half" in kernel["name"] for kernel, _ in norms)
    assert not precision._slower_in_bf16(case_of(base("face_verification")))


def test_a_check_of_arguments_goes_with_what_it_compares():
    """torch.distributions checks both parameters of 40 normal distributions: eq or gt, then one value is read."""
    case, events = case_of(base("world_model")), raw_events(base("world_model"))
    (mark,) = (e for e in raw_steps(events) if e["name"] == case.replayed.name)
    calls = (e for e in events if e.get("cat") == "cpu_op" and e["tid"] == mark["tid"])
    ops = sorted((e for e in calls if mark["ts"] <= e["ts"] < end(mark)), key=lambda e: e["ts"])
    top, until = [], 0.0
    for e in ops:
        if e["ts"] >= until:
            top.append(e)
            until = end(e)
    spans = [
        (top[place - 2]["ts"], end(one))
        for place, one in enumerate(top)
        if one["name"] == "aten::is_nonzero" and top[place - 1]["name"] == "aten::_is_all_true"
    ]
    us = sum(stop - start for start, stop in spans)
    proposal = waits.remove_sync(case)
    evidence, how, saves = proposal.evidence, proposal.how, case.graph.step_us() - proposal.graph.step_us()
    assert len(spans) == 80 and "80 checks of arguments" in evidence and "validate_args=False" in how
    assert saves == pytest.approx(us, rel=0.02)
    found = set(priced_changes(base("world_model")))
    assert "remove_sync" in found


@pytest.mark.parametrize("program", ["color_clusters", "rainfall_chains", "kalman_tracks"])
def test_what_the_program_may_use_again_stays_when_a_read_goes(program):
    """They read any() of a mask, of isfinite and of isnan. The first one also computes with the mask."""
    case = case_of(base(program))
    reads = [op for op in case.replayed.walk() if op.name == "aten::is_nonzero"]
    evidence = waits.remove_sync(case).evidence
    assert len(reads) >= 30 and not any(map(waits._validation, reads))
    assert "checks" not in evidence


def test_indices_are_no_check_of_arguments(tmp_path):
    def indices(events):
        for e in events:
            e["name"] = "aten::nonzero" if e["name"] == "aten::is_nonzero" else e["name"]

    evidence = waits.remove_sync(case_of(edited(base("acting_agent"), tmp_path, indices))).evidence
    assert "aten::nonzero" in evidence and "checks" not in evidence


def test_checks_of_other_steps_than_the_typical_one_are_not_counted(tmp_path):
    name = case_of(base("acting_agent")).replayed.name

    def unchecked(events):
        (mark,) = (e for e in raw_steps(events) if e["name"] == name)
        for e in events:
            if e["name"] == "aten::_is_all_true" and mark["ts"] <= e["ts"] < end(mark):
                e["name"] = "aten::sum"

    case = case_of(edited(base("acting_agent"), tmp_path, unchecked))
    proposal = waits.remove_sync(case)
    left, evidence, how = [one for step in case.steps for one in step.walk()], proposal.evidence, proposal.how
    assert any(op.name == "aten::_is_all_true" for op in left)
    assert "checks" not in evidence and "validate_args" not in how


@pytest.mark.parametrize("program", ["lora_tuning", "photo_captions"])
def test_bf16_is_shown_though_autocast_makes_the_recorded_step_longer(program):
    """Without the profiler the GPU is busy for 86 and 88% of these steps, so the recorded CPU time decides little."""
    case, one = case_of(base(program)), priced_changes(base(program))["half_precision"]
    assert case.summary.gpu_us > 0.8 * case.summary.unprofiled_step_us
    assert one.saves_us < 0 < one.share
    low, high = one.estimated_savings
    assert low <= saved(program, "bf16") <= high


def test_an_unknown_step_is_told_to_use_bf16_only_if_the_gpu_limits_it_for_certain():
    """novel_writer's GPU is busy for 89% of the longest step that the estimate allows, signature_triplets' for 47%."""
    for program, shown, busy in (("novel_writer", True, 0.89), ("signature_triplets", False, 0.47)):
        _, blind = without_the_measured_step(base(program))
        assert blind.gpu_us / estimate_us(blind)[1] == pytest.approx(busy, abs=0.01) and is_gpu_bound(blind) == shown
        found = set(found_by_estimate(base(program)))
        assert ("half_precision" in found) == shown
    one = found_by_estimate(base("novel_writer"))["half_precision"]
    assert one.saves_us < 0 and one.estimated_savings[1] > saved("novel_writer", "bf16")


def test_a_report_says_how_much_longer_autocast_makes_the_recorded_step(capsys):
    one = priced_changes(base("novel_writer"))["half_precision"]
    tracereader.cli.main([str(base("novel_writer")), "--all"])
    said = " ".join(capsys.readouterr().out.split())
    assert f"While recorded it makes the step about {-one.saves_us / one.step_us:.0%} longer." in said
    assert "saves about -" not in said


def test_a_doubtful_saving_is_not_shown_if_the_recorded_step_becomes_longer():
    """A fused SGD saves 0 to 8% of it, 3% in the middle, and takes the CPU longer. bf16 adds no call to a graph."""
    file = ROOT / "traces/reference/nvidia-h200/changes/batch_norm/graph_kept.json.gz"
    case, found = case_of(file), priced_changes(file)
    proposal = optimizer.fused_optimizer(case)
    one = priced("", "", proposal, case.unprofiled, case.estimates_after(proposal.graph))
    worth = is_worth_showing(one), is_worth_showing(msgspec.structs.replace(one, saves_us=0.0))
    assert one.saves_us < 0 and 0.02 < one.likely_share < 0.05 and worth == (False, True)
    assert "fused_optimizer" not in set(found) and found["half_precision"].saves_us >= 0


@pytest.mark.parametrize("program", ["equilibrium_classifier", "late_interaction"])
def test_bf16_may_make_the_recorded_step_longer_if_the_measured_step_becomes_clearly_shorter(program):
    """The casts cost CPU time, which limits these steps only while they are recorded."""
    case, one = case_of(base(program)), priced_changes(base(program))["half_precision"]
    assert case.summary.unprofiled_step_us / case.summary.recorded_step_us < 0.9
    assert one.saves_us < -0.02 * one.step_us and 0.05 < one.share < saved(program, "bf16")
    little = msgspec.structs.replace(one, unprofiled_step_us_after=0.96 * one.unprofiled_step_us)
    unknown = msgspec.structs.replace(one, unprofiled_step_us=None, unprofiled_step_us_after=None)
    assert [is_worth_showing(other) for other in (one, little, unknown)] == [True, False, False]


def test_a_measured_step_shorter_than_the_least_estimate_decides():
    """nuclei_slides: with the least CPU time of the estimate the replay takes longer than the program did."""
    case = case_of(base("nuclei_slides"))
    step = case.summary.unprofiled_step_us
    third_us, open_ends = step_us_at(case.graph, 1 / 3), case._of_any_cpu_time
    assert third_us > 1.05 * step and open_ends == ()
    found = priced_changes(base("nuclei_slides"))
    assert found["channels_last"].share == pytest.approx(saved("nuclei_slides", "channels_last"), abs=0.05)
    low, high = found["half_precision"].estimated_savings
    assert low - 0.05 <= saved("nuclei_slides", "bf16") <= high + 0.05


def test_the_likely_saving_is_the_middle_of_what_the_replays_say():
    """A range that errors widen ends at 0, so that its middle would promise 12% where the replays say 2 to 4."""
    found = found_by_estimate(base("click_model"))
    one = found["fused_optimizer"]
    assert one.estimated_savings[0] == 0 < one.estimated_savings[1] / 2
    assert one.likely_share == pytest.approx(sum(one.replayed_savings) / 2)
    assert one.likely_share < sum(one.estimated_savings) / 2 - 0.05
    assert is_worth_showing(one)
