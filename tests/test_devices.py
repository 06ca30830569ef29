"""The device of a trace is named, and all of its activity counts as its work."""

import gzip
import json
import re

import pytest
from raw_events import end, event
from references import H200

from tracereader import cli
from tracereader.figures import summarize
from tracereader.figures.hardware import peaks_of
from tracereader.figures.source import TraceWarning
from tracereader.trace import read
from tracereader.trace.backends import backend_of

MI300X = {
    "name": "AMD Instinct MI300X", "warpSize": 32, "maxThreadsPerMultiprocessor": 2048,
    "regsPerMultiprocessor": 65536, "sharedMemPerMultiprocessor": 65536,
}  # fmt: skip


def launched(ts, number, device, **args):
    """Return a launch of 2 µs, and its kernel of 10 µs right after it."""
    return [
        event("hipLaunchKernel", "cuda_runtime", ts, 2, correlation=number),
        event("k", "kernel", ts + 3, 10, 7, correlation=number, device=device, stream=7, **args),
    ]


@pytest.fixture
def summary_of(tmp_path):
    def summarized(*events, **top):
        file = tmp_path / "made.json"
        file.write_text(json.dumps({"traceEvents": list(events)} | top))
        return summarize(read(file))

    return summarized


MARK = event("ProfilerStep#1", "user_annotation", 0, 100)


@pytest.mark.parametrize("device", [0, 2, 9, "2"])
def test_a_single_entry_is_the_device_whatever_number_the_events_carry(summary_of, device):
    """The process sees one device as number 0, and the profiler writes the machine's number."""
    kernel = launched(10, 1, device, **{"registers per thread": 32, "shared memory": 0, "block": [256, 1, 1]})
    summary = summary_of(MARK, *kernel, deviceProperties=[MI300X | {"id": 0}])
    assert summary.source.devices == ["AMD Instinct MI300X"]
    assert summary.gpu_work[0].occupancy.limit == 1.0


def test_several_entries_of_one_name_are_the_device(summary_of):
    properties = [MI300X | {"id": number} for number in (0, 1)]
    assert summary_of(MARK, *launched(10, 1, 5), deviceProperties=properties).source.devices == ["AMD Instinct MI300X"]


def test_entries_of_different_names_leave_the_device_unknown(summary_of):
    properties = [{"id": 0, "name": "NVIDIA T400"}, {"id": 1, "name": "NVIDIA H200"}]
    assert summary_of(MARK, *launched(10, 1, 5), deviceProperties=properties).source.devices == ["GPU 5"]
    assert summary_of(MARK, *launched(10, 1, 1), deviceProperties=properties).source.devices == ["NVIDIA H200"]


@pytest.mark.parametrize("name", ["", "  ", None])
def test_an_empty_name_is_no_name(summary_of, capsys, name):
    summary = summary_of(MARK, *launched(10, 1, 0), deviceProperties=[{"id": 0, "name": name}])
    assert summary.source.devices == ["GPU 0"]
    assert cli.main([summary.source.trace]) == 0
    screen = capsys.readouterr().out
    assert screen.startswith("GPU 0") and "no GPU work" not in screen


@pytest.mark.parametrize(
    ("name", "bf16", "gb_s"),
    [
        # AMD's data sheets; of an MI250 each of its two dies is a device
        ("AMD Instinct MI210", 181, 1638), ("AMD Instinct MI250", 362.1 / 2, 3276.8 / 2),
        ("AMD Instinct MI250X", 383 / 2, 3276.8 / 2), ("AMD Instinct MI250X / MI250", 383 / 2, 3276.8 / 2),
    ],
)  # fmt: skip
def test_peaks_of_amds_second_generation(name, bf16, gb_s):
    found = peaks_of(name)
    assert (found.bf16, found.gb_s) == pytest.approx((bf16, gb_s), rel=0.001)


def strange(category="mtia_ccp_events", **how):
    """Return two steps, each with a runtime call and two device slices of 30 µs and 20 µs that overlap for 10 µs."""
    found = []
    for step in (0, 1):
        at, number = 100 * step, step + 1
        found += [
            event(f"ProfilerStep#{number}", "user_annotation", at, 100), event("aten::mm", "cpu_op", at + 1, 20),
            event("runFunction - job_prep", "mtia_runtime", at + 5, 10, correlation=number),
            event("job", category, at + 20, 30, 3, correlation=number, **how),
            event("job", category, at + 40, 20, 4, correlation=number, **how),
        ]  # fmt: skip
        for one in found[-2:]:
            one["pid"] = 0
    return found


