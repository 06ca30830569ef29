"""A finding is declared in one place: beside the function that judges it.

The cheatsheet, docs, `--json` and the predictions of the numbered scripts follow from the declarations (cheatsheet.py).
"""

import ast
import inspect
from collections.abc import Callable, Sequence
from functools import cached_property

import msgspec

from tracereader.figures import Summary
from tracereader.findings.device_words import holds_on

# A change is shown only if it saves more than this share of the step. Less exposed communication is not worth a line.
WORTH_SHOWING = 0.02
NO_GPU = "no GPU lane: this run was on the CPU"
# The places in a trace where a finding shows, in the cheatsheet's order.
TABLE, CPU, GPU, TREE, COMPILE = WHERE = "profiler table", "CPU lane", "GPU lane", "call tree", "torch.compile"


class Verdict(msgspec.Struct, frozen=True):
    """What a trace shows of a finding.

    holds: None if the trace does not decide it. evidence: the figures behind the verdict. why_not: the reason, shown
    only if the finding does not hold.
    """

    holds: bool | None
    evidence: str
    why_not: str = ""


class Finding(msgspec.Struct, frozen=True, dict=True):
    """A pattern that a trace can show, and the function that judges whether it does.

    name: the judge's name, which the records of predictions and `--json` hold.
    where, see, means: the finding's row of the cheatsheet. A finding without a row shows only as a prediction. What the
    pattern means is the judge's docstring.
    predicts: the sentence that predicts the finding, or a function that makes the sentence from the judge's parameters.
    A finding without it cannot be predicted. Calling a finding with these parameters makes the prediction.
    needs_gpu: whether only GPU work can show it.
    teaches: whether it explains how to read a trace and suggests no change. A report shows such a finding only for the
    trace of a numbered script, or with --all.
    said_above: whether the regime or the table of the steps already says it. The usual report then leaves it out of the
    patterns.
    claims: the numbers of the articles' claims that the finding concerns.
    change: the id of the change that the finding suggests. The replay computes what that change saves.
    needs: the backends of which it says something true; empty for any.
    """

    name: str
    judge: Callable[..., Verdict]
    where: str = ""
    see: str = ""
    means: str = ""
    predicts: str | Callable[..., str] = ""
    needs_gpu: bool = False
    teaches: bool = False
    said_above: bool = False
    claims: str = ""
    change: str = ""
    needs: tuple[str, ...] = ()

    @cached_property
    def signature(self) -> inspect.Signature:
        """Return the parameters of a prediction: the judge's parameters after the summary."""
        _, *parameters = inspect.signature(self.judge).parameters.values()
        return inspect.Signature(parameters)

    def ask(self, summary: Summary, *args, **kwargs) -> Verdict:
        """Return the verdict of a trace; undecided if the finding needs GPU work or another device than it has."""
        if self.needs_gpu and not summary.has_gpu_work:
            return Verdict(None, NO_GPU)
        if not holds_on(self.needs, summary.source.backend) and summary.has_gpu_work:
            return Verdict(None, "it is about another kind of device")
        return self.judge(summary, *args, **kwargs)

    def __call__(self, *args, **kwargs) -> "Prediction":
        given = self.signature.bind(*args, **kwargs)
        record = {"guess": self.name, **given.arguments}
        given.apply_defaults()
        text = self.predicts if isinstance(self.predicts, str) else self.predicts(*given.args, **given.kwargs)
        return Prediction(text, self, given, record)


def finding(where: str = "", see: str = "", **declared) -> Callable[[Callable[..., Verdict]], Finding]:
    """Return a decorator that declares a function as the judge of a finding with these fields.

    where: if given, the function's docstring says what the finding means.
    """
    return lambda judge: Finding(judge.__name__, judge, where, see, _meaning(judge) if where else "", **declared)


def _meaning(judge: Callable[..., Verdict]) -> str:
    """Return a judge's docstring in one line. python -OO drops docstrings, so that it is read from the source then."""
    text = judge.__doc__ or ast.get_docstring(ast.parse(inspect.getsource(judge)).body[0]) or ""
    return " ".join(text.split())


