"""Run a numbered script's own step again and again without its profiler: plain_rung.py SCRIPT.py [flags].

record-trace gives way to a program that profiles itself, as the numbered scripts do. If nothing ends it earlier, it
prints how long a step takes (µs), the device's work included.
"""

import importlib.util
import itertools
import os
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
SECONDS = float(os.environ.get("RUNG_SECONDS", 100))  # record-trace ends it before that
WARM = 0.3  # as much time before that is not counted


def main():
    file, argv = Path(sys.argv[1]).resolve(), sys.argv[2:]
    sys.argv = [str(file), *argv]
    from common import harness

    tokens, positions, numbers = None, [], itertools.count()

    def repeated(step, args, until):
        start, before = time.perf_counter(), next(numbers)
        while time.perf_counter() < start + until:
            step()
            number = next(numbers)
            if positions and number % tokens == 0:
                positions[0].fill_(args.prompt)  # a decoder's text has room for this many tokens
        harness.synchronize(args.device)
        return (time.perf_counter() - start) / (number - before) * 1e6

    def only_steps(step, args):
        repeated(step, args, WARM * SECONDS)
        print(repeated(step, args, SECONDS))
        raise SystemExit

    harness.warm_up = only_steps
    spec = importlib.util.spec_from_file_location(file.stem, file)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    args = harness.prepare(script.flags(argv), script.predictions)
    if file.stem == "05_llm":
        from common import decoder, llm_flags

        tokens = llm_flags.tokens_written(args) - 2
        keep_address = decoder.keep_address

        def keep(text, position):
            positions.append(position)
            keep_address(text, position)

        decoder.keep_address = keep
    script.profiled(args, *script.build(args))


if __name__ == "__main__":
    main()
