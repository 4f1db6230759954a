from __future__ import annotations

import pytest

from pipeline.contract.errors import ConfigError
from workers.llm.lean_client import LeanClient
from workers.llm.providers import PROVIDERS, find_provider, make_client

KEYS = {
    "OPENAI_API_KEY": "sk-openai",
    "ANTHROPIC_API_KEY": "sk-ant",
    "OPENROUTER_API_KEY": "sk-or",
}


def test_the_environments_base_url_and_key_belong_together() -> None:
    from workers.llm.openai_client import OpenAIClient

    client = make_client(environ={**KEYS, "OPENAI_BASE_URL": "http://10.0.0.5:8000/v1/"})
    assert isinstance(client, OpenAIClient)
    assert (client.base_url, client.api_key) == ("http://10.0.0.5:8000/v1", "sk-openai")


def test_arguments_go_before_the_environment() -> None:
    client = make_client(
        base_url="http://127.0.0.1:9/v1",
        api_key="mine",
        model="m",
        environ={**KEYS, "OPENAI_BASE_URL": "http://elsewhere/v1", "MODEL_ID": "other"},
        kind="lean",
    )
    assert isinstance(client, LeanClient)
    assert (client.base_url, client.api_key, client.model) == ("http://127.0.0.1:9/v1", "mine", "m")


def test_a_provider_is_found_by_its_host_and_gets_its_own_key() -> None:
    from workers.llm.anthropic_client import ClaudeAPIClient

    client = make_client(base_url="https://openrouter.ai/api/v1", environ=KEYS)
    assert client.api_key == "sk-or"
    claude = make_client(base_url="https://api.anthropic.com", environ=KEYS)
    assert isinstance(claude, ClaudeAPIClient)
    assert claude.api_key == "sk-ant"


def test_another_providers_host_never_gets_the_openai_key() -> None:
    client = make_client("custom", base_url="https://api.groq.com/openai/v1", environ=KEYS)
    assert client.api_key == ""


def test_a_claude_model_goes_to_anthropic_when_no_endpoint_is_named() -> None:
    from workers.llm.anthropic_client import ClaudeAPIClient
    from workers.llm.openai_client import OpenAIClient

    assert isinstance(make_client(model="claude-x", environ=KEYS), ClaudeAPIClient)
    assert isinstance(make_client(model="gpt-x", environ=KEYS), OpenAIClient)


def test_the_environment_is_not_read_unless_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_BASE_URL", "http://127.0.0.1:9/v1")
    with pytest.raises(ConfigError, match="No model endpoint is named"):
        make_client()


def test_an_unknown_provider_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="vllm, sglang"):
        find_provider("nope")


@pytest.mark.parametrize("name", [name for name in PROVIDERS if name != "custom"])
def test_every_provider_makes_a_client_by_name_alone(name: str) -> None:
    assert make_client(name, model="m").base_url.startswith("http")


def test_a_base_url_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match="not the base URL"):
        make_client(base_url="localhost:8000", model="m")
