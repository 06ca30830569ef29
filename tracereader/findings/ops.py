"""Findings about the ops of a step: the profiler's table and the call tree, eager and compiled."""

import math
from collections import Counter
from collections.abc import Sequence

from tracereader.figures import Summary
from tracereader.figures.cpu import Call, OpTimes
from tracereader.findings import finding as words
from tracereader.findings.finding import COMPILE, TABLE, TREE, Verdict, counted, duration, finding, listed
from tracereader.findings.steps import compiled
from tracereader.trace.labels import AUTOGRAD, GIVES_GRADIENT, LOOKUP, PREGRAPH, PROLOGUE, REGION, WRAPPERS
from tracereader.trace.op_names import EMPTY, MATMULS, SLICES

# Ops that only change a tensor's shape and strides (reshape does so if no copy is needed).
VIEWS = {
    "aten::t", "aten::transpose", "aten::permute", "aten::reshape", "aten::view", "aten::as_strided",
    "aten::_unsafe_view", "aten::_reshape_alias", "aten::expand", "aten::squeeze", "aten::unsqueeze",
    "aten::select", "aten::slice", "aten::detach", "aten::alias", "aten::narrow", "aten::resolve_conj",
}  # fmt: skip
# Ops that read and write no values, and take the CPU time for tensors on any device: they make views or allocate.
ALSO_VIEWS = ("aten::flatten", "aten::movedim", "aten::unflatten", "aten::unflatten_dense_tensors", "aten::view_as")
NO_VALUES = VIEWS.union(SLICES, EMPTY, ALSO_VIEWS, ("aten::empty_strided",))
# The names of ops of autograd and of torch.distributed, which do not compute by themselves, begin so.
NO_COMPUTATION = (AUTOGRAD, GIVES_GRADIENT, "c10d::", "_c10d_functional::", "symm_mem::", *WRAPPERS)
COMPILED_ROWS = (LOOKUP, REGION, PROLOGUE)


def is_of_a_library(name: str) -> bool:
    """Return whether a library's op has this name: one of PyTorch's, for example, but no part of autograd or DDP."""
    return "::" in name and not name.startswith(NO_COMPUTATION)


def with_cpu_tensors(summary: Summary) -> dict[str, OpTimes]:
    """Return the step's ops that compute and use no GPU, by name."""
    ops = ((name, one) for name, one in summary.cpu.ops.items() if not one.reaches_gpu)
    return {name: one for name, one in ops if name not in NO_VALUES and is_of_a_library(name)}


def with_calls_below(summary: Summary, *names: str) -> list[tuple[Call, list[Call]]]:
    """Return the step's calls with these names, without those inside another one, each with all calls below it."""
    found, depth = [], math.inf
    for call in summary.cpu.chain:
        if call.depth > depth:
            found[-1][1].append(call)
        elif call.name in names:
            found.append((call, []))
            depth = call.depth
        else:
            depth = math.inf
    return found


@finding(predicts="most of the annotation's total time is spent in the ops below it, not in its self time", claims="04")
def self_time_excludes_children(summary: Summary) -> Verdict:
    label = summary.cpu.label
    if label is None or not label.calls_inside:
        return Verdict(None, "the step has no annotation with ops in it")
    unit, (total, own, below) = words.in_one_unit([label.us, label.self_us, label.us - label.self_us])
    seen = f"{label.name}: {total} {unit} in total, {own} self, {below} in the ops below it"
    return Verdict(label.self_us < label.us - label.self_us, seen)


@finding(TABLE, "a row with very many calls", teaches=True)
def many_calls(summary: Summary) -> Verdict:
    """Many cheap calls add up. Try to batch or fuse them."""
    # The busiest op of the rungs' MLP runs 9 times a step and is not a bottleneck.
    name, op = max(summary.cpu.ops.items(), key=lambda item: item[1].calls, default=("", None))
    return Verdict(op is not None and op.calls > 30, f"{name}: {op.calls:,} calls per step" if op else "")


@finding(TABLE, "a row's total far above its self time", teaches=True)
def cost_in_children(summary: Summary) -> Verdict:
    """The time is spent in the calls below it. Look at those rows."""
    label = summary.cpu.label
    if label is None or label.us - label.self_us <= label.us / 2:
        return Verdict(False, "")
    times = words.part_of(label.self_us, label.us, "of self time in a total of")
    return Verdict(True, f"{label.name}: {times}, in one call")


@finding(TABLE, "the annotation twice, with a percentage over 100", teaches=True)
def annotation_twice(summary: Summary) -> Verdict:
    """The second row is the annotation's span on the GPU, including idle time. Read the kernels' rows instead."""
    label, step = summary.cpu.label, summary.chosen
    # If a step has several annotations, none of them spans the step.
    if label is None or summary.places.by_label or not step.gpu_busy_us or step.gpu_span_us < 1.2 * step.gpu_busy_us:
        return Verdict(False, "")
    span, busy = duration(step.gpu_span_us), duration(step.gpu_busy_us)
    return Verdict(True, f"{label.name}: a span of {span} for {busy} of GPU work")


@finding(predicts=lambda parent, child: f"{parent} resolves to {child}")
def dispatches(summary: Summary, parent: str, child: str) -> Verdict:
    found = with_calls_below(summary, parent)
    inside = {call.name for _, calls in found for call in calls}
    return Verdict(child in inside, f"{parent} calls {listed(sorted(inside)[:6])}" if found else f"no {parent}")


