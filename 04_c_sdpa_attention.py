"""Rung 4, in one call: scaled_dot_product_attention, on each of its backends.

You will see one op launch one kernel or twenty: the same line of Python runs
a kernel of FlashAttention, of CUTLASS or of cuDNN, or the formula op by op,
with more work than the naive script.

  uv run 04_c_sdpa_attention.py --backend flash
  uv run 04_c_sdpa_attention.py --backend math \\
    --batch 8 --heads 16 --seq 1024 --head_dim 64

--backend flex is flex_attention. torch.compile generates its kernel, so it is
always compiled.
"""

from dataclasses import replace

from common import attention
from common.flags import answer_before_torch, flag, parse
from tracereader import expect
from tracereader.command import BadInput

BACKENDS = ("auto", "math", "efficient", "flash", "cudnn", "flex")


def flags(argv=None):
    own = flag("--backend", f"{', '.join(BACKENDS)} (auto: torch chooses)", tag="{}", choices=BACKENDS, metavar="NAME")
    args = parse(argv, __doc__, __file__, *attention.FLAGS, own)
    if args.device == "cpu" and args.backend in ("efficient", "cudnn"):
        raise BadInput(f"--backend {args.backend} is for GPUs, and this run is on the CPU: take math, flash or flex")
    return replace(args, compile=args.compile or "default") if args.backend == "flex" else args


answer_before_torch(flags, __file__)

import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.profiler import record_function

from common.harness import profiler, save, unprofiled_step_us, warm_up
from common.lesson import lesson
from common.sdpa import all_refused, in_fp32, pinned, refuse_scores, require


def sdpa(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def flex(args):
    def causal(batch, head, query, key):
        return query >= key

    blocks = create_block_mask(causal, None, None, args.seq, args.seq, device=args.device)
    return lambda q, k, v: flex_attention(q, k, v, block_mask=blocks)


def inside(attend, backend):
    """The same, its backend chosen inside: torch's cache of compiled graphs knows no other (pytorch issue 185449)."""

    def chosen(q, k, v):
        with pinned(backend):
            return attend(q, k, v)

    return chosen


def build(args):
    if args.backend == "math":
        refuse_scores(args, itemsize=torch.float32.itemsize)  # it computes in fp32
    q, k, v = (torch.randn(attention.shape(args), device=args.device, dtype=args.dtype) for _ in range(3))
    require(args.backend, q, k, v)
    if args.backend == "flex" and args.device.type != "cpu" and args.head_dim < 16:
        raise BadInput(f"--backend flex: its kernel for GPUs takes heads of 16 and wider, not of {args.head_dim}")
    attend = flex(args) if args.backend == "flex" else sdpa
    return inside(attend, args.backend) if args.compile else attend, q, k, v


def profiled(args, attend, q, k, v):
    fn = torch.compile(attend, mode=args.compile) if args.compile else attend

    def one_step():
        with torch.no_grad(), record_function("sdpa_fwd"):
            return fn(q, k, v)

    facts = attention.facts(args, args.backend, all_refused(q, k, v))
    with pinned(args.backend):  # around all steps: entering it takes longer than some calls
        steps = warm_up(one_step, args)
        steps.unprofiled_us = unprofiled_step_us(one_step, args)
        with profiler(args) as prof:  # 01_matmul_add.py writes it out
            for step in steps:
                out = step()
                prof.step()
    return save(prof, args, steps, out, reference=lambda: in_fp32(q, k, v), against="fp32 math", facts=facts)


def predictions(args):
    if args.compile:
        yield expect.compiled_rows()
    if args.backend == "auto":
        yield expect.sdpa_runs_on("flash")
    elif args.backend == "math":
        yield expect.on_cuda_cores()
        if not args.compile:
            yield expect.kernels_are(20)
            yield expect.cast_before_product()
            yield expect.mask_remade()
            yield expect.safe_softmax()
    elif args.backend == "efficient":
        yield expect.kernel_is("fmha_cutlassF", "the memory-efficient one, built on CUTLASS")
        yield expect.written_for_this_gpu()
        yield expect.launched_by("cudaLaunchKernel")
        yield expect.ops_are(4, "aten::transpose")
    elif args.backend == "flash":
        yield expect.kernel_is("flash_fwd_kernel", "FlashAttention-2's, as torch builds it")
        yield expect.low_occupancy()
        yield expect.launched_by("cudaLaunchKernel")
        yield expect.ops_are(4, "aten::transpose")
    elif args.backend == "cudnn":
        yield expect.kernel_is("cudnn_generated", "which cuDNN generated for this problem")
        yield expect.occupancy_not_estimated()
        yield expect.launched_by("cuLaunchKernelEx")
        yield expect.ops_are(1, "aten::_cudnn_attention_forward", gone=("aten::transpose",))
        yield expect.time_in_a_library()
    else:
        yield expect.kernel_is("flex_attention", "which Inductor made from a template")
    yield expect.scores_in_memory({"math": 2 if args.compile else 4}.get(args.backend, 0))


main = lesson(flags, build, profiled, predictions)
if __name__ == "__main__":
    raise SystemExit(main())
