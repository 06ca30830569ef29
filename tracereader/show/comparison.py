"""Several runs side by side: their figures, where the difference lies, what changed and what stayed the same."""

import textwrap
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from tracereader.command import BadInput
from tracereader.figures import Summary, compare
from tracereader.findings import cheatsheet, gpu_work, steps
from tracereader.findings.finding import family_in_words, size, tokens_s
from tracereader.show.text import LEAST_NAME, Name, console, plain, print_columns, printable, ratio, us
from tracereader.show.view import View

SECTIONS = ("steps", "short", "gpu", "cpu", "work", "chain")
ROWS_SHOWN = 8
FEW = 4  # runs up to which there is room for all that changed
ROOM_FOR_A_TABLE = 100  # columns; in fewer a kernel's name does not fit into one of three


def side_by_side(summaries: Sequence[Summary], view: View, before: bool = False) -> None:
    """Several runs, each set against the first, or against the one before it.

    Of a report's sections, steps has the figures, short what changed and what each shows most, gpu the time
    by family, cpu the ops' own time, work what changed in the GPU work and chain in the ops. Raises BadInput.
    """
    wanted = [name for name in SECTIONS if view.shows(name)]
    if not wanted:
        raise BadInput(f"--only {','.join(view.only)}: of several traces there are {', '.join(SECTIONS)}")
    if not any(one.has_gpu_work for one in summaries):
        wanted = [name for name in wanted if name != "gpu"]
    elif not view.only and not view.all:
        wanted = [name for name in wanted if name != "cpu"]
    many = len(summaries) > FEW and not (view.only or view.all)
    if many:
        wanted = [name for name in wanted if name not in ("work", "chain")]
    out = console()
    sides = [compare.Side(summary) for summary in summaries]
    names = compare.told_apart(sides)
    devices = [", ".join(dict.fromkeys(one.source.devices)) or "CPU only" for one in summaries]
    if len(set(devices)) > 1:
        told = ", ".join(f"{number + 1}: {plain(device)}" for number, device in enumerate(devices))
        out.print(f"[yellow]the devices differ[/yellow]   {told}")
        out.print()
    else:
        out.print(f"[bold]{plain(devices[0])}[/bold]")
    summed = "summed by family (kernels overlap)" if any(map(gpu_work.overlap, summaries)) else "by family"
    sections = {
        "steps": lambda: _figures(out, sides, names, "typical step" if view.step is None else f"step #{view.step}"),
        "short": lambda: _in_short(out, names, _told(sides)),
        "gpu": lambda: _times(out, sides, f"GPU µs of a step, {summed}", [_by_family(one) for one in summaries], view),
        "cpu": lambda: _times(out, sides, "CPU µs of a step, ops' own", [_by_op(one) for one in summaries], view),
    }
    for number, name in enumerate(name for name in wanted if name in sections):
        if number:
            out.print()
        sections[name]()
    if view.only and "gpu" in view.only and "gpu" not in wanted:
        out.print("gpu: nothing of it in these traces (no GPU work)")
    if {"work", "chain"} & set(wanted):
        if set(wanted) & set(sections):
            out.print()
        _differences(out, sides, names, before, "work" in wanted, "chain" in wanted)
    if many:
        out.print()
        out.print("more: --only work,chain (all that changed, and what stayed the same)")


def _figures(out: Console, sides: Sequence[compare.Side], names: Sequence[str], title: str) -> None:
    """Times, counts and memory, each time also as a multiple of the first run's and of the one before's."""
    gpu = any(side.summary.has_gpu_work for side in sides)
    decoding = [side.summary.llm.decoding for side in sides]
    memory = any(side.peak_bytes for side in sides)
    multiples = ["of run 1", "of prev."] if len(sides) > 2 else ["of run 1"]
    heads = [title, "CPU µs", *multiples, "1st step"]
    heads += ["GPU busy", *multiples, "launches", "kernels", "copies", "memsets"] if gpu else []
    heads += ["tokens/s"] if all(decoding) else []
    rows = []
    for number, side in enumerate(sides):
        one = side.summary
        others = [sides[0].summary, sides[max(0, number - 1)].summary][: len(multiples)]
        row = [Name(f"{number + 1} {names[number]}"), us(one.chosen.cpu_us)]
        row += [ratio(one.chosen.cpu_us, base.chosen.cpu_us) for base in others]
        row.append(us(one.steps[0].cpu_us))
        if gpu:
            cells = [us(one.gpu_us), *(ratio(one.gpu_us, base.gpu_us) for base in others), str(one.chosen.launches)]
            cells += [str(one.count(kind)) for kind in ("kernel", "memcpy", "memset")]
            row += cells if one.has_gpu_work else ["–"] * len(cells)
        row += [tokens_s(one.llm.decoding.tokens_s)] if all(decoding) else []
        rows.append(row + [size(side.peak_bytes) if side.peak_bytes else "–"] * memory)
    print_columns(out, heads + ["memory"] * memory, rows)


