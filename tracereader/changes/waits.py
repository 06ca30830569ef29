"""Changes of what the CPU waits for: synchronizations, and modes for debugging that wait or check."""

import re
from bisect import bisect_left
from collections import Counter
from itertools import chain, takewhile
from statistics import median_low

from tracereader.changes import prices
from tracereader.changes.change import change
from tracereader.changes.context import Case
from tracereader.changes.host import copied, copying, host, waits_in
from tracereader.changes.opportunity import Proposal
from tracereader.figures.debugging import blocking_launches, gradient_checks
from tracereader.figures.phases import in_backward
from tracereader.figures.training import recording_ops
from tracereader.findings.device_words import CUDA_OR_HIP
from tracereader.findings.finding import counted, duration, listed
from tracereader.findings.ops import VIEWS
from tracereader.replay.changes import without_cpu_time, without_ops, without_waits
from tracereader.trace import Op, Step, start_of
from tracereader.trace.labels import LOADER, OPTIMIZER
from tracereader.trace.op_names import NEED_THE_SIZE, READ_A_VALUE, SELECTS
from tracereader.two_runs.faster import synchronizations
from tracereader.two_runs.same_work import by_calls, halved, same_heavy, the_same_work

# The share of the step that it waits for the DataLoader's workers from which on they set its pace.
WORKERS_SET_THE_PACE = 0.1
MANY_READS = 8  # so many values in a step are worth to be collected
# Ops that wait for the GPU only to report an error, and torch's variants that do not (torch.linalg's documentation).
CHECKING = ("cholesky", "inv", "solve", "lu_factor", "ldl_factor")
CHECKS_ERRORS = {f"aten::linalg_{name}": f"{name}_ex" for name in CHECKING}
# torch.distributions ends the check of each parameter with this op. Before it, it compares.
VALIDATED = "aten::_is_all_true"
COMPARES = re.compile(r"aten::(?:[engl][eqt]|(?:logical|bitwise)_(?:and|or|not)|__(?:and|or)__|reshape|all)")
# This optimizer reads the loss and the sizes of its steps on the CPU.
READS_THE_LOSS = f"{OPTIMIZER}LBFGS.step"


def _waits(case: Case) -> list[Op]:
    """Return the calls of the replayed steps that wait for the GPU, without the profiler's own synchronization."""
    last = max((one.launch.start for one in case.trace.work if one.launch is not None), default=0)
    found = (op for step in case.steps for op in host(step).waits)
    return [op for op in found if not ("DeviceSynchronize" in op.name and op.start > last)]


@change(
    "drop or postpone synchronizations",
    "nothing reads the value on the CPU in that step",
    followed=lambda before, after: synchronizations(after) < synchronizations(before) and the_same_work(before, after),
    keys=("non_blocking",),
)
def remove_sync(case: Case) -> Proposal | None:
    loading = case.summary.training.loading
    much = loading is not None and loading.share > WORKERS_SET_THE_PACE
    if much and case.has(lambda name: name.startswith(LOADER) and "MultiProcessing" in name):
        return None  # the step would wait for the workers in the time that it saves
    if case.summary.waits_for == "turns":
        return None  # several GPUs would overlap only steps that do not depend on each other
    calls = [
        op
        for op in _waits(case)
        if not any("Pageable -> Device" in one.name for one in copied(op))
        and not any(above.name.startswith((*NEED_THE_SIZE, READS_THE_LOSS)) for above in op.above())
        and not (case.summary.debugging.checked_gradients and in_backward(op))
        and id(op) not in case.offloads
    ]
    if not calls:
        return None
    ids = {id(op) for op in calls}
    once = {id(copying(op)): waits_in(op) for op in host(case.replayed).waits if id(op) in ids}
    names = Counter(once.values())
    each = listed(f"{name} {count} times" if count > 1 else name for name, count in names.most_common(3))
    # Ops that do nothing but wait: aten::item, or nonzero in mask indexing.
    around = (op.outermost_of(lambda name: name.startswith((*READ_A_VALUE, SELECTS))) for op in calls)
    read = {id(op): op for op in around if op is not None}.values()
    checks = [check for op in read if op.name in READ_A_VALUE and (check := _validation(op))]
    choose = any(op.name == SELECTS for op in read)
    by_program = [op for op in calls if waits_in(op) == op.name]
    how = ["drop torch.cuda.synchronize() and the synchronization of streams and events"] * bool(by_program)
    if choose:
        how.append("multiply by the mask or use torch.where instead of indexing with a mask")
    unchecked = dict.fromkeys(filter(None, (CHECKS_ERRORS.get(waits_in(op)) for op in calls)))
    how += [f"torch.linalg.{name}, which does not check for errors" for name in unchecked]
    if not choose and len(by_program) < sum(waits_in(op) not in CHECKS_ERRORS for op in calls):
        reads = sum(name in READ_A_VALUE for name in once.values())
        together = "collect the values on the GPU and read them at once (torch.stack), or read them some steps later"
        how.append(together if reads >= MANY_READS else "keep the value on the GPU, or read it some steps later")
    graph = without_ops(without_waits(case.graph, calls), [*read, *chain(*checks)])
    here, seen = [check for check in checks if case.replayed.start <= check[0].start < case.replayed.end], ""
    if here:
        us = sum(check[-1].end - check[0].start for check in here) / 1e3
        seen = f"; {counted(len(here), 'check')} of arguments, with what they compare: {duration(us)} of CPU time"
        how.insert(0, "pass validate_args=False to torch.distributions if they make these checks")
    return Proposal(
        # Python's time between the ops of a check is part of it.
        without_cpu_time(graph, [(check[0].track, check[0].start, check[-1].end) for check in checks]),
        f"the CPU waits for the GPU in each step: {each}{seen}",
        "; ".join(how),
        assumed=choose,  # computing all elements instead of the selected ones takes longer
    )


