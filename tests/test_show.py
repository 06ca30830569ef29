"""What is looked at: the lanes, the sweep and its picture, and sharing."""

import os
import re
import shlex
import subprocess
import sys

import pytest
from conftest import ROOT, load_script

from common import lanes, reading, sweep, trace

H200 = ROOT / "traces/reference/nvidia-h200"
read_trace = load_script("read_trace")
MLP = H200 / "03_simple_mlp/64x128x768x3072_bf16_warm_eager.json.gz"


def drawn(file, width, glyphs):
    return lanes.draw(reading.typical(trace.read(file)), width, glyphs)


@pytest.mark.parametrize("width", [40, 80, 120, 237])
@pytest.mark.parametrize("glyphs", [lanes.UNICODE, lanes.ASCII])
def test_lanes_fit_the_width(width, glyphs):
    lines = drawn(MLP, width, glyphs)
    assert len(lines) > 4
    assert max(map(len, lines)) <= width
    if glyphs is lanes.ASCII:
        assert "".join(lines).replace("…", "").isascii()


def test_lanes_show_each_slice_where_it_is():
    ours = trace.read(MLP)
    step = reading.typical(ours)
    end = max(step.end, max(work.end for work in step.work))
    columns = 200 - 6 - 14
    (gpu,) = [line[6:] for line in lanes.draw(step, 200, lanes.ASCII) if line.startswith("GPU")]
    for work in step.work:
        left = round((work.start - step.start) * columns / (end - step.start))
        assert gpu[left] in "[|", f"{work.name} starts at column {left}"
    first = min(work.start for work in step.work)
    idle = round((first - step.start) * columns / (end - step.start))
    assert gpu[:idle].strip() == "", "the gap before the first kernel is visible"


def test_what_is_too_short_is_merged_and_counted():
    lines = drawn(MLP, 60, lanes.ASCII)
    assert any(re.search(r"\+\d+ too short$", line) for line in lines)


def test_lanes_only_where_asked_for_in_a_pipe(capsys):
    assert read_trace.main([str(MLP)]) == 0
    assert "lanes of step" not in capsys.readouterr().out
    assert read_trace.main([str(MLP), "--lanes"]) == 0
    assert "lanes of step #3" in capsys.readouterr().out
    assert read_trace.main([str(MLP), "--step", "2"]) == 0
    assert "lanes of step #2" in capsys.readouterr().out


@pytest.mark.parametrize("wish", ["PYTHONIOENCODING=ascii", "PYTHONIOENCODING=cp1252", "LC_ALL=C"])
def test_lanes_are_plain_ascii_where_the_terminal_or_the_locale_wants_it(wish):
    command = [sys.executable, "read_trace.py", str(MLP), "--lanes"]
    environment = os.environ | dict([wish.split("=")])
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True)
    assert (done.returncode, done.stderr) == (0, b"")
    _, _, picture = done.stdout.partition(b"lanes of step")
    assert b"[mlp_fwd=" in picture


def test_a_step_that_is_not_there(capsys):
    assert read_trace.main([str(MLP), "--step", "9"]) == 2
    screen = capsys.readouterr()
    assert "holds ProfilerStep#2 to ProfilerStep#4" in screen.err
    assert screen.err.count("\n") == 1 and screen.out == ""


def test_sweep_on_the_cpu(run, tmp_path, capsys):
    flags = ("--size", "32", "8", "16", "--device", "cpu", "--warmup")
    assert run("01_matmul_add", *flags) == 0
    screen = capsys.readouterr().out
    rows = [line.split() for line in screen.splitlines() if line.endswith("CPU only")]
    assert [row[0] for row in rows] == ["8", "16", "32"]
    assert "roofs of this machine" in screen
    assert len(list(tmp_path.rglob("*.json"))) == 3
    (picture,) = tmp_path.rglob("*.png")
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert picture.name in screen
    small = ("--batch", "2", "--dim", "8", "--hidden", "16", "--device", "cpu")
    assert run("03_simple_mlp", "--seq", "4", "8", *small) == 0


def test_sweep_without_matplotlib_still_has_its_table(run, monkeypatch, capsys, tmp_path):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    assert run("01_matmul_add", "--size", "8", "16", "--device", "cpu") == 0
    screen = capsys.readouterr().out
    assert "CPU µs a step" in screen
    assert "uv run --extra plot" in screen
    assert not list(tmp_path.rglob("*.png"))


@pytest.mark.parametrize("flag", ["--guess", "--open", "--lanes"])
def test_flags_for_one_run_are_refused_in_a_sweep(run, capsys, flag):
    assert run("01_matmul_add", "--size", "8", "16", "--device", "cpu", flag) == 2
    assert "is for one run" in capsys.readouterr().err


def point(size, cpu, busy):
    return sweep.Point(size, None, "", cpu, busy, None, None, None, None)


def test_crossing_lies_between_the_points_that_differ():
    assert sweep.crossing([point(100, 50, 5), point(1000, 50, 500)]) == pytest.approx(100 * 10**0.5)
    assert sweep.crossing([point(100, 50, 5), point(1000, 50, 20)]) is None
    assert sweep.crossing([point(100, 50, 0), point(1000, 50, 0)]) is None


def test_readmes_trace_util_call_is_one_that_it_takes():
    """The articles' call rotted: this runs the pinned version's own parser on exactly README's words."""
    from trace_util.cli import build_parser

    (call,) = set(re.findall(r"uv run trace-util ([^\n`]+)", (ROOT / "README.md").read_text()))
    words = shlex.split(call.replace("<user>", "someone"))
    args = build_parser().parse_args(words)
    assert str(args.folder_path) == "traces"
    assert args.bucket_name == "someone/traces"
