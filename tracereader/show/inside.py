"""The phases that kernels recorded of themselves: the time that their blocks wait, and the time that they work."""

from rich.console import Console

from tracereader.figures import Summary
from tracereader.figures.inside import InsideKernel
from tracereader.findings.finding import counted
from tracereader.show.text import Name, paragraph, percent, plain, print_columns, unit_of
from tracereader.show.view import View, others
from tracereader.trace import STEP
from tracereader.trace.kernel_names import short


def show(out: Console, summary: Summary, view: View) -> None:
    """Print a table of phases for each kernel that recorded some."""
    for number, one in enumerate(summary.inside):
        if number:
            out.print()
        paragraph(out, plain(in_words(one)))
        _table(out, one, view)


def in_words(one: InsideKernel) -> str:
    """Return how many blocks recorded their phases, and which share of the recorded time they wait."""
    known = one.blocks is not None and one.lanes <= one.blocks
    blocks = f"{one.lanes:,} of {counted(one.blocks, 'block')}" if known else counted(one.lanes, "block")
    where = ""
    if one.launches > 1:
        where = f" in {one.launches:,} launches"
    elif one.steps and one.steps[0].startswith(STEP):
        where = f" in {one.steps[0].removeprefix(STEP[:-1])}"
    share = "" if one.waiting_share is None else f": {one.waiting_share:.0%} of the recorded time is waiting"
    return f"{blocks} of {short(one.kernel, 60)} recorded their phases{where}{share}."


def _table(out: Console, one: InsideKernel, view: View) -> None:
    phases = one.phases
    each = unit_of([us for phase in phases for us in (phase.median_wait_us, phase.median_work_us)])
    whole = unit_of([us for phase in phases for us in (phase.waiting_per_block_us, phase.working_per_block_us)])
    lanes_us = sum(phase.waiting_per_block_us + phase.working_per_block_us for phase in phases)
    shown, rest = view.parted(phases)

    def sums(some) -> list[str]:
        waiting = sum(phase.waiting_per_block_us for phase in some)
        working = sum(phase.working_per_block_us for phase in some)
        return [whole(waiting), whole(working), percent((waiting + working) / lanes_us if lanes_us else None)]

    rows = [
        (Name(phase.name), f"{max(phase.waits, phase.works):,}", each(phase.median_wait_us), each(phase.median_work_us),
         *sums([phase]))
        for phase in shown
    ]  # fmt: skip
    if rest:
        rows.append((others(rest), "", "", "", *sums(rest)))
    heads = ("phase", "times", f"wait, {each.name}", f"work, {each.name}", f"all waits, {whole.name}",
             f"all work, {whole.name}", "share")  # fmt: skip
    print_columns(out, heads, rows, section="inside")
    paragraph(
        out,
        "times: over all recorded blocks. wait, work: the median of one time. all waits, all work: the sums of one "
        f"block{' and launch' * (one.launches > 1)}, mean over the recorded blocks. share: of the recorded time.",
    )
