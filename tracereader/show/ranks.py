"""Several ranks of one run: who waits for whom first, the evidence below it."""

import math
from collections.abc import Sequence
from concurrent.futures import Executor
from pathlib import Path

import msgspec
from rich.console import Console

from tracereader.command import BadInput
from tracereader.figures import reading
from tracereader.figures.rank import RankTrace
from tracereader.figures.ranks import RankFigures, RanksSummary, joined
from tracereader.findings import rank_changes
from tracereader.findings import ranks as findings
from tracereader.findings.finding import counted, duration, size
from tracereader.replay import Refused
from tracereader.show import lanes, opportunities
from tracereader.show.as_json import VERSION
from tracereader.show.report import lane_glyphs, lanes_wanted
from tracereader.show.text import Name, console, paragraph, percent, plain, print_columns, shown_path, strict_json
from tracereader.show.view import View
from tracereader.trace import STEP
from tracereader.trace.document import DEFAULT_LIMIT

SECTIONS = ("short", "try", "gpu", "steps", "work", "lanes")
RANKS_SHOWN = 8
STEPS_SHOWN = 3
WAITS = lanes.WAITS
KINDS_SHOWN = 5
PHASES_SHOWN = 5
# Of a rank's window, computing what was launched before its first step: on two H200s 7 to 23% where the CPU runs ahead.
MUCH_BEFORE = 0.02


def opened(
    paths: Sequence[Path],
    view: View,
    limit: int = DEFAULT_LIMIT,
    forced: bool = True,
    executor: Executor | None = None,
) -> tuple[RanksSummary, list[RankTrace]] | None:
    """The ranks compared with each other, and what is drawn of them. Raises BadInput.

    forced: also where at most one of them is of the same run as the others; else None then. executor: what reads them,
    as of read_ranks().
    """
    kept, not_read = reading.read_ranks(paths, limit, view.step, executor)
    if not kept:
        first = next(iter(not_read.items()))
        raise BadInput(f"no rank can be read: {first[0]}: {first[1]}")
    summary = joined(kept, not_read)
    if len(summary.ranks) < 2 and len(kept) > 1 and not forced:
        return None
    return summary, kept


# What of the summary each section is made of; the rest is always there.
SECTION_KEYS = {
    "short": ("in_short", "straggler", "loss", "slow_link"), "try": ("opportunities",), "gpu": ("ranks",),
    "steps": ("ranks",), "work": ("matched", "kinds"),
}  # fmt: skip


def _wanted(summary: RanksSummary, view: View) -> list[str]:
    """The sections that are asked for. Raises BadInput where there is none of them, or not the step."""
    wanted = [name for name in SECTIONS if view.shows(name)]
    if not wanted:
        raise BadInput(f"--only {','.join(view.only)}: a report on ranks has the sections {', '.join(SECTIONS)}")
    if view.step is not None and f"{STEP}{view.step}" not in summary.steps:
        held = f"{summary.steps[0]} to {summary.steps[-1]}" if summary.steps else "no step in common"
        raise BadInput(f"--step {view.step}: the ranks hold {held}")
    return wanted


def as_json(summary: RanksSummary, view: View, limit: int = DEFAULT_LIMIT) -> str:
    """One JSON document: times in µs, shares from 0 to 1; `matched` has each collective over its ranks.

    limit: of a trace that is read again, in bytes. Raises BadInput.
    """
    wanted = _wanted(summary, view)
    document = {"version": VERSION} | msgspec.to_builtins(summary)
    slow = findings.straggler(summary)
    document["collectives"] = len(summary.matched)
    document["straggler"] = slow.rank if slow else None
    document["loss"] = msgspec.to_builtins(findings.loss(summary))
    document["slow_link"] = msgspec.to_builtins(findings.slow_link(summary))
    document["in_short"] = findings.sentences(summary)
    if "try" in wanted:
        found = rank_changes.opportunities(summary, limit)
        document["opportunities"] = [] if isinstance(found, Refused) else msgspec.to_builtins(found)
    if view.only:
        kept = {key for section in wanted for key in SECTION_KEYS.get(section, ())}
        left_out = {key for keys in SECTION_KEYS.values() for key in keys} - kept
        document = {key: value for key, value in document.items() if key not in left_out}
    return strict_json(document)


