"""A step's time by place in the program: by annotations (phases) and by modules."""

import bisect
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import chain

import msgspec

from tracereader.trace import MODULE, Op, Step, Trace, innermost, outermost, start_of
from tracereader.trace.grouped import totals
from tracereader.trace.labels import is_phase

NUMBER = re.compile(r"_\d+$")  # the number of a module within its class
OUTSIDE_PHASES = "outside them"  # the row for work outside all phases or annotations


class Place(msgspec.Struct, frozen=True):
    """GPU time of the work launched there. pieces: the number of GPU activities, or of ops in a step without GPU work.

    cpu_us: the time of an annotation's slices, or of a module's ops in a step without GPU work; else None.
    """

    name: str
    cpu_us: float | None
    gpu_us: float
    pieces: int


def by_label(step: Step) -> tuple[Place, ...]:
    """Return the outermost annotations of a step in the order of their starts; empty if there are fewer than two.

    If one annotation encloses all others, those directly inside it count. Work that another thread (backward's)
    launched counts by the time of its launch. Work of a CUDA graph counts for the annotation that its capture gave it.
    """
    labels = phases(step)
    replays = step.named(lambda name: "GraphLaunch" in name)
    annotated = {id(one): name for one in step.work if (name := one.annotation)} if replays else {}
    if len({label.name for label in labels} | set(annotated.values())) < 2:
        return ()
    cpu, gpu = totals((label.name, label.dur) for label in labels), defaultdict(list)
    for one in step.work:
        index = bisect.bisect_right(labels, one.launch.start, key=start_of) - 1 if one.launch else -1
        inside = index >= 0 and one.launch.start < labels[index].end
        name = annotated.get(id(one)) or (labels[index].name if inside else OUTSIDE_PHASES)
        gpu[name].append(one.dur)
    us = {name: cpu[name] / 1e3 if name in cpu else None for name in [*cpu, *gpu]}
    return tuple(Place(name, us[name], sum(gpu[name]) / 1e3, len(gpu[name])) for name in us)


def phases(step: Step) -> list[Op]:
    """Return the outermost annotations that mark phases, by start; if one encloses all others, those right inside it.

    Only the thread that runs the steps counts, if the trace shows it, because annotations of several threads overlap.
    """
    mark = next((root for root in step.roots if root.name == step.name), None)
    outermost = labels = _outermost_labels([root for root in step.roots if mark is None or root.track == mark.track])
    while len({label.name for label in labels}) == 1:
        labels = _outermost_labels([child for label in labels for child in label.children])
    return sorted(labels or outermost, key=start_of)


def _outermost_labels(ops: Sequence[Op]) -> list[Op]:
    labels: list[Op] = []
    pending = list(reversed(ops))
    while pending:
        op = pending.pop()
        if op.kind == "label":
            if is_phase(op.name):
                labels.append(op)
            else:
                pending.extend(reversed(op.children))
        elif op.children:
            last = op.children[-1]
            if last.start + last.dur > op.start + op.dur:
                # An asynchronous call's slice outlasts the op in which it begins, and encloses what follows.
                pending.extend(reversed(op.children))
    return labels


def by_module(trace: Trace, step: Step) -> tuple[tuple[Place, ...], tuple[Place, ...]]:
    """Return the time of a step by the innermost nn.Module around the launch, the largest first; empty without stacks.

    The time is GPU time, or the CPU time of the outermost ops in a step without GPU work. Backward's work counts for
    the module of the forward op that its op belongs to, if the trace ties them. The second result has the sums by the
    module's class and its parent's class, with the number of modules per parent. A model's equal layers become one row:
    "84 x Linear in Qwen3MLP".
    """
    modules, classes, members = [], [], defaultdict(set)
    for names, backward, ns, count in _in_modules(trace, step):
        way = " backward" * backward
        modules.append((names[-1] + way if names else "no module", ns, count))
        of_class = " in ".join(NUMBER.sub("", one) for one in reversed(names[-2:])) + way if names else "no module"
        classes.append((of_class, ns, count))
        members[of_class].update(names[-1:])
    several = {name: f"{len(some)} x {name}" for name, some in members.items() if len(some) > 1}
    return _places(step, modules), _places(step, [(several.get(name, name), *figures) for name, *figures in classes])


def _asked_for(trace: Trace, step: Step) -> Iterator[tuple[Trace, Op | None, int]]:
    """Yield the calls that take the step's time, each with the trace that has it and the time (ns).

    These are the calls that asked for GPU work, or the outermost ops of a step without GPU work.
    """
    if step.work:
        yield from ((one.recorded.trace if one.recorded else trace, one.asked, one.dur) for one in step.work)
        return
    for op in outermost(step.roots, lambda op: op.kind == "op"):
        # An op of backward contains the op that is tied to a forward op.
        yield trace, next((one for one in op.walk() if (one.track, one.start) in trace.forward_of), op), op.dur


def _places(step: Step, some: Sequence[tuple[str, int, int]]) -> tuple[Place, ...]:
    """Return the places, the largest first, by the name, the time (ns) and the activities of their parts."""
    time, pieces = totals((name, ns) for name, ns, _ in some), totals((name, count) for name, _, count in some)
    us = {name: (None, ns / 1e3) if step.work else (ns / 1e3, 0.0) for name, ns in time.most_common()}
    return tuple(Place(name, *us[name], pieces[name]) for name in us)


def by_module_path(trace: Trace, step: Step) -> dict[tuple[str, ...], tuple[int, int]]:
    """Return by_module()'s times (ns) and numbers of activities, by the modules around, outermost first."""
    found: dict[tuple[str, ...], tuple[int, int]] = {}
    for names, backward, ns, count in _in_modules(trace, step):
        path = (*names[:-1], names[-1] + " backward" * backward) if names else ("no module",)
        before, pieces = found.get(path, (0, 0))
        found[path] = before + ns, pieces + count
    return found


def _in_modules(trace: Trace, step: Step) -> list[tuple[list[str], bool, int, int]]:
    """Return the modules in which the step takes time, by the innermost module's call and by forward and backward.

    Each has the names of the modules around, outermost first, whether backward launched the work, the time (ns), and
    the number of activities. Empty without stacks.
    """
    captured = trace.captured and any(one.recorded and one.recorded.trace.modules for one in step.work)
    if not (trace.modules or captured):
        return []
    around: dict[tuple[int, bool], list[str]] = {}
    times = defaultdict(list)
    for shown, call, dur in _asked_for(trace, step):
        modules, backward = _modules_around(shown, call)
        key = (id(modules[-1]) if modules else 0, backward)
        if key not in around:
            around[key] = [module.name.removeprefix(MODULE) for module in modules]
        times[key].append(dur)
    return [(names, key[1], sum(times[key]), len(times[key])) for key, names in around.items()]


def _modules_around(trace: Trace, launch: Op | None) -> tuple[list[Op], bool]:
    """Return the modules around a launch or its forward op, outermost first, and whether backward launched it."""
    if launch is None:
        return [], False
    track, time, backward = launch.track, launch.start, False
    for op in chain((launch,), launch.above()):
        if forward := trace.forward_of.get((op.track, op.start)):
            again = innermost(trace.modules.get(track, ()), time)
            if again and again[-1].start >= op.start:  # a module that recomputes inside backward (checkpointing)
                return again, False
            track, time, backward = *forward, True
            break
    return innermost(trace.modules.get(track, ()), time), backward
