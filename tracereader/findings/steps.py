"""Findings about steps: what they wait for, which of them stand out, and what the profiler itself costs."""

from statistics import median

from tracereader.figures import Summary
from tracereader.figures.steps import STANDS_OUT, StepFacts
from tracereader.findings.finding import Finding, Verdict, counted, recordable
from tracereader.trace import STEP

# Shares of the window in which the GPU does something. On the H200: 3% at 64 x 64, 70 to 85% at
# 4096 x 4096, where the first step's start is all that the GPU waits for.
OVERHEAD_BOUND, COMPUTE_BOUND = 0.35, 0.65
# Calls of a step that took at least this many times as long as in the median one, nearly all of
# them: 1.3 to 3.7 on the H200 in the first recorded step, 0.8 to 1.3 between the others.
ALIKE_SLOWER = 1.25


def regime(summary: Summary) -> str:
    """overhead-bound, compute-bound, in between, or CPU only."""
    share = summary.busy_share
    if share is None:
        return "CPU only"
    return "overhead-bound" if share < OVERHEAD_BOUND else "compute-bound" if share > COMPUTE_BOUND else "in between"


@recordable
def regime_is(name: str) -> Finding:
    def judge(summary):
        found = regime(summary)
        seen = f"the GPU is busy {summary.busy_share or 0:.0%} of the window"
        sooner = "a faster GPU needs larger work to be kept busy" if name == "compute-bound" else ""
        return Verdict(found == name, seen if found == name else f"{seen}: {found}", sooner)

    return Finding(f"at this size the step is {name}", judge, needs_gpu=True)


@recordable
def records_steps(first: int, count: int) -> Finding:
    def judge(summary):
        names = [step.name for step in summary.steps] if summary.has_steps else []
        right = len(names) == count and all(name == f"{STEP}{first + i}" for i, name in enumerate(names))
        return Verdict(right, f"{names[0]} to {names[-1]}" if names else "no step")

    return Finding(f"the trace holds steps #{first} to #{first + count - 1}", judge)


def cause(summary: Summary, step: StepFacts) -> str | None:
    """Why a step that stands out took longer, where the trace shows it."""
    more = step.excess
    if more is None:
        return None
    told = ", ".join(f"{name} {us:,.0f} µs" for name, us in list(more.overheads.items())[:3])
    beside = f" (in the same step: {told})" if told else ""
    first_calls = sum(more.first_calls.values())
    if first_calls > more.us / 3:
        calls = ", ".join(f"{name} {us:,.0f} µs" for name, us in list(more.first_calls.items())[:3])
        return f"a cold start: {calls} in calls that the median step does not make{beside}"
    name, us = next(iter(more.slower.items()), ("", 0.0))
    if us > more.us / 2 and us > 10 * STANDS_OUT * summary_us(summary):
        return f"a cold start: {us:,.0f} of its {more.us:,.0f} µs more are {name}'s own, as on a first call{beside}"
    apart = more.slowest_times and more.times_high and more.slowest_times > 2 * more.times_high
    if us > more.us / 2 and apart:
        return f"{us:,.0f} of its {more.us:,.0f} µs more are {name}'s own{beside}"
    if more.times_low is not None and more.times_low >= ALIKE_SLOWER:
        alike = f"its calls are slower alike, most of them x {more.times_low:.1f} to x {more.times_high:.1f}"
        if summary.has_steps and step is summary.steps[0]:
            return f"{alike}: as after a pause; before the first step the profiler begins to record{beside}"
        return f"{alike}, as after a pause{beside}"
    if more.before_first_op_us > more.us / 3:
        return f"{more.before_first_op_us:,.0f} of its {more.us:,.0f} µs more lie before its first op{beside}"
    if us > more.us / 3:
        return f"{us:,.0f} of its {more.us:,.0f} µs more are {name}'s own{beside}"
    if sum(more.overheads.values()) > more.us / 4:
        return told
    return None


