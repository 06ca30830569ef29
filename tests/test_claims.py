"""Sentences claim only what a trace shows. Each trace is made of the events that once led to a wrong claim."""

import itertools
import json
import re
from types import SimpleNamespace

import pytest
from raw_events import event

from tracereader import cli
from tracereader.changes import attention
from tracereader.changes.catalogue import opportunities
from tracereader.figures import summarize
from tracereader.figures.gpu_time import BETWEEN_OPS
from tracereader.figures.unfused import Scores, Unfused
from tracereader.findings import steps
from tracereader.trace import read

GEMM = "ampere_sgemm_128x64_nn"


def written(tmp_path, events):
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": events, "record_shapes": 1}))
    return path


def report(capsys, path, *flags):
    capsys.readouterr()
    assert cli.main([str(path), *flags]) == 0
    return capsys.readouterr().out


class Program:
    """Events of a program whose ops each launch kernels."""

    def __init__(self):
        self.events, self.ids = [], itertools.count(1)

    def op(self, name, ts, dur, kernels=(), tid=1, **args):
        """Add an op. kernels: (name, start, duration) and a stream, if it is not 7."""
        self.events.append(event(name, "cpu_op", ts, dur, tid=tid, **args))
        for place, (kernel, start, took, *stream) in enumerate(kernels):
            number = next(self.ids)
            stream = stream[0] if stream else 7
            call = event("cudaLaunchKernel", "cuda_runtime", ts + 1 + 3 * place, 2, tid=tid, correlation=number)
            self.events += [call, event(kernel, "kernel", start, took, tid=stream, device=0, stream=stream,
                                        correlation=number)]  # fmt: skip

    def label(self, name, ts, dur, tid=1):
        self.events.append(event(name, "user_annotation", ts, dur, tid=tid))


@pytest.mark.parametrize("name", ["load_batch", "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"])
def test_a_gap_inside_an_annotation_is_named_by_it(tmp_path, capsys, name):
    made = Program()
    for step in range(4):
        at = 1000 + 60_000 * step
        made.label(f"ProfilerStep#{step}", at, 59_900)
        made.label(name, at + 10, 50_000)
        made.op("aten::mm", at + 50_100, 20, [(GEMM, at + 50_130, 5000)])
    path = written(tmp_path, made.events)
    found = summarize(read(path)).idle_in
    (most, us) = next(iter(found.items()))
    assert name in most and us == pytest.approx(50_000, rel=0.01)
    assert found.get(BETWEEN_OPS, 0) < 0.2 * us
    if name == "load_batch":
        text = " ".join(report(capsys, path).split())
        assert (
            "No thread is in an op for 50.1 ms between the step's start and aten::mm, in the annotation load_batch"
            in text
        )


@pytest.mark.parametrize("where", ["loader", "between ops"])
def test_a_longer_wait_of_the_program_is_not_the_profilers(tmp_path, where):
    made, at = Program(), 1000
    loader = "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__"
    for step in range(4):
        waits = 30_000 if step == 0 else 10_000
        start = at
        if where == "loader":
            made.label(loader, at + 10, waits)
        at += waits + 20
        for name in ("aten::mm", "aten::add", "aten::relu", "aten::sum"):
            dur = 130 if step == 0 else 100
            made.op(name, at, dur, [(GEMM, at + 20, 50)])
            at += dur + 1
        made.label(f"ProfilerStep#{step}", start, at - start)
    summary = summarize(read(written(tmp_path, made.events)))
    assert "profiler" not in (steps.cause(summary, summary.steps[0]) or "")


def test_scores_are_named_by_the_size_that_takes_most_time():
    def one(length, us):
        return Unfused(us, 3, us, Scores(1, length, length, 4, 1, 1, 8, 8))

    def said(*found):
        return attention._sizes_of_scores(
            SimpleNamespace(summary=SimpleNamespace(attention=SimpleNamespace(unfused=found)))
        )

    assert said(one(8, 1), one(3137, 49)) == ", mostly of 3,137 x 3,137 (98% of this time),"
    assert said(one(8, 1)) == " of 8 x 8" and said(Unfused(1.0, 1, 1.0, None)) == ""


