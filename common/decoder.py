"""The decoder rung's use of transformers: the model, its cache, the kinds of attention, and the check."""

import contextlib
import functools
import os
import types
from collections.abc import Callable, Iterator

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # transformers reads it when it is imported
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

import torch
import torch.nn.functional as F
import transformers
from torch import nn
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface
from transformers.models.qwen3 import modeling_qwen3 as qwen3

from common import screen
from common.harness import TOLERANCE, relative_error
from common.llm_flags import tokens_written
from common.memory import ASKED_FOR
from common.speed import best_us
from tracereader.command import BadInput, RunFailed

# From the config.json of Qwen/Qwen3-0.6B and Qwen/Qwen3-1.7B.
QWEN3 = {
    "vocab_size": 151_936, "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8,
    "head_dim": 128, "max_position_embeddings": 40_960, "tie_word_embeddings": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
}  # fmt: skip
SIZES = {
    "0.6b": {"hidden_size": 1024, "intermediate_size": 3072},
    "1.7b": {"hidden_size": 2048, "intermediate_size": 6144},
}


def language_model(args) -> nn.Module:
    """Return the model that --model names, or a Qwen3 of --size with random weights. Raises BadInput."""
    config = _config(args)
    if args.layers:
        if args.layers > config.num_hidden_layers:
            raise BadInput(f"--layers {args.layers}: the model has {config.num_hidden_layers}")
        config.num_hidden_layers = args.layers
        if getattr(config, "layer_types", None):
            config.layer_types = config.layer_types[: args.layers]
    positions, tokens = getattr(config, "max_position_embeddings", None), args.prompt + tokens_written(args)
    if positions and tokens > positions:
        raise BadInput(f"the model has {positions:,} positions, and prompt and steps together have {tokens:,} tokens")
    how = {"dtype": args.dtype, "attn_implementation": _attention(args)}
    if args.model is None:
        with screen.status("building the model …"), args.device:
            return transformers.AutoModelForCausalLM.from_config(config, **how).eval()
    with _reachable(args.model):
        model = transformers.AutoModelForCausalLM.from_pretrained(
            args.model, config=config, trust_remote_code=False, **how
        )
    return model.to(args.device).eval()


def _config(args):
    if args.model is None:
        return transformers.Qwen3Config(**QWEN3, **SIZES[args.size])
    with _reachable(args.model):
        return transformers.AutoConfig.from_pretrained(args.model, trust_remote_code=False).get_text_config()


@contextlib.contextmanager
def _reachable(name: str) -> Iterator[None]:
    """Turn the errors of from_pretrained, for example for a missing model, into BadInput."""
    try:
        with screen.status(f"looking for {name!s} …"):  # without a connection this retries for half a minute
            yield
    except Exception as problem:  # its errors have no common type
        if isinstance(problem, MemoryError) or ASKED_FOR.search(str(problem)):
            raise
        said = next(iter(str(problem).strip().splitlines()), type(problem).__name__)
        raise BadInput(
            f"--model {name!s} could not be loaded ({said.rstrip('.')}): name a causal language model of the Hub "
            "that is cached or reachable, or a folder; without --model nothing is downloaded"
        ) from None


def new_cache(args, model: nn.Module) -> transformers.Cache:
    """Return the KV cache of all layers: static with room for --cache-len tokens, or dynamic."""
    if args.cache == "static":
        return transformers.StaticCache(config=model.config, max_cache_len=args.cache_len)
    return transformers.DynamicCache(config=model.config)


def emptied(cache: transformers.StaticCache) -> transformers.StaticCache:
    """Mark the cache as empty, and return it."""
    if lengths := [layer.cumulative_length for layer in cache.layers if layer.is_initialized]:
        torch._foreach_zero_(lengths)
    return cache


def keep_address(*tensors: torch.Tensor) -> None:
    """Tell torch.compile that these tensors keep their addresses, so that a CUDA graph changes them in place."""
    for tensor in tensors:
        torch._dynamo.mark_static_address(tensor)


def inductor_options(args) -> dict:
    """Return the Inductor options of --compile's mode; --tune adds the ones that were faster on an H200."""
    options = dict(torch._inductor.list_mode_options(args.compile))
    return options | ({"coordinate_descent_tuning": True} if args.tune else {})


