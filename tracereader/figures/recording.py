"""What a recording lacks, and what in it is the profiler's or otherwise not the steps' own: see trace/quality.py."""

from statistics import median_high

import msgspec

from tracereader.figures.pace import cold_spans
from tracereader.trace import Step, Trace
from tracereader.trace.grouped import grouped, totals
from tracereader.trace.intervals import length
from tracereader.trace.slices import Records
from tracereader.trace.waits import OF_THE_DEVICE


class TwoKinds(msgspec.Struct, frozen=True):
    """Steps of two kinds: how many take longer, and the median time (µs) of these and of the others."""

    longer: int
    longer_us: float
    others_us: float


class Recording(Records, frozen=True, kw_only=True):
    """What a recording can decide.

    cold_us: the time of the typical step in calls that a warm step does not make, by kind; empty if that is hardly any.
    The step's time does not include it. earlier_us: by how much the first step waits longer, because of GPU work from
    before the recording; 0 without that. before_us, after_us: of a recording without steps, the time before its first
    GPU activity and after its last one, which is no idle time; 0 otherwise. earlier_work: whether there is GPU work
    before that activity, which was launched before the recording. mixed: None if the steps are of one kind.
    outlier: the name of the only step far longer than all others, which is not the first.
    """

    cold_us: dict[str, float]
    earlier_us: float
    before_us: float
    after_us: float
    earlier_work: bool
    mixed: TwoKinds | None
    outlier: str | None


def recording_of(trace: Trace, usual: Step) -> Recording:
    """Return what a recording can decide. usual: the typical step."""
    quality = trace.quality
    before, after = _around(trace)
    cold = quality.cold_in(usual) if length(cold_spans(trace, usual)) else ()
    return Recording(
        **{name: getattr(quality, name) for name in Records.__struct_fields__},
        cold_us=dict(totals((one.what, (one.end - one.start) / 1e3) for one in cold).most_common()),
        earlier_us=quality.earlier.ns / 1e3 if quality.earlier is not None else 0.0,
        before_us=before / 1e3,
        after_us=after / 1e3,
        earlier_work=bool(before) and trace.work[0].start < trace.steps[0].work[0].start,
        mixed=_two_kinds(trace),
        outlier=next((step.name for step in trace.steps if step.start == quality.outlier), None),
    )


def _around(trace: Trace) -> tuple[int, int]:
    """Return the time (ns) before the first and after the last GPU activity of a recording without steps."""
    step = trace.steps[0]
    if trace.has_steps or not step.work or trace.quality.incomplete:
        return 0, 0
    return step.work[0].start - step.start, step.end - max(one.start + one.dur for one in step.work)


def _two_kinds(trace: Trace) -> TwoKinds | None:
    if trace.quality.mixed is None:
        return None
    by_kind = grouped((step.start in trace.quality.mixed.long, step.us) for step in trace.steps)
    return TwoKinds(len(by_kind[True]), median_high(by_kind[True]), median_high(by_kind[False]))


class BufferRequest(msgspec.Struct, frozen=True):
    """The profiler's allocation of a buffer for GPU records."""

    us: float
    before_first_work: bool


class Profiler(msgspec.Struct, frozen=True):
    """The profiler's own slices. final_sync_us: the time to collect the GPU's records after the last step."""

    buffer_requests: tuple[BufferRequest, ...]
    final_sync_us: float | None


def profiler(trace: Trace) -> Profiler:
    """Return the profiler's own overhead over the whole trace."""
    first = min((one.start for step in trace.steps for one in step.work), default=0)
    end = max(step.end for step in trace.steps)
    buffers = [one for one in trace.overheads if one.name == "Activity Buffer Request"]
    last = next((op.us for op in trace.outside if OF_THE_DEVICE in op.name and op.start >= end), None)
    return Profiler(tuple(BufferRequest(one.us, one.start < first) for one in buffers), last)
