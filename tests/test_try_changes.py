"""try-changes: which runs it makes and what it says of them, with programs that are simulated and with real ones."""

import importlib.util
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
import tempfile
import time
import types
from pathlib import Path

import msgspec
import pytest
from test_page import block, chromium, is_quiet, shown  # noqa: F401
from test_record_trace import WARM_ONCE_RECORDED, WORKS

from tracereader.run import candidates, savings, search, tried, trying
from tracereader.run.candidates import Seen, all_candidates
from tracereader.run.runs import Run, run_once

ROOT = Path(__file__).resolve().parent.parent


class Simulated:
    """A program whose steps are known: `effects` has the factor of each change on a step of 10 ms.

    steps: from the set of keys to the step in ms, instead of effects. fails: the reason for a set of keys. Each run
    takes `seconds` of a clock that nothing else moves. disturbed: the share of runs that other programs make up to
    twice as long. nudged: the losses from weights that differ by rounding.
    """

    def __init__(
        self, effects=(), seen=None, noise=0.005, seconds=5.0, steps=None, fails=(), losses=None, seed=0, trace=None,
        disturbed=0.0, nudged=(),
    ):  # fmt: skip
        self.effects, self.steps, self.fails = dict(effects), steps, dict(fails)
        self.seen = seen or Seen(optimizers=({"name": "AdamW", "offers": ["fused", "foreach"], "line": "a.py:1"},))
        self.noise, self.seconds, self.random = noise, seconds, random.Random(seed)
        self.losses = losses or (lambda keys: (1.0, 0.5))
        self.nudged, self.now, self.ran = nudged, 0.0, []
        self.trace, self.disturbed = trace, disturbed

    def monotonic(self):
        return self.now

    def run_once(self, command, plan, environment, folder, limit_s, cwd=None, show=False):
        nudged = search.NUDGED in plan["changes"]
        keys = tuple(key for key in plan["changes"] if key != search.NUDGED)
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
        if self.disturbed and self.random.random() < self.disturbed:
            step *= self.random.uniform(1.2, 2.2)
        applied = dict.fromkeys(plan["changes"], 1)
        trace = str(shutil.copy(self.trace, folder.parent)) if self.trace and plan["mode"] == "record" else ""
        losses = self.nudged if nudged and self.nudged else self.losses(keys)
        return Run(keys, seconds, (step,) * 20, losses=losses, applied=applied, seen=self.seen, trace=trace)


@pytest.fixture
def searched(monkeypatch):
    """Return a function that lets try-changes search over a simulated program, and returns the session."""

    def searched(program, minutes=10.0, only=(), without=()):
        monkeypatch.setattr(search, "run_once", program.run_once)
        monkeypatch.setattr(search.time, "monotonic", program.monotonic)
        monkeypatch.setattr(search.os, "getloadavg", lambda: (0.0, 0.0, 0.0))
        session = search.Session(["program"], {}, Path("/nonexistent"), 60 * minutes, lambda text: None)
        search.search(session, only, without)
        monkeypatch.undo()
        return session

    return searched


MODEL = {"name": "Net", "line": "train.py:20", "dtype": "float32", "device": "cpu", "parameters": 10}
OPTIMIZER = {"name": "AdamW", "line": "train.py:9", "offers": ["fused", "foreach"], "parameters": 4, "device": "cpu"}
LOADER = {"line": "train.py:12", "workers": 0}
ON_CPU = Seen(modules=(MODEL,), optimizers=(OPTIMIZER,), loaders=(LOADER,), torch="2.15.0", threads=4, workers=4)


def test_a_run_that_leaves_no_time_for_a_change_is_announced_as_such():
    session = types.SimpleNamespace(alone=[types.SimpleNamespace(title=one) for one in ("TF32", "workers")])
    told_after = {40: "leaves no time to try a change", 120: "About 2 runs follow", 999: "7 runs or more"}
    for session.left_s, told in told_after.items():
        assert told in search._announcement(session, types.SimpleNamespace(seconds=49.0))
    del session.alone[1:]
    assert search._announcement(session, types.SimpleNamespace(seconds=49.0)).endswith(
        "in turn with one change (TF32)."
    )


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


@pytest.mark.parametrize(("usual", "verdict"), ((0.01, "harms"), (0.06, "too few runs"), (0.4, "within noise")))
def test_a_difference_beyond_the_noise_that_ran_once_is_not_called_noise(usual, verdict):
    """One run with a change that doubles the step does not convince; nor does it look like the program as it is."""
    found = savings.saving([((10.0,), 21.0)], savings.noise_of((), usual))
    assert found.share == pytest.approx(-1.1) and found.verdict == verdict


def test_a_row_with_too_few_runs_is_explained(searched, capsys):
    session = searched(Simulated({"fused_optimizer": 2.1}, noise=0.0), minutes=0.3, only=("fused_optimizer",))
    session.usual_noise, session._noise_of = savings.BUSY_NOISE, 0
    assert len(session.of(("fused_optimizer",))) == 1
    tried.show(session)
    printed = " ".join(capsys.readouterr().out.split())
    assert "too few runs" in printed and "more --minutes decide it" in printed


@pytest.mark.parametrize("disturbed", (0.0, 0.3))
def test_savings_within_the_noise_are_never_claimed(searched, disturbed):
    """Also where other programs make a third of the runs up to twice as long."""
    for seed in range(16):
        session = searched(Simulated({}, ON_CPU, noise=0.03, seed=seed, disturbed=disturbed))
        assert session.together == ()
        assert not [one.keys for one in session.runs if one.keys and session.saving(one.keys).helps]


def test_a_large_saving_is_found_beside_disturbed_runs(searched):
    for seed in range(4):
        session = searched(Simulated({"workers": 0.2}, ON_CPU, noise=0.03, seed=seed, disturbed=0.3))
        assert tried.sets_in_order(session)[0][0] == ("workers",) and session.saving(("workers",)).helps


def in_two_speeds(seed):
    """Return a small ViT as an H200 ran it where other programs made about half of the runs 1.5 times as long.

    The CPU limits its eager step, so that TF32 helps only beside the graph, and other programs do not slow the graph.
    """
    luck = random.Random(seed)

    def steps(keys):
        slow = 1.5 if luck.random() < 0.55 else 1.0
        return 4.3 * slow if "compile_reduce_overhead" not in keys else 2.25 if "tf32" in keys else 3.85

    seen = Seen(modules=({**MODEL, "device": "cuda:0"},), torch="2.11.0", device="cuda", capability=(9, 0), threads=8)
    return Simulated(seen=seen, steps=steps, noise=0.015, seconds=6.6, seed=seed)


def test_a_large_saving_is_found_where_half_of_the_runs_are_slow(searched):
    """Each run with the changes is faster than the fastest one without them, so that no interval is needed."""
    both = ("compile_reduce_overhead", "tf32")
    found = [searched(in_two_speeds(seed), minutes=5, only=both) for seed in range(20)]
    assert sum(session.together == both for session in found) >= 16
    assert all(session.saving(both).share > 0.3 for session in found if session.together == both)


def test_a_saving_within_its_interval_is_explained(searched, capsys):
    both = ("compile_reduce_overhead", "tf32")
    session = searched(in_two_speeds(5), minutes=5, only=both)
    (alone,) = [one for one in json.loads(tried.as_json(session, []))["changes"] if one["changes"] == list(both[:1])]
    assert alone["each_run_faster"] and alone["verdict"] == "helps" and alone["saves"] < alone["plus_minus"]
    tried.show(session)
    explained = "A saving that is hardly larger than its ± helps if each run with it was faster than each one as it is."
    assert explained in " ".join(capsys.readouterr().out.split())
    session = searched(Simulated({"workers": 0.4}, ON_CPU))
    tried.show(session)
    assert explained not in " ".join(capsys.readouterr().out.split())


def test_what_helps_beside_a_change_that_is_known_late_runs_before_the_time_is_over(searched):
    """The graph was known to help only after five runs, and two minutes were left without a run of TF32 beside it."""
    both = ("compile_reduce_overhead", "tf32")
    for seed in (5, 25, 26):
        session = searched(in_two_speeds(seed), minutes=5, only=both)
        assert session.of(both) and len(session.of(both[:1])) >= 5