def busy(events, category):
    """Return the µs in which any slice of the category is open."""
    edges = sorted((e["ts"], end(e)) for e in events if e.get("cat") == category)
    total, reached = 0, float("-inf")
    for start, stop in edges:
        total += max(0, stop - max(start, reached))
        reached = max(reached, stop)
    return total


LABELS = [
    {"ph": "M", "name": "process_labels", "pid": pid, "tid": 0, "ts": 0, "args": {"labels": label}}
    for pid, label in ((1, "CPU"), (0, "MTIA 0"))
]


@pytest.mark.parametrize(
    "events", [strange(stream=3), [*strange(), *LABELS], strange("events_of_next_year", stream=3)],
    ids=["by stream", "by process", "another name"],
)  # fmt: skip
def test_device_slices_of_another_category_are_its_work(summary_of, capsys, events):
    summary = summary_of(*events)
    category = next(e["cat"] for e in events if e["name"] == "job")
    assert summary.gpu.busy_us == busy(events, category) == 80
    assert len(summary.gpu_work) == 2 and summary.steps[0].launches == 1
    assert summary.source.warnings == (TraceWarning("category_taken_for_work", 4, (category,)),)
    assert cli.main([summary.source.trace]) == 0
    screen = capsys.readouterr().out
    assert f"4 slices of the unknown category {category} on a device count as GPU activity" in screen
    assert cli.main([summary.source.trace, "--json", "--only", "steps"]) == 0
    (warning,) = json.loads(capsys.readouterr().out)["warnings"]
    assert f"warning {warning}" in " ".join(screen.split())
    assert "CPU only" not in screen and screen.startswith("device 0")


def test_slices_of_the_cpu_under_another_category_are_no_device(summary_of):
    events = [e | {"pid": 1} if e["name"] == "job" else e for e in strange()]
    summary = summary_of(*events, *LABELS)
    assert not summary.source.devices and not summary.source.warnings


def test_another_category_beside_known_kernels_is_left_out_with_a_warning(summary_of):
    summary = summary_of(*strange(stream=3), *launched(60, 7, 0))
    assert summary.gpu.busy_us == 10
    assert TraceWarning("category_left_out", 4, ("mtia_ccp_events",)) in summary.source.warnings


def test_synchronization_records_are_neither_work_nor_a_warning(tmp_path, capsys):
    """CUPTI can record synchronizations on the device's tracks."""
    source = H200 / "02_linear/1024x32x64_bf16_warm_eager.json.gz"
    found = json.loads(gzip.decompress(source.read_bytes()))
    plain = summarize(read(source))
    kernel = next(e for e in found["traceEvents"] if e.get("cat") == "kernel")
    for category in ("cuda_sync", "cuda_event"):
        args = {"cuda_sync_kind": "Stream Wait Event", "stream": 7, "device": 0, "correlation": 1}
        found["traceEvents"].append(kernel | {"cat": category, "name": "Stream Wait Event", "dur": 500, "args": args})
    file = tmp_path / "synchronizations.json"
    file.write_text(json.dumps(found))
    summary = summarize(read(file))
    assert summary.source.warnings == plain.source.warnings and summary.gpu == plain.gpu


