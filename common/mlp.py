"""What the two MLP rungs share: their flags, and the sizes that these make."""

import argparse

import torch

from common import cli, guesses, measure, screen


def add_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--batch", type=cli.positive, default=64, metavar="N", help="sequences (64)")
    group.add_argument("--seq", type=cli.positive, nargs="+", default=[128], metavar="N",
                       help="tokens in each (128); several: a run for each, and a picture")  # fmt: skip
    group.add_argument("--dim", type=cli.positive, default=768, metavar="N", help="width of a token (768)")
    group.add_argument("--hidden", type=cli.positive, default=3072, metavar="N", help="width inside (3072)")
    group.add_argument(
        "--then-seq", type=cli.whole_list, default=[], metavar="N,N,…",
        help="after the profile, call it with these sequence lengths: does it compile again?",
    )


def shape_token(args) -> str:
    return f"{args.batch}x{args.seq}x{args.dim}x{args.hidden}"


def tensors(args) -> dict[str, tuple[int, ...]]:
    """The tensors alive in one eager forward pass, by name."""
    seq = max([*args.seq, *args.then_seq])
    outside = (args.batch, seq, args.dim)
    inside = (args.batch, seq, args.hidden)
    weights = dict.fromkeys(("gate_proj", "up_proj", "down_proj"), (args.hidden, args.dim))
    return {"x": outside, **weights, **dict.fromkeys(("gate", "gelu", "up", "product"), inside), "out": outside}


def then_seq(fn, reference, args, device: torch.device, dtype: torch.dtype) -> None:
    """Claim 36: what each new sequence length costs."""
    if not args.then_seq:
        return
    inputs = {
        f"seq {seq}": torch.randn(args.batch, seq, args.dim, device=device, dtype=dtype) for seq in args.then_seq
    }
    title = f"then other sequence lengths ({'torch.compile' if args.compile else 'no torch.compile'})"
    screen.first_calls(title, measure.first_calls(fn, inputs, reference, device))


def gemm_guesses(args) -> list[guesses.Guess]:
    """What the three matrix products show, whatever runs between them."""
    return [
        guesses.query_before_gemms(),
        guesses.product_sizes(args.batch * args.seq, args.dim, args.hidden),
        guesses.down_proj_has_another_tile(),
        guesses.regime_is("compute-bound"),
    ]
