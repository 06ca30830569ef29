"""Changes of the GPU's work: fusion, alignment, layout, recomputation, block counts."""

import bisect
import math
import re
from collections import Counter, defaultdict
from collections.abc import Container, Iterable, Iterator, Sequence
from functools import cache, lru_cache

from tracereader.figures.attention import SDPA
from tracereader.figures.autograd import backward_begins, backward_nodes, in_backward, kept_by_step, outside_model
from tracereader.figures.avoidable import SDPA_MATH
from tracereader.figures.decoding import expanded
from tracereader.figures.gpu_work import GpuWork
from tracereader.figures.hardware import Peaks
from tracereader.figures.pace import PAUSE_US
from tracereader.figures.training import recomputed_ops
from tracereader.figures.unfused import BATCHED, SOFTMAX
from tracereader.findings.finding import counted, duration, listed
from tracereader.findings.opportunity import WORTH_SHOWING, Case, Change, Entry, Proposal
from tracereader.replay import (
    Graph,
    fused,
    is_wait,
    waits_of,
    with_cpu_time,
    with_durations,
    with_smaller_graphs,
    without_cpu_time,
    without_ops,
    without_work,
)
from tracereader.trace import Op, Step, Trace, Work
from tracereader.trace.families import says
from tracereader.trace.intervals import minus, union
from tracereader.trace.kernel_names import short
from tracereader.trace.labels import (
    ACCUMULATES,
    DDPS_FORWARD,
    FLEX_ATTENTION,
    INDUCTORS_CALL,
    LOADER,
    OPTIMIZERS,
    REGION,
    WRAPPERS,
)
from tracereader.trace.types import Inputs, dtype_of

# The shares of the data sheet's peaks that good kernels reach on an H200: products 74 to 83% in bf16 and 40 to 72% in
# TF32, convolutions about 30% in TF32, pointwise kernels 80 to 92% of the memory bandwidth. The attention kernels of
# cuDNN and FlashAttention reach 18 to 33% by the FLOPs of a causal mask, which are half of those of the whole matrix of
# scores.
PRODUCT, TF32_PRODUCT, CONVOLUTION, ATTENTION, BANDWIDTH = 0.75, 0.55, 0.3, 0.45, 0.85
# Products in fp32 on CUDA cores reach 50 to 75% of the peak there.
FP32_PRODUCT = 0.6
# Products on tensor cores with little arithmetic do not take proportionally less time. In this repository's traces of
# an H200 they take 2.9 to 6.7 µs in bf16 (12 sizes, median 4.4) and 3.8 to 4.9 µs in TF32, and a small fused attention
# takes 4.6 µs. Only 64 x 64 x 64 takes 1.9 µs. The shortest kernels of any kind take about 1 µs there.
SMALL_PRODUCT_US, LEAST_KERNEL_US = 4.0, 1.0
# The fp32 FLOPs that one element costs. A chain of ten tanh and twenty products and sums, compiled into one kernel,
# takes 466 µs for 67 million elements on an H200.
TRANSCENDENTAL, OTHER = 40, 3
COSTLY = ("tanh", "gelu", "exp", "sigmoid", "silu", "log", "pow", "erf", "sin", "cos", "softmax", "mish", "softplus")
# Ops that copy a tensor to give it another layout.
LAYOUT_OPS = ("aten::contiguous", "aten::reshape", "aten::flatten")
# Inductor fuses at most this many ops into one kernel (max_fusion_size in torch/_inductor/config.py).
LONGEST_CHAIN = 64
# A loss has up to 4 reductions in a row, which Inductor fuses. A loop of 16 steps with a reduction in each (331 kernels
# on an H100) became 31 kernels, took 45 s to compile, and 2.4 ms instead of 5.9. A loop of 48 steps was still being
# compiled after 110 s, and two of 128 after 230 s.
MANY_REDUCTIONS, UNROLLED = 4, 12
FUSABLE = ("pointwise", "normalization", "reduction", "copy")
FOREACH = ("_foreach", "aten::_foreach")  # ops on lists of tensors, of optimizers mostly
# A product below this share of its peak is slow. A product above it has little to gain.
SLOW = 0.4
# The kernels' names tell which alignment they need, in elements. cuBLAS's nvjet kernels load tiles with TMA, which
# needs rows of a multiple of 16 bytes. On an H200, products by align1 kernels in bf16 take 5.7 and 6.4 times as long as
# with padded dimensions (the committed pairs "odd_width" and "gpt2").
UNALIGNED, ALIGNED = re.compile(r"_align[124](?!\d)"), re.compile(r"^nvjet|_align8(?!\d)|_ldg8_")
UNALIGNED_TIMES = 5
BACKWARD_FLOPS = 2.5  # attention's, for each FLOP of its forward pass: five products instead of two
# CPU time of a call while the profiler records, on an H200's machine (µs): scaled_dot_product_attention takes 35 to
# 140, in training 100 to 230, and its backward 130 to 375.
ATTENTION_CALL_US, TRAINED_ATTENTION_CALL_US = 75, 150
# The same of compiled flex_attention on an H100's machine: 272 to 311, and its backward 331 to 456.
COMPILED_FLEX_CALL_US = 350
# CPU time while the profiler records, in launches (Case.launch_us). From the end of the call before it to its own end,
# a Triton kernel's call takes 5.4 to 8.8 launches (the means of 17 recordings on two machines). The figure is near the
# slowest of them, because a gain that does not come is worse than one that was not promised in full. Inductor's code
# around an op that it does not compile takes 0.9 to 3.4 launches (the medians), and what surrounds Inductor's code 1.4
# to 3.3 launches for each parameter with a gradient.
COMPILED_CALL_LAUNCHES, CALLING_LAUNCHES = 8.5, 2
# A compiled normalization has more kernels than eager's, because its sums over the batch are kernels of their own. A
# batch norm has 3.1 in training, and its backward 3.8 (ResNet-50, ResNet-152). The backward of a layer norm has 1.8 to
# 4.3 (four recordings).
BATCH_NORM_KERNELS, NORM_BACKWARD_KERNELS = 3, 4
BATCH_NORM = "batch_norm"  # in its ops' names
# If batch norms take this share of what can be fused, compiled calls take as long as eager's: a GAN, MobileNet and
# three ResNet-18 that launches limit did not become faster. Batch norms of volumes took six times as long.
MOSTLY_BATCH_NORM = 0.5
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
# Ops that copy their input to the contiguous layout if it has another one.
NEED_CONTIGUOUS = ("aten::native_group_norm", "aten::group_norm", "aten::instance_norm")
FFTS = "aten::_fft_"
SPARSE_PRODUCT, GROUPED_PRODUCTS = "aten::_sparse_addmm", "grouped_mm"
# Kernels that solve triangular systems work row by row, like cuSOLVER's factorizations. More blocks do not help, and in
# float32 they took 0.8 times as long as in float64 on an H100.
SOLVES = re.compile(r"trs[mv]")
# A kernel of torchvision's non-maximum suppression, which looks at one box after another in a single block.
KEEPS_BOXES = "gather_keep_from_mask"
# An op that only the math backend of scaled_dot_product_attention calls, in names of compiled kernels, too.
SAFE_SOFTMAX = "_safe_softmax"
RNNS = ("aten::_cudnn_rnn", "aten::miopen_rnn")
LAYER_NORM = "aten::native_layer_norm"  # does the same, and the layout of images does not depend on it
HEAVY = ("GEMM", "attention", "convolution", "communication")
SOFTMAX_BACKWARD = "aten::_softmax_backward_data"
MASKS = ("aten::masked_fill", "aten::masked_fill_", "aten::where")
TWO_BYTES = ("bf16", "fp16")
# Indexing with a mask calls this op. It waits for the number of elements that the mask selects.
SELECTS = "aten::nonzero"
# Ops whose result has one element for each distinct value or index. The wait for that size cannot be avoided.
NEED_THE_SIZE = ("aten::unique", "aten::_unique", "aten::_coalesce", "aten::_to_sparse")
OF_UNKNOWN_SIZE = (SELECTS, "aten::masked_select", *NEED_THE_SIZE)


