"""Every rung on the CPU: its files, its tag, its schedule, and what its trace shows."""

import json

import pytest
from conftest import names, only_trace

SMALL_MLP = ("--batch", "2", "--seq", "8", "--dim", "16", "--hidden", "32")


def ops(document):
    return set(names(document, "cpu_op"))


def test_trace_and_table_have_the_articles_names(run, tmp_path, capsys):
    assert run("01_matmul_add", "--size", "64", "--device", "cpu") == 0
    folder = tmp_path / "01_matmul_add"
    assert {file.stem.removesuffix("_cpu") for file in folder.iterdir()} == {"64_bf16_cold_eager"}
    assert {file.suffix for file in folder.iterdir()} == {".json", ".txt"}
    table = next(folder.glob("*.txt")).read_text()
    assert table.splitlines()[-1].startswith("Self CPU time total: ")
    screen = capsys.readouterr()
    assert screen.err == ""
    for file in folder.iterdir():
        assert str(file) in screen.out
    assert table.splitlines()[-1] in screen.out


def test_no_library_noise_on_the_screen(run, capfd):
    # At the level of file descriptors: Kineto writes past Python.
    assert run("01_matmul_add", "--size", "8", "--device", "cpu", "--compile") == 0
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    ("flags", "steps"),
    [
        ((), [2, 3, 4]),
        (("--wait", "0", "--schedule-warmup", "0", "--active", "3"), [0, 1, 2]),
        (("--wait", "0", "--schedule-warmup", "0", "--active", "20"), list(range(20))),
        (("--wait", "2", "--schedule-warmup", "3", "--active", "1"), [5]),
    ],
)
def test_schedule_records_the_active_steps(run, tmp_path, flags, steps):
    assert run("01_matmul_add", "--size", "8", "--device", "cpu", *flags) == 0
    annotations = names(only_trace(tmp_path), "user_annotation")
    assert [name for name in annotations if "Step" in name] == [f"ProfilerStep#{n}" for n in steps]
    assert annotations.count("matmul_add") == len(steps)


@pytest.mark.parametrize("warmup", [0, 1, 5])
def test_a_run_calls_the_step_exactly_as_often_as_it_says(tmp_path, warmup):
    import torch

    from common import cli, harness

    parser, _ = cli.lesson_parser("A lesson.", "counting.py", ())
    args = parser.parse_args(["--warmup", str(warmup), "--device", "cpu", "--out", str(tmp_path)])
    device, _ = harness.prepare(args, x=(2, 2))
    calls = []

    def step():
        calls.append(None)
        return torch.ones(2, 2) + 1

    harness.profile(step, args, device, name="x")
    assert len(calls) == warmup + 5


@pytest.mark.parametrize(
    ("script", "flags", "present", "absent"),
    [
        ("01_matmul_add", ("--size", "8"), {"aten::matmul", "aten::mm", "aten::add"}, {"aten::bmm", "aten::addmm"}),
        ("01_matmul_add", ("--size", "8", "--batch", "8"), {"aten::matmul", "aten::bmm"}, {"aten::mm"}),
        ("01_matmul_add", ("--size", "8", "--op", "addmm"), {"aten::addmm"}, {"aten::matmul", "aten::add"}),
        ("02_linear", (), {"aten::linear", "aten::t", "aten::addmm"}, {"aten::add"}),
        ("03_simple_mlp", SMALL_MLP, {"aten::linear", "aten::gelu", "aten::mul"}, {"aten::addmm"}),
    ],
)
def test_dispatch(run, tmp_path, script, flags, present, absent):
    assert run(script, *flags, "--device", "cpu") == 0
    assert present <= ops(only_trace(tmp_path))
    assert not absent & ops(only_trace(tmp_path))


def test_mlp_dispatches_three_linears_a_step(run, tmp_path):
    assert run("03_simple_mlp", *SMALL_MLP, "--device", "cpu") == 0
    assert names(only_trace(tmp_path), "cpu_op").count("aten::linear") == 3 * 3


def test_compiled_replaces_matmul_and_add_by_addmm(run, tmp_path, capsys):
    assert run("01_matmul_add", "--size", "64", "--device", "cpu", "--compile", "--warmup") == 0
    trace = only_trace(tmp_path)
    assert {"aten::addmm", "Torch-Compiled Region: 0/0", "TorchDynamo Cache Lookup"} <= ops(trace)
    assert not {"aten::matmul", "aten::add"} & ops(trace)
    assert "relative error" in capsys.readouterr().out


def test_compiled_mlp_matches_eager(run, tmp_path, capsys):
    assert run("03_simple_mlp", *SMALL_MLP, "--device", "cpu", "--compile", "--dtype", "fp32") == 0
    assert "matches eager: relative error" in capsys.readouterr().out
    assert not {"aten::linear", "aten::gelu"} & ops(only_trace(tmp_path))


