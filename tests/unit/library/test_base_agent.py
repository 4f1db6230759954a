import asyncio
import threading

import pytest

from workers.agents.single_turn_agent import SingleTurnAgent
from workers.agents.tool_agent import ToolAgent
from workers.core.base_agent import BaseAgent
from workers.core.base_tool import SimpleAgenticTool
from workers.core.model_response import ModelResponse
from workers.core.tool_schemas import ToolResult
from workers.core.trajectory import StepType, Trajectory, TrajectoryStep
from workers.sandbox.base import SandboxFailure


class OwnLoop(BaseAgent):
    """A user's agent that writes its own loop from the base class's pieces."""

    async def run_trajectory(self, prompt, llm_generate_func, request_id, **kwargs):
        trajectory = Trajectory(request_id=request_id)
        trajectory.add_step(
            TrajectoryStep(StepType.OBSERVATION, str(prompt.get("content", prompt)))
        )
        while self.should_continue(trajectory):
            response = await llm_generate_func(self.format_messages_for_llm(trajectory))
            step = self.parse_llm_output(response)
            trajectory.add_step(step)
            if step.tool_name:
                trajectory.add_step(
                    await self.execute_tool_call(step.tool_name, step.tool_args, trajectory)
                )
        self.finalize_trajectory(trajectory)
        return trajectory


class Adder:
    """Adds."""

    async def execute(self, a: int, b: int = 1):
        return {"sum": a + b}


async def run(agent: BaseAgent, model, prompt=None) -> Trajectory:
    return await agent.run_trajectory(prompt or {"content": "Add."}, model, "r")


async def test_a_users_own_loop_calls_its_tool(script):
    agent = OwnLoop(max_steps=8)
    agent.set_tools({"adder": Adder()})
    model = script("Action: adder(a=2, b=3)", "Final Answer: 5")
    trajectory = await run(agent, model)
    assert trajectory.steps[2].tool_result == {"sum": 5}
    assert trajectory.get_final_response() == "5"
    assert trajectory.metadata["tools"] == {"adder": {"calls": 1, "errors": 0}}
    assert "adder(a: integer, b?: integer): Adds." in model.requests[0][0]["content"]
    assert trajectory.metadata["tokens_estimated"] is True
    assert trajectory.total_tokens > 0


async def test_a_users_own_loop_answers_native_calls_with_role_tool(script, calls):
    agent = OwnLoop()
    agent.set_tools({"adder": Adder()})
    model = script(calls(("adder", '{"a": 2}')), "Final Answer: 3")
    await run(agent, model)
    assert model.requests[1][-1] == {
        "role": "tool",
        "tool_call_id": "call_0",
        "content": '{"sum": 3}',
    }


def test_no_further_step_after_the_limit_the_answer_or_the_end():
    agent = OwnLoop(max_steps=2)
    thought = TrajectoryStep(StepType.THOUGHT, "t")
    assert agent.should_continue(Trajectory("r"))
    assert agent.should_continue(Trajectory("r", [thought]))
    assert not agent.should_continue(Trajectory("r", [thought, thought]))
    assert not agent.should_continue(Trajectory("r", [TrajectoryStep(StepType.FINAL_ANSWER, "a")]))
    assert not agent.should_continue(Trajectory("r", is_completed=True))


def test_a_limit_of_no_steps_is_refused():
    with pytest.raises(ValueError, match="max_steps is 0"):
        OwnLoop(max_steps=0)


class Explodes:
    async def execute(self):
        raise RuntimeError("boom")


class SaysItFailed:
    def execute(self):
        return {"success": False, "error": "no luck"}


class Exits:
    def execute(self):
        raise SystemExit(3)


class Hangs:
    async def execute(self):
        await asyncio.Event().wait()


class HangsInAThread:
    def execute(self):
        threading.Event().wait(30)


