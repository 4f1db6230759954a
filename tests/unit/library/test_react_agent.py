import asyncio

import pytest

from workers.agents.react_agent import ReActAgent
from workers.core.model_response import ModelResponse
from workers.core.trajectory import StepType, Trajectory
from workers.rewards.answer_rewards import gsm8k

QUESTION = {"content": "What is 15 * 24?"}


def agent_with_calculator(**options) -> ReActAgent:
    return ReActAgent(tools_config={"calculator": {}}, **options)


def kinds(trajectory: Trajectory) -> list[str]:
    return [step.step_type.value for step in trajectory.steps]


async def test_it_thinks_acts_observes_and_answers(script):
    model = script(
        "Thought: multiply\nAction: calculator(expression='15 * 24')",
        "Thought: done\nFinal Answer: 360",
    )
    trajectory = await agent_with_calculator().run_trajectory(QUESTION, model, "r1")
    assert kinds(trajectory) == [
        "observation",
        "thought",
        "action",
        "action_result",
        "thought",
        "final_answer",
    ]
    assert trajectory.get_final_response() == "360"
    assert trajectory.metadata["stop_reason"] == "answered"
    assert trajectory.metadata["tools"] == {"calculator": {"calls": 1, "errors": 0}}
    assert trajectory.is_completed
    assert trajectory.final_reward is None
    action = trajectory.get_tool_calls()[0]
    assert (action.tool_name, action.tool_args) == ("calculator", {"expression": "15 * 24"})
    assert trajectory.steps[3].tool_result == {"result": 360, "expression": "15 * 24"}


async def test_the_model_is_sent_the_conversation_as_it_was(script):
    model = script("Thought: multiply\nAction: calculator('15 * 24')", "Final Answer: 360")
    trajectory = await agent_with_calculator().run_trajectory(QUESTION, model, "r1")
    system, question, reply, observation = model.requests[1]
    assert system["role"] == "system"
    assert "calculator(expression?: string" in system["content"]
    assert question == {"role": "user", "content": "What is 15 * 24?"}
    assert reply["content"] == "Thought: multiply\nAction: calculator('15 * 24')"
    assert observation == {"role": "user", "content": "Observation: 360"}
    messages = trajectory.get_messages()
    assert messages[:4] == model.requests[1]
    assert messages[4] == {"role": "assistant", "content": "Final Answer: 360"}


async def test_native_calls_are_answered_with_role_tool(script, calls):
    model = script(
        calls(("calculator", '{"expression": "15*24"}'), text="I multiply."),
        ModelResponse("The product is 360."),
    )
    agent = agent_with_calculator(native_tools=True)
    trajectory = await agent.run_trajectory(QUESTION, model, "r1")
    assert model.options[0]["tools"][0]["function"]["name"] == "calculator"
    assert model.requests[1][2]["tool_calls"][0]["id"] == "call_0"
    assert model.requests[1][3] == {"role": "tool", "tool_call_id": "call_0", "content": "360"}
    assert kinds(trajectory)[1:4] == ["thought", "action", "action_result"]
    assert trajectory.get_final_response() == "The product is 360."


async def test_either_format_is_understood_in_either_mode(script, calls):
    replies = (calls(("calculator", '{"expression": "1+1"}')), "Final Answer: 2")
    in_text_mode = await agent_with_calculator().run_trajectory(QUESTION, script(*replies), "a")
    replies = ("Action: calculator(expression='1+1')", "Final Answer: 2")
    agent = agent_with_calculator(native_tools=True)
    in_native_mode = await agent.run_trajectory(QUESTION, script(*replies), "b")
    for trajectory in (in_text_mode, in_native_mode):
        assert trajectory.metadata["tools"]["calculator"] == {"calls": 1, "errors": 0}
        assert trajectory.get_final_response() == "2"


async def test_text_mode_offers_no_native_tools(script):
    model = script("Final Answer: 1")
    await agent_with_calculator().run_trajectory(QUESTION, model, "r")
    assert model.options == [{"max_tokens": 512, "temperature": 0.7}]


async def test_several_steps_of_one_reply_are_run_in_order(script):
    model = script(
        "Thought: first\nAction: calculator(expression='1+1')\n"
        "Thought: second\nAction: calculator(expression='2+2')\nFinal Answer: 2 and 4"
    )
    trajectory = await agent_with_calculator().run_trajectory(QUESTION, model, "r")
    results = [step.content for step in trajectory.steps if step.step_type.value == "action_result"]
    assert results == ["2", "4"]
    assert trajectory.get_final_response() == "2 and 4"


