"""Peak rates of devices by their data sheets: dense rates, without sparsity.

Sources: NVIDIA's data sheets and architecture papers (V100, T4, A100, A10, L4, L40S, H100, H200, B200, GeForce Ada and
Blackwell), AMD's of the Instinct MI210, MI250, MI250X, MI300X and MI325X, as of 2026. An unknown device has no peaks.
"""

import re
from collections.abc import Sequence

import msgspec


class Peaks(msgspec.Struct, frozen=True):
    """TFLOP/s by element type, and GB/s of the device's memory. bf16 also holds for fp16.

    fp64 is that of tensor or matrix cores where the device has them for it. nvlink and pcie: GB/s of the device's links
    in each direction; None without such a link, or if it is not known.
    """

    bf16: float
    tf32: float
    fp32: float
    gb_s: float
    fp64: float
    nvlink: float | None = None
    pcie: float | None = None


# The first pattern that matches the device's name; SXM and PCIe boards differ.
PEAKS = (
    (r"GB200", Peaks(2500, 1250, 80, 8000, 40, 900, None)),
    (r"B200", Peaks(2250, 1125, 75, 8000, 37, 900, 64)),
    (r"H200", Peaks(989, 494, 67, 4800, 67, 450, 64)),
    (r"GH200", Peaks(989, 494, 67, 4000, 67, 450, 64)),
    (r"H100 PCIe", Peaks(756, 378, 51, 2000, 51, 300, 64)),
    (r"H100 NVL", Peaks(835, 417, 60, 3900, 60, 300, 64)),
    (r"H100", Peaks(989, 494, 67, 3350, 67, 450, 64)),
    (r"A100-SXM4-80GB", Peaks(312, 156, 19.5, 2039, 19.5, 300, 32)),
    (r"A100 80GB PCIe", Peaks(312, 156, 19.5, 1935, 19.5, 300, 32)),
    (r"A100", Peaks(312, 156, 19.5, 1555, 19.5, 300, 32)),
    (r"A10(?!\d)(?!G)", Peaks(125, 62.5, 31.2, 600, 0.49, None, 32)),
    (r"L40S", Peaks(362, 183, 91.6, 864, 1.43, None, 32)),
    (r"L4(?!\d)", Peaks(121, 60, 30.3, 300, 0.47, None, 32)),
    (r"V100", Peaks(125, 15.7, 15.7, 900, 7.8, 150, 16)),
    (r"T4(?!\d)", Peaks(65, 8.1, 8.1, 320, 0.25, None, 16)),
    (r"RTX 5090(?! D| Laptop)", Peaks(209.5, 104.8, 104.8, 1792, 1.64, None, 64)),
    (r"RTX 4090(?! D| Laptop)", Peaks(165.2, 82.6, 82.6, 1008, 1.29, None, 32)),
    (r"RTX 3090(?! Ti| Laptop)", Peaks(71, 35.6, 35.6, 936, 0.56, 56, 32)),
    # The MI210's data sheet gives matrix fp32, which stands for tf32 and fp32, as CDNA 2 has no tf32. An MI250 is two
    # dies, each a device of its own: half of the data sheet's 362.1 (MI250X: 383.0), 90.5 (95.7) and 3,276.8 GB/s. Its
    # driver calls some boards "MI250X / MI250". They get the larger peaks, so that no share of them is overstated.
    (r"MI210", Peaks(181, 45.3, 45.3, 1638, 45.3)),
    (r"MI250X", Peaks(191.5, 47.9, 47.9, 1638, 47.9)),
    (r"MI250", Peaks(181, 45.3, 45.3, 1638, 45.3)),
    (r"MI325X", Peaks(1307, 654, 163, 6000, 163)),
    (r"MI300X", Peaks(1307, 654, 163, 5300, 163)),
)


def peaks_of(device: str) -> Peaks | None:
    """Return the peaks of the device with this name in the trace; None for an unknown device."""
    if " MIG " in device:  # a slice of the device
        return None
    return next((peaks for pattern, peaks in PEAKS if re.search(rf"\b(?:{pattern})", device)), None)


def peak_tflops(peaks: Peaks, types: str) -> float | None:
    """Return the arithmetic peak (TFLOP/s) for the element type in a kernel's name; None if the name gives none."""
    by_type = {"bf16": peaks.bf16, "fp16": peaks.bf16, "tf32": peaks.tf32, "fp32": peaks.fp32, "fp64": peaks.fp64}
    return by_type.get(types.lower())


def roof_met(
    tflops: float | None, gb_s: float | None, peak_tflops: float | None, peak_gb_s: float
) -> tuple[str, float] | None:
    """Return the peak that limits the work (memory or compute) and the achieved share of it; None without a rate."""
    memory = gb_s / peak_gb_s if gb_s else None
    compute = tflops / peak_tflops if tflops and peak_tflops else None
    if compute is not None and (memory is None or compute > memory):
        return "compute", compute
    return None if memory is None else ("memory", memory)


def common_peaks(devices: Sequence[str]) -> Peaks | None:
    """Return the peaks of devices that share one name; None for different devices."""
    return peaks_of(devices[0]) if len(set(devices)) == 1 else None
