"""Rung 5 with a small model of the same architecture on the CPU, and with the whole model on an NVIDIA GPU."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, names, only_trace

import sweep
from common.flags import tag_of
from common.speed import Roof
from tracereader.command import RunFailed

SMALL = {
    "vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "tie_word_embeddings": True,
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder with a small Qwen3 as transformers saves it, for --model."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    where = tmp_path_factory.mktemp("small")
    torch.manual_seed(0)
    Qwen3ForCausalLM(Qwen3Config(**SMALL)).save_pretrained(where)
    return str(where)


@pytest.fixture
def decode(run, folder, tmp_path, capsys):
    """Return a function: decode("--cache", "dynamic") -> the trace of the small model's run with eager's tokens."""

    def small(*flags: str) -> dict:
        sizes = ("--model", folder, "--prompt", "24", "--cache-len", "48", "--device", "cpu")
        assert run("05_llm", *sizes, *flags) == 0
        assert "matches eager: relative error" in capsys.readouterr().out
        return only_trace(tmp_path)

    return small


def test_missing_transformers_gives_one_line(tmp_path):
    """-S leaves out all installed packages, including torch, as in an environment that was made by hand."""
    command = [sys.executable, "-S", str(ROOT / "05_llm.py"), "--warmup", "--layers", "1"]
    rich = tmp_path / "site"
    rich.mkdir()
    for name in ("rich", "msgspec", "markdown_it", "mdurl", "pygments"):
        (rich / name).symlink_to(os.path.dirname(importlib.util.find_spec(name).origin))
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": str(rich)}, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert "rung 5 needs transformers" in done.stderr and done.stderr.count("\n") == 1


def calls(document: dict, op: str) -> int:
    return names(document, "cpu_op").count(op)


@pytest.mark.parametrize(
    "flags",
    [
        ("--warmup",), ("--cache", "dynamic"), ("--attention", "gqa", "--dtype", "fp32"), ("--attention", "eager"),
        ("--merge", "--batch", "3"), ("--phase", "prefill"),
        ("--phase", "prefill", "--cache", "dynamic", "--logits", "last", "--attention", "gqa"),
    ],
)  # fmt: skip
def test_every_way_writes_eagers_tokens(decode, flags):
    document = decode(*flags)
    phase = "prefill" if "prefill" in flags else "decode"
    assert names(document, "user_annotation").count(phase) == 3


def test_merged_and_compiled_matches_eager(decode):
    document = decode("--merge", "--compile", "--warmup")  # products of qkv, o, gate and up, down; and the head
    assert calls(document, "aten::mm") == 3 * (4 * SMALL["num_hidden_layers"] + 1)


@pytest.mark.parametrize("name", ["cache", "past_key_values"])
def test_merged_attention_knows_the_cache_by_both_of_its_names(name):
    """transformers 5.24 renamed past_key_values to cache, and layers pass it on by that name."""
    from transformers import DynamicCache, Qwen3Config, Qwen3ForCausalLM

    from common.decoder import merge

    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(**SMALL)).eval()
    attention, hidden = model.model.layers[0].self_attn, torch.randn(1, 3, SMALL["hidden_size"])
    positions = model.model.rotary_emb(hidden, torch.arange(3)[None])
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        separate, _ = attention(hidden, positions, None)
        merge(model)
        merged, _ = attention(hidden, positions, None, **{name: cache})
    assert torch.allclose(merged, separate, atol=1e-5)
    assert cache.get_seq_length() == 3


def test_the_trace_stores_the_bytes_that_a_step_reads(decode):
    facts = decode("--batch", "3")["lesson"]["facts"]["decoding"]
    layer = 64 * (64 + 2 * 32) + 64 * 64 + 3 * 64 * 96 + 2 * 64 + 2 * 16  # q, k, v; o; gate, up, down; norms
    parameters = 320 * 64 + 2 * layer + 64
    a_token = 2 * 2 * 2 * 16 * 2  # layers, keys and values, heads, head_dim, bytes
    assert facts == {
        "phase": "decode", "batch": 3, "tokens": 3, "layers": 2, "parameters": parameters,
        "weight_bytes": 2 * parameters, "cache_bytes": 3 * 24 * a_token, "cache_bytes_allocated": 3 * 48 * a_token,
        "gb_s": None,
    }  # fmt: skip


def test_prefill_can_compute_the_last_logits_alone(decode, tmp_path):
    def widest(document):
        shapes = [e["args"]["Input Dims"] for e in document["traceEvents"] if e["name"] == "aten::mm"]
        return max(dims[0][0] for dims in shapes if dims[1][1] == SMALL["vocab_size"])

    flags = ("--phase", "prefill", "--record-shapes", "--active", "1")
    assert widest(decode(*flags)) == 24
    next(tmp_path.rglob("*.json")).unlink()
    assert widest(decode(*flags, "--logits", "last")) == 1


@pytest.mark.parametrize(("kind", "machine"), [("cpu", "cpu"), ("gpu", "nvidia-h200")])
def test_the_reference_traces_are_those_of_the_list(scripts, kind, machine):
    runs = re.findall(rf"^{kind} 05_llm.py (.*)$", (ROOT / "traces/reference/record_llm.sh").read_text(), re.M)
    wanted = {f"{tag_of(scripts['05_llm'].flags(flags.split()))}.json.gz" for flags in runs}
    assert wanted == {file.name for file in (ROOT / f"traces/reference/{machine}/05_llm").glob("*.json.gz")}


def logits(*, batch=2, written=3, vocabulary=50):
    torch.manual_seed(0)
    exact = torch.randn(batch, written, vocabulary)
    rounded = exact + 1e-3 * torch.randn_like(exact)
    return exact, rounded


def test_a_wrong_token_or_wrong_logits_fail_the_run():
    from common.decoder import _judge

    exact, rounded = logits()
    chosen = exact.argmax(-1)
    assert 0 < _judge(exact[:, -1] + 1e-3, chosen, rounded, exact, 2e-2) < 2e-3
    with pytest.raises(RunFailed, match="1 of 6 tokens"):
        wrong = chosen.clone()
        wrong[1, 0] = exact[1, 0].argmin()
        _judge(exact[:, -1], wrong, rounded, exact, 2e-2)
    for computed in (exact[:, 0], exact[:, -1] * 1.1, torch.full_like(exact[:, 0], float("nan"))):
        with pytest.raises(RunFailed, match="relative error"):
            _judge(computed, chosen, rounded, exact, 2e-2)


def test_without_memory_for_fp32_the_reference_is_eager_in_the_runs_type():
    from common.decoder import _judge

    exact, rounded = logits()
    assert 0 < _judge(exact[:, -1], rounded.argmax(-1), rounded, None, 2e-2) < 2e-2
    with pytest.raises(RunFailed, match="relative error"):
        _judge(exact[:, -1] * 1.05, rounded.argmax(-1), rounded, None, 2e-2)


def test_either_of_two_tokens_within_rounding_is_accepted():
    from common.decoder import _judge

    exact, rounded = logits()
    best, second = exact[0, 1].topk(2).indices
    exact[0, 1, second] = exact[0, 1, best] - 1e-4
    chosen = exact.argmax(-1)
    chosen[0, 1] = second
    assert _judge(exact[:, -1], chosen, rounded, exact, 2e-2) == 0


def test_a_compiled_prefill_is_compiled_once(folder, run, tmp_path, compile_afresh):
    """The cache must exist before the first call; otherwise the second call finds another one and compiles again."""
    sizes = ("--model", folder, "--prompt", "24", "--cache-len", "48", "--device", "cpu")
    assert run("05_llm", *sizes, "--phase", "prefill", "--compile", "--wait", "0", "--schedule-warmup", "0") == 0
    called = [name for name in names(only_trace(tmp_path), "cpu_op") if name.startswith("Torch-Compiled Region")]
    assert called and not any(name.endswith("/1") for name in called)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--model nobody/has-this", "could not be loaded"),
        ("--model /", "could not be loaded"),
        ("--model / --size 1.7b", "leave out --size or --model"),
        ("--layers 29", "the model has 28"),
        ("--prompt 1020", "1027 tokens"),
        ("--phase prefill --prompt 1025", "1025 tokens"),
        ("--prompt 40960 --cache dynamic", "the model has 40,960 positions"),
        ("--tune", "add --compile"),
        ("--triton --compile", "choose one"),
        ("--triton --batch 2", "one sequence"),
        ("--graph --compile reduce-overhead", "records a graph of its own"),
        ("--persistent --graph", "leave out"),
        ("--persistent --triton", "leave out"),
        ("--persistent --batch 5", "up to 4 sequences"),
        ("--persistent --cache dynamic", "static cache"),
        ("--persistent --device cpu", "need a GPU"),
        ("--logits last", "--phase prefill"),
        ("--graph --device cpu", "need a GPU"),
        ("--triton --device cpu", "need a GPU"),
        ("--attention flex --compile --device cpu", "needs a GPU"),
    ],
)
def test_impossible_runs_are_refused_in_one_line(run, capsys, tmp_path, monkeypatch, flags, said):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)  # or it tries again for twenty seconds
    assert run("05_llm", *flags.split()) == 2
    screen = capsys.readouterr()
    assert screen.out == ""
    assert said in screen.err
    assert screen.err.count("\n") == 1
    assert not list(tmp_path.rglob("*.json"))


@pytest.mark.parametrize(("size", "parameters"), [("0.6b", 596_049_920), ("1.7b", 1_720_574_976)])
def test_the_models_have_the_published_numbers_of_parameters(size, parameters):
    from common.decoder import language_model

    args = SimpleNamespace(
        model=None, size=size, layers=None, prompt=1, phase="prefill", dtype=torch.bfloat16, attention="sdpa",
        device=torch.device("meta"),
    )  # fmt: skip
    model = language_model(args)
    assert sum(one.numel() for one in model.parameters()) == parameters


def test_merge_and_by_hand_know_one_architecture_only():
    from common.decoder import by_hand, merge, persistent
    from tracereader.command import BadInput

    other = torch.nn.Linear(1, 1)
    for call in (
        lambda: merge(other),
        lambda: by_hand(other, None, None, None, False),
        lambda: persistent(other, None, None, None, False),
    ):
        with pytest.raises(BadInput, match="this is Linear"):
            call()


def test_a_mixture_of_experts_has_no_weight_bytes_per_step():
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    from common.decoder import facts

    sizes = {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2, **SMALL}
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes))
    args = SimpleNamespace(
        phase="decode", batch=1, prompt=8, cache="static", cache_len=16, dtype=torch.float32, device=torch.device("cpu")
    )
    assert facts(args, model)["weight_bytes"] is None


@pytest.mark.exhaustive
def test_hand_written_kernels_in_tritons_interpreter(folder):
    """It has a process of its own, because Triton decides at its import whether it interprets."""
    pytest.importorskip("triton")
    program = [sys.executable, str(ROOT / "tests/interpreted_kernels.py"), folder]
    done = subprocess.run(program, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"{prompt}: eager's tokens" for prompt in (15, 32, 1030)]


WHOLE = ("--warmup", "--layers", "3")


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("flags", "a_layer"),
    [(("--graph",), None), (("--triton", "--graph"), 6), (("--triton", "overlap", "--graph"), 6), (("--triton",), 6)],
)
def test_hand_written_kernels_write_eagers_tokens(run, tmp_path, capsys, flags, a_layer):
    assert run("05_llm", *WHOLE, *flags) == 0
    assert "matches eager: relative error" in capsys.readouterr().out
    document = only_trace(tmp_path)
    kernels = names(document, "kernel")
    if a_layer:
        assert len(kernels) == 3 * (a_layer * 3 + 2), "the layers', the head and the choice"
    if "--graph" in flags:
        assert names(document, "cuda_runtime").count("cudaGraphLaunch") == 3
    facts = document["lesson"]["facts"]
    assert facts["decoding"]["gb_s"] > 1000
    held = facts["decoding"]["weight_bytes"] + facts["decoding"]["cache_bytes_allocated"]
    assert facts["peak_bytes"] >= held, "the cache is there while a graph that reads it is replayed"


@pytest.mark.gpu
@pytest.mark.parametrize("prompt", ["1", "31", "32", "33", "900"])
def test_attention_over_the_filled_part_is_right_at_every_length(run, capsys, prompt):
    assert run("05_llm", *WHOLE, "--triton", "overlap", "--graph", "--prompt", prompt) == 0
    assert "matches eager" in capsys.readouterr().out


@pytest.mark.gpu
@pytest.mark.parametrize(
    "flags",
    [
        ("--compile", "reduce-overhead", "--merge", "--batch", "3"),
        ("--compile", "reduce-overhead", "--attention", "gqa"),
        ("--compile", "--graph", "--attention", "gqa"),
    ],
)
def test_compiled_decoding_replays_one_graph(run, tmp_path, capsys, flags):
    assert run("05_llm", *WHOLE, *flags) == 0
    assert "matches eager" in capsys.readouterr().out
    document = only_trace(tmp_path)
    assert names(document, "cuda_runtime").count("cudaGraphLaunch") == 3


def test_a_sweep_over_the_batch_compares_tokens_per_second_with_both_peaks(
    folder, tmp_path, capsys, compile_afresh, monkeypatch
):  # fmt: skip
    monkeypatch.setattr(sweep, "roofs", lambda *_: (Roof(0.1, "a product"), Roof(10, "a copy")))
    sizes = ("--model", folder, "--prompt", "24", "--cache-len", "48", "--device", "cpu", "--out", str(tmp_path))
    assert sweep.main([str(ROOT / "05_llm.py"), "--batch", "1", "4", *sizes]) == 0
    screen = capsys.readouterr().out
    table = screen[screen.index("tokens a second") :].splitlines()
    rates = {line.split()[0]: [float(word.replace(",", "")) for word in line.split()[1:]] for line in table[1:3]}
    for file in tmp_path.rglob("*.json"):
        steps = [e for e in json.loads(file.read_text())["traceEvents"] if e["name"].startswith("ProfilerStep#")]
        times = sorted({e["ts"]: e["dur"] for e in steps}.values())
        batch = file.name.split("x")[0]
        assert rates[batch][0] == pytest.approx(int(batch) / times[(len(times) - 1) // 2] * 1e6, abs=0.1)
        facts = json.loads(file.read_text())["lesson"]["facts"]["decoding"]
        reading = int(batch) / ((facts["weight_bytes"] + facts["cache_bytes"]) / 10e9)
        multiplying = 0.1e12 / (2 * facts["parameters"])
        assert rates[batch][1:] == pytest.approx([reading, multiplying], abs=0.1)
    assert next(tmp_path.rglob("*.png")).read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(("cache", "said"), [(0, "up to a batch of about 200,"), (10**9, "at any batch")])
def test_where_decoding_turns_compute_bound(capsys, cache, said):
    """1 GB of weights takes 1 ms at 1 TB/s, and a token's 1 GFLOP 5 µs at 200 TFLOP/s, so 200 tokens take 1 ms."""
    from tracereader.figures.decoding import Decoding
    from tracereader.trace.facts import ModelFacts

    facts = ModelFacts("decode", batch=1, tokens=1, weight_bytes=10**9, cache_bytes=cache, parameters=500_000_000)
    found = Decoding(facts, step_us=2000.0, lane="GPU", tokens_s=500.0, gb_s=None, measured=False, read_us=None)
    point = sweep.Point(1, 1.0, 1.0, "", None, None, None, None, decoding=found)
    assert sweep.decodes([point])
    sweep.show_decoding("batch", [point], Roof(200, "a product"), Roof(1000, "a copy"))
    assert said in capsys.readouterr().out
