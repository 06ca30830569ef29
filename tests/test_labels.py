"""torch's own annotations are distinguished from the user's, in one place for the whole reader."""

import gzip
import json
import re

import pytest
from references import ROOT

from tracereader.figures import summarize
from tracereader.figures.places import phases
from tracereader.trace import labels, read

FSDP = next((ROOT / "traces/reference/nvidia-h200-x2/06_training").glob("*fsdp*rank0.json.gz"))
COLD = ROOT / "traces/reference/cpu/01_matmul_add/64_bf16_cold_compile.json.gz"
USERS = ("forward", "backward", "optimizer", "my_step", "sdpa_fwd", "Forward pass", "nccl", "step 3", "FSDP")
PHASES = ("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", "Optimizer.step#AdamW.step",
          "Optimizer.zero_grad#SGD.zero_grad", "DistributedDataParallel.forward")  # fmt: skip
OTHERS = ("ProfilerStep#12", "FSDP::root_pre_forward", "FSDP::all_gather (blocks.3)", "nccl:_all_gather_base",
          "gloo:all_reduce", "FullyShardedDataParallel._pre_forward", "## Call CompiledFxGraph fabc ##",
          "Torch-Compiled Region: 0/1", "TorchDynamo Cache Lookup", "backend_compile (dynamo_timed)",
          "dynamo_data: compile_id=0/0", "AOTDispatcher Runtime Wrapper Prologue")  # fmt: skip


@pytest.mark.parametrize(("names", "own", "phase"), [(USERS, 0, 1), (PHASES, 1, 1), (OTHERS, 1, 0)])
def test_the_origin_of_an_annotation(names, own, phase):
    assert [labels.is_torchs_own(name) for name in names] == [bool(own)] * len(names)
    assert [labels.is_phase(name) for name in names] == [bool(phase)] * len(names)


def without_users_labels(path, tmp_path):
    """Return the same run without the user's record_function."""
    found = json.loads(gzip.decompress(path.read_bytes()))
    found["traceEvents"] = [
        event for event in found["traceEvents"]
        if event.get("cat") not in ("user_annotation", "gpu_user_annotation")
        or re.match(r"ProfilerStep#|FSDP::|nccl:|Optimizer[.]|##|.*(dynamo_timed|compile_id)", event["name"])
    ]  # fmt: skip
    (tmp_path / "unlabelled.json").write_text(json.dumps(found))
    return read(tmp_path / "unlabelled.json")


def test_a_step_without_user_annotations_has_none(tmp_path):
    """The first annotation in an FSDP step is FSDP::root_pre_forward, which is not the user's."""
    trace = without_users_labels(FSDP, tmp_path)
    assert any(op.name == "FSDP::root_pre_forward" for step in trace.steps for op in step.walk())
    summary = summarize(trace)
    assert summary.cpu.label is None
    assert {op.name.split("#")[0] for step in trace.steps for op in phases(step)} <= {
        "Optimizer.step", "Optimizer.zero_grad",
    }  # fmt: skip


def test_compilation_records_are_no_phase(tmp_path):
    trace = without_users_labels(COLD, tmp_path)
    assert any("CompiledFx" in name or "compile_id" in name for name in trace.op_names)
    assert summarize(trace).cpu.label is None
    assert not [op.name for step in trace.steps for op in phases(step)]


def test_a_users_annotation_inside_one_of_torchs_own_is_a_phase(tmp_path):
    def mark(name, ts, dur):
        return {"ph": "X", "cat": "user_annotation", "name": name, "pid": 1, "tid": 1, "ts": ts, "dur": dur}

    events = [mark("ProfilerStep#1", 0, 100), mark("FSDP::pre_forward", 1, 50), mark("mine", 5, 20),
              mark("FSDP::post_forward", 60, 30), mark("other", 61, 5)]  # fmt: skip
    (tmp_path / "made.json").write_text(json.dumps({"traceEvents": events}))
    (step,) = read(tmp_path / "made.json").steps
    assert [op.name for op in phases(step)] == ["mine", "other"]


def test_calls_of_collectives():
    assert labels.collective_on_cpu("gloo:all_reduce") == ("gloo", "all_reduce")
    assert labels.collective_on_cpu("nccl:all_reduce") is None
    asked = {"nccl:all_reduce": "all_reduce", "c10d::allreduce_": "allreduce_", "aten::mm": None,
             "_c10d_functional::all_gather_into_tensor": "all_gather_into_tensor"}  # fmt: skip
    assert {name: labels.asks_for_collective(name) for name in asked} == asked
