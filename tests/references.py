"""The committed traces, which tests of the reader read: the rungs', and other programs' on an H200."""

import functools
from pathlib import Path

from tracereader.figures import Summary, summarize
from tracereader.trace import read

ROOT = Path(__file__).resolve().parent.parent
REFERENCES = sorted(ROOT.glob("traces/reference/*/0[1-4]_*/*.json.gz"))
# A whole model's steps have hundreds of pieces: what takes long on them leaves them out.
LARGE = sorted(ROOT.glob("traces/reference/*/0[56]_*/*.json.gz"))
H200 = ROOT / "traces/reference/nvidia-h200"
OTHERS = sorted(ROOT.glob("tests/traces/*.json.gz"))
MODELS = sorted(ROOT.glob("tests/traces/models/*.json.gz"))  # large, too


@functools.cache
def measured(path: Path) -> Summary:
    """What a committed trace shows, of which many tests ask: read once in a run of tests."""
    return summarize(read(path))