async def test_an_invented_observation_is_cut_at_the_action(script):
    model = script(
        "Thought: t\nAction: calculator(expression='15*24')\nObservation: 999\nFinal Answer: 999",
        "Final Answer: 360",
    )
    trajectory = await agent_with_calculator().run_trajectory(QUESTION, model, "r")
    assert trajectory.get_final_response() == "360"
    said = [m["content"] for m in model.requests[1] if m["role"] == "assistant"]
    assert said == ["Thought: t\nAction: calculator(expression='15*24')"]
    assert "999" not in str(trajectory.to_dict()["steps"])


async def test_a_failing_tool_is_told_to_the_model_and_counted(script):
    model = script(
        "Action: calculator(expression='1/0')",
        "Action: abacus(beads=3)",
        "Final Answer: none",
    )
    trajectory = await agent_with_calculator().run_trajectory(QUESTION, model, "r")
    division, unknown = (s for s in trajectory.steps if s.step_type is StepType.ACTION_RESULT)
    assert division.metadata["execution_successful"] is False
    assert "division by zero" in division.content
    assert "available tools: calculator" in unknown.content
    assert trajectory.metadata["tools"] == {
        "calculator": {"calls": 1, "errors": 1},
        "abacus": {"calls": 1, "errors": 1},
    }


async def test_unusable_replies_end_with_parse_error_after_the_limit(script):
    model = script(*["I wonder."] * 5)
    agent = agent_with_calculator(max_consecutive_thoughts=3, max_steps=50)
    trajectory = await agent.run_trajectory(QUESTION, model, "r")
    assert trajectory.metadata["stop_reason"] == "parse_error"
    assert len(model.requests) == 3
    assert "Go on with one of these lines" in model.requests[1][-1]["content"]


async def test_a_usable_reply_starts_the_count_of_unusable_ones_again(script):
    use = "Action: calculator(expression='1')"
    model = script("hm", "hm", use, "hm", "hm", use, "Final Answer: 1")
    trajectory = await agent_with_calculator(max_steps=50).run_trajectory(QUESTION, model, "r")
    assert trajectory.metadata["stop_reason"] == "answered"


@pytest.mark.parametrize("reply", ["", "Action: calculator(", "Action: calculator(expression=x)"])
async def test_a_call_that_cannot_be_read_is_told_why_and_not_run(script, reply):
    model = script(reply, "Final Answer: 1")
    trajectory = await agent_with_calculator().run_trajectory(QUESTION, model, "r")
    assert trajectory.metadata["stop_reason"] == "answered"
    assert "tools" not in trajectory.metadata
    told = model.requests[1][-1]
    assert told["role"] == "user"
    assert told["content"]


async def test_native_arguments_that_cannot_be_read_get_an_answer_too(script, calls):
    model = script(calls(("calculator", '{"expression": ')), "Final Answer: 1")
    await agent_with_calculator(native_tools=True).run_trajectory(QUESTION, model, "r")
    assert model.requests[1][-1]["role"] == "tool"
    assert "not valid JSON" in model.requests[1][-1]["content"]


async def test_it_stops_at_max_steps_and_its_last_call_is_no_answer(script):
    model = script(*["Thought: t\nAction: calculator(expression='15 * 24 == 360')"] * 9)
    trajectory = await agent_with_calculator(max_steps=7).run_trajectory(QUESTION, model, "r")
    assert trajectory.metadata["stop_reason"] == "max_steps"
    assert len(trajectory.steps) == 7
    assert trajectory.get_final_response() == ""
    assert gsm8k(trajectory.get_final_response(), "#### 360") == 0.0


async def test_it_stops_at_the_call_beyond_max_tool_calls(script):
    model = script(*["Action: calculator(expression='1')"] * 9)
    agent = agent_with_calculator(max_tool_calls=2, max_steps=50)
    trajectory = await agent.run_trajectory(QUESTION, model, "r")
    assert trajectory.metadata["stop_reason"] == "max_tool_calls"
    assert trajectory.metadata["tools"]["calculator"]["calls"] == 2


