"""A Kubernetes pod as a sandbox, through the official client `kubernetes`.

Opened by `kinds` when asked for by name. Each sandbox is a pod without privileges, service account
or secrets; commands are executed in it over the API's WebSocket, and it is deleted on close. The
cluster's network policies select pods by the label `rollout-sandbox-network`. Must not keep a pod
beyond its deadline.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
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

NETWORK_LABEL = "rollout-sandbox-network"
_CONTAINER = "sandbox"
_POLL_S = 0.5
_STDOUT, _STDERR, _ERROR = 1, 2, 3
_INPUT_CHUNK = 32 * 1024
#: Waiting reasons after which a pod does not become ready soon by itself.
_FATAL_REASONS = frozenset(
    {"ErrImagePull", "ImagePullBackOff", "InvalidImageName", "CreateContainerConfigError",
     "CreateContainerError", "RunContainerError", "CrashLoopBackOff"}
)  # fmt: skip


def load_configuration() -> Any:
    """Return the `kubernetes.client.Configuration` of the user's kubeconfig, or the cluster's own.

    Raises:
        SandboxFailure: There is no configuration, or the client is not installed.
    """
    try:
        from kubernetes import client, config
    except ImportError as error:
        raise SandboxFailure(
            "The sandbox would not start: the Kubernetes client is not installed. "
            "Install rollout-pipeline[k8s]."
        ) from error
    configuration = client.Configuration()
    try:
        config.load_config(client_configuration=configuration)
    except Exception as error:  # any error of the parser, for a broken file
        raise SandboxFailure(
            f"The sandbox would not start: no configuration of a cluster was found ({error})."
        ) from error
    return configuration


class KubernetesSandbox(ContainerSandbox):
    """Runs commands in a pod; made by `start`."""

    def __init__(
        self, configuration: Any, namespace: str, name: str, root: str, limits: SandboxLimits
    ) -> None:
        super().__init__(root, limits)
        self._configuration = configuration
        self._namespace = namespace
        self.pod_name = name

    @classmethod
    async def start(
        cls,
        *,
        root: str,
        limits: SandboxLimits,
        image: str = DEFAULT_IMAGE,
        namespace: str = "default",
        configuration: Any = None,
        network: bool = False,
        cpus: float = 1.0,
        lifetime_s: float = DEFAULT_LIFETIME_S,
        ready_timeout_s: float = 300.0,
        labels: Mapping[str, str] | None = None,
        pod_overrides: Mapping[str, Any] | None = None,
    ) -> KubernetesSandbox:
        """Create a pod and wait until it is ready, after deleting leftovers of killed processes.

        Args:
            root: Working directory in the pod; made if it is not there.
            limits: Limits of commands; memory and disk bound the pod, which the cluster evicts
                when it uses more disk.
            image: Image of the pod; it must have a shell and `sleep`.
            namespace: Namespace of the pod.
            configuration: A `kubernetes.client.Configuration`; None reads the cluster's own or the
                user's kubeconfig.
            network: Value of the label that the cluster's network policies can select.
            cpus: CPUs the pod may use.
            lifetime_s: Seconds after which the cluster ends the pod by itself.
            ready_timeout_s: Seconds to wait for the image and the pod.
            labels: Further labels.
            pod_overrides: Further fields of the pod's spec, such as `nodeSelector`.

        Raises:
            SandboxFailure: The pod was refused or did not become ready; it is deleted again.
        """
        configuration = configuration or await in_thread(load_configuration)
        name = f"rollout-sandbox-{os.urandom(5).hex()}"
        network_label = {NETWORK_LABEL: "allow" if network else "deny"}
        all_labels = {**(labels or {}), **network_label, **owner_labels(lifetime_s)}
        manifest = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": name, "labels": all_labels},
            "spec": _pod_spec(image, root, limits, cpus, lifetime_s) | dict(pod_overrides or {}),
        }
        sandbox = cls(configuration, namespace, name, root, limits)
        try:
            await in_thread(sandbox._create, manifest, ready_timeout_s)
            await sandbox._make_root()
        except BaseException:
            await sandbox.close()
            raise
        return sandbox

    async def _make_root(self) -> None:
        execution, code = await self._execute_in_thread(["mkdir", "-p", self.root], None, 1024)
        if code:
            reason = execution.stderr.text().strip()
            raise SandboxFailure(
                f"The sandbox would not start: no directory {self.root} ({reason})."
            )

    def _create(self, manifest: dict[str, Any], ready_timeout_s: float) -> None:
        try:
            with _api(self._configuration) as api:
                _delete_leftovers(api, self._namespace)
                api.create_namespaced_pod(self._namespace, manifest)
                self._wait_ready(api, time.monotonic() + ready_timeout_s)
        except SandboxFailure:
            raise
        except Exception as error:  # the client raises its own and urllib3's errors
            raise SandboxFailure(
                f"The sandbox would not start: {_message(error)}. Can this process reach the "
                f"cluster and create pods in the namespace {self._namespace}?"
            ) from error

    def _wait_ready(self, api: Any, deadline: float) -> None:
        state = "it was not scheduled"
        while time.monotonic() < deadline:
            status = api.read_namespaced_pod(self.pod_name, self._namespace).status
            if status.phase in ("Failed", "Succeeded"):
                raise SandboxFailure(
                    f"The sandbox would not start: its pod ended ({status.reason})."
                )
            for container in status.container_statuses or ():
                if container.ready:
                    return
                if waiting := container.state and container.state.waiting:
                    state = f"{waiting.reason}: {waiting.message or ''}".strip(": ")
                    if waiting.reason in _FATAL_REASONS:
                        raise SandboxFailure(f"The sandbox would not start: {state}.")
            # The client has no event to wait for that survives a lost connection.
            time.sleep(_POLL_S)
        raise SandboxFailure(f"The sandbox would not start: its pod did not get ready ({state}).")

    def _execute(self, execution: Execution) -> int:
        from kubernetes.stream import stream

        try:
            # A client of its own: `stream` changes the one it is given while it connects.
            with _api(self._configuration) as api:
                connection = stream(
                    api.connect_get_namespaced_pod_exec,
                    self.pod_name,
                    self._namespace,
                    container=_CONTAINER,
                    command=list(execution.argv),
                    stdin=execution.stdin is not None,
                    stdout=True,
                    stderr=True,
                    tty=False,
                    _preload_content=False,
                )
                try:
                    return _exchange_frames(connection.sock, execution)
                finally:
                    connection.close()
        except SandboxFailure:
            raise
        except Exception as error:  # the client raises its own and the WebSocket's errors
            raise SandboxFailure(f"The sandbox died: {_message(error)}") from error

    def _remove(self) -> None:
        try:
            with _api(self._configuration) as api:
                api.delete_namespaced_pod(self.pod_name, self._namespace, grace_period_seconds=0)
        except Exception as error:  # the client raises its own and urllib3's errors
            if getattr(error, "status", None) != 404:
                raise SandboxFailure(
                    f"The pod {self.pod_name} could not be deleted: {_message(error)}."
                ) from error


@contextlib.contextmanager
def _api(configuration: Any) -> Any:
    from kubernetes import client

    with client.ApiClient(configuration) as api_client:
        yield client.CoreV1Api(api_client)


def _delete_leftovers(api: Any, namespace: str) -> None:
    from kubernetes.client.exceptions import ApiException

    for pod in api.list_namespaced_pod(namespace, label_selector=OWNER_LABEL).items:
        if is_leftover(pod.metadata.labels or {}):
            # Another process may have deleted it already.
            with contextlib.suppress(ApiException):
                api.delete_namespaced_pod(pod.metadata.name, namespace, grace_period_seconds=0)


def _pod_spec(
    image: str, root: str, limits: SandboxLimits, cpus: float, lifetime_s: float
) -> dict[str, Any]:
    bounds = {
        "cpu": f"{round(cpus * 1000)}m",
        "memory": str(limits.memory_bytes),
        "ephemeral-storage": str(limits.disk_bytes),
    }
    return {
        "restartPolicy": "Never",
        "activeDeadlineSeconds": int(lifetime_s),
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": 0,
        "containers": [
            {
                "name": _CONTAINER,
                "image": image,
                "command": ["sleep", str(int(lifetime_s))],
                "workingDir": root,
                "resources": {"limits": bounds, "requests": {"cpu": "100m", "memory": "128Mi"}},
                "securityContext": {
                    "allowPrivilegeEscalation": False,
                    "capabilities": {"drop": ["ALL"]},
                    "seccompProfile": {"type": "RuntimeDefault"},
                },
            }
        ],
    }


def _exchange_frames(connection: Any, execution: Execution) -> int:
    """Exchange frames, each a channel's number and bytes, until the status arrives."""
    from websocket import ABNF, WebSocketTimeoutException

    for at in range(0, len(execution.stdin or b""), _INPUT_CHUNK):
        chunk = (execution.stdin or b"")[at : at + _INPUT_CHUNK]
        connection.send(b"\0" + chunk, opcode=ABNF.OPCODE_BINARY)
    connection.settimeout(_POLL_S)
    captures = {_STDOUT: execution.stdout, _STDERR: execution.stderr}
    while not execution.is_flooded:
        try:
            opcode, frame = connection.recv_data_frame(True)
        except WebSocketTimeoutException:
            if execution.is_stopped.is_set():
                return 137
            continue
        if opcode == ABNF.OPCODE_CLOSE:
            raise SandboxFailure("The sandbox died under the command.")
        if opcode not in (ABNF.OPCODE_BINARY, ABNF.OPCODE_TEXT) or not frame.data:
            continue
        channel, data = frame.data[0], frame.data[1:]
        if channel == _ERROR:
            return _exit_code(data)
        if capture := captures.get(channel):
            capture.add(data)
    return 137


def _exit_code(data: bytes) -> int:
    """Read the status that ends a command."""
    status = json.loads(data)
    if status.get("status") == "Success":
        return 0
    for cause in (status.get("details") or {}).get("causes") or ():
        if cause.get("reason") == "ExitCode":
            return int(cause["message"])
    raise SandboxFailure(f"The sandbox could not run the command: {status.get('message')}")


def _message(error: Exception) -> str:
    """Return an API error's message, without its headers."""
    reason = getattr(error, "reason", None)
    with contextlib.suppress(TypeError, ValueError, AttributeError):
        return str(json.loads(getattr(error, "body", ""))["message"])
    return str(reason or error)
