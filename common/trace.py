"""A Chrome trace of PyTorch's profiler as data. Imports no torch."""

import gzip
import json
from pathlib import Path

# Kineto's category names; the capitalized ones are what torch wrote before 2.0.
GPU_WORK = frozenset({"kernel", "gpu_memcpy", "gpu_memset", "Kernel", "Memcpy", "Memset"})


class TraceError(Exception):
    """The file is no trace that can be read; says why in one line."""


def read_json(path: Path) -> dict | list:
    """The document in a .json or .json.gz file."""
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "rb") as file:
        return json.load(file)


def events(document: dict | list) -> list[dict]:
    """The events of a Chrome trace, in either of its two shapes."""
    return document["traceEvents"] if isinstance(document, dict) else document


def is_gpu_work(event: dict) -> bool:
    """A kernel, a copy or a memset."""
    return event.get("cat") in GPU_WORK


def is_zeroed(event: dict) -> bool:
    """A complete event with neither a time stamp nor a duration: nothing happens at time zero."""
    return event.get("ph") == "X" and not event.get("ts") and not event.get("dur")
