"""Several jobs side by side, each of several ranks: the pace and its reason, and the figures."""

from collections.abc import Sequence
from functools import partial
from operator import attrgetter
from pathlib import Path
from statistics import median

import msgspec
from rich.console import Console

from tracereader.changes import ranks as rank_changes
from tracereader.changes.opportunity import Opportunity
from tracereader.command import BadInput
from tracereader.figures.ranks import RanksSummary
from tracereader.findings import ranks as findings
from tracereader.findings.finding import counted
from tracereader.replay import Refused
from tracereader.show.comparison import add_times, prediction
from tracereader.show.ranks import left_out, opened
from tracereader.show.text import console, paragraph, plain, print_columns, shown_path
from tracereader.show.view import View
from tracereader.two_runs import faster

SECTIONS = ("short", "steps")
FIGURES = {
    "compute": attrgetter("compute_us"), "exposed communication": attrgetter("exposed_communication_us"),
    "hidden communication": attrgetter("hidden_us"), "idle": attrgetter("idle_us"),
}  # fmt: skip


def explain(jobs: Sequence[Sequence[Path]], view: View, limit: int) -> None:
    """Print each job, compared with the first one. jobs: the traces of the ranks of each. Raises BadInput."""
    wanted = view.shown_of(SECTIONS, "a comparison of jobs")
    if view.step is not None or view.rank is not None:
        raise BadInput("--step and --rank are for one job: name the traces of one")
    gone = [[path for path in view.left_out if path.parent == paths[0].parent] for paths in jobs]
    views = [msgspec.structs.replace(view, left_out=some) for some in gone]
    summaries = [opened(paths, each, limit)[0] for paths, each in zip(jobs, views, strict=True)]
    for paths, one in zip(jobs, summaries, strict=True):
        if not one.steps:
            folder = shown_path(paths[0].parent)
            raise BadInput(f"{folder}: no step that all ranks have, so the jobs cannot be compared")
    ranks = [{each.rank for each in one.ranks} for one in summaries]
    if len({one.world_size for one in summaries}) == 1 and not set.intersection(*ranks):
        raise BadInput("the folders have different ranks of one job: read them together with --ranks")
    out = console()
    devices = list(dict.fromkeys(one.device for one in summaries))
    out.print(f"[bold]{plain(devices[0])}[/bold]" if len(devices) == 1 else "[yellow]the devices differ[/yellow]")
    for number, (paths, one) in enumerate(zip(jobs, summaries, strict=True), 1):
        device = f", {one.device}" if len(devices) > 1 else ""
        read = f"{len(one.ranks):,} of {counted(one.world_size, 'rank')}"
        paragraph(out, plain(f"{shown_path(paths[0].parent)}: {read}{device}"), f"{number}  ", "   ")
        for note in left_out(one):
            paragraph(out, plain(note), "   ", "   ")
    for name in wanted:
        out.print()
        {"short": partial(_in_short, limit=limit), "steps": _figures}[name](out, summaries)


def _in_short(out: Console, summaries: Sequence[RanksSummary], limit: int) -> None:
    """Print how much faster each job is than the first one, why, and what the first one's report predicted."""
    first = summaries[0]
    found = rank_changes.opportunities(first, limit)
    proposed = () if isinstance(found, Refused) else found
    for number, one in enumerate(summaries[1:], 2):
        who, than = ("the second", "") if len(summaries) == 2 else (f"job {number}", "job 1")
        paragraph(out, plain(f"{who} {faster.pace(findings.step_us(first), findings.step_us(one), than)}"), rest="    ")
        for text in _beside(first, one, rank_changes.made(first, proposed, one)):
            paragraph(out, plain(text), "  · ", "    ")


def _beside(first: RanksSummary, one: RanksSummary, made: Sequence[Opportunity]) -> list[str]:
    """Return the pace without the profiler, the rank whose time changed most, and the predictions for this job."""
    unprofiled = [findings.unprofiled_us(each) for each in (first, one)]
    found = [] if None in unprofiled else [f"without the profiler it {faster.pace(*unprofiled)}"]
    if changed := _changed(first, one):
        found.append(changed)
    return found + [prediction(each, "the first's", [findings.step_us(one)], unprofiled[1]) for each in made]


def _changed(first: RanksSummary, one: RanksSummary) -> str:
    """Return a sentence on the figure and the rank with the largest change; "" if the steps are equally long."""
    if faster.is_alike(findings.step_us(first), findings.step_us(one)):
        return ""
    changes = []
    for each, same in ((each, same) for each in one.ranks for same in first.ranks if each.rank == same.rank):
        for name, figure in FIGURES.items():
            was, now = findings.usual(first, same, None, figure), findings.usual(one, each, None, figure)
            changes.append((abs(now - was), each.rank, name, was, now))
    if not changes:
        return ""
    _, rank, name, was, now = max(changes)
    return f"the largest change: rank {rank}, {name}, {findings.ms(now)} per step instead of {findings.ms(was)}"


def _figures(out: Console, summaries: Sequence[RanksSummary]) -> None:
    """Print times and counts: a measure is a row, a job a column. Of each figure, the median and the most of a rank."""
    rows: list[tuple[str, ...]] = []
    times = partial(add_times, rows)
    times("step", [findings.step_us(one) for one in summaries])
    times("without profiler", [findings.unprofiled_us(one) for one in summaries])
    for name, figure in FIGURES.items():
        of_ranks = [[findings.usual(one, each, None, figure) for each in one.ranks] for one in summaries]
        times(f"{name}: median rank", [median(some) for some in of_ranks])
        times(f"{name}: most of a rank", [max(some) for some in of_ranks])
    regimes = [findings.regime(one) for one in summaries]
    if any(regimes):
        rows.append(("limited by", *(found[0] if found else "–" for found in regimes)))
    slow = [findings.straggler(one) for one in summaries]
    rows.append(("the others wait for", *("–" if one is None else f"rank {one.rank}" for one in slow)))
    for name, some in (("collectives", "matched"), ("messages", "messages")):
        counts = [len(getattr(one, some)) for one in summaries]
        if any(counts):
            rows.append((f"{name} of all steps", *(f"{count:,}" for count in counts)))
    print_columns(out, ("per step", *(f"job {number}" for number in range(1, len(summaries) + 1))), rows)
