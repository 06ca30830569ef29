"""Several processes, one per rank, as torchrun starts them. If one of them ends, all of them end.

NCCL does not notice that a rank is gone, and gloo does not say which one. So each rank holds a connection to rank 0,
its lifeline. The system breaks it when either of the two dies, and rank 0 then tells the other ranks why. The thread
that reads the lifeline sleeps in the system until then, so it does nothing during a recorded step.
"""

import contextlib
import json
import os
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import timedelta

from tracereader import interrupts
from tracereader.command import BadInput, RunFailed, printable

# Torch is imported in the functions that use it, because the flags need only place(), and are read before torch is
# loaded. This variable turns off torch's own long messages about errors that are reported here in one line. Torch reads
# it when its libraries are loaded.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")

LOOK_EVERY_S = 0.05
# A failing collective can break a little before the lifeline, which says why, does.
HEARD_WITHIN_S = 2.0
GOODBYE = b"goodbye\n"


@dataclass(frozen=True)
class Place:
    """The rank of this process, its rank among the processes of this machine, and the number of processes."""

    rank: int
    local_rank: int
    world_size: int


def place() -> Place | None:
    """Return what torchrun put into the environment of this process; None without a launcher. Raises BadInput."""
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return None
    try:
        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        local_rank = int(os.environ.get("LOCAL_RANK", rank))
        int(os.environ["MASTER_PORT"]), os.environ["MASTER_ADDR"]
    except (KeyError, ValueError):
        raise BadInput(
            "RANK and WORLD_SIZE are set, and with them LOCAL_RANK, MASTER_ADDR and MASTER_PORT must be: "
            "start it with torchrun, which sets them all"
        ) from None
    if not 0 <= rank < world_size:
        raise BadInput(f"RANK is {rank} and WORLD_SIZE {world_size}: ranks count from 0")
    return Place(rank, local_rank, world_size)


class Ranks:
    """This process among the others, once all of them have started."""

    def __init__(self, here: Place, run: str, store, peers: dict[int, socket.socket]):
        self.rank, self.world_size = here.rank, here.world_size
        self.tags = tuple(f"{run}_x{here.world_size}_rank{rank}" for rank in range(here.world_size))
        self._store, self._peers = store, peers
        self._over, self._ending = False, threading.Lock()
        self._listener = threading.Thread(target=self._listen, name="lifeline", daemon=True)
        self._listener.start()
        self.run_id = self.of_rank_0("run id", secrets.token_hex(8))
        if hasattr(os, "register_at_fork"):  # or data loader processes keep the lifeline open after this one has died
            os.register_at_fork(after_in_child=self._let_go)

    def all_agree(self) -> None:
        """Wait until every rank has called this. From then on no rank ends another."""
        agreed = self._store.add("agreed", 1)
        while agreed < self.world_size:  # without a time-out, because a rank that dies ends this process
            time.sleep(LOOK_EVERY_S)
            agreed = self._store.add("agreed", 0)
        with self._ending:
            self._over = True

    def of_rank_0(self, name: str, value):
        """Return rank 0's value for `name` on every rank. The value must fit into JSON. Use each name once."""
        if self.rank == 0:
            self._store.set(name, json.dumps(value))
        while not self._store.check([name]):  # without a time-out, because a rank that dies ends this process
            time.sleep(LOOK_EVERY_S)
        return json.loads(self._store.get(name))

    def leave(self) -> None:
        """Tell the other ranks that this one is done. Rank 0, which may hold the store, waits for all others."""
        self._say(GOODBYE)
        if self.rank == 0:
            self._listener.join()

    def fail(self, why: str) -> None:
        """End the other ranks with this line. Their end no longer ends this process."""
        with self._ending:
            self._over = True
        self._say(f"{why}\n".encode())

    def _let_go(self) -> None:
        for peer in self._peers.values():
            peer.close()

    def _say(self, line: bytes) -> None:
        for peer in self._peers.values():
            with contextlib.suppress(OSError):  # the peer is gone
                peer.sendall(line)

    def _listen(self) -> None:
        with selectors.DefaultSelector() as connections:
            for rank, peer in self._peers.items():
                connections.register(peer, selectors.EVENT_READ, rank)
            while connections.get_map():
                for key, _ in connections.select():
                    heard = _line(key.fileobj)
                    if heard == GOODBYE or self._over:
                        connections.unregister(key.fileobj)
                        continue
                    why = heard.decode(errors="replace").strip() or f"rank {key.data} has died"
                    with self._ending:
                        if self._over:
                            continue
                        if self.rank == 0:
                            self._say(f"{why}\n".encode())
                        interrupts.end(f"{printable(why)}; no file was written", 1)


