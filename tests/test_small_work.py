"""Loops over small work, and kernels that read more than is used: benchmarks/pairs, recorded on an H100.

Without the profiler the steps took, before and after the change: acting_agent 11.0 and 0.77 ms, detection_loss 15.9 and
2.2, expert_layers 12.1 and 1.4, few_shot_sines 29.2 and 10.9, image_patches 7.8 and 0.30, pooled_texts 6.0 and 0.30
(all samples at once); masked_decoder 14.6 and 11.5, padded_encoder 6.8 and 5.6, windowed_texts 15.0 and 9.6 (no mask
tensor); nucleus_sampling 1.0 and 0.51, ranked_items 1.2 and 0.45, top_p_filter 0.48 and 0.55 (topk first);
item_embeddings 8.0 and 2.7, word_vectors 1.8 and 0.98 (sparse gradients).
"""

import math
import re
from collections import Counter

import pytest
from conftest import ROOT
from raw_events import end, raw_steps, raw_work
from test_graph_changes import in_step
from test_kept_promises import case_of, measured_us, saved
from test_later_workloads import edited
from test_opportunities import priced_changes, raw_events

from tracereader.changes import less_data
from tracereader.changes.equal_passes import FROM_THE_CPU, all_loops
from tracereader.figures import summarize
from tracereader.trace import read

PAIRS = ROOT / "benchmarks/pairs"
MEASURED_MS = {
    "acting_agent": (11.0, 0.77), "detection_loss": (15.9, 2.2), "expert_layers": (12.1, 1.44),
    "few_shot_sines": (29.2, 10.9), "image_patches": (7.8, 0.30), "pooled_texts": (6.0, 0.30),
}  # fmt: skip


def base(program):
    return PAIRS / program / "base.json.gz"


def typical(program):
    events, number = raw_events(base(program)), summarize(read(base(program))).chosen.number
    return events, next(one for one in raw_steps(events) if one["name"] == f"ProfilerStep{number}")


def numbers_of(ops, name, place):
    """Return the different numbers at a place of an op's arguments."""
    return {e["args"]["Concrete Inputs"][place] for e in ops if e["name"] == name and e["args"]["Input Dims"][0]}


@pytest.mark.parametrize("program", MEASURED_MS)
def test_a_loop_over_small_work_is_proposed_to_be_computed_at_once(program):
    before, after = MEASURED_MS[program]
    one = priced_changes(base(program))["larger_batch"]
    assert one.share == pytest.approx(1 - after / before, abs=0.11)
    assert one.how.startswith("if no pass needs another one's result")


@pytest.mark.parametrize(("program", "op", "place"), [
    ("detection_loss", "aten::select", 2), ("pooled_texts", "aten::select", 2), ("image_patches", "aten::select", 2),
    ("few_shot_sines", "aten::select", 2), ("private_training", "aten::select", 2), ("expert_layers", "aten::eq", 1),
])  # fmt: skip
def test_the_number_of_passes_is_that_of_the_parts_which_the_ops_take(program, op, place):
    events, mark = typical(program)
    ops = [e for e in in_step(events, mark, "cpu_op") if "Concrete Inputs" in e["args"]]
    (evidence,) = (one.evidence for name, one in priced_changes(base(program)).items() if name == "larger_batch")
    count = len({int(one) for one in numbers_of(ops, op, place) if one.isdecimal()})
    assert evidence.startswith(f"each of {count} passes ")


@pytest.mark.parametrize("program", ["acting_agent", "form_reader"])
def test_a_pass_may_have_an_input_of_its_own_from_the_cpu(program):
    """The images of form_reader differ in height and width. One batch of them took 6.0 ms instead of 108."""
    events, mark = typical(program)
    copies = [e for e in in_step(events, mark, "gpu_memcpy") if "HtoD" in e["name"]]
    evidence = priced_changes(base(program))["larger_batch"].evidence
    assert evidence.startswith(f"each of {len(copies)} passes computes with an input of its own from the CPU")


def inputs_and_results(events, mark):
    """Return a step's copies to the GPU and to the CPU, each after its launch, in the order of the launches."""
    launches = {e["args"].get("correlation"): e for e in events if e.get("cat") == "cuda_runtime"}
    pairs = [(launches[e["args"]["correlation"]], e) for e in in_step(events, mark, "gpu_memcpy")]
    pairs.sort(key=lambda pair: pair[0]["ts"])
    return [[pair for pair in pairs if way in pair[1]["name"]] for way in ("HtoD", "DtoH")]


