"""Traces that are odd but valid: annotations on several threads, steps of no length, a device without a number."""

import contextlib
import gzip
import json
import signal
import sys
import time
from collections import Counter
from pathlib import Path

import msgspec
import pytest
import torch
from raw_events import event
from test_later_workloads import edited

from tracereader import cli, interrupts, machine
from tracereader.figures import summarize
from tracereader.figures.gpu_work import LaunchArgs, launch_args
from tracereader.figures.hardware import peaks_of
from tracereader.figures.reading import head
from tracereader.figures.source import TraceWarning
from tracereader.findings.ranks import ms
from tracereader.findings.steps import waiting
from tracereader.trace import document, read


def launched(ts, number, device=0, tid=1):
    """Return a launch of 2 µs and its kernel of 10 µs directly after it."""
    return [
        event("cudaLaunchKernel", "cuda_runtime", ts, 2, tid, correlation=number),
        event("k", "kernel", ts + 3, 10, 7, correlation=number, device=device, stream=7),
    ]


@pytest.fixture
def written(tmp_path):
    def write(*events, **top):
        (tmp_path / "made.json").write_text(json.dumps({"traceEvents": list(events)} | top))
        return tmp_path / "made.json"

    return write


@pytest.mark.parametrize("odd", [{"ph": "?"}, {"cat": "unheard_of"}])
def test_an_unknown_phase_or_category_changes_no_other_event(written, odd):
    usual = [event("aten::add", "cpu_op", 0, 10), *launched(2, 1)]
    plain, mixed = read(written(*usual)), read(written(*usual, event("odd", "cpu_op", 4, 1) | odd))
    found = [[(op.name, op.start, op.dur) for op in trace.steps[0].walk()] for trace in (plain, mixed)]
    assert found[0] == found[1]
    assert [(one.name, one.start, one.dur) for one in mixed.work] == [("k", 5000, 10000)]


def test_events_share_the_strings_of_their_phases_and_categories(tmp_path):
    events = [one for number in range(100) for one in launched(20 * number, number)]
    (tmp_path / "t.json").write_text(json.dumps({"traceEvents": events}))
    read_events = document.load(tmp_path / "t.json", 10**9).events
    assert len({id(one.ph) for one in read_events}) == 1
    assert len({id(one.cat) for one in read_events}) == 2


def test_an_odd_argument_of_a_launch_counts_as_missing(written):
    args = {"grid": [4, 1, 1], "block": [128, 1, 1], "registers per thread": 32, "shared memory": 1024}
    kernels = [event("k", "kernel", 10 * number, 5, 7, correlation=number, **args) for number in range(3)]
    odd = event("k", "kernel", 40, 5, 7, **args | {"grid": [4, -1, 1], "shared memory": "much"})
    first, *others, last = map(launch_args, read(written(*kernels, odd)).work)
    assert first == LaunchArgs(32, 1024, None, None, (4, 1, 1), (128, 1, 1))
    assert all(one == first for one in others)
    assert last == msgspec.structs.replace(first, grid=None, shared=None)


def test_an_annotation_of_another_thread_takes_no_work_from_the_phases(written):
    """Autograd's thread runs the record_function of a backward hook during the step's backward."""
    trace = written(
        event("ProfilerStep#1", "user_annotation", 0, 300), event("forward", "user_annotation", 10, 80),
        event("backward", "user_annotation", 100, 150), event("hook", "user_annotation", 120, 5, 2),
        *launched(20, 1), *launched(110, 2, tid=2), *launched(140, 3, tid=2), *launched(160, 4, tid=2),
    )  # fmt: skip
    found = {place.name: (place.gpu_us, place.pieces) for place in summarize(read(trace)).places.by_label}
    assert found == {"forward": (10, 1), "backward": (30, 3)}


def test_the_typical_step_has_a_length(written, capsys):
    trace = written(
        event("ProfilerStep#1", "user_annotation", 0, 100), event("aten::mm", "cpu_op", 10, 50),
        event("ProfilerStep#2", "user_annotation", 100, 0), event("ProfilerStep#3", "user_annotation", 101, 0),
        event("aten::mm", "cpu_op", 101, 0), event("aten::mm", "cpu_op", 100, 0),
    )  # fmt: skip
    assert cli.main([str(trace)]) == 0
    assert summarize(read(trace)).typical_step == "ProfilerStep#1"


