import subprocess
import sys
from importlib.util import find_spec
from typing import Any

import pytest

from workers.agents.tool_agent import ToolAgent
from workers.core.model_response import ModelResponse, NativeToolCall
from workers.tools.mcp_tools import mcp_tools

pytestmark = pytest.mark.skipif(find_spec("mcp") is None, reason="mcp is not installed")

SERVER = '''
import os

from mcp.server import MCPServer

server = MCPServer("shelf")


@server.tool()
def add(a: int, b: int = 1) -> str:
    """Add two numbers."""
    return f"sum {a + b}"


@server.tool()
def fail() -> str:
    """Always fails."""
    raise RuntimeError("broken shelf")


@server.tool()
def variable(name: str) -> str:
    """Read a variable."""
    return os.environ.get(name, "not set")


server.run("stdio")
'''


@pytest.fixture
def server(tmp_path):
    path = tmp_path / "server.py"
    path.write_text(SERVER)
    return {"command": sys.executable, "args": [str(path)]}


async def test_an_agent_uses_the_tools_of_a_real_server(server):
    requests: list[list[dict[str, Any]]] = []
    shown: list[dict[str, Any]] = []

    async def model(messages: list[dict[str, Any]], **options: Any) -> ModelResponse:
        requests.append(messages)
        shown.extend(options["tools"])
        if len(requests) > 1:
            return ModelResponse("done")
        calls = (NativeToolCall("1", "add", '{"a": 2, "b": 3}'), NativeToolCall("2", "fail", "{}"))
        return ModelResponse("", calls)

    async with mcp_tools(**server) as tools:
        assert sorted(tools) == ["add", "fail", "variable"]
        agent = ToolAgent()
        agent.set_tools(tools)
        trajectory = await agent.run_trajectory({"content": "q"}, model, "r")
    add = shown[0]["function"]
    assert add["description"] == "Add two numbers."
    assert add["parameters"]["properties"]["a"]["type"] == "integer"
    told = [m["content"] for m in requests[1] if m["role"] == "tool"]
    assert told[0] == "sum 5"
    assert told[1].startswith("Error: ")
    assert trajectory.metadata["tools"] == {
        "add": {"calls": 1, "errors": 0},
        "fail": {"calls": 1, "errors": 1},
    }


def test_a_server_opens_where_stderr_is_no_file(server):
    code = (
        "import asyncio, io, sys\n"
        "sys.stderr = io.StringIO()\n"
        "from workers.tools.mcp_tools import mcp_tools\n"
        "async def main():\n"
        f"    async with mcp_tools(**{server!r}) as tools:\n"
        "        print(*tools)\n"
        "asyncio.run(main())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout.split()) == (0, ["add", "fail", "variable"])


async def test_the_server_sees_nothing_of_this_processs_environment(server, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    async with mcp_tools(**server, env={"SHELF": "own"}, name_prefix="shelf_") as tools:
        read = tools["shelf_variable"].execute_tool
        assert (await read("i", {"name": "OPENAI_API_KEY"})).result == "not set"
        assert (await read("i", {"name": "SHELF"})).result == "own"


async def test_wrong_arguments_are_the_servers_to_refuse(server):
    async with mcp_tools(**server) as tools:
        result = await tools["add"].execute_tool("i", {"a": "many"})
    assert not result.success
    assert result.error


@pytest.mark.parametrize("wrong", [{}, {"command": "x", "url": "http://127.0.0.1:1/mcp"}])
async def test_one_server_is_named(wrong):
    with pytest.raises(ValueError, match="give either command"):
        async with mcp_tools(**wrong):
            pass
