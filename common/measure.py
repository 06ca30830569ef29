"""What is measured besides the profile: first calls with other inputs, and the device's roofs."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from common.harness import free_bytes, relative_error


@dataclass(frozen=True)
class Roofs:
    """What this device reached just now: a large matrix product, and a large copy (read plus written)."""

    tflops: float
    gb_s: float


def roofs(device: torch.device, dtype: torch.dtype) -> Roofs:
    """Measure both: the median of five rounds of five calls, after a round to warm up."""
    # Large enough that more adds nothing on an H200; a CPU is as fast on less, and done sooner.
    n, length = (8192, 2**30) if device.type != "cpu" else (1024, 2**28)
    free = free_bytes(device)
    while free is not None and 3 * n * n * dtype.itemsize + 2 * length > free / 2:
        n, length = n // 2, length // 4
    a, b = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(2))
    source = torch.ones(length, device=device, dtype=torch.int8)
    target = torch.empty_like(source)
    with torch.no_grad():
        product = _median_seconds(lambda: torch.mm(a, b), device)
        copy = _median_seconds(lambda: target.copy_(source), device)
    return Roofs(tflops=2 * n**3 / product / 1e12, gb_s=2 * length / copy / 1e9)


def _median_seconds(fn: Callable, device: torch.device) -> float:
    synchronize = torch.get_device_module(device).synchronize
    times = []
    for _ in range(6):
        synchronize()
        start = time.perf_counter()
        for _ in range(5):  # in one go, so that launching and waiting weigh little
            fn()
        synchronize()
        times.append((time.perf_counter() - start) / 5)
    return statistics.median(times[1:])


@dataclass(frozen=True)
class FirstCall:
    """The first call of a function with an input that it has not seen, after the profile."""

    name: str
    seconds: float
    again: float
    graphs: int  # that Dynamo has made in this process up to here
    error: float


def first_calls(
    fn: Callable, inputs: dict[str, torch.Tensor], reference: Callable, device: torch.device
) -> list[FirstCall]:
    """Call `fn` twice with each input in turn: does it compile again, and is the result right?"""
    from torch._dynamo.utils import counters

    found = []
    synchronize = torch.get_device_module(device).synchronize
    with torch.no_grad():
        for name, x in inputs.items():
            times = []
            for _ in range(2):
                synchronize()
                start = time.perf_counter()
                out = fn(x)
                synchronize()
                times.append(time.perf_counter() - start)
            graphs = counters["stats"]["unique_graphs"]
            found.append(FirstCall(name, *times, graphs, relative_error(out, reference(x))))
    return found