def test_a_device_without_a_number_is_reported(written, capsys):
    facts = {"phase": "prefill", "batch": 1, "tokens": 512, "weight_bytes": 10**9, "parameters": 10**8}
    lesson = {"script": "05_llm", "flags": {}, "facts": {"decoding": facts}}
    product = event("aten::mm", "cpu_op", 5, 20, **{
        "Input Dims": [[512, 1024], [1024, 1024]], "Input type": ["c10::BFloat16"] * 2,
    })  # fmt: skip
    launch, kernel = launched(10, 1, device="somewhere")
    kernel["name"] = "nvjet_sm90_tst_64x8_64x16_1x4_h_bz_NNT"
    trace = written(event("ProfilerStep#1", "user_annotation", 0, 100), product, launch, kernel, lesson=lesson)
    assert cli.main([str(trace), "--all"]) == 0
    assert "Prefill of one sequence" in capsys.readouterr().out


def test_an_annotation_named_launch_launches_nothing(written):
    marked = [event("ProfilerStep#1", "user_annotation", 0, 100), event("aten::mm", "cpu_op", 10, 50)]
    trace = written(*marked, event("Launch workers", "user_annotation", 5, 3))
    assert not summarize(read(trace)).source.warnings
    trace = written(*marked, event("cudaLaunchKernel", "cuda_runtime", 20, 3, correlation=1))
    assert summarize(read(trace)).source.warnings == (TraceWarning("no_gpu_records"),)


@pytest.mark.parametrize(
    ("device", "gb_s"),
    [("NVIDIA H200", 4800), ("NVIDIA H200 MIG 1g.18gb", None), ("NVIDIA GeForce RTX 5090", 1792),
     ("NVIDIA GeForce RTX 5090 Laptop GPU", None), ("NVIDIA GeForce RTX 5090 D", None),
     ("NVIDIA GeForce RTX 4090", 1008), ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
     ("NVIDIA GeForce RTX 3090 Ti", None)],
)  # fmt: skip
def test_a_device_of_another_kind_has_no_peaks(device, gb_s):
    assert (peaks_of(device) and peaks_of(device).gb_s) == gb_s


def test_cached_files_of_a_container_count_as_free_memory(tmp_path, monkeypatch):
    files = {
        "/proc/meminfo": "MemAvailable:   64000000 kB\n", "/sys/fs/cgroup/memory.max": "8000000000\n",
        "/sys/fs/cgroup/memory.current": "7800000000\n",
        "/sys/fs/cgroup/memory.stat": "anon 800000000\nfile 7000000000\ninactive_file 6000000000\n"
        "active_file 900000000\nworkingset_refault_file 5\n",
    }  # fmt: skip
    monkeypatch.setattr(machine.Path, "read_text", lambda path: files[str(path)])
    assert machine.free_memory() == 200_000_000 + 6_900_000_000
    files["/sys/fs/cgroup/memory.max"] = "max\n"
    assert machine.free_memory() == 64_000_000 * 1024


def test_launch_latency_belongs_to_the_first_launch(written):
    """If a step uses two streams, the activity that is launched first may run second."""
    trace = written(
        event("ProfilerStep#1", "user_annotation", 0, 200),
        event("cudaLaunchKernel", "cuda_runtime", 10, 2, correlation=1),
        event("late", "kernel", 60, 10, 7, correlation=1, device=0, stream=7),
        event("cudaLaunchKernel", "cuda_runtime", 20, 2, correlation=2),
        event("soon", "kernel", 30, 10, 8, correlation=2, device=0, stream=8),
    )
    (step,) = summarize(read(trace)).steps
    assert step.launch_to_start_us == 50


def test_reading_a_folder_leaves_no_file_open(tmp_path):
    (tmp_path / "x.json").mkdir()
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(3):
        assert cli.main([str(tmp_path / "x.json")]) == 2
        assert head(tmp_path / "x.json").broken
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_a_broken_reference_does_not_stop_the_report(capsys, monkeypatch, tmp_path):
    from tracereader.show import references

    trace = Path(__file__).parent.parent / "traces/reference/cpu/01_matmul_add/64_bf16_warm_eager.json.gz"
    (tmp_path / "broken.json").write_text("{")
    monkeypatch.setattr(references, "of", lambda *_: tmp_path / "broken.json")
    assert cli.main([str(trace), "--only", "predictions"]) == 0
    assert "5 more predictions are about the GPU, and this run was on the CPU" in capsys.readouterr().out


