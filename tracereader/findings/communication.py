"""Sentences on the communication of the rank that wrote the trace."""

from tracereader.figures import Summary
from tracereader.figures.communication import Communication
from tracereader.findings.finding import WORTH_SHOWING, listed, size

MUCH_HIDDEN = 0.05  # hidden communication is reported from this share of the step on
# From this exposed share of the step on, the first lines also have the bandwidth and what may be the reason.
MUCH_EXPOSED = 0.15
# Bytes. On NVLink of 450 GB/s, collectives from 2 MB on that did not wait reached 68 to 290 GB/s, and those of 8 kB at
# most 1 (H200s). Through the host's memory they reached 25 to 28.
LARGE = 2e6
ON_A_HOST = 8  # most hosts have no more GPUs than this
MOSTLY_BUSY = 0.95  # a busy share from which on the share of the busy time is that of the step


def is_worth_saying(summary: Summary) -> bool:
    """Return whether communication takes enough of the step to be reported."""
    found = None if summary.recording.incomplete else summary.communication
    if found is None or not found.collectives:
        return False
    return found.exposed_share > WORTH_SHOWING or found.share > MUCH_HIDDEN


def in_words(summary: Summary) -> list[str]:
    """Return sentences on the exposed share of the step, the collectives, and what one rank's trace cannot show."""
    if not is_worth_saying(summary):
        return []
    found = summary.communication
    told = [f"{found.exposed_share:.0%} of the step is exposed communication"]
    # The regime's sentence has the share of the busy time, which is most of such a step.
    if summary.waits_for == "communication":
        told = [f"Exposed communication is {found.exposed_share:.0%} of the step"] * (summary.busy_share < MOSTLY_BUSY)
    alone = found.is_one_of_many and found.exposed_share > WORTH_SHOWING
    if found.exposed_share < MUCH_EXPOSED:
        if alone and told:
            told[0] += "; the other ranks' traces show why (read-trace FOLDER/)"
        return told
    longest = next((one for one in found.collectives if one.bus_gb_s), None)
    if longest is not None:
        rate = f"{longest.bus_gb_s:,.1f} GB/s ({longest.kind} of {size(longest.bytes)} over {longest.size:,} ranks)"
        late = ", or more if other ranks are late: read-trace FOLDER/ shows it" * alone
        told.append(f"The network reaches {rate}{late}")
        return told
    lacks = [
        what
        for what, field in (("sizes", "bytes"), ("groups", "size"))
        if all(getattr(one, field) is None for one in found.collectives)
    ]
    if lacks:
        told.append(f"The trace does not record the collectives' {' and '.join(lacks)}, so no bandwidth is known")
    if alone:
        why = "The network is slow, or this rank waits for others"
        told.append(f"{why}: their traces show which (read-trace FOLDER/)")
    return told


def beside_the_links(found: Communication) -> str:
    """Return a sentence on the fastest large collective beside the GPU's links; "" if these are not known.

    One that is faster than PCIe needed NVLink, and the slower ones waited. Others do not show which it was.
    """
    best = max((one.best_gb_s for one in found.collectives if one.best_gb_s and one.bytes >= LARGE), default=None)
    if best is None or found.pcie_gb_s is None:
        return ""
    nvlink, alone = found.nvlink_gb_s, found.is_one_of_many
    if nvlink and best > found.pcie_gb_s:
        waits = ", and this rank waits for peers in slower ones" * alone
        return f"the fastest reaches {best:,.0f} GB/s, so NVLink ({nvlink:g} in each direction) connects them{waits}"
    links = [*[f"NVLink has {nvlink:g}"] * bool(nvlink), f"PCIe {'' if nvlink else 'has '}{found.pcie_gb_s:g}"]
    links += ["a network of 400 Gb/s 50"] * ((found.ranks or 0) > ON_A_HOST)
    reason = ("it does not use NVLink" if nvlink else "the link is slow") + ", or it waits for peers" * alone
    return f"the fastest reaches {best:,.0f} GB/s, where in each direction {listed(links)}: {reason}"
