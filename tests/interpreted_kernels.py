"""Decode with the hand-written kernels under TRITON_INTERPRET=1; argument: the folder of a small model.

The prompts end and begin a block of 16 tokens, and one is longer than 64 blocks, when a program has two.
"""

import sys
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from transformers import AutoModelForCausalLM, StaticCache

from common import decoder

for prompt in (15, 32, 1030):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.bfloat16).eval()
    text = torch.randint(model.config.vocab_size, (1, prompt + 2))
    position = torch.tensor([prompt])
    cache = StaticCache(config=model.config, max_cache_len=1100)
    with torch.no_grad():
        model(text[:, :prompt], past_key_values=cache)
        step = decoder.by_hand(model, cache, text, position, overlap=False)
        logits = step()
    assert int(position) == prompt + 1
    args = SimpleNamespace(merge=False, prompt=prompt + 1, dtype=torch.bfloat16)
    assert decoder.check(args, model, text, logits) > 0
    print(f"{prompt}: eager's tokens", flush=True)
