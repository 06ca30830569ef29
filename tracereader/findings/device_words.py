"""What a sentence about CUDA is called on other devices, and which advice holds on them."""

import re
from collections.abc import Collection

from tracereader.trace.backends import BACKENDS

# What a change or a finding may need. CUDA's graphs, allocator, pinned memory and blocking launches are also HIP's.
CUDA, CUDA_OR_HIP = ("cuda",), ("cuda", "hip")
ON_HIP = (
    (r"CUDA (runtime|calls|loads)", r"HIP \1"), (r"\bcuda(?=[A-Z])", "hip"), ("cuDNN", "MIOpen"),
    ("cuBLAS", "hipBLASLt"), (r"\bSMs\b", "compute units"), ("tensor cores", "matrix cores"),
    ("Tensor cores", "Matrix cores"),
)  # fmt: skip
ELSEWHERE = (
    (r"CUDA runtime API calls", "runtime calls"), (r"CUDA calls", "runtime calls"), ("CUDA loads", "The runtime loads"),
    (r"\bcudaDeviceSynchronize", "synchronization of the device"), (", pin_memory=True", ""),
    ("cuDNN and cuBLAS choose and prepare", "such libraries choose and prepare"),
    (r"torch\.cuda\.synchronize\(\)", r"torch.{device}.synchronize()"), ('device="cuda"', 'device="{device}"'),
    (r"autocast\('cuda'", "autocast('{device}'"),
)  # fmt: skip


def holds_on(backends: Collection[str], backend: str | None) -> bool:
    """Return whether what needs one of these backends holds on a trace's backend. None is needed if there are none."""
    return not backends or backend in backends


def in_its_words(text: str, backend: str | None) -> str:
    """Return a sentence about CUDA in the words of a trace's backend; unchanged where the trace does not show one."""
    if backend in (None, "cuda"):
        return text
    device = backend if backend in BACKENDS else "accelerator"
    for pattern, words in ON_HIP if backend == "hip" else ELSEWHERE:
        text = re.sub(pattern, words.replace("{device}", device), text)
    return text
