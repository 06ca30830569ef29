"""Record large real traces on a GPU, 33 to 76 MB each, for benchmarks/reading_speed.py.

    python3 benchmarks/record_large.py FOLDER [NAME ...]

train, stack, compiled: training steps of a Llama of 32 layers, the second with Python stacks, the third compiled.
nosteps: generation with that model, recorded without prof.step(). graph: replays of a CUDA graph of 24 layers.
convnet, loop: training steps of a ResNet-152, the second recorded without prof.step(). transformers and torchvision are
needed.
"""

import gzip
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
import torchvision
import transformers
from torch.profiler import ProfilerActivity, profile, schedule

VOCABULARY = 32_000
WITH_SHAPES = {"activities": [ProfilerActivity.CPU, ProfilerActivity.CUDA], "record_shapes": True}


def llama(layers: int) -> torch.nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=1024, intermediate_size=3072, num_hidden_layers=layers,
        num_attention_heads=16, num_key_value_heads=8, max_position_embeddings=4096,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).cuda().to(torch.bfloat16)


def training(model: torch.nn.Module) -> Callable[[], float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    tokens = torch.randint(VOCABULARY, (4, 512), device="cuda")

    def step() -> float:
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def of_images() -> Callable[[], float]:
    model = torchvision.models.resnet152().cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    images, labels = torch.randn(16, 3, 224, 224), torch.randint(0, 1000, (16,))

    def step() -> float:
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(images.cuda()), labels.cuda())
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


def replaying() -> Callable[[], torch.Tensor]:
    model, token = llama(24).eval(), torch.randint(VOCABULARY, (8, 1), device="cuda")
    with torch.no_grad():
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            for _ in range(3):
                model(input_ids=token, use_cache=False)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            chosen = model(input_ids=token, use_cache=False).logits.argmax(-1)

    def step() -> torch.Tensor:
        graph.replay()
        return chosen.cpu()

    return step


def recorded(step: Callable, steps: int, **options) -> profile:
    for _ in range(3):
        step()
    with profile(schedule=schedule(wait=0, warmup=1, active=steps, repeat=1), **WITH_SHAPES, **options) as prof:
        for _ in range(steps + 1):
            step()
            prof.step()
    return prof


def without_steps(call: Callable) -> profile:
    call()
    with profile(**WITH_SHAPES) as prof:
        call()
        torch.cuda.synchronize()
    return prof


def generating() -> Callable:
    model, prompt = llama(32).eval(), torch.randint(VOCABULARY, (1, 32), device="cuda")
    return lambda: model.generate(prompt, max_new_tokens=20, min_new_tokens=20, do_sample=False, pad_token_id=0)


def looping() -> Callable:
    step = of_images()
    return lambda: [step() for _ in range(5)]


RECORDINGS = {
    "train": lambda: recorded(training(llama(32)), 4),
    "stack": lambda: recorded(training(llama(32)), 2, with_stack=True),
    "compiled": lambda: recorded(training(torch.compile(llama(32))), 8),
    "nosteps": lambda: without_steps(generating()),
    "graph": lambda: recorded(replaying(), 40),
    "convnet": lambda: recorded(of_images(), 5),
    "loop": lambda: without_steps(looping()),
}


def main(folder: str, *names: str) -> None:
    for name in names or RECORDINGS:
        prof = RECORDINGS[name]()
        with tempfile.TemporaryDirectory() as aside:
            plain = Path(aside) / "trace.json"
            prof.export_chrome_trace(str(plain))
            print(f"{name}: {plain.stat().st_size / 1e6:.1f} MB", flush=True)
            with plain.open("rb") as data, gzip.open(Path(folder) / f"{name}.json.gz", "wb", compresslevel=3) as out:
                shutil.copyfileobj(data, out)


if __name__ == "__main__":
    main(*sys.argv[1:])
