"""Record the ranks of a job before and after one change each, to check what read-trace says of several ranks.

Usage: torchrun --nproc-per-node 4 record_rank_changes.py FOLDER [NAME ...]

Every rank of every variant writes FOLDER/<workload>/<variant>/rank<N>.json.gz. A step without the profiler is measured
first, for all variants, because the profiler slows a process for good. `buffers` needs torchvision. On a machine
without GPUs the sizes are small and the backend is gloo; this only shows that the script works.
"""

import contextlib
import gzip
import json
import os
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile, schedule, supported_activities

RECORDED = 3
GPU = torch.cuda.is_available()
DIM, TOKENS = (2048, 16384) if GPU else (16, 64)


class Block(torch.nn.Module):
    def __init__(self, dim=DIM):
        super().__init__()
        self.norm = torch.nn.LayerNorm(dim)
        self.up, self.down = torch.nn.Linear(dim, 4 * dim), torch.nn.Linear(4 * dim, dim)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


def blocks(count, device, dim=DIM):
    return torch.nn.Sequential(*(Block(dim) for _ in range(count))).to(device, torch.bfloat16)


def pipeline(variant, device):
    """Twenty-four blocks in stages of equal or unequal size, and four or eight microbatches (1F1B)."""
    rank, world = dist.get_rank(), dist.get_world_size()
    count = 24 // world
    if variant == "uneven":
        count = 12 if rank == 1 else 12 // (world - 1)
    module = blocks(count, device)
    stage = PipelineStage(module, rank, world, device)
    run = Schedule1F1B(stage, 8 if variant == "many" else 4, loss_fn=lambda out, target: F.mse_loss(out, target))
    x = torch.randn(TOKENS, DIM, device=device, dtype=torch.bfloat16)
    target = torch.randn_like(x)
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-4)

    def step():
        run.step(*([x] if rank == 0 else []), **({"target": target} if rank == world - 1 else {}))
        optimizer.step()
        optimizer.zero_grad()

    return step


