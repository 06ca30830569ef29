"""Rung 3, by hand: the same GeGLU MLP, its GELU and product in one kernel that a person wrote.

You will see the fusion that torch.compile finds, without torch.compile: Liger's Triton kernel,
built beforehand and fetched from the Hub, between the same three matrix products.
"""

import sys
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from kernels import get_kernel
from torch.profiler import record_function

from common import cli, guesses, harness, lesson, mlp

EXAMPLES = ("", "--batch 64 --seq 128 --dim 768 --hidden 3072 --warmup")
REPO = "kernels-community/liger-kernels"


def what_we_guess(args):
    yield guesses.fused_into_one("hand", "geglu", claims="34")
    yield guesses.kernels_are(4, "34", ": three GEMMs and Liger's")
    if not args.compile:
        yield guesses.no_compile_rows()
    yield guesses.launch_settings(256, args.batch * args.seq)
    yield from mlp.gemm_guesses(args)


@cli.command
def main(argv=None):
    parser, group = cli.lesson_parser(__doc__, __file__, EXAMPLES)
    mlp.add_flags(group)
    args = parser.parse_args(argv)

    device, dtype = harness.prepare(args, **mlp.tensors(args))
    if device.type == "cpu":
        raise cli.BadInput(
            "Liger's kernel is written in Triton, which needs a GPU, and this run is on the CPU: "
            "03_simple_mlp.py is the same MLP and runs here"
        )
    with harness.hub_errors(REPO):
        layers = get_kernel(REPO, version=1).layers
    config = SimpleNamespace(hidden_size=args.dim, intermediate_size=args.hidden)
    model = layers.LigerGEGLUMLP(config).to(device, dtype).eval()
    fn = torch.compile(model, mode=args.compile) if args.compile else model

    def eager(x):
        return model.down_proj(F.gelu(model.gate_proj(x), approximate="tanh") * model.up_proj(x))

    def profiled(args):
        x = torch.randn(args.batch, args.seq, args.dim, device=device, dtype=dtype)

        def step():
            with record_function("kernels_mlp_fwd"):
                return fn(x)

        name = harness.tag(args, device, mlp.shape_token(args))
        return harness.profile(step, args, device, name=name, reference=lambda: eager(x))

    lesson.teach(args, device, profiled, what_we_guess, over="seq")
    mlp.then_seq(fn, eager, args, device, dtype)


if __name__ == "__main__":
    sys.exit(main())
