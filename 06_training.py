"""Rung 6: one training step, on one device and on several.

You will see how a step divides into forward, backward and optimizer, how
checkpointing, another optimizer or a slow data loader changes it, and, with
several GPUs, which rank waits for which.

  uv run 06_training.py --warmup
  uv run torchrun --nproc-per-node 2 06_training.py --warmup --parallel ddp
  uv run torchrun --nproc-per-node 2 06_training.py --parallel ddp --slow 1
"""

from common.distributed import place, processes
from common.flags import (
    DAY_MS,
    GRAPH_MODES,
    answer_before_torch,
    calls_at_most,
    flag,
    not_negative,
    parse,
    positive,
    require_at_most,
)
from tracereader import expect
from tracereader.command import BadInput

MOST_SEQUENCES = 1_000_000  # in a step; they are made one by one
FLAGS = (
    flag("--layers", "decoder blocks (12; on a CPU 2)", shape=True, type=positive, default=12, on_cpu=2),
    flag("--dim", "model width; heads are 64 wide (1024; on a CPU 128)", shape=True, type=positive, default=1024,
         on_cpu=128),
    flag("--seq", "tokens per sequence (1024; on a CPU 128)", shape=True, type=positive, default=1024, on_cpu=128),
    flag("--batch", "sequences per forward, on each rank (8; on a CPU 2)", shape=True, type=positive, default=8,
         on_cpu=2),
    flag("--optimizer", "adamw or sgd (adamw)", tag="{}", choices=("adamw", "sgd")),
    flag("--fused", "optimizer: one kernel updates many tensors", tag="fused", action="store_true"),
    flag("--foreach", "optimizer: one kernel for each operation on many tensors (torch's default on a GPU)",
         tag="foreach", action="store_true"),
    flag("--for-loop", "optimizer: one tensor at a time (the default on a CPU)", tag="forloop", action="store_true"),
    flag("--checkpoint", "activation checkpointing: recompute each block in the backward", tag="checkpoint",
         action="store_true"),
    flag("--accumulate", "forwards and backwards per optimizer step (1)", tag="accumulate{}", type=positive,
         default=1),
    flag("--loader", "take batches from a DataLoader; each sample takes MS milliseconds on one core (2 without MS)",
         tag="loader{}", nargs="?", const=2, type=not_negative, metavar="MS"),
    flag("--workers", "the DataLoader's worker processes; 0: the training process loads (2)", tag="workers{}",
         type=not_negative, default=2),
    flag("--no-pin", "do not pin the batches' memory", tag="nopin", action="store_true"),
    flag("--blocking", "copy each batch to the GPU with a blocking copy", tag="blocking", action="store_true"),
    flag("--parallel", "under torchrun: ddp (each rank has the whole model) or fsdp (each rank has a part)", tag="{}",
         choices=("ddp", "fsdp"), default=None, metavar="HOW"),
    flag("--bucket-mb", "size of DDP's gradient buckets (torch's: 1 for the first, then 25)", tag="bucket{}",
         type=positive, metavar="MB"),
    flag("--slow", "slow down rank RANK with 60 more matrix products in its forward", tag="slow{}", type=not_negative,
         metavar="RANK"),
    flag("--timeout", "seconds that a rank waits for another rank (60)", type=positive, default=60, metavar="S"),
)  # fmt: skip


