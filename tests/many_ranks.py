"""A thousand ranks, made from two recorded ones: what is kept of each trace, with known delays put in.

All ranks run the recorded program: the collectives of one step of two H200s, and the time between them. Each arrives at
a collective when its own work is done; the collective ends its recorded transfer after the last one has arrived.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise

from references import ROOT

from tracereader.figures import reading
from tracereader.figures.rank import Call, Group, Part, RankStep, RankTrace, Times

RECORDED = sorted((ROOT / "traces/reference/nvidia-h200-x2/06_training").glob("*_fsdp_x2_rank*.json.gz"))
ON_A_HOST = 8
# ns that each host's clock is ahead of the one before.
AHEAD = 37_123


@dataclass(frozen=True)
class Op:
    """A collective, and the work before it. Times in ns."""

    kind: str
    bytes: int
    work: int
    transfer: int


@dataclass(frozen=True)
class Delay:
    """What a rank does longer in forward, in ns. field: the part of its time that this is. steps: None for all.

    With another field than compute, the delay is in all steps.
    """

    ns: int
    field: str = "compute_us"
    steps: tuple[int, ...] | None = None


@cache
def recorded() -> tuple[Op, ...]:
    """The collectives of one step of the two ranks."""
    ranks, why = reading.read_ranks(RECORDED, 10**9, None)
    assert len(ranks) == 2 and not why
    name = ranks[0].steps[1].name
    some = [[part for part in one.parts if one.calls[part.call].step == name] for one in ranks]
    found, before = [], None
    for one, other in zip(*some, strict=True):
        call, last = ranks[0].calls[one.call], max(one, other, key=lambda part: part.start)
        work = last.start - before if before is not None else 1_000_000
        before = last.end
        assert call == ranks[1].calls[other.call]
        found.append(Op(call.kind, call.bytes, max(1_000, work), last.end - last.start))
    return tuple(found)


def made(
    count: int,
    collectives: int,
    steps: int = 3,
    tensor: int = 1,
    delays: Mapping[int, Delay] | None = None,
    slow: Mapping[tuple[int, ...], float] | None = None,
    described: bool = True,
) -> list[RankTrace]:
    """What is kept of `count` ranks, eight on a host, each with so many collectives.

    tensor: that many neighbours form a group, and ranks that far apart another one, in which every seventh collective
    and the last of a step are. slow: by the members of a group, how many times as long its transfers take. described:
    whether the groups have torch's descriptions.
    """
    delays, slow = delays or {}, slow or {}
    ops = recorded()
    program = [ops[at % len(ops)] for at in range(collectives // steps)]
    groups = _groups(count, tensor, described)
    of_group = [(at % 7 == 6 or at == len(program) - 1) if tensor > 1 else 0 for at in range(len(program))]
    calls: dict[Call, int] = {}
    runs = [_Run(delays.get(rank)) for rank in range(count)]
    for step in range(steps):
        for at, op in enumerate(program):
            arrived = [one.now + op.work + (rank * 7919 + at * 104_729) % 4000 for rank, one in enumerate(runs)]
            for rank, delay in delays.items() if at == 0 else ():
                arrived[rank] += delay.ns if delay.steps is None or step in delay.steps else 0
            call = Call(int(of_group[at]), op.kind, op.bytes, f"ProfilerStep#{step}")
            number = calls.setdefault(call, len(calls))
            for group in groups[of_group[at]]:
                last = max(arrived[rank] for rank in group.members)
                end = last + round(op.transfer * slow.get(group.members, 1))
                for rank in group.members:
                    runs[rank].parts.append(Part(number, None, arrived[rank], end))
                    runs[rank].now = end
            for one in runs if at == len(program) // 2 else ():
                one.middles.append(one.now)
        for one in runs:
            one.edges.append(one.now)
    return [_kept(rank, count, one, groups, tuple(calls)) for rank, one in enumerate(runs)]


@dataclass
class _Run:
    """What happens on one rank, in ns. edges: where its steps begin and end; middles: where backward begins in each."""

    delay: Delay | None
    now: int = 10**18
    parts: list[Part] = field(default_factory=list)
    edges: list[int] = field(default_factory=lambda: [10**18])
    middles: list[int] = field(default_factory=list)


def _groups(count: int, tensor: int, described: bool) -> list[list[Group]]:
    """The groups of each dimension: all ranks; or neighbours, and ranks that are as many apart."""
    if tensor == 1:
        return [[_group("0", "default_pg" * described, range(count))]]
    return [
        [_group("1", "mesh_tp" * described, range(first, first + tensor)) for first in range(0, count, tensor)],
        [_group("2", "mesh_dp" * described, range(first, count, tensor)) for first in range(tensor)],
    ]


def _group(name: str, description: str, ranks: Sequence[int]) -> Group:
    return Group(f"{name} {list(ranks)}", description, len(ranks), tuple(ranks))


def _kept(rank: int, count: int, run: _Run, groups: list[list[Group]], calls: tuple[Call, ...]) -> RankTrace:
    ahead = AHEAD * (rank // ON_A_HOST)
    steps = []
    for number, ((start, end), middle) in enumerate(zip(pairwise(run.edges), run.middles, strict=True)):
        phases = (_times("forward", start, middle, run, run.delay), _times("backward", middle, end, run, None))
        whole = _times(f"ProfilerStep#{number}", start, end, run, run.delay)
        steps.append(RankStep(**{name: getattr(whole, name) for name in Times.__struct_fields__}, phases=phases))
    total = {name: sum(getattr(one, name) for one in steps) for name in Times.__struct_fields__[1:]}
    return RankTrace(
        path=f"run_rank{rank}.json", rank=rank, world_size=count, host=f"node{rank // ON_A_HOST:03}",
        device="NVIDIA H200", on_gpu=True, start=run.edges[0] + ahead, end=run.edges[-1] + ahead,
        total=Times("", **total), steps=tuple(steps), left_out=(),
        groups=tuple(next(one for one in some if rank in one.members) for some in groups), calls=calls,
        parts=tuple(Part(one.call, one.seq, one.start + ahead, one.end + ahead) for one in run.parts),
        exposed=tuple(edge + ahead for one in run.parts for edge in (one.start, one.end)), hidden=0,
        unnamed=0, unprofiled_step_us=None, lane=None,
    )  # fmt: skip


def _times(name: str, start: int, end: int, run: _Run, delay: Delay | None) -> Times:
    """A stretch in which a rank computes, but where it communicates or is delayed otherwise."""
    communication = sum(one.end - one.start for one in run.parts if start <= one.start and one.end <= end) / 1e3
    us = (end - start) / 1e3
    found = {"compute_us": us - communication, "idle_us": 0.0, "idle_not_launched_us": 0.0, "idle_loading_us": 0.0}
    if delay is not None and delay.field != "compute_us":
        found["compute_us"] -= delay.ns / 1e3
        for part in {"idle_us", "idle_not_launched_us", delay.field}:
            found[part] += delay.ns / 1e3
    found |= {"communication_us": communication, "exposed_communication_us": communication, "exposed_copy_us": 0.0}
    return Times(name, us, **found)


def piped(
    stages: int,
    copies: int,
    microbatches: int,
    steps: int = 1,
    forward: int = 4_000_000,
    backward: int = 8_000_000,
    transfer: int = 50_000,
    slower: Mapping[int, float] | None = None,
    description: str = "mesh_pp",
) -> list[RankTrace]:
    """What is kept of the ranks of equal pipelines (GPipe): all forward passes of a step, then all backward passes.

    A stage posts each receive when its work before is done, and the message takes `transfer` after its sender has sent
    it. A stage of all copies is a run of neighbouring ranks. slower: by stage, how many times as long it computes.
    """
    found = []
    times = [(slower or {}).get(stage, 1.0) for stage in range(stages)]
    runs = [_Stage(stage) for stage in range(stages)]
    for step in range(steps):
        for one in runs:
            one.edges.append(one.now)
        for work, order in ((forward, runs), (backward, runs[::-1])):
            for before, one in zip([None, *order], order, strict=False):
                for _ in range(microbatches):
                    if before is not None:
                        one.receive(before, before.ready.pop(0), step, transfer)
                    one.now += round(work * times[one.stage])
                    one.ready.append(one.now)
            order[-1].ready.clear()
    count = stages * copies
    for one in runs:
        one.edges.append(one.now)
        for copy in range(copies):
            members = tuple(range(copy, count, copies))
            rank = members[one.stage]
            calls: dict[Call, int] = {}
            parts = []
            for source, destination, step, start, end in one.parts:
                call = Call(0, "send", 1 << 20, f"ProfilerStep#{step}", (members[source], members[destination]))
                parts.append(Part(calls.setdefault(call, len(calls)), None, start, end))
            found.append(one.kept(rank, count, Group(f"7 {members}", description, stages, members), calls, parts))
    return sorted(found, key=lambda one: one.rank)


@dataclass
class _Stage:
    """A stage of a pipeline. ready: when the messages to the next stage are sent. Times in ns."""

    stage: int
    now: int = 10**18
    ready: list[int] = field(default_factory=list)
    parts: list[tuple[int, int, int, int, int]] = field(default_factory=list)  # source, destination, step, start, end
    exposed: list[int] = field(default_factory=list)
    edges: list[int] = field(default_factory=list)

    def receive(self, other: "_Stage", sent: int, step: int, transfer: int) -> None:
        end = max(self.now, sent) + transfer
        self.parts.append((other.stage, self.stage, step, self.now, end))
        other.parts.append((other.stage, self.stage, step, sent, end))  # beside the sender's next work
        self.exposed += [self.now, end]
        self.now = end

    def kept(self, rank: int, count: int, group: Group, calls: Mapping[Call, int], parts: list[Part]) -> RankTrace:
        spans = list(zip(self.exposed[::2], self.exposed[1::2], strict=True))
        steps = []
        for number, (start, end) in enumerate(pairwise(self.edges)):
            us = sum(right - left for left, right in spans if start <= left < end) / 1e3
            whole = (end - start) / 1e3
            steps.append(RankStep(f"ProfilerStep#{number}", whole, whole - us, us, us, 0.0, 0.0, 0.0))
        total = {name: sum(getattr(one, name) for one in steps) for name in Times.__struct_fields__[1:]}
        return RankTrace(
            path=f"run_rank{rank}.json", rank=rank, world_size=count, host=None, device="NVIDIA H200", on_gpu=True,
            start=self.edges[0], end=self.edges[-1], total=Times("", **total), steps=tuple(steps), left_out=(),
            groups=(group,), calls=tuple(calls), parts=(), exposed=tuple(self.exposed), hidden=0,
            unnamed=0, unprofiled_step_us=None, lane=None, messages=tuple(sorted(parts, key=lambda one: one.start)),
        )  # fmt: skip
