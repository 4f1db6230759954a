"""The sections of the settings; every field has a default, a unit and one sentence.

Those about servers stand in `servers.py`. `pipeline.settings.Settings` combines all of them. Must
not read files or the environment.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BeforeValidator,
    Field,
    SecretStr,
    field_validator,
    model_validator,
)
from pydantic_settings import NoDecode

from pipeline.contract.agentcore import PayloadStyle
from pipeline.contract.base_urls import base_url_of
from pipeline.contract.run import check_queue
from pipeline.settings.servers import AwsSettings as AwsSettings
from pipeline.settings.servers import BrokerSettings as BrokerSettings
from pipeline.settings.servers import DatabaseSettings as DatabaseSettings
from pipeline.settings.servers import LimitsRedisSettings as LimitsRedisSettings
from pipeline.settings.servers import PayloadSettings as PayloadSettings
from pipeline.settings.servers import Section, revealed


def _split(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    if value.lstrip().startswith("["):
        return json.loads(value)
    return [name for part in value.split(",") if (name := part.strip())]


#: A list; in the environment `a,b`, or JSON where a name holds a comma.
Names = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_split)]


#: As `Names`, of URLs. All URLs are secret here, because each may carry a password.
SecretUrls = Annotated[tuple[SecretStr, ...], NoDecode, BeforeValidator(_split)]


class DispatchSettings(Section):
    """The dispatch of rollouts to the broker."""

    max_in_flight: int = Field(
        default=2000, ge=1, description="Most attempts on the broker and in workers together."
    )
    runs: tuple[str, ...] = Field(
        default=(), description="Runs whose rollouts are dispatched; none: all."
    )
    batch_size: int = Field(default=500, ge=1, description="Rollouts claimed in one transaction.")
    poll_s: float = Field(
        default=1.0, gt=0, description="Time between two polls for work, if no notification comes."
    )
    request_expires_s: float = Field(
        default=600,
        gt=0,
        description="SQS: age at which an unstarted request is dropped, by the clock of SQS. On "
        "Redis and RabbitMQ requests wait as long as they must.",
    )


class LeaseSettings(Section):
    """The detection of lost workers."""

    heartbeat_s: float = Field(
        default=5.0, gt=0, description="Time between two heartbeats of a worker."
    )
    lease_s: float = Field(
        default=30.0, gt=0, description="Time without a heartbeat after which an attempt is lost."
    )
    grace_s: float = Field(
        default=10.0,
        ge=0,
        description="Time after the collector (re)connects before leases can expire.",
    )
    poll_s: float = Field(
        default=0.5, gt=0, description="Time between two checks for expired leases."
    )
    max_redispatch_per_s: int = Field(
        default=500, ge=1, description="Lost attempts requeued per second."
    )


class CollectorSettings(Section):
    """The recording of completions."""

    batch_size: int = Field(
        default=256, ge=1, description="Completions committed in one transaction."
    )
    linger_ms: float = Field(
        default=20.0, ge=0, description="Wait for more completions before a commit."
    )


class JournalSettings(Section):
    """Model calls that are kept while an attempt runs; the next attempt replays them."""

    after_s: float = Field(
        default=5.0,
        ge=-1,
        description="Generation time of the calls that are kept together: after a loss at most "
        "this is repeated, and the call under way; 0: each call is kept; -1: none.",
    )
    max_bytes: int = Field(
        default=16 * 1024 * 1024,
        ge=0,
        description="Largest journal of a rollout, compressed; later calls are not kept.",
    )


class LlmSettings(Section):
    """The model endpoint workers use where a run names none."""

    base_url: Annotated[
        SecretStr | tuple[SecretStr, ...] | None, NoDecode, BeforeValidator(base_url_of)
    ] = Field(
        default=None,
        description="OpenAI-compatible endpoint, or several that serve the same model.",
    )
    api_key: SecretStr | None = Field(default=None, description="API key of llm.base_url.")
    anthropic_base_url: SecretStr | None = Field(default=None, description="Anthropic endpoint.")
    anthropic_api_key: SecretStr | None = Field(
        default=None, description="API key of llm.anthropic_base_url."
    )
    model: str | None = Field(default=None, description="Model name where a run names none.")
    client: Literal["sdk", "lean"] = Field(
        default="lean",
        description="`lean`: straight HTTP, a quarter of the CPU; `sdk`: the OpenAI SDK.",
    )
    timeout_s: float = Field(default=600, gt=0, description="Wall clock of one model call.")
    max_retries: int = Field(default=10, ge=0, description="Retries of one model call.")
    tag_requests: bool = Field(
        default=True, description="Send the rollout's label as the field `user` of each call."
    )
    server: Literal["auto", "vllm", "sglang", "openai"] = Field(
        default="auto",
        description="Decides how token ids are asked for; `auto`: the server is asked which it is; "
        "`openai`: it returns none.",
    )

    @property
    def base_urls(self) -> tuple[str, ...]:
        """The URLs of `base_url`, with their credentials; none where it is None."""
        if self.base_url is None:
            return ()
        urls = self.base_url if isinstance(self.base_url, tuple) else (self.base_url,)
        return tuple(url.get_secret_value() for url in urls)

    @property
    def anthropic_url(self) -> str | None:
        """The URL of `anthropic_base_url`, with its credentials."""
        return revealed(self.anthropic_base_url)


class AgentCoreSettings(Section):
    """Runs whose attempts are sessions of an agent on AgentCore, or of a container."""

    results_bucket: str | None = Field(
        default=None, description="S3 bucket of the results; required for such a run."
    )
    results_queue_url: SecretStr | None = Field(
        default=None,
        description="SQS queue that announces results; None: the bucket is listed instead.",
    )
    requests_per_second: float = Field(
        default=25.0,
        gt=0,
        description="Invocations and stops together, of all processes, without bursts.",
    )
    max_sessions: int = Field(
        default=1000, ge=1, description="Sessions that exist at once, of all runs."
    )
    session_timeout_s: float = Field(
        default=900.0, gt=0, description="Longest wait for the result of one session."
    )
    payload_style: PayloadStyle = Field(
        default="both",
        description="Which of `_training` (needs the queue) and `_rollout` a payload carries.",
    )
    gateway_url: SecretStr | None = Field(
        default=None, description="Gateway of sessions (with /v1); for workers and controller."
    )


class McpServerSettings(Section):
    """An MCP server: a command that the worker starts, or the URL of one that is running."""

    command: str | None = None
    args: tuple[str, ...] = ()
    url: SecretStr | None = None
    env: dict[str, SecretStr] = Field(default={})
    cwd: Path | None = None
    name_prefix: str = ""
    call_timeout_s: float = Field(default=60.0, gt=0)

    @model_validator(mode="after")
    def _check_place(self) -> Self:
        if (self.command is None) == (self.url is None):
            raise ValueError("give either command (a server to start) or url (one that is running)")
        return self

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of `workers.tools.mcp_tools.mcp_tools`."""
        env = {name: value.get_secret_value() for name, value in self.env.items()}
        return self.model_dump(exclude={"env", "url"}) | {"env": env, "url": revealed(self.url)}


