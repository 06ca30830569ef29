"""Changes proposed to programs that use no GPU. The traces are of small programs on two cores of an EPYC."""

import gzip
import json
import re
from pathlib import Path

import pytest
from raw_events import end, raw_steps
from test_graph_changes import in_step
from test_later_workloads import edited, without_shapes
from test_opportunities import priced_changes, raw_events

from tracereader import cli
from tracereader.changes import catalogue
from tracereader.changes.catalogue import opportunities
from tracereader.figures import summarize
from tracereader.replay import Refused, graph_of
from tracereader.trace import read
from tracereader.two_runs.side import Side

CPU = Path(__file__).resolve().parent / "traces/cpu"
NODE = "autograd::engine::evaluate_function: "
PAIRS = [
    ("attention_naive", "fused_attention", "attention_sdpa"),
    ("attention_trained_naive", "fused_attention", "attention_trained_sdpa"),
    ("adamw_forloop", "fused_optimizer", "adamw_fused"),
    ("anomaly_on", "anomaly_detection", "anomaly_off"),
    ("mask_each_step", "mask_once", "mask_once"),
]


def file_of(name):
    return CPU / f"{name}.json.gz"


def middle_step(events):
    """Return the step with the median time and the ops that begin in it."""
    mark = sorted(raw_steps(events), key=lambda one: one["dur"])[1]
    return mark, in_step(events, mark, "cpu_op")


def covered(ops):
    """Return the time in which one of these ops runs."""
    total, reached = 0.0, 0.0
    for one in sorted(ops, key=lambda e: e["ts"]):
        total += max(0.0, end(one) - max(reached, one["ts"]))
        reached = max(reached, end(one))
    return total


def between_products(ops):
    """Return the ops between the first two batched products, which are those of forward."""
    first, last = sorted((e for e in ops if e["name"] == "aten::bmm"), key=lambda e: e["ts"])[:2]
    return [e for e in ops if e["ts"] >= end(first) and end(e) <= last["ts"]]


