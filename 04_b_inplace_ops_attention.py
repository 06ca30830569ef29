"""Rung 4, with one character more: the mask is filled in place (masked_fill_).

You will see that the copy is gone and that the peak memory is the same: an op
that works out of place makes a second matrix of scores, and so does the
multiplication by the scale before it.

  uv run 04_b_inplace_ops_attention.py
  uv run 04_b_inplace_ops_attention.py --compile \\
    --batch 8 --heads 16 --seq 1024 --head_dim 64
"""

from common import attention
from common.flags import answer_before_torch, parse
from tracereader import expect


def flags(argv=None):
    return parse(argv, __doc__, __file__, *attention.FLAGS)


answer_before_torch(flags, __file__)

import torch
from torch import nn
from torch.profiler import record_function

from common.harness import profiler, save, unprofiled_step_us, warm_up
from common.lesson import lesson
from common.sdpa import in_fp32, refuse_scores


class InplaceAttention(nn.Module):
    def __init__(self, seq, device):
        super().__init__()
        later = torch.ones(seq, seq, dtype=torch.bool, device=device).triu(1)
        self.register_buffer("later", later)  # built once: a query must not see keys after it

    def forward(self, q, k, v):
        scores = torch.matmul(q, k.transpose(-2, -1))
        scores = scores * q.shape[-1] ** -0.5
        scores.masked_fill_(self.later, -torch.inf)
        return torch.matmul(torch.softmax(scores, dim=-1), v)


def build(args):
    refuse_scores(args)
    model = InplaceAttention(args.seq, args.device).eval()
    q, k, v = (torch.randn(attention.shape(args), device=args.device, dtype=args.dtype) for _ in range(3))
    return model, q, k, v


def profiled(args, model, q, k, v):
    fn = torch.compile(model, mode=args.compile) if args.compile else model

    def one_step():
        with torch.no_grad(), record_function("attn_fwd"):
            return fn(q, k, v)

    steps = warm_up(one_step, args)
    steps.unprofiled_us = unprofiled_step_us(one_step, args)
    with profiler(args) as prof:  # 01_matmul_add.py writes it out
        for step in steps:
            out = step()
            prof.step()
    return save(
        prof, args, steps, out, reference=lambda: in_fp32(q, k, v), against="fp32 math", facts=attention.facts(args)
    )


def predictions(args):
    if args.compile:
        yield expect.compiled_rows()
        yield expect.ops_are(2, "aten::bmm", gone=("aten::masked_fill_", "aten::clone", "aten::softmax"))
        yield expect.fused_into_one("Inductor", "softmax", "masked_fill", "mul")
    else:
        yield expect.ops_are(1, "aten::masked_fill_", gone=("aten::masked_fill", "aten::clone"))
        yield expect.gpu_does("GEMM", "mul", "masked_fill", "softmax", "GEMM")
        yield expect.unfused()
    yield expect.scores_in_memory(1 if args.compile else 2)


main = lesson(flags, build, profiled, predictions)
if __name__ == "__main__":
    raise SystemExit(main())
