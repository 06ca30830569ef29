"""Rung 1: a matrix product and a bias add, from the Python call down to the kernel.

You will see what one step costs on the CPU and what it costs on the GPU, at which size the first
stops mattering, what torch.compile changes here, and what it leaves as it was.
"""

import sys

import torch
from torch.profiler import record_function

from common import cli, guesses, harness, lesson

EXAMPLES = ("--size 64", "--size 4096 --warmup --compile")


def matmul_add(x, w, b):
    return torch.add(torch.matmul(x, w), b)


def addmm(x, w, b):
    return torch.addmm(b, x, w)


def what_we_guess(args):
    small = (args.batch or 1) * args.size**3 < 2**31  # of multiply-adds
    yield guesses.regime_is("overhead-bound" if small else "compute-bound")
    yield guesses.records_steps(args.wait + args.schedule_warmup, args.active)
    yield guesses.self_time_excludes_children()
    yield guesses.steps_are_alike() if args.warmup else guesses.first_step_is_wider()
    if args.wait == args.schedule_warmup == 0 and not args.warmup:
        yield guesses.one_buffer_request()
    if args.compile:
        yield guesses.compiled_rows()
        yield guesses.ops_are(1, "aten::addmm", "16", gone=("aten::matmul", "aten::add"))
        yield guesses.dynamo_costs_more_than_the_op("aten::addmm")
        yield guesses.bias_copy_then_gemm("17")
        if args.compile == "reduce-overhead":
            yield guesses.graph_replay_without_copies()
    elif args.op == "addmm":
        yield guesses.ops_are(1, "aten::addmm", "20", gone=("aten::matmul", "aten::add"))
        yield guesses.bias_copy_then_gemm("20")
    else:
        yield guesses.dispatches("aten::matmul", "aten::bmm" if args.batch else "aten::mm")
        yield guesses.ops_are(1, "aten::add", "09")
        yield guesses.kernels_are(2, "09")
        yield guesses.query_before_gemms()
        yield guesses.gemm_is_heavy()
    yield guesses.long_final_sync() if small else guesses.duration_varies()


@cli.command
def main(argv=None):
    parser, group = cli.lesson_parser(__doc__, __file__, EXAMPLES)
    group.add_argument("--size", type=cli.positive, nargs="+", default=[64], metavar="N",
                       help="x, w and b are N x N (64); several: a run for each, and a picture")  # fmt: skip
    group.add_argument("--batch", type=cli.positive, metavar="B", help="make them B x N x N (off)")
    group.add_argument("--op", choices=("matmul_add", "addmm"), default="matmul_add",
                       help="addmm: torch.addmm does both in one call (matmul_add)")  # fmt: skip
    args = parser.parse_args(argv)
    if args.batch and args.op == "addmm":
        raise cli.BadInput("torch.addmm takes 2-D matrices: leave out --batch or --op addmm")
    largest = (args.batch or 1, max(args.size), max(args.size))
    device, dtype = harness.prepare(args, x=largest, w=largest, b=largest, product=largest, out=largest)

    def profiled(args):
        shape = (args.batch, args.size, args.size) if args.batch else (args.size, args.size)
        x, w, b = (torch.randn(shape, device=device, dtype=dtype) for _ in range(3))
        eager = addmm if args.op == "addmm" else matmul_add
        fn = torch.compile(eager, mode=args.compile) if args.compile else eager

        def step():
            with record_function("matmul_add"):
                return fn(x, w, b)

        batch, op = args.batch and f"batch{args.batch}", args.op == "addmm" and "addmm"
        name = harness.tag(args, device, f"{args.size}", batch, op)
        reference = None if fn is matmul_add else lambda: matmul_add(x, w, b)
        return harness.profile(step, args, device, name=name, reference=reference)

    lesson.teach(args, device, profiled, what_we_guess, over="size")


if __name__ == "__main__":
    sys.exit(main())
