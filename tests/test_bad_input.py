"""Each wrong input gives one clear line on stderr and exit status 2; no file is written or lost."""

import dataclasses
import errno
import json
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import LIGER, ROOT

from common import harness, publish, screen
from common.flags import parse
from common.memory import within_memory
from tracereader import cli, progress
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
        ("01_matmul_add", f"--pause {10**12}", "longer than a day"),
        ("01_matmul_add", f"--active {9 * 10**6}", "recording takes about 53.0 kB a step"),
        ("01_matmul_add", "--code", "add --compile"),
        ("01_matmul_add", "--all --only steps", "not allowed with"),
        ("01_matmul_add", "--lanes --only steps", "leave out --lanes"),
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
        ("01_matmul_add", f"--out {__file__}", 2),
        ("05_llm", f"--out {__file__}", 2),
    ],
)
def test_refused_before_torch_is_loaded(script, flags, status):
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


def test_an_out_folder_that_is_a_file(scripts, tmp_path, capsys):
    blocked = tmp_path / "file"
    blocked.write_text("mine")
    assert scripts["01_matmul_add"].main(["--size", "8", "--device", "cpu", "--out", str(blocked)]) == 2
    assert "cannot write to" in capsys.readouterr().err
    assert blocked.read_text() == "mine"


def test_an_out_folder_without_a_name(scripts, capsys):
    assert scripts["01_matmul_add"].main(["--size", "8", "--out", ""]) == 2
    assert "the folder has no name" in capsys.readouterr().err


SMALLEST = ("--size", "8", "--device", "cpu")
SMALL_MLP = ("03_simple_mlp.py", "--batch", "2", "--seq", "8", "--dim", "16", "--hidden", "32", "--device", "cpu")


def typed(*words, out=None, env=None, **options):
    """Return a script's output and files, run as from a shell."""
    options = {"cwd": ROOT, "stderr": subprocess.PIPE, "stdout": subprocess.DEVNULL, "text": True} | options
    where = ["--out", str(out)] if out else []
    words = [str(ROOT / word) if word.endswith(".py") else word for word in words]
    return subprocess.run([sys.executable, *words, *where], env=os.environ | (env or {}), **options)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("words", "env", "status", "says"),
    [
        (("--compile",), {"TORCH_COMPILE_DISABLE": "1"}, 1, "ran nothing compiled"),
        (("--compile",), {"CXX": "/bin/false"}, 2, "/bin/false does not compile"),
        (("--compile",), {"TORCHINDUCTOR_CACHE_DIR": "/dev/null/x"}, 2, "/dev/null/x: Not a directory"),
        ((), {"TORCHINDUCTOR_CACHE_DIR": "/dev/null/x"}, 2, "/dev/null/x: Not a directory"),
    ],
)
def test_a_compiler_or_its_cache_that_fails(tmp_path, words, env, status, says):
    fresh = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    done = typed(*SMALL_MLP, *words, out=tmp_path / "out", env=fresh | env)
    assert (done.returncode, done.stderr.count("\n")) == (status, 1), done.stderr
    assert says in done.stderr
    assert not contents(tmp_path / "out")


def test_a_compilers_cache_that_is_full_says_so():
    from common.flags import advice

    assert "No space left" in advice("InductorError: OSError: [Errno 28] No space left on device\n\nSet TORCH…")


