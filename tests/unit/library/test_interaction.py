import pytest

from workers.agents.react_agent import ReActAgent
from workers.agents.single_turn_agent import SingleTurnAgent
from workers.core.interaction import create_interactions


class Teacher:
    """A simulated user in verl's form: asks again until the answer is 4."""

    def __init__(self, config=None):
        self.events = []

    async def start_interaction(self, instance_id):
        self.events.append(("start", instance_id))

    async def generate_response(self, instance_id, messages, **kwargs):
        is_right = messages[-1]["content"].endswith("4")
        return is_right, "" if is_right else "Try again.", float(is_right), {}

    async def finalize_interaction(self, instance_id):
        self.events.append(("end", instance_id))


@pytest.mark.parametrize("agent_class", [ReActAgent, SingleTurnAgent])
async def test_an_interaction_answers_until_it_is_content(script, agent_class):
    teacher = Teacher()
    agent = agent_class()
    agent.set_interactions({"teacher": teacher})
    model = script("Final Answer: 5", "Final Answer: 4")
    trajectory = await agent.run_trajectory({"content": "2 + 2"}, model, "r")
    assert model.requests[1][-1] == {"role": "user", "content": "Try again."}
    assert trajectory.get_final_response().endswith("4")
    assert [step.reward_score for step in trajectory.steps] == [None, 0.0, None, 1.0]
    assert trajectory.final_reward == 1.0
    assert trajectory.metadata["interactions"] == {"teacher": 2}
    assert teacher.events == [("start", "r"), ("end", "r")]


async def test_a_function_can_be_an_interaction(script):
    agent = SingleTurnAgent(max_steps=4)
    agent.set_interactions({"nag": lambda trajectory: "More."})
    trajectory = await agent.run_trajectory({"content": "q"}, script("1", "2", "3"), "r")
    assert trajectory.metadata["stop_reason"] == "max_steps"


async def test_an_interaction_that_fails_is_not_an_answer(script):
    agent = SingleTurnAgent()
    agent.set_interactions({"x": _broken})
    with pytest.raises(RuntimeError, match="environment down"):
        await agent.run_trajectory({"content": "q"}, script("1"), "r")


@pytest.mark.parametrize("agent_class", [ReActAgent, SingleTurnAgent])
async def test_an_interaction_is_finalized_also_after_an_error(script, agent_class, caplog):
    class Forgetful(Teacher):
        async def finalize_interaction(self, instance_id):
            await super().finalize_interaction(instance_id)
            raise KeyError(instance_id)

    def model(messages, **_):
        if len(messages) > 1 and messages[-1]["content"] == "Try again.":
            raise ConnectionError("model down")
        return "Final Answer: 5"

    teacher = Forgetful()
    agent = agent_class()
    agent.set_interactions({"teacher": teacher})
    with pytest.raises(ConnectionError, match="model down"):
        await agent.run_trajectory({"content": "2 + 2"}, model, "r")
    assert teacher.events == [("start", "r"), ("end", "r")]
    assert "could not be finalized" in caplog.text


async def _broken(trajectory):
    raise RuntimeError("environment down")


def test_interactions_are_made_from_a_config():
    made = create_interactions(
        {
            "a": {"class": Teacher},
            "b": {"class": "collections:Counter", "config": {"x": 1}},
            "c": _broken,
        }
    )
    assert isinstance(made["a"], Teacher)
    assert made["b"] == {"x": 1}
    assert made["c"] is _broken
    with pytest.raises(ValueError, match="interaction 'd' is 3"):
        create_interactions({"d": 3})
