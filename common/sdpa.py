"""Helpers of the attention rungs that need torch: a reference in fp32, the memory of the scores, SDPA backends."""

import contextlib
import re
import warnings

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from common.attention import scores_bytes
from common.memory import free_bytes
from tracereader.command import BadInput
from tracereader.findings.finding import size

PINNED = {
    "math": SDPBackend.MATH,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}
# The warning with which torch begins its reasons against a backend. The reasons are the warnings after it.
HEAD_OF_REASONS = {
    "efficient": "Memory efficient kernel not used because",
    "flash": "Flash attention kernel not used because",
    "cudnn": "cuDNN attention kernel not used because",
}
# The number of the reference's scores that are in memory at a time.
REFERENCE_SCORES = 2**26


def in_fp32(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Return causal attention of [batch, heads, seq, head_dim], by its formula in fp32, some rows at a time."""
    q, k, v = q.float(), k.float(), v.float()
    batch, heads, seq, head_dim = q.shape
    rows = max(1, REFERENCE_SCORES // (batch * heads * seq))
    parts = []
    for first in range(0, seq, rows):
        scores = q[:, :, first : first + rows] @ k.mT / head_dim**0.5
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(first + 1)
        parts.append(torch.softmax(scores.masked_fill_(later, -torch.inf), dim=-1) @ v)
    return torch.cat(parts, dim=2)


def refuse_scores(args, itemsize: int | None = None) -> None:
    """Raise BadInput if the [batch, heads, seq, seq] scores do not fit into memory.

    An eager op reads one such tensor and writes another; a compiled one works in place.
    itemsize: bytes of an element, if it is not the run's own type.
    """
    free = free_bytes(args.device)
    itemsize = itemsize or args.dtype.itemsize
    needed = scores_bytes(args) // args.dtype.itemsize * itemsize
    if free is not None and needed * (1 if args.compile else 2) > free:
        raise BadInput(
            f"the [{args.batch}, {args.heads}, {args.seq}, {args.seq}] scores of {itemsize} bytes each are "
            f"{size(needed)}{'' if args.compile else ', twice over'}, and {size(free)} are free here: make them "
            "smaller, or take a fused backend, which does not need them"
        )


def pinned(backend: str) -> contextlib.AbstractContextManager:
    """Return a context in which SDPA runs on this backend only, or on its own choice if the name is no backend's."""
    return sdpa_kernel(PINNED[backend]) if backend in PINNED else contextlib.nullcontext()


def refused(backend: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> list[str] | None:
    """Return torch's reasons why a backend cannot run causal attention on these inputs; None if it can.

    Launches no kernel.
    """
    with pinned(backend), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            # scaled_dot_product_attention calls this first. can_use_flash_attention() and the like do not know CPUs.
            if torch._fused_sdp_choice(q, k, v, is_causal=True) == PINNED[backend].value:
                return None
        except RuntimeError:
            pass
    reasons, head = [], ""  # each reason is a warning after the one that names the backend
    for warning in said:
        text = re.sub(r"\.? \(Triggered internally at .*", "", str(warning.message), flags=re.S)
        if "not used because" in text:
            head = text
        elif head.lower().startswith(HEAD_OF_REASONS.get(backend, "none").lower()):
            reasons.append(text)
    return reasons


def all_refused(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> dict[str, list[str]]:
    """Return torch's reasons against each fused backend that it refuses for these inputs."""
    return {backend: reasons for backend in HEAD_OF_REASONS if (reasons := refused(backend, q, k, v))}


def require(backend: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Raise BadInput if torch refuses the backend for these inputs."""
    reasons = refused(backend, q, k, v) if backend in PINNED else None
    if reasons is not None:
        if q.device.type == "cpu":
            raise BadInput(f"--backend {backend}: torch has no {backend} backend for the CPU; flash and math run")
        why = "; ".join(reasons) or f"torch has none for a {q.device.type} tensor"
        raise BadInput(f"--backend {backend} cannot run here: {why}")
