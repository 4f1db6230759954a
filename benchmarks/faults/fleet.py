"""The processes of a deployment and their supervisor, which restarts a process that dies.

The deployment uses it. Must not: choose a process to kill.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.faults.histories import wall_clock
from benchmarks.faults.processes import OwnProcess, Starter

#: Delay of a restart: long enough to be noticed, short compared with a lease.
_RESTART_AFTER_S = 0.5
_CHECK_EVERY_S = 0.1


@dataclass(slots=True)
class Member:
    """A supervised process, with its deaths."""

    kind: str
    name: str
    module: str
    arguments: Sequence[str]
    process: OwnProcess
    environments: Sequence[Mapping[str, str]] = ()  #: further variables of its first processes
    part: bool = False  #: whether its size differs from the others of its kind
    keep: bool = True
    deaths: list[tuple[float, int]] = field(default_factory=list)  #: when, exit code
    restart_at: float | None = None

    def is_alive(self) -> bool:
        """Whether its current process runs."""
        return self.process.is_alive()

    @property
    def is_usual(self) -> bool:
        """Whether it has the usual size and runs without injected faults."""
        return not self.part and len(self.deaths) >= len(self.environments)


class Fleet:
    """Starts members and keeps them running until closed.

    Args:
        environment: Environment of every member.
        logs: Folder for their output.
        start_process: Starts their processes.
    """

    def __init__(self, environment: Mapping[str, str], logs: Path, start_process: Starter) -> None:
        self._environment = dict(environment)
        self._start_process = start_process
        self._logs = logs
        self._members: list[Member] = []
        self._lock = threading.RLock()
        self._closing = threading.Event()
        self._supervisor = threading.Thread(target=self._supervise, name="supervisor", daemon=True)
        self._supervisor.start()

    def start(
        self,
        kind: str,
        module: str,
        arguments: Sequence[str] = (),
        environments: Sequence[Mapping[str, str]] = (),
        *,
        part: bool = False,
        keep: bool = True,
    ) -> Member:
        """Start a member.

        Args:
            kind: `worker`, `controller`, …
            module: Its program.
            arguments: Its arguments.
            environments: Further variables of its first processes; later processes have none.
            part: Whether its size differs from the others of its kind.
            keep: Whether it is restarted when it dies.
        """
        with self._lock:
            name = f"{kind}-{sum(member.kind == kind for member in self._members)}"
            process = self._spawn(name, module, arguments, *environments[:1])
            member = Member(
                kind,
                name,
                module,
                arguments,
                process,
                environments=environments,
                part=part,
                keep=keep,
            )
            self._members.append(member)
        return member

    def members(self, kind: str) -> list[Member]:
        """Return the running members of a kind."""
        with self._lock:
            found = [member for member in self._members if member.kind == kind]
        return [member for member in found if member.is_alive()]

    def deaths(self) -> dict[str, list[tuple[float, int]]]:
        """Return the times at which members died by themselves, with the exit codes."""
        with self._lock:
            return {member.name: list(member.deaths) for member in self._members if member.deaths}

    def retire(self, member: Member, *, timeout_s: float = 60) -> int:
        """Stop a member orderly, without a restart; return its exit code."""
        with self._lock:
            member.keep = False
        member.process.end(timeout_s)
        return member.process.wait(1)

    def logs(self, kind: str) -> str:
        """Return the logs of all processes of a kind."""
        found = sorted(self._logs.glob(f"{kind}-*.log"))
        return "\n".join(path.read_text(errors="replace") for path in found)

    def close(self) -> None:
        """End all processes."""
        self._closing.set()
        self._supervisor.join()
        with self._lock:
            members = [member for member in self._members if member.is_alive()]
        for member in members:
            member.process.kill()

    def _spawn(
        self, name: str, module: str, arguments: Sequence[str], *more: Mapping[str, str]
    ) -> OwnProcess:
        environment = {**self._environment}
        for each in more:
            environment |= each
        log = self._logs / f"{name}.log"
        return OwnProcess(self._start_process(module, arguments, environment, log))

    def _supervise(self) -> None:
        while not self._closing.wait(_CHECK_EVERY_S):
            with self._lock:
                for member in self._members:
                    if member.keep and not member.is_alive():
                        self._restart(member)

    def _restart(self, member: Member) -> None:
        now = time.monotonic()
        if member.restart_at is None:
            member.deaths.append((wall_clock(), member.process.wait(1)))
            member.restart_at = now + _RESTART_AFTER_S
        elif now >= member.restart_at:
            ended = len(member.deaths)
            more = member.environments[ended : ended + 1]
            member.process = self._spawn(member.name, member.module, member.arguments, *more)
            member.restart_at = None
