"""The private servers of one data directory, shared by every process that works with it.

Entry points start the servers that they need, under a lock file. A started server outlives the
process that started it; `down` stops it. A borrowed server stops with the last borrower (ADR 0028).
The file `NAME.borrowed` marks a server that is only borrowed, and each borrower holds a shared lock
on the file. Must not: keep state in memory that another process needs.
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
    """The state of one private server, found without a connection."""

    name: str
    pid: int | None
    running: bool
    url: str
    data_dir: Path
    log: Path


class Borrowed(NamedTuple):
    """A server in use: its URL, and whether it runs only while it is borrowed."""

    url: str
    is_temporary: bool


class EmbeddedServices:
    """PostgreSQL and Redis under one data directory, on unix sockets, for this user only.

    Args:
        data_dir: Directory that identifies and holds the servers; created if missing.
        durable: False turns off fsync, for temporary clusters: faster, but a power failure can
            destroy them.
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
        """Start PostgreSQL unless it runs, until `down`. Return its SQLAlchemy URL."""
        with self._locked():
            self._borrow_file("postgres").unlink(missing_ok=True)
            return self._start_postgres().url

    def start_redis(self) -> str:
        """Start Redis unless it runs, until `down`. Return its URL as a Celery broker."""
        with self._locked():
            self._borrow_file("redis").unlink(missing_ok=True)
            return self._start_redis().url

    @contextmanager
    def borrow_postgres(self) -> Iterator[Borrowed]:
        """Use PostgreSQL in the block; the last borrower stops it unless it was started to stay."""
        with self._borrowed("postgres", self._start_postgres) as borrowed:
            yield borrowed

    @contextmanager
    def borrow_redis(self) -> Iterator[Borrowed]:
        """Use Redis in the block; the last borrower stops it unless it was started to stay."""
        with self._borrowed("redis", self._start_redis) as borrowed:
            yield borrowed

    def require_postgres(self) -> str:
        """Return the URL of the private Postgres.

        Raises:
            ServiceUnavailable: It does not run.
        """
        if (url := self.find_postgres()) is not None:
            return url
        raise ServiceUnavailable(
            f"No trajectory store is named, and no private one runs in {self._data_dir}.",
            remedy="Start it in this folder: `rollout up`. Or set ROLLOUT_DATABASE__URL.",
            code="E212",
        )

    def find_postgres(self) -> str | None:
        """Return the URL of PostgreSQL if it runs, and keep it running until `down`."""
        if not self._data_dir.exists():
            return None
        with self._locked():
            server = PostgresServer(self._directories.find("postgres"), durable=self._durable)
            if server.running_pid() is None:
                return None
            self._borrow_file("postgres").unlink(missing_ok=True)
            return server.url

    @property
    def redis_client_url(self) -> str:
        """The URL of the same Redis for redis-py; valid after the start."""
        return RedisServer(self._directories.find("redis"), durable=self._durable).client_url

    def status(self) -> list[ServiceStatus]:
        """Return the state of the servers; starts nothing and waits for no lock."""
        return [_status(server) for server in self._servers()]

    def down(self) -> list[str]:
        """Stop the servers and keep their data; return the names of those that ran."""
        if not self._data_dir.exists():
            return []
        with self._locked():
            for server in self._servers():
                self._borrow_file(server.name).unlink(missing_ok=True)
            return [server.name for server in self._servers() if server.stop()]

    def remove(self) -> None:
        """Stop the servers and delete their data in all directories."""
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
                        self._borrow_file(name).unlink()
                os.close(hold)

    def _hold(self, name: str, *, make: bool) -> int | None:
        """Lock the file `NAME.borrowed` as a borrower; None for a server that stays until `down`.

        The file of a killed borrower is used again, so that its server stops with us.
        """
        try:
            hold = os.open(self._borrow_file(name), os.O_RDWR | (os.O_CREAT if make else 0), 0o600)
        except FileNotFoundError:
            return None
        fcntl.flock(hold, fcntl.LOCK_SH)
        return hold

    def _is_last(self, name: str, hold: int) -> bool:
        """Say whether the server is still only borrowed, and without another borrower."""
        try:
            if not os.path.samestat(os.fstat(hold), self._borrow_file(name).stat()):
                return False
            fcntl.flock(hold, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (FileNotFoundError, BlockingIOError):
            return False
        return True

    def _borrow_file(self, name: str) -> Path:
        return self._data_dir / f"{name}.borrowed"

    def _servers(self) -> tuple[Server, ...]:
        return (
            PostgresServer(self._directories.find("postgres"), durable=self._durable),
            RedisServer(self._directories.find("redis"), durable=self._durable),
        )

    @contextmanager
    def _locked(self) -> Iterator[None]:
        try:
            make_data_dir(self._data_dir)
            fd = os.open(self._data_dir / LOCK_NAME, os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise _no_access(self._data_dir, error) from error
        try:
            self._wait_lock(fd)
        except OSError as error:  # most likely a file system without locks
            os.close(fd)
            raise _no_access(self._data_dir, error) from error
        try:
            yield
        except PermissionError as error:
            raise _no_access(self._data_dir, error) from error
        finally:
            os.close(fd)  # releases the lock, as a crash does

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


def make_data_dir(data_dir: Path) -> None:
    """Make the folder unless it exists; any number of processes may do so at once."""
    # For root the servers run as another account, which must be able to enter.
    data_dir.mkdir(mode=0o711 if os.geteuid() == 0 else 0o700, parents=True, exist_ok=True)


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
