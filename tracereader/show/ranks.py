"""The report on several ranks of one run: first who waits for whom, then the evidence."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from operator import attrgetter
from pathlib import Path

import msgspec
from msgspec.structs import asdict, replace
from rich.console import Console

from tracereader import progress
from tracereader.changes import ranks as rank_changes
from tracereader.command import DEFAULT_LIMIT, BadInput, is_url
from tracereader.figures import reading
from tracereader.figures.rank import OUTSIDE_ANNOTATIONS, NotRead, RankTrace
from tracereader.figures.ranks import RankFigures, RanksSummary, joined, median_rate
from tracereader.findings import ranks as findings
from tracereader.findings.finding import counted, duration, size
from tracereader.replay import Refused
from tracereader.show import lanes, opportunities, text
from tracereader.show.as_json import PROPOSED, VERSION, Rows, form_of, written
from tracereader.show.report import lane_glyphs, lanes_wanted
from tracereader.show.text import Name, capitalized, console, paragraph, plain, print_columns
from tracereader.show.view import View
from tracereader.trace import STEP
from tracereader.trace.grouped import grouped, totals

SECTIONS = ("short", "try", "gpu", "steps", "work", "lanes")
RANKS_SHOWN = 8
STEPS_SHOWN = 3
KINDS_SHOWN = 5
COSTS_SHOWN = 5
PAIRS_SHOWN = 8
PHASES_SHOWN = 5
# The share of a rank's window in compute that was launched before its first step, from which the report says so. On two
# H200s it is 7 to 23% if the CPU runs ahead.
MUCH_BEFORE = 0.02


def opened(
    paths: Sequence[Path], view: View, limit: int = DEFAULT_LIMIT, forced: bool = True
) -> tuple[RanksSummary, list[RankTrace]] | None:
    """Return the summary of the ranks, and the data kept of each trace. Raises BadInput.

    forced: whether the traces must be the ranks of one run. If not, the result is None when only one of them remains.
    """
    kept, not_read = reading.read_ranks(paths, limit, view.step)
    not_read |= {str(path): NotRead("front_end") for path in view.left_out}
    if not kept:
        path, why = next(iter(not_read.items()))
        raise BadInput(f"no rank can be read: {path}: {findings.why_not_read(why)}")
    summary = joined(kept, not_read)
    if len(summary.ranks) < 2 and len(kept) > 1 and not forced:
        return None
    return summary, kept


# The members of --json that belong to a section. All other members are always there.
SECTION_KEYS = {
    "short": (
        "regime", "regime_because", "pace_setter", "in_short", "straggler", "loss", "slow_link", "costs", "slow_hosts",
        "pipeline",
    ),
    "try": ("opportunities",), "gpu": ("ranks",), "steps": ("ranks",),
    "work": ("matched", "groups", "kinds", "messages", "pairs"),
}  # fmt: skip
# The members of the short form in its order; None for a whole one.
SHORT: dict[str, Rows | None] = {
    **dict.fromkeys(("version", "form", "world_size", "device", "on_gpu", "regime", "regime_because", "in_short",
                     "notes", "pace_setter", "straggler")),
    "opportunities": PROPOSED,
    "costs": Rows(COSTS_SHOWN, ("ranks", "more_us", "reasons", "link")),
    "slow_hosts": Rows(COSTS_SHOWN),
    "loss": None,
    "loss.steps": Rows(10),
    "slow_link": None,
    "slow_link.ranks": Rows(10),
    "ranks": Rows(RANKS_SHOWN, ("rank", "trace", "host", "window_us", "compute_us", "exposed_communication_us",
                                "idle_us", "waited_for_others_us", "arrived_last", "others_waited_us",
                                "message_waits")),
    "steps": Rows(10),
    "collectives": None,
    "kinds": Rows(KINDS_SHOWN),
    "pipeline": None,
    "pairs": Rows(KINDS_SHOWN),
    "missing": Rows(10),
    "not_read": Rows(5),
}  # fmt: skip


def rank_as_builtins(one: RankFigures) -> dict:
    """Return a rank's figures under their names in --json and on the page. The window's figures are not nested."""
    found = msgspec.to_builtins(one)
    total = found.pop("total")
    return {"window_us": total["us"]} | {name: us for name, us in total.items() if name not in ("name", "us")} | found


def _of_one(summary: RanksSummary, rank: int) -> RanksSummary:
    """Return the summary with the figures, collectives, groups and messages of only one rank."""
    pairs = tuple(one for one in summary.pairs if rank in (one.source, one.destination))
    fields = ("matched", "groups", "messages")
    among = {name: tuple(one for one in getattr(summary, name) if rank in one.ranks) for name in fields}
    return replace(summary, ranks=tuple(one for one in summary.ranks if one.rank == rank), pairs=pairs, **among)


def _wanted(summary: RanksSummary, view: View) -> list[str]:
    """Return the sections to show. Raises BadInput if there is none, or if the rank or step is not in the traces."""
    wanted = view.shown_of(SECTIONS, "a report on ranks")
    if view.rank is not None and all(one.rank != view.rank for one in summary.ranks):
        raise BadInput(f"--rank {view.rank}: it is not among the {counted(len(summary.ranks), 'rank')} that were read")
    if view.step is not None and f"{STEP}{view.step}" not in summary.steps:
        held = f"{summary.steps[0]} to {summary.steps[-1]}" if summary.steps else "no step in common"
        raise BadInput(f"--step {view.step}: the ranks hold {held}")
    return wanted


def as_json(summary: RanksSummary, view: View, limit: int = DEFAULT_LIMIT, short: bool = False) -> str:
    """Return the JSON document: times in µs, shares from 0 to 1; `matched` has each collective over its ranks.

    limit: as for read(), of traces that are read again. short: unless `view` asks for more. Raises BadInput.
    """
    sections, form = _wanted(summary, view), form_of(view, short)
    kept = summary if view.rank is None else _of_one(summary, view.rank)
    slow, (regime, because) = findings.straggler(summary), findings.regime(summary) or (None, None)
    ranks = kept.ranks
    if form == "short" and len(ranks) > RANKS_SHOWN:
        first = _slow_and_waiting(summary)
        ranks = sorted(ranks, key=lambda one: (one not in first, -one.others_waited_us))
    document = {"version": VERSION, "form": form} | asdict(kept)
    document |= {
        "ranks": [rank_as_builtins(one) for one in ranks],
        "not_read": {path: findings.why_not_read(why) for path, why in summary.not_read.items()},
        "collectives": len(summary.matched),
        "straggler": slow.rank if slow else None,
        "loss": findings.loss(summary),
        "slow_link": findings.slow_link(summary),
        "costs": findings.costs(summary),
        "pipeline": findings.is_pipeline(summary),
        "slow_hosts": findings.slow_hosts(summary),
        "pace_setter": findings.pace_setter(summary).rank,
        "regime": regime,
        "regime_because": because,
        "in_short": _told(summary, view),
        "notes": notes(summary),
    }
    if "try" in sections:
        found = rank_changes.opportunities(summary, limit)
        document["opportunities"] = [] if isinstance(found, Refused) else found
    of_others = {key for keys in SECTION_KEYS.values() for key in keys}
    of_others -= {key for section in sections for key in SECTION_KEYS.get(section, ())}
    of_sections = [name for name in document if name not in of_others]
    return written(document, {"short": SHORT, "sections": of_sections}.get(form))


def _told(summary: RanksSummary, view: View) -> list[str]:
    return findings.sentences(summary) if view.rank is None else findings.of_one(summary, view.rank)


def explain(summary: RanksSummary, traces: Sequence[RankTrace], view: View, limit: int = DEFAULT_LIMIT) -> None:
    """Print the report on several ranks: first the answer, then the evidence. Raises BadInput."""
    wanted = _wanted(summary, view)
    if not rank_changes.can_propose(summary) or view.rank is not None:
        wanted = [name for name in wanted if name != "try"]
    if not lanes_wanted(view):
        wanted.remove("lanes")
    sections = {
        "short": _in_short, "try": partial(_try_first, limit=limit), "gpu": _ranks, "steps": _steps,
        "work": _communication_of, "lanes": partial(_lanes, traces=traces),
    }  # fmt: skip
    out = console()
    paragraph(out, _header(summary), rest="  ")
    for number, name in enumerate(wanted):
        if number or name != "short":
            out.print()
        sections[name](out, summary, view)
        # The answer comes first, then the ranks that cost most.
        if "short" in wanted and view.rank is None and name == ("try" if "try" in wanted else "short"):
            _costs(out, summary, view)


def _header(summary: RanksSummary) -> str:
    hosts = f" on {len(summary.clocks.hosts):,} hosts" if len(summary.clocks.hosts) > 1 else ""
    words = [f"{len(summary.ranks):,} of {counted(summary.world_size, 'rank')}{hosts}"]
    if summary.steps:
        first, last = (name.removeprefix(STEP[:-1]) for name in (summary.steps[0], summary.steps[-1]))
        named = first if first == last else f"{first} to {last}"
        unprofiled, step = findings.unprofiled_us(summary), findings.step_us(summary)
        without = f" ({duration(unprofiled)} without the profiler)" if unprofiled is not None else ""
        words.append(f"{counted(len(summary.steps), 'step')} of {duration(step)}{without}, {named}")
    for what, some in (("collective", summary.matched), ("message", summary.messages)):
        if some or not (summary.messages or what == "message"):
            words.append(f"{counted(len(some), what)} matched")
    return f"[bold]{plain(summary.device)}[/bold] · {plain(' · '.join(words))}"


def _try_first(out: Console, summary: RanksSummary, view: View, limit: int) -> None:
    with progress.shown() as show:
        found = rank_changes.opportunities(summary, limit, show)
    opportunities.show(out, found, view.all, limit=findings.launch_waits(summary))


def _in_short(out: Console, summary: RanksSummary, view: View) -> None:
    if view.rank is None and (found := findings.regime(summary)):
        word, told = found
        sentences = [f"[bold]{plain(capitalized(word))}[/bold]", *(plain(capitalized(one)) for one in told.split("; "))]
        paragraph(out, " ".join(f"{one}." for one in sentences))
    for number, line in enumerate(_told(summary, view)):
        paragraph(out, plain(line), "[bold]in short[/bold]   " if not number else " " * 11, " " * 11)
    for line in notes(summary):
        paragraph(out, plain(line), "[yellow]note[/yellow] ", " " * 5)


def _costs(out: Console, summary: RanksSummary, view: View) -> None:
    """Print the ranks and links that cost most, with the reason, and the hosts with several slow ranks."""
    hosts = findings.slow_hosts(summary)
    found = findings.costs(summary, view.most(COSTS_SHOWN), () if view.all else hosts)
    slow = {} if view.all else {rank: len(one.slow) for one in hosts for rank in one.slow}
    host = {one.rank: one.host for one in summary.ranks}
    several = len(summary.clocks.hosts) > 1
    if found:
        out.print()
        out.print("[bold]what costs most[/bold]: each beyond the median of the others, per step")
    for one in found:
        rank = one.ranks[0]
        if one.link is not None:
            whose, why = f"ranks {findings.listed(one.ranks, most=4)}", findings.link_in_words(one.link)
        else:
            whose = f"rank {rank} on {host[rank]}" if several and host[rank] else f"rank {rank}"
            whose += f", the slowest of {slow[rank]} there" if several and host[rank] and rank in slow else ""
            reasons = "; ".join(findings.in_words(one.reasons, summary.on_gpu)) or "no single reason"
            why = findings.in_some_steps(summary, one.steps) + reasons
        paragraph(out, plain(f"{whose}, {findings.ms(one.more_us)}: {why}"), "  ", "    ")
    if not hosts:
        return
    out.print()
    columns = {
        "hosts with several slow ranks": lambda one: Name(one.host),
        "slow ranks": lambda one: f"{len(one.slow)} of {len(one.ranks)}",
        "longer, ms": lambda one: _ms(one.more_us),
        "because": lambda one: findings.HOST_SAYS.get(one.part, "no single reason"),
    }
    _table(out, columns, hosts, view.most(COSTS_SHOWN), "hosts are")


def _table(
    out: Console, columns: Mapping[str, Callable], some: Sequence, most: int | None = None, left_out: str = ""
) -> None:
    """Print a table with a row for each of some things. columns: by its head, what a column says of one of them.

    most: the number of rows; None for all. left_out: the words for those that are not shown.
    """
    rows = [[cell(one) for cell in columns.values()] for one in some[:most]]
    print_columns(out, tuple(columns), rows)
    if len(rows) < len(some):
        out.print(f"{len(some) - len(rows):,} more {left_out} not shown")


def left_out(summary: RanksSummary) -> Iterator[str]:
    """Yield notes on missing ranks and on traces that are left out."""
    if summary.missing:
        missing = _numbers(summary.missing, summary.world_size - len(summary.ranks))
        yield f"missing: {missing}; who waits for {'it' if len(summary.missing) == 1 else 'them'} is not known"
    for path, why in list(summary.not_read.items())[:5]:
        yield f"left out: {path if is_url(path) else text.shown_path(Path(path))}: {findings.why_not_read(why)}"
    if len(summary.not_read) > 5:
        yield f"left out: {len(summary.not_read) - 5} more"


def notes(summary: RanksSummary) -> list[str]:
    """Return notes on missing and left-out traces, on unmatched collectives, and on the clocks' accuracy."""
    found = list(left_out(summary))
    if summary.other_steps:
        found.append(_lacking(summary))
    clocks = summary.clocks
    kernels, apart = counted(summary.unnamed, "communication kernel"), _numbers(clocks.not_aligned)
    not_matched = (
        (summary.unmatched, f"{counted(summary.unmatched, 'collective')} of one rank without another's"),
        (summary.unmatched_messages, counted(summary.unmatched_messages, "send or receive", "sends and receives")),
        (summary.unnamed, f"{kernels}; the traces do not name the collective or its group"),
        (clocks.not_aligned, f"{apart}; nothing aligns that host's clock with the others"),
    )
    found += [f"not matched: {what}" for is_any, what in not_matched if is_any]
    most, hosts = duration(max(map(abs, clocks.ahead_us.values()))), counted(len(clocks.hosts), "host")
    if clocks.by_messages_us is not None:
        how = f"aligned by their messages in both directions (up to {most} apart)"
        found.append(f"clocks of {hosts} {how}, to within {duration(clocks.by_messages_us)}")
    elif clocks.aligned:
        several = len({(one.host, clocks.ahead_us[one.rank]) for one in summary.ranks}) > len(clocks.hosts)
        whose = counted(len(summary.ranks), "rank") if several else hosts
        how = f"aligned by the ends of their common collectives (up to {most} apart)"
        found.append(f"clocks of {whose} {how}; nine in ten then agree within {duration(clocks.apart_us)}")
    elif clocks.apart_us is not None and summary.on_gpu:
        within = duration(clocks.apart_us)
        found.append(f"the clocks are used as recorded: nine of ten collectives end within {within} on all ranks")
    return found


