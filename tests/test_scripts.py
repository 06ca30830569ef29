"""Every rung on the CPU: its files, its tag, its schedule and its trace."""

import gzip
import json
import os
import pty
import re
import subprocess
import sys
import warnings
from dataclasses import FrozenInstanceError, replace
from pathlib import Path

import pytest
import torch
from conftest import ROOT, names, only_trace
from references import H200

import recompile
from common import harness
from common.flags import flag, load_script, parse, positive, tag_of
from tracereader.command import BadInput

SMALL_MLP = ("--batch", "2", "--seq", "8", "--dim", "16", "--hidden", "32")


def ops(document):
    return set(names(document, "cpu_op"))


def test_trace_and_table_have_the_articles_names(run, tmp_path, capsys):
    assert run("01_matmul_add", "--size", "64", "--device", "cpu", "--lanes") == 0
    folder = tmp_path / "01_matmul_add"
    assert {file.stem.removesuffix("_cpu") for file in folder.iterdir()} == {"64_bf16_cold_eager"}
    assert {file.suffix for file in folder.iterdir()} == {".json", ".txt"}
    table = next(folder.glob("*.txt")).read_text()
    assert table.splitlines()[-1].startswith("Self CPU time total: ")
    screen = capsys.readouterr()
    assert screen.err == ""
    for file in folder.iterdir():
        assert str(file) in screen.out
    assert "lanes of step" in screen.out and "profiler table" in screen.out


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


@pytest.mark.parametrize("pause", [0, 1])
@pytest.mark.parametrize("warmup", [0, 1, 5])
def test_a_run_calls_the_step_as_often_as_declared(warmup, pause):
    args = parse(["--warmup", f"{warmup}", "--pause", f"{pause}", "--device", "cpu"], "A lesson.", "counting.py")
    args = harness.prepare(args)
    calls = []
    steps = harness.warm_up(lambda: calls.append(None), args)
    assert len(calls) == warmup, "before the profiler starts"
    for step in steps:
        step()
    assert len(calls) == warmup + 5
    assert steps.first_call_s > 0


def test_a_recorded_step_is_not_wrapped():
    def one_step():
        return None

    args = harness.prepare(parse(["--device", "cpu"], "A lesson.", "plain.py"))
    *_, first, second, third = harness.warm_up(one_step, args)
    assert first is second is third is one_step


def test_the_pause_is_in_the_name_and_in_the_trace(run, tmp_path):
    assert run("01_matmul_add", "--size", "8", "--pause", "1") == 0
    assert next(tmp_path.rglob("*.json")).stem == "8_bf16_cold_eager_pause1"
    assert only_trace(tmp_path)["lesson"]["flags"]["pause"] == 1


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
    assert run("01_matmul_add", "--size", "64", "--device", "cpu", "--compile", "--warmup", "--code") == 0
    trace = only_trace(tmp_path)
    (code,) = tmp_path.rglob("*.py")
    assert code.with_suffix(".json").is_file(), "beside the trace"
    assert code.read_text().startswith(f"# run {trace['lesson']['run']}")
    assert "extern_kernels.addmm(" in code.read_text()
    compile(code.read_text(), code, "exec")
    assert {"aten::addmm", "Torch-Compiled Region: 0/0", "TorchDynamo Cache Lookup"} <= ops(trace)
    assert not {"aten::matmul", "aten::add"} & ops(trace)
    assert "relative error" in capsys.readouterr().out


def test_compiled_mlp_matches_eager(run, tmp_path, capsys):
    assert run("03_simple_mlp", *SMALL_MLP, "--device", "cpu", "--compile", "--dtype", "fp32") == 0
    assert "matches eager: relative error" in capsys.readouterr().out
    assert not {"aten::linear", "aten::gelu"} & ops(only_trace(tmp_path))


