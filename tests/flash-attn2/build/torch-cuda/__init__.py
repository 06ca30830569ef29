"""PyTorch's own build of FlashAttention-2 in the shape of the Hub's flash-attn2, for machines without a Hub.

The algorithm and the kernel's source are FlashAttention-2's, at the version that PyTorch vendors; its kernels are
named pytorch_flash::… and its Python side is this file, not the package's.
"""

import torch
import torch.nn.functional as F


def flash_attn_func(q, k, v, softmax_scale=None, causal=False):
    """Attention of [batch, seq, heads, head_dim], without dropout. Returns the same shape."""
    head_dim = q.shape[-1]
    scale = head_dim**-0.5 if softmax_scale is None else softmax_scale
    if head_dim % 8:  # the kernel wants whole 16 bytes
        q, k, v = (F.pad(one, (0, 8 - head_dim % 8)) for one in (q, k, v))
    out, *_ = torch.ops.aten._flash_attention_forward(
        q, k, v, None, None, q.shape[1], k.shape[1], 0.0, causal, False, scale=scale
    )
    return out[..., :head_dim]
