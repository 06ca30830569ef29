"""Details of kernel names by family; an unknown name stays unknown."""

import pytest

from tracereader.trace import kernel_names

# Real names, none made up. "…" or "..." ends a name that is longer than a line here, or that its source cut.
# A line that is a family begins that family's names; a line with # says where the names below it come from.
WILD = """
# Traces of this project on H200 (shared/h200, shared/h200-x2, traces/reference); … where the full name is longer.
GEMM
nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_NNT
nvjet_sm90_tst_64x8_64x16_1x4_h_badd_NNT
nvjet_sm90_tst_64x8_64x16_4x1_v_bz_splitK_TNT
sm80_xmma_gemm_f32f32_f32f32_f32_nn_n_tilesize64x64x8_stage3_warpsize1x4x1_ffma_aligna4_alignc4_execute_kernel__5x…
void cutlass::Kernel2<cutlass_80_simt_sgemm_128x32_8x5_tn_align1>(cutlass_80_simt_sgemm_128x32_8x5_tn_align1::Params)
triton_per_fused__to_copy__unsafe_view_add_mean_mm_mul_pow_rsqrt_t_view_22
triton_red_fused__unsafe_view_mm_mul_silu_t_view_9
triton_red_fused__unsafe_view_add_embedding_mm_t_transpose_view_13
attention
cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_26_64x64x64_1x4x1_cga1x1x1_kernel0_0
cudnn_generated_fort_native_sdpa_sm80_flash_fprop_wmma_f16_knob_35_16x128x128_1x4x1_cga1x1x1_kernel0_0
void cudnn::fusion::compute_dot_do_o_specialized<true, 64>(void const*, void const*, void*, void*, unsigned int, …)
void cudnn::fusion::convert_dq_to_16bits<true>(void const*, void*, unsigned int, unsigned int, unsigned int, …)
triton_tem_fused_flex_attention_0
communication
ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)
ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)
ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)
copy
void at::native::(anonymous namespace)::CatArrayBatchedCopy<at::native::(anonymous namespace)::OpaqueType<2u>, …)
at::native::detail::split_with_sizes_copy_out_contiguous_no_cast_kernel(char**, char**, long*, long*, long*, long, long)
void at::native::detail::chunk_cat_cuda_kernel<char, char>(char**, char*, long*, long*, long*, long*, long*, long*, …)
void at::native::vectorized_gather_kernel<16, long>(char*, char*, long*, int, long, long, long, long, bool)
void at::native::index_elementwise_kernel<128, 4, at::native::index_copy_kernel_impl<at::native::OpaqueType<2> >(…
memcpy128
Memcpy HtoD (Pinned -> Device)
Memcpy DtoH (Device -> Pinned)
memset
Memset (Unknown)
optimizer
void at::native::(anonymous namespace)::multi_tensor_apply_kernel<at::native::(anonymous namespace)::FusedOptimizer…
normalization
void at::native::(anonymous namespace)::layer_norm_grad_input_kernel_vectorized<c10::BFloat16, float, true>(…)
void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<c10::BFloat16, float, true>(int, float, …)
void at::native::(anonymous namespace)::GammaBetaBackwardCUDAKernelTemplate<c10::BFloat16, float, 32u, 32u, 256u, …
reduction
void at::native::(anonymous namespace)::cunn_SoftMaxForward<4, float, float, float, at::native::(anonymous …
void at::native::(anonymous namespace)::nll_loss_forward_reduce_cuda_kernel_2d<float, float, long>(float*, float*, …
void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16, float, __nv_bfloat16, false, float, …
triton_per_fused__softmax_exp_masked_fill_mul_prepare_softmax_online_sub_view_0
pointwise
triton_poi_fused_add_copy__16
void at::native::triu_tril_kernel<bool, int, false, 8, false>(at::cuda::detail::TensorInfo<bool, int>, …)
void (anonymous namespace)::elementwise_kernel_with_index<int, at::native::arange_cuda_out(c10::Scalar const&, …
_geglu_tanh_forward_kernel
embedding
void at::native::(anonymous namespace)::compute_grad_weight<c10::BFloat16, long>(long const*, c10::BFloat16 const*, …
void at::native::(anonymous namespace)::sum_and_scatter<c10::BFloat16, long>(long const*, c10::BFloat16*, long, …
void at::native::(anonymous namespace)::krn_partial_segment_offset<long>(long*, long const*, long const*, …)
sort and scan
void at_cuda_detail::cub::detail::radix_sort::DeviceRadixSortOnesweepKernel<at_cuda_detail::cub::detail::radix::…
void at_cuda_detail::cub::detail::scan::DeviceScanInitKernel<at_cuda_detail::cub::ScanTileState<long, true> >(…)
void at_cuda_detail::cub::detail::unique_by_key::DeviceUniqueByKeySweepKernel<at_cuda_detail::cub::detail::…

# Names inside the libraries installed here: libtorch_cuda.so 2.15, libcublasLt 13, libcudnn 9, libnccl 2.30, by strings
GEMM
ampere_bf16_s1688gemm_bf16_64x128_sliced1x2_ldg8_relu_f2f_tt
ampere_cgemm_32x32_cc
ampere_gcgemm_64x32_cc
ampere_dgemm_64x64_lower_nt
ampere_h16816gemm_64x64_ldg8_stages_64x5_tt
turing_fp16_s1688gemm_fp16_64x64_sliced1x4_ldg8_f2f_tt
sm80_xmma_gemm_f32f32_tf32f32_f32_nn_n_tilesize256x32x32_stage4_warpsize4x1x1_tensor16x8x8_aligna4_alignc4
sm89_xmma_gemm_e4m3f16_e4m3f32_f32_tn_n_tilesize128x128x64_stage3_warpsize2x2x1_tensor16x8x32_bias_f16
sm90_xmma_gemm_f16f16_f16f32_f32_nn_n_tilesize128x256x32_warpgroupsize2x1x1_aux_bool_drelu
sm90_xmma_gemm_cf64cf64_f64f64_cf64_nt_n_tilesize64x64x32_stage3_warpsize4x2x1_tensor16x8x16
cutlass3x_sm100_tensorop_h256x128x16gemm_f16_f16_f16_f16_f16_256x128x64_0_nnn_align8_2sm_bias_f16_relu
cutlass3x_sm100_tensorop_s64x64x32gemm_e4m3_e5m2_f32_f16_e4m3_64x64x128_1x1x1_0_tnn_align4_1sm_bias_f16_gelu_aux_f16
cutlass3x_sm100_tensorop_s64x64x8tf32gemm_f32_f32_f32_f32_f32_64x64x32_0_nnn_align4_1sm_ptr_array
void zgemm1x1_kernel_core<true, true, true, true, true>(cublasZgemm1x1Params)
void gemmSN_NN_kernel<float, 256, 4, 2, 8, 2, 4, false, cublasGemvTensorStridedBatched<float const>, …
void at::native::sparse_semi_structured_apply_dense_k<true, true>(at::native::Params)
convolution
_5x_cudnn_ampere_fp16_s16816cudnn_fp16_128x128_ldg8_relu_f2f_exp_large_nhwc_tn_v1
_5x_cudnn_ampere_scudnn_winograd_128x128_ldg1_ldg4_relu_tile148n_nt_v1
ampere_scudnn_128x128_dgrad_exp_large_nhwc_tt_v1
turing_scudnn_128x128_stridedB_splitK_xregs_large_nn_v1
volta_s884cudnn_fp16_256x128_ldg8_splitK_dgrad_exp_small_nhwc_tt_v1
cutlass_tensorop_bf16_s16816wgrad_optimized_bf16_256x64_32x4_nhwc_align8
cutlass_tensorop_s1688dgrad_analytic_tf32_128x128_16x4_nhwc_align4
cutlass3x_sm100_tensorop_s64x64x16_conv2d_dgrad_bn_stat_f16_f16_f32_f16_64x64x64_dyn_cga_ndhwc_ndhwc_ndhwc_drelu…
sm80_xmma_wgrad_implicit_gemm_indexed_bf16bf16_bf16f32_f32_nhwckrsc_nhwc_tilesize128x128x32_stage4_warpsize2x2x1_g1
sm70_xmma_depthwise_convolution_fprop_tiling_f16f16_f32f32_f32_nhwckrsc_nhwc_tilesize1x4x8_1x3x3_1x2x2_1x1x1_stage2
void fft2d_r2c_16x16<float>(float2*, float const*, int, int, int, int, int, int, int, int)
void flip_filter<float, float>(float*, float const*, int, int, int, int)
void at::native::col2im_batched_kernel<bool>(long, bool const*, long, long, long, long, long, long, long, long, …)
normalization
void cudnn::bn_bw_1C11_singleread<float, 512, true, 1, 2, 0>(cudnn::bn_bw_1C11_args<float>)
void cudnn::detail::lrnForward<5, float, float>(cudnn::detail::LrnForwardParams<float, float>)
void at::native::batch_norm_collect_statistics_channels_last_kernel<at::native::Var, float, float, 4>(float const*, …
void at::native::batch_norm_transform_input_channels_last_kernel<float, float, float, 4>(float const*, …
void at::native::(anonymous namespace)::RowwiseMomentsCUDAKernel<float, float, true>(long, long, float, float const*, …
void at::native::(anonymous namespace)::ComputeFusedParamsCUDAKernel<float, float>(long, long, long, float const*, …
void at::native::(anonymous namespace)::weight_norm_fwd_first_dim_kernel<float, float>(float*, float*, float const*, …
reduction
void softmax_fw_small_kernel<float, float, 2, 1, 1, 0>(float*, float const*, int, int, int, float, float)
void at::native::(anonymous namespace)::max_pool_forward_nchw<float, int>(int, float const*, long, long, long, int, …
void at::native::lpmax_cleanup<int>(int const*, at::native::TensorListAddresses, long const*, int)
void at::native::(anonymous namespace)::ctc_loss_log_alpha_gpu_kernel<float, int>(float*, float const*, long const*, …
void at::native::(anonymous namespace)::cunn_SpatialSoftMaxBackward<float, float, float, int, at::native::…
void nrm2_kernel<float, float, float, 0, 0, 128>(cublasNrm2Params<int, float, float>)
pointwise
void at::native::(anonymous namespace)::fused_dropout_kernel_vec<float, float, unsigned int, 1, 2, bool>(…)
void at::native::(anonymous namespace)::upsample_bilinear2d_out_frame<float, float>(int, float, float, bool, torch::…
void at::native::(anonymous namespace)::grid_sampler_2d_kernel<float, int>(int, at::cuda::detail::TensorInfo<float …
void at::native::tril_indices_kernel<int>(int*, long, long, long, long, long)
void cudnn::dropout_apply_mask<float, float, 4>(float, float*, float const*, long, long, unsigned int const*)
void axpy_kernel_val<float, float>(cublasAxpyParamsVal<float, float, float>)
copy
void at::native::_scatter_gather_elementwise_kernel<128, 8, at::native::_cuda_scatter_fill_internal_kernel<int, int>::…
void at::native::(anonymous namespace)::indexSelectSmallIndex<int, int, unsigned int, 1, 1, -2>(at::cuda::detail::…
void at::native::(anonymous namespace)::transpose_copy_tiled_kernel<unsigned int, 1, 1, 32, true>(unsigned int …)
void at::native::roll_cuda_kernel<int>(int const*, int*, long, long, long, long, long, long)
void transposeBlock_kernel<float, float, float, 32u, 8u>(int, int, int, float, float const*, float*)
void at::native::remove_padding_2<float>(float const*, float*, int const*, int const*, int const*, int, int)
embedding
void at::native::(anonymous namespace)::EmbeddingBag_updateOutputKernel_sum_mean<float, int>(int const*, …
void at::native::(anonymous namespace)::embedding_backward_feature_kernel<float, float, int>(int const*, float const*, …
sort and scan
void at::native::sbtopk::gatherTopK<int, unsigned int, 1, false>(at::cuda::detail::TensorInfo<int const, …
void at::native::radixSortKVInPlace<2, -1, 32, 32, int, long, unsigned int>(at::cuda::detail::TensorInfo<int, …
void at::native::tensor_kernel_scan_innermost_dim<int, std::plus<int> >(int*, int const*, unsigned int, …
at::native::mbtopk::computeDigitCumSum(short*, unsigned int*, unsigned int)
at::native::internal::unique_bool_write_output(int, int const*, bool*, long*)
void at::native::(anonymous namespace)::searchsorted_cuda_kernel<int, int>(int*, int const*, int const*, long const*, …
void at::native::(anonymous namespace)::sampleMultinomialOnce<float, float>(long*, long, int, float const*, …
attention
fmha_cutlassB_f16_aligned_64x64_k65536_dropout_sm80
fmha_cutlassB_f32_aligned_128x64_k128_sm80
fmha_cutlassB_f16_notaligned_64x64_k32_dropout_sm75
optimizer
at::native::amp_update_scale_cuda_kernel(float*, int*, float const*, double, double, int)
communication
ncclSymkDevKernel_AllReduce_AGxLL_R_sum_bf16(ncclSymkDevWorkArgs4K)
ncclDevKernel_AllReduce_Sum_u64_TREE_LL(ncclDevKernelArgsStorage<4096ul>)
void c10d::nvshmem_extension::exchangeSplitAndOffset_2d<true>(long*, long*, int, int, unsigned long, bool)
other
void getrf_panel<float, float, 4, 4, 3, 3, 4, true>(int, float* const*, int, int*, int*, int)
void kernel<getrf_wo_pivot_params_<double, 0, 256, 1, 64, 64, 68, 16, 1, 1> >(int, int, void*, int, void*, int)
xxtrf4_set_info_ker(int, int*)
void RNN_blockPersist_bp_LSTM_FMA<float, float, float, 32>(block_bp_args_lstm<float, float>)
void volta_lstm_cta_768<0>(params_t)
at::native::_assert_async_cuda_kernel(c10::complex<float> const*, at::native::Msg)

# A table of an SGLang server's kernels (GitHub, "PyTorch ATen … sglang/sgl-kernel"), cut there at 80 characters
attention
void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90<...
void flash::prepare_varlen_num_blocks_kernel<1, true>(int, int, int, int const*,...
void cutlass::device_kernel<flash::FlashAttnFwdCombine<cute::tuple<cute::C<8>, c...
GEMM
fused_moe_kernel
nvjet_tst_384x8_64x4_2x1_v_bz_TNT
sort and scan
void count_and_sort_expert_tokens_kernel<int>(int const*, int*, int*, unsigned l...
void moe_align_block_size_kernel<int>(int const*, int*, int*, int*, int, int, un...
void topkGatingSoftmax<__nv_bfloat16, 8, 128, 4, 16>(__nv_bfloat16 const*, bool ...
void at_cuda_detail::cub::DeviceScanKernel<at_cuda_detail::cub::DeviceScanPolicy...
pointwise
void flashinfer::BatchQKApplyRotaryPosIdsCosSinCacheEnhancedKernel<true, false, ...
void flashinfer::activation::act_and_mul_kernel<__nv_bfloat16, &(float silu<float>(float const&))>(__nv_bfloat16*, __nv_
triton_poi_fused_clamp_copy__index_lt_neg_where_0
normalization
void flashinfer::norm::RMSNormKernel<8u, __nv_bfloat16>(__nv_bfloat16*, __nv_bfl...
void flashinfer::norm::FusedAddRMSNormKernel<8u, __nv_bfloat16>(__nv_bfloat16*, __nv_bfloat16*, __nv_bfloat16*, unsigned
copy
write_req_to_token_pool_triton
reduction
triton_per_fused_copy__mul_sum_0
other
void at::native::_assert_async_cuda_kernel<bool>(bool const*, at::native::Msg)

# vLLM servers' profiles (GitHub: DeepSeek-V4 and others, "Runtime profile comparison", "Largest kernels left in …")
communication
void (anonymous namespace)::multimem_all_reduce_kernel<c10::BFloat16, 16>(c10::BFloat16*, unsigned long, …)
void vllm::cross_device_reduce_1stage<__nv_bfloat16, 8>(vllm::RankData*, vllm::RankSignals, vllm::Signal*, …)
GEMM
void marlin_moe_wna16::Marlin<1125899906909960l, 562949953487106l, 1125899906909960l, 2814749767106568l, 128, 4, 8, …
void marlin::Marlin<(long)1125899906910725, (long)1125899906843648, (long)1125899906910725, (long)1…
nvjet_tss_256x128_64x4_1x2_h_bz_coopA_TNT
void deep_gemm::sm90_fp8_gemm_1d2d_impl<(cute::UMMA::Major)0, 0u, 4096u, 1024u, 1u, 256u, 128u, 128u, 128u, 128u, …
void deep_gemm::sm90_tf32_hc_prenorm_gemm_impl<24u, 16384u, 64u, 32u, 64u, 1u, 128u, 12u, 128u, 128u>(unsigned int, …
void deep_gemm::fp8_gemm_kernel_swapAB<34816u, 5120u, 128u, 16u>
attention
void sm90::fwd::sparse_attn_fwd_kernel<sm90::fwd::KernelTemplate<512, true>, sm90::fwd::KernelTemplate<512, true>::…
void sm90::decode::sparse_fp8::flash_fwd_splitkv_mla_fp8_sparse_kernel<sm90::decode::sparse_fp8::KernelTemplate<…
kernel_unified_attention
kernel_unified_attention_2d
pointwise
void per_token_group_quant_8bit_kernel<c10::BFloat16, c10::Float8_e4m3fn, true, true, float>(c10::BFloat16 const*, …
void vllm::act_and_mul_kernel<c10::BFloat16, __nv_bfloat162, &vllm::silu_kernel<c10::BFloat16>, …
normalization
void vllm::rms_norm_kernel<c10::BFloat16, 8, 2, true>(c10::BFloat16*, c10::BFloat16 const*, long, long, long, …
reduction
moe_sum_kernel
embedding
void vllm::vocab_embedding::vocab_parallel_embedding_kernel<int, uint4>(uint4*, int const*
copy
memcpy32_post
void vllm::reshape_and_cache_flash_kernel<__nv_bfloat16>(__nv_bfloat16 const*)
sort and scan
_gumbel_sample_kernel
unknown
Kernel
_post_update_kernel
_apply_write_kernel
other
mhc_post_tilelang_kernel
hc_head_fuse_tilelang_kernel

# vLLM and SGLang on AMD MI355X, and an RDNA4 server's rocprof table (GitHub); AMD names of a classifier's test
GEMM
Cijk_Alik_Bljk_BBS_BH_Bias_HA_S_SAV_UserArgs_MT256x256x64_MI16x16x1_SN_LDSB1_GRPM1_GSU1_ISA950_K1_WG32_8_1
Cijk_Ailk_Bljk_HHS_BH_MT128x128x32_MI32x32x8x1_SN_1LDSB0_APM1_ABV0_ACED0_AF0EM1
_gemm_a8w8_blockscale_kernel_GROUP_K_128_GROUP_N_128…
_gemm_a16_w16_kernel_BLOCK_SIZE_M_32_BLOCK_SIZE_N_32
void r4d_gemm_w4a16_nt_m64_kernel<1, 1, false>(unsigned short const*, unsigned int const*, …) [clone .kd]
wvSplitK_hf_sml_
wvSplitKQ_hf_
LLGemm1_kernel
void wvSplitKrc_<__hip_bfloat16, 64, 16, 4, 8, 1, 64…
_ZN5aiter36bf16gemm_bf16_tn_256x256_bpreshuffleE
_ZN5aiter44f4gemm_bf16_per1x32Fp4_noBpreShuffle_256x256E
aiter::fp8gemm_bf16_blockscale_BpreShuffle_32x128
_ZN2ck40kernel_gemm_xdl_cshuffle_v3_multi_d_b_preshuffle
void ck::kernel_gemm_xdl_cshuffle_v3<ck::GridwiseGem…
hgemm_bf16_32x64x128x5_SPK8_W2x2x1_BLDS1_TN_AS1_0
mfma_moe2_afp8_wfp4_bf16_cshuffle_t32x256x256_vscale…
_ZN5aiter52fmoe_bf16_blockscaleFp8_g1u1_novs_silu_1tg_ps_32x256E
attention
_ZN5aiter41mla_dec_stage1_bf16_a16w16_subQ128_mqa128E
_ZN5aiter42mla_a16w16_qh16_m16x4_n16x1_coex0_mask1_psE
_ZN5aiter44PA_A16W8_BLK256_1TG_4W_16mx1_64nx4_MTP_PS_PBE
_ZN5aiter19fmha_fwd_hd128_bf16E
aiter::fmha_fwd_hd128_bf16_causal_rtna_group
paged_attention_ll4mi_QKV_mfma16_kernel
_ZN7ck_tile6kentryILi1ENS_13FmhaFwdKernelEEEvv
_ZN7ck_tile6kentryILi2ENS_22FmhaBwdOGradDotOKernelIN...
_ZN7ck_tile6kentryILi1ENS_19FmhaBwdDQDKDVKernelINS_2...
_fwd_grouped_kernel_stage1
_sparse_attn_decode_partial_kernel
kernel_unified_attention.kd
sort and scan
_ZN5aiter19topksoftmax_4x128x4E
moeTopK
moe_align_block_size_kernel
mxfp4_moe_sort_kernel
_ZN7ck_tile6kentryILi1ENS_16MoeSortingKernelINS_16MoeSortingProblemEEEEEvNT0_5KargsE
void aiter::opus_moe_sorting_entry<aiter::MoeSorting…
void vllm::topKPerRowDecode<1024, true, false, true>
void vllm::moe::topkGatingSoftplusSqrt<6, 384, 4, 8,…
void at::native::mbtopk::fill<unsigned int, unsigned int>(unsigned int*, unsigned int, unsigned int) [clone .kd]
normalization
_ZN7ck_tile6kentryILi1ENS_12Rmsnorm2dFwdINS_27Rmsnor…
_ZN5aiter24add_rmsnorm_quant_kernelIDF16bDF16bLi256E…
_fused_q_kv_rmsnorm_kernel
_fused_qk_norm_rope_store_kernel
triton_red_fused__to_copy_embedding_mul_rms_norm_w4_gemm_0.kd
communication
ncclDevKernel_Generic_4(ncclDevKernelArgsStorage<4096ul>)
cross_device_reduce_1stage
void vllm::cross_device_reduce_2stage<__hip_bfloat16…
copy
__amd_rocclr_copyBuffer
concat_and_cache_mla_kernel
reshape_and_cache_kernel_flash.kd
memset
__amd_rocclr_fillBufferAligned.kd
pointwise
scaled_quant_kernel
_ZN5aiter37dynamic_per_group_scaled_quant_kernelIDF1…
_inverse_rope_gptj_kernel
_fused_clamp_silu_mul_kernel_BLOCK_SIZE_N_4096_QUANT…
triton_poi_fused_10.kd
reduction
triton_per_fused__to_copy_abs_clamp_div_max_preshuffle_gemm_squeeze_view_0.kd

# MIOpen and RCCL: ResNet-50 under rocprofv3 (GitHub: an HPC course's profiling page); others by their published names
convolution
igemm_fwd_gtcx3_nhwc_fp16_bx0_ex0_bt128x128x32_wt32x32x8_ws1x1_wr2x2_ta1x8x2x1_1x4x1x64_tb1x8x2x1_1x4x1x64_gkgs
igemm_wrw_gtcx3_nhwc_fp16_bx0_ex1_bt256x256x32_wt32x32x8_ws2x2_wr2x2_ta1x4x1x8_1x8x1x32_tb1x4x1x8_1x8x1x32_gkgs
igemm_bwd_gtcx3_nhwc_fp16_bx0_ex0_bt128x128x32_wt32x32x8_ws1x1_wr2x2_ta1x8x2x1_1x4x1x64_tb1x8x1x2_1x4x1x64_gkgs
miopenSp3AsmConv_v30_3_1_gfx9_fp32_f2x3_stride1
MIOpenConvUni
normalization
MIOpenBatchNormBwdSpatial
MIOpenBatchNormFwdTrainSpatial
pointwise
SubTensorOpWithScalar1d
communication
rccl_main_kernel(ncclDevComm*, unsigned long, ncclWork*)

# nsys tables of training: Nemotron-H MoE (DeepEP, Mamba), GPT-OSS under Megatron, AlexNet and ResNet on A100 (GitHub)
communication
void deep_ep::intranode::combine<__nv_bfloat16, (int)8, (int)768, (int)4096>(T1 *, float *
void deep_ep::intranode::cached_notify_combine<(int)8>(void **, int *, int, int, int, int
void deep_ep::intranode::notify_dispatch<(int)8>(const int *, int *, const int *, int *, i
void primus_turbo::deep_ep::intranode::cached_notify_dispatch<8>(int const*, i…
ncclDevKernel_ReduceScatter_Sum_f32_RING_LL(ncclDevKernelArgsStorage<(unsigned long)4096>)
ncclKernel_AllReduce_RING_LL_Sum_float(ncclWorkElem)
GEMM
void cutlass::device_kernel<at::cuda::detail::enable_3x_kernel_for_sm9x<cutlass::gemm::ker
nvjet_tst_168x128_64x5_1x2_h_bz_TNN
ampere_gcgemm_64x64_nt
ampere_sgemm_64x32_sliced1x4_tn
volta_sgemm_32x128_nn
void gemmk1_kernel<int, float2, (int)256, (int)5, (bool)1, (bool)0, (bool)0, (bool)0, cublasGemvTen…
void gemv2T_kernel_val<int, int, float, float, float, float, (int)128, (int)16, (int)2, (int)2, (bo…
void dot_kernel<float, (int)128, (int)0, cublasDotParams<cublasGemvTensorStridedBatched<const __hal…
void reduce_1Block_kernel<float, (int)128, (int)7, cublasGemvTensorStridedBatched<float>, cublasGem…
std::enable_if<!T7, void>::type internal::gemvx::kernel<int, int, float, float, float, float, (bool…
void magma_sgemmEx_kernel<float, float, float, (bool)1, (bool)0, (int)6, (int)4, (int)6, (int)3, (int)4>(int, int, …
optimizer
void at::native::<unnamed>::multi_tensor_apply_kernel<at::native::<unnamed>::FusedOptimize
void multi_tensor_apply_kernel<TensorListMetadata<4>, AdamFunctor<float>>(int)
convolution
void causal_conv1d_channellast_fwd_kernel<Causal_conv1d_channellast_fwd_kernel_traits<(int
cudnn_infer_ampere_scudnn_128x64_relu_xregs_large_nn_v1
void cutlass_cudnn_infer::Kernel<cutlass_tensorop_s1688fprop_optimized_tf32_128x128_16x4_nhwc_align…
void cutlass_cudnn_train::Kernel<cutlass_tensorop_s1688wgrad_optimized_tf32_256x128_16x3_nhwc_align…
sm80_xmma_dgrad_implicit_gemm_tf32f32_tf32f32_f32_nhwckrsc_nhwc_tilesize128x128x16_stage4_warpsize2…
void fft2d_c2r_32x32<float, (bool)0, (bool)0, (unsigned int)0, (bool)0, (bool)0>(T1 *, const float2…
void implicit_convolve_sgemm<float, float, (int)1024, (int)5, (int)5, (int)3, (int)3, (int)3, (int)…
void explicit_convolve_sgemm<__half, int, (int)128, (int)6, (int)7, (int)3, (int)3, (int)5, (int)0,…
void cudnn::cnn::conv2d_grouped_direct_kernel<(bool)0, (bool)1, (bool)0, (bool)0, (bool)0, (bool)0,…
void cudnn::winograd_nonfused::winogradForwardFilter4x4<float, float>(cudnn::winograd_nonfused::WinogradFilterParams<…
void cudnn::winograd::generateWinogradTilesKernel<0,...
void cudnn::engines_precompiled::im2col4d_kernel<__half, long>(cudnn::engines_precompiled::im2col4d…
void cask__5x_cudnn::computeOffsetsKernel<(bool)0, (bool)0>(cask__5x_cudnn::ComputeOffsetsParams)
void cudnn::detail::dgrad_engine<float, 512, 6, 5, 3, 3, 3, false>(int)
void wgrad_alg0_engine<float, 128, 5, 5, 3, 3, 3, false, 512>(int, int, int, float const*, int, float*, float const*, …
maxwell_scudnn_winograd_128x128_ldg1_ldg4_relu_tile148m_nt_v1
cudnn_infer_volta_scudnn_128x64_3dconv_fprop_small_n...
copy
void cudnn::ops::nchwToNhwcKernel<float, float, float, (bool)0, (bool)1, (cudnnKernelDataType_t)2>(…
void cudnn::engines_precompiled::nhwcToNchwKernel<__half, __half, float, (bool)1, (bool)0, (cudnnKernelDataType_t)0>(…
_permute_kernel
_unpermute_kernel
normalization
void transformer_engine::normalization::rmsnorm_fwd_general_kernel<transformer_engine::nor
void transformer_engine::normalization::rmsnorm_bwd_finalize_general_k
_layer_norm_bwd_kernel
void cudnn::bn_fw_tr_1C11_kernel_NCHW<float, float, int, 512, true, 1, true>(cudnnTensorStruct, float const*, …
void cudnn::bn_bw_1C11_kernel_new<float, float, float2, 128, true, 1>(float)
void cudnn::detail::lrn_fw_Nd_kernel<__half, float, (bool)1, (bool)0>(cudnnTensorStruct, const T1 *…
reduction
void cudnn::pooling_fw_4d_kernel<float, float, cudnn::maxpooling_func<float, float, (cudnnNanPropag…
void at::native::<unnamed>::max_pool_backward_nchw<float, float>(const T1 *, const long *, int, lon…
void at::native::<unnamed>::adaptive_average_pool<float>(const T1 *, T1 *, int, int, int, int, long…
void splitKreduce_kernel<(int)32, (int)16, int, float, float, float, float, (bool)1, (bool)1, (bool…
void <unnamed>::softmax_warp_backward<float, float, float, (int)7, (bool)1, (bool)0>(T2 *, const T1…
pointwise
void op_generic_tensor_kernel<(int)3, float, float, float, (int)256, (cudnnGenericOp_t)0, (cudnnNan…
void at::native::vectorized_elementwise_kernel<(int)4, at::native::<unnamed>::launch_clamp_scalar(a…
triton_poi_fused__to_copy_cat_mul_silu_silu_backward_split_1
sort and scan
_sort_chunks_by_idxs_kernel
other
_chunk_scan_fwd_kernel
_chunk_state_fwd_kernel

# Flash-attention 2 to 4, cuDNN's and FlashInfer's attention, video generation on Blackwell (GitHub profiles)
attention
kernel_cutlass_kernel_flash_attncuteflash_fwd_sm100FlashAttentionForwardSm100_object_at__t
flash::enable_sm90<flash::FlashAttnBwdSm90<flash::CollectiveMainloopBwdS...>>
flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<Flash_bwd_kernel_traits<...>>
void flashinfer::BatchDecodeWithPagedKVCacheKernel<(flashinfer::PosEncodingMode)0, (unsigned int)2, (unsigned int)1, …
void flashinfer::BatchPrefillWithRaggedKVCacheKernel<flashinfer::KernelTraits<(flashinfer::MaskMode)1, (unsigned …
void flashinfer::PersistentVariableLengthMergeStates<...>
fmhaSm100fKernel_QkvBfloat16OBfloat16H64PagedKvCausalP64VarSeqQ128Kv128PersistentContext
_attn_bwd_dkdv_inline_delta_kernel
fmha_cutlassF_f32_aligned_64x64_rf_sm80(PyTorchMemEffAttention::AttentionKernel<float, cutlass::arch::Sm80, true, …
communication
flashinfer::comm::ulysses_pcie::UlyssesPcieBarrier(unsigned long *, flashinfer::comm::ulysses_pcie::…
GEMM
nvjet_tst_256x160_64x5_2x1_2cta_v_bz_TNT
void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_64x256_32x4_tn_align8>(T1::Params)
cutlass3x_sm100_simt_sgemm_f32_f32_f32_f32_f32_128x64x16_1x1x1_3_tnn_align1_bias_f32_relu
normalization
_rms_norm_rope_kernel
triton_red_fused_add_mul_native_layer_norm_view_0
triton_red_fused__to_copy_add_addmm_mean_mul_pow_rsqrt_view_0
pointwise
rope_fused_3way_kernel_v2_0
triton_poi_fused_addmm_gelu_view_3
void at::native::<unnamed>::upsample_nearest2d_out_frame<c10::Half, &at::native::nearest_neighbor_compute_source_index>…
copy
void at::native::<unnamed>::replication_pad_forward_kernel1d<float>(torch::headeronly::detail::…
void at::native::indexFuncLargeIndex<c10::BFloat16, long, unsigned int, (int)2, (int)2, (int)-2, (bool)1, at::…
sort and scan
void at_cuda_detail::cub::detail::scan_by_key::DeviceScanByKeyKernel<at_cuda_detail::cub::detail::scan_by_key::…
void at_cuda_detail::cub::DeviceSelectSweepKernel<at_cuda_detail::cub::detail::device_select_policy_hub<long, bool, …
convolution
void at::native::<unnamed>::conv_depthwise2d_forward_kernel_generic<float, int>(torch::headeronly::detail::…
void cutlass__5x_cudnn::Kernel<cutlass_tensorop_s1688fprop_optimized_tf32_128x64_16x6_nhwc_align4>(T1::Params)

# Recommenders and older nets: HTA's kernel table (Meta), a simulator's list of MNIST, AlexNet, BERT and GPT-2 kernels
embedding
void split_embedding_codegen_forward_unweighted_kernel<float, float, float, long, 2ul>(at::Generic…
bounds_check_indices_kernel
linearize_cache_indices_kernel
lxu_cache_lookup_kernel
copy
void fbgemm_gpu::permute_2D_data_kernel<false, int, int>(int, int, int const*)
indexing_backward_kernel
genericTranspose_kernel
normalization
cuApplyLayerNorm
reduction
void cunn_ClassNLLCriterion_updateOutput_kernel<float, float>(float*, float*, float*, long*, float*, int, int, …
pointwise
void kernelPointwiseApply2<TensorMaskedFillOp<float, bool>, float, bool, unsigned int, 1, 2>(OffsetInfo<float, …
_bfloat16_to_float_cuda_kernel
void cublasLt::epilogue::impl::globalKernel<8, 32, float, float, float, true, true, 1>(int, int, long, float*, …
GEMM
void cutlass::Kernel2<cutlass_80_tensorop_s1688gemm_128x64_16x6_tn_align4>(cutlass_80_tensorop_s1688gemm_128x64_16x6…
void gemvNSP_kernel<float, float, float, 1, 16, 4, 1024, cublasGemvParams<cublasGemvTensorStridedBatched<float …
convolution
void at::native::im2col_kernel<float>(long, float const*, long, long, long, long, long, long, long, long, …)
optimizer
adam_cuda_kernel

# Names of Triton kernels in packages: Liger 0.8.5 (installed here), Triton's tutorials; bitsandbytes, Megatron (GitHub)
normalization
_rms_norm_forward_kernel
_fused_add_rms_norm_backward_kernel
_layer_norm_backward_kernel
_group_norm_forward_kernel
_layer_norm_fwd_fused
pointwise
_swiglu_forward_kernel
_geglu_tanh_backward_kernel
_triton_rope
_triton_qwen2vl_mrope
add_kernel
kDequantizeBlockwise
kQuantizeBlockwise
reduction
liger_cross_entropy_kernel
_jsd_kernel
_kldiv_kernel_forward
_softmax_single_block_forward_kernel
scaled_upper_triang_masked_softmax_warp_forward
softmax_kernel
embedding
embedding_forward_kernel
GEMM
matmul_kernel
kgemm_4bit_inference_naive
attention
_attn_fwd
other
selective_scan_fwd_kernel
# Serving engines and libraries beside PyTorch, as pasted into their issues
communication
void sglang::cross_device_reduce_1stage<__nv_bfloat16, 2>
moeA2ADispatchKernel
GEMM
bmm_E2m1_E2m1E2m1_Fp32_bA16_bB16_bC16_t128x8x512u2_s5_et128x8_m128x8x64_cga1x1x1
_matmul_ogs_NNT_bf16xbf16xmxfp4_16x256x128x1_swiglu
void bnb::kgemm_4bit_inference_naive<__half, 128, 16>
normalization
void rms_norm_f32<1024, true>
unknown
void fast_hadamard_transform_kernel<fast_hadamard_transform_kernel_traits<128, 13, c10::BFloat16>>
reduction
void vision::ops::roi_align_forward_kernel_impl<float>
void tensorrt_llm::kernels::cutlass_kernels::finalizeMoeRoutingKernel<__nv_bfloat16>
pointwise
void upsample_bilinear2d_out_frame<c10::Half, float>

# MI300X: TraceLens' reports of ResNet, TimeSformer, BERT and Qwen; MIOpen's, Composable Kernel's and AOTriton's sources
attention
attn_fwd
attn_fwd.kd
bwd_kernel_dk_dv.kd
bwd_kernel_dq.kd
bwd_kernel_fuse
bwd_preprocess
aiter::fmha_bwd_hd128_bf16_causal_a16_psskddv
_ZN7ck_tile6kentryILi256ELi2ENS_13FmhaFwdKernelINS_2...
void ck_tile::kentry<1, ck_tile::UnifiedAttentionKernel<ck_tile::UnifiedAttentionPipeline…
void aiter::paged_attention_ll4mi_reduce_kernel<__hip_bfloat16, 128, 128, 256, 1>
GEMM
Cijk_Alik_Bljk_B_BS_BH_Bias_HA_S_SAV_UserArgs_MT256x128x64_MI16x16x1_SN_LDSB1_AFC1_AFEM1_AFEM1_ASEM1_CLR1_CADS0_…
Cijk_Ailk_Bljk_S_B_Bias_HA_S_SAV_UserArgs_MT16x16x128_MI16x16x1_SN_LDSB1_AFC1_AFEM1_AFEM1_ASEM1_CLR1_CADS0_DTVA0_…
Custom_Cijk_Alik_Bljk_F8B8BS_BH_Bias_shortname1
void ck::kernel_gemm_xdl_cshuffle_v3<ck::GridwiseGemmMultiD_ABScale_xdl_cshuffle_v3<ck::tensor_layout::gemm::RowMajor…
void ck::kernel_moe_gemm<ck::GridwiseMoeGemmBlockScale<ck::tensor_layout::gemm::RowMajor, …
void ck_tile::kentry<1, ck_tile::GroupedGemmKernel<ck_tile::GemmSpatiallyLocal…
void ck_tile::kentry<1, ck_tile::MoeFlatmmKernel<ck_tile::…
_grouped_fp8_persistent_gemm_kernel
void rocblas_gemvn_kernel<64, 16, float>(int)
convolution
_ZN2ck16tensor_operation6device12_GLOBAL__N_139kernel_grouped_conv_fwd_xdl_cshuffle_v3INS_28GridwiseGemm_xdl_cshuffle_v3…
_ZN2ck16tensor_operation6device12_GLOBAL__N_149kernel_grouped_conv_fwd_multiple_abd_xdl_cshuffleINS_34GridwiseGemm…
_ZN2ck16tensor_operation6device37kernel_batched_gemm_xdlops_bwd_weightINS_47GridwiseGemm_bk0mk1_bk0nk1_mn_xdlops_bwd_weight…
void ck::kernel_gemm_xdlops_bwd_weight<float, float, float>()
void ck_tile::kentry<2, ck_tile::GroupedConvolutionBackwardWeightKernel<ck_tile::…
igemm_bwd_gtcx3_nhwc_bf16_bx0_ex1_bt128x64x32_wt32x32x8_ws1x1_wr1x2_ta1x8x2x1_1x4x1x64_tb1x4x1x2_1x8x1x32_mh_gkgs
miopenSp3AsmConvFury_v2_4_1_gfx11_fp16_dot2_edc
miopenSp3AsmConvRage_v4_6_1_gfx9
miopenGcnAsmConv1x1U
naive_conv_nonpacked_bwd_nchw_half_double_half
gridwise_convolution_forward_implicit_gemm_v4r4_xdlops_nchw_kcyx_nkhw
Im2d2Col
Col2Im2d
copy
batched_transpose_32x32_half
batched_transpose_256x4_half
transpose_NCHW2CNHW_V1_1D_WG_float
pointwise
SubTensorOpWithCastTensor1d
MIOpenNeuronFwd
Op2dTensorLite
rotary_fwd_kv_kernel.kd
reduction
mloPoolingG
gridwise_generic_reduce_1
Cijk_SS_BiasS_HAS_ScaleAlphaVec_PostGSU4_VW4
communication
mscclKernel_Sum_half_Simple_false(ncclDevComm*, mscclAlgo*, mscclWork*)
sort and scan
void rocprim::detail::onesweep_iteration_kernel<rocprim::…
void rocprim::ROCPRIM_400000_NS::detail::trampoline_kernel<rocprim::…
other
fft_rtc_fwd_len1024_factors_16_16_4_wgs_128

# cuDNN 7 and 8 on older GPUs (TensorFlow's and PyTorch's profiles on GitHub), Apex, Transformer Engine, bitsandbytes
convolution
maxwell_scudnn_128x32_relu_medium_nn
maxwell_scudnn_winograd_128x128_ldg1_ldg4_tile148n_nt
volta_scudnn_128x64_relu_interior_nn_v1
pascal_scudnn_128x64_relu_small_nn
scudnn_128x64_relu_xregs_large_nn
scudnn_winograd_128x128_ldg1_ldg4_relu_tile148t_nt
void xmma_cudnn::gemm::kernel<xmma_cudnn::implicit_gemm::fprop_indexed::Kernel_traits<xmma_cudnn::Ampere_hmma_fp32…
normalization
void cuComputeGradInput<float, float, c10::BFloat16>(c10::BFloat16 const*, c10::BFloat16 const*, int, int)
void layer_norm::ln_fwd_kernel<layer_norm::Kernel_traits<__nv_bfloat16, __nv_bfloat16, …
optimizer
void kPreconditionOptimizer32bit2State<float, 0, 4096, 8>(float*, float*)
void multi_tensor_apply_kernel<TensorListMetadata<4>, LAMBStage1Functor<float>, float>(int, int volatile*)
communication
kuserbuffers_pushsend
void userbuffers_fp16_sum_inplace_gpu_rr_rs_oop<8>(int, int)
pointwise
void transformer_engine::gated_act_kernel<__nv_bfloat16>()
void transformer_engine::unary_kernel<8, true, float>()

# nano-vLLM, SageAttention, vLLM and SGLang: names of their own kernels, by their sources
copy
store_kvcache_kernel
_store_kvcache_kernel
void vllm::moe::shuffleInputRowsKernel<__nv_bfloat16>(void*)
void moe_permute_topK_kernel<__nv_bfloat16>(int)
create_flashinfer_kv_indices_triton
assign_req_to_token_pool
attention
_sage_fwd_kernel
reduce_segments
mha_varlen_fwd_kernel
_fwd_kernel_splitK
chunk_fwd_kernel_o
chunk_scaled_dot_kkt_fwd_kernel
recompute_w_u_fwd_kernel
merge_16x16_to_64x64_inverse_kernel
void qk_int_sv_f16_attn_kernel<128u, 64u, 32u, 64u, 128u, (DataType)0, (QuantGranularity)2>(signed char*, …
sort and scan
void moe_fused_gate_kernel<float>(void*)
rejection_greedy_sample_kernel
_row_id_map_pass_1_kernel
pointwise
apply_repetition_penalties_kernel
void transformer_engine::ptx::cast_fp8_2D_kernel<float>(int)
_dynamic_mxfp4_quant_kernel
"""


