"""--steps: the calls of an annotation count as the steps. Figures are recomputed from raw events."""

import gzip
import itertools
import json

import pytest
from raw_events import end, event, raw_work
from references import H200, OTHERS, ROOT

from tracereader import cli
from tracereader.figures import summarize
from tracereader.trace import TraceError, read
from tracereader.trace.facts import of_other_steps

DECODER = H200 / "05_llm/1x512_bf16_warm_eager_active2_shapes.json.gz"
MLP = H200 / "03_simple_mlp/64x128x768x3072_bf16_warm_eager.json.gz"
TRAINING = ROOT / "traces/reference/cpu/06_training/2x128x128x2_bf16_warm_eager_ddp_slow1_x2_rank0.json.gz"


def calls_of(events, name):
    return sorted((e for e in events if e["name"] == name and e["cat"] == "user_annotation"), key=lambda e: e["ts"])


@pytest.mark.parametrize(("path", "name"), [(MLP, "mlp_fwd"), (DECODER, "decode")], ids=["mlp", "decoder"])
def test_each_step_lasts_from_one_call_to_the_next_and_has_what_is_launched_in_it(unmarked, path, name):
    file, events = unmarked(path)
    calls = calls_of(events, name)
    trace = read(file, steps_by=name)
    assert trace.has_steps and [step.name for step in trace.steps] == [
        f"ProfilerStep#{number}" for number in range(1, len(calls) + 1)
    ]
    lasts = [after["ts"] - call["ts"] for call, after in itertools.pairwise(calls)] + [calls[-1]["dur"]]
    assert [step.us for step in trace.steps] == pytest.approx(lasts, abs=0.01)
    for step, call, us in zip(trace.steps, calls, lasts, strict=True):
        assert len(step.work) == len(raw_work(events, {"ts": call["ts"], "dur": us}))
    ours = summarize(trace)
    assert ours.source.steps_by == name


def test_a_comparison_and_the_page_say_which_calls_count_as_the_steps(capsys, tmp_path):
    assert cli.main([str(MLP), str(MLP), "--steps", "mlp_fwd"]) == 0
    first, second = (line for line in capsys.readouterr().out.splitlines() if line[:3] in ("1  ", "2  "))
    assert all(line.endswith(", each step from a call of mlp_fwd to the next") for line in (first, second))
    assert cli.main([str(MLP), "--steps", "mlp_fwd", "--html", str(tmp_path / "page.html")]) == 0
    assert '"recorded":"3 steps, each from a call of mlp_fwd to the next"' in (tmp_path / "page.html").read_text()