@pytest.mark.parametrize(
    ("tool", "args", "words"),
    [
        (Explodes(), {}, "RuntimeError: boom"),
        (SaysItFailed(), {}, "no luck"),
        (Exits(), {}, "SystemExit(3)"),
        (Hangs(), {}, "did not finish in time (limit 0.05 s)"),
        (HangsInAThread(), {}, "did not finish in time"),
        (Adder(), {"a": 1, "c": 2}, "unexpected keyword argument 'c'; the tool's parameters: a, b"),
        (Adder(), None, "missing a required argument: 'a'"),
    ],
    ids=lambda value: type(value).__name__,
)
async def test_a_tool_call_never_raises(tool, args, words):
    agent = OwnLoop(tool_timeout_s=0.05 if "did not finish" in words else 30)
    agent.set_tools({"t": tool})
    trajectory = Trajectory("r")
    step = await agent.execute_tool_call("t", args, trajectory)
    assert step.step_type is StepType.ACTION_RESULT
    assert step.metadata["execution_successful"] is False
    assert words in step.metadata["error"]
    assert words in step.content
    assert trajectory.metadata["tools"]["t"] == {"calls": 1, "errors": 1}


async def test_a_sandbox_that_fails_is_no_result_of_the_tool():
    async def broken():
        raise SandboxFailure("bwrap died")

    agent = OwnLoop()
    agent.set_tools({"t": broken})
    with pytest.raises(SandboxFailure):
        await agent.execute_tool_call("t", {}, Trajectory("r"))


async def test_tools_may_be_sync_async_classes_or_functions():
    class Simple(SimpleAgenticTool):
        def __init__(self):
            super().__init__("s", "", {})

        async def simple_execute(self, parameters):
            return ToolResult(success=True, result="simple", reward_score=0.5)

    class Sync:
        def execute(self):
            return threading.current_thread().name

    agent = OwnLoop()
    agent.set_tools({"simple": Simple(), "sync": Sync(), "function": lambda: "called"})
    trajectory = Trajectory("r")
    steps = [await agent.execute_tool_call(name, {}, trajectory) for name in agent.tools]
    assert [step.content for step in steps] == ["simple", "sync-call", "called"]
    assert [step.reward_score for step in steps] == [0.5, None, None]


def test_what_cannot_be_a_tool_is_refused_when_it_is_given():
    for thing in (3, Adder, "calculator"):
        with pytest.raises(TypeError, match="expected an object with execute_tool"):
            OwnLoop().set_tools({"x": thing})


async def test_a_verl_tool_is_used_with_its_own_methods():
    class VerlTool:
        made, released = [], []

        def get_openai_tool_schema(self):
            function = {"name": "v", "description": "d", "parameters": {"type": "object"}}
            return {"type": "function", "function": function}

        async def create(self, instance_id=None):
            self.made.append(instance_id)

        async def execute(self, instance_id, parameters):
            return f"{instance_id} {parameters}", 0.25, {"m": 1}

        async def calc_reward(self, instance_id):
            return 1.0

        async def release(self, instance_id):
            self.released.append(instance_id)

    agent = OwnLoop()
    agent.set_tools({"v": VerlTool()})
    trajectory = Trajectory("r7")
    step = await agent.execute_tool_call("v", {"q": 1}, trajectory)
    await agent.release_tools(trajectory)
    assert step.content == "r7 {'q': 1}"
    assert (step.reward_score, step.metadata["metrics"]) == (0.25, {"m": 1})
    assert (VerlTool.made, VerlTool.released) == (["r7"], ["r7"])
    assert agent.tool_schemas()["v"].function.description == "d"


async def test_an_interrupted_first_call_of_a_tool_is_released(script, calls):
    class Endless(SimpleAgenticTool):
        released, began = [], asyncio.Event()

        async def simple_execute(self, parameters):
            self.began.set()
            await asyncio.Event().wait()

        async def release_instance(self, instance_id, **kwargs):
            self.released.append(instance_id)

    agent = ToolAgent()
    agent.set_tools({"wait": Endless("wait", "Waits.", {})})
    model = script(calls(("wait", "{}")))
    running = asyncio.create_task(agent.run_trajectory({"content": "q"}, model, "r"))
    async with asyncio.timeout(10):
        await Endless.began.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert Endless.released == ["r"]


