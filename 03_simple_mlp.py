"""Rung 3: three linears and a GELU, the GeGLU MLP of a transformer.

You will see five kernels in one forward pass, two kinds of matrix product for three layers of the
same arithmetic, and what torch.compile merges once there is something to merge.
"""

import sys

import torch
import torch.nn.functional as F
from torch import nn
from torch.profiler import record_function

from common import cli, guesses, harness, lesson, mlp

EXAMPLES = ("", "--batch 64 --seq 128 --dim 768 --hidden 3072 --compile --warmup")


class SimpleGeGLUMLP(nn.Module):
    def __init__(self, dim, hidden, **factory):
        super().__init__()
        self.gate_proj = nn.Linear(dim, hidden, bias=False, **factory)
        self.up_proj = nn.Linear(dim, hidden, bias=False, **factory)
        self.down_proj = nn.Linear(hidden, dim, bias=False, **factory)

    def forward(self, x):
        gate, up = self.gate_proj(x), self.up_proj(x)
        return self.down_proj(F.gelu(gate, approximate="tanh") * up)


def what_we_guess(args):
    if args.compile:
        yield guesses.ops_are(3, "aten::mm", "31", gone=("aten::linear", "aten::matmul", "aten::t", "aten::reshape"))
        yield guesses.compiled_rows()
        yield guesses.fused_into_one("Inductor", "gelu", "mul", claims="32 33")
    else:
        yield guesses.ops_are(3, "aten::linear", "27")
        yield guesses.kernels_are(5, "27", ": three GEMMs, gelu and mul")
        yield guesses.launch_nothing("aten::t", "aten::transpose", "aten::view", "aten::_unsafe_view")
        yield guesses.pointwise_round_trip(args.batch * args.seq, args.hidden, harness.DTYPES[args.dtype].itemsize)
    yield from mlp.gemm_guesses(args)


@cli.command
def main(argv=None):
    parser, group = cli.lesson_parser(__doc__, __file__, EXAMPLES)
    mlp.add_flags(group)
    args = parser.parse_args(argv)

    device, dtype = harness.prepare(args, **mlp.tensors(args))
    model = SimpleGeGLUMLP(args.dim, args.hidden, device=device, dtype=dtype).eval()
    fn = torch.compile(model, mode=args.compile) if args.compile else model

    def profiled(args):
        x = torch.randn(args.batch, args.seq, args.dim, device=device, dtype=dtype)

        def step():
            with record_function("mlp_fwd"):
                return fn(x)

        name = harness.tag(args, device, mlp.shape_token(args))
        reference = (lambda: model(x)) if args.compile else None
        return harness.profile(step, args, device, name=name, reference=reference)

    lesson.teach(args, device, profiled, what_we_guess, over="seq")
    mlp.then_seq(fn, model, args, device, dtype)


if __name__ == "__main__":
    sys.exit(main())
