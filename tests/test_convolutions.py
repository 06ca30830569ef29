"""Convolutions that cuDNN computes by FFTs, and ones that two bytes make slower, from raw events.

On an H200, mri_reconstruction took 298 ms, with channels_last 170 and its U-Nets in bf16 171; call_transcriber took
27.4 ms, and 29.1 in fp16.
"""

import bisect
import gzip
import json
import re
from collections import defaultdict

import pytest
from raw_events import raw_steps, raw_work
from test_kept_promises import base, case_of, saved
from test_later_workloads import edited, ms, without_shapes, without_tf32
from test_opportunities import priced_changes, raw_events

from tracereader.changes import layout, precision, prices

CALLS = ("cuda_runtime", "cuda_driver")


def by_convolution(path, name):
    """Return the GPU work of the typical step by the op of this name that launches it, in order."""
    events, case = raw_events(path), case_of(path)
    mark = next(e for e in raw_steps(events) if e["name"] == case.step.name)
    ops = sorted((e for e in events if e["name"] == name and e.get("cat") == "cpu_op"), key=lambda e: e["ts"])
    starts, found = [e["ts"] for e in ops], defaultdict(list)
    calls = {e["args"]["correlation"]: e for e in events if e.get("cat") in CALLS}
    for work in raw_work(events, mark):
        call = calls[work["args"]["correlation"]]
        op = next(iter(ops[bisect.bisect(starts, call["ts"]) - 1 :]), None)
        if op and op["ts"] <= call["ts"] < op["ts"] + op["dur"] and op["tid"] == call["tid"]:
            found[op["ts"]].append((call["ts"], work))
    return {ts: [work for _, work in sorted(some, key=lambda one: one[0])] for ts, some in found.items()}


def of_ffts(path):
    """Return for each backward of a convolution with FFTs its work from the first to the last of these kernels."""
    found = []
    for some in by_convolution(path, "aten::convolution_backward").values():
        places = [i for i, one in enumerate(some) if re.search(r"flip_filter|fft2d_|DSE::\w*fft", one["name"])]
        if places:
            found.append(some[places[0] : places[-1] + 1])
    return found


@pytest.mark.parametrize("program", ["mri_reconstruction", "semi_supervised", "vqvae_train"])
def test_gradients_by_ffts_are_one_product_each_with_the_channels_last_and_in_bf16(tmp_path, program):
    ffts, case = of_ffts(base(program)), case_of(base(program))
    assert ffts
    us = sum(one["dur"] for some in ffts for one in some)
    for proposed in (layout.channels_last, precision.half_precision):
        shown = re.search(
            r"cuDNN computes (\d+) convolutions by FFTs, ([\d,]+) kernels: ([\d.]+ ms)", proposed(case).evidence
        )
        count, kernels, time = shown.groups()
        assert (int(count), int(kernels.replace(",", ""))) == (len(ffts), sum(map(len, ffts)))
        assert ms(time) == pytest.approx(us / 1e3, abs=0.051)
    # They are no sign that TF32 is not allowed.
    all_us = sum(
        one["dur"] for some in by_convolution(base(program), "aten::convolution_backward").values() for one in some
    )
    evidence = precision.tf32(case_of(edited(base(program), tmp_path, without_tf32))).evidence
    shown = re.search(r"convolutions.* in fp32 run on CUDA cores: [\d,]+ kernels?, (.*)$", evidence)
    forward = by_convolution(base(program), "aten::cudnn_convolution").values()
    all_us += sum(one["dur"] for some in forward for one in some)
    if "matrix products" not in evidence:
        assert ms(shown.group(1)) <= (all_us - us) / 1e3


def test_what_needs_no_ffts_saves_about_what_was_measured():
    found = priced_changes(base("mri_reconstruction"))
    assert found["half_precision"].likely_share == pytest.approx(saved("mri_reconstruction", "bf16_unets"), abs=0.13)
    assert found["channels_last"].likely_share == pytest.approx(saved("mri_reconstruction", "channels_last"), abs=0.08)


def test_next_to_norms_that_need_the_other_layout_only_ffts_end():
    """The network of mri_reconstruction normalizes each image; its 1,200 conversions of layouts would stay."""
    assert case_of(base("mri_reconstruction")).step.named("aten::instance_norm".__eq__)
    assert "layout conversion" not in layout.channels_last(case_of(base("mri_reconstruction"))).evidence
    assert "layout conversion" in layout.channels_last(case_of(base("semi_supervised"))).evidence


def kernels_of(events):
    return [e for e in events if e.get("cat") == "kernel"]


def without_numbers(events):
    for e in events:
        e.get("args", {}).pop("Concrete Inputs", None)


def short(events):
    for e in kernels_of(events):
        e["dur"] = 2.0 if re.search(r"fft|region_transform|cf32|flip_filter", e["name"]) else e["dur"]


def in_fp16(events):
    for e in events:
        if "Input type" in e.get("args", {}):
            e["args"]["Input type"] = ["c10::Half" if one == "float" else one for one in e["args"]["Input type"]]


@pytest.mark.parametrize("edit", [without_shapes, without_numbers, short, in_fp16])
def test_ffts_have_no_price_without_sizes_or_in_fp16_and_none_that_is_longer(tmp_path, edit):
    assert of_ffts(base("vqvae_train")) and not layout.by_ffts(
        case_of(edited(base("vqvae_train"), tmp_path, edit)), "tf32"
    )


