"""The number of read-trace's calls grows in proportion to inputs that are made to be slow to read. No time is measured.

The inputs are those of benchmarks/growth.py, which measures the time.
"""

import json
import runpy
import sys

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


@pytest.mark.parametrize("size", [100, pytest.param(400, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("kind", KINDS)
def test_twice_as_much_takes_twice_the_calls(tmp_path, capsys, kind, size):
    counts = []
    for n in (10, size, 2 * size):  # the first imports what it needs
        (tmp_path / "a.json").write_text(json.dumps({"traceEvents": KINDS[kind](n)}))
        words = [str(tmp_path / "a.json"), "--json"] if "--json" in kind else [str(tmp_path / "a.json")]
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
