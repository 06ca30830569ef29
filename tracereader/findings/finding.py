"""A finding is a sentence and a judge; a guess is a finding written down as data, so that a trace can hold it."""

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import msgspec

from tracereader.figures import Summary

NO_GPU = "no GPU lane: this run was on the CPU"


@dataclass(frozen=True)
class Verdict:
    """holds: None where this trace cannot tell. why_not: shown only where it does not hold.

    cost_us: what it costs each step, where that is known.
    """

    holds: bool | None
    evidence: str
    why_not: str = ""
    cost_us: float | None = None


@dataclass(frozen=True)
class Finding:
    """text: the sentence. record: what read_record() makes it from again."""

    text: str
    judge: Callable[[Summary], Verdict]
    needs_gpu: bool = False
    record: dict = field(default_factory=dict)

    def ask(self, summary: Summary) -> Verdict:
        """Whether the trace bears it out."""
        if self.needs_gpu and not summary.has_gpu_work:
            return Verdict(None, NO_GPU)
        return self.judge(summary)


def recordable(make: Callable[..., Finding]) -> Callable[..., Finding]:
    """Let the findings that `make` returns say how they were made."""

    @functools.wraps(make)
    def made(*args, **kwargs) -> Finding:
        given = inspect.signature(make).bind(*args, **kwargs).arguments
        return replace(make(*args, **kwargs), record={"guess": make.__name__, **given})

    return made


def read_record(record: dict, makers: dict[str, Callable[..., Finding]]) -> Finding | None:
    """The finding that a trace's record speaks of; None where this version knows no such one, or cannot make it."""
    make = makers.get(record.get("guess")) if isinstance(record.get("guess"), str) else None
    if make is None:
        return None
    parameters = inspect.signature(make).parameters
    positional, named = [], {}
    try:
        for name, parameter in parameters.items():
            if parameter.kind is parameter.VAR_POSITIONAL:
                positional += msgspec.convert(record[name], list[parameter.annotation])
            elif name in record:
                value = msgspec.convert(record[name], parameter.annotation)
                if named or parameter.default is not parameter.empty:
                    named[name] = value
                else:
                    positional.append(value)
        return make(*positional, **named)
    except Exception:  # a file may hold anything, and no prediction is worth the report
        return None


def listed(names) -> str:
    return ", ".join(names) or "none"


def counted(count: int, what: str, several: str = "") -> str:
    """1 kernel, 2 kernels."""
    return f"{count:,} {what if count == 1 else several or what + 's'}"


def duration(us: float) -> str:
    """With its unit: µs to one decimal below a millisecond, then ms."""
    return f"{us:,.1f} µs" if us < 1000 else f"{us / 1e3:,.1f} ms"


def tokens_s(a_second: float) -> str:
    """Tokens a second: a large model on a CPU writes less than one."""
    return f"{a_second:,.0f}" if a_second >= 10 else f"{a_second:.2g}"


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
