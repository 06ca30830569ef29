"""Steps of other kinds of programs, recorded after the rules: images prepared on the CPU, volumes, graphs."""

import gzip
import json
import math
import re
import statistics
from pathlib import Path

import pytest
from raw_events import end, event, raw_steps, raw_work
from references import recording
from test_opportunities import priced_changes, raw_events

from tracereader import cli
from tracereader.changes import attention, catalogue, copies, fusion, graphs, prices, work_ahead
from tracereader.changes.context import Case
from tracereader.figures import summarize
from tracereader.figures.uncompiled_flex import uncompiled_flex
from tracereader.replay import graph_of
from tracereader.trace import read
from tracereader.two_runs.side import Side

TESTS = Path(__file__).resolve().parent / "traces"
AUGMENTED = recording("augmented/main_process")
VOLUMES, GRAPH = TESTS / "h200/volumes.json.gz", TESTS / "h100/graph_convolution.json.gz"
ON_CPU = "cpu_tensors"


def edited(path, tmp_path, edit):
    """Return the path of a copy of a trace with other events."""
    document = json.loads(gzip.decompress(path.read_bytes()))
    edit(document["traceEvents"])
    file = tmp_path / "edited.json"
    file.write_text(json.dumps(document))
    return file


def without_tf32(events):
    """Let what multiplies in TF32 fill tensors. Other convolutions in TF32 show that the setting allows it."""
    for e in events:
        if e.get("cat") == "kernel" and re.search("tf32|s1688|tfloat32", e["name"]):
            e["name"] = "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>, 1>(int)"


def without_shapes(events):
    for e in events:
        e.get("args", {}).pop("Input Dims", None)


def case_of(path):
    trace = read(path)
    summary = summarize(trace)
    return Case(trace, summary, graph_of(trace))


def ms(text):
    """Return the milliseconds of a duration in a sentence."""
    number, unit = text.split(" ")
    return float(number) / {"ms": 1, "µs": 1000}[unit]


def cpu_stretch(events, mark):
    """Return the time from a step's start to its first op with a CUDA call, and its outermost ops by name (ms)."""
    calls = [e["ts"] for e in events if e.get("cat") in ("cuda_runtime", "cuda_driver") and e["ts"] >= mark["ts"]]
    inside = [e for e in events if e.get("cat") == "cpu_op" and mark["ts"] <= e["ts"] < end(mark)]
    first = min(e["ts"] for e in inside if e["ts"] <= min(calls) < end(e))
    by_name, reached = {}, 0
    for one in sorted((e for e in inside if e["ts"] < first), key=lambda e: (e["ts"], -e["dur"])):
        if one["ts"] >= reached:
            by_name[one["name"]] = by_name.get(one["name"], 0) + one["dur"] / 1e3
            reached = end(one)
    return (first - mark["ts"]) / 1e3, by_name


def test_work_on_cpu_tensors_is_the_first_proposal_for_images_prepared_in_the_step():
    one, *_ = priced_changes(AUGMENTED).values()
    assert one.change == ON_CPU
    events = raw_events(AUGMENTED)
    stretches = [cpu_stretch(events, mark) for mark in raw_steps(events)]
    said = re.search(r"works for (\S+ ms) between the step's start and aten::to", one.evidence)
    took, by_name = min(stretches, key=lambda entry: abs(entry[0] - ms(said[1])))
    assert ms(said[1]) == pytest.approx(took, abs=0.06)
    costliest = sorted(by_name.items(), key=lambda entry: -entry[1])[:3]
    for name, time in costliest:
        assert ms(re.search(rf"{name} (\S+ [mµ]s)", one.evidence)[1]) == pytest.approx(time, abs=0.06)
    others = ms(re.search(r"other ops (\S+ [mµ]s)", one.evidence)[1])
    assert others == pytest.approx(sum(by_name.values()) - sum(time for _, time in costliest), abs=0.06)
    between = ms(re.search(r"Python between the ops (\S+ [mµ]s)$", one.evidence)[1])
    assert between == pytest.approx(took - sum(by_name.values()), abs=0.06)
    # The GPU idles meanwhile, so the step becomes shorter by about this time.
    assert one.saves_us / 1e3 == pytest.approx(statistics.median(time for time, _ in stretches), rel=0.05)