def _lacking(summary: RanksSummary) -> str:
    """Return a sentence on the ranks that lack steps of others."""
    every, lacking = dict.fromkeys(name for names in summary.other_steps.values() for name in names), {}
    for one in summary.ranks:
        lacking[one.rank] = tuple(name for name in every if name not in summary.other_steps.get(one.rank, ()))
    told = []
    alike = grouped((names, rank) for rank, names in lacking.items() if names)
    for names, ranks in sorted(alike.items(), key=lambda item: len(item[1])):
        steps = findings.listed([name.removeprefix(STEP[:-1]) for name in names], most=4)
        told.append(f"{_numbers(ranks)} {'has' if len(ranks) == 1 else 'have'} no {steps}")
    counted_steps = "only steps that all ranks have are counted" if summary.steps else "no step is common to all ranks"
    more = f"; {len(told) - 3:,} more lack others" if len(told) > 3 else ""
    return f"{counted_steps}: {'; '.join(told[:3])}{more}"


def _numbers(ranks: Sequence[int], count: int = 0) -> str:
    """Return the numbers of the first ranks in words. count: the number of all, if these are not all."""
    count = count or len(ranks)
    more = f" and {count - 8:,} more" if count > 8 else ""
    return f"rank{'s' * (count > 1)} {', '.join(map(str, ranks[:8]))}{more}"


