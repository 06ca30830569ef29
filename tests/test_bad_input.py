"""Each wrong input: one clear line on stderr, exit status 2, nothing written or lost."""

import json
import os
import signal
import subprocess
import sys

import pytest
import torch
from conftest import LIGER, ROOT

from common import harness, publish
from common.flags import parse
from common.memory import within_memory
from tracereader.command import BadInput, RunFailed, command


@pytest.mark.parametrize(
    ("script", "flags", "says"),
    [
        ("01_matmul_add", "--size 0", "too small"),
        ("01_matmul_add", "--size -4", "too small"),
        ("01_matmul_add", "--size four", "not a whole number"),
        ("01_matmul_add", "--size 4.5", "not a whole number"),
        ("01_matmul_add", "--size 64 128", "unrecognized arguments"),
        ("01_matmul_add", f"--size {10**30}", "too large"),
        ("01_matmul_add", "--size 10000000", "these shapes need about"),
        ("01_matmul_add", f"--batch {10**18}", "larger than any memory"),
        ("01_matmul_add", "--batch 0", "too small"),
        ("01_matmul_add", "--batch 2 --op addmm", "leave out --batch"),
        ("01_matmul_add", "--op mul", "invalid choice"),
        ("01_matmul_add", "--dtype int8", "invalid choice"),
        ("01_matmul_add", "--device tpu", "invalid choice"),
        ("01_matmul_add", "--compile fastest", "invalid choice"),
        ("01_matmul_add", "--warmup -1", "too small"),
        ("01_matmul_add", "--active 0", "too small"),
        ("01_matmul_add", "--wait -1", "too small"),
        ("01_matmul_add", "--pause -1", "too small"),
        ("01_matmul_add", "--step 9", "records #2 to #4"),
        ("01_matmul_add", "--only nothing", "no section 'nothing'"),
        ("01_matmul_add", "--nonsense", "unrecognized arguments"),
        ("02_linear", "--in_dim 0", "too small"),
        ("02_linear", "--in_dim 10000000 --out_dim 10000000", "these shapes need about"),
        ("03_simple_mlp", "--seq 0", "too small"),
        ("03_simple_mlp", "--batch 10000000", "these shapes need about"),
        ("03_kernels_mlp", "--device cpu", "03_simple_mlp.py is the same MLP"),
    ],
)
def test_refused_in_one_line(run, tmp_path, capsys, script, flags, says):
    assert run(script, *flags.split()) == 2
    screen = capsys.readouterr()
    assert says in screen.err
    assert screen.err.count("\n") == 1
    assert screen.out == ""
    assert not list(tmp_path.rglob("*.*"))