def on_the_cpu(name, call=None):
    """Return an edit that runs an op for 3 ms at each step's start. call: the name of a runtime call in it."""

    def edit(events):
        for mark in raw_steps(events):
            begins = mark["ts"]
            mark["dur"] += 3100
            for one in events:
                if one is not mark and one.get("ts", 0) >= begins:
                    one["ts"] += 3100
            thread = {"pid": mark["pid"], "tid": mark["tid"]}
            events.append(event(name, "cpu_op", begins + 50, 3000) | thread)
            if call:
                events.append(event(call, "cuda_runtime", begins + 100, 50, correlation=-1) | thread)

    return edit


@pytest.mark.parametrize(
    ("name", "call", "is_proposed"),
    [
        ("aten::sort", None, True),
        ("mylib::decode_jpeg", None, True),
        ("aten::view", None, False),  # takes the time for tensors on any device
        ("c10d::allreduce_", None, False),  # may wait for other ranks
        ("autograd::engine::evaluate_function: SortBackward0", None, False),
        ("aten::sort", "cudaMalloc", False),  # on the GPU
    ],
)
def test_ops_without_runtime_calls_count_as_work_on_cpu_tensors(tmp_path, name, call, is_proposed):
    file = edited(TESTS / "train_item.json.gz", tmp_path, on_the_cpu(name, call))
    found = priced_changes(file)
    assert (ON_CPU in found) == is_proposed
    if is_proposed:
        assert found[ON_CPU].saves_us == pytest.approx(3100, rel=0.1)
        assert f"launches nothing for the GPU: {name} 3.0 ms" in found[ON_CPU].evidence
        assert "python" not in found, "its pauses are not counted twice"


def test_views_of_gpu_tensors_are_no_work_on_cpu_tensors():
    """The cells of an LSTM take the views of 64 time steps at once, in half a millisecond."""
    assert work_ahead.cpu_tensors(case_of(recording("lstm/cells"))) is None


def beside_the_model(events):
    """Add 40 equal pointwise kernels to each step, before its forward pass, as a loop over parameters launches them."""
    number = 10**9
    for mark in raw_steps(events):
        begins, thread = mark["ts"], {"pid": mark["pid"], "tid": mark["tid"]}
        pid, stream = raw_work(events, mark)[0]["pid"], raw_work(events, mark)[0]["tid"]
        mark["dur"] += 2000
        for one in events:
            if one is not mark and one.get("ts", 0) >= begins:
                one["ts"] += 2000
        for at in range(40):
            number += 1
            starts = begins + 50 + 40 * at
            name = "void at::native::vectorized_elementwise_kernel<4, at::native::MulFunctor<float>>(int)"
            ids = {"correlation": number, "device": 0, "stream": stream, "grid": [100, 1, 1], "block": [128, 1, 1]}
            events += [
                event("aten::mul_", "cpu_op", starts, 20) | thread,
                event("cudaLaunchKernel", "cuda_runtime", starts + 5, 5, correlation=number) | thread,
                event(name, "kernel", starts + 12, 3, **ids) | {"pid": pid, "tid": stream},
            ]


def test_torch_compile_of_the_model_does_not_fuse_what_a_loop_launches_beside_it(tmp_path):
    path = recording("trained/eager")
    before = fusion.fuse_pointwise(case_of(path))
    after = fusion.fuse_pointwise(case_of(edited(path, tmp_path, beside_the_model)))
    kernels = [int(re.match(r"([\d,]+) kernels", one.evidence)[1].replace(",", "")) for one in (before, after)]
    assert kernels[0] == kernels[1] > 0


