import pytest

from pipeline.contract.run import RunConfig


@pytest.mark.parametrize("agent", ["coding", "swe"])
def test_agents_that_judge_themselves_need_no_reward(agent):
    assert RunConfig(agent=agent).reward is None
    assert RunConfig(agent=agent, reward="exact_match").reward == "exact_match"


def test_an_agent_that_runs_elsewhere_is_scored_by_its_app_unless_a_reward_is_named():
    target = {"target": "http://127.0.0.1:8080", "results_bucket": "b"}
    for reward in (None, "exact_match"):
        named = {} if reward is None else {"reward": reward}
        config = RunConfig.model_validate({"agentcore": target, **named})
        assert config.reward == reward
        assert RunConfig.stored(config.model_dump(mode="json")) == config


@pytest.mark.parametrize("agent", ["single_turn", "react", "tool", "anything_else"])
def test_other_agents_are_scored_by_exact_match(agent):
    assert RunConfig(agent=agent).reward == "exact_match"
    assert RunConfig(agent=agent, reward=None).reward is None


def test_a_stored_configuration_is_read_back_as_it_was():
    for config in (RunConfig(), RunConfig(agent="swe"), RunConfig(agent="swe", reward="x")):
        assert RunConfig.model_validate_json(config.model_dump_json()) == config


def test_the_order_of_keys_does_not_make_another_run():
    one = RunConfig(agent_config={"sandbox": "k8s", "image": "a", "repository_path": "/w"})
    other = RunConfig(agent_config={"image": "a", "sandbox": "k8s", "repository_path": "/w"})
    assert one == other != RunConfig()


def test_an_agent_has_its_own_number_of_steps_unless_the_run_names_one():
    assert RunConfig().limits.max_steps is None
    with pytest.raises(ValueError, match="greater than or equal to 1"):
        RunConfig.model_validate({"limits": {"max_steps": 0}})
