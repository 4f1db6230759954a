"""Every built-in agent and tool by its name, from the run's configuration to the rows in the store.

A tool that fails is an observation; a model that fails is an error rollout that keeps its partial
trajectory. A new agent or tool without a case here fails the first test.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from typing import Any

import pytest
from fixtures.stored_run import StoredRun
from sqlalchemy import Engine

from pipeline.contract.errors import Action, ErrorClass, ModelTransportError
from pipeline.contract.trajectory import TrajectoryRecord, unpack_record
from pipeline.store.engine import transact
from pipeline.store.status import run_status
from rollout.deployment import Deployment
from rollout.tool_errors import errors_by_tool
from workers.core.model_response import ModelResponse, NativeToolCall
from workers.core.registry import BUILTIN_AGENTS, register_agent
from workers.core.tool_registry import BUILTIN_TOOLS
from workers.sandbox.shared import SHARED

pytestmark = pytest.mark.timeout(90)

#: The prompt of `StoredRun` asks for 0 + 1.
ANSWER = "Final Answer: 1"


def call(name: str, **arguments: Any) -> ModelResponse:
    native = NativeToolCall(f"call_{name}", name, json.dumps(arguments))
    return ModelResponse("", (native,), "tool_calls", prompt_tokens=5, completion_tokens=2)


@dataclass(frozen=True)
class AgentCase:
    """Replies that solve the prompt with an agent, and what the run says beside its name."""

    replies: tuple[Any, ...]
    config: dict[str, Any] = field(default_factory=dict)


REPAIR = call("file_editor", command="create", path="sum.txt", file_text="1\n")
TASK: dict[str, Any] = {
    "reward": None,
    "agent_config": {"files": {"sum.txt": "0\n"}, "test_command": "grep -qx 1 sum.txt"},
}
#: Asks the endpoint of its environment once, and prints the answer.
COMMAND = [
    sys.executable,
    "-c",
    "import json, os, urllib.request as web; e = os.environ; "
    "body = {'model': e['MODEL_ID'], 'messages': [{'role': 'user', 'content': 'Hi'}]}; "
    "ask = web.Request(e['OPENAI_BASE_URL'] + '/chat/completions', json.dumps(body).encode(), "
    "{'Authorization': 'Bearer ' + e['OPENAI_API_KEY']}); "
    "print(json.load(web.urlopen(ask))['choices'][0]['message']['content'])",
]
AGENTS = {
    "single_turn": AgentCase(("1",)),
    "react": AgentCase(
        ("Action: calculator(expression='0 + 1')", ANSWER), {"tools": ("calculator",)}
    ),
    "tool": AgentCase((call("calculator", expression="0 + 1"), "1"), {"tools": ("calculator",)}),
    "command": AgentCase(("1",), {"agent_config": {"command": COMMAND}}),
    "coding": AgentCase((REPAIR, call("finish", answer="done")), TASK),
    "swe": AgentCase((REPAIR, call("finish", answer="done")), TASK),
}


@dataclass(frozen=True)
class ToolCase:
    """A call that works and what it says, and one that does not and what is told then."""

    good: str
    said: str
    bad: str
    told: str


TOOLS = {
    "calculator": ToolCase(
        "calculator(expression='6 * 7')", "42", "calculator(expression='1 / 0')", "division by zero"
    ),
    "bash_executor": ToolCase(
        "bash_executor(command='echo $((6 * 7))')",
        "42",
        "bash_executor(command='exit 3')",
        "code 3",
    ),
    "file_editor": ToolCase(
        "file_editor(command='create', path='a.txt', file_text='42')",
        "a.txt",
        "file_editor(command='view', path='../../etc/passwd')",
        "outside",
    ),
    "search": ToolCase(
        "search(pattern='anything')",
        "has no files",
        "search(pattern='(', regex=True)",
        "not a regular",
    ),
    "finish": ToolCase("finish(answer='1')", "1", "finish(status='perhaps')", "status"),
}

each_agent = pytest.mark.parametrize("agent", sorted(BUILTIN_AGENTS))
each_tool = pytest.mark.parametrize("tool", sorted(BUILTIN_TOOLS))


@pytest.fixture(autouse=True)
def _no_sandbox_is_left_open():
    yield
    assert SHARED._shares == {}


def record_of(story: StoredRun) -> TrajectoryRecord:
    (row,) = story.rows(
        "SELECT t.body FROM trajectories t JOIN rollouts r USING (rollout_id) "
        "WHERE r.run_id = :run_id"
    )
    return unpack_record(row["body"])


def test_every_agent_and_tool_has_a_case():
    assert set(AGENTS) == set(BUILTIN_AGENTS)
    assert set(TOOLS) == set(BUILTIN_TOOLS)


@each_agent
def test_an_agent_works_by_its_name(engine: Engine, make_worker, agent):
    case = AGENTS[agent]
    story = StoredRun(engine, agent=agent, **case.config)
    (said,) = make_worker(*case.replies).work(story)
    assert said.error is None
    (rollout,) = story.rollouts()
    assert (rollout["state"], rollout["reward"]) == ("succeeded", 1.0)
    assert (said.stop_reason, said.n_turns) == ("answered", len(case.replies))
    assert record_of(story).messages[-1]["role"] in ("assistant", "tool")


@each_tool
def test_a_tool_works_by_its_name(engine: Engine, make_worker, tool):
    story = StoredRun(engine, agent="react", tools=(tool,))
    (said,) = make_worker(f"Action: {TOOLS[tool].good}", ANSWER).work(story)
    assert (said.outcome, said.reward) == ("succeeded", 1.0)
    record = record_of(story)
    assert record.tools == {tool: {"calls": 1, "errors": 0}}
    assert TOOLS[tool].said in " ".join(str(step["content"]) for step in record.steps[2:])


@each_tool
def test_a_tool_that_fails_is_an_observation_and_the_model_goes_on(
    engine: Engine, make_worker, tool
):
    story = StoredRun(engine, agent="react", tools=(tool,))
    worker = make_worker(f"Action: {TOOLS[tool].bad}", ANSWER)
    (said,) = worker.work(story)
    assert (said.outcome, said.reward) == ("succeeded", 1.0)
    assert record_of(story).tools == {tool: {"calls": 1, "errors": 1}}
    observed = str(worker.client.calls[1][-1]["content"])
    assert observed.startswith("Observation: Error")
    assert TOOLS[tool].told in observed


@each_agent
def test_a_model_that_fails_is_an_error_rollout_with_its_partial_trajectory(
    engine: Engine, make_worker, agent
):
    case = AGENTS[agent]
    story = StoredRun(
        engine, agent=agent, on_error={ErrorClass.MODEL_TRANSPORT: Action.FAIL}, **case.config
    )
    away = ModelTransportError("the endpoint is away")
    (said,) = make_worker(*case.replies[:-1], away).work(story)
    assert said.error is not None
    assert said.error.error_class is ErrorClass.MODEL_TRANSPORT
    (rollout,) = story.rollouts()
    assert (rollout["state"], rollout["reward"]) == ("failed", None)
    assert story.rows("SELECT 1 FROM rewards JOIN rollouts USING (rollout_id)") == []
    record = record_of(story)
    assert "0 + 1" in str(record.messages)
    assert len(record.calls) == len(case.replies) - 1
    if record.calls:
        assert "Error" not in str(record.messages[-1])
        assert record.messages[-1]["role"] in ("tool", "user"), "the tool's result is kept"


@pytest.mark.parametrize("agent", ["coding", "swe"])
def test_a_task_cut_off_before_its_tests_ran_has_no_reward(engine: Engine, make_worker, agent):
    limits = {"timeout_s": 0.5}
    story = StoredRun(engine, agent=agent, limits=limits, **TASK)
    slow = call("bash_executor", command="sleep 60")
    (said,) = make_worker(slow).work(story)
    assert said.error is not None
    assert said.error.error_class is ErrorClass.AGENT_TIMEOUT
    (rollout,) = story.rollouts()
    assert (rollout["state"], rollout["reward"]) == ("failed", None)


@pytest.mark.parametrize("agent", ["coding", "swe"])
def test_a_reward_that_a_run_names_goes_before_the_agents_own(engine: Engine, make_worker, agent):
    story = StoredRun(engine, agent=agent, **{**TASK, "reward": "exact_match"})
    (said,) = make_worker(*AGENTS[agent].replies).work(story)
    assert (said.outcome, said.reward) == ("succeeded", 0.0)
    assert [part.name for part in said.reward_parts] == ["exact_match"]


@pytest.mark.parametrize("native_tools", [False, True])
def test_a_lost_call_earns_nothing_and_is_counted_for_its_run(
    engine: Engine, make_worker, make_settings, native_tools
):
    lost = "<tool_call>calculator of 0 + 1 == 1</tool_call>"
    worker = make_worker("Action: calculator(expression='0 + 1 == 1')", lost, lost, "1")
    config = {"tools": ("calculator",), "agent_config": {"native_tools": native_tools}}
    story = StoredRun(engine, agent="react", **config)
    (said,) = worker.work_off(story)
    assert (said.outcome, said.stop_reason, said.reward) == ("succeeded", "parse_error", 0.0)
    assert errors_by_tool(Deployment(make_settings(), engine), story.run) == [
        {"tool": "(unreadable call)", "calls": 2, "errors": 2},
        {"tool": "calculator", "calls": 1, "errors": 0},
    ]


def test_a_run_without_recorded_model_calls_is_told_once_for_each_run(
    engine: Engine, make_worker, caplog
):
    @register_agent("own_client")
    async def solve(prompt, llm):
        return "1"

    worker = make_worker()
    for _ in range(2):
        story = StoredRun(engine, prompts=3, agent="own_client")
        worker.work_off(story)
        status = transact(engine, lambda connection, run=story.run: run_status(connection, run))
        assert status.rollouts["succeeded"] == 3
        assert [words[:29] for words in status.warnings] == ["No model call was recorded, t"]
    assert caplog.text.count("ended without a recorded model call") == 2
