"""What a kernel noted of itself, as lanes of the trace: a profiler shows a kernel as one slice, whatever it does.

A kernel can note the time where a phase begins: `mov.u64 %0, %globaltimer;`. That clock counts nanoseconds and is the
same on all multiprocessors, so the notes of several blocks can be set beside each other. read-trace shows the lanes in
the section `inside`. There "wait: NAME" is the wait before the phase NAME, and a number at a name's end counts
repetitions of the phase, such as a model's layers.
"""

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tracereader.command import RunFailed

PROCESS = 1_000_000  # the process id of the first kernel's lanes: Kineto's are smaller


class Slice(NamedTuple):
    """One phase of one block; start and end in ns on the kernel's clock."""

    name: str
    start: int
    end: int


def slices(stamps: Sequence[Sequence[int]], names: Sequence[str]) -> list[list[Slice]]:
    """The slices of each block: names[n] from stamps[block][n] to the next stamp.

    A stamp of 0 was not written: the slice before it goes on, and the one that it would begin is left out.
    """
    lanes = []
    for block in stamps:
        written = [(name, at) for name, at in zip([*names, ""], block, strict=True) if at]
        lanes.append([Slice(name, at, end) for (name, at), (_, end) in itertools.pairwise(written)])
    return lanes


def add(file: Path, kernel: str, lanes: Sequence[Sequence[Slice]]) -> None:
    """Add the lanes to a Chrome trace, below the last kernel of that name. Raises RunFailed where there is none.

    The earliest stamp is put where the kernel's slice begins: the two clocks differ by a constant.
    """
    trace = json.loads(file.read_bytes())
    events = trace["traceEvents"]
    found = [one for one in events if one.get("cat") == "kernel" and one["name"].startswith(kernel)]
    if not found:
        raise RunFailed(f"the trace has no kernel {kernel}, whose phases it should show; no file was written")
    begins = max(one["ts"] for one in found)
    process = max([PROCESS, *(one["pid"] + 1 for one in events if one.get("cat") == "inside_kernel")])
    first = min(one.start for lane in lanes for one in lane)
    events.append({"ph": "M", "name": "process_name", "pid": process, "tid": 0, "args": {"name": f"inside {kernel}"}})
    for number, lane in enumerate(lanes):
        name = {"name": f"block {number + 1} of the {len(lanes)} shown"}
        events.append({"ph": "M", "name": "thread_name", "pid": process, "tid": number, "args": name})
        events += (
            {
                "ph": "X", "cat": "inside_kernel", "name": one.name, "pid": process, "tid": number,
                "ts": begins + (one.start - first) / 1e3, "dur": (one.end - one.start) / 1e3,
            }
            for one in lane
        )  # fmt: skip
    # finish_trace() finds the keys behind the events by the first of Kineto's.
    name = trace.pop("traceName", file.name)
    file.write_text(json.dumps(trace | {"traceName": name}))