async def test_a_long_result_is_cut_in_the_middle_with_a_notice():
    agent = OwnLoop(max_observation_chars=100)
    agent.set_tools({"long": lambda: "a" * 500 + "end"})
    step = await agent.execute_tool_call("long", {}, Trajectory("r"))
    assert "403 of 503 characters cut" in step.content
    assert step.content.startswith("a" * 50)
    assert step.content.endswith("end")


async def test_step_rewards_are_summed_and_unscored_stays_unscored(script):
    class Shaped(OwnLoop):
        def calculate_step_reward(self, step, trajectory):
            return 0.5 if step.step_type is StepType.FINAL_ANSWER else None

    shaped = await run(Shaped(), script("Final Answer: 1"))
    assert (shaped.final_reward, shaped.get_total_reward()) == (0.5, 0.5)
    plain = await run(OwnLoop(), script("Final Answer: 1"))
    assert plain.final_reward is None


async def test_single_turn_sends_the_prompt_as_it_is(script):
    model = script(
        ModelResponse("Thought: x\nFinal Answer: 4", prompt_tokens=3, completion_tokens=2)
    )
    trajectory = await run(SingleTurnAgent(), model)
    assert model.requests == [[{"role": "user", "content": "Add."}]]
    assert trajectory.get_final_response() == "Thought: x\nFinal Answer: 4"
    assert trajectory.metadata["stop_reason"] == "answered"
    assert trajectory.total_tokens == 5
    assert len(trajectory.get_messages()) == 2


async def test_single_turn_cut_off_by_its_length_says_so(script):
    trajectory = await run(SingleTurnAgent(), script(ModelResponse("4", finish_reason="length")))
    assert trajectory.metadata["stop_reason"] == "max_tokens"
    assert trajectory.get_final_response() == "4"


async def test_a_prompt_may_be_messages_with_a_system_prompt_and_history(script):
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello"},
        {"role": "user", "content": [{"type": "text", "text": "Add."}, {"type": "image_url"}]},
    ]
    model = script("4")
    trajectory = await run(SingleTurnAgent(system_prompt="You add."), model, {"messages": messages})
    assert model.requests[0][0] == {"role": "system", "content": "You add.\n\nBe brief."}
    assert model.requests[0][1:] == messages[1:]
    assert trajectory.steps[0].content == "Add."
    assert len(trajectory.steps) == 2


@pytest.mark.parametrize("prompt", [{}, {"content": ""}, {"messages": ["x"]}, {"other": 1}])
async def test_a_prompt_without_text_is_refused(script, prompt):
    with pytest.raises(ValueError, match="the prompt has neither text"):
        await SingleTurnAgent().run_trajectory(prompt, script("4"), "r")


async def test_a_models_client_may_be_sync_partial_or_an_object():
    def sync(messages, **options):
        return threading.current_thread().name

    class Client:
        async def generate(self, messages, **options):
            return {"content": "object"}

    class Callable:
        async def __call__(self, messages, **options):
            return "callable"

    for client, text in (
        (sync, "sync-call"),
        (Client(), "object"),
        (Callable(), "callable"),
        (lambda messages, **options: Callable()(messages), "callable"),
    ):
        assert (await run(SingleTurnAgent(), client)).get_final_response() == text


async def test_sampling_options_reach_the_models_client(script):
    model = script("4")
    agent = SingleTurnAgent(max_tokens_per_step=7, temperature=0, generate_kwargs={"stop": ["x"]})
    await run(agent, model)
    assert model.options == [{"max_tokens": 7, "temperature": 0, "stop": ["x"]}]


async def test_a_models_answer_of_no_known_shape_raises(script):
    with pytest.raises(TypeError, match="llm_generate_func returned int"):
        await run(SingleTurnAgent(), script(3))


async def test_blocking_tools_do_not_wait_for_each_other():
    everybody = threading.Barrier(50)

    class Meets:
        def execute(self):
            everybody.wait(20)
            return "met"

    agent = OwnLoop()
    agent.set_tools({"t": Meets()})
    calls = [agent.execute_tool_call("t", {}, Trajectory(str(n))) for n in range(50)]
    steps = await asyncio.gather(*calls)
    assert [step.content for step in steps] == ["met"] * 50
