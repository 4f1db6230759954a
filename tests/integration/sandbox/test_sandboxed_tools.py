from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from workers.core.tool_call import invoke_tool
from workers.core.tools_config import create_tools
from workers.sandbox import shared
from workers.sandbox.base import SandboxFailure
from workers.sandbox.kinds import open_sandbox
from workers.tools.bash_executor_tool import BashExecutorTool
from workers.tools.file_editor_tool import FileEditorTool
from workers.tools.search_tool import SearchTool

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
async def bash() -> AsyncIterator[BashExecutorTool]:
    tool = BashExecutorTool()
    yield tool
    await tool.release_instance("t")


async def test_output_and_exit_code_are_told(bash: BashExecutorTool) -> None:
    result = await bash.execute_tool("t", {"command": "echo hi; echo oops >&2"})
    assert result.success
    assert result.to_text() == "hi\n[stderr]\noops"
    failed = await bash.execute_tool("t", {"command": "echo why; exit 3"})
    assert not failed.success
    assert failed.to_text() == "Error: the command ended with exit code 3\nwhy"
    assert failed.metrics["exit_code"] == 3
    assert (await bash.execute_tool("t", {"command": "true"})).to_text() == "(no output)"


async def test_timeout_is_told_with_the_output_so_far(bash: BashExecutorTool) -> None:
    begun = time.monotonic()
    result = await bash.execute_tool("t", {"command": "echo begun; sleep 100", "timeout": 0.5})
    assert time.monotonic() - begun < 30
    assert not result.success
    assert re.search(r"killed after \d+\.\d s", result.error or "")
    assert "begun" in (result.error or "")
    assert result.metrics["timed_out"]


async def test_files_stay_between_calls_and_working_directory_is_relative(
    bash: BashExecutorTool,
) -> None:
    await bash.execute_tool("t", {"command": "mkdir -p a && echo x > a/f"})
    result = await bash.execute_tool("t", {"command": "cat f", "working_directory": "a"})
    assert result.to_text() == "x"
    missing = await bash.execute_tool("t", {"command": "true", "working_directory": "none"})
    assert not missing.success


async def test_long_output_is_cut_with_a_notice() -> None:
    tool = BashExecutorTool({"max_output_chars": 100})
    result = await tool.execute_tool("t", {"command": "seq 10000"})
    await tool.release_instance("t")
    assert "characters cut" in result.to_text()
    assert len(result.to_text()) < 200
    assert result.metrics["truncated"]


@pytest.mark.parametrize("given", [{}, {"command": 3}, {"command": "x\0y"}])
async def test_bad_call_is_told(bash: BashExecutorTool, given: dict[str, Any]) -> None:
    assert not (await bash.execute_tool("t", given)).success


async def test_secrets_of_the_worker_are_not_in_the_environment(
    bash: BashExecutorTool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ANTHROPIC_API_KEY", "sk-secret")
    result = await bash.execute_tool("t", {"command": "env; set"})
    assert "sk-secret" not in result.to_text()


async def test_tools_of_a_trajectory_share_their_files_and_release_them_together() -> None:
    tools = create_tools({"bash_executor": {}, "file_editor": {}, "search": {}})
    edit = {"command": "create", "path": "greet.sh", "file_text": "echo hello world"}
    assert (await invoke_tool(tools["file_editor"], "t1", edit)).success
    ran = await invoke_tool(tools["bash_executor"], "t1", {"command": "sh greet.sh; pwd"})
    assert ran.to_text().startswith("hello world\n")
    found = await invoke_tool(tools["search"], "t1", {"pattern": "hello"})
    assert found.to_text() == "greet.sh:1: echo hello world"
    other = await invoke_tool(tools["bash_executor"], "t2", {"command": "ls"})
    assert other.to_text() == "(no output)"
    root = Path(ran.to_text().splitlines()[1])
    for name in ("bash_executor", "file_editor"):
        await tools[name].release_instance("t1")
    assert root.exists()
    await tools["search"].release_instance("t1")
    assert not root.exists()
    await tools["bash_executor"].release_instance("t2")
    assert not shared.SHARED._shares


async def test_tools_with_a_directory_of_their_own_work_there(tmp_path: Path) -> None:
    config = {"root": str(tmp_path)}
    bash, editor = BashExecutorTool(config), FileEditorTool(config)
    await asyncio.gather(
        bash.execute_tool("t1", {"command": "echo one > one.txt"}),
        bash.execute_tool("t2", {"command": "echo two > two.txt"}),
        editor.execute_tool("t3", {"command": "create", "path": "3.txt", "file_text": "three"}),
    )
    listed = await bash.execute_tool("t1", {"command": "cat *.txt && echo more >> 3.txt"})
    assert listed.to_text() == "three\none\ntwo" or listed.to_text() == "threeone\ntwo"
    for instance in ("t1", "t2"):
        await bash.release_instance(instance)
    assert {path.stat().st_uid for path in tmp_path.iterdir()} == {tmp_path.stat().st_uid}


async def test_a_given_sandbox_is_used_and_left_open(tmp_path: Path) -> None:
    async with await open_sandbox(root=tmp_path) as opened:
        tools = [tool({"sandbox": opened}) for tool in (BashExecutorTool, SearchTool)]
        await tools[0].execute_tool("t", {"command": "echo needle > f.txt"})
        found = await tools[1].execute_tool("t", {"pattern": "needle"})
        assert found.metrics["matches"] == 1
        for tool in tools:
            await tool.release_instance("t")
        assert (await opened.run("true")).succeeded


async def test_sandbox_that_will_not_start_is_no_result_of_the_tool(tmp_path: Path) -> None:
    tool = BashExecutorTool({"root": str(tmp_path / "nowhere")})
    with pytest.raises(SandboxFailure):
        await invoke_tool(tool, "t", {"command": "true"})
    assert not shared.SHARED._shares


def test_unknown_limit_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="Known: cpu_s"):
        BashExecutorTool({"limits": {"memory": 1}})


async def test_twenty_trajectories_work_side_by_side() -> None:
    tool = BashExecutorTool()
    command = {"command": "echo $RANDOM > f; sleep 0.1; cat f | wc -l; ls | wc -l"}
    results = await asyncio.gather(*(tool.execute_tool(f"t{n}", command) for n in range(20)))
    assert {result.to_text() for result in results} == {"1\n1"}
    for number in range(20):
        await tool.release_instance(f"t{number}")
    assert not shared.SHARED._shares
