"""Findings about steps: their regime, outliers, and the profiler's own overhead."""

import math
import re
from collections import Counter
from collections.abc import Sequence
from statistics import median

from tracereader.figures import Summary
from tracereader.figures.cpu_work import CpuWork, covered_us
from tracereader.figures.gpu_time import GpuTime
from tracereader.figures.gpu_work import GpuWork
from tracereader.figures.recording import Recording
from tracereader.figures.regime import MUCH_IDLE, MUCH_KNOWN, NEAR_THE_ROOF, idle_by_cause
from tracereader.figures.steps import OUTSIDE_CALLS, Excess, StepFacts
from tracereader.findings import finding as words
from tracereader.findings.finding import CPU, GPU, TABLE, Verdict, counted, duration, finding, in_one_unit, part_of
from tracereader.trace import STEP
from tracereader.trace.backends import shows_use
from tracereader.trace.grouped import grouped
from tracereader.trace.kernel_names import cut, short
from tracereader.trace.labels import COLLECTIVE, LOADER, REGION
from tracereader.trace.marks import DECODES
from tracereader.trace.waits import MAY_WAIT

LONGEST_NAME = 60  # of an annotation whose calls are the steps
SOME_IDLE = 0.1  # idle time of at least this share is mentioned even if it does not decide the regime
# Share of the best CPU rate that the run measured. On two cores, a 64 x 64 product reaches 3 to 5%, beside a load 0%.
FAR_FROM_A_ROOF = 0.05
# Steps are alike if the longest takes less than this many times the shortest. In 174 recordings on the H200, the steps
# after the first differ by a factor of 1.1 in the median, and by more than 1.7 in four recordings.
ALIKE = 1.5
# If copies by the driver have less than this share of the time of copies and copy kernels, only the kernels are named.
MOSTLY_KERNELS = 0.1
# If a step's GPU time exceeds another step's by more than this factor, the GPU work may be the reason for a longer
# step. With the same work it differs by a factor of up to 1.4 on the H200.
MORE_GPU_TIME = 1.5
# Times of one step that differ by less than this share are the same time, measured on two lanes.
SAME_TIME = 0.02
WORDS = {
    "overhead": "overhead-bound", "gpu-side": "waiting on the GPU side", "turns": "one GPU at a time",
    "communication": "communication-bound",
    "compute": "compute-bound", "memory": "memory-bound", "gpu": "GPU-bound", "cpu-only": "CPU only",
    "capture": "CUDA graph capture", "incomplete": "GPU records are missing",
    None: "idle for a reason that the trace does not show",
}  # fmt: skip
# In a table's cell, of the regimes that are not called "…-bound".
BOUND_BY = {
    "gpu-side": "GPU side", "outside": "overhead", "cpu-only": "neither", "capture": "capture", "incomplete": "unknown",
    "turns": "other GPUs", None: "unknown",
}  # fmt: skip
# The parts of a GPU's time that are not compute.
PARTS = {
    "communication": "exposed communication", "copy": "exposed copies and memsets",
    "not_launched": "idle, waiting for CPU launches", "launched": "idle, next activity launched, not started",
    "unknown": "idle, next activity's launch not in the trace", "elsewhere": "idle while another GPU works",
}  # fmt: skip
# Calls are slower if most of them took at least this many times as long as in the typical step. On the H200 the factors
# are 1.3 to 3.7 in the first recorded step, and 0.8 to 1.3 between the others.
ALIKE_SLOWER = 1.25
# A pause alone does not make calls this many times as long. On the H200 it makes them up to 4.0 times as long.
MUCH_SLOWER = 5
# The largest of these factors divided by the smallest: up to 2.7 in the reference traces, 9.7 if one op was delayed.
ALIKE_SPREAD = 3


def parts_besides_compute(gpu: GpuTime) -> dict[str, float]:
    """Return the time (µs) of each of PARTS."""
    busy = {"communication": gpu.exposed_communication_us, "copy": gpu.exposed_copy_us}
    return busy | {key: getattr(gpu, f"idle_{key}_us") for key in PARTS if key not in busy}


