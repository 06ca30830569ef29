"""Starts a command with us inside: record-trace and try-changes share this way in."""

import json
import os
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

from tracereader.command import BadInput, printable

INSIDE = Path(__file__).resolve().parent / "inside"
PLAN = "TRACEREADER_PLAN"
PASTE = "the recipe in docs/your-own-model.md records it from its code"
# The flags of python that keep a program from reading PYTHONPATH or from loading a sitecustomize.
CLOSED = {"I": "ignores PYTHONPATH", "E": "ignores PYTHONPATH", "S": "loads no sitecustomize"}
WITH_VALUE = "WX"  # flags of python that take the next word as their value
LAST = "cm"  # what follows these belongs to the program
PYTHON = re.compile(r"^(python|pypy)[\d.]*t?(\.exe)?$")


# The plan of a recording, unless the user or the caller says otherwise.
RECORDING = {
    "skip": 5, "least": 10, "most": 40, "seconds": 1.0, "active": 4, "record_s": 10, "go_on": False,
    "shapes": True, "stacks": False, "memory": False, "modules": True,
}  # fmt: skip


def split(argv: Sequence[str] | None) -> tuple[list[str], list[str]]:
    """Return the flags before "--" and the program's command after it. argv: sys.argv's without None."""
    words = list(sys.argv[1:] if argv is None else argv)
    place = words.index("--") if "--" in words else len(words)
    return words[:place], words[place + 1 :]


def say(name: str, text: str) -> None:
    """Print a line of the command with this name to stderr."""
    print(f"{name}: {printable(text)}", file=sys.stderr, flush=True)


def environment(base: Mapping[str, str], plan: Mapping[str, object], folder: Path) -> dict[str, str]:
    """Write the plan to the folder of results, and return the environment in which the command follows it.

    The plan's fields: mode ("record" or "measure"), changes (keys, [] for the program as it is; None to leave
    inside/changes.py out), look, skip, least, seconds, most, step_at; folder is
    added. What record-trace adds is in inside/recording.py. Each process with steps writes PID.json into the folder.
    """
    path = folder / "plan.json"
    path.write_text(json.dumps({**plan, "folder": str(folder)}), encoding="utf-8")
    paths = [str(INSIDE), *filter(None, [base.get("PYTHONPATH")])]
    quiet = {} if plan["mode"] != "record" or "KINETO_LOG_LEVEL" in base else {"KINETO_LOG_LEVEL": "0099"}
    return {**base, **quiet, PLAN: str(path), "PYTHONPATH": os.pathsep.join(paths), "PATH": search_path(base)}


def search_path(base: Mapping[str, str]) -> str:
    """Return the PATH without our own environment where it has no torch: uvx puts it first, and its python there."""
    path = base.get("PATH", os.defpath)
    own = os.path.dirname(sys.executable)
    if find_spec("torch") is not None or not own:
        return path
    return os.pathsep.join(one for one in path.split(os.pathsep) if one.rstrip(os.sep) != own) or path


def refuse(command: Sequence[str], path: str | None = None) -> None:
    """Raise BadInput if the command cannot be started, or if we cannot get into it. path: the PATH to look in."""
    if not command:
        raise BadInput("name the program after --, as in: -- python train.py")
    if shutil.which(command[0], path=path) is None:
        raise BadInput(f"{printable(command[0])}: no such command")
    if os.name == "nt":
        raise BadInput(f"this works on Linux and macOS; {PASTE}")
    if os.pathsep in str(INSIDE):
        raise BadInput(f"{INSIDE}: PYTHONPATH cannot hold a path with {os.pathsep!r}; {PASTE}")
    for place, word in enumerate(command):
        if PYTHON.match(os.path.basename(word)):
            if flag := closed_by(command[place + 1 :]):
                raise BadInput(f"python -{flag} {CLOSED[flag]}, which is the way in; leave it out, or {PASTE}")
            return


def closed_by(words: Sequence[str]) -> str | None:
    """Return the flag of python among these words that keeps us out; None if there is none."""
    words = list(words)
    while words and words[0].startswith("-") and words[0] not in ("-", "--"):
        word = words.pop(0)
        if word.startswith("--"):
            continue
        for place, letter in enumerate(word[1:], 2):
            if letter in CLOSED:
                return letter
            if letter in LAST:
                return None
            if letter in WITH_VALUE:
                if place == len(word) and words:
                    words.pop(0)
                break
    return None


def results(folder: Path) -> list[dict]:
    """Return what the processes of the program wrote, in the order of their ranks."""
    found = []
    for path in folder.glob("*.json"):
        if path.name != "plan.json":
            found.append(json.loads(path.read_bytes()))
    return sorted(found, key=lambda one: (one.get("rank", 0), -one.get("steps", 0)))


def problems(folder: Path) -> list[str]:
    """Return the tracebacks of mistakes of ours inside the program."""
    return [path.read_text(errors="replace") for path in sorted(folder.glob("error-*.txt"))]
