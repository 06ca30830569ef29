"""Every rung on an NVIDIA GPU, with the real kernels loader and the real Liger kernel."""

import re

import pytest
import torch
from conftest import ROOT, names, only_trace

pytestmark = pytest.mark.gpu

LABELS = {"01_matmul_add": "matmul_add", "02_linear": "linear_fwd", "03_simple_mlp": "mlp_fwd"}


def gpu_work(document):
    return [e for e in document["traceEvents"] if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]


def gradients(how, passes):
    """Return the gradients of a small model after some steps that add up several passes.

    They are added as the proposal of a CUDA graph for such a step says.
    """
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1)).to("cuda")
    inputs, called = torch.randn(passes, 8, 64, device="cuda"), model
    if how == "graphed":
        called = torch.cuda.make_graphed_callables(model, (inputs[0].clone(),))
    elif how == "compiled":
        called = torch.compile(model, mode="reduce-overhead")
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    for _ in range(3):
        model.zero_grad(set_to_none=False)
        for one in inputs:
            if how == "compiled":
                torch.compiler.cudagraph_mark_step_begin()
            called(one).square().mean().backward()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


@pytest.mark.parametrize("passes", [1, 2, 4])
@pytest.mark.parametrize("how", ["graphed", "compiled"])
def test_gradients_of_several_replays_add_up_in_tensors_of_their_own(how, passes):
    torch.testing.assert_close(gradients(how, passes), gradients("eager", passes), rtol=1e-3, atol=1e-5)


def test_a_graphed_lstm_has_the_gradients_of_the_eager_one():
    found = []
    x = torch.randn(4, 16, 32, device="cuda")
    for graphed in (False, True):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.LSTM(32, 32, 2, batch_first=True)).to("cuda")
        called = torch.cuda.make_graphed_callables(model, (x.clone(),)) if graphed else model
        for _ in range(2):
            model.zero_grad(set_to_none=True)
            called(x)[0].square().mean().backward()
        found.append(torch.cat([parameter.grad.flatten() for parameter in model.parameters()]))
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("warmup", [(), ("--warmup",)])
@pytest.mark.parametrize("compiled", [(), ("--compile",)])
@pytest.mark.parametrize("script", list(LABELS))
def test_rung(run, tmp_path, capfd, script, compiled, warmup):
    assert run(script, *compiled, *warmup) == 0
    screen = capfd.readouterr()
    assert screen.err == ""
    assert "peak device memory" in screen.out
    assert any(name for name in names(only_trace(tmp_path), "kernel"))
    table = next(tmp_path.rglob("*.txt")).read_text()
    assert [line.split(":")[0] for line in table.splitlines()[-2:]] == ["Self CPU time total", "Self CUDA time total"]
    rows = [line.split()[0] for line in table.splitlines() if line.startswith((" ", "#"))]
    assert rows.count(LABELS[script]) == 1
    assert "Left out: a second row for " in table


@pytest.mark.parametrize("compiled", [(), ("--compile",)])
def test_liger(run, tmp_path, capfd, local_liger, compiled):
    assert run("03_kernels_mlp", *compiled) == 0
    screen = capfd.readouterr()
    assert screen.err == ""
    assert "matches eager: relative error" in screen.out
    kernels = names(only_trace(tmp_path), "kernel")
    assert kernels.count("_geglu_tanh_forward_kernel") == 3
    assert len(kernels) == 3 * 4


def test_eager_mlp_runs_five_kernels_a_step(run, tmp_path):
    assert run("03_simple_mlp") == 0
    assert len(names(only_trace(tmp_path), "kernel")) == 3 * 5


def test_compiled_mlp_merges_gelu_and_product(run, tmp_path):
    assert run("03_simple_mlp", "--compile") == 0
    kernels = names(only_trace(tmp_path), "kernel")
    assert len(kernels) == 3 * 4
    assert sum("gelu_mul" in name for name in kernels) == 3


@pytest.mark.parametrize("flags", [("--compile",), ("--op", "addmm")])
def test_addmm_copies_the_bias_first(run, tmp_path, flags):
    assert run("01_matmul_add", "--size", "4096", *flags) == 0
    copies = names(only_trace(tmp_path), "gpu_memcpy")
    assert copies == ["Memcpy DtoD (Device -> Device)"] * 3


@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"])
def test_compile_modes_print_nothing_of_their_own(run, tmp_path, capfd, mode):
    assert run("01_matmul_add", "--size", "256", "--compile", mode, "--warmup") == 0
    assert capfd.readouterr().err == ""
    assert gpu_work(only_trace(tmp_path))


