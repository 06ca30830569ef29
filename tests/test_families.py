"""The family of a GPU activity, by its kernel's name and by the op that launched it."""

import json

import pytest
from raw_events import event

from tracereader import cli
from tracereader.figures import summarize
from tracereader.trace import read

TENSILE = "Cijk_Alik_Bljk_B_BS_BH_Bias_HA_S_SAV_UserArgs_MT256x128x64_MI16x16x1_SN_LDSB1_AFC1_ISA942_WG32_8_1"
CK_WEIGHT = (
    "_ZN2ck16tensor_operation6device37kernel_batched_gemm_xdlops_bwd_weightINS_47GridwiseGemm_bk0mk1_bk0nk1"
    "_mn_xdlops_bwd_weightILi64EttftLNS_25InMemoryDataOperationEnumE1ENS_16TensorDescriptor"
)
EPILOGUE = (
    "void cublasLt::epilogue::impl::globalKernel<8, 32, float, float, float, true, true, 1>(int, int, long, float*)"
)
KENTRY = "void ck_tile::kentry<1, ck_tile::SomethingNew<ck_tile::Problem>>()"
SGEMM = "volta_sgemm_128x64_nn"
NCHW = "void cudnn::ops::nchwToNhwcKernel<__half, __half, float, false, true, (cudnnKernelDataType_t)0>(int)"
ADD = "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, std::array<char*, 3ul> >()"


@pytest.fixture
def launched(tmp_path):
    """Return a function: launched(kernel, outermost op, …, innermost op) -> the measurements of that kernel."""

    def write(kernel, *ops, us=10, **innermost):
        args = [{} for _ in ops]
        if ops:
            args[-1] = innermost
        file = tmp_path / "made.json"
        events = [event(op, "cpu_op", 10 + at, 50 - 2 * at, **args[at]) for at, op in enumerate(ops)]
        events.append(event("hipLaunchKernel", "cuda_runtime", 30, 1, correlation=1))
        events.append(event(kernel, "kernel", 100, us, 7, correlation=1, device=0, stream=7))
        events.append(event("aten::empty", "cpu_op", 5, 1))
        file.write_text(json.dumps({"traceEvents": events}))
        summary = summarize(read(file))
        (one,) = summary.gpu_work
        assert [of.family for of in summary.families] == [one.family]
        assert [of.family for of in summary.kernels] == [one.family]
        return one

    return write


# The pairs of op and kernel from TraceLens' reports of ResNet, TimeSformer and BERT on MI300X and on H100, and made
# ones where a library's kernel is known and the op that launches it is documented.
@pytest.mark.parametrize(
    ("family", "kernel", "ops"),
    [
        # a convolution computed as a matrix product, and what runs beside it
        ("convolution", TENSILE, ["aten::conv2d", "aten::_convolution", "aten::miopen_convolution"]),
        ("convolution", SGEMM, ["aten::_conv_depthwise2d"]),
        ("convolution", SGEMM, ["aten::conv2d", "aten::convolution", "aten::_slow_conv2d_forward", "aten::addmm"]),
        ("convolution", SGEMM, ["autograd::engine::evaluate_function: ConvolutionBackward0", "ConvolutionBackward0"]),
        ("convolution", SGEMM, ["cudnn_convolution_backward_weight"]),
        ("convolution", "batched_transpose_32x32_half", ["aten::convolution_backward"]),
        ("convolution", "SubTensorOpWithScalar1d", ["aten::miopen_convolution"]),
        ("convolution", "SubTensorOpWithCastTensor1d", ["aten::convolution_backward"]),
        ("convolution", "Im2d2Col", ["aten::miopen_convolution"]),
        ("convolution", "transpose_NCHW2CNHW_V2_2D_WG_half", ["aten::miopen_convolution"]),
        ("convolution", NCHW, ["aten::cudnn_convolution"]),
        ("convolution", EPILOGUE, ["aten::cudnn_convolution"]),
        ("convolution", "void cublasLt::splitKreduce_kernel<32, 16, int, float>()", ["aten::convolution_backward"]),
        # the bias of a convolution is an op of its own, and a cast is one
        ("pointwise", ADD, ["aten::conv2d", "aten::_convolution", "aten::add_"]),
        # a product is one wherever no convolution asked for it
        ("GEMM", TENSILE, ["aten::linear", "aten::addmm"]),
        ("GEMM", TENSILE, ["ConvNextBlock", "aten::linear", "aten::addmm"]),
        ("GEMM", SGEMM, ["aten::_convert_weight_to_int4pack"]),
        ("GEMM", EPILOGUE, ["aten::linear", "aten::addmm"]),
        ("pointwise", EPILOGUE, []),
        ("reduction", "void cublasLt::splitKreduce_kernel<32, 16, int, float>()", ["aten::mm"]),
        ("normalization", NCHW, ["aten::cudnn_batch_norm"]),
        ("copy", NCHW, []),
        # a name that says nothing
        ("attention", "attn_fwd", ["aten::_scaled_dot_product_flash_attention", "aten::_flash_attention_forward"]),
        ("attention", "Kernel", ["vllm::unified_attention_with_output"]),
        ("attention", "_fwd_kernel", ["FlashAttnFunc"]),
        ("attention", KENTRY, ["aten::_flash_attention_backward"]),
        ("GEMM", KENTRY, ["aten::linear", "aten::mm"]),
        ("copy", "Kernel", ["_C_cache_ops::reshape_and_cache_flash"]),
        ("normalization", "Kernel", ["_C::fused_add_rms_norm"]),
        ("communication", "Kernel", ["c10d::allreduce_", "record_param_comms"]),
        ("unknown", "Kernel", ["LayerNormLinear", "Compiled"]),
        ("unknown", "Kernel", []),
        # one purpose, whatever op launched it
        ("communication", "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", ["aten::mm"]),
        ("other", "void selective_scan_fwd_kernel<Selective_Scan_fwd_kernel_traits<128>>()", ["SelectiveScanFn"]),
    ],
)  # fmt: skip
def test_the_family_by_the_launching_op(launched, family, kernel, ops):
    assert launched(kernel, *ops).family == family