def test_no_two_different_runs_share_a_name():
    different = [
        "", "--warmup", "--warmup 5", "--compile", "--compile reduce-overhead", "--compile max-autotune",
        "--wait 0", "--schedule-warmup 0", "--active 20", "--dtype fp16", "--dtype fp32", "--record-shapes",
        "--with-stack", "--profile-memory", "--seed 1", "--pause 10", "--batch 8", "--device cpu",
    ]  # fmt: skip
    own = (
        flag("--size", "", shape=True, type=positive, default=64),
        flag("--batch", "", tag="batch{}", type=positive),
    )
    tags = [tag_of(parse(flags.split(), "A lesson.", "x.py", *own)) for flags in different]
    assert len(set(tags)) == len(tags)
    assert tags[0] == "64_bf16_cold_eager"
    assert tags[2] == "64_bf16_warm_eager_warmup5"
    assert tags[-1] == "64_bf16_cold_eager_cpu"


@pytest.mark.parametrize("machine", ["cpu", "nvidia-h200"])
def test_the_reference_traces_have_the_names_of_their_runs(scripts, machine):
    """Each run that record.sh makes has its file, with the name that the script gives it."""
    runs = re.findall(r"^(\d\w+)\.py(.*)$", (ROOT / "traces/reference/record.sh").read_text(), re.M)
    assert len(runs) > 20
    for script, flags in runs:
        try:
            scripts[script].flags([*flags.split(), "--device", "cpu" if machine == "cpu" else "auto"])
        except BadInput:
            continue  # it needs a GPU
        tag = tag_of(scripts[script].flags(flags.split()))
        assert (ROOT / f"traces/reference/{machine}/{script}/{tag}.json.gz").exists(), f"{script} {flags}: {tag}"


def test_the_flags_of_a_run_are_frozen(scripts):
    args = scripts["01_matmul_add"].flags(["--size", "8"])
    assert args.size == 8
    with pytest.raises(FrozenInstanceError):
        args.size = 9
    settled = harness.prepare(replace(args, device="cpu"))
    assert (settled.device, settled.dtype) == (torch.device("cpu"), torch.bfloat16)


def test_the_trace_stores_the_run(run, tmp_path):
    assert run("01_matmul_add", "--size", "8", "--device", "cpu", "--record-shapes") == 0
    document = only_trace(tmp_path)
    lesson = document["lesson"]
    assert (lesson["script"], lesson["flags"]["size"], lesson["torch"]) == ("01_matmul_add", 8, torch.__version__)
    assert {"guess": "kernels_are", "count": 2} in lesson["guesses"]
    assert any("Input Dims" in event.get("args", {}) for event in document["traceEvents"])
    roofs = lesson["facts"]["roofs"]
    assert roofs.keys() == {"tflops", "gb_s"} and min(roofs.values()) > 0, "what rates are set against on a CPU"
    (table,) = tmp_path.rglob("*.txt")
    assert table.read_text().splitlines()[0] == f"run {lesson['run']}", "the two files of one run"


def test_a_run_without_shapes_measures_no_peaks(run, tmp_path, monkeypatch):
    monkeypatch.setattr(harness, "measured_roofs", None)
    assert run("01_matmul_add", "--size", "8", "--device", "cpu") == 0
    assert only_trace(tmp_path)["lesson"]["facts"]["roofs"] is None


def test_no_path_of_this_machine_is_in_the_trace(run, tmp_path):
    assert run("01_matmul_add", "--size", "8") == 0
    (file,) = tmp_path.rglob("*.json")
    assert json.loads(file.read_text())["traceName"] == file.name
    for path in (tmp_path, ROOT, "/tmp", "/home"):
        assert str(path) not in file.read_text()


@pytest.mark.parametrize("name", ['quote"d', "back\\slash", "tab\tbed", "two\nlines", "grün"])
def test_any_folder_name_gives_a_whole_trace(scripts, tmp_path, name):
    assert scripts["01_matmul_add"].main(["--size", "8", "--out", str(tmp_path / name)]) == 0
    assert only_trace(tmp_path / name)["traceEvents"]
    assert len(list((tmp_path / name / "01_matmul_add").iterdir())) == 2


