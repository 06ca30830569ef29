"""Make the JSON Schema of what `read-trace --json` prints from the structs that the program writes.

    uv run docs/schema.py          rewrites tracereader/schema.json
    uv run docs/schema.py --check  says whether it is out of date, with exit status 1

A member that is computed while the document is written has no struct; its type is named here, and the tests compare
both with the documents of all committed traces.
"""

import json
import sys
import typing
from collections.abc import Collection, Mapping
from pathlib import Path

import msgspec

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tracereader.changes.opportunity import Opportunity  # noqa: E402
from tracereader.figures import Summary  # noqa: E402
from tracereader.figures.cpu import Cpu  # noqa: E402
from tracereader.figures.rank import Times  # noqa: E402
from tracereader.figures.ranks import RankFigures, RanksSummary  # noqa: E402
from tracereader.figures.series import Series  # noqa: E402
from tracereader.figures.starts import Start  # noqa: E402
from tracereader.figures.steps import StepFacts  # noqa: E402
from tracereader.figures.table import Table  # noqa: E402
from tracereader.findings.ranks import Cost, Loss, SlowHost, SlowLink  # noqa: E402
from tracereader.show import as_json, ranks  # noqa: E402

FILE = ROOT / "tracereader/schema.json"
REF = "#/$defs/"


class Lesson(typing.TypedDict):
    script: str
    flags: dict[str, typing.Any]
    facts: dict[str, typing.Any]


class Pattern(typing.TypedDict):
    name: str
    where: str
    see: str
    means: str
    figure: str
    change: str | None


class Predicted(typing.TypedDict):
    prediction: str
    holds: bool | None
    evidence: str
    why_not: str | None


STEP = msgspec.defstruct("ReportedStep", [("cause", str | None)], bases=(StepFacts,), kw_only=True)
# The figures of the window are at the top of a rank's row.
RANK = msgspec.defstruct(
    "Rank",
    [("window_us", float)]
    + [(name, kind) for name, kind in typing.get_type_hints(Times).items() if name not in ("name", "us")]
    + [(name, kind) for name, kind in typing.get_type_hints(RankFigures).items() if name != "total"],
    kw_only=True,
)
ALWAYS_THERE = {"version": int, "form": str, "notes": list[str]}
OF_A_TRACE = ALWAYS_THERE | {
    "lesson": Lesson | None,
    "steps": tuple[STEP, ...],
    "warnings": list[str],
    "busy_machine": str | None,
    "recorded_step_us": float | None,
    "waits_because": str | None,
    "patterns": tuple[Pattern, ...],
    "predictions": tuple[Predicted, ...],
    "table": Table,
    "starts": tuple[Start, ...],
    "series": tuple[Series, ...],
    "opportunities": tuple[Opportunity, ...],
    "opportunities_refused": str | None,
}
OF_RANKS = ALWAYS_THERE | {
    "ranks": tuple[RANK, ...],
    "not_read": dict[str, str],
    "collectives": int,
    "straggler": int | None,
    "loss": Loss | None,
    "slow_link": SlowLink | None,
    "costs": tuple[Cost, ...],
    "pipeline": bool,
    "slow_hosts": tuple[SlowHost, ...],
    "pace_setter": int,
    "regime": str | None,
    "regime_because": str | None,
    "in_short": list[str],
    "opportunities": tuple[Opportunity, ...],
}
# Left out where no kernel recorded its phases.
MAY_LACK = ("inside",)


def types_of_a_trace() -> dict[str, object]:
    """Return the type of each member of a trace's document."""
    found = typing.get_type_hints(Summary)
    for part in map(found.pop, as_json.FLAT):
        found |= {field.encode_name: field.type for field in msgspec.structs.fields(part)}
    del found["facts"], found["cpu"]
    found |= {name: typing.get_type_hints(getattr(Cpu, name).func)["return"] for name in Cpu.FIELDS}
    return found | OF_A_TRACE


