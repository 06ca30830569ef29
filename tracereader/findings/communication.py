"""Sentences on the communication of the rank that wrote the trace."""

from collections.abc import Sequence

from tracereader.figures import Summary
from tracereader.figures.communication import Collectives
from tracereader.findings.finding import duration, size
from tracereader.findings.opportunity import WORTH_SHOWING

# Hidden communication is reported from this share of the step on.
MUCH_HIDDEN = 0.05


def is_worth_saying(summary: Summary) -> bool:
    """Return whether communication takes enough of the step to be reported."""
    found = summary.communication
    return found is not None and (found.exposed_share > WORTH_SHOWING or found.share > MUCH_HIDDEN)


def in_words(summary: Summary) -> list[str]:
    """Return sentences on how much of the step is exposed communication, and what one rank's trace cannot show."""
    if not is_worth_saying(summary):
        return []
    found, source = summary.communication, summary.source
    told = [f"{found.exposed_share:.0%} of the step is exposed communication"]
    if found.is_one_of_many:
        of = f"rank {source.rank} of {source.world_size}" if source.rank is not None else "one rank"
        if source.rank is None and found.ranks:
            of += f" of a group of {found.ranks}"
        told.append(
            f"this is the trace of {of}, and a collective's time includes the wait for its peers: the network is slow, "
            "or this rank waits for its peers, and the other ranks' traces show which (read-trace FOLDER/)"
        )
        told.append("savings count no time that an exposed collective covers")
    lacks = [
        what
        for what, lacking in (
            ("sizes", all(one.bytes is None for one in found.collectives)),
            ("groups", all(one.size is None for one in found.collectives)),
        )
        if lacking
    ]
    if lacks:
        told.append(f"no bandwidth is known, because the trace does not record the collectives' {' and '.join(lacks)}")
    return told


def of_collectives(some: Sequence[Collectives]) -> list[str]:
    """Return a sentence on each kind of collective with its size, group and bandwidth."""
    return [
        f"{one.kind or 'communication that the trace does not describe'}"
        + f" of {size(one.bytes)}" * (one.bytes is not None)
        + f" over {one.size} ranks" * (one.size is not None)
        + f": {one.per_step:,.3g} per step of {duration(one.us)}"
        + (f", at least {one.bus_gb_s:,.1f} GB/s on the bus" if one.bus_gb_s else "")
        for one in some
    ]


# Of a change that makes collectives shorter.
NOT_COUNTED = (
    "Less communication may save more, but this rank may wait in its collectives for others: read the traces of all "
    "ranks together"
)
