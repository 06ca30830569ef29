"""The comparison of two runs' GPU work never calls different work the same, or remaining work gone."""

import gzip
import json
import re
from collections import Counter

import pytest
from raw_events import event, raw_steps, raw_work
from references import H200, recording, small_first

from tracereader import cli
from tracereader.figures import summarize
from tracereader.trace import read
from tracereader.two_runs import changed_work, compare, sentences

NVJET, OTHER_NVJET = "nvjet_sm90_tst_64x8_64x16_4x2_h_bz_TNT", "nvjet_sm90_tst_64x32_64x16_4x2_h_bz_TNT"
TRITON = "triton_tem_fused_mm_0"
SOFTMAX = "void (anonymous namespace)::softmax_warp_forward<c10::BFloat16, c10::BFloat16, float, {}, false, false>(int)"
SELECT = "void at::native::(anonymous namespace)::indexSelectSmallIndex<long, long, unsigned int, {0}, {0}, -2>(int)"
FILL = "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>, std::array<char*, 1ul> >(int)"
BLIT = "Memcpy DtoD (Device -> Device)"


def made(tmp_path, name, *calls, lesson=None):
    """Return three steps with these calls in each: an op, and the kernels and copies that it launches (µs)."""
    events, number, free = [], 0, 0
    for step in range(3):
        start = 100_000 * step
        events.append(event(f"ProfilerStep#{step}", "user_annotation", start, 90_000))
        for at, (op, work) in enumerate(calls):
            begin = start + 10 + 1000 * at
            events.append(event(op, "cpu_op", begin, 900))
            for place, (kernel, us) in enumerate(work):
                number += 1
                launch, free = begin + 5 + 10 * place, max(free, begin + 20 + 10 * place)
                what = "gpu_memcpy" if kernel.startswith("Memcpy") else "kernel"
                events += [
                    event("cudaLaunchKernel", "cuda_runtime", launch, 5, correlation=number),
                    event(kernel, what, free, us, tid=7, correlation=number, device=0, stream=7),
                ]
                free += us
    file = tmp_path / f"{name}.json"
    file.write_text(json.dumps({"traceEvents": events, **({"lesson": lesson} if lesson else {})}))
    return file


def pair(*files):
    return [compare.Side(summarize(read(file))) for file in files]


def changed(*files):
    return sentences.difference(*pair(*files)).work_changed


def products(*some):
    return [("aten::mm", [(kernel, us)]) for kernel, us in some]


def test_products_by_other_kernels_are_reported_as_changed(tmp_path):
    first = made(tmp_path, "first", *products((NVJET, 40), (NVJET, 42)))
    assert changed(first, first) == ()
    other = made(tmp_path, "other", *products((OTHER_NVJET, 50), (OTHER_NVJET, 51)))
    (said,) = changed(first, other)
    assert re.fullmatch(r"2 x aten::mm: 2 x nvjet\S+ .*\(82\.0 µs\) → 2 x nvjet\S+ .*\(101\.0 µs\)", said)
    one = made(tmp_path, "one", *products((OTHER_NVJET, 50), (NVJET, 42)))
    (said,) = changed(first, one)
    assert re.fullmatch(r"2 x aten::mm: 1 x nvjet.* \(of 2 in 82\.0 µs\) → 1 x nvjet.* \(50\.0 µs\)", said)
    fewer = made(tmp_path, "fewer", *products((OTHER_NVJET, 90)))
    gone, new = changed(first, fewer)
    assert gone.startswith("GPU work gone: 2 x nvjet") and new.startswith("GPU work new: 1 x nvjet")
    triton = made(tmp_path, "triton", *products((TRITON, 50), (TRITON, 51)))
    (said,) = changed(first, triton)
    assert said.endswith(f"→ 2 x {TRITON} (101.0 µs)")


def test_the_longest_work_comes_first(tmp_path):
    calls = {"aten::mm": 40, "aten::addmm": 90, "aten::bmm": 60}
    first, other = (
        made(tmp_path, str(number), *((op, [(f"{name}_{op}", us)]) for op, us in calls.items()))
        for number, name in enumerate((NVJET, OTHER_NVJET))
    )
    assert [text.split(":")[2] for text in changed(first, other)] == ["addmm", "bmm", "mm"]


def typical(path):
    """Return the raw slices of a reference trace, and the mark of its typical step."""
    events = [e for e in json.loads(gzip.decompress(path.read_bytes()))["traceEvents"] if e.get("ph") == "X"]
    name = summarize(read(path)).typical_step
    return events, next(mark for mark in raw_steps(events) if mark["name"] == name)


def test_max_autotune_says_that_triton_multiplies_now():
    files = [H200 / f"01_matmul_add/4096_bf16_warm_compile{how}.json.gz" for how in ("", "_max-autotune")]
    before, after = ([e["name"] for e in raw_work(*typical(file))] for file in files)
    assert [sum(name.startswith(start) for name in before) for start in ("nvjet", "Memcpy", "Memset")] == [1, 1, 1]
    assert sorted(name.startswith("triton_tem") for name in after) == [False] * (len(after) - 1) + [True]
    gone, new = (
        next(text for text in changed(*files) if text.startswith(f"GPU work {how}")) for how in ("gone", "new")
    )
    assert all(f"1 x {start}" in gone for start in ("nvjet", "Memcpy", "Memset")) and "1 x triton_tem" in new


def test_no_name_is_printed_twice(tmp_path):
    """Names that are cut and differ only in the middle stay different, too."""
    names = [f"{'kernel_of_mine_' * 8}{letter}{'_and_more_of_it' * 8}" for letter in "ab"]
    assert len(names[0]) > 200
    files = [made(tmp_path, str(number), ("my::op", [(name, 5)])) for number, name in enumerate(names)]
    (said,) = changed(*files)
    before, after = said.removeprefix("1 x my::op: ").split(" → ")
    assert before.startswith("1 x kernel_of") and after.startswith("1 x kernel_of") and before != after


