"""The table "try first": changes to try, and the step's time before and after each."""

from collections.abc import Sequence

from rich.console import Console

from tracereader.changes.opportunity import Opportunity
from tracereader.findings.finding import WORTH_SHOWING
from tracereader.replay import Refused
from tracereader.show.text import Name, capitalized, head, paragraph, percent, plain, print_columns, unit_of

# The number of changes whose times are in the answer itself, which has to fit into the first 25 lines.
SHOWN = 2
# The number of changes whose reasons are in the report. With --all, every change has its reason.
EXPLAINED = 4
NOT_KNOWN = "not known from one rank"
LONGEST_PLACE = 66  # with the words and the indentation around it


def show(
    out: Console,
    found: Sequence[Opportunity] | Refused,
    everything: bool,
    limit: str = "",
    measured_unprofiled: bool = False,
) -> None:
    """Print the changes with the step's time before and after each; the first one with its reason and how to try it.

    A saving that assumes a hardware limit or a typical rate is shown as "about". If recording may hide what limits the
    step, the savings are those of the estimate without the profiler; beside others they are shown as "est.".
    everything: print all rows, each with its reason. limit: what limits the step, printed if no change is known.
    measured_unprofiled: whether the run measured its step without the profiler; its savings then decide what is found.
    """
    if isinstance(found, Refused):
        paragraph(out, f"{head('try first', 'try')}: no saving can be computed, because {plain(str(found))}", rest="  ")
        return
    if not found:
        step = "step without the profiler" if measured_unprofiled else "recorded step"
        nothing = f"no change that read-trace knows saves more than {WORTH_SHOWING:.0%} of the {step}"
        paragraph(out, f"{head('try first', 'try')}: {nothing}{f'. {plain(limit)}' * bool(limit)}", rest="  ")
        return
    shown = found if everything else [one for one in found[:SHOWN] if one is found[0] or not one.is_unknown]
    unit = unit_of([found[0].times_us[0]], ms_from=1e3)
    all_estimated = all(one.estimated_savings and not one.is_unknown for one in shown)
    knows_unprofiled = any(one.knows_unprofiled for one in shown)
    rows = []
    for number, one in enumerate(shown, 1):
        before, after = one.times_us
        saves = f"{'est. ' * (one.estimated_savings is not None and not all_estimated)}{_saves(one)}"
        times = f"{unit(before)} -> {unit(after)}{' recorded' * (knows_unprofiled and not one.knows_unprofiled)}"
        cells = (NOT_KNOWN, "") if one.is_unknown else (times, saves)
        rows.append((Name(f"{number} {one.title}"), *cells))
    reasons = {number: _reason(one) for number, one in enumerate(shown) if everything or number == 0}
    step = "unprofiled step" if knows_unprofiled else "recorded step"
    header = ("try first", f"{step}, {unit.name}", "est. saving" if all_estimated else "saves")
    print_columns(out, header, rows, section="try", below=reasons)


def show_others(out: Console, found: Sequence[Opportunity] | Refused) -> None:
    """Print the remaining changes. The first ones have their reasons, and how to try them."""
    if isinstance(found, Refused) or len(found) < 2:
        return
    unit = unit_of([found[0].times_us[0]], ms_from=1e3)
    more = "; --all shows every reason" if len(found) > EXPLAINED else ""
    out.print(f"[bold]other changes, each by itself{more}[/bold]")
    for number, one in enumerate(found[1:], 2):
        step = "the step without the profiler" if one.knows_unprofiled else "the step"
        takes = f"{step} takes {unit(one.times_us[1])} {unit.name} then"
        saved = f"est. saving {_saves(one)}" if one.estimated_savings else f"which saves {_saves(one)}"
        saved = f"{takes}, {saved}" if one.knows_unprofiled or not one.estimated_savings else saved
        saved = NOT_KNOWN if one.is_unknown else saved
        paragraph(out, plain(f"{one.title}: {saved}" if number > SHOWN else one.title), f"  {number} ", "    ")
        if number <= EXPLAINED:
            paragraph(out, plain(_reason(one)), "    ", "    ")


def _saves(one: Opportunity) -> str:
    """Return the saved share, or the range of the estimate without the profiler."""
    if one.estimated_savings is None:
        return _saved(one, one.share)
    low, high = (percent(share) for share in one.estimated_savings)
    return high if low == high else f"{low.removesuffix('%')} to {high}"


def _saved(one: Opportunity, share: float) -> str:
    """Return a saved share. With assumed rates it is no upper bound, because a run can save more."""
    return f"{'about ' * (one.basis == 'bound' or one.replayed is not None)}{percent(share)}"


def _reason(one: Opportunity) -> str:
    where = f"in {one.function.file}:{one.function.line}, {one.function.name}" if one.function else ""
    place = f". This is {where}" if 0 < len(where) <= LONGEST_PLACE else ""
    return f"{_while_recorded(one)}{capitalized(one.evidence)}. Try: {one.how}{place}"


def _while_recorded(one: Opportunity) -> str:
    """Return what is saved of the recorded step, if the table has the savings without the profiler."""
    if (not one.knows_unprofiled and one.estimated_savings is None) or one.is_unknown:
        return ""
    unit = unit_of([one.step_us], ms_from=1e3)
    saved = _saved(one, abs(one.saves_us) / one.step_us)
    does = f"saves {saved}" if one.saves_us > 0 else f"makes the step {saved} longer"
    return f"While recorded it {'saves nothing' if unit(one.step_us) == unit(one.step_us_after) else does}. "
