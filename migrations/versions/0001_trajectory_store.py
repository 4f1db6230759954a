"""Create the trajectory store.

Revision ID: 0001
Revises:
"""

from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

DDL = """
CREATE TABLE runs (
    run_id uuid PRIMARY KEY,
    slug text NOT NULL UNIQUE,
    name text NOT NULL,
    purpose text NOT NULL,
    config jsonb NOT NULL,
    config_digest text NOT NULL,
    state text NOT NULL DEFAULT 'active',
    state_reason text,
    policy_version integer NOT NULL DEFAULT 0,
    max_in_flight integer,
    next_group_no integer NOT NULL DEFAULT 0,
    sealed_at timestamptz,
    created_at timestamptz NOT NULL DEFAULT now()
);

CREATE TABLE policy_versions (
    run_id uuid NOT NULL REFERENCES runs ON DELETE CASCADE,
    version integer NOT NULL,
    model text,
    endpoints jsonb,
    weights_uri text,
    published_at timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (run_id, version)
);

CREATE TABLE prompts (
    prompt_id uuid PRIMARY KEY,
    run_id uuid NOT NULL,
    dataset text NOT NULL,
    split text NOT NULL,
    epoch integer NOT NULL,
    row_no bigint NOT NULL,
    payload jsonb NOT NULL,
    payload_digest bytea NOT NULL,
    UNIQUE (run_id, dataset, split, epoch, row_no)
);

CREATE TABLE groups (
    group_id uuid PRIMARY KEY,
    run_id uuid NOT NULL,
    prompt_id uuid NOT NULL,
    group_no integer NOT NULL,
    n_target integer NOT NULL,
    n_min integer NOT NULL,
    priority integer NOT NULL DEFAULT 0,
    state text NOT NULL DEFAULT 'open',
    n_succeeded integer NOT NULL DEFAULT 0,
    n_failed integer NOT NULL DEFAULT 0,
    n_cancelled integer NOT NULL DEFAULT 0,
    reward_mean double precision,
    reward_std double precision,
    min_version integer NOT NULL DEFAULT 0,
    deadline_at timestamptz,
    ready_at timestamptz,
    drop_reason text,
    train_batch_id uuid,
    CONSTRAINT groups_counters CHECK (n_succeeded + n_failed + n_cancelled <= n_target),
    UNIQUE (run_id, group_no)
);
CREATE INDEX groups_ready ON groups (run_id, min_version, group_no) WHERE state = 'ready';

CREATE TABLE rollouts (
    rollout_id uuid PRIMARY KEY,
    group_id uuid NOT NULL,
    run_id uuid NOT NULL,
    group_no integer NOT NULL,
    rollout_index integer NOT NULL,
    state text NOT NULL DEFAULT 'queued',
    attempt_no integer NOT NULL DEFAULT 0,
    attempts_used integer NOT NULL DEFAULT 0,
    lost_count integer NOT NULL DEFAULT 0,
    winner_attempt_no integer,
    not_before timestamptz NOT NULL DEFAULT now(),
    timeout_s double precision,
    cancel_requested boolean NOT NULL DEFAULT false,
    stop_reason text,
    reward double precision,
    error_class text,
    finished_at timestamptz,
    CONSTRAINT rollouts_reward_is_earned CHECK (reward IS NULL OR state = 'succeeded'),
    CONSTRAINT rollouts_reward_is_finite CHECK (
        reward > '-infinity' AND reward < 'infinity'
    ),
    UNIQUE (group_id, rollout_index)
);
CREATE INDEX rollouts_queued ON rollouts (run_id, group_no, rollout_index)
    WHERE state = 'queued';
CREATE INDEX rollouts_in_flight ON rollouts (run_id) WHERE state IN ('dispatched', 'running');
CREATE INDEX rollouts_failed ON rollouts (run_id, error_class) WHERE state = 'failed';

CREATE TABLE attempts (
    rollout_id uuid NOT NULL,
    attempt_no integer NOT NULL,
    run_id uuid NOT NULL,
    state text NOT NULL DEFAULT 'dispatched',
    worker_id text,
    phase text,
    step integer,
    dispatched_at timestamptz NOT NULL DEFAULT now(),
    started_at timestamptz,
    lease_until timestamptz NOT NULL,
    ended_at timestamptz,
    error_class text,
    error_code text,
    retryable boolean,
    error_message text,
    error_detail text,
    n_turns integer,
    prompt_tokens bigint,
    completion_tokens bigint,
    version_min integer,
    version_max integer,
    timings jsonb,
    PRIMARY KEY (rollout_id, attempt_no)
);
CREATE INDEX attempts_leased ON attempts (lease_until) WHERE state IN ('dispatched', 'running');

CREATE TABLE trajectories (
    rollout_id uuid NOT NULL,
    attempt_no integer NOT NULL,
    body bytea,
    body_uri text,
    body_bytes bigint NOT NULL,
    codec text NOT NULL,
    n_steps integer NOT NULL,
    PRIMARY KEY (rollout_id, attempt_no)
);
-- The worker has compressed the body: Postgres need not try again.
ALTER TABLE trajectories ALTER COLUMN body SET STORAGE EXTERNAL;

CREATE TABLE model_calls (
    rollout_id uuid NOT NULL,
    attempt_no integer NOT NULL,
    sequence integer NOT NULL,
    prompt_token_ids bytea,
    completion_token_ids bytea,
    logprobs bytea,
    finish_reason text,
    policy_version integer,
    trainable boolean NOT NULL DEFAULT true,
    detail jsonb,
    PRIMARY KEY (rollout_id, attempt_no, sequence)
);

CREATE TABLE rewards (
    rollout_id uuid NOT NULL,
    attempt_no integer NOT NULL,
    name text NOT NULL,
    scorer_version text NOT NULL,
    value double precision,
    weight double precision NOT NULL DEFAULT 1,
    status text NOT NULL,
    error_class text,
    latency_ms double precision,
    PRIMARY KEY (rollout_id, attempt_no, name, scorer_version)
);

CREATE TABLE train_batches (
    batch_id uuid PRIMARY KEY,
    run_id uuid NOT NULL REFERENCES runs ON DELETE CASCADE,
    consumer text NOT NULL,
    trainer_step bigint NOT NULL,
    state text NOT NULL,
    policy_version integer,
    leased_at timestamptz NOT NULL DEFAULT now(),
    lease_until timestamptz NOT NULL,
    committed_at timestamptz,
    checkpoint_uri text,
    reason text,
    manifest_digest text,
    UNIQUE (run_id, consumer, trainer_step)
);

CREATE TABLE train_batch_groups (
    batch_id uuid NOT NULL REFERENCES train_batches ON DELETE CASCADE,
    position integer NOT NULL,
    group_id uuid NOT NULL,
    PRIMARY KEY (batch_id, position)
);

CREATE TABLE dead_letters (
    dead_letter_id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    kind text NOT NULL,
    run_id uuid,
    rollout_id uuid,
    label text,
    reason text NOT NULL,
    body bytea,
    first_seen_at timestamptz NOT NULL DEFAULT now(),
    redriven_at timestamptz
);

CREATE TABLE events (
    seq bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    at timestamptz NOT NULL DEFAULT now(),
    run_id uuid NOT NULL,
    entity text NOT NULL,
    entity_id uuid NOT NULL,
    attempt_no integer,
    from_state text,
    to_state text NOT NULL,
    reason text
);
CREATE INDEX events_entity ON events (entity_id);

CREATE TABLE processes (
    process_id text PRIMARY KEY,
    kind text NOT NULL,
    started_at timestamptz NOT NULL DEFAULT now(),
    last_seen_at timestamptz NOT NULL DEFAULT now(),
    read_up_to timestamptz,
    capacity integer,
    in_flight integer,
    loop_lag_ms double precision,
    stopping boolean NOT NULL DEFAULT false
);
"""


def upgrade() -> None:
    """Create every table."""
    for statement in DDL.split(";\n"):
        if statement.strip():
            op.execute(statement)


def downgrade() -> None:
    """Drop all tables; only a backup restores their rows."""
    op.execute(
        "DROP TABLE processes, events, dead_letters, train_batch_groups, train_batches, rewards, "
        "model_calls, trajectories, attempts, rollouts, groups, prompts, policy_versions, runs"
    )
