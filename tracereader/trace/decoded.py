"""JSON that a trace keeps as text until it is needed, as Python values that can be printed and written again."""

import json
import math
import re
from typing import TypeVar

import msgspec

REPLACEMENT = "\ufffd"
_SURROGATE = re.compile("[\ud800-\udfff]")  # half of a pair: no encoding can write it
_ANY = msgspec.json.Decoder()
T = TypeVar("T")


def printable_text(text: str) -> str:
    """Return the text with U+FFFD in place of each half of a surrogate pair, which no encoding can write."""
    return _SURROGATE.sub(REPLACEMENT, text)


def decoded(raw: bytes | str) -> object:
    """JSON as Python's values; None where it cannot be read. All late decoding goes through here.

    The values are those of strict JSON: NaN, Infinity and numbers beyond a double are None. A byte that is not UTF-8
    and half a surrogate pair become U+FFFD, so that every string can be printed and written again.
    """
    found = decoded_as(_ANY, raw)
    return _decoded_by_json(raw) if found is None else found


def decoded_object(raw: bytes | str) -> dict:
    """JSON as a dictionary; an empty one where it is no object."""
    found = decoded(raw)
    return found if isinstance(found, dict) else {}


def decoded_as(decoder: msgspec.json.Decoder[T], raw: bytes | str) -> T | None:
    """The decoded JSON; None if its types differ or it cannot be read."""
    try:
        return decoder.decode(raw)
    except (ValueError, RecursionError):  # UnicodeDecodeError and msgspec's errors are ValueErrors
        return None


def _decoded_by_json(raw: bytes | str) -> object:
    text = raw if isinstance(raw, str) else bytes(raw).decode(errors="replace")
    try:
        found = json.loads(text, parse_constant=lambda _: None, parse_float=_finite)
        return json.loads(printable_text(json.dumps(found, ensure_ascii=False)))
    except (ValueError, RecursionError):
        return None


def _finite(text: str) -> float | None:
    return number if math.isfinite(number := float(text)) else None
