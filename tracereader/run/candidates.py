"""The changes that try-changes makes without an edit of the program: one row each.

The patches themselves are in inside/changes.py, under the same keys. A change of read-trace names the keys that try it
in its declaration (tracereader/changes).
"""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache

import msgspec

Place = dict[str, object]  # an object or a call of the program, with its "line" and what is known of it
HALF = ("float16", "bfloat16")
# Page faults of a step from which on glibc may return memory to the system that the next step needs again.
MANY_FAULTS = 200
GLIBC_KEEPS = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "17179869184"}


class Seen(msgspec.Struct, frozen=True):
    """What one run showed of the program: the objects that it made and the settings that it uses.

    Each object has its `line`, the line of the program that made or called it, and `through`, the line of a package
    that did it for the program. unused: the outermost modules with gradients that no optimizer uses. world_size: the
    number of processes that train together. workers: how many workers of a DataLoader are tried. backward: whether
    there was a backward pass, as also where parameters are changed by hand. page_faults: of each step.
    """

    modules: tuple[Place, ...] = ()
    optimizers: tuple[Place, ...] = ()
    loaders: tuple[Place, ...] = ()
    ddp: tuple[Place, ...] = ()
    checkpoints: tuple[Place, ...] = ()
    copies: tuple[Place, ...] = ()
    attention: tuple[Place, ...] = ()
    zero_grad: tuple[Place, ...] = ()
    compiled: tuple[Place, ...] = ()
    unused: tuple[Place, ...] = ()
    anomaly: tuple[Place, ...] = ()
    torch: str = ""
    device: str = "cpu"
    gpu: str = ""
    capability: tuple[int, ...] = ()
    hip: bool = False
    threads: int = 1
    tf32: bool = False
    cudnn_benchmark: bool = False
    world_size: int = 1
    workers: int = 0
    backward: bool = False
    page_faults: float = 0.0

    @property
    def on_gpu(self) -> bool:
        return self.device == "cuda"

    @property
    def trains(self) -> bool:
        return bool(self.optimizers) or self.backward

    @property
    def is_half(self) -> bool:
        """Return whether the parameters are in bf16 or fp16."""
        return any(one.get("dtype") in HALF for one in self.modules)

    @property
    def convolves(self) -> bool:
        return any(one.get("convolutions") for one in self.modules)

    @property
    def is_compiled(self) -> bool:
        """Return whether the program compiles its modules itself."""
        return bool(self.compiled) or any(one.get("compiled") for one in self.modules)

    @property
    def torch_version(self) -> tuple[int, int]:
        major, minor, *_ = (*self.torch.split("."), "0", "0")
        return (int(major), int(minor)) if major.isdigit() and minor.isdigit() else (0, 0)


# What makes a change where transformers' Trainer makes the objects, by the change's key.
TRAINERS = {
    "workers": "dataloader_num_workers={workers}, dataloader_persistent_workers=True",
    "persistent_workers": "dataloader_persistent_workers=True",
    "pin_memory": "dataloader_pin_memory=True",
    "no_checkpoint": "gradient_checkpointing=False",
    "tf32": "tf32=True",
    "bf16": "bf16=True",
    "fused_optimizer": 'optim="adamw_torch_fused"',
    "compile": "torch_compile=True",
    "compile_reduce_overhead": 'torch_compile=True, torch_compile_mode="reduce-overhead"',
    "compile_max_autotune": 'torch_compile=True, torch_compile_mode="max-autotune"',
    "ddp_bucket": "ddp_bucket_cap_mb=100",
    "ddp_static_graph": "ddp_static_graph=True",
    "ddp_no_buffers": "ddp_broadcast_buffers=False",
}


