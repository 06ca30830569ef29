"""The replay of an unchanged step gives the recorded time, and that of a changed step follows the dependencies."""

import gzip
import itertools
import json
from collections import Counter
from pathlib import Path

import pytest
from raw_events import GPU, end, event, pace, raw_steps, raw_work
from references import LARGE_FILE, small_first

from tracereader.replay import Graph, Reason, Refused, graph_of
from tracereader.replay import recorded as graph_module
from tracereader.replay.changes import (
    cuda_graph,
    fused,
    launching_only,
    overlapped,
    spans_of,
    with_cpu_speed,
    with_durations,
    with_smaller_graphs,
    without_cpu_time,
    without_ops,
    without_waits,
    without_work,
)
from tracereader.trace import outermost, read
from tracereader.trace.waits import is_wait

ROOT = Path(__file__).resolve().parent.parent
REFERENCE = ROOT / "traces" / "reference"
TRAINING = REFERENCE / "nvidia-h200-x2" / "06_training"
DECODING = REFERENCE / "nvidia-h200" / "05_llm"
CHANGES = REFERENCE / "nvidia-h200" / "changes"
# The replay of a recording of which a part does not count has a test in test_quality.py. A list of events is none.
RECORDED = [
    path for path in (ROOT / "tests" / "traces").rglob("*.json.gz") if path.parent.name not in ("quality", "event_list")
]
TRACES = sorted([*REFERENCE.rglob("*.json.gz"), *RECORDED])
SOME = [
    TRAINING / "4x1024x1024x16_bf16_warm_eager_forloop.json.gz",
    TRAINING / "4x1024x1024x16_bf16_warm_eager_ddp_x2_rank0.json.gz",
    TRAINING / "4x1024x1024x16_bf16_warm_eager_fsdp_x2_rank1.json.gz",
    TRAINING / "4x1024x1024x16_bf16_warm_eager_loader2_workers0.json.gz",
    DECODING / "1x512_bf16_warm_compile.json.gz",
    DECODING / "1x512_bf16_warm_eager_triton-overlap_graph.json.gz",
    ROOT / "tests" / "traces" / "blocking.json.gz",
    ROOT / "tests" / "traces" / "train_item.json.gz",
    ROOT / "tests" / "traces" / "misc.json.gz",
]


def starts_in(graph: Graph) -> list[int]:
    """Return the start of each node (ns)."""
    return [end - dur for end, dur in zip(graph.ends(), graph.dur, strict=True)]