TRAINING_RUNG = '''
"""Rung 9: one training step."""

from common.flags import answer_before_torch, flag, parse, positive
from tracereader import expect


def flags(argv=None):
    return parse(argv, __doc__, __file__, flag("--width", "features", shape=True, type=positive, default=4))


answer_before_torch(flags, __file__)

import torch

from common.harness import profiler, save, warm_up
from common.lesson import lesson


def build(args):
    layer = torch.nn.Linear(args.width, 1, device=args.device)
    return layer, torch.optim.SGD(layer.parameters()), torch.randn(2, args.width, device=args.device)


def profiled(args, layer, optimizer, x):
    def one_step():
        with torch.profiler.record_function("train"):
            optimizer.zero_grad()
            loss = layer(x).square().mean()
            loss.backward()
            optimizer.step()
        return loss

    steps = warm_up(one_step, args)
    with profiler(args) as prof:
        for step in steps:
            out = step()
            prof.step()
    return save(prof, args, steps, out)


def predictions(args):
    yield expect.ops_are(1, "aten::addmm")


main = lesson(flags, build, profiled, predictions)
'''


def test_a_new_rung_is_one_new_file(tmp_path, capsys):
    (tmp_path / "09_training.py").write_text(TRAINING_RUNG)
    script = load_script(tmp_path / "09_training.py", [])
    assert script.main(["--device", "cpu", "--out", str(tmp_path)]) == 0
    assert any("Backward" in name for name in ops(only_trace(tmp_path))), "a training rung has its gradients"
    assert only_trace(tmp_path)["lesson"]["flags"]["width"] == 4
    assert "1 of 1 prediction holds" in capsys.readouterr().out


@pytest.mark.parametrize("script", ["01_matmul_add", "02_linear", "03_simple_mlp", "03_kernels_mlp"])
def test_help_explains_the_rung(run, capsys, script):
    assert run(script, "--help") == 0
    page = capsys.readouterr().out
    assert "Rung " in page
    assert "what is profiled:" in page
    assert page.count(f"uv run {script}.py") == 2


def test_the_report_depends_on_the_file_alone(run, tmp_path, capsys):
    """A script's report of its file stays the same later, and read-trace has the same figures and predictions."""
    from tracereader import cli
    from tracereader.show import report
    from tracereader.show.view import View

    assert run("01_matmul_add", "--size", "8", "--device", "cpu") == 0
    said = capsys.readouterr().out.splitlines()
    header = 2 + any(line.startswith("A small operation takes ") for line in said)
    said = said[header : 1 + next(number for number, line in enumerate(said) if line.startswith("more: "))]
    *command, trace = said[-1].removeprefix("more: ").split()
    assert command == ["uv", "run", "read-trace"]
    report.explain_file(Path(trace), View(brief=True))
    assert capsys.readouterr().out.splitlines() == said and len(said) > 15
    assert cli.main([trace]) == 0
    later = capsys.readouterr().out
    assert re.search(r"predictions? (hold|is about|are about)", later)
    steps = [line for line in said if re.match(r"#\d", line)]
    assert len(steps) == 3 and set(steps) <= set(later.splitlines())


def recompiled(capsys, script, *flags):
    """Return the table's lines below its head, as lists of words."""
    assert recompile.main([str(ROOT / script), *flags, "--device", "cpu"]) == 0
    lines = capsys.readouterr().out.splitlines()
    legend = next(number for number, line in enumerate(lines) if line.startswith("again: "))
    return [line.split() for line in (*lines[2:legend], *lines[legend + 1 :])]


def test_strides_show_what_a_compiled_layer_does(compile_afresh, capsys, tmp_path):
    from tracereader.figures import summarize
    from tracereader.trace import read

    trace = tmp_path / 'a "guard" failure.json'
    same, transposed, wrote = recompiled(capsys, "02_linear.py", "--strides", "--compile", "--trace", str(trace))
    summary = summarize(read(trace))
    assert len(summary.steps) == 4, "two calls with each input"
    assert summary.compiled.recompiled == ["Torch-Compiled Region: 0/1"]
    assert list(tmp_path.iterdir()) == [trace] and " ".join(wrote).startswith(str(trace))
    assert json.loads(trace.read_text())["traceName"] == trace.name
    assert same[:3] == ["as", "it", "is"] and same[-2] == "1"
    assert transposed[0] == "transposed" and transposed[-2] == "2", "one graph more: compiled again"
    assert float(transposed[-1]) < 2e-2


def test_recompile_says_how_inputs_can_differ(capsys):
    assert recompile.main([str(ROOT / "02_linear.py"), "--compile"]) == 2
    said = capsys.readouterr().err
    assert "--strides" in said and "as in --batch 1024 2048" in said and said.count("\n") == 1


