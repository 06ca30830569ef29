"""Traces as torch 2.15's collector of CUDA activities ("cuspy") writes them, made without a GPU.

torch's own exporter merges columns of CUPTI's records into the CPU's trace. Here the columns come from the events of a
recorded trace, and a test adds what that trace has not: graph nodes, synchronizations, samples.
"""

import decimal
import enum
import gzip
import json
import re
import sys
import types

import numpy as np
import pytest

WORK = {"kernel": "kernel", "gpu_memcpy": "gpu_memcpy", "gpu_memset": "gpu_memset"}
CALLS = ("cuda_runtime", "cuda_driver")
COPIES = {"HtoD": 1, "DtoH": 2, "DtoD": 8, "PtoP": 10}
MEMORY = {"Unknown": 0, "Pageable": 1, "Pinned": 2, "Device": 3, "Managed": 5}
OBJECTS = ("name", "annotation", "host_fn", "lane_name")


class Recorded:
    """The rows of a recorded trace, by the exporter's kinds, for a test to change before they are written."""

    def __init__(self, path):
        self.document = json.loads(gzip.decompress(path.read_bytes()))
        self.base = self.document["baseTimeNanoseconds"]
        self.names = {kind: {} for kind in CALLS}
        self.rows = {}
        self.window = {}
        kept = []
        for event in self.document["traceEvents"]:
            kind = event.get("cat")
            if kind in ("ac2g", "gpu_user_annotation"):
                continue
            if event["ph"] != "X" or (kind not in WORK and kind not in CALLS):
                kept.append(event)
                continue
            args = event["args"]
            row = {"start_ns": self.ns(event["ts"]), "end_ns": self.ns(event["ts"]) + round(event["dur"] * 1000)}
            row["correlation_id"] = args["correlation"]
            if kind in CALLS:
                self.names[kind][event["name"]] = args["cbid"]
                row |= {"cbid": args["cbid"], "process_id": event["pid"], "thread_id": event["tid"]}
            else:
                row |= self._of_work(kind, event, args)
            self.rows.setdefault(kind, []).append(row)
        self.document["traceEvents"] = kept

    def ns(self, us):
        """A stamp of the file: beyond 2^43 µs a product of doubles is off by a nanosecond."""
        return self.base + round(decimal.Decimal(repr(us)) * 1000)

    def _of_work(self, kind, event, args):
        row = {"device_id": args["device"], "context_id": args["context"], "stream_id": args["stream"]}
        row |= {"graph_id": 0, "graph_node_id": 0, "annotation": None, "channel": 0, "channel_type": 0}
        if kind == "kernel":
            row |= {"name": event["name"], "registers_per_thread": args["registers per thread"], "priority": 0}
            row |= {f"grid_{axis}": size for axis, size in zip("xyz", args["grid"], strict=True)}
            row |= {f"block_{axis}": size for axis, size in zip("xyz", args["block"], strict=True)}
            return row | {
                "static_shared_memory": 0, "dynamic_shared_memory": args["shared memory"], "queued": args["queued"],
            }  # fmt: skip
        row |= {"bytes": args["bytes"], "flags": 0}
        if kind == "gpu_memset":
            return row | {"value": 0, "memory_kind": MEMORY[re.search(r"\((\w+)\)", event["name"])[1]]}
        way, source, target = re.fullmatch(r"Memcpy (\w+) \((\w+) -> (\w+)\)", event["name"]).groups()
        return row | {"copy_kind": COPIES[way], "src_kind": MEMORY[source], "dst_kind": MEMORY[target]}

    def write(self, path, monkeypatch):
        """Write it with torch's exporter; the path."""
        exporter = exporter_of_torch(monkeypatch, self.names)
        columns = {}
        for kind, rows in self.rows.items():
            columns[kind] = {name: _column(name, [row[name] for row in rows]) for name in rows[0]}
        source = path.with_name("cpu.json")
        source.write_text(json.dumps(self.document))
        exporter.merge_trace_window_into_chrome_trace(source, path, {"columns": columns, **self.window})
        return path


def _column(name, values):
    if name in OBJECTS:
        column = np.empty(len(values), dtype=object)
        column[:] = values
        return column
    return np.asarray(values, dtype=np.uint64 if name == "data" else None)


def exporter_of_torch(monkeypatch, names):
    """torch.profiler._cuspy.trace. The package that it takes the names of CUDA's calls from needs CUDA's libraries, so
    the recorded names stand in for it.
    """
    stand_in = types.ModuleType("cupti.cupti")
    for name, calls in (("Runtime", names["cuda_runtime"]), ("Driver", names["cuda_driver"])):
        setattr(stand_in, f"{name}_api_trace_cbid", enum.IntEnum(f"{name}_api_trace_cbid", calls))
    monkeypatch.setitem(sys.modules, "cupti", types.ModuleType("cupti"))
    monkeypatch.setitem(sys.modules, "cupti.cupti", stand_in)
    monkeypatch.delitem(sys.modules, "torch.profiler._cuspy.trace", raising=False)
    return pytest.importorskip("torch.profiler._cuspy.trace", reason="torch has this collector from 2.15 on")
