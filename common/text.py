"""How figures, paths and tables are written: plain helpers of report.py."""

import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

PIPE_WIDTH = 140


def console() -> Console:
    # Made on demand, so that a redirected stdout is the one written to.
    return Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else PIPE_WIDTH)


def columns(*headers: str, numbers_from: int | None = None) -> Table:
    """A table without lines; from column `numbers_from` on, right-aligned."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=bool(headers), header_style="")
    for index, text in enumerate(headers):
        right = numbers_from is not None and index >= numbers_from
        table.add_column(text, justify="right" if right else "left", no_wrap=True)
    return table


def print_table(out: Console, table: Table) -> None:
    """A table without the blanks that would pad its last column."""
    with out.capture() as drawn:
        out.print(table)
    print("\n".join(line.rstrip() for line in drawn.get().splitlines()))


def shown_path(path: Path) -> str:
    """The path as the user would type it: relative where it lies below the current folder."""
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


def us(value: float | None) -> str:
    return "–" if value is None else f"{value:,.1f}"


def percent(share: float | None) -> str:
    return "–" if share is None else f"{share:.0%}"


def ratio(value: float, base: float) -> str:
    return f"x {value / base:.2f}" if base else ""


def rate(value: float | None) -> str:
    return "–" if value is None else f"{value:,.3g}" if value < 100 else f"{value:,.0f}"


def seconds(value: float) -> str:
    return f"{value:.1f} s" if value >= 1 else f"{value * 1e3:.1f} ms"


def size(count: int) -> str:
    """Bytes in decimal units, as memory bandwidth is quoted."""
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= scale:
            return f"{count / scale:.1f} {unit}"
    return f"{count} B"
