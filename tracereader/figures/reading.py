"""The traces of many ranks: one function reads one rank, on any Executor; here in processes of this machine."""

import contextlib
import gc
import json
import os
import queue
import re
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import BrokenExecutor, CancelledError, Executor, Future, ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import msgspec

from tracereader import interrupts, progress
from tracereader.command import printable
from tracereader.figures.rank import RankTrace, of_rank
from tracereader.machine import free_memory
from tracereader.trace import TraceError, read
from tracereader.trace.document import address_of, opened, path_of, size_of

HEAD = 1 << 18  # bytes in which distributedInfo stands: the profiler writes it before the events
# Starting a process and importing the reader takes as long as reading about 10 MB of JSON.
WORTH_A_PROCESS = 40e6
# Bytes of memory that reading takes per byte of JSON: 9 at most in the traces of two H200s, all told.
MEMORY_PER_BYTE, MEMORY_OF_A_PROCESS = 12, 80e6
# Seconds without an answer after which the ranks that are missing are given up: before the first answer, in which a
# cluster may still start workers, and after it. A trace of 1 GB takes one to two minutes.
FIRST_ANSWER_S, NEXT_ANSWER_S = 600.0, 180.0
# Requests at a time. One takes a tenth of a second, and there may be a thousand URLs.
REQUESTS = 32
KILLED = "the process that read it was killed"
T = TypeVar("T")
# What reads a rank: its path or URL, the limit of JSON, the step that is drawn; what is kept of it, encoded.
Answer = Callable[[bytes, int, "int | None"], bytes]


class Head(msgspec.Struct, frozen=True):
    """What the first bytes of a file contain. broken: they are not those of a trace."""

    rank: int | None = None
    world_size: int | None = None
    broken: bool = False


def head(path: Path) -> Head:
    """Which rank's trace a file is, without reading all of it."""
    try:
        with opened(path, HEAD, whole=False) as file:
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
    heads = _of_each(head, paths)
    told = [one for one in heads if not one.broken]
    ranks, sizes = {one.rank for one in told}, {one.world_size for one in told}
    return len(told) > 1 and None not in ranks and len(ranks) == len(told) and len(sizes) == 1


def _of_each(ask: Callable[[Path], T], paths: Sequence[Path]) -> list[T]:
    """What `ask` says of each path. URLs are asked for many at a time."""
    if not any("://" in str(path) for path in paths):
        return [ask(path) for path in paths]
    with ThreadPoolExecutor(REQUESTS) as pool:
        return list(pool.map(ask, paths))


def read_ranks(
    paths: Sequence[Path], limit: int, step: int | None, executor: Executor | None = None
) -> tuple[list[RankTrace], dict[str, str]]:
    """What is kept of each trace that can be read; by path, why another cannot.

    executor: where answer() is called for each rank; it must be able to import this module, and to read the paths.
    None: in processes of this machine, or in this one where more are not worth it.
    """
    if executor is not None:
        found = _gathered(executor, answer, paths, limit, step)
    elif (processes := _processes(_of_each(_json_bytes, paths))) > 1:
        with _processes_here(processes) as (threads, hand_over):
            found = _gathered(threads, hand_over, paths, limit, step)
    else:
        found = [_one(path, limit, step) for path in paths]
    kept = [one for one in found if isinstance(one, RankTrace)]
    return kept, {str(path): why for path, why in zip(paths, found, strict=True) if isinstance(why, str)}


def _json_bytes(path: Path) -> float:
    """About how much JSON a file holds."""
    size, packed = size_of(path)
    if size is None:
        return WORTH_A_PROCESS
    return 20 * size if packed else size  # the profiler's JSON packs to a 14th


def _gathered(
    executor: Executor, ask: Answer, paths: Sequence[Path], limit: int, step: int | None
) -> list[RankTrace | str]:
    """What is kept of each trace, or why it cannot be read. Ranks that do not answer in time are given up."""
    arrived: queue.SimpleQueue[tuple[int, Future]] = queue.SimpleQueue()
    found: list[RankTrace | str | None] = [None] * len(paths)
    pending: dict[int, Future] = {}
    begun = last = time.monotonic()
    with progress.shown() as show:
        for number, path in enumerate(paths):
            pending[number] = executor.submit(ask, os.fsencode(address_of(path)), limit, step)
            pending[number].add_done_callback(lambda future, number=number: arrived.put((number, future)))
        while pending:
            answers, missing = len(paths) - len(pending), paths[next(iter(pending))]
            show(f"read {answers:,} of {len(paths):,} ranks; waiting for {printable(missing.name)}")
            try:
                number, future = arrived.get(timeout=progress.EVERY_S)
            except queue.Empty:
                waited = time.monotonic() - last
                if waited < _patience(last - begun, answers):
                    continue
                for number, future in pending.items():
                    future.cancel()
                    found[number] = f"no answer from what reads it: nothing has arrived for {waited:,.0f} s"
                break
            last = time.monotonic()
            del pending[number]
            found[number] = _decoded(future, paths[number])
    return found


