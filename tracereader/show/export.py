"""Writes a trace as JSON of which Perfetto shows every slice, for --export."""

import gzip
from pathlib import Path

from tracereader.command import BadInput
from tracereader.findings.finding import counted
from tracereader.show import tracks
from tracereader.show.atomic import replace, status_of
from tracereader.show.perfetto import said_of
from tracereader.show.text import console, paragraph, plain, shown_path
from tracereader.trace import TraceError

ENDINGS = (".json", ".json.gz")


def refuse_early(target: str, force: bool, traces: list[Path]) -> None:
    """Raise BadInput if the copy cannot be written there. This comes before a trace is read, which may take long."""
    status = status_of("--export", target, traces)
    name = Path(target).name
    if not name.endswith(ENDINGS) or name in ENDINGS:
        raise BadInput(f"--export {target}: the name has to end in .json or .json.gz")
    if status is not None and not force:
        raise BadInput(f"--export {target}: exists; --force overwrites it")


def write(trace: Path, target: str, force: bool, limit: int) -> None:
    """Write a trace's copy, and print the number of slices that were moved. Raises BadInput."""
    try:
        content, moved = tracks.copy_of(trace, limit)
    except TraceError as problem:
        raise BadInput(problem) from None
    _put(content, target, force, [trace])
    said = f"; {said_of(moved)}" if moved else "; no slice had to be moved"
    paragraph(console(), f"{plain(shown_path(Path(target)))} is written{said}")


def write_merged(content: bytes, target: str, force: bool, traces: list[Path], ranks: int) -> None:
    """Write the merged traces of a run's ranks. content: packed with gzip. ranks: their number. Raises BadInput."""
    _put(gzip.decompress(content), target, force, traces)
    paragraph(console(), f"{plain(shown_path(Path(target)))} is written: {counted(ranks, 'rank')} in one trace")


def _put(content: bytes, target: str, force: bool, traces: list[Path]) -> None:
    refuse_early(target, force, traces)  # again, because another program may have written the file meanwhile
    replace(Path(target), gzip.compress(content, compresslevel=1) if target.endswith(".gz") else content)
