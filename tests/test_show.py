"""The lanes, and the sharing of traces."""

import gzip
import json
import os
import re
import shlex
import subprocess
import sys
from types import SimpleNamespace

import pytest
from references import H200, ROOT

from tracereader import cli
from tracereader.figures.steps import typical
from tracereader.show import lanes, text
from tracereader.show.view import View
from tracereader.trace import read

MLP = H200 / "03_simple_mlp/64x128x768x3072_bf16_warm_eager.json.gz"


def drawn(file, width, glyphs):
    return lanes.draw(typical(read(file)), width, glyphs)


@pytest.mark.parametrize("width", [40, 80, 120, 237])
@pytest.mark.parametrize("glyphs", [lanes.UNICODE, lanes.ASCII])
def test_lanes_fit_the_width(width, glyphs):
    lines = drawn(MLP, width, glyphs)
    assert len(lines) > 4
    assert max(map(len, lines)) <= width
    if glyphs is lanes.ASCII:
        assert "".join(lines).replace("…", "").isascii()


def test_lanes_show_each_slice_where_it_is():
    ours = read(MLP)
    step = typical(ours)
    end = max(step.end, max(work.end for work in step.work))
    columns = 200 - 6 - lanes.COUNTED
    (gpu,) = [line[6:] for line in lanes.draw(step, 200, lanes.ASCII) if line.startswith("GPU")]
    for work in step.work:
        left = round((work.start - step.start) * columns / (end - step.start))
        assert gpu[left] in "[|", f"{work.name} starts at column {left}"
    first = min(work.start for work in step.work)
    idle = round((first - step.start) * columns / (end - step.start))
    assert gpu[:idle].strip() == "", "the gap before the first kernel is visible"


def test_short_slices_are_merged_and_counted():
    lines = drawn(MLP, 60, lanes.ASCII)
    assert any(re.search(r"\+\d+ too short$", line) for line in lines)


def test_lanes_only_where_asked_for_in_a_pipe(capsys):
    assert cli.main([str(MLP)]) == 0
    assert "lanes of step" not in capsys.readouterr().out
    assert cli.main([str(MLP), "--lanes"]) == 0
    assert "lanes of step #3" in capsys.readouterr().out
    assert cli.main([str(MLP), "--step", "2"]) == 0
    assert "lanes of step #2" in capsys.readouterr().out


def test_flags_that_exclude_the_lanes_are_refused(capsys):
    assert cli.main([str(MLP), "--lanes", "--only", "steps"]) == 2
    assert "--lanes: --only leaves the lanes out" in capsys.readouterr().err
    assert cli.main([str(MLP), "--lanes", "--html", "x.html"]) == 2
    assert "leave out --lanes" in capsys.readouterr().err


def test_a_view_holds_the_requested_sections():
    asked = {"only": None, "all": False, "step": None, "lanes": False}
    usual = View.of(SimpleNamespace(**asked))
    assert usual.usual and not usual.lanes and usual.shows("gpu")
    drawn = View.of(SimpleNamespace(**asked | {"lanes": True}), brief=True)
    assert drawn.usual and drawn.lanes and not drawn.shows("gpu")
    chosen = View.of(SimpleNamespace(**asked | {"only": ["gpu"]}))
    assert not chosen.usual and chosen.shows("gpu") and not chosen.shows("lanes")
    assert not View.of(SimpleNamespace(**asked | {"all": True})).usual


@pytest.mark.parametrize(
    "wish",
    [
        *(pytest.param(f"PYTHONIOENCODING={one}", marks=pytest.mark.exhaustive) for one in ("ascii", "cp1252")),
        "LC_ALL=C",
    ],
)
def test_lanes_are_ascii_if_the_terminal_or_the_locale_needs_it(wish):
    command = [sys.executable, "-m", "tracereader", str(MLP), "--lanes"]
    environment = os.environ | dict([wish.split("=")])
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True)
    assert (done.returncode, done.stderr) == (0, b"")
    _, _, picture = done.stdout.partition(b"lanes of step")
    assert b"[mlp_fwd=" in picture


