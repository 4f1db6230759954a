"""The demo's servers, services and stand-in model, in a temporary folder.

All of them are removed at the end, even if the demo is killed. The user's settings are not read.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import SecretStr

from pipeline.contract.errors import ServiceUnavailable
from pipeline.embedded import EmbeddedServices
from pipeline.settings import Settings
from pipeline.settings.sections import BrokerSettings, DatabaseSettings, WorkerSettings
from rollout.deployment import Deployment, engine_of
from rollout.options import WorkerOptions
from rollout.output import note
from rollout.signals import interrupt_on
from rollout.supervision import ChildProcess, LocalProcesses, find_processes, stop_processes

MODEL = "offline-policy"

_POLICY_START_S = 20.0
#: The offline policy's error rates, high enough to show every kind of failure.
_POLICY_OPTIONS = ("--wrong", "0.2", "--mishaps", "0.25", "--stall-s", "2")
_CHILD_SETTINGS = {
    # No retries of calls, so that a failed call fails its attempt and the retry is visible.
    "ROLLOUT_LLM__MAX_RETRIES": "0",
    "ROLLOUT_LLM__TIMEOUT_S": "1.5",
}


class ReadyMachine(NamedTuple):
    """The store, the model's base URL, and a check that raises when a process has ended."""

    deployment: Deployment
    base_url: str
    check: Callable[[], None]


@contextmanager
def demo_machine() -> Iterator[DemoMachine]:
    """Start everything, and remove all of it at the end."""
    with temporary_services() as (services, data_dir), ExitStack() as stack:
        yield DemoMachine(data_dir, services, stack)


@contextmanager
def temporary_services() -> Iterator[tuple[EmbeddedServices, Path]]:
    """Yield private servers, not started, with a new data directory; remove both at the end.

    Processes that are recorded in the data directory are killed. This happens also if this process
    is killed.
    """
    interrupt_on(signal.SIGTERM, signal.SIGHUP)
    folder = Path(tempfile.mkdtemp(prefix="rollout-demo-"))
    # For root, Postgres runs as another account, which must be able to enter.
    folder.chmod(0o711 if os.geteuid() == 0 else 0o700)
    services = EmbeddedServices(folder / "data", durable=False)
    end_cleaner = _remove_if_killed(services, folder)
    try:
        yield services, folder / "data"
    finally:
        _ignore_signals()
        note("Stopping and removing everything …")
        _remove(services, folder)
        end_cleaner()


class DemoMachine:
    """Starts everything; a worker and the stand-in model start while Postgres starts."""

    def __init__(self, data_dir: Path, services: EmbeddedServices, stack: ExitStack) -> None:
        note("Starting private Postgres and Redis servers …")
        self._stack = stack
        self._settings = _settings(
            data_dir, broker=BrokerSettings(url=SecretStr(services.start_redis()))
        )
        self._processes = LocalProcesses(
            self._settings, _CHILD_SETTINGS, folder=data_dir, only_environment=True
        )
        self._policy = self._processes.spawn(MODEL, _POLICY_OPTIONS)
        self._processes.start_workers(1, WorkerOptions(concurrency=64))
        self._postgres = stack.enter_context(ThreadPoolExecutor(1)).submit(services.start_postgres)

    def wait_ready(self) -> ReadyMachine:
        """Wait for the database and the model, and start the controller."""
        from pipeline.store import schema

        database = DatabaseSettings(url=SecretStr(self._postgres.result()))
        settings = self._settings.model_copy(update={"database": database})
        engine = engine_of(settings)
        self._stack.callback(engine.dispose)
        schema.upgrade(engine)
        self._processes.settings = settings
        self._processes.start_controller()
        base_url = _wait_ready(self._policy, self._processes)
        note(f"The offline policy, a stand-in for a model, answers at {base_url}.")
        return ReadyMachine(Deployment(settings, engine), base_url, self._processes.check)


def _settings(data_dir: Path, **sections: Any) -> Settings:
    defaults = {name: field.default for name, field in Settings.model_fields.items()}
    own = {"data_dir": data_dir, "worker": WorkerSettings(drain_s=1.0), "log_level": "WARNING"}
    return Settings.model_construct(**{**defaults, **own, **sections})


def _wait_ready(policy: ChildProcess, processes: LocalProcesses) -> str:
    """Return the base URL that the offline policy prints in its first line."""
    deadline = time.monotonic() + _POLICY_START_S
    while time.monotonic() < deadline:
        for line in Path(policy.log).read_text().splitlines():
            if line.startswith('{"ready"'):
                return json.loads(line)["base_url"]
        processes.check()
        time.sleep(0.05)
    raise ServiceUnavailable(
        f"The offline policy did not start within {_POLICY_START_S:g} s.",
        remedy="Try again on a machine that is less busy.",
    )


def _remove(services: EmbeddedServices, folder: Path) -> None:
    """Kill the processes without a drain, and delete the data."""
    stop_processes(find_processes(folder / "data"), timeout_s=0)
    services.remove()
    shutil.rmtree(folder, ignore_errors=True)


def _remove_if_killed(services: EmbeddedServices, folder: Path) -> Callable[[], None]:
    """Fork a process that cleans up if we are killed; return a function that ends it.

    The fork waits on a pipe, which the kernel closes when we end.
    """
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            _ignore_signals()
            os.setsid()
            os.close(writer)
            with open(os.devnull, "r+b") as null:
                for descriptor in range(3):
                    os.dup2(null.fileno(), descriptor)
            if not os.read(reader, 1):
                _remove(services, folder)
        finally:
            os._exit(0)
    os.close(reader)

    def end_cleaner() -> None:
        os.write(writer, b"1")
        os.close(writer)
        os.waitpid(pid, 0)

    return end_cleaner


def _ignore_signals() -> None:
    """Ignore signals during the removal, which takes a second or two."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
