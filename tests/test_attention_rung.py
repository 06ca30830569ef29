"""Rung 4: the ops, checks, refusals and output of each way to compute attention."""

import gzip
import json
import os
import re
import subprocess
import sys

import msgspec
import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT, names, only_trace
from references import H200

import sweep
from common import sdpa
from common.flags import tag_of
from tracereader import expect
from tracereader.figures import summarize
from tracereader.findings.attention import sdpa_backend
from tracereader.trace import read
from tracereader.trace.facts import run_facts

FLASH = "kernels-community/flash-attn2"
SMALL = ("--batch", "2", "--heads", "2", "--seq", "32", "--head_dim", "16")
ON_CPU = (*SMALL, "--device", "cpu")
RUNGS = ("04_a_naive_attention", "04_b_inplace_ops_attention", "04_c_sdpa_attention", "04_d_kernels_attention")
NAIVE, INPLACE, SDPA, KERNELS = RUNGS


@pytest.fixture
def local_flash(monkeypatch):
    monkeypatch.setenv("LOCAL_KERNELS", f"{FLASH}={ROOT / 'tests' / 'flash-attn2'}")


def calls(document):
    """Return the number of calls per step of each op, from the raw events."""
    found = names(document, "cpu_op")
    return {name: found.count(name) / 3 for name in found}


@pytest.mark.parametrize(
    ("script", "flags", "present", "absent"),
    [
        (NAIVE, (), {"aten::matmul": 2, "aten::masked_fill": 1, "aten::masked_fill_": 1, "aten::clone": 1}, ()),
        (INPLACE, (), {"aten::matmul": 2, "aten::masked_fill_": 1}, ("aten::masked_fill", "aten::clone")),
        (SDPA, (), {"aten::scaled_dot_product_attention": 1}, ("aten::matmul",)),
        (SDPA, ("--backend", "flash"), {"aten::_scaled_dot_product_flash_attention_for_cpu": 1}, ("aten::tril",)),
        (SDPA, ("--backend", "math"), {"aten::_scaled_dot_product_attention_math": 1, "aten::tril": 1}, ()),
    ],
)
def test_dispatch(run, tmp_path, capfd, script, flags, present, absent):
    assert run(script, *ON_CPU, *flags) == 0
    screen = capfd.readouterr()
    assert screen.err == ""
    assert float(re.search(r"matches fp32 math: relative error (\S+)", screen.out)[1]) < 2e-2
    found = calls(only_trace(tmp_path))
    assert {name: found.get(name) for name in present} == present
    assert not set(absent) & set(found)


@pytest.mark.parametrize(("script", "flags"), [(NAIVE, ("--compile",)), (SDPA, ("--backend", "flex"))])
def test_compiled(run, tmp_path, capfd, script, flags):
    assert run(script, *ON_CPU, *flags, "--dtype", "fp32") == 0
    assert "matches fp32 math" in capfd.readouterr().out
    trace = only_trace(tmp_path)
    assert "Torch-Compiled Region: 0/0" in calls(trace)
    assert trace["lesson"]["flags"]["compile"] == "default"
    assert "_warm_compile" in next(tmp_path.rglob("*.json")).stem


def test_a_compiled_backend_is_the_one_that_was_asked_for(run, tmp_path):
    """torch's cache of compiled graphs ignores the backend that is set around a graph."""
    assert run(SDPA, *ON_CPU, "--compile") == 0
    assert run(SDPA, *ON_CPU, "--compile", "--backend", "math") == 0
    ran = {file.stem: calls(json.loads(file.read_text())) for file in tmp_path.rglob("*.json")}
    fused = {name: "aten::_scaled_dot_product_flash_attention_for_cpu" in found for name, found in ran.items()}
    assert sorted(fused.items(), key=lambda one: len(one[0])) == [(min(ran, key=len), True), (max(ran, key=len), False)]