def regime(summary: Summary) -> str:
    """Return the regime as one of WORDS, or that no GPU activity was recorded."""
    return without_activity(summary) if summary.waits_for == "cpu-only" else WORDS[summary.waits_for]


def without_activity(summary: Summary) -> str:
    """Return what a report calls a step without GPU activity: CPU only, if nothing shows that a device was used.

    torch records no activity of Apple's GPUs, whose ops are then the only trace of them.
    """
    if summary.source.leaves_gpu_out:
        return "GPU activities left out"
    used = (
        summary.recording.lost
        or shows_use(summary.source.backend)
        or any("Launch" in name for name in summary.cpu.runtime)
    )
    return "no GPU activity recorded" if used and not summary.source.devices else WORDS["cpu-only"]


def waiting(summary: Summary) -> tuple[str, str]:
    """Return the regime as one of WORDS, and a sentence with the figures that decide it."""
    gpu, found, word = summary.steady, summary.waits_for, regime(summary)
    if found == "capture":
        recorded, ran = summary.captures, summary.chosen.launches
        seen = f"{counted(recorded.launches, 'launch call')} of the step"
        into = f"into {counted(recorded.graphs, 'graph')} and ran nothing"
        others = f"; {counted(ran, 'more launch', 'more launches')} ran" if ran else ""
        return word, f"{seen} {'was' if recorded.launches == 1 else 'were'} recorded {into}{others}"
    if found == "incomplete":
        again = "record fewer steps, and call torch.cuda.synchronize() before the profiler stops"
        if summary.source.leaves_gpu_out:
            return word, f"{without_records(summary.recording)}; a file that prof.export_chrome_trace() writes has them"
        return word, (
            f"{without_records(summary.recording)}, so the trace shows neither when the GPU was idle nor how long a "
            f"step takes; {again}"
        )
    if gpu is None:
        if summary.source.devices:
            return word, "the trace has GPU work, but none in the steps"
        bound, seen = _on_cpu(summary)
        return (WORDS[bound] + ", on the CPU" if bound in ("compute", "memory") else word), seen
    after = "after the slow first step, " if summary.after_first else ""
    which = "the busiest GPU" if summary.busy_by_device else "the GPU"
    busy_in = _persistent(summary)
    if found in ("compute", "memory"):
        near = [one for one in summary.gpu_work if one.roof == found and one.of_roof >= NEAR_THE_ROOF]
        # If kernels overlap, the sum of their times exceeds the GPU's busy time.
        share = sum(one.us for one in near) / min(summary.summed_us, summary.gpu_us)
        busy_in = (
            f"{min(share, 1.0):.0%} of the busy time is in kernels that reach {reached(near):.0%} of the data sheet's "
            f"{words.ROOFS[found][0]}"
        )
    return word, after + of_the_gpu(found, gpu, summary.steady_us, busy_in, which) + _untraced(summary)


def of_the_gpu(found: str | None, gpu: GpuTime, us: float, busy_in: str = "", which: str = "the GPU") -> str:
    """Return a sentence with the GPU's times that decide the regime.

    found: the regime's name. us: the length of the window. busy_in: a clause on the busy time, for steps that neither
    idle time nor communication limits; "" for the largest family. which: how to name the GPU.
    """
    idle = gpu.idle_us / us if us else 0.0
    if found in ("overhead", "gpu-side", "turns", None):
        return f"{which} is idle {idle:.0%} of the time; {_why_idle(gpu, found)}"
    if found == "communication":
        busy_in = f"{gpu.exposed_communication_us / gpu.busy_us:.0%} of the busy time is exposed communication"
    seen = f"{which} is busy {1 - idle:.0%} of the time, and {busy_in or _largest_family(gpu)}"
    if idle > SOME_IDLE:
        causes = idle_by_cause(gpu)
        seen += f"; it is idle {idle:.0%} of the time, and {_why_idle(gpu, max(causes, key=causes.get))}"
    return seen


def _why_idle(gpu: GpuTime, cause: str | None) -> str:
    share = f"{idle_by_cause(gpu)[cause] / gpu.idle_us:.0%}"
    part = f"{'all' if share == '100%' else share} of the idle time"
    return {
        "overhead": f"{part} is the GPU waiting for CPU launches",
        "gpu-side": f"for {part} the next activity had been launched but had not started",
        "turns": f"during {part} another GPU of the process works",
        None: f"for {part} the trace does not have the launch of the next activity",
    }[cause]


