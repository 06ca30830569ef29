"""The reader alone: a small package without torch, and imports that run downward only."""

import ast
import functools
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from references import H200, ROOT

import tracereader
from tracereader.trace import kernel_names

TRACE = H200 / "02_linear/1024x32x64_bf16_cold_eager.json.gz"


RANKS = sorted((ROOT / "tests/traces/ranks").glob("fsdp_rank*.json.gz"))
DECLARED = ("3.10", "3.11", "3.12", "3.13", "3.14")


def uv(*arguments):
    subprocess.run(["uv", *map(str, arguments)], cwd=ROOT, check=True, capture_output=True)


def interpreter(version):
    """Return a Python of this version on this machine; skip the test if there is none."""
    if sys.version.startswith(f"{version}."):
        return sys.executable
    root = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    for candidate in (shutil.which(f"python{version}"), *sorted(root.glob(f"versions/{version}.*/bin/python"))):
        say = "import sys; print('.'.join(map(str, sys.version_info[:2])))"
        # pyenv's own python3.x is there for versions that are not active, too, and fails then.
        if (
            candidate
            and subprocess.run([candidate, "-c", say], capture_output=True, text=True).stdout.strip() == version
        ):
            return candidate
    pytest.skip(f"no Python {version} here")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    uv("build", "--wheel", "--out-dir", folder)
    (wheel,) = folder.glob("*.whl")
    return wheel


REPORTS = ([str(TRACE), "--all"], [*map(str, RANKS), "--only", "short,gpu,work"])


# Large ranks are read in processes of their own.
IN_PROCESSES = """
import sys
from pathlib import Path
from tracereader.figures import reading
reading._processes = lambda sizes: 2
kept, not_read = reading.read_ranks([Path(name) for name in sys.argv[1:]], 10**9, None)
print(len(kept), not_read)
"""


def printed(*command):
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"COLUMNS": "120"})
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


@pytest.fixture(scope="module")
def ours():
    return [printed(sys.executable, "-m", "tracereader", *words) for words in REPORTS]


@pytest.mark.parametrize(
    "version", [DECLARED[0], *(pytest.param(other, marks=pytest.mark.exhaustive) for other in DECLARED[1:])]
)
def test_the_wheel_installs_without_torch_and_reads_traces(tmp_path, wheel, ours, version):
    """`uvx --from . read-trace TRACE` is repeated step by step in an empty environment of each installed Python."""
    uv("venv", "--python", interpreter(version), tmp_path / "empty")
    python = tmp_path / "empty/bin/python"
    uv("pip", "install", "--python", python, wheel)
    packages = {path.name.split("-")[0].lower() for path in (tmp_path / "empty").rglob("*.dist-info")}
    assert packages == {"read_trace", "rich", "msgspec", "markdown_it_py", "mdurl", "pygments", "protobuf"}
    size = sum(file.stat().st_size for file in (tmp_path / "empty").rglob("*") if file.is_file())
    assert size < 31e6

    read_trace = python.parent / "read-trace"
    assert json.loads(printed(read_trace, TRACE, "--json"))["devices"] == ["NVIDIA H200"]
    assert printed(read_trace, "--json=schema") == (ROOT / "tracereader/schema.json").read_text()
    assert printed(read_trace, "--version") == f"read-trace {tracereader.__version__}\n"
    assert [printed(read_trace, *words) for words in REPORTS] == ours  # every Python says the same
    assert printed(python, "-c", IN_PROCESSES, *RANKS) == "2 {}\n"


@pytest.mark.exhaustive
@pytest.mark.parametrize("version", ["3.10", "3.13"])
def test_uvx_runs_the_wheel(wheel, ours, version):
    words = ("tool", "run", "--isolated", "--quiet", "--python", interpreter(version), "--from", wheel, "read-trace")
    assert [printed("uv", *words, *report) for report in REPORTS] == ours


def test_the_version_and_the_pythons_are_those_that_are_declared():
    said = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert said["project"]["version"] == tracereader.__version__
    assert f"## {tracereader.__version__}\n" in (ROOT / "CHANGELOG.md").read_text()
    first, last = (int(version.removeprefix("3.")) for version in (DECLARED[0], DECLARED[-1]))
    assert said["project"]["requires-python"] == f">=3.{first},<3.{last + 1}"


def test_the_scripts_groups_say_which_python_they_need():
    """Without it uv resolves torch for every Python of the reader, and finds none for some."""
    said = tomllib.loads((ROOT / "pyproject.toml").read_text())
    groups = said["tool"]["uv"]["dependency-groups"]
    asked = (ROOT / ".python-version").read_text().strip()
    assert groups.keys() == said["dependency-groups"].keys()
    assert all(group["requires-python"].startswith(f">={asked},") for group in groups.values())


