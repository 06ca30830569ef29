"""The code of the page on profiling one's own model runs unchanged on small models of transformers."""

import json
import re
import time

import pytest
import torch
from references import ROOT
from torch.profiler import ProfilerActivity, profile, record_function, schedule
from transformers import BertConfig, BertModel, GPT2Config, GPT2LMHeadModel, Qwen3MoeConfig, Qwen3MoeForCausalLM

from tracereader import cli
from tracereader.figures import summarize
from tracereader.trace import StepsBy, read

PAGE = (ROOT / "docs/your-own-model.md").read_text()


@pytest.fixture(scope="module")
def recipe():
    """Return the definitions in the page's Python blocks, without its example calls."""
    names = {}
    for block in re.findall(r"```python\n(.*?)```", PAGE, re.S):
        if "def " in block:
            exec(block, names)
    return names


def names_of(file, category):
    return [e["name"] for e in json.loads(file.read_text())["traceEvents"] if e.get("cat") == category]


@torch.no_grad()
def test_an_encoder_cold_and_warm(recipe, tmp_path):
    model = BertModel(
        BertConfig(hidden_size=32, num_hidden_layers=3, num_attention_heads=2, intermediate_size=64, vocab_size=99)
    ).eval()
    calls = 0

    def step():
        nonlocal calls
        calls += 1
        model(input_ids=torch.arange(12)[None])

    files = [tmp_path / f"{name}.json" for name in ("cold", "warm")]
    recipe["trace"](step, str(tmp_path / "cold"), warm=0)
    assert calls == 3  # none of them before the first recorded one
    recipe["trace"](step, str(tmp_path / "warm"))
    assert calls == 3 + 3 + 10 + 5, "ten of them without the profiler"
    for file, numbers in zip(files, ([0, 1, 2], [2, 3, 4]), strict=True):
        trace = read(file)
        assert [one.name for one in trace.steps] == [f"ProfilerStep#{number}" for number in numbers]
        assert names_of(file, "cpu_op").count("aten::scaled_dot_product_attention") == 3 * 3
    assert trace.has_shapes
    assert cli.main([str(file) for file in files]) == 0


@torch.no_grad()
def test_each_token_of_generate_is_a_step(recipe, tmp_path):
    """With a mixture of experts, the prefill and the first tokens are not recorded, and each step holds one pass."""
    config = Qwen3MoeConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8, vocab_size=99,
        moe_intermediate_size=16, num_experts=4, num_local_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    model = Qwen3MoeForCausalLM(config).eval()
    ids = torch.arange(5)[None]
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pad_token_id": 0}
    passes = []
    counter = model.register_forward_hook(lambda *_: passes.append(1))
    recipe["trace_tokens"](model, str(tmp_path / "tokens"), **inputs)
    counter.remove()
    assert len(passes) == 2 * 13  # a warm call and the recorded one
    trace = read(tmp_path / "tokens.json")
    assert [one.name for one in trace.steps] == [f"ProfilerStep#{number}" for number in (9, 10, 11)]
    for passed, step in enumerate(trace.steps, 9):
        attention = [op for op in step.walk() if op.name == "aten::scaled_dot_product_attention"]
        assert len(attention) == 2
        for op in attention:  # one query; the prompt's keys and one for each pass since
            query, key = op.args["Input Dims"][:2]
            assert (query[2], key[2]) == (1, 5 + passed)
    assert not model._forward_hooks


@torch.no_grad()
def test_the_step_without_the_profiler_is_stored_in_a_warm_trace(recipe, tmp_path):
    slow = 0.002
    recipe["trace"](lambda: time.sleep(slow), str(tmp_path / "warm"))
    stored = json.loads((tmp_path / "warm.json").read_text())["unprofiled_step_us"]
    assert stored >= slow * 1e6
    recipe["trace"](lambda: None, str(tmp_path / "cold"), warm=0)
    assert "unprofiled_step_us" not in json.loads((tmp_path / "cold.json").read_text())