def by_hand(model: nn.Module, cache: transformers.StaticCache, text, position, overlap: bool) -> Callable:
    """Return the decode step in hand-written kernels; see decode_kernels.decoding(). Raises BadInput."""
    if not isinstance(model, qwen3.Qwen3ForCausalLM):
        raise BadInput(f"--triton knows the layers of Qwen3, and this is {type(model).__name__}")
    from common import decode_kernels  # Triton is only where a GPU is

    if not decode_kernels.fits(model.config):
        raise BadInput("--triton: its tiles do not cover a model of these sizes")
    return decode_kernels.decoding(model, cache, text, position, overlap)


def persistent(model: nn.Module, cache: transformers.StaticCache, text, position, inside: bool) -> Callable:
    """The decoding step as one kernel; see megakernel.decoding(). Raises BadInput."""
    if not isinstance(model, qwen3.Qwen3ForCausalLM):
        raise BadInput(f"--persistent knows the layers of Qwen3, and this is {type(model).__name__}")
    from common import megakernel

    return megakernel.decoding(model, cache, text, position, inside)


def recorded(step: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
    """Return the step as one CUDA graph. The first call runs and captures it; every call replays it with one launch.

    The function keeps the step alive, and so the tensors that the graph reads and writes, such as the cache.
    """

    @functools.cache
    def record() -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            step()  # so that what the first call creates or compiles is not a part of the graph
        torch.cuda.current_stream().wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = step()
        return graph, out

    def replay():
        graph, out = record()
        graph.replay()
        return out

    return replay


def _attention(args) -> str:
    """Return transformers' name for --attention, and register our own kinds of attention with it."""
    if args.attention == "gqa":
        AttentionInterface.register("gqa", _grouped_attention)
        AttentionMaskInterface.register("gqa", sdpa_mask)
    return {"flex": "flex_attention"}.get(args.attention, args.attention)


def _grouped_attention(module, query, key, value, attention_mask, scaling=None, **others):
    """Call SDPA with enable_gqa for query heads that share a key-value head. Transformers copies the keys instead."""
    tokens = query.shape[2]
    causal = attention_mask is None and tokens > 1
    if causal:  # the cache was empty, so it holds only the tokens of this call
        key, value = key[:, :, :tokens], value[:, :, :tokens]
    out = F.scaled_dot_product_attention(
        query, key, value, attn_mask=attention_mask, scale=scaling, is_causal=causal, enable_gqa=True
    )
    return out.transpose(1, 2).contiguous(), None


def merge(model: nn.Module) -> None:
    """Merge the products of q, k and v, and those of gate and up, in every layer of a Qwen3 model.

    The separate weights become views of the merged ones. Raises BadInput for another architecture.
    """
    if not isinstance(model, qwen3.Qwen3ForCausalLM):
        raise BadInput(f"--merge knows the layers of Qwen3, and this is {type(model).__name__}")
    for layer in model.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        attention.qkv_proj = _joined(attention.q_proj, attention.k_proj, attention.v_proj)
        attention.forward = types.MethodType(_merged_attention, attention)
        mlp.gate_up_proj = _joined(mlp.gate_proj, mlp.up_proj)
        mlp.forward = types.MethodType(_merged_mlp, mlp)


def unmerge(model: nn.Module) -> None:
    """Undo merge(): the layers compute as transformers wrote them."""
    for layer in model.model.layers:
        for module, name in ((layer.self_attn, "qkv_proj"), (layer.mlp, "gate_up_proj")):
            delattr(module, name)
            del module.forward


def _joined(*linears: nn.Linear) -> nn.Linear:
    weight = torch.cat([linear.weight for linear in linears])
    joined = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    joined.weight = nn.Parameter(weight, requires_grad=False)
    for linear, part in zip(linears, weight.split([linear.out_features for linear in linears]), strict=True):
        linear.weight.data = part
    return joined


def _merged_attention(
    self, hidden_states, position_embeddings, attention_mask, cache=None, past_key_values=None, **others
):
    cache = past_key_values if cache is None else cache  # its name before transformers 5.24
    shape = hidden_states.shape[:-1]
    widths = [linear.out_features for linear in (self.q_proj, self.k_proj, self.v_proj)]
    parts = (part.view(*shape, -1, self.head_dim) for part in self.qkv_proj(hidden_states).split(widths, dim=-1))
    query, key, value = parts
    query, key, value = (one.transpose(1, 2) for one in (self.q_norm(query), self.k_norm(key), value))
    query, key = qwen3.apply_rotary_pos_emb(query, key, *position_embeddings)
    if cache is not None:
        key, value = cache.update(key, value, self.layer_idx)
    attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, qwen3.eager_attention_forward)
    out, _ = attend(self, query, key, value, attention_mask, scaling=self.scaling, **others)
    return self.o_proj(out.reshape(*shape, -1)), None