# The runtime's calls for a launch, a wait and a copy, their category, the category of work, and what profilers of these
# devices write on their lanes beside it.
PROFILED = {
    "cuda": ("cudaLaunchKernel", "cudaStreamSynchronize", "cudaMemcpyAsync", "cuda_runtime", "kernel", ""),
    "hip": ("hipLaunchKernel", "hipStreamSynchronize", "hipMemcpyWithStream", "cuda_runtime", "kernel", "Barrier"),
    "xpu": ("urEnqueueKernelLaunch", "urEventWait", "urEnqueueUSMMemcpy", "xpu_runtime", "kernel", "Barrier"),
    "mtia": ("runFunction - job_prep_and_submit_for_execution", "mtiaStreamSynchronize", "mtia_memcpy", "mtia_runtime",
             "mtia_ccp_events", "event_wait"),
    "npu": ("AscendCL@aclnnMatmul", "AscendCL@aclrtSynchronizeStream", "AscendCL@aclrtMemcpyAsync",
            "privateuse1_runtime", "kernel", "EVENT_WAIT"),
    "hpu": ("synLaunch", "synStreamSynchronize", "synMemcpyAsync", "hpu_op", "kernel", "event_record"),
    "musa": ("musaLaunchKernel", "musaStreamSynchronize", "musaMemcpyAsync", "musa_runtime", "kernel", "Context Sync"),
    "other": ("launchKernel", "waitForStream", "copyAsync", "privateuse1_runtime", "kernel", "Notify_Record"),
}  # fmt: skip
ONLY_CUDA = re.compile("cuda|cudnn|cublas|tf32|tensor core|pin_memory|nvidia", re.IGNORECASE)


def profiled(launch, synchronize, copy, runtime, work, wait, steps=4, launches=60, us=2):
    """Return training steps that launch the same fp32 work, read a value, and load a batch without workers."""
    found, tie = [], iter(range(1, 10**6))

    def run(name, ts, call, kernel, category, dur):
        number = next(tie)
        found.append(event(name, "cpu_op", ts, 35, **{"Input Dims": [[512, 512]] * 3, "Input type": ["float"] * 3}))
        found.append(event(call, runtime, ts + 10, 8, correlation=number))
        found.append(event(kernel, category, ts + 22, dur, 7, correlation=number, device=0, stream=7, bytes=4096))
        found[-1]["pid"] = 0

    for step in range(steps):
        at = 10_000 * step
        found += [
            event(f"ProfilerStep#{step + 1}", "user_annotation", at, 9_990),
            event("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", "user_annotation", at + 1, 900),
        ]
        run("aten::copy_", at + 1_000, copy, "Memcpy HtoD (Pageable -> Device)",
            work if work != "kernel" else "gpu_memcpy", 20)  # fmt: skip
        for number in range(launches):
            ts = at + 1_300 + 60 * number
            run(("aten::addmm", "aten::mul", "aten::add")[number % 3], ts, launch, "sgemm", work, us)
            if wait:
                found.append(event(wait, work, ts + 30, 29, 8, device=0, stream=8) | {"pid": 0})
        found += [event("aten::item", "cpu_op", at + 9_000, 300), event(synchronize, runtime, at + 9_050, 200)]
        found += [event("torch.autograd.backward", "user_annotation", at + 9_400, 1)]
    return found


@pytest.mark.parametrize("backend", PROFILED)
@pytest.mark.parametrize("us", [2, 55])
def test_the_device_decides_the_advice(tmp_path, capsys, backend, us):
    events = profiled(*PROFILED[backend], us=us)
    file = tmp_path / "trace.json"
    file.write_text(json.dumps({"traceEvents": events}))
    wait = PROFILED[backend][-1]
    work = [e for e in events if e["pid"] == 0 and e["name"] != wait]
    summary = summarize(read(file))
    assert summary.source.backend == backend
    assert {one.name for one in read(file).work} == {e["name"] for e in work}
    assert summary.gpu.busy_us <= sum(e["dur"] for e in work)
    said = []
    for flags in (["--all"], ["--json=all"], ["--html", str(tmp_path / "page.html")]):
        assert cli.main([str(file), *flags]) == 0
        said.append(capsys.readouterr().out)
    changes = {one["change"] for one in json.loads(said[1])["opportunities"]}
    assert "data_loader" in changes
    assert ("cuda_graph" in changes) <= (backend in ("cuda", "hip"))
    assert us > 2 or ("cuda_graph" in changes) == (backend in ("cuda", "hip"))
    if backend not in ("cuda", "hip"):
        assert [line for text in said[:2] for line in text.splitlines() if ONLY_CUDA.search(line)] == []
        assert not wait or all(f'"{wait}"' not in text for text in said[:2])
    if backend == "hip":
        assert not re.search(r"TF32|[Tt]ensor core|cuDNN|cuBLAS|\bcuda[A-Z]|CUDA (?:calls|runtime)", said[0])


