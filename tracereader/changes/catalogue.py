"""All changes that a trace suggests, what each would save, and which of them another run makes."""

from collections.abc import Callable, Iterable, Iterator, Sequence

import msgspec

from tracereader import progress
from tracereader.changes import (
    attention,
    copies,
    equal_passes,
    fusion,
    graphs,
    inference,
    layout,
    less_data,
    optimizer,
    outside_a_loop,
    parallel,
    precision,
    waits,
    work_ahead,
)
from tracereader.changes.change import Change
from tracereader.changes.context import Case
from tracereader.changes.opportunity import Opportunity, is_worth_showing, largest_first, priced, worth_showing
from tracereader.changes.vetoes import VETOES
from tracereader.figures import Summary
from tracereader.figures.gpu_time import is_communication
from tracereader.figures.phases import place_in_forward
from tracereader.figures.users_code import function_around, users_frames
from tracereader.findings.device_words import holds_on, in_its_words
from tracereader.findings.finding import duration, listed
from tracereader.findings.recording import CPU_ERROR, changes_the_regime, is_gpu_bound, unexplained_us
from tracereader.findings.steps import busy_machine
from tracereader.replay import Graph, Reason, Refused, graph_of
from tracereader.trace import Trace, Work
from tracereader.two_runs.faster import step_us
from tracereader.two_runs.same_work import newly_compiled
from tracereader.two_runs.side import Side

WARM_UP = Change("warm_up", "warm up, then record again", "a warm step makes none of these calls")
# A change that one of these modules declares is included without further registration.
MODULES = (
    graphs, waits, optimizer, work_ahead, equal_passes, outside_a_loop, fusion, attention, layout, less_data,
    precision, copies, parallel, inference,
)  # fmt: skip
DECLARED = (one for module in MODULES for one in vars(module).values() if isinstance(one, Change))
BY_NAME = {one.name: one for one in (*DECLARED, WARM_UP)}
CHANGES = tuple(BY_NAME.values())


def opportunities(
    trace: Trace, summary: Summary, show: Callable[[str], None] = progress.nowhere
) -> tuple[Opportunity, ...] | Refused:
    """Return the changes worth trying, or the reason why the trace cannot be replayed.

    Each change is priced by itself. Several changes together do not save the sum. show: shows what is done next.
    """
    if not trace.work and busy_machine(summary):
        return Refused(Reason.DISTURBED)  # its ops' times say nothing then
    show("replaying the steps")
    first = warm_up(summary)
    if isinstance(graph := graph_of(trace, trace.steps[summary.typical_index], summary.recorded_step_us), Refused):
        return graph if first is None else (first,)
    alone = summary.communication is not None and summary.communication.is_one_of_many
    found = worth_showing(one for one, _ in each_priced(Case(trace, summary, graph), show, alone))
    return found if first is None else largest_first((first, *found))


def warm_up(summary: Summary) -> Opportunity | None:
    """Return the change of a step that makes calls which a warm step does not make; None without such calls.

    What other changes save is replayed without these calls.
    """
    cold, us = summary.recording.cold_us, summary.chosen.cpu_us
    if not cold:
        return None
    after = min(summary.recorded_step_us, us)
    kinds = listed(f"{what} {duration(time)}" for what, time in list(cold.items())[:3])
    return Opportunity(
        change=WARM_UP.name,
        title=WARM_UP.title,
        step_us=us,
        step_us_after=after,
        saves_us=us - after,
        basis="bound",
        evidence=f"the step makes calls that a warm step does not make: {kinds}; this time is in no other figure",
        how="call step() three times before the profiler starts, or use schedule(wait=1, warmup=1, active=3) over five "
        "iterations, with prof.step() after each",
    )


