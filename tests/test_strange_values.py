"""Invalid text and numbers in a trace: the file is read, or refused in one line, and the JSON output stays strict."""

import gzip
import json

import pytest
from references import H200, ROOT

from tracereader import cli, expect
from tracereader.figures import summarize
from tracereader.findings import cheatsheet
from tracereader.findings.finding import Verdict, finding, read_record
from tracereader.show.export import merged
from tracereader.show.ranks import opened
from tracereader.show.view import View
from tracereader.trace import read
from tracereader.trace.decoded import decoded

# Of --json: what a repaired file may differ in.
OF_THE_FILE = ("trace", "warnings")
TRACE = H200 / "02_linear/1024x32x64_bf16_cold_eager.json.gz"
RANKS = [ROOT / f"tests/traces/ranks/fsdp_rank{rank}.json.gz" for rank in (0, 1)]
# Invalid parts of a string: a byte that is not UTF-8, half a surrogate pair, the end of a pair that began elsewhere.
NOT_TEXT = (b"\xff", b"\\ud83d", b"\\udc00")
# For each of these keys, the first string after the key gets such a part.
LATE = (b'"deviceProperties"', b'"lesson"', b'"flags"', b'"guesses"', b'"cat":"kernel"', b'"cat":"cpu_op"')


def strict(text):
    def refuse(constant):
        raise AssertionError(f"{constant} is no JSON")

    found = json.loads(text, parse_constant=refuse)
    text.encode()
    return found


def put(path, data, keys, part):
    """Write the JSON with the part in the first string after each key, and return the file."""
    data = data.replace(b'": "', b'":"')
    for key in keys:
        place = data.index(b'":"', data.index(key) + len(key)) + 3
        data = data[:place] + part + data[place:]
    path.write_bytes(data)
    return path


@pytest.fixture(scope="module")
def data():
    return gzip.decompress(TRACE.read_bytes()).replace(b'"cat": "', b'"cat":"')


@pytest.mark.parametrize("part", NOT_TEXT)
@pytest.mark.parametrize("key", LATE)
def test_invalid_text_gives_no_traceback(tmp_path, capsys, data, key, part):
    trace = put(tmp_path / "odd.json", data, [key], part)
    status = cli.main([str(trace), "--json=all"])
    screen = capsys.readouterr()
    assert (status, screen.err) == (0, "") or (status, screen.err.count("\n")) == (2, 1)
    assert status == 2 or strict(screen.out)


def test_a_trace_with_invalid_text_has_a_report(tmp_path, capsys, data):
    trace = put(tmp_path / "odd.json", data, LATE, b"\\ud83d")
    assert cli.main([str(trace), "--all"]) == 0
    screen = capsys.readouterr()
    assert "\ufffd" in screen.out and screen.out.encode() and not screen.err


def test_one_invalid_byte_changes_nothing_else(tmp_path, capsys, data):
    trace = put(tmp_path / "odd.json", data, [b'"deviceProperties"'], b"\xff")
    assert cli.main([str(trace), "--json=all"]) == 0
    assert strict(capsys.readouterr().out)["devices"] == ["\ufffdNVIDIA H200"]


def test_a_kernel_with_an_invalid_byte_in_its_args_keeps_its_launch(tmp_path, data):
    """The correlation and the device are in the same args."""
    events = json.loads(data)
    kernels = [event for event in events["traceEvents"] if event.get("cat") == "kernel"]
    for event in kernels:
        event["args"]["note"] = "XX"
    (tmp_path / "odd.json").write_bytes(json.dumps(events).encode().replace(b'"XX"', b'"\xff"'))
    trace = read(tmp_path / "odd.json")
    assert len(kernels) == sum(one.kind == "kernel" and one.launch is not None for one in trace.work) > 0
    assert all(one.args["note"] == "\ufffd" and one.device == 0 for one in trace.work if one.kind == "kernel")