def test_amds_matrix_cores_get_two_bytes_and_no_tf32(tmp_path, capsys):
    events = profiled(*PROFILED["hip"], us=55)
    for one in events:
        if one["name"] == "sgemm":
            one["name"] = "Cijk_Ailk_Bljk_SB_MT64x64x16"
    file = tmp_path / "trace.json"
    for device in (MI300X, MI300X | {"name": "AMD Instinct MI210"}):
        file.write_text(json.dumps({"traceEvents": events, "deviceProperties": [device | {"id": 0}]}))
        assert cli.main([str(file), "--json", "--only", "try,patterns"]) == 0
        told = json.loads(capsys.readouterr().out)
        assert told["backend"] == "hip"
        assert "TF32" not in json.dumps(told) and "ensor core" not in json.dumps(told)


def test_ops_on_apples_gpus_are_not_said_to_run_on_the_cpu(tmp_path, capsys):
    """torch records none of their activity, so an op's time is not that of its work."""
    events = [e for e in profiled(*PROFILED["cuda"]) if e["cat"] in ("cpu_op", "user_annotation")]
    events.append(event("aten::_mps_convolution", "cpu_op", 9_500, 20))
    file = tmp_path / "trace.json"
    file.write_text(json.dumps({"traceEvents": events}))
    assert cli.main([str(file), "--all"]) == 0
    screen = capsys.readouterr().out
    assert screen.startswith("no GPU activity recorded") and "CPU only" not in screen and "FLOP/s" not in screen


@pytest.mark.parametrize(
    "name",
    ["event_wait", "EVENT_RECORD", "Notify_Wait", "Stream Wait Event", "Context Sync", "streamWait", "Barrier",
     "marker", "DeviceSynchronize", "wait_event", "EventRecord", "BarrierAnd"],
)  # fmt: skip
def test_waits_on_a_device_are_no_work(summary_of, name):
    waiting = event(name, "kernel", 40, 50, 8, device=0, stream=8) | {"pid": 0}
    summary = summary_of(MARK, *launched(10, 1, 0), waiting)
    assert summary.gpu.busy_us == 10 and not any(one.name == name for one in summary.gpu_work)


@pytest.mark.parametrize(
    ("name", "args"),
    [("wait_kernel", {}), ("barrier", {"grid": [1, 1, 1], "block": [32, 1, 1]}), ("record_stream_fwd", {}), ("add", {}),
     ("ncclDevKernel_AllReduce_Sum_f32_RING_LL", {}), ("Memset", {}), ("signal", {}), ("wait", {})],
)  # fmt: skip
def test_kernels_with_such_words_are_work(summary_of, name, args):
    kernel = event(name, "kernel", 40, 50, 8, device=0, stream=8, **args) | {"pid": 0}
    assert summary_of(MARK, *launched(10, 1, 0), kernel).gpu.busy_us == 60


@pytest.mark.parametrize(
    ("backend", "found"),
    [
        ("cuda", {"devices": ["NVIDIA H200"]}),
        ("hip", {"devices": ["AMD Instinct MI300X"], "categories": ["cuda_runtime"]}),
        ("hip", {"calls": ["hipLaunchKernel", "hipMalloc"], "categories": ["cuda_runtime"]}),
        ("xpu", {"devices": ["Intel(R) Data Center GPU Max 1550"]}),
        ("xpu", {"calls": ["zeCommandListAppendLaunchKernel"]}),
        ("mtia", {"processes": ["python", "MTIA 0"]}), ("npu", {"processes": ["CANN", "Ascend Hardware"]}),
        ("npu", {"op_names": ["npu::npu_format_cast"]}), ("other", {"categories": ["privateuse1_runtime", "kernel"]}),
        ("cuda", {"categories": ["cuda_runtime", "kernel"]}), ("hip", {"op_names": ["aten::miopen_batch_norm"]}),
        (None, {"op_names": ["aten::cudnn_is_acceptable", "aten::mm"], "categories": ["cpu_op", "cpu_instant_event"]}),
        (None, {"devices": ["GPU 0"], "categories": ["kernel", "gpu_memcpy", "gpu_user_annotation"]}),
    ],
)  # fmt: skip
def test_what_shows_the_kind_of_device(backend, found):
    nothing = dict.fromkeys(("devices", "calls", "processes", "categories", "op_names"), ())
    assert backend_of(**nothing | found) == backend