def moving_us(moved: float, peaks: Peaks) -> float:
    """Return the time (µs) in which a good kernel reads and writes this many bytes."""
    return moved / (BANDWIDTH * peaks.gb_s) / 1e3


def as_one_kernel_us(case: Case, us: Sequence[float], blocks: int) -> float:
    """Return the time (µs) of one kernel with the blocks of several, which take these times, and one block on each SM.

    blocks: their number in all kernels together.
    """
    return min(sum(us), max(us) * max(1.0, blocks / case.sms)) if case.sms and blocks else sum(us)


def fuse_pointwise(case: Case) -> Proposal | None:
    if not case.ops_recorded:
        return None  # equal grids alone show twice as many chains as there are
    if case.summary.training.has_sparse_gradients:
        return None  # a recommender with 26 sparse tables took 19.1 ms compiled instead of 18.0
    if case.differentiates_twice or case.summary.debugging.checked_gradients:
        return None
    if has_ffts(case):
        return None  # a Fourier neural operator took 9.4 ms compiled instead of 6.8
    if case.has(SPARSE_PRODUCT.__eq__):
        return None  # a graph network with torch.sparse.mm took 5.4 ms compiled instead of 3.9
    if case.trace.trains and has_rnns(case):
        return None  # a language model with an LSTM took 12.9 ms compiled instead of 10.7
    # The compiled backward makes none of autograd's calls. Neither does a CUDA graph.
    saves_calls = case.trace.trains and not case.summary.launches_graphs and not _has_outputs_of_unknown_size(case)
    if not (saves_calls or case.summary.launches_graphs or case.could_gain(FUSABLE)):
        return None
    of_the_model = _of_the_model(case)
    fusable = [entry for entry in of_the_model if _is_fusable(entry)]
    if saves_calls and _is_mostly_batch_norm(fusable):
        saves_calls = False
        if not case.could_gain(FUSABLE) or has_batch_norms_of_volumes(case):
            return None
    compiled = sum(one.us for _, one, _ in fusable if _is_compiled(one))
    if 2 * compiled > sum(one.us for _, one, _ in fusable):
        return None  # the model is already compiled, and the remaining kernels are outside of it
    eager = {id(work) for work, one, op in fusable if not (_is_compiled(one) or _is_in_compiled_code(case, op))}
    alike = list(_of_equal_size(_runs(case, eager)))
    # Each chain with the time (µs) of the kernel that replaces it.
    chains = [
        (part, _fused_us(part, elements, case.peaks))
        for elements, some in alike
        for part in _parts(some)
        if len(part) > 1
    ]
    if not chains:
        return None
    before = sum(one.us for chain, _ in chains for _, one, _ in chain)
    after = sum(us for _, us in chains)
    # An op that launches a fused kernel does not set memory for it, either.
    memsets = defaultdict(list)
    for work, _, op in case.activities:
        if work.kind == "memset" and op is not None:
            memsets[id(op)].append(work)
    in_typical = [
        ([work for work, _, _ in chain] + [one for op in _ops_of(chain) for one in memsets[id(op)]], us)
        for chain, us in chains
    ]
    if saves_calls:
        graph = _with_compiled_calls(case, of_the_model, eager, in_typical)
        saved_us = case.graph.cpu_us - graph.cpu_us
    else:  # no CPU time is saved: guards, or the calls of compiled batch norms, cost about as much as the removed ops
        times = {}
        for (first, *rest), us in case.groups_in_all_steps(in_typical):
            times |= {first: us, **dict.fromkeys(rest, 0.0)}
        # A graph's launch does not take part in the guards, and takes less time with fewer kernels.
        in_graphs = [one for one, us in times.items() if not us and one.from_graph]
        graph = with_durations(with_smaller_graphs(case.graph, in_graphs) if in_graphs else case.graph, times)
    kernels = sum(len(chain) for chain, _ in chains)
    seen = f"{kernels:,} kernels in {counted(len(chains), 'chain')} take {duration(before)}; "
    seen += f"fused, they take about {duration(after)}"
    if saves_calls and saved_us > before - after:
        seen += f"; compiled code takes {duration(saved_us)} less CPU time"
    how = "torch.compile(model)"
    if includes_the_loss(case):
        how = "torch.compile the model and the loss"
    elif in_loss := _share_in_the_loss(case, chains):
        part = "all" if round(in_loss, 2) == 1 else f"{in_loss:.0%}"
        what = "the loss, too" if compiled else "the model and the loss"
        how = f"torch.compile {what}; {part} of the saved GPU time is in the loss"
    if any(_reductions(some) >= UNROLLED for _, some in alike):
        how += "; compiling so many ops in a row may take minutes"
    regions = [] if compiled or case.calls_inductor else case.step.named(lambda name: name.startswith(REGION))
    regions = [one for one in regions if id(one) not in case.in_flex]
    if regions:
        seen += "; torch.compile has been called, but its region calls no graph that Inductor compiled"
        around_ddp = any(below.name == DDPS_FORWARD for region in regions for below in region.children)
        how = "torch.compile(model), with TORCH_LOGS=graph_breaks"
        if around_ddp:
            how = "DistributedDataParallel(torch.compile(model))"
    return Proposal(graph, seen, how, assumed=True)


