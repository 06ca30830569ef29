"""The committed traces of other machines, if the reader runs in the repository."""

from pathlib import Path

FOLDER = Path(__file__).resolve().parents[2] / "traces/reference"


def machines() -> list[str]:
    """Return the machines whose traces are committed; empty if only the reader is installed.

    Other folders may lie beside theirs, such as Python's __pycache__.
    """
    return sorted({one.parts[-3] for one in FOLDER.glob("*/*/*.json.gz")})


def of(path: Path, machine: str) -> Path | None:
    """Return the trace of the same script and run on that machine, if it was recorded."""
    run = path.name.removesuffix(".gz").removesuffix(".json").removesuffix("_cpu")
    reference = FOLDER / machine / path.resolve().parent.name / f"{run}.json.gz"
    return reference if reference.is_file() else None
