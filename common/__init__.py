"""The code that the numbered scripts share: flags, the profiling harness, and helpers of single rungs."""

import tracereader.interrupts  # noqa: F401  first, so that Ctrl-C is answered while the rest is imported

# isort: split
import importlib.util
import os
import sys


def not_installed(script: str, *packages: str) -> str | None:
    """Return one line that names the missing packages and says what to do, or None if none is missing."""
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if not missing:
        return None
    return (
        f"this environment lacks {' and '.join(missing)}: type uv run {script}, which installs what is needed, "
        "or see docs/setup.md"
    )


_script = os.path.basename(sys.argv[0])
if _lacks := not_installed(_script, "rich", "msgspec"):  # the flags need these
    print(f"{_script}: {_lacks}", file=sys.stderr)
    raise SystemExit(2)