def _line(connection: socket.socket) -> bytes:
    """Return the next line of the connection, or the part that arrived before the connection broke."""
    heard = b""
    with contextlib.suppress(OSError):
        while not heard.endswith(b"\n") and (more := connection.recv(1)):
            heard += more
    return heard


@contextlib.contextmanager
def processes(args) -> Iterator:
    """Yield this rank's flags, with args.ranks and its own tag, after setting its GPU and its process group.

    A failure on one rank ends all of them, each with one line that names the failing rank. A single process gets its
    flags unchanged. Raises BadInput and RunFailed.
    """
    here = place()
    if here is None:
        yield args
        return
    import torch
    import torch.distributed as dist

    store = _store(here, args.timeout)
    store.set(f"flags/{here.rank}", json.dumps(_flags(args)))
    lines = _lifelines(here, store, args.timeout)
    _require_same_flags(here, store, args.timeout)
    ranks = Ranks(here, args.tag, store, lines)
    try:
        if args.device.type != "cpu":
            _take_own_device(args.device, here)
        device = None if args.device.type == "cpu" else torch.device(args.device.type, here.local_rank)
        dist.init_process_group(
            {"cuda": "nccl", "xpu": "xccl"}.get(args.device.type, "gloo"),
            store=dist.PrefixStore("group", store), rank=here.rank, world_size=here.world_size,
            timeout=timedelta(seconds=args.timeout), device_id=device,
        )  # fmt: skip
        yield replace(args, ranks=ranks, tag=ranks.tags[here.rank])
        dist.destroy_process_group()
        ranks.leave()
    except (BadInput, RunFailed) as problem:
        _end_all(ranks, str(problem), 2 if isinstance(problem, BadInput) else 1)
    except RuntimeError as problem:
        if not isinstance(problem, dist.DistError) and "gloo" not in str(problem).lower():
            ranks.fail(f"rank {here.rank} has failed: {type(problem).__name__}")
            raise
        time.sleep(HEARD_WITHIN_S)  # if another's death broke it, the lifeline ends this process first
        _end_all(ranks, f"a collective failed, or waited {args.timeout} s for a rank: {_first_line(problem)}", 1)
    except BaseException as problem:
        ranks.fail(f"rank {here.rank} has failed: {type(problem).__name__}")
        raise


def _end_all(ranks: Ranks, why: str, status: int) -> None:
    """End all ranks at once. Destroying the process group would wait for the others, which wait for this one."""
    why = " ".join(why.split())
    ranks.fail(f"rank {ranks.rank} has failed: {why}")
    interrupts.end(printable(f"rank {ranks.rank}: {why}"), status)


