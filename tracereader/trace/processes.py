"""Picks one process of a trace that holds several, as tools write it that merge the traces of a job's ranks."""

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from pathlib import Path

import msgspec

from tracereader.trace.decoded import decoded_object, printable_text
from tracereader.trace.document import Event, TraceError
from tracereader.trace.grouped import totals
from tracereader.trace.labels import STEP
from tracereader.trace.slices import Op, Process, Work

NAMED = 3  # of many processes or files
# What a merging tool writes before a process's number: "[TP00-DP00] 1234" of SGLang. --export of this reader writes it
# into the names of processes: "rank 0 CPU".
BEFORE_A_NUMBER, RANK = re.compile(r"(.*?\w)[\W_]+\d+"), re.compile(r"\brank\W?\d+", re.I)
Pid = int | str | None


class Picked(msgspec.Struct, frozen=True):
    """The process that is read. processes: all of the trace; the read one comes first.

    owns: returns whether events of this pid belong to it. work: its own. unknown: the number of activities whose
    process the trace does not tell.
    """

    pid: Pid
    processes: tuple[Process, ...]
    owns: Callable[[Pid], bool]
    work: list[Work]
    unknown: int


def picked(
    path: Path,
    ops: Sequence[Op],
    tracks: Iterable[tuple],
    work: Sequence[Work],
    ties_of: Callable[[Sequence], Iterator],
    events: Sequence[Event | None],
    wanted: str | None,
) -> Picked | None:
    """Return the process to read: the wanted one, or the one with the most GPU work; None if the trace has only one.

    tracks: those of Python functions. ties_of: see tree.ties_of(). wanted: a part of the process's name. Raises
    TraceError if there is no such process, and if the launches of several processes have the same ids and nothing else
    tells which one launched what.
    """
    # A thread without ops may be a runtime's own, whose launches are those of the only process with ops.
    hosts = dict.fromkeys(track[0] for track in {*tracks, *map(attrgetter("track"), ops)})
    if len(hosts) > 1:
        hosts = dict.fromkeys(op.track[0] for op in ops if op.kind == "op" or op.name.startswith(STEP))
        hosts |= dict.fromkeys(track[0] for track in tracks)
    if len(hosts) < 2:
        if wanted is not None:
            raise TraceError(f"{path}: --process {wanted}: the trace holds one process only")
        return None
    hosts |= dict.fromkeys(op.track[0] for op in ops)
    names = _names(events)
    labels: dict[str, dict[Pid, None]] = defaultdict(dict)
    for pid in hosts:
        labels[_label(pid, names)][pid] = None
    callers: dict[int, dict[Pid, None]] = defaultdict(dict)
    calls = [op for op in ops if op.kind == "runtime"]
    for op, ties in zip(calls, ties_of(calls), strict=True):
        if ties.correlation is not None:
            callers[ties.correlation][op.track[0]] = None
    stepping = {op.track[0] for op in ops if op.name.startswith(STEP)}
    owners, is_unclear = _owners(work, list(ties_of(work)), callers, labels, names, stepping)
    if is_unclear:
        several = some_of([_name(pid, names) for pid in hosts])
        raise TraceError(
            f"{path}: launches of several processes ({several}) have the same ids, "
            "so it cannot be known which process launched what; read the trace of each process"
        )
    activities = Counter(owners)
    ns = totals((owner, one.dur) for one, owner in zip(work, owners, strict=True))
    slices = Counter(op.track[0] for op in ops)
    found = {pid: Process(_name(pid, names), activities[pid], ns[pid] / 1e3, pid in stepping) for pid in hosts}
    order = sorted(hosts, key=lambda pid: (-ns[pid], -activities[pid], pid not in stepping, -slices[pid]))
    chosen = order[0] if wanted is None else _wanted(path, wanted, found)
    order.remove(chosen)
    lanes = defaultdict(set)
    for one, owner in zip(work, owners, strict=True):
        lanes[one.track[0]].add(owner)

    def owns(pid: Pid) -> bool:
        if pid in hosts:
            return pid == chosen
        if pid in lanes:
            return chosen in lanes[pid]
        with_label = labels.get(_label(pid, names))
        return not with_label or chosen in with_label

    return Picked(
        pid=chosen,
        processes=tuple(found[pid] for pid in (chosen, *order)),
        owns=owns,
        work=[one for one, owner in zip(work, owners, strict=True) if owner == chosen],
        unknown=activities[None],
    )