def _shown(summary: RanksSummary, view: View) -> list[RankFigures]:
    """Return the ranks with a row each: the chosen rank, or all if they are few or --all is given."""
    if view.rank is not None:
        return [one for one in summary.ranks if one.rank == view.rank]
    return list(summary.ranks) if view.all or len(summary.ranks) <= RANKS_SHOWN else []


def _ms(us: float) -> str:
    return f"{us / 1e3:,.1f}" if us >= 50 or not us else f"{us / 1e3:,.2f}"


# By the head of a column, the fields of Times, and those of RankFigures.
TIMES = {
    "time": "us", "compute": "compute_us", "exposed": "exposed_communication_us", "hidden": "hidden_us",
    "copies": "exposed_copy_us", "idle": "idle_us", "not launched": "idle_not_launched_us",
}  # fmt: skip
FIGURES = [attrgetter(name) for name in TIMES.values()]
# The last ones are left out if they are empty for all ranks, as in runs without collectives or messages.
ON_WAITS = {"waited": "waiting_us", "arrived last": "arrived_last", "message waits": "message_waits.us"}
COLUMNS: dict[str, Callable[[RankFigures], float]] = {
    head: attrgetter(name)
    for head, name in ({head: f"total.{name}" for head, name in TIMES.items()} | ON_WAITS).items()
    if head != "not launched"
}
OPTIONAL = ("hidden", "copies", "not launched", *ON_WAITS)


