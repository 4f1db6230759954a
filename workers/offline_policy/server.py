"""Runs the offline policy under uvicorn, as a process of its own.

`rollout offline-policy` calls `run_server`. Must not: listen on another address than the options'
(loopback by default).
"""

from __future__ import annotations

import os
import socket
import sys

import uvicorn

from pipeline.contract.errors import ConfigError
from workers.llm.json_text import dump_json
from workers.offline_policy.completion import POLICY_NAME
from workers.offline_policy.policy import OfflinePolicy, OfflinePolicyOptions

_BACKLOG = 4096


def run_server(options: OfflinePolicyOptions) -> None:
    """Serve until SIGTERM or SIGINT; the first line on stdout is the ready line.

    The ready line is a JSON object: `{"ready": true, "base_url": …, "port": …, "pid": …,
    "stand_in": …}`.

    Raises:
        InputError: The answer key cannot be read.
        ConfigError: The port is not available.
    """
    policy = OfflinePolicy.from_options(options)
    listener = _listen(options)
    config = uvicorn.Config(
        policy,
        loop="uvloop",
        lifespan="off",
        log_level="warning",
        access_log=False,
        server_header=False,
        date_header=False,
        backlog=_BACKLOG,
        timeout_keep_alive=30,
        timeout_graceful_shutdown=2,
    )
    _Server(config, listener).run(sockets=[listener])


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, listener: socket.socket) -> None:
        super().__init__(config)
        self._listener = listener

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        _print_ready(self._listener)


def _listen(options: OfflinePolicyOptions) -> socket.socket:
    if options.fd is not None:
        return socket.socket(fileno=options.fd)
    listener = socket.socket(socket.AF_INET6 if ":" in options.host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((options.host, options.port))
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"The offline policy cannot listen on {options.host}:{options.port}.",
            why=f"{error.strerror}.",
            remedy="Choose another --port, or 0 for any free one.",
        ) from error
    listener.listen(_BACKLOG)
    return listener


def _print_ready(listener: socket.socket) -> None:
    host, port = listener.getsockname()[:2]
    line = {
        "ready": True,
        "base_url": f"http://[{host}]:{port}/v1" if ":" in host else f"http://{host}:{port}/v1",
        "port": port,
        "pid": os.getpid(),
        "stand_in": POLICY_NAME,
    }
    sys.stdout.write(dump_json(line).decode() + "\n")
    sys.stdout.flush()
