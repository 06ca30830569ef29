"""Changes by torch.compile: fused kernels, and what compiled code does in each call."""

import math
import re
from bisect import bisect
from collections import Counter, defaultdict
from collections.abc import Container, Iterable, Iterator, Sequence
from functools import cache, lru_cache
from statistics import median

from tracereader.changes import prices
from tracereader.changes.change import change
from tracereader.changes.context import Case, Entry
from tracereader.changes.equal_passes import IS_LOSS
from tracereader.changes.host import host
from tracereader.changes.layout import conversions
from tracereader.changes.opportunity import Proposal
from tracereader.changes.precision import follows_half_precision, follows_tf32
from tracereader.changes.roofline import moving_us
from tracereader.changes.vetoes import BATCH_NORM, has_batch_norms_of_volumes
from tracereader.figures.attention import attention_calls
from tracereader.figures.gpu_work import GpuWork
from tracereader.figures.hardware import Peaks
from tracereader.figures.pace import PAUSE_US, with_a_middle
from tracereader.figures.phases import backward_begins, in_backward, of_the_loss, outside_model
from tracereader.figures.steps import compilations
from tracereader.findings.finding import WORTH_SHOWING, counted, duration, how_often
from tracereader.replay import Graph
from tracereader.replay.changes import fused, with_cpu_time, with_durations, with_smaller_graphs, without_cpu_time
from tracereader.trace import Op, Step, Work, innermost
from tracereader.trace.families import FUSABLE
from tracereader.trace.grouped import grouped
from tracereader.trace.intervals import minus, union
from tracereader.trace.labels import ACCUMULATES, COMPILING, INDUCTORS_CALL, LOADER, LOOKUP, OPTIMIZERS, WRAPPERS
from tracereader.trace.op_names import FOREACH, OF_UNKNOWN_SIZE, SOFTMAX
from tracereader.trace.types import Inputs
from tracereader.trace.waits import is_wait
from tracereader.two_runs.faster import ALMOST
from tracereader.two_runs.same_work import (
    by_calls,
    halved,
    newly_compiled,
    same_heavy,
    same_products,
    same_type,
    the_same_work,
)
from tracereader.two_runs.side import Side

COSTLY = ("tanh", "gelu", "exp", "sigmoid", "silu", "log", "pow", "erf", "sin", "cos", "softmax", "mish", "softplus")
# Inductor fuses at most this many ops into one kernel (max_fusion_size in torch/_inductor/config.py).
LONGEST_CHAIN = 64
# A loss has up to 4 reductions in a row, which Inductor fuses. A loop of 16 steps with a reduction in each (331 kernels
# on an H100) became 31 kernels, took 45 s to compile, and 2.4 ms instead of 5.9. A loop of 48 steps was still being
# compiled after 110 s, and two of 128 after 230 s.
MANY_REDUCTIONS, UNROLLED = 4, 12
# If batch norms take this share of what can be fused, compiled calls take as long as eager's: a GAN, MobileNet and
# three ResNet-18 that launches limit did not become faster. Batch norms of volumes took six times as long.
MOSTLY_BATCH_NORM = 0.5
FEW_CHANNELS = 64  # of all convolutions
# The launches of a loss, in its forward and backward together, from which the proposals name it: cross entropy and
# similar losses launch 5 to 12. With a loss of 58 in reinforcement learning, torch.compile of the model alone made a
# step on an H100 45% longer; of the model and the loss, 30% shorter.
MANY_IN_LOSS = 15
# From this share of the saved time on, the loss is worth compiling. With a vocabulary of 128,256, a step of 19.6 ms
# took 19.3 ms with a compiled model, and 12.0 ms if the loss was compiled, too.
MUCH_IN_LOSS = 0.3
NORM_BACKWARD = re.compile(r"(batch|layer|group|rms)_norm_backward$")
# What torch.compile of a model leaves as it is: other parts of the step, and a part of the model that is compiled.
NOT_OF_THE_MODEL = (ACCUMULATES, LOADER, OPTIMIZERS, INDUCTORS_CALL, *WRAPPERS)
# PyTorch's encoder layers in inference: as many kernels as compiled. On an H200, a ViT took 3.0 ms before and after.
OF_MANY_KERNELS = {"aten::_native_multi_head_attention", "aten::_transformer_encoder_layer_fwd"}.__contains__


