"""How many of a multiprocessor's warps a kernel can fill: what registers, shared memory and threads allow.

NVIDIA's rules (CUDA C++ Programming Guide, compute capabilities): registers are handed out by warp in
units of 256, a block's shared memory costs 1 KB more from compute capability 8.0 on.
"""

import math

import msgspec

REGISTER_UNIT = 256
RESERVED_SHARED = 1024  # bytes a block, from compute capability 8.0 on


class Occupancy(msgspec.Struct, frozen=True):
    """limit: the share of warps that fit at most; limited_by: what allows no more. reported: by the profiler.

    not_estimated: the profiler's 0% is none. It asks how many blocks fit with the shared memory that a block gets
    unasked (48 KB), so none of a larger one do: Kineto's kernelOccupancy, FUNC_SHMEM_LIMIT_DEFAULT. On the H200 it
    says 0% of all 8,892 kernels of such blocks recorded here, however launched, and of none below that fills the chip.
    """

    limit: float
    limited_by: str
    reported: float | None
    not_estimated: bool = False


def occupancy(
    device: dict, registers: int | None, shared: int | None, block: list[int] | None, reported: object
) -> Occupancy | None:
    """Of a kernel's launch on a device, by the trace's own deviceProperties; None where they do not tell."""
    names = ("warpSize", "maxThreadsPerMultiprocessor", "regsPerMultiprocessor", "sharedMemPerMultiprocessor")
    limits = [device.get(name) for name in names]
    if None in (registers, shared, block) or not all(type(one) is int and one > 0 for one in limits):
        return None
    warp, threads, register_file, shared_memory = limits
    warps = math.ceil(math.prod(block) / warp)
    most = threads // warp
    if not 0 < warps <= most:
        return None
    blocks = {"threads": most // warps}
    if registers:
        a_warp = math.ceil(registers * warp / REGISTER_UNIT) * REGISTER_UNIT
        blocks["registers"] = register_file // a_warp // warps
    if shared:
        reserved = RESERVED_SHARED if device.get("computeMajor", 0) >= 8 else 0
        blocks["shared memory"] = shared_memory // (shared + reserved)
    fewest = min(blocks.values())
    if not fewest:  # it ran, so the properties are not all of it
        return None
    limited_by = " and ".join(name for name, count in blocks.items() if count == fewest)
    percent = reported / 100 if type(reported) in (int, float) and 0 < reported <= 100 else None
    unasked = device.get("sharedMemPerBlock")
    blind = reported == 0 and type(unasked) is int and shared > unasked
    return Occupancy(fewest * warps / most, limited_by, percent, blind)
