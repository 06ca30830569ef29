"""The profiler's own overhead, as far as the trace shows it."""

from collections import Counter

import msgspec

from tracereader.trace import Op, Trace
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
    return Profiler(_buffer_requests(trace), _overheads(trace), _final_sync_us(trace))


def _buffer_requests(trace: Trace) -> tuple[BufferRequest, ...]:
    first = min((one.start for step in trace.steps for one in step.work), default=0)
    return tuple(
        BufferRequest(one.us, one.start < first) for one in trace.overheads if one.name == "Activity Buffer Request"
    )


def _overheads(trace: Trace) -> dict[str, Overhead]:
    count, us = Counter(), Counter()
    for one in trace.overheads:
        count[one.name] += 1
        us[one.name] += one.us
    return {name: Overhead(count[name], us[name]) for name in count}


def _final_sync_us(trace: Trace) -> float | None:
    end = max(step.end for step in trace.steps)
    sync: Op | None = next((op for op in trace.outside if OF_THE_DEVICE in op.name and op.start >= end), None)
    return sync.us if sync else None
