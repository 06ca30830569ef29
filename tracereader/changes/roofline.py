"""How long a good kernel takes for its bytes and FLOPs, and what several kernels take as one."""

import re
from collections.abc import Sequence
from functools import lru_cache

from tracereader.changes.context import Case
from tracereader.figures.hardware import Peaks
from tracereader.trace import Op
from tracereader.trace.types import Inputs, dtype_of

# The shares of the data sheet's peaks that good kernels reach on an H200: products 74 to 83% in bf16 and 40 to 72% in
# TF32, convolutions about 30% in TF32, pointwise kernels 80 to 92% of the memory bandwidth. The attention kernels of
# cuDNN and FlashAttention reach 18 to 33% by the FLOPs of a causal mask, which are half of those of the whole matrix of
# scores.
PRODUCT, TF32_PRODUCT, CONVOLUTION, ATTENTION, BANDWIDTH = 0.75, 0.55, 0.3, 0.45, 0.85
# Products in fp32 on CUDA cores reach 50 to 75% of the peak there.
FP32_PRODUCT = 0.6
# Products on tensor cores with little arithmetic do not take proportionally less time. In this repository's traces of
# an H200 they take 2.9 to 6.7 µs in bf16 (12 sizes, median 4.4) and 3.8 to 4.9 µs in TF32, and a small fused attention
# takes 4.6 µs. Only 64 x 64 x 64 takes 1.9 µs. The shortest kernels of any kind take about 1 µs there.
SMALL_PRODUCT_US, LEAST_KERNEL_US = 4.0, 1.0
# Kernels that solve triangular systems work row by row, like cuSOLVER's factorizations. More blocks do not help, and in
# float32 they took 0.8 times as long as in float64 on an H100.
SOLVES = re.compile(r"trs[mv]")
TWO_BYTES = ("bf16", "fp16")


def moving_us(moved: float, peaks: Peaks) -> float:
    """Return the time (µs) in which a good kernel reads and writes this many bytes."""
    return moved / (BANDWIDTH * peaks.gb_s) / 1e3


def as_one_kernel_us(case: Case, us: Sequence[float], blocks: int) -> float:
    """Return the time (µs) of one kernel with the blocks of several, which take these times, and one block on each SM.

    blocks: their number in all kernels together.
    """
    sms = case.summary.source.sms
    return min(sum(us), max(us) * max(1.0, blocks / sms)) if sms and blocks else sum(us)


def type_of(op: Op) -> str:
    """Return the element type of an op's first tensor; "" if it was not recorded."""
    return _type_in(op.inputs)


@lru_cache(4096)  # ops with equal inputs share one
def _type_in(inputs: Inputs) -> str:
    return next((dtype.name for tensor in inputs.tensors if (dtype := dtype_of(tensor.type))), "")


def multiplying_us(flops: float, tflops: float, moved: float, peaks: Peaks) -> float:
    """Return the time (µs) of a product of these FLOPs at this rate (TFLOP/s) that moves these bytes."""
    return max(flops / tflops / 1e6, moving_us(moved, peaks), SMALL_PRODUCT_US)
