"""Changes of a program that uses no GPU. Its ops are the work itself, so a change removes their CPU time.

Fewer changes help than on a GPU. torch.compile is not proposed: on two cores of an EPYC, a transformer of 4 layers took
477 ms instead of 461 in training and 192 instead of 176 in inference, a chain of eight pointwise ops 8.1 ms instead of
7.2, and another one of nine 11.8 instead of 25.5. The trace does not show which of them would gain.
"""

from collections.abc import Iterator, Sequence

from tracereader.figures.avoidable import SDPA_MATH
from tracereader.figures.sizes import product
from tracereader.figures.steps import labels, self_us
from tracereader.figures.unfused import on_the_cpu
from tracereader.findings.avoidable_changes import AVOIDABLE_CHANGES
from tracereader.findings.cpu_changes import CPU_CHANGES
from tracereader.findings.debugging_changes import DEBUGGING_CHANGES
from tracereader.findings.finding import counted, duration, listed
from tracereader.findings.gpu_changes import how_to_fuse
from tracereader.findings.inference_changes import INFERENCE_CHANGES
from tracereader.findings.opportunity import Case, Change, Proposal
from tracereader.replay import spans_of, without_cpu_time
from tracereader.trace import Op, Step
from tracereader.trace.labels import AUTOGRAD, OPTIMIZER

# The share of an optimizer's time that its fused form takes: how often this one reads or writes a tensor, divided by
# how often the loop's ops do (AdamW: 7 of 20, Adam: 7 of 18, SGD with momentum: 5 of 8, Adagrad: 5 of 11). With 50 to
# 300 parameters of 64 to 4 million elements, two cores of an EPYC took 0.16 to 0.27 (AdamW), 0.21 to 0.37 (Adam), 0.27
# to 0.77 (SGD) and 0.31 to 0.41 (Adagrad) of the loop's time.
FUSED_SHARE = {"AdamW": 0.35, "Adam": 0.39, "SGD": 0.63, "Adagrad": 0.45}
# SGD without momentum reads and writes nothing twice. Only the momentum is multiplied.
MULTIPLIES = ("aten::mul_", "aten::_foreach_mul_")
# With fewer keys, the fused kernel is hardly faster: 3.9 and 3.8 ms with 64 keys, and 19 and 20 ms with 256 keys in
# training. With 256 keys it took 5.7 ms instead of 10.2, 5.9 instead of 8.4 and 11.7 instead of 16.5; with 1,024 keys
# 28 instead of 146, and 114 instead of 348 in training (the same machine).
LEAST_KEYS, LEAST_KEYS_IN_TRAINING = 256, 512
DROPS = ("aten::native_dropout", "aten::bernoulli_")
ADDS = ("aten::add", "aten::add_")  # a mask to the scores


def fused_optimizer(case: Case) -> Proposal | None:
    slow = {
        one.label: one
        for one in case.summary.training.optimizers
        if one.faster == "fused" and not (one.forward_us or one.backward_us)  # of a closure in its time
    }
    updates = [op for step in case.steps for op in labels(step, tuple(slow)) if op.name in slow]
    updates = [op for op in updates if not _is_plain_sgd(op)]
    if not updates:
        return None
    found = [slow[label] for label in dict.fromkeys(op.name for op in updates)]
    spans = [(op.track, op.start + round(FUSED_SHARE[slow[op.name].name] * op.dur), op.end) for op in updates]
    each = "; ".join(f"{one.name} ({one.how}) takes {duration(one.cpu_us)} of the step" for one in found)
    return Proposal(
        without_cpu_time(case.graph, spans),
        f"{each}; a fused optimizer reads and writes each tensor once",
        listed(f"torch.optim.{one.name}(…, fused=True)" for one in found),
        assumed=True,
        title=f"use the fused {' and '.join(one.name for one in found)}",
    )


def _is_plain_sgd(update: Op) -> bool:
    return update.name == f"{OPTIMIZER}SGD.step" and not any(op.name in MULTIPLIES for op in update.walk())


def fused_attention(case: Case) -> Proposal | None:
    """Return a proposal to fuse attention. Then only its two products take time, and so it is in backward."""
    found, typical = case.in_each_step(lambda step: list(_large_attentions(case, step)))
    if not typical:
        return None
    forward = [op for some in found for _, between, _ in some for op in between]
    backward = _backward_of(case, forward)
    us = sum(self_us(op) for _, between, _ in typical for op in between)
    also = f", and {duration(sum(op.us for op in backward))} in backward" if backward else ""
    keys = {_keys(first) for first, _, _ in typical}
    of_keys = f" of {min(keys):,} keys" if len(keys) == 1 else ""
    masked = case.trace.trains and any(op.name in ADDS for _, between, _ in typical for op in between)
    math_calls = [above for first, _, _ in typical for above in first.above() if above.name == SDPA_MATH]
    return Proposal(
        without_cpu_time(case.graph, spans_of([*forward, *backward])),
        f"{counted(len(typical), 'softmax', 'softmaxes')}{of_keys} between batched products: the ops between the "
        f"products take {duration(us)}{also}"
        + ("; scaled_dot_product_attention falls back to them" if math_calls else ""),
        how_to_fuse(math_calls) + ", if no gradient of the mask is needed" * masked,
        assumed=True,
    )


def _large_attentions(case: Case, step: Step) -> Iterator[tuple[Op, list[Op], Op]]:
    """Yield the products of each attention that is large enough to gain, and the ops that end between them.

    The fused kernel for CPUs refuses dropout.
    """
    least = LEAST_KEYS_IN_TRAINING if case.trace.trains else LEAST_KEYS
    for first, between, last in on_the_cpu(step):
        drops = any(op.name in DROPS for op in between)
        if _keys(first) >= least and not drops and id(first) not in case.in_flex:
            yield first, [op for op in between if op.end <= last.start], last


def _keys(product_of_scores: Op) -> int:
    shape = product(product_of_scores.name, product_of_scores.inputs.dims)
    return shape.n if shape is not None else 0


def _backward_of(case: Case, forward: Sequence[Op]) -> list[Op]:
    """Return the calls of autograd's engine that compute the gradients of these ops.

    Only the node itself is tied to its op. A checkpoint's node contains a whole backward pass.
    """
    begun = {(op.track, op.start) for op in forward}
    calls = [call for step in case.steps for call in step.named(lambda name: name.startswith(AUTOGRAD))]
    forward_of = case.trace.forward_of
    return [
        call for call in calls if any(forward_of.get((op.track, op.start)) in begun for op in (call, *call.children))
    ]


# Changes that remove the same calls with and without a GPU. These are left out: "python", because a pause between ops
# may be the time in which memory of a large tensor is given back; "no_gradients", because new gradients need new memory
# in each step (12 layers of 1,024 x 1,024 took 47 ms instead of 33); and "in_place" (82 ms with and without the clone).
ALSO_HERE = (
    "data_loader",
    "mask_once",
    "recompile",
    "skip_guards",
    "anomaly_detection",
    "filled_memory",
    "merge_adapters",
)
CPU_ONLY_CHANGES = (
    Change("fused_optimizer", "use the fused optimizer", fused_optimizer),
    Change("fused_attention", "use a fused attention kernel", fused_attention),
    *(
        one
        for one in (*CPU_CHANGES, *AVOIDABLE_CHANGES, *INFERENCE_CHANGES, *DEBUGGING_CHANGES)
        if one.name in ALSO_HERE
    ),
)
