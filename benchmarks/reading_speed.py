"""How fast a large trace is read and explained, against json.loads of the same bytes.

    uv run python benchmarks/reading_speed.py

Makes traces of 50,000, 150,000 and 450,000 events (87 MB) by repeating a real one with shifted time
stamps and fresh ids. Each reading runs in a process of its own, so that its peak memory is its own.
The bars, at 450,000: 1.5 times json.loads plus 2 s, and 2 times its peak memory.
"""

import gzip
import json
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
REFERENCE = ROOT / "traces/reference/nvidia-h200/03_simple_mlp/64x128x768x3072_bf16_warm_eager_shapes.json.gz"
SIZES = (50_000, 150_000, 450_000)

PLAIN = """
import json, resource, sys, time
data = open(sys.argv[1], "rb").read()
start = time.perf_counter()
document = json.loads(data)
print(time.perf_counter() - start, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""
OURS = f"""
import contextlib, io, resource, runpy, sys, time
sys.argv[0] = {str(ROOT / "read_trace.py")!r}
sys.path.insert(0, {str(ROOT)!r})
start = time.perf_counter()
with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
    runpy.run_path(sys.argv[0], run_name="__main__")
print(time.perf_counter() - start, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


def repeated(document: dict, events: int) -> dict:
    """The document with its events repeated, one copy after the other in time, up to `events`."""
    original = document["traceEvents"]
    timed = [event["ts"] for event in original if event.get("ph") == "X"]
    length = max(timed) - min(timed) + 2000
    copies = []
    for copy in range(-(-events // len(original))):
        for event in original:
            event = dict(event)
            if "ts" in event:
                event["ts"] = round(event["ts"] + copy * length, 3)
            if event.get("ph") in ("s", "f") and "id" in event:
                event["id"] += copy * 1_000_000
            if "args" in event:
                args = event["args"] = dict(event["args"])
                for key in ("correlation", "External id"):
                    if key in args:
                        args[key] += copy * 1_000_000
                name = event.get("name", "")
                if name.startswith("ProfilerStep#"):
                    event["name"] = f"ProfilerStep#{int(name.split('#')[1]) + 3 * copy}"
            copies.append(event)
    return document | {"traceEvents": copies[:events]}


def measured(program: str, file: Path) -> tuple[float, float]:
    """Seconds and peak MB, the faster of two processes."""
    runs = []
    for _ in range(2):
        done = subprocess.run([sys.executable, "-c", program, str(file)], capture_output=True, text=True, check=True)
        seconds, kilobytes = done.stdout.split()
        runs.append((float(seconds), float(kilobytes) / 1024))
    return min(runs)


def main() -> None:
    document = json.loads(gzip.decompress(REFERENCE.read_bytes()))
    with tempfile.TemporaryDirectory() as folder:
        print("  events     MB   json.loads           read and explained      time bar   memory ratio")
        for events in SIZES:
            file = Path(folder) / f"{events}.json"
            file.write_text(json.dumps(repeated(document, events)))
            (plain_s, plain_mb), (ours_s, ours_mb) = measured(PLAIN, file), measured(OURS, file)
            print(
                f"{events:8}  {file.stat().st_size / 1e6:5.0f}   {plain_s:5.2f} s {plain_mb:6.0f} MB   "
                f"{ours_s:5.2f} s {ours_mb:6.0f} MB       {1.5 * plain_s + 2:5.2f} s   {ours_mb / plain_mb:.2f}"
            )
            file.unlink()


if __name__ == "__main__":
    main()
