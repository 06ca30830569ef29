"""The changes of a run on several GPUs. They need the traces of all ranks."""

import bisect
import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from statistics import fmean, median

import msgspec

from tracereader import progress
from tracereader.changes import prices
from tracereader.changes.catalogue import CHANGES, each_priced
from tracereader.changes.change import Change, change
from tracereader.changes.context import Case
from tracereader.changes.opportunity import Opportunity, Proposal, Unprofiled, priced, worth_showing
from tracereader.changes.roofline import TWO_BYTES, moving_us
from tracereader.figures import summarize
from tracereader.figures.gpu_time import is_communication
from tracereader.figures.hardware import common_peaks
from tracereader.figures.ranks import Collective, RankFigures, RanksSummary
from tracereader.findings import ranks as findings
from tracereader.findings.finding import WORTH_SHOWING, duration, size
from tracereader.replay import Graph, Reason, Refused, graph_of
from tracereader.replay.changes import with_cpu_speed, with_durations
from tracereader.trace import Trace, TraceError, Work, read, start_of
from tracereader.trace.families import says
from tracereader.trace.grouped import grouped, totals
from tracereader.trace.intervals import Lengths, union
from tracereader.trace.labels import ALL_REDUCE, AUTOGRAD, DESCRIBES_COLLECTIVE, OLDER_FSDP, SHARDING
from tracereader.trace.types import dtype_of
from tracereader.two_runs.same_jobs import SHARDED, evens_out, evens_out_stages, sends_half, splits_more

OF_TRAINING = ("all-reduce", *SHARDED)
# Bytes read and written to cast float32 to bf16, divide by the number of ranks and cast back, for each of four bytes.
CASTS = 4
EVEN_OUT = {
    "computes": "give each rank the same amount of work (sort or pack samples by length, split layers evenly)",
    "copies": "look at the copies of that rank, and at what else uses its host's memory",
    "launches late": "look at what that rank's CPU does between its launches, and at what else uses it",
    "waits for data": "give that rank's DataLoader more workers, or samples that cost the same everywhere",
    "idle": "read that rank's trace alone",
}


class RankCase(msgspec.Struct, frozen=True, dict=True):
    """The input of a proposal: all ranks' figures, and the graph of the rank that is replayed."""

    summary: RanksSummary
    rank: RankFigures
    graph: Graph

    @property
    def trace(self) -> Trace:
        return self.graph.trace

    @cached_property
    def computing(self) -> list[Work]:
        kernels = [one for step in self.trace.steps for one in step.work if one.kind == "kernel"]
        return [one for one in kernels if not is_communication(one)]

    @cached_property
    def matched(self) -> dict[Work, Collective]:
        """Return this rank's communication kernels, each with its collective that is matched over the ranks."""
        return dict(self._of_kernels(self.summary.matched))

    @cached_property
    def messages(self) -> list[tuple[Work, Collective]]:
        """Return this rank's communication kernels with their messages. One kernel may have several."""
        return list(self._of_kernels(self.summary.messages))

    def _of_kernels(self, communication: Sequence[Collective]) -> Iterator[tuple[Work, Collective]]:
        number, summary = self.rank.rank, self.summary
        ahead = round(summary.clocks.ahead_us[number] * 1e3)
        zero = self.trace.base_ns + self.trace.zero_us * 1000 - ahead - summary.origin_ns
        by_start = {zero + one.start: one for step in self.trace.steps for one in step.work if is_communication(one)}
        for one in communication:
            at = round(one.starts_us[one.ranks.index(number)] * 1e3) if number in one.ranks else None
            if at in by_start:
                yield by_start[at], one

    def per_step(self, us: float) -> str:
        """Return the average over the rank's steps of a time that is summed over its window, in words."""
        return duration(findings.per_step(self.rank, us))


def can_propose(summary: RanksSummary) -> bool:
    """Return whether changes can be proposed: to ranks on GPUs whose communication is matched."""
    return summary.on_gpu and bool(summary.matched or summary.messages)


