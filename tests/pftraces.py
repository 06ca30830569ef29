"""A recorded trace written once more by torch 2.15's own exporter, as JSON and as .pftrace; no GPU is needed."""

import enum
import gzip
import json
import sys
import types
from pathlib import Path

import numpy as np

GPU = ("kernel", "gpu_memcpy", "gpu_memset")
CALLS = ("cuda_runtime", "cuda_driver")
COPIES = {"HtoD": 1, "DtoH": 2, "DtoD": 8, "PtoP": 10}
MEMORIES = {"pageable": 1, "pinned": 2, "device": 3}


def exporter(events):
    """torch.profiler._cuspy.trace, whose table of the CUDA API's numbers comes from this trace."""
    names = {cat: {} for cat in CALLS}
    for event in events:
        if event.get("cat") in CALLS:
            # The number that the trace has is that of another CUDA, and a name may lack one.
            names[event["cat"]].setdefault(event["name"], len(names[event["cat"]]) + 1)
    cupti = types.ModuleType("cupti.cupti")
    cupti.Runtime_api_trace_cbid = enum.Enum("Runtime", names["cuda_runtime"])
    cupti.Driver_api_trace_cbid = enum.Enum("Driver", names["cuda_driver"])
    sys.modules["cupti"], sys.modules["cupti.cupti"] = types.ModuleType("cupti"), cupti
    from torch.profiler._cuspy import trace

    trace._RUNTIME_CBID_NAMES = trace._DRIVER_CBID_NAMES = None
    trace.Runtime_api_trace_cbid, trace.Driver_api_trace_cbid = (
        cupti.Runtime_api_trace_cbid, cupti.Driver_api_trace_cbid,
    )  # fmt: skip
    return trace, names


def window(events, base_ns, numbers):
    """What the new collector would have recorded of the GPU and of the CUDA API: columns by category."""

    def ns(us):
        return base_ns + round(us * 1000)

    def column(found, get, dtype=np.int64):
        return np.array([get(event) for event in found], dtype=dtype)

    def named(found, key, names=None):
        def get(event):
            value = event["args"].get(key, 0)
            return names[value] if names else int(value)

        return column(found, get)

    columns = {}
    for cat in (*GPU, *CALLS, "overhead"):
        found = [event for event in events if event.get("ph") == "X" and event.get("cat") == cat]
        if not found:
            continue
        start = column(found, lambda event: ns(event["ts"]))
        one = columns[cat] = {
            "start_ns": start,
            "end_ns": start + column(found, lambda event: round(event["dur"] * 1000)),
        }
        if cat == "overhead":
            one["name"] = column(found, lambda event: event["name"], object)
            continue
        one["correlation_id"] = named(found, "correlation")
        if cat in CALLS:
            one["cbid"] = column(found, lambda event: numbers[event["cat"]][event["name"]])
            one["process_id"] = column(found, lambda event: event["pid"])
            one["thread_id"] = column(found, lambda event: event["tid"])
            continue
        one |= {
            "device_id": named(found, "device"), "context_id": named(found, "context"),
            "stream_id": named(found, "stream"), "channel": named(found, "channel"),
            "channel_type": named(found, "channel_type"), "graph_id": named(found, "graph id"),
            "graph_node_id": named(found, "graph node id"),
            "annotation": np.full(len(found), None, dtype=object), "metadata": column(found, collective, object),
        }  # fmt: skip
        if cat == "kernel":
            one |= {
                "name": column(found, lambda event: event["name"], object),
                "registers_per_thread": named(found, "registers per thread"),
                "static_shared_memory": np.zeros(len(found), np.int64),
                "dynamic_shared_memory": named(found, "shared memory"),
                "priority": named(found, "priority"), "queued": named(found, "queued"),
            }  # fmt: skip
            for place, axis in enumerate("xyz"):
                one[f"grid_{axis}"] = column(found, lambda event, place=place: event["args"]["grid"][place])
                one[f"block_{axis}"] = column(found, lambda event, place=place: event["args"]["block"][place])
        else:
            one |= {"bytes": named(found, "bytes"), "flags": np.zeros(len(found), np.int64)}
        if cat == "gpu_memcpy":
            # Kineto has "Memcpy HtoD (Pinned -> Device)".
            said = [event["name"].replace("(", "").replace(")", "").lower().split() for event in found]
            kinds = {name.lower(): number for name, number in COPIES.items()}
            one["copy_kind"] = np.array([kinds.get(words[1], 0) for words in said])
            one["src_kind"] = np.array([MEMORIES.get(words[2], 0) for words in said])
            one["dst_kind"] = np.array([MEMORIES.get(words[4], 0) for words in said])
        if cat == "gpu_memset":
            one |= {"value": np.zeros(len(found), np.int64), "memory_kind": np.full(len(found), 3)}
    annotations = {
        event["args"]["External id"]: event["name"]
        for event in events if event.get("cat") == "user_annotation" and "External id" in event.get("args", {})
    }  # fmt: skip
    launches = [
        event for event in events if event.get("cat") in CALLS and "External id" in event["args"]
    ]  # fmt: skip
    if launches:
        external = named(launches, "External id")
        columns["external_correlation"] = {
            "correlation_id": named(launches, "correlation"), "external_id": external,
            "user_external_id": np.array([enclosing(event, events) for event in launches]),
        }  # fmt: skip
    return {"columns": columns, "user_annotations": annotations, "thread_resource_map": {}}


def enclosing(launch, events):
    """The External id of the innermost annotation around a launch; 0: none."""
    return 0


def collective(event):
    """What Kineto notes of a collective on its kernel."""
    found = {key: value for key, value in event["args"].items() if key[0].isupper() and key != "External id"}
    return json.dumps(found) if "Collective name" in found else None


def written(path, folder):
    """The trace written twice by torch, as JSON and as .pftrace."""
    path = Path(path)
    data = json.loads(gzip.open(path).read() if path.suffix == ".gz" else path.read_bytes())
    events = data["traceEvents"]
    # torch rounds the product of a double, and from 2^42 µs on that is off by 1 ns: count from near the first event.
    first = min(int(event["ts"]) for event in events if event["ph"] == "X")
    data["baseTimeNanoseconds"] += first * 1000
    for event in events:
        event["ts"] = round(event["ts"] - first, 3)
    trace, numbers = exporter(events)
    recorded = window(events, data["baseTimeNanoseconds"], numbers)
    device = {*GPU, *CALLS, "overhead", "gpu_user_annotation"}
    cpu = folder / "cpu.json"
    data["traceEvents"] = [
        event for event in events if event.get("cat") not in device and event.get("name") != "process_sort_index"
    ]
    data["traceEvents"] = [event for event in data["traceEvents"] if event.get("cat") != "ac2g"]
    cpu.write_text(json.dumps(data))
    files = folder / "run.json.gz", folder / "run.pftrace.gz"
    for file in files:
        trace.merge_trace_window_into_chrome_trace(cpu, file, recorded)
    return files