def _wild():
    family = ""
    for line in WILD.splitlines():
        if line in kernel_names.FAMILIES:
            family = line
        elif line and not line.startswith("#"):
            yield family, line


@pytest.mark.parametrize(
    ("family", "name"),
    [*_wild(), ("GEMM", "matvec_kernel"), ("attention", "attend_kernel"), ("unknown", "attendance_kernel")],
)
def test_the_family_of_a_name_from_the_wild(family, name):
    assert kernel_names.decode(name).family == family


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
        ("triton_per_fused_native_layer_norm_3", "normalization", "Inductor, Triton", {"kind": "persistent"}),
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
         "float, float> >", "copy", "ATen", {"does": "copy"}),
        ("Memcpy DtoD (Device -> Device)", "copy", "driver", {"does": "within the GPU's memory"}),
        ("Memset (Device)", "memset", "driver", {}),
        # TF32: 16x8x8 on inputs of 4 bytes; and what is not TF32
        ("ampere_sgemm_128x64_nt", "GEMM", "cuBLAS, ampere", {"types": "fp32", "layout": "nt"}),
        ("cutlass_80_tensorop_s1688gemm_128x128_16x5_nn_align4", "GEMM", "CUTLASS, sm 80",
         {"types": "TF32", "instruction": "16x8x8", "sums in": "fp32", "tile": "128x128", "K block x stages": "16x5"}),
        ("ampere_bf16_s1688gemm_bf16_64x128_sliced1x2_ldg8_relu_f2f_tt", "GEMM", "cuBLAS, ampere", {"types": "bf16"}),
        ("sm80_xmma_gemm_f32f32_tf32f32_f32_nn_n_tilesize32x32x64_stage3_warpsize2x1x2_tensor16x8x8", "GEMM",
         "cuBLAS xmma, sm 80", {"types": "TF32", "tile": "32x32", "K block x stages": "64x3", "layout": "nn"}),
        ("ampere_gcgemm_64x64_nt", "GEMM", "cuBLAS, ampere", {"types": "complex fp32"}),
        ("ampere_dgemm_64x64_lower_nt", "GEMM", "cuBLAS, ampere", {"types": "fp64"}),
        ("cutlass3x_sm100_tensorop_h256x128x16gemm_f16_f16_f16_f16_f16_256x128x64_0_nnn_align8_2sm_bias_f16_relu",
         "GEMM", "CUTLASS 3, sm 100", {"types": "fp16", "instruction": "256x128x16", "tile": "256x128", "K block": "64",
                               "epilogue": "bias added, ReLU", "layout": "nnn"}),
        # a solution that can add a bias does not say that it does
        ("Cijk_Alik_Bljk_BBS_BH_Bias_HA_S_SAV_UserArgs_MT256x256x64_MI16x16x1_SN", "GEMM", "rocBLAS/hipBLASLt Tensile",
         {"types": "bf16", "tile": "256x256", "K block": "64"}),
        # what the letters of Tensile's types begin with
        ("Cijk_Alik_Bljk_B_BS_BH_Bias_HA_S_SAV_UserArgs_MT256x128x64_MI16x16x1_SN_LDSB1", "GEMM",
         "rocBLAS/hipBLASLt Tensile", {"types": "bf16", "tile": "256x128", "K block": "64"}),
        ("Cijk_Ailk_Bljk_S_B_Bias_HA_S_SAV_UserArgs_MT16x16x128_MI16x16x1_SN", "GEMM", "rocBLAS/hipBLASLt Tensile",
         {"types": "fp32", "tile": "16x16"}),
        ("Cijk_Ailk_Bljk_S_MX_B_Bias_HA_S_SAV_UserArgs_MT128x128x32_MI16x16x1", "GEMM", "rocBLAS/hipBLASLt Tensile",
         {"types": "TF32"}),
        ("Cijk_Alik_Bljk_F8BS_BH_Bias_HA_S_SAB_SAV_UserArgs_MT256x256x128", "GEMM", "rocBLAS/hipBLASLt Tensile",
         {"types": "fp8"}),
        ("Cijk_Ailk_Bljk_SB_MT64x64x8_SN", "GEMM", "rocBLAS/hipBLASLt Tensile", {"types": "fp32"}),
        ("Cijk_Ailk_Bljk_HBH_MT64x64x8_SN", "GEMM", "rocBLAS/hipBLASLt Tensile", {"types": "fp16"}),
        ("Cijk_Alik_Bljk_I8II_BH_MT64x64x8_SN", "GEMM", "rocBLAS/hipBLASLt Tensile", {"types": "int8"}),
        ("Cijk_SS_BiasS_HAS_ScaleAlphaVec_PostGSU4_VW4", "reduction", "rocBLAS/hipBLASLt Tensile", {"types": ""}),
        # attention of AMD's GPUs, forward and backward
        ("attn_fwd.kd", "attention", "Triton", {"does": "forward"}),
        ("bwd_kernel_dk_dv.kd", "attention", "Triton", {"does": "backward"}),
        ("_sage_fwd_kernel", "attention", "Triton, by hand", {"does": "forward"}),
        ("void flash::flash_fwd_splitkv_combine_kernel<Flash_fwd_kernel_traits<128, 64, 128, 4, false, false, "
         "cutlass::bfloat16_t>, 4, 1, true>(flash::Flash_fwd_params)", "attention", "flash attention",
         {"does": "adds the parts of split keys"}),
        # convolutions
        ("void cutlass::Kernel2<cutlass_75_tensorop_f16_s1688gemm_f16_64x64_tn_align1>(T1::Params)", "GEMM",
         "CUTLASS, sm 75", {"types": "fp16", "tile": "64x64"}),
        ("_ZN2ck16tensor_operation6device37kernel_batched_gemm_xdlops_bwd_weightINS_47GridwiseGemm_bk0mk1",
         "convolution", "Composable Kernel", {"does": "gradient of the weight"}),
        ("scudnn_128x64_relu_xregs_large_nn", "convolution", "cuDNN", {"tile": "128x64"}),
        ("sm80_xmma_dgrad_implicit_gemm_tf32f32_tf32f32_f32_nhwckrsc_nhwc_tilesize128x128x16_stage4", "convolution",
         "cuDNN xmma, sm 80", {"types": "TF32", "tile": "128x128", "does": "gradient of the input"}),
        ("void cutlass__5x_cudnn::Kernel<cutlass_tensorop_s1688fprop_optimized_tf32_128x64_16x6_nhwc_align4>"
         "(T1::Params)",
         "convolution", "cuDNN", {"types": "TF32", "tile": "128x64", "does": "forward"}),
        # attention
        ("fmha_cutlassF_bf16_aligned_64x64_rf_sm80", "attention", "memory-efficient, CUTLASS",
         {"types": "bf16", "tile": "64x64", "inputs": "aligned", "accumulators": "in registers", "for": "sm 80"}),
        ("fmha_cutlassB_f16_notaligned_64x64_k32_dropout_sm75", "attention", "memory-efficient, CUTLASS",
         {"does": "backward", "types": "fp16", "inputs": "notaligned", "dropout": "yes", "for": "sm 75"}),
        ("void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128, 128, 4, false, false, "
         "cutlass::bfloat16_t, Flash_kernel_traits<64, 128, 128, 4, cutlass::bfloat16_t> >, false, true, false, false, "
         "true, true, false, false>",
         "attention", "flash attention",
         {"head size": "64", "tile": "128x128", "warps": "4", "types": "bf16", "causal": "yes"}),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_26_64x64x64_1x4x1_cga1x1x1_kernel0_0",
         "attention", "cuDNN", {"does": "backward", "instruction": "wgmma", "knob": "26", "tile": "64x64x64"}),
        ("triton_tem_fused_flex_attention_0", "attention", "Inductor, Triton", {"kind": "template"}),
        # ATen: the operation, and the types it is made for
        ("void at::native::elementwise_kernel<128, 4, at::native::gpu_kernel_impl_nocast<at::native::(anonymous "
         "namespace)::masked_fill_kernel(at::TensorIterator&, c10::Scalar const&)::{lambda()#1}::operator()() const::"
         "{lambda()#12}::operator()() const::{lambda(c10::BFloat16, bool)#1}>", "pointwise", "ATen",
         {"does": "masked_fill", "types": "bf16, bool"}),
        ("void at::native::vectorized_elementwise_kernel<(int)4, at::native::<unnamed>::launch_clamp_scalar(a…",
         "pointwise", "ATen", {"does": "clamp", "vector": "4"}),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::AUnaryFunctor<long, long, bool, at::native::"
         "(anonymous namespace)::CompareEqFunctor<long> >, std::array<char*, 2ul> >", "pointwise", "ATen",
         {"does": "compare_eq", "types": "int64, bool", "other operand": "a scalar"}),
        ("void at::native::reduce_kernel<512, 1, at::native::ReduceOp<c10::BFloat16, at::native::ArgMaxOps<float>, "
         "unsigned int, long, 4, 4> >", "reduction", "ATen", {"does": "argmax", "types": "bf16"}),
        ("void at::native::reduce_kernel<128, 4, at::native::ReduceOp<float, at::native::func_wrapper_t<float, "
         "at::native::sum_functor<float, float, float>::operator()(at::TensorIterator&)::"
         "{lambda(float, float)#1}>", "reduction",
         "ATen", {"does": "sum"}),
        ("void (anonymous namespace)::softmax_warp_forward<float, float, float, 4, true, false>(float*, "
         "float const*, int)",
         "reduction", "ATen", {"does": "log softmax, forward"}),
        ("void (anonymous namespace)::softmax_warp_forward<float, float, float, 10, false, false>(float*, "
         "float const*)",
         "reduction", "ATen", {"does": "softmax, forward"}),
        ("void at::native::(anonymous namespace)::multi_tensor_apply_kernel<at::native::(anonymous namespace)::"
         "FusedOptimizerTensorListMetadata<4>, at::native::(anonymous namespace)::FusedAdamMathFunctor<"
         "c10::BFloat16, 4, (at::native::ADAM_MODE)1, false>, float const*, double>", "optimizer", "ATen",
         {"does": "adam", "types": "bf16"}),
        ("void at::native::_scatter_gather_elementwise_kernel<128, 8, at::native::"
         ""
         "_cuda_scatter_fill_internal_kernel<int, int>::operator()<at::native::ReduceAdd>(at::TensorIterator&)",
         "copy", "ATen", {"does": "scatter_add"}),
        # attention: real names, their ends cut off
        ("void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128, 128, 4, false, false, cutlass::"
         "bfloat16_t, Flash_kernel_traits<64, 128, 128, 4, cutlass::bfloat16_t> >, false, true, false, false, true, "
         "true, false, false>(pytorch_flash::Flash_fwd_params)", "attention", "flash attention",
         {"does": "forward", "head size": "64", "tile": "128x128", "warps": "4", "types": "bf16", "causal": "yes",
          "window": "", "dropout": ""}),
        ("fmha_cutlassF_bf16_aligned_64x64_rf_sm80(PyTorchMemEffAttention::AttentionKernel<cutlass::bfloat16_t>)",
         "attention", "memory-efficient, CUTLASS",
         {"for": "sm 80", "types": "bf16", "tile": "64x64", "accumulators": "in registers"}),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x64_4x1x1_cga1x1x1_kernel0_0",
         "attention", "cuDNN",
         {"for": "sm 90", "instruction": "wgmma", "knob": "7", "tile": "64x128x64", "cluster": "1x1x1"}),
        ("void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90<flash::"
         "CollectiveMainloopFwdSm90<2, cute::tuple<cute::C<1>, cute::C<1>, cute::C<1> >, cute::tuple<cute::C<128>, "
         "cute::C<176>, cute::C<128> >, 128, cutlass::bfloat16_t, float, cutlass::arch::Sm90, false, false, false, "
         "false, false, false, false, false, true, true, false, false, false, cutlass::bfloat16_t, false, 1>",
         "attention", "flash attention",
         {"for": "sm 90", "head size": "128", "tile": "128x176", "stages": "2", "types": "bf16", "causal": "no"}),
        ("void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90<flash::"
         "CollectiveMainloopFwdSm90<(int)2, cute::tuple<cute::C<(int)1>, cute::C<(int)1>, cute::C<(int)1>>, "
         "cute::tuple<cute::C<(int)128>, cute::C<(int)128>, cute::C<(int)128>>, (int)128, cutlass::half_t, float, "
         "cutlass::arch::Sm90, (bool)1, (bool)0, (bool)0, (bool)1, (bool)1, (bool)0, (bool)0, (bool)1>",
         "attention", "flash attention", {"types": "fp16", "causal": "yes", "tile": "128x128"}),
        ("void flashinfer::BatchPrefillWithRaggedKVCacheKernel<flashinfer::KernelTraits<(flashinfer::MaskMode)1, "
         "(unsigned int)128, (unsigned int)2, (unsigned int)2, (unsigned int)8, (unsigned int)8, (unsigned int)4, "
         "(unsigned int)1, (flashinfer::PosEncodingMode)0, __nv_bfloat16, __nv_bfloat16, __nv_bfloat16, float, int>",
         "attention", "FlashInfer", {"does": "batch prefill with ragged kvcache", "types": "bf16", "causal": "yes"}),
        ("void flashinfer::BatchPrefillWithPagedKVCacheKernel<flashinfer::KernelTraits<(flashinfer::MaskMode)0, 16u, "
         "1u, 4u, 4u, 4u, 1u, 4u, (flashinfer::PosEncodingMode)0, __nv_bfloat16, __nv_bfloat16, __nv_bfloat16, float>",
         "attention", "FlashInfer", {"queries of a tile": "16", "causal": "no"}),
        ("aiter::fmha_fwd_hd128_bf16_causal_rtna_group", "attention", "AITER",
         {"does": "forward", "head size": "128", "types": "bf16", "causal": "yes"}),
        ("_ZN7ck_tile6kentryILi1ENS_19FmhaBwdDQDKDVKernelINS_2...", "attention", "Composable Kernel",
         {"does": "backward"}),
        ("void ck_tile::launch_and_check<ck_tile::make_kernel<256, 3, ck_tile::FmhaFwdKernel<ck_tile::"
         "BlockFmhaPipelineQRKSVSAsync<ck_tile::BlockFmhaPipelineProblem<unsigned short, float, "
         "ck_tile::TileFmhaShape<ck_tile::sequence<128, 64, 32, 64, 32, 64>, ck_tile::sequence<4, 1, 1>",
         "attention", "Composable Kernel", {"does": "forward", "tile": "128x64"}),
        ("void (anonymous namespace)::softmax_warp_forward<c10::BFloat16, c10::BFloat16, float, 10, false, false>("
         "c10::BFloat16*, c10::BFloat16 const*, int, int, int, bool const*, int, bool)", "reduction", "ATen",
         {"does": "softmax, forward", "rows of": "513 to 1024"}),
        ("void at::native::triu_tril_kernel<bool, int, false, 8, false>(at::cuda::detail::TensorInfo<bool, int>)",
         "pointwise", "ATen", {"does": "tril"}),
        ("sm80_xmma_gemm_f32f32_f32f32_f32_nn_n_tilesize64x64x8_stage3_warpsize1x4x1_ffma_aligna4_alignc4_execute",
         "GEMM", "cuBLAS xmma, sm 80", {"types": "fp32", "on": "CUDA cores"}),
        ("void cutlass::Kernel2<cutlass_80_simt_sgemm_128x32_8x5_tn_align1>(cutlass_80_simt_sgemm_128x32_8x5_tn)",
         "GEMM", "CUTLASS, sm 80", {"types": "fp32", "on": "CUDA cores"}),
        ("ampere_sgemm_64x32_sliced1x4_tn", "GEMM", "cuBLAS, ampere", {"on": "CUDA cores"}),
        ("void cutlass::Kernel2<cutlass_80_tensorop_s1688gemm_128x64_16x6_tn_align4>(cutlass_80_tensorop_s1688gemm)",
         "GEMM", "CUTLASS, sm 80", {"types": "TF32", "on": ""}),
        # communication
        ("ncclSymkDevKernel_AllReduce_AGxLL_R_sum_bf16(ncclSymkDevWorkArgs4K)", "communication", "NCCL",
         {"does": "AllReduce"}),
        ("ncclDevKernel_Generic_4(ncclDevKernelArgsStorage<4096ul>)", "communication", "RCCL",
         {"does": "any collective"}),
        ("triton_poi_fused_add_copy__16", "pointwise", "Inductor, Triton", {"fuses": "fuses add, copy_"}),
    ],
)  # fmt: skip
def test_decode(name, family, maker, parts):
    found = kernel_names.decode(name)
    assert (found.family, found.maker) == (family, maker)
    assert {key: found.parts.get(key, "") for key in parts} == parts


