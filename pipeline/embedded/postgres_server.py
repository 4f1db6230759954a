"""The private PostgreSQL server: initialise its cluster once, start it, check it, stop it.

`EmbeddedServices` calls it under its lock. Must not: connect (the state comes from
`postmaster.pid`, as in `pg_ctl`), or listen on anything but a unix socket.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from urllib.parse import quote

from pipeline.contract.errors import ServiceUnavailable
from pipeline.embedded.postgres_programs import find_programs
from pipeline.embedded.processes import (
    POLL_S,
    Account,
    Identity,
    process_exists,
    run_as,
    server_environment,
    spawn_detached,
)
from pipeline.embedded.server import Server

DATABASE = "rollout"
SUPERUSER = "postgres"
PORT = "5432"  #: part of the socket's name; no TCP port is opened

#: Fast shutdown, then immediate shutdown (the next start recovers from the WAL), then SIGKILL.
STOP_SIGNALS = ((signal.SIGINT, 30.0), (signal.SIGQUIT, 10.0), (signal.SIGKILL, 10.0))

SETTINGS = {
    "listen_addresses": "",
    "port": PORT,
    "unix_socket_permissions": "0700",
    "max_connections": "200",
    "shared_buffers": "256MB",
    "max_wal_size": "2GB",
    "random_page_cost": "1.1",
    "jit": "off",  # the queries are short; compiling them costs more than it saves
    "huge_pages": "off",  # some containers kill the server instead of returning an error
    "log_checkpoints": "off",
    "log_timezone": "UTC",
    "timezone": "UTC",
}
#: Byte order for indexes, Unicode for upper and lower case; the same on every machine.
INITDB_OPTIONS = (
    *("-U", SUPERUSER, "--auth=trust", "--encoding=UTF8", "--locale=C"),
    *("--locale-provider=builtin", "--builtin-locale=C.UTF-8", "--no-instructions"),
)
NOT_DURABLE = {"fsync": "off", "synchronous_commit": "off", "full_page_writes": "off"}


class PostgresServer(Server):
    """One private cluster and the server on it."""

    name = "postgres"
    title = "PostgreSQL"
    socket_name = f".s.PGSQL.{PORT}"
    not_as_root = True
    stop_signals = STOP_SIGNALS

    @property
    def _data(self) -> Path:
        return self.paths.home / "data"

    @property
    def _identity(self) -> Identity:
        return Identity(("postgres",), self._data, (str(self._data),))

    @property
    def url(self) -> str:
        """SQLAlchemy's URL of the database; with a port, so that PGPORT cannot change it."""
        host = quote(str(self.paths.sockets), safe="/")
        return f"postgresql+psycopg://{SUPERUSER}@/{DATABASE}?host={host}&port={PORT}"

    def _pid_in_file(self) -> int:
        lines = self._pid_file()
        return int(lines[0]) if lines and lines[0].isdigit() else 0

    def _launch(self, life_lock: int, deadline: float) -> None:
        programs = find_programs(self._data, self.paths)
        if not self._data.exists():
            self._make_cluster(programs, life_lock)
        self._clear_stale_files()
        argv = [str(programs / "postgres"), "-D", str(self._data), *self._options()]
        since = self._log_size()
        pid = spawn_detached(argv, log=self.log, life_lock=life_lock, account=self.paths.account)
        if not self._wait_ready(pid, deadline):
            raise self._would_not_start(since)

    def _make_cluster(self, programs: Path, life_lock: int) -> None:
        """Run initdb in a temporary directory, then rename: a crash leaves no partial cluster."""
        account = self.paths.account
        for leftover in self.paths.home.glob("data.new-*"):
            shutil.rmtree(leftover)
        new = Path(tempfile.mkdtemp(prefix="data.new-", dir=self.paths.home))
        if account is not None:
            os.chown(new, account.uid, account.gid)
        initdb = [str(programs / "initdb"), "-D", str(new), *INITDB_OPTIONS]
        _run(initdb if self._durable else [*initdb, "--no-sync"], account, life_lock)
        single = [str(programs / "postgres"), "--single", "-D", str(new)]
        single += ["-c", f"fsync={'on' if self._durable else 'off'}", "-c", "log_checkpoints=off"]
        _run([*single, "postgres"], account, life_lock, stdin=f"CREATE DATABASE {DATABASE}\n")
        new.rename(self._data)
        if self._durable:
            _sync_directory(self.paths.home)

    def _options(self) -> list[str]:
        sockets = str(self.paths.sockets).replace('"', '""')
        settings = SETTINGS | {"unix_socket_directories": f'"{sockets}"'}
        if not self._durable:
            settings |= NOT_DURABLE
        return [part for item in settings.items() for part in ("-c", "=".join(item))]

    def _wait_ready(self, pid: int, deadline: float) -> bool:
        while not self._is_ready():
            if time.monotonic() > deadline or not process_exists(pid):
                return False
            time.sleep(POLL_S)
        return self._socket.exists()

    def _is_ready(self) -> bool:
        lines = self._pid_file()
        ready = len(lines) > 7 and lines[7].strip() == "ready"
        return ready and self.running_pid() is not None

    def _has_lost_socket(self) -> bool:
        return self._is_ready() and not self._socket.exists()

    def _clear_stale_files(self) -> None:
        """Remove the pid file and the sockets that a crash left.

        PostgreSQL refuses to start if a process has the pid in the old file, even another process
        after a reboot, or a zombie. We hold the life lock, so no server or backend is running.
        """
        lock = self._socket.with_name(f"{self.socket_name}.lock")
        for leftover in (self._data / "postmaster.pid", self._socket, lock):
            leftover.unlink(missing_ok=True)

    def _pid_file(self) -> list[str]:
        try:
            # The line with the path may contain bytes that are invalid in this locale.
            return (self._data / "postmaster.pid").read_text("utf-8", "replace").splitlines()
        except OSError:
            return []


def _run(argv: list[str], account: Account | None, life_lock: int, *, stdin: str = "") -> None:
    """Run one step of the initialisation, which must finish even if we are killed.

    The output goes to a file, because a pipe would break with us. The child inherits the life lock,
    so that the next start waits for it.
    """
    with tempfile.TemporaryFile() as output:
        done = subprocess.run(
            argv,
            cwd="/",
            env=server_environment(),
            input=stdin.encode(),
            stdout=output,
            stderr=subprocess.STDOUT,
            pass_fds=(life_lock,),
            check=False,
            **run_as(account),
        )
        output.seek(0)
        printed = output.read().decode("utf-8", "replace")
    if done.returncode != 0 or "ERROR:" in printed:
        raise ServiceUnavailable(
            "The private PostgreSQL cluster could not be made.",
            why="\n".join(printed.splitlines()[-12:]),
            code="E211",
        )


def _sync_directory(directory: Path) -> None:
    fd = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