def explain(summary: RanksSummary, traces: Sequence[RankTrace], view: View, limit: int = DEFAULT_LIMIT) -> None:
    """All that several ranks show: the answer first, the evidence below it. Raises BadInput.

    limit: of a trace that is read again, in bytes.
    """
    wanted = _wanted(summary, view)
    if not summary.on_gpu or not summary.matched:  # no change can be proposed
        wanted = [name for name in wanted if name != "try"]
    if not lanes_wanted(view):
        wanted.remove("lanes")
    sections = {
        "short": lambda out: _in_short(out, summary),
        "try": lambda out: opportunities.show(out, rank_changes.opportunities(summary, limit), view.all),
        "gpu": lambda out: _ranks(out, summary, view),
        "steps": lambda out: _steps(out, summary, view),
        "work": lambda out: _collectives(out, summary, view),
        "lanes": lambda out: _lanes(out, summary, traces),
    }
    out = console()
    paragraph(out, _header(summary), rest="  ")
    for number, name in enumerate(wanted):
        if number or name != "short":
            out.print()
        sections[name](out)


def _header(summary: RanksSummary) -> str:
    count = len(summary.ranks)
    words = [f"{count} of {counted(summary.world_size, 'rank')}"]
    if summary.steps:
        first, last = (name.removeprefix(STEP[:-1]) for name in (summary.steps[0], summary.steps[-1]))
        times = [findings.usual(summary, one, None, lambda step: step.us) for one in summary.ranks]
        named = first if first == last else f"{first} to {last}"
        words.append(f"{counted(len(summary.steps), 'step')} of {duration(max(times))}, {named}")
    words.append(f"{counted(len(summary.matched), 'collective')} matched")
    return f"[bold]{plain(summary.device)}[/bold] · {plain(' · '.join(words))}"


def _in_short(out: Console, summary: RanksSummary) -> None:
    for number, line in enumerate(findings.sentences(summary)):
        paragraph(out, plain(line), "[bold]in short[/bold]   " if not number else " " * 11, " " * 11)
    for line in notes(summary):
        paragraph(out, plain(line), "[yellow]note[/yellow] ", " " * 5)


def notes(summary: RanksSummary) -> list[str]:
    """What is missing, was left out, or could not be matched; and how far the clocks can be trusted."""
    found = []
    if summary.missing:
        missing = _numbers(summary.missing, summary.world_size - len(summary.ranks))
        found.append(f"missing: {missing}; who waits for them is not known")
    found += [f"left out: {shown_path(Path(path))}: {why}" for path, why in list(summary.not_read.items())[:5]]
    if len(summary.not_read) > 5:
        found.append(f"left out: {len(summary.not_read) - 5} more")
    for rank, names in list(summary.other_steps.items())[:3]:
        numbers = ", ".join(name.removeprefix(STEP[:-1]) for name in names[:4])
        found.append(f"rank {rank} has steps that not all others have: {numbers}")
    if summary.unmatched:
        found.append(f"not matched: {counted(summary.unmatched, 'collective')} of one rank without another's")
    if summary.unnamed:
        pieces = counted(summary.unnamed, "communication kernel")
        found.append(f"not matched: {pieces}; the traces do not name the collective or its group")
    clocks = summary.clocks
    if clocks.not_aligned:
        apart = _numbers(clocks.not_aligned, len(clocks.not_aligned))
        found.append(f"not matched: {apart}; no collective aligns that host's clock with the others")
    if clocks.aligned:
        most = max(clocks.ahead_us.values(), key=abs)
        whose = counted(len(clocks.hosts), "host") if clocks.hosts else counted(len(summary.ranks), "rank")
        found.append(
            f"clocks of {whose} aligned by the ends of their common collectives (up to "
            f"{duration(abs(most))} apart); nine in ten then agree within {duration(clocks.apart_us)}"
        )
    elif clocks.apart_us is not None and summary.on_gpu:
        found.append(f"clocks as recorded: nine in ten collectives end within {duration(clocks.apart_us)} on all ranks")
    return found


def _numbers(ranks: Sequence[int], count: int) -> str:
    """The first of `count` ranks by number."""
    more = f" and {count - 8:,} more" if count > 8 else ""
    return f"rank{'s' * (count > 1)} {', '.join(map(str, ranks[:8]))}{more}"