@pytest.mark.parametrize(
    ("changed", "usual", "apart"),
    (
        ([2.3, 2.2], [4.2, 6.5, 4.3, 6.4, 6.5, 4.2, 6.4, 4.4, 6.6], True),
        ([2.3, 2.2], [4.2, 6.5, 4.3, 6.4, 6.5], False),  # one of 21 orders: too few runs
        ([2.3, 4.3], [4.2, 6.5, 4.3, 6.4, 6.5, 4.2, 6.4, 4.4, 6.6], False),
        ([4.1, 4.1], [4.2, 6.5, 4.3, 6.4, 6.5, 4.2, 6.4, 4.4, 6.6], False),  # as near as two quick runs as it is
    ),
)
def test_runs_that_are_all_faster_than_each_other_one_help_beside_any_noise(changed, usual, apart):
    noise = savings.Noise(0.4, 15, 0.4)
    found = savings.saving([(usual[:2], one) for one in changed], noise, usual)
    assert found.is_apart == apart and found.helps == apart
    assert not savings.saving([(usual[:2], one) for one in changed], noise).helps


def test_a_busy_machine_needs_more_to_be_convinced(searched, monkeypatch):
    quiet = searched(Simulated({"workers": 0.88}, ON_CPU, noise=0.0), minutes=1).saving(("workers",))
    program = Simulated({"workers": 0.88}, ON_CPU, noise=0.0)
    said = []
    monkeypatch.setattr(search, "run_once", program.run_once)
    monkeypatch.setattr(search.time, "monotonic", program.monotonic)
    monkeypatch.setattr(search.os, "getloadavg", lambda: (1000.0, 0.0, 0.0))
    session = search.Session(["program"], {}, Path("/nonexistent"), 60, said.append)
    search.search(session)
    assert quiet.helps and not session.saving(("workers",)).helps
    assert "other programs keep this machine busy" in said[0]


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


def test_what_helps_less_than_one_of_its_changes_is_not_named(searched, capsys):
    def steps(keys):
        return 10.0 if len(keys) != 1 else {"workers": 3.0, "compile": 7.0}.get(*keys, 10.0)

    session = searched(Simulated(seen=ON_CPU, steps=steps))
    assert session.together == ("workers",)
    tried.show(session)
    assert "To keep it:\n  DataLoader workers\n    DataLoader(" in capsys.readouterr().out


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


def test_a_training_that_amplifies_rounding_excuses_other_losses_but_not_other_types(searched):
    """The fused optimizer and bf16 change the losses as much as weights do that differ by rounding."""
    losses = {("fused_optimizer",): (1.0, 0.7), ("bf16",): (1.0, 0.7)}
    effects = {"fused_optimizer": 0.6, "bf16": 0.5}
    program = Simulated(effects, ON_CPU, losses=lambda keys: losses.get(keys, (1.0, 0.5)), nudged=(1.0001, 0.8))
    session = searched(program)
    assert [one.nudged for one in session.as_it_is].count(True) == 1
    assert session.difference(("fused_optimizer",)).kind == "not comparable"
    assert session.difference(("bf16",)).kind == "off" and session.together == ("fused_optimizer",)


def test_changes_that_ran_together_first_are_not_chosen_if_one_of_them_gives_other_results(searched):
    """In a short time a safe optimizer runs beside others, where random numbers hide that it changes the losses."""
    seen = Seen(modules=(MODEL,), optimizers=(OPTIMIZER,), loaders=(LOADER,), checkpoints=({"line": "a.py:3"},),
                torch="2.15.0", threads=4, workers=4)  # fmt: skip
    effects = {"workers": 0.7, "no_checkpoint": 0.7, "fused_optimizer": 0.8}

    def losses(keys):
        return 1.0, 0.45 if "workers" in keys else 0.9 if keys == ("fused_optimizer",) else 0.5

    program = Simulated(effects, seen, seconds=12.0, losses=losses)
    session = searched(program, minutes=4)
    assert session.bet == tuple(sorted(effects)) and session.together == ("no_checkpoint", "workers")


def test_what_runs_together_first_is_improved_where_the_time_is_short(searched):
    """The loader set the pace. Beside workers a faster convolution helps, which saves nothing alone."""
    model = {**MODEL, "device": "cuda", "convolutions": 3}
    seen = Seen(modules=(model,), loaders=(LOADER,), torch="2.11.0", device="cuda", gpu="H100", capability=(9, 0),
                workers=16, backward=True)  # fmt: skip

    def steps(keys):
        gpu = 48 * (0.7 if "compile_reduce_overhead" in keys else 1) * (0.8 if "cudnn_benchmark" in keys else 1)
        return gpu if "workers" in keys else 100.0

    session = searched(Simulated(seen=seen, steps=steps, seconds=14.0, noise=0.01), minutes=5)
    assert session.bet == ("compile_reduce_overhead", "cudnn_benchmark", "tf32", "workers")
    assert session.together == ("compile_reduce_overhead", "cudnn_benchmark", "workers")
    assert session.saving(session.together).helps


@pytest.mark.parametrize(
    ("faults", "device", "set_already", "applies"),
    [(1000, "cpu", False, True), (100, "cpu", False, False), (1000, "cuda", False, False), (1000, "cpu", True, False)],
)
def test_freed_memory_is_kept_where_steps_on_a_cpu_have_page_faults(faults, device, set_already, applies, monkeypatch):
    monkeypatch.delenv("MALLOC_MMAP_MAX_", raising=False)
    monkeypatch.delenv("MALLOC_TRIM_THRESHOLD_", raising=False)
    if set_already:
        monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "1000")
    (one,) = [one for one in candidates.all_candidates() if one.key == "keep_memory"]
    assert one.applies(Seen(page_faults=faults, device=device)) == applies
    assert dict(one.environment).keys() == {"MALLOC_MMAP_MAX_", "MALLOC_TRIM_THRESHOLD_"}


def test_guards_are_skipped_only_beside_compiled_code(searched, capsys):
    seen = Seen(modules=(MODEL,), torch="2.15.0", threads=4)
    session = searched(Simulated({"compile": 0.5, "skip_guards": 0.8}, seen), only=("compile", "skip_guards"))
    assert session.together == ("compile", "skip_guards") and not session.of(("skip_guards",))
    assert session.saving(session.together).share == pytest.approx(0.6, abs=0.03)
    tried.show(session)
    assert "skipped guards" in capsys.readouterr().out and not session.skipped
    session = searched(Simulated({"compile": 1.3, "skip_guards": 0.8}, seen), only=("compile", "skip_guards"))
    assert session.together == () and not any("skip_guards" in run.keys for run in session.runs)
    own = Seen(modules=({**MODEL, "compiled": True},), torch="2.15.0", threads=4)
    session = searched(Simulated({"skip_guards": 0.8}, own), only=("compile", "skip_guards"))
    assert session.together == ("skip_guards",)
    session = searched(Simulated({"skip_guards": 0.8}, seen), only=("skip_guards",))
    assert [(one.key, one.why) for one in session.skipped] == [("skip_guards", search.NOTHING_TO_CHANGE)]


def test_everything_is_tried_if_the_first_changes_do_not_help(searched, capsys):
    """No time is kept for combinations where there is nothing to combine."""
    program = Simulated({}, ON_CPU, seconds=14.0, fails={"bf16": "ended by SIGSEGV"})
    session = searched(program, minutes=4, without=("compile",))
    assert not session.skipped
    tried.show(session)
    assert "None of the changes that ran saves more than the noise" in " ".join(capsys.readouterr().out.split())


def test_what_was_compiled_before_is_expected_to_take_less_time(searched):
    """The first compilation takes 90 s, and later ones are in the compiler's cache."""
    program = Simulated({"compile": 0.35, "gc_freeze": 0.97}, ON_CPU, noise=0.12, seconds=15.0)
    ran = program.run_once

    def cached(command, plan, environment, folder, limit_s, **more):
        first = "compile" in plan["changes"] and not any("compile" in keys for keys in program.ran)
        program.seconds = 85.0 if first else 15.0  # and 20 s of each run that compiles
        return ran(command, plan, environment, folder, limit_s, **more)

    program.run_once = cached
    session = searched(program, minutes=7, only=("compile", "gc_freeze", "fused_optimizer"))
    assert session.together == ("compile",) and len(session.of(session.together)) > 1
    assert session.expected_s(("compile",)) == 35


@pytest.mark.parametrize("minutes", (0.5, 1, 2, 5, 10))
@pytest.mark.parametrize("seconds", (2.0, 9.0, 40.0))
def test_the_time_is_kept(searched, minutes, seconds):
    program = Simulated({"workers": 0.5, "compile": 0.7}, ON_CPU, noise=0.05, seconds=seconds)
    searched(program, minutes)
    assert program.now <= 60 * minutes


