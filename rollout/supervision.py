"""Processes that commands start beside themselves: workers, controllers, the demo's offline policy.

Each is noted in a file of the data directory, so that another command finds it again. A noted pid
counts only if the process behind it started when ours did. Logs go to `logs/` of the data
directory. Must not: wait for runs.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from pipeline.contract.errors import ServiceUnavailable
from pipeline.embedded import processes as os_processes
from pipeline.settings import Settings
from rollout.options import WorkerOptions

E_CHILD_ENDED = "E220"

WORKER = "worker"
CONTROLLER = "controller"

#: Variables that change what our processes do.
_OWN_NAMES = ("ROLLOUT_", "OPENAI_", "ANTHROPIC_", "AWS_", "BASE_URL", "MODEL_ID")

#: Beyond `worker.drain_s`: the last completions reach the broker, threads end.
_WORKER_END_S = 25.0
_CONTROLLER_END_S = 15.0
_KILL_S = 5.0
_LOGS_KEPT = 20


@dataclass(frozen=True, slots=True)
class ChildProcess:
    """A process that a command started; `mark` tells it from a later one with its pid."""

    kind: str
    pid: int
    mark: str
    stays: bool  #: goes on when the command that started it ends
    log: str
    started_at: str
    place: str = ""  #: fingerprint of the servers that it works with

    @property
    def is_alive(self) -> bool:
        """Whether this very process runs."""
        return os_processes.start_mark(self.pid) == self.mark

    @property
    def note(self) -> Path:
        """The file in which it is noted."""
        return Path(self.log).parents[1] / "processes" / f"{self.kind}-{self.pid}.json"


@dataclass
class LocalProcesses:
    """What one command runs beside itself; `settings` name both servers."""

    settings: Settings
    environment: Mapping[str, str] = field(default_factory=dict)
    stays: bool = False
    folder: Path | None = None  #: where they work; None: here
    only_environment: bool = False  #: leave out what our own environment says

    def __post_init__(self) -> None:
        self._started: dict[ChildProcess, subprocess.Popen[bytes]] = {}

    def start(self, *, workers: int, options: WorkerOptions, queue: str | None = None) -> None:
        """Start workers, and a controller unless one stays here already.

        Args:
            workers: How many.
            options: How they are run.
            queue: Where they take requests from; None: as the settings say.
        """
        if CONTROLLER not in {child.kind for child in self.staying()}:
            self.start_controller()
        self.start_workers(workers, options, queue=queue)

    def start_controller(self, *, only: str | None = None) -> None:
        """Start a controller, or one of its services alone."""
        arguments = ["--only", only] if only else []
        self._spawn(CONTROLLER, [CONTROLLER, *arguments], with_database=True)

    def start_workers(self, n: int, options: WorkerOptions, *, queue: str | None = None) -> None:
        """Start workers alone; arguments as for `start`."""
        arguments = ["--concurrency", str(options.concurrency)] if options.concurrency else []
        for plugin in options.plugin or ():
            arguments += ["--plugin", plugin]
        if queue:
            arguments += ["--queues", queue]
        for _ in range(n):
            self._spawn(WORKER, [WORKER, *arguments], with_database=False)

    def spawn_other(self, kind: str, arguments: list[str]) -> ChildProcess:
        """Start another command that ends with this one."""
        return self._spawn(kind, arguments, with_database=False)

    @property
    def kinds(self) -> frozenset[str]:
        """What was started here and is not let go of: workers, a controller."""
        return frozenset(child.kind for child in self._started)

    def staying(self) -> list[ChildProcess]:
        """Return what runs in the background here, on the same servers."""
        place = _fingerprint(self.settings)
        found = find_processes(self.settings.data_dir)
        return [child for child in found if child.stays and child.place == place]

    def check(self) -> None:
        """Notice a process that ended by itself.

        Raises:
            ServiceUnavailable: One did; with the end of its log.
        """
        for child, process in self._started.items():
            if (code := process.poll()) is not None:
                raise ServiceUnavailable(
                    f"The {child.kind} (pid {child.pid}) ended with exit code {code}.",
                    why=f"Its log ends with:\n{os_processes.log_tail(Path(child.log))}\n",
                    remedy=f"The whole log is in {child.log}.",
                    code=E_CHILD_ENDED,
                )

    def leave(self) -> None:
        """Let go of what was started: it stays."""
        self._started = {}

    def stop(self, *, at_once: bool = False) -> None:
        """Stop what was started here; interrupted, kill at once what is waited for."""
        timeout_s = 0 if at_once else worker_end_s(self.settings)
        stop_processes(self._started, timeout_s=timeout_s)
        for process in self._started.values():
            process.wait()
            if process.stdin:
                process.stdin.close()
        self._started = {}

    def _spawn(self, kind: str, arguments: list[str], *, with_database: bool) -> ChildProcess:
        """Start a command, detached from the terminal.

        A process that does not stay ends with us, however we end: it reads from a pipe that the
        kernel closes.
        """
        log = _new_log(self.settings.data_dir / "logs", kind)
        command = [sys.executable, "-P", "-m", "rollout"]
        command += ["--data-dir", str(self.settings.data_dir), *arguments]
        with log.open("ab") as output:
            process = subprocess.Popen(
                command if self.stays else [*command, "--while-stdin"],
                stdin=subprocess.DEVNULL if self.stays else subprocess.PIPE,
                stdout=output,
                stderr=output,
                env=self._environment(with_database=with_database),
                cwd=self.folder,
                start_new_session=True,
            )
        child = ChildProcess(
            kind,
            process.pid,
            os_processes.start_mark(process.pid) or "gone",
            self.stays,
            str(log),
            time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            _fingerprint(self.settings),
        )
        self._started[child] = process
        child.note.parent.mkdir(exist_ok=True)
        child.note.write_text(json.dumps(asdict(child)) + "\n")
        return child

    def _environment(self, *, with_database: bool) -> dict[str, str]:
        """Return our environment with the resolved URLs; workers get no database credentials."""
        settings = self.settings
        environment = {
            name: value
            for name, value in os.environ.items()
            if not (self.only_environment and name.startswith(_OWN_NAMES))
        }
        environment["ROLLOUT_LOG_LEVEL"] = settings.log_level
        if settings.profile:
            environment["ROLLOUT_PROFILE"] = settings.profile
        environment.pop("ROLLOUT_DATABASE__URL", None)
        if with_database and settings.database.url:
            environment["ROLLOUT_DATABASE__URL"] = settings.database.url.get_secret_value()
        if settings.broker.url:
            environment["ROLLOUT_BROKER__URL"] = settings.broker.url.get_secret_value()
        return environment | dict(self.environment)


def find_processes(data_dir: Path) -> list[ChildProcess]:
    """Return the processes of a data directory that run; forgets those that ended."""
    found: list[ChildProcess] = []
    for note in sorted((data_dir / "processes").glob("*.json")):
        try:
            child = ChildProcess(**json.loads(note.read_text()))
        except (OSError, ValueError, TypeError):
            continue
        if child.is_alive:
            found.append(child)
        else:
            note.unlink(missing_ok=True)
    return found


def stop_processes(children: Collection[ChildProcess], *, timeout_s: float) -> None:
    """Stop workers, so that their last completions are collected, then the others.

    Args:
        children: The processes.
        timeout_s: Longest wait for the workers; 0 kills everything at once.
    """
    workers = [child for child in children if child.kind == WORKER]
    rest = [child for child in children if child.kind != WORKER]
    try:
        _stop(workers, timeout_s)
    finally:
        _stop(rest, min(timeout_s, _CONTROLLER_END_S))


def worker_end_s(settings: Settings) -> float:
    """Return how long workers may take to end."""
    return settings.worker.drain_s + _WORKER_END_S


def _stop(children: list[ChildProcess], timeout_s: float) -> None:
    """Ask processes to end, and kill those that have not ended in time.

    An interruption kills at once and is passed on.
    """
    meant = {child.pid: lambda child=child: child.is_alive for child in children}
    try:
        os_processes.stop_processes(meant, [(signal.SIGTERM, timeout_s)])
    finally:
        os_processes.stop_processes(meant, [(signal.SIGKILL, _KILL_S)])
        for child in children:
            child.note.unlink(missing_ok=True)


def _new_log(folder: Path, kind: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for old in sorted(folder.glob(f"{kind}-*.log"))[: -(_LOGS_KEPT - 1)]:
        old.unlink(missing_ok=True)
    stamp = time.strftime("%Y%m%dT%H%M%S", time.gmtime())
    return folder / f"{kind}-{stamp}-{secrets.token_hex(2)}.log"


def _fingerprint(settings: Settings) -> str:
    """Return what tells servers apart; no part of an address can be read from it."""
    urls = (settings.database.url, settings.broker.url)
    parts = [url.get_secret_value() if url else "" for url in urls] + [settings.broker.prefix]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