@pytest.mark.exhaustive
def test_without_docstrings(tmp_path):
    done = typed("-OO", "01_matmul_add.py", "--size", "8", "--device", "cpu", out=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    for other in ("sweep.py", "recompile.py"):
        assert typed("-OO", other).stderr.count("\n") == 1


@pytest.mark.parametrize(
    "words", [pytest.param(("01_matmul_add.py", *SMALLEST), marks=pytest.mark.exhaustive), ("-m", "tracereader")]
)
def test_closed_standard_output(tmp_path, words):
    trace = str(ROOT / "traces/reference/nvidia-h200/02_linear/1024x32x64_bf16_cold_eager.json.gz")
    words, out = (words, tmp_path) if words[0].endswith(".py") else ((*words, trace), None)
    with open("/dev/full", "w") as full:
        done = typed(*words, out=out, stdout=full)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert "cannot write to standard output: No space left" in done.stderr
    done = typed(*words, out=out, preexec_fn=lambda: os.close(1))
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert "standard output is closed" in done.stderr


def test_closed_standard_error():
    with open("/dev/full", "w") as full:
        assert typed("01_matmul_add.py", "--size", "0", stderr=full).returncode == 2
    done = typed("01_matmul_add.py", "--size", "0", stdout=subprocess.PIPE, preexec_fn=lambda: os.close(2))
    assert (done.returncode, done.stdout) == (2, ""), "nor on stdout"


@pytest.mark.exhaustive
def test_without_standard_error_a_run_writes_its_trace(tmp_path):
    # The next file that is opened must not become stderr, and get what libraries print there.
    flags = ("--size", "8", "--device", "cpu")
    assert typed("01_matmul_add.py", *flags, out=tmp_path, preexec_fn=lambda: os.close(2)).returncode == 0
    assert json.loads(next(tmp_path.rglob("*.json")).read_text())["lesson"]["flags"]["size"] == 8


def test_a_deleted_current_folder(tmp_path):
    gone = tmp_path / "gone"
    gone.mkdir()
    program = "import os, sys; os.rmdir(os.getcwd()); os.execv(sys.executable, sys.argv[1:])"
    words = [sys.executable, "-c", program, sys.executable, str(ROOT / "01_matmul_add.py"), "--device", "cpu"]
    done = subprocess.run([*words, "--out", str(tmp_path)], cwd=gone, capture_output=True, text=True)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert "has been deleted" in done.stderr


@pytest.mark.exhaustive
def test_a_user_without_a_name(tmp_path):
    """Many containers have such a user: an id that no line of /etc/passwd names."""
    unshare = ["unshare", "--user", "--map-user=54321"]
    if shutil.which("unshare") is None or subprocess.run([*unshare, "true"], capture_output=True).returncode:
        pytest.skip("no user namespaces here")
    words = [sys.executable, "01_matmul_add.py", "--size", "8", "--device", "cpu", "--out", str(tmp_path)]
    done = subprocess.run([*unshare, "env", "-i", "PATH=/usr/bin:/bin", *words], cwd=ROOT, capture_output=True)
    assert (done.returncode, done.stderr) == (0, b"")


def test_steps_are_not_kept_in_a_list():
    """A list of nine million steps would take 72 MB before the first call."""
    args = harness.prepare(parse(["--device", "cpu", "--wait", f"{9 * 10**6}"], "A lesson.", "waiting.py"))
    steps = iter(harness.warm_up(lambda: 7, args))
    assert [next(steps)() for _ in range(3)] == [7, 7, 7]


def test_a_long_recording_prints_its_progress(monkeypatch, capsys):
    clock = iter(range(100))
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
    assert list(screen.counted(["a", "b"], 2, "step")) == ["a", "b"]
    assert capsys.readouterr().err == "", "no terminal"
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    assert list(screen.counted(["a", "b", "c"], 3, "step")) == ["a", "b", "c"]
    said = capsys.readouterr().err
    assert "step 2 of 3" in said
    assert said.endswith(progress.CLEAR_LINE)


def test_compile_on_a_cpu_without_a_compiler(run, monkeypatch, capsys):
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert run("01_matmul_add", "--size", "8", "--device", "cpu", "--compile") == 2
    assert "needs a C++ compiler" in capsys.readouterr().err


@pytest.mark.exhaustive
def test_an_unreachable_hub():
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


@pytest.mark.parametrize(
    ("problem", "says"),
    [
        (StopIteration(), "StopIteration"),
        (Exception(), "Exception"),
        (SystemExit("no CUDA"), "no CUDA"),
        (SystemExit(0), "0"),
        (RuntimeError("\n first\nsecond"), "first"),
    ],
)
def test_a_kernel_package_that_raises_anything(problem, says):
    with pytest.raises(BadInput, match=rf"could not be loaded \({says}\)"), harness.hub_errors(LIGER):
        raise problem


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
    """Run the loop of every numbered script."""
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


def test_the_error_of_a_cancelling_sum_is_relative_to_its_addends():
    """In bf16, 1.004 and -1 are rounded before they are added, so that their sum is only rounding error."""
    terms = torch.tensor([1.0]), torch.tensor([-0.99])
    out = torch.tensor([0.0078])
    assert harness.relative_error(out, sum(terms)) > 0.2
    assert harness.relative_error(out, sum(terms), *terms) < 3e-3


@pytest.mark.parametrize("seed", ["34", "0"])
def test_cancellation_is_not_a_wrong_result(run, seed):
    assert run("01_matmul_add", "--size", "1", "--op", "addmm", "--seed", seed, "--device", "cpu") == 0


def test_a_compiled_run_that_ran_eager_is_refused(args, tmp_path):
    with pytest.raises(RunFailed, match="ran nothing compiled"):
        profile(replace(args, compile="default"), lambda: torch.ones(2, 2) + 1)
    assert not contents(tmp_path)


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


def test_a_message_of_a_library_that_exits_is_printed(capsys):
    @command
    def main(argv=None):
        sys.exit("no licence")

    assert main() == 1
    assert "no licence" in capsys.readouterr().err


# Memory.


def test_a_failed_allocation_is_bad_input():
    refusal = r"need about 1152921\.5 TB or more and this machine has .* free"
    with pytest.raises(BadInput, match=refusal), within_memory(torch.device("cpu")):
        torch.empty(2**60, dtype=torch.int8)


@pytest.mark.skipif(sys.platform != "linux", reason="the limit is Linux's")
def test_no_more_memory_than_free_is_allocated():
    """Linux would allocate this much, and begin to swap when it is written to."""
    from common.memory import free_bytes

    cpu = torch.device("cpu")
    with pytest.raises(BadInput, match="make them smaller"), within_memory(cpu):
        torch.empty(free_bytes(cpu) + 2**28, dtype=torch.int8)
    torch.empty(2**20)


@pytest.mark.parametrize(("words", "copies"), [((), 4), (("--optimizer", "sgd"), 2)])
def test_training_that_does_not_fit_is_refused_before_its_model_is_built(monkeypatch, words, copies):
    """A parameter has a gradient, and AdamW's two numbers. The model's own count of its parameters says how many."""
    script = runpy.run_path(str(ROOT / "06_training.py"))
    args = script["flags"](["--layers", "2", "--dim", "64", "--device", "cpu", *words])
    args = dataclasses.replace(args, device=torch.device("cpu"), dtype=torch.float32)
    (model,) = script["build"](args)
    most = sum(one.numel() for one in model.parameters() if one.dim() > 1) * 4 * copies  # norms and biases are small
    monkeypatch.setattr("common.memory.free_memory", lambda: most)
    script["build"](args)
    monkeypatch.setattr("common.memory.free_memory", lambda: most - 1)
    monkeypatch.setattr(torch, "manual_seed", lambda seed: pytest.fail("it is built"))
    with pytest.raises(BadInput, match=r"these shapes need about .* and this machine has .* free"):
        script["build"](args)


def test_other_errors_are_raised_unchanged():
    with pytest.raises(RuntimeError, match="shape"), within_memory(torch.device("cpu")):
        torch.ones(2, 3) @ torch.ones(2, 3)


# Both files appear whole, or neither does.


@pytest.fixture
def earlier(tmp_path):
    """Return two files of an earlier run, by name."""
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
    """nohup starts programs in this way."""
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
def test_an_incomplete_trace_is_refused(tmp_path, end):
    file = tmp_path / "a.json"
    file.write_text('{"traceEvents": [], ' + end)
    with pytest.raises(BadInput, match="disk full"):
        publish.finish_trace(file)


def test_keys_are_added_at_the_end_of_a_trace(tmp_path):
    file = tmp_path / "a.json"
    file.write_text('{"traceEvents": [{"name": "\\"traceName\\""}],\n  "traceName": "/tmp/x.json", "other": 1\n}\n')
    publish.finish_trace(file, lesson={"run": "7"})
    assert json.loads(file.read_text()) == {
        "traceEvents": [{"name": '"traceName"'}], "traceName": "a.json", "other": 1, "lesson": {"run": "7"},
    }  # fmt: skip


FULL = (
    "import resource, runpy, sys\n"
    "sys.argv = sys.argv[1:]\n"
    "resource.setrlimit(resource.RLIMIT_FSIZE, ({0}, {0}))\n"
    "runpy.run_path(sys.argv[0], run_name='__main__')\n"
)


@pytest.mark.exhaustive
@pytest.mark.parametrize("bytes_", [0, 4096, 8192])
def test_a_full_disk_gives_one_line_and_keeps_earlier_files(tmp_path, bytes_):
    """A limit on the size of files stops a write in the middle, as a full disk does."""
    flags = ("01_matmul_add.py", "--size", "8", "--device", "cpu")
    assert typed(*flags, out=tmp_path).returncode == 0
    before = contents(tmp_path)
    done = typed("-c", FULL.format(bytes_), *flags, out=tmp_path)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert contents(tmp_path) == before


@pytest.mark.parametrize(
    "room", ["size=4k", "size=12k", "size=16k", "size=20k", "nr_inodes=4", "nr_inodes=5", "nr_inodes=6", "nr_inodes=7"]
)
def test_a_small_disk(scripts, tmp_path, capsys, room):
    """A real small disk, if the test may mount one."""
    small = tmp_path / "small"
    small.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", room, "tmpfs", small], capture_output=True).returncode:
        pytest.skip("may not mount a small file system")
    try:
        # With shapes: the trace is of 12 kB.
        status = scripts["01_matmul_add"].main([*SMALLEST, "--record-shapes", "--out", str(small)])
        said, files = capsys.readouterr().err, contents(small)
        if status == 0:
            (trace,) = (text for file, text in files.items() if file.suffix == ".json")
            assert len(files) == 2 and json.loads(trace)
        else:
            assert (status, said.count("\n"), files) == (2, 1, {}), said
        assert not list(small.rglob(".unfinished*"))
    finally:
        # Lazily: of a run that failed in this process a file may still be open.
        subprocess.run(["umount", "--lazy", small], check=True)


@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC])
def test_a_disk_that_fails_at_the_last_moment(tmp_path, earlier, monkeypatch, error):
    def fails(descriptor):
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(os, "fsync", fails)
    with pytest.raises(BadInput, match="cannot write to"):
        publish_new(tmp_path)
    assert texts(tmp_path) == earlier


