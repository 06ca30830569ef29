"""Each wrong input: one clear line on stderr, exit status 2, nothing written or lost."""

import json
import os
import subprocess
import sys

import pytest
import torch
from conftest import LIGER, ROOT

from common import cli, harness, trace


@pytest.mark.parametrize(
    ("script", "flags", "says"),
    [
        ("01_matmul_add", "--size 0", "too small"),
        ("01_matmul_add", "--size -4", "too small"),
        ("01_matmul_add", "--size four", "not a whole number"),
        ("01_matmul_add", "--size 4.5", "not a whole number"),
        ("01_matmul_add", f"--size {10**30}", "too large"),
        ("01_matmul_add", "--size 10000000", "these shapes need about"),
        ("01_matmul_add", "--batch 0", "too small"),
        ("01_matmul_add", "--batch 2 --op addmm", "leave out --batch"),
        ("01_matmul_add", "--op mul", "invalid choice"),
        ("01_matmul_add", "--dtype int8", "invalid choice"),
        ("01_matmul_add", "--device tpu", "invalid choice"),
        ("01_matmul_add", "--compile fastest", "invalid choice"),
        ("01_matmul_add", "--warmup -1", "too small"),
        ("01_matmul_add", "--active 0", "too small"),
        ("01_matmul_add", "--wait -1", "too small"),
        ("01_matmul_add", "--step 9", "records #2 to #4"),
        ("01_matmul_add", "--only gpu", "invalid choice"),
        ("03_simple_mlp", "--then-seq 4,,5", "not a whole number"),
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
        "from kernels import get_kernel; from common import cli, harness\n"
        "@cli.command\n"
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
    with pytest.raises(cli.BadInput, match="could not be loaded"), harness.hub_errors(LIGER):
        get_kernel(LIGER, version=1)


def test_the_real_loader_takes_the_local_package(local_liger):
    from kernels import get_kernel

    layer = get_kernel(LIGER, version=1).layers.LigerGEGLUMLP
    assert issubclass(layer, torch.nn.Module)


@pytest.fixture
def args(tmp_path):
    parser, _ = cli.lesson_parser("A lesson.", "lesson.py", ())
    return parser.parse_args(["--device", "cpu", "--dtype", "fp32", "--out", str(tmp_path)])


def profile(args, step, **options):
    device, _ = harness.prepare(args, x=(2, 2))
    return harness.profile(step, args, device, name="64_fp32_cold_eager", **options)


@pytest.mark.parametrize("failure", [KeyboardInterrupt, ValueError])
def test_files_of_an_earlier_run_survive_a_broken_one(args, tmp_path, failure):
    profile(args, lambda: torch.ones(2, 2) + 1)
    before = {file: file.read_bytes() for file in tmp_path.rglob("*.*")}
    assert len(before) == 2
    calls = iter(range(4))

    def step():
        if next(calls) == 3:
            raise failure
        return torch.ones(2, 2) + 2

    with pytest.raises(failure):
        profile(args, step)
    assert {file: file.read_bytes() for file in tmp_path.rglob("*.*")} == before


def test_ctrl_c_is_one_line(capsys):
    @cli.command
    def main(argv=None):
        raise KeyboardInterrupt

    assert main() == 130
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("wrong", [1.01, float("nan")])
def test_a_wrong_result_stops_the_run(args, tmp_path, wrong):
    with pytest.raises(cli.RunFailed, match="relative error"):
        profile(args, lambda: torch.ones(2, 2) * wrong, reference=lambda: torch.ones(2, 2))
    assert not list(tmp_path.rglob("*.*"))


def test_relative_error_is_the_norm_of_the_difference():
    out, ref = torch.tensor([3.0, 4.0]), torch.tensor([3.0, 5.0])
    assert harness.relative_error(out, ref) == pytest.approx(1 / 34**0.5)


def test_running_out_of_memory_is_bad_input(capsys):
    @cli.command
    def main(argv=None):
        torch.empty(2**60, dtype=torch.int8)  # the CPU allocator's own refusal

    assert main() == 2
    screen = capsys.readouterr()
    assert "the machine ran out of memory" in screen.err
    assert screen.err.count("\n") == 1


def test_a_trace_without_gpu_work_is_refused(args):
    run = profile(args, lambda: torch.ones(2, 2) + 1)
    with pytest.raises(cli.RunFailed, match="no GPU work"):
        harness._check_recording(run.trace, torch.device("cuda"))


def test_a_trace_with_zeroed_events_is_refused(args):
    run = profile(args, lambda: torch.ones(2, 2) + 1)
    document = json.loads(run.trace.read_text())
    half = [event for event in document["traceEvents"] if event["ph"] == "X"][5:]
    for event in half:
        event["ts"] = event["dur"] = 0
    run.trace.write_text(json.dumps(document))
    with pytest.raises(cli.RunFailed, match=f"{len(half)} of"):
        harness._check_recording(run.trace, torch.device("cpu"))
    assert any(not trace.is_zeroed(event) for event in document["traceEvents"] if event["ph"] == "X")
