"""The device of a trace is named, and all of its activity counts as its work."""

import gzip
import json

import pytest
from raw_events import end, event
from references import H200

from tracereader import cli
from tracereader.figures import summarize
from tracereader.figures.hardware import peaks_of
from tracereader.figures.source import TraceWarning
from tracereader.trace import read

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
