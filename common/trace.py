"""A Chrome trace of PyTorch's profiler as data: steps, ops as a tree, launches, GPU work.

Imports no torch. Times are whole nanoseconds inside (a float µs stamp of today loses the last one
in a sum), microseconds wherever a name ends in _us.
"""

import bisect
import contextlib
import gc
import gzip
import json
import math
import os
import stat
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path

DEFAULT_LIMIT = 4 * 10**9  # bytes of JSON
DEFLATE_MOST = 1032  # to one, by the format
# What each category of Kineto's holds; the capitalized ones are what torch wrote before 2.0.
KINDS = {
    "user_annotation": "label",
    "cpu_op": "op", "Operator": "op",
    "python_function": "python",
    "cuda_runtime": "runtime", "cuda_driver": "runtime", "Runtime": "runtime", "hip_runtime": "runtime",
    "xpu_runtime": "runtime", "xpu_driver": "runtime",
    "kernel": "kernel", "gpu_memcpy": "memcpy", "gpu_memset": "memset",
    "Kernel": "kernel", "Memcpy": "memcpy", "Memset": "memset",
    "overhead": "overhead",
    "gpu_user_annotation": "span",  # on the kernels' own track: only good for finding crossings
}  # fmt: skip
GPU_KINDS = frozenset({"kernel", "memcpy", "memset"})
STEP = "ProfilerStep#"


class TraceError(Exception):
    """The file is no trace that can be read; says why in one line."""


@dataclass(slots=True, eq=False)
class Op:
    """One slice of a CPU thread: a label, an op, a Python function or a runtime call."""

    name: str
    kind: str
    start: int
    dur: int
    track: tuple
    args: dict
    parent: "Op | None" = None
    children: list["Op"] = field(default_factory=list)
    work: list["Work"] = field(default_factory=list)  # what this runtime call launched

    @property
    def end(self) -> int:
        return self.start + self.dur

    @property
    def us(self) -> float:
        return self.dur / 1e3

    def walk(self) -> Iterator["Op"]:
        """This op and all below it, in the order of their starts."""
        stack = [self]
        while stack:
            op = stack.pop()
            yield op
            stack.extend(reversed(op.children))

    def above(self) -> Iterator["Op"]:
        """What encloses it, innermost first."""
        op = self.parent
        while op is not None:
            yield op
            op = op.parent


@dataclass(slots=True, eq=False)
class Work:
    """One kernel, copy or memset on a GPU."""

    name: str
    kind: str
    start: int
    dur: int
    track: tuple
    args: dict
    launch: Op | None = None

    @property
    def end(self) -> int:
        return self.start + self.dur

    @property
    def us(self) -> float:
        return self.dur / 1e3

    @property
    def device(self) -> object:
        return self.args.get("device", self.track[0])

    @property
    def op(self) -> Op | None:
        """The innermost op around the launch; the launch's label where there is no op."""
        if self.launch is None:
            return None
        return next((op for op in self.launch.above() if op.kind in ("op", "label")), None)


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """One recorded step, or the whole of a trace that has none."""

    name: str
    start: int
    end: int
    roots: tuple[Op, ...]  # on every thread
    work: tuple[Work, ...]  # launched in it, in the order of their starts

    @property
    def us(self) -> float:
        return (self.end - self.start) / 1e3

    def walk(self) -> Iterator[Op]:
        for root in self.roots:
            yield from root.walk()

    def dispatch(self) -> Iterator[tuple[Op, int]]:
        """Every op with its depth, parents first. Python frames are passed over: none is a dispatch."""
        stack = [(root, 0) for root in reversed(self.roots)]
        while stack:
            op, depth = stack.pop()
            if op.kind != "python":
                yield op, depth
                depth += 1
            stack.extend((child, depth) for child in reversed(op.children))


@dataclass(frozen=True, eq=False)
class Trace:
    """What one trace file holds."""

    path: Path
    steps: tuple[Step, ...]
    has_steps: bool
    work: tuple[Work, ...]
    overheads: tuple[Op, ...]  # by their starts; the profiler's and the driver's own, on a track of their own
    outside: tuple[Op, ...]  # CPU slices in no step: the profiler's flush, mostly
    devices: tuple[str, ...]
    lesson: dict  # what a numbered script stored: script, flags, device, torch
    has_shapes: bool
    zeroed: int
    crossing: Counter  # slices that overlap another of their track without nesting, by name
    unlaunched: int  # GPU work whose launch is not in the trace


