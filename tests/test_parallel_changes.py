"""Changes of data parallel training, recorded before and after them on two H200s.

tests/traces/h200-x2/accumulated_* and communicated_* were recorded by traces/reference/record_rank_changes.py with
NCCL_P2P_DISABLE=1, communicated_ddp_nvlink without it. Each file has the step's measured time without the profiler.
"""

import pytest
from references import ROOT, proposals
from test_ranks import as_json, changed, document, end, marks, slices

from tracereader import cli
from tracereader.changes import ranks as rank_changes
from tracereader.changes.catalogue import each_priced
from tracereader.changes.context import Case
from tracereader.figures import summarize
from tracereader.findings.finding import duration, size
from tracereader.replay import graph_of
from tracereader.show.ranks import opened
from tracereader.show.view import View
from tracereader.trace import read

FOLDER = ROOT / "tests/traces/h200-x2"
PAIRS = (
    ("accumulated_ddp_every", "reduce_once", "accumulated_ddp_once"),
    ("accumulated_fsdp_every", "reduce_once", "accumulated_fsdp_once"),
    ("accumulated_fsdp1_every", "reduce_once", "accumulated_fsdp1_once"),
    ("buffers_sent", "keep_buffers", "buffers_kept"),
    ("communicated_ddp_float32", "in_two_bytes", "communicated_ddp_bf16"),
    ("communicated_fsdp_float32", "in_two_bytes", "communicated_fsdp_bf16"),
)
FORWARDS = ("DistributedDataParallel.forward", "FSDP::root_pre_forward")
REDUCERS = ("torch.distributed.ddp.reducer::", "torch::distributed::reducer::")


def ranks_of(job):
    return sorted((FOLDER / job).glob("*.json.gz"))


def proposed(job, capsys):
    return {one["change"]: one for one in as_json(capsys, *ranks_of(job))["opportunities"]}


def on_cpu(events, start, stop):
    cats = ("cpu_op", "user_annotation")
    return sorted((e for e in events if e["cat"] in cats and start <= e["ts"] < stop), key=lambda e: e["ts"])


def is_inside(one, others):
    return any(e["tid"] == one["tid"] and e["ts"] <= one["ts"] < end(e) for e in others)


def launched_in(events, calls):
    """Return the GPU activities whose launches lie in these calls."""
    ids = {
        e["args"]["correlation"]
        for e in events
        if e["cat"] in ("cuda_runtime", "cuda_driver") and "correlation" in e.get("args", {}) and is_inside(e, calls)
    }
    on_gpu = ("kernel", "gpu_memcpy", "gpu_memset")
    return [e for e in events if e["cat"] in on_gpu and e["args"]["correlation"] in ids]


def repetitions(events, step):
    """Return the calls of a step that only one of its backward or forward passes needs."""
    inside = on_cpu(events, step["ts"], end(step))
    first, second, *_, last = [e["ts"] for e in inside if e["name"] in FORWARDS]
    update = next(e["ts"] for e in inside if e["name"].startswith("Optimizer.step#"))
    for_backward = [e for e in inside if e["name"].startswith(("FSDP::pre_backward ", "FSDP::backward_prefetch "))]
    reduces = ("c10d::allreduce_", "FSDP::post_backward_reduce ", *REDUCERS)
    gathers = ("FSDP::all_gather ", "FSDP::all_gather_copy_out ")
    return [
        e
        for e in inside
        if (e["name"].startswith(reduces) and first <= e["ts"] < last)
        or (e["name"].startswith(gathers) and second <= e["ts"] < update and not is_inside(e, for_backward))
    ]


@pytest.mark.parametrize(("before", "change", "after"), PAIRS)
def test_the_step_after_a_change_is_predicted_as_measured(before, change, after, capsys):
    found = proposed(before, capsys)[change]
    was, now = (max(document(path)["unprofiled_step_us"] for path in ranks_of(job)) for job in (before, after))
    assert found["unprofiled_step_us"] == pytest.approx(was, rel=0.01)
    assert found["unprofiled_step_us_after"] == pytest.approx(now, rel=0.16) and now < 0.96 * was
    assert change not in proposed(after, capsys)


