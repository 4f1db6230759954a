"""The gateway's HTTP server: reads requests, passes calls to their attempts, writes the answers.

Started by a worker on loopback (`workers/process/worker_gateway.py`), or as a process of its own
(`standalone_gateway.py`). A call is recorded before its answer is complete. Must not: know a
model's server, or keep a key.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from contextvars import Context
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

from aiohttp import web

from workers.core.endpoint import LABEL_MARK, MAIN_AGENT
from workers.core.model_response import ModelResponse
from workers.gateway.call_request import CallRequest, Dialect
from workers.gateway.chat import CHAT
from workers.gateway.completions import COMPLETIONS
from workers.gateway.live_call import AttemptCalls, LiveCall, RequestMarks
from workers.gateway.message_stream import MESSAGES
from workers.gateway.rejections import Rejection, attempt_over, bad_request, rejection_of
from workers.gateway.response_stream import RESPONSES
from workers.llm.json_text import JsonError, dump_json, parse_json

log = logging.getLogger(__name__)

DIALECTS: Mapping[str, Dialect] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": COMPLETIONS,
    "/v1/messages": MESSAGES,
    "/v1/responses": RESPONSES,
}
AGENT_HEADER = "x-rollout-agent"
_LABEL_CHARS = 64
_STREAM_HEADERS = {"content-type": "text/event-stream", "cache-control": "no-cache"}

#: A model call that has not begun.
Call = Coroutine[Any, Any, ModelResponse]


@dataclass(slots=True)
class ServedAttempt:
    """An attempt whose model calls the gateway answers.

    Args:
        label: The attempt's name, for errors.
        model: The only model that its calls may name.
        generate: Makes and records a call: `(messages, agent=, on_delta=, **options)`.
        context: Context variables of its agent, such as the wall clock.
        recorded: Awaits a call and returns its answer once the record is confirmed; None: the
            record of `generate` is enough.
    """

    label: str
    model: str
    generate: Callable[..., Call]
    context: Context
    recorded: Callable[[Call, RequestMarks], Call] | None = None
    calls: AttemptCalls = field(default_factory=AttemptCalls)
    is_over: bool = False

    def close(self) -> None:
        """Reject further calls and cancel those under way."""
        self.is_over = True
        self.calls.cancel()


#: Returns the attempt of a key; raises `Rejection` for a key that is wrong or no longer valid.
FindAttempt = Callable[[str], ServedAttempt]


def make_gateway_app(find_attempt: FindAttempt, *, max_body_bytes: int) -> web.Application:
    """Return the application that answers for all attempts that `find_attempt` knows."""
    app = web.Application(client_max_size=max_body_bytes)
    server = _Server(find_attempt, max_body_bytes)
    for path, dialect in DIALECTS.items():
        app.router.add_post(path, server.handler(path, dialect))
    app.router.add_get("/v1/models", server.models)
    app.router.add_get("/v1/models/{model:.+}", server.models)
    app.router.add_get("/healthz", _healthy)
    app.router.add_route("*", "/{path:.*}", _unknown_path)
    return app


class _Server:
    def __init__(self, find_attempt: FindAttempt, max_body_bytes: int) -> None:
        self._find_attempt = find_attempt
        self._max_body_bytes = max_body_bytes

    def handler(
        self, path: str, dialect: Dialect
    ) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        async def handle(request: web.Request) -> web.StreamResponse:
            try:
                return await self._answer(request, path, dialect)
            except Rejection as rejection:
                return _rejected(dialect, rejection)

        return handle

    async def models(self, request: web.Request) -> web.StreamResponse:
        """List the attempt's model, or return it by name."""
        try:
            attempt, _ = self._authorised(request)
            model = {"id": attempt.model, "object": "model", "created": 0, "owned_by": "rollout"}
            named = request.match_info.get("model")
            if named is not None:
                _require_model(named, attempt)
                return _json(model)
            return _json({"object": "list", "data": [model], "has_more": False})
        except Rejection as rejection:
            return _rejected(CHAT, rejection)

    async def _answer(
        self, request: web.Request, path: str, dialect: Dialect
    ) -> web.StreamResponse:
        attempt, agent = self._authorised(request)
        raw = await self._body(request)
        asked = dialect.read(_parsed(raw))
        _require_model(asked.model, attempt)
        call = _call_of(request, attempt, agent, asked, blake2b(path.encode() + raw).digest())
        call.is_read = lambda: request.transport is not None and not request.transport.is_closing()
        if asked.is_stream:
            return await _stream(request, attempt, call, asked, dialect)
        answer = _json(dialect.write(await _result(call, attempt), asked))
        with _reading(call, attempt):
            await answer.prepare(request)
            await answer.write_eof()
        return answer

    def _authorised(self, request: web.Request) -> tuple[ServedAttempt, str]:
        header = request.headers.get("authorization", "")
        key = request.headers.get("x-api-key") or header.removeprefix("Bearer ").strip()
        key, _, label = key.partition(LABEL_MARK)
        attempt = self._find_attempt(key)
        if attempt.is_over:
            raise attempt_over(attempt.label)
        label = request.headers.get(AGENT_HEADER) or label
        return attempt, label[:_LABEL_CHARS] or MAIN_AGENT

    async def _body(self, request: web.Request) -> bytes:
        if (request.content_length or 0) <= self._max_body_bytes:
            try:
                return await request.read()
            except web.HTTPRequestEntityTooLarge:
                pass
        raise Rejection(
            413,
            f"The request is larger than {self._max_body_bytes} bytes; the gateway's setting "
            "gateway.max_body_bytes allows more.",
            code="request_too_large",
        )


