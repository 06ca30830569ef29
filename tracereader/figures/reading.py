"""The traces of many ranks, read in as many processes as cores and memory allow."""

import contextlib
import gc
import json
import os
import re
import subprocess
import sys
import zlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from tracereader.figures.rank import RankTrace, of_rank
from tracereader.machine import free_memory
from tracereader.trace import TraceError, read
from tracereader.trace.document import opened

HEAD = 1 << 18  # bytes in which distributedInfo stands: the profiler writes it before the events
# Starting a process and importing the reader takes as long as reading about 10 MB of JSON.
WORTH_A_PROCESS = 40e6
# Bytes of memory that reading takes per byte of JSON: 9 at most in the traces of two H200s, all told.
MEMORY_PER_BYTE, MEMORY_OF_A_PROCESS = 12, 80e6


class Head(msgspec.Struct, frozen=True):
    """What the first bytes of a file contain. broken: they are not those of a trace."""

    rank: int | None = None
    world_size: int | None = None
    broken: bool = False


def head(path: Path) -> Head:
    """Which rank's trace a file is, without reading all of it."""
    try:
        with opened(path) as file:
            data = file.read(HEAD)
        if data[:2] == b"\x1f\x8b":
            data = zlib.decompressobj(31).decompress(data, HEAD)
    except (OSError, ValueError, zlib.error):
        return Head(broken=True)
    text = data.decode(errors="replace")
    if not text.lstrip().startswith("{"):
        return Head(broken=True)
    told = re.search(r'"distributedInfo"\s*:\s*', text)
    with contextlib.suppress(ValueError, RecursionError, AttributeError):
        found, _ = json.JSONDecoder().raw_decode(text, told.end())
        rank, size = found.get("rank"), found.get("world_size")
        if type(rank) is type(size) is int:
            return Head(rank, size)
    return Head()


def are_ranks(paths: Sequence[Path]) -> bool:
    """Whether these are the traces of several ranks: each of one of its own, of one world size. Broken ones may be."""
    heads = [head(path) for path in paths]
    told = [one for one in heads if not one.broken]
    ranks, sizes = {one.rank for one in told}, {one.world_size for one in told}
    return len(told) > 1 and None not in ranks and len(ranks) == len(told) and len(sizes) == 1


def read_ranks(paths: Sequence[Path], limit: int, step: int | None) -> tuple[list[RankTrace], dict[str, str]]:
    """What is kept of each trace that can be read; by path, why another cannot."""
    sizes = [_unpacked(path) for path in paths]
    processes = _processes(sizes)
    if processes == 1:
        found = [_one(path, limit, step) for path in paths]
    else:
        found = _in_processes(processes, paths, limit, step)
    kept = [one for one in found if isinstance(one, RankTrace)]
    return kept, {str(path): why for path, why in zip(paths, found, strict=True) if isinstance(why, str)}


def _unpacked(path: Path) -> int:
    """About how much JSON a file holds."""
    try:
        with opened(path) as file:
            size = os.fstat(file.fileno()).st_size
            packed = file.read(2) == b"\x1f\x8b"
    except OSError:
        return 0
    return 20 * size if packed else size  # the profiler's JSON packs to a 14th


def _processes(sizes: Sequence[int]) -> int:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    wanted = min(cores, len(sizes), max(1, int(sum(sizes) / WORTH_A_PROCESS)))
    free = free_memory()
    if free is None:
        return wanted
    return max(1, min(wanted, int(free / (MEMORY_OF_A_PROCESS + MEMORY_PER_BYTE * max(sizes)))))


def _one(path: Path, limit: int, step: int | None) -> RankTrace | str:
    """What is kept of a trace, or why it cannot be read."""
    try:
        trace = read(path, limit)
        if trace.rank is None:
            return "it does not record its rank (distributedInfo)"
        return of_rank(trace, step)
    except TraceError as problem:
        return str(problem).removeprefix(f"{path}: ")
    finally:
        trace = None
        gc.collect()  # parents and children hold each other, and the next rank needs the room


def _in_processes(processes: int, paths: Sequence[Path], limit: int, step: int | None) -> list[RankTrace | str]:
    """Each process is handed one path after the other, by a thread of its own here."""
    todo, found = iter(enumerate(paths)), {}

    def hand_out() -> None:
        for number, path in todo:
            with _Reader() as reader:
                found[number] = reader.read(path, limit, step)
                for number, path in todo if reader.is_alive else ():
                    found[number] = reader.read(path, limit, step)
                    if not reader.is_alive:
                        break

    with ThreadPoolExecutor(processes) as pool:
        for done in [pool.submit(hand_out) for _ in range(processes)]:
            done.result()
    return [found[number] for number in range(len(paths))]


class _Reader:
    """A process that reads. It ends when this one does, however that ends: its standard input is closed then.

    multiprocessing's would run the caller's script again first, which may import torch.
    """

    def __init__(self):
        root = str(Path(__file__).resolve().parents[2])
        # The current folder must not be imported from; Python 3.10 has no flag to say so.
        program = (
            "import sys; sys.path = [sys.argv[1], *filter(None, sys.path)]; "
            "from tracereader.figures.reading import serve; serve()"
        )
        self.process = subprocess.Popen(
            [sys.executable, "-c", program, root],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is answered once, here
        )
        self.is_alive = True

    def read(self, path: Path, limit: int, step: int | None) -> RankTrace | str:
        try:
            self.process.stdin.write(msgspec.json.encode((os.fsencode(path), limit, step)) + b"\n")
            self.process.stdin.flush()
            size = int(self.process.stdout.readline())
            return msgspec.msgpack.decode(self.process.stdout.read(size), type=RankTrace | str)
        except (OSError, ValueError):  # msgspec's errors are ValueErrors
            self.is_alive = False
            return "the process that read it was killed"

    def __enter__(self) -> "_Reader":
        return self

    def __exit__(self, *_) -> None:
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()


def serve() -> None:
    """Read what standard input names, a line each, until it ends."""
    gc.disable()
    for line in sys.stdin.buffer:
        path, limit, step = msgspec.json.decode(line, type=tuple[bytes, int, int | None])
        answer = msgspec.msgpack.encode(_one(Path(os.fsdecode(path)), limit, step))
        sys.stdout.buffer.write(b"%d\n%b" % (len(answer), answer))
        sys.stdout.buffer.flush()
