"""Servers for fault injection: a private PostgreSQL, a private Redis, a RabbitMQ node, SQS.

The deployment starts them in its own folder. Other servers of this machine are never used. Must
not: know the pipeline.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import Literal, Protocol

from kombu import Connection

from benchmarks.faults.processes import signal_server
from benchmarks.faults.sqs_server import SqsServer
from pipeline.embedded import EmbeddedServices

_START_TIMEOUT_S = 90.0
_RABBITMQ_SCRIPTS = Path("/usr/lib/rabbitmq/bin")

#: A resource of which RabbitMQ can be short.
Resource = Literal["memory", "disk"]
_SHORTAGES = {
    "memory": ("set_vm_memory_high_watermark", "absolute", "1"),
    "disk": ("set_disk_free_limit", "1000000GB"),
}
_NORMAL = {
    "memory": ("set_vm_memory_high_watermark", "0.6"),
    "disk": ("set_disk_free_limit", "1MB"),
}


class BrokerMissing(Exception):
    """The broker is not installed on this machine."""


class BrokerServer(Protocol):
    """A private broker for fault injection."""

    name: str
    url: str
    endpoint: str  #: of SQS and S3; empty for other brokers

    def start(self) -> None:
        """Start the broker, and wait until it serves."""
        ...

    def kill(self) -> None:
        """Kill the broker by SIGKILL."""
        ...

    def forget(self) -> None:
        """Delete all queues and messages of a broker that is down."""
        ...

    def lose_messages(self) -> None:
        """Delete all messages of the running broker."""
        ...

    def pause(self) -> None:
        """Stop the process, so that the broker does not answer."""
        ...

    def resume(self) -> None:
        """Continue the stopped process."""
        ...

    def close(self) -> None:
        """End the server and delete its files."""
        ...


class Store:
    """A private PostgreSQL; durable, because commits must survive a crash."""

    def __init__(self, folder: Path, *, durable: bool) -> None:
        self._services = EmbeddedServices(folder, durable=durable)
        self.url = ""

    def start(self) -> None:
        """Start the server, and wait until it serves and has recovered."""
        self.url = self._services.start_postgres()

    def stop_immediately(self) -> None:
        """Stop the server like `pg_ctl stop -m immediate`, without a checkpoint."""
        signal_server(lambda: _pid_of(self._services, "postgres"), signal.SIGQUIT)

    def close(self) -> None:
        """End the server and delete its files."""
        self._services.remove()


class RedisServer:
    """A private Redis without persistence: it is empty after a restart."""

    name = "redis"
    endpoint = ""

    def __init__(self, folder: Path) -> None:
        self._services = EmbeddedServices(folder, durable=False)
        self.url = ""

    def start(self) -> None:
        """Start the broker, and wait until it serves."""
        self.url = self._services.start_redis()

    def kill(self) -> None:
        """Kill the broker by SIGKILL."""
        self._signal(signal.SIGKILL)

    def forget(self) -> None:
        """Do nothing, because this Redis has no persistence."""

    def lose_messages(self) -> None:
        """Delete all messages by FLUSHALL."""
        import redis

        client = redis.Redis.from_url(self._services.redis_client_url)
        client.flushall()
        client.close()

    def pause(self) -> None:
        """Stop the process, so that the broker does not answer."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Continue the stopped process."""
        self._signal(signal.SIGCONT)

    def close(self) -> None:
        """End the server and delete its files."""
        self.resume()
        self._services.remove()

    def _signal(self, number: signal.Signals) -> None:
        signal_server(lambda: _pid_of(self._services, "redis"), number)


