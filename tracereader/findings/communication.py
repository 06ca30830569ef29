"""Sentences on the communication of the rank that wrote the trace."""

from tracereader.figures import Summary
from tracereader.figures.communication import Collectives
from tracereader.findings.finding import duration, size
from tracereader.findings.opportunity import WORTH_SHOWING

# Hidden communication is reported from this share of the step on.
MUCH_HIDDEN = 0.05
# From this exposed share of the step on, the first lines also have the bandwidth and what may be the reason.
MUCH_EXPOSED = 0.15
NAMED = 2  # kinds of collectives
ALIKE = 0.1  # bandwidths that differ by less


def is_worth_saying(summary: Summary) -> bool:
    """Return whether communication takes enough of the step to be reported."""
    found = None if summary.recording.incomplete else summary.communication
    return (
        found is not None
        and bool(found.collectives)
        and (found.exposed_share > WORTH_SHOWING or found.share > MUCH_HIDDEN)
    )


def in_words(summary: Summary) -> list[str]:
    """Return sentences on the exposed share of the step, the collectives, and what one rank's trace cannot show."""
    if not is_worth_saying(summary):
        return []
    found = summary.communication
    by_communication = summary.waits_for == "communication"  # whose sentence has the share of the busy time
    told = [f"{found.exposed_share:.0%} of the step is exposed communication"]
    if by_communication:
        told = [f"That is {found.exposed_share:.0%} of the step"]
    alone = found.is_one_of_many and found.exposed_share > WORTH_SHOWING
    if found.exposed_share < MUCH_EXPOSED:
        if alone:
            told[0] += "; the other ranks' traces show why (read-trace FOLDER/)"
        return told
    if rates := _rates(found.collectives):
        told.append(f"Bus bandwidth, at least: {', '.join(rates)}")
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


def _rates(collectives: tuple[Collectives, ...]) -> list[str]:
    """Return the size, group, time and bandwidth of the longest kinds of collectives."""
    rated = [one for one in collectives if one.bus_gb_s]
    named = rated[:1]
    for one in rated:  # a kind of about the same bandwidth tells nothing new
        if one.kind != named[-1].kind and abs(one.bus_gb_s - named[-1].bus_gb_s) > ALIKE * named[-1].bus_gb_s:
            named.append(one)
    return [
        f"{one.bus_gb_s:,.1f} GB/s ({one.kind} of {size(one.bytes)} over {one.size:,} ranks in {duration(one.us)})"
        for one in named[:NAMED]
    ]
