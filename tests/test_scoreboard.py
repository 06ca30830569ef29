"""The figures of benchmarks/scoreboard.py, on pairs whose figures are known, and what record.py keeps."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))

import scoreboard  # noqa: E402
from pairs.record import MODULES  # noqa: E402
from pairs.record import main as record  # noqa: E402
from scoreboard import Pair, ranked, scores, spearman  # noqa: E402


def pair(
    saved: float, promised: float | None, rank: int | None = 1, before: str = "a", change: str = "x", **more
) -> Pair:
    """Return a pair whose step of 100 µs becomes shorter by these shares."""
    predicted = (
        {}
        if promised is None
        else {"predicted_from_us": 80.0, "predicted_us": 80.0 * (1 - promised), "promised": promised}
    )
    return Pair(
        before, "b", change, 100.0, 100.0 * (1 - saved), None if promised is None else rank, **predicted, **more
    )


def test_spearman_is_the_correlation_of_ranks_and_equal_values_share_one():
    assert spearman([1, 2, 3], [10, 400, 500]) == pytest.approx(1)
    assert spearman([1, 2, 3], [3, 2, 1]) == pytest.approx(-1)
    assert spearman([1, 2, 2, 3], [1, 2, 3, 4]) == pytest.approx(0.9486832980505138)  # as scipy.stats.spearmanr
    assert spearman([1, 1], [1, 2]) is None
    assert spearman([], []) is None


def test_only_predicted_steps_count_as_near_and_the_error_is_of_the_measured_step():
    found = scores([pair(0.5, 0.36), pair(0.5, 0.34), pair(0.5, None)])
    assert (found["pairs"], found["predicted"], found["within_30_percent"]) == (3, 2, 1)  # 64 and 66 instead of 50
    assert found["median_error"] == pytest.approx(0.30)


def test_a_promise_is_5_percent_or_more_and_is_not_kept_below_2():
    found = scores([pair(0.0, 0.3), pair(0.019, 0.06), pair(0.021, 0.06), pair(-0.1, 0.04)])
    assert (found["promises"], found["promises_not_kept"]) == (3, 2)


def test_a_saving_is_as_printed_within_ten_points_or_in_the_range():
    assert pair(0.30, 0.39).as_printed and not pair(0.30, 0.41).as_printed
    assert pair(0.30, 0.9, low=0.2, high=0.3001).as_printed and not pair(0.31, 0.3, low=0.2, high=0.3).as_printed


def test_the_best_change_counts_where_several_were_measured_and_one_saves_something():
    first = [pair(0.5, 0.4, 1, "a", "x"), pair(0.2, 0.3, 2, "a", "y")]
    second = [pair(0.5, 0.1, 3, "b", "x"), pair(0.2, 0.3, 1, "b", "y")]
    missed = [pair(0.5, None, None, "c", "x"), pair(0.2, 0.3, 1, "c", "y")]
    nothing = [pair(0.01, 0.4, 1, "d", "x"), pair(0.0, 0.3, 2, "d", "y")]
    one = [pair(0.5, 0.4, 1, "e", "x"), pair(0.6, 0.4, 1, "e", "x")]
    later = [pair(0.5, 0.1, 3, "f", "x"), pair(0.2, None, None, "f", "y")]
    found = scores([one for recording in (first, second, missed, nothing, one, later) for one in ranked(recording)])
    assert found["recordings_with_several_changes"] == 4
    assert (found["best_is_first"], found["best_is_first_of_measured"]) == (1, 2)
    assert (found["savings_not_proposed"], found["savings_with_a_proposal_id"]) == (2, 10)


def test_a_recordings_best_change_is_that_of_all_its_pairs_also_where_only_some_are_counted():
    """A rule may be fitted to one change of a program. Of the others, the best one is not the best of the program."""
    fitted, other, least = ranked([pair(0.5, 0.4, 1), pair(0.3, 0.2, 2, change="y"), pair(0.1, 0.1, 3, change="z")])
    assert scores([other, least])["recordings_with_several_changes"] == 0
    assert scores([fitted])["best_is_first"] == 1


def test_a_saving_counts_only_if_another_machine_shows_it_too():
    """Two measurements of one step may differ by a tenth because of other programs on the machine."""
    found = scores(ranked([pair(0.2, None, change="x", others=(0.0,)), pair(0.1, 0.1, 1, change="y", others=(0.08,))]))
    assert (found["savings_with_a_proposal_id"], found["savings_not_proposed"]) == (1, 0)
    assert found["best_is_first"] == found["recordings_with_several_changes"] == 1
    assert scores([pair(0.0, 0.3, others=(0.1,)), pair(0.0, 0.3, others=(-0.1,))])["promises_not_kept"] == 1
    assert scores([pair(0.3, 0.3, others=(0.0,))])["promises_not_kept"] == 0


def test_medians_that_differ_by_other_programs_on_the_machine_are_no_saving():
    """The fastest steps of all four processes take as long, while their medians differ by 30%."""
    base = {"runs": [{"median_us": 150.0, "lowest_us": 100.0}, {"median_us": 130.0, "lowest_us": 101.0}]}
    row = {"runs": [{"median_us": 200.0, "lowest_us": 198.0}, {"median_us": 190.0, "lowest_us": 188.0}], "served": 2}
    found = scoreboard.shares_of_processes(base, row)
    assert sorted(found) == pytest.approx(sorted(1 - now / then for now in (99, 94) for then in (100, 101)))
    assert scoreboard.shares_of_processes(base, {**row, "elsewhere": -0.2})[-1] == -0.2
    without = {"runs": [{"median_us": 50.0}]}  # where the fastest steps were not kept, medians stand for them
    assert scoreboard.shares_of_processes(without, without) == (0.0,)
    one = pair(0.3, None, change="x", others=found)
    assert (one.least_saved, one.most_saved) == pytest.approx((0.01, 0.3))


def test_changes_without_a_proposal_id_are_never_the_best_one():
    found = scores(ranked([pair(0.9, None, None, change=""), pair(0.5, 0.4), pair(0.1, 0.2, 2, change="y")]))
    assert found["best_is_first"] == 1


def test_without_pairs_shares_and_medians_are_none():
    found = scores([])
    assert found["median_error"] is None and found["rank_correlation"] is None and found["pairs"] == 0


def test_a_larger_batch_counts_for_one_batch(tmp_path):
    base = {"proposal": "", "served": 1, "runs": [{"median_us": 90.0}, {"median_us": 110.0}], "failures": []}
    larger = {"proposal": "larger_batch", "served": 2, "runs": [{"median_us": 120.0}], "failures": []}
    failed = {"proposal": "cuda_graph", "served": 1, "runs": [], "failures": ["it took too long"]}
    (tmp_path / "net").mkdir()
    trace = ROOT / "traces/reference/nvidia-h200/changes/vit/eager.json.gz"
    (tmp_path / "net/base.json.gz").write_bytes(trace.read_bytes())
    (tmp_path / "results.json").write_text(json.dumps({"net": {"base": base, "larger": larger, "graph": failed}}))
    found = scoreboard.of_folder(tmp_path)
    (one,) = found["unfitted"]
    assert found["fitted"] == []
    assert (one.after, one.measured_from_us, one.measured_us) == ("net/larger", 100.0, 60.0)


def test_results_of_two_folders_are_put_together(tmp_path):
    for name in ("first", "second"):
        (tmp_path / name / name).mkdir(parents=True)
        (tmp_path / name / "results.json").write_text(json.dumps({name: {}}))
        (tmp_path / name / name / "base.json.gz").write_bytes(b"trace")
    assert record([str(tmp_path / "both"), "--add", str(tmp_path / "first"), str(tmp_path / "second")]) == 0
    assert json.loads((tmp_path / "both/results.json").read_text()) == {"first": {}, "second": {}}
    assert (tmp_path / "both/second/base.json.gz").exists()


def test_what_changes_saved_in_another_folder_is_noted_beside_them(tmp_path):
    def row(*times, served=1):
        return {"proposal": "x", "served": served, "runs": [{"median_us": one} for one in times], "failures": []}

    here = {"net": {"base": row(100.0), "graph": row(50.0), "larger": row(60.0)}, "other": {"base": row(1.0)}}
    there = {"net": {"base": row(80.0, 120.0), "graph": row(90.0), "larger": row(160.0, served=2), "new": row(5.0)}}
    for name, found in (("here", here), ("there", {**there, "unknown": there["net"]})):
        (tmp_path / name).mkdir()
        (tmp_path / name / "results.json").write_text(json.dumps(found))
    assert record([str(tmp_path / "here"), "--again", str(tmp_path / "there")]) == 0
    here["net"]["graph"]["elsewhere"], here["net"]["larger"]["elsewhere"] = 0.1, 0.2
    assert json.loads((tmp_path / "here/results.json").read_text()) == here


@pytest.mark.exhaustive
def test_programs_are_recorded_on_the_cpu_and_a_slow_one_is_a_row(tmp_path):
    pytest.importorskip("torch")
    command = [
        sys.executable,
        ROOT / "benchmarks/pairs/record.py",
        tmp_path,
        "--device",
        "cpu",
        "--tiny",
        "--rounds",
        "1",
    ]
    done = subprocess.run(
        [*command, "--compile", "all", "--programs", "neural_ode"],
        capture_output=True,
        text=True,
        env=os.environ,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "results.json").read_text())["neural_ode"]
    assert [len(row["runs"]) for row in rows.values()] == [1, 1, 1, 1]
    assert rows["base"]["runs"][0]["last"] == pytest.approx(rows["compile"]["runs"][0]["last"], rel=1e-3)
    late = ["--fresh", "--programs", "gaussian_process", "--run-seconds", "0"]
    subprocess.run([*command, *late], check=True, capture_output=True)
    rows = json.loads((tmp_path / "results.json").read_text())
    assert rows["gaussian_process"]["base"]["failures"] == ["it took too long"] and rows["neural_ode"]["base"]["runs"]


# What record.py needs of torch. A variable says where CUDA starts: everywhere, where this was imported, or nowhere.
TORCH = """
import os, sys, types
imported = os.getpid()
class Tensor:
    def detach(self): return self
    flatten = double = cpu = cos = detach
    def __getitem__(self, rows): return self
    def __len__(self): return 3
    def __mul__(self, other): return self
    def sum(self): return 1.5
    item = sum