def test_one_call_in_several_launches(tmp_path):
    once = made(tmp_path, "once", ("aten::fill_", [(FILL, 5)]))
    cut = made(tmp_path, "cut", ("aten::fill_", [(FILL, 6)] * 32))
    (said,) = changed(once, cut)
    assert said.startswith("GPU work new: 31 x vectorized_elementwise_kernel") and said.endswith("(of 32 in 192.0 µs)")


def test_tokens_per_second_of_runs_that_store_them(tmp_path, capsys):
    facts = {"decoding": {"phase": "decode", "batch": 4, "tokens": 4}}
    lessons = [{"script": "05_llm", "flags": {}, "facts": some} for some in (facts, facts, {})]
    first, other, silent = (
        made(tmp_path, str(number), *products((NVJET, 40)), lesson=one) for number, one in enumerate(lessons)
    )
    shown = {}
    for files in ((first, other), (first, silent)):
        assert cli.main([*map(str, files), "--only", "steps"]) == 0
        shown[files] = capsys.readouterr().out
    tokens = [re.search(r"tokens/s +(\S+) +(\S+)", screen).groups() for screen in shown.values()]
    assert tokens == [("40", "40"), ("40", "–")]  # 4 every 100 ms


SPLIT_K = "void cublasLt::splitKreduce_kernel<32, 16, int, float>(int)"
RELU = "void at::native::vectorized_elementwise_kernel<4, at::native::relu_kernel>(int)"


def test_kernels_of_one_op_are_its_replacement(tmp_path):
    """17 kernels differ from 18: one product became a product and a sum of its parts."""
    first = made(tmp_path, "first", *products(*[(NVJET, 40)] * 16), ("aten::addmm", [(NVJET, 50)]))
    other = made(tmp_path, "other", *products(*[(NVJET, 40)] * 16), ("aten::addmm", [(OTHER_NVJET, 30), (SPLIT_K, 5)]))
    assert [side.summary.count("kernel") for side in pair(first, other)] == [17, 18]
    (said,) = changed(first, other)
    assert re.match(
        r"1 x aten::addmm: 1 x nvjet\S+ .*→ 1 x nvjet.* \(30\.0 µs\), 1 x splitKreduce.* \(5\.0 µs\)$", said
    )


def test_kernels_of_different_ops_replace_nothing(tmp_path):
    first = made(tmp_path, "first", *products((NVJET, 40)), ("aten::relu", [(RELU, 5)]))
    other = made(tmp_path, "other", *products((NVJET, 40)), ("aten::fill_", [(FILL, 6)]))
    assert [text.split(":")[0] for text in changed(first, other)] == ["GPU work gone", "GPU work new"]
    more = made(tmp_path, "more", ("aten::relu", [(FILL, 6)]), ("aten::relu", [(FILL, 6)]), *products((NVJET, 40)))
    assert [text.split(":")[0] for text in changed(first, more)] == ["GPU work gone", "GPU work new"]


def test_other_ops_with_the_same_work_are_reported(tmp_path, capsys):
    first = made(tmp_path, "first", *products((NVJET, 40)))
    other = made(tmp_path, "other", *products((NVJET, 40)), ("aten::t", []), ("aten::view", []), ("aten::t", []))
    assert changed(first, other) == ()
    assert cli.main([str(first), str(other), "--all"]) == 0
    printed = capsys.readouterr().out
    assert "nothing" not in printed and "ops new: aten::t, aten::view" in printed


def test_only_equal_work_is_called_the_same():
    """Every pair of the first rungs' traces is compared."""
    files = sorted(H200.glob("0[1-3]_*/*.json.gz"))
    sides = pair(*files)
    for first in sides:
        for other in sides:
            same = not sentences.difference(first, other).work_changed
            names = [sorted(one.name for one in side.summary.gpu_work) for side in (first, other)]
            assert same == (names[0] == names[1])


@pytest.mark.parametrize(
    ("before", "after"),
    small_first(
        [
            ("bert/eager", "bert/graph"),
            ("encoder/fp32", "encoder/tf32"),
            ("pointwise/eager", "pointwise/compile"),
        ]
    ),
)
def test_each_activity_of_two_steps_is_counted_once(before, after):
    files = [recording(before), recording(after)]
    found = changed_work.changed_work(*pair(*files))
    for file, changed, left in zip(files, ("before", "after"), (found.gone, found.new), strict=True):
        counted = Counter({one.name: one.count for one in found.kept})
        for some in [left, *(getattr(one, changed) for one in found.replaced)]:
            for one in some:
                counted[one.name] += one.count
        assert counted == Counter(one["name"] for one in raw_work(*typical(file)))


def test_a_comparison_names_flags_ops_and_kernels_that_changed(tmp_path):
    flags = [{"script": "x", "flags": {"size": size, "compile": on}} for size, on in ((64, False), (128, True))]
    first = made(tmp_path, "first", *products((NVJET, 40), (NVJET, 42)), ("aten::t", []), lesson=flags[0])
    other = made(tmp_path, "other", *products((OTHER_NVJET, 90)), lesson=flags[1])
    sides = pair(first, other)
    found = changed_work.changed_work(*sides)
    assert found.gone == (changed_work.Named(NVJET, 2, 2, 82.0),)
    assert found.new == (changed_work.Named(OTHER_NVJET, 1, 1, 90.0),)
    told = sentences.difference(*sides)
    assert told.ops_changed == ("ops gone: aten::t", "calls: aten::mm 2 → 1")
    assert told.flags_changed == ("flags: --size 64 → --size 128; without --compile → --compile",)
