"""The GitHub Action: the commands of its steps run here, on committed traces and on a program on the CPU."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from references import CHANGES, ROOT

ACTION = yaml.safe_load((ROOT / "action/action.yml").read_text())
STEPS = ACTION["runs"]["steps"]
EAGER, GRAPH = CHANGES / "vit/eager.json.gz", CHANGES / "vit/graph.json.gz"
# What these commands are on a runner. uvx installs the reader there from the folder after --from.
COMMANDS = {
    "uvx": f"""test -f "$2/pyproject.toml" || exit 9
        case "$3" in read-trace) module=tracereader;; record-trace) module=tracereader.run.record;; esac
        shift 3; exec "{sys.executable}" -m $module "$@\"""",
    "gh": 'printf "%s\\n" "$@" > "$RUNNER_TEMP/gh.txt"; cat "${@: -1}" > "$RUNNER_TEMP/posted.md"',
}
PROGRAM = """
import torch
model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range({layers})])
optimizer = torch.optim.SGD(model.parameters())
for _ in range(500):
    model(torch.randn(8, 64)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def git(folder, *words):
    who = {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}
    who |= {f"GIT_{role}_{what}": "x@example.com" for role in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    subprocess.run(["git", *map(str, words)], cwd=folder, env=os.environ | who, check=True, capture_output=True)


@pytest.fixture
def checkout(tmp_path):
    """Return a function that makes a checkout of a branch, whose main branch has another content of one file."""

    def made(name, before, after):
        work, server = tmp_path / "work", tmp_path / "server"
        server.mkdir()
        git(server, "init", "--quiet", "--initial-branch", "main")
        for content in (before, after):
            (server / name).write_bytes(content)
            git(server, "add", ".")
            git(server, "commit", "--quiet", "--message", "content")
            if content == before:
                git(server, "checkout", "--quiet", "-b", "change")
        git(tmp_path, "clone", "--quiet", "--depth", "1", "--branch", "change", server.as_uri(), work)
        return work

    return made


@pytest.fixture
def ran(tmp_path):
    """Return a function that runs the steps' commands in a checkout as a runner would, and returns the status."""
    temp, commands = tmp_path / "temp", tmp_path / "commands"
    for folder in (temp, commands):
        folder.mkdir()
    for name, does in COMMANDS.items():
        (commands / name).write_text(f"#!/bin/bash\n{does}\n")
        (commands / name).chmod(0o755)
    usual = os.environ | {
        "PATH": f"{commands}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": str(ROOT), "RUNNER_TEMP": str(temp),
        "GITHUB_REPOSITORY": "owner/name", "GITHUB_STEP_SUMMARY": str(temp / "summary.md"),
    }  # fmt: skip

    def run(work, inputs, event="pull_request"):
        known = {f"inputs.{name}": str(one.get("default", "")) for name, one in ACTION["inputs"].items()}
        known |= {
            "github.action_path": str(ROOT / "action"), "github.event_name": event, "github.event.number": "7",
            "github.server_url": "https://example.com", "github.repository": "owner/name", "github.run_id": "42",
            "github.token": "secret", "inputs.base": "main",
        }  # fmt: skip
        known |= {f"inputs.{name}": value for name, value in inputs.items()}
        status = 0
        for number, step in enumerate(STEPS):
            if "run" not in step or not wanted(step.get("if", "success()"), known, status):
                continue
            written = temp / f"output{number}.txt"
            written.touch()
            env = {name: filled(value, known) for name, value in step.get("env", {}).items()}
            command = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]]
            done = subprocess.run(
                command, cwd=work, env=usual | env | {"GITHUB_OUTPUT": str(written)}, capture_output=True, text=True
            )
            status = status or done.returncode
            known |= {
                f"steps.{step.get('id')}.outputs.{line.partition('=')[0]}": line.partition("=")[2]
                for line in written.read_text().splitlines()
            }
            known[f"steps.{step.get('id')}.outcome"] = "failure" if done.returncode else "success"
            print(done.stdout, done.stderr)
        return status, known.get("steps.traces.outputs.folder")

    run.temp = temp
    return run


def filled(value, known):
    return re.sub(r"\$\{\{ (.*?) \}\}", lambda found: known[found[1]], value)


def wanted(condition, known, status):
    """Return whether a step runs: the terms of its condition are joined by &&."""
    terms = condition.split(" && ")
    if "always()" not in terms and status:
        return False
    equal = [term.split(" == ") for term in terms if " == " in term]
    assert len(equal) == sum(term not in ("always()", "success()") for term in terms)
    return all(known.get(name, "") == value.strip("'") for name, value in equal)


def test_a_committed_trace_is_compared_with_that_of_the_base_branch(checkout, ran):
    work = checkout("step.json.gz", EAGER.read_bytes(), GRAPH.read_bytes())
    status, folder = ran(work, {"trace": "step.json.gz", "fail-if": "launches > 0\n"})
    assert status == 0
    comment = (ran.temp / "posted.md").read_text()
    assert (
        "Run 2 is 7.8 times as fast as run 1" in comment and "https://example.com/owner/name/actions/runs/42" in comment
    )
    assert (ran.temp / "gh.txt").read_text().split()[:5] == ["pr", "comment", "7", "--repo", "owner/name"]
    assert "Run 2 is 7.8 times as fast as run 1" in (ran.temp / "summary.md").read_text()
    files = {path.name for path in Path(folder).iterdir()}
    assert files == {"before.json.gz", "after.json.gz", "report.html", "comment.md"}
    assert not list(ran.temp.glob("*.base"))


def test_a_limit_that_is_crossed_fails_the_job_after_the_comment(checkout, ran):
    work = checkout("step.json.gz", GRAPH.read_bytes(), EAGER.read_bytes())
    status, _ = ran(work, {"trace": "step.json.gz", "fail-if": "step > 900%\nlaunches > 0"})
    assert status == 1 and "takes 7.8 times as long" in (ran.temp / "posted.md").read_text()


def test_without_a_pull_request_the_summary_has_the_comparison(checkout, ran):
    work = checkout("other.txt", b"1", b"2")
    status, _ = ran(work, {"trace": str(GRAPH), "base-trace": str(EAGER)}, event="push")
    assert status == 0 and "7.8 times as fast" in (ran.temp / "summary.md").read_text()
    assert not (ran.temp / "posted.md").exists()


def test_too_little_to_compare_is_an_error(checkout, ran):
    work = checkout("other.txt", b"1", b"2")
    assert ran(work, {}) == (2, None)
    assert ran(work, {"trace": str(EAGER)}) == (2, None), "a trace elsewhere is not one of the base branch"


@pytest.mark.exhaustive
def test_a_command_is_recorded_on_both_branches(checkout, ran):
    work = checkout("train.py", PROGRAM.format(layers=2).encode(), PROGRAM.format(layers=4).encode())
    status, folder = ran(work, {"command": f"{sys.executable} train.py", "flags": "--skip 1 --timed 3 --active 2"})
    assert status == 0 and "aten::addmm" in (ran.temp / "posted.md").read_text()
    assert {path.name for path in Path(folder).iterdir()} >= {"before.json.gz", "after.json.gz", "report.html"}


def test_no_input_becomes_part_of_a_command():
    """A runner puts the value of an expression into the script, where it would be run."""
    assert not [step for step in STEPS if "${{" in step.get("run", "")]
