"""What is printed besides reports: errors, progress, questions, tables of measurements.

Together with report.py, all that is printed; nothing else prints.
"""

import contextlib
import getpass
import socket
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape

from common.text import columns, console, percent, print_table, rate, seconds, shown_path, us

if TYPE_CHECKING:
    from common.measure import FirstCall, Roofs
    from common.sweep import Point

# Shorter waits would only flicker.
STATUS_AFTER_S = 1.5


def error(problem: object) -> None:
    """One line on stderr."""
    print(f"{Path(sys.argv[0]).name}: {' '.join(str(problem).split())}", file=sys.stderr)


@contextlib.contextmanager
def status(text: str) -> Iterator[None]:
    """Say what is going on, at a terminal, while it lasts longer than STATUS_AFTER_S."""
    if not sys.stderr.isatty():
        yield
        return
    spinner = Console(file=sys.stderr).status(text)
    timer = threading.Timer(STATUS_AFTER_S, spinner.start)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
        spinner.stop()


def ask(question: str) -> str:
    """One question at the terminal."""
    console().print(f"[bold]{escape(question)}[/bold] ", end="")
    return input().strip()


def first_calls(title: str, calls: "Sequence[FirstCall]") -> None:
    """What was measured after the profile, with inputs not seen before."""
    out = console()
    out.print()
    out.print(f"[bold]{escape(title)}[/bold]")
    table = columns("input", "first call", "again", "graphs by then", "relative error", numbers_from=1)
    for call in calls:
        times = (seconds(call.seconds), seconds(call.again))
        table.add_row(escape(call.name), *times, str(call.graphs), f"{call.error:.1e}")
    print_table(out, table)


def progress(what: str, file: Path) -> None:
    console().print(f"{escape(what)}   {escape(shown_path(file))}")


def sweep(over: str, points: "Sequence[Point]", roofs: "Roofs", crossing: float | None) -> None:
    """A line for each size, the roofs, and where the regimes meet."""
    out = console()
    out.print()
    table = columns(f"[bold]{over}[/bold]", "CPU µs a step", "GPU busy µs", "GPU idle", "pointwise share",
                     "GEMM TFLOP/s", "pointwise GB/s", "regime", numbers_from=0)  # fmt: skip
    table.columns[-1].justify = "left"
    for one in points:
        share = one.regime.share
        table.add_row(
            str(one.size), us(one.cpu_us), us(one.busy_us or None), percent(None if share is None else 1 - share),
            percent(one.pointwise_share), rate(one.tflops), rate(one.gb_s), one.regime.name,
        )  # fmt: skip
    print_table(out, table)
    out.print()
    out.print(
        f"roofs of this machine, measured just now: {rate(roofs.tflops)} TFLOP/s (a large matrix product), "
        f"{roofs.gb_s:,.0f} GB/s (a large copy, read plus written)"
    )
    if crossing:
        out.print(f"a step's GPU work outgrows its CPU time at about {over} {crossing:,.0f}")


def saved_picture(file: Path) -> None:
    console().print(f"picture: {escape(shown_path(file))}")


def no_picture() -> None:
    console().print("no picture without matplotlib: uv run --extra plot … draws it")


def serving(url: str, path: Path, port: int, opened: bool) -> None:
    """Where the page is that hands a trace to Perfetto, and how to reach it."""
    out = console()
    out.print()
    out.print(f"[bold]Perfetto[/bold]   {shown_path(path)} waits at {url}")
    if not opened:
        out.print("no browser here: on the machine where yours is, type")
        out.print(f"  ssh -L {port}:127.0.0.1:{port} {getpass.getuser()}@{socket.gethostname()}")
        out.print("and open that address. Nothing is uploaded: the trace goes from here to your browser")
    out.print("Ctrl-C ends it; it ends by itself after the hand-over")


def served(handed_over: bool) -> None:
    console().print("handed over to Perfetto" if handed_over else "not handed over: no longer waiting")
