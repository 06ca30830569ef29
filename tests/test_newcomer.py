"""A numbered script's report of its own run fits a screen and begins with the lesson."""

import ast
import math
import re

import pytest
from references import ROOT
from rich.cells import cell_len

from tracereader.show import report
from tracereader.show.view import View

# What common/lesson.py prints around it: title, first call, the two files.
AROUND = 4
FIRST_RUNS = sorted(ROOT.glob("traces/reference/*/01_matmul_add/64_bf16_*_eager.json.gz"))


@pytest.fixture
def screen(capsys, monkeypatch):
    """Return the lines on a terminal of 80 columns, with lanes; a wrapped line counts as several."""

    def shown(trace):
        monkeypatch.setenv("COLUMNS", "80")
        report.explain_file(trace, View(brief=True, lanes=True))
        lines = capsys.readouterr().out.splitlines()
        return lines, AROUND + sum(max(1, math.ceil(cell_len(line) / 80)) for line in lines)

    return shown


@pytest.mark.parametrize("trace", FIRST_RUNS, ids=lambda path: f"{path.parents[1].name}/{path.stem}")
def test_it_fits_52_lines_and_opens_with_the_answer(screen, trace):
    lines, height = screen(trace)
    assert height <= 52
    head, _, answer = lines[:3]
    assert "3 steps of " in head and re.match(r"(Overhead|GPU|Compute|Memory|CPU)[- ](bound|only)\b", answer)
    text = "\n".join(lines)
    for section in (" hold", "lanes of step", "profiler table", "more:"):
        assert section in text
    assert not any(cell_len(line) > 80 for line in lines[:-1]), "only the command to copy may be longer"


def test_it_names_an_action_for_its_finding(screen):
    small = " ".join(screen(ROOT / "traces/reference/nvidia-h200/01_matmul_add/64_bf16_cold_eager.json.gz")[0])
    large = " ".join(screen(ROOT / "traces/reference/nvidia-h200/01_matmul_add/4096_bf16_warm_eager.json.gz")[0])
    assert "Give each launch" in small and "Give each launch" not in large
    assert "the GPU waits for the CPU to launch" not in small, "the figures before it say so"
    assert "ess or faster" in " ".join(large.split())


def test_nothing_is_said_twice(screen):
    """The script prints the machine once, and the reason of a prediction is not repeated below the steps."""
    for trace in FIRST_RUNS:
        lines = screen(trace)[0]
        assert lines[0].startswith("3 steps of ")
        text = " ".join(" ".join(lines).split())
        why = re.search(r"[\w.]+ to [\w.]+ times slower|self time of [\w:]+", text)
        assert why and text.count(why[0]) == 1, "once, below the prediction that does not hold"


@pytest.mark.parametrize("machine", ["cpu", "nvidia-h200"])
def test_the_columns_of_the_steps_are_explained(capsys, monkeypatch, machine):
    """Without a terminal no lanes replace the table."""
    monkeypatch.setenv("COLUMNS", "80")
    report.explain_file(ROOT / f"traces/reference/{machine}/01_matmul_add/64_bf16_cold_eager.json.gz", View(brief=True))
    text = " ".join(capsys.readouterr().out.split())
    assert "to first op: from" in text
    assert ("latency: from" in text) == (machine != "cpu")
    if "* #" in text:
        assert "for the reason above" in text


PAGES = [*sorted(ROOT.glob("0*.py")), ROOT / "sweep.py", ROOT / "recompile.py"]


@pytest.mark.parametrize("script", PAGES, ids=lambda path: path.stem)
def test_the_start_of_a_help_page_fits_80_columns(script):
    text = ast.get_docstring(ast.parse(script.read_text()))
    assert max(map(len, text.splitlines())) <= 78
