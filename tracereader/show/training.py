"""Inside a step: the optimizer, recomputation, synchronizations, the DataLoader, memory."""

from rich.console import Console

from tracereader.figures import Summary
from tracereader.figures.training import MemoryCurve
from tracereader.findings.finding import counted, duration, size
from tracereader.show.text import Name, paragraph, plain, print_columns, sharing, unit_of
from tracereader.show.view import View, others
from tracereader.trace.kernel_names import labels

BLOCKS, ASCII_BLOCKS = "▁▂▃▄▅▆▇█", "_.-~=+*#"


def has_content(summary: Summary) -> bool:
    """Return whether the section has any content."""
    one, places = summary.training, (summary.places.by_phase, summary.places.by_label, summary.places.by_module)
    return any(
        (
            not summary.has_gpu_work and any(places),
            one.backward_of,
            one.recomputed,
            one.optimizers,
            one.syncs,
            one.loading,
            one.memory,
        )
    )


def show(out: Console, summary: Summary, view: View, ascii_only: bool) -> None:
    """Print the step's phases and modules, optimizer, recomputation, synchronizations, DataLoader and memory."""
    found = summary.training
    out.print(f"[bold]inside step {plain(summary.chosen.number)}[/bold]")
    if not summary.has_gpu_work:  # with a GPU lane the tables of GPU time include them
        for title, places in (
            ("by phase, from autograd's events", summary.places.by_phase),
            ("by annotation", () if summary.places.by_phase else summary.places.by_label),
            ("ops by module", summary.places.by_module_class),
        ):
            places = [one for one in places if one.cpu_us]
            shown, rest = view.parted(places)
            unit = unit_of([*(one.cpu_us for one in shown), sum(one.cpu_us for one in rest)])
            named = labels([one.name for one in shown], 50)
            times = [(Name(named[one.name]), one.cpu_us) for one in shown]
            times += [(others(rest), sum(one.cpu_us for one in rest))] * bool(rest)
            cells = [(name, unit(us), f"{us / summary.chosen.cpu_us:.0%}") for name, us in times]
            if cells:
                print_columns(out, (title, f"CPU {unit.name}", "of the step"), cells)
    for one in found.optimizers:
        launches = counted(one.launches, "launch", "launches")
        gpu = f"; {launches}, {duration(one.gpu_us)} of GPU time" if one.launches else ""
        how = f", {one.how}" if one.how else ""
        line = f"optimizer: {plain(one.name)}{how}: {duration(one.cpu_us)} of CPU time{gpu}"
        if one.backward_us:
            forward = f"{duration(one.forward_us)} of forward and " if one.forward_us else ""
            line += f", excluding the {forward}{duration(one.backward_us)} of backward that run in it"
        paragraph(out, line, "  ", "    ")
    if again := found.recomputed:
        activities = counted(again.pieces, "activity", "activities")
        gpu = f", {duration(again.gpu_us)} of GPU time in {activities}" if again.pieces else ""
        calls = counted(again.calls, "forward op")
        line = f"recomputed in backward: {calls}, {duration(again.cpu_us)} of CPU time{gpu}"
        paragraph(out, line, "  ", "    ")
    if waits := found.loading:
        idle = "" if waits.idle_us is None else f"; the GPU is idle for {duration(waits.idle_us)} of that time"
        step = "the step on the CPU" if summary.has_gpu_work else "the step"
        line = f"waiting for the DataLoader: {duration(waits.us)}, {waits.share:.0%} of {step}{idle}"
        paragraph(out, line, "  ", "    ")
    if found.syncs:
        shown, rest = view.parted(found.syncs)
        named = labels([one.asked_by for one in shown], 40)
        calls, cpu_us, idle_us = (sum(getattr(one, key) for one in rest) for key in ("calls", "cpu_us", "idle_us"))
        times = [*(one.cpu_us for one in shown), cpu_us], [*(one.idle_us for one in shown), idle_us]
        cpu, idle = sharing(unit_of(times[0] + times[1]).name, times)
        cells = [
            (Name(named[one.asked_by]), Name(one.call), f"{one.calls:,}", cpu(one.cpu_us), idle(one.idle_us))
            for one in shown
        ]
        cells += [(others(rest), "", f"{calls:,}", cpu(cpu_us), idle(idle_us))] * bool(rest)
        heads = ("the CPU waits for the GPU", "in", "calls", f"CPU {cpu.name}", f"GPU idle {idle.name}")
        print_columns(out, heads, cells, left=(0, 1))
    if found.backward_of:
        shown, rest = view.parted(found.backward_of)
        named = labels([one.name for one in shown], 50)
        gpu_us = sum(one.gpu_us for one in rest)
        unit = unit_of([*(one.gpu_us for one in shown), gpu_us])
        cells = [(Name(named[one.name]), unit(one.gpu_us), f"{one.pieces:,}") for one in shown]
        cells += [(others(rest), unit(gpu_us), f"{sum(one.pieces for one in rest):,}")] * bool(rest)
        print_columns(out, ("backward, by the forward op", f"GPU {unit.name}", "activities"), cells)
    if found.memory:
        for line in memory(found.memory, ascii_only):
            paragraph(out, plain(line), "", "  ")


def memory(curve: MemoryCurve, ascii_only: bool) -> list[str]:
    """Return the curve as one line of blocks, and its peak in words."""
    blocks = ASCII_BLOCKS if ascii_only else BLOCKS
    low, high = min(curve.points), max(curve.points)
    height = [round((one - low) / (high - low) * (len(blocks) - 1)) if high > low else 0 for one in curve.points]
    what = "GPU memory" if curve.on_gpu else "CPU memory, counted from the recording's start"
    places = [f"in {one}" for one in (curve.phase, curve.module, curve.op) if one]
    where = f", allocated {', '.join(places)}" if places else ""
    return [
        f"{what}, over the step",
        f"  {''.join(blocks[one] for one in height)}",
        f"  {_size(curve.start_bytes)} at its start, {_size(curve.end_bytes)} at its end; the peak of "
        f"{_size(curve.peak_bytes)} at {curve.peak_at:.0%} of the step{where}",
    ]


def _size(count: int) -> str:
    return f"−{size(-count)}" if count < 0 else size(count)
