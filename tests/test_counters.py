"""The section on sampled counters, and its sentences."""

import gzip
import json

import pytest
from references import H200

from tracereader import cli
from tracereader.figures import summarize
from tracereader.figures.hardware import peaks_of
from tracereader.trace import read

SHAPES = H200 / "03_simple_mlp/64x128x768x3072_bf16_warm_eager_shapes.json.gz"


@pytest.fixture
def sampled(tmp_path):
    """sampled(share) -> a recorded trace in which the DRAM is at that share of its peak (percent), every 5 µs."""

    def written(share):
        document = json.loads(gzip.decompress(SHAPES.read_bytes()))
        kernels = [one for one in document["traceEvents"] if one.get("cat") == "kernel"]
        first, last = min(one["ts"] for one in kernels) - 50, max(one["ts"] + one["dur"] for one in kernels) + 50
        for number in range(int((last - first) / 5)):
            event = {"ph": "C", "pid": "GPU 0 Counters", "ts": first + 5 * number}
            document["traceEvents"].append({**event, "name": "DRAM BW (%)", "args": {"": share}})
        path = tmp_path / "sampled.json"
        path.write_text(json.dumps(document))
        return path

    return written


def shown(capsys, *flags):
    assert cli.main([str(flag) for flag in flags]) == 0
    return capsys.readouterr().out


def test_the_section_compares_counters_with_the_needs_of_shapes(sampled, capsys):
    path = sampled(5.0)
    screen = " ".join(shown(capsys, path, "--only", "counters").split())
    assert "DRAM BW (%) 5.0 5.0 5.0 5.0 5.0 µs" in screen
    summary = summarize(read(path))
    (work,) = (one for one in summary.gpu_work if "GeluCUDA" in one.name)
    needed = work.bytes_moved / work.us / 1e3 / peaks_of("NVIDIA H200").gb_s
    (row,) = (one for one in summary.counters.kernels if one.name == work.name)
    assert (row.dram, row.dram_by_shapes) == (0.05, pytest.approx(needed)) and needed > 0.5
    assert f"{needed:.0%}" in screen


def test_json_has_the_counters_of_a_trace_that_has_samples(sampled, capsys):
    found = json.loads(shown(capsys, sampled(40.0), "--json=all"))["counters"]
    assert found["names"] == {"dram": "DRAM BW (%)"} and len(found["steps"]) == 3
    assert all(step["means"] == {"DRAM BW (%)": pytest.approx(40)} for step in found["steps"])
    assert "counters" not in json.loads(shown(capsys, SHAPES, "--json=all"))
    assert "counters: not in this trace" in shown(capsys, SHAPES, "--only", "counters")


def test_samples_outside_the_steps_give_no_figures(sampled, capsys):
    path = sampled(40.0)
    document = json.loads(path.read_text())
    for one in document["traceEvents"]:
        if one["ph"] == "C":
            one["ts"] += 10**6
    path.write_text(json.dumps(document))
    summary = summarize(read(path))
    assert {mean for step in summary.counters.steps for mean in step.means.values()} == {None}
    assert not summary.counters.kernels
    assert "no samples in the steps" in shown(capsys, path, "--only", "counters")
