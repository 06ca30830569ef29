"""Inside a step: the optimizer, recomputation, synchronizations, the DataLoader, memory."""

from rich.console import Console

from tracereader.figures import Summary
from tracereader.figures.training import MemoryCurve
from tracereader.findings.finding import counted, duration, size
from tracereader.show.text import Name, paragraph, plain, print_columns, sharing, unit_of
from tracereader.show.view import View, summed

BLOCKS, ASCII_BLOCKS = "▁▂▃▄▅▆▇█", "_.-~=+*#"


def has_content(summary: Summary) -> bool:
    """Return whether the section has any content."""
    one, places = summary.training, (summary.places.by_phase, summary.places.by_label, summary.places.by_module)
    own = (one.backward_of, one.recomputed, one.optimizers, one.syncs, one.loading, one.memory)
    return any(own) or (not summary.has_gpu_work and any(places))


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
            times = summed(view, [(one.name, one.cpu_us) for one in places if one.cpu_us], 50)
            unit = unit_of([us for _, us in times])
            cells = [(name, unit(us), f"{us / summary.chosen.cpu_us:.0%}") for name, us in times]
            if cells:
                print_columns(out, (title, f"CPU {unit.name}", "of the step"), cells)
    lines = []
    for one in found.optimizers:
        launches = counted(one.launches, "launch", "launches")
        gpu = f"; {launches}, {duration(one.gpu_us)} of GPU time" if one.launches else ""
        how = f", {one.how}" if one.how else ""
        line = f"optimizer: {plain(one.name)}{how}: {duration(one.cpu_us)} of CPU time{gpu}"
        if one.backward_us:
            forward = f"{duration(one.forward_us)} of forward and " if one.forward_us else ""
            line += f", excluding the {forward}{duration(one.backward_us)} of backward that run in it"
        lines.append(line)
    if again := found.recomputed:
        activities = counted(again.pieces, "activity", "activities")
        gpu = f", {duration(again.gpu_us)} of GPU time in {activities}" if again.pieces else ""
        cpu = f"{counted(again.calls, 'forward op')}, {duration(again.cpu_us)} of CPU time"
        lines.append(f"recomputed in backward: {cpu}{gpu}")
    if waits := found.loading:
        idle = "" if waits.idle_us is None else f"; the GPU is idle for {duration(waits.idle_us)} of that time"
        step = "the step on the CPU" if summary.has_gpu_work else "the step"
        lines.append(f"waiting for the DataLoader: {duration(waits.us)}, {waits.share:.0%} of {step}{idle}")
    for line in lines:
        paragraph(out, line, "  ", "    ")
    if found.syncs:
        waits = [(one.asked_by, one.call, one.calls, one.cpu_us, one.idle_us) for one in found.syncs]
        rows = summed(view, waits, 40)
        times = [us for *_, us, _ in rows], [us for *_, us in rows]
        cpu, idle = sharing(unit_of(times[0] + times[1]).name, times)
        cells = [
            (name, "" if call is None else Name(call), f"{calls:,}", cpu(cpu_us), idle(idle_us))
            for name, call, calls, cpu_us, idle_us in rows
        ]
        heads = ("the CPU waits for the GPU", "in", "calls", f"CPU {cpu.name}", f"GPU idle {idle.name}")
        print_columns(out, heads, cells, left=(0, 1))
    if found.backward_of:
        rows = summed(view, [(one.name, one.gpu_us, one.pieces) for one in found.backward_of], 50)
        unit = unit_of([us for _, us, _ in rows])
        cells = [(name, unit(us), f"{pieces:,}") for name, us, pieces in rows]
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
    ends = f"{_size(curve.start_bytes)} at its start, {_size(curve.end_bytes)} at its end"
    peak = f"the peak of {_size(curve.peak_bytes)} at {curve.peak_at:.0%} of the step{where}"
    return [f"{what}, over the step", f"  {''.join(blocks[one] for one in height)}", f"  {ends}; {peak}"]


def _size(count: int) -> str:
    return f"−{size(-count)}" if count < 0 else size(count)
