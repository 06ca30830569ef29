"""What keeps a step's CPU from launching, and what it waits for: every change that asks this asks here."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from tracereader.changes.context import Case
from tracereader.figures.pace import PAUSE_US
from tracereader.figures.phases import in_backward, kept_by_step
from tracereader.figures.training import asking
from tracereader.findings.ops import NO_VALUES, is_of_a_library
from tracereader.trace import Op, Step, Work
from tracereader.trace.intervals import clipped, length, union
from tracereader.trace.labels import AUTOGRAD
from tracereader.trace.op_names import COPYING, FOREACH, INDEXES, READ_A_VALUE
from tracereader.trace.waits import is_wait, waits_of

READS_A_TRUTH = "aten::is_nonzero"
# A copy of a few values to the CPU takes less: 64 KB, the most that CUDA stages, take 8 µs.
VALUE_US = 10


class Stretch(NamedTuple):
    """Time (ns) in which a step launches nothing, the names before and after it, and the ops in it; none in a pause."""

    start: int
    end: int
    before: str
    after: str
    ops: list[Op]

    @property
    def us(self) -> float:
        return (self.end - self.start) / 1e3


class Host(NamedTuple):
    """What keeps the CPU from launching in a step, each kind in order.

    waits: the runtime calls that return only after some GPU work has ended. computing: the stretches of ops that use no
    GPU and do not communicate, and take longer than a pause together. pauses: the long ones in which no thread is in an
    op, outside those stretches. Those in which torch itself works are left out.
    """

    waits: list[Op]
    computing: list[Stretch]
    pauses: list[Stretch]


@kept_by_step
def host(step: Step) -> Host:
    """Return what keeps the CPU from launching in a step."""
    computing, pauses, run, gaps = [], [], [], []
    reached = begin = step.start
    name = before = "the step's start"
    for op in (*step.outermost, None):
        start = step.end if op is None else op.start
        if op is not None and start - reached > PAUSE_US * 1e3 and not _is_of_torch(name, op.name):
            gaps.append(Stretch(reached, start, name, op.name, []))
        # One that uses the GPU contains a runtime call.
        computes = op is not None and start >= reached and op.kind == "op" and is_of_a_library(op.name)
        if computes and all(below.kind != "runtime" for below in op.walk()):
            run.append(op)
        else:
            spans = ((one.start, one.end) for one in run if one.name not in NO_VALUES)
            if length(union(clipped(spans, begin, start))) > PAUSE_US * 1e3:
                computing.append(Stretch(begin, start, before, "the step's end" if op is None else op.name, run))
            else:
                pauses += gaps
            run, gaps = [], []
        if op is not None and op.end > reached:
            reached, name = op.end, op.name
        if not run:
            begin, before = reached, name
    return Host(waits_of(step), computing, pauses)


def _is_of_torch(before: str, after: str) -> bool:
    """Return whether torch itself works between calls of these names.

    The engine prepares and continues backward in C++, after ones_like makes the gradient of the loss. Before an op on a
    list of tensors, as in clip_grad_norm_, torch sorts the tensors by device and type.
    """
    begins = before.startswith((AUTOGRAD, "aten::ones_like"))
    return (after.startswith(AUTOGRAD) and begins) or after.startswith(FOREACH)


def on_launching_threads(case: Case, found: Sequence[Sequence[Stretch]]) -> list[tuple[tuple, int, int]]:
    """Return the spans of what was found in each replayed step, on each thread that launches the step's work."""
    spans = []
    for step, some in zip(case.steps, found, strict=True):
        launching = {one.launch.track for one in step.work if one.launch is not None}
        spans += [(track, one.start, one.end) for one in some for track in launching]
    return spans


def waits_before_a_launch(case: Case, steps: Sequence[Step]) -> Iterator[Op]:
    """Yield the calls that wait before a later launch, without copies of inputs. A graph can start after those.

    Copies to the CPU do not count as launches, because a program reads several losses in turn.
    """
    for step in steps:
        last = max([one.launch.start for one in step.work if one.launch and "DtoH" not in one.name], default=0)
        yield from (op for op in host(step).waits if op.start < last and not copies_input(case, op))


def waits_in(call: Op) -> str:
    """Return the op that waits in this call; the call's name if the program makes the call itself."""
    return asking(call) if any(above.kind == "op" for above in call.above()) else call.name


def copied(call: Op) -> list[Work]:
    """Return the copies that a call makes, or the ones that its op made just before."""
    return [one for some in copying(call).children for one in some.work] or list(call.work)


def copying(call: Op) -> Op:
    """Return the aten::copy_ around a call; the call itself without one.

    torch copies from pageable memory with cudaMemcpyAsync, and then waits for the stream in the same aten::copy_.
    """
    return call.parent if call.parent is not None and call.parent.name == "aten::copy_" else call


def copies_input(case: Case, call: Op) -> bool:
    """Return whether a call waits for a copy of the program's to the GPU."""
    copies = is_wait(call) and any("HtoD" in one.name for one in copied(call))
    return copies and not case.is_internal(call) and not asking(call).startswith(INDEXES)


def reads_a_value(call: Op) -> bool:
    """Return whether the model waits here for a copy of one or a few values to the CPU."""
    if in_backward(call):
        return False  # anomaly detection does
    if asking(call).startswith(READ_A_VALUE):
        return True
    some = copied(call) if asking(call).startswith(COPYING) else []
    return bool(some) and all("DtoH" in one.name and one.us < VALUE_US for one in some)


def how_to_drop(call: Op) -> str | None:
    """Return how the program can do without a wait; None if the trace does not show a way."""
    if waits_in(call) == call.name and "DeviceSynchronize" in call.name:
        return "drop torch.cuda.synchronize()"  # a stream's or an event's may be for a copy that is needed
    name, some = asking(call), copied(call)
    if name.startswith(INDEXES) and some and all("HtoD" in one.name for one in some):
        return "keep index tensors, and values that indexing writes, on the GPU"
    if reads_a_value(call):
        unless = "" if name.startswith(READS_A_TRUTH) else " if it decides no shapes"
        return f"keep the value of {name} on the GPU{unless} (torch.where instead of if)"
    return None
