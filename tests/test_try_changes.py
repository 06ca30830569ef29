"""try-changes: which runs it makes and what it says of them, with programs that are simulated and with real ones."""

import itertools
import json
import math
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tracereader.run import candidates, savings, search, tried, trying
from tracereader.run.candidates import Seen, all_candidates
from tracereader.run.runs import Run

ROOT = Path(__file__).resolve().parent.parent


class Simulated:
    """A program whose steps are known: `effects` has the factor of each change on a step of 10 ms.

    steps: from the set of keys to the step in ms, instead of effects. fails: the reason for a set of keys. Each run
    takes `seconds` of a clock that nothing else moves.
    """

    def __init__(self, effects=(), seen=None, noise=0.005, seconds=5.0, steps=None, fails=(), losses=None, seed=0):
        self.effects, self.steps, self.fails = dict(effects), steps, dict(fails)
        self.seen = seen or Seen(optimizers=({"name": "AdamW", "offers": ["fused", "foreach"], "line": "a.py:1"},))
        self.noise, self.seconds, self.random = noise, seconds, random.Random(seed)
        self.losses = losses or (lambda keys: (1.0, 0.5))
        self.now, self.ran = 0.0, []

    def monotonic(self):
        return self.now

    def run_once(self, command, plan, environment, folder, limit_s, cwd=None, show=False):
        keys = tuple(plan["changes"])
        if environment.get("OMP_NUM_THREADS"):
            keys = (*keys, "threads_1")
        self.ran.append(keys)
        seconds = self.seconds + 20 * any(key.startswith("compile") for key in keys)
        if seconds > limit_s:
            self.now += limit_s
            return Run(keys, limit_s, failure=f"no result after {limit_s:.0f} s")
        self.now += seconds
        for key, why in self.fails.items():
            if set(key.split("+")) <= set(keys):
                return Run(keys, seconds, failure=why)
        step = self.steps(frozenset(keys)) if self.steps else 10 * math.prod(self.effects.get(key, 1.0) for key in keys)
        step *= 1000 * math.exp(self.random.gauss(0, self.noise))
        applied = dict.fromkeys(keys, 1)
        return Run(keys, seconds, (step,) * 20, losses=self.losses(keys), applied=applied, seen=self.seen)


@pytest.fixture
def searched(monkeypatch):
    """Return a function that lets try-changes search over a simulated program, and returns the session."""

    def searched(program, minutes=10.0, only=(), without=()):
        monkeypatch.setattr(search, "run_once", program.run_once)
        monkeypatch.setattr(search.time, "monotonic", program.monotonic)
        session = search.Session(["program"], {}, Path("/nonexistent"), 60 * minutes, lambda text: None)
        search.search(session, only, without)
        monkeypatch.undo()
        return session

    return searched


MODEL = {"name": "Net", "line": "train.py:20", "dtype": "float32", "device": "cpu", "parameters": 10}
OPTIMIZER = {"name": "AdamW", "line": "train.py:9", "offers": ["fused", "foreach"], "parameters": 4, "device": "cpu"}
LOADER = {"line": "train.py:12", "workers": 0}
ON_CPU = Seen(modules=(MODEL,), optimizers=(OPTIMIZER,), loaders=(LOADER,), torch="2.15.0", threads=4)


def test_the_change_that_saves_most_is_named_first_and_those_that_help_are_combined(searched):
    session = searched(Simulated({"workers": 0.4, "fused_optimizer": 0.9, "compile": 0.8, "bf16": 1.5}, ON_CPU))
    singles, several = tried.sets_in_order(session)
    assert singles[:3] == [("workers",), ("compile",), ("fused_optimizer",)]
    assert session.together == ("compile", "fused_optimizer", "workers")
    assert several[0] == session.together
    assert session.saving(session.together).share == pytest.approx(1 - 0.4 * 0.9 * 0.8, abs=0.02)
    assert session.saving(("bf16",)).harms


def test_nothing_helps_where_nothing_does(searched, capsys):
    session = searched(Simulated({}, ON_CPU, noise=0.02))
    assert session.together == ()
    tried.show(session)
    assert "Nothing helps" in capsys.readouterr().out


def test_savings_within_the_noise_are_never_claimed(searched):
    claims = sum(bool(searched(Simulated({}, ON_CPU, noise=0.03, seed=seed)).together) for seed in range(20))
    assert claims <= 4


