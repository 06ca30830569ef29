"""The questions that a numbered script asks at a terminal before its run, and their answers from the trace."""

import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.markup import escape

from tracereader import interrupts
from tracereader.command import BadInput
from tracereader.figures import Summary
from tracereader.findings.finding import Prediction, counted, duration
from tracereader.show.text import console, paragraph, plain

BOOKKEEPING = ("records_steps",)  # which steps a schedule records is nothing to guess
WORDS = {True: "yes", False: "no", None: "cannot decide"}
MARKS = {True: "[green]right[/green]", False: "[red]wrong[/red]", None: "[dim]  –  [/dim]"}
# The section of the report that shows what the findings of a module judge. The others are about kernels or the calls.
SECTIONS = {"steps": "steps", "ops": "table", "training": "training"}
A_TENTH, TWICE = 1.1, 2.0


@dataclass(frozen=True)
class Number:
    """A question whose answer is a number, which counts as right if it is at most `within` times too large or small.

    instead: the finding whose prediction would give the answer away, so that it is not asked.
    """

    text: str
    answer: Callable[[Summary], float]
    said: Callable[[float], str]
    within: float
    section: str
    instead: str = ""

    @property
    def tolerance(self) -> str:
        return "within 10%" if self.within == A_TENTH else "within a factor of 2"


ON_GPU = (
    Number("how many kernels does a step run?", lambda one: len(one.kernels_of_step),
           lambda count: counted(int(count), "kernel"), A_TENTH, "work", "kernels_are"),
    Number("how many µs of a step does the GPU work?", lambda one: one.gpu_us, duration, TWICE, "steps"),
)  # fmt: skip
ON_CPU = (
    Number("how many calls of ops does a step make, with those inside others?",
           lambda one: sum(op.calls for op in one.cpu.ops.values()),
           lambda count: counted(int(count), "call"), TWICE, "cpu"),
    Number("how many µs does a step take while it is recorded?", lambda one: one.recorded_step_us,
           duration, TWICE, "steps"),
)  # fmt: skip


def answers(predictions: Sequence[Prediction], on_gpu: bool) -> list[tuple[Number | Prediction, float]]:
    """Return the questions that the user answered, each with the number, or with True for yes."""
    numbers = ON_GPU if on_gpu else ON_CPU
    hidden = (*BOOKKEEPING, *(one.instead for one in numbers))
    asked = [
        *numbers,
        *(one for one in predictions if one.finding.name not in hidden and (on_gpu or not one.needs_gpu)),
    ]
    paragraph(
        console(),
        f"{counted(len(asked), 'question')} about this run: answer with a number, or with y or n; Enter alone skips "
        "the rest",
    )
    given = []
    for one in asked:
        is_number = isinstance(one, Number)
        answer = _ask(one.text if is_number else f"{one.text}?", one.tolerance if is_number else "y/n", is_number)
        if answer is None:
            break
        given.append((one, answer))
    return given


def _ask(question: str, form: str, is_number: bool) -> float | None:
    """Return the number that was typed at the terminal, or whether it was yes; None for an empty answer.

    form: the form of the answer, which stands behind the question. Raises BadInput at the end of the input.
    """
    while True:
        out = console()
        shown = "\n".join(textwrap.wrap(question, max(20, out.width - len(f" ({form}) 1,000"))))
        out.print(f"[bold]{escape(shown)}[/bold] ({form}) ", end="")
        try:
            with interrupts.raised():  # so that the terminal's settings, which input() changes, are restored
                answer = input().strip().lower()
        except EOFError:
            raise BadInput("--guess: the answers ended before the questions") from None
        if not answer:
            return None
        if not is_number and answer in ("y", "yes", "n", "no"):
            return answer.startswith("y")
        plain_number = answer.replace(",", "").removesuffix("µs").removesuffix("us").strip()
        if is_number and plain_number.replace(".", "", 1).isdecimal():
            return float(plain_number)
        console().print("please answer with a number" if is_number else "please answer y or n")


def marked(summary: Summary, given: Sequence[tuple[Number | Prediction, float]]) -> None:
    """Print the user's answers, each with the trace's and the section of the report that shows it."""
    out = console()
    out.print()
    out.print("[bold]your answers[/bold], each with the section that shows it in the trace")
    for one, answer in given:
        if isinstance(one, Number):
            measured, text, section = one.answer(summary), one.text, one.section
            right = max(answer, measured) <= one.within * min(answer, measured)
            mine, seen = one.said(answer), f"{one.said(measured)} ({one.tolerance} is right)"
        else:
            verdict, text = one.ask(summary), one.text
            right = None if verdict.holds is None else verdict.holds == answer
            mine, seen = WORDS[bool(answer)], ", ".join(filter(None, (WORDS[verdict.holds], verdict.evidence)))
            section = SECTIONS.get(
                one.finding.judge.__module__.rpartition(".")[2], "work" if one.needs_gpu else "chain"
            )
        paragraph(out, plain(text), f"  {MARKS[right]}  ", " " * 9)
        paragraph(out, f"your answer: {mine}; the trace: {plain(seen)} [dim](--only {section})[/dim]", " " * 9, " " * 9)
