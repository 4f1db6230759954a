"""The private servers of one data directory, shared by every process that works with it.

Entry points start what they need; a lock file makes the first one do the work. A server that was
started outlives its starter and stops with `down`. One that was only borrowed stops with the last
borrower (ADR 0028): the file `NAME.borrowed` says that nobody asked for it to stay, and each
borrower holds a shared lock on it. Must not: keep anything in memory that another process would
miss.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from pipeline.contract.errors import ServiceUnavailable
from pipeline.embedded import postgres_server, redis_server
from pipeline.embedded.postgres_server import PostgresServer
from pipeline.embedded.redis_server import RedisServer
from pipeline.embedded.server import Server
from pipeline.embedded.server_paths import ServerDirectories

LOCK_NAME = "services.lock"
LOCK_POLL_S = 0.02


class ServiceStatus(NamedTuple):
    """What is known about one private server without asking it."""

    name: str
    pid: int | None
    running: bool
    url: str
    data_dir: Path
    log: Path


class Borrowed(NamedTuple):
    """A server in use: its URL, and whether it runs only for as long as it is borrowed."""

    url: str
    is_temporary: bool


class EmbeddedServices:
    """PostgreSQL and Redis under one data directory, on unix sockets, for this user only.

    Args:
        data_dir: Directory that identifies and holds the servers; made if missing.
        durable: False for clusters that are thrown away: faster, and a power cut ruins them.
        start_timeout_s: Longest wait for a server (or for another process starting it).
    """

    def __init__(
        self, data_dir: Path, *, durable: bool = True, start_timeout_s: float = 60.0
    ) -> None:
        self._data_dir = Path(data_dir).expanduser().resolve()
        self._durable = durable
        self._timeout_s = start_timeout_s
        self._directories = ServerDirectories(self._data_dir, durable=durable)

    def start_postgres(self) -> str:
        """Start PostgreSQL unless it runs; it stays. Return its SQLAlchemy URL."""
        with self._locked():
            self._note_of("postgres").unlink(missing_ok=True)
            return self._start_postgres().url

    def start_redis(self) -> str:
        """Start Redis unless it runs; it stays. Return its URL as a Celery broker."""
        with self._locked():
            self._note_of("redis").unlink(missing_ok=True)
            return self._start_redis().url

    @contextmanager
    def borrow_postgres(self) -> Iterator[Borrowed]:
        """Use PostgreSQL inside the block; the last to do so stops it, unless it is to stay."""
        with self._borrowed("postgres", self._start_postgres) as borrowed:
            yield borrowed

    @contextmanager
    def borrow_redis(self) -> Iterator[Borrowed]:
        """Use Redis inside the block; the last to do so stops it, unless it is to stay."""
        with self._borrowed("redis", self._start_redis) as borrowed:
            yield borrowed

    def find_postgres(self) -> str | None:
        """Return the URL of PostgreSQL if it runs, and let it stay; start nothing."""
        if not self._data_dir.exists():
            return None
        with self._locked():
            server = PostgresServer(self._directories.find("postgres"), durable=self._durable)
            if server.running_pid() is None:
                return None
            self._note_of("postgres").unlink(missing_ok=True)
            return server.url

    @property
    def redis_client_url(self) -> str:
        """The URL of the same Redis for redis-py; valid once it was started."""
        return RedisServer(self._directories.find("redis"), durable=self._durable).client_url

    def status(self) -> list[ServiceStatus]:
        """Say which servers run; starts nothing and waits for nobody."""
        return [_status(server) for server in self._servers()]

    def down(self) -> list[str]:
        """Stop the servers, keep their data; return the names of those that ran."""
        if not self._data_dir.exists():
            return []
        with self._locked():
            for server in self._servers():
                self._note_of(server.name).unlink(missing_ok=True)
            return [server.name for server in self._servers() if server.stop()]

    def remove(self) -> None:
        """Stop the servers and delete their data, wherever it lies."""
        self.down()
        if self._data_dir.exists():
            with self._locked():
                self._directories.forget(*(server.name for server in self._servers()))

    def _start_postgres(self) -> Server:
        paths = self._directories.prepare(
            "postgres", socket_name=postgres_server.SOCKET_NAME, not_as_root=True
        )
        return self._started(PostgresServer(paths, durable=self._durable))

    def _start_redis(self) -> Server:
        paths = self._directories.prepare(
            "redis", socket_name=redis_server.SOCKET_NAME, not_as_root=False
        )
        return self._started(RedisServer(paths, durable=self._durable))

    def _started(self, server: Server) -> Server:
        server.start(self._timeout_s)
        return server

    @contextmanager
    def _borrowed(self, name: str, start: Callable[[], Server]) -> Iterator[Borrowed]:
        with self._locked():
            ran = any(server.name == name and server.running_pid() for server in self._servers())
            server = start()
            hold = self._hold(name, make=not ran)
        try:
            yield Borrowed(server.url, is_temporary=hold is not None)
        finally:
            if hold is not None:
                with self._locked():
                    if self._is_last(name, hold):
                        server.stop()
                        self._note_of(name).unlink()
                os.close(hold)

    def _hold(self, name: str, *, make: bool) -> int | None:
        """Take part in borrowing; None for a server that is to stay anyway.

        A note that a killed borrower left is taken over: its server stops with us.
        """
        try:
            hold = os.open(self._note_of(name), os.O_RDWR | (os.O_CREAT if make else 0), 0o600)
        except FileNotFoundError:
            return None
        fcntl.flock(hold, fcntl.LOCK_SH)
        return hold

    def _is_last(self, name: str, hold: int) -> bool:
        """Say whether the server is still only borrowed, and by nobody else."""
        try:
            if not os.path.samestat(os.fstat(hold), self._note_of(name).stat()):
                return False
            fcntl.flock(hold, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (FileNotFoundError, BlockingIOError):
            return False
        return True

    def _note_of(self, name: str) -> Path:
        return self._data_dir / f"{name}.borrowed"

    def _servers(self) -> tuple[Server, ...]:
        return (
            PostgresServer(self._directories.find("postgres"), durable=self._durable),
            RedisServer(self._directories.find("redis"), durable=self._durable),
        )

    @contextmanager
    def _locked(self) -> Iterator[None]:
        try:
            self._make_data_dir()
            fd = os.open(self._data_dir / LOCK_NAME, os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise _no_access(self._data_dir, error) from error
        try:
            self._wait_lock(fd)
        except OSError as error:  # a file system without locks, most likely
            os.close(fd)
            raise _no_access(self._data_dir, error) from error
        try:
            yield
        except PermissionError as error:
            raise _no_access(self._data_dir, error) from error
        finally:
            os.close(fd)  # releases the lock, as a crash does

    def _make_data_dir(self) -> None:
        if not self._data_dir.exists():
            # Root's servers run as another account, which must be able to pass through.
            self._data_dir.mkdir(mode=0o711 if os.geteuid() == 0 else 0o700, parents=True)

    def _wait_lock(self, fd: int) -> None:
        deadline = time.monotonic() + self._timeout_s
        while True:
            try:
                return fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                if time.monotonic() > deadline:
                    raise ServiceUnavailable(
                        f"Another process has been starting services for {self._timeout_s:g} s.",
                        why=f"It holds {self._data_dir / LOCK_NAME}.",
                        remedy="See what it is with `fuser` on that file; end it and try again.",
                        code="E212",
                    ) from error
            time.sleep(LOCK_POLL_S)


def _status(server: Server) -> ServiceStatus:
    pid = server.running_pid()
    return ServiceStatus(
        server.name, pid, pid is not None, server.url, server.paths.home, server.log
    )


def _no_access(data_dir: Path, error: OSError) -> ServiceUnavailable:
    return ServiceUnavailable(
        f"The data directory {data_dir} cannot be used.",
        why=f"{error.strerror}: {error.filename or data_dir}.",
        remedy="It is another user's, or its disk is read-only or has no locks: choose another "
        "with --data-dir or ROLLOUT_DATA_DIR.",
        code="E213",
    )
