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
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import NamedTuple, TypeVar

from pipeline.contract.errors import ServiceUnavailable
from pipeline.embedded.postgres_server import PostgresServer
from pipeline.embedded.redis_server import RedisServer
from pipeline.embedded.server import Server
from pipeline.embedded.server_paths import ServerDirectories

LOCK_NAME = "services.lock"
LOCK_POLL_S = 0.02

_KINDS: tuple[type[Server], ...] = (PostgresServer, RedisServer)

S = TypeVar("S", bound=Server)


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
        return self._start_to_stay(PostgresServer)

    def start_redis(self) -> str:
        """Start Redis unless it runs, until `down`. Return its URL as a Celery broker."""
        return self._start_to_stay(RedisServer)

    def borrow_postgres(self) -> AbstractContextManager[Borrowed]:
        """Use PostgreSQL in the block; the last borrower stops it unless it was started to stay."""
        return self._borrowed(PostgresServer)

    def borrow_redis(self) -> AbstractContextManager[Borrowed]:
        """Use Redis in the block; the last borrower stops it unless it was started to stay."""
        return self._borrowed(RedisServer)

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
            server = self._server(PostgresServer)
            if server.running_pid() is None:
                return None
            self._borrow_file(server.name).unlink(missing_ok=True)
            return server.url

    @property
    def redis_client_url(self) -> str:
        """The URL of the same Redis for redis-py; valid after the start."""
        return self._server(RedisServer).client_url

    def status(self) -> list[ServiceStatus]:
        """Return the state of the servers; starts nothing and waits for no lock."""
        return [_status(self._server(kind)) for kind in _KINDS]

    def down(self) -> list[str]:
        """Stop the servers and keep their data; return the names of those that ran."""
        if not self._data_dir.exists():
            return []
        with self._locked():
            for kind in _KINDS:
                self._borrow_file(kind.name).unlink(missing_ok=True)
            return [kind.name for kind in _KINDS if self._server(kind).stop()]

    def remove(self) -> None:
        """Stop the servers and delete their data in all directories."""
        self.down()
        if self._data_dir.exists():
            with self._locked():
                self._directories.forget(*(kind.name for kind in _KINDS))

    def _start(self, kind: type[Server]) -> Server:
        paths = self._directories.prepare(
            kind.name, socket_name=kind.socket_name, not_as_root=kind.not_as_root
        )
        server = kind(paths, durable=self._durable)
        server.start(self._timeout_s)
        return server

    def _start_to_stay(self, kind: type[Server]) -> str:
        with self._locked():
            self._borrow_file(kind.name).unlink(missing_ok=True)
            return self._start(kind).url

    @contextmanager
    def _borrowed(self, kind: type[Server]) -> Iterator[Borrowed]:
        with self._locked():
            ran = self._server(kind).running_pid() is not None
            server = self._start(kind)
            lock = self._lock_as_borrower(kind.name, create=not ran)
        try:
            yield Borrowed(server.url, is_temporary=lock is not None)
        finally:
            if lock is not None:
                with self._locked():
                    if self._is_last(kind.name, lock):
                        server.stop()
                        self._borrow_file(kind.name).unlink()
                os.close(lock)

    def _lock_as_borrower(self, name: str, *, create: bool) -> int | None:
        """Lock the file `NAME.borrowed` as a borrower; None for a server that stays until `down`.

        The file of a killed borrower is used again, so that its server stops with us.
        """
        flags = os.O_RDWR | (os.O_CREAT if create else 0)
        try:
            lock = os.open(self._borrow_file(name), flags, 0o600)
        except FileNotFoundError:
            return None
        fcntl.flock(lock, fcntl.LOCK_SH)
        return lock

    def _is_last(self, name: str, lock: int) -> bool:
        """Say whether the server is still only borrowed, and without another borrower."""
        try:
            if not os.path.samestat(os.fstat(lock), self._borrow_file(name).stat()):
                return False
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (FileNotFoundError, BlockingIOError):
            return False
        return True

    def _borrow_file(self, name: str) -> Path:
        return self._data_dir / f"{name}.borrowed"

    def _server(self, kind: type[S]) -> S:
        return kind(self._directories.find(kind.name), durable=self._durable)

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
                        remedy="`fuser` on that file names the process; end it and try again.",
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
