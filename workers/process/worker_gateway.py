"""The gateway of one worker process: the attempts that it serves, and its server on loopback.

Held by the runtime, started by the first attempt that needs it. Used on the event loop. Must not:
listen on another address than loopback and its own Unix socket.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from contextvars import copy_context
from typing import Any
from uuid import UUID

from aiohttp import web

from pipeline.queue.gateway_keys import BadKey, GatewayKey, GatewayKeys
from pipeline.settings import Settings
from workers.core.endpoint import Endpoint
from workers.core.model_response import ModelResponse
from workers.gateway.rejections import Rejection, attempt_over
from workers.gateway.server import ServedAttempt, make_gateway_app
from workers.process.unclocked_limiter import bounded_waits
from workers.sandbox.workspace import temporary_place

_HOST = "127.0.0.1"
_BACKLOG = 1024
_STOP_S = 1.0
_SOCKET_NAME = "gateway.sock"


class WorkerGateway:
    """Serves the attempts of this process.

    Args:
        settings: The worker's settings: the signing key, and the section `gateway`.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings.gateway
        key = settings.broker.signing_key
        # Without a shared key, only this process accepts its keys.
        secret = key.get_secret_value().encode() if key else secrets.token_bytes(32)
        self._keys = GatewayKeys(secret)
        self._attempts: dict[tuple[UUID, int], ServedAttempt] = {}
        self._server: _RunningServer | None = None
        self._starting = asyncio.Lock()

    @asynccontextmanager
    async def serving(
        self,
        key: GatewayKey,
        generate: Callable[..., Coroutine[Any, Any, ModelResponse]],
        *,
        with_socket: bool = False,
    ) -> AsyncIterator[Endpoint]:
        """Answer the calls of an attempt inside the block.

        Args:
            key: The attempt and its model; its expiry is set here.
            generate: Makes and records each call.
            with_socket: Whether the Unix socket is needed.
        """
        server = await self._started()
        expires_at = int(time.time() + self._settings.key_lifetime_s)
        written = self._keys.write(key.model_copy(update={"expires_at": expires_at}))
        # The calls run in the agent's context: their waits for limits pause its wall clock.
        with bounded_waits(self._settings.limit_wait_s):
            served = ServedAttempt(key.label, key.model, generate, copy_context())
        self._attempts[key.key] = served
        socket_path = await server.socket_path() if with_socket else None
        try:
            yield Endpoint(f"{server.url}/v1", written, key.model, socket_path)
        finally:
            served.close()
            if self._attempts.get(key.key) is served:
                del self._attempts[key.key]

    async def close(self) -> None:
        """Stop the server; the next attempt starts it again."""
        server, self._server = self._server, None
        if server is not None:
            await server.close()

    async def _started(self) -> _RunningServer:
        async with self._starting:
            if self._server is None:
                app = make_gateway_app(
                    self._find_attempt, max_body_bytes=self._settings.max_body_bytes
                )
                self._server = await _RunningServer.start(app)
            return self._server

    def _find_attempt(self, text: str) -> ServedAttempt:
        key = read_key(self._keys, text)
        served = self._attempts.get(key.key)
        if served is None:
            raise attempt_over(key.label)
        return served


def read_key(keys: GatewayKeys, text: str) -> GatewayKey:
    """Return the content of the key of a request.

    Raises:
        Rejection: The key is not accepted.
    """
    try:
        return keys.read(text)
    except BadKey as error:
        raise Rejection(401, str(error), code="invalid_api_key") from None


class _RunningServer:
    def __init__(self, runner: web.AppRunner, url: str) -> None:
        self._runner = runner
        self.url = url
        self._folder: str | None = None

    @classmethod
    async def start(cls, app: web.Application) -> _RunningServer:
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=_STOP_S)
        await runner.setup()
        site = web.TCPSite(runner, _HOST, 0, backlog=_BACKLOG)
        await site.start()
        port = runner.addresses[0][1]
        return cls(runner, f"http://{_HOST}:{port}")

    async def socket_path(self) -> str:
        """Listen on a Unix socket in a folder of its own, and return its path."""
        if self._folder is None:
            # Not below /tmp: every sandbox has a new one of its own.
            self._folder = tempfile.mkdtemp(prefix="rollout-gateway-", dir=temporary_place())
            # Execute permission alone: the sandbox's user opens the socket by its name.
            os.chmod(self._folder, 0o711)
            path = os.path.join(self._folder, _SOCKET_NAME)
            await web.UnixSite(self._runner, path, backlog=_BACKLOG).start()
            os.chmod(path, 0o666)
        return os.path.join(self._folder, _SOCKET_NAME)

    async def close(self) -> None:
        await self._runner.cleanup()
        if self._folder is not None:
            with suppress(OSError):
                shutil.rmtree(self._folder)
