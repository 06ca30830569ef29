"""A report warns about other programs on the machine, but not if the trace explains the slow steps."""

import gzip
import json

import pytest
from raw_events import event, raw_steps
from references import LARGE, MODELS, OTHERS, REFERENCES, ROOT, measured, small_first

from tracereader import cli
from tracereader.figures import summarize
from tracereader.findings.steps import busy_machine
from tracereader.trace import read

SAYS = "something else was probably using the CPU's cores"
SHAPES = {"Input Dims": [[64, 64], [64, 64]], "Input type": ["float", "float"]}


def steps(tmp_path, *lengths, slow="aten::mm", extra=None, lesson=None, gpu=False, args=SHAPES):
    """Return steps of these lengths (µs). The time beyond 30 µs lies in one call. extra: a step with one more op."""
    events, at = [], 0
    for number, us in enumerate(lengths):
        events.append(event(f"ProfilerStep#{number}", "user_annotation", at, us))
        product = us - 20 if slow == "aten::mm" else 10
        events.append(event("aten::mm", "cpu_op", at + 5, product, **args))
        if slow != "aten::mm":
            category = "user_annotation" if "#" in slow else "cuda_runtime"
            events.append(event(slow, category, at + 16, us - 20))
        if number == extra:
            events.append(event("Torch-Compiled Region: 0/1", "cpu_op", at + us - 12, 10))
        if gpu:
            events.append(event("cudaLaunchKernel", "cuda_runtime", at + 6, 3, correlation=number + 1))
            events.append(event("k", "kernel", at + 10, 2, 7, correlation=number + 1, device=0, stream=7))
        at += us + 1
    top = {"lesson": lesson} if lesson else {}
    file = tmp_path / "made.json"
    file.write_text(json.dumps({"traceEvents": events, "record_shapes": 1} | top))
    return file


@pytest.mark.parametrize("gpu", [False, True])
def test_steps_that_differ_by_several_times(tmp_path, capsys, gpu):
    trace = steps(tmp_path, 27_846, 179, 27_898, gpu=gpu)
    assert cli.main([str(trace)]) == 0
    said = capsys.readouterr().out
    assert "step #2 took 156 times as long as step #1, which makes the same calls" in said
    assert SAYS in said and "Stop other programs (top shows them) and profile again." in said
    assert cli.main([str(trace), "--json=all"]) == 0
    assert SAYS in json.loads(capsys.readouterr().out)["busy_machine"]


def test_without_shapes_the_inputs_may_differ(tmp_path):
    said = busy_machine(summarize(read(steps(tmp_path, 200, 180, 2_000, args={}))))
    assert said.endswith(f"if their inputs have the same sizes, {SAYS}. Stop other programs (top shows them) and "
                         "profile again.")  # fmt: skip


@pytest.mark.parametrize(
    "explained",
    [
        {"lengths": (20_000, 180, 190)},  # the first step is merely wide
        {"lengths": (20_000, 500, 180)},  # and what is left of a cold start
        {"lengths": (180, 190, 20_000), "extra": 2},  # a step that does more
        {"lengths": (180, 190, 20_000), "slow": "enumerate(DataLoader)#_Iter.__next__"},
        {"lengths": (180, 190, 20_000), "slow": "cudaStreamSynchronize", "gpu": True},
        {"lengths": (180, 190, 20_000), "slow": "a label#of the program"},  # Python, which may do more
        {"lengths": (180, 250, 400)},
    ],
)
def test_explained_steps_are_no_busy_machine(tmp_path, explained):
    lengths = explained.pop("lengths")
    assert busy_machine(summarize(read(steps(tmp_path, *lengths, **explained)))) is None


def test_steps_with_inputs_of_equal_sizes_are_compared(tmp_path):
    """The longest step has larger inputs than all others. The second longest one has the same as the shortest."""
    trace = steps(tmp_path, 185, 180, 1_800, 9_000)
    document = json.loads(trace.read_text())
    *_, last = (e for e in document["traceEvents"] if e["name"] == "aten::mm")
    last["args"]["Input Dims"] = [[640, 64], [64, 64]]
    trace.write_text(json.dumps(document))
    assert "step #2 took 10 times as long as step #1" in busy_machine(summarize(read(trace)))