def each_priced(
    case: Case, show: Callable[[str], None] = progress.nowhere, alone: bool = False
) -> Iterator[tuple[Opportunity, float]]:
    """Yield the changes that a trace suggests and that are worth showing, and how much GPU work each saves.

    The GPU work is the summed time of one step's activities (µs). show: shows what is done next. alone: whether the
    trace is of one rank of many. Its collectives may have waited for the other ranks, and the wait would be in another
    collective then. So no collective becomes shorter.
    """
    unprofiled, frames = case.unprofiled, users_frames(case.trace.frames)
    backend, on_gpu = case.trace.backend, bool(case.trace.work)
    error = CPU_ERROR if case.summary.waits_for == "overhead" and not changes_the_regime(case.summary) else 0.0
    lost, gpu_bound = unexplained_us(case.summary), is_gpu_bound(case.summary)
    changes = [one for one in CHANGES if (one.propose if on_gpu else one.on_cpu)]
    for number, change in enumerate(changes, 1):
        show(f"replaying the steps with changes: {number} of {len(changes)}")
        vetoed = any(one.change == change.name and one.holds(case) for one in VETOES)
        if vetoed or (on_gpu and not holds_on(change.needs, backend)):
            continue
        if (proposal := (change.propose if on_gpu else change.on_cpu)(case)) is None:
            continue
        shortens = alone and (kept := _with_collectives(case, proposal.graph)) is not proposal.graph
        if shortens:
            proposal = msgspec.structs.replace(proposal, graph=kept)
        estimates = case.estimates_after(proposal.graph)
        one = priced(change.name, change.title, proposal, unprofiled, estimates, error, lost, gpu_bound)
        if shortens or is_worth_showing(one):
            dur, now = case.graph.dur, proposal.graph.dur  # the same list if GPU work does not change
            nodes = ((work, case.graph.activity[id(work)]) for work in (case.replayed.work if now is not dur else ()))
            shorter = {work: dur[node] - now[node] for work, node in nodes if now[node] < dur[node]}
            said = {name: in_its_words(getattr(one, name), backend) for name in ("title", "evidence", "how")}
            said["function"] = function_around(frames, _spans(case, proposal.graph, shorter)) if frames else None
            kernels = tuple(dict.fromkeys(work.name for work in shorter))
            one = msgspec.structs.replace(one, needs_other_ranks=shortens, kernels=kernels, **said)
            yield one, sum(shorter.values()) / 1e3


def _with_collectives(case: Case, after: Graph) -> Graph:
    """Return the graph in which each communication kernel takes at least its recorded time; the same if all do."""
    before = case.graph
    nodes = (before.activity[id(one)] for step in case.steps for one in step.work if is_communication(one))
    shorter = [node for node in nodes if after.dur[node] < before.dur[node]]
    if not shorter:
        return after
    edited = {name: getattr(after, name)[:] for name in ("dur", "lag", "via", "wait")}
    for name, values in edited.items():
        for node in shorter:  # it also follows what it follows now
            values[node] = getattr(before, name)[node]
    return msgspec.structs.replace(after, **edited)


def _spans(case: Case, after: Graph, shorter: Iterable[Work]) -> Iterator[tuple[tuple, int, int]]:
    """Yield what a change makes shorter (track, start, end; ns): CPU time, and the launches of GPU work.

    Work of backward counts for the op of forward that it belongs to, because backward's thread has no stacks.
    """
    for track, gone in after.gone.items():
        yield from ((track, start, end) for start, end in gone)
    for launch in (one.launch for one in shorter if one.launch is not None):
        track, start = place_in_forward(case.trace, launch)
        yield track, start, start + 1


class Checked(msgspec.Struct, frozen=True):
    """The proposals of a report that another run follows together, and that run's measured step (µs).

    also_compiled: whether that run also compiles its kernels, which none of these predictions includes.
    """

    proposals: tuple[Opportunity, ...]
    measured_us: float
    also_compiled: bool = False


def checked(before: Side, proposed: Sequence[Opportunity], after: Side) -> Checked | None:
    """Return the proposals of the first run's report that the second run follows; None if it follows none.

    The result is also None if the runs used different devices or batches of a language model. If only the second one
    waits for a DataLoader, only work that a DataLoader does ahead counts.
    """
    first, second = before.summary, after.summary
    if first.source.devices != second.source.devices or first.source.world_size != second.source.world_size:
        return None
    model = [one and (one.facts.phase, one.facts.batch) for one in (first.llm.decoding, second.llm.decoding)]
    if None not in model and model[0] != model[1]:
        return None
    found = tuple(one for one in proposed if (judge := BY_NAME[one.change].followed) and judge(before, after))
    if second.training.loading and not first.training.loading:
        found = tuple(one for one in found if one.change == "cpu_tensors")
    if not found:
        return None
    also_compiled = newly_compiled(before, after) and all(one.change == "cuda_graph" for one in found)
    return Checked(found, step_us(after), also_compiled)