def _follows_fuse_pointwise(before: Side, after: Side) -> bool:
    """Compiled kernels are new, the fusable kernels are fewer or shorter, and the number of products is the same."""
    rows = [[one for one in side.summary.gpu_work if one.family in FUSABLE] for side in (before, after)]
    fewer = len(rows[1]) < ALMOST * len(rows[0])
    shorter = sum(one.us for one in rows[1]) < ALMOST * sum(one.us for one in rows[0])
    attention = [any(one.family == "attention" for one in side.summary.gpu_work) for side in (before, after)]
    as_many = same_products(before, after) and attention[0] == attention[1]
    as_many = as_many and any(judge(before, after) for judge in (same_type, follows_tf32, follows_half_precision))
    # A fused kernel moves the bytes of the longest one. Otherwise any small compiled program without products would do.
    as_large = sum(one.us for one in rows[1]) > 0.5 * max((one.us for one in rows[0]), default=0.0)
    return newly_compiled(before, after) and as_large and (fewer or shorter) and as_many and by_calls(before, after)


@change(
    "fuse pointwise kernels with torch.compile",
    "a chain takes as long as its longest kernel; compiled calls replace the CPU time of the model's ops",
    followed=_follows_fuse_pointwise,
    keys=("compile_reduce_overhead", "compile", "compile_max_autotune"),
)
def fuse_pointwise(case: Case) -> Proposal | None:
    saves_calls = _has_calls_to_save(case)
    of_the_model = _of_the_model(case)
    fusable = [entry for entry in of_the_model if _is_fusable(entry)]
    in_norms = sum(one.us for _, one, op in fusable if op is not None and BATCH_NORM in op.name)
    if case.trace.trains and saves_calls and in_norms >= MOSTLY_BATCH_NORM * sum(one.us for _, one, _ in fusable):
        saves_calls = False
        if has_batch_norms_of_volumes(case):
            return None
    compiled = sum(one.us for _, one, _ in fusable if one.is_compiled)
    if 2 * compiled > sum(one.us for _, one, _ in fusable):
        return None  # the model is already compiled, and the remaining kernels are outside of it
    eager = {id(work) for work, one, op in fusable if not (one.is_compiled or _is_in_compiled_code(case, op))}
    # The kernels of each run that work on equally many elements, with that number.
    by_size = (grouped((_elements(entry), entry) for entry in run) for run in _runs(case, eager))
    alike = [same for some in by_size for same in some.items()]
    parts = [(part, elements) for elements, some in alike for part in _parts(some) if len(part) > 1]
    # Each chain with the time (µs) of the kernel that replaces it.
    chains = [(part, _fused_us(part, elements, case.peaks)) for part, elements in parts]
    if not chains:
        return None
    before = sum(one.us for chain, _ in chains for _, one, _ in chain)
    after = sum(us for _, us in chains)
    # An op that launches a fused kernel does not set memory for it, either.
    memsets = grouped((id(op), work) for work, _, op in case.activities if work.kind == "memset" and op is not None)
    in_typical = [
        ([work for work, _, _ in chain] + [one for op in {id(op) for _, _, op in chain} for one in memsets[op]], us)
        for chain, us in chains
    ]
    if saves_calls:
        graph = _with_compiled_calls(case, of_the_model, eager, in_typical)
        saved_us = case.graph.cpu_us - graph.cpu_us
    else:  # no CPU time is saved
        times = {}
        for (first, *rest), us in case.groups_in_all_steps(in_typical):
            times |= {first: us, **dict.fromkeys(rest, 0.0)}
        # A graph's launch does not take part in the guards, and takes less time with fewer kernels.
        in_graphs = [one for one, us in times.items() if not us and one.from_graph]
        graph = with_durations(with_smaller_graphs(case.graph, in_graphs) if in_graphs else case.graph, times)
    if converting := _conversions_less(case):
        graph = with_durations(graph, case.in_all_steps(dict.fromkeys((work for work, _ in converting), 0.0)))
    kernels = sum(len(chain) for chain, _ in chains)
    seen = f"{kernels:,} kernels in {counted(len(chains), 'chain')} take {duration(before)}; "
    seen += f"fused, they take about {duration(after)}"
    if saves_calls and saved_us > before - after:
        seen += f"; compiled code takes {duration(saved_us)} less CPU time"
    if converting:
        us = sum(one.us for _, one in converting)
        seen += f"; images stay in channels_last, which saves {duration(us)} of conversions"
    how = "torch.compile(model)"
    if includes_the_loss(case):
        how = "torch.compile the model and the loss"
    elif in_loss := _share_in_the_loss(case, chains):
        part = "all" if round(in_loss, 2) == 1 else f"{in_loss:.0%}"
        what = "the loss, too" if compiled else "the model and the loss"
        how = f"torch.compile {what}; {part} of the saved GPU time is in the loss"
    if any(_reductions(some) >= UNROLLED for _, some in alike):
        how += "; compiling so many ops in a row may take minutes"
    return Proposal(graph, seen, how, assumed=True)


