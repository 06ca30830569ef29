"""Reads the traces of many ranks, in several processes if that is faster."""

import contextlib
import gc
import json
import os
import queue
import re
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from tracereader import interrupts, progress
from tracereader.command import is_url, printable
from tracereader.figures.rank import NotRead, RankTrace, of_rank
from tracereader.machine import free_memory
from tracereader.trace import TraceError, read
from tracereader.trace.document import KINDS, address_of, json_of, opened, path_of, size_of
from tracereader.trace.grouped import T, grouped
from tracereader.trace.tree import WORK

HEAD = 1 << 18  # bytes that contain distributedInfo, because the profiler writes it before the events
# Starting a process and importing the reader takes as long as reading about 10 MB of JSON.
WORTH_A_PROCESS = 40e6
# Bytes of memory that reading takes per byte of JSON. It was at most 9 in the traces of two H200s.
MEMORY_PER_BYTE, MEMORY_OF_A_PROCESS = 12, 80e6
ORDERLY = 0.75  # the least share of the files that name different ranks of one run
# Seconds without an answer after which the missing ranks are given up. A trace of 1 GB takes one to two minutes.
FIRST_ANSWER_S, NEXT_ANSWER_S = 600.0, 180.0
# Concurrent requests. A request takes a tenth of a second, and there may be a thousand URLs.
REQUESTS = 32
# In the JSON of a trace: a launch or a slice of a device; a time stamp.
OF_A_DEVICE = re.compile(
    rb'"cat"\s*:\s*"(?:%s|\w+_runtime|\w+_driver)"|"stream"\s*:'
    % b"|".join(re.escape(name.encode()) for name, kind in KINDS.items() if kind in ("runtime", *WORK))
)
STAMP = re.compile(rb'"ts"\s*:\s*"?(\d{1,16}(?:\.\d+)?)')


class Head(msgspec.Struct, frozen=True):
    """The rank that a file's first bytes name. broken: whether they are not those of a trace."""

    rank: int | None = None
    world_size: int | None = None
    broken: bool = False


def head(path: Path) -> Head:
    """Return which rank's trace a file is, from its first bytes."""
    try:
        with opened(path, HEAD, whole=False) as file:
            data = file.read(HEAD)
        if data[:2] == b"\x1f\x8b":
            data = zlib.decompressobj(31).decompress(data, HEAD)
    except (OSError, ValueError, zlib.error):
        return Head(broken=True)
    text = data.decode(errors="replace").removeprefix("\ufeff")
    if (len(data) < HEAD and '"traceEvents"' not in text) or not text.lstrip().startswith("{"):  # of another tool
        return Head(broken=True)
    told = re.search(r'"distributedInfo"\s*:\s*', text)
    with contextlib.suppress(ValueError, RecursionError, AttributeError):
        found, _ = json.JSONDecoder().raw_decode(text, told.end())
        rank, size = found.get("rank"), found.get("world_size")
        if type(rank) is type(size) is int:
            return Head(rank, size)
    return Head()


def are_ranks(paths: Sequence[Path]) -> bool:
    """Return whether these are traces of several different ranks with one world size. Broken files are ignored.

    One file in four may be without a rank, of another world size, or a second one of a rank. It is left out later.
    """
    told = [one for one in _of_each(head, paths) if not one.broken]
    ranks = grouped((one.world_size, one.rank) for one in told if one.rank is not None)
    most = max((len(set(some)) for some in ranks.values()), default=0)
    return most > 1 and most >= ORDERLY * len(told)


def front_ends(paths: Sequence[Path], limit: int) -> list[Path]:
    """Return the traces of processes that serve a job whose other traces have the GPU work.

    They name no rank and have no launch and no GPU work, and one of the others was recorded at the same time. limit:
    the most bytes of JSON of a trace. Broken files are ignored.
    """
    silent: dict[Path, tuple[float, float]] = {}
    found: set[Path] = set()
    for path in paths if len(paths) > 1 else ():
        if head(path) == Head() and (one := _recorded(path, limit)) is not None and not one[0]:
            silent[path] = one[1:]
    for path in paths if silent else ():
        if path in silent or len(found) == len(silent) or (one := _recorded(path, limit)) is None or not one[0]:
            continue
        found |= {each for each, (start, end) in silent.items() if start <= one[2] and one[1] <= end}
    return [path for path in paths if path in found]


