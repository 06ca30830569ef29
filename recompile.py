"""Call a model with changing inputs: is it compiled again, and is it right?

Calls a numbered script's model twice with each input and times both calls.
--trace FILE also records each call as a step; the times then include the
profiler's cost.

  uv run recompile.py 02_linear.py --strides --compile
  uv run recompile.py 03_simple_mlp.py --seq 128 256 64 200 --compile
  uv run recompile.py 03_kernels_mlp.py --seq 128 256 64 200
  uv run recompile.py 02_linear.py --strides --compile --trace guard.json

Choose how the inputs differ. --strides: the script's input, then one that is
transposed in memory. Or give several whole numbers to one of the script's
flags, and each makes an input. All other flags are the script's own.
"""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from common.flags import advice, declared_by, load_script, one_by_one, several_numbers
from tracereader.command import BadInput, OneLineParser, command


def recompile(argv: Sequence[str] | None = None) -> None:
    parser = OneLineParser(
        prog="recompile.py", usage="%(prog)s SCRIPT (--strides | --FLAG N N …) [the script's flags]",
        description=(__doc__ or "").strip(),
    )  # fmt: skip
    parser.add_argument("script", metavar="SCRIPT", type=Path, help="a numbered script")
    parser.add_argument("--strides", action="store_true", help="call it with the input, then with one of other strides")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="write a trace of the calls, each one a step")
    parsed, words = parser.parse_known_args(argv)
    if parsed.strides:
        flag, argvs = "", {0: words}
    else:
        flag, argvs = _inputs_of(parsed.script, words)
    script = load_script(parsed.script, next(iter(argvs.values())))

    import torch

    from common.harness import prepare
    from common.memory import within_memory
    from tracereader.show.text import console, paragraph, print_columns, print_whole, seconds, shown_path

    settled = {value: prepare(script.flags(some)) for value, some in argvs.items()}
    args = next(iter(settled.values()))
    with within_memory(args.device), torch.no_grad():
        model, *first = script.build(args)
        if not first:
            raise BadInput(f"{parsed.script}: its model is not called with an input that could differ")
        fn = torch.compile(model, mode=args.compile) if args.compile else model
        if parsed.strides:
            inputs = {"as it is": first, "transposed": [x.mT.contiguous().mT for x in first]}
        else:
            inputs = {f"{flag.removeprefix('--')} {value}": script.build(one)[1:] for value, one in settled.items()}
        references = [_reference(model, some, name) for name, some in inputs.items()]
        with _recorded(parsed.trace, args, 2 * len(inputs)) as done:
            rows = [
                (name, *_called(fn, some, reference, name, args.device, done))
                for (name, some), reference in zip(inputs.items(), references, strict=True)
            ]
    out = console()
    out.print(f"[bold]{parsed.script.stem}, {'torch.compile' if args.compile else 'no torch.compile'}[/bold]")
    rows = [
        (name, seconds(once), seconds(again), str(graphs), f"{error:.1e}") for name, once, again, graphs, error in rows
    ]
    print_columns(out, ("input", "first call", "again", "graphs by then", "relative error"), rows)
    paragraph(out, "again: the second call; graphs by then: compiled so far; relative error: compared with eager")
    if parsed.trace:
        print_whole(out, shown_path(parsed.trace), "the trace")


def _inputs_of(file: Path, words: Sequence[str]) -> tuple[str, dict[int, list[str]]]:
    """Return what one_by_one() does. If no flag gives several inputs, the error names both ways to give them."""
    sizes = () if several_numbers(words) else [one for one in declared_by(file) if one.shape]
    if not sizes:
        return one_by_one(words)
    size, least = sizes[0].name, sizes[0].options["default"]
    raise BadInput(
        "say how the inputs differ: --strides, or one flag with several whole numbers, "
        f"as in {size} {least} {2 * least}"
    )


def _reference(model, inputs, name: str):
    import torch

    try:
        out = model(*inputs)
    except RuntimeError as problem:
        if "memory" in str(problem):
            raise
        raise BadInput(f"{name} makes another model, not only another input for the first one") from None
    if not isinstance(out, torch.Tensor):
        raise BadInput(f"the model computes no tensor, but {type(out).__name__}: nothing to compare by")
    return out


@contextlib.contextmanager
def _recorded(file: Path | None, args, calls: int) -> Iterator[Callable[[], None]]:
    """Record `calls` steps and write them to the file atomically. Yields the function that ends a step."""
    if file is None:
        yield lambda: None
        return
    from torch.profiler import profile, schedule

    from common.harness import activities, export
    from common.publish import finish_trace, published, require_writable

    require_writable(file.parent)
    with profile(activities=activities(args), schedule=schedule(wait=0, warmup=1, active=calls, repeat=1)) as prof:
        prof.step()
        yield prof.step
    with published(file.parent, file.name) as (unfinished,):
        export(prof, unfinished)
        finish_trace(unfinished)


def _called(fn, inputs, reference, name: str, device, done: Callable[[], None]) -> tuple[float, float, int, float]:
    """Return the seconds of the first and the second call, the number of Dynamo's graphs, the error against eager."""
    from torch._dynamo.utils import counters
    from torch.profiler import record_function

    from common.harness import relative_error
    from common.speed import synchronize

    times = []
    for _ in range(2):
        synchronize(device)
        start = time.perf_counter()
        with record_function(name):
            out = fn(*inputs)
        synchronize(device)
        times.append(time.perf_counter() - start)
        done()
    return *times, counters["stats"]["unique_graphs"], relative_error(out, reference)


main = command(recompile, advice)
if __name__ == "__main__":
    sys.exit(main())
