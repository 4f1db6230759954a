"""The pipeline as a subject: private Postgres and Redis, a controller, workers, all durable.

`goals.py` compares it with the bare loops. All features of production are on: fsync, task events,
heartbeats. Must not: change the pipeline's processes.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable
from contextlib import ExitStack
from time import monotonic
from typing import Any, Self

import redis
from sqlalchemy import Engine, text

from benchmarks.faults.processes import OwnProcess, start_python
from benchmarks.mock_behaviour import MockBehaviour
from benchmarks.mock_server import MockServer
from benchmarks.private_servers import private_services
from benchmarks.process_tree import ProcessMeter, resident_bytes
from benchmarks.subjects import MOCK, Measurement
from benchmarks.workloads import Workload
from pipeline.contract.run import AttemptLimits, RunConfig
from pipeline.store.engine import READY_CHANNEL, Listener, open_engine
from pipeline.store.prompts import PromptSource
from pipeline.store.schema import upgrade
from producers.datasets import Prompt
from producers.enqueue import enqueue

_START_TIMEOUT_S = 60
_END_TIMEOUT_S = 30
#: Thought, action, observation, and one to spare.
_STEPS_OF_A_TURN = 4


class PipelineSubject:
    """A running deployment on this machine; a context manager.

    Args:
        workers: Worker processes.
        concurrency: Concurrent attempts of each worker.
        client: Model client, `sdk` or `lean`.
        collectors: Number of collectors; the first is in the controller, others in own processes.
        commit_times: Turn on track_commit_timestamp in Postgres.
        server: The kind of server that the mock is taken for.
    """

    def __init__(
        self,
        *,
        workers: int = 1,
        concurrency: int = 500,
        client: str = "lean",
        collectors: int = 1,
        commit_times: bool = False,
        server: str = "auto",
    ) -> None:
        self.name = f"pipeline-{client}" + (f"-x{workers}" if workers > 1 else "")
        self._workers = workers
        self._concurrency = concurrency
        self._client = client
        self._collectors = collectors
        self._commit_times = commit_times
        self._server = server
        self._stack = ExitStack()
        self.run = ""  #: slug of the current run, or of the last one

    def __enter__(self) -> Self:
        services, folder = self._stack.enter_context(private_services())
        self._services = services
        database = services.start_postgres()
        if self._commit_times:
            _keep_commit_times(database)
            services.down()
            database = services.start_postgres()
        self._engine: Engine = open_engine(database)
        self._stack.callback(self._engine.dispose)
        upgrade(self._engine)
        self._environment = os.environ | {
            "ROLLOUT_DATABASE__URL": database,
            "ROLLOUT_BROKER__URL": services.start_redis(),
            "ROLLOUT_DATA_DIR": str(folder / "data"),
            "ROLLOUT_LLM__CLIENT": self._client,
            "ROLLOUT_LLM__SERVER": self._server,
            "ROLLOUT_LOG_LEVEL": "WARNING",
        }
        self._pids = {s.name: s.pid for s in services.status() if s.pid is not None}
        self._log = folder / "log"
        self._pids["controller"] = self._spawn("controller")
        for number in range(1, self._collectors):
            name = f"collector-{number}"
            self._pids[name] = self._spawn("controller", "--only", "collector")
        for number in range(self._workers):
            self._pids[f"worker-{number}"] = self._spawn("worker", "-c", str(self._concurrency))
        self._wait_for_workers()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @property
    def engine(self) -> Engine:
        """The engine of the store, for queries of the results."""
        return self._engine

    @property
    def worker_pids(self) -> list[int]:
        """The worker processes."""
        return [pid for name, pid in self._pids.items() if name.startswith("worker")]

    def resident_bytes(self) -> dict[str, int]:
        """Return the resident memory of each process; 0 for one that has ended."""
        return {name: resident_bytes(pid) for name, pid in self._pids.items()}

    def measure(self, workload: Workload, mock: MockServer) -> Measurement:
        """Enqueue the workload as a new run and wait until all outcomes are stored."""
        mock.reset(MockBehaviour())
        self.run_once(workload.resized(rollouts=100), mock)
        mock.reset(workload.behaviour)
        meter = ProcessMeter({**self._pids, MOCK: mock.pid})
        with meter.measuring() as usage:
            started = monotonic()
            finished = self.run_once(workload, mock)
            wall_s = monotonic() - started
        return Measurement(
            subject=self.name,
            workload=workload.name,
            rollouts=workload.rollouts,
            finished=finished,
            wall_s=wall_s,
            usage=usage,
            seen=mock.stats(expected=workload.rollouts),
        )

    def run_once(
        self,
        workload: Workload,
        mock: MockServer,
        *,
        meanwhile: Callable[[], None] = lambda: None,
        group: int = 1,
    ) -> int:
        """Enqueue a run, call `meanwhile`, wait for all outcomes; return the number of rewards."""
        self.run = f"{workload.name.lower()}-{uuid.uuid4().hex[:6]}"
        prompts = (
            Prompt(number, {"content": row["prompt"], "answer": row["answer"]})
            for number, row in enumerate(
                workload.resized(rollouts=workload.rollouts // group).rows()
            )
        )
        config = RunConfig(
            agent="react",
            tools=("calculator",),
            reward="exact_match",
            base_url=mock.base_url,
            limits=AttemptLimits(max_steps=_STEPS_OF_A_TURN * workload.behaviour.turns),
            n=group,
        )
        listener = Listener(self._engine, READY_CHANNEL)
        listener.wait(0)
        enqueue(
            self._engine, run=self.run, config=config, source=PromptSource("bench"), prompts=prompts
        )
        meanwhile()
        try:
            while (counts := self._counts())["open"]:
                listener.wait(0.5)
        finally:
            listener.close()
        return counts["rewarded"]

    def finished(self) -> int:
        """Return the number of finished rollouts of the current run."""
        return self._counts()["closed"]

    def connections(self) -> dict[str, int]:
        """Return the numbers of the deployment's connections to Postgres and to Redis."""
        query = text("SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'client backend'")
        pool: Any = self._engine.pool
        with self._engine.connect() as connection:
            held = connection.execute(query).scalar_one() - pool.checkedin() - pool.checkedout()
        client = redis.Redis.from_url(self._services.redis_client_url)
        found = {"postgres": held, "redis": len(client.client_list()) - 1}
        client.close()
        return found

    def held_by(self, number: int) -> int:
        """Return the number of running attempts that a worker has reported."""
        query = text("""
            SELECT count(*) FROM attempts
            WHERE state = 'running' AND worker_id LIKE :of_process
        """)
        with self._engine.connect() as connection:
            of_process = {"of_process": f"%-{self.worker_pids[number]}-%"}
            return connection.execute(query, of_process).scalar_one()

    def executed_again(self) -> int:
        """Return the number of rollouts with an attempt that began after another succeeded."""
        query = text("""
            SELECT count(DISTINCT later.rollout_id)
            FROM attempts won JOIN attempts later USING (rollout_id) JOIN runs ON
                 runs.run_id = won.run_id
            WHERE slug = :run AND won.state = 'succeeded' AND later.attempt_no > won.attempt_no
              AND later.dispatched_at > won.ended_at
        """)
        with self._engine.connect() as connection:
            return connection.execute(query, {"run": self.run}).scalar_one()

    def _counts(self) -> dict[str, int]:
        query = text("""
            SELECT count(*) FILTER (WHERE g.state = 'open') AS open,
                   count(*) FILTER (WHERE g.state <> 'open') AS closed,
                   count(*) FILTER (WHERE g.reward_mean = 1) AS rewarded
            FROM groups g JOIN runs USING (run_id) WHERE slug = :run
        """)
        with self._engine.connect() as connection:
            return dict(connection.execute(query, {"run": self.run}).one()._mapping)

    def _spawn(self, *arguments: str) -> int:
        process = OwnProcess(start_python("rollout", arguments, self._environment, self._log))
        self._stack.callback(process.end, _END_TIMEOUT_S)
        return process.pid

    def _wait_for_workers(self) -> None:
        deadline = monotonic() + _START_TIMEOUT_S
        listener = Listener(self._engine, READY_CHANNEL)
        query = text("SELECT count(*) FROM processes WHERE kind = 'worker'")
        while True:
            with self._engine.connect() as connection:
                if connection.execute(query).scalar_one() >= self._workers:
                    break
            if monotonic() > deadline:
                raise RuntimeError(f"the workers did not start:\n{self._log.read_text()[-4000:]}")
            listener.wait(0.2)
        listener.close()


def _keep_commit_times(database: str) -> None:
    engine = open_engine(database)
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.execute(text("ALTER SYSTEM SET track_commit_timestamp = on"))
    engine.dispose()
