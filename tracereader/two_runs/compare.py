"""The changes between two runs' typical steps, and the similarities: flags, GPU work and ops."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path

import msgspec

from tracereader.figures.gpu_work import GpuWork
from tracereader.figures.summary import Summary
from tracereader.trace.labels import COMPILE_ROWS
from tracereader.two_runs.side import Side


def with_like_families(summaries: Sequence[Summary]) -> list[Summary]:
    """Return the summaries with the families that kernels of CUDA graphs have in a run that records their ops.

    A name alone often does not show whether a kernel computes a product or a convolution, and a replay has no ops.
    """
    known: dict[str, Counter] = defaultdict(Counter)
    for summary in summaries:
        for one in summary.gpu_work:
            if "::" in one.asked_by:
                known[one.name][one.family] += 1
    family_of = {name: families.most_common(1)[0][0] for name, families in known.items()}
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


class FlagChange(msgspec.Struct, frozen=True):
    """A flag of a numbered script with its value in each run as text; True: given without a value, None: not given."""

    name: str
    before: str | bool | None
    after: str | bool | None


class InputsChange(msgspec.Struct, frozen=True):
    """An op that two runs call equally often, with the tensors that only one of them has, the most frequent first."""

    op: str
    before: tuple[str, ...]
    after: tuple[str, ...]


class OpsChange(msgspec.Struct, frozen=True):
    """The ops of two steps by name. rows_new: torch.compile's rows that only the second step has.

    calls: names in both steps with different numbers of calls, and both numbers.
    """

    gone: tuple[str, ...]
    new: tuple[str, ...]
    rows_new: tuple[str, ...]
    calls: dict[str, tuple[int, int]]
    same: tuple[str, ...]


def only_one_has_gpu_work(first: Side, other: Side) -> bool:
    """Return whether the runs are recordings of different kinds, whose times do not compare."""
    return first.summary.has_gpu_work != other.summary.has_gpu_work


def only_one_has_steps(first: Side, other: Side) -> bool:
    """Return whether the figures per step do not compare, because one run's whole recording counts as one step."""
    return first.summary.source.has_steps != other.summary.source.has_steps


def compare_by_step(first: Side, other: Side) -> bool:
    """Return whether the times of the two runs' steps can be compared."""
    return not only_one_has_steps(first, other) and not only_one_has_gpu_work(first, other)


def flags(first: Side, other: Side) -> list[FlagChange]:
    """Return the flags that two runs of numbered scripts share and that have different values."""
    before, after = (
        {name: _value(flag) for name, flag in side.summary.source.facts.flags.items()} for side in (first, other)
    )
    return [FlagChange(name, was, after[name]) for name, was in before.items() if after.get(name, was) != was]


def _value(flag: object) -> str | bool | None:
    return None if flag is None or flag is False else True if flag is True else str(flag)


def ops(first: Side, other: Side) -> OpsChange:
    """Return the ops that only one of two steps calls, and those that both call. A kernel's name is no op."""
    new = sorted(set(other.ops) - set(first.ops))
    kept = sorted(set(first.ops) & set(other.ops))
    calls = {name: (first.ops[name], other.ops[name]) for name in kept if first.ops[name] != other.ops[name]}
    return OpsChange(
        gone=tuple(sorted(set(first.ops) - set(other.ops))),
        new=tuple(name for name in new if name not in COMPILE_ROWS and name not in other.work),
        rows_new=tuple(name for name in new if name in COMPILE_ROWS),
        calls=calls,
        same=tuple(name for name in kept if name not in calls),
    )


def inputs(first: Side, other: Side) -> list[InputsChange]:
    """Return the tensors that only one run has, for ops called equally often in both runs, the costliest op first."""
    found = []
    times = other.summary.cpu.ops
    for name in sorted(times, key=lambda name: -times[name].self_us):
        before, after = (Counter(side.summary.cpu.inputs.get(name)) for side in (first, other))
        if before and after and before != after and before.total() == after.total():
            gone, new = (tuple(one for one, _ in some.most_common()) for some in (before - after, after - before))
            found.append(InputsChange(name, gone, new))
    return found


def graphs(first: Side, other: Side) -> tuple[list[str], list[str]] | None:
    """Return the hashes of the graphs that two compiled runs call; None if they are equal."""
    if not first.graphs or not other.graphs or first.graphs == other.graphs:
        return None
    return first.graphs, other.graphs
