"""Every finding, with a committed trace that shows it and one that does not."""

import gzip
import json

import pytest
from references import H200, OTHERS, ROOT, measured
from words import RETIRED

from tracereader import cli, expect
from tracereader.changes.catalogue import CHANGES
from tracereader.figures import summarize
from tracereader.findings import cheatsheet
from tracereader.findings.finding import Finding, Verdict
from tracereader.trace import read

SMALL, LARGE = "01_matmul_add/64_bf16_cold_eager", "01_matmul_add/4096_bf16_warm_eager"
RECORDED_AT_ONCE = f"{SMALL}_wait0_schedwarmup0"
ON_CPU = "../cpu/01_matmul_add/4096_bf16_warm_eager"
ADDMM, LARGE_COMPILED = f"{LARGE}_addmm", "01_matmul_add/4096_bf16_warm_compile"
GRAPH = f"{LARGE_COMPILED}_reduce-overhead"
LINEAR, LINEAR_COMPILED = (f"02_linear/1024x32x64_bf16_warm_{path}" for path in ("eager", "compile"))
MLP, MLP_COMPILED = (f"03_simple_mlp/64x128x768x3072_bf16_warm_{path}" for path in ("eager", "compile"))
MLP_SHAPES, LIGER = f"{MLP}_shapes", "03_kernels_mlp/64x128x768x3072_bf16_warm_eager"
NAIVE, IN_PLACE, FLEX, MATH, FLASH, CUDNN, EFFICIENT = (
    f"attention_{name}" for name in ("naive", "inplace", "flex", "math", "flash", "cudnn", "efficient")
)
TRAINING = "../nvidia-h200-x2/06_training/4x1024x1024x16_bf16_warm_eager"
DDP, FSDP = "ranks/ddp_straggler_rank0", "ranks/fsdp_rank0"


def a_longer_last_wait(document):
    """Make the cudaDeviceSynchronize after the last step take 10 ms."""
    last = max(
        (e for e in document["traceEvents"] if e["name"] == "cudaDeviceSynchronize" and "dur" in e),
        key=lambda e: e["ts"],
    )
    last["dur"] = 10_000