class Prediction(msgspec.Struct, frozen=True):
    """A finding that a numbered script expects in its own trace. record: the form in which the trace stores it."""

    text: str
    finding: Finding
    given: inspect.BoundArguments
    record: dict

    @property
    def needs_gpu(self) -> bool:
        return self.finding.needs_gpu

    def ask(self, summary: Summary) -> Verdict:
        """Return the verdict of a trace on this prediction."""
        return self.finding.ask(summary, *self.given.args, **self.given.kwargs)


def read_record(record: dict, findings: dict[str, Finding]) -> Prediction | None:
    """Return the prediction of a trace's record; None if this version does not know it or cannot make it."""
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
    """Return the names separated by commas, or "none"."""
    return ", ".join(names) or "none"


def counted(count: int, what: str, several: str = "") -> str:
    """Return a count with its noun, for example "1 kernel" or "2 kernels". several: an irregular plural."""
    return f"{count:,} {what if count == 1 else several or what + 's'}"


def how_often(count: int) -> str:
    """Return "once" or, for example, "3 times"."""
    return "once" if count == 1 else f"{count:,} times"


def activities(count: int) -> str:
    """Return a count of GPU activities (kernels, copies and memsets), for example "1 GPU activity"."""
    return counted(count, "GPU activity", "GPU activities")


def duration(us: float) -> str:
    """Return a time (µs) with its unit and one decimal: µs below a millisecond, s from ten seconds on, else ms."""
    if us < 1e3:
        return f"{us:,.1f} µs"
    return f"{us / 1e3:,.1f} ms" if us < 1e7 else f"{us / 1e6:,.1f} s"


def in_one_unit(us: Sequence[float]) -> tuple[str, list[str]]:
    """Return the unit that fits the largest of these times (µs), and the times in it: ("ms", ["0.747", "5.80"])."""
    largest = max(map(abs, us), default=0.0)
    unit, scale = ("s", 1e6) if largest >= 1e6 else ("ms", 1e3) if largest >= 1e3 else ("µs", 1.0)
    return unit, [significant(one / scale) for one in us]


def part_of(part_us: float, whole_us: float, between: str = "of the") -> str:
    """Return two times (µs) that are compared, for example "106 of the 220 µs". between: the words for "of the".

    They have one unit and three significant digits each. If the unit fits only the longer one, each has its own unit.
    """
    unit, (part, whole) = in_one_unit([part_us, whole_us])
    if 50 * min(part_us, whole_us) < max(part_us, whole_us):
        return f"{duration(part_us)} {between} {duration(whole_us)}"
    return f"{part} {between} {whole} {unit}"


def significant(value: float) -> str:
    """Return a value with three significant digits; all digits before the point are kept."""
    digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2 if abs(value) >= 1 else 3
    return f"{value:,.{digits}f}" if value else "0"


def tokens_s(a_second: float) -> str:
    """Return a rate of tokens as text, small ones (below 1 for a large model on a CPU) with two significant digits."""
    return f"{a_second:,.0f}" if a_second >= 10 else f"{a_second:.2g}"


# The names of each limit of a kernel or an op: (the data sheet's peak, the best rate that a run measured).
ROOFS = {"compute": ("arithmetic peak", "best arithmetic rate"), "memory": ("memory bandwidth", "best memory rate")}


def family_in_words(family: str) -> str:
    """Return a kernel family's name for a table's cell."""
    return {"GEMM": "matrix products", "unknown": "kernels of unknown names"}.get(family, family)


def family_as_noun(family: str) -> str:
    """Return a kernel family as a plural noun for a sentence, for example "pointwise kernels"."""
    name = family_in_words(family)
    return {"copy": "copies", "memset": "memsets"}.get(family, name if name != family else f"{family} kernels")


def copies_as_noun(by_driver: bool, by_kernels: bool) -> str:
    """Return the noun for copies: by the driver, by kernels, or by both."""
    return "copies and copy kernels" if by_driver and by_kernels else "copy kernels" if by_kernels else "copies"


def size(count: int) -> str:
    """Return a number of bytes with a decimal unit, because memory bandwidth is quoted in decimal units."""
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= scale:
            digits = 2 if count < 10 * scale and scale >= 1e9 else 1
            return f"{count / scale:.{digits}f} {unit}"
    return f"{count} B"
