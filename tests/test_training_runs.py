"""Rung 6: a training step, on one and on two ranks; the end of a run of several ranks, and its files."""

import gzip
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from dataclasses import replace
from multiprocessing import resource_sharer
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, names, only_trace

from common import harness
from common.flags import tag_of
from tracereader.figures import summarize
from tracereader.show.predictions import predictions_of
from tracereader.trace import read

TINY = ("--layers", "2", "--dim", "16", "--seq", "8", "--dtype", "fp32")
CPU = ("--device", "cpu")
LABELS = ("forward", "backward", "optimizer")


def error_of(document):
    return document["lesson"]["facts"]["relative_error"]


def labelled(document):
    """Return the slices of the three annotations in the order of their starts."""
    found = [event for event in document["traceEvents"] if event.get("cat") == "user_annotation"]
    return [event for event in sorted(found, key=lambda event: event["ts"]) if event["name"] in LABELS]


def test_a_step_is_forward_backward_and_optimizer(run, tmp_path):
    assert run("06_training", *TINY, *CPU) == 0
    document = only_trace(tmp_path)
    assert [one["name"] for one in labelled(document)] == [*LABELS] * 3
    losses = document["lesson"]["facts"]["training"]["losses"]
    assert losses == sorted(losses, reverse=True) and losses[0] > losses[-1] + 0.05, "it learns"
    model = 2 * 32_000 * 16 + 8 * 16 + 2 * 16 + 2 * (12 * 16**2 + 13 * 16)
    assert document["lesson"]["facts"]["training"]["parameters"] == model


@pytest.mark.parametrize(
    ("flags", "shows"),
    [
        (("--accumulate", "2", "--for-loop"), {"aten::gelu": 2 * 2, "aten::sqrt": 2 * 12 + 5}),
        (("--checkpoint",), {"aten::gelu": 2 * 2}),
        (("--fused",), {"aten::_fused_adamw_": 1, "aten::gelu": 2}),
        (("--foreach",), {"aten::_foreach_sqrt": 1}),
        (("--optimizer", "sgd"), {"aten::sqrt": 0}),
        (("--loader", "1", "--workers", "0"), {"enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__": 1}),
        (("--loader", "0"), {"enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__": 1}),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, tuple) else "",
)
def test_each_way_shows_in_the_trace_and_trains_alike(run, tmp_path, flags, shows):
    assert run("06_training", *TINY, *CPU, *flags) == 0
    document = only_trace(tmp_path)
    seen = names(document, "cpu_op") + names(document, "user_annotation")
    assert {name: seen.count(name) for name in shows} == {name: 3 * count for name, count in shows.items()}
    if "sgd" not in flags:
        assert error_of(document) < harness.TOLERANCE[torch.float32]


def test_compiled_it_trains_alike(run, tmp_path):
    assert run("06_training", *TINY, *CPU, "--layers", "1", "--compile") == 0
    assert error_of(only_trace(tmp_path)) < harness.TOLERANCE[torch.float32]


def test_a_wrong_gradient_is_refused(run, scripts, tmp_path, capsys, monkeypatch):
    """The forward is right, and the backward's result is wrong."""
    monkeypatch.setattr(scripts["06_training"], "checkpoint", lambda block, x, use_reentrant: block(x.detach()))
    assert run("06_training", *TINY, *CPU, "--checkpoint") == 1
    assert "does not compute what plain training computes" in capsys.readouterr().err
    assert not list(tmp_path.rglob("*.json"))


def plain(scripts, world_size, *flags):
    """Return the losses of the plain step on this many ranks' batches."""
    script = scripts["06_training"]
    args = harness.prepare(script.flags([*TINY, *CPU, *flags]))
    return script.plain_losses(replace(args, ranks=SimpleNamespace(world_size=world_size)), script.CHECKED_STEPS)


def test_the_check_detects_gradients_that_are_not_exchanged(scripts):
    alone, two = plain(scripts, 1), plain(scripts, 2)
    assert harness.relative_error(alone, two) > 10 * harness.TOLERANCE[torch.float32]


def test_the_default_sizes_are_smaller_on_a_cpu(scripts):
    script = scripts["06_training"]
    small, told = (harness.prepare(script.flags([*CPU, *flags])) for flags in ((), ("--layers", "12", "--batch", "8")))
    assert (small.layers, small.dim, small.seq, small.batch) == (2, 128, 128, 2)
    assert (told.layers, told.dim, told.batch) == (12, 128, 8)
    assert small.tag == "2x128x128x2_bf16_cold_eager" + "_cpu" * torch.cuda.is_available()