def _cell(head: str, value: float) -> str:
    return f"{value:,.0f}" if head == "arrived last" else _ms(value)


def _ranks(out: Console, summary: RanksSummary, view: View) -> None:
    shown = _shown(summary, view)
    if len(shown) < len(summary.ranks) > 2:
        _distribution(out, summary, shown if view.rank is not None else ())
    else:
        rows = [(f"rank {one.rank}", *(_cell(head, of(one)) for head, of in COLUMNS.items())) for one in shown]
        _print(out, ("window, ms", *COLUMNS), rows, "waits, ms")
    # fsum, because sum() rounds before Python 3.12 and would leave a difference.
    before = {
        one.rank: max(0.0, one.total.compute_us - math.fsum(step.compute_us for step in one.steps)) for one in shown
    }
    few = len(shown) <= RANKS_SHOWN
    if few and summary.on_gpu and any(findings.share(one, before[one.rank]) > MUCH_BEFORE for one in shown):
        told = ", ".join(f"rank {rank} {findings.ms(us)}" for rank, us in before.items())
        said = "the window's compute includes work launched before the first step, which is not part of these steps"
        paragraph(out, f"{said}: {told}", "  ", "  ")


def _distribution(out: Console, summary: RanksSummary, shown: Sequence[RankFigures]) -> None:
    """Print the minimum, the median and the maximum of each column as a row, and the rank that has the maximum.

    shown: the ranks with a column of their own.
    """
    rows = []
    for head, of in COLUMNS.items():
        found = sorted((of(one), one.rank) for one in summary.ranks)
        least, most = found[0][0], found[-1][0]
        cells = [_cell(head, value) for value in (least, found[len(found) // 2][0], most)]
        if head not in OPTIONAL or most:
            own = [_cell(head, of(one)) for one in shown]
            rows.append((head, *own, *cells, f"{found[-1][1]}" if most > least else "–"))
    heads = (f"window of {counted(len(summary.ranks), 'rank')}, ms", *(f"rank {one.rank}" for one in shown))
    print_columns(out, (*heads, "min", "median", "max", "rank that has the max"), rows)


def _steps(out: Console, summary: RanksSummary, view: View) -> None:
    """Print each rank's times by step, then the medians by phase."""
    shown = _shown(summary, view) or list(summary.ranks)
    if len(shown) > 4 and not view.all:
        shown = _slow_and_waiting(summary)
    if view.rank is not None:
        view = replace(view, all=True)  # one rank is shown in full
    names = summary.steps if view.step is None else (f"{STEP}{view.step}",)
    rows = []
    for name in names[: view.most(STEPS_SHOWN)]:
        for one in shown:
            step = next(step for step in one.steps if step.name == name)
            rows.append((f"{name.removeprefix(STEP[:-1])} rank {one.rank}", *(_ms(of(step)) for of in FIGURES)))
    if not rows:
        out.print("[bold]steps[/bold]: none that all ranks have")
        return
    _print(out, ("step, ms", *TIMES), rows)
    if len(names) > STEPS_SHOWN and not view.all:
        out.print(f"steps that are not shown: {len(names) - STEPS_SHOWN}")
    rows = [
        (Name(f"{phase}, rank {one.rank}"), *(_ms(findings.usual(summary, one, phase, of)) for of in FIGURES))
        for phase in _shown_phases(summary, view)
        for one in shown
    ]
    if rows:
        out.print()
        _print(out, ("phase median, ms", *TIMES), rows)


def _slow_and_waiting(summary: RanksSummary) -> list[RankFigures]:
    """Return the rank that the others wait for most, and the rank that waits most."""
    slow = findings.straggler(summary) or max(summary.ranks, key=lambda one: one.others_waited_us)
    others = [one for one in summary.ranks if one is not slow]
    waiting = max(others, key=lambda one: one.waited_exposed_us, default=slow)
    return [one for one in summary.ranks if one is slow or one is waiting]


def _shown_phases(summary: RanksSummary, view: View) -> list[str]:
    """Return the longest phases that take more than a hundredth of a rank's step, in their order.

    Return none if only the time outside the annotations is left, because that is the step itself.
    """
    longest = {
        phase: max(findings.usual(summary, one, phase, FIGURES[0]) for one in summary.ranks)
        for phase in findings.phases(summary)
    }
    step = max(findings.usual(summary, one, None, FIGURES[0]) for one in summary.ranks)
    chosen = sorted(longest, key=longest.get, reverse=True)[: view.most(PHASES_SHOWN)]
    shown = [phase for phase in longest if phase in chosen and longest[phase] > 0.01 * step]
    return [] if shown == [OUTSIDE_ANNOTATIONS] else shown


def _print(out: Console, heads: Sequence[str], rows: Sequence[Sequence[str]], second: str = "") -> None:
    """Print a table without the optional columns that are empty for all ranks.

    second: the title of a second table, for the columns on waits if one table is too wide for all columns.
    """
    kept = [
        number for number, head in enumerate(heads)
        if head not in OPTIONAL or any(row[number] not in ("0", "0.0", "–") for row in rows)
    ]  # fmt: skip
    tables = [kept]
    if second and text.table_width([[row[at] for at in kept] for row in (heads, *rows)]) > out.width:
        waits = [at for at in kept if heads[at] in ON_WAITS]
        tables = [[at for at in kept if at not in waits], [0, *waits]]
    for number, columns in enumerate(tables):
        if number:
            out.print()
        told = [second if number and not at else heads[at] for at in columns]
        print_columns(out, told, [[row[at] for at in columns] for row in rows])


def _communication_of(out: Console, summary: RanksSummary, view: View) -> None:
    """Print the collectives by kind and size, and the messages by pair of ranks."""
    if summary.kinds or not summary.pairs:
        _collectives(out, summary, view)
    if summary.pairs:
        if summary.kinds:
            out.print()
        _messages(out, summary, view)


def _messages(out: Console, summary: RanksSummary, view: View) -> None:
    """Print the messages between ranks, those with the most waiting first; for one rank, all of its pairs."""
    if view.rank is not None:
        summary, view = _of_one(summary, view.rank), replace(view, all=True)
    kinds = findings.pair_kinds(summary)
    columns = {
        "messages, ms": lambda one: Name(one.name),
        "pairs": lambda one: f"{one.pairs:,}",
        "size": lambda one: _size(one.bytes),
        "count": lambda one: f"{one.messages:,}",
        "receiver waits": lambda one: _ms(one.receiver_waited_us),
        "sender waits": lambda one: _ms(one.sender_waited_us),
        "transfer": lambda one: _ms(one.transfer_us),
    }
    _table(out, columns, kinds, view.most(PAIRS_SHOWN), "are")
    fused = "a send in one kernel with a receive waits for it, too; " * summary.on_gpu
    note = f"waits count while the rank computes nothing; {fused}times are averages per pair and step"
    paragraph(out, note, "  ", "  ")
    shown = kinds[: view.most(PAIRS_SHOWN)]
    several = [one for one in shown if one.pairs > 1 and max(one.receiver_waited_us, one.sender_waited_us)]
    for one in several[:1]:
        longest = findings.waiting_of(one.worst, len(summary.steps))
        paragraph(out, plain(f"{one.name}, the longest wait: {longest}"), "  ", "    ")


def _collectives(out: Console, summary: RanksSummary, view: View) -> None:
    if not summary.kinds:
        out.print("[bold]collectives[/bold]: none matched")
        return
    if view.rank is not None:
        _collectives_of(out, summary, view.rank)
        return
    if len(summary.groups) > 1:
        _groups(out, summary, view)
    columns = {
        "collective, medians": lambda one: _kind(summary, one.kind, one.size),
        "message": lambda one: _size(one.bytes),
        "count": lambda one: f"{one.count:,}",
        "wait": lambda one: duration(one.longest_wait_us),
        "transfer": lambda one: duration(one.transfer_us),
        "bus GB/s": lambda one: _rate(one.bus_gb_s),
        "of best": lambda one: text.percent(one.of_best),
    }
    _table(out, columns, summary.kinds, view.most(KINDS_SHOWN), "sizes are")
    for one in summary.ranks if len(summary.ranks) <= 2 or view.all else ():
        hidden = f"rank {one.rank}: {one.hidden:,} of {counted(one.collectives, 'collective')} overlap with compute "
        paragraph(out, f"{hidden}for at least half of their time", "  ", "    ")


def _kind(summary: RanksSummary, kind: str, members: int) -> str:
    return kind if members == summary.world_size else f"{kind} of {members}"


def _size(message: int | None) -> str:
    return size(message) if message else "–"


def _groups(out: Console, summary: RanksSummary, view: View) -> None:
    """Print the kinds of process groups, and the rank that each waits for most; with --all every group, too."""
    kinds = findings.group_kinds(summary)
    columns = {
        "process groups": lambda one: Name(one.name),
        "groups": lambda one: f"{one.groups:,}",
        "ranks": lambda one: f"{one.size:,}",
        "count": lambda one: f"{one.collectives:,}",
        "wait, ms": lambda one: _ms(one.waited_us),
        "transfer, ms": lambda one: _ms(one.transfer_us),
    }
    _table(out, columns, kinds)
    paragraph(out, "wait: of a rank, on average, per step; transfer: of a group, per step", "  ", "  ")
    for one in kinds:
        worst, told = one.worst, one.name if one.groups == 1 else f"{one.name}, ranks {_range(one.worst.ranks)}"
        if not (worst.late and findings.waits_much(summary, worst)):
            continue
        if worst.late == (worst.last,):
            most = f"{worst.for_last_us / worst.waited_us:.0%} of the waiting is for rank {worst.last}"
            late = f"{most}, which is last in {worst.times_last:,} of {counted(worst.collectives, 'collective')}"
        else:
            arrive = "arrives" if len(worst.late) == 1 else "arrive"
            late = f"{counted(len(worst.late), 'rank')} of {len(worst.ranks):,} {arrive} late: {_range(worst.late)}"
        paragraph(out, plain(f"{told}: {late}"), "  ", "    ")
    out.print()
    if not view.all:
        return
    columns = {
        "process group": lambda one: Name(
            f"ranks {_range(one.ranks)}" + (f" ({one.description})" if one.description else "")
        ),
        "count": lambda one: f"{one.collectives:,}",
        "all waits, ms": lambda one: _ms(one.waited_us),
        "most for rank": lambda one: f"{one.last}",
        "arrived last": lambda one: f"{one.times_last:,}",
        "for it, ms": lambda one: _ms(one.for_last_us),
    }
    _table(out, columns, summary.groups)
    out.print()


def _range(ranks: Sequence[int]) -> str:
    """Return the ranks' numbers; a range if they are consecutive."""
    if len(ranks) > 2 and ranks[-1] - ranks[0] == len(ranks) - 1:
        return f"{ranks[0]}–{ranks[-1]}"
    return findings.listed(ranks, most=4)


def _rate(gb_s: float | None) -> str:
    """Return a bandwidth in GB/s without its unit. That of a few bytes says nothing."""
    return "–" if not gb_s else "<0.01" if gb_s < 0.01 else f"{gb_s:,.3g}"


def _collectives_of(out: Console, summary: RanksSummary, rank: int) -> None:
    """Print all kinds of one rank's collectives, with the rank's waits."""
    mine = [one for one in summary.matched if rank in one.ranks]
    rows = []
    for (kind, message, members), some in grouped(((one.kind, one.bytes, one.size), one) for one in mine).items():
        waits = [one.waits_us[one.ranks.index(rank)] for one in some]
        whom, us = totals((one.last, us) for one, us in zip(some, waits, strict=True)).most_common(1)[0]
        named = (_kind(summary, kind, members), _size(message), f"{len(some):,}")
        times = (_ms(sum(waits)), _ms(sum(one.transfer_us for one in some)), _rate(median_rate(some)))
        rows.append((sum(waits), (*named, *times, f"rank {whom}" if us else "–")))
    rows = [row for _, row in sorted(rows, key=lambda one: -one[0])]
    print_columns(out, ("collectives, ms", "message", "count", "waited", "transfer", "bus GB/s", "mostly for"), rows)


def _lanes(out: Console, summary: RanksSummary, view: View, traces: Sequence[RankTrace]) -> None:
    """Draw the ranks on one axis: up to four, or the chosen one, the one waited for most and the one waiting most."""
    drawn = list(summary.ranks)
    if len(drawn) > 4:
        chosen = {one.rank for one in _slow_and_waiting(summary)} | {view.rank}
        drawn = [one for one in summary.ranks if one.rank in chosen]
    computed = {one.rank: one.lane for one in traces if one.path not in summary.not_read and one.lane}
    common = [computed[one.rank].step for one in drawn if one.rank in computed]
    if not common:
        return
    step, rows = common[0], []
    origin = min(one.start - round(summary.clocks.ahead_us[one.rank] * 1000) for one in traces if one.rank in computed)
    for one in drawn:
        lane, ahead = computed.get(one.rank), round(summary.clocks.ahead_us[one.rank] * 1000) + origin
        if lane and lane.step == step:
            pieces = [lanes.Mark(start - ahead, end - ahead, name) for start, end, name in lane.pieces]
            rows.append((f"rank {one.rank}", pieces))
            rows.append(("  comm", _communication(summary, one.rank, step)))
    lines = lanes.draw_rows(rows, out.width, lane_glyphs(out))
    if lines:
        step = step.removeprefix(STEP[:-1])
        what = "collectives and receives" if summary.messages else "collectives"
        legend = f"computing by phase; {what}, {lanes.WAITS} while one waits"
        out.print(f"[bold]lanes of step {plain(step)}[/bold]: {legend}")
        for line in lines:
            out.print(plain(line), style=None if line.startswith("rank") else "green")


def _communication(summary: RanksSummary, rank: int, step: str) -> list[lanes.Mark]:
    """Return a rank's matched collectives and receives of one step, each as its wait and the rest.

    Sends are left out, because they run beside them.
    """
    found = []
    for one in (*summary.matched, *summary.messages):
        at = one.ranks.index(rank) if one.step == step and rank in one.ranks else None
        if at is not None and (one.kind != "send" or at == 1):
            start, waited, took = (round(some[at] * 1000) for some in (one.starts_us, one.waits_us, one.took_us))
            name = "receive" if one.kind == "send" else one.kind
            found += [lanes.Mark(start, start + waited, kind="wait"), lanes.Mark(start + waited, start + took, name)]
    return [piece for piece in found if piece.end > piece.start]