# Share of the window that the first activity waits after its launch. An idle GPU starts it in 5 to 15 µs.
LONG_FIRST_WAIT, LEAST_FIRST_WAIT_US = 0.1, 1000


def of_turns(summary: Summary) -> str:
    """Return what to do if the GPUs of the process work one after the other; "" if they do not."""
    if summary.waits_for != "turns":
        return ""
    batches = "give them several smaller batches one after another (torch.distributed.pipelining)"
    return f"To let the GPUs work at the same time, {batches}, or use fewer GPUs if the model fits"


def _untraced(summary: Summary) -> str:
    """Return a clause if the first launched activity waits long while nothing recorded runs; else ""."""
    waits = summary.first_wait_us
    if waits is None or waits < max(LEAST_FIRST_WAIT_US, LONG_FIRST_WAIT * summary.window_us):
        return ""
    waited = f"the first launched activity waited {duration(waits)} while nothing recorded ran"
    return f"; {waited}: the GPU was probably busy with work that is not in this trace"


def overlap_of_steps(summary: Summary) -> str:
    """Return a sentence if a step's GPU activities take longer than a step, because steps overlap; else ""."""
    busy = summary.chosen.gpu_busy_us
    if busy <= (1 + SAME_TIME) * summary.recorded_step_us or summary.recording.mixed is not None:
        return ""
    return (
        f"The GPU activities that a step launches take {duration(busy)}, and a step takes "
        f"{duration(summary.recorded_step_us)}: activities of different steps overlap on the GPU."
    )


def reached(work: Sequence[GpuWork | CpuWork]) -> float:
    """Return the mean achieved share of the peak, weighted by time. work: work with a known limit."""
    return sum(one.of_roof * one.us for one in work) / sum(one.us for one in work)


def _on_cpu(summary: Summary) -> tuple[str, str]:
    """Return what limits a step without GPU work (outside: time in no recorded op), and a sentence with the figures."""
    step_us = summary.chosen.cpu_us
    loading = summary.training.loading
    if loading is not None and loading.share > MUCH_WAITING:
        return "cpu-only", f"the recorded step waits for the DataLoader's batch for {loading.share:.0%} of its time"
    known = (one for one in summary.cpu.cpu_work if one.of_roof is not None)
    for (near, roof), ops in grouped(((one.of_roof >= NEAR_THE_ROOF, one.roof), one) for one in known).items():
        us = covered_us(ops)
        if us > MUCH_KNOWN * step_us:
            share = reached(ops)
            took = f"{us / step_us:.0%} of the step is in ops that reach {share:.0%} of the {words.ROOFS[roof][1]}"
            small = ": the ops are small, or other programs use the cores, too" if share < FAR_FROM_A_ROOF else ""
            return roof if near else "cpu-only", f"{took} that this run measured{small}"
    if summary.cpu.outside_ops is not None and summary.cpu.outside_ops > MUCH_IDLE:
        where = "Python, the profiler, unrecorded code, or a wait for another thread"
        return "outside", f"{summary.cpu.outside_ops:.0%} of the step is in no recorded op: {where}"
    could = summary.source.facts.script and not summary.source.shapes_recorded
    asked = "; the script's flag --record-shapes adds the rates that show what limits the step" if could else ""
    return "cpu-only", _costliest_op(summary) + asked


def _costliest_op(summary: Summary) -> str:
    """Return a sentence on the op with the most self time of a step without GPU work."""
    own, step_us = {name: one.self_us for name, one in summary.cpu.ops.items()}, summary.chosen.cpu_us
    if not step_us or not any(own.values()):
        return "the trace has no GPU activity"
    name = max(own, key=own.get)
    if summary.cpu.op_threads > 1:  # several threads' times can add up to more than the step
        return f"of all ops, {name} has the most self time: {own[name] / sum(own.values()):.0%} of it"
    return f"{own[name] / step_us:.0%} of the step is self time of {name}"


