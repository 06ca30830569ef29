"""Rung 3: three linears and a GELU, the GeGLU MLP of a transformer.

You will see five kernels in one forward pass, two different kernels for three
matrix products of the same arithmetic, and what torch.compile fuses.

  uv run 03_simple_mlp.py
  uv run 03_simple_mlp.py --compile --warmup
"""

from common import mlp
from common.flags import answer_before_torch, parse
from tracereader import expect


def flags(argv=None):
    return parse(argv, __doc__, __file__, *mlp.FLAGS)


answer_before_torch(flags, __file__)

import torch
import torch.nn.functional as F
from torch import nn
from torch.profiler import record_function

from common.harness import profiler, save, unprofiled_step_us, warm_up
from common.lesson import lesson


class SimpleGeGLUMLP(nn.Module):
    def __init__(self, dim, hidden, **factory):
        super().__init__()
        self.gate_proj = nn.Linear(dim, hidden, bias=False, **factory)
        self.up_proj = nn.Linear(dim, hidden, bias=False, **factory)
        self.down_proj = nn.Linear(hidden, dim, bias=False, **factory)

    def forward(self, x):
        gate, up = self.gate_proj(x), self.up_proj(x)
        return self.down_proj(F.gelu(gate, approximate="tanh") * up)


def build(args):
    model = SimpleGeGLUMLP(args.dim, args.hidden, device=args.device, dtype=args.dtype).eval()
    x = torch.randn(args.batch, args.seq, args.dim, device=args.device, dtype=args.dtype)
    return model, x


def profiled(args, model, x):
    fn = torch.compile(model, mode=args.compile) if args.compile else model

    def one_step():
        with torch.no_grad(), record_function("mlp_fwd"):
            return fn(x)

    steps = warm_up(one_step, args)
    steps.unprofiled_us = unprofiled_step_us(one_step, args)
    with profiler(args) as prof:  # 01_matmul_add.py writes it out
        for step in steps:
            out = step()
            prof.step()
    return save(prof, args, steps, out, reference=(lambda: model(x)) if args.compile else None, facts=mlp.LAYERS)


def predictions(args):
    if args.compile:
        yield expect.ops_are(3, "aten::mm", gone=("aten::linear", "aten::matmul", "aten::t", "aten::reshape"))
        yield expect.compiled_rows()
        yield expect.fused_into_one("Inductor", "gelu", "mul")
    else:
        yield expect.ops_are(3, "aten::linear")
        yield expect.kernels_are(5, ": three GEMMs, gelu and mul")
        yield expect.launch_nothing("aten::t", "aten::transpose", "aten::view", "aten::_unsafe_view")
        yield expect.pointwise_round_trip(args.batch * args.seq, args.hidden, args.dtype.itemsize)
    yield from mlp.gemm_predictions(args)


main = lesson(flags, build, profiled, predictions)
if __name__ == "__main__":
    raise SystemExit(main())
