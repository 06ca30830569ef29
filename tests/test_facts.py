"""The facts that a run stored about itself, and the step's time with and without the profiler."""

import gzip
import json

import msgspec
import pytest
from references import ROOT

from tracereader import cli
from tracereader.figures import summarize
from tracereader.replay import Refused, graph_of
from tracereader.trace import read
from tracereader.trace.facts import AttentionFacts, ModelFacts, Roofs, RunFacts, as_stored, run_facts

CHANGES = sorted((ROOT / "traces/reference/nvidia-h200/changes").glob("*/*.json.gz"))[:2]


def test_stored_facts_are_read_again():
    told = RunFacts(
        script="05_llm", flags={"dtype": "bf16"}, device="CPU", torch="2.15", run="7f", guesses=({"guess": "x"},),
        first_call_s=1.5, unprofiled_step_us=70.0, peak_bytes=5, layers=("a", "b"), roofs=Roofs(1.0, 2.0),
        attention=AttentionFacts(1, 2, 3, 4, True, "auto", {"flash": ["why"]}), decoding=ModelFacts("decode", 1, 1),
    )  # fmt: skip
    stored = json.loads(json.dumps(as_stored(told)))
    assert run_facts(stored) == told
    assert stored["facts"]["unprofiled_step_us"] == 70 and as_stored(RunFacts())["facts"]["unprofiled_step_us"] is None


def test_a_fact_of_another_type_counts_as_not_stored_and_the_others_are_kept():
    facts = {"peak_bytes": "x", "first_call_s": -1, "unprofiled_step_us": 9, "layers": [7], "roofs": {"tflops": 1}}
    found = run_facts({"script": "x", "flags": 3, "guesses": [1, {"guess": "a"}], "facts": facts | {"new": 1}})
    assert found == RunFacts(script="x", guesses=({"guess": "a"},), unprofiled_step_us=9.0)
    with pytest.raises(msgspec.ValidationError):  # what writes them is told
        msgspec.convert({"script": "x", "peak_byte": 1}, RunFacts)


@pytest.mark.parametrize("stored", [120.5, None, "x", -3, 0, 1e300])
def test_any_program_may_store_the_unprofiled_steps_time(tmp_path, stored, capsys):
    """The time is at the top of the trace, and any program may have written it."""
    events = [
        {
            "ph": "X",
            "cat": "user_annotation",
            "name": f"ProfilerStep#{n}",
            "pid": 1,
            "tid": 1,
            "ts": 300 * n,
            "dur": 290,
        }
        for n in range(3)
    ]
    events += [{"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 1, "tid": 1, "ts": 300 * n + 5, "dur": 9}
               for n in range(3)]  # fmt: skip
    file = tmp_path / "own.json"
    file.write_text(json.dumps({"traceEvents": events, "unprofiled_step_us": stored}))
    assert cli.main([str(file), "--json=all"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["unprofiled_step_us"] == (stored if stored == 120.5 else None)
    assert (found["recorded_step_us"], found["lesson"]) == (290, None)  # no GPU work: the typical step's CPU time


@pytest.mark.parametrize("path", CHANGES, ids=lambda path: path.name)
def test_the_recorded_steps_time_is_the_replays(path):
    trace = read(path)
    ours, graph = summarize(trace), graph_of(trace)
    assert not isinstance(graph, Refused)
    assert ours.recorded_step_us == graph.recorded_us == pytest.approx(graph.step_us(), rel=0.03)
    assert ours.unprofiled_step_us and ours.unprofiled_step_us < ours.recorded_step_us


@pytest.mark.parametrize(("times", "is_doubted"), [(1.2, False), (2, True), (5, True)])
def test_steps_on_a_gpu_that_took_far_longer_without_the_profiler_were_others(times, is_doubted, tmp_path, capsys):
    """The profiler makes no step shorter. What the timed steps took longer may be in what a change removes, or not."""
    path = ROOT / "traces/reference/nvidia-h200/changes/decode/eager.json.gz"
    recorded_us = summarize(read(path)).recorded_step_us
    document = json.loads(gzip.decompress(path.read_bytes()))
    document["unprofiled_step_us"] = known = times * recorded_us
    file = tmp_path / "a.json"
    file.write_text(json.dumps(document))
    assert cli.main([str(file), "--json=all"]) == 0
    first = json.loads(capsys.readouterr().out)["opportunities"][0]
    assert cli.main([str(file)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    doubt = f"Without the profiler a step took {times:.1f} times as long. The timed steps may have been colder"
    assert (doubt in said) == is_doubted
    low, high = first["estimated_savings"]
    least, most = (us / known for us in (first["saves_us"], first["saves_us"] + known - recorded_us))
    assert (low <= least < most <= high) == is_doubted
