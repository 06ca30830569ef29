"""Runs that a signal ends at any moment leave both files of one run or none, one line, and the signal's status."""

import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from conftest import ROOT

STATUSES = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGHUP: 129, signal.SIGKILL: -signal.SIGKILL}
RUN = ["01_matmul_add.py", "--size", "64", "--device", "cpu"]


def started(program, out=None, **options):
    """Return the program once it handles signals."""
    where = ["--out", str(out)] if out else []
    process = subprocess.Popen(
        [sys.executable, *program, *where], cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        **options,
    )  # fmt: skip
    while process.poll() is None and not answers(process.pid):
        time.sleep(0.001)
    return process


def answers(pid):
    """Return whether the process has a handler for SIGTERM. Python itself installs none."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return True
    caught = next((line.split()[1] for line in status.splitlines() if line.startswith("SigCgt")), "0")
    return bool(int(caught, 16) >> (signal.SIGTERM - 1) & 1)


def check_pair(folder):
    """Check that both files are of one run, or that neither exists."""
    files = sorted(file for file in folder.glob("01_matmul_add/*") if not file.name.startswith("."))
    if not files:
        return
    trace, table = files
    assert table.read_text().splitlines()[0] == f"run {json.loads(trace.read_text())['lesson']['run']}"
    assert table.read_text().splitlines()[-1].startswith("Self CPU time total")


def unfinished(folder):
    return set(folder.rglob(".unfinished-*"))


def check_ended(number, process, error, folder, left=frozenset()):
    """Check how a run ended. `left`: what killed runs had left in the folder, which a run that ends early keeps."""
    check_pair(folder)
    assert process.returncode in (STATUSES[number], 0), error
    assert error.count("\n") == (1 if process.returncode in (129, 130, 143) else 0), error
    assert "Traceback" not in error
    if number != signal.SIGKILL:
        assert unfinished(folder) <= left


pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@pytest.mark.exhaustive
def test_a_run_that_is_ended_at_any_moment(tmp_path):
    count = int(os.environ.get("KILLS", "24"))
    whole = started(RUN, tmp_path / "0")
    begun = time.monotonic()
    assert whole.wait() == 0, whole.stderr.read()
    lasts = time.monotonic() - begun

    def one(at):
        number = (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)[at % 3]
        folder = tmp_path / str(at % 2)  # two folders for two runs at a time: earlier files lie there
        left = unfinished(folder)
        process = started(RUN, folder)
        time.sleep(lasts * 1.3 * at / count)  # two at a time take longer
        process.send_signal(number)
        _, error = process.communicate()
        check_ended(number, process, error, folder, left)

    def half(parity):
        for at in range(parity, count, 2):
            one(at)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(half, (0, 1)))
    for folder in ("0", "1"):
        assert started(RUN, tmp_path / folder).wait() == 0
        check_pair(tmp_path / folder)
        assert not unfinished(tmp_path / folder)


def waits_in(body):
    """Return a program of ours whose `body` prints a line at some point and then waits."""
    return f"""
import sys
sys.argv = ["01_matmul_add.py", "--size", "8", "--device", "cpu"]
{body}
"""


# In short sleeps: Python does not see a signal that comes just before a sleep begins until that sleep ends.
WAIT = "print('here', flush=True); [__import__('time').sleep(0.01) for _ in range(60_000)]"
DURING = {
    "an import": f"""
import builtins
import tracereader.command
plain = builtins.__import__
def slow(name, *rest, **more):
    if name == "torch":
        {WAIT}
    return plain(name, *rest, **more)
builtins.__import__ = slow
import runpy
runpy.run_path(sys.argv[0], run_name="__main__")
""",
    "a recording": f"""
import tracereader.command
from common import harness
from common.flags import load_script, parse
from tracereader.command import command
@command
def main(argv=None):
    args = harness.prepare(parse(["--device", "cpu"], "", "x.py"))
    def one_step():
        one_step.calls += 1
        if one_step.calls == 4:
            {WAIT}
    one_step.calls = 0
    with harness.profiler(args) as prof:
        for step in harness.warm_up(one_step, args):
            step()
            prof.step()
sys.exit(main())
""",
    "a finalizer": f"""
import tracereader.command
class Dies:
    def __del__(self):
        {WAIT}
Dies()
""",
    "writing": f"""
import pathlib
import tracereader.command
from common import publish
from tracereader.command import command
@command
def main(argv=None):
    with publish.published(pathlib.Path("FOLDER"), "a.json", "a.txt") as files:
        files[0].write_text("half")
        {WAIT}
