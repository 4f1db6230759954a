"""Scripts written for the original library run: what its public example scripts call.

The scripts are `core_tools_demo`, `tool_integration_demo`, `basic_usage`, `advanced_integration`
and `test_agentic_rollout` of baidubce/agentic-rollout-library. Their use of the library is written
here in our own words: imported names, calls of tools by instance, and the fields of results.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from workers import (
    AgenticBaseTool,
    AgenticRollout,
    AgenticRolloutConfig,
    BaseAgent,
    BashExecutorTool,
    CalculatorTool,
    FileEditorTool,
    ReactAgent,
    SearchTool,
    SimpleAgenticTool,
    StepType,
    ToolResult,
    Trajectory,
    TrajectoryStep,
    create_agentic_rollout,
    create_openai_tool_schema,
    get_global_tool_registry,
    register_agent,
    register_tool,
)
from workers.core.registry import clear_registry

ROOT = Path(__file__).resolve().parents[2]


def scripted(*replies: str):
    """Make a model that answers by the turn of the conversation."""

    async def llm(messages, max_tokens=512, temperature=0.7, **kwargs):
        turn = sum(message["role"] == "assistant" for message in messages)
        return replies[min(turn, len(replies) - 1)]

    return llm


@pytest.fixture(autouse=True)
def _fresh_registry():
    yield
    get_global_tool_registry().clear_registry()
    clear_registry()


async def test_core_tools_demo_a_calculator_is_used_by_instance():
    calculator = CalculatorTool({"debug": True})
    instance_id = await calculator.create_instance()
    for expression, value in (("2 + 3 * 4", 14), ("sqrt(16)", 4), ("log(100, base=10)", 2)):
        result = await calculator.execute_tool(instance_id, {"expression": expression})
        assert result.success
        assert result.result["result"] == value
    failed = await calculator.execute_tool(instance_id, {"expression": "1 / 0"})
    assert (failed.success, failed.error) == (False, "division by zero")
    await calculator.release_instance(instance_id)


async def test_core_tools_demo_commands_have_their_streams_apart():
    bash = BashExecutorTool({"timeout": 10})
    instance_id = await bash.create_instance()
    result = await bash.execute_tool(instance_id, {"command": "echo out; echo err >&2"})
    assert result.success
    assert result.result == {
        "stdout": "out\n",
        "stderr": "err\n",
        "return_code": 0,
        "command": "echo out; echo err >&2",
    }
    failed = await bash.execute_tool(instance_id, {"command": "ls nowhere"})
    assert not failed.success
    assert failed.result["return_code"] != 0
    assert "nowhere" in failed.result["stderr"]
    await bash.release_instance(instance_id)


async def test_core_tools_demo_files_are_edited_and_searched(tmp_path):
    editor, search = FileEditorTool({"root": str(tmp_path)}), SearchTool({"root": str(tmp_path)})
    instance_id = await editor.create_instance()
    path = str(tmp_path / "demo.py")

    async def edit(command: str, **parameters: Any) -> ToolResult:
        return await editor.execute_tool(
            instance_id, {"command": command, "path": path, **parameters}
        )

    assert (await edit("create", file_text="def hello():\n    return 'hi'\n")).success
    assert "def hello" in (await edit("view")).result["content"]
    assert "demo.py" in (await edit("str_replace", old_str="hi", new_str="bye")).result["message"]
    assert (await edit("insert", insert_line=0, new_str="# demo")).success
    assert (await edit("undo_edit")).success
    assert (tmp_path / "demo.py").read_text() == "def hello():\n    return 'bye'\n"

    found = await search.execute_tool(
        instance_id, {"command": "search_text", "pattern": "def", "path": str(tmp_path)}
    )
    assert found.result["matches"] == [{"path": path, "line": 1, "text": "def hello():"}]
    named = await search.execute_tool(instance_id, {"command": "search_files", "pattern": "*.py"})
    assert [match["path"] for match in named.result["matches"]] == ["demo.py"]


async def test_core_tools_demo_tools_are_registered_and_run_by_name():
    class Greeter(SimpleAgenticTool):
        def __init__(self, config=None):
            parameters = {"name": {"type": "string"}}
            super().__init__("greeter", "Greets.", parameters, ["name"], config)

        def simple_execute(self, parameters):
            return ToolResult(success=True, result={"greeting": f"Hello, {parameters['name']}"})

    for tool_class, config in ((CalculatorTool, {"debug": True}), (BashExecutorTool, {})):
        register_tool(tool_class, config)
    register_tool(Greeter)
    registry = get_global_tool_registry()
    assert {"bash_executor", "calculator", "greeter"} <= set(registry.get_tool_names())
    assert "greeter" in {schema.function.name for schema in registry.get_tool_schemas()}
    instance_id = await registry.create_tool_instance("greeter")
    result = await registry.execute_tool("greeter", instance_id, {"name": "you"})
    assert result.result == {"greeting": "Hello, you"}
    await registry.release_tool_instance("greeter", instance_id)


async def test_tool_integration_demo_an_agent_works_with_core_tools(tmp_path):
    (tmp_path / "notes.txt").write_text("the answer is 42\n")
    agent = ReactAgent(max_steps=10, temperature=0.1)
    agent.set_tools({"calculator": CalculatorTool(), "search": SearchTool({"root": str(tmp_path)})})
    llm = scripted(
        "Thought: I look.\nAction: search(command='search_text', pattern='answer')",
        "Thought: I double it.\nAction: calculator(expression='42 * 2')",
        "Action: Final Answer: 84",
    )
    trajectory = await agent.run_trajectory({"content": "Twice the answer?"}, llm, "demo")
    assert trajectory.get_final_response() == "84"
    results = [s for s in trajectory.steps if s.step_type is StepType.ACTION_RESULT]
    assert [step.content for step in results] == ["notes.txt:1: the answer is 42", "84"]
    assert results[1].tool_result["result"] == 84


async def test_tool_integration_demo_a_tool_of_ones_own_has_a_schema_and_state():
    class Counter(AgenticBaseTool):
        def get_openai_tool_schema(self):
            return create_openai_tool_schema("counter", "Counts.", {"by": {"type": "integer"}})

        async def execute_tool(self, instance_id, parameters, **kwargs):
            state = self.instance_state(instance_id)
            state["n"] = state.get("n", 0) + parameters.get("by", 1)
            return ToolResult(success=True, result={"count": state["n"]}, metrics={"by": 1})

    rollout = AgenticRollout(
        AgenticRolloutConfig(agent_type="react", max_steps=8),
        scripted("Action: counter(by=2)", "Action: counter(by=3)", "Final Answer: 5"),
    )
    rollout.tools = {"counter": Counter()}
    rollout.agent.set_tools(rollout.tools)
    (trajectory,) = await rollout.run_batch(["Count."])
    assert trajectory.steps[-2].tool_result == {"count": 5}


async def test_basic_usage_mock_tools_and_agents_of_ones_own():
    class MockTool:
        def __init__(self, name):
            self.name = name

        async def execute(self, **kwargs):
            return {"tool": self.name, "args": kwargs, "result": f"{self.name} ran"}

    class Echo(BaseAgent):
        async def run_trajectory(self, prompt, llm_generate_func, request_id, **kwargs):
            trajectory = Trajectory(request_id=request_id)
            trajectory.add_step(TrajectoryStep(StepType.OBSERVATION, str(prompt["content"])))
            messages = self.format_messages_for_llm(trajectory)
            reply = await llm_generate_func(messages)
            trajectory.add_step(self.parse_llm_output(reply))
            self.finalize_trajectory(trajectory)
            return trajectory

    rollout = create_agentic_rollout(
        {"agent_type": "react", "max_steps": 6, "temperature": 0.5},
        llm_generate_func=scripted("Action: look_up(query='x')", "Final Answer: found"),
    )
    rollout.agent.set_tools({"look_up": MockTool("look_up")})
    trajectory = await rollout.agent.run_trajectory(
        prompt={"content": "Find x."},
        llm_generate_func=rollout.llm_generate_func,
        request_id="basic",
    )
    assert trajectory.get_final_response() == "found"
    assert trajectory.steps[2].tool_result["result"] == "look_up ran"
    assert len(trajectory.get_tool_calls()) == 1
    assert trajectory.to_dict()["request_id"] == "basic"
    own = await Echo(max_steps=3).run_trajectory({"content": "q"}, scripted("Final Answer: 1"), "r")
    assert own.get_final_response() == "1"


async def test_advanced_integration_agents_are_registered_and_chained():
    @register_agent("original_reviewer")
    class Reviewer(ReactAgent):
        pass

    class Failing:
        async def execute(self, **kwargs):
            raise RuntimeError("the service is away")

    config = AgenticRolloutConfig(agent_type="original_reviewer", concurrent_requests=2)
    llm = scripted("Action: service()", "Final Answer: it was away")
    rollout = AgenticRollout(config=config, llm_generate_func=llm)
    rollout.agent.set_tools({"service": Failing()})
    drafts = await rollout.run_batch([{"content": f"Draft {n}"} for n in range(3)])
    final = await rollout.run_batch([{"content": t.get_final_response()} for t in drafts])
    assert [t.get_final_response() for t in final] == ["it was away"] * 3
    assert drafts[0].metadata["tools"] == {"service": {"calls": 1, "errors": 1}}


async def test_test_agentic_rollout_takes_a_batch_of_the_scripts_own():
    class DataProto:
        def __init__(self, **kwargs):
            for name, value in kwargs.items():
                setattr(self, name, value)

    rollout = AgenticRollout(AgenticRolloutConfig(), scripted("Final Answer: 4"))
    prompts = DataProto(non_tensor_batch={"raw_prompt": [[{"role": "user", "content": "2 + 2?"}]]})
    output = await rollout.generate_sequences(prompts)
    assert list(output.non_tensor_batch["response"]) == ["4"]


def test_a_script_beside_the_package_imports_its_names_and_runs(tmp_path):
    script = tmp_path / "demo.py"
    script.write_text(
        "import asyncio\n"
        "from workers import CalculatorTool, get_global_tool_registry, register_tool\n"
        "async def main():\n"
        "    tool = CalculatorTool({'debug': True})\n"
        "    instance_id = await tool.create_instance()\n"
        "    result = await tool.execute_tool(instance_id, {'expression': '6 * 7'})\n"
        "    register_tool(CalculatorTool)\n"
        "    print(result.result['result'])\n"
        "asyncio.run(main())\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", script],
        env={"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.stdout, done.stderr) == ("42\n", "")