def test_what_is_most_likely_to_help_runs_together_first_where_the_time_is_short(searched):
    """Four minutes of runs that take half a minute: the row of several changes is there, and is what is named."""
    seen = Seen(modules=(MODEL,), optimizers=(OPTIMIZER,), loaders=(LOADER,), checkpoints=({"line": "a.py:3"},),
                torch="2.15.0", threads=4, workers=4)  # fmt: skip
    effects = {"workers": 0.7, "no_checkpoint": 0.7, "fused_optimizer": 0.8}
    program = Simulated(effects, seen, seconds=24.0, noise=0.01)
    session = searched(program, minutes=4)
    assert session.runs[1].keys == tuple(sorted(effects)) == session.together
    assert session.saving(session.together).helps
    assert program.now <= 240


def test_a_large_saving_is_measured_again_before_a_change_that_compiles_for_minutes(searched):
    """One run as it is was disturbed, so that half of the step is within the noise of a single run."""
    seen = Seen(modules=({**MODEL, "device": "cuda", "convolutions": 1},), torch="2.11.0", device="cuda", gpu="H100",
                capability=(9, 0))  # fmt: skip
    number = itertools.count()

    def steps(keys):
        if not keys:
            return 6.5 if next(number) == 2 else 4.1
        return 2.0 if {"compile_reduce_overhead", "tf32"} <= keys else 4.1

    program = Simulated(seen=seen, steps=steps, seconds=6.0)
    usual = program.run_once

    def run_once(command, plan, *args, **kwargs):
        program.seconds = 150.0 if "compile_max_autotune" in plan["changes"] else 6.0
        return usual(command, plan, *args, **kwargs)

    program.run_once = run_once
    session = searched(program, minutes=4.5)
    assert {"compile_reduce_overhead", "tf32"} <= set(session.together) and session.saving(session.together).helps
    assert program.now <= 270


@pytest.mark.parametrize(("cold", "skip"), [(0, 5), (37, 37)])
def test_runs_are_timed_only_after_as_many_steps_as_the_recording_needed_to_be_warm(searched, cold, skip):
    program, plans = Simulated({"workers": 0.5}, ON_CPU), []
    usual = program.run_once

    def run_once(command, plan, *args, **kwargs):
        plans.append(plan)
        found = usual(command, plan, *args, **kwargs)
        return msgspec.structs.replace(found, cold=cold) if plan["mode"] == "record" else found

    program.run_once = run_once
    searched(program, minutes=1, only=("workers",))
    assert len(plans) > 3 and [one["skip"] for one in plans] == [5, *[skip] * (len(plans) - 1)]


@pytest.mark.exhaustive
def test_a_recording_tells_after_how_many_steps_its_program_was_warm(tmp_path):
    (tmp_path / "program.py").write_text(WARM_ONCE_RECORDED.replace("COLD", WORKS))
    plan = {**search.RECORD, "mode": "record", "changes": [], "look": True, "step_at": None, "slow_us": None}
    one = run_once([sys.executable, "program.py"], plan, os.environ, tmp_path / "run", 100, cwd=str(tmp_path))
    assert not one.failure and one.step_us < 50e3
    assert search.RECORD["skip"] + search.RECORD["least"] <= one.cold < one.steps - search.RECORD["active"]


def test_a_run_that_the_time_cuts_off_is_no_failure(searched, capsys):
    program = Simulated({"workers": 0.5}, ON_CPU, seconds=4.0)
    slow = program.run_once

    def run_once(command, plan, *args, **kwargs):
        program.seconds = 400.0 if plan["changes"] == ["bf16"] else 4.0
        return slow(command, plan, *args, **kwargs)

    program.run_once = run_once
    session = searched(program, minutes=0.5, only=("workers", "bf16"))
    tried.show(session)
    printed = capsys.readouterr().out
    assert not session.failures and "fails" not in printed
    assert "Not tried, because the time was over (--minutes): bf16 autocast." in printed


def test_a_second_search_gives_the_same_order_of_the_first_three(searched):
    effects = {"workers": 0.5, "compile": 0.8, "fused_optimizer": 0.9}
    orders = {
        tuple(tried.sets_in_order(searched(Simulated(effects, ON_CPU, noise=0.01, seed=seed)))[0][:3])
        for seed in range(10)
    }
    assert orders == {(("workers",), ("compile",), ("fused_optimizer",))}


def test_changes_within_the_noise_of_each_other_keep_their_order_beside_a_larger_one():
    """Two searches over one program. In the first one, compile was within the noise of workers, no_checkpoint not."""
    for found in (
        {"workers": (0.35, 0.10), "compile": (0.24, 0.14), "no_checkpoint": (0.22, 0.12)},
        {"workers": (0.38, 0.11), "compile": (0.23, 0.15), "no_checkpoint": (0.23, 0.15)},
    ):
        of = {(key,): types.SimpleNamespace(share=share, plus_minus=noise, helps=True, harms=False)
              for key, (share, noise) in found.items()}  # fmt: skip
        session = types.SimpleNamespace(
            runs=[Run(keys) for keys in of], saving=of.get, together=(),
            candidates=[types.SimpleNamespace(key=key) for key in ("workers", "no_checkpoint", "compile")],
        )  # fmt: skip
        assert tried.sets_in_order(session)[0] == [("workers",), ("no_checkpoint",), ("compile",)]


def test_runs_alternate_with_the_program_as_it_is(searched):
    program = Simulated({"workers": 0.5}, ON_CPU, noise=0.05)
    searched(program, minutes=30)
    alone = [keys for keys in program.ran if len(keys) < 2]
    assert all(() in pair for pair in itertools.pairwise(alone[1:]))


def test_only_and_without_choose_the_changes(searched):
    program = Simulated({"workers": 0.5}, ON_CPU)
    session = searched(program, only=("fused_optimizer", "workers", "tf32"), without=("workers",))
    assert {key for keys in program.ran for key in keys} == {"fused_optimizer"}
    assert [(one.key, one.why) for one in session.skipped] == [("tf32", "nothing in the program to change")]


def test_the_order_is_that_of_the_predictions():
    """Small predictions leave the usual order: a loader comes before an optimizer that is predicted to save 4%."""
    ordered = candidates.in_order(
        all_candidates(), {"fuse_pointwise": 0.5, "no_recompute": 0.3, "fused_optimizer": 0.2, "remove_sync": 0.04}
    )
    keys = [one.key for one in ordered]
    assert keys[:5] == ["compile_reduce_overhead", "no_checkpoint", "fused_optimizer", "foreach_optimizer", "workers"]
    assert keys[-2:] == ["compile", "compile_max_autotune"]  # each takes long, and only one can be made


def test_inference_mode_is_not_tried_where_parameters_are_changed_by_hand():
    applies = next(one.applies for one in all_candidates() if one.key == "inference_mode")
    assert applies(Seen(modules=(MODEL,))) and not applies(Seen(modules=(MODEL,), backward=True))


@pytest.mark.parametrize(
    ("device", "through", "compiled", "applies"),
    [
        ("cuda", "transformers/generation/utils.py:4333", (), True),
        ("cpu", "transformers/generation/utils.py:4333", (), False),
        ("cuda", "", (), False),
        ("cuda", "transformers/generation/utils.py:4333", ({"line": "a.py:3"},), False),
    ],
)
def test_a_static_cache_is_tried_where_generate_of_transformers_runs_on_a_gpu(device, through, compiled, applies):
    one = next(one for one in all_candidates() if one.key == "static_cache")
    seen = Seen(modules=({**MODEL, "through": through},), compiled=compiled, device=device)
    assert one.applies(seen) == applies
    kept = f'cache_implementation="static" in the call of generate() at train.py:20 (made by {through})'
    assert not applies or one.to_keep(seen) == kept


def test_each_key_that_a_change_names_can_be_tried():
    keys = {one.key for one in all_candidates()}
    named = candidates.following()
    assert named["fused_optimizer"] == ("fused_optimizer", "foreach_optimizer")
    assert {key for some in named.values() for key in some} <= keys


# The statistics.


def test_a_step_is_the_mean_of_a_typical_block():
    stalls = [1.0, 1.0, 1.0, 9.0] * 10  # a loader's at each fourth step
    assert savings.step_us(stalls) == 3.0
    assert savings.step_us([*stalls, *[50.0] * 10]) == pytest.approx(3.0, abs=0.5)  # one pause
    assert savings.step_us([5.0]) == 5.0


def test_blocks_hold_all_batches_that_workers_prepare_together():
    stalls = ([1.0] * 15 + [33.0]) * 6  # sixteen workers that end at once
    assert savings.step_us(stalls, 32) == 3.0
    assert savings.step_us(stalls[:40], 32) == pytest.approx(sum(stalls[:40]) / 40)


