"""The configuration of a run: agent, tools, reward, model, budgets; frozen at its creation.

Written by producers, read by dispatcher and collector. Agents, tools and rewards are only named:
their code is part of the workers. Must not hold a secret.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, cast

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)

from pipeline.contract.agentcore import AGENT, AgentCoreTarget
from pipeline.contract.base_urls import base_url_of, carries_credentials, urls_of
from pipeline.contract.errors import SCORED_BY_DEFAULT, Action, ErrorClass
from pipeline.contract.names import Name
from pipeline.contract.rollout import RunPurpose

#: Queue of runs that name none; workers consume it by default.
DEFAULT_REQUEST_QUEUE = "rollouts"

#: Queues for messages between the pipeline's processes. SQS takes a dot for a dash.
_OWN_QUEUES = re.compile(r"rollout\.|rollout-(completions|heartbeats|markers)$|celery(ev|\.pidbox)")

#: Upper bound of durations: longer than any useful wait, and safe for every clock.
_YEAR_S = 365 * 86_400

SLUG = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")

#: Share of failed rollouts above which a finished run has failed, if the run sets none.
_MOST_FAILED = 0.5

#: Actions that a run may choose instead of the error table's.
_OVERRIDABLE = frozenset({Action.RETRY, Action.RETRY_FREE, Action.FAIL, Action.SCORE})
#: Only budgets and clocks leave a trajectory that can be scored.
_SCORABLE = frozenset(SCORED_BY_DEFAULT)
#: Validation context of configurations from the store.
_STORED = "stored"
#: Agents that give the reward themselves, by the task's tests.
_SELF_SCORED = frozenset({"coding", "swe", AGENT})


#: One base URL, or several of replicas that serve the same model: a list, or `a,b`.
BaseUrl = Annotated[str | tuple[str, ...] | None, BeforeValidator(base_url_of)]


def _default_reward(given: dict[str, Any]) -> str | None:
    return None if given.get("agent") in _SELF_SCORED else "exact_match"


#: Whether token ids are recorded: `required` fails a call without them.
TokenWish = Literal["required", "wanted", "off"]


class AttemptLimits(BaseModel):
    """The budgets of one attempt; reaching one is a stop reason, not an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    max_steps: int | None = Field(
        default=None,
        ge=1,
        description="Steps of a trajectory: turns, tool results; None: as many as the agent's own.",
    )
    max_tokens: int = Field(default=512, ge=1, description="Tokens of one model response.")
    timeout_s: float = Field(
        default=600.0, gt=0, le=_YEAR_S, description="Wall clock of the agent phase."
    )
    reward_timeout_s: float = Field(
        default=60.0, gt=0, le=_YEAR_S, description="Wall clock of one scoring."
    )


class AttemptSpec(BaseModel):
    """How an attempt is executed: part of a run's configuration and of each of its requests."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    agent: Name = Field(description="Registered name of the agent.")
    agent_config: dict[str, Any] = Field(default={}, description="Options of the agent.")
    tools: tuple[str, ...] = Field(
        default=(),
        description="Registered names of the agent's tools; `mcp:NAME`: those of an MCP server.",
    )
    tools_config: dict[str, dict[str, Any]] = Field(
        default={}, description="Options of tools, by the tool's name."
    )
    reward: Name | None = None
    reward_config: dict[str, Any] = Field(default={}, description="Options of the reward.")
    model: str | None = Field(default=None, description="Model name; None: the worker's default.")
    base_url: BaseUrl = Field(
        default=None,
        description="Endpoint, or a list of replicas that serve the same model; workers must "
        "allow it. None: the worker's own.",
    )
    sampling: dict[str, Any] = Field(
        default={}, description="Sampling parameters sent with each call."
    )
    limits: AttemptLimits = AttemptLimits()
    agentcore: AgentCoreTarget | None = Field(
        default=None, description="Remote agent that executes the attempts; None: the workers do."
    )
    tokens: TokenWish = "off"

    @property
    def called_urls(self) -> tuple[str, ...]:
        """The URLs that workers call: the model's endpoints, or the container of an agent."""
        if self.agentcore is None:
            return urls_of(self.base_url)
        return () if self.agentcore.is_arn else (self.agentcore.target,)


