"""Changes that remove work: memory allocation, copies, casts, masks, guards and recompilation in the steps."""

import math
from collections import Counter
from itertools import chain
from statistics import median

from tracereader.figures.autograd import added_gradients
from tracereader.figures.avoidable import CUDNN_ATTENTION, cloned_inputs, planning, triangles
from tracereader.figures.decoding import CASTS, expanded, expanded_by_inductor, weight_casts
from tracereader.figures.gpu_work import GpuWork
from tracereader.figures.pace import with_a_middle
from tracereader.figures.steps import compilations, labels
from tracereader.figures.training import unused_nodes
from tracereader.findings.decoding import filled_part, head_of_all
from tracereader.findings.device_words import CUDA, CUDA_OR_HIP
from tracereader.findings.finding import counted, duration, how_often, listed
from tracereader.findings.gpu_changes import moving_us
from tracereader.findings.opportunity import Case, Change, Proposal
from tracereader.findings.training import MANY_NODES
from tracereader.replay import spans_of, with_durations, without_cpu_time, without_ops, without_work
from tracereader.trace import Op, Step
from tracereader.trace.labels import COMPILING, LOOKUP, ZEROES

# The allocating calls of CUDA and HIP. Calls that end in Async allocate from a pool and are left out.
ALLOCATES = {
    runtime + what
    for runtime in ("cuda", "hip")
    for what in ("Malloc", "Free", "HostAlloc", "MallocHost", "FreeHost", "HostFree", "HostMalloc", "HostRegister")
}
GPU_ALLOCATES, GPU_FREES = {"cudaMalloc", "hipMalloc"}, {"cudaFree", "hipFree"}
COPIES_INPUTS = "aten::_foreach_copy_"
# The share of a cache lookup that remains with skip_guard_eval_unsafe: 10 to 14 µs instead of 59 to 79 for 40
# layers (PyTorch 2.15, on a CPU).
GUARDS_LEFT = 0.2
# From so many gradients on, setting each to zero is worth a look.
MANY_ZEROED = 8
# The CPU time that autograd takes for each op that it records, in launches: 0.75 to 1.45 in four models, recorded twice
# with and without it on an H100's machine.
NODE_LAUNCHES = 0.75
# CPU time of a call of cuDNN's attention that has its plan, while the profiler records, beside an H200.
PLANNED_CALL_US = 60


def allocator(case: Case) -> Proposal | None:
    if not case.has(ALLOCATES.__contains__):
        return None
    calls, typical = case.in_each_step(
        lambda step: [op for op in step.named(ALLOCATES.__contains__) if op.kind == "runtime"]
    )
    if not typical:
        return None
    names = Counter(op.name for op in typical)
    each = listed(f"{name} {how_often(count)}" for name, count in names.most_common(3))
    seen = f"a step calls {each}, which takes {duration(sum(op.us for op in typical))}"
    how = (
        "keep shapes equal from step to step, do not call empty_cache(), pin buffers once; "
        "or PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
    )
    allocating = sum(any(op.name in GPU_ALLOCATES for op in some) for some in calls)
    if allocating > 1 and GPU_ALLOCATES.issuperset(names) and not case.has(GPU_FREES.__contains__):
        seen += f"; {allocating} of {len(calls)} steps allocate GPU memory, and none frees any"
        how = (
            "keep shapes equal from step to step, and no tensors of earlier steps "
            "(torch.cuda.memory._record_memory_history() lists them); if memory stops growing later, record later steps"
        )
    return Proposal(without_cpu_time(case.graph, spans_of(op for some in calls for op in some)), seen, how)


def recompile(case: Case) -> Proposal | None:
    if not case.has(lambda name: name.endswith(COMPILING)):
        return None
    compiling, typical = case.in_each_step(compilations)
    if not typical:
        return None
    return Proposal(
        without_cpu_time(case.graph, spans_of(op for some in compiling for op in some)),
        f"the step compiles with torch.compile: {duration(sum(op.us for op in typical))}",
        "warm up with every shape, mark changing dimensions (torch._dynamo.mark_dynamic), or pad inputs; "
        "TORCH_LOGS=recompiles names the guard",
    )


