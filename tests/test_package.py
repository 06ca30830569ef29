"""The reader alone: a small package without torch, and imports that run downward only."""

import ast
import json
import re
import subprocess
import sys

from references import H200, ROOT

TRACE = H200 / "02_linear/1024x32x64_bf16_cold_eager.json.gz"


def test_the_wheel_installs_without_torch_and_reads_a_trace(tmp_path):
    """What `uvx --from . read-trace TRACE` does, step by step, in an empty environment."""

    def uv(*arguments):
        subprocess.run(["uv", *map(str, arguments)], cwd=ROOT, check=True, capture_output=True)

    uv("build", "--wheel", "--out-dir", tmp_path)
    (wheel,) = tmp_path.glob("*.whl")
    uv("venv", "--python", sys.executable, tmp_path / "empty")
    python = tmp_path / "empty/bin/python"
    uv("pip", "install", "--python", python, wheel)
    packages = {path.name.split("-")[0].lower() for path in (tmp_path / "empty").rglob("*.dist-info")}
    assert packages == {"profiling_in_pytorch", "rich", "msgspec", "markdown_it_py", "mdurl", "pygments"}
    size = sum(file.stat().st_size for file in (tmp_path / "empty").rglob("*") if file.is_file())
    assert size < 30e6
    read_trace = python.parent / "read-trace"
    done = subprocess.run([read_trace, TRACE, "--json"], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["devices"] == ["NVIDIA H200"]


def imports(folder):
    """module -> the modules of this project that it imports, at any depth of its code."""
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


ALL = imports("tracereader") | imports("common")


def test_no_circle():
    reached: dict[str, set[str]] = {}

    def below(module, path):
        assert module not in path, f"a circle: {' -> '.join([*path, module])}"
        if module not in reached:
            # A package that only hands on its parts' names is above them, not in a circle with them.
            parts = {name for name in ALL[module] if name in ALL and not module.startswith(f"{name}.")}
            reached[module] = parts.union(*(below(name, [*path, module]) for name in sorted(parts - {module})))
        return reached[module]

    for module in ALL:
        below(module, [])


def test_imports_run_downward():
    """show -> findings -> replay -> figures -> trace; the reader knows neither torch nor what runs it."""
    floors = {"trace": 0, "figures": 1, "replay": 2, "findings": 3, "show": 5}
    for module, named in imports("tracereader").items():
        floor = floors.get(module.split(".")[1] if "." in module else "", 4)
        for name in named:
            assert name.split(".")[0] not in ("torch", "numpy", "common"), f"{module} imports {name}"
            part = name.split(".")
            if part[0] == "tracereader" and len(part) > 1 and module.split(".")[1:2] and part[1] in floors:
                assert module.split(".")[1] not in floors or floors[part[1]] <= floor, f"{module} imports {name}"


def test_common_knows_no_rung():
    """A new rung is one new file: no flag, table or list elsewhere knows one by name."""
    for folder in ("common", "tracereader"):
        for file in (ROOT / folder).rglob("*.py"):
            named = [line for line in file.read_text().splitlines() if re.search(r"\b0\d_", line)]
            # The example of a command may name a file that a reader has.
            assert all("read-trace traces/" in line for line in named), f"{file.name}: {named}"
