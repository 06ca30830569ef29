"""The quality of a recording: no claim goes beyond what it records. Figures are recomputed from raw events."""

import gzip
import json
from pathlib import Path

import pytest
from msgspec import structs
from raw_events import event

from tracereader import cli
from tracereader.changes.catalogue import opportunities
from tracereader.figures import Summary, summarize
from tracereader.replay import Reason, Refused
from tracereader.trace import Trace, read

RECORDED = Path(__file__).parent / "traces/quality"


def raw(name: str) -> list[dict]:
    with gzip.open(RECORDED / f"{name}.json.gz") as file:
        return [one for one in json.load(file)["traceEvents"] if one.get("ph") == "X"]


def measured(path: Path) -> tuple[Trace, Summary]:
    trace = read(path)
    return trace, summarize(trace)


def changes(path: Path) -> dict:
    found = opportunities(*measured(path))
    return {} if isinstance(found, Refused) else {one.change: one for one in found}


def shown(capsys, *arguments: object) -> str:
    cli.main([*map(str, arguments)])
    return " ".join(capsys.readouterr().out.split())


@pytest.fixture
def written(tmp_path):
    def write(events):
        (tmp_path / "made.json").write_text(json.dumps({"traceEvents": list(events)}))
        return tmp_path / "made.json"

    return write


class Loop:
    """A synthetic loop: each step launches kernels and waits for the last one."""

    def __init__(self):
        self.events, self.at, self.number, self.gpu_free = [], 0.0, 0, 0.0

    def kernel(self, us=100.0, call_us=5.0, recorded=True, name="k", op=True):
        """Launch a kernel in an op of its own."""
        self.number += 1
        if op:
            self.events.append(event("aten::mm", "cpu_op", self.at, call_us + 2))
        self.events.append(event("cudaLaunchKernel", "cuda_runtime", self.at + 1, call_us, correlation=self.number))
        start = max(self.at + 1 + call_us, self.gpu_free)
        if recorded:
            ids = {"correlation": self.number, "device": 0, "stream": 7}
            self.events.append(event(name, "kernel", start, us, 7, **ids))
        self.gpu_free = start + us
        self.at += call_us + 3

    def wait(self):
        self.number += 1
        end = max(self.at + 2, self.gpu_free + 1)
        args = {"correlation": self.number}
        self.events.append(event("cudaStreamSynchronize", "cuda_runtime", self.at, end - self.at, **args))
        self.at = end + 1

    def step(self, number, kernels=20, pause_us=0.0, **kernel):
        begin = self.at
        self.at += pause_us
        for _ in range(kernels):
            self.kernel(**kernel)
        self.wait()
        self.events.append(event(f"ProfilerStep#{number}", "user_annotation", begin, self.at - begin))


def test_steps_with_lost_gpu_records_are_left_out(capsys):
    path = RECORDED / "04_records_dropped_first_iters.json.gz"
    events = raw("04_records_dropped_first_iters")
    known = {one["args"]["correlation"] for one in events if one["cat"] == "kernel"}
    launches = [one for one in events if one["name"] == "cudaLaunchKernel"]
    lost = [one for one in launches if one["args"]["correlation"] not in known]
    marks = {one["name"]: (one["ts"], one["ts"] + one["dur"]) for one in events if "ProfilerStep" in one["name"]}
    broken = {name for name, (start, end) in marks.items() if any(start <= one["ts"] < end for one in lost)}
    trace, summary = measured(path)
    assert (summary.recording.lost, summary.recording.launches) == (len(lost), len(launches)) == (80, 200)
    assert set(summary.recording.left_out) == broken
    assert {step.name for step in trace.steps} == marks.keys() - broken
    assert all(step.launches == 20 for step in summary.steps)
    assert "80 of the recording's 200 launch calls have no GPU record" in shown(capsys, path)


def test_nothing_is_concluded_if_every_step_has_lost_records(capsys):
    path = RECORDED / "27_graph_replays_lost.json.gz"
    trace, summary = measured(path)
    assert (summary.waits_for, summary.steady, summary.gpu, summary.idle_in) == ("incomplete", None, None, {})
    assert opportunities(trace, summary) == Refused(Reason.INCOMPLETE)
    assert [(one.launches, one.gpu_idle_share) for one in summary.steps] == [(20, None)]
    said = shown(capsys, path)
    assert "18 of 20 launch calls have no GPU record" in said
    assert "idle 9" not in said and "saves" not in said.replace("saving", "")
    document = json.loads(shown(capsys, path, "--json=all"))
    assert (document["recorded_step_us"], document["gpu"], document["opportunities"]) == (None, None, [])
    assert document["recording"]["lost_calls"] == {"cudaGraphLaunch": [18, 20]}