@finding(TREE, "matmul or linear that ends in mm, addmm or bmm", teaches=True)
def resolves_to_a_product(summary: Summary) -> Verdict:
    """The dispatcher chooses by the inputs' shapes. The last op is the one that launches."""
    dispatching = with_calls_below(summary, "aten::matmul", "aten::linear")
    pairs = [(op, call) for op, calls in dispatching for call in calls if call.name in MATMULS]
    return Verdict(bool(pairs), "".join(f"{op.name} ends in {call.name}" for op, call in pairs[:1]))


@finding(
    predicts=lambda count, name, gone: f"{count} {name} per step" + (f", and no {' or '.join(gone)}" if gone else "")
)
def ops_are(summary: Summary, count: int, name: str, gone: Sequence[str] = ()) -> Verdict:
    """Judge whether a step has `count` calls of an op, and none of the ops in `gone`."""
    left = [op for op in gone if op in summary.cpu.ops]
    calls = summary.cpu.ops[name].calls if name in summary.cpu.ops else 0
    return Verdict(calls == count and not left, f"{calls} {name}" + (f"; still there: {listed(left)}" if left else ""))


@finding(
    predicts=lambda *ops: f"{', '.join(ops)} launch{'es' * (len(ops) == 1)} no GPU work: a view moves no data",
    needs_gpu=True,
    claims="25 29",
)
def launch_nothing(summary: Summary, *ops: str) -> Verdict:
    found = [call for call in summary.cpu.chain if call.name in ops]
    if not found:
        return Verdict(None, "the trace has none of these ops")
    launching = sorted({call.name for call in found if call.reaches_gpu})
    return Verdict(not launching, f"{counted(len(found), 'call')}, {listed(launching)} with GPU work")


@finding(TREE, "t, view, reshape, … without GPU work", needs_gpu=True, teaches=True)
def views_launch_nothing(summary: Summary) -> Verdict:
    """These ops change shape and strides on the CPU. No data moves."""
    counts = Counter(call.name for call in summary.cpu.chain if call.name in VIEWS and not call.reaches_gpu)
    return Verdict(bool(counts), f"{counted(counts.total(), 'call')} per step: {', '.join(sorted(counts)[:6])}")


@finding(predicts="Dynamo looks up its cache in every call, and every step calls the same graph", claims="15")
def compiled_rows(summary: Summary) -> Verdict:
    names = [call.name for call in summary.cpu.chain]
    missing = [row for row in COMPILED_ROWS if not any(name.startswith(row) for name in names)]
    graphs = len(summary.compiled.graphs)
    same = graphs > 0 and all(one == summary.compiled.graphs for one in summary.compiled.graphs_of_steps)
    seen = f"{graphs} graph hash{'es' * (graphs != 1)} in {counted(len(summary.steps), 'step')}"
    seen += f", {'' if same else 'not '}the same in each" if graphs and not (same and graphs == 1) else ""
    seen += f"; missing: {listed(missing)}" if missing else ""
    seen += f"; besides: {PREGRAPH}" if PREGRAPH in names else ""
    return Verdict(not missing and graphs == 1 and same, seen)


@finding(predicts="the CPU has no rows of torch.compile", claims="34")
def no_compile_rows(summary: Summary) -> Verdict:
    rows = [call.name for call in summary.cpu.chain if "Dynamo" in call.name or "Compiled" in call.name]
    return Verdict(not rows, f"{len(rows)} such rows")


@finding(predicts=lambda op: f"torch.compile takes more CPU time to reach {op} than {op} itself takes", claims="18")
def dynamo_costs_more_than_the_op(summary: Summary, op: str) -> Verdict:
    us, step = summary.cpu.ops[op].total_us if op in summary.cpu.ops else 0.0, summary.chosen.cpu_us
    seen = words.part_of(us, step, "of the step's CPU time of")
    return Verdict(0 < us < step / 2, f"{op} takes {seen}")


@finding(COMPILE, "TorchDynamo Cache Lookup in every step", change="skip_guards")
def cache_lookup_in_every_step(summary: Summary) -> Verdict:
    """Guards are checked in every call. For one or two ops this costs more CPU time than it saves."""
    if not summary.compiled.cache_lookups or not all(summary.compiled.cache_lookups):
        return Verdict(False, "")
    lookup = sum(one.total_us for name, one in summary.cpu.ops.items() if name.startswith(LOOKUP))
    # Self times are summed, because after a graph break a region contains the next region and the eager ops between.
    own = sum(one.self_us for name, one in summary.cpu.ops.items() if name.startswith((*COMPILED_ROWS, PREGRAPH)))
    lookups = words.part_of(lookup, summary.chosen.cpu_us, "of the step's CPU time of")
    seen = f"{lookups}; with pregraph bytecode, prologues and the regions' self time it is {duration(own)}"
    return Verdict(True, seen)


@finding(COMPILE, "Torch-Compiled Region n/1 or higher")
def recompiled(summary: Summary) -> Verdict:
    """torch.compile recompiled because a guard failed, for example after shapes, dtypes or strides changed. Look at the
    time of the first call, too."""
    steps = [one for one in summary.steps if any(not which.endswith("/0") for which in one.compiled)]
    seen = "; ".join(f"{compiled(one)} for {duration(one.compile_us)} in step {one.number}" for one in steps[:2])
    return Verdict(bool(summary.compiled.recompiled or steps), seen or ", ".join(summary.compiled.recompiled[:5]))