@pytest.mark.parametrize(
    ("flags", "ranks", "said"),
    [
        (("--parallel", "ddp"), None, "several processes"),
        ((), "0 2", "choose one"),
        (("--slow", "1"), None, "--slow 1 names a rank: run it under torchrun"),
        (("--parallel", "ddp", "--slow", "2"), "0 2", "no such rank of 2"),
        (("--parallel", "fsdp", "--bucket-mb", "1"), "0 2", "belongs to --parallel ddp"),
        (("--parallel", "ddp"), "2 2", "ranks count from 0"),
        (("--fused", "--for-loop"), None, "choose one"),
        (("--no-pin",), None, "need --loader"),
        (("--dtype", "fp16"), None, "loss scaling"),
    ],
)
def test_refused(run, tmp_path, capsys, monkeypatch, flags, ranks, said):
    for name, value in zip(("RANK", "WORLD_SIZE"), ranks.split() if ranks else (), strict=False):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", "1")
    assert run("06_training", *flags) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line
    assert not list(tmp_path.iterdir())


def free_port():
    """Return a port that the system gives to no other program for a minute, because a connection to it has just ended.

    A rank may listen on it."""
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(("localhost", 0))
        server.listen()
        port = server.getsockname()[1]
        # The end that closes first is the one that the system keeps for late packets.
        with socket.create_connection(("localhost", port)), server.accept()[0]:
            return port


def test_a_free_port_stays_free_until_a_rank_listens():
    port = free_port()
    with socket.socket() as another, pytest.raises(OSError, match="in use"):
        another.bind(("localhost", port))
    with socket.socket() as rank:
        rank.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        rank.bind(("localhost", port))
        rank.listen()


def by_torchrun(folder, *flags):
    """Return the traces and the output of two ranks that torchrun starts."""
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(free_port()),
         "06_training.py", *TINY, *flags, "--out", str(folder)],
        cwd=ROOT, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    files = sorted(folder.rglob("*.json"))
    assert [file.stem.rpartition("_")[2] for file in files] == ["rank0", "rank1"]
    assert len(list(folder.rglob("*.*"))) == 4, "two traces, two tables"
    return [json.loads(file.read_text()) for file in files], done


def check_two_ranks(documents, done, expected):
    for rank, document in enumerate(documents):
        where = document["distributedInfo"]
        assert (where["rank"], where["world_size"]) == (rank, 2)
        assert [one["name"] for one in labelled(document)] == [*LABELS] * 3
        assert document["lesson"]["facts"]["training"]["losses"] == pytest.approx(expected.tolist(), rel=1e-4)
    assert error_of(documents[0]) < harness.TOLERANCE[torch.float32] and error_of(documents[1]) is None
    assert done.stderr.strip() == "", "nothing but what torchrun says of itself"
    assert done.stdout.count("matches plain training") == 1
    assert done.stdout.count("2 of 2 ranks") == 1


def test_two_ranks_of_ddp(scripts, tmp_path):
    documents, done = by_torchrun(tmp_path, *CPU, "--parallel", "ddp", "--slow", "1", "--bucket-mb", "1000")
    check_two_ranks(documents, done, plain(scripts, 2))
    assert [names(one, "user_annotation").count("gloo:all_reduce") for one in documents] == [3, 3], "one bucket"
    products = [names(one, "cpu_op").count("aten::mm") for one in documents]
    assert products[1] == products[0] + 3 * 60


@pytest.mark.exhaustive
def test_two_ranks_of_fsdp(scripts, tmp_path):
    documents, _ = by_torchrun(tmp_path, *CPU, "--parallel", "fsdp", "--checkpoint", "--accumulate", "2")
    expected = plain(scripts, 2, "--accumulate", "2")
    assert len(expected) == scripts["06_training"].CHECKED_STEPS
    for document in documents:
        losses = document["lesson"]["facts"]["training"]["losses"]
        assert losses[: len(expected)] == pytest.approx(expected.tolist(), rel=1e-4)
        # Of the root and of each of two blocks, after the last of two backwards.
        assert names(document, "cpu_op").count("c10d::_reduce_scatter_base_") == 3 * 3
    assert error_of(documents[0]) < harness.TOLERANCE[torch.float32]


# A rank of a run that goes wrong at one point of it: the script itself, and in it one name that does something else.
GOES_WRONG = """
import os, sys
sys.argv = ["06_training.py", *sys.argv[1:]]
import tracereader.command
from pathlib import Path
from common import harness
from common.flags import BadInput, load_script
script = load_script(Path("06_training.py"), sys.argv[1:])
place, name, before = {"a step": (script, "record_function", 8), "writing": (harness, "finish_trace", 0)}[WHEN]
plain, calls = getattr(place, name), []
def wrong(*args, **more):
    calls.append(args)
    if len(calls) <= before:
        return plain(*args, **more)
    if HOW == "dies":
        os.kill(os.getpid(), 9)
    raise BadInput("it cannot go on")
if os.environ["RANK"] == WHO:
    setattr(place, name, wrong)
sys.exit(script.main())
"""


