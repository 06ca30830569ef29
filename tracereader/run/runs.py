"""Runs a program once with changes inside, for a few steps, and ends all of its processes."""

import contextlib
import ctypes
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from tracereader.run import flow, program
from tracereader.run.candidates import Seen
from tracereader.run.savings import step_us

POLL_S = 0.05
GRACE_S = 5  # for the other ranks, after the first one has written its result, and for a program that cleans up
LOG_READ = 200_000  # bytes at the end of a log, in which the reason of a failure is looked for
REASON = 160  # characters
# Of <linux/prctl.h>
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36


class Run(msgspec.Struct, frozen=True):
    """One run of the program.

    keys: the changes that it had. seconds: its whole time. steps_us: the measured steps (µs), empty if it failed.
    peak_bytes: the most GPU memory that was allocated, over all ranks; None without a GPU. losses: one for each
    backward pass. outputs: numbers of what the outermost modules returned first. applied: how often each change found
    something to change. refused: torch's reasons, by key. trace: the recording, if the plan asked for one. steps: how
    many the program made. stock: how many batches its loaders' workers prepare ahead. others: the share of the measured
    time that other programs cost on the CPU, which is left out of steps_us. nudged: whether the weights were changed as
    rounding does, which moves the losses and not the time. failure: why it has no measured steps; empty if it has.
    cold: how many steps the recorded program made before its steps were warm, if the usual warm-up was too short.
    """

    keys: tuple[str, ...]
    seconds: float = 0.0
    steps_us: tuple[float, ...] = ()
    peak_bytes: int | None = None
    losses: tuple[float, ...] = ()
    outputs: tuple[float, ...] = ()
    applied: dict[str, int] = {}
    refused: dict[str, str] = {}
    seen: Seen = Seen()
    trace: str = ""
    steps: int = 0
    stock: int = 0
    others: float = 0.0
    nudged: bool = False
    failure: str = ""
    cold: int = 0

    @property
    def step_us(self) -> float:
        return step_us(self.steps_us, self.stock)


def adopt_orphans() -> None:
    """Become the parent of every process that a run leaves behind, so that it can be ended. Linux only."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end_all(process: subprocess.Popen | None = None) -> None:
    """End a run's processes, also those that left its session, and wait for them."""
    if process is not None:
        _signal_group(process, signal.SIGTERM)
        until = time.monotonic() + GRACE_S
        while process.poll() is None and time.monotonic() < until:
            time.sleep(POLL_S)
        _signal_group(process, signal.SIGKILL)
        process.wait()
    for _ in range(20):  # a process that is ended leaves its own children to us
        left = _descendants()
        if not left:
            return
        for pid in left:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(POLL_S)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def _signal_group(process: subprocess.Popen, number: int) -> None:
    with contextlib.suppress(OSError):
        os.killpg(process.pid, number)


def _descendants() -> list[int]:
    """Return the processes below this one; none where there is no /proc."""
    children: dict[int, list[int]] = {}
    for entry in os.scandir("/proc") if os.path.isdir("/proc") else ():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError, ValueError, IndexError):
                text = Path(entry.path, "stat").read_text()
                children.setdefault(int(text.rpartition(")")[2].split()[1]), []).append(int(entry.name))
    found, todo = [], [os.getpid()]
    while todo:
        below = children.get(todo.pop(), [])
        found += below
        todo += below
    return found


