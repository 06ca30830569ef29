"""What every numbered script does once its flags are read: profile, explain, or sweep over sizes."""

from argparse import Namespace
from collections.abc import Callable, Iterable

import torch

from common import harness, measure, perfetto, quiz, report, screen, sweep
from common.cli import BadInput
from common.guesses import Guess


def teach(
    args: Namespace,
    device: torch.device,
    profiled: Callable[[Namespace], harness.Run],
    what_we_guess: Callable[[Namespace], Iterable[Guess]],
    over: str | None = None,
) -> None:
    """Profile and explain one run; or, where the flag `over` names several sizes, one run for each."""
    values = getattr(args, over) if over else [None]
    if len(values) == 1:
        point = Namespace(**vars(args) | ({over: values[0]} if over else {}))
        given = quiz.ask(args, device)
        run = profiled(point)
        report.run(run, report.View.of(args), list(what_we_guess(point)), given)
        if args.open:
            perfetto.hand_over(run.trace)
        return
    for flag in ("guess", "open", "lanes"):
        if getattr(args, flag):
            raise BadInput(f"--{flag} is for one run, and --{over} names {len(values)}")
    points = []
    for value in sorted(set(values)):
        if args.compile:
            torch.compiler.reset()  # or the second size would be compiled for every size
        # Shapes are what the rates are made of.
        run = profiled(Namespace(**vars(args) | {over: value, "record_shapes": True}))
        points.append(sweep.Point.of(value, run))
        screen.progress(f"{over} {value}", run.trace)
    roofs = measure.roofs(device, harness.DTYPES[args.dtype])
    screen.sweep(over, points, roofs, sweep.crossing(points))
    sweep.picture(over, points, roofs)
