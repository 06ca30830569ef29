"""A file with several processes is read as one of them, and a folder's front ends are left out."""

import gzip
import json

import pytest
from raw_events import event
from references import ROOT

from tracereader import cli
from tracereader.figures import summarize
from tracereader.trace import TraceError, read

RANKS = sorted((ROOT / "tests/traces/ranks").glob("ddp_straggler_rank*.json.gz"))


def process(pid, device_pid, device, launches=6, first=100, us=10, at=1_000, name="sgemm"):
    """Return the ops of a process, their launches, and a kernel of each on its device. first: the first launch's id."""
    found = []
    for number in range(launches):
        ts, tie = at + 100 * number, first + number
        found += [
            event("aten::mm", "cpu_op", ts, 20), event("cudaLaunchKernel", "cuda_runtime", ts + 5, 5, correlation=tie),
            event(name, "kernel", ts + 30, us, 7, correlation=tie, device=device, stream=7),
        ]  # fmt: skip
        found[-3]["pid"] = found[-2]["pid"] = pid
        found[-1]["pid"] = device_pid
    return found


def ops_only(pid, count=50):
    """Return the ops of a process that launches nothing, on a thread of its own."""
    return [event("aten::stack", "cpu_op", 1_000 + 10 * number, 9) | {"pid": pid} for number in range(count)]


def named(pid, name):
    return {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "ts": 0, "args": {"name": name}}


def sglang(rank, **how):
    """Return a rank's events with the process numbers that SGLang's merger writes."""
    label = f"[TP{rank:02}-DP00]"
    return process(f"{label} {1000 + rank}", f"{label} {rank}", rank, **how)


@pytest.fixture
def written(tmp_path):
    def write(*events, name="made.json", **top):
        file = tmp_path / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(json.dumps({"traceEvents": list(events)} | top))
        return file

    return write


def own(events, pid, device_pid):
    """Return the total time of a process's kernels, and the number of its launches."""
    kernels = [e["dur"] for e in events if e["cat"] == "kernel" and e["pid"] == device_pid]
    return sum(kernels), sum(e["cat"] == "cuda_runtime" and e["pid"] == pid for e in events)


