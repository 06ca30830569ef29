"""Which block size Inductor chooses for the MLP's fused kernel, with and without GPU work before it chooses.

Inductor writes a pointwise kernel in several sizes and times each when it is first called. Each case runs in a
process of its own, with an empty cache. Needs a GPU.

  uv run benchmarks/block_sizes.py
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
CASES = {"nothing ran before": False, "one eager call before": True}


def child(eager_first: bool) -> None:
    """Compile and run the MLP; print the candidates with their times (µs) and what the kernel takes then."""
    from common.flags import load_script

    script = load_script(ROOT / "03_simple_mlp.py", [])
    import torch
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    from common.harness import prepare

    timed = []
    bench = CachingAutotuner.bench

    def noted(self, launcher, *args, **kwargs):
        ms = bench(self, launcher, *args, **kwargs)
        config = launcher.config
        timed.append((f"XBLOCK {config.kwargs.get('XBLOCK')}, {config.num_warps} warps", ms * 1e3))
        return ms

    CachingAutotuner.bench = noted
    args = prepare(script.flags(["--warmup", "--compile"]))
    model, x = script.build(args)
    compiled = torch.compile(model)
    with torch.no_grad():
        if eager_first:
            model(x)
        for _ in range(3):
            compiled(x)
        torch.cuda.synchronize()
        activities = [torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as prof:
            for _ in range(20):
                compiled(x)
            torch.cuda.synchronize()
    times = sorted(event.time_range.elapsed_us() for event in prof.events() if event.name.startswith("triton_poi"))
    print(json.dumps({"timed": timed, "then": times[len(times) // 2]}))


def main(argv=None) -> None:
    import torch

    from tracereader.command import BadInput, RunFailed
    from tracereader.show.text import console, print_columns

    if not torch.cuda.is_available():
        raise BadInput("Triton's block sizes need a GPU, and torch sees none here")
    rows = []
    for name, eager_first in CASES.items():
        with tempfile.TemporaryDirectory() as cache:
            done = subprocess.run(
                [sys.executable, __file__, "--child", str(int(eager_first))], cwd=ROOT, capture_output=True, text=True,
                env=os.environ | {"TORCHINDUCTOR_CACHE_DIR": cache},
            )  # fmt: skip
        if done.returncode:
            raise RunFailed(f"{name}: {(done.stderr or done.stdout).strip().rpartition(chr(10))[2]}")
        found = json.loads(done.stdout.splitlines()[-1])
        best = min(us for _, us in found["timed"])
        for candidate, us in found["timed"]:
            then = f"chosen: {found['then']:.1f} µs in the trace" if us == best else ""
            rows.append((name, candidate, f"{us:.1f} µs", then))
            name = ""
    print_columns(console(), ("when it chose", "candidate", "timed at", ""), rows, left=(0, 1, 3))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(sys.argv[2] == "1")
    else:
        from tracereader.command import command

        sys.exit(command(main)())
