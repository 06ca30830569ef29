"""Measurements before the profiler starts, the agreement of several ranks, and early refusals."""

import ast
import contextlib
import gzip
import importlib.util
import io
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, names, only_trace

import recompile
import sweep
from common import flags as flags_module
from common import harness, lesson
from common.distributed import Place, _flags, _require_same_flags
from common.flags import UNPROFILED_STEPS, answer_before_torch, declared_by, parse
from common.publish import finish_trace, run_of
from tracereader.command import BadInput

NUMBERED = sorted(ROOT.glob("0*.py"))
TINY = ("--layers", "2", "--dim", "16", "--seq", "8", "--dtype", "fp32", "--device", "cpu")
HUGE = "9" * 5000


def counting(*typed, seconds=0.0):
    """Return a step that sleeps for some time and counts its calls, and the flags of its run on a CPU."""
    calls = []

    def step():
        calls.append(time.sleep(seconds))

    return step, calls, harness.prepare(parse([*typed, "--device", "cpu"], "A lesson.", "x.py"))


@pytest.mark.parametrize("file", NUMBERED, ids=lambda file: file.stem)
def test_every_script_measures_a_step_between_the_warm_up_and_the_profiler(file):
    (profiled,) = [one for one in ast.parse(file.read_text()).body if getattr(one, "name", "") == "profiled"]
    lines = [line.strip() for line in ast.unparse(profiled).splitlines()]
    at = lines.index("steps = warm_up(one_step, args)")
    assert lines[at + 1] == "steps.unprofiled_us = unprofiled_step_us(one_step, args)"
    assert lines[at + 2].startswith("with ") and "profile" in lines[at + 2]


def test_a_step_without_the_profiler_is_the_median_of_a_few():
    step, calls, args = counting("--warmup", seconds=0.001)
    assert harness.unprofiled_step_us(step, args) >= 1000
    assert len(calls) <= UNPROFILED_STEPS
    step, calls, args = counting("--warmup", seconds=0.25)
    assert harness.unprofiled_step_us(step, args) >= 250_000
    assert len(calls) == 2, "of a step this long one is enough"


@pytest.mark.parametrize("typed", [(), ("--warmup", "--pause", "1")])
def test_cold_runs_and_runs_with_pauses_call_no_additional_step(typed):
    step, calls, args = counting(*typed)
    assert harness.unprofiled_step_us(step, args) is None
    assert not calls


def test_all_ranks_make_as_many_steps_as_rank_0():
    step, calls, args = counting("--warmup")
    ranks = SimpleNamespace(of_rank_0=lambda name, value: 4)
    harness.unprofiled_step_us(step, replace(args, ranks=ranks))
    assert len(calls) == 1 + 4


def test_the_device_is_synchronized_only_at_both_ends(monkeypatch):
    """The device takes 7 ms for a step and 1 ms for the first event."""
    did = []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            did.append("event")
            self.ms = 7.0 * did.count("step")

        def elapsed_time(self, other):
            return other.ms - self.ms

    device = SimpleNamespace(Event=Event)
    monkeypatch.setattr(torch, "get_device_module", lambda of: device)
    monkeypatch.setattr(harness, "synchronize", lambda of: did.append("wait"))
    args = SimpleNamespace(warmup=3, pause=0, ranks=None, device=SimpleNamespace(type="cuda"))
    assert harness.unprofiled_step_us(lambda: did.append("step"), args) == 7000
    measured = UNPROFILED_STEPS - 1
    assert did == ["step", "wait", "event", *["step", "event"] * measured, "wait"]


def test_a_warm_trace_holds_the_step_without_the_profiler_and_a_cold_one_does_not(run, tmp_path):
    for typed, told in (((), False), (("--warmup",), True)):
        assert run("02_linear", "--device", "cpu", *typed) == 0
        (file,) = tmp_path.rglob("*.json")
        document = json.loads(file.read_text())
        file.unlink()
        assert (document["lesson"]["facts"]["unprofiled_step_us"] is not None) is told
        assert names(document, "user_annotation").count("linear_fwd") == 3
        steps = [name for name in names(document, "user_annotation") if name.startswith("ProfilerStep")]
        assert steps == ["ProfilerStep#2", "ProfilerStep#3", "ProfilerStep#4"]


@pytest.mark.gpu
def test_on_a_gpu_a_step_without_the_profiler_takes_no_longer(run, tmp_path):
    assert run("02_linear", "--warmup") == 0
    document = only_trace(tmp_path)
    steps = [one["dur"] for one in document["traceEvents"] if one["name"].startswith("ProfilerStep") and "dur" in one]
    assert 0 < document["lesson"]["facts"]["unprofiled_step_us"] < max(steps)


