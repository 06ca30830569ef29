"""A trace's raw events, which tests count without the reader."""

import itertools
from statistics import median

GPU = ("kernel", "gpu_memcpy", "gpu_memset")


def event(name, cat, ts, dur, tid=1, **args):
    """Return a slice as the profiler writes it, for a synthetic trace."""
    return {"ph": "X", "name": name, "cat": cat, "ts": ts, "dur": dur, "pid": 1, "tid": tid, "args": args}


def end(event):
    return event["ts"] + event["dur"]


def raw_steps(events):
    marks = [e for e in events if e.get("cat") == "user_annotation" and e["name"].startswith("ProfilerStep#")]
    return sorted(marks, key=lambda e: e["ts"])


def raw_work(events, mark):
    """Return the GPU work launched in a step, by correlation, independently of annotations."""
    calls = {
        e["args"]["correlation"] for e in events
        if e.get("cat") in ("cuda_runtime", "cuda_driver") and mark["ts"] <= e["ts"] < end(mark)
    }  # fmt: skip
    work = (e for e in events if e.get("cat") in GPU and e["args"]["correlation"] in calls)
    return sorted(work, key=lambda e: e["ts"])


def pace(starts, last):
    """Return the median of the times from one step's start to the next one's, or to the last one's end.

    The last step of an even number does not count, because no next step shows when its time ends.
    """
    apart = [after - before for before, after in itertools.pairwise(starts)]
    return median(apart if len(starts) % 2 == 0 else [*apart, last])
