"""Rung 5's persistent kernel: how its weights are laid out, what it refuses, and what it notes of itself."""

import json
import os
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, only_trace

from common import kernel_lanes, megakernel
from tracereader import cli
from tracereader.command import BadInput, RunFailed

QWEN = {
    "hidden_size": 1024, "intermediate_size": 3072, "head_dim": 128, "num_attention_heads": 16,
    "num_key_value_heads": 8, "vocab_size": 151_936,
}  # fmt: skip


def fragment(lane: int) -> list[tuple[int, int]]:
    """(row, k) of the eight numbers of a lane's operand A of mma.m16n8k16, as the PTX ISA's figure has them."""
    group, four = divmod(lane, 4)
    return [
        (group + 8 * (n // 2 % 2), 2 * four + n % 2 + 8 * (n // 4))
        for n in range(8)
    ]  # fmt: skip


def column_of(k: int) -> int:
    """Which of 16 columns stands at k of a product: any order will do that both operands have."""
    return k % 8 // 2 * 4 + k // 8 * 2 + k % 2


def test_the_order_of_columns_in_a_product_is_one_of_all_sixteen():
    assert sorted(map(column_of, range(16))) == list(range(16))


def test_a_lane_finds_its_operands_in_sixteen_bytes():
    rows, columns = 32, 1024
    weight = torch.arange(rows * columns).reshape(rows, columns)
    laid_out = megakernel.packed(weight).reshape(rows // 16, 2, 32, 32, 8)  # tiles, chunks, operands, lanes
    for tile, chunk, operand, lane in ((0, 0, 0, 0), (1, 1, 31, 31), (1, 0, 5, 13)):
        first = chunk * 512 + operand * 16
        wanted = [weight[tile * 16 + row, first + column_of(k)].item() for row, k in fragment(lane)]
        assert laid_out[tile, chunk, operand, lane].tolist() == wanted


def test_a_warp_finds_whole_rows_of_the_output_projection():
    weight = torch.arange(256 * 128).reshape(256, 128)
    laid_out = megakernel.packed_by_warp(weight).reshape(2, 2, 8, 4, 32, 8)  # 128 rows, 64 columns, warps, operands
    for rows, chunk, warp, operand, lane in ((0, 0, 0, 0, 0), (1, 1, 7, 3, 31), (1, 0, 2, 1, 9)):
        top, left = rows * 128 + warp * 16, chunk * 64 + operand * 16
        wanted = [weight[top + row, left + column_of(k)].item() for row, k in fragment(lane)]
        assert laid_out[rows, chunk, warp, operand, lane].tolist() == wanted


@pytest.mark.parametrize("change", [{}, {"hidden_size": 2048, "intermediate_size": 6144}])
@pytest.mark.parametrize("clusters", [8, 15, 16])
def test_the_clusters_share_the_mlp(change, clusters):
    config = SimpleNamespace(**QWEN | change)
    units = megakernel.shares(config, clusters)
    assert len(units) == clusters and min(units) >= 1
    assert sum(units) * megakernel.UNIT == config.intermediate_size
    with_head, without = units[:8], units[8:]
    assert max(with_head) - min(with_head) <= 1
    assert not without or max(with_head) < min(without), "attention keeps the others waiting"


def test_all_weights_of_a_layer_are_laid_out_once():
    config = SimpleNamespace(hidden_size=512, intermediate_size=1024, num_key_value_heads=2)

    def numbered(rows, columns, first):
        return SimpleNamespace(
            weight=torch.arange(first, first + rows * columns, dtype=torch.float64).view(rows, columns)
        )

    heads, kv_heads, inside = 4 * 128, 2 * 128, config.intermediate_size
    shapes = [(heads, 512), (kv_heads, 512), (kv_heads, 512), (512, heads), (inside, 512), (inside, 512), (512, inside)]
    first = [1 + sum(rows * columns for rows, columns in shapes[:n]) for n in range(len(shapes) + 1)]
    q, k, v, o, gate, up, down = (numbered(*shape, start) for shape, start in zip(shapes, first[:-1], strict=True))
    norm = SimpleNamespace(weight=torch.ones(512, dtype=torch.float64))
    layer = SimpleNamespace(
        self_attn=SimpleNamespace(q_proj=q, k_proj=k, v_proj=v, o_proj=o), input_layernorm=norm,
        mlp=SimpleNamespace(gate_proj=gate, up_proj=up, down_proj=down), post_attention_layernorm=norm,
    )  # fmt: skip
    clusters = megakernel.layer_weights(layer, megakernel.cluster_size(config), megakernel.shares(config, 3))
    assert len(clusters) == 3 and all(len(one) == 4 for one in clusters)
    numbers = torch.cat([one.flatten() for one in clusters]).sort().values
    assert torch.equal(numbers, torch.arange(1, first[-1], dtype=torch.float64))


@pytest.mark.parametrize(
    ("change", "batch", "why"),
    [
        ({}, 5, "at most 4"),
        ({"head_dim": 64}, 1, "128 columns"),
        ({"num_attention_heads": 32}, 1, "two query heads"),
        ({"hidden_size": 1280}, 1, "512 divides"),
        ({"intermediate_size": 3100}, 1, "64 divides"),
        ({"vocab_size": 50_257}, 1, "16 divides"),
    ],
)
def test_sizes_that_the_kernel_cannot_compute_are_named(change, batch, why):
    assert why in megakernel.unfit(SimpleNamespace(**QWEN | change), batch)
    assert megakernel.unfit(SimpleNamespace(**QWEN), 1) is None


@pytest.mark.parametrize("batch", [1, 4])
def test_ring_and_results_fit_into_the_shared_memory_of_a_block(batch):
    config, of_h200 = SimpleNamespace(**QWEN), 232_448
    most = max(megakernel.shares(config, 15))
    stages = megakernel.most_stages(of_h200, batch, config, most)
    assert stages >= 8 and megakernel.shared_bytes(stages, batch, config, most) <= of_h200
    assert megakernel.most_stages(64 * 1024, batch, config, most) < megakernel.FEWEST_STAGES


def test_without_nvrtc_one_line_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(BadInput, match="NVRTC"):
        megakernel.compiled("sm_90", {})


def test_it_compiles_for_hopper_without_a_gpu():
    pytest.importorskip("cuda.bindings.nvrtc")
    config = SimpleNamespace(**QWEN)
    sizes = {
        "HIDDEN": 1024, "INTER": 3072, "HEADS": 16, "KV_HEADS": 8, "LAYERS": 28, "VOCAB": 151_936, "BATCH": 1,
        "CLUSTER": 8, "MOST": 4, "STAGES": 10, "WINDOW": megakernel.WINDOW,
        "SHARED": megakernel.shared_bytes(10, 1, config, 4),
    }  # fmt: skip
    assert megakernel.compiled("sm_90", sizes).startswith(b"\x7fELF")
    with pytest.raises(RuntimeError, match="the host asks for another size"):
        megakernel.compiled("sm_90", sizes | {"SHARED": 4096})


def emulated(*sizes: int) -> str:
    """In a process of its own, since a kernel that waits for ever would stay in this one."""
    if not shutil.which("g++"):
        pytest.skip("there is no g++")
    program = [sys.executable, str(ROOT / "tests/emulated.py"), *map(str, sizes)]
    done = subprocess.run(program, env=os.environ.copy(), capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.exhaustive
def test_the_plan_computes_eagers_tokens():
    """Contexts of a CPU in the place of the GPU's threads. The third cluster has no head of attention.

    With more than five clusters some blocks would have no tile of the language model's head.
    """
    assert emulated(2, 17, 3) == "batch 2, prompt 17, 12 blocks: eager's tokens\n"


@pytest.mark.exhaustive
@pytest.mark.parametrize("sizes", [(1, 1, 2), (1, 600, 2), (4, 40, 5)])
def test_the_plan_computes_eagers_tokens_at_other_sizes(sizes):
    assert emulated(*sizes).endswith("eager's tokens\n")


def test_a_stamp_begins_a_slice_and_ends_the_one_before():
    stamps = [[1000, 1500, 4000], [1200, 0, 4100]]
    assert kernel_lanes.slices(stamps, ["wait", "work"]) == [
        [("wait", 1000, 1500), ("work", 1500, 4000)],
        [("wait", 1200, 4100)],  # that block had nothing to do, and noted no input
    ]


def test_the_stamps_of_a_layer_are_named_by_phase():
    names = megakernel.stamp_names(2)
    assert names[:4] == ["wait: qkv 0", "qkv 0", "wait: attend 0", "attend 0"]
    assert names[-2:] == ["wait: head", "head"] and len(names) == 2 * (5 * 2 + 1)


def test_a_kernels_phases_are_lanes_below_its_last_slice(tmp_path):
    file = tmp_path / "trace.json"
    kernels = [
        {"ph": "X", "cat": "kernel", "name": "decode_step", "ts": ts, "dur": 5, "args": {}} for ts in (10.0, 50.0)
    ]
    file.write_text(json.dumps({"traceEvents": kernels, "traceName": "trace.json"}))
    lanes = kernel_lanes.slices([[1000, 1500, 4000], [1250, 1500, 4100]], ["wait", "work"])
    kernel_lanes.add(file, "decode_step", lanes)
    trace = json.loads(file.read_text())
    assert list(trace)[-1] == "traceName", "finish_trace() writes behind it"
    added = [event for event in trace["traceEvents"] if event.get("cat") == "inside_kernel"]
    assert [(one["tid"], one["name"], one["ts"], one["dur"]) for one in added] == [
        (0, "wait", 50.0, 0.5), (0, "work", 50.5, 2.5), (1, "wait", 50.25, 0.25), (1, "work", 50.5, 2.6),
    ]  # fmt: skip
    with pytest.raises(RunFailed, match="no kernel other"):
        kernel_lanes.add(file, "other", lanes)


def test_read_trace_shows_the_lanes_of_each_kernel(tmp_path, capsys):
    file = tmp_path / "trace.json"
    kernels = [
        {"ph": "X", "cat": "kernel", "name": name, "pid": 0, "tid": 7, "ts": ts, "dur": 5, "args": {"grid": [3, 1, 1]}}
        for name, ts in (("decode_step", 10.0), ("decode_step", 50.0), ("sample", 60.0))
    ]
    file.write_text(json.dumps({"traceEvents": kernels, "traceName": "trace.json"}))
    lanes = kernel_lanes.slices([[1000, 1500, 4000, 4200], [1250, 1500, 4100, 0]], ["wait: o 0", "o 0", "wait: o 1"])
    kernel_lanes.add(file, "decode_step", lanes)
    kernel_lanes.add(file, "sample", kernel_lanes.slices([[9000, 9400]], ["draw"]))
    assert cli.main([str(file), "--only", "inside", "--json"]) == 0
    one, other = json.loads(capsys.readouterr().out)["inside"]
    assert (one["kernel"], one["launches"], one["lanes"], one["blocks"]) == ("decode_step", 1, 2, 3)
    (phase,) = one["phases"]
    assert (phase["name"], phase["waits"], phase["works"]) == ("o", 3, 2)
    assert (phase["waiting_us"], phase["working_us"]) == pytest.approx((0.5 + 0.2 + 0.25, 2.5 + 2.6))
    assert (other["kernel"], other["lanes"], other["phases"][0]["working_us"]) == ("sample", 1, pytest.approx(0.4))


WHOLE = ("--warmup", "--layers", "3")


@pytest.mark.gpu
@pytest.mark.parametrize(
    "flags",
    [
        ("--prompt", "1"),
        ("--prompt", "33"),
        ("--prompt", "900"),
        ("--batch", "2"),
        ("--batch", "4"),
        ("--size", "1.7b"),
    ],
)
def test_one_kernel_a_step_writes_eagers_tokens(run, tmp_path, capsys, flags):
    assert run("05_llm", *WHOLE, "--persistent", *flags) == 0
    assert "matches eager: relative error" in capsys.readouterr().out
    events = only_trace(tmp_path)["traceEvents"]
    launches = {one["args"]["correlation"] for one in events if one.get("name") == "cuLaunchKernelEx"}
    kernels = [one for one in events if one.get("cat") == "kernel"]
    assert [one["name"] for one in kernels] == ["decode_step"] * 3
    assert {one["args"]["correlation"] for one in kernels} <= launches


@pytest.mark.gpu
def test_the_trace_shows_what_the_kernel_does_inside(run, tmp_path):
    assert run("05_llm", *WHOLE, "--persistent", "inside") == 0
    events = only_trace(tmp_path)["traceEvents"]
    kernel = [one for one in events if one.get("cat") == "kernel"][-1]
    inside = [one for one in events if one.get("cat") == "inside_kernel"]
    assert {one["name"] for one in inside} <= set(megakernel.stamp_names(3))
    assert all(
        one["ts"] >= kernel["ts"] and one["ts"] + one["dur"] <= kernel["ts"] + kernel["dur"] + 10 for one in inside
    )
