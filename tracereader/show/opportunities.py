"""The table "try first": changes to try, and the step's time before and after each."""

from collections.abc import Sequence

from rich.console import Console

from tracereader.findings.opportunity import WORTH_SHOWING, Opportunity
from tracereader.replay import Refused
from tracereader.show.text import Name, head, paragraph, percent, plain, print_columns, unit_of

# The number of changes whose times are in the answer itself, which has to fit into the first 25 lines.
SHOWN = 2


def show(out: Console, found: Sequence[Opportunity] | Refused, everything: bool, limit: str = "") -> None:
    """Print the changes with the step's time before and after each; the first one with its reason and how to try it.

    A saving that assumes a hardware limit or a typical rate is shown as "at most". everything: print all rows, each
    with its reason. limit: what limits the step, printed if no change is known.
    """
    if isinstance(found, Refused):
        paragraph(out, f"{head('try first', 'try')}: no saving can be computed, because {plain(str(found))}", rest="  ")
        return
    if not found:
        nothing = f"no change that read-trace knows saves more than {WORTH_SHOWING:.0%} of the recorded step"
        paragraph(out, f"{head('try first', 'try')}: {nothing}{f'. {plain(limit)}' * bool(limit)}", rest="  ")
        return
    shown = found if everything else found[:SHOWN]
    unit = unit_of([found[0].step_us], ms_from=1e3)
    rows = []
    for number, one in enumerate(shown, 1):
        most = "at most " if one.basis == "bound" else ""
        change = f"{unit(one.step_us)} -> {unit(one.step_us_after)}"
        rows.append((Name(f"{number} {one.title}"), change, most + percent(one.saves_us / one.step_us)))
    reasons = {number: _reason(one) for number, one in enumerate(shown) if everything or number == 0}
    print_columns(out, ("try first", f"recorded step, {unit.name}", "saves"), rows, section="try", below=reasons)


def show_others(out: Console, found: Sequence[Opportunity] | Refused) -> None:
    """Print the remaining changes: their reasons, and how to try them."""
    if isinstance(found, Refused) or len(found) < 2:
        return
    unit = unit_of([found[0].step_us], ms_from=1e3)
    out.print("[bold]other changes, each by itself[/bold]")
    for number, one in enumerate(found[1:], 2):
        most = "at most " if one.basis == "bound" else ""
        saved = f"; the step takes {unit(one.step_us_after)} {unit.name} after it, which saves {most}"
        text = f"{one.title}{saved}{percent(one.saves_us / one.step_us)}" if number > SHOWN else one.title
        paragraph(out, plain(text), f"  {number} ", "    ")
        paragraph(out, plain(_reason(one)), "    ", "    ")


def _reason(one: Opportunity) -> str:
    evidence = one.evidence[:1].upper() + one.evidence[1:]  # a sentence of its own
    return f"{_without_profiler(one)}{evidence}. Try: {one.how}"


def _without_profiler(one: Opportunity) -> str:
    """Return the change for the step without the profiler, if the run measured it."""
    if one.unprofiled_step_us is None or one.unprofiled_step_us_after is None:
        return ""
    unit = unit_of([one.unprofiled_step_us], ms_from=1e3)
    most = "at most " if one.basis == "bound" else ""
    change = f"{unit(one.unprofiled_step_us)} -> {unit(one.unprofiled_step_us_after)} {unit.name}"
    return f"Without the profiler: {change}, which saves {most}{percent(one.share)}. "