def read(path: Path, limit: int = DEFAULT_LIMIT) -> Trace:
    """The trace in a .json or .json.gz file.

    limit: the most bytes of JSON that are read, however small they were packed. Raises TraceError.
    """
    document = _document(path, limit)
    with _no_garbage_collection():
        return _build(path, document)


def _document(path: Path, limit: int) -> dict:
    try:
        data = _unpacked(path, limit)
    except FileNotFoundError:
        raise TraceError(f"{path}: no such file") from None
    except IsADirectoryError:
        raise TraceError(f"{path}: a folder, not a trace; name the .json file in it") from None
    except (EOFError, zlib.error, gzip.BadGzipFile) as problem:
        raise TraceError(f"{path}: broken gzip ({problem})") from None
    except (OSError, ValueError) as problem:
        raise TraceError(f"{path}: cannot be read ({getattr(problem, 'strerror', None) or problem})") from None
    try:
        with _no_garbage_collection():
            document = json.loads(data)
    except UnicodeDecodeError:
        raise TraceError(f"{path}: not text, so no Chrome trace") from None
    except (ValueError, RecursionError) as problem:
        raise TraceError(f"{path}: not JSON ({problem})") from None
    if not isinstance(document, dict) or not isinstance(document.get("traceEvents"), list):
        raise TraceError(f"{path}: JSON, but no trace of PyTorch's profiler (no traceEvents in it)")
    return document


