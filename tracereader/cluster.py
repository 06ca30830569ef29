"""A Dask cluster as an Executor."""

import contextlib
import threading
from collections.abc import Iterator
from concurrent.futures import Executor

from tracereader import interrupts
from tracereader.command import BadInput, install_command
from tracereader.trace.remote import without_credentials

PACKAGE = "distributed"
# Seconds in which the scheduler has to answer, and in which it has to have a worker.
CONNECT_S, WORKER_S = 10.0, 30.0
# Seconds after which a scheduler that accepts a connection and does not answer is given up.
SILENT_S = 20.0


@contextlib.contextmanager
def workers_of(address: str) -> Iterator[Executor]:
    """Yield the workers of the Dask scheduler at an address. Raises BadInput.

    If a worker dies, its task goes to another one, as often as the cluster's settings allow.
    """
    try:
        from distributed import Client
    except ImportError:
        raise BadInput(f"--cluster needs Dask; this command installs it: {install_command(PACKAGE)}") from None
    shown = without_credentials(address)
    # A Client that fails to connect would be closed again when it is deleted, which takes time and prints.
    quiet = type("QuietClient", (Client,), {"__del__": lambda client: None})
    try:
        if not address:  # Dask would start a cluster of its own
            raise ValueError("it is empty")
        # A scheduler that accepts the connection and then says nothing keeps Dask waiting, whatever its timeout is.
        silent = threading.Timer(SILENT_S, interrupts.end, (f"--cluster {shown}: no Dask scheduler answers there", 2))
        silent.daemon = True
        silent.start()
        try:
            client = quiet(address, timeout=CONNECT_S, set_as_default=False)
        finally:
            silent.cancel()
    except Exception as problem:  # any of Dask's protocols, or another server's answer, may raise anything
        why = "no such address" if isinstance(problem, ValueError) else "no Dask scheduler answers there"
        if isinstance(problem, ValueError) and shown == address:  # otherwise Dask's message has the credentials
            why += f" ({problem})"
        raise BadInput(f"--cluster {shown}: {why}; it looks like tcp://HOST:8786") from None
    try:
        try:
            client.wait_for_workers(1, timeout=WORKER_S)
        except TimeoutError:
            raise BadInput(f"--cluster {shown}: the scheduler has no worker") from None
        yield client.get_executor(pure=False)  # a trace may have changed since the last read
    finally:
        client.close(timeout=CONNECT_S)
