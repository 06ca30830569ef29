"""The phases that a kernel recorded of itself: figures from raw events, the section, JSON and the page."""

import gzip
import json
import re
from statistics import median

import pytest
from raw_events import end, event
from references import H200
from test_page import page_of, unpacked

from tracereader import cli
from tracereader.figures import summarize
from tracereader.trace import read

PERSISTENT = H200 / "05_llm/1x512_bf16_warm_eager_persistent-inside.json.gz"
PLAIN = H200 / "03_simple_mlp/64x128x768x3072_bf16_warm_eager_shapes.json.gz"


def shown(capsys, *flags):
    assert cli.main([str(flag) for flag in flags]) == 0
    return capsys.readouterr().out


def document_of(path):
    return json.loads(gzip.decompress(path.read_bytes()))


def raw_slices(document):
    return [one for one in document["traceEvents"] if one.get("cat") == "inside_kernel"]


@pytest.fixture
def made(tmp_path):
    """made(events) -> a trace of one step that holds these slices, too."""

    def written(*events):
        step = [event("ProfilerStep#1", "user_annotation", 0.0, 1000.0), event("aten::mm", "cpu_op", 1.0, 5.0)]
        path = tmp_path / "made.json"
        path.write_text(json.dumps({"traceEvents": [*step, *events]}))
        return path

    return written


def kernel(name, ts, dur, stream=7, grid=(8, 2, 1)):
    return event(name, "kernel", ts, dur, tid=stream, device=0, stream=stream, grid=list(grid))


def phase(name, ts, dur, lane=0, process=1_000_000):
    return event(name, "inside_kernel", ts, dur, tid=lane) | {"pid": process}


def test_the_figures_are_those_of_the_raw_events(capsys):
    document = document_of(PERSISTENT)
    slices = raw_slices(document)
    lanes = {(one["pid"], one["tid"]) for one in slices}
    durations = {}
    for one in slices:
        waits, name = re.fullmatch(r"(wait: )?(\w+?)(?: \d+)?", one["name"]).groups()
        durations.setdefault(name, ([], []))[waits is None].append(one["dur"])
    (found,) = json.loads(shown(capsys, PERSISTENT, "--json=all"))["inside"]
    assert {one["name"]: (one["waits"], one["works"]) for one in found["phases"]} == {
        name: (len(waits), len(works)) for name, (waits, works) in durations.items()
    }
    for one in found["phases"]:
        waits, works = durations[one["name"]]
        expected = {
            "waiting_us": sum(waits), "working_us": sum(works),
            "waiting_per_block_us": sum(waits) / len(lanes), "working_per_block_us": sum(works) / len(lanes),
            "median_wait_us": median(waits), "median_work_us": median(works),
        }  # fmt: skip
        assert {name: one[name] for name in expected} == pytest.approx(expected, abs=2e-3)
    last = max((one for one in document["traceEvents"] if one.get("cat") == "kernel"), key=end)
    assert (found["kernel"], found["launches"], found["steps"]) == (last["name"], 1, ["ProfilerStep#4"])
    assert (found["lanes"], found["blocks"]) == (len(lanes), last["args"]["grid"][0])
    waiting = sum(sum(waits) for waits, _ in durations.values())
    assert found["waiting_share"] == pytest.approx(waiting / sum(one["dur"] for one in slices), abs=1e-4)
    totals = [one["waiting_us"] + one["working_us"] for one in found["phases"]]
    assert totals == sorted(totals, reverse=True)


def test_the_section_says_how_many_blocks_recorded_and_how_long_they_wait(capsys):
    screen = shown(capsys, PERSISTENT, "--only", "inside")
    slices = raw_slices(document_of(PERSISTENT))
    share = sum(one["dur"] for one in slices if one["name"].startswith("wait")) / sum(one["dur"] for one in slices)
    sentence = (
        f"4 of 120 blocks of decode_step recorded their phases in #4: {share:.0%} of the recorded time is waiting."
    )
    assert sentence in screen
    head = [one["dur"] for one in slices if one["name"] == "head"]
    (row,) = (line.split() for line in screen.splitlines() if line.startswith("head "))
    assert (row[1], row[3], row[5]) == ("4", f"{median(head):.1f}", f"{sum(head) / 4:.1f}")
    assert "recorded their phases" in shown(capsys, PERSISTENT), "the usual report shows the section"


