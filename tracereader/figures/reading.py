"""The traces of many ranks, read in as many processes as cores and memory allow."""

import contextlib
import gc
import json
import multiprocessing
import os
import re
import signal
import threading
import zlib
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import msgspec

from tracereader.figures.ranks import RankTrace, of_rank
from tracereader.machine import free_memory
from tracereader.trace import TraceError, read

HEAD = 1 << 18  # bytes in which distributedInfo stands: the profiler writes it before the events
# Starting a process and importing the reader takes as long as reading about 10 MB of JSON.
WORTH_A_PROCESS = 40e6
# Bytes of memory that reading takes per byte of JSON: 9 at most in the traces of two H200s, all told.
MEMORY_PER_BYTE, MEMORY_OF_A_PROCESS = 12, 80e6


class Head(msgspec.Struct, frozen=True):
    """What the first bytes of a file tell. broken: they are not those of a trace."""

    rank: int | None = None
    world_size: int | None = None
    broken: bool = False


def head(path: Path) -> Head:
    """Which rank's trace a file is, without reading all of it."""
    try:
        with open(os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0)), "rb") as file:
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
        with open(os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0)), "rb") as file:
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
            return "it does not tell which rank it is of (distributedInfo)"
        return of_rank(trace, step)
    except TraceError as problem:
        return str(problem).removeprefix(f"{path}: ")
    finally:
        trace = None
        gc.collect()  # parents and children hold each other, and the next rank needs the room


def _in_processes(processes: int, paths: Sequence[Path], limit: int, step: int | None) -> list[RankTrace | str]:
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=context, initializer=_begin) as pool:
        with _no_ctrl_c():
            futures = [pool.submit(_one, path, limit, step) for path in paths]
        found = []
        for future in futures:
            try:
                found.append(future.result())
            except BrokenProcessPool:
                found.append("the process that read it was ended")
    return found


def _begin() -> None:
    """A process that reads ends with the one that it reads for, however that ends."""
    threading.Thread(target=_end_with, args=(multiprocessing.parent_process(),), daemon=True).start()


def _end_with(parent) -> None:
    parent.join()
    os._exit(1)


@contextlib.contextmanager
def _no_ctrl_c():
    """Processes begun in here never see Ctrl-C: it is answered once, here."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