@pytest.mark.parametrize(("us", "said"), [(0, "0.0 ms"), (5e-5, "under 0.001 ms"), (49, "0.049 ms"), (50, "0.1 ms")])
def test_milliseconds_in_words(us, said):
    assert ms(us) == said


def test_a_delayed_signal_arrives_even_if_the_body_fails():
    came = []
    before = signal.signal(signal.SIGTERM, lambda *_: came.append("now"))
    try:
        with pytest.raises(ValueError), interrupts.held():
            signal.raise_signal(signal.SIGTERM)
            assert not came
            raise ValueError
    finally:
        signal.signal(signal.SIGTERM, before)
    assert came == ["now"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_during_a_finalizer_is_raised_after_it(number):
    """Python drops the exception there, so that the program would go on."""

    class Finalized:
        def __del__(self):
            signal.raise_signal(number)

    hook = sys.unraisablehook
    with handled_as_by_default(number), pytest.raises((KeyboardInterrupt, interrupts.Ended)), interrupts.raised():
        Finalized()
        time.sleep(60)
        pytest.fail("the signal was lost")
    assert sys.unraisablehook is hook


def test_other_exceptions_of_a_finalizer_are_said_as_usual(monkeypatch):
    class Finalized:
        def __del__(self):
            raise ValueError("in a finalizer")

    said = []
    monkeypatch.setattr(sys, "unraisablehook", said.append)
    with interrupts.raised():
        Finalized()
    assert len(said) == 1


@contextlib.contextmanager
def handled_as_by_default(number):
    """Answer this signal in this test, even if the tests run in a program that ignores it."""
    before = signal.signal(number, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(number, before)


def test_torchs_own_annotations_are_not_the_steps_annotation(written):
    """Optimizer.zero_grad#… comes first and contains no op, so the gap is measured from the step's start."""
    trace = written(
        event("ProfilerStep#1", "user_annotation", 0, 100),
        event("Optimizer.zero_grad#Adam.zero_grad", "user_annotation", 2, 5), event("aten::mm", "cpu_op", 30, 50),
        event("Optimizer.step#Adam.step", "user_annotation", 82, 10), event("aten::add_", "cpu_op", 83, 5),
    )  # fmt: skip
    summary = summarize(read(trace))
    assert summary.cpu.label is None and summary.steps[0].label_to_first_op_us == 30


def test_two_steps_of_one_name_stay_separate(written, capsys):
    """Two loops in one recording start to count at the same number."""
    first = [event("ProfilerStep#3", "user_annotation", 0, 50), *launched(10, 1)]
    second = [event("ProfilerStep#3", "user_annotation", 100, 400)]
    second += [one for number in range(2, 7) for one in launched(100 + 50 * number, number)]
    trace = written(*first, *second)
    summary = summarize(read(trace))
    assert summary.chosen.cpu_us == 400 and summary.chosen.launches == len(summary.gpu_work) == 5
    assert cli.main([str(trace), "--only", "short,chain"]) == 0
    said = capsys.readouterr().out
    assert "5 kernels per step" in said and said.count("cudaLaunchKernel") == 5


def test_the_typical_step_can_have_the_first_gpu_work(tmp_path):
    """The step before launched nothing, and no work is earlier, so the wait is that for the next step's launch."""
    events = [event(f"ProfilerStep#{n}", "user_annotation", 100 * n, 90) for n in (1, 2, 3)]
    for n in (2, 3):
        events.append(event("cudaLaunchKernel", "cuda_runtime", 100 * n + 10, 5, correlation=n))
        events.append(event("k", "kernel", 100 * n + 20, 50, tid=7, correlation=n, device=0, stream=7))
    file = tmp_path / "t.json"
    file.write_text(json.dumps({"traceEvents": events}))
    summary = summarize(read(file))
    assert summary.typical_step == "ProfilerStep#2"
    assert summary.idle_in == {"no recorded op or call": 40.0, "cudaLaunchKernel": 5.0}


def captured(at, count, first=100):
    """Return the capture of this many launch calls of 10 µs, which run nothing."""
    calls = ["cudaStreamBeginCapture", *["cudaLaunchKernel"] * count, "cudaStreamEndCapture"]
    return [event(name, "cuda_runtime", at + 10 * n, 8, correlation=first + n) for n, name in enumerate(calls)]


def test_the_capture_of_a_graph_launches_nothing(written, capsys):
    """One launch ran. Twenty were captured, some of them on autograd's thread."""
    step = [event("ProfilerStep#1", "user_annotation", 0, 1000), event("aten::mm", "cpu_op", 5, 50)]
    backward = event("cudaLaunchKernel", "cuda_runtime", 130, 5, tid=2, correlation=99)
    trace = written(*step, *launched(10, 1), *captured(100, 19), backward)
    summary = summarize(read(trace))
    assert (summary.captures.graphs, summary.captures.launches, summary.captures.us) == (1, 20, 208)
    assert summary.chosen.launches == 1 and summary.waits_for == "capture"
    assert cli.main([str(trace)]) == 0
    said = capsys.readouterr().out
    assert "CUDA graph capture. 20 launch calls of the step were recorded into 1 graph and ran nothing" in said
    assert "overhead-bound" not in said


def test_a_capture_without_gpu_work_gives_no_warning_of_missing_records(written, capsys):
    step = [event("ProfilerStep#1", "user_annotation", 0, 1000), event("aten::mm", "cpu_op", 5, 50)]
    summary = summarize(read(written(*step, *captured(100, 9))))
    assert summary.waits_for == "capture" and not summary.source.warnings
    summary = summarize(read(written(*step, *captured(100, 9), event("cudaLaunchKernel", "cuda_runtime", 500, 5))))
    assert summary.source.warnings == (TraceWarning("no_gpu_records"),)


def test_a_step_that_replays_a_graph_is_not_a_capture(written):
    """The first step captured the graph that the others replay."""
    steps = [event(f"ProfilerStep#{n}", "user_annotation", 1000 * n, 990) for n in (1, 2, 3)]
    summary = summarize(read(written(*steps, *captured(1100, 19), *launched(2100, 1), *launched(3100, 2))))
    assert summary.waits_for == "overhead" and summary.captures is None


def test_a_first_wait_for_unrecorded_work_is_reported(written):
    """A server's GPU is busy with earlier work when the recording begins. The CPU causes 128 µs of its idle time."""
    trace = written(
        event("aten::mm", "cpu_op", 0, 128), event("cudaLaunchKernel", "cuda_runtime", 120, 8, correlation=1),
        event("k", "kernel", 463_000, 9_000, 7, correlation=1, device=0, stream=7),
    )  # fmt: skip
    summary = summarize(read(trace))
    assert (summary.gpu.idle_not_launched_us, summary.gpu.idle_launched_us) == (128, 463_000 - 128)
    assert "probably busy with work that is not in this trace" in waiting(summary)[1]


def test_a_first_wait_for_recorded_work_is_explained(written):
    trace = written(
        event("cudaLaunchKernel", "cuda_runtime", 0, 8, correlation=1),
        event("k", "kernel", 10, 8_000, 7, correlation=1, device=0, stream=7),
        event("cudaLaunchKernel", "cuda_runtime", 20, 8, correlation=2),
        event("k", "kernel", 8_020, 1_000, 7, correlation=2, device=0, stream=7),
    )  # fmt: skip
    assert "probably busy" not in waiting(summarize(read(trace)))[1]


def test_with_several_gpus_a_wait_does_not_tell_which_gpus_work_has_ended(written, capsys):
    wait = event("cudaDeviceSynchronize", "cuda_runtime", 1, 3)
    kernel = event("alone", "kernel", 5, 10, 7, device=0, stream=7)
    for device, why in ((0, "has no launch call in the trace"), (1, "was launched before the recording began")):
        trace = written(wait, event("aten::mm", "cpu_op", 17, 200), *launched(20, 1), *launched(60, 2, device), kernel)
        assert cli.main([str(trace), "--only", "steps"]) == 0
        assert why in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("has_steps", [True, False])
@pytest.mark.parametrize(
    ("start", "stream", "waited_until", "why"),
    [
        (200, 7, None, "has no launch call in the trace"),
        (5, 7, None, "was launched before the recording began"),
        (5, 7, 16, "was launched before the recording began"),
        (5, 7, 4, "has no launch call in the trace"),  # all earlier work had ended
        (5, 9, None, "has no launch call in the trace"),  # no activity of its stream has one
    ],
)
def test_work_without_a_launch_is_left_out_of_steps_only(written, capsys, has_steps, start, stream, waited_until, why):
    """Without profiler steps, the whole trace counts as one step, without work from before the recording."""
    step = [event("ProfilerStep#1", "user_annotation", 0, 300)] * has_steps
    kernel = event("alone", "kernel", start, 10, stream, device=0, stream=stream)
    wait = [event("cudaDeviceSynchronize", "cuda_runtime", 1, waited_until - 1)] if waited_until else []
    trace = written(*step, *wait, event("aten::mm", "cpu_op", 17, 200), *launched(20, 1), kernel)
    assert cli.main([str(trace), "--only", "steps", "--only", "kernels"]) == 0
    said = capsys.readouterr().out
    (warning,) = [line for line in said.splitlines() if line.startswith("warning")]
    assert f"one GPU activity (10.0 µs) {why}, so" in warning
    is_left_out = has_steps or "before the recording" in why
    assert ("belongs to no step and no op" in warning) == ("leave it out" in warning) == is_left_out
    assert ("alone" in said) != is_left_out  # the table of names


def test_annotations_of_old_traces_are_no_ops(written):
    """torch 1.8 to 1.10 recorded annotations in the category of ops, with whole microseconds and text as threads."""
    events = []
    for number in (1, 2, 3):
        at = 1000 * number
        events += [
            event(f"ProfilerStep#{number}", "Operator", at, 900, "1"),
            event("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", "Operator", at + 10, 100, "1"),
            event("aten::mm", "Operator", at + 200, 100, "1"),
            event("cudaLaunchKernel", "Runtime", at + 210, 5, "1", correlation=number),
            event("gemm", "Kernel", at + 230, 50, "stream 7", correlation=number, device=0, stream=7),
            event("Optimizer.step#SGD.step", "Operator", at + 400, 100, "1"),
        ]
    summary = summarize(read(written(*events)))
    assert [(one.name, one.cpu_us, one.launches) for one in summary.steps] == [
        (f"ProfilerStep#{number}", 900, 1) for number in (1, 2, 3)
    ]
    assert set(summary.cpu.ops) == {"aten::mm"}
    assert "Optimizer.step#SGD.step" in {one.name for one in summary.places.by_label}
    assert summary.training.loading is not None


def test_a_single_step_does_not_include_earlier_gpu_work(written):
    """The GPU runs behind the CPU, so the first recorded step begins while the GPU still runs the step before it."""
    before = [event("earlier", "kernel", at, 90, 7, correlation=at, device=0, stream=7) for at in (0, 100, 200)]
    copy = event("Memcpy HtoD", "gpu_memcpy", 150, 20, 8, correlation=900, device=0, stream=8)
    trace = written(
        event("ProfilerStep#1", "user_annotation", 50, 100),
        event("cudaMemcpyAsync", "cuda_runtime", 55, 5, correlation=900),
        event("cudaLaunchKernel", "cuda_runtime", 60, 5, correlation=901),
        event("cudaLaunchKernel", "cuda_runtime", 70, 5, correlation=902), *before, copy,
        event("gemm", "kernel", 295, 40, 7, correlation=901, device=0, stream=7),
        event("gemm", "kernel", 340, 60, 7, correlation=902, device=0, stream=7),
    )  # fmt: skip
    summary = summarize(read(trace))
    # From the end of the earlier work, 290, to the end of the step's work, 400: gaps of 5 µs each before both kernels.
    assert (summary.steady_us, summary.steady.busy_us, summary.steady.idle_launched_us) == (110, 100, 10)
    assert summary.recorded_step_us == pytest.approx(105, abs=6)


@pytest.mark.parametrize("lead", [-1, 0.5, 1, 200])
def test_work_before_its_launch_call_is_reported(written, capsys, lead):
    """The clock of the GPU may be behind that of the CPU, and then launch latencies are wrong."""
    call = event("cudaLaunchKernel", "cuda_runtime", 500, 2, correlation=1)
    kernel = event("k", "kernel", 500 - lead, 10, 7, correlation=1, device=0, stream=7)
    trace = written(event("ProfilerStep#1", "user_annotation", 0, 900), call, kernel, *launched(600, 2))
    assert cli.main([str(trace)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert (f"1 GPU activity starts before the launch call, by up to {lead:.1f} µs" in said) == (lead >= 1)


def stepped(number, at, work=True):
    mark = event(f"ProfilerStep#{number}", "user_annotation", at, 90)
    return [mark, *(launched(at + 10, 2 * number) + launched(at + 40, 2 * number + 1) if work else [])]


def test_a_stub_does_not_halve_the_gpu_time_of_a_step(written):
    """A schedule without repeat ends with a step that holds no call."""
    summary = summarize(read(written(*stepped(1, 0), *stepped(2, 100, work=False))))
    assert summary.gpu_us == 20 and summary.recorded_step_us > 20


@pytest.mark.parametrize("flags", [[], ["--markdown"], ["--html", "-"], ["--fail-if", "step > 5%"]])
def test_a_recording_without_steps_is_not_compared_by_step(tmp_path, capsys, flags):
    steps = [one for number in (1, 2, 3) for one in stepped(number, 100 * number)]
    paths = [tmp_path / name for name in ("steps.json", "whole.json")]
    paths[0].write_text(json.dumps({"traceEvents": steps}))
    paths[1].write_text(json.dumps({"traceEvents": [one for one in steps if "Step" not in one["name"]]}))
    assert cli.main([*map(str, paths), *flags]) == (2 if "--fail-if" in flags else 0)
    said = " ".join(" ".join(capsys.readouterr()).split())
    assert "as fast" not in said and "as long" not in said
    why = "only some of the traces have profiler steps" if "--fail-if" in flags else "one of them has no profiler steps"
    assert why in said


@pytest.mark.parametrize("size", ["\u00b2", "9" * 5000, "-1", "wide"])
@pytest.mark.parametrize("name", ["COLUMNS", "LINES"])
def test_a_terminals_size_that_is_no_number_is_ignored(written, capsys, monkeypatch, name, size):
    monkeypatch.setenv(name, size)
    assert cli.main([str(written(*launched(0, 1)))]) == 0
    assert "1 kernel" in capsys.readouterr().out


def test_a_launch_in_no_op_is_from_nothing_not_from_several_steps(written):
    steps = [event(f"ProfilerStep#{number}", "user_annotation", 1000 * number, 900) for number in range(3)]
    work = [one for number in range(3) for one in launched(1000 * number + 10, number)]
    ours = summarize(read(written(event("aten::mm", "cpu_op", 1, 2), *steps, *work)))
    assert [one.asked_by for one in ours.kernels] == [""] and [one.asked_by for one in ours.gpu_work] == [""]


def half_a_step_later(events):
    marks = [one for one in events if str(one.get("name")).startswith("ProfilerStep#") and "dur" in one]
    for mark in marks:
        mark["ts"] += mark["dur"] / 2


def of_no_length(events):
    for one in events:
        if one.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
            one["dur"] = 0


def without_an_update(events):
    """Let the first step only add to gradients."""
    marks = [one for one in events if one.get("cat") == "user_annotation" and one["name"].startswith("ProfilerStep#")]
    last = min(one["ts"] + one["dur"] for one in marks)
    events[:] = [one for one in events if not (str(one.get("name")).startswith("Optimizer.step") and one["ts"] < last)]


@pytest.mark.parametrize(
    ("edit", "name"), [(half_a_step_later, "gan"), (of_no_length, "gan"), (without_an_update, "index")]
)
def test_steps_that_cut_an_optimizer_and_activities_of_no_length_are_read(tmp_path, capsys, edit, name):
    path = Path(__file__).resolve().parent / f"traces/h100/graphs/{name}.json.gz"
    assert cli.main([str(edited(path, tmp_path, edit))]) == 0
    assert "3 steps of" in capsys.readouterr().out


# The list of events that prof.events() exports.

LISTED = Path(__file__).resolve().parent / "traces/event_list"  # of one recording on an H100: the list, and the trace


def test_the_list_of_a_cpus_events_has_the_times_of_the_trace(tmp_path):
    model, data = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU()), torch.randn(4, 8)
    schedule = torch.profiler.schedule(wait=0, warmup=1, active=3, repeat=1)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], schedule=schedule) as prof:
        for _ in range(4):
            with torch.profiler.record_function("forward"):
                model(data).sum().backward()
            prof.step()
    prof.events().export_chrome_trace(str(tmp_path / "list.json"))
    prof.export_chrome_trace(str(tmp_path / "trace.json"))
    assert json.loads((tmp_path / "list.json").read_text())[0]["pid"] == "CPU functions"
    found, expected = (read(tmp_path / name) for name in ("list.json", "trace.json"))
    assert [step.name for step in found.steps] == [step.name for step in expected.steps]
    # torch leaves ops out of the list whose only parent is of the same name.
    for step, other in zip(found.steps, expected.steps, strict=True):
        times = Counter((op.name, op.dur) for op in other.walk())
        assert step.size > 20 and not Counter((op.name, op.dur) for op in step.walk()) - times
    summary = summarize(found)
    assert not summary.source.devices and not summary.source.warnings and summary.cpu.ops["aten::addmm"]


def test_a_list_with_gpu_activities_says_nothing_about_the_gpu(capsys):
    """The GPU's activities and copies of annotations stand on the threads of the CPU, without stream and launch."""
    found, expected = read(LISTED / "events.json.gz"), read(LISTED / "trace.json.gz")
    assert not found.work and len(expected.work) == 38
    for step, other in zip(found.steps, expected.steps, strict=True):
        assert (step.name, step.dur if hasattr(step, "dur") else step.us) == (
            other.name,
            pytest.approx(other.us, abs=0.002),
        )
        kept = Counter(op.name for op in step.walk())
        assert not kept - Counter(op.name for op in other.walk()) and kept["cudaLaunchKernel"] > 5
    assert cli.main([str(LISTED / "events.json.gz")]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert (
        "38 GPU activities are left out, because only prof.export_chrome_trace writes their streams and launches"
        in said
    )
    assert (
        said.startswith("GPU activities left out · 2 steps")
        and "GPU-bound" not in said
        and "idle" not in said.split("warning")[0]
    )


@pytest.mark.parametrize("change", ["no arrows", "another kernel"])
def test_a_list_whose_gpu_activities_cannot_be_distinguished_is_refused(tmp_path, capsys, change):
    events = json.loads(gzip.decompress((LISTED / "events.json.gz").read_bytes()))
    if change == "no arrows":
        events = [one for one in events if one["ph"] == "X"]
    else:
        next(one for one in events if one["name"].startswith("Memcpy"))["name"] = "of_no_known_kind"
    (tmp_path / "list.json").write_text(json.dumps(events))
    assert cli.main([str(tmp_path / "list.json")]) == 2
    said = capsys.readouterr().err
    assert "export the trace with prof.export_chrome_trace" in said and said.count("\n") == 1


def test_the_events_alone_are_a_trace(written, tmp_path, capsys):
    events = [event("aten::add", "cpu_op", 0, 10), *launched(2, 1)]
    (tmp_path / "list.json").write_text(json.dumps(events))
    whole, alone = read(written(*events)), read(tmp_path / "list.json")
    assert [[(one.name, one.start, one.dur) for one in trace.work] for trace in (whole, alone)] == [
        [("k", 5000, 10000)]
    ] * 2


def test_a_list_with_unusable_times_is_read(tmp_path, capsys):
    events = json.loads(gzip.decompress((LISTED / "events.json.gz").read_bytes()))
    slices = [one for one in events if one["ph"] == "X"]
    del slices[5]["dur"]
    slices[20]["ts"] = next(one for one in slices if one["name"].startswith("Memcpy"))["dur"] = None
    (tmp_path / "list.json").write_text(json.dumps(events))
    assert cli.main([str(tmp_path / "list.json")]) == 0
    assert "2 events without a usable time stamp and duration are left out" in " ".join(capsys.readouterr().out.split())
