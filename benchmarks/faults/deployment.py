"""A separate deployment for faults: servers, model, controllers and workers as real processes.

The fault tests and the campaign use it. Leases are short, so that recovery takes seconds instead of
half a minute. Must not: affect a process that it did not start.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from sqlalchemy import Engine, text
from sqlalchemy.exc import DBAPIError

from benchmarks.faults import controller, plugin, worker
from benchmarks.faults.fleet import Fleet, Member
from benchmarks.faults.histories import FOLDER_VARIABLE
from benchmarks.faults.processes import ROOT, Starter, start_python
from benchmarks.faults.servers import BrokerServer, Store, make_broker
from benchmarks.mock_behaviour import MockBehaviour
from benchmarks.mock_server import MockServer
from pipeline.embedded import EmbeddedServices
from pipeline.queue.payloads import PayloadStore, open_payloads
from pipeline.settings import LeaseSettings, Settings, load_settings
from pipeline.store.engine import open_engine
from pipeline.store.schema import upgrade

WORKER = "worker"
CONTROLLER = "controller"

_START_TIMEOUT_S = 90.0
_POLL_S = 0.15

#: A tenth of production's leases.
SHORT_LEASE = LeaseSettings(heartbeat_s=0.5, lease_s=3.0, grace_s=1.5, poll_s=0.25)

#: Some calls are slow and some fail, as with real endpoints.
ORDINARY_MODEL = MockBehaviour(latency_ms=120, sigma=0.5, error_rate=0.04, retry_after_s=0.3)


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """The size of a deployment, and the behaviour of its model."""

    workers: int = 2
    concurrency: int = 32
    controllers: int = 1
    max_in_flight: int = 80
    lease: LeaseSettings = SHORT_LEASE
    model: MockBehaviour = ORDINARY_MODEL
    model_timeout_s: float = 5.0
    durable: bool = True  #: whether the store's commits survive a crash
    journal_after_s: float = 0.0  #: each call is recorded, so that every fault meets journals


class Deployment:
    """A running deployment on one broker; a context manager.

    Args:
        broker: `redis`, `rabbitmq` or `sqs`.
        size: Processes, leases, model.
        start_process: Starts controllers, workers and trainers.
        place: Folder for the folder of its servers; None: that of all temporary files.

    Raises:
        BrokerMissing: This machine cannot start the broker.
    """

    def __init__(
        self,
        broker: str,
        size: Size | None = None,
        *,
        start_process: Starter = start_python,
        place: str | None = None,
    ) -> None:
        self.size = size or Size()
        self.start_process = start_process
        self._place = place
        self._broker_name = broker
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as starting:
            self._start(starting)
            self._stack = starting.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _start(self, stack: ExitStack) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="rf-", dir=self._place))
        stack.callback(shutil.rmtree, self.folder, ignore_errors=True)
        # For root, PostgreSQL runs as another account, which must be able to enter.
        self.folder.chmod(0o755)
        self.histories = self.folder / "histories"
        self.histories.mkdir()
        logs = self.folder / "logs"
        logs.mkdir()
        self.broker: BrokerServer = make_broker(self._broker_name, self.folder / "b")
        self.store = Store(self.folder / "s", durable=self.size.durable)
        stack.callback(self.store.close)
        self.store.start()
        stack.callback(self.broker.close)
        self.broker.start()
        self.limits_url = self._start_limits(stack)
        self.engine: Engine = open_engine(self.store.url)
        stack.callback(self.engine.dispose)
        upgrade(self.engine)
        environment = _own_environment() | {FOLDER_VARIABLE: str(self.histories)}
        self.model = MockServer(self.size.model, environment)
        stack.callback(self.model.close)
        self.environment = environment | self._settings()
        self.fleet = Fleet(self.environment, logs, self.start_process)
        stack.callback(self.fleet.close)
        for _ in range(self.size.controllers):
            self.add_controller()
        for _ in range(self.size.workers):
            self.add_worker()
        self.wait_ready()

    def _start_limits(self, stack: ExitStack) -> str:
        """Return the URL of the Redis for shared limits: the broker, if it is Redis."""
        if self.broker.name == "redis":
            return self.broker.url
        services = EmbeddedServices(self.folder / "l", durable=False)
        stack.callback(services.remove)
        return services.start_redis()

    def _settings(self) -> dict[str, str]:
        size, lease = self.size, self.size.lease
        endpoint = self.broker.endpoint
        aws = {
            "ROLLOUT_AWS__ENDPOINT_URL": endpoint,
            "AWS_ACCESS_KEY_ID": "testing",
            "AWS_SECRET_ACCESS_KEY": "testing",
        }
        return (aws if endpoint else {}) | {
            "ROLLOUT_DATABASE__URL": self.store.url,
            "ROLLOUT_BROKER__URL": self.broker.url,
            "ROLLOUT_LIMITS__REDIS_URL": self.limits_url,
            "ROLLOUT_DATA_DIR": str(self.folder / "data"),
            "ROLLOUT_LEASE__HEARTBEAT_S": str(lease.heartbeat_s),
            "ROLLOUT_LEASE__LEASE_S": str(lease.lease_s),
            "ROLLOUT_LEASE__GRACE_S": str(lease.grace_s),
            "ROLLOUT_LEASE__POLL_S": str(lease.poll_s),
            "ROLLOUT_DISPATCH__MAX_IN_FLIGHT": str(size.max_in_flight),
            "ROLLOUT_WORKER__ANNOUNCE_S": "0.2",
            "ROLLOUT_JOURNAL__AFTER_S": str(size.journal_after_s),
            "ROLLOUT_LLM__BASE_URL": self.model.base_url,
            "ROLLOUT_LLM__MODEL": "mock",
            "ROLLOUT_LLM__TIMEOUT_S": str(size.model_timeout_s),
        }

    def broker_settings(self) -> Settings:
        """Return settings by which this process reaches the broker."""
        aws = {"endpoint_url": self.broker.endpoint} if self.broker.endpoint else {}
        return load_settings(overrides={"broker": {"url": self.broker.url}, "aws": aws})

    def payloads(self) -> PayloadStore:
        """Return the payload store of the workers."""
        return open_payloads(load_settings(overrides={"data_dir": str(self.folder / "data")}))

    def add_controller(self, *environments: Mapping[str, str]) -> Member:
        """Start a controller.

        Args:
            environments: Further variables of its first processes; later processes have none.
        """
        return self.fleet.start(CONTROLLER, controller.__name__, environments=environments)

    def add_worker(
        self, *environments: Mapping[str, str], concurrency: int | None = None
    ) -> Member:
        """Start a worker.

        Args:
            environments: Further variables of its first processes; later processes have none.
            concurrency: Another than the usual one.
        """
        arguments = ["-c", str(concurrency or self.size.concurrency), "--plugin", plugin.__name__]
        is_part = concurrency is not None
        return self.fleet.start(WORKER, worker.__name__, arguments, environments, part=is_part)

    @property
    def workers(self) -> list[Member]:
        """The running workers."""
        return self.fleet.members(WORKER)

    @property
    def controllers(self) -> list[Member]:
        """The running controllers."""
        return self.fleet.members(CONTROLLER)

    def restore(self) -> None:
        """Restore the usual members and stop the injection of model failures."""
        self.model.disturb()
        for kind, count, add in (
            (CONTROLLER, self.size.controllers, self.add_controller),
            (WORKER, self.size.workers, self.add_worker),
        ):
            members = self.fleet.members(kind)
            usual = [member for member in members if member.is_usual][:count]
            for member in members:
                if member not in usual:
                    self.fleet.retire(member)
            for _ in range(count - len(usual)):
                add()
        self.wait_ready()

    def is_quiet(self) -> bool:
        """Whether all rollouts of all runs have ended."""
        query = text(
            "SELECT count(*) FROM rollouts WHERE state IN ('queued', 'dispatched', 'running')"
        )
        try:
            with self.engine.connect() as connection:
                return connection.execute(query).scalar_one() == 0
        except DBAPIError:
            return False

    def wait_ready(self) -> None:
        """Wait until every running process of the members is in the store."""
        self.wait_until(self._all_reported, what="the members to report")

    def wait_until(
        self, condition: Callable[[], Any], *, what: str, timeout_s: float = _START_TIMEOUT_S
    ) -> Any:
        """Return the first true value of a condition.

        Raises:
            TimeoutError: The condition stayed false; the message has the ends of the logs.
        """
        deadline = time.monotonic() + timeout_s
        while not (value := condition()):
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"waited {timeout_s:g} s for {what}.\n{self._log_end(CONTROLLER)}"
                    f"\n{self._log_end(WORKER)}"
                )
            time.sleep(_POLL_S)
        return value

    def _all_reported(self) -> bool:
        query = text("SELECT process_id FROM processes WHERE kind IN ('worker', 'collector')")
        with self.engine.connect() as connection:
            reported = {name.rsplit("-", 2)[1] for name in connection.execute(query).scalars()}
        return all(str(m.process.pid) in reported for m in (*self.controllers, *self.workers))

    def _log_end(self, kind: str) -> str:
        return f"--- {kind}:\n{self.fleet.logs(kind)[-3000:]}"


def _own_environment() -> dict[str, str]:
    """Return this process's environment without variables that configure the pipeline."""
    foreign = ("ROLLOUT_", "OPENAI_", "ANTHROPIC_", "AWS_", "BASE_URL", "MODEL_ID", "PG")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
    return kept | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
