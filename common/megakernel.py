"""One token of up to four sequences through Qwen3 as one persistent kernel: it is compiled and launched here.

megakernel.cu is the kernel, and says how it works. Here the weights are laid out once in the order in which it reads
them, and the buffers are made in which its blocks hand data to each other.
"""

import ctypes
import functools
import itertools
import struct
from pathlib import Path

import torch

from common import kernel_lanes
from tracereader.command import BadInput

SOURCE = Path(__file__).with_name("megakernel.cu")
HEADERS = [SOURCE.with_name(name) for name in ("megakernel_plan.cuh", "megakernel_ptx.cuh")]
CHUNK, HEAD_DIM, THREADS = 16384, 128, 288
BATCH = 4  # at most
STAGES, FEWEST_STAGES = 10, 4  # slots of the ring
UNIT = 64  # columns between gate_up and down, the least that a cluster of blocks computes
AHEAD = 64  # tokens of the cache that a block copies into shared memory before it needs them
PHASES = ("qkv", "attend", "o", "gate_up", "down")
SHOWN_EVERY = 33  # of the blocks, so that a trace stays small
ATTENTION_COUNTS = 0.5  # how much a cluster's chunks of attention count: in its other phases, all clusters compute
WINDOW = 3  # chunks on their way at a time: with more, other reads wait longer behind them


def unfit(config, batch: int) -> str | None:
    """Why the kernel cannot compute a model of these sizes; None where it can."""
    sizes = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    for wrong, why in (
        (batch > BATCH, f"decodes at most {BATCH} sequences"),
        (config.head_dim != HEAD_DIM, "needs heads of 128 columns"),
        (sizes[0] != 2 * sizes[1], "needs two query heads to a key-value head"),
        (config.hidden_size % 512, "needs a hidden size that 512 divides"),
        (config.intermediate_size % UNIT, "needs an intermediate size that 64 divides"),
        (config.vocab_size % 16, "needs a vocabulary size that 16 divides"),
    ):  # fmt: skip
        if wrong:
            return why
    return None


def cluster_size(config) -> int:
    """Blocks of a cluster: each has a multiple of 128 rows of the output and down projections."""
    return 4 if config.hidden_size % 1024 else 8


