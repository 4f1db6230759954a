"""The store's benchmarks G11 and G13: the time of each operation as the store grows.

There is one database per size on one durable server. They are measured alternately, so that other
load of the machine affects all sizes equally. Must not: use a shortcut that the pipeline does not.
"""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import psycopg
from sqlalchemy import Engine, text

from benchmarks.report import table
from benchmarks.store import completion_of, enqueue_prompts
from benchmarks.store_subject import (
    GROUP,
    PAST_RUN,
    body,
    fill,
    fill_runs,
    open_database,
    tidy,
)
from pipeline.contract.train_batch import BatchSpec
from pipeline.queue.payloads import FolderPayloads
from pipeline.store.batch_leases import lease_batch
from pipeline.store.engine import transact
from pipeline.store.operations import begin_cancel, cancel_rollouts
from pipeline.store.outcomes import record_outcomes
from pipeline.store.rollouts import ClaimedAttempt, claim
from pipeline.store.run_errors import errors_by_class
from pipeline.store.runs import get_run
from pipeline.store.status import run_status
from pipeline.trainer.client import TrainerClient
from pipeline.trainer.export import export_lines

SIZES = (1_000, 10_000, 100_000, 1_000_000)
#: Rollouts of one claim and of one ingested batch, as in a busy dispatcher and collector.
BATCH = 256
_INGESTS = 12
_CLAIMS = 40
_ENQUEUES = 5
_PULLS = 150
_READS = 15
_EXPORTS = 8
_CANCELS = 12
_RUNS = 200  # finished ones beside the large one, which hold a tenth of the rollouts
_WARM = 10
_EXPORTED = 200  # rollouts
_CHUNK = 500  # prompts, each a group


@dataclass(frozen=True, slots=True)
class StoreTimes:
    """The times of operations with this many finished rollouts in the store: medians in ms."""

    rollouts: int
    queued: int
    enqueue_ms: float  #: 500 prompts with 8 rollouts each
    claim_ms: float  #: 256 rollouts
    ingest_ms: float  #: 256 completions of 20 KB
    status_ms: float  #: of the large run
    errors_ms: float  #: of the large run
    short_pull_ms: float  #: of the large run, which has no group left
    cancel_ms: float  #: 256 queued rollouts
    pull_ms: float  #: one group of 8 × 20 KB
    raw_pull_ms: float  #: the same in raw SQL
    export_ms: float  #: 200 rollouts of 20 KB


def measure_growth(engine: Engine, *, rows: int) -> list[StoreTimes]:
    """Fill a database for each size up to `rows`, then time every operation on all of them."""
    sizes = [*(size for size in SIZES if size < rows), rows]
    stores = [_GrownStore(engine, size) for size in sizes]
    try:
        for operation, times in _OPERATIONS.items():
            for _ in range(times):
                for store in stores:
                    store.time(operation)
        return [store.medians() for store in stores]
    finally:
        for store in stores:
            store.close()