class Candidate(msgspec.Struct, frozen=True):
    """One change that can be tried.

    applies: whether there is anything to change. keep: how the program's author keeps it; None if there is no line to
    name. group: of changes of one group, only one can be made at a time.
    environment: variables that make the change; nothing is patched then. compiles: whether a run with it compiles.
    other_numbers: why equal seeds may give other random numbers with it; empty if they may not. usual: whether it
    hardly ever costs anything, so that it is tried beside others though it saves little alone. often: whether it mostly
    saves where it applies, and keeps the results. beside: the group of the changes beside which alone it does anything,
    unless the program makes one of them itself.
    """

    key: str
    title: str
    applies: Callable[[Seen], bool]
    keep: Callable[[Seen], str]
    group: str = ""
    environment: tuple[tuple[str, str], ...] = ()
    compiles: bool = False
    other_numbers: str = ""
    usual: bool = False
    often: bool = False
    beside: str = ""

    @property
    def is_safe(self) -> bool:
        """Return whether it is likely to save time and to keep the results: it may be tried beside others at once."""
        return self.usual or self.often

    @property
    def follows(self) -> tuple[str, ...]:
        """Return the ids of read-trace's changes that this one tries."""
        return tuple(change for change, keys in following().items() if self.key in keys)

    def to_keep(self, seen: Seen) -> str:
        """Return how the program's author keeps the change, and where: in the Trainer's arguments if there is one."""
        argument = TRAINERS.get(self.key)
        trains = [one for one in seen.modules if str(one.get("through", "")).startswith("transformers/trainer.py")]
        if argument and trains:
            line = trains[0]["line"]
            return f"TrainingArguments(…, {argument.format(workers=seen.workers)}) of the Trainer that runs at {line}"
        return self.keep(seen)

    @property
    def is_patch(self) -> bool:
        return not self.environment


def at(places: Iterable[Place]) -> str:
    """Return the lines of objects as text: "train.py:31", or "train.py:31 and gan.py:7"; empty without any."""
    found = []
    for one in places:
        through = f" (made by {one['through']})" if one.get("through") else ""
        if one.get("line") and (text := f"{one['line']}{through}") not in found:
            found.append(text)
    return " and ".join(found[:3]) + (" and elsewhere" if len(found) > 3 else "")


def _offering(seen: Seen, name: str) -> list[Place]:
    """Return the optimizers that could be made with this argument and are not."""
    return [one for one in seen.optimizers if name in one.get("offers", ()) and not one.get(name)]


def _fused_applies(seen: Seen) -> bool:
    # torch 2.4 brought the fused optimizers to the CPU.
    return any(one.get("device") != "cpu" or seen.torch_version >= (2, 4) for one in _offering(seen, "fused"))


def _foreach_applies(seen: Seen) -> bool:
    # On a GPU, torch uses it unless it is told otherwise.
    return any(
        one.get("parameters", 0) > 1
        and not one.get("fused")
        and (one.get("device") == "cpu" or one["foreach"] is False)
        for one in _offering(seen, "foreach")
    )


def _optimizer(name: str) -> Callable[[Seen], str]:
    def keep(seen: Seen) -> str:
        made = _offering(seen, name)
        kinds = dict.fromkeys(str(one["name"]) for one in made)
        return f"{' and '.join(f'{kind}(…, {name}=True)' for kind in kinds)} at {at(made)}"

    return keep


def _compile(mode: str | None) -> Callable[[Seen], str]:
    argument = f'mode="{mode}"' if mode else ""

    def keep(seen: Seen) -> str:
        if seen.compiled and mode:
            return f"torch.compile(…, {argument}) at {at(seen.compiled)}"
        return f"model.compile({argument}) {_before_its_call(seen)}"

    return keep


def _compiled(key: str, title: str, mode: str | None = None) -> Candidate:
    def applies(seen: Seen) -> bool:
        if mode is None:
            return bool(seen.modules) and not seen.is_compiled
        return seen.on_gpu and bool(seen.modules) and not any(one.get("mode") for one in seen.compiled)

    return Candidate(
        key,
        title,
        applies,
        _compile(mode),
        group="compile",
        compiles=True,
        other_numbers="compiled code may draw other random numbers, and rounds otherwise",
        often=mode != "max-autotune",
    )


