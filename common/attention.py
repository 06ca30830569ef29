"""What the attention rungs share: their flags, and the facts that they store in a trace."""

from common.flags import HOW, flag, not_negative, positive

FLAGS = (
    flag("--batch", "sequences (8)", shape=True, type=positive, default=8),
    flag("--heads", "attention heads (16)", shape=True, type=positive, default=16),
    flag("--seq", "tokens in each sequence (1024)", shape=True, type=positive, default=1024),
    flag("--head_dim", "width of a head (64)", shape=True, type=positive, default=64),
    flag(
        "--warmup",
        "call the step N times before the profiler starts (3); 0: a cold run",
        group=HOW,
        tag="warmup{}",
        untagged=(0,),
        nargs="?",
        const=3,
        default=3,
        type=not_negative,
    ),
)


def shape(args) -> tuple[int, int, int, int]:
    """Return the shape of query, key and value: [batch, heads, seq, head_dim]."""
    return args.batch, args.heads, args.seq, args.head_dim


def scores_bytes(args) -> int:
    """Return the size in bytes of the [batch, heads, seq, seq] scores, in the run's element type."""
    return args.batch * args.heads * args.seq**2 * args.dtype.itemsize


def facts(args, backend: str | None = None, refused: dict[str, list[str]] | None = None) -> dict:
    """Return the facts for the trace. backend: the one that --backend names; refused: torch's reasons, by backend."""
    known = {name: getattr(args, name) for name in ("batch", "heads", "seq", "head_dim")}
    return {"attention": known | {"causal": True, "backend": backend, "refused": refused or {}}}