@pytest.mark.parametrize(
    ("script", "flags", "says"),
    [
        ("06_training.py", ("--batch", "1", "2", "--layers", "1"), "not called with an input that could differ"),
        ("docs/make.py", ("--size", "1", "2"), "is no numbered script"),
    ],
)
def test_recompile_refuses_impossible_calls(capsys, script, flags, says):
    assert recompile.main([str(ROOT / script), *flags]) == 2
    said = capsys.readouterr()
    assert says in said.err and said.err.count("\n") == 1 and not said.out


def test_other_sequence_lengths_count_graphs(compile_afresh, capsys):
    flags = ("--compile", "--batch", "2", "--dim", "16", "--hidden", "32", "--seq", "8", "16", "4", "12")
    rows = recompiled(capsys, "03_simple_mlp.py", *flags)
    assert [row[1] for row in rows] == ["8", "16", "4", "12"]
    assert [row[-2] for row in rows] == ["1", "2", "2", "2"], "one more graph, with a symbolic size, for all of them"


def test_without_compile_there_is_no_graph(compile_afresh, capsys):
    rows = recompiled(capsys, "03_simple_mlp.py", "--batch", "2", "--dim", "8", "--hidden", "8", "--seq", "4", "16")
    assert [row[-2] for row in rows] == ["0", "0"]


def test_a_flag_that_makes_another_model_is_refused(compile_afresh, capsys):
    assert recompile.main([str(ROOT / "02_linear.py"), "--in_dim", "4", "8", "--device", "cpu"]) == 2
    assert "makes another model" in capsys.readouterr().err


def test_guess_without_a_terminal_is_refused(run, tmp_path, capsys):
    assert run("01_matmul_add", "--size", "8", "--guess") == 2
    assert "needs a terminal" in capsys.readouterr().err
    assert not list(tmp_path.rglob("*.*"))


def test_questions_before_a_run_at_a_terminal(tmp_path):
    """The real script asks first and explains an answer of the wrong kind. Afterwards it marks all answers."""
    before = []

    def typed(question):
        before.append(not list(tmp_path.rglob("*.json")))
        assert len(before) < 20, question
        if len(before) == 1:
            return "perhaps"  # no answer: the question comes again
        return "n" if question.endswith("(y/n)") else "6" if "calls of ops" in question else "1"

    script = ["01_matmul_add.py", "--size", "256", "--device", "cpu", "--out", str(tmp_path)]
    seen, status = at_a_terminal(script, typed, CI="")
    assert status == 0 and all(before), "it asks before the run"
    assert "please answer with a number" in seen
    asked, _, marks = seen.partition("your answers")
    assert "GPU" not in asked.partition("importing")[0] and "kernels" not in asked, "a CPU's trace cannot tell"
    assert f"{len(before) - 1} questions about this run" in asked
    assert marks.count("your answer: ") == len(before) - 1 == marks.count("(--only ")
    marks = " ".join(marks.split())
    marked = re.findall(r" (right|wrong) (?:(?!your answer).)*your answer: no; the trace: (yes|no)", marks)
    assert marked and all((mark == "right") == (told == "no") for mark, told in marked)
    (trace,) = tmp_path.rglob("*.json")
    events = json.loads(trace.read_text())["traceEvents"]
    steps = [one for one in events if one["name"].startswith("ProfilerStep#")]
    ops = sum(one.get("cat") == "cpu_op" for one in events) / len(steps)
    assert re.search(rf"right how many calls of ops[^?]*[?] your answer: 6 calls; the trace: {ops:.0f} calls", marks)
    assert re.search(r"wrong how many µs does a step take[^?]*[?] your answer: 1.0 µs; the trace: [\d.]+ [µm]s", marks)


