"""MCP servers by name: opened once, opened again after their end, and named by a run."""

from __future__ import annotations

import asyncio
import json
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from fixtures.scripted_worker import ScriptedWorker
from fixtures.stored_run import StoredRun
from sqlalchemy import Engine

from pipeline.contract.trajectory import unpack_record
from pipeline.redaction import Redactor
from rollout.app import run_command
from workers.core.tool_call import invoke_tool
from workers.tools.mcp_servers import MCPServerError, MCPServers

pytestmark = pytest.mark.skipif(find_spec("mcp") is None, reason="mcp is not installed")

SERVER = '''
import os
import sys

from mcp.server import MCPServer

open(sys.argv[1], "a").write("x")
server = MCPServer("shelf")


@server.tool()
def add(a: int, b: int = 1) -> str:
    """Add two numbers."""
    return f"sum {a + b}"


@server.tool()
def key() -> str:
    """Read a variable."""
    return os.environ.get("SHELF_KEY", "not set")


@server.tool()
def fail() -> str:
    """Always fails."""
    raise RuntimeError("broken shelf")


@server.tool()
def die() -> str:
    """End the server."""
    os._exit(3)


server.run("stdio")
'''


@pytest.fixture
def shelf(tmp_path: Path) -> dict[str, Any]:
    path = tmp_path / "server.py"
    path.write_text(SERVER)
    return {"command": sys.executable, "args": [str(path), str(tmp_path / "starts")]}


def starts(tmp_path: Path) -> int:
    return len((tmp_path / "starts").read_text())


async def test_a_server_is_opened_once_and_again_after_its_end(shelf, tmp_path):
    servers = MCPServers({"shelf": shelf, "unused": {"command": "/nowhere"}})
    try:
        tools = await servers.tools(["shelf"])
        assert await servers.tools(["shelf"]) != {}
        assert (await tools["add"].execute_tool("t", {"a": 2})).result == "sum 3"
        assert "executing tool fail" in (await invoke_tool(tools["fail"], "t", {})).to_text()
        assert starts(tmp_path) == 1
        died = await invoke_tool(tools["die"], "t", {})
        assert (died.success, "Connection closed" in (died.error or "")) == (False, True)
        assert (await tools["add"].execute_tool("t", {"a": 2})).result == "sum 3"
        assert starts(tmp_path) == 2
    finally:
        await servers.close()


async def test_a_server_that_is_unknown_or_does_not_start_is_told():
    servers = MCPServers({"gone": {"command": "/nowhere"}, "away": {"command": sys.executable}})
    with pytest.raises(ValueError, match=r"No MCP server is named 'shelf' .* Known: gone, away"):
        await servers.tools(["shelf"])
    with pytest.raises(MCPServerError, match="'gone' could not be opened: FileNotFoundError"):
        await servers.tools(["gone"])


async def test_a_server_that_never_answers_is_given_up():
    servers = MCPServers({"mute": {"command": "sleep", "args": ["60"]}}, open_timeout_s=0.5)
    with pytest.raises(MCPServerError, match=r"no answer within 0\.5 s"):
        await servers.tools(["mute"])


async def test_calls_that_wait_for_a_server_share_its_failure(tmp_path):
    servers = MCPServers(
        {"ends": {"command": "sh", "args": ["-c", f"printf x >> {tmp_path}/starts"]}}
    )
    waiting = [servers.tools(["ends"]) for _ in range(20)]
    errors = await asyncio.gather(*waiting, return_exceptions=True)
    assert {type(error) for error in errors} == {MCPServerError}
    assert starts(tmp_path) == 1
    with pytest.raises(MCPServerError):
        await servers.tools(["ends"])
    assert starts(tmp_path) == 2


def test_the_doctor_opens_each_server_once(shelf, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    servers = {
        "shelf": {**shelf, "env": {"SHELF_KEY": "a-secret-key"}},
        "gone": {"command": "/nowhere/a-secret-key"},
    }
    monkeypatch.setenv("ROLLOUT_WORKER__MCP", json.dumps(servers))
    run_command(["doctor", "--json"])
    shown = {check["name"]: check for check in json.loads(capsys.readouterr().out)["checks"]}
    found, gone = shown["mcp:shelf"], shown["mcp:gone"]
    assert (found["status"], found["detail"]) == ("ok", "tools: add, key, fail, die")
    assert gone["status"] == "failed"
    assert "could not be opened: FileNotFoundError" in gone["detail"]
    assert "/nowhere/***" in gone["detail"]
    assert gone["remedy"].startswith("Correct worker.mcp.gone")
    assert starts(tmp_path) == 1


async def test_tools_of_equal_names_need_a_prefix(shelf):
    servers = MCPServers({"a": shelf, "b": shelf, "c": {**shelf, "name_prefix": "c_"}})
    try:
        assert {"add", "c_add"} <= (await servers.tools(["a", "c"])).keys()
        with pytest.raises(ValueError, match="give 'b' a name_prefix"):
            await servers.tools(["a", "b"])
    finally:
        await servers.close()


def test_a_run_names_a_server_of_the_workers_settings(engine: Engine, make_settings, shelf):
    shelf = {**shelf, "env": {"SHELF_KEY": "a-secret-key"}, "name_prefix": "shelf_"}
    settings = make_settings(
        llm={"base_url": "http://127.0.0.1:9/v1"}, worker={"mcp": {"shelf": shelf}}
    )
    replies = (
        "Action: shelf_add(a=0, b=1)",
        "Action: shelf_key()",
        "Action: calculator(expression='0 + 1')",
        "Final Answer: 1",
    )
    worker = ScriptedWorker(settings, *replies)
    worker.runtime.redactor = Redactor.of(settings, {})
    story = StoredRun(engine, agent="react", tools=("mcp:shelf", "calculator"))
    (said,) = worker.work(story)
    assert said.reward == 1.0
    record = unpack_record(said.body)
    shown = [step["content"] for step in record.steps if step["step_type"] == "action_result"]
    assert shown == ["sum 1", "***", "1"]


@pytest.mark.parametrize(
    ("configured", "error_class", "code", "words"),
    [
        ({}, "contract", "agent_setup", "No MCP server is named 'shelf'"),
        ({"shelf": {"command": "/nowhere"}}, "sandbox", "mcp_server", "could not be opened"),
    ],
)
def test_a_rollout_whose_server_is_missing_is_an_error(
    engine: Engine, make_settings, configured, error_class, code, words
):
    llm = {"base_url": "http://127.0.0.1:9/v1"}
    worker = ScriptedWorker(make_settings(llm=llm, worker={"mcp": configured}))
    story = StoredRun(engine, agent="react", tools=("mcp:shelf",))
    (said,) = worker.work(story)
    assert said.error is not None
    assert (said.error.error_class, said.error.code) == (error_class, code)
    assert words in said.error.message