def _owners(
    everything: Sequence[Work],
    ties: Sequence,
    callers: Mapping[int, Mapping[Pid, None]],
    labels: Mapping[str, Collection[Pid]],
    names: Mapping[Pid, str],
    stepping: Collection[Pid],
) -> tuple[list[Pid], bool]:
    """Return the process of each activity, None if it is not known; and whether several may have launched one.

    An activity belongs to the process with its launch. Where processes have calls of the same id, or none has it, the
    process with the same label counts, or the one process to which all other activities of the device are tied. Where
    nothing ties an activity, it is that of the only process with launches or, without any launch, with steps.
    """
    label_of = {pid: _label(pid, names) for pid in {one.track[0] for one in everything}}
    known: dict[tuple, Sequence[Pid]] = {}  # by label and id: many processes may have a call of one id
    may_be, places = [], []
    tied: dict[tuple, set] = defaultdict(set)
    for one, tie in zip(everything, ties, strict=True):
        key = label_of[one.track[0]], tie.correlation
        if (found := known.get(key)) is None:
            here, calling = labels.get(key[0], ()) if key[0] else (), callers.get(key[1], {})
            several = here and len(calling) > 1
            found = known[key] = (
                list(here) if len(here) == 1 else [pid for pid in calling if not several or pid in here]
            )
        may_be.append(found)
        places.append(place := (one.track[0], tie.device))
        if len(found) == 1:
            tied[place].add(found[0])
    launching = set().union(*tied.values()) or set().union(*callers.values()) or set(stepping)
    owners, is_unclear = [], False
    for found, place in zip(may_be, places, strict=True):
        owner = found[0] if len(found) == 1 else None
        if owner is None:
            may_own = tied.get(place) or (launching if not found else ())
            owner = next(iter(may_own)) if len(may_own) == 1 else None
            is_unclear = is_unclear or (bool(found) and owner not in found)
        owners.append(owner)
    return owners, is_unclear


def _names(events: Sequence[Event | None]) -> dict[Pid, str]:
    """Return the names of processes that a file gives beside their events."""
    said = (event for event in events if event is not None and event.ph == "M" and event.name == "process_name")
    named = ((event.pid, decoded_object(event.args).get("name")) for event in said)
    return {pid: name for pid, name in named if isinstance(name, str)}


def _label(pid: Pid, names: Mapping[Pid, str]) -> str:
    """Return what a merging tool wrote to tell one rank's processes and devices from others; "" without it."""
    if isinstance(pid, str) and (before := BEFORE_A_NUMBER.fullmatch(pid)):
        return before[1]
    rank = RANK.search(names.get(pid, ""))
    return rank[0] if rank else ""


def _name(pid: Pid, names: Mapping[Pid, str]) -> str:
    rank = RANK.search(names.get(pid, ""))
    return printable_text(rank[0] if rank else str(pid))


def _wanted(path: Path, wanted: str, found: Mapping[Pid, Process]) -> Pid:
    """Return the process of this name, or whose name contains it. Raises TraceError if there is no one such process."""
    same = [pid for pid, one in found.items() if wanted in (one.name, str(pid))]
    same = same or [pid for pid, one in found.items() if wanted.lower() in one.name.lower()]
    if len(same) == 1:
        return same[0]
    raise TraceError(f"{path}: --process {wanted}: the processes are {some_of([one.name for one in found.values()])}")


def some_of(names: Sequence[str], most: int = NAMED) -> str:
    """Return the first names, and how many others there are."""
    return ", ".join(names[:most]) + f" and {len(names) - most:,} more" * (len(names) > most)
