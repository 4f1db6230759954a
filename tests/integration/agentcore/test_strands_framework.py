"""The Strands app's model and the collector of its turns."""

from __future__ import annotations

import pytest
from fixtures.agentcore_apps import ROLLOUT, TRAINING, served
from fixtures.scripted_model import scripted_model

import workers.agentcore


def double(number: int) -> str:
    """Double a number.

    Args:
        number: The number.
    """
    return str(2 * number)


def policy(messages):
    """Call the tool first, then answer with its result."""
    if messages[-1]["role"] == "tool":
        content = messages[-1]["content"]
        return f"#### {content if isinstance(content, str) else content[0]['text']}"
    call = {"name": "double", "arguments": '{"number": 21}'}
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "t1", "type": "function", "function": call}],
    }


@pytest.fixture
def model_url():
    with scripted_model(policy) as model:
        yield model.base_url


def ask(app, collector):
    from strands import Agent, tool

    agent = Agent(
        model=app.create_openai_compatible_model(params={"temperature": 0.5}),
        tools=[tool(double)],
        system_prompt="Be right.",
        hooks=[collector],
        callback_handler=None,
    )

    async def rollout(payload):
        response = await agent.invoke_async(payload["prompt"])
        assert response.message["content"][0].get("text", "").strip() == "#### 42"
        return {"rollout_data": collector.get_rollout_data(), "rewards": [0.0, 1.0]}

    return rollout


def test_each_turn_has_the_messages_up_to_its_own(model_url, monkeypatch):
    monkeypatch.setenv("BASE_URL", model_url)
    monkeypatch.setenv("MODEL_ID", "m")
    app = workers.agentcore.StrandsAgentCoreRLApp()
    collector = workers.agentcore.StrandsRolloutCollector()
    with served(ask(app, collector), app=app) as it:
        result = it.result({"prompt": "Twice 21?", "_training": TRAINING})
    assert result["status_code"] == 200, result
    first, second = result["rollout_data"]
    assert [first["turn_id"], second["turn_id"]] == [0, 1]
    roles = [m["role"] for m in second["formatted_request"]["messages"]]
    assert roles == ["system", "user", "assistant", "tool", "assistant"]
    messages = first["formatted_request"]["messages"]
    assert messages == second["formatted_request"]["messages"][:3]
    assert messages[-1]["tool_calls"][0]["function"]["name"] == "double"
    assert first["formatted_request"]["model"] == "m"
    (described,) = first["formatted_request"]["tools"]
    assert described["function"]["name"] == "double"
    # Stored once: the second turn begins with the very messages of the first.
    assert len(collector._turns._conversations) == 1


def test_a_model_made_at_import_follows_the_invocation(model_url, monkeypatch):
    monkeypatch.delenv("BASE_URL", raising=False)
    monkeypatch.delenv("MODEL_ID", raising=False)
    app = workers.agentcore.StrandsAgentCoreRLApp()
    collector = workers.agentcore.StrandsRolloutCollector()
    rollout = {**ROLLOUT, "base_url": model_url, "model_id": "named", "api_key": "k"}
    with served(ask(app, collector), app=app) as it:
        result = it.result({"prompt": "Twice 21?", "_rollout": rollout})
        assert result["status_code"] == 200, result
        assert result["rollout_data"][0]["formatted_request"]["model"] == "named"
        it.saved.objects.clear()
        failed = it.result({"prompt": "Twice 21?", "_training": TRAINING})
    assert "MODEL_ID" in failed["stop_reason"]


def test_sampling_parameters_of_the_invocation_come_before_the_models_own():
    from workers.agentcore.invocation import enter_rollout

    app = workers.agentcore.StrandsAgentCoreRLApp()
    model = app.create_openai_compatible_model(params={"temperature": 0.5})
    assert model.config["params"] == {"temperature": 0.5}
    enter_rollout({"sampling_params": {"temperature": 1.0, "top_p": 0.9}})
    try:
        assert model.config["params"] == {"temperature": 1.0, "top_p": 0.9}
        assert model.get_config()["params"] == {"temperature": 1.0, "top_p": 0.9}
    finally:
        enter_rollout(None)  # pyright: ignore[reportArgumentType]


def test_a_provider_model_is_hosted(monkeypatch):
    monkeypatch.setenv("AWS_REGION", "us-west-2")
    app = workers.agentcore.StrandsAgentCoreRLApp()
    model = app.create_openai_compatible_model("us.anthropic.some-model")
    assert type(model).__name__ == "BedrockModel"
    assert model.get_config()["model_id"] == "us.anthropic.some-model"