def _share_in_the_loss(case: Case, chains: Sequence[tuple[list[Entry], float]]) -> float:
    """Return the share of the chains' saved GPU time that is in the loss; 0 if it is small, or little of the step."""
    loss = {id(one) for part in _of_the_loss(case.trace, case.step) for one in part}
    saved = [(sum(one.us for _, one, _ in chain) - us, chain) for chain, us in chains]
    in_loss = sum(us for us, chain in saved if all(id(work) in loss for work, _, _ in chain))
    share = in_loss / (sum(us for us, _ in saved) or 1)
    return share if share >= MUCH_IN_LOSS and in_loss > WORTH_SHOWING * case.graph.recorded_us else 0.0


def _with_compiled_calls(
    case: Case, of_the_model: Sequence[Entry], eager: Container[int], chains: Sequence[tuple[list[Work], float]]
) -> Graph:
    """Return the graph of a training step whose model is compiled.

    Triton kernels replace each chain and each other kernel that can be fused. Inductor's code calls the model's other
    ops. What the threads do between these calls is gone: modules, views, and autograd's engine. eager: the ids of the
    model's activities that can be fused. chains: those of them that become one kernel, with its time (µs).
    """
    model = [
        (work, op)
        for work, one, op in of_the_model
        if op is not None
        and op.kind == "op"
        and work.launch is not None
        and one.family != "communication"
        and not _is_in_compiled_code(case, op)
    ]
    called = {id(op) for work, op in model if id(work) not in eager and work.kind == "kernel"}
    compiled = {id(op) for work, op in model if id(work) in eager} - called
    kernels = Counter(id(op) for work, op in model if work.kind == "kernel")
    in_chains = {id(one) for chain, _ in chains for one in chain}
    groups = [chain for chain, _ in chains]
    groups += [[work] for work, op in model if id(op) in compiled and id(work) in eager and id(work) not in in_chains]
    launches = defaultdict(float, {work: 0.0 for work, _ in model})  # the CPU time that is added before each of them
    for group in groups:
        if launched := [work for work in group if work.launch is not None]:
            launches[min(launched, key=lambda work: work.launch.start)] += COMPILED_CALL_LAUNCHES
    for work, op in {id(op): (work, op) for work, op in reversed(model)}.values():  # once for each op
        if id(op) in compiled:
            launches[work] += COMPILED_CALL_LAUNCHES * _more_kernels(op, kernels[id(op)])
        else:
            launches[work] += CALLING_LAUNCHES
    of_model = case.in_all_steps({work: count * case.launch_us for work, count in launches.items()})
    of_compiled = case.in_all_steps({work: 0.0 for work, op in model if id(op) in compiled})
    spans, added = [], [(work.launch.track, work.launch.start, us) for work, us in of_model.items()]
    for step in case.steps:
        spans += _between_calls(step, of_model, of_compiled)
        gradients = step.named(ACCUMULATES.__eq__)
        added += [(op.track, op.start, CALLING_LAUNCHES * case.launch_us) for op in gradients]
    graph = fused(case.graph, case.groups_in_all_steps(chains))
    return with_cpu_time(without_cpu_time(graph, spans), added)


def _between_calls(
    step: Step, of_model: Container[Work], of_compiled: Container[Work]
) -> Iterator[tuple[tuple, int, int]]:
    """Yield track, start and end (ns) of what a step's threads do for the model outside the ops that stay.

    What launches nothing for the model for a longer time than a pause of PyTorch's own stays, too. of_model: all
    activities of the model. of_compiled: those whose ops are replaced.
    """
    pause = round(PAUSE_US * 1e3)
    spans, kept = defaultdict(list), defaultdict(list)
    stays = [*waits_of(step), *step.named(lambda name: name.startswith(NOT_OF_THE_MODEL))]
    for work, op in zip(step.work, step.asking, strict=True):
        if work.launch is None:
            continue
        if work in of_model:
            top = work.launch.outermost_call()
            spans[top.track].append((top.start, top.end + pause))
        if work not in of_compiled:
            stays.append(op if op is not None and op.kind == "op" else work.launch)
    for op in stays:
        kept[op.track].append((op.start, op.end))
    for track, some in spans.items():
        joined = [(start, end - pause) for start, end in union(some)]
        yield from ((track, start, end) for start, end in minus(joined, union(kept[track])))


