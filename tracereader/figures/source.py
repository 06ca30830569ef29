"""The source of a trace: the file, the devices, the rank, and defects of the trace itself."""

from collections.abc import Iterator
from itertools import islice

import msgspec

from tracereader.figures.captures import captures
from tracereader.trace import Trace
from tracereader.trace.capture import is_launch
from tracereader.trace.facts import RunFacts
from tracereader.trace.lenient import Defects
from tracereader.trace.quality import earlier_work
from tracereader.trace.slices import Process

LEAST_LEAD_NS = 1_000  # clocks that are aligned to a microsecond change no figure that a report prints
# What a Source has of the Trace under the same names.
KEPT = ("facts", "backend", "has_steps", "steps_by", "steps_end_with_it", "calls_in_a_step", "processes")


class TraceWarning(msgspec.Struct, frozen=True):
    """A defect of the trace itself.

    name: zero_times, of `count` events; defects, with those of the file;
    category_left_out and category_taken_for_work, `count` slices of one category; captures_not_used, the files of a
    trace without CUDA graphs; no_order, no_capture_fits and captures_differ, `count` CUDA graph launches that these
    files do not describe (see capture.tie); no_gpu_records, though the CPU launched something; no_launch, of `count`
    GPU activities that take `us` µs in sum; launched_before, the same if they precede all launched activities of their
    streams; one_of_several_processes, the first `names` being the process that is read and the others those of `count`
    other processes; others_without_gpu_work, the same if no other process has any; of_no_process, `count` GPU
    activities; starts_before_launch, of `count` GPU activities, at most `us` µs before their launch calls.
    """

    name: str
    count: int = 0
    names: tuple[str, ...] = ()
    us: float | None = None
    defects: Defects | None = None


class Source(msgspec.Struct, frozen=True):
    """The source of a trace."""

    trace: str
    facts: RunFacts
    devices: list[str]
    backend: str | None  # the kind of these devices, as in trace/backends.py; None where nothing shows it
    compute_capability: str | None  # of an NVIDIA GPU, as in sm 90; None for several kinds of GPU
    sms: int  # multiprocessors of a device, the largest number; 0 if it is not known
    rank: int | None
    world_size: int | None
    has_steps: bool
    steps_by: str | None  # the annotation or op whose calls mark the steps, if the profiler's own marks do not
    steps_end_with_it: bool  # whether each step ends with such a call, instead of beginning with it
    calls_in_a_step: int  # of those that end steps: 2 if each second call does
    outside_us: float | None  # of a recording with such steps, the time before and after them
    processes: tuple[Process, ...]  # of a file that holds several: the one that is read, and then the others
    shapes_recorded: bool
    peak_bytes: int | None  # the peak of allocated memory, by the profiler's memory events; on a GPU if one worked
    warnings: tuple[TraceWarning, ...]

    @property
    def leaves_gpu_out(self) -> bool:
        """Return whether GPU activities of the file are left out, so that nothing can be said about the GPU."""
        return any(one.defects is not None and one.defects.gpu > 0 for one in self.warnings)


def source(trace: Trace) -> Source:
    """Return the source of a trace."""
    properties = trace.device_properties.values()
    return Source(
        trace=str(trace.path),
        devices=list(trace.devices),
        compute_capability=_compute_capability(trace),
        sms=max((one["numSms"] for one in properties if type(one.get("numSms")) is int), default=0),
        rank=trace.rank.rank if trace.rank else None,
        world_size=trace.rank.world_size if trace.rank else None,
        **{name: getattr(trace, name) for name in KEPT},
        outside_us=_outside_us(trace) if trace.steps_by is not None else None,
        shapes_recorded=trace.has_shapes,
        peak_bytes=max((one.total for one in trace.memory if one.device >= 0 or not trace.work), default=0) or None,
        warnings=tuple(_warnings(trace)),
    )


def _outside_us(trace: Trace) -> float:
    """Return the time (µs) of the recording before the first step and after the last one.

    A call of the CUDA runtime may be the profiler's own, for example its wait for the GPU at the end.
    """
    slices = [op for op in trace.outside if op.kind != "runtime"]
    before = max([trace.steps[0].start - op.start for op in slices], default=0)
    return (max(0, before) + max(0, max([op.end - trace.steps[-1].end for op in slices], default=0))) / 1e3


def _compute_capability(trace: Trace) -> str | None:
    if trace.backend not in ("cuda", None):
        return None  # AMD's devices have numbers of this name, too
    pairs = [(one.get("computeMajor"), one.get("computeMinor")) for one in trace.device_properties.values()]
    if not all(type(number) is int for pair in pairs for number in pair) or len(set(pairs)) != 1:
        return None
    return "{}{}".format(*pairs[0])


def _warnings(trace: Trace) -> Iterator[TraceWarning]:
    if trace.processes:
        mine, *others = trace.processes
        alike = [one for one in others if one.gpu_activities] if mine.gpu_activities else others
        names = tuple(one.name for one in (mine, *(alike or others)))
        yield TraceWarning("one_of_several_processes" if alike else "others_without_gpu_work", len(names) - 1, names)
    if trace.of_no_process:
        yield TraceWarning("of_no_process", trace.of_no_process)
    if trace.zeroed:
        yield TraceWarning("zero_times", trace.zeroed)
    if trace.defects != Defects():
        yield TraceWarning("defects", defects=trace.defects)
    for name, some in (("category_left_out", trace.not_known), ("category_taken_for_work", trace.taken)):
        yield from (TraceWarning(name, count, (category,)) for category, count in some.most_common(3))
    if trace.captured:
        given = tuple(str(path) for path in trace.captured)
        if not any(one.from_graph for step in trace.steps for one in step.work):
            yield TraceWarning("captures_not_used", names=given)
        for reason, count in trace.untied.items():
            yield TraceWarning(reason, count, given)
    if not trace.work and not trace.defects.gpu and _launches(trace):
        yield TraceWarning("no_gpu_records")
    if unlaunched := [one for one in trace.work if one.launch is None]:
        before = len(earlier_work(trace.device_waits, trace.work)) == len(unlaunched)
        us = sum(one.us for one in unlaunched)
        yield TraceWarning("launched_before" if before else "no_launch", len(unlaunched), us=us)
    leads = [one.launch.start - one.start for one in trace.work if one.launch is not None]
    if early := [ns for ns in leads if ns >= LEAST_LEAD_NS]:
        yield TraceWarning("starts_before_launch", len(early), us=max(early) / 1e3)


def _launches(trace: Trace) -> bool:
    """Return whether the CPU called the CUDA runtime API to launch anything, apart from a graph's capture."""
    if not any("Launch" in name for name in trace.op_names):
        return False
    roots = trace.roots
    found = captures(roots, trace.op_names)
    least = found.launches if found else 0
    return any(islice((True for root in roots for op in root.walk() if is_launch(op)), least, None))
