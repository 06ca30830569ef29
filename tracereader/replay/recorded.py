"""Builds the graph of a trace's steps as they were recorded, and checks that its replay reproduces them."""

import math

from msgspec.structs import force_setattr, replace

from tracereader.figures.pace import cold_spans, lanes_us, working_steps
from tracereader.figures.steps import typical
from tracereader.replay.changes import spans_of, without_cpu_time
from tracereader.replay.graph import Builder, Graph, Reason, Refused
from tracereader.trace import Step, Trace
from tracereader.trace.backends import shows_use

# If the replay of an unchanged trace differs from the recorded step by more than this share, every saving is uncertain
# and marked as such; no change is priced from the larger share on.
TOLERANCE, TOO_FAR = 0.03, 0.15
# Of a trace with more activities than this, only the steps near one are replayed, and at least so many; a single one if
# each has more than SINGLE activities. So many places are tried until the steps there take as long as the recorded one.
REPLAYED, REPLAYED_STEPS, SINGLE, TRIED = 5_000, 3, 1_000, 10
# In the names of launches, and of ops of NVIDIA's and AMD's libraries. An LSTM on the CPU calls cudnn_is_acceptable.
OF_A_GPU = (
    "Launch", "cudnn_convolution", "cudnn_batch_norm", "cudnn_rnn", "cudnn_attention", "miopen_",
    "_efficient_attention_", "_flash_attention_forward", "_pin_memory",
)  # fmt: skip


def graph_of(trace: Trace, around: Step | None = None, recorded_us: float | None = None) -> Graph | Refused:
    """Return the graph of the recorded steps, or a Refused with the reason why there is none.

    around: of a long trace, replay only the steps around this one. They are replayed if they reproduce the recorded
    step; otherwise, or for None, all steps are. Of a program that uses no GPU, only the typical step is replayed.
    recorded_us: the recorded step's time, if it is known already.
    """
    if trace.quality.incomplete:
        return Refused(Reason.INCOMPLETE)
    if not trace.work:
        if not runs_on_the_cpu(trace):
            return Refused(Reason.NO_GPU_WORK)
        parts = [replace(trace, steps=(typical(trace),), outside=())]
    else:
        if trace.quality.earlier is not None:
            # The first step waits for work from before it: prepare() drops that wait.
            first = min(one.start for one in trace.steps[0].work if one.launch is not None)
            own = tuple(one for one in trace.work if one.launch is not None or one.start >= first)
            trace = replace(trace, work=own)
        # Of a recording without steps, work from before its first launch does not count.
        work = trace.work if trace.has_steps else trace.steps[0].work
        if not any(step.work for step in trace.steps) or 2 * sum(one.launch is not None for one in work) < len(work):
            return Refused(Reason.NO_LAUNCHES)
        parts = [trace]
    if any((step.work or not trace.work) and not step.roots for step in parts[0].steps):
        return Refused(Reason.NO_CPU_SLICES)
    usual = typical(trace)
    if recorded_us is None:
        recorded_us = max(lanes_us(trace, usual).values())
    if recorded_us <= 0:
        return Refused(Reason.NO_TIME)
    if trace.work and around is not None and (near := _steps_near(trace, around, recorded_us)) is not trace:
        parts.insert(0, near)
    best, nearest = None, math.inf
    for part in parts:
        graph = prepare(Builder(part, recorded_us, len(part.steps) == 1 < len(trace.steps)).built(), trace, usual)
        replayed_us = graph.step_us()
        off = replayed_us / recorded_us
        if abs(off - 1) < nearest:
            force_setattr(graph, "replayed_us", replayed_us)  # a copy would replay the steps again
            best, nearest = graph, abs(off - 1)
        if nearest <= TOLERANCE:
            break
    return best if nearest <= TOO_FAR else Refused(Reason.NOT_REPRODUCED, best.replayed_us / recorded_us)


def prepare(graph: Graph, trace: Trace, usual: Step) -> Graph:
    """Return the graph without what does not belong to a step: see lanes_us().

    These are the typical step's calls that a warm one does not make, and the first step's wait for earlier work.
    """
    spans = []
    if cold_spans(trace, usual):
        spans += [(one.track, one.start, one.end) for one in trace.quality.cold_in(usual)]
    if trace.quality.earlier is not None:
        spans += spans_of(trace.quality.earlier.calls)
    return without_cpu_time(graph, spans) if spans else graph


def runs_on_the_cpu(trace: Trace) -> bool:
    """Return whether nothing in the trace belongs to a GPU: no work, no device, no launch, no op of a GPU's library.

    A recording of the CPU's activities alone shows no kernels of a program that uses a GPU.
    """
    if trace.work or trace.device_properties or shows_use(trace.backend):
        return False
    return not any(part in name for name in trace.op_names for part in OF_A_GPU)


def _steps_near(trace: Trace, around: Step, recorded_us: float) -> Trace:
    """Return the trace with only the steps near one that have about REPLAYED activities together.

    They take as long as the recorded step. If no such steps are found, all steps stay. Activities of earlier steps that
    still run when the first of these steps starts are kept without their launches. A single step stays only if all
    steps launch about as much: not if a few passes before an optimizer's step are a step each.
    """
    usual, total = typical(trace), len(trace.steps)
    least = recorded_us * TOLERANCE
    counts = [max(REPLAYED_STEPS, REPLAYED * total // max(1, len(trace.work)))]
    launched = [len(step.work) for step in working_steps(trace, usual)]
    if len(trace.work) > SINGLE * total and min(launched) > (1 - TOLERANCE) * max(launched):
        counts.insert(0, 1)
    for count in counts:
        if count >= total:
            break
        middle = trace.steps.index(around) - count // 2
        for first in sorted(range(total - count + 1), key=lambda first: abs(first - middle))[:TRIED]:
            steps = trace.steps[first : first + count]
            alone = replace(trace, steps=steps)
            if not any(step.work for step in steps) or abs(max(lanes_us(alone, usual).values()) - recorded_us) > least:
                continue
            # The middle one of three steps shows the steady state, even if the CPU is far ahead of the GPU.
            near = trace.steps[max(0, first - 1) : first + count]
            behind_ns = max(one.end - step.end for step in near for one in (step, *step.work))
            if count < REPLAYED_STEPS and behind_ns / 1e3 > least:
                continue
            start, end = steps[0].start, steps[-1].end
            work = tuple(one for one in trace.work if one.end > start and (one.launch or one).start < end)
            return replace(alone, work=work, outside=tuple(op for op in trace.outside if start <= op.start < end))
    return trace
