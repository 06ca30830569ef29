"""The repetitions in a step as rows of a table; and a long step's activities in order, with repetitions shown once."""

from collections import Counter
from collections.abc import Sequence
from statistics import median

import msgspec
from rich.console import Console

from tracereader.figures import Summary
from tracereader.figures.gpu_work import GpuWork, mostly
from tracereader.figures.repeats import Repeat
from tracereader.findings.finding import counted, duration, family_in_words
from tracereader.findings.gpu_work import overlap
from tracereader.show.text import Name, Unit, paragraph, percent, plain, print_columns, unit_of
from tracereader.trace.grouped import totals

# A repetition that takes less of a step's GPU time has no row.
WORTH_A_ROW = 0.05
ROWS_SHOWN = 8
LONG = 40  # activities
BETWEEN = 3  # activities shown of those before, between and after repetitions
# A repetition that takes this many times the median one is named. In H200s' traces equal layers differ by up to 1.11.
LONG_STRETCH = 1.2


def worth_showing(summary: Summary) -> list[Repeat]:
    """Return the repetitions that are worth a row, in order; empty for a step that is short enough to be shown."""
    if len(summary.gpu_work) <= LONG:
        return []
    total = summary.summed_us
    return [one for one in summary.repeats if one.total_us > WORTH_A_ROW * total]


def table(out: Console, summary: Summary) -> None:
    """Print each repetition as a row, with the rest of the step; then the content of one occurrence."""
    total, shown = summary.summed_us, worth_showing(summary)
    largest = sorted(shown, key=lambda one: -one.total_us)[:ROWS_SHOWN]
    each_us = unit_of([one.high_us for one in largest])
    in_all = unit_of([total])
    rows = []
    by_place = sorted(largest, key=lambda one: one.start)
    for one in by_place:
        rows.append(_row(Name(f"{one.times} x {one.pieces:,} activities"), one, each_us, in_all, total))
        if one.inside:
            name = Name(f"  each: {one.inside.times} x {one.inside.pieces:,}")
            rows.append(_row(name, one.inside, each_us, in_all, None))
    outside = total - sum(one.total_us for one in largest)
    pieces = len(summary.gpu_work) - sum(one.pieces * one.times for one in largest)
    if pieces:
        name = Name(f"outside: {counted(pieces, 'activity', 'activities')}")
        rows.append((name, "", "", "", in_all(outside), percent(outside / total)))
    step = f"{'step ' * summary.source.has_steps}{summary.chosen.number}"
    heads = (
        f"repetitions in {step}", f"GPU {each_us.name}", "range", f"CPU {each_us.name}",
        f"total {in_all.name}", "share",
    )  # fmt: skip
    print_columns(out, heads, rows)
    if overlap(summary):
        busy = duration(summary.chosen.gpu_busy_us)
        paragraph(out, f"these are sums, and kernels overlap: the GPU is busy {busy} of the step", "  ", "    ")
    for one in by_place:
        line = _which(summary, one)
        if one.us and one.high_us > LONG_STRETCH * one.us:
            line += f"; the longest, number {one.longest}, takes {one.high_us / one.us:.1f} times the median"
        if one is largest[0]:
            line += f"; one of them: {_families(summary, one)}"
        paragraph(out, plain(line), "  ", "    ")


def _which(summary: Summary, one: Repeat) -> str:
    """Return which activities of the step are repeated, in words."""
    same = f"the same {one.pieces:,} GPU activities {one.times} times"
    if one.replays:
        return f"{same}, replays of a CUDA graph"
    layers = summary.llm.decoding.facts.layers if summary.llm.decoding and summary.llm.decoding.facts else None
    each = f", {layers // one.times} layers each" if layers and layers > one.times and not layers % one.times else ""
    return f"{same}{each}, from no. {one.start + 1:,} of the step"


class Row(msgspec.Struct, frozen=True):
    """A GPU activity, or those at one position of `times` equal sequences; or a gap of `left_out` activities."""

    work: GpuWork | None
    times: int = 1
    left_out: int = 0
    left_out_us: float = 0.0


def in_order(summary: Summary) -> list[Row]:
    """Return a step's GPU activities in order: one sequence for all equal ones, and a few of the others."""
    starting = {repeat.start: repeat for repeat in worth_showing(summary)}
    inside = {place for repeat in starting.values() for places in repeat.places for place in places}
    rows: list[Row] = []
    between: list[GpuWork] = []
    for place, work in enumerate(summary.gpu_work):
        if repeat := starting.get(place):
            rows += _between(between)
            rows += [_folded(summary, places) for places in zip(*repeat.places, strict=True)]
            between = []
        elif place not in inside:
            between.append(work)
    return rows + _between(between)


def _folded(summary: Summary, places: Sequence[int]) -> Row:
    """Return the activities at one position of each sequence, as one row."""
    same = [summary.gpu_work[place] for place in places]
    folded = msgspec.structs.replace(
        same[0],
        asked_by=mostly(totals((one.asked_by, one.us) for one in same)),
        us=median(one.us for one in same),
        low_us=min(one.low_us for one in same),
        high_us=max(one.high_us for one in same),
        grid=same[0].grid if all(one.grid == same[0].grid for one in same) else None,
    )
    return Row(folded, len(same))


def _between(work: Sequence[GpuWork]) -> list[Row]:
    if len(work) <= BETWEEN + 1:
        return [Row(one) for one in work]
    rest = work[BETWEEN:]
    return [*map(Row, work[:BETWEEN]), Row(None, left_out=len(rest), left_out_us=sum(one.us for one in rest))]


def _row(name: str, one: Repeat, each: Unit, in_all: Unit, total: float | None) -> tuple[str, ...]:
    share = percent(one.total_us / total) if total else ""
    return name, each(one.us), each.range(one.low_us, one.high_us), each(one.cpu_us), in_all(one.total_us), share


def _families(summary: Summary, one: Repeat) -> str:
    """Return the GPU time of the sequences by family of kernel, as shares, with the number of activities in one."""
    repeated = [summary.gpu_work[place] for places in one.places for place in places]
    time, pieces = totals((work.family, work.us) for work in repeated), Counter(work.family for work in repeated)
    return ", ".join(
        f"{share / one.total_us:.0%} {family_in_words(family)} ({pieces[family] / one.times:,.0f})"
        for family, share in time.most_common(4)
        if share >= 0.005 * one.total_us
    )