MUCH_WAITING = 0.3  # a DataLoader's wait is what limits a step on the CPU from this share of the step on
# In these calls the CPU does not wait for other programs, but for the GPU, other ranks, loader workers or memory.
WAITS = re.compile(rf"{MAY_WAIT.pattern}|Malloc|Free|c10d|record_param_comms|{COLLECTIVE.pattern}|{re.escape(LOADER)}")
# A cause with this share of a step's additional time explains it.
EXPLAINS = 1 / 3
BUSY = "something else was probably using the CPU's cores"


def busy_machine(summary: Summary) -> str | None:
    """Return a sentence on why other programs probably used the cores, with advice; None without a sign of that."""
    found = summary.uneven
    if found is None or summary.waits_for not in ("cpu-only", "overhead"):
        return None
    short, long = summary.steps[found.short], summary.steps[found.long]
    more = long.cpu_us - short.cpu_us
    waits = sum(us for name, us in found.more_us.items() if WAITS.search(name)) + found.overheads_us
    # A numbered script runs the same Python in each step. Other programs may not.
    explained = waits > EXPLAINS * more or (found.python_us > EXPLAINS * more and not summary.source.facts.script)
    if explained or long.compile_us or long.gpu_busy_us > MORE_GPU_TIME * short.gpu_busy_us:
        return None
    same = summary.source.facts.script or summary.source.shapes_recorded or short.gpu_busy_us
    supposed = BUSY if same else f"if their inputs have the same sizes, {BUSY}"
    longer = f"step {long.number} took {long.cpu_us / short.cpu_us:,.0f} times as long as step {short.number}"
    return f"{longer}, which makes the same calls: {supposed}. Stop other programs (top shows them) and profile again."


def without_records(found: Recording, whose: str = "") -> str:
    """Return a clause on the launch calls without GPU records; without any, on the calls that copy, or on replays."""
    lost, calls, kind, no = found.lost, found.launches, "launch call", "no GPU record"
    if not lost and found.lost_calls:
        lost, calls = (sum(some) for some in zip(*found.lost_calls.values(), strict=True))
        kind = "asynchronous copy call"
    elif not lost:
        lost, no = found.partly_lost, "fewer GPU records than another launch of the same CUDA graph"
    return f"{lost:,} of {whose}{counted(calls, kind)} {'has' if lost == 1 else 'have'} {no}"


def of_recording(summary: Summary) -> list[str]:
    """Return sentences on what the recording lacks and on what in it is not the steps' own, without what is missing
    from every step: the regime says that."""
    found, said = summary.recording, []
    if found.left_out:
        several, kept = len(found.left_out) > 1, summary.steps
        which = (
            f"{len(found.left_out):,} steps are" if several else f"step {found.left_out[0].removeprefix(STEP[:-1])} is"
        )
        below = f"{kept[0].number} to {kept[-1].number}" if len(kept) > 1 else kept[0].number
        lost = without_records(found, "the recording's ")
        said.append(f"{which} left out of everything below, which is on {below}: {lost}")
    if found.clipped:
        were, they_are, in_sum = ("were", "they are", " in sum") if found.clipped > 1 else ("was", "it is", "")
        ends = "after a later one of the same stream, or after a wait for the GPU, which cannot be"
        said.append(
            f"{words.activities(found.clipped)} {were} recorded as ending {ends}: {they_are} cut off there, by "
            f"{duration(found.clipped_us)}{in_sum}"
        )
    if found.earlier_us:
        waits = f"the first step waits {duration(found.earlier_us)} for GPU work from before it"
        said.append(f"{waits}; this counts neither as the step's time nor as idle time")
    if summary.busy_by_device:
        shares = [f"GPU {device} {share:.0%}" for device, share in sorted(summary.busy_by_device.items())]
        said.append(
            f"one process uses several GPUs, which are busy for these shares of the time: {words.listed(shares)}"
        )
    if found.before_us + found.after_us > MUCH_OUTSIDE * summary.recorded_step_us:
        launched = " with a launch call" * found.earlier_work
        parts = [f"{duration(found.before_us)} before its first GPU activity{launched}"] * (found.before_us > 0)
        parts += [f"{duration(found.after_us)} after its last one"] * (found.after_us > 0)
        said.append(f"the recording has {' and '.join(parts)}; idle time counts between the two")
    if found.mixed is not None:
        longer, count = found.mixed.longer, len(summary.steps)
        others, one = duration(found.mixed.others_us), duration(found.mixed.longer_us)
        step = next((step for step in summary.steps if step.times_the_typical is not None), None)
        why = cause(summary, step) if step is not None else None
        because = f": in step {step.number}, {why}" if why else ""
        said.append(f"{longer:,} of {count:,} steps take {one}, and the others {others}{because}")
    if found.outlier is not None:
        step = next(one for one in summary.steps if one.name == found.outlier)
        why = cause(summary, step)
        because = f": {why}" if why else ""
        usual = f"the median step takes {duration(median(one.cpu_us for one in summary.steps))}"
        takes = f"step {step.number} takes {duration(step.cpu_us)} on the CPU"
        said.append(f"{takes}, where {usual}, and is left out of the regime{because}")
    return said


