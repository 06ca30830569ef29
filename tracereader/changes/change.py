"""A change is declared in one place: beside the function that proposes it and the one that recognizes it.

The tables of the docs, `--json`, the comparison of two runs and the tests follow from the declarations. A proposal
never computes a saving. It returns an edited graph, and the replay of that graph gives the step's time.
"""

from collections.abc import Callable

import msgspec

from tracereader.changes.context import Case
from tracereader.changes.opportunity import Proposal
from tracereader.figures.ranks import RanksSummary
from tracereader.figures.side import Side


class Change(msgspec.Struct, frozen=True):
    """One change that can be proposed.

    name: its id in --json. assumes: what the predicted time takes for granted beyond the times of the trace.
    propose: returns None if a trace gives no reason. It is None for what the recording itself suggests.
    on_cpu: proposes the change of a program that uses no GPU. needs: the backends on which it can be made; empty for
    any device with a queue. keys: what try-changes calls the ways to make it without an edit of the code.
    followed: whether the second of two runs makes the change: only if it shows the change, the first one does not, and
    they show no other difference in the work. Its docstring is the sign that the docs name. None if two traces do not
    decide it. jobs_followed: the same of two jobs of several ranks.
    """

    name: str
    title: str
    assumes: str
    propose: Callable[[Case], Proposal | None] | None = None
    followed: Callable[[Side, Side], bool] | None = None
    on_cpu: Callable[[Case], Proposal | None] | None = None
    jobs_followed: Callable[[RanksSummary, RanksSummary], bool] | None = None
    needs: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()
