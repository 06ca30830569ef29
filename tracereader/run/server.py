"""The commands as tools of a Model Context Protocol server, which an agent's program starts. Needs the extra mcp."""

import subprocess
import sys
import tempfile
from collections.abc import Sequence

from tracereader import __version__
from tracereader.command import BadInput, command

LAST = 4_000  # characters of what a recorded program says that are returned


async def record(words: list[str], trace: str, step_at: str = "") -> str:
    """Run a PyTorch program, record a few of its steps, end it, and return what record-trace says.

    words: the command, such as ["python", "train.py"]; the program needs no change, and makes at least 25 steps.
    trace: the file to write, .json.gz. step_at: what ends a step, an annotation or module:function, where record-trace
    finds none. torchrun writes one file for each rank.
    """
    flags = ["--out", trace, *(["--step-at", step_at] if step_at else [])]
    _, said = await _run("tracereader.run.record", [*flags, "--", *words])
    return said[-LAST:]


async def read(traces: list[str], sections: Sequence[str] = ()) -> str:
    """Return what limits a step, what to change and what that saves, as JSON in short.

    traces: one trace of PyTorch's profiler (.json, .json.gz, .pftrace, or a URL), or those of one job's ranks, or their
    folder. sections: in place of the short form, every measurement of these, such as gpu, steps, kernels or cpu.
    """
    only = ["--only", ",".join(sections)] if sections else []
    found, _ = await _run("tracereader", ["--json", *only, "--", *traces])
    return found


async def compare(before: str, after: str) -> str:
    """Return what changed from one trace to another one, or from one folder of a job's ranks to another one."""
    found, _ = await _run("tracereader", ["--", before, after])
    return found


async def _run(module: str, words: Sequence[str]) -> tuple[str, str]:
    """Return what a command prints, and what it says beside that. Raises ToolError with the latter if it fails."""
    import anyio
    from mcp.server.mcpserver.exceptions import ToolError

    words = [sys.executable, "-m", module, *words]
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        # Standard input and output are the server's own.
        process = await anyio.open_process(words, stdin=subprocess.DEVNULL, stdout=out, stderr=err)
        try:
            status = await process.wait()
        finally:
            if process.returncode is None:
                process.terminate()  # the call was cancelled; record-trace then ends the program, too
        for file in (out, err):
            file.seek(0)
        printed, said = (file.read().decode(errors="replace") for file in (out, err))
    if status:
        raise ToolError(said[-LAST:].strip() or f"exit status {status}")
    return printed, said


def server():
    """Return the server. Raises BadInput without the package."""
    try:
        from mcp.server.mcpserver import MCPServer
    except ModuleNotFoundError:
        raise BadInput("the server needs the extra mcp: uvx --from 'read-trace[mcp]' read-trace-mcp") from None
    found = MCPServer("read-trace", version=__version__)
    for tool in (record, read, compare):
        found.tool(structured_output=False)(tool)
    return found


@command
def main(argv: Sequence[str] | None = None) -> None:
    server().run()


if __name__ == "__main__":
    sys.exit(main())
