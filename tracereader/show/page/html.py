"""Assembles a page's file from static markup, the script, the style and the data.

All content of a trace is in two blocks that a browser does not run: JSON, in which every character that could end the
block or begin markup is escaped, and base64. The script puts it on the page as text and draws it on a canvas. The
content security policy forbids every request, and all scripts and styles but these two, which it names by their hashes.
"""

import base64
import gzip
import hashlib
from collections.abc import Iterable
from functools import cache
from importlib import resources

from tracereader import __version__
from tracereader.show.text import strict_json

# The first bytes of a report. A file that begins otherwise is not overwritten.
MARK = "<!doctype html><!-- a report of read-trace -->"
SCRIPTS = (
    "dom", "format", "load", "address", "table", "charts", "slices", "draw", "timeline", "details", "overview",
    "sections", "roofline", "compare", "heat", "ranks", "main",
)  # fmt: skip
STYLES = ("page", "timeline")
# In JSON, so that no character can end the block around it.
ESCAPED = str.maketrans({"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"})


def assembled(figures: dict, slices: dict | None, chunks: Iterable[bytes] = ()) -> str:
    """Return the whole page. slices: describes the columns in `chunks`; None if the page has no timeline."""
    style, script = _own("css", STYLES), _own("js", SCRIPTS)
    return _file("page.html").format(
        mark=MARK,
        policy=f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}; "
        "base-uri 'none'; form-action 'none'",
        version=__version__,
        style=style,
        script=script,
        figures=strict_json(figures, compact=True).translate(ESCAPED),
        slices=_packed(slices, chunks) if slices is not None else "",
    )


def _packed(slices: dict, chunks: Iterable[bytes]) -> str:
    """Return the length of the description (8 bytes, little-endian), the description and the columns, as base64."""
    head = strict_json(slices, compact=True).encode()
    whole = b"".join([len(head).to_bytes(8, "little"), head, *chunks])
    return base64.b64encode(gzip.compress(whole, compresslevel=6, mtime=0)).decode()


@cache
def _own(kind: str, names: tuple[str, ...]) -> str:
    """Return the page's files of one kind as one text. Scripts are put into a function."""
    text = "\n".join(_file(f"{kind}/{name}.{kind}") for name in names)
    return f'(() => {{\n"use strict";\n{text}\n}})();' if kind == "js" else text


def _file(name: str) -> str:
    return (resources.files("tracereader.show.page") / name).read_text("utf-8")


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
