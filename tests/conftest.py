"""Run the real numbered scripts, in this process so that torch is imported once."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
# What the steering repository measured, where it lies beside this one, and what this one holds.
REAL_TRACES = sorted([*ROOT.glob("traces/reference/*/*/*.json.gz"), *ROOT.glob("../shared/h200/*.json.gz")])
LIGER = "kernels-community/liger-kernels"


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))


def load_script(name: str):
    spec = importlib.util.spec_from_file_location(f"script_{name}", ROOT / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def scripts():
    return {path.stem: load_script(path.stem) for path in sorted(ROOT.glob("0*.py"))}


@pytest.fixture
def run(scripts, tmp_path):
    """run("01_matmul_add", "--size", "8") -> exit status; files land under tmp_path."""

    def run_script(name: str, *flags: str) -> int:
        # Each run compiles afresh, as it does from the command line.
        torch.compiler.reset()
        torch._dynamo.utils.counters.clear()
        return scripts[name].main([*flags, "--out", str(tmp_path)])

    return run_script


@pytest.fixture
def local_liger(monkeypatch):
    monkeypatch.setenv("LOCAL_KERNELS", f"{LIGER}={ROOT / 'tests' / 'liger-kernels'}")


def only_trace(folder: Path) -> dict:
    """The one trace below the folder."""
    (file,) = folder.rglob("*.json")
    return json.loads(file.read_text())


def names(document: dict, category: str) -> list[str]:
    return [event["name"] for event in document["traceEvents"] if event.get("cat") == category]
