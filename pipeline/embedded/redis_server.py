"""The private Redis server: write its configuration, start it, check it, stop it.

`EmbeddedServices` calls it under its lock; `redis_programs` chooses Redis or Valkey. The server is
the broker. Every write goes to an append-only file, which is synced once a second. This costs
little and keeps queued messages over `rollout down` and over a killed server. A damaged file that
cannot be loaded is renamed, because the messages are published again from PostgreSQL.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from enum import Enum
from pathlib import Path
from urllib.parse import quote

from pipeline.embedded.processes import (
    POLL_S,
    Identity,
    log_tail,
    process_exists,
    spawn_detached,
)
from pipeline.embedded.redis_programs import NAMES, find_program
from pipeline.embedded.server import Server
from pipeline.embedded.server_paths import ServerPaths

SOCKET_NAME = "redis.sock"

#: Seconds a live server may refuse connections before its socket counts as lost.
SOCKET_LOST_S = 3.0
STOP_LADDER = ((signal.SIGTERM, 15.0), (signal.SIGKILL, 10.0))
DAMAGED = ("Bad file format", "Unexpected end of file reading the append only file")


class _Answer(Enum):
    READY = "ready"
    LOADING = "loading"
    SILENT = "silent"
    REFUSED = "refused"


class RedisServer(Server):
    """One private Redis and its files."""

    name = "redis"
    title = "Redis"
    stop_ladder = STOP_LADDER

    def __init__(self, paths: ServerPaths, *, durable: bool) -> None:
        self._config = paths.home / "redis.conf"
        self._socket = paths.sockets / SOCKET_NAME
        self._durable = durable
        marks = (str(self._config), str(self._socket))
        super().__init__(paths, Identity(NAMES, paths.home, marks))

    @property
    def url(self) -> str:
        """The broker URL for Celery and kombu."""
        return f"redis+socket://{quote(str(self._socket))}?virtual_host=0"

    @property
    def client_url(self) -> str:
        """The URL for redis-py's `from_url`."""
        return f"unix://{quote(str(self._socket))}?db=0"

    def _pid_in_file(self) -> int:
        try:
            return int((self.paths.home / "redis.pid").read_text())
        except (OSError, ValueError):
            return 0

    def _launch(self, life_lock: int, deadline: float) -> None:
        argv = [str(find_program()), str(self._config)]
        self._config.write_bytes(os.fsencode(self._configuration()))
        since = self._log_size()
        pid = spawn_detached(argv, log=self.log, life_lock=life_lock)
        if self._wait_ready(pid, deadline):
            return
        if any(words in log_tail(self.log, since=since) for words in DAMAGED):
            self._set_damaged_files_aside()
            pid = spawn_detached(argv, log=self.log, life_lock=life_lock)
            if self._wait_ready(pid, deadline):
                return
        raise self._would_not_start(since)

    def _configuration(self) -> str:
        settings = {
            "port": "0",
            "unixsocket": str(self._socket),
            "unixsocketperm": "700",
            "dir": str(self.paths.home),
            "pidfile": str(self.paths.home / "redis.pid"),
            "daemonize": "no",
            "save": "",
            "appendonly": "yes" if self._durable else "no",
            "appendfsync": "everysec",
            # Write commands, which every version reads. An older server cannot read a newer one's
            # RDB snapshot, and PATH may have another version at the next start.
            "aof-use-rdb-preamble": "no",
            "maxmemory-policy": "noeviction",  # a queue must reject writes, never drop messages
        }
        return "".join(f"{key} {_quoted(value)}\n" for key, value in settings.items())

    def _wait_ready(self, pid: int, deadline: float) -> bool:
        lost_at = time.monotonic() + SOCKET_LOST_S
        while (answer := _ask(self._socket)) is not _Answer.READY or self.running_pid() is None:
            now = time.monotonic()
            if now > deadline or not process_exists(pid):
                return False
            if answer is _Answer.REFUSED and now > lost_at:
                return False
            time.sleep(POLL_S)
        return True

    def _has_lost_socket(self) -> bool:
        return _ask(self._socket) is _Answer.REFUSED

    def _set_damaged_files_aside(self) -> None:
        stamp = time.strftime("%Y%m%dT%H%M%S", time.gmtime())
        for found in list(self.paths.home.glob("appendonly*")):
            found.rename(self.paths.home / f"damaged-{stamp}-{found.name}")


def _ask(path: Path) -> _Answer:
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(1.0)
        try:
            client.connect(str(path))
        except (FileNotFoundError, ConnectionRefusedError):
            return _Answer.REFUSED
        except OSError:
            return _Answer.SILENT
        try:
            client.sendall(b"PING\r\n")
            answer = client.recv(64)
        except OSError:
            return _Answer.SILENT
    if answer.startswith(b"+PONG"):
        return _Answer.READY
    return _Answer.LOADING if answer.startswith(b"-LOADING") else _Answer.SILENT


def _quoted(value: str) -> str:
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
