"""What kernel names say, family by family; and that an unknown one is said to be unknown."""

import pytest

from tracereader.trace import kernel_names


@pytest.mark.parametrize(
    ("name", "family", "maker", "parts"),
    [
        ("ampere_bf16_s16816gemm_bf16_128x256_ldg8_f2f_stages_64x3_nn", "GEMM", "cuBLAS, ampere",
         {"types": "bf16", "instruction": "16x8x16", "tile": "128x256", "K block x stages": "64x3", "layout": "nn"}),
        ("cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16_32x32_32x1_tn_align8", "GEMM", "CUTLASS, sm 80",
         {"types": "bf16", "instruction": "16x16x16", "tile": "32x32", "K block x stages": "32x1", "layout": "tn"}),
        ("void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_bf16_256x128_32x3_tn_align8>(x::Params)", "GEMM",
         "CUTLASS, sm 80", {"tile": "256x128", "layout": "tn"}),
        ("volta_sgemm_128x64_nn", "GEMM", "cuBLAS, volta", {"types": "fp32", "tile": "128x64", "layout": "nn"}),
        ("sm80_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize64x64x64_stage5_warpsize2x2x1_tensor16x8x16_kernel", "GEMM",
         "cuBLAS xmma, sm 80", {"types": "bf16", "tile": "64x64", "K block x stages": "64x5", "layout": "tn"}),
        ("nvjet_sm90_tst_256x128_64x4_1x2_h_badd_coopA_NNT", "GEMM", "cuBLAS nvjet, sm 90",
         {"types": "bf16", "tile": "256x128", "K block x stages": "64x4", "cluster": "1x2",
          "epilogue": "beta adds what the output holds", "cooperative": "coopA", "layout": "NNT"}),
        ("nvjet_sm90_tst_64x8_64x16_1x2_h_bz_bias_TNT", "GEMM", "cuBLAS nvjet, sm 90",
         {"epilogue": "beta zero, bias added", "layout": "TNT"}),
        ("Cijk_Ailk_Bljk_BBS_BH_MT128x128x32_MI32x32x8", "GEMM", "rocBLAS/hipBLASLt Tensile",
         {"types": "bf16", "tile": "128x128", "K block": "32"}),
        ("triton_poi_fused__unsafe_view_gelu_mul_0", "pointwise", "Inductor, Triton",
         {"fuses": "fuses _unsafe_view, gelu, mul"}),
        ("triton_per_fused_native_layer_norm_3", "reduction", "Inductor, Triton", {"kind": "persistent"}),
        ("triton_red_fused__to_copy_mean_1", "reduction", "Inductor, Triton", {"fuses": "fuses _to_copy, mean"}),
        ("triton_tem_fused_addmm_0", "GEMM", "Inductor, Triton", {"kind": "template"}),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<c10::BFloat16>, x>(int)",
         "pointwise", "ATen", {"does": "add", "vector": "4"}),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::GeluCUDAKernelImpl(at::TensorIteratorBase&)>",
         "pointwise", "ATen", {"does": "gelu"}),
        ("void at::native::vectorized_elementwise_kernel<8, at::native::BinaryFunctor<float, float, float, "
         "at::native::binary_internal::MulFunctor<float> >, std::array<char*, 3ul> >(int)", "pointwise", "ATen",
         {"does": "mul"}),
        ("void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::MeanOps<float> > >",
         "reduction", "ATen", {"does": "mean"}),
        ("_geglu_tanh_forward_kernel", "pointwise", "Liger, Triton", {"does": "geglu tanh forward"}),
        ("void pytorch_flash::flash_fwd_kernel<pytorch_flash::Flash_fwd_kernel_traits<64>>", "attention",
         "flash attention", {"does": "forward"}),
        ("fmha_cutlassF_bf16_aligned_64x64_rf_sm80", "attention", "memory-efficient, CUTLASS", {"does": "forward"}),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7", "attention", "cuDNN", {}),
        ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "communication", "NCCL",
         {"does": "AllReduce"}),
        ("void at::native::(anonymous namespace)::multi_tensor_apply_kernel<at::native::(anonymous namespace)::"
         "TensorListMetadata<2>, at::native::(anonymous namespace)::UnaryOpFunctor<float, 2, 1, 1>, at::native::Copy<"
         "float, float> >", "foreach", "ATen", {"does": "copy"}),
        ("Memcpy DtoD (Device -> Device)", "copy", "driver", {"does": "within the GPU's memory"}),
        ("Memset (Device)", "memset", "driver", {}),
    ],
)  # fmt: skip
def test_decode(name, family, maker, parts):
    found = kernel_names.decode(name)
    assert (found.family, found.maker) == (family, maker)
    assert parts.items() <= found.parts.items()


@pytest.mark.parametrize("name", ["", "my_kernel", "gemm_like_nothing", "nvjet", "triton_", "kernel<128>", "cutlass_"])
def test_an_unknown_name_is_said_to_be_unknown(name):
    assert kernel_names.decode(name).family == kernel_names.UNKNOWN
    assert str(kernel_names.decode(name)) == "unknown name"


@pytest.mark.parametrize("width", [5, 20, 40])
def test_short_names_fit(width):
    name = "void at::native::vectorized_elementwise_kernel<8, at::native::CUDAFunctor_add<c10::BFloat16>, x>(int)"
    assert len(kernel_names.short(name, width)) <= width
