"""A recorded trace written once more by torch 2.15's own exporter, as JSON and as .pftrace; no GPU is needed."""

import enum
import gzip
import importlib
import itertools
import json
import sys
import types

import pytest

GPU = ("kernel", "gpu_memcpy", "gpu_memset")
CALLS = ("cuda_runtime", "cuda_driver")
COPIES = {"htod": 1, "dtoh": 2, "dtod": 8, "ptop": 10}
MEMORIES = {"pageable": 1, "pinned": 2, "device": 3}
# What a JSON trace holds and torch leaves out of .pftrace.
ONLY_IN_JSON = ("deviceProperties", "lesson", "unprofiled_step_us", "distributedInfo", "host_name")


def exporter(numbers):
    """torch.profiler._cuspy.trace; numbers: of the CUDA API's functions, by category and name.

    It takes these from a package that is only there beside a GPU.
    """
    if "torch.profiler._cuspy.trace" not in sys.modules:
        cupti = types.ModuleType("cupti.cupti")
        cupti.Runtime_api_trace_cbid = cupti.Driver_api_trace_cbid = enum.Enum("Numbers", {})
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(sys.modules, "cupti", types.ModuleType("cupti"))
            patch.setitem(sys.modules, "cupti.cupti", cupti)
            importlib.import_module("torch.profiler._cuspy.trace")
    trace = sys.modules["torch.profiler._cuspy.trace"]
    trace._RUNTIME_CBID_NAMES, trace._DRIVER_CBID_NAMES = (
        {number: name for name, number in numbers[cat].items()} for cat in CALLS
    )
    return trace


def numbers_of(events):
    """A number for each function of the CUDA API in the trace: its own are those of another CUDA."""
    found = {cat: {} for cat in CALLS}
    for event in events:
        if event.get("cat") in CALLS:
            found[event["cat"]].setdefault(event["name"], len(found[event["cat"]]) + 1)
    return found


def columns_of(events, base_ns, numbers):
    """What the new collector would have recorded of the GPU and of the CUDA API, by category."""
    import numpy as np

    columns = {}
    for cat in (*GPU, *CALLS, "overhead"):
        found = [event for event in events if event["ph"] == "X" and event.get("cat") == cat]
        if not found:
            continue

        def column(get, dtype=np.int64, found=found):
            return np.array([get(event) for event in found], dtype=dtype)

        def arg(key, found=found):
            return np.array([int(event["args"].get(key, 0)) for event in found])

        none = np.zeros(len(found), np.int64)
        start = column(lambda event: base_ns + round(event["ts"] * 1000))
        one = columns[cat] = {"start_ns": start, "end_ns": start + column(lambda event: round(event["dur"] * 1000))}
        if cat == "overhead":
            one["name"] = column(lambda event: event["name"], object)
            continue
        one["correlation_id"] = arg("correlation")
        if cat in CALLS:
            one |= {
                "cbid": column(lambda event: numbers[event["cat"]][event["name"]]),
                "process_id": column(lambda event: event["pid"]), "thread_id": column(lambda event: event["tid"]),
            }  # fmt: skip
            continue
        one |= {
            "device_id": arg("device"), "context_id": arg("context"), "stream_id": arg("stream"),
            "graph_id": arg("graph id"), "graph_node_id": arg("graph node id"), "channel": none, "channel_type": none,
            "flags": none, "annotation": np.full(len(found), None, dtype=object),
            "metadata": column(collective, object),
        }  # fmt: skip
        if cat == "kernel":
            one |= {
                "name": column(lambda event: event["name"], object), "priority": none, "queued": none,
                "registers_per_thread": column(lambda event: event["args"].get("registers per thread", 1)),
                "static_shared_memory": none, "dynamic_shared_memory": arg("shared memory"),
            }  # fmt: skip
            for place, axis in enumerate("xyz"):
                for what in ("grid", "block"):
                    one[f"{what}_{axis}"] = column(
                        lambda event, what=what, at=place: event["args"].get(what, [1] * 3)[at]
                    )
        else:
            one["bytes"] = arg("bytes")
        if cat == "gpu_memcpy":  # "Memcpy HtoD (Pinned -> Device)"
            said = [event["name"].translate({40: None, 41: None}).lower().split() for event in found]
            for key, names, place in (("copy", COPIES, 1), ("src", MEMORIES, 2), ("dst", MEMORIES, 4)):
                one[f"{key}_kind"] = np.array([names.get(words[place], 0) for words in said])
        if cat == "gpu_memset":
            one |= {"value": none, "memory_kind": none + 3}
    return columns


def collective(event):
    """What Kineto notes of a collective on its kernel."""
    found = {key: value for key, value in event["args"].items() if key[0].isupper() and key != "External id"}
    return json.dumps(found | {"dtype": event["args"]["dtype"]}) if "Collective name" in found else None


def written(path, folder, more=None):
    """The trace written twice by torch, as JSON and as .pftrace; more: more of the window that it writes."""
    data = json.loads(gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes())
    events = data["traceEvents"]
    # torch rounds the product of a double, which from 2^42 µs on is off by 1 ns: count from near the first event.
    first = min(int(event["ts"]) for event in events if event["ph"] == "X")
    data["baseTimeNanoseconds"] = data.get("baseTimeNanoseconds", 0) + first * 1000
    for event in events:
        event["ts"] = round(event["ts"] - first, 3)
    numbers = numbers_of(events)
    window = {"columns": columns_of(events, data["baseTimeNanoseconds"], numbers), "thread_resource_map": {}}
    window |= more(data["baseTimeNanoseconds"]) if more else {}
    theirs = {*GPU, *CALLS, "overhead", "gpu_user_annotation", "ac2g"}
    data["traceEvents"] = [event for event in events if event.get("cat") not in theirs]
    cpu = folder / "cpu.json"
    cpu.write_text(json.dumps(data))
    files = folder / "run.json.gz", folder / "run.pftrace.gz"
    for file in files:
        exporter(numbers).merge_trace_window_into_chrome_trace(cpu, file, window)
    return files


def as_far_as_pftrace_has_it(file):
    """The file of torch's JSON without what torch leaves out of .pftrace or changes there; another file beside it."""
    data = json.loads(gzip.decompress(file.read_bytes()))
    data = {key: value for key, value in data.items() if key not in ONLY_IN_JSON}
    data["traceEvents"] = [event for event in data["traceEvents"] if event["name"] != "[memory]"]
    streams = {}
    for event in data["traceEvents"]:
        if event.get("cat") in GPU:
            # There the shared memory is the dynamic one alone, and a copy has no direction.
            for name in ("shared memory", "copy kind", "src kind", "dst kind"):
                event["args"].pop(name, None)
            streams.setdefault((event["pid"], event["tid"]), []).append(event)
    for work in streams.values():
        # There, GPU work ends at the latest where the next of its stream begins.
        work.sort(key=lambda event: event["ts"])
        for one, after in itertools.pairwise(work):
            one["dur"] = round(min(one["dur"], after["ts"] - one["ts"]), 3)
    same = file.with_name("same.json")
    same.write_text(json.dumps(data))
    return same
