"""The processes of the example: private servers, controller, worker, policy server, trainer.

The command starts them, reads the trainer's reports, and kills a worker and the trainer. Everything
is removed at the end.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pydantic import SecretStr

from pipeline.embedded import EmbeddedServices
from pipeline.settings import Settings
from pipeline.settings.sections import BrokerSettings, DatabaseSettings, WorkerSettings
from pipeline.store import schema
from rollout.demo.machine import temporary_services
from rollout.deployment import Deployment, engine_of
from rollout.options import WorkerOptions
from rollout.supervision import WORKER, LocalProcesses, find_processes

_FOLDER = Path(__file__).resolve().parent
#: With matrices this small, threads cost more than they save.
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}

#: Fewer than the rollouts of a step, so that a killed worker leaves some under way, and others in
#: the queue.
_CONCURRENCY = 16
_CHILD_SETTINGS = {
    # The policy server returns token ids and logprobs in the fields of vLLM.
    "ROLLOUT_LLM__SERVER": "vllm",
    # A killed worker is noticed after seconds, not half a minute.
    "ROLLOUT_LEASE__HEARTBEAT_S": "0.5",
    "ROLLOUT_LEASE__LEASE_S": "5",
    "ROLLOUT_LEASE__GRACE_S": "1",
}
_END_S = 10.0
_WARM_UP_S = 300.0

#: A trainer's report, such as `{"event": "pulled", "step": 3}`.
Report = dict[str, Any]


class Machine:
    """The running processes, and the store.

    The warm-up begins at once, beside the start of everything else.

    Args:
        services: The private servers, not started.
        data_dir: Their data directory; logs and the checkpoint go there, too.
        seed: Of the warm-up.
    """

    def __init__(self, services: EmbeddedServices, data_dir: Path, *, seed: int) -> None:
        self._folder = data_dir
        self._others: list[subprocess.Popen[str]] = []
        self.checkpoint = data_dir / "checkpoint.npz"
        data_dir.mkdir(mode=0o711, exist_ok=True)
        self._warm_up = self._start("warm_up", str(self.checkpoint), "--seed", str(seed))
        settings = Settings(
            data_dir=data_dir,
            log_level="WARNING",
            worker=WorkerSettings(drain_s=1.0),
            broker=BrokerSettings(url=SecretStr(services.start_redis())),
            database=DatabaseSettings(url=SecretStr(services.start_postgres())),
        )
        self.deployment = Deployment(settings, engine_of(settings))
        schema.upgrade(self.deployment.engine)
        self._controller, self._workers = (
            LocalProcesses(settings, _CHILD_SETTINGS, folder=data_dir, only_environment=True)
            for _ in range(2)
        )
        self._controller.start_controller()
        self.start_worker()

    def start_worker(self) -> None:
        """Start a worker with the example's agent."""
        agent = str(_FOLDER / "agent.py")
        self._workers.start_workers(1, WorkerOptions(concurrency=_CONCURRENCY, plugin=[agent]))

    def replace_worker(self) -> None:
        """Kill the worker as `kill -9` does, and start another."""
        for child in find_processes(self._folder):
            if child.kind == WORKER:
                os.kill(child.pid, signal.SIGKILL)
        self._workers.stop(at_once=True)
        self.start_worker()

    def check(self) -> None:
        """Check that controller and worker run.

        Raises:
            ServiceUnavailable: One of them ended by itself; the message has the end of its log.
        """
        self._controller.check()
        self._workers.check()

    def start_policy_server(self) -> str:
        """Wait for the warm-up, start the policy server, and return its base URL."""
        if self._warm_up.wait(_WARM_UP_S) != 0:
            raise RuntimeError(f"the warm-up failed:\n{self._log('warm_up')}")
        self._policy = self._start("server", str(self.checkpoint))
        assert self._policy.stdout is not None
        line = self._policy.stdout.readline()
        if not line:
            raise RuntimeError(f"the policy server did not start:\n{self._log('server')}")
        return json.loads(line)["base_url"]

    @contextmanager
    def held_policy(self) -> Iterator[None]:
        """Let the policy server answer nothing in the block."""
        self._policy.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._policy.send_signal(signal.SIGCONT)

    def run_trainer(
        self, arguments: list[str], *, is_fatal: Callable[[Report], bool]
    ) -> Iterator[Report]:
        """Run the trainer until it is done, yield its reports, and start it again after a kill.

        Args:
            arguments: Arguments of `tiny_policy.trainer`.
            is_fatal: Whether the trainer is killed as `kill -9` does after this report.

        Raises:
            RuntimeError: The trainer failed.
        """
        url = self.deployment.settings.database.url
        database = {"ROLLOUT_DATABASE__URL": url.get_secret_value()} if url else {}
        while True:
            trainer = self._start("trainer", *arguments, settings=database)
            assert trainer.stdout is not None
            is_killed = False
            for line in trainer.stdout:
                report = json.loads(line)
                if is_fatal(report):
                    trainer.kill()
                    is_killed = True
                yield report
            if trainer.wait() == 0:
                return
            if not is_killed:
                raise RuntimeError(f"the trainer failed:\n{self._log('trainer')}")

    def stop(self) -> None:
        """End all processes."""
        for process in self._others:
            process.terminate()
        self._workers.stop()
        self._controller.stop()
        for process in self._others:
            try:
                process.wait(_END_S)
            except subprocess.TimeoutExpired:
                process.kill()
        self.deployment.engine.dispose()

    def _start(
        self, module: str, *arguments: str, settings: Mapping[str, str] = MappingProxyType({})
    ) -> subprocess.Popen[str]:
        environment = {
            name: value for name, value in os.environ.items() if not name.startswith("ROLLOUT_")
        }
        environment |= {"PYTHONPATH": str(_FOLDER.parent)} | _ONE_THREAD | dict(settings)
        with self._log_path(module).open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", f"tiny_policy.{module}", *arguments],
                stdin=subprocess.PIPE,  # closed when we end for any reason; the process then ends
                stdout=subprocess.PIPE,
                stderr=log,
                env=environment,
                cwd=self._folder,
                text=True,
            )
        self._others.append(process)
        return process

    def _log_path(self, module: str) -> Path:
        return self._folder / f"{module}.log"

    def _log(self, module: str) -> str:
        return self._log_path(module).read_text()[-4000:]


@contextmanager
def started_machine(*, seed: int) -> Iterator[Machine]:
    """Start a machine, and remove all of it at the end."""
    with temporary_services() as (services, data_dir):
        machine = Machine(services, data_dir, seed=seed)
        try:
            yield machine
        finally:
            machine.stop()


def wait_until(condition: Callable[[], bool], *, timeout_s: float, what: str) -> None:
    """Wait for a condition of the store.

    Raises:
        TimeoutError: It did not hold in time.
    """
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what} did not happen within {timeout_s:g} s")
        time.sleep(0.01)