def _is_in_compiled_code(case: Case, op: Op | None) -> bool:
    return case.calls_inductor and op is not None and any(above.name.startswith(INDUCTORS_CALL) for above in op.above())


def _more_kernels(op: Op, kernels: int) -> int:
    """Return how many more kernels a compiled op has. kernels: those that eager's op launches."""
    if NORM_BACKWARD.search(op.name):
        return max(0, NORM_BACKWARD_KERNELS - kernels)
    return max(0, BATCH_NORM_KERNELS - kernels) if BATCH_NORM in op.name else 0


def _has_outputs_of_unknown_size(case: Case) -> bool:
    """Return whether the step has an op whose output's size depends on the data. torch.compile cannot capture it.

    Without a kernel for its types, the product of groups reads the sizes of the groups on the CPU.
    """
    if any(op.kind == "op" for op in case.step.named(lambda name: name.startswith(OF_UNKNOWN_SIZE))):
        return True
    grouped = case.step.named(lambda name: GROUPED_PRODUCTS in name)
    return any(call.kind == "runtime" and is_wait(call) for op in grouped for call in op.walk())


def _is_mostly_batch_norm(fusable: Sequence[Entry]) -> bool:
    us = sum(one.us for _, one, op in fusable if op is not None and BATCH_NORM in op.name)
    return us >= MOSTLY_BATCH_NORM * sum(one.us for _, one, _ in fusable)


def has_batch_norms_of_volumes(case: Case) -> bool:
    """Return whether the typical step normalizes volumes over the batch, for which compiled code may be far slower.

    Instance normalization calls the same ops, and is not meant: a compiled 3-D U-Net with it saved 18%.
    """
    calls = case.step.named(lambda name: name.startswith("aten::") and BATCH_NORM in name)
    of_volumes = (op for op in calls if len(op.inputs.dims_at(0) or ()) == 5 and not in_backward(op))
    return any(all(above.name != "aten::instance_norm" for above in op.above()) for op in of_volumes)


def has_rnns(case: Case) -> bool:
    """Return whether the trace has an RNN of cuDNN or MIOpen. torch.compile leaves nn.LSTM, nn.GRU and nn.RNN eager."""
    return not case.trace.op_names.isdisjoint(RNNS)


def has_ffts(case: Case) -> bool:
    """Return whether the trace has Fourier transforms. torch.compile leaves them and other complex ops eager."""
    return case.has(lambda name: name.startswith(FFTS))


def includes_the_loss(case: Case) -> bool:
    """Return whether changes of the model take in a loss of many ops, because it does not wait."""
    least = MANY_IN_LOSS * len(backward_begins(case.trace, case.step))
    return sum(map(len, _of_the_loss(case.trace, case.step))) > least and not _of_losses_that_wait(case)


def _of_losses_that_wait(case: Case) -> set[int]:
    """Return the ids of what losses launch that wait for the GPU. Compiled code ends where it waits."""
    found = _of_the_loss(case.trace, case.step)
    waits = [op.start for op in waits_of(case.step)] if found else []
    waiting = (part for part in found if any(part[0].launch.start < wait < part[-1].launch.start for wait in waits))
    return {id(one) for part in waiting for one in part}


@kept_by_step
def _of_the_loss(trace: Trace, step: Step) -> list[list[Work]]:
    """Return what a step launches between two heavy activities if a backward pass begins between the two."""
    begins = backward_begins(trace, step)
    launched = sorted([one for one in step.work if one.launch is not None], key=lambda one: one.launch.start)
    starts = [one.launch.start for one in launched]
    heavy = [start for start, one in zip(starts, launched, strict=True) if says(one).family in HEAVY]
    found: list[list[Work]] = []
    for place in {bisect.bisect_left(heavy, begin.start) for begin in begins}:
        if 0 < place < len(heavy):
            first, last = heavy[place - 1 : place + 1]
            part = launched[bisect.bisect_right(starts, first) : bisect.bisect_left(starts, last)]
            found += [part] if part else []
    return found


def _is_compiled(one: GpuWork) -> bool:
    return one.maker.startswith("Inductor")


def _accumulating(case: Case) -> set[int]:
    """Return the ids of the activities that add gradients to existing ones."""
    calls = (below for op in case.step.named(ACCUMULATES.__eq__) for below in op.walk())
    return {id(work) for call in calls for work in call.work}


def _of_a_wrapper(op: Op | None) -> bool:
    """Return whether DDP or FSDP asks for this op. torch.compile of the model does not compile it."""
    return op is not None and any(above.name.startswith(WRAPPERS) for above in op.above())


def _ops_of(chain: Sequence[Entry]) -> list[Op]:
    return list({id(op): op for _, _, op in chain if op is not None}.values())


