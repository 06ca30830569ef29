"""--fail-if: limits on the change of a step's figures from the first run to another."""

import operator
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from tracereader.command import BadInput, printable
from tracereader.figures import Summary
from tracereader.findings.finding import duration, size
from tracereader.two_runs import compare

MEASURES = ("step", "cpu", "gpu", "gpu busy", "launches", "kernels", "memory")
COMPARISONS = {">": operator.gt, "<": operator.lt, ">=": operator.ge, "<=": operator.le}
UNITS = {"us": 1.0, "µs": 1.0, "ms": 1e3, "s": 1e6, "b": 1.0, "kb": 1e3, "mb": 1e6, "gb": 1e9}
OF_TIME, OF_SIZE = ("us", "µs", "ms", "s"), ("b", "kb", "mb", "gb")
TIMES = ("step", "cpu", "gpu")
EXAMPLES = '"step > 5%", "launches > 0", "memory > 100 MB", "gpu busy < -5%"'
WRITTEN = re.compile(
    r"\s*([a-z]+(?:\s+[a-z]+)?)\s*(>=|<=|>|<)\s*([-+]?\d{1,15}(?:\.\d{1,15})?)\s*(%|[a-zµ]{1,2})?\s*", re.I
)


class Limit(NamedTuple):
    """One limit. amount: a share if it is relative, else in µs, bytes or a count."""

    text: str
    measure: str
    comparison: str
    amount: float
    relative: bool


def limit_of(text: str) -> Limit:
    """Return the limit that a user wrote. Raises BadInput."""
    match = WRITTEN.fullmatch(text)
    measure = " ".join(match[1].lower().split()) if match else ""
    if measure not in MEASURES:
        known = ", ".join(MEASURES)
        raise BadInput(f"--fail-if {printable(text)[:60]!r}: write for example {EXAMPLES}; the measures are {known}")
    unit = (match[4] or "").lower().replace("\u03bc", "µ")  # the Greek letter looks like the sign for micro
    wanted = OF_TIME if measure in TIMES else OF_SIZE if measure == "memory" else ("",)
    if unit != "%" and (unit not in wanted or measure == "gpu busy"):
        units = "%" if measure == "gpu busy" else " or ".join(("%", *filter(None, wanted)))
        raise BadInput(f"--fail-if {printable(text)[:60]!r}: {measure} takes {units}")
    scale = 0.01 if unit == "%" else UNITS.get(unit, 1.0)
    return Limit(text.strip(), measure, match[2], float(match[3]) * scale, unit == "%")


def measures(summary: Summary) -> dict[str, float | None]:
    """Return the figures of the reported step that can have a limit: µs, a share, counts, bytes; None if unknown."""
    gpu = summary.has_gpu_work
    return {
        "step": summary.recorded_step_us,
        "cpu": summary.chosen.cpu_us,
        "gpu": summary.chosen.gpu_busy_us if gpu else None,
        "gpu busy": summary.busy_share,
        "launches": summary.chosen.launches if gpu else None,
        "kernels": summary.count("kernel") if gpu else None,
        "memory": compare.Side(summary).peak_bytes,
    }


def crossed(summaries: Sequence[Summary], limits: Sequence[Limit]) -> Iterator[str]:
    """Yield a sentence for each limit that a run crosses against the first.

    Raises BadInput if the figures do not compare, or a trace does not have one.
    """
    sides = list(map(compare.Side, summaries))
    if any(compare.only_one_has_steps(sides[0], side) for side in sides[1:]):
        raise BadInput(
            "--fail-if: the figures per step do not compare, because only some of the traces have profiler steps"
        )
    first, *others = map(measures, summaries)
    for limit in limits:
        for number, other in enumerate(others, 2):
            before, after = first[limit.measure], other[limit.measure]
            if before is None or after is None:
                raise BadInput(f"--fail-if {limit.text!r}: the traces do not show {limit.measure}")
            if COMPARISONS[limit.comparison](changed(limit, before, after), limit.amount):
                run = f"run {number}: " * (len(others) > 1)
                yield f"{run}{in_words(limit.measure, before, after)} ({limit.text})"


def changed(limit: Limit, before: float, after: float) -> float:
    """Return the change that a limit applies to: in points for a share, else relative or absolute."""
    if limit.measure == "gpu busy" or not limit.relative:
        return after - before
    if before:
        return after / before - 1
    return 0.0 if not after else float("inf")


def in_words(measure: str, before: float, after: float) -> str:
    """Return the change of a measure in words, with its unit."""
    names = {"step": "the step", "cpu": "the step on the CPU", "gpu": "GPU time", "gpu busy": "GPU busy"}
    name = names.get(measure, measure)
    values = f"{value_in_words(measure, before)} to {value_in_words(measure, after)}"
    if measure == "gpu busy" or not before or after == before:
        return f"{name}: {values}"
    return f"{name}: {values}, {after / before - 1:+.1%}"


def value_in_words(measure: str, value: float | None) -> str:
    if value is None:
        return "–"
    if measure in TIMES:
        return duration(value)
    return f"{value:.1%}" if measure == "gpu busy" else size(int(value)) if measure == "memory" else f"{value:,.0f}"
