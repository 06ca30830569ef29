"""What of a report is shown, and how much of it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from tracereader.show import sections

# A longer table shows so many rows, and the others in one.
ROWS = 8

Row = TypeVar("Row")


@dataclass(frozen=True)
class View:
    """What of a report is shown, and of which step. step: None is a typical one. only: None is the usual sections.

    by_flag: the sections that a flag of their own asks for. all: every section and row. brief: what a numbered script
    shows of its own run. rank: of several ranks, the one that is shown in full.
    """

    only: Sequence[str] | None = None
    step: int | None = None
    by_flag: Sequence[str] = ()
    all: bool = False
    brief: bool = False
    rank: int | None = None

    @classmethod
    def of(cls, args, brief: bool = False) -> "View":
        """What a command's flags ask for. Raises BadInput where one flag excludes what another one asks for."""
        return cls(args.only, args.step, sections.by_flag(args), args.all, brief)

    @property
    def usual(self) -> bool:
        """Whether the usual sections are shown: neither certain ones nor all were asked for."""
        return not (self.only or self.all)

    def shows(self, section: str) -> bool:
        if self.only is not None:
            return section in self.only
        return self.all or not self.brief or sections.SECTIONS[section].brief

    def asks_for(self, section: str) -> bool:
        """Whether this section was asked for by its name."""
        return section in (self.only or ()) or section in self.by_flag

    def most(self, rows: int) -> int | None:
        """How many rows of something to show; None: all."""
        return None if self.all else rows

    def parted(self, rows: Sequence[Row], most: int = ROWS) -> tuple[Sequence[Row], Sequence[Row]]:
        """The rows of a table that are shown, and the others, which share one row: none, or at least two."""
        if self.all or len(rows) <= most + 1:
            return rows, ()
        return rows[:most], rows[most:]


def others(rows: Sequence) -> str:
    """The name of the row that the others share."""
    return f"{len(rows):,} others"