def bound_by(summary: Summary) -> str:
    """Return what limits the step, for a table's cell. On a CPU, overhead is the time outside of recorded ops."""
    found = summary.waits_for
    if found == "cpu-only":
        found = None if summary.source.devices else _on_cpu(summary)[0]
    return BOUND_BY.get(found) or WORDS[found].removesuffix("-bound")


def _persistent(summary: Summary) -> str:
    """Return a clause on a step that is one kernel with a block on most multiprocessors; "" for another step."""
    sms, work = summary.source.sms, summary.gpu_work
    blocks = math.prod(work[0].grid or ()) if len(work) == 1 and work[0].family == "unknown" else 0
    if not sms / 2 <= blocks <= sms or not blocks:
        return ""
    name = short(work[0].name)
    return f"all of its work is one persistent kernel: {name}, with {blocks} blocks on {sms} multiprocessors"


def _largest_family(gpu: GpuTime) -> str:
    """Return a clause on the family with most of the GPU's busy time."""
    times = Counter(gpu.compute_by_family)
    times.update({"communication": gpu.exposed_communication_us, "copy": gpu.exposed_copy_us})
    family, us = times.most_common(1)[0]
    noun, kernels_us = words.family_as_noun(family), gpu.compute_by_family.get("copy", 0.0)
    if family == "copy" and kernels_us:
        many_copies = gpu.exposed_copy_us >= MOSTLY_KERNELS * us
        us, noun = us if many_copies else kernels_us, words.copies_as_noun(many_copies, by_kernels=True)
    share = us / gpu.busy_us if gpu.busy_us else 0.0  # a trace may record activities of no length
    return f"{share:.0%} of the busy time is {noun}"


@finding(predicts=lambda name: f"at this size the step is {name}", needs_gpu=True)
def regime_is(summary: Summary, name: str) -> Verdict:
    """Judge the regime. name: one of WORDS; GPU-bound also holds for compute-bound and memory-bound steps."""
    found, figures = waiting(summary)
    holds = found == name or (name == "GPU-bound" and found in ("compute-bound", "memory-bound"))
    sooner = "a faster GPU needs larger work to be kept busy" if found == "overhead-bound" else ""
    if name in ("compute-bound", "memory-bound") and found == "GPU-bound" and not summary.source.shapes_recorded:
        return Verdict(None, f"{found}: {figures}; --record-shapes adds the FLOPs and bytes that show which")
    return Verdict(holds, figures if holds else f"{found}: {figures}", sooner)


# Ratio of the CPU's self total to the GPU's. On the H200: 22 to 180 at 64 x 64 (the GPU waits), 1.2 at most if busy.
FAR_ABOVE = 2


def _self_totals(summary: Summary) -> tuple[float, float]:
    """Return the steps' self times (µs) on the CPU and on the GPU, as the profiler table sums them."""
    return sum(one.cpu_us for one in summary.steps), sum(one.total_us for one in summary.kernels)


