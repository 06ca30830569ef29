"""Offloaded activations, float64, and waits of torch's own. The traces are of an H100.

Without the profiler the steps took: precision/images 12.0 ms in float64 and 1.8 to 2.1 in float32; precision/products
6.5 to 6.8, 5.3 in float32 and 1.3 with TF32; offloaded 14.4 to 14.8 and 1.6 to 2.1 without save_on_cpu;
solvers/cholesky 5.0 to 5.1 and 3.5 with cholesky_ex; three_dimensions/three 15.4 and 4.1 to 4.5 with four;
strides/transposed 7.8 and 3.5 contiguous, 3.9 compiled.
"""

import re

import pytest
from raw_events import raw_work
from test_later_workloads import edited, ms
from test_loops import file_of, predicted_and_compared, typical_step
from test_opportunities import priced_changes, raw_events

from tracereader.figures import summarize
from tracereader.trace import read


def in_float64(work):
    """Return the kernels whose names have the type double. cuBLAS writes d884gemm and f64f64."""
    kernels = [e for e in work if e["cat"] == "kernel"]
    return [e for e in kernels if re.search(r"double|d884gemm|f64f64|dgemm", e["name"])]


@pytest.mark.parametrize(("before", "change", "after", "within"), [
    ("precision/images", "single_precision", "precision/images_float32", (0.7, 1.3)),
    ("solvers/cholesky", "remove_sync", "solvers/cholesky_ex", (0.8, 1.3)),
    ("three_dimensions/three", "fused_attention", "three_dimensions/four", (1.0, 1.5)),
])  # fmt: skip
def test_the_predicted_step_is_near_the_one_that_was_recorded_after_the_change(before, change, after, within, capsys):
    title, said = predicted_and_compared(before, change, after, within, capsys)
    assert re.search(f"the first's report proposed .*{re.escape(title)}", said)


@pytest.mark.parametrize(("name", "float32", "tf32"), [
    ("precision/images", "precision/images_float32", None),
    ("precision/products", "precision/products_float32", "precision/products_tf32"),
])  # fmt: skip
def test_float64_kernels_are_counted_and_their_time_in_float32_is_near(name, float32, tf32):
    kernels = in_float64(raw_work(*typical_step(name)))
    one = priced_changes(file_of(name))["single_precision"]
    count, spent, after, without = re.match(
        r"float64 in (\d+) kernels, ([\d.]+ \w+); in float32 about ([\d.]+ \w+)(?:, without TF32 about (.*))?$",
        one.evidence,
    ).groups()
    assert int(count) == len(kernels)
    assert ms(spent) == pytest.approx(sum(e["dur"] for e in kernels) / 1e3, rel=0.05)
    assert ("TF32" in one.how) == (tf32 is not None)

    def busy_ms(after):
        return sum(e["dur"] for e in raw_work(*typical_step(after))) / 1e3

    assert 0.6 <= ms(after) / busy_ms(tf32 or float32) <= 1.3
    assert without is None or 0.8 <= ms(without) / busy_ms(float32) <= 1.3


def test_nothing_is_proposed_for_programs_in_float32():
    for name in ("precision/images_float32", "precision/products_float32", "precision/products_tf32"):
        assert "single_precision" not in priced_changes(file_of(name))


@pytest.mark.parametrize("name", ["precision/images", "precision/products"])
def test_without_shapes_the_peak_of_float64_limits_what_is_computed(tmp_path, name):
    """A kernel of 1 µs computes at most 67 MFLOP on an H100 SXM. In float32 it takes as long as these do there."""

    def without_shapes(events):
        for e in events:
            for key in ("Input Dims", "Input type", "Input Strides", "Concrete Inputs"):
                e.get("args", {}).pop(key, None)

    one, known = (
        priced_changes(file)["single_precision"]
        for file in (edited(file_of(name), tmp_path, without_shapes), file_of(name))
    )
    assert known.step_us_after <= one.step_us_after < one.step_us
    kernels = in_float64(raw_work(*typical_step(name)))
    convolutions = [e for e in kernels if re.search("engine<|convolve", e["name"])]
    products = [e for e in kernels if re.search("gemm_f64|d884gemm", e["name"])]
    others = [e for e in kernels if e not in convolutions + products]
    saved = sum(e["dur"] * (1 - 67 / (0.3 * 494)) for e in convolutions)
    saved += sum(max(0, e["dur"] - max(4, e["dur"] * 67 / (0.6 * 494))) for e in products)
    saved += sum(e["dur"] - max(e["dur"] / 2, min(e["dur"], 1)) for e in others)
    assert one.saves_us == pytest.approx(saved, rel=0.05)