@pytest.mark.parametrize("job", ["accumulated_ddp_every", "accumulated_fsdp_every"])
def test_what_all_but_one_backward_pass_repeat_is_summed(job):
    path = ranks_of(job)[0]
    (found,) = (one for one in proposals(path) if one.change == "reduce_once")
    events, said = slices(path), []
    for step in marks(events):
        calls = repetitions(events, step)
        assert len([e for e in on_cpu(events, step["ts"], end(step)) if e["name"] in FORWARDS]) == 4
        work = launched_in(events, calls)
        communication = sum(e["dur"] for e in work if "nccl" in e["name"])
        others = sum(e["dur"] for e in work) - communication
        said.append(f"take {duration(communication)} of communication and {duration(others)} of copies and scaling")
    assert any(found.evidence.endswith(one) for one in said)
    does = "gathers the parameters and reduces" if "fsdp" in job else "reduces"
    assert found.evidence.startswith(f"each of 4 passes before an optimizer step {does} the gradients; ")


def test_the_older_fsdp_reduces_the_gradients_of_each_block_in_each_pass():
    """FullyShardedDataParallel annotates the forward pass of each block and of the whole model."""
    path = ranks_of("accumulated_fsdp1_every")[0]
    (found,) = (one for one in proposals(path) if one.change == "reduce_once")
    events, said = slices(path), []
    for step in marks(events):
        calls = [
            e for e in on_cpu(events, step["ts"], end(step)) if e["name"].startswith("c10d::_reduce_scatter_base_")
        ]
        assert len(calls) == 4 * 6
        communication = sum(e["dur"] for e in launched_in(events, calls[:-6]) if "nccl" in e["name"])
        said.append(f"the repetitions take {duration(communication)} of communication")
    assert found.evidence.startswith("each of 4 passes before an optimizer step reduces the gradients; ")
    assert any(found.evidence.endswith(one) for one in said)
    assert found.how == "model.no_sync() around all passes but the last, as far as memory allows"


def without(found, name):
    found["traceEvents"] = [e for e in found["traceEvents"] if not e["name"].startswith(name)]


def update_before_each_pass(found):
    """Add an optimizer step before each forward pass, as where two models take turns."""
    forwards = [e for e in found["traceEvents"] if e["name"] in FORWARDS and e["cat"] == "user_annotation"]
    found["traceEvents"] += [e | {"name": "Optimizer.step#SGD.step", "ts": e["ts"] - 5, "dur": 4} for e in forwards]


def reduced_in_the_last_pass(found):
    """Remove the all-reduces of each step but those after its last forward pass: another model's passes, perhaps."""
    events = [e for e in found["traceEvents"] if e.get("ph") == "X"]
    gone = {id(e) for step in marks(events) for e in repetitions(events, step) if e["name"] == "c10d::allreduce_"}
    found["traceEvents"] = [e for e in found["traceEvents"] if id(e) not in gone]


def as_many_updates_as_passes(found):
    """Add three optimizer steps after each one: those of four models, perhaps."""
    updates = [e for e in found["traceEvents"] if e["name"].startswith("Optimizer.step#") and e.get("ph") == "X"]
    for number in range(1, 4):
        found["traceEvents"] += [e | {"ts": end(e) + 3 * number, "dur": 1} for e in updates]


@pytest.mark.parametrize(
    "change",
    [
        lambda found: without(found, "Optimizer.step#"),
        update_before_each_pass,
        reduced_in_the_last_pass,
        as_many_updates_as_passes,
    ],
    ids=[
        "no optimizer step is recorded",
        "an optimizer step before each pass",
        "only the last pass reduces",
        "as many optimizer steps as passes",
    ],
)
def test_reductions_that_may_all_be_needed_stay(tmp_path, change):
    path = changed(tmp_path, ranks_of("accumulated_ddp_every")[0], change)
    assert "reduce_once" not in {one.change for one in proposals(path)}