# Each row has a finding, the parameters of its prediction, a trace that shows it, and one that does not. A trace is a
# name, or a name and an edit of its events if no committed trace has the case.
TABLE = [
    # figures of steps
    ("regime_is", ("overhead-bound",), SMALL, LARGE),
    ("overhead_bound", (), SMALL, LARGE),
    ("gpu_bound", (), LARGE, SMALL),
    ("records_steps", (2, 3), SMALL, RECORDED_AT_ONCE),
    ("slow_first_step", (), LARGE, ON_CPU),
    ("first_step_is_wider", (), "memory_bound", LARGE),
    ("steps_are_alike", (), ON_CPU, LARGE),
    ("one_buffer_request", (), RECORDED_AT_ONCE, SMALL),
    ("buffer_request", (), RECORDED_AT_ONCE, SMALL),
    ("long_final_sync", (), (SMALL, a_longer_last_wait), SMALL),
    ("final_synchronization", (), LARGE, LINEAR),
    ("sync_idles_the_gpu", (), "changes/syncs/item", "changes/syncs/none"),
    # ops
    ("self_time_excludes_children", (), LINEAR, FSDP),
    ("cost_in_children", (), LINEAR, "memory_bound"),
    ("many_calls", (), "changes/small/loop", "changes/small/batched"),
    ("annotation_twice", (), SMALL, LARGE),
    ("dispatches", ("aten::linear", "aten::addmm"), LINEAR, MLP),
    ("resolves_to_a_product", (), LINEAR, LINEAR_COMPILED),
    ("ops_are", (3, "aten::mm", ("aten::linear",)), MLP_COMPILED, MLP),
    ("launch_nothing", ("aten::t",), LINEAR, LINEAR_COMPILED),
    ("views_launch_nothing", (), LINEAR, LINEAR_COMPILED),
    ("compiled_rows", (), MLP_COMPILED, MLP),
    ("no_compile_rows", (), MLP, MLP_COMPILED),
    ("dynamo_costs_more_than_the_op", ("aten::addmm",), LARGE_COMPILED, MLP_COMPILED),
    ("cache_lookup_in_every_step", (), MLP_COMPILED, MLP),
    ("recompiled", (), "../guard-failure", MLP_COMPILED),
    # GPU work
    ("kernels_are", (5,), MLP, MLP_COMPILED),
    ("occupancy_asked_once", (), LARGE, f"{TRAINING}_checkpoint"),
    ("gemm_is_heavy", (), LARGE, "changes/python/loop"),
    ("duration_varies", (), FLASH, LARGE),
    ("bias_copy_then_gemm", (), ADDMM, LARGE),
    ("copy_before_gemm", (), ADDMM, LARGE),
    ("addmm_without_add", (), LINEAR, LARGE),
    ("bias_in_the_epilogue", (), LINEAR, MLP),
    ("name_says_transposed", (), LINEAR, MATH),
    ("down_proj_has_another_tile", (), MLP, "changes/small/loop"),
    ("product_sizes", (8192, 768, 3072), MLP_SHAPES, "changes/small/loop"),
    ("fused_into_one", ("Inductor", "gelu", "mul"), MLP_COMPILED, MLP),
    ("pointwise_round_trip", (8192, 3072, 2), MLP_SHAPES, MLP_COMPILED),
    ("launch_settings", (256, 8192), LIGER, MLP),
    ("graph_replay_without_copies", (), "changes/vit/graph", GRAPH),
    ("graph_replay", (), GRAPH, LARGE),
    # attention
    ("unfused", (), NAIVE, FLASH),
    ("hidden_copy", (), NAIVE, IN_PLACE),
    ("mask_remade", (), MATH, FLASH),
    ("cast_before_product", (), MATH, NAIVE),
    ("on_cuda_cores", (), MATH, NAIVE),
    ("for_an_older_gpu", (), EFFICIENT, CUDNN),
    ("low_occupancy", (), FLASH, LINEAR),
    ("time_in_a_library", (), CUDNN, FLASH),
    ("sdpa_backend", (), FLASH, NAIVE),
    ("gpu_does", ("GEMM", "mul", "masked_fill", "softmax", "GEMM"), IN_PLACE, NAIVE),
    ("kernel_is", ("flash_fwd_kernel", "FlashAttention-2's"), FLASH, CUDNN),
    ("written_for_this_gpu", (), CUDNN, EFFICIENT),
    ("launched_by", ("cuLaunchKernelEx",), CUDNN, FLASH),
    ("occupancy_not_estimated", (), CUDNN, FLASH),
    ("sdpa_runs_on", ("flash",), FLASH, CUDNN),
    ("safe_softmax", (), MATH, NAIVE),
    ("scores_in_memory", (2,), "04_a_naive_attention/8x16x1024x64_bf16_warm_eager",
     "04_c_sdpa_attention/8x16x1024x64_bf16_warm_compile_flex"),
    # training
    ("recomputation", (), f"{TRAINING}_checkpoint", TRAINING),
    ("optimizer_for_loop", (), "train_item", TRAINING),
    ("starving", (), "changes/loader/inline", "changes/loader/workers"),
    ("backward_is_twice_the_forward", (), TRAINING, "train_item"),
    ("communication_is_hidden", (True,), DDP, FSDP),
    ("busy_while_waiting", (), DDP, FSDP),
]  # fmt: skip
OTHER = OTHERS[0].parent


@pytest.fixture(scope="module")
def shown_in(tmp_path_factory):
    """Return the function shown_in(name) or shown_in((name, edit)) -> Summary."""

    def summary(trace):
        name, edit = trace if isinstance(trace, tuple) else (trace, None)
        (path,) = (one.resolve() for folder in (H200, OTHER) if (one := folder / f"{name}.json.gz").exists())
        if not edit:
            return measured(path)
        document = json.loads(gzip.decompress(path.read_bytes()))
        edit(document)
        path = tmp_path_factory.mktemp("edited") / "edited.json"
        path.write_text(json.dumps(document))
        return summarize(read(path))

    return summary