def test_triangular_systems_are_not_promised_the_peak():
    """Their kernels are products by their family, and work row by row: in float32 they took 0.8 times as long."""
    work = in_float64(raw_work(*typical_step("solvers/cholesky_ex")))
    solving = sum(e["dur"] for e in work if re.search("trs[mv]_", e["name"]))
    evidence = priced_changes(file_of("solvers/cholesky_ex"))["single_precision"].evidence
    assert solving < 1e3 * ms(re.search(r"in float32 about ([\d.]+ \w+)", evidence)[1])


def test_copies_of_activations_are_neither_results_nor_waits_for_a_value():
    found = priced_changes(file_of("offloaded/on"))
    assert not {"overlap_copies", "remove_sync"} & set(found)


def not_back(events):
    """Let backward copy other sizes back."""
    for e in events:
        if "HtoD" in e["name"]:
            e["args"]["bytes"] += 1


def test_copies_that_do_not_come_back_are_results(tmp_path):
    found = priced_changes(edited(file_of("offloaded/on"), tmp_path, not_back))
    assert "overlap_copies" in found and "overlap_copies" not in priced_changes(file_of("offloaded/on"))


@pytest.mark.parametrize(("op", "variant"), [
    ("aten::linalg_cholesky", "torch.linalg.cholesky_ex"), ("aten::linalg_inv", "torch.linalg.inv_ex"),
    ("aten::linalg_solve", "torch.linalg.solve_ex"), ("aten::linalg_eigh", None),
])  # fmt: skip
def test_ops_that_wait_to_check_for_errors_have_a_variant_that_does_not(tmp_path, op, variant):
    def renamed(events):
        for e in events:
            if e["name"] == "aten::linalg_cholesky":
                e["name"] = op

    one = priced_changes(edited(file_of("solvers/cholesky"), tmp_path, renamed))["remove_sync"]
    usual = "keep the value on the GPU, or read it some steps later"
    assert one.how == (f"{variant}, which does not check for errors" if variant else usual)


def test_the_waits_of_lbfgs_are_its_own(tmp_path):
    """torch.optim.LBFGS reads the loss and directions on the CPU. A program cannot postpone that."""
    assert "remove_sync" not in priced_changes(file_of("solvers/lbfgs"))

    def another_optimizer(events):
        for e in events:
            e["name"] = e["name"].replace("#LBFGS.", "#Own.")

    assert "remove_sync" in priced_changes(edited(file_of("solvers/lbfgs"), tmp_path, another_optimizer))


def test_attention_of_three_dimensions_is_told_to_have_four(tmp_path):
    assert "give it four dimensions" in priced_changes(file_of("three_dimensions/three"))["fused_attention"].how

    def of_four(events):
        for e in events:
            if e["name"] == "aten::_scaled_dot_product_attention_math":
                e["args"]["Input Dims"] = [[64, 1, *dims[1:]] if dims else dims for dims in e["args"]["Input Dims"]]

    one = priced_changes(edited(file_of("three_dimensions/three"), tmp_path, of_four))["fused_attention"]
    assert "sdpa_kernel" in one.how


