"""read-trace reads traces of every kind, and refuses other files with one line, status 2 and no traceback."""

import copy
import gzip
import json
import os
import pickle
import re
import shutil
import subprocess
import sys

import pytest
import references
from hypothesis import given, settings
from hypothesis import strategies as st
from references import H200, REFERENCES, ROOT

from tracereader import cli, expect
from tracereader.figures import summarize
from tracereader.findings import cheatsheet
from tracereader.findings.finding import Verdict
from tracereader.trace import foreign, read

SMALL = H200 / "02_linear/1024x32x64_bf16_cold_eager.json.gz"


@pytest.fixture(scope="module")
def document():
    return json.loads(gzip.decompress(SMALL.read_bytes()))


def event(name="aten::mm", cat="cpu_op", ts=1.0, dur=2.0, tid=1, **rest):
    return {"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": tid, "ts": ts, "dur": dur, "args": {}, **rest}


def written(tmp_path, events, **top):
    file = tmp_path / "made.json"
    file.write_text(json.dumps({"traceEvents": events, **top}))
    return file


# What is refused.

BAD_FILES = {
    "text": b"just some text",
    "empty file": b"",
    "binary": bytes(range(256)),
    "truncated JSON": b'{"traceEvents": [{"ph": "X"',
    "truncated gzip": gzip.compress(b'{"traceEvents": []}' * 1000)[:40],
    "gzip of text": gzip.compress(b"just some text"),
    "no trace": b'{"a": 1}',
    "a number": b"3",
    "a list": b'[{"ph": "X", "name": "a", "ts": 1, "dur": 1}]',
    "traceEvents is no list": b'{"traceEvents": {}}',
    "empty trace": b'{"traceEvents": []}',
    "one event": json.dumps({"traceEvents": [event()]}).encode(),
    "events are no objects": b'{"traceEvents": [1, 2]}',
    "no dur": json.dumps({"traceEvents": [{k: v for k, v in event().items() if k != "dur"}] * 2}).encode(),
    "texts as time stamps": json.dumps({"traceEvents": [event(ts="soon"), event(ts="later")]}).encode(),
    "NaN": json.dumps({"traceEvents": [event(ts=float("nan")), event()]}).encode(),
    "negative duration": json.dumps({"traceEvents": [event(dur=-1), event()]}).encode(),
    "all zeroed": json.dumps({"traceEvents": [event(ts=0, dur=0), event(ts=0, dur=0)]}).encode(),
    "another program": json.dumps({"traceEvents": [event("Layout", cat="blink"), event("Paint", cat="cc")]}).encode(),
    "deep nesting": b'{"traceEvents": ' + b"[" * 200_000 + b"]" * 200_000 + b"}",
}


def measured(file):
    return references.measured(file) if file.is_relative_to(ROOT) else summarize(read(file))


def refused(capsys, *arguments):
    status = cli.main([str(argument) for argument in arguments])
    screen = capsys.readouterr()
    assert status == 2
    assert screen.err.count("\n") == 1, screen.err
    assert screen.out == ""
    return screen.err


def test_a_refusal_names_the_kind_of_file(tmp_path, capsys):
    for name, content in (("empty.json", ""), ("run.json", "{}"), ("run.txt", "run 1\n-----")):
        (tmp_path / name).write_text(content)
    assert "the file is empty" in refused(capsys, tmp_path / "empty.json")
    assert f"the trace is the .json beside it, {tmp_path / 'run.json'}" in refused(capsys, tmp_path / "run.txt")


