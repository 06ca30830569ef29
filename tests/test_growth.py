"""The number of read-trace's calls grows in proportion to inputs that are made to be slow to read.

The inputs are those of benchmarks/growth.py, which measures the time. Regular expressions make no calls. For them, the
time of hostile text is compared with that of harmless text: a quadratic one takes hundreds of times as long.
"""

import json
import runpy
import sys
import time

import pytest
from references import ROOT
from test_ranks import of_rank

from tracereader import cli
from tracereader.figures import ranks

KINDS = runpy.run_path(str(ROOT / "benchmarks/growth.py"))["KINDS"]


def calls(function, *args):
    """Return the number of Python and C calls, including every step of a generator."""
    count = 0

    def one_more(frame, event, arg):
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(one_more)
    try:
        function(*args)
    finally:
        sys.setprofile(None)
    return count


# All documents are made of stretches of a thread, which are followed to a depth of at most 200 (DEEPEST).
FEW, MANY = 100, 400
SIZES = [(kind, MANY if "--json" in kind else FEW) for kind in KINDS]
SIZES += [pytest.param(kind, MANY, marks=pytest.mark.exhaustive) for kind in KINDS if "--json" not in kind]


@pytest.mark.parametrize(("kind", "size"), SIZES)
def test_twice_as_much_takes_twice_the_calls(tmp_path, capsys, kind, size):
    counts = []
    for n in (10, size, 2 * size):  # the first imports what it needs
        (tmp_path / "a.json").write_text(json.dumps({"traceEvents": KINDS[kind](n)}))
        words = [str(tmp_path / "a.json"), "--json=all"] if "--json" in kind else [str(tmp_path / "a.json")]
        counts.append(calls(cli.main, words))
    capsys.readouterr()
    assert counts[2] < 2.3 * counts[1]


def of_hosts(count):
    """Return ranks of as many hosts, one each, and ten collectives of all of them."""
    group = tuple(range(count))
    parts = [(group, "all-reduce", 8, seq, 1000 * seq, 1000 * seq + 500) for seq in range(10)]
    return [of_rank(rank, count, f"host {rank}", parts) for rank in range(count)]


def test_clocks_of_many_hosts():
    counts = [calls(ranks.joined, of_hosts(count)) for count in (20, 40)]
    assert counts[1] < 2.3 * counts[0]


MARGIN, LEAST_S = 20, 0.25  # times as long, and the time of a short report
# Parts of the names that the reader's expressions look for. Repeated, they are what backtracks.
PARTS = (
    "aConv", "aten::aconv", "nchw", "kn_entry_", "winograd", "layer_norCompute", "triton_tem_fused_", "lambda(",
    "triton_poi_fused_", "cutlass_80_", "sm90_", "Cijk_Aa_Ba_", "CatArrayBatchedCopy", "OpaqueType<1", "enable_if<",
    "void ", "_Z1", "_1", "aA", "a1", "1x", "::", "x::", "<a,", "/a", "\\a", "(1): ", "compile_id=!1", "send 1->", " 1",
    "__", "`", "www.",
)  # fmt: skip


def seconds_of(tmp_path, text):
    """Return the CPU time of a report on a trace with this text as names and arguments."""
    args = {"Input Dims": [[8, 8]], "Input type": [text], "Concrete Inputs": [text], "Collective name": text}
    rows = [("cpu_op", 1, 90), ("user_annotation", 2, 80), ("python_function", 3, 70), ("kernel", 40, 9)]
    launch = {
        "cat": "cuda_runtime",
        "name": "cudaLaunchKernel",
        "tid": 1,
        "ts": 10,
        "dur": 5,
        "args": {"correlation": 1},
    }
    events = [launch | {"ph": "X", "pid": 1}]
    for cat, start, length in rows:
        tied = {"correlation": 1, "device": 0, "stream": 7} if cat == "kernel" else {}
        tid = 7 if tied else 1
        events.append({"ph": "X", "cat": cat, "name": text, "pid": 1, "tid": tid, "ts": start, "dur": length})
        events[-1]["args"] = args | tied
    (tmp_path / "a.json").write_text(json.dumps({"traceEvents": events}))
    before = time.process_time()
    assert cli.main([str(tmp_path / "a.json"), "--all"]) == 0
    assert cli.main([str(tmp_path / "a.json"), "--html", str(tmp_path / "a.html"), "--force"]) == 0
    return time.process_time() - before


def test_hostile_text_of_100_000_characters(tmp_path, capsys):
    seconds_of(tmp_path, "a")  # imports what it needs
    harmless = max(LEAST_S, seconds_of(tmp_path, "a" * 100_000))
    took = {part: seconds_of(tmp_path, (part * 100_000)[:100_000]) for part in PARTS}
    capsys.readouterr()
    assert not {part: seconds for part, seconds in took.items() if seconds > MARGIN * harmless}