def test_attention_of_transposed_tensors_is_told_to_make_them_contiguous(tmp_path):
    events = raw_events(file_of("strides/transposed"))
    calls = [e for e in events if e["name"] == "aten::_scaled_dot_product_attention_math"]
    assert calls and all(e["args"]["Input Strides"][0][-1] == 1024 for e in calls)
    one = priced_changes(file_of("strides/transposed"))["fused_attention"]
    assert one.how == "call .contiguous() on q, k and v: its fused backends need a stride of 1 in the last dimension"
    low, high = one.estimated_savings
    assert low < 1 - 3.5 / 7.8 < high
    assert "fused_attention" not in priced_changes(file_of("strides/contiguous"))

    def without_strides(events):
        for e in events:
            e.get("args", {}).pop("Input Strides", None)

    one = priced_changes(edited(file_of("strides/transposed"), tmp_path, without_strides))["fused_attention"]
    assert "sdpa_kernel" in one.how and "falls back" in one.evidence


def test_compiled_attention_that_is_not_fused_is_told_to_name_a_backend():
    """Only the math backend calls aten::_safe_softmax, and Inductor names its kernels after such ops."""
    work = raw_work(*typical_step("strides/transposed_compiled"))
    assert sum("_safe_softmax" in e["name"] for e in work) == 12
    one = priced_changes(file_of("strides/transposed_compiled"))["fused_attention"]
    assert one.evidence.startswith("12 softmaxes") and one.evidence.endswith("falls back to them")
    assert one.how.startswith("name a backend with torch.nn.attention.sdpa_kernel(…)")
    assert "MultiheadAttention" not in one.how


def test_steps_with_packed_sequences_get_no_graph(tmp_path):
    def packed(events):
        for e in events:
            if e["name"] == "aten::softplus":
                e["name"] = "aten::_pack_padded_sequence"

    path = file_of("loops/selective_scan")
    assert "cuda_graph" in priced_changes(path)
    assert "cuda_graph" not in priced_changes(edited(path, tmp_path, packed))


def test_attention_in_bf16_is_priced_in_bf16_also_in_backward():
    """The math backend multiplies bf16 in fp32. Fused, both forward and backward compute in bf16."""
    one = priced_changes(file_of("three_dimensions/three"))["fused_attention"]
    assert "4 softmaxes between batched products and their backward" in one.evidence


def test_kernels_of_factorizations_are_known():
    out = summarize(read(file_of("solvers/cholesky")))
    unknown = [one.name for one in out.gpu_work if one.family == "kernels of unknown names" or not one.maker]
    assert not unknown and {one.maker for one in out.gpu_work if "getrf" in one.name} == {"cuSOLVER"}


def test_sparse_products_are_not_told_to_be_compiled_nor_to_postpone_the_size_of_their_result():
    """Without the profiler the step took 3.6 to 4.5 ms, and 5.2 to 5.6 compiled."""
    work = raw_work(*typical_step("sparse/coo"))
    assert sum("DtoH" in e["name"] for e in work) == 3, "each of 3 products is coalesced, which reads the size"
    assert not {"fuse_pointwise", "remove_sync"} & set(priced_changes(file_of("sparse/coo")))


def as_groups(waits):
    """Let products be those of groups, which wait for the groups' sizes or do not."""

    def edit(events):
        for e in events:
            e["name"] = e["name"].replace("_sparse_addmm", "_grouped_mm").replace("coalesce", "dispatch")
            if not waits and e["name"] in ("cudaStreamSynchronize", "cudaMemcpyAsync"):
                e["name"] = "cudaStreamIsCapturing"

    return edit


@pytest.mark.parametrize("waits", [True, False])
def test_groups_whose_sizes_are_read_on_the_cpu_save_no_calls_when_compiled(tmp_path, waits):
    """A Mixtral took 34 to 48 ms on an H100, and 38 to 46 compiled: torch.compile left these products eager."""
    found = priced_changes(edited(file_of("sparse/coo"), tmp_path, as_groups(waits)))
    said = found["fuse_pointwise"].evidence if "fuse_pointwise" in found else ""
    assert ("less CPU time" in said) != waits