def _conversions_less(case: Case) -> list[tuple[Work, GpuWork]]:
    """Return the conversions of layouts that compiled code does not make, because images stay in channels_last.

    Inductor gives convolutions of images this layout, unless it expects slower kernels (decide_layout_opt in
    torch/_inductor/graph.py): with groups, and in training with much fewer channels out than in, or few channels.
    """
    found, layout, _ = conversions(case)
    if layout != "channels_last":
        return []
    convolutions = case.step.named("aten::convolution".__eq__)
    weights = [dims for op in convolutions if len(dims := op.inputs.dims_at(1) or ()) == 4]
    if len(weights) < len(convolutions) or any(op.inputs.concrete[8:9] not in ([], ["1"]) for op in convolutions):
        return []  # unknown shapes, or groups
    fewer = any(2 * out <= into and high > 1 for out, into, high, _ in weights)
    small = all(max(out, into) <= FEW_CHANNELS for out, into, *_ in weights)
    return [] if case.trace.trains and (fewer or small) else found


def _share_in_the_loss(case: Case, chains: Sequence[tuple[list[Entry], float]]) -> float:
    """Return the share of the chains' saved GPU time that is in the loss; 0 if it is small, or little of the step."""
    loss = {id(one) for part in of_the_loss(case.trace, case.step) for one in part}
    saved = [(sum(one.us for _, one, _ in chain) - us, chain) for chain, us in chains]
    in_loss = sum(us for us, chain in saved if all(id(work) in loss for work, _, _ in chain))
    share = in_loss / (sum(us for us, _ in saved) or 1)
    return share if share >= MUCH_IN_LOSS and in_loss > WORTH_SHOWING * case.graph.recorded_us else 0.0


