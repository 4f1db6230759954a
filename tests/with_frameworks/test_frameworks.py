"""Agents of frameworks, unchanged, through the gateway; run by `make test-frameworks`."""

# pyright: reportMissingImports=false

from __future__ import annotations

import asyncio
import json
import shutil
import uuid
from typing import Any

import pytest
from fixtures.served_model import FakeServer, listening
from pydantic import SecretStr

from pipeline.contract.messages import Completion, RolloutRequest
from pipeline.contract.trajectory import unpack_record
from pipeline.settings import Settings
from pipeline.settings.sections import LlmSettings
from workers.llm.connections import close_connections
from workers.process.execution import execute
from workers.process.runtime import Runtime
from workers.sandbox.kinds import choose_local

pytestmark = pytest.mark.timeout(240)
# The suite's own environment has some of the frameworks.
pytest.importorskip(
    "smolagents", reason="no frameworks are installed: make test-frameworks installs them"
)
N_ROLLOUTS = 20
AGENTS = (
    "openai_agents_responses",
    "openai_agents_chat",
    "langgraph",
    "strands",
    "pydantic_ai",
    "smolagents",
)


@pytest.fixture(autouse=True, scope="module")
def _agents() -> None:
    import framework_agents  # registers them

    assert framework_agents


def call_of(name: str, arguments: dict[str, Any], number: int) -> dict[str, Any]:
    function = {"name": name, "arguments": json.dumps(arguments)}
    call = {"index": 0, "id": f"call_{number}", "type": "function", "function": function}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


def adder(body: dict[str, Any]) -> Any:
    """Call the tool once, then answer; smolagents ends by a tool of its own."""
    said = [message for message in body["messages"] if message["role"] != "system"]
    is_told = any(m["role"] == "tool" or "Observation" in str(m.get("content")) for m in said)
    if not is_told:
        return call_of("add", {"a": 2, "b": 3}, 0)
    names = {tool["function"]["name"] for tool in body.get("tools", ())}
    return call_of("final_answer", {"answer": "5"}, 1) if "final_answer" in names else "5"


def request_of(index: int, agent: str, **fields: Any) -> RolloutRequest:
    return RolloutRequest(
        run="frameworks",
        run_id=uuid.UUID(int=7),
        group_id=uuid.UUID(int=13),
        group_no=0,
        rollout_id=uuid.UUID(int=1000 + index),
        rollout_index=index,
        n=N_ROLLOUTS,
        attempt_no=1,
        label=f"frameworks-g000000-r{index}-a1",
        agent=agent,
        **{
            "prompt": {"content": "What is 2 + 3?", "answer": "5"},
            "reward": "exact_match",
            "model": "m-1",
            "agent_config": {"require_model_calls": True},
            **fields,
        },
    )


async def completions_of(
    policy: Any, agent: str, count: int = N_ROLLOUTS, **fields: Any
) -> tuple[list[Completion], FakeServer]:
    server = FakeServer([policy])
    async with listening(server):
        llm = LlmSettings(base_url=SecretStr(server.base_url), server="vllm")
        runtime = Runtime(Settings(llm=llm), "frameworks")
        try:
            requests = [request_of(index, agent, **fields) for index in range(count)]
            return await asyncio.gather(*(execute(one, runtime) for one in requests)), server
        finally:
            await runtime.gateway.close()
            await close_connections()


def require_recorded(completions: list[Completion], server: FakeServer) -> None:
    for completion in completions:
        assert completion.outcome == "succeeded", completion.error
        assert completion.reward == 1.0
        calls = unpack_record(completion.body).calls
        assert len(calls) >= 2
        assert all(call.trainable and call.token_source for call in calls)
    recorded = sum(completion.n_turns for completion in completions)
    assert recorded == len(server.requests), "a call passed by the gateway"


@pytest.mark.parametrize("agent", AGENTS)
async def test_a_frameworks_agent_is_recorded_call_by_call(agent: str) -> None:
    completions, server = await completions_of(adder, agent)
    assert len(completions) == N_ROLLOUTS
    require_recorded(completions, server)


def swe_policy(body: dict[str, Any]) -> Any:
    """Write the answer with the shell, then submit, as mini-swe-agent asks for it."""
    turn = sum(message["role"] == "assistant" for message in body["messages"])
    if turn == 0:
        return call_of("bash", {"command": "echo $((2 + 3)) > answer.txt"}, 0)
    return call_of("bash", {"command": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"}, 1)


@pytest.mark.timeout(900)  # without compiled files its imports take minutes
@pytest.mark.skipif(shutil.which("mini") is None, reason="mini-swe-agent is not installed")
@pytest.mark.skipif(
    choose_local().kind != "bubblewrap" and choose_local().kind != "namespaces",
    reason="no confining sandbox runs here",
)
async def test_mini_swe_agent_solves_a_task_in_the_sandbox() -> None:
    command = [
        shutil.which("mini"),
        "--task",
        "{prompt}",
        "--model",
        "openai/{model}",
        "--yolo",
        "--exit-immediately",
        "--output",
        "trajectory.json",
    ]
    environment = {
        "MSWEA_CONFIGURED": "true",
        "MSWEA_COST_TRACKING": "ignore_errors",
        "MSWEA_SILENT_STARTUP": "1",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    }
    config = {"command": command, "env": environment, "answer": {"file": "answer.txt"}}
    completions, server = await completions_of(swe_policy, "command", count=1, agent_config=config)
    require_recorded(completions, server)