@pytest.mark.parametrize(
    "other", ["void gemm_epilogue_bias_kernel<float>(x)", "void cublasLt::splitKreduce_kernel<32, 16, int>(x)"]
)
def test_the_flops_of_an_op_with_two_kernels_belong_to_its_product_once(tmp_path, other):
    made = Program()
    shapes = {"Input Dims": [[64], [32, 128], [128, 64]], "Input type": ["float"] * 3}
    made.label("ProfilerStep#0", 1000, 2000)
    made.op("aten::addmm", 1010, 30, [(GEMM, 1100, 100), (other, 1201, 5)], **shapes)
    work = summarize(read(written(tmp_path, made.events))).gpu_work
    assert [one.flops for one in work] == [2 * 32 * 128 * 64, None]


def test_kernels_that_share_a_product_get_no_flops(tmp_path):
    made = Program()
    shapes = {"Input Dims": [[32, 128], [128, 64]], "Input type": ["float"] * 2}
    made.label("ProfilerStep#0", 1000, 2000)
    made.op("aten::mm", 1010, 30, [(GEMM, 1100, 100), (GEMM, 1201, 100)], **shapes)
    assert [one.flops for one in summarize(read(written(tmp_path, made.events))).gpu_work] == [None, None]


def test_idle_time_after_a_synchronization_is_that_of_its_own_threads_launch(tmp_path):
    """Another thread's long launch after it is not its own. Two streams keep the GPU busy."""
    made = Program()
    made.label("ProfilerStep#0", 1000, 9000)
    made.op("aten::mm", 1010, 10, [(GEMM, 1050, 1000)])
    made.op("aten::mm", 1110, 10, [(GEMM, 1500, 700, 8)], tid=2)
    made.events.append(event("cudaStreamSynchronize", "cuda_runtime", 1100, 1150))
    number = next(made.ids)
    slow = event("cudaLaunchKernel", "cuda_runtime", 2300, 4000, tid=2, correlation=number)  # it loads a module
    made.events += [slow, event(GEMM, "kernel", 6310, 100, tid=8, device=0, stream=8, correlation=number)]
    made.op("aten::mm", 7000, 10, [(GEMM, 7020, 100)])
    (sync,) = summarize(read(written(tmp_path, made.events))).training.syncs
    # The GPU is busy from 1050 to 2200: on stream 7 to 2050, on stream 8 from 1500. The wait ends at 2250.
    assert sync.idle_us == pytest.approx((2250 - 2200) + 2)  # and the next launch call of the thread takes 2 µs


def test_the_table_of_a_steps_time_names_its_whole(tmp_path, capsys):
    made = Program()
    made.label("ProfilerStep#0", 1000, 47_000)
    made.op("aten::mm", 13_000, 30, [(GEMM, 13_100, 20_000)])
    heads = re.search(r"^where the step goes: ([\d.]+) ms.*$", report(capsys, written(tmp_path, made.events)), re.M)
    assert heads[0].endswith("of the step") == (abs(float(heads[1]) - 47) < 1)
    assert heads[0].endswith(("of the step", f"of {heads[1]} ms"))
    several = Program()
    for step, long in enumerate((10_000, 10_000, 40_000, 10_000, 10_000)):
        at = 1000 + step * 50_000
        several.label(f"ProfilerStep#{step}", at, long + 100)
        several.op("aten::mm", at + 10, 30, [(GEMM, at + 50, long)])
    heads = re.search(r"^where the step goes: ([\d.]+) ms.*$", report(capsys, written(tmp_path, several.events)), re.M)
    assert heads[0].endswith(("of the step", f"of {heads[1]} ms"))


