"""Two jobs of several ranks side by side: each is a folder of traces."""

import json
import re
import shutil
from statistics import median

import pytest
from references import H200
from test_four_gpus import PAIRS, ranks_of, unprofiled_us
from test_many_ranks import said
from test_ranks import as_json, document, length, marks, slices, spans

from tracereader import cli
from tracereader.changes import ranks as rank_changes
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
    made = {(before, change, after) for change, judge in rank_changes.FOLLOWED.items() if judge(first, second)}
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
    "flags", [["--json"], ["--markdown"], ["--html", "page.html"], ["--rank", "0"],
              ["--fail-if", "step > 5%"], ["--previous"], ["--export", "x.json"], ["--step", "3"], ["--only", "work"]]
)  # fmt: skip
def test_what_a_comparison_of_jobs_does_not_do_is_refused_in_one_line(flags, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.main([str(UNEVEN), str(EVEN), *flags]) == 2
    found = capsys.readouterr()
    assert found.err.count("\n") == 1 and flags[0] in found.err and not found.out
    assert not list(tmp_path.iterdir())


EXPERTS = ranks_of("experts_skewed")


def folder_of(folder, paths, change=None):
    """Return a new folder with these traces. change: changes the document of the first one."""
    folder.mkdir()
    for number, path in enumerate(paths):
        if change and not number:
            found = document(path)
            change(found)
            (folder / path.name.removesuffix(".gz")).write_text(json.dumps(found))
        else:
            shutil.copy(path, folder)
    return folder


def refused(capsys, *words):
    assert cli.main(list(map(str, words))) == 2
    found = capsys.readouterr()
    assert found.err.count("\n") == 1 and not found.out
    return found.err


def test_a_folder_that_does_not_exist_is_refused_beside_a_job(tmp_path, capsys):
    assert "no such file" in refused(capsys, tmp_path / "none", EXPERTS[0].parent)
    assert "no such file" in refused(capsys, EXPERTS[0].parent, tmp_path / "none")


def test_ranks_of_one_job_in_a_folder_per_node_are_no_two_jobs(tmp_path, capsys, monkeypatch):
    nodes = [folder_of(tmp_path / f"node{number}", EXPERTS[2 * number :][:2]) for number in (0, 1)]
    assert "different ranks of one job" in refused(capsys, *nodes)
    assert "4 of 4 ranks" in shown(capsys, monkeypatch, *nodes, "--ranks")


def test_jobs_without_a_common_step_are_refused(tmp_path, capsys):
    def later(found):
        for event in found["traceEvents"]:
            if event.get("name", "").startswith("ProfilerStep#"):
                event["name"] = f"ProfilerStep#{int(event['name'].split('#')[1]) + 50}"

    folder = folder_of(tmp_path / "later", EXPERTS[:2], later)  # of more ranks, the odd one is left out
    assert "no step that all ranks have" in refused(capsys, folder, EXPERTS[0].parent)


def test_what_is_left_out_of_a_job_is_named(tmp_path, capsys, monkeypatch):
    """Another tool's file beside the traces is no reason to refuse the job."""
    folder = folder_of(tmp_path / "job", EXPERTS[:3])
    (folder / "config.json").write_text('{"lr": 1}')
    text = said(shown(capsys, monkeypatch, folder, EXPERTS[0].parent))
    assert "3 of 4 ranks" in text and "missing: rank 3" in text and "config.json" in text
    assert "3 of 4 ranks" in shown(capsys, monkeypatch, folder)


def no_time(found):
    """Steps and all other events last no time."""
    for event in found["traceEvents"]:
        if "dur" in event:
            event["dur"] = 0
        if "ts" in event:
            event["ts"] = 1e9


def another_base(found):
    found["baseTimeNanoseconds"] = 10**40


def equal_names(found):
    for event in found["traceEvents"]:
        if event.get("name", "").startswith("ProfilerStep#"):
            event["name"] = "ProfilerStep#3"


@pytest.mark.parametrize("change", [no_time, another_base, equal_names])
@pytest.mark.parametrize(
    "flags", [[], ["--json=all"], ["--html", "page.html", "--force"]], ids=lambda one: (one or ["screen"])[0]
)
def test_strange_values_give_a_report_or_one_line(change, flags, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    changed = [folder_of(tmp_path / f"one{number}", [path], change) for number, path in enumerate(EXPERTS)]
    files = [path for folder in changed for path in folder.iterdir()]
    status = cli.main([*map(str, files), *flags])
    found = capsys.readouterr()
    assert status == 0 or (status == 2 and found.err.count("\n") == 1)


@pytest.mark.parametrize("flags", [["--rank", "0"], ["--step", "0"]])
def test_the_number_zero_is_a_value_of_a_flag(flags, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert flags[0] in refused(capsys, EXPERTS[0].parent, *flags, "--export", "x.json")
    if flags[0] == "--rank":
        assert flags[0] in refused(capsys, EXPERTS[0].parent, *flags, "--html", "x.html")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("flag", ["--html", "--export"])
def test_a_capture_in_a_folder_is_not_overwritten(flag, tmp_path, capsys):
    captures = folder_of(tmp_path / "captures", EXPERTS[:1])
    (capture,) = captures.iterdir()
    before = capture.read_bytes()
    refused(capsys, EXPERTS[1], "--capture", captures, flag, capture, "--force")
    assert capture.read_bytes() == before


def test_a_file_address_of_a_folder_stands_for_its_traces(capsys, monkeypatch):
    assert "4 of 4 ranks" in shown(capsys, monkeypatch, f"file://{EXPERTS[0].parent.resolve()}/")


def test_a_byte_order_mark_does_not_hide_a_rank(tmp_path, capsys, monkeypatch):
    folder = folder_of(tmp_path / "job", EXPERTS, lambda found: None)
    (first,) = folder.glob("*.json")
    first.write_bytes(b"\xef\xbb\xbf" + first.read_bytes())
    assert "4 of 4 ranks" in shown(capsys, monkeypatch, folder)