def at_a_terminal(argv, typed, **env):
    """Run a command under a pseudo-terminal, and return what it printed and its exit status.

    typed: returns the answer to a question.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # forking a process with threads: it execs at once
        pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(ROOT)
        os.execve(sys.executable, [sys.executable, *argv], {**os.environ, **env})
    seen, told = "", 0
    while True:
        try:
            seen += os.read(terminal, 4096).decode(errors="replace")
        except OSError:
            break
        question = " ".join(plainly(seen[told:]).split())
        if re.search(r"\((y/n|within 10%|within a factor of 2)\)$", question):
            told = len(seen)
            os.write(terminal, f"{typed(question)}\n".encode())
    return plainly(seen), os.waitpid(pid, 0)[1]


def plainly(seen):
    return re.sub(r"\x1b\[[\d;]*m", "", seen)


@pytest.fixture
def no_torch(tmp_path):
    """Return the environment of a Python in which importing torch fails, and which is not that of CI."""
    (tmp_path / "torch.py").write_text("raise ImportError('no torch here')\n")
    return {"PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]), "CI": ""}


def test_a_lesson_is_played_on_another_machines_trace_without_torch(no_torch):
    """Two kernels are exactly right, and half of the GPU's time is within the stated factor of two."""
    script = ["01_matmul_add.py", "--size", "64", "--on", "h200"]
    stored = json.loads(gzip.decompress((H200 / "01_matmul_add/64_bf16_cold_eager.json.gz").read_bytes()))
    work = [one for one in stored["traceEvents"] if one.get("cat") == "kernel"]
    steps = sum(one.get("cat") == "user_annotation" and "Step#" in one["name"] for one in stored["traceEvents"])
    us = sum(one["dur"] for one in work) / steps

    def typed(question):
        return "2" if "kernels" in question else f"{0.55 * us:.2f}" if "µs" in question else "y"

    seen, status = at_a_terminal(script, typed, **no_torch)
    assert status == 0 and "NVIDIA H200" in seen and len(work) == 2 * steps
    asked, _, marks = seen.partition("your answers")
    marks = " ".join(marks.split())
    kept = [one for one in stored["lesson"]["guesses"] if one["guess"] not in ("records_steps", "kernels_are")]
    assert marks.count("your answer: yes") == len(kept) == asked.count("(y/n)") == len(stored["lesson"]["guesses"]) - 2
    assert re.search(r"right how many kernels[^?]*[?] your answer: 2 kernels; the trace: 2 kernels", marks)
    assert re.search(r"right how many µs of a step does the GPU work[?] your answer: [\d.]+ µs; the trace: "
                     rf"{us:.1f} µs \(within a factor of 2", marks)  # fmt: skip


@pytest.mark.parametrize(("more", "env", "asked"), [
    ((), {}, 1), (("--no-guess",), {}, 0), ((), {"CI": "true"}, 0),
], ids=["Enter skips all", "--no-guess", "CI"])  # fmt: skip
def test_questions_can_be_skipped(no_torch, more, env, asked):
    script = ["02_linear.py", "--warmup", "--on", "h200", *more]
    seen, status = at_a_terminal(script, lambda question: "", **no_torch | env)
    assert (status, seen.count("(within 10%)"), seen.count("(y/n)")) == (0, asked, 0)
    assert "your answers" not in seen and "predictions hold" in " ".join(seen.split())


@pytest.mark.parametrize(("flags", "says"), [
    (("--size", "65", "--on", "h200"), "there is no reference of 65_bf16_cold_eager.json in nvidia-h200"),
    (("--on", "a100"), "--on a100: the machines are cpu, nvidia-h200"),
], ids=["a run that was not recorded", "an unknown machine"])  # fmt: skip
def test_a_lesson_that_was_not_recorded_is_refused_in_one_line(flags, says):
    command = [sys.executable, "01_matmul_add.py", *flags]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and says in done.stderr and done.stderr.count("\n") == 1 and not done.stdout


def test_a_numbered_script_writes_its_page(run, tmp_path):
    """The page has the script's predictions and the observations."""
    page = tmp_path / "report.html"
    assert run("01_matmul_add", "--size", "8", "--html", str(page)) == 0
    figures = json.loads(re.search(r'id="figures">(.*?)</script>', page.read_text(), re.DOTALL)[1])
    assert figures["head"]["script"] == "01_matmul_add" and figures["guesses"]
    page.write_text("mine")
    assert run("01_matmul_add", "--size", "8", "--html", str(page)) == 2
    assert page.read_text() == "mine"