class RunConfig(AttemptSpec):
    """The configuration of a run."""

    purpose: RunPurpose = Field(
        default=RunPurpose.TRAIN,
        description="`train` or `eval`: kept with the run; decides the default of `tokens`.",
    )
    agent: Name = Field(default="single_turn", description="Registered name of the agent.")
    reward: Name | None = Field(
        default_factory=_default_reward,
        description="Registered name; None: the agent's own verdict, if it leaves one. "
        "Default: exact_match; None for coding, swe and remote agents.",
    )
    tokens: TokenWish = Field(
        default="wanted",
        description="Token ids and logprobs of model calls: `required` fails a call without ids, "
        "`wanted` records them where the server returns them, `off` asks for none. Default: "
        "wanted; off where the purpose is eval.",
    )
    n: int = Field(default=1, ge=1, le=1024, description="Rollouts asked of each prompt.")
    n_min: int | None = Field(
        default=None,
        ge=0,
        description="Usable rollouts a group needs; None: two, or n where n is one.",
    )
    group_policy: Literal["partial", "full", "fail_run"] = Field(
        default="partial",
        description="`partial`: a group is ready with n_min usable rollouts; `full`: with n; "
        "`fail_run`: the run pauses as soon as a group cannot have n any more.",
    )
    oversample: int = Field(
        default=0,
        ge=0,
        le=1024,
        description="Rollouts beyond n per prompt; the group is ready with the first n usable.",
    )
    replacements: int = Field(
        default=0,
        ge=0,
        le=1024,
        description="Rollouts that may be added to a group in the place of failed ones.",
    )
    group_deadline_s: float | None = Field(
        default=None,
        gt=0,
        le=_YEAR_S,
        description="Time from a group's first dispatch; then it is ready or dropped as it is.",
    )
    max_attempts: int = Field(default=3, ge=1, description="Executions that count, per rollout.")
    max_lost: int = Field(default=3, ge=1, description="Crashes in its own process; then poison.")
    backoff_base_s: float = Field(
        default=1.0, ge=0, le=_YEAR_S, description="First wait before a new attempt."
    )
    backoff_max_s: float = Field(
        default=60.0, ge=0, le=_YEAR_S, description="Longest wait before a new attempt."
    )
    on_error: dict[ErrorClass, Action] = Field(
        default={}, description="Rows of the error table to change."
    )
    max_error_rate: float | None = Field(
        default=None,
        ge=0,
        le=1,
        description="Share of failed rollouts above which the run pauses; None: it pauses when "
        "all of the first ones fail.",
    )
    priority: int = Field(default=0, ge=-100, le=100, description="Higher runs' rollouts go first.")
    queue: str = Field(
        default=DEFAULT_REQUEST_QUEUE, description="Broker queue of the workers that may run it."
    )
    weight: float = Field(default=1.0, gt=0, description="Share of limits where runs contend.")
    max_staleness: int | None = Field(
        default=None,
        ge=0,
        description="Versions that a group may be behind when it is trained; bounds the groups "
        "that are begun ahead of the trainer. None: the trainer's batch spec alone decides.",
    )
    groups_per_step: int | None = Field(
        default=None,
        ge=1,
        description="Groups that a trainer step takes; None: as many as the last pull.",
    )
    max_in_flight: int | None = Field(
        default=None, ge=1, description="Most attempts in flight at once; None: no bound."
    )

    @model_validator(mode="after")
    def _check_remote(self) -> RunConfig:
        if self.agentcore is None:
            return self
        action = self.on_error.get(ErrorClass.AGENT_TIMEOUT)
        if action is Action.SCORE:
            raise ValueError("a session without a result in time leaves nothing to score")
        return self

    @model_validator(mode="before")
    @classmethod
    def _fill_dependent(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        fields = cast("dict[str, Any]", given)
        if fields.get("purpose") == RunPurpose.EVAL:
            fields = {"tokens": "off", **fields}
        if fields.get("agentcore") is not None:
            fields = {"reward": None, **fields}
        return fields

    @field_validator("on_error")
    @classmethod
    def _check_actions(cls, value: dict[ErrorClass, Action]) -> dict[ErrorClass, Action]:
        for error_class, action in value.items():
            if action not in _OVERRIDABLE:
                raise ValueError(f"{error_class} cannot be handled by {action!r}")
            if action is Action.SCORE and error_class not in _SCORABLE:
                # An infrastructure failure is never a sample.
                raise ValueError(f"{error_class} leaves nothing to score: use retry or fail")
        return value

    @field_validator("queue")
    @classmethod
    def _check_queue(cls, value: str, info: ValidationInfo) -> str:
        # A run that an earlier version stored must not keep the others from being read.
        return value if info.context == _STORED else check_queue(value)

    @field_validator("base_url")
    @classmethod
    def _check_base_url(cls, value: str | tuple[str, ...] | None) -> Any:
        if any(carries_credentials(url) for url in urls_of(value)):
            # Configurations are stored and shown, and travel in every request.
            raise ValueError("a base URL carries no credentials: keys are the worker's own")
        return value

    @model_validator(mode="after")
    def _check_group_size(self) -> RunConfig:
        if self.n_min is not None and self.n_min > self.n:
            raise ValueError(f"n_min={self.n_min} asks for more usable rollouts than n={self.n}")
        if self.n_min not in (None, self.n) and self.group_policy != "partial":
            raise ValueError(f"n_min={self.n_min} goes with the group policy `partial` only")
        return self

    @classmethod
    def stored(cls, data: Mapping[str, Any]) -> RunConfig:
        """Read a configuration from the store, without fields that this version does not know."""
        known = {key: data[key] for key in cls.model_fields if key in data}
        return cls.model_validate(known, context=_STORED)

    @property
    def usable_min(self) -> int:
        """The usable rollouts that a group needs; with fewer it is dropped."""
        if self.group_policy != "partial":
            return self.n
        return self.n_min if self.n_min is not None else min(2, self.n)

    @property
    def is_admitted(self) -> bool:
        """Whether the groups begun ahead of the trainer are bounded, so that none is too old."""
        return self.max_staleness is not None or self.groups_per_step is not None

    @property
    def rollouts_per_prompt(self) -> int:
        """Rollouts that are enqueued for each prompt."""
        return self.n + self.oversample

    @property
    def allowed_error_rate(self) -> float:
        """Share of failed rollouts above which a finished run counts as failed."""
        return _MOST_FAILED if self.max_error_rate is None else self.max_error_rate


class RunOrigin(BaseModel):
    """The origin of a run, recorded by its first command; decides nothing."""

    model_config = ConfigDict(frozen=True)

    dataset: str | None = Field(default=None, description="Path or name of the dataset.")
    plugins: tuple[str, ...] = Field(default=(), description="Plug-ins of its own workers.")
    version: str | None = Field(default=None, description="Version of this package.")
    commit: str | None = Field(
        default=None, description="Git commit of the folder it was begun in."
    )

    @classmethod
    def stored(cls, data: Mapping[str, Any]) -> RunOrigin:
        """Read an origin from the store, without fields that this version does not know."""
        return cls.model_validate({key: data[key] for key in cls.model_fields if key in data})


def check_queue(name: str) -> str:
    """Return the name if requests may be sent to the queue."""
    if not name.strip():
        raise ValueError("a queue needs a name")
    if _OWN_QUEUES.match(name):
        raise ValueError(
            f"{name!r} is a queue of the pipeline itself, not of requests: choose another name, "
            f"such as {DEFAULT_REQUEST_QUEUE!r}"
        )
    return name


def own_queue_of(slug: str) -> str:
    """Return the queue of a run that only workers started for this run consume."""
    return f"{DEFAULT_REQUEST_QUEUE}.{slug}"


def rescore_queue_of(slug: str) -> str:
    """Return the queue of requests that only workers of one `rollout rescore` take."""
    return f"rescore.{slug}"


def check_slug(slug: str) -> str:
    """Return the slug if it can name a run; it becomes part of ids, file names and labels."""
    if not SLUG.fullmatch(slug):
        raise ValueError(
            f"{slug!r} cannot name a run: use 1-63 of a-z, 0-9, '.', '_', '-', "
            "beginning with a letter or digit"
        )
    return slug