def test_a_program_whose_gpu_records_are_all_missing_is_no_cpu_program(written, capsys):
    loop = Loop()
    for number in range(3):
        loop.step(number, recorded=False)
    said = shown(capsys, written(loop.events))
    assert "GPU records are missing" in said and "60 of 60 launch calls" in said and "CPU only" not in said


@pytest.mark.parametrize("lost", [(0,), (5,), (9,), (0, 1, 2), (4, 5)])
def test_the_longest_run_of_complete_steps_counts(written, lost):
    loop = Loop()
    for number in range(10):
        loop.step(number, recorded=number not in lost)
    trace, summary = measured(written(loop.events))
    runs = "".join("-" if number in lost else str(number) for number in range(10)).split("-")
    assert [step.number for step in trace.steps] == [f"#{number}" for number in max(runs, key=len)]
    assert len(summary.recording.left_out) == 10 - len(trace.steps)
    assert summary.waits_for not in ("incomplete", "overhead")


def test_launches_during_a_capture_are_not_lost(written):
    loop = Loop()
    loop.step(0)
    loop.events.append(event("cudaStreamBeginCapture", "cuda_runtime", loop.at, 1))
    begin = loop.at
    loop.at += 2
    for _ in range(5):
        loop.kernel(recorded=False)
    loop.events.append(event("cudaStreamEndCapture", "cuda_runtime", loop.at, 1))
    loop.gpu_free = begin
    loop.at += 2
    loop.step(1)
    quality = read(written(loop.events)).quality
    assert (quality.launches, quality.lost) == (40, 0)


def test_an_activity_that_ends_after_a_later_one_of_its_stream_ends_when_the_next_one_starts(capsys):
    path = RECORDED / "05_rocm_dur_overflow.json.gz"
    kernels = sorted(
        (one["ts"], one["ts"] + one["dur"]) for one in raw("05_rocm_dur_overflow") if one["cat"] == "kernel"
    )
    clipped, taken, right = 0, 0.0, []
    for place, (start, end) in enumerate(kernels):
        if any(later_end + 100 < end for _, later_end in kernels[place + 1 :]):
            clipped, taken, end = clipped + 1, taken + end - kernels[place + 1][0], kernels[place + 1][0]
        right.append((start, end))
    _, summary = measured(path)
    assert (summary.recording.clipped, summary.recording.clipped_us) == (clipped, pytest.approx(taken)) == (4, 240_000)
    assert summary.families[0].us == pytest.approx(sum(end - start for start, end in right))
    assert 0.55 < summary.busy_share < 0.65
    assert "recorded as ending after a later one" in shown(capsys, path)


def test_a_streams_last_activity_ends_before_the_device_has_been_waited_for(written):
    loop = Loop()
    loop.step(0)
    events = [one | {"name": "cudaDeviceSynchronize"} if "Synchronize" in one["name"] else one for one in loop.events]
    last = max((one for one in events if one["cat"] == "kernel"), key=lambda one: one["ts"])
    (wait,) = [one for one in events if one["name"] == "cudaDeviceSynchronize"]
    overflowed = [one | {"dur": 10**6} if one is last else one for one in events]
    trace = read(written(overflowed))
    assert trace.quality.clipped == 1
    assert max(one.end for one in trace.work) == pytest.approx((wait["ts"] + wait["dur"] - trace.zero_us) * 1e3, abs=1)


def test_overlapping_activities_that_end_in_order_stay_as_they_are(written):
    """Programmatic dependent launch starts a kernel before the one before it has ended."""
    loop = Loop()
    loop.step(0)
    events = [one | {"dur": one["dur"] + 50} if one["cat"] == "kernel" else one for one in loop.events]
    trace = read(written(events))
    assert trace.quality.clipped == 0
    assert {one.us for one in trace.work} == {150}


@pytest.mark.parametrize("name", ["cold_one_step", "cold_start_cuda", "cold_compile", "lazy_late"])
def test_a_cold_step_is_told_to_warm_up_first(name):
    path = RECORDED / f"{name}.json.gz"
    trace, summary = measured(path)
    first, *others = opportunities(trace, summary)
    assert (first.change, first.step_us) == ("warm_up", summary.chosen.cpu_us)
    assert first.saves_us > first.step_us / 2
    # The other changes are those of the step without its first calls.
    assert all(one.step_us == pytest.approx(summary.recorded_step_us) for one in others)
    assert summary.recorded_step_us < summary.chosen.cpu_us / 2