@pytest.mark.parametrize("wanted", [None, "TP00", "[TP01-DP00] 1001"])
def test_merged_ranks_are_read_one_by_one(written, capsys, wanted):
    events = [*sglang(0, us=10), *sglang(1, us=30, launches=7)]
    file = written(*events)
    trace = read(file, process=wanted)
    rank = 0 if wanted == "TP00" else 1
    pid, device = f"[TP0{rank}-DP00] {1000 + rank}", f"[TP0{rank}-DP00] {rank}"
    busy, launches = own(events, pid, device)
    assert summarize(trace).gpu.busy_us == busy and summarize(trace).steps[0].launches == launches
    assert {op.track[0] for step in trace.steps for op in step.walk()} == {pid}
    assert [one.name for one in trace.processes] == [pid, f"[TP0{1 - rank}-DP00] {1001 - rank}"]
    flags = [] if wanted is None else ["--process", wanted]
    assert cli.main([str(file), *flags]) == 0
    screen = " ".join(capsys.readouterr().out.split())
    assert f"the file holds 2 processes with GPU work; this report is about {pid}, with {launches} GPU" in screen
    assert cli.main([str(file), *flags, "--json=all"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [one["gpu_activities"] for one in told["processes"]] == [launches, 13 - launches]
    assert told["rank"] is None and "--process reads another one" in told["warnings"][0]


def test_one_of_exported_ranks_reads_like_its_own_file(tmp_path, capsys):
    file = tmp_path / "ranks.json"
    assert cli.main([*map(str, RANKS), "--export", str(file)]) == 0
    capsys.readouterr()
    told = []
    for command in ([file, "--process", "rank 1"], [RANKS[1]]):
        assert cli.main([*map(str, command), "--json", "--only", "steps,gpu,kernels"]) == 0
        told.append(json.loads(capsys.readouterr().out))
    for name in ("steps", "gpu", "families", "kernels", "by_label", "window_us"):
        assert told[0][name] == told[1][name]


@pytest.mark.parametrize(
    ("first", "second"),
    [((100, 6), (200, 6)), ((100, 6), (103, 6)), ((100, 6), (106, 7))], ids=["distinct", "some alike", "next"],
)  # fmt: skip
def test_ids_and_devices_tell_whose_work_it_is(written, first, second):
    """Where two processes have calls of one id, the device of the others' work decides."""
    events = [
        *process(1000, 0, 0, first=first[0], launches=first[1]),
        *process(1001, 1, 1, first=second[0], launches=second[1], us=20),
        event("before", "kernel", 900, 5, 7, correlation=9, device=0, stream=7) | {"pid": 0},
    ]
    for pid, device in ((1000, 0), (1001, 1)):
        trace = read(written(*events), process=str(pid))
        assert sorted(one.start for one in trace.work) == sorted(
            round(1000 * (e["ts"] - events[0]["ts"])) for e in events if e["cat"] == "kernel" and e["pid"] == device
        )
        assert not trace.of_no_process


@pytest.mark.parametrize("device", [0, 1])
def test_equal_ids_without_anything_else_are_refused(written, capsys, device):
    file = written(*process(1000, 0, 0), *process(1001, device, device))
    assert cli.main([str(file)]) == 2
    said = capsys.readouterr().err
    assert "launches of several processes (1000, 1001) have the same ids" in said and said.count("\n") == 1


def test_processes_are_told_apart_by_the_ranks_in_their_names(written):
    names = [named(1, "rank 0 CPU"), named(2, "rank 0 GPU 0"), named(3, "rank 1 CPU"), named(4, "rank 1 GPU 1")]
    events = [*process(1, 2, 0), *process(3, 4, 1, us=20)]
    assert {one.dur for one in read(written(*names, *events), process="rank 0").work} == {10_000}
    assert {one.dur for one in read(written(*names, *events)).work} == {20_000}


def test_ops_of_workers_count_in_no_figure(written, capsys):
    """The marks' process has the GPU work; workers of a loader only have ops."""
    mark = event("ProfilerStep#1", "user_annotation", 990, 700) | {"pid": 1000}
    mine = [mark, *process(1000, 0, 0)]
    info = {"rank": 3, "world_size": 8, "backend": "nccl"}
    told = []
    for name, others in (("alone.json", []), ("workers.json", [*ops_only(2000), *ops_only(2001)])):
        file = written(*mine, *others, name=name, distributedInfo=info)
        assert cli.main([str(file), "--json=all"]) == 0
        told.append(json.loads(capsys.readouterr().out))
    warnings = told[1].pop("warnings")
    assert warnings == ["2000, 2001 in the same file have no GPU work: this report is about 1000 alone"]
    assert told[1]["rank"] == 3
    assert told[0]["warnings"] == [] and len(told[1].pop("processes")) == 3
    for name, value in told[1].items():
        assert name == "trace" or value == told[0][name]


def test_a_device_without_a_label_is_not_that_of_the_only_process_without_one(written):
    events = [*process("[TP00] 1000", 0, 0), *process("[TP01] 1001", 1, 1, first=500, us=20), *ops_only(77)]
    trace = read(written(*events))
    assert trace.processes[0].name == "[TP01] 1001" and {one.dur for one in trace.work} == {20_000}


def test_work_whose_launches_are_lost_is_that_of_the_process_with_steps(written):
    mark = event("ProfilerStep#1", "user_annotation", 990, 700) | {"pid": 1000}
    events = [e for e in process(1000, 0, 0) if e["cat"] != "cuda_runtime"]
    trace = read(written(mark, *events, *ops_only(2000, 500)))
    assert len(trace.work) == 6 and trace.processes[0].name == "1000" and not trace.of_no_process


def test_a_runtimes_own_thread_and_annotations_of_a_tool_are_no_processes(written):
    events = process(1000, 0, 0)
    for one in events:
        if one["cat"] == "cuda_runtime":
            one["pid"] = 4000
    lane = event("iteration", "user_annotation", 1_000, 500) | {"pid": "Iterations"}
    trace = read(written(*events, lane))
    assert trace.processes == () and all(one.launch is not None for one in trace.work)


@pytest.mark.parametrize("name", ["7", "TP", "x"])
def test_a_process_that_is_not_there_or_not_the_only_one_is_refused(written, capsys, name):
    assert cli.main([str(written(*sglang(0), *sglang(1))), "--process", name]) == 2
    said = capsys.readouterr().err
    assert f"--process {name}: the processes are [TP00-DP00] 1000, [TP01-DP00] 1001" in said and said.count("\n") == 1
    with pytest.raises(TraceError, match="holds one process only"):
        read(written(*process(1, 0, 0)), process="1")


def test_many_processes_are_read_in_time_that_grows_with_them(written):
    """Each kernel's process is found by its id, and no list of all processes is looked through for it."""
    events = [e for number in range(3_000) for e in sglang(number, launches=1, first=1, at=1_000 + 200 * number)]
    trace = read(written(*events))
    assert len(trace.processes) == 3_000 and len(trace.work) == 1


BASE = 1_790_000_000_000_000_000


@pytest.fixture
def served(written):
    """Return the traces of a worker and of a front end that is recorded `later` µs after it, in a folder."""

    def write(folder="served", later=0, workers=1):
        for rank in range(workers):
            info = {"rank": rank, "world_size": workers, "backend": "nccl"} if workers > 1 else None
            written(*process(1000, 0, 0), name=f"{folder}/worker{rank}.json", baseTimeNanoseconds=BASE,
                    distributedInfo=info)  # fmt: skip
        front = [event(*(e[key] for key in ("name", "cat", "ts", "dur"))) for e in ops_only(77)]
        for one in front:
            one["ts"] += later
        return written(*front, name=f"{folder}/api.json", baseTimeNanoseconds=BASE).parent

    return write


def test_a_front_end_is_left_out_of_a_folder(served, capsys):
    folder = served()
    (folder / "profiler_out_0.txt").write_text("a table")
    assert cli.main([str(folder)]) == 0
    screen = " ".join(capsys.readouterr().out.split())
    said = "api.json was recorded at the same time and has no launch and no GPU work, as the front end of a server"
    assert said in screen and "6 kernels per step" in screen and "as fast" not in screen
    assert cli.main([str(folder), "--json=all"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["trace"].endswith("worker0.json") and said in told["warnings"][0]
    assert cli.main([str(folder), str(served("other"))]) == 0
    screen = " ".join(capsys.readouterr().out.split())
    assert screen.count("api.json") == 2 and "they are left out" in screen and "the second is about as fast" in screen


def test_a_cpu_run_of_another_time_is_no_front_end(served, capsys):
    assert cli.main([str(served(later=1e6))]) == 0
    assert "does not compare with" in capsys.readouterr().out


def test_a_front_end_beside_ranks_is_left_out(tmp_path, capsys):
    span = json.loads(gzip.decompress(RANKS[0].read_bytes()))
    front = ops_only(77)
    for one in front:
        one["ts"] += next(e["ts"] for e in span["traceEvents"] if e["ph"] == "X")
    (tmp_path / "api.json").write_text(
        json.dumps({"traceEvents": front, "baseTimeNanoseconds": span["baseTimeNanoseconds"]})
    )
    for path in RANKS:
        (tmp_path / path.name).write_bytes(path.read_bytes())
    assert cli.main([str(tmp_path)]) == 0
    screen = " ".join(capsys.readouterr().out.split())
    assert "2 of 2 ranks" in screen and "it has no launch and no GPU work, as the front end of a server" in screen


@pytest.mark.parametrize("gpu_first", [True, False])
def test_a_run_without_gpu_work_is_not_faster_than_one_with_it(served, capsys, gpu_first):
    folder = served()
    files = [str(folder / "worker0.json"), str(folder / "api.json")]
    files = files if gpu_first else files[::-1]
    only = "the first" if gpu_first else "the second"
    for flags in ([], ["--all"], ["--markdown"]):
        assert cli.main([*files, *flags]) == 0
        screen = " ".join(capsys.readouterr().out.split())
        assert "times as" not in screen and "does not compare with" in screen
        assert flags == ["--markdown"] or f"only {only} has GPU work" in screen