def raw_step_us(events):
    """Return the step's time from the raw events alone; None if no step launches GPU work."""
    marks = raw_steps(events)
    if not marks:
        return None
    work = [raw_work(events, mark) for mark in marks]
    most = max(len(some) for some in work)
    if not most:
        return None
    kept = [(mark, some) for mark, some in zip(marks, work, strict=True) if 2 * len(some) >= most]
    durations = sorted(mark["dur"] for mark, _ in kept)
    if len(kept) > 1 and kept[0][0]["dur"] > 10 * durations[(len(durations) - 1) // 2]:
        kept = kept[1:]
    cpu = pace([mark["ts"] for mark, _ in kept], kept[-1][0]["dur"])
    busy = Counter()
    for e in (e for _, some in kept for e in some):
        busy[e["pid"], e["tid"]] += e["dur"]
    busiest = max(busy, key=busy.get)
    lane = [[e for e in some if (e["pid"], e["tid"]) == busiest] for _, some in kept]
    lane = lane if all(lane) else [some for _, some in kept]
    gpu = pace([some[0]["ts"] for some in lane], max(end(e) for e in lane[-1]) - lane[-1][0]["ts"])
    return max(cpu, gpu)


@pytest.mark.parametrize(
    ("traces", "least"),
    [
        ([path for path in TRACES[::4] if path.stat().st_size <= LARGE_FILE], 20),
        pytest.param(TRACES, 100, marks=pytest.mark.exhaustive),
    ],
    ids=["some", "all"],
)
def test_the_replay_of_an_unchanged_trace_gives_the_recorded_step(traces, least):
    within, total, refused = 0, 0, {}
    for path in traces:
        events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
        expected = raw_step_us([e for e in events if e.get("ph") == "X"])
        if expected is None:
            continue
        total += 1
        graph = graph_of(read(path))
        if isinstance(graph, Refused):
            refused[path.name] = str(graph)
            continue
        assert graph.recorded_us == pytest.approx(expected, abs=0.01), path
        within += abs(graph.step_us() / expected - 1) <= 0.03
    assert total > least
    assert within >= 0.95 * total, refused


@pytest.fixture
def made(tmp_path):
    """Return the function made(events) -> Trace."""

    def trace_of(*events):
        path = tmp_path / "made.json"
        path.write_text(json.dumps({"traceEvents": [event for one in events for event in one]}))
        return read(path)

    return trace_of


def call(ts, correlation, dur=5, name="cudaLaunchKernel", tid=1):
    return event(name, "cuda_runtime", ts, dur, tid, correlation=correlation)


def kernel(ts, dur, correlation, stream=70, name="kernel", cat="kernel"):
    return event(name, cat, ts, dur, stream, correlation=correlation, device=0, stream=stream)


def op(ts, dur, tid=1, name="aten::op"):
    return event(name, "cpu_op", ts, dur, tid)


def step(number, ts, dur):
    return event(f"ProfilerStep#{number}", "user_annotation", ts, dur)


def repeated(one_step, period, steps=4):
    """Return the events of equal steps. one_step: takes the number, the start and the first free correlation."""
    return [one for n in range(steps) for one in one_step(n, 1000 + n * period, 100 * n)]


def ops_named(graph, name):
    return [op for step in graph.trace.steps for op in step.walk() if op.name == name]


def work_named(graph, name):
    return [one for step in graph.trace.steps for one in step.work if one.name == name]


def overhead_bound(n, t, c):
    return [
        step(n, t, 100),
        op(t + 10, 20), call(t + 20, c), kernel(t + 27, 4, c),
        op(t + 40, 50, name="aten::slow"), call(t + 80, c + 1), kernel(t + 87, 4, c + 1),
    ]  # fmt: skip


def test_overhead_bound_step_is_as_long_as_its_cpu_work(made):
    graph = graph_of(made(repeated(overhead_bound, 100)))
    assert graph.step_us() == graph.recorded_us == 100
    slow = ops_named(graph, "aten::slow")
    assert without_cpu_time(graph, spans_of(slow)).step_us() == 50
    assert without_ops(graph, slow).step_us() == 50
    assert with_durations(graph, dict.fromkeys(work_named(graph, "kernel"), 0)).step_us() == 100
    assert graph.step_us() == 100  # the changes did not modify the first graph


def gpu_bound(n, t, c):
    behind = 1000 + n * 200 + 20  # the GPU's steps take 200, the CPU's 40
    return [
        step(n, t, 40),
        op(t + 2, 10), call(t + 5, c), kernel(behind, 150, c, name="long"),
        op(t + 20, 10), call(t + 25, c + 1), kernel(behind + 151, 48, c + 1, name="short"),
    ]  # fmt: skip


def test_gpu_bound_step_is_as_long_as_its_kernels(made):
    graph = graph_of(made(repeated(gpu_bound, 40)))
    assert graph.step_us() == graph.recorded_us == 200
    assert without_cpu_time(graph, spans_of(ops_named(graph, "aten::op"))).step_us() == 200
    assert with_durations(graph, dict.fromkeys(work_named(graph, "long"), 100)).step_us() == 150
    assert without_work(graph, work_named(graph, "short")).step_us() == pytest.approx(152, abs=1)
    both = [(list(some.work), 30) for some in graph.trace.steps]
    # The CPU is the slower lane then, with one op less.
    assert fused(graph, both).step_us() == pytest.approx(31, abs=1)


def synchronized(n, t, c):
    """Return a step in which the CPU waits for the kernel and then works for 60 µs while the GPU idles."""
    return [
        step(n, t, 180),
        op(t + 2, 10), call(t + 5, c), kernel(t + 12, 100, c),
        op(t + 20, 100, name="aten::item"), call(t + 22, c + 1, 96, "cudaStreamSynchronize"),
    ]  # fmt: skip


def test_synchronization_ends_with_the_work_before_it(made):
    graph = graph_of(made(repeated(synchronized, 180)))
    assert graph.step_us() == 180
    assert with_durations(graph, dict.fromkeys(work_named(graph, "kernel"), 40)).step_us() == 120
    waits = ops_named(graph, "cudaStreamSynchronize")
    assert all(is_wait(one) for one in waits)
    # The CPU then takes 180 - 96, and the kernel takes 100 with the gap to the next one.
    assert without_waits(graph, waits).step_us() == pytest.approx(101.2, abs=0.1)
    # Without the kernel the wait takes only the time of its call.
    assert without_work(graph, work_named(graph, "kernel")).step_us() <= 180 - 96 + 3 + 10


def two_streams(n, t, c):
    """Return a step in which a kernel waits for a copy on another stream."""
    return [
        step(n, t, 50),
        op(t + 2, 40),
        call(t + 5, c, name="cudaMemcpyAsync"),
        kernel(1000 + n * 210 + 12, 160, c, 80, "Memcpy HtoD (Pinned -> Device)", "gpu_memcpy"),
        call(t + 15, c + 1, 2, "cudaStreamWaitEvent"),
        call(t + 20, c + 2), kernel(1000 + n * 210 + 174, 40, c + 2),
        # The next copy waits for the kernel that reads the last one.
        call(t + 30, c + 3, 2, "cudaStreamWaitEvent"),
    ]  # fmt: skip


def test_activity_waits_for_another_stream(made):
    graph = graph_of(made(repeated(two_streams, 50)))
    assert graph.step_us() == graph.recorded_us == 210
    copies = work_named(graph, "Memcpy HtoD (Pinned -> Device)")
    assert with_durations(graph, dict.fromkeys(copies, 100)).step_us() == 150
    # The copies, which overlap the kernels, take 160 and the gap between them.
    assert overlapped(graph, copies).step_us() == pytest.approx(161.2, abs=2.5)


def pageable(n, t, c):
    name = "Memcpy HtoD (Pageable -> Device)"
    return [
        step(n, t, 150),
        op(t + 2, 115, name="aten::copy_"), call(t + 10, c, 100, "cudaMemcpyAsync"),
        kernel(t + 20, 85, c, name=name, cat="gpu_memcpy"),
        op(t + 120, 20), call(t + 125, c + 1), kernel(t + 132, 30, c + 1),
    ]  # fmt: skip


def test_copy_of_pageable_memory_blocks_the_cpu(made):
    graph = graph_of(made(repeated(pageable, 150)))
    assert graph.step_us() == 150
    copies = work_named(graph, "Memcpy HtoD (Pageable -> Device)")
    assert with_durations(graph, dict.fromkeys(copies, 35)).step_us() == 100
    # On a stream of its own the copy takes 85 and the gap to the next one, and the CPU takes 150 - 100 + 3.
    assert overlapped(graph, copies).step_us() == pytest.approx(86.2, abs=0.1)


def test_call_of_a_pageable_copy_returns_when_its_last_part_is_staged(made):
    def large(n, t, c):
        """The call returns 6 before the copy ends."""
        name = "Memcpy HtoD (Pageable -> Device)"
        return [
            step(n, t, 1100), op(t + 2, 1000), call(t + 10, c, 900, "cudaMemcpyAsync"),
            kernel(t + 16, 900, c, name=name, cat="gpu_memcpy"),
        ]  # fmt: skip

    graph = graph_of(made(repeated(large, 1100)))
    copies = graph.trace.work
    assert with_durations(graph, dict.fromkeys(copies, 100)).step_us() == 300
    # A small copy is staged immediately, so its call returns before the copy starts.
    name = "Memcpy HtoD (Pageable -> Device)"
    staged = [call(1088, 999, 4, "cudaMemcpyAsync"), kernel(1094, 2, 999, name=name, cat="gpu_memcpy")]
    small = graph_of(made(repeated(overhead_bound, 100), staged))
    assert not small.returns


def full_queue(number_of_steps=3):
    """Return a step of 1,000 kernels of 9 µs. The CPU launches 600 of them, then 100 more whenever 100 have ended."""
    events = [call(1000 + i / 10, i, 0.05) for i in range(600)]
    for i in range(600, 1000 * number_of_steps):
        ended = 1100 + 10 * (i - 600) - i % 100 * 10 + 9  # the end of the kernel that these hundred launches wait for
        waits = i % 100 == 0
        events.append(call(ended - 900 if waits else ended + i % 100 / 10, i, 900 if waits else 0.05))
    kernels = [kernel(1100 + 10 * i, 9, i) for i in range(1000 * number_of_steps)]
    launched = [one["ts"] for one in events[::1000]] + [events[-1]["ts"] + 1]
    marks = [step(n, one - 0.01, after - one - 0.5) for n, (one, after) in enumerate(itertools.pairwise(launched))]
    return [*marks, *events, *kernels]


def test_a_full_launch_queue_delays_the_cpu(made):
    graph = graph_of(made(full_queue()))
    assert graph.step_us() == pytest.approx(10_000)
    half = with_durations(graph, dict.fromkeys(graph.trace.work, 4))
    assert half.step_us() == pytest.approx(5_000)
    starts = starts_in(half)
    # The CPU launches earlier by the same time.
    assert starts[half.steps[-1].end] / 1e3 == pytest.approx(graph.at[graph.steps[-1].end] / 2e3, rel=0.05)


def backward(n, t, c):
    """Return a step in which the main thread waits for autograd's thread, which launches two kernels."""
    return [
        step(n, t, 200),
        op(t + 5, 20), call(t + 10, c), kernel(t + 17, 5, c),
        op(t + 30, 110, 2, "MmBackward0"), call(t + 50, c + 1, tid=2), kernel(t + 57, 5, c + 1),
        op(t + 145, 40, name="aten::optimize"), call(t + 160, c + 2), kernel(t + 167, 5, c + 2),
    ]  # fmt: skip


def test_main_thread_waits_for_the_backward_thread(made):
    graph = graph_of(made(repeated(backward, 200)))
    assert graph.step_us() == 200
    # The main thread's wait of 120 is not its own work. Without the backward the step is shorter by 110.
    assert without_cpu_time(graph, spans_of(ops_named(graph, "MmBackward0"))).step_us() == 90
    assert without_cpu_time(graph, spans_of(ops_named(graph, "aten::optimize"))).step_us() == 160


def backward_at_the_end(n, t, c):
    return [
        step(n, t, 150), op(t + 5, 15, name="aten::mm"), call(t + 10, c), kernel(t + 17, 5, c),
        op(t + 30, 110, 2, "MmBackward0"), call(t + 50, c + 1, tid=2), kernel(t + 57, 5, c + 1),
    ]  # fmt: skip


@pytest.mark.parametrize("steps", [1, 2, 4])
def test_a_step_ends_with_the_wait_for_the_backward_thread(made, steps):
    """The main thread calls no op after loss.backward(), and its step's annotation ends when it returns."""
    graph = graph_of(made(repeated(backward_at_the_end, 150, steps)))
    assert graph.step_us() == 150
    assert without_cpu_time(graph, spans_of(ops_named(graph, "MmBackward0"))).step_us() == 40


def one_graph(n, t, c):
    name = "cudaGraphLaunch"
    return [
        step(n, t, 60), call(t + 10, c, 30, name),
        kernel(t + 38, 50, c), kernel(t + 90, 50, c), kernel(t + 142, 30, c, 80, "beside"),
    ]  # fmt: skip


def test_one_launch_of_a_cuda_graph_starts_all_its_activities(made):
    graph = graph_of(made(repeated(one_graph, 200)))
    assert graph.step_us() == 200
    shorter = with_durations(graph, dict.fromkeys(work_named(graph, "kernel"), 20))
    starts = starts_in(shorter)
    work = [graph.activity[id(one)] for one in graph.trace.steps[0].work]
    assert [starts[node] / 1e3 for node in work] == [1038 - 1000, 60, 82]  # gaps of 2 within the graph


def launch_of_many(n, t, c):
    """Return a step of the launch of a CUDA graph of 100 kernels, which start when the call returns."""
    return [
        step(n, t, 500), call(t + 10, c, 400, "cudaGraphLaunch"),
        *(kernel(t + 410 + 2 * i, 1, c, name=f"kernel {i % 4}") for i in range(100)),
    ]  # fmt: skip


def test_a_smaller_cuda_graph_is_launched_in_less_time(made):
    graph = graph_of(made(repeated(launch_of_many, 500)))
    assert graph.step_us() == 500
    gone = [one for one in graph.trace.work if one.name in ("kernel 1", "kernel 3")]
    smaller = with_smaller_graphs(graph, gone)
    assert smaller.step_us() == 500 - 400 / 2
    starts = starts_in(smaller)
    first = graph.trace.steps[0].work[0]
    assert starts[graph.activity[id(first)]] / 1e3 == 10 + 400 / 2
    nothing = with_smaller_graphs(graph, graph.trace.work)
    assert nothing.step_us() == 500 - 400


def test_launches_become_one_cuda_graph(made):
    graph = graph_of(made(repeated(overhead_bound, 100)))
    # From 10 to 90 the CPU was in ops that launch.
    assert cuda_graph(graph, launch_us=15).step_us() == 100 - 80 + 15


def asked_for(n, t, c):
    """Return a step of eight launches, a wait for the last kernel, and one more launch."""
    return [
        step(n, t, 200),
        *(op(t + 10 * i, 9) for i in range(8)),
        *(call(t + 10 * i + 2, c + i) for i in range(8)),
        *(kernel(t + 10 * i + 9, 5, c + i) for i in range(8)),
        op(t + 100, 40, name="aten::item"), call(t + 105, c + 8, name="cudaMemcpyAsync"),
        kernel(t + 112, 2, c + 8, name="Memcpy DtoH (Device -> Pinned)", cat="gpu_memcpy"),
        call(t + 112, c + 9, 8, "cudaStreamSynchronize"),
        op(t + 150, 20), call(t + 155, c + 10), kernel(t + 162, 5, c + 10),
    ]  # fmt: skip


def test_a_cuda_graph_ends_where_the_cpu_waits(made):
    graph = graph_of(made(repeated(asked_for, 200)))
    assert graph.step_us() == 200
    # The graph is done after a latency of 7, 8 * 5 and 7 gaps of 0.45; item's copy after a gap and 2 more, its wait 6
    # later. The recorded wait ended at 120; of the rest of the step, 80, the last op is gone, which took 20.
    done = 7 + 8 * 5 + 7 * 0.45 + 1.2 + 2 + 6
    assert cuda_graph(graph, launch_us=0).step_us() == pytest.approx(done + 80 - 20)


def test_device_synchronization_waits_for_every_stream(made):
    def beside(n, t, c):
        return [
            step(n, t, 300), op(t + 2, 30),
            call(t + 5, c), kernel(t + 12, 200, c, name="long"),
            call(t + 15, c + 1), kernel(t + 22, 150, c + 1, 80, "shorter"),
            call(t + 40, c + 2, 174, "cudaDeviceSynchronize"),
        ]  # fmt: skip

    graph = graph_of(made(repeated(beside, 300)))
    assert graph.step_us() == 300
    # It then returns at 172, when the other stream is done, and not at 214.
    assert with_durations(graph, dict.fromkeys(work_named(graph, "long"), 20)).step_us() == 300 - 214 + 172


def test_event_synchronization_does_not_wait_for_later_work(made):
    def half_way(n, t, c):
        return [
            step(n, t, 150), op(t + 2, 30),
            call(t + 5, c), kernel(t + 12, 60, c, name="asked"),
            call(t + 15, c + 1), kernel(t + 73, 60, c + 1, name="later"),
            call(t + 40, c + 2, 34, "cudaEventSynchronize"),
        ]  # fmt: skip

    graph = graph_of(made(repeated(half_way, 150)))
    assert with_durations(graph, dict.fromkeys(work_named(graph, "later"), 10)).step_us() == 150
    assert with_durations(graph, dict.fromkeys(work_named(graph, "asked"), 40)).step_us() == 130


def test_threads_that_work_in_parallel_do_not_wait_for_each_other(made):
    def beside(n, t, c):
        return [
            step(n, t, 100),
            op(t + 5, 20), call(t + 10, c), kernel(t + 17, 5, c),
            op(t + 15, 20, 2, "other"),  # begins before the pause of the first thread, and ends in it
            op(t + 50, 20), call(t + 60, c + 1), kernel(t + 67, 5, c + 1),
        ]  # fmt: skip

    graph = graph_of(made(repeated(beside, 100)))
    assert without_cpu_time(graph, spans_of(ops_named(graph, "other"))).step_us() == 100


def test_the_launch_of_a_large_cuda_graph_is_not_a_wait(made):
    """The call takes long because the graph is large, not because the queue is full."""

    def two_graphs(n, t, c):
        begin = 1450 + n * 1120
        return [
            step(n, t, 500),
            call(t + 5, c, 20, "cudaGraphLaunch"), kernel(begin - 12 if n else 1030, 10, c),
            call(t + 50, c + 1, 400, "cudaGraphLaunch"),
            *(kernel(begin + 2 * i, 1.5, c + 1) for i in range(550)),
        ]  # fmt: skip

    graph = graph_of(made(repeated(two_graphs, 500)))
    assert not graph.returns


def overlapping(n, t, c):
    return [
        step(n, t, 30), op(t + 1, 20), call(t + 2, c), call(t + 10, c + 1),
        kernel(1000 + n * 100 + 40, 60, c, name="first"), kernel(1000 + n * 100 + 95, 44, c + 1),
    ]  # fmt: skip


def test_a_kernel_can_start_before_the_previous_one_ends(made):
    """With programmatic dependent launch a kernel keeps its head start, and never starts before the previous kernel."""
    graph = graph_of(made(repeated(overlapping, 30)))
    assert graph.step_us() == 100
    changed = with_durations(graph, dict.fromkeys(work_named(graph, "first"), 2))
    starts = starts_in(changed)
    for one, other in [some.work for some in graph.trace.steps]:
        assert starts[graph.activity[id(other)]] >= starts[graph.activity[id(one)]]
    assert changed.step_us() < 100 - 50


def test_the_profilers_last_synchronization_is_not_part_of_the_step(made):
    marks = repeated(gpu_bound, 40)
    flush = [call(1170, 900, 700, "cudaDeviceSynchronize")]
    assert graph_of(made(marks, flush)).step_us() == 200
    # The same holds for a trace without steps, whose ops end before the synchronization begins.
    bare = [one for one in marks if not one["name"].startswith("ProfilerStep")]
    assert graph_of(made(bare, flush)).step_us() == 4 * 200 - 1


def test_a_single_step_takes_the_time_of_its_longer_lane(made):
    assert graph_of(made(gpu_bound(0, 1000, 0))).step_us() == 199
    assert graph_of(made(overhead_bound(0, 1000, 0))).step_us() == 100


def test_work_launched_before_the_recording_is_replayed(made):
    early = [kernel(1001, 18, 77777, name="early")]
    graph = graph_of(made(repeated(gpu_bound, 40), early))
    assert graph.step_us() == 200


def test_a_refusal_gives_its_reason(made):
    no_records = [op(10, 20), call(12, 1), op(40, 20)]
    assert graph_of(made(no_records)) == Refused(Reason.INCOMPLETE)
    no_launches = [op(10, 20), kernel(12, 5, 1), kernel(20, 5, 2)]
    assert graph_of(made([step(0, 5, 90)], no_launches)) == Refused(Reason.NO_LAUNCHES)

    def held_up(n, t, c):
        """Return a step whose second kernel starts 800 after its launch for no recorded reason."""
        return [
            step(n, t, 1000), op(t + 5, 50), call(t + 10, c), kernel(t + 17, 5, c),
            call(t + 30, c + 1), kernel(t + 830, 100, c + 1), call(t + 40, c + 2, 930, "cudaDeviceSynchronize"),
        ]  # fmt: skip

    refused = graph_of(made(repeated(held_up, 1000)))
    assert isinstance(refused, Refused)
    assert refused.reason is Reason.NOT_REPRODUCED
    assert refused.off == pytest.approx(0.2, abs=0.1)
    assert "does not reproduce the recorded step" in str(refused)


@pytest.mark.parametrize("one_step", [overhead_bound, gpu_bound])
@pytest.mark.parametrize("place", [0, 30, 59])
def test_a_long_trace_is_replayed_in_the_steps_around_one(made, monkeypatch, one_step, place):
    """In the GPU-bound trace, activities of earlier steps still run when the first replayed step starts."""
    trace = made(repeated(one_step, 100 if one_step is overhead_bound else 40, steps=60))
    whole = graph_of(trace)
    monkeypatch.setattr(graph_module, "REPLAYED", 20)  # two activities in each step
    part = graph_of(trace, trace.steps[place])
    assert len(part.trace.steps) == 10 and trace.steps[place] in part.trace.steps
    assert part.recorded_us == whole.recorded_us == part.step_us()
    for name in ("kernel", "long", "short"):
        changed = [with_durations(one, dict.fromkeys(work_named(one, name), 1)).step_us() for one in (part, whole)]
        assert changed[0] == changed[1]
    assert cuda_graph(part).step_us() == cuda_graph(whole).step_us()


@pytest.mark.parametrize(("one_step", "period", "count"), [(overhead_bound, 100, 1), (gpu_bound, 40, 3)])
@pytest.mark.parametrize("place", [0, 30, 59])
def test_one_large_step_is_replayed_if_the_gpu_keeps_up(made, monkeypatch, one_step, period, count, place):
    trace = made(repeated(one_step, period, steps=60))
    whole = graph_of(trace)
    monkeypatch.setattr(graph_module, "REPLAYED", 1)  # a step has two activities
    monkeypatch.setattr(graph_module, "SINGLE", 1)
    part = graph_of(trace, trace.steps[place])
    assert len(part.trace.steps) == count and trace.steps[place] in part.trace.steps
    assert cuda_graph(part).step_us() == cuda_graph(whole).step_us()
    for name in ("kernel", "long"):
        changed = [with_durations(one, dict.fromkeys(work_named(one, name), 1)).step_us() for one in (part, whole)]
        assert changed[0] == changed[1]


def waiting(*waits):
    """Return a function that makes a step of 200 with two kernels of 40, and calls that wait: (start, duration)."""

    def one_step(n, t, c):
        return [
            step(n, t, 200), op(t + 1, 198),
            call(t + 50, c), kernel(t + 57, 40, c, name="first"), call(t + 110, c + 1), kernel(t + 117, 40, c + 1),
            *(call(t + at, c + 2 + number, dur, "cudaStreamSynchronize") for number, (at, dur) in enumerate(waits)),
        ]  # fmt: skip

    return one_step


@pytest.mark.parametrize("waits", [(), ((5, 3),), ((102, 3),), ((5, 3), (102, 3)), ((160, 3),)])
@pytest.mark.parametrize("factor", [1.0, 0.7, 0.5, 0.4, 0.3, 0.1, 0.0])
def test_steps_after_a_single_one_start_before_the_gpu_has_ended_its_work(made, monkeypatch, waits, factor):
    """A faster CPU, or longer kernels, put the GPU behind the CPU, and the next step's kernels wait for this step's."""
    trace = made(repeated(waiting(*waits), 200, steps=60))
    whole = graph_of(trace)
    monkeypatch.setattr(graph_module, "SINGLE", 1)  # a step has two activities
    single = graph_of(trace, trace.steps[30])
    assert len(single.trace.steps) == 1 and single.step_us() == whole.step_us() == 200
    for name in ("first", "kernel"):
        for us in (1, 40, 150):
            after = [
                with_cpu_speed(with_durations(one, dict.fromkeys(work_named(one, name), us)), factor).step_us()
                for one in (single, whole)
            ]
            assert after[0] == pytest.approx(after[1], abs=2), (name, us)


def test_no_single_step_is_replayed_of_steps_that_launch_different_amounts(made, monkeypatch):
    """In each fourth step an optimizer follows the backward pass, and what is proposed depends on all four."""

    def with_an_update(n, t, c):
        return overhead_bound(n, t, c) + [call(t + 92, c + 2, 4), kernel(t + 97, 1, c + 2)] * (n % 4 == 3)

    trace = made(repeated(with_an_update, 100, steps=60))
    monkeypatch.setattr(graph_module, "SINGLE", 1)
    monkeypatch.setattr(graph_module, "REPLAYED", 20)
    assert len(graph_of(trace, trace.steps[30]).trace.steps) == 8


def test_only_steps_that_reproduce_the_recorded_step_are_replayed_alone(made, monkeypatch):
    def slower_at_the_end(n, t, c):
        mark, *others = [one | {"ts": one["ts"] + 40 * max(0, n - 40)} for one in overhead_bound(n, t, c)]
        return [mark | {"dur": 140 if n > 40 else 100}, *others]

    trace = made(repeated(slower_at_the_end, 100, steps=60))
    monkeypatch.setattr(graph_module, "SINGLE", 1)
    for place, numbers in ((20, [20]), (43, [40]), (59, range(60))):
        graph = graph_of(trace, trace.steps[place])
        assert graph.step_us() == graph.recorded_us == 100
        assert [step.number for step in graph.trace.steps] == [f"#{number}" for number in numbers]


@pytest.mark.parametrize(
    "path", [*SOME[:2], ROOT / "tests/traces/h200-x4/launches_late/rank0.json.gz"], ids=lambda path: path.name[:20]
)
def test_the_ops_that_launch_only_given_work_are_outermost(path):
    graph = graph_from(path)
    groups = []
    for step in graph.trace.steps:
        # Groups of one to four activities, and one of all that is left.
        work, place = list(step.work), 0
        for size in (1, 2, 3, 4) * 20:
            groups.append(work[place : place + size])
            place += size
        groups.append(work[place:])
    groups = [group for group in groups if group]
    assert len(groups) > 100
    for group, ops in zip(groups, launching_only(graph, groups), strict=True):
        mine = set(map(id, group))
        inside = set()  # the calls in the ops that were found
        for op in ops:
            launched = {id(one) for below in op.walk() for one in below.work}
            assert launched and launched <= mine
            inside |= {id(below) for below in op.walk()}
            if op.parent is not None and op.parent.kind != "label":
                assert not {id(one) for below in op.parent.walk() for one in below.work} <= mine
        for one in group:
            alone = set(map(id, one.launch.work)) <= mine
            assert (id(one.launch) in inside) == alone


def graph_from(path):
    graph = graph_of(read(path))
    assert isinstance(graph, Graph)
    return graph


@pytest.mark.parametrize(
    ("folder", "eager", "replayed"),
    [
        pytest.param(
            DECODING,
            "1x512_bf16_warm_eager_active2_shapes",
            "1x512_bf16_warm_eager_graph",
            marks=pytest.mark.exhaustive,
        ),
        pytest.param(
            DECODING, "32x512_bf16_warm_eager_active1", "32x512_bf16_warm_eager_graph", marks=pytest.mark.exhaustive
        ),
        (DECODING, "1x512_bf16_warm_compile", "1x512_bf16_warm_compile_reduce-overhead"),
        (CHANGES / "decode", "eager", "graph"),
        (CHANGES / "vit", "eager", "graph"),
    ],
)
def test_cuda_graphs_are_priced_as_recorded(folder, eager, replayed):
    before, after = (graph_from(folder / f"{name}.json.gz") for name in (eager, replayed))
    assert cuda_graph(before).step_us() == pytest.approx(after.recorded_us, rel=0.1)


def test_cuda_graph_of_a_prefill_that_no_longer_waits_is_priced_as_recorded():
    before, after = (
        graph_from(DECODING / f"1x512_bf16_warm_eager_prefill_{name}.json.gz")
        for name in ("active2", "dynamic_last_graph")
    )
    waits = [op for step in before.trace.steps for op in step.walk() if id(op) in before.returns]
    assert waits
    assert cuda_graph(without_waits(before, waits)).step_us() == pytest.approx(after.recorded_us, rel=0.1)


@pytest.mark.parametrize(
    ("loop", "one", "within"),
    [
        (TRAINING / "4x1024x1024x16_bf16_warm_eager_forloop", TRAINING / "4x1024x1024x16_bf16_warm_eager_fused", 0.02),
        # Its steps are overhead-bound, and the CPU's speed is not the same in both recordings.
        pytest.param(CHANGES / "optimizer/forloop", CHANGES / "optimizer/fused", 0.15, marks=pytest.mark.exhaustive),
    ],
)
def test_fused_optimizer_is_priced_as_recorded(loop, one, within):
    before, after = (graph_from(path.with_name(f"{path.name}.json.gz")) for path in (loop, one))

    def optimizers(graph):
        found = [outermost(step.roots, lambda op: op.name.startswith("Optimizer.step")) for step in graph.trace.steps]
        return [[work for op in some for below in op.walk() for work in below.work] for some in found]

    us = sum(work.us for work in optimizers(after)[1])
    changed = fused(before, [(work, us) for work in optimizers(before)])
    assert changed.step_us() == pytest.approx(after.recorded_us, rel=within)


def test_prefetched_copies_are_priced_as_recorded():
    before, after = (graph_from(CHANGES / "copies" / f"{name}.json.gz") for name in ("blocking", "prefetched"))

    def copies(graph):
        return [one for step in graph.trace.steps for one in step.work if one.kind == "memcpy"]

    us = copies(after)[0].us  # of pinned memory
    changed = overlapped(with_durations(before, dict.fromkeys(copies(before), us)), copies(before))
    assert changed.step_us() == pytest.approx(after.recorded_us, rel=0.05)


def test_data_loader_is_priced_as_recorded():
    slow, fed = (
        graph_from(TRAINING / f"4x1024x1024x16_bf16_warm_{name}.json.gz")
        for name in ("eager_loader2_workers0", "eager")
    )
    loading = [op for step in slow.trace.steps for op in step.walk() if "DataLoader" in op.name]
    assert without_cpu_time(slow, spans_of(loading)).step_us() == pytest.approx(fed.recorded_us, rel=0.02)


def test_item_at_the_end_of_an_overhead_bound_step_costs_almost_nothing():
    graph = graph_from(ROOT / "tests" / "traces" / "train_item.json.gz")
    waits = [op for step in graph.trace.steps for op in step.walk() if op.kind == "runtime" and is_wait(op)]
    assert waits
    assert without_waits(graph, waits).step_us() > 0.98 * graph.recorded_us


@pytest.mark.parametrize("path", small_first(SOME), ids=lambda path: path.name)
def test_removing_work_delays_no_activity_and_makes_no_step_longer(path):
    graph = graph_from(path)
    ops = [
        op for step in graph.trace.steps for root in step.roots for op in outermost([root], lambda op: op.kind == "op")
    ]
    calls = [op for step in graph.trace.steps for op in step.walk() if op.kind == "runtime" and is_wait(op)]
    work = [one for step in graph.trace.steps for one in step.work]
    kernels = [one for one in work if one.kind == "kernel"]
    copies = [one for one in work if one.kind != "kernel"]
    changes = [
        without_ops(graph, ops),
        without_cpu_time(graph, spans_of(ops)),
        without_waits(graph, calls),
        without_work(graph, kernels),
        without_work(graph, copies),
        with_durations(graph, {one: one.us / 2 for one in work}),
    ]
    ends = graph.ends()
    for changed in changes:
        now = changed.ends()
        assert all(after <= before for after, before in zip(now, ends, strict=True))
        assert changed.step_us() <= graph.step_us() * 1.001


def test_every_kind_of_gpu_event_is_replayed():
    path = ROOT / "tests" / "traces" / "misc.json.gz"
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    assert len(graph_from(path).activity) == sum(e.get("cat") in GPU for e in events)


def test_cpu_time_that_two_changes_remove_is_removed_once():
    """Ops and the whole stretch around them: together they save what the stretch saves."""
    graph = graph_of(read(CHANGES / "vit/eager.json.gz"))
    ops = [op for step in graph.trace.steps for op in step.named("aten::linear".__eq__)]
    spans = spans_of(ops)
    once = without_cpu_time(graph, spans)
    assert once.step_us() < graph.step_us() - 100
    assert without_cpu_time(once, spans).step_us() == once.step_us()
    inner = spans_of(child for op in ops for child in op.children)
    assert without_cpu_time(without_cpu_time(graph, inner), spans).step_us() == pytest.approx(once.step_us(), abs=0.01)


@pytest.mark.parametrize("factor", [0.1, 0.3])
def test_copies_ahead_leave_a_step_at_least_as_long_as_the_gpu_is_busy(factor):
    """Only one step of this trace is replayed. With the copies of its batch on a stream of their own, the step after it
    begins when this one's other work has ended."""
    file = ROOT / "benchmarks/pairs/photo_captions/base.json.gz"
    with gzip.open(file) as opened:
        events = json.load(opened)["traceEvents"]
    trace = read(file)
    (step,) = [one for one in trace.steps if one.name == max(mark["name"] for mark in raw_steps(events))]
    graph = graph_of(trace, step, step.us)
    work = raw_work(events, next(mark for mark in raw_steps(events) if mark["name"] == step.name))
    busy = sum(e["dur"] for e in work if "HtoD" not in e["name"])
    copies = [one for one in step.work if "HtoD" in one.name]
    assert len(graph.steps) == 1 and len(copies) == 2
    step_us = with_cpu_speed(overlapped(graph, copies), factor).step_us()
    assert busy <= step_us < 1.1 * busy
