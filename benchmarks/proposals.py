"""The proposals of all committed traces, to see what an edit of a rule changes.

    uv run python benchmarks/proposals.py --write before.json     before the edit
    uv run python benchmarks/proposals.py --against before.json   after it: each trace whose proposals differ

Exits with 1 if any differs. A proposal differs by its id, its order, or its predicted step.
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
FOLDERS = ("traces/reference", "tests/traces", "benchmarks/pairs")


def proposals(path: str) -> list[tuple[str, float]] | str:
    """Return the id of each proposal of a trace and its predicted step (µs), or why there are none."""
    from tracereader.changes.catalogue import opportunities
    from tracereader.figures import summarize
    from tracereader.replay import Refused
    from tracereader.trace import TraceError, read

    try:
        trace = read(Path(path))
    except TraceError as error:
        return str(error).replace(str(ROOT), "")
    found = opportunities(trace, summarize(trace))
    if isinstance(found, Refused):
        return str(found)
    return [(one.change, round(one.times_us[1], 1)) for one in found]


def of_all() -> dict[str, list | str]:
    files = [file for folder in FOLDERS for file in (ROOT / folder).rglob("*.json*") if file.name != "results.json"]
    files = sorted(map(str, files))
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        found = pool.map(proposals, files, chunksize=8)
        return {os.path.relpath(file, ROOT): one for file, one in zip(files, found, strict=True)}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    either = parser.add_mutually_exclusive_group(required=True)
    either.add_argument("--write", type=Path, metavar="FILE")
    either.add_argument("--against", type=Path, metavar="FILE")
    flags = parser.parse_args(argv)
    now = json.loads(json.dumps(of_all()))
    if flags.write:
        flags.write.write_text(json.dumps(now, indent=1))
        return 0
    before = json.loads(flags.against.read_text())
    differ = [file for file in {**before, **now} if before.get(file) != now.get(file)]
    for file in differ:
        was, is_now = before.get(file), now.get(file)
        print(f"{file}\n  before: {was}\n  now:    {is_now}")
    print(f"{len(differ)} of {len(now)} traces differ")
    return 1 if differ else 0


if __name__ == "__main__":
    sys.exit(main())
