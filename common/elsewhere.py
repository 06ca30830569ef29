"""A numbered script's lesson on the committed trace of another machine. It imports no torch."""

from pathlib import Path

from common import quiz
from tracereader.show import references, report
from tracereader.show.predictions import predictions_of
from tracereader.show.text import console, plain, shown_path
from tracereader.show.view import View


def play(args, tag: str) -> None:
    """Ask a script's predictions, and print the report of the trace that the same run left on another machine.

    tag: the run's name, as in its file. Raises BadInput if there is none for these flags.
    """
    path = references.named(Path(args.script) / f"{tag}.json", args.on, "--on")
    view = View.of(args, brief=True)
    trace, summary = report.opened(path, view)
    predicted = predictions_of(trace)
    given = quiz.answers(predicted, summary.has_gpu_work) if args.asks else []
    console().print(f"{', '.join(map(plain, trace.devices)) or 'CPU'} · {plain(shown_path(path))}")
    report.explain(trace, summary, view)
    if given:
        quiz.marked(summary, given)
    if args.html is not None:
        from tracereader.show import page

        page.write(page.of_trace(trace, summary, predicted), args.html, args.force)
    if args.open:
        from tracereader.show import perfetto

        perfetto.hand_over(path)
