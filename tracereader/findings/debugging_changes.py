"""Changes that turn off a mode for debugging, which makes a program slow without changing its results."""

from tracereader.figures.debugging import blocking_launches, fills_of_new_memory, gradient_checks
from tracereader.findings.device_words import CUDA_OR_HIP
from tracereader.findings.finding import counted, duration
from tracereader.findings.opportunity import Case, Change, Proposal
from tracereader.replay import without_cpu_time, without_ops

# A launch call that does not block, while the profiler records: 5 to 10 µs in traces of H100s and H200s.
LAUNCH_US = 10


def anomaly_detection(case: Case) -> Proposal | None:
    checked = case.summary.debugging.checked_gradients
    if not checked:
        return None
    seen = f"backward checks {counted(checked, 'gradient')} for NaN"
    if case.trace.work:
        seen += " and waits for each result"
    return Proposal(
        without_ops(case.graph, [op for step in case.steps for op in gradient_checks(step)]),
        f"{seen}, because anomaly detection is on; it also records a traceback for each op of forward, which this "
        "saving leaves out",
        "torch.autograd.set_detect_anomaly(False), and no torch.autograd.detect_anomaly()",
    )


def blocking(case: Case) -> Proposal | None:
    if not case.summary.debugging.blocking_launches:
        return None
    calls, here = case.in_each_step(blocking_launches)
    left = round(LAUNCH_US * 1e3)
    return Proposal(
        without_cpu_time(
            case.graph, [(op.track, op.start + left, op.end) for some in calls for op in some if op.dur > left]
        ),
        f"{counted(len(here), 'launch', 'launches')} of a step return only when their kernel has ended: "
        f"{duration(sum(op.us for op in here))} of CPU time",
        "unset CUDA_LAUNCH_BLOCKING (or HIP_LAUNCH_BLOCKING) in the program's environment",
        assumed=True,
    )


def filled_memory(case: Case) -> Proposal | None:
    if not case.summary.debugging.filled_tensors:
        return None
    fills, here = case.in_each_step(fills_of_new_memory)
    work = [one for op in here for one in op.work_below()]
    on_gpu = f" and {duration(sum(one.us for one in work))} of GPU time" * bool(work)
    return Proposal(
        without_ops(case.graph, [op for some in fills for op in some]),
        f"{counted(len(here), 'new tensor is', 'new tensors are')} filled before ops write to them, because "
        f"deterministic algorithms are on: {duration(sum(op.us for op in here))} of CPU time{on_gpu}",
        "torch.utils.deterministic.fill_uninitialized_memory = False, if no op reads memory that was never written; "
        "results stay deterministic",
    )


DEBUGGING_CHANGES = (
    Change("anomaly_detection", "turn anomaly detection off", anomaly_detection),
    Change("blocking", "do not wait for each kernel", blocking, CUDA_OR_HIP),
    Change("filled_memory", "leave new memory unfilled", filled_memory),
)
