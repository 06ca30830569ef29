"""Rung 1: a matrix product and a bias add, from the Python call to the kernel.

You will see what one step costs on the CPU and on the GPU, from which size on
the CPU's cost no longer matters, and what torch.compile changes here.

  uv run 01_matmul_add.py --size 64
  uv run 01_matmul_add.py --size 4096 --warmup --compile
"""

from common.flags import GRAPH_MODES, BadInput, answer_before_torch, flag, parse, positive
from tracereader import expect

FLAGS = (
    flag("--size", "x, w and b are N x N (64)", shape=True, type=positive, default=64),
    flag("--batch", "make them N x size x size (off)", tag="batch{}", type=positive),
    flag("--op", "addmm: torch.addmm does both in one call (matmul_add)", tag="{}", choices=("matmul_add", "addmm")),
)


def flags(argv=None):
    args = parse(argv, __doc__, __file__, *FLAGS)
    if args.batch and args.op == "addmm":
        raise BadInput("torch.addmm takes 2-D matrices: leave out --batch or --op addmm")
    return args


answer_before_torch(flags, __file__)

import torch

from common.harness import activities, save, unprofiled_step_us, warm_up
from common.lesson import lesson


def matmul_add(x, w, b):
    return torch.add(torch.matmul(x, w), b)


def build(args):
    shape = [args.batch, args.size, args.size] if args.batch else [args.size, args.size]
    eager = matmul_add if args.op == "matmul_add" else lambda x, w, b: torch.addmm(b, x, w)
    return eager, *(torch.randn(shape, device=args.device, dtype=args.dtype) for _ in range(3))  # x, w and b


def profiled(args, eager, x, w, b):
    fn = torch.compile(eager, mode=args.compile) if args.compile else eager

    def one_step():
        with torch.no_grad(), torch.profiler.record_function("matmul_add"):
            return fn(x, w, b)

    steps = warm_up(one_step, args)
    steps.unprofiled_us = unprofiled_step_us(one_step, args)  # a recorded step takes longer: by how much?
    with torch.profiler.profile(
        activities=activities(args),  # the CPU, and the GPU where there is one
        schedule=torch.profiler.schedule(wait=args.wait, warmup=args.schedule_warmup, active=args.active, repeat=1),
        record_shapes=args.record_shapes,
        with_stack=args.with_stack,
        profile_memory=args.profile_memory,
    ) as prof:
        for step in steps:
            out = step()
            prof.step()
    return save(prof, args, steps, out, reference=None if fn is matmul_add else lambda: (torch.matmul(x, w), b))


def predictions(args):
    small = (args.batch or 1) * args.size**3 < 2**31  # of multiply-adds
    # Without shapes the trace does not show whether arithmetic or memory limits a kernel.
    yield expect.regime_is("overhead-bound" if small else "compute-bound" if args.record_shapes else "GPU-bound")
    yield expect.records_steps(args.wait + args.schedule_warmup, args.active)
    yield expect.steps_are_alike() if args.warmup or args.pause else expect.first_step_is_wider()
    yield expect.self_time_excludes_children()
    if args.wait == args.schedule_warmup == 0 and not args.warmup:
        yield expect.one_buffer_request()
    if args.compile:
        yield expect.compiled_rows()
    if args.compile in GRAPH_MODES:  # a CUDA graph's replay shows no ops
        yield expect.graph_replay_without_copies()
    elif args.compile or args.op == "addmm":
        yield from (expect.ops_are(1, "aten::addmm", gone=("aten::matmul", "aten::add")), expect.bias_copy_then_gemm())
        if args.compile:
            yield expect.dynamo_costs_more_than_the_op("aten::addmm")
    else:
        yield expect.dispatches("aten::matmul", "aten::bmm" if args.batch else "aten::mm")
        yield from (expect.ops_are(1, "aten::add"), expect.kernels_are(2))
        yield from (expect.occupancy_asked_once(), expect.gemm_is_heavy())
    yield expect.long_final_sync() if small else expect.duration_varies()


main = lesson(flags, build, profiled, predictions)
if __name__ == "__main__":
    raise SystemExit(main())
