"""Record captures and replays of CUDA graphs, and steps with records of their synchronizations.

Usage: record_captures.py FOLDER

On NVIDIA GPUs a recorded capture has neither work nor the names of its kernels. A GPU is needed.
"""

import sys
from pathlib import Path

import torch
from torch import nn
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import profile, record_function, schedule

RECORDED = 4
BATCH, TOKENS, WIDTH, HEADS, LAYERS = 4, 128, 1024, 16, 4


class Block(nn.Module):
    """One layer of a transformer."""

    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        batch, tokens, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, tokens, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, tokens, width))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


def of_model():
    return nn.Sequential(*(Block() for _ in range(LAYERS))).cuda().bfloat16()


def record(path, run, **kwargs):
    """Write the trace of one call to a file."""
    with profile(record_shapes=True, **kwargs) as prof:
        run()
    prof.export_chrome_trace(str(path))


def record_steps(path, step, **kwargs):
    """Write the trace of a few steps to a file."""
    for _ in range(3):
        step()
    torch.cuda.synchronize()
    once = schedule(wait=0, warmup=1, active=RECORDED, repeat=1)
    with profile(schedule=once, record_shapes=True, **kwargs) as prof:
        for _ in range(RECORDED + 1):
            step()
            prof.step()
        torch.cuda.synchronize()
    prof.export_chrome_trace(str(path))


@torch.inference_mode()
def captures(folder):
    """Capture a model for three batch sizes, and replay the graph of one of them."""
    model, graphs, inputs = of_model().eval(), {}, {}
    for size in (8, BATCH, 1):
        inputs[size] = torch.randn(size, TOKENS, WIDTH, device="cuda", dtype=torch.bfloat16)
        for _ in range(3):
            model(inputs[size])
    torch.cuda.synchronize()

    def capture(size):
        graphs[size] = torch.cuda.CUDAGraph()
        with record_function(f"capture_{size}_decode"), torch.cuda.graph(graphs[size]):
            model(inputs[size])

    record(folder / "captures.json.gz", lambda: [capture(size) for size in (8, BATCH, 1)])
    record(folder / "capture_with_stack.json.gz", lambda: capture(BATCH), with_stack=True)
    record_steps(folder / "replays.json.gz", graphs[BATCH].replay)
    record_steps(folder / "eager.json.gz", lambda: model(inputs[BATCH]))

    def both():
        with record_function("capture"):
            capture(BATCH)
        for _ in range(3):
            with record_function("replay"):
                graphs[BATCH].replay()
        torch.cuda.synchronize()

    record(folder / "capture_and_replays.json.gz", both)


@torch.inference_mode()
def two_streams(folder):
    """Capture and replay a graph whose branches run on two streams."""
    side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    x = torch.randn(2048, 2048, device="cuda", dtype=torch.bfloat16)

    def branches():
        side.wait_stream(torch.cuda.current_stream())
        left = torch.relu(x @ x)
        with torch.cuda.stream(side):
            right = torch.sigmoid(x * 2)
        torch.cuda.current_stream().wait_stream(side)
        return left + right

    def capture():
        with torch.cuda.graph(graph):
            branches()

    branches()
    torch.cuda.synchronize()
    record(folder / "capture_two_streams.json.gz", capture)
    record_steps(folder / "replays_two_streams.json.gz", graph.replay)


def syncs(folder):
    """Train on batches that a stream of its own copies, with records of the synchronizations."""
    model = of_model()
    host = [torch.randn(8, TOKENS, WIDTH).pin_memory() for _ in range(2)]
    copies, optimizer = torch.cuda.Stream(), torch.optim.AdamW(model.parameters(), fused=True)

    def step():
        with torch.cuda.stream(copies):
            batch = host[0].cuda(non_blocking=True)
        host.reverse()
        torch.cuda.current_stream().wait_stream(copies)
        batch.record_stream(torch.cuda.current_stream())
        loss = model(batch.bfloat16()).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        done = torch.cuda.Event()
        done.record()
        done.synchronize()
        loss.item()

    config = _ExperimentalConfig(enable_cuda_sync_events=True)
    record_steps(folder / "syncs.json.gz", step, experimental_config=config)


if __name__ == "__main__":
    (target,) = map(Path, sys.argv[1:])
    target.mkdir(parents=True, exist_ok=True)
    for recording in (captures, two_streams, syncs):
        recording(target)