def _shown(summary: RanksSummary, view: View) -> list[RankFigures]:
    """The ranks that there is room for: those that are waited for most, and those that wait most."""
    if view.all or len(summary.ranks) <= RANKS_SHOWN:
        return list(summary.ranks)
    ordered = sorted(summary.ranks, key=lambda one: -one.others_waited_us)
    by_caused = ordered[: RANKS_SHOWN // 2]
    by_waiting = sorted(ordered[RANKS_SHOWN // 2 :], key=lambda one: -one.waited_exposed_us)[: RANKS_SHOWN // 2]
    chosen = {one.rank for one in [*by_caused, *by_waiting]}
    return [one for one in summary.ranks if one.rank in chosen]


def _ms(us: float) -> str:
    return f"{us / 1e3:,.1f}" if us >= 50 or not us else f"{us / 1e3:,.2f}"


def _ranks(out: Console, summary: RanksSummary, view: View) -> None:
    shown = _shown(summary, view)
    rows = [
        (
            f"rank {one.rank}",
            _ms(one.window_us),
            _ms(one.compute_us),
            _ms(one.exposed_communication_us),
            _ms(one.communication_us - one.exposed_communication_us),
            _ms(one.exposed_copy_us),
            _ms(one.idle_us),
            _ms(one.waiting_us),
            f"{one.arrived_last:,}",
        )
        for one in shown
    ]
    heads = ("in the window, ms", "window", "compute", "exposed", "hidden", "copies", "idle", "waited", "last")
    _print(out, heads, rows)
    if len(shown) < len(summary.ranks):
        out.print(
            f"{len(summary.ranks) - len(shown):,} more ranks are not shown; the shown ones cause most waiting "
            "or wait most"
        )
    # fsum: before Python 3.12 sum() leaves a rest where there is none.
    before = {one.rank: max(0.0, one.compute_us - math.fsum(step.compute_us for step in one.steps)) for one in shown}
    if summary.on_gpu and any(findings.share(one, before[one.rank]) > MUCH_BEFORE for one in shown):
        told = ", ".join(f"rank {rank} {findings.ms(us)}" for rank, us in before.items())
        said = (
            f"the window's compute includes work launched before the first step, which is not part of these "
            f"steps: {told}"
        )
        paragraph(out, said, "  ", "  ")


def _steps(out: Console, summary: RanksSummary, view: View) -> None:
    """By step, then by phase of the median step, what each rank takes."""
    shown = _shown(summary, view)
    if len(shown) > 4 and not view.all:
        slow, waiting = (
            max(shown, key=key) for key in (lambda one: one.others_waited_us, lambda one: one.waited_exposed_us)
        )
        shown = [one for one in shown if one in (slow, waiting)]
    names = summary.steps if view.step is None else (f"{STEP}{view.step}",)
    rows = []
    for name in names[: view.most(STEPS_SHOWN)]:
        for one in shown:
            step = next(step for step in one.steps if step.name == name)
            rows.append((f"{name.removeprefix(STEP[:-1])} rank {one.rank}", *_times(step)))
    heads = ("step, ms", "time", "compute", "exposed", "hidden", "copies", "idle", "not launched")
    if not rows:
        out.print("[bold]steps[/bold]: none that all ranks have")
        return
    _print(out, heads, rows)
    if len(names) > STEPS_SHOWN and not view.all:
        out.print(f"{len(names) - STEPS_SHOWN} more steps are not shown")
    rows = []
    for phase in _shown_phases(summary, view):
        for one in shown:
            figures = [findings.usual(summary, one, phase, figure) for figure in FIGURES]
            rows.append((Name(f"{phase}, rank {one.rank}"), *map(_ms, figures)))
    if rows:
        out.print()
        _print(out, ("phase, ms (each a median)", *heads[1:]), rows)


def _shown_phases(summary: RanksSummary, view: View) -> list[str]:
    """The phases that take a hundredth of any rank's step; of many the longest, in order."""
    longest = {
        phase: max(findings.usual(summary, one, phase, FIGURES[0]) for one in summary.ranks)
        for phase in findings.phases(summary)
    }
    step = max(findings.usual(summary, one, None, FIGURES[0]) for one in summary.ranks)
    chosen = sorted(longest, key=longest.get, reverse=True)[: view.most(PHASES_SHOWN)]
    return [phase for phase in longest if phase in chosen and longest[phase] > 0.01 * step]


def _print(out: Console, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table without the columns of what no rank did."""
    kept = [
        number for number, head in enumerate(heads)
        if head not in ("hidden", "copies", "not launched") or any(row[number] != "0.0" for row in rows)
    ]  # fmt: skip
    print_columns(out, [heads[number] for number in kept], [[row[number] for number in kept] for row in rows])


FIGURES = (
    lambda one: one.us,
    lambda one: one.compute_us,
    lambda one: one.exposed_communication_us,
    lambda one: one.communication_us - one.exposed_communication_us,
    lambda one: one.exposed_copy_us,
    lambda one: one.idle_us,
    lambda one: one.idle_not_launched_us,
)


def _times(one) -> list[str]:
    return [_ms(figure(one)) for figure in FIGURES]


def _collectives(out: Console, summary: RanksSummary, view: View) -> None:
    if not summary.kinds:
        out.print("[bold]collectives[/bold]: none matched")
        return
    shown = summary.kinds[: view.most(KINDS_SHOWN)]
    rows = [
        (
            one.kind + (f" of {one.size}" if one.size != summary.world_size else ""),
            size(one.bytes) if one.bytes else "–",
            f"{one.count:,}",
            duration(one.longest_wait_us),
            duration(one.transfer_us),
            f"{one.bus_gb_s:,.3g}" if one.bus_gb_s else "–",
            percent(one.of_best),
        )
        for one in shown
    ]
    heads = ("collective, medians", "message", "times", "wait", "transfer", "bus GB/s", "of best")
    print_columns(out, heads, rows)
    if len(shown) < len(summary.kinds):
        out.print(f"{len(summary.kinds) - len(shown):,} more sizes are not shown")
    for one in summary.ranks if len(summary.ranks) <= 2 or view.all else ():
        hidden = f"rank {one.rank}: {one.hidden:,} of {counted(one.collectives, 'collective')} overlap with compute "
        paragraph(out, f"{hidden}for at least half of their time", "  ", "    ")


def _lanes(out: Console, summary: RanksSummary, traces: Sequence[RankTrace]) -> None:
    """Two ranks on one axis: the one that is waited for most, and the one that waits most."""
    slow = max(summary.ranks, key=lambda one: one.others_waited_us)
    others = [one for one in summary.ranks if one is not slow]
    waiting = max(others, key=lambda one: one.waited_exposed_us, default=None)
    drawn = [one for one in summary.ranks if len(summary.ranks) <= 4 or one in (slow, waiting)]
    computed = {one.rank: one.lane for one in traces if one.path not in summary.not_read and one.lane}
    common = [computed[one.rank].step for one in drawn if one.rank in computed]
    if not common:
        return
    step, rows = common[0], []
    origin = min(one.start - round(summary.clocks.ahead_us[one.rank] * 1000) for one in traces if one.rank in computed)
    for one in drawn:
        lane, ahead = computed.get(one.rank), round(summary.clocks.ahead_us[one.rank] * 1000) + origin
        if lane and lane.step == step:
            pieces = [(start - ahead, end - ahead, name, False) for start, end, name in lane.pieces]
            rows.append((f"rank {one.rank}", pieces))
            rows.append(("  comm", _communication(summary, one.rank, step)))
    lines = lanes.draw_rows(rows, out.width, lane_glyphs(out))
    if lines:
        step = step.removeprefix(STEP[:-1])
        out.print(f"[bold]lanes of step {plain(step)}[/bold]: computing by phase; collectives, {WAITS} while one waits")
        for line in lines:
            out.print(plain(line), style=None if line.startswith("rank") else "green")


def _communication(summary: RanksSummary, rank: int, step: str) -> list[tuple[int, int, str, bool]]:
    """A rank's matched collectives of one step: what it waited in them, and the rest."""
    found = []
    for one in summary.matched:
        if one.step == step and rank in one.ranks:
            at = one.ranks.index(rank)
            start, waited, took = (round(some[at] * 1000) for some in (one.starts_us, one.waits_us, one.took_us))
            found += [(start, start + waited, "", True), (start + waited, start + took, one.kind, False)]
    return [piece for piece in found if piece[1] > piece[0]]
