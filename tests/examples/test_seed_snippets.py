"""Every Python snippet of the library's description, run as it is written there.

What a snippet leaves open is filled in from outside: the names it does not define are in the
namespace it runs in, and of a body that is only a comment the one line `pass` is replaced.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from workers import agentic_rollout
from workers.agentic_rollout import AgenticRollout, AgenticRolloutConfig, create_agentic_rollout
from workers.core.trajectory import StepType, Trajectory, TrajectoryStep
from workers.llm.connections import close_connections
from workers.verl.data_proto import DataProto

ROOT = Path(__file__).resolve().parents[2]
TEXT = (Path(__file__).parent / "seed_snippets.txt").read_text()
SNIPPETS = dict(re.findall(r"^## (\w+)\n\n```python\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL))
RUN_HERE = {
    "basic_usage_example",
    "standalone_agent_with_tools",
    "custom_agent_implementation",
    "verl_integration",
    "multi_model_support",
    "agenticrolloutconfig_options",
    "trajectory_analysis",
    "custom_tool_integration",
    "batch_processing",
    "integration_with_verl",
}


async def run_snippet(name: str, open_names: dict[str, Any], **filled_in: str) -> dict[str, Any]:
    """Run a snippet, with top-level await as in a notebook; returns its names."""
    source = SNIPPETS[name]
    for placeholder, code in filled_in.items():
        assert len(re.findall(rf"\b{placeholder}\b", source)) == 1
        source = re.sub(rf"\b{placeholder}\b", code, source)
    namespace = {**open_names, "__name__": "snippet"}
    code = compile(source, name, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
    given = eval(code, namespace)
    if inspect.isawaitable(given):
        await given
    return namespace


def scripted(*replies: str):
    """Make a model that answers by the turn of the conversation."""

    async def llm(messages, max_tokens=512, temperature=0.7, **kwargs):
        turn = sum(message["role"] == "assistant" for message in messages)
        return replies[min(turn, len(replies) - 1)]

    return llm


def test_every_snippet_is_run_here():
    assert set(SNIPPETS) == RUN_HERE


async def test_basic_usage(capsys):
    await run_snippet(
        "basic_usage_example",
        {"scripted": scripted("Thought: multiply\nFinal Answer: 360")},
        **{"pass": "return await scripted(messages)"},
    )
    assert capsys.readouterr().out == "Final response: 360\nTotal steps: 3\n"


async def test_a_standalone_agent_with_tools():
    llm = scripted("Action: calculator(expression='144 ** 0.5')", "Final Answer: 12")
    names = await run_snippet(
        "standalone_agent_with_tools",
        {
            "AgenticRollout": AgenticRollout,
            "AgenticRolloutConfig": AgenticRolloutConfig,
            "your_llm_func": llm,
        },
    )
    trajectory = names["result"]
    assert trajectory.get_final_response() == "12"
    assert trajectory.steps[2].tool_result == {"result": 12.0, "expression": "144 ** 0.5"}
    assert trajectory.metadata["tools"] == {"calculator": {"calls": 1, "errors": 0}}


async def test_a_custom_agent_calls_its_tool():
    names = await run_snippet(
        "custom_agent_implementation",
        {"Trajectory": Trajectory, "TrajectoryStep": TrajectoryStep, "StepType": StepType},
    )
    agent = names["agent"]
    agent.set_tools({"double": lambda n: n * 2})
    llm = scripted("I will double.\nAction: double(n=21)", "Final Answer: 42")
    trajectory = await agent.run_trajectory({"content": "Twice 21?"}, llm, "r")
    assert [step.step_type.value for step in trajectory.steps] == [
        "observation",
        "action",
        "action_result",
        "final_answer",
    ]
    assert trajectory.is_completed


async def test_it_is_used_as_a_rollout_of_verl(monkeypatch):
    """Under the names it has inside verl; verl's own batch class is stood in for."""
    torch = types.SimpleNamespace(from_numpy=lambda column: column)
    package = types.ModuleType("verl")
    modules = {
        "verl": package,
        "verl.workers": types.ModuleType("verl.workers"),
        "verl.workers.rollout": types.ModuleType("verl.workers.rollout"),
        "verl.workers.rollout.agentic_rollout": agentic_rollout,
        "verl.protocol": types.SimpleNamespace(DataProto=DataProto),
        "torch": torch,
    }
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    names = await run_snippet(
        "verl_integration",
        {
            "config": AgenticRolloutConfig(),
            "llm_generate_func": scripted("Final Answer: 4"),
            "tokenizer": Characters(),
            "input_prompts": DataProto.from_dict(non_tensors={"raw_prompt": ["2 + 2?"]}),
        },
    )
    output = names["output_data"]
    assert list(output.non_tensor_batch["response"]) == ["4"]
    assert output.batch["response_mask"].sum() == len("Final Answer: 4")


