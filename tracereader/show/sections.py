"""The sections of a report, and the flags that choose them and their destination."""

import argparse

from tracereader.command import BadInput, not_negative

SECTIONS = (
    "short", "try", "gpu", "predictions", "steps", "lanes", "training", "table", "repeats", "kernels", "inside", "cpu",
    "work", "names", "starts", "series", "chain", "patterns",
)  # fmt: skip
# What a numbered script shows of its own run, and what only GPU activity fills.
BRIEF = ("short", "try", "predictions", "steps", "lanes", "training", "table", "inside")
NEED_GPU = ("gpu", "repeats", "kernels", "work", "names", "starts")


def _sections(text: str) -> list[str]:
    """Return the sections of a comma-separated list. An unknown name, such as a file's, is an error."""
    chosen = text.split(",")
    for name in chosen:
        if name not in SECTIONS:
            raise argparse.ArgumentTypeError(f"no section {name!r}; there are {', '.join(SECTIONS)}")
    return chosen


def add_view_flags(group) -> None:
    """Add the flags that the numbered scripts and read-trace share: the content of a report, and its destination."""
    how_much = group.add_mutually_exclusive_group()
    only = f"show only these sections of the report, separated by commas: {', '.join(SECTIONS)}"
    how_much.add_argument("--only", type=_sections, metavar="SECTION,…", help=only)
    how_much.add_argument("--all", action="store_true", help="show every section with all its rows")
    group.add_argument("--step", type=not_negative, metavar="N", help="report on step #N (default: a typical step)")
    drawn = "draw the lanes of that step even if the output is not a terminal"
    group.add_argument("--lanes", action="store_true", help=drawn)
    waits = "open the trace in Perfetto in your browser (waits at most 10 minutes)"
    group.add_argument("--open", action="store_true", help=waits)
    group.add_argument("--html", metavar="FILE", help="write the whole report as one HTML file (-: standard output)")
    group.add_argument("--force", action="store_true", help="let --html overwrite a file that is not such a report")


def refuse_conflicts(args) -> None:
    """Raise BadInput if --only leaves out the lanes that --lanes asks for."""
    if args.lanes and args.only and "lanes" not in args.only:
        raise BadInput("--lanes: --only leaves the lanes out; add lanes to it, or leave out --lanes")
