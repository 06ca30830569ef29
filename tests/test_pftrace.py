"""Perfetto's own format: a file of torch's exporter, files made by hand, and files that are broken."""

import gzip
import itertools
import json
import re
import struct
import sys
import time

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from references import ROOT

from tracereader import cli
from tracereader.trace import pftrace, read
from tracereader.trace.document import json_of

# Of one run, by torch 2.15's exporter: tests/test_pftrace_writer.py writes it again.
WRITTEN = ROOT / "tests/traces/pftrace/linear.pftrace.gz"
SAME_RUN = ROOT / "tests/traces/pftrace/linear.json.gz"
BYTES = gzip.decompress(WRITTEN.read_bytes())


def varint(number):
    number &= (1 << 64) - 1
    found = b""
    while number > 0x7F:
        found += bytes([number & 0x7F | 0x80])
        number >>= 7
    return found + bytes([number])


def field(number, value):
    """Return a field of protobuf: a whole number, a double, or bytes."""
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    if isinstance(value, float):
        return varint(number << 3 | 1) + struct.pack("<d", value)
    value = value.encode() if isinstance(value, str) else value
    return varint(number << 3 | 2) + varint(len(value)) + value


def message(*fields):
    return b"".join(field(number, value) for number, value in fields)


def packet(*fields):
    return field(1, message(*fields))


CATEGORIES, NAMES = ["cpu_op"], ["outer", "first", "second", "third"]
HEAD = packet((8, 1000), (10, 1), (6, message((1, message((1, 6), (2, 10**18))), (1, message((1, 1), (2, 1000))))))
TRACK = packet((60, message((1, 9), (3, message((1, 41), (6, "python")))))) + packet(
    (60, message((1, 2), (5, 9), (4, message((1, 41), (2, 42), (5, "main")))))
)
TABLE = packet(
    (10, 1), (13, 1),
    (12, message(*[(1, message((1, n), (2, name))) for n, name in enumerate(CATEGORIES, 1)],
                 *[(2, message((1, n), (2, name))) for n, name in enumerate(NAMES, 1)])),
)  # fmt: skip


def begin(time, name, *arguments):
    event = message((9, 1), (11, 2), (10, NAMES.index(name) + 1), (3, 1), *[(4, one) for one in arguments])
    return packet((8, time), (10, 1), (13, 2), (11, event))


def end(time):
    return packet((8, time), (10, 1), (11, message((9, 2), (11, 2))))


def slices_of(data):
    """Return the name, start and duration (ns) and arguments of each slice."""
    found = json.loads(pftrace.as_json(data, 10**7))["traceEvents"]
    return [
        (one["name"], round(one["ts"] * 1000), round(one["dur"] * 1000), one["args"]) for one in found
        if one["ph"] == "X"
    ]  # fmt: skip


def test_both_formats_of_one_run_make_the_same_report(tmp_path, capsys):
    data = json.loads(gzip.decompress(SAME_RUN.read_bytes()))
    for key in ("deviceProperties", "lesson"):
        del data[key]
    for event in data["traceEvents"]:
        event.get("args", {}).pop("shared memory", None)
    as_json = tmp_path / "linear.json"
    as_json.write_text(json.dumps(data))
    for flag in ("--all", "--json=all"):
        screens = []
        for file in (as_json, WRITTEN):
            assert cli.main([str(file), flag]) == 0
            screens.append(capsys.readouterr().out.replace(str(file), "FILE").replace(file.name, "FILE"))
        assert screens[0] == screens[1]
        assert "aten::addmm" in screens[0]


def test_the_bytes_and_not_the_name_decide_the_format(tmp_path):
    ops = read(WRITTEN).op_names
    for name, data in (
        ("plain.pftrace", BYTES), ("packed.pftrace.gz", gzip.compress(BYTES)), ("wrong.json", BYTES),
        ("json.pftrace", gzip.decompress(SAME_RUN.read_bytes())), ("spaces.json", b"\n\n  " + json_of(WRITTEN, 10**9)),
    ):  # fmt: skip
        file = tmp_path / name
        file.write_bytes(data)
        assert read(file).op_names == ops


@pytest.mark.parametrize(
    "text", [b"\n{}", b"\n{ }", b'\n{"traceEvents": []}', b"\n[]", b"\n\n\n", b"\nhello", b" {}", b"", b"\n"]
)
def test_no_text_is_taken_for_packets(text):
    assert not pftrace.is_one(text)