def mesh(variant, device):
    """Tensor parallel pairs of ranks, and FSDP over the pairs; in one variant the last rank computes more."""
    world = dist.get_world_size()
    grid = init_device_mesh(device.type, (2, world // 2), mesh_dim_names=("data", "tensor"))
    model = blocks(8, device)
    for block in model:
        parallelize_module(block, grid["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(block, mesh=grid["data"])
    fully_shard(model, mesh=grid["data"])
    x = torch.randn(TOKENS, DIM, device=device, dtype=torch.bfloat16)
    more = 20 if variant == "slow" and dist.get_rank() == world - 1 else 0
    square = torch.randn(DIM, DIM, device=device, dtype=torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)

    def step():
        h = x
        for _ in range(more):
            h = h @ square
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def gradients(variant, device):
    """Data parallel: one bucket, DDP's buckets, or one all-reduce for each parameter after the backward pass."""
    model = blocks(12, device)
    if variant == "compile":
        model = torch.compile(model)
    x = torch.randn(TOKENS // 4, DIM, device=device, dtype=torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    run = model
    if variant != "by_hand":
        run = DistributedDataParallel(model, bucket_cap_mb=10_000 if variant == "one_bucket" else 25)

    def step():
        run(x).square().mean().backward()
        if variant == "by_hand":
            for one in model.parameters():
                dist.all_reduce(one.grad)
        optimizer.step()
        optimizer.zero_grad()

    return step


def experts(variant, device):
    """Expert parallel inference: tokens travel to the ranks of their experts and back, evenly or most to rank 0."""
    rank, world = dist.get_rank(), dist.get_world_size()
    each = TOKENS // world
    to = [each] * world if variant == "even" else [each * (world + 2) // 2, *[each // 2] * (world - 1)]
    if variant != "even":
        to[-1] = TOKENS - sum(to[:-1])
    layers = [blocks(1, device) for _ in range(6)]
    x = torch.randn(TOKENS, DIM, device=device, dtype=torch.bfloat16)
    there = [to[rank]] * world

    def step():
        h = x
        for layer in layers:
            mine = x.new_empty(sum(there), DIM)
            dist.all_to_all_single(mine, h, there, to)
            mine = layer(mine)
            h = torch.empty_like(x)
            dist.all_to_all_single(h, mine, to, there)
        return h

    return torch.no_grad()(step)


def launches(variant, device):
    """DDP of small layers; in one variant, one rank's CPU is held up in each step."""
    model = blocks(24, device, DIM // 4)
    if variant == "compile":
        model = torch.compile(model)
    run = DistributedDataParallel(model)
    x = torch.randn(512, DIM // 4, device=device, dtype=torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    late = variant == "late" and dist.get_rank() == 1

    def step():
        loss = run(x).square().mean()
        if late:
            done = time.perf_counter() + 0.01
            while time.perf_counter() < done:
                pass
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def sharded(variant, device):
    """FSDP with few tokens for each parameter, so that it communicates longer than it computes."""
    model = blocks(12, device)
    for block in model:
        fully_shard(block, reshard_after_forward=variant != "keep")
    fully_shard(model)
    if variant == "prefetch":
        for number, block in enumerate(model):
            block.set_modules_to_forward_prefetch(list(model[number + 1 : number + 3]))
            block.set_modules_to_backward_prefetch(list(model[max(0, number - 2) : number])[::-1])
    x = torch.randn(TOKENS // 16, DIM, device=device, dtype=torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)

    def step():
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def float32(variant, device, **options):
    """Blocks with float32 weights in DDP or FSDP, their optimizer, and a function that returns the loss in bf16."""
    model = blocks(6, device).float()
    if variant.startswith("ddp"):
        run = DistributedDataParallel(model)
    elif variant.startswith("fsdp1"):
        run = FullyShardedDataParallel(model, auto_wrap_policy=ModuleWrapPolicy({Block}), use_orig_params=True)
    else:
        for block in model:
            fully_shard(block, **options)
        run = fully_shard(model, **options)
    x = torch.randn(TOKENS // 8, DIM, device=device)

    def loss():
        with torch.autocast(device.type, torch.bfloat16):
            return run(x).square().mean()

    return run, torch.optim.AdamW(run.parameters(), lr=1e-4), loss


def accumulated(variant, device):
    """Four microbatches, of which each one or only the last reduces gradients."""
    run, optimizer, loss = float32(variant, device)

    def step():
        for number in range(4):
            last = number == 3
            if variant == "fsdp_once":
                run.set_requires_gradient_sync(last)
                run.set_reshard_after_backward(last)
            with run.no_sync() if variant in ("ddp_once", "fsdp1_once") and not last else contextlib.nullcontext():
                (loss() / 4).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def communicated(variant, device):
    """Gradients, and FSDP's parameters, are communicated in float32 or in bf16."""
    in_bf16 = variant.endswith("bf16")
    options = {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)} if in_bf16 else {}
    run, optimizer, loss = float32(variant, device, **options)
    if variant == "ddp_bf16":
        run.register_comm_hook(None, default_hooks.bf16_compress_hook)

    def step():
        loss().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def buffers(variant, device):
    """DDP of a ResNet, whose batch norms' buffers are sent to all ranks before each forward pass, or are not."""
    import torchvision

    model = torchvision.models.resnet50() if GPU else torchvision.models.resnet18()
    model.to(device, memory_format=torch.channels_last)
    run = DistributedDataParallel(model, broadcast_buffers=variant == "sent")
    size = 224 if GPU else 32
    x = torch.randn(32, 3, size, size, device=device).to(memory_format=torch.channels_last)
    target = torch.randint(0, 1000, (32,), device=device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=True)

    def step():
        with torch.autocast(device.type, torch.bfloat16):
            loss = F.cross_entropy(run(x), target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


WORKLOADS = {
    pipeline: ("few", "many", "uneven"),
    mesh: ("slow", "even"),
    gradients: ("by_hand", "one_bucket", "buckets", "compile"),
    experts: ("skewed", "even"),
    launches: ("late", "even", "compile"),
    sharded: ("default", "prefetch", "keep"),
    accumulated: ("ddp_every", "ddp_once", "fsdp_every", "fsdp_once", "fsdp1_every", "fsdp1_once"),
    buffers: ("sent", "kept"),
    communicated: ("ddp_float32", "ddp_bf16", "fsdp_float32", "fsdp_bf16"),
}


def synchronize():
    if GPU:
        torch.cuda.synchronize()


def unprofiled_us(step):
    """The median step of several blocks of steps, each block with one synchronization at its end."""
    times = []
    for _ in range(5):
        dist.barrier()
        begin = time.perf_counter()
        for _ in range(10):
            step()
        synchronize()
        times.append((time.perf_counter() - begin) / 10 * 1e6)
    return statistics.median(times)


def record(step, us, path):
    with profile(
        activities=supported_activities() if GPU else [ProfilerActivity.CPU],
        schedule=schedule(wait=1, warmup=1, active=RECORDED),
        record_shapes=True,
    ) as prof:
        for number in range(2 + RECORDED):
            step()
            if number == 2:  # torch takes metadata only while it records
                prof.add_metadata_json("unprofiled_step_us", json.dumps(us))
            prof.step()
    path.parent.mkdir(parents=True, exist_ok=True)
    plain = path.with_suffix("")
    prof.export_chrome_trace(str(plain))
    path.write_bytes(gzip.compress(plain.read_bytes(), 9, mtime=0))
    plain.unlink()


def main(folder, *names):
    rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", rank) if GPU else torch.device("cpu")
    if GPU:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if GPU else "gloo", device_id=device if GPU else None)
    torch.manual_seed(0)
    ready = []
    for make, variants in WORKLOADS.items():
        for variant in variants:
            if names and make.__name__ not in names:
                continue
            step = make(variant, device)
            for _ in range(5):
                step()
            us = unprofiled_us(step)
            ready.append((make.__name__, variant, step, us))
            if not rank:
                print(f"{make.__name__} {variant}: {us:,.1f} us without the profiler", flush=True)
    for name, variant, step, us in ready:
        record(step, us, Path(folder) / name / variant / f"rank{rank}.json.gz")
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
