import asyncio
import gc
import json
import logging
from typing import Any

import pytest

from workers.agentic_rollout import AgenticRollout, AgenticRolloutConfig, create_agentic_rollout
from workers.core.trajectory import Trajectory
from workers.core.trajectory_files import write_trajectories


async def answers(messages, **options):
    return f"Final Answer: {messages[-1]['content']}!"


async def fails_on_bad(messages, **options):
    if messages[-1]["content"] == "bad":
        raise ConnectionError("endpoint away")
    return "Final Answer: fine"


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch):
    for name in (
        "OPENAI_API_KEY",
        "OPENAI_BASE_URL",
        "ANTHROPIC_API_KEY",
        "AGENTIC_SAVE_TRAJECTORIES",
        "AGENTIC_LOG_LEVEL",
    ):
        monkeypatch.delenv(name, raising=False)


def single(**settings: Any) -> AgenticRolloutConfig:
    return AgenticRolloutConfig(agent_type="single_turn", **settings)


def test_an_unknown_agent_type_lists_the_known_ones():
    with pytest.raises(ValueError, match=r"Unknown agent type: x\. Known agents: coding, command"):
        AgenticRollout(AgenticRolloutConfig(agent_type="x"))


def test_tools_are_made_from_their_settings():
    rollout = AgenticRollout(AgenticRolloutConfig(tools_config={"calculator": {"precision": 3}}))
    assert rollout.tools["calculator"].precision == 3
    assert rollout.agent.tools is rollout.tools
    with pytest.raises(ValueError, match="Unknown tool: nothing"):
        AgenticRollout(AgenticRolloutConfig(tools_config=["nothing"]))


def test_settings_reach_the_agent():
    config = {"agent_type": "react", "max_steps": 3, "temperature": 0.1}
    rollout = create_agentic_rollout(
        {**config, "agent_config": {"native_tools": True}}, max_tokens_per_step=9
    )
    agent: Any = rollout.agent
    assert (agent.max_steps, agent.temperature, agent.max_tokens_per_step) == (3, 0.1, 9)
    assert agent.native_tools is True


def test_verls_form_of_the_configuration_is_taken():
    rollout = create_agentic_rollout(
        {"rollout_type": "agentic", "agent_config": {"agent_type": "react", "max_steps": 4}}
    )
    assert rollout.config.max_steps == 4
    with pytest.raises(ValueError, match="must be 'agentic'"):
        create_agentic_rollout({"rollout_type": "vllm"})


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"max_stepss": 3}, "unknown rollout settings: max_stepss; known: agent_type"),
        ({"concurrent_requests": 0}, "concurrent_requests is 0"),
        ({"batch_size": 0}, "batch_size is 0"),
    ],
)
def test_settings_that_cannot_work_are_named(settings, words):
    with pytest.raises(ValueError, match=words):
        create_agentic_rollout(settings)


async def test_setting_the_tools_gives_them_to_the_agent(script):
    rollout = AgenticRollout(AgenticRolloutConfig(), script("Action: f()", "Final Answer: 1"))
    rollout.tools = {"f": lambda: "called"}
    (trajectory,) = await rollout.run_batch(["q"])
    assert trajectory.metadata["tools"] == {"f": {"calls": 1, "errors": 0}}


async def test_interactions_are_made_from_their_settings(script):
    said = iter(["Again.", None])
    config = single(interactions_config={"user": lambda trajectory: next(said)})
    (trajectory,) = await AgenticRollout(config, script("1", "2")).run_batch(["q"])
    assert trajectory.get_final_response() == "2"


async def test_a_batch_keeps_the_order_and_gives_each_its_own_id():
    rollout = AgenticRollout(single(), answers)
    prompts = ["a", {"content": "b"}, {"content": "c", "request_id": "mine"}]
    trajectories = await rollout.run_batch(prompts)
    assert [t.get_final_response() for t in trajectories] == [
        f"Final Answer: {text}!" for text in "abc"
    ]
    assert trajectories[2].request_id == "mine"
    assert len({t.request_id for t in trajectories}) == 3


async def test_concurrent_requests_bounds_what_is_under_way():
    running = peak = 0

    async def model(messages, **options):
        nonlocal running, peak
        running += 1
        peak = max(peak, running)
        await asyncio.sleep(0.001)
        running -= 1
        return "x"

    rollout = AgenticRollout(single(concurrent_requests=3), model)
    await asyncio.gather(rollout.run_batch(["q"] * 20), rollout.run_batch(["q"] * 20))
    assert peak == 3