@pytest.mark.parametrize(
    "part", [NOT_TEXT[0], *(pytest.param(part, marks=pytest.mark.exhaustive) for part in NOT_TEXT[1:])]
)
def test_ranks_with_invalid_text_are_reported(tmp_path, capsys, part):
    keys = (b'"distributedInfo"', b'"Process Group Name', b'"dtype', b'"deviceProperties"')
    paths = [put(tmp_path / path.stem, gzip.decompress(path.read_bytes()), keys, part) for path in RANKS]
    assert cli.main([*map(str, paths), "--json=all"]) == 0
    assert len(strict(capsys.readouterr().out)["ranks"]) == 2
    summary, _ = opened(paths, View())
    _, packed = merged(summary, 10**9)
    assert len(strict(gzip.decompress(packed).decode())["traceEvents"]) > 1000


@pytest.mark.exhaustive
def test_ranks_with_nan_are_merged(tmp_path):
    """NaN is read like Python's json reads it, and written as null."""
    paths = []
    for path in RANKS:
        found = json.loads(gzip.decompress(path.read_bytes()))
        found["traceEvents"].append({"ph": "i", "name": "odd", "pid": 0, "tid": 0, "ts": 10**400, "args": [0]})
        found["traceEvents"].append({"ph": "M", "name": "process_labels", "pid": 9, "args": "CPU"})
        found["traceEvents"].append({"ph": "C", "name": "power", "pid": 0, "args": {"watts": float("nan")}})
        (tmp_path / path.stem).write_text(json.dumps(found))
        paths.append(tmp_path / path.stem)
    summary, _ = opened(paths, View())
    _, packed = merged(summary, 10**9)
    watts = [e["args"]["watts"] for e in strict(gzip.decompress(packed).decode())["traceEvents"] if e["ph"] == "C"]
    assert watts == [None, None]


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", "-1e999"])
def test_json_is_strict_whatever_a_script_stored(tmp_path, capsys, data, number):
    found = json.loads(data)
    found["lesson"]["flags"]["size"] = "XX"
    found["lesson"]["facts"] = {"peak_bytes": "XX"}
    (tmp_path / "odd.json").write_text(json.dumps(found).replace('"XX"', number))
    assert cli.main([str(tmp_path / "odd.json"), "--json=all"]) == 0
    lesson = strict(capsys.readouterr().out)["lesson"]
    assert lesson["flags"]["size"] is None and lesson["facts"]["peak_bytes"] is None


def test_a_prediction_with_a_huge_number_is_dropped(tmp_path, capsys, data):
    found = json.loads(data)
    known = len(found["lesson"]["guesses"])
    found["lesson"]["guesses"].append({"guess": "pointwise_round_trip", "rows": 10**320, "columns": 1, "itemsize": 2})
    (tmp_path / "odd.json").write_text(json.dumps(found))
    assert cli.main([str(tmp_path / "odd.json"), "--json=all"]) == 0
    assert len(strict(capsys.readouterr().out)["predictions"]) == known


def test_a_prediction_that_cannot_be_made_is_dropped_after_any_error():
    def sentence(size):
        raise RecursionError(size)

    @finding(predicts=sentence)
    def grows(summary, size: int):
        raise AssertionError("nobody asks a prediction that was not made")

    assert read_record({"guess": "grows", "size": 3}, {"grows": grows}) is None


def test_predictions_with_odd_values_are_judged_or_dropped():
    """Each kind of prediction gets values that no script stores."""
    values = (10**320, -1, 1e308, "", "\ufffd", [], [10**320], [[10**320, "a"]], {}, None, True)
    summary = summarize(read(TRACE))
    for name, one in cheatsheet.PREDICTABLE.items():
        for value in values:
            made = expect.from_record({"guess": name} | dict.fromkeys(one.signature.parameters, value))
            assert made is None or isinstance(made.ask(summary), Verdict)


