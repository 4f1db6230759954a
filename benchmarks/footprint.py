"""The bytes of one rollout: its messages on the broker, its rows in the store, its WAL.

`python -m benchmarks scaling` runs it; docs/scaling.md multiplies the figures. The servers are a
private Redis and a private Postgres. Must not: count the trajectory's body, whose size depends on
the agent.
"""

from __future__ import annotations

import uuid

from sqlalchemy import Connection, Engine, text

from benchmarks.private_servers import private_broker
from benchmarks.store import completion_of, enqueue_prompts
from benchmarks.store_subject import GROUP, private_store
from pipeline.contract.messages import AttemptBeat, Heartbeat
from pipeline.queue.frames import encode_completions
from pipeline.requests import request_of
from pipeline.store.engine import transact
from pipeline.store.leases import keep_alive
from pipeline.store.outcomes import record_outcomes
from pipeline.store.rollouts import ClaimedAttempt, claim
from pipeline.store.runs import Run

_ROLLOUTS = 8_000
_BATCH = 200
_TABLES = ("prompts", "groups", "rollouts", "attempts", "trajectories", "rewards", "events")


def measure_footprint() -> dict[str, float]:
    """Return bytes by kind of message or row; those of rows include their indexes."""
    with private_store() as (engine, _):
        found = _messages(engine)
        start = _log_position(engine)
        run = enqueue_prompts(engine, "footprint", prompts=_ROLLOUTS // GROUP, n=GROUP)
        found["log of enqueueing"] = (_log_position(engine) - start) / _ROLLOUTS
        start = _log_position(engine)
        while claimed := _claim(engine, run):
            _work(engine, run, claimed)
        found["log of claim, start and outcome"] = (_log_position(engine) - start) / _ROLLOUTS
        with engine.connect() as connection:
            for table in _TABLES:
                found[f"rows of {table}"] = _size(connection, table) / _ROLLOUTS
    return found


def _messages(engine: Engine) -> dict[str, float]:
    run = enqueue_prompts(engine, f"messages-{uuid.uuid4().hex[:6]}", prompts=_BATCH, n=1)
    claimed = _claim(engine, run)
    completions = [completion_of(run, attempt, b"") for attempt in claimed]
    heartbeat = _heartbeat(claimed, step=3)
    return {
        "request": _request_bytes(run, claimed),
        "completion without its body": len(encode_completions(completions)) / len(claimed),
        "heartbeat, for each attempt": len(heartbeat.model_dump_json()) / len(claimed),
    }


def _request_bytes(run: Run, claimed: list[ClaimedAttempt]) -> float:
    """Publish requests as the dispatcher does, and measure their size in Redis."""
    with private_broker() as (publisher, client):
        publisher.publish([request_of(run, one) for one in claimed], queue="footprint")
        waiting: list[bytes] = client.lrange("footprint", 0, -1)  # pyright: ignore
    return sum(map(len, waiting)) / len(waiting)


def _claim(engine: Engine, run: Run) -> list[ClaimedAttempt]:
    return transact(engine, claim, run, most=_BATCH, lease_s=60)


def _work(engine: Engine, run: Run, claimed: list[ClaimedAttempt]) -> None:
    """Report attempts in one heartbeat, then as succeeded with a body of one byte."""
    transact(engine, keep_alive, [_heartbeat(claimed)], lease_s=30)
    completions = [completion_of(run, one, b"\0") for one in claimed]
    transact(engine, record_outcomes, completions)


def _heartbeat(claimed: list[ClaimedAttempt], *, step: int = 0) -> Heartbeat:
    attempts = tuple(
        AttemptBeat(
            rollout_id=one.rollout_id, attempt_no=one.attempt_no, phase="generating", step=step
        )
        for one in claimed
    )
    return Heartbeat(worker_id="worker@host", sequence=1, attempts=attempts)


def _log_position(engine: Engine) -> float:
    query = text("SELECT pg_wal_lsn_diff(pg_current_wal_lsn(), '0/0')")
    with engine.connect() as connection:
        return float(connection.execute(query).scalar_one())


def _size(connection: Connection, table: str) -> int:
    query = text("SELECT pg_total_relation_size(CAST(:table AS regclass))")
    return connection.execute(query, {"table": table}).scalar_one()
