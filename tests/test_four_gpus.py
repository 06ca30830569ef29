"""Jobs of four H200s that were recorded before and after a change: what their reports say, and what they propose.

tests/traces/h200-x4 was recorded by traces/reference/record_rank_changes.py with PyTorch 2.11 and NCCL 2.28. The flows
between calls and kernels were removed from the files, and the ops' shapes; of runs after a change, only one rank is
kept, without its ops.
"""

import itertools
import re
import statistics
from collections import defaultdict

import msgspec
import pytest
from references import ROOT, proposals
from test_ranks import REFERENCES, as_json, changed, document, end, length, marks, slices, spans

from tracereader import cli
from tracereader.changes import prices
from tracereader.changes import ranks as rank_changes
from tracereader.changes.context import Case
from tracereader.changes.fusion import fuse_pointwise
from tracereader.figures import summarize
from tracereader.findings import ranks
from tracereader.replay import graph_of
from tracereader.show.ranks import opened
from tracereader.show.view import View
from tracereader.trace import read

FOLDER = ROOT / "tests/traces/h200-x4"


def ranks_of(run):
    return sorted((FOLDER / run).glob("rank*.json.gz"))


def messages_of(path):
    """Return a rank's messages in order: (sends, peer) -> the steps and the starts of their kernels."""
    events = slices(path)
    steps, found, waiting = marks(events), defaultdict(list), []
    kernels = {e["args"]["correlation"]: e for e in events if e["cat"] == "kernel"}
    launches = [e for e in events if e["cat"] in ("cuda_runtime", "cuda_driver") and "Launch" in e["name"]]
    batches = [e for e in events if e["name"] == "nccl:coalesced" and e["cat"] != "gpu_user_annotation"]
    described = [e for e in events if e["name"] == "record_param_comms" and e["args"]["Collective name"] != "wait"]
    for event in sorted([*batches, *described], key=lambda e: e["ts"]):
        if event["name"] == "record_param_comms":
            waiting.append(event["args"])
            continue
        call = [e for e in launches if e["tid"] == event["tid"] and event["ts"] <= e["ts"] < end(event)]
        step = next((one["name"] for one in steps if one["ts"] <= event["ts"] < end(one)), None)
        kernel = kernels.get(call[0]["args"]["correlation"]) if call else None
        for args in waiting if step and kernel else ():
            sends = args["Collective name"] == "send"
            found[sends, args["Dst Rank" if sends else "Src Rank"]].append((step, kernel["ts"]))
        waiting = []
    return found


def test_messages_of_a_pipeline_on_four_gpus_are_matched(capsys):
    """torch's 1F1B schedule sends and receives with batch_isend_irecv, which starts several messages in one kernel."""
    paths = ranks_of("pipeline_few")
    raw, expected = [messages_of(path) for path in paths], []
    for source, destination in ((0, 1), (1, 0), (1, 2), (2, 1), (2, 3), (3, 2)):
        sent, received = raw[source][True, destination], raw[destination][False, source]
        assert [step for step, _ in sent] == [step for step, _ in received] and len(sent) == 12
        for (step, ready), (_, posted) in zip(sent, received, strict=True):
            expected.append((step, source, destination, max(0, ready - posted)))
    ours = as_json(capsys, *paths)
    found = [(one["step"], *one["ranks"], one["waits_us"][1]) for one in ours["messages"]]
    for one, other in zip(sorted(found), sorted(expected), strict=True):
        assert one[:3] == other[:3] and one[3] == pytest.approx(other[3], abs=0.01)
    assert (ours["unmatched_messages"], ours["unnamed"]) == (0, 0)