def shares(config, clusters: int) -> list[int]:
    """How many units of the MLP each cluster computes, one at least: fewer where it has a head of attention, too."""
    size, wide = cluster_size(config), config.hidden_size // 512  # wide, tall: chunks of a tile, and of a unit in down
    tall = config.hidden_size // size // 128
    of_head, of_unit = 4 * HEAD_DIM // 16 // size * wide + tall * 2 * HEAD_DIM // UNIT, UNIT // 8 // size * wide + tall
    heads = config.num_key_value_heads
    units, chunks = [1] * clusters, [of_head * ATTENTION_COUNTS] * heads + [0] * (clusters - heads)
    for _ in range(config.intermediate_size // UNIT - clusters):
        least = min(range(clusters), key=lambda number: chunks[number] + units[number] * of_unit)
        units[least] += 1
    return units


def packed(weight: torch.Tensor) -> torch.Tensor:
    """A matrix [rows, columns] in the kernel's order, flat: tile after tile of 16 rows.

    A tile is chunks of 512 columns, and a chunk is 32 operands of mma.m16n8k16 of 16 columns each. Of an operand each
    of 32 lanes (group, four) holds 8 numbers: rows group and group + 8 of the columns 4 * four to 4 * four + 3.
    """
    rows, columns = weight.shape
    parts = weight.reshape(rows // 16, 2, 8, columns // 512, 32, 4, 2, 2)
    return parts.permute(0, 3, 4, 2, 5, 6, 1, 7).flatten()


def packed_by_warp(weight: torch.Tensor) -> torch.Tensor:
    """A matrix of which each warp multiplies 16 whole rows: a chunk is 128 rows of 64 columns, 4 operands a warp."""
    rows, columns = weight.shape
    parts = weight.reshape(rows // 128, 8, 2, 8, columns // 64, 4, 4, 2, 2)
    return parts.permute(0, 4, 1, 5, 3, 6, 7, 2, 8).flatten()


def layer_weights(layer, size: int, units: list[int]) -> list[torch.Tensor]:
    """One layer's matrices for each cluster, the norms' weights multiplied in: [blocks, numbers] in order of use."""
    attention, mlp = layer.self_attn, layer.mlp
    query, key, value = (
        one.weight * layer.input_layernorm.weight for one in (attention.q_proj, attention.k_proj, attention.v_proj)
    )
    norm = layer.post_attention_layernorm.weight
    gate_up = torch.stack([mlp.gate_proj.weight * norm, mlp.up_proj.weight * norm], dim=1)
    clusters, first = [], 0
    for number, count in enumerate(units):
        parts = []
        if number < key.shape[0] // HEAD_DIM:
            one, two = (slice(number * n * HEAD_DIM, (number + 1) * n * HEAD_DIM) for n in (1, 2))
            parts += [
                packed(torch.cat([query[two], key[one], value[one]])),
                packed_by_warp(attention.o_proj.weight[:, two]),
            ]
        mine = slice(first, first + count * UNIT)
        parts += [packed(gate_up[mine].flatten(0, 1)), packed_by_warp(mlp.down_proj.weight[:, mine])]
        clusters.append(torch.cat([part.reshape(size, -1) for part in parts], dim=1))
        first = mine.stop
    return clusters


def shared_bytes(stages: int, batch: int, config, most: int) -> int:
    """Shared memory of a block: the ring, and behind it the kernel's struct Shared. most: units of a cluster."""
    warps, tiles = 8, 8 if batch == 1 else 4
    parts = (
        4 * 2 * warps * (tiles * 16 * batch + 8 + batch),  # results of the warps
        2 * 4 * HEAD_DIM, 4 * (warps * (2 * HEAD_DIM + 4) + 2),  # attention
        2 * batch * (config.hidden_size + 16),
        2 * 2 * (AHEAD + 1) * HEAD_DIM, 4 * 2 * HEAD_DIM, 4 * batch * 2 * HEAD_DIM,  # cache, norms; rope; newest
        4 * cluster_size(config) * (HEAD_DIM + 8), 2 * batch * (most * UNIT + 16),  # parts, act
        8 * (2 * stages + 4),  # barriers
    )  # fmt: skip
    return stages * CHUNK + sum(-(-part // 16) * 16 for part in parts)


def most_stages(room: int, batch: int, config, most: int) -> int:
    return next((n for n in range(STAGES, 0, -1) if shared_bytes(n, batch, config, most) <= room), 0)


def _done(result):
    """What a call of cuda.bindings returned besides its status. Raises RuntimeError."""
    status, *values = result
    if int(status):
        raise RuntimeError(f"megakernel.cu: {status.name}")
    return values[0] if values else None


def compiled(architecture: str, defines: dict, source: bytes | None = None) -> bytes:
    """The machine code of the kernel, or of `source`, compiled by torch's NVRTC. Raises BadInput without it."""
    try:
        from cuda.bindings import nvrtc

        texts, names = [one.read_bytes() for one in HEADERS], [one.name.encode() for one in HEADERS]
        source = source or SOURCE.read_bytes()
        program = _done(nvrtc.nvrtcCreateProgram(source, SOURCE.name.encode(), len(texts), texts, names))
    except (ImportError, RuntimeError) as problem:
        said = str(problem).splitlines()[0]
        raise BadInput(f"--persistent compiles its kernel with NVRTC, and cuda.bindings finds none ({said})") from None
    options = [
        f"--gpu-architecture={architecture}",
        "--use_fast_math",
        *(f"-D{name}={value}" for name, value in defines.items()),
    ]
    status = nvrtc.nvrtcCompileProgram(program, len(options), [one.encode() for one in options])
    if int(status[0]):
        log = b" " * _done(nvrtc.nvrtcGetProgramLogSize(program))
        nvrtc.nvrtcGetProgramLog(program, log)
        raise RuntimeError(log.decode())
    code = b" " * _done(nvrtc.nvrtcGetCUBINSize(program))
    _done(nvrtc.nvrtcGetCUBIN(program, code))
    return code


def prepared(model, cache, text, position, clusters: int):
    """What the kernel is given: its arguments as bytes, all tensors that they point to, and its sizes as defines."""
    config, batch, device = model.config, text.shape[0], text.device
    layers, kept, hidden = model.model.layers, cache.layers, config.hidden_size
    size, units = cluster_size(config), shares(config, clusters)
    of_layers = zip(*(layer_weights(layer, size, units) for layer in layers), strict=True)
    weights = [torch.stack(of_cluster, dim=1).flatten() for of_cluster in of_layers]
    weights.append(packed(model.lm_head.weight * model.model.norm.weight))
    head_norms = [one.weight for layer in layers for one in (layer.self_attn.q_norm, layer.self_attn.k_norm)]
    everywhere = torch.arange(kept[0].max_cache_len, device=device)[None]
    angles = model.model.rotary_emb(torch.empty(0, device=device, dtype=model.dtype), everywhere)

    def words(*shape):
        return torch.zeros(shape, device=device, dtype=torch.int64)

    tensors = {
        "weights": torch.cat(weights), "head_norms": torch.stack(head_norms),
        "rope": torch.stack([one[0] for one in angles], dim=1).contiguous(),
        "embedding": model.model.embed_tokens.weight, "text": text, "position": position,
        "logits": torch.empty(batch, config.vocab_size, device=device, dtype=model.dtype),
        "stream": words(2, 2 * len(layers), batch, hidden),
        "state": words(2 + batch), "stamps": words(clusters * size, 10 * len(layers) + 3),
        "units": torch.tensor([0, *itertools.accumulate(units)], device=device, dtype=torch.int32),
    }  # fmt: skip
    caches = [pointer for one in kept for pointer in (one.keys.data_ptr(), one.values.data_ptr())]
    numbers = (text.stride(0), kept[0].max_cache_len, config.rms_norm_eps, layers[0].self_attn.scaling)
    pointers = [tensor.data_ptr() for tensor in tensors.values()]
    arguments = struct.pack(f"{len(pointers)}Q2i2f{len(caches)}Q", *pointers, *numbers, *caches)  # struct Arguments
    sizes = {
        "HIDDEN": hidden, "INTER": config.intermediate_size, "HEADS": config.num_attention_heads,
        "KV_HEADS": config.num_key_value_heads, "LAYERS": len(layers), "VOCAB": config.vocab_size, "BATCH": batch,
        "CLUSTER": size, "MOST": max(units),
    }  # fmt: skip
    return arguments, tensors, sizes


def loaded(code: bytes, name: bytes, shared: int):
    """The module and its kernel of that name, which may have so much shared memory."""
    from cuda.bindings import driver

    module = _done(driver.cuModuleLoadData(code))
    kernel = _done(driver.cuModuleGetFunction(module, name))
    limit = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    _done(driver.cuFuncSetAttribute(kernel, limit, shared))
    return module, kernel


def launch_of(blocks: int, cluster: int, shared: int):
    """The configuration of a launch of all blocks at the same time, in clusters."""
    from cuda.bindings import driver

    together, clustered = driver.CUlaunchAttribute(), driver.CUlaunchAttribute()
    together.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_COOPERATIVE
    together.value.cooperative = 1
    clustered.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
    clustered.value.clusterDim.x, clustered.value.clusterDim.y, clustered.value.clusterDim.z = cluster, 1, 1
    launch = driver.CUlaunchConfig()
    launch.gridDimX, launch.gridDimY, launch.gridDimZ = blocks, 1, 1
    launch.blockDimX, launch.blockDimY, launch.blockDimZ = THREADS, 1, 1
    launch.sharedMemBytes, launch.attrs, launch.numAttrs = shared, [together, clustered], 2
    return launch


def resident_clusters(architecture: str, size: int, shared: int) -> int:
    """How many clusters of so many blocks the GPU runs at the same time. A cluster is within a group of its SMs."""
    from cuda.bindings import driver

    code = compiled(architecture, {}, b'extern "C" __global__ void empty() {}')
    module, kernel = loaded(code, b"empty", shared)
    count = _done(driver.cuOccupancyMaxActiveClusters(kernel, launch_of(size, size, shared)))
    _done(driver.cuModuleUnload(module))
    return count


def decoding(model, cache, text, position, inside: bool = False, stages: int | None = None, **defines):
    """The step that decodes one token of each sequence: () -> logits, [batch, vocabulary].

    text: [batch, room] token ids; those at position are the input, and the chosen ones are written behind them;
    cache: static, filled to position. Both are advanced in place. inside: the kernel notes when its phases begin; then
    step.lanes() is what adds them to a trace. Raises BadInput.
    """
    config, batch, device = model.config, text.shape[0], text.device
    properties = torch.cuda.get_device_properties(device)
    for wrong, why in (
        (unfit(config, batch), unfit(config, batch)),
        (properties.major < 9 or torch.version.hip, f"needs compute capability 9.0 or newer: not {properties.name}"),
    ):
        if wrong:
            raise BadInput(f"--persistent {why}")
    architecture, room = f"sm_{properties.major}{properties.minor}", properties.shared_memory_per_block_optin
    size = cluster_size(config)
    # Each block has a part of every phase: a unit of its cluster's, and a tile of the head.
    most_clusters = min(config.intermediate_size // UNIT, config.vocab_size // 16 // size)
    clusters = min(resident_clusters(architecture, size, room), most_clusters)
    if clusters < config.num_key_value_heads:
        raise BadInput(f"--persistent needs more multiprocessors than {properties.name} has")
    most = max(shares(config, clusters))
    stages = stages or most_stages(room, batch, config, most)
    if stages < FEWEST_STAGES:
        raise BadInput(f"--persistent needs more shared memory than {properties.name} has")
    shared, blocks = shared_bytes(stages, batch, config, most), clusters * size
    arguments, tensors, sizes = prepared(model, cache, text, position, clusters)
    sizes |= {"STAGES": stages, "WINDOW": WINDOW, "SHARED": shared}
    sizes |= {"STAMPS": 1} if inside else {}
    module, kernel = loaded(compiled(architecture, sizes | defines), b"decode_step", shared)
    passed = ctypes.create_string_buffer(arguments, len(arguments))
    pointers = (ctypes.c_void_p * 1)(ctypes.addressof(passed))
    launch = launch_of(blocks, size, shared)

    from cuda.bindings import driver

    def step():  # by cuLaunchKernelEx, because the profiler records no cuLaunchCooperativeKernel
        launch.hStream = torch.cuda.current_stream(device).cuda_stream
        _done(driver.cuLaunchKernelEx(launch, kernel, ctypes.addressof(pointers), 0))
        return tensors["logits"]

    def lanes():
        slices = kernel_lanes.slices(tensors["stamps"].tolist(), stamp_names(config.num_hidden_layers))
        return functools.partial(kernel_lanes.add, kernel="decode_step", lanes=slices[::SHOWN_EVERY])

    step.tensors, step.lanes, step.kept = tensors, lanes, (module, passed, cache)
    return step


def stamp_names(layers: int) -> list[str]:
    """What a block does from each of its stamps to the next: it waits for a phase's input, or it works."""
    phases = [*(f"{phase} {n}" for n in range(layers) for phase in PHASES), "head"]
    return [name for phase in phases for name in (f"wait: {phase}", phase)]