def test_a_slow_drift_is_no_saving():
    """Each run is compared with its neighbors, so that a machine that slows down changes nothing."""
    steps = [100.0 * 1.05**number for number in range(9)]
    kinds = [number % 2 == 0 for number in range(9)]
    pairs = [(savings.beside(kinds, steps, number), steps[number]) for number in range(1, 9, 2)]
    assert abs(savings.saving(pairs, savings.Noise(0.01, 10, 0.01)).share) < 0.002


def test_more_runs_make_the_interval_narrower():
    pair = ([100.0] * 2, 90.0)
    noise = savings.Noise(0.02, 10, 0.02)
    one, four = savings.saving([pair], noise), savings.saving([pair] * 4, noise)
    assert one.share == four.share == pytest.approx(0.1)
    assert four.plus_minus < 0.7 * one.plus_minus


def test_a_few_equal_runs_do_not_make_a_small_noise():
    assert savings.noise_of([]).share == savings.USUAL_NOISE
    assert 0.01 < savings.noise_of([[100.0] * 3]).share < savings.USUAL_NOISE
    assert savings.noise_of([[100.0] * 30]).share < 0.01
    assert savings.noise_of([[100.0, 130.0, 100.0]]).share > 0.1


def test_a_small_saving_needs_several_runs_that_agree():
    quiet = savings.Noise(0.01, 10, 0.01)
    assert not savings.saving([([100.0] * 2, 93.0)], quiet).helps
    assert savings.saving([([100.0] * 2, 93.0)] * 2, quiet).helps
    assert savings.saving([([100.0] * 2, 50.0)], quiet).helps
    assert not savings.saving([([100.0] * 2, 80.0)] * 2 + [([100.0] * 2, 105.0)], quiet).helps


def test_one_disturbed_run_of_three_does_not_move_a_saving():
    pairs = [([100.0] * 2, 70.0), ([100.0] * 2, 140.0), ([100.0] * 2, 69.0)]
    assert savings.saving(pairs, savings.Noise(0.1, 10, 0.1)).share == pytest.approx(0.3)


def test_one_disturbed_run_as_it_is_does_not_move_a_saving():
    """It stands beside two of three runs with the change."""
    pairs = [([4.1, 6.5], 2.0), ([6.5, 4.1], 2.0), ([4.1, 4.1], 2.0)]
    assert savings.saving(pairs, savings.Noise(0.1, 10, 0.02)).share == pytest.approx(1 - 2.0 / 4.1)


def test_a_change_that_takes_many_times_as_long_is_beyond_a_large_noise():
    assert savings.saving([([5.0] * 2, 198.0)], savings.Noise(0.2, 5, 0.2)).harms


def test_a_machine_that_is_busy_within_a_run_makes_the_interval_wider():
    assert savings.spread_of([10.0] * 20) == 0
    assert savings.spread_of([1.0, 1.0, 1.0, 9.0] * 10, 4) == 0  # a loader's stalls are no noise
    assert savings.spread_of([10.0] * 10 + [15.0] * 10) > 0.2
    assert savings.noise_of([[100.0, 100.0]], 0.2).share > 0.15


def test_losses_are_compared_step_by_step():
    usual = [[2.0, 1.0, 0.5]]
    assert savings.losses_differ(usual, [2.0, 1.0, 0.5]).text == "same"
    assert savings.losses_differ(usual, [2.0, 1.000006, 0.5]).text == "within 6e-06"
    assert savings.losses_differ(usual, [2.0, 1.01, 0.5]).text == "off by 1.0%"
    assert savings.losses_differ(usual, [2.0, math.nan, 0.5]).kind == "off"
    amplified = [[2.0, 1.0, 0.5, 0.4, 0.3]]
    growing, nudged = [2.0, 1.01, 0.52, 0.4, 0.5], [2.001, 1.02, 0.5, 0.3, 0.3]
    assert savings.losses_differ(amplified, growing, nudged=nudged).text == "not comparable"
    assert savings.losses_differ(amplified, growing).text == "off by 40.0%"
    assert savings.losses_differ(amplified, growing, nudged=[2.001, 1.0, 0.5, 0.4, 0.3]).text == "off by 40.0%"
    assert savings.losses_differ(amplified, [2.01, *growing[1:]], nudged=nudged).text == "off by 40.0%"
    assert savings.losses_differ(usual, [2.0, 1.015, 0.5], is_half=True).text == "within 1.5%"
    assert savings.losses_differ(usual, [2.0, 1.03, 0.5], is_half=True).text == "off by 2.9%"
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


def test_ctrl_c_ends_with_the_rows_so_far(monkeypatch, capsys):
    program = Simulated({"workers": 0.5}, ON_CPU)

    def run_once(*args, **kwargs):
        if len(program.ran) == 4:
            raise KeyboardInterrupt
        return program.run_once(*args, **kwargs)

    monkeypatch.setattr(search, "run_once", run_once)
    monkeypatch.setattr(search.os, "getloadavg", lambda: (0.0, 0.0, 0.0))
    assert trying.main(["--", sys.executable, "train.py"]) == 130
    said = capsys.readouterr()
    assert "DataLoader workers" in said.out and "To keep it:" in said.out
    assert said.err.splitlines()[-1].endswith("interrupted")


def test_json_has_every_run_and_the_scoreboards_format(monkeypatch, capsys):
    program = Simulated({"workers": 0.5, "compile": 0.8}, ON_CPU, fails={"bf16": "RuntimeError: no"})
    monkeypatch.setattr(search, "run_once", program.run_once)
    monkeypatch.setattr(search.time, "monotonic", program.monotonic)
    monkeypatch.setattr(search.os, "getloadavg", lambda: (0.0, 0.0, 0.0))
    assert trying.main(["--json", "--", sys.executable, "train.py"]) == 0
    found = json.loads(capsys.readouterr().out)
    measured = [found["as_it_is"], *found["changes"], *found["several"]]
    assert sum(len(one["runs"]) for one in measured) + len(found["failed"]) == len(program.ran) - 1
    assert found["failed"] == [{"changes": ["bf16"], "why": "RuntimeError: no"}]
    assert found["together"] == ["compile", "workers"] and list(found["keep"]) == ["workers", "compile"]
    keys = set(json.loads((ROOT / "benchmarks/pairs/results.json").read_text())["digits_vae"]["base"]["runs"][0])
    assert all(set(run) == keys for one in found["scoreboard"].values() for run in one["runs"])


@pytest.fixture
def tell(monkeypatch, capsys):
    """Return a function that runs the command over a simulated program, and returns what it prints."""

    def tell(program, *flags):
        monkeypatch.setattr(search, "run_once", program.run_once)
        monkeypatch.setattr(search.time, "monotonic", program.monotonic)
        monkeypatch.setattr(search.os, "getloadavg", lambda: (0.0, 0.0, 0.0))
        status = trying.main([*map(str, flags), "--", sys.executable, "train.py"])
        monkeypatch.undo()
        return status, *capsys.readouterr()

    return tell


RECORDED = ROOT / "tests/traces/attention_cpu_naive.json.gz"


def helped(**more):
    fails = {"bf16": "RuntimeError: <b>no</b>"}
    return Simulated({"workers": 0.5, "compile": 0.8}, ON_CPU, fails=fails, trace=RECORDED, **more)


def test_the_page_has_what_the_terminal_shows(tell, tmp_path, request):
    page = tmp_path / "measured.html"
    status, printed, _ = tell(helped(), "--html", page)
    assert status == 0
    found = json.loads(block(page, "figures"))["measured"]
    lines = [" ".join(line.split()) for line in printed.splitlines()]
    rows = [" ".join(" ".join(row).split()) for row in (found["heads"], *found["rows"])]
    assert lines[0] == rows[0]
    below = {int(number): text for number, text in found["below"].items()}
    expected = [text for number, row in enumerate(rows[1:]) for text in (row, below.get(number)) if text]
    assert lines[1 : lines.index("")] == expected
    first = lines.index(found["said"][0])
    assert lines[first : first + len(found["said"])] == found["said"]
    assert [part for pair in found["keep"] for part in pair] == lines[lines.index(found["keep_title"]) + 1 :][:4]
    browser = shown(request.getfixturevalue("chromium"), page)
    measured = browser.execute_script("return document.getElementById('measured').innerText")
    texts = " ".join(measured.split())
    assert all(row in texts for row in rows) and all(text in texts for text in (*below.values(), *found["said"]))
    assert all(f"{name}: {how}" in texts for name, how in found["keep"])
    is_quiet(browser, page)