def test_the_writers_order_decides_which_begin_an_end_belongs_to():
    """torch writes the begins of a group and then their ends, in the same order; others write in the order of time."""
    wanted = {("outer", 0, 100, 0), ("first", 10, 20, 0), ("second", 30, 10, 0), ("third", 35, 30, 0)}
    groups = [("outer", 0, 100), ("first", 10, 20), ("second", 30, 10), ("third", 35, 30)]
    head = HEAD + TRACK + TABLE
    torchs = b"".join(begin(1000 + start, name) for name, start, _ in groups)
    torchs += b"".join(end(1000 + start + dur) for _, start, dur in groups)
    assert {(name, ts, dur, len(args)) for name, ts, dur, args in slices_of(head + torchs)} == wanted

    nested = [("outer", 0, 100), ("first", 10, 50), ("second", 20, 10)]
    moments = [(start, 1, name) for name, start, _ in nested] + [(start + dur, 0, "") for _, start, dur in nested]
    by_time = b"".join(begin(1000 + at, name) if kind else end(1000 + at) for at, kind, name in sorted(moments))
    assert {(name, ts, dur) for name, ts, dur, _ in slices_of(head + by_time)} == set(nested)


def test_stamps_count_from_the_first_clocks(tmp_path):
    found = json.loads(pftrace.as_json(HEAD + TRACK + TABLE + begin(1500, "outer") + end(2750), 10**6))
    assert found["baseTimeNanoseconds"] == 10**18
    (one,) = [event for event in found["traceEvents"] if event["ph"] == "X"]
    assert (one["ts"], one["dur"], one["pid"], one["tid"], one["cat"]) == (0.5, 1.25, 41, 42, "cpu_op")


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        (message((10, "x"), (4, 7)), 7),
        (message((10, "x"), (4, -7)), -7),
        (message((10, "x"), (3, 2**64 - 1)), 2**64 - 1),
        (message((10, "x"), (2, 1)), True),
        (message((10, "x"), (5, 0.5)), 0.5),
        (message((10, "x"), (5, float("nan"))), None),
        (message((10, "x"), (6, 'a "quoted" \n text')), 'a "quoted" \n text'),
        (message((10, "x"), (6, b"\xff")), "\ufffd"),
        (message((10, "x")), []),
        (message((10, "x"), (12, message((12, message((4, 64))))), (12, b"")), [[64], []]),
        (message((10, "x"), (12, message((6, "a"))), (12, message((6, "")))), ["a", ""]),
        (message((10, "x"), (11, message((10, "y"), (4, 1)))), {"y": 1}),
        (message((1, 77), (4, 7)), None),
    ],
)
def test_arguments_are_the_same_as_in_json(value, wanted):
    ((_, _, _, args),) = slices_of(HEAD + TRACK + TABLE + begin(1500, "outer", value) + end(2000))
    assert args == ({"x": wanted} if value[:1] == field(10, "x")[:1] else {"": 7})


def test_fields_in_another_order_and_unknown_fields_are_accepted():
    event = message((4, message((4, 5), (10, "n"))), (47, b"12345678"), (10, 1), (3, 1), (11, 2), (9, 1), (99, "?"))
    odd = packet((11, event), (998, "what is this"), (13, 2), (10, 1), (8, 1500))
    assert slices_of(HEAD + TRACK + TABLE + odd + end(1600)) == [("outer", 500, 100, {"n": 5})]


def deep(levels):
    value = message((4, 1))
    for _ in range(levels):
        value = message((12, value))
    return message((10, "x"), (12, value))


