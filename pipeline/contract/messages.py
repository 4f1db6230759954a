"""The messages on the broker: requests to workers, their completions and heartbeats, and markers.

Used by dispatcher, worker, collector and `pipeline/queue`. Headers are JSON with a schema number; a
trajectory is a binary body beside them. Must not: carry a secret; workers have their own keys.
"""

from __future__ import annotations

import json
from datetime import datetime
from typing import Annotated, Any, ClassVar, Literal, TypeVar
from uuid import UUID

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from pipeline.contract.activity import RunActivity
from pipeline.contract.errors import SCORED_BY_DEFAULT, ErrorClass, MalformedMessage
from pipeline.contract.names import Name, PartName
from pipeline.contract.policy import Policy
from pipeline.contract.rollout import LABEL_PATTERN, StopReason
from pipeline.contract.run import AttemptSpec

SCHEMA = 1

TASK_RUN = "rollout.run"
TASK_RESCORE = "rollout.rescore"
COMPLETION_QUEUE = "rollout.completions"
HEARTBEAT_QUEUE = "rollout.heartbeats"
#: The queues that collectors read, and send markers through.
MARKED_QUEUES = (COMPLETION_QUEUE, HEARTBEAT_QUEUE)


#: A label names files and object keys: a forged one must not lead out of their folder.
Label = Annotated[str, Field(pattern=LABEL_PATTERN)]

#: Longest texts of an error that are kept.
_CODE_CHARS, _MESSAGE_CHARS, _DETAIL_CHARS = 100, 2_000, 8_000

#: `digest_of` a body; it becomes part of an object's key.
BodyDigest = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]

AttemptKey = tuple[UUID, int]


