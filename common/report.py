"""All that is printed; nothing else prints."""

import contextlib
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

if TYPE_CHECKING:
    from common.harness import Run

# Shorter waits would only flicker.
STATUS_AFTER_S = 1.5


def console() -> Console:
    # Made on demand, so that a redirected stdout is the one written to.
    return Console(highlight=False, soft_wrap=True)


def error(problem: object) -> None:
    """One line on stderr."""
    print(f"{Path(sys.argv[0]).name}: {' '.join(str(problem).split())}", file=sys.stderr)


@contextlib.contextmanager
def status(text: str) -> Iterator[None]:
    """Say what is going on, at a terminal, while it lasts longer than STATUS_AFTER_S."""
    if not sys.stderr.isatty():
        yield
        return
    spinner = Console(stderr=True).status(text)
    timer = threading.Timer(STATUS_AFTER_S, spinner.start)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
        spinner.stop()


def header(run: "Run") -> None:
    """What ran, what it cost to get going, whether it computed the right thing, and its files."""
    out = console()
    facts = [f"first call {seconds(run.first_call_s)}"]
    if run.peak_bytes is not None:
        facts.append(f"peak device memory {size(run.peak_bytes)}")
    if run.error is None:
        facts.append("eager: the reference itself")
    else:
        facts.append(f"matches eager: relative error {run.error:.1e}")
    _two_columns(
        out,
        [
            (f"[bold]{run.title}[/bold]", f"{run.device_name} · torch {run.torch_version}"),
            (" · ".join(facts), ""),
        ],
    )
    if run.device_type == "cpu":
        out.print("no accelerator in this run: the trace has a CPU lane and no GPU lane")
    out.print()
    _two_columns(
        out,
        [
            (f"  {shown_path(run.trace)}", "the trace: open it at ui.perfetto.dev"),
            (f"  {shown_path(run.table)}", "the profiler table"),
        ],
    )
    out.print()
    for line in run.totals:
        out.print(line)


def _two_columns(out: Console, rows: list[tuple[str, str]]) -> None:
    lefts = [out.render_str(left) for left, _ in rows]
    width = max(left.cell_len for left in lefts)
    for left, (_, right) in zip(lefts, rows, strict=True):
        left.pad_right(width - left.cell_len)
        out.print(left, right, sep="   ")


def shown_path(path: Path) -> str:
    """The path as the user would type it: relative where it lies below the current folder."""
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


def seconds(value: float) -> str:
    return f"{value:.1f} s" if value >= 1 else f"{value * 1e3:.1f} ms"


def size(count: int) -> str:
    """Bytes in decimal units, as memory bandwidth is quoted."""
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= scale:
            return f"{count / scale:.1f} {unit}"
    return f"{count} B"
