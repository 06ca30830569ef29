"""Several runs side by side: their figures, then what changed and what stayed the same."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from tracereader.command import BadInput
from tracereader.figures import Summary, compare
from tracereader.show.report import View
from tracereader.show.text import Name, console, plain, print_columns, ratio, us

SECTIONS = ("steps", "work", "chain")


def side_by_side(summaries: Sequence[Summary], view: View) -> None:
    """Several runs: their figures with the ratio to the first, then what changed and what did not.

    Of a report's sections, steps has the figures, work the GPU work and chain the ops. Raises BadInput.
    """
    wanted = [name for name in SECTIONS if view.shows(name)]
    if not wanted:
        raise BadInput(f"--only {','.join(view.only)}: of several traces there are {', '.join(SECTIONS)}")
    out = console()
    sides = [compare.Side(summary) for summary in summaries]
    if "steps" in wanted:
        _figures(out, sides, "typical step" if view.step is None else f"step #{view.step}")
    if {"work", "chain"} & set(wanted):
        if "steps" in wanted:
            out.print()
        _differences(out, sides, "work" in wanted, "chain" in wanted)


def _figures(out: Console, sides: Sequence[compare.Side], title: str) -> None:
    first = sides[0].summary
    rows = []
    for side in sides:
        one = side.summary
        rows.append(
            [
                Name(side.name),
                us(one.chosen.cpu_us),
                ratio(one.chosen.cpu_us, first.chosen.cpu_us),
                us(one.chosen.gpu_busy_us),
                ratio(one.chosen.gpu_busy_us, first.chosen.gpu_busy_us),
                str(one.chosen.launches),
                *(str(one.count(kind)) for kind in ("kernel", "memcpy", "memset")),
            ]
        )
    heads = [title, "CPU µs", "", "GPU busy µs", "", "launches", "kernels", "copies", "memsets"]
    print_columns(out, heads, rows)


def _differences(out: Console, sides: Sequence[compare.Side], work: bool, ops: bool) -> None:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 1, 0), header_style="bold")
    for title, share in (("setup", 2), ("what changed", 5), ("what stayed the same", 4)):
        table.add_column(title, ratio=share, overflow="fold")
    first = sides[0]
    setup = compare.setup(first) if work else ", ".join(sorted(first.ops))
    table.add_row(plain(first.name), plain(setup), "(the first: what the others are set against)")
    for side in sides[1:]:
        found = compare.difference(first, side)
        changed = found.work_changed * work + found.ops_changed * ops
        same = found.work_same * work + found.ops_same * ops
        cells = ("\n".join(f"· {plain(text)}" for text in texts) or "nothing" for texts in (changed, same))
        table.add_row(plain(side.name), *cells)
    # Wrapped in columns here, so no soft wrapping; and without the blanks that would pad the last column.
    wrapping = Console(highlight=False, emoji=False, width=out.width)
    with wrapping.capture() as drawn:
        wrapping.print(table)
    print("\n".join(line.rstrip() for line in drawn.get().splitlines()))
