"""The communication of the rank that wrote a trace, by its own trace alone.

A collective lasts until all ranks have arrived. One rank's trace does not tell this wait from the transfer, so its
bandwidth is a lower bound of the network's.
"""

from collections.abc import Iterator, Sequence
from statistics import median
from typing import NamedTuple

import msgspec

from tracereader.figures.gpu_time import GpuTime, Parts, busiest
from tracereader.figures.hardware import common_peaks
from tracereader.figures.rank import Calls, cpu_parts, described_on_cpu, described_on_gpu
from tracereader.figures.ranks import BUS_FACTOR
from tracereader.trace import Rank, Step, Trace
from tracereader.trace.grouped import grouped
from tracereader.trace.intervals import Lengths, length
from tracereader.trace.labels import collective_on_cpu


class Collectives(msgspec.Struct, frozen=True):
    """Equal collectives or messages of the steps. Times in µs.

    kind: as in Call; "" if a kernel's description does not say it. group: the process group's description or name.
    size: its number of ranks, None if it is not recorded. bytes: of one call as NCCL counts it, or the sum of those
    that one kernel runs. per_step: the mean number in a step. us: the median time of one, with the wait for its peers.
    exposed_us: the mean time in a step beside which nothing computes. bus_gb_s: by NCCL's definition, with the whole
    time, so the network is at least so fast; None if size, bytes or the kind's factor is not known. best_gb_s: the same
    of the shortest one.
    """

    kind: str
    group: str
    size: int | None
    bytes: int | None
    per_step: float
    us: float
    exposed_us: float
    bus_gb_s: float | None
    best_gb_s: float | None


class Communication(msgspec.Struct, frozen=True):
    """The communication of one rank: its mean times in a step (µs), and its collectives, the longest in all first.

    ranks: the ranks of the job or of the largest recorded group; None if neither is recorded. is_one_of_many: whether
    the trace lacks ranks of the job. share, exposed_share: of the step's time. nvlink_gb_s and pcie_gb_s: the GPU's
    links in each direction by its data sheet; None without such a link, or if it is not known.
    """

    ranks: int | None
    is_one_of_many: bool
    on_cpu: bool
    us: float
    exposed_us: float
    share: float
    exposed_share: float
    collectives: tuple[Collectives, ...]
    nvlink_gb_s: float | None
    pcie_gb_s: float | None


class _Done(NamedTuple):
    """A collective's time (ns), and what its description says."""

    start: int
    end: int
    kind: str
    group: str
    size: int | None
    bytes: int | None


def communication(
    trace: Trace, steps: Sequence[Step], by_device: Sequence[Parts], start: int, end: int, steady: GpuTime | None
) -> Communication | None:
    """Return the communication of the measured steps, whose window lies between two stamps (ns); None without any.

    by_device: the parts of that window. steady: the GPU's time by which the table of the step's time is divided.
    """
    parts, on_cpu = busiest(by_device), False
    calls = Calls(trace.rank or Rank(-1, 0))
    if parts is None:
        on_cpu = any(collective_on_cpu(name) for name in trace.op_names)
        parts = cpu_parts(steps, start, end) if on_cpu else None
    if parts is None or not parts.communication or end <= start:
        return None
    done = list(_on_cpu(steps, calls) if on_cpu else _on_gpu(steps, calls, parts.device))
    ranks = max([calls.rank.world_size, *[one.size for one in done if one.size is not None]]) or None
    here = len({one.device for one in by_device if one.communication}) or 1
    exposed = Lengths(parts.exposed_communication)
    whole, exposed_us = (end - start) / 1e3, length(parts.exposed_communication) / 1e3
    exposed_share = exposed_us / whole
    if steady is not None and (steady_us := steady.busy_us + steady.idle_us):
        exposed_share = steady.exposed_communication_us / steady_us
    alike = grouped((one[2:], one) for one in done)
    peaks = None if on_cpu else common_peaks(trace.devices)
    found = [_collectives(some, exposed, len(steps)) for some in alike.values()]
    return Communication(
        ranks=ranks,
        is_one_of_many=here == 1 if ranks is None else ranks > here,
        on_cpu=on_cpu,
        us=length(parts.communication) / 1e3 / len(steps),
        exposed_us=exposed_us / len(steps),
        share=length(parts.communication) / 1e3 / whole,
        exposed_share=exposed_share,
        collectives=tuple(sorted(found, key=lambda one: -one.per_step * one.us)),
        nvlink_gb_s=peaks and peaks.nvlink,
        pcie_gb_s=peaks and peaks.pcie,
    )


def _on_gpu(steps: Sequence[Step], calls: Calls, device: int | str) -> Iterator[_Done]:
    for one, ran in described_on_gpu(steps, calls):
        if one.device != device:
            continue
        of_calls, groups = list(calls.found), list(calls.groups.values())
        known = [of_calls[call] for call, _ in ran if call is not None]
        # Coalesced calls share one kernel. Its bandwidth is known if they are alike and all described.
        if len(known) < len(ran) or len({(call.kind, call.group) for call in known}) != 1:
            yield _Done(one.start, one.end, "", "", None, None)
            continue
        first, group = known[0], groups[known[0].group]
        bytes_ = None if any(call.bytes is None for call in known) else sum(call.bytes for call in known)
        # torch describes a group without a description of its own as "undefined".
        named = group.name.partition(" ")[0] if group.description in ("", "undefined") else group.description
        yield _Done(one.start, one.end, first.kind, named, group.size, bytes_)


def _on_cpu(steps: Sequence[Step], calls: Calls) -> Iterator[_Done]:
    for step in steps:
        for op, said in described_on_cpu(step, calls.rank):
            yield _Done(said.start, op.end, said.kind or "", said.backend, said.size, said.bytes)


def _collectives(some: Sequence[_Done], exposed: Lengths, steps: int) -> Collectives:
    first, times = some[0], [(one.end - one.start) / 1e3 for one in some]
    factor, us = BUS_FACTOR.get(first.kind), median(times)
    known = factor and first.bytes and min(times) and first.size is not None and first.size > 1
    sent = first.bytes / 1e3 * factor(first.size) if known else 0.0
    return Collectives(
        *first[2:],  # kind, group, size and bytes
        per_step=len(some) / steps,
        us=us,
        exposed_us=sum(exposed.between(one.start, one.end) for one in some) / 1e3 / steps,
        bus_gb_s=sent / us if known else None,
        best_gb_s=sent / min(times) if known else None,
    )