def _unpacked(path: Path, limit: int) -> bytes:
    too_long = TraceError(f"{path}: more than {limit} bytes of JSON; --limit raises what is read")
    with open(path, "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise TraceError(f"{path}: not a plain file")
        packed = file.read(2) == b"\x1f\x8b"
        length = os.fstat(file.fileno()).st_size
        file.seek(0)
        if not packed:
            if length > limit:
                raise too_long
            return file.read()
        unzipped = gzip.GzipFile(fileobj=file)
        if length * DEFLATE_MOST > limit:
            # It may be a bomb: count what it holds before keeping any of it.
            held = 0
            while chunk := unzipped.read(1 << 20):
                held += len(chunk)
                if held > limit:
                    raise too_long
            unzipped.seek(0)
        return unzipped.read()


@contextlib.contextmanager
def _no_garbage_collection() -> Iterator[None]:
    # Nothing made while reading is garbage, and looking for it doubles the time.
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def is_zeroed(event: dict) -> bool:
    """A raw event with neither a time stamp nor a duration: nothing happens at time zero."""
    return event.get("ph") == "X" and not event.get("ts") and not event.get("dur")


def _kind(event: dict) -> str | None:
    category = event.get("cat")
    return KINDS.get(category) if isinstance(category, str) else None


def _build(path: Path, document: dict) -> Trace:
    events = document["traceEvents"]
    ops, work, spans, overheads, zeroed, shapes = [], [], [], [], 0, False
    # Emptied while it is read, so that the document and what is made of it never stand side by side.
    events.reverse()
    total = len(events)
    while events:
        event = events.pop()
        if not isinstance(event, dict):
            raise TraceError(f"{path}: event {total - len(events)} is no object")
        kind = _kind(event)
        if kind is None or event.get("ph") != "X":
            continue
        if is_zeroed(event):
            zeroed += 1
            continue
        name, args = event.get("name"), event.get("args")
        start, dur = _ns(event.get("ts")), _ns(event.get("dur"))
        if start is None or dur is None or dur < 0:
            what = "time stamp" if start is None else "duration"
            raise TraceError(f"{path}: event {total - len(events)} ({str(name)[:60]!r}) has no usable {what}")
        name = name if isinstance(name, str) else str(name)
        args = args if isinstance(args, dict) else {}
        track = (_plain(event.get("pid")), _plain(event.get("tid")))
        if kind in GPU_KINDS:
            work.append(Work(name, kind, start, dur, track, args))
        elif kind == "span":
            spans.append(Work(name, kind, start, dur, track, args))
        elif kind == "overhead":
            overheads.append(Op(name, kind, start, dur, track, args))
        else:
            ops.append(Op(name, kind, start, dur, track, args))
            shapes = shapes or "Input Dims" in args
    if not ops and not work and not zeroed:
        raise TraceError(f"{path}: a trace, but PyTorch's profiler did not write it (no op and no GPU work in it)")
    if not ops and not work:
        raise TraceError(f"{path}: all {zeroed} events have time stamp and duration zero (pytorch issue 188481)")
    if len(ops) + len(work) + zeroed < 2:
        raise TraceError(f"{path}: one event, too little to read")

    crossing = Counter()
    roots = _nest(ops, crossing)
    _nest([*work, *spans], crossing)
    _nest(overheads, crossing)
    unlaunched = _link(ops, work)
    work.sort(key=attrgetter("start"))
    steps, outside = _steps(ops, roots, work)
    return Trace(
        path=path,
        steps=steps,
        has_steps=steps[0].name.startswith(STEP),
        work=tuple(work),
        overheads=tuple(overheads),
        outside=outside,
        devices=_devices(document, work),
        lesson=_lesson(document),
        has_shapes=shapes,
        zeroed=zeroed,
        crossing=crossing,
        unlaunched=unlaunched,
    )


def _ns(us: object) -> int | None:
    # bool is an int, and JSON as Python reads it has NaN and Infinity.
    if type(us) not in (int, float) or not math.isfinite(us) or abs(us) > 1e16:
        return None
    return round(us * 1000)


def _plain(value: object) -> object:
    return value if isinstance(value, (int, str)) else str(value)


def _nest(slices: list, crossing: Counter) -> list[Op]:
    """Tie each slice to the innermost one of its track that it starts in; the roots, by start.

    A slice that outlasts the one it starts in crosses it: Perfetto drops such slices.
    """
    slices.sort(key=lambda one: (one.start, -one.dur))
    stacks: dict[tuple, list] = {}
    roots = []
    for one in slices:
        stack = stacks.setdefault(one.track, [])
        while stack and stack[-1].end <= one.start:
            stack.pop()
        if stack and one.end > stack[-1].end:
            crossing[one.name] += 1
        if type(one) is Op:
            if stack:
                one.parent = stack[-1]
                stack[-1].children.append(one)
            else:
                roots.append(one)
        stack.append(one)
    return roots


def _link(ops: list[Op], work: list[Work]) -> int:
    """Tie GPU work to the runtime call that launched it; how much of it has none here."""
    by_correlation = {}
    for op in ops:
        correlation = op.args.get("correlation")
        if op.kind == "runtime" and type(correlation) is int:
            by_correlation.setdefault(correlation, op)
    unlaunched = 0
    for one in work:
        correlation = one.args.get("correlation")
        launch = by_correlation.get(correlation) if type(correlation) is int else None
        if launch is None:
            unlaunched += 1
        else:
            one.launch = launch
            launch.work.append(one)
    return unlaunched


def _steps(ops: list[Op], roots: list[Op], work: list[Work]) -> tuple[tuple[Step, ...], tuple[Op, ...]]:
    marks = sorted((op for op in ops if op.kind == "label" and op.name.startswith(STEP)), key=attrgetter("start"))
    if not marks:
        everything = [*roots, *work]
        start, end = min(one.start for one in everything), max(one.end for one in everything)
        return (Step("whole trace", start, end, tuple(roots), tuple(work)),), ()
    starts = [mark.start for mark in marks]

    def number(time: int) -> int | None:
        index = bisect.bisect_right(starts, time) - 1
        return index if index >= 0 and time < marks[index].end else None

    in_step: list[list[Op]] = [[] for _ in marks]
    outside = []
    for root in roots:
        # What encloses a step (a Python function, with stacks) starts before it: look inside.
        tops = [root]
        while tops:
            top = tops.pop()
            index = number(top.start)
            if index is not None:
                in_step[index].append(top)
            elif top.kind in ("python", "label") and top.end > starts[0]:
                tops.extend(reversed(top.children))
            else:
                outside.append(top)
    launched: list[list[Work]] = [[] for _ in marks]
    for one in work:
        index = number(one.launch.start) if one.launch is not None else None
        if index is not None:
            launched[index].append(one)
    steps = (
        Step(mark.name, mark.start, mark.end, tuple(inside), tuple(done))
        for mark, inside, done in zip(marks, in_step, launched, strict=True)
    )
    return tuple(steps), tuple(outside)


def _devices(document: dict, work: list[Work]) -> tuple[str, ...]:
    """The names of the GPUs that did work; their numbers where the trace does not name them."""
    listed = document.get("deviceProperties")
    listed = [one for one in listed if isinstance(one, dict)] if isinstance(listed, list) else []
    named = {one["id"]: str(one.get("name")) for one in listed if isinstance(one.get("id"), int)}
    used = {one.device for one in work if isinstance(one.device, int)}
    return tuple(named.get(device, f"GPU {device}") for device in sorted(used))


def _lesson(document: dict) -> dict:
    lesson = document.get("lesson")
    if not isinstance(lesson, dict) or not isinstance(lesson.get("script"), str):
        return {}
    flags = lesson.get("flags")
    return {**lesson, "flags": flags if isinstance(flags, dict) else {}}
