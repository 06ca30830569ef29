"""Callbacks that record a trace as record-trace does, for those who prefer code to a command.

    Trainer(..., callbacks=[for_transformers("train_trace.json.gz")])
    Trainer(..., callbacks=[for_lightning("train_trace.json.gz")])

The training runs to its own end. Steps end where record-trace sees them end: with the optimizer's step.
"""

import atexit
import functools
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

from tracereader.run import program, record


def for_transformers(out: str = "train_trace.json.gz", **plan: object) -> Any:
    """Return a callback for transformers.Trainer that records a few steps into `out`.

    plan: fields of program.RECORDING that differ. Raises BadInput if the trace cannot be written there, ImportError
    without transformers.
    """
    from transformers import TrainerCallback

    begin = _beginning(out, plan)

    class RecordTrace(TrainerCallback):
        def on_train_begin(self, *args: object, **more: object) -> None:
            self.finish = begin()

        def on_train_end(self, *args: object, **more: object) -> None:
            self.finish()

    return RecordTrace()


def for_lightning(out: str = "train_trace.json.gz", **plan: object) -> Any:
    """Return a callback for Lightning's Trainer that records a few steps into `out`.

    plan: fields of program.RECORDING that differ. Raises BadInput if the trace cannot be written there, ImportError
    without lightning or pytorch_lightning. Of the two, the one that the program has imported is taken.
    """
    if "pytorch_lightning" in sys.modules and "lightning.pytorch" not in sys.modules:
        from pytorch_lightning import Callback
    else:
        try:
            from lightning.pytorch import Callback
        except ImportError:
            from pytorch_lightning import Callback

    begin = _beginning(out, plan)

    class RecordTrace(Callback):
        def on_train_start(self, trainer: object, module: object) -> None:
            self.finish = begin()

        def on_train_end(self, trainer: object, module: object) -> None:
            self.finish()

    return RecordTrace()


def _beginning(out: str, plan: dict[str, object]) -> Callable[[], Callable[[], None]]:
    if unknown := plan.keys() - program.RECORDING.keys():
        raise TypeError(
            f"not a field of the plan: {', '.join(sorted(unknown))}; there are {', '.join(program.RECORDING)}"
        )
    return functools.partial(_begin, str(record.trace_path(out, ())), plan)


def _begin(out: str, plan: dict[str, object]) -> Callable[[], None]:
    """Watch for steps from now on. Return what ends that and says what was recorded."""
    if "_tracereader_session" in sys.modules:  # the command records this program already
        return lambda: None
    torch = sys.modules["torch"]  # which the trainer has imported: this package does without
    folder = Path(_common_folder(torch))
    whole = {
        **program.RECORDING, "most": 4 * int(plan.get("least", program.RECORDING["least"])), **plan, "mode": "record",
        "changes": None, "go_on": True, "out": out, "folder": str(folder),
    }  # fmt: skip
    session = _inside("session").Session(torch, whole, _inside)
    if session.leads:  # another rank may end before this one has said what was recorded
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
    session.start()

    def finish() -> None:
        session.at_exit()
        session.finish()
        if session.rank == 0:
            record.tell(folder, 0, bool(whole["modules"]) and not whole["stacks"])

    return finish


def _common_folder(torch: Any) -> str:
    """Return a folder for what the ranks tell each other. All of them have to call this."""
    distributed = torch.distributed
    together = distributed.is_available() and distributed.is_initialized()
    named = [tempfile.mkdtemp(prefix="record-trace-") if not together or distributed.get_rank() == 0 else None]
    if together:
        distributed.broadcast_object_list(named)
        os.makedirs(named[0], exist_ok=True)
    return named[0]


@functools.cache
def _inside(name: str) -> Any:
    """Return the module of a file in inside/, as the command loads it."""
    spec = spec_from_file_location(f"tracereader_inside_{name}", program.INSIDE / f"{name}.py")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
