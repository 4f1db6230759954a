import asyncio

import pytest

from workers.agents.tool_agent import ToolAgent
from workers.core.model_response import ModelResponse
from workers.core.trajectory import StepType

TASK = {"content": "Add."}


async def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def tool_agent(**options) -> ToolAgent:
    agent = ToolAgent(**options)
    agent.set_tools({"add": add})
    return agent


def results(trajectory) -> list[str]:
    steps = trajectory.steps
    return [step.content for step in steps if step.step_type is StepType.ACTION_RESULT]


async def test_native_calls_of_one_reply_run_and_are_answered_in_order(script, calls):
    model = script(
        calls(("add", '{"a": 1, "b": 2}'), ("add", '{"a": 3, "b": 4}')), ModelResponse("3 and 7")
    )
    trajectory = await tool_agent().run_trajectory(TASK, model, "r")
    assert results(trajectory) == ["3", "7"]
    answers = [m for m in model.requests[1] if m["role"] == "tool"]
    assert [m["tool_call_id"] for m in answers] == ["call_0", "call_1"]
    assert trajectory.get_final_response() == "3 and 7"
    assert model.options[0]["tools"][0]["function"]["name"] == "add"


async def test_calls_of_one_reply_run_side_by_side(script):
    both_run = asyncio.Barrier(2)

    async def meet() -> str:
        await both_run.wait()
        return "met"

    agent = ToolAgent()
    agent.set_tools({"meet": meet})
    model = script("TOOL_CALL: meet()\nTOOL_CALL: meet()", "done")
    async with asyncio.timeout(20):
        trajectory = await agent.run_trajectory(TASK, model, "r")
    assert results(trajectory) == ["met", "met"]


async def test_text_calls_are_described_in_text_mode(script):
    model = script("TOOL_CALL: add(a=1, b=2)", "3")
    trajectory = await tool_agent(native_tools=False).run_trajectory(TASK, model, "r")
    assert "TOOL_CALL: tool_name" in model.requests[0][0]["content"]
    assert "tools" not in model.options[0]
    assert trajectory.get_final_response() == "3"


async def test_calls_beyond_the_limit_of_a_reply_are_not_run(script):
    model = script("\n".join(f"TOOL_CALL: add(a={n}, b=0)" for n in range(5)), "done")
    trajectory = await tool_agent(max_steps=20).run_trajectory(TASK, model, "r")
    assert results(trajectory)[:3] == ["0", "1", "2"]
    assert all("at most 3 per reply" in text for text in results(trajectory)[3:])
    assert trajectory.metadata["tools"]["add"] == {"calls": 3, "errors": 0}


async def test_one_call_at_a_time_when_several_are_not_allowed(script, calls):
    model = script(calls(("add", '{"a": 1, "b": 2}'), ("add", '{"a": 3, "b": 4}')), "done")
    agent = tool_agent(allow_multiple_tool_calls=False)
    trajectory = await agent.run_trajectory(TASK, model, "r")
    assert results(trajectory)[0] == "3"
    assert "at most 1 per reply" in results(trajectory)[1]


async def test_an_answer_before_any_tool_is_refused_where_one_is_required(script):
    model = script("I know: 3", "TOOL_CALL: add(a=1, b=2)", "3")
    trajectory = await tool_agent(require_tool_usage=True).run_trajectory(TASK, model, "r")
    assert "Use one of the tools" in model.requests[1][-1]["content"]
    assert trajectory.get_final_response() == "3"


async def test_a_call_that_cannot_be_read_is_no_use_of_the_required_tool(script):
    model = script("<tool_call>add 1 and 2</tool_call>", "3", "TOOL_CALL: add(a=1, b=2)", "3")
    agent = tool_agent(require_tool_usage=True, max_tool_calls=1)
    trajectory = await agent.run_trajectory(TASK, model, "r")
    assert "Use one of the tools" in model.requests[2][-1]["content"]
    assert trajectory.metadata["tools"] == {"add": {"calls": 1, "errors": 0}}
    assert trajectory.get_final_response() == "3"


async def test_refusing_the_required_tool_for_ever_ends_with_parse_error(script):
    model = script(*["3"] * 5)
    trajectory = await tool_agent(require_tool_usage=True).run_trajectory(TASK, model, "r")
    assert trajectory.metadata["stop_reason"] == "parse_error"
    assert len(model.requests) == 3


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ('{"a": "x", "b": 2}', "a: Input should be a valid integer"),
        ('{"a": 1}', "b: Field required"),
        ('{"a": 1', "not valid JSON"),
        ('{"a": 1, "b": 2, "c": 3}', "Extra inputs"),
    ],
)
async def test_wrong_arguments_are_told_to_the_model(script, calls, arguments, words):
    model = script(calls(("add", arguments)), "gave up")
    await tool_agent().run_trajectory(TASK, model, "r")
    assert words in model.requests[1][-1]["content"]


async def test_max_tool_calls_counts_over_all_replies(script):
    model = script(*["TOOL_CALL: add(a=1, b=2)"] * 9)
    agent = tool_agent(max_tool_calls=2, max_steps=50)
    trajectory = await agent.run_trajectory(TASK, model, "r")
    assert trajectory.metadata["stop_reason"] == "max_tool_calls"
    assert trajectory.metadata["tools"]["add"]["calls"] == 2


async def test_max_tool_calls_counts_within_a_reply(script, calls):
    three = calls(*[("add", f'{{"a": {n}, "b": 2}}') for n in (1, 2, 3)])
    agent = tool_agent(max_tool_calls=4)
    trajectory = await agent.run_trajectory(TASK, script(three, three), "r")
    assert trajectory.metadata["stop_reason"] == "max_tool_calls"
    assert trajectory.metadata["tools"]["add"]["calls"] == 4
    assert results(trajectory) == ["3", "4", "5", "3"]
