"""The tables as SQLAlchemy Core knows them; `migrations/` creates them.

Used by the other modules of `pipeline/store`. A test compares these with a migrated database, so
the two cannot drift. Indexes are the migrations' business.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    DateTime,
    Double,
    Identity,
    Integer,
    LargeBinary,
    MetaData,
    Numeric,
    Table,
    Text,
    Uuid,
)
from sqlalchemy.dialects.postgresql import JSONB

metadata = MetaData()


def _key(name: str, kind: Any = Uuid) -> Column[Any]:
    return Column(name, kind, primary_key=True)


def _must(name: str, kind: Any = Uuid) -> Column[Any]:
    return Column(name, kind, nullable=False)


def _time(name: str, nullable: bool = True) -> Column[Any]:
    return Column(name, DateTime(timezone=True), nullable=nullable)


runs = Table(
    "runs",
    metadata,
    _key("run_id"),
    _must("slug", Text),
    _must("name", Text),
    _must("purpose", Text),
    _must("config", JSONB),
    _must("config_digest", Text),
    _must("state", Text),
    Column("state_reason", Text),
    _must("policy_version", Integer),
    Column("max_in_flight", Integer),
    _must("next_group_no", Integer),
    _must("judged_finished", Integer),
    _must("judged_failed", Integer),
    _time("sealed_at"),
    _time("created_at", nullable=False),
    _must("worked_s", Double),
    _time("worked_at", nullable=False),
)
policy_versions = Table(
    "policy_versions",
    metadata,
    _key("run_id"),
    _key("version", Integer),
    Column("model", Text),
    Column("endpoints", JSONB),
    Column("weights_uri", Text),
    _time("published_at", nullable=False),
)
prompts = Table(
    "prompts",
    metadata,
    _key("prompt_id"),
    _must("run_id"),
    _must("dataset", Text),
    _must("split", Text),
    _must("epoch", Integer),
    _must("row_no", BigInteger),
    _must("payload", JSONB),
    _must("payload_digest", LargeBinary),
)
groups = Table(
    "groups",
    metadata,
    _key("group_id"),
    _must("run_id"),
    _must("prompt_id"),
    _must("group_no", Integer),
    _must("n_target", Integer),
    _must("n_rollouts", Integer),
    _must("n_min", Integer),
    _must("priority", Integer),
    _must("state", Text),
    _must("n_succeeded", Integer),
    _must("n_failed", Integer),
    _must("n_cancelled", Integer),
    _must("n_cut", Integer),
    Column("reward_mean", Double),
    Column("reward_std", Double),
    _must("min_version", Integer),
    _time("deadline_at"),
    _time("ready_at"),
    Column("drop_reason", Text),
    Column("train_batch_id", Uuid),
)
rollouts = Table(
    "rollouts",
    metadata,
    _key("rollout_id"),
    _must("group_id"),
    _must("run_id"),
    _must("group_no", Integer),
    _must("rollout_index", Integer),
    _must("state", Text),
    _must("attempt_no", Integer),
    _must("attempts_used", Integer),
    _must("lost_count", Integer),
    Column("winner_attempt_no", Integer),
    _time("not_before", nullable=False),
    Column("timeout_s", Double),
    _must("cancel_requested", Boolean),
    Column("stop_reason", Text),
    Column("reward", Double),
    Column("error_class", Text),
    Column("error_code", Text),
    _time("finished_at"),
)
attempts = Table(
    "attempts",
    metadata,
    _key("rollout_id"),
    _key("attempt_no", Integer),
    _must("run_id"),
    _must("state", Text),
    Column("worker_id", Text),
    Column("phase", Text),
    Column("step", Integer),
    _time("dispatched_at", nullable=False),
    _time("started_at"),
    _time("lease_until", nullable=False),
    _time("ended_at"),
    Column("error_class", Text),
    Column("error_code", Text),
    Column("retryable", Boolean),
    Column("error_message", Text),
    Column("error_detail", Text),
    Column("n_turns", Integer),
    Column("prompt_tokens", BigInteger),
    Column("completion_tokens", BigInteger),
    Column("version_min", Integer),
    Column("version_max", Integer),
    Column("timings", JSONB),
)
trajectories = Table(
    "trajectories",
    metadata,
    _key("rollout_id"),
    _key("attempt_no", Integer),
    Column("body", LargeBinary),
    Column("body_uri", Text),
    _must("body_bytes", BigInteger),
    _must("codec", Text),
    _must("n_steps", Integer),
)
model_calls = Table(
    "model_calls",
    metadata,
    _key("rollout_id"),
    _key("attempt_no", Integer),
    _key("sequence", Integer),
    Column("prompt_token_ids", LargeBinary),
    Column("completion_token_ids", LargeBinary),
    Column("logprobs", LargeBinary),
    Column("finish_reason", Text),
    Column("policy_version", Integer),
    _must("trainable", Boolean),
    Column("detail", JSONB),
)
rewards = Table(
    "rewards",
    metadata,
    _key("rollout_id"),
    _key("attempt_no", Integer),
    _key("name", Text),
    _key("scorer_version", Text),
    Column("value", Double),
    _must("weight", Double),
    _must("status", Text),
    Column("error_class", Text),
    Column("latency_ms", Double),
)
rollout_tallies = Table(
    "rollout_tallies",
    metadata,
    _must("run_id"),
    _must("state", Text),
    Column("error_class", Text),
    Column("error_code", Text),
    _must("n", BigInteger),
    _must("n_rewarded", BigInteger),
    _must("reward_sum", Numeric),
    _must("reward_squares", Numeric),
    _time("last_finished_at"),
)
group_tallies = Table(
    "group_tallies",
    metadata,
    _must("run_id"),
    _must("state", Text),
    Column("drop_reason", Text),
    _must("n", BigInteger),
    _must("n_rollouts", BigInteger),
    _must("n_cut", BigInteger),
)
reward_tallies = Table(
    "reward_tallies",
    metadata,
    _must("run_id"),
    _must("n_groups", BigInteger),
    _must("sum_squares", Numeric),
    _must("sum_products", Numeric),
    _must("count_squares", Numeric),
)
score_tallies = Table(
    "score_tallies",
    metadata,
    _must("run_id"),
    _must("name", Text),
    _must("scorer_version", Text),
    _must("n", BigInteger),
    _must("value_sum", Numeric),
)
attempt_tallies = Table(
    "attempt_tallies",
    metadata,
    _must("run_id"),
    Column("worker_id", Text),
    Column("error_class", Text),
    Column("error_code", Text),
    _must("n", BigInteger),
    _must("prompt_tokens", BigInteger),
    _must("completion_tokens", BigInteger),
)
train_batches = Table(
    "train_batches",
    metadata,
    _key("batch_id"),
    _must("run_id"),
    _must("consumer", Text),
    _must("trainer_step", BigInteger),
    _must("state", Text),
    Column("policy_version", Integer),
    _time("leased_at", nullable=False),
    _time("lease_until", nullable=False),
    _time("committed_at"),
    Column("checkpoint_uri", Text),
    Column("reason", Text),
    Column("manifest_digest", Text),
)
train_batch_groups = Table(
    "train_batch_groups",
    metadata,
    _key("batch_id"),
    _key("position", Integer),
    _must("group_id"),
)
dead_letters = Table(
    "dead_letters",
    metadata,
    Column("dead_letter_id", BigInteger, Identity(always=True), primary_key=True),
    _must("kind", Text),
    Column("run_id", Uuid),
    Column("rollout_id", Uuid),
    Column("label", Text),
    _must("reason", Text),
    Column("body", LargeBinary),
    _time("first_seen_at", nullable=False),
    _time("redriven_at"),
)
events = Table(
    "events",
    metadata,
    Column("seq", BigInteger, Identity(always=True), primary_key=True),
    _time("at", nullable=False),
    _must("run_id"),
    _must("entity", Text),
    _must("entity_id"),
    Column("attempt_no", Integer),
    Column("from_state", Text),
    _must("to_state", Text),
    Column("reason", Text),
)
processes = Table(
    "processes",
    metadata,
    _key("process_id", Text),
    _must("kind", Text),
    _time("started_at", nullable=False),
    _time("last_seen_at", nullable=False),
    _time("read_up_to"),
    Column("capacity", Integer),
    Column("in_flight", Integer),
    Column("loop_lag_ms", Double),
    _must("stopping", Boolean),
    Column("takes", JSONB),
    _must("activity", JSONB),
)
