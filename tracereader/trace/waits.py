"""Which runtime calls wait for a GPU: the names of such calls, and whether a call waited."""

import re

from tracereader.trace.slices import Op, Step

# In the names of calls that wait until a GPU has done some work: those of CUDA, HIP and Ascend, and of Intel's unified
# runtime. In the names of those that wait for all of its work.
SYNCHRONIZES, OF_THE_DEVICE = re.compile("Synchronize|^urEventWait|^urQueueFinish"), "DeviceSynchronize"
# A copy waits in some cases, and a program may ask a stream or an event again and again until the work is done.
MAY_WAIT = re.compile(f"{SYNCHRONIZES.pattern}|Memcpy|EventQuery|StreamQuery")


def is_wait(call: Op) -> bool:
    """Return whether a runtime call returns only after some GPU work has ended."""
    if SYNCHRONIZES.search(call.name):
        return True
    if "Memcpy" not in call.name or not call.work:
        return False
    if "Async" in call.name and not any("Pageable" in one.name for one in call.work):
        return False
    # A small copy from pageable memory is staged, and its call returns before the copy starts. The call of a large copy
    # returns when the last part is staged.
    return all(one.start + one.dur // 2 <= call.end for one in call.work)


def waits_of(step: Step) -> list[Op]:
    """Return the runtime calls of a step that return only after some GPU work has ended."""
    return [op for op in step.named(MAY_WAIT.search) if op.kind == "runtime" and is_wait(op)]