def modules_after(*words):
    """Return every module that read-trace imports for this, in a Python process of its own."""
    program = "import sys; from tracereader import cli; cli.main(sys.argv[1:]); print(*sys.modules, file=sys.stderr)"
    done = subprocess.run(
        [sys.executable, "-c", program, *map(str, words)], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return set(done.stderr.split())


def test_help_imports_the_command_line_and_the_sections_flags_alone():
    """rich and msgspec take longer to import than the rest of --help."""
    modules = modules_after("--help")
    ours = {name for name in modules if name.partition(".")[0] == "tracereader"}
    needed = ("cli", "command", "interrupts", "show", "show.sections")
    assert ours == {"tracereader", *(f"tracereader.{name}" for name in needed)}
    assert not {"rich", "msgspec", "dataclasses", "inspect", "json", "statistics"} & modules


def test_a_small_report_imports_no_part_of_rich_that_it_does_not_print():
    """A report is text in columns, and in a pipe it contains no escape sequence that would have to be parsed."""
    modules = modules_after(TRACE)
    parts = ("ansi", "table", "markdown", "syntax", "traceback", "progress", "live", "pretty", "panel", "logging")
    assert not {f"rich.{part}" for part in parts} & modules
    assert not {"pygments", "markdown_it", "subprocess", "socket", "concurrent.futures", "importlib.metadata"} & modules
    others = ("comparison", "ranks", "merged", "perfetto", "as_json")
    assert not {f"tracereader.show.{name}" for name in others} & modules
    assert not {"tracereader.trace.remote", "fsspec", "aiohttp", "google.protobuf"} & modules


def test_the_patterns_of_kernel_names_are_compiled_when_a_name_needs_them():
    """Importing the reader compiles none of them, because that took longer than any other import."""
    for table in (kernel_names.READERS, kernel_names.MAKERS, kernel_names.JOBS):
        assert len(table) > 20 and all(isinstance(pattern, str) for pattern, *_ in table)


@functools.cache
def imports(folder):
    """Return the modules of this project that each module imports, at any depth of its code."""
    found = {}
    for file in sorted((ROOT / folder).rglob("*.py")):
        module = ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        named = found.setdefault(module, set())
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                named |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{module}: a relative import"
                named |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def test_no_circle():
    everything = imports("tracereader") | imports("common")
    reached: dict[str, set[str]] = {}

    def below(module, path):
        assert module not in path, f"a circle: {' -> '.join([*path, module])}"
        if module not in reached:
            # A package that only hands on its parts' names is above them, not in a circle with them.
            parts = {name for name in everything[module] if name in everything and not module.startswith(f"{name}.")}
            reached[module] = parts.union(*(below(name, [*path, module]) for name in sorted(parts - {module})))
        return reached[module]

    for module in everything:
        below(module, [])


def test_imports_run_downward():
    """show -> changes -> two_runs -> findings, replay -> figures -> trace.

    The reader imports neither torch nor common/. run/inside is loaded into a program that has torch, so it may import
    that one, and nothing of this project.
    """
    floors = {"trace": 0, "figures": 1, "replay": 2, "findings": 2, "two_runs": 3, "changes": 4, "show": 6}
    beside = {"findings": "replay", "replay": "findings"}
    for module, named in imports("tracereader").items():
        floor = floors.get(module.split(".")[1] if "." in module else "", 5)
        for name in named:
            if module.startswith("tracereader.run.inside."):
                assert name.split(".")[0] not in ("numpy", "common", "tracereader"), f"{module} imports {name}"
                continue
            assert name.split(".")[0] not in ("torch", "numpy", "common"), f"{module} imports {name}"
            part = name.split(".")
            if part[0] == "tracereader" and len(part) > 1 and module.split(".")[1:2] and part[1] in floors:
                assert module.split(".")[1] not in floors or floors[part[1]] <= floor, f"{module} imports {name}"
                assert beside.get(module.split(".")[1]) != part[1], f"{module} imports {name}"


def test_common_knows_no_rung():
    """A new rung is one new file, because no flag, table or list elsewhere names a rung."""
    for folder in ("common", "tracereader"):
        for file in (ROOT / folder).rglob("*.py"):
            named = [line for line in file.read_text().splitlines() if re.search(r"\b0\d_", line)]
            # The example of a command may name a file that a reader has.
            assert all("read-trace traces/" in line for line in named), f"{file.name}: {named}"
