"""What a finding costs a step, against the raw events: GPU time that nothing waits for costs nothing."""

import gzip
import json

import pytest
from raw_events import GPU, end, raw_steps
from references import H200

from tracereader.figures import summarize
from tracereader.findings import cheatsheet, gpu_work, steps
from tracereader.trace import read

LLM = H200 / "05_llm"
BUSY = LLM / "1x512_bf16_warm_compile_gqa_reduce-overhead.json.gz"
# Each is idle for more than half of the time from its first step's GPU work to its last step's.
OVERHEAD_BOUND = [
    (H200 / "01_matmul_add/4096_bf16_warm_compile_reduce-overhead.json.gz", gpu_work.copies_into_graph),
    (LLM / "1x512_bf16_warm_compile_flex_reduce-overhead.json.gz", steps.gaps_in_a_graph),
    (LLM / "1x512_bf16_warm_compile_gqa_tune_max-autotune.json.gz", steps.gaps_in_a_graph),
]


def idle_share(path):
    """Of the time from the second step's GPU work to the last step's, by the events alone."""
    events = [e for e in json.loads(gzip.decompress(path.read_bytes()))["traceEvents"] if e.get("ph") == "X"]
    calls = {
        e["args"]["correlation"]: e["ts"] for e in events if e.get("cat") in ("cuda_runtime", "cuda_driver")
        if "correlation" in e.get("args", {})
    }  # fmt: skip
    work = sorted((e for e in events if e.get("cat") in GPU), key=lambda e: e["ts"])
    starts = []
    for mark in raw_steps(events):
        mine = [e["ts"] for e in work if mark["ts"] <= calls.get(e["args"]["correlation"], -1) < end(mark)]
        starts += [min(mine)] if mine else []
    left, right, reached, busy = starts[0], starts[-1], starts[0], 0.0
    for e in work:
        begin, stop = max(e["ts"], reached), min(end(e), right)
        if stop > begin:
            busy, reached = busy + stop - begin, stop
    return 1 - busy / (right - left)


@pytest.mark.parametrize(("path", "finding"), OVERHEAD_BOUND, ids=lambda one: getattr(one, "name", ""))
def test_gpu_time_costs_nothing_where_the_step_waits_for_launches(path, finding):
    assert idle_share(path) > steps.MUCH_IDLE
    summary = summarize(read(path))
    found = finding.ask(summary)
    assert found.holds and found.cost_us is None
    told = cheatsheet.costliest(summary, cheatsheet.found(summary))
    assert finding not in [one for one, _ in told]


def test_gpu_time_costs_where_the_step_waits_for_the_gpu():
    assert idle_share(BUSY) < steps.MUCH_IDLE
    summary = summarize(read(BUSY))
    assert steps.gaps_in_a_graph.ask(summary).cost_us == pytest.approx(summary.step_gpu.idle_launched_us)


def test_one_function_says_what_counts():
    """GPU time and CPU time each count on the lane that the step waits for; idle time counts on either."""
    waiting, busy = summarize(read(OVERHEAD_BOUND[0][0])), summarize(read(BUSY))
    assert [steps.cost_of(waiting, gpu_us=3.0), steps.cost_of(waiting, cpu_us=3.0)] == [None, 3.0]
    assert [steps.cost_of(busy, gpu_us=3.0), steps.cost_of(busy, cpu_us=3.0)] == [3.0, None]
    assert steps.cost_of(waiting, idle_us=3.0) == steps.cost_of(busy, idle_us=3.0) == 3.0