def in_place(case: Case) -> Proposal | None:
    """Return a proposal to work in place, except in training, where a gradient may need the input."""
    if case.trace.trains:
        return None
    if not case.has("aten::clone".__eq__):
        return None
    clones, typical = case.in_each_step(cloned_inputs)
    if not typical:
        return None
    count = sum(map(len, typical.values()))
    us = sum(work.us for some in typical.values() for op in some for work in op.work_below())
    return Proposal(
        without_ops(case.graph, [op for found in clones for some in found.values() for op in some]),
        f"the step clones the input of {listed(typical)} first: "
        f"{counted(count, 'copy', 'copies')}, {duration(us)} of GPU time",
        f"{listed(name.removeprefix('aten::') + '_' for name in typical)}, if nothing else reads the input",
    )


def mask_once(case: Case) -> Proposal | None:
    if not case.has(("aten::tril", "aten::triu").__contains__):
        return None
    made, typical = case.in_each_step(lambda step: [op for group in triangles(step, in_sdpa=False) for op in group])
    if len(case.trace.steps) < 2 or not all(triangles(step, in_sdpa=False) for step in case.trace.steps):
        return None
    return Proposal(
        without_ops(case.graph, [op for some in made for op in some]),
        f"every step makes a triangular mask with {listed(dict.fromkeys(op.name for op in typical))}: "
        f"{duration(sum(op.us for op in typical))} of CPU time",
        "make the mask once (register_buffer), or pass is_causal=True",
    )


def shared_keys(case: Case) -> Proposal | None:
    if case.summary.llm.unneeded.expanded is None:
        return None
    found, typical = case.in_each_step(expanded)
    copies = [work for _, some in typical for work in some]
    if typical:
        graph = without_ops(case.graph, [op for some in found for op, _ in some])
    elif places := expanded_by_inductor(case.summary.gpu_work):
        copies = [case.step.work[place] for place in places]
        graph = without_work(case.graph, case.in_all_steps(dict.fromkeys(copies, 0.0)))
    else:
        return None
    us = sum(work.us for work in copies)
    return Proposal(
        graph,
        f"{counted(len(copies), 'copy', 'copies')} expand keys and values to all query heads before attention: "
        f"{duration(us)} of GPU time",
        "scaled_dot_product_attention(…, enable_gqa=True)",
    )


def cast_weights(case: Case) -> Proposal | None:
    """Return a proposal to cast the weights once, in inference only, because training changes them in every step."""
    if case.trace.trains or case.summary.llm.unneeded.weight_casts is None:
        return None
    casts, typical = case.in_each_step(weight_casts)
    if not typical:
        return None
    gpu_us = sum(work.us for _, some in typical for work in some)
    return Proposal(
        without_ops(case.graph, [op for some in casts for op, _ in some]),
        f"{counted(len(typical), 'cast')} of weights and biases: {duration(gpu_us)} of GPU time, "
        f"{duration(sum(op.us for op, _ in typical))} of CPU time",
        "convert the model once before the steps, model.to(torch.bfloat16), instead of torch.autocast",
    )


def last_logits(case: Case) -> Proposal | None:
    head, needed = head_of_all(case.summary)
    if head is None:
        return None
    shape, times = head.product, {}
    for work, one, op in case.activities:
        # The casts of the logits become shorter, too.
        of_logits = one is head or (
            op is not None
            and op.name in CASTS
            and (dims := op.inputs.dims_at(0))
            and math.prod(dims) == shape.m * shape.n
        )
        if of_logits:
            times[work] = one.us * needed / shape.m
        if one is head and one.bytes_moved and case.peaks:
            weight = one.bytes_moved * shape.k * shape.n / shape.elements
            times[work] = min(one.us, max(times[work], moving_us(weight, case.peaks)))
    return Proposal(
        with_durations(case.graph, case.in_all_steps(times)),
        f"the last product makes {shape.m:,} rows of {shape.n:,} logits in {duration(head.us)}; "
        f"{counted(needed, 'row is', 'rows are')} needed",
        "logits_to_keep=1 in transformers, or hidden[:, -1:] before the last layer",
        assumed=True,
    )