def flags(argv=None):
    args = parse(argv, __doc__, __file__, *FLAGS, ranks=True)
    here = place()
    if args.parallel and not here:
        raise BadInput(f"--parallel {args.parallel} is for several processes: torchrun --nproc-per-node 2 {__file__} …")
    if here and not args.parallel:
        raise BadInput("several processes train one model with --parallel ddp or --parallel fsdp: choose one")
    if here and args.guess:
        raise BadInput("--guess asks one reader, and here are several processes: leave it out")
    if args.slow is not None and not here:
        raise BadInput(f"--slow {args.slow} names a rank: run it under torchrun with --parallel ddp")
    if args.slow is not None and args.slow >= here.world_size:
        raise BadInput(f"--slow {args.slow}: there is no such rank of {here.world_size}, 0 is the first")
    if args.bucket_mb is not None and args.parallel != "ddp":
        raise BadInput("--bucket-mb belongs to --parallel ddp: FSDP sends a block's gradients at a time")
    if args.fused + args.foreach + args.for_loop > 1:
        raise BadInput("--fused, --foreach and --for-loop are three ways to do one thing: choose one")
    if args.loader is None and (args.workers != 2 or args.no_pin or args.blocking):
        raise BadInput("--workers, --no-pin and --blocking say how batches are loaded: they need --loader")
    require_at_most(args, workers=256, loader=DAY_MS, timeout=DAY_MS // 1000, layers=10_000)
    if args.batch * args.accumulate > MOST_SEQUENCES:
        raise BadInput(f"--batch times --accumulate: a step has at most {MOST_SEQUENCES:,} sequences")
    if args.dtype == "fp16":
        raise BadInput("--dtype fp16: its gradients vanish without loss scaling, which this step has not: take bf16")
    return args


answer_before_torch(flags, __file__)

import contextlib
import itertools
import signal
import sys
import time
from dataclasses import replace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import record_function
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset

from common.harness import profiler, save, unprofiled_step_us, warm_up
from common.lesson import lesson
from common.memory import require_free

VOCABULARY = 32_000
LEARNING_RATE = 1e-3
MORE_PRODUCTS = 60
# The losses of this many steps are checked against plain training. A wrong gradient shows in the next loss.
CHECKED_STEPS = 5


class Block(nn.Module):
    def __init__(self, dim, **factory):
        super().__init__()
        self.heads = dim // 64 if dim % 64 == 0 else 1
        self.attention_norm, self.mlp_norm = nn.LayerNorm(dim, **factory), nn.LayerNorm(dim, **factory)
        self.qkv, self.out = nn.Linear(dim, 3 * dim, **factory), nn.Linear(dim, dim, **factory)
        self.up, self.down = nn.Linear(dim, 4 * dim, **factory), nn.Linear(4 * dim, dim, **factory)

    def forward(self, x):
        q, k, v = self.qkv(self.attention_norm(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))


class Decoder(nn.Module):
    """Its forward pass returns the loss: how badly each token is predicted from the tokens before it."""

    def __init__(self, layers, dim, seq, recompute, **factory):
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, dim, **factory), nn.Embedding(seq, dim, **factory)
        self.blocks = nn.ModuleList(Block(dim, **factory) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(dim, **factory), nn.Linear(dim, VOCABULARY, bias=False, **factory)
        self.recompute = recompute

    def forward(self, tokens):
        x = self.tokens(tokens[:, :-1]) + self.places.weight
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), tokens[:, 1:].flatten())


class Samples(Dataset):
    """One rank's sequences, the same ones in every step, so that the loss falls."""

    def __init__(self, args, rank, samples):
        self.rank, self.seed, self.seq, self.samples = rank, args.seed, args.seq, samples
        self.distinct, self.cost_s = args.batch * args.accumulate, (args.loader or 0) / 1000

    def __len__(self):
        return self.samples

    def __getitem__(self, number):
        done = time.perf_counter() + self.cost_s
        number %= self.distinct
        chosen = torch.Generator().manual_seed(hash((self.seed, self.rank, number)) % 2**63)
        tokens = torch.randint(VOCABULARY, (self.seq + 1,), generator=chosen)
        while time.perf_counter() < done:  # keep a core busy, as a tokenizer does
            pass
        return tokens


def build(args):
    # Each parameter has a gradient, and AdamW keeps two more numbers. FSDP spreads all this after the model is built.
    copies = 1 if args.parallel == "fsdp" else 4 if args.optimizer == "adamw" else 2
    require_free(args.device, copies * bytes_of_parameters(args))
    torch.manual_seed(args.seed)
    return (Decoder(args.layers, args.dim, args.seq, args.checkpoint, device=args.device, dtype=args.dtype),)


def batches(args, rank):
    """The same batches on the device in every step."""
    samples = Samples(replace(args, loader=None), rank, args.batch * args.accumulate)
    made = torch.stack([samples[number] for number in range(len(samples))]).to(args.device)
    return itertools.cycle(made.split(args.batch))


def loaded(args, rank):
    """The same batches, made by the loader while the run goes on."""
    loader = DataLoader(
        Samples(args, rank, calls_at_most(args) * args.accumulate * args.batch),
        batch_size=args.batch,
        num_workers=args.workers,
        worker_init_fn=leave_the_end_to_the_run,
        pin_memory=args.device.type == "cuda" and not args.no_pin,
    )
    return (batch.to(args.device, non_blocking=not args.blocking) for batch in loader)


def leave_the_end_to_the_run(worker):
    """Ignore Ctrl-C in a worker, and print nothing if the run ends while a batch is on its way."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    tell, gone = sys.excepthook, (ConnectionError, EOFError)
    sys.excepthook = lambda kind, *rest: None if issubclass(kind, gone) else tell(kind, *rest)


def optimizer_of(args, model):
    how = {name: True for name in ("fused", "foreach") if getattr(args, name)}
    if args.for_loop:
        how = {"fused": False, "foreach": False}
    make = torch.optim.AdamW if args.optimizer == "adamw" else torch.optim.SGD
    return make(model.parameters(), lr=LEARNING_RATE, **how)


def spread(args, model):
    """Return this rank's model, and the function that a step calls."""
    if args.parallel == "fsdp":
        mesh = init_device_mesh(args.device.type, (args.ranks.world_size,))
        for block in model.blocks:
            if args.compile:
                block.compile(mode=args.compile)
            fully_shard(block, mesh=mesh)
        return fully_shard(model, mesh=mesh), model
    if args.parallel == "ddp":
        model = DistributedDataParallel(model, bucket_cap_mb=args.bucket_mb)
    return model, torch.compile(model, mode=args.compile) if args.compile else model