def test_the_profilers_own_marks_are_replaced(capsys):
    assert cli.main([str(MLP), "--steps", "mlp_fwd", "--only", "short,steps"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "3 steps of" in said and "each from a call of mlp_fwd to the next" in said
    assert "#1" in said and "#4" not in said, "the recorded marks were #2 to #4"


def test_a_report_without_steps_says_how_an_annotation_gives_them(unmarked, capsys):
    hint = "counts as one step (--steps NAME: the calls of an annotation are the steps)"
    file, _ = unmarked(DECODER)  # two calls may be no loop
    assert cli.main([str(file)]) == 0
    assert hint in " ".join(capsys.readouterr().out.split())
    assert cli.main([str(MLP)]) == 0
    assert "--steps" not in capsys.readouterr().out


def test_calls_that_are_a_small_part_of_a_step_end_the_last_one_with_the_threads_ops(unmarked):
    file, events = unmarked(TRAINING)
    name = "DistributedDataParallel.forward"
    calls = calls_of(events, name)
    last = read(file, steps_by=name).steps[-1]
    ends = max(end(e) for e in events if e["tid"] == calls[0]["tid"] and e["cat"] in ("cpu_op", "user_annotation"))
    assert last.us == pytest.approx(ends - calls[-1]["ts"], abs=0.01) and last.us > 3 * calls[-1]["dur"]
    assert [op.name for op in last.walk() if op.name.startswith("Optimizer.")], "the optimizer runs after forward"


def test_calls_inside_another_call_and_on_other_threads_are_no_steps(tmp_path):
    calls = [(0, 90), (10, 20), (100, 80), (200, 95)]
    events = [event("aten::mm", "cpu_op", 5, 2), *(event("work", "user_annotation", ts, dur) for ts, dur in calls)]
    events += [event("work", "user_annotation", ts, 10, 2) for ts in (20, 120)]
    file = tmp_path / "made.json"
    file.write_text(json.dumps({"traceEvents": events}))
    assert [step.us for step in read(file, steps_by="work").steps] == [100, 100, 95]


def test_an_unknown_annotation_is_refused_with_those_that_there_are(tmp_path, capsys):
    assert cli.main([str(MLP), "--steps", "forward"]) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.count("\n") == 1
    assert "--steps forward: the trace has no annotation of this name; it has mlp_fwd (3)" in said.err
    file = tmp_path / "made.json"
    file.write_text(json.dumps({"traceEvents": [event("aten::mm", "cpu_op", 0, 2), event("aten::mm", "cpu_op", 3, 2)]}))
    with pytest.raises(TraceError, match="record_function makes one"):
        read(file, steps_by="forward")


@pytest.mark.parametrize("flags", [["--ranks"], ["--export", "x.json"]], ids=lambda flags: flags[0])
def test_steps_of_an_annotation_are_for_the_report_of_one_process(capsys, flags):
    assert cli.main([*map(str, OTHERS[:2]), "--steps", "mlp_fwd", *flags]) == 2
    assert "--steps" in capsys.readouterr().err


def test_what_a_run_measured_per_step_is_not_said_of_other_steps(tmp_path, capsys):
    """The trace holds the time of its own steps without the profiler; here another number of steps is asked for."""
    document = json.loads(gzip.decompress(MLP.read_bytes()))
    document |= {"unprofiled_step_us": 123.4, "unprofiled_cpu_us": 123.4}
    marks = [e for e in document["traceEvents"] if str(e.get("name")).startswith("ProfilerStep#") and "dur" in e]
    for mark in [e for e in marks if e["cat"] == "user_annotation"]:
        half = mark["dur"] / 2
        for ts in (mark["ts"], mark["ts"] + half):
            document["traceEvents"].append(
                event("half", "user_annotation", ts, half) | {k: mark[k] for k in ("pid", "tid")}
            )
    document.pop("lesson", None)
    file = tmp_path / "made.json"
    file.write_text(json.dumps(document))
    for steps_by, known in [(None, 123.4), ("mlp_fwd", 123.4), ("half", None)]:
        ours = summarize(read(file, steps_by=steps_by))
        assert (ours.unprofiled_step_us, ours.unprofiled_cpu_us) == (known, known), steps_by
    assert len(ours.steps) == 6
    assert cli.main([str(file), "--steps", "half"]) == 0
    assert "without the profiler" not in capsys.readouterr().out


def test_a_step_takes_no_longer_than_from_one_call_to_the_next_where_few_steps_are_large():
    """Two of the 15 steps have most of the launches, and four small steps lie between them."""
    path = ROOT / "tests/traces/h200-x4/launches_even/rank1.json.gz"
    calls = calls_of(json.loads(gzip.decompress(path.read_bytes()))["traceEvents"], "nccl:all_reduce")
    lasts = sorted(after["ts"] - call["ts"] for call, after in itertools.pairwise(calls))
    ours = summarize(read(path, steps_by="nccl:all_reduce"))
    assert len(ours.steps) == len(calls) and lasts[0] < ours.recorded_step_us < lasts[-1]


def test_no_fact_of_a_script_about_its_step_is_kept_for_other_steps():
    whole = read(DECODER).facts
    assert whole.decoding is not None and whole.guesses
    other = of_other_steps(whole)
    assert (other.decoding, other.guesses) == (None, ())
    assert (other.script, other.run, other.roofs) == (whole.script, whole.run, whole.roofs)


def written(tmp_path, name, *calls):
    """Return a trace with ops and these calls of an annotation: start and duration."""
    events = [event("aten::mm", "cpu_op", ts, 6) for ts in range(0, 400, 20)]
    file = tmp_path / "made.json"
    file.write_text(json.dumps({"traceEvents": [*events, *(event(name, "user_annotation", *call) for call in calls)]}))
    return file


def test_calls_that_begin_at_the_same_time_are_one_step(tmp_path):
    file = written(tmp_path, "w", (50, 0), (50, 0), (50, 10), (150, 0), (150, 0), (250, 0))
    assert [step.us for step in read(file, steps_by="w").steps] == [100, 100, 136]


def test_one_call_is_not_said_to_last_until_the_next(tmp_path, capsys):
    assert cli.main([str(written(tmp_path, "w", (50, 60))), "--steps", "w"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert (
        "one step of 60.0 µs, a call of w · 326.0 µs of the recording lies outside the step CPU only." in said
        and "to the next" not in said
    )


@pytest.mark.parametrize("name", ["", "-x", "a b"], ids=["empty", "dash", "space"])
def test_an_annotation_of_any_name_gives_the_steps(tmp_path, capsys, name):
    file = str(written(tmp_path, name, (0, 90), (100, 90), (200, 90), (300, 90)))
    said = []
    for flags in (["--whole"], [f"--steps={name}"], []):
        assert cli.main([file, *flags]) == 0
        said.append(" ".join(capsys.readouterr().out.split()))
    header = f"each from a call of {name or chr(39) * 2} to the next"
    assert "counts as one step" in said[0] and header in said[1] and header in said[2]


def test_no_change_of_a_whole_recording_may_be_one_of_its_steps(unmarked, capsys):
    file, _ = unmarked(H200 / "02_linear/1024x32x64_bf16_warm_eager.json.gz")
    said = []
    for flags in (["--whole"], ["--steps", "linear_fwd"]):
        assert cli.main([str(file), "--only", "try", *flags]) == 0
        said.append(" ".join(capsys.readouterr().out.split()))
    assert "no change that read-trace knows saves more than 2% of the recorded step. The whole recording" in said[0]
    assert "The trace has no shapes; with record_shapes=True, more changes may be found." in said[0]
    assert "The whole recording counts as the step; with --steps, more changes may be found." in said[0]
    assert "whole recording" not in said[1]
