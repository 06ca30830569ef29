"""Refuse shapes that do not fit into memory, before the machine begins to swap."""

import contextlib
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from tracereader.command import BadInput
from tracereader.findings.finding import size
from tracereader.machine import free_memory

# The messages of torch's allocators: bytes on a CPU, binary units on a GPU.
ASKED_FOR = re.compile(r"tried to allocate ([\d.]+) (bytes|[KMG]iB)", re.I)
UNCOUNTABLE = re.compile("multiplication overflow|size calculation overflow")
UNITS = {"bytes": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30}


@contextlib.contextmanager
def within_memory(device: torch.device) -> Iterator[None]:
    """Turn an out-of-memory error into BadInput. On a CPU this happens before the machine begins to swap.

    Linux grants more memory than the machine has, and fails only when it is used. So the process gets a limit,
    and an allocation beyond the free memory fails at once, as it does on a GPU.
    """
    if device.type != "cpu":
        torch.get_device_module(device).reset_peak_memory_stats()
    free, before = free_bytes(device), _held_bytes(device)
    try:
        with _limit(before + free) if device.type == "cpu" and free and before else contextlib.nullcontext():
            yield
    except (RuntimeError, MemoryError) as problem:
        if UNCOUNTABLE.search(str(problem)):
            raise BadInput("these shapes are larger than any memory: make them smaller") from None
        asked = ASKED_FOR.search(str(problem))
        if not asked and not isinstance(problem, MemoryError):
            raise
        needed = _held_bytes(device) - before + int(float(asked[1]) * UNITS[asked[2].lower()]) if asked else 0
        if not free or needed <= free:
            raise BadInput(f"{_where(device)} ran out of memory: make the shapes smaller") from None
        raise _too_large(device, needed, free) from None


def require_free(device: torch.device, needed: int) -> None:
    """Raise BadInput if a device has fewer bytes free than this, before anything is allocated."""
    if (free := free_bytes(device)) is not None and needed > free:
        raise _too_large(device, needed, free)


def _too_large(device: torch.device, needed: int, free: int) -> BadInput:
    has = f"{_where(device)} has {size(free)} free"
    return BadInput(f"these shapes need about {size(needed)} or more and {has}: make them smaller")


def _where(device: torch.device) -> str:
    return "this machine" if device.type == "cpu" else torch.get_device_module(device).get_device_name()


def build_unfilled(build: Callable, args) -> None:
    """On a CPU, call `build` without writing to its tensors, so that what does not fit is found at once."""
    if args.device.type == "cpu":
        with _Unfilled():
            build(args)


class _Unfilled(TorchFunctionMode):
    """Leaves random tensors unfilled. Filling takes long, and only filling makes Linux provide the memory."""

    def __init__(self):
        super().__init__()
        self.made = []  # kept alive, so that all of them count when one does not fit

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in (torch.Tensor.uniform_, torch.Tensor.normal_):
            return args[0]
        if func in (nn.init.uniform_, nn.init.normal_, nn.init.kaiming_uniform_):
            return kwargs["tensor"]
        out = (torch.empty if func in (torch.randn, torch.rand) else func)(*args, **kwargs)
        self.made.append(out)
        return out


def free_bytes(device: torch.device) -> int | None:
    """Return the bytes that tensors can take without swapping; None if the system does not say."""
    if device.type != "cpu":
        module = torch.get_device_module(device)
        module.empty_cache()  # of earlier runs in this process
        return module.mem_get_info()[0]
    return free_memory()


def _held_bytes(device: torch.device) -> int:
    """Return the bytes that the process holds, on a CPU as its limit counts them; 0 if the system does not say."""
    if device.type != "cpu":
        # The peak, because memory may have been freed by the time an error is handled.
        return torch.get_device_module(device).max_memory_allocated()
    with contextlib.suppress(OSError, TypeError):
        return int(re.search(r"^VmData:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.M)[1]) * 1024
    return 0


@contextlib.contextmanager
def _limit(held: int) -> Iterator[None]:
    if sys.platform != "linux":  # elsewhere this limit does not cover what malloc maps
        yield
        return
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    if soft == resource.RLIM_INFINITY or held < soft:
        resource.setrlimit(resource.RLIMIT_DATA, (held, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
