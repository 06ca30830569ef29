"""The profiler's own overhead, as far as the trace shows it."""

from collections import Counter

import msgspec

from tracereader.trace import Trace
from tracereader.trace.waits import OF_THE_DEVICE


class BufferRequest(msgspec.Struct, frozen=True):
    """The profiler's allocation of a buffer for GPU records."""

    us: float
    before_first_work: bool


class Overhead(msgspec.Struct, frozen=True):
    """The profiler's or the driver's own slices of one name."""

    count: int
    us: float


class Profiler(msgspec.Struct, frozen=True):
    """The profiler's own slices. final_sync_us: the time to collect the GPU's records after the last step."""

    buffer_requests: tuple[BufferRequest, ...]
    overheads: dict[str, Overhead]
    final_sync_us: float | None


def profiler(trace: Trace) -> Profiler:
    """Return the profiler's own overhead over the whole trace."""
    first = min((one.start for step in trace.steps for one in step.work), default=0)
    end = max(step.end for step in trace.steps)
    requests, count, us = [], Counter(), Counter()
    for one in trace.overheads:
        count[one.name] += 1
        us[one.name] += one.us
        if one.name == "Activity Buffer Request":
            requests.append(BufferRequest(one.us, one.start < first))
    overheads = {name: Overhead(count[name], us[name]) for name in count}
    last = next((op.us for op in trace.outside if OF_THE_DEVICE in op.name and op.start >= end), None)
    return Profiler(tuple(requests), overheads, last)