def _called(seen: Seen) -> Sequence[Place]:
    """Return the outermost modules with the most parameters of the program: a loss with a weight is not the model."""
    most = max((one.get("parameters", 0) for one in seen.modules), default=0)
    return [one for one in seen.modules if one.get("parameters", 0) * 100 >= most]


def _before_its_call(seen: Seen) -> str:
    """Return where the model is called, with its class, as text; for each model if there are several."""
    names = list(dict.fromkeys(str(one["name"]) for one in _called(seen)))
    which = f"the model is {_with_article(names[0])}" if len(names) == 1 else "for each model"
    return f"before its call at {at(_called(seen))} ({which})"


def _generating(seen: Seen) -> list[Place]:
    """Return the modules that transformers' generate() calls."""
    return [one for one in seen.modules if str(one.get("through", "")).startswith("transformers/generation/")]


def _classes(places: Sequence[Place]) -> str:
    return " and the ".join(dict.fromkeys(str(one["name"]) for one in places))


def _with_article(name: str) -> str:
    return f"{'an' if name[:1] in 'AEIOUaeiou' else 'a'} {name}"


def _without_checkpoints(seen: Seen) -> str:
    if any(str(one.get("through", "")).startswith("transformers/") for one in seen.checkpoints):
        return f"leave out gradient_checkpointing_enable() of the model that is called at {at(_called(seen))}"
    return f"call the function itself instead of checkpoint(…) at {at(seen.checkpoints)}"


def _is_float32(seen: Seen) -> bool:
    return any(one.get("dtype") == "float32" and not one.get("autocast") for one in seen.modules)


def _half_attention(seen: Seen) -> bool:
    return seen.on_gpu and any(one.get("dtype") in HALF and one.get("device") == "cuda" for one in seen.attention)


def _attention(name: str, needs: Callable[[Seen], bool]) -> Candidate:
    function = {"flash": "FLASH_ATTENTION", "mem_efficient": "EFFICIENT_ATTENTION", "cudnn": "CUDNN_ATTENTION"}[name]
    shown = {"flash": "flash attention", "mem_efficient": "efficient attention", "cudnn": "cuDNN's attention"}
    return Candidate(
        f"attention_{name}",
        shown[name],
        needs,
        lambda seen: (
            f"with torch.nn.attention.sdpa_kernel(SDPBackend.{function}) around the call at {at(seen.attention)}"
        ),
        group="attention",
    )


def _ddp(key: str, title: str, argument: str, applies: Callable[[Place], bool]):
    return Candidate(
        key,
        title,
        lambda seen: any(applies(one) for one in seen.ddp),
        lambda seen: f"DistributedDataParallel(…, {argument}) at {at(seen.ddp)}",
    )


