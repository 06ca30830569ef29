"""The call tree of a step: all of it if it is small, else along the slowest path."""

from collections.abc import Mapping, Sequence

from rich.console import Console

from tracereader.figures import Summary
from tracereader.figures.repeats import repeated_names
from tracereader.findings.finding import duration
from tracereader.show.text import head, paragraph, plain
from tracereader.show.view import View
from tracereader.trace import Op, Step
from tracereader.trace.grouped import grouped
from tracereader.trace.kernel_names import short

LINES_SHOWN = 24
CALLS_SHOWN, DEPTHS_SHOWN, LAYERS_NAMED = 3, 10, 4
# Repeated calls with a smaller share of the time are not the slowest path, such as a cast of each parameter.
WORTH_FOLLOWING = 0.1


def show(out: Console, step: Step, summary: Summary, layers: Mapping[int, str], view: View) -> None:
    """Print every call of a small step; for a large one the costliest names at each level along the slowest path.

    layers: the model's layer of an op, by the op's id (see layers.py).
    """
    folded = not view.all and step.size > LINES_SHOWN
    of = f"{'step ' * summary.source.has_steps}{plain(summary.chosen.number)}"
    path = f", along its slowest path: {CALLS_SHOWN} names per level" * folded
    out.print(head(f"call tree of {of}{path}", "chain"))
    if folded:
        _slowest_path(out, step.roots, layers)
        return
    for call in summary.cpu.chain:
        indent = "  " * (call.depth + 1)
        line = f"{plain(short(call.name, 70))}  [dim]{duration(call.us)}[/dim]"
        if call.layer:
            line += f"  {plain(call.layer)}"
        if call.launched:
            names = " + ".join(short(name, 48) for name in call.launched[:4])
            more = f" + {len(call.launched) - 4} more" if len(call.launched) > 4 else ""
            line += f"  → {plain(names)}{more}"
        elif summary.has_gpu_work and call.kind == "op" and not call.reaches_gpu:
            line += "  · no GPU work"
        paragraph(out, line, indent, indent + "    ")


def _slowest_path(out: Console, calls: Sequence[Op], layers: Mapping[int, str]) -> None:
    """Print the outermost calls by name, then the same inside the longest call of the costliest name, and so on."""
    deeper = 0
    for depth in range(DEPTHS_SHOWN):
        if not calls:
            return
        if found := _repetition(calls) if len(calls) > LINES_SHOWN else None:
            calls = _median_stretch(out, calls, found, depth + deeper)
            deeper += 1
        costliest = sorted(grouped((call.name, call) for call in calls).items(), key=lambda item: -_us(item[1]))
        calls = max(costliest[0][1], key=lambda call: call.dur).children
        for name, same in costliest[CALLS_SHOWN - 1 : 0 : -1] + costliest[:1]:
            times = f"{len(same):,} calls of " if len(same) > 1 else ""
            summed = " in total" * bool(times)
            of_layers = [layers[id(call)] for call in same if id(call) in layers][:LAYERS_NAMED]
            named = f"  {plain(', '.join(of_layers))}" if of_layers else ""
            indent = "  " * (depth + deeper + 1)
            # The calls below are those of one call, not of the sum.
            followed = name == costliest[0][0] and calls and depth < DEPTHS_SHOWN - 1
            one = "; the slowest call:" if len(same) > 1 and followed else ""
            line = f"{times}{plain(short(name, 60))}  [dim]{duration(_us(same))}{summed}[/dim]{named}{one}"
            paragraph(out, line, indent, indent + "    ")


def _us(calls: Sequence[Op]) -> float:
    return sum(call.dur for call in calls) / 1e3


def _repetition(calls: Sequence[Op]) -> tuple[int, int, int] | None:
    """Return start, length and number of repetitions, if most of these calls repeat and take enough of their time."""
    found = repeated_names([call.name for call in calls])
    if found is None:
        return None
    first, length, times = found
    return found if _us(calls[first : first + length * times]) > WORTH_FOLLOWING * _us(calls) else None


def _median_stretch(out: Console, calls: Sequence[Op], found: tuple[int, int, int], depth: int) -> Sequence[Op]:
    """Print that calls repeat, and return those of the repetition with the median time. depth: of the indentation."""
    first, length, times = found
    stretches = [calls[at : at + length] for at in range(first, first + length * times, length)]
    each = [_us(stretch) for stretch in stretches]
    middle = sorted(range(times), key=each.__getitem__)[(times - 1) // 2]
    indent = "  " * (depth + 1)
    line = f"the same {length:,} calls repeat {times} times, [dim]{duration(sum(each))} in total[/dim]; one repetition:"
    paragraph(out, line, indent, indent + "    ")
    return stretches[middle]