# A pass designs a protein, compares two photos, or enlarges a tile. The CPU reads what it made.
@pytest.mark.parametrize(("program", "inputs", "saved_share"), [
    ("sequence_for_backbone", 4, 0.66), ("keypoint_matching", 4, 0.74), ("photo_upscaler", 1, 0.34),
])  # fmt: skip
def test_few_passes_may_be_computed_at_once_if_the_cpu_reads_the_result_of_each(program, inputs, saved_share):
    events, mark = typical(program)
    given, read = inputs_and_results(events, mark)
    begins = [launch["ts"] for launch, _ in given[::inputs]]
    assert all(
        any(a < launch["ts"] < b for launch, _ in read) for a, b in zip(begins, [*begins[1:], end(mark)], strict=True)
    )
    one = priced_changes(base(program))["larger_batch"]
    assert one.evidence.startswith(f"each of {len(begins)} passes computes with an input of its own from the CPU")
    assert one.share == pytest.approx(saved_share, abs=0.1)


@pytest.mark.parametrize("program", ["view_averaging", "multiple_choice_scores"])
def test_passes_that_the_gpu_limits_may_be_computed_at_once(program):
    """A batch of one fills few SMs, and its matrix products reach low rates."""
    case, one = case_of(base(program)), priced_changes(base(program))["larger_batch"]
    assert case.summary.waits_for == "gpu"
    assert "idle" not in one.evidence
    low, high = one.estimated_savings
    assert 0.2 < low <= saved(program, {"view_averaging": "at_once"}.get(program, "batches_of_16")) <= high


def around(events, launch):
    """Return the outermost op around a launch."""
    found = [e for e in events if e.get("cat") == "cpu_op" and e["ts"] <= launch["ts"] and end(launch) <= end(e)]
    return max(found, key=lambda e: e["dur"])


def read_at_the_end(events):
    """Let the CPU read only the last result of a step."""
    for mark in raw_steps(events):
        for _, copy in inputs_and_results(events, mark)[1][:-1]:
            copy["name"] = "Memcpy DtoD (Device -> Device)"


def results_of_the_inputs_shape(events):
    for mark in raw_steps(events):
        for launch, _ in inputs_and_results(events, mark)[1]:
            around(events, launch)["args"]["Input Dims"][0] = [1, 3, 160, 160]