NAMED = TABLE + packet((10, 1), (12, message((2, message((1, 1), (2, "n" * 100_000))))))
BROKEN = {
    "cut in a packet": (BYTES[:-3], "cut short"),
    "cut between packets": (HEAD + TRACK + TABLE + begin(1500, "outer"), "have no end"),
    "an end without a begin": (HEAD + TRACK + TABLE + end(1500), "did not begin"),
    "an endless number": (HEAD + b"\x0a" + b"\xff" * 1000, "broken"),
    "an endless number in a packet": (HEAD + field(1, b"\x40" + b"\xff" * 1000), "broken"),
    "a huge length": (HEAD + b"\x0a" + varint(2**62) + b"\x40", "cut short"),
    "a huge length in a packet": (HEAD + field(1, b"\x5a" + varint(2**62)), "cut short"),
    "a group": (HEAD + field(1, b"\x43\x44"), "did not write it"),
    "wire type 7": (HEAD + b"\x0f", "broken"),
    "another message": (HEAD + field(2, "x"), "did not write it"),
    "deep lists": (HEAD + TRACK + TABLE + begin(1500, "outer", deep(400)) + end(1600), "broken"),
    "compressed packets": (HEAD + packet((50, b"\x78\x9c")), "compressed"),
    "ends before it begins": (HEAD + TRACK + TABLE + begin(1500, "outer") + end(1400), "no usable duration"),
    "no slices": (HEAD + TRACK + TABLE, "did not write it"),
    "a long name many times": (HEAD + TRACK + NAMED + (begin(1500, "outer") + end(1600)) * 200, "--limit"),
    "text where a number belongs": (HEAD + TRACK + TABLE + packet((8, "x"), (10, "y"), (11, 5)), "did not write it"),
}


@pytest.mark.parametrize("name", BROKEN)
@pytest.mark.parametrize("packed", [False, True])
def test_a_broken_file_gets_one_line_and_status_2(name, packed, tmp_path, capsys):
    data, why = BROKEN[name]
    file = tmp_path / ("broken.pftrace" + ".gz" * packed)
    file.write_bytes(gzip.compress(data) if packed else data)
    assert cli.main([str(file), "--limit", "10000000"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and why in err and file.name in err


def test_without_protobuf_the_command_that_installs_it_is_given(tmp_path, monkeypatch, capsys):
    file = tmp_path / "run.pftrace"
    file.write_bytes(BYTES)
    monkeypatch.setitem(sys.modules, "google.protobuf.message", None)
    pftrace._classes.cache_clear()
    assert cli.main([str(file)]) == 2
    assert re.fullmatch(r".*run\.pftrace: .* this command installs it: .* protobuf\n", capsys.readouterr().err)


def test_wherever_a_file_is_cut_it_is_refused(tmp_path, capsys):
    file = tmp_path / "cut.pftrace"
    for length in itertools.chain(range(60, len(BYTES), 97), (len(BYTES) - 1,)):
        file.write_bytes(BYTES[:length])
        assert cli.main([str(file)]) == 2, length
        assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.exhaustive
@settings(max_examples=1500, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.lists(
        st.tuples(st.integers(0, len(BYTES) - 1), st.binary(max_size=12), st.integers(0, 12)), min_size=1, max_size=8
    )
)
@example([(0, b"", 12)])
def test_no_change_of_its_bytes_breaks_the_reader(changes):
    data = bytearray(BYTES)
    for at, new, dropped in changes:
        data[at : at + dropped] = new
    try:
        found = pftrace.as_json(bytes(data), 10**7)
    except pftrace.Broken as problem:
        assert "\n" not in str(problem)
        return
    assert len(found) < 10**7 + 200
    json.loads(found)


@pytest.mark.exhaustive
@settings(max_examples=1500, deadline=None)
@given(st.binary(max_size=300))
def test_no_bytes_break_the_reader(data):
    for head in (b"", HEAD, HEAD + TRACK + TABLE):
        try:
            json.loads(pftrace.as_json(head + data, 10**7))
        except pftrace.Broken as problem:
            assert "\n" not in str(problem)


def test_many_equal_arguments_take_time_in_proportion():
    """Arguments with the thread of a forward op, and none with a sequence number."""
    names = packet(
        (10, 1), (12, message((1, message((1, 7), (2, "cpu_op"))), (3, message((1, 9), (2, "Fwd thread id")))))
    )

    def seconds(count):
        op = message((9, 1), (11, 5), (3, 7), (10, 1), *[(4, message((1, 9), (4, 1)))] * count)
        ends = packet((8, 1600), (10, 1), (11, message((9, 2), (11, 5))))
        before = time.process_time()
        pftrace.as_json(HEAD + TRACK + TABLE + names + packet((8, 1500), (10, 1), (11, op)) + ends, 10**9)
        return time.process_time() - before

    assert seconds(32_000) < 20 * max(0.05, seconds(4_000))  # 64 times as long, if it were quadratic