def schema() -> dict:
    """Return the schema."""
    documents = {"Trace": types_of_a_trace(), "Ranks": typing.get_type_hints(RanksSummary) | OF_RANKS}
    structs = [msgspec.defstruct(name, list(types.items())) for name, types in documents.items()]
    _, parts = msgspec.json.schema_components(structs, ref_template=f"{REF}{{name}}")
    for part in parts.values():
        if "properties" in part:
            # Every field is written, also one that has its default.
            part |= {"required": list(part["properties"]), "additionalProperties": False}
            for field in part["properties"].values():
                field.pop("default", None)
        part.pop("title", None)
        if "description" in part:
            part["description"] = " ".join(part["description"].split())
    chosen_by_rank = [key for keys in ranks.SECTION_KEYS.values() for key in keys]
    every_rank = [name for name in parts["Ranks"]["properties"] if name not in chosen_by_rank]
    forms = {"Trace": (as_json.SHORT, as_json.ALWAYS), "Ranks": (ranks.SHORT, every_rank)}
    for name, (short, always) in forms.items():
        parts[f"Short{name}"] = _short(parts, parts[name]["properties"], short)
        _with_forms(parts[name], always)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "read-trace --json",
        "description": "Times are in µs, shares run from 0 to 1. Short… is the form of --json, the others that of "
        "--json=all, or of --json --only SECTION with some of its members.",
        "anyOf": [{"$ref": f"{REF}{short}{name}"} for name in forms for short in ("Short", "")],
        "$defs": dict(sorted(parts.items())),
    }


def _with_forms(part: dict, always: Collection[str]) -> None:
    """Require all members of a whole document, and of one that --only restricts those that are always there."""
    whole = [name for name in part["required"] if name not in MAY_LACK]
    part["properties"]["version"] = {"const": as_json.VERSION}
    part["properties"]["form"] = {"enum": ["all", "sections"]}
    part["required"] = list(always)
    part["if"] = {"properties": {"form": {"const": "all"}}}
    part["then"] = {"required": whole}


def _short(parts: dict, members: dict, short: Mapping[str, as_json.Rows | None]) -> dict:
    """Return the schema of a short form, and add those of its rows to the parts."""
    found = {}
    for path, rows in short.items():
        if "." not in path:
            found[path] = members[path] if rows is None else _rows(parts, members[path], rows)
    left_out = {"type": "object", "properties": {"rows": {"type": "integer"}, "us": {"type": "number"}}}
    parts["LeftOut"] = left_out | {"required": ["rows"], "additionalProperties": False}
    listed = {path: {"$ref": f"{REF}LeftOut"} for path, rows in short.items() if rows is not None}
    found |= {
        "version": {"const": as_json.VERSION},
        "form": {"const": "short"},
        "more": {"type": "object", "properties": listed, "additionalProperties": False},
    }
    return {"type": "object", "properties": found, "required": list(found), "additionalProperties": False}


def _rows(parts: dict, member: dict, rows: as_json.Rows) -> dict:
    """Return the schema of a list, or of figures by name, whose rows have some of their fields."""
    key = "items" if "items" in member else "additionalProperties"
    if not rows.fields or "$ref" not in member[key]:
        return member
    name = member[key]["$ref"].removeprefix(REF)
    fields = {field: parts[name]["properties"][field] for field in rows.fields}
    brief = {"description": f"Some fields of {name}.", "properties": fields, "required": list(fields)}
    parts[f"Short{name}"] = parts[name] | brief
    return member | {key: {"$ref": f"{REF}Short{name}"}}


def text() -> str:
    """Return the text of the file, one part of the schema on a line."""
    top = schema()
    parts = ",\n".join(f" {_line(name)}: {_line(part)}" for name, part in top.pop("$defs").items())
    head = "".join(f"{_line(name)}: {_line(value)},\n" for name, value in top.items())
    return f'{{\n{head}"$defs": {{\n{parts}\n}}\n}}\n'


def _line(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def main() -> int:
    stale = FILE.read_text() != text() if FILE.exists() else True
    if "--check" not in sys.argv:
        FILE.write_text(text())
    print("out of date" if stale and "--check" in sys.argv else "rewritten" if stale else "nothing to do")
    return 1 if stale and "--check" in sys.argv else 0


if __name__ == "__main__":
    sys.exit(main())