def _call_of(
    request: web.Request, attempt: ServedAttempt, agent: str, asked: CallRequest, digest: bytes
) -> LiveCall:
    """Return the earlier call that the request repeats, or begin a new one."""
    key = request.headers.get("idempotency-key")
    is_repeat = request.headers.get("x-stainless-retry-count", "0") not in ("", "0")
    call = attempt.calls.earlier(digest, key=key, is_repeat=is_repeat)
    if call is not None:
        if call.digest != digest:
            raise bad_request("The idempotency key belongs to another request.")
        return call
    call = LiveCall(digest)
    on_delta = call.on_delta if asked.is_stream else None
    work = attempt.generate(asked.messages, agent=agent, on_delta=on_delta, **asked.options)
    if attempt.recorded is not None:
        marks = attempt.calls.marks(digest, key=key, is_repeat=is_repeat)
        work = attempt.recorded(work, marks)
    call.start(work, attempt.context.copy())
    attempt.calls.add(call, key=key)
    return call


async def _stream(
    request: web.Request,
    attempt: ServedAttempt,
    call: LiveCall,
    asked: CallRequest,
    dialect: Dialect,
) -> web.StreamResponse:
    """Write the pieces of a call as they come; the last event follows the record.

    A client that disconnects ends the writing and not the call, see `LiveCall`.
    """
    stream = dialect.stream(asked)
    answer = web.StreamResponse(headers=_STREAM_HEADERS)
    with _reading(call, attempt):
        try:
            async for delta in call.deltas():
                events = stream.delta(delta)
                if not answer.prepared:
                    await answer.prepare(request)
                await answer.write(events)
            events = stream.end(await _result(call, attempt))
        except Rejection as rejection:
            if not answer.prepared:
                raise
            events = stream.error(rejection)
        if not answer.prepared:
            await answer.prepare(request)
        await answer.write(events)
        await answer.write_eof()
    return answer


@contextmanager
def _reading(call: LiveCall, attempt: ServedAttempt) -> Iterator[None]:
    """Note whether a client has read the whole answer; a client that disconnects is no error."""
    try:
        yield
        call.was_delivered = True
    except ConnectionError:
        log.debug("A client of %s disconnected before the end of its answer.", attempt.label)
    finally:
        call.is_read = lambda: False


async def _result(call: LiveCall, attempt: ServedAttempt) -> ModelResponse:
    try:
        response = await call.result()
    # Broad on purpose: every error of the call becomes an answer that names the error.
    except Exception as error:
        raise rejection_of(error) from error
    if response is None:
        raise attempt_over(attempt.label)
    return response


def _require_model(name: str, attempt: ServedAttempt) -> None:
    if name != attempt.model:
        raise Rejection(
            404,
            f"There is no model named {name[:200]!r} here; this attempt calls {attempt.model!r}.",
            code="model_not_found",
        )


def _parsed(raw: bytes) -> Mapping[str, Any]:
    try:
        body = parse_json(raw)
    except JsonError as error:
        raise bad_request(f"The request is not JSON: {error}.") from None
    if not isinstance(body, Mapping):
        raise bad_request("The request must be a JSON object.")
    return body


async def _healthy(_: web.Request) -> web.StreamResponse:
    return _json({"status": "ok"})


async def _unknown_path(request: web.Request) -> web.StreamResponse:
    known = ", ".join((*DIALECTS, "/v1/models"))
    text = f"There is no {request.path[:200]} here; known are {known}."
    return _rejected(CHAT, Rejection(404, text))


def _rejected(dialect: Dialect, rejection: Rejection) -> web.Response:
    return _json(dialect.error(rejection), rejection.status, rejection.headers)


def _json(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> web.Response:
    body = dump_json(value)
    return web.Response(body=body, status=status, headers=headers, content_type="application/json")