# Made up: names that look like one of a known scheme and are none.
@pytest.mark.parametrize("name", ["", "my_kernel", "gemm_like_nothing", "nvjet", "triton_", "kernel<128>", "cutlass_"])
def test_an_unknown_name_stays_unknown(name):
    assert kernel_names.decode(name).family == kernel_names.UNKNOWN
    assert str(kernel_names.decode(name)) == "unknown name"


# Made up: long, and hard for a pattern that tries one place twice.
@pytest.mark.parametrize("size", [5_000, 10_000, 20_000])
@pytest.mark.parametrize(
    "made_of",
    [
        "at::native::{x}", "triton_poi_fused_{add_mul_}", "void k<{(int)4, }", "{mean_}", "_ZN{3foo}",
        "at::native::{elementwise_kernel<}", "{cutlass_80_gemm_}",
    ],
)  # fmt: skip
def test_only_the_start_of_a_long_name_is_looked_at(made_of, size):
    start, rest = made_of.split("{")
    name = (start + rest.rstrip("}") * size)[:size]
    found = kernel_names.decode(name)
    assert found == kernel_names.decode(name[: kernel_names.LOOKED_AT])
    assert all(len(said) <= 2 * kernel_names.LOOKED_AT for said in found.parts.values())
    assert len(kernel_names.short(name)) <= 40


