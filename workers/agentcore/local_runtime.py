"""A stand-in for the data plane of AgentCore Runtime on this machine, with its quotas.

boto3's client `bedrock-agentcore` talks to it through `AWS_ENDPOINT_URL_BEDROCK_AGENTCORE`. It
serves one app, one process per session, under any runtime ARN. `rollout agentcore-local` and tests
run it. Must not: check credentials; it listens on loopback.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
import uuid
from collections import Counter, deque
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from pipeline.contract.result_keys import SESSION_CHARS, SESSION_HEADER
from workers.agentcore.session_processes import AppError, SessionProcesses

#: Time between two checks of the sessions' ends.
_WATCH_S = 1.0
#: Time between two notes of the event loop that it polls its sockets.
_POLL_S = 0.01
#: Ended sessions that are still known: their second stop is no error.
_REMEMBERED = 10_000

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Quotas:
    """The service's limits; the defaults are those of a new AWS account."""

    requests_per_second: float = 25.0
    max_sessions: int = 1000
    idle_s: float = 900.0  #: a session whose app is not busy ends after this time
    lifetime_s: float = 28_800.0


class ServiceError(Exception):
    """An error answer of the service."""

    def __init__(self, status: int, kind: str, message: str) -> None:
        super().__init__(message)
        self.status, self.kind = status, kind


@dataclass(slots=True)
class _SessionTimes:
    started_at: float
    used_at: float