def tracebacks_us(ops, nodes):
    """Return the time at the start of each op of forward that records a node, as long as aten::t's own at most."""
    recording = {}
    for one in sorted((e for e in ops if e not in nodes and not inside([e], nodes)), key=lambda e: e["ts"]):
        if one["args"].get("Sequence number", -1) >= 0 and one["args"].get("Fwd thread id") == 0:
            recording[one["args"]["Sequence number"]] = one
    until, own = [], []
    for one in recording.values():
        below = [e for e in ops if one["ts"] < e["ts"] and end(e) <= end(one)]
        until.append((min(e["ts"] for e in below) if below else end(one)) - one["ts"])
        if one["name"] == "aten::t":
            own.append(one["dur"] - covered(below))
    usual = sorted(own)[(len(own) - 1) // 2]
    return sum(min(us, usual) for us in until)


def inside(ops, nodes):
    return [e for e in ops if any(one["ts"] <= e["ts"] and end(e) <= end(one) for one in nodes)]


def removed(name, change):
    """Return the typical step's time and the time that the change removes from it (µs), by raw events."""
    mark, ops = middle_step(raw_events(file_of(name)))
    if change == "fused_attention":
        nodes = [e for e in ops if e["name"].startswith(NODE)]
        softer = [e for e in nodes if "Softmax" in e["name"] or "MaskedFill" in e["name"] or "Div" in e["name"]]
        return mark["dur"], covered(between_products(ops)) + covered(softer)
    if change == "fused_optimizer":
        marks = in_step(raw_events(file_of(name)), mark, "user_annotation")
        (update,) = [e for e in marks if e["name"] == "Optimizer.step#AdamW.step"]
        return mark["dur"], 0.6 * update["dur"]
    if change == "anomaly_detection":
        nodes = [e for e in ops if e["name"].startswith(NODE)]
        checks = [e for e in ops if e["name"] in ("aten::isnan", "aten::any", "aten::_is_any_true", "aten::is_nonzero")]
        return mark["dur"], covered(inside(checks, nodes)) + tracebacks_us(ops, nodes)
    makers = [e for e in ops if e["name"] in ("aten::ones", "aten::tril")]
    return mark["dur"], covered(makers)


@pytest.mark.parametrize(("before", "change", "after"), PAIRS)
def test_a_change_removes_the_time_of_its_calls(before, change, after):
    one = priced_changes(file_of(before))[change]
    step_us, gone = removed(before, change)
    assert one.step_us == pytest.approx(step_us, abs=0.01)
    assert one.saves_us == pytest.approx(gone, rel=0.01)


@pytest.mark.parametrize(("before", "change", "after"), PAIRS)
def test_without_the_profiler_the_change_saves_at_least_most_of_what_was_predicted(before, change, after):
    one = priced_changes(file_of(before))[change]
    measured = summarize(read(file_of(after))).unprofiled_step_us
    assert one.unprofiled_step_us == summarize(read(file_of(before))).unprofiled_step_us
    assert measured < 1.05 * one.unprofiled_step_us_after < one.unprofiled_step_us


@pytest.mark.parametrize(("before", "change", "after"), PAIRS)
def test_the_comparison_sees_that_the_change_was_made(before, change, after, capsys):
    one = priced_changes(file_of(before))[change]
    assert change not in priced_changes(file_of(after))
    assert cli.main([str(file_of(before)), str(file_of(after))]) == 0
    assert f"proposed it ({one.title})" in " ".join(capsys.readouterr().out.split())
    assert cli.main([str(file_of(after)), str(file_of(before))]) == 0
    assert "proposed it" not in capsys.readouterr().out


def test_an_annotation_in_which_the_profiler_stops_ends_with_the_last_step(tmp_path):
    """Where a step ends with its optimizer's, the last Optimizer.step lasts until the profiler has stopped."""
    marks = raw_steps(raw_events(file_of("adamw_forloop")))
    last = max(marks, key=lambda one: one["ts"])

    def with_the_stop(events):
        for one in events:
            if one["name"].startswith("Optimizer.step#") and last["ts"] <= one["ts"] < end(last):
                one["dur"] += 50_000

    file = edited(file_of("adamw_forloop"), tmp_path, with_the_stop)
    whole, stopped = read(file_of("adamw_forloop")), read(file)
    assert all(op.end <= step.end for step in stopped.steps for op in step.walk())
    names = [[op.name for op in trace.steps[-1].walk()] for trace in (whole, stopped)]
    assert names[0] == names[1] and any(name.startswith("Optimizer.step#") for name in names[0])
    assert priced_changes(file).keys() == priced_changes(file_of("adamw_forloop")).keys()


def test_a_run_of_another_program_follows_no_proposal():
    sides = {name: Side(summarize(read(file_of(name)))) for pair in PAIRS for name in (pair[0], pair[2])}
    mlp = ("adamw", "anomaly")  # two pairs of one program
    for before, _, after in PAIRS:
        proposed = tuple(priced_changes(file_of(before)).values())
        for other, side in sides.items():
            if other not in (before, after) and not (before.startswith(mlp) and other.startswith(mlp)):
                assert catalogue.checked(sides[before], proposed, side) is None, f"{before}, {other}"


def test_one_worker_needs_longer_for_a_batch_than_the_main_process_and_several_may_keep_up():
    events = raw_events(file_of("loader_inline"))
    mark, _ = middle_step(events)
    (wait,) = [e for e in in_step(events, mark, "user_annotation") if e["name"].startswith("enumerate(DataLoader)#")]
    one = priced_changes(file_of("loader_inline"))["data_loader"]
    assert wait["dur"] > mark["dur"] / 2
    with_one = wait["dur"] + 1000  # where system calls are slow, taking a batch over takes about 1 ms
    with_several = mark["dur"] - wait["dur"]
    assert one.step_us_after == pytest.approx((with_one + with_several) / 2, rel=0.005)
    known = one.unprofiled_step_us
    least, most = 1 - with_one / known, 1 - with_several / mark["dur"]
    assert one.estimated_savings == pytest.approx((least - 0.02, most + 0.02), abs=0.005)
    assert one.unprofiled_step_us_after == pytest.approx(known * (1 - (least + most) / 2), rel=0.01)
    assert "num_workers=1 or more" in one.how and "pin_memory" not in one.how


@pytest.mark.parametrize(("added_us", "is_explained"), [(5, True), (25, False), (-25, False)])
def test_time_that_the_profiler_does_not_explain_may_be_that_of_any_op(added_us, is_explained, tmp_path, capsys):
    """A change of adamw_forloop removes calls, and what recording added may lie in them, or outside."""
    document = json.loads(gzip.decompress(file_of("adamw_forloop").read_bytes()))
    step_us = middle_step(document["traceEvents"])[0]["dur"]
    calls = sum(e.get("cat") == "cpu_op" for e in document["traceEvents"]) / 3
    known = document["unprofiled_step_us"] = step_us - added_us * calls
    file = tmp_path / "a.json"
    file.write_text(json.dumps(document))
    one = priced_changes(file)["fused_optimizer"]
    assert cli.main([str(file)]) == 0
    said = "shares of the recorded step may be far off" in " ".join(capsys.readouterr().out.split())
    assert said == (one.estimated_savings is not None) == (not is_explained)
    if said:
        ends = sorted(max(0, min(1, us / known)) for us in (one.saves_us, one.saves_us - step_us + known))
        assert one.estimated_savings == pytest.approx((ends[0] - 0.02, ends[1] + 0.02), abs=0.02)


def add_a_launch(events):
    (mark, *_) = raw_steps(events)
    events.append(mark | {"name": "cudaLaunchKernel", "cat": "cuda_runtime", "ts": mark["ts"] + 1, "dur": 1})


def on_apples_gpu(events):
    ops = [e for e in events if e["name"] == "aten::_softmax"]
    events += [e | {"name": "aten::_mps_convolution", "ts": e["ts"] + 0.1, "dur": 0.1} for e in ops]


@pytest.mark.parametrize("edit", [add_a_launch, on_apples_gpu])
def test_no_saving_is_computed_if_the_records_of_a_gpu_are_missing(tmp_path, edit, capsys):
    file = edited(file_of("attention_naive"), tmp_path, edit)
    trace = read(file)
    assert isinstance(opportunities(trace, summarize(trace)), Refused)
    assert cli.main([str(file)]) == 0
    assert "saves" not in capsys.readouterr().out
    assert cli.main([str(file), "--only", "try"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "GPU records are missing" in said or "the trace has no GPU work" in said


def test_a_gpu_in_the_profilers_list_is_a_gpu(tmp_path):
    document = json.loads(gzip.decompress(file_of("attention_naive").read_bytes()))
    document["deviceProperties"] = [{"id": 0, "name": "NVIDIA H100 80GB HBM3"}]
    file = tmp_path / "a.json"
    file.write_text(json.dumps(document))
    assert isinstance(graph_of(read(file)), Refused)


def fewer_keys(events):
    """Make 1,024 keys 128, in all recorded shapes."""
    for e in events:
        if "Input Dims" in e.get("args", {}):
            e["args"]["Input Dims"] = json.loads(json.dumps(e["args"]["Input Dims"]).replace("1024", "128"))


@pytest.mark.parametrize("edit", [fewer_keys, without_shapes])
def test_small_attention_is_not_told_to_be_fused(tmp_path, edit):
    assert "fused_attention" not in priced_changes(edited(file_of("attention_naive"), tmp_path, edit))


def plain_sgd(events):
    """Name the optimizer SGD, and leave only additions in it."""
    for e in list(events):
        if e["name"] == "Optimizer.step#AdamW.step":
            e["name"] = "Optimizer.step#SGD.step"
        elif e.get("cat") == "cpu_op" and e["name"] == "aten::mul_":
            events.remove(e)


def test_sgd_without_momentum_gains_nothing(tmp_path):
    assert "fused_optimizer" not in priced_changes(edited(file_of("adamw_forloop"), tmp_path, plain_sgd))


def test_a_report_without_a_known_change_does_not_say_so(capsys):
    assert cli.main([str(file_of("attention_sdpa"))]) == 0
    assert "try first" not in capsys.readouterr().out
    assert cli.main([str(file_of("attention_sdpa")), "--only", "try"]) == 0
    assert "no change that read-trace knows" in " ".join(capsys.readouterr().out.split())


def test_a_checkpoints_node_is_not_the_gradient_of_one_op():
    """The node of a reentrant checkpoint contains a whole backward pass. Fused attention took 193 ms instead of 199."""
    mark, ops = middle_step(raw_events(file_of("checkpoint")))
    (longest,) = sorted((e for e in ops if "CheckpointFunctionBackward" in e["name"]), key=lambda e: -e["dur"])[:1]
    one = priced_changes(file_of("checkpoint"))["fused_attention"]
    assert longest["dur"] > 0.2 * mark["dur"] > 2 * one.saves_us


def test_attention_with_dropout_has_no_fused_kernel_on_a_cpu():
    _, ops = middle_step(raw_events(file_of("dropout")))
    assert any(e["name"] in ("aten::native_dropout", "aten::bernoulli_") for e in between_products(ops))
    assert "fused_attention" not in priced_changes(file_of("dropout"))


def test_what_a_closure_computes_is_not_the_optimizers_time():
    mark, ops = middle_step(raw_events(file_of("closure")))
    (update,) = [
        e for e in in_step(raw_events(file_of("closure")), mark, "user_annotation") if ".step#SGD" in e["name"]
    ]
    assert any(e["name"].startswith(NODE) and update["ts"] <= e["ts"] < end(update) for e in ops)
    assert "fused_optimizer" not in priced_changes(file_of("closure"))


def test_all_optimizers_that_a_saving_includes_are_named():
    mark, _ = middle_step(raw_events(file_of("two_optimizers")))
    marks = in_step(raw_events(file_of("two_optimizers")), mark, "user_annotation")
    us = {e["name"]: e["dur"] for e in marks if e["name"].startswith("Optimizer.step#")}
    one = priced_changes(file_of("two_optimizers"))["fused_optimizer"]
    saved = (1 - 0.4) * (us["Optimizer.step#Adam.step"] + us["Optimizer.step#SGD.step"])
    assert one.saves_us == pytest.approx(saved, rel=0.02)
    assert one.title == "use the fused Adam and SGD" and one.how.count("fused=True") == 2
    assert one.how.endswith("with torch 2.4 or newer")  # 2.3 raises an error, and a trace has no version


def test_more_workers_halve_the_step_at_most():
    one = priced_changes(file_of("one_worker"))["data_loader"]
    assert one.step_us_after == pytest.approx(one.step_us / 2) and "if cores are idle" in one.how


@pytest.mark.parametrize("step", ["3", "4", "5"])
def test_savings_are_those_of_the_typical_step_whichever_one_is_reported(step, capsys):
    assert cli.main([str(file_of("adamw_forloop")), "--step", step, "--only", "try"]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "use the fused AdamW" in told and "no saving can be computed" not in told


def test_no_saving_is_computed_beside_busy_programs(capsys):
    disturbed = CPU.parent / "attention_cpu_math.json.gz"
    assert cli.main([str(disturbed), "--only", "try"]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "because other programs probably used the CPU's cores" in told and "probably using the CPU's cores" in told


@pytest.mark.parametrize("name", ["loader_inline", "one_worker"])
def test_a_wait_for_the_loader_is_the_headline_and_a_part_of_the_step(name, capsys):
    path = file_of(name)
    events = [e for e in json.loads(gzip.decompress(path.read_bytes()))["traceEvents"] if e.get("ph") == "X"]
    typical = summarize(read(path)).typical_step
    mark = next(e for e in events if e["name"] == typical and e["cat"] == "user_annotation")
    loads = [
        e for e in events
        if e["name"].startswith("enumerate(DataLoader)") and mark["ts"] <= e["ts"] < mark["ts"] + mark["dur"]
    ]  # fmt: skip
    share = sum(e["dur"] for e in loads) / mark["dur"]
    assert cli.main([str(path), "--only", "short,cpu"]) == 0
    said = capsys.readouterr().out
    assert f"CPU only. The recorded step waits for the DataLoader's batch for {share:.0%} of its time" in said
    table = said.partition("where the step goes")[2]
    assert sum(map(float, re.findall(r"(\d+\.\d)%", table))) == pytest.approx(100, abs=0.6)