ELEMENTWISE = "void at::native::vectorized_elementwise_kernel<{}, at::native::{}, std::array<char*, 3ul> >(int)"


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ((8, "CUDAFunctor_add<c10::BFloat16>"), (8, "AbsFunctor<c10::BFloat16>")),
        ((4, "CUDAFunctor_add<c10::BFloat16>"), (4, "CUDAFunctor_add<float>")),
        ((4, "CUDAFunctor_add<float>"), (8, "CUDAFunctor_add<float>")),
        ((4, "CUDAFunctor_add<float>"), (4, "CUDAFunctorOnSelf_add<float>")),
    ],
)
def test_two_kernels_that_differ_have_two_short_names(one, other):
    assert kernel_names.short(ELEMENTWISE.format(*one), 48) != kernel_names.short(ELEMENTWISE.format(*other), 48)


@pytest.mark.parametrize("width", [5, 20, 40, 60])
def test_a_tables_labels_differ_and_fit(width):
    names = [name for _, name in _wild()]
    labels = kernel_names.labels(names, width)
    assert list(labels) == list(dict.fromkeys(names))
    assert len(set(labels.values())) == len(labels)
    assert all(len(label) <= width for label in labels.values())


@pytest.mark.parametrize("width", [1, 2, 3, 5, 20, 40])
def test_short_names_fit(width):
    name = ELEMENTWISE.format(8, "CUDAFunctor_add<c10::BFloat16>")
    assert len(kernel_names.short(name, width)) <= width


