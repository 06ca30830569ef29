"""How long a good kernel takes for its bytes and FLOPs."""

import re
from functools import lru_cache

from tracereader.changes import prices
from tracereader.figures.hardware import Peaks
from tracereader.trace import Op
from tracereader.trace.types import Inputs, dtype_of

# Kernels that solve triangular systems work row by row, like cuSOLVER's factorizations. More blocks do not help, and in
# float32 they took 0.8 times as long as in float64 on an H100.
SOLVES = re.compile(r"trs[mv]")
TWO_BYTES = ("bf16", "fp16")
# cuDNN's batch norms in training whose kernels have one block for each channel: forward or backward, and the type.
BY_CHANNEL = re.compile(r"::bn_(fw_tr|bw)_1C11\w*<(\w+)")


def moving_us(moved: float, peaks: Peaks) -> float:
    """Return the time (µs) in which a good kernel reads and writes this many bytes."""
    return moved / (prices.BANDWIDTH * peaks.gb_s) / 1e3


def type_of(op: Op) -> str:
    """Return the element type of an op's first tensor; "" if it was not recorded."""
    return _type_in(op.inputs)


@lru_cache(4096)  # ops with equal inputs share one
def _type_in(inputs: Inputs) -> str:
    return next((dtype.name for tensor in inputs.tensors if (dtype := dtype_of(tensor.type))), "")


def multiplying_us(flops: float, tflops: float, moved: float, peaks: Peaks) -> float:
    """Return the time (µs) of a product of these FLOPs at this rate (TFLOP/s) that moves these bytes."""
    return max(flops / tflops / 1e6, moving_us(moved, peaks), prices.SMALL_PRODUCT_US)
