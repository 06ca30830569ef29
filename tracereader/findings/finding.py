"""A finding is declared in one place: beside the function that judges it.

The cheatsheet, docs, `--json` and the predictions of the numbered scripts follow from the declarations (cheatsheet.py).
"""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import msgspec

from tracereader.figures import Summary

NO_GPU = "no GPU lane: this run was on the CPU"
# Where in a trace a finding shows, in the order in which the cheatsheet has them.
TABLE, CPU, GPU, TREE, COMPILE = WHERE = "profiler table", "CPU lane", "GPU lane", "call tree", "torch.compile"


@dataclass(frozen=True)
class Verdict:
    """holds: None if the trace does not decide it. why_not: shown only if it does not hold."""

    holds: bool | None
    evidence: str
    why_not: str = ""


@dataclass(frozen=True)
class Finding:
    """A pattern that a trace can show, and the function that judges whether it does.

    name: the judge's, which the records of predictions and `--json` hold.
    where, see, means: its row of the cheatsheet; a finding without them shows as a prediction only.
    predicts: the sentence that predicts it, or a function that makes the sentence from the judge's parameters; a
    finding without it cannot be predicted. Called with these parameters, a finding makes the prediction.
    needs_gpu: only GPU work can show it. teaches: it explains how to read a trace, and suggests nothing; a report shows
    it only for the trace of a numbered script, or where all is asked for. claims: the numbers of the articles' claims
    that it bears on. change: the id of the change that it suggests. What that saves is its cost, and replay prices it.
    """

    name: str
    judge: Callable[..., Verdict]
    where: str = ""
    see: str = ""
    means: str = ""
    predicts: str | Callable[..., str] = ""
    needs_gpu: bool = False
    teaches: bool = False
    claims: str = ""
    change: str = ""

    @cached_property
    def signature(self) -> inspect.Signature:
        """What a prediction of it takes: the judge's parameters after the summary."""
        _, *parameters = inspect.signature(self.judge).parameters.values()
        return inspect.Signature(parameters)

    def ask(self, summary: Summary, *args, **kwargs) -> Verdict:
        """Whether the trace shows it."""
        if self.needs_gpu and not summary.has_gpu_work:
            return Verdict(None, NO_GPU)
        return self.judge(summary, *args, **kwargs)

    def __call__(self, *args, **kwargs) -> "Prediction":
        given = self.signature.bind(*args, **kwargs)
        record = {"guess": self.name, **given.arguments}
        given.apply_defaults()
        text = self.predicts if isinstance(self.predicts, str) else self.predicts(*given.args, **given.kwargs)
        return Prediction(text, self, given, record)


def finding(where: str = "", see: str = "", means: str = "", **declared) -> Callable[[Callable[..., Verdict]], Finding]:
    """Declare the decorated function as the judge of a finding with these fields."""
    return lambda judge: Finding(judge.__name__, judge, where, see, means, **declared)


@dataclass(frozen=True)
class Prediction:
    """A finding that a numbered script expects of its own trace. record: what the trace stores of it."""

    text: str
    finding: Finding
    given: inspect.BoundArguments
    record: dict

    @property
    def needs_gpu(self) -> bool:
        return self.finding.needs_gpu

    def ask(self, summary: Summary) -> Verdict:
        """Whether the trace bears it out."""
        return self.finding.ask(summary, *self.given.args, **self.given.kwargs)


def read_record(record: dict, findings: dict[str, Finding]) -> Prediction | None:
    """The prediction that a trace's record holds; None where this version does not know it, or cannot make it."""
    made = findings.get(record.get("guess")) if isinstance(record.get("guess"), str) else None
    if made is None:
        return None
    positional, named = [], {}
    try:
        for name, parameter in made.signature.parameters.items():
            if parameter.kind is parameter.VAR_POSITIONAL:
                positional += msgspec.convert(record[name], list[parameter.annotation])
            elif name in record:
                value = msgspec.convert(record[name], parameter.annotation)
                if named or parameter.default is not parameter.empty:
                    named[name] = value
                else:
                    positional.append(value)
        return made(*positional, **named)
    except Exception:  # the file may hold anything, and a bad record must not stop the report
        return None


def listed(names) -> str:
    return ", ".join(names) or "none"


def counted(count: int, what: str, several: str = "") -> str:
    """1 kernel, 2 kernels."""
    return f"{count:,} {what if count == 1 else several or what + 's'}"


def activities(count: int) -> str:
    """1 GPU activity: a kernel, a copy or a memset."""
    return counted(count, "GPU activity", "GPU activities")


def duration(us: float) -> str:
    """With its unit: µs to one decimal below a millisecond, then ms."""
    return f"{us:,.1f} µs" if us < 1000 else f"{us / 1e3:,.1f} ms"


def in_one_unit(us: Sequence[float]) -> tuple[str, list[str]]:
    """Times (µs) in the unit that fits the largest, with three significant digits: ("ms", ["0.747", "5.80"])."""
    largest = max(map(abs, us), default=0.0)
    unit, scale = ("s", 1e6) if largest >= 1e6 else ("ms", 1e3) if largest >= 1e3 else ("µs", 1.0)
    return unit, [significant(one / scale) for one in us]


def significant(value: float) -> str:
    """Three significant digits, and every digit before the point."""
    digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2 if abs(value) >= 1 else 3
    return f"{value:,.{digits}f}" if value else "0"


def tokens_s(a_second: float) -> str:
    """Tokens a second: a large model on a CPU writes less than one."""
    return f"{a_second:,.0f}" if a_second >= 10 else f"{a_second:.2g}"


# What limits a kernel or an op, by a data sheet and as a run measured it: (peak, best rate).
ROOFS = {
    "compute": ("arithmetic peak", "best arithmetic rate"),
    "memory": ("memory bandwidth", "best memory rate"),
}


def family_in_words(family: str) -> str:
    """A family of kernels, as a sentence or a table names it."""
    return {"GEMM": "matrix products", "unknown": "kernels of unknown names"}.get(family, family)


def size(count: int) -> str:
    """Bytes in decimal units, as memory bandwidth is quoted."""
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= scale:
            digits = 2 if count < 10 * scale and scale >= 1e9 else 1
            return f"{count / scale:.{digits}f} {unit}"
    return f"{count} B"
