"""The harness against the same profile written inline with plain torch, interleaved in one process.

    uv run python benchmarks/harness_overhead.py [--device cuda] [--size 1024]

Prints, for both, the median CPU time of a recorded step and the median wall time of a whole run,
and their ratios. The bars: 1.03 and 1.10.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch.profiler import ProfilerActivity, profile, record_function, schedule

from common import cli, harness


def inline(step, device, folder: Path, name: str) -> Path:
    accelerator = [] if device.type == "cpu" else [ProfilerActivity.CUDA]
    with (
        torch.no_grad(),
        profile(
            activities=[ProfilerActivity.CPU, *accelerator],
            schedule=schedule(wait=1, warmup=1, active=3, repeat=1),
        ) as prof,
    ):
        for _ in range(5):
            step()
            prof.step()
    by = "cpu_time_total" if device.type == "cpu" else "device_time_total"
    (folder / f"{name}.txt").write_text(prof.key_averages().table(sort_by=by, row_limit=15))
    trace = folder / f"{name}.json"
    prof.export_chrome_trace(str(trace))
    return trace


def step_us(trace: Path) -> list[float]:
    events = json.loads(trace.read_text())["traceEvents"]
    return [e["dur"] for e in events if e.get("cat") == "user_annotation" and e["name"].startswith("ProfilerStep#")]


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--device", default="auto")
    options.add_argument("--size", type=int, default=1024)
    options.add_argument("--rounds", type=int, default=60)
    options = options.parse_args()

    with tempfile.TemporaryDirectory() as folder:
        parser, _ = cli.lesson_parser("Benchmark.", "benchmark.py", ())
        args = parser.parse_args(["--device", options.device, "--out", folder])
        device, dtype = harness.prepare(args, x=(options.size, options.size))
        x, w, b = (torch.randn(options.size, options.size, device=device, dtype=dtype) for _ in range(3))

        def step():
            with record_function("matmul_add"):
                return torch.add(torch.matmul(x, w), b)

        ways = {
            "inline": lambda name: inline(step, device, Path(folder), name),
            "harness": lambda name: harness.profile(step, args, device, name=name).trace,
        }
        steps = {way: [] for way in ways}
        runs = {way: [] for way in ways}
        for round_ in range(options.rounds):
            # Alternating who goes first, so that neither always finds the other's caches.
            for way in list(ways)[:: 1 if round_ % 2 else -1]:
                start = time.perf_counter()
                trace = ways[way](f"run{round_}")
                runs[way].append(time.perf_counter() - start)
                if round_ >= 5:
                    steps[way] += step_us(trace)
            if round_ < 5:
                runs = {way: [] for way in ways}
    runs_each = options.rounds - 5
    print(f"{harness.device_name(device)} · torch {torch.__version__} · size {options.size} · {runs_each} runs each")
    for what, unit, times in (("recorded step, CPU", "µs", steps), ("whole run", "ms", runs)):
        scale = 1 if unit == "µs" else 1e3
        inline_, ours = (statistics.median(times[way]) * scale for way in ("inline", "harness"))
        print(f"{what:20} inline {inline_:8.1f} {unit}   harness {ours:8.1f} {unit}   ratio {ours / inline_:.3f}")


if __name__ == "__main__":
    main()
