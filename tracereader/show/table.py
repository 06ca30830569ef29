"""torch's profiler table, as wide as a terminal, and how to read it."""

from collections.abc import Sequence

from rich.console import Console

from tracereader.figures.table import Row, Table
from tracereader.show.text import Name, paragraph, plain, print_columns, us
from tracereader.trace.kernel_names import labels, short

ROWS_SHOWN, ROWS_IN_BRIEF = 40, 7  # the .txt has 15
CALLS_NAMED = 3
LABEL_SPAN_MISLEADS = 1.2  # times the GPU's time from which a label's second row says something else


def show(out: Console, table: Table, steps: int, brief: bool, every: bool) -> None:
    """Its rows, torch's two last lines, and what self, total and the label's second row are."""
    gpu = any(row.on_gpu for row in table.rows)
    most = None if every else ROWS_IN_BRIEF if brief else ROWS_SHOWN
    shown = table.rows[:most]
    recorded = f"{steps} steps, µs" if steps > 1 else "µs"
    heads = [f"profiler table, {recorded}", "self CPU", "total CPU", *(["self GPU", "total GPU"] * gpu), "calls"]
    totals = [
        f"self times of all {len(table.rows)} rows",
        us(table.self_cpu_us),
        "",
        *([us(table.self_gpu_us), ""] * gpu),
        "",
    ]
    print_columns(out, heads, [*_rows(shown, gpu), totals], section="table")
    for line in _how_to_read(table)[: 1 if brief else None]:
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
            f"self: without what a row calls; total: with it. {plain(label.name)}'s {us(label.total_cpu_us)} are "
            f"{us(label.self_cpu_us)} of its own + {' + '.join(calls)}"
        )
    for span in table.label_spans[:1]:
        if label and span.name == label.name and span.us > LABEL_SPAN_MISLEADS * table.self_gpu_us > 0:
            lines.append(
                f"torch lists {plain(label.name)} twice: the second row, left out here, is from its first kernel's "
                f"start to its last one's end, idle gaps included: {us(span.us)} µs, "
                f"{span.us / table.self_gpu_us:,.0%} of the GPU's time"
            )
    return lines