@pytest.mark.parametrize(("name", "given", "shows", "does_not"), TABLE, ids=[row[0] for row in TABLE])
def test_one_trace_shows_a_finding_and_another_does_not(name, given, shows, does_not, shown_in):
    one, showing, other = cheatsheet.FINDINGS[name], shown_in(shows), shown_in(does_not)
    assert one.ask(showing, *given).holds is True
    assert not one.ask(other, *given).holds
    if one.where:
        assert one in [each for each, _ in cheatsheet.found(showing)]
        assert one not in [each for each, _ in cheatsheet.found(other)]


def test_the_table_has_every_finding_once():
    assert sorted(row[0] for row in TABLE) == sorted(cheatsheet.FINDINGS)


def test_every_finding_is_listed_by_the_name_of_its_judge():
    """Two findings of one name would hide each other."""
    declared = {id(one) for module in cheatsheet.MODULES for one in vars(module).values() if isinstance(one, Finding)}
    assert len(declared) == len(cheatsheet.FINDINGS)
    files = [*(ROOT / "tracereader/findings").glob("*.py")]
    assert sum(file.read_text().count("\n@finding(") for file in files) == len(declared), "a module is not in MODULES"


def test_every_finding_has_a_cheatsheet_row_or_a_prediction():
    for one in cheatsheet.FINDINGS.values():
        assert bool(one.where) == bool(one.see) == bool(one.means), one.name
        assert one.where or one.predicts, f"{one.name} shows nowhere"
        rows = [line for line in cheatsheet.markdown().splitlines() if f"| {one.see} | {one.means} |" in line]
        assert len(rows) == bool(one.where), one.name


@pytest.mark.parametrize(("name", "given"), [row[:2] for row in TABLE], ids=[row[0] for row in TABLE])
def test_a_prediction_can_be_read_from_its_record(name, given):
    one = cheatsheet.FINDINGS[name]
    if not one.predicts:
        assert not hasattr(expect, name), "a script that imports it could not predict it"
        assert expect.from_record({"guess": name}) is None
        return
    made = getattr(expect, name)(*given)
    again = expect.from_record(json.loads(json.dumps(made.record)))
    assert made.text and not RETIRED.search(made.text)
    assert made.record["guess"] == name, "the key and the name in older traces"
    assert (again.text, again.finding, json.dumps(again.record)) == (made.text, one, json.dumps(made.record))


def test_changes_that_findings_name_exist():
    named = {one.change for one in cheatsheet.FINDINGS.values() if one.change}
    assert named <= {one.name for one in CHANGES}
    assert not [one.name for one in cheatsheet.FINDINGS.values() if one.change and one.teaches]


def test_what_can_be_predicted_follows_from_the_declarations():
    assert {name for name in dir(expect) if name in cheatsheet.FINDINGS} == set(cheatsheet.PREDICTABLE)
    with pytest.raises(AttributeError, match="no finding 'many_calls' can be predicted"):
        expect.many_calls  # noqa: B018


def test_patterns_that_only_teach_are_shown_for_numbered_scripts(shown_in, capsys):
    """Other traces show them with --all or --only patterns."""
    ours, theirs = shown_in(LARGE), shown_in("memory_bound")
    for summary, words, expected in (
        (ours, (), True), (theirs, (), False), (theirs, ("--all",), True), (theirs, ("--only", "patterns"), True),
    ):  # fmt: skip
        taught = [one for one, _ in cheatsheet.found(summary) if one.teaches]
        assert taught
        assert cli.main([summary.source.trace, *words]) == 0
        said = " ".join(capsys.readouterr().out.split())
        assert all((f"{one.where}: {one.see}" in said) == expected for one in taught), (words, said)


def test_the_report_asks_only_for_patterns_that_it_may_show(monkeypatch, shown_in, capsys):
    """Judging a pattern may take a pass over all calls of a step."""
    theirs, asked = shown_in("memory_bound"), []
    monkeypatch.setattr(Finding, "ask", lambda self, summary: asked.append(self) or Verdict(False, ""))
    assert cli.main([theirs.source.trace]) == 0
    assert asked
    assert not [one.name for one in asked if one.teaches or one.said_above]
    asked.clear()
    assert cli.main([theirs.source.trace, "--all"]) == 0
    assert asked == cheatsheet.CHEATSHEET
    capsys.readouterr()
