"""read-trace --json: the short form and its size, and the schema of all documents."""

import importlib.util
import json
import re
from pathlib import Path

import pytest
from many_ranks import Delay, made
from raw_events import raw_steps
from references import CHANGES, LARGE_FILE, ROOT, opened, sampled
from test_opportunities import raw_events

from tracereader import cli
from tracereader.figures.ranks import joined
from tracereader.show import ranks
from tracereader.show.as_json import SHORT, VERSION, as_json
from tracereader.show.predictions import predictions_of
from tracereader.show.view import View

SCHEMA = ROOT / "tracereader/schema.json"
FILES = sorted(
    path
    for folder in ("traces/reference", "tests/traces")
    for path in (ROOT / folder).rglob("*")
    if re.search(r"\.(json|pftrace)(\.gz)?$", path.name)
)
EAGER = CHANGES / "vit/eager.json.gz"
MOST = 16_000  # bytes of a short form; the largest one today has 13,000


def jobs():
    """Return the committed traces of ranks that were recorded together."""
    found = {}
    for path in FILES:
        if (first := re.sub(r"rank\d+(?=\.)", "rank", path.name)) != path.name:
            found.setdefault(path.parent / first, []).append(path)
    return [paths for paths in found.values() if len(paths) > 1]


def printed(capsys, *words):
    assert cli.main([str(word) for word in words]) == 0
    return capsys.readouterr().out


@pytest.fixture(scope="module")
def validated():
    """Return a function that checks a document against one of the schema's forms."""
    jsonschema = pytest.importorskip("jsonschema")
    parts = json.loads(SCHEMA.read_text())["$defs"]
    forms = {
        form: jsonschema.Draft202012Validator({"$ref": f"#/$defs/{form}", "$defs": parts})
        for form in ("Trace", "Ranks", "ShortTrace", "ShortRanks")
    }
    jsonschema.Draft202012Validator.check_schema(json.loads(SCHEMA.read_text()))

    def validate(document, form):
        problem = jsonschema.exceptions.best_match(forms[form].iter_errors(one_of_each(document)))
        if problem is not None:
            raise Refused(f"{problem.json_path}: {problem.message[-300:]}")

    return validate


class Refused(Exception):
    """The schema does not describe a document."""


def one_of_each(value):
    """Return a document whose tables have one row of each kind: as valid, and validated in less time.

    Rows are of one kind if they have the same names, and values of the same types below them.
    """
    if isinstance(value, dict):
        return {name: one_of_each(one) for name, one in value.items()}
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return list({kind_of(one): one for one in map(one_of_each, value)}.values())
    return value


def kind_of(value):
    if isinstance(value, dict):
        return tuple((name, kind_of(one)) for name, one in value.items())
    return tuple(map(kind_of, value)) if isinstance(value, list) else type(value)


# The smallest one of each folder, if it is small; the others are exhaustive.
TRACES = [
    pytest.param(one, marks=pytest.mark.exhaustive)
    if isinstance(one, Path) and one.stat().st_size > LARGE_FILE
    else one
    for one in sampled(FILES)
]