def test_each_way_warms_up_three_times_by_default(scripts):
    for script in RUNGS:
        assert scripts[script].flags([]).warmup == 3
        tags = [tag_of(scripts[script].flags(flags)) for flags in ([], ["--warmup", "0"], ["--warmup", "5"])]
        assert [tag.partition("bf16_")[2] for tag in tags] == ["warm_eager", "cold_eager", "warm_eager_warmup5"]
    assert scripts["01_matmul_add"].flags([]).warmup == 0, "the others stay cold"


def test_the_trace_stores_the_attention_problem(run, tmp_path):
    assert run(SDPA, *ON_CPU, "--backend", "flash") == 0
    facts = only_trace(tmp_path)["lesson"]["facts"]
    assert facts["attention"] == {
        "batch": 2, "heads": 2, "seq": 32, "head_dim": 16, "causal": True, "backend": "flash", "refused": {},
    }  # fmt: skip
    assert 0 < facts["relative_error"] < 2e-2


@pytest.mark.parametrize("at_a_time", [1, 2**8, 2**26])
def test_the_reference_is_causal_attention(monkeypatch, at_a_time):
    monkeypatch.setattr(sdpa, "REFERENCE_SCORES", at_a_time)
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 3, 17, 8) for _ in range(3))
    exact = F.scaled_dot_product_attention(q.double(), k.double(), v.double(), is_causal=True)
    assert (sdpa.in_fp32(q, k, v) - exact).abs().max() < 1e-6


def test_a_trace_names_the_backends_that_torch_refused():
    """On an H200, SDPA uses the memory-efficient kernel in fp32, because flash and cuDNN have none."""
    file = ROOT / "tests/traces/attention_refused.json.gz"
    refused = json.loads(gzip.decompress(file.read_bytes()))["lesson"]["facts"]["attention"]["refused"]
    assert set(refused) == {"flash", "cudnn"}
    evidence = sdpa_backend.ask(summarize(read(file))).evidence
    assert "efficient in 1 call" in evidence
    for name, (reason,) in refused.items():
        assert f"{name} refused: {reason.rstrip('.')}" in evidence


def test_torchs_own_reasons_against_a_backend():
    numbers = torch.ones(1, 1, 4, 8, dtype=torch.int8)
    (reason,) = sdpa.refused("flash", numbers, numbers, numbers)
    assert reason.startswith("Expected query, key and value to all be of dtype") and "signed char" in reason
    assert "Triggered internally" not in reason
    assert sdpa.refused("flash", *(torch.ones(1, 1, 4, 8) for _ in range(3))) is None
    assert sdpa.all_refused(numbers, numbers, numbers) == {"flash": [reason]}, "of the others it says nothing here"