def _with_compiled_calls(
    case: Case, of_the_model: Sequence[Entry], eager: Container[int], chains: Sequence[tuple[list[Work], float]]
) -> Graph:
    """Return the graph of a step whose model is compiled.

    Triton kernels replace each chain and each other kernel that can be fused. Inductor's code calls the model's other
    ops. What the threads do between these calls is gone: modules, views, and autograd's engine. eager: the ids of the
    model's activities that can be fused. chains: those of them that become one kernel, with its time (µs).
    """
    by_ops = ((work, one, op) for work, one, op in of_the_model if op is not None and op.kind == "op")
    launched = ((work, op) for work, one, op in by_ops if work.launch is not None and one.family != "communication")
    model = [(work, op) for work, op in launched if not _is_in_compiled_code(case, op)]
    called = {id(op) for work, op in model if id(work) not in eager and work.kind == "kernel"}
    compiled = {id(op) for work, op in model if id(work) in eager} - called
    kernels = Counter(id(op) for work, op in model if work.kind == "kernel")
    in_chains = {id(one) for chain, _ in chains for one in chain}
    # What an op of a chain calls is not called any more. Its GPU time stays in the prediction.
    of_chains = {id(op) for work, op in model if id(work) in in_chains}
    in_chains |= {id(work) for work, op in model if any(id(above) in of_chains for above in op.above())}
    groups = [chain for chain, _ in chains]
    groups += [[work] for work, op in model if id(op) in compiled and id(work) in eager and id(work) not in in_chains]
    launches = defaultdict(float, {work: 0.0 for work, _ in model})  # the CPU time that is added before each of them
    for group in groups:
        if with_launch := [work for work in group if work.launch is not None]:
            launches[min(with_launch, key=lambda work: work.launch.start)] += prices.CALL
    if model:  # compiled code ends where it waits, at most once between two launches
        starts = sorted([work.launch.start for work, _ in model])
        breaks = {bisect(starts, wait.start) for wait in host(case.step).waits} - {0, len(starts)}
        forward = (work.launch for work, op in model if not in_backward(op))
        inside = (innermost(case.trace.modules.get(one.track, ()), one.start) for one in forward)
        calls = (len({id(top) for top, *_ in filter(None, inside) if not IS_LOSS(top.name)}) or 1) + len(breaks)
        launches[model[0][0]] += calls * (prices.TRAINED_REGION if case.trace.trains else prices.REGION)
    for work, op in {id(op): (work, op) for work, op in reversed(model)}.values():  # once for each op
        if id(op) in compiled:
            launches[work] += prices.CALL * (_more_kernels(op, kernels[id(op)]) if case.trace.trains else 0)
        else:
            launches[work] += prices.AROUND
    of_model = case.in_all_steps({work: count * case.launch_us for work, count in launches.items()})
    of_compiled = case.in_all_steps({work: 0.0 for work, op in model if id(op) in compiled})
    spans, added = [], [(work.launch.track, work.launch.start, us) for work, us in of_model.items()]
    for step in case.steps:
        spans += _between_calls(step, of_model, of_compiled)
        added += [(op.track, op.start, prices.AROUND * case.launch_us) for op in step.named(ACCUMULATES.__eq__)]
    return with_cpu_time(without_cpu_time(fused(case.graph, case.groups_in_all_steps(chains)), spans), added)


def _between_calls(
    step: Step, of_model: Container[Work], of_compiled: Container[Work]
) -> Iterator[tuple[tuple, int, int]]:
    """Yield track, start and end (ns) of what a step's threads do for the model outside the ops that stay.

    What launches nothing for the model for a longer time than a pause of PyTorch's own stays, too. of_model: all
    activities of the model. of_compiled: those whose ops are replaced.
    """
    pause = round(PAUSE_US * 1e3)
    spans = defaultdict(list)
    stays = [*host(step).waits, *step.named(lambda name: name.startswith(NOT_OF_THE_MODEL))]
    for work, op in zip(step.work, step.asking, strict=True):
        if work.launch is None:
            continue
        if work in of_model:
            top = work.launch.outermost_call()
            spans[top.track].append((top.start, top.end + pause))
        if work not in of_compiled:
            stays.append(op if op is not None and op.kind == "op" else work.launch)
    kept = grouped((op.track, (op.start, op.end)) for op in stays)
    for track, some in spans.items():
        joined = [(start, end - pause) for start, end in union(some)]
        yield from ((track, start, end) for start, end in minus(joined, union(kept[track])))


def _is_in_compiled_code(case: Case, op: Op | None) -> bool:
    return case.calls_inductor and op is not None and any(above.name.startswith(INDUCTORS_CALL) for above in op.above())


def _more_kernels(op: Op, kernels: int) -> int:
    """Return how many more kernels a compiled op of training has. kernels: those that eager's op launches."""
    if NORM_BACKWARD.search(op.name):
        return max(0, prices.NORM_BACKWARD_KERNELS - kernels)
    return max(0, prices.BATCH_NORM_KERNELS - kernels) if BATCH_NORM in op.name else 0


