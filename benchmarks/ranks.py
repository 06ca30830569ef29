"""Time and memory of merging what is kept of many ranks, and of the report on them.

    uv run python benchmarks/ranks.py [LARGEST [COLLECTIVES [PICTURE]]]

2, 4, 8, … LARGEST ranks (1,024) with COLLECTIVES each (2,000), in a mesh of tensor parallel groups of eight. Their
summaries are decoded from the bytes that a reading process sends; then they are merged and reported. Each count is a
process of its own. PICTURE: a file to draw the figures in, with matplotlib. The bars, for 1,024 ranks: 60 s and 2 GB.
"""

import contextlib
import gc
import io
import json
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BARS = {"s": 60, "GB": 2}


def measure(count: int, collectives: int) -> dict[str, float]:
    """Seconds of processor time, and the peak of memory in GB."""
    import resource

    import msgspec

    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
    from many_ranks import Delay, made

    from tracereader.figures.rank import RankTrace
    from tracereader.figures.ranks import joined
    from tracereader.show import ranks
    from tracereader.show.view import View

    gc.disable()  # as the command runs
    late = {count // 2: Delay(11_000_000)}
    sent = [msgspec.msgpack.encode(one) for one in made(count, collectives, tensor=min(8, count // 2), delays=late)]
    gc.collect()
    start = time.process_time()
    decode = msgspec.msgpack.Decoder(RankTrace).decode
    traces = [decode(sent.pop()) for _ in range(count)]
    decoded = time.process_time()
    summary = joined(traces)
    merged = time.process_time()
    with contextlib.redirect_stdout(io.StringIO()):
        ranks.explain(summary, traces, View(only=("short", "gpu", "steps", "work")))
    shown = time.process_time()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1 << 20 if sys.platform != "darwin" else 1 << 30)
    return {
        "decoding": decoded - start, "merging": merged - decoded, "report": shown - merged, "s": shown - start,
        "GB": peak,
    }  # fmt: skip


def draw(rows: list[tuple[int, dict[str, float]]], collectives: int, path: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    for axis, unit, title in zip(axes, ("s", "GB"), ("processor time, s", "peak of memory, GB"), strict=True):
        counts = [count for count, _ in rows]
        axis.plot(counts, [found[unit] for _, found in rows], "o-")
        axis.axhline(BARS[unit], color="0.6", linestyle="--")
        axis.annotate(f"bar for 1,024 ranks: {BARS[unit]} {unit}", (counts[0], BARS[unit]), (0, -13),
                      textcoords="offset points", color="0.4")  # fmt: skip
        axis.set(xscale="log", yscale="log", xlabel=f"ranks, {collectives:,} collectives each", title=title)
        axis.set_xticks(counts, [f"{count:,}" for count in counts])
        axis.minorticks_off()
        axis.yaxis.set_major_formatter("{x:g}")
        axis.grid(alpha=0.3)
    figure.savefig(path, dpi=90)


def main() -> None:
    words = sys.argv[1:]
    if words[:1] == ["--one"]:
        print(json.dumps(measure(int(words[1]), int(words[2]))))
        return
    largest, collectives = (int(words[at]) if len(words) > at else usual for at, usual in enumerate((1024, 2000)))
    print(f"{'ranks':>6}{'decoding':>12}{'merging':>12}{'report':>12}{'in all':>12}{'memory':>12}")
    rows, count = [], 2
    while count <= largest:
        program = [sys.executable, __file__, "--one", str(count), str(collectives)]
        found = json.loads(subprocess.run(program, check=True, stdout=subprocess.PIPE).stdout)
        times = "".join(f"{found[name]:10.2f} s" for name in ("decoding", "merging", "report", "s"))
        print(f"{count:6,}{times}{found['GB']:9.2f} GB", flush=True)
        rows.append((count, found))
        count *= 2
    if len(words) > 2:
        draw(rows, collectives, words[2])


if __name__ == "__main__":
    main()