def test_no_two_different_runs_share_a_name(scripts):
    from common import cli, harness

    parser, _ = cli.lesson_parser("A lesson.", "x.py", ())
    different = [
        "", "--warmup", "--warmup 5", "--compile", "--compile reduce-overhead", "--compile max-autotune",
        "--wait 0", "--schedule-warmup 0", "--active 20", "--dtype fp16", "--dtype fp32", "--record-shapes",
        "--with-stack", "--profile-memory", "--seed 1",
    ]  # fmt: skip
    parsed = [parser.parse_args(flags.split()) for flags in different]
    import torch

    device = torch.device(harness._auto_device())
    tags = [harness.tag(args, device, "64") for args in parsed]
    assert len(set(tags)) == len(tags)
    assert tags[0] == "64_bf16_cold_eager"
    assert tags[2] == "64_bf16_warm_eager_warmup5"
    assert harness.tag(parsed[0], torch.device("meta"), "64") == "64_bf16_cold_eager_meta"


def test_the_trace_says_what_ran(run, tmp_path):
    assert run("01_matmul_add", "--size", "8", "--device", "cpu", "--record-shapes", "--with-stack") == 0
    document = only_trace(tmp_path)
    assert document["lesson"]["script"] == "01_matmul_add"
    assert document["lesson"]["flags"]["size"] == 8
    assert str(tmp_path) not in json.dumps(document["lesson"])
    assert any("Input Dims" in event.get("args", {}) for event in document["traceEvents"])


@pytest.mark.parametrize("script", ["01_matmul_add", "02_linear", "03_simple_mlp", "03_kernels_mlp"])
def test_help_is_a_page_for_newcomers(run, capsys, script):
    assert run(script, "--help") == 0
    page = capsys.readouterr().out
    assert "Rung " in page
    assert "what is profiled:" in page
    assert page.count(f"uv run {script}.py") == 2


def test_scripts_stay_short():
    from conftest import ROOT

    for script in ROOT.glob("0*.py"):
        assert len(script.read_text().splitlines()) <= 90, script.name


def test_then_strides_shows_what_a_compiled_layer_does(run, capsys):
    assert run("02_linear", "--device", "cpu", "--compile", "--then-strides") == 0
    screen = capsys.readouterr().out
    _, _, table = screen.partition("then other strides")
    same, transposed = (line.split() for line in table.splitlines()[2:4])
    assert same[:2] == ["the", "same"] and same[-2] == "1"
    assert transposed[0] == "transposed" and transposed[-2] == "2", "one graph more: compiled again"
    assert float(transposed[-1]) < 2e-2


def test_then_strides_needs_compile(run, capsys):
    assert run("02_linear", "--then-strides") == 2
    assert "add --compile" in capsys.readouterr().err


def test_then_seq_counts_graphs(run, capsys):
    assert run("03_simple_mlp", *SMALL_MLP, "--device", "cpu", "--compile", "--then-seq", "16,4,12") == 0
    _, _, table = capsys.readouterr().out.partition("then other sequence lengths")
    rows = [line.split() for line in table.splitlines()[2:5]]
    assert [row[1] for row in rows] == ["16", "4", "12"]
    assert [row[-2] for row in rows] == ["2", "2", "2"], "one more graph, with a symbolic size, for all of them"


def test_then_seq_without_compile_makes_no_graph(run, capsys):
    assert run("03_simple_mlp", *SMALL_MLP, "--device", "cpu", "--then-seq", "16") == 0
    _, _, table = capsys.readouterr().out.partition("then other sequence lengths")
    assert table.splitlines()[2].split()[-2] == "0"


def test_guess_without_a_terminal_is_refused(run, tmp_path, capsys):
    assert run("01_matmul_add", "--size", "8", "--guess") == 2
    assert "no terminal" in capsys.readouterr().err
    assert not list(tmp_path.rglob("*.*"))


def test_guess_at_a_terminal(tmp_path):
    """The real script under a pseudo-terminal: asked first, marked afterwards."""
    import os
    import pty
    import sys
    import warnings

    from conftest import ROOT

    script = [sys.executable, "01_matmul_add.py", "--size", "256", "--device", "cpu", "--guess", "--out", str(tmp_path)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # forking a process with threads: it execs at once
        pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(ROOT)
        os.execv(sys.executable, script)
    seen = ""
    while True:
        try:
            seen += os.read(terminal, 4096).decode(errors="replace")
        except OSError:
            break
        if "most CPU time of its own" in seen and not os.path.exists(tmp_path / "asked"):
            assert not list(tmp_path.rglob("*.json")), "asked before the run"
            (tmp_path / "asked").touch()
            os.write(terminal, b"mm\n")
    assert os.waitpid(pid, 0)[1] == 0
    assert "your guesses" in seen
    assert "you: mm; the trace: aten::mm" in seen
