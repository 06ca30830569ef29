"""Changes that remove avoidable work are checked against the raw events of the trace."""

import gzip
import json
import statistics

import pytest
from raw_events import GPU, end, event, pace, raw_steps, raw_work
from references import CHANGES, H200, OTHERS, ROOT, measured, opened

from tracereader.changes import attention, catalogue, fusion, inference, precision
from tracereader.changes.catalogue import CHANGES as CHANGES_OF_A_REPORT
from tracereader.changes.catalogue import each_priced, opportunities
from tracereader.changes.context import Case
from tracereader.figures import summarize
from tracereader.replay import graph_of
from tracereader.replay import recorded as graph_module
from tracereader.trace import read
from tracereader.two_runs import compare

TESTS = OTHERS[0].parent
LLM = H200 / "05_llm"
MLP_COMPILED = H200 / "03_simple_mlp/64x128x768x3072_bf16_warm_compile.json.gz"
# The share of an H200's bandwidth that a kernel reaches if it only reads.
GB_S = 0.85 * 4800


def raw(path):
    return json.loads(gzip.decompress(path.read_bytes()))


def slices(document):
    return [e for e in document["traceEvents"] if e.get("ph") == "X" and "dur" in e]


def inside(events, outer):
    return [e for e in events if e["tid"] == outer["tid"] and outer["ts"] <= e["ts"] and end(e) <= end(outer)]


def launched(events, outer):
    """Return the GPU work launched in a slice, by correlation."""
    calls = {e["args"].get("correlation") for e in inside(events, outer) if e.get("cat", "").startswith("cuda_")}
    return [e for e in events if e.get("cat") in GPU and e["args"]["correlation"] in calls]


@pytest.fixture
def case_of(tmp_path):
    """Return the function case_of(path, edit) -> Case. edit: changes the trace's document first."""

    def case(path, edit=None):
        if edit:
            document = raw(path)
            edit(document)
            path = tmp_path / "edited.json"
            path.write_text(json.dumps(document))
            trace = read(path)
            return Case(trace, summarize(trace), graph_of(trace))
        trace, summary = opened(path)
        return Case(trace, summary, graph_of(trace))

    return case


def proposed(case):
    return {one.change: one for one in opportunities(case.trace, case.summary)}


def test_skipping_guards_saves_most_of_the_lookups_in_an_overhead_bound_step(case_of):
    path = LLM / "1x512_bf16_warm_compile_gqa_tune_max-autotune.json.gz"
    events = slices(raw(path))
    lookups = [e for mark in raw_steps(events) for e in inside(events, mark) if "Cache Lookup" in e["name"]]
    one = proposed(case_of(path))["skip_guards"]
    each = sum(e["dur"] for e in lookups) / len(raw_steps(events))
    assert one.basis == "bound" and one.saves_us == pytest.approx(0.8 * each, rel=0.2)


