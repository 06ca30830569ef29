"""Run read-trace and its peers on the base traces of benchmarks/pairs, and write results.json and README.md.

    python benchmarks/peers/remake.py [--programs A,B] [--limit 120] [--environments FOLDER]
    python benchmarks/peers/remake.py --reader | --page

It needs what reading a trace needs, which `uv run --no-default-groups python …` installs, and pip. Each peer gets an
environment of its own (together 1.1 GB) in a temporary folder, or in FOLDER, where a later run finds it. Each trace is
read by a process of its own, which is ended after --limit seconds.

--reader asks read-trace alone, after a change of its rules, and keeps what the peers said and all costs, which another
machine would change. --page only writes README.md from the committed results.json.
"""

import argparse
import gzip
import json
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
sys.path.insert(0, str(HERE.parent))

from peers import judged  # noqa: E402

from tracereader.changes.opportunity import Opportunity  # noqa: E402

PEERS = {"gpu-idle": "0.1.0", "torch-tb-profiler": "0.4.3", "fournex": "0.3.1", "traceinsight": "0.6.1"}
# pip's TraceLens is another project than AMD's library of this name: it is asked only what it is.
OTHER = {"TraceLens": "0.7.0"}
LIMIT_S = 120
# A process begins with the largest memory of the one that forked it, so a small process starts each command.
LAUNCHER = """
import os, sys
pid = os.fork()
if not pid:
    os.execv(sys.argv[2], sys.argv[2:])
_, status, used = os.wait4(pid, 0)
with open(sys.argv[1], "w") as file:
    file.write(f"{os.waitstatus_to_exitcode(status)} {used.ru_utime + used.ru_stime} {used.ru_maxrss}")
"""
LINE = 400  # the longest text that is kept of one advice or figure