def test_inputs_of_other_sizes_are_no_busy_machine(tmp_path):
    """A longer sequence gives the same ops larger inputs."""
    trace = steps(tmp_path, 180, 190, 2_000)
    document = json.loads(trace.read_text())
    *_, last = (e for e in document["traceEvents"] if e["name"] == "aten::mm")
    last["args"] = SHAPES | {"Input Dims": [[640, 640], [640, 640]]}
    trace.write_text(json.dumps(document))
    assert busy_machine(summarize(read(trace))) is None


def test_a_comparison_with_a_disturbed_run_says_so(tmp_path, capsys):
    """The first run is disturbed; the second one, of the same calls, is not."""
    disturbed = steps(tmp_path, 27_846, 179, 27_898)
    rest = disturbed.rename(tmp_path / "disturbed.json")
    quiet = steps(tmp_path, 190, 179, 185)
    for more, before in (((), "per step"), (("--markdown",), "of one step")):
        assert cli.main([str(rest), str(quiet), *more]) == 0
        above, _, below = capsys.readouterr().out.partition(before)
        assert " ".join(above.split()).count(SAYS) == 1 and SAYS not in below
        assert above.index("156 times as long") > above.rindex("1  disturbed" if not more else "1. `disturbed`")


def test_a_real_run_beside_others():
    """Other programs ran meanwhile: the second step took 4.6 times the first, also in ops that move no data."""
    path = ROOT / "tests/traces/attention_cpu_math.json.gz"
    first, second, _ = raw_steps(json.loads(gzip.decompress(path.read_bytes()))["traceEvents"])
    assert f"step #3 took {second['dur'] / first['dur']:,.0f} times as long as step #2" in busy_machine(
        summarize(read(path))
    )


@pytest.mark.parametrize("path", small_first([*REFERENCES, *LARGE[::3], *OTHERS, *MODELS]), ids=lambda path: path.stem)
def test_committed_traces_are_of_machines_at_rest(path):
    if path.stem != "attention_cpu_math.json":
        assert busy_machine(measured(path)) is None


@pytest.mark.parametrize(
    ("us", "chosen", "used"),
    [
        ({8: 12_000.0, 4: 9_000.0, 2: 14.0, 1: 17.0}, "", 2),  # halved until they no longer wait
        ({8: 12_000.0, 4: 9_000.0, 2: 5_000.0, 1: 17.0}, "", 1),
        ({8: 12.0, 1: 17.0}, "", 8),
        ({8: 150.0, 1: 17.0}, "", 8),  # nine times as long, but only by the time that a thread takes to wake up
        ({8: 12_000.0, 1: 17.0}, "8", 8),  # OMP_NUM_THREADS
    ],
)
def test_threads_that_wait_for_each_other_become_fewer(monkeypatch, us, chosen, used):
    torch = pytest.importorskip("torch")
    from common import speed

    now = [8]
    monkeypatch.setattr(torch, "get_num_threads", lambda: now[0])
    monkeypatch.setattr(torch, "set_num_threads", lambda count: now.__setitem__(0, count))
    monkeypatch.setattr(speed, "_fill_us", lambda threads, count: torch.set_num_threads(threads) or us[threads])
    monkeypatch.setenv("OMP_NUM_THREADS", chosen)
    found = speed.steady_threads.__wrapped__()
    assert found == {"count": 8, "us": us[8], "used": used, "one_us": 17.0} and now == [used]


def test_one_thread_is_not_measured(monkeypatch):
    torch = pytest.importorskip("torch")
    from common import speed

    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert speed.steady_threads.__wrapped__() is None


def test_the_time_of_a_number_of_threads_is_measured():
    torch = pytest.importorskip("torch")
    from common.speed import _fill_us

    count = torch.get_num_threads()
    try:
        assert _fill_us(2, 2) > 0 and torch.get_num_threads() == 2
        assert _fill_us(1, 2) > 0 and torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(count)


def test_the_page_of_a_comparison_names_the_disturbed_run(tmp_path):
    disturbed = steps(tmp_path, 27_846, 179, 27_898).rename(tmp_path / "disturbed.json")
    page = tmp_path / "page.html"
    assert cli.main([str(disturbed), str(steps(tmp_path, 190, 179, 185)), "--html", str(page)]) == 0
    figures = json.loads(page.read_text().partition('id="figures">')[2].partition("</script>")[0])
    assert [SAYS in (run["busy"] or "") for run in figures["runs"]] == [True, False]
