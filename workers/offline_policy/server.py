"""Runs the offline policy under uvicorn: as a process of its own, or inside a running loop.

`rollout offline-policy` calls `run_server`; tests and the demo may use `serving`. Must not:
listen anywhere but where the options say (loopback by default).
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import uvicorn

from pipeline.contract.errors import ConfigError
from workers.llm.json_text import dump_json
from workers.offline_policy.completion import POLICY_NAME
from workers.offline_policy.policy import OfflinePolicy, OfflinePolicyOptions

_BACKLOG = 4096


def run_server(options: OfflinePolicyOptions) -> None:
    """Serve until SIGTERM or SIGINT; the first line on stdout is the ready line.

    It is one JSON object: `{"ready": true, "base_url": …, "port": …, "pid": …, "stand_in": …}`.

    Raises:
        InputError: The answer key cannot be read.
        ConfigError: The port cannot be had.
    """
    policy = OfflinePolicy.from_options(options)
    listener = _listen(options)
    server = _Server(_config(policy, loop="uvloop"), on_ready=lambda: _print_ready(listener))
    server.run(sockets=[listener])


@asynccontextmanager
async def serving(
    options: OfflinePolicyOptions | None = None,
) -> AsyncIterator[tuple[str, OfflinePolicy]]:
    """Serve inside the running loop; yields the base URL (with `/v1`) and the application."""
    options = options or OfflinePolicyOptions()
    policy = OfflinePolicy.from_options(options)
    listener = _listen(options)
    ready = asyncio.Event()
    server = _Server(_config(policy, loop="none"), on_ready=ready.set)
    task = asyncio.create_task(server.serve_quietly(listener))
    waiting = asyncio.create_task(ready.wait())
    try:
        await asyncio.wait({task, waiting}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
        yield _base_url(listener), policy
    finally:
        waiting.cancel()
        server.should_exit = True
        server.force_exit = True
        await task
        listener.close()


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, *, on_ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_ready = on_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_ready()

    async def serve_quietly(self, listener: socket.socket) -> None:
        # Not `serve`: that would take over the signal handlers of the process it is a guest in.
        await self._serve(sockets=[listener])


def _config(policy: OfflinePolicy, *, loop: str) -> uvicorn.Config:
    return uvicorn.Config(
        policy,
        loop=loop,
        lifespan="off",
        log_level="warning",
        access_log=False,
        server_header=False,
        date_header=False,
        backlog=_BACKLOG,
        timeout_keep_alive=30,
        timeout_graceful_shutdown=2,
    )


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


def _base_url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}/v1" if ":" in host else f"http://{host}:{port}/v1"


def _print_ready(listener: socket.socket) -> None:
    line = {
        "ready": True,
        "base_url": _base_url(listener),
        "port": listener.getsockname()[1],
        "pid": os.getpid(),
        "stand_in": POLICY_NAME,
    }
    sys.stdout.write(dump_json(line).decode() + "\n")
    sys.stdout.flush()