@finding(TABLE, "a CPU self total far above the GPU's", needs_gpu=True, said_above=True, change="larger_batch")
def overhead_bound(summary: Summary) -> Verdict:
    """The step is overhead-bound, because the GPU waits for the CPU to launch kernels: give each launch more work
    (larger or batched inputs), or fuse kernels so that there are fewer launches."""
    cpu, gpu = _self_totals(summary)
    return Verdict(summary.waits_for == "overhead" and cpu > FAR_ABOVE * gpu, waiting(summary)[1])


@finding(TABLE, "a GPU self total near the CPU's, or above it", needs_gpu=True, said_above=True)
def gpu_bound(summary: Summary) -> Verdict:
    """The step is GPU-bound: the program waits for the GPU. Only less or faster GPU work makes it faster."""
    cpu, gpu = _self_totals(summary)
    return Verdict(summary.waits_for in ("compute", "memory", "gpu") and cpu <= FAR_ABOVE * gpu, waiting(summary)[1])


@finding(predicts=lambda first, count: f"the trace holds steps #{first} to #{first + count - 1}", claims="05")
def records_steps(summary: Summary, first: int, count: int) -> Verdict:
    names = [step.name for step in summary.steps] if summary.source.has_steps else []
    right = len(names) == count and all(name == f"{STEP}{first + i}" for i, name in enumerate(names))
    return Verdict(right, f"{names[0]} to {names[-1]}" if names else "no step")


def cause(summary: Summary, step: StepFacts) -> str | None:
    """Return why a marked step took longer; None if the trace does not show it."""
    more = step.excess
    if more is None:
        return None
    overheads = ", ".join(f"{name} {duration(us)}" for name, us in list(more.overheads.items())[:3])
    beside = f" (in the same step: {overheads})" if overheads else ""
    first = summary.source.has_steps and step is summary.steps[0]
    cold = "a cold start: " if step.name in summary.left_out and paid_for_first_use(step) else ""
    if step.compile_us > more.us / 3:
        return f"{compiled(step)} for {duration(step.compile_us)} of its {duration(step.cpu_us)}{beside}"
    if sum(more.first_calls.values()) > more.us / 3:
        calls = ", ".join(f"{name} {duration(us)}" for name, us in list(more.first_calls.items())[:3])
        return f"{cold}{calls} in calls that the typical step does not make{beside}"
    least, most = more.times_low, more.times_high
    # Most calls were slower by similar factors, which explain most of the step's additional time.
    if least is not None and least >= ALIKE_SLOWER and most <= ALIKE_SPREAD * least and more.alike_us > more.us / 2:
        low, high = f"{least:.1f}", f"{most:.1f}"
        started = ", probably because the profiler has just started" * (first and more.times_high < MUCH_SLOWER)
        return f"most calls are {low if low == high else f'{low} to {high}'} times slower" + started + beside
    for count in (1, 2, 3):
        slowest = list(more.slower)[:count]
        if sum(more.slower[name] for name in slowest) > more.us / 2:
            return f"{cold}{_took(more, slowest)}{beside}"
    return None


def compiled(step: StepFacts) -> str:
    """Return a clause on what torch.compile compiled in a step, and whether it is a recompilation."""
    again = [one for one in step.compiled if not one.endswith("/0")]
    which = again or step.compiled
    return f"torch.compile compiled{' again' * bool(again)}" + f" ({', '.join(which[:3])})" * bool(which)


def paid_for_first_use(step: StepFacts) -> bool:
    """Return whether a first step has cold-start work: compilation, loading, or calls that the typical step lacks."""
    more = step.excess
    if more is None:
        return False
    calls = {name: us for name, us in more.first_calls.items() if not MAY_WAIT.search(name)}
    loads = any("Loading" in name for name in more.overheads) or any("LoadData" in name for name in calls)
    if step.compile_us > more.us / 3:  # the typical step does not make the calls of a compilation, either
        return any(one.endswith("/0") for one in step.compiled) or loads
    return loads or sum(calls.values()) > more.us / 3


