"""Changes of the optimizer and of the code beside it: how many calls update the parameters."""

from tracereader.changes import prices
from tracereader.changes.change import change
from tracereader.changes.context import Case
from tracereader.changes.opportunity import Proposal
from tracereader.figures.steps import labels
from tracereader.findings.finding import counted, duration, listed
from tracereader.replay.changes import fused, spans_of, with_cpu_time, without_cpu_time
from tracereader.trace import Step, start_of
from tracereader.trace.grouped import totals
from tracereader.trace.labels import GIVES_GRADIENT, OPTIMIZER
from tracereader.two_runs.same_work import same_heavy
from tracereader.two_runs.side import Side

FEW_LAUNCHES = 4  # or fewer: those of a foreach optimizer of a small model
# SGD without momentum reads and writes nothing twice. Only the momentum is multiplied.
MULTIPLIES = ("aten::mul_", "aten::_foreach_mul_")


def _follows_fused_optimizer(before: Side, after: Side) -> bool:
    """An optimizer is fused or foreach now, whichever torch offers as faster, and the matrix products are the same."""
    offered = {one.name: one.faster for one in before.summary.training.optimizers}
    made = any(one.how and one.how == offered.get(one.name) for one in after.summary.training.optimizers)
    return made and same_heavy(before, after)


def fused_optimizer_on_the_cpu(case: Case) -> Proposal | None:
    slow = {
        one.label: one
        for one in case.summary.training.optimizers
        if one.faster == "fused" and not (one.forward_us or one.backward_us)  # of a closure in its time
    }
    updates = [op for step in case.steps for op in labels(step, tuple(slow)) if op.name in slow]
    plain = f"{OPTIMIZER}SGD.step"
    updates = [op for op in updates if op.name != plain or any(one.name in MULTIPLIES for one in op.walk())]
    if not updates:
        return None
    found = [slow[label] for label in dict.fromkeys(op.name for op in updates)]
    spans = [(op.track, op.start + round(prices.FUSED_ON_THE_CPU * op.dur), op.end) for op in updates]
    each = "; ".join(f"{one.name} ({one.how}) takes {duration(one.cpu_us)} of the step" for one in found)
    return Proposal(
        without_cpu_time(case.graph, spans),
        f"{each}; a fused optimizer reads and writes each tensor once",
        listed(f"torch.optim.{one.name}(…, fused=True)" for one in found) + ", with torch 2.4 or newer",
        assumed=True,
        title=f"use the fused {' and '.join(one.name for one in found)}",
    )


@change(
    "use the fused optimizer",
    "the CPU time of a fused or foreach step, by the number of parameters",
    followed=_follows_fused_optimizer,
    on_cpu=fused_optimizer_on_the_cpu,
    keys=("fused_optimizer", "foreach_optimizer"),
)
def fused_optimizer(case: Case) -> Proposal | None:
    loops = [one for one in case.summary.training.optimizers if one.launches > FEW_LAUNCHES and one.faster]
    if not loops:
        return None
    groups, updates = [], []
    fuses = {one.label: one.faster == "fused" for one in loops}
    for step in case.steps:
        # None in a step that only adds to gradients.
        updating = [label for label in labels(step, tuple(fuses)) if label.name in fuses]
        took = [_optimizer_us(case, step, fused) for fused in (False, True)] if updating else []
        for label in updating:
            if work := sorted(label.work_below(), key=start_of):
                # The fused kernel reads and writes each tensor once. The loop's slowest kernel does at least as much.
                groups.append((work, 2 * totals((one.name, one.us) for one in work).most_common(1)[0][1]))
                updates.append((label, took[fuses[label.name]]))
    launches = [(min((one.launch for one in update.work_below()), key=start_of), us) for update, us in updates]
    graph = without_cpu_time(fused(case.graph, groups), spans_of(update for update, _ in updates))
    return Proposal(
        with_cpu_time(graph, [(first.track, first.start, us) for first, us in launches]),
        "; ".join(
            f"{one.name} ({one.how}): {counted(one.launches, 'launch', 'launches')}, {duration(one.cpu_us)} of CPU time"
            for one in loops
        ),
        listed(f"torch.optim.{one.name}(…, {one.faster}=True)" for one in loops),
        assumed=True,
        title=f"use the {' and the '.join(f'{one.faster} {one.name}' for one in loops)}",
    )


def _optimizer_us(case: Case, step: Step, fused: bool) -> float:
    """Return the CPU time (µs) of a fused or a foreach optimizer's step.

    If the step has several, each gets an equal share of the parameters. Their sum does not depend on who has how many.
    """
    tensors = _parameters_with_gradients(step) or prices.PARAMETERS
    base, each = (prices.FUSED_STEP, prices.FUSED_TENSOR) if fused else (prices.FOREACH_STEP, prices.FOREACH_TENSOR)
    return (base + each * tensors / len(labels(step, OPTIMIZER))) * case.launch_us


def _parameters_with_gradients(step: Step) -> int:
    """Return the number of parameters that get a gradient in a step; 0 if the step does not show it.

    Only the step's first backward pass gives them new tensors, if the program sets gradients to None before it. Later
    passes add to these.
    """
    given = list(step.named(GIVES_GRADIENT.__eq__))
    return len([op for op in given if not any(below.name.startswith("aten::add") for below in op.children)] or given)
