"""A numbered script's predictions and the user's own guesses, checked against the trace."""

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from tracereader import expect
from tracereader.figures import Summary
from tracereader.findings.finding import NO_GPU, Prediction, Verdict
from tracereader.show import references
from tracereader.show.text import head, paragraph, plain
from tracereader.show.view import View
from tracereader.trace import Trace

MARKS = {True: "[green]yes[/green]", False: "[red]no [/red]", None: "[dim] – [/dim]"}


def predictions_of(trace: Trace) -> list[Prediction]:
    """Return the predictions of the numbered script that made this trace, as far as this version can read them."""
    return [one for record in trace.facts.guesses if (one := expect.from_record(record))]


def show(out: Console, predictions: Sequence[Prediction], summary: Summary, view: View) -> None:
    """Print how many predictions hold, and the evidence against the others; every prediction if asked for."""
    answers = [(one, one.ask(summary)) for one in predictions]
    decided = [(one, verdict) for one, verdict in answers if verdict.evidence != NO_GPU]
    brief = view.usual
    sentence = _how_many_hold(decided, brief)
    if not decided:
        sentence = f"{_about_the_gpu(len(answers))}, and this run was on the CPU"
    paragraph(out, head(sentence, "predictions"), rest="  ")
    for one, verdict in sorted(decided, key=lambda pair: (pair[1].holds is not False, pair[1].holds is None)):
        if brief and verdict.holds is not False:
            continue
        paragraph(out, plain(one.text), f"  {MARKS[verdict.holds]}  ", " " * 7)
        if verdict.evidence and not (brief and (verdict.holds or (view.brief and verdict.why_not))):
            paragraph(out, f"[dim]{plain(verdict.evidence)}[/dim]", " " * 7, " " * 7)
        if verdict.why_not and not verdict.holds:
            paragraph(out, plain(verdict.why_not), " " * 7, " " * 7)
    if len(decided) < len(answers):
        said = f"{_about_the_gpu(len(answers) - len(decided), 'more ')}, and this run was on the CPU" if decided else ""
        if references.of(Path(summary.source.trace), "nvidia-h200"):
            add = "the same command with --on h200 plays this lesson on the trace of an NVIDIA H200"
            said = f"{said}: {add}" if said else add
        if said:
            paragraph(out, said, f"  {MARKS[None]}  ", " " * 7)


def _how_many_hold(answers: Sequence[tuple[Prediction, Verdict]], brief: bool) -> str:
    """Return the sentence about how many predictions hold. brief: whether only those that do not hold are listed."""
    holds = [verdict.holds for _, verdict in answers]
    listed = " (--only predictions lists them)" * brief
    unknown = f"; {holds.count(None)} cannot be decided{listed}" if None in holds else ""
    broken = {0: "", 1: "; this one does not:"}.get(holds.count(False), "; these do not:")
    hold = "predictions hold" if len(holds) > 1 else "prediction holds"
    return f"{holds.count(True)} of {len(holds)} {hold}{unknown}{broken}"


def _about_the_gpu(count: int, more: str = "") -> str:
    return f"{count} {more}{'prediction is' if count == 1 else 'predictions are'} about the GPU"