def _has_calls_to_save(case: Case) -> bool:
    """Return whether compiled code makes fewer calls than this step. While keys or tokens grow, it does not."""
    if not case.trace.trains and case.summary.waits_for != "overhead":
        return False  # if the GPU limits inference, three of four predictions were nearer without the calls
    grows = case.growing_keys is not None or case.recomputed_tokens is not None
    # Only the shapes of several steps show that they do not grow.
    if not case.trace.trains and (case.is_single or not case.summary.source.shapes_recorded):
        grows = bool(attention_calls(case.step)) or case.has(SOFTMAX.__eq__)
    return not (grows or case.summary.launches_graphs or case.has(OF_MANY_KERNELS) or _has_unknown_sizes(case))


def _has_unknown_sizes(case: Case) -> bool:
    """Return whether the step has an op whose output's size depends on the data. torch.compile cannot capture it.

    Without a kernel for its types, the product of groups reads the sizes of the groups on the CPU.
    """
    if any(op.kind == "op" for op in case.step.named(lambda name: name.startswith(OF_UNKNOWN_SIZE))):
        return True
    grouped = case.step.named(lambda name: "grouped_mm" in name)
    return any(call.kind == "runtime" and is_wait(call) for op in grouped for call in op.walk())


def includes_the_loss(case: Case) -> bool:
    """Return whether changes of the model take in a loss of many ops, because it does not wait."""
    least = MANY_IN_LOSS * len(backward_begins(case.trace, case.step))
    return sum(map(len, of_the_loss(case.trace, case.step))) > least and not _of_losses_that_wait(case)


def _of_losses_that_wait(case: Case) -> set[int]:
    """Return the ids of what losses launch that wait for the GPU. Compiled code ends where it waits."""
    found = of_the_loss(case.trace, case.step)
    waits = [op.start for op in host(case.step).waits] if found else []
    waiting = (part for part in found if any(part[0].launch.start < wait < part[-1].launch.start for wait in waits))
    return {id(one) for part in waiting for one in part}


def _of_the_model(case: Case) -> list[Entry]:
    """Return the activities that the model itself launches, without copies to and from the GPU.

    An uncompiled flex_attention is left out: see compile_flex. So is a loss that waits.
    """
    not_the_models = case.launched_in(OPTIMIZERS) | outside_model(case.trace, case.step) | _of_losses_that_wait(case)
    not_the_models |= {id(work) for op in case.step.named(ACCUMULATES.__eq__) for work in op.work_below()}
    wrapped = case.has(lambda name: name.startswith(WRAPPERS))
    return [
        (work, one, op)
        for work, one, op in case.activities
        if id(work) not in not_the_models
        and "HtoD" not in one.name
        and "DtoH" not in one.name
        and not (op is not None and op.name.startswith(FOREACH))
        and id(work.launch) not in case.in_flex
        # What DDP or FSDP asks for is not compiled with the model.
        and not (wrapped and op is not None and any(above.name.startswith(WRAPPERS) for above in op.above()))
    ]


def _is_fusable(entry: Entry) -> bool:
    """Return whether an activity of the model is of the kinds that torch.compile fuses."""
    work, one, _ = entry
    of_cudnn = one.family == "copy" and one.maker.startswith("cuDNN")  # its convolutions' own layout conversions
    return one.family in FUSABLE and work.kind != "memset" and not of_cudnn


def _runs(case: Case, fusable: Container[int]) -> list[list[Entry]]:
    """Return the kernels that may be fused and follow each other on one stream.

    fusable: the ids of these activities. All others, except memsets, end a run.
    """
    runs, ended = grouped(()), Counter()  # by stream and the number of runs that have ended there; that number
    for entry in case.activities:
        work = entry[0]
        if id(work) in fusable:
            runs[work.track, ended[work.track]].append(entry)
        elif work.kind != "memset":
            ended[work.track] += 1
    return list(runs.values())