class _Value(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class _Message(_Value):
    schema_version: int = SCHEMA


class AttemptRef(_Value):
    """The attempt that a message is about; `attempt_no` is also the fence.

    Messages inherit these fields, so the JSON has no nested object for them.
    """

    run_id: UUID
    group_id: UUID
    rollout_id: UUID
    attempt_no: int = Field(ge=1)
    label: Label

    @property
    def key(self) -> AttemptKey:
        """The attempt's key in the store and in a worker."""
        return self.rollout_id, self.attempt_no

    @property
    def identity(self) -> dict[str, Any]:
        """The fields of `AttemptRef`, for another message about the same attempt."""
        return {name: getattr(self, name) for name in AttemptRef.model_fields}


class _Request(AttemptRef, _Message):
    run: str
    group_no: int
    rollout_index: int
    n: int
    prompt: dict[str, Any]

    #: Name of the Celery task that handles the request.
    task: ClassVar[str]

    @property
    def task_id(self) -> str:
        """The id of its Celery task."""
        return self.label

    def describe(self) -> str:
        """Return the one line that operators see as the task's arguments."""
        position = f"group=g{self.group_no:06d} rollout={self.rollout_index + 1}/{self.n}"
        return f"run={self.run} {position}"


class RolloutRequest(_Request, AttemptSpec):
    """One attempt, as a worker receives it."""

    task = TASK_RUN

    scored: tuple[ErrorClass, ...] = SCORED_BY_DEFAULT
    strict_tools: bool = False
    policy_version: int = 0
    policy: Policy | None = None
    weight: float = 1.0
    #: Earlier attempts that were lost: from the second on the rollout runs in its own process.
    lost_count: int = 0
    #: Versions that a recorded call may be behind the newest one and still be replayed; None: any.
    max_staleness: int | None = None
    #: What earlier attempts recorded: frames of the journal (base64), or an object with them.
    journal: str = Field(default="", repr=False)
    journal_uri: str | None = None
    journal_digest: BodyDigest | None = None
    #: An earlier attempt, whose trajectory this one scores without running the agent, and its
    #: completion: a frame (base64).
    unscored_no: int | None = None
    unscored: str = Field(default="", repr=False)

    @property
    def own_sampling(self) -> dict[str, Any]:
        """The sampling parameters of this rollout: a seed differs from those of its group."""
        sampling = dict(self.sampling)
        if "seed" in sampling:
            # Another attempt of a rollout gets the same seed.
            sampling["seed"] = int(sampling["seed"]) + self.rollout_index
        return sampling

    def describe(self) -> str:
        """Return the one line that operators see as the task's arguments."""
        return f"{super().describe()} policy={self.policy_version}"


class RescoreRequest(_Request):
    """A stored trajectory to be scored again, as a worker receives it.

    The trajectory is in `body` (base64 of the stored bytes) or in the payload store at `body_uri`.
    """

    task = TASK_RESCORE

    reward: str
    reward_config: dict[str, Any] = {}
    reward_timeout_s: float = 60.0
    codec: str = "zstd+json"
    body: str = Field(default="", repr=False)
    body_uri: str | None = None
    body_digest: BodyDigest | None = None

    @property
    def task_id(self) -> str:
        """The id of its Celery task: a trajectory may be scored by several rewards."""
        return f"{self.label}-{self.reward}"

    def describe(self) -> str:
        """Return the one line that operators see as the task's arguments."""
        return f"{super().describe()} reward={self.reward}"


class ErrorRecord(BaseModel):
    """The error of an attempt, kept with it; secrets are already redacted.

    Longer texts are cut: of a traceback the end is kept, because it names the error.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    error_class: ErrorClass
    code: Annotated[str, AfterValidator(lambda text: text[:_CODE_CHARS])]
    message: Annotated[str, AfterValidator(lambda text: text[:_MESSAGE_CHARS])]
    detail: Annotated[str, AfterValidator(lambda text: text[-_DETAIL_CHARS:])] = ""
    phase: str = ""
    retry_after_s: float | None = None


class RewardPart(_Value):
    """One scorer's value for an attempt, or its error."""

    name: PartName
    value: float | None
    weight: float = 1.0
    status: Literal["ok", "error", "pending"] = "ok"
    error_class: ErrorClass | None = None
    latency_ms: float = 0.0
    scorer_version: Name = "1"


class Completion(AttemptRef, _Message):
    """A worker's answer to one request: the outcome of an attempt, or of scoring it again.

    Or its handover: a remote session works on the attempt now, and its result will be the outcome.
    Or, from the results service, the unscored trajectory of such a session.

    `body` is the compressed `TrajectoryRecord`, `tokens` the token body of its model calls. Both
    travel beside the JSON header, or are in the payload store at `body_uri` and `tokens_uri`. They
    are empty where the attempt left no trajectory, and where the server recorded no ids. Messages
    of earlier versions have no digests.
    """

    worker_id: Name
    purpose: Literal["attempt", "rescore", "handover", "unscored"] = "attempt"
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
    body_digest: BodyDigest | None = None
    tokens: bytes = Field(default=b"", exclude=True, repr=False)
    tokens_bytes: int = 0
    tokens_uri: str | None = None
    tokens_digest: BodyDigest | None = None
    calls_replayed: int = Field(default=0, ge=0)
    replayed_from: tuple[int, ...] = Field(
        default=(), description="Attempts that made these calls."
    )
    tokens_saved: int = Field(default=0, ge=0, description="Tokens of the replayed calls.")

    @property
    def error_class(self) -> ErrorClass | None:
        """The class of the error; None for a success."""
        return self.error.error_class if self.error else None


class JournalFrame(AttemptRef, _Message):
    """Model calls of a running attempt, recorded before its end.

    A worker sends them so that the next attempt need not make them again, a gateway so that the
    trajectory of a remote attempt has them. `body` is made by `pack_calls`; it travels beside the
    JSON header, or is in the payload store at `body_uri`.
    """

    first: int = Field(ge=0, description="Number of the first call, see `CallKey`.")
    n_calls: int = Field(ge=1)
    body: bytes = Field(default=b"", exclude=True, repr=False)
    body_bytes: int = 0
    body_uri: str | None = None
    body_digest: BodyDigest | None = None


class AttemptBeat(_Value):
    """One attempt in a heartbeat."""

    rollout_id: UUID
    attempt_no: int
    phase: Name
    step: int = 0

    @property
    def key(self) -> AttemptKey:
        """The attempt's key in the store and in a worker."""
        return self.rollout_id, self.attempt_no


class RejectedMessage(_Value):
    """A message that a worker rejected and cannot answer by a completion."""

    kind: str
    reason: str
    raw: str


class Heartbeat(_Message):
    """The attempts a worker holds, the requests it takes, and its activity for the newest runs."""

    worker_id: Name
    sequence: int
    attempts: tuple[AttemptBeat, ...] = ()
    capacity: int = 0
    loop_lag_ms: float = 0.0
    stopping: bool = False
    refused: tuple[RejectedMessage, ...] = ()
    queues: tuple[str, ...] = ()
    base_urls: tuple[str, ...] = Field(
        default=(), description="Endpoints it may call besides those on loopback."
    )
    activity: tuple[RunActivity, ...] = ()


class Marker(_Message):
    """A collector's message to all collectors.

    When a marker is read from a queue that keeps order, all messages that were sent to that queue
    before `sent_at` have been read.
    """

    collector_id: str
    queue: str
    sent_at: datetime = Field(description="By the clock of the store.")


M = TypeVar("M", bound=_Message)


def parse_message(kind: type[M], data: bytes | str) -> M:
    """Decode a message's JSON.

    Raises:
        MalformedMessage: The data is not JSON, not of this shape, or of an unknown schema.
    """
    try:
        message = kind.model_validate_json(data)
    except ValidationError as error:
        # A newer version's message may have unknown fields; report its schema number instead.
        _require_schema(kind, _schema_in(data))
        first = error.errors(include_url=False, include_input=False)[0]
        field = ".".join(str(part) for part in first["loc"]) or "the message"
        raise MalformedMessage(
            f"A {kind.__name__} could not be decoded.", why=f"{field}: {first['msg']}."
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
    """Return the schema number in data that could not be decoded; this version's by default."""
    try:
        found = json.loads(data)["schema_version"]
    except (ValueError, TypeError, LookupError, RecursionError):
        return SCHEMA
    return found if type(found) is int else SCHEMA


def storable(text: str) -> str:
    """Return text without NUL and lone surrogates: models write them, Postgres rejects them."""
    return text.replace("\0", "\\0").encode("utf-8", "replace").decode()