class WorkerSettings(Section):
    """The worker process."""

    concurrency: int = Field(default=100, ge=1, description="Attempts run at once.")
    queues: Names = Field(default=("rollouts",), description="Queues to take requests from.")
    plugins: Names = Field(
        default=(), description="Modules (or .py files) that register agents, tools and rewards."
    )
    mcp: dict[str, McpServerSettings] = Field(
        default={}, description="MCP servers by name; a run has their tools by the tool `mcp:NAME`."
    )
    allowed_base_urls: SecretUrls = Field(
        default=(),
        description="Endpoints and remote agents a run may name besides loopback and llm.base_url.",
    )
    sandbox: Literal["auto", "bubblewrap", "namespaces", "process"] = Field(
        default="auto",
        description="Sandbox of runs that name none; `auto`: the best that confines commands here, "
        "else they are refused; `process`: unconfined.",
    )
    drain_s: float = Field(default=30.0, ge=0, description="Time to finish after SIGTERM.")
    announce_s: float = Field(
        default=0.5, gt=0, description="Delay before a new attempt is announced."
    )
    isolated_slots: int = Field(
        default=8,
        ge=0,
        description="Rollouts that were lost twice and run in processes of their own at once; "
        "further ones run in the worker; 0: all do.",
    )
    policy_pause_wait_s: float = Field(
        default=300.0,
        gt=0,
        description="Longest wait of a model call while the run's policy is paused; then the "
        "rollout is tried again later.",
    )

    @field_validator("queues")
    @classmethod
    def _check_queues(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(check_queue(name) for name in value)

    @property
    def allowed_urls(self) -> tuple[str, ...]:
        """The URLs of `allowed_base_urls`."""
        return tuple(url.get_secret_value() for url in self.allowed_base_urls)


class GatewaySettings(Section):
    """The gateway: model calls of agents that bring a client of their own."""

    max_body_bytes: int = Field(
        default=32 * 1024 * 1024, ge=1024, description="Largest request that is read."
    )
    limit_wait_s: float = Field(
        default=300,
        gt=0,
        description="Longest wait of a call for the shared limits; then its client gets a 429.",
    )
    key_lifetime_s: float = Field(
        default=86400, gt=0, description="Time for which the key of an attempt is accepted."
    )


class FlowerSettings(Section):
    """The Flower dashboard."""

    host: str = Field(default="127.0.0.1", description="Address to listen on.")
    port: int = Field(
        default=5555, ge=0, le=65535, description="Port to listen on; 0: any free one."
    )
    user: str = Field(default="rollout", description="Name for basic authentication.")
    password: SecretStr | None = Field(
        default=None, description="Password; None: a new one is made and printed."
    )