class RabbitServer:
    """A private RabbitMQ node, independent of another node on this machine.

    Raises:
        BrokerMissing: RabbitMQ is not installed.
    """

    name = "rabbitmq"
    endpoint = ""

    def __init__(self, folder: Path) -> None:
        program = _RABBITMQ_SCRIPTS / "rabbitmq-server"
        found = str(program) if program.exists() else shutil.which("rabbitmq-server")
        if found is None:
            raise BrokerMissing("RabbitMQ is not installed: there is no rabbitmq-server")
        self._program = found
        self._folder = folder
        self._port = _free_port()
        self._environment = self._make_environment(_free_port())
        self._popen: subprocess.Popen[bytes] | None = None
        self.url = f"amqp://guest:guest@127.0.0.1:{self._port}//"

    def start(self) -> None:
        """Start the broker, and wait until it serves."""
        with (self._folder / "node.log").open("ab") as log:
            self._popen = subprocess.Popen(
                [self._program],
                env=self._environment,
                cwd=self._folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        deadline = time.monotonic() + _START_TIMEOUT_S
        while not self._serves():
            if self._popen.poll() is not None or time.monotonic() > deadline:
                tail = (self._folder / "node.log").read_text()[-2000:]
                raise RuntimeError(f"the RabbitMQ node did not start:\n{tail}")
            time.sleep(0.2)

    @property
    def pid(self) -> int:
        """The pid of the running node."""
        assert self._popen is not None
        return self._popen.pid

    def kill(self) -> None:
        """Kill the node and its helpers by SIGKILL; the whole session is ours."""
        if self._popen is not None and self._popen.poll() is None:
            os.killpg(self._popen.pid, signal.SIGKILL)
            self._popen.wait(timeout=20)

    def forget(self) -> None:
        """Delete the dead node's files."""
        shutil.rmtree(self._folder / "mnesia", ignore_errors=True)

    def lose_messages(self) -> None:
        """Purge every queue of the pipeline."""
        with Connection(self.url) as connection:
            for name in ("rollouts", "rollout.completions", "rollout.heartbeats"):
                try:
                    connection.default_channel.queue_purge(name)
                except connection.channel_errors:
                    connection.close()  # a queue that was never declared closes the channel

    def pause(self) -> None:
        """Stop the process, so that the broker does not answer."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Continue the stopped process."""
        self._signal(signal.SIGCONT)

    def raise_alarm(self, resource: Resource) -> None:
        """Make the node short of a resource, so that it blocks publishers only."""
        self._control(*_SHORTAGES[resource])

    def end_alarm(self, resource: Resource) -> None:
        """End the shortage of a resource."""
        self._control(*_NORMAL[resource])

    def close(self) -> None:
        """End the node; the deployment deletes its folder."""
        self.kill()

    def _control(self, *arguments: str) -> None:
        program = Path(self._program).with_name("rabbitmqctl")
        node = self._environment["RABBITMQ_NODENAME"]
        subprocess.run(
            [str(program), "-q", "-n", node, *arguments],
            env=self._environment,
            cwd=self._folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=30,
            check=True,
        )

    def _signal(self, number: signal.Signals) -> None:
        if self._popen is not None:
            self._popen.send_signal(number)

    def _serves(self) -> bool:
        try:
            connection = Connection(self.url, connect_timeout=1)  # pyright: ignore[reportArgumentType]
            with connection:
                connection.connect()
            return True
        except Exception:
            # Any error of a starting node means that it is not ready yet.
            return False

    def _make_environment(self, dist_port: int) -> dict[str, str]:
        for name in ("mnesia", "logs", "home"):
            (self._folder / name).mkdir(parents=True, exist_ok=True)
        (self._folder / "enabled_plugins").write_text("[].\n")
        (self._folder / "rabbitmq.conf").write_text("loopback_users = none\n")
        return {
            "PATH": os.defpath,
            "HOME": str(self._folder / "home"),
            "RABBITMQ_NODENAME": f"faults{self._port}@localhost",
            "RABBITMQ_NODE_PORT": str(self._port),
            "RABBITMQ_NODE_IP_ADDRESS": "127.0.0.1",
            "RABBITMQ_DIST_PORT": str(dist_port),
            "RABBITMQ_MNESIA_BASE": str(self._folder / "mnesia"),
            "RABBITMQ_LOG_BASE": str(self._folder / "logs"),
            "RABBITMQ_PID_FILE": str(self._folder / "pid"),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(self._folder / "enabled_plugins"),
            "RABBITMQ_CONFIG_FILE": str(self._folder / "rabbitmq"),
            # With this variable the script replaces itself by the node (exec).
            "RUNNING_UNDER_SYSTEMD": "true",
            # Busy-waiting schedulers would take CPU from the tested processes.
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "+sbwt none +sbwtdcpu none +sbwtdio none",
        }


def make_broker(name: str, folder: Path) -> BrokerServer:
    """Return a broker of this kind in a folder, not started.

    Raises:
        BrokerMissing: This machine cannot start it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if name == "redis":
        return RedisServer(folder)
    if name == "rabbitmq":
        return RabbitServer(folder)
    if name == "sqs":
        return SqsServer(folder)
    raise ValueError(f"no broker {name!r}: redis, rabbitmq or sqs")


def _pid_of(services: EmbeddedServices, name: str) -> int | None:
    return next(status.pid for status in services.status() if status.name == name)


def _free_port() -> int:
    # Not an ephemeral port, because a connection could take it between two starts.
    for port in random.sample(range(20_000, 32_000), 100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise RuntimeError("no free port between 20000 and 32000")
