"""What a numbered script can predict. Called with its parameters, each of these findings makes one prediction.

A prediction's text is its sentence, ask(summary) the verdict of a trace, and record what the trace stores. Every
finding that is declared with `predicts=` is here under its name: expect.regime_is("overhead-bound").
"""

from tracereader.findings.cheatsheet import PREDICTABLE
from tracereader.findings.finding import Finding, Prediction, read_record


def __getattr__(name: str) -> Finding:
    """The finding of this name."""
    if name in PREDICTABLE:
        return PREDICTABLE[name]
    raise AttributeError(f"no finding {name!r} can be predicted; those that can: {', '.join(sorted(PREDICTABLE))}")


def __dir__() -> list[str]:
    return sorted([*globals(), *PREDICTABLE])


def from_record(record: dict) -> Prediction | None:
    """The prediction that a trace holds; None where this version does not know it."""
    return read_record(record, PREDICTABLE)