def test_a_missing_step_is_refused(capsys):
    assert cli.main([str(MLP), "--step", "9"]) == 2
    screen = capsys.readouterr()
    assert "holds ProfilerStep#2 to ProfilerStep#4" in screen.err
    assert screen.err.count("\n") == 1 and screen.out == ""


@pytest.mark.exhaustive
def test_the_pages_trace_util_call_is_one_that_it_takes():
    """The articles' call no longer works. The pinned version's own parser reads exactly the page's words."""
    from trace_util.cli import build_parser

    (call,) = set(re.findall(r"uv run trace-util ([^\n`]+)", (ROOT / "docs/running.md").read_text()))
    words = shlex.split(call.replace("<user>", "someone"))
    args = build_parser().parse_args(words)
    assert str(args.folder_path) == "traces"
    assert args.bucket_name == "someone/traces"


def test_a_kernels_occupancy_is_that_of_all_its_launches(capsys):
    """Launches of five shapes have one name; torch's estimates for them are in the trace."""
    file = H200 / "05_llm/1x512_bf16_warm_eager_triton-overlap_graph.json.gz"
    events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    kernels = [e["args"] for e in events if e.get("cat") == "kernel" and e["name"] == "matvec_kernel"]
    reported = {args["est. achieved occupancy %"] for args in kernels}
    assert cli.main([str(file), "--only", "names,gpu"]) == 0
    screen = capsys.readouterr().out
    assert f"({min(reported)} to {max(reported)}% by the profiler's estimate)" in screen
    assert "all in the window, by family (kernels overlap)" in screen


@pytest.mark.parametrize("width", [1, 4, 5])
def test_a_very_narrow_terminal(monkeypatch, capsys, width):
    monkeypatch.setenv("COLUMNS", str(width))
    compiled = MLP.with_name(MLP.name.replace("eager", "compile"))
    assert cli.main([str(MLP), str(compiled), "--all"]) == 0
    assert "ops gone:" in " ".join(capsys.readouterr().out.split())


def test_runs_that_differ_in_size_alone_are_distinct_on_a_narrow_screen(monkeypatch, capsys):
    sweep = H200 / "sweep-attention/04_a_naive_attention"
    files = [sweep / f"8x16x{seq}x64_bf16_warm_eager_shapes.json.gz" for seq in (2048, 8192)]
    for width in (80, 110, 200):
        monkeypatch.setenv("COLUMNS", str(width))
        assert cli.main([*map(str, files), "--only", "steps"]) == 0
        lines = capsys.readouterr().out.splitlines()
        first, second = (next(line for line in lines if line.startswith(number)) for number in ("1  04_a", "2  04_a"))
        assert "2048x64" in first and "8192x64" in second
        assert "_shapes" in first, "each has a line of its own"


PATH = "traces/05_llm/1x512_bf16_warm_compile_gqa_merge_tune_graph_max-autotune-no-cudagraphs.json"


@pytest.mark.parametrize("width", [40, 80, 120])
@pytest.mark.parametrize("first", [True, False])
def test_a_path_is_never_broken(monkeypatch, capsys, width, first):
    """The path is whole on one line, and no word beside it is cut at the edge of the terminal."""
    monkeypatch.setenv("COLUMNS", str(width))
    for path in ("traces/a.json", PATH):
        text.print_whole(text.console(), path, "the trace, for ui.perfetto.dev", first)
        lines = capsys.readouterr().out.splitlines()
        (line,) = (line for line in lines if path in line)
        assert all(len(one) <= width for one in lines if one is not line)
        assert len(line) <= width or line == path
        words = " ".join(lines).replace(path, " ").replace(":", "").split()
        assert words == ["the", "trace,", "for", "ui.perfetto.dev"]


def test_a_path_in_a_sentence_is_not_broken(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "60")
    text.paragraph(text.console(), f"left out: {PATH}: it is no trace", "note ", "     ")
    assert f"{PATH}:" in capsys.readouterr().out
