"""torch's profiler table, in the width of a terminal, and how to read it."""

from collections.abc import Sequence

from rich.console import Console

from tracereader.figures.table import Row, Table
from tracereader.show.text import Name, paragraph, plain, print_columns, us
from tracereader.show.view import ROWS, View, others
from tracereader.trace.kernel_names import labels, short

ROWS_SHOWN = 40  # the .txt has 15
CALLS_NAMED = 3
LABEL_SPAN_MISLEADS = 1.2  # an annotation's second row this many times the GPU's time differs in meaning


def show(out: Console, table: Table, steps: int, view: View) -> None:
    """Print the rows, torch's two last lines, and the meaning of self, total and the annotation's second row."""
    gpu = any(row.on_gpu for row in table.rows)
    shown, rest = view.parted(table.rows, ROWS if view.brief else ROWS_SHOWN)
    recorded = f"{steps} steps, µs" if steps > 1 else "µs"
    heads = [f"profiler table, {recorded}", "self CPU", "total CPU", *(["self GPU", "total GPU"] * gpu), "calls"]
    totals = [
        f"self times of all {len(table.rows)} rows",
        us(table.self_cpu_us),
        "",
        *([us(table.self_gpu_us), ""] * gpu),
        "",
    ]
    rows = _rows(shown, gpu)
    if rest:
        on_gpu = [us(sum(row.self_gpu_us for row in rest if row.on_gpu)), ""] * gpu
        calls = f"{sum(row.calls for row in rest):,}"
        rows.append([others(rest), us(sum(row.self_cpu_us for row in rest)), "", *on_gpu, calls])
    print_columns(out, heads, [*rows, totals], section="table")
    for line in _how_to_read(table)[: 1 if view.brief else None]:
        paragraph(out, line)


def _rows(shown: Sequence[Row], gpu: bool) -> list[list[str]]:
    named = labels([row.name for row in shown], 60)
    rows = []
    for row in shown:
        cpu = ["–", "–"] if row.on_gpu else [us(row.self_cpu_us), us(row.total_cpu_us)]
        times = [us(row.self_gpu_us), us(row.total_gpu_us)] if gpu else []
        rows.append([Name(named[row.name]), *cpu, *times, f"{row.calls:,}"])
    return rows


def _how_to_read(table: Table) -> list[str]:
    lines = []
    label = next((row for row in table.rows if row.name == table.label and not row.on_gpu), None)
    if label and table.label_calls:
        calls = [f"{us(time)} {plain(short(name, 30))}" for name, time in table.label_calls.items()]
        rest = sum(list(table.label_calls.values())[CALLS_NAMED:])
        calls = calls[:CALLS_NAMED] + ([f"{us(rest)} other calls"] if rest else [])
        lines.append(
            f"self: time in the row itself; total: with the calls below it. {plain(label.name)}'s total of "
            f"{us(label.total_cpu_us)} is {us(label.self_cpu_us)} of self time + {' + '.join(calls)}"
        )
    for span in table.label_spans[:1]:
        if label and span.name == label.name and span.us > LABEL_SPAN_MISLEADS * table.self_gpu_us > 0:
            lines.append(
                f"torch lists {plain(label.name)} twice: the second row, which this table omits, is from its first "
                f"kernel's start to its last one's end, including idle gaps: {us(span.us)} µs, "
                f"{span.us / table.self_gpu_us:,.0%} of the GPU's time"
            )
    return lines