def _of_the_model(case: Case) -> list[Entry]:
    """Return the activities that the model itself launches, without copies to and from the GPU.

    An uncompiled flex_attention is left out: see compile_flex. So is a loss that waits.
    """
    not_the_models = case.launched_in(OPTIMIZERS) | _accumulating(case) | outside_model(case.trace, case.step)
    not_the_models |= _of_losses_that_wait(case)
    wrapped = case.has(lambda name: name.startswith(WRAPPERS))
    return [
        (work, one, op)
        for work, one, op in case.activities
        if id(work) not in not_the_models
        and "HtoD" not in one.name
        and "DtoH" not in one.name
        and not (op is not None and op.name.startswith(FOREACH))
        and _flex_call(case, work) is None
        and not (wrapped and _of_a_wrapper(op))
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
    runs: list[list[Entry]] = []
    open_runs: dict[tuple, list] = {}
    for entry in case.activities:
        work = entry[0]
        if work.kind == "memset":
            continue
        if id(work) not in fusable:
            open_runs.pop(work.track, None)
            continue
        run = open_runs.get(work.track)
        if run is None:
            run = open_runs[work.track] = []
            runs.append(run)
        run.append(entry)
    return runs


def _of_equal_size(runs: Iterable[list[Entry]]) -> Iterator[tuple[object, list[Entry]]]:
    """Yield the kernels of each run that work on equally many elements, with that number."""
    for run in runs:
        alike = defaultdict(list)
        for entry in run if len(run) > 1 else ():
            alike[_elements(entry)].append(entry)
        yield from alike.items()


def _parts(chain: Sequence[Entry]) -> list[list[Entry]]:
    """Return the parts of a chain that become one kernel each.

    Of many reductions, as an unrolled loop has them, each is in a kernel of its own.
    """
    alone = _reductions(chain) > MANY_REDUCTIONS
    parts: list[list[Entry]] = [[]]
    for entry in chain:
        if len(parts[-1]) == LONGEST_CHAIN or (alone and _reductions([entry]) and _reductions(parts[-1])):
            parts.append([])
        parts[-1].append(entry)
    return parts


def _reductions(chain: Iterable[Entry]) -> int:
    return sum(one.family == "reduction" for _, one, _ in chain)


def type_of(op: Op) -> str:
    """Return the element type of an op's first tensor; "" if it was not recorded."""
    return _type_in(op.inputs)


@lru_cache(4096)  # ops with equal inputs share one
def _type_in(inputs: Inputs) -> str:
    return next((dtype.name for tensor in inputs.tensors if (dtype := dtype_of(tensor.type))), "")


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
    reduces = any(one.family in ("reduction", "normalization") and "splitK" not in one.name for _, one, _ in chain)
    if not reduces:
        memory = max([_well_moved_us(one, op, peaks) for _, one, op in chain])
    if not isinstance(elements, int) or peaks is None:
        return memory
    flops = sum([_flops_of_one(op.name) for _, _, op in chain if op is not None])
    return min(sum(times), max(memory, flops * elements / peaks.fp32 / 1e6))


def _well_moved_us(one: GpuWork, op: Op | None, peaks: Peaks | None) -> float:
    """Return a kernel's time (µs); of a pointwise one and of a cast at most the time of a good kernel for its bytes."""
    if not one.bytes_moved or peaks is None or not (one.family == "pointwise" or (op is not None and _is_cast(op))):
        return one.us
    return min(one.us, max(LEAST_KERNEL_US, moving_us(one.bytes_moved, peaks)))


def _is_cast(op: Op) -> bool:
    types = op.inputs.types if op.name == "aten::copy_" else []
    return len(types) > 1 and types[0] != types[1]


@cache
def _flops_of_one(name: str) -> int:
    """Return the fp32 FLOPs that an op of this name costs for each element."""
    return TRANSCENDENTAL if any(word in name for word in COSTLY) else OTHER


def _is_of_the_layer(op: Op) -> bool:
    """Return whether this product may be nn.MultiheadAttention's, which calls torch.bmm or torch.baddbmm itself."""
    calls = op.name in ("aten::bmm", "aten::baddbmm") and not in_backward(op)
    return calls and all(above.name not in ("aten::matmul", "aten::einsum", SDPA_MATH) for above in op.above())


def fused_attention(case: Case) -> Proposal | None:
    """Return a proposal to replace the scores' products and softmax by one kernel, and their backward by another."""
    if not case.summary.attention.unfused:
        return None
    found = [one.scores for one in case.summary.attention.unfused if one.scores]
    scores = {one.batch * one.queries * one.keys: one for one in found}
    runs = _runs_on_scores(case, scores) if scores else _runs_between_products(case)
    groups, before, forward, backward, math_calls = [], 0.0, 0, 0, []
    by_layer, falls_back = False, False
    for run in ([entry for entry in some if _flex_call(case, entry[0]) is None] for some in runs):
        softmaxes = len({id(op) for _, one, op in run if _is_softmax(one, op, backward=False)})
        gradients = len({id(op) for _, one, op in run if _is_softmax(one, op, backward=True)})
        if not (softmaxes or gradients) or not _products(run):
            continue
        us = max(_fused_attention_us(case, run, softmaxes, gradients), SMALL_PRODUCT_US * (softmaxes + gradients))
        spent = sum(one.us for _, one, _ in run)
        if us < spent:
            groups.append(([work for work, _, _ in run], us))
            before, forward, backward = before + spent, forward + softmaxes, backward + gradients
            around = (above for _, _, op in run if op is not None for above in op.above())
            math_calls += [above for above in around if above.name == SDPA_MATH]
            by_layer |= any(_is_of_the_layer(op) for _, _, op in run if op is not None)
            falls_back |= any(SAFE_SOFTMAX in one.name for _, one, _ in run)
    if not groups:
        return None
    backwards = " and their backward" if backward else ""
    return Proposal(
        case.condensed(groups, TRAINED_ATTENTION_CALL_US if case.trace.trains else ATTENTION_CALL_US),
        f"{counted(forward, 'softmax', 'softmaxes')} between batched products{backwards}: {duration(before)}; "
        f"the scores{_sizes_of_scores(case)} are written to memory and read again"
        + ("; scaled_dot_product_attention falls back to them" if math_calls or falls_back else ""),
        how_to_fuse(math_calls, falls_back)
        + ", or nn.MultiheadAttention with need_weights=False" * (by_layer and not falls_back),
        assumed=True,
    )


def _sizes_of_scores(case: Case) -> str:
    """Return the queries and keys of the scores that take most time; "" without shapes."""
    us = Counter()
    for one in case.summary.attention.unfused:
        if one.scores:
            us[one.scores.queries, one.scores.keys] += one.us + one.products_us
    if not us:
        return ""
    (queries, keys), most = us.most_common(1)[0]
    share = f" ({most / us.total():.0%} of this time)" if len(us) > 1 and us.total() else ""
    return f"{', mostly' * bool(share)} of {queries:,} x {keys:,}{share}{',' * bool(share)}"


def how_to_fuse(math_calls: Sequence[Op], falls_back: bool = False) -> str:
    """Return how to get fused attention.

    math_calls: those of scaled_dot_product_attention that use its math backend. falls_back: compiled code does so, too.
    """
    # torch/nn/attention and sdp_utils.cpp: the fused backends take (batch, heads, length, head size) only.
    if math_calls and all(op.inputs.dims and len(op.inputs.dims[0]) == 3 for op in math_calls):
        return "give it four dimensions (batch, heads, length, head size); its fused backends do not take three"
    if math_calls and all(map(_is_strided, math_calls)):
        return "call .contiguous() on q, k and v: its fused backends need a stride of 1 in the last dimension"
    if math_calls or falls_back:
        return "name a backend with torch.nn.attention.sdpa_kernel(…), which then says which input it does not take"
    return "torch.nn.functional.scaled_dot_product_attention(q, k, v, …)"


def _is_strided(attention: Op) -> bool:
    """Return whether neighbors along the last dimension of q, k or v are not neighbors in memory, as in transposes."""
    return any(attention.inputs.last_stride_at(place) not in (None, 1) for place in range(3))


def compile_flex(case: Case) -> Proposal | None:
    """Return a proposal to compile flex_attention. Compiled, each of its calls is one call and one kernel.

    Else it computes all scores, also the masked ones. How many are masked is not recorded, so none are assumed to be.
    """
    runs = defaultdict(list)
    for entry in case.activities:
        if (call := _flex_call(case, entry[0])) is not None:
            runs[call].append(entry)
    groups, before, backward = [], 0.0, 0
    for call, run in runs.items():
        two_bytes = _type_of_flex(call) in TWO_BYTES
        us = sum(_fused_product_us(one, two_bytes, case.peaks) for one, _ in _products(run))
        spent = sum(one.us for _, one, _ in run)
        if 0 < us < spent:
            groups.append(([work for work, _, _ in run], us))
            before, backward = before + spent, backward + _is_flex_backward(call)
    if not groups:
        return None
    groups_in_all_steps = case.groups_in_all_steps(groups)
    calls = {id(call): call for work, _ in groups_in_all_steps if (call := _flex_call(case, work[0])) is not None}
    # A forward runs parts of autograd's engine to find its backward. Without that, the engine's thread waits in it.
    engines = {op.track for op in backward_nodes(case.step)}
    spans = [
        (track, call.start, call.end)
        for call in calls.values()
        for track in ({call.track} if _is_flex_backward(call) else {call.track, *engines})
    ]
    added = [(call.track, call.start, COMPILED_FLEX_CALL_US) for call in calls.values()]
    forward = len(groups) - backward
    backwards = f" and {'its' if forward == 1 else 'their'} backward" if backward else ""
    return Proposal(
        with_cpu_time(without_cpu_time(fused(case.graph, groups_in_all_steps), spans), added),
        f"uncompiled flex_attention: {counted(forward, 'call')}{backwards}, {duration(before)}; the "
        "scores are written to memory and read again",
        "torch.compile(flex_attention)",
        assumed=True,
    )


def _flex_call(case: Case, work: Work) -> Op | None:
    """Return the uncompiled flex_attention that launches this work."""
    return case.in_flex.get(id(work.launch))


def _is_flex_backward(call: Op) -> bool:
    return call.name != FLEX_ATTENTION and call.name.startswith(FLEX_ATTENTION)


def _type_of_flex(call: Op) -> str:
    """Return the type of queries, keys and values. The products are in fp32 if it is shorter."""
    of_op = [type_of(op) for op in call.walk() if op.name.startswith(FLEX_ATTENTION)]
    return next(filter(None, of_op or map(type_of, call.walk())), "")


def _fused_product_us(one: GpuWork, two_bytes: bool, peaks: Peaks | None) -> float:
    if one.product is None or peaks is None:
        return one.us
    return one.product.flops / (ATTENTION * (peaks.bf16 if two_bytes else peaks.fp32)) / 1e6


def _products(run: Sequence[Entry]) -> list[tuple[GpuWork, Op]]:
    return [(one, op) for _, one, op in run if one.family == "GEMM" and op is not None]


def _is_softmax(one: GpuWork, op: Op | None, backward: bool) -> bool:
    if op is not None and op.name in (SOFTMAX, SOFTMAX_BACKWARD):
        return (op.name == SOFTMAX_BACKWARD) == backward
    fuses = one.name_says.get("fuses", "")
    return "softmax" in fuses and "log_softmax" not in fuses and ("backward" in fuses) == backward


def _runs_on_scores(case: Case, scores: Container[int]) -> list[list[Entry]]:
    """Return runs of activities that read or write a whole matrix of scores, split at other heavy kernels.

    scores: the numbers of elements of such matrices.
    """
    runs: list[list[Entry]] = [[]]
    for entry in case.activities:
        _, one, op = entry
        if _touched(one, op, scores):
            runs[-1].append(entry)
        elif one.family in HEAVY and runs[-1]:
            runs.append([])
    return runs


def _runs_between_products(case: Case) -> list[list[Entry]]:
    """Return runs from the first to the last batched product with no other heavy kernel between. It needs no shapes."""
    runs: list[list[Entry]] = [[]]
    for entry in case.activities:
        work, one, op = entry
        if one.family in HEAVY and (op is None or op.name not in BATCHED):
            runs.append([])
        elif work.kind != "memset" and (runs[-1] or one.family == "GEMM"):
            runs[-1].append(entry)
    for run in runs:
        while run and run[-1][1].family != "GEMM":
            run.pop()
    return runs


def _fused_attention_us(case: Case, run: Sequence[Entry], forward: int, backward: int) -> float:
    """Return the time (µs) of these forward and backward passes with one fused kernel each."""
    peaks, products = case.peaks, _products(run)
    one, op = products[0]
    # A mask of queries x keys is usually causal, and a fused kernel skips the hidden part.
    masked = any(op is not None and op.name in MASKS for _, _, op in run)
    passes = (forward + BACKWARD_FLOPS * backward) / (1 + masked)
    # SDPA's math backend multiplies bf16 in fp32, and backward does not name the call that it belongs to.
    calls = case.step.named(SDPA.__eq__) if in_backward(op) else [one for one in op.above() if one.name == SDPA]
    asked = calls[0] if calls else op
    in_two_bytes = (type_of(asked) or one.name_says.get("types")) in TWO_BYTES or any(
        op is not None and op.name == "aten::copy_" for _, _, op in run
    )
    if one.product is not None and peaks is not None:
        us = 2 * min(item.product.flops for item, _ in products if item.product) / 1e6
        return us / (ATTENTION * (peaks.bf16 if in_two_bytes else peaks.fp32)) * passes
    # Without shapes or peaks: the fused kernel takes as long as the products, at the rate of its own type.
    us = sum(item.us for item, _ in products) / (forward + 2 * backward) * passes
    types = (one.name_says.get("types") or "").lower()
    if peaks is not None and types in ("tf32", "fp32"):
        reached = TF32_PRODUCT * peaks.tf32 if types == "tf32" else FP32_PRODUCT * peaks.fp32
        us *= reached / (ATTENTION * (peaks.bf16 if in_two_bytes else peaks.fp32))
    return us


def _touched(one: GpuWork, op: Op | None, scores: Container[int]) -> bool:
    """Return whether an activity reads or writes a whole matrix of scores."""
    if op is None:
        return False
    if one.product is not None:
        product = one.product
        sides = (product.m * product.n, product.m * product.k, product.k * product.n)
        return any(product.batch * side in scores for side in sides)
    return one.family in FUSABLE and any(math.prod(shape) in scores for shape in op.inputs.dims)


def align_shapes(case: Case) -> Proposal | None:
    return (_by_shapes(case) or _by_kernels_names(case)) if case.could_gain(("GEMM",)) else None


def _by_kernels_names(case: Case) -> Proposal | None:
    """Return a proposal by the alignment in kernels' names, for products whose shapes were not recorded."""
    found = [
        (work, one)
        for work, one, _ in case.named(UNALIGNED.search)
        if one.family == "GEMM" and one.product is None and one.name_says.get("types") in TWO_BYTES
    ]
    times = {work: max(one.us / UNALIGNED_TIMES, SMALL_PRODUCT_US) for work, one in found}
    times = {work: us for work, us in times.items() if us < work.us}
    if not times:
        return None
    return Proposal(
        with_durations(case.graph, case.in_all_steps(times)),
        f"{counted(len(times), 'product')} by kernels for rows that are not aligned to 16 bytes: "
        f"{duration(sum(one.us for work, one in found if work in times))}",
        "pad the dimensions of these products to a multiple of 8; record_shapes=True names the dimensions",
        assumed=True,
    )


def _by_shapes(case: Case) -> Proposal | None:
    """Return a proposal by recorded shapes. The number of rows of an activation needs no alignment."""
    if case.peaks is None:
        return None
    products = [
        (work, one, op)
        for work, one, op in case.activities
        if one.family == "GEMM" and one.product and one.flops and op is not None
    ]
    rows = {one.product.m for _, one, op in products if one.product.batch == 1 and not in_backward(op)}
    aligned = {name for name in {one.name for _, one, _ in products} if ALIGNED.search(name)}
    times, spent, odd = {}, 0.0, {}
    for work, one, op in products:
        shape = one.product
        if one.name in aligned or type_of(op) not in TWO_BYTES:
            continue
        kept = rows if shape.batch == 1 else ()
        bad = [size for size in (shape.m, shape.k, shape.n) if size % 8 and size > 64 and size not in kept]
        if not bad:
            continue
        us = max(one.flops / (PRODUCT * case.peaks.bf16) / 1e6, SMALL_PRODUCT_US)
        if one.bytes_moved:
            us = max(us, moving_us(one.bytes_moved, case.peaks))
        if us < SLOW / PRODUCT * one.us:
            times[work], spent = us, spent + one.us
            for dimension in bad:
                odd[dimension] = -(-dimension // 8) * 8
    if not times:
        return None
    padded = listed(f"{dimension:,} to {better:,}" for dimension, better in odd.items())
    slowest = max((one for work, one, _ in case.activities if work in times), key=lambda one: one.us)
    return Proposal(
        with_durations(case.graph, case.in_all_steps(times)),
        f"{counted(len(times), 'product')} with a dimension of {listed(f'{one:,}' for one in odd)} "
        f"take {duration(spent)}, at {slowest.tflops or 0:,.0f} TFLOP/s at worst",
        f"pad {padded} (a multiple of 8)",
        assumed=True,
        title=f"pad {padded}",
    )


def channels_last(case: Case) -> Proposal | None:
    conversions = [
        (work, one) for work, one, _ in case.named(lambda name: "nchwToNhwc" in name or "nhwcToNchw" in name)
    ]
    convolutions = case.step.named(lambda name: name.startswith("aten::convolution")) if conversions else ()
    if not conversions or (found := _channels_last_layout(case, convolutions)) is None:
        return None
    layout, what = found
    gone = case.in_all_steps(dict.fromkeys((work for work, _ in conversions), 0.0))
    us = sum(one.us for _, one in conversions)
    return Proposal(
        without_work(case.graph, gone),
        f"{counted(len(conversions), 'layout conversion')} around convolutions: {duration(us)}",
        f"model.to(memory_format=torch.{layout}), and the same for the {what}",
        title=f"keep {what} in the {layout} layout",
    )


def _channels_last_layout(case: Case, ops: Iterable[Op]) -> tuple[str, str] | None:
    """Return the layout with the channels last that these ops' first inputs can have, and what these inputs are.

    Without recorded shapes they are taken for images. The result is None for other inputs, and if the step has ops that
    need the contiguous layout. With channels_last, a U-Net's blocks with group normalization took 7.9 ms instead of 5.8
    on an H200, and with channels_last_3d, the training of one with instance normalization took 50.6 ms instead of 42.3.
    """
    if case.step.named(NEED_CONTIGUOUS.__contains__):
        return None
    ranks = {len(dims) for op in ops for dims in op.inputs.dims[:1]}
    if 5 in ranks:
        return "channels_last_3d", "volumes"
    return ("channels_last", "images") if 4 in ranks or not ranks else None


def layout_copies(case: Case) -> Proposal | None:
    found = [
        (work, one, name)
        for work, one, op in case.activities
        if op is not None and op.name == "aten::copy_" and (name := _changes_layout(op))
    ]
    shared = {id(work) for _, some in expanded(case.step) for work in some} if found else ()
    found = [entry for entry in found if id(entry[0]) not in shared]
    copies = [(work, one) for work, one, _ in found]
    if not copies:
        return None
    names = sorted({name for *_, name in found})
    mine = {id(work) for work, _ in copies}
    above = [one.name for work, _, op in case.activities if op and id(work) in mine for one in op.above()]
    need = sorted(set(above) & {*NEED_CONTIGUOUS, LAYER_NORM})
    how = "keep tensors in the layout that the next kernel reads: drop .contiguous(), reshape only contiguous tensors"
    if need:
        how = f"keep tensors contiguous where {listed(need)} reads them, which copies its input otherwise"
    return Proposal(
        without_work(case.graph, case.in_all_steps(dict.fromkeys((work for work, _ in copies), 0.0))),
        f"{counted(len(copies), 'copy', 'copies')} made by {listed(names)}: "
        f"{duration(sum(one.us for _, one in copies))}",
        how,
    )


def _changes_layout(op: Op) -> str:
    """Return the op above this aten::copy_ that copies a tensor to another layout; "" if there is none.

    Copies that autograd makes in backward are left out. No call of the program makes them.
    """
    if in_backward(op):
        return ""
    above = [one.name for one in op.above() if one.kind == "op"]
    if len(set(tensor.type for tensor in op.inputs.tensors)) > 1 or "aten::clone" not in above:
        return ""
    return next((name for name in above if name in LAYOUT_OPS), "")


def no_recompute(case: Case) -> Proposal | None:
    recomputed = case.summary.training.recomputed
    if recomputed is None:
        return None
    ops = [op for step in case.steps for op in recomputed_ops(step)]
    return Proposal(
        without_cpu_time(without_ops(case.graph, ops), _stretches(ops)),
        f"{counted(recomputed.calls, 'forward op')} run again in backward: "
        f"{duration(recomputed.gpu_us or 0.0)} of GPU time",
        "checkpoint fewer blocks, as far as memory allows",
    )


def _stretches(ops: Sequence[Op]) -> list[tuple[tuple, int, int]]:
    """Return the spans from the first to the last of these ops within each parent op of the backward."""
    by_parent = defaultdict(list)
    for op in ops:
        by_parent[id(op.parent)].append(op)
    return [(some[0].track, min(op.start for op in some), max(op.end for op in some)) for some in by_parent.values()]


def small_grids(case: Case) -> Proposal | None:
    sms = case.sms
    if not sms or not case.could_gain(case.us_by_family):
        return None
    times, spent, compiled, of_batch_norm, by_grid, batch_norms = {}, 0.0, 0.0, 0.0, {}, []
    for work, one, op in case.activities:
        # A kernel of a few µs ends before more blocks would help.
        if one.us < 10 or work.kind != "kernel" or one.family == "communication":
            continue
        if one.maker == "cuSOLVER" or SOLVES.search(one.name) or KEEPS_BOXES in one.name:
            continue
        blocks = math.prod(one.grid) if one.grid else 0
        if not 0 < blocks < sms / 2:
            continue
        least = moving_us(one.bytes_moved or 0, case.peaks) if case.peaks else 0.0
        times[work] = min(one.us, max(one.us * blocks / sms, least, LEAST_KERNEL_US))
        spent += one.us
        if _is_compiled(one) and BATCH_NORM in one.name:
            compiled += one.us
        elif op is not None and BATCH_NORM in op.name:
            of_batch_norm += one.us
            batch_norms.append(op)
        by_grid.setdefault((one.name, blocks), []).append(one.us)
    if not times:
        return None
    (name, blocks), _ = max(by_grid.items(), key=lambda entry: sum(entry[1]))
    how = "more rows, a larger batch, or another algorithm (split K, a split reduction)"
    if 2 * compiled > spent:
        how = "another layout, or this op outside of torch.compile (torch.compiler.disable)"
    elif 2 * of_batch_norm > spent:
        layout = _channels_last_layout(case, batch_norms)
        ways = [layout[0]] if layout else []
        ways += [] if has_batch_norms_of_volumes(case) else ["torch.compile"]
        how = f"{' or '.join(ways) or 'another layout'}, because these kernels of batch normalization have a block for "
        how += "each channel"
    return Proposal(
        with_durations(case.graph, case.in_all_steps(times)),
        f"{counted(len(times), 'kernel')} with fewer blocks than half of the {sms} SMs: {duration(spent)} "
        f"(the costliest is {short(name, 40)}, with {counted(blocks, 'block')})",
        how,
        assumed=True,
    )


GPU_CHANGES = (
    Change("fuse_pointwise", "fuse pointwise kernels with torch.compile", fuse_pointwise),
    Change("fused_attention", "use a fused attention kernel", fused_attention),
    Change("compile_flex", "compile flex_attention", compile_flex),
    Change("align_shapes", "pad dimensions to a multiple of 8", align_shapes),
    Change("channels_last", "keep images in the channels_last layout", channels_last),
    Change("layout_copies", "drop copies that only change a tensor's layout", layout_copies),
    Change("no_recompute", "keep activations instead of recomputing them", no_recompute),
    Change("small_grids", "give small kernels more blocks", small_grids),
)
