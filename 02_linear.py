"""Rung 2: one nn.Linear with bias: where its transpose and its bias add went.

You will see that aten::t moves no data, that the matrix product's kernel also
adds the bias, and how little torch.compile can improve a single layer.

  uv run 02_linear.py
  uv run 02_linear.py --batch 1024 --in_dim 32 --out_dim 64 --compile
"""

from common.flags import answer_before_torch, flag, parse, positive
from tracereader import expect

FLAGS = (
    flag("--batch", "rows of the input (1024)", shape=True, type=positive, default=1024),
    flag("--in_dim", "input features (32)", shape=True, type=positive, default=32),
    flag("--out_dim", "output features (64)", shape=True, type=positive, default=64),
)


def flags(argv=None):
    return parse(argv, __doc__, __file__, *FLAGS)


answer_before_torch(flags, __file__)

import torch
from torch import nn
from torch.profiler import record_function

from common.harness import profiler, save, unprofiled_step_us, warm_up
from common.lesson import lesson


def build(args):
    linear = nn.Linear(args.in_dim, args.out_dim, bias=True, device=args.device, dtype=args.dtype)
    x = torch.randn(args.batch, args.in_dim, device=args.device, dtype=args.dtype)
    return linear, x


def profiled(args, linear, x):
    fn = torch.compile(linear, mode=args.compile) if args.compile else linear

    def one_step():
        with torch.no_grad(), record_function("linear_fwd"):
            return fn(x)

    steps = warm_up(one_step, args)
    steps.unprofiled_us = unprofiled_step_us(one_step, args)
    with profiler(args) as prof:  # 01_matmul_add.py writes it out
        for step in steps:
            out = step()
            prof.step()
    return save(prof, args, steps, out, reference=(lambda: linear(x)) if args.compile else None)


def predictions(args):
    if args.compile:
        yield expect.ops_are(1, "aten::addmm", gone=("aten::linear", "aten::t", "aten::add"))
        yield expect.compiled_rows()
    else:
        yield expect.dispatches("aten::linear", "aten::addmm")
        yield expect.ops_are(1, "aten::addmm", gone=("aten::add",))
        yield expect.launch_nothing("aten::t")
    yield expect.bias_in_the_epilogue()
    yield expect.name_says_transposed()
    yield expect.steps_are_alike() if args.warmup or args.pause else expect.first_step_is_wider()


main = lesson(flags, build, profiled, predictions)
if __name__ == "__main__":
    raise SystemExit(main())