def _merged_mlp(self, x):
    gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
    return self.down_proj(self.act_fn(gate) * up)


def facts(args, model: nn.Module) -> dict:
    """Return the facts for the report's bandwidth limit: the bytes that a step must read, and the device's bandwidth.

    The bytes of the weights are None for a mixture of experts, because a step reads only some experts of each layer.
    """
    config = model.config
    weights = {parameter.data_ptr(): parameter for parameter in model.parameters()}
    read = sum(weight.nbytes for weight in weights.values())
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    if head.data_ptr() != embedding.data_ptr():
        read -= embedding.nbytes  # a step reads only the rows of its tokens
    experts = any(getattr(config, name, None) for name in ("num_experts", "num_local_experts", "n_routed_experts"))
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    a_token = 2 * config.num_hidden_layers * kv_heads * head_dim * args.dtype.itemsize * args.batch
    decodes = args.phase == "decode"
    return {
        "phase": args.phase,
        "batch": args.batch,
        "tokens": args.batch * (1 if decodes else args.prompt),
        "weight_bytes": None if experts else read,
        "cache_bytes": a_token * args.prompt if decodes else 0,
        "cache_bytes_allocated": a_token * args.cache_len if args.cache == "static" else None,
        "layers": config.num_hidden_layers,
        "parameters": sum(weight.numel() for weight in weights.values()),
        "gb_s": _bandwidth(args.device),
    }


def _bandwidth(device: torch.device) -> float | None:
    """Return the GB/s of a copy of 1 GiB, counting bytes read and bytes written; None on a CPU."""
    if device.type == "cpu":
        return None
    source = torch.empty(2**30, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / best_us(lambda: target.copy_(source), device) / 1e3


def check(args, model: nn.Module, text: torch.Tensor, logits: torch.Tensor) -> float:
    """Check a run against eager's forward pass over all its tokens, without a cache; return the relative error.

    text: [batch, tokens], the prompt and the tokens that the run chose. logits: [batch, vocabulary], those of its last
    choice. The model is changed afterwards. _judge() says what counts as an error. Raises RunFailed.
    """
    written = text.shape[1] - args.prompt
    if args.merge:
        unmerge(model)
    model.set_attn_implementation("sdpa")
    with torch.no_grad():
        rounded = model(text[:, :-1], use_cache=False, logits_to_keep=written).logits
        try:
            exact = model.float()(text[:, :-1], use_cache=False, logits_to_keep=written).logits
        except (RuntimeError, MemoryError) as problem:
            if not (isinstance(problem, MemoryError) or ASKED_FOR.search(str(problem))):
                raise
            exact = None  # fp32 does not fit
        return _judge(logits, text[:, -written:], rounded.float(), exact, TOLERANCE[args.dtype])


def _judge(logits, chosen, rounded, exact, tolerance: float) -> float:
    """Return the relative error of the logits. Raises RunFailed for more than rounding, or for a wrong token.

    rounded, exact: [batch, written, vocabulary], eager's logits in the run's type and in fp32. Random weights make many
    tokens nearly equally likely, so rounding decides between them. The run's logits may therefore be twice as far from
    `exact` as `rounded` is, or within the tolerance. The same holds for the chosen token's distance from the largest.
    """
    if exact is None:
        exact = rounded
    allowed = max(tolerance, 2 * relative_error(rounded[:, -1], exact[:, -1]))
    slack = torch.maximum(tolerance * exact.abs().amax(-1), 2 * (rounded - exact).abs().amax(-1))
    error = relative_error(logits, exact[:, -1])
    if not error <= allowed:  # so that NaN fails too
        raise RunFailed(
            f"the profiled step does not compute what eager computes: relative error {error:.1e} of the logits, "
            f"at most {allowed:.1e} is rounding; no file was written"
        )
    below = exact.amax(-1) - exact.gather(-1, chosen[..., None])[..., 0]
    if not (below <= slack).all():
        raise RunFailed(
            f"{int((below > slack).sum())} of {below.numel()} tokens are not those that eager chooses: "
            f"a logit is {below.max():.1e} below the largest one; no file was written"
        )
    return error