@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
def test_other_types(run, dtype, capfd):
    assert run("01_matmul_add", "--size", "256", "--dtype", dtype, "--compile") == 0
    assert capfd.readouterr().err == ""


def test_a_problem_larger_than_gpu_memory_is_refused(run, capsys):
    assert run("01_matmul_add", "--size", "200000") == 2
    assert "free" in capsys.readouterr().err


def test_a_cpu_run_on_this_machine_has_its_own_name(run, tmp_path):
    assert run("01_matmul_add", "--device", "cpu") == 0
    assert next(tmp_path.rglob("*.json")).name == "64_bf16_cold_eager_cpu.json"


def verdicts(screen: str) -> dict[str, str]:
    """Return each prediction and its verdict."""
    _, _, part = screen.partition(" hold")
    lines = [line for line in part.splitlines() if line[2:5] in ("yes", "no ", " – ")]
    return {line[7:]: line[2:5].strip() for line in lines}


@pytest.mark.parametrize(
    ("script", "flags"),
    [
        ("01_matmul_add", ()), ("01_matmul_add", ("--size", "4096", "--warmup", "--record-shapes")),
        ("01_matmul_add", ("--compile",)), ("02_linear", ()), ("02_linear", ("--compile",)),
        ("03_simple_mlp", ("--record-shapes",)), ("03_simple_mlp", ("--compile", "--record-shapes")),
        ("03_kernels_mlp", ("--record-shapes",)),
    ],
)  # fmt: skip
def test_every_prediction_gets_a_verdict(run, capsys, local_liger, script, flags):
    assert run(script, *flags, "--only", "predictions") == 0
    found = verdicts(capsys.readouterr().out)
    assert len(found) >= 5
    assert "–" not in found.values(), "with a GPU and shapes, every prediction can be told"


def graphs(capsys, script, *flags):
    import recompile

    assert recompile.main([str(ROOT / script), *flags, "--seq", "128", "256", "64", "200"]) == 0
    return [line.split()[-2] for line in capsys.readouterr().out.splitlines() if line.startswith("seq ")]


def test_other_sequence_lengths_compiled_against_liger(compile_afresh, capsys, local_liger):
    assert graphs(capsys, "03_simple_mlp.py", "--compile") == ["1", "2", "2", "2"]
    torch._dynamo.utils.counters.clear()
    assert graphs(capsys, "03_kernels_mlp.py") == ["0", "0", "0", "0"]


def test_inputs_larger_than_gpu_memory_are_refused(run, capsys, tmp_path):
    torch.cuda.set_per_process_memory_fraction(0.001)
    try:
        assert run("01_matmul_add", "--size", "16384") == 2
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert "ran out of memory" in capsys.readouterr().err
    assert not list(tmp_path.rglob("*.json"))


def test_sweep_reads_rates_from_the_traces(compile_afresh, tmp_path, capsys):
    import sweep

    flags = ("--size", "64", "8192", "--warmup", "--out", str(tmp_path))
    assert sweep.main([str(ROOT / "01_matmul_add.py"), *flags]) == 0
    screen = capsys.readouterr().out
    rows = [line.split() for line in screen.splitlines() if line.endswith(("overhead", "compute"))]
    assert [row[0] for row in rows] == ["64", "8192"]
    assert rows[0][-1] == "overhead" and rows[1][-1] == "compute"
    reached = float(rows[1][5].replace(",", ""))
    roof = float(re.search(r"peaks of this machine: ([\d,.]+) TFLOP/s", screen)[1].replace(",", ""))
    assert 100 < reached <= roof, "TFLOP/s of a large bf16 product"
    assert "outgrows its CPU time" in screen
    assert len(list(tmp_path.rglob("*.png"))) == 1


def test_the_harness_leaves_nothing_in_the_trace(run, tmp_path):
    """This holds for a cold run, too: its only synchronization is the profiler's own, after the last step."""
    assert run("01_matmul_add", "--wait", "0", "--schedule-warmup", "1") == 0
    events = only_trace(tmp_path)["traceEvents"]
    last = max(e["ts"] + e["dur"] for e in events if str(e.get("name")).startswith("ProfilerStep#") and "dur" in e)
    syncs = [e for e in events if "Synchronize" in str(e.get("name")) and e.get("cat") == "cuda_runtime"]
    assert syncs and all(e["ts"] >= last for e in syncs)