@pytest.mark.parametrize("run", ["pipeline_few", pytest.param("pipeline_uneven", marks=pytest.mark.exhaustive)])
def test_a_step_of_a_pipeline_begins_with_its_first_message(run, capsys):
    """The last stage waits for its first message. This wait belongs to the step that the message begins."""
    last = ranks_of(run)[-1]
    (ours,) = (one for one in as_json(capsys, *ranks_of(run))["ranks"] if one["trace"] == str(last))
    events = slices(last)
    received = [
        min(start for step, start in messages_of(last)[False, 2] if step == one["name"]) for one in marks(events)
    ]
    computing = [e for e in events if e["cat"] == "kernel" and "nccl" not in e["name"]]
    for step, start, following in zip(ours["steps"], received, received[1:], strict=False):
        assert step["us"] == pytest.approx(following - start, abs=0.01)
        assert step["compute_us"] == pytest.approx(length(spans(computing, start, following)), abs=0.1)
        assert step["exposed_communication_us"] > 10_000
        (optimizer,) = (one for one in step["phases"] if one["name"].startswith("Optimizer.step"))
        assert optimizer["exposed_communication_us"] == 0


def test_a_rank_that_computes_nothing_has_steps_as_long_as_the_others(capsys):
    """No token goes to the experts of the last rank. Its steps last from its first collective to the next step's."""
    paths = ranks_of("experts_skewed")
    ours = as_json(capsys, *paths)["ranks"]
    kernels = [e for e in slices(paths[3]) if e["cat"] == "kernel"]
    assert all("nccl" in e["name"] for e in kernels) and ours[3]["kernels"] == 0
    for idle, busy in zip(ours[3]["steps"], ours[0]["steps"], strict=True):
        assert idle["us"] == pytest.approx(busy["us"], rel=0.01)
        assert idle["exposed_communication_us"] > 0.99 * idle["us"]


def unprofiled_us(run):
    """Return the step without the profiler, the longest of the ranks, as the program measured it."""
    return max(document(path)["unprofiled_step_us"] for path in ranks_of(run))


PAIRS = (
    ("pipeline_few", "microbatches", "pipeline_many"),
    ("pipeline_uneven", "balance_stages", "pipeline_few"),
    ("experts_skewed", "balance_ranks", "experts_even"),
    ("launches_late", "balance_ranks", "launches_even"),
)
SMALL = ("experts_skewed", "gradients_one_bucket")  # the other jobs take a second or more to read and replay


def small_jobs_first(rows):
    """Return rows, each of which begins with a job, as parameters; those of large jobs are marked as exhaustive."""
    return [pytest.param(*row, marks=() if row[0] in SMALL else pytest.mark.exhaustive) for row in rows]


@pytest.mark.parametrize(("before", "change", "after"), small_jobs_first(PAIRS), ids=lambda one: one)
def test_what_is_proposed_to_ranks_predicts_the_step_that_was_measured(before, change, after, capsys):
    (found,) = (one for one in as_json(capsys, *ranks_of(before))["opportunities"] if one["change"] == change)
    assert found["unprofiled_step_us"] == pytest.approx(unprofiled_us(before), rel=0.03)
    assert found["unprofiled_step_us_after"] == pytest.approx(unprofiled_us(after), rel=0.25)


def test_waits_for_messages_are_not_proposed_to_be_hidden(capsys):
    """A stage that waits for its first message has nothing to compute meanwhile."""
    changes = [one["change"] for one in as_json(capsys, *ranks_of("pipeline_few"))["opportunities"]]
    assert changes[0] == "microbatches"


def test_the_collectives_of_two_kinds_of_groups_are_matched(capsys):
    """Tensor parallel pairs of neighbours, and FSDP over the pairs: each kernel names its group."""
    paths = ranks_of("mesh_slow")
    ours = as_json(capsys, *paths)
    counts = defaultdict(int)
    for path in paths:
        events = slices(path)
        steps = marks(events)
        calls = {
            e["args"]["correlation"]
            for e in events
            if e["cat"] in ("cuda_runtime", "cuda_driver") and steps[0]["ts"] <= e["ts"] < end(steps[-1])
        }
        for e in events:
            if e["cat"] == "kernel" and "nccl" in e["name"] and e["args"]["correlation"] in calls:
                counts[e["args"]["Process Group Description"]] += 1
    for description, count in counts.items():
        groups = [one for one in ours["groups"] if one["description"] == description]
        assert sum(one["collectives"] * len(one["ranks"]) for one in groups) == count
    assert set(counts) == {"mesh_data", "mesh_tensor"}
    assert (ours["unmatched"], ours["unnamed"]) == (0, 0)