def test_the_loader_has_batches_for_the_steps_without_the_profiler(run, tmp_path, capsys):
    assert run("06_training", *TINY, "--loader", "0", "--workers", "0", "--warmup") == 0
    assert only_trace(tmp_path)["lesson"]["facts"]["unprofiled_step_us"] > 0
    assert "This run is smaller because it is on a CPU: --batch 2\n" in capsys.readouterr().out


@pytest.mark.parametrize("columns", ["40", "200"])
def test_a_written_file_can_be_copied_from_any_terminal(columns, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.chdir(tmp_path)
    trace, table = tmp_path / "traces/a-long-folder/of_a_long_run.json", tmp_path / "traces/of_a_long_run.txt"
    lesson._files(SimpleNamespace(trace=trace, table=table, code=None))
    said = capsys.readouterr().out
    lines = [part.strip() for line in said.splitlines() for part in line.split("   ") if part.strip()]
    assert "\ufffd" not in said
    assert {str(path.relative_to(tmp_path)) for path in (trace, table)} < set(lines)
    assert (len(said.splitlines()) == 2) is (columns == "200")


def test_the_decoder_has_four_layers_by_default_on_a_cpu(scripts):
    script = scripts["05_llm"]
    for typed, layers in (((), 4), (("--layers", "28"), 28), (("--model", "somebody/a-model"), None)):
        assert harness.prepare(script.flags(["--device", "cpu", *typed])).layers == layers
    assert harness.prepare(script.flags(["--device", "cpu"])).tag.split("_cpu")[0].endswith("_layers4")


def agreed(*typed):
    """Return the line with which each rank refuses these flags, if any does."""
    store = torch.distributed.HashStore()

    def rank(number, words):
        with pytest.raises(BadInput) if different else contextlib.nullcontext() as refused:
            _require_same_flags(Place(number, number, len(typed)), store, 10)
        return str(refused.value) if different else None

    script = flags_module.load_script(ROOT / "06_training.py", [])
    different = len(set(typed)) > 1
    for number, words in enumerate(typed):
        store.set(f"flags/{number}", json.dumps(_flags(parse(words.split(), "", "06.py", *script.FLAGS, ranks=True))))
    with ThreadPoolExecutor(len(typed)) as pool:
        return list(pool.map(rank, range(len(typed)), typed))


def test_ranks_with_different_flags_are_all_refused_before_they_train():
    assert agreed("--warmup", "--warmup") == [None, None]
    line = (
        "rank 2 was started without --fused, with --slow 1, and rank 0 with --fused, without --slow: "
        "start all ranks with the same flags"
    )
    assert agreed("--fused", "--fused", "--slow 1") == [line] * 3


@pytest.fixture
def as_rank(monkeypatch):
    def one_of(rank, world_size):
        for name, value in {
            "RANK": rank, "WORLD_SIZE": world_size, "LOCAL_RANK": rank, "MASTER_ADDR": "localhost", "MASTER_PORT": 1,
        }.items():  # fmt: skip
            monkeypatch.setenv(name, str(value))

    return one_of


@pytest.mark.parametrize("file", [file for file in NUMBERED if file.stem != "06_training"], ids=lambda file: file.stem)
def test_a_script_for_one_process_is_refused_by_one_rank_of_several(run, as_rank, tmp_path, capsys, file):
    as_rank(0, 2)
    assert run(file.stem) == 2
    said = capsys.readouterr()
    assert "this script is for one process, and 2 were started" in said.err and said.err.count("\n") == 1
    as_rank(1, 2)
    assert run(file.stem) == 2
    assert capsys.readouterr() == ("", "")
    assert not list(tmp_path.iterdir())


def test_one_launched_process_counts_as_a_single_one(scripts, as_rank):
    as_rank(0, 1)
    assert scripts["01_matmul_add"].flags([]).size == 64


def two_ranks(folder, *run_ids):
    """Return traces of two GPUs' ranks, as two runs with these ids would write them into one folder."""
    recorded = ROOT / "traces/reference/nvidia-h200-x2/06_training"
    files = []
    for rank, run_id in enumerate(run_ids):
        name = f"4x1024x1024x16_bf16_warm_eager_ddp_x2_rank{rank}.json"
        file = folder / name
        file.write_bytes(gzip.decompress((recorded / f"{name}.gz").read_bytes()))
        if run_id:
            finish_trace(file, lesson=json.loads(file.read_text())["lesson"] | {"run": run_id})
        else:
            file.unlink()
        files.append(file)
    return tuple(files)


@pytest.mark.parametrize(("other", "read"), [("new", True), ("old", False), (None, False)])
def test_rank_0_reads_and_names_the_traces_of_this_run_alone(monkeypatch, tmp_path, capsys, other, read):
    files = two_ranks(tmp_path, "new", other)
    assert run_of(files[1]) == other
    run = harness.Run(
        id="new", title="06_training", machine="two GPUs", trace=files[0], table=tmp_path / "table", code=None,
        first_call_s=1.0, error=None, against="", peak_bytes=None, smaller={}, warmup=0, ranks=files,
    )  # fmt: skip
    script = flags_module.load_script(ROOT / "06_training.py", [])
    monkeypatch.setattr(lesson, "_run", lambda *_: run)
    main = lesson.lesson(script.flags, script.build, script.profiled, script.predictions)
    assert main([*TINY, "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert ("2 of 2 ranks" in printed) is read
    assert ("_rank1" in printed) is read
    assert ("the other ranks' traces are not in this folder" in printed) is not read


def test_a_rank_that_cannot_write_ends_the_other_ranks(tmp_path):
    """It fails inside the context that ends the other ranks with its line."""
    told = []

    @contextlib.contextmanager
    def processes(args):
        try:
            yield replace(args, ranks=SimpleNamespace())
        except BadInput as problem:
            told.append(str(problem))
            raise

    (tmp_path / "file").touch()
    _, _, args = counting("--out", str(tmp_path / "file"))
    with pytest.raises(BadInput, match="Not a directory; --out names another folder"):
        lesson._run(args, None, None, processes)
    assert len(told) == 1


@pytest.mark.parametrize("number", [HUGE, "-" + HUGE, "x" * 5000, "0" * 5000 + HUGE])
def test_a_number_of_thousands_of_digits_is_refused_in_a_short_line(run, capsys, tmp_path, number):
    assert run("01_matmul_add", "--size", number) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and len(said) < 300
    assert ("not a whole number" in said) is number.startswith("x")


@pytest.mark.parametrize(("program", "script"), [(sweep.main, "01_matmul_add.py"), (recompile.main, "02_linear.py")])
def test_a_long_number_among_several_is_refused_in_a_short_line(capsys, program, script):
    flag = "--size" if script.startswith("01") else "--batch"
    assert program([str(ROOT / script), flag, "64", HUGE]) == 2
    said = capsys.readouterr().err
    assert f"argument {flag}: 999" in said and "too large" in said and said.count("\n") == 1 and len(said) < 300


@pytest.mark.parametrize(
    ("named", "here"), [("bfloat16", "bf16"), ("torch.float16", "fp16"), ("half", "fp16"), ("float32", "fp32")]
)
def test_torchs_name_of_a_type_gives_the_flags_name(run, capsys, named, here):
    assert run("01_matmul_add", "--dtype", named) == 2
    said = capsys.readouterr().err
    assert f"{named} is written {here} here" in said and said.count("\n") == 1


def without_packages(tmp_path, *command, but=()):
    """Run the program without installed packages, except those in `but`. Return its line of error."""
    site = tmp_path / "site"
    site.mkdir()
    for name in but:
        (site / name).symlink_to(os.path.dirname(importlib.util.find_spec(name).origin))
    done = subprocess.run(
        [sys.executable, "-S", *command], cwd=ROOT, env=os.environ | {"PYTHONPATH": str(site)}, capture_output=True,
        text=True,
    )  # fmt: skip
    assert done.stdout == "" and done.stderr.count("\n") == 1, done.stderr
    assert done.returncode == 2
    return done.stderr


READER = ("rich", "msgspec", "markdown_it", "mdurl", "pygments")


def test_recompile_without_inputs_is_refused_without_torch(tmp_path):
    said = without_packages(tmp_path, "recompile.py", "02_linear.py", "--compile", but=READER)
    assert "--strides" in said and "as in --batch 1024 2048" in said


def test_the_flags_that_a_script_declares_are_read_without_the_rest_of_it(tmp_path):
    assert [one.name for one in declared_by(ROOT / "02_linear.py") if one.shape] == ["--batch", "--in_dim", "--out_dim"]
    (tmp_path / "other.py").write_text("")
    with pytest.raises(BadInput, match="no numbered script"):
        declared_by(tmp_path / "other.py")


@pytest.mark.parametrize(
    ("script", "there", "lacks"),
    [
        ("01_matmul_add.py", (), "rich and msgspec"),
        ("01_matmul_add.py", READER, "torch"),
        ("03_kernels_mlp.py", READER, "torch and kernels"),
    ],
)
def test_a_missing_package_is_named_in_one_line(tmp_path, script, there, lacks):
    said = without_packages(tmp_path, script, but=there)
    assert said.startswith(f"{script}: this environment lacks {lacks}: type uv run {script}")


@pytest.mark.parametrize("terminal", [True, False])
def test_a_terminal_shows_that_torch_is_imported(monkeypatch, tmp_path, terminal):
    class Stream(io.StringIO):
        def isatty(self):
            return terminal

    stream = Stream()
    monkeypatch.setattr(sys, "argv", [str(ROOT / "x.py")])
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.delitem(sys.modules, "torch")
    answer_before_torch(lambda: SimpleNamespace(out=tmp_path, script="x", on=None), str(Path(ROOT / "x.py")))
    assert stream.getvalue().startswith("importing torch") is terminal
    assert stream.getvalue().count("\n") == terminal
