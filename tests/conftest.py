"""Run the numbered scripts in this process, so that torch is imported once; choose which tests run."""

import contextlib
import functools
import gc
import gzip
import json
import os
import re
import signal
import sys
import time
import types
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
LIGER = "kernels-community/liger-kernels"
BEGAN = time.monotonic()

# Behind nohup or an & they are ignored, and so in every program that a test starts.
for number, usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, usual)


def pytest_report_header():
    return "several minutes on two cores; --reader: the reader's tests alone; -m '': the exhaustive ones, too"


def pytest_addoption(parser):
    parser.addoption(
        "--reader",
        action="store_true",
        help="the reader's tests alone: what needs no torch, browser, web server or wheel",
    )
    parser.addoption(
        "--for-seconds",
        type=int,
        metavar="N",
        help="skip each exhaustive test whose turn comes more than N seconds after the start",
    )


# A module that a test file of the scripts imports; each of them imports torch, or is there for what does.
NEEDS_TORCH = re.compile(r"^(?:import|from) (?:torch|transformers|common|conftest|sweep|recompile)\b", re.M)

# The files that take longest begin first, or one process works on the last of them while the other one has no more.
LONGEST = ("test_record_trace", "test_try_changes", "test_page", "test_bad_input", "test_training_runs", "test_kills")

# Fixtures that take longer than the tests of the reader's own code.
NOT_THE_READERS = {"chromium", "wheel", "server"}


def pytest_ignore_collect(collection_path, config):
    if config.getoption("--reader") and collection_path.name.startswith("test_"):
        return NEEDS_TORCH.search(collection_path.read_text()) is not None or None
    return None


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config):
    """Two processes run the tests, if pytest-xdist is installed and no other number was asked for.

    Each imports torch once. The tests of one file stay in one process, because they share what they have read.
    """
    if hasattr(config, "workerinput") or "PYTEST_XDIST_WORKER" in os.environ:
        return  # this is one of the two
    asked = config.option
    alone = asked.usepdb or asked.collectonly or asked.markexpr == "gpu" or all("::" in word for word in config.args)
    if config.pluginmanager.hasplugin("xdist") and asked.numprocesses is None and not alone:
        asked.numprocesses, asked.dist, asked.loadscopereorder = 2, "loadfile", False


def pytest_configure():
    # Python looks for garbage after every 700 new objects. A trace has many more, and nearly all of them stay: without
    # this a fifth of the tests' processor time goes there.
    gc.set_threshold(200_000, 20, 100)
    sys.argv[0] = "read-trace"  # the name that errors begin with; else it is the name of what started the tests
    os.environ.pop("COLUMNS", None)  # pytest-xdist sets it, and a report takes its width from it
    os.environ["CI"] = "true"  # scripts that run at a pseudo-terminal ask no questions


def pytest_unconfigure():
    gc.unfreeze()  # or libraries say at the end that something of theirs was never freed


def pytest_collection_modifyitems(config, items):
    if config.getoption("--reader"):
        left_out = {item for item in items if NOT_THE_READERS & set(item.fixturenames)}
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]
    # Where the time is short, most tests have their turn if the longest ones come last.
    first = -1 if config.getoption("--for-seconds") is not None else 1
    items.sort(key=lambda item: first * (LONGEST.index(item.path.stem) if item.path.stem in LONGEST else len(LONGEST)))
    on_gpu = [item for item in items if "gpu" in item.keywords]
    if on_gpu:
        import torch

        if not torch.cuda.is_available():
            for item in on_gpu:
                item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    seconds = item.config.getoption("--for-seconds")
    if seconds is not None and "exhaustive" in item.keywords and time.monotonic() - BEGAN > seconds:
        pytest.skip(f"its turn came after {seconds} s")


@pytest.fixture(scope="module", autouse=True)
def a_committed_trace_is_read_once_for_several_reports():
    """Reports do not change a trace, and tests make many reports of one trace in a row."""
    import references

    from tracereader import cli
    from tracereader.changes import ranks as rank_changes
    from tracereader.command import DEFAULT_LIMIT
    from tracereader.figures import reading
    from tracereader.show import as_json, comparison, page, report
    from tracereader.show.view import View
    from tracereader.trace import StepsBy, TraceError

    references.opened.cache_clear()
    # What is there by now stays: without this, each collection that the reader asks for looks through torch, too.
    gc.collect()
    gc.freeze()

    def is_committed(path):
        return ROOT / "traces" in path.parents or ROOT / "tests" in path.parents

    afresh = report.opened

    @functools.lru_cache(maxsize=4)
    def once(path, step, *limit):
        return afresh(path, View(step=step), *limit)

    def opened(path, view, limit=DEFAULT_LIMIT, captures=()):
        if not is_committed(path) or view.steps_by is not StepsBy.FOUND:
            return afresh(path, view, limit, captures)
        if (view.step, limit, captures) == (None, DEFAULT_LIMIT, ()):
            with contextlib.suppress(TraceError):  # below it becomes the command's refusal
                return references.opened(path)  # which the tests themselves ask for, too
        return once(path, view.step, limit, captures)

    # With several traces the command collects garbage after each, because two large ones may not fit into memory. These
    # are small, and a collection looks through all that the tests keep.
    without_collections = types.SimpleNamespace(**vars(gc) | {"collect": lambda: 0})

    one_rank = reading._one
    of_a_rank_once = functools.lru_cache(maxsize=16)(one_rank)

    def one(path, limit, step):
        return (of_a_rank_once if is_committed(path) else one_rank)(path, limit, step)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(report, "opened", opened)
        patch.setattr(reading, "_one", one)
        for module in (cli, reading, rank_changes):
            patch.setattr(module, "gc", without_collections)
        for module in (as_json, comparison, page, report):
            patch.setattr(module, "opportunities", references.proposals_of)
        yield


@pytest.fixture(scope="session")
def scripts():
    from common.flags import load_script

    return {path.stem: load_script(path, []) for path in sorted(ROOT.glob("0*.py"))}


@pytest.fixture
def compile_afresh():
    """Nothing is compiled yet, as in a run from the command line."""
    import torch

    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()


@pytest.fixture
def run(scripts, compile_afresh, tmp_path):
    """Return a function: run("01_matmul_add", "--size", "8") -> exit status; files are written under tmp_path."""

    import torch

    def run_script(name: str, *flags: str) -> int:
        torch.compiler.reset()  # before each run
        return scripts[name].main([*flags, "--out", str(tmp_path)])

    return run_script


@pytest.fixture
def local_liger(monkeypatch):
    monkeypatch.setenv("LOCAL_KERNELS", f"{LIGER}={ROOT / 'tests' / 'liger-kernels'}")


@pytest.fixture
def unmarked(tmp_path):
    """Return the function that writes a trace without the profiler's marks of its steps, and facts about them."""

    def write(path):
        document = json.loads(gzip.decompress(path.read_bytes()))
        document["traceEvents"] = [e for e in document["traceEvents"] if "ProfilerStep#" not in str(e.get("name"))]
        for fact in ("distributedInfo", "lesson", "unprofiled_step_us"):
            document.pop(fact, None)
        file = tmp_path / f"unmarked-{path.name.removesuffix('.gz')}"
        file.write_text(json.dumps(document))
        return file, [e for e in document["traceEvents"] if e.get("ph") == "X"]

    return write


def only_trace(folder: Path) -> dict:
    """Return the only trace below the folder."""
    (file,) = folder.rglob("*.json")
    return json.loads(file.read_text())


def names(document: dict, category: str) -> list[str]:
    return [event["name"] for event in document["traceEvents"] if event.get("cat") == category]
