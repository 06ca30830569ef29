"""What is the same on every rung: flags, the profiling harness, the lesson around a script; what some rungs need."""

import tracereader.interrupts  # noqa: F401  first: it answers Ctrl-C while the rest is imported

# isort: split
import importlib.util
import os
import sys


def not_installed(script: str, *packages: str) -> str | None:
    """One line on those that are not there, and on what to do; None where all of them are."""
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if not missing:
        return None
    return (
        f"this environment lacks {' and '.join(missing)}: type uv run {script}, which installs what is needed, "
        "or see docs/setup.md"
    )


_script = os.path.basename(sys.argv[0])
if _lacks := not_installed(_script, "rich", "msgspec"):  # which the flags themselves need
    print(f"{_script}: {_lacks}", file=sys.stderr)
    raise SystemExit(2)
