"""All findings, and the cheatsheet: what one sees in a trace, and what it usually means.

The page docs/cheatsheet.md is made by markdown() from the findings that have a row. A finding that costs nothing
measurable is not found.
"""

from collections.abc import Sequence

from tracereader.figures import Summary
from tracereader.findings import attention, attention_predictions, decoding, gpu_work, ops, steps, training
from tracereader.findings.finding import WHERE, Finding, Verdict

MODULES = (steps, ops, gpu_work, attention, attention_predictions, decoding, training)
# By name. A finding that one of these modules declares is included without further registration.
FINDINGS = {one.name: one for module in MODULES for one in vars(module).values() if isinstance(one, Finding)}
PREDICTABLE = {name: one for name, one in FINDINGS.items() if one.predicts}
CHEATSHEET = sorted((one for one in FINDINGS.values() if one.where), key=lambda one: WHERE.index(one.where))

Shown = tuple[Finding, Verdict]


def found(summary: Summary) -> list[Shown]:
    """The findings that a trace shows: those with a cost first, the costliest before the others."""
    verdicts = [(one, one.ask(summary)) for one in CHEATSHEET]
    return sorted((one for one in verdicts if one[1].holds), key=lambda one: -(one[1].cost_us or 0))


# A finding that costs a smaller share of a step is not part of the answer.
WORTH_TELLING = 0.05


def costliest(summary: Summary, shown: Sequence[Shown]) -> list[Shown]:
    """The one or two findings that cost a step most, of those that a trace shows."""
    step_us = max(summary.chosen.cpu_us, summary.chosen.gpu_busy_us)
    return [one for one in shown if (one[1].cost_us or 0) > WORTH_TELLING * step_us][:2]


def what_to_do(summary: Summary) -> str:
    """What the regime usually means."""
    busy = dict.fromkeys(("compute", "memory", "gpu"), steps.gpu_bound.means)
    return {"overhead": steps.overhead_bound.means, **busy}.get(summary.waits_for, "")


def reveals(summary: Summary) -> list[str]:
    """One line for each of the findings that cost a step most; if none has a cost, one characteristic finding."""
    shown = found(summary)
    most = costliest(summary, shown) or [one for one in shown if one[0].telling][:1]
    return [f"{one.see}: {verdict.evidence}" for one, verdict in most]


def markdown() -> str:
    """The whole cheatsheet, as docs/cheatsheet.md holds it."""
    lines = ["| where | what you see | what it usually means |", "|---|---|---|"]
    lines += [f"| {one.where} | {one.see} | {one.means} |" for one in CHEATSHEET]
    return "\n".join(lines)
