"""Modes for debugging that are on in a step: anomaly detection, and launches that block."""

import msgspec

from tracereader.figures.phases import backward_nodes
from tracereader.trace import Op, Step, Trace

# What anomaly detection calls for each gradient (torch/csrc/autograd/engine.cpp). No program's hook calls the second.
CHECKS = ("aten::isnan", "aten::_is_any_true", "aten::item")
# Launch calls that block return after their kernels have ended. With CUDA_LAUNCH_BLOCKING=1 on an H100, all 675 of a
# recording did, and 7 of 675 without it. Nearly all of at least so many have to.
LEAST_LAUNCHES, NEARLY_ALL = 20, 0.95


class Debugging(msgspec.Struct, frozen=True):
    """Modes for debugging in the reported step; 0 if they are off.

    checked_gradients: the number of gradients that anomaly detection checks for NaN. blocking_launches: the number of
    launch calls that return when their kernel has ended.
    """

    checked_gradients: int
    blocking_launches: int


def debugging(trace: Trace, step: Step) -> Debugging:
    """Return the modes for debugging that are on in a step."""
    checks = gradient_checks(step) if CHECKS[1] in trace.op_names else []
    return Debugging(len(checks) // len(CHECKS), len(blocking_launches(step)))


def gradient_checks(step: Step) -> list[Op]:
    """Return the ops with which anomaly detection looks for NaN in gradients: three in a row for each gradient."""
    found = []
    for node in backward_nodes(step):
        ops = [op for op in node.children if op.kind == "op"]
        for place, op in enumerate(ops):
            if op.name == CHECKS[0] and tuple(one.name for one in ops[place : place + len(CHECKS)]) == CHECKS:
                found += ops[place : place + len(CHECKS)]
    return found


def blocking_launches(step: Step) -> list[Op]:
    """Return a step's calls that launch a kernel and wait for its end, if nearly all of them do; else none."""
    launched = [one for one in step.work if one.launch is not None and "LaunchKernel" in one.launch.name]
    found = [one.launch for one in launched if one.launch.start <= one.start and one.end <= one.launch.end]
    return found if len(launched) >= LEAST_LAUNCHES and len(found) >= NEARLY_ALL * len(launched) else []