def test_the_first_calls_of_a_cold_step_are_those_that_take_longest():
    """On an H100 the first product, the first layer norm and others took 1.7 to 147 ms from op to launch."""
    events = raw("cold_one_step")
    product = min((one for one in events if one["name"] == "aten::addmm"), key=lambda one: one["ts"])
    launch = min(
        (
            one
            for one in events
            if one["cat"] == "cuda_driver" and one["ts"] > product["ts"] and "Launch" in one["name"]
        ),
        key=lambda one: one["ts"],
    )
    trace = read(RECORDED / "cold_one_step.json.gz")
    zero = trace.zero_us
    spans = [(one.start / 1e3 + zero, one.end / 1e3 + zero) for one in trace.quality.cold]
    took = launch["ts"] + launch["dur"] - product["ts"]
    assert took > 100_000
    assert any(start <= product["ts"] + 1 and end >= launch["ts"] + launch["dur"] - 1 for start, end in spans)


@pytest.mark.parametrize("loading_us", [200.0, 1_000.0, 4_000.0])
def test_warming_up_stands_where_the_time_that_it_saves_belongs(loading_us, tmp_path, capsys):
    loop, path = Loop(), tmp_path / "made.json"
    loop.events.append(event("cuModuleLoadData", "cuda_driver", 2, loading_us))
    loop.step(0, kernels=400, us=1.0, pause_us=loading_us + 4)
    path.write_text(json.dumps({"traceEvents": loop.events, "unprofiled_step_us": 2_500.0}))
    found = changes(path)
    saved = {name: one.saves_us if name == "warm_up" else one.likely_share * 2_500 for name, one in found.items()}
    assert saved["warm_up"] == loading_us
    assert list(saved) == sorted(saved, key=saved.get, reverse=True)
    # Its time is of the recorded step, which it alone shortens.
    said = shown(capsys, path, "--all")
    took_ms = (loop.events[-1]["dur"] - loading_us) / 1e3
    assert "unprofiled step, ms" in said
    assert f"warm up, then record again {took_ms + loading_us / 1e3:.2f} -> {took_ms:.2f} recorded" in said
    assert "2.50 -> 0.42" in said and "2.50 -> 0.42 recorded" not in said


def test_a_warm_step_has_no_cold_time(written):
    loop = Loop()
    for number in range(4):
        loop.step(number)
    _, summary = measured(written(loop.events))
    assert summary.recording.cold_us == {}
    assert "warm_up" not in changes(written(loop.events))


def test_a_call_that_is_as_slow_in_each_step_is_not_cold(written):
    """cuDNN plans attention anew for each new shape, with a kernel of another name."""
    loop = Loop()
    for number in range(2):
        begin = loop.at
        loop.events.append(event("aten::attention", "cpu_op", loop.at, 50_000))
        loop.at += 49_000
        loop.kernel(name=f"planned_{number}", op=False)
        loop.at = begin + 50_001
        for _ in range(40):
            loop.kernel()
        loop.wait()
        loop.events.append(event(f"ProfilerStep#{number}", "user_annotation", begin, loop.at - begin))
    assert read(written(loop.events)).quality.cold == ()


def test_waiting_for_work_from_before_the_recording_is_no_time_of_the_step(capsys):
    """The recording began while the GPU still ran products that it had been given before."""
    path = RECORDED / "earlier_hidden.json.gz"
    events = raw("earlier_hidden")
    calls = {one["args"]["correlation"] for one in events if one["cat"].startswith("cuda_")}
    gpu = [one for one in events if one["cat"] in ("kernel", "gpu_memcpy", "gpu_memset")]
    own = [one for one in gpu if one["args"]["correlation"] in calls]
    earlier = [one for one in gpu if one["args"]["correlation"] not in calls]
    launch = min(one["ts"] for one in events if "Launch" in one["name"] and one["cat"].startswith("cuda_"))
    waits = [one for one in events if "Synchronize" in one["name"] and one["ts"] < launch]
    trace, summary = measured(path)
    assert len(trace.steps[0].work) == len(own)
    assert summary.recording.earlier_us == pytest.approx(sum(one["dur"] for one in waits), abs=1)
    begin, end = min(one["ts"] for one in own), max(one["ts"] + one["dur"] for one in own)
    assert summary.steady_us == pytest.approx(end - begin, abs=0.01)
    assert summary.recorded_step_us < 5_000 < sum(one["dur"] for one in earlier)
    assert "for GPU work from before it" in shown(capsys, path)


