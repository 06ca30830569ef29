"""Reads the list of events that prof.events().export_chrome_trace() writes: no categories, streams or launches.

Everything stands on the CPU's threads. A GPU's activities stand on the thread that launched them, beside copies of the
annotations around them, and each has an arrow ("s"). Versions before 1.8 put them into a process of their own.
"""

import re
from collections.abc import Sequence

from tracereader.trace.kernel_names import UNKNOWN, decode
from tracereader.trace.lenient import is_time

CPU, ARROW = "CPU functions", "cpu_to_"
_FRAME = re.compile(r"nn\.Module: |<built-in |[^(]*\(\d+\): ")
_CALL = re.compile(r"(?:cuda|cu|hip|ze)[A-Z]\w*")
_OF_THE_CPU = re.compile(
    r"[\w.]+::[\w.]+|autograd::engine::evaluate_function: .*|\w+Backward\d*|ProfilerStep#\d+", re.DOTALL
)


def is_one(events: Sequence) -> bool:
    """Return whether the events of a document are such a list."""
    return bool(events) and all(
        one.pid in (CPU, "CUDA functions") and (one.cat.startswith(ARROW) if one.cat else one.ph == "X")
        for one in events
    )


def categorized(events: Sequence) -> tuple[list, int] | None:
    """Give the events of the CPU the categories of a trace. Return them, and how many GPU activities are left out.

    Return None if the GPU's activities cannot be distinguished from ops: their number is then not that of the arrows.
    Ops and annotations have one category, as in traces before torch 1.11.
    """
    slices = [one for one in events if one.ph == "X"]
    arrows = sum(one.ph == "s" for one in events)
    for one in slices:
        is_frame = _FRAME.match(one.name) is not None
        one.cat = "cuda_runtime" if _CALL.fullmatch(one.name) else "python_function" if is_frame else "Operator"
    of_gpu = [one for one in slices if one.pid != CPU or _is_of_gpu(one)] if arrows else []
    launches = any(one.cat == "cuda_runtime" and "Launch" in one.name for one in slices)
    if len(of_gpu) != arrows or (launches and not arrows):
        return None
    if not of_gpu:
        return slices, 0
    left_out = {id(one) for one in of_gpu}
    starts, ends = (set(times) for times in zip(*map(_bounds, of_gpu), strict=True))
    kept = []
    for one in slices:
        start, end = _bounds(one)
        # The copy of an annotation reaches from the start of a GPU activity to the end of one.
        is_copy = start is not None and start in starts and end in ends
        if id(one) not in left_out and not is_copy:
            kept.append(one)
    return kept, len(of_gpu)


def _is_of_gpu(one) -> bool:
    if one.cat != "Operator" or _OF_THE_CPU.fullmatch(one.name):
        return False
    return one.name.startswith(("Memcpy ", "Memset ")) or decode(one.name).family != UNKNOWN


def _bounds(one) -> tuple[int, int] | tuple[None, None]:
    """Return a slice's start and end in ns; None for both if they are not usable."""
    if not (is_time(one.ts) and is_time(one.dur)):
        return None, None
    return round(one.ts * 1000), round((one.ts + one.dur) * 1000)
