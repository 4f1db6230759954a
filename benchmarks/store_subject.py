"""A private, durable Postgres for the store's benchmarks, and rows to fill it.

`benchmarks/store.py` uses it. SQL statements write rows in the same form as the pipeline. Must not:
measure.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sqlalchemy import Engine, text

from benchmarks.private_servers import private_services
from pipeline.contract.rollout import BLOCK_ROWS, run_id_of
from pipeline.contract.run import RunConfig
from pipeline.contract.trajectory import TrajectoryRecord, pack_record
from pipeline.store.engine import open_engine, transact
from pipeline.store.prompts import seal_run
from pipeline.store.runs import create_run
from pipeline.store.schema import upgrade

#: Rollouts of a group, and bytes of a trajectory, in every store benchmark (measures, G11 and G12).
GROUP = 8
BODY_BYTES = 20_000
PAST_RUN = "past"

#: In each tenth group one rollout failed; in each fifth group one needed a second attempt.
_FILL = """
CREATE TEMPORARY TABLE filled ON COMMIT DROP AS
SELECT (block || substr(gen_random_uuid()::text, 5))::uuid AS group_id, block,
       (block || substr(gen_random_uuid()::text, 5))::uuid AS prompt_id, g AS group_no,
       (g % 10 = 0)::integer AS failed
FROM generate_series(CAST(:first AS integer), CAST(:last AS integer)) AS g,
     left(md5((g / :block_rows)::text), 4) AS block;
INSERT INTO prompts (prompt_id, run_id, dataset, split, epoch, row_no, payload, payload_digest)
SELECT prompt_id, :run_id, 'bench', 'train', 0, group_no,
       jsonb_build_object('content', 'question ' || group_no), '\\x00' FROM filled;
INSERT INTO groups (group_id, run_id, prompt_id, group_no, n_target, n_min, n_rollouts, state,
                    n_succeeded, n_failed, reward_mean, reward_std, ready_at)
SELECT group_id, :run_id, prompt_id, group_no, 8, 2, 8, 'consumed', 8 - failed, failed, 0.5, 0.5,
       now() FROM filled;
CREATE TEMPORARY TABLE filled_rollouts ON COMMIT DROP AS
SELECT (block || substr(gen_random_uuid()::text, 5))::uuid AS rollout_id, group_id, group_no,
       i AS rollout_index, i = 1 AND failed = 1 AS failed,
       1 + (i = 2 AND group_no % 5 = 0)::integer AS attempts,
       'worker-' || group_no % 16 AS worker_id
FROM filled, generate_series(0, 7) AS i;
INSERT INTO rollouts (rollout_id, group_id, run_id, group_no, rollout_index, state, attempt_no,
                      attempts_used, winner_attempt_no, stop_reason, reward, error_class,
                      finished_at)
SELECT rollout_id, group_id, :run_id, group_no, rollout_index,
       CASE WHEN failed THEN 'failed' ELSE 'succeeded' END, attempts, attempts,
       CASE WHEN NOT failed THEN attempts END, CASE WHEN NOT failed THEN 'answered' END,
       CASE WHEN NOT failed THEN rollout_index % 2 END, CASE WHEN failed THEN 'contract' END, now()
FROM filled_rollouts;
INSERT INTO attempts (rollout_id, attempt_no, run_id, state, worker_id, lease_until, started_at,
                      ended_at, n_turns, prompt_tokens, completion_tokens, timings, error_class,
                      error_code, error_message)
SELECT rollout_id, no, :run_id, CASE WHEN failed OR no < attempts THEN 'failed' ELSE 'succeeded'
       END, worker_id, now(), now(), now(), 3, 300, 90, '{"elapsed_s": 1.5}',
       CASE WHEN failed THEN 'contract' WHEN no < attempts THEN 'model_transport' END,
       CASE WHEN failed OR no < attempts THEN 'bench' END, CASE WHEN failed OR no < attempts
       THEN 'it went wrong' END
FROM filled_rollouts, generate_series(1, attempts) AS no;
INSERT INTO trajectories (rollout_id, attempt_no, body, body_bytes, codec, n_steps)
SELECT rollout_id, attempts, '\\x28b52ffd', 4, 'zstd+json', 7 FROM filled_rollouts;
INSERT INTO rewards (rollout_id, attempt_no, name, scorer_version, value, status)
SELECT rollout_id, attempts, 'numeric', '1', rollout_index % 2, 'ok' FROM filled_rollouts
WHERE NOT failed;
INSERT INTO events (run_id, entity, entity_id, attempt_no, from_state, to_state)
SELECT :run_id, 'rollout', rollout_id, attempts, before,
       CASE WHEN before = 'queued' THEN 'dispatched' WHEN failed THEN 'failed' ELSE 'succeeded' END
FROM filled_rollouts, unnest(ARRAY['queued', 'dispatched']) AS before
"""


@contextmanager
def private_store() -> Iterator[tuple[Engine, Path]]:
    """Yield an engine on a new, migrated, durable server, and the server's folder."""
    with private_services() as (services, folder):
        engine = open_engine(services.start_postgres())
        upgrade(engine)
        yield engine, folder
        engine.dispose()


def fill(engine: Engine, *, rollouts: int) -> None:
    """Fill the past run up to at least this many finished rollouts, then vacuum the tables."""
    _fill_run(engine, PAST_RUN, rollouts=rollouts)
    tidy(engine)


def fill_runs(engine: Engine, *, runs: int, rollouts: int) -> None:
    """Add finished runs of so many rollouts each, then vacuum the tables."""
    for number in range(runs):
        _fill_run(engine, f"{PAST_RUN}-{number}", rollouts=rollouts)
    tidy(engine)


def _fill_run(engine: Engine, slug: str, *, rollouts: int) -> None:
    run_id = run_id_of(slug)
    run = transact(engine, create_run, slug, RunConfig(n=GROUP))
    transact(engine, seal_run, run)
    with engine.begin() as connection:
        held = connection.execute(
            text("SELECT count(*) FROM groups WHERE run_id = :id"), {"id": run_id}
        ).scalar_one()
    for first in range(held, rollouts // GROUP, 12_500):
        last = min(first + 12_500, rollouts // GROUP) - 1
        with engine.begin() as connection:
            for statement in _FILL.split(";\n"):
                bound = {"first": first, "last": last, "run_id": run_id}
                bound["block_rows"] = BLOCK_ROWS
                used = {name: v for name, v in bound.items() if f":{name}" in statement}
                connection.execute(text(statement), used)


def open_database(engine: Engine, name: str) -> Engine:
    """Return an engine on a new, migrated database of the same server."""
    with engine.connect() as connection:
        plain = connection.execution_options(isolation_level="AUTOCOMMIT")
        plain.execute(text(f"CREATE DATABASE {name}"))
    url = engine.url.set(database=name).render_as_string(hide_password=False)
    opened = open_engine(url)
    upgrade(opened)
    return opened


def tidy(engine: Engine) -> None:
    """Vacuum and analyze at once, instead of waiting for autovacuum."""
    with engine.connect() as connection:
        connection.execution_options(isolation_level="AUTOCOMMIT").execute(text("VACUUM ANALYZE"))


def body() -> bytes:
    """Return the record of a trajectory that takes 20 KB when compressed."""
    answer = {"role": "assistant", "content": os.urandom(BODY_BYTES).hex()}
    return pack_record(TrajectoryRecord(messages=[answer]))
