"""The formats of figures, paths and tables. Names are shortened first, then columns are stacked; figures stay."""

import io
import itertools
import json
import math
import os
import re
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import msgspec
from rich.cells import cell_len
from rich.console import Console
from rich.markup import escape
from rich.text import Text

from tracereader.command import printable
from tracereader.trace.kernel_names import cut, labels, short

PIPE_WIDTH = 140
LEAST_NAME = 16  # columns; a shorter name is of no use
BEYOND_ASCII = re.compile(r"[^\x00-\x7f]")  # a pipe may have any encoding


def console() -> Console:
    """Return the console of a report: plain text in a pipe, 140 columns wide there unless COLUMNS says otherwise."""
    # Created here, so that a redirected stdout is the one written to.
    columns = os.environ.get("COLUMNS", "")
    piped = int(columns) if columns.isdecimal() else 0
    # Some terminals report a width of 0.
    width = (shutil.get_terminal_size().columns if sys.stdout.isatty() else piped) or PIPE_WIDTH
    # A text that is returned is plain, and a notebook asks rich for colors and shows what it prints elsewhere.
    terminal = False if isinstance(sys.stdout, io.StringIO) else None
    return Console(
        highlight=False, soft_wrap=True, emoji=False, width=width, force_jupyter=False, force_terminal=terminal
    )


def ascii_only(out: Console) -> bool:
    """Return whether pictures can use only ASCII characters."""
    return (
        out.is_dumb_terminal
        or not (out.encoding or "").lower().startswith("utf")
        or os.environ.get("LC_ALL") in ("C", "POSIX")  # Python itself would write UTF-8 then
    )


def plain(text: str) -> str:
    """Return text from a trace, escaped for use in markup."""
    return escape(printable(text))


REFERENCE = Path(__file__).resolve().parents[2] / "docs/reference.md"


def capitalized(sentence: str) -> str:
    """Return the text with a capital first letter."""
    return sentence[:1].upper() + sentence[1:]


def head(title: str, section: str) -> str:
    """Return the markup of a section's title, linked to its row on the reference page if that page exists."""
    # The reader may be installed without the pages.
    return f"[bold][link={REFERENCE.as_uri()}#{section}]{title}[/link][/bold]" if REFERENCE.is_file() else bold(title)


def strict_json(document: object, compact: bool = False) -> str:
    """Return the document as strict JSON in ASCII, indented or compact. Numbers that are not finite become null."""
    written = msgspec.json.encode(document)  # in a tenth of json's time, for the figures of a thousand ranks
    text = (written if compact else msgspec.json.format(written, indent=1)).decode()
    return BEYOND_ASCII.sub(lambda found: json.dumps(found[0])[1:-1], text)


def bold(text: str) -> str:
    return f"[bold]{text}[/bold]"


def paragraph(out: Console, markup: str, first: str = "", rest: str = "") -> None:
    """Print a sentence, broken between words and indented at a terminal; one line in a pipe, for grep.

    A word longer than a line, for example a path, stays whole: the terminal breaks it, and it can be copied.

    first, rest: markup before the first line, and plain text before the others.
    """
    if out.width >= PIPE_WIDTH and not out.is_terminal:
        out.print(first + markup)
        return
    start = Text.from_markup(first)
    room = out.width - max(len(start), len(rest))
    for number, line in enumerate(_broken(Text.from_markup(markup), max(LEAST_NAME, room))):
        line.rstrip()
        out.print(Text(rest) + line if number else start + line)


def _broken(text: Text, width: int) -> Iterator[Text]:
    """Yield the text in lines of at most this width. Longer words stay whole, which Text.wrap would break."""
    for line in text.split("\n", allow_blank=True):
        offsets, used = [], 0
        for word in re.finditer(r"\S+\s*", line.plain):
            if used and used + cell_len(word[0].rstrip()) > width:
                offsets.append(word.start())
                used = 0
            used += cell_len(word[0])
        yield from line.divide(offsets)


