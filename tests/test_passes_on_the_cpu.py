"""Equal passes that a program on a CPU computes one after the other; cpu_programs.py recorded the traces.

Without the profiler, on the same machine, the sample loop took 2.17 ms a step, and 0.22 as one batch; the tables took
0.74, and 0.36 as one table.
"""

import pytest
from references import ROOT
from test_cpu_only import middle_step
from test_opportunities import priced_changes, raw_events

FOLDER = ROOT / "tests/traces/cpu/equal_passes"


@pytest.mark.parametrize(
    ("program", "op", "evidence"),
    [
        ("sample_loop", "aten::cross_entropy_loss", "each of {} passes computes with one of the 256 parts of a tensor"),
        ("tables", "aten::embedding", "each of {} passes looks up an embedding"),
    ],
)
def test_the_passes_are_counted_and_at_least_the_time_between_their_ops_is_saved(program, op, evidence):
    file = FOLDER / f"{program}.json.gz"
    step, ops = middle_step(raw_events(file))
    calls = sorted((one for one in ops if one["name"] == op), key=lambda one: one["ts"])
    proposal = priced_changes(file)["larger_batch"]
    assert proposal.evidence == evidence.format(len(calls))
    # The time from the first pass to the last one in which no op of the program's thread runs.
    first, last = calls[0]["ts"], calls[-1]["ts"]
    busy = reached = 0.0
    for one in sorted((x for x in ops if x["tid"] == step["tid"]), key=lambda x: x["ts"]):
        begins, ends = max(one["ts"], first, reached), min(one["ts"] + one["dur"], last)
        busy, reached = busy + max(0.0, ends - begins), max(reached, ends)
    low, high = proposal.estimated_savings
    assert low > (last - first - busy) / step["dur"] > 0.05
    assert high < 1


@pytest.mark.parametrize("program", ["sample_loop", "tables"])
def test_less_is_said_than_the_change_saves(program):
    """The last pass's ops stay, and each parameter's update. So does the program without the weakness."""
    proposal = priced_changes(FOLDER / f"{program}.json.gz")["larger_batch"]
    without, _ = middle_step(raw_events(FOLDER / f"{program}_without.json.gz"))
    assert without["dur"] < proposal.step_us_after < 0.85 * proposal.step_us
    assert "larger_batch" not in priced_changes(FOLDER / f"{program}_without.json.gz")
