"""How fast a large trace is read and explained, against json.loads of the same bytes, in processor time.

    uv run python benchmarks/reading_speed.py [--events COUNT] [--times COUNT] [TRACE …]

Makes traces of 50,000, 150,000 and 450,000 events (111 MB), or of --events, by repeating a real one with shifted time
stamps and fresh ids; and reads the traces named, each repeated --times (1). record_large.py records large ones. Each
reading is a whole process, Python's start and the report included. The bars: at 450,000 events 1.0 times json.loads;
for real traces of 30 to 90 MB, whose args are richer, 1.5 times; at most 3 times the file's size of memory; linear time
to 1 GB (--events 4200000).
"""

import argparse
import gzip
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
REFERENCE = ROOT / "traces/reference/nvidia-h200/03_simple_mlp/64x128x768x3072_bf16_warm_eager_shapes.json.gz"
SIZES = (50_000, 150_000, 450_000)

PLAIN = ["-c", "import json, sys; json.loads(open(sys.argv[1], 'rb').read())"]
OURS = ["-m", "tracereader"]


def repeated(original: list[dict], events: int) -> Iterator[dict]:
    """Yield the events repeatedly, one copy after the other in time, `events` in all."""
    timed = [event["ts"] for event in original if event.get("ph") == "X"]
    length = max(timed) - min(timed) + 2000
    for copy in range(-(-events // len(original))):
        for event in original[: events - copy * len(original)]:
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
            yield event


def measured(program: list[str], file: Path) -> tuple[float, float]:
    """Return seconds of processor time and peak MB, the fastest of three processes.

    Python keeps the compiled modules, as it does where the program is installed; the first process may have to compile
    them.
    """
    settings = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    runs = []
    for _ in range(3):
        process = subprocess.Popen(
            [sys.executable, *program, str(file)], cwd=ROOT, env=settings, stdout=subprocess.DEVNULL
        )
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


def write(source: Path, file: Path, events: int | None, times: int) -> None:
    """Write the trace with `events` events, or with its own repeated this many times; unchanged if that is once."""
    data = source.read_bytes()
    data = gzip.decompress(data) if source.suffix == ".gz" else data
    if events is None and times == 1:
        file.write_bytes(data)
        return
    document = json.loads(data)
    original = document.pop("traceEvents")
    with file.open("w") as out:
        out.write(json.dumps(document | {"traceEvents": []}).removesuffix("]}"))
        for number, event in enumerate(repeated(original, events or times * len(original))):
            out.write(", " * bool(number) + json.dumps(event))
        out.write("]}")


def elsewhere(work: Callable, *arguments: object) -> None:
    # A process starts with its parent's peak memory as its own, so this one has to stay small.
    process = multiprocessing.get_context("spawn").Process(target=work, args=arguments)
    process.start()
    process.join()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--events", type=int)
    parser.add_argument("--times", type=int, default=1)
    parser.add_argument("traces", nargs="*", type=Path)
    args = parser.parse_args()
    made = [(f"{events:,} events", REFERENCE, events) for events in ((args.events,) if args.events else SIZES)]
    print("               trace     MB   json.loads           read-trace          time   memory")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        for name, source, events in made + [(one.name[:20], one, None) for one in args.traces]:
            elsewhere(write, source, file, events, args.times)
            compare(name, file)


if __name__ == "__main__":
    main()
