"""The processes that commands start: workers, controllers, the demo's offline policy.

Each is recorded in a file of the data directory, so that other commands find it. A recorded pid is
valid only if the start time of its process matches. Logs go to `logs/` of the data directory. Must
not: wait for runs.
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
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pipeline.contract.errors import ServiceUnavailable
from pipeline.embedded import processes as os_processes
from pipeline.settings import Settings
from rollout.options import WorkerOptions
from rollout.output import fields

E_CHILD_ENDED = "E220"

WORKER = "worker"
CONTROLLER = "controller"

#: Prefixes of environment variables that influence our processes.
_OWN_NAMES = ("ROLLOUT_", "OPENAI_", "ANTHROPIC_", "AWS_", "BASE_URL", "MODEL_ID")

#: Time beyond `worker.drain_s` for sending the last completions and ending threads.
_WORKER_END_S = 25.0
_CONTROLLER_END_S = 15.0
_KILL_S = 5.0
_LOGS_KEPT = 20


@dataclass(frozen=True, slots=True)
class ChildProcess:
    """A process that a command started; `mark` distinguishes it from a later one with its pid."""

    kind: str
    pid: int
    mark: str
    stays: bool  #: goes on when the command that started it ends
    log: str
    started_at: str
    place: str = ""  #: fingerprint of its servers' URLs

    @property
    def is_alive(self) -> bool:
        """Whether the same process still runs."""
        return os_processes.start_mark(self.pid) == self.mark

    @property
    def note(self) -> Path:
        """The file that records the process."""
        return Path(self.log).parents[1] / "processes" / f"{self.kind}-{self.pid}.json"

    def to_json(self) -> dict[str, Any]:
        """Return the process as `rollout ps --json` prints it."""
        return fields(self, "kind", "pid", "stays", "started_at", "log")


@dataclass
class LocalProcesses:
    """The processes that one command starts; `settings` have the URLs of both servers."""

    settings: Settings
    environment: Mapping[str, str] = field(default_factory=dict)
    stays: bool = False
    folder: Path | None = None  #: their working directory; None: ours
    only_environment: bool = False  #: do not pass on our own environment's settings

    def __post_init__(self) -> None:
        self._started: dict[ChildProcess, subprocess.Popen[bytes]] = {}

    def start(self, *, workers: int, options: WorkerOptions, queue: str | None = None) -> None:
        """Start workers, and a controller unless one runs in the background.

        Args:
            workers: Number of workers.
            options: Their options.
            queue: Their request queue; None: that of the settings.
        """
        if CONTROLLER not in {child.kind for child in self.staying()}:
            self.start_controller()
        self.start_workers(workers, options, queue=queue)

    def start_controller(self, *, only: str | None = None) -> None:
        """Start a controller, or one of its services alone."""
        self.spawn(CONTROLLER, ["--only", only] if only else [])

    def start_workers(self, n: int, options: WorkerOptions, *, queue: str | None = None) -> None:
        """Start workers alone; arguments as for `start`."""
        arguments = ["--concurrency", str(options.concurrency)] if options.concurrency else []
        for plugin in options.plugin or ():
            arguments += ["--plugin", plugin]
        if queue:
            arguments += ["--queues", queue]
        for _ in range(n):
            self.spawn(WORKER, arguments)

    def spawn(self, kind: str, arguments: Sequence[str]) -> ChildProcess:
        """Start the command of this name, detached from the terminal.

        A process that does not stay reads from a pipe, which the kernel closes when we end for any
        reason. The process then ends too.
        """
        log = _new_log(self.settings.data_dir / "logs", kind)
        command = [sys.executable, "-P", "-m", "rollout"]
        command += ["--data-dir", str(self.settings.data_dir), kind, *arguments]
        with log.open("ab") as output:
            process = subprocess.Popen(
                command if self.stays else [*command, "--while-stdin"],
                stdin=subprocess.DEVNULL if self.stays else subprocess.PIPE,
                stdout=output,
                stderr=output,
                env=self._environment(kind),
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

    @property
    def kinds(self) -> frozenset[str]:
        """Kinds of the processes that were started here and not released by `leave`."""
        return frozenset(child.kind for child in self._started)

    def staying(self) -> list[ChildProcess]:
        """Return the background processes of this data directory on the same servers."""
        place = _fingerprint(self.settings)
        found = find_processes(self.settings.data_dir)
        return [child for child in found if child.stays and child.place == place]

    def check(self) -> None:
        """Check that no process ended by itself.

        Raises:
            ServiceUnavailable: A process ended; the message has the end of its log.
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
        """Release the started processes: they go on after this command."""
        self._started = {}

    def stop(self, *, at_once: bool = False) -> None:
        """Stop the processes that were started here; an interruption kills them at once."""
        timeout_s = 0 if at_once else worker_end_s(self.settings)
        stop_processes(self._started, timeout_s=timeout_s)
        for process in self._started.values():
            process.wait()
            if process.stdin:
                process.stdin.close()
        self._started = {}

    def _environment(self, kind: str) -> dict[str, str]:
        """Return our environment with the resolved URLs; only controllers get the database's."""
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
        if kind == CONTROLLER and settings.database.url:
            environment["ROLLOUT_DATABASE__URL"] = settings.database.url.get_secret_value()
        if settings.broker.url:
            environment["ROLLOUT_BROKER__URL"] = settings.broker.url.get_secret_value()
        return environment | dict(self.environment)


def find_processes(data_dir: Path) -> list[ChildProcess]:
    """Return the running processes of a data directory; delete the records of ended ones."""
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
    """Return the seconds that workers may take to end."""
    return settings.worker.drain_s + _WORKER_END_S


def _stop(children: list[ChildProcess], timeout_s: float) -> None:
    """Send SIGTERM to processes, and SIGKILL to those that do not end in time.

    An interruption kills them at once and is raised again.
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
    """Return a hash of the servers' URLs, which distinguishes servers without revealing URLs."""
    urls = (settings.database.url, settings.broker.url)
    parts = [url.get_secret_value() if url else "" for url in urls] + [settings.broker.prefix]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