def without_instance_normalization(events):
    for one in events:
        if one["name"] == "aten::instance_norm":
            one["name"] = "aten::batch_norm"


def test_channels_last_is_not_proposed_around_instance_normalization(tmp_path):
    """It took 50.6 ms instead of 42.3, because this normalization copies its input to the contiguous layout."""
    assert "channels_last" not in priced_changes(VOLUMES)
    one = priced_changes(edited(VOLUMES, tmp_path, without_instance_normalization))["channels_last"]
    assert one.title == "keep volumes in the channels_last_3d layout"
    assert "torch.channels_last_3d" in one.how, "channels_last is for four dimensions"


VOCABULARY = TESTS / "h100/vocabulary"
BATCH_NORMS = TESTS / "h100/batch_norms"


def of_batch_norms(events):
    """Return the share of cuDNN's batch norms in the time of these and of ATen's kernels, without optimizers'."""
    optimizers = [e for e in events if e.get("name", "").startswith("Optimizer.step")]
    calls = [e for e in events if e.get("cat") in ("cuda_runtime", "cuda_driver")]
    of_optimizers = {
        e["args"]["correlation"]
        for e in calls
        for one in optimizers
        if e["tid"] == one["tid"] and one["ts"] <= e["ts"] < end(one)
    }
    kernels = [e for e in events if e.get("cat") == "kernel" and e["args"]["correlation"] not in of_optimizers]
    of_norms = sum(e["dur"] for e in kernels if "bn_fw" in e["name"] or "bn_bw" in e["name"])
    return of_norms / (of_norms + sum(e["dur"] for e in kernels if "at::native" in e["name"]))


@pytest.mark.parametrize(
    "file", [TESTS / "h100/graphs/gan.json.gz", BATCH_NORMS / "video.json.gz"], ids=["gan", "video"]
)
def test_compiled_batch_norms_save_no_calls(file, monkeypatch):
    """Compiled, the GAN took 12.7 ms instead of 9.7 without the profiler, and the other model 17.2 instead of 8.9."""
    assert of_batch_norms(raw_events(file)) > 0.4
    assert "fuse_pointwise" not in priced_changes(file)
    assert "fuse_pointwise" in priced_changes(VOLUMES), "which are normalized one by one"
    monkeypatch.setattr(fusion, "MOSTLY_BATCH_NORM", 2)
    monkeypatch.setattr(prices, "TRAINED_REGION", 0)  # or the GAN's three calls of compiled code take what they save
    assert "compiled code takes" in priced_changes(file)["fuse_pointwise"].evidence


@pytest.mark.parametrize("name", ["eager", "model"])
def test_a_large_part_of_fused_time_in_the_loss_is_said(name):
    """Without the profiler, a GPT with a vocabulary of 128,256 took 19.6 ms, compiled 19.3, and with its loss 12.0."""
    events = raw_events(VOCABULARY / f"{name}.json.gz")
    mark = raw_steps(events)[-1]
    kernels = [e for e in events if e.get("cat") == "kernel" and e["ts"] >= mark["ts"]]
    of_loss = sum(e["dur"] for e in kernels if re.search("SoftMax|nll_loss|elementwise_kernel.*copy", e["name"]))
    one = priced_changes(VOCABULARY / f"{name}.json.gz")["fuse_pointwise"]
    assert of_loss > 6000
    assert re.fullmatch(
        rf"torch.compile {'the loss, too' if name == 'model' else 'the model and the loss'}; "
        r"(9\d%|all) of the saved GPU time is in the loss",
        one.how,
    )
    measured = summarize(read(VOCABULARY / "both.json.gz")).recorded_step_us
    assert one.step_us_after == pytest.approx(measured, rel=0.25)
    assert "fuse_pointwise" not in priced_changes(VOCABULARY / "both.json.gz")


def test_a_loss_that_takes_little_time_is_not_named():
    assert priced_changes(TESTS / "h100/graphs/item.json.gz")["fuse_pointwise"].how == "torch.compile(model)"