class LocalRuntime:
    """The runtime of one app.

    Args:
        app: The app's script.
        quotas: The service's limits.
        environment: Variables of the sessions, such as `BASE_URL`, besides those of this process.
    """

    def __init__(
        self,
        app: Path,
        *,
        quotas: Quotas | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._quotas = quotas or Quotas()
        self._processes = SessionProcesses(app, environment or {})
        self._times: dict[str, _SessionTimes] = {}
        self._ended: deque[str] = deque(maxlen=_REMEMBERED)
        self._tokens, self._filled_at = self._quotas.requests_per_second, time.monotonic()
        self._throttled_until = 0.0
        self._polled_at: deque[float] = deque([time.monotonic()], maxlen=2)
        self._recent: deque[float] = deque()
        self.counts: Counter[str] = Counter()
        self.most_per_second = self.most_sessions = 0
        self.application = Starlette(
            routes=[
                Route("/runtimes/{arn:path}/invocations", self._invoke, methods=["POST"]),
                Route("/runtimes/{arn:path}/stopruntimesession", self._stop, methods=["POST"]),
                Route("/ping", self._ping, methods=["GET"]),
                Route("/local/figures", self._figures, methods=["GET"]),
                Route("/local/throttle", self._throttle, methods=["POST"]),
            ],
            lifespan=self._lifespan,
            exception_handlers={ServiceError: _answer_error},
        )

    async def _invoke(self, request: Request) -> Response:
        self._count_call("invocations")
        session_id = request.headers.get(SESSION_HEADER) or str(uuid.uuid4())
        _check_session(session_id)
        body = await request.body()
        if not self._processes.has(session_id):
            if self._processes.live >= self._quotas.max_sessions:
                self.counts["over_quota"] += 1
                raise ServiceError(
                    402,
                    "ServiceQuotaExceededException",
                    f"Maximum of {self._quotas.max_sessions} active sessions reached.",
                )
            self._processes.start(session_id)
            self._times[session_id] = _SessionTimes(time.monotonic(), 0.0)
            self.counts["sessions"] += 1
            self.most_sessions = max(self.most_sessions, self._processes.live)
        self._times[session_id].used_at = time.monotonic()
        headers = {
            SESSION_HEADER: session_id,
            "X-Amzn-Bedrock-AgentCore-Runtime-Request-Id": str(uuid.uuid4()),
            "Content-Type": request.headers.get("Content-Type") or "application/json",
        }
        try:
            answer = await self._processes.request(
                session_id, "POST", "/invocations", body=body, headers=headers
            )
        except AppError as error:
            raise ServiceError(424, "RuntimeClientError", f"Runtime error: {error}") from error
        if answer.status >= 400:
            text = answer.body[:2000].decode("utf-8", "replace")
            raise ServiceError(
                424, "RuntimeClientError", f"Received error ({answer.status}) from runtime: {text}"
            )
        return Response(
            answer.body, media_type=answer.content_type, headers={SESSION_HEADER: session_id}
        )

    async def _stop(self, request: Request) -> Response:
        self._count_call("stops")
        session_id = request.headers.get(SESSION_HEADER, "")
        _check_session(session_id)
        if not self._processes.has(session_id):
            if session_id in self._ended:
                return JSONResponse({}, headers={SESSION_HEADER: session_id})
            raise ServiceError(404, "ResourceNotFoundException", f"No session {session_id}.")
        await self._end(session_id)
        return JSONResponse({}, headers={SESSION_HEADER: session_id})

    async def _ping(self, _: Request) -> Response:
        return JSONResponse({"status": "Healthy", "time_of_last_update": int(time.time())})

    async def _figures(self, _: Request) -> Response:
        """Answer the counts: calls, throttled calls, the busiest second, sessions."""
        return JSONResponse(
            {
                **self.counts,
                "live_sessions": self._processes.live,
                "most_sessions": self.most_sessions,
                "most_per_second": self.most_per_second,
            }
        )

    async def _throttle(self, request: Request) -> Response:
        """Throttle all calls for a while: `{"seconds": 60}`."""
        seconds = float(json.loads(await request.body())["seconds"])
        self._throttled_until = time.monotonic() + seconds
        return JSONResponse({"throttled_s": seconds})

    def _count_call(self, kind: str) -> None:
        """Count a call against the quota, which invocations and stops share."""
        now, rate = time.monotonic(), self._quotas.requests_per_second
        self.counts[kind] += 1
        # A call may have waited in its socket since the loop's last poll. A busy loop reads several
        # such calls together, so only calls that surely came within one second count as its calls.
        self._recent.append(self._polled_at[0])
        while self._recent and self._recent[0] <= now - 1.0:
            self._recent.popleft()
        self.most_per_second = max(self.most_per_second, len(self._recent))
        # A bucket of one second's calls, as AWS describes its throttling.
        self._tokens = min(max(rate, 1.0), self._tokens + (now - self._filled_at) * rate)
        self._filled_at = now
        if now < self._throttled_until or self._tokens < 1.0:
            self.counts["throttled"] += 1
            raise ServiceError(429, "ThrottlingException", "Rate exceeded")
        self._tokens -= 1.0

    async def _end(self, session_id: str) -> None:
        await self._processes.stop(session_id)
        self._times.pop(session_id, None)
        self._ended.append(session_id)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(min(_WATCH_S, self._quotas.idle_s / 4))
            now = time.monotonic()
            for session_id, times in list(self._times.items()):
                if not self._processes.has(session_id):
                    del self._times[session_id]
                elif now - times.started_at > self._quotas.lifetime_s:
                    await self._end(session_id)
                elif now - times.used_at > self._quotas.idle_s:
                    if await self._is_busy(session_id):
                        times.used_at = now
                    else:
                        await self._end(session_id)

    async def _note_polls(self) -> None:
        while True:
            await asyncio.sleep(_POLL_S)
            self._polled_at.append(time.monotonic())

    async def _is_busy(self, session_id: str) -> bool:
        try:
            answer = await self._processes.request(session_id, "GET", "/ping", body=b"", headers={})
            return json.loads(answer.body).get("status") == "HealthyBusy"
        except (AppError, ValueError, AttributeError):
            return False

    @asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        await self._processes.open()
        tasks = [asyncio.create_task(work()) for work in (self._watch, self._note_polls)]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._processes.close()


def _check_session(session_id: str) -> None:
    least, most = SESSION_CHARS
    if not least <= len(session_id) <= most:
        raise ServiceError(
            400,
            "ValidationException",
            f"runtimeSessionId must have {least} to {most} characters, not {len(session_id)}.",
        )


async def _answer_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, ServiceError)
    return JSONResponse(
        {"message": str(error)},
        status_code=error.status,
        headers={"x-amzn-ErrorType": error.kind},
    )
