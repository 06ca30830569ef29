"""Decode with common/megakernel.cu on a CPU, through emulated_gpu.h; arguments: batch, prompt, clusters of 4 blocks."""

import ctypes
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

import torch  # noqa: E402
from transformers import Qwen3Config, Qwen3ForCausalLM, StaticCache  # noqa: E402

from common import decoder, megakernel  # noqa: E402

SIZES = {
    "vocab_size": 320, "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 128, "tie_word_embeddings": True, "initializer_range": 0.05,
}  # fmt: skip
PROGRAM = """
#include "{here}/emulated_gpu.h"
#include "{common}/megakernel_plan.cuh"
#include "{common}/megakernel.cu"
extern "C" void decode(const Arguments* arguments, unsigned blocks) {{
    launch([=] {{ decode_step(*arguments); }}, blocks, THREADS + 32, SHARED);
}}
"""
STEPS, STAGES = 2, 4

batch, prompt, clusters = map(int, sys.argv[1:])
torch.manual_seed(0)
model = Qwen3ForCausalLM(Qwen3Config(**SIZES)).to(torch.bfloat16).eval()
for parameter in model.parameters():
    if parameter.dim() == 1:  # of a norm, which begin as 1
        parameter.data.uniform_(0.5, 1.5)
text = torch.randint(SIZES["vocab_size"], (batch, prompt + STEPS + 1))
position = torch.tensor([prompt])
cache = StaticCache(config=model.config, max_cache_len=prompt + STEPS + 1)
with torch.no_grad():
    model(text[:, :prompt], past_key_values=cache)
arguments, tensors, sizes = megakernel.prepared(model, cache, text, position, clusters)
blocks = clusters * sizes["CLUSTER"]
sizes |= {
    "STAGES": STAGES,
    "WINDOW": 2,
    "SHARED": megakernel.shared_bytes(STAGES, batch, model.config, sizes["MOST"]),
    "STAMPS": 1,
}
with tempfile.TemporaryDirectory() as folder:
    source, library = Path(folder) / "decode.cpp", Path(folder) / "decode.so"
    source.write_text(PROGRAM.format(here=HERE, common=HERE.parent / "common"))
    options = ["-O1", "-std=c++20", "-shared", "-fPIC", "-w", *(f"-D{name}={value}" for name, value in sizes.items())]
    subprocess.run(["g++", *options, source, "-o", library], check=True)
    decode = ctypes.CDLL(str(library)).decode
for _ in range(STEPS):
    decode(arguments, blocks)
assert int(position) == prompt + STEPS
written = SimpleNamespace(merge=False, prompt=prompt + 1, dtype=torch.bfloat16)
assert decoder.check(written, model, text, tensors["logits"]) > 0
for number, stamps in enumerate(tensors["stamps"]):
    begins = stamps[::2]
    if number >= blocks // clusters * SIZES["num_key_value_heads"]:  # without a head it has the last two of five phases
        begins = torch.cat([begins[n : n + 2] for n in range(3, begins.numel(), 5)] + [begins[-2:]])
    assert (begins > 0).all(), "each block notes where each of its phases begins"
    assert (begins[1:] > begins[:-1]).all()
print(f"batch {batch}, prompt {prompt}, {blocks} blocks: eager's tokens")