def opportunities(
    summary: RanksSummary, limit: int, show: Callable[[str], None] = progress.nowhere
) -> tuple[Opportunity, ...] | Refused:
    """Return the changes that are worth trying, the largest saving first.

    They are the changes of all ranks, and those that the trace of the rank that sets the pace suggests by itself. The
    trace of each replayed rank, at most three, is read again. limit: the most bytes of JSON, as for read(). show: shows
    what is done next. Returns Refused if one of these traces cannot be read on this machine.
    """
    if not can_propose(summary):
        return ()
    pace = findings.pace_setter(summary)
    by_rank: dict[str, tuple[RankFigures, list[Change]]] = {pace.trace: (pace, [])}
    for each in RANK_CHANGES:
        if (rank := each.replayed(summary)) is not None:
            by_rank.setdefault(rank.trace, (rank, []))[1].append(each)
    # All ranks' steps are given without the profiler, or none, so that they can be compared.
    unprofiled = findings.unprofiled_us(summary)
    found: list[Opportunity] = []
    without: Unprofiled | None = None
    for path, (rank, changes) in by_rank.items():
        show(f"reading rank {rank.rank} again")
        try:
            trace = read(Path(path), limit)
        except TraceError:  # the file may have been removed, or its server stopped
            return Refused(Reason.NOT_READ)
        show(f"replaying the steps of rank {rank.rank}")
        if isinstance(graph := graph_of(trace), Refused):
            return graph
        case = RankCase(summary, rank, graph)
        if rank is pace:
            without = Unprofiled.of(graph, unprofiled)
        # A rank that waits for others does not show how much shorter its CPU time is without the profiler. So it is
        # taken to become shorter by the same factor as that of the rank that sets the pace, which is read first.
        proposals = ((each, proposal) for each in changes if (proposal := each.propose(case)) is not None)
        found += [priced(each.name, each.title, proposal, without) for each, proposal in proposals]
        if rank is pace:
            measured = msgspec.structs.replace(summarize(trace), unprofiled_step_us=unprofiled)
            alone = each_priced(Case(trace, measured, graph), show)
            found += [_at_pace(one, shorter, summary, rank) for one, shorter in alone]
        del trace, graph, case
        gc.collect()  # the next rank needs the memory
    return worth_showing(found)


def _at_pace(one: Opportunity, shorter_us: float, summary: RanksSummary, pace: RankFigures) -> Opportunity:
    """Return what a change of the rank that sets the pace saves, if all ranks make it.

    The step is not shorter than the other ranks' time without their waits, without late launches and without the GPU
    work that the change saves on each rank (shorter_us per step).
    """
    others = [other for other in summary.ranks if other is not pace]
    works = [findings.usual(summary, other, None, lambda step: step.us - step.idle_not_launched_us) for other in others]
    waits = [findings.per_step(other, other.waited_exposed_us + other.message_waits.us) for other in others]
    least = max([0.0, *(us - waited - shorter_us for us, waited in zip(works, waits, strict=True))])
    after, without = max(one.step_us_after, least), one.unprofiled_step_us_after
    return msgspec.structs.replace(
        one,
        step_us_after=after,
        saves_us=one.step_us - after,
        basis="bound" if one.step_us_after < least else one.basis,
        evidence=f"rank {pace.rank}: {one.evidence}",
        estimated_savings=None,  # other ranks limit the step, too
        replayed_savings=None,
        unprofiled_step_us_after=max(without, least) if without is not None else None,
    )


def _keeps_pace(summary: RanksSummary) -> RankFigures | None:
    """Return the rank that sets the pace; None if it has little exposed communication."""
    one = findings.pace_setter(summary)
    return one if findings.share(one, one.total.exposed_communication_us) > WORTH_SHOWING else None


def _longer_compute(case: RankCase, more_us: Mapping[Work, float]) -> dict[Work, float]:
    """Return the times (µs) of the kernels that run when these collectives start, with the time that each one adds."""
    computing = sorted(case.computing, key=start_of)
    starts, times = [one.start for one in computing], {}
    for collective, us in more_us.items() if computing else ():
        beside = computing[max(0, bisect.bisect_right(starts, collective.start) - 1)]
        times[beside] = times.get(beside, beside.us) + us
    return times


