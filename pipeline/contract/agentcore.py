"""A run whose attempts are sessions of a remote agent: its target, session ids and payloads.

Part of a run's configuration and of each request. The session id carries the attempt, so a result's
key alone says whose it is. Must not: hold a secret.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal
from urllib.parse import urlsplit
from uuid import UUID

from pydantic import BaseModel, Field, field_validator

from pipeline.contract.result_keys import SESSION_CHARS

PayloadStyle = Literal["training", "rollout", "both"]

#: Name under which commands show the agent of such a run.
AGENT = "agentcore"

_ARN = re.compile(r"arn:[\w-]+:bedrock-agentcore:(?P<region>[\w-]+):(?P<account>\w*):runtime/\S+")
_INPUT = re.compile(r"g\d{6,}")
_SESSION = re.compile(
    r"[a-z0-9][a-z0-9._-]{0,120}-a(?P<no>\d+)"
    r"-(?P<id>[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12})"
)


class AgentCoreTarget(BaseModel, frozen=True, extra="forbid", allow_inf_nan=False):
    """The remote agent of a run, and where its results go."""

    target: str = Field(description="Runtime ARN, or URL of a container that serves the agent.")
    results_bucket: str = Field(min_length=1, description="S3 bucket of the results.")
    results_queue_url: str | None = Field(
        default=None, description="SQS queue that announces results; None: the bucket is listed."
    )
    session_timeout_s: float = Field(
        default=900.0, gt=0, description="Longest wait for the result of one session."
    )
    payload_style: PayloadStyle = Field(
        default="both", description="Which of `_training` and `_rollout` a payload carries."
    )

    @field_validator("target")
    @classmethod
    def _check_target(cls, value: str) -> str:
        if _ARN.fullmatch(value):
            return value
        parts = urlsplit(value)
        # Reading the port raises ValueError where it is no number.
        if parts.scheme not in ("http", "https") or not parts.netloc or parts.port == 0:
            raise ValueError("it is neither an http(s) URL nor the ARN of an AgentCore runtime")
        if "@" in parts.netloc:
            raise ValueError("a target carries no credentials: runs are stored and shown")
        return value.rstrip("/")

    @property
    def is_arn(self) -> bool:
        """Whether the target is a runtime of AgentCore; only its sessions can be stopped."""
        return self.target.startswith("arn:")

    @property
    def region(self) -> str | None:
        """The AWS region of the runtime; None for a URL."""
        found = _ARN.fullmatch(self.target)
        return found["region"] if found else None

    @property
    def quota_scope(self) -> str:
        """The name under which calls are limited together: account and region, or the URL."""
        found = _ARN.fullmatch(self.target)
        return (
            f"agentcore://{found['account'] or 'own'}.{found['region']}" if found else self.target
        )

    @property
    def styles(self) -> tuple[bool, bool]:
        """Whether payloads carry `_training`, and `_rollout`; the first one needs a queue."""
        training = self.payload_style != "rollout" and self.results_queue_url is not None
        return training, self.payload_style != "training"


def input_id_of(group_no: int) -> str:
    """Return the `input_id` of a group."""
    return f"g{group_no:06d}"


def session_id_of(label: str, rollout_id: UUID) -> str:
    """Return the id of the one session of an attempt, as AgentCore accepts it."""
    session_id = f"{label}-{rollout_id}"
    assert SESSION_CHARS[0] <= len(session_id) <= SESSION_CHARS[1]
    return session_id


def attempt_of_key(key: str) -> tuple[UUID, int] | None:
    """Return the `AttemptKey` in a result's key, of either style; None: another program's key."""
    _, _, rest = key.partition("/")
    name = rest.removesuffix(".json")
    group = _INPUT.match(name)
    if group is None or name == rest or name[group.end() : group.end() + 1] not in ("_", "/"):
        return None
    found = _SESSION.fullmatch(name[group.end() + 1 :])
    return (UUID(found["id"]), int(found["no"])) if found else None


def payload_of(
    target: AgentCoreTarget,
    *,
    run: str,
    group_no: int,
    session_id: str,
    prompt: Mapping[str, Any],
    model: Mapping[str, Any],
    reward: str | None = None,
) -> dict[str, Any]:
    """Return the payload of an invocation.

    Args:
        target: The run's.
        run: Its slug, which is the experiment.
        group_no: The group's, which is the input.
        session_id: The attempt's.
        prompt: The prompt as it is stored: `content` or `messages`, `answer` and other columns.
        model: What the run names of its model: `base_url`, `model_id`, `sampling_params`; with a
            gateway `api_key`, too.
        reward: The run's, which scores the result in the place of the app's.
    """
    own = ("content", "_training", "_rollout")
    payload = {name: value for name, value in prompt.items() if name not in own}
    payload["prompt"] = prompt["content"] if "content" in prompt else prompt.get("messages")
    shared = {
        "exp_id": run,
        "input_id": input_id_of(group_no),
        "s3_bucket": target.results_bucket,
    }
    with_training, with_rollout = target.styles
    if with_training:
        # Only `_rollout` names models; without it, an agent could not reach its gateway.
        gateway: Mapping[str, Any] = model if "api_key" in model and not with_rollout else {}
        payload["_training"] = {
            **gateway,
            **shared,
            "session_id": session_id,
            "sqs_url": target.results_queue_url,
        }
        if reward is not None:
            payload["_training"]["rewards"] = "optional"
    if with_rollout:
        payload["_rollout"] = {**model, **shared}
    return payload