def test_values_that_only_lax_json_accepts_are_replaced():
    assert decoded(b'{"a": NaN, "b": [1e999, -Infinity, 2.5], "c": "\\ud800x"}') == {
        "a": None, "b": [None, None, 2.5], "c": "\ufffdx",
    }  # fmt: skip
    assert decoded(b'"\\ud83d\\ude00"') == "\U0001f600"
    assert decoded(b"[" * 100_000 + b"]" * 100_000) is None
    assert decoded("[1, 2, ...") is None
    assert decoded(b"9" * 5000) is None


def report_of(capsys, path):
    """Return what --json prints, without the file's name and warnings, and the warnings."""
    assert cli.main([str(path), "--json=all"]) == 0
    found = strict(capsys.readouterr().out)
    return {key: value for key, value in found.items() if key not in OF_THE_FILE}, found["warnings"]


def with_text(tmp_path, data, text):
    """Write the trace with these bytes as the text of a member and of an argument of each kernel."""
    found = json.loads(data)
    found["traceName"] = "@@"
    for event in found["traceEvents"]:
        if event.get("cat") == "kernel":
            event["args"]["path"] = "@@"
    (tmp_path / "odd.json").write_bytes(json.dumps(found).encode().replace(b"@@", text))
    return tmp_path / "odd.json"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (rb"C:\Users\me\x.json", "unescaped backslashes"), (rb"\data\train.py", "unescaped backslashes"),
        (rb"C:\temp\new\bin\file\run\u12\u00e9\x", "unescaped backslashes"),
        (rb"\\server\share\x", "unescaped backslashes"), (b"C:\\", "unescaped backslashes"),
        (rb"C:\Users\me" + b"\\", "unescaped backslashes"),
        (b"a\x01b\tc\nd", "raw control characters"),
    ],
)  # fmt: skip
def test_text_that_was_not_escaped_changes_no_figure(tmp_path, capsys, data, text, said):
    (tmp_path / "clean.json").write_bytes(data)
    clean, warnings = report_of(capsys, tmp_path / "clean.json")
    odd, more = report_of(capsys, with_text(tmp_path, data, text))
    kernels = sum(one.kind == "kernel" for one in read(TRACE).work)
    assert odd == clean
    assert [one for one in more if one not in warnings] == [f"in the file, {1 + kernels} texts have {said}"]
    stored = next(one for one in read(tmp_path / "odd.json").work if one.kind == "kernel").args["path"]
    assert stored == text.decode()


def test_valid_escapes_stay_beside_unescaped_paths(tmp_path):
    """Only a text with an illegal escape is known to be written without escapes."""
    events = (
        rb'{"ph":"X","cat":"cpu_op","name":"C:\Users\temp","pid":1,"tid":1,"ts":1,"dur":2},'
        rb'{"ph":"X","cat":"cpu_op","name":"a\tb \u00e9 C:\\temp \"q\"","pid":1,"tid":1,"ts":5,"dur":2}'
    )
    (tmp_path / "odd.json").write_bytes(b'{"traceEvents":[' + events + b"]}")
    assert [op.name for op in read(tmp_path / "odd.json").steps[0].walk()] == [
        r"C:\Users\temp", 'a\tb \u00e9 C:\\temp "q"',
    ]  # fmt: skip


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-16-be", "utf-32"])
def test_other_encodings_are_read(tmp_path, capsys, data, encoding):
    (tmp_path / "clean.json").write_bytes(data)
    (tmp_path / "other.json").write_bytes(data.decode().encode(encoding))
    assert report_of(capsys, tmp_path / "other.json") == report_of(capsys, tmp_path / "clean.json")


def test_numbers_in_texts_are_read(tmp_path, capsys, data):
    found = json.loads(data, parse_float=str)  # the digits of the file
    for event in found["traceEvents"]:
        event |= {key: str(event[key]) for key in ("ts", "dur") if key in event}
    (tmp_path / "clean.json").write_bytes(data)
    (tmp_path / "other.json").write_text(json.dumps(found))
    assert report_of(capsys, tmp_path / "other.json") == report_of(capsys, tmp_path / "clean.json")