@pytest.mark.parametrize(
    ("family", "category", "name", "moved"),
    [("copy", "gpu_memcpy", "CopyDeviceToDevice", 2000), ("copy", "gpu_memcpy", "CopyHostToDevice", 1000),
     ("copy", "gpu_memcpy", "Memcpy DtoD (Device -> Device)", 2000), ("memset", "gpu_memset", "FillBuffer", None),
     ("copy", "gpu_memcpy", "zeEventMemcpy(M2D)", 1000), ("memset", "gpu_memset", "zeEventFill", None)],
)  # fmt: skip
def test_copies_and_fills_of_any_vendors_driver(tmp_path, family, category, name, moved):
    events = [event("aten::empty", "cpu_op", 0, 1), event(name, category, 10, 5, 7, device=0, stream=7, bytes=1000)]
    (tmp_path / "a.json").write_text(json.dumps({"traceEvents": events}))
    (one,) = summarize(read(tmp_path / "a.json")).gpu_work
    assert (one.family, one.bytes_moved) == (family, moved)


def test_composable_kernels_gradient_of_a_weight_is_a_convolution_by_its_name(launched):
    assert launched(CK_WEIGHT).family == "convolution"


BF16 = "c10::BFloat16"
QKV = {"Input Dims": [[2, 128, 8, 64]] * 3 + [[]] * 6, "Input type": [BF16] * 3 + [""] * 6,
       "Concrete Inputs": [""] * 8 + ["True"]}  # fmt: skip


def test_torchs_own_attention_on_amd_has_flops(launched):
    one = launched("attn_fwd.kd", "aten::_scaled_dot_product_flash_attention", "aten::_flash_attention_forward", **QKV)
    pairs = sum(range(1, 129))  # of a query with each key up to its own
    assert (one.family, one.flops) == ("attention", 2 * 2 * 2 * 8 * pairs * 64)
    backward = launched("bwd_kernel_dk_dv.kd", "aten::_flash_attention_backward", **QKV)
    assert (backward.family, backward.flops, backward.name_says["does"]) == ("attention", None, "backward")


def test_helper_kernels_of_a_product_have_no_flops(launched):
    shapes = {"Input Dims": [[10], [64, 32], [32, 10]], "Input type": ["float"] * 3}
    assert launched(SGEMM, "aten::addmm", **shapes).flops == 2 * 64 * 32 * 10
    assert launched(EPILOGUE, "aten::addmm", **shapes).flops is None


CONV = {"Input Dims": [[8, 16, 32, 32], [4, 16, 3, 3], [], [], [], [], []], "Input type": ["float", "float"] + [""] * 5,
        "Concrete Inputs": ["", "", "", "[1, 1]", "[1, 1]", "[1, 1]", "1"]}  # fmt: skip


