"""One token of up to four sequences through Qwen3 as one persistent kernel: it is compiled and launched here.

megakernel.cu is the kernel, and says how it works. Here the weights are laid out once in the order in which it reads
them, and the buffers are made in which its blocks hand data to each other.
"""

import ctypes
import functools
import struct
from pathlib import Path

import torch

from common import kernel_lanes
from tracereader.command import BadInput

SOURCE = Path(__file__).with_name("megakernel.cu")
HEADERS = [SOURCE.with_name(name) for name in ("megakernel_plan.cuh", "megakernel_ptx.cuh")]
CHUNK, HEAD_DIM, THREADS = 16384, 128, 288
BATCH, SPLITS = 4, 16  # at most
STAGES, FEWEST_STAGES = 10, 4  # slots of the ring
PHASES = ("qkv", "attend", "o", "gate_up", "down")
SHOWN_EVERY = 33  # of the blocks, so that a trace stays small
WINDOW = 2  # chunks on their way at a time: with more, other reads wait longer behind them


def unfit(config, batch: int) -> str | None:
    """Why the kernel cannot compute a model of these sizes; None where it can."""
    sizes = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    for wrong, why in (
        (batch > BATCH, f"decodes at most {BATCH} sequences"),
        (config.head_dim != HEAD_DIM, "needs heads of 128 columns"),
        (sizes[0] != 2 * sizes[1], "needs two query heads to a key-value head"),
        (config.hidden_size % 512, "needs a hidden size that 512 divides"),
        (config.intermediate_size % 1024, "needs an intermediate size that 1024 divides"),
        (config.vocab_size % 16, "needs a vocabulary size that 16 divides"),
    ):  # fmt: skip
        if wrong:
            return why
    return None


