"""What the attention rungs need torch for beside their own part: fp32 math to check against, memory, backends."""

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
# The head of torch's list of reasons against a backend; the reasons are the warnings after it.
HEAD_OF_REASONS = {
    "efficient": "Memory efficient kernel not used because",
    "flash": "Flash attention kernel not used because",
    "cudnn": "cuDNN attention kernel not used because",
}
# Scores of the reference that are in memory at a time.
REFERENCE_SCORES = 2**26


def in_fp32(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Causal attention of [batch, heads, seq, head_dim] by its formula, in fp32, a few queries at a time."""
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
    """Raise BadInput where the [batch, heads, seq, seq] scores do not fit: an op on them reads one and writes another.

    Compiled, it works in place. itemsize: bytes of an element, where it is not the run's own type.
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
    """Let SDPA run on this backend alone; on what it chooses itself where there is no such one."""
    return sdpa_kernel(PINNED[backend]) if backend in PINNED else contextlib.nullcontext()


def refused(backend: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> list[str] | None:
    """torch's reasons why a backend cannot run causal attention on these; None where it can. Launches nothing."""
    with pinned(backend), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            # What scaled_dot_product_attention asks first. can_use_flash_attention() and its like know no CPU.
            if torch._fused_sdp_choice(q, k, v, is_causal=True) == PINNED[backend].value:
                return None
        except RuntimeError:
            pass
    reasons, head = [], ""  # after a head that names the backend, one warning each
    for warning in said:
        text = re.sub(r"\.? \(Triggered internally at .*", "", str(warning.message), flags=re.S)
        if "not used because" in text:
            head = text
        elif head.lower().startswith(HEAD_OF_REASONS.get(backend, "none").lower()):
            reasons.append(text)
    return reasons


def all_refused(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> dict[str, list[str]]:
    """The fused backends that torch gives reasons against, with these reasons."""
    return {backend: reasons for backend in HEAD_OF_REASONS if (reasons := refused(backend, q, k, v))}


def require(backend: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Raise BadInput where torch refuses the backend for these inputs."""
    reasons = refused(backend, q, k, v) if backend in PINNED else None
    if reasons is not None:
        if q.device.type == "cpu":
            raise BadInput(f"--backend {backend}: torch has no {backend} backend for the CPU; flash and math run")
        why = "; ".join(reasons) or f"torch has none for a {q.device.type} tensor"
        raise BadInput(f"--backend {backend} cannot run here: {why}")
