"""The memory that this machine has left."""

import contextlib
import re
from pathlib import Path


def free_memory() -> int | None:
    """Return the bytes that a process can take without swapping; None if the system does not say."""
    limits = []
    with contextlib.suppress(OSError, ValueError, TypeError):  # Linux
        available = re.search(r"^MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.M)
        limits.append(int(available[1]) * 1024)
        group = Path("/sys/fs/cgroup")  # a container's own limit, cgroup v2
        left = int((group / "memory.max").read_text()) - int((group / "memory.current").read_text())
        # The current use includes cached files, which the system drops when memory is needed.
        cached = re.findall(r"^(?:in)?active_file (\d+)$", (group / "memory.stat").read_text(), re.M)
        limits.append(left + sum(map(int, cached)))
    return min(limits, default=None)
