"""The sections of the settings; every field has a default, a unit and one sentence.

`pipeline.settings.Settings` combines them. Must not read files or the environment.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SecretStr,
    field_validator,
    model_validator,
)
from pydantic_settings import NoDecode

from pipeline.contract.agentcore import PayloadStyle
from pipeline.contract.base_urls import base_url_of
from pipeline.contract.run import check_queue


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


class _Section(BaseModel):
    # A traceback would show the input, and so the password of a URL.
    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)


class DatabaseSettings(_Section):
    """Where the trajectory store is."""

    url: SecretStr | None = Field(
        default=None, description="PostgreSQL URL; None: a private server under the data directory."
    )
    pool_size: int = Field(default=5, ge=1, description="Connections kept open per process.")
    connect_timeout_s: float = Field(default=10, gt=0, description="Longest wait for a connection.")
    network_timeout_s: float = Field(
        default=20,
        ge=2,
        description="Silence of the network after which a connection is given up.",
    )


class BrokerSettings(_Section):
    """Where messages travel."""

    url: SecretStr | None = Field(
        default=None,
        description="redis://, amqp:// or sqs:// URL; None: a private Redis under the data "
        "directory.",
    )
    prefix: str = Field(
        default="", description="Put before every queue name; separates deployments."
    )
    signing_key: SecretStr | None = Field(
        default=None,
        description="Shared by all processes, which refuse messages not signed with it; None: "
        "no signatures.",
    )
    tls_ca_file: Path | None = Field(
        default=None,
        description="CA certificates for a broker on TLS (rediss://, amqps://); None: the "
        "system's.",
    )
    tls_cert_file: Path | None = Field(
        default=None, description="Client certificate, where the broker asks for one."
    )
    tls_key_file: Path | None = Field(default=None, description="Key of the client certificate.")
    connect_timeout_s: float = Field(default=5, gt=0, description="Longest wait for a connection.")
    network_timeout_s: float = Field(
        default=20,
        ge=2,
        description="Silence of the network after which a connection is given up.",
    )

    def tls_files(self, *, ca: str, cert: str, key: str) -> dict[str, str]:
        """Return the paths that are set, under the names that a client uses."""
        files = {ca: self.tls_ca_file, cert: self.tls_cert_file, key: self.tls_key_file}
        return {name: str(path) for name, path in files.items() if path is not None}


class AwsSettings(_Section):
    """Endpoints of SQS and S3; credentials come from the usual AWS places."""

    region: str = Field(default="us-east-1", description="AWS region.")
    endpoint_url: SecretStr | None = Field(
        default=None, description="Endpoint of all AWS services."
    )
    sqs_endpoint_url: SecretStr | None = Field(default=None, description="Endpoint of SQS alone.")
    s3_endpoint_url: SecretStr | None = Field(default=None, description="Endpoint of S3 alone.")

    @property
    def sqs_endpoint(self) -> str | None:
        """The URL of SQS; None: that of AWS."""
        return _revealed(self.sqs_endpoint_url or self.endpoint_url)

    @property
    def s3_endpoint(self) -> str | None:
        """The URL of S3; None: that of AWS."""
        return _revealed(self.s3_endpoint_url or self.endpoint_url)


class DispatchSettings(_Section):
    """How rollouts are dispatched to the broker."""

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


class LeaseSettings(_Section):
    """How a lost worker is detected."""

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


class CollectorSettings(_Section):
    """How completions are recorded."""

    batch_size: int = Field(
        default=256, ge=1, description="Completions committed in one transaction."
    )
    linger_ms: float = Field(
        default=20.0, ge=0, description="Wait for more completions before a commit."
    )


class JournalSettings(_Section):
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


class PayloadSettings(_Section):
    """Where trajectories travel from worker to collector."""

    mode: Literal["inline", "object"] = Field(
        default="inline",
        description="`object`: always through the object store, before the message.",
    )
    url: SecretStr | None = Field(
        default=None,
        description="file:///… or s3://bucket/prefix; None: a folder of the data directory.",
    )
    inline_max_bytes: int = Field(
        default=256 * 1024, ge=0, description="Larger bodies go to the object store."
    )
    connect_timeout_s: float = Field(
        default=5, gt=0, description="Longest wait for a connection to S3."
    )
    network_timeout_s: float = Field(
        default=20, gt=0, description="Longest wait for data of S3; each call is tried three times."
    )


class LlmSettings(_Section):
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
        return _revealed(self.anthropic_base_url)


class LimitsRedisSettings(_Section):
    """The Redis that holds limits on model calls; `rollout limits set` sets them."""

    redis_url: SecretStr | None = Field(
        default=None,
        description="Redis that all workers reach; None: the broker where that is Redis, else "
        "calls are unlimited and only pause after 429s.",
    )


class AgentCoreSettings(_Section):
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
        default=None, description="Gateway of sessions (with /v1); `_rollout` carries it and a key."
    )


class McpServerSettings(_Section):
    """An MCP server: a command that the worker starts, or the URL of one that is running."""

    command: str | None = None
    args: tuple[str, ...] = ()
    url: SecretStr | None = None
    env: dict[str, SecretStr] = {}
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
        return self.model_dump(exclude={"env", "url"}) | {"env": env, "url": _revealed(self.url)}


class WorkerSettings(_Section):
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


class GatewaySettings(_Section):
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


class FlowerSettings(_Section):
    """The Flower dashboard."""

    host: str = Field(default="127.0.0.1", description="Address to listen on.")
    port: int = Field(
        default=5555, ge=0, le=65535, description="Port to listen on; 0: any free one."
    )
    user: str = Field(default="rollout", description="Name for basic authentication.")
    password: SecretStr | None = Field(
        default=None, description="Password; None: a new one is made and printed."
    )


def _revealed(url: SecretStr | None) -> str | None:
    return url.get_secret_value() if url else None