class _GrownStore:
    """A database with a large finished run, and a current one that the operations use."""

    def __init__(self, server: Engine, rollouts: int) -> None:
        self._rollouts = rollouts
        self._engine = open_database(server, f"grown_{rollouts}")
        fill(self._engine, rollouts=rollouts)
        fill_runs(self._engine, runs=_RUNS, rollouts=max(GROUP, rollouts // 10 // _RUNS))
        # The queue is a tenth of the store, and large enough for the claims and pulls below.
        queued = max(rollouts // 10, (_CLAIMS + 1) * BATCH)
        self._run = enqueue_prompts(self._engine, "today", prompts=queued // GROUP, n=GROUP)
        unwanted = _CANCELS * BATCH // GROUP
        self._unwanted = enqueue_prompts(self._engine, "unwanted", prompts=unwanted, n=GROUP)
        transact(self._engine, begin_cancel, self._unwanted)
        tidy(self._engine)
        self._past = transact(self._engine, get_run, PAST_RUN)
        self._client = TrainerClient(self._engine, run="today", consumer="bench")
        url = self._engine.url.set(drivername="postgresql")
        self._raw = psycopg.connect(url.render_as_string(hide_password=False), prepare_threshold=0)
        self._body = body()
        self._claimed: list[list[ClaimedAttempt]] = []
        self._steps = itertools.count()
        self._ms: dict[str, list[float]] = {}

    def time(self, operation: str) -> None:
        """Run an operation once, and record its time."""
        work: Callable[[], object] = getattr(self, operation)
        started = perf_counter()
        work()
        self._ms.setdefault(operation, []).append((perf_counter() - started) * 1000)

    def medians(self) -> StoreTimes:
        """Return the median times, without the first ones, which warm the caches."""
        of = {name: median(ms[len(ms) // _WARM :]) for name, ms in self._ms.items()}
        count = text("SELECT count(*) FROM rollouts WHERE state = 'queued'")
        queued = transact(self._engine, lambda c: c.execute(count).scalar_one())
        return StoreTimes(
            rollouts=self._rollouts,
            queued=queued,
            **{f"{name}_ms": ms for name, ms in of.items()},
        )

    def enqueue(self) -> None:
        name = f"more-{uuid.uuid4().hex[:8]}"
        enqueue_prompts(self._engine, name, prompts=_CHUNK, n=GROUP)

    def claim(self) -> None:
        claimed = transact(self._engine, claim, self._run, most=BATCH, lease_s=60)
        self._claimed.append(claimed)

    def ingest(self) -> None:
        claimed = self._claimed.pop(0)
        completions = [completion_of(self._run, one, self._body) for one in claimed]
        transact(self._engine, record_outcomes, completions)

    def status(self) -> None:
        transact(self._engine, run_status, self._past)

    def errors(self) -> None:
        transact(self._engine, errors_by_class, self._past)

    def short_pull(self) -> None:
        transact(
            self._engine,
            lease_batch,
            self._past,
            consumer="bench",
            step=0,
            spec=BatchSpec(groups=1),
            policy_version=None,
            lease_s=60,
        )

    def cancel(self) -> None:
        transact(self._engine, cancel_rollouts, self._unwanted, most=BATCH)

    def pull(self) -> None:
        self._client.pull(next(self._steps), BatchSpec(groups=1))

    def raw_pull(self) -> None:
        """Do the work of a pull in raw SQL, in one transaction: select, update, insert, read."""
        batch_id, name = uuid.uuid4(), f"raw-{next(self._steps)}"
        cursor = self._raw.cursor()
        cursor.execute(
            "SELECT group_id FROM groups WHERE run_id = %s AND state = 'ready'"
            " ORDER BY min_version, group_no LIMIT 1 FOR UPDATE SKIP LOCKED",
            (self._run.run_id,),
        )
        (group_id,) = cursor.fetchone() or (None,)
        cursor.execute(
            "INSERT INTO train_batches (batch_id, run_id, consumer, trainer_step, state,"
            " lease_until) VALUES (%s, %s, %s, 0, 'leased', now() + interval '1 hour')",
            (batch_id, self._run.run_id, name),
        )
        cursor.execute(
            "UPDATE groups SET state = 'leased' WHERE group_id = %s",
            (group_id,),
        )
        cursor.execute("INSERT INTO train_batch_groups VALUES (%s, 0, %s)", (batch_id, group_id))
        cursor.execute(
            "SELECT r.rollout_index, r.reward, t.body FROM rollouts r JOIN trajectories t"
            " ON t.rollout_id = r.rollout_id AND t.attempt_no = r.winner_attempt_no"
            " WHERE r.group_id = %s ORDER BY r.rollout_index",
            (group_id,),
        )
        if len(cursor.fetchall()) != GROUP:
            raise RuntimeError("the raw pull found no whole group")
        self._raw.commit()

    def export(self) -> None:
        lines = export_lines(self._engine, self._run, payloads=FolderPayloads(Path("unused")))
        found = list(itertools.islice(lines, _EXPORTED))
        lines.close()
        if len(found) != _EXPORTED or found[-1]["unreadable"]:
            raise RuntimeError("the export found no trajectories")

    def close(self) -> None:
        self._raw.close()
        self._engine.dispose()


#: The number of timings of each operation, in the order in which one makes rows for the next.
_OPERATIONS = {
    "enqueue": _ENQUEUES,
    "claim": _CLAIMS,
    "ingest": _INGESTS,
    "status": _READS,
    "errors": _READS,
    "short_pull": _READS,
    "cancel": _CANCELS,
    "pull": _PULLS,
    "raw_pull": _PULLS,
    "export": _EXPORTS,
}


def growth_table(times: Sequence[StoreTimes]) -> str:
    """Return a Markdown table with a row per operation and a column per size."""
    columns: list[Mapping[str, Any]] = [asdict(one) for one in times]
    heads = ["ms", *(f"{one.rollouts:,}" for one in times), "growth"]
    rows = [
        [
            name.removesuffix("_ms").replace("_", " "),
            *(f"{column[name]:.2f}" for column in columns),
            f"{columns[-1][name] / columns[0][name]:.2f}",
        ]
        for name in columns[0]
        if name.endswith("_ms")
    ]
    return table(heads, rows)