sys.exit(main())
""",
}


@pytest.mark.parametrize(
    "number",
    [signal.SIGINT, *(pytest.param(one, marks=pytest.mark.exhaustive) for one in (signal.SIGTERM, signal.SIGHUP))],
)
@pytest.mark.parametrize("moment", DURING)
def test_one_line_and_its_own_status(tmp_path, moment, number):
    process = subprocess.Popen(
        [sys.executable, "-c", waits_in(DURING[moment]).replace("FOLDER", str(tmp_path))], cwd=ROOT,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout.readline() == "here\n", process.stderr.read()
    process.send_signal(number)
    _, error = process.communicate(timeout=60)
    assert process.returncode == STATUSES[number], error
    assert error.count("\n") == 1
    assert error.startswith("01_matmul_add.py: ")
    assert not list(tmp_path.iterdir())


def test_another_program_keeps_its_ctrl_c():
    program = "import signal, tracereader.command; assert signal.getsignal(2) is signal.default_int_handler"
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True)


def test_an_ignored_signal_stays_ignored_by_a_program(tmp_path):
    """nohup starts programs in this way."""
    process = started(RUN, tmp_path, preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))
    process.send_signal(signal.SIGHUP)
    assert process.wait() == 0
    check_pair(tmp_path)


def test_the_next_run_clears_a_killed_runs_files(tmp_path):
    from common.publish import published, require_writable

    program = f"""
import os, pathlib
from common.publish import published
with published(pathlib.Path({str(tmp_path)!r}), "a.json") as files:
    files[0].write_text("half")
    os.kill(os.getpid(), 9)
"""
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT).returncode == -9
    (left,) = tmp_path.iterdir()
    assert (left / "a.json").read_text() == "half"
    (tmp_path / ".unfinished-old").mkdir()  # killed before its first file
    with published(tmp_path, "b.json") as files:
        files[0].write_text("whole")
        require_writable(tmp_path)
        assert not left.exists()
        assert files[0].exists(), "this one is alive"
    assert [file.name for file in tmp_path.iterdir()] == ["b.json"]


def test_a_folder_cleared_before_it_is_locked_is_created_again(tmp_path, monkeypatch):
    """Between creating its folder and locking it, a run may lose the folder to another run that clears up."""
    from common import publish

    locked, cleared = publish._locked, []

    def cleared_first(file, wait):
        if wait and not cleared:
            cleared.append(file)
            publish._clear_if_dead(file.parent)
        return locked(file, wait)

    monkeypatch.setattr(publish, "_locked", cleared_first)
    with publish.published(tmp_path, "a.json") as files:
        assert cleared
        files[0].write_text("whole")
    assert [file.name for file in tmp_path.iterdir()] == ["a.json"]


WRITES_ON = """
import pathlib, threading, time
from common.publish import published
from tracereader import interrupts
def write(folder):
    while True:
        WHAT
def on_and_on(what, *args):
    try:
        what(*args)
    except BaseException:
        time.sleep(600)  # it would be told, and the other thread ends this
folder = pathlib.Path(FOLDER)
threading.Timer(AFTER, interrupts.end, ("ended by another thread", 1)).start()
on_and_on(write, folder)
"""
FILES = """with published(folder, "a.json") as files:
            for number in range(10**9):
                files[0].with_name(str(number)).touch()"""
FOLDERS = """try:
            with published(folder, "a.json"):
                raise ValueError
        except ValueError:
            pass"""


@pytest.mark.parametrize("what", [FILES, FOLDERS])
@pytest.mark.parametrize("after", [0.01, 0.1])
def test_a_thread_that_ends_the_program_leaves_no_partial_files(tmp_path, what, after):
    """A rank ends in this way when another one has died: its main thread writes until the system stops it."""
    program = WRITES_ON.replace("WHAT", what).replace("FOLDER", repr(str(tmp_path))).replace("AFTER", str(after))
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (1, "-c: ended by another thread\n")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_reader_that_is_ended_at_any_moment(number):
    trace = "traces/reference/nvidia-h200/03_simple_mlp/64x128x768x3072_bf16_cold_eager.json.gz"
    words = ["-m", "tracereader", trace, "--all"]
    begun = time.monotonic()
    assert started(words).wait() == 0
    lasts = time.monotonic() - begun
    for at in range(8):
        process = started(words)
        time.sleep(lasts * at / 8)
        process.send_signal(number)
        _, error = process.communicate()
        assert process.returncode in (STATUSES[number], 0), error
        assert error.count("\n") == (1 if process.returncode else 0), error
        assert not error or error.startswith("read-trace: ")