UNUSABLE = (
    {"dur": -5}, {"dur": None}, {"dur": "long"}, {"dur": True}, {"ts": None}, {"ts": "sNaN"}, {"ts": [1]},
    {"ts": float("nan")}, {"dur": float("inf")}, {"ts": 10**400}, {"ts": 2e16},
    {"ts": 1659999999999100.0, "dur": -1e15},
)  # fmt: skip


@pytest.mark.parametrize("odd", UNUSABLE, ids=str)
def test_events_without_usable_times_are_left_out_and_counted(tmp_path, capsys, data, odd):
    found = json.loads(data)
    (tmp_path / "clean.json").write_bytes(data)
    event = {
        "ph": "X",
        "cat": "python_function",
        "name": "train.py(1): main",
        "pid": 1,
        "tid": 1,
        "ts": 1.0,
        "dur": 2.0,
    }
    found["traceEvents"] = [event | odd, *found["traceEvents"], event | odd]
    (tmp_path / "odd.json").write_text(json.dumps(found))
    clean, warnings = report_of(capsys, tmp_path / "clean.json")
    repaired, more = report_of(capsys, tmp_path / "odd.json")
    assert repaired == clean
    counted = "in the file, 2 events without a usable time stamp and duration are left out"
    assert [one for one in more if one not in warnings] == [counted]


def test_all_defects_are_in_one_sentence(tmp_path, capsys, data):
    found = json.loads(with_text(tmp_path, data, b"@@").read_bytes())
    found["traceEvents"] += [17, {"ph": "X", "cat": "cpu_op", "name": "a", "ts": 1, "dur": -1}]
    odd = json.dumps(found).encode()
    for part in (rb"\Users", b"\x02", b"\xfe"):
        odd = odd.replace(b"@@", part, 1)
    (tmp_path / "odd.json").write_bytes(odd)
    assert report_of(capsys, tmp_path / "odd.json")[1][0] == (
        "in the file, 2 events without a usable time stamp and duration are left out; "
        "1 text has unescaped backslashes; 1 text has raw control characters; "
        "1 place is not valid text (U+FFFD stands for it)"
    )


def test_a_file_of_mostly_unusable_times_is_refused(tmp_path, capsys):
    good = {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 1, "tid": 1, "ts": 1.0, "dur": 2.0}
    for bad, status in ((3, 0), (4, 2)):
        (tmp_path / "odd.json").write_text(json.dumps({"traceEvents": [good] * 3 + [good | {"dur": -1}] * bad}))
        assert cli.main([str(tmp_path / "odd.json")]) == status
    assert capsys.readouterr().err.endswith(
        "4 of its 7 slices have no usable duration or time stamp; the first is 'aten::mm'\n"
    )


@pytest.mark.parametrize(
    "number",
    [
        "1e99999999999999999999",
        "-1e9999999",
        "1e-9999999",
        "9" * 400,
        "9" * 5000,
        "-0",
        "1e-400",
        "true",
        "null",
        "NaN",
    ],
)
@pytest.mark.parametrize("key", ["ts", "dur", "tid", "pid", "id", "correlation", "External id", "stream", "grid"])
def test_numbers_of_any_size_are_read_or_left_out(tmp_path, capsys, data, key, number):
    found = json.loads(data)
    for event in found["traceEvents"][::7]:
        for part in (event, event.get("args", {})):
            if key in part:
                part[key] = "@@"
    (tmp_path / "odd.json").write_text(json.dumps(found).replace('"@@"', number))
    assert cli.main([str(tmp_path / "odd.json"), "--json=all"]) == 0
    screen = capsys.readouterr()
    assert strict(screen.out) and not screen.err