def test_compiled_batch_norms_of_volumes_are_not_told_to_be_compiled():
    """Two blocks of 13 each read 25.7 MB in 2.9 ms; eager's kernels have a block for each channel and take 0.16 ms."""
    slow = [
        e for e in raw_events(BATCH_NORMS / "video_compile.json.gz") if e.get("cat") == "kernel" and e["dur"] > 2000
    ]
    assert {e["name"].startswith("triton_red_fused") for e in slow} == {True}
    assert {math.prod(e["args"]["grid"]) for e in slow} == {26}
    assert "torch.compile" not in graphs.cuda_graph(case_of(BATCH_NORMS / "video.json.gz")).how


def small_copies(events):
    for one in events:
        if one.get("cat") == "gpu_memcpy" and "HtoD" in one["name"]:
            one["args"]["bytes"] = 1000


def test_copies_of_small_tensors_are_no_batches(tmp_path):
    path = recording("copies/blocking")
    batches = copies.overlap_copies(case_of(path))
    small = copies.overlap_copies(case_of(edited(path, tmp_path, small_copies)))
    assert batches.title is None and "pin the batches" in batches.how and "1 copy of 77.1 MB" in batches.evidence
    assert small.title == "make small tensors on the GPU" and 'device="cuda"' in small.how


def decoder(tokens, fixed=(), prompt=(), layers=3):
    """Return a trace of steps in which a decoder attends to its own tokens, and to `fixed` others in each layer.

    tokens: the keys of each token. prompt: the numbers of queries of calls before them.
    """
    events, number, at = [], 0, 0.0
    for step in range(3):
        begins = at
        for queries, keys in [(count, count) for count in prompt] + [(1, n) for n in tokens for _ in range(layers)]:
            for each in (keys, *fixed) if queries == 1 else (keys,):
                dims = [[2, 4, queries, 64], [2, 4, each, 64], [2, 4, each, 64]]
                name = "aten::scaled_dot_product_attention"
                events.append(event(name, "cpu_op", at, 90, **{"Input Dims": dims, "Input type": ["c10::Half"] * 3}))
                for place in range(4):
                    number += 1
                    ids = {"correlation": number, "device": 0, "stream": 7}
                    events.append(event("cudaLaunchKernel", "cuda_runtime", at + 20 * place, 5, correlation=number))
                    events.append(event("attend", "kernel", at + 20 * place + 8, 2, tid=7, **ids) | {"pid": 0})
                at += 100
        events.append(event(f"ProfilerStep#{step}", "user_annotation", begins, at - begins))
    devices = [{"id": 0, "name": "NVIDIA H100 80GB HBM3"}]
    return {"traceEvents": events, "record_shapes": 1, "deviceProperties": devices}


@pytest.mark.parametrize(
    ("tokens", "fixed", "prompt", "grows"),
    [
        (range(5, 13), (), (4,), (5, 12)),
        (range(1, 9), (64,), (64,), (1, 8)),  # a decoder beside an encoder, as in T5 and Whisper
        (range(5, 13), (64,), (4,), (5, 12)),
        (range(1, 9), (64,), (), (1, 8)),  # each step decodes a sequence, without a prompt
        ([*range(3, 7), *range(3, 7)], (), (), (3, 6)),
        ([9, 8, 7, 6, 5, 4, 3, 2], (), (), None),
        ([3, 4, 6, 7, 3, 4, 6, 7], (), (), None),
        ([9] * 8, (64,), (), None),  # a cache of fixed size
        (range(60, 68), (64,), (), None),  # as many tokens as the encoder has: the trace does not decide
        (range(1, 9), (64, 32), (), None),
    ],
)
def test_a_decoders_own_keys_grow_beside_those_of_its_encoder(tmp_path, tokens, fixed, prompt, grows):
    file = tmp_path / "decoder.json"
    file.write_text(json.dumps(decoder(tokens, fixed, prompt)))
    case = case_of(file)
    assert case.growing_keys == grows
    found = priced_changes(file)
    assert ("static_cache" in found) == (grows is not None)
    if grows:
        assert f"here from {grows[0]} to {grows[1]}" in found["static_cache"].evidence
        assert "cuda_graph" not in found, "a graph is of one number of keys"