def _validation(read: Op) -> list[Op]:
    """Return the ops of a check of arguments that ends with this read: what it compares, VALIDATED, and the read.

    The list is empty if the read is of anything else, because the program may use what is compared.
    """
    around = read.parent.children if read.parent is not None else ()
    last = bisect_left(around, read.start, key=start_of) - 1
    if last < 0 or around[last].name != VALIDATED:
        return []
    before = (around[place] for place in range(last - 1, -1, -1))
    return [*list(takewhile(lambda op: COMPARES.fullmatch(op.name), before))[::-1], around[last], read]


@change(
    "turn anomaly detection off",
    "the traceback of each op takes as long as that of a view, which computes nothing",
    followed=halved(lambda side: side.summary.debugging.checked_gradients, same_heavy, by_calls),
    on_cpu=True,
    keys=("no_anomaly_detection",),
)
def anomaly_detection(case: Case) -> Proposal | None:
    if not (checked := case.summary.debugging.checked_gradients):
        return None
    seen = f"backward checks {counted(checked, 'gradient')} for NaN"
    if case.trace.work:
        seen += " and waits for each result"
    found, typical = case.in_each_step(_tracebacks)
    if typical:
        us = sum(end - start for _, start, end in typical) / 1e3
        seen += f", and forward records {counted(len(typical), 'traceback')} in about {duration(us)}"
    graph = without_ops(case.graph, [op for step in case.steps for op in gradient_checks(step)])
    return Proposal(
        without_cpu_time(graph, chain(*found)),
        f"{seen}, because anomaly detection is on",
        "torch.autograd.set_detect_anomaly(False), and no torch.autograd.detect_anomaly()",
        assumed=bool(typical),
        unrecorded=bool(typical),  # Python makes a traceback
    )


def _tracebacks(step: Step) -> list[tuple[tuple, int, int]]:
    """Return when forward records its tracebacks: at the start of each op that records a node of backward.

    None of them takes longer than the usual view that records one. The list is empty without views.
    """
    ops = recording_ops(step)
    views = [op.dur - sum(below.dur for below in op.children) for op in ops if op.name in VIEWS]
    if not views:
        return []
    usual = median_low(views)
    return [(op.track, op.start, min(op.children[0].start if op.children else op.end, op.start + usual)) for op in ops]


@change(
    "do not wait for each kernel",
    "a launch takes the CPU as long as one that does not block",
    followed=halved(lambda side: side.summary.debugging.blocking_launches, the_same_work),
    needs=CUDA_OR_HIP,
)
def blocking(case: Case) -> Proposal | None:
    if not case.summary.debugging.blocking_launches:
        return None
    calls, here = case.in_each_step(blocking_launches)
    left = round(prices.LAUNCH_US * 1e3)
    spans = [(op.track, op.start + left, op.end) for some in calls for op in some if op.dur > left]
    return Proposal(
        without_cpu_time(case.graph, spans),
        f"{counted(len(here), 'launch', 'launches')} of a step return only when their kernel has ended: "
        f"{duration(sum(op.us for op in here))} of CPU time",
        "unset CUDA_LAUNCH_BLOCKING (or HIP_LAUNCH_BLOCKING) in the program's environment",
        assumed=True,
    )