@pytest.mark.parametrize(
    ("script", "flags", "status"),
    [
        ("01_matmul_add", "--help", 0),
        ("01_matmul_add", "--size 0", 2),
        ("01_matmul_add", "--batch 2 --op addmm", 2),
        ("01_matmul_add", "--step 9", 2),
        ("01_matmul_add", "--guess", 2),
        ("02_linear", "--in_dim four", 2),
        ("03_simple_mlp", "--nonsense", 2),
        ("03_kernels_mlp", "--device cpu", 2),
    ],
)
def test_answered_before_torch_is_loaded(script, flags, status):
    program = (
        "import runpy, sys\n"
        "sys.argv = sys.argv[1:]\n"
        "try: runpy.run_path(sys.argv[0], run_name='__main__')\n"
        "except SystemExit as stop: print('status', stop.code, 'torch' in sys.modules)\n"
    )
    command_line = [sys.executable, "-c", program, f"{script}.py", *flags.split()]
    done = subprocess.run(command_line, cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == f"status {status} False", done.stderr
    assert done.stderr.count("\n") == (1 if status else 0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_no_such_device(run, capsys):
    assert run("01_matmul_add", "--device", "cuda") == 2
    assert "sees no such device" in capsys.readouterr().err


def test_out_that_is_a_file(scripts, tmp_path, capsys):
    blocked = tmp_path / "file"
    blocked.write_text("mine")
    assert scripts["01_matmul_add"].main(["--size", "8", "--device", "cpu", "--out", str(blocked)]) == 2
    assert "cannot write to" in capsys.readouterr().err
    assert blocked.read_text() == "mine"


def test_compile_on_a_cpu_without_a_compiler(run, monkeypatch, capsys):
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert run("01_matmul_add", "--size", "8", "--device", "cpu", "--compile") == 2
    assert "needs a C++ compiler" in capsys.readouterr().err


def test_hub_out_of_reach():
    script = (
        "from kernels import get_kernel; from common import harness; from tracereader.command import command\n"
        "@command\n"
        "def main(argv=None):\n"
        f"    with harness.hub_errors('{LIGER}'): get_kernel('{LIGER}', version=1)\n"
        "raise SystemExit(main())"
    )
    nowhere = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": "/nonexistent", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", script], env=os.environ | nowhere, cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    for way in ("HF_HUB_OFFLINE=1", f"LOCAL_KERNELS={LIGER}=FOLDER"):
        assert way in done.stderr


def test_local_kernels_without_a_build(monkeypatch, tmp_path):
    from kernels import get_kernel

    monkeypatch.setenv("LOCAL_KERNELS", f"{LIGER}={tmp_path}")
    with pytest.raises(BadInput, match="could not be loaded"), harness.hub_errors(LIGER):
        get_kernel(LIGER, version=1)


def test_the_real_loader_takes_the_local_package(local_liger):
    from kernels import get_kernel

    layer = get_kernel(LIGER, version=1).layers.LigerGEGLUMLP
    assert issubclass(layer, torch.nn.Module)


@pytest.fixture
def args(tmp_path):
    flags = ["--device", "cpu", "--dtype", "fp32", "--out", str(tmp_path)]
    settled = harness.prepare(parse(flags, "A lesson.", "lesson.py"))
    publish.require_writable(tmp_path / "lesson")
    return settled


def profile(args, step, reference=None):
    """The loop of every numbered script."""
    steps = harness.warm_up(step, args)
    with harness.profiler(args) as prof:
        for one_step in steps:
            out = one_step()
            prof.step()
    return harness.save(prof, args, steps, out, reference)


def contents(folder):
    return {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()}


@pytest.mark.parametrize("wrong", [1.01, float("nan")])
def test_a_wrong_result_stops_the_run(args, tmp_path, wrong):
    with pytest.raises(RunFailed, match="relative error"):
        profile(args, lambda: torch.ones(2, 2) * wrong, reference=lambda: torch.ones(2, 2))
    assert not contents(tmp_path)


def test_relative_error_is_the_norm_of_the_difference():
    out, ref = torch.tensor([3.0, 4.0]), torch.tensor([3.0, 5.0])
    assert harness.relative_error(out, ref) == pytest.approx(1 / 34**0.5)


def test_a_trace_without_gpu_work_is_refused(args):
    run = profile(args, lambda: torch.ones(2, 2) + 1)
    with pytest.raises(RunFailed, match="no GPU work"):
        harness.check_recording(run.trace, torch.device("cuda"))


def test_a_trace_with_zeroed_events_is_refused(args):
    run = profile(args, lambda: torch.ones(2, 2) + 1)
    document = json.loads(run.trace.read_text())
    half = [event for event in document["traceEvents"] if event["ph"] == "X"][5:]
    for event in half:
        event["ts"] = event["dur"] = 0
    run.trace.write_text(json.dumps(document))
    with pytest.raises(RunFailed, match=f"{len(half)} of"):
        harness.check_recording(run.trace, torch.device("cpu"))


def test_ctrl_c_is_one_line(capsys):
    @command
    def main(argv=None):
        raise KeyboardInterrupt

    assert main() == 130
    assert capsys.readouterr().err.count("\n") == 1


# Memory.


def test_what_the_allocator_refuses_is_bad_input():
    refusal = r"need about 1152921\.5 TB or more and this machine has .* free"
    with pytest.raises(BadInput, match=refusal), within_memory(torch.device("cpu")):
        torch.empty(2**60, dtype=torch.int8)


@pytest.mark.skipif(sys.platform != "linux", reason="the limit is Linux's")
def test_no_more_memory_than_is_free_is_handed_out():
    """Linux would hand out this much, and begin to swap once it is written to."""
    from common.memory import free_bytes

    cpu = torch.device("cpu")
    with pytest.raises(BadInput, match="make them smaller"), within_memory(cpu):
        torch.empty(free_bytes(cpu) + 2**28, dtype=torch.int8)
    torch.empty(2**20)


def test_another_error_stays_what_it_is():
    with pytest.raises(RuntimeError, match="shape"), within_memory(torch.device("cpu")):
        torch.ones(2, 3) @ torch.ones(2, 3)


# Both files appear whole, or neither does.


@pytest.fixture
def earlier(tmp_path):
    """Two files of an earlier run, by name."""
    files = {name: f"earlier {name}" for name in ("a.json", "a.txt")}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    return files


def texts(folder):
    return {file.name: file.read_text() for file in folder.iterdir()}


def publish_new(folder, in_between=lambda: None):
    with publish.published(folder, "a.json", "a.txt") as files:
        for file in files:
            file.write_text(f"new {file.name}")
            in_between()


NEW = {"a.json": "new a.json", "a.txt": "new a.txt"}


def test_files_replace_those_of_an_earlier_run(tmp_path, earlier):
    publish_new(tmp_path)
    assert texts(tmp_path) == NEW


@pytest.mark.parametrize("failure", [KeyboardInterrupt, ValueError])
def test_files_of_an_earlier_run_survive_a_broken_one(tmp_path, earlier, failure):
    def fail():
        raise failure

    with pytest.raises(failure):
        publish_new(tmp_path, fail)
    assert texts(tmp_path) == earlier


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_a_signal_while_writing_leaves_the_earlier_files(tmp_path, earlier, name):
    before = signal.getsignal(signal.Signals[name])
    with pytest.raises(KeyboardInterrupt if name == "SIGINT" else SystemExit):
        publish_new(tmp_path, lambda: signal.raise_signal(signal.Signals[name]))
    assert texts(tmp_path) == earlier
    assert signal.getsignal(signal.Signals[name]) is before


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_a_signal_between_the_two_renames_waits(tmp_path, earlier, monkeypatch, name):
    rename = os.replace

    def rename_and_signal(*paths):
        rename(*paths)
        signal.raise_signal(signal.Signals[name])

    monkeypatch.setattr(os, "replace", rename_and_signal)
    with pytest.raises(KeyboardInterrupt if name == "SIGINT" else SystemExit):
        publish_new(tmp_path)
    assert texts(tmp_path) == NEW


def test_an_ignored_signal_stays_ignored(tmp_path):
    """As under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        publish_new(tmp_path, lambda: signal.raise_signal(signal.SIGHUP))
    finally:
        signal.signal(signal.SIGHUP, before)
    assert texts(tmp_path) == NEW


@pytest.mark.parametrize("first", [True, False])
def test_a_second_rename_that_fails_undoes_the_first(tmp_path, first):
    (tmp_path / "a.txt").mkdir()
    if first:
        (tmp_path / "a.json").write_text("earlier")
    with pytest.raises(BadInput, match="cannot write to"):
        publish_new(tmp_path)
    assert sorted(file.name for file in tmp_path.iterdir()) == (["a.json", "a.txt"] if first else ["a.txt"])
    assert not first or (tmp_path / "a.json").read_text() == "earlier"


@pytest.mark.parametrize("end", ["", '"traceName": "/tm', '"traceName": "/tmp/x.json"'])
def test_a_trace_that_is_not_whole_is_refused(tmp_path, end):
    file = tmp_path / "a.json"
    file.write_text('{"traceEvents": [], ' + end)
    with pytest.raises(BadInput, match="disk full"):
        publish.finish_trace(file)


def test_the_end_of_a_trace_gets_more_keys(tmp_path):
    file = tmp_path / "a.json"
    file.write_text('{"traceEvents": [{"name": "\\"traceName\\""}],\n  "traceName": "/tmp/x.json", "other": 1\n}\n')
    publish.finish_trace(file, lesson={"run": "7"})
    assert json.loads(file.read_text()) == {
        "traceEvents": [{"name": '"traceName"'}], "traceName": "a.json", "other": 1, "lesson": {"run": "7"},
    }  # fmt: skip


def test_a_full_disk_is_one_line_and_leaves_nothing(tmp_path):
    """A limit on the size of files stops a write half-way, as a full disk does."""
    program = (
        "import resource, runpy, sys\n"
        "sys.argv = sys.argv[1:]\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))\n"
        "runpy.run_path(sys.argv[0], run_name='__main__')\n"
    )
    flags = ["--size", "8", "--device", "cpu", "--out", str(tmp_path)]
    command_line = [sys.executable, "-c", program, "01_matmul_add.py", *flags]
    done = subprocess.run(command_line, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert not contents(tmp_path)