def test_the_page_can_be_written_beside_json(tell, tmp_path):
    page = tmp_path / "measured.html"
    status, printed, said = tell(helped(), "--json", "--html", page)
    assert status == 0 and "one file without outside links" in said
    found, measured = json.loads(printed), json.loads(block(page, "figures"))["measured"]
    row = next(row for row in measured["rows"] if row[0] == "DataLoader workers")
    assert row[2] == f"{found['changes'][0]['saves']:.0%} ± {max(1, round(100 * found['changes'][0]['plus_minus']))}"
    assert [how for _, how in measured["keep"]] == list(found["keep"].values())


def test_the_page_can_go_to_standard_output(tell):
    status, printed, _ = tell(helped(), "--html", "-")
    assert status == 0 and printed.startswith("<!doctype html>")


def test_a_page_without_a_recording_is_refused_after_the_table(tell, tmp_path):
    program = Simulated({"workers": 0.5}, ON_CPU)
    status, printed, said = tell(program, "--html", tmp_path / "measured.html")
    assert status == 1 and "DataLoader workers" in printed
    assert said.splitlines()[-1].endswith("--html: the program could not be recorded, so that there is no page")
    assert not list(tmp_path.iterdir())


def test_a_file_that_is_no_page_is_refused_before_anything_runs(tell, tmp_path):
    notes = tmp_path / "notes.txt"
    notes.write_text("mine")
    program = helped()
    refused = (
        (["--html", notes], "exists and is not a report of read-trace; --force overwrites it"),
        (["--html", tmp_path], "a folder; name a file in it"),
        (["--html", tmp_path / "no" / "page.html"], f"no such folder: {tmp_path / 'no'}"),
        (["--json", "--html", "-"], "both print"),
    )
    for flags, why in refused:
        status, printed, said = tell(program, *flags)
        assert status == 2 and not printed and why in said and said.count("\n") == 1
    assert not program.ran and notes.read_text() == "mine"
    assert tell(program, "--html", notes, "--force")[0] == 0 and "<!doctype html>" in notes.read_text()


# The changes themselves. One process imports torch and forks for each of them, because a change stays in its process.

FORKS = """
import gc, importlib.util, json, os, sys, tempfile, traceback
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

spec = importlib.util.spec_from_file_location("changes", sys.argv[1])
changes = importlib.util.module_from_spec(spec)
spec.loader.exec_module(changes)
own_call, compile_ = nn.Module.__call__, torch.compile
torch.set_num_threads(1)


def steps(made, model, *inputs, count=3):
    result = None
    for _ in range(count):
        result = model(*inputs)
        made.step_ended()
    return result


def fused_optimizer():
    made = changes.install(torch, ["fused_optimizer"])
    weights = [nn.Parameter(torch.ones(2))]
    adam, sgd = torch.optim.AdamW(weights, foreach=True), torch.optim.SGD((one for one in weights), 0.1)
    rmsprop = torch.optim.RMSprop(weights)
    refused = torch.optim.Adam(weights, differentiable=True)
    weights[0].grad = torch.ones(2)
    adam.step(), sgd.step()
    kinds = [one.param_groups[0].get("fused") for one in (adam, sgd, rmsprop, refused)]
    return kinds, made.applied, bool(made.refused), weights[0].tolist() != [1, 1]


def foreach_optimizer():
    made = changes.install(torch, ["foreach_optimizer"])
    weights = [nn.Parameter(torch.ones(2))]
    return torch.optim.NAdam(weights, foreach=False).param_groups[0]["foreach"], made.applied


def no_checkpoint():
    calls = []

    def part(x):
        calls.append(1)
        return x.sin()

    made = changes.install(torch, ["no_checkpoint"])
    from torch.utils.checkpoint import checkpoint
    for reentrant in (True, False):
        x = torch.ones(2, requires_grad=True)
        checkpoint(part, x, use_reentrant=reentrant, preserve_rng_state=False).sum().backward()
    return len(calls), made.applied


def loader():
    made = changes.install(torch, ["workers", "pin_memory"])
    one, more = DataLoader(range(8)), DataLoader(range(8), 2, True, num_workers=30)
    return one.num_workers == changes.workers(), one.persistent_workers, one.pin_memory, more.num_workers, made.stock


def set_to_none():
    made = changes.install(torch, ["set_to_none"])
    model = nn.Linear(2, 2)
    model(torch.ones(2)).sum().backward()
    torch.optim.SGD(model.parameters(), 0.1).zero_grad(set_to_none=False)
    return model.weight.grad is None, made.applied


def nudged():
    made = changes.install(torch, [changes.NUDGED])
    model, plain = nn.Linear(2, 2), nn.Linear(2, 2)
    refused = nn.Parameter(torch.zeros(2, dtype=torch.float8_e4m3fn), requires_grad=False)  # torch cannot multiply it
    model.register_parameter("scaled", refused)
    plain.load_state_dict(model.state_dict(), strict=False)
    torch.manual_seed(1)
    expected = torch.rand(1).item()
    torch.manual_seed(1)
    model(torch.ones(2))
    parts = torch.cat([(one / other - 1).abs().flatten() for one, other in zip(model.parameters(), plain.parameters())])
    return made.applied, 0 < parts.min().item() < parts.max().item() < 0.005, torch.rand(1).item() == expected


def bf16():
    made = changes.install(torch, ["bf16"])
    model, kinds = nn.Sequential(nn.Linear(2, 2)), []
    model[0].register_forward_hook(lambda one, given, result: kinds.append(str(result.dtype)))
    result = steps(made, model, torch.ones(1, 2))
    return str(result.dtype), kinds[-1], len(kinds), nn.Module.__call__ is own_call


def channels_last():
    made = changes.install(torch, ["channels_last"])
    model, seen = nn.Sequential(nn.Conv2d(3, 4, 3)), []
    model[0].register_forward_pre_hook(
        lambda one, given: seen.append(given[0].is_contiguous(memory_format=torch.channels_last))
    )
    steps(made, model, torch.ones(2, 3, 8, 8))
    return seen, model[0].weight.is_contiguous(memory_format=torch.channels_last)


def static_cache():
    make, made = nn.Module.__init__, changes.install(torch, ["static_cache"])

    class Config:
        cache_implementation = None

    class GenerationMixin:
        generation_config = Config

        def generate(self, prompt, **how):
            return how.get("cache_implementation")

    class Model(nn.Linear, GenerationMixin):
        pass

    nn.Linear(2, 2)
    model, own = Model(2, 2), Config()
    own.cache_implementation = "offloaded"
    asked = [{}, {"cache_implementation": "dynamic"}, {"past_key_values": ()}, {"generation_config": own}]
    return [model.generate(1, **each) for each in asked], made.applied, nn.Module.__init__ is make


def inference_mode():
    made = changes.install(torch, ["inference_mode"])
    return steps(made, nn.Linear(2, 2), torch.ones(2)).is_inference()


def unused(look=False):
    made = changes.install(torch, [] if look else ["frozen_parameters"], look)
    first, student, teacher = nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)
    late = torch.optim.SGD(first.parameters(), 0.1)  # makes no step in these
    optimizer, weight = torch.optim.SGD(student.parameters(), 0.1), teacher.weight.tolist()
    for _ in range(4):
        x = first(torch.ones(2))
        (student(x) - teacher(x)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        made.step_ended()
    if look:
        return [{**one, "line": one["line"].rpartition("/")[2]} for one in made.facts()["seen"]["unused"]]
    learn = [one.weight.requires_grad for one in (first, student, teacher)]
    return learn, teacher.weight.grad is None, first.weight.grad is not None, made.applied


def unused_looked_at():
    return unused(look=True)


def anomaly(look=False):
    made = changes.install(torch, [] if look else ["no_anomaly_detection"], look)
    with torch.autograd.detect_anomaly():
        first = torch.is_anomaly_enabled()
    torch.autograd.set_detect_anomaly(True)
    found = [first, torch.is_anomaly_enabled(), made.applied]
    return *found, [one["line"].rpartition("/")[2] for one in made.facts()["seen"]["anomaly"]]


def anomaly_looked_at():
    return anomaly(look=True)


def without_guards():
    from torch._dynamo.testing import CompileCounter

    counted = CompileCounter()
    torch.compile = lambda model: compile_(model, backend=counted)
    made, model = changes.install(torch, ["compile", "skip_guards"]), nn.Linear(2, 2)
    steps(made, model, torch.ones(1, 2), count=6)
    refused = ""
    try:
        model(torch.ones(1, 2, dtype=torch.float64))
    except RuntimeError as problem:
        refused = type(problem).__name__
    return counted.frame_count, made.applied, refused


def by_hand():
    made, model = changes.install(torch, ["frozen_parameters"]), nn.Linear(2, 2)
    for _ in range(4):
        model(torch.ones(2)).sum().backward()
        made.step_ended()
    return model.weight.requires_grad, made.applied


class Nested(nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.ReLU()))

    def forward(self, x):
        return self.parts(x) + 1


def compiled(keys, own):
    given = []

    def eager(model=None, **kwargs):
        given.append(kwargs.pop("mode", None))
        return compile_(model, backend="eager", **kwargs)

    torch.compile = eager
    made = changes.install(torch, keys)
    model = Nested()
    model = torch.compile(model) if own else model
    result = steps(made, model, torch.ones(1, 2), count=4)
    from torch._dynamo.utils import counters

    return counters["stats"]["unique_graphs"], dict(counters["graph_break"]), given, made.applied, str(result.dtype)


def graphs():
    return compiled(["compile_reduce_overhead"], False)


def compiled_bf16():
    return compiled(["compile", "bf16"], False)


def compiled_before():
    return compiled(["compile_reduce_overhead", "bf16"], True)


def not_changed():
    return compiled([], True)


class Named(nn.Linear):
    def __call__(self, *args, **kwargs):  # as layers of transformers do
        return super().__call__(*args, **kwargs)


def compiled_once():
    made, count = changes.install(torch, ["channels_last"]), 0

    def ended():
        nonlocal count
        count += 1
        made.step_ended()
        if count == 12:
            watch.narrow()
        if count == 14:
            watch.noted = notes.start()
        if count == 16:
            watch.noted = notes.stop()

    sys.path.insert(0, os.path.dirname(sys.argv[1]))
    import modules, steps as ends

    notes = modules.Notes(torch, torch.compiler.is_compiling, ends.patched)
    watch = ends.Steps(torch, ended)
    watch.start()
    model = nn.Sequential(Named(2, 2), Named(2, 2))
    model.compile(backend="eager")
    with torch.no_grad():
        for _ in range(18):
            model(torch.ones(1, 2))
    watch.stop()
    from torch._dynamo.utils import counters

    return counters["stats"]["unique_graphs"], count, len(notes.calls), nn.Module.__call__ is own_call


def compiled_without_checkpoint():
    targets = []

    def kept(model=None, **kwargs):
        def backend(graph, inputs):
            targets.extend(str(node.target) for node in graph.graph.nodes)
            return graph.forward

        return compile_(model, backend=backend)

    torch.compile = kept
    made = changes.install(torch, ["compile", "no_checkpoint"])
    from torch.utils.checkpoint import checkpoint

    class Part(nn.Linear):
        def forward(self, x):
            return checkpoint(super().forward, x, use_reentrant=False)

    steps(made, Part(2, 2), torch.ones(1, 2))
    return len(targets) > 1, [one for one in targets if "checkpoint" in one], made.applied


def ddp():
    keys = ["ddp_bucket", "ddp_static_graph", "ddp_no_buffers", "ddp_bucket_view"]
    made = changes.install(torch, keys)
    store = torch.distributed.FileStore(tempfile.mkstemp()[1], 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    model = nn.parallel.DistributedDataParallel(nn.Linear(2, 2), find_unused_parameters=True)
    model(torch.ones(2)).sum().backward()
    found = model.bucket_bytes_cap >> 20, model.static_graph, model.broadcast_buffers, model.gradient_as_bucket_view
    torch.distributed.destroy_process_group()
    return found


def frozen():
    made = changes.install(torch, ["gc_freeze"])
    before = gc.get_freeze_count()
    for _ in range(3):
        made.step_ended()
    return gc.get_freeze_count() > before


def seeded():
    import random

    import numpy

    found = []
    for _ in range(2):
        changes.seed(torch)
        found.append((torch.rand(1).item(), random.random(), numpy.random.rand(), numpy.random.default_rng().random()))
    return found[0] == found[1]


def looked_at():
    made = changes.install(torch, [], look=True)
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    for x in DataLoader(torch.ones(6, 2), batch_size=2):
        loss = checkpoint(model[1], model(x), use_reentrant=False).square().mean()
        loss = loss + nn.functional.scaled_dot_product_attention(*[x[None]] * 3).mean()
        optimizer.zero_grad(set_to_none=False)
        loss.backward()
        optimizer.step()
        made.step_ended()
    facts = made.facts()
    kinds = ("modules", "optimizers", "loaders", "zero_grad", "attention")
    lines = {kind: [one["line"].rpartition("/")[2] for one in facts["seen"][kind]] for kind in kinds}
    return lines, len(facts["losses"]), len(facts["outputs"][0]), nn.Module.__call__ is own_call


for name in sys.argv[2:]:
    if name == "compiled_bf16":  # the first compiled one imports it in the middle of a call, as programs do
        import torch._dynamo.utils
    read, write = os.pipe()
    if not os.fork():
        try:
            found = globals()[name]()
        except BaseException:
            found = traceback.format_exc()
        os.write(write, json.dumps(found).encode())
        os._exit(0)
    os.close(write)
    with open(read) as file:
        print(name, file.read(), flush=True)
    os.wait()
"""

