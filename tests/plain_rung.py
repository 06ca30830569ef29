"""Run a numbered script's own step again and again without its profiler: plain_rung.py SCRIPT.py [flags].

record-trace gives way to a program that profiles itself, as the numbered scripts do.
"""

import contextlib
import importlib.util
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
CALLS = 3000


class _Calls(list):
    unprofiled_us = None
    code, first_call_s = (), 0.0


class _NoProfiler(contextlib.nullcontext):
    def __enter__(self):
        return self

    def step(self):
        pass


def main():
    file, argv = Path(sys.argv[1]).resolve(), sys.argv[2:]
    sys.argv = [str(file), *argv]
    from common import harness

    harness.warm_up = lambda step, args: _Calls([step] * CALLS)
    harness.unprofiled_step_us = lambda step, args: None
    harness.profiler = lambda args: _NoProfiler()
    harness.save = lambda *args, **facts: None
    spec = importlib.util.spec_from_file_location(file.stem, file)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    args = harness.prepare(script.flags(argv), script.predictions)
    script.profiled(args, *script.build(args))


if __name__ == "__main__":
    main()