def print_whole(out: Console, text: str, what: str, first: bool = True) -> None:
    """Print a path or a command to copy, beside its description; on a line of its own if both do not fit into one.

    first: whether it comes before the description. Both are plain text.
    """
    text, what = plain(text), plain(what)
    line = f"{text}   {what}" if first else f"{what} {text}"
    if cell_len(Text.from_markup(line).plain) <= out.width:
        out.print(line)
    else:
        paragraph(out, f"{what.strip().removesuffix(':')}:")
        out.print(text)


LABEL = 60  # columns of a kernel's short name


def kernel_labels(names: Iterable[str], width: int = LABEL) -> dict[str, str]:
    """Return the short name of each kernel. The same names first give the same short names in all sections.

    names: those of all steps, then those of a section. A kernel that LABEL columns do not distinguish is
    numbered, and keeps that short name at any width.
    """
    found = labels(names, LABEL)
    if width == LABEL:
        return found
    return {name: short(name, width) if label == short(name, LABEL) else label for name, label in found.items()}


class Name(str):
    """A cell that may be shortened if the table is too wide."""


def print_columns(
    out: Console,
    heads: Sequence[str],
    rows: Sequence[Sequence[str]],
    left: Sequence[int] = (0,),
    section: str = "",
    below: Mapping[int, str] = MappingProxyType({}),
) -> None:
    """Print a table without lines, the columns `left` left-aligned. Cells are plain text.

    Name cells are shortened first. section: of a report; the first line links to its reference. below: a plain sentence
    below a row, by its number.
    """
    rows = [[Name(printable(cell)) if isinstance(cell, Name) else printable(cell) for cell in row] for row in rows]
    heads = [printable(head) for head in heads]
    widths = _widths(heads, rows)
    shrinkable = [i for i in range(len(heads)) if any(isinstance(row[i], Name) for row in rows)]
    # Only names can be cut, so that a column stays as wide as its head and its other cells.
    fixed = _widths(heads, [["" if isinstance(cell, Name) else cell for cell in row] for row in rows])
    while sum(widths) + 2 * (len(widths) - 1) > out.width:
        widest = max(shrinkable, key=lambda i: widths[i], default=None)
        if widest is None or widths[widest] <= max(LEAST_NAME, fixed[widest]):
            _print_stacked(out, heads, rows, below)
            return
        widths[widest] -= 1
    columns = [_cut_apart(column, widths[i]) for i, column in enumerate(zip(*rows, strict=True))]
    cells = list(zip(*columns, strict=True))
    widths = _widths(heads, cells)
    line = _line(heads, widths, left)
    out.print((head(line, section) if section else bold(line)) if heads[0] else line)
    for number, row in enumerate(cells):
        out.print(_line(row, widths, left))
        _print_below(out, below, number)


def _print_below(out: Console, below: Mapping[int, str], number: int) -> None:
    if number in below:
        paragraph(out, plain(below[number]), " " * 4, " " * 4)


def _cut_apart(column: Sequence[str], width: int) -> Sequence[str]:
    """Return the names of a column at most `width` wide and still different. A common ending is cut first."""
    names = [cell for cell in column if isinstance(cell, Name)]
    if max(map(cell_len, names), default=0) <= width:
        return column
    ending = ""
    if len(set(names)) > 1:
        shared = itertools.takewhile(lambda one: len(set(one)) == 1, zip(*map(reversed, names), strict=False))
        ending = names[0][len(names[0]) - len(list(shared)) :]
        ending = ending[re.search(r"\W|_|$", ending).start() :]
    brief = {name: f"{name.removesuffix(ending)}…" if ending else name for name in names}
    shown = labels(names, width, lambda name, room: cut(brief[name], room))
    return [shown[cell] if isinstance(cell, Name) else cell for cell in column]


