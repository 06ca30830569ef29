"""Run the real numbered scripts, in this process so that torch is imported once."""

import json
import signal
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
LIGER = "kernels-community/liger-kernels"

# Behind nohup or an & they are ignored, and so in every program that a test starts.
for number, usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, usual)


def pytest_report_header():
    return "all tests take several minutes on two cores, most of them in programs that import torch"


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))


@pytest.fixture(scope="session")
def scripts():
    from common.flags import load_script

    return {path.stem: load_script(path, []) for path in sorted(ROOT.glob("0*.py"))}


@pytest.fixture
def compile_afresh():
    """As from the command line: nothing is compiled yet."""
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()


@pytest.fixture
def run(scripts, compile_afresh, tmp_path):
    """run("01_matmul_add", "--size", "8") -> exit status; files land under tmp_path."""

    def run_script(name: str, *flags: str) -> int:
        torch.compiler.reset()  # before each run
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