def test_the_table_fits_80_columns(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    lines = shown(capsys, PERSISTENT, "--only", "inside").splitlines()
    assert all(len(line) <= 80 for line in lines)
    assert sum(bool(re.match(r"(attend|qkv|gate_up|o|down|head) +\d+ ", line)) for line in lines) == 6


def test_a_trace_without_recorded_phases_has_no_such_section(capsys):
    assert "inside" not in json.loads(shown(capsys, PLAIN, "--json=all"))
    assert "inside: not in this trace" in shown(capsys, PLAIN, "--only", "inside")
    assert "recorded their phases" not in shown(capsys, PLAIN)


def test_phases_are_neither_gpu_work_nor_cpu_work(capsys, tmp_path):
    """Every other figure is the same without the lanes."""
    document = document_of(PERSISTENT)
    lanes = {one["pid"] for one in raw_slices(document)}
    document["traceEvents"] = [one for one in document["traceEvents"] if one.get("pid") not in lanes]
    bare = tmp_path / PERSISTENT.name.removesuffix(".gz")
    bare.write_text(json.dumps(document))
    with_lanes, without = (json.loads(shown(capsys, path, "--json=all")) for path in (PERSISTENT, bare))
    assert with_lanes.pop("inside")
    for one in (with_lanes, without):
        del one["trace"]
    assert with_lanes == without


def test_a_kernel_that_runs_meanwhile_does_not_take_the_phases(made):
    """The phases belong to the kernel in which the first one begins. The last one may end after that kernel."""
    path = made(
        kernel("decode", 100.0, 50.0),
        kernel("other", 110.0, 5.0, stream=8),
        kernel("other", 150.5, 5.0, stream=8),
        phase("wait: load 0", 100.0, 20.0),
        phase("load 0", 120.0, 31.0),
        phase("load 1", 151.0, 1.0),
        phase("load 0", 101.0, 4.0, lane=1),
    )
    (found,) = summarize(read(path)).inside
    (load,) = found.phases
    assert (found.kernel, found.launches, found.lanes, found.blocks, found.steps) == ("decode", 1, 2, 16, [])
    assert (load.name, load.waits, load.works, load.waiting_us, load.working_us) == ("load", 1, 3, 20.0, 36.0)
    assert (load.waiting_per_block_us, load.working_per_block_us) == (10.0, 18.0)


def test_several_launches_of_a_kernel_are_counted(made, capsys):
    path = made(
        kernel("decode", 100.0, 50.0),
        kernel("decode", 200.0, 50.0),
        phase("wait", 100.0, 10.0),
        phase("work", 110.0, 30.0),
        phase("wait", 200.0, 20.0),
        phase("work", 220.0, 20.0),
    )
    (found,) = summarize(read(path)).inside
    assert (found.launches, found.lanes) == (2, 1)
    assert [(one.name, one.waiting_per_block_us, one.working_per_block_us) for one in found.phases] == [
        ("work", 0.0, 25.0), ("wait", 15.0, 0.0),
    ]  # fmt: skip
    screen = shown(capsys, path, "--only", "inside")
    recorded = "1 of 16 blocks of decode recorded their phases in 2 launches"
    assert f"{recorded}: 38% of the recorded time is waiting." in screen


def test_lanes_outside_any_kernel_are_left_out(made):
    assert summarize(read(made(kernel("decode", 100.0, 50.0), phase("load", 10.0, 5.0)))).inside == ()
    (found,) = summarize(read(made(kernel("decode", 100.0, 50.0, grid=()), phase("load", 100.0, 0.0)))).inside
    assert found.waiting_share is None, "no time was recorded"


def test_a_long_table_shows_the_longest_phases_and_one_row_for_the_rest(made, capsys):
    names = "abcdefghijkl"
    path = made(
        kernel("decode", 100.0, 900.0),
        *(phase(name, 100.0 + 20 * place, 1.0 + place) for place, name in enumerate(names)),
    )
    screen = shown(capsys, path, "--only", "inside")
    assert re.search(r"^4 others +0\.0 +10\.0 +13%$", screen, re.M)
    assert not re.search("^d ", screen, re.M) and re.search("^e ", screen, re.M)
    assert re.search("^d ", shown(capsys, path, "--all"), re.M)


def test_the_page_draws_the_lanes_apart_from_threads_and_streams(tmp_path):
    slices = raw_slices(document_of(PERSISTENT))
    found, columns = unpacked(page_of(tmp_path, PERSISTENT))
    drawn, place = [], 0
    for track in found["tracks"]:
        own = range(place, place + track["slices"])
        place += track["slices"]
        if track["group"] == "inside":
            drawn += [(found["names"][columns["name"][one]], found["kinds"][columns["kind"][one]]) for one in own]
    assert sum(track["group"] == "inside" for track in found["tracks"]) == len({one["tid"] for one in slices})
    assert sorted(drawn) == sorted(
        (one["name"], "inside_wait" if one["name"].startswith("wait: ") else "inside") for one in slices
    )


@pytest.mark.parametrize(("blocks", "named"), [(120, True), (132, True), (66, True), (65, False), (133, False)])
def test_a_step_of_one_kernel_with_a_block_on_most_multiprocessors_is_named(capsys, tmp_path, blocks, named):
    document = document_of(PERSISTENT)
    (properties,) = document["deviceProperties"]
    kernels = [one for one in document["traceEvents"] if one.get("cat") == "kernel"]
    assert {(one["name"], *one["args"]["grid"]) for one in kernels} == {("decode_step", 120, 1, 1)}
    assert properties["numSms"] == 132
    for one in kernels:
        one["args"]["grid"] = [blocks, 1, 1]
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(document))
    sentence = f"all of its work is one persistent kernel: decode_step, with {blocks} blocks on 132 multiprocessors"
    assert (sentence in " ".join(shown(capsys, path).split())) == named


def test_a_step_of_one_known_kernel_is_not_called_persistent(capsys):
    one_known_kernel = H200 / "01_matmul_add/4096_bf16_warm_eager_addmm.json.gz"
    assert "persistent" not in shown(capsys, one_known_kernel)
