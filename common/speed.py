"""The speed of this machine: the best time of a call, the measured peaks, and whether threads compete."""

import functools
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import mean

import torch

from common.memory import free_bytes

# A slow machine gets fewer rounds: measuring stops after LONG_S seconds, or when a call takes LONG_US.
LONG_S, LONG_US = 2.0, 1e5
ELEMENTS_OF_A_THREAD = 32768  # at::internal::GRAIN_SIZE: torch gives a thread no less of an elementwise operation
# On idle cores several threads fill a tensor as fast as one or faster. Beside busy loops they take 200 times as long.
COMPETE, MARGIN_US = 3, 100


def synchronize(device: torch.device) -> None:
    torch.get_device_module(device).synchronize()


def best_us(fn: Callable, device: torch.device) -> float:
    """Return the µs per call: the best of ten rounds of five calls, after a round to warm up.

    There are fewer rounds if they take seconds. On a CPU each call is a round, so that other programs of the
    machine disturb fewer of them.
    """
    # Five calls per synchronization, so that launching and waiting weigh little.
    calls, rounds = (1, 50) if device.type == "cpu" else (5, 10)
    times, begun = [], time.perf_counter()
    while len(times) < 2 or (len(times) <= rounds and time.perf_counter() - begun < LONG_S):
        synchronize(device)
        start = time.perf_counter()
        for _ in range(calls):
            fn()
        synchronize(device)
        times.append((time.perf_counter() - start) / calls * 1e6)
    return min(times[1:])


@functools.cache
def steady_threads() -> dict[str, float] | None:
    """Halve the number of torch's CPU threads until they do not wait for each other; done once per process.

    Beside another program a part of the calls waits several ms for a core. A number in OMP_NUM_THREADS stays, because
    the user chose it. Returns count (of the threads before), us (of a small operation on all of them), used (the number
    of threads now) and one_us (of that operation on one thread); None if torch has one thread.
    """
    count = used = torch.get_num_threads()
    if count == 1:
        return None
    one_us = _fill_us(1, count)
    all_us = us = _fill_us(count, count)
    while used > 1 and us > COMPETE * one_us + MARGIN_US and not os.environ.get("OMP_NUM_THREADS"):
        used //= 2
        us = _fill_us(used, count)
    return {"count": count, "us": all_us, "used": used, "one_us": one_us}


def _fill_us(threads: int, count: int) -> float:
    """Set the number of threads, and return the mean µs in which they fill a tensor that has work for `count` threads.

    A pause before each call lets the threads fall asleep. A call that follows at once finds all of them awake. The two
    longest calls are left out, because a machine at rest also has something else to do at times.
    """
    numbers = torch.empty(count * ELEMENTS_OF_A_THREAD)
    torch.set_num_threads(threads)
    times = []
    for _ in range(17):
        time.sleep(0.001)
        start = time.perf_counter()
        numbers.fill_(1.0)
        times.append((time.perf_counter() - start) * 1e6)
    return mean(sorted(times[1:])[:-2])


@dataclass(frozen=True)
class Roof:
    """The best rate that this machine reached, and the operation that reached it."""

    rate: float
    reached_by: str


@functools.cache
def measured_roofs(device: torch.device, dtype: torch.dtype) -> tuple[Roof, Roof]:
    """Return the best TFLOP/s of a few matrix products, and the best GB/s of memory; measured once per process."""
    # Larger sizes are no faster on an H200. A CPU reaches its best rate with smaller ones.
    n, length = (8192, 2**29) if device.type != "cpu" else (1024, 2**25)
    free = free_bytes(device)
    while free is not None and 3 * n * n * dtype.itemsize + 3 * length * dtype.itemsize > free / 2:
        n, length = n // 2, length // 4
    products, moves = [], []
    with torch.no_grad():
        for size in (n // 2, n):
            a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
            out = torch.empty_like(a)
            us = best_us(lambda a=a, b=b, out=out: torch.mm(a, b, out=out), device)
            products.append(Roof(2 * size**3 / us / 1e6, f"a product of {size} x {size} matrices"))
            if us > LONG_US:
                break
        del a, b, out
        one, two, three = (torch.ones(length, device=device, dtype=dtype) for _ in range(3))
        for what, tensors, move in (
            ("a large copy", 2, lambda: three.copy_(one)),
            ("a large add, two read and one written", 3, lambda: torch.add(one, two, out=three)),
            ("a large read", 1, lambda: torch.amax(one)),
        ):
            moves.append(Roof(tensors * length * dtype.itemsize / best_us(move, device) / 1e3, what))
    return tuple(max(found, key=lambda roof: roof.rate) for found in (products, moves))
