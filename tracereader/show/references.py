"""The committed traces of other machines, if the reader runs in the repository."""

from pathlib import Path

from tracereader.command import BadInput

SHOWN = 8  # names of runs in a refusal
FOLDER = Path(__file__).resolve().parents[2] / "traces/reference"


def machines() -> list[str]:
    """Return the machines whose traces are committed; empty if only the reader is installed."""
    # Other folders may lie beside theirs, such as Python's __pycache__.
    return sorted({one.parts[-3] for one in FOLDER.glob("*/*/*.json.gz")})


def of(path: Path, machine: str) -> Path | None:
    """Return the trace of the same script and run on that machine, if it was recorded."""
    run = path.name.removesuffix(".gz").removesuffix(".json").removesuffix("_cpu")
    reference = FOLDER / machine / path.resolve().parent.name / f"{run}.json.gz"
    return reference if reference.is_file() else None


def named(path: Path, machine: str, flag: str) -> Path:
    """Return the trace of the same script and run on the machine that a flag names by a part. Raises BadInput."""
    if not machines():
        raise BadInput(f"{flag}: the reference traces are in the repository, and only the reader is installed here")
    found = [name for name in machines() if machine.lower() in name.lower()]
    recorded = {name: one for name in found if (one := of(path, name))}
    if found and not recorded:
        folders = [FOLDER / name / path.resolve().parent.name for name in found]
        runs = sorted(one.name.removesuffix(".json.gz") for folder in folders for one in folder.glob("*.json.gz"))
        there_are = f"; there are {', '.join(runs[:SHOWN])}" + ", and more" * (len(runs) > SHOWN) if runs else ""
        raise BadInput(f"{flag} {machine}: there is no reference of {path.name} in {' or '.join(found)}{there_are}")
    if len(recorded) != 1:
        raise BadInput(f"{flag} {machine}: the machines are {', '.join(recorded or machines())}")
    return next(iter(recorded.values()))