class Characters:
    pad_token_id = 0

    def encode(self, text: str) -> list[int]:
        return [ord(char) for char in text]


async def test_several_providers(endpoint, monkeypatch):
    pytest.importorskip("anthropic")
    monkeypatch.syspath_prepend(str(ROOT))
    monkeypatch.setenv("OPENAI_BASE_URL", f"{endpoint.url}/v1")
    monkeypatch.setenv("ANTHROPIC_BASE_URL", endpoint.url)
    names = await run_snippet(
        "multi_model_support",
        {"AgenticRollout": AgenticRollout, "config": AgenticRolloutConfig()},
    )
    rollout = names["rollout"]
    for llm in (names["claude_llm_func"], names["openai_llm_func"]):
        trajectory = await rollout.agent.run_trajectory({"content": "Hi"}, llm, "r")
        assert trajectory.get_final_response() == "from the endpoint"
    await close_connections()
    assert endpoint.paths == ["/v1/messages", "/v1/chat/completions"]
    assert endpoint.keys == ["your-key", "your-key"]


async def test_every_option_of_the_configuration(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = await run_snippet(
        "agenticrolloutconfig_options", {"AgenticRolloutConfig": AgenticRolloutConfig}
    )
    rollout = AgenticRollout(names["config"], scripted("Final Answer: 4"))
    assert set(rollout.tools) == {"calculator", "search"}
    assert rollout.tools["calculator"].precision == 10
    await rollout.run_batch([{"content": "2 + 2?", "request_id": "sum"}])
    saved = json.loads((tmp_path / "trajectories" / "sum.json").read_text())
    assert saved["steps"][-1]["content"] == "4"


async def test_trajectory_analysis(tmp_path, monkeypatch, capsys):
    class Agent:
        """Takes the dots that stand for the arguments."""

        async def run_trajectory(self, dots: Any) -> Trajectory:
            rollout = AgenticRollout(AgenticRolloutConfig(), scripted("Final Answer: 4"))
            return (await rollout.run_batch(["2 + 2?"]))[0]

    monkeypatch.chdir(tmp_path)
    await run_snippet("trajectory_analysis", {"agent": Agent(), "json": json})
    printed = capsys.readouterr().out
    assert printed == "Total steps: 2\nTool calls: 0\nFinal reward: 0.0\n"
    exported = json.loads((tmp_path / "trajectory.json").read_text())
    assert Trajectory.from_dict(exported).get_final_response() == "4"


async def test_a_custom_tool():
    rollout = AgenticRollout(AgenticRolloutConfig())
    names = await run_snippet("custom_tool_integration", {"rollout": rollout})

    async def search_web(self, query):
        return [f"{query} {number}" for number in range(9)]

    monkey: Any = names["WebSearchTool"]
    monkey.search_web = search_web
    llm = scripted("Action: web_search(query='cats', max_results=2)", "Final Answer: found")
    trajectory = await rollout.agent.run_trajectory({"content": "cats?"}, llm, "r")
    assert trajectory.steps[2].tool_result == {
        "query": "cats",
        "results": ["cats 0", "cats 1"],
        "found": 9,
    }


async def test_batch_processing():
    names = await run_snippet(
        "batch_processing",
        {
            "AgenticRollout": AgenticRollout,
            "AgenticRolloutConfig": AgenticRolloutConfig,
            "llm_func": scripted("Final Answer: done"),
        },
    )
    assert [t.request_id for t in names["trajectories"]] == ["batch_0", "batch_1", "batch_2"]
    assert all(t.get_final_response() == "done" for t in names["trajectories"])
    together = await names["rollout"].run_batch(names["prompts"])
    assert len(together) == 3


async def test_a_configuration_of_verl(monkeypatch):
    for name in ("verl", "verl.workers"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, "verl.workers.rollout", agentic_rollout)
    names = await run_snippet("integration_with_verl", {})
    rollout = create_agentic_rollout(names["rollout_config"])
    assert (rollout.config.agent_type, rollout.config.max_steps) == ("react", 10)
    assert names["AgenticRollout"] is AgenticRollout