def test_a_change_that_helps_only_beside_another_one_is_found(searched):
    """A loader hides what the GPU's work costs: the step is the longer of the two."""

    def steps(keys):
        loading = 2.0 if "workers" in keys else 20.0
        return max(loading, 10.0 if "fused_optimizer" not in keys else 4.0)

    session = searched(Simulated(seen=ON_CPU, steps=steps))
    assert session.saving(("fused_optimizer",)).share < 0.03
    assert session.together == ("fused_optimizer", "workers")


def test_a_change_that_costs_beside_the_others_is_left_out(searched):
    def steps(keys):
        if {"workers", "compile"} <= keys:
            return 6.0 if "fused_optimizer" in keys else 4.0
        return 10.0 - 3 * ("workers" in keys) - 2 * ("compile" in keys) - 1.5 * ("fused_optimizer" in keys)

    session = searched(Simulated(seen=ON_CPU, steps=steps), without=("foreach_optimizer",))
    assert session.together == ("compile", "workers")


def test_changes_that_fail_together_are_added_one_by_one(searched):
    program = Simulated(
        {"workers": 0.5, "fused_optimizer": 0.7, "compile": 0.8}, ON_CPU, fails={"compile+workers": "RuntimeError: no"}
    )
    session = searched(program)
    assert session.together == ("fused_optimizer", "workers")
    assert "RuntimeError: no" in session.failures.values()


def test_a_change_that_fails_is_a_row_with_its_reason(searched, capsys):
    session = searched(Simulated({"workers": 0.5}, ON_CPU, fails={"compile": "Unsupported: call of a lock"}))
    tried.show(session)
    lines = capsys.readouterr().out.splitlines()
    row = next(number for number, line in enumerate(lines) if line.startswith("torch.compile"))
    assert "fails" in lines[row] and "Unsupported: call of a lock" in lines[row + 1]
    assert session.together == ("workers",)


def test_a_faster_change_with_other_results_is_not_among_those_that_help(searched, capsys):
    losses = {("bf16",): (1.0, 0.9)}
    session = searched(
        Simulated({"bf16": 0.5, "workers": 0.8}, ON_CPU, losses=lambda keys: losses.get(keys, (1.0, 0.5)))
    )
    assert session.together == ("workers",)
    tried.show(session)
    assert "Faster with other results" in capsys.readouterr().out


@pytest.mark.parametrize("minutes", (0.5, 1, 2, 5, 10))
@pytest.mark.parametrize("seconds", (2.0, 9.0, 40.0))
def test_the_time_is_kept(searched, minutes, seconds):
    program = Simulated({"workers": 0.5, "compile": 0.7}, ON_CPU, noise=0.05, seconds=seconds)
    searched(program, minutes)
    assert program.now <= 60 * minutes


def test_a_second_search_gives_the_same_order_of_the_first_three(searched):
    effects = {"workers": 0.5, "compile": 0.8, "fused_optimizer": 0.9}
    orders = {
        tuple(tried.sets_in_order(searched(Simulated(effects, ON_CPU, noise=0.01, seed=seed)))[0][:3])
        for seed in range(10)
    }
    assert orders == {(("workers",), ("compile",), ("fused_optimizer",))}


def test_runs_alternate_with_the_program_as_it_is(searched):
    program = Simulated({"workers": 0.5}, ON_CPU)
    searched(program, minutes=30)
    alone = [keys for keys in program.ran if len(keys) < 2]
    assert all(() in pair for pair in itertools.pairwise(alone[1:]))


def test_only_and_without_choose_the_changes(searched):
    program = Simulated({"workers": 0.5}, ON_CPU)
    session = searched(program, only=("fused_optimizer", "workers", "tf32"), without=("workers",))
    assert {key for keys in program.ran for key in keys} == {"fused_optimizer"}
    assert [(one.key, one.why) for one in session.skipped] == [("tf32", "nothing in the program to change")]


def test_the_order_is_that_of_the_predictions():
    ordered = candidates.in_order(all_candidates(), ["fuse_pointwise", "no_recompute", "fused_optimizer"])
    keys = [one.key for one in ordered]
    assert keys[:4] == ["compile_reduce_overhead", "no_checkpoint", "fused_optimizer", "foreach_optimizer"]
    assert keys[-2:] == ["compile", "compile_max_autotune"]  # each takes long, and only one can be made