def _took(more: Excess, names: list[str]) -> str:
    """Return a clause on the additional time of the slowest names, as parts of the step's if possible."""
    if sum(more.slower[name] for name in names) < more.us:
        parts = [
            (more.slower[name], OUTSIDE_CALLS if name == OUTSIDE_CALLS else f"self time of {name}") for name in names
        ]
        unit, (whole, first, *others) = in_one_unit([more.us, *(us for us, _ in parts)])
        rest = [f", {us} are {what}" for us, (_, what) in zip(others, parts[1:], strict=True)]
        return f"{first} of the additional {whole} {unit} are {parts[0][1]}{''.join(rest)}"
    whose = [
        f"{duration(more.slower[name])} more are {OUTSIDE_CALLS}" if name == OUTSIDE_CALLS
        else f"{name} took {duration(more.slower[name])} more"
        for name in names
    ]  # fmt: skip
    beyond = sum(more.slower[name] for name in names) - more.us
    # On several threads the extra times can add up to more than the step's extra time.
    less = 1 <= beyond <= more.less_us + 1
    return ", ".join(whose) + ", and other calls took less" * less


@finding(CPU, "a first step much slower than the others", said_above=True)
def slow_first_step(summary: Summary) -> Verdict:
    """In a cold start, code is loaded, memory is allocated and algorithms are chosen. Warm up before profiling. If all
    calls are slower by similar factors, the profiler has probably just started: read the other steps."""
    first = summary.steps[0]
    if first.times_the_typical is None or not summary.source.has_steps:
        return Verdict(False, f"the first step took {duration(first.cpu_us)}")
    return Verdict(True, f"{duration(first.cpu_us)}, {first.times_the_typical:,.1f} times the typical step")


@finding(
    predicts="in a cold run the first step is slower, because of the gap between its annotation and its first op",
    claims="06",
)
def first_step_is_wider(summary: Summary) -> Verdict:
    first = summary.steps[0]
    gaps = [one.label_to_first_op_us for one in summary.steps if one.label_to_first_op_us is not None]
    if len(summary.steps) < 3 or first.label_to_first_op_us is None:
        return Verdict(None, "fewer than three steps with an op")
    usual = summary.cpu_us
    more, gap_more = first.cpu_us - usual, first.label_to_first_op_us - median(gaps)
    if not slow_first_step.ask(summary).holds:
        seen = part_of(first.cpu_us, usual, "instead of")
        this, *_, typical, unit = seen.split()
        if this == typical:
            return Verdict(False, f"it takes {this} {unit}, as the typical step does")
        return Verdict(False, f"{'it is hardly slower' if more > 0 else 'it is not slower'}: {seen}")
    in_gap = part_of(max(0.0, gap_more), more, "of the additional")
    gap_unit, shown = in_one_unit(gaps[:3])
    all_gaps = f"the steps' gaps: {', '.join(shown)} {gap_unit}"
    seen = f"{part_of(first.cpu_us, usual, 'instead of')}; {in_gap} are in the gap ({all_gaps})"
    return Verdict(gap_more > more / 2, seen, cause(summary, first) or "")


def by_calls(summary: Summary, step: str = "") -> str:
    """Return how the steps were told apart, as the end of a sentence, if the calls of an annotation mark the steps.

    step: " step" where the sentence does not speak of steps.
    """
    source = summary.source
    if source.steps_by is None:
        return ""
    name = cut(source.steps_by, LONGEST_NAME) or "''"
    if source.steps_end_with_it:
        call = {1: "a", 2: "every second", 3: "every third"}.get(source.calls_in_a_step, "every fourth")
        return f", each{step} ending with {call} call of {name}"
    if "::" in source.steps_by or source.steps_by.startswith(REGION):  # an op, which a step may call several times
        return f", each{step} beginning with a call of {name}"
    if len(summary.steps) > 1:
        served = DECODES(source.steps_by)
        tokens = int(served[1]) if served else 0
        speed = f"{words.tokens_s(1e6 * tokens / summary.recorded_step_us)} tokens/s" if tokens else ""
        speed = f" ({counted(tokens, 'token')} each, {speed})" if tokens else ""
        return f", each{step} from a call of {name} to the next{speed}"
    return f",{step and ' the step is'} a call of {name}"


# A recording's time before and after the steps is reported if it is at least this share of the steps' time.
MUCH_OUTSIDE = 0.1


