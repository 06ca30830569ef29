"""Findings about one rank's training step: its phases, and what it sends to the other ranks."""

from tracereader.figures import Summary
from tracereader.findings.finding import Finding, Verdict, recordable
from tracereader.findings.steps import waits_for

# A product's backward is two products of its size. Of a decoder's whole step on an H200: 1.9 to 2.0.
ABOUT_TWICE = (1.7, 2.3)
# Of the busy time, collectives with nothing beside them: 1% in DDP on two H200s, 12 to 28% with a slow rank.
MUCH_WAITED = 0.05


@recordable
def backward_is_twice_the_forward() -> Finding:
    def judge(summary):
        gpu_us = {place.name: place.gpu_us for place in summary.by_label}
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
        looks_busy = waits_for(summary) in ("communication", "compute", "memory", "gpu")
        seen = f"busy {summary.busy_share:.0%} of the time, and {exposed / busy:.0%} of that in collectives alone"
        return Verdict(looks_busy and exposed > MUCH_WAITED * busy, seen)

    return Finding("the GPU looks busy and waits: a collective's kernel spins until all are there", judge, True)


def _communication_us(summary: Summary) -> float:
    return sum(one.us for one in summary.families if one.family == "communication") if summary.gpu else 0.0
