"""The committed traces, which tests of the reader read."""

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
REFERENCES = sorted(ROOT.glob("traces/reference/*/*/*.json.gz"))
H200 = ROOT / "traces/reference/nvidia-h200"