def outside(summary: Summary) -> str:
    """Return what the recording has besides the steps, if much of it belongs to no step; else ""."""
    us, steps_us = summary.source.outside_us, sum(one.cpu_us for one in summary.steps)
    if not us or us < MUCH_OUTSIDE * steps_us:
        return ""
    return f"{duration(us)} of the recording lies outside the {'steps' if len(summary.steps) > 1 else 'step'}"


@finding(predicts="in a warm run all steps take about the same time", claims="07")
def steps_are_alike(summary: Summary) -> Verdict:
    times = [one.cpu_us for one in summary.steps]
    unit, figures = in_one_unit(times[:5])
    shown = f"{', '.join(figures)} {unit}"
    if len(times) > len(figures):
        shown = f"{shown} in the first {len(figures)} steps"
    if min(times) <= 0:
        return Verdict(None, shown)
    alike = max(times) < ALIKE * min(times)
    wide = [one for one in summary.steps if one.times_the_typical is not None]
    why = cause(summary, wide[0]) if wide else None
    seen = shown + ("" if alike else f": the longest is {max(times) / min(times):.1f} times the shortest")
    return Verdict(alike, seen, f"step {wide[0].number}: {why}" if why else "")


@finding(predicts="the profiler requests its buffer once, before the first kernel", needs_gpu=True, claims="08")
def one_buffer_request(summary: Summary) -> Verdict:
    requests = summary.profiler.buffer_requests
    before = [one for one in requests if one.before_first_work]
    seen = counted(len(requests), "request")
    seen += f"; the one before the first kernel takes {duration(before[0].us)}" if before else ""
    return Verdict(len(requests) == 1 and len(before) == 1, seen)


@finding(GPU, "an Activity Buffer Request", teaches=True)
def buffer_request(summary: Summary) -> Verdict:
    """The profiler allocates a buffer for GPU records. This is the profiler's cost, not the program's."""
    requests = summary.profiler.buffer_requests
    took = duration(sum(one.us for one in requests))
    return Verdict(bool(requests), f"{counted(len(requests), 'request')}, {took} in all")


@finding(predicts="the last cudaDeviceSynchronize takes much longer than the GPU work", needs_gpu=True, claims="13")
def long_final_sync(summary: Summary) -> Verdict:
    if summary.profiler.final_sync_us is None:
        return Verdict(None, "no synchronization after the last step")
    busy = summary.gpu.busy_us if summary.gpu else 0.0
    seen = f"it takes {duration(summary.profiler.final_sync_us)}, and the GPU work {duration(busy)}"
    short = "here it only waits for the last kernel, so it shows nothing about idle time"
    return Verdict(summary.profiler.final_sync_us > 10 * busy, seen, short)


@finding(CPU, "a long cudaDeviceSynchronize after the last step", teaches=True)
def final_synchronization(summary: Summary) -> Verdict:
    """The profiler waits for the GPU before it collects its records. After much GPU work, the wait is for queued
    kernels. After little GPU work, the GPU is idle for most of the wait."""
    # The shortest on the H200 took 8.5 µs, the time of the call itself.
    us, busy = summary.profiler.final_sync_us, summary.gpu.busy_us if summary.gpu else 0.0
    long = us is not None and us > max(20, 0.05 * summary.window_us)
    return Verdict(long, f"{duration(us or 0)}, for {duration(busy)} of GPU work")


@finding(CPU, "a synchronization inside a step that leaves the GPU idle", needs_gpu=True, change="remove_sync")
def sync_idles_the_gpu(summary: Summary) -> Verdict:
    """The CPU waits for a result (.item(), nonzero, a blocking copy) and launches nothing meanwhile. Remove the
    synchronization, or ask for the result later."""
    syncs = [one for one in summary.training.syncs if one.idle_us]
    us = sum(one.idle_us for one in syncs)
    calls = words.listed(f"{one.asked_by} ({one.call})" for one in syncs[:3])
    idle = f"the GPU is idle for {duration(us)} of a step"
    # A launch alone takes 5 µs.
    return Verdict(us > 5, f"{idle} in these calls and the launch after each: {calls}")
