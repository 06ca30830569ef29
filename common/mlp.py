"""What the two MLP rungs share: their flags, and the sizes that these make."""

import argparse

from common import cli


def add_flags(lesson: argparse._ArgumentGroup) -> None:
    lesson.add_argument("--batch", type=cli.positive, default=64, metavar="N", help="sequences (64)")
    lesson.add_argument("--seq", type=cli.positive, default=128, metavar="N", help="tokens in each (128)")
    lesson.add_argument("--dim", type=cli.positive, default=768, metavar="N", help="width of a token (768)")
    lesson.add_argument("--hidden", type=cli.positive, default=3072, metavar="N", help="width inside (3072)")


def shape_token(args) -> str:
    return f"{args.batch}x{args.seq}x{args.dim}x{args.hidden}"


def tensors(args) -> dict[str, tuple[int, ...]]:
    """The tensors alive in one eager forward pass, by name."""
    outside = (args.batch, args.seq, args.dim)
    inside = (args.batch, args.seq, args.hidden)
    weights = dict.fromkeys(("gate_proj", "up_proj", "down_proj"), (args.hidden, args.dim))
    return {"x": outside, **weights, **dict.fromkeys(("gate", "gelu", "up", "product"), inside), "out": outside}
