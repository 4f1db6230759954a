"""The processes of a local runtime's sessions: started, called over a socket each, stopped.

`local_runtime.py` owns one. The forks are those of `session_server.py`, which has loaded the app
once. Belongs to one event loop. Must not: know quotas.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

#: Time for an app to load, and for a session's process to answer its first ping.
_LOAD_S, _START_S = 120.0, 60.0
_POLL_S = 0.02

log = logging.getLogger(__name__)


class AppError(Exception):
    """An app cannot be loaded or does not serve; the text names the cause."""


@dataclass(slots=True)
class Answer:
    """The answer of a session's process."""

    status: int
    body: bytes
    content_type: str


@dataclass(slots=True)
class _Session:
    http: aiohttp.ClientSession
    is_serving: asyncio.Task[None] | None = None
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    is_stopping: bool = False


class SessionProcesses:
    """One process per session of an app.

    Args:
        app: The app's script.
        environment: Variables of the sessions, besides those of this process.
    """

    def __init__(self, app: Path, environment: Mapping[str, str]) -> None:
        self._app = app
        self._environment = environment
        self._sessions: dict[str, _Session] = {}
        self._folder = tempfile.TemporaryDirectory(prefix="ac-")
        self._started = 0

    async def open(self) -> None:
        """Load the app.

        Raises:
            AppError: The app cannot be loaded.
        """
        try:
            await self._load()
        except BaseException:
            self._folder.cleanup()
            raise
        self._reader = asyncio.create_task(self._read())

    async def _load(self) -> None:
        self._server = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "workers.agentcore.session_server",
            str(self._app),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env={**os.environ, **self._environment},
        )
        assert self._server.stdout is not None
        async with asyncio.timeout(_LOAD_S):
            line = await self._server.stdout.readline()
        report = json.loads(line or b"{}")
        if not report.get("loaded"):
            await self._server.communicate()
            raise AppError(f"{self._app} cannot be loaded: {report.get('error', 'it ended')}")

    async def close(self) -> None:
        """End all sessions at once."""
        for session in self._sessions.values():
            await session.http.close()
        if self._server.stdin is not None:
            self._server.stdin.close()
        await self._server.wait()
        await self._reader
        self._folder.cleanup()

    @property
    def live(self) -> int:
        """The number of sessions whose process has not ended."""
        return len(self._sessions)

    def has(self, session_id: str) -> bool:
        """Whether a session has a process."""
        return session_id in self._sessions

    def start(self, session_id: str) -> None:
        """Start a session's process; `request` waits until it serves."""
        self._started += 1
        socket = f"{self._folder.name}/{self._started}"
        http = aiohttp.ClientSession(
            connector=aiohttp.UnixConnector(socket, limit=0),
            timeout=aiohttp.ClientTimeout(total=None),
        )
        session = self._sessions[session_id] = _Session(http)
        session.is_serving = asyncio.create_task(_wait_until_serving(session))
        self._send({"start": session_id, "socket": socket})

    async def request(
        self, session_id: str, method: str, path: str, *, body: bytes, headers: Mapping[str, str]
    ) -> Answer:
        """Send a request to a session's process.

        Raises:
            AppError: The process does not serve or has ended.
        """
        session = self._sessions.get(session_id)
        if session is None or session.is_serving is None:
            raise AppError("the session has ended")
        await asyncio.shield(session.is_serving)
        try:
            url = "http://session" + path
            async with session.http.request(method, url, data=body, headers=headers) as reply:
                return Answer(reply.status, await reply.read(), reply.content_type)
        except aiohttp.ClientError as error:
            raise AppError(f"the app's process does not answer: {error}") from error

    async def stop(self, session_id: str) -> None:
        """Stop a session's process, and wait for its end."""
        session = self._sessions.get(session_id)
        if session is not None:
            session.is_stopping = True
            self._send({"stop": session_id})
            await session.ended.wait()

    def _send(self, request: Mapping[str, str]) -> None:
        assert self._server.stdin is not None
        self._server.stdin.write(json.dumps(request).encode() + b"\n")

    async def _read(self) -> None:
        assert self._server.stdout is not None
        async for line in self._server.stdout:
            report = json.loads(line)
            session = self._sessions.pop(report["ended"], None)
            if session is None:
                continue
            if report["status"] and not session.is_stopping:
                log.warning("A session's process ended with status %s.", report["status"])
            session.ended.set()
            await session.http.close()


async def _wait_until_serving(session: _Session) -> None:
    try:
        async with asyncio.timeout(_START_S):
            while not session.ended.is_set():
                try:
                    async with session.http.get("http://session/ping"):
                        return
                except (aiohttp.ClientError, OSError):
                    await asyncio.sleep(_POLL_S)
    except TimeoutError:
        raise AppError(f"the app did not serve within {_START_S:g} s") from None
    raise AppError("the app's process ended before it served")