def in_the_fallback(events):
    """Put each softmax into the op that scaled_dot_product_attention calls if no backend takes its inputs."""
    for one in [one for one in events if one["name"] == "aten::_softmax"]:
        events.insert(0, one | {"name": "aten::_scaled_dot_product_attention_math"})


def test_a_fallback_of_attention_is_not_told_to_use_attention(tmp_path):
    path = recording("attention/naive")
    written_out, fallback = priced_changes(path), priced_changes(edited(path, tmp_path, in_the_fallback))
    assert written_out["fused_attention"].how.startswith("torch.nn.functional.scaled_dot_product_attention(")
    assert "scaled_dot_product_attention falls back to them" in fallback["fused_attention"].evidence
    assert "sdpa_kernel" in fallback["fused_attention"].how


WITH_GRADIENTS = TESTS / "h100/autograd"  # models in inference, with gradients on and off, recorded in one process
FLEX = TESTS / "h100/flex"  # flex_attention in small models


@pytest.mark.parametrize("model", ["gpt", "mlp"])
def test_a_model_that_runs_without_a_backward_is_to_run_without_autograd(capsys, model):
    """While gradients are on, the profiler writes the number of autograd's next node into each op."""
    on, off = (WITH_GRADIENTS / f"{model}_{how}.json.gz" for how in ("grad", "no_grad"))
    before, after = priced_changes(on), priced_changes(off)
    one = before["no_autograd"]
    events = raw_events(on)
    mark = raw_steps(events)[1]
    ops = [e for e in events if e.get("cat") == "cpu_op" and mark["ts"] <= e["ts"] < end(mark)]
    numbers = {e["args"]["Sequence number"] for e in ops if "Sequence number" in e["args"]}
    assert f"autograd records {len(numbers) - 1} ops of a step" in one.evidence  # the last one's op is not known
    assert not any("Sequence number" in e.get("args", {}) for e in raw_events(off)) and "no_autograd" not in after
    recorded = [summarize(read(file)).recorded_step_us for file in (on, off)]
    assert 0.03 < 1 - one.step_us_after / one.step_us < 0.2 and one.step_us == recorded[0]
    assert one.step_us_after == pytest.approx(recorded[1], rel=0.25)
    assert cli.main([str(on), str(off)]) == 0
    assert "proposed it (run the model without autograd)" in " ".join(capsys.readouterr().out.split())


def test_autocasts_weights_are_cast_with_gradients_on_although_the_program_has_turned_them_off():
    file = recording("autocast/each_step")
    numbered = {e["name"] for e in raw_events(file) if "Sequence number" in e.get("args", {})}
    assert numbered == {"aten::to", "aten::_to_copy"}
    assert not summarize(read(file)).training.unused_nodes and "no_autograd" not in priced_changes(file)


def test_autograd_is_only_named_where_it_records_nodes_and_no_backward_runs(tmp_path):
    def numbered_alike(events):  # gradients are on, but nothing needs any
        for e in events:
            if "Sequence number" in e.get("args", {}):
                e["args"]["Sequence number"] = 5

    def with_backward(events):
        op = next(e for e in events if e.get("name") == "aten::linear")
        op["name"] = "autograd::engine::evaluate_function: AddmmBackward0"

    def with_optimizer(events):  # compiled autograd records no op for its backward
        mark = raw_steps(events)[1]
        events.append(mark | {"name": "Optimizer.step#AdamW.step", "ts": end(mark) - 9, "dur": 5})

    on = WITH_GRADIENTS / "mlp_grad.json.gz"
    for edit in (numbered_alike, with_backward, with_optimizer):
        file = edited(on, tmp_path, edit)
        assert not summarize(read(file)).training.unused_nodes and "no_autograd" not in priced_changes(file)
    assert summarize(read(on)).training.unused_nodes > 100