def _store(here: Place, within_s: float):
    """Return the store that all ranks read and write: the launcher's own, if it has one, or else rank 0's."""
    import torch.distributed as dist

    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    serves = here.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    if not serves and not _answers(address, port, within_s):
        raise RunFailed(f"rank 0 has not started within {within_s} s: nobody answers at {address}:{port}")
    try:
        store = dist.TCPStore(
            address, port, is_master=serves, timeout=timedelta(seconds=within_s), wait_for_workers=False
        )
    except RuntimeError as problem:
        doing = "listen" if serves else "meet the others"
        raise BadInput(f"rank {here.rank} cannot {doing} at {address}:{port}: {_first_line(problem)}") from None
    return dist.PrefixStore(f"profiling/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)


def _answers(address: str, port: int, within_s: float) -> bool:
    """Return whether something answers in time. TCPStore itself would try for two and a half times as long."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError), socket.create_connection((address, port), timeout=within_s):
            return True
        time.sleep(LOOK_EVERY_S)
    return False


def _first_line(problem: BaseException) -> str:
    return next(iter(str(problem).splitlines()), type(problem).__name__)


def _lifelines(here: Place, store, within_s: float) -> dict[int, socket.socket]:
    """Return this rank's connections once every rank has started: rank 0's to all others, or the one to rank 0."""
    if here.rank == 0:
        both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        listening = socket.create_server(("", 0), family=family, backlog=here.world_size, dualstack_ipv6=both)
        store.set("lifeline", str(listening.getsockname()[1]))
    _all_started(store, here, within_s)
    try:
        if here.rank:
            # The address at which the ranks meet is that of rank 0's machine.
            line = socket.create_connection((os.environ["MASTER_ADDR"], int(store.get("lifeline"))), within_s)
            line.sendall(f"{here.rank}\n".encode())
            line.settimeout(None)
            return {0: line}
        peers = {}
        with listening:
            listening.settimeout(within_s)
            while len(peers) < here.world_size - 1:
                line, _ = listening.accept()
                line.setblocking(True)
                peers[int(_line(line))] = line
        return peers
    except (OSError, ValueError) as problem:
        raise RunFailed(f"rank {here.rank}: the other ranks started and cannot be reached: {problem}") from None


def _all_started(store, here: Place, within_s: float) -> None:
    """Wait until every rank has called this. Raises RunFailed, which names the ranks that have not."""
    deadline = time.monotonic() + within_s
    store.set(f"started/{here.rank}", "")
    started = store.add("started", 1)
    missing = [rank for rank in range(here.world_size) if rank != here.rank]
    with contextlib.suppress(RuntimeError):  # rank 0, which holds the store, may have given up a moment before
        # This polls, because a blocking wait would not answer a signal.
        while started < here.world_size and time.monotonic() < deadline:
            time.sleep(LOOK_EVERY_S)
            started = store.add("started", 0)
        missing = [rank for rank in missing if not store.check([f"started/{rank}"])]
    if missing:
        named = f"rank {missing[0]} has" if len(missing) == 1 else f"ranks {', '.join(map(str, missing))} have"
        raise RunFailed(f"rank {here.rank}: {named} not started within {within_s} s; nothing was run")


def _flags(args) -> dict[str, str]:
    """Return the flags that all ranks of a run must share, as typed, by name. Folders may differ by machine."""
    values = {one.name: getattr(args, one.dest) for one in args.declared if one.dest != "out"}
    return {
        name: f"without {name}"
        if value is None or value is False
        else f"with {name}{'' if value is True else f' {value}'}"
        for name, value in values.items()
    }


def _require_same_flags(here: Place, store, within_s: float) -> None:
    """Raise BadInput on every rank if one was started with other flags than rank 0. All ranks have started."""
    first, *others = (json.loads(store.get(f"flags/{rank}")) for rank in range(here.world_size))
    deadline, read = time.monotonic() + within_s, store.add("flags read", 1)
    while here.rank == 0 and read < here.world_size and time.monotonic() < deadline:  # rank 0 may hold the store
        time.sleep(LOOK_EVERY_S)
        read = store.add("flags read", 0)
    for rank, flags in enumerate(others, 1):
        if different := [name for name in first if flags.get(name) != first[name]]:
            its, own = (", ".join(some.get(name, f"without {name}") for name in different) for some in (flags, first))
            raise BadInput(f"rank {rank} was started {its}, and rank 0 {own}: start all ranks with the same flags")


def _take_own_device(device, here: Place) -> None:
    import torch

    module = torch.get_device_module(device)
    if here.local_rank >= module.device_count():
        raise BadInput(
            f"this machine has {module.device_count()} GPUs, and rank {here.rank} would be process "
            f"{here.local_rank + 1} on it: start fewer with --nproc-per-node"
        )
    module.set_device(here.local_rank)