@pytest.mark.parametrize(
    ("run", "says"),
    small_jobs_first([
        ("pipeline_few", "Communication-bound. Rank 3 waits least for others"),
        ("pipeline_uneven", "Rank 1 sets the pace"),
        ("experts_skewed", "Rank 0 sets the pace"),
        ("launches_late", "Overhead-bound. Rank 1 sets the pace"),
        ("gradients_one_bucket", "Rank 3 waits least for others"),
    ]),
)  # fmt: skip
def test_a_rank_sets_the_pace_only_if_the_others_wait_for_it(run, says, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert cli.main(list(map(str, ranks_of(run)))) == 0
    shown = capsys.readouterr().out
    assert says in shown and max(map(len, shown.splitlines())) <= 80


def test_compute_beside_communication_is_slower():
    """DDP's buckets hide the all-reduce behind the backward pass, whose kernels take longer for it."""
    computing, exposed = {}, {}
    for run in ("gradients_one_bucket", "gradients_buckets"):
        events = slices(FOLDER / run / "rank3.json.gz")
        kernels = [e for e in events if e["cat"] == "kernel"]
        mine = [e for e in kernels if "nccl" not in e["name"]]
        # From the first kernel of the first recorded step to that of the last one.
        gelu = [e["ts"] for e in mine if "GeluCUDAKernel" in e["name"]]
        start, stop = gelu[-36], gelu[-12]
        computing[run] = length(spans(mine, start, stop)) / 2e3
        communication = [e for e in kernels if "nccl" in e["name"]]
        exposed[run] = length(spans(communication, start, stop), but=spans(mine, start, stop)) / 2e3
    hidden = exposed["gradients_one_bucket"] - exposed["gradients_buckets"]
    longer = computing["gradients_buckets"] - computing["gradients_one_bucket"]
    assert hidden == pytest.approx(3.1, abs=0.3) and longer == pytest.approx(3.3, abs=0.4)


def launches_of(path):
    """Return the number of launches, and the mean time between those of a thread that are at most 500 µs apart."""
    events = slices(path)
    steps = marks(events)
    work = {e["args"]["correlation"] for e in events if e["cat"] in ("kernel", "gpu_memcpy", "gpu_memset")}
    starts = defaultdict(set)
    for e in events:
        launches = e["cat"] in ("cuda_runtime", "cuda_driver") and e["args"].get("correlation") in work
        if launches and steps[0]["ts"] <= e["ts"] < end(steps[-1]):
            starts[e["tid"]].add(e["ts"])
    apart = [after - before for some in starts.values() for before, after in itertools.pairwise(sorted(some))]
    return sum(map(len, starts.values())), statistics.fmean(one for one in apart if one <= 500)


def test_a_slower_cpu_is_named_and_is_not_taken_to_become_faster(capsys):
    """Both ranks run the same program, and while they were recorded, the CPU of one was slower at everything."""
    paths = sorted((ROOT / "tests/traces/h200-x2/buffers_sent").glob("*.json.gz"))
    ours = as_json(capsys, *paths)
    (count, slow), (same, fast) = map(launches_of, paths)
    assert [one["between_launches_us"] for one in ours["ranks"]] == pytest.approx([slow, fast], rel=1e-3)
    assert [one["launches"] for one in ours["ranks"]] == [count, same] and count == same
    (line,) = (one for one in ours["in_short"] if "its CPU launches late" in one)
    assert line.endswith(f"; from launch to launch its CPU takes {slow / fast:.2g} times as long")
    (found,) = (one for one in ours["opportunities"] if one["change"] == "balance_ranks")
    summary = opened(paths, View())[0]
    equal = msgspec.structs.replace(
        summary, ranks=tuple(msgspec.structs.replace(one, between_launches_us=30.0) for one in summary.ranks)
    )
    (faster,) = (one for one in rank_changes.opportunities(equal, 10**9) if one.change == "balance_ranks")
    more = msgspec.structs.replace(
        equal, ranks=(msgspec.structs.replace(equal.ranks[0], launches=round(1.2 * count)), *equal.ranks[1:])
    )
    launched = f"it launches {round(1.2 * count) / 3:,.0f} times per step instead of {count / 3:,.0f}"
    shown = [" ".join(ranks.sentences(one)) for one in (equal, more)]
    assert "it launches" not in shown[0] and launched in shown[1]
    assert faster.share > 0.15 and found["unprofiled_step_us_after"] > 0.92 * found["unprofiled_step_us"]


def test_no_step_without_the_profiler_is_predicted_below_the_gpus_work(tmp_path, capsys):
    """FSDP on two H200s with a CPU that launches late: without the profiler the GPUs compute most of the time."""

    def measured(found):
        found["unprofiled_step_us"] = 30_000.0

    recorded = REFERENCES["4x1024x1024x16_bf16_warm_eager_fsdp_x2"]
    paths = [changed(tmp_path, path, measured) for path in recorded]
    (found,) = (one for one in as_json(capsys, *paths)["opportunities"] if one["change"] == "balance_ranks")
    computing = []
    for path in recorded:
        events = slices(path)
        kernels = [e for e in events if e["cat"] == "kernel" and "nccl" not in e["name"]]
        steps = marks(events)
        computing.append(length(spans(kernels, steps[0]["ts"], end(steps[-1]))) / len(steps))
    assert found["unprofiled_step_us"] == 30_000.0
    assert found["unprofiled_step_us_after"] > 0.97 * min(computing)


def test_what_ddp_does_around_the_model_is_not_proposed_to_be_fused():
    """DDP's reducer copies and scales each gradient. torch.compile of the model leaves these kernels as they are."""
    eager, compiled = (ROOT / f"tests/traces/h200-x2/ddp_small_{how}_rank1.json.gz" for how in ("even", "compile"))
    events = slices(eager)
    reducer = [e for e in events if "ddp.reducer::" in e["name"] or "distributed::reducer::" in e["name"]]
    inside = {
        e["args"]["correlation"]
        for e in events
        if e["cat"] in ("cuda_runtime", "cuda_driver")
        and any(one["tid"] == e["tid"] and one["ts"] <= e["ts"] < end(one) for one in reducer)
    }
    work = [e for e in events if e["cat"] in ("kernel", "gpu_memcpy")]
    others = [e for e in work if e["args"]["correlation"] not in inside and "nvjet" not in e["name"]]
    assert len(work) - len(others) > len(others), "most of the small GPU work is DDP's"
    trace = read(eager)
    case = Case(trace, summarize(trace), graph_of(trace))
    fused = int(re.match(r"\d+", fuse_pointwise(case).evidence)[0])
    assert fused < len(others) / len(marks(events))
    # The compiled step took 1.12 times as long, and 42% less had been promised.
    assert document(compiled)["unprofiled_step_us"] > document(eager)["unprofiled_step_us"]
    assert "fuse_pointwise" not in [one.change for one in proposals(eager)]


@pytest.mark.parametrize("run", ["experts_skewed", "launches_late", "mesh_slow"])
def test_a_step_has_at_most_its_own_time_of_communication(run, capsys):
    """These windows begin with communication of earlier steps, which is longer than a step."""
    ours = as_json(capsys, *ranks_of(run))
    of_window = [one["exposed_communication_us"] / len(one["steps"]) for one in ours["ranks"]]
    steps = [[step["exposed_communication_us"] for step in one["steps"]] for one in ours["ranks"]]
    most = max(sum(some) / len(some) for some in steps)
    assert max(of_window) > most
    (told,) = (line for line in ours["in_short"] if line.startswith("communication: "))
    assert f" {most / 1e3:,.1f} ms exposed (" in told
    assert not any("outside the steps" in line for line in ours["in_short"])


def test_the_share_of_the_waiting_is_given_where_it_is_small(capsys):
    """Rank 0 is last in nearly all collectives, and a part of the waiting is for its group."""
    ours = as_json(capsys, *ranks_of("mesh_slow"))
    share = ours["ranks"][0]["others_waited_us"] / sum(one["others_waited_us"] for one in ours["ranks"])
    assert (
        f", {share:.0%} of all waiting is for it, and most of the rest is for ranks of its group" in ours["in_short"][0]
    )


def test_parameters_that_fsdp_gathers_again_are_priced_as_measured(capsys):
    """The step of two H200s, before and after reshard_after_forward=False."""
    folders = [ROOT / f"tests/traces/h200-x2/sharded_{how}" for how in ("default", "keep")]
    default, keep = (sorted(folder.glob("*.json.gz")) for folder in folders)
    events = slices(default[1])
    step = marks(events)[1]
    labels = [e for e in events if e["cat"] == "user_annotation" and step["ts"] <= e["ts"] < end(step)]
    around = [e for e in labels if e["name"].startswith(("FSDP::pre_backward ", "FSDP::backward_prefetch "))]
    again = [
        e
        for e in labels
        if e["name"].startswith("FSDP::all_gather (")
        and any(one["tid"] == e["tid"] and one["ts"] <= e["ts"] < end(one) for one in around)
    ]
    measured = document(keep[0])["unprofiled_step_us"]
    for found in (as_json(capsys, *default), as_json(capsys, default[1])):
        (one,) = (each for each in found["opportunities"] if each["change"] == "keep_parameters")
        assert f"gathers the parameters of {len(again)} blocks again" in one["evidence"]
        assert one["unprofiled_step_us_after"] == pytest.approx(measured, rel=0.1)
    assert all(one.change != "keep_parameters" for one in proposals(keep[0]))
    first, second = (opened(paths, View())[0] for paths in (default, keep))
    assert not rank_changes.FOLLOWED["keep_parameters"](first, first)
    assert second.matched == () and not rank_changes.FOLLOWED["keep_parameters"](first, second), "only one rank is kept"


def test_compute_beside_a_collective_that_waits_is_slower():
    """In DDP's backward pass, rank 0 computes the same as rank 1, beside collectives that wait for rank 1."""
    busy, extra = [], []
    for path in REFERENCES["4x1024x1024x16_bf16_warm_eager_ddp_slow1_x2"]:
        events = slices(path)
        kernels = sorted((e for e in events if e["cat"] == "kernel"), key=lambda e: e["ts"])
        waiting = [e for e in kernels if "nccl" in e["name"]]
        # The GELU of backward runs once for each block and step, from the last block to the first one.
        gelu = [e for e in kernels if "GeluBackward" in e["name"]]
        assert len(gelu) == 12
        pairs = [(gelu[step], end(gelu[step + 3])) for step in (0, 4, 8)]
        mine = [e for e in kernels if "nccl" not in e["name"]]
        busy.append(sum(length(spans(mine, first["ts"], last)) for first, last in pairs))
        extra.append(sum(length(spans(waiting, first["ts"], last)) for first, last in pairs))
    share = (busy[0] - busy[1]) / (extra[0] - extra[1])
    assert share == pytest.approx(prices.BESIDE_A_WAIT, abs=0.1)


def test_the_message_of_an_uneven_all_to_all_is_the_most_that_a_rank_sends_or_receives(capsys):
    """Most tokens go to rank 0 and come back, so both directions move as many bytes through its link."""
    paths = ranks_of("experts_skewed")
    sizes = [
        2 * max(e["args"]["In msg nelems"], e["args"]["Out msg nelems"])
        for path in paths
        for e in slices(path)
        if e["cat"] == "kernel" and "In msg nelems" in e["args"]
    ]
    matched = as_json(capsys, *paths)["matched"]
    assert {one["bytes"] for one in matched} == {max(sizes)}
    for one in matched:
        assert one["bus_gb_s"] == pytest.approx(max(sizes) * 3 / 4 / one["transfer_us"] / 1e3, rel=0.01)
    there, back = ([one["bus_gb_s"] for one in matched][way::2] for way in (0, 1))
    assert min(back) > 0.8 * max(there)
