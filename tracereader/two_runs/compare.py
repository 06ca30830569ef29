"""What a comparison of several runs asks first: their names and devices, and whether their steps compare."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import msgspec

from tracereader.figures.gpu_work import GpuWork
from tracereader.figures.summary import Summary
from tracereader.trace.grouped import grouped
from tracereader.two_runs.side import Side


def with_like_families(summaries: Sequence[Summary]) -> list[Summary]:
    """Return the summaries with the families that kernels of CUDA graphs have in a run that records their ops.

    A name alone often does not show whether a kernel computes a product or a convolution, and a replay has no ops.
    """
    work = (one for summary in summaries for one in summary.gpu_work)
    known = grouped((one.name, one.family) for one in work if "::" in one.asked_by)
    family_of = {name: Counter(families).most_common(1)[0][0] for name, families in known.items()}
    return [
        msgspec.structs.replace(summary, gpu_work=tuple([_of_family(one, family_of) for one in summary.gpu_work]))
        for summary in summaries
    ]


def _of_family(one: GpuWork, family_of: dict[str, str]) -> GpuWork:
    family = family_of.get(one.name, one.family)
    is_replayed = one.from_graph and "::" not in one.asked_by
    return msgspec.structs.replace(one, family=family) if is_replayed and family != one.family else one


def devices_of(side: Side) -> str:
    """Return the names of the devices that a run's GPU work ran on."""
    return ", ".join(dict.fromkeys(side.summary.source.devices)) or "CPU only"


def distinct_names(sides: Sequence[Side]) -> list[str]:
    """Return a distinct name for each run: a repeated name also shows its device, or else its folder."""
    names = [side.name for side in sides]
    devices = [devices_of(side) for side in sides]
    for more in (devices, [str(Path(side.summary.source.trace).parent) for side in sides]):
        times = Counter(names)
        if any(len({one for one, same in zip(more, names, strict=True) if same == name}) > 1 for name in times):
            names = [f"{name}, {one}" if times[name] > 1 else name for name, one in zip(names, more, strict=True)]
    return names


def only_one_has_gpu_work(first: Side, other: Side) -> bool:
    """Return whether the runs are recordings of different kinds, whose times do not compare."""
    return first.summary.has_gpu_work != other.summary.has_gpu_work


def only_one_has_steps(first: Side, other: Side) -> bool:
    """Return whether the figures per step do not compare, because one run's whole recording counts as one step."""
    return first.summary.source.has_steps != other.summary.source.has_steps


def compare_by_step(first: Side, other: Side) -> bool:
    """Return whether the times of the two runs' steps can be compared."""
    return not only_one_has_steps(first, other) and not only_one_has_gpu_work(first, other)
