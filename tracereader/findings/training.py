"""Findings about a training step: phases, optimizer launches, a slow DataLoader, communication."""

from tracereader.figures import Summary
from tracereader.findings.finding import CPU, Verdict, activities, counted, duration, finding, listed

# Share of a step spent waiting for its batch. Below this share, the batch comes from a queue that is never empty.
MUCH_LOADING = 0.1
# If a for-loop optimizer launches fewer kernels, foreach would not save a measurable time.
MANY_LAUNCHES = 20
# The backward of a matrix product is two products of the same size. A decoder's whole step on an H200 shows 1.9 to 2.0.
ABOUT_TWICE = (1.7, 2.3)
# Share of the busy time in exposed collectives. It is 1% in DDP on two H200s, and 12 to 28% with a slow rank.
MUCH_EXPOSED = 0.05


@finding(
    CPU, "forward ops inside backward", predicts="forward ops run again inside the backward", change="no_recompute"
)
def recomputation(summary: Summary) -> Verdict:
    """Activation checkpointing recomputes activations that were not kept. This trades time for memory."""
    again = summary.training.recomputed
    if again is None:
        return Verdict(False, "no forward op runs again in the backward")
    where = f"{duration(again.cpu_us)} of CPU time"
    if again.gpu_us:
        where = f"{duration(again.gpu_us)} of GPU time in {activities(again.pieces)}"
    return Verdict(True, f"{counted(again.calls, 'forward op')} per step, {where}")


@finding(
    CPU,
    "an optimizer that launches kernels for each parameter",
    predicts="the optimizer launches kernels for each parameter",
    needs_gpu=True,
    change="fused_optimizer",
)
def optimizer_for_loop(summary: Summary) -> Verdict:
    """The optimizer loops over the parameters. With foreach=True one launch updates many of them, and with fused=True
    it does the whole update."""
    of_loops = (one for one in summary.training.optimizers if one.how == "for-loop" and one.faster)
    loops = [one for one in of_loops if one.launches >= MANY_LAUNCHES]
    if not loops:
        found = [f"{one.how or one.name}, {one.launches:,} launches" for one in summary.training.optimizers]
        return Verdict(False, listed(found) if found else "no optimizer in the step")
    most = max(loops, key=lambda one: one.launches)
    times = f"{duration(most.cpu_us)} of CPU time for {duration(most.gpu_us)} of GPU time"
    idle = f"the GPU is idle for {duration(most.idle_us)}"
    return Verdict(True, f"{most.name}: {most.launches:,} launches per step, {times}; {idle}")


@finding(
    CPU, "a step that waits for the DataLoader", predicts="the step waits for the DataLoader", change="data_loader"
)
def starving(summary: Summary) -> Verdict:
    """The next batch is not ready when the step needs it. Use more workers, do less work per sample, or prepare batches
    ahead."""
    waits = summary.training.loading
    if waits is None:
        return Verdict(False, "no DataLoader in the trace")
    seen = f"it waits for {waits.us / 1e3:,.1f} ms of a step, {waits.share:.0%} of its time"
    if waits.share < MUCH_LOADING:
        return Verdict(False, seen)
    if waits.idle_us is None:
        return Verdict(True, seen)
    idle = waits.idle_us / waits.us if waits.us else 0.0
    seen += f"; the GPU is idle for {idle:.0%} of the wait"
    return Verdict(idle > 0.5, seen)


@finding(
    predicts="the backward takes about twice as long as the forward: it has two matrix products for each one of "
    "the forward",
    needs_gpu=True,
)
def backward_is_twice_the_forward(summary: Summary) -> Verdict:
    gpu_us = {place.name: place.gpu_us for place in summary.places.by_label}
    if not gpu_us.get("forward") or "backward" not in gpu_us:
        return Verdict(None, "the step has no annotations forward and backward with GPU work")
    least, most = ABOUT_TWICE
    times = gpu_us["backward"] / gpu_us["forward"]
    ms = [gpu_us[name] / 1e3 for name in ("backward", "forward")]
    seen = f"{ms[0]:.2f} ms of GPU work in the backward, {ms[1]:.2f} ms in the forward: {times:.2f} times as much"
    return Verdict(least <= times <= most, seen)


@finding(
    predicts=lambda hidden: f"{'most' if hidden else 'little'} of the collectives' time is hidden behind compute",
    needs_gpu=True,
)
def communication_is_hidden(summary: Summary, hidden: bool) -> Verdict:
    """Judge how much communication is hidden. hidden: whether the prediction says that most of it is."""
    total = _communication_us(summary)
    if not total:
        return Verdict(None, "no collective on the GPU in the steps")
    exposed = summary.gpu.exposed_communication_us
    seen = f"{exposed / 1e3:.1f} of the {total / 1e3:.1f} ms of collectives in the steps are exposed"
    return Verdict((exposed < total / 2) == hidden, seen)


@finding(predicts="the GPU looks busy but waits: a collective's kernel spins until all ranks arrive", needs_gpu=True)
def busy_while_waiting(summary: Summary) -> Verdict:
    if not _communication_us(summary):
        return Verdict(None, "no collective on the GPU in the steps")
    exposed, busy = summary.gpu.exposed_communication_us, summary.gpu.busy_us
    looks_busy = summary.waits_for in ("communication", "compute", "memory", "gpu")
    share = f"{exposed / busy:.0%} of the busy time is exposed communication"
    seen = f"the GPU is busy {summary.busy_share:.0%} of the time, and {share}"
    return Verdict(looks_busy and exposed > MUCH_EXPOSED * busy, seen)


def _communication_us(summary: Summary) -> float:
    return sum(one.us for one in summary.families if one.family == "communication") if summary.gpu else 0.0
