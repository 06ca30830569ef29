"""Reads what strict decoding refuses: defects that writers of traces leave in their JSON, and numbers of any size."""

import decimal
import json
import math
import re
from collections.abc import Iterator

import msgspec

from tracereader.trace.decoded import REPLACEMENT

LARGEST = 1e16  # µs, beyond the time of any clock
LONGEST = 4000  # digits: Python converts no whole number that is much longer
# A string's content and its closing quote, which a text that is cut short lacks. In the second kind of string, a
# backslash before a quote that a comma or a bracket follows is the end of a path: "C:\logs\".
_STRINGS = tuple(
    re.compile(rf'"([^"\\]*(?:\\{inside}[^"\\]*)*)(\\?"?)', re.DOTALL) for inside in (".", r'(?!"\s*[,:\]}}]).')
)
_ESCAPE = re.compile(r'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})?')
_CONTROL = re.compile("[\x00-\x1f]")
_NOT_A_NUMBER = decimal.Decimal("NaN")


class Defects(msgspec.Struct):
    """The defects of a file that is read nevertheless.

    events: those left out, because they have no usable time stamp or duration or are no JSON object. paths: strings
    with backslashes that the writer did not escape. controls: strings with raw control characters. no_text: places that
    are not valid text, replaced by U+FFFD. gpu: GPU activities that are left out, because a list of prof.events() has
    neither their streams nor their launches.
    """

    events: int = 0
    paths: int = 0
    controls: int = 0
    no_text: int = 0
    gpu: int = 0


def as_utf8(data: bytes) -> bytes:
    """Return JSON that editors and shells of Windows save (UTF-16, or with a byte order mark) as plain UTF-8."""
    if data.startswith((b"\xef\xbb\xbf", b"\xfe\xff", b"\xff\xfe")) or b"\x00" in data[:4]:
        return data.decode(json.detect_encoding(data), "replace").encode(errors="replace")
    return data


def repairs(data: bytes) -> Iterator[tuple[str, Defects]]:
    """Yield the text of JSON as it is, and then with its strings repaired in two ways; each with its defects."""
    replaced = 0
    try:
        text = data.decode(errors="surrogatepass")
    except UnicodeDecodeError:
        text = data.decode(errors="replace")
        replaced = text.count(REPLACEMENT) - data.count(REPLACEMENT.encode())
    yield text, Defects(no_text=replaced)
    for strings in _STRINGS:
        defects = Defects(no_text=replaced)
        yield _repaired(text, strings, defects), defects


def _repaired(text: str, strings: re.Pattern[str], defects: Defects) -> str:
    """Return the JSON with escaped backslashes and control characters in its strings, and count the repaired strings.

    A string with an illegal escape is a path that was written as it is. Its legal escapes are then no escapes, either:
    the t of C:\\Users\\temp. Strings without an illegal escape are valid JSON and stay as they are.
    """

    def repaired(match: re.Match) -> str:
        string, end = match.groups()
        if end == r"\"":
            string, end = string + "\\", '"'
        if "\\" in string and any(len(one) == 1 for one in _ESCAPE.findall(string)):
            defects.paths += 1
            string = _ESCAPE.sub(lambda one: one[0] if one[0] == r"\"" else one[0].replace("\\", r"\\"), string)
        if _CONTROL.search(string):
            defects.controls += 1
            string = _CONTROL.sub(lambda one: f"\\u{ord(one[0]):04x}", string)
        return f'"{string}{end}'

    return strings.sub(repaired, text)


def values(text: str) -> object:
    """Return the JSON's values; fractions as Decimals, or NaN if none holds them. Raises ValueError, RecursionError."""
    return json.loads(text, parse_float=_fraction, parse_int=_whole)


def is_time(us: float | decimal.Decimal | None) -> bool:
    """Return whether a time stamp or a duration is a number that a clock can show."""
    if us is None:
        return False
    is_finite = us.is_finite() if type(us) is decimal.Decimal else math.isfinite(us)
    return is_finite and -LARGEST < us < LARGEST  # abs() of a Decimal overflows


def number(value: object) -> decimal.Decimal | None:
    """Return a number, which may stand in a text; None for a missing value, NaN for a value that is no number."""
    if value is None:
        return None
    if type(value) in (int, decimal.Decimal):  # bool is an int, and JSON as Python reads it has NaN and Infinity
        return decimal.Decimal(value)
    return _fraction(value) if type(value) is str else _NOT_A_NUMBER


def _fraction(text: str) -> decimal.Decimal:
    try:
        return decimal.Decimal(text)
    except decimal.InvalidOperation:
        return _NOT_A_NUMBER


def _whole(text: str) -> int | decimal.Decimal:
    return int(text) if len(text) < LONGEST else _fraction(text)
