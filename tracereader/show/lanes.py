"""One step as the lanes that Perfetto shows, in characters: nested CPU slices, with GPU work below."""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import msgspec

from tracereader.findings.finding import counted
from tracereader.trace import Op, Step, Work, kernel_names
from tracereader.trace.grouped import grouped

# The depth from which on nesting is no longer drawn. The rungs need 9.
MAX_ROWS = 12
COUNTED = len(" +9999 too short")  # at the end of a row
LEAST = 16  # columns; in fewer, a lane shows nothing
# The character of a collective that waits for another rank.
WAITS = "."


class Glyphs(msgspec.Struct, frozen=True):
    """start and fill draw a slice with room for its name; tiny draws one of a single column."""

    start: str
    fill: str
    tiny: str
    tick: str
    unit: str


class Mark(msgspec.Struct, frozen=True):
    """An interval of a lane with a name; ns. kind: `wait` for a collective that only waits for another rank."""

    start: int
    end: int
    name: str = ""
    kind: str = "mark"


UNICODE = Glyphs(start="▐", fill="▬", tiny="▐", tick="┬", unit=" µs")
ASCII = Glyphs(start="[", fill="=", tiny="|", tick="+", unit=" us")


def draw(step: Step, width: int, glyphs: Glyphs, layers: Mapping[int, str] = MappingProxyType({})) -> list[str]:
    """Return the lines of the picture, at most `width` columns wide. layers: names of layers by a slice's id.

    A slice narrower than a column is drawn as one mark with its neighbours, and counted at the end of its row.
    """
    start = step.start
    end = max([step.end, *(one.end for one in step.work)])
    margin = 6
    columns = width - margin - COUNTED
    if end <= start or columns < LEAST:
        return []
    column = _columns_of(start, end, columns)
    lines = [" " * margin + _axis((end - start) / 1e3, columns, glyphs)]
    for number, rows in enumerate(_cpu_rows(step)):
        # A slice too narrow for a name has only narrower slices below it.
        widest = [max(column(one.end) - column(one.start) for one in row) for row in rows]
        drawn = min(MAX_ROWS, next((depth + 1 for depth, width in enumerate(widest) if width < 4), MAX_ROWS))
        for depth, row in enumerate(rows[:drawn]):
            title = ("CPU" if number == 0 else f"CPU {number + 1}") if depth == 0 else ""
            lines.append(f"{title:{margin}}" + _row(row, column, columns, glyphs, layers))
        if len(rows) > drawn:
            lines.append(" " * margin + f"({counted(len(rows) - drawn, 'deeper row')} not drawn)")
    for number, work in enumerate(grouped((one.track, one) for one in step.work).values()):
        title = "GPU" if number == 0 else f"GPU {number + 1}"
        lines.append(f"{title:{margin}}" + _row(work, column, columns, glyphs, layers))
    return [line.rstrip() for line in lines]


def draw_rows(rows: Sequence[tuple[str, Sequence[Mark]]], width: int, glyphs: Glyphs) -> list[str]:
    """Return titled rows on one axis; at most `width` wide."""
    pieces = [one for _, row in rows for one in row]
    margin = max([6, *(len(title) + 1 for title, _ in rows)])
    columns = width - margin - COUNTED
    if not pieces or columns < LEAST:
        return []
    start, end = min(one.start for one in pieces), max(one.end for one in pieces)
    column = _columns_of(start, end, columns)
    lines = [" " * margin + _axis((end - start) / 1e3, columns, glyphs)]
    lines += [f"{title:{margin}}" + _row(row, column, columns, glyphs, {}) for title, row in rows]
    return [line.rstrip() for line in lines]


def _columns_of(start: int, end: int, columns: int) -> Callable[[int], int]:
    """Return the function that gives a time's column."""
    scale = columns / max(1, end - start)
    return lambda time: min(columns, max(0, round((time - start) * scale)))


def _cpu_rows(step: Step) -> list[list[list[Op]]]:
    """Return the rows of each thread, the outermost slices first."""
    rows = grouped(((op.track, depth), op) for op, depth in step.dispatch())
    return list(grouped((track, row) for (track, _), row in rows.items()).values())


def _row(slices: Sequence[Op | Work | Mark], column, columns: int, glyphs: Glyphs, layers: Mapping[int, str]) -> str:
    cells = [" "] * columns
    free, hidden = 0, 0
    for one in sorted(slices, key=lambda one: one.start):
        left, right = column(one.start), column(one.end)
        right = max(right, left + 1)
        left = max(left, free)
        if left >= min(right, columns):
            hidden += 1
            continue
        room = min(right, columns) - left
        if one.kind == "wait":
            cells[left : left + room] = WAITS * room
        elif room == 1:
            cells[left] = glyphs.tiny
        else:
            name = " ".join(word for word in (layers.get(id(one)), one.name.removeprefix("aten::")) if word)
            name = kernel_names.short(name, max(1, room - 1)) if room > 3 else ""
            cells[left : left + room] = (glyphs.start + name).ljust(room, glyphs.fill)
        free = left + room
    return "".join(cells) + (f" +{hidden} too short" if hidden else "")


def _axis(length_us: float, columns: int, glyphs: Glyphs) -> str:
    """Return ticks at round times, about one in 16 columns."""
    step = next(
        one * 10**power for power in range(-3, 18) for one in (1, 2, 5) if one * 10**power * columns / length_us >= 16
    )
    cells = [" "] * (columns + 12)
    tick = 0
    while tick * step <= length_us:
        at = round(tick * step * columns / length_us)
        text = f"{glyphs.tick}{tick * step:g}{'' if tick else glyphs.unit}"
        cells[at : at + len(text)] = text
        tick += 1
    return "".join(cells[: columns + 12]).rstrip()
