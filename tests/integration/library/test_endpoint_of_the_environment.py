import pytest

from workers.agentic_rollout import AgenticRollout, AgenticRolloutConfig, client_from_environment


def test_without_any_variable_there_is_no_client():
    assert AgenticRollout(AgenticRolloutConfig()).llm_generate_func is None


@pytest.mark.parametrize(
    ("variables", "kind", "base_url", "model"),
    [
        (
            {"OPENAI_API_KEY": "k"},
            "OpenAIClient",
            "https://api.openai.com/v1",
            "gpt-4o-mini",
        ),
        (
            {"OPENAI_BASE_URL": "http://127.0.0.1:9/v1", "OPENAI_MODEL": "m"},
            "OpenAIClient",
            "http://127.0.0.1:9/v1",
            "m",
        ),
        (
            {"OPENAI_API_KEY": "k", "OPENAI_BASE_URL": "https://api.openai.com/v1"},
            "OpenAIClient",
            "https://api.openai.com/v1",
            "gpt-4o-mini",
        ),
        (
            {"ANTHROPIC_API_KEY": "k", "ANTHROPIC_MODEL": "m"},
            "ClaudeAPIClient",
            "https://api.anthropic.com",
            "m",
        ),
        (
            {"ANTHROPIC_API_KEY": "k", "OPENAI_API_KEY": "k", "OPENAI_MODEL": "m"},
            "OpenAIClient",
            "https://api.openai.com/v1",
            "m",
        ),
    ],
    ids=["openai", "custom", "document", "anthropic", "both"],
)
def test_the_environment_names_the_model_endpoint(monkeypatch, variables, kind, base_url, model):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    client = client_from_environment()
    assert type(client).__name__ == kind
    assert (client.base_url, client.model) == (base_url, model)