@pytest.mark.parametrize("layers", [62, 63, 64, 65])
def test_autograds_nodes_are_found_in_any_number_of_equal_layers(tmp_path, layers):
    """Each layer has five ops, of which autograd records four."""
    events = [event("ProfilerStep#1", "user_annotation", 0.5, 10 * layers + 9)]
    for layer in range(layers):
        for place, name in enumerate(("mm", "add", "empty", "relu", "mul")):
            numbered = {"Sequence number": 4 * layer + place} if name != "empty" else {}
            events.append(event(f"aten::{name}", "cpu_op", 10 * layer + 2 * place + 1, 1, **numbered))
    file = tmp_path / "layers.json"
    file.write_text(json.dumps({"traceEvents": events}))
    numbers = {e["args"]["Sequence number"] for e in events if "Sequence number" in e["args"]}
    assert summarize(read(file)).training.unused_nodes == len(numbers) - 1


@pytest.mark.parametrize(
    ("eager", "compiled", "calls", "how_near"),
    [
        ("one_call", "one_call_compiled", 1, (1, 2)),
        # Each call also makes a mask of blocks before its region, which compiled code does at once.
        ("two_layers", "two_layers_compiled", 2, (1, 2)),
        ("inference", "inference_compiled", 2, (1, 2)),  # under inference_mode, which records no op of flex_attention
    ],
)
def test_flex_attention_that_is_not_compiled_is_to_be_compiled(eager, compiled, calls, how_near, capsys):
    """The compiled step was recorded in the same process."""
    before, after = (FLEX / f"{name}.json.gz" for name in (eager, compiled))
    found = priced_changes(before)
    one = found["compile_flex"]
    events = raw_events(before)
    steps = raw_steps(events)
    regions = [e for e in events if str(e.get("name")).startswith("Torch-Compiled Region")]
    ops = [e for e in events if str(e.get("name")).startswith("FlexAttentionAutogradOp")]
    assert len(regions) == calls * len(steps) and len(ops) in (0, 2 * len(regions))
    named = f"{calls} call{'s' * (calls > 1)}" + f" and {'their' if calls > 1 else 'its'} backward" * bool(ops)
    assert f"uncompiled flex_attention: {named}, " in one.evidence and one.how == "torch.compile(flex_attention)"
    measured = summarize(read(after)).recorded_step_us
    low, high = how_near
    assert low * measured < one.step_us_after < high * measured < one.step_us
    assert "its region calls no graph" not in "".join(one.evidence for one in found.values())  # it is flex_attention's
    assert not {"fused_attention", "overlap_copies", "cuda_graph"} & set(found)  # its copies and waits are internal
    assert "compile_flex" not in priced_changes(after)
    assert cli.main([str(before), str(after)]) == 0
    assert "proposed it (compile flex_attention)" in " ".join(capsys.readouterr().out.split())


def test_kernels_of_an_uncompiled_flex_attention_are_not_fused_beside_it():
    """They are gone if flex_attention is compiled, so only one of the two changes counts them."""
    events = raw_events(FLEX / "two_layers.json.gz")
    marks = [event for event in raw_steps(events) if event["name"] == "ProfilerStep#3"]
    inside = [e for e in events if marks[0]["ts"] <= e.get("ts", 0) < end(marks[0])]
    calls = [
        e for e in inside if re.match(r"Torch-Compiled Region|FlexAttentionAutogradOpBackward", str(e.get("name")))
    ]
    work = {e["args"]["correlation"] for e in events if e.get("cat") == "kernel"}
    launches = [e for e in inside if e.get("cat") in ("cuda_runtime", "cuda_driver")]
    launches = [e for e in launches if e["args"].get("correlation") in work]
    beside = [
        one for one in launches if not any(e["ts"] <= one["ts"] < end(e) and e["tid"] == one["tid"] for e in calls)
    ]
    fused = fusion.fuse_pointwise(case_of(FLEX / "two_layers.json.gz")).evidence
    assert 0 < int(fused.split(" kernels")[0]) < len(beside) < len(launches) / 2


