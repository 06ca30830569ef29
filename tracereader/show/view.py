"""What of a report is shown, and how much of it."""

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console

# What a numbered script shows of its own run: the rest is a command away.
BRIEF = ("short", "guesses", "steps", "lanes", "training", "table")


@dataclass(frozen=True)
class View:
    """What of a report is shown, and of which step. step: None is a typical one. only: None is the usual sections.

    all: every section and row. brief: what a numbered script shows of its own run. share: of the rows that a table
    shows where there is room.
    """

    only: Sequence[str] | None = None
    step: int | None = None
    lanes: bool = False  # drawn at a terminal anyway
    all: bool = False
    brief: bool = False
    share: float = 1.0

    @classmethod
    def of(cls, args, brief: bool = False) -> "View":
        return cls(args.only, args.step, args.lanes, args.all, brief)

    def shows(self, section: str) -> bool:
        if self.only is not None:
            return section in self.only
        return self.all or not self.brief or section in BRIEF

    def most(self, rows: int) -> int | None:
        """How many rows of something to show; None: all."""
        return None if self.all else max(1, round(rows * self.share))


def and_more(out: Console, count: int, shown: int) -> None:
    """How many rows a table leaves out, where it does."""
    if count > shown:
        out.print(f"… and {count - shown:,} more")
