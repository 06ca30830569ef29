"""The decoder rung's flags and their valid combinations, which are checked before torch is imported."""

import importlib.util
import re
from dataclasses import replace

from common.flags import GRAPH_MODES, HOW, calls_at_most, flag, positive
from tracereader.command import BadInput


class ModelName(str):
    """A model's name or folder. Formatting it gives a form that a file's name can hold."""

    def __format__(self, spec: str) -> str:
        return re.sub(r"[^\w.-]+", "-", self).strip("-.") or "model"


FLAGS = (
    flag("--batch", "sequences per batch (1)", shape=True, type=positive, default=1),
    flag("--prompt", "tokens per prompt (512)", shape=True, type=positive, default=512),
    flag(
        "--phase",
        "decode: a step writes one token; prefill: a step reads the prompt (decode)",
        tag="{}",
        choices=("decode", "prefill"),
    ),
    flag(
        "--model",
        "a causal language model of the Hub, or a folder (a Qwen3 of --size with random weights)",
        tag="{}",
        type=ModelName,
        metavar="NAME",
    ),
    flag("--size", "which Qwen3's published sizes, with random weights (0.6b)", tag="{}", choices=("0.6b", "1.7b")),
    flag(
        "--layers",
        "use only the first N layers (all; on a CPU 4, unless --model names another model)",
        tag="layers{}",
        type=positive,
        on_cpu=4,
    ),
    flag(
        "--cache",
        "KV cache: static is allocated once, dynamic grows with the text (static)",
        tag="{}",
        choices=("static", "dynamic"),
    ),
    flag(
        "--cache-len",
        "tokens that fit into a static cache (1024)",
        tag="cache{}",
        type=positive,
        default=1024,
    ),
    flag(
        "--logits",
        "prefill computes the logits of all tokens, as transformers does, or of the last token (all)",
        tag="{}",
        choices=("all", "last"),
    ),
    flag(
        "--attention",
        "sdpa, eager and flex: transformers' implementations; gqa: SDPA with enable_gqa (sdpa)",
        group=HOW,
        tag="{}",
        choices=("sdpa", "eager", "gqa", "flex"),
    ),
    flag(
        "--merge",
        "compute q, k and v in one product, and gate and up in another",
        group=HOW,
        tag="merge",
        action="store_true",
    ),
    flag("--tune", "with --compile: time variants of each kernel", group=HOW, tag="tune", action="store_true"),
    flag(
        "--triton",
        "decode with hand-written kernels; MODE overlap: each starts before the previous one ends",
        group=HOW,
        tag="triton-{}",
        nargs="?",
        const="kernels",
        choices=("kernels", "overlap"),
        metavar="MODE",
    ),
    flag(
        "--persistent",
        "decode with one persistent kernel (a megakernel); MODE inside: the trace shows its phases",
        group=HOW,
        tag="persistent-{}",
        nargs="?",
        const="kernel",
        choices=("kernel", "inside"),
        metavar="MODE",
    ),
    flag("--graph", "record the step into one CUDA graph, and replay it", group=HOW, tag="graph", action="store_true"),
)


def tokens_written(args) -> int:
    """Return how many tokens a run writes: one in prefill, one per decode step, one before a graph is recorded."""
    return 1 + (calls_at_most(args) + 1 if args.phase == "decode" else 0)


def settled(args):
    """Return the flags with what follows from them. Raises BadInput for an impossible combination."""
    if importlib.util.find_spec("transformers") is None:
        raise BadInput("rung 5 needs transformers: uv run installs it; elsewhere, pip install transformers")
    tokens = args.prompt + (tokens_written(args) if args.phase == "decode" else 0)
    decodes = args.phase == "decode" and args.cache == "static" and args.dtype == "bf16"
    for wrong, why in (
        (args.model and args.size != "0.6b", "--size is of a model with random weights: leave out --size or --model"),
        (args.tune and not args.compile, "--tune is for Inductor's kernels: add --compile"),
        (args.triton and args.compile, "--triton replaces what --compile would compile: choose one"),
        (
            args.graph and args.compile in GRAPH_MODES,
            f"--compile {args.compile} records a graph of its own: leave out --graph, or --compile in another mode",
        ),
        (args.graph and args.phase == "decode" and args.cache != "static", "--graph decodes with a static cache"),
        (args.triton and (args.merge or args.attention != "sdpa"), "--triton has its own products and attention"),
        (
            args.triton and (args.batch > 1 or not decodes),
            "--triton decodes one sequence in bf16 with a static cache, and nothing else",
        ),
        (
            args.persistent and (args.compile or args.triton or args.graph or args.merge or args.attention != "sdpa"),
            "--persistent computes the step in one kernel of its own: leave out other ways to run it",
        ),
        (
            args.persistent and (args.batch > 4 or not decodes),
            "--persistent decodes up to 4 sequences in bf16 with a static cache, and nothing else",
        ),
        (args.logits == "last" and args.phase == "decode", "--logits last is for --phase prefill"),
        (
            args.cache == "static" and tokens > args.cache_len,
            f"--prompt {args.prompt}: {tokens} tokens (the prompt, and one for each step) do not fit into "
            f"--cache-len {args.cache_len}: raise --cache-len",
        ),
    ):
        if wrong:
            raise BadInput(why)
    needs_gpu = None
    if args.graph or args.triton or args.persistent:
        needs_gpu = "--graph, --triton and --persistent need a GPU, and this run is on the CPU"
    elif args.attention == "flex" and args.compile:
        needs_gpu = "--attention flex --compile needs a GPU: on a CPU Inductor finds no kernel for one query"
    if needs_gpu and args.device == "cpu":
        raise BadInput(needs_gpu)
    if args.model:
        args = replace(args, on_cpu={})  # a model that the user names is not made smaller
    return replace(args, needs_gpu=needs_gpu)  # checked later if no device was named