def test_a_recording_without_steps_is_judged_from_its_first_to_its_last_activity(capsys):
    """Replays of a CUDA graph, as servers record them: the recording begins and ends at any time."""
    path = RECORDED / "graph_replays.json.gz"
    events = raw("graph_replays")
    calls = {one["args"]["correlation"] for one in events if one["name"] == "cudaGraphLaunch"}
    own = sorted(
        (one["ts"], one["ts"] + one["dur"]) for one in events
        if one["cat"] in ("kernel", "gpu_memset") and one["args"]["correlation"] in calls
    )  # fmt: skip
    busy, reached = 0.0, own[0][0]
    for start, end in own:
        busy += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    _, summary = measured(path)
    assert summary.busy_share == pytest.approx(busy / (reached - own[0][0]), abs=1e-4)
    assert summary.waits_for not in ("overhead", "gpu-side")
    assert summary.recording.before_us > 50_000 < summary.recording.after_us
    said = shown(capsys, path)
    assert "before its first GPU activity" in said and "idle 4" not in said and "idle 9" not in said


def test_steps_of_two_kinds_are_named_and_their_mean_is_the_steps_time(capsys):
    path = RECORDED / "01_loader_every_4th.json.gz"
    events = raw("01_loader_every_4th")
    marks = sorted((one for one in events if "ProfilerStep" in one["name"]), key=lambda one: one["ts"])
    mean = (marks[-1]["ts"] + marks[-1]["dur"] - marks[0]["ts"]) / len(marks)
    loading = sum(one["dur"] for one in events if "DataLoader" in one["name"]) / len(marks)
    trace, summary = measured(path)
    assert summary.recorded_step_us == pytest.approx(mean, rel=1e-3)
    assert (summary.recording.mixed.longer, len(summary.steps)) == (3, 12)
    assert summary.training.loading.us == pytest.approx(loading, rel=1e-3)
    first = opportunities(trace, summary)[0]
    assert (first.change, first.step_us) == ("data_loader", pytest.approx(mean, rel=1e-2))
    assert first.saves_us == pytest.approx(loading, rel=0.02)
    said = shown(capsys, path)
    assert "3 of 12 steps take 1,098.4 ms, and the others 98.6 ms" in said
    assert "profiler has just started" not in said


def test_a_single_pause_is_an_outlier_and_no_regime(written, capsys):
    loop = Loop()
    for number in range(20):
        loop.step(number, pause_us=300_000 if number == 12 else 0)
    path = written(loop.events)
    _, summary = measured(path)
    assert summary.recording.outlier == "ProfilerStep#12"
    assert summary.recording.mixed is None
    assert summary.waits_for == "gpu"
    assert summary.recorded_step_us < 3_000
    assert "step #12 takes 302" in shown(capsys, path)


def test_steps_that_only_the_cpu_runs_ahead_in_are_of_one_kind(written):
    """The CPU's steps differ where the launch queue is full, and the GPU's do not."""
    events, correlation = [], 0
    for number in range(12):
        cpu_us = 2_000 if number > 5 else 200
        begin = sum(2_000 if earlier > 5 else 200 for earlier in range(number))
        events.append(event(f"ProfilerStep#{number}", "user_annotation", begin, cpu_us))
        for place in range(10):
            correlation += 1
            at = begin + place * cpu_us / 10
            events.append(event("cudaLaunchKernel", "cuda_runtime", at, 5, correlation=correlation))
            ids = {"correlation": correlation, "device": 0, "stream": 7}
            events.append(event("k", "kernel", 10 + (number * 10 + place) * 150, 149, 7, **ids))
    assert read(written(events)).quality.mixed is None