def test_the_wait_in_the_calls_of_short_copies_is_what_is_saved(tmp_path):
    made = Program()
    for step in range(3):
        at = 1000 + 40_000 * step
        made.label(f"ProfilerStep#{step}", at, 39_900)
        made.op("aten::mm", at + 10, 10, [(GEMM, at + 40, 23_000)])
        number = next(made.ids)
        made.events += [
            event("aten::copy_", "cpu_op", at + 100, 23_100),
            event("cudaMemcpyAsync", "cuda_runtime", at + 101, 23_098, correlation=number),
            event("Memcpy HtoD (Pageable -> Device)", "gpu_memcpy", at + 23_100, 62, tid=7, device=0, stream=7,
                  correlation=number, bytes=500_000),
        ]  # fmt: skip
        made.op("aten::mm", at + 24_000, 10, [(GEMM, at + 39_000, 500)])
    path = written(tmp_path, made.events)
    trace = read(path)
    found = [one for one in opportunities(trace, summarize(trace)) if one.change == "overlap_copies"]
    assert found and "the CPU waits for the GPU in these calls for 23.1 ms" in found[0].evidence


def test_a_kernel_has_one_label_in_all_sections(tmp_path, capsys):
    made = Program()
    names = [f"{'a' * 40}_{'b' * 60}{number}{'c' * 60}" for number in range(4)]
    for step in range(4):
        at = 1000 + 3000 * step
        made.label(f"ProfilerStep#{step}", at, 2900)
        for place, name in enumerate(names):
            # In the step's order the last one is first; by time the first one is.
            made.op(
                f"my::op{place}",
                at + 10 + 600 * (3 - place),
                30,
                [(name, at + 60 + 600 * (3 - place), 500 - 90 * place)],
            )
    path = written(tmp_path, made.events)
    labels = {}
    for section in ("kernels", "work"):
        for line in report(capsys, path, "--only", section).splitlines():
            if (op := re.search(r"my::op\d", line)) and (label := re.match(r"(a+\S*(?: #\d)?)", line)):
                labels.setdefault(op[0], set()).add(label[1])
    assert labels and all(len(some) == 1 for some in labels.values()), labels


def optimizer(name, ops):
    made = Program()
    for step in range(3):
        at = 1000 + 20_000 * step
        made.label(f"ProfilerStep#{step}", at, 19_900)
        made.label(f"Optimizer.step#{name}.step", at + 10, 15_000)
        for place, op in enumerate(ops):
            made.op(op, at + 20 + 20 * place, 10)
        made.events.append(event("cudaLaunchKernel", "cuda_runtime", at + 14_000, 10, correlation=10**6 + step))
    return made.events


def test_additions_to_step_counters_do_not_tell_how_a_librarys_optimizer_works(tmp_path, capsys):
    path = written(tmp_path, optimizer("FusedAdam", ["aten::add_"] * 257))
    (found,) = summarize(read(path)).training.optimizers
    assert found.how == "" and "for-loop" not in report(capsys, path)
    (found,) = summarize(
        read(written(tmp_path, optimizer("Adam", ["aten::mul_", "aten::addcdiv_"] * 20)))
    ).training.optimizers
    assert found.how == "for-loop"


@pytest.mark.parametrize("launches", [True, False])
def test_an_op_that_launches_has_no_rate_of_the_cpu(tmp_path, capsys, launches):
    """The GPU's records are missing. The op returns before its product is computed."""
    made = Program()
    shapes = {"Input Dims": [[64], [4096, 4096], [4096, 64]], "Input type": ["float"] * 3}
    for step in range(3):
        at = 1000 + 200 * step
        made.label(f"ProfilerStep#{step}", at, 190)
        made.op("aten::addmm", at + 10, 20, **shapes)
        if launches:
            made.events.append(event("cudaLaunchKernel", "cuda_runtime", at + 12, 5, correlation=step))
    path = written(tmp_path, made.events)
    assert bool(summarize(read(path)).cpu.cpu_work) != launches
    assert ("GFLOP/s" in report(capsys, path, "--all")) != launches
