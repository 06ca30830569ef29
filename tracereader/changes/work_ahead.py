"""Changes that move CPU work out of the step: loading, work on CPU tensors, Python."""

from collections.abc import Iterable, Sequence
from itertools import chain

from tracereader.changes import prices
from tracereader.changes.change import change
from tracereader.changes.context import Case
from tracereader.changes.host import Stretch, host, on_launching_threads
from tracereader.changes.opportunity import Proposal
from tracereader.figures.gpu_time import is_python, python_in
from tracereader.figures.steps import labels, ops_recorded
from tracereader.findings.finding import duration, listed
from tracereader.findings.ops import with_cpu_tensors
from tracereader.replay.changes import spans_of, with_cpu_time, without_cpu_time
from tracereader.trace.grouped import grouped, totals
from tracereader.trace.intervals import length, union
from tracereader.trace.labels import LOADER, is_phase
from tracereader.two_runs.same_work import halved, same_heavy, the_same_work

# A pause from this length on is the program's own, and is as long without the profiler. In a DDP step of two and four
# H200s, a pause of 10 ms was. A shorter one may be time of the profiler.
LONG_PAUSE_US = 1000
LONG_OP_US = 100  # on average: such ops take as long without the profiler, which adds a few µs to each


@change(
    "prepare batches ahead",
    "the workers keep up with the step",
    followed=halved(lambda side: one.us if (one := side.summary.training.loading) else 0.0, same_heavy),
    on_cpu=True,
    keys=("workers", "persistent_workers"),
)
def data_loader(case: Case) -> Proposal | None:
    waits = [op for step in case.steps for op in labels(step, LOADER)]
    loading = case.summary.training.loading
    if not waits or loading is None:
        return None
    without = without_cpu_time(case.graph, spans_of(waits))
    graph = with_cpu_time(without, [(op.track, op.end, prices.CALL_US) for op in waits])
    single = any("SingleProcess" in op.name for op in waits)
    options, if_idle, least_us, most = "num_workers=8, pin_memory=True", "", 0.0, None
    if not case.trace.work:
        # The workers share the cores with the model. One worker takes longer for a batch than the main process, and two
        # take at least half as long as one. Several keep up if cores are idle, or if loading waits for files.
        options, if_idle = "num_workers=1 or more", " if cores are idle or loading waits"
        recorded = case.graph.recorded_us
        least_us = min(recorded, loading.us + prices.SLOW_BATCH_US) if single else recorded / 2
        most = graph if single else None
    how = f"DataLoader(…, {options}, persistent_workers=True){if_idle}"
    if not single:
        how = f"more workers{if_idle}, a larger prefetch_factor, or less work for each sample"
    return Proposal(
        graph,
        f"{'on average, ' * (case.summary.recording.mixed is not None)}the step waits {duration(loading.us)} for the "
        "DataLoader" + (", which has no workers" if single else ""),
        how,
        assumed=True,
        least_us=least_us,
        most=most,
    )


@change(
    "move work on CPU tensors out of the step",
    "this work can be done ahead",
    followed=halved(
        lambda side: sum(side.summary.idle_in.get(name, 0.0) for name in with_cpu_tensors(side.summary)),
        same_heavy,
        the_same_work,
    ),
    keys=("workers",),
)
def cpu_tensors(case: Case) -> Proposal | None:
    """Return a proposal to do ahead what a step computes on CPU tensors, for example the images of the next batch."""
    stretches, typical = case.in_each_step(lambda step: host(step).computing)
    spans = on_launching_threads(case, stretches)
    if not spans or not typical:
        return None
    ns = totals((op.name, op.dur) for one in typical for op in one.ops)
    in_ops = sum(length(union((op.start, op.end) for op in one.ops)) for one in typical) / 1e3
    named = ns.most_common(3)
    parts = [f"{name} {duration(time / 1e3)}" for name, time in named]
    if len(ns) > len(named):
        parts.append(f"other ops {duration((ns.total() - sum(time for _, time in named)) / 1e3)}")
    return Proposal(
        without_cpu_time(case.graph, spans),
        f"the CPU works for {_where(case, typical, spans, 'stretches')}, and launches nothing for the GPU: "
        f"{', '.join(parts)}, Python between the ops {duration(sum(one.us for one in typical) - in_ops)}",
        "prepare the next batch ahead, in a DataLoader with num_workers, or do this work on the GPU",
        unrecorded=ns.total() >= LONG_OP_US * 1e3 * sum(len(one.ops) for one in typical),
    )


@change(
    "move Python work out of the step",
    "this work can be done ahead or in another process",
    followed=halved(
        lambda side: sum(us for name, us in side.summary.idle_in.items() if is_python(name)), same_heavy, the_same_work
    ),
    keys=("workers", "compile"),
)
def python(case: Case) -> Proposal | None:
    if not ops_recorded(case.step):
        return None  # the time outside recorded calls may be that of ops
    in_steps, typical = case.in_each_step(lambda step: host(step).pauses)
    spans = on_launching_threads(case, in_steps)
    if not spans:
        return None
    chosen = typical or max(in_steps, key=lambda some: max((one.us for one in some), default=0.0))
    having = sum(map(bool, in_steps))
    some = f" in {having:,} of {len(in_steps):,} steps" if having < len(in_steps) else ""
    return Proposal(
        without_cpu_time(case.graph, spans),
        f"no thread is in an op for {_where(case, chosen, spans, 'pauses', some)}",
        "do less of it, or do it ahead in another process (a thread helps if it waits or computes outside Python)"
        + ("" if case.trace.frames else "; with_stack=True names the functions"),
        unrecorded=max(one.us for one in chain(*in_steps)) >= LONG_PAUSE_US,
    )


def _where(
    case: Case, found: Sequence[Stretch], spans: Iterable[tuple[tuple, int, int]], what: str, some: str = ""
) -> str:
    """Return how long these stretches take, between which calls, and in which annotation and Python functions.

    spans: those of all steps. what: their name. some: in which of the steps they are.
    """
    longest = max(found, key=lambda one: one.us)
    several = f" in {len(found)} {what}, the longest ({duration(longest.us)})" if len(found) > 1 else ""
    phases = (one for step in (case.step, *case.steps) for one in step.labels if is_phase(one.name))
    covering = [
        one
        for one in phases
        if 2 * (min(one.end, longest.end) - max(one.start, longest.start)) > longest.end - longest.start
    ]
    covered = f", in the annotation {min(covering, key=lambda one: one.dur).name}" if covering else ""
    functions = _functions_in(case, spans)
    inside = f", in {listed(functions)}" if functions else ""
    between = f"between {longest.before} and {longest.after}"
    return f"{duration(sum(one.us for one in found))}{some}{several} {between}{covered}{inside}"


def _functions_in(case: Case, spans: Iterable[tuple[tuple, int, int]]) -> list[str]:
    """Return the Python functions with most of the time in these spans, without their files; none without stacks."""
    in_files = python_in(case.trace.frames, grouped((track, (start, end)) for track, start, end in spans))
    ns = totals((name.rpartition("): ")[2], time) for name, time in in_files.items())
    return [name for name, time in ns.most_common(3) if name and time > 0.1 * ns.total()]