def test_gpus_that_take_turns_wait_for_each_other_and_not_for_launches(capsys):
    path = RECORDED / "20_device_map_auto_4gpus.json.gz"
    events = [one for one in raw("20_device_map_auto_4gpus") if one["cat"] in ("kernel", "gpu_memcpy")]
    trace, summary = measured(path)
    work = sorted({one.start for step in trace.steps for one in step.work})
    begin = trace.zero_us + work[0] / 1e3
    end = trace.zero_us + trace.steps[-1].work[0].start / 1e3
    for device, share in summary.busy_by_device.items():
        busy = sum(
            min(one["ts"] + one["dur"], end) - max(one["ts"], begin) for one in events
            if str(one["args"]["device"]) == device and one["ts"] < end and one["ts"] + one["dur"] > begin
        )  # fmt: skip
        assert share == pytest.approx(busy / (end - begin), abs=1e-3)
    assert summary.waits_for == "turns"
    assert summary.steady.idle_elsewhere_us > 0.99 * summary.steady.idle_us
    said = shown(capsys, path)
    assert (
        "another GPU of the process works" in said and "waiting for CPU launches" not in said.split("where the step")[0]
    )


def test_a_replay_that_is_off_by_up_to_15_percent_gives_uncertain_advice(written):
    loop = Loop()
    for number in range(5):
        loop.step(number, pause_us=2_000)
    trace, summary = measured(written(loop.events))
    sure = opportunities(trace, summary)
    assert sure and all(one.replayed is None and "uncertain" not in one.evidence for one in sure)
    for off in (0.9, 1.08):
        other = structs.replace(summary, recorded_step_us=summary.recorded_step_us / off)
        found = opportunities(trace, other)
        assert found and all(one.replayed == pytest.approx(off, rel=0.02) for one in found)
        assert all(f"takes {one.replayed:.0%} of the recorded time" in one.evidence for one in found)
        assert all(one.saves_us / one.step_us > abs(one.replayed - 1) for one in found), "the replay shows no less"
    refused = opportunities(trace, structs.replace(summary, recorded_step_us=summary.recorded_step_us / 1.2))
    assert (refused.reason, refused.off) == (Reason.NOT_REPRODUCED, pytest.approx(1.2, rel=0.02))


def with_an_optimizer(every: int, count: int) -> Loop:
    """Return a loop in which every so manyth step has 60 kernels more."""
    loop = Loop()
    for number in range(count):
        loop.step(number, kernels=80 if number % every == every - 1 else 20)
    return loop


@pytest.mark.parametrize("count", [10, 20])
def test_steps_of_two_kinds_may_launch_different_amounts_of_work(written, capsys, count):
    """With gradient accumulation, each step with the optimizer is longer, and no work overlaps the next step's."""
    loop = with_an_optimizer(5, count)
    marks = [one for one in loop.events if "ProfilerStep" in one["name"]]
    _, summary = measured(written(loop.events))
    assert summary.recording.mixed.longer == count // 5
    assert summary.recorded_step_us == pytest.approx(sum(one["dur"] for one in marks) / count, rel=0.01)
    assert summary.chosen.launches == 20
    assert "overlap" not in shown(capsys, written(loop.events))


@pytest.mark.parametrize("every", [2, 5, 10])
def test_a_pause_at_the_end_of_the_last_step_counts_as_those_of_other_steps(written, every):
    loop = Loop()
    for number in range(20):
        loop.step(number)
        if number % every == every - 1:
            loop.events[-1]["dur"] += 50_000
            loop.at += 50_000
    _, summary = measured(written(loop.events))
    assert summary.recording.mixed.longer == 20 // every
    assert summary.recording.outlier is None


def test_an_outlier_is_not_called_longer_than_another_step_that_is_as_long(written, capsys):
    """If the CPU is far ahead, the second pause of the same length does not delay the GPU."""
    loop = Loop()
    for number in range(20):
        begin, loop.at = loop.at, loop.at + (80_000 if number in (3, 14) else 0)
        for _ in range(30):
            loop.kernel(us=400)
        loop.events.append(event(f"ProfilerStep#{number}", "user_annotation", begin, loop.at - begin))
    loop.wait()
    said = shown(capsys, written(loop.events))
    assert "step #3 takes 80.2 ms on the CPU, where the median step takes 240.0 µs" in said
    assert "all others" not in said


