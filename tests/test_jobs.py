"""Two jobs of several ranks side by side: each is a folder of traces."""

import re
import shutil
from statistics import median

import pytest
from references import H200
from test_four_gpus import PAIRS, ranks_of, unprofiled_us
from test_many_ranks import said
from test_ranks import as_json, length, marks, slices, spans

from tracereader import cli
from tracereader.findings import rank_changes
from tracereader.show.ranks import opened
from tracereader.show.view import View

UNEVEN, EVEN = (ranks_of(run)[0].parent for run in ("pipeline_uneven", "pipeline_few"))


def shown(capsys, monkeypatch, *words, columns=80):
    monkeypatch.setenv("COLUMNS", str(columns))
    assert cli.main(list(map(str, words))) == 0
    return capsys.readouterr().out


def row(text, name):
    (line,) = (line for line in text.splitlines() if line.startswith(name))
    return [float(one.replace(",", "")) for one in re.findall(r"\d[\d,.]*", line.removeprefix(name))]


def test_two_jobs_are_compared_as_jobs(capsys, monkeypatch):
    """The times of the second one are measured in the raw events and by the program itself."""
    text = shown(capsys, monkeypatch, UNEVEN, EVEN)
    assert max(map(len, text.splitlines())) <= 80
    assert "the second is 1.30 times as fast" in text
    assert row(text, "without profiler, ms") == pytest.approx(
        [unprofiled_us("pipeline_uneven") / 1e3, unprofiled_us("pipeline_few") / 1e3], abs=0.01
    )
    steps = row(text, "step, ms")
    for run, step in zip(("pipeline_uneven", "pipeline_few"), steps, strict=True):
        ours = as_json(capsys, *ranks_of(run), "--only", "gpu")["ranks"]
        assert step == pytest.approx(max(median(one["us"] for one in each["steps"]) for each in ours) / 1e3, abs=0.01)
    computes = row(text, "compute: most of a rank, ms")
    events = slices(ranks_of("pipeline_uneven")[1])
    kernels = [e for e in events if e["cat"] == "kernel" and "nccl" not in e["name"]]
    correlated = {e["args"]["correlation"]: e for e in kernels}
    of_steps = []
    for mark in marks(events):
        calls = [e for e in events if e["cat"] in ("cuda_runtime", "cuda_driver")]
        calls = [e for e in calls if mark["ts"] <= e["ts"] < mark["ts"] + mark["dur"]]
        mine = [correlated[e["args"]["correlation"]] for e in calls if e["args"].get("correlation") in correlated]
        of_steps.append(length(spans(mine, 0, float("inf"))) / 1e3)
    assert computes[0] == pytest.approx(median(of_steps), rel=0.01)


@pytest.mark.exhaustive
def test_the_change_that_the_first_report_proposed_is_compared_with_what_was_measured(capsys, monkeypatch):
    told = said(shown(capsys, monkeypatch, UNEVEN, EVEN, "--only", "short"))
    (proposed,) = (one for one in as_json(capsys, *ranks_of("pipeline_uneven"))["opportunities"]
                   if one["change"] == "balance_stages")  # fmt: skip
    predicted, measured = proposed["unprofiled_step_us_after"] / 1e3, unprofiled_us("pipeline_few") / 1e3
    assert "proposed it (even out the stages of the pipeline)" in told
    assert f"without the profiler, predicted {predicted:.1f} ms, measured {measured:.1f}" in told
    assert "the largest change: rank 1, compute, " in told


SHOWN = {(before, change, after) for before, change, after in PAIRS if after == "pipeline_few"}


@pytest.mark.exhaustive
@pytest.mark.parametrize("before", ["pipeline_few", "pipeline_uneven", "gradients_one_bucket", "launches_late"])
@pytest.mark.parametrize("after", ["pipeline_few", "pipeline_uneven", "gradients_one_bucket", "launches_late"])
def test_a_job_makes_a_change_only_if_it_does_the_same_work(before, after):
    first, second = (opened(ranks_of(run), View())[0] for run in (before, after))
    made = {(before, change, after) for change, judge in rank_changes.MADE.items() if judge(first, second)}
    assert made == {one for one in SHOWN if one[0] == before and one[2] == after}


def test_folders_of_other_traces_are_compared_trace_by_trace(tmp_path, capsys, monkeypatch):
    runs = sorted((H200 / "02_linear").glob("1024x32x64_bf16_*_eager.json.gz"))[:2]
    folders = [tmp_path / name for name in "ab"]
    for folder in folders:
        folder.mkdir()
        for path in runs:
            shutil.copy(path, folder)
    text = shown(capsys, monkeypatch, *folders)
    assert "run 4" in text and "job" not in text


@pytest.mark.parametrize(
    "flags", [["--json"], ["--markdown"], ["--html", "page.html"], ["--rank", "0"], ["--cluster", "tcp://a:1"],
              ["--fail-if", "step > 5%"], ["--previous"], ["--export", "x.json"], ["--step", "3"], ["--only", "work"]]
)  # fmt: skip
def test_what_a_comparison_of_jobs_does_not_do_is_refused_in_one_line(flags, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.main([str(UNEVEN), str(EVEN), *flags]) == 2
    found = capsys.readouterr()
    assert found.err.count("\n") == 1 and flags[0] in found.err and not found.out
    assert not list(tmp_path.iterdir())