def _recorded(path: Path, limit: int) -> tuple[bool, float, float] | None:
    """Return whether a trace has launches or GPU work, and when it begins and ends (µs); None for a broken one."""
    try:
        data = json_of(path, limit)
    except TraceError:
        return None
    base = re.search(rb'"baseTimeNanoseconds"\s*:\s*(\d{1,19})\b', data)
    times = [time for time in map(float, STAMP.findall(data)) if time]
    since = int(base[1]) / 1e3 if base else 0.0
    return OF_A_DEVICE.search(data) is not None, since + min(times, default=0.0), since + max(times, default=0.0)


def _of_each(ask: Callable[[Path], T], paths: Sequence[Path]) -> list[T]:
    """Return the result of `ask` for each path. URLs are requested concurrently."""
    if not any(map(is_url, paths)):
        return [ask(path) for path in paths]
    with ThreadPoolExecutor(REQUESTS) as pool:
        return list(pool.map(ask, paths))


def read_ranks(paths: Sequence[Path], limit: int, step: int | None) -> tuple[list[RankTrace], dict[str, NotRead]]:
    """Return what is kept of each trace that can be read; by path, why each of the others cannot."""
    if (processes := _processes(_of_each(_json_bytes, paths))) > 1:
        found = _in_processes(processes, paths, limit, step)
    else:
        found = [_one(path, limit, step) for path in paths]
    kept = [one for one in found if isinstance(one, RankTrace)]
    return kept, {str(path): why for path, why in zip(paths, found, strict=True) if isinstance(why, NotRead)}


def _json_bytes(path: Path) -> float:
    """Return an estimate of a file's JSON, in bytes."""
    size, packed = size_of(path)
    if size is None:
        return WORTH_A_PROCESS
    return 20 * size if packed else size  # gzip makes the profiler's JSON about 14 times smaller


def _in_processes(count: int, paths: Sequence[Path], limit: int, step: int | None) -> list[RankTrace | NotRead]:
    """Return what is kept of each trace, or why it cannot be read. Ranks that do not answer in time are given up."""
    readers = [_Reader() for _ in range(count)]
    todo: queue.SimpleQueue[tuple[int, Path]] = queue.SimpleQueue()
    arrived: queue.SimpleQueue[tuple[int, RankTrace | NotRead]] = queue.SimpleQueue()
    for task in enumerate(paths):
        todo.put(task)

    def read_some(reader: _Reader) -> None:
        with contextlib.suppress(queue.Empty):
            while not reader.is_over:
                number, path = todo.get_nowait()
                arrived.put((number, reader.read(path, limit, step)))

    def kill() -> None:
        for reader in readers:
            reader.kill()

    threads = [threading.Thread(target=read_some, args=(reader,)) for reader in readers]
    found: dict[int, RankTrace | NotRead] = {}
    begun = last = time.monotonic()
    waited = 0.0
    with interrupts.undone_by(kill), progress.shown() as show:
        try:
            for thread in threads:
                thread.start()
            while len(found) < len(paths) and waited < _patience(last - begun, len(found)):
                missing = next(path for number, path in enumerate(paths) if number not in found)
                show(f"read {len(found):,} of {len(paths):,} ranks; waiting for {printable(missing.name)}")
                with contextlib.suppress(queue.Empty):
                    number, one = arrived.get(timeout=progress.EVERY_S)
                    found[number], last = one, time.monotonic()
                waited = time.monotonic() - last
        finally:
            kill()  # also a process that was given up, because its thread waits for it
            for thread in threads:
                thread.join()
            for reader in readers:
                reader.end()
    return [found.get(number, NotRead("no_answer", seconds=waited)) for number in range(len(paths))]


