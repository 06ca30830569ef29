"""Rung 2: one nn.Linear with bias, and where its transpose and its bias add went.

You will see that aten::t moves no data, that the bias is added inside the matrix product's own
kernel, and how little is left for torch.compile to do about a single layer.
"""

import sys

import torch
from torch import nn
from torch.profiler import record_function

from common import cli, guesses, harness, lesson, measure, screen

EXAMPLES = ("", "--batch 1024 --in_dim 32 --out_dim 64 --compile")


def what_we_guess(args):
    if args.compile:
        yield guesses.ops_are(1, "aten::addmm", "23", gone=("aten::linear", "aten::t", "aten::add"))
        yield guesses.compiled_rows()
    else:
        yield guesses.dispatches("aten::linear", "aten::addmm")
        yield guesses.ops_are(1, "aten::addmm", "21", gone=("aten::add",))
        yield guesses.launch_nothing("aten::t")
    yield guesses.bias_in_the_epilogue()
    yield guesses.name_says_transposed()
    yield guesses.steps_are_alike() if args.warmup else guesses.first_step_is_wider()


@cli.command
def main(argv=None):
    parser, group = cli.lesson_parser(__doc__, __file__, EXAMPLES)
    group.add_argument("--batch", type=cli.positive, default=1024, metavar="N", help="rows of the input (1024)")
    group.add_argument("--in_dim", type=cli.positive, default=32, metavar="N", help="input features (32)")
    group.add_argument("--out_dim", type=cli.positive, default=64, metavar="N", help="output features (64)")
    group.add_argument(
        "--then-strides", action="store_true",
        help="after the profile, call the compiled layer with an input of other strides",
    )
    args = parser.parse_args(argv)
    if args.then_strides and not args.compile:
        raise cli.BadInput("--then-strides asks what a compiled layer does: add --compile")

    device, dtype = harness.prepare(
        args,
        x=(args.batch, args.in_dim),
        weight=(args.out_dim, args.in_dim),
        bias=(args.out_dim,),
        out=(args.batch, args.out_dim),
    )
    linear = nn.Linear(args.in_dim, args.out_dim, bias=True, device=device, dtype=dtype)
    x = torch.randn(args.batch, args.in_dim, device=device, dtype=dtype)
    fn = torch.compile(linear, mode=args.compile) if args.compile else linear

    def step():
        with record_function("linear_fwd"):
            return fn(x)

    def profiled(args):
        name = harness.tag(args, device, f"{args.batch}x{args.in_dim}x{args.out_dim}")
        reference = (lambda: linear(x)) if args.compile else None
        return harness.profile(step, args, device, name=name, reference=reference)

    lesson.teach(args, device, profiled, what_we_guess)
    if args.then_strides:
        transposed = torch.randn(args.in_dim, args.batch, device=device, dtype=dtype).t()
        calls = measure.first_calls(fn, {"the same input": x, "transposed": transposed}, linear, device)
        screen.first_calls("then other strides: an error, claims the article", calls)


if __name__ == "__main__":
    sys.exit(main())