def test_a_rollout_works_in_one_event_loop_after_another():
    rollout = AgenticRollout(single(concurrent_requests=1), answers)
    for _ in range(2):
        assert len(asyncio.run(rollout.run_batch(["q"] * 5))) == 5


async def test_one_failing_prompt_fails_alone_and_has_no_reward():
    rollout = AgenticRollout(AgenticRolloutConfig(), fails_on_bad)
    good, bad, also_good = await rollout.run_batch(["good", "bad", "good"])
    assert good.is_completed
    assert also_good.is_completed
    assert not bad.is_completed
    assert bad.final_reward is None
    assert "stop_reason" not in bad.metadata
    assert bad.metadata["error"]["type"] == "ConnectionError"
    assert bad.metadata["error"]["message"] == "endpoint away"
    assert [step.content for step in bad.steps] == ["bad"]


async def test_without_any_model_the_error_says_what_to_set():
    (trajectory,) = await AgenticRollout(single()).run_batch(["q"])
    assert "set OPENAI_API_KEY" in trajectory.metadata["error"]["message"]


def load(path) -> Trajectory:
    return Trajectory.from_dict(json.loads(path.read_text()))


async def test_trajectories_are_saved_as_they_end(tmp_path):
    config = AgenticRolloutConfig(save_trajectories=True, trajectory_save_path=tmp_path / "t")
    rollout = AgenticRollout(config, fails_on_bad)
    prompts = [{"content": text, "request_id": f"{text}/../1"} for text in ("good", "bad")]
    trajectories = await rollout.run_batch(prompts)
    directly = await rollout.agent.run_trajectory({"content": "q"}, fails_on_bad, "direct")
    saved = {load(path).request_id: load(path) for path in (tmp_path / "t").iterdir()}
    assert saved == {t.request_id: t for t in [*trajectories, directly]}
    assert sorted(path.name for path in (tmp_path / "t").iterdir()) == [
        "bad_.._1.json",
        "direct.json",
        "good_.._1.json",
    ]


def test_a_second_trajectory_of_the_same_id_replaces_nothing(tmp_path):
    paths = write_trajectories(tmp_path, [Trajectory("a"), Trajectory("a"), Trajectory("...")])
    assert [path.name for path in paths] == ["a.json", "a-2.json", "trajectory.json"]
    assert len(list(tmp_path.iterdir())) == 3


async def test_batch_size_is_how_many_are_written_together(tmp_path):
    config = single(save_trajectories=True, trajectory_save_path=tmp_path, batch_size=3)
    rollout = AgenticRollout(config, answers)
    for number in range(4):
        await rollout.agent.run_trajectory({"content": "q"}, answers, f"r{number}")
        assert len(list(tmp_path.iterdir())) == (3 if number >= 2 else 0)
    await rollout.run_batch(["q"])
    assert len(list(tmp_path.iterdir())) == 5


async def test_an_unfinished_batch_is_written_when_the_rollout_goes(tmp_path):
    config = single(save_trajectories=True, trajectory_save_path=tmp_path, batch_size=9)
    rollout = AgenticRollout(config, answers)
    await rollout.agent.run_trajectory({"content": "q"}, answers, "r")
    del rollout
    gc.collect()
    assert [path.name for path in tmp_path.iterdir()] == ["r.json"]


def test_the_environment_says_whether_to_save_unless_the_code_does(monkeypatch):
    monkeypatch.setenv("AGENTIC_SAVE_TRAJECTORIES", "true")
    assert AgenticRolloutConfig().save_trajectories is True
    assert AgenticRolloutConfig(save_trajectories=False).save_trajectories is False
    monkeypatch.setenv("AGENTIC_SAVE_TRAJECTORIES", "perhaps")
    with pytest.raises(ValueError, match="AGENTIC_SAVE_TRAJECTORIES is 'perhaps'"):
        AgenticRolloutConfig()


def test_the_environment_sets_the_log_level(monkeypatch):
    library = logging.getLogger("workers")
    before = library.level
    try:
        monkeypatch.setenv("AGENTIC_LOG_LEVEL", "debug")
        AgenticRollout(single())
        assert library.level == logging.DEBUG
        monkeypatch.setenv("AGENTIC_LOG_LEVEL", "loud")
        with pytest.raises(ValueError, match="AGENTIC_LOG_LEVEL is 'LOUD'"):
            AgenticRollout(single())
    finally:
        library.setLevel(before)


async def test_a_cancelled_batch_is_cancelled():
    entered = asyncio.Event()

    async def never(messages, **options):
        entered.set()
        await asyncio.Event().wait()

    running = asyncio.create_task(AgenticRollout(single(), never).run_batch(["q"]))
    await entered.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
