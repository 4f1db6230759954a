"""The state that all connections of the mock LLM server share, and one call.

Only the server's protocol uses it, to get the answer of a request and the time when it is due. In
the fault campaign every call is also written to a history, and calls can be disturbed while the
server runs. Must not: touch a socket.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from hashlib import blake2b
from time import monotonic
from typing import Any
from urllib.parse import parse_qs, urlsplit

from benchmarks.faults.histories import History
from benchmarks.mock_answers import (
    AnswerBook,
    count_turns,
    draw_key,
    error_response,
    http_response,
    tokens_of,
)
from benchmarks.mock_behaviour import MockBehaviour
from benchmarks.mock_ledger import CallLedger

_MODELS = {"object": "list", "data": [{"id": "mock", "object": "model", "owned_by": "mock"}]}
#: A latency longer than any client's timeout, for calls that are never answered.
_NEVER_S = 1e6


@dataclass(slots=True)
class Call:
    """One model call between its request and its response."""

    ledger: CallLedger
    identity: str | None
    turn: int
    status: int
    response: bytes
    due_at: float


class MockLLM:
    """The behaviour, its answers and the ledger.

    `POST /disturb {"rate_limited_s": 3, "rate_limited_share": 0.8, "silent_share": 0.1}`: for three
    seconds that share of calls gets a 429, and until the next such request that share of the other
    calls gets no answer.
    """

    def __init__(self, behaviour: MockBehaviour, history: History | None = None) -> None:
        self._history = history
        self._rate_limited_until = self._rate_limited_share = self._silent_share = 0.0
        self.reset(behaviour)

    def reset(self, behaviour: MockBehaviour) -> None:
        """Start a new count; calls still in flight belong to the old one."""
        self.behaviour = behaviour
        self.ledger = CallLedger(behaviour.turns)
        self.answers = AnswerBook(behaviour.turns, behaviour.context_tokens)
        self.errors = {
            status: error_response(status, behaviour.retry_after_s) for status in (429, 500)
        }

    def open_call(self, identity: str | None, body: bytes, now: float) -> Call:
        """Count a call, and return it with its response and the time when that is due."""
        turn = count_turns(body)
        tries = self.ledger.begin(identity, turn)
        status, delay_s = self.behaviour.decide(draw_key(identity or "anonymous"), turn, tries)
        if self._silent_share or now < self._rate_limited_until:
            status, delay_s = self._disturbed(f"{identity}/{turn}", status, delay_s, now)
        if status == 200:
            response = self.answers.answer(turn, self.ledger.calls, body)
        else:
            response = self.errors[status]
        if self._history is not None:
            self._history.note(
                "call",
                rollout=identity,
                turn=turn,
                status=status if delay_s < _NEVER_S else 0,
                tokens=tokens_of(response),
            )
        return Call(self.ledger, identity, turn, status, response, now + delay_s)

    def control(self, method: bytes, target: str, body: bytes) -> bytes:
        """Answer a request that is not a model call."""
        url = urlsplit(target)
        if url.path == "/stats":
            expected = parse_qs(url.query).get("expected")
            return http_response("200 OK", self._stats(int(expected[0]) if expected else None))
        if url.path == "/reset" and method == b"POST":
            return self._reset(body)
        if url.path == "/disturb" and method == b"POST":
            return self._disturb(**json.loads(body))
        if url.path.endswith("/models"):
            return http_response("200 OK", _MODELS)
        return http_response("404 Not Found", {"error": {"message": f"no such path: {url.path}"}})

    def _disturb(
        self,
        rate_limited_s: float = 0.0,
        rate_limited_share: float = 0.0,
        silent_share: float = 0.0,
    ) -> bytes:
        self._rate_limited_until = monotonic() + rate_limited_s
        self._rate_limited_share = rate_limited_share
        self._silent_share = silent_share
        return http_response("200 OK", {})

    def _disturbed(self, key: str, status: int, delay_s: float, now: float) -> tuple[int, float]:
        key = f"{self.behaviour.seed}/{key}/{self.ledger.calls}"
        digest = blake2b(key.encode(), digest_size=4).digest()
        draw = int.from_bytes(digest, "big") / 2**32
        if now < self._rate_limited_until and draw < self._rate_limited_share:
            return 429, 0.0
        if status == 200 and draw > 1 - self._silent_share:
            return status, _NEVER_S
        return status, delay_s

    def _stats(self, expected: int | None) -> dict[str, Any]:
        return {**self.ledger.summary(expected), "behaviour": self.behaviour.to_json()}

    def _reset(self, body: bytes) -> bytes:
        try:
            behaviour = MockBehaviour.from_json(json.loads(body)) if body else self.behaviour
        except (TypeError, ValueError) as error:
            return http_response("400 Bad Request", {"error": {"message": str(error)}})
        self.reset(behaviour)
        return http_response("200 OK", behaviour.to_json())
