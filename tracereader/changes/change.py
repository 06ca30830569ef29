"""A change is declared in one place: above the function that proposes it, beside the one that recognizes it.

The tables of the docs, `--json`, the comparison of two runs and the tests follow from the declarations. A proposal
never computes a saving. It returns an edited graph, and the replay of that graph gives the step's time.
"""

from collections.abc import Callable

import msgspec

from tracereader.changes.context import Case
from tracereader.changes.opportunity import Proposal
from tracereader.figures.ranks import RankFigures, RanksSummary
from tracereader.two_runs.side import Side

Propose = Callable[[Case], Proposal | None]


class Change(msgspec.Struct, frozen=True):
    """One change that can be proposed.

    name: its id in --json. assumes: what the predicted time takes for granted beyond the times of the trace.
    propose: returns None if a trace gives no reason. It is None for what the recording itself suggests.
    on_cpu: proposes the change of a program that uses no GPU. needs: the backends on which it can be made; empty for
    any device with a queue. keys: what try-changes calls the ways to make it without an edit of the code.
    followed: whether the second of two runs makes the change: only if it shows the change, the first one does not, and
    they show no other difference in the work. None if two traces do not decide it. jobs_followed: the same of two jobs
    of several ranks. replayed: of a change of all ranks, which changes/ranks.py declares, returns the rank to replay;
    None if there is no reason for the change.
    """

    name: str
    title: str
    assumes: str = ""
    propose: Propose | None = None
    followed: Callable[[Side, Side], bool] | None = None
    on_cpu: Propose | None = None
    jobs_followed: Callable[[RanksSummary, RanksSummary], bool] | None = None
    needs: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()
    replayed: Callable[[RanksSummary], RankFigures | None] | None = None

    def __call__(self, case: Case) -> Proposal | None:
        return self.propose(case)


def change(title: str, assumes: str = "", on_cpu: Propose | bool = False, **declared) -> Callable[[Propose], Change]:
    """Return a decorator that declares a function as the proposal of a change with its name and these fields.

    on_cpu: True if the function also proposes the change of a program that uses no GPU.
    """
    return lambda propose: Change(
        propose.__name__, title, assumes, propose, on_cpu=propose if on_cpu is True else on_cpu or None, **declared
    )