@pytest.mark.parametrize("call", ["cudaDeviceSynchronize", "cudaEventSynchronize"])
@pytest.mark.parametrize("steps", [1, 6])
def test_a_wait_for_recorded_earlier_work_is_no_cold_start_and_hides_no_saving(written, capsys, call, steps):
    loop = Loop()
    ids = {"device": 0, "stream": 7}
    for number in range(40):
        loop.events.append(event("earlier", "kernel", 500 * number, 495, 7, correlation=90_000 + number, **ids))
    begin, loop.at, loop.gpu_free = 1_000, 20_000, 20_000
    loop.events.append(event(call, "cuda_runtime", begin, 18_999, correlation=80_000))
    for number in range(steps):
        loop.step(number, us=60)
    mark = next(one for one in loop.events if one["name"] == "ProfilerStep#0")
    mark["dur"], mark["ts"] = mark["dur"] + mark["ts"] - begin, begin
    path = written(loop.events)
    trace, summary = measured(path)
    assert not isinstance(opportunities(trace, summary), Refused)
    assert summary.recorded_step_us < 20 * 60 + 100
    said = shown(capsys, path)
    assert "cold-start" not in said and "no launch call in the trace try" not in said


def test_time_before_a_recordings_first_launched_activity_is_called_that(capsys):
    said = shown(capsys, RECORDED / "graph_replays.json.gz")
    assert "before its first GPU activity with a launch call" in said


def test_steps_with_lost_copies_are_left_out(written, capsys):
    loop = Loop()
    for number in range(6):
        loop.number += 1
        loop.events.append(event("cudaMemcpyAsync", "cuda_runtime", loop.at, 5, correlation=loop.number))
        start, loop.at = loop.at, loop.at + 6
        if number:
            ids = {"correlation": loop.number, "device": 0, "stream": 7}
            loop.events.append(event("Memcpy", "gpu_memcpy", max(start + 5, loop.gpu_free), 1, 7, **ids))
            loop.gpu_free = max(start + 5, loop.gpu_free) + 1
        loop.step(number)
        mark = loop.events[-1]
        mark["dur"], mark["ts"] = mark["dur"] + mark["ts"] - start, start
    path = written(loop.events)
    assert read(path).quality.left_out == ("ProfilerStep#0",)
    said = shown(capsys, path)
    assert "which is on #1 to #5: 1 of the recording's 6 asynchronous copy calls has no GPU record" in said


@pytest.mark.parametrize("kept", [0.99, 0.8])
def test_replays_that_lost_some_records_are_told_from_complete_ones(written, capsys, kept):
    events = raw("graph_replays")
    replays = {one["args"]["correlation"] for one in events if one["name"] == "cudaGraphLaunch"}
    numbers = iter(range(10**6))
    left = [
        one for one in events
        if one["cat"] != "kernel" or one["args"]["correlation"] not in replays or next(numbers) * 0.618034 % 1 < kept
    ]  # fmt: skip
    assert len(left) < len(events)
    path = written(left)
    assert 0 < read(path).quality.partly_lost <= len(replays)
    assert read(RECORDED / "graph_replays.json.gz").quality.partly_lost == 0
    said = shown(capsys, path, "--whole")
    assert "launch calls have fewer GPU records than another launch of the same CUDA graph" in said
    assert "idle 2" not in said and "per step" not in said.split("GPU records are missing")[0]


@pytest.mark.parametrize("waits_in", ["cudaMemcpyAsync", "cudaStreamSynchronize"])
@pytest.mark.parametrize("steps", [1, 6])
def test_reading_a_value_of_earlier_work_is_no_time_of_the_step(written, waits_in, steps):
    """The copy is queued behind the work from before the recording, and one of item()'s calls waits for it."""
    loop, ids = Loop(), {"device": 0, "stream": 7}
    for number in range(40):
        loop.events.append(event("earlier", "kernel", 500 * number, 495, 7, correlation=90_000 + number, **ids))
    late = waits_in != "cudaMemcpyAsync"
    loop.events.append(event("cudaMemcpyAsync", "cuda_runtime", 1_000, 10 if late else 19_000, correlation=80_000))
    if late:
        loop.events.append(event("cudaStreamSynchronize", "cuda_runtime", 1_015, 18_984, correlation=80_001))
    loop.events.append(event("Memcpy", "gpu_memcpy", 19_996, 1, 7, correlation=80_000, **ids))
    loop.at = loop.gpu_free = 20_001
    for number in range(steps):
        loop.step(number, us=60)
    mark = next(one for one in loop.events if one["name"] == "ProfilerStep#0")
    mark["dur"], mark["ts"] = mark["dur"] + mark["ts"] - 1_000, 1_000
    _, summary = measured(written(loop.events))
    assert summary.recording.earlier_us == pytest.approx(18_990, abs=20)
    assert summary.recorded_step_us < 20 * 60 + 100
    assert "remove_sync" not in changes(written(loop.events)) or steps > 1
