"""Matrix products get the names gate_proj, up_proj and down_proj from a run's facts, or no name."""

import gzip
import json

import pytest
from references import H200, ROOT

from tracereader import cli
from tracereader.figures import summarize
from tracereader.trace import read

NAMES = ["gate_proj", "up_proj", "down_proj"]
RUNS = [
    H200 / "03_simple_mlp/64x128x768x3072_bf16_warm_eager.json.gz",
    H200 / "03_simple_mlp/64x128x768x3072_bf16_warm_compile.json.gz",
    H200 / "03_kernels_mlp/64x128x768x3072_bf16_warm_eager.json.gz",
    ROOT / "traces/reference/cpu/03_simple_mlp/64x128x768x3072_bf16_warm_eager.json.gz",
    ROOT / "traces/reference/cpu/03_simple_mlp/64x128x768x3072_bf16_warm_compile.json.gz",
]


def named(path, tmp_path, layers):
    """Return the reference with these layers in its facts."""
    document = json.loads(gzip.decompress(path.read_bytes()))
    document["lesson"].setdefault("facts", {})["layers"] = layers
    file = tmp_path / f"{path.parents[1].name}-{path.parent.name}-{path.name.removesuffix('.gz')}"
    file.write_text(json.dumps(document))
    return file, [event for event in document["traceEvents"] if event.get("ph") == "X"]


@pytest.mark.parametrize("path", RUNS, ids=lambda path: f"{path.parents[1].name}/{path.parent.name}/{path.stem}")
def test_each_product_has_its_layers_name(path, tmp_path, capsys):
    file, events = named(path, tmp_path, NAMES)
    summary = summarize(read(file))
    mark = next(event for event in events if event["name"] == summary.typical_step)
    end = mark["ts"] + mark["dur"]
    products = sorted(
        (event["ts"], event["name"]) for event in events
        if event.get("cat") == "cpu_op" and event["name"] == "aten::mm" and mark["ts"] <= event["ts"] < end
    )  # fmt: skip
    assert len(products) == 3
    compiled = "compile" in path.name
    holder = "aten::mm" if compiled else "aten::linear"
    assert [(call.name, call.layer) for call in summary.cpu.chain if call.layer] == [(holder, name) for name in NAMES]
    if "h200" in str(path):
        gemms = [row for row in summary.gpu_work if row.family == "GEMM"]
        assert [row.layer for row in gemms] == NAMES
        # gate and up run one kernel, down another one, of the same arithmetic: claim 30.
        assert gemms[0].name == gemms[1].name != gemms[2].name
        assert not any(row.layer for row in summary.gpu_work if row.family != "GEMM")
    assert cli.main([str(file), "--only", "lanes,chain,work"]) == 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in NAMES)


@pytest.mark.parametrize("layers", [["gate_proj"], [*NAMES, "head"], [1, 2, 3], "gate_proj", None, [], {"a": 1}])
def test_names_that_do_not_fit_are_ignored(tmp_path, layers):
    file, _ = named(RUNS[0], tmp_path, layers)
    summary = summarize(read(file))
    assert not any(row.layer for row in (*summary.gpu_work, *summary.cpu.chain))