CHANGED = {
    "fused_optimizer": [[True, True, None, None], {"fused_optimizer": 2}, True, True],
    "foreach_optimizer": [True, {"foreach_optimizer": 1}],
    "no_checkpoint": [2, {"no_checkpoint": 1}],
    "loader": [True, True, True, 30, 60],
    "set_to_none": [True, {"set_to_none": 1}],
    "nudged": [{"nudged": 1}, True, True],
    "bf16": ["torch.float32", "torch.bfloat16", 3, True],
    "channels_last": [[True, True, True], True],
    "inference_mode": True,
    "static_cache": [["static", "dynamic", None, None], {"static_cache": 1}, True],
    "unused": [[True, True, False], True, True, {"frozen_parameters": 1}],
    "by_hand": [True, {"frozen_parameters": 0}],
    "without_guards": [1, {"compile": 1, "skip_guards": 1}, "RuntimeError"],
    "anomaly": [False, False, {"no_anomaly_detection": 1}, []],
    "graphs": [1, {}, ["reduce-overhead"], {"compile_reduce_overhead": 1}, "torch.float32"],
    "compiled_bf16": [1, {}, [None], {"compile": 1, "bf16": 1}, "torch.float32"],
    "compiled_before": [1, {}, ["reduce-overhead"], {"compile_reduce_overhead": 1, "bf16": 1}, "torch.float32"],
    "not_changed": [1, {}, [None], {}, "torch.float32"],
    "compiled_once": [1, 18, 10, True],
    "compiled_without_checkpoint": [True, [], {"compile": 1, "no_checkpoint": 1}],
    "ddp": [100, True, False, True],
    "frozen": True,
    "seeded": True,
}


@pytest.fixture(scope="module")
def forked(tmp_path_factory):
    """Return what each of FORKS' functions found, by its name."""
    script = tmp_path_factory.mktemp("forks") / "forks.py"
    script.write_text(FORKS)
    inside = ROOT / "tracereader" / "run" / "inside" / "changes.py"
    names = [*CHANGED, "looked_at", "unused_looked_at", "anomaly_looked_at"]
    ran = subprocess.run([sys.executable, script, inside, *names], capture_output=True, text=True, check=True)
    return {line.split(" ", 1)[0]: json.loads(line.split(" ", 1)[1]) for line in ran.stdout.splitlines()}


def test_a_run_that_looks_names_where_anomaly_detection_is_set(forked):
    first, second, applied, lines = forked["anomaly_looked_at"]
    text = [FORKS.splitlines()[int(one.partition(":")[2]) - 1].strip() for one in lines]
    assert first and second and not applied
    assert text == ["with torch.autograd.detect_anomaly():", "torch.autograd.set_detect_anomaly(True)"]


def test_a_run_that_looks_names_what_no_optimizer_updates(forked):
    (found,) = forked["unused_looked_at"]
    text = FORKS.splitlines()
    assert text[int(found["line"].partition(":")[2]) - 1].strip().startswith("(student(x) - teacher(x))")
    assert (found["name"], found["parameters"]) == ("Linear", 2 * 2 + 2)


@pytest.mark.parametrize("name", CHANGED)
def test_a_change_is_made_in_the_program(forked, name):
    assert forked[name] == CHANGED[name]


