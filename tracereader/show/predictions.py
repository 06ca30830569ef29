"""A numbered script's predictions and the reader's own, against the trace."""

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from tracereader import expect
from tracereader.figures import Summary, summarize
from tracereader.findings.finding import NO_GPU, Prediction, Verdict
from tracereader.show import references
from tracereader.show.text import head, paragraph, plain, shown_path
from tracereader.show.view import View
from tracereader.trace import Trace, TraceError, read

GPU_REFERENCE = "nvidia-h200"
MARKS = {True: "[green]yes[/green]", False: "[red]no [/red]", None: "[dim] – [/dim]"}
READERS_MARKS = {True: "[green]right[/green]", False: "[red]wrong[/red]", None: "[dim]  –  [/dim]"}


def predictions_of(trace: Trace) -> list[Prediction]:
    """What the numbered script that made this trace predicted, as far as this version can read it."""
    records = trace.facts.guesses
    return [one for record in records if (one := expect.from_record(record))]


def show(out: Console, predictions: Sequence[Prediction], summary: Summary, view: View) -> None:
    """How many predictions hold, and of those that do not what was seen instead; all of them where asked for."""
    answers = [(one, one.ask(summary)) for one in predictions]
    told = [(one, verdict) for one, verdict in answers if verdict.evidence != NO_GPU]
    brief = view.usual
    kept = _kept(told)
    if not told:
        kept = f"{_about_the_gpu(len(answers))}, and this run was on the CPU"
    out.print(head(kept, "predictions"))
    for one, verdict in sorted(told, key=lambda pair: (pair[1].holds is not False, pair[1].holds is None)):
        if brief and verdict.holds is not False:
            continue
        paragraph(out, plain(one.text), f"  {MARKS[verdict.holds]}  ", " " * 7)
        if verdict.evidence and not (brief and (verdict.holds or (view.brief and verdict.why_not))):
            paragraph(out, f"[dim]{plain(verdict.evidence)}[/dim]", " " * 7, " " * 7)
        if verdict.why_not and not verdict.holds:
            paragraph(out, plain(verdict.why_not), " " * 7, " " * 7)
    if len(told) < len(answers):
        about_gpu = [one for one, verdict in answers if verdict.evidence == NO_GPU]
        _gpu_answers(out, about_gpu, summary, brief, more=bool(told))


def said(predictions: Sequence[Prediction], summary: Summary) -> str:
    """What show() says was seen instead, where predictions do not hold."""
    verdicts = [one.ask(summary) for one in predictions]
    return "\n".join(f"{one.evidence}\n{one.why_not}" for one in verdicts if one.holds is False)


def _kept(answers: Sequence[tuple[Prediction, Verdict]]) -> str:
    """How many predictions the trace bears out."""
    holds = [verdict.holds for _, verdict in answers]
    unknown = f"; {holds.count(None)} cannot be decided" if None in holds else ""
    broken = {0: "", 1: "; this one does not:"}.get(holds.count(False), "; these do not:")
    hold = "predictions hold" if len(holds) > 1 else "prediction holds"
    return f"{holds.count(True)} of {len(holds)} {hold}{unknown}{broken}"


def _about_the_gpu(count: int, more: str = "") -> str:
    return f"{count} {more}{'prediction is' if count == 1 else 'predictions are'} about the GPU"


def _gpu_answers(out: Console, predictions: Sequence[Prediction], summary: Summary, brief: bool, more: bool) -> None:
    """What the reference trace of a GPU answers, where a run on the CPU cannot. more: others have been told."""
    reference = references.of(Path(summary.source.trace), GPU_REFERENCE)
    try:
        gpu = reference and summarize(read(reference))
    except TraceError:  # no answer of this run's is lost by it
        gpu = None
    left = f"{_about_the_gpu(len(predictions), 'more ')}, and this run was on the CPU" if more else ""
    if gpu is None:
        if left:
            out.print(f"  {MARKS[None]}  {left}")
        return
    answers = [(one, one.ask(gpu)) for one in predictions]
    on_gpu = f"In the reference trace of an {plain(gpu.source.devices[0])}"
    told = ". ".join([*[left] * more, on_gpu])
    paragraph(out, f"{told}, {_kept(answers)}", "  ", "  ")
    if not brief:
        out.print(f"  {plain(shown_path(reference))}")  # to be copied, so on a line of its own
    for one, verdict in answers:
        if brief and verdict.holds is not False:
            continue
        paragraph(out, plain(one.text), f"  {MARKS[verdict.holds]}  ", " " * 7)
        if verdict.evidence and not verdict.holds:
            paragraph(out, f"[dim]{plain(verdict.evidence)}[/dim]", " " * 7, " " * 7)
