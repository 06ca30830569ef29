"""The table "try first": what to change, and the step's time before and after."""

from collections.abc import Sequence

from rich.console import Console

from tracereader.findings.opportunity import Opportunity
from tracereader.replay import Refused
from tracereader.show.text import head, paragraph, percent, plain, print_columns

SHOWN = 5


def show(out: Console, found: Sequence[Opportunity] | Refused, all_of_them: bool) -> None:
    """Each change with the step's time before and after it, the reason, and how to try it.

    A saving that assumes a hardware limit or a typical rate is shown as "at most".
    """
    if isinstance(found, Refused):
        paragraph(out, f"{head('try first', 'try')}: no change can be priced, because {found}")
        return
    if not found:
        out.print(f"{head('try first', 'try')}: nothing that read-trace knows saves more than 2% of this step")
        return
    shown = found if all_of_them else found[:SHOWN]
    unit, scale = ("ms", 1e3) if found[0].step_us >= 1e3 else ("µs", 1.0)
    digits = 1 if found[0].step_us / scale >= 10 else 2
    rows = []
    for number, one in enumerate(shown, 1):
        before, after = (f"{us / scale:,.{digits}f}" for us in (one.step_us, one.step_us_after))
        most = "at most " if one.basis == "bound" else ""
        rows.append((f"{number} {one.title}", f"{before} -> {after}", most + percent(one.saves_us / one.step_us)))
    with out.capture() as table:
        print_columns(out, ("try first", f"step, {unit}", "saves"), rows, section="try")
    lines = table.get().splitlines()
    out.file.write(lines[0] + "\n")
    for line, one in zip(lines[1:], shown, strict=True):
        out.file.write(line + "\n")
        paragraph(out, plain(f"{one.evidence}. Try: {one.how}"), "    ", "    ")
    if len(found) > len(shown):
        out.print(f"… and {len(found) - len(shown)} more (--only try)")
