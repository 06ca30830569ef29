"""Rung 3, with a hand-written kernel: GELU and product of the MLP in one kernel.

You will see the fusion that torch.compile finds, without torch.compile:
Liger's Triton kernel, fetched from the Hub, runs between the same three
matrix products.

  uv run 03_kernels_mlp.py
  uv run 03_kernels_mlp.py --warmup
"""

from common import mlp
from common.flags import answer_before_torch, parse
from tracereader import expect

REPO = "kernels-community/liger-kernels"
NEEDS_GPU = (
    "Liger's kernel is written in Triton, which needs a GPU, and this run is on the CPU: "
    "03_simple_mlp.py is the same MLP and runs here"
)


def flags(argv=None):
    return parse(argv, __doc__, __file__, *mlp.FLAGS, needs_gpu=NEEDS_GPU)


answer_before_torch(flags, __file__, "kernels")

from types import SimpleNamespace

import torch
import torch.nn.functional as F
from kernels import get_kernel
from torch.profiler import record_function

from common.harness import hub_errors, profiler, save, unprofiled_step_us, warm_up
from common.lesson import lesson


def build(args):
    with hub_errors(REPO):
        layers = get_kernel(REPO, version=1).layers
    config = SimpleNamespace(hidden_size=args.dim, intermediate_size=args.hidden)
    with args.device:
        model = layers.LigerGEGLUMLP(config).to(args.dtype).eval()
    x = torch.randn(args.batch, args.seq, args.dim, device=args.device, dtype=args.dtype)
    return model, x


def profiled(args, model, x):
    fn = torch.compile(model, mode=args.compile) if args.compile else model

    def eager():
        return model.down_proj(F.gelu(model.gate_proj(x), approximate="tanh") * model.up_proj(x))

    def one_step():
        with torch.no_grad(), record_function("kernels_mlp_fwd"):
            return fn(x)

    steps = warm_up(one_step, args)
    steps.unprofiled_us = unprofiled_step_us(one_step, args)
    with profiler(args) as prof:  # 01_matmul_add.py writes it out
        for step in steps:
            out = step()
            prof.step()
    return save(prof, args, steps, out, reference=eager, facts=mlp.LAYERS)


def predictions(args):
    yield expect.fused_into_one("hand", "geglu")
    yield expect.kernels_are(4, ": three GEMMs and Liger's")
    if not args.compile:
        yield expect.no_compile_rows()
    yield expect.launch_settings(256, args.batch * args.seq)
    yield from mlp.gemm_predictions(args)


main = lesson(flags, build, profiled, predictions)
if __name__ == "__main__":
    raise SystemExit(main())