def summary_us(summary: Summary) -> float:
    """The median step's CPU time."""
    times = sorted(step.cpu_us for step in summary.steps)
    return times[(len(times) - 1) // 2]


def wide_first_step() -> Finding:
    def judge(summary):
        first = summary.steps[0]
        if first.times_the_median is None or not summary.has_steps:
            return Verdict(False, f"the first step took {first.cpu_us:,.1f} µs")
        why = cause(summary, first)
        seen = f"{first.cpu_us:,.1f} µs, {first.times_the_median:,.1f} times the median" + (f": {why}" if why else "")
        return Verdict(True, seen)

    return Finding("the first step is much wider than the others", judge)


@recordable
def first_step_is_wider() -> Finding:
    def judge(summary):
        first, gaps = summary.steps[0], _gaps(summary)
        if len(summary.steps) < 2 or first.label_to_first_op_us is None:
            return Verdict(None, "fewer than two steps with a label")
        usual = summary_us(summary)
        more, gap_more = first.cpu_us - usual, first.label_to_first_op_us - median(gaps)
        wide = wide_first_step().ask(summary).holds
        seen = (
            f"{first.cpu_us:,.1f} µs against {usual:,.1f}; of the {more:,.1f} more, {gap_more:,.1f} are in "
            f"the gap ({', '.join(f'{gap:.1f}' for gap in gaps[:3])} µs)"
        )
        return Verdict(wide and gap_more > more / 2, seen, cause(summary, first) or "")

    return Finding("cold: the first step is wider, through the gap from the label to its first op", judge)


def _gaps(summary: Summary) -> list[float]:
    return [one.label_to_first_op_us for one in summary.steps if one.label_to_first_op_us is not None]


def label_gap() -> Finding:
    def judge(summary):
        # 3 to 6 µs are the record_function itself on the H200's machine.
        gaps, first = _gaps(summary), summary.steps[0].label_to_first_op_us
        if len(gaps) < 2 or first is None or first - median(gaps[1:]) < 5:
            return Verdict(False, "")
        return Verdict(True, f"{first:,.1f} µs in the first step, {median(gaps[1:]):,.1f} in the others")

    return Finding("a gap between the label's start and the first op in it", judge)


@recordable
def steps_are_alike() -> Finding:
    def judge(summary):
        times = [one.cpu_us for one in summary.steps]
        shown = ", ".join(f"{us:,.1f}" for us in times[:5]) + (" …" if len(times) > 5 else "") + " µs"
        if min(times) <= 0:
            return Verdict(None, shown)
        alike = max(times) < STANDS_OUT * min(times)
        wide = [one for one in summary.steps if one.times_the_median is not None]
        why = cause(summary, wide[0]) if wide else None
        seen = shown + ("" if alike else f": the longest is {max(times) / min(times):.1f} times the shortest")
        return Verdict(alike, seen, f"step {wide[0].number}: {why}" if why else "")

    return Finding("warm: the steps take alike", judge)


@recordable
def one_buffer_request() -> Finding:
    def judge(summary):
        requests = summary.buffer_requests
        before = [one for one in requests if one.before_first_work]
        seen = counted(len(requests), "request") + (
            f"; one of {before[0].us:,.0f} µs before the first kernel" if before else ""
        )
        return Verdict(len(requests) == 1 and len(before) == 1, seen)

    return Finding("the profiler asks for its buffer once, before the first kernel", judge, needs_gpu=True)


def buffer_request() -> Finding:
    def judge(summary):
        requests = summary.buffer_requests
        return Verdict(bool(requests), f"{len(requests)}, {sum(one.us for one in requests):,.0f} µs in all")

    return Finding("an Activity Buffer Request", judge)


def module_loading() -> Finding:
    def judge(summary):
        loads = [one for name, one in summary.overheads.items() if "Loading" in name]
        return Verdict(bool(loads), f"{sum(one.count for one in loads)} loads, {sum(one.us for one in loads):,.0f} µs")

    return Finding("module or function loading", judge)


@recordable
def long_final_sync() -> Finding:
    def judge(summary):
        if summary.final_sync_us is None:
            return Verdict(None, "no synchronization after the last step")
        seen = f"{summary.final_sync_us:,.1f} µs, for {summary.gpu_busy_us:,.1f} µs of GPU work"
        short = "here it only waits for the last kernel: it measures no idleness"
        return Verdict(summary.final_sync_us > 10 * summary.gpu_busy_us, seen, short)

    return Finding("the closing cudaDeviceSynchronize dwarfs the GPU's work", judge, needs_gpu=True)


def final_sync() -> Finding:
    def judge(summary):
        # The shortest one seen on the H200 took 8.5 µs: the call itself.
        us = summary.final_sync_us
        return Verdict(us is not None and us > 20, f"{us or 0:,.1f} µs, over {summary.gpu_busy_us:,.1f} µs of GPU work")

    return Finding("a long cudaDeviceSynchronize after the last step", judge)


def queued() -> Finding:
    def judge(summary):
        # A launch reaches an idle GPU in 5 to 15 µs on the H200.
        longest = max((one.launch_to_start_us or 0.0 for one in summary.steps), default=0.0)
        return Verdict(longest > 30, f"up to {longest:,.0f} µs from launch to start")

    return Finding("kernels start long after their launch", judge, needs_gpu=True)


def gaps_between_kernels() -> Finding:
    def judge(summary):
        step, pieces = summary.chosen, len(summary.gpu_work)
        span, idle = step.gpu_span_us, step.gpu_span_us - step.gpu_busy_us
        # Back-to-back kernels of one stream stand 1 to 2 µs apart.
        seen = f"{idle:,.1f} of the {span:,.1f} µs from the first kernel's start to the last one's end"
        return Verdict(pieces >= 2 and idle >= 3 * pieces, seen)

    return Finding("gaps between the kernels of one step", judge, needs_gpu=True)
