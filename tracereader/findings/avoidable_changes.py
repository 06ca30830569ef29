"""Changes that remove work: memory allocation, copies, masks and recompilation in the steps."""

from collections import Counter
from collections.abc import Sequence

from tracereader.figures.avoidable import cloned_inputs, triangles
from tracereader.figures.decoding import expanded
from tracereader.figures.steps import compilations
from tracereader.findings.finding import counted, duration, listed
from tracereader.findings.opportunity import Case, Change, Proposal
from tracereader.replay import spans_of, without_cpu_time, without_ops
from tracereader.trace import Op

# CUDA's and HIP's calls. Those that end in Async allocate from a pool, in a stream's order.
ALLOCATES = ("Malloc", "Free", "HostAlloc", "MallocHost", "FreeHost", "HostFree", "HostMalloc", "HostRegister")
RUNTIMES = ("cuda", "hip")


def allocator(case: Case) -> Proposal | None:
    calls = [[op for op in step.walk() if op.kind == "runtime" and _allocates(op)] for step in case.steps]
    told = _in_typical(case, calls)
    if not told:
        return None
    names = Counter(op.name for op in told)
    each = listed(f"{name} {counted(count, 'time')}" for name, count in names.most_common(3))
    return Proposal(
        without_cpu_time(case.graph, spans_of(op for some in calls for op in some)),
        f"{each} in a step: {duration(sum(op.us for op in told))}",
        "keep shapes equal from step to step, call no empty_cache(), pin buffers once; "
        "or PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
    )


def _allocates(call: Op) -> bool:
    return any(call.name == runtime + what for runtime in RUNTIMES for what in ALLOCATES)


def _in_typical(case: Case, by_step: Sequence[list[Op]]) -> list[Op]:
    return by_step[case.summary.typical_index]


def recompile(case: Case) -> Proposal | None:
    compiling = [compilations(step) for step in case.steps]
    told = _in_typical(case, compiling)
    if not told:
        return None
    return Proposal(
        without_cpu_time(case.graph, spans_of(op for some in compiling for op in some)),
        f"torch.compile compiles in the step: {duration(sum(op.us for op in told))}",
        "warm up with every shape, mark changing dimensions (torch._dynamo.mark_dynamic), or pad inputs; "
        "TORCH_LOGS=recompiles names the guard",
    )


def in_place(case: Case) -> Proposal | None:
    """The clone that an op makes of its input, where no gradient may need that input."""
    if case.trains:
        return None
    clones = [cloned_inputs(step) for step in case.steps]
    told = clones[case.summary.typical_index]
    if not told:
        return None
    count = sum(map(len, told.values()))
    us = sum(work.us for some in told.values() for op in some for below in op.walk() for work in below.work)
    return Proposal(
        without_ops(case.graph, [op for found in clones for some in found.values() for op in some]),
        f"{listed(told)} {'clones' if len(told) == 1 else 'clone'} the input first: "
        f"{counted(count, 'copy', 'copies')}, {duration(us)} of GPU time",
        f"{listed(name.removeprefix('aten::') + '_' for name in told)}, where nothing else reads the input",
    )


def mask_once(case: Case) -> Proposal | None:
    made = [[op for group in triangles(step, in_sdpa=False) for op in group] for step in case.steps]
    told = _in_typical(case, made)
    if len(made) < 2 or not all(made):
        return None
    return Proposal(
        without_ops(case.graph, [op for some in made for op in some]),
        f"{listed(dict.fromkeys(op.name for op in told))} make a triangular mask in every step: "
        f"{duration(sum(op.us for op in told))} of CPU time",
        "make the mask once (register_buffer), or pass is_causal=True",
    )


def shared_keys(case: Case) -> Proposal | None:
    found = [expanded(step) for step in case.steps]
    told = found[case.summary.typical_index]
    if not told:
        return None
    us = sum(work.us for _, some in told for work in some)
    return Proposal(
        without_ops(case.graph, [op for some in found for op, _ in some]),
        f"{counted(len(told), 'copy', 'copies')} write keys and values out for each query head before attention: "
        f"{duration(us)} of GPU time",
        "scaled_dot_product_attention(…, enable_gqa=True)",
    )


AVOIDABLE_CHANGES = (
    Change("allocator", "allocate no memory in the steps", allocator),
    Change("recompile", "avoid recompilation in the steps", recompile),
    Change("in_place", "work in place", in_place),
    Change("mask_once", "make the mask once", mask_once),
    Change("shared_keys", "share keys and values between query heads", shared_keys),
)