@change("communicate in bf16 instead of float32", replayed=_keeps_pace, jobs_followed=sends_half)
def in_two_bytes(case: RankCase) -> Proposal | None:
    """Return the proposal to communicate float32 gradients, and FSDP's float32 parameters, in bf16.

    Their transfers take half as long. DDP's gradients are cast before and after it. FSDP casts its own part only, and
    the casts of autocast are gone, so nothing is added there.
    """
    found = {work: one for work, one in case.matched.items() if one.kind in OF_TRAINING and _is_wide(work, one)}
    if not found or (peaks := common_peaks(case.trace.devices)) is None:
        return None
    of_ddp = [work for work, one in found.items() if one.kind == "all-reduce"]
    gathers = any(one.kind == "all-gather" for one in found.values())
    if gathers and not _multiplies_in_two_bytes(case.computing):
        return None  # the products would change, too
    times = {work: work.us - one.transfer_us / 2 for work, one in found.items()}
    times |= _longer_compute(case, {work: moving_us(CASTS * found[work].bytes, peaks) for work in of_ddp})
    moved = findings.per_step(case.rank, sum(one.bytes for one in found.values()))
    what = "float32 parameters and gradients" if gathers else "float32 gradients"
    how = "model.register_comm_hook(None, default_hooks.bf16_compress_hook)"
    if len(of_ddp) < len(found):
        of_policy = "param_dtype" if gathers else "reduce_dtype"  # without the latter, the former is that of both
        how = f"fully_shard(…, mp_policy=MixedPrecisionPolicy({of_policy}=torch.bfloat16))"
        if any(name.startswith(OLDER_FSDP) for name in case.trace.op_names):
            how = f"FullyShardedDataParallel(…, mixed_precision=MixedPrecision({of_policy}=torch.bfloat16))"
    return Proposal(
        with_durations(case.graph, times),
        f"rank {case.rank.rank} communicates {size(round(moved))} of {what} per step, whose transfers take "
        f"{case.per_step(sum(one.transfer_us for one in found.values()))}",
        f"{how}, if the training converges with gradients in bf16",
        assumed=True,
    )


def _is_wide(work: Work, collective: Collective) -> bool:
    """Return whether DDP or FSDP communicates float32 values by this collective."""
    above = list(work.launch.above()) if work.launch is not None else []
    named = tuple(op.name for op in above)
    of_fsdp = any(name.startswith(SHARDING) for name in named)
    of_ddp = ALL_REDUCE in named and any(name.startswith(AUTOGRAD) for name in named)
    described = next((op for op in above if op.name == DESCRIBES_COLLECTIVE), None)
    if described is None or not collective.bytes or not (of_ddp if collective.kind == "all-reduce" else of_fsdp):
        return False
    dtype = dtype_of(described.args.get("dtype"))
    return dtype is not None and dtype.name == "fp32"


def _multiplies_in_two_bytes(computing: Sequence[Work]) -> bool:
    """Return whether most of the time of matrix products is in bf16 or fp16, by their kernels' names."""
    products = [one for one in computing if says(one).multiplies]
    times = totals((says(one).parts.get("types") in TWO_BYTES, one.dur) for one in products)
    return times[True] > times[False]


def _next_after_the_straggler(summary: RanksSummary) -> RankFigures | None:
    """Return the rank that waits least apart from the straggler; None without a straggler."""
    slow = findings.straggler(summary)
    others = [one for one in summary.ranks if one is not slow]
    return min(others, key=lambda one: one.waited_exposed_us) if slow and others else None


@change("even out the ranks", replayed=_next_after_the_straggler, jobs_followed=evens_out)
def balance_ranks(case: RankCase) -> Proposal | None:
    """Return the proposal to remove the waits for late ranks from all collectives.

    Compute beside these waits becomes shorter, too. If the late rank computes longer with as many kernels as the
    others, its work goes to all ranks, so that each computes as long as the mean rank. A late rank with more kernels
    does work that the others do not do. If it launches late, the ranks' CPUs stay as different as they are.
    """
    slow, why = findings.straggler(case.summary), findings.loss(case.summary)
    times = {work: work.us - one.waits_us[one.ranks.index(case.rank.rank)] for work, one in case.matched.items()}
    if not times:
        return None
    waits = Lengths(union((work.start, work.end - round(us * 1e3)) for work, us in times.items()))
    beside = {one: waits.between(one.start, one.end) / 1e3 for one in case.computing}
    times |= {one: one.us - prices.BESIDE_A_WAIT * us for one, us in beside.items()}
    waited = case.per_step(case.rank.waited_exposed_us)
    evidence = f"rank {case.rank.rank} waits {waited} of each step for rank {slow.rank}, while it computes nothing"
    computes = why is not None and why.reasons and why.reasons[0].part == "computes"
    most_kernels = max(one.kernels for one in case.summary.ranks if one is not slow)
    spread = bool(computes) and slow.kernels <= (1 + WORTH_SHOWING) * most_kernels
    if spread:
        figure = findings.PARTS["computes"]
        of_ranks = {one.rank: findings.usual(case.summary, one, None, figure) for one in case.summary.ranks}
        mean_us = fmean(of_ranks.values())
        times |= {one: times[one] * mean_us / of_ranks[case.rank.rank] for one in case.computing}
        evidence += f"; the mean rank computes {duration(mean_us)}"
    late = why is not None and any(one.part == "launches late" for one in why.reasons)
    return Proposal(
        with_durations(with_cpu_speed(case.graph, _as_slow(case, slow)) if late else case.graph, times),
        evidence,
        EVEN_OUT[why.reasons[0].part if why is not None and why.reasons else "idle"],
        assumed=spread or any(beside.values()),
        title=f"let rank {slow.rank} keep up with the others",
    )