def _widths(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[int]:
    return [max(map(cell_len, column)) for column in zip(heads, *rows, strict=True)]


def table_width(lines: Sequence[Sequence[str]]) -> int:
    """Return the columns of a terminal that a table takes: its heads and its rows."""
    widths = _widths(lines[0], lines[1:])
    return sum(widths) + 2 * (len(widths) - 1)


def _line(cells: Sequence[str], widths: Sequence[int], left: Sequence[int]) -> str:
    padded = []
    for i, (cell, width) in enumerate(zip(cells, widths, strict=True)):
        blank = " " * (width - cell_len(cell))
        padded.append(cell + blank if i in left else blank + cell)
    return escape("  ".join(padded).rstrip())


def _print_stacked(out: Console, heads: Sequence[str], rows: Sequence[Sequence[str]], below: Mapping[int, str]) -> None:
    """Print each row on lines of its own: its name, then every figure after its head."""
    out.print(f"[bold]{escape(heads[0])}[/bold]")
    for number, row in enumerate(rows):
        out.print(escape(cut(row[0], out.width) if isinstance(row[0], Name) else row[0]))
        line = "   "
        for head, cell in zip(heads[1:], row[1:], strict=True):
            if not cell:
                continue
            part = f" {_with_unit(head, cut(cell, 40) if isinstance(cell, Name) else cell)} ".rstrip()
            if cell_len(line) + cell_len(part) + 1 > out.width and line.strip():
                out.print(escape(line.rstrip(" ·")))
                line = "   "
            line += part + " ·"
        if line.strip():
            out.print(escape(line.rstrip(" ·")))
        _print_below(out, below, number)


def _with_unit(head: str, cell: str) -> str:
    """Return a cell after its column's head. A unit at the head's end stands after the figure: "median 1.5 ms"."""
    name, unit = re.fullmatch(r"(.*?)(?:,? ?\b(µs|ms|s|GB/s))?", head).groups()
    return " ".join(filter(None, (name, cell, unit)))


def shown_path(path: Path) -> str:
    """Return the path as the user would type it: relative if it lies below the current folder."""
    try:
        here = Path.cwd()
    except OSError:  # the folder was deleted meanwhile
        return printable(str(path))
    return printable(str(path.relative_to(here) if path.is_relative_to(here) else path))


def us(value: float | None) -> str:
    return "–" if value is None else f"{value:,.1f}"


class Unit(msgspec.Struct, frozen=True):
    """The unit of a column of times: its name, its length in µs, and the digits that are shown."""

    name: str
    us: float
    digits: int

    def __call__(self, value: float | None) -> str:
        """Return a time in µs in this unit without its name; "<0.01" for a time that rounds to zero."""
        if value is None:
            return "–"
        least = 10**-self.digits
        rounds_to_zero = 0 < value / self.us < least / 2
        return f"<{least:.{self.digits}f}" if rounds_to_zero else f"{value / self.us:,.{self.digits}f}"

    def range(self, low: float | None, high: float | None) -> str:
        """Return "low–high", or one figure if both look the same."""
        first, last = self(low), self(high)
        return first if first == last else f"{first}–{last}"


def unit_of(values: Iterable[float | None], ms_from: float = 1e4) -> Unit:
    """Return the unit for a column of times (µs), by the longest of them. ms_from: the least µs shown in ms."""
    most = max((abs(value) for value in values if value is not None), default=0.0)
    if most >= 1e7:
        return Unit("s", 1e6, 2)
    if most >= ms_from:
        return Unit("ms", 1e3, 1 if most >= 1e5 else 2)
    return Unit("µs", 1.0, 1)


def sharing(name: str, columns: Sequence[Iterable[float | None]]) -> Iterator[Unit]:
    """Yield the unit of this name for each column of times (µs) that are compared with the others.

    Each column has the decimals that its shortest time needs for four significant digits, but none below 1 µs; or
    0.1 µs, if all of its times are shorter than 10 µs.
    """
    length = {"s": 1e6, "ms": 1e3, "µs": 1.0}[name]
    for column in columns:
        times = [abs(value) for value in column if value]
        before_point = 1 + math.floor(math.log10(min(times, default=length) / length))
        finest = round(math.log10(length)) + (max(times, default=length) < 10.0)
        yield Unit(name, length, max(1, min(4 - before_point, finest)))


def percent(share: float | None) -> str:
    return "–" if share is None else f"{share:.0%}"


def operations(flops: int) -> str:
    return f"{flops / 1e9:,.1f} GFLOP" if flops >= 1e8 else f"{flops / 1e6:,.1f} MFLOP"


def rate(value: float | None) -> str:
    return "–" if value is None else f"{value:,.3g}" if value < 100 else f"{value:,.0f}"


def seconds(value: float) -> str:
    return f"{value:.1f} s" if value >= 1 else f"{value * 1e3:.1f} ms"
