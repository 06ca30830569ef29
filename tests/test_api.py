"""The reader from Python: import tracereader. Figures are compared with raw events and with --json."""

import json
import re
import subprocess
import sys

import pytest
from raw_events import raw_steps
from references import CHANGES, ROOT
from test_opportunities import raw_events

import tracereader
from tracereader import cli
from tracereader.command import BadInput

EAGER, GRAPH = CHANGES / "vit/eager.json.gz", CHANGES / "vit/graph.json.gz"


@pytest.fixture(scope="module")
def run():
    return tracereader.read(EAGER)


@pytest.fixture(scope="module")
def told():
    command = [sys.executable, "-m", "tracereader", str(EAGER), "--json=all"]
    return json.loads(subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout)


def test_a_run_has_the_figures_of_json(run, told):
    assert (run.step_us, run.unprofiled_step_us, run.regime) == (
        told["recorded_step_us"], told["unprofiled_step_us"], told["waits_for"],
    )  # fmt: skip
    assert [one.name for one in run.kernels] == [one["name"] for one in told["kernels"]]
    assert [(one.change, one.saves_us) for one in run.opportunities] == [
        (one["change"], one["saves_us"]) for one in told["opportunities"]
    ]


def test_the_tables_agree_with_the_raw_events(run):
    events = raw_events(EAGER)
    marks = raw_steps(events)
    assert [one.name for one in run.steps] == [one["name"] for one in marks]
    kernels = [e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    assert sum(one.count for one in run.kernels) == len(kernels)
    assert sum(one.total_us for one in run.kernels) == pytest.approx(sum(e["dur"] for e in kernels))
    mark = next(one for one in marks if one["name"] == run.summary.typical_step)
    inside = [e for e in events if e.get("cat") == "cpu_op" and mark["ts"] <= e["ts"] < mark["ts"] + mark["dur"]]
    for op in run.ops:
        assert op.calls == sum(e["name"] == op.name for e in inside)


def test_the_texts_are_those_of_the_command(run, capsys):
    assert cli.main([str(EAGER)]) == 0
    assert run.report() == capsys.readouterr().out
    assert cli.main([str(EAGER), str(GRAPH)]) == 0
    assert tracereader.compare(run, tracereader.read(GRAPH)) == capsys.readouterr().out


def test_the_texts_are_returned_in_a_notebook_too(run, monkeypatch):
    """rich shows what it prints there beside the standard output, and the kernel asks it for colors."""
    graph = tracereader.read(GRAPH)
    texts = run.report(), tracereader.compare(run, graph)
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert (run.report(), tracereader.compare(run, graph)) == texts


def test_a_page_is_written_once(run, tmp_path):
    run.page(tmp_path / "page.html")
    (tmp_path / "mine.html").write_text("mine")
    with pytest.raises(BadInput):
        run.page(tmp_path / "mine.html")
    assert "<html" in (tmp_path / "page.html").read_text()[:300]
    assert run._repr_html_().startswith("<iframe srcdoc=") and '"overhead' not in run._repr_html_()[:200]


def test_a_file_that_is_no_trace_is_told(tmp_path):
    (tmp_path / "x.json").write_text("{")
    with pytest.raises(tracereader.TraceError):
        tracereader.read(tmp_path / "x.json")
    with pytest.raises(ValueError, match="there are kernels, ops, steps, opportunities"):
        tracereader.read(EAGER).rows("nothing")


@pytest.mark.parametrize("table", ["kernels", "ops", "steps", "opportunities"])
def test_a_table_has_a_row_of_single_values_for_each_entry(run, table):
    rows = run.rows(table)
    assert len(rows) == len(getattr(run, table)) > 0
    assert {one["name"] for one in run.rows("ops")} == {one.name for one in run.ops}
    assert not any(isinstance(value, list | dict) for row in rows for value in row.values())


def test_ranks_are_read_together(tmp_path):
    files = sorted((ROOT / "tests/traces/h200-x2/accumulated_fsdp1_once").glob("rank?.json.gz"))
    command = [sys.executable, "-m", "tracereader", *map(str, files), "--json=all"]
    told = json.loads(subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout)
    ranks = tracereader.read_ranks(files)
    assert ranks.world_size == told["world_size"] and len(ranks.matched) == told["collectives"]
    with pytest.raises(tracereader.TraceError):
        tracereader.read_ranks(tmp_path)


def test_the_example_of_the_readme_runs(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    (example,) = re.findall(r"```python\n(import tracereader.*?)```", (ROOT / "README.md").read_text(), re.S)
    exec(example, {})  # the example is this repository's own
    printed = capsys.readouterr().out
    assert printed.startswith("overhead ") and "the second is 7.8 times as fast" in printed


def test_nothing_else_is_public():
    assert set(tracereader.__all__) == {"Run", "TraceError", "__version__", "compare", "read", "read_ranks"}
    with pytest.raises(AttributeError, match="no attribute 'figure'"):
        _ = tracereader.figure


def test_the_command_does_not_pay_for_it():
    code = "import sys, tracereader, tracereader.command; print('tracereader.api' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_the_notebook_runs(monkeypatch, capsys):
    """Its cells run in order as a kernel runs them; the value of the last one is shown as a page."""
    notebook = json.loads((ROOT / "docs/notebook.ipynb").read_text())
    monkeypatch.chdir(ROOT / "docs")
    cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    names = {}
    for cell in cells[:-1]:
        exec(cell, names)  # the cells are this repository's own
    printed = capsys.readouterr().out
    assert printed.startswith("overhead 5,797 µs with the profiler, 2,966 µs without it")
    assert "replay the step as a CUDA graph: 2,966 -> " in printed and "nvjet_sm90" in printed
    assert "aten::addmm" in printed and "the second is 7.8 times as fast" in printed
    assert eval(cells[-1], names)._repr_html_().startswith("<iframe srcdoc=")
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in notebook["cells"])