def _as_slow(case: RankCase, slow: RankFigures) -> float:
    """Return how many times as long the replayed rank's CPU takes if it is as slow as that of another rank.

    CPUs differ from recording to recording: in six of eleven jobs of two equal ranks, one rank's took 1.1 to 1.5 times
    as long. Of two ranks, the late one may be slow by this chance. Of several, the others' median is the usual CPU.
    """
    others = [one for one in case.summary.ranks if one is not slow]
    times = [one.between_launches_us or 0.0 for one in (others if len(others) > 1 else [slow])]
    mine = case.rank.between_launches_us
    return max(1.0, median(times) / mine) if mine else 1.0


def _in_a_pipeline(summary: RanksSummary) -> RankFigures | None:
    """Return the rank that sets the pace of a pipeline, if it waits much for its first and last messages."""
    one = findings.pace_setter(summary)
    edges = one.message_waits.first_us + one.message_waits.last_us
    return one if findings.is_pipeline(summary) and findings.share(one, edges) > WORTH_SHOWING else None


@change("split the step into more microbatches", replayed=_in_a_pipeline, jobs_followed=splits_more)
def microbatches(case: RankCase) -> Proposal | None:
    """Return the proposal of twice as many microbatches of half the size, which halves filling and draining.

    The smaller kernels take longer together.
    """
    mine = [(work, message) for work, message in case.messages if message.ranks[1] == case.rank.rank]
    received = grouped((message.step, (work, message)) for work, message in mine)
    ends = [each for some in received.values() for each in (some[0], some[-1])]
    times = {work: work.us - message.waits_us[1] / 2 for work, message in ends}
    if not times:
        return None
    times |= {one: one.us * prices.SMALLER_IS_SLOWER for one in case.computing}
    waits = case.rank.message_waits
    edges = case.per_step(waits.first_us + waits.last_us)
    return Proposal(
        with_durations(case.graph, times),
        f"rank {case.rank.rank} waits {edges} of each step for its first and its last message, and half as long with "
        "twice as many microbatches of half the size",
        "more microbatches per step, or a schedule with a smaller bubble (interleaved 1F1B, zero bubble)",
        assumed=True,
    )


def _slowest_of_a_pipeline(summary: RanksSummary) -> RankFigures | None:
    """Return a rank of the stage that computes longest; None if the stages are alike."""
    slow = findings.slowest_stage(summary)
    return next((one for one in summary.ranks if slow and one.rank in slow.ranks), None)


@change("even out the stages of the pipeline", replayed=_slowest_of_a_pipeline, jobs_followed=evens_out_stages)
def balance_stages(case: RankCase) -> Proposal:
    """Return the proposal to spread the layers evenly, so that the slowest stage computes as long as the mean stage."""
    slow = findings.slowest_stage(case.summary)
    return Proposal(
        with_durations(case.graph, {one: one.us * slow.mean_us / slow.us for one in case.computing}),
        f"{findings.stage_in_words(slow)} computes {duration(slow.us)} per step, and the mean stage "
        f"{duration(slow.mean_us)}",
        "move layers from this stage to the others; the embedding and the output layer count, too",
        assumed=True,
        least_us=_filled_and_drained_us(case, slow),
    )


def _filled_and_drained_us(case: RankCase, slow: findings.SlowStage) -> float:
    """Return the time of a step of equal stages, which includes filling and draining the pipeline (µs).

    With m microbatches and p stages, a stage computes m of m + p - 1 equal times. Of two adjacent stages, each sends
    the other one message per microbatch.
    """
    pairs = [one for one in case.summary.pairs if one.places and abs(one.places[0] - one.places[1]) == 1]
    sent = min((one.messages for one in pairs), default=0) / max(1, len(case.summary.steps))
    return slow.mean_us * (sent + slow.stages - 1) / sent if sent else 0.0


RANK_CHANGES = (in_two_bytes, balance_ranks, microbatches, balance_stages)
# By the id of a change, how two jobs show that the second one makes it.
FOLLOWED = {one.name: one.jobs_followed for one in (*CHANGES, *RANK_CHANGES) if one.jobs_followed}


def made(before: RanksSummary, proposed: Sequence[Opportunity], after: RanksSummary) -> tuple[Opportunity, ...]:
    """Return those of the changes proposed for one job that another job shows. The others are not decided."""
    return tuple(one for one in proposed if (judge := FOLLOWED.get(one.change)) and judge(before, after))