@torch.no_grad()
def test_generate_stores_the_time_of_a_pass(recipe, tmp_path):
    class Model(torch.nn.Module):
        def forward(self, x):
            time.sleep(0.001)
            return x + 1

        def generate(self, max_new_tokens, **others):
            for _ in range(max_new_tokens):
                self(torch.zeros(1))

    recipe["trace_tokens"](Model(), str(tmp_path / "tokens"))
    assert json.loads((tmp_path / "tokens.json").read_text())["unprofiled_step_us"] >= 1000


@pytest.mark.filterwarnings("ignore:with_modules is deprecated")
def test_stacks_do_not_change_a_report(tmp_path):
    """A training step recorded with and without Python frames has the same ops in the same places."""
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 8))
    chains = []
    for number, stacks in enumerate(({}, {"with_stack": True}, {"with_stack": True, "with_modules": True})):
        with profile(
            activities=[ProfilerActivity.CPU], schedule=schedule(wait=1, warmup=1, active=2), **stacks
        ) as prof:
            for _ in range(4):
                with record_function("training"):
                    model(torch.ones(4, 8)).sum().backward()
                prof.step()
        file = tmp_path / f"{number}.json"
        prof.export_chrome_trace(str(file))
        ours = summarize(read(file))
        assert not ours.source.warnings
        assert ours.cpu.label.name == "training"
        first = ours.cpu.chain[0]
        assert first.name.startswith("ProfilerStep#")
        chains.append([(call.name, call.depth) for call in ours.cpu.chain[1:]])
    assert chains[0] == chains[1] == chains[2]
    assert ("aten::linear", 2) in chains[0]


def without_marks(tmp_path, loop):
    """Return the trace of a loop that does not call prof.step(), read with its steps told apart."""
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as prof:
        loop()
    file = tmp_path / "loop.json"
    prof.export_chrome_trace(str(file))
    assert not any(name.startswith("ProfilerStep#") for name in names_of(file, "user_annotation"))
    return read(file, steps_by=StepsBy.FOUND)


def test_the_epochs_of_a_training_loop_have_a_step_for_each_batch(tmp_path):
    """Gradients are set to zero between forward and backward, and the model is evaluated after training."""
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = [(torch.randn(4, 8), torch.randint(4, (4,))) for _ in range(5)]

    def loop():
        for _ in range(2):
            for x, y in batches:
                loss = torch.nn.functional.cross_entropy(model(x), y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        with torch.no_grad():
            for x, _ in batches:
                model(x).argmax(-1)

    trace = without_marks(tmp_path, loop)
    assert (trace.steps_by, trace.steps_end_with_it) == ("Optimizer.step#SGD.step", True)
    assert len(trace.steps) == 2 * 5
    for step in trace.steps:
        names = [op.name for op in step.walk()]
        assert names.count("aten::linear") == 2 and names.count("aten::cross_entropy_loss") == 1
    assert sum(op.name == "aten::argmax" for op in trace.outside) == 5


@torch.no_grad()
def test_generate_without_marks_has_a_step_for_each_token(tmp_path):
    """GPT-2 looks up tokens and positions, and its prompt is the first step."""
    model = GPT2LMHeadModel(
        GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=99, n_positions=64, bos_token_id=1, eos_token_id=2)
    ).eval()
    sizes = []
    counter = model.transformer.register_forward_hook(lambda module, inputs, out: sizes.append(out[0].shape[1]))
    prompt = torch.arange(3, 10)[None]
    trace = without_marks(
        tmp_path, lambda: model.generate(prompt, max_new_tokens=6, min_new_tokens=6, do_sample=False, pad_token_id=0)
    )
    counter.remove()
    assert sizes == [7, *[1] * 5]
    assert trace.steps_by == "aten::embedding" and len(trace.steps) == len(sizes)
    for step, rows in zip(trace.steps, sizes, strict=True):
        first = next(op for op in step.walk() if op.name == "aten::embedding")
        assert first.args["Input Dims"][1] == [1, rows]
