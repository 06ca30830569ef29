"""Explain one trace of PyTorch's profiler, or say what changed between several."""

import argparse
import gc
import sys
from pathlib import Path

from common import cli, trace


@cli.command
def main(argv=None):
    parser = cli.OneLineParser(
        prog="read_trace.py",
        description=__doc__,
        epilog="examples:\n  uv run read_trace.py traces/01_matmul_add/64_bf16_cold_eager.json\n"
        "  uv run read_trace.py EAGER.json COMPILED.json      what changed, what stayed the same",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("traces", nargs="+", type=Path, metavar="TRACE", help="a .json or .json.gz file")
    parser.add_argument("--json", action="store_true", help="print the facts of one trace as JSON")
    parser.add_argument(
        "--limit", type=cli.positive, default=trace.DEFAULT_LIMIT, metavar="BYTES",
        help="the most JSON to read from one file, unpacked (4 GB)",
    )
    cli.add_view_flags(parser)
    args = parser.parse_args(argv)
    if args.open and len(args.traces) > 1:
        raise cli.BadInput("--open takes one trace")
    if args.json and len(args.traces) > 1:
        raise cli.BadInput("--json takes one trace")

    from common import facts, perfetto, report  # after --help, which is then there at once

    try:
        traces = [trace.read(path, args.limit) for path in args.traces]
    except trace.TraceError as problem:
        raise cli.BadInput(problem) from None
    if args.json:
        report.as_json(facts.facts(traces[0]))
    elif len(traces) == 1:
        report.explain(traces[0], report.View.of(args))
    else:
        report.side_by_side(traces)
    if args.open:
        perfetto.hand_over(args.traces[0])


if __name__ == "__main__":
    gc.disable()  # all that is made lives to the end, and looking for garbage in a large trace takes seconds
    sys.exit(main())
