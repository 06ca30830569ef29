"""--markdown: a comparison as a comment on a pull request. Names in a trace become neither markup nor mentions."""

import re
from collections.abc import Iterable, Iterator, Sequence

from tracereader.command import printable
from tracereader.figures import Summary
from tracereader.findings import steps
from tracereader.show.limits import MEASURES, measures, value_in_words
from tracereader.show.page.compared import kernel_rows
from tracereader.show.text import us as us_in_words
from tracereader.trace.kernel_names import short
from tracereader.two_runs import compare, faster, sentences

KERNELS_SHOWN = 10
NAME_SHOWN = 72
TITLES = {
    "step": "step", "cpu": "CPU per step", "gpu": "GPU busy per step", "gpu busy": "GPU busy", "launches": "launches",
    "kernels": "kernels", "memory": "peak memory",
}  # fmt: skip
PUNCTUATION = re.compile(r"([\\`*_\[\]<>#|~&$])")
APART = "\u200b"  # invisible; it keeps @name, #1 and addresses from becoming links


def side_by_side(summaries: Sequence[Summary]) -> str:
    """Return the comparison of several runs, each against the first."""
    sides = [compare.Side(summary) for summary in compare.with_like_families(summaries)]
    names = compare.distinct_names(sides)
    numbers = range(1, len(sides) + 1)
    lines = ["### Profile", ""]
    for number, side in zip(numbers[1:], sides[1:], strict=True):
        lines += [plain(f"{faster.sentence(f'Run {number}', sides[0], side, 'run 1')}."), ""]
    for number, name, side in zip(numbers, names, sides, strict=True):
        said = filter(None, [*steps.waiting(side.summary), steps.busy_machine(side.summary)])
        lines.append(f"{number}. {code(name)}: {plain('; '.join(said))}")
    change = "change" if len(sides) == 2 else f"change to run {len(sides)}"
    lines += ["", *_table(["of one step", *(f"run {number}" for number in numbers), change], _measures(summaries))]
    rows = [row for row in kernel_rows(sides) if row["status"] != "alike"]
    if rows:
        shown = rows[:KERNELS_SHOWN]
        cells = [[code(short(row["name"], NAME_SHOWN)), *map(us_in_words, row["us"]), row["status"]] for row in shown]
        lines += ["", *_table(["GPU activity", *(f"run {number}, µs" for number in numbers), ""], cells)]
        if len(rows) > KERNELS_SHOWN:
            lines += ["", f"{len(rows) - KERNELS_SHOWN:,} more names of GPU activities changed."]
    for name, side in zip(names[1:], sides[1:], strict=True):
        found = sentences.difference(sides[0], side)
        lines += ["", f"<details><summary>What changed in {html(name)}</summary>", ""]
        lines += [f"- {plain(text)}" for text in found.changed or ("nothing",)]
        lines += ["", "</details>"]
    return "\n".join(lines)


def _measures(summaries: Sequence[Summary]) -> Iterator[list[str]]:
    values = [measures(summary) for summary in summaries]
    for name in MEASURES:
        before, after = values[0][name], values[-1][name]
        if all(one[name] is None for one in values):
            continue
        change = "" if before is None or after is None else _change(name, before, after)
        yield [TITLES[name], *(value_in_words(name, one[name]) for one in values), change]


def _change(name: str, before: float, after: float) -> str:
    if name == "gpu busy":
        return f"{100 * (after - before):+.1f} points"
    if not before:
        return "" if not after else "new"
    return "0%" if after == before else f"{after / before - 1:+.1%}"


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return a table in GitHub's Markdown. Its cells are escaped already."""
    return [f"| {' | '.join(cells)} |" for cells in (heads, ["---", *("---:" for _ in heads[1:])], *rows)]


def code(text: str) -> str:
    """Return a name as code, between as many backticks as it needs. A bar would end a table's cell even there."""
    text = " ".join(printable(text).split()).replace("|", "\\|") or " "
    fence = "`" * (1 + max((len(run) for run in re.findall("`+", text)), default=0))
    blank = " " * (text.startswith("`") or text.endswith("`"))
    return f"{fence}{blank}{text}{blank}{fence}"


def plain(text: str) -> str:
    """Return a sentence without characters that Markdown interprets."""
    text = PUNCTUATION.sub(r"\\\1", " ".join(printable(text).split()))
    return re.sub(r"(@|\\#|:/|www)", rf"\1{APART}", text)


def html(text: str) -> str:
    """Return the text for a line of HTML, in which Markdown is not interpreted."""
    text = " ".join(printable(text).split()).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"(@|#|:/|www)", rf"\1{APART}", text)