def test_compiled_flex_attention_of_half_the_tokens_is_other_work(tmp_path):
    def of_half_the_tokens(events):
        for e in events:
            if "Input Dims" in e.get("args", {}):
                dims = re.sub(
                    r"\b(1024|2048)\b", lambda one: str(int(one[0]) // 2), json.dumps(e["args"]["Input Dims"])
                )
                e["args"]["Input Dims"] = json.loads(dims)

    before, after = (Side(summarize(read(FLEX / f"two_layers{how}.json.gz"))) for how in ("", "_compiled"))
    assert catalogue.BY_NAME["compile_flex"].followed(before, after)
    half = edited(FLEX / "two_layers_compiled.json.gz", tmp_path, of_half_the_tokens)
    assert not catalogue.BY_NAME["compile_flex"].followed(before, Side(summarize(read(half))))


def test_copies_of_an_uncompiled_flex_attention_are_its_own():
    """No program can leave them out, and no CUDA graph can hold them."""
    events = raw_events(FLEX / "one_call.json.gz")
    calls = [e for e in events if str(e.get("name")).startswith("FlexAttentionAutogradOp")]
    copies = [e["args"]["correlation"] for e in events if "HtoD" in str(e.get("name"))]
    launches = [e for e in events if e.get("args", {}).get("correlation") in copies and e["cat"] == "cuda_runtime"]
    assert len(launches) == 3 * len(raw_steps(events))
    assert all(any(e["ts"] < one["ts"] < end(e) and e["tid"] == one["tid"] for e in calls) for one in launches)
    assert not {"overlap_copies", "cuda_graph"} & set(priced_changes(FLEX / "one_call.json.gz"))


def test_attention_that_is_written_out_beside_an_uncompiled_flex_attention_is_to_be_fused():
    """The model has one of the first kind and two of the second, and is trained."""
    case = case_of(FLEX / "beside_written_out.json.gz")
    assert "uncompiled flex_attention: 1 call and its backward" in attention.compile_flex(case).evidence
    assert "2 softmaxes between batched products and their backward" in attention.fused_attention(case).evidence
    softmax = [e for e in raw_events(FLEX / "beside_written_out.json.gz") if e.get("name") == "aten::_softmax"]
    assert len(softmax) == 3 * 2  # in two steps


def flex_calls(path):
    """Return the uncompiled calls of flex_attention in the first step of a trace: each name, and its duration (µs)."""
    calls = {id(call): call for call in uncompiled_flex(read(path).steps[0]).values()}
    return sorted((call.name, call.us) for call in calls.values())


def around(events, one, starts):
    """Return the events whose names start so around another one, innermost first."""
    enclosing = [e for e in events if str(e.get("name")).startswith(starts) and e["tid"] == one["tid"]]
    enclosing = [e for e in enclosing if e["ts"] <= one["ts"] and end(one) <= end(e)]
    return sorted(enclosing, key=lambda e: e["dur"])


def test_a_region_inside_the_regions_of_a_compiled_model_is_flex_attentions_own():
    """The model is compiled, except for its calls of flex_attention."""
    events = raw_events(FLEX / "disabled.json.gz")
    mark = raw_steps(events)[0]
    ops = [e for e in events if e.get("cat") == "cpu_op" and mark["ts"] <= e["ts"] < end(mark)]
    forward = [e for e in ops if e["name"] == "FlexAttentionAutogradOp"]
    regions = [around(events, one, "Torch-Compiled Region") for one in forward]
    assert [len(some) for some in regions] == [3, 3]
    calls = [some[0] for some in regions] + [e for e in ops if e["name"] == "FlexAttentionAutogradOpBackward"]
    assert flex_calls(FLEX / "disabled.json.gz") == [
        (name, pytest.approx(us)) for name, us in sorted((e["name"], e["dur"]) for e in calls)
    ]
    assert "compile_flex" in priced_changes(FLEX / "disabled.json.gz")


@pytest.mark.parametrize("name", ["aten::addmm", "FlexAttentionAutogradOp", "## Call CompiledFxGraph abc ##"])
def test_a_region_with_more_than_one_flex_attention_is_not_flex_attentions_own(tmp_path, name):
    def with_more(events):
        for one in [e for e in events if e.get("name") == "FlexAttentionAutogradOp"]:
            region = around(events, one, "Torch-Compiled Region")[0]
            events.append(one | {"name": name, "ts": region["ts"] + 0.5, "dur": 0.25})

    before = dict(flex_calls(FLEX / "one_call.json.gz"))
    assert sorted(before) == ["FlexAttentionAutogradOpBackward", "Torch-Compiled Region: 0/0"]
    assert {found for found, _ in flex_calls(edited(FLEX / "one_call.json.gz", tmp_path, with_more))} == {
        "FlexAttentionAutogradOp",
        "FlexAttentionAutogradOpBackward",
    }


@pytest.mark.parametrize("name", ["aten::_safe_softmax", "aten::logsumexp"])
def test_without_the_op_of_flex_attention_both_of_its_reductions_show_it(tmp_path, name):
    def without(events):
        for e in events:
            if e.get("name") == name:
                e["name"] = "aten::other"

    assert len(flex_calls(FLEX / "inference.json.gz")) == 2
    file = edited(FLEX / "inference.json.gz", tmp_path, without)
    assert not flex_calls(file) and "compile_flex" not in priced_changes(file)


@pytest.mark.parametrize(
    ("optimizer", "dense", "op", "sparse"),
    [
        # It refuses sparse gradients, so another optimizer has them.
        ("Adam", "fused", "aten::embedding_sparse_backward", "fused"),
        ("SGD", "fused", "aten::_embedding_bag_sparse_backward", None),
        ("RMSprop", "foreach", "aten::embedding_sparse_backward", "foreach"),
        ("SparseAdam", None, "aten::embedding_sparse_backward", None),
        ("Muon", None, "aten::embedding_sparse_backward", None),
    ],
)
def test_an_optimizer_is_only_told_to_use_what_torch_offers_for_its_gradients(
    tmp_path, capsys, optimizer, dense, op, sparse
):
    """A fused SGD refuses sparse gradients, and a foreach one loops over them."""

    def renamed(events):
        for one in events:
            one["name"] = re.sub(
                r"^Optimizer\.(step|zero_grad)#\w+", rf"Optimizer.\1#{optimizer}", str(one.get("name"))
            )

    def with_sparse(events):
        renamed(events)
        next(e for e in events if e.get("name") == "aten::mm")["name"] = op

    for edit, way in ((renamed, dense), (with_sparse, sparse)):
        file = edited(recording("convnet/forloop"), tmp_path, edit)
        found = priced_changes(file)
        assert ("fused_optimizer" in found) == (way is not None)
        if way:
            assert found["fused_optimizer"].how == f"torch.optim.{optimizer}(…, {way}=True)"
        others = {"cuda_graph", "fuse_pointwise"}
        assert others & set(found) == (others if edit is renamed else set())
        assert cli.main([str(file), "--only", "patterns"]) == 0
        named = "With foreach=True one launch updates many of them" in " ".join(capsys.readouterr().out.split())
        assert named == (way is not None)


def test_a_layer_that_calls_the_products_itself_may_be_multihead_attention(tmp_path):
    """Other programs call torch.matmul, which calls torch.bmm. nn.MultiheadAttention calls torch.bmm itself."""

    def without_matmul(events):
        events[:] = [one for one in events if one.get("name") != "aten::matmul"]

    file = TESTS / "attention_naive.json.gz"
    assert "need_weights" not in priced_changes(file)["fused_attention"].how
    assert "need_weights=False" in priced_changes(edited(file, tmp_path, without_matmul))["fused_attention"].how
