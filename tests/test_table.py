"""The profiler table read from the trace is compared with the one that torch wrote beside it."""

import re

import pytest
from references import REFERENCES, ROOT

from tracereader import cli
from tracereader.figures.table import profiler_table
from tracereader.trace import read

UNITS = {"us": 1, "ms": 1e3, "s": 1e6}
TABLES = [trace for trace in REFERENCES if trace.with_name(trace.name.replace(".json.gz", ".txt")).is_file()]


def printed(text):
    """Return the µs of a time in torch's table, and half of its last digit."""
    number, unit = re.fullmatch(r"([\d.]+)(us|ms|s)", text).groups()
    return float(number) * UNITS[unit], 0.51 * 10 ** -len(number.partition(".")[2]) * UNITS[unit]


def torchs(trace):
    """Return the rows of the committed .txt as (name, its cells by head), and its last lines."""
    lines = trace.with_name(trace.name.replace(".json.gz", ".txt")).read_text().splitlines()
    rules = [number for number, line in enumerate(lines) if line.startswith("-----")]
    heads = re.split(r"\s{2,}", lines[rules[0] + 1].strip())
    rows = [dict(zip(heads, re.split(r"\s{2,}", line.strip()), strict=True)) for line in lines[rules[1] + 1 : rules[2]]]
    totals = dict(line.split(": ") for line in lines[rules[2] + 1 :] if re.match(r"Self \w+ time total", line))
    return rows, totals


def same(ours, text):
    theirs, half = printed(text)
    return abs(ours - theirs) <= half + 1e-6


def near(ours, text, share):
    return abs(ours - printed(text)[0]) <= share * printed(text)[0]


@pytest.mark.parametrize("trace", TABLES, ids=lambda path: f"{path.parents[1].name}/{path.stem}")
def test_it_equals_torchs_own_table(trace):
    ours, (rows, totals) = read(trace), torchs(trace)
    table = profiler_table(ours)
    assert len(rows) == min(15, len(table.rows))
    # torch 2.11 takes the number of a slice that belongs to no op (an overhead) for an op's: that op's GPU time then
    # counts twice in what encloses it (said in a comment of its profiler.py, 2.15). In traces of several ranks its self
    # times differ by some percent, too: calls of NCCL's own threads have such numbers.
    of_ranks = "_x2_" in trace.name
    twice = bool(ours.overheads) or of_ranks
    left = list(table.rows)
    for row in rows:
        name, gpu = row["Name"].removesuffix("..."), "Self CUDA" in row
        found = next(
            one for one in left
            if one.name.startswith(name) and one.calls == int(row["# of Calls"])
            and same(one.total_cpu_us, row["CPU total"])
            and (same(one.self_cpu_us, row["Self CPU"]) or (of_ranks and near(one.self_cpu_us, row["Self CPU"], 0.1)))
        )  # fmt: skip
        left.remove(found)
        if gpu and (found.on_gpu or not twice):
            assert same(found.self_gpu_us, row["Self CUDA"]) and same(found.total_gpu_us, row["CUDA total"]), name
        elif gpu and "Loading" not in name and "Buffer" not in name:
            # Of a call that loads, all that torch counts can be another op's.
            assert found.total_gpu_us <= printed(row["CUDA total"])[0] * 1.001, name
    assert same(table.self_cpu_us, totals["Self CPU time total"]) or (
        of_ranks and near(table.self_cpu_us, totals["Self CPU time total"], 0.01)
    )
    if "Self CUDA time total" in totals:
        assert same(table.self_gpu_us, totals["Self CUDA time total"])


@pytest.mark.parametrize("trace", TABLES[::5], ids=lambda path: f"{path.parents[1].name}/{path.stem}")
def test_self_excludes_children_and_total_includes_them(trace):
    """Claim 04: the annotation's total is its self time and its calls' time, and each moment counts once."""
    table = profiler_table(read(trace))
    label = next(row for row in table.rows if row.name == table.label and not row.on_gpu)
    assert label.total_cpu_us == pytest.approx(label.self_cpu_us + sum(table.label_calls.values()))
    assert sum(row.self_cpu_us for row in table.rows) == pytest.approx(table.self_cpu_us)
    assert all(row.self_cpu_us <= row.total_cpu_us + 1e-9 for row in table.rows)


@pytest.mark.parametrize("trace", TABLES[::7], ids=lambda path: f"{path.parents[1].name}/{path.stem}")
def test_it_fits_a_terminal_of_80_columns(trace, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert cli.main([str(trace), "--only", "table"]) == 0
    lines = capsys.readouterr().out.splitlines()
    head = next(number for number, line in enumerate(lines) if line.startswith("profiler table"))
    assert max(map(len, lines[head:])) <= 80
    whole_us = profiler_table(read(trace)).self_cpu_us
    unit = re.match(r"profiler table, (?:\d+ steps, )?(µs|ms|s)  ", lines[head])[1]
    assert unit == ("µs" if whole_us < 1e5 else "ms" if whole_us < 1e7 else "s")
    (total,) = re.findall(r"^self times of all .* rows +([\d,.]+)", "\n".join(lines[head:]), re.M)
    length = {"µs": 1, "ms": 1e3, "s": 1e6}[unit]
    assert float(total.replace(",", "")) * length == pytest.approx(whole_us, abs=0.06 if unit == "µs" else 0.6)


def test_the_annotations_second_row_is_explained(capsys):
    trace = ROOT / "traces/reference/nvidia-h200/01_matmul_add/64_bf16_cold_eager.json.gz"
    (span,) = profiler_table(read(trace)).label_spans
    assert (span.name, span.calls) == ("matmul_add", 3)
    cli.main([str(trace), "--only", "table"])
    assert f"{span.us:,.1f} µs" in capsys.readouterr().out