def test_parameters_that_are_gathered_in_each_pass_are_named_where_gradients_are_reduced_once(tmp_path):
    """set_requires_gradient_sync(False) is there, and set_reshard_after_backward(False) is not."""
    path = ranks_of("accumulated_fsdp_every")[0]

    def reduced_once(found):
        events = [e for e in found["traceEvents"] if e.get("ph") == "X"]
        reduces = [
            e
            for step in marks(events)
            for e in repetitions(events, step)
            if e["name"].startswith("FSDP::post_backward_reduce ")
        ]
        calls = [e for e in events if e["name"] == "c10d::_reduce_scatter_base_" and is_inside(e, reduces)]
        gone = {id(e) for e in (*reduces, *calls)}
        found["traceEvents"] = [e for e in found["traceEvents"] if id(e) not in gone]

    (found,) = (one for one in proposals(changed(tmp_path, path, reduced_once)) if one.change == "reduce_once")
    assert found.title == "gather parameters once per optimizer step"
    assert found.evidence.startswith("each of 4 passes before an optimizer step gathers the parameters; ")
    assert found.how.startswith("model.set_reshard_after_backward(False) for all passes but the last")
    said = []
    events = slices(path)
    for step in marks(events):
        gathers = [e for e in repetitions(events, step) if e["name"].startswith("FSDP::all_gather")]
        communication = sum(e["dur"] for e in launched_in(events, gathers) if "nccl" in e["name"])
        said.append(f"the repetitions take {duration(communication)} of communication and ")
    assert any(one in found.evidence for one in said)


def test_parameters_of_several_models_with_one_backward_pass_are_needed(tmp_path):
    """Two towers that are sharded alike: each forward pass gathers its own parameters."""

    def one_backward(found):
        events = [e for e in found["traceEvents"] if e.get("ph") == "X"]
        gone = set()
        for step in marks(events):
            *_, last = [e["ts"] for e in on_cpu(events, step["ts"], end(step)) if e["name"] in FORWARDS]
            in_backward = ("FSDP::post_backward", "FSDP::pre_backward", "FSDP::backward_prefetch")
            gone |= {id(e) for e in on_cpu(events, step["ts"], last) if e["name"].startswith(in_backward)}
            calls = [e for e in events if e["name"] == "c10d::_reduce_scatter_base_"]
            gone |= {id(e) for e in calls if step["ts"] <= e["ts"] < last}
        found["traceEvents"] = [e for e in found["traceEvents"] if id(e) not in gone]

    path = changed(tmp_path, ranks_of("accumulated_fsdp_every")[0], one_backward)
    assert "reduce_once" not in {one.change for one in proposals(path)}


def test_passes_before_an_optimizer_step_may_be_steps_of_the_profiler(tmp_path):
    """prof.step() after each backward pass: the step is a fourth, and three of four do not have to reduce."""

    def each_pass(found):
        events = [e for e in found["traceEvents"] if e.get("ph") == "X"]
        steps = marks(events)
        without(found, "ProfilerStep#")
        forwards = sorted(
            (e for e in events if e["name"] in FORWARDS and e["cat"] == "user_annotation"), key=lambda e: e["ts"]
        )
        begins = [e["ts"] - 1 for e in forwards if steps[0]["ts"] <= e["ts"] < end(steps[-1])]
        for number, (start, stop) in enumerate(zip(begins, [*begins[1:], end(steps[-1])], strict=True), 10):
            mark = {"name": f"ProfilerStep#{number}", "ts": start, "dur": round(stop - start, 3)}
            found["traceEvents"].append(steps[0] | mark)
        del found["unprofiled_step_us"]

    path = ranks_of("accumulated_ddp_every")[0]
    (whole,) = (one for one in proposals(path) if one.change == "reduce_once")
    trace = read(changed(tmp_path, path, each_pass))
    # As of the rank that sets the pace: alone, it would not show what fewer collectives save.
    priced = each_priced(Case(trace, summarize(trace), graph_of(trace)))
    (part,) = (one for one, _ in priced if one.change == "reduce_once")
    assert part.evidence.startswith("each of 4 passes before an optimizer step reduces the gradients; ")
    # The passes that update the weights keep their reduction, and the others lose nearly all of theirs.
    assert part.step_us == pytest.approx(whole.step_us / 4, rel=0.1) and part.step_us_after < 0.4 * part.step_us