def two_of_each_shape(events):
    """Let a step enlarge three kinds of tiles, two of each."""
    for mark in raw_steps(events):
        for place, (launch, _) in enumerate(inputs_and_results(events, mark)[0]):
            around(events, launch)["args"]["Input Dims"][0] = [[1, 3, 160, 160], [3, 160, 160], [76800, 1]][place // 2]


def results_without_a_dimension_of_one(events):
    for mark in raw_steps(events):
        for launch, _ in inputs_and_results(events, mark)[1]:
            around(events, launch)["args"]["Input Dims"][0] = [3, 160, 160]


def only_checks(events):
    for mark in raw_steps(events):
        for launch, _ in inputs_and_results(events, mark)[1]:
            around(events, launch)["name"] = "aten::is_nonzero"


def only_losses(events):
    for mark in raw_steps(events):
        for launch, _ in inputs_and_results(events, mark)[1]:
            around(events, launch)["args"]["Input Dims"][0] = []


def a_state_that_is_given_once(events):
    """Let a step copy a tensor of the results' shape before its passes, as a forecast's first state is."""
    for mark in raw_steps(events):
        launch, copy = inputs_and_results(events, mark)[0][0]
        op = around(events, launch)
        other = {"correlation": copy["args"]["correlation"] + 10**6}
        events += [
            op | {"ts": op["ts"] - 0.5, "dur": 0.4, "args": op["args"] | {"Input Dims": [[1, 3, 640, 640], []]}},
            launch | {"ts": op["ts"] - 0.4, "dur": 0.2, "args": launch["args"] | other},
            copy | {"ts": copy["ts"] - 0.1, "dur": 0.05, "args": copy["args"] | other},
        ]


def another_model_in_the_last_pass(events):
    for mark in raw_steps(events):
        last, _ = inputs_and_results(events, mark)[0][-1]
        for e in in_step(events, mark, "cpu_op"):
            if e["ts"] > end(last) and e["name"] == "aten::conv2d":
                e["name"] = "aten::conv1d"


@pytest.mark.parametrize("edit", [
    read_at_the_end, results_of_the_inputs_shape, two_of_each_shape, results_without_a_dimension_of_one, only_checks,
    only_losses, a_state_that_is_given_once, another_model_in_the_last_pass,
])  # fmt: skip
def test_few_passes_may_be_parts_of_one_computation(tmp_path, edit):
    file = edited(base("photo_upscaler"), tmp_path, edit)
    assert "larger_batch" not in priced_changes(file)


def test_a_later_input_of_another_kind_is_no_pass():
    """A search embeds four batches of texts, each with its mask, and then copies the embedded questions."""
    trace = read(base("embedding_search"))
    found = [one for one in all_loops(trace, trace.steps[-1]) if one.what == FROM_THE_CPU]
    assert {len(one.starts) for one in found} == {4}


def without_the_first_photo(events):
    for mark in raw_steps(events):
        inputs_and_results(events, mark)[0][0][1]["name"] = "Memcpy DtoD (Device -> Device)"


@pytest.mark.parametrize(("edit", "begins"), [(lambda events: None, True), (without_the_first_photo, False)])
def test_each_pass_copies_as_many_inputs(tmp_path, edit, begins):
    """With seven photos, every other one is the second of a pair, and no pass begins with it."""
    trace = read(edited(base("keypoint_matching"), tmp_path, edit))
    photos = {op.start for op in trace.steps[-1].named("aten::to".__eq__) if op.inputs.dims_at(0) == [1, 1, 480, 640]}
    found = [one for one in all_loops(trace, trace.steps[-1]) if one.what == FROM_THE_CPU]
    assert any(photos.issuperset(one.starts) for one in found) == begins


def copies_of(dims):
    def edit(events):
        for e in events:
            if e["name"] == "aten::to":
                e["args"]["Input Dims"][:1] = [dims]

    return edit


def fewer_but_longer_texts(events):
    """Let each pass of a step copy one token more of one text less, as a search whose beams end does."""
    for mark in raw_steps(events):
        for place, e in enumerate(e for e in in_step(events, mark, "cpu_op") if e["name"] == "aten::to"):
            e["args"]["Input Dims"][:1] = [[100 - place, 3 + place]]


def with_a_second_input(events):
    """Let each pass copy a matrix of another size, too."""
    for copy in [e for e in events if e.get("cat") == "gpu_memcpy" and "HtoD" in e["name"]]:
        (launch,) = (
            e for e in events
            if e.get("cat") == "cuda_runtime" and e["args"].get("correlation") == copy["args"]["correlation"]
        )  # fmt: skip
        around = [e for e in events if e.get("cat") == "cpu_op" and e["ts"] <= launch["ts"] and end(launch) <= end(e)]
        op = max((e for e in around if e["name"] == "aten::to"), key=lambda e: e["dur"])
        op["args"]["Input Dims"][:1] = [[4, 32]]
        later = {"correlation": copy["args"]["correlation"] + 10**6}
        events += [
            op | {"ts": end(op) + 0.01, "dur": 0.04, "args": op["args"] | {"Input Dims": [[5, 5]]}},
            launch | {"ts": end(op) + 0.02, "dur": 0.01, "args": launch["args"] | later},
            copy | {"ts": end(copy) + 0.01, "dur": 0.01, "args": copy["args"] | later},
        ]


def test_a_pass_may_copy_two_matrices_from_the_cpu(tmp_path):
    file = edited(base("acting_agent"), tmp_path, with_a_second_input)
    assert (
        priced_changes(file)["larger_batch"].evidence == priced_changes(base("acting_agent"))["larger_batch"].evidence
    )


def a_part_is_one_number(events):
    for e in events:
        if e["name"] in ("aten::select", "aten::unbind"):
            e["args"]["Input Dims"][0] = e["args"]["Input Dims"][0][:1]


@pytest.mark.parametrize(("program", "edit"), [
    ("acting_agent", copies_of([1])), ("acting_agent", copies_of([])),
    ("acting_agent", fewer_but_longer_texts), ("image_patches", a_part_is_one_number),
    ("pendulum_evolution", a_part_is_one_number),
])  # fmt: skip
def test_a_pass_that_takes_one_number_or_a_longer_text_may_go_on_from_the_pass_before(tmp_path, program, edit):
    """A sampler takes the next noise level so, and a decoder the place of the next token."""
    assert "larger_batch" in priced_changes(base(program))
    assert "larger_batch" not in priced_changes(edited(base(program), tmp_path, edit))


def test_passes_of_kernels_that_hardly_compute_may_run_on_the_cpu():
    """With the model on the CPU, acting_agent's step took 4.1 instead of 11.0 ms. Longer kernels are not told so."""
    events, mark = typical("acting_agent")
    work = in_step(events, mark, "kernel", "gpu_memcpy")
    last = max(e["ts"] for e in work if "HtoD" in e["name"])
    one_pass = [e for e in work if e["ts"] >= last]
    ids = {e["args"]["correlation"] for e in one_pass}
    launches = [e for e in events if e.get("cat") == "cuda_runtime" and e["args"].get("correlation") in ids]
    each, all_launches = sum(e["dur"] for e in one_pass) / len(one_pass), sum(e["dur"] for e in launches)
    how = priced_changes(base("acting_agent"))["larger_batch"].how
    assert f"{len(one_pass)} kernels and copies take {each:.1f} µs each on average, little more than empty ones" in how
    assert how.endswith(f"the CPU takes {all_launches:.1f} µs to launch them")
    for program in ("chosen_answers", "clip_tagger", "passage_ranker", "spoken_words"):
        assert "on the CPU" not in priced_changes(base(program))["larger_batch"].how


def as_cells(events):
    for e in events:
        if e["name"] == "aten::tanh":
            e["name"] = "aten::rnn_tanh_cell"


def with_a_loader_in_the_loop(events):
    for mark in raw_steps(events):
        ops = [e for e in in_step(events, mark, "cpu_op") if e["name"] == "aten::tanh"]
        loads = {"cat": "user_annotation", "name": "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"}
        events += [e | loads | {"ts": e["ts"] - 0.02, "dur": 0.01} for e in ops]


def with_messages(events):
    for e in events:
        if e.get("cat") == "kernel" and "tanh" in e["name"]:
            e["name"] = "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)"


@pytest.mark.parametrize("edit", [as_cells, with_a_loader_in_the_loop, with_messages])
def test_passes_that_follow_each_other_are_not_computed_at_once(tmp_path, edit):
    assert "larger_batch" not in priced_changes(edited(base("acting_agent"), tmp_path, edit))


def test_more_samples_in_a_loop_mean_more_launches():
    """So doubling the batch, which counts on the same number of launches, is not proposed."""
    assert "double_batch" not in priced_changes(base("pooled_texts"))
    assert "double_batch" in priced_changes(base("loop_optimizer"))


@pytest.mark.parametrize(("program", "calls", "measured"), [
    ("masked_decoder", 6, 0.213), ("padded_encoder", 8, 0.175), ("windowed_texts", 6, 0.358),
])  # fmt: skip
def test_attention_with_a_mask_tensor_is_as_slow_as_the_mask_makes_it(program, calls, measured):
    events, mark = typical(program)
    attention = [e for e in in_step(events, mark, "cpu_op") if e["name"] == "aten::scaled_dot_product_attention"]
    mask = attention[0]["args"]["Input Dims"][3]
    one = priced_changes(base(program))["no_mask_tensor"]
    assert len(attention) == calls and one.evidence.startswith(f"{calls} calls of fused attention")
    assert f"a mask of {mask[-2]:,} x {mask[-1]:,}" in one.evidence
    # The prediction keeps the whole matrix of scores. A causal mask hides half of it, so more may be saved.
    assert 0.05 < one.share < measured


def test_attention_without_a_mask_is_left_alone(tmp_path):
    def without_masks(events):
        for e in events:
            if "attention" in e["name"] and "Input Dims" in e.get("args", {}):
                e["args"]["Input Dims"][3] = []

    assert "no_mask_tensor" not in priced_changes(edited(base("masked_decoder"), tmp_path, without_masks))


@pytest.mark.parametrize(("program", "measured"), [("nucleus_sampling", 0.484), ("ranked_items", 0.622)])
def test_a_sort_of_long_rows_is_proposed_to_be_topk(program, measured):
    events, mark = typical(program)
    (values,) = {
        e["args"]["Input Dims"][0][-1] for e in in_step(events, mark, "cpu_op")
        if e["name"] == "aten::sort" and e["args"]["Input Dims"][0]
    }  # fmt: skip
    one = priced_changes(base(program))["largest_first"]
    assert f"rows of {values:,} values" in one.evidence
    # The GPU limits these measured steps, which does not show how much CPU time they need, so that savings are ranges.
    low, high = one.estimated_savings
    assert low <= measured <= high + 0.03 and high - low < 0.35


def test_topk_is_not_proposed_where_the_launches_limit_the_step():
    """It took longer there, because it launches more kernels than the sort of eight rows."""
    assert "largest_first" not in priced_changes(base("top_p_filter"))


@pytest.mark.parametrize(("program", "low", "high"), [("item_embeddings", 0.1, 0.66), ("word_vectors", 0.1, 0.55)])
def test_dense_gradients_of_large_tables_are_proposed_to_be_sparse(program, low, high):
    """The GPU limits the measured steps, so savings are ranges. In word_vectors' range lie the measured 45%."""
    events, mark = typical(program)
    ops = in_step(events, mark, "cpu_op")
    gradients = Counter()
    for e in ops:
        if e["name"] == "torch::autograd::AccumulateGrad":
            (dims, *_) = e["args"]["Input Dims"]
            gradients[len(dims) == 2 and dims[0] > 100_000] += math.prod(dims)
    share = gradients[True] / gradients.total()
    one = priced_changes(base(program))["sparse_gradients"]
    assert f"2 tables of embeddings are {share:.0%} of all gradients" in one.evidence
    least, most = one.estimated_savings
    assert low <= least <= most <= high
    assert program == "item_embeddings" or least < 1 - 0.98 / 1.78 < most


def test_a_table_whose_rows_are_mostly_used_keeps_its_dense_gradient(tmp_path):
    def smaller_tables(events):
        for e in events:
            if e["name"] == "aten::embedding_dense_backward":
                e["args"]["Concrete Inputs"][2] = "50000"

    assert "sparse_gradients" not in priced_changes(edited(base("item_embeddings"), tmp_path, smaller_tables))


def test_the_cpu_time_of_a_step_that_the_gpu_limits_is_estimated():
    """Its time without the profiler does not show it. With all recorded CPU time, the fused optimizer saved 34%."""
    one = priced_changes(base("item_embeddings"))["fused_optimizer"]
    assert one.share == pytest.approx(0.498, abs=0.06)


def test_what_follows_a_convolution_in_bf16_is_in_bf16_too():
    """Autocast took 12.7 ms instead of 19.3. Most of the time is copies and pointwise kernels."""
    one = priced_changes(base("super_resolution"))["half_precision"]
    assert one.share == pytest.approx(0.34, abs=0.1) and "torch.bfloat16" in one.how
    events, mark = typical("super_resolution")
    convolutions = [e for e in in_step(events, mark, "cpu_op") if e["name"] == "aten::cudnn_convolution"]
    assert f"{len(convolutions)} kernels" in one.evidence


def test_a_model_that_is_not_trained_can_be_converted_once():
    """Converted to bf16, a search for neighbors took 38% less on an H200: its sorts move half of the bytes, too.

    Three programs whose launches limit them took 16 to 40% longer. None of them is told to.
    """
    one = priced_changes(base("neighbor_search"))["half_precision"]
    assert one.how.startswith("convert the model and its inputs once with .to(torch.bfloat16), or torch.autocast(")
    low, high = one.estimated_savings
    measured = 1 - measured_us("neighbor_search", "half") / measured_us("neighbor_search", "base")
    assert low <= measured <= high + 0.12
    events = raw_events(base("neighbor_search"))
    kernels = [e for e in raw_work(events, raw_steps(events)[1]) if e["cat"] == "kernel"]
    sorts = sum(e["dur"] for e in kernels if re.search("computeBlock|gatherTopK|DigitCumSum", e["name"]))
    assert sorts / 2 / one.step_us > 0.15, "most of it is saved by the sorts"
    assert "convert" not in priced_changes(base("radiance_field"))["half_precision"].how, "it is trained"
    for program in ("sentence_embeddings", "beam_search", "stereo_depth"):
        assert "half_precision" not in priced_changes(base(program))


SDPA = "aten::scaled_dot_product_attention"
PADDED = [
    ("clause_reranker", "sorted_by_length", 48, 8, 512), ("conformer_ctc", "trim_padding", 16, 16, 500),
    ("embedding_search", "sort_by_length", 24, 32, 124), ("lora_tuning", "pad_to_longest", 12, 4, 512),
    ("protein_embeddings", "sort_by_length", 24, 16, 1002), ("summarization_finetuning", "trim_padding", 12, 8, 1024),
    ("summary_finetuning", "dynamic_padding", 6, 16, 512),
]  # fmt: skip


@pytest.mark.parametrize(("program", "variant", "calls", "samples", "positions"), PADDED)
def test_masks_of_each_sample_may_hide_padding(program, variant, calls, samples, positions):
    """With less padding, these programs took 19 to 32% less time on an H100 or H200."""
    one = priced_changes(base(program))["trim_padding"]
    low, high = one.estimated_savings
    assert low == 0 and one.conditional
    assert one.likely_share == pytest.approx(saved(program, variant), abs=0.13) and saved(program, variant) < high + 0.1
    events, mark = typical(program)
    ops = {e["args"].get("External id"): e for e in in_step(events, mark, "cpu_op")}
    only_filled = program in ("conformer_ctc", "lora_tuning")  # masks are added to masks there
    masked = []  # the numbers of positions
    for e in ops.values():
        scores, keys, *others = [*e["args"].get("Input Dims", []), [], [], [], []]
        mask = others[1] if e["name"] == SDPA else keys
        hides = e["name"] == "aten::masked_fill" or (not only_filled and e["name"] in (SDPA, "aten::add"))
        if hides and len(scores) == len(mask) == 4:
            last = keys[2] if e["name"] == SDPA else scores[3]
            if mask[0] == scores[0] > 1 and mask[3] == scores[2] == last:
                assert scores[0] == samples
                masked.append(last)
    assert len(masked) == calls and positions in (min(masked), max(masked))
    sizes = f"{positions:,}" if len(set(masked)) == 1 else f"{min(masked):,} to {max(masked):,}"
    said = (
        f"in {calls} calls of attention, each of a batch's {samples} samples has a mask or bias of its own, which may"
    )
    assert one.evidence.startswith(f"{said} hide some of its {sizes} positions; kernels")
    assert one.evidence.endswith("; the estimate goes from no padding to half of the positions")
    # Every kernel of an op whose tensors have samples x positions in one size depends on the number of positions.
    rows = 0.0
    for e in raw_work(events, mark):
        op = ops.get(e["args"].get("External id"), {"args": {}})
        sizes = {size for dims in op["args"].get("Input Dims", []) for size in dims if isinstance(size, int)}
        rows += e["dur"] * any(samples * number in sizes for number in set(masked))
    assert 0 < rows / 1e3 <= milliseconds(one.evidence.rsplit("take ", 1)[1].split(";")[0])


def milliseconds(said):
    number, unit = said.split()
    return float(number.replace(",", "")) * {"ms": 1.001, "µs": 0.001001}[unit]


def masks_of_all_samples(events):
    """Let one mask serve all samples, as a causal one does."""
    for e in events:
        if e["name"] in ("aten::masked_fill", "aten::masked_fill_"):
            e["args"]["Input Dims"][1][0] = 1


def no_attention(events):
    """Let what the masks fill be no scores of a softmax, as images are none."""
    for e in events:
        if e["name"] == "aten::_softmax":
            e["name"] = "aten::sigmoid"


@pytest.mark.parametrize("edit", [masks_of_all_samples, no_attention])
def test_other_masks_hide_no_padding(tmp_path, edit):
    assert "trim_padding" not in priced_changes(edited(base("conformer_ctc"), tmp_path, edit))


def test_weights_do_not_depend_on_the_number_of_positions():
    """Both have 512 rows in this program. A shape that a gradient has is a weight's."""
    events = raw_events(base("summary_finetuning"))
    gradients = [e["args"]["Input Dims"][0] for e in events if e["name"] == "torch::autograd::AccumulateGrad"]
    assert [512, 512] in gradients
    case = case_of(base("summary_finetuning"))
    weights = [work for work, _, op in case.activities if op is not None and op.inputs.dims[:1] == [[512, 512]]]
    nodes = [case.graph.activity[id(work)] for work in weights]
    shorter = less_data.trim_padding(case).most.dur
    assert nodes and all(shorter[node] == case.graph.dur[node] for node in nodes)
