"""The predictions of numbered scripts. Calling one of these findings with its parameters makes one prediction.

A prediction has `text` (its sentence), `ask(summary)` (a trace's verdict) and `record` (the form in a trace). Every
finding that is declared with `predicts=` is here under its name: expect.regime_is("overhead-bound").
"""

from tracereader.findings.cheatsheet import PREDICTABLE
from tracereader.findings.finding import Finding, Prediction, read_record


def __getattr__(name: str) -> Finding:
    """Return the finding of this name; AttributeError if no such finding can be predicted."""
    if name in PREDICTABLE:
        return PREDICTABLE[name]
    raise AttributeError(f"no finding {name!r} can be predicted; those that can: {', '.join(sorted(PREDICTABLE))}")


def __dir__() -> list[str]:
    return sorted([*globals(), *PREDICTABLE])


def from_record(record: dict) -> Prediction | None:
    """Return the prediction of a trace's record; None if this version does not know it."""
    return read_record(record, PREDICTABLE)
