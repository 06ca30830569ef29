"""torch's profiler table, in the width of a terminal, and how to read it."""

from collections.abc import Iterator, Sequence

from rich.console import Console

from tracereader.figures.table import Row, Table
from tracereader.findings.finding import duration
from tracereader.show.text import Name, Unit, kernel_labels, paragraph, plain, print_columns, sharing, unit_of
from tracereader.show.view import ROWS, View, others
from tracereader.trace.kernel_names import short

ROWS_SHOWN = 40  # the .txt has 15
CALLS_NAMED = 3
LABEL_SPAN_MISLEADS = 1.2  # an annotation's second row this many times the GPU's time differs in meaning


def show(out: Console, table: Table, names: Sequence[str], steps: int, view: View) -> None:
    """Print the rows, torch's two last lines, and the meaning of self, total and the annotation's second row."""
    gpu = any(row.on_gpu for row in table.rows)
    shown, rest = view.parted(table.rows, ROWS if view.brief else ROWS_SHOWN)
    times = [us for row in table.rows for us in (row.self_cpu_us, row.total_cpu_us, row.self_gpu_us, row.total_gpu_us)]
    (unit,) = sharing(unit_of([*times, table.self_cpu_us], ms_from=1e5).name, [times])
    recorded = f"{steps} steps, {unit.name}" if steps > 1 else unit.name
    heads = [f"profiler table, {recorded}", "self CPU", "total CPU", *(["self GPU", "total GPU"] * gpu), "calls"]
    all_rows, on_gpu = f"self times of all {len(table.rows)} rows", [unit(table.self_gpu_us), ""] * gpu
    totals = [all_rows, unit(table.self_cpu_us), "", *on_gpu, ""]
    rows = list(_rows(shown, names, gpu, unit))
    if rest:
        on_gpu = [unit(sum(row.self_gpu_us for row in rest if row.on_gpu)), ""] * gpu
        calls = f"{sum(row.calls for row in rest):,}"
        rows.append([others(rest), unit(sum(row.self_cpu_us for row in rest)), "", *on_gpu, calls])
    print_columns(out, heads, [*rows, totals], section="table")
    for line in list(_how_to_read(table, unit))[: 1 if view.brief else None]:
        paragraph(out, line)


def _rows(shown: Sequence[Row], names: Sequence[str], gpu: bool, unit: Unit) -> Iterator[list[str]]:
    named = kernel_labels([*names, *(row.name for row in shown)])
    for row in shown:
        cpu = ["–", "–"] if row.on_gpu else [unit(row.self_cpu_us), unit(row.total_cpu_us)]
        times = [unit(row.self_gpu_us), unit(row.total_gpu_us)] if gpu else []
        yield [Name(named[row.name]), *cpu, *times, f"{row.calls:,}"]


def _how_to_read(table: Table, unit: Unit) -> Iterator[str]:
    label = next((row for row in table.rows if row.name == table.label and not row.on_gpu), None)
    if label and table.label_calls:
        calls = [f"{unit(time)} {plain(short(name, 30))}" for name, time in table.label_calls.items()]
        rest = sum(list(table.label_calls.values())[CALLS_NAMED:])
        calls = calls[:CALLS_NAMED] + ([f"{unit(rest)} other calls"] if rest else [])
        yield (
            f"self: time in the row itself; total: with the calls below it. {plain(label.name)}'s total of "
            f"{unit(label.total_cpu_us)} {unit.name} is {unit(label.self_cpu_us)} of self time + {' + '.join(calls)}"
        )
    for span in table.label_spans[:1]:
        if label and span.name == label.name and span.us > LABEL_SPAN_MISLEADS * table.self_gpu_us > 0:
            yield (
                f"torch lists {plain(label.name)} twice: the second row, which this table omits, is from its first "
                f"kernel's start to its last one's end, including idle gaps: {duration(span.us)}, "
                f"{span.us / table.self_gpu_us:,.0%} of the GPU's time"
            )
