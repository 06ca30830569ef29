"""Record a good trace of a PyTorch program, without a change of its code."""

from tracereader import interrupts  # first, so that Ctrl-C is answered from here on

# isort: split
import argparse
import contextlib
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tracereader.command import BadInput, OneLineParser, command, not_negative, positive, printable
from tracereader.run import candidates, flow, program

DESCRIPTION = """Record a trace of any PyTorch program, without a change of its code.

  record-trace -- python train.py --epochs 1
  record-trace -- torchrun --nproc-per-node 8 train.py     one trace a rank
  record-trace --read -- python serve.py                   record, then the report of read-trace

After the warm-up, it times steps without the profiler, then records a few with it, writes the trace, and ends the
program. A step ends with the optimizer's step; where nothing is trained, with the outermost call of a module."""

POLL_S = 0.05
GRACE_S = 20  # for a program that cleans up after its steps are recorded
FORWARDED = ("SIGTERM", "SIGHUP", "SIGINT", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGCONT")
LAUNCHERS = ("torch.distributed", "accelerate", "deepspeed")  # modules that start the program
TOO_FEW = "let it run longer, or record fewer: --skip 1 --timed 3 --active 1"
NO_STEP = "no optimizer made a step and no module was called; name what ends a step with --step-at"


@command
def main(argv=None):
    own, words = program.split(argv)
    args = _flags(own)
    program.refuse(words, program.search_path(os.environ))
    out = trace_path(args.out, words)
    folder = Path(tempfile.mkdtemp(prefix="record-trace-"))
    try:
        status = _run(words, args, folder, out)
        traces = tell(folder, status, not (args.no_modules or args.stacks), args.go_on)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if args.read and traces:
        _read(traces)
    _end_as(status)


def _flags(own: Sequence[str]) -> argparse.Namespace:
    usual = program.RECORDING
    parser = OneLineParser(prog="record-trace", description=DESCRIPTION, usage="record-trace [flags] -- COMMAND")
    parser.add_argument("--out", metavar="FILE", help="the trace (default: NAME_trace.json.gz, after the program)")
    parser.add_argument("--skip", type=not_negative, default=usual["skip"], help="warm-up steps at least (default 5)")
    parser.add_argument(
        "--timed", type=positive, default=usual["least"], help="steps to time without the profiler (default 10)"
    )
    parser.add_argument(
        "--active", type=positive, default=usual["active"], help="steps to record (default 4; the first is slower)"
    )
    parser.add_argument(
        "--seconds",
        type=positive,
        default=usual["record_s"],
        help="record at most so long where steps of two kinds alternate",
    )
    parser.add_argument(
        "--step-at", metavar="NAME", help="what ends a step: an annotation, or a function as module:function"
    )
    parser.add_argument("--continue", dest="go_on", action="store_true", help="let the program run to its own end")
    parser.add_argument("--no-shapes", action="store_true", help="leave the shapes of inputs out")
    parser.add_argument("--no-modules", action="store_true", help="leave the names of modules out")
    parser.add_argument("--stacks", action="store_true", help="record Python functions and modules (longer steps)")
    parser.add_argument("--memory", action="store_true", help="record allocations")
    parser.add_argument("--read", action="store_true", help="read the trace afterwards, as read-trace does")
    args = parser.parse_args(own)
    if args.step_at is not None and not args.step_at.strip(":"):
        raise BadInput("--step-at: name an annotation, or a function as module:function")
    return args


def trace_path(named: str | None, words: Sequence[str]) -> Path:
    """Return the trace's path: as it is named, or after the program's words.

    Raises BadInput if it cannot be written there.
    """
    path = Path(named if named is not None else f"{_name(words)}_trace.json.gz")
    if not path.name.endswith((".json", ".json.gz")) or path.name.startswith(".json"):
        raise BadInput(f"--out {printable(str(path))}: the name of a trace ends with .json or .json.gz")
    if path.is_dir():
        raise BadInput(f"--out {printable(str(path))}: this is a folder")
    folder = path.parent.absolute()
    if not folder.is_dir():
        raise BadInput(f"--out {printable(str(path))}: there is no folder {printable(str(path.parent))}")
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError:
        raise BadInput(f"--out {printable(str(path))}: the folder cannot be written to") from None
    return folder / path.name


def _name(words: Sequence[str]) -> str:
    """Return the name of the program: its script's, its module's, or that of the command itself."""
    for place, word in enumerate(words):
        if word.endswith((".py", ".sh")) and not word.startswith("-"):
            return Path(word).stem
        if word == "-m" and place + 1 < len(words) and not words[place + 1].startswith(LAUNCHERS):
            return words[place + 1].rpartition(".")[2]
    return re.sub(r"[^\w.-]", "_", Path(words[0]).stem)


def _run(words: Sequence[str], args: argparse.Namespace, folder: Path, out: Path) -> int:
    """Run the command with its own streams and signals, and return its status; 0 if it was ended after its steps."""
    plan = {
        **program.RECORDING, "mode": "record", "changes": None, "skip": args.skip, "least": args.timed,
        "most": 4 * args.timed, "step_at": args.step_at, "active": args.active, "record_s": args.seconds,
        "go_on": args.go_on, "shapes": not args.no_shapes, "stacks": args.stacks, "memory": args.memory,
        "modules": not args.no_modules,
        "out": str(out),
    }  # fmt: skip
    environment = program.environment(os.environ, plan, folder)
    try:
        process = subprocess.Popen(words, env=environment, preexec_fn=_own_signals)
    except OSError as problem:
        raise BadInput(f"{printable(words[0])}: {problem.strerror}") from None
    with _forwarded(process):
        return _wait(process, folder, args.go_on)


def _own_signals() -> None:
    for name in FORWARDED:
        if signal.getsignal(getattr(signal, name)) is not signal.SIG_IGN:
            signal.signal(getattr(signal, name), signal.SIG_DFL)


def _forwarded(process: subprocess.Popen) -> contextlib.AbstractContextManager[None]:
    """Hand signals on to the program. A terminal's Ctrl-C reaches it without us."""

    def hand_on(number: int, frame: object) -> None:
        if number in (signal.SIGINT, signal.SIGQUIT) and _in_foreground():
            return
        with contextlib.suppress(OSError):
            process.send_signal(number)

    return interrupts.handled_by(hand_on, [getattr(signal, name) for name in FORWARDED])


def _in_foreground() -> bool:
    try:
        with open("/dev/tty") as terminal:
            return os.tcgetpgrp(terminal.fileno()) == os.getpgrp()
    except OSError:
        return False


def _wait(process: subprocess.Popen, folder: Path, go_on: bool) -> int:
    """Wait for the program's end. One that does not end after all its steps are recorded is ended by signals."""
    done_at, sent = None, []
    while True:
        try:
            status = process.wait(POLL_S)
            return 0 if sent else status
        except subprocess.TimeoutExpired:
            pass
        if go_on:
            continue
        if done_at is None:
            found = program.results(folder)
            local = max((one.get("local_world_size", 1) for one in found), default=0)
            if found and len([one for one in found if one["why"] == "recorded"]) >= local:
                # An exception in another thread than the main one would not end the program.
                done_at = time.monotonic() - (0 if all(one["can_exit"] for one in found) else GRACE_S)
            continue
        for number, after in ((signal.SIGINT, GRACE_S), (signal.SIGTERM, GRACE_S + 5), (signal.SIGKILL, GRACE_S + 10)):
            if number not in sent and time.monotonic() > done_at + after:
                sent.append(number)
                process.send_signal(number)


def tell(folder: Path, status: int, wants_modules: bool, goes_on: bool = True) -> list[str]:
    """Say in one line what was recorded, or why nothing was, and return the traces.

    folder: what the processes of the program wrote. status: the program's. wants_modules: whether the trace should name
    modules. goes_on: whether the program runs to its own end.
    """
    found = program.results(folder)
    traces = [one for one in found if one.get("trace")]
    flow.put_together(traces)
    if traces:
        first = traces[0]
        ms = first["unprofiled_step_us"] / 1000
        shown = f"{ms:.3g}" if ms < 1000 else f"{ms:,.0f}"
        step = (
            f"a step ends with {first['ends_with']} and takes {shown} ms without the profiler "
            f"({first['unprofiled_steps']} measured)"
        )
        ranks = f" of each of {len(traces)} ranks" if len(traces) > 1 else ""
        names = traces[0]["trace"] if len(traces) == 1 else re.sub(r"rank\d+", "rank*", traces[0]["trace"])
        more = "" if first["steady"] else "; the steps never became steady"
        if others := first.get("elsewhere"):
            more += f"; other threads made {others} steps meanwhile: have one thread make all to record them, too"
        if (faults := first["page_faults"]) > candidates.MANY_FAULTS and first["peak_bytes"] is None:
            more += f"; a step has {faults:,.0f} page faults: try-changes measures whether keeping freed memory helps"
        if status and not goes_on:
            more += f"; its end failed with status {status}, which --continue avoids"
        if wants_modules and not first["names_modules"]:
            more += "; modules are left out, because the trace has a clock of its own"
        _say(f"{first['recorded']} steps{ranks} in {os.path.relpath(names)}; {step}{more}")
        return [one["trace"] for one in traces]
    _say(f"nothing was recorded: {_why(folder, found, status)}")
    return []


def _why(folder: Path, found: Sequence[dict], status: int) -> str:
    if problems := program.problems(folder):
        return problems[0].strip().splitlines()[-1]
    if not found and not (folder / "entered").exists() and not (folder / "imported").exists():
        return f"no Python process of the program read PYTHONPATH; {program.PASTE}"
    if found:
        one = found[0]
        if one["why"] != "ended":
            return one["why"]
        ended = f"failed with status {status}" if status > 0 else "ended"
        advice = "" if status else f"; {TOO_FEW}"
        if others := one.get("elsewhere"):
            advice = f"; other threads made {others} more, and the profiler follows one: have it make all steps"
        return f"the program {ended} after {one['steps']} steps, while {one['phase']}{advice}"
    if claims := list(folder.glob("claim-*")):
        if any(Path("/proc", one.read_text()).exists() for one in claims):
            return "the command has ended before the process that makes the steps; let it wait for that one"
        return f"the program was ended {_by(status)} before its steps were recorded"
    if status:
        return f"the program was ended {_by(status)} before its first step"
    return NO_STEP if (folder / "imported").exists() else "no process of the program imported torch"


def _by(status: int) -> str:
    number = -status if status < 0 else status - 128
    with contextlib.suppress(ValueError):
        return f"by {signal.Signals(number).name}"
    return f"with status {status}"


def _say(text: str) -> None:
    program.say("record-trace", text)


def _read(traces: Sequence[str]) -> None:
    from tracereader import cli

    if status := cli.main(traces):
        sys.exit(status)


def _end_as(status: int) -> None:
    """End as the program has ended: with its status, or by its signal."""
    if status < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.signal(-status, signal.SIG_DFL) if -status not in (signal.SIGKILL, signal.SIGSTOP) else None
        os.kill(os.getpid(), -status)
    sys.exit(status)


def entry() -> int:
    """Run the command record-trace and return its exit status."""
    return main()


if __name__ == "__main__":
    sys.exit(entry())