async def test_it_stops_when_all_tokens_are_sampled(script, calls):
    reply = calls(("calculator", '{"expression": "1"}'), prompt_tokens=9, completion_tokens=30)
    model = script(*[reply] * 9)
    agent = agent_with_calculator(max_total_tokens=50, max_steps=50)
    trajectory = await agent.run_trajectory(QUESTION, model, "r")
    assert trajectory.metadata["stop_reason"] == "max_tokens"
    assert [options["max_tokens"] for options in model.options] == [50, 20]
    assert trajectory.total_tokens == 78
    assert "tokens_estimated" not in trajectory.metadata


async def test_a_reply_cut_off_by_its_length_ends_with_max_tokens(script):
    model = script(ModelResponse("Thought: the long way round", finish_reason="length"))
    trajectory = await agent_with_calculator().run_trajectory(QUESTION, model, "r")
    assert trajectory.metadata["stop_reason"] == "max_tokens"


async def test_a_thought_can_be_required_before_an_action(script):
    agent = agent_with_calculator(require_thought_before_action=True)
    model = script(
        "Action: calculator(expression='1')",
        "Thought: now\nAction: calculator(expression='1')",
        "Final Answer: 1",
    )
    trajectory = await agent.run_trajectory(QUESTION, model, "r")
    assert "write a line 'Thought: ...'" in model.requests[1][-1]["content"]
    assert trajectory.metadata["tools"]["calculator"]["calls"] == 1


async def test_reflection_is_asked_for_after_a_failure_only(script):
    agent = agent_with_calculator(enable_self_reflection=True)
    model = script(
        "Action: calculator(expression='1/0')",
        "Action: calculator(expression='1')",
        "Final Answer: 1",
    )
    await agent.run_trajectory(QUESTION, model, "r")
    assert "think about why this failed" in model.requests[1][-1]["content"]
    assert model.requests[2][-1]["content"] == "Observation: 1"


async def test_the_finish_tool_hands_over_the_answer(script):
    agent = ReActAgent(tools_config=["finish"])
    model = script("Thought: t\nAction: finish(answer='360')")
    trajectory = await agent.run_trajectory(QUESTION, model, "r")
    assert trajectory.get_final_response() == "360"
    assert trajectory.metadata["stop_reason"] == "answered"
    assert [m["role"] for m in trajectory.get_messages()] == ["system", "user", "assistant", "user"]


async def test_finishing_without_an_answer_is_tool_stopped(script):
    model = script("Action: finish(status='failure')")
    trajectory = await ReActAgent(tools_config=["finish"]).run_trajectory(QUESTION, model, "r")
    assert trajectory.metadata["stop_reason"] == "tool_stopped"


async def test_a_failing_model_raises_and_leaves_the_partial_trajectory(script):
    model = script("Action: calculator(expression='1')", ConnectionError("endpoint away"))
    kept = Trajectory("r")
    with pytest.raises(ConnectionError, match="endpoint away"):
        await agent_with_calculator().run_trajectory(QUESTION, model, "r", trajectory=kept)
    assert kinds(kept) == ["observation", "action", "action_result"]
    assert not kept.is_completed
    assert kept.final_reward is None
    assert "stop_reason" not in kept.metadata


async def test_cancelling_passes_through_a_tool_and_the_model():
    entered = asyncio.Event()

    class Waits:
        async def execute(self):
            entered.set()
            await asyncio.Event().wait()

    agent = ReActAgent()
    agent.set_tools({"waits": Waits()})

    async def model(messages, **options):
        return "Action: waits()"

    running = asyncio.create_task(agent.run_trajectory(QUESTION, model, "r"))
    await entered.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


async def test_one_agent_serves_many_trajectories_at_once():
    agent = agent_with_calculator()

    async def model(messages, **options):
        await asyncio.sleep(0)
        number = messages[1]["content"]
        if len(messages) == 2:
            return f"Thought: t\nAction: calculator(expression='{number} + 0')"
        return f"Final Answer: {messages[-1]['content'].removeprefix('Observation: ')}"

    prompts = [{"content": str(number)} for number in range(500)]
    trajectories = await asyncio.gather(
        *(agent.run_trajectory(prompt, model, prompt["content"]) for prompt in prompts)
    )
    assert [t.get_final_response() for t in trajectories] == [p["content"] for p in prompts]
    assert all(t.metadata["tools"]["calculator"]["calls"] == 1 for t in trajectories)
