"""What several programs of this folder share: the device, sizes for a short test, and a step as a CUDA graph."""

import os

import torch

# record.py sets both. Asking torch whether there is a GPU would start CUDA, and a process with CUDA must not fork.
device = torch.device(os.environ.get("PAIRS_DEVICE", "cuda"))
TINY = os.environ.get("PAIRS_TINY") == "1"


def size(usual: int, tiny: int) -> int:
    """Return a size of a model or batch: the usual one, or one that a CPU computes in a moment."""
    return tiny if TINY else usual


def bf16(enabled: bool):
    """Return autocast to bfloat16 on the device, which does nothing unless enabled."""
    return torch.autocast(device.type, torch.bfloat16, enabled=enabled)


def compiled(model, **options):
    """Return torch.compile(model). A short test only traces it, because generating code takes long on a CPU."""
    return torch.compile(model, backend="aot_eager") if TINY else torch.compile(model, **options)


class Gathered(torch.nn.Embedding):
    """An embedding that takes its rows with index_select."""

    def forward(self, index):
        return self.weight.index_select(0, index.flatten()).unflatten(0, index.shape)


def gathered(*modules):
    """Let the embeddings of these modules take their rows with index_select."""
    for one in (one for module in modules for one in module.modules() if type(one) is torch.nn.Embedding):
        one.__class__ = Gathered


def graphed(step):
    """Return a function that replays `step` as a CUDA graph and returns its result. On the CPU it is `step`."""
    if device.type == "cpu":
        return step
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = step()

    def replay():
        graph.replay()
        return result

    replay.step = step  # The graph reads the model's and the data's memory, which must not be freed.
    return replay


def graphed_training(train, modules, optimizers):
    """Return train() as a CUDA graph, and undo what its warm-up did to the weights and to the optimizers' state."""
    tensors = [tensor for module in modules for tensor in module.state_dict().values()]
    before = [tensor.detach().clone() for tensor in tensors]
    replay = graphed(train)
    with torch.no_grad():
        for tensor, saved in zip(tensors, before, strict=True):
            tensor.copy_(saved)
        for state in (state for optimizer in optimizers for state in optimizer.state.values()):
            for value in filter(torch.is_tensor, state.values()):
                value.zero_()
    return replay


def endless(batches):
    """Yield the batches of a DataLoader again and again, as a loop over epochs does."""
    while True:
        yield from batches


def use_tf32():
    """Let matrix products in fp32 use TF32. Convolutions use it anyway."""
    torch.set_float32_matmul_precision("high")
