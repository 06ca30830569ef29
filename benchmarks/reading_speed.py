"""How fast a large trace is read and explained, against json.loads of the same bytes, in processor time.

    uv run python benchmarks/reading_speed.py [TRACE …]

Makes traces of 50,000, 150,000 and 450,000 events (111 MB) by repeating a real one with shifted time
stamps and fresh ids; and reads the traces named. Each reading is a whole process, Python's start and
the report included. The bars: at 450,000 events 1.0 times json.loads and 0.7 times its peak memory;
for real traces of 30 to 90 MB, whose args are richer, 1.5 times. Memory: 3 times the file's size.
"""

import gzip
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
REFERENCE = ROOT / "traces/reference/nvidia-h200/03_simple_mlp/64x128x768x3072_bf16_warm_eager_shapes.json.gz"
SIZES = (50_000, 150_000, 450_000)

PLAIN = ["-c", "import json, sys; json.loads(open(sys.argv[1], 'rb').read())"]
OURS = ["-m", "tracereader"]


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


def measured(program: list[str], file: Path) -> tuple[float, float]:
    """Seconds of processor time and peak MB, the fastest of three processes. Other programs change the elapsed time."""
    runs = []
    for _ in range(3):
        process = subprocess.Popen([sys.executable, *program, str(file)], cwd=ROOT, stdout=subprocess.DEVNULL)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            raise SystemExit(f"{' '.join(program)} {file}: exit status {process.returncode}")
        runs.append((usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024))
    return min(runs)


def compare(name: str, file: Path) -> None:
    (plain_s, plain_mb), (ours_s, ours_mb) = measured(PLAIN, file), measured(OURS, file)
    print(
        f"{name:>20}  {file.stat().st_size / 1e6:5.0f}   {plain_s:5.2f} s {plain_mb:6.0f} MB   "
        f"{ours_s:5.2f} s {ours_mb:6.0f} MB   x {ours_s / plain_s:.2f} x {ours_mb / plain_mb:.2f}"
    )


def write(file: Path, events: int) -> None:
    document = json.loads(gzip.decompress(REFERENCE.read_bytes()))
    file.write_text(json.dumps(repeated(document, events)))


def unpack(name: Path, file: Path) -> None:
    data = name.read_bytes()
    file.write_bytes(gzip.decompress(data) if name.suffix == ".gz" else data)


def elsewhere(work: Callable, *arguments: object) -> None:
    # A process starts with its parent's peak memory as its own, so this one has to stay small.
    process = multiprocessing.get_context("spawn").Process(target=work, args=arguments)
    process.start()
    process.join()


def main() -> None:
    print("               trace     MB   json.loads           read-trace          time   memory")
    with tempfile.TemporaryDirectory() as folder:
        for events in SIZES:
            file = Path(folder) / f"{events}.json"
            elsewhere(write, file, events)
            compare(f"{events:,} events", file)
            file.unlink()
        for name in map(Path, sys.argv[1:]):
            file = Path(folder) / "real.json"
            elsewhere(unpack, name, file)
            compare(name.name[:20], file)


if __name__ == "__main__":
    main()
