"""The private Redis server: write its configuration, start it, check it, stop it.

`EmbeddedServices` calls it under its lock; `redis_programs` chooses Redis or Valkey. The server is
the broker. Every write goes to an append-only file, which is synced once a second. This costs
little and keeps queued messages over `rollout down` and over a killed server. A damaged file that
cannot be loaded is renamed, because the messages are published again from PostgreSQL.
"""

from __future__ import annotations

import contextlib
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

#: Seconds a live server may refuse connections before its socket counts as lost.
SOCKET_LOST_S = 3.0
STOP_SIGNALS = ((signal.SIGTERM, 15.0), (signal.SIGKILL, 10.0))
DAMAGED = ("Bad file format", "Unexpected end of file reading the append only file")


class _Ping(Enum):
    READY = "ready"
    NOT_READY = "not ready"  #: it loads its data, or does not answer
    REFUSED = "refused"


class RedisServer(Server):
    """One private Redis and its files."""

    name = "redis"
    title = "Redis"
    socket_name = "redis.sock"
    stop_signals = STOP_SIGNALS

    @property
    def _config(self) -> Path:
        return self.paths.home / "redis.conf"

    @property
    def _identity(self) -> Identity:
        return Identity(NAMES, self.paths.home, (str(self._config), str(self._socket)))

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

        def start() -> bool:
            pid = spawn_detached(argv, log=self.log, life_lock=life_lock)
            return self._wait_ready(pid, deadline)

        if start():
            return
        if any(text in log_tail(self.log, since=since) for text in DAMAGED):
            self._rename_damaged_files()
            if start():
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
        while (answer := _ping(self._socket)) is not _Ping.READY or self.running_pid() is None:
            now = time.monotonic()
            if now > deadline or not process_exists(pid):
                return False
            if answer is _Ping.REFUSED and now > lost_at:
                return False
            time.sleep(POLL_S)
        return True

    def _has_lost_socket(self) -> bool:
        return _ping(self._socket) is _Ping.REFUSED

    def _rename_damaged_files(self) -> None:
        stamp = time.strftime("%Y%m%dT%H%M%S", time.gmtime())
        for found in list(self.paths.home.glob("appendonly*")):
            found.rename(self.paths.home / f"damaged-{stamp}-{found.name}")


def _ping(path: Path) -> _Ping:
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(1.0)
        try:
            client.connect(str(path))
        except (FileNotFoundError, ConnectionRefusedError):
            return _Ping.REFUSED
        except OSError:
            return _Ping.NOT_READY
        with contextlib.suppress(OSError):
            client.sendall(b"PING\r\n")
            if client.recv(64).startswith(b"+PONG"):
                return _Ping.READY
    return _Ping.NOT_READY


def _quoted(value: str) -> str:
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