def test_each_key_follows_changes_that_reports_propose():
    """The ids of --json that the table names exist."""
    declared = {match for path in (ROOT / "tracereader").rglob("*.py") for match in _ids(path)}
    for key, one in {one.key: one for one in all_candidates()}.items():
        assert set(one.follows) <= declared, key


def _ids(path):
    return re.findall(r'Change\(\s*(?:name=)?"(\w+)"', path.read_text())


# The statistics.


def test_a_step_is_the_mean_of_a_typical_block():
    stalls = [1.0, 1.0, 1.0, 9.0] * 10  # a loader's at each fourth step
    assert savings.step_us(stalls) == 3.0
    assert savings.step_us([*stalls, *[50.0] * 10]) == pytest.approx(3.0, abs=0.5)  # one pause
    assert savings.step_us([5.0]) == 5.0


def test_a_slow_drift_is_no_saving():
    """Each run is compared with its neighbors, so that a machine that slows down changes nothing."""
    steps = [100.0 * 1.05**number for number in range(9)]
    kinds = [number % 2 == 0 for number in range(9)]
    pairs = [_pair(savings.beside(kinds, steps, number), steps[number]) for number in range(1, 9, 2)]
    assert abs(savings.saving(pairs, (0.01, 10)).share) < 0.002


def _pair(beside, step):
    before, count = beside
    return before, step, count


def test_more_runs_make_the_interval_narrower():
    pair = (100.0, 90.0, 2)
    one, four = savings.saving([pair], (0.02, 10)), savings.saving([pair] * 4, (0.02, 10))
    assert one.share == four.share == pytest.approx(0.1)
    assert four.plus_minus < 0.7 * one.plus_minus


def test_a_few_equal_runs_do_not_make_a_small_noise():
    assert savings.noise_of([])[0] == savings.USUAL_NOISE
    assert 0.01 < savings.noise_of([[100.0] * 3])[0] < savings.USUAL_NOISE
    assert savings.noise_of([[100.0] * 30])[0] < 0.01
    assert savings.noise_of([[100.0, 130.0, 100.0]])[0] > 0.1


def test_losses_are_compared_step_by_step():
    usual = [[2.0, 1.0, 0.5]]
    assert savings.losses_differ(usual, [2.0, 1.0, 0.5]).text == "same"
    assert savings.losses_differ(usual, [2.0, 1.000006, 0.5]).text == "within 6e-06"
    assert savings.losses_differ(usual, [2.0, 1.01, 0.5]).text == "off by 1.0%"
    assert savings.losses_differ(usual, [2.0, math.nan, 0.5]).kind == "off"
    assert savings.losses_differ([[2.0], [3.0]], [2.0]).text == "not comparable"
    assert savings.losses_differ(usual, [1.9, 1.1, 0.4], "workers draw").text == "not comparable"
    assert savings.losses_differ(usual, []).text == "unknown"


def test_outputs_are_compared_by_their_relative_error():
    assert savings.outputs_differ([[3.0, 4.0]], [3.0, 4.0]).text == "same"
    assert savings.outputs_differ([[3.0, 4.0]], [3.0, 4.5]).text == "off by 10.0%"
    assert savings.outputs_differ([[3.0, 4.0]], [3.0, 4.01]).text == "within 0.2%"


# The command.


def test_list_names_each_change(capsys):
    assert trying.main(["--list"]) == 0
    printed = capsys.readouterr().out
    assert all(one.key in printed for one in all_candidates())


@pytest.mark.parametrize(
    ("argv", "said"),
    (
        ([], "name the program after --"),
        (["--"], "name the program after --"),
        (["--only", "speed", "--", "python"], "speed: no such change"),
        (["--minutes", "0", "--", "python"], "not a number of minutes"),
        (["--env", "A", "--", "python"], "write NAME=VALUE"),
        (["--cwd", "/nonexistent", "--", "python"], "no such folder"),
        (["--", "nonexistent-command"], "no such command"),
    ),
)
def test_bad_input_is_one_line(argv, said, capsys):
    assert trying.main(argv) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1


# Real programs.

