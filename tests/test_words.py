"""The reader's output and its source's text use the field's terms."""

import ast
import io
import json
import tokenize

import pytest
from references import H200, MODELS, ROOT
from words import RETIRED

from tracereader import cli
from tracereader.findings import cheatsheet

TESTS = ROOT / "tests/traces"
CPU = ROOT / "traces/reference/cpu"
RUNG = "01_matmul_add/64_bf16_cold_eager.json.gz"
MODEL = {path.name.removesuffix(".json.gz"): path for path in MODELS}


def ranks_of(run):
    return sorted((TESTS / "ranks").glob(f"{run}_rank*.json.gz"))


SHOWN = {
    "a rung, all": [H200 / RUNG, "--all"],
    "a rung that was warmed up": [H200 / "01_matmul_add/64_bf16_warm_eager.json.gz"],
    "a large product": [H200 / "01_matmul_add/4096_bf16_warm_compile.json.gz", "--all"],
    "a rung on the CPU, all": [CPU / "03_simple_mlp/64x128x768x3072_bf16_warm_eager_shapes.json.gz", "--all"],
    "attention": [TESTS / "attention_naive.json.gz", "--all"],
    "decoding": [MODEL["qwen3_decode_graph"]],
    "decoding without a graph": [MODEL["qwen3_decode_eager"]],
    "training": [MODEL["gpt2_train"], "--all"],
    "training with stacks": [TESTS / "train_stack.json.gz", "--all"],
    "synchronizations": [TESTS / "train_item.json.gz", "--all"],
    "streams": [TESTS / "streams.json.gz", "--all"],
    "a comparison": [H200 / f"01_matmul_add/4096_bf16_warm_{how}.json.gz" for how in ("eager", "compile")],
    "a comparison, all": [*(TESTS / f"attention_{how}.json.gz" for how in ("naive", "flash", "math")), "--all"],
    "machines compared": [CPU / RUNG, H200 / RUNG],
    "FSDP": [*ranks_of("fsdp"), "--all"],
    "a straggler": ranks_of("ddp_straggler"),
    "ranks on CPUs": ranks_of("gloo_ddp_slow"),
    "a pipeline": ranks_of("gloo_pipeline"),
    "help": ["--help"],
}
LONG = ("decoding without a graph", "training")


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(words, marks=pytest.mark.exhaustive if name in LONG else (), id=name)
        for name, words in SHOWN.items()
    ],
)
def test_reports_use_the_fields_terms(words, capsys):
    assert cli.main([*map(str, words)]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert printed and RETIRED.findall(printed) == []


def texts(value):
    """Return all strings in a JSON document, without its keys."""
    if isinstance(value, dict):
        value = list(value.values())
    return [text for one in value for text in texts(one)] if isinstance(value, list) else [str(value)]


@pytest.mark.parametrize("paths", [[MODEL["gpt2_train"]], ranks_of("fsdp")], ids=["one trace", "ranks"])
def test_json_uses_the_fields_terms(paths, capsys):
    for flag in ("--json", "--json=all"):
        assert cli.main([flag, *map(str, paths)]) == 0
        assert [text for text in texts(json.loads(capsys.readouterr().out)) if RETIRED.search(text)] == []


def test_the_cheatsheet_uses_the_fields_terms():
    assert RETIRED.findall(cheatsheet.markdown()) == []


SOURCES = [path for path in (ROOT / "tracereader").rglob("*.py") if "page" not in path.parts and path.stem != "page"]


@pytest.mark.parametrize("path", sorted(SOURCES), ids=lambda path: str(path.relative_to(ROOT / "tracereader")))
def test_docstrings_and_comments_use_the_fields_terms(path):
    source = path.read_text()
    written = [ast.get_docstring(node) or "" for node in ast.walk(ast.parse(source))
               if isinstance(node, ast.Module | ast.FunctionDef | ast.ClassDef)]  # fmt: skip
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    written += [token.string for token in tokens if token.type == tokenize.COMMENT]
    assert [text for text in written if RETIRED.search(" ".join(text.split()))] == []
