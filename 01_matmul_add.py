"""Rung 1: a matrix product and a bias add, from the Python call down to the kernel.

You will see what one step costs on the CPU and what it costs on the GPU, at which size the first
stops mattering, what torch.compile changes here, and what it leaves as it was.
"""

import sys

import torch
from torch.profiler import record_function

from common import cli, harness, report

EXAMPLES = ("--size 64", "--size 4096 --warmup --compile")


def matmul_add(x, w, b):
    return torch.add(torch.matmul(x, w), b)


def addmm(x, w, b):
    return torch.addmm(b, x, w)


@cli.command
def main(argv=None):
    parser, lesson = cli.lesson_parser(__doc__, __file__, EXAMPLES)
    lesson.add_argument("--size", type=cli.positive, default=64, metavar="N", help="x, w and b are N x N (64)")
    lesson.add_argument("--batch", type=cli.positive, metavar="B", help="make them B x N x N (off)")
    lesson.add_argument(
        "--op", choices=("matmul_add", "addmm"), default="matmul_add",
        help="addmm: torch.addmm does both in one call (matmul_add)",
    )
    args = parser.parse_args(argv)
    if args.batch and args.op == "addmm":
        raise cli.BadInput("torch.addmm takes 2-D matrices: leave out --batch or --op addmm")

    shape = (args.batch, args.size, args.size) if args.batch else (args.size, args.size)
    device, dtype = harness.prepare(args, x=shape, w=shape, b=shape, product=shape, out=shape)
    x, w, b = (torch.randn(shape, device=device, dtype=dtype) for _ in range(3))
    fn = addmm if args.op == "addmm" else matmul_add
    if args.compile:
        fn = torch.compile(fn, mode=args.compile)

    def step():
        with record_function("matmul_add"):
            return fn(x, w, b)

    run = harness.profile(
        step, args, device,
        name=harness.tag(
            args, device, f"{args.size}",
            args.batch and f"batch{args.batch}", args.op == "addmm" and "addmm",
        ),
        reference=None if fn is matmul_add else lambda: matmul_add(x, w, b),
    )
    report.header(run)


if __name__ == "__main__":
    sys.exit(main())