def start():
    if not {"all": True, "none": False}.get(os.environ["CUDA_STARTS"], os.getpid() == imported):
        raise RuntimeError("CUDA error: initialization error")
ones = arange = lambda *_, **__: Tensor()
manual_seed = lambda _: None
__version__ = "0"
names = {"init": start, "synchronize": start, "empty_cache": start, "is_available": lambda: True}
cuda = types.SimpleNamespace(**names, get_device_name=lambda: "a GPU")
class Profile:
    def __init__(self, **_): pass
    def __enter__(self): return self
    def __exit__(self, *_): pass
    def step(self): pass
    def export_chrome_trace(self, path): open(path, "w").write("{}")
class Module:
    def __call__(self): pass
nn = types.SimpleNamespace(Module=Module)
profiler = sys.modules["torch.profiler"] = types.SimpleNamespace(profile=Profile, schedule=lambda **_: None)
"""
PROGRAM = """
import os, time, torch
def quick(change):
    if change == "raises": raise ValueError("a wrong shape")
    if change == "dies": os._exit(7)
    if change == "hangs": time.sleep(1000)
    return torch.Tensor
PROGRAMS = {quick: {"raises": "a", "dies": "b", "hangs": "c", "compile": "d"}}
"""


@pytest.mark.parametrize("starts", ["all", "importer", "none"])
def test_processes_start_anew_where_a_forked_one_cannot_use_the_gpu(tmp_path, starts):
    (tmp_path / "torch.py").write_text(TORCH)
    (tmp_path / "vision.py").write_text(PROGRAM)
    for name in set(MODULES) - {"vision"}:
        (tmp_path / f"{name}.py").write_text("PROGRAMS = {}\n")
    shutil.copyfile(ROOT / "benchmarks/pairs/record.py", tmp_path / "record.py")
    env = {**os.environ, "CUDA_STARTS": starts, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    command = [sys.executable, tmp_path / "record.py", tmp_path / "out", "--run-seconds", "8"]
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False, timeout=60)
    assert ("each process starts anew" in done.stdout) == (starts != "all")
    if starts == "none":
        assert done.returncode == 2 and done.stderr == "record.py: no process can use the GPU\n"
        return
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "out/results.json").read_text())["quick"]
    assert {name: len(row["runs"]) for name, row in rows.items()} == {"base": 2, "raises": 0, "dies": 0, "hangs": 0}
    for run in rows["base"]["runs"]:
        assert len(run["passes_us"]) == 3 and run["median_us"] == min(run["passes_us"])
    assert "a wrong shape" in rows["raises"]["failures"][0] and "status 7" in rows["dies"]["failures"][0]
    assert rows["hangs"]["failures"] == ["it took too long"] * 2
    assert (tmp_path / "out/quick/base.json.gz").exists()