def _patience(took_s: float, answers: int) -> float:
    """Return the seconds to wait for the next answer. took_s: the time from the start to the last answer."""
    return max(NEXT_ANSWER_S, took_s) if answers else FIRST_ANSWER_S


def _processes(sizes: Sequence[int]) -> int:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    wanted = min(cores, len(sizes), max(1, int(sum(sizes) / WORTH_A_PROCESS)))
    free = free_memory()
    if free is None:
        return wanted
    return max(1, min(wanted, int(free / (MEMORY_OF_A_PROCESS + MEMORY_PER_BYTE * max(sizes)))))


def _one(path: Path, limit: int, step: int | None) -> RankTrace | NotRead:
    """Return what is kept of a trace, or why it cannot be read."""
    try:
        trace = read(path, limit)
        return NotRead("no_rank") if trace.rank is None else of_rank(trace, step)
    except TraceError as problem:
        return NotRead("unreadable", str(problem).removeprefix(f"{path}: "))
    finally:
        trace = None
        gc.collect()  # parents and children refer to each other, and the next rank needs the memory


class _Reader:
    """A process that reads ranks. It ends with this process, because its standard input is then closed.

    A process of multiprocessing would first run the caller's script again, which may import torch.
    """

    def __init__(self):
        self.process: subprocess.Popen | None = None
        self.is_over = False

    def read(self, path: Path, limit: int, step: int | None) -> RankTrace | NotRead:
        """Return what the process keeps of a trace, or why it cannot be read."""
        task = msgspec.json.encode((os.fsencode(address_of(path)), limit, step)) + b"\n"
        try:
            # Once more if it is killed: memory may have been short, and another rank has freed some since.
            answer = self._answer(task) or self._answer(task)
        except OSError as problem:  # no process can be started
            return NotRead("failed", f"{type(problem).__name__}: {problem}")
        if answer is None:
            return NotRead("killed")
        kept, why_not = msgspec.msgpack.decode(answer, type=tuple[RankTrace | None, NotRead | None])
        return why_not or msgspec.structs.replace(kept, path=str(path))

    def _answer(self, task: bytes) -> bytes | None:
        """Return what serve() writes of a task; None if its process is killed. The next call starts another one."""
        if self.process is None:
            self._start()
        if self.is_over:  # checked after the start, because kill() may have found no process yet
            return None
        with contextlib.suppress(OSError, ValueError):
            self.process.stdin.write(task)
            self.process.stdin.flush()
            size = int(self.process.stdout.readline())
            found = self.process.stdout.read(size)
            if len(found) == size:
                return found
        self.end()
        return None

    def _start(self) -> None:
        # Nothing may be imported from the current folder. Python 3.10 has no flag for that.
        program = (
            "import sys; sys.path = [sys.argv[1], *filter(None, sys.path)]; "
            "from tracereader.figures.reading import serve; serve()"
        )
        self.process = subprocess.Popen(
            [sys.executable, "-c", program, str(Path(__file__).resolve().parents[2])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # only this process answers Ctrl-C
        )

    def kill(self) -> None:
        """Kill the process, and let no other one start to read."""
        self.is_over = True
        if self.process is not None:
            self.process.kill()

    def end(self) -> None:
        """Kill the process and free its resources."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            for stream in (self.process.stdin, self.process.stdout):
                with contextlib.suppress(OSError):
                    stream.close()
            self.process = None


def serve() -> None:
    """Read the rank that each line of standard input names, until the input ends."""
    gc.disable()  # garbage collection while a trace is built takes as long as building it
    for line in sys.stdin.buffer:
        address, limit, step = msgspec.json.decode(line, type=tuple[bytes, int, int | None])
        one = _one(path_of(os.fsdecode(address)), limit, step)
        found = msgspec.msgpack.encode((None, one) if isinstance(one, NotRead) else (one, None))
        sys.stdout.buffer.write(b"%d\n%b" % (len(found), found))
        sys.stdout.buffer.flush()
