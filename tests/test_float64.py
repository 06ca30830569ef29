"""Programs on a CPU that compute in float64; tests/cpu_programs.py recorded the traces.

Without the profiler, on the same machine, float32 saved 44 to 47% of the products, half of the stencil or more, and 24%
of the kernel.
"""

import pytest
from raw_events import end
from references import ROOT
from test_cpu_only import covered, middle_step
from test_opportunities import priced_changes, raw_events

from tracereader import cli

FOLDER = ROOT / "tests/traces/cpu/float64"
PROGRAMS = "products", "stencil", "kernel"


def file_of(name):
    return FOLDER / f"{name}.json.gz"


def own_us(one, ops):
    """Return the time of an op without that of the ops inside it."""
    return one["dur"] - covered(x for x in ops if x is not one and one["ts"] <= x["ts"] and end(x) <= end(one))


def first_type(one):
    types, dims = one.get("args", {}).get("Input type", []), one.get("args", {}).get("Input Dims", [])
    return next((name for name, shape in zip(types, dims, strict=True) if shape and name not in ("", "ScalarList")), "")


@pytest.mark.parametrize("program", PROGRAMS)
def test_half_of_the_time_of_long_ops_in_float64_is_saved(program):
    step, ops = middle_step(raw_events(file_of(program)))
    long = [own for one in ops if first_type(one) == "double" and (own := own_us(one, ops)) >= 10]
    one = priced_changes(file_of(program))["single_precision"]
    assert one.evidence.startswith(f"{len(long)} ops of 10 µs and more compute in float64")
    assert one.saves_us == pytest.approx(sum(long) / 2, rel=0.02)
    assert one.step_us == pytest.approx(step["dur"], rel=0.01)


@pytest.mark.parametrize("program", PROGRAMS)
def test_the_comparison_sees_the_same_program_in_float32(program, capsys):
    before, after = str(file_of(program)), str(file_of(f"{program}_without"))
    assert cli.main([before, after]) == 0
    said = "proposed it (compute in float32 instead of float64)"
    assert said in " ".join(capsys.readouterr().out.split())
    assert "single_precision" not in priced_changes(file_of(f"{program}_without"))
    assert cli.main([after, before]) == 0
    assert "proposed it" not in capsys.readouterr().out
