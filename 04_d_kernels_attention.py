"""Rung 4, from a library: FlashAttention's own function, fetched from the Hub.

You will see one kernel and few ops around it: flash_attn_func takes inputs of
shape [batch, seq, heads, head_dim], so nothing is transposed before or after.

  uv run 04_d_kernels_attention.py
  uv run 04_d_kernels_attention.py --warmup 0 \\
    --batch 8 --heads 16 --seq 1024 --head_dim 64
"""

from common import attention
from common.flags import answer_before_torch, parse
from tracereader import expect
from tracereader.command import BadInput

REPO = "kernels-community/flash-attn2"
NEEDS_GPU = (
    "FlashAttention's kernel is for GPUs, and this run is on the CPU: "
    "04_c_sdpa_attention.py --backend flash is the same algorithm and runs here"
)
WIDEST_HEAD = 256


def flags(argv=None):
    args = parse(argv, __doc__, __file__, *attention.FLAGS, needs_gpu=NEEDS_GPU)
    if args.dtype == "fp32":
        raise BadInput("FlashAttention-2 computes in fp16 and bf16, not in fp32: leave out --dtype")
    if args.head_dim > WIDEST_HEAD:
        raise BadInput(f"--head_dim {args.head_dim}: FlashAttention-2 takes heads up to {WIDEST_HEAD} wide")
    return args


answer_before_torch(flags, __file__, "kernels")

import torch
from kernels import get_kernel
from torch.profiler import record_function

from common.harness import hub_errors, profiler, save, unprofiled_step_us, warm_up
from common.lesson import lesson
from common.sdpa import in_fp32


def build(args):
    with hub_errors(REPO):
        flash_attn_func = get_kernel(REPO, version=3).flash_attn_func
    shape = (args.batch, args.seq, args.heads, args.head_dim)
    q, k, v = (torch.randn(shape, device=args.device, dtype=args.dtype) for _ in range(3))
    return lambda q, k, v: flash_attn_func(q, k, v, causal=True), q, k, v


def profiled(args, attend, q, k, v):
    fn = torch.compile(attend, mode=args.compile) if args.compile else attend

    def reference():
        return in_fp32(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)

    def one_step():
        with torch.no_grad(), record_function("flash_kernel_fwd"):
            return fn(q, k, v)

    steps = warm_up(one_step, args)
    steps.unprofiled_us = unprofiled_step_us(one_step, args)
    with profiler(args) as prof:  # 01_matmul_add.py writes it out
        for step in steps:
            out = step()
            prof.step()
    return save(prof, args, steps, out, reference=reference, against="fp32 math", facts=attention.facts(args))


def predictions(args):
    yield expect.kernel_is("flash_fwd_kernel", "FlashAttention-2's")
    yield expect.low_occupancy()
    yield expect.launched_by("cudaLaunchKernel")
    yield expect.ops_are(0, "aten::transpose")
    yield expect.scores_in_memory(0)


main = lesson(flags, build, profiled, predictions)
if __name__ == "__main__":
    raise SystemExit(main())
