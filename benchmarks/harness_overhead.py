"""The harness against the same profile written inline with plain torch, interleaved in one process.

    uv run python benchmarks/harness_overhead.py [--device cuda] [--size 1024]

Prints, for both, the median CPU time of a recorded step and the median wall time of a whole run,
and their ratios. The bar, on the recorded step: 1.03. The whole run also makes its files sure to be whole.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch.profiler import ProfilerActivity, profile, record_function, schedule

from common.flags import ROOT, load_script
from common.harness import device_name, prepare
from common.publish import require_writable


def inline(x, w, b, folder: Path, name: str) -> Path:
    accelerator = [] if x.device.type == "cpu" else [ProfilerActivity.CUDA]
    with profile(
        activities=[ProfilerActivity.CPU, *accelerator], schedule=schedule(wait=1, warmup=1, active=3, repeat=1)
    ) as prof:
        for _ in range(5):
            with torch.no_grad(), record_function("matmul_add"):
                torch.add(torch.matmul(x, w), b)
            prof.step()
    by = "cpu_time_total" if x.device.type == "cpu" else "device_time_total"
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
        flags = ["--device", options.device, "--size", str(options.size), "--out", folder]
        script = load_script(ROOT / "01_matmul_add.py", flags)
        args = prepare(script.flags(flags))
        require_writable(args.out / args.script)

        def plain(name: str) -> Path:
            return inline(*script.build(args)[1:], Path(folder), name)

        def harness(name: str) -> Path:
            return script.profiled(replace(args, tag=name), *script.build(args)).trace

        ways = {"inline": plain, "harness": harness}
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
    print(f"{device_name(args.device)} · torch {torch.__version__} · size {options.size} · {runs_each} runs each")
    for what, unit, times in (("recorded step, CPU", "µs", steps), ("whole run", "ms", runs)):
        scale = 1 if unit == "µs" else 1e3
        inline_, ours = (statistics.median(times[way]) * scale for way in ("inline", "harness"))
        print(f"{what:20} inline {inline_:8.1f} {unit}   harness {ours:8.1f} {unit}   ratio {ours / inline_:.3f}")


if __name__ == "__main__":
    main()