def started(rank, port, folder, *flags, program=("06_training.py",)):
    where = {
        "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "localhost", "MASTER_PORT": port,
        "OMP_NUM_THREADS": 1,
    }  # fmt: skip
    return subprocess.Popen(
        [sys.executable, *program, *TINY, "--parallel", "ddp", *flags, "--out", str(folder)], cwd=ROOT, text=True,
        env=os.environ | {name: str(value) for name, value in where.items()}, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )  # fmt: skip


def check_a_rank_that_ends(folder, who, when, how, *flags):
    program = GOES_WRONG.replace("WHO", repr(str(who))).replace("WHEN", repr(when)).replace("HOW", repr(how))
    port = free_port()
    ranks = [started(rank, port, folder, *flags, program=("-c", program)) for rank in (0, 1)]
    said = [rank.communicate(timeout=120) for rank in ranks]
    other = 1 - who
    if how == "dies":
        assert ranks[who].returncode == -9
        told = f"06_training.py: rank {who} has died; no file was written\n"
    else:
        assert ranks[who].returncode == 2
        assert said[who][1] == f"06_training.py: rank {who}: it cannot go on\n"
        told = f"06_training.py: rank {who} has failed: it cannot go on; no file was written\n"
    assert ranks[other].returncode == 1
    assert said[other] == ("", told)
    left = list((folder / "06_training").iterdir())
    # A rank that is killed while it writes leaves its unfinished folder, which the next run clears.
    assert [file.name[:12] for file in left] == [".unfinished-"] * (when == "writing")


@pytest.mark.parametrize(
    ("who", "when", "how"),
    [
        (0, "a step", "dies"),
        pytest.param(1, "writing", "dies", marks=pytest.mark.exhaustive),
        pytest.param(1, "a step", "refuses", marks=pytest.mark.exhaustive),
    ],
)
def test_a_rank_that_ends_ends_the_other(tmp_path, who, when, how):
    check_a_rank_that_ends(tmp_path, who, when, how, *CPU, "--loader", "0")


def test_a_loaders_worker_prints_nothing_after_the_run_ended(scripts, monkeypatch, capfd):
    """The worker waits in a thread for the process that fetches a batch's file descriptor."""
    interrupt = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    try:
        scripts["06_training"].leave_the_end_to_the_run(0)
    finally:
        signal.signal(signal.SIGINT, interrupt)
    sharer = resource_sharer._ResourceSharer()
    fetched = threading.Event()
    address, _ = sharer.register(lambda connection, process: None, fetched.set)
    with socket.socket(socket.AF_UNIX) as run:
        run.connect(address)
    with resource_sharer._ResourceSharer.get_connection((address, 1)):  # which is answered after the one that went
        assert fetched.wait(10)
    sharer.stop(timeout=10)
    assert capfd.readouterr().err == ""


@pytest.mark.exhaustive
def test_a_rank_that_never_starts_is_named(tmp_path):
    waiting = [started(rank, free_port(), tmp_path, *CPU, "--timeout", "1") for rank in (0, 1)]
    said = [rank.communicate(timeout=60) for rank in waiting]
    assert [rank.returncode for rank in waiting] == [1, 1]
    assert said[0] == ("", "06_training.py: rank 0: rank 1 has not started within 1 s; nothing was run\n")
    assert said[1][1].startswith("06_training.py: rank 0 has not started within 1 s: nobody answers at localhost:")
    assert said[1][1].count("\n") == 1
    assert not list(tmp_path.rglob("*.*"))


@pytest.mark.gpu
@pytest.mark.parametrize("flags", [(), ("--checkpoint",), ("--fused",), ("--compile",), ("--loader", "1")])
def test_on_a_gpu(run, tmp_path, capfd, flags):
    assert run("06_training", "--layers", "2", "--batch", "2", *flags) == 0
    assert capfd.readouterr().err == ""
    document = only_trace(tmp_path)
    assert [one["name"] for one in labelled(document)] == [*LABELS] * 3
    assert (error_of(document) is None) == (not flags)
    if "--loader" in flags:
        assert any("Pinned" in name for name in names(document, "gpu_memcpy"))


two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