def _patience(took_s: float, answers: int) -> float:
    """How many seconds to wait for the next answer. took_s: until the last one."""
    return max(NEXT_ANSWER_S, took_s) if answers else FIRST_ANSWER_S


def _decoded(future: Future, path: Path) -> RankTrace | str:
    """What an Executor answered. The trace is named as it is here."""
    try:
        found = msgspec.msgpack.decode(future.result(), type=RankTrace | str)
    except msgspec.MsgspecError:
        return "the process that read it has another version of the reader"
    except CancelledError:
        return "the cluster dropped it"
    except Exception as problem:  # of any Executor, and of what it runs on
        if isinstance(problem, BrokenExecutor) or type(problem).__name__ == "KilledWorker":
            return KILLED
        if isinstance(problem, ModuleNotFoundError):
            return f"the process that read it has no module {problem.name}: install the reader there"
        return f"{type(problem).__name__}: {' '.join(str(problem).split())[:200]}"
    return found if isinstance(found, str) else msgspec.structs.replace(found, path=str(path))


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


def answer(address: bytes, limit: int, step: int | None) -> bytes:
    """What is kept of the trace at a path or a URL, or why it cannot be read, encoded. All that an Executor is told."""
    collects = gc.isenabled()
    gc.disable()  # collecting garbage while a trace is built takes as long as building it
    try:
        return msgspec.msgpack.encode(_one(path_of(os.fsdecode(address)), limit, step))
    finally:
        if collects:
            gc.enable()


@contextlib.contextmanager
def _processes_here(count: int) -> Iterator[tuple[Executor, Answer]]:
    """Threads, and a function that gives one rank to a process of this machine, for them to call."""
    idle: queue.SimpleQueue[_Reader] = queue.SimpleQueue()
    readers = [_Reader() for _ in range(count)]
    for reader in readers:
        idle.put(reader)

    def hand_over(*task: object) -> bytes:
        reader = idle.get()
        try:
            try:
                return reader.answer(*task)
            except BrokenExecutor:  # memory may have been short, and another rank has freed some since
                return reader.answer(*task)
        finally:
            idle.put(reader)

    def kill() -> None:
        for reader in readers:
            reader.kill()

    try:
        with interrupts.undone_by(kill), ThreadPoolExecutor(count) as threads:
            try:
                yield threads, hand_over
            finally:
                kill()  # one that was given up, too: its thread waits for it
    finally:
        for reader in readers:
            reader.end()


class _Reader:
    """A process that reads. It ends when this one does, however that ends: its standard input is closed then.

    multiprocessing's would run the caller's script again first, which may import torch.
    """

    def __init__(self):
        self.process: subprocess.Popen | None = None
        self.is_over = False

    def _start(self) -> None:
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

    def answer(self, address: bytes, limit: int, step: int | None) -> bytes:
        """What answer() returns in there. Raises BrokenExecutor where the process is killed; the next one is new."""
        if self.process is None:
            self._start()
        if self.is_over:  # asked last, because kill() may have found no process yet
            raise BrokenExecutor
        try:
            self.process.stdin.write(msgspec.json.encode((address, limit, step)) + b"\n")
            self.process.stdin.flush()
            size = int(self.process.stdout.readline())
            found = self.process.stdout.read(size)
            if len(found) == size:
                return found
        except (OSError, ValueError):
            pass
        self.end()
        raise BrokenExecutor

    def kill(self) -> None:
        """Let the process end at once, and no other one read."""
        self.is_over = True
        if self.process is not None:
            self.process.kill()

    def end(self) -> None:
        """Stop the process, and let go of it."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            for stream in (self.process.stdin, self.process.stdout):
                with contextlib.suppress(OSError):
                    stream.close()
            self.process = None


def serve() -> None:
    """Read what standard input names, a line each, until it ends."""
    for line in sys.stdin.buffer:
        found = answer(*msgspec.json.decode(line, type=tuple[bytes, int, int | None]))
        sys.stdout.buffer.write(b"%d\n%b" % (len(found), found))
        sys.stdout.buffer.flush()