@pytest.mark.parametrize("kernel", ["Im2d2Col", "batched_transpose_32x32_half", "SubTensorOpWithScalar1d"])
def test_helper_kernels_of_a_convolution_have_no_flops(launched, kernel):
    one = launched(kernel, "aten::miopen_convolution", **CONV)
    assert (one.family, one.flops) == ("convolution", None)
    assert launched(TENSILE, "aten::miopen_convolution", **CONV).flops == 2 * 8 * 4 * 32 * 32 * 16 * 3 * 3


def of_two_ops(file, names, times):
    events = [event("aten::empty", "cpu_op", 0, 1)]
    for at, (op, kernel, us) in enumerate(zip(*names, times, strict=True)):
        start = 100 * at + 10
        events += [
            event(op, "cpu_op", start, 20), event("cudaLaunchKernel", "cuda_runtime", start + 5, 1, correlation=at + 1),
            event(kernel, "kernel", start + 30, us, 7, correlation=at + 1, device=0, stream=7),
        ]  # fmt: skip
    file.write_text(json.dumps({"traceEvents": events}))
    return summarize(read(file))


@pytest.mark.parametrize(
    ("times", "told"),
    [((50, 20, 10), "aten::add"), ((20, 10, 50), "aten::mul"), ((20, 20, 20), "several ops")],
)
def test_a_names_op_has_most_of_its_time(tmp_path, capsys, times, told):
    summary = of_two_ops(tmp_path / "a.json", (["aten::add", "aten::sub", "aten::mul"], ["k"] * 3), times)
    assert [(one.name, one.asked_by) for one in summary.kernels] == [("k", told)]
    assert cli.main([str(tmp_path / "a.json"), "--only", "kernels"]) == 0
    assert told in capsys.readouterr().out


@pytest.mark.parametrize("width", ["80", "120"])
def test_rows_of_a_table_that_differ_look_different(tmp_path, capsys, monkeypatch, width):
    """The names of these kernels and ops differ only in the middle, which does not fit."""
    monkeypatch.setenv("COLUMNS", width)
    names = [TENSILE.replace("LDSB1", f"LDSB{number}") for number in range(3)]
    names += [f"void some_library::wrapped_kernel<{'a' * 60}, {number}, {'b' * 60}>()" for number in range(3)]
    of_two_ops(tmp_path / "a.json", ([f"aten::{'x' * 30}{n}{'y' * 30}" for n in range(6)], names), range(10, 16))
    assert cli.main([str(tmp_path / "a.json"), "--only", "kernels"]) == 0
    rows = [line.split("  ")[0] for line in capsys.readouterr().out.splitlines()]
    rows = [row for row in rows if row.startswith(("Cijk", "some_library"))]
    assert len(rows) == len(set(rows)) == 6


APEX = (
    "void multi_tensor_apply_kernel<TensorListMetadata<4>, AdamFunctor<float, float, int>, float>(long, int volatile*)"
)
SCALES = "void multi_tensor_apply_kernel<TensorListMetadata<2>, ScaleFunctor<float, float>, float>(long, int volatile*)"


@pytest.mark.parametrize(
    ("kernel", "how"),
    [(APEX, "fused"), (SCALES, "foreach"), ("triton_for_fused_0", "compiled"), (ADD, "for-loop"),
     ("void kOptimizer32bit2State<float, 0>(float*)", "for-loop")],
)  # fmt: skip
def test_a_librarys_optimizer_is_recognized_by_its_kernels(tmp_path, kernel, how):
    events = [event("Optimizer.step#FusedAdam.step", "user_annotation", 0, 90), event("aten::empty", "cpu_op", 1, 2)]
    for at in (1, 2, 3):
        events.append(event("cudaLaunchKernel", "cuda_runtime", 10 * at, 5, correlation=at))
        events.append(event(kernel, "kernel", 100 * at, 50, 7, correlation=at, device=0, stream=7))
    (tmp_path / "a.json").write_text(json.dumps({"traceEvents": events}))
    (found,) = summarize(read(tmp_path / "a.json")).training.optimizers
    assert (found.name, found.how, found.launches) == ("FusedAdam", how, 3)


def test_an_optimizer_that_records_nothing_is_not_called_a_loop(tmp_path, capsys):
    events = [event("Optimizer.step#CPUAdam.step", "user_annotation", 0, 90), event("aten::mm", "cpu_op", 100, 20)]
    (tmp_path / "a.json").write_text(json.dumps({"traceEvents": events}))
    (found,) = summarize(read(tmp_path / "a.json")).training.optimizers
    assert found.how == ""