def _parts(chain: Sequence[Entry]) -> list[list[Entry]]:
    """Return the parts of a chain that become one kernel each. Of many reductions, each has a kernel of its own."""
    alone = _reductions(chain) > MANY_REDUCTIONS
    parts: list[list[Entry]] = [[]]
    for entry in chain:
        if len(parts[-1]) == LONGEST_CHAIN or (alone and _reductions([entry]) and _reductions(parts[-1])):
            parts.append([])
        parts[-1].append(entry)
    return parts


def _reductions(chain: Iterable[Entry]) -> int:
    return sum(one.family == "reduction" for _, one, _ in chain)


def _elements(entry: Entry) -> object:
    """Return the number of elements of the op's largest input; without shapes, the kernel's grid and block instead."""
    _, one, op = entry
    largest = _largest(op.inputs) if op is not None else None
    return (tuple(one.grid or ()), tuple(one.block or ())) if largest is None else largest


@lru_cache(4096)
def _largest(inputs: Inputs) -> int | None:
    return max(map(math.prod, inputs.dims), default=None)


def _fused_us(chain: Sequence[Entry], elements: object, peaks: Peaks | None) -> float:
    """Return the time (µs) of one kernel that replaces a chain.

    The longest kernel reads and writes as much as the fused one. Without a reduction this one reaches the memory
    bandwidth, even if eager's kernel does not. If the arithmetic of the chain takes longer, it is the limit.
    """
    times = [one.us for _, one, _ in chain]
    memory = max(times)
    # A product's own kernel that adds up its parts is beside the chain.
    if not any(one.family in ("reduction", "normalization") and "splitK" not in one.name for _, one, _ in chain):
        memory = max([_well_moved_us(one, op, peaks) for _, one, op in chain])
    if not isinstance(elements, int) or peaks is None:
        return memory
    flops = sum([_flops_of_one(op.name) for _, _, op in chain if op is not None])
    return min(sum(times), max(memory, flops * elements / peaks.fp32 / 1e6))


def _well_moved_us(one: GpuWork, op: Op | None, peaks: Peaks | None) -> float:
    """Return a kernel's time (µs); of a pointwise one and of a cast at most the time of a good kernel for its bytes."""
    types = op.inputs.types if op is not None and op.name == "aten::copy_" else []
    is_cast = len(types) > 1 and types[0] != types[1]
    if not one.bytes_moved or peaks is None or not (one.family == "pointwise" or is_cast):
        return one.us
    return min(one.us, max(prices.LEAST_KERNEL_US, moving_us(one.bytes_moved, peaks)))


@cache
def _flops_of_one(name: str) -> int:
    """Return the fp32 FLOPs that an op of this name costs for each element."""
    return prices.TRANSCENDENTAL if any(word in name for word in COSTLY) else prices.ARITHMETIC


@change(
    "skip the guards of compiled code",
    "inputs fulfil the guards in every step",
    followed=halved(
        lambda side: sum(call.us for call in side.summary.cpu.chain if call.name.startswith(LOOKUP)),
        the_same_work,
        same_heavy,
    ),
    on_cpu=True,
    keys=("skip_guards",),
)
def skip_guards(case: Case) -> Proposal | None:
    lookups, typical = case.in_each_step(lambda step: step.named(lambda name: name.startswith(LOOKUP)))
    compiles = case.has(lambda name: name.endswith(COMPILING))
    if not all(lookups) or (compiles and any(compilations(step) for step in case.trace.steps)):
        return None
    each = [sum(op.us for op in some) for some in lookups]
    # Every step is spared the same time. The saving then agrees with the evidence, whichever steps the replay measures.
    us = median(with_a_middle(each))
    spared = [min(1.0, (1 - prices.GUARDS_LEFT) * us / own) if own else 0.0 for own in each]
    parts = ((op, part) for some, part in zip(lookups, spared, strict=True) for op in some)
    return Proposal(
        without_cpu_time(case.graph, [(op.track, op.start, op.start + round(op.dur * part)) for op, part in parts]),
        f"a step looks up torch.compile's cache and checks guards {how_often(len(typical))}: "
        f"{duration(us)} of CPU time in the median step",
        "torch.compiler.set_stance(skip_guard_eval_unsafe=True) after warm-up, if inputs do not change",
        assumed=True,
    )