XSPACE = b"\x0a\xb0\x20\x08\x01\x12\x0d/device:GPU:0"
TABLE = (
    b"-------  ------------  ------------\n   Name    Self CPU %      Self CPU\n-------  ------------  ------------\n"
)
# By name, the first bytes of a file of another kind, and words of the sentence on it.
OTHERS = {
    "pointer.json": (b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\n", "git lfs pull"),
    "pointer.json.gz": (b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\n", "git lfs pull"),
    "page.json": (b"\r\n<!DOCTYPE html>\n<html>", "an HTML page"),
    "page.json.gz": (gzip.compress(b"<html><head>"), "an HTML page"),
    "error.json": (b'<?xml version="1.0"?><Error><Code>NoSuchKey</Code></Error>', "an XML document"),
    "traces.tar": (b"a.json".ljust(257, b"\0") + b"ustar", "tar -xf"),
    "traces.tar.gz": (gzip.compress(b"a.json".ljust(257, b"\0") + b"ustar"), "tar -xf"),
    "traces.zip": (b"PK\x03\x04 a.json", "unzip"),
    "model.pt": (b"PK\x03\x04\0\0archive/data.pkl", "torch.save"),
    "report.nsys-rep": (b"anything", "nsys-ui"), "report.qdrep": (b"anything", "nsys-ui"),
    "report.sqlite": (b"SQLite format 3\0", "SQLite"),
    "report.json": (b'{"data": ["a"]}\n{"Type": 80, "CudaEvent": {"startNs": "1"}}', "nsys"),
    "report.ncu-rep": (b"NVR\0", "ncu --import"), "report.bin": (b"NVR\0", "ncu --import"),
    "host.xplane.pb": (XSPACE, "TensorBoard"), "host.pb": (XSPACE, "TensorBoard"),
    "snapshot.pickle": (pickle.dumps({"segments": [], "device_traces": []}), "memory_viz"),
    "older.pickle": (pickle.dumps({"segments": [], "device_traces": []}, protocol=2), "memory_viz"),
    "other.pickle": (pickle.dumps([1, 2]), "pickle"),
    "timeline.html": (b'<html>\n<head><meta charset="utf-8" /><title>GPU Memory Timeline HTML', "memory timeline"),
    "timeline.json": (b"[[1, 2], [[0, 1], [3, 4]]]", "export_memory_timeline"),
    "raw.json.gz": (gzip.compress(b'[[-1, "PREEXISTING", 3, 4], [1, "CREATE", 3, 4]]'), "export_memory_timeline"),
    "table.txt": (TABLE, "profiler's table"), "table_of_a_script.txt": (b"run 7a\n" + TABLE, "profiler's table"),
    "stacks.txt": (b"a.py(1): f;b.py(2): g 120\n", "export_stacks"),
    "et.json": (b'{"schema": "1.1.1-chakra.0.0.4", "pid": 1, "nodes": []}', "ExecutionTraceObserver"),
    "npu.json": (
        b'[{"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "Ascend Hardware"}},'
        b' {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 2, "tid": 1, "ts": "1", "dur": "2"}]', "MindStudio",
    ),
    "cut.json": (b'{"traceEvents": [{"ph": "X", "name": "a"},', "cut short"),
    "cut_on_windows.json": (rb'{"traceName": "C:\Users", "traceEvents": [{"ph": "X", "name": "a"', "cut short"),
    "cut_in_a_path.json": (rb'{"traceEvents": [{"ph": "X", "name": "C:\Users\me', "cut short"),
    "spaces.json": (b" \n ", "the file is empty"),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_a_file_of_another_kind_is_named(tmp_path, capsys, name):
    content, says = OTHERS[name]
    (tmp_path / name).write_bytes(content)
    said = refused(capsys, tmp_path / name)
    assert said.startswith(f"read-trace: {tmp_path / name}: ") and says in said and "the trace is the" not in said
    if says not in ("cut short", "MindStudio"):
        trace = tmp_path / f"{name.removesuffix('.gz').rpartition('.')[0]}.pt.trace.json.gz"
        trace.write_bytes(SMALL.read_bytes())
        assert f"the trace is the .pt.trace.json.gz beside it, {trace}" in refused(capsys, tmp_path / name)


def test_a_folder_without_traces_names_a_file_that_it_knows(tmp_path, capsys):
    (tmp_path / "notes.md").write_text("notes")
    (tmp_path / "report.nsys-rep").write_bytes(b"anything")
    said = refused(capsys, tmp_path)
    assert "there is no trace in this folder" in said and "report.nsys-rep is a report of Nsight Systems" in said


@pytest.mark.parametrize("path", sorted(ROOT.glob("tests/traces/**/*.gz")), ids=lambda path: path.name)
def test_no_trace_is_taken_for_another_kind_of_file(path):
    head = gzip.decompress(path.read_bytes())[: foreign.HEAD]
    assert foreign.binary(path, head) is None and foreign.text(path, head) is None


@pytest.mark.parametrize("kind", BAD_FILES)
def test_a_file_that_is_no_trace_is_refused_in_one_line(tmp_path, capsys, kind):
    file = tmp_path / "file.json"
    file.write_bytes(BAD_FILES[kind])
    assert str(file) in refused(capsys, file)


def test_missing_file_folder_and_device(tmp_path, capsys):
    assert "no such file" in refused(capsys, tmp_path / "none.json")
    assert "there is no trace in this folder" in (said := refused(capsys, tmp_path)) and "--ranks" not in said
    (tmp_path / "node0").mkdir()
    (tmp_path / "node0" / "rank0.json").write_text("{}")
    assert "its folders have some: name these, with --ranks if they are of one job" in refused(capsys, tmp_path)
    assert "not a regular file" in refused(capsys, "/dev/null")
    assert "--json takes one" in refused(capsys, "--json", SMALL, SMALL)


def test_an_empty_trace_of_the_profiler(tmp_path, capsys):
    span = {"ph": "X", "cat": "Trace", "name": "PyTorch Profiler (0)", "pid": "Spans", "tid": 1, "ts": 5, "dur": 9}
    file = tmp_path / "empty.json"
    file.write_text(json.dumps({"schemaVersion": 1, "traceEvents": [span]}))
    assert "PyTorch's profiler recorded no op" in refused(capsys, file)
    span["name"] = "somebody else's"
    file.write_text(json.dumps({"traceEvents": [span]}))
    assert "PyTorch's profiler did not write it" in refused(capsys, file)


def test_one_bad_file_among_several(tmp_path, capsys):
    refused(capsys, SMALL, tmp_path / "none.json")


@pytest.mark.exhaustive
def test_a_gzip_bomb_is_refused_before_it_fills_memory(tmp_path):
    bomb = tmp_path / "bomb.json.gz"
    with gzip.open(bomb, "wb", compresslevel=9) as file:
        for _ in range(240):
            file.write(bytes(1 << 20))
    program = (
        "import resource, sys; from tracereader.cli import entry\n"
        "resource.setrlimit(resource.RLIMIT_AS, (200 << 20, 200 << 20))\n"
        "sys.exit(entry())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(bomb), "--limit", "250000000"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert "more than 250000000 bytes" in done.stderr


def test_limit_counts_plain_files_too(tmp_path, capsys):
    assert "more than 10 bytes" in refused(capsys, SMALL, "--limit", 10)
    plain = tmp_path / "plain.json"
    plain.write_bytes(gzip.decompress(SMALL.read_bytes()))
    assert "more than 10 bytes" in refused(capsys, plain, "--limit", 10)


# Anything else is either explained or refused: never a traceback.

VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8), st.just([]), st.just({}),
    st.just([1, "x"]), st.just({"a": 1}), st.just(10**30), st.just("kernel"), st.just("cpu_op"),
    st.just("user_annotation"), st.just("cuda_runtime"), st.just("ProfilerStep#2"), st.just([[2, 3], "x", [4]]),
)  # fmt: skip
EVENT_KEYS = st.sampled_from(["ph", "cat", "name", "pid", "tid", "ts", "dur", "args", "id"])
ARG_KEYS = st.sampled_from(
    ["correlation", "External id", "device", "stream", "bytes", "grid", "block", "registers per thread",
     "shared memory", "Input Dims", "Input type", "Input Strides", "Concrete Inputs"]
)  # fmt: skip
MUTATIONS = st.lists(
    st.tuples(st.sampled_from(["set", "delete", "drop", "repeat", "arg", "top", "inside", "shift"]),
              st.integers(0, 10**6), EVENT_KEYS, ARG_KEYS, VALUES),
    min_size=1, max_size=6,
)  # fmt: skip
SOURCES = [
    SMALL,
    H200 / "01_matmul_add/64_bf16_cold_eager_wait0_schedwarmup0.json.gz",
    H200 / "01_matmul_add/4096_bf16_warm_compile_reduce-overhead.json.gz",
    H200 / "03_simple_mlp/64x128x768x3072_bf16_warm_eager_shapes.json.gz",
]
DOCUMENTS = [json.loads(gzip.decompress(file.read_bytes())) for file in SOURCES]


def mutate(document, mutations):
    events = document["traceEvents"]
    for what, where, key, arg, value in mutations:
        if not events:
            break
        index = where % len(events)
        chosen = events[index]
        if what == "set":
            chosen[key] = value
        elif what == "delete":
            chosen.pop(key, None)
        elif what == "drop":
            del events[index : index + 1 + where % 40]
        elif what == "repeat":
            events.insert(index, copy.deepcopy(chosen))
        elif what == "arg":
            if isinstance(chosen.get("args"), dict):
                chosen["args"][arg] = value
        elif what == "shift":
            if isinstance(chosen.get("ts"), float):
                chosen["ts"] += where % 500 - 250
        elif what == "inside":
            held = document["lesson"] if where % 2 else document["deviceProperties"]
            held = held[0] if isinstance(held, list) and held else held
            if isinstance(held, dict) and held:
                held[sorted(held)[where // 2 % len(held)]] = value
        else:
            document[["deviceProperties", "lesson", "traceEvents", "schemaVersion"][where % 4]] = value
            if not isinstance(document["traceEvents"], list):
                break


# The same ones in each run, and others with FUZZ=20000; what fails is shrunk, and printed with what makes it again.
FUZZ = int(os.environ.get("FUZZ", "0"))


@pytest.mark.parametrize("examples", [50, pytest.param(FUZZ or 400, marks=pytest.mark.exhaustive)])
def test_a_mutated_trace_is_explained_or_refused(tmp_path, capsys, examples):
    file = tmp_path / "mutated.json"

    @settings(max_examples=examples, derandomize=not FUZZ, deadline=None, database=None, print_blob=True)
    @given(
        source=st.integers(0, len(DOCUMENTS) - 1),
        mutations=MUTATIONS,
        flag=st.sampled_from(["", "--json", "--json=all", "twice"]),
    )
    def is_explained_or_refused(source, mutations, flag):
        document = copy.deepcopy(DOCUMENTS[source])
        mutate(document, mutations)
        file.write_text(json.dumps(document))
        arguments = {"": [file], "twice": [SMALL, file]}.get(flag, [file, flag])
        status = cli.main([str(argument) for argument in arguments])
        screen = capsys.readouterr()
        assert status in (0, 2)
        if status == 2:
            assert screen.err.count("\n") == 1 and screen.out == ""
        else:
            assert screen.err == "" and screen.out

    is_explained_or_refused()


# Traces of other kinds.


def test_a_trace_without_steps_is_one_step(tmp_path, capsys):
    file = written(tmp_path, [event("aten::mm", ts=10, dur=5), event("aten::add", ts=16, dur=4)])
    ours = read(file)
    assert [step.name for step in ours.steps] == ["whole trace"]
    assert ours.steps[0].us == 10
    assert cli.main([str(file)]) == 0
    assert "no profiler steps" in capsys.readouterr().out


def test_older_category_names(tmp_path):
    file = written(
        tmp_path,
        [
            event("aten::mm", cat="Operator", ts=10, dur=9),
            event("cudaLaunchKernel", cat="Runtime", ts=12, dur=2, args={"correlation": 7}),
            event("volta_sgemm_128x64_nn", cat="Kernel", ts=20, dur=5, tid="stream 7", args={"correlation": 7}),
            event("Memcpy DtoH (Device -> Pageable)", cat="Memcpy", ts=26, dur=1, tid="stream 7", args={}),
        ],
    )
    ours = read(file)
    assert [one.asked_by for one in summarize(ours).gpu_work] == ["aten::mm", ""]
    assert sum(one.launch is None for one in ours.work) == 1


def test_rocm_names(tmp_path, capsys):
    file = written(
        tmp_path,
        [
            event("aten::mm", ts=10, dur=9),
            event("hipExtModuleLaunchKernel", cat="cuda_runtime", ts=12, dur=2, args={"correlation": 7}),
            event("Cijk_Ailk_Bljk_BBS_BH_MT128x128x32", cat="kernel", ts=20, dur=5, tid=9, args={"correlation": 7}),
        ],
    )
    (row,) = measured(file).gpu_work
    assert (row.asked_by, row.launched_by, row.family) == ("aten::mm", "hipExtModuleLaunchKernel", "GEMM")


def test_streams_and_gpus_are_united_not_added(tmp_path):
    def on(device, stream, ts, dur, correlation):
        return event("k", cat="kernel", ts=ts, dur=dur, tid=stream, pid=device,
                     args={"device": device, "stream": stream, "correlation": correlation})  # fmt: skip

    calls = [event("cudaLaunchKernel", cat="cuda_runtime", ts=n, dur=0.5, args={"correlation": n}) for n in range(1, 4)]
    kernels = [on(0, 7, 10, 10, 1), on(0, 8, 15, 10, 2), on(1, 7, 12, 4, 3)]
    file = written(tmp_path, [event("aten::mm", ts=0.5, dur=9), *calls, *kernels])
    trace = read(file)
    assert summarize(trace).gpu.busy_us == 15  # two streams of GPU 0: 10 to 25; GPU 1 was less busy
    assert len(trace.devices) == 2


def test_work_launched_from_another_thread_belongs_to_the_step(tmp_path):
    file = written(
        tmp_path,
        [
            event("ProfilerStep#0", cat="user_annotation", ts=10, dur=100),
            event("aten::mm_backward", ts=30, dur=20, tid=2),
            event("cudaLaunchKernel", cat="cuda_runtime", ts=35, dur=2, tid=2, args={"correlation": 7}),
            event("k", cat="kernel", ts=150, dur=5, tid=9, args={"correlation": 7, "device": 0}),
            event("ProfilerStep#1", cat="user_annotation", ts=120, dur=50),
        ],
    )
    ours = read(file)
    assert [len(step.work) for step in ours.steps] == [1, 0]
    assert [one.asked_by for one in summarize(ours, ours.steps[0]).gpu_work] == ["aten::mm_backward"]


def test_slices_that_cross_are_no_defect(tmp_path, capsys):
    slices = [event("outer", ts=10, dur=10), event("crosses", ts=15, dur=10), event("in", ts=11, dur=2)]
    file = written(tmp_path, slices)
    assert cli.main([str(file)]) == 0
    assert "overlap" not in capsys.readouterr().out, "they change no figure, and present versions of Perfetto show them"


def test_zeroed_events_are_counted(document, tmp_path, capsys):
    changed = copy.deepcopy(document)
    for one in [one for one in changed["traceEvents"] if one["ph"] == "X"][-5:]:
        one["ts"] = one["dur"] = 0
    file = written(tmp_path, changed["traceEvents"])
    assert cli.main([str(file)]) == 0
    assert "pytorch issue 188481" in capsys.readouterr().out


def test_stacks_do_not_hide_the_steps(tmp_path):
    file = written(
        tmp_path,
        [
            event("main.py(1): main", cat="python_function", ts=1, dur=500),
            event("ProfilerStep#0", cat="user_annotation", ts=10, dur=100),
            event("label", cat="user_annotation", ts=12, dur=90),
            event("main.py(7): fn", cat="python_function", ts=14, dur=80),
            event("aten::mm", ts=20, dur=50),
            # The frame that ends the label outlasts it: nothing crosses in that.
            event("record_function.__exit__", cat="python_function", ts=95, dur=10),
        ],
    )
    ours = measured(file)
    assert ours.steps[0].label_to_first_op_us == 8
    assert {name: op.calls for name, op in ours.cpu.ops.items()} == {"aten::mm": 1}
    assert not ours.source.warnings


@pytest.mark.parametrize("base", [0.0, 5e12, 1.7e15])
def test_stamps_are_exact_to_the_nanosecond(tmp_path, base):
    """Stamps since 1970 have more digits than a double."""
    whole = int(base)
    text = ", ".join(
        '{"ph": "X", "cat": "cpu_op", "name": "op", "pid": 1, "tid": 1, '
        f'"ts": {whole + 10 * n + 1}.{(n * 37) % 1000:03}, "dur": 0.{1 + n % 999:03}}}'
        for n in range(2000)
    )
    file = tmp_path / "exact.json"
    file.write_text('{"traceEvents": [' + text + "]}")
    ours = read(file)
    roots = ours.steps[0].roots
    starts = [(whole + 10 * n + 1) * 1000 + (n * 37) % 1000 for n in range(2000)]
    assert [ours.zero_us * 1000 + op.start for op in roots] == starts
    assert [op.dur for op in roots] == [1 + n % 999 for n in range(2000)]


def test_traces_outside_the_typed_schema_are_still_read(tmp_path):
    """json accepts NaN in args and a number as a name, and neither matters."""
    good = [event("aten::mm", ts=10.125, dur=5), event("aten::add", ts=16, dur=4, args={"x": float("nan")})]
    file = written(tmp_path, [*good, event(7, ts=30, dur=1), {"ph": "M", "name": None, "ts": "soon"}])
    ours = measured(file)
    assert set(ours.cpu.ops) == {"aten::mm", "aten::add", "7"}
    assert ours.cpu.ops["aten::mm"].total_us == 5


def test_a_fifo_is_refused(tmp_path, capsys):
    os.mkfifo(tmp_path / "pipe.json")
    assert "not a regular file" in refused(capsys, tmp_path / "pipe.json")


HOSTILE = "a\x1b[31m\x00\n\u202eb:train:[/][bold]"


def test_names_do_not_control_the_terminal(tmp_path, capsys):
    """A trace is foreign text: its control characters, markup and emoji codes are printed and not interpreted."""
    events = [
        event("ProfilerStep#0", cat="user_annotation", ts=1, dur=100),
        event(HOSTILE, cat="user_annotation", ts=2, dur=90),
        event("aten::mm" + HOSTILE, ts=10, dur=15),
        event("cudaLaunchKernel" + HOSTILE, cat="cuda_runtime", ts=13, dur=2, args={"correlation": 7}),
        event("gemm" + HOSTILE, cat="kernel", ts=20, dur=5, tid=9, args={"correlation": 7, "device": 0}),
        event(HOSTILE, cat="overhead", ts=20, dur=5, tid=11),
    ]
    file = written(
        tmp_path, events, deviceProperties=[{"id": 0, "name": HOSTILE}],
        lesson={"script": HOSTILE, "flags": {}, "guesses": [{"guess": "dispatches", "parent": HOSTILE, "child": "b"}]},
    )  # fmt: skip
    named = tmp_path / f"x{HOSTILE.replace('/', '').replace(chr(0), '')}.json"
    file.rename(named)
    for arguments in ([named, "--lanes"], [named, named]):
        assert cli.main([str(argument) for argument in arguments]) == 0
        screen = capsys.readouterr()
        assert all(one.isprintable() for line in (screen.out + screen.err).split("\n") for one in line)
        assert ":train:[/][bold]" in screen.out.replace("\n", "")
    named.write_text("no trace")
    assert all(one.isprintable() for one in refused(capsys, named).rstrip("\n"))


# The program itself.


def test_reading_imports_no_torch():
    program = (
        "import sys; from tracereader.cli import main\n"
        "assert main(sys.argv[1:]) == 0\n"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules and 'common' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program, str(SMALL)], cwd=ROOT, check=True, capture_output=True)


def test_python_m_tracereader_is_the_command():
    done = subprocess.run([sys.executable, "-m", "tracereader", "--help"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and "read-trace EAGER.json COMPILED.json" in done.stdout


def test_a_closed_pipe_is_not_a_failure():
    command = f"{sys.executable} -m tracereader {SMALL} | head -c 10"
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True)
    assert done.stderr == ""


def test_json_has_the_reports_figures(capsys):
    assert cli.main([str(SMALL), "--json=all"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [step["name"] for step in found["steps"]] == ["ProfilerStep#2", "ProfilerStep#3", "ProfilerStep#4"]
    assert found["gpu_work"][0]["family"] == "GEMM"
    assert json.loads(json.dumps(found)) == found


def test_jsons_names_do_not_follow_the_summarys_parts(capsys):
    """Programs rely on these names at the top of the document, independently of the Summary's parts."""
    assert cli.main([str(SMALL), "--json=all"]) == 0
    found = json.loads(capsys.readouterr().out)
    ours = summarize(read(SMALL))
    assert found["version"] == 3
    assert {"window_us", "waits_for", "gpu", "families", "steps", "training", "repeats"} <= found.keys()
    assert (found["trace"], found["devices"], found["has_steps"]) == (str(SMALL), ours.source.devices, True)
    assert [call["name"] for call in found["chain"]] == [call.name for call in ours.cpu.chain]
    assert found["ops"].keys() == ours.cpu.ops.keys() and found["cpu_work"] == [] == found["by_module"]
    for name in ("label", "inputs", "runtime", "outside_ops", "op_threads", "unfused", "hidden_copies", "mask_made",
                 "cast_products", "decoding", "same_in_all_steps", "compiled_graphs",
                 "graphs_of_steps", "cache_lookups", "recompiled", "buffer_requests", "final_sync_us",
                 "by_label", "by_phase", "by_module_class", "rank", "world_size", "peak_bytes"):  # fmt: skip
        assert name in found, name
    assert not {"source", "cpu", "places", "attention", "llm", "compiled", "profiler"} & found.keys()


def test_only_and_step_apply_everywhere(capsys):
    def shown(*arguments):
        assert cli.main([str(argument) for argument in arguments]) == 0
        return capsys.readouterr().out

    short = shown(SMALL, "--only", "short")
    assert "the GPU is " in short and "call tree" not in short
    both = shown("--only", "steps,short", SMALL)  # the file is not swallowed
    assert "to first op" in both and "the GPU is " in both and "call tree" not in both
    found = json.loads(shown(SMALL, "--json", "--only", "steps"))
    assert len(found["steps"]) == 3 and "gpu_work" not in found and "chain" not in found
    second = json.loads(shown(SMALL, "--json=all", "--step", "2"))
    assert second["typical_step"] == "ProfilerStep#2" != json.loads(shown(SMALL, "--json=all"))["typical_step"]
    assert second["chain"][0]["name"] == "ProfilerStep#2"
    assert "call tree of step #2" in shown(SMALL, "--step", "2")
    figures = shown(SMALL, SMALL, "--only", "steps", "--step", "2")
    assert "step #2" in figures and "what changed" not in figures
    assert f"{second['steps'][0]['cpu_us']:,.1f}" in figures
    assert "ops: " not in shown(SMALL, SMALL, "--only", "work")
    assert cli.main([str(SMALL), str(SMALL), "--only", "names"]) == 2
    assert cli.main([str(SMALL), "--only", "steps,everything"]) == 2
    assert "no section 'everything'" in capsys.readouterr().err


def in_some_unit(us):
    """Return the forms of a time in a column: in µs, ms or s, with at least three digits or down to 1 µs."""
    forms = {f"{us:.1f}", f"{us / 1e3:.3f}", f"{us / 1e6:.6f}"}
    if us < 10:
        forms.add(f"{us / 1e3:.4f}")
    if us >= 9995:
        forms.add(f"{us / 1e3:.2f}")
    if us >= 99_950:
        forms.add(f"{us / 1e3:.1f}")
    return forms


@pytest.mark.parametrize("width", [80, 100, 120, 200])
@pytest.mark.parametrize("file", REFERENCES[::5], ids=lambda path: f"{path.parents[1].name}/{path.stem}")
def test_no_width_cuts_a_figure(monkeypatch, capsys, file, width):
    monkeypatch.setenv("COLUMNS", str(width))
    assert cli.main([str(file), "--json=all"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert cli.main([str(file), "--only", "steps,work"]) == 0
    screen = capsys.readouterr().out
    words = set(screen.replace("–", " ").replace(",", "").replace("·", " ").split())
    for step in found["steps"][:5]:
        keys = ("cpu_us", "label_to_first_op_us") + ("gpu_busy_us", "gpu_span_us", "launch_to_start_us") * bool(
            found["gpu_work"]
        )
        for key in keys:
            assert step[key] is None or in_some_unit(step[key]) & words, (key, step[key])
    for one in found["gpu_work"]:
        for key in ("us", "low_us", "high_us"):
            assert in_some_unit(one[key]) & words, (one["name"], key)
        assert one["launched_by"] in words
    table = [line for line in screen.splitlines()[2:] if "took" not in line and not line.startswith("#0 ")]
    assert max(map(len, table)) <= width


def test_a_pipe_gets_plain_text(capsys):
    assert cli.main([str(SMALL)]) == 0
    assert "\x1b" not in capsys.readouterr().out


def test_patterns_without_a_reference_trace(tmp_path):
    calls = [event("aten::add", ts=60 + n, dur=0.5) for n in range(39)]
    file = written(
        tmp_path,
        [
            event("Torch-Compiled Region: 0/1", ts=1, dur=100),
            event("aten::mm", ts=10, dur=15),
            event("aten::item", ts=30, dur=20),
            event("cudaStreamSynchronize", cat="cuda_runtime", ts=31, dur=18),
            event("cudaLaunchKernel", cat="cuda_runtime", ts=52, dur=2, args={"correlation": 8}),
            event("ampere_sgemm_128x64_nn", cat="kernel", ts=56, dur=5, tid=9, args={"correlation": 8}),
            event("cudaLaunchKernel", cat="cuda_runtime", ts=13, dur=2, args={"correlation": 7}),
            event("ampere_sgemm_128x64_nn", cat="kernel", ts=20, dur=15, tid=9, args={"correlation": 7}),
            *calls,
        ],
    )
    shown = {one.name: verdict.evidence for one, verdict in cheatsheet.found(measured(file))}
    assert shown["many_calls"] == "aten::add: 39 calls per step"
    sync = shown["sync_idles_the_gpu"]
    # From the kernel's end to the synchronization's, 14 µs, and in the launch after it, 2 µs.
    asked = "aten::item (cudaStreamSynchronize)"
    assert sync == f"the GPU is idle for 16.0 µs of a step in these calls and the launch after each: {asked}"
    assert shown["recompiled"] == "Torch-Compiled Region: 0/1"


# Several traces.


def shown(capsys, *arguments):
    assert cli.main([str(argument) for argument in arguments]) == 0
    return capsys.readouterr().out


def test_each_run_is_compared_with_the_first_or_the_previous_one(capsys):
    folder = H200 / "01_matmul_add"
    files = [folder / f"4096_bf16_warm_{path}.json.gz" for path in ("eager", "compile", "eager_addmm")]
    first = shown(capsys, *files, "--only", "short")
    before = shown(capsys, *files, "--only", "short", "--previous")
    assert re.findall(r"run (\d) is about as fast as run (\d)", first) == [("2", "1"), ("3", "1")]
    assert re.findall(r"run (\d) is about as fast as run (\d)", before) == [("2", "1"), ("3", "2")]
    assert cli.main([str(file) for file in files[:2]] + ["--previous"]) == 2


def test_a_run_is_compared_with_the_reference_of_the_same_name(capsys, tmp_path):
    mine = tmp_path / "02_linear" / "1024x32x64_bf16_warm_eager_cpu.json.gz"
    mine.parent.mkdir()
    mine.write_bytes((H200.parent / "cpu/02_linear/1024x32x64_bf16_warm_eager.json.gz").read_bytes())
    screen = shown(capsys, mine, "--against", "h200")
    assert "the devices differ" in screen and "NVIDIA H200" in screen and "CPU only" in screen
    assert "the machines are cpu, nvidia-h200" in refused(capsys, mine, "--against", "a100")
    other = mine.with_name("1x1x1_bf16_warm_eager.json.gz")
    mine.rename(other)
    assert "there is no reference" in refused(capsys, other, "--against", "h200")


def test_only_folders_with_traces_are_machines(capsys, tmp_path, monkeypatch):
    for name in ("gpu/02_linear", "__pycache__"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "gpu/02_linear/1x1x1_bf16_warm_eager.json.gz").write_bytes(SMALL.read_bytes())
    monkeypatch.setattr("tracereader.show.references.FOLDER", tmp_path)
    assert "the machines are gpu\n" in refused(capsys, SMALL, "--against", "a100")


def test_two_cpu_runs_show_the_ops_times(capsys):
    cpu = H200.parent / "cpu/01_matmul_add"
    files = [cpu / f"4096_bf16_{path}_eager.json.gz" for path in ("warm", "cold")]
    screen = shown(capsys, *files)
    (row,) = [line.split() for line in screen.splitlines() if line.startswith("aten::mm ")]
    assert row[1:] == [f"{summarize(read(file)).cpu.ops['aten::mm'].self_us / 1e3:,.1f}" for file in files]  # ms


def test_a_trace_that_does_not_fit_into_memory_is_refused(monkeypatch, capsys, tmp_path):
    from tracereader.trace import document as loading

    monkeypatch.setattr(loading, "free_memory", lambda: 20_000)
    packed = tmp_path / SMALL.name
    packed.write_bytes(SMALL.read_bytes())
    assert "free" in refused(capsys, packed)
    plain = tmp_path / "plain.json"
    plain.write_bytes(b'{"traceEvents": [' + b"{}," * 5000 + b"{}]}")
    assert "of memory, and" in refused(capsys, plain)


# What a report says first.


@pytest.mark.parametrize(
    ("kernel", "launch_ts", "expected"),
    [("ampere_sgemm_128x64_nn", 60, "overhead"), ("ampere_sgemm_128x64_nn", 9, "gpu-side"),
     ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(x)", None, "communication"), ("my_kernel", None, "gpu")],
)  # fmt: skip
def test_the_idle_time_of_a_step_has_a_cause(tmp_path, capsys, kernel, launch_ts, expected):
    """A step with a kernel at each end and idle time between, and a step that one kernel fills."""
    events = [event("ProfilerStep#0", cat="user_annotation", ts=0, dur=100)]
    busy = [(10, 5, 1), (85, 5, launch_ts)] if launch_ts is not None else [(2, 98, 1)]
    for number, (ts, dur, launched) in enumerate(busy):
        events.append(event("cudaLaunchKernel", cat="cuda_runtime", ts=launched, dur=1, args={"correlation": number}))
        args = {"correlation": number, "device": 0}
        events.append(event(kernel, cat="kernel", ts=ts, dur=dur, tid=9, args=args))
    found = json.loads(shown(capsys, written(tmp_path, events), "--json=all"))
    assert found["waits_for"] == expected
    gpu = found["gpu"]
    parts = sum(gpu[key] for key in ("compute_us", "exposed_communication_us", "exposed_copy_us"))
    assert gpu["busy_us"] == pytest.approx(parts)
    assert gpu["busy_us"] + gpu["idle_us"] == pytest.approx(found["window_us"])
    idle = sum(gpu[key] for key in ("idle_not_launched_us", "idle_launched_us", "idle_unknown_us"))
    assert gpu["idle_us"] == pytest.approx(idle)


def test_the_last_steps_stub_is_not_typical(tmp_path):
    events = []
    for number, dur in enumerate((100, 110, 10)):
        events.append(event(f"ProfilerStep#{number}", cat="user_annotation", ts=200 * number, dur=dur))
        if dur > 10:
            for at in range(4):
                ts, tie = 200 * number + 10 * at + 1, {"correlation": 10 * number + at}
                events.append(event("cudaLaunchKernel", cat="cuda_runtime", ts=ts, dur=1, args=tie))
                events.append(event("k", cat="kernel", ts=ts + 2, dur=5, tid=9, args=tie))
    assert measured(written(tmp_path, events)).typical_step == "ProfilerStep#0"


def test_a_step_slow_on_the_gpu_is_marked(tmp_path, capsys):
    events = []
    for number, dur in enumerate((20, 20, 30, 20)):
        ts = 200 * number
        events.append(event(f"ProfilerStep#{number}", cat="user_annotation", ts=ts, dur=100))
        events.append(event("cudaLaunchKernel", cat="cuda_runtime", ts=ts + 1, dur=1, args={"correlation": number}))
        events.append(event("k", cat="kernel", ts=ts + 5, dur=dur, tid=9, args={"correlation": number}))
    file = written(tmp_path, events)
    assert [step.gpu_times_the_median for step in measured(file).steps] == [None, None, 1.5, None]
    assert "#2's GPU busy time is 1.5 times the median step's" in shown(capsys, file)


def made_steps(steps, rest=()):
    """Return consecutive steps, each a list of its calls (name, µs); None: 50 µs outside every call."""
    events, ts = list(rest), 0
    for number, calls in enumerate(steps):
        start = ts
        for one in calls:
            if one:
                events.append(event(one[0], ts=ts, dur=one[1]))
            ts += one[1] if one else 50
        events.append(event(f"ProfilerStep#{number}", cat="user_annotation", ts=start, dur=ts - start))
    return events


USUAL = [("aten::mm", 100), ("aten::gelu", 20), ("aten::add", 10), ("aten::sum", 6)]  # 136 µs
LOADING = event("Lazy Function Loading", cat="overhead", ts=3, dur=20)
CAUSES = {
    # what the second of four steps does; why it took longer
    "two were held up": ([("aten::mm", 1100), ("aten::gelu", 920), *USUAL[2:]],
                         "1.00 of the additional 1.90 ms are self time of aten::mm"),
    "and both needed": ([("aten::mm", 1100), ("aten::gelu", 1120), ("aten::add", 110), ("aten::sum", 6)],
                        "1.10 of the additional 2.20 ms are self time of aten::gelu, "
                        "1.00 are self time of aten::mm"),
    "others were faster": ([("aten::mm", 400), ("aten::gelu", 2), *USUAL[2:]],
                           "aten::mm took 300.0 µs more, and other calls took less"),
    "outside": ([*USUAL, None, None], "100.0 µs more are outside every call"),
    "all slower": ([(name, 2 * us) for name, us in USUAL], "most calls are 2.0 times slower"),
    "other calls": ([*USUAL, ("aten::save", 300)], "aten::save 300.0 µs in calls that the typical step does not make"),
}  # fmt: skip


@pytest.mark.parametrize("what", CAUSES)
def test_why_a_step_took_longer(tmp_path, capsys, what):
    calls, why = CAUSES[what]
    took = sum(one[1] if one else 50 for one in calls) / 136
    file = written(tmp_path, made_steps([USUAL, calls, USUAL, USUAL]))
    screen = " ".join(shown(capsys, file, "--only", "steps").split())
    assert screen.endswith(f"* #1 took {took:,.1f} times the typical step: {why}"), screen
    first = " ".join(shown(capsys, written(tmp_path, made_steps([calls, USUAL, USUAL])), "--only", "steps").split())
    pause = ", probably because the profiler has just started" * (what == "all slower")
    assert first.endswith(f"* #0 took {took:,.1f} times the typical step: {why}{pause}"), first
    assert "cold start" not in screen + first and "first use" not in screen + first


def test_cold_start_cost_is_reported_if_the_trace_shows_it(tmp_path, capsys):
    slow = [("aten::mm", 5000), *USUAL[1:]]
    screen = shown(capsys, written(tmp_path, made_steps([slow, USUAL, USUAL])), "--only", "steps")
    took = f"{(5000 + 36) / 136:.1f}"
    left_out = "ProfilerStep#0 is left out of every figure over all steps"
    assert f"{left_out}: it took {took} times the typical step\n" in screen
    assert "aten::mm took 4.9 ms more" in screen and "cold" not in screen
    screen = shown(capsys, written(tmp_path, made_steps([slow, USUAL, USUAL], [LOADING])), "--only", "steps")
    assert f"it took {took} times the typical step, which includes cold-start cost\n" in screen
    assert "a cold start: aten::mm took 4.9 ms more (in the same step: Lazy Function Loading 20.0 µs)" in screen


def test_two_steps_have_no_outlier(tmp_path, capsys):
    file = written(tmp_path, made_steps([USUAL, [("aten::mm", 300), *USUAL[1:]]]))
    assert [one.times_the_typical for one in measured(file).steps] == [None, None]
    assert "*" not in shown(capsys, file, "--only", "steps")
    assert "2 steps are too few to distinguish an outlier from a trend: record 20\n" in shown(
        capsys, file, "--only", "series"
    )


def test_a_series_holds_only_steps_with_as_many_calls(tmp_path, capsys):
    slow = [("aten::mm", 130), *USUAL[1:]]
    file = written(tmp_path, made_steps([USUAL, USUAL * 10] * 8 + [slow]))
    (mm,) = [one for one in json.loads(shown(capsys, file, "--json=all"))["series"] if one["name"] == "aten::mm"]
    assert mm["us"] == [100] * 8 + [130] and mm["other_calls"] == 8
    screen = " ".join(shown(capsys, file, "--only", "series").split())
    assert "are called a different number of times in 8 steps, which the line leaves out" in screen
    assert "aten::mm is slowest in #16: 1.30 times its median" in screen


def test_a_first_step_that_is_not_longer(tmp_path):
    wider = expect.first_step_is_wider()
    same = measured(written(tmp_path, made_steps([USUAL, USUAL, USUAL])))
    assert wider.ask(same) == Verdict(False, "it takes 136 µs, as the typical step does")
    little = measured(written(tmp_path, made_steps([[("aten::mm", 110), *USUAL[1:]], USUAL, USUAL])))
    assert wider.ask(little) == Verdict(False, "it is hardly slower: 146 instead of 136 µs")


def test_recompilation_is_reported_with_its_time(capsys):
    """The time is that of torch.compile's outermost slices, and the annotations name the compilation."""
    file = H200.parent / "guard-failure.json.gz"
    raw = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    (step,) = [one for one in raw if one["name"] == "ProfilerStep#3" and one["ph"] == "X"]
    inside = [one for one in raw if one.get("ph") == "X" and 0 <= one["ts"] - step["ts"] < step["dur"]]
    assert {one["name"].split("compile_id=")[1] for one in inside if "compile_id=" in one["name"]} == {"0/1"}
    timed = [(one["ts"], one["ts"] + one["dur"]) for one in inside if one["name"].endswith(" (dynamo_timed)")]
    us, until = 0, 0
    for start, end in sorted(timed, key=lambda one: (one[0], -one[1])):
        if start >= until:
            us, until = us + end - start, end
    one = measured(file).steps[2]
    assert (one.compiled, one.compile_us) == (["0/1"], pytest.approx(us))
    again = f"torch.compile compiled again (0/1) for {us / 1e3:,.1f} ms"
    assert f"{again} in step #3" in " ".join(shown(capsys, file, "--only", "patterns").split())
    screen = " ".join(shown(capsys, file, "--only", "steps").split())
    assert f"* #3 took 15.1 times the typical step: {again} of its {step['dur'] / 1e3:,.1f} ms" in screen
    assert "torch.compile compiled (0/0)" in screen


def test_unknown_categories_are_reported(tmp_path, capsys):
    launch = event("cudaLaunchKernel", cat="cuda_runtime", ts=13, dur=2, args={"correlation": 7})
    device = event("k", cat="mtia_kernel", ts=20, dur=5, tid=9, args={"stream": 1, "device": 0})
    screen = shown(capsys, written(tmp_path, [event("aten::mm", ts=10, dur=15), launch, device]))
    assert "1 slice of the unknown category mtia_kernel on a device counts as GPU activity" in screen
    known = event("k", cat="kernel", ts=30, dur=5, tid=9, args={"stream": 1, "device": 0, "correlation": 7})
    screen = shown(capsys, written(tmp_path, [event("aten::mm", ts=10, dur=15), launch, device, device, known]))
    assert "2 slices of the unknown category mtia_kernel on a device are left out" in screen
    screen = shown(capsys, written(tmp_path, [event("aten::mm", ts=10, dur=15), launch]))
    assert "GPU records are missing. 1 of 1 launch call has no GPU record" in screen
    assert "CPU only" not in screen.splitlines()[1]


def test_an_out_tensor_is_not_counted_twice(tmp_path):
    """add(a, b, out=c) reads two tensors and writes one, although torch records c among the inputs."""
    for dims in ([[1000], [1000], [], [1000]], [[1000], [1000], []]):
        args = {"Input Dims": dims, "Input type": ["float", "float", "Scalar", "float"][: len(dims)]}
        events = [
            event("aten::add", ts=1, dur=20, args=args),
            event("cudaLaunchKernel", cat="cuda_runtime", ts=3, dur=2, args={"correlation": 7}),
            event("void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, x>",
                  cat="kernel", ts=10, dur=5, tid=9, args={"correlation": 7}),
        ]  # fmt: skip
        (one,) = measured(written(tmp_path, events)).gpu_work
        assert one.bytes_moved == 3 * 1000 * 4


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("ampere_bf16_s16816gemm_bf16_128x256_ldg8_f2f_stages_64x3_nn", "tile 128x256"),
        ("cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16_32x32_32x1_tn_align8", "layout tn"),
        ("who_knows", "unknown name"),
    ],
)
def test_one_name_is_decoded(capsys, name, says):
    screen = shown(capsys, "--name", name)
    assert screen.startswith(name) and says in screen
    assert "name a trace" in refused(capsys)
    assert "name a trace" in refused(capsys, "--name", name, SMALL)


@pytest.mark.parametrize(
    ("op", "shape"),
    [("aten::_flash_attention_forward", [8, 1024, 16, 64]), ("aten::_cudnn_attention_forward", [8, 16, 1024, 64])],
)
def test_attention_by_its_shapes(tmp_path, capsys, op, shape):
    """Each head has two products, of [1024, 64] and [1024, 1024]; query, key, value and result are moved once."""
    args = {"Input Dims": [shape] * 3, "Input type": ["c10::BFloat16"] * 3}
    kernel = "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128, 128, 4>>"
    events = [
        event(op, ts=1, dur=200, args=args),
        event("cudaLaunchKernel", cat="cuda_runtime", ts=3, dur=2, args={"correlation": 7}),
        event(kernel, cat="kernel", ts=10, dur=95, tid=9, args={"correlation": 7, "device": 0}),
    ]
    file = written(tmp_path, events)
    (one,) = measured(file).gpu_work
    assert one.flops == 2 * (2 * 8 * 16 * 1024 * 1024 * 64)
    assert one.bytes_moved == 4 * (8 * 16 * 1024 * 64) * 2
    assert one.tflops == pytest.approx(one.flops / 95e-6 / 1e12)
    assert "34.4 GFLOP without a mask" in shown(capsys, file)


@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize(
    ("name", "begins", "says"),
    [
        (
            "trace.json.zst",
            b"\x28\xb5\x2f\xfd rest",
            "compressed with zstd, and only gzip can be read; uncompress it first: zstd -d",
        ),
        ("trace.zip", b"PK\x03\x04 rest", "compressed with zip, and only gzip can be read; uncompress it first: unzip"),
    ],
)
def test_a_file_that_is_no_trace_is_refused_at_once(tmp_path, monkeypatch, capsys, beside, name, begins, says):
    """If it is the second of two traces, the first one is not read."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).write_bytes(begins)
    if beside:
        monkeypatch.setattr("tracereader.show.report.opened", lambda *_: pytest.fail("the first trace was read"))
    assert cli.main([*[str(SMALL)] * beside, name]) == 2
    shown = capsys.readouterr()
    assert not shown.out and len(shown.err.splitlines()) == 1
    assert f"read-trace: {name}: {says}" in shown.err


def test_the_trace_without_the_step_is_named(tmp_path, capsys):
    other = tmp_path / "other.json"
    document = json.loads(gzip.decompress(SMALL.read_bytes()))
    for event in document["traceEvents"]:
        event["name"] = event.get("name", "").replace("ProfilerStep#2", "ProfilerStep#7")
    other.write_text(json.dumps(document))
    assert cli.main([str(SMALL), str(other), "--step", "2"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("read-trace: other.json: --step 2: the trace holds ") and len(said.splitlines()) == 1


def test_a_folder_stands_for_the_traces_in_it(tmp_path, capsys):
    """The profiler's tables and other tools' files in it are left out."""
    ranks = sorted((ROOT / "tests/traces/h200-x4/experts_skewed").glob("*.json.gz"))
    for path in ranks:
        shutil.copy(path, tmp_path)
    for name in ("rank0.txt", "execution_details.json", "notes.json.bak"):
        (tmp_path / name).write_text("no trace")
    (tmp_path / "older.json").mkdir()
    printed = []
    for named in ([tmp_path], ranks):
        assert cli.main(list(map(str, named))) == 0
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1] and "4 of 4 ranks" in printed[0]


def test_of_many_longer_steps_the_longest_are_named(tmp_path, capsys):
    longer = [[("aten::mm", 100 * times), *USUAL[1:]] for times in (4, 3, 9, 5, 8)]
    screen = shown(capsys, written(tmp_path, made_steps([USUAL] * 8 + longer)), "--only", "steps")
    named = re.findall(r"^\* (#\d+) took", screen, re.M)
    assert named == ["#10", "#12", "#11"]
    assert "* 2 other steps took longer than the typical step, too" in screen