@pytest.mark.parametrize(
    ("script", "flags", "says"),
    [
        (NAIVE, "--seq 1000000 --device cpu", "scores of 2 bytes each are 256.0 TB, twice over"),
        (NAIVE, "--seq 1000000 --device cpu --compile", "scores of 2 bytes each are 256.0 TB, and"),
        (INPLACE, "--seq 1000000 --device cpu", "a fused backend, which does not need them"),
        (SDPA, "--backend math --seq 1000000 --device cpu", "scores of 4 bytes each are 512.0 TB"),
        (SDPA, "--backend efficient --device cpu", "is for GPUs, and this run is on the CPU"),
        (SDPA, "--backend cudnn --device cpu", "is for GPUs, and this run is on the CPU"),
        (SDPA, "--backend best", "invalid choice"),
        (NAIVE, "--head_dim 0", "too small"),
        (KERNELS, "--device cpu", "04_c_sdpa_attention.py --backend flash"),
        (KERNELS, "--dtype fp32", "computes in fp16 and bf16, not in fp32"),
        (KERNELS, "--head_dim 257", "heads up to 256 wide"),
    ],
)
def test_refused_in_one_line(run, tmp_path, capsys, script, flags, says):
    assert run(script, *flags.split()) == 2
    screen = capsys.readouterr()
    assert says in screen.err
    assert (screen.err.count("\n"), screen.out) == (1, "")
    assert not list(tmp_path.rglob("*.*"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
@pytest.mark.parametrize("backend", ["efficient", "cudnn"])
def test_a_gpu_backend_without_a_gpu_is_refused(run, capsys, backend):
    assert run(SDPA, *SMALL, "--backend", backend) == 2
    assert f"torch has no {backend} backend for the CPU; flash and math run" in capsys.readouterr().err


def test_wrong_flags_are_refused_before_torch_is_loaded():
    program = (
        "import runpy, sys\n"
        "sys.argv = sys.argv[1:]\n"
        "try: runpy.run_path(sys.argv[0], run_name='__main__')\n"
        "except SystemExit as stop: print(stop.code, 'torch' in sys.modules)\n"
    )
    for words in ("04_c_sdpa_attention.py --backend cudnn --device cpu", "04_d_kernels_attention.py --dtype fp32"):
        done = subprocess.run([sys.executable, "-c", program, *words.split()], cwd=ROOT, capture_output=True, text=True)
        assert (done.stdout, done.stderr.count("\n")) == ("2 False\n", 1), done.stderr


@pytest.mark.parametrize("script", RUNGS)
def test_the_articles_call_is_the_default(run, capsys, script):
    assert run(script, "--help") == 0
    page = capsys.readouterr().out
    assert "Rung 4" in page and page.count(f"uv run {script}.py") == 2
    # What the article types is the default.
    for flag, default in (("--batch", 8), ("--heads", 16), ("--seq", 1024), ("--head_dim", 64)):
        assert re.search(rf"{flag} N +[a-z ]+ \({default}\)", page), flag


@pytest.mark.exhaustive
def test_an_unreachable_hub_is_an_error_with_the_packages_name(scripts):
    script = (
        "import os; from pathlib import Path\n"
        "from common import harness; from tracereader.command import command\n"
        "from kernels import get_kernel\n"
        "@command\n"
        "def main(argv=None):\n"
        f"    with harness.hub_errors({FLASH!r}): get_kernel({FLASH!r}, version=3)\n"
        "raise SystemExit(main())"
    )
    nowhere = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": "/nonexistent", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", script], env=os.environ | nowhere, cwd=ROOT, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert f"LOCAL_KERNELS={FLASH}=FOLDER" in done.stderr


def test_the_real_loader_takes_torchs_own_flash_attention(local_flash):
    from kernels import get_kernel

    package = get_kernel(FLASH, version=3)
    assert "PyTorch's own build of FlashAttention-2" in package.__doc__, "and it says that it is that"
    assert callable(package.flash_attn_func)


def test_several_ways_in_one_sweep(compile_afresh, tmp_path, capsys):
    ways = [f"{NAIVE}.py", f"{SDPA}.py --backend flash", f"{SDPA}.py --backend math"]
    flags = ["--seq", "64", "16", "--batch", "1", "--heads", "2", "--head_dim", "16", "--device", "cpu"]
    assert sweep.main([*ways, *flags, "--out", str(tmp_path)]) == 0
    screen = capsys.readouterr()
    assert screen.err == ""
    rows = [line for line in screen.out.splitlines() if re.search(r"seq\^-?\d", line)]
    assert [row.split("  ")[0] for row in rows] == [NAIVE, f"{SDPA} --backend flash", f"{SDPA} --backend math"]
    assert len(list(tmp_path.rglob("*.json"))) == 6
    (picture,) = tmp_path.glob("sweep_seq_16_to_1x2x64x16_*_04_a_04_c-backend-flash_04_c-backend-math.png")
    assert "_math_shapes" in picture.name, "the last run's tag: flags of all are in it"
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert screen.out.splitlines()[-1].endswith(picture.name)


def test_one_failing_way_does_not_stop_the_others(compile_afresh, tmp_path, capsys, monkeypatch):
    scores = 2 * 16**2 * 2  # heads, tokens and bytes of the smaller one
    monkeypatch.setattr(sdpa, "free_bytes", lambda device: 2 * scores)
    ways = [f"{NAIVE}.py", f"{SDPA}.py --backend flash"]
    flags = ["--seq", "16", "64", "--batch", "1", "--heads", "2", "--head_dim", "8", "--device", "cpu"]
    assert sweep.main([*ways, *flags, "--out", str(tmp_path)]) == 0
    screen = capsys.readouterr().out
    assert f"{NAIVE} seq 64   not run: the [1, 2, 64, 64] scores of 2 bytes each are 16.4 kB" in screen
    assert [file.parent.name for file in tmp_path.rglob("*.json")].count(SDPA) == 2
    assert "–" in next(line for line in screen.splitlines() if line.startswith(NAIVE) and "seq" not in line[:24])


@pytest.mark.parametrize("typed", [f'{NAIVE}.py --seq "16', f"{NAIVE}.py --guess", "no_such.py --backend flash"])
def test_a_wrong_way_in_a_sweep_is_refused(typed, capsys):
    assert sweep.main([f"{NAIVE}.py", typed, "--seq", "16", "32", "--device", "cpu"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_growth_is_the_power_between_the_two_largest():
    assert sweep._growth("seq", {10: 100.0, 100: 1e6, 1000: 1e8}) == "seq^2.0"
    assert sweep._growth("seq", {10: 1.0}) == "–"
    assert sweep._growth("warmup", {0: 1.0, 3: 2.0}) == "–", "no power leads from nothing to three"


VARIANTS = [
    (NAIVE, (), 5, "softmax_warp_forward"),
    (INPLACE, (), 5, "softmax_warp_forward"),
    (NAIVE, ("--compile",), 3, "softmax"),
    (SDPA, ("--backend", "math"), 20, "triu_tril_kernel"),
    (SDPA, ("--backend", "efficient"), 1, "fmha_cutlassF"),
    (SDPA, ("--backend", "flash"), 1, "pytorch_flash::flash_fwd_kernel"),
    (SDPA, ("--backend", "flash", "--compile"), 1, "pytorch_flash::flash_fwd_kernel"),
    (SDPA, ("--backend", "cudnn"), 1, "cudnn_generated"),
    (SDPA, ("--backend", "flex"), 1, "flex_attention"),
    (KERNELS, (), 1, "pytorch_flash::flash_fwd_kernel"),
    (KERNELS, ("--compile",), 1, "pytorch_flash::flash_fwd_kernel"),
]


@pytest.mark.gpu
@pytest.mark.parametrize(("script", "flags", "kernels", "word"), VARIANTS)
def test_a_variant_on_a_gpu(run, tmp_path, capfd, local_flash, script, flags, kernels, word):
    assert run(script, *flags) == 0
    screen = capfd.readouterr()
    assert screen.err == ""
    assert float(re.search(r"matches fp32 math: relative error (\S+)", screen.out)[1]) < 2e-2
    trace = only_trace(tmp_path)
    found = names(trace, "kernel")
    assert len(found) == 3 * kernels
    assert any(word in name for name in found)
    (file,) = tmp_path.rglob("*.json")
    summary = summarize(read(file))
    for record in trace["lesson"]["guesses"]:
        assert expect.from_record(record).ask(summary).holds is not None, f"{record}: a GPU can tell"
    scores, peak = 8 * 16 * 1024**2 * 2, trace["lesson"]["facts"]["peak_bytes"]
    assert peak > scores if kernels > 1 else peak < scores


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("script", "flags", "says"),
    [
        (SDPA, "--backend flash --dtype fp32", "Got Query dtype: float"),
        (SDPA, "--backend flash --head_dim 512", "less than or equal to 256"),
        (SDPA, "--backend cudnn --head_dim 60", "head_dim should be a multiple of 8"),
        (SDPA, "--backend efficient --head_dim 60", "divisible by 8"),
        (SDPA, "--backend flex --head_dim 8", "heads of 16 and wider"),
        (NAIVE, "--seq 100000", "a fused backend, which does not need them"),
        (SDPA, "--backend math --seq 100000", "a fused backend, which does not need them"),
    ],
)
def test_a_backends_limit_is_printed(run, tmp_path, capsys, script, flags, says):
    assert run(script, *flags.split()) == 2
    screen = capsys.readouterr()
    assert says in screen.err
    assert screen.err.count("\n") == 1
    assert not list(tmp_path.rglob("*.*"))


@pytest.mark.gpu
def test_memory_grows_with_the_square_or_with_the_length(compile_afresh, tmp_path, capsys):
    ways = [f"{NAIVE}.py", f"{SDPA}.py --backend flash"]
    assert sweep.main([*ways, "--seq", "2048", "8192", "--batch", "2", "--out", str(tmp_path)]) == 0
    _, _, memory = capsys.readouterr().out.partition("peak device memory")
    naive, flash = (float(power) for power in re.findall(r"seq\^(\d\.\d)", memory))
    assert naive > 1.8 and flash == pytest.approx(1.0, abs=0.1)


TAG = "8x16x1024x64_bf16_warm"
AUTO = f"{SDPA}/{TAG}_eager"


def reference(name):
    """Return the Summary and the raw document of a reference trace of the H200."""
    file = H200 / f"{name}.json.gz"
    return summarize(read(file)), json.loads(gzip.decompress(file.read_bytes()))


def gpu_work_of_a_step(document):
    """Return the raw GPU work of the second recorded step, in order, with the names of the launching calls."""
    events = [event for event in document["traceEvents"] if event.get("ph") == "X"]
    step = sorted((e for e in events if e["name"].startswith("ProfilerStep#") and e["cat"] == "user_annotation"),
                  key=lambda e: e["ts"])[1]  # fmt: skip
    launches = {
        e["args"]["correlation"]: e["name"]
        for e in events
        if e["cat"] in ("cuda_runtime", "cuda_driver") and step["ts"] <= e["ts"] < step["ts"] + step["dur"]
    }
    work = [e for e in events if e["cat"] in ("kernel", "gpu_memcpy") and e["args"]["correlation"] in launches]
    return [(e, launches[e["args"]["correlation"]]) for e in sorted(work, key=lambda e: e["ts"])]


def test_what_the_gpu_does_in_order():
    words = ("nvjet", "MulFunctor", "DtoD", "masked_fill", "softmax", "nvjet")
    for name, expected in ((f"{NAIVE}/{TAG}_eager", words), (f"{INPLACE}/{TAG}_eager", words[:2] + words[3:])):
        summary, document = reference(name)
        raw = gpu_work_of_a_step(document)
        assert [word in event["name"] for (event, _), word in zip(raw, expected, strict=True)] == [True] * len(raw)
        six = expect.gpu_does("GEMM", "mul", "copy", "masked_fill", "softmax", "GEMM").ask(summary)
        assert six.holds is (len(raw) == 6)


@pytest.mark.parametrize(
    ("name", "word", "launch"),
    [
        ("efficient", "fmha_cutlassF", "cudaLaunchKernel"),
        ("flash", "flash_fwd_kernel", "cudaLaunchKernel"),
        ("cudnn", "cudnn_generated", "cuLaunchKernelEx"),
    ],
)
def test_one_kernel_and_its_launch(name, word, launch):
    summary, document = reference(f"{AUTO}_{name}")
    ((event, call),) = gpu_work_of_a_step(document)
    assert word in event["name"] and call == launch
    assert expect.kernel_is(word, "").ask(summary).holds and expect.launched_by(launch).ask(summary).holds
    assert not expect.kernel_is("another", "").ask(summary).holds
    assert not expect.launched_by("cuLaunchKernel").ask(summary).holds
    none_estimated = event["args"]["est. achieved occupancy %"] == 0
    assert expect.occupancy_not_estimated().ask(summary).holds is none_estimated is (name == "cudnn")


def test_twenty_kernels_are_not_one():
    summary, document = reference(f"{AUTO}_math")
    assert len(gpu_work_of_a_step(document)) == 20
    assert not expect.kernel_is("gemm", "").ask(summary).holds
    assert expect.occupancy_not_estimated().ask(summary).holds is None
    verdict = expect.safe_softmax().ask(summary)
    ops = [e for e in document["traceEvents"] if e.get("cat") == "cpu_op"]
    outer = sorted((e for e in ops if e["name"] == "aten::_safe_softmax"), key=lambda e: e["ts"])[1]
    launches = [e for e in document["traceEvents"] if e.get("cat") == "cuda_runtime" and "Launch" in e["name"]]
    inside = [e for e in launches if outer["ts"] <= e["ts"] < outer["ts"] + outer["dur"]]
    assert verdict.holds and f"{len(inside)} kernels" in verdict.evidence and len(inside) == 5
    assert not expect.safe_softmax().ask(reference(f"{NAIVE}/{TAG}_eager")[0]).holds


def test_the_chosen_backend_and_its_architecture():
    auto, document = reference(AUTO)
    assert "aten::_scaled_dot_product_cudnn_attention" in names(document, "cpu_op")
    assert expect.sdpa_runs_on("cudnn").ask(auto).holds and not expect.sdpa_runs_on("flash").ask(auto).holds
    assert expect.written_for_this_gpu().ask(auto).holds
    old, document = reference(f"{AUTO}_efficient")
    ((event, _),) = gpu_work_of_a_step(document)
    assert "_sm80(" in event["name"] and document["deviceProperties"][0]["computeMajor"] == 9
    assert expect.written_for_this_gpu().ask(old).holds is False
    assert expect.sdpa_runs_on("flash").ask(reference(f"{NAIVE}/{TAG}_eager")[0]).holds is None


@pytest.mark.parametrize(
    ("name", "whole"),
    [(f"{NAIVE}/{TAG}_eager", 2), (f"{NAIVE}/{TAG}_compile", 1), (f"{AUTO}_math", 5), (f"{AUTO}_flash", 0)],
)
def test_reads_and_writes_of_the_scores(name, whole):
    summary, document = reference(name)
    scores, one_side = 8 * 16 * 1024 * 1024 * 2, 8 * 16 * 1024 * 64 * 2
    rest = document["lesson"]["facts"]["peak_bytes"] - 4 * one_side
    assert rest // scores == whole
    for count in (1, 2, 5, 6):
        assert expect.scores_in_memory(count).ask(summary).holds is (whole >= count)
    assert expect.scores_in_memory(0).ask(summary).holds is (whole == 0)


@pytest.mark.parametrize(
    "facts",
    [
        {},
        {"attention": 7, "peak_bytes": 1},
        {"attention": {"batch": "x"}, "peak_bytes": 1},
        {"attention": {"batch": 1, "heads": 1, "seq": 8, "head_dim": 8}, "peak_bytes": "x"},
    ],
)
def test_foreign_facts_are_no_error(facts):
    summary, _ = reference(f"{AUTO}_flash")
    known = run_facts({"script": "x", "flags": {"dtype": "bf16"}, "facts": facts})
    other = msgspec.structs.replace(summary, source=msgspec.structs.replace(summary.source, facts=known))
    assert expect.scores_in_memory(0).ask(other).holds is None


def test_the_rungs_predictions_on_its_reference_traces():
    """This reader knows every prediction of these traces, and only these fail on the H200."""
    broken = set()
    for file in sorted(H200.glob("04_*/*.json.gz")):
        trace = read(file)
        summary = summarize(trace)
        for record in trace.facts.guesses:
            verdict = expect.from_record(record).ask(summary)
            assert verdict.holds is not None, (file.name, record)
            if not verdict.holds:
                broken.add((file.name.removesuffix(".json.gz").removeprefix(TAG), record["guess"]))
    assert broken == {("_eager", "sdpa_runs_on"), ("_eager_efficient", "written_for_this_gpu")}
