"""A step's calls merged by their path, as a flame graph draws them: what calls what, and for how long in all."""

from collections.abc import Iterable

import msgspec

from tracereader.figures.gpu_time import nested
from tracereader.trace import Step, Trace

# A path with less than this share of all time is too narrow to be drawn, and so is what a deeper call calls. Their time
# is in that of the call around them.
NARROW, DEEPEST = 0.002, 100


class Flame(msgspec.Struct):
    """All calls of one path. us: their time with what they call. below: the calls inside, the longest first."""

    name: str
    us: float
    calls: int
    below: list["Flame"]


def of_ops(step: Step) -> list[Flame]:
    """Return the flames of a step's annotations, ops and runtime calls, the longest first."""
    return _merged((op.name, depth, op.dur) for op, depth in step.dispatch())


def of_python(trace: Trace, step: Step) -> list[Flame]:
    """Return the flames of the Python functions that ran in a step, on all threads; empty without recorded stacks."""
    return _merged(
        (name, depth, min(end, step.end) - max(start, step.start))
        for frames in trace.frames.values()
        for name, depth, start, end in nested(one for one in frames if one.start < step.end and one.end > step.start)
    )


def _merged(calls: Iterable[tuple[str, int, int]]) -> list[Flame]:
    """Return the flames of calls that are given by name, depth and time (ns), callers first."""
    root = Flame("", 0.0, 0, [])
    path, below = [root], {}  # below: the flame by the id of the one around it, and the name
    for name, depth, ns in calls:
        if depth >= DEEPEST:
            continue
        del path[depth + 1 :]
        key = id(path[-1]), name
        if key not in below:
            below[key] = Flame(name, 0.0, 0, [])
            path[-1].below.append(below[key])
        path.append(below[key])
        path[-1].us += ns  # ns until all calls are added
        path[-1].calls += 1
    least, todo = NARROW * sum(one.us for one in root.below), [root]
    while todo:
        one = todo.pop()
        one.below = sorted((inner for inner in one.below if inner.us >= least), key=lambda inner: -inner.us)
        one.us /= 1e3
        todo += one.below
    return root.below