def run_once(
    command: Sequence[str],
    plan: Mapping[str, object],
    environment: Mapping[str, str],
    folder: Path,
    limit_s: float,
    cwd: str | None = None,
    show: bool = False,
) -> Run:
    """Run the command with a plan inside until it has measured its steps, and return what it found.

    folder: gets the plan, the results and the output `log`. limit_s: the most seconds that it may take. show: whether
    the program's output goes to this command's. Raises OSError if the command cannot be started.
    """
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "traces").mkdir(parents=True)
    keys = tuple(plan["changes"])
    began = time.monotonic()
    with (folder / "log").open("wb") as log:
        output = sys.stderr if show else log
        process = subprocess.Popen(
            command,
            cwd=cwd,
            env=program.environment(environment, {"out": str(folder / "traces" / "trace.json"), **plan}, folder),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            preexec_fn=_end_with_parent,
        )
        try:
            timed_out = _wait(process, folder, began + limit_s)
        finally:
            end_all(process)
    seconds = time.monotonic() - began
    results = program.results(folder)
    flow.put_together(results)
    measured = [one for one in results if one.get("steps_us")]
    if not measured:
        failure = f"no result after {limit_s:.0f} s" if timed_out else _why(results, process.returncode, folder / "log")
        return Run(keys, seconds, steps=max((one.get("steps", 0) for one in results), default=0), failure=failure)
    first = measured[0]
    peaks = [one["peak_bytes"] for one in results if one.get("peak_bytes")]
    return Run(
        keys,
        seconds,
        tuple(first["steps_us"]),
        max(peaks, default=None),
        tuple(first.get("losses", ())),
        tuple(number for one in first.get("outputs", ()) for number in one),
        first.get("applied", {}),
        first.get("refused", {}),
        msgspec.convert(
            {
                **first.get("seen", {}),
                "world_size": first.get("world_size", 1),
                "backward": bool(first.get("losses")),
                "page_faults": first.get("page_faults", 0.0),
            },
            Seen,
        ),
        first.get("trace") or "",
        first["steps"],
        first.get("stock", 0),
        _others(first),
        cold=first.get("cold", 0),
    )


def _others(found: dict) -> float:
    """Return the share of the measured time that is left out because of other programs; 0 on a GPU's clock."""
    wall = found.get("wall_us") if found.get("seen", {}).get("device") == "cpu" else None
    return max(0.0, 1 - sum(found["steps_us"]) / wall) if wall else 0.0


def _end_with_parent() -> None:
    with contextlib.suppress(Exception):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _wait(process: subprocess.Popen, folder: Path, deadline: float) -> bool:
    """Wait until the program has ended or has a result, and return whether it had neither in time."""
    ended = None
    while process.poll() is None:
        now = time.monotonic()
        if ended is None and any(folder.glob("[0-9]*.json")):
            ended = now
        if ended is not None and now > ended + GRACE_S:
            return False
        if now > deadline:
            return ended is None
        time.sleep(POLL_S)
    return False


def _why(results: Sequence[dict], status: int, log: Path) -> str:
    """Return why a program that has ended measured nothing."""
    if mistakes := program.problems(log.parent):
        return f"a mistake of try-changes in the program: {mistakes[0].strip().splitlines()[-1]}"
    if reason := _error_in(log):
        return reason
    if status < 0:
        return f"ended by {signal.Signals(-status).name}"
    if status:
        return f"ended with status {status}"
    if not results:
        return "no process of it imported torch"
    if (why := results[0].get("why")) != "ended":
        return why
    steps = max(one.get("steps", 0) for one in results)
    return f"ended after {steps} steps, which are too few to measure" if steps else "no step was found"


ERROR = re.compile(r"^(?:\[rank\d+\]:\s*)?((?:\w+\.)*\w*(?:Error|Exception|Exit|Interrupt|Failed|Unsupported)\b.*)")


def _error_in(log: Path) -> str:
    """Return the last error of a log, in one line; empty if there is none."""
    data = log.read_bytes()[-LOG_READ:].decode(errors="replace")
    found = [match[1] for line in data.splitlines() if (match := ERROR.match(line))]
    found = [one for one in found if "ChildFailedError" not in one] or found  # torchrun's own, after a rank's
    if not found:
        return ""
    line = re.sub(r"^(?:\w+\.)+(?=\w)", "", " ".join(found[-1].split()))
    return line if len(line) <= REASON else line[: REASON - 1] + "…"