def test_a_run_that_looks_names_the_lines_of_the_program(forked):
    lines = [number for number, line in enumerate(FORKS.splitlines(), 1)]
    text = FORKS.splitlines()

    def line_of(part, after="def looked_at"):
        start = next(number for number in lines if after in text[number - 1])
        return f"forks.py:{next(number for number in lines if number > start and part in text[number - 1])}"

    found, losses, outputs, is_put_back = forked["looked_at"]
    assert found == {
        "modules": [line_of("model(x)")],
        "optimizers": [line_of("AdamW(")],
        "loaders": [line_of("DataLoader(")],
        "zero_grad": [line_of("zero_grad(")],
        "attention": [line_of("scaled_dot")],
    }
    assert (losses, outputs, is_put_back) == (3, 4, True)


# When a run ends.


def measuring_until_the_end(step_s, clock, cuda=None, capture_at=None, **more):
    """Return a run's Measuring when it has enough steps, with a clock that only the steps and a GPU's events move."""
    spec = importlib.util.spec_from_file_location("measuring", ROOT / "tracereader/run/inside/measuring.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.time = types.SimpleNamespace(perf_counter=lambda: clock[0])
    measuring = module.Measuring(types.SimpleNamespace(cuda=cuda), **more)
    while not (measuring.measuring and measuring.enough):
        clock[0] += step_s
        if cuda is not None:
            cuda.capturing = measuring.measuring and measuring.steps == capture_at
        measuring.ended()
        if measuring.ready and not measuring.measuring:
            measuring.begin()
    return measuring


def steps_until_the_end(step_s, slow_us=None):
    return measuring_until_the_end(step_s, [0.0], slow_us=slow_us).steps


def test_a_run_that_is_clearly_slower_ends_after_a_few_steps():
    assert steps_until_the_end(0.3, slow_us=200_000) == 10
    assert steps_until_the_end(0.3, slow_us=400_000) == steps_until_the_end(0.3) == 17


class FakeCuda:
    """A GPU whose events cost the CPU some time, and whose clock is that of the CPU."""

    def __init__(self, clock, event_s):
        self.clock, self.event_s, self.events, self.capturing = clock, event_s, 0, False

    def is_initialized(self):
        return True

    def is_current_stream_capturing(self):
        return self.capturing

    def synchronize(self):
        pass

    def Event(self, enable_timing):
        return FakeEvent(self)


class FakeEvent:
    def __init__(self, cuda):
        self.cuda = cuda

    def record(self):
        self.cuda.events += 1
        self.cuda.clock[0] += self.cuda.event_s
        self.at = self.cuda.clock[0]

    def elapsed_time(self, other):
        return (other.at - self.at) * 1e3


def measured_on_a_gpu(step_s, event_s=25e-6, capture_at=None):
    """Return the measured steps (µs), and how many events were recorded."""
    clock = [0.0]
    cuda = FakeCuda(clock, event_s)
    return measuring_until_the_end(step_s, clock, cuda, capture_at, most=60).finish(), cuda.events


def test_short_steps_on_a_gpu_share_an_event():
    """An event of 25 µs for each step of 50 µs would make it half as long again."""
    steps, events = measured_on_a_gpu(50e-6)
    assert max(steps) < 51 and len(steps) > 1900 and 45 * events <= len(steps)
    steps, events = measured_on_a_gpu(10e-3)
    assert set(map(round, steps)) == {10_025} and events == len(steps) + 1


def test_short_steps_are_measured_for_a_tenth_of_a_second():
    """So many steps as a measurement needs may be over before a GPU's clocks are up."""
    steps, _ = measured_on_a_gpu(20e-6, event_s=0)
    assert sum(steps) == pytest.approx(100_000, rel=0.02)


def test_steps_are_timed_by_the_cpu_if_a_graph_is_captured():
    steps, _ = measured_on_a_gpu(10e-3, capture_at=20)
    assert len(steps) == 60 and max(steps) < 10_100


def without_others(busy_s, helpers, marks, own):
    """Return the steps without others, where the CPUs were busy for so long, and helpers had them for so long (s).

    own: (number of the mark, (seconds with a CPU, seconds of waiting for one)).
    """
    spec = importlib.util.spec_from_file_location("contention", ROOT / "tracereader/run/inside/contention.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    one = module.Contention()
    last = own[-1][1][0]
    states = iter([(0.0, 0.0, dict.fromkeys(helpers, 0.0)), (busy_s, last, helpers)])
    one._state = lambda: next(states)
    one.begin()
    return one.without_others(marks, own)


def test_what_other_programs_cost_is_left_out_of_a_step():
    """A step of 1 s computes for 0.4 s and waits for a CPU for 0.6 s. All, half or none of that is for others."""
    step = [0.0, 1.0], [(0, (0.0, 0.0)), (1, (0.4, 0.6))]
    assert without_others(2.0, {}, *step) == [pytest.approx(0.4)]
    assert without_others(2.0, {"worker": 0.8}, *step) == [pytest.approx(0.7)]
    assert without_others(0.4, {}, *step) == [pytest.approx(1.0)]


def test_what_was_waited_in_several_steps_is_left_out_of_the_longest_ones():
    """The times of the thread are taken after four steps, in which it waited for 6 s."""
    marks = [0.0, 1.0, 6.0, 7.0, 9.0]
    assert without_others(10.0, {}, marks, [(0, (0.0, 0.0)), (4, (3.0, 5.0))]) == pytest.approx([1, 1, 1, 1])
    assert without_others(10.0, {}, marks, [(0, (0.0, 0.0)), (4, (3.0, 6.0))]) == pytest.approx([0.75] * 4)
    assert without_others(10.0, {}, marks, [(0, (0.0, 0.0)), (4, (3.0, 2.0))]) == pytest.approx([1, 3, 1, 2])


def test_sleeping_beside_delayed_helpers_stays():
    """A step sleeps for 0.8 s. A helper that others delay says nothing of that."""
    step = [0.0, 1.0], [(0, (0.0, 0.0)), (1, (0.2, 0.0))]
    assert without_others(200.0, {"helper": 0.01}, *step) == [pytest.approx(1.0)]


# Where an object was made.

LIBRARY = """
def train(where):
    return where()
"""
PROGRAM = """
import functools, importlib.util, json, sys, types
sys.path.insert(0, sys.argv[2])
import library
spec = importlib.util.spec_from_file_location("changes", sys.argv[1])
changes = importlib.util.module_from_spec(spec)
spec.loader.exec_module(changes)
torch = types.SimpleNamespace(__file__="/nonexistent/torch/__init__.py")
print(json.dumps(library.train(lambda: changes.where(torch))))
print(json.dumps(library.train(functools.partial(changes.where, torch))))
"""


@pytest.mark.parametrize("folder", ("site-packages", "checkout"))
def test_a_line_is_the_programs_own_also_where_a_library_makes_the_object(tmp_path, folder):
    (tmp_path / "own").mkdir()
    (tmp_path / folder).mkdir()
    (tmp_path / folder / "library.py").write_text(LIBRARY)
    script = tmp_path / "own" / "train.py"
    script.write_text(PROGRAM)
    inside = ROOT / "tracereader" / "run" / "inside" / "changes.py"
    ran = subprocess.run(
        [sys.executable, script, inside, tmp_path / folder],
        capture_output=True,
        text=True,
        check=True,
        cwd=script.parent,
    )
    last = len(PROGRAM.splitlines())
    nearest, found = map(json.loads, ran.stdout.splitlines())
    library = "library.py:3" if folder == "site-packages" else f"{tmp_path / folder}/library.py:3"
    assert nearest["line"] == f"train.py:{last - 1}"
    assert found == {"line": f"train.py:{last}", "through": library}


def test_what_the_trainer_makes_is_kept_by_its_arguments():
    place = {"line": "train.py:30", "through": "transformers/trainer.py:1041", "parameters": 5, "name": "Bert"}
    seen = Seen(modules=(place,), loaders=(place,), workers=8)
    by_key = {one.key: one for one in all_candidates()}
    argument = "dataloader_num_workers=8, dataloader_persistent_workers=True"
    assert (
        by_key["workers"].to_keep(seen) == f"TrainingArguments(…, {argument}) of the Trainer that runs at train.py:30"
    )
    kept = "model.compile() before its call at train.py:20 (the model is a Net)"
    assert by_key["compile"].to_keep(Seen(modules=(MODEL,))) == kept


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
for x, y in DataLoader(Photos(), batch_size=4, shuffle=True):
    loss = torch.nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


@pytest.fixture
def scratch():
    """Return a folder for temporary files, with a short path. It must be empty when try-changes has ended."""
    with tempfile.TemporaryDirectory(prefix="t") as folder:
        yield Path(folder)


def start(flags, program, tmp_path, scratch, **more):
    """Start try-changes in tmp_path."""
    own = [sys.executable, "-m", "tracereader.run.trying", *flags, "--", *map(str, program)]
    environment = os.environ | {"TMPDIR": str(scratch), "OMP_NUM_THREADS": "1"}
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


def test_a_loader_that_sleeps_is_fixed_by_workers(tmp_path, scratch):
    (tmp_path / "train.py").write_text(SLEEPER)
    flags = ["--json", "--only", "workers"]
    ran = start(flags, [sys.executable, "train.py"], tmp_path, scratch)
    printed, said = ran.communicate()
    assert ran.returncode == 0, said
    found = json.loads(printed)
    (workers,) = found["changes"]
    assert workers["changes"] == ["workers"] and workers["verdict"] == "helps" and workers["saves"] > 0.6
    assert workers["results"]["kind"] == "same"
    assert found["keep"] == {"workers": "DataLoader(…, num_workers=4, persistent_workers=True) at train.py:16"}
    assert "stays hidden" not in printed + said
    assert not list(scratch.iterdir())
    assert not processes_with(str(tmp_path))


def test_a_program_that_hangs_is_ended_with_all_its_processes(tmp_path, scratch):
    """Also a process that left its session, and a program that ignores SIGTERM."""
    mark = f"{86400 + os.getpid()}.125"
    (tmp_path / "hangs.py").write_text(
        "import signal, subprocess, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        f"subprocess.Popen(['sleep', '{mark}'], start_new_session=True)\n"
        "print('it waits for a server', flush=True)\n"
        "time.sleep(1000)\n"
    )
    ran = start(["--minutes", "0.1"], [sys.executable, "hangs.py"], tmp_path, scratch)
    printed, said = ran.communicate()
    assert ran.returncode == 1 and not printed
    last = said.splitlines()[-1]
    assert "the program as it is could not be measured: no result after" in last
    log = Path(re.search(r"its output is in (\S+)", last)[1])
    assert log.read_text() == "it waits for a server\n"
    assert list(scratch.iterdir()) == [log]
    assert not processes_with(mark)


@pytest.mark.parametrize(("number", "status"), ((signal.SIGINT, 130), (signal.SIGTERM, 143)))
def test_a_signal_ends_everything(tmp_path, scratch, number, status):
    mark = f"{86400 + os.getpid()}.25{number}"
    (tmp_path / "waits.py").write_text(f"import subprocess\nsubprocess.run(['sleep', '{mark}'])\n")
    ran = start([], [sys.executable, "waits.py"], tmp_path, scratch)
    wait_for(lambda: processes_with(mark))
    ran.send_signal(number)
    ran.communicate()
    assert ran.returncode == status
    assert not processes_with(mark) and not list(scratch.iterdir())


WRITER = """
import atexit, tempfile, torch
atexit.register(lambda: print("at exit", file=open("exit.txt", "a")))
folder = tempfile.TemporaryDirectory(prefix="mine-", dir=".")
log = open("log.txt", "a")
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
log.write("first\\n")
try:
    while True:
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
finally:
    log.write("last\\n")
"""


def test_a_program_cleans_up_at_its_end_and_its_open_files_are_written(tmp_path, scratch):
    (tmp_path / "train.py").write_text(WRITER)
    flags = ["--only", "tf32"]
    ran = start(flags, [sys.executable, "train.py"], tmp_path, scratch)
    _, said = ran.communicate()
    assert ran.returncode == 0, said
    assert (tmp_path / "exit.txt").read_text() == "at exit\n" * 2
    assert (tmp_path / "log.txt").read_text() == "first\nlast\n" * 2
    assert sorted(one.name for one in tmp_path.iterdir()) == ["exit.txt", "log.txt", "train.py"]


def test_a_program_without_torch_is_told_so(tmp_path, scratch):
    ran = start([], [sys.executable, "-c", "print(1)"], tmp_path, scratch)
    _, said = ran.communicate()
    assert ran.returncode == 1 and "no process of it imported torch" in said.splitlines()[-1]


def test_the_reason_of_a_failure_is_its_last_error(tmp_path, scratch):
    ran = start([], [sys.executable, "-c", "raise ValueError('no such data set')"], tmp_path, scratch)
    _, said = ran.communicate()
    assert ran.returncode == 1 and "ValueError: no such data set; its output is in" in said.splitlines()[-1]


DDP = """
import torch

torch.distributed.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*[torch.nn.Linear(32, 32) for _ in range(8)]))
optimizer = torch.optim.Adam(model.parameters())
while True:
    optimizer.zero_grad()
    model(torch.randn(4, 32)).square().mean().backward()
    optimizer.step()
"""


def rows_until(ran, *titles):
    """Interrupt try-changes when each of these changes was measured, and return its document.

    The time that a run takes does not matter then: an end after so many minutes would come before a result on a machine
    that is slow enough.
    """
    missing, said = set(titles), []
    while missing:
        line = ran.stderr.readline()
        assert line, "".join(said)
        said.append(line)
        measured = re.match(r"try-changes: (.+): \S+ (?:µs|ms|s) a step", line)
        missing.discard(measured and measured[1])
    ran.send_signal(signal.SIGINT)
    printed, rest = ran.communicate()
    assert ran.returncode == 130, "".join(said) + rest
    return json.loads(printed)


@pytest.mark.exhaustive
def test_ranks_end_together(tmp_path, scratch):
    (tmp_path / "ranks.py").write_text(DDP)
    launcher = shutil.which("torchrun", path=str(Path(sys.executable).parent))
    flags = ["--json", "--only", "fused_optimizer"]
    ran = start(flags, [launcher, "--standalone", "--nproc-per-node", "2", "ranks.py"], tmp_path, scratch)
    found = rows_until(ran, "fused optimizer")
    assert {one["changes"][0] for one in found["changes"]} == {"fused_optimizer"}
    assert all(one["results"]["kind"] in ("same", "within") for one in found["changes"])
    assert not processes_with(str(tmp_path)) and not processes_with("ranks.py")
    assert not list(scratch.iterdir())


WAITS = """
import time, torch
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
while True:
    time.sleep(0.05)
    optimizer.zero_grad()
    model(torch.randn(4, 8)).square().mean().backward()
    optimizer.step()
"""


@pytest.mark.exhaustive
def test_nothing_helps_a_program_that_waits_for_something_else(tmp_path, scratch):
    (tmp_path / "train.py").write_text(WAITS)
    flags = ["--json", "--only", "fused_optimizer,gc_freeze"]
    ran = start(flags, [sys.executable, "train.py"], tmp_path, scratch)
    found = rows_until(ran, "fused optimizer", "gc.freeze()")
    assert found["together"] == [] and found["keep"] == {}
    assert not [one for one in (*found["changes"], *found["several"]) if one["verdict"] == "helps"]
    assert not list(scratch.iterdir())


CHECKPOINTED = """
import torch
from torch.utils.checkpoint import checkpoint

model = torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(8)])
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, foreach=False)
while True:
    x = torch.randn(256, 256)
    for part in model:
        x = checkpoint(part, x, use_reentrant=False).relu()
    x.square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.exhaustive
def test_a_checkpointed_program_gives_the_same_losses_without_checkpoints(tmp_path, scratch):
    (tmp_path / "train.py").write_text(CHECKPOINTED)
    flags = ["--json", "--only", "no_checkpoint"]
    ran = start(flags, [sys.executable, "train.py"], tmp_path, scratch)
    found = rows_until(ran, "no checkpointing")
    assert {one["changes"][0] for one in found["changes"]} == {*flags[-1].split(",")}
    assert all(one["results"]["kind"] in ("same", "within") for one in [*found["changes"], *found["several"]])
    assert not list(scratch.iterdir())


@pytest.mark.gpu
def test_a_program_becomes_faster_on_a_gpu(tmp_path, scratch):
    """The ViT's inference took 4.25 ms on an H100, and 1.95 with both changes. Few runs may not be beyond the noise."""
    flags = ["--json", "--minutes", "5", "--only", "compile_reduce_overhead,tf32"]
    ran = start(flags, [sys.executable, ROOT / "benchmarks/programs/vit.py"], tmp_path, scratch)
    printed, said = ran.communicate()
    assert ran.returncode == 0, said
    found = json.loads(printed)
    (together,) = [one for one in (*found["changes"], *found["several"]) if one["changes"] == found["together"]]
    assert together["saves"] > 0.3, said
    assert together["results"]["kind"] in ("same", "within")
    assert not list(scratch.iterdir())