def packed(weight: torch.Tensor, splits: int = 1) -> torch.Tensor:
    """A matrix [rows, columns] in the kernel's order, flat: tile after tile of 16 rows, and of one of the splits.

    A tile is chunks of 512 columns, and a chunk is 32 operands of mma.m16n8k16 of 16 columns each. Of an operand each
    of 32 lanes (group, four) holds 8 numbers: rows group and group + 8 of the columns 4 * four to 4 * four + 3.
    """
    rows, columns = weight.shape
    parts = weight.reshape(rows // 16, 2, 8, splits, columns // splits // 512, 32, 4, 2, 2)
    return parts.permute(3, 0, 4, 5, 2, 6, 7, 1, 8).flatten()


def packed_by_head(weight: torch.Tensor) -> torch.Tensor:
    """The output projection [rows, heads * 128] likewise: a tile is 64 rows and the 256 columns of one kv head.

    Its two chunks are 32 rows each: 16 times two operands.
    """
    rows, columns = weight.shape
    parts = weight.reshape(rows // 64, 2, 2, 2, 8, columns // 256, 16, 4, 2, 2)
    return parts.permute(5, 0, 1, 6, 2, 4, 7, 8, 3, 9).flatten()


def layer_weights(layer) -> list[torch.Tensor]:
    """The matrices of one layer in the order in which the kernel reads them, the norms' weights multiplied in."""
    attention, mlp, norm = layer.self_attn, layer.mlp, layer.post_attention_layernorm
    qkv = torch.cat([attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight])
    gate_up = torch.stack([mlp.gate_proj.weight, mlp.up_proj.weight], dim=1).flatten(0, 1)
    return [
        packed(qkv * layer.input_layernorm.weight), packed_by_head(attention.o_proj.weight),
        packed(gate_up * norm.weight), packed(mlp.down_proj.weight, splits=2),
    ]  # fmt: skip


def shared_bytes(stages: int, batch: int, config) -> int:
    """Shared memory of a block, as the kernel's struct Shared has it behind the ring."""
    warps, strip = 8, max(config.hidden_size // 512, config.intermediate_size // 1024) * 64 + 8
    floats = 2 * warps * (64 * batch + 8) + 2 * warps * batch
    in_front = -(-4 * floats // 16) * 16 + 4 * HEAD_DIM * 2 + 4 * (warps * 2 * HEAD_DIM + 2 * warps * 2)
    return stages * CHUNK + -(-in_front // 16) * 16 + warps * batch * strip * 2 + 2 * stages * 8


def most_stages(room: int, batch: int, config) -> int:
    return min(STAGES, next((n for n in range(STAGES, 0, -1) if shared_bytes(n, batch, config) <= room), 0))


def _done(result):
    """What a call of cuda.bindings returned besides its status. Raises RuntimeError."""
    status, *values = result
    if int(status):
        raise RuntimeError(f"megakernel.cu: {status.name}")
    return values[0] if values else None


def compiled(architecture: str, defines: dict) -> bytes:
    """The kernel's machine code, compiled by the NVRTC that comes with torch. Raises BadInput where it is missing."""
    try:
        from cuda.bindings import nvrtc

        texts, names = [one.read_bytes() for one in HEADERS], [one.name.encode() for one in HEADERS]
        program = _done(nvrtc.nvrtcCreateProgram(SOURCE.read_bytes(), SOURCE.name.encode(), len(texts), texts, names))
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


def prepared(model, cache, text, position, blocks: int):
    """What the kernel is given: its arguments as bytes, all tensors that they point to, and its sizes as defines."""
    config, batch, device = model.config, text.shape[0], text.device
    layers, kept, hidden = model.model.layers, cache.layers, config.hidden_size
    heads, kv_heads, inside = config.num_attention_heads, config.num_key_value_heads, config.intermediate_size
    splits = min(SPLITS, blocks // (batch * kv_heads))
    weights = [one for layer in layers for one in layer_weights(layer)] + [
        packed(model.lm_head.weight * model.model.norm.weight)
    ]
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
        "qkv": words(2, batch, (heads + 2 * kv_heads) * HEAD_DIM // 2),
        "act": words(2, batch, inside // 2),
        "parts": words(2, batch, kv_heads, splits, HEAD_DIM + 2),
        "state": words(2 + batch), "stamps": words(blocks, 10 * len(layers) + 3),
    }  # fmt: skip
    caches = [pointer for one in kept for pointer in (one.keys.data_ptr(), one.values.data_ptr())]
    numbers = (text.stride(0), kept[0].max_cache_len, splits, config.rms_norm_eps, layers[0].self_attn.scaling)
    pointers = [tensor.data_ptr() for tensor in tensors.values()]
    arguments = struct.pack(f"{len(pointers)}Q3i2f4x{len(caches)}Q", *pointers, *numbers, *caches)  # struct Arguments
    sizes = {
        "HIDDEN": hidden, "INTER": inside, "HEADS": heads, "KV_HEADS": kv_heads, "LAYERS": len(layers),
        "VOCAB": config.vocab_size, "BATCH": batch,
    }  # fmt: skip
    return arguments, tensors, sizes


def decoding(model, cache, text, position, inside: bool = False, stages: int | None = None, **defines):
    """The step that decodes one token of each sequence: () -> logits, [batch, vocabulary].

    text: [batch, room] token ids; those at position are the input, and the chosen ones are written behind them;
    cache: static, filled to position. Both are advanced in place. inside: the kernel notes when its phases begin; then
    step.lanes() is what adds them to a trace. Raises BadInput.
    """
    config, batch, device = model.config, text.shape[0], text.device
    properties = torch.cuda.get_device_properties(device)
    blocks = properties.multi_processor_count
    stages = stages or most_stages(properties.shared_memory_per_block_optin, batch, config)
    for wrong, why in (
        (unfit(config, batch), unfit(config, batch)),
        (properties.major < 9 or torch.version.hip, f"needs compute capability 9.0 or newer: not {properties.name}"),
        (stages < FEWEST_STAGES, f"needs more shared memory than {properties.name} has"),
        (blocks < batch * config.num_key_value_heads, f"needs more multiprocessors than {properties.name} has"),
    ):  # fmt: skip
        if wrong:
            raise BadInput(f"--persistent {why}")
    shared = shared_bytes(stages, batch, config)
    arguments, tensors, sizes = prepared(model, cache, text, position, blocks)
    sizes |= {"STAGES": stages, "WINDOW": WINDOW, "SHARED": shared}
    sizes |= {"STAMPS": 1} if inside else {}
    code = compiled(f"sm_{properties.major}{properties.minor}", sizes | defines)

    from cuda.bindings import driver

    module = _done(driver.cuModuleLoadData(code))
    kernel = _done(driver.cuModuleGetFunction(module, b"decode_step"))
    limit = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    _done(driver.cuFuncSetAttribute(kernel, limit, shared))
    passed = ctypes.create_string_buffer(arguments, len(arguments))
    pointers = (ctypes.c_void_p * 1)(ctypes.addressof(passed))

    together = driver.CUlaunchAttribute()
    together.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_COOPERATIVE
    together.value.cooperative = 1
    launch = driver.CUlaunchConfig()
    launch.gridDimX, launch.gridDimY, launch.gridDimZ = blocks, 1, 1
    launch.blockDimX, launch.blockDimY, launch.blockDimZ = THREADS, 1, 1
    launch.sharedMemBytes, launch.attrs, launch.numAttrs = shared, [together], 1

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
