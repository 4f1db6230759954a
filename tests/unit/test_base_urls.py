"""Which endpoints a worker calls, and with which key: its settings decide, no message does."""

from __future__ import annotations

from typing import Any

import pytest
from fixtures.messages import request_of
from pydantic import SecretStr, ValidationError

from pipeline.contract.agentcore import AgentCoreTarget
from pipeline.contract.errors import ContractError, ModelBadRequest
from pipeline.contract.run import RunConfig
from pipeline.limits.local_pause import LocalPauses
from pipeline.settings import Settings, load_settings
from workers.process.attempt import Attempt
from workers.process.endpoints import announced_endpoints, require_allowed_target
from workers.process.remote_session import RemoteSessions
from workers.process.runtime import Runtime

OWN = "https://models.example/v1"
CLAUDE = "https://claude.example"
ALLOWED = "http://other.example:8000/v1"


@pytest.fixture
def settings(tmp_path) -> Settings:
    return load_settings(
        overrides={
            "llm": {
                "base_url": OWN,
                "api_key": "sk-own",
                "anthropic_base_url": CLAUDE,
                "anthropic_api_key": "sk-claude",
                "model": "m",
            },
            "worker": {"allowed_base_urls": [ALLOWED]},
        },
        start=tmp_path,
    )


def client_for(settings: Settings, **request: Any) -> Any:
    """Return the real client that an attempt of this request would call."""
    runtime = Runtime(settings, "w")
    calls = runtime.model_calls(Attempt(request_of(**request), "w"))
    client: Any = calls._client
    return client._client


@pytest.mark.parametrize(
    ("base_url", "key"),
    [
        (None, "sk-own"),
        (OWN, "sk-own"),
        (OWN + "/", "sk-own"),
        ("https://MODELS.example/v1", "sk-own"),
        (CLAUDE, "sk-claude"),
        (ALLOWED, ""),
        ("http://127.0.0.1:8000/v1", ""),
        ("http://localhost/v1", ""),
        ("http://[::1]:9/v1", ""),
    ],
)
def test_a_key_goes_to_the_endpoint_it_was_configured_for_and_no_other(settings, base_url, key):
    client = client_for(settings, base_url=base_url)
    assert client.api_key == key


def test_replicas_are_each_called_with_the_key_they_were_configured_with(settings):
    client = client_for(settings, base_url=[OWN, ALLOWED])
    assert {url: each.api_key for url, each in client.clients.items()} == {
        OWN: "sk-own",
        ALLOWED: "",
    }


def test_one_replica_that_may_not_be_called_is_enough_to_refuse_them_all(settings):
    with pytest.raises(ModelBadRequest, match=r"may not call https://evil\.example/v1"):
        client_for(settings, base_url=f"{OWN},https://evil.example/v1")


def test_all_endpoints_of_the_settings_are_the_workers_own(settings):
    llm = settings.llm.model_copy(update={"base_url": (SecretStr(OWN), SecretStr(ALLOWED))})
    client = client_for(settings.model_copy(update={"llm": llm}), base_url=None)
    assert [each.api_key for each in client.clients.values()] == ["sk-own", "sk-own"]


#: Endpoints of nobody, some of which look like an allowed one.
FOREIGN = [
    "https://evil.example/v1",
    "http://models.example/v1",
    "https://models.example:444/v1",
    "https://models.example/v2",
    "https://models.example.evil.example/v1",
    "https://models.example@evil.example/v1",
    "https://models.example%40evil.example/v1",
    "http://127.0.0.1.evil.example/v1",
    "http://localhost.evil.example/v1",
    "http://127.0.0.1@evil.example/v1",
    "http://evil.example\\@127.0.0.1/v1",
    "http://127.0.0.1\t@evil.example/v1",
    "http://user:pw@127.0.0.1/v1",
    "http://evil.example#@127.0.0.1/v1",
    "http://evil.example?@127.0.0.1/v1",
    "//evil.example/v1",
    "http:evil.example/v1",
    "file:///etc/passwd",
    "http://[::ffff:192.0.2.1]/v1",
    "http://169.254.169.254/latest",
    "http://0.0.0.0/v1",
    "http://[::1/v1",
    "http://127.0.0.1:99999/v1",
    "/",
]


@pytest.mark.parametrize("base_url", FOREIGN)
def test_a_message_cannot_send_a_worker_anywhere_else(settings, base_url):
    with pytest.raises(ModelBadRequest) as refused:
        client_for(settings, base_url=base_url)
    assert refused.value.code in ("endpoint_not_allowed", "bad_endpoint")
    assert "sk-" not in str(refused.value)


@pytest.mark.parametrize("target", FOREIGN)
def test_a_run_cannot_send_a_worker_to_a_remote_agent_anywhere_else(settings, target):
    with pytest.raises((ContractError, ValidationError)) as refused:
        require_allowed_target(AgentCoreTarget(target=target, results_bucket="b"), settings)
    if isinstance(refused.value, ContractError):
        assert refused.value.code == "endpoint_not_allowed"
        assert "ROLLOUT_WORKER__ALLOWED_BASE_URLS" in str(refused.value)


@pytest.mark.parametrize(
    "target",
    [
        ALLOWED,
        ALLOWED + "/",
        "http://127.0.0.1:8080",
        "http://localhost:8080",
        "arn:aws:bedrock-agentcore:us-west-2:123456789012:runtime/x",
    ],
)
def test_loopback_the_settings_and_runtimes_of_aws_are_targets(settings, target):
    require_allowed_target(AgentCoreTarget(target=target, results_bucket="b"), settings)


async def test_a_worker_invokes_no_container_that_it_may_not_call(settings):
    target = AgentCoreTarget(target="http://169.254.169.254", results_bucket="b")
    sessions = RemoteSessions(settings, LocalPauses())
    with pytest.raises(ContractError, match=r"may not call http://169\.254\.169\.254"):
        await sessions.start(Attempt(request_of(agentcore=target), "w"))
    assert RunConfig(reward=None, agentcore=target).called_urls == (target.target,)


def test_neither_prompt_nor_options_of_a_message_name_an_endpoint(settings):
    evil = {"base_url": "https://evil.example/v1", "api_key": "sk-evil", "endpoint": "evil"}
    client = client_for(settings, prompt={"prompt": "Hello.", **evil}, sampling=dict(evil))
    assert (client.base_url, client.api_key) == (OWN, "sk-own")


def test_an_endpoint_is_called_with_the_credentials_of_the_settings_and_no_others(settings):
    own = OWN.replace("://", "://user:planted@")
    llm = settings.llm.model_copy(update={"base_url": SecretStr(own), "api_key": None})
    settings = settings.model_copy(update={"llm": llm})
    for named in (None, OWN, OWN.replace("://", "://other:word@")):
        client = client_for(settings, base_url=named)
        assert client.base_url == own
        assert "planted" not in f"{client!r} {client.endpoint}"
    assert announced_endpoints(settings)[0] == OWN
