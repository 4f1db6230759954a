"""What travels over the broker: requests to workers, their completions and heartbeats.

Written and read by `pipeline/queue`, the worker and the collector. Headers are JSON with a schema
number; the trajectory is a binary body beside them. Never a secret: keys are the worker's own.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, TypeVar
from uuid import UUID

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from pipeline.contract.activity import RunActivity
from pipeline.contract.errors import SCORED_BY_DEFAULT, ErrorClass, MalformedMessage
from pipeline.contract.rollout import LABEL_PATTERN, StopReason
from pipeline.contract.run import AttemptLimits, BaseUrl

SCHEMA = 1

TASK_RUN = "rollout.run"
TASK_RESCORE = "rollout.rescore"
COMPLETION_QUEUE = "rollout.completions"
HEARTBEAT_QUEUE = "rollout.heartbeats"


#: A forged one must not lead out of the folders that it names files in.
Label = Annotated[str, Field(pattern=LABEL_PATTERN)]


class _Message(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    schema_version: int = SCHEMA


class RolloutRequest(_Message):
    """One attempt, as a worker receives it."""

    run: str
    run_id: UUID
    group_id: UUID
    group_no: int
    rollout_id: UUID
    rollout_index: int
    n: int
    attempt_no: int = Field(ge=1)
    label: Label
    prompt: dict[str, Any]
    agent: str
    agent_config: dict[str, Any] = {}
    tools: tuple[str, ...] = ()
    tools_config: dict[str, dict[str, Any]] = {}
    reward: str | None = None
    reward_config: dict[str, Any] = {}
    model: str | None = None
    base_url: BaseUrl = None
    sampling: dict[str, Any] = {}
    limits: AttemptLimits = AttemptLimits()
    scored: tuple[ErrorClass, ...] = SCORED_BY_DEFAULT
    strict_tools: bool = False
    policy_version: int = 0
    weight: float = 1.0

    def describe(self) -> str:
        """Return the one line that operators see as the task's arguments."""
        return (
            f"run={self.run} group=g{self.group_no:06d} "
            f"rollout={self.rollout_index + 1}/{self.n} policy={self.policy_version}"
        )


class RescoreRequest(_Message):
    """A stored trajectory to be scored again, as a worker receives it.

    The trajectory is `body` (base64 of the stored bytes), or lies at `body_uri`.
    """

    run: str
    run_id: UUID
    group_id: UUID
    group_no: int
    rollout_id: UUID
    rollout_index: int
    n: int
    attempt_no: int = Field(ge=1)
    label: Label
    prompt: dict[str, Any]
    reward: str
    reward_config: dict[str, Any] = {}
    reward_timeout_s: float = 60.0
    codec: str = "zstd+json"
    body: str = Field(default="", repr=False)
    body_uri: str | None = None

    def describe(self) -> str:
        """Return the one line that operators see as the task's arguments."""
        return (
            f"run={self.run} group=g{self.group_no:06d} "
            f"rollout={self.rollout_index + 1}/{self.n} reward={self.reward}"
        )


class ErrorRecord(BaseModel):
    """What went wrong with an attempt, kept with it; secrets are already redacted."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    error_class: ErrorClass
    code: str
    message: str
    detail: str = ""
    phase: str = ""
    retry_after_s: float | None = None


class RewardPart(BaseModel):
    """One scorer's verdict on an attempt."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    name: str
    value: float | None
    weight: float = 1.0
    status: Literal["ok", "error", "pending"] = "ok"
    error_class: ErrorClass | None = None
    latency_ms: float = 0.0
    scorer_version: str = "1"


class Completion(_Message):
    """A worker's answer to one request: what an attempt came to, or what a scorer said again.

    `body` is the compressed `TrajectoryRecord`; it travels beside the JSON header, or lies in the
    object store at `body_uri`. Both are empty where the attempt left nothing behind.
    """

    run_id: UUID
    group_id: UUID
    rollout_id: UUID
    attempt_no: int = Field(ge=1)
    label: Label
    worker_id: str
    purpose: Literal["attempt", "rescore"] = "attempt"
    outcome: Literal["succeeded", "failed"]
    stop_reason: StopReason | None = None
    reward: float | None = None
    reward_parts: tuple[RewardPart, ...] = ()
    error: ErrorRecord | None = None
    n_turns: int = 0
    n_steps: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    version_min: int | None = None
    version_max: int | None = None
    timings: dict[str, float] = {}
    codec: str = "zstd+json"
    body: bytes = Field(default=b"", exclude=True, repr=False)
    body_bytes: int = 0
    body_uri: str | None = None

    @property
    def error_class(self) -> ErrorClass | None:
        """The class of what went wrong, None for a success."""
        return self.error.error_class if self.error else None


class AttemptBeat(BaseModel):
    """One attempt in a heartbeat."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    rollout_id: UUID
    attempt_no: int
    phase: str
    step: int = 0


class RefusedMessage(BaseModel):
    """A message a worker could not take and cannot answer."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: str
    reason: str
    raw: str


class Heartbeat(_Message):
    """What a worker holds, what it takes, and what it did for the runs it began last."""

    worker_id: str
    sequence: int
    attempts: tuple[AttemptBeat, ...] = ()
    capacity: int = 0
    loop_lag_ms: float = 0.0
    stopping: bool = False
    refused: tuple[RefusedMessage, ...] = ()
    queues: tuple[str, ...] = ()
    base_urls: tuple[str, ...] = Field(
        default=(), description="Endpoints it may call besides those on loopback."
    )
    activity: tuple[RunActivity, ...] = ()


M = TypeVar("M", bound=_Message)


def parse_message(kind: type[M], data: bytes | str) -> M:
    """Decode a message's JSON.

    Raises:
        MalformedMessage: It is not JSON, not of this shape, or of an unknown schema.
    """
    try:
        message = kind.model_validate_json(data)
    except ValidationError as error:
        # A message of the future has fields of the future: its number tells more than they do.
        _require_schema(kind, _schema_in(data))
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(str(part) for part in first["loc"]) or "the message"
        raise MalformedMessage(
            f"A {kind.__name__} could not be decoded.", why=f"{place}: {first['msg']}."
        ) from error
    _require_schema(kind, message.schema_version)
    return message


def _require_schema(kind: type[_Message], schema: Any) -> None:
    if schema != SCHEMA:
        raise MalformedMessage(
            f"A {kind.__name__} has schema {schema}; this version reads {SCHEMA}.",
            remedy="Upgrade the process that reads it, then requeue it: rollout dlq requeue",
        )


def _schema_in(data: bytes | str) -> Any:
    """Return the schema number of something that is no message we know; ours where it has none."""
    try:
        found = json.loads(data)["schema_version"]
    except (ValueError, TypeError, LookupError, RecursionError):
        return SCHEMA
    return found if type(found) is int else SCHEMA


def storable(text: str) -> str:
    """Return text as Postgres takes it: without NUL and lone surrogates, which models do write."""
    return text.replace("\0", "\\0").encode("utf-8", "replace").decode()
