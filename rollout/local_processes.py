"""The workers and the controller that a command starts for itself, and their environment.

Used by `run`, `resume`, `up` and the demo. Must not: wait for runs.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.contract.errors import ServiceUnavailable
from rollout.child_processes import Child, Children, log_end
from rollout.options import WorkerOptions

if TYPE_CHECKING:
    from pipeline.settings import Settings

E_CHILD_ENDED = "E220"

WORKER = "worker"
CONTROLLER = "controller"

#: Variables that change what our processes do.
_OWN_NAMES = ("ROLLOUT_", "OPENAI_", "ANTHROPIC_", "AWS_", "BASE_URL", "MODEL_ID")

#: Beyond `worker.drain_s`: the last completions reach the broker, threads end.
_WORKER_END_S = 25.0
_CONTROLLER_END_S = 15.0


@dataclass
class LocalProcesses:
    """What one command runs beside itself; `settings` name both servers."""

    settings: Settings
    environment: Mapping[str, str] = field(default_factory=dict)
    stays: bool = False
    folder: Path | None = None  #: where they work; None: here
    only_environment: bool = False  #: leave out what our own environment says

    def __post_init__(self) -> None:
        self._children = Children(self.settings.data_dir)
        self._own: list[Child] = []

    def start(self, *, workers: int, options: WorkerOptions, queue: str | None = None) -> None:
        """Start workers, and a controller unless one stays here already.

        Args:
            workers: How many.
            options: How they are run.
            queue: Where they take requests from; None: as the settings say.
        """
        if CONTROLLER not in {child.kind for child in self.staying()}:
            self._spawn(CONTROLLER, [CONTROLLER], with_database=True)
        self.start_workers(workers, options, queue=queue)

    def start_collector(self) -> None:
        """Start a collector alone: it takes in what workers say, and hands out nothing."""
        self._spawn(CONTROLLER, [CONTROLLER, "--only", "collector"], with_database=True)

    def start_workers(self, n: int, options: WorkerOptions, *, queue: str | None = None) -> None:
        """Start workers alone; arguments as for `start`."""
        for _ in range(n):
            arguments = [*_arguments(options), *(["--queues", queue] if queue else [])]
            self._spawn(WORKER, [WORKER, *arguments], with_database=False)

    @property
    def kinds(self) -> frozenset[str]:
        """What was started here and is not let go of: workers, a controller."""
        return frozenset(child.kind for child in self._own)

    def staying(self) -> list[Child]:
        """Return what runs in the background here, on the same servers."""
        place = _place_of(self.settings)
        return [child for child in self._children.find() if child.stays and child.place == place]

    def spawn_other(self, kind: str, arguments: list[str]) -> Child:
        """Start another command that ends with this one."""
        return self._spawn(kind, arguments, with_database=False)

    def check(self) -> None:
        """Notice a process that ended by itself.

        Raises:
            ServiceUnavailable: One did; with the end of its log.
        """
        for child in self._own:
            code = self._children.exit_code(child)
            if code is not None:
                raise ServiceUnavailable(
                    f"The {child.kind} (pid {child.pid}) ended with exit code {code}.",
                    why=f"Its log ends with:\n{log_end(child)}\n",
                    remedy=f"The whole log is in {child.log}.",
                    code=E_CHILD_ENDED,
                )

    def leave(self) -> None:
        """Let go of what was started: it stays."""
        self._own = []

    def stop(self, *, at_once: bool = False) -> None:
        """Stop what was started here: workers first, so that their last words are collected.

        Interrupted, it kills at once what it was waiting for; call it again, for the rest.
        """
        workers = [child for child in self._own if child.kind == WORKER]
        rest = [child for child in self._own if child.kind != WORKER]
        drain_s = self.settings.worker.drain_s + _WORKER_END_S
        try:
            self._children.stop(workers, timeout_s=0 if at_once else drain_s)
        finally:
            self._children.stop(rest, timeout_s=0 if at_once else _CONTROLLER_END_S)
        self._own = []

    def _spawn(self, kind: str, arguments: list[str], *, with_database: bool) -> Child:
        child = self._children.spawn(
            kind,
            ["--data-dir", str(self.settings.data_dir), *arguments],
            environment=child_environment(
                self.settings, with_database=with_database, inherit=not self.only_environment
            )
            | dict(self.environment),
            stays=self.stays,
            place=_place_of(self.settings),
            folder=self.folder,
        )
        self._own.append(child)
        return child


def child_environment(
    settings: Settings, *, with_database: bool, inherit: bool = True
) -> dict[str, str]:
    """Return our environment with the resolved URLs; workers get no database credentials.

    Without `inherit`, what our environment says about the pipeline and its models is left out.
    """
    environment = {
        name: value
        for name, value in os.environ.items()
        if inherit or not name.startswith(_OWN_NAMES)
    }
    environment["ROLLOUT_LOG_LEVEL"] = settings.log_level
    if settings.profile:
        environment["ROLLOUT_PROFILE"] = settings.profile
    environment.pop("ROLLOUT_DATABASE__URL", None)
    if with_database and settings.database.url:
        environment["ROLLOUT_DATABASE__URL"] = settings.database.url.get_secret_value()
    if settings.broker.url:
        environment["ROLLOUT_BROKER__URL"] = settings.broker.url.get_secret_value()
    return environment


def _place_of(settings: Settings) -> str:
    """Return a fingerprint of the servers; no part of an address can be read from it."""
    urls = (settings.database.url, settings.broker.url)
    parts = [url.get_secret_value() if url else "" for url in urls] + [settings.broker.prefix]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _arguments(options: WorkerOptions) -> list[str]:
    arguments: list[str] = []
    if options.concurrency is not None:
        arguments += ["--concurrency", str(options.concurrency)]
    for plugin in options.plugin or ():
        arguments += ["--plugin", plugin]
    return arguments
