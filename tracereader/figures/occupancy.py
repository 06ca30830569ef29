"""The share of a multiprocessor's warps that a kernel can occupy, limited by registers, shared memory and threads.

NVIDIA's rules (CUDA C++ Programming Guide, compute capabilities): registers are allocated per warp in units of 256 from
one of the multiprocessor's four parts, a block's shared memory costs 1 KB more from compute capability 8.0 on, and the
number of blocks is limited.
"""

import math

import msgspec

REGISTER_UNIT = 256
PARTS = 4
RESERVED_SHARED = 1024  # bytes per block, from compute capability 8.0 on
# The maximum number of blocks on a multiprocessor, by compute capability; other limits are unknown.
MOST_BLOCKS = {
    (7, 0): 32, (7, 2): 32, (7, 5): 16, (8, 0): 32, (8, 6): 16, (8, 7): 16, (8, 9): 24, (9, 0): 32, (10, 0): 32,
    (10, 3): 32, (11, 0): 24, (12, 0): 24, (12, 1): 24,
}  # fmt: skip


class Occupancy(msgspec.Struct, frozen=True):
    """limit: the maximum share of resident warps. limited_by: the resources that limit it, "" if all warps fit.

    reported: the profiler's value. not_estimated: the profiler's 0% is not an estimate. It asks how many blocks fit
    with the default shared memory of a block (48 KB), so no block with more fits: Kineto's kernelOccupancy,
    FUNC_SHMEM_LIMIT_DEFAULT. On the H200 it says 0% of all 8,892 kernels of such blocks recorded here, however
    launched, and of none below that fills the chip.
    """

    limit: float
    limited_by: str
    reported: float | None
    not_estimated: bool = False


def occupancy(
    device: dict, registers: int | None, shared: int | None, block: list[int] | None, reported: object
) -> Occupancy | None:
    """Return the occupancy of a kernel's launch, by the trace's deviceProperties; None if they do not show it."""
    names = ("warpSize", "maxThreadsPerMultiprocessor", "regsPerMultiprocessor", "sharedMemPerMultiprocessor")
    limits = [device.get(name) for name in names]
    if None in (registers, shared, block) or not all(type(one) is int and one > 0 for one in limits):
        return None
    warp, threads, register_file, shared_memory = limits
    if warp != 32:  # not an NVIDIA GPU
        return None
    warps = math.ceil(math.prod(block) / warp)
    most = threads // warp
    if not 0 < warps <= most:
        return None
    capability = device.get("computeMajor"), device.get("computeMinor")
    known = all(type(one) is int for one in capability)
    blocks = {"threads": most // warps}
    if known and capability in MOST_BLOCKS:
        blocks["the number of blocks"] = MOST_BLOCKS[capability]
    if registers:
        a_warp = math.ceil(registers * warp / REGISTER_UNIT) * REGISTER_UNIT
        blocks["registers"] = register_file // PARTS // a_warp * PARTS // warps
    if shared:
        blocks["shared memory"] = shared_memory // (shared + RESERVED_SHARED * (known and capability[0] >= 8))
    fewest = min(blocks.values())
    if not fewest:  # the kernel ran, so the properties are incomplete
        return None
    full = fewest * warps == most
    limited_by = "" if full else " and ".join(name for name, count in blocks.items() if count == fewest)
    percent = reported / 100 if type(reported) in (int, float) and 0 < reported <= 100 else None
    default_shared = device.get("sharedMemPerBlock")
    not_estimated = reported == 0 and type(default_shared) is int and shared > default_shared
    return Occupancy(fewest * warps / most, limited_by, percent, not_estimated)