SLEEPER = """
import time, torch
from torch.utils.data import DataLoader, Dataset

class Photos(Dataset):
    def __len__(self):
        return 4000

    def __getitem__(self, i):
        time.sleep(0.05)
        return torch.full((8,), i % 7 / 7), i % 3

model = torch.nn.Linear(8, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
print("what the program prints stays hidden")
for x, y in DataLoader(Photos(), batch_size=8, shuffle=True):
    loss = torch.nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def start(flags, program, tmp_path, **more):
    """Start try-changes with its temporary files in tmp_path/tmp, which must be empty when it has ended."""
    (tmp_path / "tmp").mkdir(exist_ok=True)
    own = [shutil.which("try-changes", path=str(Path(sys.executable).parent)), *flags, "--", *program]
    environment = os.environ | {"TMPDIR": str(tmp_path / "tmp"), "OMP_NUM_THREADS": "1"}
    pipe = subprocess.PIPE
    return subprocess.Popen(own, cwd=tmp_path, env=environment, stdout=pipe, stderr=pipe, text=True, **more)


def processes_with(text):
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if text in (entry / "cmdline").read_bytes().decode(errors="replace"):
                found.append(entry.name)
        except OSError:
            continue
    return found


def wait_for(condition, seconds=60):
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.1)


def test_a_loader_that_sleeps_is_fixed_by_workers(tmp_path):
    (tmp_path / "train.py").write_text(SLEEPER)
    flags = ["--json", "--minutes", "1", "--only", "workers"]
    ran = start(flags, [sys.executable, "train.py"], tmp_path)
    printed, said = ran.communicate()
    assert ran.returncode == 0, said
    found = json.loads(printed)
    (workers,) = found["changes"]
    assert workers["changes"] == ["workers"] and workers["verdict"] == "helps" and workers["saves"] > 0.6
    assert workers["results"]["kind"] == "same"
    assert found["keep"] == {"workers": "DataLoader(…, num_workers=4, persistent_workers=True) at train.py:16"}
    assert "stays hidden" not in printed + said
    assert not list((tmp_path / "tmp").iterdir())
    assert not processes_with(str(tmp_path))


def test_a_program_that_hangs_is_ended_with_all_its_processes(tmp_path):
    """Also a process that left its session, and a program that ignores SIGTERM."""
    mark = f"{86400 + os.getpid()}.125"
    (tmp_path / "hangs.py").write_text(
        "import signal, subprocess, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        f"subprocess.Popen(['sleep', '{mark}'], start_new_session=True)\n"
        "print('it waits for a server', flush=True)\n"
        "time.sleep(1000)\n"
    )
    ran = start(["--minutes", "0.1"], [sys.executable, "hangs.py"], tmp_path)
    printed, said = ran.communicate()
    assert ran.returncode == 1 and not printed
    last = said.splitlines()[-1]
    assert "the program as it is could not be measured: no result after" in last
    log = Path(re.search(r"its output is in (\S+)", last)[1])
    assert log.read_text() == "it waits for a server\n"
    assert list((tmp_path / "tmp").iterdir()) == [log]
    assert not processes_with(mark)


@pytest.mark.parametrize(("number", "status"), ((signal.SIGINT, 130), (signal.SIGTERM, 143)))
def test_a_signal_ends_everything(tmp_path, number, status):
    mark = f"{86400 + os.getpid()}.25{number}"
    (tmp_path / "waits.py").write_text(f"import subprocess\nsubprocess.run(['sleep', '{mark}'])\n")
    ran = start([], [sys.executable, "waits.py"], tmp_path)
    wait_for(lambda: processes_with(mark))
    ran.send_signal(number)
    ran.communicate()
    assert ran.returncode == status
    assert not processes_with(mark) and not list((tmp_path / "tmp").iterdir())


def test_a_program_without_torch_is_told_so(tmp_path):
    ran = start([], [sys.executable, "-c", "print(1)"], tmp_path)
    _, said = ran.communicate()
    assert ran.returncode == 1 and "no process of it imported torch" in said.splitlines()[-1]


def test_the_reason_of_a_failure_is_its_last_error(tmp_path):
    ran = start([], [sys.executable, "-c", "raise ValueError('no such data set')"], tmp_path)
    _, said = ran.communicate()
    assert ran.returncode == 1 and "ValueError: no such data set; its output is in" in said.splitlines()[-1]