def exchanging(args, model, last):
    """Return a context in which gradients stay on this rank, unless this is the step's last backward pass."""
    if args.parallel == "fsdp":
        model.set_requires_gradient_sync(last)
    return model.no_sync() if args.parallel == "ddp" and not last else contextlib.nullcontext()


def profiled(args, model):
    rank = args.ranks.rank if args.ranks else 0
    model, fn = spread(args, model)
    optimizer = optimizer_of(args, model)
    feed = batches(args, rank) if args.loader is None else loaded(args, rank)
    # A CUDA graph overwrites the loss of the previous step.
    keep = torch.clone if args.compile in GRAPH_MODES else lambda loss: loss
    losses = []
    if args.slow == rank:
        matrix = torch.randn(4 * args.dim, 4 * args.dim, device=args.device, dtype=args.dtype)

    def one_step():
        for number in range(1, args.accumulate + 1):
            tokens = next(feed)
            with exchanging(args, model, last=number == args.accumulate):
                with record_function("forward"):
                    if args.slow == rank:
                        for _ in range(MORE_PRODUCTS):
                            matrix @ matrix
                    loss = fn(tokens)
                with record_function("backward"):
                    (loss / args.accumulate if args.accumulate > 1 else loss).backward()
            if len(losses) < CHECKED_STEPS * args.accumulate:
                losses.append(keep(loss))
        with record_function("optimizer"):
            optimizer.step()
            optimizer.zero_grad()
        return loss

    steps = warm_up(one_step, args)
    steps.unprofiled_us = unprofiled_step_us(one_step, args)
    with profiler(args) as prof:
        for step in steps:
            step()
            prof.step()
    found = over_all_ranks(args, torch.stack(losses).detach())
    facts = {
        "parameters": sum(one.numel() for one in model.parameters()),
        "tokens": args.batch * args.seq * args.accumulate,  # per step of one rank
        "losses": [round(loss, 4) for loss in found.tolist()],
    }
    reference = None if rank or is_plain(args) else lambda: plain_losses(args, len(losses))
    return save(prof, args, steps, found, reference, {"training": facts}, against="plain training")


def is_plain(args):
    special = args.compile or args.checkpoint or args.loader is not None or args.parallel
    return not (special or args.fused or args.foreach or args.for_loop)


def over_all_ranks(args, losses):
    if args.ranks:
        dist.all_reduce(losses)
        losses /= args.ranks.world_size
    return losses


@torch.enable_grad()
def plain_losses(args, count):
    """Repeat the training in eager mode on one device, over the batches of all ranks, without recomputation."""
    args = replace(args, checkpoint=False, fused=False, foreach=False, for_loop=False)
    (model,) = build(args)
    optimizer = optimizer_of(args, model)
    feeds = [batches(args, rank) for rank in range(args.ranks.world_size if args.ranks else 1)]
    losses = []
    for done in range(1, count + 1):
        parts = []
        for feed in feeds:
            loss = model(next(feed))
            (loss / len(feeds) / args.accumulate).backward()
            parts.append(loss.detach())
        losses.append(torch.stack(parts).mean())
        if done % args.accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()
    return torch.stack(losses)


def predictions(args):
    here = place()
    loads = args.loader is not None and not args.workers
    waits = here and args.slow not in (None, here.rank)
    if loads:
        yield expect.starving()
    elif not waits:
        # FSDP launches more kernels than DDP, and this model is small, so the CPU falls behind.
        yield expect.regime_is("overhead-bound" if args.parallel == "fsdp" else "GPU-bound")
    yield expect.records_steps(args.wait + args.schedule_warmup, args.active)
    if args.checkpoint:
        yield expect.recomputation()
    if args.for_loop:
        yield expect.optimizer_for_loop()
    if not args.parallel and not args.checkpoint:
        yield expect.backward_is_twice_the_forward()
    if waits:
        yield expect.busy_while_waiting()
    elif args.parallel == "ddp" and args.slow is None:
        # DDP sends a bucket as soon as its gradients are there. A single bucket waits for all gradients.
        yield expect.communication_is_hidden(not one_bucket(args))


def one_bucket(args):
    return args.bucket_mb is not None and args.bucket_mb * 2**20 > bytes_of_parameters(args)


def bytes_of_parameters(args):
    tokens, places, block = VOCABULARY * args.dim, args.seq * args.dim, 12 * args.dim**2
    return (2 * tokens + places + args.layers * block) * args.dtype.itemsize


main = lesson(flags, build, profiled, predictions, processes)
if __name__ == "__main__":
    raise SystemExit(main())
