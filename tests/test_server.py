"""The tools that an agent's program calls over the Model Context Protocol, by the package's own client in memory."""

import importlib.util
import json
import os
import re
import select
import sys

import pytest
from references import CHANGES, ROOT
from test_json import jobs

from tracereader import cli
from tracereader.run import server

NEEDS_MCP = pytest.mark.skipif(importlib.util.find_spec("mcp") is None, reason="needs the extra mcp")
EAGER, GRAPH = str(CHANGES / "vit/eager.json.gz"), str(CHANGES / "vit/graph.json.gz")


@pytest.fixture
def call(monkeypatch):
    """Return a function that calls a tool and returns whether it failed, and its text."""
    import anyio
    from mcp.client import Client

    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("COLUMNS", "140")  # what Python's readline sets is not in os.environ, but a command inherits it

    def called(tool, **arguments):
        async def once():
            async with Client(server.server()) as client:
                listed = await client.list_tools()
                assert {one.name for one in listed.tools} == {"record", "read", "compare"}
                assert all(one.description for one in listed.tools)
                return await client.call_tool(tool, arguments)

        found = anyio.run(once)
        return found.is_error, "".join(part.text for part in found.content)

    return called


def printed(capsys, *words):
    assert cli.main(list(map(str, words))) == 0
    return capsys.readouterr().out


@NEEDS_MCP
def test_a_trace_is_read(call, capsys):
    assert call("read", traces=[EAGER]) == (False, printed(capsys, EAGER, "--json"))
    ranks = [str(path) for path in jobs()[0]]
    assert call("read", traces=ranks) == (False, printed(capsys, *ranks, "--json"))
    failed, text = call("read", traces=[EAGER], sections=["steps", "gpu"])
    assert not failed and text == printed(capsys, EAGER, "--json", "--only", "steps,gpu")


@NEEDS_MCP
def test_two_traces_are_compared(call, capsys):
    assert call("compare", before=EAGER, after=GRAPH) == (False, printed(capsys, EAGER, GRAPH))


@NEEDS_MCP
def test_what_is_wrong_is_told(call, tmp_path):
    failed, text = call("read", traces=[str(tmp_path / "none.json")])
    assert failed and "none.json" in text and "Traceback" not in text
    failed, text = call("record", words=["no-such-command"], trace=str(tmp_path / "x.json.gz"))
    assert failed and "no such command" in text


@NEEDS_MCP
@pytest.mark.exhaustive
def test_a_program_is_recorded(call, tmp_path):
    from test_action import PROGRAM

    (tmp_path / "train.py").write_text(PROGRAM.format(layers=2))
    trace = tmp_path / "train.json.gz"
    failed, text = call("record", words=[sys.executable, str(tmp_path / "train.py")], trace=str(trace))
    recorded = re.search(r"(\d+) steps in", text)  # four, or more if the machine made some steps slow
    assert not failed and int(recorded[1]) >= 4 and trace.exists()
    failed, text = call("read", traces=[str(trace)])
    assert not failed and len(json.loads(text)["steps"]) == int(recorded[1])


@NEEDS_MCP
def test_a_cancelled_recording_ends_the_program(tmp_path, monkeypatch):
    """The program holds one end of a pipe, which the system closes when the program ends."""
    import anyio

    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    program, pipe = tmp_path / "waits.py", tmp_path / "pipe"
    program.write_text(
        f"import time\nend = open({str(pipe)!r}, 'w')\nprint('here', file=end, flush=True)\ntime.sleep(600)"
    )
    os.mkfifo(pipe)
    ours = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)

    async def once():
        async with anyio.create_task_group() as group:
            group.start_soon(server.record, [sys.executable, str(program)], str(tmp_path / "x.json.gz"))
            while not select.select([ours], [], [], 0)[0] or not os.read(ours, 5):
                await anyio.sleep(0.05)
            group.cancel_scope.cancel()

    anyio.run(once)
    assert select.select([ours], [], [], 60)[0] and os.read(ours, 5) == b""
    os.close(ours)


def test_without_the_package_the_extra_is_named(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "mcp.server.mcpserver", None)
    assert server.main([]) == 2
    assert "read-trace[mcp]" in capsys.readouterr().err