def _told(sides: Sequence[compare.Side]) -> list[list[str]]:
    """Of each run what it does that the one before did not, and what costs it most."""
    found = []
    for number, side in enumerate(sides):
        on_gpu = side.summary.has_gpu_work
        told = [compare.change(sides[number - 1], side)] if number else [compare.setup(side)] if on_gpu else []
        told += [": ".join(steps.waiting(side.summary))] if on_gpu else []
        found.append(told + cheatsheet.reveals(side.summary))
    return found


def _in_short(out: Console, names: Sequence[str], told: Sequence[Sequence[str]]) -> None:
    out.print("[bold]against the run before, and what each shows most[/bold]")
    for number, (name, texts) in enumerate(zip(names, told, strict=True)):
        if texts:
            out.print(f"{number + 1} {plain(name)}")
        for text in texts:
            _wrapped(out, text, "    ")


def _by_family(summary: Summary) -> dict[str, float]:
    return {family_in_words(family): us for family, us in summary.by_family.items()}


def _by_op(summary: Summary) -> dict[str, float]:
    return {name: one.self_us for name, one in summary.cpu.ops.items()}


def _times(
    out: Console, sides: Sequence[compare.Side], title: str, times: Sequence[dict[str, float]], view: View
) -> None:
    """One row a name, one column a run (by its number); where they differ most comes first."""
    names = {name for one in times for name in one}

    def spread(name: str) -> float:
        values = [one.get(name, 0.0) for one in times]
        return max(values) - min(values)

    rows = [
        (Name(name), *(us(one[name]) if name in one else "–" for one in times))
        for name in sorted(names, key=lambda name: (-spread(name), name))[: view.most(ROWS_SHOWN)]
    ]
    heads = (title, *(f"run {number}" for number in range(1, len(sides) + 1)))
    print_columns(out, heads, rows or [(Name("none"), *("–" for _ in sides))])


def _differences(
    out: Console, sides: Sequence[compare.Side], names: Sequence[str], before: bool, work: bool, ops: bool
) -> None:
    """What changed and what stayed the same: a table, or below each other where there is no room for its columns."""
    first = sides[0]
    if work:
        setup = compare.setup(first) if any(side.summary.has_gpu_work for side in sides) else ""
    else:
        setup = ", ".join(sorted(first.ops))
    against = (
        "(the first: each is set against the one before it)"
        if before
        else "(the first: what the others are set against)"
    )
    rows = []
    for number, side in enumerate(sides[1:]):
        found = compare.difference(sides[number] if before else first, side)
        changed = found.flags_changed + found.work_changed * work + found.ops_changed * ops
        same = found.work_same * work + found.ops_same * ops
        rows.append((changed or ("nothing",), same))
    if out.width < ROOM_FOR_A_TABLE:
        _in_blocks(out, names, setup, against, rows)
        return
    table = Table(box=None, pad_edge=False, padding=(0, 2, 1, 0), header_style="bold")
    for title, share in (("setup", 2), ("what changed", 5), ("what stayed the same", 4)):
        table.add_column(title, ratio=share, overflow="fold")
    table.add_row(plain(names[0]), plain(setup), against)
    for name, cells in zip(names[1:], rows, strict=True):
        table.add_row(plain(name), *("\n".join(f"· {plain(text)}" for text in texts) or "nothing" for texts in cells))
    # Wrapped in columns here, so no soft wrapping; and without the blanks that would pad the last column.
    wrapping = Console(highlight=False, emoji=False, width=out.width)
    with wrapping.capture() as drawn:
        wrapping.print(table)
    print("\n".join(line.rstrip() for line in drawn.get().splitlines()))


def _in_blocks(out: Console, names: Sequence[str], setup: str, against: str, rows: Sequence[tuple]) -> None:
    out.print(f"[bold]{plain(names[0])}[/bold]")
    out.print(f"  {against}")
    _wrapped(out, setup, "  ")
    for name, cells in zip(names[1:], rows, strict=True):
        out.print(f"[bold]{plain(name)}[/bold]")
        for title, texts in zip(("changed:", "the same:"), cells, strict=True):
            if texts:
                out.print(f"  {title}")
            for text in texts:
                _wrapped(out, text, "  · ")


def _wrapped(out: Console, text: str, first: str) -> None:
    """Broken between words: a name stays whole, so that it can be searched for."""
    room = max(LEAST_NAME, out.width - len(first))
    lines = textwrap.wrap(printable(text), room, break_long_words=False, break_on_hyphens=False)
    for number, line in enumerate(lines):
        out.print((" " * len(first) if number else first) + plain(line))