# PyTorch's grouped product of a mixture of experts, from a trace of an H100; the name goes on after its instruction.
GROUPED = (
    "_ZN7cutlass13device_kernelIN2at4cuda6detail25enable_3x_kernel_for_sm9xINS_4gemm6kernel13GemmUniversa"
    "lINS5_17GroupProblemShapeIN4cute5tupleIJiiiEEEEENS5_10collective13CollectiveMmaINS5_39MainloopSm90Ar"
    "rayTmaGmmaWarpSpecializedILi4ENSA_IJNS9_1CILi2EEENSG_ILi1EEESI_EEENS5_43KernelPtrArrayTmaWarpSpecial"
    "izedCooperativeEEENSA_IJNSG_ILi128EEENSG_ILi256EEENSG_ILi64EEEEEENS_10bfloat16_tEPNSA_IJlSI_NSG_ILi0"
    "EEEEEESQ_ST_NS9_8TiledMMAINS9_8MMA_AtomIJNS9_4SM904GMMA28MMA_64x256x16_F32BF16BF16_SS"
)


@pytest.mark.parametrize(
    "name",
    [
        GROUPED,
        "void cutlass::device_kernel<at::cuda::detail::enable_3x_kernel_for_sm9x<cutlass::"
        "gemm::kernel::GemmUniversal<cutlass::gemm::GroupProblemShape<cute::tuple<int, int, int> >, cutlass::gemm::"
        "collective::CollectiveMma<cutlass::gemm::MainloopSm90ArrayTmaGmmaWarpSpecialized<4>, cute::SM90::GMMA::"
        "MMA_64x256x16_F32BF16BF16_SS",
    ],
)
def test_a_template_of_cutlass_says_its_types_mangled_or_not(name):
    said = kernel_names.decode(name)
    assert (said.family, said.maker) == ("GEMM", "CUTLASS 3, sm 90")
    assert said.parts == {"does": "grouped", "types": "bf16", "instruction": "64x256x16"}
    assert kernel_names.short(name) == "GemmUniversal<grouped, bf16, 64x256x16>"


@pytest.mark.parametrize(
    ("instruction", "types"),
    [
        ("MMA_64x128x16_F16F16F16", "fp16"),
        ("MMA_64x64x8_F32TF32TF32", "TF32"),
        ("MMA_64x64x32_F32E4M3E5M2", "fp8"),
        ("MMA_64x64x32_S32S8S8", "int8"),
    ],
)
def test_the_types_of_cutlass_templates(instruction, types):
    said = kernel_names.decode(
        f"void cutlass::device_kernel<cutlass::gemm::kernel::GemmUniversal<cute::SM90::GMMA::{instruction}_SS<>"
    )
    assert said.parts["types"] == types