def cpus() -> int:
    """Return the number of CPUs that this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:
        return os.cpu_count() or 1


def _threads(key: str, number: int) -> Candidate:
    return Candidate(
        key,
        f"{number} CPU thread{'s' if number > 1 else ''}",
        lambda seen: not seen.on_gpu and number != seen.threads and number >= 1,
        lambda seen: f"OMP_NUM_THREADS={number} in the environment, or torch.set_num_threads({number})",
        group="threads",
        environment=(("OMP_NUM_THREADS", str(number)), ("MKL_NUM_THREADS", str(number))),
    )


def all_candidates(world_size: int = 1) -> tuple[Candidate, ...]:
    """Return every change that can be tried, those that usually save most first.

    world_size: the number of processes that share this machine's CPUs.
    """
    own = max(1, cpus() // max(1, world_size))
    threads = [("threads_1", 1), ("threads_half", own // 2), ("threads_all", own)]
    threads = [one for one in threads if one[1] >= 1 and (one[0] == "threads_1" or one[1] > 1)]
    return (
        Candidate(
            "workers",
            "DataLoader workers",
            lambda seen: any(one.get("workers", 0) < seen.workers for one in seen.loaders),
            lambda seen: (
                f"DataLoader(…, num_workers={seen.workers}, persistent_workers=True) at {at(seen.loaders)}"
                + (
                    "; each worker reads all of an iterable dataset unless it takes its share (get_worker_info)"
                    if any(one.get("iterable") for one in seen.loaders)
                    else ""
                )
            ),
            other_numbers="the workers draw their own random numbers",
            often=True,
        ),
        Candidate(
            "no_checkpoint",
            "no checkpointing",
            lambda seen: bool(seen.checkpoints),
            _without_checkpoints,
            often=True,
        ),
        Candidate(
            "no_anomaly_detection",
            "no anomaly detection",
            lambda seen: bool(seen.anomaly),
            lambda seen: f"leave out the anomaly detection that is set at {at(seen.anomaly)}",
            often=True,
        ),
        Candidate(
            "frozen_parameters",
            "frozen parameters",
            lambda seen: bool(seen.unused) and not seen.ddp,
            lambda seen: (
                f"requires_grad_(False) for what no optimizer updates in the {_classes(seen.unused)} that is called at "
                f"{at(seen.unused)}"
            ),
            often=True,
        ),
        Candidate(
            "tf32",
            "TF32",
            lambda seen: (
                seen.on_gpu and not seen.hip and seen.capability >= (8, 0) and not seen.tf32 and _is_float32(seen)
            ),
            lambda seen: 'torch.set_float32_matmul_precision("high")',
            usual=True,
        ),
        Candidate(
            "fused_optimizer",
            "fused optimizer",
            _fused_applies,
            _optimizer("fused"),
            group="optimizer",
            usual=True,
        ),
        Candidate(
            "static_cache",
            "static KV cache, compiled",
            # transformers compiles such a generation by itself, but not on a CPU.
            lambda seen: seen.on_gpu and bool(_generating(seen)) and not seen.is_compiled,
            lambda seen: f'cache_implementation="static" in the call of generate() at {at(_generating(seen))}',
            group="compile",
            compiles=True,
            often=True,
        ),
        _compiled("compile_reduce_overhead", "compile reduce-overhead", "reduce-overhead"),
        Candidate(
            "foreach_optimizer",
            "foreach optimizer",
            _foreach_applies,
            _optimizer("foreach"),
            group="optimizer",
        ),
        _compiled("compile", "torch.compile"),
        Candidate(
            "skip_guards",
            "skipped guards",
            lambda seen: seen.torch_version >= (2, 6),
            lambda seen: (
                "torch.compiler.set_stance(skip_guard_eval_unsafe=True) after the first steps, if all later inputs are "
                "like theirs"
            ),
            beside="compile",
        ),
        Candidate(
            "cudnn_benchmark",
            "cudnn.benchmark",
            lambda seen: seen.on_gpu and seen.convolves and not seen.cudnn_benchmark,
            lambda seen: "torch.backends.cudnn.benchmark = True",
            usual=True,
        ),
        Candidate(
            "channels_last",
            "channels_last",
            lambda seen: any(one.get("convolutions") and one.get("four_dimensions") for one in seen.modules),
            lambda seen: (
                "model.to(memory_format=torch.channels_last), and the same for its images, " + _before_its_call(seen)
            ),
        ),
        Candidate(
            "bf16",
            "bf16 autocast",
            _is_float32,
            lambda seen: (
                f'with torch.autocast("{seen.device}", dtype=torch.bfloat16) around the call at {at(_called(seen))}'
            ),
        ),
        Candidate(
            "pin_memory",
            "pinned memory",
            lambda seen: seen.on_gpu and any(not one.get("pin_memory") for one in seen.loaders),
            lambda seen: (
                f"DataLoader(…, pin_memory=True) at {at(seen.loaders)}, and non_blocking=True "
                f"in the copies at {at(seen.copies)}"
            ),
        ),
        Candidate(
            "non_blocking",
            "non_blocking copies",
            lambda seen: seen.on_gpu and bool(seen.copies) and any(one.get("pin_memory") for one in seen.loaders),
            lambda seen: f"non_blocking=True in the copies at {at(seen.copies)}",
        ),
        Candidate(
            "persistent_workers",
            "persistent workers",
            lambda seen: any(one.get("workers") and not one.get("persistent") for one in seen.loaders),
            lambda seen: f"DataLoader(…, persistent_workers=True) at {at(seen.loaders)}",
            other_numbers="the workers draw their own random numbers",
        ),
        Candidate(
            "inference_mode",
            "inference_mode",
            lambda seen: not seen.trains and any(not one.get("inference") for one in seen.modules),
            lambda seen: f"with torch.inference_mode() around the call at {at(_called(seen))}",
        ),
        Candidate(
            "set_to_none",
            "gradients set to None",
            lambda seen: bool(seen.zero_grad),
            lambda seen: f"zero_grad() without set_to_none=False at {at(seen.zero_grad)}",
        ),
        _attention("flash", _half_attention),
        _attention("cudnn", lambda seen: _half_attention(seen) and seen.torch_version >= (2, 5)),
        _attention("mem_efficient", lambda seen: seen.on_gpu and bool(seen.attention)),
        _ddp(
            "ddp_static_graph",
            "DDP static graph",
            "static_graph=True",
            lambda one: not one.get("static_graph"),
        ),
        _ddp(
            "ddp_bucket_view",
            "DDP bucket view",
            "gradient_as_bucket_view=True",
            lambda one: not one.get("gradient_as_bucket_view"),
        ),
        _ddp(
            "ddp_bucket",
            "DDP buckets of 100 MB",
            "bucket_cap_mb=100",
            lambda one: one.get("bucket_cap_mb") != 100,
        ),
        _ddp(
            "ddp_no_buffers",
            "DDP own buffers",
            "broadcast_buffers=False",
            lambda one: bool(one.get("broadcast_buffers")) and bool(one.get("buffers")),
        ),
        *(_threads(key, number) for key, number in threads),
        Candidate(
            "keep_memory",
            "freed memory kept",
            lambda seen: (
                not seen.on_gpu and seen.page_faults > MANY_FAULTS and not GLIBC_KEEPS.keys() & os.environ.keys()
            ),
            lambda seen: " ".join(map("=".join, GLIBC_KEEPS.items())) + " in the environment before Python starts",
            environment=tuple(GLIBC_KEEPS.items()),
        ),
        Candidate(
            "gc_freeze",
            "gc.freeze()",
            lambda seen: True,
            lambda seen: "gc.collect(); gc.freeze() after the first steps",
        ),
        Candidate(
            "expandable_segments",
            "expandable segments",
            lambda seen: seen.on_gpu,
            lambda seen: "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True in the environment",
            environment=(("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True"),),
        ),
        _compiled("compile_max_autotune", "compile max-autotune", "max-autotune"),
    )


@cache
def following() -> dict[str, tuple[str, ...]]:
    """Return the keys that try each change of read-trace, by the change's id; without those that nothing tries."""
    from tracereader.changes import catalogue, ranks  # slow to import, and not needed for --help

    return {one.name: one.keys for one in (*catalogue.CHANGES, *ranks.RANK_CHANGES) if one.keys}


FIRST = 0.1  # predicted savings of this share of the step decide the order


def in_order(candidates: Iterable[Candidate], predicted: Mapping[str, float]) -> list[Candidate]:
    """Return the candidates in the order in which they are tried: what a recording predicts to save much comes first.

    The others follow, those that usually save most first. Of several that compile, all but the first come last, in that
    order: they take long, and only one of them can be made.

    predicted: the share of the step that each of read-trace's changes is predicted to save, by its id.
    """
    candidates = list(candidates)
    gain = {one.key: max((predicted.get(each, 0.0) for each in one.follows), default=0.0) for one in candidates}
    ordered = sorted(candidates, key=lambda one: -gain[one.key] if gain[one.key] >= FIRST else 0.0)
    late = [one for one in ordered if one.compiles][1:]
    return [one for one in ordered if one not in late] + [one for one in candidates if one in late]