@pytest.mark.parametrize("job", ["communicated_ddp_float32", "communicated_fsdp_float32"])
def test_the_bytes_of_float32_collectives_are_those_that_torch_describes(job, capsys):
    found = proposed(job, capsys)["in_two_bytes"]
    path = ranks_of(job)[int(found["evidence"].split()[1])]
    events, sums = slices(path), []
    for step in marks(events):
        described = [e["args"] for e in on_cpu(events, step["ts"], end(step)) if e["name"] == "record_param_comms"]
        wide = [one for one in described if one.get("dtype") == "Float"]
        sums.append(4 * sum(max(one["In msg nelems"], one["Out msg nelems"]) for one in wide))
    assert f"communicates {size(round(sum(sums) / len(sums)))} of float32" in found["evidence"]


def test_no_bf16_is_proposed_where_its_casts_cost_more_than_it_saves(capsys):
    """Over NVLink, DDP's hook made the step 7% longer: 13.3 ms instead of 12.4."""
    assert "in_two_bytes" not in proposed("communicated_ddp_nvlink", capsys)


def in_bf16(found):
    for event in found["traceEvents"]:
        if event.get("args", {}).get("dtype") == "Float":
            event["args"]["dtype"] = "BFloat16"


def by_the_program(found):
    """Rename autograd's records, so that the program itself calls the all-reduces."""
    for event in found["traceEvents"]:
        event["name"] = event["name"].replace("autograd::engine::evaluate_function: ", "mine: ")


def test_fsdps_float32_gradients_are_named_alone_where_its_parameters_are_in_bf16(tmp_path, capsys):
    """MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)."""

    def gathered_in_bf16(found):
        for event in found["traceEvents"]:
            if event.get("args", {}).get("Collective name") == "_allgather_base":
                event["args"]["dtype"] = "BFloat16"

    paths = [changed(tmp_path, path, gathered_in_bf16) for path in ranks_of("communicated_fsdp_float32")]
    (found,) = (one for one in as_json(capsys, *paths)["opportunities"] if one["change"] == "in_two_bytes")
    assert "of float32 gradients per step" in found["evidence"]
    assert "mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)" in found["try"]


@pytest.mark.parametrize("change", [in_bf16, by_the_program])
def test_bf16_is_not_proposed_for_other_collectives(tmp_path, change, capsys):
    paths = [changed(tmp_path, path, change) for path in ranks_of("communicated_ddp_float32")]
    assert "in_two_bytes" not in {one["change"] for one in as_json(capsys, *paths)["opportunities"]}


@pytest.mark.parametrize(("before", "change", "after"), PAIRS)
def test_two_jobs_show_which_change_was_made(before, change, after):
    first, second = (opened(ranks_of(job), View())[0] for job in (before, after))
    judged = {one for _, one, _ in PAIRS}
    for pair, shown in (((first, second), {change}), ((second, first), set()), ((first, first), set())):
        assert {one for one in judged if rank_changes.FOLLOWED[one](*pair)} == shown


def test_the_time_in_which_ddp_sends_buffers_is_summed():
    """Each forward pass begins with it: the buffers are flattened, sent, and copied back."""
    path = ranks_of("buffers_sent")[0]
    found = {one.change: one for one in proposals(path)}
    assert "cpu_tensors" not in found, "flattening makes views of tensors on the GPU"
    events, said = slices(path), []
    for step in marks(events):
        inside = on_cpu(events, step["ts"], end(step))
        (forward,) = (e for e in inside if e["name"] in FORWARDS)
        first = next(e["ts"] for e in inside if e["name"] == "aten::conv2d")
        ops = [e for e in inside if e["cat"] == "cpu_op" and forward["ts"] < e["ts"] < first]
        outermost = [e for e in ops if not any(is_inside(e, [other]) for other in ops if other is not e)]
        copies = [e for e in outermost if e["name"] == "aten::copy_"]
        said.append(
            f"sends {len(copies)} buffers of rank 0 to all ranks before each forward pass: "
            f"{duration(sum(e['dur'] for e in outermost))} of CPU time"
        )
    assert any(found["keep_buffers"].evidence.endswith(one) for one in said)


def test_a_job_that_reduces_in_each_pass_reads_in_80_columns(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert cli.main(list(map(str, ranks_of("accumulated_ddp_every")))) == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80
    assert "1 reduce gradients once per optimizer step" in text
    assert "2 communicate in bf16 instead of float32" in text