def shorter_cache(case: Case) -> Proposal | None:
    filled, attending = filled_part(case.summary)
    if filled is None:
        return None
    mine = {id(one) for one in attending}
    copies = {id(work) for _, some in expanded(case.step) for work in some}
    times = {
        work: one.us - (1 - filled) * _reads_us(one, case)
        for work, one, _ in case.activities
        if id(one) in mine or id(work) in copies
    }
    keys = attending[0].attention.keys
    return Proposal(
        with_durations(case.graph, case.in_all_steps(times)),
        f"{counted(len(times), 'kernel')} of attention over {keys:,} keys, of which {keys * filled:,.0f} are filled: "
        f"{duration(sum(work.us for work in times))}",
        "pass attention only the filled part of the cache, allocate a shorter one, or use flex_attention with a block "
        "mask",
        assumed=True,
    )


def _reads_us(one: GpuWork, case: Case) -> float:
    """Return the part of a kernel's time (µs) that the number of keys decides: the time of its bytes, if known.

    A short kernel does not become shorter with its keys. On an H200, attention of one query in 16 heads takes 5.9 µs
    with 1,024 keys and 6.3 µs with 524 (rung 5 and the committed generation with a static cache).
    """
    if not one.bytes_moved or case.peaks is None:
        return one.us
    return min(one.us, moving_us(one.bytes_moved, case.peaks))


def static_inputs(case: Case) -> Proposal | None:
    """Return a proposal to avoid the copies of inputs to the addresses that a CUDA graph reads."""
    if not case.summary.launches_graphs:
        return None
    copies, typical = case.in_each_step(lambda step: step.named(COPIES_INPUTS.__eq__))
    if not typical:
        return None
    us = sum(work.us for op in typical for work in op.work_below())
    return Proposal(
        without_ops(case.graph, [op for some in copies for op in some]),
        f"copies to the addresses that the CUDA graph reads take {duration(us)} per step",
        "capture with torch.cuda.graph and write inputs into the tensors that it reads",
    )


def attention_plans(case: Case) -> Proposal | None:
    """Return a proposal to build no plans in the steps. One plan for each op may be the cost of a first call."""
    if not case.has(lambda name: CUDNN_ATTENTION in name):
        return None
    step = case.replayed
    recurring = {name: calls for name, calls in planning(case.compared).items() if len(calls[0]) > 1}
    spans, each = [], []
    for name, (plans, others) in recurring.items():
        usual_us = median(op.us for op in others) if others else PLANNED_CALL_US
        spans += [(op.track, op.start + round(usual_us * 1e3), op.end) for op in plans]
        here, usual = ([op for op in some if step.start <= op.start < step.end] for some in (plans, others))
        if here:
            each.append(
                f"{len(here)} of {counted(len(here) + len(usual), 'call')} of {name} take "
                f"{duration(sum(op.us for op in here) / len(here))} of CPU time each"
                + (f", and the others {duration(usual_us)}" if usual else "")
            )
    if not each:
        return None
    return Proposal(
        without_cpu_time(case.graph, spans),
        f"{listed(each)}: cuDNN builds a plan for each shape that is new to the process",
        "torch.backends.cuda.enable_cudnn_sdp(False), so that another backend computes attention; or pad to a few "
        "lengths",
        unrecorded=True,
    )


