"""The state behind all connections of the mock LLM server, and one call through it.

Used by the server's protocol only: it asks what a request's answer is and when it is due. Must not:
touch a socket or read a clock.
"""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import parse_qs, urlsplit

from benchmarks.mock_answers import (
    AnswerBook,
    count_turns,
    draw_key,
    error_response,
    http_response,
)
from benchmarks.mock_behaviour import MockBehaviour
from benchmarks.mock_ledger import CallLedger

_MODELS = {"object": "list", "data": [{"id": "mock", "object": "model", "owned_by": "mock"}]}


class Call:
    """One model call between its request and its response."""

    __slots__ = ("due_at", "identity", "ledger", "response", "status", "turn")

    def __init__(
        self,
        ledger: CallLedger,
        identity: str | None,
        turn: int,
        status: int,
        response: bytes,
        due_at: float,
    ) -> None:
        self.ledger = ledger
        self.identity = identity
        self.turn = turn
        self.status = status
        self.response = response
        self.due_at = due_at


class MockLLM:
    """The behaviour, its answers and the ledger."""

    def __init__(self, behaviour: MockBehaviour) -> None:
        self.reset(behaviour)

    def reset(self, behaviour: MockBehaviour) -> None:
        """Start a new count; calls still in flight belong to the old one."""
        self.behaviour = behaviour
        self.ledger = CallLedger(behaviour.turns)
        self.answers = AnswerBook(behaviour.turns)
        self.errors = {
            status: error_response(status, behaviour.retry_after_s) for status in (429, 500)
        }

    def open_call(self, identity: str | None, body: bytes, now: float) -> Call:
        """Count a call, and say when it is due and with what."""
        turn = count_turns(body)
        tries = self.ledger.begin(identity, turn)
        fate = self.behaviour.decide(draw_key(identity or "anonymous"), turn, tries)
        if fate.status == 200:
            response = self.answers.answer(turn, self.ledger.calls, body)
        else:
            response = self.errors[fate.status]
        return Call(self.ledger, identity, turn, fate.status, response, now + fate.delay_s)

    def control(self, method: bytes, target: str, body: bytes) -> bytes:
        """Answer everything that is not a model call."""
        url = urlsplit(target)
        if url.path == "/stats":
            expected = parse_qs(url.query).get("expected")
            return http_response("200 OK", self._stats(int(expected[0]) if expected else None))
        if url.path == "/reset" and method == b"POST":
            return self._reset(body)
        if url.path.endswith("/models"):
            return http_response("200 OK", _MODELS)
        return http_response("404 Not Found", {"error": {"message": f"no such path: {url.path}"}})

    def _stats(self, expected: int | None) -> dict[str, Any]:
        return {**self.ledger.summary(expected), "behaviour": self.behaviour.to_json()}

    def _reset(self, body: bytes) -> bytes:
        try:
            behaviour = MockBehaviour.from_json(json.loads(body)) if body else self.behaviour
        except (TypeError, ValueError) as error:
            return http_response("400 Bad Request", {"error": {"message": str(error)}})
        self.reset(behaviour)
        return http_response("200 OK", behaviour.to_json())
