"""Every number that a prediction assumes beyond the trace: its value, its unit, and the recordings that it is from.

All CPU times are those while the profiler records. replay/changes.py has those of a CUDA graph's launch, which is part
of the graph. Fewer numbers predict as well as many: `benchmarks/scoreboard.py` was within 30% for the same pairs after
18 prices of CPU work had become 10, and 8 rates of kernels 6.
"""

# CPU time in launches, because CPUs differ (Case.launch_us: the lower quartile of the calls that launch a kernel).
# A call through Python that ends in a launch. A Triton kernel's takes 5.0 to 8.8 (23 recordings on two machines), an
# optimizer's for one group of parameters 8 to 10. It is near the slowest, because a gain that does not come is worse.
CALL = 8.5
# The code around an op that stays (0.9 to 3.4 in Inductor's code), and around each parameter (1.4 to 3.3).
AROUND = 2
# A fused optimizer's step besides its tensors, and a tensor. Steps of 6 to 16 tensors take 24 to 98 (median 50, 20
# recordings), of 36 to 53 tensors 48 to 164 (median 87, 22), of 72 to 182 tensors 77 to 259 (median 152, 22).
FUSED_STEP, FUSED_TENSOR = 45, 1.1
# The same of a foreach one that reads each tensor's count of steps: half of 144 recordings of Adam, AdamW, Adagrad and
# RMSprop take 0.8 to 1.2 times as long as this says.
FOREACH_STEP, FOREACH_TENSOR = 100, 6
# A table with sparse gradients: 20 with SGD (one recording), 120 to 200 with SparseAdam (32 launches and six waits).
SPARSE_TABLE, SPARSE_ADAM_TABLE = 20, 120
# A call of a compiled model besides its kernels, also where it begins anew after a wait: in inference 2 to 27 (five
# recordings), in training, with backward and besides AROUND of each parameter, 53 to 109 (eight), and no more (two).
REGION, TRAINED_REGION = 15, 60
# A forward and its backward beside their graphs, with the loss: 60 to 290 (seven recordings).
PASS = 100

# µs. A call of a few ops: a batch that is ready 74 to 81, autocast's casts 0 to 150 for a product. A call of attention
# with its views: 35 to 140, in training 100 to 230, its backward 130 to 375, flex_attention's 272 to 331.
CALL_US, ATTENTION_CALL_US = 50, 75
# A ready batch where system calls are slow: 2300 to 3400 (one machine), 1000 on another.
SLOW_BATCH_US = 1000
# A launch that does not block: 5 to 10 (H100s and H200s).
LAUNCH_US = 10
# The parameters of an optimizer whose number the trace does not show.
PARAMETERS = 100

# Shares of the data sheet's peaks that good kernels reach on an H200. Products: 74 to 83% in bf16, 40 to 72% in TF32,
# 50 to 75% in fp32 on CUDA cores.
PRODUCT = 0.6
# Convolutions: about 30% in TF32. A filter's gradient that cuDNN computes by FFTs, in channels_last: 1 to 20% in TF32
# (eight shapes, by half of both gradients' time). Attention by the FLOPs of the whole matrix of scores: 36 to 66%.
CONVOLUTION, FILTER_GRADIENT, ATTENTION = 0.3, 0.1, 0.45
# In fp32, PyTorch's attention kernel computes 65 to 130 scores in a nanosecond for heads of 16 and of 64 values (seven
# recordings): it works on 64 values at a time.
FP32_HEAD = 64
# Pointwise kernels: 80 to 92% of the memory bandwidth.
BANDWIDTH = 0.85
# µs. Products with little arithmetic: 2.9 to 6.7 in bf16, 3.8 to 4.9 in TF32 (12 sizes); the shortest kernels: 1.
SMALL_PRODUCT_US, LEAST_KERNEL_US = 4.0, 1.0
# The share of a sort's time that topk takes: 0.3 for 256 of 128,256 values in 32 rows (one recording).
TOPK = 0.3
# Values that a kernel adds with atomic operations in a microsecond: 130,000 to 155,000 in fp32, 110,000 to 140,000 in
# bf16, for rows of 32 values or more (16 sizes on an H200). Rows of one to four values take 1 to 16 µs longer.
ATOMIC_ADDS = 130_000
# How many times as long a kernel takes that is not made for its case: products of rows that are not aligned 5.7 and 6.4
# ("odd_width", "gpt2"), attention in fp32 6.5 and 8.8 times as long as in bf16.
OF_A_GOOD_KERNEL = 5
# The fp32 FLOPs of an element in a transcendental op and in any other: ten tanh and twenty products and sums of 67
# million elements take 466 µs in one kernel.
TRANSCENDENTAL, ARITHMETIC = 40, 3
# Attention's backward, for each FLOP of its forward: five products instead of two.
BACKWARD_FLOPS = 2.5
# A compiled normalization has more kernels than eager's, because its sums over the batch are kernels of their own: 3.1
# for a batch norm, 3.8 for its backward (ResNet-50, ResNet-152), 1.8 to 4.3 for a layer norm's backward.
BATCH_NORM_KERNELS, NORM_BACKWARD_KERNELS = 3, 4
# How often a batch norm in training moves its tensor, by what cuDNN's kernels are called: forward reads it twice and
# writes once, backward reads it and its gradient twice.
BATCH_NORM_PASSES = {"fw_tr": 3, "bw": 5}
# How many times as long PyTorch's kernels take for it in bf16: 1.5 to 1.8, backward 1.15 to 1.2 (three programs). Small
# ones take 1.0 to 1.2 and 0.8 times as long.
BATCH_NORM_IN_BF16 = {"fw_tr": 1.6, "bw": 1.2}

# µs. In two bytes, 11 of 15 convolutions of sequences in groups with filters of 64 values or more took up to 26 times
# as long on an H200: 12,200 to 13,000 forward in groups of 48 values, also for one sample, and 33,000 backward for 64.
LONG_FILTER_IN_GROUPS_US = 13_000

# GB/s of copies between the CPU and an H200, from and to pinned memory: 55.
PINNED_GB_S = 50
# The share of a lookup in torch.compile's cache that is left with skip_guard_eval_unsafe: 0.14 to 0.24.
GUARDS_LEFT = 0.2
# A fused optimizer's share of a loop's time on a CPU: 0.16 to 0.41, SGD 0.27 to 0.77 (50 to 300 parameters, an EPYC).
FUSED_ON_THE_CPU = 0.4

# Compute is longer by this share beside a collective: 0.18 to 0.51 (two H200s); beside one that waits: 0.15 to 0.27.
BESIDE_A_COLLECTIVE, BESIDE_A_WAIT = 0.4, 0.2
# The step after equal passes are computed at once takes this share more or less: 80% of 66 pairs did, because the same
# result can be computed with few kernels or many.
ONE_PASS_ERROR = 0.4
# How many times as long kernels of half the size take together: 1.08 and 1.09 (pipelines of two and four H200s).
SMALLER_IS_SLOWER = 1.08
