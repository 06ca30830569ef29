"""The content of a report, and its length."""

from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from tracereader.command import BadInput
from tracereader.show import sections
from tracereader.show.text import Name
from tracereader.trace.kernel_names import labels
from tracereader.trace.marks import StepsBy

# A longer table shows this many rows, and the others in one row.
ROWS = 8

Row = TypeVar("Row")


class View(msgspec.Struct, frozen=True):
    """The content of a report, and its step. step: None for a typical one. only: None for the usual sections.

    lanes: whether they are drawn where the output is no terminal, too. all: every section and row. brief: the content
    that a numbered script shows of its own run. rank: the one of several ranks that is shown in full. steps_by: what
    marks the steps, as in read(). process: the one of several processes in a file, as in read().
    left_out: the files of a folder that are left out as front ends.
    """

    only: Sequence[str] | None = None
    step: int | None = None
    lanes: bool = False
    all: bool = False
    brief: bool = False
    rank: int | None = None
    steps_by: str | StepsBy = StepsBy.FOUND
    process: str | None = None
    left_out: Sequence[Path] = ()

    @classmethod
    def of(cls, args, brief: bool = False, **more: object) -> "View":
        """Return the view that a command's flags ask for. more: fields that only some commands have flags for."""
        return cls(args.only, args.step, args.lanes, args.all, brief, **more)

    @property
    def usual(self) -> bool:
        """Return whether the usual sections are shown: neither certain ones nor all were asked for."""
        return not (self.only or self.all)

    def shows(self, section: str) -> bool:
        if self.only is not None:
            return section in self.only
        return self.all or not self.brief or section in sections.BRIEF

    def shown_of(self, names: Sequence[str], report: str) -> list[str]:
        """Return the sections of a report that are shown. report: what has these sections. Raises BadInput for none."""
        shown = [name for name in names if self.shows(name)]
        if not shown:
            raise BadInput(f"--only {','.join(self.only)}: {report} has the sections {', '.join(names)}")
        return shown

    def most(self, rows: int) -> int | None:
        """Return the number of rows to show; None for all."""
        return None if self.all else rows

    def parted(self, rows: Sequence[Row], most: int = ROWS) -> tuple[Sequence[Row], Sequence[Row]]:
        """Return the rows of a table that are shown, and the others, which share one row: none, or at least two."""
        return (rows, ()) if self.all or len(rows) <= most + 1 else (rows[:most], rows[most:])


def summed(view: View, rows: Sequence[tuple], width: int) -> list[tuple]:
    """Return the rows of a table that are shown, their names shortened, and a row for the others with their sums.

    rows: a name and figures each. The others' row has None for a figure that is text.
    """
    shown, rest = view.parted(rows)
    named = labels([name for name, *_ in shown], width)
    columns = list(zip(*rest, strict=True))[1:]
    sums = (None if any(isinstance(one, str) for one in column) else sum(column) for column in columns)
    return [*((Name(named[name]), *figures) for name, *figures in shown), *[(others(rest), *sums)] * bool(rest)]


def others(rows: Sequence) -> str:
    """Return the name of the row that the others share."""
    return f"{len(rows):,} others"