def skip_guards(case: Case) -> Proposal | None:
    if not case.has(lambda name: name.startswith(LOOKUP)):
        return None
    lookups, typical = case.in_each_step(lambda step: step.named(lambda name: name.startswith(LOOKUP)))
    compiles = case.has(lambda name: name.endswith(COMPILING))
    if not all(lookups) or (compiles and any(compilations(step) for step in case.trace.steps)):
        return None
    each = [sum(op.us for op in some) for some in lookups]
    # Every step is spared the same time. The saving then agrees with the evidence, whichever steps the replay measures.
    us = median(with_a_middle(each))
    spared = [min(1.0, (1 - GUARDS_LEFT) * us / own) if own else 0.0 for own in each]
    spans = [
        (op.track, op.start, op.start + round(op.dur * part))
        for some, part in zip(lookups, spared, strict=True)
        for op in some
    ]
    return Proposal(
        without_cpu_time(case.graph, spans),
        f"a step looks up torch.compile's cache and checks guards {how_often(len(typical))}: "
        f"{duration(us)} of CPU time in the median step",
        "torch.compiler.set_stance(skip_guard_eval_unsafe=True) after warm-up, if inputs do not change",
        assumed=True,
    )


def no_gradients(case: Case) -> Proposal | None:
    """Propose to set gradients to None instead of zero; the next backward then adds to none."""
    zeroed, typical = case.in_each_step(_zeroed)
    if len(typical) < MANY_ZEROED:
        return None
    added, in_typical = case.in_each_step(added_gradients)
    if not in_typical:
        return None
    if case.summary.launches_graphs and len(in_typical) > len(typical):
        return None  # a backward that a graph replays would overwrite the gradients of the one before
    # Of several backward passes in a step, only the first one would add to no gradients.
    in_typical = in_typical[: len(typical)]
    ops = [op for zeros, adds in zip(zeroed, added, strict=True) for op in (*zeros, *adds[: len(zeros)])]
    loops = [(zeros[0].track, zeros[0].start, zeros[-1].end) for zeros in zeroed if zeros]
    us = sum(one.us for op in (*typical, *in_typical) for one in op.work_below())
    return Proposal(
        without_ops(without_cpu_time(case.graph, loops), ops),
        f"{len(typical):,} gradients are set to zero one by one, and backward adds to {len(in_typical):,} of them: "
        f"{duration(us)} of GPU work",
        "optimizer.zero_grad(set_to_none=True)",
        assumed=True,  # that backward can hand over each gradient without a copy
    )


def no_autograd(case: Case) -> Proposal | None:
    """Propose to run a model without autograd, if autograd records many of its ops and the trace has no backward."""
    if case.summary.training.unused_nodes < MANY_NODES:
        return None
    found, typical = case.in_each_step(lambda step: unused_nodes(case.trace, step))
    spans = []
    for op in chain.from_iterable(found):
        until = op.children[0].start if op.children else op.end
        spans.append((op.track, op.start, min(until, op.start + round(NODE_LAUNCHES * case.launch_us * 1e3))))
    return Proposal(
        without_cpu_time(case.graph, spans),
        f"autograd records {counted(len(typical), 'op')} of a step, and the trace has no backward pass",
        "torch.inference_mode() or torch.no_grad() around the model, if no backward follows",
        assumed=True,
    )


def _zeroed(step: Step) -> list[Op]:
    """Return the ops in zero_grad() that set a gradient to zero, in order."""
    return sorted(
        (op for label in labels(step, ZEROES) for op in label.children if op.name == "aten::zero_"),
        key=lambda op: op.start,
    )


AVOIDABLE_CHANGES = (
    Change("allocator", "allocate no memory in the steps", allocator, CUDA_OR_HIP),
    Change("recompile", "avoid recompilation in the steps", recompile),
    Change("in_place", "work in place", in_place),
    Change("mask_once", "make the mask once", mask_once),
    Change("shared_keys", "share keys and values between query heads", shared_keys),
    Change("cast_weights", "cast the weights once", cast_weights),
    Change("last_logits", "compute the logits of the last token only", last_logits),
    Change("shorter_cache", "attend to the filled part of the cache only", shorter_cache),
    Change("static_inputs", "give the CUDA graph its inputs in place", static_inputs, CUDA_OR_HIP),
    Change("attention_plans", "avoid cuDNN's plans for new attention shapes", attention_plans, CUDA),
    Change("skip_guards", "skip the guards of compiled code", skip_guards),
    Change("no_autograd", "run the model without autograd", no_autograd),
    Change("no_gradients", "set gradients to None instead of zero", no_gradients),
)
