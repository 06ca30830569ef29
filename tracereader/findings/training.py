"""Findings about a training step: its phases, the optimizer's launches, a slow loader, what it sends to other ranks."""

from tracereader.figures import Summary
from tracereader.findings.finding import Finding, Verdict, counted, listed, recordable
from tracereader.findings.steps import cost_of

# Of a step, waiting for its batch: below that, taking a batch from a queue that is never empty.
MUCH_LOADING = 0.1
# Launches of a for-loop optimizer: with fewer, foreach would save nothing that shows.
MANY_LAUNCHES = 20
# A product's backward is two products of its size. Of a decoder's whole step on an H200: 1.9 to 2.0.
ABOUT_TWICE = (1.7, 2.3)
# Of the busy time, collectives with nothing beside them: 1% in DDP on two H200s, 12 to 28% with a slow rank.
MUCH_WAITED = 0.05


@recordable
def recomputation() -> Finding:
    def judge(summary):
        again = summary.training.recomputed
        if again is None:
            return Verdict(False, "no forward op runs again in the backward")
        where = f"{again.gpu_us:,.1f} µs of GPU time in {counted(again.pieces, 'piece')}" if again.gpu_us else (
            f"{again.cpu_us:,.1f} µs of CPU time"
        )  # fmt: skip
        return Verdict(True, f"{counted(again.calls, 'forward op')} a step, {where}")

    return Finding("forward ops inside backward", judge)


@recordable
def optimizer_for_loop() -> Finding:
    def judge(summary):
        loops = [one for one in summary.training.optimizers if one.how == "for-loop" and one.launches >= MANY_LAUNCHES]
        if not loops:
            found = [f"{one.how or one.name}, {one.launches:,} launches" for one in summary.training.optimizers]
            return Verdict(False, listed(found) if found else "no optimizer in the step")
        most = max(loops, key=lambda one: one.launches)
        seen = (
            f"{most.name}: {most.launches:,} launches a step, {most.cpu_us:,.1f} µs of CPU time for {most.gpu_us:,.1f} "
            f"of GPU time; the GPU idle for {most.idle_us:,.1f}"
        )
        return Verdict(True, seen, cost_us=cost_of(summary, idle_us=most.idle_us))

    return Finding("an optimizer that launches for each parameter", judge, needs_gpu=True)


@recordable
def starving() -> Finding:
    def judge(summary):
        waits = summary.training.loading
        if waits is None:
            return Verdict(False, "no DataLoader in the trace")
        seen = f"{waits.us / 1e3:,.1f} ms of a step, {waits.share:.0%} of its time"
        if waits.share < MUCH_LOADING:
            return Verdict(False, seen)
        if waits.idle_us is None:
            return Verdict(True, seen, cost_us=cost_of(summary, cpu_us=waits.us))
        idle = waits.idle_us / waits.us if waits.us else 0.0
        seen += f", the GPU idle for {idle:.0%} of that"
        return Verdict(idle > 0.5, seen, cost_us=cost_of(summary, idle_us=waits.idle_us))

    return Finding("a step that waits for the DataLoader", judge)


@recordable
def backward_is_twice_the_forward() -> Finding:
    def judge(summary):
        gpu_us = {place.name: place.gpu_us for place in summary.places.by_label}
        if not gpu_us.get("forward") or "backward" not in gpu_us:
            return Verdict(None, "the step has no labels forward and backward with GPU work")
        least, most = ABOUT_TWICE
        times = gpu_us["backward"] / gpu_us["forward"]
        seen = f"{gpu_us['backward'] / 1e3:.2f} against {gpu_us['forward'] / 1e3:.2f} ms of GPU work, x {times:.2f}"
        return Verdict(least <= times <= most, seen)

    return Finding("the backward takes about twice the forward: two products for each of its one", judge, True)


@recordable
def communication_is_hidden(hidden: bool) -> Finding:
    """For the most part; or that it is not."""

    def judge(summary):
        total = _communication_us(summary)
        if not total:
            return Verdict(None, "no collective on the GPU in the steps")
        exposed = summary.gpu.exposed_communication_us
        seen = f"of {total / 1e3:.1f} ms of collectives in the steps, {exposed / 1e3:.1f} with nothing computed beside"
        return Verdict((exposed < total / 2) == hidden, seen)

    most = "most of the collectives' time is hidden behind compute"
    return Finding(most if hidden else "little of the collectives' time is hidden behind compute", judge, True)


@recordable
def busy_while_waiting() -> Finding:
    def judge(summary):
        total = _communication_us(summary)
        if not total:
            return Verdict(None, "no collective on the GPU in the steps")
        exposed, busy = summary.gpu.exposed_communication_us, summary.gpu.busy_us
        looks_busy = summary.waits_for in ("communication", "compute", "memory", "gpu")
        seen = f"busy {summary.busy_share:.0%} of the time, and {exposed / busy:.0%} of that in collectives alone"
        return Verdict(looks_busy and exposed > MUCH_WAITED * busy, seen)

    return Finding("the GPU looks busy and waits: a collective's kernel spins until all are there", judge, True)


def _communication_us(summary: Summary) -> float:
    return sum(one.us for one in summary.families if one.family == "communication") if summary.gpu else 0.0