def test_a_short_write_without_an_error_is_detected(tmp_path, monkeypatch):
    file = tmp_path / "a.json"
    file.write_text('{"traceEvents": [], "traceName": "/tmp/x.json"}')
    monkeypatch.setattr(os, "fsync", lambda descriptor: os.truncate(file, 20))
    with pytest.raises(BadInput, match="disk full"):
        publish.finish_trace(file)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--layers", "999999"], "--layers 999999 is too large: 10,000 is the most"),
        (["--wait", "99999999999"], "--wait 99999999999: a run has at most 10,000,000 steps"),
        (["--warmup", "99999999999"], "--warmup 99999999999: a run has at most 10,000,000 steps"),
        (["--loader", "--workers", "100000"], "--workers 100000 is too large: 256 is the most"),
        (["--loader", "99999999999"], "--loader 99999999999 is too large: 86,400,000 is the most"),
        (["--batch", "9999999"], "--batch times --accumulate: a step has at most 1,000,000 sequences"),
    ],
    ids=lambda one: one[0] if isinstance(one, list) else "",
)
def test_sizes_that_no_machine_has_are_refused_at_once(words, told):
    done = typed("06_training.py", *words)
    assert (done.returncode, done.stderr.strip()) == (2, f"06_training.py: {told}")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize(
    "words", ["-m tracereader --help", "-m tracereader --version", "01_matmul_add.py --help", "sweep.py --help"]
)
def test_help_to_a_full_disk_is_an_error(words):
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, *words.split()], cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert done.returncode == 2
    assert re.fullmatch(r"\S+: cannot write to standard output: No space left on device\n", done.stderr)


@pytest.mark.parametrize("target", ["q.html/", "q.html/.", "."])
def test_a_page_is_not_written_to_a_folder(tmp_path, monkeypatch, capsys, target):
    monkeypatch.chdir(tmp_path)
    trace = next((ROOT / "traces/reference/nvidia-h200/02_linear").glob("*.json.gz"))
    assert cli.main([str(trace), "--html", target]) == 2
    assert capsys.readouterr().err == f"read-trace: --html {target}: a folder; name a file in it\n"
    assert list(tmp_path.iterdir()) == []
