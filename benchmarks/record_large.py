"""Record large real traces on a GPU, 33 to 116 MB each, for benchmarks/reading_speed.py.

    python3 benchmarks/record_large.py FOLDER [NAME ...]

train, stack, compiled: training steps of a Llama of 32 layers, the second with Python stacks, the third compiled.
nosteps: generation with that model, recorded without prof.step(). graph: replays of a CUDA graph of 24 layers.
convnet, loop: training steps of a ResNet-152, the second recorded without prof.step(). speech, epoch: training steps of
48 blocks with a CTC loss and a for-loop optimizer, likewise. small: 1,000 training steps of an MLP. passes: 25 passes
through a Swin Transformer, without prof.step(). noshapes, tokens: the Llama's training and generation without shapes.
transformers and torchvision are needed.
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
    with profile(schedule=schedule(wait=0, warmup=1, active=steps, repeat=1), **WITH_SHAPES | options) as prof:
        for _ in range(steps + 1):
            step()
            prof.step()
    return prof


def without_steps(call: Callable, **options) -> profile:
    call()
    with profile(**WITH_SHAPES | options) as prof:
        call()
        torch.cuda.synchronize()
    return prof


def generating(tokens: int) -> Callable:
    model, prompt = llama(32).eval(), torch.randint(VOCABULARY, (1, 32), device="cuda")
    options = {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": False, "pad_token_id": 0}
    return lambda: model.generate(prompt, **options)


def looping(step: Callable, times: int) -> Callable:
    return lambda: [step() for _ in range(times)]


class Block(torch.nn.Module):
    """A block of a speech model: attention, a convolution over time, and an MLP."""

    def __init__(self, size: int):
        super().__init__()
        self.norms = torch.nn.ModuleList([torch.nn.LayerNorm(size), torch.nn.LayerNorm(size)])
        self.attention = torch.nn.MultiheadAttention(size, 4, batch_first=True)
        self.convolution = torch.nn.Conv1d(size, size, 15, padding=7, groups=size)
        self.mlp = torch.nn.Sequential(
            torch.nn.Linear(size, 4 * size), torch.nn.GELU(), torch.nn.Dropout(0.1), torch.nn.Linear(4 * size, size)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.norms[0](x)
        x = x + self.attention(normed, normed, normed)[0]
        x = x + self.convolution(x.transpose(1, 2)).transpose(1, 2)
        return x + self.mlp(self.norms[1](x))


def of_speech(size: int = 256, letters: int = 32) -> Callable[[], float]:
    blocks = [Block(size) for _ in range(48)]
    model = torch.nn.Sequential(torch.nn.Linear(80, size), *blocks, torch.nn.Linear(size, letters)).cuda()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, foreach=False)
    sounds, text = torch.randn(8, 400, 80, device="cuda"), torch.randint(1, letters, (8, 40), device="cuda")
    lengths = torch.full((8,), 400), torch.full((8,), 40)

    def step() -> float:
        optimizer.zero_grad()
        chances = model(sounds).log_softmax(-1).transpose(0, 1)
        loss = torch.nn.functional.ctc_loss(chances, text, *lengths)
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


def of_numbers() -> Callable[[], None]:
    model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.GELU(), torch.nn.Linear(256, 256)).cuda()
    optimizer, x = torch.optim.AdamW(model.parameters()), torch.randn(64, 256, device="cuda")

    def step() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    return step


def through_swin() -> Callable[[], torch.Tensor]:
    model, images = torchvision.models.swin_t().cuda().eval(), torch.randn(8, 3, 224, 224, device="cuda")
    return torch.no_grad()(lambda: model(images))


RECORDINGS = {
    "train": lambda: recorded(training(llama(32)), 4),
    "stack": lambda: recorded(training(llama(32)), 2, with_stack=True),
    "compiled": lambda: recorded(training(torch.compile(llama(32))), 8),
    "nosteps": lambda: without_steps(generating(20)),
    "graph": lambda: recorded(replaying(), 40),
    "convnet": lambda: recorded(of_images(), 5),
    "loop": lambda: without_steps(looping(of_images(), 5)),
    "speech": lambda: recorded(of_speech(), 3),
    "epoch": lambda: without_steps(looping(of_speech(), 3)),
    "small": lambda: recorded(of_numbers(), 1000),
    "passes": lambda: without_steps(looping(through_swin(), 25)),
    "noshapes": lambda: recorded(training(llama(32)), 8, record_shapes=False),
    "tokens": lambda: without_steps(generating(40), record_shapes=False),
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