def installed(name: str, version: str, folder: Path) -> str:
    """Make a peer's environment unless it is there. Return what pip said if it cannot be installed, otherwise ""."""
    place = folder / name
    if not (place / "bin/python").exists():
        subprocess.run([sys.executable, "-m", "venv", place], check=True)
    pip = [place / "bin/python", "-m", "pip", "install", "--quiet", f"{name}=={version}"]
    done = subprocess.run(pip, capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else _last_line(done.stderr)


def measure(command: Sequence[object], limit_s: float, folder: Path) -> dict:
    """Run a command in a folder, and return its output, status and cost.

    status: the exit status, or "timeout" after limit_s. wall_s, cpu_s: its time and the processor time of it and of the
    processes that it started. peak_mb: the largest memory of one of them. stdout: a file with what it printed. After a
    timeout the processor time and the memory are None.
    """
    stdout, stderr, used = folder / "stdout", folder / "stderr", folder / "used"
    environment = os.environ | {"PYTHONPATH": str(ROOT) if command[0] == sys.executable else ""}
    launcher = [sys.executable, "-I", "-S", "-c", LAUNCHER, used]
    with stdout.open("wb") as out, stderr.open("wb") as err:
        began = time.monotonic()
        words = [str(word) for word in (*launcher, *command)]
        process = subprocess.Popen(words, stdout=out, stderr=err, cwd=folder, start_new_session=True, env=environment)
        try:
            process.wait(limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        wall = round(time.monotonic() - began, 2)
    if not used.exists():
        return {"status": "timeout", "wall_s": wall, "cpu_s": None, "peak_mb": None, "stdout": stdout}
    status, cpu, memory = map(float, used.read_text().split())
    peak = round(memory / (1e6 if sys.platform == "darwin" else 1e3))
    return {"status": int(status), "wall_s": wall, "cpu_s": round(cpu, 2), "peak_mb": peak, "stdout": stdout}


def ask(tool: str, trace: Path, environments: Path, limit_s: float) -> dict:
    """Return what a tool says about a trace, as its authors mean it to be asked, and what that cost.

    Peers that read no .json.gz get the trace uncompressed; that is not part of their time.
    """
    with tempfile.TemporaryDirectory(prefix="peers-") as name:
        folder, of_tool = Path(name), environments / tool / "bin"
        plain = folder / "profiler/trace.json"
        if tool in ("gpu-idle", "fournex"):
            plain.parent.mkdir()
            plain.write_bytes(gzip.decompress(trace.read_bytes()))
        if tool == "read-trace":
            command = [sys.executable, "-m", "tracereader", trace, "--json"]
        elif tool == "gpu-idle":
            command = [of_tool / "gpu-idle", plain, "--json"]
        elif tool == "fournex":  # a run's folder; its scope "run" has all steps, because these are warm already
            command = [of_tool / "frx", "analyze", folder, "--scope", "run", "--json"]
        elif tool == "torch-tb-profiler":
            runs = folder / "runs"
            runs.mkdir()
            (runs / "base.pt.trace.json.gz").write_bytes(trace.read_bytes())
            command = [of_tool / "python", HERE / "in_tensorboard.py", runs]
        else:
            command = [of_tool / "python", HERE / "in_hta.py", trace]
        run = measure(command, limit_s, folder)
        printed = run.pop("stdout").read_text()
        said = {"advice": [], "figures": []}
        if run["status"] == 0:
            said = READ[tool](printed)
        else:
            why = _last_line((folder / "stderr").read_text(errors="replace"))
            late = f"no answer in {limit_s:.0f} s"
            run["message"] = late if run["status"] == "timeout" else why or f"exit status {run['status']}"
        return run | said


def _read_trace(printed: str) -> dict:
    report = json.loads(printed)
    advice = [
        {"says": one["title"], "change": one["change"], "saves": _saves(one)} for one in report["opportunities"] or ()
    ]
    return {"advice": advice, "figures": [_short(f"limited by {report['waits_for']}: {report['waits_because']}")]}


def _saves(one: dict) -> float:
    """Return the predicted share of the step."""
    return round(msgspec.convert(one, Opportunity).likely_share, 4)


def _gpu_idle(printed: str) -> dict:
    found = json.loads(printed)
    figures = found["measurements"]
    return {
        "advice": [{"says": _short(f"{one['evidence']} → {one['fix']}")} for one in found["findings"]],
        "figures": [f"GPU busy {figures['busy_pct']:.0f}%, DataLoader {figures['loader_pct']:.0f}%"],
    }


def _fournex(printed: str) -> dict:
    diagnosis = json.loads(printed)["result"]["run"]["diagnosis"]
    advice = [{"says": _short(f"{one['title']}. {one['why']}")} for one in diagnosis["recommendations"]]
    return {"advice": advice, "figures": [f"primary bottleneck: {diagnosis['primary_bottleneck']}"]}


def _of_ours(printed: str) -> dict:
    said = json.loads(printed.strip().splitlines()[-1])
    figures = [_short(one) for one in said["figures"]]
    return {"advice": [{"says": _short(one)} for one in said["advice"]], "figures": figures}


READ = {
    "read-trace": _read_trace,
    "gpu-idle": _gpu_idle,
    "fournex": _fournex,
    "torch-tb-profiler": _of_ours,
    "traceinsight": _of_ours,
}


def _short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= LINE else text[: LINE - 1] + "…"


def _last_line(text: str) -> str:
    return _short((text.strip().splitlines() or [""])[-1])


def _machine() -> str:
    cpus = Path("/proc/cpuinfo")
    model = re.search(r"model name\s*:\s*(.*)", cpus.read_text()) if cpus.exists() else None
    return f"{os.cpu_count()} cores ({model[1] if model else platform.machine()}), {platform.system()}"


def remade(programs: Sequence[str], limit_s: float, environments: Path) -> dict:
    """Install the peers, ask each about each program's base trace, and return the data of results.json."""
    began = time.monotonic()
    project = (ROOT / "pyproject.toml").read_text()
    tools = {"read-trace": {"version": re.search(r'^version = "(.*)"', project, re.M)[1]}}
    for name, version in PEERS.items():
        failed = installed(name, version, environments)
        print(f"{name} {version}: {failed or 'installed'}", flush=True)
        tools[name] = {"version": version} | ({"not_installed": failed} if failed else {})
    other = {}
    for name, version in OTHER.items():
        failed = installed(name, version, environments)
        code = f"import importlib.metadata as m; print(m.metadata({name!r})['Summary'])"
        what = [environments / name / "bin/python", "-c", code]
        summary = failed or subprocess.run(what, capture_output=True, text=True, check=True).stdout.strip()
        other[name] = {"version": version, "summary": summary}
    said = {}
    for program in programs:
        trace = judged.PAIRS / program / "base.json.gz"
        said[program] = {
            tool: {"status": "not installed", "message": tools[tool]["not_installed"], "advice": [], "figures": []}
            if "not_installed" in tools[tool]
            else ask(tool, trace, environments, limit_s)
            for tool in tools
        }
        print(f"{program}:", ", ".join(f"{tool} {one['status']}" for tool, one in said[program].items()), flush=True)
    made = {
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "machine": _machine(),
        "python": platform.python_version(),
        "limit_s": limit_s,
        "seconds": round(time.monotonic() - began),
    }
    return {"made": made, "tools": tools, "other": other, "programs": said}


def asked_again(data: dict, limit_s: float) -> dict:
    """Return the committed data with what read-trace says now. The costs stay."""
    for program, said in data["programs"].items():
        now = ask("read-trace", judged.PAIRS / program / "base.json.gz", Path(), limit_s)
        said["read-trace"] |= {key: now[key] for key in now if key not in ("wall_s", "cpu_s", "peak_mb")}
    return data


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--programs", default="", help="names, separated by commas (default: all with a base trace)")
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds for one trace (default 120)")
    parser.add_argument("--environments", type=Path, help="keep the peers' environments in this folder")
    parser.add_argument("--reader", action="store_true", help="ask read-trace alone, and keep what the peers said")
    parser.add_argument("--page", action="store_true", help="only write README.md from results.json")
    flags = parser.parse_args(argv)
    data = None
    if flags.reader:
        data = asked_again(judged.committed()[0], flags.limit)
    elif not flags.page:
        known = sorted(path.parent.name for path in judged.PAIRS.glob("*/base.json.gz"))
        programs = [one for one in flags.programs.split(",") if one] or known
        if unknown := set(programs) - set(known):
            parser.error(f"no base trace of {', '.join(sorted(unknown))}")
        with tempfile.TemporaryDirectory(prefix="peers-") as temporary:
            data = remade(programs, flags.limit, (flags.environments or Path(temporary)).absolute())
    if data:
        (HERE / "results.json").write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n")
    (HERE / "README.md").write_text(judged.page(*judged.committed()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
