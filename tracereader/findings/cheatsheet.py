"""All findings, and the cheatsheet, which lists patterns in a trace and their usual meaning.

markdown() makes the page docs/cheatsheet.md from the findings that have a row.
"""

from collections.abc import Iterable

import msgspec

from tracereader.figures import Summary
from tracereader.findings import attention, attention_predictions, gpu_work, ops, steps, training
from tracereader.findings.device_words import in_its_words
from tracereader.findings.finding import WHERE, Finding, Verdict

MODULES = (steps, ops, gpu_work, attention, attention_predictions, training)
# By name. A finding that one of these modules declares is included without further registration.
FINDINGS = {one.name: one for module in MODULES for one in vars(module).values() if isinstance(one, Finding)}
PREDICTABLE = {name: one for name, one in FINDINGS.items() if one.predicts}
CHEATSHEET = sorted((one for one in FINDINGS.values() if one.where), key=lambda one: WHERE.index(one.where))

Shown = tuple[Finding, Verdict]


def found(summary: Summary, asked: Iterable[Finding] = CHEATSHEET) -> list[Shown]:
    """Return those of the asked findings that a trace shows, in their order and in the words of the trace's device."""
    shown, backend = [], summary.source.backend
    for one in asked:
        if (verdict := one.ask(summary)).holds:
            said = {name: in_its_words(getattr(one, name), backend) for name in ("see", "means")}
            evidence = in_its_words(verdict.evidence, backend)
            shown.append((msgspec.structs.replace(one, **said), msgspec.structs.replace(verdict, evidence=evidence)))
    return shown


def what_to_do(summary: Summary) -> str:
    """Return the usual meaning of the regime, or "" if the cheatsheet has no row for it."""
    busy = dict.fromkeys(("compute", "memory", "gpu"), steps.gpu_bound.means)
    return {"overhead": steps.overhead_bound.means, **busy}.get(summary.waits_for, "")


def markdown() -> str:
    """Return the cheatsheet as a Markdown table."""
    lines = ["| where | what you see | what it usually means |", "|---|---|---|"]
    lines += [f"| {one.where} | {one.see} | {one.means} |" for one in CHEATSHEET]
    return "\n".join(lines)