@pytest.mark.gpu
@two_gpus
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_two_ranks_on_two_gpus(scripts, tmp_path, parallel):
    documents, done = by_torchrun(tmp_path, "--device", "cuda", "--parallel", parallel)
    check_two_ranks(documents, done, plain(scripts, 2, "--device", "cuda"))
    assert all(any("nccl" in name for name in names(one, "kernel")) for one in documents)


@pytest.mark.gpu
@two_gpus
def test_a_rank_that_dies_on_a_gpu_ends_the_other(tmp_path):
    """NCCL alone would continue to wait."""
    check_a_rank_that_ends(tmp_path, 1, "a step", "dies", "--device", "cuda")


RECORDED = ROOT / "traces/reference/nvidia-h200-x2/06_training"


def test_the_references_have_the_names_of_their_runs(scripts, monkeypatch):
    text = (ROOT / "traces/reference/record-training.sh").read_text()
    size = re.search(r'^size="(.*)"$', text, re.M)[1]
    expected = set()
    for launched, runs in enumerate(reversed(re.findall(r"<<'RUNS'\n(.*?)RUNS\n", text, re.S))):
        for name, value in {"RANK": 0, "WORLD_SIZE": 2, "MASTER_ADDR": "localhost", "MASTER_PORT": 1}.items():
            if launched:
                monkeypatch.setenv(name, str(value))
        tags = [tag_of(scripts["06_training"].flags([*size.split(), *flags.split()])) for flags in runs.splitlines()]
        expected |= {tag + rank for tag in tags for rank in (("_x2_rank0", "_x2_rank1") if launched else ("",))}
    assert {file.name.removesuffix(".json.gz") for file in RECORDED.glob("*.gz")} == expected
    assert sum(file.stat().st_size for file in RECORDED.iterdir()) < 3e6


@pytest.mark.parametrize(
    ("run", "hidden"), [("ddp", True), ("ddp_bucket10000", False), ("ddp_slow1", None), ("fsdp", None)]
)
def test_communication_in_the_reference_traces(run, hidden):
    """The time of a collective's kernel, alone or beside another kernel, comes from the raw events."""
    file = RECORDED / f"4x1024x1024x16_bf16_warm_eager_{run}_x2_rank0.json.gz"
    events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    kernels = [one for one in events if one.get("cat") == "kernel"]
    first = min(one["ts"] for one in kernels)

    def ticks(chosen):  # of 0.1 µs
        return {
            tick for one in chosen
            for tick in range(round((one["ts"] - first) * 10), round((one["ts"] + one["dur"] - first) * 10))
        }  # fmt: skip

    sent = ticks(one for one in kernels if one["name"].startswith("nccl"))
    alone = sent - ticks(one for one in kernels if not one["name"].startswith("nccl"))
    trace = read(file)
    summary = summarize(trace)
    assert summary.gpu.exposed_communication_us == pytest.approx(len(alone) / 10, rel=0.01)
    assert (len(alone) < len(sent) / 2) is hidden or hidden is None
    verdicts = {one.finding.name: one.ask(summary) for one in predictions_of(trace)}
    if hidden is not None:
        assert verdicts["communication_is_hidden"].holds
        assert f"{len(sent) / 1e4:.1f} ms of collectives" in verdicts["communication_is_hidden"].evidence
    if run == "ddp_slow1":
        assert verdicts["busy_while_waiting"].holds and summary.busy_share > 0.95


def test_phases_in_the_reference_traces():
    """GPU time counts for the annotation in which a kernel was launched, by the raw events."""
    file = RECORDED / "4x1024x1024x16_bf16_warm_eager.json.gz"
    document = json.loads(gzip.decompress(file.read_bytes()))
    events = document["traceEvents"]
    launches = {
        one["args"]["correlation"]: one["ts"] for one in events if one.get("cat") in ("cuda_runtime", "cuda_driver")
    }
    times = []
    for name in ("forward", "backward"):
        slices = [(one["ts"], one["ts"] + one["dur"]) for one in labelled(document) if one["name"] == name]
        times.append(
            sum(
                one["dur"] for one in events if one.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")
                and any(start <= launches[one["args"]["correlation"]] < end for start, end in slices)
            )
        )  # fmt: skip
    assert 1.7 < times[1] / times[0] < 2.3
    trace = read(file)
    (verdict,) = [
        one.ask(summarize(trace)) for one in predictions_of(trace)
        if one.finding.name == "backward_is_twice_the_forward"
    ]  # fmt: skip
    assert verdict.holds
    found = re.search(r"([\d.]+) times as much", verdict.evidence)[1]
    assert float(found) == pytest.approx(times[1] / times[0], rel=0.02)
