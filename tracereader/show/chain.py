"""The call tree of a step: all of it if it is small, else along the slowest path."""

from collections.abc import Sequence

from rich.console import Console

from tracereader.figures import Summary
from tracereader.figures.cpu import Call
from tracereader.figures.repeats import repeated_names
from tracereader.findings.finding import duration
from tracereader.show.text import head, paragraph, plain
from tracereader.show.view import View
from tracereader.trace.kernel_names import short

LINES_SHOWN = 24
CALLS_SHOWN, DEPTHS_SHOWN, LAYERS_NAMED = 3, 10, 4
# Repeated calls with a smaller share of the time are not the slowest path, such as a cast of each parameter.
WORTH_FOLLOWING = 0.1


def show(out: Console, summary: Summary, view: View) -> None:
    """Print every call of a small step; for a large one the costliest names at each level along the slowest path."""
    folded = not view.all and len(summary.cpu.chain) > LINES_SHOWN
    step = f"{'step ' * summary.source.has_steps}{plain(summary.chosen.number)}"
    path = f"call tree along the slowest path, {step}: the {CALLS_SHOWN} costliest names per level"
    out.print(head(path if folded else f"call tree of {step}", "chain"))
    if folded:
        _folded_chain(out, summary.cpu.chain, 0, len(summary.cpu.chain))
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


def _folded_chain(out: Console, chain: Sequence[Call], start: int, end: int) -> None:
    """Print the calls of one depth by name, then the same inside the longest call of the costliest name."""
    deeper, last = 0, DEPTHS_SHOWN - 1
    for level in range(DEPTHS_SHOWN):
        if start >= end:
            return
        depth = chain[start].depth
        calls = [index for index in range(start, end) if chain[index].depth == depth]
        if found := _repetition(chain, calls) if len(calls) > LINES_SHOWN else None:
            calls, end = _median_stretch(out, chain, calls, end, found, deeper)
            deeper += 1
        by_name: dict[str, list[int]] = {}
        for index in calls:
            by_name.setdefault(chain[index].name, []).append(index)
        costliest = sorted(by_name.items(), key=lambda item: -sum(chain[index].us for index in item[1]))
        longest = max(costliest[0][1], key=lambda index: chain[index].us)
        start, end = longest + 1, next((i for i in calls if i > longest), end)
        for name, same in costliest[CALLS_SHOWN - 1 : 0 : -1] + costliest[:1]:
            total = sum(chain[index].us for index in same)
            times = f"{len(same):,} calls of " if len(same) > 1 else ""
            summed = " in total" * bool(times)
            layers = [chain[index].layer for index in same if chain[index].layer][:LAYERS_NAMED]
            named = f"  {plain(', '.join(layers))}" if layers else ""
            indent = "  " * (depth + deeper + 1)
            # The calls below are those of one call, not of the sum.
            one = "; the slowest call:" * (len(same) > 1 and name == costliest[0][0] and start < end and last > level)
            line = f"{times}{plain(short(name, 60))}  [dim]{duration(total)}{summed}[/dim]{named}{one}"
            paragraph(out, line, indent, indent + "    ")


def _repetition(chain: Sequence[Call], calls: Sequence[int]) -> tuple[int, int, int] | None:
    """Return start, length and number of repetitions, if most of these calls repeat and take enough of their time."""
    found = repeated_names([chain[index].name for index in calls])
    if found is None:
        return None
    first, length, times = found
    taken = sum(chain[index].us for index in calls[first : first + length * times])
    return found if taken > WORTH_FOLLOWING * sum(chain[index].us for index in calls) else None


def _median_stretch(
    out: Console, chain: Sequence[Call], calls: list[int], end: int, found: tuple[int, int, int], deeper: int
) -> tuple[list[int], int]:
    """Print that calls repeat. Return the calls of the repetition with the median time, and its end.

    deeper: the extra indentation of calls, in levels.
    """
    first, length, times = found
    stretches = [calls[at : at + length] for at in range(first, first + length * times, length)]
    each = [sum(chain[index].us for index in stretch) for stretch in stretches]
    middle = sorted(range(times), key=each.__getitem__)[(times - 1) // 2]
    kept = stretches[middle]
    indent = "  " * (chain[calls[0]].depth + deeper + 1)
    line = f"the same {length:,} calls repeat {times} times, [dim]{duration(sum(each))} in total[/dim]; one repetition:"
    paragraph(out, line, indent, indent + "    ")
    return kept, next((index for index in calls if index > kept[-1]), end)
