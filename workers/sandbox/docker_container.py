"""A docker container as a sandbox, through the official client `docker`.

Opened by `kinds` when asked for by name. Each sandbox is a container without network, privileges or
secrets; commands are executed in it, and it is removed on close. Must not need the package `docker`
while it is imported.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Mapping
from typing import Any

from workers.sandbox.base import SandboxFailure, SandboxLimits
from workers.sandbox.container import (
    DEFAULT_IMAGE,
    DEFAULT_LIFETIME_S,
    OWNER_LABEL,
    ContainerSandbox,
    Execution,
    in_thread,
    is_leftover,
    owner_labels,
)

_API_TIMEOUT_S = 60
_CHUNK = 64 * 1024
#: Text of docker's refusal of a quota: overlay2 has quotas only on XFS mounted with `pquota`.
_NO_QUOTA = "storage-opt"


class DockerSandbox(ContainerSandbox):
    """Runs commands in a container; made by `start`."""

    def __init__(self, client: Any, container_id: str, root: str, limits: SandboxLimits) -> None:
        super().__init__(root, limits)
        self._client = client
        self._container_id = container_id

    @classmethod
    async def start(
        cls,
        *,
        root: str,
        limits: SandboxLimits,
        image: str = DEFAULT_IMAGE,
        base_url: str | None = None,
        network: bool = False,
        user: str | None = None,
        cpus: float = 1.0,
        lifetime_s: float = DEFAULT_LIFETIME_S,
        labels: Mapping[str, str] | None = None,
    ) -> DockerSandbox:
        """Start a container, after removing leftovers of killed processes.

        Args:
            root: Working directory in the container; made if it is not there.
            limits: Limits of commands; memory and processes bound the container, and the disk
                does where docker's storage driver can.
            image: Image to start; it must have a shell and `sleep`.
            base_url: Address of docker; None reads DOCKER_HOST and related variables.
            network: Whether the container gets the default network.
            user: User to run as; None is the image's own.
            cpus: CPUs the container may use.
            lifetime_s: Seconds after which the container ends by itself.
            labels: Further labels.

        Raises:
            SandboxFailure: The container would not start.
        """
        container = {
            "image": image,
            "command": ["sleep", str(int(lifetime_s))],
            "working_dir": root,
            "labels": {**(labels or {}), **owner_labels(lifetime_s)},
            "user": user,
        }
        host_config = _host_config(limits, network, cpus)
        try:
            return await in_thread(cls._start, base_url, root, limits, container, host_config)
        except SandboxFailure:
            raise
        except Exception as error:  # the client raises its own, requests' and urllib3's errors
            raise SandboxFailure(
                f"The sandbox would not start: docker said {error}. Is docker running, and is the "
                f"image {image} there?"
            ) from error

    @classmethod
    def _start(
        cls,
        base_url: str | None,
        root: str,
        limits: SandboxLimits,
        container: dict[str, Any],
        host_config: dict[str, Any],
    ) -> DockerSandbox:
        client = _connect(base_url)
        try:
            _remove_leftovers(client)
            created = _create(client, container, host_config, limits.disk_bytes)
            sandbox = cls(client, created["Id"], root, limits)
            try:
                client.start(created["Id"])
            except BaseException:
                sandbox._remove()
                raise
        except BaseException:
            client.close()
            raise
        return sandbox

    def _execute(self, execution: Execution) -> int:
        try:
            return self._execute_and_read(execution)
        except Exception as error:  # the client raises its own, requests' and urllib3's errors
            raise SandboxFailure(f"The sandbox died: docker said {error}") from error

    def _execute_and_read(self, execution: Execution) -> int:
        has_input = execution.stdin is not None
        made = self._client.exec_create(self._container_id, list(execution.argv), stdin=has_input)
        stream = self._client.exec_start(made["Id"], socket=True)
        connection: socket.socket = getattr(stream, "_sock", stream)
        connection.settimeout(None)  # a command may be silent for longer than any API call
        execution.interrupt = lambda: _shut_down(connection)
        feeder = threading.Thread(target=_feed, args=(connection, execution.stdin), daemon=True)
        feeder.start()
        try:
            if not execution.is_stopped.is_set():
                # The client's own reader, for it may hold the first bytes already.
                _read_frames(stream._response.raw._fp.fp, execution)
        finally:
            _shut_down(connection)
            feeder.join()
            stream._response.close()
        if execution.is_stopped.is_set() or execution.is_flooded:
            return 137
        code = self._client.exec_inspect(made["Id"])["ExitCode"]
        if code is None:
            raise SandboxFailure("The sandbox died under the command.")
        return int(code)

    def _remove(self) -> None:
        import docker.errors

        try:
            self._client.remove_container(self._container_id, force=True, v=True)
        except docker.errors.NotFound:
            pass
        except Exception as error:  # the client raises its own, requests' and urllib3's errors
            raise SandboxFailure(
                f"The container {self._container_id[:12]} could not be removed: {error}."
            ) from error
        finally:
            self._client.close()


def _connect(base_url: str | None) -> Any:
    try:
        import docker
    except ImportError as error:
        raise SandboxFailure(
            "The sandbox would not start: the docker client is not installed. "
            "Install rollout-pipeline[docker]."
        ) from error
    if base_url is not None:
        return docker.APIClient(base_url=base_url, timeout=_API_TIMEOUT_S, version="auto")
    return docker.from_env(timeout=_API_TIMEOUT_S, version="auto").api


def _create(
    client: Any, container: dict[str, Any], host_config: dict[str, Any], disk_bytes: int
) -> Any:
    """Create a container, with a disk quota where docker's storage can hold one."""
    from docker.errors import APIError

    # For other drivers the size includes the image, which may be larger than the quota.
    if client.info().get("Driver") == "overlay2":
        with_quota = {**host_config, "storage_opt": {"size": str(disk_bytes)}}
        try:
            return client.create_container(
                **container, host_config=client.create_host_config(**with_quota)
            )
        except APIError as error:
            if _NO_QUOTA not in str(error):
                raise
    return client.create_container(
        **container, host_config=client.create_host_config(**host_config)
    )


def _remove_leftovers(client: Any) -> None:
    for found in client.containers(all=True, filters={"label": OWNER_LABEL}):
        if is_leftover(found.get("Labels") or {}):
            # Another process may have removed it already.
            with contextlib.suppress(Exception):
                client.remove_container(found["Id"], force=True, v=True)


def _host_config(limits: SandboxLimits, network: bool, cpus: float) -> dict[str, Any]:
    return {
        "init": True,
        "network_mode": "default" if network else "none",
        "mem_limit": limits.memory_bytes,
        "memswap_limit": limits.memory_bytes,
        "pids_limit": limits.processes,
        "nano_cpus": int(cpus * 1e9),
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges"],
        "ipc_mode": "private",
    }


def _feed(connection: socket.socket, data: bytes | None) -> None:
    if data is None:
        return
    # A command need not read its input; the reader sees the end either way.
    with contextlib.suppress(OSError):
        connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)


def _shut_down(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def _read_frames(reader: Any, execution: Execution) -> None:
    """Read docker's stream: frames of a header (stream, length) and that many bytes."""
    captures = {1: execution.stdout, 2: execution.stderr}
    while not execution.is_flooded and len(header := reader.read(8)) == 8:
        number, left = struct.unpack(">BxxxL", header)
        while left and (data := reader.read1(min(left, _CHUNK))):
            left -= len(data)
            if number in captures:
                captures[number].add(data)