@pytest.mark.parametrize("path", TRACES, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_documents_of_a_trace_follow_the_schema(path, validated):
    trace, summary = opened(path)
    short, whole = (as_json(trace, summary, predictions_of(trace), View(), short) for short in (True, False))
    assert len(short.encode()) < MOST
    brief, all_of_it = json.loads(short), json.loads(whole)
    validated(brief, "ShortTrace")
    validated(all_of_it, "Trace")
    assert_is_part_of(brief, all_of_it)


def assert_is_part_of(short, whole):
    """What the short form shows is in the whole document, and what it leaves out is counted."""
    for name, value in short.items():
        if name in ("form", "more"):
            continue
        rows, left_out = SHORT[name], short["more"].get(name, {"rows": 0})
        if rows is None or not value:
            assert not rows or value == whole[name], name
            continue
        shown, every = (list(one.values() if isinstance(one, dict) else one) for one in (value, whole[name]))
        assert len(shown) + left_out["rows"] == len(every) and len(shown) <= rows.most, name
        if rows.by:
            times = [one[rows.by] for one in every]
            assert sum(one[rows.by] for one in shown) + left_out.get("us", 0) == pytest.approx(sum(times))
            assert min(one[rows.by] for one in shown) >= sorted(times)[-len(shown)]


@pytest.mark.parametrize(
    "paths",
    [pytest.param(paths, marks=pytest.mark.exhaustive if number % 8 else ()) for number, paths in enumerate(jobs())],
    ids=lambda paths: str(paths[0].relative_to(ROOT)),
)
def test_the_documents_of_ranks_follow_the_schema(paths, validated, capsys):
    short = printed(capsys, *paths, "--json")
    assert len(short.encode()) < MOST
    validated(json.loads(short), "ShortRanks")
    validated(json.loads(printed(capsys, *paths, "--json=all")), "Ranks")


def test_the_schema_refuses_other_documents(validated, capsys):
    for flag, form in (("--json", "ShortTrace"), ("--json=all", "Trace")):
        document = json.loads(printed(capsys, EAGER, flag))
        validated(document, form)
        for wrong in (
            document | {"more_of_it": 1},
            document | {"version": VERSION - 1},
            {name: value for name, value in document.items() if name != "kernels"},
            document | {"steps": [one | {"cause": 1} for one in document["steps"]]},
            document | {"kernels": [one | {"us": 1.0} for one in document["kernels"]]},
        ):
            with pytest.raises(Refused):
                validated(wrong, form)


def test_some_sections_follow_the_schema(validated, capsys):
    for words, form in (([EAGER], "Trace"), (jobs()[0], "Ranks")):
        for flag in ("--json", "--json=all"):
            found = json.loads(printed(capsys, *words, flag, "--only", "short"))
            assert found["form"] == "sections" and "opportunities" not in found and "more" not in found
            validated(found, form)


def test_the_schema_is_made_from_the_structs():
    spec = importlib.util.spec_from_file_location("schema", ROOT / "docs/schema.py")
    schema = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(schema)
    assert SCHEMA.read_text() == schema.text(), "uv run docs/schema.py"


def test_the_schema_is_printed(capsys):
    assert printed(capsys, "--json=schema") == SCHEMA.read_text()
    assert cli.main(["--json=schema", str(EAGER)]) == 2


def test_the_short_form_has_the_largest_rows(capsys):
    """Its kernels and what it leaves out add up to all GPU activities, and each figure is that of the raw events."""
    found = json.loads(printed(capsys, EAGER, "--json"))
    assert (found["version"], found["form"]) == (VERSION, "short")
    times = {}
    for event in raw_events(EAGER):
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
            times.setdefault(event["name"], []).append(event["dur"])
    sums = sorted(map(sum, times.values()), reverse=True)
    assert [one["total_us"] for one in found["kernels"]] == pytest.approx(sums[: len(found["kernels"])])
    left_out = found["more"]["kernels"]
    assert left_out["rows"] == len(sums) - len(found["kernels"]) > 0
    assert left_out["us"] == pytest.approx(sum(sums[len(found["kernels"]) :]))
    assert [one["name"] for one in found["steps"]] == [mark["name"] for mark in raw_steps(raw_events(EAGER))]
    assert max(len(one["name"]) for one in found["kernels"]) == 160 < max(map(len, times))
    assert found["opportunities"][0]["try"] and found["opportunities"][0]["evidence"]


def test_all_means_everything(capsys):
    whole = printed(capsys, EAGER, "--json=all")
    assert json.loads(whole)["form"] == "all" and {"chain", "series"} < json.loads(whole).keys()
    assert printed(capsys, EAGER, "--json", "--all") == whole


def test_no_trace_is_taken_for_the_value(tmp_path, capsys, monkeypatch):
    """The flag stands before or after the trace, whatever the trace is called."""
    short = printed(capsys, EAGER, "--json")
    assert printed(capsys, "--json", EAGER) == short
    monkeypatch.chdir(tmp_path)
    for name in ("all", "schema", "short", "--json"):
        Path(name).write_bytes(EAGER.read_bytes())
        found = json.loads(printed(capsys, "--json", *(["--"] * name.startswith("-")), name))
        assert (found["trace"], found["form"]) == (name, "short")
    assert json.loads(printed(capsys, "--json=all", "all"))["form"] == "all"
    assert cli.main([f"--json={EAGER}"]) == 2
    assert "choose from" in capsys.readouterr().err


def test_a_thousand_ranks_fit_into_the_short_form(validated):
    """It has the late rank and why, and the rank that waits most; it counts the others."""
    summary = joined(made(1024, 42, tensor=8, delays={517: Delay(11_000_000)}))
    text = ranks.as_json(summary, View(only=None), short=True)
    assert len(text.encode()) < MOST
    found = json.loads(text)
    validated(found, "ShortRanks")
    assert found["straggler"] == 517 in [one["rank"] for one in found["ranks"]]
    assert len(found["ranks"]) + found["more"]["ranks"]["rows"] == 1024
    assert max(summary.ranks, key=lambda one: one.waited_exposed_us).rank in [one["rank"] for one in found["ranks"]]
    assert found["costs"][0]["ranks"] == [517]