def test_ffts_on_another_makers_gpu_are_not_cudnns(tmp_path):
    document = json.loads(gzip.decompress(base("vqvae_train").read_bytes()))
    for device in document["deviceProperties"]:
        device["name"] = "AMD Instinct MI300X"
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(document))
    case = case_of(path)
    assert case.peaks is not None and case.trace.backend == "hip" and not layout.by_ffts(case, "tf32")


def test_ffts_are_no_sign_that_tf32_is_not_allowed_even_if_their_sizes_are_unknown(tmp_path):
    case = case_of(edited(base("vqvae_train"), tmp_path, without_numbers))
    assert precision.tf32(case).evidence == precision.tf32(case_of(base("vqvae_train"))).evidence


def test_what_multiplies_between_ffts_is_no_product_on_cuda_cores(tmp_path, monkeypatch):
    case, seen = case_of(edited(base("mri_reconstruction"), tmp_path, without_tf32)), {}
    monkeypatch.setattr(precision, "with_durations", lambda graph, us: seen.update(us) or graph)
    precision.tf32(case)
    between = {work for some, _ in layout.by_ffts(case, "tf32") for work in some}
    assert seen and any("gemmk1" in work.name for work in between) and between.isdisjoint(seen)


def only_ffts(events):
    for e in kernels_of(events):
        if not re.search(r"fft|region_transform|cf32|flip_filter|nchwTo|nhwcTo", e["name"]):
            e["name"] = "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>, 1>(int)"


def test_a_step_that_multiplies_by_nothing_but_ffts_says_only_that(tmp_path):
    evidence = precision.half_precision(case_of(edited(base("vqvae_train"), tmp_path, only_ffts))).evidence
    assert not evidence.startswith(("none", ";")) and "in fp32 or TF32" not in evidence and "by FFTs" in evidence


def pointwise_inside(events):
    for e in kernels_of(events):
        if "cf32" in e["name"]:
            e["name"] = "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, 3>(int)"


def test_what_lies_between_ffts_counts_once(tmp_path):
    shown = [
        re.search(
            r"other kernels move half of the bytes then: ([^;]+)", precision.half_precision(case_of(path)).evidence
        ).group(1)
        for path in (base("vqvae_train"), edited(base("vqvae_train"), tmp_path, pointwise_inside))
    ]
    assert shown[0] == shown[1]


def both_gradients(events):
    for e in kernels_of(events):
        if "dgrad" in e["name"]:
            e["name"] = "void fft2d_c2r_32x32<float>(float2*)"


def test_conversions_of_layouts_between_ffts_are_not_of_them(tmp_path):
    path = edited(base("vqvae_train"), tmp_path, both_gradients)
    spans = [one for some in layout.by_ffts(case_of(path), "tf32") for one in some[0]]
    names = [one.name for one in spans]
    assert any("fft2d_c2r_32x32" in name for name in names) and not any("nhwcToNchw" in name for name in names)


def test_a_long_filter_in_groups_takes_longer_in_two_bytes():
    events = raw_events(base("call_transcriber"))
    sizes = {
        str(e["args"]["Input Dims"][:2])
        for e in events
        if e["name"] == "aten::convolution" and e["args"]["Input Dims"][1][-1] == 128
    }
    assert sizes == {"[[8, 768, 199], [768, 48, 128]]"} and saved("call_transcriber", "half") < 0
    found = set(priced_changes(base("call_transcriber")))
    assert "half_precision" not in found and "tf32" in found
    case = case_of(base("call_transcriber"))
    assert (
        "; 1 convolution in groups with a long filter may take 13.0 ms each" in precision.half_precision(case).evidence
    )
    others = ("sound_codec", "state_space_scan", "leaf_sorter")  # two groups of 16 values, 4 values, and images
    assert not any(precision.long_filters_in_groups(case_of(base(name))) for name in others)


def test_two_bytes_may_save_more_than_a_long_filter_costs(monkeypatch):
    one = priced_changes(base("speech_pretraining"))["half_precision"]
    assert "1 convolution in groups with a long filter" in one.evidence
    assert one.likely_share == pytest.approx(saved("speech_pretraining", "bf16_autocast"), abs=0.15)
    seen, case = {}, case_of(base("speech_pretraining"))
    monkeypatch.setattr(precision, "with_durations", lambda graph, us: seen.update(us) or graph)
    precision.half_precision(case)
    (work,) = precision.long_filters_in_groups(case)
    assert seen[work] == prices.LONG_FILTER_IN_GROUPS_US > 2 * work.us


@pytest.mark.parametrize(
    ("transposed", "groups", "count"), [("True", "1", 0), ("True", "4", 0), ("False", "1", 0), ("False", "4", 1)]
)
def test_a_long_transposed_filter_or_one_without_groups_is_no_such_filter(tmp_path, transposed, groups, count):
    """A transposed filter has fewer rows of outputs than the data has channels, as one in groups has."""

    def edit(events):
        for e in events:
            if e["name"] == "aten::convolution" and e["args"]["Concrete Inputs"][6] == "True":
                e["args"]["Input Dims"][1][2] = 64
                e["args"]["Concrete Inputs"][6], e["args"]["Concrete Inputs"][8] = transposed, groups

    found = precision.long_filters_in_groups(case_of(edited(base("sound_codec"), tmp_path, edit)))
    assert bool(found) == bool(count)
