import subprocess
import sys
import threading
from pathlib import Path

import pytest

from workers.agents.react_agent import ReActAgent
from workers.core.base_agent import BaseAgent
from workers.core.registry import clear_registry, get_agent_class, list_agents, register_agent
from workers.core.trajectory import StepType, Trajectory, TrajectoryStep

ROOT = Path(__file__).resolve().parents[3]


def test_the_built_in_agents_are_known_by_name():
    assert list_agents() == ["coding", "command", "react", "single_turn", "swe", "tool"]
    assert get_agent_class("react") is ReActAgent


def test_importing_the_registry_imports_no_agent():
    code = (
        "import sys, workers.core.registry\n"
        "loaded = [name for name in sys.modules if name.startswith('workers')]\n"
        "assert sorted(loaded) == ['workers', 'workers.core', 'workers.core.registry'], loaded\n"
        "assert 'pydantic' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, timeout=30)


def test_a_registered_class_is_found_and_forgotten():
    @register_agent("mine")
    class Mine(BaseAgent):
        async def run_trajectory(self, prompt, llm_generate_func, request_id, **kwargs):
            return Trajectory(request_id)

    assert get_agent_class("mine") is Mine
    assert "mine" in list_agents()
    clear_registry()
    assert "mine" not in list_agents()
    assert get_agent_class("react") is ReActAgent


@pytest.mark.parametrize("name", ["taken", "react"])
def test_a_name_is_given_once(name):
    async def solve(prompt, llm):
        return ""

    register_agent("taken")(solve)
    with pytest.raises(ValueError, match=f"'{name}' is registered already"):
        register_agent(name)(solve)


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(ValueError, match=r"Unknown agent type: x\. Known agents: coding, command"):
        get_agent_class("x")


def test_a_class_that_is_no_agent_is_refused():
    with pytest.raises(TypeError, match="does not derive from"):
        register_agent("x")(type("Other", (), {}))


def test_registering_from_several_threads_keeps_all_names():
    async def solve(prompt, llm):
        return ""

    threads = [
        threading.Thread(target=lambda n=n: register_agent(f"a{n}")(solve)) for n in range(20)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {f"a{n}" for n in range(20)} <= set(list_agents())


async def ran(name, model, prompt=None, tools=None, **kwargs):
    agent = get_agent_class(name)()
    agent.set_tools(tools or {})
    return await agent.run_trajectory(prompt or {"content": "Q"}, model, "r1", **kwargs)


async def test_a_functions_text_is_the_answer_and_its_call_is_recorded(script):
    @register_agent("plain")
    async def solve(prompt, llm):
        reply = await llm([{"role": "user", "content": prompt["content"]}])
        return reply.text.upper()

    trajectory = await ran("plain", script("abc"))
    assert await solve({"content": "x"}, script(type("T", (), {"text": "x"})())) == "X"
    assert trajectory.get_final_response() == "ABC"
    assert trajectory.metadata["stop_reason"] == "answered"
    assert trajectory.get_messages() == [
        {"role": "user", "content": "Q"},
        {"role": "assistant", "content": "abc"},
    ]


async def test_a_function_may_ask_for_tools_and_the_request_id(script):
    @register_agent("asks")
    async def solve(prompt: dict, llm, *, tools, request_id, unused=3):
        result = await tools["double"](n=4)
        failed = await tools["double"](n="x")
        return f"{request_id} {result.result} {failed.success} {list(tools)}"

    def double(n: int) -> int:
        return n * 2

    trajectory = await ran("asks", script(), tools={"double": double})
    assert trajectory.get_final_response() == "r1 8 False ['double']"
    assert trajectory.metadata["tools"] == {"double": {"calls": 2, "errors": 1}}
    assert [step.tool_args for step in trajectory.get_tool_calls()] == [{"n": 4}, {"n": "x"}]
    assert [m["role"] for m in trajectory.get_messages()] == ["user", "assistant"]


async def test_a_function_may_run_native_calls_and_the_transcript_is_what_was_sent(script, calls):
    @register_agent("native")
    async def solve(prompt, llm, tools):
        messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Q!"}]
        reply = await llm(messages, tools=tools.schemas())
        messages.append(reply.to_message())
        messages += [await tools.answer(call) for call in reply.tool_calls]
        return (await llm(messages)).text

    def double(n: int) -> int:
        return n * 2

    model = script(calls(("double", '{"n": 3}'), ("double", "{")), "6")
    trajectory = await ran("native", model, tools={"double": double})
    assert trajectory.get_messages() == [*model.requests[1], {"role": "assistant", "content": "6"}]
    assert "not valid JSON" in model.requests[1][-1]["content"]
    assert trajectory.get_final_response() == "6"


async def test_a_rewritten_context_is_marked(script):
    @register_agent("rewrites")
    async def solve(prompt, llm):
        await llm("first")
        return (await llm("second")).text

    trajectory = await ran("rewrites", script("1", "2"))
    assert [step.metadata.get("rewritten_context") for step in trajectory.steps] == [
        None,
        None,
        True,
        None,
        None,
    ]


def as_an_sdk_writes_it(message: dict) -> dict:
    """Return a reply as the model_dump() of an SDK's message."""
    return {**message, "content": message["content"] or None, "refusal": None, "audio": None}


async def test_a_reply_sent_back_without_content_is_no_rewritten_context(script, calls):
    @register_agent("framework")
    async def solve(prompt, llm, tools):
        messages = [{"role": "user", "content": "Q!"}]
        reply = await llm(messages, tools=tools.schemas())
        messages.append(as_an_sdk_writes_it(reply.to_message()))
        messages += [await tools.answer(call) for call in reply.tool_calls]
        return (await llm(messages)).text

    def double(n: int) -> int:
        return n * 2

    model = script(calls(("double", '{"n": 3}'), ("double", '{"n": 4}')), "14")
    trajectory = await ran("framework", model, tools={"double": double})
    assert not any("rewritten_context" in step.metadata for step in trajectory.steps)
    results = [m["content"] for m in trajectory.get_messages() if m["role"] == "tool"]
    assert results == ["6", "8"]


async def test_all_results_of_a_turn_are_recorded_in_a_rewritten_context(script):
    @register_agent("compacts")
    async def solve(prompt, llm):
        await llm("first")
        results = [
            {"role": "tool", "tool_call_id": f"c{number}", "content": str(number)}
            for number in range(3)
        ]
        summary = [{"role": "user", "content": "so far"}, {"role": "assistant", "content": "ok"}]
        return (await llm([*summary, *results])).text

    trajectory = await ran("compacts", script("1", "2"))
    rewritten = [s.content for s in trajectory.steps if s.metadata.get("rewritten_context")]
    assert rewritten == ["0", "1", "2"]


async def test_an_agent_without_a_recorded_model_call_is_reported_once(script, caplog):
    @register_agent("own_client")
    async def solve(prompt, llm):
        return "42"

    agent = get_agent_class("own_client")()
    for number in range(3):
        trajectory = await agent.run_trajectory({"content": "q"}, script(), f"r{number}")
    assert trajectory.get_final_response() == "42"
    assert caplog.text.count("ended without a recorded model call") == 1


async def test_a_missing_model_call_can_be_an_error(script):
    @register_agent("own_client")
    async def solve(prompt, llm):
        return "42"

    agent = get_agent_class("own_client")(require_model_calls=True)
    with pytest.raises(TypeError, match="not recorded, limited or counted"):
        await agent.run_trajectory({"content": "q"}, script(), "r")


async def test_a_dict_brings_reward_and_metadata(script):
    @register_agent("dict")
    async def solve(prompt, llm):
        return {"answer": "4", "reward": 1, "metadata": {"k": "v"}}

    trajectory = await ran("dict", script())
    assert trajectory.get_final_response() == "4"
    assert trajectory.final_reward == 1.0
    assert trajectory.metadata["k"] == "v"
    assert [m["role"] for m in trajectory.get_messages()] == ["user", "assistant"]


async def test_a_trajectory_is_taken_as_it_is(script):
    @register_agent("whole")
    async def solve(prompt, llm, trajectory):
        trajectory.add_step(TrajectoryStep(StepType.FINAL_ANSWER, "mine"))
        return trajectory

    trajectory = await ran("whole", script())
    assert trajectory.get_final_response() == "mine"
    assert trajectory.is_completed


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (None, "returned NoneType; it must return the answer as text"),
        (4, "returned int"),
        ({}, 'needs "answer"'),
        ({"answer": None}, "returned NoneType"),
        ({"answer": "4", "reward": "high"}, "reward must be a number"),
        ({"answer": "4", "reward": True}, "reward must be a number"),
    ],
)
async def test_what_is_no_answer_is_refused_with_what_would_be_one(script, given, words):
    @register_agent("odd")
    async def solve(prompt, llm):
        return given

    with pytest.raises(TypeError, match=words):
        await ran("odd", script())


async def test_a_failing_model_leaves_what_a_function_did_so_far(script):
    @register_agent("fails")
    async def solve(prompt, llm):
        await llm("first")
        return (await llm("second")).text

    kept = Trajectory("r1")
    with pytest.raises(ConnectionError):
        await ran("fails", script("1", ConnectionError("away")), trajectory=kept)
    assert [m["content"] for m in kept.get_messages()] == ["first", "1"]
    assert not kept.is_completed


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("def solve(prompt, llm): pass", "must be an 'async def' function"),
        ("async def solve(prompt): pass", "must take two parameters first"),
        ("async def solve(): pass", "must take two parameters first"),
        ("async def solve(prompt, llm, database): pass", "asks for 'database'; .* may ask for"),
    ],
)
def test_a_function_of_another_shape_is_refused_at_once(source, words):
    scope: dict = {}
    exec(source, scope)
    with pytest.raises(TypeError, match=words):
        register_agent("shape")(scope["solve"])