@pytest.mark.parametrize(
    "path",
    [LLM / "1x512_bf16_warm_compile.json.gz", ROOT / "tests/traces/attention_flex.json.gz"],
    ids=lambda p: p.stem,
)
def test_the_saving_of_skipped_guards_is_80_percent_of_the_time_in_the_evidence(case_of, path):
    """The lookups of one step take up to twice as long as those of another one."""
    events = slices(raw(path))
    each = [sum(e["dur"] for e in inside(events, m) if "Cache Lookup" in e["name"]) for m in raw_steps(events)]
    middle = sorted(each)[len(each) // 2]
    one = proposed(case_of(path))["skip_guards"]
    assert f"{middle:,.1f} µs of CPU time in the median step" in one.evidence
    assert one.saves_us == pytest.approx(0.8 * middle, rel=0.01)


def test_of_two_steps_the_evidence_for_skipped_guards_is_of_the_first(case_of):
    path = LLM / "1x512_bf16_warm_compile.json.gz"
    events = slices(raw(path))
    first, second, third = raw_steps(events)
    us, longer = (sum(e["dur"] for e in inside(events, m) if "Cache Lookup" in e["name"]) for m in (first, second))

    def of_two_steps(document):
        document["traceEvents"] = [one for one in document["traceEvents"] if one.get("name") != third["name"]]

    case = case_of(path, of_two_steps)
    assert len(case.summary.steps) == 2 and case.step.name == first["name"] and us < longer
    assert f"{us:,.1f} µs of CPU time in the median step" in proposed(case)["skip_guards"].evidence


def test_skipping_guards_saves_nothing_in_a_gpu_bound_step(case_of):
    assert "skip_guards" not in proposed(case_of(CHANGES / "products/compile.json.gz"))


def compiles_in_every_step(document, us=40_000):
    for mark in raw_steps(document["traceEvents"]):
        later(document, mark, us)
        call = event("_compile.compile_inner (dynamo_timed)", "cpu_op", mark["ts"] + 4, us - 10)
        document["traceEvents"].append(call | {"pid": mark["pid"], "tid": mark["tid"]})


def test_skipping_guards_is_not_proposed_for_a_step_that_compiles(case_of):
    assert fusion.skip_guards(case_of(MLP_COMPILED)) is not None
    assert fusion.skip_guards(case_of(MLP_COMPILED, compiles_in_every_step)) is None


def later(document, mark, us):
    """Delay everything after the start of a step, so that the step takes longer by the same time."""
    for e in document["traceEvents"]:
        if e.get("ts", 0) > mark["ts"] + 5:
            e["ts"] += us
    mark["dur"] += us


def test_idle_time_counts_against_a_compute_bound_step(case_of):
    """Products near the peak take 71% of the busy time. With a pause, they take less than half of the step."""
    shapes = H200 / "03_simple_mlp/64x128x768x3072_bf16_warm_eager_shapes.json.gz"

    def pauses(document):
        for mark in raw_steps(document["traceEvents"]):
            later(document, mark, 110)

    assert case_of(shapes).summary.waits_for == "compute"
    slower = case_of(shapes, pauses).summary
    products = sum(one.us for one in slower.gpu_work if one.family == "GEMM")
    assert slower.steady.idle_us < 0.35 * slower.steady_us and products < 0.5 * slower.recorded_step_us
    assert slower.waits_for == "gpu"


def test_compilation_in_one_step_of_three_does_not_change_the_typical_step(case_of):
    def in_the_first(document):
        mark = raw_steps(document["traceEvents"])[0]
        later(document, mark, 40_000)
        call = event("_compile.compile_inner (dynamo_timed)", "cpu_op", mark["ts"] + 4, 39_990)
        document["traceEvents"].append(call | {"pid": mark["pid"], "tid": mark["tid"]})

    assert "recompile" not in proposed(case_of(MLP_COMPILED, in_the_first))


MATH = H200 / "04_c_sdpa_attention/8x16x1024x64_bf16_warm_eager_math.json.gz"
MASK = ("aten::ones", "aten::tril")


def of_the_program(document):
    """Edit the trace so that the program itself calls the ops of SDPA's math backend."""
    for e in document["traceEvents"]:
        if e["name"] == "aten::_scaled_dot_product_attention_math":
            e["name"] = "attention of one's own"


def test_making_the_mask_once_saves_its_kernels_in_a_gpu_bound_step(case_of):
    events = slices(raw(MATH))
    mark = raw_steps(events)[1]
    made = [e for e in inside(events, mark) if e["name"] in MASK]
    us = sum(work["dur"] for op in made for work in launched(events, op))
    assert attention.mask_once(case_of(MATH)) is None, "SDPA's math makes it, and no program can change that"
    case = case_of(MATH, of_the_program)
    proposal = attention.mask_once(case)
    gaps = 2 * 1.5  # before each of two kernels
    assert us < case.graph.recorded_us - proposal.graph.step_us() < us + gaps + 1
    assert proposal.evidence.startswith("every step makes a triangular mask with aten::ones, aten::tril: ")


def forward_alone(document):
    """Turn training into inference: remove autograd's thread, the optimizer, and the work that they launch."""
    events = slices(document)
    (main,) = {mark["tid"] for mark in raw_steps(events)}
    gone = {id(e) for e in events if e.get("cat") in ("cpu_op", "cuda_runtime", "cuda_driver") and e["tid"] != main}
    for label in [e for e in events if e["name"].startswith("Optimizer.")]:
        gone |= {id(e) for e in inside(events, label)}
    calls = {e["args"].get("correlation") for e in events if id(e) in gone}
    document["traceEvents"] = [
        e
        for e in document["traceEvents"]
        if id(e) not in gone and not (e.get("cat") in GPU and e["args"]["correlation"] in calls)
    ]


AUTOCAST = CHANGES / "encoder/bf16.json.gz"


def weight_casts(events, mark):
    """Return the casts of weight and bias in aten::linear, by their shapes."""
    found, events = [], raw_work(events, mark) + inside(events, mark)
    for linear in [e for e in events if e["name"] == "aten::linear"]:
        given, *weights = linear["args"]["Input Dims"]
        found += [
            e
            for e in inside(events, linear)
            if e["name"] == "aten::to" and e["args"]["Input Dims"][0] in weights and launched(events, e)
            and e["args"]["Input Dims"][0] != given
        ]  # fmt: skip
    return found


@pytest.mark.exhaustive
def test_casting_weights_once_saves_the_casts_in_inference(case_of):
    events = slices(raw(AUTOCAST))
    marks = raw_steps(events)
    casts = weight_casts(events, marks[1])
    assert len(casts) == 8 * 8  # eight layers have four weights and four biases each
    case = case_of(AUTOCAST, forward_alone)
    one = proposed(case)["cast_weights"]
    assert one.basis == "replay" and one.evidence.startswith("64 casts of weights and biases")
    each = [sum(e["dur"] for e in weight_casts(events, mark)) for mark in marks]
    assert 0.7 * min(each) < one.saves_us < 1.3 * max(each), "the forward pass waits for launches"


def test_casting_weights_once_is_not_proposed_in_training(case_of):
    assert precision.cast_weights(case_of(AUTOCAST)) is None


def attention_kernels(path):
    """Return the time (µs) of each attention kernel of a step, and the number of keys, by the recorded shapes."""
    events = slices(raw(path))
    calls = [e for e in events if e["name"] == "aten::scaled_dot_product_attention"]
    times = [w["dur"] for e in calls for w in launched(events, e) if "cudnn_generated" in w["name"]]
    (keys,) = {e["args"]["Input Dims"][1][2] for e in calls}
    return sorted(times), keys


@pytest.mark.parametrize(
    "path",
    [
        H200 / "01_matmul_add/4096_bf16_warm_compile_reduce-overhead.json.gz",
        LLM / "1x512_bf16_warm_compile_flex_reduce-overhead.json.gz",
        LLM / "1x512_bf16_warm_compile_gqa_tune_max-autotune.json.gz",
    ],
    ids=lambda path: path.name,
)
def test_a_change_of_gpu_work_alone_is_not_proposed_for_an_overhead_bound_step(path, case_of):
    """The CPU time of the step equals the time from start to start, so GPU work does not decide it."""
    events = slices(raw(path))
    marks = raw_steps(events)
    work = [raw_work(events, mark) for mark in marks]
    on_cpu = pace([mark["ts"] for mark in marks], marks[-1]["dur"])
    busy = [sum(e["dur"] for e in some) for some in work]
    assert on_cpu > 1.5 * sorted(busy)[len(busy) // 2] or "tune" in path.name
    of_the_gpu = {"fuse_pointwise", "fused_attention", "tf32", "half_precision", "align_shapes"}
    assert not of_the_gpu & set(proposed(case_of(path)))


def test_each_change_has_an_id_of_its_own_and_says_what_it_assumes():
    names = [change.name for change in CHANGES_OF_A_REPORT]
    assert len(names) == len(set(names))
    assert all(change.title and change.assumes and not change.assumes.endswith(".") for change in CHANGES_OF_A_REPORT)
    assert [change.name for change in CHANGES_OF_A_REPORT if change.propose is None] == ["warm_up"]


def short_steps(launches, first_us, tmp_path):
    """Write a trace of four steps. An op launches a kernel of 2 µs every 20 µs; the first kernel takes `first_us`."""
    events, time, correlation = [], 1000, 0
    for number in range(4):
        start = time
        for place in range(launches):
            correlation += 1
            time += 20
            events.append(event("aten::mul", "cpu_op", time, 18))
            events.append(event("cudaLaunchKernel", "cuda_runtime", time + 2, 8, correlation=correlation))
            dur = first_us if not place else 2
            args = {"correlation": correlation, "device": 0, "stream": 7}
            events.append(event("mul", "kernel", time + 12 + (first_us if place else 0), dur, tid=7, **args))
        events.append(event(f"ProfilerStep#{number}", "user_annotation", start, time + 20 - start))
        time += 30 + max(0, first_us - 20)  # a stream runs its kernels in order
    file = tmp_path / f"{launches}_{first_us}.json"
    file.write_text(json.dumps({"traceEvents": events}))
    return file


def test_a_cuda_graph_of_few_launches_copies_its_inputs(tmp_path, case_of):
    """20 launches take 400 µs. The graph's launch takes 40 µs; the copies take 50 µs on the CPU and 2 µs on the GPU."""
    one = proposed(case_of(short_steps(20, 1, tmp_path)))["cuda_graph"]
    assert one.basis == "bound" and "20 identical launches per step" in one.evidence
    assert one.step_us == pytest.approx(430, abs=5)
    # The change removes 392 of the CPU's 430 µs: from the start of the first launching op to the end of the last one.
    assert one.step_us_after == pytest.approx(430 - 398 + 40 + 50, abs=15)


def test_a_cuda_graph_of_few_launches_is_not_proposed_if_copies_cost_more(tmp_path, case_of):
    assert "cuda_graph" not in proposed(case_of(short_steps(20, 200, tmp_path))), "copies take at most 400 µs"
    assert "cuda_graph" not in proposed(case_of(short_steps(3, 1, tmp_path))), "three launches take 60 µs"


def cudnn_calls(events, mark):
    return [e for e in inside(events, mark) if e["name"] == "aten::_scaled_dot_product_cudnn_attention"]


def test_plans_of_cudnn_attention_are_priced_by_the_time_that_their_calls_take_longer(case_of):
    path = CHANGES / "lengths/cudnn.json.gz"
    events = slices(raw(path))
    marks = raw_steps(events)
    calls = [[e["dur"] for e in cudnn_calls(events, mark)] for mark in marks]
    plans = [[dur for dur in some if dur > 5000] for some in calls]
    assert [len(some) for some in calls] == [32] * 3 and [len(some) for some in plans] == [4] * 3, "4 tokens, 8 layers"
    usual = statistics.median(dur for some in calls for dur in some if dur <= 5000)
    one = proposed(case_of(path))["attention_plans"]
    step = pace([mark["ts"] for mark in marks], marks[-1]["dur"])
    assert one.step_us == pytest.approx(step, rel=0.001) and one.basis == "replay"
    assert one.saves_us == pytest.approx(statistics.median(map(sum, plans)) - 4 * usual, rel=0.02)
    assert "4 of 32 calls of aten::_scaled_dot_product_cudnn_attention take" in one.evidence
    # Its time is in no op and no CUDA call, so it is as long without the profiler.
    assert one.unprofiled_step_us - one.unprofiled_step_us_after == pytest.approx(one.saves_us, rel=0.001)


def test_a_single_plan_or_a_launch_that_takes_long_is_no_reason_to_avoid_cudnn(case_of):
    """The first call of a process builds a plan, too, and a full launch queue makes any call long."""
    path = CHANGES / "lengths/cudnn.json.gz"

    def plans(document):
        events = slices(document)
        long = [e for mark in raw_steps(events) for e in cudnn_calls(events, mark) if e["dur"] > 5000]
        return sorted(long, key=lambda e: e["ts"]), events

    def only_the_first(document):
        long, events = plans(document)
        for e in long[1:]:
            for one in inside(events, e):
                one["name"] = one["name"].replace("cudnn_attention", "another_op")

    def waits_in_the_launch(document):
        long, events = plans(document)
        for e in long:
            launch = max((one for one in inside(events, e) if one["name"] == "cuLaunchKernelEx"), key=end)
            until, launch["ts"] = end(launch), e["ts"] + 1000
            launch["dur"] = until - launch["ts"]

    assert attention.attention_plans(case_of(path)) is not None
    assert attention.attention_plans(case_of(path, only_the_first)) is None
    assert attention.attention_plans(case_of(path, waits_in_the_launch)) is None
    assert attention.attention_plans(case_of(CHANGES / "lengths/flash.json.gz")) is None
    assert attention.attention_plans(case_of(CHANGES / "bert/eager.json.gz")) is None, "cuDNN has its plans"


def attention_calls(document):
    """Return the slices of attention by call: each has those of the op and of the ops in it, in order of time."""
    calls = []
    for e in sorted((e for e in slices(document) if "attention" in e["name"]), key=lambda e: e["ts"]):
        if "Input Dims" not in e.get("args", {}):
            continue
        if calls and e["ts"] < end(calls[-1][0]):
            calls[-1].append(e)
        else:
            calls.append([e])
    return calls


def with_sizes(size_of):
    """Return an edit of a trace. size_of: batch and keys of a call of attention, by its place and its own keys."""

    def edit(document):
        for place, call in enumerate(attention_calls(document)):
            batch, keys = size_of(place, call[0]["args"]["Input Dims"][1][2])
            for e in call:
                axis = 1 if e["name"] == "aten::_flash_attention_forward" else 2
                query, key, value = e["args"]["Input Dims"][:3]
                query[0] = key[0] = value[0] = batch
                key[axis] = value[axis] = keys

    return edit


def test_a_slow_call_with_the_shapes_and_strides_of_an_earlier_one_builds_no_plan(case_of):
    def same(document):
        with_sizes(lambda place, keys: (1, 100))(document)
        for call in attention_calls(document):
            for e in call:
                e["args"].pop("Input Strides", None)

    path = CHANGES / "lengths/cudnn.json.gz"
    assert attention.attention_plans(case_of(path, with_sizes(lambda place, keys: (1, keys)))) is not None
    assert attention.attention_plans(case_of(path, same)) is None

    def without_shapes(document):
        for e in slices(document):
            for name in ("Input Dims", "Input type", "Input Strides", "Concrete Inputs"):
                e.get("args", {}).pop(name, None)

    assert attention.attention_plans(case_of(path, without_shapes)) is not None, "shapes were not recorded"


@pytest.mark.parametrize(
    ("size_of", "grows"),
    [
        (lambda place, keys: (4, keys), True),
        (lambda place, keys: (1 + place // 8 % 2, keys), False),
        (lambda place, keys: (1, min(keys, 96)), False),
        (lambda place, keys: (1, 100 if place < 8 else 101), False),
    ],
    ids=["four sequences", "sequences come and go", "a window of keys fills", "keys grow only once"],
)
def test_a_cache_grows_only_if_every_token_has_one_key_more_for_the_same_sequences(case_of, size_of, grows):
    case = case_of(CHANGES / "lengths/flash.json.gz", with_sizes(size_of))
    assert (inference.static_cache(case) is not None) == grows


def attention_shapes(events):
    return [e["args"]["Input Dims"] for e in events if "attention" in e["name"] and "Input Dims" in e.get("args", {})]


def test_a_static_cache_is_proposed_where_each_token_has_one_key_more(case_of):
    path = CHANGES / "lengths/flash.json.gz"
    events = slices(raw(path))
    keys = sorted({dims[1][2] for dims in attention_shapes(events) if len(dims[1]) == 4 and dims[0][2] == 1})
    assert keys == list(range(keys[0], keys[0] + 12)), "three steps of four tokens"
    marks = raw_steps(events)
    step = pace([mark["ts"] for mark in marks], marks[-1]["dur"])
    one = proposed(case_of(path))["static_cache"]
    work = raw_work(events, marks[0])
    assert f"here from {keys[0]} to {keys[-1]}" in one.evidence and f"{len(work):,} launches" in one.evidence
    # A graph of so many kernels takes their GPU time and short gaps: its launch takes no longer.
    busy = sum(e["dur"] for e in work)
    assert one.step_us == pytest.approx(step, rel=0.001) and one.basis == "bound"
    assert busy < one.step_us_after < busy + len(work) * 1.0


def test_steps_that_each_generate_the_same_tokens_are_told_to_use_a_static_cache(case_of):
    """Each step launches the same kernels, but no two of its tokens have the same shapes, so no graph serves both."""
    path = ROOT / "tests/traces/h200/generate_calls.json.gz"
    events = slices(raw(path))
    marks = raw_steps(events)
    names = [[e["name"] for e in raw_work(events, mark)] for mark in marks]
    assert names[0] == names[1] and len(names) == 2
    found = proposed(case_of(path))
    assert "cuda_graph" not in found
    keys = sorted({dims[1][2] for dims in attention_shapes(events) if len(dims[1]) == 4 and dims[0][2] == 1})
    assert keys == list(range(65, 70)), "the first of six tokens comes from the prompt"
    assert "here from 65 to 69" in found["static_cache"].evidence


def test_a_static_cache_is_not_proposed_for_shapes_that_do_not_grow_token_by_token(case_of):
    path = CHANGES / "lengths/flash.json.gz"

    def with_keys(number_of):
        def edit(document):
            for e in slices(document):
                dims = e.get("args", {}).get("Input Dims")
                if dims and "attention" in e["name"] and len(dims) > 1:
                    axis = 1 if e["name"] == "aten::_flash_attention_forward" else 2
                    for place in (1, 2):
                        if len(dims[place]) == 4:
                            dims[place][axis] = number_of(dims[place][axis])

        return edit

    assert inference.static_cache(case_of(path)) is not None
    assert inference.static_cache(case_of(path, with_keys(lambda keys: 1024))) is None, "a cache of fixed size"
    assert inference.static_cache(case_of(path, with_keys(lambda keys: 2 * keys))) is None, "no growing cache"
    assert inference.static_cache(case_of(CHANGES / "lengths/static.json.gz")) is None
    assert inference.static_cache(case_of(LLM / "1x512_bf16_warm_eager_active2_shapes.json.gz")) is None


def without_shapes(document):
    for e in slices(document):
        for name in ("Input Dims", "Input type", "Input Strides", "Concrete Inputs"):
            e.get("args", {}).pop(name, None)
    document.pop("record_shapes", None)


def appended(document):
    """Yield the kernels that aten::cat launches in each step."""
    events = slices(document)
    cats = [e for e in events if e["name"] == "aten::cat"]
    launches = {e["args"]["correlation"]: e for e in events if "Launch" in e["name"] and "args" in e}

    def is_appended(one):
        call = launches.get(one["args"]["correlation"])
        return call and any(op["tid"] == call["tid"] and op["ts"] <= call["ts"] < end(op) for op in cats)

    for mark in raw_steps(events):
        yield [one for one in raw_work(events, mark) if one["cat"] == "kernel" and is_appended(one)]


@pytest.mark.parametrize(
    ("before", "change", "after"), [("cudnn", "attention_plans", "flash"), ("flash", "static_cache", "static")]
)
def test_a_comparison_sees_that_plans_or_a_growing_cache_are_gone(before, change, after):
    one, other = (compare.Side(measured(CHANGES / f"lengths/{name}.json.gz")) for name in (before, after))
    assert (
        catalogue.BY_NAME[change].followed(one, other)
        and not catalogue.BY_NAME[change].followed(other, one)
        and not catalogue.BY_NAME[change].followed(one, one)
    )


@pytest.mark.parametrize("change", ["skip_guards", pytest.param("cast_weights", marks=pytest.mark.exhaustive)])
def test_a_second_trace_shows_whether_a_proposal_was_followed(tmp_path, change):
    """An edited copy of the trace makes each change. The comparison in the other direction does not show it."""

    def side(path, edit):
        if edit is None:
            return compare.Side(measured(path))
        document = raw(path)
        edit(document)
        file = tmp_path / "edited.json"
        file.write_text(json.dumps(document))
        return compare.Side(summarize(read(file)))

    def quick_lookups(document):
        for e in document["traceEvents"]:
            if "Cache Lookup" in e["name"] and "dur" in e:
                e["dur"] /= 5

    def without_weight_casts(document):
        forward_alone(document)
        events = slices(document)
        gone = {id(e) for mark in raw_steps(events) for cast in weight_casts(events, mark)
                for e in [*inside(events, cast), *launched(events, cast)]}  # fmt: skip
        document["traceEvents"] = [e for e in document["traceEvents"] if id(e) not in gone]

    edits = {
        "skip_guards": (MLP_COMPILED, None, quick_lookups),
        "cast_weights": (AUTOCAST, forward_alone, without_weight_casts),
    }
    path, *both = edits[change]
    one, other = (side(path, edit) for edit in both)
    assert [name for name in edits if catalogue.BY_NAME[name].followed(one, other)] == [change]
    assert not catalogue.BY_NAME[change].followed(other, one)


def test_the_typical_step_need_not_be_replayed(tmp_path, monkeypatch):
    """Steps of 100, 130, 90 and 140 µs with pauses: the first is typical, and only the second takes the usual time."""
    lengths, pauses, events = (100, 130, 90, 140), (50, 0, 20, 0), []
    for number, length in enumerate(lengths):
        t = 1000 + sum(lengths[:number]) + sum(pauses[:number])
        events += [
            event(f"ProfilerStep#{number}", "user_annotation", t, length),
            event("aten::mm", "cpu_op", t + 2, 60),
            event("cudaMalloc", "cuda_runtime", t + 5, 20),
            event("cudaLaunchKernel", "cuda_runtime", t + 30, 5, correlation=number),
            event("kernel", "kernel", t + 37, 10, tid=7, correlation=number, device=0, stream=7),
            event("aten::item", "cpu_op", t + 64, 20),
            event("cudaStreamSynchronize", "cuda_runtime", t + 66, 16),
        ]
    path = tmp_path / "uneven.json"
    path.write_text(json.dumps({"traceEvents": events}))
    trace = read(path)
    summary = summarize(trace)
    monkeypatch.setattr(graph_module, "SINGLE", 0)
    graph = graph_of(trace, trace.steps[summary.typical_index])
    case = Case(trace, summary, graph)
    assert [step.number for step in case.steps] == ["#1"] and case.step.number == "#0"
    assert graph.step_us() == graph.recorded_us == 130
    found = {one.change: one for one, _ in each_priced(case)}
    assert found["remove_sync"].step_us_after == pytest.approx(110, abs=1)
    assert found["remove_sync"].evidence.endswith(": aten::item")
